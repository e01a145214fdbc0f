//! A sweep: saved cases first, then edge cases, then drawn cases. Failing drawn cases are shrunk.
//!
//! | file | content |
//! | --- | --- |
//! | `regressions` | failing cases, shrunk and saved |
//! | `again` | the first case once more, after all others |
//! | `progress` | the time that a sweep has used, and which of its failures are shrunk |
//! | `pool` | the cases of a plan on several devices at the same time |
//! | `smaller` | cases a little smaller than a failing one |
//! | `shard` | one sweep over many workers |
//! | `merge` | joins the shards into one report |

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use dsv4_runtime::{BackendKind, Environment};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::Value;

use crate::case::condition::Condition;
use crate::case::{Case, CaseError};
use crate::change::lot;
use crate::judge::checks::{self, CheckOptions, Laws, Outcome};
use crate::judge::order::findings;
use crate::judge::runner::{Runner, Times};
use crate::judge::turns;
use crate::operator::{AnyOperator, PreparedCase, Profile};
use crate::operators::registry;
use crate::record::{CaseRecord, Check, CheckRecord, Origin, Skip, Verdict, words};
use crate::sweep::again::Bits;
pub use crate::sweep::again::{Turn, mark_turns};
use crate::sweep::progress::{Progress, Shrinks};
use crate::sweep::regressions::Regressions;

mod again;
pub mod merge;
pub mod pool;
pub mod progress;
pub mod regressions;
pub mod session;
pub mod shard;
mod smaller;
pub mod workers;

/// Time budget of the drawn cases of one operator on the emulator, in tests that every commit runs.
pub const EMULATOR_BUDGET: Duration = Duration::from_secs(15);
/// The same for all operators together: more operators do not make the tests of a commit longer.
pub const EMULATOR_BUDGET_OF_ALL: Duration = Duration::from_secs(40);

/// What to sweep.
#[derive(Clone, Debug)]
pub struct SweepOptions {
    /// Size of the cases.
    pub profile: Profile,
    /// Number of drawn cases; `None` takes the operator's own number.
    pub cases: Option<usize>,
    /// Which edge cases run.
    pub edge_cases: GivenCases,
    /// Which saved cases run.
    pub remembered: GivenCases,
    /// Seed of the drawn cases.
    pub seed: u64,
    /// What to check.
    pub checks: CheckOptions,
    /// Saved cases.
    pub regressions: Regressions,
    /// Whether a drawn case that fails is saved.
    pub remember: bool,
    /// A condition on cases. Cases are drawn until enough meet it. Other cases that do not meet it
    /// are skips.
    pub condition: Option<Condition>,
    /// Kinds of cases that do not run, each a counted skip.
    pub left_out: LeftOut,
    /// Seconds of an operator's cases after which no drawn case starts; without it all drawn cases
    /// run. Saved cases and edge cases always run.
    pub time_budget: Option<Duration>,
    /// When the last optional case may start ([`Profile::time_limit`]).
    pub deadline: Option<Instant>,
    /// The numbers of ranks that cases may have; empty for those that they have.
    pub ranks: Vec<usize>,
}

impl SweepOptions {
    /// Whether a case has one of the given numbers of ranks, and meets the condition, where these
    /// are set.
    ///
    /// # Errors
    /// A condition that cannot be evaluated on the case.
    pub fn takes(&self, case: &Case) -> Result<bool, CaseError> {
        if own_ranks(case, &self.ranks).is_some() {
            return Ok(false);
        }
        self.condition
            .as_ref()
            .map_or(Ok(true), |condition| condition.holds(case).map_err(CaseError::Condition))
    }

    /// A drawn case with the fields that the condition fixes; every shrunk case keeps them.
    fn steered(&self, tree: Box<dyn ValueTree<Value = Case>>) -> Box<dyn ValueTree<Value = Case>> {
        if self.condition.is_none() && self.ranks.is_empty() {
            return tree;
        }
        Box::new(Steered { tree, condition: self.condition.clone(), ranks: self.ranks.clone() })
    }

