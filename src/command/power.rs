//! `parity power`.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use dsv4_kernels::runtime::{BackendKind, Contract, Device, DeviceOptions};

use super::Exit;
use crate::judge::checks::CheckOptions;
use crate::judge::truth::Truth;
use crate::operator::{Comparison, Operator, Profile, registry};
use crate::record::Power;
use crate::report::power::{self, Gathered};
use crate::sweep::regressions::Regressions;
use crate::sweep::{self, SweepOptions};

/// Options of `parity power`.
#[derive(Debug, Args)]
pub struct PowerArguments {
    /// Operators, comma-separated; all when absent
    #[arg(long, value_name = "A,B")]
    ops: Option<String>,
    /// Size of the sweep
    #[arg(long, value_enum, default_value = "quick")]
    profile: Profile,
    /// Drawn cases for each operator; the profile's number when absent
    #[arg(long)]
    cases: Option<usize>,
    /// Seed of the sweep
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Also write what each case could see, a line of JSON for each tensor
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Runs the oracle of every case of a sweep, and says which errors its verdicts would see. No kernel runs.
pub fn execute(arguments: &PowerArguments) -> Result<Exit> {
    let device = Device::open(BackendKind::Emulator, DeviceOptions::default())?;
    let recorder = Device::recording(device.environment().clone());
    let mut gathered = Gathered::default();
    let mut lines = String::new();
    for operator in registry::select(arguments.ops.as_deref())? {
        for (line, tensor, allowed, power) in of_operator(operator, arguments, &recorder)? {
            let seen = serde_json::json!({ "case": line, "tensor": tensor, "bias_allowed": allowed, "power": power });
            lines += &seen.to_string();
            lines.push('\n');
            gathered.of(&operator.describe().name, &tensor).add(power);
        }
    }
    if let Some(path) = &arguments.out {
        std::fs::write(path, lines).with_context(|| format!("writing {}", path.display()))?;
    }
    print!("{}", power::table(&gathered.tensors));
    Ok(Exit::Agreed)
}

/// Case, tensor, the bias that it is allowed, and the power.
type Seen = (serde_json::Value, String, [f64; 2], Power);

fn of_operator(operator: &dyn Operator, arguments: &PowerArguments, recorder: &Device) -> Result<Vec<Seen>> {
    let options = SweepOptions {
        profile: arguments.profile,
        cases: arguments.cases,
        seed: arguments.seed,
        checks: CheckOptions { schedules: 0, triangulate: false },
        regressions: Regressions::new(Regressions::default_dir()),
        remember: false,
        time_budget: None,
    };
    let (planned, _) = sweep::plan(operator, Vec::new(), &options, recorder.environment())?;
    let mut seen = Vec::new();
    for planned in planned {
        let prepared = registry::prepare(&planned.case)?;
        let truth = Truth::of(&*prepared, prepared.arithmetic())?;
        let written = prepared.kernel(recorder, Contract::NAN)?;
        recorder.take_recorded();
        let mut known = BTreeSet::new();
        for found in written.tensors.iter().filter(|found| found.comparison == Comparison::Rounded) {
            let Some(index) = truth.exact.iter().position(|exact| exact.name == found.name) else { continue };
            let held = truth.held(index, found).map_err(anyhow::Error::msg)?;
            if let (true, Some(power)) = (known.insert(found.name), truth.power(index, &held)) {
                let allowed = held.yardstick.as_ref().map_or([f64::NAN; 2], |yardstick| yardstick.bias);
                seen.push((serde_json::to_value(&planned.case)?, found.name.to_owned(), allowed, power));
            }
        }
    }
    Ok(seen)
}
