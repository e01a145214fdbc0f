//! A section for each operator: what it is, how its tensors agree, its worst cases, its speed.

use maud::{Markup, html};

use crate::record::{BenchmarkRecord, Check, OperatorRecord, Report};

use super::diagnosis;
use super::drawn::{PICTURED, THUMBNAIL};
use super::elements::{Anchors, badge, breakable, command, number, scroller};
use super::numbers::{count, counted, duration, one_minus_cosine, scientific, significant, time};
use super::picture;
use super::power::{self, TensorPower};
use super::specification::linked;
use super::summary::{Entry, TensorSummary, gigabytes_per_second, paths, teraflops};
use super::times;
use crate::record::{Standing, within, worse_first};

/// Worst cases shown of a tensor that failed; of one that agrees only the worst is shown.
const WORST: usize = 3;
/// Most rows and columns of the heat map of the worst case of a tensor that failed. The others are
/// thumbnails, to keep the page small.
const FULL: (usize, usize) = (48, 64);

/// The data of an operator's section.
pub(super) struct Section<'a> {
    pub(super) report: &'a Report,
    pub(super) operator: &'a OperatorRecord,
    /// Its tensors over all cases.
    pub(super) tensors: Vec<TensorSummary<'a>>,
    /// What its verdicts could have seen.
    pub(super) power: Vec<TensorPower>,
    /// The standing of its checks.
    pub(super) standing: Option<Standing>,
}

/// The section, unfolded where it needs reading.
pub(super) fn section(section: &Section<'_>, open: bool, anchors: &Anchors) -> Markup {
    let Section { report, operator, tensors, standing, .. } = section;
    let cases = report.cases.iter().filter(|case| case.operator == operator.name).count() as u64;
    let benchmarks: Vec<_> =
        report.benchmarks.iter().filter(|one| one.operator == operator.name).collect();
    let worst = tensors.get(worst_tensor(tensors).unwrap_or(usize::MAX));
    html! {
        details .operator id=(format!("operator-{}", operator.name)) open[open] {
            summary {
                @match standing { Some(standing) => (badge(*standing)), None => span .badge { "— not run" } }
                " " h3 { (operator.name) }
                span .note {
                    (counted(cases, "case"))
                    @if let Some(worst) = worst { " · worst budget use " (significant(worst.worst_used(), 3)) ", " code { (worst.tensor) } }
                }
            }
            p { (operator.summary) }
            (diagnosis::page::section(report, &operator.name))
            (description(report, operator))
            @if tensors.is_empty() {
                p .note { "No tensor of this operator was compared with the oracle in this run." }
            } @else {
                h4 { "Agreement with the oracle" }
                (tensor_table(operator, tensors))
                (power_table(&section.power))
                h4 { "Worst cases" }
                (worst_cases(tensors, anchors))
            }
            (times::section(report, &operator.name))
            @if !benchmarks.is_empty() { h4 { "Speed" } (benchmark_table(&benchmarks)) }
        }
    }
}

fn description(report: &Report, operator: &OperatorRecord) -> Markup {
    let cases: Vec<_> = report.cases.iter().filter(|case| case.operator == operator.name).collect();
    let paths: Vec<String> = paths(report, &operator.name)
        .iter()
        .map(|(path, cases)| format!("{path} ({})", count(*cases)))
        .collect();
    let kernel: f64 = cases.iter().map(|case| case.kernel_seconds).sum();
    let oracle: f64 = cases.iter().map(|case| case.oracle_seconds).sum();
    html! {
        dl .facts {
            div { dt { "specification" } dd { (linked(or_none(&operator.specification.join("; ")))) } }
            div { dt { "kernel" } dd { code { (or_none(&operator.kernel_file)) } } }
            div { dt { "oracle" } dd { code { (or_none(&operator.oracle_file)) } } }
            div { dt { "dtypes" } dd { (or_none(&operator.dtypes.join(", "))) } }
            div { dt { "axes swept" } dd { (or_none(&operator.axes.join(", "))) } }
            div { dt { "backward kernel" } dd { (if operator.has_backward { "yes" } else { "no" }) } }
            div { dt { "cases" } dd { (count(cases.len() as u64)) "; kernel " (duration(kernel)) ", oracle " (duration(oracle)) } }
            div { dt { "paths that ran (cases)" } dd { (or_none(&paths.join(", "))) } }
            @for (_, missing) in report.paths_never_run().iter().filter(|(name, _)| *name == operator.name) {
                div { dt { "paths that never ran" } dd { strong { (missing.join(", ")) } } }
            }
        }
    }
}

fn or_none(text: &str) -> &str {
    if text.is_empty() { "—" } else { text }
}