    /// The most draws to find `wanted` cases that the sweep takes.
    fn most_tries(&self, wanted: usize) -> usize {
        match self.condition {
            None => wanted,
            Some(_) if wanted == 0 => 0,
            // A thousand draws each, and enough for a few cases of a rare kind.
            Some(_) => wanted.saturating_mul(1_000).clamp(20_000, 1_000_000).max(wanted),
        }
    }
}

/// Kinds of cases that an external kernel need not take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeftOut {
    /// Cases with a tensor without elements, such as those without tokens.
    pub empty: bool,
    /// Cases with hostile lists or pages.
    pub hostile: bool,
}

impl LeftOut {
    /// Why a case does not run, if it is of such a kind.
    fn why(self, operator: &AnyOperator, case: &Case) -> Option<&'static str> {
        let is_empty = || operator.has_an_empty_tensor(case).unwrap_or(false);
        if self.hostile && case.fields.iter().any(|(name, value)| is_hostile(name, value)) {
            Some("the adapter says `hostile = false`")
        } else if self.empty && is_empty() {
            Some("a tensor of theirs has no elements (--empty runs them)")
        } else {
            None
        }
    }
}

/// Whether a field of a case asks for hostile contents.
fn is_hostile(name: &str, value: &Value) -> bool {
    match value {
        Value::String(kind) => kind == "hostile",
        Value::Bool(is) => *is && name == "hostile",
        Value::Object(fields) => fields.iter().any(|(name, value)| is_hostile(name, value)),
        _ => false,
    }
}

/// A case with one of these numbers of ranks, if it has ranks and any are given: its own, or one that
/// its own chooses.
fn on_ranks(mut case: Case, ranks: &[usize]) -> Case {
    if let Some(own) = own_ranks(&case, ranks) {
        case.fields.insert("ranks".into(), ranks[own as usize % ranks.len()].into());
    }
    case
}

/// The number of ranks of a case, if it has ranks, others are given and its own is not one of them.
fn own_ranks(case: &Case, ranks: &[usize]) -> Option<u64> {
    let own = case.fields.get("ranks")?.as_u64()?;
    (!ranks.is_empty() && !ranks.iter().any(|&ranks| ranks as u64 == own)).then_some(own)
}

/// The cases of a strategy with the fields that a condition fixes, and with these ranks.
struct Steered {
    tree: Box<dyn ValueTree<Value = Case>>,
    condition: Option<Condition>,
    ranks: Vec<usize>,
}

impl ValueTree for Steered {
    type Value = Case;

    fn current(&self) -> Case {
        let case = on_ranks(self.tree.current(), &self.ranks);
        match &self.condition {
            Some(condition) => condition.steered(case),
            None => case,
        }
    }

    fn simplify(&mut self) -> bool {
        self.tree.simplify()
    }

    fn complicate(&mut self) -> bool {
        self.tree.complicate()
    }
}

/// Which edge cases or saved cases of an operator a sweep runs; the others are skips.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivenCases {
    /// All cases.
    All,
    /// That many, chosen at random from a seed: another seed chooses others.
    Lots {
        /// How many.
        most: usize,
        /// Seed of the choice.
        seed: u64,
    },
}

impl GivenCases {
    /// The cases that run, in their order.
    fn of(self, mut cases: Vec<Case>) -> Vec<Case> {
        if let Self::Lots { most, seed } = self {
            let lot = |case: &Case| lot(seed, &case.line());
            let mut lots: Vec<_> = cases.iter().map(lot).collect();
            lots.sort_unstable();
            lots.truncate(most);
            cases.retain(|case| lots.binary_search(&lot(case)).is_ok());
        }
        cases
    }
}

/// Observes a sweep.
pub trait Observer {
    /// This many cases of an operator are about to run.
    fn planned(&mut self, operator: &str, cases: usize);
    /// One case is done.
    fn done(&mut self, record: CaseRecord);
}

/// A case of a plan.
pub struct PlannedCase {
    /// The case to run.
    pub case: Case,
    /// Where the case came from.
    pub origin: Origin,
    /// Whether it runs only while there is time.
    pub optional: bool,
    /// What it has to do with the first case, which runs again at the end ([`mark_turns`]).
    pub turn: Turn,
    /// The strategy's tree of a drawn case, by which it shrinks first if it fails.
    tree: Option<Box<dyn ValueTree<Value = Case>>>,
}

