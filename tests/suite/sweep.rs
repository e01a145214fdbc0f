//! What a sweep does, and the checks themselves: each must fail where it should. They run on a test
//! operator, whose kernel does exactly what a test wants. The sweeps of the real operators are
//! separate tests (`tests/operators`).

use std::cell::RefCell;
use std::collections::{BTreeSet, HashSet};
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use dsv4_parity::case::{Case, CaseError, Draw};
use dsv4_parity::judge::budget::Budget;
use dsv4_parity::judge::checks::{self, CheckOptions, Laws, Outcome, POWERLESS};
use dsv4_parity::judge::runner::{RunError, Runner};
use dsv4_parity::judge::triangulation::triangulate;
use dsv4_parity::judge::truth::Truth;
use dsv4_parity::judge::yardstick::working_precisions;
use dsv4_parity::operator::{
    Arithmetic, Comparison, GradientProbe, Grid, KernelRun, KernelTensor, Law, OracleTensor,
    PreparedCase, Profile, Relation, Side,
};
use dsv4_parity::operators::registry;
use dsv4_parity::record::{CaseRecord, Origin, Skip, Verdict};
use dsv4_parity::sweep::regressions::Regressions;
use dsv4_parity::sweep::{self, GivenCases, LeftOut, PlannedCase, SweepOptions};
use dsv4_reference::precision::Precision;
use dsv4_reference::{Format, Products, Rounding};
use dsv4_runtime::arena::{Violation, ViolationKind};
use dsv4_runtime::{BackendKind, Contract, DType, Device, Environment, HostTensor, RuntimeError};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

use crate::support::{self, Collected};

// ---------------------------------------------------------------- the operators

/// A sweep without saved cases.
fn options(cases: usize, seed: u64, checks: CheckOptions) -> SweepOptions {
    SweepOptions {
        profile: Profile::Quick,
        cases: Some(cases),
        edge_cases: GivenCases::All,
        remembered: GivenCases::All,
        seed,
        checks,
        regressions: Regressions::new(Path::new("none")),
        remember: false,
        condition: None,
        left_out: LeftOut::default(),
        time_budget: None,
        deadline: None,
        ranks: Vec::new(),
    }
}

/// A sweep without saved cases and without edge cases.
fn drawn_alone(cases: usize, seed: u64) -> SweepOptions {
    SweepOptions {
        edge_cases: GivenCases::Lots { most: 0, seed },
        ..options(cases, seed, CheckOptions::of_kernels(0))
    }
}

#[test]
fn cases_with_huge_steps_need_little_of_a_gpu() {
    // Far less than the gaps between their rows.
    const MUCH: u64 = 8 << 30;
    // Cases whose inputs are fast to draw.
    const SMALL: u128 = 1 << 18;
    let emulator =
        &Environment { backend: BackendKind::Emulator, ..support::device().environment().clone() };
    let gpu = Environment { backend: BackendKind::Cuda, ..emulator.clone() };
    // Ranks get dense copies of their tokens.
    for operator in registry::OPERATORS.iter().filter(|operator| !operator.has_ranks()) {
        let mut huge_cases = 0;
        let small = |case: &Case| operator.elements(case).is_ok_and(|elements| elements <= SMALL);
        for case in operator.edge_cases(Profile::Ci).into_iter().filter(small) {
            let steps =
                |number: &serde_json::Value| number.as_u64().is_some_and(|gap| gap >= 1 << 24);
            let gaps = |layout: &serde_json::Value| {
                layout["gaps"].as_object().is_some_and(|gaps| gaps.values().any(steps))
            };
            let layouts = case.fields.get("layouts").and_then(|layouts| layouts.as_object());
            let huge = layouts.is_some_and(|layouts| layouts.values().any(gaps));
            let Ok(prepared) = operator.prepare(&case) else { continue };
            assert_eq!(prepared.room_on_gpu(emulator), 0);
            let room = prepared.room_on_gpu(&gpu);
            assert!(room <= MUCH, "{room} of {}", case.line());
            huge_cases += usize::from(huge);
        }
        assert!(huge_cases > 0, "{}: no such case", operator.name());
    }
}

#[test]
fn with_given_ranks_no_case_has_others_not_even_a_smaller_one_of_a_failing_case() {
    let options = SweepOptions { ranks: vec![2, 4], ..drawn_alone(40, 5) };
    let operator = registry::find("cp_window").unwrap();
    let environment = support::device().environment();
    let (planned, _) = sweep::plan(operator, Vec::new(), &options, environment).unwrap();
    let ranks: BTreeSet<u64> =
        planned.iter().filter_map(|one| one.case.fields["ranks"].as_u64()).collect();
    assert_eq!(ranks, BTreeSet::from([2, 4]));
    // What shrinks a failing case asks the options whether they take a smaller one.
    let mut smaller = planned[0].case.clone();
    assert!(options.takes(&smaller).unwrap());
    smaller.fields.insert("ranks".into(), 1.into());
    assert!(!options.takes(&smaller).unwrap());
}

#[test]
fn cases_for_another_gpu_generation_are_counted_as_skips_and_not_run() {
    let options = options(20, 1, CheckOptions::of_kernels(0));
    let gpu = |target: &str| Environment {
        backend: BackendKind::Cuda,
        target: target.into(),
        ..support::device().environment().clone()
    };
    for name in ["sparse_attention", "decode_attention", "score_recompute"] {
        let operator = registry::find(name).unwrap();
        let plan = |environment: &Environment| {
            sweep::plan(operator, Vec::new(), &options, environment).unwrap()
        };
        let hopper = |planned: &[PlannedCase]| {
            planned.iter().filter(|one| one.case.fields["implementation"] == "hopper").count()
                as u64
        };
        // Layouts that do not fit a GPU are skips of another kind, and equally many on both.
        let of_generation =
            |skips: Vec<Skip>| skips.into_iter().filter(|skip| !skip.why.contains("GiB")).collect();
        let (all, none) = plan(&gpu("sm_90a"));
        let none: Vec<Skip> = of_generation(none);
        assert!(none.is_empty() && hopper(&all) > 3, "{none:?}");
        let (portable, skips) = plan(&gpu("sm_80"));
        let skips: Vec<Skip> = of_generation(skips);
        let [skip] = skips.as_slice() else { panic!("{skips:?}") };
        assert_eq!(
            (skip.what.as_str(), skip.count),
            (format!("cases of {name}").as_str(), hopper(&all))
        );
        assert!(skip.why.contains("need sm_90a") && skip.why.contains("sm_80"), "{}", skip.why);
        assert_eq!((hopper(&portable), portable.len() as u64 + skip.count), (0, all.len() as u64));
    }
}

