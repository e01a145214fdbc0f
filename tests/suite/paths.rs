//! The paths of a sweep on a GPU are known without one. Launchers choose their kernels by the
//! device's name, its number of SMs and the case. The device here accepts launches and runs
//! nothing.

use std::collections::BTreeSet;

use dsv4_parity::calls::observed::hopper;
use dsv4_parity::case::Case;
use dsv4_parity::operator::{AnyOperator, Profile};
use dsv4_parity::operators::registry;
use dsv4_parity::sweep::regressions::Regressions;
use dsv4_runtime::{BackendKind, Contract, Device, Environment};
use rayon::prelude::*;

use crate::support;

/// The paths that a case's launchers take there; none for a case that a sweep skips there.
fn paths_of(operator: &AnyOperator, case: &Case, device: &Device) -> Vec<String> {
    if operator.cannot_run(case, device.environment()).is_some() {
        return Vec::new();
    }
    let prepared =
        operator.prepare(case).unwrap_or_else(|error| panic!("{}: {error}", case.line()));
    let ran = prepared
        .kernel(device, Contract::NAN)
        .unwrap_or_else(|error| panic!("{}: {error}", case.line()));
    ran.paths
}

/// The declared paths that no case of every sweep takes, and the paths that are taken but not
/// declared.
fn never_taken(
    operator: &AnyOperator,
    environment: &Environment,
    regressions: &Regressions,
) -> [BTreeSet<String>; 2] {
    let device = Device::accepting(environment.clone(), dsv4_kernels::sources());
    let mut never: BTreeSet<String> = operator.describe().paths.into_iter().collect();
    let (declared, mut unknown) = (never.clone(), BTreeSet::new());
    let remembered = regressions.load(operator.name()).expect("a file of cases");
    for case in operator.edge_cases(Profile::Quick).iter().chain(&remembered) {
        for path in paths_of(operator, case, &device) {
            never.remove(&path);
            unknown.extend((!declared.contains(&path)).then_some(path));
        }
        if never.is_empty() {
            break;
        }
    }
    [never, unknown]
}

/// Reports where some operator's sweep misses a path of this device, or takes an undeclared one.
fn gaps(environment: &Environment) -> Vec<String> {
    let regressions = Regressions::new(support::fixtures().join("regressions"));
    registry::OPERATORS
        .par_iter()
        .map(|operator| (operator.name(), never_taken(operator, environment, &regressions)))
        .filter(|(_, [never, unknown])| !never.is_empty() || !unknown.is_empty())
        .map(|(name, [never, unknown])| {
            format!("{name}: never taken: {never:?}; not declared: {unknown:?}")
        })
        .collect()
}

#[test]
fn on_a_hopper_gpu_every_declared_path_is_taken_by_an_edge_case_or_a_remembered_one() {
    assert_eq!(gaps(&hopper()), [""; 0]);
}

#[test]
fn on_the_device_under_test_every_declared_path_is_taken_by_an_edge_case_or_a_remembered_one() {
    let environment = support::device().environment();
    // GPUs of another generation have none of Hopper's paths.
    if environment.backend == BackendKind::Emulator || environment.target == "sm_90a" {
        assert_eq!(gaps(environment), [""; 0]);
    }
}
