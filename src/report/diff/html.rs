//! A comparison as one page without external references, the two reports side by side.

use maud::{DOCTYPE, Markup, html};

use super::FALSE_ALARM_RATE;
use super::compare::{BenchmarkDiff, Diff, Finding, Kind, OperatorDiff, Spread, TensorDiff};
use super::text::{headline, side};
use crate::record::{BenchmarkRecord, Report};
use crate::report::elements::{breakable, page_head, page_script, scroller};
use crate::report::numbers::{count, counted, scientific, significant, time};

/// Style that the report's style sheet does not have.
const OWN_STYLE: &str = "
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 0.8rem; margin: 0.9rem 0; }
.sides .card { margin: 0; }
.sides h2 { border: none; margin: 0 0 0.3rem; padding: 0; }
.sides .differs { font-weight: 600; }
.sides .facts { display: grid; }
.findings td { overflow-wrap: anywhere; min-width: 6rem; }
.findings .what { min-width: 9.5rem; }
.findings .why { min-width: 9rem; }
.edge { border-left: 2px solid var(--line); }
.same { color: var(--quiet); }
.worse { color: var(--fail); background: var(--fail-ground); font-weight: 600; }
.better { color: var(--pass); background: var(--pass-ground); font-weight: 600; }
.intervals { display: block; width: 180px; height: 26px; }
.intervals .base { stroke: var(--quiet); stroke-width: 4; } .intervals .head { stroke: var(--link); stroke-width: 4; }
.intervals circle { fill: var(--text); }
";

/// The whole page.
pub fn page(base: &Report, head: &Report, diff: &Diff) -> String {
    let worse = diff.regressions().next().is_some();
    let title = headline(diff);
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            (page_head(&title, OWN_STYLE))
            body {
                main {
                    header class=(if worse { "verdict fail" } else { "verdict pass" }) {
                        p .product { "DeepSeek-V4 kernel parity · HEAD against BASE" }
                        h1 { span aria-hidden="true" { (if worse { "✗" } else { "✓" }) } " " (title) }
                    }
                    (sides(base, head))
                    @if !diff.notes.is_empty() {
                        section #notes { h2 { "Read with care" } ul { @for note in &diff.notes { li { (note) } } } }
                    }
                    (findings("regressions", "Regressions", &diff.findings, Kind::is_regression))
                    (findings("changes", "Other changes", &diff.findings, |kind| !kind.is_regression()))
                    @for operator in &diff.operators { (operator_section(operator)) }
                    (benchmarks(&diff.benchmarks))
                    (reading())
                    (page_script())
                }
            }
        }
    };
    page.into_string()
}

fn sides(base: &Report, head: &Report) -> Markup {
    let (was, is) = (side(base), side(head));
    let card =
        |name: &str, own: &[(&'static str, String); 5], other: &[(&'static str, String); 5]| {
            html! {
                div .card {
                    h2 { (name) }
                    dl .facts {
                        @for ((label, value), (_, opposite)) in own.iter().zip(other) {
                            div { dt { (label) } dd .differs[value != opposite] { (value) } }
                        }
                    }
                }
            }
        };
    html! { div .sides { (card("BASE", &was, &is)) (card("HEAD", &is, &was)) } }
}

fn findings(id: &str, title: &str, all: &[Finding], wanted: fn(Kind) -> bool) -> Markup {
    let shown: Vec<_> = all.iter().filter(|finding| wanted(finding.kind)).collect();
    let table = html! {
        table .findings {
            thead { tr { th scope="col" { "change" } th scope="col" { "what" } th .edge scope="col" { "BASE" } th .edge scope="col" { "HEAD" } th .edge scope="col" { "why" } } }
            tbody {
                @for finding in &shown {
                    tr {
                        td { span class=(badge(finding.kind)) { (finding.kind.words()) } }
                        td .what { strong { (breakable(&finding.operator)) } br; (breakable(&finding.subject)) }
                        td .edge { (finding.base) }
                        td .edge { (finding.head) }
                        td .edge.why {
                            (finding.why)
                            @if let Some(replay) = finding.replay.as_ref().filter(|_| finding.kind <= Kind::StillFailing) {
                                details { summary { "replay" } code .command.short { (replay) } }
                            }
                        }
                    }
                }
            }
        }
    };
    html! {
        @if !shown.is_empty() { section id=(id) { h2 { (title) } (scroller(title, table)) } }
    }
}

fn badge(kind: Kind) -> &'static str {
    match kind {
        kind if kind.is_regression() => "badge fail",
        Kind::StillFailing => "badge warn",
        _ => "badge pass",
    }
}