#[test]
fn every_case_that_a_strategy_draws_or_shrinks_to_replays_from_its_line() {
    for operator in registry::OPERATORS {
        let mut runner = TestRunner::deterministic();
        let strategy = operator.strategy(Profile::Quick);
        for _ in 0..8 {
            let mut tree = strategy.new_tree(&mut runner).unwrap();
            for _ in 0..16 {
                let case = tree.current();
                assert_eq!(Case::parse(&case.line()).unwrap(), case);
                registry::prepare(&case).unwrap_or_else(|e| panic!("{}: {e}", case.line()));
                if !tree.simplify() {
                    break;
                }
            }
        }
    }
}

#[test]
fn the_same_seed_draws_the_same_cases_and_another_seed_others() {
    let operator = registry::find("rope").unwrap();
    let drawn = |seed| -> Vec<Case> {
        let options = options(2, seed, CheckOptions::of_kernels(0));
        let (planned, _) =
            sweep::plan(operator, Vec::new(), &options, support::device().environment()).unwrap();
        planned.into_iter().map(|planned| planned.case).collect()
    };
    let first = drawn(5);
    assert_eq!(first, drawn(5));
    assert_ne!(first, drawn(6));
}

#[test]
fn edge_cases_are_drawn_by_lot_in_their_order_and_the_others_are_counted() {
    let operator = registry::find("rope").unwrap();
    let all: Vec<Case> = operator.edge_cases(Profile::Quick);
    let drawn = |edge_cases| {
        let options = SweepOptions { edge_cases, ..options(0, 1, CheckOptions::of_kernels(0)) };
        let (planned, skips) =
            sweep::plan(operator, Vec::new(), &options, support::device().environment()).unwrap();
        let cases: Vec<Case> = planned.into_iter().map(|planned| planned.case).collect();
        (
            cases,
            skips
                .iter()
                .filter(|skip| skip.what == "edge cases of rope")
                .map(|skip| skip.count)
                .sum::<u64>(),
        )
    };
    let lots = |most, seed| drawn(GivenCases::Lots { most, seed });
    assert_eq!(drawn(GivenCases::All), (all.clone(), 0));
    assert_eq!(lots(all.len(), 1), (all.clone(), 0));
    assert_eq!(lots(0, 1), (vec![], all.len() as u64));
    let (five, left_out) = lots(5, 1);
    assert_eq!((five.len(), left_out), (5, all.len() as u64 - 5));
    assert!(all.iter().filter(|case| five.contains(case)).eq(&five), "in another order");
    assert_ne!(lots(5, 2).0, five);
}

#[test]
fn a_failing_case_is_shrunk_to_a_smaller_one_that_fails_the_same_check() {
    let (file, mean) = ("rms_norm.cu", "sum_of_squares / static_cast<float>(width) + eps");
    let tree = support::device().tree();
    let text = tree.text(file).unwrap();
    assert_eq!(text.matches(mean).count(), 1);
    let wrong = tree.with_text(
        file,
        text.replace(mean, &mean.replace("(width)", "(width + 1)")),
        "a wrong mean",
    );
    let device = support::device().with_tree(wrong);
    let (options, mut collected) = (drawn_alone(1, 3), Collected::default());
    sweep::sweep(registry::find("rms_norm").unwrap(), &device, &options, &mut collected).unwrap();
    let records = collected.records;
    let [drawn, small] = &records[records.len() - 2..] else { panic!("nothing was shrunk") };
    assert_eq!((drawn.origin, small.origin), (Origin::Drawn, Origin::Shrunk));
    let failed = |record: &CaseRecord| {
        record.checks.iter().find(|c| c.verdict != Verdict::Pass).map(|c| c.check.clone())
    };
    let first = failed(drawn).expect("the drawn case fails");
    assert!(small.checks.iter().any(|c| c.verdict != Verdict::Pass && c.check == first));
    let elements = |record: &CaseRecord| {
        let extent = |name: &str| record.case[name].as_u64().expect("an extent");
        extent("num_rows") * extent("width")
    };
    assert!(elements(small) < elements(drawn), "{} is not smaller than {}", small.case, drawn.case);
}

/// Runs no kernel: it returns the oracle's own results of rms_norm, except for the corrupted
/// tensors.
struct MadeUp<'a> {
    corrupted: &'a [&'static str],
    cases: RefCell<Vec<Case>>,
}

/// A device whose kernels compute something else, by one bit, where a case is run again after
/// others.
struct Remembers<'a> {
    device: &'a Device,
    cases: RefCell<Vec<String>>,
}

impl Runner for Remembers<'_> {
    fn run(
        &self,
        prepared: &dyn PreparedCase,
        exact: &[OracleTensor],
        contract: Contract,
    ) -> Result<KernelRun, RunError> {
        let mut run = Runner::run(self.device, prepared, exact, contract)?;
        let line = prepared.case().map(|case| case.line()).unwrap_or_default();
        let mut cases = self.cases.borrow_mut();
        let is_old = cases.last() != Some(&line) && cases.contains(&line);
        if let Some(tensor) = run.tensors.first_mut().filter(|_| is_old) {
            tensor.tensor.bytes[0] ^= 1;
        }
        cases.push(line);
        Ok(run)
    }

    fn environment(&self) -> &Environment {
        self.device.environment()
    }

    fn kernels(&self) -> (String, String) {
        Default::default()
    }

    fn replay_command(&self, case: &Case, _schedules: u32) -> String {
        case.line()
    }

    fn cannot_vary(&self, _variant: &dyn PreparedCase) -> Option<&'static str> {
        Some("what runs between a case and itself is another case")
    }
}

#[test]
fn kernels_that_change_while_a_sweep_runs_are_seen_where_the_first_case_runs_again() {
    for name in ["rms_norm", "swiglu", "topk"] {
        let operator = registry::find(name).unwrap();
        let edge_cases = GivenCases::Lots { most: 2, seed: 5 };
        let checks = CheckOptions { batches: false, ..CheckOptions::of_kernels(0) };
        let options = SweepOptions { edge_cases, ..options(2, 3, checks) };
        let mut collected = Collected::default();
        sweep::sweep(operator, support::device(), &options, &mut collected).unwrap();
        for record in &collected.records {
            assert_eq!(record.verdict(), Verdict::Pass, "{}", sweep::failure_text(record));
        }
        let runner = Remembers { device: support::device(), cases: RefCell::default() };
        let mut collected = Collected::default();
        sweep::sweep(operator, &runner, &options, &mut collected).unwrap();
        let failing = collected.records.iter().flat_map(|record| &record.checks);
        let failing: Vec<_> = failing.filter(|check| check.verdict != Verdict::Pass).collect();
        let [check] = failing.as_slice() else { panic!("{name}: {failing:?}") };
        assert_eq!(check.check.as_str(), "repeatable");
        let says = "the operator's first case again, at the end of the sweep";
        assert!(check.message.starts_with(says), "{}", check.message);
        let last = collected.records.last().expect("records");
        assert!(last.checks.iter().any(|check| check.verdict != Verdict::Pass), "{name}");
    }
}

