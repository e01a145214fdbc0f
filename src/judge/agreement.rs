//! How well two tensors agree: the metrics of a report.

use crate::judge::budget::Budget;
use crate::judge::grid::Steps;
use crate::operator::{OracleTensor, rows_of};
use crate::record::{HeatMap, Metrics, Worst};

/// Bins of the histogram of budget use, each 1/8 wide including its upper end; the last one is
/// open.
const HISTOGRAM_BINS: usize = 16;
const HEAT_ROWS: usize = 24;
const HEAT_COLUMNS: usize = 48;

/// Compares a kernel's tensor with the oracle's under a budget.
///
/// Elements for which the oracle has no finite value are left to the check of special values. A
/// kernel value that is not finite where the oracle's is uses an infinite share of its budget.
pub fn measure(kernel: &[f64], exact: &OracleTensor, budget: &Budget, stored: &Steps) -> Metrics {
    let finite: Vec<usize> = (0..kernel.len()).filter(|&i| exact.values[i].is_finite()).collect();
    let uses: Vec<f64> = (0..kernel.len())
        .map(|i| budget_use(kernel[i], exact.values[i], budget.allowed[i]))
        .collect();
    let worst = finite.iter().copied().max_by(|&a, &b| uses[a].total_cmp(&uses[b])).unwrap_or(0);
    let mut ulps: Vec<f64> =
        finite.iter().map(|&i| ulp_error(kernel[i], exact.values[i], stored, i)).collect();
    ulps.sort_by(f64::total_cmp);
    let norms = Norms::over(kernel, &exact.values, finite.iter().copied());
    let (worst_row, worst_row_relative_l2) = worst_row(kernel, exact);
    let squares = |values: &[f64]| finite.iter().map(|&i| values[i] * values[i]).sum::<f64>();
    Metrics {
        cosine: norms.cosine(),
        norm_ratio: norms.norm_ratio(),
        relative_l2: norms.relative_l2(),
        max_abs: finite.iter().map(|&i| (kernel[i] - exact.values[i]).abs()).fold(0.0, nan_max),
        ulp_p50: quantile(&ulps, 0.5),
        ulp_p99: quantile(&ulps, 0.99),
        ulp_max: quantile(&ulps, 1.0),
        budget_used: finite.iter().map(|&i| uses[i]).fold(0.0, nan_max),
        // Zeros whose budget is zero have the tightest budget.
        budget_relative: if squares(&budget.allowed) == 0.0 {
            0.0
        } else {
            (squares(&budget.allowed) / squares(&exact.values)).sqrt()
        },
        budget_multiple: budget.multiple,
        worst_row,
        worst_row_relative_l2,
        whole: None,
        power: None,
        worst: worst_element(kernel, exact, budget, worst),
        use_histogram: histogram(finite.iter().map(|&i| uses[i])),
        heat: heat_map(&uses, exact, budget),
    }
}

fn worst_element(kernel: &[f64], exact: &OracleTensor, budget: &Budget, worst: usize) -> Worst {
    let at = |values: &[f64]| values.get(worst).copied().unwrap_or(f64::NAN);
    Worst {
        index: unflatten(worst, &exact.shape),
        kernel: at(kernel),
        oracle: at(&exact.values),
        allowed: at(&budget.allowed),
    }
}

