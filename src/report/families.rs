//! Operators by family: a row for each on the page's first screen, and below it the operators and
//! their checks in folds.

use maud::{Markup, html};

use crate::operator::Family;
use crate::record::{BenchmarkRecord, OperatorRecord, Report, Seen};

use super::elements::{Anchors, badge, scroller};
use super::numbers::{count, counted, significant, time};
use super::operators::{self as sections, Section};
use super::power::{self, RULES, TensorPower};
use super::summary::{Cell, Matrix, Row, TensorSummary, operators};
use super::times;
use crate::record::{Standing, within, worse_first};

/// Operators of a report whose sections are open: as many as a reader reads in full.
const OPEN: usize = 3;

/// A family's part of a report.
pub(super) struct Group<'a> {
    /// Which family; `None` for operators that declare none and that this build does not know.
    family: Option<Family>,
    operators: Vec<Section<'a>>,
    /// Its rows of the matrix.
    rows: Vec<&'a Row>,
    /// All of its checks.
    sum: Cell,
}

/// What the groups of a report borrow.
pub(super) struct Gathered {
    operators: Vec<OperatorRecord>,
    matrix: Matrix,
    power: Vec<TensorPower>,
}

impl Gathered {
    /// Gathers a whole report.
    pub(super) fn of(report: &Report) -> Self {
        Self {
            operators: operators(report),
            matrix: Matrix::of(report),
            power: power::of_report(report),
        }
    }

    /// The report's operators by family, in the order of the model.
    pub(super) fn groups<'a>(&'a self, report: &'a Report) -> Vec<Group<'a>> {
        let families = Family::ALL.into_iter().map(Some).chain([None]);
        families
            .map(|family| self.group(report, family))
            .filter(|group| !group.operators.is_empty())
            .collect()
    }

    fn group<'a>(&'a self, report: &'a Report, family: Option<Family>) -> Group<'a> {
        let mut group =
            Group { family, operators: Vec::new(), rows: Vec::new(), sum: Cell::default() };
        for operator in self.operators.iter().filter(|operator| operator.family == family) {
            let row = self.matrix.rows.iter().find(|(name, ..)| *name == operator.name);
            let tensors = TensorSummary::all(report, &operator.name);
            let power = self
                .power
                .iter()
                .filter(|tensor| tensor.operator == operator.name)
                .cloned()
                .collect();
            let standing = row.and_then(|(_, _, sum)| sum.standing);
            group.operators.push(Section { report, operator, tensors, power, standing });
            group.rows.extend(row);
        }
        for (_, _, sum) in &group.rows {
            group.sum.join(sum);
        }
        group
    }

    /// Operators and checks.
    pub(super) fn matrix(&self) -> &Matrix {
        &self.matrix
    }
}

impl Group<'_> {
    pub(super) fn name(&self) -> &'static str {
        self.family.map_or("other", Family::name)
    }

    fn standing(&self) -> Option<Standing> {
        self.sum.standing
    }

    /// Its verdict as a symbol.
    pub(super) fn symbol(&self) -> &'static str {
        self.standing().map_or("—", Standing::symbol)
    }

    /// Operators, cases and checks.
    pub(super) fn counts(&self) -> [u64; 3] {
        let of = |section: &Section<'_>| {
            section
                .report
                .cases
                .iter()
                .filter(|case| case.operator == section.operator.name)
                .count() as u64
        };
        [self.operators.len() as u64, self.operators.iter().map(of).sum(), self.sum.total]
    }

    /// The tensor that used most of its budget, with its operator.
    pub(super) fn worst(&self) -> Option<(&str, &TensorSummary<'_>)> {
        let measured = self.operators.iter().filter_map(|section| {
            let worst = sections::worst_tensor(&section.tensors)?;
            Some((section.operator.name.as_str(), &section.tensors[worst]))
        });
        measured.min_by(|(_, a), (_, b)| worse_first(a.worst_used(), b.worst_used()))
    }

    /// The smallest bias that half of the verdicts see: for the tensor that they see best, and for
    /// the one that they see worst.
    pub(super) fn sensitivity(&self) -> Option<[(Seen, &TensorPower); 2]> {
        let of = |tensor| (TensorPower::seen_in(tensor, 0.5, RULES[0].1).0, tensor);
        let seen = || {
            self.operators
                .iter()
                .flat_map(|section| &section.power)
                .filter(|one| !one.cases.is_empty())
                .map(of)
        };
        Some([seen().max_by_key(|(seen, _)| *seen)?, seen().min_by_key(|(seen, _)| *seen)?])
    }

    /// The call that takes the longest.
    pub(super) fn slowest(&self) -> Option<&BenchmarkRecord> {
        let report = self.operators.first()?.report;
        let ours = |one: &&BenchmarkRecord| {
            self.operators.iter().any(|section| section.operator.name == one.operator)
        };
        report.benchmarks.iter().filter(ours).max_by(|a, b| a.median_ns.total_cmp(&b.median_ns))
    }

    /// Median of their times over ours, where an external kernel was timed together with ours.
    fn beside_ours(&self) -> Option<f64> {
        let ratios = self
            .operators
            .iter()
            .flat_map(|section| times::ratios(section.report, &section.operator.name));
        let mut ratios: Vec<f64> = ratios.collect();
        ratios.sort_by(f64::total_cmp);
        ratios.get(ratios.len() / 2).copied()
    }
}

/// The least time that the device needs for a call's work, in nanoseconds, where its rates were
/// measured.
pub(super) fn floor(benchmark: &BenchmarkRecord) -> Option<f64> {
    benchmark.percent_of_limit.map(|percent| benchmark.median_ns * percent / 100.0)
}

