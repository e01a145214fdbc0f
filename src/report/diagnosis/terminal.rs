//! The end of a failing sweep: what failing cases have in common, three of them, and where to find
//! the others.
//!
//! It has no more lines than a screen, at 80 columns. Prose is wrapped there; commands are not, so
//! that they can be copied.

use std::path::Path;

use super::{Diagnosis, of_report, places};
use crate::case::Case;
use crate::case::shell::quoted;
use crate::judge::order;
use crate::record::{CaseRecord, Report, words};
use crate::report::numbers::{count, counted};
use crate::report::summary::{failing, message, origin_word};

/// Columns of a terminal.
const COLUMNS: usize = 80;
/// Limit of lines if one case fits within it: together with the sweep's own lines fewer than 40.
const LINES: usize = 30;
/// Operators whose diagnoses are written out.
const MOST_OPERATORS: usize = 4;
/// Failing cases that are shown.
const MOST_CASES: usize = 3;
/// Findings that are shown of a case.
const MOST_FINDINGS: usize = 2;
/// Lines that are shown of a long message: its first and its last ones are the most informative.
const MOST_MESSAGE: usize = 4;

/// The text; empty where nothing fails. `out` is the folder of the report; the commands refer to
/// its records.
pub fn text(report: &Report, out: &Path) -> String {
    let diagnoses = of_report(report);
    if diagnoses.is_empty() {
        return String::new();
    }
    let mut text = headed(&diagnoses);
    let failing = failing(report);
    let (cases, all) = (shown(&failing), failing.len());
    let mut written = 0;
    for (place, case) in cases.iter().enumerate() {
        let block = case_text(report, case, place, out);
        if place > 0 && lines(&text) + lines(&block) > LINES {
            break;
        }
        text += &block;
        written += 1;
    }
    if all > written {
        text += &format!(
            "{} more: {}\n",
            count((all - written) as u64),
            out.join("index.html").display()
        );
    }
    text
}

/// What is known about the failures of several operators.
pub fn headed(diagnoses: &[Diagnosis]) -> String {
    let mut text = String::new();
    for diagnosis in diagnoses.iter().take(MOST_OPERATORS) {
        text += &wrapped(&diagnosis.heading(), "", "    ");
        // With many operators each has a line or two.
        let sentences = if diagnoses.len() > 1 { 1 } else { usize::MAX };
        for sentence in diagnosis.sentences.iter().take(sentences) {
            text += &wrapped(sentence, "  ", "    ");
        }
    }
    if diagnoses.len() > MOST_OPERATORS {
        let others: Vec<&str> =
            diagnoses[MOST_OPERATORS..].iter().map(|one| one.operator.as_str()).collect();
        text += &wrapped(
            &format!(
                "and {}: {}",
                counted(others.len() as u64, "more operator"),
                others.join(", ")
            ),
            "",
            "    ",
        );
    }
    text
}

/// The cases that are shown: shrunk ones first, then those that fail in another way than the ones
/// before.
fn shown<'a>(failing: &[&'a CaseRecord]) -> Vec<&'a CaseRecord> {
    let kind = |case: &CaseRecord| {
        let first = order::findings(case).first().map(|finding| order::name_of(finding.check));
        (case.operator.clone(), first)
    };
    let (mut shown, mut others): (Vec<&CaseRecord>, Vec<&CaseRecord>) = (Vec::new(), Vec::new());
    for &case in failing {
        let is_new = !shown.iter().any(|other| kind(other) == kind(case));
        if is_new { shown.push(case) } else { others.push(case) }
    }
    shown.into_iter().chain(others).take(MOST_CASES).collect()
}

/// One case: what failed, where, and the command that runs it again. The command of the first case
/// holds the case itself; the others refer to the records.
fn case_text(report: &Report, case: &CaseRecord, place: usize, out: &Path) -> String {
    let operator = report.operators.iter().find(|operator| operator.name == case.operator);
    let origin = origin_word(case.origin);
    let mut text = format!("{}. {}, {origin}\n", place + 1, case.operator);
    text += &findings_text(operator, case, MOST_FINDINGS);
    let replay = if place == 0 { case.replay.clone() } else { by_reference(case, out) };
    text + &format!("  replay: {replay}\n")
}

/// The first findings of a case, at most this many.
pub fn findings_text(
    operator: Option<&crate::record::OperatorRecord>,
    case: &CaseRecord,
    most: usize,
) -> String {
    let findings = order::findings(case);
    let mut text = if findings.is_empty() { "  no check ran\n".to_owned() } else { String::new() };
    for finding in findings.iter().take(most) {
        let head = format!("{} {}", finding.check.check, finding.check.tensor);
        text += &wrapped(
            &format!("{}: {}", head.trim_end(), shortened(&message(finding.check))),
            "  ",
            "    ",
        );
        let place = places::of_check(operator, finding.check);
        let where_and_with: Vec<String> =
            [place, finding.company()].into_iter().filter(|text| !text.is_empty()).collect();
        if !where_and_with.is_empty() {
            text += &wrapped(&where_and_with.join("; "), "    ", "    ");
        }
    }
    if findings.len() > most {
        text +=
            &format!("  and {}\n", counted((findings.len() - most) as u64, "more failing check"));
    }
    text
}

/// A message of many lines, such as a compiler's log or a traceback, by its start and its end.
fn shortened(message: &str) -> String {
    let lines: Vec<&str> = message.lines().collect();
    if lines.len() <= MOST_MESSAGE {
        return message.to_owned();
    }
    let [first, .., before, last] = lines[..] else { return message.to_owned() };
    format!("{first}\n    …\n{before}\n{last}")
}

/// The command that replays a case of the records in a folder.
fn by_reference(case: &CaseRecord, out: &Path) -> String {
    let records = out.join(crate::record::journal::RECORDS);
    let Ok(own) = serde_json::from_value::<Case>(case.case.clone()) else {
        return case.replay.clone();
    };
    let line = quoted(&own.line());
    match case.replay.strip_suffix(&line) {
        Some(command) => {
            format!("{command}{}", quoted(&format!("{}#{}", records.display(), own.digest())))
        }
        None => case.replay.clone(),
    }
}

/// Lines that a text takes on a terminal.
pub fn lines(text: &str) -> usize {
    text.lines().map(|line| line.chars().count().div_ceil(COLUMNS).max(1)).sum()
}

/// Wraps prose for a terminal. The first line starts with `first`, the others with `others`. Lines
/// stay lines.
pub fn wrapped(text: &str, first: &str, others: &str) -> String {
    let mut done = String::new();
    let mut line = first.to_owned();
    let mut is_empty = true;
    for (number, own) in words::printable(text).lines().enumerate() {
        if number > 0 {
            done += &line;
            done.push('\n');
            (line, is_empty) = (others.to_owned(), true);
        }
        for word in own.split_whitespace() {
            if !is_empty && line.chars().count() + 1 + word.chars().count() > COLUMNS {
                done += &line;
                done.push('\n');
                (line, is_empty) = (others.to_owned(), true);
            }
            if !is_empty {
                line.push(' ');
            }
            line += word;
            is_empty = false;
        }
    }
    done + &line + "\n"
}

/// One line for a failing case while a sweep runs.
pub fn note(case: &CaseRecord) -> String {
    let first = order::findings(case)
        .first()
        .map_or("no check ran".to_owned(), |finding| order::name_of(finding.check));
    format!(
        "{}: a {} case fails, {first}; more at the end",
        case.operator,
        origin_word(case.origin)
    )
}
