//! The page: verdict, what changed, families, failures, operators, mutants, skips, environment,
//! glossary.

use std::collections::BTreeSet;

use maud::{DOCTYPE, Markup, html};

use crate::operators::registry;
use crate::record::{Ceilings, Report};

use super::elements::{Anchors, command, page_head, page_script, scroller};
use super::numbers::{bytes, count, counted, duration, significant, utc};
use super::skips::by_reason;
use super::summary::{Counts, operators, origins};
use super::{batches, diagnosis, diff, failures, families, mutants, picture, specification};
use crate::record::Standing;

/// The whole page.
pub(super) fn page(report: &Report) -> Markup {
    let counts = Counts::of(report);
    let (_, headline) = counts.headline();
    let (gathered, anchors) = (families::Gathered::of(report), Anchors::default());
    let groups = gathered.groups(report);
    html! {
        (DOCTYPE)
        html lang="en" {
            (page_head(&headline, ""))
            body {
                (picture::patterns())
                main {
                    (verdict(report, &counts))
                    (against_base(report))
                    (totals(report, &counts))
                    (failures::section(report, &anchors))
                    (families::overview(&groups))
                    (provenance(report))
                    (contents(report, &counts))
                    (families::folds(&groups, &gathered, &anchors))
                    (batches::section(report))
                    (mutants::section(report))
                    (skips(report))
                    (environment(report))
                    (glossary())
                    (specification::section(report))
                    (page_script())
                    footer { "Schema version " (report.schema_version) ". Made from records alone: report.json beside this page holds every number on it, records.jsonl the whole of each case." }
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
            p .product { "DeepSeek-V4 kernel parity · " (coverage(report)) " · " (utc(report.started_unix)) }
            h1 { span .symbol aria-hidden="true" { (symbol) } " " (headline) }
            (warnings(report, counts))
        }
        (diagnosis::page::verdict(report))
    }
}

/// What the run covered: `49 of 49 operators, quick`.
pub(super) fn coverage(report: &Report) -> String {
    let with_cases: BTreeSet<&str> =
        report.cases.iter().map(|case| case.operator.as_str()).collect();
    let swept = if with_cases.is_empty() { report.operators.len() } else { with_cases.len() };
    let known = registry::OPERATORS.len().max(swept);
    format!("{swept} of {}, {}", counted(known as u64, "operator"), report.profile)
}

/// Changes that are on the first screen; the comparison's page has all of them.
const CHANGES: usize = 6;

/// What changed against the base, where the report was compared with one.
fn against_base(report: &Report) -> Markup {
    let Some(base) = &report.base else { return html! {} };
    let worse = base.changes.iter().any(|change| change.is_regression);
    html! {
        section #base class=(if worse { "base worse" } else { "base" }) {
            p {
                strong { span aria-hidden="true" { (if worse { "✗" } else { "✓" }) } " Against the base: " (base.headline) }
                " " a href=(diff::PAGE) { "the comparison" }
            }
            p .note { "Base: " code { (base.commit.chars().take(12).collect::<String>()) } @if base.dirty { " (dirty)" } ", " (base.profile) " on " (base.device) ", " (utc(base.started_unix)) }
            @if !base.changes.is_empty() {
                ul {
                    @for change in base.changes.iter().take(CHANGES) {
                        li { span class=(if change.is_regression { "badge fail" } else { "badge" }) { (change.kind) } " " (change.operator) " " (change.subject) ": " (change.base) " → " (change.head) }
                    }
                    @if base.number > CHANGES as u64 { li .note { (counted(base.number - CHANGES as u64, "more change")) } }
                }
            }
        }
    }
}

fn warnings(report: &Report, counts: &Counts) -> Markup {
    html! {
        ul .warnings {
            @if report.revision.dirty { li { strong { "DIRTY TREE" } " — built with uncommitted changes; the commit alone does not reproduce this." } }
            @if counts.survivors > 0 { li { strong { (counted(counts.survivors, "mutant")) " survived" } " — the sweep is blind to a bug that it is meant to see. " a href="#mutants" { "Which" } } }
            (paths_never_run(report))
            @for (operator, tensor) in report.without_power() {
                li { strong { "Nothing was shown of " (tensor) " of " (operator) } ": no case would have seen an error of 10 %." }
            }
            @if counts.skipped > 0 { li { strong { (count(counts.skipped)) " skipped" } " — " a href="#skips" { "what and why" } } }
            @if report.ceilings.is_none() && !report.benchmarks.is_empty() { li { "Benchmarks without measured device rates: no share of the limit is known." } }
        }
    }
}

/// Operators whose paths that never ran are named without a fold.
const NEVER_RUN: usize = 2;

fn paths_never_run(report: &Report) -> Markup {
    let never = report.paths_never_run();
    let line = |(operator, missing): &(&str, Vec<&str>)| {
        html! { li { strong { (counted(missing.len() as u64, "path")) " of " (operator) " never ran" } ": " (missing.join(", ")) "." } }
    };
    let paths: usize = never.iter().map(|(_, missing)| missing.len()).sum();
    html! {
        @if never.len() <= NEVER_RUN { @for one in &never { (line(one)) } } @else {
            li {
                details {
                    summary { strong { (counted(paths as u64, "path")) " of " (counted(never.len() as u64, "operator")) " never ran" } }
                    ul { @for one in &never { (line(one)) } }
                }
            }
        }
    }
}

fn totals(report: &Report, counts: &Counts) -> Markup {
    let origins: Vec<String> = origins(report)
        .into_iter()
        .map(|(word, cases)| format!("{} {word}", count(cases)))
        .collect();
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
        div .repeat { span .label { "repeat with" } (command(&report.command)) }
    }
}

