//! `parity run`.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::Args;
use dsv4_kernels::runtime::interrupt::on_interrupt;
use dsv4_kernels::runtime::{BackendKind, Device};
use indicatif::{ProgressBar, ProgressStyle};

use super::benchmarks::{self, Measured};
use super::sweep::SweepArguments;
use super::{DeviceArguments, Exit, workers};
use crate::judge::checks::CheckOptions;
use crate::judge::runner::Runner;
use crate::operator::{Operator, registry, size};
use crate::record::journal::{self, Identity, Journal, PlanRecord, Remembered, RunDescription, Shard};
use crate::record::words::printable;
use crate::record::{CaseRecord, Origin, Report, Revision, SCHEMA_VERSION, Settings, Skip, Verdict};
use crate::report::diagnosis::terminal;
use crate::report::numbers::counted;
use crate::report::{self, history};
use crate::sweep::merge;
use crate::sweep::progress::Progress;
use crate::sweep::regressions::Regressions;
use crate::sweep::shard::{Costs, Plan};
use crate::sweep::{self, Observer, PlannedCase, SweepOptions};

/// Options of `parity run`.
#[derive(Debug, Args)]
pub struct RunArguments {
    /// Operators, comma-separated; all when absent
    #[arg(long, value_name = "A,B")]
    pub(super) ops: Option<String>,
    #[command(flatten)]
    pub(super) sweep: SweepArguments,
    /// Random schedules to run each case under, beyond the deterministic one (emulator); 2 with profile quick and
    /// otherwise 4 when absent, 0 for none
    #[arg(long)]
    pub(super) schedules: Option<u32>,
    /// Draw no case of an operator after this time; those left out are counted as skipped. Remembered cases and edge cases
    /// always run
    #[arg(long, value_name = "SECONDS", conflicts_with = "shard")]
    time_budget: Option<u64>,
    /// Folder for report.json, index.html, summary.md and records.jsonl
    #[arg(long, default_value = "reports/latest", value_name = "DIR")]
    pub(super) out: PathBuf,
    /// Criterion's directory, whose results join the report; target/criterion, if there are any, when absent
    #[arg(long, value_name = "DIR")]
    criterion: Option<PathBuf>,
    /// The benchmarks' executable, which cargo bench --no-run names: runs before the sweep; its results join the report,
    /// and benchmarks.txt in --out is what it prints
    #[arg(long, value_name = "FILE", conflicts_with_all = ["criterion", "shard"])]
    benchmarks: Option<PathBuf>,
    /// Folder of remembered failing cases
    #[arg(long, value_name = "DIR")]
    pub(super) regressions: Option<PathBuf>,
    /// Run part I of N, counted from 0; `parity merge` puts the parts together
    #[arg(long, value_name = "I/N")]
    shard: Option<Shard>,
    /// Divide the sweep over N processes, on as many GPUs as there are, and put it together again. Those on one GPU
    /// share its memory: what needs much of it waits until that is free
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256), conflicts_with_all = ["shard", "time_budget"])]
    workers: Option<u32>,
    /// A report.json or records.jsonl whose costs balance shards or workers; the same file for each shard
    #[arg(long, value_name = "FILE")]
    pub(super) costs: Option<PathBuf>,
    /// Continue the run that was interrupted in --out; begin one if there is none
    #[arg(long)]
    pub(super) resume: bool,
    /// History file to append this run's measures to (parity history)
    #[arg(long, value_name = "FILE", conflicts_with = "shard")]
    history: Option<PathBuf>,
    /// This is a worker of another run, which says what failed
    #[arg(long, hide = true)]
    part_of_another: bool,
    #[command(flatten)]
    pub(super) device: DeviceArguments,
}

