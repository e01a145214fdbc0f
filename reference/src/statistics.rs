//! Sums over tensor elements that a judge computes for each of many runs: plain loops over slices,
//! in the crate that is compiled with optimization in every profile.

use crate::format::Format;
use crate::wide::wide;

/// The sums of one tensor's weighted errors.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct WeightedErrors {
    /// `sum w e (y - e)`.
    pub projection: f64,
    /// `sum w (y - e)^2`.
    pub energy: f64,
}

impl WeightedErrors {
    /// The sums of `written` (y) around `exact` (e). Elements of weight 0 are ignored, whatever
    /// they hold.
    pub fn of(exact: &[f64], written: &[f64], weights: &[f64]) -> Self {
        let mut sums = Self::default();
        for ((e, y), w) in exact.iter().zip(written).zip(weights) {
            let error = y - e;
            // An error of zero adds nothing, however large its weight is.
            if *w != 0.0 && error != 0.0 {
                sums.projection += w * e * error;
                sums.energy += w * error * error;
            }
        }
        sums
    }
}

/// Number of equal elements where `exact` is finite.
pub fn count_equal(exact: &[f64], a: &[f64], b: &[f64]) -> usize {
    // Without a branch for each element.
    let is_equal = |(e, (a, b)): (&f64, (&f64, &f64))| usize::from(e.is_finite() & (a == b));
    wide(
        #[inline(always)]
        || exact.iter().zip(a.iter().zip(b)).map(is_equal).sum(),
    )
}

/// For each element the mean square of its errors over the runs; NaN where `exact` is not finite.
pub fn mean_squares(exact: &[f64], runs: &[&[f64]]) -> Vec<f64> {
    let mut sums: Vec<f64> =
        exact.iter().map(|e| if e.is_finite() { 0.0 } else { f64::NAN }).collect();
    for run in runs {
        wide(
            #[inline(always)]
            || {
                for ((sum, e), y) in sums.iter_mut().zip(exact).zip(*run) {
                    *sum += (y - e) * (y - e);
                }
            },
        );
    }
    let count = runs.len() as f64;
    sums.iter_mut().for_each(|sum| *sum /= count);
    sums
}

/// The nearest values of a format; a value that overflows there is not changed.
pub fn stored(format: Format, values: &[f64]) -> Vec<f64> {
    let mut stored = values.to_vec();
    format.round_all(&mut stored);
    for (stored, value) in stored.iter_mut().zip(values) {
        *stored = if stored.is_finite() { *stored } else { *value };
    }
    stored
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_count_by_their_weights_and_not_at_all_where_these_are_zero() {
        let sums = WeightedErrors::of(
            &[1.0, 2.0, 3.0, f64::INFINITY],
            &[1.5, 2.0, 7.0, 0.0],
            &[2.0, 1e300, 0.0, 0.0],
        );
        assert_eq!(sums, WeightedErrors { projection: 1.0, energy: 0.5 });
        assert!(WeightedErrors::of(&[1.0], &[f64::NAN], &[1.0]).energy.is_nan());
    }

    #[test]
    fn equal_elements_are_counted_where_the_truth_is_a_number() {
        assert_eq!(count_equal(&[0.0, 1.0, f64::NAN], &[5.0, 2.0, 3.0], &[5.0, 1.0, 3.0]), 1);
    }

    #[test]
    fn mean_squares_are_taken_over_the_runs() {
        let squares = mean_squares(&[1.0, f64::NAN], &[&[2.0, 0.0], &[4.0, 0.0]]);
        assert!(squares[0] == 5.0 && squares[1].is_nan());
    }

    #[test]
    fn what_overflows_is_left_as_it_is() {
        assert_eq!(stored(Format::BF16, &[1.0 + 1.0 / 512.0, 1e300]), [1.0, 1e300]);
    }
}
