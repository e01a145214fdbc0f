//! The cases on which generated mutants run.

use std::collections::{BTreeMap, BTreeSet};

use dsv4_runtime::Device;
use serde::{Deserialize, Serialize};

use crate::case::Case;
use crate::judge::checks::CheckOptions;
use crate::mutants::planted::Mutant;
use crate::operator::{AnyOperator, Profile};
use crate::record::{CaseRecord, Origin};
use crate::sweep;
use crate::sweep::regressions::Regressions;

/// A case, and its run on the unmutated kernels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KnownCase {
    /// Its number among the operator's cases. A sweep's checks of a case depend on it.
    pub number: u64,
    /// The case.
    pub case: Case,
    /// Its run on the unmutated kernels.
    pub record: CaseRecord,
    /// Words in the names of the paths that ran; they contain the kernels' names.
    kernels: BTreeSet<String>,
    /// Modules that the case needs: file and defines.
    modules: BTreeSet<String>,
    /// Elements that its checks compared: the cost of the case, without a clock.
    work: u64,
}

/// An operator's saved cases, its edge cases, and the cases of its planted mutants, each once.
///
/// # Errors
/// Cases that cannot be read.
pub fn collect(
    operator: &AnyOperator,
    regressions: &Regressions,
    planted: &[Mutant],
) -> Result<Vec<(Case, Origin)>, crate::case::CaseError> {
    let name = operator.name();
    let remembered = regressions.load(name)?.into_iter().map(|case| (case, Origin::Regression));
    let edge_cases =
        operator.edge_cases(Profile::Quick).into_iter().map(|case| (case, Origin::Drawn));
    let mut all: Vec<_> = remembered.chain(edge_cases).collect();
    for line in
        planted.iter().filter(|mutant| mutant.operator == name).flat_map(|mutant| &mutant.cases)
    {
        all.push((Case::parse(line)?, Origin::Given));
    }
    let mut known = BTreeSet::new();
    all.retain(|(case, _)| known.insert(canonical(case)));
    Ok(all)
}

/// A case's fields in a fixed order, whatever their order in the line.
fn canonical(case: &Case) -> String {
    let fields: BTreeMap<_, _> =
        case.fields.iter().map(|(name, value)| (name, value.to_string())).collect();
    format!("{fields:?}")
}

/// Runs a case on the unmutated kernels.
pub fn know(
    (number, case, origin): (u64, Case, Origin),
    device: &Device,
    options: CheckOptions,
) -> KnownCase {
    // A separate device, so that the modules are those of this case.
    let device = device.with_tree(device.tree().clone());
    let record = sweep::run_case(&case, origin, &device, options);
    let words = |path: &String| {
        path.split(|c: char| !c.is_alphanumeric() && c != '_')
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let modules = device.loaded_modules();
    KnownCase {
        number,
        kernels: record.paths.iter().flat_map(words).collect(),
        modules: modules.into_iter().map(|(file, defines)| format!("{file} {defines:?}")).collect(),
        work: record.checks.iter().map(|check| check.compared).sum(),
        case,
        record,
    }
}

/// The cases that run one of `kernels`, in the order in which a mutant of them runs them. Cases
/// that need fewer modules not yet compiled go first, and of these the cheapest.
pub fn order<'a>(known: &'a [KnownCase], kernels: &BTreeSet<String>) -> Vec<&'a KnownCase> {
    let mut left: Vec<&KnownCase> =
        known.iter().filter(|one| !one.kernels.is_disjoint(kernels)).collect();
    let mut compiled: BTreeSet<&str> = BTreeSet::new();
    let mut ordered = Vec::new();
    while !left.is_empty() {
        let cost = |one: &KnownCase| {
            (one.modules.iter().filter(|m| !compiled.contains(m.as_str())).count(), one.work)
        };
        let cheapest = (0..left.len()).min_by_key(|&index| cost(left[index])).unwrap_or_default();
        let next = left.remove(cheapest);
        compiled.extend(next.modules.iter().map(String::as_str));
        ordered.push(next);
    }
    ordered
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::checks::Outcome;

    fn known(number: u64, kernels: &[&str], modules: &[&str], work: u64) -> KnownCase {
        let set = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let case =
            Case::parse(&format!("{{\"operator\":\"rope\",\"seed\":{number}}}")).expect("a case");
        let checks = Outcome::default().checks;
        let record = CaseRecord {
            operator: "rope".into(),
            case: serde_json::Value::Null,
            origin: Origin::Given,
            paths: Vec::new(),
            checks,
            kernel_seconds: 0.0,
            oracle_seconds: 0.0,
            replay: String::new(),
            batches: vec![],
            plan_number: None,
            untestable: None,
            seconds: None,
            our_seconds: None,
            unsupported: None,
            skips: Vec::new(),
        };
        KnownCase { number, case, record, kernels: set(kernels), modules: set(modules), work }
    }

    #[test]
    fn a_mutant_meets_the_cases_that_reach_it_and_a_module_is_used_up_before_the_next() {
        let all = [
            known(0, &["forward"], &["f32"], 5),
            known(1, &["forward"], &["bf16"], 3),
            known(2, &["table"], &["bf16"], 1),
            known(3, &["forward", "table"], &["bf16"], 9),
        ];
        let seeds = |kernel: &str| {
            let ordered = order(&all, &[kernel.to_owned()].into());
            ordered
                .iter()
                .map(|one| one.case.fields["seed"].as_u64().expect("a number"))
                .collect::<Vec<_>>()
        };
        assert_eq!(seeds("forward"), [1, 3, 0]);
        assert_eq!(seeds("table"), [2, 3]);
        assert_eq!(seeds("no such kernel"), [0; 0]);
    }
}
