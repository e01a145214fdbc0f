//! `parity replay`.

use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::Args;
use dsv4_runtime::{BackendKind, RuntimeError};

use super::{DeviceArguments, Exit, output};
use crate::case::Case;
use crate::judge::checks::CheckOptions;
use crate::operator::Profile;
use crate::operators::registry;
use crate::record::figures::{self, measure};
use crate::record::words::{self, printable};
use crate::record::{CaseRecord, Check, OperatorRecord, Origin, Verdict};
use crate::report::diagnosis::{self, terminal};
use crate::report::numbers::{counted, duration, one_minus_cosine};
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
    /// A case or its record as one line of JSON, or a file of such lines (records.jsonl, saved
    /// cases)
    ///
    /// FILE#DIGEST is one of them, as a failing sweep names it.
    #[arg(value_name = "CASE|FILE")]
    case: String,
    /// Random schedules to run each case under on the emulator [default: 4]
    #[arg(long, value_name = "N")]
    schedules: Option<u32>,
    /// Print each record as a line of JSON
    #[arg(long)]
    json: bool,
    /// Print every check with its measures, not only those that did not pass
    #[arg(long, conflicts_with = "json")]
    all: bool,
    #[command(flatten)]
    pub(super) device: DeviceArguments,
}

/// Runs the cases and prints what failed, or everything that is known about them.
pub fn execute(arguments: &ReplayArguments) -> Result<Exit> {
    let given = given(&arguments.case)?;
    // All are prepared before one runs: a malformed line is reported before minutes are spent.
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
    let may_be_a_race =
        device.environment().backend == BackendKind::Emulator && schedules < MANY_SCHEDULES;
    let mut exit = Exit::Agreed;
    let mut records = Vec::new();
    for Given { case, has_failed } in &given {
        let record = sweep::run_case(case, Origin::Given, &device, options);
        if arguments.json {
            outln!("{}", serde_json::to_string(&record)?);
        } else if arguments.all {
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
        records.push(record);
    }
    if !arguments.json {
        print_failures(&records, arguments.all);
    }
    Ok(exit)
}

/// Prints what failing cases share, then each failing case, and one count of the rest.
fn print_failures(records: &[CaseRecord], is_printed: bool) {
    let failing: Vec<&CaseRecord> =
        records.iter().filter(|record| record.verdict() != Verdict::Pass).collect();
    let mut names: Vec<&str> = failing.iter().map(|record| record.operator.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let operators: Vec<OperatorRecord> = names
        .iter()
        .filter_map(|name| registry::find(name).ok())
        .map(|operator| operator.describe())
        .collect();
    let diagnoses: Vec<_> = operators
        .iter()
        .filter_map(|operator| {
            let cases: Vec<_> =
                records.iter().filter(|record| record.operator == operator.name).collect();
            diagnosis::diagnose(Some(operator), &cases)
        })
        .collect();
    out!("{}", printable(&terminal::headed(&diagnoses)));
    for record in failing.iter().filter(|_| !is_printed) {
        let operator = operators.iter().find(|operator| operator.name == record.operator);
        outln!("{}, paths {}", record.operator, record.paths.join(", "));
        out!("{}", printable(&terminal::findings_text(operator, record, usize::MAX)));
        outln!("  replay: {}", printable(&record.replay));
    }
    let checks = records.iter().flat_map(|record| &record.checks);
    let passed = checks.filter(|check| check.verdict == Verdict::Pass).count() as u64;
    let agreed = (records.len() - failing.len()) as u64;
    let seconds: f64 =
        records.iter().map(|record| record.kernel_seconds + record.oracle_seconds).sum();
    outln!(
        "{} passed; {} agreed, in {}{}",
        counted(passed, "check"),
        if failing.is_empty() {
            counted(agreed, "case")
        } else {
            format!("{agreed} of {}", counted(records.len() as u64, "case"))
        },
        duration(seconds),
        if is_printed { "" } else { " (--all prints each check)" }
    );
}

/// Whether the directory of `--kernels` is missing or holds no kernels, as in a revision before the
/// kernels had this directory.
fn has_no_kernels(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref(),
        Some(RuntimeError::SourceMissing { .. } | RuntimeError::System { .. })
    )
}

/// Whether the kernels did not run, so that their results are unknown.
fn untestable(record: &CaseRecord) -> bool {
    record.paths.is_empty()
        && record
            .checks
            .iter()
            .any(|check| check.check == Check::Launch && check.verdict == Verdict::Error)
}

/// Enough schedules to show nearly every race, for a case that has failed and now agrees.
const MANY_SCHEDULES: u32 = 64;

fn other_schedules(schedules: u32) -> String {
    format!(
        "  this case has failed before, and agrees under the deterministic schedule and {schedules} random ones: a race \
         may need other schedules (--schedules {MANY_SCHEDULES})"
    )
}

/// A case, and whether it is known to have failed before.
struct Given {
    case: Case,
    has_failed: bool,
}

impl Given {
    /// Parses a case or a record of one. A bare case has failed before if it is among `remembered`.
    fn parse(line: &str, remembered: &Regressions) -> Result<Self> {
        if let Ok(record) = serde_json::from_str::<CaseRecord>(line) {
            let has_failed = record.verdict() != Verdict::Pass;
            return Ok(Self { case: serde_json::from_value(record.case)?, has_failed });
        }
        let case = Case::parse(line)?;
        // A folder of saved cases that cannot be read shows nothing about this case.
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
    // A file name may contain `#`.
    let named = argument.rsplit_once('#').filter(|_| !Path::new(argument).is_file());
    let (path, digest) =
        named.map_or((Path::new(argument), None), |(path, digest)| (Path::new(path), Some(digest)));
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("reading cases from {}", path.display()))?;
    let lines = text
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'));
    let mut given: Vec<Given> = lines
        .map(|(number, line)| {
            Given::parse(line, &remembered)
                .with_context(|| format!("{}:{}", path.display(), number + 1))
        })
        .collect::<Result<_>>()?;
    if let Some(digest) = digest {
        given.retain(|given| given.case.digest() == digest);
        // A record of the case and a later record of its shrunk case are one case.
        given.truncate(1);
        if given.is_empty() {
            bail!("{} holds no case `{digest}`", path.display());
        }
    }
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
                "        budget used {} (x{} sigma, {} of the value), 1-cos {}, norm ratio {}, \
                 rel L2 {}, max abs {}, ulp p50/p99/max {}/{}/{}",
                measure(m.budget_used, 3),
                measure(m.budget_multiple, 2),
                measure(m.budget_relative, 2),
                one_minus_cosine(m.cosine),
                measure(m.norm_ratio, 7),
                measure(m.relative_l2, 3),
                measure(m.max_abs, 3),
                measure(m.ulp_p50, 3),
                measure(m.ulp_p99, 3),
                measure(m.ulp_max, 3)
            );
            outln!(
                "        worst {:?}: kernel {}, oracle {}, allowed {}",
                m.worst.index,
                figures::element(m.worst.kernel),
                figures::element(m.worst.oracle),
                measure(m.worst.allowed, 3)
            );
        }
    }
    outln!("  kernel {:.3} s, oracle {:.3} s", record.kernel_seconds, record.oracle_seconds);
    outln!("  {}", printable(&record.replay));
}
