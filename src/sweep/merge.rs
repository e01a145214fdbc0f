//! Joins the shards of a sweep.
//!
//! A merge does not trust how the shards were started: it works only from their records. They must
//! show that every case of one plan ran exactly once. The revision, the kernels and the kind of
//! device must be the same for all cases. Otherwise the merge rejects the shards. At the end it
//! computes the plan's digest again from the merged cases ([`crate::sweep::shard::plan_digest`]).

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::record::journal::{self, Identity, Shard};
use crate::record::{CaseRecord, Origin, Report, SCHEMA_VERSION, ShardRecord, Skip, other_setting};
use crate::sweep::shard::{self, RunArguments};

/// How many cases an error names; it only counts the others.
const NAMED: usize = 5;

/// Why shards cannot be merged.
#[derive(Debug, Error)]
pub enum MergeError {
    /// No folder was given.
    #[error("there is nothing to merge")]
    Nothing,
    /// A folder without a report that can be read.
    #[error("{}: {reason}", dir.display())]
    Unreadable {
        /// The folder.
        dir: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A worker was killed or still runs.
    #[error("{}: shard {shard} is unfinished ({done} of {cases} cases); `parity run … --resume` continues it", dir.display())]
    Unfinished {
        /// The folder.
        dir: PathBuf,
        /// Which shard.
        shard: Shard,
        /// Cases that are recorded.
        done: usize,
        /// Number of cases of the shard.
        cases: u64,
    },
    /// Shards of different runs.
    #[error("shards of unlike runs: the {what} is {first} in {} and {second} in {}", first_dir.display(), second_dir.display())]
    Mixed {
        /// What differs: an option, or a part of the machine or the source.
        what: String,
        /// One value.
        first: String,
        /// Its folder.
        first_dir: PathBuf,
        /// The other value.
        second: String,
        /// Its folder.
        second_dir: PathBuf,
    },
    /// Something ran twice.
    #[error("overlap: {0}")]
    Overlap(String),
    /// Something never ran.
    #[error("gap: {0}")]
    Gap(String),
    /// The records are not those of the plan.
    #[error("the merged cases are not the planned ones: {0}")]
    NotThePlan(String),
}

/// One shard's folder.
#[derive(Clone, Debug)]
pub struct Part {
    /// The folder.
    pub dir: PathBuf,
    /// Its report.
    pub report: Report,
    /// Which part of the plan it is.
    pub shard: ShardRecord,
}

impl Part {
    /// Reads `report.json` of a folder.
    ///
    /// # Errors
    /// A run that is not finished, a report that cannot be read, or one that is not a shard.
    pub fn read(dir: &Path) -> Result<Self, MergeError> {
        let unreadable = |reason: String| MergeError::Unreadable { dir: dir.to_owned(), reason };
        let path = dir.join("report.json");
        if !path.is_file() {
            return Err(unfinished(dir)
                .unwrap_or_else(|| unreadable("no report.json and no plan.json".into())));
        }
        let text =
            std::fs::read_to_string(&path).map_err(|e| unreadable(format!("report.json: {e}")))?;
        let mut report: Report =
            serde_json::from_str(&text).map_err(|e| unreadable(format!("report.json: {e}")))?;
        if report.unfinished.is_some() {
            return Err(unfinished(dir)
                .unwrap_or_else(|| unreadable("the report of a run that was cut short".into())));
        }
        if report.schema_version != SCHEMA_VERSION {
            return Err(unreadable(format!(
                "schema version {}, not {SCHEMA_VERSION}",
                report.schema_version
            )));
        }
        complete(&mut report, dir);
        Self::new(dir, report)
    }

    /// Takes a report as one part.
    ///
    /// # Errors
    /// A report that is not a shard, or that already joins several.
    pub fn new(dir: &Path, report: Report) -> Result<Self, MergeError> {
        let reason = match report.shards.as_slice() {
            [shard] => return Ok(Self { dir: dir.to_owned(), shard: shard.clone(), report }),
            [] => "the report does not say which shard it is".to_owned(),
            several => format!("{} shards have been merged here already", several.len()),
        };
        Err(MergeError::Unreadable { dir: dir.to_owned(), reason })
    }

    /// The records of all its cases, including those that the kernel does not support.
    fn records(&self) -> impl Iterator<Item = &CaseRecord> {
        self.report.cases.iter().chain(&self.report.unsupported)
    }

