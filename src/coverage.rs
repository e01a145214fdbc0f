//! Which lines of the kernels the cases of a sweep run.
//!
//! The cases of the plan are launched once each on emulators that count lines
//! ([`dsv4_runtime::emulator::coverage`]). No oracle runs and nothing is compared. A kernel that no
//! case reaches is never judged, whatever the sweep says.
//!
//! `fixtures/coverage.toml` lists lines that no case can run, each with its reason. A line is named
//! by its file and its text, so that the list survives edits around it. An entry whose line does not
//! exist any more is an error.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use anyhow::{Context, Result, bail};
use dsv4_runtime::emulator::EmulatorOptions;
use dsv4_runtime::emulator::coverage::{self, Coverage, Ran};
use dsv4_runtime::{BackendKind, Contract, Device, DeviceOptions, SourceTree};
use serde::{Deserialize, Serialize};

use crate::case::Case;
use crate::judge::runner::shows_nothing;
use crate::operator::AnyOperator;
use crate::operators::registry;
use crate::record::words;
use crate::sweep::pool;
use crate::sweep::regressions::{Regressions, fixtures_dir};
use crate::sweep::{self, SweepOptions};

/// A line of a kernel source that did not run, or not all of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Line {
    /// Its file.
    pub file: String,
    /// Its number, from 1.
    pub line: u32,
    /// What it says, without the white space around it.
    pub text: String,
    /// Why no case can run it, if the list gives a reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// What ran of one kernel file and its headers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KernelCoverage {
    /// The kernel file.
    pub kernel: String,
    /// How many of its lines are code.
    pub lines: usize,
    /// Lines that no thread came to.
    pub never: Vec<Line>,
    /// Lines of which a part never ran, such as the statement behind an `if`.
    pub in_part: Vec<Line>,
}

impl KernelCoverage {
    /// Lines that never ran and have no reason for it.
    pub fn unexplained(&self) -> impl Iterator<Item = &Line> {
        self.never.iter().filter(|line| line.reason.is_none())
    }
}

/// The list of lines that no case can run.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reasons {
    #[serde(default)]
    line: Vec<Reason>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Reason {
    file: String,
    /// Each is the text of a line, without the white space around it.
    texts: Vec<String>,
    /// Kernel files to which the reason applies; all that include the file if absent.
    kernels: Option<Vec<String>>,
    reason: String,
}

impl Reasons {
    /// The project's list.
    pub fn default_file() -> PathBuf {
        fixtures_dir().join("coverage.toml")
    }

    /// Reads the list and requires that its lines exist in these sources. A file that does not exist
    /// is an empty list.
    ///
    /// # Errors
    /// A file that cannot be read, is no such list, or names a line that does not exist.
    pub fn read(path: &Path, tree: &SourceTree) -> Result<Self> {
        let reading = || format!("reading {}", path.display());
        let text = match std::fs::read_to_string(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            other => other.with_context(reading)?,
        };
        let reasons: Self = toml::from_str(&text).with_context(reading)?;
        for entry in &reasons.line {
            let source = tree.text(&entry.file).with_context(reading)?;
            let lines: BTreeSet<&str> = source.lines().map(str::trim).collect();
            if let Some(gone) = entry.texts.iter().find(|text| !lines.contains(text.as_str())) {
                bail!("{}: {} has no line `{gone}` any more", path.display(), entry.file);
            }
            if entry.reason.trim().is_empty() {
                bail!("{}: {}: the reason is empty", path.display(), entry.file);
            }
        }
        Ok(reasons)
    }

    fn of(&self, kernel: &str, file: &str, text: &str) -> Option<String> {
        let applies = |entry: &&Reason| {
            let of_kernel = entry.kernels.as_ref();
            entry.file == file
                && entry.texts.iter().any(|listed| listed == text)
                && of_kernel.is_none_or(|kernels| kernels.iter().any(|named| named == kernel))
        };
        self.line.iter().find(applies).map(|entry| entry.reason.clone())
    }
}

