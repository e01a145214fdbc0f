//! Bounds on a whole tensor, from oracle runs that round where the kernel declares that it rounds.
//!
//! Budgets of single elements ([`crate::judge::budget`]) accept a kernel that is a little off
//! everywhere. Three metrics of the whole tensor do not. Let `e` be the exact values and `y` what
//! was written. Let `w_i = 1 / (sigma_i² + ulp_i²/12)` be weights from the variances of the
//! elements and of their last rounding. Then
//!
//! ```text
//! bias   = sum w e (y - e) / sum w e²      the uniform relative error that explains y best
//! energy = sum w (y - e)² / count          1 where errors are as large as modelled
//! equal  = the largest share of elements that are bit for bit those of a run to nearest without noise in fp32
//! ```
//!
//! Every run of the oracle, stored on the kernel's grid, has these three metrics, too. A kernel
//! that rounds at the same points is one more such run. Two kinds of runs show where its metrics
//! may lie; the narrower radius `r` counts:
//!
//! ```text
//! min over nearest runs - r  <=  bias  <=  max over nearest runs + r
//! energy <= max(nearest runs, mean of working runs) + r
//! equal  >= min over nearest runs - r - two rows          (an error that a row has in common moves all of it)
//!
//! r = t(K - 1) s sqrt(1 + 1/K) + flips               s: of the K working runs
//! r = t(N - C) s sqrt(1 + C/N) + jumps + flips       s: of the N nearest runs with noise, within their C choices
//! ```
//!
//! For `equal` there are few runs. The working ones hardly ever round as the rule does, so they
//! scatter less than a kernel does. So its radius is at least the radius of independent elements.
//! An element that equals its choice's run with the probability `p` has the variance `p (1 - p)`.
//! All elements of the runs together give the sum of these variances.
//!
//! Runs to nearest round the values of the case by the hardware's rule, each with one of the
//! choices that a kernel is free to make. Among those of one choice only the errors of fp32 vary,
//! and sometimes they move a value over the middle of two steps. `t` is Student's quantile for one
//! false alarm in [`CAMPAIGN`] verdicts.
//!
//! **jumps.** A rare event need not have happened in `N` runs. A rounding that goes the other way
//! moves a row by its gap. A rounding error that is uniform in that gap, as in the working runs,
//! has a variance of a twelfth of the square. So no jump is larger than `sqrt(12)` times the
//! deviation of a row's part of the metric over the working runs. [`JUMPS`] of the row that moves
//! it most are allowed.
//!
//! A vector that is summed over rows, such as the gradient of a weight, is different. One such
//! rounding, of a value that the row's root mean square consists of, moves every element. So there
//! the number of equal elements is not bounded.
//!
//! **flips.** Where errors are far smaller than the grid's steps, all runs store the same bits. So
//! does a kernel, except for a rare element next to the middle of two steps. `E|error| / ulp` of an
//! element is the probability of that, and the sum of these is the mean of a Poisson distribution.
//! Its quantile bounds how many elements flip in one of [`CAMPAIGN`] verdicts. Each flip moves a
//! metric by no more than the element that moves it most.
//!
//! A kernel that does not declare where it rounds is judged by the budgets of its elements and by
//! the energy of runs that round once more ([`RoundingPoints::Undeclared`]).

use dsv4_reference::precision::{CHOICES, Precision};
use dsv4_reference::statistics::{self, WeightedErrors};
use rayon::prelude::*;
use statrs::distribution::{DiscreteCDF, Poisson};

use crate::judge::budget::{Budget, CAMPAIGN, expected_maximum, student};
use crate::judge::grid::Steps;
use crate::operator::{NEAREST_RUNS, OracleTensor, RoundingPoints, Side, WORKING_RUNS};
use crate::record::figures;

/// Elements below which a thread costs more than it takes.
const AT_ONCE: usize = 1 << 14;

/// Jumps of the largest size that are allowed. It is very rare that two both happen, both have the
/// largest size, and add up.
const JUMPS: f64 = 2.0;