    fn identity(&self) -> Identity {
        Identity {
            revision: self.report.revision.clone(),
            executable_digest: self.shard.executable_digest.clone(),
            environment: self.report.environment.clone(),
        }
    }
}

/// Takes the complete record of each case from the records next to the report, because the report
/// keeps less of it. A record must exist and name the same case and the same verdict.
fn complete(report: &mut Report, dir: &Path) {
    let Ok(records) = journal::records_of(&dir.join(journal::RECORDS)) else { return };
    let key = |record: &CaseRecord| {
        (record.plan_number, record.origin == Origin::Shrunk, record.case.to_string())
    };
    let mut whole: HashMap<_, CaseRecord> =
        records.records.into_iter().map(|record| (key(&record), record)).collect();
    for case in &mut report.cases {
        if let Some(record) = whole.remove(&key(case)).filter(|record| says_the_same(record, case))
        {
            *case = record;
        }
    }
}

fn says_the_same(record: &CaseRecord, kept: &CaseRecord) -> bool {
    let checks = record.checks.iter().zip(&kept.checks);
    record.checks.len() == kept.checks.len()
        && checks
            .into_iter()
            .all(|(a, b)| (&a.check, &a.tensor, a.verdict) == (&b.check, &b.tensor, b.verdict))
}

/// What a folder shows about a run that did not end.
fn unfinished(dir: &Path) -> Option<MergeError> {
    let plan = journal::read_plan(dir).ok()??;
    let path = dir.join(journal::RECORDS);
    let records = if path.exists() { journal::records_of(&path).ok()?.records } else { Vec::new() };
    let done = records.iter().filter(|record| record.origin != Origin::Shrunk).count();
    Some(MergeError::Unfinished {
        dir: dir.to_owned(),
        shard: plan.shard,
        done,
        cases: plan.shard_cases,
    })
}

/// The report of the whole run.
///
/// # Errors
/// Shards of different runs, gaps and overlaps between shards or between their cases, and cases
/// that are not those of the plan.
pub fn merge(mut parts: Vec<Part>, command: String) -> Result<Report, MergeError> {
    let Some(first) = parts.first() else { return Err(MergeError::Nothing) };
    for part in &parts[1..] {
        refuse_another_run(first, part)?;
    }
    parts.sort_by_key(|part| part.shard.index);
    refuse_gaps_and_overlaps_of_shards(&parts)?;
    refuse_gaps_and_overlaps_of_cases(&parts)?;
    refuse_changed_cases(&parts)?;
    Ok(join(&parts, command))
}

fn refuse_another_run(first: &Part, second: &Part) -> Result<(), MergeError> {
    let entry = |what: &str, one: &dyn ToString, other: &dyn ToString| {
        (what.to_owned(), one.to_string(), other.to_string())
    };
    let (one, other) = (&first.shard, &second.shard);
    let identity = first.identity().difference(&second.identity());
    let identity = identity.map(|(what, one, other)| (what.to_owned(), one, other));
    let setting = || {
        // Settings that do not change the plan may differ, such as the memory of machines that can
        // hold all cases.
        let set = other_setting(&one.settings, &other.settings)
            .filter(|_| one.plan_digest != other.plan_digest);
        let reports = [
            entry("--profile", &first.report.profile, &second.report.profile),
            entry("--seed", &first.report.seed, &second.report.seed),
            entry("--schedules", &first.report.schedules, &second.report.schedules),
            entry("number of shards", &one.count, &other.count),
        ];
        let shards = [
            entry("plan", &one.plan_digest, &other.plan_digest),
            entry("number of planned cases", &one.planned_cases, &other.planned_cases),
        ];
        let set = set.map(|(what, one, other)| entry(what, &one, &other));
        reports.into_iter().chain(set).chain(shards).find(|(_, one, other)| one != other)
    };
    match identity.or_else(setting) {
        None => Ok(()),
        Some((what, one, other)) => Err(MergeError::Mixed {
            what,
            first: one,
            first_dir: first.dir.clone(),
            second: other,
            second_dir: second.dir.clone(),
        }),
    }
}

/// `parts` are sorted by index, and agree on the count.
fn refuse_gaps_and_overlaps_of_shards(parts: &[Part]) -> Result<(), MergeError> {
    for pair in parts.windows(2) {
        if pair[0].shard.index == pair[1].shard.index {
            let (one, other) = (pair[0].dir.display(), pair[1].dir.display());
            return Err(MergeError::Overlap(format!(
                "{one} and {other} are both shard {}",
                pair[0].shard.index
            )));
        }
    }
    let count = parts[0].shard.count;
    let present: Vec<u64> = parts.iter().map(|part| part.shard.index.into()).collect();
    match missing(count.into(), &present) {
        None if parts.len() == count as usize => Ok(()),
        None => Err(MergeError::Overlap(format!("{} shards of {count}", parts.len()))),
        Some((number, named)) => {
            Err(MergeError::Gap(format!("{number} of {count} shards are missing: {named}")))
        }
    }
}

/// How many of the indices below `count` are missing in `present` (ascending), and the first of
/// them as text; `None` if none is missing. `count` comes from a report and may be any number, so
/// nothing here allocates in proportion to it.
fn missing(count: u64, present: &[u64]) -> Option<(u64, String)> {
    let mut present = present.to_vec();
    present.retain(|&number| number < count);
    present.dedup();
    let number = count - present.len() as u64;
    let absent = |number: &u64| present.binary_search(number).is_err();
    // At most that many of the first indices are present.
    let named: Vec<String> =
        (0..count).filter(absent).take(NAMED).map(|number| number.to_string()).collect();
    let more = if number > NAMED as u64 {
        format!(" and {} more", number - NAMED as u64)
    } else {
        String::new()
    };
    (number > 0).then(|| (number, named.join(", ") + &more))
}

fn refuse_gaps_and_overlaps_of_cases(parts: &[Part]) -> Result<(), MergeError> {
    let planned = parts[0].shard.planned_cases;
    let mut numbers = Vec::new();
    for part in parts {
        for record in part.records() {
            match record.plan_number {
                Some(number) if number < planned => {
                    if record.origin != Origin::Shrunk {
                        numbers.push((number, &part.dir));
                    }
                }
                number => {
                    let number = number.map_or("none".to_owned(), |number| number.to_string());
                    let dir = part.dir.display();
                    return Err(MergeError::NotThePlan(format!(
                        "plan number {number} of {planned} in {dir}"
                    )));
                }
            }
        }
    }
    numbers.sort();
    if let Some(pair) = numbers.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        let (one, other) = (pair[0].1.display(), pair[1].1.display());
        return Err(MergeError::Overlap(format!("case {} ran in {one} and in {other}", pair[0].0)));
    }
    let ran: Vec<u64> = numbers.iter().map(|&(number, _)| number).collect();
    match missing(planned, &ran) {
        None => Ok(()),
        Some((number, named)) => {
            Err(MergeError::Gap(format!("{number} of {planned} cases did not run: {named}")))
        }
    }
}

