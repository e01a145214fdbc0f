//! What a report keeps of each case.
//!
//! `records.jsonl` keeps every case in full. `report.json` keeps what its pages, `parity diff`,
//! `parity history` and `--costs` read. That is everything for a check that failed, and the verdict
//! and the measures of its tensor for one that passed. For tensors that agree, histograms, heat
//! maps and worst elements are kept only for the few cases that used most of their budget
//! ([`PICTURED`]).

use std::collections::HashMap;

use super::picture;
use super::summary::{TensorSummary, agrees, operators};
use crate::record::Standing;
use crate::record::{CaseRecord, HeatMap, Metrics, Report, measures};

/// Cases of a tensor whose histograms and worst elements are kept: those that used most of its
/// budget.
pub(super) const PICTURED: usize = 3;

/// Most rows and columns of the heat map of a tensor that agrees.
pub(super) const THUMBNAIL: (usize, usize) = (8, 24);

/// Significant digits of measures that pages show with fewer digits.
const DIGITS: usize = 4;

/// Significant digits of measures by which two reports are compared. Cases that are equal in both
/// stay equal, and no change that counts is rounded away.
const COMPARED_DIGITS: usize = 7;

/// The report as it is written to `report.json`.
pub(super) fn kept(report: &Report) -> Report {
    let mut kept = report.clone();
    kept.cases.iter_mut().filter(|case| agrees(case)).for_each(round);
    let pictured = pictured(&kept);
    for case in &mut kept.cases {
        let agrees = agrees(case);
        for check in
            case.checks.iter_mut().filter(|check| agrees || Standing::of(check) == Standing::Pass)
        {
            let rank = pictured.get(&std::ptr::from_ref(&*check)).copied();
            check.metrics = check.metrics.take().map(|metrics| Box::new(reduced(&metrics, rank)));
        }
    }
    kept
}

/// The checks whose pictures are kept, each with its rank among those of its tensor.
fn pictured(report: &Report) -> HashMap<*const crate::record::CheckRecord, usize> {
    let mut pictured = HashMap::new();
    for operator in operators(report) {
        for tensor in TensorSummary::all(report, &operator.name) {
            let entries = tensor.entries.iter().take(PICTURED).enumerate();
            pictured.extend(entries.map(|(rank, entry)| (std::ptr::from_ref(entry.check), rank)));
        }
    }
    pictured
}

/// What is kept of a tensor that agrees: a heat map for the worst case, a histogram for the few
/// after it.
fn reduced(metrics: &Metrics, rank: Option<usize>) -> Metrics {
    let HeatMap { total_rows, total_columns, .. } = metrics.heat;
    let heat = match rank {
        None => return measures(metrics),
        Some(0) => picture::pooled(&metrics.heat, THUMBNAIL),
        Some(_) => HeatMap { rows: 0, columns: 0, total_rows, total_columns, cells: Vec::new() },
    };
    Metrics { whole: None, heat, ..metrics.clone() }
}

/// Rounds a case that agrees to the digits that are needed.
fn round(case: &mut CaseRecord) {
    let few = |value: &mut f64| *value = rounded(*value, DIGITS);
    for metrics in case.checks.iter_mut().filter_map(|check| check.metrics.as_mut()) {
        // Pages show the distance from 1.
        metrics.cosine = 1.0 - rounded(1.0 - metrics.cosine, DIGITS);
        metrics.norm_ratio = rounded(metrics.norm_ratio, COMPARED_DIGITS);
        for value in [&mut metrics.budget_used, &mut metrics.budget_relative] {
            *value = rounded(*value, COMPARED_DIGITS);
        }
        let Metrics { relative_l2, max_abs, ulp_p50, ulp_p99, ulp_max, .. } = &mut **metrics;
        [relative_l2, max_abs, ulp_p50, ulp_p99, ulp_max].into_iter().for_each(few);
        [&mut metrics.budget_multiple, &mut metrics.worst_row_relative_l2]
            .into_iter()
            .for_each(few);
        metrics.power.iter_mut().for_each(|power| few(&mut power.element));
    }
}

/// A measure as reports are compared by it: with the digits that a written one keeps. So cases that
/// are equal in two reports stay equal, whichever report keeps more digits.
pub(super) fn compared(value: f64) -> f64 {
    rounded(value, COMPARED_DIGITS)
}

/// A number rounded to that many significant digits.
fn rounded(value: f64, digits: usize) -> f64 {
    if value.is_finite() {
        format!("{value:.*e}", digits - 1).parse().unwrap_or(value)
    } else {
        value
    }
}
