//! Budget use and speed over revisions, in one file: a line of JSON for each operator, check and
//! metric.
//!
//! A drift is a series that rises from revision to revision, in steps too small for any comparison
//! of two reports to see. Lines of one series share operator, check, subject, metric, device and
//! profile. Consecutive runs with exactly the same number are one point: the kernels did not
//! change, so they are no evidence of a trend.
//!
//! Mann and Kendall's test computes the share of orders of the points that rise as much. It runs
//! again after every run, so its rate is divided among all future tests. The n-th point of one of s
//! series may warn where `p <= FALSE_ALARM_RATE / (s n (n + 1))`. The sum over n is at most 1. So a
//! file whose kernels never drift has a chance of at most [`FALSE_ALARM_RATE`] to ever warn.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context, Result, bail};
use maud::{DOCTYPE, Markup, html};
use serde::{Deserialize, Serialize};

use crate::record::{Metrics, Origin, Report, Verdict, number};
use crate::report::diff::statistics::{median, trend};
use crate::report::drawn::compared;
use crate::report::elements::{page_head, page_script, scroller};
use crate::report::numbers::{counted, significant, time, utc};

/// Version of the lines. Readers reject another one.
pub const HISTORY_VERSION: u32 = 1;

/// Chance that a history without any drift ever warns of one.
pub const FALSE_ALARM_RATE: f64 = 0.05;

/// One measure of one run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Line {
    /// [`HISTORY_VERSION`].
    pub history_version: u32,
    /// Start of the run, seconds since 1970-01-01 UTC.
    pub started_unix: u64,
    /// Commit.
    pub commit: String,
    /// Whether there were uncommitted changes.
    pub dirty: bool,
    /// blake3 over the kernel sources.
    pub kernels_digest: String,
    /// Backend, device and target.
    pub device: String,
    /// Profile and seed of the sweep; `-` for benchmarks, which do not depend on them.
    pub sweep: String,
    /// Operator.
    pub operator: String,
    /// `forward`, `gradient` or `benchmark`.
    pub check: String,
    /// Tensor, or criterion's id.
    pub subject: String,
    /// `budget_used` and `budget_relative` (medians over the cases), `budget_used_worst`,
    /// `median_ns`.
    pub metric: String,
    /// Its value.
    #[serde(with = "number")]
    pub value: f64,
    /// Cases, or samples, that it was taken from.
    pub count: u64,
    /// Whether every case of the operator passed.
    pub green: bool,
}

/// The lines of one run.
pub fn lines(report: &Report) -> Vec<Line> {
    let environment = &report.environment;
    let template = |operator: &str| {
        let cases = || {
            report
                .cases
                .iter()
                .filter(|case| case.operator == operator && case.origin != Origin::Shrunk)
        };
        Line {
            history_version: HISTORY_VERSION,
            started_unix: report.started_unix,
            commit: report.revision.commit.clone(),
            dirty: report.revision.dirty,
            kernels_digest: report.revision.kernels_digest.clone(),
            device: format!(
                "{} · {} · {}",
                environment.backend, environment.device, environment.target
            ),
            sweep: format!("{}, seed {}", report.profile, report.seed),
            operator: operator.to_owned(),
            check: String::new(),
            subject: String::new(),
            metric: String::new(),
            value: f64::NAN,
            count: 0,
            green: cases().all(|case| case.verdict() == Verdict::Pass),
        }
    };
    let mut lines = Vec::new();
    for ((operator, check, tensor), metrics) in measured(report) {
        let used: Vec<f64> = metrics.iter().map(|one| compared(one.budget_used)).collect();
        let relative: Vec<f64> = metrics.iter().map(|one| compared(one.budget_relative)).collect();
        let worst = used
            .iter()
            .copied()
            .fold(0.0, |a: f64, b| if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) });
        let values = [
            ("budget_used", median(&used)),
            ("budget_used_worst", worst),
            ("budget_relative", median(&relative)),
        ];
        let common = Line {
            check: check.into(),
            subject: tensor.into(),
            count: used.len() as u64,
            ..template(operator)
        };
        lines.extend(values.map(|(metric, value)| Line {
            metric: metric.into(),
            value,
            ..common.clone()
        }));
    }
    for one in &report.benchmarks {
        lines.push(Line {
            check: "benchmark".into(),
            subject: one.id.clone(),
            metric: "median_ns".into(),
            value: one.median_ns,
            count: one.samples,
            sweep: "-".into(),
            ..template(&one.operator)
        });
    }
    lines
}