fn refuse_changed_cases(parts: &[Part]) -> Result<(), MergeError> {
    let ShardRecord { count, plan_digest, .. } = &parts[0].shard;
    let mut cases: Vec<_> = parts
        .iter()
        .flat_map(|part| part.records().map(|record| (part.shard.index, record)))
        .filter(|(_, record)| record.origin != Origin::Shrunk)
        .collect();
    cases.sort_by_key(|(_, record)| record.plan_number);
    let cases = cases.into_iter().map(|(shard, record)| (record.origin, shard, &record.case));
    let Report { profile, seed, schedules, .. } = &parts[0].report;
    let run = RunArguments { profile, seed: *seed, schedules: *schedules };
    let digest = shard::plan_digest(run, *count, cases);
    if digest == *plan_digest {
        return Ok(());
    }
    Err(MergeError::NotThePlan(format!("their digest is {digest}, the plan's {plan_digest}")))
}

/// Joins `parts`, which are the whole run, sorted by index.
fn join(parts: &[Part], command: String) -> Report {
    let mut report = Report {
        command,
        started_unix: parts.iter().map(|part| part.report.started_unix).min().unwrap_or_default(),
        seconds: parts.iter().map(|part| part.report.seconds).sum(),
        shards: parts.iter().map(|part| part.shard.clone()).collect(),
        cases: parts.iter().flat_map(|part| part.report.cases.iter().cloned()).collect(),
        unsupported: parts
            .iter()
            .flat_map(|part| part.report.unsupported.iter().cloned())
            .collect(),
        skips: skips_of_the_run(&parts[0].report),
        ..parts[0].report.clone()
    };
    // The sort is stable: a shrunk case stays after the case that it came from.
    report.cases.sort_by_key(|record| record.plan_number);
    report.unsupported.sort_by_key(|record| record.plan_number);
    for other in parts[1..].iter().map(|part| &part.report) {
        report.ceilings = report.ceilings.or(other.ceilings);
        add_absent(&mut report.benchmarks, &other.benchmarks, |one, other| one.id == other.id);
        add_absent(&mut report.mutants, &other.mutants, |one, other| one.id == other.id);
        add_skips(&mut report.skips, &skips_of_the_run(other));
    }
    report.skips =
        report.skips_of_cases().into_iter().chain(std::mem::take(&mut report.skips)).collect();
    report
}

/// Skips that do not follow from the cases.
fn skips_of_the_run(report: &Report) -> Vec<Skip> {
    let of_cases = report.skips_of_cases();
    report.skips.iter().filter(|skip| !of_cases.contains(skip)).cloned().collect()
}

fn add_absent<T: Clone>(items: &mut Vec<T>, others: &[T], same: impl Fn(&T, &T) -> bool) {
    for other in others {
        if !items.iter().any(|item| same(item, other)) {
            items.push(other.clone());
        }
    }
}

/// Only the first shard reports the skips of the run; the others report those of their own cases.
fn add_skips(skips: &mut Vec<Skip>, others: &[Skip]) {
    for other in others {
        match skips.iter_mut().find(|skip| (&skip.what, &skip.why) == (&other.what, &other.why)) {
            Some(skip) => skip.count = skip.count.saturating_add(other.count),
            None => skips.push(other.clone()),
        }
    }
}