fn operator_section(operator: &OperatorDiff) -> Markup {
    let ([were, are, both], remembered) = (operator.cases, operator.remembered);
    let checks = html! {
        table {
            caption { "Checks that passed / that ran." }
            thead { tr { th scope="col" { "check" } th .count.edge scope="col" { "BASE" } th .count.edge scope="col" { "HEAD" } } }
            tbody {
                @for check in &operator.checks {
                    @let differs = check.base != check.head;
                    tr {
                        th scope="row" { (breakable(&check.check)) }
                        td .count.edge.same[!differs] { (passed(check.base)) }
                        td class=(format!("count edge {}", standing(check.base, check.head))) { (passed(check.head)) }
                    }
                }
            }
        }
    };
    html! {
        section id=(format!("operator-{}", operator.name)) {
            h2 { (operator.name) }
            p .note {
                (counted(were, "case")) " in BASE, " (count(are)) " in HEAD, " (count(both)) " in both."
                @if remembered != [0, 0, 0] {
                    " Remembered cases, compared apart: " (count(remembered[0])) " in BASE, " (count(remembered[1])) " in HEAD, " (count(remembered[2])) " of BASE's also in HEAD."
                }
            }
            (tensors(&operator.tensors))
            (paths(operator))
            details { summary { "All " (counted(operator.checks.len() as u64, "check")) } (scroller("Checks", checks)) }
        }
    }
}

fn passed((passed, ran): (u64, u64)) -> String {
    if ran == 0 { "—".to_owned() } else { format!("{} / {}", count(passed), count(ran)) }
}

/// The class of HEAD's cell: by failures, then by what no longer runs.
fn standing(base: (u64, u64), head: (u64, u64)) -> &'static str {
    let (were, are) = (base.1 - base.0, head.1 - head.0);
    if are > were || (head.1 == 0 && base.1 > 0) {
        "worse"
    } else if are < were {
        "better"
    } else {
        "same"
    }
}

fn tensors(tensors: &[TensorDiff]) -> Markup {
    let table = html! {
        table {
            caption { "Share of the budget that was used, over the cases; relative budget: how tight the budget is." }
            thead {
                tr {
                    th scope="col" rowspan="2" { "check, tensor" }
                    th .spread scope="colgroup" colspan="2" { "median use" }
                    th .spread scope="colgroup" colspan="2" { "worst use" }
                    th .spread scope="colgroup" colspan="2" { "relative budget" }
                    th .count.edge scope="col" rowspan="2" { "cases" br; "up / down" }
                    th .count scope="col" rowspan="2" { "largest rise" br; "of one case" }
                }
                tr { @for _ in 0..3 { th .count.edge scope="col" { "BASE" } th .count scope="col" { "HEAD" } } }
            }
            tbody { @for tensor in tensors { (tensor_row(tensor)) } }
        }
    };
    html! { @if !tensors.is_empty() { (scroller("Budget use", table)) } }
}

fn tensor_row(tensor: &TensorDiff) -> Markup {
    let show = |side: &Option<Spread>, text: &dyn Fn(&Spread) -> String| {
        side.as_ref().map_or("—".to_owned(), text)
    };
    let class = |worse: bool, better: bool| match (worse, better) {
        (true, _) => "count worse",
        (_, true) => "count better",
        _ => "count",
    };
    let [grew, fell, loosened, tightened] = tensor.stands;
    let median = |spread: &Spread| significant(spread.median, 3);
    let worst = |spread: &Spread| significant(spread.worst, 3);
    let relative = |spread: &Spread| scientific(spread.relative);
    html! {
        tr {
            th scope="row" { (tensor.check) " " code { (tensor.tensor) } }
            td .count.edge { (show(&tensor.base, &median)) }
            td class=(class(grew, fell)) { (show(&tensor.head, &median)) @if grew { " ▲" } @if fell { " ▼" } }
            td .count.edge { (show(&tensor.base, &worst)) }
            td .count { (show(&tensor.head, &worst)) }
            td .count.edge { (show(&tensor.base, &relative)) }
            td class=(class(loosened, tightened)) { (show(&tensor.head, &relative)) @if loosened { " ▲" } @if tightened { " ▼" } }
            td .count.edge { @if let Some((up, down)) = tensor.moved { (count(up)) " / " (count(down)) } @else { "other cases" } }
            td .count {
                @if let Some((was, is, _)) = &tensor.largest_rise { (significant(*was, 3)) " → " (significant(*is, 3)) } @else { "—" }
            }
        }
    }
}