impl PlannedCase {
    /// A case that the user gave: it is not shrunk.
    pub fn given(case: Case) -> Self {
        Self::without_tree(case, Origin::Given)
    }

    /// Whether it came from the strategy. Edge cases and given cases did not.
    pub fn is_drawn(&self) -> bool {
        self.tree.is_some()
    }

    fn without_tree(case: Case, origin: Origin) -> Self {
        Self { case, origin, optional: false, turn: Turn::Other, tree: None }
    }
}

/// The cases of one operator that can run on a device like this one, in the order in which they
/// run: saved cases, edge cases, drawn cases. Also the others, counted by reason.
///
/// # Errors
/// A case that cannot be drawn.
pub fn plan(
    operator: &AnyOperator,
    remembered: Vec<Case>,
    options: &SweepOptions,
    environment: &Environment,
) -> Result<(Vec<PlannedCase>, Vec<Skip>), CaseError> {
    let name = operator.name();
    let mut skips = Vec::new();
    let mut part_of = |all: Vec<Case>, which: GivenCases, what: &str| {
        let declared = all.len();
        let part = which.of(all);
        if part.len() < declared {
            let why = format!("{} of {declared} were drawn by lot", part.len());
            skips.push(Skip {
                what: format!("{what} of {name}"),
                why,
                count: (declared - part.len()) as u64,
            });
        }
        part
    };
    // On another device a case with other SMs is the same as one without.
    let on_emulator = environment.backend == BackendKind::Emulator;
    let mut edge_cases = operator.edge_cases(options.profile);
    edge_cases.retain(|case| on_emulator || !operator.is_for_the_emulator(case));
    if let Some(condition) = &options.condition {
        // All of them, however few the sweep takes: some fields are those of one.
        refuse_unknown_fields(condition, operator, &edge_cases, options)?;
    }
    let edge_cases = part_of(edge_cases, options.edge_cases, "edge cases");
    let remembered = part_of(remembered, options.remembered, "remembered cases");
    let edge_cases =
        edge_cases.into_iter().map(|case| PlannedCase::without_tree(case, Origin::Drawn));
    let remembered =
        remembered.into_iter().map(|case| PlannedCase::without_tree(case, Origin::Regression));
    let mut planned: Vec<PlannedCase> = match options.profile {
        Profile::Smoke => {
            let typical = operator.typical_cases().into_iter();
            let typical = typical.map(|case| PlannedCase::without_tree(case, Origin::Drawn));
            let edge_cases = edge_cases.map(|edge| PlannedCase { optional: true, ..edge });
            typical.chain(remembered).chain(edge_cases).collect()
        }
        _ => remembered.chain(edge_cases).collect(),
    };
    let strategy = operator.strategy(options.profile);
    let mut runner = runner(options.seed, name);
    for planned in &mut planned {
        planned.case = on_ranks(planned.case.clone(), &options.ranks);
    }
    retain_matching(&mut planned, options, &mut skips)?;
    let wanted = options.cases.unwrap_or_else(|| operator.default_cases(options.profile));
    let (before, most) = (planned.len(), options.most_tries(wanted));
    let mut tries = 0;
    while planned.len() - before < wanted && tries < most {
        let tree = strategy
            .new_tree(&mut runner)
            .map_err(|reason| CaseError::Malformed(reason.to_string()))?;
        tries += 1;
        let tree = options.steered(tree);
        let case = tree.current();
        if options.takes(&case)? && (options.condition.is_none() || operator.check(&case).is_ok()) {
            let optional = options.profile == Profile::Smoke;
            let (origin, turn) = (Origin::Drawn, Turn::Other);
            planned.push(PlannedCase { case, origin, optional, turn, tree: Some(tree) });
        }
    }
    let matched = planned.len() - before;
    if let (true, Some(condition)) = (matched < wanted, &options.condition) {
        let why = format!("of {tries} tries {matched} drew a case where {condition}");
        skips.push(Skip {
            what: format!("drawn cases of {name}"),
            why,
            count: (wanted - matched) as u64,
        });
    }
    planned.retain(|planned| {
        let case = &planned.case;
        let left_out = options.left_out.why(operator, case).map(str::to_owned);
        let why = left_out.or_else(|| operator.cannot_run(case, environment));
        if let Some(why) = &why {
            Skip::count(&mut skips, format!("cases of {}", case.operator), why);
        }
        why.is_none()
    });
    Ok((planned, skips))
}

