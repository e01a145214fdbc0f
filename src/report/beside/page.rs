//! The page with both sides' times.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::super::markdown::{code, text};
use super::super::numbers::{self, counted, significant, utc};
use super::Failure;
use super::log::{Side, Time, Timings, spread};
use super::pairs::{Pair, Pairs};
use crate::record::Spread;

/// The group of benchmarks that are copies by the driver.
pub(super) const COPIES: &str = "device_copy/";

const MADE_OF: &str = "A time is the median of all samples, in microseconds, with the least and the largest in \
    parentheses. Speed is their time over ours: above 1 ours is faster.";
const OF_COPIES: &str = "A copy by the driver of as many bytes, read and written, on a line between those that were \
    timed. The share is the copy's time over the kernel's.";

/// A pair with its times.
struct Row<'a> {
    pair: &'a Pair,
    ours: Option<Spread>,
    theirs: Option<Spread>,
}

impl<'a> Row<'a> {
    fn of(pair: &'a Pair, timings: &Timings) -> Self {
        let of = |side| spread(timings.times(side, pair.id(side)));
        Self { pair, ours: of(Side::Ours), theirs: of(Side::Theirs) }
    }

    /// Their time over ours, in hundredths: rounded as the page shows it, so that counts agree with
    /// the page.
    fn speed(&self) -> Option<i64> {
        Some((100.0 * self.theirs?.median_us / self.ours?.median_us).round() as i64)
    }

    fn line(&self) -> String {
        let speed = self
            .speed()
            .map_or_else(|| "—".to_owned(), |speed| format!("{:.2}", speed as f64 / 100.0));
        let mark = if self.pair.differs.is_some() { " †" } else { "" };
        let (work, who) = (text(&self.pair.work), text(&self.pair.who));
        format!(
            "| {work}{mark} | {who} | {} | {} | {speed} |\n",
            shown(self.ours),
            shown(self.theirs)
        )
    }
}

/// Their time over ours for a pair that both sides have timed.
pub fn speed(pair: &Pair, timings: &Timings) -> Option<f64> {
    Row::of(pair, timings).speed().map(|speed| speed as f64 / 100.0)
}

fn shown(spread: Option<Spread>) -> String {
    spread.map_or_else(|| "not run".to_owned(), numbers::spread)
}

