//! The whole run of mutants: which are chosen, their cases without any mutant, the trials and their
//! results. Whoever runs it sees its progress through [`Shown`].

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Result, bail};
use dsv4_runtime::{BackendKind, Device, Environment};

use super::cases::{self, KnownCase};
use super::equivalent::Equivalents;
use super::journal::Journal;
use super::plan::{self, Choice, Plan};
use super::schedule::{self, Fates, Schedule};
use super::trial::{Subject, Trial, checks_of};
use crate::case::Case;
use crate::mutants::generated::{GeneratedMutant, further_files};
use crate::mutants::planted::{self, Mutant};
use crate::operator::AnyOperator;
use crate::operators::registry;
use crate::record::{
    CaseRecord, Check, GeneratedRecord, KillMatrixRecord, MutantRecord, MutantStatus,
    OperatorRecord, Origin, Report, Revision, SCHEMA_VERSION, Skip, Verdict,
};
use crate::sweep::pool::{self, Open};
use crate::sweep::regressions::{Regressions, fixtures_dir};
use crate::sweep::session::Started;

/// What the time budget is called where it is reported.
const OUT_OF_TIME: &str = "the time budget was spent (--time-budget)";

/// What a run of mutants is asked for.
pub struct Options {
    /// Operators whose mutants run; see [`with_kernels`].
    pub operators: Vec<&'static AnyOperator>,
    /// Which generated mutants run.
    pub choice: Choice,
    /// Only the mutants with these ids, on all their cases; all if empty.
    pub only: Vec<String>,
    /// Whether a mutant runs on all its cases, and not only up to the one that kills it.
    pub all_checks: bool,
    /// Random schedules of each case on the emulator.
    pub schedules: u32,
    /// Folder of planted mutants and `equivalent.toml`; `None` is that of the fixtures.
    pub mutants: Option<PathBuf>,
    /// Saved cases.
    pub regressions: Regressions,
}

/// What sees the progress of a run.
pub trait Shown: Sync {
    /// A stage of `length` steps starts: cases without mutants, or mutants.
    fn stage(&self, length: usize, name: &str);

    /// A step of it is done.
    fn step(&self);

    /// The stage is done.
    fn stage_done(&self);

    /// A mutant was judged.
    fn judged(&self, record: &MutantRecord);

    /// This many of all mutants were judged by an interrupted run.
    fn resumed(&self, known: usize, all: usize);
}

/// Everything that is known before the first mutant runs.
pub struct Session {
    options: Options,
    device: Device,
    equivalents: Equivalents,
    plans: Vec<Plan>,
    known: Vec<Vec<KnownCase>>,
    journal: Option<Journal>,
}

/// What a run leaves.
pub struct Judged {
    /// A record of each mutant that was judged, and of those that are listed as equivalent.
    pub records: Vec<MutantRecord>,
    /// How many generated mutants exist and did not run, by operator.
    pub counts: Vec<GeneratedRecord>,
    /// What did not run.
    pub skips: Vec<Skip>,
    /// The cases without any mutant.
    pub cases: Vec<CaseRecord>,
    /// The operators.
    pub operators: Vec<OperatorRecord>,
    /// The checks that killed each mutant that is listed as equivalent.
    pub false_equivalents: Vec<(String, Vec<Check>)>,
}

/// The folder of planted mutants (that of the fixtures where none is given), and the mutants.
///
/// # Errors
/// A folder that does not exist, or a malformed list.
pub fn planted(folder: Option<&Path>) -> Result<(PathBuf, Vec<Mutant>)> {
    let usual = || fixtures_dir().join("mutants");
    let path = folder.map_or_else(usual, Path::to_path_buf);
    if folder.is_none() && !path.is_dir() {
        bail!(
            "{}: no such folder. Planted mutants are part of a checkout of dsv4-parity: run the \
             command in one, or set PARITY_FIXTURES to the checkout's fixtures",
            path.display()
        );
    }
    let mutants = planted::load(&path)?;
    Ok((path, mutants))
}

