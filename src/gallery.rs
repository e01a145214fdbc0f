//! Judges public kernels ([`report::gallery`]): each in processes of `parity external` of its own, so
//! that what ends one leaves the others alone.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use dsv4_runtime::process::this_program;
use dsv4_runtime::supervisor::{Supervised, run_within};
use rayon::prelude::*;
use serde::Deserialize;

use crate::case::shell::quoted;
use crate::record::words::brief;
use crate::record::{Report, journal};
use crate::report;
use crate::report::beside::log;
use crate::report::diff;
use crate::report::gallery::list::{Kernel, Library, List};
use crate::report::gallery::page::{Entry, Outcome};

/// Seconds that Python may take to look for modules.
const LOOKING: Duration = Duration::from_secs(60);

/// Prints which modules are missing and the distribution's version. The first argument is the
/// distribution, the others are modules.
const LOOK: &str = "\
import importlib.metadata as m, importlib.util as u, json, sys
try: version = m.version(sys.argv[1])
except m.PackageNotFoundError: version = ''
print(json.dumps({'version': version, 'missing': [n for n in sys.argv[2:] if u.find_spec(n) is None]}))";

/// What Python says of a library.
#[derive(Clone, Debug, Deserialize)]
pub struct Found {
    /// Its version; empty where the distribution is not installed.
    pub version: String,
    /// Modules that it needs and that are not installed.
    pub missing: Vec<String>,
}

/// How kernels are judged.
#[derive(Clone, Debug)]
pub struct Judges {
    /// The kernels and their libraries.
    pub list: List,
    /// The Python that has the libraries.
    pub python: String,
    /// Folders that come first on the path of one library.
    pub sites: Vec<(String, PathBuf)>,
    /// How many kernels are judged at the same time.
    pub jobs: usize,
    /// How long each may take, and then as long again for its rows in other batches.
    pub limit: Duration,
    /// Further arguments of `parity external`: which cases.
    pub sweep: Vec<String>,
    /// Where each kernel has a folder and a log.
    pub out: PathBuf,
    /// Reports that an earlier run has left there since then, in seconds since 1970, stay.
    pub resumed: Option<u64>,
}

impl Judges {
    /// Asks Python for the modules and the version of each library.
    ///
    /// # Errors
    /// A Python that cannot be started, or that does not answer.
    pub fn look_for_libraries(&self) -> Result<BTreeMap<String, Found>> {
        self.list.libraries.iter().map(|one| Ok((one.name.clone(), self.look_for(one)?))).collect()
    }

    fn look_for(&self, library: &Library) -> Result<Found> {
        let python = &self.python;
        let mut command = Command::new(python);
        self.give_site(&library.name, &mut command)?;
        command.args(["-c", LOOK, &library.distribution]).args(&library.requires);
        let ended = run_within(&command, LOOKING).with_context(|| format!("--python {python}"))?;
        let Some(ended) = ended else { bail!("--python {python}: no answer within a minute") };
        // Libraries may print of their own when a module's parent is imported.
        let answer = ended.words.lines().last().unwrap_or_default();
        let found = serde_json::from_str(answer).ok().filter(|_| ended.status.success());
        let Some(found) = found else { bail!("--python {python}: {}", brief(answer)) };
        Ok(found)
    }

    /// Lets Python find a library's own packages first.
    fn give_site(&self, library: &str, command: &mut Command) -> Result<()> {
        let own = self.sites.iter().filter(|(name, _)| name == library).map(|(_, dir)| dir.clone());
        let given = std::env::var_os("PYTHONPATH").unwrap_or_default();
        let all: Vec<PathBuf> = own.chain(std::env::split_paths(&given)).collect();
        if !all.is_empty() {
            command.env("PYTHONPATH", std::env::join_paths(all).context("PYTHONPATH")?);
        }
        Ok(())
    }

    /// Judges kernels, several at the same time, and returns them in their order. `done` is called
    /// after each.
    ///
    /// # Errors
    /// Threads that the system does not start.
    pub fn judge(
        &self,
        kernels: &[Kernel],
        libraries: &BTreeMap<String, Found>,
        done: &(dyn Fn(&Kernel) + Sync),
    ) -> Result<Vec<Entry>> {
        let entry = |kernel: &Kernel| {
            let outcome = self.judge_one(kernel, libraries.get(&kernel.library));
            done(kernel);
            Entry { kernel: kernel.clone(), outcome }
        };
        let threads = rayon::ThreadPoolBuilder::new().num_threads(self.jobs).build()?;
        Ok(threads.install(|| kernels.par_iter().with_max_len(1).map(entry).collect()))
    }