/// The runs around `Exact`: [`WORKING_RUNS`], then [`NEAREST_RUNS`]. Their seeds are fixed, so
/// that a case always has the same yardstick.
pub fn working_precisions() -> impl Iterator<Item = Precision> {
    let nearest = (0..NEAREST_RUNS as u64).map(|seed| Precision::Nearest { seed });
    (0..WORKING_RUNS as u64).map(|seed| Precision::Working { seed }).chain(nearest)
}

/// Bounds on one tensor of one case.
#[derive(Clone, Debug)]
pub struct Yardstick {
    /// Where the kernel is assumed to round.
    pub points: RoundingPoints,
    /// Least and largest bias.
    pub bias: [f64; 2],
    /// Largest energy.
    pub energy: f64,
    /// Least share of elements that are equal to those of a run to nearest.
    pub equal: f64,
    scale: Scale,
    /// The run to nearest of each choice without noise in fp32, stored. Kernels whose results there
    /// are the nearest ones break ties as it does.
    nearest: Vec<Vec<f64>>,
}

/// The metrics of one tensor as a whole.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Numbers {
    /// The uniform relative error that explains it best.
    pub bias: f64,
    /// Mean square of errors in units of the modelled variance.
    pub energy: f64,
    /// Share of elements that are equal to those of a run to nearest.
    pub equal: f64,
}

/// How much each element counts.
#[derive(Clone, Debug)]
struct Scale {
    /// Elements for which the oracle has a finite value.
    finite: Vec<usize>,
    /// `w_i`, zero where the oracle has no finite value.
    weights: Vec<f64>,
    /// `sum w e²`.
    signal: f64,
}

impl Yardstick {
    /// Derives the bounds of one tensor from the oracle's runs, those of [`working_precisions`].
    ///
    /// # Panics
    /// When a run has another shape than the exact one.
    pub fn derive(
        exact: &OracleTensor,
        runs: &[&OracleTensor],
        steps: &Steps,
        budget: &Budget,
        points: RoundingPoints,
    ) -> Self {
        let stored: Vec<Vec<f64>> = runs.par_iter().map(|run| steps.store(&run.values)).collect();
        let (working, nearest) = stored.split_at(WORKING_RUNS.min(stored.len()));
        let scale = Scale::of(exact, budget, steps);
        let mut yardstick = Self {
            points,
            bias: [f64::NEG_INFINITY, f64::INFINITY],
            energy: f64::INFINITY,
            equal: 0.0,
            scale,
            nearest: nearest.iter().take(CHOICES).cloned().collect(),
        };
        if yardstick.scale.finite.is_empty() || working.len() < 2 {
            return yardstick;
        }
        let numbers = |runs: &[Vec<f64>]| -> Vec<Numbers> {
            runs.par_iter().map(|run| yardstick.numbers(exact, run)).collect()
        };
        let (scattered, ruled) = (numbers(working), numbers(nearest));
        let flips = yardstick.scale.flips(exact, budget, steps);
        let jumps = yardstick.scale.jumps(exact, working);
        let independent = yardstick.independent_scatter(nearest);
        yardstick.bound(&flips, &jumps, &scattered, &ruled, independent);
        yardstick
    }

    /// The deviation of `equal` if each element independently equals its choice's run without
    /// noise, or does not.
    fn independent_scatter(&self, nearest: &[Vec<f64>]) -> f64 {
        let mut variance = 0.0;
        for (choice, rule) in nearest.iter().enumerate().take(CHOICES) {
            let noisy: Vec<&Vec<f64>> =
                nearest.iter().skip(choice).step_by(CHOICES).skip(1).collect();
            let runs = noisy.len() as f64;
            for &i in &self.scale.finite {
                let equal = noisy.iter().filter(|run| run[i] == rule[i]).count() as f64;
                // With so few runs the variance itself is estimated without bias.
                variance += equal * (runs - equal) / (runs * (runs - 1.0)).max(1.0);
            }
        }
        (variance / CHOICES as f64).sqrt() / self.scale.finite.len().max(1) as f64
    }

