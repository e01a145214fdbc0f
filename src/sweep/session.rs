//! A sweep from its plan to its report: the engine of every command that sweeps.
//!
//! A [`Session`] is planned first, so that a command can inspect the cases before anything is
//! written. Then it runs. The journal in the output folder is started or continued, each missing
//! case runs, and the records make a report. [`Shown`] shows the progress.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use dsv4_runtime::{Device, Environment};

use super::pool::{self, Open};
use super::progress::Progress;
use super::regressions::Regressions;
use super::shard::{Costs, Plan};
use super::{Observer, PlannedCase, SweepOptions};
use crate::case::Case;
use crate::judge::checks::CheckOptions;
use crate::judge::runner::Runner;
use crate::operator::{AnyOperator, size};
use crate::record::journal::{
    self, Identity, Journal, PlanRecord, Remembered, RunDescription, Shard,
};
use crate::record::{CaseRecord, Origin, Report, Revision, SCHEMA_VERSION, Settings, Skip};

/// What a command requests of a sweep, in addition to its options.
#[derive(Clone, Debug)]
pub struct SweepRequest {
    /// The operators as the user named them.
    pub names: String,
    /// Drawn cases of each operator, where given.
    pub cases: Option<usize>,
    /// Edge cases of each operator, where given.
    pub edge_cases: Option<usize>,
    /// A report whose costs balance the shards.
    pub costs: Option<PathBuf>,
    /// Which part of the plan runs.
    pub shard: Shard,
    /// The folder of the journal and the report.
    pub out: PathBuf,
    /// Whether an interrupted run in that folder continues.
    pub resume: bool,
    /// The command line that repeats this run exactly.
    pub command: String,
    /// Random schedules that the report names.
    pub schedules: u32,
    /// When the sweep started.
    pub started: Started,
}

/// A moment by the calendar and by a monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct Started {
    /// Seconds since 1970-01-01 UTC.
    pub unix: u64,
    /// The same moment.
    pub at: Instant,
}

impl Started {
    /// This moment.
    pub fn now() -> Self {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        Self { unix, at: Instant::now() }
    }
}

/// Shows the progress of a sweep.
pub trait Shown {
    /// The journal is open: `recorded` counts the cases in it, out of `planned`.
    ///
    /// # Errors
    /// What prevents showing it.
    fn begins(&mut self, recorded: Arc<AtomicU64>, planned: u64) -> Result<()>;

    /// This many cases are left to run.
    fn planned(&mut self, cases: usize);

    /// A case was recorded.
    fn done(&mut self, record: &CaseRecord);

    /// No case is left.
    fn ends(&mut self);
}

/// What runs the cases of a plan.
pub enum Runners<'a> {
    /// One case after the other.
    One(&'a dyn Runner),
    /// Several cases at the same time, each on a device that is opened for it. `one` shrinks
    /// failing cases.
    Many {
        /// An open device.
        one: &'a Device,
        /// Number of devices.
        devices: usize,
        /// Opens another device.
        open: &'a Open<'a>,
    },
}

impl<'a> Runners<'a> {
    fn one(&self) -> &'a dyn Runner {
        match self {
            Self::One(one) => *one,
            Self::Many { one, .. } => *one,
        }
    }
}

/// A planned sweep.
pub struct Session {
    request: SweepRequest,
    options: SweepOptions,
    begun: Option<PlanRecord>,
    remembered: Remembered,
    plan: Plan,
}

impl Session {
    /// Plans the saved, edge and drawn cases of these operators. A resumed run takes its own list
    /// of saved cases.
    ///
    /// # Errors
    /// Saved cases, costs or a journal that cannot be read.
    pub fn of_operators(
        request: SweepRequest,
        operators: &[&AnyOperator],
        options: SweepOptions,
        environment: &Environment,
    ) -> Result<Self> {
        let begun = request.begun()?;
        let remembered = match &begun {
            Some(begun) => begun.remembered.clone(),
            None => remembered(operators, &options.regressions)?,
        };
        let planned = request.planned(&options);
        let costs = request.read_costs()?;
        let plan =
            Plan::new(operators, &remembered, &planned, environment, request.shard.count, &costs)?;
        Ok(Self { request, options, begun, remembered, plan })
    }

    /// Plans only these cases.
    ///
    /// # Errors
    /// Costs or a journal that cannot be read; a condition that no case meets.
    pub fn of_cases(
        request: SweepRequest,
        cases: Vec<Case>,
        options: SweepOptions,
    ) -> Result<Self> {
        let begun = request.begun()?;
        let (mut cases, mut skips) =
            (cases.into_iter().map(PlannedCase::given).collect(), Vec::new());
        super::retain_matching(&mut cases, &options, &mut skips)?;
        let plan = Plan {
            skips,
            ..Plan::of(
                cases,
                &request.planned(&options),
                request.shard.count,
                &request.read_costs()?,
            )?
        };
        Ok(Self { request, options, begun, remembered: Remembered::new(), plan })
    }

