//! Summary of the records: counts, the matrix of checks, tensors over all their cases.

use std::collections::{BTreeMap, HashSet};

use crate::judge::order;
use crate::operators::registry;
use crate::record::{
    BenchmarkRecord, CaseRecord, Check, CheckRecord, Metrics, MutantRecord, MutantStatus,
    OperatorRecord, Origin, Report, Standing, worse_first,
};

use super::numbers::{counted, significant};

/// The checks that a full run holds, in the order of the matrix's columns; after them the laws,
/// which share one.
static CHECKS: [Check; 18] = [
    Check::Launch,
    Check::Forward,
    Check::Gradient,
    Check::GradientOfSaved,
    Check::Finite,
    Check::SpecialValues,
    Check::Bias,
    Check::OracleGradients,
    Check::InputsUnchanged,
    Check::Guards,
    Check::FullyWritten,
    Check::Repeatable,
    Check::PoisonIndependent,
    Check::Sequence,
    Check::ScheduleIndependent,
    Check::BatchInvariance,
    Check::Beside,
    Check::Independence,
];

/// The column that all checks named `law: …` share.
pub(super) const LAWS: &str = "laws";

/// Why a pass is not credible, if it is not.
pub(super) fn contradiction(check: &CheckRecord) -> Option<String> {
    if Standing::of(check) != Standing::Unfounded {
        return None;
    }
    if check.compared == 0 {
        return Some("Recorded as a pass, but no element was compared.".to_owned());
    }
    let used = check.metrics.as_ref().map_or(0.0, |metrics| metrics.budget_used);
    Some(format!(
        "Recorded as a pass, but the share of the budget used is {}.",
        significant(used, 3)
    ))
}

/// The message of a check that is not a plain pass.
pub(super) fn message(check: &CheckRecord) -> String {
    match contradiction(check) {
        Some(contradiction) => contradiction,
        None if check.message.is_empty() => "The record gives no reason.".to_owned(),
        None => check.message.clone(),
    }
}

/// Totals of a run.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Cases that ran.
    pub(super) cases: u64,
    /// Cases with a check that is not a plain pass, or without any check.
    pub(super) failing_cases: u64,
    /// Cases without any check.
    pub(super) unchecked_cases: u64,
    /// Check records.
    pub(super) checks: u64,
    /// Checks by [`Standing`].
    pub(super) standings: BTreeMap<Standing, u64>,
    /// Elements that the checks compared.
    pub(super) compared: u64,
    /// Mutants that no check killed.
    pub(super) survivors: u64,
    /// Tensors for which no verdict had power.
    without_power: u64,
    /// Operators whose kernels could not be run.
    not_run: u64,
    /// Things skipped.
    pub(super) skipped: u64,
    /// Cases that did not run because the run was cut short.
    unfinished: Option<u64>,
}

impl Counts {
    /// Totals of a whole run.
    pub(crate) fn of(report: &Report) -> Self {
        let mut counts = Self {
            cases: report.cases.len() as u64,
            failing_cases: report.cases.iter().filter(|case| !agrees(case)).count() as u64,
            unchecked_cases: report.cases.iter().filter(|case| case.checks.is_empty()).count()
                as u64,
            without_power: report.without_power().len() as u64,
            not_run: report.not_run().count() as u64,
            survivors: report.mutants.iter().filter(|mutant| survived(mutant)).count() as u64,
            skipped: report.skips.iter().map(|skip| skip.count).sum(),
            unfinished: report.unfinished,
            ..Self::default()
        };
        for check in report.cases.iter().flat_map(|case| &case.checks) {
            counts.checks += 1;
            counts.compared = counts.compared.saturating_add(check.compared);
            *counts.standings.entry(Standing::of(check)).or_default() += 1;
        }
        counts
    }

    /// Number of checks of one standing.
    pub(super) fn standing(&self, standing: Standing) -> u64 {
        self.standings.get(&standing).copied().unwrap_or(0)
    }

