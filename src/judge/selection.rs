//! Indices of a selection (top-k, routing), checked against the scores that were selected from.
//!
//! A kernel computes its scores with rounding errors and then selects exactly. With scores `s_i` of
//! the oracle and allowed errors `a_i`, its scores are somewhere in `s_i ± a_i`. Where it skipped
//! `o`, which the oracle chose, and took `c` instead, its scores satisfied `s'_o <= s'_c`, so that
//!
//! ```text
//! s_o - a_o <= s_c + a_c        for every o that is skipped and every c that is taken instead
//! ```
//!
//! A choice that breaks this is wrong, whatever the rounding. A row is compared as a set. The
//! padding `-1` must be where the oracle has it, and no index may occur twice.

use dsv4_runtime::HostTensor;

use crate::operator::OracleTensor;
use crate::record::figures;

/// Index of slots for which nothing was selected.
const PADDING: i64 = -1;

/// The scores that were selected from, and how far each may be off.
#[derive(Clone, Copy, Debug)]
pub struct Scores<'a> {
    /// The oracle's scores, `[rows, candidates]`; an infinite score is infinite in the kernel, too.
    pub exact: &'a OracleTensor,
    /// Allowed error of each.
    pub allowed: &'a [f64],
}

/// What is wrong with the selection of a kernel, if anything is.
///
/// # Errors
/// A comparison that cannot be made: the tensor holds no integers, or the oracle's tensors do not
/// fit together.
pub fn problem(
    found: &HostTensor,
    exact: &OracleTensor,
    scores: Scores<'_>,
) -> Result<Option<String>, String> {
    let chosen = found.to_integers().ok_or_else(|| format!("{} holds no indices", found.dtype))?;
    let (score_rows, candidates) = scores.exact.rows();
    // A single choice per row has no axis for choices.
    let is_single = scores.exact.shape.split_last().is_some_and(|(_, outer)| exact.shape == outer);
    let (rows, width) = if is_single { (score_rows, 1) } else { exact.rows() };
    if rows != score_rows {
        let name = scores.exact.name;
        return Err(format!(
            "{rows} rows of indices were selected from {score_rows} rows of scores `{name}`"
        ));
    }
    let is_index =
        |&value: &f64| value.fract() == 0.0 && (PADDING as f64..candidates as f64).contains(&value);
    if let Some(wrong) = exact.values.iter().find(|value| !is_index(value)) {
        return Err(format!("the oracle selected {wrong} of {candidates} candidates"));
    }
    let oracle: Vec<i64> = exact.values.iter().map(|&value| value as i64).collect();
    let mut wrong = (0..rows).filter_map(|row| {
        let range = row * width..(row + 1) * width;
        let candidates = row * candidates..(row + 1) * candidates;
        let row_of = Row {
            scores: &scores.exact.values[candidates.clone()],
            allowed: &scores.allowed[candidates],
        };
        row_of.problem(&chosen[range.clone()], &oracle[range]).map(|what| (row, what))
    });
    let first = wrong.next();
    Ok(first.map(|(row, what)| {
        format!("{} of {rows} rows are wrong; first row {row}: {what}", 1 + wrong.count())
    }))
}

/// The candidates of one row.
struct Row<'a> {
    scores: &'a [f64],
    allowed: &'a [f64],
}