/// NaN counts as larger than everything: it must show in every maximum.
fn nan_max(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

/// Error over budget; 0/0 is 0, and a result that is not finite becomes infinite.
pub fn budget_use(kernel: f64, exact: f64, allowed: f64) -> f64 {
    let error = (kernel - exact).abs();
    if !exact.is_finite() || error == 0.0 {
        0.0
    } else if error.is_nan() {
        f64::INFINITY
    } else {
        error / allowed
    }
}

fn ulp_error(kernel: f64, exact: f64, stored: &Steps, index: usize) -> f64 {
    // The ulp of the larger of both. Near zero, the oracle's own ulp would give more ulps than the
    // type has values.
    let larger = if kernel.abs() > exact.abs() { kernel } else { exact };
    let error = (kernel - exact).abs() / stored.ulp(index, larger);
    if kernel == exact {
        0.0
    } else if error.is_nan() {
        f64::INFINITY
    } else {
        error
    }
}

/// Index along each axis of element `linear`, row-major.
pub fn unflatten(linear: usize, shape: &[usize]) -> Vec<u64> {
    let mut rest = linear;
    let mut index = vec![0; shape.len()];
    for axis in (0..shape.len()).rev() {
        index[axis] = (rest % shape[axis].max(1)) as u64;
        rest /= shape[axis].max(1);
    }
    index
}

struct Norms {
    kernel: f64,
    exact: f64,
    product: f64,
    difference: f64,
}

impl Norms {
    fn over(kernel: &[f64], exact: &[f64], indices: impl Iterator<Item = usize>) -> Self {
        let mut norms = Self { kernel: 0.0, exact: 0.0, product: 0.0, difference: 0.0 };
        for i in indices {
            norms.kernel += kernel[i] * kernel[i];
            norms.exact += exact[i] * exact[i];
            norms.product += kernel[i] * exact[i];
            norms.difference += (kernel[i] - exact[i]).powi(2);
        }
        norms
    }

    /// Two zero tensors agree.
    fn ratio(over: f64, under: f64) -> f64 {
        if over == 0.0 && under == 0.0 { 1.0 } else { over / under }
    }

    fn cosine(&self) -> f64 {
        if self.kernel == 0.0 && self.exact == 0.0 {
            1.0
        } else {
            self.product / (self.kernel * self.exact).sqrt()
        }
    }

    fn norm_ratio(&self) -> f64 {
        Self::ratio(self.kernel, self.exact).sqrt()
    }

    fn relative_l2(&self) -> f64 {
        if self.difference == 0.0 { 0.0 } else { (self.difference / self.exact).sqrt() }
    }
}

fn worst_row(kernel: &[f64], exact: &OracleTensor) -> (u64, f64) {
    let (rows, row_len) = rows_of(&exact.shape);
    (0..rows)
        .map(|row| {
            let range = row * row_len..(row + 1) * row_len;
            let finite = range.filter(|&i| exact.values[i].is_finite());
            (row as u64, Norms::over(kernel, &exact.values, finite).relative_l2())
        })
        .max_by(|a, b| a.1.total_cmp(&b.1))
        .unwrap_or((0, 0.0))
}

fn quantile(sorted: &[f64], share: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    sorted.get((last as f64 * share).round() as usize).copied().unwrap_or(0.0)
}

fn histogram(uses: impl Iterator<Item = f64>) -> Vec<u64> {
    let mut bins = vec![0; HISTOGRAM_BINS];
    for share in uses {
        // An element that uses its whole budget is within it: each bin includes its upper end.
        let bin = ((share * 8.0).ceil() as usize).saturating_sub(1);
        bins[bin.min(HISTOGRAM_BINS - 1)] += 1;
    }
    bins
}

/// Cells of the picture. A structural zero (a padding row, an empty row) has no budget, so only its
/// kind of value is compared. It has a share to show only if the kernel has another value there. In
/// a tensor that is compared exactly, no element has a budget and all are compared.
fn heat_map(uses: &[f64], exact: &OracleTensor, budget: &Budget) -> HeatMap {
    let (total_rows, total_columns) = rows_of(&exact.shape);
    let (rows, columns) = (total_rows.min(HEAT_ROWS), total_columns.min(HEAT_COLUMNS));
    let mut cells = vec![HeatMap::NOT_COMPARED; rows * columns];
    let any_budget = budget.allowed.iter().any(|&allowed| allowed > 0.0);
    let structural_zero =
        |i: usize| any_budget && exact.values[i] == 0.0 && budget.allowed[i] == 0.0;
    let has_budget = |i: usize| exact.values[i].is_finite() && !structural_zero(i);
    for (i, &share) in uses.iter().enumerate().filter(|&(i, &share)| has_budget(i) || share > 0.0) {
        let cell = (i / total_columns) * rows / total_rows * columns
            + (i % total_columns) * columns / total_columns;
        // Hundredths are enough for a picture. JSON has no infinity, so a million stands for it. A
        // use above 1 stays above 1.
        let hundredths = share.min(1e6) * 100.0;
        let share = if share > 1.0 { hundredths.ceil() } else { hundredths.round() } / 100.0;
        cells[cell] = cells[cell].max(share as f32);
    }
    HeatMap {
        rows: rows as u32,
        columns: columns as u32,
        total_rows: total_rows as u64,
        total_columns: total_columns as u64,
        cells,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_element_that_uses_its_whole_budget_is_within_it() {
        let bins =
            histogram([0.0, 0.125, 0.126, 1.0, 1.000_001, 2.0, 2.1, f64::INFINITY].into_iter());
        assert_eq!(bins, [2, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 3]);
    }

    #[test]
    fn cells_without_a_compared_element_are_marked_and_errors_above_the_budget_stay_above_it() {
        let values = vec![1.0, f64::NAN, 2.0, f64::INFINITY, 0.0, 0.0];
        let exact = OracleTensor {
            name: "y",
            side: crate::operator::Side::Forward,
            shape: vec![3, 2],
            values,
        };
        let allowed = vec![1.0, 1.0, 1.0, 1.0, 0.0, 0.0];
        let budget = Budget { variance: allowed.clone(), allowed, multiple: 1.0 };
        let map = heat_map(&[0.5, 0.0, 1.001, 0.0, 0.0, f64::INFINITY], &exact, &budget);
        let padding = HeatMap::NOT_COMPARED;
        assert_eq!(map.cells, [0.5, padding, 1.01, padding, padding, 1e6]);
    }
}
