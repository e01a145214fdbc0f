//! Every kernel accepts each of its tensors in a separate layout: rows at any distance, outer axes
//! in any order. The bits must be those of dense tensors, and gaps must not be written.

use std::collections::BTreeSet;

use dsv4_parity::case::Case;
use dsv4_parity::operator::{AnyOperator, KernelRun, Profile};
use dsv4_parity::operators::registry;
use dsv4_runtime::{Contract, Device};

use crate::extent::{concerned_operators, left_out};
use crate::support;

/// Rooms whose changes run the long tests of this file.
const LAYOUTS: [&str; 4] =
    ["src/operator/", "src/case/", "kernels/runtime/src/arena.rs", "kernels/runtime/src/tensor.rs"];

/// One run without forbidden writes.
fn run(device: &Device, case: &Case) -> KernelRun {
    let run = registry::prepare(case).map(|prepared| prepared.kernel(device, Contract::NAN));
    let run = run.unwrap_or_else(|e| panic!("{}: {e}", case.line()));
    let run = run.unwrap_or_else(|e| panic!("{}: {e}", case.line()));
    assert!(run.violations.is_empty(), "{}: {:?}", case.line(), run.violations);
    run
}

/// Names of the tensors whose bits depend on the layout, without those that are summed in any
/// order. The spread tensors take the same paths.
fn differing(device: &Device, dense: &KernelRun, spread: &Case) -> Vec<&'static str> {
    let spread_run = run(device, spread);
    assert_eq!(dense.paths, spread_run.paths, "{}", spread.line());
    differing_runs(dense, &spread_run)
}

fn differing_runs(dense: &KernelRun, spread_run: &KernelRun) -> Vec<&'static str> {
    let pairs =
        dense.tensors.iter().zip(&spread_run.tensors).filter(|(tensor, _)| tensor.deterministic);
    pairs
        .filter(|(dense, spread)| dense.tensor.bytes != spread.tensor.bytes)
        .map(|(tensor, _)| tensor.name)
        .collect()
}

/// Runs cases, those with the shortest lines first, until every path of the operator was compared;
/// returns the paths that were not.
fn compare_until_every_path_ran(operator: &AnyOperator) -> BTreeSet<String> {
    let device = support::device();
    let mut left: BTreeSet<String> = operator.describe().paths.into_iter().collect();
    let mut seen = BTreeSet::new();
    // Typical cases come last.
    for case in operator.edge_cases(Profile::Quick).into_iter().rev() {
        let [dense, spread] = operator.laid_out(&case).unwrap();
        let runs = [&dense, &spread]
            .iter()
            .all(|case| operator.cannot_run(case, device.environment()).is_none());
        if left.is_empty() || !runs || !seen.insert(dense.line()) {
            continue;
        }
        let dense = run(device, &dense);
        if dense.paths.iter().any(|path| left.contains(path))
            && spread.fields.contains_key("layouts")
        {
            let differing = differing(device, &dense, &spread);
            assert!(differing.is_empty(), "{}: {differing:?} depend on the layout", spread.line());
            left.retain(|path| !dense.paths.contains(path));
        }
    }
    // Paths that only some layouts take, for row sizes that no case chooses, write the same as
    // dense rows.
    for case in operator
        .edge_cases(Profile::Quick)
        .iter()
        .filter(|case| case.fields.contains_key("layouts"))
    {
        if left.is_empty() || operator.cannot_run(case, device.environment()).is_some() {
            continue;
        }
        let spread = run(device, case);
        if spread.paths.iter().any(|path| left.contains(path)) {
            let [dense, _] = operator.laid_out(case).unwrap();
            let differing = differing_runs(&run(device, &dense), &spread);
            assert!(differing.is_empty(), "{}: {differing:?} depend on the layout", case.line());
            left.retain(|path| !spread.paths.contains(path));
        }
    }
    left
}

#[test]
fn every_path_of_every_operator_writes_the_same_bits_wherever_its_tensors_lie() {
    if left_out(&LAYOUTS) {
        return;
    }
    for operator in concerned_operators() {
        let left = compare_until_every_path_ran(operator);
        assert!(left.is_empty(), "{}: no case of {left:?} could be laid out", operator.name());
    }
}

#[test]
fn a_tensor_that_is_read_at_the_stride_of_another_is_seen() {
    let (file, own) = ("swiglu.cu", "params.up + row * params.up_row_stride");
    let tree = support::device().tree();
    let text = tree.text(file).unwrap();
    assert_eq!(text.matches(own).count(), 1);
    let wrong = tree.with_text(
        file,
        text.replace(own, "params.up + row * params.gate_row_stride"),
        "a wrong stride",
    );
    let device = support::device().with_tree(wrong);
    let operator = registry::find("swiglu").unwrap();
    let [dense, spread] = operator.laid_out(&operator.edge_cases(Profile::Quick)[3]).unwrap();
    assert!(differing(&device, &run(&device, &dense), &spread).contains(&"y"));
}
