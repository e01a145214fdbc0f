//! Batch invariance over a run: operators by axis, as a section of the page and as Markdown.

use std::fmt::Write as _;

use maud::{Markup, html};

use crate::record::{BatchAxis, BatchRecord, BatchStanding, Report};

use super::elements::scroller;
use super::markdown;

/// How an operator stands on each axis, in the order of [`BatchAxis::ALL`].
pub(super) struct Row<'r> {
    operator: &'r str,
    standings: Vec<Option<BatchStanding>>,
    /// The first difference on any axis.
    first: Option<&'r BatchRecord>,
}

/// The operators of which some case ran in another batch, in the report's order.
pub(super) fn rows(report: &Report) -> Vec<Row<'_>> {
    let row = |operator: &'_ str| -> Vec<&'_ BatchRecord> {
        let cases = report.cases.iter().filter(|case| case.operator == operator);
        cases.flat_map(|case| &case.batches).collect()
    };
    let of = |name| {
        let records = row(name);
        let standing = |axis| BatchStanding::of(axis, records.iter().copied());
        let standings: Vec<_> = BatchAxis::ALL.into_iter().map(standing).collect();
        let first = records.into_iter().find(|record| record.differ > 0);
        Row { operator: name, standings, first }
    };
    let rows = report.operators.iter().map(|operator| of(operator.name.as_str()));
    rows.filter(|row| row.standings.iter().any(Option::is_some)).collect()
}

/// The text of a cell; a dash where no case has the axis.
fn cell(standing: &Option<BatchStanding>) -> String {
    standing.map_or_else(|| "–".to_owned(), |standing| standing.words())
}

/// The section; nothing where no case ran in another batch.
pub(super) fn section(report: &Report) -> Markup {
    let rows = rows(report);
    if rows.is_empty() {
        return html! {};
    }
    let table = html! {
        table {
            thead { tr {
                th scope="col" { "operator" }
                @for axis in BatchAxis::ALL { th scope="col" title=(axis.summary()) { (axis) } }
                th scope="col" { "first difference" }
            } }
            tbody { @for row in &rows { tr {
                th scope="row" { code { (row.operator) } }
                @for standing in &row.standings { td { (cell(standing)) } }
                td .prose { @if let Some(first) = row.first { (first.message) } }
            } } }
        }
    };
    html! {
        section #batches {
            h2 { "Batch invariance" }
            p { "Whether a row keeps its bits in another batch. What an operator declares is checked; elsewhere a difference is measured." }
            (scroller("Batch invariance", table))
        }
    }
}

/// The same table as Markdown, folded; empty where no case ran in another batch.
pub(super) fn summary(report: &Report) -> String {
    let rows = rows(report);
    if rows.is_empty() {
        return String::new();
    }
    let axes = BatchAxis::ALL.map(BatchAxis::name).join(" | ");
    let mut text = format!(
        "<details><summary>Batch invariance</summary>\n\n| operator | {axes} |\n|{}\n",
        " --- |".repeat(1 + BatchAxis::ALL.len())
    );
    for row in &rows {
        let cells: Vec<String> = row.standings.iter().map(cell).collect();
        let _ = writeln!(text, "| {} | {} |", markdown::code(row.operator), cells.join(" | "));
    }
    text + "\n</details>\n\n"
}
