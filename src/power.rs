//! Which errors the verdicts of a sweep would see.
//!
//! The oracle of every case runs, and its verdicts are asked for the smallest error that they
//! reject. Only kernels with planted bugs run.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use dsv4_reference::precision::Precision;
use dsv4_runtime::{BackendKind, Contract, Device, Environment, HostTensor};
use serde_json::Value;

use crate::case::Case;
use crate::judge::power::fails;
use crate::judge::truth::Truth;
use crate::mutants::matrix::session::planted;
use crate::mutants::planted::Mutant;
use crate::operator::{
    AnyOperator, Comparison, KernelRun, KernelTensor, OracleTensor, PreparedCase, WORKING_RUNS,
};
use crate::operators::registry;
use crate::record::Power;
use crate::sweep::{self, SweepOptions};

/// What the verdict over one tensor of a case would see.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// The case's line.
    pub case: Value,
    /// Tensor.
    pub tensor: String,
    /// Whether it is a gradient, judged by what the kernel itself saved.
    pub given_what_was_saved: bool,
    /// The bias that the yardstick allows; NaN where nothing is known of it.
    pub bias_allowed: [f64; 2],
    /// The smallest errors that it rejects.
    pub power: Power,
}

/// Verdicts over correct tensors.
#[derive(Clone, Debug, Default)]
pub struct Alarms {
    /// Tensors that were judged.
    pub draws: u64,
    /// Tensors that were rejected.
    pub failed: u64,
    /// Tensor and case of each rejected one.
    pub of: Vec<String>,
}

/// By mutant and tensor: the cases in which the bug changed the tensor, and how many of these
/// failed.
pub type Bugs = BTreeMap<(String, String), [u64; 2]>;

/// The cases of some operators, one operator after the other.
pub struct Session {
    device: Device,
    recorder: Device,
    draws: u32,
    planted: Vec<(Mutant, Device)>,
    /// What was found of new runs of the oracles.
    pub alarms: Alarms,
    /// What was found of the planted bugs.
    pub bugs: Bugs,
}

/// Seeds of runs that no truth uses.
const FRESH: u64 = 1 << 32;

impl Session {
    /// Prepares the kernels with these planted bugs. `draws` new runs of each oracle are judged as
    /// if kernels had written them.
    ///
    /// # Errors
    /// No emulator; an unknown mutant.
    pub fn open(draws: u32, mutants: &[String]) -> Result<Self> {
        let device = Device::open(BackendKind::Emulator, dsv4_kernels::device_options())?;
        let recorder = Device::recording(device.environment().clone(), dsv4_kernels::sources());
        let known = if mutants.is_empty() { Vec::new() } else { planted(None)?.1 };
        let plant = |id: &String| {
            let mutant = known.iter().find(|mutant| mutant.id == *id);
            let mutant =
                mutant.with_context(|| format!("--mutants: no planted mutant is called `{id}`"))?;
            Ok((mutant.clone(), device.with_tree(mutant.plant(device.tree())?)))
        };
        let planted = mutants.iter().map(plant).collect::<Result<_>>()?;
        let (alarms, bugs) = (Alarms::default(), Bugs::new());
        Ok(Self { device, recorder, draws, planted, alarms, bugs })
    }

    /// The device that runs the kernels with bugs.
    pub fn environment(&self) -> &Environment {
        self.device.environment()
    }

    /// What the verdicts over the cases of an operator would see.
    ///
    /// # Errors
    /// A case that cannot be planned or prepared, and an oracle or a kernel that does not run.
    pub fn operator(
        &mut self,
        operator: &AnyOperator,
        options: &SweepOptions,
    ) -> Result<Vec<Verdict>> {
        let (planned, _) = sweep::plan(operator, Vec::new(), options, self.recorder.environment())?;
        let mut verdicts = Vec::new();
        for planned in planned {
            verdicts.extend(self.case(&planned.case)?);
        }
        Ok(verdicts)
    }

    fn case(&mut self, case: &Case) -> Result<Vec<Verdict>> {
        let prepared = registry::prepare(case)?;
        let truth = Truth::of(&*prepared, prepared.arithmetic())?;
        let mut written = prepared.kernel(&self.recorder, Contract::NAN)?;
        self.recorder.take_recorded();
        self.run_bugs(&*prepared, &truth)?;
        self.count_alarms(case, &*prepared, &truth, &written)?;
        let line = serde_json::to_value(case)?;
        let mut verdicts = verdicts(&truth, &written, &line, false)?;
        // Saved as by a kernel that rounds as the oracle does.
        for (found, run) in matching(&mut written, &truth.working[WORKING_RUNS]) {
            found.tensor =
                HostTensor::from_f64(found.tensor.dtype, &found.tensor.shape, &run.values);
        }
        if let Some(truth) = Truth::of_saved(&*prepared, &written, prepared.arithmetic())? {
            verdicts.extend(self::verdicts(&truth, &written, &line, true)?);
        }
        Ok(verdicts)
    }

