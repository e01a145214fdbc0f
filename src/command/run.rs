//! `parity run`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use dsv4_runtime::{BackendKind, Device, Environment};

use super::benchmarks::{self, Measured};
use super::ci::CiArguments;
use super::progress::Terminal;
use super::sweep::{Only, SweepArguments};
use super::{DeviceArguments, Exit, cores, modules, outcome, workers};
use crate::judge::checks::CheckOptions;
use crate::operator::{AnyOperator, Profile};
use crate::operators::registry;
use crate::record::journal::{self, Shard};
use crate::record::{Report, Skip};
use crate::report::{self, history};
use crate::sweep::regressions::Regressions;
use crate::sweep::session::{Runners, Session, Started, SweepRequest};
use crate::sweep::{self, SweepOptions};

/// The most ranks of a case.
const MOST_RANKS: i64 = crate::operators::ranks::MOST_RANKS as i64;

/// Options of `parity run`.
#[derive(Debug, Args)]
pub struct RunArguments {
    /// Operators, comma-separated [default: all]
    #[arg(long, value_name = "A,B")]
    pub(super) ops: Option<String>,
    #[command(flatten)]
    pub(super) sweep: SweepArguments,
    /// Make only this check, without the oracle: rows in other batches, bit for bit
    #[arg(long, value_enum, value_name = "CHECK")]
    pub(super) only: Option<Only>,
    /// Numbers of ranks, comma-separated, of the operators that several ranks compute [default: those
    /// of each case]
    ///
    /// Ranks are processes. They communicate by NCCL where each has a GPU of its own, otherwise by
    /// shared memory; PARITY_WORLD (nccl, shared) demands one. Under srun each rank is a process in
    /// the task of its number, and there are no more ranks than tasks.
    #[arg(long, value_name = "N,M", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=MOST_RANKS))]
    pub(super) ranks: Vec<u16>,
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
    /// Criterion's directory, whose results join the report [default: target/criterion, if it
    /// exists]
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
    /// A sweep of all operators on GPUs has up to eight on each, one for two cores, where nothing
    /// else limits it. Oracles run on cores while kernels run.
    ///
    /// They share the memory of the machine and of its GPUs: a case that needs much of it waits
    /// until that is free.
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

/// Sweeps and writes the report; the exit code is 1 when something disagrees.
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
        bail!(
            "--jobs: it is for the emulator; --workers divides a sweep over GPUs, and over the memory of one"
        );
    }
    if is_whole_sweep_on_gpus(&arguments, device.environment()) {
        arguments.workers = Some(sweep::workers::usual(cores(), sweep::workers::gpus()?));
    }
    let arguments = &arguments;
    // Before anything else runs: an input that cannot be parsed must not cost the report of a
    // finished sweep.
    let measured = match &arguments.benchmarks {
        Some(file) => benchmarks::run(
            file,
            arguments.ops.as_deref(),
            &arguments.device,
            &device,
            &arguments.out,
        )?,
        None => benchmarks::earlier(arguments.criterion.as_deref(), &device)?,
    };
    let Measured { found: measured, agreed } = measured;
    let started = Started::now();
    let workers = arguments.workers.filter(|&workers| workers > 1);
    let swept = match workers {
        Some(workers) => {
            let environment = device.environment().clone();
            // Its memory is for the workers.
            drop(device);
            let report = workers::sweep(arguments, workers, &environment)?;
            // The workers ran at the same time, on one machine.
            Report {
                seconds: started.at.elapsed().as_secs_f64(),
                started_unix: started.unix,
                ..report
            }
        }
        None => sweep_here(arguments, &operators, &device, started)?,
    };
    let is_first = arguments.shard.is_none_or(|shard| shard.index == 0);
    let skips = swept.skips.into_iter().chain(measured.skip.filter(|_| is_first)).collect();
    let mut report =
        Report { benchmarks: measured.benchmarks, ceilings: measured.ceilings, skips, ..swept };
    finish(&mut report, arguments, workers.is_some())?;
    outcome::say_what_sees_more(&report)?;
    let exit = outcome::exit_of(&report, arguments.shard.is_none())?;
    Ok(if agreed { exit } else { Exit::Disagreed })
}

/// Whether this is a sweep of all operators on GPUs that nothing limits or keeps in one process.
fn is_whole_sweep_on_gpus(arguments: &RunArguments, environment: &Environment) -> bool {
    let by_the_clock = arguments.sweep.profile().time_limit().is_some();
    let one_process = by_the_clock || arguments.device.in_process;
    environment.backend == BackendKind::Cuda && !one_process && !is_limited(arguments)
}

/// Whether this is a part of a sweep, or is divided over processes.
fn is_limited(arguments: &RunArguments) -> bool {
    let RunArguments { ops, sweep, shard, workers, time_budget, .. } = arguments;
    let of_some_cases = ops.is_some() || sweep.cases.is_some() || sweep.edge_cases.is_some();
    of_some_cases || time_budget.is_some() || shard.is_some() || workers.is_some()
}