    fn judge_one(&self, kernel: &Kernel, found: Option<&Found>) -> Outcome {
        let missing = found.map_or(&[][..], |found| &found.missing);
        let folder = kernel.folder();
        let left = |name: &str| self.left(&self.out.join(name)).ok().flatten();
        if !missing.is_empty() {
            // What an earlier run has judged needs no library.
            let judged = left(&folder).map(|judged| {
                let batches = left(&format!("{folder}-batches")).unwrap_or_else(|| judged.clone());
                Outcome::Judged(Box::new([judged, batches]))
            });
            let before = if self.resumed.is_some() { "not judged before, and " } else { "" };
            let missing = format!("{before}{} is not installed", missing.join(", "));
            return judged.unwrap_or(Outcome::NotRun(missing));
        }
        let reports = || -> Result<_> {
            let judged = self.sweep(kernel, &self.out.join(&folder), &[])?;
            // A kernel that none of its cases suits has no rows.
            let batches = if judged.cases.is_empty() {
                judged.clone()
            } else {
                let out = self.out.join(format!("{folder}-batches"));
                self.sweep(kernel, &out, &["--only", "batch_invariance"])?
            };
            Ok(Box::new([judged, batches]))
        };
        reports().map_or_else(|error| Outcome::NotRun(format!("{error:#}")), Outcome::Judged)
    }

    /// The report that a resumed run has left in a folder.
    fn left(&self, out: &Path) -> Result<Option<Report>> {
        let Some(since) = self.resumed else { return Ok(None) };
        let left = out.join("report.json").is_file().then(|| diff::read(out)).transpose()?;
        Ok(left.filter(|report| report.started_unix >= since))
    }

    /// Runs `parity external` with these further arguments, and reads its report.
    fn sweep(&self, kernel: &Kernel, out: &Path, more: &[&str]) -> Result<Report> {
        if let Some(left) = self.left(out)? {
            return Ok(left);
        }
        std::fs::create_dir_all(out).with_context(|| format!("making {}", out.display()))?;
        let path = out.with_extension("log");
        let file = File::create(&path).with_context(|| format!("writing {}", path.display()))?;
        let mut command = self.command(kernel, out);
        self.give_site(&kernel.library, &mut command)?;
        command.args(more);
        let streams = [Stdio::null(), file.try_clone()?.into(), file.into()];
        let since = log::now();
        let mut running = Supervised::spawn(&command, streams)?;
        let status = running.wait_within(self.limit)?;
        running.end();
        // What an earlier run left is not of this one.
        match read(out, status.is_some())?.filter(|report| report.started_unix >= since) {
            Some(report) => Ok(report),
            None if status.is_none() => bail!("no case within {} seconds", self.limit.as_secs()),
            None => bail!(last_words(&path)),
        }
    }

    fn command(&self, kernel: &Kernel, out: &Path) -> Command {
        let mut command = this_program();
        command.args(["external", "--op", &kernel.operator, "--worker", &self.worker(kernel)]);
        if let Some(adapter) = &kernel.adapter {
            command.arg("--adapter").arg(self.list.file(adapter));
        }
        if kernel.forward_only {
            command.arg("--forward-only");
        }
        // Libraries compile at the first call of a shape.
        command.args(["--time-limit", &self.limit.as_secs().to_string()]);
        command.args(&self.sweep).arg("--out").arg(out);
        command
    }

    /// The command of a kernel's worker, for a shell.
    fn worker(&self, kernel: &Kernel) -> String {
        let (script, rest) = kernel.worker.split_once(' ').unwrap_or((&kernel.worker, ""));
        let script = self.list.file(script).display().to_string();
        let words = format!("{} {} {rest}", quoted(&self.python), quoted(&script));
        words.trim_end().to_owned()
    }
}

/// The report of a process that has ended by itself or was ended.
fn read(out: &Path, ended: bool) -> Result<Option<Report>> {
    if out.join("report.json").is_file() {
        return diff::read(out).map(Some);
    }
    let unfinished = if ended { None } else { journal::read_unfinished(out)? };
    if let Some(report) = &unfinished {
        report::write_all(report, out)?;
    }
    Ok(unfinished.filter(|report| !report.cases.is_empty()))
}

/// What a process said last: why it has no report.
fn last_words(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let from = text.rfind("parity: ").unwrap_or(0);
    let lines = text[from..].lines().map(str::trim);
    let lines: Vec<&str> =
        lines.filter(|line| !line.is_empty() && !line.starts_with("hint:")).collect();
    brief(lines.join("; ").trim_start_matches("parity: "))
}
