//! What makes a revision good or bad: four metrics, each with thresholds from the two endpoints.

use std::time::Instant;

use clap::ValueEnum;
use dsv4_reference::precision::Precision;
use dsv4_runtime::{Contract, Device, HostTensor, RuntimeError};
use serde::Serialize;

use super::BisectError;
use super::search::Answer;
use super::sequential::{ALPHA, Rates, Sprt, calibrate, lower_bound};
use crate::case::{Case, CaseError};
use crate::judge::checks::{self, CheckOptions, Outcome};
use crate::operator::{KernelRun, OracleTensor, PreparedCase, rows_of};
use crate::operators::registry;
use crate::record::figures;

/// What is compared between revisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Whether every check of the case passes
    Agree,
    /// Error beyond a correctly rounded result, whether or not a budget allows it
    Error,
    /// Time of a call
    Time,
    /// Whether equal runs give equal bits
    Determinism,
}

impl Metric {
    /// The name of a trial's value.
    pub fn value_name(self) -> &'static str {
        match self {
            Self::Agree => "largest share of the budget used",
            Self::Error => "rms error beyond correct rounding, relative to the tensor",
            Self::Time => "median seconds of a call",
            Self::Determinism => "share of runs that differ from the first",
        }
    }
}

/// How much work a measurement may take.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Random schedules of `agree`, beyond the deterministic one (emulator).
    pub schedules: u32,
    /// Most runs of one revision before it counts as undecided (`time`, `determinism`).
    pub most_runs: u64,
}

/// What was found about one revision.
#[derive(Clone, Debug)]
pub struct Trial {
    /// Good, bad, or skipped.
    pub answer: Answer,
    /// The metric's value ([`Metric::value_name`]), if it has one.
    pub value: Option<f64>,
    /// What was seen, or why it was skipped.
    pub note: String,
}

impl Trial {
    /// A revision that cannot be judged.
    pub fn skip(note: impl Into<String>) -> Self {
        Self { answer: Answer::Skip, value: None, note: note.into() }
    }

    fn of(bad: bool, value: Option<f64>, note: String) -> Self {
        Self { answer: if bad { Answer::Bad } else { Answer::Good }, value, note }
    }
}

/// A case and what separates good revisions of it from bad ones.
pub enum Judge {
    /// [`Metric::Agree`].
    Agree(AgreeJudge),
    /// [`Metric::Error`].
    Error(ErrorJudge),
    /// [`Metric::Time`].
    Time(TimeJudge),
    /// [`Metric::Determinism`].
    Determinism(DeterminismJudge),
}

impl Judge {
    /// Measures both endpoints; the inner error is the reason why they cannot be told apart.
    ///
    /// # Errors
    /// A case that cannot be prepared, or a kernel that cannot be run.
    pub fn between(
        metric: Metric,
        case: &Case,
        good: &Device,
        bad: &Device,
        effort: Effort,
    ) -> Result<Result<Self, String>, BisectError> {
        Ok(match metric {
            Metric::Agree => {
                Ok(Self::Agree(AgreeJudge { prepared: registry::prepare(case)?, effort }))
            }
            Metric::Error => ErrorJudge::between(case, good, bad)?.map(Self::Error),
            Metric::Time => TimeJudge::between(case, good, bad, effort)?.map(Self::Time),
            Metric::Determinism => {
                DeterminismJudge::between(case, good, bad, effort)?.map(Self::Determinism)
            }
        })
    }

    /// Judges a revision. A kernel that faults is bad where results are judged; it has no time.
    ///
    /// # Errors
    /// The device's.
    pub fn judge(&self, device: &Device) -> Result<Trial, BisectError> {
        match self {
            Self::Agree(judge) => Ok(judge.judge(device)),
            Self::Error(judge) => judge.judge(device),
            Self::Time(judge) => judge.judge(device),
            Self::Determinism(judge) => judge.judge(device),
        }
    }
}

// ---------------------------------------------------------------- agree

/// A revision is bad when some check of the case does not pass.
pub struct AgreeJudge {
    prepared: Box<dyn PreparedCase>,
    effort: Effort,
}

