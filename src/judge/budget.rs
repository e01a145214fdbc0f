//! The error that is allowed for each element: derived, never typed in.
//!
//! The oracle runs once in `Exact` (f64, value `e`). It runs [`WORKING_RUNS`] times in `Working`,
//! where every narrow store or multiplication has a random error of at most half a gap. It runs
//! [`NEAREST_RUNS`] times in `Nearest`, where it is rounded by the rule of the hardware. The spread
//! of these runs around `Exact` shows how far a kernel of the specified precision may be off. The
//! budget of an element is
//!
//! ```text
//! budget = multiple · sigma + half an ulp of the output type at |e| + multiple · sigma
//! ```
//!
//! **sigma.** With `K` runs, `s_i² = mean_k (w_ki - e_i)²` is a poor estimate for one element: a
//! chi-square with `K` degrees of freedom. It is a good one for a row of elements of one scale, or
//! for whatever else a tensor declares to be of one scale ([`Pooling`]). So each row's estimates
//! are moderated by their mean, as in Smyth's moderated t-statistic (2004):
//!
//! ```text
//! sigma_i² = (d0 · s_row² + K · s_i²) / (d0 + K),        d0 = 4 + 2 · (1 + 2/K) / excess
//! excess   = var_i(s_i²) / s_row⁴ - 2/K
//! ```
//!
//! where `excess` is how much more the estimates scatter than a chi-square would. It is zero for a
//! row of one scale (then `sigma = s_row`, pooled), and large for a row of unlike elements (then
//! each keeps its own). The formula for `d0` is the second moment of the scaled F-distribution. The
//! `s_i²` follow that distribution when the true variances are scaled inverse chi-squares.
//!
//! **multiple.** The expected maximum of `N` standard normal deviates, where `N` counts the
//! elements of the tensor times [`CAMPAIGN`] verdicts. A kernel that rounds as the `Working` runs
//! do fails wrongly once in that many verdicts. The multiple is widened to a Student quantile with
//! the degrees of freedom of `sigma`, because `sigma` is itself an estimate.
//!
//! **Exact zeros.** Where `Exact` and all other runs are zero along a whole row, sigma is zero and
//! so is the budget: the kernel must write zeros there.
//!
//! Bounds on a whole tensor are in [`crate::judge::yardstick`].
//!
//! [`WORKING_RUNS`]: crate::operator::WORKING_RUNS
//! [`NEAREST_RUNS`]: crate::operator::NEAREST_RUNS

use dsv4_reference::statistics;
use statrs::distribution::{ContinuousCDF, Normal};

use crate::judge::grid::Steps;
use crate::operator::{OracleTensor, Pooling};

/// Verdicts of one campaign: as many tensors as may be judged before chance fails one whose
/// rounding errors are as large as those of the `Working` runs. A sweep of everything at a hundred
/// new seeds judges some millions.
pub const CAMPAIGN: f64 = (1 << 24) as f64;

/// The error that a tensor is allowed.
#[derive(Clone, Debug)]
pub struct Budget {
    /// Allowed error of each element. NaN where `Exact` is not finite (those elements are compared
    /// by value).
    pub allowed: Vec<f64>,
    /// Largest multiple of sigma that was used.
    pub multiple: f64,
    /// Moderated variance of each element's error before it is stored; NaN where `allowed` is.
    pub variance: Vec<f64>,
}

/// The expected maximum of `count` standard normal deviates, by its usual approximation: the
/// quantile at `1 - 1/(2 count)`, two-sided.
pub fn expected_maximum(count: f64) -> f64 {
    Normal::standard().inverse_cdf(1.0 - 0.5 / count.max(1.0))
}

/// Student's quantile for the tail probability of the normal quantile `z`, with `freedom` degrees
/// of freedom. Wallace's relation (1959): `z² = ((8ν+1)/(8ν+3))² · ν · ln(1 + t²/ν)`, good to a
/// few parts in a thousand far into the tails.
pub fn student(z: f64, freedom: f64) -> f64 {
    let ratio = (8.0 * freedom + 3.0) / (8.0 * freedom + 1.0);
    (freedom * ((z * ratio).powi(2) / freedom).exp_m1()).sqrt()
}

