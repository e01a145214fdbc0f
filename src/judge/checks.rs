//! Every check of a case: runs the oracle and the kernels, compares, and reports what it found.

use std::cell::OnceCell;
use std::sync::Arc;
use std::time::Instant;

use dsv4_runtime::arena::ViolationKind;
use dsv4_runtime::{Contract, DType, HostTensor};

use crate::judge::agreement;
use crate::judge::budget::Budget;
use crate::judge::failing;
use crate::judge::runner::{RunError, Runner};
use crate::judge::selection::{self, Scores};
use crate::judge::triangulation;
use crate::judge::truth::{Held, Truth};
use crate::operator::tensors::permuted_along;
use crate::operator::{
    Comparison, KernelRun, KernelTensor, Law, OracleTensor, PreparedCase, Relation, Repeat,
    RoundingPoints, Sequence, Side, rows_of,
};
use crate::record::{
    CheckRecord, FailingElements, Metrics, Skip, Verdict, WholeTensor, agreement_of, figures, words,
};

/// What a sweep requires of each case in addition to the checks that always run.
#[derive(Clone, Copy, Debug)]
pub struct CheckOptions {
    /// Random schedules to run each case under, after the deterministic one (emulator only). Their
    /// seeds are 1 to this number. [`crate::operator::Profile::schedules`] is what a sweep uses.
    pub schedules: u32,
    /// Whether calls in sequence are checked. They launch everything three times, so a sweep on the
    /// emulator checks every third case ([`crate::sweep::run_planned`]).
    pub sequence: bool,
    /// Whether verdicts report what they could have seen ([`crate::judge::power`]). Whether a
    /// verdict has power at all is always checked.
    pub power: bool,
    /// Whether to triangulate the oracle's gradients. It concerns only the oracle, so once per case
    /// is enough, and a kernel's mutants never need it.
    pub triangulate: bool,
}

impl CheckOptions {
    /// Everything.
    pub const fn everything(schedules: u32) -> Self {
        Self { schedules, sequence: true, power: true, triangulate: true }
    }

    /// Everything that shows whether kernels are right; the oracle is not checked.
    pub const fn of_kernels(schedules: u32) -> Self {
        Self { power: false, triangulate: false, ..Self::everything(schedules) }
    }
}

/// Everything that was learnt about one case.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// One entry for each check and tensor.
    pub checks: Vec<CheckRecord>,
    /// What could not be checked, and why.
    pub skips: Vec<Skip>,
    /// Kernel paths that ran.
    pub paths: Vec<String>,
    /// Why these kernels cannot be run here at all, if they cannot.
    pub untestable: Option<String>,
    /// Why these kernels do not support such a case, as their runner reports, if so.
    pub unsupported: Option<String>,
    /// Seconds in kernels.
    pub kernel_seconds: f64,
    /// Seconds in the oracle.
    pub oracle_seconds: f64,
}

impl Outcome {
    /// Checks that did not pass.
    pub fn failures(&self) -> impl Iterator<Item = &CheckRecord> {
        self.checks.iter().filter(|check| check.verdict != Verdict::Pass)
    }

    /// Whether every check passed, and there was at least one.
    pub fn passed(&self) -> bool {
        !self.checks.is_empty() && self.failures().next().is_none()
    }

    /// Records a launch that failed.
    fn failed(&mut self, check: &str, error: RunError) {
        if error.untestable {
            self.untestable.get_or_insert(error.message.clone());
        }
        self.push(check, "", error.verdict, 0, error.message);
    }

    fn push(
        &mut self,
        check: &str,
        tensor: &str,
        verdict: Verdict,
        compared: u64,
        message: String,
    ) {
        // A pass that compared nothing shows nothing: it is an error, whatever the check found.
        let (verdict, message) = if verdict == Verdict::Pass && compared == 0 {
            (Verdict::Error, "compared no element".to_owned())
        } else {
            (verdict, message)
        };
        self.checks.push(CheckRecord {
            check: check.to_owned(),
            tensor: tensor.to_owned(),
            verdict,
            compared,
            message: words::message(message),
            metrics: None,
            failing: None,
        });
    }

    /// Records which elements the last check found wrong.
    fn name_elements(&mut self, failing: Option<FailingElements>) {
        if let Some(check) = self.checks.last_mut().filter(|check| check.verdict != Verdict::Pass) {
            check.failing = failing;
        }
    }

    fn skip(&mut self, what: impl Into<String>, why: &str, count: u64) {
        self.skips.push(Skip { what: what.into(), why: why.to_owned(), count });
    }

    /// Whether a check cannot be made of this runner's kernels; then the skip is noted.
    fn is_blind(&mut self, runner: &dyn Runner, check: &str, count: u64) -> bool {
        let why = runner.blind_to(check);
        why.inspect(|why| self.skip(check, why, count)).is_some()
    }

    /// Adds to every failure since check number `before` when it happened.
    fn name_run(&mut self, before: usize, when: &str) {
        for check in self.checks[before..].iter_mut().filter(|check| check.verdict != Verdict::Pass)
        {
            check.message = words::message(format!("{when}: {}", check.message));
        }
    }

