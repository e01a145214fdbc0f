//! `parity power`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use serde_json::json;

use super::sweep::SweepArguments;
use super::{Exit, MemoryArguments, output};
use crate::judge::checks::CheckOptions;
use crate::operators::registry;
use crate::power::{Alarms, Session};
use crate::report::power::{self, Gathered, TensorPower};

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
    let mut session = Session::open(arguments.draws, &arguments.mutants)?;
    let options = arguments.sweep.options(CheckOptions::of_kernels(0), None);
    let (mut gathered, mut lines) = (Gathered::default(), String::new());
    for operator in registry::select(arguments.ops.as_deref())? {
        for verdict in session.operator(operator, &options)? {
            let tensor = power::name_of(&verdict);
            let allowed = verdict.bias_allowed;
            let seen = json!({ "case": verdict.case, "tensor": tensor, "bias_allowed": allowed, "power": verdict.power });
            lines += &format!("{seen}\n");
            gathered.of(operator.name(), &tensor).add(verdict.power);
        }
    }
    if let Some(path) = &arguments.out {
        write(path, &lines)?;
    }
    if let Some(path) = &arguments.markdown {
        write(path, &page(arguments, &session, &gathered.tensors))?;
    }
    if arguments.json {
        let tensors: Vec<_> = gathered.tensors.iter().map(as_json).collect();
        let alarms = alarms_as_json(&session.alarms);
        output::json(
            &json!({ "tensors": tensors, "mutants": bugs_as_json(&session), "alarms": alarms }),
        )?;
        return Ok(Exit::Agreed);
    }
    out!("{}", power::table(&gathered.tensors));
    print_bugs(&session);
    if session.alarms.draws > 0 {
        outln!("{}", power::alarms(&session.alarms));
        session.alarms.of.iter().for_each(|of| outln!("  {of}"));
    }
    detailln!("\n{}", output::faint(LEGEND));
    Ok(Exit::Agreed)
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}

fn page(arguments: &PowerArguments, session: &Session, tensors: &[TensorPower]) -> String {
    let made = format!(
        "Made by `{}` at {} on {}.",
        arguments.sweep.seed.command(),
        env!("PARITY_COMMIT"),
        session.environment().device
    );
    let alarms = (session.alarms.draws > 0).then(|| power::alarms(&session.alarms));
    power::markdown(tensors, &made, alarms.as_deref())
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

fn alarms_as_json(alarms: &Alarms) -> serde_json::Value {
    let Alarms { draws, failed, of } = alarms;
    let interval = (*draws > 0).then(|| power::interval(alarms));
    json!({ "draws": draws, "failed": failed, "interval_95": interval, "of": of })
}

fn bugs_as_json(session: &Session) -> Vec<serde_json::Value> {
    let bugs = session.bugs.iter();
    let one = bugs.map(|((mutant, tensor), [cases, failed])| json!({ "mutant": mutant, "tensor": tensor, "cases": cases, "failed": failed }));
    one.collect()
}

fn print_bugs(session: &Session) {
    for ((mutant, tensor), [cases, failed]) in &session.bugs {
        let share = 100.0 * *failed as f64 / *cases as f64;
        outln!(
            "{mutant}: {tensor} failed in {failed} of the {cases} cases that it changes ({share:.0} %)"
        );
    }
}