/// The time of the test kernels: more than the oracle takes.
const LAUNCH: Duration = Duration::from_millis(10);

impl Runner for MadeUp<'_> {
    fn begin(&self, case: &Case) {
        self.cases.borrow_mut().push(case.clone());
    }

    fn run(
        &self,
        _prepared: &dyn PreparedCase,
        exact: &[OracleTensor],
        _contract: Contract,
    ) -> Result<KernelRun, RunError> {
        std::thread::sleep(LAUNCH);
        let tensor = |exact: &OracleTensor| {
            let factor = if self.corrupted.contains(&exact.name) { -1.0 } else { 1.0 };
            let values: Vec<f64> = exact.values.iter().map(|value| factor * value).collect();
            let tensor = HostTensor::from_f64(DType::F32, &exact.shape, &values);
            KernelTensor::new(exact.name, tensor)
        };
        Ok(KernelRun {
            tensors: exact.iter().map(tensor).collect(),
            violations: vec![],
            paths: vec![],
        })
    }

    fn environment(&self) -> &Environment {
        support::device().environment()
    }

    fn kernels(&self) -> (String, String) {
        Default::default()
    }

    fn replay_command(&self, case: &Case, _schedules: u32) -> String {
        case.line()
    }

    fn cannot_vary(&self, _variant: &dyn PreparedCase) -> Option<&'static str> {
        Some("what is given back is the case's, not its variant's")
    }
}

/// Sweeps the test kernels of rms_norm; also returns the cases that ran, including shrunk ones, and
/// the time.
fn sweep_made_up(
    corrupted: &[&'static str],
    options: &SweepOptions,
) -> (Collected, Vec<Skip>, (Vec<Case>, Duration)) {
    let start = Instant::now();
    let (runner, mut collected) =
        (MadeUp { corrupted, cases: RefCell::default() }, Collected::default());
    let skips = sweep::sweep(registry::find("rms_norm").unwrap(), &runner, options, &mut collected)
        .unwrap();
    (collected, skips, (runner.cases.into_inner(), start.elapsed()))
}

/// Check and tensor of the first failure of each shrunk case.
fn shrunk(collected: &Collected) -> Vec<(&str, &str)> {
    let records = collected.records.iter().filter(|record| record.origin == Origin::Shrunk);
    let failure = |record: &'_ CaseRecord| {
        record.checks.iter().position(|check| check.verdict != Verdict::Pass)
    };
    let mut found = Vec::new();
    for record in records {
        let check = &record.checks[failure(record).expect("what was made smaller still fails")];
        found.push((check.check.as_str(), check.tensor.as_str()));
    }
    found
}

#[test]
fn a_sweep_that_fails_everywhere_makes_each_kind_of_failure_smaller_once_and_lists_the_rest() {
    let edge_cases = GivenCases::Lots { most: 20, seed: 3 };
    let options = SweepOptions { edge_cases, ..options(12, 3, CheckOptions::of_kernels(0)) };
    let (failing, mut skips, cases) = sweep_made_up(&["y"], &options);
    skips.retain(|skip| !skip.what.starts_with("edge cases"));
    let (passing, _, of_a_pass) = sweep_made_up(&[], &options);
    let failed = |record: &&CaseRecord| record.verdict() != Verdict::Pass;
    if let Some(record) = passing.records.iter().find(failed) {
        panic!("what is not corrupted fails: {}", sweep::failure_text(record));
    }
    let swept: Vec<_> =
        failing.records.iter().filter(|record| record.origin != Origin::Shrunk).collect();
    assert_eq!(swept.len(), failing.planned, "every case is listed");
    // Where y is zero, it is right with any factor.
    let failures = swept.iter().filter(|record| failed(record)).count() as u64;
    assert!(failures > 16, "{failures} of 32 cases fail");
    assert_eq!(shrunk(&failing), [("forward", "y")]);
    let [skip] = skips.as_slice() else { panic!("{skips:?}") };
    assert_eq!(
        (skip.what.as_str(), skip.count),
        ("failing cases of rms_norm shrunk", failures - 1)
    );
    // A failing case is shrunk no longer than the cases took until then, except for the last run.
    assert!(
        cases.0.len() > of_a_pass.0.len(),
        "{cases:?} ran where a sweep that passes runs {of_a_pass:?}"
    );
    assert!(
        cases.1 <= 3 * of_a_pass.1,
        "{:?} where a sweep that passes takes {:?}",
        cases.1,
        of_a_pass.1
    );
}

#[test]
fn an_edge_case_that_fails_is_shrunk_like_a_drawn_one() {
    let edge_cases = GivenCases::Lots { most: 20, seed: 3 };
    let options = SweepOptions { edge_cases, ..options(0, 3, CheckOptions::of_kernels(0)) };
    let (collected, ..) = support::pool(2).install(|| sweep_made_up(&["y"], &options));
    assert_eq!(shrunk(&collected), [("forward", "y")]);
    let first = collected.records.iter().position(|record| record.verdict() != Verdict::Pass);
    let [edge, small, ..] = &collected.records[first.expect("a failure")..] else {
        panic!("nothing follows the failing case")
    };
    assert_eq!((edge.origin, small.origin), (Origin::Drawn, Origin::Shrunk));
    assert_eq!((&small.case["num_rows"], &small.case["width"]), (&1.into(), &1.into()));
}

#[test]
fn shrinking_runs_no_case_twice_and_ends_where_nothing_smaller_fails() {
    let options = drawn_alone(1, 3);
    let (collected, _, (ran, time)) = support::pool(2).install(|| sweep_made_up(&["y"], &options));
    let small = collected.records.last().expect("a record");
    assert_eq!(
        (&small.case["num_rows"], &small.case["width"]),
        (&1.into(), &1.into()),
        "{}",
        small.case
    );
    assert!(time < Duration::from_secs(5), "it ended with its time: {time:?}");
    // The shrunk case is checked once more, like any other.
    let (last, tried) = ran.split_last().expect("cases ran");
    assert_eq!(serde_json::to_value(last).unwrap(), small.case);
    assert_eq!(tried.iter().collect::<HashSet<_>>().len(), tried.len());
}

