//! `parity golden`.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::Args;

use super::{DeviceArguments, Exit};
use crate::judge::golden::GoldenFile;
use crate::judge::{golden, golden_run};
use crate::operator::{GoldenCase, Operator, registry};
use crate::record::Verdict;
use crate::record::words::{self, printable};

/// Options of `parity golden`.
#[derive(Debug, Args)]
pub struct GoldenArguments {
    /// Folder with golden files and their index.json
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Operators, comma-separated; all when absent
    #[arg(long, value_name = "A,B")]
    ops: Option<String>,
    /// Files, comma-separated; all that the operators understand when absent
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    files: Vec<String>,
    /// Hold only the oracles against the files
    #[arg(long)]
    oracles_only: bool,
    #[command(flatten)]
    device: DeviceArguments,
}

/// Compares and prints a line for each file; 1 when something disagrees.
pub fn execute(arguments: &GoldenArguments) -> Result<Exit> {
    let operators = registry::select(arguments.ops.as_deref())?;
    let names = match &arguments.ops {
        // A file of a kind that no operator has is read as well, and may be broken.
        None => golden::index(&arguments.dir)?,
        Some(_) => golden_run::files_about(&arguments.dir, &operators)?,
    };
    let device = if arguments.oracles_only { None } else { Some(arguments.device.open()?) };
    let mut files = 0;
    let mut broken = Vec::new();
    let mut exit = Exit::Agreed;
    for name in names.iter().filter(|name| arguments.files.is_empty() || arguments.files.contains(name)) {
        // One bad file does not lose the others.
        let (file, cases) = match read(&arguments.dir.join(name), &operators) {
            Ok(read) => read,
            Err(error) => {
                eprintln!("parity: {}", printable(&words::of_error(&error)));
                broken.push(name.clone());
                continue;
            }
        };
        for case in cases {
            files += 1;
            let record = golden_run::run(&file, &case, device.as_ref());
            if let Some(why) = record.untestable {
                bail!("the kernels of {} cannot be run: {why}", record.operator);
            }
            let failures: Vec<_> = record.checks.iter().filter(|c| c.verdict != Verdict::Pass).collect();
            let compared: u64 = record.checks.iter().map(|c| c.compared).sum();
            let kernel = case.kernel_skip.as_ref().map_or(String::new(), |why| format!(" (oracle only: {why})"));
            let verdict = if failures.is_empty() { "agrees" } else { "DISAGREES" };
            println!(
                "{verdict:9} {:16} {name}: {} checks, {compared} elements{kernel}",
                record.operator,
                record.checks.len()
            );
            for check in &failures {
                println!("          {} {}: {}", check.check, check.tensor, printable(&check.message));
                exit = Exit::Disagreed;
            }
        }
    }
    if !broken.is_empty() {
        let why = format!("{} golden file(s) could not be judged: {}", broken.len(), broken.join(", "));
        if exit == Exit::Agreed {
            bail!(why);
        }
        eprintln!("parity: {why}");
    }
    if files == 0 && broken.is_empty() {
        bail!("no file of {} is about {}", arguments.dir.display(), arguments.ops.as_deref().unwrap_or("any operator"));
    }
    println!("{files} golden cases");
    Ok(exit)
}

/// A file, and the cases that it is.
fn read(path: &Path, operators: &[&'static dyn Operator]) -> Result<(GoldenFile, Vec<GoldenCase>)> {
    let file = golden::read(path)?;
    let cases = golden_run::cases_of(&file, operators)?;
    Ok((file, cases))
}