    fn bound(
        &mut self,
        flips: &Flips,
        jumps: &Jumps,
        scattered: &[Numbers],
        ruled: &[Numbers],
        independent: f64,
    ) {
        let bias = Spread::of(scattered, ruled, jumps.bias, |n| n.bias);
        let energy = Spread::of(scattered, ruled, jumps.energy, |n| n.energy);
        // The run without noise of each choice equals itself.
        let equal =
            Spread::of(scattered, ruled.get(CHOICES..).unwrap_or_default(), 0.0, |n| n.equal);
        if self.points == RoundingPoints::Undeclared {
            // One more rounding at every point has the variance of the roundings themselves.
            self.energy = 2.0 * energy.high.max(energy.mean) + 2.0 * energy.radius + flips.energy;
            return;
        }
        let radius = bias.radius + flips.bias;
        self.bias = [bias.low - radius, bias.high + radius];
        self.energy = energy.high.max(energy.mean) + energy.radius + flips.energy;
        let radius = equal.radius.max(expected_maximum(CAMPAIGN) * independent);
        self.equal = equal.low - radius - flips.share - JUMPS * jumps.share;
    }

    /// The metrics of what a kernel wrote.
    pub fn numbers(&self, exact: &OracleTensor, written: &[f64]) -> Numbers {
        let Scale { finite, weights, signal } = &self.scale;
        let errors = WeightedErrors::of(&exact.values, written, weights);
        let equal_to = |run: &Vec<f64>| statistics::count_equal(&exact.values, run, written);
        let equal = self.nearest.iter().map(equal_to).max().unwrap_or(0);
        // With no finite element, nothing is measured.
        let count = finite.len().max(1) as f64;
        Numbers {
            bias: if *signal > 0.0 { errors.projection / signal } else { 0.0 },
            energy: errors.energy / count,
            equal: equal as f64 / count,
        }
    }

    /// Whether its bounds are numbers or limits. They are not where runs of the oracle leave the
    /// range of their arithmetic.
    pub fn is_bound(&self) -> bool {
        !(self.bias[0].is_nan()
            || self.bias[1].is_nan()
            || self.energy.is_nan()
            || self.equal.is_nan())
    }

    /// What is wrong with the bias and with the precision of a tensor with these metrics, if
    /// anything. NaN is wrong.
    pub fn problems(&self, numbers: Numbers) -> [Option<String>; 2] {
        let Numbers { bias, energy, equal } = numbers;
        let [low, high] = self.bias;
        // NaN must fail, so each comparison is written as what passes.
        let fits = low <= bias && bias <= high || self.points == RoundingPoints::Undeclared;
        let of_bias = (!fits).then(|| {
            let [bias, low, high] = [bias, low, high].map(|number| figures::measure(number, 4));
            format!("a uniform relative error of {bias}, allowed {low} to {high}")
        });
        let fits = energy <= self.energy;
        let of_energy = (!fits).then(|| {
            let [energy, allowed] = [energy, self.energy].map(|number| figures::measure(number, 3));
            format!("errors of {energy} times the modelled energy, allowed {allowed} times")
        });
        let fits = equal >= self.equal;
        let of_equal = (!fits).then(|| {
            let [equal, required] =
                [equal, self.equal].map(|share| figures::measure(100.0 * share, 4));
            format!("{equal} % of the elements equal those of a run to nearest, {required} % must")
        });
        [of_bias, of_energy.or(of_equal)]
    }
}

/// Where a metric lies and how it scatters.
struct Spread {
    low: f64,
    high: f64,
    mean: f64,
    radius: f64,
}