fn tensor_table(operator: &OperatorRecord, tensors: &[TensorSummary]) -> Markup {
    let table = html! {
        table .numbers {
            (tensor_head())
            @for group in tensors.chunk_by(|a, b| a.check == b.check) {
                tbody class=(if *group[0].check == Check::Gradient { "gradient" } else { "" }) {
                    tr .group { th colspan="14" scope="rowgroup" { span { (group_title(group[0].check)) } } }
                    @for tensor in group { (tensor_row(tensor)) }
                }
            }
        }
    };
    let without_gradients =
        operator.has_backward && !tensors.iter().any(|tensor| *tensor.check == Check::Gradient);
    html! {
        @if without_gradients { p .alarm { strong { "▲ No gradient was compared" } " although the operator has a backward kernel." } }
        (scroller("Agreement with the oracle", table))
    }
}

fn group_title(check: &Check) -> String {
    match check {
        Check::Forward => "Forward agreement — kernel against oracle".to_owned(),
        Check::Gradient => {
            "Gradient agreement — backward kernel against the oracle's autograd".to_owned()
        }
        Check::GradientOfSaved => {
            "Gradients given what was saved — against what follows from the kernel's own outputs"
                .to_owned()
        }
        other => other.to_string(),
    }
}

fn tensor_head() -> Markup {
    html! {
        thead {
            tr {
                th rowspan="2" { "tensor" }
                th rowspan="2" { "cases" }
                th rowspan="2" { "elements" }
                th colspan="2" { "budget used" }
                th colspan="2" { "relative budget" }
                th rowspan="2" { "1 − cosine, worst" }
                th rowspan="2" { "norm ratio, range" }
                th rowspan="2" { "relative L2, max" }
                th rowspan="2" { "max |error|" }
                th colspan="3" { "ulp, worst case" }
            }
            tr {
                @for label in ["worst", "median", "tightest", "loosest", "p50", "p99", "max"] { th { (label) } }
            }
        }
    }
}

fn tensor_row(tensor: &TensorSummary) -> Markup {
    if tensor.entries.is_empty() {
        return html! {
            tr { th scope="row" { code { (tensor.tensor) } } td { (count(tensor.without_metrics)) } td { (count(tensor.compared)) } td colspan="11" { "no measures recorded" } }
        };
    }
    let used = tensor.worst_used();
    let (tightest, loosest) = tensor.range(|metrics| metrics.budget_relative);
    let zero_truths = tensor.zero_truths();
    html! {
        tr {
            th scope="row" { @if !tensor.agrees() { span .fail-text title="not every case agreed" { "✗ " } } code { (tensor.tensor) } }
            td { (count(tensor.entries.len() as u64)) @if tensor.without_metrics > 0 { " + " (count(tensor.without_metrics)) " unmeasured" }
                @if zero_truths > 0 { span title="The oracle is zero there: relative measures leave them out" { ", " (count(zero_truths)) " zero" } } }
            td { (count(tensor.compared)) }
            td { @if within(used) { (significant(used, 3)) } @else { strong .fail-text { "✗ " (significant(used, 3)) } } }
            (measure(tensor.median(|metrics| metrics.budget_used), |value| significant(value, 3)))
            (measure(tightest, scientific))
            td { @if loosest < 1.0 { (scientific(loosest)) } @else { strong .fail-text title="A budget as large as the values accepts zeros" { "▲ " (scientific(loosest)) } } }
            (measure(tensor.range(|metrics| metrics.cosine).0, one_minus_cosine))
            td { (norm_range(tensor)) }
            (measure(tensor.range(|metrics| metrics.relative_l2).1, scientific))
            (measure(tensor.largest(|metrics| metrics.max_abs), scientific))
            (measure(tensor.largest(|metrics| metrics.ulp_p50), |value| significant(value, 3)))
            (measure(tensor.largest(|metrics| metrics.ulp_p99), |value| significant(value, 3)))
            (measure(tensor.largest(|metrics| metrics.ulp_max), |value| significant(value, 3)))
        }
    }
}

/// What the verdicts could have seen; empty where nothing can be seen.
fn power_table(tensors: &[TensorPower]) -> Markup {
    if tensors.is_empty() {
        return html! {};
    }
    let [(_, ours), others @ ..] = power::RULES;
    let table = html! {
        table .numbers {
            thead {
                tr {
                    th rowspan="2" { "tensor" }
                    th rowspan="2" { "cases" }
                    th rowspan="2" { "without power" }
                    th colspan="3" { "smallest bias seen" }
                    th rowspan="2" { "element seen, median" }
                    th colspan=(others.len()) { "bias seen in half of the cases by" }
                }
                tr {
                    @for label in ["best", "median", "worst"] { th { (label) } }
                    @for (name, _) in &others { th { (name) } }
                }
            }
            tbody {
                @for tensor in tensors {
                    tr {
                        th scope="row" { code { (tensor.tensor) } }
                        td { (count(tensor.cases.len() as u64)) }
                        td { (count(tensor.powerless)) }
                        @for share in [0.0, 0.5, 1.0] { td { (power::words(tensor.seen_in(share, ours))) } }
                        td { (scientific(tensor.element())) }
                        @for (_, rule) in &others { td { (power::words(tensor.seen_in(0.5, *rule))) } }
                    }
                }
            }
        }
    };
    html! {
        h4 { "Power" }
        p .note { "The smallest uniform relative error, and the smallest error of a single element (over the tensor's rms), that these verdicts would have failed. An alarm is a case in which a rule fails a tensor that is right." }
        (scroller("Power", table))
    }
}

