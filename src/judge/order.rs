//! The findings of a failing case, the most useful to a reader first, each thing once.

use crate::record::{CaseRecord, Check, CheckRecord, Standing, Verdict, worse_first};

/// A check that did not pass, and the failures that it explains.
#[derive(Clone, Debug)]
pub(crate) struct Finding<'a> {
    /// The check.
    pub(crate) check: &'a CheckRecord,
    /// Checks that fail with it: statistics of the same tensor, and the same check again.
    pub(crate) with: Vec<&'a CheckRecord>,
}

/// How soon a check is read: launch, faults, laws and independence, forward, gradient, then
/// statistics.
fn rank(check: &CheckRecord, case: &CaseRecord) -> (usize, usize) {
    match &check.check {
        Check::Launch | Check::Inputs | Check::Oracle | Check::Golden => (0, 0),
        Check::Guards | Check::InputsUnchanged | Check::FullyWritten => (1, 0),
        Check::Repeatable
        | Check::PoisonIndependent
        | Check::Sequence
        | Check::ScheduleIndependent
        | Check::BatchInvariance
        | Check::Beside
        | Check::Independence => (2, 1),
        Check::Law(_) => (2, 0),
        Check::Forward => (3, 0),
        Check::Gradient => (4, 0),
        Check::GradientOfSaved => (4, 1),
        Check::SpecialValues | Check::Finite => {
            (if is_gradient(&check.tensor, case) { 4 } else { 3 }, 2)
        }
        Check::Bias | Check::Precision => (5, 0),
        Check::OracleGradients | Check::Power | Check::Other(_) => (6, 0),
    }
}

fn is_gradient(tensor: &str, case: &CaseRecord) -> bool {
    case.checks.iter().any(|check| check.check == Check::Gradient && check.tensor == tensor)
}

/// Whether a failure adds nothing to that of another check of the same tensor.
fn is_said_by(check: &CheckRecord, other: &CheckRecord) -> bool {
    let compares = other.check.is_agreement();
    let is_statistic =
        matches!(check.check, Check::Finite | Check::GradientOfSaved) || check.check.is_statistic();
    check.tensor == other.tensor && other.verdict == Verdict::Fail && compares && is_statistic
}

/// The checks of a case that are not plain passes, those that explain most first.
pub(crate) fn findings(case: &CaseRecord) -> Vec<Finding<'_>> {
    let mut checks: Vec<_> =
        case.checks.iter().filter(|check| Standing::of(check) != Standing::Pass).collect();
    let used =
        |check: &CheckRecord| check.metrics.as_ref().map_or(1.0, |metrics| metrics.budget_used);
    checks.sort_by(|a, b| {
        rank(a, case).cmp(&rank(b, case)).then_with(|| worse_first(used(a), used(b)))
    });
    let mut findings: Vec<Finding<'_>> = Vec::new();
    for check in checks {
        let same = |other: &CheckRecord| check.check == other.check && check.tensor == other.tensor;
        let said =
            |finding: &&mut Finding<'_>| same(finding.check) || is_said_by(check, finding.check);
        match findings.iter_mut().find(said) {
            Some(finding) => finding.with.push(check),
            None => findings.push(Finding { check, with: Vec::new() }),
        }
    }
    findings
}

/// A check and its tensor: `forward of y`.
pub(crate) fn name_of(check: &CheckRecord) -> String {
    if check.tensor.is_empty() {
        check.check.to_string()
    } else {
        format!("{} of {}", check.check, check.tensor)
    }
}

impl Finding<'_> {
    /// What fails with it, in words; empty where nothing does.
    pub(crate) fn company(&self) -> String {
        let mut others: Vec<String> = Vec::new();
        let again = self.with.iter().filter(|check| check.check == self.check.check).count();
        for check in self.with.iter().filter(|check| check.check != self.check.check) {
            let name = check.check.to_string();
            if !others.contains(&name) {
                others.push(name);
            }
        }
        if again > 0 {
            others.push(format!("{again} more of this check"));
        }
        if others.is_empty() { String::new() } else { format!("with it: {}", others.join(", ")) }
    }
}
