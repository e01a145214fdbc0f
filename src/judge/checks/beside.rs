//! Two kernels beside each other: a trainer's and a server's, say. Bits are compared with bits, so no
//! run of the oracle is needed.

use dsv4_runtime::Contract;

use super::differences::first_difference;
use super::{Outcome, launched, memory_checks};
use crate::judge::runner::{RunError, Runner};
use crate::operator::{KernelRun, PreparedCase};
use crate::record::{Check, Verdict};

/// Runs a case by both kernels and compares each tensor.
pub(super) fn only_beside(prepared: &dyn PreparedCase, runner: &dyn Runner) -> Outcome {
    let mut outcome = Outcome::default();
    let own = runner.run(prepared, &[], Contract::NAN);
    let other = runner.beside(prepared, &[], Contract::NAN);
    let other = other.unwrap_or_else(|| Err(RunError::error("there is no kernel beside it")));
    for run in [&own, &other] {
        if let Err(RunError { unsupported: true, message, .. }) = run {
            return Outcome { unsupported: Some(message.clone()), ..outcome };
        }
    }
    let own = launched(own, Check::Launch, &mut outcome);
    let before = outcome.checks.len();
    let other = launched(other, Check::Launch, &mut outcome);
    outcome.name_run(before, "the kernel beside it");
    if let (Some(own), Some(other)) = (own, other) {
        outcome.paths.clone_from(&own.paths);
        outcome.paths.extend(other.paths.iter().filter(|path| !own.paths.contains(path)).cloned());
        memory_checks(runner, &own, &mut outcome);
        compare(&own, &other, runner, &mut outcome);
    }
    outcome
}

fn compare(own: &KernelRun, other: &KernelRun, runner: &dyn Runner, outcome: &mut Outcome) {
    for a in own.tensors.iter().filter(|a| a.tensor.elements() > 0) {
        if let Some(why) = runner.rounds_freely(a.name) {
            outcome.skip(format!("bit equality of {}", a.name), why, 1);
            continue;
        }
        let Some(b) = other.tensors.iter().find(|b| b.name == a.name) else {
            let why = "the kernel beside it returned no such tensor".to_owned();
            outcome.push(Check::Beside, a.name, Verdict::Error, 0, why);
            continue;
        };
        let elements = a.tensor.elements() as u64;
        let problem = first_difference(&a.tensor, &b.tensor);
        let problem = problem.map(|problem| format!("{problem} of the kernel beside it"));
        outcome.verdict(Check::Beside, a.name, elements, problem);
    }
}
