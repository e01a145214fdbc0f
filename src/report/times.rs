//! Times of an external kernel, by its own clock, next to ours for the same cases.

use std::fmt::Write as _;

use maud::{Markup, html};

use crate::record::{CaseRecord, Report, Seconds};

use super::elements::scroller;
use super::markdown::{code, text};
use super::numbers::{significant, time};

/// Rows of a table: the cases that take the longest.
const ROWS: usize = 20;

/// A call of a case.
struct Timed<'a> {
    case: &'a CaseRecord,
    direction: &'static str,
    theirs: f64,
    ours: Option<f64>,
}

impl Timed<'_> {
    /// Above 1 the external kernel takes longer.
    fn ratio(&self) -> Option<f64> {
        self.ours.filter(|&ours| ours > 0.0).map(|ours| self.theirs / ours)
    }
}

/// The calls of an operator whose times are known, the longest first.
fn timed<'a>(report: &'a Report, operator: &str) -> Vec<Timed<'a>> {
    type Direction = fn(&Seconds) -> Option<f64>;
    let directions: [(&str, Direction); 2] =
        [("forward", |times| times.forward), ("backward", |times| times.backward)];
    let of = |case: &'a CaseRecord| {
        directions.into_iter().filter_map(move |(direction, of)| {
            let theirs = of(case.seconds.as_ref()?)?;
            Some(Timed { case, direction, theirs, ours: case.our_seconds.as_ref().and_then(of) })
        })
    };
    let mut timed: Vec<_> =
        report.cases.iter().filter(|case| case.operator == operator).flat_map(of).collect();
    timed.sort_by(|a, b| b.theirs.total_cmp(&a.theirs));
    timed
}

/// One line on the calls of a direction for which times of both are known: how many, and the median
/// ratio.
pub(crate) fn line(report: &Report) -> Option<String> {
    let all: Vec<_> =
        report.operators.iter().flat_map(|operator| timed(report, &operator.name)).collect();
    let said: Vec<String> = ["forward", "backward"]
        .into_iter()
        .filter_map(|direction| {
            let of_direction: Vec<_> =
                all.iter().filter(|timed| timed.direction == direction).collect();
            let mut ratios: Vec<f64> =
                of_direction.iter().filter_map(|timed| timed.ratio()).collect();
            ratios.sort_by(f64::total_cmp);
            match (ratios.get(ratios.len() / 2), of_direction.len()) {
                (_, 0) => None,
                (Some(median), _) => {
                    let median = significant(*median, 3);
                    Some(format!(
                        "{direction} of {} cases, theirs over ours {median} in the median",
                        ratios.len()
                    ))
                }
                (None, count) => Some(format!("{direction} of {count} cases, none beside ours")),
            }
        })
        .collect();
    (!said.is_empty()).then(|| format!("times: {}", said.join("; ")))
}

/// Their times over ours, for the calls that were timed in both.
pub(super) fn ratios(report: &Report, operator: &str) -> Vec<f64> {
    timed(report, operator).iter().filter_map(Timed::ratio).collect()
}

fn or_none(seconds: Option<f64>) -> String {
    seconds.map_or_else(|| "—".to_owned(), |seconds| time(seconds * 1e9))
}

/// The part of an operator's section; empty without times.
pub(super) fn section(report: &Report, operator: &str) -> Markup {
    let timed = timed(report, operator);
    let table = html! {
        table {
            thead { tr { th scope="col" { "case" } th scope="col" { "call" } th .count scope="col" { "theirs" } th .count scope="col" { "ours" } th .count scope="col" { "theirs / ours" } } }
            tbody {
                @for row in timed.iter().take(ROWS) {
                    tr {
                        td { code { (row.case.case) } } td { (row.direction) }
                        td .count { (time(row.theirs * 1e9)) } td .count { (or_none(row.ours)) }
                        td .count { (row.ratio().map_or_else(|| "—".to_owned(), |ratio| significant(ratio, 3))) }
                    }
                }
            }
        }
    };
    html! {
        @if !timed.is_empty() {
            h3 { "Times of the kernel, by its own clock, beside ours" }
            (scroller("Times", table))
            @if timed.len() > ROWS { p { (timed.len() - ROWS) " shorter ones are in report.json." } }
        }
    }
}

/// The part of `summary.md`; empty without times.
pub(super) fn markdown(report: &Report) -> String {
    let mut lines = String::new();
    for row in report
        .operators
        .iter()
        .flat_map(|operator| timed(report, &operator.name).into_iter().take(ROWS))
    {
        let ratio = row.ratio().map_or_else(|| "—".to_owned(), |ratio| significant(ratio, 3));
        let (theirs, ours) = (time(row.theirs * 1e9), or_none(row.ours));
        let case = code(&row.case.case.to_string());
        let _ =
            writeln!(lines, "| {case} | {} | {theirs} | {ours} | {ratio} |", text(row.direction));
    }
    if lines.is_empty() {
        return lines;
    }
    format!(
        "### Times\n\n| case | call | theirs | ours | theirs / ours |\n|---|---|--:|--:|--:|\n{lines}\n"
    )
}