    /// The result of the whole run: a class of the style sheet and a sentence.
    pub(crate) fn headline(&self) -> (&'static str, String) {
        if let Some(missing) = self.unfinished {
            let troubles = if self.failing_cases == 0 { "none" } else { "some" };
            let ran = counted(self.cases, "case");
            return (
                "error",
                format!(
                    "Cut short: {ran} ran, {missing} did not; of those that ran {troubles} disagreed"
                ),
            );
        }
        if self.cases == 0 {
            return ("error", "Nothing was compared: the run holds no case".to_owned());
        }
        let mut troubles = Vec::new();
        let mut trouble = |count: u64, noun: &str, rest: &str| {
            if count > 0 {
                troubles.push(format!("{} {rest}", counted(count, noun)));
            }
        };
        trouble(self.standing(Standing::Fail), "check", "failed");
        trouble(self.standing(Standing::Error), "check", "could not be decided");
        trouble(self.standing(Standing::Unfounded), "check", "passed without ground");
        trouble(self.unchecked_cases, "case", "ran no check");
        if self.not_run > 0 {
            troubles.insert(0, format!("{} could not be run", counted(self.not_run, "operator")));
            return ("fail", troubles.join(", "));
        }
        if troubles.is_empty() && self.without_power > 0 {
            let tensors = counted(self.without_power, "tensor");
            return ("fail", format!("No check failed, but nothing was shown of {tensors}"));
        }
        match (troubles.is_empty(), self.survivors) {
            (false, _) => (
                "fail",
                format!("{}, in {}", troubles.join(", "), counted(self.failing_cases, "case")),
            ),
            (true, 0) => (
                "pass",
                format!(
                    "All {} agreed in {}",
                    counted(self.checks, "check"),
                    counted(self.cases, "case")
                ),
            ),
            (true, survivors) => (
                "warn",
                format!("All checks agreed, but {} survived them", counted(survivors, "mutant")),
            ),
        }
    }
}

/// Whether a case has checks and each is a plain pass.
pub(crate) fn agrees(case: &CaseRecord) -> bool {
    !case.checks.is_empty() && case.checks.iter().all(|check| Standing::of(check) == Standing::Pass)
}

/// Whether no check killed the mutant.
pub(crate) fn survived(mutant: &MutantRecord) -> bool {
    mutant.status == MutantStatus::Survived
}

/// The cases that do not agree, each once: several may shrink to the same one. Shrunk ones are first,
/// since they are the quickest to read.
pub(super) fn failing(report: &Report) -> Vec<&CaseRecord> {
    let mut cases: Vec<_> = report.cases.iter().filter(|case| !agrees(case)).collect();
    cases.sort_by_key(|case| case.origin != Origin::Shrunk);
    let mut seen = HashSet::new();
    cases.retain(|case| seen.insert(case.case.to_string()));
    cases
}

/// The checks of a case that are not plain passes, those that explain most first. A check that adds
/// nothing to another is skipped.
pub(super) fn findings(case: &CaseRecord) -> Vec<&CheckRecord> {
    order::findings(case).into_iter().map(|finding| finding.check).collect()
}

/// What passed in a case, each check once, with the tensors that agreed: next to a failing tensor
/// they show where the bug is not.
pub(super) fn passed(case: &CaseRecord) -> Vec<String> {
    let mut tensors: BTreeMap<(usize, &str), Vec<&str>> = BTreeMap::new();
    for check in case.checks.iter().filter(|check| Standing::of(check) == Standing::Pass) {
        let order = place_of(column(&check.check));
        let tensors = tensors.entry((order, check.check.as_str())).or_default();
        if !tensors.contains(&check.tensor.as_str()) {
            tensors.push(&check.tensor);
        }
    }
    let word = |((_, check), tensors): ((usize, &str), Vec<&str>)| match check {
        _ if tensors.iter().all(|tensor| tensor.is_empty()) => check.to_owned(),
        _ => format!("{check} ({})", tensors.join(", ")),
    };
    tensors.into_iter().map(word).collect()
}

/// Failures of one kind: operator, check and tensor, with the number of cases and the first of them
/// as an index into [`failing`].
pub(super) fn failing_kinds(cases: &[&CaseRecord]) -> Vec<(String, String, String, u64, usize)> {
    let mut kinds: BTreeMap<(&str, &str, &str), (u64, usize)> = BTreeMap::new();
    for (place, case) in cases.iter().enumerate() {
        for check in findings(case) {
            kinds
                .entry((&case.operator, check.check.as_str(), &check.tensor))
                .or_insert((0, place))
                .0 += 1;
        }
    }
    let mut kinds: Vec<_> = kinds
        .into_iter()
        .map(|((operator, check, tensor), (count, first))| {
            (operator.into(), check.into(), tensor.into(), count, first)
        })
        .collect();
    kinds.sort_by_key(|kind: &(String, String, String, u64, usize)| std::cmp::Reverse(kind.3));
    kinds
}

