//! `summary.md`: the part of a report that fits into a pull request.

use std::fmt::Write;

use crate::mutants::matrix::tally::Tally;
use crate::operator::benchmarks::BY_INVARIANT_PATH;
use crate::record::words::printable;
use crate::record::{ChangeRecord, CheckRecord, MutantSource, Report};

use super::elements::hash;
use super::families::{self, Gathered};
use super::html::coverage;
use super::numbers::{
    count, counted, duration, one_minus_cosine, scientific, significant, time, utc,
};
use super::skips::by_reason;
use super::summary::{
    Cell, Counts, TensorSummary, failing, findings, gigabytes_per_second, message, operators,
    survived, teraflops,
};
use super::{batches, diagnosis};
use super::{power, times};
use crate::record::{Standing, worse_first};

/// Failing cases that are written out.
const FAILURES: usize = 10;
/// Surviving mutants that are written out.
const SURVIVORS: usize = 20;
/// Rows of two tables: what used most of its budget, and what is furthest from its limit.
const ROWS: usize = 10;

/// The whole summary.
pub(super) fn page(report: &Report) -> String {
    let counts = Counts::of(report);
    let (class, headline) = counts.headline();
    let symbol = match class {
        "pass" => "✅",
        "warn" => "⚠️",
        _ => "❌",
    };
    let gathered = Gathered::of(report);
    let mut page = format!("## {symbol} {headline}\n\n");
    page += &totals(report, &counts);
    page += &against_base(report);
    page += &diagnosis::page::markdown(report);
    page += &failures(report);
    page += &families(report, &gathered);
    page += &matrix(&gathered);
    page += &batches::summary(report);
    page += &tightest(report);
    page += &times::markdown(report);
    page += &benchmarks(report);
    page += &invariant_paths(report);
    page += &mutants(report);
    page += &paths_never_run(report);
    page += &skips(report);
    page += &environment(report);
    page
}

fn totals(report: &Report, counts: &Counts) -> String {
    let mut line = format!(
        "{}: {}, {}, {} compared; seed {}, {}.\n\n",
        text(&coverage(report)),
        counted(counts.cases, "case"),
        counted(counts.checks, "check"),
        counted(counts.compared, "element"),
        report.seed,
        duration(report.seconds),
    );
    if report.revision.dirty {
        line += "**DIRTY TREE: built with uncommitted changes; the commit alone does not reproduce this.**\n\n";
    }
    line
}

/// A line of a list: the check, its tensor, and what it says.
pub(crate) fn finding(check: &CheckRecord, message: &str) -> String {
    let tensor = match check.tensor.as_str() {
        "" => String::new(),
        tensor => format!(" of {}", code(tensor)),
    };
    let word = Standing::of(check).word();
    format!("- {word} {}{tensor}: {}\n", text(check.check.as_str()), text(message))
}

fn failures(report: &Report) -> String {
    let cases = failing(report);
    if cases.is_empty() {
        return String::new();
    }
    let mut section = "### Failures\n\n".to_owned();
    for saved in &report.saved {
        let cases = counted(saved.cases, "failing case");
        let _ = write!(section, "Saved for the next run: {cases} in {}.\n\n", code(&saved.file));
    }
    for (place, case) in cases.iter().take(FAILURES).enumerate() {
        let _ = write!(
            section,
            "**{}. {}** {}\n\n",
            place + 1,
            text(&case.operator),
            code(&hash(case))
        );
        for check in findings(case) {
            section += &finding(check, &message(check));
        }
        if case.checks.is_empty() {
            section += "- error: no check ran\n";
        }
        section += &block(&case.replay);
    }
    if cases.len() > FAILURES {
        let _ = write!(
            section,
            "… and {}; the HTML report has them all.\n\n",
            counted((cases.len() - FAILURES) as u64, "more failing case")
        );
    }
    section
}

