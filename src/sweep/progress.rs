//! The time that a sweep has used for each operator, and which of its failures are shrunk.
//!
//! With a broken kernel every case fails, mostly in the same way. Only the first few different
//! failures (by operator, check and tensor) are shrunk. Shrinking takes no longer than the cases
//! took until then, or a few seconds where that is more. So a failing sweep takes at most about
//! twice as long as a passing one.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::record::{CaseRecord, CheckRecord, Origin, Skip, Verdict, all_cases_of};
use crate::sweep::again::Bits;
use crate::sweep::{PlannedCase, SweepOptions};

/// How many different failures of an operator are shrunk.
const SHRUNK_FAILURES: usize = 3;
/// How long one failing case may be shrunk.
const SHRINK_TIME: Duration = Duration::from_secs(30);

/// Least time that an operator has for shrinking, even if its cases took less: the time of a few
/// small cases would be too short.
const LEAST_SHRINK_TIME: Duration = Duration::from_secs(5);

/// The time used so far and the shrunk failures of each operator.
#[derive(Debug, Default)]
pub struct Progress {
    operators: BTreeMap<String, Used>,
}

#[derive(Debug, Default)]
struct Used {
    cases: Duration,
    shrinking: Duration,
    /// Check and tensor of the failures so far.
    failures: BTreeSet<(String, String)>,
    left_out: u64,
    /// Optional cases for which no time was left.
    late: u64,
    not_shrunk: u64,
    /// Why its kernels cannot be run, if they cannot.
    untestable: Option<String>,
    /// Cases that did not run for that reason.
    not_run: u64,
    /// The results of its first case, until that runs again.
    first_bits: Option<Bits>,
}

/// What to do with a failing case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shrinks {
    /// Shrink it, for at most this time.
    For(Duration),
    /// It is the first of its kind, but enough others were shrunk, or the time is used up.
    Not,
    /// An earlier case failed in the same way.
    Known,
}

impl Progress {
    /// The progress of a resumed run, from its records.
    pub fn resumed(records: &[CaseRecord]) -> Self {
        let mut progress = Self::default();
        for record in records {
            let seconds = record.kernel_seconds + record.oracle_seconds;
            let time = Duration::try_from_secs_f64(seconds).unwrap_or_default();
            let used = progress.of(&record.operator);
            match record.origin {
                Origin::Shrunk => used.shrinking += time,
                _ => used.cases += time,
            }
        }
        // The failure of a shrunk case is known. The failure of the last record may not be known
        // yet.
        for pair in records.windows(2).filter(|pair| pair[1].origin == Origin::Shrunk) {
            if let Some(check) = pair[0].checks.iter().find(|check| check.verdict != Verdict::Pass)
            {
                progress.of(&pair[0].operator).failures.insert(kind(check));
            }
        }
        progress
    }

    fn of(&mut self, operator: &str) -> &mut Used {
        self.operators.entry(operator.to_owned()).or_default()
    }

    /// Whether a case of a plan runs; counts it by reason if not.
    pub fn admits(&mut self, planned: &PlannedCase, options: &SweepOptions) -> bool {
        let operator = &planned.case.operator;
        self.is_testable(operator)
            && (!planned.optional || self.is_in_time(operator, options.deadline))
            && (!planned.is_drawn() || self.has_time(operator, options.time_budget))
    }

    /// Keeps the results of an operator's first case.
    pub(super) fn keep_first(&mut self, operator: &str, bits: Bits) {
        self.of(operator).first_bits = Some(bits);
    }

    /// What [`Self::keep_first`] kept.
    pub(super) fn take_first(&mut self, operator: &str) -> Option<Bits> {
        self.of(operator).first_bits.take()
    }

    /// Whether one more optional case of an operator may start; counts it as late if not.
    fn is_in_time(&mut self, operator: &str, deadline: Option<Instant>) -> bool {
        let in_time = deadline.is_none_or(|deadline| Instant::now() < deadline);
        self.of(operator).late += u64::from(!in_time);
        in_time
    }

    /// Whether one more drawn case of an operator may run within `budget`; counts it as skipped if
    /// not.
    pub fn has_time(&mut self, operator: &str, budget: Option<Duration>) -> bool {
        let used = self.of(operator);
        let has_time = budget.is_none_or(|budget| used.cases < budget);
        used.left_out += u64::from(!has_time);
        has_time
    }

    /// Whether one more case of an operator can run; counts it as not run if its kernels cannot be
    /// run.
    pub fn is_testable(&mut self, operator: &str) -> bool {
        let used = self.of(operator);
        used.not_run += u64::from(used.untestable.is_some());
        used.untestable.is_none()
    }

