//! `parity diff`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;

use super::Exit;
use crate::record::Report;
use crate::record::words::printable;
use crate::report::{self, diff};

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
    /// Write the comparison to diff.html in the folder of HEAD, and put what changed on the first screen of its pages
    #[arg(long)]
    page: bool,
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
    if arguments.page {
        write_page(&arguments.head, &base, &head, &found)?;
    }
    print!("{}", printable(&diff::terminal(&base, &head, &found)));
    Ok(if found.regressions().next().is_none() { Exit::Agreed } else { Exit::Disagreed })
}

/// Puts the comparison beside HEAD's own pages, which then tell of it.
fn write_page(dir: &Path, base: &Report, head: &Report, found: &diff::Diff) -> Result<()> {
    if !dir.is_dir() {
        bail!("--page: HEAD is to be the folder of a report, and {} is none", dir.display());
    }
    let page = dir.join(diff::PAGE);
    std::fs::write(&page, diff::html(base, head, found)).with_context(|| format!("writing {}", page.display()))?;
    let head = Report { base: Some(diff::base_record(base, found)), ..head.clone() };
    report::write_all(&head, dir).with_context(|| format!("writing to {}", dir.display()))
}