/// A row for each family.
fn families(report: &Report, gathered: &Gathered) -> String {
    let groups = gathered.groups(report);
    if report.cases.is_empty() {
        return String::new();
    }
    let mut table = "### Families\n\n| family | operators | cases | checks | worst budget use | smallest bias seen | slowest kernel | floor |\n|---|--:|--:|--:|---|---|---|--:|\n".to_owned();
    for group in &groups {
        let worst = group.worst().map_or("—".to_owned(), |(operator, tensor)| {
            format!(
                "{} {} {}",
                significant(tensor.worst_used(), 3),
                code(operator),
                code(tensor.tensor)
            )
        });
        let seen = group.sensitivity().map_or("—".to_owned(), |[(best, _), (worst, tensor)]| {
            let of = format!("{} {}", code(&tensor.operator), code(&tensor.tensor));
            format!("{} … {} {of}", power::words((best, 0)), power::words((worst, 0)))
        });
        let (slowest, floor) = group.slowest().map_or(("—".to_owned(), "—".to_owned()), |one| {
            let floor = families::floor(one).map_or("not measured".to_owned(), time);
            (format!("{} {}", time(one.median_ns), code(&one.id)), floor)
        });
        let [operators, cases, checks] = group.counts().map(count);
        let _ = writeln!(
            table,
            "| {} {} | {operators} | {cases} | {checks} | {worst} | {seen} | {slowest} | {floor} |",
            group.symbol(),
            group.name()
        );
    }
    table + "\n"
}

/// Operators whose checks are not folded; if there are more, they are folded.
const OPEN: usize = 3;

fn matrix(gathered: &Gathered) -> String {
    let matrix = gathered.matrix();
    if matrix.columns.is_empty() {
        return String::new();
    }
    let columns: Vec<String> = matrix.columns.iter().map(|column| text(column)).collect();
    let mut table = format!(
        "| operator | all | {} |\n|---|{}\n",
        columns.join(" | "),
        "--:|".repeat(columns.len() + 1)
    );
    for (operator, cells, sum) in &matrix.rows {
        let cells: Vec<String> = [sum].into_iter().chain(cells).map(cell).collect();
        let _ = writeln!(table, "| {} | {} |", code(operator), cells.join(" | "));
    }
    if !matrix.absent.is_empty() {
        let _ = write!(table, "\nChecks that no case ran: {}.\n", matrix.absent.join(", "));
    }
    if matrix.rows.len() <= OPEN {
        return format!("### Checks passed\n\n{table}\n");
    }
    format!(
        "### Checks passed\n\n<details><summary>By operator</summary>\n\n{table}\n</details>\n\n"
    )
}

fn cell(cell: &Cell) -> String {
    match cell.standing {
        None => "—".to_owned(),
        Some(Standing::Pass) => count(cell.passes),
        Some(standing) => {
            format!("{} {}/{}", standing.symbol(), count(cell.passes), count(cell.total))
        }
    }
}

/// What changed against the base, where the report was compared with one.
fn against_base(report: &Report) -> String {
    let Some(base) = &report.base else { return String::new() };
    let commit = base.commit.chars().take(12).collect::<String>();
    let mut section =
        format!("### Against the base {}\n\n{}\n\n", code(&commit), text(&base.headline));
    for change in &base.changes {
        let ChangeRecord { kind, operator, subject, base, head, .. } = change;
        let mark = if change.is_regression { "✗ " } else { "" };
        let _ = writeln!(
            section,
            "- {mark}{}: {} {}: {} → {}",
            text(kind),
            code(operator),
            text(subject),
            text(base),
            text(head)
        );
    }
    if base.number > base.changes.len() as u64 {
        let _ = writeln!(
            section,
            "- … and {}",
            counted(base.number - base.changes.len() as u64, "more change")
        );
    }
    section + "\n"
}

