//! What the comparison with a golden file sees. Every operator's files are tests of their own (`tests/operators`).

use dsv4_parity::judge::checks::Truth;
use dsv4_parity::judge::golden::{self, GoldenFile};
use dsv4_parity::judge::golden_run;
use dsv4_parity::operator::GoldenCase;
use dsv4_parity::operator::registry;
use dsv4_parity::record::{CheckRecord, Verdict};

use crate::support;

/// The first golden file about rms_norm, with what the oracle says of it.
fn first_file() -> (GoldenFile, GoldenCase, Truth) {
    let dir = support::fixtures().join("golden");
    let operator = registry::find("rms_norm").unwrap();
    let names = golden::index(&dir).unwrap();
    let found = names.iter().find_map(|name| {
        let file = golden::read(&dir.join(name)).unwrap();
        let case = golden_run::cases_of(&file, &[operator]).unwrap().pop()?;
        Some((file, case))
    });
    let (file, case) = found.expect("a file about rms_norm");
    let truth = Truth::of(&*case.prepared).unwrap();
    (file, case, truth)
}

fn golden_check<'a>(checks: &'a [CheckRecord], tensor: &str) -> &'a CheckRecord {
    checks.iter().find(|c| c.check == "golden" && c.tensor == tensor).expect("a golden check of each tensor")
}

#[test]
fn a_golden_value_that_is_no_finite_number_is_noticed_where_the_oracle_has_one() {
    let (file, mut case, truth) = first_file();
    for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let original = std::mem::replace(&mut case.expected[0].values[5], value);
        let record = golden_run::run_by(&truth, &file, &case, None);
        let check = golden_check(&record.checks, case.expected[0].name);
        assert_ne!(check.verdict, Verdict::Pass, "{value} in {}", check.tensor);
        case.expected[0].values[5] = original;
    }
}

#[test]
fn a_golden_tensor_of_another_length_or_name_is_an_error() {
    let (file, mut case, truth) = first_file();
    case.expected[0].values.pop();
    let record = golden_run::run_by(&truth, &file, &case, None);
    assert_eq!(golden_check(&record.checks, case.expected[0].name).verdict, Verdict::Error);
    case.expected[0].name = "absent";
    let record = golden_run::run_by(&truth, &file, &case, None);
    assert_eq!(golden_check(&record.checks, "absent").verdict, Verdict::Error);
}