/// What ran of each kernel of `tree`, in the order of their names.
///
/// # Errors
/// A line beyond the end of its file: the counts are of other sources.
pub fn of_kernels(
    coverage: &Coverage,
    tree: &SourceTree,
    reasons: &Reasons,
) -> Result<Vec<KernelCoverage>> {
    let mut kernels = Vec::new();
    for (kernel, files) in coverage {
        let mut found = KernelCoverage {
            kernel: kernel.clone(),
            lines: 0,
            never: Vec::new(),
            in_part: Vec::new(),
        };
        for (file, lines) in files {
            // The emulator's own headers, and the compiler's.
            let Ok(source) = tree.text(file) else { continue };
            let texts: Vec<&str> = source.lines().map(str::trim).collect();
            for (&number, &ran) in lines {
                let Some(&text) = (number as usize).checked_sub(1).and_then(|at| texts.get(at))
                else {
                    bail!("{file} has no line {number}: the counts are of other sources");
                };
                found.lines += 1;
                let line = || Line {
                    file: file.clone(),
                    line: number,
                    text: text.to_owned(),
                    reason: reasons.of(kernel, file, text),
                };
                match ran {
                    Ran::Never => found.never.push(line()),
                    Ran::InPart => found.in_part.push(line()),
                    Ran::Whole => {}
                }
            }
        }
        kernels.push(found);
    }
    Ok(kernels)
}

/// The launches of many cases.
#[derive(Debug, Default)]
pub struct Launched {
    /// How many cases ran to their end.
    pub cases: usize,
    /// The lines of cases that did not, with the reason.
    pub failed: Vec<(String, String)>,
}

/// The cases of a sweep, and emulators that count lines.
pub struct Measurement {
    options: DeviceOptions,
    /// What the devices count into.
    counts: tempfile::TempDir,
    /// The cases.
    pub cases: Vec<Case>,
    /// How many planned cases are skipped.
    pub skipped: u64,
}

impl Measurement {
    /// Plans the cases of some operators, the saved ones first, on emulators with the kernels of
    /// `tree` and that many SMs.
    ///
    /// # Errors
    /// No emulator; saved cases that cannot be read; a case that cannot be planned.
    pub fn plan(
        operators: &[&AnyOperator],
        saved: &Regressions,
        sweep: &SweepOptions,
        (tree, sms): (SourceTree, u32),
    ) -> Result<Self> {
        let counts = tempfile::tempdir().context("making a folder for the counts")?;
        let emulator = EmulatorOptions {
            sms,
            coverage: Some(counts.path().to_path_buf()),
            ..EmulatorOptions::default()
        };
        let options = DeviceOptions { tree, emulator, ..dsv4_kernels::device_options() };
        let mut measurement = Self { options, counts, cases: Vec::new(), skipped: 0 };
        let environment = measurement.open()?.environment().clone();
        for operator in operators {
            let saved = saved.load(operator.name())?;
            let (planned, skips) = sweep::plan(operator, saved, sweep, &environment)?;
            measurement.cases.extend(planned.into_iter().map(|planned| planned.case));
            measurement.skipped += skips.iter().map(|skip| skip.count).sum::<u64>();
        }
        Ok(measurement)
    }

    fn open(&self) -> Result<Device> {
        Ok(Device::open(BackendKind::Emulator, self.options.clone())?)
    }

    /// Launches each case once, forward and backward, on `devices` devices at a time.
    ///
    /// # Errors
    /// A device that cannot be opened; kernels that cannot be built or run here.
    pub fn launch(&self, devices: usize, done: &(dyn Fn() + Sync)) -> Result<Launched> {
        launch(&self.cases, devices, &|| self.open(), done)
    }

    /// What has run of each kernel so far.
    ///
    /// # Errors
    /// Counts that cannot be read; a reason for a line that does not exist.
    pub fn kernels(&self, reasons: &Reasons) -> Result<Vec<KernelCoverage>> {
        of_kernels(&coverage::read(self.counts.path(), None)?, &self.options.tree, reasons)
    }
}