fn tightest(report: &Report) -> String {
    let operators = operators(report);
    let mut tensors: Vec<_> = operators
        .iter()
        .flat_map(|operator| {
            TensorSummary::all(report, &operator.name)
                .into_iter()
                .map(move |tensor| (&operator.name, tensor))
        })
        .filter(|(_, tensor)| !tensor.entries.is_empty())
        .collect();
    tensors.sort_by(|(_, a), (_, b)| worse_first(a.worst_used(), b.worst_used()));
    if tensors.is_empty() {
        return String::new();
    }
    let mut table = "### Closest to the budget\n\n| operator | check | tensor | cases | budget used | relative budget | 1 − cosine | norm ratio | max ulp |\n|---|---|---|--:|--:|--:|--:|--:|--:|\n".to_owned();
    for (operator, tensor) in tensors.iter().take(ROWS) {
        let _ = writeln!(
            table,
            "| {} | {} | {} | {} | {} | {} | {} | {} … {} | {} |",
            code(operator),
            text(tensor.check.as_str()),
            code(tensor.tensor),
            count(tensor.entries.len() as u64),
            significant(tensor.worst_used(), 3),
            scientific(tensor.largest(|metrics| metrics.budget_relative)),
            one_minus_cosine(tensor.range(|metrics| metrics.cosine).0),
            significant(tensor.range(|metrics| metrics.norm_ratio).0, 5),
            significant(tensor.range(|metrics| metrics.norm_ratio).1, 5),
            significant(tensor.largest(|metrics| metrics.ulp_max), 3),
        );
    }
    table + "\n"
}

fn benchmarks(report: &Report) -> String {
    if report.benchmarks.is_empty() {
        return String::new();
    }
    let mut benchmarks: Vec<_> = report.benchmarks.iter().collect();
    benchmarks.sort_by(|a, b| {
        a.percent_of_limit
            .unwrap_or(f64::INFINITY)
            .total_cmp(&b.percent_of_limit.unwrap_or(f64::INFINITY))
    });
    let mut table = "### Furthest from the device's limit\n\n| benchmark | median | GB/s | TFLOP/s | of the limit |\n|---|--:|--:|--:|--:|\n".to_owned();
    for benchmark in benchmarks.iter().take(ROWS) {
        let limit = benchmark
            .percent_of_limit
            .map_or("not measured".to_owned(), |percent| format!("{} %", significant(percent, 3)));
        let (bandwidth, rate) =
            (significant(gigabytes_per_second(benchmark), 3), significant(teraflops(benchmark), 3));
        let _ = writeln!(
            table,
            "| {} | {} | {bandwidth} | {rate} | {limit} |",
            code(&benchmark.id),
            time(benchmark.median_ns)
        );
    }
    table + "\n"
}

/// What invariance costs: the time of a call by the invariant path over that of the same call by
/// the path that is chosen for the batch.
fn invariant_paths(report: &Report) -> String {
    let time_of = |id: &str| {
        report.benchmarks.iter().find(|other| other.id == id).map(|other| other.median_ns)
    };
    let mut lines = String::new();
    for benchmark in &report.benchmarks {
        let Some(free) = benchmark.id.strip_suffix(BY_INVARIANT_PATH) else { continue };
        let Some(of_free) = time_of(free).filter(|time| *time > 0.0) else { continue };
        let _ = writeln!(
            lines,
            "| {} | {} | {} | {} |",
            code(free),
            time(of_free),
            time(benchmark.median_ns),
            significant(benchmark.median_ns / of_free, 3)
        );
    }
    if lines.is_empty() {
        return lines;
    }
    format!(
        "<details><summary>Cost of batch invariance</summary>\n\n| benchmark | free | invariant | ratio |\n|---|--:|--:|--:|\n{lines}\n</details>\n\n"
    )
}

