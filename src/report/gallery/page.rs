//! The page of all public kernels.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::list::{Kernel, List};
use crate::record::words::brief;
use crate::record::{BatchAxis, BatchRecord, BatchStanding, CaseRecord, Report};
use crate::report::beside;
use crate::report::beside::log::Timings;
use crate::report::beside::pairs::Pairs;
use crate::report::diagnosis;
use crate::report::families::Gathered;
use crate::report::markdown::{block, code, finding, text};
use crate::report::numbers::{count, counted, significant, utc};
use crate::report::power;
use crate::report::skips::by_reason;
use crate::report::summary::{agrees, failing, findings, message};

/// Findings of a failing case that are written out.
const FINDINGS: usize = 3;
/// Characters of a case's line: a longer one is left to the command.
const LONGEST_REPLAY: usize = 2000;

const LEGEND: &str = "Budget: the largest share that an error used of what rounding explains. \
    Seen: the smallest uniform relative error that half of the verdicts over a tensor would fail, \
    of the tensor with the least sensitive ones. Speed: their time over ours for the same work; \
    above 1 ours is faster. Batch: whether a row keeps its bits in another batch.";

/// What became of a kernel.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// The report of all checks, and that of rows in other batches.
    Judged(Box<[Report; 2]>),
    /// Why there is none.
    NotRun(String),
}

/// A kernel of the page.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Which.
    pub kernel: Kernel,
    /// What became of it.
    pub outcome: Outcome,
}

impl Entry {
    fn report(&self) -> Option<&Report> {
        match &self.outcome {
            Outcome::Judged(reports) => Some(&reports[0]),
            Outcome::NotRun(_) => None,
        }
    }

    /// What its rows showed in other batches.
    fn batches(&self) -> impl Iterator<Item = &BatchRecord> {
        let reports = match &self.outcome {
            Outcome::Judged(reports) => &reports[1..],
            Outcome::NotRun(_) => &[],
        };
        reports.iter().flat_map(|report| &report.cases).flat_map(|case| &case.batches)
    }

    /// Whether cases of it disagree.
    pub fn disagrees(&self) -> bool {
        self.report().is_some_and(|report| !report.cases.iter().all(agrees))
    }

    /// Whether all its cases agree, of which there are some.
    pub fn agrees(&self) -> bool {
        self.report().is_some_and(|report| !report.cases.is_empty()) && !self.disagrees()
    }

    fn heading(&self) -> String {
        format!("{} ({})", text(&self.kernel.title()), code(&self.kernel.operator))
    }
}

/// What the page says about the run.
#[derive(Clone, Debug)]
pub struct Place {
    /// The command that made it.
    pub command: String,
    /// The GPU, or that there is none.
    pub machine: String,
    /// Versions of libraries, by name.
    pub versions: BTreeMap<String, String>,
    /// When it began, in seconds since 1970.
    pub unix: u64,
    /// Times of both sides, if they were given.
    pub times: Option<(Pairs, Timings)>,
}

/// The page as Markdown.
pub fn page(place: &Place, list: &List, entries: &[Entry]) -> String {
    let mut page =
        format!("Made by {}.\n\n# Public kernels under this harness\n\n", code(&place.command));
    page += &head(place, list, entries);
    page += &verdict(entries);
    page +=
        "| kernel | operator | verdict | cases | not supported | budget | seen | speed | batch |\n";
    page += "|---|---|---|--:|--:|--:|--:|--:|---|\n";
    page.extend(entries.iter().filter_map(|entry| Some(row(place, entry, entry.report()?))));
    let _ = write!(page, "\n{LEGEND}\n\n");
    page += &disagreements(entries);
    page += &batches(entries);
    page += &not_supported(entries);
    page += &not_run(entries);
    page.truncate(page.trim_end().len());
    page + "\n"
}