    fn verdict(&mut self, check: &str, tensor: &str, compared: u64, problem: Option<String>) {
        let verdict = if problem.is_none() { Verdict::Pass } else { Verdict::Fail };
        self.push(check, tensor, verdict, compared, problem.unwrap_or_default());
    }
}

/// Runs every check of a case.
pub fn run(prepared: &dyn PreparedCase, runner: &dyn Runner, options: CheckOptions) -> Outcome {
    run_until(prepared, runner, options, |_| false)
}

/// Runs the checks of a case, one launch after the other, until `enough` is known.
pub fn run_until(
    prepared: &dyn PreparedCase,
    runner: &dyn Runner,
    options: CheckOptions,
    enough: impl Fn(&Outcome) -> bool,
) -> Outcome {
    let start = Instant::now();
    match Truth::of(prepared, runner.arithmetic(prepared)) {
        Ok(truth) => {
            let seconds = start.elapsed().as_secs_f64();
            let outcome = run_by(&truth, prepared, runner, options, enough);
            Outcome { oracle_seconds: seconds + outcome.oracle_seconds, ..outcome }
        }
        Err(error) => {
            let mut outcome = Outcome::default();
            outcome.push("oracle", "", Verdict::Error, 0, error.to_string());
            outcome
        }
    }
}

/// The same with known results of the oracle: `truth` is that of this very case. The oracle's runs
/// take far longer than the kernels, and one truth serves many kernels.
pub fn run_by(
    truth: &Truth,
    prepared: &dyn PreparedCase,
    runner: &dyn Runner,
    options: CheckOptions,
    enough: impl Fn(&Outcome) -> bool,
) -> Outcome {
    let mut outcome = Outcome::default();
    let start = Instant::now();
    if options.triangulate {
        triangulate(prepared, &mut outcome);
    }
    outcome.oracle_seconds = start.elapsed().as_secs_f64();
    let start = Instant::now();
    run_kernels(prepared, runner, options, truth, &enough, &mut outcome);
    outcome.kernel_seconds = start.elapsed().as_secs_f64();
    outcome
}

fn triangulate(prepared: &dyn PreparedCase, outcome: &mut Outcome) {
    let Some(probe) = prepared.gradient_probe() else { return };
    match triangulation::triangulate(&*probe) {
        Ok(findings) => {
            for finding in findings {
                outcome.verdict(
                    "oracle_gradients",
                    &finding.input,
                    finding.compared,
                    finding.problem,
                );
            }
        }
        Err(error) => outcome.push("oracle_gradients", "", Verdict::Error, 0, error.to_string()),
    }
}

fn run_kernels(
    prepared: &dyn PreparedCase,
    runner: &dyn Runner,
    options: CheckOptions,
    truth: &Truth,
    enough: &dyn Fn(&Outcome) -> bool,
    outcome: &mut Outcome,
) {
    let first = match runner.run(prepared, &truth.exact, Contract::NAN) {
        Err(error) if error.unsupported => {
            // If the kernel does not support the case, nothing else counts, including results of
            // the oracle.
            *outcome = Outcome { unsupported: Some(error.message), ..Outcome::default() };
            return;
        }
        run => run,
    };
    let Some(first) = launched(first, "launch", outcome) else { return };
    outcome.paths.clone_from(&first.paths);
    memory_checks(runner, &first, outcome);
    if truth.exact.is_empty() {
        outcome.push("oracle", "", Verdict::Error, 0, "the oracle returned no tensor".into());
    }
    known_to_the_oracle(truth, &first, outcome);
    let mut budgets = Vec::new();
    for (index, exact) in truth.exact.iter().enumerate() {
        if let Some(why) = runner.leaves_out(exact) {
            outcome.skip(format!("{} of {}", side_name(exact.side), exact.name), why, 1);
            continue;
        }
        let Some(found) = first.tensors.iter().find(|tensor| tensor.name == exact.name) else {
            // Other tensors that a comparison needs may be no outputs.
            if !first.tensors.iter().any(|tensor| tensor.consults().any(|name| name == exact.name))
            {
                let message = "the kernel returned no such tensor".into();
                outcome.push(side_name(exact.side), exact.name, Verdict::Error, 0, message);
            }
            continue;
        };
        match truth.held(index, found) {
            Ok(held) => {
                compare(truth, index, found, &first, (&held, options.power), outcome);
                budgets.push((exact, held.budget.clone()));
            }
            Err(message) => {
                outcome.push(side_name(exact.side), exact.name, Verdict::Error, 0, message)
            }
        }
    }
    saved_checks(prepared, runner, &first, options.power, outcome);
    if enough(outcome) {
        return;
    }
    repeat_checks(prepared, runner, truth, options, &first, &budgets, outcome);
    for law in prepared.laws() {
        if enough(outcome) {
            return;
        }
        law_checks(&law, runner, truth, &first, &budgets, outcome);
    }
}

