//! `parity diff`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::json;

use super::{Exit, output};
use crate::record::Report;
use crate::record::words::printable;
use crate::report;
use crate::report::diff::{self, Diff, Finding};

/// Options of `parity diff`.
#[derive(Debug, Args)]
pub struct DiffArguments {
    /// Report to compare with: report.json, or its folder
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
    /// Write the comparison to diff.html in the folder of HEAD, and put what changed on the first
    /// screen of its pages
    #[arg(long)]
    page: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Compares and prints; the exit code is 1 on any regression.
pub fn execute(arguments: &DiffArguments) -> Result<Exit> {
    let (base, head) = (diff::read(&arguments.base)?, diff::read(&arguments.head)?);
    let found = diff::compare(&base, &head)?;
    let pages = [
        (&arguments.markdown, diff::markdown as fn(&_, &_, &_) -> String),
        (&arguments.html, diff::html as fn(&_, &_, &_) -> String),
    ];
    for (path, page) in pages {
        if let Some(path) = path {
            std::fs::write(path, page(&base, &head, &found))
                .with_context(|| format!("writing {}", path.display()))?;
        }
    }
    if arguments.page {
        write_page(&arguments.head, &base, &head, &found)?;
    }
    if arguments.json {
        output::json(&as_json(&found))?;
    } else {
        print(&base, &head, &found);
    }
    Ok(if found.regressions().next().is_none() { Exit::Agreed } else { Exit::Disagreed })
}

/// Prints the comparison; with --quiet only the regressions and the verdict.
fn print(base: &Report, head: &Report, found: &Diff) {
    let text = diff::terminal(base, head, found);
    let text = printable(&text);
    let regressed = found.regressions().next().is_some();
    let verdict = text.lines().last().unwrap_or_default();
    if output::is_quiet() {
        for finding in found.regressions() {
            let Finding { kind, operator, subject, base, head, .. } = finding;
            let line = format!("{operator} {subject}: {base} -> {head}");
            outln!("{} {}", output::bad(kind.words()), printable(&line));
        }
    } else {
        // The heading of each list of regressions starts with a cross.
        for line in text.lines().take(text.lines().count().saturating_sub(1)) {
            if line.starts_with('✗') { outln!("{}", output::bad(line)) } else { outln!("{line}") }
        }
    }
    outln!("{}", if regressed { output::bad(verdict) } else { output::good(verdict) });
}

fn as_json(found: &Diff) -> serde_json::Value {
    let finding = |finding: &Finding| {
        json!({
            "kind": finding.kind.words(),
            "regression": finding.kind.is_regression(),
            "operator": finding.operator,
            "subject": finding.subject,
            "base": finding.base,
            "head": finding.head,
            "why": finding.why,
            "replay": finding.replay,
        })
    };
    json!({
        "regressions": found.regressions().count(),
        "notes": found.notes,
        "findings": found.findings.iter().map(finding).collect::<Vec<_>>(),
    })
}

/// Writes the comparison next to HEAD's own pages, which then show it.
fn write_page(dir: &Path, base: &Report, head: &Report, found: &diff::Diff) -> Result<()> {
    if !dir.is_dir() {
        bail!("--page: HEAD is to be the folder of a report, {} is not one", dir.display());
    }
    let page = dir.join(diff::PAGE);
    std::fs::write(&page, diff::html(base, head, found))
        .with_context(|| format!("writing {}", page.display()))?;
    let head = Report { base: Some(diff::base_record(base, found)), ..head.clone() };
    report::write_all(&head, dir).with_context(|| format!("writing to {}", dir.display()))
}