/// Sweeps and writes the report; 1 when something disagrees.
pub fn execute(arguments: &RunArguments) -> Result<Exit> {
    let shard = arguments.shard.map(|_| "--shard");
    arguments.sweep.seed.announce(shard.or(arguments.resume.then_some("--resume")))?;
    if arguments.costs.is_some() && arguments.shard.is_none() && arguments.workers.is_none() {
        bail!("--costs: it balances shards or workers, and neither --shard nor --workers is given");
    }
    let operators = registry::select(arguments.ops.as_deref())?;
    journal::refuse_foreign(&arguments.out)?;
    let device = arguments.device.open()?;
    // Before anything else runs: what cannot be understood must not cost a finished sweep its report.
    let measured = match &arguments.benchmarks {
        Some(file) => benchmarks::run(file, arguments.ops.as_deref(), &arguments.device, &device, &arguments.out)?,
        None => benchmarks::earlier(arguments.criterion.as_deref(), &device)?,
    };
    let Measured { found: measured, agreed } = measured;
    let started_unix = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let start = Instant::now();
    let workers = arguments.workers.filter(|&workers| workers > 1);
    let swept = match workers {
        Some(workers) => {
            let environment = device.environment().clone();
            // Its memory is for the workers.
            drop(device);
            let report = workers::sweep(arguments, workers, &environment)?;
            // They ran at the same time, on one machine.
            Report { seconds: start.elapsed().as_secs_f64(), started_unix, ..report }
        }
        None => sweep_here(arguments, &operators, &device, started_unix, start)?,
    };
    let is_first = arguments.shard.is_none_or(|shard| shard.index == 0);
    let skips = swept.skips.into_iter().chain(measured.skip.filter(|_| is_first)).collect();
    let report = Report { benchmarks: measured.benchmarks, ceilings: measured.ceilings, skips, ..swept };
    finish(&report, arguments, workers.is_some())?;
    let exit = exit_of(&report, arguments.shard.is_none())?;
    Ok(if agreed { exit } else { Exit::Disagreed })
}

/// Runs the cases in this process: all of them, or those of `--shard`.
fn sweep_here(
    arguments: &RunArguments,
    operators: &[&dyn Operator],
    device: &Device,
    started_unix: u64,
    start: Instant,
) -> Result<Report> {
    let options = sweep_options(arguments, device);
    let begun = if arguments.resume { journal::read_plan(&arguments.out)? } else { None };
    let remembered = match &begun {
        Some(begun) => begun.remembered.clone(),
        None => load_remembered(operators, &options.regressions)?,
    };
    let shard = arguments.shard.unwrap_or(Shard::WHOLE);
    let costs = arguments.costs.as_deref().map(Costs::read).transpose()?.unwrap_or_default();
    let plan = Plan::new(operators, &remembered, &options, device.environment(), shard.count, &costs)?;
    // They are skips of the run, not of each shard: the first one says so.
    let of_the_run = || skips(device, arguments).into_iter().chain(plan.skips.clone()).collect();
    let of_the_run: Vec<Skip> = if shard.index == 0 { of_the_run() } else { Vec::new() };
    let run = RunDescription {
        command: arguments.sweep.seed.command(),
        started_unix,
        profile: arguments.sweep.profile.name().to_owned(),
        seed: arguments.sweep.seed.number(),
        schedules: options.checks.schedules,
        operators: operators.iter().map(|operator| operator.describe()).collect(),
        skips: of_the_run,
    };
    let names = arguments.ops.as_deref().unwrap_or("all");
    let settings = settings(names, &arguments.sweep, arguments.costs.as_deref(), &options, &remembered)?;
    let record = PlanRecord { settings, ..plan_record(&plan, shard, remembered, device, run) };
    let mut writer = RecordWriter::open(&arguments.out, begun.as_ref(), &record)?;
    writer.hold_to(&plan, shard)?;
    writer.say_when_interrupted(&arguments.out, record.shard_cases)?;
    if arguments.part_of_another {
        writer.noted = MOST_NOTES;
    }
    let taken_over: f64 = writer.cases.iter().map(|case| case.kernel_seconds + case.oracle_seconds).sum();
    let left_out = run_shard(plan, shard, device, &options, &mut writer);
    let cases = writer.finish()?;
    let mut report = record.report(cases, start.elapsed().as_secs_f64() + taken_over);
    report.skips.extend(left_out);
    Ok(report)
}

/// Writes what a run leaves behind, and says what it found.
fn finish(report: &Report, arguments: &RunArguments, by_workers: bool) -> Result<()> {
    let out = &arguments.out;
    let writing = || format!("writing the report to {}", out.display());
    if by_workers {
        merge::write(report, out).with_context(writing)?;
        // Those of a plan that others still follow must not change it, so that workers remember nothing themselves.
        let regressions = arguments.regressions.clone().unwrap_or_else(Regressions::default_dir);
        remember_shrunk(report, &Regressions::new(regressions))?;
        workers::clear(out)?;
    } else {
        report::write_all(report, out).with_context(writing)?;
    }
    if let Some(file) = &arguments.history {
        history::append(report, file)?;
    }
    if !arguments.part_of_another {
        print_failures(report, out);
    }
    summarise(report, out);
    Ok(())
}

