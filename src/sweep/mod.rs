//! A sweep: remembered cases first, then corners, then drawn ones; failing ones are made smaller.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `regressions` | failing cases, shrunk and remembered |
//! | `shard` | one sweep over many workers |
//! | `merge` | shards put together again |

use std::time::{Duration, Instant};

use dsv4_kernels::runtime::Environment;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use crate::case::{Case, CaseError};
use crate::judge::checks::{self, CheckOptions, Outcome};
use crate::judge::runner::Runner;
use crate::operator::registry;
use crate::operator::{Operator, Profile};
use crate::record::{CaseRecord, CheckRecord, Origin, Skip, Verdict};
use crate::sweep::regressions::Regressions;

pub mod merge;
pub mod regressions;
pub mod shard;

/// How long one failing case may be shrunk.
const SHRINK_TIME: Duration = Duration::from_secs(30);

/// What to sweep.
#[derive(Clone, Debug)]
pub struct SweepOptions {
    /// Size of the cases.
    pub profile: Profile,
    /// How many to draw; `None` is the operator's own number.
    pub cases: Option<usize>,
    /// Seed of the drawing.
    pub seed: u64,
    /// What to check.
    pub checks: CheckOptions,
    /// Remembered cases.
    pub regressions: Regressions,
    /// Whether a drawn case that fails is remembered.
    pub remember: bool,
}

/// Who listens to a sweep.
pub trait Observer {
    /// How many cases are about to run.
    fn planned(&mut self, operator: &str, cases: usize);
    /// One case is done.
    fn done(&mut self, record: CaseRecord);
}

/// A case that is going to run.
pub struct PlannedCase {
    /// What to run.
    pub case: Case,
    /// Where it came from.
    pub origin: Origin,
    /// The strategy's tree of a drawn case, which makes it smaller if it fails.
    tree: Option<Box<dyn ValueTree<Value = Case>>>,
}

impl PlannedCase {
    /// A case that somebody gave: it is not made smaller.
    pub fn given(case: Case) -> Self {
        Self { case, origin: Origin::Given, tree: None }
    }
}

/// The cases of one operator that can run on a device like this one, in the order in which they run: remembered ones,
/// corners, drawn ones; and the others, counted by the reason.
///
/// # Errors
/// A case that cannot be drawn.
pub fn plan(
    operator: &dyn Operator,
    remembered: Vec<Case>,
    options: &SweepOptions,
    environment: &Environment,
) -> Result<(Vec<PlannedCase>, Vec<Skip>), CaseError> {
    let corners = operator.corner_cases(options.profile).into_iter().map(|case| (case, Origin::Drawn));
    let given = remembered.into_iter().map(|case| (case, Origin::Regression)).chain(corners);
    let mut planned: Vec<_> = given.map(|(case, origin)| PlannedCase { case, origin, tree: None }).collect();
    let strategy = operator.strategy(options.profile);
    let mut runner = runner(options.seed, &operator.describe().name);
    for _ in 0..options.cases.unwrap_or_else(|| operator.default_cases(options.profile)) {
        let tree = strategy.new_tree(&mut runner).map_err(|reason| CaseError::Malformed(reason.to_string()))?;
        planned.push(PlannedCase { case: tree.current(), origin: Origin::Drawn, tree: Some(tree) });
    }
    let mut skips = Vec::new();
    planned.retain(|planned| match operator.cannot_run(&planned.case, environment) {
        Some(why) => {
            Skip::count(&mut skips, format!("cases of {}", planned.case.operator), &why);
            false
        }
        None => true,
    });
    Ok((planned, skips))
}

/// Sweeps one operator.
///
/// # Errors
/// Remembered cases that cannot be read. A case that fails is no error: its record says so.
pub fn sweep(
    operator: &dyn Operator,
    runner: &dyn Runner,
    options: &SweepOptions,
    observer: &mut dyn Observer,
) -> Result<(), CaseError> {
    let name = operator.describe().name;
    let (planned, _) = plan(operator, options.regressions.load(&name)?, options, runner.environment())?;
    observer.planned(&name, planned.len());
    for (number, planned) in (0..).zip(planned) {
        run_planned(planned, number, runner, options, observer);
    }
    Ok(())
}

