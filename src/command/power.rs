//! `parity power`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use dsv4_reference::precision::Precision;
use dsv4_runtime::{BackendKind, Contract, Device, HostTensor};
use serde_json::json;

use super::sweep::SweepArguments;
use super::{Exit, MemoryArguments, output};
use crate::bisect::sequential::{lower_bound, upper_bound};
use crate::case::Case;
use crate::judge::checks::CheckOptions;
use crate::judge::power::fails;
use crate::judge::truth::Truth;
use crate::mutants::matrix::session::planted;
use crate::mutants::planted::Mutant;
use crate::operator::WORKING_RUNS;
use crate::operator::{
    AnyOperator, Comparison, KernelRun, KernelTensor, OracleTensor, PreparedCase,
};
use crate::operators::registry;
use crate::record::{Power, figures};
use crate::report::power::{self, Gathered, TensorPower};
use crate::sweep;

/// Options of `parity power`.
#[derive(Debug, Args)]
pub struct PowerArguments {
    /// Operators, comma-separated [default: all]
    #[arg(long, value_name = "A,B")]
    ops: Option<String>,
    #[command(flatten)]
    sweep: SweepArguments,
    /// Also judge N new runs of each oracle as if kernels had written them, and count the false
    /// alarms
    ///
    /// The runs round as the kernels do.
    #[arg(long, default_value_t = 0, value_name = "N")]
    draws: u32,
    /// Also run the kernels with these planted bugs, comma-separated, once on each case of their
    /// operators
    ///
    /// For each tensor: the share of the cases in which it is failed, of those in which the bug
    /// changes it.
    #[arg(long, value_name = "ID,ID", value_delimiter = ',')]
    mutants: Vec<String>,
    /// Also write what each case could see, a line of JSON for each tensor
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Also write a page: which bias each rule sees and how many correct tensors it rejects, then
    /// every tensor
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(super) memory: MemoryArguments,
}

/// The legend of the table's columns.
const LEGEND: &str = "\
Columns: the smallest uniform relative error (bias) that a verdict rejects, as
2^-k; - where it rejects none.
  cases         cases in which there was something to see
  powerless     cases that show no agreement: an error of 10 % would pass
  best          bias seen in the best case
  half of them  bias seen in half of the cases
  9 of 10       bias seen in nine of ten cases
  element       error of one element that is seen in half of the cases, over the
                root mean square of the tensor
  assert_close, cosine 0.999, FlashMLA, FlashAttention
                bias that these rules see in half of the cases; alarms: cases in
                which they reject a correct tensor
A tensor marked (saved) is a gradient, judged by what the kernel itself saved.";

/// Runs the oracle of every case of a sweep, and reports which errors its verdicts would see. Only
/// kernels with the requested mutants run.
pub fn execute(arguments: &PowerArguments) -> Result<Exit> {
    arguments.sweep.seed.announce(None)?;
    let device = Device::open(BackendKind::Emulator, dsv4_kernels::device_options())?;
    let recorder = Device::recording(device.environment().clone(), dsv4_kernels::sources());
    let mut gathered = Gathered::default();
    let mut lines = String::new();
    let mut alarms = Alarms::default();
    let mut bugs = Bugs::plant(&arguments.mutants, &device)?;
    for operator in registry::select(arguments.ops.as_deref())? {
        for (line, tensor, allowed, power) in
            of_operator(operator, arguments, &recorder, &mut alarms, &mut bugs)?
        {
            let seen = serde_json::json!({ "case": line, "tensor": tensor, "bias_allowed": allowed, "power": power });
            lines += &seen.to_string();
            lines.push('\n');
            gathered.of(operator.name(), &tensor).add(power);
        }
    }
    if let Some(path) = &arguments.out {
        std::fs::write(path, lines).with_context(|| format!("writing {}", path.display()))?;
    }
    if let Some(path) = &arguments.markdown {
        let environment = device.environment();
        let made = format!(
            "Made by `{}` at {} on {}.",
            arguments.sweep.seed.command(),
            env!("PARITY_COMMIT"),
            environment.device
        );
        let drawn = (alarms.draws > 0)
            .then(|| alarms.to_string().lines().next().unwrap_or_default().to_owned());
        std::fs::write(path, power::markdown(&gathered.tensors, &made, drawn.as_deref()))
            .with_context(|| format!("writing {}", path.display()))?;
    }
    if arguments.json {
        let tensors: Vec<_> = gathered.tensors.iter().map(as_json).collect();
        output::json(
            &json!({ "tensors": tensors, "mutants": bugs.as_json(), "alarms": alarms.as_json() }),
        )?;
        return Ok(Exit::Agreed);
    }
    out!("{}", power::table(&gathered.tensors));
    bugs.print();
    if alarms.draws > 0 {
        outln!("{alarms}");
    }
    detailln!("\n{}", output::faint(LEGEND));
    Ok(Exit::Agreed)
}

