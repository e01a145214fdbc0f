//! `parity diff`.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;

use super::Exit;
use crate::record::words::printable;
use crate::report::diff;

/// Options of `parity diff`.
#[derive(Debug, Args)]
pub struct DiffArguments {
    /// Report to compare with: report.json, or the folder that holds it
    #[arg(value_name = "BASE")]
    base: PathBuf,
    /// Report to judge
    #[arg(value_name = "HEAD")]
    head: PathBuf,
    /// Write the comparison as Markdown for a pull request
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Write the comparison as one HTML page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Compares and prints; 1 on any regression.
pub fn execute(arguments: &DiffArguments) -> Result<Exit> {
    let (base, head) = (diff::read(&arguments.base)?, diff::read(&arguments.head)?);
    let found = diff::compare(&base, &head)?;
    let pages = [
        (&arguments.markdown, diff::markdown as fn(&_, &_, &_) -> String),
        (&arguments.html, diff::html as fn(&_, &_, &_) -> String),
    ];
    for (path, page) in pages {
        if let Some(path) = path {
            std::fs::write(path, page(&base, &head, &found)).with_context(|| format!("writing {}", path.display()))?;
        }
    }
    print!("{}", printable(&diff::terminal(&base, &head, &found)));
    Ok(if found.regressions().next().is_none() { Exit::Agreed } else { Exit::Disagreed })
}