impl Spread {
    fn of(
        scattered: &[Numbers],
        ruled: &[Numbers],
        jump: f64,
        number: impl Fn(&Numbers) -> f64,
    ) -> Self {
        let scattered: Vec<f64> = scattered.iter().map(&number).collect();
        let mean = scattered.iter().sum::<f64>() / scattered.len() as f64;
        // Runs without noise lie where the others do, and do not scatter.
        let noisy = if ruled.len() == NEAREST_RUNS { &ruled[CHOICES..] } else { ruled };
        let choices: Vec<Vec<f64>> = (0..CHOICES)
            .map(|choice| noisy.iter().skip(choice).step_by(CHOICES).map(&number).collect())
            .collect();
        let radius = radius(&[scattered]).min(radius(&choices) + JUMPS * jump);
        let ruled = || ruled.iter().map(&number);
        let (low, high) = if ruled().count() == 0 {
            (mean, mean)
        } else {
            (ruled().fold(f64::INFINITY, f64::min), ruled().fold(f64::NEG_INFINITY, f64::max))
        };
        Self { low, high, mean, radius }
    }
}

/// How far one more run may be from the mean of its group, if all groups have one variance.
/// Infinite where too few runs are known.
fn radius(groups: &[Vec<f64>]) -> f64 {
    let count: usize = groups.iter().map(Vec::len).sum();
    let freedom = count as f64 - groups.len() as f64;
    if freedom < 1.0 || groups.iter().any(Vec::is_empty) {
        return f64::INFINITY;
    }
    let of_group = |group: &Vec<f64>| {
        let mean = group.iter().sum::<f64>() / group.len() as f64;
        group.iter().map(|number| (number - mean).powi(2)).sum::<f64>()
    };
    let variance = groups.iter().map(of_group).sum::<f64>() / freedom;
    let of_mean = groups.len() as f64 / count as f64;
    student(expected_maximum(CAMPAIGN), freedom) * (variance * (1.0 + of_mean)).sqrt()
}

/// The most that one rounding to the other side may move.
struct Jumps {
    bias: f64,
    energy: f64,
    share: f64,
}

/// How much elements that are stored one step off may move a metric.
struct Flips {
    bias: f64,
    energy: f64,
    share: f64,
}

impl Scale {
    fn of(exact: &OracleTensor, budget: &Budget, steps: &Steps) -> Self {
        let finite: Vec<usize> =
            (0..exact.values.len()).filter(|&i| exact.values[i].is_finite()).collect();
        let weight = |i: usize| {
            let ulp = 2.0 * steps.half_ulp(i, exact.values[i]);
            let variance = budget.variance[i] + ulp * ulp / 12.0;
            // An element that may not err at all is bounded only by its budget.
            if variance > 0.0 { variance.recip() } else { 0.0 }
        };
        let mut weights = vec![0.0; exact.values.len()];
        finite.iter().for_each(|&i| weights[i] = weight(i));
        let signal = finite.iter().map(|&i| weights[i] * exact.values[i].powi(2)).sum();
        Self { finite, weights, signal }
    }

    fn jumps(&self, exact: &OracleTensor, working: &[Vec<f64>]) -> Jumps {
        // One rounding moves a row; in a vector it moves an element.
        let row_len = if exact.shape.len() > 1 { exact.rows().1.max(1) } else { 1 };
        // In a vector that sums over rows, one rounding of a row's statistic moves every element a
        // little.
        let sums_rows = exact.shape.len() < 2 && exact.side == Side::Gradient;
        let rows = exact.values.len() / row_len;
        let moments_of = |row: usize| {
            let range = row * row_len..(row + 1) * row_len;
            let (exact, weights) = (&exact.values[range.clone()], &self.weights[range.clone()]);
            let (mut bias, mut energy) = (Moments::default(), Moments::default());
            for run in working {
                let errors = WeightedErrors::of(exact, &run[range.clone()], weights);
                bias.add(errors.projection);
                energy.add(errors.energy);
            }
            (bias, energy)
        };
        let at_once = (AT_ONCE / row_len).max(1);
        let (bias, energy): (Vec<Moments>, Vec<Moments>) =
            (0..rows).into_par_iter().with_min_len(at_once).map(moments_of).unzip();
        let count = self.finite.len() as f64;
        Jumps {
            bias: if self.signal > 0.0 { Moments::largest_jump(&bias) / self.signal } else { 0.0 },
            energy: Moments::largest_jump(&energy) / count,
            share: if sums_rows { 1.0 } else { row_len as f64 / count },
        }
    }

