//! Oracles and kernels against golden files.
//!
//! An oracle must match the golden values up to rounding in f64. The bound is the error of the same
//! computation if every rounding of its working precision happened in f64 instead. That is the
//! spread of the `Working` runs times `2^-52 / 2^-23` (f32 is the widest type in which they round).
//! Half an ulp of f32 is added where the file stores f32. What the file's authors computed in f32
//! throughout (the rotary tables) must match within the budget of an f32 kernel. Kernels must match
//! the golden values within their budget.

use std::path::Path;
use std::time::Instant;

use dsv4_runtime::{DType, Device};

use crate::case::CaseError;
use crate::judge::agreement;
use crate::judge::budget::Budget;
use crate::judge::checks::{self, CheckOptions, Outcome};
use crate::judge::truth::Truth;
use crate::operator::golden_file::{self, GoldenError, GoldenFile};
use crate::operator::{AnyOperator, ExpectedTensor, GoldenCase, OracleTensor, half_ulp};
use crate::record::{CaseRecord, Check, CheckRecord, Origin, Verdict, figures, words};

/// Runs every check that a golden case allows. `device` is `None` where only oracles are checked.
pub fn run(file: &GoldenFile, golden: &GoldenCase, device: Option<&Device>) -> CaseRecord {
    let start = Instant::now();
    match Truth::of(&*golden.prepared, golden.prepared.arithmetic()) {
        Ok(truth) => {
            let seconds = start.elapsed().as_secs_f64();
            let record = run_by(&truth, file, golden, device);
            CaseRecord { oracle_seconds: seconds + record.oracle_seconds, ..record }
        }
        Err(error) => {
            let checks = vec![failed(Check::Oracle, "", error.to_string())];
            record(file, golden, Outcome { checks, ..Outcome::default() })
        }
    }
}

/// The same with known runs of the oracle for this very case.
pub fn run_by(
    truth: &Truth,
    file: &GoldenFile,
    golden: &GoldenCase,
    device: Option<&Device>,
) -> CaseRecord {
    let mut outcome = against_golden(golden, truth);
    if let (Some(device), None) = (device, &golden.kernel_skip) {
        let options = CheckOptions::of_kernels(0);
        let kernels = checks::run_by(truth, &*golden.prepared, device, options, |_| false);
        outcome.checks.extend(kernels.checks);
        outcome = Outcome { checks: outcome.checks, ..kernels };
    }
    record(file, golden, outcome)
}

fn record(file: &GoldenFile, golden: &GoldenCase, outcome: Outcome) -> CaseRecord {
    let operator = golden.prepared.operator();
    CaseRecord {
        operator: operator.to_owned(),
        case: serde_json::json!({ "operator": operator, "golden": file.name }),
        origin: Origin::Given,
        paths: outcome.paths,
        checks: outcome.checks,
        kernel_seconds: outcome.kernel_seconds,
        oracle_seconds: outcome.oracle_seconds,
        replay: format!("parity golden DIR --ops {operator} --files {}", file.name),
        skips: outcome.skips,
        batches: vec![],
        plan_number: None,
        untestable: outcome.untestable,
        seconds: None,
        our_seconds: None,
        unsupported: outcome.unsupported,
    }
}

/// Names of the files of a folder that concern some of the operators, in the index's order. The
/// kind is in the name, so no other file is read.
///
/// # Errors
/// Those of [`golden_file::names_in`].
pub fn files_about(
    dir: &Path,
    operators: &[&'static AnyOperator],
) -> Result<Vec<String>, GoldenError> {
    let mut names = golden_file::names_in(dir)?;
    names.retain(|name| {
        operators
            .iter()
            .any(|operator| operator.golden_kinds().contains(&golden_file::kind_of(name)))
    });
    Ok(names)
}

/// A golden file as cases of those of the given operators that can read it.
///
/// # Errors
/// A file that should fit an operator but does not.
pub fn cases_of(
    file: &GoldenFile,
    operators: &[&'static AnyOperator],
) -> Result<Vec<GoldenCase>, CaseError> {
    let mut cases = Vec::new();
    for operator in operators {
        cases.extend(operator.golden(file)?);
    }
    Ok(cases)
}

fn failed(check: Check, tensor: &str, message: String) -> CheckRecord {
    CheckRecord {
        check,
        tensor: tensor.to_owned(),
        verdict: Verdict::Error,
        compared: 0,
        message: words::message(message),
        metrics: None,
        failing: None,
    }
}

fn against_golden(golden: &GoldenCase, truth: &Truth) -> Outcome {
    let mut outcome = Outcome::default();
    for expected in &golden.expected {
        let Some(index) = truth.exact.iter().position(|tensor| tensor.name == expected.name) else {
            outcome.checks.push(failed(
                Check::Golden,
                expected.name,
                "the oracle has no such tensor".into(),
            ));
            continue;
        };
        outcome.checks.push(compare(
            expected,
            &truth.exact[index],
            &truth.budget(index, DType::F32),
        ));
    }
    outcome
}

/// The oracle's tensor against the file's.
fn compare(expected: &ExpectedTensor, exact: &OracleTensor, working: &Budget) -> CheckRecord {
    let mut record = failed(Check::Golden, expected.name, String::new());
    if expected.values.len() != exact.values.len() {
        record.message = format!(
            "the file has {} elements, the oracle {}",
            expected.values.len(),
            exact.values.len()
        );
        return record;
    }
    if expected.values.is_empty() {
        record.message = "compared no element".to_owned();
        return record;
    }
    let narrower = f64::EPSILON / f64::from(f32::EPSILON);
    let allowed = |i: usize| {
        if expected.computed_f32 {
            return working.allowed[i];
        }
        let stored =
            if expected.stored_f32 { half_ulp(DType::F32, expected.values[i]) } else { 0.0 };
        working.allowed[i] * narrower + stored
    };
    let used = |i: usize| match (exact.values[i], expected.values[i]) {
        (ours, theirs) if theirs.is_finite() => agreement::budget_use(ours, theirs, allowed(i)),
        // An infinity or NaN agrees only with the same value.
        (ours, theirs) if ours == theirs || ours.is_nan() && theirs.is_nan() => 0.0,
        _ => f64::INFINITY,
    };
    record.compared = exact.values.len() as u64;
    record.verdict = Verdict::Pass;
    if let Some(worst) = (0..exact.values.len()).max_by(|&a, &b| used(a).total_cmp(&used(b)))
        && used(worst) > 1.0
    {
        record.verdict = Verdict::Fail;
        record.message = format!(
            "`{}` at {:?}: oracle {}, golden {}, allowed {}",
            expected.stored_as,
            agreement::unflatten(worst, &exact.shape),
            figures::element(exact.values[worst]),
            figures::element(expected.values[worst]),
            figures::measure(allowed(worst), 3)
        );
    }
    record
}
