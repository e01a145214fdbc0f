//! The findings of a run as one page without external references.

use maud::{DOCTYPE, Markup, html};

use super::NAMED;
use super::terminal::{headline, place};
use crate::blame::judge::Finding;
use crate::blame::summary::{Blame, Cell, Grid};
use crate::record::HeatMap;
use crate::report::elements::{breakable, page_head, page_script, scroller};
use crate::report::numbers::{counted, significant};
use crate::report::picture;

/// Style that the report's style sheet does not have.
const OWN_STYLE: &str = "
.blame td { text-align: right; }
.blame .outside { color: var(--fail); background: var(--fail-ground); font-weight: 600; }
.growth rect { fill: var(--link); } .growth .added { fill: var(--fail); }
";

/// The whole page.
pub fn page(blame: &Blame) -> String {
    let guilty = blame.first().is_some();
    let headline = headline(blame);
    let (title, more) = headline.split_once('\n').unwrap_or((&headline, ""));
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            (page_head(title, OWN_STYLE))
            body {
                (picture::patterns())
                main {
                    header class=(if guilty { "verdict fail" } else { "verdict pass" }) {
                        p .product { "DeepSeek-V4 kernel parity · which operator is to blame · " (blame.run) }
                        h1 { span aria-hidden="true" { (if guilty { "✗" } else { "✓" }) } " " (title) }
                        @if !more.is_empty() { p { (more) } }
                    }
                    (worst(blame))
                    (grid(blame))
                    (growth(blame))
                    (skipped(blame))
                    (reading())
                    (page_script())
                }
            }
        }
    };
    page.into_string()
}

fn worst(blame: &Blame) -> Markup {
    let error = |finding: &Finding| {
        let number = |value: f64| significant(value, 3);
        let error = finding.error();
        let of = |part: fn(&crate::blame::shadow::TensorError) -> f64| {
            error.map_or_else(|| "—".to_owned(), |error| number(part(error)))
        };
        [of(|error| error.added), of(|error| error.inherited), of(|error| error.total)]
    };
    let table = html! {
        table {
            thead { tr { th scope="col" { "call" } th scope="col" { "share of budget" } th scope="col" { "adds" } th scope="col" { "inherits" } th scope="col" { "error" } th scope="col" { "moves the logits" } th scope="col" { "what failed" } } }
            tbody {
                @for finding in blame.worst(3 * NAMED) {
                    tr {
                        td .prose { @if finding.is_guilty() { span .badge.fail { "✗" } " " } (breakable(&place(blame, finding))) }
                        td { (significant(finding.budget_used, 3)) }
                        @for part in error(finding) { td { (part) } }
                        td { (finding.effect.map_or_else(|| "—".to_owned(), |effect| significant(effect, 3))) }
                        td .prose { @for failure in finding.failures.iter().take(3) { p { strong { (failure.check) " " (failure.tensor) } ": " (failure.message) } } }
                    }
                }
            }
        }
    };
    html! {
        section #calls { h2 { "Calls outside their budgets, then those that move the logits most" } (scroller("Calls", table)) }
    }
}

/// The grid as a picture: an operator a row, a layer a column.
fn heat_map(grid: &Grid) -> HeatMap {
    let (rows, columns) = (grid.operators.len(), grid.layers.len());
    let share = |cell: &Option<Cell>| match cell {
        Some(Cell { used: Some(used), is_guilty }) => {
            // A call may fail another check than that of its elements.
            let used = if *is_guilty { used.max(1.01) } else { *used };
            used as f32
        }
        _ => HeatMap::NOT_COMPARED,
    };
    HeatMap {
        rows: rows as u32,
        columns: columns as u32,
        total_rows: rows as u64,
        total_columns: columns as u64,
        cells: grid.cells.iter().flatten().map(share).collect(),
    }
}

fn grid(blame: &Blame) -> Markup {
    let grid = blame.grid();
    let map = heat_map(&grid);
    let table = html! {
        table .blame {
            thead { tr { th scope="col" { "operator" } @for layer in &grid.layers { th scope="col" { (layer) } } } }
            tbody {
                @for (operator, cells) in grid.operators.iter().zip(&grid.cells) {
                    tr {
                        th scope="row" { (breakable(operator)) }
                        @for cell in cells {
                            @match cell {
                                None => td {},
                                Some(Cell { used: None, .. }) => td { "?" },
                                Some(Cell { used: Some(used), is_guilty }) => td .outside[*is_guilty] { (significant(*used, 2)) },
                            }
                        }
                    }
                }
            }
        }
    };
    html! {
        section #grid {
            h2 { "Share of budget by operator and layer" }
            p .note { "Rows are operators in the order in which they first ran, columns layers; `-` is outside the layers. Each cell has the largest share of a budget of its calls." }
            (picture::legend())
            (picture::heat(&map, (grid.operators.len().max(1), grid.layers.len().max(1))))
            (scroller("Share of budget", table))
        }
    }
}

/// Width of a bar of the largest error.
const BAR: f64 = 240.0;

fn growth(blame: &Blame) -> Markup {
    let growth = blame.growth();
    let largest = growth.iter().map(|of| of.total).fold(0.0, f64::max);
    let width = |value: f64| if largest > 0.0 { (BAR * value / largest).round() } else { 0.0 };
    let table = html! {
        table .growth {
            thead { tr { th scope="col" { "layer" } th scope="col" { "error of the streams" } th scope="col" { "added by its last call" } th scope="col" { "" } } }
            tbody {
                @for of in &growth {
                    tr {
                        th scope="row" { (of.layer) }
                        td { (significant(of.total, 3)) }
                        td { (significant(of.added, 3)) }
                        td { svg width=(BAR) height="12" aria-hidden="true" { rect width=(width(of.total)) height="12" {} rect .added width=(width(of.added)) height="4" y="8" {} } }
                    }
                }
            }
        }
    };
    html! {
        @if !growth.is_empty() {
            section #growth { h2 { "Growth of the error" } (scroller("Growth", table)) }
        }
    }
}

fn skipped(blame: &Blame) -> Markup {
    let skipped: Vec<&Finding> = blame.skipped().collect();
    html! {
        @if !skipped.is_empty() {
            section #skips {
                h2 { (counted(skipped.len() as u64, "call")) " not judged" }
                ul { @for finding in skipped { li { (place(blame, finding)) ": " (finding.skipped.as_deref().unwrap_or_default()) } } }
            }
        }
    }
}

fn reading() -> Markup {
    html! {
        section #reading {
            h2 { "How to read this page" }
            p { "Each call is compared with the oracle on the tensors that the call itself read, so an error of an earlier call does not count. A share above 1 is an error that rounding does not explain." }
            p { "Errors are root mean squares over that of the run without any rounding. What a call adds is its distance from the oracle on its own inputs; what it inherits is the distance of that from the run without rounding. Choices of experts and entries are followed. How far a call moves the logits is the effect of its own error alone, in a run without any other." }
            p .note { "Numbers: " code { "blame.json" } " next to this page." }
        }
    }
}