impl AgreeJudge {
    fn judge(&self, device: &Device) -> Trial {
        let options = CheckOptions::of_kernels(self.effort.schedules);
        let outcome = checks::run(&*self.prepared, device, options);
        let note = outcome.failures().next().map_or("every check passes".to_owned(), |failure| {
            format!("{} {}: {}", failure.check, failure.tensor, failure.message)
        });
        Trial::of(!outcome.passed(), budget_used(&outcome), note)
    }
}

fn budget_used(outcome: &Outcome) -> Option<f64> {
    outcome
        .checks
        .iter()
        .filter_map(|check| check.metrics.as_ref())
        .map(|m| m.budget_used)
        .reduce(f64::max)
}

// ---------------------------------------------------------------- error

/// The most draws of the inputs on which the endpoints are compared; each look doubles the number.
const MOST_DRAWS: u64 = 8;

/// A revision is bad when its error is nearer to the bad endpoint's than to the good one's.
///
/// The error of an element is its distance from the *correctly rounded* oracle, `k - round(e)`. It
/// is zero where the kernel is as exact as its output type permits. The distance from `e` itself
/// would mostly be the output's own rounding, which hides a narrowed accumulator.
///
/// The endpoints differ when the bad one has the larger error in more rows than chance allows. This
/// is a sign test over rows, on the same inputs for both. Elements of one row share their errors
/// and count once; each element of a vector counts. Rows with equal errors give no information and
/// are skipped. If one draw of the inputs has too few rows, more draws use the case's following
/// seeds.
pub struct ErrorJudge {
    draws: Vec<Drawn>,
    tensor: &'static str,
    /// The midpoint between the endpoints' errors.
    threshold: f64,
}

/// Inputs and their exact outputs.
struct Drawn {
    prepared: Box<dyn PreparedCase>,
    exact: Vec<OracleTensor>,
}

impl Drawn {
    /// The case with its seed advanced by `by`; `None` if it has no seed.
    fn new(case: &Case, by: u64) -> Result<Option<Self>, CaseError> {
        let mut case = case.clone();
        if by > 0 {
            let Some(seed) = case.fields.get("seed").and_then(serde_json::Value::as_u64) else {
                return Ok(None);
            };
            case.fields.insert("seed".into(), seed.wrapping_add(by).into());
        }
        let prepared = registry::prepare(&case)?;
        let exact = prepared.oracle(Precision::Exact)?;
        Ok(Some(Self { prepared, exact }))
    }
}

/// Squared errors of one tensor, one value a row (each element of a vector is a row), and the
/// tensor's own sum of squares.
#[derive(Clone, Debug, Default)]
struct Errors {
    rows: Vec<f64>,
    scale: f64,
}

impl Errors {
    fn extend(&mut self, run: &KernelRun, exact: &OracleTensor) {
        let Some(found) = run.tensors.iter().find(|tensor| tensor.name == exact.name) else {
            self.rows.push(f64::INFINITY);
            return;
        };
        let stored = HostTensor::from_f64(found.tensor.dtype, &exact.shape, &exact.values).to_f64();
        let kernel = found.tensor.to_f64();
        let squares: Vec<f64> = (0..kernel.len().min(stored.len()))
            .filter(|&i| exact.values[i].is_finite())
            .map(|i| if stored[i] == kernel[i] { 0.0 } else { (kernel[i] - stored[i]).powi(2) })
            .map(|square| if square.is_nan() { f64::INFINITY } else { square })
            .collect();
        let (rows, row_len) = rows_of(&exact.shape);
        let unit = if rows > 1 { row_len.max(1) } else { 1 };
        self.rows.extend(squares.chunks(unit).map(|row| row.iter().sum::<f64>()));
        self.scale += exact
            .values
            .iter()
            .filter(|value| value.is_finite())
            .map(|value| value * value)
            .sum::<f64>();
    }

    /// Root of the sum of squared errors over the tensor's own sum of squares.
    fn relative(&self) -> f64 {
        let sum: f64 = self.rows.iter().sum();
        if sum == 0.0 { 0.0 } else { (sum / self.scale).sqrt() }
    }

