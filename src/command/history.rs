//! `parity history`.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::json;

use super::{Exit, output};
use crate::record::words::printable;
use crate::report::diff;
use crate::report::history::{self, Line, Series};

/// Options of `parity history`.
#[derive(Debug, Args)]
pub struct HistoryArguments {
    /// History file: one line of JSON for each operator, check and metric of each run
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// First append this report, such as one of merged shards: report.json, or its folder
    #[arg(long, value_name = "REPORT")]
    append: Option<PathBuf>,
    /// Operators, comma-separated [default: all]
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    ops: Vec<String>,
    /// Ignore runs before the first run of this commit, named by its first characters
    #[arg(long, value_name = "COMMIT")]
    since: Option<String>,
    /// Write the plots as one HTML page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The legend of the terminal's lines.
const LEGEND: &str = "\
Each line is a measure: its last 40 runs between their lowest and highest value,
the first and the last value, and the number of runs.
  budget_used        share of the error budget that is used: median of the cases
  budget_used_worst  the same: largest of the cases; above 1 fails
  budget_relative    the budget over the value: median of the cases
  median_ns          time of one call of a benchmark
A ▲ marks a drift: the measure rises more often than chance explains.";

/// Prints and plots. A drift is a warning, not a failure: the exit code stays 0.
pub fn execute(arguments: &HistoryArguments) -> Result<Exit> {
    if let Some(report) = &arguments.append {
        history::append(&diff::read(report)?, &arguments.file)?;
    }
    let mut lines = history::read(&arguments.file)?;
    if let Some(since) = &arguments.since {
        let Some(first) = lines.iter().position(|line| line.commit.starts_with(since.as_str()))
        else {
            bail!("{} holds no run of commit {since}", arguments.file.display());
        };
        lines.drain(..first);
    }
    lines.retain(|line| arguments.ops.is_empty() || arguments.ops.contains(&line.operator));
    if lines.is_empty() {
        bail!("{} holds nothing about {}", arguments.file.display(), arguments.ops.join(", "));
    }
    let mut series = history::series(&lines);
    if let Some(path) = &arguments.html {
        std::fs::write(path, history::page(&series))
            .with_context(|| format!("writing {}", path.display()))?;
    }
    if arguments.json {
        output::json(&series.iter().map(as_json).collect::<Vec<_>>())?;
        return Ok(Exit::Agreed);
    }
    if output::is_quiet() {
        series.retain(|one| one.drifts);
    }
    for line in printable(&history::terminal(&series)).lines() {
        if line.starts_with("warning: ") {
            outln!("{}", output::unsure(line))
        } else {
            outln!("{line}")
        }
    }
    detailln!("\n{}", output::faint(LEGEND));
    Ok(Exit::Agreed)
}

fn as_json(series: &Series) -> serde_json::Value {
    let Line { operator, check, subject, metric, device, sweep, .. } = &series.lines[0];
    let run = |line: &Line| {
        json!({
            "commit": line.commit,
            "dirty": line.dirty,
            "started_unix": line.started_unix,
            "value": line.value,
            "count": line.count,
            "green": line.green,
        })
    };
    json!({
        "operator": operator,
        "check": check,
        "subject": subject,
        "metric": metric,
        "device": device,
        "sweep": sweep,
        "runs": series.lines.iter().map(run).collect::<Vec<_>>(),
        "different": series.points,
        "p": series.p,
        "drifts": series.drifts,
    })
}
