//! A tensor against the oracle: within its budget, exactly, or as a selection.

use std::sync::Arc;

use super::{Outcome, side_check};
use crate::judge::budget::Budget;
use crate::judge::runner::Runner;
use crate::judge::selection::Scores;
use crate::judge::truth::{Held, Truth};
use crate::judge::{agreement, failing, selection};
use crate::operator::{
    Comparison, KernelRun, KernelTensor, OracleTensor, PreparedCase, RoundingPoints,
};
use crate::record::{Check, Metrics, NOT_JUDGED, Verdict, WholeTensor, agreement_of, figures};

/// Compares a tensor with the oracle's in the way that the tensor declares.
pub(super) fn compare(
    truth: &Truth,
    index: usize,
    found: &KernelTensor,
    run: &KernelRun,
    (held, power): (&Arc<Held>, bool),
    outcome: &mut Outcome,
) {
    let exact = &truth.exact[index];
    if found.tensor.shape != exact.shape {
        let message = format!(
            "the kernel's shape is {:?}, the oracle's {:?}",
            found.tensor.shape, exact.shape
        );
        outcome.push(side_check(exact.side), exact.name, Verdict::Error, 0, message);
        return;
    }
    if exact.values.is_empty() {
        return;
    }
    match found.comparison {
        Comparison::Rounded => agreement_checks(truth, index, found, (held, power), outcome),
        Comparison::Exact => exact_check(exact, found, &held.budget, outcome),
        Comparison::Selection { scores } => {
            selection_check(truth, exact, found, scores, run, outcome)
        }
    }
}

pub(super) fn agreement_checks(
    truth: &Truth,
    index: usize,
    found: &KernelTensor,
    (held, power): (&Held, bool),
    outcome: &mut Outcome,
) {
    let exact = &truth.exact[index];
    let kernel = found.tensor.to_f64();
    let compared = exact.values.iter().filter(|value| value.is_finite()).count() as u64;
    if compared > 0 {
        // Where nothing is finite (all rows empty), the special values decide the case.
        let metrics = Metrics {
            power: if power { truth.power(index, held) } else { None },
            ..agreement::measure(&kernel, exact, &held.budget, &held.steps)
        };
        let powerless = truth.is_powerless(index, held);
        agreement_verdict(exact, &kernel, (held, powerless), metrics, compared, outcome);
    }
    special_values(exact, &kernel, &held.budget, outcome);
}

/// Gradients against those that follow from the kernels' own saved outputs. The rounding of these
/// outputs then hides nothing. `left_out` are outputs that the kernel does not return.
pub(super) fn saved_checks(
    prepared: &dyn PreparedCase,
    runner: &dyn Runner,
    (run, left_out): (&KernelRun, &[&str]),
    power: bool,
    outcome: &mut Outcome,
) {
    let arithmetic = runner.arithmetic(prepared);
    let truth = match Truth::of_saved(prepared, run, arithmetic) {
        Ok(None) => return,
        Ok(Some(truth)) => truth,
        // A kernel that keeps to itself what it saves is judged by the oracle's gradients alone.
        Err(_) if !left_out.is_empty() => {
            let why = format!("the kernel does not return {}", left_out.join(", "));
            return outcome.skip(Check::GradientOfSaved.as_str(), &why, 1);
        }
        Err(error) => {
            return outcome.push(Check::GradientOfSaved, "", Verdict::Error, 0, error.to_string());
        }
    };
    if arithmetic.points == RoundingPoints::Undeclared {
        return outcome.skip(
            Check::GradientOfSaved.as_str(),
            "the kernel does not say where it rounds",
            truth.exact.len() as u64,
        );
    }
    for (index, exact) in truth.exact.iter().enumerate() {
        let Some(found) = run.tensors.iter().find(|tensor| tensor.name == exact.name) else {
            continue;
        };
        // A tensor of another shape has already been reported.
        if found.tensor.shape != exact.shape || exact.values.is_empty() {
            continue;
        }
        let held = match truth.held(index, found) {
            Ok(held) => held,
            Err(unheld) => {
                outcome.unheld(Check::GradientOfSaved, exact.name, unheld);
                continue;
            }
        };
        // All findings about a gradient, as one separate verdict.
        let mut of_gradient = Outcome::default();
        agreement_checks(&truth, index, found, (&held, power), &mut of_gradient);
        let problem = of_gradient.failures().map(|check| check.message.clone()).next();
        let metrics = of_gradient.checks.iter_mut().find_map(|check| check.metrics.take());
        let failing = of_gradient.checks.iter_mut().find_map(|check| check.failing.take());
        outcome.verdict(Check::GradientOfSaved, exact.name, exact.values.len() as u64, problem);
        outcome.name_elements(failing.map(|failing| *failing));
        if let Some(record) = outcome.checks.last_mut() {
            record.metrics = metrics;
        }
    }
}

/// Equal or wrong: the differences between the oracle's runs are no tolerance.
pub(super) fn exact_check(
    exact: &OracleTensor,
    found: &KernelTensor,
    budget: &Budget,
    outcome: &mut Outcome,
) {
    let kernel = found.tensor.to_f64();
    let unequal = selection::unequal(&found.tensor, exact);
    let problem = unequal.first().map(|&first| {
        format!(
            "{} of {} elements differ; first at {:?}: kernel {}, oracle {}",
            unequal.len(),
            kernel.len(),
            agreement::unflatten(first, &exact.shape),
            figures::field(kernel[first]),
            figures::field(exact.values[first])
        )
    });
    outcome.verdict(side_check(exact.side), exact.name, kernel.len() as u64, problem);
    outcome.name_elements(failing::elements(&unequal, &exact.shape, None));
    if let Some(record) = outcome.checks.last_mut() {
        record.metrics =
            Some(Box::new(agreement::measure(&kernel, exact, budget, &found.tensor.dtype.into())));
    }
}

