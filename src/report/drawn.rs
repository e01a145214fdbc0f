//! What a report is written without: heat maps that no page draws.
//!
//! A heat map takes more room than all else that is known of a tensor. Pages draw those of the worst cases of each tensor, and of
//! what failed; the others stay in `records.jsonl`.

use std::collections::HashSet;

use super::operators::WORST;
use super::summary::{TensorSummary, operators};
use crate::record::{CheckRecord, HeatMap, Report, Verdict};

/// The report with the heat maps that its pages draw, and no others.
pub(super) fn with_drawn_heat_maps(report: &Report) -> Report {
    let drawn: HashSet<*const CheckRecord> = operators(report)
        .iter()
        .flat_map(|operator| TensorSummary::all(report, &operator.name))
        .flat_map(|tensor| tensor.entries.into_iter().take(WORST).map(|entry| std::ptr::from_ref(entry.check)))
        .collect();
    let mut reduced = report.clone();
    for (case, written) in report.cases.iter().zip(&mut reduced.cases) {
        if case.verdict() != Verdict::Pass {
            continue;
        }
        for (check, written) in case.checks.iter().zip(&mut written.checks) {
            if let Some(metrics) = written.metrics.as_mut().filter(|_| !drawn.contains(&std::ptr::from_ref(check))) {
                metrics.heat = HeatMap { rows: 0, columns: 0, cells: Vec::new(), ..metrics.heat };
            }
        }
    }
    reduced
}