/// Launches each case once, forward and backward, on `devices` devices at a time.
///
/// # Errors
/// A device that cannot be opened; kernels that cannot be built or run here.
pub fn launch(
    cases: &[Case],
    devices: usize,
    open: &pool::Open<'_>,
    done: &(dyn Fn() + Sync),
) -> Result<Launched> {
    let launched = Mutex::new(Launched::default());
    let without_races = || {
        let device = open()?;
        device.backend().watch_races(false);
        Ok(device)
    };
    pool::each(cases.len(), devices, &without_races, &|device, number| {
        let case = &cases[number];
        let ran = launch_one(case, device)?;
        let mut launched = launched.lock().unwrap_or_else(|e| e.into_inner());
        match ran {
            Ok(()) => launched.cases += 1,
            Err(why) => launched.failed.push((case.line(), why)),
        }
        drop(launched);
        done();
        Ok(())
    })?;
    Ok(launched.into_inner().unwrap_or_else(|e| e.into_inner()))
}

/// Launches a case. The inner error is one of the case or its kernel.
fn launch_one(case: &Case, device: &Device) -> Result<Result<(), String>> {
    let prepared = match registry::prepare(case) {
        Ok(prepared) => prepared,
        Err(error) => return Ok(Err(words::message(error.to_string()))),
    };
    match prepared.kernel(device, Contract::NAN) {
        Ok(_) => Ok(Ok(())),
        Err(error) if shows_nothing(&error) => Err(error.into()),
        Err(error) => Ok(Err(words::message(error.to_string()))),
    }
}

/// The page of a measurement: a table of kernels, then the lines that did not run.
pub fn markdown(kernels: &[KernelCoverage], cases: usize, command: &str) -> String {
    let sum = |of: fn(&KernelCoverage) -> usize| kernels.iter().map(of).sum::<usize>();
    let (lines, never) = (sum(|kernel| kernel.lines), sum(|kernel| kernel.never.len()));
    let mut page = format!(
        "# Lines of the kernels that the cases of a sweep run\n\n\
         {cases} cases, launched once each on the emulator by `{command}`. Of {lines} lines {never} \
         never ran. A line of a header counts once for each kernel that includes it. *In part*: a \
         part of the line never ran, such as the statement behind an `if`.\n\n\
         | kernel | lines | never | without a reason | in part |\n\
         | --- | --: | --: | --: | --: |\n"
    );
    for kernel in kernels {
        page += &format!(
            "| `{}` | {} | {} | {} | {} |\n",
            kernel.kernel,
            kernel.lines,
            kernel.never.len(),
            kernel.unexplained().count(),
            kernel.in_part.len()
        );
    }
    page += &section("Never ran", kernels, |kernel| &kernel.never);
    page += &section("Ran in part", kernels, |kernel| &kernel.in_part);
    page
}

/// The lines of one kind, each with the kernels of which it is one.
fn section(
    title: &str,
    kernels: &[KernelCoverage],
    of: fn(&KernelCoverage) -> &Vec<Line>,
) -> String {
    let mut lines: BTreeMap<(&str, u32), (&Line, Vec<&str>)> = BTreeMap::new();
    for kernel in kernels {
        for line in of(kernel) {
            let known = lines.entry((&line.file, line.line)).or_insert((line, Vec::new()));
            known.1.push(&kernel.kernel);
        }
    }
    let mut text = format!("\n## {title}\n\n");
    if lines.is_empty() {
        return text + "No line.\n";
    }
    text += "| line | code | of | reason |\n| --- | --- | --- | --- |\n";
    for ((file, number), (line, kernels)) in lines {
        let code = line.text.replace('|', "\\|").replace('`', "'");
        let reason = line.reason.as_deref().unwrap_or("");
        text += &format!("| {file}:{number} | `{code}` | {} | {reason} |\n", kernels.join(", "));
    }
    text
}
