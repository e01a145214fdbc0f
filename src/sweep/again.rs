//! The first case of each operator once more, after all others: a kernel that computes something
//! else from its hundredth launch on agrees with itself within every case.

use std::collections::BTreeMap;

use dsv4_reference::precision::Precision;
use dsv4_runtime::{BackendKind, Contract};

use super::{PlannedCase, SweepOptions};
use crate::case::Case;
use crate::judge::checks;
use crate::judge::runner::{RunError, Runner};
use crate::operator::KernelRun;
use crate::operators::registry;
use crate::record::{CaseRecord, Skip};
use crate::sweep::progress::Progress;

/// What a case of a plan has to do with the first case of its operator.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Turn {
    /// Nothing.
    #[default]
    Other,
    /// It is that case.
    First,
    /// It is the last one that surely runs: after it that case runs again.
    Last(Case),
}

impl Turn {
    /// The case whose results are needed after `case` ran, if any.
    pub(super) fn asks_for<'c>(&'c self, case: &'c Case) -> Option<&'c Case> {
        match self {
            Self::Other => None,
            Self::First => Some(case),
            Self::Last(first) => Some(first),
        }
    }
}

/// What messages about that run start with.
pub(super) const WHEN: &str = "the operator's first case again, at the end of the sweep";

/// Marks the first case of each operator in a whole plan, and the last one that surely runs.
pub fn mark_turns(cases: &mut [&mut PlannedCase], options: &SweepOptions) {
    if options.checks.only_batches || options.checks.only_beside {
        return;
    }
    let surely =
        |case: &PlannedCase| !case.optional && (!case.is_drawn() || options.time_budget.is_none());
    let mut ends: BTreeMap<String, [usize; 2]> = BTreeMap::new();
    for (at, planned) in cases.iter().enumerate().filter(|(_, planned)| surely(planned)) {
        ends.entry(planned.case.operator.clone()).or_insert([at; 2])[1] = at;
    }
    for [first, last] in ends.into_values().filter(|[first, last]| first < last) {
        cases[last].turn = Turn::Last(cases[first].case.clone());
        cases[first].turn = Turn::First;
    }
}

/// What the kernels wrote for the first case.
#[derive(Debug)]
pub struct Bits(Result<KernelRun, RunError>);

impl Bits {
    /// Runs the kernels of a case once.
    pub(super) fn of(case: &Case, runner: &dyn Runner) -> Self {
        Self(run(case, runner))
    }
}

fn run(case: &Case, runner: &dyn Runner) -> Result<KernelRun, RunError> {
    let refused = |error: &dyn std::fmt::Display| RunError::error(error.to_string());
    let prepared = registry::prepare(case).map_err(|error| refused(&error))?;
    // An external kernel learns from the oracle what to write.
    let external = runner.environment().backend == BackendKind::External;
    let exact = if external { prepared.oracle(Precision::Exact) } else { Ok(Vec::new()) };
    let exact = exact.map_err(|error| refused(&error))?;
    runner.begin(case);
    runner.run(&*prepared, &exact, Contract::NAN)
}

/// Keeps the first case's results, or compares those of its second run with them. The checks are
/// added to the record of the operator's last case.
pub(super) fn settle(
    turn: &Turn,
    bits: Bits,
    runner: &dyn Runner,
    record: &mut CaseRecord,
    progress: &mut Progress,
) {
    let Turn::Last(case) = turn else { return progress.keep_first(&record.operator, bits) };
    let when = format!("{WHEN} ({})", case.line());
    let skip = |why: &str| Skip { what: "the first case again".into(), why: why.into(), count: 1 };
    // Another shard, or the run that this one resumes, may have had the first case. Records are
    // those of a run that was not divided, so it runs here twice.
    let first = progress.take_first(&record.operator).unwrap_or_else(|| Bits::of(case, runner));
    match (first, bits) {
        (Bits(Ok(first)), Bits(second)) => {
            let (found, skips) = checks::again(&first, second, runner, &when);
            record.checks.extend(found);
            record.skips.extend(skips);
        }
        (Bits(Err(error)), _) => record.skips.push(skip(&error.message)),
    }
}