    /// Marks the kernels of an operator as impossible to run: `why` is the error of its first case.
    pub fn stop(&mut self, operator: &str, why: String) {
        let used = self.of(operator);
        used.untestable = Some(why);
        used.not_run += 1;
    }

    /// The operators whose kernels cannot be run, each with the reason.
    pub fn untestable(&self) -> impl Iterator<Item = (&str, &str)> {
        self.operators
            .iter()
            .filter_map(|(operator, used)| Some((operator.as_str(), used.untestable.as_deref()?)))
    }

    /// Adds the time of a case.
    pub fn ran(&mut self, operator: &str, time: Duration) {
        self.of(operator).cases += time;
    }

    /// Adds the time of shrinking a failing case.
    pub fn shrank(&mut self, operator: &str, time: Duration) {
        self.of(operator).shrinking += time;
    }

    /// What to do with a case of the sweep whose first failure is this check.
    pub fn shrinks(&mut self, operator: &str, failing: &CheckRecord) -> Shrinks {
        let used = self.of(operator);
        let left =
            used.cases.max(LEAST_SHRINK_TIME).saturating_sub(used.shrinking).min(SHRINK_TIME);
        let shrinks = if !used.failures.insert(kind(failing)) {
            Shrinks::Known
        } else if used.failures.len() > SHRUNK_FAILURES || left.is_zero() {
            Shrinks::Not
        } else {
            Shrinks::For(left)
        };
        used.not_shrunk += u64::from(!matches!(shrinks, Shrinks::For(_)));
        shrinks
    }

    /// What was skipped, counted by reason.
    pub fn skips(&self, budget: Option<Duration>) -> Vec<Skip> {
        let mut skips: Vec<Skip> = self.late().into_iter().collect();
        for (operator, used) in &self.operators {
            if let Some(why) = &used.untestable {
                skips.push(Skip {
                    what: all_cases_of(operator),
                    why: why.clone(),
                    count: used.not_run,
                });
            }
            if used.left_out > 0 {
                let seconds = budget.unwrap_or_default().as_secs_f64();
                let why = format!(
                    "the time budget of {seconds} s was used ({:.1} s)",
                    used.cases.as_secs_f64()
                );
                skips.push(Skip {
                    what: format!("drawn cases of {operator}"),
                    why,
                    count: used.left_out,
                });
            }
            if used.not_shrunk > 0 {
                let why = format!(
                    "of each operator the first {SHRUNK_FAILURES} failures that differ in check or tensor are, \
                     and no longer than its cases take, or {} s",
                    LEAST_SHRINK_TIME.as_secs()
                );
                skips.push(Skip {
                    what: format!("failing cases of {operator} shrunk"),
                    why,
                    count: used.not_shrunk,
                });
            }
        }
        skips
    }
}

impl Progress {
    fn late(&self) -> Option<Skip> {
        let late: Vec<u64> =
            self.operators.values().map(|used| used.late).filter(|&late| late > 0).collect();
        let what = format!("edge cases of {} operators", late.len());
        let why = "the time of the profile was used".to_owned();
        (!late.is_empty()).then(|| Skip { what, why, count: late.iter().sum() })
    }
}