/// One cell of the matrix: the checks of one kind over all cases of one operator.
#[derive(Clone, Debug, Default)]
pub(super) struct Cell {
    /// Checks that passed.
    pub(super) passes: u64,
    /// Checks that ran.
    pub(super) total: u64,
    /// Elements compared.
    pub(super) compared: u64,
    /// The worst standing among them; `None` where none ran.
    pub(super) standing: Option<Standing>,
}

impl Cell {
    fn add(&mut self, check: &CheckRecord) {
        let standing = Standing::of(check);
        self.passes += u64::from(standing == Standing::Pass);
        self.total += 1;
        self.compared = self.compared.saturating_add(check.compared);
        self.standing = self.standing.max(Some(standing));
    }

    /// Adds the checks of another cell.
    pub(super) fn join(&mut self, other: &Self) {
        self.passes += other.passes;
        self.total += other.total;
        self.compared = self.compared.saturating_add(other.compared);
        self.standing = self.standing.max(other.standing);
    }
}

/// A row of the matrix: an operator, its cells, and all of its checks.
pub(super) type Row = (String, Vec<Cell>, Cell);

/// Operators × checks.
#[derive(Debug)]
pub(super) struct Matrix {
    /// Checks that ran, in the order of [`CHECKS`], unknown ones after them.
    pub(super) columns: Vec<String>,
    /// Each operator's cells, then its total.
    pub(super) rows: Vec<Row>,
    /// Known checks that no case ran.
    pub(super) absent: Vec<&'static str>,
}

impl Matrix {
    /// The matrix of a whole run.
    pub(super) fn of(report: &Report) -> Self {
        let mut seen: Vec<&str> = report
            .cases
            .iter()
            .flat_map(|case| &case.checks)
            .map(|check| column(&check.check))
            .collect();
        seen.sort_by_key(|name| (place_of(name), *name));
        seen.dedup();
        let rows = operators(report).into_iter().map(|operator| {
            let mut cells = vec![Cell::default(); seen.len()];
            let mut sum = Cell::default();
            for check in report
                .cases
                .iter()
                .filter(|case| case.operator == operator.name)
                .flat_map(|case| &case.checks)
            {
                sum.add(check);
                if let Some(place) = seen.iter().position(|name| *name == column(&check.check)) {
                    cells[place].add(check);
                }
            }
            (operator.name, cells, sum)
        });
        Self {
            rows: rows.collect(),
            // Two kernels are held beside each other only where a second one is given.
            absent: columns()
                .filter(|known| !seen.contains(known) && *known != Check::Beside.as_str())
                .collect(),
            columns: seen.into_iter().map(str::to_owned).collect(),
        }
    }
}

/// The matrix's column of a check.
pub(super) fn column(check: &Check) -> &str {
    if matches!(check, Check::Law(_)) { LAWS } else { check.as_str() }
}

/// The columns of a full run.
fn columns() -> impl Iterator<Item = &'static str> {
    CHECKS.iter().map(Check::as_str).chain([LAWS])
}

/// The place of a column; unknown ones come last.
pub(super) fn place_of(column: &str) -> usize {
    columns().position(|known| known == column).unwrap_or(usize::MAX)
}

/// The benchmark of the device itself, which is no operator's.
const COPY_BENCHMARK: &str = "device_copy";

/// The registry's operators, and after them any that only cases or benchmarks name, so that none is
/// skipped.
pub(super) fn operators(report: &Report) -> Vec<OperatorRecord> {
    let mut operators = report.operators.clone();
    let named = report
        .cases
        .iter()
        .map(|case| &case.operator)
        .chain(report.benchmarks.iter().map(|one| &one.operator))
        .filter(|name| *name != COPY_BENCHMARK);
    for name in named {
        if !operators.iter().any(|operator| operator.name == *name) {
            operators.push(OperatorRecord {
                name: name.clone(),
                family: registry::find(name).ok().map(|known| known.family()),
                summary: "Not described by this run's registry.".to_owned(),
                specification: Vec::new(),
                kernel_file: String::new(),
                oracle_file: String::new(),
                dtypes: Vec::new(),
                axes: Vec::new(),
                has_backward: false,
                paths: Vec::new(),
                tensors: Vec::new(),
                invariant: Vec::new(),
                conventions: Vec::new(),
                not_expressible: Vec::new(),
            });
        }
    }
    operators
}

