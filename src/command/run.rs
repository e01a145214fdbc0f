//! `parity run`.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::Args;
use dsv4_kernels::runtime::interrupt::on_interrupt;
use dsv4_kernels::runtime::{BackendKind, Device, Environment};
use indicatif::{ProgressBar, ProgressStyle};

use super::benchmarks::{self, Measured};
use super::ci::CiArguments;
use super::sweep::SweepArguments;
use super::{DeviceArguments, Exit, modules, output, workers};
use crate::judge::checks::CheckOptions;
use crate::judge::runner::Runner;
use crate::operator::{AnyOperator, Profile, size};
use crate::operators::registry;
use crate::record::journal::{self, Identity, Journal, PlanRecord, Remembered, RunDescription, Shard};
use crate::record::words::printable;
use crate::record::{CaseRecord, Origin, Report, Revision, SCHEMA_VERSION, Settings, Skip, Verdict};
use crate::report::diagnosis::terminal;
use crate::report::numbers::counted;
use crate::report::{self, history};
use crate::sweep::pool::{self, Open};
use crate::sweep::progress::Progress;
use crate::sweep::regressions::Regressions;
use crate::sweep::shard::{Costs, Plan};
use crate::sweep::{self, Observer, PlannedCase, SweepOptions};

/// Options of `parity run`.
#[derive(Debug, Args)]
pub struct RunArguments {
    /// Operators, comma-separated [default: all]
    #[arg(long, value_name = "A,B")]
    pub(super) ops: Option<String>,
    #[command(flatten)]
    pub(super) sweep: SweepArguments,
    /// Random schedules to run each case under on the emulator, 0 for none [default: the profile's]
    ///
    /// The deterministic schedule always runs.
    #[arg(long, value_name = "N")]
    pub(super) schedules: Option<u32>,
    /// How many cases run at the same time on the emulator [default: one for each core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    jobs: Option<u16>,
    /// Draw no case of an operator after this time; the rest is counted as skipped
    ///
    /// Saved cases and edge cases always run.
    #[arg(long, value_name = "SECONDS", conflicts_with = "shard")]
    time_budget: Option<u64>,
    /// Folder for report.json, index.html, summary.md and records.jsonl
    #[arg(long, default_value = "reports/latest", value_name = "DIR")]
    pub(super) out: PathBuf,
    /// Criterion's directory, whose results join the report [default: target/criterion, if it exists]
    #[arg(long, value_name = "DIR")]
    criterion: Option<PathBuf>,
    /// Executable of the benchmarks to run first, as `cargo bench --no-run` names it
    ///
    /// Its results join the report. What it prints goes to benchmarks.txt in --out.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["criterion", "shard"])]
    benchmarks: Option<PathBuf>,
    /// Folder of saved failing cases [default: regressions in PARITY_FIXTURES or ./fixtures]
    #[arg(long, value_name = "DIR")]
    pub(super) regressions: Option<PathBuf>,
    /// Run part I of N, counted from 0; `parity merge` joins the parts
    #[arg(long, value_name = "I/N")]
    shard: Option<Shard>,
    /// Divide the sweep over N processes, on all GPUs of the machine, and join it again
    ///
    /// Processes on one GPU share its memory: a case that needs much of it waits until that is free.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256), conflicts_with_all = ["shard", "time_budget"])]
    workers: Option<u32>,
    /// A report.json or records.jsonl whose costs balance shards or workers
    ///
    /// Every shard must get the same file.
    #[arg(long, value_name = "FILE")]
    pub(super) costs: Option<PathBuf>,
    /// Continue the run that was interrupted in --out; start one if there is none
    #[arg(long)]
    pub(super) resume: bool,
    /// History file to append this run's measures to (parity history)
    #[arg(long, value_name = "FILE", conflicts_with = "shard")]
    history: Option<PathBuf>,
    /// This is a worker of another run, which says what failed
    #[arg(long, hide = true)]
    part_of_another: bool,
    #[command(flatten)]
    ci: CiArguments,
    #[command(flatten)]
    pub(super) device: DeviceArguments,
}