fn measure(value: f64, text: impl Fn(f64) -> String) -> Markup {
    html! { td { (number(value, text(value))) } }
}

/// Lowest and highest norm ratio; only one where they look the same.
fn norm_range(tensor: &TensorSummary) -> Markup {
    let (low, high) = tensor.range(|metrics| metrics.norm_ratio);
    let (low_text, high_text) = (significant(low, 5), significant(high, 5));
    html! { (number(low, low_text.clone())) @if low_text != high_text { " … " (number(high, high_text)) } }
}

/// The tensor that used most of its budget. For an operator that agrees, its heat map is shown.
pub(super) fn worst_tensor(tensors: &[TensorSummary]) -> Option<usize> {
    let measured = tensors.iter().enumerate().filter(|(_, tensor)| !tensor.entries.is_empty());
    measured
        .min_by(|(_, a), (_, b)| worse_first(a.worst_used(), b.worst_used()))
        .map(|(place, _)| place)
}

/// One fold for each tensor. Those that failed are open, and so is the one that used most of its
/// budget.
fn worst_cases(tensors: &[TensorSummary], anchors: &Anchors) -> Markup {
    let worst = worst_tensor(tensors);
    let measured = tensors.iter().enumerate().filter(|(_, tensor)| !tensor.entries.is_empty());
    html! {
        @for (place, tensor) in measured {
            @let open = Some(place) == worst || !tensor.agrees();
            details .tensor open[open] {
                summary {
                    @if !tensor.agrees() { span .fail-text { "✗ " } }
                    (tensor.check) " " code { (tensor.tensor) }
                    span .note { " · worst " (significant(tensor.worst_used(), 3)) " of budget over " (counted(tensor.entries.len() as u64, "case")) }
                }
                @let (bins, cases, compared) = tensor.histogram(PICTURED);
                (picture::histogram(&bins, compared))
                @if cases < tensor.entries.len() as u64 { p .note { "Of the " (counted(cases, "case")) " that used most of the budget." } }
                @if tensor.agrees() {
                    (worst_case(0, &tensor.entries[0], open, anchors))
                } @else {
                    div .worst { @for (rank, entry) in tensor.entries.iter().take(WORST).enumerate() { (worst_case(rank, entry, true, anchors)) } }
                }
            }
        }
    }
}

fn worst_case(rank: usize, entry: &Entry, pictured: bool, anchors: &Anchors) -> Markup {
    let metrics = entry.metrics;
    let index: Vec<String> = metrics.worst.index.iter().map(u64::to_string).collect();
    let over = !within(metrics.budget_used);
    let (anchor, first) = anchors.of(entry.case);
    html! {
        article .card {
            h5 {
                (rank + 1) ". " span .fail-text[over] { @if over { "✗ " } (significant(metrics.budget_used, 3)) " of budget" }
                span .note { " at [" (index.join(", ")) "] " } (anchor)
            }
            @if pictured { (picture::heat(&metrics.heat, if rank == 0 { FULL } else { THUMBNAIL })) }
            p .note {
                "relative L2 " (number(metrics.relative_l2, scientific(metrics.relative_l2)))
                ", ulp max " (number(metrics.ulp_max, significant(metrics.ulp_max, 3)))
                ", " (counted(entry.check.compared, "element"))
            }
            // If a case is shown above, its name links to the command there.
            @if first { (command(&entry.case.replay)) }
        }
    }
}

fn benchmark_table(benchmarks: &[&BenchmarkRecord]) -> Markup {
    let table = html! {
        table .numbers {
            thead {
                tr {
                    th { "benchmark" } th { "median" } th { "95 % interval" } th { "samples" }
                    th { "GB/s" } th { "TFLOP/s" } th { "of the device's limit" }
                }
            }
            tbody { @for benchmark in benchmarks { (benchmark_row(benchmark)) } }
        }
    };
    scroller("Benchmarks", table)
}

fn benchmark_row(benchmark: &BenchmarkRecord) -> Markup {
    html! {
        tr {
            th scope="row" { (breakable(&benchmark.id)) }
            td { (time(benchmark.median_ns)) }
            td { (time(benchmark.low_ns)) " … " (time(benchmark.high_ns)) }
            td { (count(benchmark.samples)) }
            td { (significant(gigabytes_per_second(benchmark), 3)) }
            td { @if benchmark.flops > 0.0 { (significant(teraflops(benchmark), 3)) } @else { "—" } }
            td { (limit_bar(benchmark.percent_of_limit)) }
        }
    }
}

fn limit_bar(percent: Option<f64>) -> Markup {
    match percent {
        None => html! { span .note { "not measured" } },
        Some(percent) => html! {
            span .meter aria-hidden="true" { span style=(format!("width:{:.1}%", percent.clamp(0.0, 100.0))) {} }
            " " (significant(percent, 3)) " %"
        },
    }
}