/// One case's measures of one tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry<'a> {
    /// The case.
    pub(super) case: &'a CaseRecord,
    /// The check of that tensor.
    pub(super) check: &'a CheckRecord,
    /// Its metrics.
    pub(super) metrics: &'a Metrics,
}

/// One tensor of one operator under one check, over all cases.
#[derive(Debug)]
pub(super) struct TensorSummary<'a> {
    /// What compares it.
    pub(super) check: &'a Check,
    /// The tensor's name.
    pub(super) tensor: &'a str,
    /// Cases with metrics, the one that used most of its budget first.
    pub(super) entries: Vec<Entry<'a>>,
    /// Cases in which the check gave no metrics.
    pub(super) without_metrics: u64,
    /// Elements compared.
    pub(super) compared: u64,
}

impl<'a> TensorSummary<'a> {
    /// All tensors of an operator, forward ones first.
    pub(super) fn all(report: &'a Report, operator: &str) -> Vec<Self> {
        let mut tensors: Vec<Self> = Vec::new();
        for case in report.cases.iter().filter(|case| case.operator == operator) {
            for check in &case.checks {
                if check.check.is_agreement() || check.metrics.is_some() {
                    Self::add(&mut tensors, case, check);
                }
            }
        }
        for tensor in &mut tensors {
            tensor
                .entries
                .sort_by(|a, b| worse_first(a.metrics.budget_used, b.metrics.budget_used));
        }
        tensors.sort_by_key(|tensor| place_of(column(tensor.check)));
        tensors
    }

    fn add(tensors: &mut Vec<Self>, case: &'a CaseRecord, check: &'a CheckRecord) {
        let place = tensors
            .iter()
            .position(|one| *one.check == check.check && one.tensor == check.tensor)
            .unwrap_or_else(|| {
                let (check, tensor) = (&check.check, check.tensor.as_str());
                tensors.push(Self {
                    check,
                    tensor,
                    entries: Vec::new(),
                    without_metrics: 0,
                    compared: 0,
                });
                tensors.len() - 1
            });
        let summary = &mut tensors[place];
        summary.compared = summary.compared.saturating_add(check.compared);
        match &check.metrics {
            Some(metrics) => summary.entries.push(Entry { case, check, metrics }),
            None => summary.without_metrics += 1,
        }
    }

    /// The largest of a measure; NaN if one of them is NaN.
    pub(super) fn largest(&self, measure: impl Fn(&Metrics) -> f64) -> f64 {
        extreme(self.entries.iter().map(|entry| measure(entry.metrics)), f64::max)
    }

    /// Cases in which the oracle's tensor is zero to the rounding of f64 (all rows empty, dq of a
    /// single key) and the kernel stayed within its budget. Measures relative to the oracle have no
    /// meaning there.
    pub(super) fn zero_truths(&self) -> u64 {
        self.entries.iter().filter(|entry| has_zero_truth(entry.metrics)).count() as u64
    }

    /// Largest and smallest of a measure that is relative to the oracle; NaN if one of them is NaN.
    pub(super) fn range(&self, measure: impl Fn(&Metrics) -> f64 + Copy) -> (f64, f64) {
        let relative = || {
            self.entries
                .iter()
                .map(|entry| entry.metrics)
                .filter(|metrics| !has_zero_truth(metrics))
        };
        (extreme(relative().map(measure), f64::min), extreme(relative().map(measure), f64::max))
    }

    /// Median of a measure over the cases.
    pub(super) fn median(&self, measure: impl Fn(&Metrics) -> f64) -> f64 {
        let mut values: Vec<f64> =
            self.entries.iter().map(|entry| measure(entry.metrics)).collect();
        values.sort_by(f64::total_cmp);
        match values.len() {
            0 => f64::NAN,
            length if length % 2 == 1 => values[length / 2],
            length => (values[length / 2 - 1] + values[length / 2]) / 2.0,
        }
    }

    /// Worst share of the budget used.
    pub(super) fn worst_used(&self) -> f64 {
        self.entries.first().map_or(f64::NAN, |entry| entry.metrics.budget_used)
    }