/// Compares what kernels wrote with the truth, tensor by tensor. What the oracle computed in
/// addition is not required.
pub fn hold(truth: &Truth, run: &KernelRun) -> Outcome {
    let mut outcome = Outcome::default();
    known_to_the_oracle(truth, run, &mut outcome);
    for found in &run.tensors {
        let Some(index) = truth.exact.iter().position(|exact| exact.name == found.name) else {
            continue;
        };
        let exact = &truth.exact[index];
        match truth.held(index, found) {
            Ok(held) => compare(truth, index, found, run, (&held, false), &mut outcome),
            Err(message) => {
                outcome.push(side_name(exact.side), exact.name, Verdict::Error, 0, message)
            }
        }
    }
    outcome
}

fn known_to_the_oracle(truth: &Truth, run: &KernelRun, outcome: &mut Outcome) {
    for found in &run.tensors {
        if !truth.exact.iter().any(|exact| exact.name == found.name) {
            outcome.push(
                "oracle",
                found.name,
                Verdict::Error,
                0,
                "the oracle has no such tensor".into(),
            );
        }
    }
}

fn side_name(side: Side) -> &'static str {
    match side {
        Side::Forward => "forward",
        Side::Gradient => "gradient",
    }
}

/// One launch of all kernels of the case.
fn launch(
    prepared: &dyn PreparedCase,
    runner: &dyn Runner,
    truth: &Truth,
    contract: Contract,
    check: &str,
    outcome: &mut Outcome,
) -> Option<KernelRun> {
    launched(runner.run(prepared, &truth.exact, contract), check, outcome)
}

/// Records the outcome of a launch.
fn launched(
    run: Result<KernelRun, RunError>,
    check: &str,
    outcome: &mut Outcome,
) -> Option<KernelRun> {
    match run {
        Ok(run) => {
            let written = run.tensors.iter().map(|t| t.tensor.elements() as u64).sum();
            // A case of size zero rightly launches nothing and writes nothing.
            outcome.verdict(check, "", u64::max(written, 1), None);
            Some(run)
        }
        Err(error) if error.skipped && check != "launch" => {
            outcome.skip(check, &error.message, 1);
            None
        }
        Err(error) => {
            outcome.failed(check, error);
            None
        }
    }
}

fn memory_checks(runner: &dyn Runner, run: &KernelRun, outcome: &mut Outcome) {
    let buffers = run.tensors.len() as u64;
    for (check, kinds) in [
        ("guards", &[ViolationKind::Guard, ViolationKind::Gap][..]),
        ("inputs_unchanged", &[ViolationKind::Input][..]),
    ] {
        if outcome.is_blind(runner, check, 1) {
            continue;
        }
        let mut found = run.violations.iter().filter(|v| kinds.contains(&v.kind)).peekable();
        if found.peek().is_none() {
            outcome.verdict(check, "", buffers.max(1), None);
        }
        for violation in found {
            let message = format!(
                "{} byte(s) changed that nobody may write, the first at byte {} of `{}`",
                violation.bytes, violation.first_offset, violation.buffer
            );
            // The same overwrite in another run of the case is not a new one.
            let is_it = |known: &CheckRecord| {
                known.check == check
                    && known.tensor == violation.buffer
                    && known.message.ends_with(&message)
            };
            if !outcome.checks.iter().any(is_it) {
                outcome.verdict(check, &violation.buffer, buffers.max(1), Some(message));
            }
        }
    }
}

/// Compares a tensor with the oracle's in the way that the tensor declares.
fn compare(
    truth: &Truth,
    index: usize,
    found: &KernelTensor,
    run: &KernelRun,
    (held, power): (&Arc<Held>, bool),
    outcome: &mut Outcome,
) {
    let exact = &truth.exact[index];
    if found.tensor.shape != exact.shape {
        let message = format!(
            "the kernel's shape is {:?}, the oracle's {:?}",
            found.tensor.shape, exact.shape
        );
        outcome.push(side_name(exact.side), exact.name, Verdict::Error, 0, message);
        return;
    }
    if exact.values.is_empty() {
        return;
    }
    match found.comparison {
        Comparison::Rounded => agreement_checks(truth, index, found, (held, power), outcome),
        Comparison::Exact => exact_check(exact, found, &held.budget, outcome),
        Comparison::Selection { scores } => {
            selection_check(truth, exact, found, scores, run, outcome)
        }
    }
}

fn agreement_checks(
    truth: &Truth,
    index: usize,
    found: &KernelTensor,
    (held, power): (&Held, bool),
    outcome: &mut Outcome,
) {
    let exact = &truth.exact[index];
    let kernel = found.tensor.to_f64();
    let compared = exact.values.iter().filter(|value| value.is_finite()).count() as u64;
    if compared > 0 {
        // Where nothing is finite (all rows empty), the special values decide the case.
        let metrics = Metrics {
            power: if power { truth.power(index, held) } else { None },
            ..agreement::measure(&kernel, exact, &held.budget, &held.steps)
        };
        let powerless = truth.is_powerless(index, held);
        agreement_verdict(exact, &kernel, (held, powerless), metrics, compared, outcome);
    }
    special_values(exact, &kernel, &held.budget, outcome);
}

/// The check of a gradient that is computed from what the kernels saved.
pub const GRADIENT_OF_SAVED: &str = "gradient_of_saved";

