//! The paths of a sweep on a GPU are known without one. Launchers choose their kernels by the
//! device's name, its number of SMs and the case. The device here accepts launches and runs
//! nothing.

use std::collections::BTreeSet;
use std::sync::Arc;

use dsv4_parity::calls::observed::hopper;
use dsv4_parity::case::Case;
use dsv4_parity::operator::{AnyOperator, Profile};
use dsv4_parity::operators::registry;
use dsv4_parity::sweep::regressions::Regressions;
use dsv4_runtime::recording::RecordingBackend;
use dsv4_runtime::{BackendKind, Contract, Device, Environment};
use rayon::prelude::*;

use crate::extent::left_out;
use crate::support;

/// Elements of the largest cases whose launches are tried.
const MOST_ELEMENTS: u128 = 1 << 22;

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

/// Also those for Hopper, whose launchers reject what hardware does not copy.
#[test]
fn on_a_hopper_gpu_no_edge_case_is_rejected() {
    if left_out(&["src/operator/", "src/operators/"]) {
        return;
    }
    let device = Device::accepting(hopper(), dsv4_kernels::sources());
    let cases: Vec<(&AnyOperator, Case)> = registry::OPERATORS
        .iter()
        .flat_map(|&operator| {
            operator.edge_cases(Profile::Quick).into_iter().map(move |case| (operator, case))
        })
        .collect();
    let rejected: Vec<String> = cases
        .par_iter()
        .filter(|(operator, case)| operator.cannot_run(case, device.environment()).is_none())
        .filter(|(operator, case)| {
            operator.elements(case).is_ok_and(|elements| elements < MOST_ELEMENTS)
        })
        .filter_map(|(operator, case)| {
            let prepared = operator.prepare(case).ok()?;
            let ran = prepared.kernel(&device, Contract::NAN);
            ran.err().map(|error| format!("{}: {error}", case.line()))
        })
        .collect();
    assert_eq!(rejected, [""; 0]);
}

/// GPUs without Hopper's instructions: target, SMs, shared memory of a block.
const OTHERS: [(&str, u32, u64); 4] = [
    ("sm_80", 108, 163 << 10),
    ("sm_89", 142, 99 << 10),
    ("sm_100a", 148, 227 << 10),
    ("sm_120a", 170, 99 << 10),
];

/// Edge cases of an operator that are tried on each of them: a share of all, the first among them.
const TRIED: usize = 6;

/// What an operator's launchers do there that such a GPU cannot do.
fn impossible(operator: &AnyOperator, environment: &Environment) -> Vec<String> {
    let backend = Arc::new(RecordingBackend::accepting(environment.clone()));
    let device = Device::of_accepting(backend.clone(), dsv4_kernels::sources());
    let cases = operator.edge_cases(Profile::Quick);
    let mut found = Vec::new();
    for case in cases.iter().step_by(cases.len().div_ceil(TRIED)) {
        paths_of(operator, case, &device);
        for launch in backend.take_accepted() {
            if launch.kernel.contains("hopper")
                || u64::from(launch.shared_bytes) > environment.shared_bytes_per_block
            {
                found.push(format!("{}: {}", environment.target, launch.kernel));
            }
        }
    }
    found
}

#[test]
fn on_gpus_without_hoppers_instructions_the_portable_kernels_run_in_their_shared_memory() {
    let others = OTHERS.map(|(target, processors, shared_bytes_per_block)| Environment {
        device: format!("a GPU of {target}"),
        target: target.into(),
        processors,
        shared_bytes_per_block,
        ..hopper()
    });
    let found: Vec<String> = registry::OPERATORS
        .par_iter()
        .flat_map_iter(|operator| others.iter().flat_map(|other| impossible(operator, other)))
        .collect();
    assert_eq!(found, [""; 0]);
    let on_hopper = registry::OPERATORS.par_iter().map(|operator| impossible(operator, &hopper()));
    assert!(on_hopper.flatten().count() > 0, "Hopper's kernels are seen where they run");
}

#[test]
fn on_the_device_under_test_every_declared_path_is_taken_by_an_edge_case_or_a_remembered_one() {
    let environment = support::device().environment();
    // GPUs of another generation have none of Hopper's paths.
    if environment.backend == BackendKind::Emulator || environment.target == "sm_90a" {
        assert_eq!(gaps(environment), [""; 0]);
    }
}