    fn flips(&self, exact: &OracleTensor, budget: &Budget, steps: &Steps) -> Flips {
        let (mut mean, mut bias, mut energy) = (0.0f64, 0.0f64, 0.0f64);
        for &i in &self.finite {
            let w = self.weights[i];
            let ulp = 2.0 * steps.half_ulp(i, exact.values[i]);
            if ulp > 0.0 && budget.variance[i] > 0.0 {
                // E|x| of a normal number is sqrt(2/pi) sigma, and two runs differ by sqrt(2) of
                // that.
                mean += (2.0 * (budget.variance[i] / std::f64::consts::PI).sqrt() / ulp).min(1.0);
                bias = bias.max(w * exact.values[i].abs() * ulp);
                energy = energy.max(w * ulp * ulp);
            }
        }
        let count = flips_quantile(mean);
        let all = self.finite.len() as f64;
        Flips {
            bias: if self.signal > 0.0 { count * bias / self.signal } else { 0.0 },
            energy: count * energy / all,
            share: count / all,
        }
    }
}

/// Mean and variance of a row's part of a metric, over the working runs.
#[derive(Clone, Copy, Default)]
struct Moments {
    count: f64,
    sum: f64,
    squares: f64,
}

impl Moments {
    fn add(&mut self, part: f64) {
        self.count += 1.0;
        self.sum += part;
        self.squares += part * part;
    }

    fn variance(&self) -> f64 {
        ((self.squares - self.sum * self.sum / self.count) / (self.count - 1.0)).max(0.0)
    }

    /// `sqrt(12)` deviations of the row that scatters most.
    fn largest_jump(rows: &[Self]) -> f64 {
        (12.0 * rows.iter().map(Self::variance).fold(0.0, f64::max)).sqrt()
    }
}

/// How many rare flips happen at most in one of [`CAMPAIGN`] verdicts, given their mean. Where
/// flips are not rare, the runs themselves have them and scatter by them.
fn flips_quantile(mean: f64) -> f64 {
    let mean = mean.min(1.0);
    if mean <= 0.0 {
        return 0.0;
    }
    Poisson::new(mean).map_or(f64::INFINITY, |flips| flips.inverse_cdf(1.0 - 0.5 / CAMPAIGN) as f64)
}

#[cfg(test)]
mod tests {
    use dsv4_runtime::DType;
    use rand::Rng;

    use super::*;
    use crate::case::Draw;
    use crate::operator::Pooling;

    const SHAPE: [usize; 2] = [64, 48];
    /// A little less than a bf16 step, as of an operand that was rounded.
    const NOISE: f64 = 1.0 / 512.0;
    /// As of fp32.
    const FINE: f64 = 1e-6;

    /// An oracle whose kernels all make one error that depends on the values, and a small error of
    /// their own.
    struct Model {
        exact: OracleTensor,
        ruled: Vec<f64>,
        draw: Draw,
    }

    impl Model {
        fn new(seed: u64) -> Self {
            let mut draw = Draw::new(seed, "yardstick");
            let values: Vec<f64> = (0..SHAPE[0] * SHAPE[1]).map(|_| draw.normal()).collect();
            let ruled = values
                .iter()
                .map(|value| value + NOISE * draw.rng().random_range(-0.5..0.5))
                .collect();
            Self {
                exact: OracleTensor {
                    name: "t",
                    side: Side::Forward,
                    shape: SHAPE.to_vec(),
                    values,
                },
                ruled,
                draw,
            }
        }

        fn kernel(&mut self) -> Vec<f64> {
            let draw = &mut self.draw;
            self.ruled.iter().map(|value| value * (1.0 + FINE * draw.normal())).collect()
        }