    /// Whether `self` has the larger error in more than half of the rows in which the two differ:
    /// the lower bound of that share is above one half.
    fn exceeds(&self, other: &Self, alpha: f64) -> bool {
        let rows = || self.rows.iter().zip(&other.rows);
        let differing = rows().filter(|(a, b)| a != b).count() as u64;
        let farther = rows().filter(|(a, b)| a > b).count() as u64;
        differing > 0 && lower_bound(farther, differing, alpha) > 0.5
    }
}

impl ErrorJudge {
    fn between(
        case: &Case,
        good: &Device,
        bad: &Device,
    ) -> Result<Result<Self, String>, BisectError> {
        let mut draws: Vec<Drawn> = Vec::new();
        let mut alpha = ALPHA / 2.0;
        let mut looks = 1;
        while looks <= MOST_DRAWS {
            while (draws.len() as u64) < looks
                && let Some(drawn) = Drawn::new(case, draws.len() as u64)?
            {
                draws.push(drawn);
            }
            let tensors: Vec<&'static str> = draws
                .first()
                .map(|drawn| drawn.exact.iter().map(|tensor| tensor.name).collect())
                .unwrap_or_default();
            let [of_good, of_bad] =
                [errors(&draws, &tensors, good)?, errors(&draws, &tensors, bad)?];
            let share = alpha / tensors.len().max(1) as f64;
            let worst = (0..tensors.len())
                .filter(|&i| of_bad[i].exceeds(&of_good[i], share))
                // The tensor whose error grows by the largest factor from the good endpoint to the
                // bad one.
                .max_by(|&a, &b| {
                    let excess = |i: usize| {
                        of_bad[i].relative() / of_good[i].relative().max(f64::MIN_POSITIVE)
                    };
                    excess(a).total_cmp(&excess(b))
                });
            if let Some(i) = worst {
                let threshold = (of_good[i].relative() + of_bad[i].relative()) / 2.0;
                return Ok(Ok(Self { draws, tensor: tensors[i], threshold }));
            }
            alpha /= 2.0;
            looks *= 2;
        }
        let rows = draws.len();
        Ok(Err(format!(
            "over {rows} draw(s) of its inputs, no tensor is farther from the oracle in the bad revision"
        )))
    }

    fn judge(&self, device: &Device) -> Result<Trial, BisectError> {
        let errors = match errors(&self.draws, &[self.tensor], device) {
            Ok(errors) => errors,
            Err(error @ (RuntimeError::Fault { .. } | RuntimeError::Cuda { .. })) => {
                return Ok(Trial::of(true, None, error.to_string()));
            }
            Err(error) => return Err(error.into()),
        };
        let value = errors[0].relative();
        let [found, threshold] = [value, self.threshold].map(|number| figures::measure(number, 4));
        let note = format!("{}: {found}, threshold {threshold}", self.tensor);
        Ok(Trial::of(value >= self.threshold, Some(value), note))
    }
}

fn errors(draws: &[Drawn], tensors: &[&str], device: &Device) -> Result<Vec<Errors>, RuntimeError> {
    let mut all = vec![Errors::default(); tensors.len()];
    for drawn in draws {
        let run = drawn.prepared.kernel(device, Contract::NAN)?;
        for (errors, name) in all.iter_mut().zip(tensors) {
            if let Some(exact) = drawn.exact.iter().find(|tensor| tensor.name == *name) {
                errors.extend(&run, exact);
            }
        }
    }
    Ok(all)
}

// ---------------------------------------------------------------- time

/// Pairs of runs for the first cut between the endpoints.
const PILOT: u64 = 8;

/// A revision is bad when its calls take about as long as the bad endpoint's.
///
/// A machine's speed changes during a bisection, so no time is judged without a reference. Each run
/// of a revision is paired with a run of the good endpoint just before it. A trial is `ln(t /
/// t_good)`. It is a hit when it is above the cut, the midpoint between the medians of good and bad
/// pairs. The time is that of the case's whole call with uploads and downloads. These are the same
/// for every revision and only reduce the contrast.
pub struct TimeJudge {
    prepared: Box<dyn PreparedCase>,
    good: Device,
    cut: f64,
    rates: Rates,
    most_runs: u64,
}