/// Metrics of the sweep's own cases by operator, check and tensor.
fn measured(report: &Report) -> BTreeMap<(&str, &str, &str), Vec<&Metrics>> {
    let mut measured: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for case in report.cases.iter().filter(|case| case.origin != Origin::Shrunk) {
        for check in &case.checks {
            if let Some(metrics) = check.metrics.as_deref() {
                let key = (case.operator.as_str(), check.check.as_str(), check.tensor.as_str());
                measured.entry(key).or_default().push(metrics);
            }
        }
    }
    measured
}

/// Appends a run to a history file, which is created if need be, in one write.
///
/// # Errors
/// A file that cannot be written.
pub fn append(report: &Report, file: &Path) -> Result<()> {
    let mut text = String::new();
    for line in lines(report) {
        text += &serde_json::to_string(&line)?;
        text.push('\n');
    }
    let opened = std::fs::OpenOptions::new().create(true).append(true).open(file);
    opened
        .and_then(|mut opened| opened.write_all(text.as_bytes()))
        .with_context(|| format!("appending to the history {}", file.display()))
}

/// Reads a history.
///
/// # Errors
/// A file that cannot be read, a line that cannot be parsed, or one of another version.
pub fn read(file: &Path) -> Result<Vec<Line>> {
    let text = std::fs::read_to_string(file)
        .with_context(|| format!("reading the history {}", file.display()))?;
    let mut lines = Vec::new();
    for (place, raw) in text.lines().enumerate().filter(|(_, raw)| !raw.trim().is_empty()) {
        let at = || format!("{}:{}", file.display(), place + 1);
        let value: serde_json::Value = serde_json::from_str(raw).with_context(at)?;
        match value["history_version"].as_u64() {
            Some(version) if version == u64::from(HISTORY_VERSION) => {}
            Some(version) => bail!(
                "{} has history_version {version}; this program reads {HISTORY_VERSION}",
                at()
            ),
            None => bail!("{}: no history_version", at()),
        }
        lines.push(serde_json::from_value(value).with_context(at)?);
    }
    if lines.is_empty() {
        bail!("{} holds no line", file.display());
    }
    Ok(lines)
}

/// One measure over runs, oldest first.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// The lines.
    pub lines: Vec<Line>,
    /// One-sided `p` of a rise, over the points that differ from the one before.
    pub p: f64,
    /// Points that differ from the one before.
    pub points: usize,
    /// Whether it drifts, at the file's false-alarm rate.
    pub drifts: bool,
}

impl Series {
    fn first(&self) -> &Line {
        &self.lines[0]
    }

    fn last(&self) -> &Line {
        &self.lines[self.lines.len() - 1]
    }

    fn name(&self) -> String {
        let line = self.first();
        format!("{} {} {} {}", line.operator, line.check, line.subject, line.metric)
    }

    fn shown(&self, value: f64) -> String {
        if self.first().metric == "median_ns" { time(value) } else { significant(value, 3) }
    }

    /// First, last, and the change in percent.
    fn change(&self) -> String {
        let (first, last) = (self.first().value, self.last().value);
        let percent = if first == 0.0 { String::new() } else { percent(last / first) };
        format!("{} -> {}{percent}", self.shown(first), self.shown(last))
    }

    /// The warning about a series that drifts.
    fn warning(&self) -> String {
        let state = if self.last().green {
            "while everything is still green"
        } else {
            "and its operator fails"
        };
        format!(
            "{} drifts upwards, {state}: {}, p = {}",
            self.name(),
            self.change(),
            significant(self.p, 2)
        )
    }
}