/// Gradients against those that follow from the kernels' own saved outputs. The rounding of these
/// outputs then hides nothing.
fn saved_checks(
    prepared: &dyn PreparedCase,
    runner: &dyn Runner,
    run: &KernelRun,
    power: bool,
    outcome: &mut Outcome,
) {
    let arithmetic = runner.arithmetic(prepared);
    let truth = match Truth::of_saved(prepared, run, arithmetic) {
        Ok(None) => return,
        Ok(Some(truth)) => truth,
        Err(error) => {
            return outcome.push(GRADIENT_OF_SAVED, "", Verdict::Error, 0, error.to_string());
        }
    };
    if arithmetic.points == RoundingPoints::Undeclared {
        return outcome.skip(
            GRADIENT_OF_SAVED,
            "the kernel does not say where it rounds",
            truth.exact.len() as u64,
        );
    }
    for (index, exact) in truth.exact.iter().enumerate() {
        let Some(found) = run.tensors.iter().find(|tensor| tensor.name == exact.name) else {
            continue;
        };
        // A tensor of another shape has already been reported.
        if found.tensor.shape != exact.shape || exact.values.is_empty() {
            continue;
        }
        let held = match truth.held(index, found) {
            Ok(held) => held,
            Err(message) => {
                outcome.push(GRADIENT_OF_SAVED, exact.name, Verdict::Error, 0, message);
                continue;
            }
        };
        // All findings about a gradient, as one separate verdict.
        let mut of_gradient = Outcome::default();
        agreement_checks(&truth, index, found, (&held, power), &mut of_gradient);
        let problem = of_gradient.failures().map(|check| check.message.clone()).next();
        let metrics = of_gradient.checks.iter_mut().find_map(|check| check.metrics.take());
        let failing = of_gradient.checks.iter_mut().find_map(|check| check.failing.take());
        outcome.verdict(GRADIENT_OF_SAVED, exact.name, exact.values.len() as u64, problem);
        outcome.name_elements(failing);
        if let Some(record) = outcome.checks.last_mut() {
            record.metrics = metrics;
        }
    }
}

/// Equal or wrong: the differences between the oracle's runs are no tolerance.
fn exact_check(exact: &OracleTensor, found: &KernelTensor, budget: &Budget, outcome: &mut Outcome) {
    let kernel = found.tensor.to_f64();
    let unequal = selection::unequal(&found.tensor, exact);
    let problem = unequal.first().map(|&first| {
        format!(
            "{} of {} elements differ; first at {:?}: kernel {}, oracle {}",
            unequal.len(),
            kernel.len(),
            agreement::unflatten(first, &exact.shape),
            figures::field(kernel[first]),
            figures::field(exact.values[first])
        )
    });
    outcome.verdict(side_name(exact.side), exact.name, kernel.len() as u64, problem);
    outcome.name_elements(failing::elements(&unequal, &exact.shape, None));
    if let Some(record) = outcome.checks.last_mut() {
        record.metrics =
            Some(agreement::measure(&kernel, exact, budget, &found.tensor.dtype.into()));
    }
}

fn selection_check(
    truth: &Truth,
    exact: &OracleTensor,
    found: &KernelTensor,
    scores: &str,
    run: &KernelRun,
    outcome: &mut Outcome,
) {
    let problem = truth.scores(scores, run).and_then(|(of, allowed)| {
        selection::problem(&found.tensor, exact, Scores { exact: of, allowed: &allowed })
    });
    match problem {
        Ok(problem) => {
            outcome.verdict(side_name(exact.side), exact.name, exact.values.len() as u64, problem)
        }
        Err(message) => outcome.push(side_name(exact.side), exact.name, Verdict::Error, 0, message),
    }
}

/// The message for a tensor that agrees with the oracle within bounds that an error of a tenth
/// would pass, too.
pub const POWERLESS: &str = "rounding is as large as the values: an error of 10 % would pass";

fn agreement_verdict(
    exact: &OracleTensor,
    kernel: &[f64],
    (held, powerless): (&Held, bool),
    metrics: Metrics,
    compared: u64,
    outcome: &mut Outcome,
) {
    let finite = || (0..kernel.len()).filter(|&i| exact.values[i].is_finite());
    let allowed = &held.budget.allowed;
    let over: Vec<usize> = finite()
        .filter(|&i| agreement::budget_use(kernel[i], exact.values[i], allowed[i]) > 1.0)
        .collect();
    let worst = &metrics.worst;
    let problem = (!over.is_empty()).then(|| {
        format!(
            "{} of {compared} elements beyond budget; worst at {:?}: kernel {}, oracle {}, allowed error {}",
            over.len(),
            worst.index,
            figures::element(worst.kernel),
            figures::element(worst.oracle),
            figures::measure(worst.allowed, 3)
        )
    });
    if powerless && problem.is_none() {
        outcome.skip(agreement_of(exact.name), POWERLESS, 1);
    } else {
        outcome.verdict(side_name(exact.side), exact.name, compared, problem);
        outcome.name_elements(failing::elements(
            &over,
            &exact.shape,
            Some((kernel, &exact.values)),
        ));
    }
    let not_finite = finite().filter(|&i| !kernel[i].is_finite()).count();
    let problem = (not_finite > 0)
        .then(|| format!("{not_finite} of {compared} elements are no finite number"));
    let whole = whole_tensor(exact, kernel, held);
    if let (Some(record), false) = (outcome.checks.last_mut(), powerless) {
        record.metrics = Some(Metrics { whole: whole.clone(), ..metrics });
    }
    outcome.verdict("finite", exact.name, compared, problem);
    whole_verdict(exact, kernel, held, compared, outcome);
}

