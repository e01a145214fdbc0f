//! `parity coverage`.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;

use super::progress::Steps;
use super::sweep::SweepArguments;
use super::{BackendChoice, DeviceArguments, Exit, cores, output};
use crate::coverage::{self, KernelCoverage, Measurement, Reasons};
use crate::judge::checks::CheckOptions;
use crate::operators::registry;
use crate::sweep::regressions::Regressions;

/// Options of `parity coverage`.
#[derive(Debug, Args)]
pub struct CoverageArguments {
    /// Operators, comma-separated [default: all]
    #[arg(long, value_name = "A,B")]
    ops: Option<String>,
    #[command(flatten)]
    sweep: SweepArguments,
    /// How many cases run at the same time [default: one for each core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    jobs: Option<u16>,
    /// Folder of saved failing cases [default: regressions in PARITY_FIXTURES or ./fixtures]
    #[arg(long, value_name = "DIR")]
    regressions: Option<PathBuf>,
    /// List of lines that no case can run, with reasons [default: coverage.toml in PARITY_FIXTURES
    /// or ./fixtures]
    #[arg(long, value_name = "FILE")]
    reasons: Option<PathBuf>,
    /// Write the page of all kernels and lines to this file
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(super) device: DeviceArguments,
}

/// Launches the cases of a sweep, and prints the lines that none ran. The exit code is 1 where one
/// has no reason.
pub fn execute(arguments: &CoverageArguments) -> Result<Exit> {
    let CoverageArguments { ops, sweep: size, device, .. } = arguments;
    if device.backend == BackendChoice::Cuda {
        bail!("--backend cuda: only the emulator counts the lines of kernels");
    }
    size.seed.announce(None)?;
    let tree = device.tree()?;
    let listed = arguments.reasons.clone().unwrap_or_else(Reasons::default_file);
    let reasons = Reasons::read(&listed, &tree)?;
    let sweep = size.options(CheckOptions::everything(0), arguments.regressions.as_deref());
    let regressions = arguments.regressions.clone().unwrap_or_else(Regressions::default_dir);
    let (operators, saved) = (registry::select(ops.as_deref())?, Regressions::new(regressions));
    let measurement = Measurement::plan(&operators, &saved, &sweep, (tree, device.sms))?;
    let steps = Steps::of(Some(measurement.cases.len()), "launching");
    let devices = arguments.jobs.map_or_else(cores, usize::from);
    let launched = measurement.launch(devices, &|| steps.step())?;
    steps.end();
    let kernels = measurement.kernels(&reasons)?;
    if let Some(file) = &arguments.markdown {
        let page = coverage::markdown(&kernels, launched.cases, &size.seed.command());
        std::fs::write(file, page).with_context(|| format!("writing {}", file.display()))?;
    }
    if arguments.json {
        output::json(&kernels)?;
    } else {
        print(&kernels);
    }
    for (case, why) in &launched.failed {
        errln!("{}: {why}\n  {case}", output::bad("did not run"));
    }
    summarize(arguments, &kernels, launched.cases, measurement.skipped)?;
    let agreed = launched.failed.is_empty()
        && kernels.iter().all(|kernel| kernel.unexplained().next().is_none());
    Ok(if agreed { Exit::Agreed } else { Exit::Disagreed })
}

fn print(kernels: &[KernelCoverage]) {
    for kernel in kernels.iter().filter(|kernel| kernel.unexplained().next().is_some()) {
        let count = kernel.unexplained().count();
        outln!("{}: {count} of {} lines never ran", kernel.kernel, kernel.lines);
        for line in kernel.unexplained() {
            outln!("  {}:{}: {}", line.file, line.line, line.text);
        }
    }
}

fn summarize(
    arguments: &CoverageArguments,
    kernels: &[KernelCoverage],
    cases: usize,
    skipped: u64,
) -> Result<()> {
    if cases == 0 || kernels.is_empty() {
        bail!("no kernel ran: no line was counted");
    }
    if arguments.json {
        return Ok(());
    }
    let sum = |of: fn(&KernelCoverage) -> usize| kernels.iter().map(of).sum::<usize>();
    let unexplained = sum(|kernel| kernel.unexplained().count());
    let head = format!(
        "{} of {} lines ran in {} kernels; {} never did, {unexplained} of them without a reason; \
         {} ran in part",
        sum(|kernel| kernel.lines - kernel.never.len()),
        sum(|kernel| kernel.lines),
        kernels.len(),
        sum(|kernel| kernel.never.len()),
        sum(|kernel| kernel.in_part.len()),
    );
    outln!("{}", if unexplained == 0 { output::good(head) } else { output::bad(head) });
    outln!("{cases} cases launched, {skipped} skipped");
    Ok(())
}
