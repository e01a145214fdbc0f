//! Diagnoses of invented records.

use serde_json::{Value, json};

use super::{Diagnosis, diagnose};
use crate::record::{CaseRecord, CheckRecord, Origin, Verdict};

fn check(name: &str, tensor: &str, fails: bool) -> CheckRecord {
    CheckRecord {
        check: name.into(),
        tensor: tensor.into(),
        verdict: if fails { Verdict::Fail } else { Verdict::Pass },
        compared: 64,
        message: if fails { "wrong".into() } else { String::new() },
        metrics: None,
        failing: None,
    }
}

fn case(fields: Value, paths: &[&str], checks: Vec<CheckRecord>) -> CaseRecord {
    CaseRecord {
        operator: "rms_norm".into(),
        replay: String::new(),
        case: fields,
        origin: Origin::Drawn,
        paths: paths.iter().map(|path| (*path).to_owned()).collect(),
        checks,
        kernel_seconds: 0.0,
        oracle_seconds: 0.0,
        skips: Vec::new(),
        batches: vec![],
        plan_number: None,
        untestable: None,
        seconds: None,
        our_seconds: None,
        unsupported: None,
    }
}

/// A sweep whose cases fail where `fails` returns true.
fn sweep(cases: u64, fails: impl Fn(u64, u64, bool, bool) -> bool) -> Vec<CaseRecord> {
    let one = |number: u64| {
        let mixed = number
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(31)
            .wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let (rows, width) = (mixed % 13, 1 + (mixed >> 20) % 300);
        let (weighted, scalar) = (mixed >> 40 & 1 == 0, !width.is_multiple_of(8));
        let path = if scalar { "rms_norm_forward_scalar" } else { "rms_norm_forward_block" };
        let backward = if scalar { "rms_norm_backward_scalar" } else { "rms_norm_backward_block" };
        let fields = json!({
            "operator": "rms_norm", "num_rows": rows, "width": width, "eps": 1e-6, "seed": mixed,
            "weight": weighted.then_some("f32"), "aliasing": if mixed >> 50 & 1 == 0 { "in_place" } else { "out_of_place" },
        });
        case(
            fields,
            &[path, backward],
            vec![check("forward", "y", fails(rows, width, weighted, scalar))],
        )
    };
    (0..cases).map(one).collect()
}

fn said(cases: &[CaseRecord]) -> Diagnosis {
    diagnose(None, &cases.iter().collect::<Vec<_>>()).expect("some fail")
}

fn assert_says(cases: &[CaseRecord], needles: &[&str]) {
    let sentences = said(cases).sentences;
    let first = sentences.first().unwrap_or_else(|| panic!("nothing is said"));
    for needle in needles {
        assert!(first.contains(needle), "`{needle}` is not in {sentences:#?}");
    }
}

#[test]
fn one_question_that_separates_is_said_with_its_counts() {
    let cases = sweep(60, |_, _, weighted, _| weighted);
    let failing = cases.iter().filter(|case| case.verdict() == Verdict::Fail).count();
    let others = 60 - failing;
    assert_says(
        &cases,
        &[
            &format!(
                "{failing} of {failing} failing cases: weight present; 0 of {others} with weight absent"
            ),
            "The same cases: weight = f32",
        ],
    );
    assert_eq!(
        said(&cases).heading(),
        format!("rms_norm: {failing} of 60 cases fail: forward of y in {failing}")
    );
}

#[test]
fn two_questions_are_joined_and_thresholds_are_round() {
    assert_says(
        &sweep(80, |_, _, weighted, scalar| weighted && scalar),
        &["weight present", " and ", "width % 8 != 0"],
    );
    assert_says(&sweep(80, |_, width, _, _| width > 128), &["width >"]);
    assert_says(&sweep(80, |rows, _, _, _| rows == 0), &["num_rows = 0"]);
}

#[test]
fn a_second_cause_is_a_second_rule() {
    let cases = sweep(160, |rows, width, weighted, _| weighted && width > 128 || rows == 0);
    let sentences = said(&cases).sentences;
    assert!(
        sentences.len() > 1 && sentences.iter().any(|sentence| sentence.contains("num_rows")),
        "{sentences:#?}"
    );
}

#[test]
fn failures_at_random_have_nothing_in_common() {
    let mut said_falsely = 0;
    for offset in 0..40u64 {
        let chance = |number: u64| {
            (number + 1000 * offset)
                .wrapping_mul(0xd6e8_feb8_6659_fd93)
                .rotate_left(17)
                .is_multiple_of(3)
        };
        let mut cases = sweep(50, |_, _, _, _| false);
        for (number, case) in (0..).zip(&mut cases) {
            case.checks = vec![check("forward", "y", chance(number))];
        }
        said_falsely += usize::from(!said(&cases).sentences.is_empty());
    }
    // One in twenty may be false.
    assert!(said_falsely <= 4, "{said_falsely} of 40");
}

#[test]
fn too_few_cases_say_nothing_and_cases_that_all_fail_say_so() {
    assert!(said(&sweep(4, |_, _, weighted, _| weighted)).sentences.is_empty());
    let all = said(&sweep(9, |_, _, _, _| true));
    assert_eq!(
        (all.heading().as_str(), all.sentences.len()),
        ("rms_norm: all 9 cases fail: forward of y in 9", 0)
    );
}

#[test]
fn statistics_of_a_tensor_that_fails_forward_are_no_findings_of_their_own() {
    let checks = vec![
        check("bias", "y", true),
        check("bias", "rstd", true),
        check("gradient", "dx", true),
        check("precision", "y", true),
        check("forward", "y", true),
        check("law: rows may be permuted", "y", true),
        check("guards", "y", true),
    ];
    let case = case(json!({"operator": "rms_norm"}), &[], checks);
    let findings = super::order::findings(&case);
    let names: Vec<String> =
        findings.iter().map(|finding| super::order::name_of(finding.check)).collect();
    assert_eq!(
        names,
        [
            "guards of y",
            "law: rows may be permuted of y",
            "forward of y",
            "gradient of dx",
            "bias of rstd"
        ]
    );
    assert_eq!(findings[2].company(), "with it: bias, precision");
}