impl TimeJudge {
    fn between(
        case: &Case,
        good: &Device,
        bad: &Device,
        effort: Effort,
    ) -> Result<Result<Self, String>, BisectError> {
        let prepared = registry::prepare(case)?;
        let mut samples = [Vec::new(), Vec::new()];
        let mut draw = |count: u64| -> Result<(f64, [u64; 2]), RuntimeError> {
            // The cut comes only from earlier samples: it must not fit the samples that it divides.
            let cut = (median(&samples[0]) + median(&samples[1])) / 2.0;
            let mut hits = [0, 0];
            for _ in 0..count {
                let base = seconds(&*prepared, good)?;
                for (side, device) in [good, bad].into_iter().enumerate() {
                    let ratio = (seconds(&*prepared, device)? / base).ln();
                    hits[side] += u64::from(ratio > cut);
                    samples[side].push(ratio);
                }
            }
            Ok((cut, hits))
        };
        draw(PILOT)?;
        let mut last_cut = f64::NAN;
        let rates = calibrate(effort.most_runs, |count| {
            let (cut, hits) = draw(count)?;
            last_cut = cut;
            Ok::<_, RuntimeError>(hits)
        })?;
        let ratio = (median(&samples[1]) - median(&samples[0])).exp();
        let Some(rates) = rates else {
            return Ok(Err(format!(
                "the bad revision takes {ratio:.3} of the good one's time, which chance may explain"
            )));
        };
        let good = good.with_tree(good.tree().clone());
        Ok(Ok(Self { prepared, good, cut: last_cut, rates, most_runs: effort.most_runs }))
    }

    fn judge(&self, device: &Device) -> Result<Trial, BisectError> {
        let mut test = Sprt::new(self.rates);
        let (mut times, mut ratios) = (Vec::new(), Vec::new());
        // Compiles and loads the kernels, which must not count as part of a call.
        seconds(&*self.prepared, &self.good)?;
        for run in 1..=self.most_runs {
            let base = seconds(&*self.prepared, &self.good)?;
            let time = seconds(&*self.prepared, device)?;
            times.push(time);
            ratios.push((time / base).ln());
            if let Some(bad) = test.observe((time / base).ln() > self.cut) {
                let ratio = median(&ratios).exp();
                let note = format!(
                    "{ratio:.3} of the good revision's time, cut {:.3}, {run} runs",
                    self.cut.exp()
                );
                return Ok(Trial::of(bad, Some(median(&times)), note));
            }
        }
        let note = format!("undecided after {} runs", self.most_runs);
        Ok(Trial { value: Some(median(&times)), ..Trial::skip(note) })
    }
}

fn seconds(prepared: &dyn PreparedCase, device: &Device) -> Result<f64, RuntimeError> {
    let start = Instant::now();
    prepared.kernel(device, Contract::NAN)?;
    Ok(start.elapsed().as_secs_f64())
}

/// Median; 0 without values.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n => (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0,
    }
}

// ---------------------------------------------------------------- determinism

/// A revision is bad when its runs differ as often as the bad endpoint's.
///
/// A trial is one more run. It is a hit when any tensor has other bits than in the first run, or
/// when either run faults: on the emulator the first run reports races. Each other run there has a
/// random schedule; a GPU schedules by itself.
pub struct DeterminismJudge {
    prepared: Box<dyn PreparedCase>,
    rates: Rates,
    most_runs: u64,
}

impl DeterminismJudge {
    fn between(
        case: &Case,
        good: &Device,
        bad: &Device,
        effort: Effort,
    ) -> Result<Result<Self, String>, BisectError> {
        let prepared = registry::prepare(case)?;
        let mut repeats = [Repeats::new(&*prepared, good)?, Repeats::new(&*prepared, bad)?];
        let rates = calibrate(effort.most_runs, |count| {
            let mut hits = [0, 0];
            for (side, repeats) in repeats.iter_mut().enumerate() {
                for _ in 0..count {
                    hits[side] += u64::from(repeats.differs()?);
                }
            }
            Ok::<_, RuntimeError>(hits)
        })?;
        Ok(match rates {
            Some(rates) => Ok(Self { prepared, rates, most_runs: effort.most_runs }),
            None => Err("runs of the bad revision differ no more often than those of the good one"
                .to_owned()),
        })
    }