/// A row of the table: what each rule sees in the best case, in half of the cases, and in nine of
/// ten cases.
fn as_json(tensor: &TensorPower) -> serde_json::Value {
    let rule = |(name, rule): &power::Rule| {
        let [best, half, most] = [0.0, 0.5, 0.9].map(|share| tensor.seen_in(share, *rule).0);
        let alarms = tensor.seen_in(0.5, *rule).1;
        (
            (*name).to_owned(),
            json!({ "best": best, "half": half, "nine_of_ten": most, "alarms": alarms }),
        )
    };
    json!({
        "operator": tensor.operator,
        "tensor": tensor.tensor,
        "cases": tensor.cases.len(),
        "powerless": tensor.powerless,
        "element": tensor.element(),
        "rules": power::RULES.iter().map(rule).collect::<serde_json::Map<_, _>>(),
    })
}

/// Case, tensor, the allowed bias, and the power.
type Seen = (serde_json::Value, String, [f64; 2], Power);

/// Verdicts over correct tensors.
#[derive(Default)]
struct Alarms {
    draws: u64,
    failed: u64,
    of: Vec<String>,
}

impl Alarms {
    /// The 95 % interval of Clopper and Pearson.
    fn interval(&self) -> [f64; 2] {
        [lower_bound(self.failed, self.draws, 0.025), upper_bound(self.failed, self.draws, 0.025)]
    }

    fn as_json(&self) -> serde_json::Value {
        let Self { draws, failed, of } = self;
        let interval = (*draws > 0).then(|| self.interval());
        json!({ "draws": draws, "failed": failed, "interval_95": interval, "of": of })
    }
}

impl std::fmt::Display for Alarms {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { draws, failed, of } = self;
        let interval = self.interval();
        write!(
            f,
            "{failed} of {draws} tensors that are right were failed: {} to {} (95 %)",
            figures::measure(interval[0], 2),
            figures::measure(interval[1], 2)
        )?;
        of.iter().try_for_each(|of| write!(f, "\n  {of}"))
    }
}

/// Seeds of runs that no truth uses.
const FRESH: u64 = 1 << 32;

