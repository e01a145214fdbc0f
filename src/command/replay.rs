//! `parity replay`.

use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::Args;
use dsv4_kernels::runtime::RuntimeError;

use super::{DeviceArguments, Exit};
use crate::case::Case;
use crate::judge::checks::CheckOptions;
use crate::operator::registry;
use crate::record::{CaseRecord, Origin, Verdict};
use crate::sweep;

/// Options of `parity replay`.
#[derive(Debug, Args)]
#[command(after_help = "\
Exit codes: 0 every case agreed, 1 one disagreed, 2 bad usage or input, 3 the demanded backend is missing,
125 none disagreed, and the kernels of one are missing, do not compile or cannot be run. So git bisect run can
use it:

    git bisect run parity replay --backend emulator --kernels kernels/cuda CASE

Try the command once first: git takes 2 and 3 for a bad revision, too.")]
pub struct ReplayArguments {
    /// A case as one line of JSON, or a file with one case a line
    #[arg(value_name = "CASE|FILE")]
    case: String,
    /// Random schedules to run under, beyond the deterministic one (emulator)
    #[arg(long, default_value_t = 0)]
    schedules: u32,
    /// Print the record as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArguments,
}

/// Runs the cases and prints everything that is known about them.
pub fn execute(arguments: &ReplayArguments) -> Result<Exit> {
    let cases = cases_of(&arguments.case)?;
    // All are prepared before one is run: a malformed line is reported before minutes are spent.
    for case in &cases {
        registry::prepare(case)?;
    }
    let device = match arguments.device.open() {
        Ok(device) => device,
        Err(error) if has_no_kernels(&error) => {
            eprintln!("parity: {error:#}");
            return Ok(Exit::Untestable);
        }
        Err(error) => return Err(error),
    };
    let options = CheckOptions { schedules: arguments.schedules, triangulate: true };
    let mut exit = Exit::Agreed;
    for case in &cases {
        let record = sweep::run_case(case, Origin::Given, &device, options);
        if arguments.json {
            println!("{}", serde_json::to_string(&record)?);
        } else {
            print_record(&record);
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

pub(super) fn cases_of(argument: &str) -> Result<Vec<Case>> {
    if argument.trim_start().starts_with('{') {
        return Ok(vec![Case::parse(argument)?]);
    }
    let path = Path::new(argument);
    let text = std::fs::read_to_string(path).with_context(|| format!("reading cases from {}", path.display()))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'));
    let cases: Vec<Case> = lines
        .map(|(number, line)| Case::parse(line).with_context(|| format!("{}:{}", path.display(), number + 1)))
        .collect::<Result<_>>()?;
    if cases.is_empty() {
        bail!("{} holds no case", path.display());
    }
    Ok(cases)
}

fn print_record(record: &CaseRecord) {
    println!("{}", record.case);
    println!("  paths {}", record.paths.join(", "));
    for check in &record.checks {
        let verdict = match check.verdict {
            Verdict::Pass => "pass",
            Verdict::Fail => "FAIL",
            Verdict::Error => "ERROR",
        };
        println!(
            "  {verdict:5} {:22} {:12} {:>9} compared  {}",
            check.check, check.tensor, check.compared, check.message
        );
        if let Some(m) = &check.metrics {
            println!(
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
            println!(
                "        worst {:?}: kernel {:e}, oracle {:e}, allowed {:.3e}",
                m.worst.index, m.worst.kernel, m.worst.oracle, m.worst.allowed
            );
        }
    }
    println!("  kernel {:.3} s, oracle {:.3} s", record.kernel_seconds, record.oracle_seconds);
    println!("  {}", record.replay);
}