/// The operators of a list that have kernels to mutate; most chains have no own kernels.
///
/// # Errors
/// An unknown operator, or a chain in the list.
pub fn with_kernels(list: Option<&str>) -> Result<Vec<&'static AnyOperator>> {
    let selected = registry::select(list)?;
    let tree = dsv4_kernels::sources();
    let is_chain = |operator: &&&'static AnyOperator| {
        !operator.chain().is_empty() && further_files(&tree, operator.name()).next().is_none()
    };
    if let Some(chain) = selected.iter().find(is_chain).filter(|_| list.is_some()) {
        let (name, of) = (chain.name(), chain.chain().join(","));
        bail!(
            "--ops {name}: it has no kernel of its own; the kernels that it launches are those of \
             --ops {of}"
        );
    }
    Ok(selected.into_iter().filter(|operator| !is_chain(&operator)).collect())
}

impl Session {
    /// Chooses the mutants, and runs the cases without any, but for those that a journal has: as
    /// many at a time as there are `devices`: one is the device itself, more are opened by `open`.
    /// The journal is opened once the lists are known to fit: an earlier one may be emptied.
    ///
    /// # Errors
    /// Lists of mutants that do not fit the kernels, and unknown ids: before minutes are spent. A
    /// device that cannot be opened.
    pub fn prepare(
        options: Options,
        device: Device,
        (devices, open): (usize, &Open<'_>),
        journal: impl FnOnce(&Device) -> Result<Option<Journal>>,
        shown: &dyn Shown,
    ) -> Result<Self> {
        let names: Vec<&str> = options.operators.iter().map(|operator| operator.name()).collect();
        let (folder, all) = planted(options.mutants.as_deref())?;
        let (planted, others): (Vec<Mutant>, Vec<Mutant>) =
            all.into_iter().partition(|mutant| names.contains(&mutant.operator.as_str()));
        for mutant in &planted {
            mutant.plant(device.tree())?;
        }
        let equivalents = Equivalents::load(&folder)?;
        let generated = plan::generate(device.tree(), &names, &equivalents)?;
        refuse_unknown_ids(&options.only, &planted, &others, &generated)?;
        let cases = cases_of(&options, &device, &planted, &generated)?;
        let checks = (schedules(&options, &device), options.wants_all_checks());
        let mut journal = journal(&device)?;
        let known = know_cases(cases, checks, (&device, devices, open), journal.as_mut(), shown)?;
        let mut plans = Vec::new();
        for ((operator, (_, mutants)), known) in options.operators.iter().zip(generated).zip(&known)
        {
            let (choice, environment) = (options.choice, device.environment());
            plans.push(plan::plan(
                operator,
                &planted,
                mutants,
                known,
                &equivalents,
                choice,
                environment,
            )?);
        }
        keep_only(&mut plans, &options.only);
        Ok(Self { options, device, equivalents, plans, known, journal })
    }

    /// The device of the run.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The cases that fail on the unmutated kernels: then killed mutants mean nothing.
    pub fn failing_cases(&self) -> Vec<&CaseRecord> {
        let records = self.known.iter().flatten().map(|known| &known.record);
        records.filter(|record| record.verdict() != Verdict::Pass).collect()
    }

    /// The trials: planted mutants first, then generated ones, round-robin over the operators.
    pub fn trials(&self) -> Vec<Trial> {
        let trial = |subject: &Subject| Trial {
            subject: subject.clone(),
            schedules: schedules(&self.options, &self.device),
            all_checks: self.options.wants_all_checks(),
        };
        let is_planted = |subject: &&Subject| matches!(subject, Subject::Planted(_));
        let planted = self.plans.iter().flat_map(|plan| plan.subjects.iter().filter(is_planted));
        let mut trials: Vec<Trial> = planted.map(trial).collect();
        let mut generated: Vec<_> = self
            .plans
            .iter()
            .map(|plan| plan.subjects.iter().filter(|one| !is_planted(one)))
            .collect();
        loop {
            let round: Vec<Trial> =
                generated.iter_mut().filter_map(Iterator::next).map(trial).collect();
            if round.is_empty() {
                return trials;
            }
            trials.extend(round);
        }
    }

    /// The result of each trial. Those that a journal has are not run again.
    ///
    /// # Errors
    /// A child that cannot be started, or a journal that cannot be written.
    pub fn run(
        &mut self,
        trials: &[Trial],
        schedule: &Schedule,
        shown: &dyn Shown,
    ) -> Result<Fates> {
        let Some(mut journal) = self.journal.take() else {
            return self.run_all(trials, schedule, None, shown);
        };
        let mut fates =
            trials.iter().map(|trial| journal.known(trial)).collect::<Result<Fates>>()?;
        let is_left =
            |(trial, fate): (&Trial, &Option<MutantRecord>)| fate.is_none().then(|| trial.clone());
        let left: Vec<Trial> = trials.iter().zip(&fates).filter_map(is_left).collect();
        if left.len() < trials.len() {
            shown.resumed(trials.len() - left.len(), trials.len());
        }
        let mut now = self.run_all(&left, schedule, Some(&mut journal), shown)?.into_iter();
        fates
            .iter_mut()
            .filter(|fate| fate.is_none())
            .for_each(|fate| *fate = now.next().flatten());
        Ok(fates)
    }

    fn run_all(
        &self,
        trials: &[Trial],
        schedule: &Schedule,
        journal: Option<&mut Journal>,
        shown: &dyn Shown,
    ) -> Result<Fates> {
        shown.stage(trials.len(), "mutants");
        let journal = Mutex::new(journal);
        let done = |trial: &Trial, record: &MutantRecord| {
            if let Some(journal) = journal.lock().unwrap_or_else(|e| e.into_inner()).as_mut() {
                journal.append(trial, record)?;
            }
            shown.judged(record);
            shown.step();
            Ok(())
        };
        let fates = schedule::run(schedule, trials, self.device.tree(), &done);
        shown.stage_done();
        fates
    }

    /// What the trials leave.
    pub fn conclude(self, trials: &[Trial], fates: Fates) -> Judged {
        let mut plans = self.plans;
        let mut records: Vec<MutantRecord> = Vec::new();
        for (trial, fate) in trials.iter().zip(fates) {
            match fate {
                Some(record) => records.push(record),
                None => count_not_run(&mut plans, &trial.subject),
            }
        }
        records.extend(plans.iter().flat_map(|plan| plan.equivalent.iter().cloned()));
        let of_list = self.options.choice.run_equivalents && self.options.only.is_empty();
        let false_equivalents =
            if of_list { hold_equivalents(&mut records, &self.equivalents) } else { Vec::new() };
        Judged {
            records,
            counts: plans.iter().filter_map(|plan| plan.counts.clone()).collect(),
            skips: plans.into_iter().flat_map(|plan| plan.skips).collect(),
            operators: self.options.operators.iter().map(|one| one.describe()).collect(),
            cases: self.known.into_iter().flatten().map(|known| known.record).collect(),
            false_equivalents,
        }
    }
}

impl Judged {
    /// Which of these ids did not run, each with the reasons of all that did not.
    pub fn left_out<'a>(&self, only: &'a [String]) -> (Vec<&'a String>, String) {
        let reasons: BTreeSet<&str> = self.skips.iter().map(|skip| skip.why.as_str()).collect();
        let has = |id: &&String| self.records.iter().all(|record| record.id != **id);
        (only.iter().filter(has).collect(), Vec::from_iter(reasons).join("; "))
    }

