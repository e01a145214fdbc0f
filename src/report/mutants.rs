//! The page's kill matrix: rates, survivors with the changed line, operator × mutant × check.

use std::collections::BTreeMap;

use maud::{Markup, html};

use crate::mutants::matrix::tally::Tally;
use crate::record::{Check, KillMatrixRecord, MutantRecord, MutantSource, MutantStatus, Report};

use super::elements::{breakable, scroller};
use super::numbers::{count, counted};
use super::specification::linked;
use super::summary::{column, place_of, survived};

/// The section; empty where no mutant was run.
pub(super) fn section(report: &Report) -> Markup {
    let mutants = &report.mutants;
    let survivors: Vec<_> = mutants.iter().filter(|mutant| survived(mutant)).collect();
    html! {
        @if !mutants.is_empty() {
            section #mutants {
                h2 { "Mutants" }
                (verdict(report, survivors.len() as u64))
                (tally_table(report))
                @if !survivors.is_empty() {
                    h3 { "Survivors" }
                    div .survivors { @for mutant in &survivors { (survivor(mutant)) } }
                }
                @for operator in operators(mutants) { (matrix(operator, mutants)) }
                (classes(mutants))
                (set_aside(mutants, MutantStatus::Equivalent))
                (set_aside(mutants, MutantStatus::Invalid))
            }
        }
    }
}

fn verdict(report: &Report, survivors: u64) -> Markup {
    let matrix = report.kill_matrix.as_ref();
    let (floor, sample) = matrix.map_or((0.0, Some(0)), |matrix| (matrix.floor, matrix.sample));
    let shortfalls: Vec<String> =
        Tally::all(report).iter().filter_map(|tally| tally.shortfall(floor, sample)).collect();
    let judged = report.mutants.iter().filter(|mutant| judged(mutant)).count() as u64;
    html! {
        @if survivors > 0 {
            p .alarm {
                strong { "✗ " (counted(survivors, "mutant")) " of " (count(judged)) " survived." }
                " Until a check sees them, a pass of their operators proves less than it seems."
            }
        } @else {
            p { span .badge.pass { "✓ all killed" } " " (count(judged)) " of " (count(judged)) "." }
        }
        @for reason in &shortfalls { p .alarm { strong { "✗ Below what is asked: " } (reason) "." } }
        @if let Some(matrix) = matrix { (how_chosen(matrix)) }
    }
}

fn how_chosen(matrix: &KillMatrixRecord) -> Markup {
    html! {
        p .note {
            "Every planted mutant must be killed, and " (percent(matrix.floor)) " of each operator's generated ones. "
            @match matrix.sample {
                Some(sample) => { "At most " (count(sample)) " of an operator were drawn, evenly from their classes, with seed " (matrix.seed) ". " }
                None => { "All that the syntax trees gave were to run. " }
            }
            @if matrix.all_checks { "Each ran on all its cases." }
            @else { "A generated mutant ran up to the first case that killed it; its row names the checks that failed there." }
        }
    }
}

