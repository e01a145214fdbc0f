//! Cards of failing cases: what failed, where it is worst, and the command that runs it again.

use maud::{Markup, html};

use crate::record::{CaseRecord, CheckRecord, Metrics, Report};

use super::elements::{Anchors, badge, command, number, scroller};
use super::numbers::{count, counted, element, scientific, significant};
use super::picture;
use super::summary::{failing, failing_kinds, findings, message, origin_word, passed, pretty};
use crate::record::Standing;

/// Cards that are open; the rest can be unfolded.
const OPEN_CARDS: usize = 8;
/// Cards in all; further cases are listed by their replay commands, which keeps the page small.
const MOST_CARDS: usize = 60;
/// Findings of one case that are open.
const OPEN_FINDINGS: usize = 4;

/// The section; empty where all agreed.
pub(super) fn section(report: &Report, anchors: &Anchors) -> Markup {
    let cases = failing(report);
    let (open, rest) = cases.split_at(cases.len().min(OPEN_CARDS));
    let (folded, listed) = rest.split_at(rest.len().min(MOST_CARDS - OPEN_CARDS));
    html! {
        @if !cases.is_empty() {
            section #failures {
                h2 { "Failures" }
                (saved(report))
                (kinds(&cases))
                @if open.iter().any(|case| has_heat(case)) { (picture::legend()) }
                @for (place, case) in open.iter().enumerate() { (card(place, case, true, anchors)) }
                @if !folded.is_empty() {
                    details .more {
                        summary { (counted(folded.len() as u64, "more failing case")) }
                        @for (place, case) in folded.iter().enumerate() { (card(OPEN_CARDS + place, case, false, anchors)) }
                    }
                }
                @if !listed.is_empty() {
                    details .more {
                        summary { (counted(listed.len() as u64, "further failing case")) ", replay commands only" }
                        @for case in listed { (anchors.of(case).0) (command(&case.replay)) }
                    }
                }
            }
        }
    }
}

/// Where the failing cases were saved.
fn saved(report: &Report) -> Markup {
    html! {
        @for saved in &report.saved {
            p { "Saved for the next run: " (counted(saved.cases, "failing case")) " in " code { (saved.file) } "." }
        }
    }
}

fn has_heat(case: &CaseRecord) -> bool {
    findings(case).iter().any(|check| check.metrics.is_some())
}

/// Failures of one kind often have one cause: the table shows how many causes to expect.
fn kinds(cases: &[&CaseRecord]) -> Markup {
    let table = html! {
        table {
            caption { "What failed, most frequent first" }
            thead { tr { th scope="col" { "operator" } th scope="col" { "check" } th scope="col" { "tensor" } th .count scope="col" { "cases" } th scope="col" { "read first" } } }
            tbody {
                @for (operator, check, tensor, cases, first) in failing_kinds(cases) {
                    tr {
                        th scope="row" { (operator) }
                        td { (check) }
                        td { @if tensor.is_empty() { "whole case" } @else { code { (tensor) } } }
                        td .count { (count(cases)) }
                        td { @if first < MOST_CARDS { a href=(format!("#failure-{}", first + 1)) { "case " (first + 1) } } @else { "below" } }
                    }
                }
            }
        }
    };
    scroller("What failed", table)
}

fn card(place: usize, case: &CaseRecord, pictured: bool, anchors: &Anchors) -> Markup {
    let findings = findings(case);
    let (open, folded) = findings.split_at(findings.len().min(OPEN_FINDINGS));
    let worst = findings.iter().find_map(|check| Some((*check, check.metrics.as_ref()?)));
    html! {
        article .card.failure id=(format!("failure-{}", place + 1)) {
            h3 { span .place { (place + 1) } " " (case.operator) " " span .note { (origin_word(case.origin)) " case " } (anchors.of(case).0) }
            @if findings.is_empty() { p { (badge(Standing::Error)) " No check ran." } }
            @for check in open { (finding(check)) }
            @if !folded.is_empty() {
                details { summary { (counted(folded.len() as u64, "more failing check")) " of this case" } @for check in folded { (finding(check)) } }
            }
            div .evidence {
                div .case { p .label { "case" } pre { (pretty(&case.case, 66)) } (also(case)) }
                @if let (true, Some((check, metrics))) = (pictured, worst) {
                    div .pictured { p .label { "error ÷ budget of " code { (check.tensor) } } (picture::heat(&metrics.heat, (48, 64))) }
                }
            }
            p .label { "replay" }
            (command(&case.replay))
        }
    }
}

fn finding(check: &CheckRecord) -> Markup {
    html! {
        div .finding {
            p {
                (badge(Standing::of(check))) " " strong { (check.check) }
                @if !check.tensor.is_empty() { " of " code { (check.tensor) } }
                span .note { " · " (counted(check.compared, "element")) " compared" }
            }
            @let message = message(check);
            @if message.contains('\n') { pre .message { (message) } } @else { p .message { (message) } }
            @if let Some(metrics) = &check.metrics { (worst_element(metrics)) }
        }
    }
}

fn worst_element(metrics: &Metrics) -> Markup {
    let worst = &metrics.worst;
    let index: Vec<String> = worst.index.iter().map(u64::to_string).collect();
    let error = (worst.kernel - worst.oracle).abs();
    html! {
        dl .facts {
            div { dt { "worst element" } dd { code { "[" (index.join(", ")) "]" } } }
            div { dt { "kernel" } dd { (number(worst.kernel, element(worst.kernel))) } }
            div { dt { "oracle" } dd { (number(worst.oracle, element(worst.oracle))) } }
            div { dt { "error" } dd { (number(error, significant(error, 3))) } }
            div { dt { "allowed" } dd { (number(worst.allowed, significant(worst.allowed, 3))) } }
            div { dt { "budget used" } dd { strong { (significant(metrics.budget_used, 3)) } } }
            div { dt { "norm ratio" } dd { (number(metrics.norm_ratio, significant(metrics.norm_ratio, 6))) } }
            div { dt { "worst row" } dd { (count(metrics.worst_row)) ", relative L2 " (number(metrics.worst_row_relative_l2, scientific(metrics.worst_row_relative_l2))) } }
        }
    }
}

/// What else ran.
fn also(case: &CaseRecord) -> Markup {
    let passed = passed(case);
    html! {
        @if !case.paths.is_empty() { p .note { "Kernel paths: " (case.paths.join(", ")) "." } }
        @if !passed.is_empty() { p .note { "Passed: " (passed.join(", ")) "." } }
    }
}