        fn yardstick(&mut self, points: RoundingPoints) -> Yardstick {
            let of = |model: &Self, values| OracleTensor { values, ..model.exact.clone() };
            let mut runs = Vec::new();
            for _ in 0..WORKING_RUNS {
                let draw = &mut self.draw;
                let error = |value: &f64| value + NOISE * draw.rng().random_range(-0.5..0.5);
                let values = self.exact.values.iter().map(error).collect();
                runs.push(of(self, values));
            }
            for _ in 0..NEAREST_RUNS {
                let values = self.kernel();
                runs.push(of(self, values));
            }
            let runs: Vec<_> = runs.iter().collect();
            let steps = Steps::from(DType::Bf16);
            let budget = Budget::derive_pooled(&self.exact, &runs, &steps, Pooling::LastAxis);
            Yardstick::derive(&self.exact, &runs, &steps, &budget, points)
        }

        fn problems(&self, yardstick: &Yardstick, written: &[f64]) -> [bool; 2] {
            let stored = Steps::from(DType::Bf16).store(written);
            yardstick
                .problems(yardstick.numbers(&self.exact, &stored))
                .map(|problem| problem.is_some())
        }
    }

    #[test]
    fn a_kernel_that_rounds_as_the_runs_to_nearest_do_passes_every_time() {
        for seed in 0..40 {
            let mut model = Model::new(seed);
            let yardstick = model.yardstick(RoundingPoints::Specification);
            for _ in 0..20 {
                let written = model.kernel();
                assert_eq!(model.problems(&yardstick, &written), [false; 2]);
            }
        }
    }

    /// Sums in fp32 whose own errors are some steps. Few elements equal a run to nearest, and how
    /// many is chance. No working run equals it anywhere.
    #[test]
    fn a_vector_of_which_few_elements_are_equal_passes_every_time() {
        let shape = vec![2000];
        for seed in 0..40 {
            let mut draw = Draw::new(seed, "vector");
            let values: Vec<f64> = (0..shape[0]).map(|_| draw.normal()).collect();
            let of = |values| OracleTensor {
                name: "t",
                side: Side::Forward,
                shape: shape.clone(),
                values,
            };
            let mut off = |steps: f64| -> Vec<f64> {
                values
                    .iter()
                    .map(|value| value * (1.0 + steps * f64::from(f32::EPSILON) * draw.normal()))
                    .collect()
            };
            let working = (0..WORKING_RUNS).map(|_| of(off(1e3))).collect::<Vec<_>>();
            let nearest = (0..NEAREST_RUNS)
                .map(|run| of(if run < CHOICES { values.clone() } else { off(3.0) }));
            let nearest: Vec<_> = nearest.collect();
            let runs: Vec<_> = working.iter().chain(&nearest).collect();
            let (exact, steps) = (of(values.clone()), Steps::from(DType::F32));
            let budget = Budget::derive_pooled(&exact, &runs, &steps, Pooling::LastAxis);
            let yardstick =
                Yardstick::derive(&exact, &runs, &steps, &budget, RoundingPoints::Specification);
            for _ in 0..40 {
                let problems =
                    yardstick.problems(yardstick.numbers(&exact, &steps.store(&off(3.0))));
                assert_eq!(problems, [None, None], "seed {seed}");
            }
        }
    }

