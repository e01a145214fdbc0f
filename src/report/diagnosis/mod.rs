//! Diagnosis of failures: what failing cases have in common, which known number a tensor is off by,
//! and where.
//!
//! Made only from records, for the terminal, the page and the summary. Every sentence must pass a
//! test against chance. Where nothing separates failing cases from the others, there is no
//! sentence.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `features` | questions about cases: fields, layouts, paths |
//! | `bits` | sets of cases |
//! | `rules` | the shortest rules that tell failing cases from the others |
//! | `ratios` | uniform factors that are known numbers |
//! | `places` | runs and periods along named axes |
//! | `terminal` | the end of a failing sweep |
//! | `page` | the same for the page and the summary |

use self::bits::Bits;
use self::rules::Rule;
use super::numbers::{count, counted};
use super::summary::agrees;
use crate::judge::order;
use crate::record::{CaseRecord, OperatorRecord, Origin, Report};

mod bits;
mod features;
pub(crate) mod page;
pub(crate) mod places;
mod ratios;
mod rules;
pub mod terminal;
#[cfg(test)]
mod tests;

/// Sentences of each kind for an operator.
const MOST_SENTENCES: usize = 3;
/// Kinds of failures that a heading names.
const MOST_KINDS: usize = 3;

/// What the records of an operator show about its failures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnosis {
    /// The operator.
    pub operator: String,
    /// Cases that ran, without shrunk ones.
    pub cases: u64,
    /// How many of them fail.
    pub failing: u64,
    /// What failing cases have in common, which numbers they are off by, and where. One sentence
    /// each, the most informative first.
    pub sentences: Vec<String>,
    /// What failed, most frequent first, each with the number of cases.
    kinds: Vec<(String, u64)>,
}

impl Diagnosis {
    /// `rms_norm: 29 of 71 cases fail: forward of y in 29, gradient of dx in 12`.
    pub fn heading(&self) -> String {
        let kinds: Vec<String> = self
            .kinds
            .iter()
            .take(MOST_KINDS)
            .map(|(name, cases)| format!("{name} in {}", count(*cases)))
            .collect();
        let others = self.kinds.len().saturating_sub(MOST_KINDS) as u64;
        let others = if others == 0 {
            String::new()
        } else {
            format!(", and {}", counted(others, "other check"))
        };
        let of = if self.failing == self.cases {
            if self.cases == 1 {
                "the case fails".to_owned()
            } else {
                format!("all {} cases fail", count(self.cases))
            }
        } else {
            format!("{} of {} fail", count(self.failing), counted(self.cases, "case"))
        };
        format!("{}: {of}: {}{others}", self.operator, kinds.join(", "))
    }
}

/// The diagnosis of every operator with a failing case, in the order of the report.
pub fn of_report(report: &Report) -> Vec<Diagnosis> {
    let mut names: Vec<&str> = Vec::new();
    for case in &report.cases {
        if !names.contains(&case.operator.as_str()) {
            names.push(&case.operator);
        }
    }
    names.into_iter().filter_map(|name| of_operator(report, name)).collect()
}

/// The diagnosis of one operator of a report; `None` where none of its cases fails.
pub fn of_operator(report: &Report, name: &str) -> Option<Diagnosis> {
    let cases: Vec<&CaseRecord> =
        report.cases.iter().filter(|case| case.operator == name).collect();
    diagnose(report.operators.iter().find(|operator| operator.name == name), &cases)
}

/// What the records of one operator's cases show; `None` where none fails.
pub fn diagnose(operator: Option<&OperatorRecord>, cases: &[&CaseRecord]) -> Option<Diagnosis> {
    // A shrunk case fails because it was chosen to.
    let swept: Vec<&CaseRecord> =
        cases.iter().copied().filter(|case| case.origin != Origin::Shrunk).collect();
    let swept = if swept.iter().all(|case| agrees(case)) { cases.to_vec() } else { swept };
    let failing: Vec<&CaseRecord> = swept.iter().copied().filter(|case| !agrees(case)).collect();
    let first = failing.first()?;
    // A known number is more informative than anything else.
    let (mut sentences, mut unnamed) = ratios::sentences(&ratios::ratios(operator, &failing));
    sentences.truncate(MOST_SENTENCES);
    unnamed.truncate(MOST_SENTENCES);
    sentences.extend(common(&swept));
    sentences.extend(unnamed);
    let mut places = places::sentences(operator, &failing);
    places.truncate(MOST_SENTENCES);
    sentences.extend(places);
    Some(Diagnosis {
        operator: first.operator.clone(),
        cases: swept.len() as u64,
        failing: failing.len() as u64,
        sentences,
        kinds: kinds(&failing),
    })
}