/// Skips the cases that do not meet the sweep's condition, and counts them.
///
/// # Errors
/// A condition that cannot be evaluated on one of them.
pub fn retain_matching(
    planned: &mut Vec<PlannedCase>,
    options: &SweepOptions,
    skips: &mut Vec<Skip>,
) -> Result<(), CaseError> {
    let Some(condition) = &options.condition else { return Ok(()) };
    let taken = planned
        .iter()
        .map(|planned| options.takes(&planned.case))
        .collect::<Result<Vec<_>, _>>()?;
    let mut taken = taken.into_iter();
    planned.retain(|planned| {
        let takes = taken.next() == Some(true);
        if !takes {
            Skip::count(
                skips,
                format!("cases of {}", planned.case.operator),
                &format!("not where {condition}"),
            );
        }
        takes
    });
    Ok(())
}

/// Rejects a field name that no case has: it is a typing error and would skip all cases.
fn refuse_unknown_fields(
    condition: &Condition,
    operator: &AnyOperator,
    edge_cases: &[Case],
    options: &SweepOptions,
) -> Result<(), CaseError> {
    /// That many drawn cases also show the fields that only some cases have.
    const DRAWN: usize = 256;
    let name = operator.name();
    let (strategy, mut runner) = (operator.strategy(options.profile), runner(options.seed, name));
    let drawn =
        (0..DRAWN).map_while(|_| strategy.new_tree(&mut runner).ok().map(|tree| tree.current()));
    let cases: Vec<Case> = edge_cases.iter().cloned().chain(drawn).collect();
    let Some(unknown) = condition.unknown(cases.iter()) else { return Ok(()) };
    let fields: BTreeSet<&str> =
        cases.iter().flat_map(|case| case.fields.keys()).map(String::as_str).collect();
    let fields = fields.into_iter().collect::<Vec<_>>().join(", ");
    Err(CaseError::Condition(format!(
        "`{condition}` names `{unknown}`, which no case of {name} has; they have {fields}"
    )))
}

/// Sweeps one operator. Returns what did not run or was not shrunk, counted by reason.
///
/// # Errors
/// Saved cases that cannot be read, and kernels that cannot be run. A failing case is not an error:
/// its record reports it.
pub fn sweep(
    operator: &AnyOperator,
    runner: &dyn Runner,
    options: &SweepOptions,
    observer: &mut dyn Observer,
) -> Result<Vec<Skip>, CaseError> {
    let name = operator.name();
    let (planned, mut skips) =
        plan(operator, options.regressions.load(name)?, options, runner.environment())?;
    observer.planned(name, planned.len());
    let mut planned = planned;
    mark_turns(&mut planned.iter_mut().collect::<Vec<_>>(), options);
    let mut progress = Progress::default();
    for (number, planned) in (0..).zip(planned) {
        run_planned(planned, number, runner, options, &mut progress, observer);
    }
    if let Some((_, why)) = progress.untestable().next() {
        return Err(CaseError::Untestable { operator: name.to_owned(), why: why.to_owned() });
    }
    skips.extend(progress.skips(options.time_budget));
    Ok(skips)
}

/// Runs case `number` of a plan, and shrinks it if the sweep made it and it fails. A drawn case
/// without time left in the budget is skipped and counted. So are all cases of an operator whose
/// kernels cannot be run.
pub fn run_planned(
    planned: PlannedCase,
    number: u64,
    runner: &dyn Runner,
    options: &SweepOptions,
    progress: &mut Progress,
    observer: &mut dyn Observer,
) {
    if progress.admits(&planned, options) {
        let (case, origin) = (&planned.case, planned.origin);
        let ran = Ran::of((case, origin, &planned.turn), number, runner, options.checks);
        settle(planned, ran, runner, options, progress, observer);
    }
}

