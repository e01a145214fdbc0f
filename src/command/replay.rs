//! `parity replay`.

use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::Args;
use dsv4_kernels::runtime::{BackendKind, RuntimeError};

use super::{DeviceArguments, Exit, output};
use crate::case::Case;
use crate::judge::checks::CheckOptions;
use crate::operator::{Profile, registry};
use crate::record::words::{self, printable};
use crate::record::{CaseRecord, Origin, Verdict};
use crate::sweep;
use crate::sweep::regressions::Regressions;

/// Options of `parity replay`.
#[derive(Debug, Args)]
#[command(after_help = "\
git bisect run can use it. Try the command once first: git takes 2 and 3 for a bad revision, too.

    git bisect run parity replay --backend emulator --kernels kernels/cuda CASE

Exit codes: 0 every case agreed, 1 one disagreed, 2 bad usage or input, 3 the demanded backend is missing, 125 none \
disagreed, and the kernels of one are missing, do not compile or cannot be run.")]
pub struct ReplayArguments {
    /// Case or record as one line of JSON, or a file of such lines (records.jsonl, saved cases)
    #[arg(value_name = "CASE|FILE")]
    case: String,
    /// Random schedules to run each case under on the emulator [default: 4]
    #[arg(long, value_name = "N")]
    schedules: Option<u32>,
    /// Print each record as a line of JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(super) device: DeviceArguments,
}

/// Runs the cases and prints everything that is known about them.
pub fn execute(arguments: &ReplayArguments) -> Result<Exit> {
    let given = given(&arguments.case)?;
    // All are prepared before one is run: a malformed line is reported before minutes are spent.
    for Given { case, .. } in &given {
        registry::prepare(case)?;
    }
    let device = match arguments.device.open() {
        Ok(device) => device,
        Err(error) if has_no_kernels(&error) => {
            errln!("{} {}", output::bad("parity:"), printable(&words::of_error(&error)));
            return Ok(Exit::Untestable);
        }
        Err(error) => return Err(error),
    };
    let schedules = super::schedules(arguments.schedules, Profile::Ci, &device);
    let options = CheckOptions::everything(schedules);
    let may_be_a_race = device.environment().backend == BackendKind::Emulator && schedules < MANY_SCHEDULES;
    let mut exit = Exit::Agreed;
    for Given { case, has_failed } in &given {
        let record = sweep::run_case(case, Origin::Given, &device, options);
        if arguments.json {
            outln!("{}", serde_json::to_string(&record)?);
        } else {
            print_record(&record);
        }
        if *has_failed && may_be_a_race && record.verdict() == Verdict::Pass {
            errln!("{}", other_schedules(schedules));
        }
        if untestable(&record) {
            exit = if exit == Exit::Agreed { Exit::Untestable } else { exit };
        } else if record.verdict() != Verdict::Pass {
            exit = Exit::Disagreed;
        }
    }
    Ok(exit)
}

/// Whether the directory of `--kernels` is missing or holds none: a revision from before they stood there.
fn has_no_kernels(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(RuntimeError::SourceMissing { .. } | RuntimeError::System { .. }))
}

/// Whether the kernels never ran: what they would have computed is not known.
fn untestable(record: &CaseRecord) -> bool {
    record.paths.is_empty()
        && record.checks.iter().any(|check| check.check == "launch" && check.verdict == Verdict::Error)
}

/// As many schedules as show nearly every race, for a case that has failed and now agrees.
const MANY_SCHEDULES: u32 = 64;

fn other_schedules(schedules: u32) -> String {
    format!(
        "  this case has failed before, and agrees under the deterministic schedule and {schedules} random ones: a race \
         may need other schedules (--schedules {MANY_SCHEDULES})"
    )
}

/// A case, and whether it is known to have failed once.
struct Given {
    case: Case,
    has_failed: bool,
}

impl Given {
    /// Parses a case, or the record of one. A bare case has failed once if it is among `remembered`.
    fn parse(line: &str, remembered: &Regressions) -> Result<Self> {
        if let Ok(record) = serde_json::from_str::<CaseRecord>(line) {
            let has_failed = record.verdict() != Verdict::Pass;
            return Ok(Self { case: serde_json::from_value(record.case)?, has_failed });
        }
        let case = Case::parse(line)?;
        // A folder of remembered cases that cannot be read says nothing about this one.
        let has_failed = remembered.load(&case.operator).is_ok_and(|cases| cases.contains(&case));
        Ok(Self { case, has_failed })
    }
}

pub(super) fn cases_of(argument: &str) -> Result<Vec<Case>> {
    Ok(given(argument)?.into_iter().map(|given| given.case).collect())
}

fn given(argument: &str) -> Result<Vec<Given>> {
    let remembered = Regressions::new(Regressions::default_dir());
    if argument.trim_start().starts_with('{') {
        return Ok(vec![Given::parse(argument, &remembered)?]);
    }
    let path = Path::new(argument);
    let text = std::fs::read_to_string(path).with_context(|| format!("reading cases from {}", path.display()))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'));
    let given: Vec<Given> = lines
        .map(|(number, line)| {
            Given::parse(line, &remembered).with_context(|| format!("{}:{}", path.display(), number + 1))
        })
        .collect::<Result<_>>()?;
    if given.is_empty() {
        bail!("{} holds no case", path.display());
    }
    Ok(given)
}

fn print_record(record: &CaseRecord) {
    outln!("{}", printable(&record.case.to_string()));
    outln!("  paths {}", record.paths.join(", "));
    for check in &record.checks {
        let verdict = match check.verdict {
            Verdict::Pass => output::good("pass"),
            Verdict::Fail => output::bad("FAIL"),
            Verdict::Error => output::bad("ERROR"),
        };
        outln!(
            "  {verdict:5} {:22} {:12} {:>9} compared  {}",
            check.check,
            check.tensor,
            check.compared,
            printable(&check.message)
        );
        if let Some(m) = &check.metrics {
            outln!(
                "        budget used {:.3} (x{:.1} sigma, {:.1e} of the value), 1-cos {:.1e}, norm ratio {:.6}, \
                 rel L2 {:.2e}, max abs {:.2e}, ulp p50/p99/max {:.2}/{:.2}/{:.2}",
                m.budget_used,
                m.budget_multiple,
                m.budget_relative,
                1.0 - m.cosine,
                m.norm_ratio,
                m.relative_l2,
                m.max_abs,
                m.ulp_p50,
                m.ulp_p99,
                m.ulp_max
            );
            outln!(
                "        worst {:?}: kernel {:e}, oracle {:e}, allowed {:.3e}",
                m.worst.index,
                m.worst.kernel,
                m.worst.oracle,
                m.worst.allowed
            );
        }
    }
    outln!("  kernel {:.3} s, oracle {:.3} s", record.kernel_seconds, record.oracle_seconds);
    outln!("  {}", printable(&record.replay));
}