fn percent(ratio: f64) -> String {
    let change = 100.0 * (ratio - 1.0);
    format!(
        " ({}{} %)",
        if change > 0.0 { "+" } else { "" },
        significant(change, 2).replace('-', "−")
    )
}

/// Gathers lines into series, in the order of the file, and looks for drifts.
pub fn series(lines: &[Line]) -> Vec<Series> {
    let mut gathered: BTreeMap<[&str; 6], Vec<Line>> = BTreeMap::new();
    for line in lines {
        let key =
            [&line.operator, &line.check, &line.subject, &line.metric, &line.device, &line.sweep];
        gathered.entry(key.map(String::as_str)).or_default().push(line.clone());
    }
    let number = gathered.len() as f64;
    let judged = gathered.into_values().map(|lines| {
        let mut values: Vec<f64> =
            lines.iter().map(|line| line.value).filter(|value| !value.is_nan()).collect();
        values.dedup();
        let (p, points) = (trend(&values), values.len());
        let drifts = p <= FALSE_ALARM_RATE / (number * (points * (points + 1)) as f64);
        Series { lines, p, points, drifts: points > 1 && drifts }
    });
    judged.collect()
}

/// The terminal's text: a line with a small plot for each series, then the warnings.
pub fn terminal(series: &[Series]) -> String {
    let mut page = String::new();
    let mut last = (String::new(), String::new());
    for one in series {
        let line = one.first();
        let place = (line.operator.clone(), format!("{} · {}", line.device, line.sweep));
        if place != last {
            let _ = writeln!(page, "\n{} ({})", place.0, place.1);
            last = place;
        }
        let name = format!("{} {} {}", line.check, line.subject, line.metric);
        let mark = if one.drifts { '▲' } else { ' ' };
        let _ = writeln!(
            page,
            "{mark} {name:44} {}  {}  {}",
            sparkline(&one.lines),
            one.change(),
            runs(one)
        );
    }
    page.push('\n');
    let warnings: Vec<_> = series.iter().filter(|one| one.drifts).map(Series::warning).collect();
    for warning in &warnings {
        let _ = writeln!(page, "warning: {warning}");
    }
    if warnings.is_empty() {
        page += "no drift\n";
    }
    page
}

fn runs(series: &Series) -> String {
    format!("{}, {} different", counted(series.lines.len() as u64, "run"), series.points)
}

/// The latest runs as one character each, scaled from their lowest value to their highest.
fn sparkline(lines: &[Line]) -> String {
    /// Characters of the plot.
    const WIDTH: usize = 40;
    const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let values: Vec<f64> =
        lines[lines.len().saturating_sub(WIDTH)..].iter().map(|line| line.value).collect();
    let (low, high) = range(&values);
    let level = |value: f64| {
        if high > low { (7.0 * (value - low) / (high - low)).round() as usize } else { 0 }
    };
    values
        .iter()
        .map(|value| if value.is_finite() { LEVELS[level(*value).min(7)] } else { '!' })
        .collect()
}

/// Smallest and largest finite value.
fn range(values: &[f64]) -> (f64, f64) {
    let finite = values.iter().copied().filter(|value| value.is_finite());
    finite.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
        (low.min(value), high.max(value))
    })
}

/// Style that the page adds to the report's style sheet.
const OWN_STYLE: &str = "
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 380px), 1fr)); gap: 0.8rem; }
.plots .card { margin: 0; }
.plots svg { display: block; width: 100%; height: auto; }
.plots polyline { fill: none; stroke: var(--link); stroke-width: 1.5; }
.plots circle { fill: var(--link); } .plots circle.red { fill: var(--fail); }
.plots text { font-size: 10px; fill: var(--quiet); }
.plots h4 { overflow-wrap: anywhere; }
.drift { border-color: var(--warn); border-width: 2px; }
";

