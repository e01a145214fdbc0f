//! Laws: a case against its variants, without an oracle.

use std::cell::OnceCell;

use dsv4_runtime::{Contract, DType, HostTensor};

use super::changes::change;
use super::differences::{difference_beyond, first_difference, value_difference, with_hint};
use super::{Outcome, launch};
use crate::judge::budget::Budget;
use crate::judge::runner::Runner;
use crate::judge::truth::{Truth, Unheld};
use crate::operator::tensors::permuted_along;
use crate::operator::{
    KernelRun, KernelTensor, Law, OracleTensor, PreparedCase, Relation, rows_of,
};
use crate::record::{Check, Verdict};

pub(super) fn law_checks(
    (prepared, law): (&dyn PreparedCase, &Law),
    runner: &dyn Runner,
    truth: &Truth,
    base: &KernelRun,
    budgets: &[(&OracleTensor, Budget)],
    outcome: &mut Outcome,
) {
    let check = Check::law(law.name);
    if let Some(why) = law.left_out.or_else(|| runner.cannot_vary(&*law.variant)) {
        outcome.skip(check.as_str(), why, 1);
        return;
    }
    let Some(variant) = launch(&*law.variant, runner, truth, Contract::NAN, check.clone(), outcome)
    else {
        return;
    };
    // Computed once, when a relation needs it: the oracle's runs take far longer than the kernels.
    let variants_truth = OnceCell::new();
    for (name, relation) in &law.relations {
        let exact = truth.exact.iter().find(|exact| exact.name == *name);
        if let Some(why) = exact.and_then(|exact| runner.leaves_out(exact)) {
            outcome.skip(format!("{check} of {name}"), why, 1);
            continue;
        }
        let find = |run: &KernelRun| run.tensors.iter().find(|t| t.name == *name).cloned();
        let (Some(a), Some(b)) = (find(base), find(&variant)) else {
            outcome.push(
                check.clone(),
                name,
                Verdict::Error,
                0,
                "the law names a tensor that the kernel does not return".into(),
            );
            continue;
        };
        if a.tensor.elements() == 0 {
            continue;
        }
        let budget = budgets.iter().find(|(exact, _)| exact.name == *name);
        let both = match (relation, budget) {
            (Relation::WithinBothBudgets, Some((exact, budget))) => {
                let own = variants_truth.get_or_init(|| {
                    Truth::of_elements(&*law.variant, runner.arithmetic(&*law.variant))
                });
                match own
                    .as_ref()
                    .map_err(|e| Unheld::Wrong(e.to_string()))
                    .and_then(|own| with_variants(own, exact, budget, &b))
                {
                    Ok(both) => Some((*exact, both)),
                    Err(unheld) => {
                        outcome.unheld(check.clone(), name, unheld);
                        continue;
                    }
                }
            }
            _ => None,
        };
        let budget = both.as_ref().or(budget);
        let (compared, problem) = match (runner.rounds_freely(name), relation) {
            (_, Relation::WithinBudget | Relation::WithinBothBudgets) => {
                relate(&a.tensor, &b.tensor, relation, budget)
            }
            (None, _) => {
                let (compared, problem) = relate(&a.tensor, &b.tensor, relation, budget);
                let last_bits = || {
                    budget.is_some()
                        && relate_freely(&a.tensor, &b.tensor, relation, budget).1.is_none()
                };
                (compared, problem.map(|problem| with_hint(problem, runner, last_bits)))
            }
            (Some(why), _) => {
                outcome.skip(format!("bit equality of {name}"), why, 1);
                relate_freely(&a.tensor, &b.tensor, relation, budget)
            }
        };
        let problem = problem
            .map(|problem| format!("{problem}; the variant: {}", change(prepared, &*law.variant)));
        outcome.verdict(check.clone(), name, compared, problem);
    }
}

/// How far a tensor of the case and the same tensor of a variant may be apart.
pub(super) fn with_variants(
    variant: &Truth,
    exact: &OracleTensor,
    budget: &Budget,
    found: &KernelTensor,
) -> Result<Budget, Unheld> {
    let mut both = budget.clone();
    if let Some(index) = variant.exact.iter().position(|tensor| tensor.name == exact.name) {
        let (_, own) = variant.of_each_element(index, found)?;
        both.allowed.iter_mut().zip(&own.allowed).for_each(|(allowed, own)| *allowed += own);
    }
    Ok(both)
}