impl Budget {
    /// Derives the budget of one tensor from the oracle's runs. `stored` is the type in which the
    /// kernel stores it, or the grid of its values. Each row pools.
    ///
    /// # Panics
    /// When a working run has another shape than the exact one.
    pub fn derive(
        exact: &OracleTensor,
        working: &[&OracleTensor],
        stored: impl Into<Steps>,
    ) -> Self {
        Self::derive_pooled(exact, working, &stored.into(), Pooling::LastAxis)
    }

    /// Same as [`Self::derive`], with variances pooled over the elements that the tensor declares
    /// to be of one scale.
    ///
    /// # Panics
    /// When a working run has another shape than the exact one.
    pub fn derive_pooled(
        exact: &OracleTensor,
        working: &[&OracleTensor],
        stored: &Steps,
        pooling: Pooling,
    ) -> Self {
        assert!(
            working.iter().all(|run| run.values.len() == exact.values.len()),
            "runs of unlike shape"
        );
        let z = expected_maximum(exact.values.len() as f64 * CAMPAIGN);
        let elements = exact.values.len();
        let (allowed, variance) = (Vec::with_capacity(elements), Vec::with_capacity(elements));
        let mut budget = Self { allowed, multiple: 0.0, variance };
        let runs: Vec<&[f64]> = working.iter().map(|run| run.values.as_slice()).collect();
        let own = statistics::mean_squares(&exact.values, &runs);
        for pooled in pooling.ranges(&exact.shape) {
            budget.derive_row(exact, &own, runs.len(), stored, pooled, z);
        }
        budget
    }

    /// A budget that allows no error.
    pub fn nothing(exact: &OracleTensor) -> Self {
        let allowed: Vec<f64> = exact
            .values
            .iter()
            .map(|value| if value.is_finite() { 0.0 } else { f64::NAN })
            .collect();
        Self { variance: allowed.clone(), allowed, multiple: 0.0 }
    }

    /// The first element whose exact value is finite and whose allowed error is not, or whose exact
    /// value is beyond fp32, in which kernels compute.
    pub fn unbounded(&self, exact: &OracleTensor) -> Option<usize> {
        let is_beyond = |value: f64| value.abs() > f64::from(f32::MAX);
        (0..self.allowed.len()).find(|&i| {
            let value = exact.values[i];
            value.is_finite() && (!self.allowed[i].is_finite() || is_beyond(value))
        })
    }

    fn derive_row(
        &mut self,
        exact: &OracleTensor,
        own: &[f64],
        runs: usize,
        stored: &Steps,
        range: std::ops::Range<usize>,
        z: f64,
    ) {
        let pool = Pool::of(&own[range.clone()], runs as f64);
        let multiple = student(z, pool.freedom);
        for i in range {
            let (value, own) = (exact.values[i], own[i]);
            if !value.is_finite() {
                self.allowed.push(f64::NAN);
                self.variance.push(f64::NAN);
                continue;
            }
            let variance = pool.variance(own);
            let spread = multiple * variance.sqrt();
            let store = if spread == 0.0 && value == 0.0 {
                0.0
            } else {
                stored.half_ulp(i, value.abs() + spread)
            };
            self.multiple = self.multiple.max(multiple);
            self.allowed.push(spread + store);
            self.variance.push(variance);
        }
    }
}

/// How the variances of one row are moderated.
struct Pool {
    /// Mean of the elements' own estimates.
    mean: f64,
    /// Weight of the mean, in degrees of freedom; infinite when the row has one scale.
    prior: f64,
    /// Degrees of freedom of an element's own estimate.
    runs: f64,
    /// Degrees of freedom of the moderated estimate.
    freedom: f64,
}

impl Pool {
    fn of(own: &[f64], runs: f64) -> Self {
        let finite: Vec<f64> = own.iter().copied().filter(|v| v.is_finite()).collect();
        let count = finite.len() as f64;
        let mean = finite.iter().sum::<f64>() / count.max(1.0);
        let scatter =
            finite.iter().map(|v| (v / mean - 1.0).powi(2)).sum::<f64>() / (count - 1.0).max(1.0);
        let excess = scatter - 2.0 / runs;
        let pooled_freedom = runs * count.max(1.0);
        // A row of one scale, or a row too short to tell.
        if mean == 0.0 || excess.is_nan() || excess <= 0.0 {
            return Self { mean, prior: f64::INFINITY, runs, freedom: pooled_freedom };
        }
        let prior = 4.0 + 2.0 * (1.0 + 2.0 / runs) / excess;
        Self { mean, prior, runs, freedom: (prior + runs).min(pooled_freedom) }
    }

