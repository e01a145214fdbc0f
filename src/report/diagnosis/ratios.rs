//! Uniform factors that are known numbers: a scalar of the case, a count, a power of two, their
//! inverses, squares and roots.
//!
//! A factor is uniform where what it leaves of the tensor is no more than the budget allows. It is
//! a known number where the two differ by no more than a right kernel's bias may ([`WholeTensor`]).
//! For a kernel that does not declare where it rounds, the budget is the limit. With many known
//! numbers, one fits by chance. So a number is named only if the condition below holds. There `tol`
//! belongs to each factor that differs from the others. `D` is the range of the logarithms of the
//! case's known numbers.
//!
//! ```text
//! numbers * product of (2 tol / D)  <=  FALSE
//! ```

use std::collections::BTreeMap;

use super::features;
use super::rules::FALSE;
use crate::record::{CaseRecord, CheckRecord, Metrics, OperatorRecord, WholeTensor, figures};

/// Known numbers that are named where several fit.
const MOST_NAMES: usize = 2;

/// A number that a reader knows.
#[derive(Clone, Debug)]
struct Known {
    name: String,
    value: f64,
    /// What a kernel may have done that multiplies its result by it.
    question: &'static str,
    /// Longer names come later.
    rank: u32,
}

/// The factor of one tensor of one case.
struct Measured {
    factor: f64,
    tolerance: f64,
    known: Vec<Known>,
}

/// The factor by which a tensor is multiplied.
pub(super) struct Ratio {
    /// The tensor.
    pub(super) tensor: String,
    /// The factor of the first case.
    factor: f64,
    /// Names of the known number, and a question; empty where it is not a known number.
    names: Vec<String>,
    question: &'static str,
    /// Cases with a uniform factor, and how many cases fail.
    cases: (usize, usize),
    /// Whether the factor is the same in all of them.
    is_constant: bool,
}

/// The factors of the tensors that fail forward or gradient checks.
pub(super) fn ratios(operator: Option<&OperatorRecord>, cases: &[&CaseRecord]) -> Vec<Ratio> {
    let mut of_tensor: Vec<(&str, Vec<(&CaseRecord, &CheckRecord)>)> = Vec::new();
    for case in cases {
        for check in super::order::findings(case).iter().map(|finding| finding.check) {
            if !check.check.is_agreement() || check.metrics.is_none() {
                continue;
            }
            match of_tensor.iter_mut().find(|(tensor, _)| *tensor == check.tensor) {
                Some((_, found)) => found.push((case, check)),
                None => of_tensor.push((&check.tensor, vec![(case, check)])),
            }
        }
    }
    of_tensor.iter().filter_map(|(tensor, found)| ratio(operator, tensor, found)).collect()
}

fn ratio(
    operator: Option<&OperatorRecord>,
    tensor: &str,
    found: &[(&CaseRecord, &CheckRecord)],
) -> Option<Ratio> {
    let measured: Vec<Measured> = found
        .iter()
        .filter_map(|(case, check)| {
            let (factor, tolerance) = uniform(check)?;
            Some(Measured { factor, tolerance, known: known(operator, case, check) })
        })
        .collect();
    // A factor that half of the failing cases do not share is not a factor of the kernel.
    if measured.is_empty() || 2 * measured.len() < found.len() {
        return None;
    }
    let first = &measured[0];
    let is_constant =
        measured.iter().all(|one| close(one.factor, first.factor, one.tolerance + first.tolerance));
    let mut fitting: Vec<&Known> =
        first.known.iter().filter(|known| fits_all(known, &measured)).collect();
    let numbers = first.known.len() as f64;
    fitting.retain(|_| numbers * chance(&measured) <= FALSE);
    fitting.sort_by_key(|known| known.rank);
    if fitting.is_empty() && !(is_constant && measured.len() > 1) {
        return None;
    }
    Some(Ratio {
        tensor: tensor.to_owned(),
        factor: first.factor,
        names: fitting.iter().take(MOST_NAMES).map(|known| known.name.clone()).collect(),
        question: fitting.first().map_or("", |known| known.question),
        cases: (measured.len(), found.len()),
        is_constant,
    })
}

