//! `parity gallery`.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use dsv4_runtime::process::this_program;
use dsv4_runtime::supervisor::{Supervised, run_within};
use dsv4_runtime::{BackendKind, Device};
use serde::Deserialize;

use super::progress::Steps;
use super::sweep::SweepArguments;
use super::{Exit, command_line};
use crate::case::shell::quoted;
use crate::record::words::brief;
use crate::record::{Report, journal};
use crate::report;
use crate::report::beside::log::{self, Timings};
use crate::report::beside::pairs::Pairs;
use crate::report::diff;
use crate::report::gallery::list::{Kernel, Library, List};
use crate::report::gallery::page::{Entry, Outcome, Place, page};
use crate::sweep::regressions::fixtures_dir;

/// The page.
const PAGE: &str = "gallery.md";

/// Seconds that Python may take to look for modules.
const LOOKING: Duration = Duration::from_secs(60);

/// Prints which modules are missing and the distribution's version. The first argument is the
/// distribution, the others are modules.
const LOOK: &str = "\
import importlib.metadata as m, importlib.util as u, json, sys
try: version = m.version(sys.argv[1])
except m.PackageNotFoundError: version = ''
print(json.dumps({'version': version, 'missing': [n for n in sys.argv[2:] if u.find_spec(n) is None]}))";

/// Options of `parity gallery`.
#[derive(Debug, Args)]
pub struct GalleryArguments {
    /// The list of libraries and kernels [default: external/gallery.toml of the fixtures]
    #[arg(value_name = "FILE")]
    list: Option<PathBuf>,
    /// Only kernels of these libraries or operators
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    only: Vec<String>,
    /// The Python that has the libraries
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    python: String,
    /// Python packages of one library, before others: its dependencies may be other versions than
    /// those of the rest
    #[arg(long, value_name = "LIBRARY=DIR", value_parser = site)]
    site: Vec<(String, PathBuf)>,
    /// Kernels that are judged at the same time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    jobs: u16,
    /// Seconds for each kernel, after which the cases that have run make its report
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    seconds: u64,
    /// Show speeds from logs of `parity beside`: its list of pairs
    #[arg(long, value_name = "FILE", requires = "log")]
    pairs: Option<PathBuf>,
    /// A log of either side
    #[arg(long, value_name = "FILE", requires = "pairs")]
    log: Vec<PathBuf>,
    /// Folder for the page, and for a report and a log of each kernel
    #[arg(long, value_name = "DIR", default_value = "reports/gallery")]
    out: PathBuf,
    /// Also write the page here
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    #[command(flatten)]
    sweep: SweepArguments,
}

fn site(text: &str) -> Result<(String, PathBuf), String> {
    let (library, folder) = text.split_once('=').ok_or("it must be LIBRARY=DIR")?;
    Ok((library.to_owned(), PathBuf::from(folder)))
}

/// What Python says of a library.
#[derive(Clone, Debug, Deserialize)]
struct Found {
    version: String,
    missing: Vec<String>,
}

