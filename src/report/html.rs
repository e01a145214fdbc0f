//! The page: verdict, failures, matrix, operators, mutants, skips, environment, glossary.

use maud::{DOCTYPE, Markup, html};

use crate::record::Report;

use super::elements::{page_head, scroller};
use super::numbers::{bytes, count, counted, duration, significant, utc};
use super::skips::by_reason;
use super::summary::{Cell, Counts, Matrix, Standing, operators, origins};
use super::{diagnosis, failures, mutants, operators as sections, picture, specification};

/// The whole page.
pub(super) fn page(report: &Report) -> Markup {
    let counts = Counts::of(report);
    let (_, headline) = counts.headline();
    html! {
        (DOCTYPE)
        html lang="en" {
            (page_head(&headline, ""))
            body {
                (picture::patterns())
                main {
                    (verdict(report, &counts))
                    (contents(report, &counts))
                    (failures::section(report))
                    (matrix(report))
                    (sections::sections(report))
                    (mutants::section(report))
                    (skips(report))
                    (environment(report))
                    (glossary())
                    (specification::section(report))
                    footer { "Schema version " (report.schema_version) ". Made from records alone: report.json beside this page holds every number on it." }
                }
            }
        }
    }
}

fn verdict(report: &Report, counts: &Counts) -> Markup {
    let (class, headline) = counts.headline();
    let symbol = match class {
        "pass" => "✓",
        "warn" => "▲",
        _ => "✗",
    };
    html! {
        header class=(format!("verdict {class}")) {
            p .product { "DeepSeek-V4 kernel parity · " (report.profile) " · " (utc(report.started_unix)) }
            h1 { span .symbol aria-hidden="true" { (symbol) } " " (headline) }
            (warnings(report, counts))
        }
        (diagnosis::page::verdict(report))
        (totals(report, counts))
        (provenance(report))
    }
}

fn warnings(report: &Report, counts: &Counts) -> Markup {
    html! {
        ul .warnings {
            @if report.revision.dirty { li { strong { "DIRTY TREE" } " — built with uncommitted changes; the commit alone does not reproduce this." } }
            @if counts.survivors > 0 { li { strong { (counted(counts.survivors, "mutant")) " survived" } " — the sweep is blind to a bug that it is meant to see. " a href="#mutants" { "Which" } } }
            @for (operator, missing) in report.paths_never_run() {
                li { strong { (counted(missing.len() as u64, "path")) " of " (operator) " never ran" } ": " (missing.join(", ")) "." }
            }
            @for (operator, tensor) in report.without_power() {
                li { strong { "Nothing was shown of " (tensor) " of " (operator) } ": no case would have seen an error of 10 %." }
            }
            @if counts.skipped > 0 { li { strong { (count(counts.skipped)) " skipped" } " — " a href="#skips" { "what and why" } } }
            @if report.ceilings.is_none() && !report.benchmarks.is_empty() { li { "Benchmarks without measured device rates: no share of the limit is known." } }
        }
    }
}

fn totals(report: &Report, counts: &Counts) -> Markup {
    let origins: Vec<String> =
        origins(report).into_iter().map(|(word, cases)| format!("{} {word}", count(cases))).collect();
    let swept = operators(report).len() as u64;
    html! {
        dl .totals {
            div { dt { "cases" } dd { (count(counts.cases)) } dd .note { (origins.join(", ")) } }
            div { dt { "checks" } dd { (count(counts.checks)) } dd .note { (count(counts.standing(Standing::Pass))) " passed" } }
            div { dt { "compared elements" } dd { (count(counts.compared)) } dd .note { "over all checks" } }
            div { dt { "operators" } dd { (count(swept)) } dd .note { (counted(report.mutants.len() as u64, "mutant")) } }
            div { dt { "duration" } dd { (duration(report.seconds)) } dd .note { "seed " (report.seed) } }
        }
    }
}

fn provenance(report: &Report) -> Markup {
    let environment = &report.environment;
    html! {
        dl .facts .provenance {
            div { dt { "ran on" } dd { strong { (environment.backend) } " · " (environment.device) " · " (environment.target) } }
            div { dt { "revision" } dd { code { (report.revision.commit) } @if report.revision.dirty { " " span .badge.fail { "✗ dirty" } } } }
            div { dt { "kernels" } dd { (report.revision.kernels) " · blake3 " code { (report.revision.kernels_digest.chars().take(16).collect::<String>()) } } }
        }
        p .repeat { span .label { "repeat with" } code .command { (report.command) } }
    }
}

fn contents(report: &Report, counts: &Counts) -> Markup {
    html! {
        nav aria-label="Contents" {
            @if counts.failing_cases > 0 { a href="#failures" { "Failures" } }
            a href="#matrix" { "Matrix" }
            @for operator in operators(report) { a href=(format!("#operator-{}", operator.name)) { (operator.name) } }
            @if !report.mutants.is_empty() { a href="#mutants" { "Mutants" } }
            a href="#skips" { "Skips" }
            a href="#environment" { "Environment" }
            a href="#reading" { "How to read this page" }
            @if specification::cites(report) { a href="#specification" { "Specification" } }
        }
    }
}