    /// The report of a run: `matrix` says how it was asked for, `command` by which line.
    pub fn report(
        self,
        matrix: KillMatrixRecord,
        command: String,
        (revision, environment): (Revision, Environment),
        started: Started,
    ) -> Report {
        Report {
            schema_version: SCHEMA_VERSION,
            command,
            started_unix: started.unix,
            seconds: started.at.elapsed().as_secs_f64(),
            revision,
            environment,
            profile: "mutants".into(),
            seed: matrix.seed,
            schedules: matrix.schedules,
            operators: self.operators,
            cases: self.cases,
            mutants: self.records,
            kill_matrix: Some(KillMatrixRecord { operators: self.counts, ..matrix }),
            skips: self.skips,
            benchmarks: Vec::new(),
            ceilings: None,
            unsupported: Vec::new(),
            unfinished: None,
            saved: Vec::new(),
            base: None,
            shards: Vec::new(),
        }
    }
}

/// Whether a report that the matrix is to join, of this name, has a device's kernels and backend.
///
/// # Errors
/// It has others.
pub fn same_kernels(report: &Report, name: &str, device: &Device) -> Result<()> {
    let (theirs, ours) = (&report.revision.kernels_digest, device.tree().digest());
    if *theirs != ours {
        bail!("{name}: a report of other kernels ({theirs:.12}, not {ours:.12})");
    }
    let (theirs, ours) = (report.environment.backend, device.environment().backend);
    if theirs != ours {
        bail!("{name}: a report of backend {theirs}, not {ours}");
    }
    Ok(())
}