    /// Every case of the plan.
    pub fn cases(&self) -> impl Iterator<Item = &Case> {
        self.plan.cases.iter().map(|planned| &planned.case)
    }

    /// Runs the missing cases and returns the report of all cases. `skips` are those of the run;
    /// only the first shard reports them.
    ///
    /// # Errors
    /// A journal of another plan or one that cannot be written; a device that cannot be opened.
    pub fn run(
        self,
        operators: &[&AnyOperator],
        runners: Runners<'_>,
        skips: Vec<Skip>,
        shown: &mut dyn Shown,
    ) -> Result<Report> {
        let record = self.record(operators, runners.one(), skips)?;
        let Self { request, options, begun, plan, .. } = self;
        let mut recorder = Recorder::open(&request.out, begun.as_ref(), &record, shown)?;
        let held = plan.refuse_other_records(request.shard, &recorder.cases);
        held.with_context(|| format!("{} cannot be resumed", recorder.journal.path().display()))?;
        recorder.shown.begins(recorder.recorded.clone(), record.shard_cases)?;
        let taken_over: f64 =
            recorder.cases.iter().map(|case| case.kernel_seconds + case.oracle_seconds).sum();
        let left_out = run_missing(plan, request.shard, runners, &options, &mut recorder)?;
        let mut cases = recorder.finish()?;
        // A shrunk case stays after the failing case that it came from.
        cases.sort_by_key(|case| case.plan_number);
        let mut report =
            record.report(cases, request.started.at.elapsed().as_secs_f64() + taken_over);
        report.skips.extend(left_out);
        Ok(report)
    }

    /// What must be the same when this run is resumed.
    fn record(
        &self,
        operators: &[&AnyOperator],
        runner: &dyn Runner,
        skips: Vec<Skip>,
    ) -> Result<PlanRecord> {
        let Self { request, options, plan, .. } = self;
        let of_the_run = skips.into_iter().chain(plan.skips.clone());
        let run = RunDescription {
            command: request.command.clone(),
            started_unix: request.started.unix,
            profile: options.profile.name().to_owned(),
            seed: options.seed,
            schedules: request.schedules,
            operators: operators.iter().map(|operator| operator.describe()).collect(),
            // They are skips of the run, not of each shard: only the first shard reports them.
            skips: if request.shard.index == 0 { of_the_run.collect() } else { Vec::new() },
        };
        let index = request.shard.index;
        Ok(PlanRecord {
            schema_version: SCHEMA_VERSION,
            shard: request.shard,
            planned_cases: plan.cases.len() as u64,
            shard_cases: plan.shard_of.iter().filter(|&&shard| shard == index).count() as u64,
            plan_digest: plan.digest.clone(),
            identity: Identity {
                revision: revision(runner),
                executable_digest: journal::executable_digest(),
                environment: runner.environment().clone(),
            },
            settings: request.settings(options, &self.remembered)?,
            remembered: self.remembered.clone(),
            run,
        })
    }
}

impl SweepRequest {
    fn begun(&self) -> Result<Option<PlanRecord>> {
        if self.resume { Ok(journal::read_plan(&self.out)?) } else { Ok(None) }
    }

    /// The options of the plan: its schedules are those that the report names.
    fn planned(&self, options: &SweepOptions) -> SweepOptions {
        SweepOptions {
            checks: CheckOptions { schedules: self.schedules, ..options.checks },
            ..options.clone()
        }
    }

    fn read_costs(&self) -> Result<Costs> {
        Ok(self.costs.as_deref().map(Costs::read).transpose()?.unwrap_or_default())
    }

    /// The settings that determine a plan, by the name of the option.
    fn settings(&self, options: &SweepOptions, remembered: &Remembered) -> Result<Settings> {
        let digest = |bytes: &[u8]| blake3::hash(bytes).to_hex()[..16].to_owned();
        let number = |number: Option<usize>, otherwise: &str| {
            number.map_or(otherwise.to_owned(), |n| n.to_string())
        };
        let costs = match &self.costs {
            Some(file) => digest(
                &std::fs::read(file)
                    .with_context(|| format!("reading costs from {}", file.display()))?,
            ),
            None => "none".to_owned(),
        };
        let only = match options.checks {
            CheckOptions { only_beside: true, .. } => "beside",
            CheckOptions { only_batches: true, .. } => "batch_invariance",
            _ => "all checks",
        };
        let settings = [
            ("--ops", self.names.clone()),
            ("--profile", options.profile.name().to_owned()),
            ("--cases", number(self.cases, "those of the profile")),
            ("--edge-cases", number(self.edge_cases, "all")),
            ("--seed", options.seed.to_string()),
            ("--schedules", options.checks.schedules.to_string()),
            ("--only", only.to_owned()),
            ("--costs", costs),
            ("--memory", size::limit().to_string()),
            ("--regressions", digest(&serde_json::to_vec(remembered)?)),
        ];
        Ok(settings.map(|(name, value)| (name.to_owned(), value)).into())
    }
}