#[test]
fn drawn_cases_beyond_the_time_budget_are_counted_and_corners_run_all_the_same() {
    let edge_cases = GivenCases::Lots { most: 5, seed: 3 };
    let options = options(12, 3, CheckOptions::of_kernels(0));
    let options = SweepOptions { time_budget: Some(Duration::ZERO), edge_cases, ..options };
    let (collected, mut skips, _) = sweep_made_up(&[], &options);
    assert_eq!((collected.planned, collected.records.len()), (5 + 12, 5));
    skips.retain(|skip| !skip.what.starts_with("edge cases"));
    let [skip] = skips.as_slice() else { panic!("{skips:?}") };
    assert_eq!((skip.what.as_str(), skip.count), ("drawn cases of rms_norm", 12));
}

#[test]
fn a_sweep_on_the_emulator_checks_each_law_in_a_third_of_its_cases_and_counts_the_others() {
    let rms_norm = registry::find("rms_norm").unwrap();
    let case = &rms_norm.typical_cases()[0];
    let runner = support::device();
    let laws = |number: Option<u64>| -> (BTreeSet<String>, u64) {
        let all = CheckOptions { power: false, ..CheckOptions::of_kernels(0) };
        let options =
            number.map_or(all, |number| CheckOptions { laws: Laws::InTurn(number), ..all });
        let outcome = checks::run(&*rms_norm.prepare(case).unwrap(), runner, options);
        let laws = outcome.checks.iter().filter(|check| check.check.is_law());
        let skipped = outcome.skips.iter().filter(|skip| skip.what == "laws");
        let skipped = skipped.map(|skip| skip.count).sum();
        (laws.map(|check| check.check.as_str().to_owned()).collect(), skipped)
    };
    let (all, none) = laws(None);
    assert!(all.len() > 2 && none == 0, "{all:?} {none}");
    let turns: Vec<_> = (7..10).map(|number| laws(Some(number))).collect();
    for (some, skipped) in &turns {
        assert!(some.len() < all.len() && some.len() + *skipped as usize >= all.len());
    }
    let together: BTreeSet<String> = turns.into_iter().flat_map(|(some, _)| some).collect();
    assert_eq!(together, all);
}

// ---------------------------------------------------------------- the checks

const ROWS: usize = 8;
const WIDTH: usize = 16;
/// Relative deviation of the test oracle's working runs: the rounding error of bf16.
const SPREAD: f64 = 1.0 / 512.0;

type Kernel = Box<dyn Fn(Contract) -> Result<KernelRun, RuntimeError> + Sync>;
type MakeLaws = Box<dyn Fn() -> Vec<Law> + Sync>;

/// An operator that exists for one test. One output `y`, f32 `[ROWS, WIDTH]`.
struct Fake {
    exact: Vec<f64>,
    spread: f64,
    kernel: Kernel,
    laws: MakeLaws,
    empty_probe: bool,
}

impl PreparedCase for Fake {
    fn operator(&self) -> &'static str {
        "fake"
    }

    fn oracle(&self, precision: Precision) -> Result<Vec<OracleTensor>, CaseError> {
        let values = match precision {
            Precision::Exact => self.exact.clone(),
            Precision::Working { seed } | Precision::Nearest { seed } => {
                let mut draw = Draw::new(seed, "working");
                self.exact.iter().map(|value| value * (1.0 + self.spread * draw.normal())).collect()
            }
        };
        Ok(vec![OracleTensor { name: "y", side: Side::Forward, shape: vec![ROWS, WIDTH], values }])
    }

    fn kernel(&self, _device: &Device, contract: Contract) -> Result<KernelRun, RuntimeError> {
        (self.kernel)(contract)
    }

    fn laws(&self) -> Vec<Law> {
        (self.laws)()
    }

    fn gradient_probe(&self) -> Option<Box<dyn GradientProbe + '_>> {
        self.empty_probe.then(|| Box::new(EmptyProbe) as Box<dyn GradientProbe>)
    }
}

/// A probe of `y = x[0]`, whose second input has no effect and no curvature.
struct EffectlessProbe;

impl GradientProbe for EffectlessProbe {
    fn inputs(&self) -> Vec<(&'static str, Vec<f64>)> {
        vec![("x", vec![1.0, 2.0])]
    }

    fn scales(&self) -> Vec<Option<Vec<f64>>> {
        vec![Some(vec![1.0, f64::INFINITY])]
    }