/// Machine, revision and versions.
fn head(place: &Place, list: &List, entries: &[Entry]) -> String {
    let mut lines = vec![("machine", place.machine.clone())];
    if let Some(report) = entries.iter().find_map(Entry::report) {
        let dirty = if report.revision.dirty { " with uncommitted changes" } else { "" };
        lines.push(("revision of the harness", format!("{}{dirty}", report.revision.commit)));
        lines.push(("seed", report.seed.to_string()));
    }
    lines.push(("date", utc(place.unix)));
    let line = |(name, value): &(&str, String)| format!("| {name} | {} |\n", text(value));
    let mut table = format!("| | |\n|---|---|\n{}", lines.iter().map(line).collect::<String>());
    for library in &list.libraries {
        if let Some(version) = place.versions.get(&library.name) {
            let (name, version) = (text(&library.name), text(version));
            let _ = writeln!(table, "| [{name}]({}) | {version} |", library.source);
        }
    }
    table + "\n"
}

/// How many kernels agree, how many do not, and how many did not run or have no case.
pub fn numbers(entries: &[Entry]) -> [u64; 3] {
    let number = |of: fn(&Entry) -> bool| entries.iter().filter(|entry| of(entry)).count() as u64;
    let (agree, disagree) = (number(Entry::agrees), number(Entry::disagrees));
    [agree, disagree, entries.len() as u64 - agree - disagree]
}

fn verdict(entries: &[Entry]) -> String {
    let cases: usize =
        entries.iter().filter_map(Entry::report).map(|report| report.cases.len()).sum();
    let [agree, disagree, rest] = numbers(entries);
    format!(
        "{}: {agree} agree in every case, {disagree} do not, {rest} did not run. {} in all.\n\n",
        counted(entries.len() as u64, "kernel"),
        counted(cases as u64, "case")
    )
}

fn row(place: &Place, entry: &Entry, report: &Report) -> String {
    let Kernel { operator, .. } = &entry.kernel;
    let gathered = Gathered::of(report);
    let groups = gathered.groups(report);
    let group = groups.first();
    let used = group.and_then(|group| group.worst());
    let used = used.map_or("—".to_owned(), |(_, tensor)| significant(tensor.worst_used(), 2));
    let seen = group.and_then(|group| group.sensitivity());
    let seen = seen.map_or("—".to_owned(), |[_, (seen, _)]| power::words((seen, 0)));
    let wrong = report.cases.iter().filter(|case| !agrees(case)).count();
    let verdict = match (wrong, report.cases.len()) {
        (_, 0) => "no case is supported".to_owned(),
        (0, _) => "agrees".to_owned(),
        (wrong, _) => format!("**disagrees in {wrong}**"),
    };
    let [cases, unsupported] = [report.cases.len(), report.unsupported.len()];
    let left = report.unfinished.filter(|left| *left > 0);
    let left = left.map_or(String::new(), |left| format!(", {} out of time", count(left)));
    format!(
        "| {} | {} | {verdict} | {}{left} | {} | {used} | {seen} | {} | {} |\n",
        text(&entry.kernel.title()),
        code(operator),
        count(cases as u64),
        count(unsupported as u64),
        speed(place, &entry.kernel),
        standing(entry)
    )
}

/// Their time over ours, over all works that time the kernel.
fn speed(place: &Place, kernel: &Kernel) -> String {
    let Some((pairs, timings)) = &place.times else { return "—".to_owned() };
    let is_its = |theirs: &str| kernel.times.iter().any(|words| theirs.starts_with(words.as_str()));
    let its = pairs.pairs.iter().filter(|pair| pair.who == kernel.library && is_its(&pair.theirs));
    let mut speeds: Vec<f64> = its.filter_map(|pair| beside::speed(pair, timings)).collect();
    speeds.sort_by(f64::total_cmp);
    match &speeds[..] {
        [] => "—".to_owned(),
        [only] => format!("{only:.2}"),
        [least, .., most] => format!("{least:.2} to {most:.2}"),
    }
}