/// What failed, and in how many cases. Tensors that fail one check in as many cases share an entry.
fn kinds(failing: &[&CaseRecord]) -> Vec<(String, u64)> {
    let mut kinds: Vec<((&str, &str), u64)> = Vec::new();
    for case in failing {
        let findings = order::findings(case);
        let none = [("no check ran", "")];
        let found = findings
            .iter()
            .map(|finding| (finding.check.check.as_str(), finding.check.tensor.as_str()));
        for kind in found.chain(none.into_iter().filter(|_| findings.is_empty())) {
            match kinds.iter_mut().find(|(one, _)| *one == kind) {
                Some((_, cases)) => *cases += 1,
                None => kinds.push((kind, 1)),
            }
        }
    }
    kinds.sort_by_key(|(_, cases)| std::cmp::Reverse(*cases));
    let mut together: Vec<(&str, Vec<String>, u64)> = Vec::new();
    for ((check, tensor), cases) in kinds {
        match together.iter_mut().find(|(one, _, count)| *one == check && *count == cases) {
            Some((_, tensors, _)) => tensors.push(tensor.to_owned()),
            None => together.push((check, vec![tensor.to_owned()], cases)),
        }
    }
    let name = |(check, tensors, cases): (&str, Vec<String>, u64)| match &tensors[..] {
        [tensor] if tensor.is_empty() => (check.to_owned(), cases),
        _ => (format!("{check} of {}", listed(&tensors)), cases),
    };
    together.into_iter().map(name).collect()
}

fn add(kinds: &mut Vec<(String, u64)>, name: String) {
    match kinds.iter_mut().find(|(one, _)| *one == name) {
        Some((_, cases)) => *cases += 1,
        None => kinds.push((name, 1)),
    }
}

/// What failing cases have in common: all that fail, and where that does not cover all of them,
/// each kind of failure.
fn common(cases: &[&CaseRecord]) -> Vec<String> {
    let failing = Bits::of(cases, |case| !agrees(case));
    if failing.all() {
        return Vec::new();
    }
    let atoms = features::atoms(cases);
    let rules = rules::decision_list(&atoms, &failing, cases.len());
    let mut sentences: Vec<String> = rules.iter().map(|rule| rule.sentence(&failing)).collect();
    let uncovered = rules.iter().fold(failing, |left, rule: &Rule| left.and(&rule.meets.not()));
    let mut kinds: Vec<(String, u64)> = Vec::new();
    for (_, case) in cases.iter().enumerate().filter(|(at, _)| uncovered.has(*at)) {
        if let Some(first) = order::findings(case).first() {
            add(&mut kinds, order::name_of(first.check));
        }
    }
    let mut said: Vec<String> = rules.iter().map(Rule::text).collect();
    for (name, _) in kinds {
        if sentences.len() >= MOST_SENTENCES {
            break;
        }
        if let Some((rule, sentence)) =
            of_kind(cases, &name).filter(|(rule, _)| !said.contains(rule))
        {
            said.push(rule);
            sentences.push(sentence);
        }
    }
    sentences
}

/// What the cases with one kind of failure have in common, compared with those that agree: a rule,
/// and its sentence.
fn of_kind(cases: &[&CaseRecord], name: &str) -> Option<(String, String)> {
    let has = |case: &CaseRecord| {
        order::findings(case).iter().any(|finding| order::name_of(finding.check) == name)
    };
    let asked: Vec<&CaseRecord> =
        cases.iter().copied().filter(|case| agrees(case) || has(case)).collect();
    let failing = Bits::of(&asked, |case| has(case));
    if failing.all() {
        return None;
    }
    let rules = rules::decision_list(&features::atoms(&asked), &failing, asked.len());
    rules.first().map(|rule| (rule.text(), format!("{name}: {}", rule.sentence(&failing))))
}

/// `a, b and c`.
pub(crate) fn listed(names: &[String]) -> String {
    /// Names that are written out.
    const MOST: usize = 4;
    let names: Vec<String> = if names.len() > MOST {
        let others = names.len() - (MOST - 1);
        names[..MOST - 1].iter().cloned().chain([format!("{others} others")]).collect()
    } else {
        names.to_vec()
    };
    match names.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} and {last}", others.join(", ")),
        None => String::new(),
    }
}
