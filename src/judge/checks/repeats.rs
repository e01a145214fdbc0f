//! A kernel against itself: again, under another poison, after other data, under schedules.

use dsv4_runtime::{Contract, HostTensor};

use super::differences::{difference_beyond, first_difference, with_hint};
use super::{CheckOptions, Outcome, launch, launched, memory_checks};
use crate::judge::budget::Budget;
use crate::judge::runner::{RunError, Runner};
use crate::judge::truth::Truth;
use crate::judge::{agreement, failing};
use crate::operator::{KernelRun, KernelTensor, OracleTensor, PreparedCase, Repeat, Sequence};
use crate::record::{Check, CheckRecord, Skip};

/// Runs again: the same way, under another poison, after other data, under random schedules.
pub(super) fn repeat_checks(
    prepared: &dyn PreparedCase,
    runner: &dyn Runner,
    truth: &Truth,
    options: CheckOptions,
    first: &KernelRun,
    budgets: &[(&OracleTensor, Budget)],
    outcome: &mut Outcome,
) {
    // The same kernels on the same data have the races that the first run had.
    runner.watch_races(false);
    let again = |contract, outcome: &mut Outcome| {
        launch(prepared, runner, truth, contract, Check::Launch, outcome)
    };
    if let Some(second) = again(Contract::NAN, outcome) {
        same_results(Check::Repeatable, runner, first, &second, budgets, outcome);
    }
    let blind = [Check::PoisonIndependent, Check::FullyWritten]
        .map(|check| outcome.is_blind(runner, &check, 1));
    if blind != [true; 2]
        && let Some(other) = again(Contract::HUGE, outcome)
    {
        memory_checks(runner, &other, outcome);
        same_results(Check::PoisonIndependent, runner, first, &other, budgets, outcome);
        fully_written(first, &other, outcome);
    }
    runner.watch_races(true);
    if options.sequence {
        sequence_check(prepared, runner, first, budgets, outcome);
    } else {
        outcome.skip(
            Check::Sequence.as_str(),
            "of a sweep on the emulator every third case is called in sequence",
            1,
        );
    }
    let schedules = u64::from(options.schedules);
    if schedules > 0 && outcome.is_blind(runner, &Check::ScheduleIndependent, schedules) {
        return;
    }
    for schedule in 1..=schedules {
        let before = outcome.checks.len();
        runner.set_schedule_seed(Some(schedule));
        let run = again(Contract::NAN, outcome);
        runner.set_schedule_seed(None);
        if let Some(run) = run {
            same_results(Check::ScheduleIndependent, runner, first, &run, budgets, outcome);
        }
        outcome.name_run(before, &format!("under schedule {schedule}"));
    }
}

/// Runs again after calls with other data; nothing of these may be left.
pub(super) fn sequence_check(
    prepared: &dyn PreparedCase,
    runner: &dyn Runner,
    first: &KernelRun,
    budgets: &[(&OracleTensor, Budget)],
    outcome: &mut Outcome,
) {
    const CHECK: Check = Check::Sequence;
    if outcome.is_blind(runner, &CHECK, 1) {
        return;
    }
    let Sequence { repeats, stray_writes, skips } = match runner.sequence(prepared, Contract::NAN) {
        Ok(Some(sequence)) => sequence,
        Ok(None) => return,
        Err(error) if error.skipped => return outcome.skip(CHECK.as_str(), &error.message, 1),
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
pub(super) fn same_results(
    check: Check,
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
        outcome.verdict(check.clone(), a.name, a.tensor.elements() as u64, problem);
    }
}

/// Compares a later run of a case with its first one, bit for bit where bits must repeat.
pub fn again(
    first: &KernelRun,
    second: Result<KernelRun, RunError>,
    runner: &dyn Runner,
    when: &str,
) -> (Vec<CheckRecord>, Vec<Skip>) {
    let mut outcome = Outcome::default();
    if let Some(second) = launched(second, Check::Launch, &mut outcome) {
        let repeat = |tensor: &&KernelTensor| {
            tensor.deterministic && runner.rounds_freely(tensor.name).is_none()
        };
        let tensors = first.tensors.iter().filter(repeat).cloned().collect();
        let first = KernelRun { tensors, ..first.clone() };
        same_results(Check::Repeatable, runner, &first, &second, &[], &mut outcome);
    }
    outcome.name_run(0, when);
    (outcome.checks, outcome.skips)
}

/// An element that still holds the poison of each of two differently poisoned runs was never
/// written.
pub(super) fn fully_written(nan: &KernelRun, huge: &KernelRun, outcome: &mut Outcome) {
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
        outcome.verdict(Check::FullyWritten, a.name, elements as u64, problem);
        outcome.name_elements(failing::elements(&unwritten, &a.tensor.shape, None));
    }
}
