//! Reports for continuous integration: JUnit XML, and annotations of GitHub.
//!
//! Both have one entry for each operator and check, gathered over the cases. A sweep has thousands
//! of cases, and a reader needs to know which property of which operator does not hold.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use dsv4_runtime::{BackendKind, SourceTree};
use quick_junit::{NonSuccessKind, TestCase, TestCaseStatus, TestSuite};

use super::numbers::counted;
use crate::record::words::brief;
use crate::record::{CaseRecord, Check, CheckRecord, OperatorRecord, Origin, Report, Verdict};

/// The result of one check of one operator over all of its cases.
struct Outcome<'a> {
    check: Check,
    /// Cases that it was made of; cases made by shrinking do not count.
    cases: u64,
    /// Elements that were compared.
    compared: u64,
    /// Where it did not pass: a shrunk case first, since it is the smallest.
    failures: Vec<(&'a CaseRecord, &'a CheckRecord)>,
    /// Why it failed although no case did.
    reason: Option<(Verdict, String)>,
}

impl<'a> Outcome<'a> {
    fn new(check: Check) -> Self {
        Self { check, cases: 0, compared: 0, failures: Vec::new(), reason: None }
    }

    /// The outcome of each check of an operator, in the order in which cases have them.
    fn all(report: &'a Report, operator: &str) -> Vec<Self> {
        let mut outcomes: Vec<Self> = Vec::new();
        for record in report.cases.iter().filter(|record| record.operator == operator) {
            let mut counted = Vec::new();
            for check in &record.checks {
                let place = outcomes.iter().position(|outcome| outcome.check == check.check);
                let place = place.unwrap_or_else(|| {
                    outcomes.push(Self::new(check.check.clone()));
                    outcomes.len() - 1
                });
                let outcome = &mut outcomes[place];
                // A check has an entry for each tensor of a case.
                if record.origin != Origin::Shrunk && !counted.contains(&place) {
                    outcome.cases += 1;
                    counted.push(place);
                }
                outcome.compared += check.compared;
                if check.verdict != Verdict::Pass {
                    outcome.failures.push((record, check));
                }
            }
        }
        for outcome in &mut outcomes {
            outcome.failures.sort_by_key(|(record, _)| record.origin != Origin::Shrunk);
        }
        outcomes.extend(Self::without_cases(report, operator));
        outcomes
    }

    /// Reasons that fail a run although no case fails.
    fn without_cases(report: &Report, operator: &str) -> Vec<Self> {
        let not_run = report.not_run().filter(|(name, _)| *name == operator);
        let not_run = not_run.map(|(_, why)| {
            (Check::Launch, (Verdict::Error, format!("the kernels cannot be run: {why}")))
        });
        let powerless = report.without_power().into_iter().filter(|(name, _)| *name == operator);
        let powerless = powerless.map(|(_, tensor)| {
            let why = format!("no case would have shown an error of 10 % of {tensor}");
            (Check::Power, (Verdict::Fail, why))
        });
        let all = not_run.chain(powerless);
        all.map(|(check, reason)| Self { reason: Some(reason), ..Self::new(check) }).collect()
    }

    /// Failure or error, with one line that gives the reason; `None` where the check passes.
    fn failure(&self) -> Option<(Verdict, String)> {
        if self.reason.is_some() {
            return self.reason.clone();
        }
        let (_, first) = self.failures.first()?;
        let verdict =
            self.failures.iter().map(|(_, check)| check.verdict).max().unwrap_or(Verdict::Error);
        let mut tensors: Vec<&str> =
            self.failures.iter().map(|(_, check)| check.tensor.as_str()).collect();
        tensors.sort_unstable();
        tensors.dedup();
        tensors.retain(|tensor| !tensor.is_empty());
        let of =
            if tensors.is_empty() { String::new() } else { format!(" of {}", tensors.join(", ")) };
        let failing = self.failures.iter().map(|(record, _)| &record.case);
        let mut failing: Vec<_> = failing.collect();
        failing.dedup();
        let shrunk = self.failures.iter().any(|(record, _)| record.origin == Origin::Shrunk);
        let failing = (failing.len() as u64 - u64::from(shrunk)).max(1);
        let message = brief(first.message.lines().next().unwrap_or_default());
        Some((
            verdict,
            format!("{failing} of {}{of}: {message}", counted(self.cases.max(failing), "case")),
        ))
    }

