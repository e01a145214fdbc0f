//! Every check of a case: runs the oracle and the kernels, compares, and reports what it found.

mod batches;
mod beside;
mod changes;
mod comparison;
mod differences;
mod laws;
mod repeats;

use std::time::Instant;

use dsv4_reference::precision::Precision;
use dsv4_runtime::arena::ViolationKind;
use dsv4_runtime::{BackendKind, Contract};

use self::batches::batch_checks;
use self::comparison::{compare, saved_checks};
use self::laws::law_checks;
use self::repeats::repeat_checks;
use crate::judge::runner::{RunError, Runner};
use crate::judge::triangulation;
use crate::judge::truth::{Truth, Unheld};
use crate::operator::{KernelRun, PreparedCase, Side};
use crate::record::{
    BatchRecord, Check, CheckRecord, FailingElements, NOT_JUDGED, Skip, Verdict, agreement_of,
    words,
};

pub use self::comparison::POWERLESS;
pub use self::repeats::again;

/// Which laws of a case are checked. Each launches everything once more. `independence` is always
/// checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Laws {
    /// All.
    All,
    /// One in [`Laws::TURNS`], by the number of the case: consecutive cases check other ones. A sweep
    /// on the emulator does so ([`CheckOptions::in_a_sweep`]).
    InTurn(u64),
    /// None.
    None,
}

impl Laws {
    /// After this many cases each law has been checked.
    pub const TURNS: u64 = 3;

    /// These in turn, by the number of a case.
    pub fn in_turn(self, number: u64) -> Self {
        if self == Self::All { Self::InTurn(number) } else { self }
    }

    /// Whether the law at this place among those of the case is checked.
    fn take(self, place: u64) -> bool {
        match self {
            Self::All => true,
            Self::InTurn(number) => (number + place).is_multiple_of(Self::TURNS),
            Self::None => false,
        }
    }
}

/// What a sweep requires of each case in addition to the checks that always run.
#[derive(Clone, Copy, Debug)]
pub struct CheckOptions {
    /// Random schedules to run each case under, after the deterministic one (emulator only). Their
    /// seeds are 1 to this number. [`crate::operator::Profile::schedules`] is what a sweep uses.
    pub schedules: u32,
    /// Whether calls in sequence are checked. They launch everything three times, so a sweep on the
    /// emulator checks every third case ([`Self::in_a_sweep`]).
    pub sequence: bool,
    /// Whether the rows of a case run in other batches. A sweep on the emulator does so for every
    /// third case.
    pub batches: bool,
    /// Which laws are checked.
    pub laws: Laws,
    /// Whether verdicts report what they could have seen ([`crate::judge::power`]). Whether a
    /// verdict has power at all is always checked.
    pub power: bool,
    /// Only the rows in other batches: no oracle is needed, and nothing else is learnt.
    pub only_batches: bool,
    /// Only the bits of two kernels beside each other ([`Runner::beside`]): no oracle is needed.
    pub only_beside: bool,
    /// Whether to triangulate the oracle's gradients. It concerns only the oracle, so once per case
    /// is enough, and a kernel's mutants never need it.
    pub triangulate: bool,
}

impl CheckOptions {
    /// Everything.
    pub const fn everything(schedules: u32) -> Self {
        Self {
            schedules,
            sequence: true,
            batches: true,
            laws: Laws::All,
            power: true,
            only_batches: false,
            only_beside: false,
            triangulate: true,
        }
    }

    /// What a sweep on this backend checks of its case number `number`. Launches on the emulator
    /// cost most, so there calls in sequence, rows in other batches and laws take turns.
    pub fn in_a_sweep(self, backend: BackendKind, number: u64) -> Self {
        if backend != BackendKind::Emulator {
            return self;
        }
        Self {
            sequence: self.sequence && number.is_multiple_of(Laws::TURNS),
            batches: self.batches && number % Laws::TURNS == 1,
            laws: self.laws.in_turn(number),
            ..self
        }
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
    /// What other batches showed, axis by axis.
    pub batches: Vec<BatchRecord>,
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
    fn failed(&mut self, check: Check, error: RunError) {
        if error.untestable {
            self.untestable.get_or_insert(error.message.clone());
        }
        self.push(check, "", error.verdict, 0, error.message);
    }

    fn push(
        &mut self,
        check: Check,
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
            check,
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
            check.failing = failing.map(Box::new);
        }
    }

    fn skip(&mut self, what: impl Into<String>, why: &str, count: u64) {
        self.skips.push(Skip { what: what.into(), why: why.to_owned(), count });
    }