/// A case of a plan that was run.
pub struct Ran {
    record: CaseRecord,
    /// How long it took in total.
    time: Duration,
    /// The bits of the operator's first case, where this is that case or the last one.
    bits: Option<Bits>,
}

impl Ran {
    /// Runs case `number` of a plan.
    pub fn of(
        (case, origin, turn): (&Case, Origin, &Turn),
        number: u64,
        runner: &dyn Runner,
        checks: CheckOptions,
    ) -> Self {
        let start = Instant::now();
        let checks = checks.in_a_sweep(runner.environment().backend, number);
        let record = run_case(case, origin, runner, checks);
        let bits = turn.asks_for(case).map(|first| Bits::of(first, runner));
        let record = CaseRecord { plan_number: Some(number), ..record };
        Self { record, time: start.elapsed(), bits }
    }
}

/// Reports the result of a case of a plan, and shrinks the case if the sweep made it and it fails.
pub fn settle(
    planned: PlannedCase,
    ran: Ran,
    runner: &dyn Runner,
    options: &SweepOptions,
    progress: &mut Progress,
    observer: &mut dyn Observer,
) {
    let Ran { mut record, time, bits } = ran;
    if let Some(why) = record.untestable {
        // This case shows nothing, and the operator's other cases would not either. No record
        // reports that it ran.
        return progress.stop(&planned.case.operator, first_lines(&why));
    }
    progress.ran(&planned.case.operator, time);
    if let Some(bits) = bits {
        again::settle(&planned.turn, bits, runner, &mut record, progress);
    }
    observer.done(record.clone());
    shrink_planned(planned, &record, runner, options, progress, observer);
}

/// Shrinks a drawn or edge case if its record fails and the failure is one of the first of its kind
/// ([`Progress`]). Saves the result. Saved cases are small, and given ones stay as they are.
pub fn shrink_planned(
    planned: PlannedCase,
    record: &CaseRecord,
    runner: &dyn Runner,
    options: &SweepOptions,
    progress: &mut Progress,
    observer: &mut dyn Observer,
) {
    // Of a case of its own, which is no smaller for it.
    let again = |check: &CheckRecord| check.message.starts_with(again::WHEN);
    let mut failures = record.checks.iter().filter(|check| check.verdict != Verdict::Pass);
    let failing = failures.find(|check| !again(check));
    let (Origin::Drawn, Some(failing)) = (planned.origin, failing) else { return };
    match progress.shrinks(&record.operator, failing) {
        Shrinks::Known => {}
        // A new kind of failure: saved without shrinking.
        Shrinks::Not => remember(record, options),
        Shrinks::For(allowed) => {
            let start = Instant::now();
            let small = shrink(planned.tree, record, failing, runner, options, allowed);
            progress.shrank(&record.operator, start.elapsed());
            remember(&small, options);
            observer.done(small);
        }
    }
}

/// The part of a compiler's log that names the error.
fn first_lines(log: &str) -> String {
    const LINES: usize = 12;
    let mut lines = log.lines();
    let mut text = lines.by_ref().take(LINES).collect::<Vec<_>>().join("\n");
    let others = lines.count();
    if others > 0 {
        text += &format!("\n… and {others} more lines");
    }
    text
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

/// Follows proptest's tree to a smaller case that fails the same check, and then shrinks field by
/// field. Returns the smallest case found in time, which may be the case itself. Each case runs
/// under the schedules of the first, so also under those that showed a race.
fn shrink(
    tree: Option<Box<dyn ValueTree<Value = Case>>>,
    record: &CaseRecord,
    failing: &CheckRecord,
    runner: &dyn Runner,
    options: &SweepOptions,
    allowed: Duration,
) -> CaseRecord {
    let mut shrinking = Shrinking::new(failing, runner, options, allowed);
    if let Some(mut tree) = tree {
        shrinking.walk(&mut *tree);
    }
    // An edge case has no tree, and what a tree gave may still have smaller fields.
    if let Ok(from) =
        shrinking.smallest.clone().map_or_else(|| serde_json::from_value(record.case.clone()), Ok)
    {
        shrinking.go_on(from);
    }
    match shrinking.smallest {
        Some(case) => {
            let small = run_case(&case, Origin::Shrunk, runner, options.checks);
            CaseRecord { plan_number: record.plan_number, ..small }
        }
        None => CaseRecord { origin: Origin::Shrunk, ..record.clone() },
    }
}

/// A failing case while it is shrunk.
struct Shrinking<'a> {
    failing: &'a CheckRecord,
    runner: &'a dyn Runner,
    options: &'a SweepOptions,
    asked: CheckOptions,
    begun: Instant,
    allowed: Duration,
    /// The longest run so far: no run starts that would probably not end in time.
    longest: Duration,
    /// Different choices often lead to the same case, so each case runs once. Then shrinking ends
    /// because nothing smaller fails, not because the time is used up, and the result repeats.
    failed: HashMap<Case, bool>,
    smallest: Option<Case>,
}