fn paths(operator: &OperatorDiff) -> Markup {
    let table = html! {
        table {
            caption { "Cases that ran each kernel path." }
            thead { tr { th scope="col" { "path" } th .count.edge scope="col" { "BASE" } th .count.edge scope="col" { "HEAD" } } }
            tbody {
                @for (path, [was, is]) in &operator.paths {
                    tr {
                        th scope="row" { code { (breakable(path)) } }
                        td .count.edge { (count(*was)) }
                        td class=(if *is == 0 { "count edge worse" } else { "count edge" }) { (count(*is)) }
                    }
                }
            }
        }
    };
    html! { @if !operator.paths.is_empty() { details { summary { (counted(operator.paths.len() as u64, "kernel path")) } (scroller("Paths", table)) } } }
}

fn benchmarks(benchmarks: &[BenchmarkDiff]) -> Markup {
    let table = html! {
        table {
            caption { "Median time of one call with its 95 % confidence interval; grey BASE, blue HEAD." }
            thead { tr { th scope="col" { "benchmark" } th .count.edge scope="col" { "BASE" } th .count.edge scope="col" { "HEAD" } th .count.edge scope="col" { "change (bounds)" } th scope="col" { "intervals" } th scope="col" { "verdict" } } }
            tbody {
                @for diff in benchmarks {
                    tr {
                        th scope="row" { (breakable(&diff.id)) }
                        td .count.edge { (measured(diff.base.as_ref())) }
                        td .count.edge { (measured(diff.head.as_ref())) }
                        td .count.edge { (diff.change()) }
                        td { (intervals(diff)) }
                        td { @match diff.kind {
                            Some(kind) => span class=(badge(kind)) { (kind.words()) },
                            None if diff.ratio().is_some() => span .same { "no change shown" },
                            None => span .same { "not compared" },
                        } }
                    }
                }
            }
        }
    };
    html! { @if !benchmarks.is_empty() { section #benchmarks { h2 { "Speed" } (scroller("Speed", table)) } } }
}

fn measured(record: Option<&BenchmarkRecord>) -> Markup {
    html! {
        @if let Some(one) = record {
            (time(one.median_ns)) br; span .note { (time(one.low_ns)) " … " (time(one.high_ns)) }
        } @else { "—" }
    }
}

/// Both confidence intervals on one axis from the lowest to the highest of their ends.
fn intervals(diff: &BenchmarkDiff) -> Markup {
    let (Some(base), Some(head)) = (&diff.base, &diff.head) else { return html! {} };
    let (low, high) = (base.low_ns.min(head.low_ns), base.high_ns.max(head.high_ns));
    let at =
        |value: f64| if high > low { 6.0 + 168.0 * (value - low) / (high - low) } else { 90.0 };
    let bar = |class: &str, one: &BenchmarkRecord, y: u32| {
        html! {
            line class=(class) x1=(format!("{:.1}", at(one.low_ns) - 1.0)) x2=(format!("{:.1}", at(one.high_ns) + 1.0)) y1=(y) y2=(y) {}
            circle cx=(format!("{:.1}", at(one.median_ns))) cy=(y) r="3" {}
        }
    };
    html! {
        svg .intervals viewBox="0 0 180 26" role="img" aria-label="Confidence intervals of BASE above HEAD" {
            (bar("base", base, 7)) (bar("head", head, 19))
        }
    }
}

fn reading() -> Markup {
    let rate = significant(100.0 * FALSE_ALARM_RATE, 1);
    html! {
        section #reading {
            h2 { "How to read this page" }
            dl .glossary {
                dt { "budget use grew ▲" }
                dd { "The same cases, compared in pairs, lean upwards more than a change of rounding order would make them (Wilcoxon's signed-rank test); with different seeds, Mann and Whitney's rank-sum test. Over all tensors, at most " (rate) " % of comparisons are red without cause. Cases that are bit-equal in both say nothing." }
                dt { "budget loosened ▲" }
                dd { "The same test on the budget relative to the value: the check now forgives more." }
                dt { "largest rise of one case" }
                dd { "One case alone proves nothing about a kernel whose roundings were reshuffled; it is shown so that a person can look." }
                dt { "slower, faster" }
                dd { "Only where the confidence intervals do not overlap. They hold the scatter within one run, not that between runs." }
                dt { "coverage shrank" }
                dd { "Fewer cases, a path or check that no longer runs, an axis, type, benchmark or mutant that is gone, fewer random schedules." }
            }
        }
    }
}