    /// Whether all its checks are plain passes.
    pub(super) fn agrees(&self) -> bool {
        self.without_metrics == 0
            && self.entries.iter().all(|entry| Standing::of(entry.check) == Standing::Pass)
    }

    /// Histograms of budget use, added over the `most` cases that used most of it. Also the number
    /// of these cases, and of the elements that were compared in them.
    pub(super) fn histogram(&self, most: usize) -> (Vec<u64>, u64, u64) {
        let mut sum = Vec::new();
        let entries = &self.entries[..self.entries.len().min(most)];
        for entry in entries {
            let bins = &entry.metrics.use_histogram;
            sum.resize(bins.len().max(sum.len()), 0);
            for (place, bin) in bins.iter().enumerate() {
                sum[place] += bin;
            }
        }
        (sum, entries.len() as u64, entries.iter().map(|entry| entry.check.compared).sum())
    }
}

/// Folds with `pick`, which would skip a NaN.
fn extreme(values: impl Iterator<Item = f64>, pick: fn(f64, f64) -> f64) -> f64 {
    values
        .reduce(
            |best, value| {
                if best.is_nan() || value.is_nan() { f64::NAN } else { pick(best, value) }
            },
        )
        .unwrap_or(f64::NAN)
}

/// How many cases each kernel path ran in.
pub(super) fn paths(report: &Report, operator: &str) -> BTreeMap<String, u64> {
    let mut paths = BTreeMap::new();
    for path in
        report.cases.iter().filter(|case| case.operator == operator).flat_map(|case| &case.paths)
    {
        *paths.entry(path.clone()).or_default() += 1;
    }
    paths
}

/// How many cases have each origin.
pub(super) fn origins(report: &Report) -> Vec<(&'static str, u64)> {
    [Origin::Drawn, Origin::Regression, Origin::Shrunk, Origin::Given]
        .into_iter()
        .map(|origin| {
            (
                origin_word(origin),
                report.cases.iter().filter(|case| case.origin == origin).count() as u64,
            )
        })
        .filter(|(_, count)| *count > 0)
        .collect()
}

/// The word for a case's origin.
pub(super) fn origin_word(origin: Origin) -> &'static str {
    match origin {
        Origin::Regression => "regression",
        Origin::Drawn => "drawn",
        Origin::Shrunk => "shrunk",
        Origin::Given => "given",
    }
}

/// Bytes that one call must move, per second, in GB/s.
pub(super) fn gigabytes_per_second(benchmark: &BenchmarkRecord) -> f64 {
    benchmark.bytes / benchmark.median_ns
}

/// Operations that one call must do, per second, in TFLOP/s.
pub(super) fn teraflops(benchmark: &BenchmarkRecord) -> f64 {
    benchmark.flops / benchmark.median_ns / 1e3
}

/// A JSON object with as many fields on each line as fit into `width` columns.
pub(super) fn pretty(value: &serde_json::Value, width: usize) -> String {
    let serde_json::Value::Object(fields) = value else { return flat(value) };
    let mut lines = vec!["{".to_owned()];
    for (place, (name, field)) in fields.iter().enumerate() {
        let comma = if place + 1 < fields.len() { "," } else { "}" };
        let piece = format!("{}: {}{comma}", serde_json::Value::from(name.as_str()), flat(field));
        match lines.last_mut() {
            Some(line) if place == 0 || line.chars().count() + piece.chars().count() < width => {
                line.push_str(if place == 0 { "" } else { " " });
                line.push_str(&piece);
            }
            _ => lines.push(format!(" {piece}")),
        }
    }
    if fields.is_empty() { flat(value) } else { lines.join("\n") }
}

/// JSON on one line, with a space after each comma and colon.
fn flat(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::Object(fields) => {
            let fields = fields.iter().map(|(name, field)| {
                format!("{}: {}", serde_json::Value::from(name.as_str()), flat(field))
            });
            format!("{{{}}}", fields.collect::<Vec<_>>().join(", "))
        }
        serde_json::Value::Array(items) => {
            format!("[{}]", items.iter().map(flat).collect::<Vec<_>>().join(", "))
        }
        scalar => scalar.to_string(),
    }
}

fn has_zero_truth(metrics: &Metrics) -> bool {
    metrics.budget_relative == f64::INFINITY && metrics.budget_used <= 1.0
}