impl Row<'_> {
    fn problem(&self, chosen: &[i64], oracle: &[i64]) -> Option<String> {
        if chosen == oracle {
            return None;
        }
        for (place, (&index, &expected)) in chosen.iter().zip(oracle).enumerate() {
            if (index == PADDING) != (expected == PADDING) {
                return Some(format!("place {place} holds {index}, the oracle's {expected}"));
            }
            if index < PADDING || index >= self.scores.len() as i64 {
                return Some(format!(
                    "place {place} holds {index}, and there are {} candidates",
                    self.scores.len()
                ));
            }
            if index != PADDING && chosen[..place].contains(&index) {
                return Some(format!("index {index} was selected twice"));
            }
        }
        let only_in = |these: &[i64], others: &[i64]| -> Vec<usize> {
            let others: std::collections::HashSet<i64> = others.iter().copied().collect();
            these
                .iter()
                .filter(|index| !others.contains(index))
                .map(|&index| index as usize)
                .collect()
        };
        let highest = |&index: &usize| self.bound(index, 1.0);
        let lowest = |&index: &usize| self.bound(index, -1.0);
        let taken = only_in(chosen, oracle);
        let left_out = only_in(oracle, chosen);
        let taken = taken.into_iter().min_by(|a, b| highest(a).total_cmp(&highest(b)))?;
        let left_out = left_out.into_iter().max_by(|a, b| lowest(a).total_cmp(&lowest(b)))?;
        // NaN must fail, so the comparison is written as what passes.
        let within = lowest(&left_out) <= highest(&taken);
        (!within).then(|| {
            format!(
                "{taken} was selected, score {}, and {left_out} was not, score {}",
                self.words(taken),
                self.words(left_out)
            )
        })
    }

    /// A score, and how far it may be off.
    fn words(&self, index: usize) -> String {
        format!(
            "{} (± {})",
            figures::element(self.scores[index]),
            figures::measure(self.allowed[index], 3)
        )
    }

    /// The furthest that a score can be in one direction. Infinities stay as they are.
    fn bound(&self, index: usize, sign: f64) -> f64 {
        let score = self.scores[index];
        if score.is_infinite() { score } else { score + sign * self.allowed[index] }
    }
}

/// Elements of an exact comparison that differ: integers as integers, others by value; NaN equals
/// NaN.
pub fn unequal(found: &HostTensor, exact: &OracleTensor) -> Vec<usize> {
    let differs: Vec<bool> = match found.to_integers() {
        // Also beyond 2^53, where two integers can have the same f64.
        Some(integers) => {
            let equal = |(&found, &exact): (&i64, &f64)| {
                exact.fract() == 0.0 && i128::from(found) == exact as i128
            };
            integers.iter().zip(&exact.values).map(|pair| !equal(pair)).collect()
        }
        None => {
            let equal =
                |(found, exact): (f64, &f64)| found == *exact || found.is_nan() && exact.is_nan();
            found.to_f64().into_iter().zip(&exact.values).map(|pair| !equal(pair)).collect()
        }
    };
    (0..differs.len()).filter(|&i| differs[i]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operator::Side;

    fn tensor(name: &'static str, shape: &[usize], values: &[f64]) -> OracleTensor {
        OracleTensor { name, side: Side::Forward, shape: shape.to_vec(), values: values.to_vec() }
    }

    #[test]
    fn one_choice_of_each_row_needs_no_axis_of_its_own() {
        let scores = tensor("scores", &[2, 3], &[1.0, 3.0, 2.9, 5.0, f64::NEG_INFINITY, 1.0]);
        let exact = tensor("tokens", &[2], &[1.0, 0.0]);
        let scores = Scores { exact: &scores, allowed: &[0.1, 0.1, 0.1, 0.1, f64::NAN, 0.1] };
        let found = |tokens: [i32; 2]| {
            problem(&HostTensor::from_i32(&[2], &tokens), &exact, scores).expect("a verdict")
        };
        assert_eq!(found([1, 0]), None);
        // Within what both scores may be off by.
        assert_eq!(found([2, 0]), None);
        for (wrong, row) in [([0, 0], 0), ([1, 1], 1), ([1, 2], 1), ([-1, 0], 0), ([3, 0], 0)] {
            let problem = found(wrong).expect("a wrong choice");
            assert!(
                problem.starts_with(&format!("1 of 2 rows are wrong; first row {row}")),
                "{wrong:?}: {problem}"
            );
        }
    }
}