fn kind(check: &CheckRecord) -> (String, String) {
    (check.check.to_string(), check.tensor.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failing(check: &str, tensor: &str) -> CheckRecord {
        CheckRecord {
            check: check.into(),
            tensor: tensor.into(),
            verdict: Verdict::Fail,
            compared: 1,
            message: "wrong".into(),
            metrics: None,
            failing: None,
        }
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn three_failures_that_differ_are_made_smaller_and_the_others_counted() {
        let mut progress = Progress::default();
        progress.ran("rope", 10 * SECOND);
        let mut shrinks = |operator: &str, check: &str, tensor: &str| {
            progress.shrinks(operator, &failing(check, tensor))
        };
        assert_eq!(shrinks("rope", "forward", "y"), Shrinks::For(10 * SECOND));
        assert_eq!(shrinks("rope", "forward", "y"), Shrinks::Known);
        assert_eq!(shrinks("rope", "gradient", "dx"), Shrinks::For(10 * SECOND));
        assert_eq!(shrinks("rope", "forward", "z"), Shrinks::For(10 * SECOND));
        assert_eq!(shrinks("rope", "guards", "y"), Shrinks::Not);
        assert_eq!(shrinks("rope", "guards", "y"), Shrinks::Known);
        let skips = progress.skips(None);
        let [skip] = skips.as_slice() else { panic!("{skips:?}") };
        assert_eq!((skip.what.as_str(), skip.count), ("failing cases of rope shrunk", 3));
    }

    #[test]
    fn all_shrinking_together_takes_no_longer_than_the_cases_did() {
        let mut progress = Progress::default();
        progress.ran("rope", 50 * SECOND);
        assert_eq!(progress.shrinks("rope", &failing("forward", "y")), Shrinks::For(SHRINK_TIME));
        progress.shrank("rope", 30 * SECOND);
        assert_eq!(progress.shrinks("rope", &failing("gradient", "dx")), Shrinks::For(20 * SECOND));
        progress.shrank("rope", 21 * SECOND);
        assert_eq!(progress.shrinks("rope", &failing("guards", "y")), Shrinks::Not);
        // Another operator has its own time, and each has the least time.
        progress.ran("rms_norm", 8 * SECOND);
        assert_eq!(
            progress.shrinks("rms_norm", &failing("forward", "y")),
            Shrinks::For(8 * SECOND)
        );
        progress.ran("swiglu", SECOND);
        assert_eq!(
            progress.shrinks("swiglu", &failing("forward", "y")),
            Shrinks::For(LEAST_SHRINK_TIME)
        );
    }

    #[test]
    fn drawn_cases_beyond_the_time_budget_are_left_out_and_counted() {
        let mut progress = Progress::default();
        assert!(progress.has_time("rope", Some(SECOND)));
        progress.ran("rope", SECOND);
        assert!(progress.has_time("rope", None) && progress.has_time("rms_norm", Some(SECOND)));
        assert!(
            !progress.has_time("rope", Some(SECOND)) && !progress.has_time("rope", Some(SECOND))
        );
        let skips = progress.skips(Some(SECOND));
        let [skip] = skips.as_slice() else { panic!("{skips:?}") };
        assert_eq!((skip.what.as_str(), skip.count), ("drawn cases of rope", 2));
        assert!(skip.why.contains("time budget of 1 s"), "{}", skip.why);
    }

    #[test]
    fn optional_cases_after_the_deadline_are_left_out_and_counted_over_all_operators() {
        let (mut progress, now) = (Progress::default(), Instant::now());
        assert!(
            progress.is_in_time("rope", None)
                && progress.is_in_time("rope", Some(now + 60 * SECOND))
        );
        assert!(
            !progress.is_in_time("rope", Some(now)) && !progress.is_in_time("rms_norm", Some(now))
        );
        let skips = progress.skips(None);
        let [skip] = skips.as_slice() else { panic!("{skips:?}") };
        assert_eq!((skip.what.as_str(), skip.count), ("edge cases of 2 operators", 2));
    }

    #[test]
    fn an_operator_whose_kernels_cannot_be_run_is_tried_once_and_the_rest_of_its_cases_counted() {
        let mut progress = Progress::default();
        assert!(progress.is_testable("rope") && progress.is_testable("swiglu"));
        progress.stop("rope", "they do not compile".into());
        assert!(
            !progress.is_testable("rope")
                && !progress.is_testable("rope")
                && progress.is_testable("swiglu")
        );
        assert_eq!(progress.untestable().collect::<Vec<_>>(), [("rope", "they do not compile")]);
        let skips = progress.skips(None);
        let [skip] = skips.as_slice() else { panic!("{skips:?}") };
        assert_eq!(
            (skip.what.as_str(), skip.why.as_str(), skip.count),
            ("all cases of rope", "they do not compile", 3)
        );
    }

    #[test]
    fn a_run_that_is_continued_knows_what_was_made_smaller_and_how_long_it_took() {
        let record = |origin, check: Option<CheckRecord>, seconds| CaseRecord {
            operator: "rope".into(),
            case: serde_json::Value::Null,
            origin,
            paths: Vec::new(),
            checks: check.into_iter().collect(),
            kernel_seconds: seconds,
            oracle_seconds: 0.0,
            replay: String::new(),
            skips: Vec::new(),
            batches: vec![],
            plan_number: None,
            untestable: None,
            seconds: None,
            our_seconds: None,
            unsupported: None,
        };
        let (y, dx) = (failing("forward", "y"), failing("gradient", "dx"));
        let mut progress = Progress::resumed(&[
            record(Origin::Drawn, Some(y.clone()), 5.0),
            record(Origin::Shrunk, Some(y.clone()), 2.0),
            record(Origin::Drawn, Some(dx.clone()), 1.0),
        ]);
        assert_eq!(progress.shrinks("rope", &y), Shrinks::Known);
        assert_eq!(progress.shrinks("rope", &dx), Shrinks::For(4 * SECOND));
    }
}