/// How many elements a relation constrains, and what is wrong with them.
pub(super) fn relate(
    a: &HostTensor,
    b: &HostTensor,
    relation: &Relation,
    budget: Option<&(&OracleTensor, Budget)>,
) -> (u64, Option<String>) {
    let elements = a.elements() as u64;
    let (rows, row_len) = rows_of(&a.shape);
    match relation {
        // Includes integers and bytes, which have no other multiple.
        Relation::Times(1.0) => (elements, first_difference(a, b)),
        Relation::Times(factor) => {
            let scaled: Vec<f64> = a.to_f64().iter().map(|value| value * factor).collect();
            (elements, first_difference(&HostTensor::from_f64(a.dtype, &a.shape, &scaled), b))
        }
        Relation::EqualRows(bound) => {
            let bound_rows: Vec<usize> = (0..rows).filter(|&row| bound(row)).collect();
            let problem = row_difference(a, b, bound_rows.iter().map(|&row| (row, row)));
            ((bound_rows.len() * row_len) as u64, problem)
        }
        Relation::PermutedRows(map) => {
            (elements, row_difference(a, b, map.iter().copied().zip(0..)))
        }
        Relation::PermutedAlong { axis, order } => {
            (elements, first_difference(&permuted_along(a, *axis, order), b))
        }
        Relation::EqualExcept { axis, at } => {
            let (bound, kept) = without_entry(a, b, *axis, *at);
            (bound, first_difference(a, &kept))
        }
        Relation::MadeOf(made_of) => {
            (elements, value_difference(&a.to_f64(), &made_of(b), &a.shape))
        }
        // Each of the two may be off by its budget.
        Relation::WithinBudget => (
            elements,
            budget.and_then(|(exact, budget)| difference_beyond(a, b, exact, budget, 2.0)),
        ),
        Relation::WithinBothBudgets => (
            elements,
            budget.and_then(|(exact, budget)| difference_beyond(a, b, exact, budget, 1.0)),
        ),
    }
}

/// As [`relate`], but each of the two may be off by its budget where bits would have to be equal.
pub(super) fn relate_freely(
    a: &HostTensor,
    b: &HostTensor,
    relation: &Relation,
    budget: Option<&(&OracleTensor, Budget)>,
) -> (u64, Option<String>) {
    if a.shape != b.shape {
        return (a.elements() as u64, Some(format!("{a:?} against {b:?}")));
    }
    let (rows, row_len) = rows_of(&a.shape);
    // The variant's tensor with the relation undone: it must agree with the case's own tensor.
    let (case, mut back) = (a.to_f64(), b.to_f64());
    let mut bound = rows;
    match relation {
        Relation::Times(factor) => back.iter_mut().for_each(|value| *value /= factor),
        Relation::MadeOf(made_of) => back = made_of(b),
        Relation::EqualRows(is_bound) => {
            for row in (0..rows).filter(|&row| !is_bound(row)) {
                back[row * row_len..(row + 1) * row_len]
                    .copy_from_slice(&case[row * row_len..(row + 1) * row_len]);
                bound -= 1;
            }
        }
        Relation::PermutedRows(map) => {
            let variant = back.clone();
            for (row, &from) in map.iter().enumerate() {
                back[from * row_len..(from + 1) * row_len]
                    .copy_from_slice(&variant[row * row_len..(row + 1) * row_len]);
            }
        }
        Relation::PermutedAlong { axis, order } => {
            let mut inverse = vec![0; order.len()];
            order.iter().enumerate().for_each(|(to, &from)| inverse[from] = to);
            back = permuted_along(b, *axis, &inverse).to_f64();
        }
        Relation::EqualExcept { axis, at } => {
            let (bound, kept) = without_entry(a, b, *axis, *at);
            let back = HostTensor::from_f64(DType::F32, &b.shape, &kept.to_f64());
            return (bound, relate(a, &back, &Relation::WithinBudget, budget).1);
        }
        Relation::WithinBudget | Relation::WithinBothBudgets => {}
    }
    let back = HostTensor::from_f64(DType::F32, &b.shape, &back);
    let (_, problem) = relate(a, &back, &Relation::WithinBudget, budget);
    ((bound * row_len) as u64, problem)
}

/// `b` with entry `at` along an axis taken from `a`, and how many elements still come from `b`.
pub(super) fn without_entry(
    a: &HostTensor,
    b: &HostTensor,
    axis: usize,
    at: usize,
) -> (u64, HostTensor) {
    let entry = a.shape[axis + 1..].iter().product::<usize>();
    let extent = a.shape[axis];
    let mut kept = b.clone();
    if a.bytes.len() == b.bytes.len() {
        let bytes = entry * a.dtype.size();
        for start in (at * bytes..a.bytes.len()).step_by((extent * bytes).max(1)) {
            kept.bytes[start..start + bytes].copy_from_slice(&a.bytes[start..start + bytes]);
        }
    }
    let left_out = a.elements().checked_div(extent).unwrap_or(0);
    ((a.elements() - left_out) as u64, kept)
}

/// First of the pairs of rows (of `a`, of `b`) that is not bit-equal.
pub(super) fn row_difference(
    a: &HostTensor,
    b: &HostTensor,
    mut pairs: impl Iterator<Item = (usize, usize)>,
) -> Option<String> {
    let (_, row_len) = rows_of(&a.shape);
    let bytes = row_len * a.dtype.size();
    if a.bytes.len() != b.bytes.len() {
        return Some(format!("{a:?} against {b:?}"));
    }
    let (from, to) = pairs.find(|&(x, y)| {
        a.bytes[x * bytes..(x + 1) * bytes] != b.bytes[y * bytes..(y + 1) * bytes]
    })?;
    Some(format!("row {to} of the variant differs from row {from} of the case"))
}
