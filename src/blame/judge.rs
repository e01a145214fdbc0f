//! Each call of a run, held to its own budget.

use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;

use dsv4_reference::Products;
use rayon::prelude::*;
use serde::Serialize;

use super::calls::{Called, Place};
use super::shadow::{Shadow, TensorError, distance};
use crate::calls::observed::quietly;
use crate::judge::checks;
use crate::judge::truth::Truth;
use crate::operator::actual::Actual;
use crate::operator::declaration::Part;
use crate::record::Verdict;

/// A check of a call that failed.
#[derive(Clone, Debug, Serialize)]
pub struct Failure {
    /// The check.
    pub check: String,
    /// The tensor.
    pub tensor: String,
    /// What was found.
    pub message: String,
}

/// What was found about a call.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// Where the call is.
    #[serde(flatten)]
    pub place: Place,
    /// The largest share of a budget that an element uses, over all tensors.
    pub budget_used: f64,
    /// Elements that were compared.
    pub compared: u64,
    /// The checks that failed.
    pub failures: Vec<Failure>,
    /// The errors of its tensors; none for a run whose memory is not known.
    pub errors: Vec<TensorError>,
    /// How far its own error alone moves the last logits, of their root mean square. Known of some
    /// calls of the last step.
    pub effect: Option<f64>,
    /// Why the call could not be judged.
    pub skipped: Option<String>,
}

impl Finding {
    fn of(place: &Place) -> Self {
        Self {
            place: place.clone(),
            budget_used: 0.0,
            compared: 0,
            failures: Vec::new(),
            errors: Vec::new(),
            effect: None,
            skipped: None,
        }
    }

    /// Whether the call is outside its own budget.
    pub fn is_guilty(&self) -> bool {
        !self.failures.is_empty()
    }

    /// The most that it adds to a tensor's error.
    pub fn added(&self) -> f64 {
        self.errors.iter().map(|error| error.added).fold(0.0, f64::max)
    }

    /// The largest total error of its tensors.
    pub fn error(&self) -> Option<&TensorError> {
        self.errors.iter().max_by(|a, b| a.total.total_cmp(&b.total))
    }
}

/// Judges every call of a run, in the order of the calls.
pub fn all(calls: &[Called]) -> Vec<Finding> {
    let actual: Vec<Result<Actual, String>> = calls.par_iter().map(Called::actual).collect();
    let mut shadow = Shadow::default();
    let mut findings: Vec<Finding> = calls.iter().map(|call| Finding::of(&call.place)).collect();
    for ((call, actual), finding) in calls.iter().zip(&actual).zip(&mut findings) {
        let followed = actual.as_ref().map_err(String::clone).and_then(|actual| {
            fitting(|| shadow.follow(call, actual, false)).and_then(|followed| followed)
        });
        match followed {
            Ok(splits) => finding.errors = splits,
            Err(_) => shadow.forget(call),
        }
    }
    let judged = calls.par_iter().zip(&actual).zip(&mut findings);
    judged.for_each(|((call, actual), finding)| match actual {
        Ok(actual) => judge(call, actual, finding),
        Err(why) => finding.skipped = Some(why.clone()),
    });
    for (number, effect) in effects(calls, &actual, &candidates(calls, &actual, &findings)) {
        let found = findings.iter_mut().find(|finding| finding.place.number == number);
        found.into_iter().for_each(|finding| finding.effect = Some(effect));
    }
    findings
}

/// Calls that are named.
pub const NAMED: usize = 8;
/// The first operator of a step.
const START: &str = "embed_streams";
/// The operator and the tensor at the end of a model.
const END: (&str, &str) = ("lm_head", "logits");

/// The calls outside their budgets in their order, then those that move the logits most by their own
/// errors, then those that add most.
pub fn ranked(findings: &[Finding]) -> Vec<&Finding> {
    let judged = findings.iter().filter(|finding| finding.compared > 0);
    let (mut all, mut others): (Vec<_>, Vec<_>) = judged.partition(|finding| finding.is_guilty());
    let key = |finding: &Finding| (finding.effect.unwrap_or(-1.0), finding.added());
    others.sort_by(|a, b| {
        let ((a, of_a), (b, of_b)) = (key(a), key(b));
        b.total_cmp(&a).then(of_b.total_cmp(&of_a))
    });
    all.extend(others);
    all
}