fn judged(mutant: &MutantRecord) -> bool {
    matches!(mutant.status, MutantStatus::Killed | MutantStatus::Survived)
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn operators(mutants: &[MutantRecord]) -> Vec<&str> {
    let mut names = Vec::new();
    for mutant in mutants {
        if !names.contains(&mutant.operator.as_str()) {
            names.push(&mutant.operator);
        }
    }
    names
}

fn tally_table(report: &Report) -> Markup {
    let floor = report.kill_matrix.as_ref().map(|matrix| matrix.floor);
    let table = html! {
        table {
            caption { "Mutants of each operator. The rate is of generated mutants that ran and compile, equivalent ones aside." }
            thead {
                tr {
                    th scope="col" { "operator" } th .count scope="col" { "planted killed" }
                    @for label in ["generated", "killed", "survived", "equivalent", "invalid", "not run"] { th .count scope="col" { (label) } }
                    th scope="col" { "kill rate" }
                }
            }
            tbody { @for tally in Tally::all(report) { (tally_row(&tally, floor)) } }
        }
    };
    scroller("Mutants of each operator", table)
}

fn tally_row(tally: &Tally, floor: Option<f64>) -> Markup {
    let planted = tally.planted_killed + tally.planted_missed;
    let left_out = tally.left_out.as_ref();
    let generated = left_out.map_or(0, |counts| counts.generated);
    html! {
        tr {
            th scope="row" { (tally.operator) }
            td .count { @if tally.planted_missed > 0 { strong .fail-text { "✗ " (count(tally.planted_killed)) } } @else { (count(tally.planted_killed)) } " / " (count(planted)) }
            @for number in [generated, tally.killed, tally.survived, tally.equivalent, tally.invalid, left_out.map_or(0, |counts| counts.not_drawn + counts.not_run)] {
                td .count { (count(number)) }
            }
            td { (rate(tally, floor)) }
        }
    }
}

fn rate(tally: &Tally, floor: Option<f64>) -> Markup {
    let Some(rate) = tally.rate() else { return html! { span .note { "none judged" } } };
    let below = floor.is_some_and(|floor| rate < floor);
    html! {
        span .meter aria-hidden="true" { span style=(format!("width:{:.1}%", 100.0 * rate)) {} } " "
        @if below { strong .fail-text { "✗ " (percent(rate)) } } @else { (percent(rate)) }
    }
}

fn survivor(mutant: &MutantRecord) -> Markup {
    html! {
        article .card.failure {
            h4 { code { (mutant.id) } }
            p { (mutant.summary) }
            (change(mutant))
            p .note {
                (place(mutant))
                @if !mutant.class.is_empty() { " · " (mutant.class) }
                @if !mutant.catalogue.is_empty() { " · " (linked(&mutant.catalogue)) }
                @if !mutant.expected.is_empty() { " · expected to be seen by " (breakable(&mutant.expected)) }
                @if mutant.cases_run > 0 { " · survived " (counted(mutant.cases_run, "case")) }
                @else if mutant.source == MutantSource::Generated { " · no case runs its kernels" }
            }
        }
    }
}

fn place(mutant: &MutantRecord) -> Markup {
    html! { @if !mutant.file.is_empty() { code { (mutant.file) ":" (mutant.line) } } @else { (mutant.operator) } }
}

/// The kernel's lines before and after.
fn change(mutant: &MutantRecord) -> Markup {
    html! {
        @if !mutant.original.is_empty() {
            pre .change {
                @for line in mutant.original.lines() { span .removed { "- " (line) "\n" } }
                @for line in mutant.mutated.lines() { span .added { "+ " (line) "\n" } }
            }
        }
    }
}

/// The checks that killed a mutant of the list, as columns, in the order of the page's other
/// matrix.
fn columns<'a>(mutants: &[&'a MutantRecord]) -> Vec<&'a str> {
    let mut columns: Vec<&str> =
        mutants.iter().flat_map(|mutant| &mutant.killed_by).map(column).collect();
    columns.sort_by_key(|&name| (place_of(name), name));
    columns.dedup();
    columns
}

fn matrix(operator: &str, mutants: &[MutantRecord]) -> Markup {
    let mut own: Vec<&MutantRecord> =
        mutants.iter().filter(|mutant| mutant.operator == operator && judged(mutant)).collect();
    // Survivors first, then planted ones, then by place in the file.
    own.sort_by_key(|mutant| {
        (!survived(mutant), mutant.source == MutantSource::Generated, mutant.line)
    });
    let columns = columns(&own);
    let planted = own.iter().filter(|mutant| mutant.source == MutantSource::Planted).count() as u64;
    let survivors = own.iter().filter(|mutant| survived(mutant)).count() as u64;
    let table = html! {
        table .matrix.kills {
            caption { "✗ the check failed on the mutant, as it should; ✪ the check that was expected to. A mutant without a mark survived." }
            thead {
                tr { th scope="col" { "mutant" } @for column in &columns { th .upright scope="col" { span { (column) } } } }
                tr { th scope="row" { "mutants seen" } @for column in &columns { td .note { (count(seen(&own, column))) } } }
            }
            tbody { @for mutant in &own { (matrix_row(mutant, &columns)) } }
        }
    };
    html! {
        details .tensor open[survivors > 0 && own.len() <= 60] {
            summary {
                "Matrix of " code { (operator) }
                span .note { " · " (count(planted)) " planted, " (count(own.len() as u64 - planted)) " generated, " (counted(survivors, "survivor")) }
            }
            (scroller(&format!("Kill matrix of {operator}"), table))
        }
    }
}