    /// A tensor without bounds: it is not judged, and counted, or what is wrong with it is an error.
    fn unheld(&mut self, check: Check, tensor: &str, unheld: Unheld) {
        match unheld {
            Unheld::NoBound(_) => self.skip(agreement_of(tensor), NOT_JUDGED, 1),
            Unheld::Wrong(message) => self.push(check, tensor, Verdict::Error, 0, message),
        }
    }

    /// Whether a check cannot be made of this runner's kernels; then the skip is noted.
    fn is_blind(&mut self, runner: &dyn Runner, check: &Check, count: u64) -> bool {
        let why = runner.blind_to(check);
        why.inspect(|why| self.skip(check.as_str(), why, count)).is_some()
    }

    /// Adds to every failure since check number `before` when it happened.
    fn name_run(&mut self, before: usize, when: &str) {
        for check in self.checks[before..].iter_mut().filter(|check| check.verdict != Verdict::Pass)
        {
            check.message = words::message(format!("{when}: {}", check.message));
        }
    }

    fn verdict(&mut self, check: Check, tensor: &str, compared: u64, problem: Option<String>) {
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
    if options.only_beside {
        return beside::only_beside(prepared, runner);
    }
    if options.only_batches {
        return only_batches(prepared, runner, &enough);
    }
    let start = Instant::now();
    match Truth::of(prepared, runner.arithmetic(prepared)) {
        Ok(truth) => {
            let seconds = start.elapsed().as_secs_f64();
            let outcome = run_by(&truth, prepared, runner, options, enough);
            Outcome { oracle_seconds: seconds + outcome.oracle_seconds, ..outcome }
        }
        Err(error) => {
            let mut outcome = Outcome::default();
            outcome.push(Check::Oracle, "", Verdict::Error, 0, error.to_string());
            outcome
        }
    }
}

/// Runs a case and its rows in other batches. Bits are compared with bits, so no run of the oracle
/// is needed, except that an external kernel learns from it what to write.
fn only_batches(
    prepared: &dyn PreparedCase,
    runner: &dyn Runner,
    enough: &dyn Fn(&Outcome) -> bool,
) -> Outcome {
    let mut outcome = Outcome::default();
    let external = runner.environment().backend == BackendKind::External;
    let exact = if external { prepared.oracle(Precision::Exact) } else { Ok(Vec::new()) };
    let exact = match exact {
        Ok(exact) => exact,
        Err(error) => {
            outcome.push(Check::Oracle, "", Verdict::Error, 0, error.to_string());
            return outcome;
        }
    };
    let start = Instant::now();
    let first = match runner.run(prepared, &exact, Contract::NAN) {
        Err(error) if error.unsupported => {
            return Outcome { unsupported: Some(error.message), ..outcome };
        }
        run => run,
    };
    if let Some(first) = launched(first, Check::Launch, &mut outcome) {
        outcome.paths.clone_from(&first.paths);
        memory_checks(runner, &first, &mut outcome);
        batch_checks(prepared, runner, &exact, &first, &mut outcome, enough);
    }
    outcome.kernel_seconds = start.elapsed().as_secs_f64();
    outcome
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
                if !finding.judged {
                    outcome.skip(Check::OracleGradients.as_str(), NOT_JUDGED, 1);
                    continue;
                }
                outcome.verdict(
                    Check::OracleGradients,
                    &finding.input,
                    finding.compared,
                    finding.problem,
                );
            }
        }
        Err(error) => {
            outcome.push(Check::OracleGradients, "", Verdict::Error, 0, error.to_string())
        }
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
    let Some(first) = launched(first, Check::Launch, outcome) else { return };
    outcome.paths.clone_from(&first.paths);
    memory_checks(runner, &first, outcome);
    if truth.exact.is_empty() {
        outcome.push(Check::Oracle, "", Verdict::Error, 0, "the oracle returned no tensor".into());
    }
    known_to_the_oracle(truth, &first, outcome);
    let mut budgets = Vec::new();
    for (index, exact) in truth.exact.iter().enumerate() {
        if let Some(why) = runner.leaves_out(exact) {
            outcome.skip(format!("{} of {}", side_check(exact.side), exact.name), why, 1);
            continue;
        }
        let Some(found) = first.tensors.iter().find(|tensor| tensor.name == exact.name) else {
            // Other tensors that a comparison needs may be no outputs.
            if !first.tensors.iter().any(|tensor| tensor.consults().any(|name| name == exact.name))
            {
                let message = "the kernel returned no such tensor".into();
                outcome.push(side_check(exact.side), exact.name, Verdict::Error, 0, message);
            }
            continue;
        };
        match truth.held(index, found) {
            Ok(held) => {
                compare(truth, index, found, &first, (&held, options.power), outcome);
                budgets.push((exact, held.budget.clone()));
            }
            Err(unheld) => outcome.unheld(side_check(exact.side), exact.name, unheld),
        }
    }
    let left_out = |side| {
        let exact = truth.exact.iter().filter(move |exact| exact.side == side);
        exact.filter(|exact| runner.leaves_out(exact).is_some()).map(|exact| exact.name)
    };
    let gradients = truth.exact.iter().filter(|exact| exact.side == Side::Gradient).count();
    if left_out(Side::Gradient).count() < gradients {
        let saved: Vec<_> = left_out(Side::Forward).collect();
        saved_checks(prepared, runner, (&first, &saved), options.power, outcome);
    }
    if enough(outcome) {
        return;
    }
    repeat_checks(prepared, runner, truth, options, &first, &budgets, outcome);
    let mut left_out = 0;
    for (place, law) in (0..).zip(prepared.laws()) {
        if enough(outcome) {
            return;
        }
        if Check::law(law.name).is_law() && !options.laws.take(place) {
            left_out += 1;
            continue;
        }
        law_checks((prepared, &law), runner, truth, &first, &budgets, outcome);
    }
    if left_out > 0 {
        outcome.skip("laws", "a sweep on the emulator checks a third of them, in turn", left_out);
    }
    if !options.batches {
        outcome.skip(
            Check::BatchInvariance.as_str(),
            "of a sweep on the emulator every third case comes in other batches",
            1,
        );
    } else if !enough(outcome) && !outcome.is_blind(runner, &Check::BatchInvariance, 1) {
        batch_checks(prepared, runner, &truth.exact, &first, outcome, enough);
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
            Err(unheld) => outcome.unheld(side_check(exact.side), exact.name, unheld),
        }
    }
    outcome
}

