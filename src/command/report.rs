//! `parity report`.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;

use super::Exit;
use crate::report::{self, diff};

/// Options of `parity report`.
#[derive(Debug, Args)]
pub struct ReportArguments {
    /// A report.json, or the folder that holds it
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Folder for report.json, index.html and summary.md
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

/// Reads a report and writes its pages; runs nothing.
pub fn execute(arguments: &ReportArguments) -> Result<Exit> {
    let report = diff::read(&arguments.file)?;
    report::write_all(&report, &arguments.out).with_context(|| format!("writing to {}", arguments.out.display()))?;
    println!("report: {}", arguments.out.join("index.html").display());
    Ok(Exit::Agreed)
}