fn mutants(report: &Report) -> String {
    if report.mutants.is_empty() {
        return String::new();
    }
    let mut section = "### Mutants\n\n| operator | planted killed | generated | killed | survived | equivalent | invalid | not run | kill rate |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|\n".to_owned();
    for tally in Tally::all(report) {
        let left_out = tally.left_out.as_ref();
        let _ = writeln!(
            section,
            "| {} | {} / {} | {} | {} | {} | {} | {} | {} | {} |",
            code(&tally.operator),
            count(tally.planted_killed),
            count(tally.planted_killed + tally.planted_missed),
            count(left_out.map_or(0, |counts| counts.generated)),
            count(tally.killed),
            count(tally.survived),
            count(tally.equivalent),
            count(tally.invalid),
            count(left_out.map_or(0, |counts| counts.not_drawn + counts.not_run)),
            tally.rate().map_or("—".to_owned(), |rate| format!("{:.1} %", 100.0 * rate)),
        );
    }
    section += "\n";
    let survivors: Vec<_> = report.mutants.iter().filter(|mutant| survived(mutant)).collect();
    for mutant in survivors.iter().take(SURVIVORS) {
        let told = match mutant.source {
            MutantSource::Planted => {
                format!(
                    " ({}) Expected to be seen by {}.",
                    text(&mutant.catalogue),
                    text(&mutant.expected)
                )
            }
            MutantSource::Generated => format!(" ({}:{})", text(&mutant.file), mutant.line),
        };
        let _ = writeln!(
            section,
            "- **survived:** {}: {}{told}",
            code(&mutant.id),
            text(&mutant.summary)
        );
        for line in mutant
            .original
            .lines()
            .map(|line| format!("- {line}"))
            .chain(mutant.mutated.lines().map(|line| format!("+ {line}")))
        {
            let _ = writeln!(section, "  - {}", code(&line));
        }
    }
    if survivors.len() > SURVIVORS {
        let more = counted((survivors.len() - SURVIVORS) as u64, "more survivor");
        let _ = writeln!(section, "- … and {more}; the HTML report has them all.");
    }
    section + if survivors.is_empty() { "" } else { "\n" }
}

fn paths_never_run(report: &Report) -> String {
    let never = report.paths_never_run();
    if never.is_empty() {
        return String::new();
    }
    let mut section = "### Paths that never ran\n\n".to_owned();
    for (operator, missing) in never {
        let _ = writeln!(
            section,
            "- {}: {}",
            text(operator),
            missing.iter().map(|path| code(path)).collect::<Vec<_>>().join(", ")
        );
    }
    section + "\n"
}

fn skips(report: &Report) -> String {
    if report.skips.is_empty() {
        return String::new();
    }
    let mut section = "### Skipped\n\n".to_owned();
    for skip in by_reason(&report.skips) {
        let _ = writeln!(
            section,
            "- {} × {}: {}",
            count(skip.count),
            text(&skip.what),
            text(&skip.why)
        );
    }
    section + "\n"
}

fn environment(report: &Report) -> String {
    let environment = &report.environment;
    format!(
        "{} · {} · {} · {} · {} · {} {}{} · kernels {} · {}\n\n{}",
        environment.backend,
        text(&environment.device),
        text(&environment.driver),
        text(&environment.compiler),
        text(&environment.target),
        code(&report.revision.commit),
        if report.revision.dirty { "**dirty**" } else { "clean" },
        if report.schedules > 0 {
            format!(" · {} random schedules", count(report.schedules.into()))
        } else {
            String::new()
        },
        code(&report.revision.kernels_digest.chars().take(16).collect::<String>()),
        utc(report.started_unix),
        block(&report.command),
    )
}

/// Text that does not break a table row and does not become markup, links, mentions or control
/// characters.
pub(crate) fn text(raw: &str) -> String {
    let raw = printable(raw);
    let raw = raw.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut line = String::new();
    let mut before = ' ';
    let mut characters = raw.chars().peekable();
    while let Some(character) = characters.next() {
        let after = characters.peek().copied().unwrap_or(' ');
        match character {
            '<' => line.push_str("&lt;"),
            '>' => line.push_str("&gt;"),
            '&' => line.push_str("&amp;"),
            '@' => line.push_str("&#64;"),
            ':' if after == '/' => line.push_str("&#58;"),
            // Within a word it is an ordinary character.
            '_' if before.is_alphanumeric() && after.is_alphanumeric() => line.push('_'),
            '|' | '*' | '`' | '\\' | '[' | ']' | '_' | '~' | '#' => line.extend(['\\', character]),
            other => line.push(other),
        }
        before = character;
    }
    line
}

/// A code span. A vertical bar would end a table's cell even inside it.
pub(crate) fn code(raw: &str) -> String {
    format!(
        "`{}`",
        printable(raw)
            .replace('`', "'")
            .replace('|', "¦")
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
    )
}

/// A fenced block whose fence is longer than any in the text.
pub(crate) fn block(raw: &str) -> String {
    let longest = raw.split(|character| character != '`').map(str::len).max().unwrap_or(0);
    let fence = "`".repeat(longest.max(2) + 1);
    format!("\n{fence}sh\n{raw}\n{fence}\n\n")
}
