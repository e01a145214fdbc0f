//! Samples of a time, as reports show them.

use serde::{Deserialize, Serialize};

/// Median, least and most of samples of a time, microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The median; of an even number of samples the middle of the two in the middle.
    pub median_us: f64,
    /// The shortest.
    pub least_us: f64,
    /// The longest.
    pub most_us: f64,
    /// How many samples.
    pub samples: usize,
}

impl Spread {
    /// `None` without a sample.
    pub fn of(samples: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut all: Vec<f64> = samples.into_iter().collect();
        all.sort_unstable_by(f64::total_cmp);
        let (&least_us, &most_us) = (all.first()?, all.last()?);
        let (middle, samples) = (all.len() / 2, all.len());
        let median_us = match samples % 2 {
            1 => all[middle],
            _ => f64::midpoint(all[middle - 1], all[middle]),
        };
        Some(Self { median_us, least_us, most_us, samples })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle_and_nothing_has_none() {
        let of = |samples: &[f64]| Spread::of(samples.iter().copied());
        let spread = |median_us, least_us, most_us, samples| Spread {
            median_us,
            least_us,
            most_us,
            samples,
        };
        assert_eq!(of(&[4.0, 1.0, 2.0, 9.0]), Some(spread(3.0, 1.0, 9.0, 4)));
        assert_eq!(of(&[4.0, 1.0, 2.0]), Some(spread(2.0, 1.0, 4.0, 3)));
        assert_eq!(of(&[]), None);
    }
}