fn whole_tensor(exact: &OracleTensor, kernel: &[f64], held: &Held) -> Option<WholeTensor> {
    let yardstick = held.yardstick.as_ref()?;
    let numbers = yardstick.numbers(exact, kernel);
    Some(WholeTensor {
        rounding: yardstick.points,
        bias: numbers.bias,
        bias_low: yardstick.bias[0],
        bias_high: yardstick.bias[1],
        energy: numbers.energy,
        energy_allowed: yardstick.energy,
        equal: numbers.equal,
        equal_required: yardstick.equal.max(0.0),
    })
}

/// The tensor as a whole: its bias, where the kernel declares how it rounds, and its precision.
fn whole_verdict(
    exact: &OracleTensor,
    kernel: &[f64],
    held: &Held,
    compared: u64,
    outcome: &mut Outcome,
) {
    let Some(yardstick) = &held.yardstick else { return };
    let [bias, precision] = yardstick.problems(yardstick.numbers(exact, kernel));
    if yardstick.points == RoundingPoints::Undeclared {
        outcome.skip("bias", "the kernel does not say where it rounds", 1);
    } else {
        outcome.verdict("bias", exact.name, compared, bias);
    }
    outcome.verdict("precision", exact.name, compared, precision);
}

/// NaN, infinities and structural zeros are exactly where the oracle has them, and nowhere else.
fn special_values(exact: &OracleTensor, kernel: &[f64], budget: &Budget, outcome: &mut Outcome) {
    let class = |value: f64| (value.is_nan(), value == f64::INFINITY, value == f64::NEG_INFINITY);
    let structural_zero = |i: usize| exact.values[i] == 0.0 && budget.allowed[i] == 0.0;
    let differs = |i: &usize| {
        class(kernel[*i]) != class(exact.values[*i]) || structural_zero(*i) && kernel[*i] != 0.0
    };
    let special =
        (0..kernel.len()).filter(|&i| !exact.values[i].is_finite() || structural_zero(i)).count();
    let wrong: Vec<usize> = (0..kernel.len()).filter(differs).collect();
    let problem = wrong.first().map(|&first| {
        format!(
            "{} element(s) differ in kind; first at {:?}: kernel {}, oracle {} ({special} special values in the oracle)",
            wrong.len(),
            agreement::unflatten(first, &exact.shape),
            figures::element(kernel[first]),
            figures::element(exact.values[first])
        )
    });
    outcome.verdict("special_values", exact.name, kernel.len() as u64, problem);
    outcome.name_elements(failing::elements(&wrong, &exact.shape, None));
}

/// Runs again: the same way, under another poison, after other data, under random schedules.
fn repeat_checks(
    prepared: &dyn PreparedCase,
    runner: &dyn Runner,
    truth: &Truth,
    options: CheckOptions,
    first: &KernelRun,
    budgets: &[(&OracleTensor, Budget)],
    outcome: &mut Outcome,
) {
    if let Some(second) = launch(prepared, runner, truth, Contract::NAN, "launch", outcome) {
        same_results("repeatable", runner, first, &second, budgets, outcome);
    }
    let blind =
        ["poison_independent", "fully_written"].map(|check| outcome.is_blind(runner, check, 1));
    if blind != [true; 2]
        && let Some(other) = launch(prepared, runner, truth, Contract::HUGE, "launch", outcome)
    {
        memory_checks(runner, &other, outcome);
        same_results("poison_independent", runner, first, &other, budgets, outcome);
        fully_written(first, &other, outcome);
    }
    if options.sequence {
        sequence_check(prepared, runner, first, budgets, outcome);
    } else {
        outcome.skip(
            "sequence",
            "of a sweep on the emulator every third case is called in sequence",
            1,
        );
    }
    let schedules = u64::from(options.schedules);
    if schedules > 0 && outcome.is_blind(runner, "schedule_independent", schedules) {
        return;
    }
    for schedule in 1..=schedules {
        let before = outcome.checks.len();
        runner.set_schedule_seed(Some(schedule));
        let run = launch(prepared, runner, truth, Contract::NAN, "launch", outcome);
        runner.set_schedule_seed(None);
        if let Some(run) = run {
            same_results("schedule_independent", runner, first, &run, budgets, outcome);
        }
        outcome.name_run(before, &format!("under schedule {schedule}"));
    }
}