fn matrix(report: &Report) -> Markup {
    let matrix = Matrix::of(report);
    let table = html! {
        table .matrix {
            caption { "Checks that passed / that ran; one check looks at one tensor of one case, or at a whole case." }
            thead {
                tr {
                    th scope="col" { "operator" }
                    th .upright scope="col" { span { "all" } }
                    @for column in &matrix.columns { th .upright scope="col" { span { (column) } } }
                }
            }
            tbody {
                @for (operator, cells, sum) in &matrix.rows {
                    tr {
                        th scope="row" { a href=(format!("#operator-{operator}")) { (operator) } }
                        (matrix_cell(sum))
                        @for cell in cells { (matrix_cell(cell)) }
                    }
                }
            }
        }
    };
    html! {
        section #matrix {
            h2 { "Operators and checks" }
            (scroller("Operators and checks", table))
            p .note {
                "✓ all passed · ✗ some failed · ! some could not be decided · ? a pass without ground · — not run."
                @if !matrix.absent.is_empty() { " Checks that no case ran: " (matrix.absent.join(", ")) "." }
            }
        }
    }
}

fn matrix_cell(cell: &Cell) -> Markup {
    match cell.standing {
        None => html! { td .none title="not run" { "—" } },
        Some(standing) => html! {
            td class=(standing.word()) title=(format!("{} passed; {} compared", count(cell.passes), counted(cell.compared, "element"))) {
                span { span aria-hidden="true" { (standing.symbol()) } " " (count(cell.passes)) } " " span .total { "/ " (count(cell.total)) }
            }
        },
    }
}

fn skips(report: &Report) -> Markup {
    let table = html! {
        table {
            thead { tr { th .count scope="col" { "count" } th scope="col" { "what" } th scope="col" { "why" } } }
            tbody { @for skip in by_reason(&report.skips) { tr { td .count { (count(skip.count)) } td .prose { (skip.what) } td .prose { (skip.why) } } } }
        }
    };
    html! {
        section #skips {
            h2 { "Skips" }
            @if report.skips.is_empty() { p { "Nothing was skipped." } } @else { (scroller("Skips", table)) }
        }
    }
}

fn environment(report: &Report) -> Markup {
    let environment = &report.environment;
    let rows = [
        ("backend", environment.backend.to_string()),
        ("device", environment.device.clone()),
        ("driver or system", environment.driver.clone()),
        ("compiler", environment.compiler.clone()),
        ("target", environment.target.clone()),
        ("multiprocessors or cores", count(environment.processors.into())),
        ("shared memory of a block", bytes(environment.shared_bytes_per_block)),
        ("random schedules per case", count(report.schedules.into())),
        (
            "copy rate",
            report.ceilings.map_or("not measured".to_owned(), |rates| {
                format!("{} GB/s", significant(rates.copy_bytes_per_second / 1e9, 3))
            }),
        ),
        (
            "bf16 matrix rate",
            report
                .ceilings
                .and_then(|rates| rates.matrix_flops_per_second)
                .map_or("not measured".to_owned(), |rate| format!("{} TFLOP/s", significant(rate / 1e12, 3))),
        ),
        ("kernel sources", report.revision.kernels.clone()),
        ("blake3 of the sources", report.revision.kernels_digest.clone()),
        ("commit", format!("{}{}", report.revision.commit, if report.revision.dirty { " (dirty)" } else { "" })),
        ("started", utc(report.started_unix)),
        ("profile, seed", format!("{}, {}", report.profile, report.seed)),
    ];
    let table = html! { table .pairs { tbody { @for (name, value) in &rows { tr { th scope="row" { (name) } td { (value) } } } } } };
    html! { section #environment { h2 { "Environment" } (scroller("Environment", table)) } }
}

/// Terms of the page and what they do not say.
const GLOSSARY: [(&str, &str); 11] = [
    (
        "budget",
        "The error allowed to each element. It is derived, not chosen: a multiple of how far the oracle's own results scatter when every rounding of the specification errs at random within half a gap, plus half an ulp of the output type.",
    ),
    (
        "budget used",
        "Error over budget, largest over the tensor. At most 1 passes; NaN never does. A kernel that rounds as well as its types allow uses a good part of its budget, and that is no fault.",
    ),
    (
        "relative budget",
        "Rms of the budget over rms of the oracle's tensor: how much the check could have overlooked. Near 1 or above, it would accept zeros. Where the truth itself is zero (a lone key's dq), nothing can be relative to it: such cases are counted as \"zero\" and judged by their budget alone.",
    ),
    (
        "bias",
        "The uniform relative error that explains a tensor best. It is held to oracle runs that round to nearest where the kernel says that it rounds; of a kernel that does not say, it is not judged.",
    ),
    (
        "power",
        "The smallest uniform relative bias, and the smallest error of a single element, that a verdict would have failed, beside what other rules would have said about the same spoilt tensor. A verdict that would pass an error of 10 % is a skip and no agreement.",
    ),
    (
        "ulp",
        "Unit in the last place of the output type, at the oracle's value. Rounding to nearest costs half of one. Near zero a harmless error is many ulp.",
    ),
    (
        "cosine",
        "Shown as 1 − cosine. It does not see a wrong scale, nor a few wrong rows among thousands, nor a small bias; it never decides alone. Read it beside the norm ratio and the worst row.",
    ),
    (
        "norm ratio",
        "Norm of the kernel's tensor over the oracle's. A scale applied twice or a dropped term moves it away from 1 even where the cosine stays.",
    ),
    (
        "verdict",
        "Pass, fail, or error where a check could not be decided; errors count as failures. Every pass says how many elements it compared; a pass that compared none is shown as unfounded and counts as a failure.",
    ),
    (
        "law",
        "A relation between two runs of the kernel, such as scaling by a power of two or permuting rows. It needs no oracle.",
    ),
    (
        "mutant",
        "A kernel with one bug, planted by hand or generated from its syntax tree. The checks have to fail on it; where they do not, a pass means little for bugs of that kind.",
    ),
];

fn glossary() -> Markup {
    html! {
        section #reading {
            h2 { "How to read this page" }
            dl .glossary { @for (term, meaning) in GLOSSARY { dt { (term) } dd { (meaning) } } }
        }
    }
}