/// `target` with the mutants of `fresh`, which replace those of the same operators.
pub fn joined(target: Report, fresh: Report) -> Report {
    let swept: BTreeSet<String> =
        fresh.operators.iter().map(|operator| operator.name.clone()).collect();
    let mut report = target;
    report.mutants.retain(|mutant| !swept.contains(&mutant.operator));
    report.mutants.extend(fresh.mutants);
    let kept = report.kill_matrix.take().into_iter().flat_map(|matrix| matrix.operators);
    let kept: Vec<_> = kept.filter(|entry| !swept.contains(&entry.operator)).collect();
    report.kill_matrix = fresh.kill_matrix.map(|mut matrix| {
        matrix.operators.splice(0..0, kept);
        matrix
    });
    report.skips.retain(|skip| !skip.what.contains("mutants"));
    report.skips.extend(fresh.skips);
    report
}

fn schedules(options: &Options, device: &Device) -> u32 {
    if device.environment().backend == BackendKind::Cuda { 0 } else { options.schedules }
}

impl Options {
    /// Whether each mutant meets all checks, not those of a sweep, until all that see it are known.
    fn wants_all_checks(&self) -> bool {
        self.all_checks || !self.only.is_empty()
    }
}

/// The cases of each operator.
type CasesOf = Vec<Vec<(Case, Origin)>>;

/// Every operator's cases; none where no mutant needs them. Planted mutants name their own.
fn cases_of(
    options: &Options,
    device: &Device,
    planted: &[Mutant],
    generated: &[(String, Vec<GeneratedMutant>)],
) -> Result<CasesOf> {
    let wanted = |mutant: &GeneratedMutant| options.only.contains(&mutant.id);
    let needs_cases = |name: &str| {
        let of_name = |(operator, mutants): &(String, Vec<GeneratedMutant>)| {
            operator == name && mutants.iter().any(wanted)
        };
        options.only.is_empty() || generated.iter().any(of_name)
    };
    let of = |operator: &&'static AnyOperator| {
        if !needs_cases(operator.name()) {
            return Ok(Vec::new());
        }
        let mut collected = cases::collect(operator, &options.regressions, planted)?;
        collected.retain(|(case, _)| operator.cannot_run(case, device.environment()).is_none());
        Ok(collected)
    };
    options.operators.iter().map(of).collect()
}