/// Runs again after calls with other data; nothing of these may be left.
fn sequence_check(
    prepared: &dyn PreparedCase,
    runner: &dyn Runner,
    first: &KernelRun,
    budgets: &[(&OracleTensor, Budget)],
    outcome: &mut Outcome,
) {
    const CHECK: &str = "sequence";
    if outcome.is_blind(runner, CHECK, 1) {
        return;
    }
    let Sequence { repeats, stray_writes, skips } = match runner.sequence(prepared, Contract::NAN) {
        Ok(Some(sequence)) => sequence,
        Ok(None) => return,
        Err(error) if error.skipped => return outcome.skip(CHECK, &error.message, 1),
        Err(error) => return outcome.failed(CHECK, error),
    };
    outcome.skips.extend(skips);
    for Repeat { when, run } in &repeats {
        let before = outcome.checks.len();
        memory_checks(runner, run, outcome);
        same_results(CHECK, runner, first, run, budgets, outcome);
        outcome.name_run(before, when);
    }
    for write in stray_writes {
        let at = write.first_offset;
        let message = format!(
            "{} byte(s) of an earlier call's buffer changed, the first at byte {at}",
            write.bytes
        );
        outcome.verdict(CHECK, &write.buffer, write.bytes as u64, Some(message));
    }
}

/// Bit equality, or, for sums by atomics, a difference within the budget.
fn same_results(
    check: &str,
    runner: &dyn Runner,
    first: &KernelRun,
    second: &KernelRun,
    budgets: &[(&OracleTensor, Budget)],
    outcome: &mut Outcome,
) {
    for b in &second.tensors {
        let Some(a) = first.tensors.iter().find(|a| a.name == b.name && a.tensor.elements() > 0)
        else {
            continue;
        };
        let freely = runner.rounds_freely(a.name);
        freely.inspect(|why| outcome.skip(format!("bit equality of {}", a.name), why, 1));
        let budget = budgets.iter().find(|(exact, _)| exact.name == a.name);
        let beyond = || {
            budget.and_then(|(exact, budget)| {
                difference_beyond(&a.tensor, &b.tensor, exact, budget, 1.0)
            })
        };
        let problem = if a.deterministic && freely.is_none() {
            let last_bits = || budget.is_some() && beyond().is_none();
            first_difference(&a.tensor, &b.tensor)
                .map(|problem| with_hint(problem, runner, last_bits))
        } else {
            beyond()
        };
        outcome.verdict(check, a.name, a.tensor.elements() as u64, problem);
    }
}

/// Describes a difference in bits, with what the kernel's owner may declare if that is all.
fn with_hint(problem: String, runner: &dyn Runner, last_bits: impl FnOnce() -> bool) -> String {
    match runner.may_round_freely() {
        Some(hint) if last_bits() => format!("{problem} ({hint})"),
        _ => problem,
    }
}

fn first_difference(a: &HostTensor, b: &HostTensor) -> Option<String> {
    if a.shape != b.shape || a.dtype != b.dtype {
        return Some(format!("{a:?} against {b:?}"));
    }
    let size = a.dtype.size();
    let mut different = (0..a.elements())
        .filter(|i| a.bytes[i * size..(i + 1) * size] != b.bytes[i * size..(i + 1) * size]);
    let first = different.next()?;
    let count = 1 + different.count();
    let (x, y) = (a.to_f64()[first], b.to_f64()[first]);
    Some(format!(
        "{count} element(s) differ; first at {:?}: {} against {}",
        agreement::unflatten(first, &a.shape),
        figures::element(x),
        figures::element(y)
    ))
}

/// The first element whose value differs from the expected one; zeros are equal, and so are NaN.
fn value_difference(found: &[f64], expected: &[f64], shape: &[usize]) -> Option<String> {
    if found.len() != expected.len() {
        return Some(format!("{} elements against {}", found.len(), expected.len()));
    }
    let differs = |(x, y): (&f64, &f64)| x != y && !(x.is_nan() && y.is_nan());
    let mut different = (0..found.len()).filter(|&i| differs((&found[i], &expected[i])));
    let first = different.next()?;
    let (count, at) = (1 + different.count(), agreement::unflatten(first, shape));
    let [found, expected] = [found[first], expected[first]].map(figures::element);
    Some(format!("{count} element(s) differ; first at {at:?}: {found} against {expected}"))
}

/// The element by which two runs differ most, if that is more than `budgets` times its budget. The
/// oracle's values only decide which elements are finite; agreement with them is another check.
fn difference_beyond(
    a: &HostTensor,
    b: &HostTensor,
    exact: &OracleTensor,
    budget: &Budget,
    budgets: f64,
) -> Option<String> {
    let (a, b) = (a.to_f64(), b.to_f64());
    let worst = (0..a.len())
        .filter(|&i| exact.values[i].is_finite())
        .map(|i| (i, separation(a[i], b[i], budgets * budget.allowed[i])))
        .max_by(|x, y| x.1.total_cmp(&y.1))?;
    (worst.1 > 1.0).then(|| {
        let i = worst.0;
        let index = agreement::unflatten(i, &exact.shape);
        let [a, b] = [a[i], b[i]].map(figures::element);
        format!(
            "at {index:?}: {b} against {a}, {} of what may separate them",
            figures::measure(worst.1, 3)
        )
    })
}

/// The distance of two values over the allowed distance. A value that is not finite is infinitely
/// far from everything except the same value.
fn separation(a: f64, b: f64, allowed: f64) -> f64 {
    if a == b || a.is_nan() && b.is_nan() {
        0.0
    } else if a.is_finite() && b.is_finite() {
        (a - b).abs() / allowed
    } else {
        f64::INFINITY
    }
}

