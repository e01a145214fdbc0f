//! The output of a sweep for continuous integration.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};

use crate::record::Report;
use crate::record::words::printable;
use crate::report::ci;

/// Options of every command that ends with a report of cases.
#[derive(Clone, Debug, Args)]
pub struct CiArguments {
    /// Write JUnit XML, with one test case for each operator and check
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Print failures as annotations
    #[arg(long, value_enum, default_value = "auto", value_name = "KIND")]
    annotations: Annotations,
}

/// Which annotations are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Annotations {
    /// GitHub's in a step of GitHub Actions (GITHUB_ACTIONS=true), otherwise none
    Auto,
    /// GitHub's
    Github,
    /// None
    None,
}

impl CiArguments {
    /// Writes and prints the requested output.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub(super) fn finish(&self, report: &Report) -> Result<()> {
        if let Some(file) = &self.junit {
            let text = ci::junit(report).context("writing JUnit XML")?;
            std::fs::write(file, text).with_context(|| format!("--junit {}", file.display()))?;
        }
        let on_github = || std::env::var_os("GITHUB_ACTIONS").is_some_and(|value| value == "true");
        let prints = match self.annotations {
            Annotations::Auto => on_github(),
            Annotations::Github => true,
            Annotations::None => false,
        };
        if prints {
            for annotation in ci::github(report) {
                outln!("{}", printable(&annotation));
            }
        }
        Ok(())
    }
}