/// Calls of the last step whose errors are followed to the end: those outside their budgets, and
/// those that add most. The rows that a call writes to a cache are followed as they are.
fn candidates(
    calls: &[Called],
    actual: &[Result<Actual, String>],
    findings: &[Finding],
) -> BTreeSet<usize> {
    let starts = |call: &Called| call.place.operator == START && call.place.layer.is_none();
    let from = calls.iter().rposition(starts).unwrap_or(0);
    let is_stored = |at: usize| {
        let outputs = |actual: &Actual| actual.outputs().any(|spec| spec.part == Part::State);
        actual[at].as_ref().map_or(true, outputs)
    };
    let of_step = (from..calls.len()).filter(|&at| !is_stored(at) || findings[at].is_guilty());
    let mut all: Vec<usize> = of_step.collect();
    all.sort_by(|&a, &b| {
        let guilt = findings[b].is_guilty().cmp(&findings[a].is_guilty());
        guilt.then(findings[b].added().total_cmp(&findings[a].added()))
    });
    all.into_iter().take(2 * NAMED).map(|at| calls[at].place.number).collect()
}

/// How far the own error of each of these calls moves the end of a run without other roundings.
fn effects(
    calls: &[Called],
    actual: &[Result<Actual, String>],
    of: &BTreeSet<usize>,
) -> Vec<(usize, f64)> {
    let ends = |call: &&Called| call.place.operator == END.0 && call.place.layer.is_none();
    let Some(end) = calls.iter().rposition(|call| ends(&call)) else { return Vec::new() };
    let (mut shadow, mut started) = (Shadow::default(), Vec::new());
    let run = |shadow: &mut Shadow, at: usize| {
        let ran = actual[at].as_ref().map(|actual| fitting(|| shadow.run(&calls[at], actual)));
        if !matches!(ran, Ok(Ok(Ok(())))) {
            shadow.forget(&calls[at]);
        }
    };
    for (at, call) in calls[..=end].iter().enumerate() {
        if let (true, Ok(actual)) = (of.contains(&call.place.number), &actual[at]) {
            let mut kicked = shadow.clone();
            if matches!(fitting(|| kicked.follow(call, actual, true)), Ok(Ok(_))) {
                started.push((at, kicked));
            }
        }
        run(&mut shadow, at);
    }
    let Some(right) = shadow.values(&calls[end], END.1) else { return Vec::new() };
    let moved = started.into_par_iter().filter_map(|(at, mut kicked)| {
        (at + 1..=end).for_each(|at| run(&mut kicked, at));
        let found = kicked.values(&calls[end], END.1)?;
        Some((calls[at].place.number, distance(&found, &right, &right)))
    });
    moved.collect()
}

/// The first call of a run that is outside its own budget, without those after it.
pub fn first(calls: &[Called]) -> Option<Finding> {
    calls.iter().find_map(|call| {
        let mut finding = Finding::of(&call.place);
        match call.actual() {
            Ok(actual) => judge(call, &actual, &mut finding),
            Err(why) => finding.skipped = Some(why),
        }
        finding.is_guilty().then_some(finding)
    })
}

/// The result of an oracle's work. Oracles index tensors that a case determines; those of a dump may
/// contradict each other.
fn fitting<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    let done = quietly(AssertUnwindSafe(work));
    done.ok_or_else(|| "its tensors do not fit each other".to_owned())
}

/// Holds a call to its budget.
fn judge(call: &Called, actual: &Actual, finding: &mut Finding) {
    if let Err(why) = fitting(|| hold(call, actual, finding)) {
        finding.skipped = Some(why);
    }
}

fn hold(call: &Called, actual: &Actual, finding: &mut Finding) {
    let oracle = |precision, products: &Products| actual.oracle(precision, products);
    let truth = match Truth::of_runs(actual.arithmetic(), oracle) {
        Ok(truth) => truth,
        Err(error) => return finding.skipped = Some(error.to_string()),
    };
    let outcome = checks::hold(&truth, &actual.run(&call.after));
    for check in &outcome.checks {
        finding.compared += check.compared;
        if let Some(metrics) = &check.metrics {
            finding.budget_used = finding.budget_used.max(metrics.budget_used);
        }
        if check.verdict != Verdict::Pass {
            finding.failures.push(Failure {
                check: check.check.as_str().to_owned(),
                tensor: check.tensor.clone(),
                message: check.message.clone(),
            });
        }
    }
    if outcome.checks.is_empty() {
        finding.skipped = Some("nothing of it is compared".to_owned());
    }
}