    fn variance(&self, own: f64) -> f64 {
        if self.prior.is_infinite() {
            self.mean
        } else {
            (self.prior * self.mean + self.runs * own) / (self.prior + self.runs)
        }
    }
}

#[cfg(test)]
mod tests {
    use dsv4_reference::Format;
    use dsv4_runtime::DType;

    use super::*;
    use crate::case::Draw;
    use crate::operator::WORKING_RUNS;
    use crate::operator::{Side, half_ulp};

    fn tensor(shape: &[usize], values: Vec<f64>) -> OracleTensor {
        OracleTensor { name: "t", side: Side::Forward, shape: shape.to_vec(), values }
    }

    fn noisy(exact: &OracleTensor, draw: &mut Draw, sigma: impl Fn(usize) -> f64) -> OracleTensor {
        let values =
            exact.values.iter().enumerate().map(|(i, v)| v + sigma(i) * draw.normal()).collect();
        OracleTensor { values, ..exact.clone() }
    }

    fn budget_of(
        exact: &OracleTensor,
        sigma: impl Fn(usize) -> f64 + Copy,
        draw: &mut Draw,
    ) -> Budget {
        let runs: Vec<_> = (0..WORKING_RUNS).map(|_| noisy(exact, draw, sigma)).collect();
        Budget::derive(exact, &runs.iter().collect::<Vec<_>>(), DType::F32)
    }

    #[test]
    fn students_quantile_approaches_the_normal_one() {
        let z = expected_maximum(1e6);
        assert!(student(z, 1e9) / z - 1.0 < 1e-6 && student(z, 8.0) > 2.0 * z);
    }

    #[test]
    fn a_row_of_one_scale_gets_one_tight_budget() {
        let mut draw = Draw::new(1, "row");
        let exact = tensor(&[4, 512], (0..2048).map(|_| draw.normal()).collect());
        let budget = budget_of(&exact, |_| 0.01, &mut draw);
        let z = expected_maximum(2048.0 * CAMPAIGN);
        for allowed in &budget.allowed {
            assert!((allowed / (0.01 * z) - 1.0).abs() < 0.2, "{allowed} against {}", 0.01 * z);
        }
    }

    #[test]
    fn noise_like_the_working_runs_passes_and_ten_times_that_fails() {
        let mut draw = Draw::new(2, "noise");
        let exact = tensor(&[16, 64], (0..1024).map(|_| draw.normal()).collect());
        let sigma = |i: usize| if i % 64 == 7 { 1.0 } else { 1e-3 };
        let budget = budget_of(&exact, sigma, &mut draw);
        let errors = |run: &OracleTensor| -> Vec<f64> {
            run.values.iter().zip(&exact.values).map(|(k, e)| (k - e).abs()).collect()
        };
        let passes = |run: &OracleTensor| {
            errors(run).iter().zip(&budget.allowed).all(|(error, allowed)| error <= allowed)
        };
        assert!(passes(&noisy(&exact, &mut draw, sigma)));
        assert!(!passes(&noisy(&exact, &mut draw, |i| 10.0 * sigma(i))));
    }

    #[test]
    fn rows_that_are_zero_in_every_run_allow_nothing_but_zero() {
        let mut draw = Draw::new(3, "zero");
        let exact = tensor(&[2, 8], [vec![0.0; 8], vec![1.0; 8]].concat());
        let budget = budget_of(&exact, |i| if i < 8 { 0.0 } else { 0.1 }, &mut draw);
        assert!(budget.allowed[..8].iter().all(|&allowed| allowed == 0.0));
        assert!(budget.allowed[8..].iter().all(|&allowed| allowed > 0.1));
    }

    #[test]
    fn a_scaled_grid_allows_half_a_step_of_each_blocks_scale() {
        let exact = tensor(&[1, 4], vec![0.3, 3.0, 0.3, 3.0]);
        let steps = Steps::Scaled { format: Format::E4M3, scales: vec![1.0, 1.0, 64.0, 64.0] };
        let budget = Budget::derive(&exact, &[&exact, &exact], steps.clone());
        // e4m3: around 0.3 neighbours are 2^-5 apart, around 3 they are 2^-2 apart. A 64 times
        // coarser grid has the gaps of 0.3/64 and 3/64, which are 2^-9 and 2^-8.
        assert_eq!(budget.allowed, [2f64.powi(-6), 2f64.powi(-3), 2f64.powi(-4), 2f64.powi(-3)]);
        let all_coarse = Steps::Scaled { format: Format::E4M3, scales: vec![64.0; 4] };
        let finer = Budget::derive(&exact, &[&exact, &exact], all_coarse);
        assert!(finer.allowed[0] > budget.allowed[0]);
    }