    /// Judges new runs of an oracle, each with one of the choices that a kernel may make.
    fn count_alarms(
        &mut self,
        case: &Case,
        prepared: &dyn PreparedCase,
        truth: &Truth,
        written: &KernelRun,
    ) -> Result<()> {
        for draw in 0..u64::from(self.draws) {
            let run = truth.fresh(prepared, Precision::Nearest { seed: FRESH + draw })?;
            for (index, found) in rounded(truth, written) {
                let held = truth.held(index, found)?;
                self.alarms.draws += 1;
                if fails(&truth.exact[index], &held, &held.steps.store(&run[index].values)) {
                    self.alarms.failed += 1;
                    self.alarms.of.push(format!("{} of {}", found.name, case.line()));
                }
            }
        }
        Ok(())
    }

    /// Runs the kernels with bugs on a case of their operator.
    fn run_bugs(&mut self, prepared: &dyn PreparedCase, truth: &Truth) -> Result<()> {
        let of_operator = |(mutant, _): &&(Mutant, Device)| mutant.operator == prepared.operator();
        if !self.planted.iter().any(|one| of_operator(&one)) {
            return Ok(());
        }
        let right = prepared.kernel(&self.device, Contract::NAN)?;
        for (mutant, device) in self.planted.iter().filter(of_operator) {
            let wrong = prepared.kernel(device, Contract::NAN)?;
            for (found, right) in wrong.tensors.iter().zip(&right.tensors) {
                let index = truth.exact.iter().position(|exact| exact.name == found.name);
                // Sums by atomics differ from run to run, with a bug and without.
                let rounded = found.comparison == Comparison::Rounded && found.deterministic;
                // If both are NaN, their bits depend on the host and not on the kernel.
                let same = |(a, b): (f64, f64)| a == b || a.is_nan() && b.is_nan();
                let (written, meant) = (found.tensor.to_f64(), right.tensor.to_f64());
                let changed = !written.iter().copied().zip(meant).all(same);
                let (Some(index), true) = (index, rounded && changed) else { continue };
                let held = truth.held(index, found)?;
                let [cases, failed] =
                    self.bugs.entry((mutant.id.clone(), found.name.to_owned())).or_default();
                *cases += 1;
                *failed += u64::from(fails(&truth.exact[index], &held, &written));
            }
        }
        Ok(())
    }
}

/// The floating-point tensors of a run, each with the oracle's.
fn matching<'r>(
    written: &'r mut KernelRun,
    oracle: &'r [OracleTensor],
) -> impl Iterator<Item = (&'r mut KernelTensor, &'r OracleTensor)> {
    let rounded =
        written.tensors.iter_mut().filter(|found| found.comparison == Comparison::Rounded);
    rounded.filter_map(|found| oracle.iter().find(|of| of.name == found.name).map(|of| (found, of)))
}

/// The floating-point tensors of a run that a truth has, each with its number there.
fn rounded<'r>(
    truth: &'r Truth,
    written: &'r KernelRun,
) -> impl Iterator<Item = (usize, &'r KernelTensor)> {
    let rounded = written.tensors.iter().filter(|found| found.comparison == Comparison::Rounded);
    rounded.filter_map(|found| {
        let index = truth.exact.iter().position(|exact| exact.name == found.name)?;
        Some((index, found))
    })
}

/// What the verdicts of a truth see.
fn verdicts(
    truth: &Truth,
    written: &KernelRun,
    line: &Value,
    given_what_was_saved: bool,
) -> Result<Vec<Verdict>> {
    let (mut known, mut verdicts) = (BTreeSet::new(), Vec::new());
    for (index, found) in rounded(truth, written) {
        let held = truth.held(index, found)?;
        if let (true, Some(power)) = (known.insert(found.name), truth.power(index, &held)) {
            verdicts.push(Verdict {
                case: line.clone(),
                tensor: found.name.to_owned(),
                given_what_was_saved,
                bias_allowed: held.yardstick.as_ref().map_or([f64::NAN; 2], |rule| rule.bias),
                power,
            });
        }
    }
    Ok(verdicts)
}