/// Runs case `number` of a plan, and makes it smaller if it was drawn and fails.
pub fn run_planned(
    planned: PlannedCase,
    number: u64,
    runner: &dyn Runner,
    options: &SweepOptions,
    observer: &mut dyn Observer,
) {
    let record = run_case(&planned.case, planned.origin, runner, options.checks);
    let record = CaseRecord { plan_number: Some(number), ..record };
    observer.done(record.clone());
    shrink_planned(planned, &record, runner, options, observer);
}

/// Makes a drawn case smaller if its record says that it fails; remembers what is left of it.
pub fn shrink_planned(
    planned: PlannedCase,
    record: &CaseRecord,
    runner: &dyn Runner,
    options: &SweepOptions,
    observer: &mut dyn Observer,
) {
    let failing = record.checks.iter().find(|check| check.verdict != Verdict::Pass);
    if let (Some(mut tree), Some(failing)) = (planned.tree, failing)
        && let Some(small) = shrink(&mut *tree, failing, runner, options.checks)
    {
        remember(&small, options);
        observer.done(CaseRecord { plan_number: record.plan_number, ..small });
    }
}

fn runner(seed: u64, operator: &str) -> TestRunner {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes()).update(operator.as_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, hasher.finalize().as_bytes());
    TestRunner::new_with_rng(Config::default(), rng)
}

fn remember(record: &CaseRecord, options: &SweepOptions) {
    if options.remember
        && let Err(error) = options.regressions.append_record(record)
    {
        tracing::error!("the failing case could not be remembered: {error}");
    }
}

/// Walks proptest's tree towards a smaller case that fails the same check; returns the smallest. Each runs under the
/// schedules of the first, so also under those that showed a race.
fn shrink(
    tree: &mut dyn ValueTree<Value = Case>,
    failing: &CheckRecord,
    runner: &dyn Runner,
    checks: CheckOptions,
) -> Option<CaseRecord> {
    let start = Instant::now();
    let mut smallest = run_case(&tree.current(), Origin::Shrunk, runner, checks);
    let mut moved = tree.simplify();
    while moved && start.elapsed() < SHRINK_TIME {
        let record = run_case(&tree.current(), Origin::Shrunk, runner, checks);
        let same = |c: &CheckRecord| c.verdict != Verdict::Pass && c.check == failing.check;
        moved = if record.checks.iter().any(same) {
            smallest = record;
            tree.simplify()
        } else {
            tree.complicate()
        };
    }
    (smallest.verdict() != Verdict::Pass).then_some(smallest)
}

/// Runs one case of any operator and writes its record.
pub fn run_case(case: &Case, origin: Origin, runner: &dyn Runner, options: CheckOptions) -> CaseRecord {
    runner.begin(case);
    let outcome = match registry::prepare(case) {
        Ok(prepared) => checks::run(&*prepared, runner, options),
        Err(error) => refused(&error),
    };
    record(case, origin, runner, options, outcome)
}

/// The outcome of a case that could not be prepared.
fn refused(error: &CaseError) -> Outcome {
    let check = CheckRecord {
        check: "inputs".into(),
        tensor: String::new(),
        verdict: Verdict::Error,
        compared: 0,
        message: error.to_string(),
        metrics: None,
    };
    Outcome { checks: vec![check], ..Outcome::default() }
}

fn record(case: &Case, origin: Origin, runner: &dyn Runner, options: CheckOptions, outcome: Outcome) -> CaseRecord {
    CaseRecord {
        operator: case.operator.clone(),
        case: serde_json::to_value(case).unwrap_or_default(),
        origin,
        paths: outcome.paths,
        checks: outcome.checks,
        kernel_seconds: outcome.kernel_seconds,
        oracle_seconds: outcome.oracle_seconds,
        replay: runner.replay_command(case, options.schedules),
        skips: outcome.skips,
        plan_number: None,
    }
}

/// What a person reads when a case failed: the case, what failed, the worst element, the replay.
pub fn failure_text(record: &CaseRecord) -> String {
    let mut text = format!("{} failed: {}\n", record.operator, record.case);
    for check in record.checks.iter().filter(|check| check.verdict != Verdict::Pass) {
        text += &format!("  {} {}: {}\n", check.check, check.tensor, check.message);
    }
    text += &format!("  replay: {}\n", record.replay);
    text
}