fn close(a: f64, b: f64, tolerance: f64) -> bool {
    (a / b - 1.0).abs() <= tolerance
}

fn fits_all(known: &Known, measured: &[Measured]) -> bool {
    measured.iter().all(|one| {
        let same = one.known.iter().find(|other| other.name == known.name);
        same.is_some_and(|same| close(one.factor, same.value, one.tolerance))
    })
}

/// The probability that numbers between the smallest and the largest known one are that near to a
/// given one, for the factors that differ from each other.
fn chance(measured: &[Measured]) -> f64 {
    let mut unlike: Vec<&Measured> = Vec::new();
    for one in measured {
        match unlike
            .iter_mut()
            .find(|other| close(one.factor, other.factor, one.tolerance + other.tolerance))
        {
            Some(other) if one.tolerance < other.tolerance => *other = one,
            Some(_) => {}
            None => unlike.push(one),
        }
    }
    let of_one = |one: &&Measured| {
        let logarithms = one.known.iter().map(|known| known.value.abs().ln());
        let (low, high) =
            logarithms.fold((f64::MAX, f64::MIN), |(low, high), one| (low.min(one), high.max(one)));
        (2.0 * one.tolerance / (high - low)).min(1.0)
    };
    unlike.iter().map(of_one).product()
}

/// The factor that explains a tensor within its budget, and how far it may be from the
/// intended one.
fn uniform(check: &CheckRecord) -> Option<(f64, f64)> {
    let metrics = check.metrics.as_ref()?;
    let spread = metrics.budget_relative;
    let whole = metrics.cosine * metrics.norm_ratio;
    let left = (1.0 - metrics.cosine * metrics.cosine).max(0.0).sqrt();
    // The errors of fp32, the type in which a case holds its scalars.
    let least = f64::from(f32::EPSILON);
    let found = if left <= spread {
        (whole, tolerance(metrics).max(least))
    } else {
        let factor = check.failing.as_ref()?.factor?;
        (factor.rest <= spread).then_some((factor.value, spread.max(least)))?
    };
    let (factor, tolerance) = found;
    (tolerance < 0.5 && factor.is_finite() && !close(factor, 1.0, tolerance)).then_some(found)
}

fn tolerance(metrics: &Metrics) -> f64 {
    match &metrics.whole {
        Some(WholeTensor { bias_low, bias_high, .. })
            if bias_low.is_finite() && bias_high.is_finite() =>
        {
            bias_low.abs().max(bias_high.abs()).min(metrics.budget_relative)
        }
        _ => metrics.budget_relative,
    }
}

/// The numbers that a reader knows of a case: its fields, the sizes of the tensor's axes,
/// constants.
fn known(operator: Option<&OperatorRecord>, case: &CaseRecord, check: &CheckRecord) -> Vec<Known> {
    let mut numbers: BTreeMap<String, f64> = features::numbers(&case.case);
    let tensor = operator
        .and_then(|operator| operator.tensors.iter().find(|tensor| tensor.name == check.tensor));
    if let (Some(tensor), Some(failing)) = (tensor, &check.failing) {
        for (axis, extent) in tensor.axes.iter().zip(&failing.shape) {
            numbers.entry(axis.clone()).or_insert(*extent as f64);
        }
    }
    let mut known = constants();
    for (name, value) in numbers
        .into_iter()
        .filter(|(_, value)| *value != 0.0 && value.abs() != 1.0 && value.is_finite())
    {
        known.extend(forms(&name, value));
    }
    known
}

fn constants() -> Vec<Known> {
    let known = |name: String, value: f64, question, rank| Known { name, value, question, rank };
    let powers = (1..=16).flat_map(|power| {
        let (many, few) = (2f64.powi(power), 2f64.powi(-power));
        let [more, less] = if power == 1 {
            ["counted twice?", "counted half?"]
        } else {
            ["an exponent or a step of a format that is off?"; 2]
        };
        [
            known(format!("{many}, a power of two"), many, more, 1),
            known(format!("1 / {many}, a power of two"), few, less, 1),
        ]
    });
    let logarithms = [
        known("log2(e)".into(), std::f64::consts::LOG2_E, "a logarithm of the other base?", 2),
        known("ln(2)".into(), std::f64::consts::LN_2, "a logarithm of the other base?", 2),
        known("-1".into(), -1.0, "a sign that is missing?", 0),
    ];
    powers.chain(logarithms).collect()
}