/// A row for each family.
pub(super) fn overview(groups: &[Group<'_>]) -> Markup {
    let table = html! {
        table .families {
            thead {
                tr {
                    th scope="col" { "family" }
                    th scope="col" { "verdict" }
                    th scope="col" { "worst budget use" }
                    th scope="col" { "smallest bias seen" }
                    th scope="col" { "slowest kernel, floor" }
                    th .count scope="col" { "operators" }
                    th .count scope="col" { "cases" }
                    th .count scope="col" { "checks" }
                }
            }
            tbody { @for group in groups { (family_row(group)) } }
        }
    };
    html! {
        section #families {
            h2 { "Families" }
            (scroller("Families", table))
            p .note {
                "Smallest bias seen: the uniform relative error that half of the verdicts over a tensor would fail, of the tensor with the most sensitive verdicts to the least sensitive one. "
                "Floor: the time that the device needs at the highest rates measured in this run to move each byte once and to do each operation."
            }
        }
    }
}

fn family_row(group: &Group<'_>) -> Markup {
    html! {
        tr {
            th scope="row" { a href=(format!("#family-{}", group.name())) { (group.name()) } }
            td { @if let Some(standing) = group.standing() { (badge(standing)) } @else { "—" } }
            td {
                @if let Some((operator, tensor)) = group.worst() {
                    @let used = tensor.worst_used();
                    @if within(used) { (significant(used, 3)) } @else { strong .fail-text { "✗ " (significant(used, 3)) } }
                    " " (of_operator(operator, tensor.tensor))
                } @else { "—" }
            }
            td { (sensitivity(group)) }
            td {
                @if let Some(slowest) = group.slowest() {
                    (time(slowest.median_ns))
                    @if let (Some(floor), Some(percent)) = (floor(slowest), slowest.percent_of_limit) { ", floor " (time(floor)) " (" (significant(percent, 2)) " %)" }
                    " " span .note { (slowest.id) }
                } @else if let Some(ratio) = group.beside_ours() {
                    (significant(ratio, 3)) " " span .note { "their time over ours, median" }
                } @else { span .note { "not measured" } }
            }
            @for number in group.counts() { td .count { (count(number)) } }
        }
    }
}

fn sensitivity(group: &Group<'_>) -> Markup {
    html! {
        @if let Some([best, worst]) = group.sensitivity() {
            (power::words((best.0, 0)))
            @if best.0 != worst.0 {
                " … " (power::words((worst.0, 0))) " " (of_operator(&worst.1.operator, &worst.1.tensor))
            }
        } @else { "—" }
    }
}

fn of_operator(operator: &str, tensor: &str) -> Markup {
    html! { span .note { a href=(format!("#operator-{operator}")) { (operator) } " " (tensor) } }
}

/// The operators of each family and the standing of their checks, folded unless something needs
/// reading.
pub(super) fn folds(groups: &[Group<'_>], gathered: &Gathered, anchors: &Anchors) -> Markup {
    let few = groups.iter().map(|group| group.operators.len()).sum::<usize>() <= OPEN;
    let failed =
        |standing: Option<Standing>| standing.is_some_and(|standing| standing != Standing::Pass);
    html! {
        section #operators {
            h2 { "Operators and checks" }
            p .note {
                "A number counts checks that passed; one check looks at one tensor of one case, or at a whole case. "
                "✗ some failed, of how many · ! some could not be decided · ? a pass without ground · — not run."
                @if !gathered.matrix.absent.is_empty() { " Checks that no case ran: " (gathered.matrix.absent.join(", ")) "." }
            }
            @for group in groups {
                details .family id=(format!("family-{}", group.name())) open[few || groups.len() == 1 || failed(group.standing())] {
                    summary {
                        @if let Some(standing) = group.standing() { (badge(standing)) " " }
                        strong { (group.name()) }
                        span .note { " · " (group.family.map_or("of no family that this program knows", Family::summary)) " · " (counted(group.operators.len() as u64, "operator")) }
                    }
                    (matrix(&gathered.matrix.columns, &group.rows))
                    @for section in &group.operators { (sections::section(section, few || failed(section.standing), anchors)) }
                }
            }
        }
    }
}

/// The family's rows of the matrix, with the columns of checks that it ran.
fn matrix(columns: &[String], rows: &[&Row]) -> Markup {
    let ran = |place: &usize| rows.iter().any(|(_, cells, _)| cells[*place].standing.is_some());
    let places: Vec<usize> = (0..columns.len()).filter(ran).collect();
    let table = html! {
        table .matrix {
            thead {
                tr {
                    th scope="col" { "operator" }
                    th .upright scope="col" { span { "all" } }
                    @for place in &places { th .upright scope="col" { span { (columns[*place]) } } }
                }
            }
            tbody {
                @for (operator, cells, sum) in rows {
                    tr {
                        th scope="row" { a href=(format!("#operator-{operator}")) { (operator) } }
                        (matrix_cell(sum))
                        @for place in &places { (matrix_cell(&cells[*place])) }
                    }
                }
            }
        }
    };
    scroller("Operators and checks", table)
}

fn matrix_cell(cell: &Cell) -> Markup {
    match cell.standing {
        None => html! { td .none title="not run" { "—" } },
        Some(standing) => html! {
            td class=(standing.word()) title=(counted(cell.compared, "element")) {
                @if standing == Standing::Pass { (count(cell.passes)) } @else {
                    span { span aria-hidden="true" { (standing.symbol()) } " " (count(cell.passes)) } " " span .total { "/ " (count(cell.total)) }
                }
            }
        },
    }
}