/// The page as Markdown; `command` is the command that makes it.
///
/// # Errors
/// Those of [`Pairs::check_against`].
pub fn page(command: &str, pairs: &Pairs, timings: &Timings) -> Result<String, Failure> {
    pairs.check_against(timings)?;
    let families: Vec<(&str, Vec<Row<'_>>)> = pairs
        .families()
        .into_iter()
        .map(|(name, pairs)| (name, pairs.into_iter().map(|pair| Row::of(pair, timings)).collect()))
        .collect();
    let rows: Vec<&Row<'_>> = families.iter().flat_map(|(_, rows)| rows).collect();
    let mut page = format!("Made by {}.\n\n# Beside public kernels\n\n", code(command));
    page += &head(timings, &rows);
    let _ = write!(page, "{}\n\n{MADE_OF}\n\n", counts(&rows));
    for (family, rows) in &families {
        let _ = write!(
            page,
            "## {}\n\n| work | public kernel | ours | theirs | speed |\n|---|---|--:|--:|--:|\n",
            text(family)
        );
        page.extend(rows.iter().map(Row::line));
        page.push('\n');
    }
    page += &differences(&rows);
    page += &not_run(&rows, timings);
    page += &copies(timings);
    page.truncate(page.trim_end().len());
    Ok(page + "\n")
}

/// Machine, versions, dates and repeats.
fn head(timings: &Timings, rows: &[&Row<'_>]) -> String {
    let software = |side| distinct(timings.turns_of(side).map(|turn| turn.software.clone()));
    let libraries = timings
        .timed(Side::Theirs)
        .flat_map(|(_, times)| times)
        .filter_map(|time| time.library.clone());
    let order: Vec<&str> = timings.turns.iter().map(|turn| turn.side.name()).collect();
    let samples: Vec<usize> = rows
        .iter()
        .flat_map(|row| [row.ours, row.theirs])
        .flatten()
        .map(|spread| spread.samples)
        .collect();
    let range = |of: Vec<usize>| match (of.iter().min(), of.iter().max()) {
        (Some(least), Some(most)) if least == most => counted(*least as u64, "sample"),
        (Some(least), Some(most)) => format!("{least} to {most} samples"),
        _ => "no samples".to_owned(),
    };
    let first = &timings.turns[0];
    let last = &timings.turns[timings.turns.len() - 1];
    let lines = [
        ("machine", format!("{}, {}", first.machine.device, first.machine.uuid)),
        ("driver", first.machine.driver.clone()),
        ("revision of ours", software(Side::Ours)),
        ("public kernels", distinct(libraries)),
        ("under", software(Side::Theirs)),
        ("date", format!("first turn {}, last turn {}", utc(first.unix), utc(last.unix))),
        ("turns", order.join(", ")),
        ("repeats", format!("{} of each time", range(samples))),
    ];
    let line = |(name, value): &(&str, String)| format!("| {name} | {} |\n", text(value));
    format!("| | |\n|---|---|\n{}\n", lines.iter().map(line).collect::<String>())
}

fn distinct(names: impl Iterator<Item = String>) -> String {
    let names: BTreeSet<String> = names.collect();
    if names.is_empty() {
        "none".to_owned()
    } else {
        names.into_iter().collect::<Vec<_>>().join(", ")
    }
}

/// How many rows exist, and how many at each speed.
fn counts(rows: &[&Row<'_>]) -> String {
    let speeds: Vec<i64> = rows.iter().filter_map(|row| row.speed()).collect();
    let above = speeds.iter().filter(|&&speed| speed >= 100).count();
    let total = counted(rows.len() as u64, "row");
    format!(
        "{total}: {above} at 1.00 or more, {} below, {} not run.",
        speeds.len() - above,
        rows.len() - speeds.len()
    )
}

/// How works differ, each difference with the works that have it.
fn differences(rows: &[&Row<'_>]) -> String {
    let mut kinds: Vec<(&str, Vec<&str>)> = Vec::new();
    for Pair { work, differs, .. } in rows.iter().map(|row| row.pair) {
        let Some(differs) = differs else { continue };
        match kinds.iter_mut().find(|(kind, _)| kind == differs) {
            Some((_, works)) => works.push(work),
            None => kinds.push((differs, vec![work])),
        }
    }
    let line = |(kind, works): &(&str, Vec<&str>)| {
        format!("- {}: {}.\n", text(kind), text(&works.join("; ")))
    };
    let lines: String = kinds.iter().map(line).collect();
    if lines.is_empty() { lines } else { format!("† The work differs:\n\n{lines}\n") }
}

/// Reasons, with the works that did not run because of them.
fn not_run(rows: &[&Row<'_>], timings: &Timings) -> String {
    let mut reasons: BTreeMap<(Side, &str), Vec<&str>> = BTreeMap::new();
    for row in rows {
        for (side, time) in [(Side::Ours, row.ours), (Side::Theirs, row.theirs)] {
            if time.is_none() {
                let why = timings.why_skipped(side, row.pair.id(side));
                reasons.entry((side, why)).or_default().push(&row.pair.work);
            }
        }
    }
    if reasons.is_empty() {
        return String::new();
    }
    let line = |((side, why), works): (&(Side, &str), &Vec<&str>)| {
        format!("| {} | {} | {} |\n", side.name(), text(why), text(&works.join("; ")))
    };
    format!(
        "## Not run\n\n| side | why | works |\n|---|---|---|\n{}\n",
        reasons.iter().map(line).collect::<String>()
    )
}

/// Microseconds of a copy of that many bytes, interpolated linearly between two of `copies` (bytes
/// and microseconds, ascending). Below the smallest copy it is the time of that copy. Above the
/// largest it follows `rate`, in bytes per microsecond.
pub(super) fn copy_time(copies: &[(f64, f64)], rate: f64, bytes: f64) -> f64 {
    let between = copies.windows(2).find(|pair| bytes <= pair[1].0);
    match (between, copies.first()) {
        (Some(&[(less, shorter), (more, longer)]), _) => {
            shorter + (longer - shorter) * f64::max(bytes - less, 0.0) / (more - less)
        }
        (_, Some(&(least, time))) if bytes <= least => time,
        _ => bytes / rate,
    }
}

/// Memory-bound kernels of ours next to copies of the same turns.
fn copies(timings: &Timings) -> String {
    let moved = |times: &[Time]| times.iter().find_map(|time| time.bytes);
    let with_bytes = |(id, times)| Some((id, moved(times)?, spread(times)?));
    let (copies, kernels): (Vec<(&str, f64, Spread)>, Vec<_>) = timings
        .timed(Side::Ours)
        .filter_map(with_bytes)
        .partition(|(id, ..)| id.starts_with(COPIES));
    let mut rates: Vec<f64> =
        timings.turns_of(Side::Ours).filter_map(|turn| turn.copy_bytes_per_second).collect();
    rates.sort_by(f64::total_cmp);
    let Some(rate) = rates.get(rates.len() / 2).filter(|_| !kernels.is_empty()) else {
        return String::new();
    };
    let mut sized: Vec<(f64, f64)> =
        copies.iter().map(|(_, bytes, spread)| (*bytes, spread.median_us)).collect();
    sized.sort_by(|one, other| one.0.total_cmp(&other.0));
    let mut section = format!(
        "## Memory-bound kernels beside a copy\n\n{OF_COPIES} A large copy reaches {} GB/s.\n\n\
         | call | ours | MB | a copy | share |\n|---|--:|--:|--:|--:|\n",
        significant(rate * 1e-9, 4)
    );
    for (id, bytes, spread) in kernels {
        let copy = copy_time(&sized, rate * 1e-6, bytes);
        let (megabytes, share) =
            (significant(bytes * 1e-6, 4), (100.0 * copy / spread.median_us).round());
        let _ = writeln!(
            section,
            "| {} | {} | {megabytes} | {} | {share} % |",
            text(id),
            shown(Some(spread)),
            significant(copy, 4)
        );
    }
    section
}
