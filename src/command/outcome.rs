//! The printed result of a sweep, and the exit code of its process.

use std::path::Path;

use anyhow::{Result, bail};

use super::{Exit, cores, output};
use crate::operator::Profile;
use crate::operators::registry;
use crate::record::words::{self, printable};
use crate::record::{Report, Verdict};
use crate::report::diagnosis::terminal;
use crate::report::numbers::counted;

/// The exit code of a sweep. It is 1 where something disagrees. It is 2 where kernels could not be
/// run, or where nothing was compared although something `should` have been.
pub(super) fn exit_of(report: &Report, should: bool) -> Result<Exit> {
    for (operator, why) in report.not_run() {
        errln!(
            "{} the kernels of {operator} cannot be run: {}",
            output::bad("parity:"),
            printable(why)
        );
    }
    if report.cases.iter().any(|case| case.verdict() != Verdict::Pass) {
        return Ok(Exit::Disagreed);
    }
    if report.not_run().next().is_some() {
        return Ok(Exit::BadInput);
    }
    let compared =
        report.cases.iter().flat_map(|case| &case.checks).any(|check| check.compared > 0);
    if should && !compared {
        let skipped: u64 = report.skips.iter().map(|skip| skip.count).sum();
        bail!("nothing was compared: {} case(s) ran, {skipped} skips", report.cases.len());
    }
    if report.cases.is_empty() && !report.unsupported.is_empty() {
        // A shard may have no case that its kernel supports. Only the merged run can check whether
        // the kernel supports any case.
        return Ok(Exit::Agreed);
    }
    Ok(if report.verdict() == Verdict::Pass { Exit::Agreed } else { Exit::Disagreed })
}

/// Prints the kernel paths that no case took. A smoke test has few cases, so it prints only how
/// many.
fn say_never_run(report: &Report, fails: bool) {
    if report.profile != Profile::Smoke.name() {
        for (operator, missing) in report.paths_never_run() {
            // Failures are more important; the page names the paths.
            let paths =
                if fails { counted(missing.len() as u64, "path") } else { missing.join(", ") };
            detailln!("never ran: {paths} of {operator}");
        }
        return;
    }
    let missing: usize = report.paths_never_run().iter().map(|(_, missing)| missing.len()).sum();
    let all: usize = report.operators.iter().map(|operator| operator.paths.len()).sum();
    detailln!("smoke: {} of {all} kernel paths ran", all - missing);
}

/// After a smoke test, prints which larger runs see more, and how long they take here.
pub(super) fn say_what_sees_more(report: &Report) -> Result<()> {
    if report.profile != Profile::Smoke.name() {
        return Ok(());
    }
    let mut seconds = 0.0;
    for operator in &report.operators {
        let operator = registry::find(&operator.name)?;
        let taken = report.cases.iter().filter(|case| case.operator == operator.name());
        let taken: Vec<f64> = taken.map(|case| case.kernel_seconds + case.oracle_seconds).collect();
        let cases =
            operator.edge_cases(Profile::Quick).len() + operator.default_cases(Profile::Quick);
        // The mean includes compilation: a larger sweep has larger cases and compiles more.
        seconds += cases as f64 * taken.iter().sum::<f64>() / taken.len().max(1) as f64;
    }
    let minutes = (seconds / 60.0 / cores() as f64).ceil();
    detailln!(
        "more: --profile quick (about {minutes} minutes here), or --ops NAME (about a minute)"
    );
    Ok(())
}

/// Prints what failing cases have in common, and some of them.
pub(super) fn print_failures(report: &Report, out: &Path) {
    output::print_error(format_args!("{}", printable(&terminal::text(report, out))));
}

/// Prints the verdict, and what a pass does not show.
pub(super) fn summarise(report: &Report, out: &Path) {
    let failed = report.cases.iter().filter(|case| case.verdict() != Verdict::Pass).count();
    let checks: usize = report.cases.iter().map(|case| case.checks.len()).sum();
    let not_run: Vec<_> = report.not_run().map(|(operator, _)| operator).collect();
    let agreed = failed == 0 && not_run.is_empty() && !report.cases.is_empty();
    let verdict = match (failed, &not_run[..]) {
        (0, []) if report.cases.is_empty() => "nothing was compared".to_owned(),
        (0, []) => "all agreed".to_owned(),
        (0, _) => format!("{} could not be run, the others agreed", not_run.join(", ")),
        _ => format!("{failed} case(s) disagreed"),
    };
    let verdict = if agreed { output::good(verdict) } else { output::bad(verdict) };
    outln!(
        "{verdict}: {} cases, {checks} checks, {:.1} s on {} ({})",
        report.cases.len(),
        report.seconds,
        words::line(&report.environment.device),
        report.environment.backend
    );
    say_never_run(report, failed > 0);
    for (operator, tensor) in report.without_power() {
        outln!(
            "nothing shown: of {tensor} of {operator}, in no case of which an error of 10 % would have been seen"
        );
    }
    detailln!("report: {}", out.join("index.html").display());
    let saved: Vec<String> =
        report.saved.iter().map(|saved| format!("{} in {}", saved.cases, saved.file)).collect();
    if !saved.is_empty() {
        detailln!("failing cases saved for the next run: {}", saved.join(", "));
    }
}