/// A field and the numbers derived from it.
fn forms(name: &str, value: f64) -> Vec<Known> {
    let is_count = value.fract() == 0.0 && value > 0.0;
    let questions: [&'static str; 6] = if is_count {
        [
            "summed over instead of averaged?",
            "divided by it once too often?",
            "",
            "",
            "",
            "scaled by its root?",
        ]
    } else {
        [
            "applied once too often?",
            "left out?",
            "applied twice too often?",
            "divided by it?",
            "",
            "",
        ]
    };
    let forms = [
        (name.to_owned(), value),
        (format!("1 / {name}"), value.recip()),
        (format!("{name}²"), value * value),
        (format!("1 / {name}²"), (value * value).recip()),
        (format!("√{name}"), value.sqrt()),
        (format!("1 / √{name}"), value.sqrt().recip()),
    ];
    let known = |((rank, (name, value)), question)| Known { name, value, question, rank: 2 * rank };
    forms
        .into_iter()
        .zip(questions)
        .enumerate()
        .map(|(rank, (form, question))| known(((rank as u32, form), question)))
        .filter(|known| known.value.is_finite())
        .collect()
}

/// Sentences for the factors, with tensors of one cause together: those that are known numbers, and
/// the others.
pub(super) fn sentences(ratios: &[Ratio]) -> (Vec<String>, Vec<String>) {
    let mut groups: Vec<Vec<&Ratio>> = Vec::new();
    for ratio in ratios {
        let alike = |other: &Ratio| {
            ratio.names == other.names
                && (ratio.is_constant && close(ratio.factor, other.factor, 1e-2)
                    || !ratio.names.is_empty())
        };
        match groups.iter_mut().find(|group| alike(group[0])) {
            Some(group) => group.push(ratio),
            None => groups.push(vec![ratio]),
        }
    }
    let (named, others): (Vec<_>, Vec<_>) =
        groups.iter().partition(|group| !group[0].names.is_empty());
    let said =
        |groups: Vec<&Vec<&Ratio>>| groups.into_iter().map(|group| sentence(group)).collect();
    (said(named), said(others))
}

fn sentence(group: &[&Ratio]) -> String {
    let first = group[0];
    let tensors =
        super::listed(&group.iter().map(|ratio| ratio.tensor.clone()).collect::<Vec<_>>());
    let [is, it] = if group.len() == 1 { ["is", "it"] } else { ["are", "they"] };
    let factor = figures::measure(first.factor, 6);
    let mut text = if first.factor == 0.0 {
        format!("{tensors} {is} 0 where {it} fail{}", if group.len() == 1 { "s" } else { "" })
    } else {
        format!("{tensors} {is} {factor} of what {it} should be")
    };
    if !first.names.is_empty() {
        text += &format!(" = {}", first.names.join(" = "));
    }
    if !first.question.is_empty() {
        text += &format!(": {}", first.question);
    }
    let (uniform, failing) = first.cases;
    let same =
        if first.is_constant || failing == 1 { "" } else { "; the number is the first case's" };
    text + &format!(
        " ({uniform} of {failing} failing case{}{same})",
        if failing == 1 { "" } else { "s" }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_numbers_are_those_of_the_case_and_their_forms() {
        let names: Vec<(String, f64)> = forms("softmax_scale", 0.25)
            .into_iter()
            .map(|known| (known.name, known.value))
            .collect();
        assert!(
            names.contains(&("softmax_scale".into(), 0.25))
                && names.contains(&("1 / softmax_scale²".into(), 16.0))
        );
        assert!(
            constants().iter().any(|known| known.value == 0.5 && known.question == "counted half?")
        );
    }
}