impl<'a> Shrinking<'a> {
    fn new(
        failing: &'a CheckRecord,
        runner: &'a dyn Runner,
        options: &'a SweepOptions,
        allowed: Duration,
    ) -> Self {
        let checks = options.checks;
        // Shrinking repeats only the failed check and cheap ones. The shrunk case gets all checks
        // like any other.
        let asked = CheckOptions {
            power: false,
            sequence: checks.sequence && failing.check == Check::Sequence,
            batches: checks.batches && failing.check == Check::BatchInvariance,
            laws: if failing.check.is_law() { checks.laws } else { Laws::None },
            triangulate: checks.triangulate && failing.check == Check::OracleGradients,
            ..checks
        };
        let (begun, longest, failed) = (Instant::now(), Duration::ZERO, HashMap::new());
        Self { failing, runner, options, asked, begun, allowed, longest, failed, smallest: None }
    }

    fn has_time(&self) -> bool {
        self.begun.elapsed() + self.longest < self.allowed
    }

    /// Whether a case of this sweep fails the same check.
    fn fails(&mut self, case: &Case) -> bool {
        if let Some(&fails) = self.failed.get(case) {
            return fails;
        }
        // A case that the sweep does not take is not a smaller case either.
        let fails = self.options.takes(case).unwrap_or(false) && {
            let begun = Instant::now();
            let smaller = run_case(case, Origin::Shrunk, self.runner, self.asked);
            self.longest = self.longest.max(begun.elapsed());
            smaller
                .checks
                .iter()
                .any(|check| check.verdict != Verdict::Pass && check.check == self.failing.check)
        };
        self.failed.insert(case.clone(), fails);
        fails
    }

    /// Shrinks along the tree of the strategy.
    fn walk(&mut self, tree: &mut dyn ValueTree<Value = Case>) {
        let mut moved = tree.simplify();
        while moved && self.has_time() {
            let case = tree.current();
            moved = if self.fails(&case) {
                self.smallest = Some(case);
                tree.simplify()
            } else {
                tree.complicate()
            };
        }
    }

    /// Shrinks field by field, again and again until no smaller value fails.
    fn go_on(&mut self, mut case: Case) {
        let Ok(operator) = registry::find(&case.operator) else { return };
        let usual = smaller::usual(operator, self.options.profile);
        let mut moved = true;
        while moved {
            moved = false;
            for place in smaller::places(&case) {
                for smaller in smaller::at_place(&case, &place, &usual) {
                    if !self.has_time() {
                        return;
                    }
                    let is_case = operator.check(&smaller).is_ok()
                        && operator.cannot_run(&smaller, self.runner.environment()).is_none();
                    if is_case && self.fails(&smaller) {
                        (case, moved) = (smaller.clone(), true);
                        self.smallest = Some(smaller);
                        break;
                    }
                }
            }
        }
    }
}

/// Runs one case of any operator and writes its record.
pub fn run_case(
    case: &Case,
    origin: Origin,
    runner: &dyn Runner,
    options: CheckOptions,
) -> CaseRecord {
    runner.begin(case);
    let _room = turns::wait_on_machine(|| room_on_machine(case));
    let outcome = match registry::prepare(case) {
        Ok(prepared) => checks::run(&*prepared, runner, options),
        Err(error) => refused(&error),
    };
    record(case, origin, runner, options, outcome)
}