/// Sweeps and writes the report; 1 when something disagrees.
pub fn execute(mut arguments: RunArguments) -> Result<Exit> {
    let shard = arguments.shard.map(|_| "--shard");
    arguments.sweep.seed.announce(shard.or(arguments.resume.then_some("--resume")))?;
    if arguments.costs.is_some() && arguments.shard.is_none() && arguments.workers.is_none() {
        bail!("--costs: it balances shards or workers, and neither --shard nor --workers is given");
    }
    let operators = registry::select(arguments.ops.as_deref())?;
    journal::refuse_foreign(&arguments.out)?;
    let device = arguments.device.open()?;
    arguments.sweep.profile = Some(profile(&arguments, device.environment())?);
    if arguments.jobs.is_some() && device.environment().backend != BackendKind::Emulator {
        bail!("--jobs: it is for the emulator; --workers divides a sweep over GPUs, and over the memory of one");
    }
    let arguments = &arguments;
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
    let mut report = Report { benchmarks: measured.benchmarks, ceilings: measured.ceilings, skips, ..swept };
    finish(&mut report, arguments, workers.is_some())?;
    say_what_sees_more(&report)?;
    let exit = exit_of(&report, arguments.shard.is_none())?;
    Ok(if agreed { exit } else { Exit::Disagreed })
}

/// The profile that was asked for, or the one that this sweep has time for.
fn profile(arguments: &RunArguments, environment: &Environment) -> Result<Profile> {
    let RunArguments { ops, sweep, shard, workers, time_budget, .. } = arguments;
    let divided = shard.map(|_| "--shard").or(workers.map(|_| "--workers"));
    let limited = ops.is_some()
        || sweep.cases.is_some()
        || sweep.edge_cases.is_some()
        || time_budget.is_some()
        || divided.is_some();
    let usual = if environment.backend == BackendKind::Emulator && !limited { Profile::Smoke } else { Profile::Quick };
    let profile = sweep.profile.unwrap_or(usual);
    if let (Some(_), Some(option)) = (profile.time_limit(), divided) {
        bail!("--profile {}: it ends by the clock, and {option} needs the same cases in every part", profile.name());
    }
    Ok(profile)
}

/// Runs the cases in this process: all of them, or those of `--shard`.
fn sweep_here(
    arguments: &RunArguments,
    operators: &[&AnyOperator],
    device: &Device,
    started_unix: u64,
    start: Instant,
) -> Result<Report> {
    let options = SweepOptions {
        deadline: arguments.sweep.profile().time_limit().map(|limit| start + limit),
        ..sweep_options(arguments, device)
    };
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
        profile: arguments.sweep.profile().name().to_owned(),
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
    modules::compile_in_advance(operators, device.tree(), device.environment())?;
    let open = || arguments.device.open_as(device.environment().backend);
    let runners = match devices(arguments, device) {
        1 => Runners::One(device),
        devices => Runners::Many { one: device, devices, open: &open },
    };
    let left_out = run_shard(plan, shard, runners, &options, &mut writer)?;
    let mut cases = writer.finish()?;
    // What was made of a failing case stays after it.
    cases.sort_by_key(|case| case.plan_number);
    let mut report = record.report(cases, start.elapsed().as_secs_f64() + taken_over);
    report.skips.extend(left_out);
    Ok(report)
}