    /// The message and the replay of the first failures.
    fn details(&self) -> String {
        /// Number of failures that are written out; the report has all of them.
        const SHOWN: usize = 3;
        let mut text = String::new();
        for (record, check) in self.failures.iter().take(SHOWN) {
            let _ = writeln!(
                text,
                "{} {}: {}\nreplay: {}",
                check.check, check.tensor, check.message, record.replay
            );
        }
        if self.failures.len() > SHOWN {
            let _ = writeln!(text, "and {} more", self.failures.len() - SHOWN);
        }
        text
    }

    fn test_case(&self, operator: &str) -> TestCase {
        let status = match self.failure() {
            None if self.compared == 0 => {
                let mut status = TestCaseStatus::skipped();
                status.set_message("nothing was compared");
                status
            }
            None => TestCaseStatus::success(),
            Some((verdict, message)) => {
                let kind = if verdict == Verdict::Error {
                    NonSuccessKind::Error
                } else {
                    NonSuccessKind::Failure
                };
                let mut status = TestCaseStatus::non_success(kind);
                status
                    .set_type(self.check.as_str())
                    .set_message(message)
                    .set_description(self.details());
                status
            }
        };
        let mut case = TestCase::new(self.check.as_str(), status);
        case.set_classname(operator);
        case.add_property(("cases", self.cases.to_string().as_str()));
        case.add_property(("compared elements", self.compared.to_string().as_str()));
        case
    }
}

/// The report as JUnit XML: a suite for each operator, a test case for each of its checks.
///
/// # Errors
/// Those of the XML writer.
pub fn junit(report: &Report) -> Result<String, quick_junit::SerializeError> {
    let mut document = quick_junit::Report::new("parity");
    document.set_time(Duration::try_from_secs_f64(report.seconds).unwrap_or_default());
    for OperatorRecord { name, .. } in &report.operators {
        let mut suite = TestSuite::new(name.as_str());
        let cases = report.cases.iter().filter(|record| record.operator == *name);
        let seconds: f64 = cases.map(|record| record.kernel_seconds + record.oracle_seconds).sum();
        suite.set_time(Duration::try_from_secs_f64(seconds).unwrap_or_default());
        suite.add_test_cases(
            Outcome::all(report, name).iter().map(|outcome| outcome.test_case(name)),
        );
        document.add_test_suite(suite);
    }
    document.to_string()
}

/// The failures as annotations of GitHub, one for each operator and check, at the operator's
/// kernel.
///
/// GitHub shows ten of a step, so the first failing check of each operator comes before the second
/// one of any.
pub fn github(report: &Report) -> Vec<String> {
    let mut annotations: Vec<(usize, String)> = Vec::new();
    for operator in &report.operators {
        let outcomes = Outcome::all(report, &operator.name);
        let failing = outcomes.iter().filter_map(|outcome| Some((outcome, outcome.failure()?.1)));
        for (place, (outcome, message)) in failing.enumerate() {
            let file = file_of(report, operator)
                .map_or_else(String::new, |file| format!("file={},", property(&file)));
            let title = property(&format!("{} {}", operator.name, outcome.check));
            let replay = outcome
                .failures
                .first()
                .map_or_else(String::new, |(record, _)| format!("\n{}", record.replay));
            annotations.push((
                place,
                format!("::error {file}title={title}::{}", data(&(message + &replay))),
            ));
        }
    }
    annotations.sort_by_key(|(place, _)| *place);
    annotations.into_iter().map(|(_, annotation)| annotation).collect()
}

/// The first file of an operator's kernels, if they are ours.
fn file_of(report: &Report, operator: &OperatorRecord) -> Option<String> {
    let file = operator.kernel_file.split(", ").next().filter(|file| !file.is_empty())?;
    if report.environment.backend == BackendKind::External {
        return None;
    }
    // The tree that was judged may have it in another folder.
    let own = SourceTree::from_dir(Path::new(&report.revision.kernels)).ok();
    let own = own.and_then(|tree| {
        let name = Path::new(file).file_name()?.to_str()?;
        Some(tree.directory()?.join(tree.path_of(name)).display().to_string())
    });
    Some(own.unwrap_or_else(|| file.to_owned()))
}