/// An element that still holds the poison of each of two differently poisoned runs was never
/// written.
fn fully_written(nan: &KernelRun, huge: &KernelRun, outcome: &mut Outcome) {
    for (a, b) in nan.tensors.iter().zip(&huge.tensors) {
        let size = a.tensor.dtype.size();
        let poisoned = |tensor: &HostTensor, contract: Contract, i: usize| {
            tensor.bytes[i * size..(i + 1) * size].iter().all(|&byte| byte == contract.poison)
        };
        let elements = a.tensor.elements();
        if elements == 0 {
            continue;
        }
        let unwritten: Vec<usize> = (0..elements)
            .filter(|&i| {
                poisoned(&a.tensor, Contract::NAN, i) && poisoned(&b.tensor, Contract::HUGE, i)
            })
            .collect();
        let problem = unwritten.first().map(|&first| {
            format!(
                "{} of {elements} elements were never written; first at {:?}",
                unwritten.len(),
                agreement::unflatten(first, &a.tensor.shape)
            )
        });
        outcome.verdict("fully_written", a.name, elements as u64, problem);
        outcome.name_elements(failing::elements(&unwritten, &a.tensor.shape, None));
    }
}

fn law_checks(
    law: &Law,
    runner: &dyn Runner,
    truth: &Truth,
    base: &KernelRun,
    budgets: &[(&OracleTensor, Budget)],
    outcome: &mut Outcome,
) {
    let check =
        if law.name == "independence" { law.name.to_owned() } else { format!("law: {}", law.name) };
    if let Some(why) = law.left_out.or_else(|| runner.cannot_vary(&*law.variant)) {
        outcome.skip(check, why, 1);
        return;
    }
    let Some(variant) = launch(&*law.variant, runner, truth, Contract::NAN, &check, outcome) else {
        return;
    };
    // Computed once, when a relation needs it: the oracle's runs take far longer than the kernels.
    let variants_truth = OnceCell::new();
    for (name, relation) in &law.relations {
        let exact = truth.exact.iter().find(|exact| exact.name == *name);
        if let Some(why) = exact.and_then(|exact| runner.leaves_out(exact)) {
            outcome.skip(format!("{check} of {name}"), why, 1);
            continue;
        }
        let find = |run: &KernelRun| run.tensors.iter().find(|t| t.name == *name).cloned();
        let (Some(a), Some(b)) = (find(base), find(&variant)) else {
            outcome.push(
                &check,
                name,
                Verdict::Error,
                0,
                "the law names a tensor that the kernel does not return".into(),
            );
            continue;
        };
        if a.tensor.elements() == 0 {
            continue;
        }
        let budget = budgets.iter().find(|(exact, _)| exact.name == *name);
        let both = match (relation, budget) {
            (Relation::WithinBothBudgets, Some((exact, budget))) => {
                let own = variants_truth.get_or_init(|| {
                    Truth::of_elements(&*law.variant, runner.arithmetic(&*law.variant))
                });
                match own
                    .as_ref()
                    .map_err(|e| e.to_string())
                    .and_then(|own| with_variants(own, exact, budget, &b))
                {
                    Ok(both) => Some((*exact, both)),
                    Err(message) => {
                        outcome.push(&check, name, Verdict::Error, 0, message);
                        continue;
                    }
                }
            }
            _ => None,
        };
        let budget = both.as_ref().or(budget);
        let (compared, problem) = match (runner.rounds_freely(name), relation) {
            (_, Relation::WithinBudget | Relation::WithinBothBudgets) => {
                relate(&a.tensor, &b.tensor, relation, budget)
            }
            (None, _) => {
                let (compared, problem) = relate(&a.tensor, &b.tensor, relation, budget);
                let last_bits = || {
                    budget.is_some()
                        && relate_freely(&a.tensor, &b.tensor, relation, budget).1.is_none()
                };
                (compared, problem.map(|problem| with_hint(problem, runner, last_bits)))
            }
            (Some(why), _) => {
                outcome.skip(format!("bit equality of {name}"), why, 1);
                relate_freely(&a.tensor, &b.tensor, relation, budget)
            }
        };
        outcome.verdict(&check, name, compared, problem);
    }
}

/// How far a tensor of the case and the same tensor of a variant may be apart.
fn with_variants(
    variant: &Truth,
    exact: &OracleTensor,
    budget: &Budget,
    found: &KernelTensor,
) -> Result<Budget, String> {
    let mut both = budget.clone();
    if let Some(index) = variant.exact.iter().position(|tensor| tensor.name == exact.name) {
        let (_, own) = variant.of_each_element(index, found)?;
        both.allowed.iter_mut().zip(&own.allowed).for_each(|(allowed, own)| *allowed += own);
    }
    Ok(both)
}

