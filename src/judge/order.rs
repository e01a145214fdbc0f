//! The findings of a failing case, the most useful to a reader first, each thing once.

use super::checks::GRADIENT_OF_SAVED;
use crate::record::{CaseRecord, CheckRecord, Standing, Verdict, worse_first};

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
    match check.check.as_str() {
        "launch" | "inputs" | "oracle" | "golden" => (0, 0),
        "guards" | "inputs_unchanged" | "fully_written" => (1, 0),
        "repeatable"
        | "poison_independent"
        | "sequence"
        | "schedule_independent"
        | "independence" => (2, 1),
        law if law.starts_with("law: ") => (2, 0),
        "forward" => (3, 0),
        "gradient" => (4, 0),
        GRADIENT_OF_SAVED => (4, 1),
        "special_values" | "finite" => (if is_gradient(&check.tensor, case) { 4 } else { 3 }, 2),
        "bias" | "precision" => (5, 0),
        _ => (6, 0),
    }
}

fn is_gradient(tensor: &str, case: &CaseRecord) -> bool {
    case.checks.iter().any(|check| check.check == "gradient" && check.tensor == tensor)
}

/// Whether a failure adds nothing to that of another check of the same tensor.
fn is_said_by(check: &CheckRecord, other: &CheckRecord) -> bool {
    let compares = matches!(other.check.as_str(), "forward" | "gradient");
    let is_statistic =
        matches!(check.check.as_str(), "bias" | "precision" | "finite" | GRADIENT_OF_SAVED);
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
        check.check.clone()
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
            if !others.contains(&check.check) {
                others.push(check.check.clone());
            }
        }
        if again > 0 {
            others.push(format!("{again} more of this check"));
        }
        if others.is_empty() { String::new() } else { format!("with it: {}", others.join(", ")) }
    }
}