fn contents(report: &Report, counts: &Counts) -> Markup {
    html! {
        nav aria-label="Contents" {
            @if counts.failing_cases > 0 { a href="#failures" { "Failures" } }
            a href="#families" { "Families" }
            a href="#operators" { "Operators and checks" }
            @if report.cases.iter().any(|case| !case.batches.is_empty()) { a href="#batches" { "Batch invariance" } }
            @if !report.mutants.is_empty() { a href="#mutants" { "Mutants" } }
            a href="#skips" { "Skips" }
            a href="#environment" { "Environment" }
            a href="#reading" { "How to read this page" }
            @if specification::cites(report) { a href="#specification" { "Specification" } }
        }
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
    let products = |rate: fn(&Ceilings) -> Option<f64>| {
        let measured = report.ceilings.as_ref().and_then(rate);
        measured.map_or("not measured".to_owned(), |rate| {
            format!("{} TFLOP/s", significant(rate / 1e12, 3))
        })
    };
    let rows = [
        ("backend", environment.backend.to_string()),
        ("device", environment.device.clone()),
        ("driver or system", environment.driver.clone()),
        ("compiler", environment.compiler.clone()),
        ("target", environment.target.clone()),
        ("SMs or cores", count(environment.processors.into())),
        ("shared memory of a block", bytes(environment.shared_bytes_per_block)),
        ("random schedules per case", count(report.schedules.into())),
        (
            "copy rate",
            report.ceilings.map_or("not measured".to_owned(), |rates| {
                format!("{} GB/s", significant(rates.copy_bytes_per_second / 1e9, 3))
            }),
        ),
        ("bf16 matrix rate", products(|rates| rates.matrix_flops_per_second)),
        ("e4m3 matrix rate", products(|rates| rates.e4m3_flops_per_second)),
        ("kernel sources", report.revision.kernels.clone()),
        ("blake3 of the sources", report.revision.kernels_digest.clone()),
        (
            "commit",
            format!(
                "{}{}",
                report.revision.commit,
                if report.revision.dirty { " (dirty)" } else { "" }
            ),
        ),
        ("started", utc(report.started_unix)),
        ("profile, seed", format!("{}, {}", report.profile, report.seed)),
    ];
    let table = html! { table .pairs { tbody { @for (name, value) in &rows { tr { th scope="row" { (name) } td { (value) } } } } } };
    html! { section #environment { h2 { "Environment" } (scroller("Environment", table)) } }
}

/// Terms of the page and what they do not mean.
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
        "The smallest uniform relative bias, and the smallest error of a single element, that a verdict would have failed, beside what other rules would have said about the same corrupted tensor. A verdict that would pass an error of 10 % is a skip and no agreement.",
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