    #[test]
    fn variances_pool_over_what_the_tensor_declares() {
        let mut draw = Draw::new(5, "pooled");
        let exact = tensor(&[2, 8, 32], vec![1.0; 512]);
        // The second matrix, and in it the second half of each row, has errors 64 times as large.
        let sigma = |i: usize| if i >= 256 && i % 32 >= 16 { 6.4e-2 } else { 1e-3 };
        let runs: Vec<_> = (0..WORKING_RUNS).map(|_| noisy(&exact, &mut draw, sigma)).collect();
        let runs: Vec<_> = runs.iter().collect();
        let derive = |pooling| Budget::derive_pooled(&exact, &runs, &Steps::Exact, pooling).allowed;
        let (rows, matrix, groups) =
            (derive(Pooling::LastAxis), derive(Pooling::Trailing(2)), derive(Pooling::Group(16)));
        assert_eq!(rows, Budget::derive(&exact, &runs, Steps::Exact).allowed);
        let scatter = |allowed: &[f64]| {
            let (low, high) = allowed
                .iter()
                .fold((f64::MAX, 0.0f64), |(low, high), &v| (low.min(v), high.max(v)));
            high / low
        };
        // With one scale for a matrix, all its elements have nearly one budget. With rows, each row
        // has its own estimate.
        assert!(scatter(&rows[..256]) > scatter(&matrix[..256]));
        // Groups keep the two halves of a row apart, and each half has one scale.
        assert!((256..512).all(|i| (groups[i] > 0.1) == (i % 32 >= 16)));
        assert!(groups[256] < matrix[256] && groups[256] < 0.02);
    }

    #[test]
    fn pooled_ranges_cover_every_element_once() {
        let shape = [2, 3, 5];
        for pooling in
            [Pooling::LastAxis, Pooling::Trailing(0), Pooling::Trailing(2), Pooling::Trailing(9)]
                .into_iter()
                .chain((0..7).map(Pooling::Group))
        {
            let covered: Vec<usize> = pooling.ranges(&shape).into_iter().flatten().collect();
            assert_eq!(covered, (0..30).collect::<Vec<_>>(), "{pooling:?}");
        }
        assert_eq!(Pooling::Group(2).ranges(&shape)[..4], [0..2, 2..4, 4..5, 5..7]);
        assert_eq!(Pooling::Trailing(2).ranges(&shape), [0..15, 15..30]);
        assert!(Pooling::Trailing(2).ranges(&[2, 0, 5]).is_empty());
        assert_eq!(Pooling::LastAxis.ranges(&[]).into_iter().flatten().collect::<Vec<_>>(), [0]);
    }

    #[test]
    fn an_element_whose_runs_leave_the_range_has_no_bound() {
        let exact = tensor(&[1, 4], vec![1.0, f64::INFINITY, 3.0, 4.0]);
        let runs: Vec<_> = (0..WORKING_RUNS)
            .map(|number| {
                let off = if number % 2 == 0 { 1e-3 } else { 1e-5 };
                tensor(&[1, 4], vec![1.0 + off, f64::INFINITY, f64::NAN, 4.0 + off * off])
            })
            .collect();
        let budget = Budget::derive(&exact, &runs.iter().collect::<Vec<_>>(), Steps::Exact);
        assert_eq!(budget.unbounded(&exact), Some(2));
        assert_eq!(Budget::derive(&exact, &[&exact, &exact], Steps::Exact).unbounded(&exact), None);
        // No kernel can hold it.
        let beyond = tensor(&[1, 2], vec![1.0, -1e39]);
        let budget = Budget::derive(&beyond, &[&beyond, &beyond], Steps::Exact);
        assert_eq!(budget.unbounded(&beyond), Some(1));
    }

    #[test]
    fn half_an_ulp_is_that_of_the_stored_type() {
        assert_eq!(half_ulp(DType::Bf16, 1.0), 2f64.powi(-8));
        assert_eq!(half_ulp(DType::Bf16, 1.99), 2f64.powi(-8));
        assert_eq!(half_ulp(DType::F32, -2.0), 2f64.powi(-23));
        assert_eq!(half_ulp(DType::F32, 0.0), 2f64.powi(-150));
    }
}