/// How many cases run at the same time. On a GPU one does: `--workers` divides its memory.
fn devices(arguments: &RunArguments, device: &Device) -> usize {
    // A shard is one of several processes that share the cores.
    let alone = arguments.shard.is_none() && device.environment().backend == BackendKind::Emulator;
    arguments.jobs.map_or(if alone { cores() } else { 1 }, usize::from)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Who runs the cases of a plan.
pub(super) enum Runners<'a> {
    /// One case after the other.
    One(&'a dyn Runner),
    /// So many cases at a time, each on a device that is opened for it; `one` makes failing cases smaller.
    Many { one: &'a Device, devices: usize, open: &'a Open<'a> },
}

/// Writes what a run leaves behind, and says what it found.
fn finish(report: &mut Report, arguments: &RunArguments, by_workers: bool) -> Result<()> {
    let out = &arguments.out;
    let writing = || format!("writing the report to {}", out.display());
    let regressions = Regressions::new(arguments.regressions.clone().unwrap_or_else(Regressions::default_dir));
    if by_workers {
        // Those of a plan that others still follow must not change it, so that workers remember nothing themselves.
        remember_shrunk(report, &regressions)?;
    }
    report.saved = regressions.saved(&report.cases);
    if by_workers {
        crate::report::write_with_records(report, out).with_context(writing)?;
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
    arguments.ci.finish(report)
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
        errln!("{} the kernels of {operator} cannot be run: {}", output::bad("parity:"), printable(why));
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
    let schedules = super::schedules(arguments.schedules, arguments.sweep.profile(), device);
    SweepOptions {
        // A shard that remembered would change the plan of those that start later: the merge does it.
        remember: arguments.shard.is_none(),
        time_budget: arguments.time_budget.map(Duration::from_secs),
        ..arguments.sweep.options(CheckOptions::everything(schedules), arguments.regressions.as_deref())
    }
}

pub(super) fn load_remembered(operators: &[&AnyOperator], regressions: &Regressions) -> Result<Remembered> {
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

/// Runs what is missing of a shard; returns what was left out, counted by the reason.
///
/// # Errors
/// A device that cannot be opened.
pub(super) fn run_shard(
    plan: Plan,
    shard: Shard,
    runners: Runners<'_>,
    options: &SweepOptions,
    writer: &mut RecordWriter,
) -> Result<Vec<Skip>> {
    let one: &dyn Runner = match &runners {
        Runners::One(one) => *one,
        Runners::Many { one, .. } => *one,
    };
    let mut progress = Progress::resumed(&writer.cases);
    let done: HashSet<u64> = writer.cases.iter().filter_map(|case| case.plan_number).collect();
    // A kill between a failing case and what shrinking makes of it leaves the case as the last record.
    let unshrunk = writer.cases.last().filter(|case| case.origin == Origin::Drawn).cloned();
    let mut missing: Vec<(u64, PlannedCase)> = Vec::new();
    for ((number, planned), index) in (0..).zip(plan.cases).zip(plan.shard_of) {
        if let Some(record) = unshrunk.as_ref().filter(|record| record.plan_number == Some(number)) {
            sweep::shrink_planned(planned, record, one, options, &mut progress, writer);
        } else if index == shard.index && !done.contains(&number) {
            missing.push((number, planned));
        }
    }
    writer.planned("", missing.len());
    match runners {
        Runners::One(one) => {
            for (number, planned) in missing {
                sweep::run_planned(planned, number, one, options, &mut progress, writer);
            }
        }
        Runners::Many { one, devices, open } => {
            pool::run(missing, devices, open, one, options, &mut progress, writer)?;
        }
    }
    Ok(progress.skips(options.time_budget))
}

/// What is tested: this build's commit, and the kernels.
pub(super) fn revision(runner: &dyn Runner) -> Revision {
    let (kernels, kernels_digest) = runner.kernels();
    Revision { commit: env!("PARITY_COMMIT").to_owned(), dirty: env!("PARITY_DIRTY") == "1", kernels, kernels_digest }
}

fn skips(device: &Device, arguments: &RunArguments) -> Vec<Skip> {
    let skip =
        |why: &str, count: u32| vec![Skip { what: "random schedules".into(), why: why.into(), count: count.into() }];
    match (device.environment().backend, arguments.schedules.unwrap_or(arguments.sweep.profile().schedules())) {
        (BackendKind::Emulator, 0) => skip("turned off (--schedules 0)", 1),
        (BackendKind::Cuda, asked) if asked > 0 => {
            skip("a GPU schedules by itself; only the emulator takes a seed", asked)
        }
        _ => Vec::new(),
    }
}

/// Prints which kernel paths no case took: by name, but of a smoke test, whose cases are few, how many.
fn say_never_run(report: &Report, fails: bool) {
    if report.profile != Profile::Smoke.name() {
        for (operator, missing) in report.paths_never_run() {
            // Failures have more to say; the page names them.
            let paths = if fails { counted(missing.len() as u64, "path") } else { missing.join(", ") };
            detailln!("never ran: {paths} of {operator}");
        }
        return;
    }
    let missing: usize = report.paths_never_run().iter().map(|(_, missing)| missing.len()).sum();
    let all: usize = report.operators.iter().map(|operator| operator.paths.len()).sum();
    detailln!("smoke: {} of {all} kernel paths ran", all - missing);
}

/// Says what sees more than a smoke test did, and how long it takes here.
fn say_what_sees_more(report: &Report) -> Result<()> {
    if report.profile != Profile::Smoke.name() {
        return Ok(());
    }
    let mut seconds = 0.0;
    for operator in &report.operators {
        let operator = registry::find(&operator.name)?;
        let taken = report.cases.iter().filter(|case| case.operator == operator.name());
        let mut taken: Vec<f64> = taken.map(|case| case.kernel_seconds + case.oracle_seconds).collect();
        taken.sort_by(f64::total_cmp);
        let cases = operator.edge_cases(Profile::Quick).len() + operator.default_cases(Profile::Quick);
        // The median: the first cases of a run compile their kernels.
        seconds += cases as f64 * taken.get(taken.len() / 2).copied().unwrap_or_default();
    }
    let minutes = (seconds / 60.0 / cores() as f64).ceil();
    detailln!("more: --profile quick (about {minutes} minutes here), or --ops NAME (about a minute)");
    Ok(())
}

/// Prints what failing cases have in common, and some of them.
pub(super) fn print_failures(report: &Report, out: &Path) {
    output::print_error(format_args!("{}", printable(&terminal::text(report, out))));
}

/// Prints the verdict, and what a pass does not show.
pub(super) fn summarise(report: &Report, out: &Path) {
    let failed = report.cases.iter().filter(|case| case.verdict() != Verdict::Pass).count();
    let checks: usize = report.cases.iter().map(|case| case.checks.len()).sum();
    let not_run: Vec<_> = report.not_run().map(|(operator, _)| operator).collect();
    let agreed = failed == 0 && not_run.is_empty() && !report.cases.is_empty();
    let verdict = match (failed, &not_run[..]) {
        (0, []) if report.cases.is_empty() => "nothing was compared".to_owned(),
        (0, []) => "all agreed".to_owned(),
        (0, _) => format!("{} could not be run, the others agreed", not_run.join(", ")),
        _ => format!("{failed} case(s) disagreed"),
    };
    let verdict = if agreed { output::good(verdict) } else { output::bad(verdict) };
    outln!(
        "{verdict}: {} cases, {checks} checks, {:.1} s on {} ({})",
        report.cases.len(),
        report.seconds,
        report.environment.device,
        report.environment.backend
    );
    say_never_run(report, failed > 0);
    for (operator, tensor) in report.without_power() {
        outln!("nothing shown: of {tensor} of {operator}, in no case of which an error of 10 % would have been seen");
    }
    detailln!("report: {}", out.join("index.html").display());
    let saved: Vec<String> = report.saved.iter().map(|saved| format!("{} in {}", saved.cases, saved.file)).collect();
    if !saved.is_empty() {
        detailln!("failing cases saved for the next run: {}", saved.join(", "));
    }
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
        errln!("\nparity: interrupted: {done}{of} cases are recorded in {out}; the same command with --resume goes on");
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

/// What the log has of a case.
fn log(record: &CaseRecord) {
    let CaseRecord { operator, origin, kernel_seconds, oracle_seconds, .. } = record;
    let verdict = record.verdict();
    tracing::info!(
        "{operator}: {origin:?} case, {verdict:?}, kernel {kernel_seconds:.3} s, oracle {oracle_seconds:.3} s"
    );
    tracing::debug!("{}", record.case);
}

impl Observer for RecordWriter {
    fn planned(&mut self, operator: &str, cases: usize) {
        if output::is_quiet() {
            return;
        }
        self.bar = ProgressBar::new(cases as u64);
        if let Ok(style) = ProgressStyle::with_template("{msg:25} {wide_bar} {pos}/{len} {elapsed}") {
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
        self.bar.suspend(|| log(&record));
        let fails = record.unsupported.is_none() && record.verdict() != Verdict::Pass;
        if fails && self.noted < MOST_NOTES && self.last_noted != record.operator {
            self.noted += 1;
            self.last_noted.clone_from(&record.operator);
            self.bar.suspend(|| errln!("{}", printable(&terminal::note(&record))));
        }
        self.bar.set_message(record.operator.clone());
        self.cases.push(record);
        self.bar.inc(1);
    }
}