/// Judges each kernel of the list and writes the page; the exit code is 1 when one disagrees.
pub fn execute(arguments: &GalleryArguments) -> Result<Exit> {
    let path =
        arguments.list.clone().unwrap_or_else(|| fixtures_dir().join("external/gallery.toml"));
    let list = List::read(&path)?;
    let kernels: Vec<&Kernel> =
        list.kernels.iter().filter(|kernel| kernel.is_among(&arguments.only)).collect();
    if kernels.is_empty() {
        bail!(
            "--only {}: {} has no such library or operator",
            arguments.only.join(","),
            path.display()
        );
    }
    // Wrong files are told before minutes are spent.
    let times = arguments
        .pairs
        .as_ref()
        .map(|pairs| -> Result<_> { Ok((Pairs::read(pairs)?, Timings::read(&arguments.log)?)) });
    let (times, unix) = (times.transpose()?, log::now());
    std::fs::create_dir_all(&arguments.out)
        .with_context(|| format!("--out {}", arguments.out.display()))?;
    for (library, folder) in &arguments.site {
        if list.libraries.iter().all(|one| one.name != *library) {
            bail!("--site {library}: {} has no such library", path.display());
        }
        if !folder.is_dir() {
            bail!("--site {library}: {} is no folder", folder.display());
        }
    }
    let libraries = look_for(arguments, &list)?;
    let entries = judge_all(arguments, &list, &kernels, &libraries);
    let named = |(name, found): (&String, &Found)| {
        let is_there = found.missing.is_empty() && !found.version.is_empty();
        is_there.then(|| (name.clone(), found.version.clone()))
    };
    let versions = libraries.iter().filter_map(named).collect();
    let place =
        Place { command: command_line().join(" "), machine: machine(), versions, unix, times };
    let page = page(&place, &list, &entries);
    let own = arguments.out.join(PAGE);
    for path in [Some(&own), arguments.markdown.as_ref()].into_iter().flatten() {
        std::fs::write(path, &page).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(summarise(&entries, &own))
}

/// The GPU and its driver, or that there is none.
fn machine() -> String {
    match Device::open(BackendKind::Cuda, dsv4_kernels::device_options()) {
        Ok(device) => {
            let environment = device.environment();
            format!("{}, {}", environment.device, environment.driver)
        }
        Err(_) => "no GPU".to_owned(),
    }
}

/// Prints a line for each kernel that does not agree, and the numbers of all.
fn summarise(entries: &[Entry], page: &Path) -> Exit {
    let mut numbers = [0u64; 3];
    for entry in entries {
        let title = format!("{} ({})", entry.kernel.title(), entry.kernel.operator);
        match &entry.outcome {
            Outcome::NotRun(why) => outln!("not run: {title}: {why}"),
            Outcome::Judged(_) if entry.disagrees() => outln!("disagrees: {title}"),
            Outcome::Judged(_) if !entry.agrees() => outln!("no case is supported: {title}"),
            Outcome::Judged(_) => {}
        }
        numbers[if entry.agrees() {
            0
        } else if entry.disagrees() {
            1
        } else {
            2
        }] += 1;
    }
    let [agree, disagree, rest] = numbers;
    outln!("{agree} kernels agree, {disagree} disagree, {rest} did not run");
    outln!("page: {}", page.display());
    match (agree, disagree) {
        (0, 0) => Exit::BadInput,
        (_, 0) => Exit::Agreed,
        _ => Exit::Disagreed,
    }
}

impl GalleryArguments {
    /// Lets Python find a library's own packages first.
    fn give_site(&self, library: &str, command: &mut Command) -> Result<()> {
        let own = self.site.iter().filter(|(name, _)| name == library).map(|(_, dir)| dir.clone());
        let given = std::env::var_os("PYTHONPATH").unwrap_or_default();
        let all: Vec<PathBuf> = own.chain(std::env::split_paths(&given)).collect();
        if !all.is_empty() {
            command.env("PYTHONPATH", std::env::join_paths(all).context("PYTHONPATH")?);
        }
        Ok(())
    }
}

/// Asks Python for the modules and the version of each library.
fn look_for(arguments: &GalleryArguments, list: &List) -> Result<BTreeMap<String, Found>> {
    let python = &arguments.python;
    let of = |library: &Library| -> Result<_> {
        let mut command = Command::new(python);
        arguments.give_site(&library.name, &mut command)?;
        command.args(["-c", LOOK, &library.distribution]).args(&library.requires);
        let ended = run_within(&command, LOOKING).with_context(|| format!("--python {python}"))?;
        let Some(ended) = ended else { bail!("--python {python}: no answer within a minute") };
        // Libraries may print of their own when a module's parent is imported.
        let answer = ended.words.lines().last().unwrap_or_default();
        let found = serde_json::from_str(answer).ok().filter(|_| ended.status.success());
        let Some(found) = found else { bail!("--python {python}: {}", brief(answer)) };
        Ok((library.name.clone(), found))
    };
    list.libraries.iter().map(of).collect()
}

/// Judges kernels, several at the same time, and keeps their order.
fn judge_all(
    arguments: &GalleryArguments,
    list: &List,
    kernels: &[&Kernel],
    libraries: &BTreeMap<String, Found>,
) -> Vec<Entry> {
    let steps = Steps::of(Some(kernels.len()), "kernels");
    let next = AtomicUsize::new(0);
    let outcomes: Vec<_> = kernels.iter().map(|_| Mutex::new(None)).collect();
    std::thread::scope(|scope| {
        for _ in 0..arguments.jobs {
            drop(scope.spawn(|| {
                while let Some(kernel) = kernels.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let found = libraries.get(&kernel.library);
                    let outcome = judge(arguments, list, kernel, found);
                    steps.set_message(&kernel.title());
                    steps.step();
                    let at = kernels.iter().position(|other| std::ptr::eq(*other, *kernel));
                    if let Some(place) = at.and_then(|at| outcomes.get(at)) {
                        *place.lock().unwrap_or_else(|e| e.into_inner()) = Some(outcome);
                    }
                }
            }));
        }
    });
    steps.end();
    let entry = |(kernel, outcome): (&&Kernel, Mutex<Option<Outcome>>)| {
        let outcome = outcome.into_inner().unwrap_or_else(|e| e.into_inner());
        let outcome = outcome.unwrap_or(Outcome::NotRun("its thread ended".to_owned()));
        Entry { kernel: (*kernel).clone(), outcome }
    };
    kernels.iter().zip(outcomes).map(entry).collect()
}