/// The history as one page with a plot for each series.
pub fn page(series: &[Series]) -> String {
    let drifting: Vec<_> = series.iter().filter(|one| one.drifts).collect();
    let title = if drifting.is_empty() {
        "No drift".to_owned()
    } else {
        counted(drifting.len() as u64, "drift")
    };
    let mut operators: Vec<&str> = series.iter().map(|one| one.first().operator.as_str()).collect();
    operators.dedup();
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            (page_head(&title, OWN_STYLE))
            body { main {
                header class=(if drifting.is_empty() { "verdict pass" } else { "verdict warn" }) {
                    p .product { "DeepSeek-V4 kernel parity · history" }
                    h1 { (if drifting.is_empty() { "✓ " } else { "▲ " }) (title) }
                    ul .warnings { @for one in &drifting { li { (one.warning()) } } }
                }
                p .note { "Each point is a run, oldest on the left, even steps; red points are runs in which the operator failed. Pointing at one names its commit. Each plot has its own scale." }
                @for operator in operators {
                    section { h2 { (operator) } div .plots { @for one in series.iter().filter(|one| one.first().operator == operator) { (card(one)) } } }
                }
                (revisions(series))
                (page_script())
            } }
        }
    };
    page.into_string()
}

fn card(series: &Series) -> Markup {
    let line = series.first();
    html! {
        div .card .drift[series.drifts] {
            h4 { (line.check) " " code { (line.subject) } " " (line.metric) @if series.drifts { " " span .badge.warn { "▲ drifts" } } }
            (plot(series))
            p .note { (series.change()) " · " (runs(series)) br; (line.device) @if line.sweep != "-" { " · " (line.sweep) } }
        }
    }
}

fn plot(series: &Series) -> Markup {
    let values: Vec<f64> = series.lines.iter().map(|line| line.value).collect();
    let (low, high) = range(&values);
    let x = |place: usize| {
        58.0 + 290.0 * if values.len() > 1 { place as f64 / (values.len() - 1) as f64 } else { 0.5 }
    };
    let y = |value: f64| if high > low { 82.0 - 70.0 * (value - low) / (high - low) } else { 47.0 };
    let finite = || series.lines.iter().enumerate().filter(|(_, line)| line.value.is_finite());
    let points: Vec<String> =
        finite().map(|(place, line)| format!("{:.1},{:.1}", x(place), y(line.value))).collect();
    html! {
        svg viewBox="0 0 360 94" role="img" aria-label=(format!("{} over {}", series.name(), runs(series))) {
            path .axis d="M52 8V86H356" {}
            text x="48" y=(if high > low { "16" } else { "51" }) text-anchor="end" { (series.shown(high)) }
            @if high > low { text x="48" y="86" text-anchor="end" { (series.shown(low)) } }
            polyline points=(points.join(" ")) {}
            @for (place, line) in finite() {
                circle .red[!line.green] cx=(format!("{:.1}", x(place))) cy=(format!("{:.1}", y(line.value))) r="3" {
                    title { (line.commit) @if line.dirty { " (dirty)" } ": " (series.shown(line.value)) }
                }
            }
        }
    }
}

/// The runs of the history, each once, newest first.
fn revisions(series: &[Series]) -> Markup {
    let mut runs: Vec<_> = series
        .iter()
        .flat_map(|one| &one.lines)
        .map(|line| {
            (line.started_unix, &line.commit, line.dirty, &line.device, &line.kernels_digest)
        })
        .collect();
    runs.sort_unstable();
    runs.dedup();
    let table = html! {
        table {
            thead { tr { th scope="col" { "started" } th scope="col" { "commit" } th scope="col" { "kernels" } th scope="col" { "device" } } }
            tbody {
                @for (started, commit, dirty, device, digest) in runs.iter().rev() {
                    tr {
                        td { (utc(*started)) }
                        td { code { (commit.chars().take(12).collect::<String>()) } @if *dirty { " dirty" } }
                        td { code { (digest.chars().take(12).collect::<String>()) } }
                        td { (device) }
                    }
                }
            }
        }
    };
    html! { section #runs { h2 { "Runs" } (scroller("Runs", table)) } }
}