/// The text of a workflow command, escaped for GitHub.
fn data(text: &str) -> String {
    text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A")
}

/// The value of a property of a workflow command, escaped for GitHub.
fn property(text: &str) -> String {
    data(text).replace(':', "%3A").replace(',', "%2C")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::sample;

    fn failing() -> Report {
        sample::failing(40)
    }

    #[test]
    fn junit_has_one_test_case_for_each_operator_and_check() {
        let report = failing();
        let text = junit(&report).expect("XML");
        let document = quick_junit::Report::deserialize_from_str(&text).expect("it is JUnit");
        let mut found = Vec::new();
        for suite in &document.test_suites {
            for case in &suite.test_cases {
                assert_eq!(
                    case.classname.as_ref().map(|name| name.as_str()),
                    Some(suite.name.as_str())
                );
                found.push((suite.name.to_string(), case.name.to_string()));
            }
        }
        let mut expected: Vec<_> = report
            .cases
            .iter()
            .flat_map(|record| {
                record.checks.iter().map(|check| (record.operator.clone(), check.check.to_string()))
            })
            .collect();
        expected.sort();
        expected.dedup();
        found.sort();
        found.retain(|(_, check)| check != "power");
        assert_eq!(found, expected);
    }

    #[test]
    fn junit_says_of_a_failure_what_failed_and_how_to_run_it_again() {
        let report = failing();
        let text = junit(&report).expect("XML");
        let document = quick_junit::Report::deserialize_from_str(&text).expect("it is JUnit");
        let mut failures = 0;
        for suite in &document.test_suites {
            for case in &suite.test_cases {
                let failed = |record: &&CaseRecord| {
                    let failing = |check: &CheckRecord| {
                        check.check == case.name.as_str() && check.verdict != Verdict::Pass
                    };
                    record.operator == suite.name.as_str() && record.checks.iter().any(failing)
                };
                let records: Vec<_> = report.cases.iter().filter(failed).collect();
                match &case.status {
                    TestCaseStatus::NonSuccess { message, description, .. }
                        if case.name.as_str() != "power" =>
                    {
                        failures += 1;
                        let message = message.as_ref().expect("a message").as_str();
                        assert!(message.contains(" of ") && message.contains("case"), "{message}");
                        let description = description.as_ref().expect("details").as_str();
                        assert!(
                            records.iter().any(|record| description.contains(&record.replay)),
                            "{description}"
                        );
                    }
                    _ => assert!(
                        records.is_empty() || case.name.as_str() == "power",
                        "{} passes",
                        case.name.as_str()
                    ),
                }
            }
        }
        assert!(failures > 1, "{text}");
        assert!(
            matches!(junit(&sample::passing(20)).expect("XML"), text if !text.contains("<failure"))
        );
    }

    #[test]
    fn an_annotation_names_the_kernels_file_and_escapes_what_github_reads() {
        let report = failing();
        let annotations = github(&report);
        assert!(!annotations.is_empty() && github(&sample::passing(20)).is_empty());
        for annotation in &annotations {
            assert!(annotation.starts_with("::error file=kernels/cuda/"), "{annotation}");
            assert!(
                annotation.contains(",title=") && annotation.contains("%0Aparity replay"),
                "{annotation}"
            );
            assert!(!annotation.contains('\n'));
        }
        assert_eq!(property("law: a, b\r\n5 %"), "law%3A a%2C b%0D%0A5 %25");
        assert_eq!(data("law: a, b\n5 %"), "law: a, b%0A5 %25");
        let mut external = report;
        external.environment.backend = BackendKind::External;
        assert!(
            github(&external).iter().all(|annotation| annotation.starts_with("::error title="))
        );
    }

    #[test]
    fn every_operator_has_an_annotation_before_any_has_its_second() {
        let annotations = github(&failing());
        let operators: Vec<&str> = annotations
            .iter()
            .filter_map(|text| text.split("title=").nth(1)?.split(' ').next())
            .collect();
        let first = operators
            .iter()
            .enumerate()
            .filter(|(at, name)| !operators[..*at].contains(name))
            .count();
        assert!(
            operators[..first].iter().enumerate().all(|(at, name)| !operators[..at].contains(name)),
            "{operators:?}"
        );
    }
}
