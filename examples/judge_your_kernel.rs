//! Judge your own kernel, in Rust, with the cases, oracles and checks of an operator.
//!
//!     cargo run --example judge_your_kernel
//!
//! A [`Runner`] runs the kernels of a case. This one runs the project's RMSNorm on the emulator and
//! then multiplies by the square root of one half: a wrong kernel, which the checks must reject.

use std::error::Error;

use dsv4_parity::case::Case;
use dsv4_parity::judge::checks::{self, CheckOptions};
use dsv4_parity::judge::runner::{RunError, Runner};
use dsv4_parity::operator::{KernelRun, OracleTensor, PreparedCase};
use dsv4_parity::operators::registry;
use dsv4_parity::record::Verdict;
use dsv4_runtime::{BackendKind, Contract, Device, Environment, HostTensor};

/// A kernel that scales `y` by `factor`.
struct Scaled {
    device: Device,
    factor: f64,
}

impl Runner for Scaled {
    fn run(
        &self,
        prepared: &dyn PreparedCase,
        exact: &[OracleTensor],
        contract: Contract,
    ) -> Result<KernelRun, RunError> {
        let mut run = self.device.run(prepared, exact, contract)?;
        for written in run.tensors.iter_mut().filter(|written| written.name == "y") {
            let scaled: Vec<f64> =
                written.tensor.to_f64().iter().map(|value| value * self.factor).collect();
            written.tensor =
                HostTensor::from_f64(written.tensor.dtype, &written.tensor.shape, &scaled);
        }
        Ok(run)
    }

    fn environment(&self) -> &Environment {
        self.device.environment()
    }

    fn kernels(&self) -> (String, String) {
        ("an example".to_owned(), String::new())
    }

    fn replay_command(&self, _: &Case, _: u32) -> String {
        "cargo run --example judge_your_kernel".to_owned()
    }
}

/// Runs the first typical case and returns what failed.
///
/// # Errors
/// No emulator, or no case.
pub fn judge(factor: f64) -> Result<Vec<String>, Box<dyn Error>> {
    let kernel = Scaled {
        device: Device::open(BackendKind::Emulator, dsv4_kernels::device_options())?,
        factor,
    };
    let operator = registry::find("rms_norm")?;
    let case = operator.typical_cases().into_iter().next().ok_or("no typical case")?;
    let outcome = checks::run(&*operator.prepare(&case)?, &kernel, CheckOptions::of_kernels(0));
    let failed = outcome.checks.iter().filter(|check| check.verdict != Verdict::Pass);
    Ok(failed.map(|check| format!("{} {}: {}", check.check, check.tensor, check.message)).collect())
}

fn main() -> Result<(), Box<dyn Error>> {
    for factor in [1.0, 0.5_f64.sqrt()] {
        println!("y times {factor}: {:#?}", judge(factor)?);
    }
    Ok(())
}