fn seen(mutants: &[&MutantRecord], name: &str) -> u64 {
    mutants
        .iter()
        .filter(|mutant| mutant.killed_by.iter().any(|check| column(check) == name))
        .count() as u64
}

fn matrix_row(mutant: &MutantRecord, columns: &[&str]) -> Markup {
    let as_expected = mutant.killed_by.iter().any(|check| *check == *mutant.expected)
        || mutant.expected.is_empty()
        || survived(mutant);
    html! {
        tr .survivor[survived(mutant)] {
            th scope="row" {
                details .mutant {
                    summary { @if survived(mutant) { span .fail-text { "✗ " } } (short(mutant)) span .note { " line " (mutant.line) }
                        @if !as_expected { " " span .badge.warn title="Killed, but not by the check that was expected to see it" { "▲ not as expected" } } }
                    p { (mutant.summary) }
                    (change(mutant))
                    p .note { code { (mutant.id) } @if !mutant.catalogue.is_empty() { " · " (linked(&mutant.catalogue)) } @if !mutant.reason.is_empty() { br; (mutant.reason.lines().next().unwrap_or_default()) } }
                }
            }
            @for name in columns { (kill_cell(mutant, name)) }
        }
    }
}

/// A planted mutant's name; for a generated one, function and class.
fn short(mutant: &MutantRecord) -> Markup {
    match mutant.source {
        MutantSource::Planted => html! { (breakable(&mutant.id)) },
        MutantSource::Generated => {
            let function = mutant.id.split(':').nth(1).unwrap_or(&mutant.id);
            html! { (breakable(function)) span .note { " " (mutant.class) } }
        }
    }
}

fn kill_cell(mutant: &MutantRecord, name: &str) -> Markup {
    let killed = mutant.killed_by.iter().any(|check| column(check) == name);
    let expected = column(&Check::from(mutant.expected.as_str())) == name;
    match (killed, expected) {
        (true, true) => html! { td .pass title=(name) { "✪" } },
        (true, false) => html! { td .pass title=(name) { "✗" } },
        (false, true) => {
            html! { td .fail title=(format!("{name} was expected to see it")) { "○" } }
        }
        (false, false) => html! { td .none {} },
    }
}

/// Generated mutants by class: the kinds of change that the cases detect least.
fn classes(mutants: &[MutantRecord]) -> Markup {
    let mut classes: BTreeMap<&str, Vec<&MutantRecord>> = BTreeMap::new();
    for mutant in mutants.iter().filter(|mutant| mutant.source == MutantSource::Generated) {
        classes.entry(&mutant.class).or_default().push(mutant);
    }
    let table = html! {
        table {
            thead { tr { th scope="col" { "class" } @for label in ["killed", "survived", "equivalent", "invalid"] { th .count scope="col" { (label) } } th scope="col" { "kill rate" } } }
            tbody {
                @for (class, mutants) in &classes {
                    @let tally = Tally::of(mutants.iter().copied());
                    tr {
                        th scope="row" { (class) }
                        @for number in [tally.killed, tally.survived, tally.equivalent, tally.invalid] { td .count { (count(number)) } }
                        td { (rate(&tally, None)) }
                    }
                }
            }
        }
    };
    html! { @if !classes.is_empty() { h3 { "Classes of generated mutants" } (scroller("Classes of generated mutants", table)) } }
}

/// Mutants that count neither as killed nor as survivors, each with its reason.
fn set_aside(mutants: &[MutantRecord], status: MutantStatus) -> Markup {
    let own: Vec<_> = mutants.iter().filter(|mutant| mutant.status == status).collect();
    let title = match status {
        MutantStatus::Equivalent => "Equivalent: they compute what the kernel computes",
        _ => "Invalid: they do not compile, or their launch is refused",
    };
    html! {
        @if !own.is_empty() {
            details .more {
                summary { (title) " (" (count(own.len() as u64)) ")" }
                @for mutant in own {
                    article .card {
                        h4 { code { (mutant.id) } span .note { " " (place(mutant)) } }
                        (change(mutant))
                        p { (mutant.reason.lines().next().unwrap_or_default()) }
                    }
                }
            }
        }
    }
}