/// The saved cases of these operators.
fn remembered(operators: &[&AnyOperator], regressions: &Regressions) -> Result<Remembered> {
    let names = operators.iter().map(|operator| operator.name());
    Ok(names
        .map(|name| regressions.load(name).map(|cases| (name.to_owned(), cases)))
        .collect::<Result<_, _>>()?)
}

/// The tested revision: this build's commit, and the kernels.
pub fn revision(runner: &dyn Runner) -> Revision {
    let (kernels, kernels_digest) = runner.kernels();
    Revision {
        commit: env!("PARITY_COMMIT").to_owned(),
        dirty: env!("PARITY_DIRTY") == "1",
        kernels,
        kernels_digest,
    }
}

/// Runs the missing cases of a shard; returns what was skipped, counted by reason.
fn run_missing(
    plan: Plan,
    shard: Shard,
    runners: Runners<'_>,
    options: &SweepOptions,
    recorder: &mut Recorder<'_>,
) -> Result<Vec<Skip>> {
    let one = runners.one();
    let mut progress = Progress::resumed(&recorder.cases);
    let done: HashSet<u64> = recorder.cases.iter().filter_map(|case| case.plan_number).collect();
    // A kill between a failing case and its shrunk case leaves the failing case as the last record.
    let unshrunk = recorder.cases.last().filter(|case| case.origin == Origin::Drawn).cloned();
    let mut missing: Vec<(u64, PlannedCase)> = Vec::new();
    let mut cases = plan.cases;
    super::mark_turns(&mut cases.iter_mut().collect::<Vec<_>>(), options);
    for ((number, planned), index) in (0..).zip(cases).zip(plan.shard_of) {
        if let Some(record) = unshrunk.as_ref().filter(|record| record.plan_number == Some(number))
        {
            super::shrink_planned(planned, record, one, options, &mut progress, recorder);
        } else if index == shard.index && !done.contains(&number) {
            missing.push((number, planned));
        }
    }
    recorder.planned("", missing.len());
    match runners {
        Runners::One(one) => {
            for (number, planned) in missing {
                super::run_planned(planned, number, one, options, &mut progress, recorder);
            }
        }
        Runners::Many { one, devices, open } => {
            pool::run(missing, devices, open, one, options, &mut progress, recorder)?;
        }
    }
    Ok(progress.skips(options.time_budget))
}

/// Writes records as they arrive, and keeps them for the report.
struct Recorder<'s> {
    journal: Journal,
    cases: Vec<CaseRecord>,
    /// How many planned cases are in the journal.
    recorded: Arc<AtomicU64>,
    broken: Option<std::io::Error>,
    shown: &'s mut dyn Shown,
}

impl<'s> Recorder<'s> {
    /// Starts a run, or continues the one that has `begun`.
    fn open(
        dir: &Path,
        begun: Option<&PlanRecord>,
        plan: &PlanRecord,
        shown: &'s mut dyn Shown,
    ) -> Result<Self> {
        let (journal, cases) = match begun {
            Some(begun) => Journal::resume(dir, begun, plan)?,
            None => (Journal::start(dir, plan)?, Vec::new()),
        };
        let planned = cases.iter().filter(|case| case.origin != Origin::Shrunk).count();
        Ok(Self {
            journal,
            cases,
            recorded: Arc::new(AtomicU64::new(planned as u64)),
            broken: None,
            shown,
        })
    }

    /// The records of every case, if all were written.
    fn finish(self) -> Result<Vec<CaseRecord>> {
        self.shown.ends();
        match self.broken {
            Some(error) => {
                Err(error).with_context(|| format!("writing {}", self.journal.path().display()))
            }
            None => Ok(self.cases),
        }
    }
}

impl Observer for Recorder<'_> {
    fn planned(&mut self, _operator: &str, cases: usize) {
        self.shown.planned(cases);
    }

    fn done(&mut self, record: CaseRecord) {
        // After a failed write the last line may be incomplete, so no other line may follow it.
        if self.broken.is_none() {
            self.broken = self.journal.append(&record).err();
            let counts = self.broken.is_none() && record.origin != Origin::Shrunk;
            self.recorded.fetch_add(counts.into(), Ordering::Relaxed);
        }
        self.shown.done(&record);
        self.cases.push(record);
    }
}