    fn outputs(&self, inputs: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CaseError> {
        Ok(vec![vec![inputs[0][0]]])
    }

    fn autograd(&self, upstream: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CaseError> {
        Ok(vec![vec![upstream[0][0], 0.0]])
    }

    fn backward(&self, upstream: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CaseError> {
        self.autograd(upstream)
    }
}

#[test]
fn a_gradient_along_what_has_no_effect_agrees_over_whatever_distance_it_bends() {
    let findings = triangulate(&EffectlessProbe).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(findings.len(), 3);
    for finding in findings {
        assert_eq!(finding.problem, None, "{}", finding.input);
    }
}

/// A probe whose gradients have no elements.
struct EmptyProbe;

impl GradientProbe for EmptyProbe {
    fn inputs(&self) -> Vec<(&'static str, Vec<f64>)> {
        vec![("x", vec![1.0])]
    }

    fn outputs(&self, _inputs: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CaseError> {
        Ok(vec![vec![]])
    }

    fn autograd(&self, _upstream: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CaseError> {
        Ok(vec![vec![]])
    }

    fn backward(&self, _upstream: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CaseError> {
        Ok(vec![vec![]])
    }
}

fn exact() -> Vec<f64> {
    let mut draw = Draw::new(1, "exact");
    (0..ROWS * WIDTH).map(|_| draw.normal()).collect()
}

fn output(values: &[f64]) -> KernelRun {
    let tensor = HostTensor::from_f64(DType::F32, &[ROWS, WIDTH], values);
    KernelRun { tensors: vec![KernelTensor::new("y", tensor)], violations: vec![], paths: vec![] }
}

/// A fake whose kernel returns these values.
fn fake(values: Vec<f64>) -> Fake {
    fake_with(move |_| Ok(output(&values)))
}

fn fake_with(
    kernel: impl Fn(Contract) -> Result<KernelRun, RuntimeError> + Sync + 'static,
) -> Fake {
    Fake {
        exact: exact(),
        spread: SPREAD,
        kernel: Box::new(kernel),
        laws: Box::new(Vec::new),
        empty_probe: false,
    }
}

fn check(fake: &Fake) -> Outcome {
    checks::run(
        fake,
        support::device(),
        CheckOptions { power: false, ..CheckOptions::everything(0) },
    )
}

/// Checks that exactly these checks did not pass.
fn assert_fails(fake: &Fake, expected: &[(&str, Verdict)]) {
    let outcome = check(fake);
    let found: Vec<_> = outcome.failures().map(|c| (c.check.as_str(), c.verdict)).collect();
    assert_eq!(found, expected, "{:#?}", outcome.failures().collect::<Vec<_>>());
    assert!(outcome.failures().all(|c| !c.message.is_empty()));
}

/// `exact()` with one element changed.
fn with_element(index: usize, value: f64) -> Vec<f64> {
    let mut values = exact();
    values[index] = value;
    values
}

fn truth(of: &dyn PreparedCase) -> Truth {
    Truth::of(of, of.arithmetic()).unwrap()
}

fn allowed() -> Budget {
    truth(&fake(exact())).budget(0, DType::F32)
}

#[test]
fn a_kernel_that_is_right_passes_every_check() {
    let outcome = check(&fake(exact()));
    assert!(outcome.passed(), "{:#?}", outcome.failures().collect::<Vec<_>>());
    let compared =
        outcome.checks.iter().find(|c| c.check == "forward").expect("a forward check").compared;
    assert_eq!(compared, (ROWS * WIDTH) as u64);
}

#[test]
fn no_check_at_all_is_no_pass() {
    assert!(!Outcome::default().passed());
}

#[test]
fn a_nan_or_infinity_of_the_kernel_fails() {
    for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let expected = ["forward", "finite", "bias", "precision", "special_values"]
            .map(|check| (check, Verdict::Fail));
        assert_fails(&fake(with_element(37, value)), &expected);
    }
    assert_fails(
        &fake(vec![f64::NAN; ROWS * WIDTH]),
        &["forward", "finite", "bias", "precision", "special_values"].map(|c| (c, Verdict::Fail)),
    );
}

#[test]
fn a_finite_value_where_the_oracle_has_none_fails() {
    for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let oracle = with_element(37, value);
        let wrong = Fake { exact: oracle.clone(), ..fake(exact()) };
        assert_fails(&wrong, &[("special_values", Verdict::Fail)]);
        let right = Fake { exact: oracle.clone(), ..fake(oracle) };
        assert!(check(&right).passed());
    }
    let negated = Fake {
        exact: with_element(37, f64::INFINITY),
        ..fake(with_element(37, f64::NEG_INFINITY))
    };
    assert_fails(&negated, &[("special_values", Verdict::Fail)]);
}

#[test]
fn anything_but_zero_fails_where_every_run_of_the_oracle_is_zero() {
    let mut zero_row = exact();
    zero_row[..WIDTH].fill(0.0);
    let right = Fake { exact: zero_row.clone(), ..fake(zero_row.clone()) };
    assert!(check(&right).passed());
    let mut smallest = zero_row.clone();
    smallest[3] = f64::from(f32::from_bits(1));
    let wrong = Fake { exact: zero_row, ..fake(smallest) };
    assert_fails(&wrong, &[("forward", Verdict::Fail), ("special_values", Verdict::Fail)]);
}

#[test]
fn one_element_beyond_its_budget_fails_and_one_within_does_not() {
    let allowed = allowed().allowed;
    // The kernel's f32 adds at most half an ulp, which is part of the budget.
    let moved = |share: f64| fake(with_element(37, exact()[37] + share * allowed[37]));
    assert!(check(&moved(0.9)).passed());
    assert_fails(&moved(1.1), &[("forward", Verdict::Fail)]);
}

#[test]
fn many_elements_within_their_budgets_fail_when_together_they_are_too_far_off() {
    let budget = allowed();
    let off = |share: f64| -> Vec<f64> {
        let moved = |(i, (value, allowed)): (usize, (&f64, &f64))| {
            // In both directions, so that no bias results.
            value
                + if (i + i / WIDTH).is_multiple_of(2) { share * allowed } else { -share * allowed }
                    * value.signum()
        };
        exact().iter().zip(&budget.allowed).enumerate().map(moved).collect()
    };
    assert_fails(&fake(off(0.9)), &[("precision", Verdict::Fail)]);
    // The distance of one more working run passes.
    let sigma = 1.0 / budget.multiple;
    assert!(check(&fake(off(sigma))).passed());
}

#[test]
fn a_uniform_relative_error_within_every_budget_is_a_bias() {
    // Each element is off by a fifth of the scatter of the runs, all in one direction.
    let biased =
        |sign: f64| fake(exact().iter().map(|value| value * (1.0 + sign * SPREAD)).collect());
    for sign in [-1.0, 1.0] {
        assert_fails(&biased(sign), &[("bias", Verdict::Fail)]);
        assert!(check(&biased(0.05 * sign)).passed());
    }
}

#[test]
fn a_tensor_that_an_error_of_a_tenth_would_pass_counts_as_no_agreement() {
    let powerless = check(&Fake { spread: 1.0, ..fake(exact()) });
    assert!(powerless.passed() && !powerless.checks.iter().any(|check| check.check == "forward"));
    assert!(
        powerless.skips.iter().any(|skip| skip.what == "agreement of y" && skip.why == POWERLESS)
    );
    // An error beyond even such a budget still fails.
    let far = Fake { spread: 1.0, ..fake(with_element(37, 1e6)) };
    assert!(check(&far).failures().any(|check| check.check == "forward"));
}

#[test]
fn a_kernel_that_does_not_say_where_it_rounds_is_held_to_its_elements_and_to_a_wider_energy() {
    struct Undeclared(Fake);
    impl PreparedCase for Undeclared {
        fn operator(&self) -> &'static str {
            "fake"
        }
        fn oracle(&self, precision: Precision) -> Result<Vec<OracleTensor>, CaseError> {
            self.0.oracle(precision)
        }
        fn kernel(&self, device: &Device, contract: Contract) -> Result<KernelRun, RuntimeError> {
            self.0.kernel(device, contract)
        }
        fn arithmetic(&self) -> Arithmetic {
            Arithmetic::default()
        }
    }
    let check = |values: Vec<f64>| {
        let options = CheckOptions { power: false, ..CheckOptions::everything(0) };
        checks::run(&Undeclared(fake(values)), support::device(), options)
    };
    let biased = check(exact().iter().map(|value| value * (1.0 + SPREAD)).collect());
    assert!(biased.passed() && biased.skips.iter().any(|skip| skip.what == "bias"));
    let noisy = check(exact().iter().map(|value| value * (1.0 + 4.0 * SPREAD)).collect());
    assert!(noisy.failures().any(|check| check.check == "precision"));
}

#[test]
fn elements_that_were_never_written_are_noticed() {
    let poisoned = |contract: Contract| {
        let mut run = output(&exact());
        run.tensors[0].tensor.bytes[4 * 37..4 * 38].fill(contract.poison);
        Ok(run)
    };
    let outcome = check(&fake_with(poisoned));
    let unwritten = outcome.failures().find(|c| c.check == "fully_written").expect("noticed");
    assert!(
        unwritten.message.contains("1 of 128") && unwritten.message.contains("[2, 5]"),
        "{}",
        unwritten.message
    );
    assert!(outcome.failures().any(|c| c.check == "poison_independent"));
}

#[test]
fn an_output_that_depends_on_what_was_in_memory_is_noticed() {
    let leaking = |contract: Contract| {
        let nudge = if contract == Contract::HUGE { f64::from(f32::EPSILON) } else { 0.0 };
        Ok(output(&with_element(37, exact()[37] * (1.0 + nudge))))
    };
    assert_fails(&fake_with(leaking), &[("poison_independent", Verdict::Fail)]);
}

#[test]
fn a_second_run_with_one_other_bit_is_noticed_unless_the_sum_is_atomic() {
    let varying = |deterministic: bool, step: f64| {
        let runs = AtomicU32::new(0);
        fake_with(move |_| {
            let nudge = if runs.fetch_add(1, Ordering::Relaxed) == 1 { step } else { 0.0 };
            let mut run = output(&with_element(37, exact()[37] + nudge));
            run.tensors[0].deterministic = deterministic;
            Ok(run)
        })
    };
    let bit = exact()[37].abs() * f64::from(f32::EPSILON);
    assert_fails(&varying(true, bit), &[("repeatable", Verdict::Fail)]);
    assert!(check(&varying(false, bit)).passed());
    assert_fails(&varying(false, 2.0 * allowed().allowed[37]), &[("repeatable", Verdict::Fail)]);
}

#[test]
fn forbidden_writes_are_noticed() {
    for (kind, expected) in [
        (ViolationKind::Guard, "guards"),
        (ViolationKind::Gap, "guards"),
        (ViolationKind::Input, "inputs_unchanged"),
    ] {
        let violation = Violation { buffer: "weight".into(), kind, bytes: 3, first_offset: -5 };
        let writing =
            move |_| Ok(KernelRun { violations: vec![violation.clone()], ..output(&exact()) });
        let outcome = check(&fake_with(writing));
        let failed: Vec<_> = outcome.failures().collect();
        // Every run of the case has it, and it is one overwrite.
        assert!(
            matches!(failed[..], [one] if one.check == expected && one.tensor == "weight"),
            "{failed:#?}"
        );
        assert!(failed[0].message.contains("-5"));
    }
}

#[test]
fn a_missing_tensor_or_one_of_another_shape_is_an_error() {
    let missing = |_| Ok(KernelRun { tensors: vec![], ..output(&exact()) });
    assert_fails(&fake_with(missing), &[("forward", Verdict::Error)]);
    let other = |_| {
        let mut run = output(&exact());
        run.tensors[0].tensor.shape = vec![WIDTH, ROWS];
        Ok(run)
    };
    assert_fails(&fake_with(other), &[("forward", Verdict::Error)]);
}

#[test]
fn a_fault_is_a_failure_and_a_refusal_an_error() {
    let fault = |_| {
        let (kernel, block, thread) = ("k".into(), "(0, 0, 0)".into(), "(1, 0, 0)".into());
        Err(RuntimeError::Fault { kernel, block, thread, what: "divergence".into() })
    };
    assert_fails(&fake_with(fault), &[("launch", Verdict::Fail)]);
    assert_fails(
        &fake_with(|_| Err(RuntimeError::argument("fake", "x", "5 is odd"))),
        &[("launch", Verdict::Error)],
    );
    let endless =
        check(&fake_with(|_| Err(RuntimeError::argument("fake", "x", "odd ".repeat(1 << 18)))));
    let said = &endless.failures().next().expect("a refusal").message;
    assert!(
        said.chars().count() < 2100 && said.ends_with(" more characters"),
        "{} characters",
        said.len()
    );
}

#[test]
fn a_comparison_of_no_element_is_an_error() {
    let fake = Fake { empty_probe: true, ..fake(exact()) };
    let outcome = check(&fake);
    let empty: Vec<_> = outcome.checks.iter().filter(|c| c.check == "oracle_gradients").collect();
    assert_eq!(empty.len(), 3);
    assert!(
        empty.iter().all(|c| c.verdict == Verdict::Error && c.message == "compared no element"),
        "{empty:#?}"
    );
}

/// A fake with one law, whose variant's kernel returns these values.
fn with_law(variant: Vec<f64>, relation: fn() -> Relation) -> Fake {
    let laws = move || {
        let variant = Box::new(fake(variant.clone()));
        vec![Law { name: "made up", variant, relations: vec![("y", relation())], left_out: None }]
    };
    Fake { laws: Box::new(laws), ..fake(exact()) }
}

fn reversed_rows() -> Vec<f64> {
    exact().chunks(WIDTH).rev().flatten().copied().collect()
}

#[test]
fn a_law_that_holds_passes_and_one_that_is_broken_by_a_bit_fails() {
    let doubled: Vec<f64> = exact().iter().map(|v| 2.0 * v).collect();
    let times = || Relation::Times(2.0);
    let permuted = || Relation::PermutedRows((0..ROWS).rev().collect());
    let halves =
        || Relation::MadeOf(Rc::new(|variant| variant.to_f64().iter().map(|v| v / 2.0).collect()));
    let first_rows = || Relation::EqualRows(Rc::new(|row| row < 4));
    let nudge = |values: &[f64], index: usize| {
        let mut values = values.to_vec();
        values[index] *= 1.0 + f64::from(f32::EPSILON);
        values
    };
    let broken = [("law: made up", Verdict::Fail)];
    type MakeRelation = fn() -> Relation;
    let cases: [(Vec<f64>, MakeRelation); 4] = [
        (doubled.clone(), times),
        (reversed_rows(), permuted),
        (exact(), first_rows),
        (doubled, halves),
    ];
    for (right, relation) in cases {
        let outcome = check(&with_law(right.clone(), relation));
        assert!(outcome.passed(), "{:#?}", outcome.failures().collect::<Vec<_>>());
        assert!(outcome.checks.iter().any(|c| c.check == "law: made up" && c.compared > 0));
        assert_fails(&with_law(nudge(&right, 37), relation), &broken);
    }
    // Rows that the relation does not cover may differ.
    assert!(check(&with_law(nudge(&exact(), 5 * WIDTH), first_rows)).passed());
    assert_fails(&with_law(exact(), permuted), &broken);
    assert_fails(&with_law(with_element(37, f64::NAN), halves), &broken);
}

#[test]
fn a_law_up_to_rounding_allows_the_budgets_of_both_runs_and_no_more() {
    let allowed = allowed().allowed;
    let moved = |share: f64| with_element(37, exact()[37] + share * allowed[37]);
    assert!(check(&with_law(moved(1.9), || Relation::WithinBudget)).passed());
    assert_fails(
        &with_law(moved(2.1), || Relation::WithinBudget),
        &[("law: made up", Verdict::Fail)],
    );
    assert_fails(
        &with_law(with_element(37, f64::NAN), || Relation::WithinBudget),
        &[("law: made up", Verdict::Fail)],
    );
}

#[test]
fn a_law_about_a_tensor_that_the_kernel_does_not_return_is_an_error() {
    let laws = || {
        vec![Law {
            name: "made up",
            variant: Box::new(fake(exact())),
            relations: vec![("z", Relation::Times(1.0))],
            left_out: None,
        }]
    };
    assert_fails(
        &Fake { laws: Box::new(laws), ..fake(exact()) },
        &[("law: made up", Verdict::Error)],
    );
}

// ---------------------------------------------------------------- other comparisons

/// Candidates of the test selection, and how many of them are selected.
const CANDIDATES: usize = 12;
const SELECTED: usize = 4;

/// An operator whose oracle returns these tensors; in working precision those of `noisy` differ.
struct Declared {
    exact: Vec<OracleTensor>,
    noisy: fn(&mut OracleTensor, &mut Draw),
    found: Vec<KernelTensor>,
}

impl PreparedCase for Declared {
    fn operator(&self) -> &'static str {
        "declared"
    }

    fn oracle(&self, precision: Precision) -> Result<Vec<OracleTensor>, CaseError> {
        let mut tensors = self.exact.clone();
        if let Precision::Working { seed } | Precision::Nearest { seed } = precision {
            let mut draw = Draw::new(seed, "working");
            tensors.iter_mut().for_each(|tensor| (self.noisy)(tensor, &mut draw));
        }
        Ok(tensors)
    }

    fn kernel(&self, _device: &Device, _contract: Contract) -> Result<KernelRun, RuntimeError> {
        Ok(KernelRun { tensors: self.found.clone(), violations: vec![], paths: vec![] })
    }
}

fn of_oracle(name: &'static str, shape: &[usize], values: &[f64]) -> OracleTensor {
    OracleTensor { name, side: Side::Forward, shape: shape.to_vec(), values: values.to_vec() }
}

/// The checks of a tensor that did not pass, with their messages.
fn failures_of(operator: &Declared, tensor: &str) -> Vec<(String, Verdict, String)> {
    let outcome = checks::run(operator, support::device(), CheckOptions::of_kernels(0));
    assert!(outcome.checks.iter().any(|c| c.check == "launch" && c.verdict == Verdict::Pass));
    let failures = outcome.failures().filter(|c| c.tensor == tensor);
    failures.map(|c| (c.check.to_string(), c.verdict, c.message.clone())).collect()
}

/// Counts that differ between runs of the oracle.
fn counts(comparison: Comparison, values: &[f64], dtype: DType) -> Declared {
    let tensor = HostTensor::from_f64(dtype, &[2, 4], values);
    Declared {
        exact: vec![of_oracle("counts", &[2, 4], &[5.0, 9.0, 12.0, 7.0, 40.0, 3.0, 8.0, 6.0])],
        noisy: |tensor, draw| {
            tensor.values.iter_mut().for_each(|v| *v += (2.0 * draw.normal()).round())
        },
        found: vec![KernelTensor { comparison, ..KernelTensor::new("counts", tensor) }],
    }
}

#[test]
fn an_exact_tensor_is_equal_or_wrong_however_much_the_oracles_runs_differ() {
    let right = [5.0, 9.0, 12.0, 7.0, 40.0, 3.0, 8.0, 6.0];
    let mut wrong = right;
    wrong[6] = 9.0;
    for dtype in [DType::I32, DType::I64, DType::U8, DType::F32] {
        assert_eq!(failures_of(&counts(Comparison::Exact, &right, dtype), "counts"), []);
        let failures = failures_of(&counts(Comparison::Exact, &wrong, dtype), "counts");
        let [(check, Verdict::Fail, message)] = failures.as_slice() else { panic!("{failures:?}") };
        assert_eq!(check, "forward");
        assert!(
            message.contains("1 of 8") && message.contains("[1, 2]: kernel 9, oracle 8"),
            "{message}"
        );
    }
    // As a rounded tensor the same error would pass as rounding.
    assert!(
        !failures_of(&counts(Comparison::Rounded, &wrong, DType::I32), "counts")
            .iter()
            .any(|f| f.0 == "forward")
    );
}

#[test]
fn an_integer_that_f64_cannot_tell_from_the_oracles_is_wrong() {
    let large = (1i64 << 53) + 1;
    let tensor =
        HostTensor { dtype: DType::I64, shape: vec![1], bytes: large.to_ne_bytes().into() };
    let operator = Declared {
        exact: vec![of_oracle("id", &[1], &[large as f64])],
        noisy: |_, _| {},
        found: vec![KernelTensor {
            comparison: Comparison::Exact,
            ..KernelTensor::new("id", tensor)
        }],
    };
    assert_eq!(failures_of(&operator, "id").len(), 1);
}

/// Descending scores; candidates 3 and 4 are a thousandth apart, and the last three of row 1 are
/// masked.
fn candidate_scores() -> Vec<f64> {
    let row = |masked: usize| {
        (0..CANDIDATES).map(move |i| match i {
            4 => 6.999,
            i if i >= CANDIDATES - masked => f64::NEG_INFINITY,
            i => 10.0 - i as f64,
        })
    };
    row(0).chain(row(CANDIDATES - 2)).collect()
}

/// The selection of two rows; the oracle's is `[0, 1, 2, 3]` and `[0, 1, -1, -1]`. Scores are
/// returned only on request.
fn selection(chosen: [[i32; SELECTED]; 2], scores: &'static str) -> Declared {
    let tensor = HostTensor::from_i32(&[2, SELECTED], chosen.as_flattened());
    Declared {
        exact: vec![
            of_oracle("indices", &[2, SELECTED], &[0.0, 1.0, 2.0, 3.0, 0.0, 1.0, -1.0, -1.0]),
            of_oracle("scores", &[2, CANDIDATES], &candidate_scores()),
        ],
        // Scores that are off by one or two thousandths; and runs that select completely different
        // candidates.
        noisy: |tensor, draw| match tensor.name {
            "scores" => tensor.values.iter_mut().for_each(|v| *v += 2e-4 * draw.normal()),
            _ => tensor.values.iter_mut().for_each(|v| *v += 1.0),
        },
        found: vec![KernelTensor {
            comparison: Comparison::Selection { scores },
            ..KernelTensor::new("indices", tensor)
        }],
    }
}

const PADDED: [i32; SELECTED] = [0, 1, -1, -1];

#[test]
fn a_selection_may_differ_where_scores_are_within_their_budgets_and_nowhere_else() {
    let right = [[0, 1, 2, 3], [3, 2, 1, 0], [0, 1, 2, 4], [4, 0, 2, 1]];
    for row in right {
        assert_eq!(failures_of(&selection([row, PADDED], "scores"), "indices"), [], "{row:?}");
    }
    let wrong = [
        ([[0, 1, 2, 5], PADDED], "5 was selected"),
        // Candidate 4 is close enough to 3, which is present, and not to 0, which it replaces.
        ([[4, 1, 2, 3], PADDED], "and 0 was not"),
        ([[0, 1, 2, 2], PADDED], "twice"),
        ([[0, 1, 2, CANDIDATES as i32], PADDED], "12 candidates"),
        ([[0, 1, 2, -2], PADDED], "holds -2"),
        ([[0, 1, 2, -1], PADDED], "holds -1"),
        ([[0, 1, 2, 3], [0, 1, 2, -1]], "row 1: place 2 holds 2"),
        ([[0, 1, 2, 3], [0, -1, 1, -1]], "row 1: place 1 holds -1"),
        ([[0, 1, 2, 3], [0, 9, -1, -1]], "9 was selected"),
    ];
    for (chosen, expected) in wrong {
        let failures = failures_of(&selection(chosen, "scores"), "indices");
        let [(check, Verdict::Fail, message)] = failures.as_slice() else {
            panic!("{chosen:?}: {failures:?}")
        };
        assert!(check == "forward" && message.contains(expected), "{message}");
    }
}

#[test]
fn a_tensor_of_the_oracle_alone_is_legal_only_where_a_comparison_consults_it() {
    let right = || [[0, 1, 2, 3], PADDED];
    assert_eq!(failures_of(&selection(right(), "scores"), "scores"), []);
    let mut exact = selection(right(), "scores");
    exact.found[0].comparison = Comparison::Exact;
    assert_eq!(failures_of(&exact, "scores").len(), 1);
    let failures = failures_of(&selection(right(), "logits"), "indices");
    assert!(
        matches!(failures.as_slice(), [(_, Verdict::Error, message)] if message.contains("`logits`"))
    );
    let mut floats = selection(right(), "scores");
    floats.found[0].tensor = HostTensor::from_f64(DType::F32, &[2, SELECTED], &[0.0; 2 * SELECTED]);
    assert!(matches!(failures_of(&floats, "indices").as_slice(), [(_, Verdict::Error, _)]));
}

/// Dequantized e2m1 codes with a scale for each four neighbours: the oracle's values are between
/// those of the format.
fn dequantized(shares: [f64; 8]) -> Declared {
    let exact = [0.2, 0.9, 2.6, 5.1, 1.6, 7.2, 20.8, 40.8];
    let half_steps = [0.25, 0.25, 0.5, 1.0, 2.0, 2.0, 4.0, 8.0];
    let values: Vec<f64> = (0..8).map(|i| exact[i] + shares[i] * half_steps[i]).collect();
    let tensor = HostTensor::from_f64(DType::F32, &[1, 8], &values);
    let grid = Grid::Scaled { format: Format::E2M1, block: [1, 4], scales: "scales" };
    Declared {
        exact: vec![of_oracle("x", &[1, 8], &exact), of_oracle("scales", &[1, 2], &[1.0, 8.0])],
        noisy: |_, _| {},
        found: vec![KernelTensor { grid: Some(grid), ..KernelTensor::new("x", tensor) }],
    }
}

#[test]
fn dequantized_codes_may_be_off_by_half_a_step_of_their_blocks_scale() {
    let forward = |shares| failures_of(&dequantized(shares), "x").iter().any(|f| f.0 == "forward");
    assert!(!forward([0.99; 8]) && !forward([-0.99; 8]));
    for i in 0..8 {
        let mut shares = [0.0; 8];
        shares[i] = 1.01;
        assert!(forward(shares), "{i}");
    }
    // Without the scale, the second block would have steps eight times too fine.
    let mut unscaled = dequantized([0.0, 0.0, 0.0, 0.0, 0.99, 0.0, 0.0, 0.0]);
    assert!(!failures_of(&unscaled, "x").iter().any(|f| f.0 == "forward"));
    unscaled.found[0].grid = Some(Grid::Float(Format::E2M1));
    assert!(failures_of(&unscaled, "x").iter().any(|f| f.0 == "forward"));
}

/// An oracle that multiplies two matrices, and counts the computed products after each run.
struct Multiplied {
    products: AtomicU32,
}

impl Multiplied {
    fn run(mut rounding: Rounding) -> Result<Vec<OracleTensor>, CaseError> {
        let operand = |name: &str, shape: [usize; 2]| {
            let mut draw = Draw::new(3, name);
            let values: Vec<f64> = (0..shape[0] * shape[1]).map(|_| draw.normal()).collect();
            candle_core::Tensor::from_vec(values, &shape, &candle_core::Device::Cpu)
                .expect("an operand")
        };
        let product =
            rounding.matmul_f32(&operand("a", [4, 32]), &operand("b", [32, 8])).expect("a product");
        let values = product.flatten_all().and_then(|flat| flat.to_vec1()).expect("elements");
        Ok(vec![of_oracle("y", &[4, 8], &values)])
    }
}

impl PreparedCase for Multiplied {
    fn operator(&self) -> &'static str {
        "multiplied"
    }

    fn oracle(&self, precision: Precision) -> Result<Vec<OracleTensor>, CaseError> {
        Self::run(Rounding::new(precision))
    }

    fn oracle_sharing(
        &self,
        precision: Precision,
        products: &Products,
    ) -> Result<Vec<OracleTensor>, CaseError> {
        let tensors = Self::run(Rounding::sharing(precision, products));
        self.products.fetch_max(products.multiplied() as u32, Ordering::Relaxed);
        tensors
    }

    fn kernel(&self, _device: &Device, _contract: Contract) -> Result<KernelRun, RuntimeError> {
        Err(RuntimeError::argument("multiplied", "y", "there is no kernel"))
    }
}

#[test]
fn the_oracles_runs_share_the_products_of_inputs_and_the_budget_is_the_same_bit_for_bit() {
    let operator = Multiplied { products: AtomicU32::new(0) };
    let shared = truth(&operator);
    assert_eq!(operator.products.load(Ordering::Relaxed), 1, "one product for all runs");
    assert_eq!(shared.exact[0].values, operator.oracle(Precision::Exact).unwrap()[0].values);
    for (precision, run) in working_precisions().zip(&shared.working) {
        assert_eq!(run[0].values, operator.oracle(precision).unwrap()[0].values, "{precision:?}");
        assert_ne!(run[0].values, shared.exact[0].values);
    }
}
