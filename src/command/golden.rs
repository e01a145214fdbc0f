//! `parity golden`.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::Args;
use serde_json::json;

use super::{DeviceArguments, Exit, output};
use crate::judge::golden_run;
use crate::operator::golden_file;
use crate::operator::golden_file::GoldenFile;
use crate::operator::{AnyOperator, GoldenCase};
use crate::operators::registry;
use crate::record::words::{self, printable};
use crate::record::{CaseRecord, CheckRecord, Verdict};

/// Options of `parity golden`.
#[derive(Debug, Args)]
pub struct GoldenArguments {
    /// Folder with golden files
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Operators, comma-separated [default: all]
    #[arg(long, value_name = "A,B")]
    ops: Option<String>,
    /// Files, comma-separated [default: all that the operators understand]
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    files: Vec<String>,
    /// Compare only the oracles with the files
    #[arg(long)]
    oracles_only: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(super) device: DeviceArguments,
}

/// Compares and prints a line for each file; the exit code is 1 when something disagrees.
pub fn execute(arguments: &GoldenArguments) -> Result<Exit> {
    let operators = registry::select(arguments.ops.as_deref())?;
    let names = match &arguments.ops {
        // A file of a kind that no operator has is read too: it may be broken.
        None => golden_file::names_in(&arguments.dir)?,
        Some(_) => golden_run::files_about(&arguments.dir, &operators)?,
    };
    let device = if arguments.oracles_only { None } else { Some(arguments.device.open()?) };
    let mut judged = Vec::new();
    let mut broken = Vec::new();
    for name in
        names.iter().filter(|name| arguments.files.is_empty() || arguments.files.contains(name))
    {
        // One bad file does not prevent the comparison of the others.
        let (file, cases) = match read(&arguments.dir.join(name), &operators) {
            Ok(read) => read,
            Err(error) => {
                errln!("{} {}", output::bad("parity:"), printable(&words::of_error(&error)));
                broken.push(name.clone());
                continue;
            }
        };
        for case in cases {
            let record = golden_run::run(&file, &case, device.as_ref());
            if let Some(why) = record.untestable {
                bail!("the kernels of {} cannot be run: {why}", record.operator);
            }
            let one = Judged { file: name.clone(), record, kernel_skip: case.kernel_skip };
            if !arguments.json {
                one.print();
            }
            judged.push(one);
        }
    }
    if arguments.json {
        output::json(&judged.iter().map(Judged::as_json).collect::<Vec<_>>())?;
    }
    let disagreed = judged.iter().filter(|one| one.failures().next().is_some()).count();
    if !broken.is_empty() {
        let why =
            format!("{} golden file(s) could not be judged: {}", broken.len(), broken.join(", "));
        if disagreed == 0 {
            bail!(why);
        }
        errln!("{} {why}", output::bad("parity:"));
    }
    if judged.is_empty() && broken.is_empty() {
        bail!(
            "no file of {} is about {}",
            arguments.dir.display(),
            arguments.ops.as_deref().unwrap_or("any operator")
        );
    }
    if !arguments.json {
        let all = judged.len();
        let verdict = match disagreed {
            0 => output::good(format!("all {all} golden cases agree")),
            _ => output::bad(format!("{disagreed} of {all} golden cases disagree")),
        };
        outln!("{verdict}");
    }
    Ok(if disagreed == 0 { Exit::Agreed } else { Exit::Disagreed })
}

/// The result of a golden case.
struct Judged {
    file: String,
    record: CaseRecord,
    kernel_skip: Option<String>,
}

impl Judged {
    fn failures(&self) -> impl Iterator<Item = &CheckRecord> {
        self.record.checks.iter().filter(|check| check.verdict != Verdict::Pass)
    }

    fn compared(&self) -> u64 {
        self.record.checks.iter().map(|check| check.compared).sum()
    }

    fn print(&self) {
        let Self { file, record, kernel_skip } = self;
        let agrees = self.failures().next().is_none();
        if agrees && output::is_quiet() {
            return;
        }
        let kernel =
            kernel_skip.as_ref().map_or(String::new(), |why| format!(" (oracle only: {why})"));
        let verdict = if agrees { output::good("agrees") } else { output::bad("DISAGREES") };
        let (operator, checks, compared) = (&record.operator, record.checks.len(), self.compared());
        outln!("{verdict:9} {operator:16} {file}: {checks} checks, {compared} elements{kernel}");
        for check in self.failures() {
            outln!("          {} {}: {}", check.check, check.tensor, printable(&check.message));
        }
    }

    fn as_json(&self) -> serde_json::Value {
        json!({
            "file": self.file,
            "operator": self.record.operator,
            "agrees": self.failures().next().is_none(),
            "checks": self.record.checks.len(),
            "compared": self.compared(),
            "oracle_only": self.kernel_skip,
            "failures": self.failures().collect::<Vec<_>>(),
        })
    }
}

/// A file, and the cases that it defines.
fn read(path: &Path, operators: &[&'static AnyOperator]) -> Result<(GoldenFile, Vec<GoldenCase>)> {
    let file = golden_file::read(path)?;
    let cases = golden_run::cases_of(&file, operators)?;
    Ok((file, cases))
}
