//! Which lines of the kernels ran.
//!
//! A device that counts has g++ instrument its modules (`--coverage`). A module adds its counts to
//! a file of the device's folder after each launch; the modules of several processes share the
//! folder. gcov, which g++ comes with, maps the counts to lines.
//!
//! Such modules have no checks of the compiler: each check is a branch that no right kernel takes,
//! and its line would never have run in full.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;

use crate::error::{Result, RuntimeError};
use crate::supervisor::run_within;

/// The options for g++, in the place of those of the checks. Threads of the host run blocks at the
/// same time; gcov derives some counts from others, so none may be lost.
pub(super) const OPTIONS: &[&str] = &["--coverage", "-fprofile-update=atomic", "-DPARITY_COVERAGE"];

/// The name of the exported function that adds the counts to the file.
pub(super) const DUMP: &str = "emulator_dump_counts";

/// How long gcov may take for one module.
const LIMIT: Duration = Duration::from_secs(120);

/// What is known of a line of a kernel's source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ran {
    /// No thread came to it.
    #[default]
    Never,
    /// In every instance of its function a part of it never ran, such as the statement behind an
    /// `if`.
    InPart,
    /// All of it ran.
    Whole,
}

/// The lines of each source file that are code, by file and line number (from 1).
pub type Lines = BTreeMap<String, BTreeMap<u32, Ran>>;

/// For each kernel file (`.cu`) that a device loaded: its lines and those of its headers.
pub type Coverage = BTreeMap<String, Lines>;

/// The name of a module's counts: its kernel file, and what tells its variants apart.
pub(super) fn name(file: &str, key: &str) -> String {
    format!("{}-{}", file.strip_suffix(".cu").unwrap_or(file), &key[..16])
}

/// Has the modules of this process count into `folder`. Call it before any other thread runs.
pub(super) fn count_into(folder: &Path) {
    // SAFETY: the process has just started. This thread is its only one, but for one that waits for
    // this one's end, so nothing else reads the environment.
    unsafe {
        // The compiled path is that of a folder which is gone: only its last part counts.
        std::env::set_var("GCOV_PREFIX", folder);
        std::env::set_var("GCOV_PREFIX_STRIP", "100");
    }
}

/// Which gcov belongs to a compiler: the one with its version in the name, where it has one.
fn gcov_of(compiler: &Path) -> PathBuf {
    let name = compiler.file_name().map(|name| name.to_string_lossy().into_owned());
    let version = name.as_deref().and_then(|name| name.strip_prefix("g++-"));
    compiler.with_file_name(version.map_or("gcov".to_owned(), |version| format!("gcov-{version}")))
}

/// Requires what counting needs: g++, and its gcov.
///
/// # Errors
/// [`RuntimeError::BackendMissing`].
pub(super) fn require(compiler: &Path, version: &str) -> Result<()> {
    let missing = |reason: String| RuntimeError::BackendMissing { backend: "emulator", reason };
    if version.contains("clang") {
        return Err(missing(format!("coverage of lines needs g++, and PARITY_CXX is {version}")));
    }
    let gcov = gcov_of(compiler);
    let ran = Command::new(&gcov).arg("--version").output();
    match ran {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            Err(missing(format!("`{}` answered {} to --version", gcov.display(), output.status)))
        }
        Err(error) => Err(missing(format!(
            "coverage of lines needs gcov, which g++ comes with; `{}` could not be run ({error})",
            gcov.display()
        ))),
    }
}

/// What gcov prints of a module.
#[derive(Deserialize)]
struct Printed {
    files: Vec<PrintedFile>,
}

#[derive(Deserialize)]
struct PrintedFile {
    file: String,
    lines: Vec<PrintedLine>,
}

#[derive(Deserialize)]
struct PrintedLine {
    line_number: u32,
    /// Below 0 where a kernel ended in the middle of a function, so that more threads left it.
    count: i64,
    unexecuted_block: bool,
}

/// Reads the counts in a folder of a device that compiled with `compiler` (`None` for the usual
/// one). A module that was loaded and never launched has only lines that never ran.
///
/// # Errors
/// A folder that cannot be read; a gcov that fails.
pub fn read(folder: &Path, compiler: Option<PathBuf>) -> Result<Coverage> {
    let gcov = gcov_of(&compiler.unwrap_or_else(super::usual_compiler));
    let reading = |e| RuntimeError::system(format!("reading {}", folder.display()), e);
    let mut coverage = Coverage::new();
    for entry in std::fs::read_dir(folder).map_err(reading)? {
        let path = entry.map_err(reading)?.path();
        let Some(module) =
            path.file_stem().filter(|_| path.extension().is_some_and(|e| e == "gcno"))
        else {
            continue;
        };
        let module = module.to_string_lossy();
        let kernel = module.rsplit_once('-').map_or(&*module, |(kernel, _)| kernel);
        let of_kernel = coverage.entry(format!("{kernel}.cu")).or_default();
        for file in printed(&gcov, folder, &path)?.files {
            let lines = of_kernel.entry(file.file).or_default();
            for line in file.lines {
                let ran = match (line.count, line.unexecuted_block) {
                    (0, _) => Ran::Never,
                    (_, true) => Ran::InPart,
                    (_, false) => Ran::Whole,
                };
                let known = lines.entry(line.line_number).or_default();
                *known = ran.max(*known);
            }
        }
    }
    Ok(coverage)
}

fn printed(gcov: &Path, folder: &Path, notes: &Path) -> Result<Printed> {
    let failed = |why: String| {
        let doing = format!("running {} on {}", gcov.display(), notes.display());
        RuntimeError::system(doing, std::io::Error::other(why))
    };
    let mut command = Command::new(gcov);
    command.args(["--json-format", "--stdout"]).arg(notes).current_dir(folder);
    match run_within(&command, LIMIT) {
        Ok(Some(ended)) if ended.status.success() => {
            // Warnings, such as of a module without counts, are lines beside the one of JSON.
            let json = ended.words.lines().find(|line| line.starts_with('{'));
            let json = json.ok_or_else(|| failed("it printed no JSON".into()))?;
            serde_json::from_str(json).map_err(|e| failed(format!("it printed other JSON: {e}")))
        }
        Ok(Some(ended)) => Err(failed(ended.words.trim().to_owned())),
        Ok(None) => Err(failed(format!("it did not end within {} s", LIMIT.as_secs()))),
        Err(error) => Err(failed(error.to_string())),
    }
}