    /// A row's root mean square that is rounded to the other side moves the whole gradient of a
    /// weight by a last bit.
    #[test]
    fn a_gradient_of_a_weight_none_of_whose_bits_is_that_of_a_run_passes_and_an_output_of_the_kind_does_not()
     {
        for (side, passes) in [(Side::Gradient, true), (Side::Forward, false)] {
            let mut draw = Draw::new(5, "gradient");
            let values: Vec<f64> = (0..2000).map(|_| draw.normal()).collect();
            let of = |values| OracleTensor { name: "t", side, shape: vec![2000], values };
            let mut off = |by: f64| -> Vec<f64> {
                values.iter().map(|x| x * (1.0 + by * draw.normal())).collect()
            };
            let mut runs: Vec<_> = (0..WORKING_RUNS).map(|_| of(off(1e-4))).collect();
            runs.extend((0..NEAREST_RUNS).map(|_| of(values.clone())));
            let runs: Vec<_> = runs.iter().collect();
            let (exact, steps) = (of(values.clone()), Steps::from(DType::F32));
            let budget = Budget::derive_pooled(&exact, &runs, &steps, Pooling::LastAxis);
            let yardstick =
                Yardstick::derive(&exact, &runs, &steps, &budget, RoundingPoints::Specification);
            let moved: Vec<f64> =
                values.iter().map(|value| value * (1.0 + 2f64.powi(-21))).collect();
            let [_, precision] =
                yardstick.problems(yardstick.numbers(&exact, &steps.store(&moved)));
            assert_eq!(precision.is_none(), passes, "{precision:?}");
        }
    }

    #[test]
    fn a_bias_far_below_a_step_of_the_type_is_seen_on_both_sides() {
        let mut model = Model::new(1);
        let yardstick = model.yardstick(RoundingPoints::Specification);
        for bias in [2f64.powi(-12), -2f64.powi(-12)] {
            let written: Vec<f64> =
                model.kernel().iter().map(|value| value * (1.0 + bias)).collect();
            assert!(model.problems(&yardstick, &written)[0], "{bias}");
        }
    }

    #[test]
    fn errors_that_are_larger_everywhere_and_have_no_bias_lack_precision() {
        let mut model = Model::new(2);
        let yardstick = model.yardstick(RoundingPoints::Specification);
        let noisy: Vec<f64> = (0..model.exact.values.len())
            .map(|i| model.ruled[i] + 4.0 * NOISE * model.draw.rng().random_range(-0.5..0.5))
            .collect();
        assert!(model.problems(&yardstick, &noisy)[1]);
    }

    #[test]
    fn errors_that_are_as_large_but_others_than_those_of_the_rule_have_other_bits() {
        let mut model = Model::new(3);
        let yardstick = model.yardstick(RoundingPoints::Specification);
        let other: Vec<f64> = model
            .exact
            .values
            .clone()
            .iter()
            .map(|e| e + NOISE * model.draw.rng().random_range(-0.5..0.5))
            .collect();
        assert!(yardstick.equal > 0.8, "{}", yardstick.equal);
        assert!(model.problems(&yardstick, &other)[1]);
    }

    #[test]
    fn nothing_is_said_of_the_bias_of_a_kernel_that_does_not_say_where_it_rounds() {
        let mut model = Model::new(4);
        let declared = model.yardstick(RoundingPoints::Specification);
        let yardstick = model.yardstick(RoundingPoints::Undeclared);
        assert!(yardstick.energy > declared.energy && yardstick.equal == 0.0);
        let biased: Vec<f64> =
            model.ruled.iter().map(|value| value * (1.0 + 2f64.powi(-11))).collect();
        assert_eq!(model.problems(&yardstick, &biased), [false; 2]);
        let noisy: Vec<f64> =
            model.ruled.iter().map(|value| value * (1.0 + 2f64.powi(-6))).collect();
        assert_eq!(model.problems(&yardstick, &noisy), [false, true]);
    }

    #[test]
    fn nan_is_a_problem_of_both() {
        let mut model = Model::new(5);
        let yardstick = model.yardstick(RoundingPoints::Specification);
        let mut written = model.kernel();
        written[7] = f64::NAN;
        assert_eq!(model.problems(&yardstick, &written), [true; 2]);
    }

    #[test]
    fn rare_flips_are_counted_by_poissons_quantile() {
        assert_eq!(flips_quantile(0.0), 0.0);
        let [rare, seldom, often] = [1e-6, 1e-2, 1.0].map(flips_quantile);
        assert!(
            rare <= 1.0 && rare < seldom && seldom < often && often < 20.0,
            "{rare} {seldom} {often}"
        );
        assert_eq!(often, flips_quantile(1e6));
    }
}