fn known_to_the_oracle(truth: &Truth, run: &KernelRun, outcome: &mut Outcome) {
    for found in &run.tensors {
        if !truth.exact.iter().any(|exact| exact.name == found.name) {
            outcome.push(
                Check::Oracle,
                found.name,
                Verdict::Error,
                0,
                "the oracle has no such tensor".into(),
            );
        }
    }
}

fn side_check(side: Side) -> Check {
    match side {
        Side::Forward => Check::Forward,
        Side::Gradient => Check::Gradient,
    }
}

/// One launch of all kernels of the case.
fn launch(
    prepared: &dyn PreparedCase,
    runner: &dyn Runner,
    truth: &Truth,
    contract: Contract,
    check: Check,
    outcome: &mut Outcome,
) -> Option<KernelRun> {
    launched(runner.run(prepared, &truth.exact, contract), check, outcome)
}

/// Records the outcome of a launch.
fn launched(
    run: Result<KernelRun, RunError>,
    check: Check,
    outcome: &mut Outcome,
) -> Option<KernelRun> {
    match run {
        Ok(run) => {
            let written = run.tensors.iter().map(|t| t.tensor.elements() as u64).sum();
            // A case of size zero rightly launches nothing and writes nothing.
            outcome.verdict(check, "", u64::max(written, 1), None);
            Some(run)
        }
        Err(error) if error.skipped && check != Check::Launch => {
            outcome.skip(check.as_str(), &error.message, 1);
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
        (Check::Guards, &[ViolationKind::Guard, ViolationKind::Gap][..]),
        (Check::InputsUnchanged, &[ViolationKind::Input][..]),
    ] {
        if outcome.is_blind(runner, &check, 1) {
            continue;
        }
        let mut found = run.violations.iter().filter(|v| kinds.contains(&v.kind)).peekable();
        if found.peek().is_none() {
            outcome.verdict(check.clone(), "", buffers.max(1), None);
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
                outcome.verdict(check.clone(), &violation.buffer, buffers.max(1), Some(message));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_a_sweep_on_the_emulator_each_check_has_its_turn_and_on_a_gpu_all_are_made() {
        let made = |backend, number| {
            let checks = CheckOptions::of_kernels(0).in_a_sweep(backend, number);
            (checks.sequence, checks.batches, checks.laws == Laws::All)
        };
        let on_emulator = [0, 1, 2, 3].map(|number| made(BackendKind::Emulator, number));
        let [first, second, third, fourth] = on_emulator;
        assert_eq!([first, second, third].map(|made| made.0), [true, false, false]);
        assert_eq!([first, second, third].map(|made| made.1), [false, true, false]);
        assert_eq!((fourth, first.2), (first, false));
        assert_eq!(made(BackendKind::Cuda, 2), (true, true, true));
        // Three consecutive cases check each law once.
        let of = |number| Laws::All.in_turn(number);
        for law in 0..5 {
            assert_eq!((0..Laws::TURNS).filter(|&number| of(number).take(law)).count(), 1);
        }
    }
}
