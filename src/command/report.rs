//! `parity report`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;

use super::Exit;
use crate::record::{Report, journal};
use crate::report::{self, diff};

/// Options of `parity report`.
#[derive(Debug, Args)]
pub struct ReportArguments {
    /// A report.json or its folder; of an interrupted run the folder with plan.json and
    /// records.jsonl
    #[arg(value_name = "FILE|DIR")]
    file: PathBuf,
    /// Folder for report.json, index.html and summary.md [default: the folder that is read]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Reads a report, or the records of a killed run, and writes the pages; runs nothing.
pub fn execute(arguments: &ReportArguments) -> Result<Exit> {
    let out = match &arguments.out {
        Some(out) => out,
        None if arguments.file.is_dir() => &arguments.file,
        None => bail!("--out is needed, since {} is no folder", arguments.file.display()),
    };
    let report = read(&arguments.file)?;
    report::write_all(&report, out).with_context(|| format!("writing to {}", out.display()))?;
    if let Some(missing) = report.unfinished {
        let cases = report.cases.len() + report.unsupported.len();
        outln!(
            "unfinished: {cases} cases are recorded, {missing} of the plan's are missing; --resume continues the run"
        );
    }
    outln!("report: {}", out.join("index.html").display());
    Ok(Exit::Agreed)
}

/// The report of a finished run, or what a killed run left. The killed run may already have a
/// report.
fn read(path: &Path) -> Result<Report> {
    let finished = || diff::read(path);
    if !path.is_dir() || path.join("report.json").is_file() && finished()?.unfinished.is_none() {
        return finished();
    }
    journal::read_unfinished(path)?.map_or_else(finished, Ok)
}