    fn judge(&self, device: &Device) -> Result<Trial, BisectError> {
        let mut test = Sprt::new(self.rates);
        let mut repeats = Repeats::new(&*self.prepared, device)?;
        let mut hits = 0;
        for run in 1..=self.most_runs {
            let differs = repeats.differs()?;
            hits += u64::from(differs);
            let share = hits as f64 / run as f64;
            if let Some(bad) = test.observe(differs) {
                return Ok(Trial::of(bad, Some(share), format!("{hits} of {run} runs differ")));
            }
        }
        let value = Some(hits as f64 / self.most_runs.max(1) as f64);
        let note = format!("undecided after {} runs, {hits} of which differ", self.most_runs);
        Ok(Trial { value, ..Trial::skip(note) })
    }
}

/// Runs of one revision, compared with the first run.
struct Repeats<'a> {
    prepared: &'a dyn PreparedCase,
    device: &'a Device,
    /// None if it faulted.
    first: Option<KernelRun>,
    runs: u64,
}

impl<'a> Repeats<'a> {
    fn new(prepared: &'a dyn PreparedCase, device: &'a Device) -> Result<Self, RuntimeError> {
        let first = match prepared.kernel(device, Contract::NAN) {
            Ok(run) => Some(run),
            Err(RuntimeError::Fault { .. }) => None,
            Err(error) => return Err(error),
        };
        Ok(Self { prepared, device, first, runs: 0 })
    }

    fn differs(&mut self) -> Result<bool, RuntimeError> {
        self.runs += 1;
        let Some(first) = &self.first else { return Ok(true) };
        self.device.backend().set_schedule_seed(Some(self.runs));
        let run = self.prepared.kernel(self.device, Contract::NAN);
        self.device.backend().set_schedule_seed(None);
        match run {
            Ok(run) => {
                let equal = |(a, b): (&HostTensor, &HostTensor)| a.bytes == b.bytes;
                let tensors = |run: &KernelRun| {
                    run.tensors.iter().map(|t| t.tensor.clone()).collect::<Vec<_>>()
                };
                Ok(!tensors(first).iter().zip(&tensors(&run)).all(equal))
            }
            Err(RuntimeError::Fault { .. }) => Ok(true),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(rows: &[f64]) -> Errors {
        Errors { rows: rows.to_vec(), scale: 100.0 }
    }

    #[test]
    fn an_error_exceeds_another_when_it_does_in_more_rows_than_chance_allows() {
        let (small, large) = (errors(&[1.0; 20]), errors(&[2.0; 20]));
        assert!(
            large.exceeds(&small, ALPHA)
                && !small.exceeds(&large, ALPHA)
                && !large.exceeds(&large, ALPHA)
        );
        // Five rows are too few to decide; equal rows give no information.
        assert!(!errors(&[2.0; 5]).exceeds(&errors(&[1.0; 5]), ALPHA));
        let mostly_tied: Vec<f64> = (0..100).map(|i| if i < 5 { 2.0 } else { 1.0 }).collect();
        assert!(!errors(&mostly_tied).exceeds(&errors(&[1.0; 100]), ALPHA));
    }

    #[test]
    fn one_row_that_is_far_off_does_not_decide_for_the_others() {
        let mut rows = [0.5; 20];
        rows[3] = f64::INFINITY;
        assert!(!errors(&rows).exceeds(&errors(&[1.0; 20]), ALPHA));
    }

    #[test]
    fn errors_are_relative_to_the_tensor_and_none_is_zero() {
        assert_eq!(errors(&[1.0; 25]).relative(), 0.5);
        assert_eq!(Errors::default().relative(), 0.0);
    }

    #[test]
    fn the_median_ignores_what_is_far_out() {
        assert_eq!((median(&[]), median(&[3.0]), median(&[1.0, 9e9, 3.0, 2.0])), (0.0, 3.0, 2.5));
    }
}