/// How it stands on the axes that its cases have.
fn standing(entry: &Entry) -> String {
    let of = |axis| Some((axis, BatchStanding::of(axis, entry.batches())?));
    let standings: Vec<(BatchAxis, BatchStanding)> =
        BatchAxis::ALL.into_iter().filter_map(of).collect();
    let runs: u64 = standings.iter().map(|(_, standing)| standing.runs()).sum();
    let differ = |(axis, standing): &(BatchAxis, BatchStanding)| {
        let words = || format!("{axis} {} of {}", standing.differ, standing.runs());
        (standing.differ > 0).then(words)
    };
    let differing: Vec<String> = standings.iter().filter_map(differ).collect();
    match (&differing[..], runs) {
        (_, 0) => "—".to_owned(),
        ([], runs) => format!("same bits in {runs}"),
        (differing, _) => format!("**differs**: {}", differing.join(", ")),
    }
}

/// What disagrees: what failing cases have in common, and the smallest of them.
fn disagreements(entries: &[Entry]) -> String {
    let mut section = String::new();
    for entry in entries.iter().filter(|entry| entry.disagrees()) {
        let Some(report) = entry.report() else { continue };
        let _ = write!(section, "### {}\n\n", entry.heading());
        if let Some(note) = &entry.kernel.note {
            let _ = write!(section, "{}\n\n", text(note));
        }
        section += &diagnosis::page::markdown(report);
        section.extend(failing(report).first().map(|case| smallest(case)));
    }
    if section.is_empty() { section } else { format!("## What disagrees\n\n{section}") }
}

/// A failing case: what is wrong, and the command that runs it again.
fn smallest(case: &CaseRecord) -> String {
    let worst = findings(case).into_iter().take(FINDINGS);
    let lines: String = worst.map(|check| finding(check, &brief(&message(check)))).collect();
    if case.replay.len() > LONGEST_REPLAY {
        return lines + "\n";
    }
    format!("{lines}{}", block(&case.replay))
}

/// The first difference on each axis.
fn batches(entries: &[Entry]) -> String {
    let mut lines = String::new();
    for entry in entries {
        for axis in BatchAxis::ALL {
            let first = entry.batches().find(|record| record.axis == axis && record.differ > 0);
            if let Some(first) = first {
                let _ =
                    writeln!(lines, "| {} | {axis} | {} |", entry.heading(), text(&first.message));
            }
        }
    }
    if lines.is_empty() {
        return lines;
    }
    format!(
        "## Bits that depend on the batch\n\n| kernel | axis | first difference |\n|---|---|---|\n{lines}\n"
    )
}

/// Reasons why cases are not supported.
fn not_supported(entries: &[Entry]) -> String {
    let mut lines = String::new();
    for entry in entries {
        let Some(report) = entry.report() else { continue };
        let mut reasons: BTreeMap<&str, u64> = BTreeMap::new();
        for why in report.unsupported.iter().filter_map(|case| case.unsupported.as_deref()) {
            *reasons.entry(why).or_default() += 1;
        }
        for (why, cases) in reasons {
            let _ = writeln!(lines, "| {} | {cases} | {} |", entry.heading(), text(why));
        }
        // Where no case ran, what kept each from it is what there is to say.
        let skips = if report.cases.is_empty() { by_reason(&report.skips) } else { Vec::new() };
        for skip in skips {
            let _ =
                writeln!(lines, "| {} | {} | {} |", entry.heading(), skip.count, text(&skip.why));
        }
    }
    if lines.is_empty() {
        return lines;
    }
    format!("## Cases that are not supported\n\n| kernel | cases | why |\n|---|--:|---|\n{lines}\n")
}

fn not_run(entries: &[Entry]) -> String {
    let line = |entry: &Entry| match &entry.outcome {
        Outcome::NotRun(why) => Some(format!("| {} | {} |\n", entry.heading(), text(why))),
        Outcome::Judged(_) => None,
    };
    let lines: String = entries.iter().filter_map(line).collect();
    if lines.is_empty() {
        return lines;
    }
    format!("## Not run\n\n| kernel | why |\n|---|---|\n{lines}\n")
}