/// Runs all cases on the unmutated kernels. Threads take cases of the operators in turn, so that
/// few of them need one module at the same time.
fn know_cases(
    cases: CasesOf,
    (schedules, all_checks): (u32, bool),
    (first, devices, open): (&Device, usize, &Open<'_>),
    journal: Option<&mut Journal>,
    shown: &dyn Shown,
) -> Result<Vec<Vec<KnownCase>>> {
    let most = cases.iter().map(Vec::len).max().unwrap_or(0);
    let in_turn = (0..most).flat_map(|case| (0..cases.len()).map(move |operator| (operator, case)));
    let in_turn: Vec<_> = in_turn.filter(|&(of, case)| case < cases[of].len()).collect();
    shown.stage(in_turn.len(), "without mutants");
    let slots = |cases: &Vec<_>| cases.iter().map(|_| Mutex::new(None)).collect();
    let known: Vec<Vec<Mutex<Option<KnownCase>>>> = cases.iter().map(slots).collect();
    let journal = Mutex::new(journal);
    let open = || match devices {
        1 => Ok(first.with_tree(first.tree().clone())),
        _ => open(),
    };
    pool::each(in_turn.len(), devices.min(in_turn.len()), &open, &|device, number| {
        let (of, at) = in_turn[number];
        let (case, origin) = cases[of][at].clone();
        let journal = || journal.lock().unwrap_or_else(PoisonError::into_inner);
        let checks = checks_of(schedules, all_checks, first, at as u64);
        let key = (&case, at as u64, schedules, all_checks);
        let before = journal().as_ref().map(|all| all.known_case(&key));
        let one = match before.transpose()?.flatten() {
            Some(known) => known,
            None => {
                let one = cases::know((at as u64, case.clone(), origin), device, checks);
                if let Some(journal) = journal().as_mut() {
                    journal.append_case(&key, &one)?;
                }
                one
            }
        };
        *known[of][at].lock().unwrap_or_else(PoisonError::into_inner) = Some(one);
        shown.step();
        Ok(())
    })?;
    shown.stage_done();
    let of_operator = |known: Vec<Mutex<Option<KnownCase>>>| {
        let known = known.into_iter();
        known.filter_map(|one| one.into_inner().unwrap_or_else(PoisonError::into_inner)).collect()
    };
    Ok(known.into_iter().map(of_operator).collect())
}

/// Rejects unknown ids before minutes are spent.
fn refuse_unknown_ids(
    only: &[String],
    planted: &[Mutant],
    others: &[Mutant],
    generated: &[(String, Vec<GeneratedMutant>)],
) -> Result<()> {
    let generated = generated.iter().flat_map(|(_, mutants)| mutants).map(|mutant| &mutant.id);
    let known: BTreeSet<&String> =
        planted.iter().map(|mutant| &mutant.id).chain(generated).collect();
    let Some(id) = only.iter().find(|id| !known.contains(id)) else { return Ok(()) };
    if let Some(Mutant { operator, .. }) = others.iter().find(|mutant| mutant.id == *id) {
        let why = "which is a chain without kernels of its own or not among --ops";
        bail!("--only {id}: it is planted for {operator}, {why}; the test mutant::{id} runs it")
    }
    // An id's hash follows the text of its line. After an edit of the line the user looks for the
    // new ids.
    let stem = id.rsplit_once(':').map_or(id.as_str(), |(stem, _)| stem);
    let near = known.iter().filter(|known| known.starts_with(stem)).take(8);
    let near: Vec<_> = near.map(|id| id.as_str()).collect();
    let hint =
        if near.is_empty() { String::new() } else { format!("; there is {}", near.join(", ")) };
    bail!("--only {id}: no such mutant{hint}")
}

/// Keeps only the mutants with the given ids, if ids are given.
fn keep_only(plans: &mut [Plan], only: &[String]) {
    if !only.is_empty() {
        let is_wanted = |subject: &Subject| only.iter().any(|id| id == subject.id());
        plans.iter_mut().for_each(|plan| plan.subjects.retain(is_wanted));
    }
}

fn count_not_run(plans: &mut [Plan], subject: &Subject) {
    let (operator, kind) = match subject {
        Subject::Planted(mutant) => (&mutant.operator, "planted"),
        Subject::Generated(mutant, _) => (&mutant.operator, "generated"),
    };
    let concerned = plans
        .iter_mut()
        .find(|plan| plan.counts.as_ref().is_some_and(|counts| counts.operator == *operator));
    let Some(plan) = concerned else { return };
    if let (Some(counts), "generated") = (&mut plan.counts, kind) {
        counts.not_run += 1;
    }
    let what = format!("{kind} mutants of {operator}");
    Skip::count(&mut plan.skips, what, OUT_OF_TIME);
}

/// The mutants that are listed as equivalent but were killed. The records of the others get the
/// reason of the list.
fn hold_equivalents(
    records: &mut [MutantRecord],
    equivalents: &Equivalents,
) -> Vec<(String, Vec<Check>)> {
    let mut found = Vec::new();
    for record in records {
        let Some(reason) = equivalents.reason(&record.id) else { continue };
        match record.status {
            MutantStatus::Killed => found.push((record.id.clone(), record.killed_by.clone())),
            _ => (record.status, record.reason) = (MutantStatus::Equivalent, reason.to_owned()),
        }
    }
    found
}