impl Alarms {
    /// Judges new runs of an oracle, each with one of the choices that a kernel may make.
    fn count(
        &mut self,
        case: &Case,
        prepared: &dyn PreparedCase,
        truth: &Truth,
        written: &KernelRun,
        draws: u32,
    ) -> Result<()> {
        for draw in 0..u64::from(draws) {
            let run = truth.fresh(prepared, Precision::Nearest { seed: FRESH + draw })?;
            for found in
                written.tensors.iter().filter(|found| found.comparison == Comparison::Rounded)
            {
                let Some(index) = truth.exact.iter().position(|exact| exact.name == found.name)
                else {
                    continue;
                };
                let held = truth.held(index, found)?;
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

/// Kernels with bugs, and in how many cases each of their tensors failed.
struct Bugs {
    right: Device,
    planted: Vec<(Mutant, Device)>,
    /// By mutant and tensor: the cases in which the bug changed the tensor, and how many of them
    /// failed.
    seen: BTreeMap<(String, String), [u64; 2]>,
}

impl Bugs {
    fn plant(ids: &[String], device: &Device) -> Result<Self> {
        let known = if ids.is_empty() { Vec::new() } else { planted(None)?.1 };
        let plant = |id: &String| {
            let mutant = known.iter().find(|mutant| mutant.id == *id);
            let mutant =
                mutant.with_context(|| format!("--mutants: no planted mutant is called `{id}`"))?;
            Ok((mutant.clone(), device.with_tree(mutant.plant(device.tree())?)))
        };
        let planted = ids.iter().map(plant).collect::<Result<_>>()?;
        Ok(Self { right: device.with_tree(device.tree().clone()), planted, seen: BTreeMap::new() })
    }

    fn run(&mut self, prepared: &dyn PreparedCase, truth: &Truth) -> Result<()> {
        let of_operator = |(mutant, _): &&(Mutant, Device)| mutant.operator == prepared.operator();
        if !self.planted.iter().any(|one| of_operator(&one)) {
            return Ok(());
        }
        let right = prepared.kernel(&self.right, Contract::NAN)?;
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
                    self.seen.entry((mutant.id.clone(), found.name.to_owned())).or_default();
                *cases += 1;
                *failed += u64::from(fails(&truth.exact[index], &held, &written));
            }
        }
        Ok(())
    }

    fn as_json(&self) -> Vec<serde_json::Value> {
        let one = |((mutant, tensor), [cases, failed]): (&(String, String), &[u64; 2])| json!({ "mutant": mutant, "tensor": tensor, "cases": cases, "failed": failed });
        self.seen.iter().map(one).collect()
    }

    fn print(&self) {
        for ((mutant, tensor), [cases, failed]) in &self.seen {
            let share = 100.0 * *failed as f64 / *cases as f64;
            outln!(
                "{mutant}: {tensor} failed in {failed} of the {cases} cases that it changes ({share:.0} %)"
            );
        }
    }
}

fn of_operator(
    operator: &AnyOperator,
    arguments: &PowerArguments,
    recorder: &Device,
    alarms: &mut Alarms,
    bugs: &mut Bugs,
) -> Result<Vec<Seen>> {
    let options = arguments.sweep.options(CheckOptions::of_kernels(0), None);
    let (planned, _) = sweep::plan(operator, Vec::new(), &options, recorder.environment())?;
    let mut seen = Vec::new();
    for planned in planned {
        let prepared = registry::prepare(&planned.case)?;
        let truth = Truth::of(&*prepared, prepared.arithmetic())?;
        let mut written = prepared.kernel(recorder, Contract::NAN)?;
        recorder.take_recorded();
        bugs.run(&*prepared, &truth)?;
        alarms.count(&planned.case, &*prepared, &truth, &written, arguments.draws)?;
        let line = serde_json::to_value(&planned.case)?;
        seen_by(&truth, &written, (&line, &str::to_owned), &mut seen)?;
        // Saved as by a kernel that rounds as the oracle does.
        for (found, run) in matching(&mut written, &truth.working[WORKING_RUNS]) {
            found.tensor =
                HostTensor::from_f64(found.tensor.dtype, &found.tensor.shape, &run.values);
        }
        if let Some(truth) = Truth::of_saved(&*prepared, &written, prepared.arithmetic())? {
            seen_by(&truth, &written, (&line, &power::given_what_was_saved), &mut seen)?;
        }
    }
    Ok(seen)
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

/// What the verdicts of a truth see. `called` makes the name of each tensor.
fn seen_by(
    truth: &Truth,
    written: &KernelRun,
    (line, called): (&serde_json::Value, &dyn Fn(&str) -> String),
    seen: &mut Vec<Seen>,
) -> Result<()> {
    let mut known = BTreeSet::new();
    for found in written.tensors.iter().filter(|found| found.comparison == Comparison::Rounded) {
        let Some(index) = truth.exact.iter().position(|exact| exact.name == found.name) else {
            continue;
        };
        let held = truth.held(index, found)?;
        if let (true, Some(power)) = (known.insert(found.name), truth.power(index, &held)) {
            let allowed = held.yardstick.as_ref().map_or([f64::NAN; 2], |yardstick| yardstick.bias);
            seen.push((line.clone(), called(found.name), allowed, power));
        }
    }
    Ok(())
}