/// Remembers what shrinking made of the failing cases of all shards.
pub(super) fn remember_shrunk(report: &Report, regressions: &Regressions) -> Result<()> {
    // What breaks somebody else's kernel is not for ours to remember.
    let is_ours = report.environment.backend != BackendKind::External;
    for record in report.cases.iter().filter(|record| is_ours && record.origin == Origin::Shrunk) {
        regressions.append_record(record).context("remembering a failing case")?;
    }
    Ok(())
}

/// What a sweep ends with: 1 where something disagrees, 2 where kernels could not be run or nothing at all was compared
/// although something `should` have been.
pub(super) fn exit_of(report: &Report, should: bool) -> Result<Exit> {
    for (operator, why) in report.not_run() {
        eprintln!("parity: the kernels of {operator} cannot be run: {}", printable(why));
    }
    if report.cases.iter().any(|case| case.verdict() != Verdict::Pass) {
        return Ok(Exit::Disagreed);
    }
    if report.not_run().next().is_some() {
        return Ok(Exit::BadInput);
    }
    let compared = report.cases.iter().flat_map(|case| &case.checks).any(|check| check.compared > 0);
    if should && !compared {
        let skipped: u64 = report.skips.iter().map(|skip| skip.count).sum();
        bail!("nothing was compared: {} case(s) ran, {skipped} skips", report.cases.len());
    }
    if report.cases.is_empty() && !report.unsupported.is_empty() {
        // A shard's kernel may be for none of its cases; whether it is for any is asked of the whole.
        return Ok(Exit::Agreed);
    }
    Ok(if report.verdict() == Verdict::Pass { Exit::Agreed } else { Exit::Disagreed })
}

fn sweep_options(arguments: &RunArguments, device: &Device) -> SweepOptions {
    let schedules = super::schedules(arguments.schedules, arguments.sweep.profile, device);
    SweepOptions {
        // A shard that remembered would change the plan of those that start later: the merge does it.
        remember: arguments.shard.is_none(),
        time_budget: arguments.time_budget.map(Duration::from_secs),
        ..arguments.sweep.options(CheckOptions::everything(schedules), arguments.regressions.as_deref())
    }
}

pub(super) fn load_remembered(operators: &[&dyn Operator], regressions: &Regressions) -> Result<Remembered> {
    let names = operators.iter().map(|operator| operator.name());
    Ok(names.map(|name| regressions.load(name).map(|cases| (name.to_owned(), cases))).collect::<Result<_, _>>()?)
}

pub(super) fn plan_record(
    plan: &Plan,
    shard: Shard,
    remembered: Remembered,
    runner: &dyn Runner,
    run: RunDescription,
) -> PlanRecord {
    PlanRecord {
        schema_version: SCHEMA_VERSION,
        shard,
        planned_cases: plan.cases.len() as u64,
        shard_cases: plan.shard_of.iter().filter(|&&index| index == shard.index).count() as u64,
        plan_digest: plan.digest.clone(),
        identity: Identity {
            revision: revision(runner),
            executable_digest: journal::executable_digest(),
            environment: runner.environment().clone(),
        },
        settings: Settings::new(),
        remembered,
        run,
    }
}

/// What a plan is made of, by the option that says it.
pub(super) fn settings(
    operators: &str,
    sweep: &SweepArguments,
    costs: Option<&Path>,
    options: &SweepOptions,
    remembered: &Remembered,
) -> Result<Settings> {
    let digest = |bytes: &[u8]| blake3::hash(bytes).to_hex()[..16].to_owned();
    let number = |number: Option<usize>, otherwise: &str| number.map_or(otherwise.to_owned(), |n| n.to_string());
    let costs = match costs {
        Some(file) => digest(&std::fs::read(file).with_context(|| format!("reading costs from {}", file.display()))?),
        None => "none".to_owned(),
    };
    let settings = [
        ("--ops", operators.to_owned()),
        ("--profile", options.profile.name().to_owned()),
        ("--cases", number(sweep.cases, "those of the profile")),
        ("--edge-cases", number(sweep.edge_cases, "all")),
        ("--seed", options.seed.to_string()),
        ("--schedules", options.checks.schedules.to_string()),
        ("--costs", costs),
        ("--memory", size::limit().to_string()),
        ("--regressions", digest(&serde_json::to_vec(remembered)?)),
    ];
    Ok(settings.map(|(name, value)| (name.to_owned(), value)).into())
}