/// How many elements a relation constrains, and what is wrong with them.
fn relate(
    a: &HostTensor,
    b: &HostTensor,
    relation: &Relation,
    budget: Option<&(&OracleTensor, Budget)>,
) -> (u64, Option<String>) {
    let elements = a.elements() as u64;
    let (rows, row_len) = rows_of(&a.shape);
    match relation {
        // Includes integers and bytes, which have no other multiple.
        Relation::Times(1.0) => (elements, first_difference(a, b)),
        Relation::Times(factor) => {
            let scaled: Vec<f64> = a.to_f64().iter().map(|value| value * factor).collect();
            (elements, first_difference(&HostTensor::from_f64(a.dtype, &a.shape, &scaled), b))
        }
        Relation::EqualRows(bound) => {
            let bound_rows: Vec<usize> = (0..rows).filter(|&row| bound(row)).collect();
            let problem = row_difference(a, b, bound_rows.iter().map(|&row| (row, row)));
            ((bound_rows.len() * row_len) as u64, problem)
        }
        Relation::PermutedRows(map) => {
            (elements, row_difference(a, b, map.iter().copied().zip(0..)))
        }
        Relation::PermutedAlong { axis, order } => {
            (elements, first_difference(&permuted_along(a, *axis, order), b))
        }
        Relation::EqualExcept { axis, at } => {
            let (bound, kept) = without_entry(a, b, *axis, *at);
            (bound, first_difference(a, &kept))
        }
        Relation::MadeOf(made_of) => {
            (elements, value_difference(&a.to_f64(), &made_of(b), &a.shape))
        }
        // Each of the two may be off by its budget.
        Relation::WithinBudget => (
            elements,
            budget.and_then(|(exact, budget)| difference_beyond(a, b, exact, budget, 2.0)),
        ),
        Relation::WithinBothBudgets => (
            elements,
            budget.and_then(|(exact, budget)| difference_beyond(a, b, exact, budget, 1.0)),
        ),
    }
}

/// As [`relate`], but each of the two may be off by its budget where bits would have to be equal.
fn relate_freely(
    a: &HostTensor,
    b: &HostTensor,
    relation: &Relation,
    budget: Option<&(&OracleTensor, Budget)>,
) -> (u64, Option<String>) {
    if a.shape != b.shape {
        return (a.elements() as u64, Some(format!("{a:?} against {b:?}")));
    }
    let (rows, row_len) = rows_of(&a.shape);
    // The variant's tensor with the relation undone: it must agree with the case's own tensor.
    let (case, mut back) = (a.to_f64(), b.to_f64());
    let mut bound = rows;
    match relation {
        Relation::Times(factor) => back.iter_mut().for_each(|value| *value /= factor),
        Relation::MadeOf(made_of) => back = made_of(b),
        Relation::EqualRows(is_bound) => {
            for row in (0..rows).filter(|&row| !is_bound(row)) {
                back[row * row_len..(row + 1) * row_len]
                    .copy_from_slice(&case[row * row_len..(row + 1) * row_len]);
                bound -= 1;
            }
        }
        Relation::PermutedRows(map) => {
            let variant = back.clone();
            for (row, &from) in map.iter().enumerate() {
                back[from * row_len..(from + 1) * row_len]
                    .copy_from_slice(&variant[row * row_len..(row + 1) * row_len]);
            }
        }
        Relation::PermutedAlong { axis, order } => {
            let mut inverse = vec![0; order.len()];
            order.iter().enumerate().for_each(|(to, &from)| inverse[from] = to);
            back = permuted_along(b, *axis, &inverse).to_f64();
        }
        Relation::EqualExcept { axis, at } => {
            let (bound, kept) = without_entry(a, b, *axis, *at);
            let back = HostTensor::from_f64(DType::F32, &b.shape, &kept.to_f64());
            return (bound, relate(a, &back, &Relation::WithinBudget, budget).1);
        }
        Relation::WithinBudget | Relation::WithinBothBudgets => {}
    }
    let back = HostTensor::from_f64(DType::F32, &b.shape, &back);
    let (_, problem) = relate(a, &back, &Relation::WithinBudget, budget);
    ((bound * row_len) as u64, problem)
}

/// `b` with entry `at` along an axis taken from `a`, and how many elements still come from `b`.
fn without_entry(a: &HostTensor, b: &HostTensor, axis: usize, at: usize) -> (u64, HostTensor) {
    let entry = a.shape[axis + 1..].iter().product::<usize>();
    let extent = a.shape[axis];
    let mut kept = b.clone();
    if a.bytes.len() == b.bytes.len() {
        let bytes = entry * a.dtype.size();
        for start in (at * bytes..a.bytes.len()).step_by((extent * bytes).max(1)) {
            kept.bytes[start..start + bytes].copy_from_slice(&a.bytes[start..start + bytes]);
        }
    }
    let left_out = a.elements().checked_div(extent).unwrap_or(0);
    ((a.elements() - left_out) as u64, kept)
}

/// First of the pairs of rows (of `a`, of `b`) that is not bit-equal.
fn row_difference(
    a: &HostTensor,
    b: &HostTensor,
    mut pairs: impl Iterator<Item = (usize, usize)>,
) -> Option<String> {
    let (_, row_len) = rows_of(&a.shape);
    let bytes = row_len * a.dtype.size();
    if a.bytes.len() != b.bytes.len() {
        return Some(format!("{a:?} against {b:?}"));
    }
    let (from, to) = pairs.find(|&(x, y)| {
        a.bytes[x * bytes..(x + 1) * bytes] != b.bytes[y * bytes..(y + 1) * bytes]
    })?;
    Some(format!("row {to} of the variant differs from row {from} of the case"))
}
