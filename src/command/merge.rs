//! `parity merge`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;

use super::ci::CiArguments;
use super::{Exit, command_line, outcome};
use crate::sweep::merge::{self, Part};
use crate::sweep::regressions::Regressions;

/// Options of `parity merge`.
#[derive(Debug, Args)]
pub struct MergeArguments {
    /// Folders that `parity run --shard I/N --out DIR` or `parity external` wrote, one for each
    /// shard
    #[arg(value_name = "SHARD_DIR", required = true)]
    shards: Vec<PathBuf>,
    /// Folder for report.json, index.html, summary.md and records.jsonl
    #[arg(long, default_value = "reports/latest", value_name = "DIR")]
    out: PathBuf,
    /// Folder of saved failing cases, to which the shards' shrunk ones are added
    #[arg(long, value_name = "DIR")]
    regressions: Option<PathBuf>,
    #[command(flatten)]
    ci: CiArguments,
}

/// Joins shards, or reports why they are not one run; the exit code is 1 when something disagrees.
pub fn execute(arguments: &MergeArguments) -> Result<Exit> {
    for dir in &arguments.shards {
        if same_folder(dir, &arguments.out) {
            bail!("--out {} is one of the shards", arguments.out.display());
        }
    }
    let parts =
        arguments.shards.iter().map(|dir| Part::read(dir)).collect::<Result<Vec<_>, _>>()?;
    let mut report = merge::merge(parts, command_line().join(" "))?;
    // Shards save no cases: that would change the plan of shards that start later.
    let regressions =
        Regressions::new(arguments.regressions.clone().unwrap_or_else(Regressions::default_dir));
    regressions.remember_shrunk(&report)?;
    report.saved = regressions.saved(&report.cases);
    crate::report::write_with_records(&report, &arguments.out)
        .with_context(|| format!("writing the report to {}", arguments.out.display()))?;
    outcome::print_failures(&report, &arguments.out);
    outcome::summarise(&report, &arguments.out);
    arguments.ci.finish(&report)?;
    outcome::exit_of(&report, true)
}

fn same_folder(one: &Path, other: &Path) -> bool {
    matches!((one.canonicalize(), other.canonicalize()), (Ok(one), Ok(other)) if one == other)
}