/// Runs what is missing of a shard, in the order of the plan; returns what was left out, counted by the reason.
pub(super) fn run_shard(
    plan: Plan,
    shard: Shard,
    runner: &dyn Runner,
    options: &SweepOptions,
    writer: &mut RecordWriter,
) -> Vec<Skip> {
    let mut progress = Progress::resumed(&writer.cases);
    let done: HashSet<u64> = writer.cases.iter().filter_map(|case| case.plan_number).collect();
    // A kill between a failing case and what shrinking makes of it leaves the case as the last record.
    let unshrunk = writer.cases.last().filter(|case| case.origin == Origin::Drawn).cloned();
    let mut missing: Vec<(u64, PlannedCase)> = Vec::new();
    for ((number, planned), index) in (0..).zip(plan.cases).zip(plan.shard_of) {
        if let Some(record) = unshrunk.as_ref().filter(|record| record.plan_number == Some(number)) {
            sweep::shrink_planned(planned, record, runner, options, &mut progress, writer);
        } else if index == shard.index && !done.contains(&number) {
            missing.push((number, planned));
        }
    }
    let mut cases_of: HashMap<String, usize> = HashMap::new();
    for (_, planned) in &missing {
        *cases_of.entry(planned.case.operator.clone()).or_default() += 1;
    }
    for (number, planned) in missing {
        if let Some(cases) = cases_of.remove(&planned.case.operator) {
            writer.planned(&planned.case.operator, cases);
        }
        sweep::run_planned(planned, number, runner, options, &mut progress, writer);
    }
    progress.skips(options.time_budget)
}

/// What is tested: this build's commit, and the kernels.
pub(super) fn revision(runner: &dyn Runner) -> Revision {
    let (kernels, kernels_digest) = runner.kernels();
    Revision { commit: env!("PARITY_COMMIT").to_owned(), dirty: env!("PARITY_DIRTY") == "1", kernels, kernels_digest }
}

fn skips(device: &Device, arguments: &RunArguments) -> Vec<Skip> {
    let skip =
        |why: &str, count: u32| vec![Skip { what: "random schedules".into(), why: why.into(), count: count.into() }];
    match (device.environment().backend, arguments.schedules.unwrap_or(arguments.sweep.profile.schedules())) {
        (BackendKind::Emulator, 0) => skip("turned off (--schedules 0)", 1),
        (BackendKind::Cuda, asked) if asked > 0 => {
            skip("a GPU schedules by itself; only the emulator takes a seed", asked)
        }
        _ => Vec::new(),
    }
}

/// Prints what failing cases have in common, and some of them.
pub(super) fn print_failures(report: &Report, out: &Path) {
    eprint!("{}", printable(&terminal::text(report, out)));
}

/// Prints the verdict, and what a pass does not show.
pub(super) fn summarise(report: &Report, out: &Path) {
    let failed = report.cases.iter().filter(|case| case.verdict() != Verdict::Pass).count();
    let checks: usize = report.cases.iter().map(|case| case.checks.len()).sum();
    let not_run: Vec<_> = report.not_run().map(|(operator, _)| operator).collect();
    let verdict = match (failed, &not_run[..]) {
        (0, []) if report.cases.is_empty() => "nothing was compared".to_owned(),
        (0, []) => "all agreed".to_owned(),
        (0, _) => format!("{} could not be run, the others agreed", not_run.join(", ")),
        _ => format!("{failed} case(s) disagreed"),
    };
    println!(
        "{verdict}: {} cases, {checks} checks, {:.1} s on {} ({})",
        report.cases.len(),
        report.seconds,
        report.environment.device,
        report.environment.backend
    );
    for (operator, missing) in report.paths_never_run() {
        // Failures have more to say; the page names them.
        let paths = if failed == 0 { missing.join(", ") } else { counted(missing.len() as u64, "path") };
        println!("never ran: {paths} of {operator}");
    }
    for (operator, tensor) in report.without_power() {
        println!("nothing shown: of {tensor} of {operator}, in no case of which an error of 10 % would have been seen");
    }
    println!("report: {}", out.join("index.html").display());
}