/// Judges one kernel in processes of its own.
fn judge(
    arguments: &GalleryArguments,
    list: &List,
    kernel: &Kernel,
    found: Option<&Found>,
) -> Outcome {
    let missing = found.map_or(&[][..], |found| &found.missing);
    if !missing.is_empty() {
        return Outcome::NotRun(format!("{} is not installed", missing.join(", ")));
    }
    let out = arguments.out.join(kernel.folder());
    let reports = || -> Result<_> {
        let judged = sweep(arguments, list, kernel, &out, &[])?;
        let only = ["--only", "batch_invariance"];
        // A kernel that none of its cases suits has no rows.
        let batches = if judged.cases.is_empty() {
            judged.clone()
        } else {
            let folder = format!("{}-batches", kernel.folder());
            sweep(arguments, list, kernel, &arguments.out.join(folder), &only)?
        };
        Ok(Box::new([judged, batches]))
    };
    reports().map_or_else(|error| Outcome::NotRun(format!("{error:#}")), Outcome::Judged)
}

/// Runs `parity external` with these further arguments, and reads its report.
fn sweep(
    arguments: &GalleryArguments,
    list: &List,
    kernel: &Kernel,
    out: &Path,
    more: &[&str],
) -> Result<Report> {
    std::fs::create_dir_all(out).with_context(|| format!("making {}", out.display()))?;
    let path = out.with_extension("log");
    let file = File::create(&path).with_context(|| format!("writing {}", path.display()))?;
    let mut command = command(arguments, list, kernel, out);
    arguments.give_site(&kernel.library, &mut command)?;
    command.args(more);
    let streams = [Stdio::null(), file.try_clone()?.into(), file.into()];
    let since = log::now();
    let mut running = Supervised::spawn(&command, streams)?;
    let status = running.wait_within(Duration::from_secs(arguments.seconds))?;
    running.end();
    // What an earlier run left is not of this one.
    match read(out, status.is_some())?.filter(|report| report.started_unix >= since) {
        Some(report) => Ok(report),
        None if status.is_none() => bail!("no case within {} seconds", arguments.seconds),
        None => bail!(last_words(&path)),
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

fn command(arguments: &GalleryArguments, list: &List, kernel: &Kernel, out: &Path) -> Command {
    let mut command = this_program();
    command.args(["external", "--op", &kernel.operator, "--worker"]);
    command.arg(worker(&arguments.python, list, kernel));
    if let Some(adapter) = &kernel.adapter {
        command.arg("--adapter").arg(list.file(adapter));
    }
    if kernel.forward_only {
        command.arg("--forward-only");
    }
    let SweepArguments { cases, edge_cases, seed, .. } = &arguments.sweep;
    // Libraries compile at the first call of a shape.
    command.args(["--time-limit", &arguments.seconds.to_string()]);
    command.args(["--profile", arguments.sweep.profile().name()]);
    for (option, value) in [("--cases", cases), ("--edge-cases", edge_cases)] {
        if let Some(value) = value {
            command.args([option, &value.to_string()]);
        }
    }
    command.args(["--seed", &seed.number().to_string(), "--out"]).arg(out);
    command
}

/// The command of a kernel's worker, for a shell.
fn worker(python: &str, list: &List, kernel: &Kernel) -> String {
    let (script, rest) = kernel.worker.split_once(' ').unwrap_or((&kernel.worker, ""));
    let script = list.file(script).display().to_string();
    format!("{} {} {rest}", quoted(python), quoted(&script)).trim_end().to_owned()
}