/// The requested profile, or the one that this sweep has time for.
fn profile(arguments: &RunArguments, environment: &Environment) -> Result<Profile> {
    let RunArguments { sweep, shard, workers, .. } = arguments;
    let divided = shard.map(|_| "--shard").or(workers.map(|_| "--workers"));
    let usual = if environment.backend == BackendKind::Emulator && !is_limited(arguments) {
        Profile::Smoke
    } else {
        Profile::Quick
    };
    let profile = sweep.profile.unwrap_or(usual);
    if let (Some(_), Some(option)) = (profile.time_limit(), divided) {
        bail!(
            "--profile {}: it ends by the clock, and {option} needs the same cases in every part",
            profile.name()
        );
    }
    Ok(profile)
}

/// Runs the cases in this process: all of them, or those of `--shard`.
fn sweep_here(
    arguments: &RunArguments,
    operators: &[&AnyOperator],
    device: &Device,
    started: Started,
) -> Result<Report> {
    let RunArguments { ops, sweep, costs, out, resume, .. } = arguments;
    let options = SweepOptions {
        deadline: sweep.profile().time_limit().map(|limit| started.at + limit),
        ..sweep_options(arguments, device)
    };
    let request = SweepRequest {
        costs: costs.clone(),
        shard: arguments.shard.unwrap_or(Shard::WHOLE),
        resume: *resume,
        schedules: options.checks.schedules,
        started,
        ..sweep.request(ops.as_deref().unwrap_or("all"), out)
    };
    let session = Session::of_operators(request, operators, options, device.environment())?;
    modules::compile_in_advance(operators, device.tree(), device.environment())?;
    let open = || arguments.device.open_as(device.environment().backend);
    let runners = match devices(arguments, device) {
        1 => Runners::One(device),
        devices => Runners::Many { one: device, devices, open: &open },
    };
    let mut shown = Terminal::new(out, !arguments.part_of_another);
    session.run(operators, runners, skips(device, arguments), &mut shown)
}

/// How many cases run at the same time. On a GPU it is one: `--workers` divides its memory.
fn devices(arguments: &RunArguments, device: &Device) -> usize {
    // A shard is one of several processes that share the cores.
    let alone = arguments.shard.is_none() && device.environment().backend == BackendKind::Emulator;
    arguments.jobs.map_or(if alone { cores() } else { 1 }, usize::from)
}

/// Writes the results of a run, and prints them.
fn finish(report: &mut Report, arguments: &RunArguments, by_workers: bool) -> Result<()> {
    let out = &arguments.out;
    let writing = || format!("writing the report to {}", out.display());
    let regressions =
        Regressions::new(arguments.regressions.clone().unwrap_or_else(Regressions::default_dir));
    if by_workers {
        // Workers save no cases themselves: saved cases must not change a plan that other workers
        // still follow.
        regressions.remember_shrunk(report)?;
    }
    report.saved = regressions.saved(&report.cases);
    if by_workers {
        crate::report::write_with_records(report, out).with_context(writing)?;
        sweep::workers::clear(out)?;
    } else {
        report::write_all(report, out).with_context(writing)?;
    }
    if let Some(file) = &arguments.history {
        history::append(report, file)?;
    }
    if !arguments.part_of_another {
        outcome::print_failures(report, out);
    }
    outcome::summarise(report, out);
    arguments.ci.finish(report)
}

fn sweep_options(arguments: &RunArguments, device: &Device) -> SweepOptions {
    let schedules = super::schedules(arguments.schedules, arguments.sweep.profile(), device);
    let only_batches = arguments.only.is_some();
    let checks = CheckOptions { only_batches, ..CheckOptions::everything(schedules) };
    SweepOptions {
        ranks: arguments.ranks.iter().map(|&ranks| ranks.into()).collect(),
        // A shard that saved cases would change the plan of shards that start later: the merge
        // saves them.
        remember: arguments.shard.is_none(),
        time_budget: arguments.time_budget.map(Duration::from_secs),
        ..arguments.sweep.options(checks, arguments.regressions.as_deref())
    }
}

fn skips(device: &Device, arguments: &RunArguments) -> Vec<Skip> {
    let skip = |why: &str, count: u32| {
        vec![Skip { what: "random schedules".into(), why: why.into(), count: count.into() }]
    };
    match (
        device.environment().backend,
        arguments.schedules.unwrap_or(arguments.sweep.profile().schedules()),
    ) {
        (BackendKind::Emulator, 0) => skip("turned off (--schedules 0)", 1),
        (BackendKind::Cuda, asked) if asked > 0 => {
            skip("a GPU schedules by itself; only the emulator takes a seed", asked)
        }
        _ => Vec::new(),
    }
}