/// What a process ends with that was interrupted: 128 and the number of the signal.
const INTERRUPTED: i32 = 130;

/// An interrupt says how many cases are recorded in `out`, of how many where that is known, and ends the process.
pub(super) fn say_when_interrupted(recorded: Arc<AtomicU64>, planned: Option<u64>, out: &Path) -> Result<()> {
    let out = out.display().to_string();
    let say = move || {
        let done = recorded.load(Ordering::Relaxed);
        let of = planned.map_or(String::new(), |planned| format!(" of {planned}"));
        // What the bar left of its line.
        eprintln!(
            "\nparity: interrupted: {done}{of} cases are recorded in {out}; the same command with --resume goes on"
        );
        std::process::exit(INTERRUPTED);
    };
    on_interrupt(say).context("listening for interrupts")
}

/// Failing cases that are noted while a sweep runs; what there is to say of them comes at its end.
const MOST_NOTES: usize = 2;

/// Writes records as they come, shows progress, keeps them for the report.
pub(super) struct RecordWriter {
    journal: Journal,
    bar: ProgressBar,
    pub(super) cases: Vec<CaseRecord>,
    /// How many planned cases are in the journal.
    recorded: Arc<AtomicU64>,
    broken: Option<std::io::Error>,
    /// How many failing cases were noted, and the operator of the last one.
    noted: usize,
    last_noted: String,
}

impl RecordWriter {
    /// Begins a run, or continues the one that has `begun`.
    pub(super) fn open(dir: &Path, begun: Option<&PlanRecord>, plan: &PlanRecord) -> Result<Self> {
        let (journal, cases) = match begun {
            Some(begun) => Journal::resume(dir, begun, plan)?,
            None => (Journal::start(dir, plan)?, Vec::new()),
        };
        let planned = cases.iter().filter(|case| case.origin != Origin::Shrunk).count();
        let recorded = Arc::new(AtomicU64::new(planned as u64));
        Ok(Self {
            journal,
            bar: ProgressBar::hidden(),
            cases,
            recorded,
            broken: None,
            noted: 0,
            last_noted: String::new(),
        })
    }

    /// An interrupt ends this process with code 130, and says how far it came and how to go on.
    pub(super) fn say_when_interrupted(&self, out: &Path, planned: u64) -> Result<()> {
        say_when_interrupted(self.recorded.clone(), Some(planned), out)
    }

    /// Refuses what was recorded before, where it is not of this plan.
    pub(super) fn hold_to(&self, plan: &Plan, shard: Shard) -> Result<()> {
        let held = plan.refuse_other_records(shard, &self.cases);
        held.with_context(|| format!("{} cannot be resumed", self.journal.path().display()))
    }

    /// The records of every case, if all were written.
    pub(super) fn finish(self) -> Result<Vec<CaseRecord>> {
        self.bar.finish_and_clear();
        match self.broken {
            Some(error) => Err(error).with_context(|| format!("writing {}", self.journal.path().display())),
            None => Ok(self.cases),
        }
    }
}

impl Observer for RecordWriter {
    fn planned(&mut self, operator: &str, cases: usize) {
        self.bar.finish_and_clear();
        self.bar = ProgressBar::new(cases as u64);
        if let Ok(style) = ProgressStyle::with_template("{msg:18} {wide_bar} {pos}/{len} {elapsed}") {
            self.bar.set_style(style);
        }
        self.bar.set_message(operator.to_owned());
    }

    fn done(&mut self, record: CaseRecord) {
        // After a failed write the last line may be cut, and nothing may follow it.
        if self.broken.is_none() {
            self.broken = self.journal.append(&record).err();
            let counts = self.broken.is_none() && record.origin != Origin::Shrunk;
            self.recorded.fetch_add(counts.into(), Ordering::Relaxed);
        }
        let fails = record.unsupported.is_none() && record.verdict() != Verdict::Pass;
        if fails && self.noted < MOST_NOTES && self.last_noted != record.operator {
            self.noted += 1;
            self.last_noted.clone_from(&record.operator);
            self.bar.suspend(|| eprintln!("{}", printable(&terminal::note(&record))));
        }
        self.cases.push(record);
        self.bar.inc(1);
    }
}