/// Bytes of the machine's memory that a case takes.
fn room_on_machine(case: &Case) -> u64 {
    let operator = registry::find(&case.operator);
    let bytes = operator.and_then(|operator| operator.bytes(case));
    u64::try_from(bytes.unwrap_or(0)).unwrap_or(u64::MAX)
}

/// Runs one case that was prepared, such as one with tensors of the caller's, and writes its record.
pub fn run_prepared(
    case: &Case,
    prepared: &dyn PreparedCase,
    runner: &dyn Runner,
    options: CheckOptions,
) -> CaseRecord {
    runner.begin(case);
    record(case, Origin::Given, runner, options, checks::run(prepared, runner, options))
}

/// The outcome of a case that could not be prepared.
fn refused(error: &CaseError) -> Outcome {
    let check = CheckRecord {
        check: "inputs".into(),
        tensor: String::new(),
        verdict: Verdict::Error,
        compared: 0,
        message: words::message(error.to_string()),
        metrics: None,
        failing: None,
    };
    Outcome { checks: vec![check], ..Outcome::default() }
}

fn record(
    case: &Case,
    origin: Origin,
    runner: &dyn Runner,
    options: CheckOptions,
    outcome: Outcome,
) -> CaseRecord {
    let Times { theirs, ours, skip } = runner.times();
    CaseRecord {
        operator: case.operator.clone(),
        case: serde_json::to_value(case).unwrap_or_default(),
        origin,
        paths: outcome.paths,
        checks: outcome.checks,
        kernel_seconds: three_digits(outcome.kernel_seconds),
        oracle_seconds: three_digits(outcome.oracle_seconds),
        replay: runner.replay_command(case, options.schedules),
        skips: outcome.skips.into_iter().chain(skip).collect(),
        batches: outcome.batches,
        plan_number: None,
        untestable: outcome.untestable,
        seconds: theirs,
        our_seconds: ours,
        unsupported: outcome.unsupported,
    }
}

/// A time to three significant digits: no measurement of one run has more.
fn three_digits(seconds: f64) -> f64 {
    format!("{seconds:.2e}").parse().unwrap_or(seconds)
}

/// Text for the user about a failing case: what failed, the worst element, and the command that
/// replays the case.
pub fn failure_text(record: &CaseRecord) -> String {
    let mut text = format!("{} failed\n", record.operator);
    for finding in findings(record) {
        let head = format!("{} {}", finding.check.check, finding.check.tensor);
        text += &format!("  {}: {}\n", head.trim_end(), finding.check.message);
        let company = finding.company();
        text += &if company.is_empty() { company } else { format!("    {company}\n") };
    }
    text += &format!("  replay: {}\n", record.replay);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operators::lists;

    /// Cases whose inputs are fast to draw.
    const SMALL: u128 = 1 << 20;

    #[test]
    fn a_sweep_uses_each_member_of_each_hostile_list_of_every_operator() {
        let (mut lists_found, mut unused) = (0, Vec::new());
        for operator in registry::OPERATORS {
            let mut cases = operator.edge_cases(Profile::Quick);
            let strategy = operator.strategy(Profile::Quick);
            let mut drawing = runner(1, operator.name());
            let count = operator.default_cases(Profile::Quick);
            let drawn = (0..count).filter_map(|_| strategy.new_tree(&mut drawing).ok());
            cases.extend(drawn.map(|tree| tree.current()));
            lists::take_used();
            for case in &cases {
                if operator.elements(case).is_ok_and(|elements| elements <= SMALL) {
                    let prepared = operator.prepare(case);
                    assert!(prepared.is_ok(), "{}", case.line());
                }
            }
            for (list, used, all) in lists::take_used() {
                lists_found += 1;
                if used < all {
                    unused.push(format!("{used} of {all} of `{list}` of {}", operator.name()));
                }
            }
        }
        assert!(unused.is_empty(), "values that a sweep used: {}", unused.join(", "));
        assert!(lists_found > 10, "{lists_found} lists");
    }
}
