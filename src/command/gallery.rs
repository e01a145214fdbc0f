//! `parity gallery`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use dsv4_runtime::{BackendKind, Device};
use serde::{Deserialize, Serialize};

use super::progress::Steps;
use super::sweep::SweepArguments;
use super::{Exit, command_line};
use crate::gallery::{Found, Judges};
use crate::report::beside::log::{self, Timings};
use crate::report::beside::pairs::Pairs;
use crate::report::gallery::list::{Kernel, List};
use crate::report::gallery::page::{Entry, Outcome, Place, numbers, page};
use crate::sweep::regressions::fixtures_dir;

/// The page, and what it says about the start of its run.
const PAGE: &str = "gallery.md";
const START: &str = "gallery.json";

/// Where and when a run has started, for one that resumes it.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Start {
    machine: String,
    versions: BTreeMap<String, String>,
    unix: u64,
}

impl Start {
    /// Of the run that is resumed, or of this one, which leaves it in the folder.
    fn of(arguments: &GalleryArguments, libraries: &BTreeMap<String, Found>) -> Result<Self> {
        let path = arguments.out.join(START);
        let named = |(name, found): (&String, &Found)| {
            let is_there = found.missing.is_empty() && !found.version.is_empty();
            is_there.then(|| (name.clone(), found.version.clone()))
        };
        let versions: BTreeMap<_, _> = libraries.iter().filter_map(named).collect();
        if arguments.resume {
            let text = std::fs::read_to_string(&path)
                .with_context(|| format!("--resume: reading {}", path.display()))?;
            let mut start: Self = serde_json::from_str(&text)
                .with_context(|| format!("--resume: {}", path.display()))?;
            versions.into_iter().for_each(|(name, version)| {
                start.versions.entry(name).or_insert(version);
            });
            return Ok(start);
        }
        let start = Self { machine: machine(), versions, unix: log::now() };
        let text = serde_json::to_string_pretty(&start)?;
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        Ok(start)
    }
}

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
    /// Keep what an interrupted run has judged in --out, and judge the rest
    #[arg(long)]
    resume: bool,
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

/// Judges each kernel of the list and writes the page; the exit code is 1 when one disagrees.
pub fn execute(arguments: &GalleryArguments) -> Result<Exit> {
    let path =
        arguments.list.clone().unwrap_or_else(|| fixtures_dir().join("external/gallery.toml"));
    let list = List::read(&path)?;
    let chosen = list.kernels.iter().filter(|kernel| kernel.is_among(&arguments.only));
    let kernels: Vec<Kernel> = chosen.cloned().collect();
    if kernels.is_empty() {
        let only = arguments.only.join(",");
        bail!("--only {only}: {} has no such library or operator", path.display());
    }
    // Wrong files are told before minutes are spent.
    let times = times_of(arguments)?;
    check_sites(arguments, &list, &path)?;
    let out = &arguments.out;
    std::fs::create_dir_all(out).with_context(|| format!("--out {}", out.display()))?;
    let mut judges = judges(arguments, list);
    let libraries = judges.look_for_libraries()?;
    let start = Start::of(arguments, &libraries)?;
    judges.resumed = arguments.resume.then_some(start.unix);
    let entries = judged(&judges, &kernels, &libraries)?;
    let (command, Start { machine, versions, unix }) = (command_line().join(" "), start);
    let place = Place { command, machine, versions, unix, times };
    let (page, own) = (page(&place, &judges.list, &entries), out.join(PAGE));
    for path in [Some(&own), arguments.markdown.as_ref()].into_iter().flatten() {
        std::fs::write(path, &page).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(summarise(&entries, &own))
}

/// The pairs and the logs of `parity beside`, if they were given.
fn times_of(arguments: &GalleryArguments) -> Result<Option<(Pairs, Timings)>> {
    let Some(pairs) = &arguments.pairs else { return Ok(None) };
    Ok(Some((Pairs::read(pairs)?, Timings::read(&arguments.log)?)))
}

/// Rejects folders that are not there, and those of a library that the list does not have.
fn check_sites(arguments: &GalleryArguments, list: &List, path: &Path) -> Result<()> {
    for (library, folder) in &arguments.site {
        if list.libraries.iter().all(|one| one.name != *library) {
            bail!("--site {library}: {} has no such library", path.display());
        }
        if !folder.is_dir() {
            bail!("--site {library}: {} is no folder", folder.display());
        }
    }
    Ok(())
}

fn judges(arguments: &GalleryArguments, list: List) -> Judges {
    Judges {
        list,
        python: arguments.python.clone(),
        sites: arguments.site.clone(),
        jobs: arguments.jobs.into(),
        limit: Duration::from_secs(arguments.seconds),
        sweep: words_of(&arguments.sweep),
        out: arguments.out.clone(),
        resumed: None,
    }
}

/// What became of each kernel, with progress.
fn judged(
    judges: &Judges,
    kernels: &[Kernel],
    libraries: &BTreeMap<String, Found>,
) -> Result<Vec<Entry>> {
    let steps = Steps::of(Some(kernels.len()), "kernels");
    let done = |kernel: &Kernel| {
        steps.set_message(&kernel.title());
        steps.step();
    };
    let entries = judges.judge(kernels, libraries, &done);
    steps.end();
    entries
}

/// The cases, as options of `parity external`.
fn words_of(sweep: &SweepArguments) -> Vec<String> {
    let given = |option: &str, value: Option<usize>| value.map(|n| [option.into(), n.to_string()]);
    let numbers = [given("--cases", sweep.cases), given("--edge-cases", sweep.edge_cases)];
    let fixed = ["--profile".into(), sweep.profile().name().to_owned()];
    let seed = ["--seed".into(), sweep.seed.number().to_string()];
    [fixed, seed].into_iter().chain(numbers.into_iter().flatten()).flatten().collect()
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
    for entry in entries {
        let title = format!("{} ({})", entry.kernel.title(), entry.kernel.operator);
        match &entry.outcome {
            Outcome::NotRun(why) => outln!("not run: {title}: {why}"),
            Outcome::Judged(_) if entry.disagrees() => outln!("disagrees: {title}"),
            Outcome::Judged(_) if !entry.agrees() => outln!("no case is supported: {title}"),
            Outcome::Judged(_) => {}
        }
    }
    let [agree, disagree, rest] = numbers(entries);
    outln!("{agree} kernels agree, {disagree} disagree, {rest} did not run");
    outln!("page: {}", page.display());
    match (agree, disagree) {
        (0, 0) => Exit::BadInput,
        (_, 0) => Exit::Agreed,
        _ => Exit::Disagreed,
    }
}
