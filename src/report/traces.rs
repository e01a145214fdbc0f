//! What a sweep found of a Solution, as Traces of FlashInfer-Bench: a line of JSON for each case.

use serde_json::{Map, Value, json};

use super::numbers;
use crate::calls::fields::leaves;
use crate::case::Case;
use crate::external::definition::Task;
use crate::record::{CaseRecord, Check, CheckRecord, Metrics, Report, Verdict};

/// A Trace of each case that ran. Times are those that the worker measured.
pub fn lines(task: &Task, report: &Report) -> Vec<Value> {
    let trace = |record: &CaseRecord| {
        let case = Case::parse(&record.case.to_string()).ok()?;
        Some(json!({
            "definition": task.definition,
            "workload": workload(task, &case),
            "solution": task.solution,
            "evaluation": evaluation(record, report),
        }))
    };
    report.cases.iter().filter_map(trace).collect()
}

/// The case as sizes and inputs. Its line, in the evaluation's log, determines the data.
fn workload(task: &Task, case: &Case) -> Value {
    let leaves = leaves(case);
    let value = |path: &str| leaves.get(path).cloned().unwrap_or_default();
    let input = |(name, field): &(String, Option<String>)| {
        let input = match field {
            Some(path) => json!({ "type": "scalar", "value": value(path) }),
            None => json!({ "type": "random" }),
        };
        (name.clone(), input)
    };
    let axes: Map<String, Value> =
        task.varying.iter().map(|axis| (axis.clone(), value(axis))).collect();
    let inputs: Map<String, Value> = task.inputs.iter().map(input).collect();
    json!({ "axes": axes, "inputs": inputs, "uuid": case.digest() })
}

fn evaluation(record: &CaseRecord, report: &Report) -> Value {
    let failing = || record.checks.iter().filter(|check| check.verdict != Verdict::Pass);
    let status = match record.verdict() {
        Verdict::Pass => "PASSED",
        _ if failing().any(|check| check.check == Check::Launch) => "RUNTIME_ERROR",
        _ => "INCORRECT_NUMERICAL",
    };
    let message =
        |check: &CheckRecord| format!("{} {}: {}", check.check, check.tensor, check.message);
    let log: Vec<String> =
        [record.case.to_string()].into_iter().chain(failing().map(message)).collect();
    let mut evaluation = json!({
        "status": status,
        "environment": {
            "hardware": report.environment.device,
            "libs": { "dsv4-parity": env!("CARGO_PKG_VERSION") },
        },
        "timestamp": numbers::utc(report.started_unix),
        "log": log.join("\n"),
    });
    if status != "RUNTIME_ERROR" {
        evaluation["correctness"] = correctness(record);
    }
    if status == "PASSED" {
        evaluation["performance"] = performance(record);
    }
    evaluation
}

/// The largest errors of all tensors. The relative one is that of the element of each tensor that
/// used most of its budget.
fn correctness(record: &CaseRecord) -> Value {
    let metrics = || record.checks.iter().filter_map(|check| check.metrics.as_deref());
    // The format writes numbers that are not finite as words.
    let largest = |of: &dyn Fn(&Metrics) -> f64| {
        let largest =
            metrics().map(of).fold(0.0, |a: f64, b| if b.is_nan() { b } else { a.max(b) });
        match largest {
            largest if largest.is_nan() => json!("NaN"),
            f64::INFINITY => json!("Infinity"),
            largest => json!(largest),
        }
    };
    let relative = |metrics: &Metrics| {
        let worst = &metrics.worst;
        let error = (worst.kernel - worst.oracle).abs();
        if error == 0.0 { 0.0 } else { error / worst.oracle.abs() }
    };
    json!({
        "max_absolute_error": largest(&|metrics| metrics.max_abs),
        "max_relative_error": largest(&relative),
        "extra": { "budget_used": largest(&|metrics| metrics.budget_used) },
    })
}

fn performance(record: &CaseRecord) -> Value {
    let milliseconds = |seconds: Option<crate::record::Seconds>| {
        1e3 * seconds.and_then(|seconds| seconds.forward).unwrap_or_default()
    };
    let (own, ours) = (milliseconds(record.seconds), milliseconds(record.our_seconds));
    let speedup = if own > 0.0 { ours / own } else { 0.0 };
    json!({ "latency_ms": own, "reference_latency_ms": ours, "speedup_factor": speedup })
}
