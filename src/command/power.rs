//! `parity power`.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use dsv4_kernels::runtime::{BackendKind, Contract, Device, DeviceOptions};
use dsv4_reference::precision::Precision;

use super::Exit;
use super::seed::Seed;
use crate::bisect::sequential::{lower_bound, upper_bound};
use crate::case::Case;
use crate::judge::checks::CheckOptions;
use crate::judge::power::fails;
use crate::judge::truth::Truth;
use crate::operator::{Comparison, KernelRun, Operator, Prepared, Profile, registry};
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
    /// Seed of the sweep; `fresh` draws one, prints it and records it
    #[arg(long, default_value = "0", value_name = "N|fresh")]
    seed: Seed,
    /// Also judge so many fresh runs of each oracle, which round as the kernels do, as if kernels had written them, and
    /// count the false alarms
    #[arg(long, default_value_t = 0, value_name = "N")]
    draws: u32,
    /// Also write what each case could see, a line of JSON for each tensor
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Runs the oracle of every case of a sweep, and says which errors its verdicts would see. No kernel runs.
pub fn execute(arguments: &PowerArguments) -> Result<Exit> {
    arguments.seed.announce(None)?;
    let device = Device::open(BackendKind::Emulator, DeviceOptions::default())?;
    let recorder = Device::recording(device.environment().clone());
    let mut gathered = Gathered::default();
    let mut lines = String::new();
    let mut alarms = Alarms::default();
    for operator in registry::select(arguments.ops.as_deref())? {
        for (line, tensor, allowed, power) in of_operator(operator, arguments, &recorder, &mut alarms)? {
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
    if alarms.draws > 0 {
        println!("{alarms}");
    }
    Ok(Exit::Agreed)
}

/// Case, tensor, the bias that it is allowed, and the power.
type Seen = (serde_json::Value, String, [f64; 2], Power);

/// Verdicts over tensors that are right.
#[derive(Default)]
struct Alarms {
    draws: u64,
    failed: u64,
    of: Vec<String>,
}

impl std::fmt::Display for Alarms {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { draws, failed, of } = self;
        // 95 %, both ends of Clopper and Pearson.
        let interval = [lower_bound(*failed, *draws, 0.025), upper_bound(*failed, *draws, 0.025)];
        write!(
            f,
            "{failed} of {draws} tensors that are right were failed: {:.1e} to {:.1e} (95 %)",
            interval[0], interval[1]
        )?;
        of.iter().try_for_each(|of| write!(f, "\n  {of}"))
    }
}

/// Seeds of runs that no truth is made of.
const FRESH: u64 = 1 << 32;

impl Alarms {
    /// Judges fresh runs of an oracle, each with one of the choices that are the kernel's own business.
    fn count(
        &mut self,
        case: &Case,
        prepared: &dyn Prepared,
        truth: &Truth,
        written: &KernelRun,
        draws: u32,
    ) -> Result<()> {
        for draw in 0..u64::from(draws) {
            let run = truth.fresh(prepared, Precision::Nearest { seed: FRESH + draw })?;
            for found in written.tensors.iter().filter(|found| found.comparison == Comparison::Rounded) {
                let Some(index) = truth.exact.iter().position(|exact| exact.name == found.name) else { continue };
                let held = truth.held(index, found).map_err(anyhow::Error::msg)?;
                self.draws += 1;
                if fails(&truth.exact[index], &held, &held.steps.store(&run[index].values)) {
                    self.failed += 1;
                    self.of.push(format!("{} of {}", found.name, case.line()));
                }
            }
        }
        Ok(())
    }
}

fn of_operator(
    operator: &dyn Operator,
    arguments: &PowerArguments,
    recorder: &Device,
    alarms: &mut Alarms,
) -> Result<Vec<Seen>> {
    let options = SweepOptions {
        profile: arguments.profile,
        cases: arguments.cases,
        seed: arguments.seed.number(),
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
        alarms.count(&planned.case, &*prepared, &truth, &written, arguments.draws)?;
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
