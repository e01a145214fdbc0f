//! `parity beside`.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;

use super::Exit;
use crate::record::words::printable;
use crate::report::beside::log::Timings;
use crate::report::beside::page;
use crate::report::beside::pairs::Pairs;

/// Options of `parity beside`.
#[derive(Debug, Args)]
pub struct BesideArguments {
    /// Pairs of works, a TOML file such as fixtures/external/pairs.toml
    #[arg(value_name = "PAIRS")]
    pairs: PathBuf,
    /// Logs of both sides, from one machine: of the benchmarks (PARITY_BENCH_LOG), and of
    /// fixtures/external/public_times.py
    #[arg(value_name = "LOG", required = true)]
    logs: Vec<PathBuf>,
    /// Write the page here instead of printing it
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

impl BesideArguments {
    /// The command as the page's first line shows it.
    fn command(&self) -> String {
        let mut words = vec!["parity beside".to_owned()];
        words.extend(
            [&self.pairs].into_iter().chain(&self.logs).map(|path| path.display().to_string()),
        );
        words.extend(self.out.iter().map(|out| format!("--out {}", out.display())));
        words.join(" ")
    }
}

/// Compares the two sides. A slower kernel is not a failure: the exit code is 0.
pub fn execute(arguments: &BesideArguments) -> Result<Exit> {
    let pairs = Pairs::read(&arguments.pairs)?;
    let timings = Timings::read(&arguments.logs)?;
    let page = page(&arguments.command(), &pairs, &timings)?;
    match &arguments.out {
        Some(path) => {
            std::fs::write(path, page).with_context(|| format!("writing {}", path.display()))?
        }
        None => out!("{}", printable(&page)),
    }
    Ok(Exit::Agreed)
}
