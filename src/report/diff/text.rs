//! A comparison as text: for the terminal, and as Markdown for a pull request.

use std::fmt::Write;

use super::FALSE_ALARM_RATE;
use super::compare::{Diff, Finding, Kind};
use crate::record::Report;
use crate::report::markdown::{block, code, text};
use crate::report::numbers::{count, counted, significant, utc};
use crate::report::summary::Counts;

/// Findings of one list that are written out in the Markdown; the page has all of them. A comment
/// holds 65,536 characters.
const SHOWN: usize = 40;
/// Characters of a reason that are written out in the Markdown.
const REASON: usize = 240;

/// The verdict in one sentence.
pub(super) fn headline(diff: &Diff) -> String {
    let kinds: Vec<Kind> = diff.regressions().map(|finding| finding.kind).collect();
    if kinds.is_empty() {
        let better =
            diff.findings.iter().filter(|finding| finding.kind > Kind::StillFailing).count() as u64;
        let still =
            diff.findings.iter().filter(|finding| finding.kind == Kind::StillFailing).count()
                as u64;
        let mut words = "No regression".to_owned();
        if better > 0 {
            words += &format!(", {}", counted(better, "improvement"));
        }
        if still > 0 {
            words += &format!("; {} fail as before", counted(still, "check"));
        }
        return words;
    }
    let mut parts: Vec<String> = Vec::new();
    for kind in kinds
        .iter()
        .enumerate()
        .filter(|(i, kind)| !kinds[..*i].contains(kind))
        .map(|(_, kind)| kind)
    {
        let number = kinds.iter().filter(|one| *one == kind).count() as u64;
        parts.push(format!("{} × {}", count(number), kind.words()));
    }
    format!("{}: {}", counted(kinds.len() as u64, "regression"), parts.join(", "))
}

/// How one report describes itself: revision, device, sweep, outcome.
pub(super) fn side(report: &Report) -> [(&'static str, String); 5] {
    let (revision, environment) = (&report.revision, &report.environment);
    [
        (
            "revision",
            format!("{}{}", short(&revision.commit), if revision.dirty { " (dirty)" } else { "" }),
        ),
        ("kernels", revision.kernels_digest.chars().take(16).collect()),
        (
            "device",
            format!("{} · {} · {}", environment.backend, environment.device, environment.target),
        ),
        (
            "sweep",
            format!(
                "{}, seed {}, {}, {}",
                report.profile,
                report.seed,
                counted(report.cases.len() as u64, "case"),
                utc(report.started_unix)
            ),
        ),
        ("outcome", Counts::of(report).headline().1),
    ]
}

fn short(commit: &str) -> String {
    commit.chars().take(12).collect()
}

/// What the terminal shows.
pub fn terminal(base: &Report, head: &Report, diff: &Diff) -> String {
    let mut page = String::new();
    for (name, report) in [("BASE", base), ("HEAD", head)] {
        let [(_, revision), _, (_, device), (_, sweep), (_, outcome)] = side(report);
        let _ = writeln!(page, "{name}  {revision}  {device}  {sweep}\n      {outcome}");
    }
    for note in &diff.notes {
        let _ = writeln!(page, "note  {note}");
    }
    let mut last = None;
    for finding in &diff.findings {
        if last != Some(finding.kind) {
            let mark = if finding.kind.is_regression() { "✗" } else { "·" };
            let _ = writeln!(page, "\n{mark} {}", finding.kind.words());
            last = Some(finding.kind);
        }
        let _ = writeln!(
            page,
            "  {} {}: {} -> {}",
            finding.operator, finding.subject, finding.base, finding.head
        );
        if !finding.why.is_empty() {
            let _ = writeln!(page, "    {}", finding.why.trim_end().replace('\n', "\n    "));
        }
        if let Some(replay) = shown_replay(finding) {
            let _ = writeln!(page, "    {replay}");
        }
    }
    let _ = writeln!(page, "\n{}", headline(diff));
    page
}

/// The replay command, for findings that need attention.
fn shown_replay(finding: &Finding) -> Option<&str> {
    finding.replay.as_deref().filter(|_| finding.kind <= Kind::StillFailing)
}

/// A comment for a pull request.
pub fn markdown(base: &Report, head: &Report, diff: &Diff) -> String {
    let symbol = if diff.regressions().next().is_some() { "❌" } else { "✅" };
    let mut page = format!(
        "## {symbol} Kernel parity: {}\n\n| | BASE | HEAD |\n|---|---|---|\n",
        headline(diff)
    );
    for ((name, was), (_, is)) in side(base).into_iter().zip(side(head)) {
        let _ = writeln!(page, "| {name} | {} | {} |", text(&was), text(&is));
    }
    page += "\n";
    for note in &diff.notes {
        let _ = writeln!(page, "> {}\n", text(note));
    }
    let split = diff.findings.partition_point(|finding| finding.kind.is_regression());
    let (regressions, others) = diff.findings.split_at(split);
    page += &table("Regressions", regressions);
    page += &replays(regressions);
    if !others.is_empty() {
        let _ = write!(
            page,
            "<details><summary>{}</summary>\n\n{}</details>\n\n",
            counted(others.len() as u64, "other change"),
            table("", others)
        );
    }
    let rate = significant(100.0 * FALSE_ALARM_RATE, 1);
    let _ = writeln!(
        page,
        "Budget use and budgets: signed-rank or rank-sum test, at most {rate} % of comparisons falsely red. \
         Speed: only where the 95 % confidence intervals do not overlap."
    );
    page
}

fn table(title: &str, findings: &[Finding]) -> String {
    if findings.is_empty() {
        return String::new();
    }
    let mut section = if title.is_empty() { String::new() } else { format!("### {title}\n\n") };
    section += "| | operator | what | BASE | HEAD | why |\n|---|---|---|---|---|---|\n";
    for finding in findings.iter().take(SHOWN) {
        let _ = writeln!(
            section,
            "| {} | {} | {} | {} | {} | {} |",
            finding.kind.words(),
            code(&finding.operator),
            text(&finding.subject),
            text(&finding.base),
            text(&finding.head),
            text(&cut(&finding.why, REASON))
        );
    }
    if findings.len() > SHOWN {
        let _ = write!(
            section,
            "\n… and {} more; the HTML page has them all.\n",
            count((findings.len() - SHOWN) as u64)
        );
    }
    section + "\n"
}

/// Commands that show the regressions, each once; the tables stay readable without them.
fn replays(findings: &[Finding]) -> String {
    let mut commands: Vec<&str> = findings.iter().filter_map(shown_replay).collect();
    commands.sort_unstable();
    commands.dedup();
    if commands.is_empty() {
        return String::new();
    }
    let shown = commands[..commands.len().min(SHOWN / 4)].join("\n");
    format!("<details><summary>Replay</summary>\n{}</details>\n\n", block(&shown))
}

fn cut(raw: &str, most: usize) -> String {
    if raw.chars().count() <= most {
        raw.to_owned()
    } else {
        raw.chars().take(most).collect::<String>() + " …"
    }
}