pub(super) fn selection_check(
    truth: &Truth,
    exact: &OracleTensor,
    found: &KernelTensor,
    scores: &str,
    run: &KernelRun,
    outcome: &mut Outcome,
) {
    let problem = truth.scores(scores, run).and_then(|(of, allowed)| {
        selection::problem(&found.tensor, exact, Scores { exact: of, allowed: &allowed })
    });
    match problem {
        Ok(problem) => {
            outcome.verdict(side_check(exact.side), exact.name, exact.values.len() as u64, problem)
        }
        Err(message) => {
            outcome.push(side_check(exact.side), exact.name, Verdict::Error, 0, message)
        }
    }
}

/// The message for a tensor that agrees with the oracle within bounds that an error of a tenth
/// would pass, too.
pub const POWERLESS: &str = "rounding is as large as the values: an error of 10 % would pass";

pub(super) fn agreement_verdict(
    exact: &OracleTensor,
    kernel: &[f64],
    (held, powerless): (&Held, bool),
    metrics: Metrics,
    compared: u64,
    outcome: &mut Outcome,
) {
    let finite = || (0..kernel.len()).filter(|&i| exact.values[i].is_finite());
    let allowed = &held.budget.allowed;
    let over: Vec<usize> = finite()
        .filter(|&i| agreement::budget_use(kernel[i], exact.values[i], allowed[i]) > 1.0)
        .collect();
    let worst = &metrics.worst;
    let problem = (!over.is_empty()).then(|| {
        format!(
            "{} of {compared} elements beyond budget; worst at {:?}: kernel {}, oracle {}, allowed error {}",
            over.len(),
            worst.index,
            figures::element(worst.kernel),
            figures::element(worst.oracle),
            figures::measure(worst.allowed, 3)
        )
    });
    if powerless && problem.is_none() {
        outcome.skip(agreement_of(exact.name), POWERLESS, 1);
    } else {
        outcome.verdict(side_check(exact.side), exact.name, compared, problem);
        outcome.name_elements(failing::elements(
            &over,
            &exact.shape,
            Some((kernel, &exact.values)),
        ));
    }
    let not_finite = finite().filter(|&i| !kernel[i].is_finite()).count();
    let problem = (not_finite > 0)
        .then(|| format!("{not_finite} of {compared} elements are no finite number"));
    let whole = whole_tensor(exact, kernel, held);
    if let (Some(record), false) = (outcome.checks.last_mut(), powerless) {
        record.metrics = Some(Box::new(Metrics { whole: whole.clone(), ..metrics }));
    }
    outcome.verdict(Check::Finite, exact.name, compared, problem);
    whole_verdict(exact, kernel, held, compared, outcome);
}

pub(super) fn whole_tensor(
    exact: &OracleTensor,
    kernel: &[f64],
    held: &Held,
) -> Option<WholeTensor> {
    let yardstick = held.yardstick.as_ref()?;
    let numbers = yardstick.numbers(exact, kernel);
    Some(WholeTensor {
        rounding: yardstick.points,
        bias: numbers.bias,
        bias_low: yardstick.bias[0],
        bias_high: yardstick.bias[1],
        energy: numbers.energy,
        energy_allowed: yardstick.energy,
        equal: numbers.equal,
        equal_required: yardstick.equal.max(0.0),
    })
}

/// The tensor as a whole: its bias, where the kernel declares how it rounds, and its precision.
pub(super) fn whole_verdict(
    exact: &OracleTensor,
    kernel: &[f64],
    held: &Held,
    compared: u64,
    outcome: &mut Outcome,
) {
    let Some(yardstick) = &held.yardstick else { return };
    if !yardstick.is_bound() {
        return outcome.skip(agreement_of(exact.name), NOT_JUDGED, 1);
    }
    let [bias, precision] = yardstick.problems(yardstick.numbers(exact, kernel));
    if yardstick.points == RoundingPoints::Undeclared {
        outcome.skip(Check::Bias.as_str(), "the kernel does not say where it rounds", 1);
    } else {
        outcome.verdict(Check::Bias, exact.name, compared, bias);
    }
    outcome.verdict(Check::Precision, exact.name, compared, precision);
}

/// NaN, infinities and structural zeros are exactly where the oracle has them, and nowhere else.
pub(super) fn special_values(
    exact: &OracleTensor,
    kernel: &[f64],
    budget: &Budget,
    outcome: &mut Outcome,
) {
    let class = |value: f64| (value.is_nan(), value == f64::INFINITY, value == f64::NEG_INFINITY);
    let structural_zero = |i: usize| exact.values[i] == 0.0 && budget.allowed[i] == 0.0;
    let differs = |i: &usize| {
        class(kernel[*i]) != class(exact.values[*i]) || structural_zero(*i) && kernel[*i] != 0.0
    };
    let special =
        (0..kernel.len()).filter(|&i| !exact.values[i].is_finite() || structural_zero(i)).count();
    let wrong: Vec<usize> = (0..kernel.len()).filter(differs).collect();
    let problem = wrong.first().map(|&first| {
        format!(
            "{} element(s) differ in kind; first at {:?}: kernel {}, oracle {} ({special} special values in the oracle)",
            wrong.len(),
            agreement::unflatten(first, &exact.shape),
            figures::element(kernel[first]),
            figures::element(exact.values[first])
        )
    });
    outcome.verdict(Check::SpecialValues, exact.name, kernel.len() as u64, problem);
    outcome.name_elements(failing::elements(&wrong, &exact.shape, None));
}
