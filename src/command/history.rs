//! `parity history`.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;

use super::Exit;
use crate::record::words::printable;
use crate::report::{diff, history};

/// Options of `parity history`.
#[derive(Debug, Args)]
pub struct HistoryArguments {
    /// History file, one line of JSON for each operator, check and metric of each run
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// First append this report (report.json, or the folder that holds it), such as one of merged shards
    #[arg(long, value_name = "REPORT")]
    append: Option<PathBuf>,
    /// Operators, comma-separated; all when absent
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    ops: Vec<String>,
    /// Forget the runs before the first one of this commit, given by its first characters
    #[arg(long, value_name = "COMMIT")]
    since: Option<String>,
    /// Write the plots as one HTML page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Prints and plots. A drift is a warning, not a failure: the exit code stays 0.
pub fn execute(arguments: &HistoryArguments) -> Result<Exit> {
    if let Some(report) = &arguments.append {
        history::append(&diff::read(report)?, &arguments.file)?;
    }
    let mut lines = history::read(&arguments.file)?;
    if let Some(since) = &arguments.since {
        let Some(first) = lines.iter().position(|line| line.commit.starts_with(since.as_str())) else {
            bail!("{} holds no run of commit {since}", arguments.file.display());
        };
        lines.drain(..first);
    }
    lines.retain(|line| arguments.ops.is_empty() || arguments.ops.contains(&line.operator));
    if lines.is_empty() {
        bail!("{} holds nothing about {}", arguments.file.display(), arguments.ops.join(", "));
    }
    let series = history::series(&lines);
    if let Some(path) = &arguments.html {
        std::fs::write(path, history::page(&series)).with_context(|| format!("writing {}", path.display()))?;
    }
    print!("{}", printable(&history::terminal(&series)));
    Ok(Exit::Agreed)
}
