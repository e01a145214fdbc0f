//! Oracles and kernels against what an independent implementation computed.

use dsv4_kernels::runtime::DType;
use dsv4_parity::judge::checks::Truth;
use dsv4_parity::judge::golden::{self, GoldenFile};
use dsv4_parity::judge::golden_run;
use dsv4_parity::operator::registry;
use dsv4_parity::operator::{ExpectedTensor, GoldenCase, OracleTensor, half_ulp};
use dsv4_parity::record::{CheckRecord, Verdict};

use crate::support;

/// Every golden file that is about an operator, as that operator's cases.
fn files_of(operator: &str) -> Vec<(GoldenFile, Vec<GoldenCase>)> {
    let dir = support::fixtures().join("golden");
    let operator = registry::find(operator).unwrap();
    golden::index(&dir)
        .unwrap()
        .iter()
        .filter_map(|name| {
            let file = golden::read(&dir.join(name)).unwrap();
            let cases = golden_run::cases_of(&file, &[operator]).unwrap();
            (!cases.is_empty()).then_some((file, cases))
        })
        .collect()
}

/// Every file agrees, for the oracle and (but for `kernel_skips` cases) for the kernels.
fn assert_agrees(operator: &str, files: usize, kernel_skips: usize) {
    let found = files_of(operator);
    assert_eq!(found.len(), files, "golden files about {operator}");
    let mut skipped = 0;
    for (file, cases) in &found {
        for case in cases {
            let record = golden_run::run(file, case, Some(support::device()));
            let failed: Vec<_> = record.checks.iter().filter(|c| c.verdict != Verdict::Pass).collect();
            assert!(failed.is_empty(), "{}: {failed:#?}", file.name);
            assert!(record.checks.iter().all(|c| c.compared > 0));
            let golden = record.checks.iter().filter(|c| c.check == "golden").count();
            assert_eq!(golden, case.expected.len(), "{}: golden tensors that were compared", file.name);
            assert!(golden > 0, "{}: nothing is compared with the file", file.name);
            match &case.kernel_skip {
                Some(why) => {
                    eprintln!("skipped the kernel on {}: {why}", file.name);
                    skipped += 1;
                }
                None => assert!(record.checks.iter().any(|c| c.check == "forward"), "{}: no kernel ran", file.name),
            }
        }
    }
    assert_eq!(skipped, kernel_skips, "cases without a kernel");
}

#[test]
fn rms_norm_agrees_with_its_golden_files() {
    assert_agrees("rms_norm", 6, 0);
}

#[test]
fn rope_agrees_with_its_golden_files() {
    assert_agrees("rope", 7, 0);
}

#[test]
fn sparse_attention_agrees_with_its_golden_files() {
    // head_dim 24 is no multiple of the 16 that a matrix instruction takes.
    assert_agrees("sparse_attention", 5, 1);
}

#[test]
fn decode_attention_agrees_with_the_golden_files_of_attention() {
    // As above; no golden file knows FP8 rows.
    assert_agrees("decode_attention", 5, 1);
}

/// What `golden_run` allows an oracle's element: the working spread at the width of f64, and the rounding of the
/// file.
fn allowed(expected: &ExpectedTensor, truth: &Truth, index: usize, element: usize) -> f64 {
    let working = truth.budget(index, DType::F32).allowed[element];
    if expected.computed_f32 {
        return working;
    }
    let stored = if expected.stored_f32 { half_ulp(DType::F32, expected.values[element]) } else { 0.0 };
    working * (f64::EPSILON / f64::from(f32::EPSILON)) + stored
}

/// The finite element of largest magnitude.
fn largest(values: &[f64]) -> Option<usize> {
    let finite = (0..values.len()).filter(|&i| values[i].is_finite());
    finite.max_by(|&a, &b| values[a].abs().total_cmp(&values[b].abs()))
}

fn golden_check<'a>(checks: &'a [CheckRecord], tensor: &str) -> &'a CheckRecord {
    checks.iter().find(|c| c.check == "golden" && c.tensor == tensor).expect("a golden check of each tensor")
}

/// In every file and tensor a change of one element by three allowances is noticed, and nothing else is: one
/// allowance is the element's, another brings it back where the oracle lies on the other side.
fn assert_perturbations_are_noticed(operator: &str) {
    let mut noticed = 0;
    for (file, cases) in files_of(operator) {
        for mut case in cases {
            let truth = Truth::of(&*case.prepared).unwrap();
            let unchanged = golden_run::run(&file, &case, None);
            for number in 0..case.expected.len() {
                let expected = &case.expected[number];
                let position = |t: &OracleTensor| t.name == expected.name;
                let index = truth.exact.iter().position(position).expect("the oracle has the tensor");
                let Some(element) = largest(&expected.values) else { continue };
                let (name, original) = (expected.name, expected.values[element]);
                let allowed = allowed(expected, &truth, index, element);
                // A table's entry may be exact: then the smallest change that the file could hold.
                let step = if allowed > 0.0 { 3.0 * allowed } else { 2.0 * half_ulp(DType::F32, original) };
                // A kernel of bf16 could not tell: this comparison is far sharper than any kernel's.
                assert!(step < half_ulp(DType::Bf16, original), "{}: {name} allows {allowed:e}", file.name);
                case.expected[number].values[element] = original + step;
                let record = golden_run::run(&file, &case, None);
                let check = golden_check(&record.checks, name);
                assert_eq!(check.verdict, Verdict::Fail, "{}: {name} moved by {step:e} of {original:e}", file.name);
                assert!(!check.message.is_empty());
                for (before, after) in unchanged.checks.iter().zip(&record.checks).filter(|(b, _)| b.tensor != name) {
                    assert_eq!(before, after, "{}: a change of {name} shows elsewhere", file.name);
                }
                case.expected[number].values[element] = original;
                noticed += 1;
            }
        }
    }
    assert!(noticed > 0, "nothing was changed");
}

#[test]
fn a_changed_golden_value_of_rms_norm_is_noticed() {
    assert_perturbations_are_noticed("rms_norm");
}

#[test]
fn a_changed_golden_value_of_rope_is_noticed() {
    assert_perturbations_are_noticed("rope");
}

#[test]
fn a_changed_golden_value_of_sparse_attention_is_noticed() {
    assert_perturbations_are_noticed("sparse_attention");
}

#[test]
fn a_changed_golden_value_of_attention_is_noticed_by_decode_attention() {
    assert_perturbations_are_noticed("decode_attention");
}

#[test]
fn a_golden_value_that_is_no_finite_number_is_noticed_where_the_oracle_has_one() {
    let (file, mut cases) = files_of("rms_norm").swap_remove(0);
    for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let original = std::mem::replace(&mut cases[0].expected[0].values[5], value);
        let record = golden_run::run(&file, &cases[0], None);
        let check = golden_check(&record.checks, cases[0].expected[0].name);
        assert_ne!(check.verdict, Verdict::Pass, "{value} in {}", check.tensor);
        cases[0].expected[0].values[5] = original;
    }
}

#[test]
fn a_golden_tensor_of_another_length_or_name_is_an_error() {
    let (file, mut cases) = files_of("rms_norm").swap_remove(0);
    let case = &mut cases[0];
    case.expected[0].values.pop();
    let record = golden_run::run(&file, case, None);
    assert_eq!(golden_check(&record.checks, case.expected[0].name).verdict, Verdict::Error);
    case.expected[0].name = "absent";
    let record = golden_run::run(&file, case, None);
    assert_eq!(golden_check(&record.checks, "absent").verdict, Verdict::Error);
}
