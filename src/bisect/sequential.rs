//! Sequential tests for values that vary by chance: run times, and results that differ from run to
//! run.
//!
//! Both become trials that hit or miss: "this run was nearer to the bad revision's time than to the
//! good one's", "this run gave other bits than the first". One slow run among many is one hit,
//! however slow it was. So a disturbed machine costs trials and does not give a wrong answer.
//!
//! **Calibration** ([`calibrate`]). Both endpoints are tried until their rates of hits are apart:
//! until the upper Clopper-Pearson bound of the good one, `p0`, is below the lower bound of the bad
//! one, `p1`. The number of trials doubles from look to look. Look `s` may err only with
//! probability `ALPHA / 2^s`, so all looks together err with at most [`ALPHA`].
//!
//! **Decision** ([`Sprt`]). Wald's sequential probability ratio test (1945) between `p0` and `p1`.
//! Each trial adds `ln(p1/p0)` (hit) or `ln((1-p1)/(1-p0))` (miss). The sum decides when it leaves
//! `± ln((1-ALPHA)/ALPHA)`. Because `p0` and `p1` are bounds and not estimates, real endpoints are
//! further apart than the test assumes, and its errors rarer than [`ALPHA`].

use statrs::distribution::{Beta, ContinuousCDF};

/// Probability of a wrong decision: one in 1,024 bisections.
pub const ALPHA: f64 = 1.0 / 1024.0;

/// Trials of the first look at the endpoints; fewer could not separate 0 % from 100 %.
const FIRST_LOOK: u64 = 8;

/// Rates of hits between which an [`Sprt`] decides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Upper bound for good revisions.
    pub good: f64,
    /// Lower bound for bad revisions, above `good`.
    pub bad: f64,
}

/// Upper Clopper-Pearson bound of a rate: with `hits` of `trials`, the rate is larger only with
/// probability `alpha`.
pub fn upper_bound(hits: u64, trials: u64, alpha: f64) -> f64 {
    match Beta::new(hits as f64 + 1.0, (trials - hits) as f64) {
        Ok(beta) => beta.inverse_cdf(1.0 - alpha),
        // All trials were hits.
        Err(_) => 1.0,
    }
}

/// Lower Clopper-Pearson bound of a rate.
pub fn lower_bound(hits: u64, trials: u64, alpha: f64) -> f64 {
    1.0 - upper_bound(trials - hits, trials, alpha)
}

/// Tries both endpoints until their rates are apart, with at most `most` trials at one look; `None`
/// when they are not. `hits(n)` makes `n` new trials of each endpoint and counts the hits of
/// `[good, bad]`.
///
/// # Errors
/// The first error of `hits`.
pub fn calibrate<E>(
    most: u64,
    mut hits: impl FnMut(u64) -> Result<[u64; 2], E>,
) -> Result<Option<Rates>, E> {
    let mut alpha = ALPHA / 2.0;
    let mut trials = FIRST_LOOK;
    while trials <= most {
        let [good, bad] = hits(trials)?;
        // The two bounds share the error probability of this look.
        let rates = Rates {
            good: upper_bound(good, trials, alpha / 2.0),
            bad: lower_bound(bad, trials, alpha / 2.0),
        };
        if rates.good < rates.bad {
            return Ok(Some(rates));
        }
        alpha /= 2.0;
        trials *= 2;
    }
    Ok(None)
}

/// Wald's test between two rates.
#[derive(Clone, Copy, Debug)]
pub struct Sprt {
    sum: f64,
    hit: f64,
    miss: f64,
}

impl Sprt {
    /// A test without trials.
    pub fn new(rates: Rates) -> Self {
        Self {
            sum: 0.0,
            hit: (rates.bad / rates.good).ln(),
            miss: ((1.0 - rates.bad) / (1.0 - rates.good)).ln(),
        }
    }

    /// Adds a trial; returns whether the revision is bad as soon as that is decided.
    pub fn observe(&mut self, hit: bool) -> Option<bool> {
        self.sum += if hit { self.hit } else { self.miss };
        let bound = ((1.0 - ALPHA) / ALPHA).ln();
        (self.sum.abs() >= bound).then_some(self.sum > 0.0)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use rand::Rng;

    use super::*;
    use crate::case::Draw;

    fn count(draw: &mut Draw, trials: u64, rate: f64) -> u64 {
        (0..trials).filter(|_| draw.rng().random_bool(rate)).count() as u64
    }

    fn rates_of(draw: &mut Draw, good: f64, bad: f64, most: u64) -> Option<Rates> {
        calibrate::<Infallible>(most, |trials| {
            Ok([count(draw, trials, good), count(draw, trials, bad)])
        })
        .unwrap()
    }

    #[test]
    fn bounds_are_those_of_the_binomial_tail() {
        // No hit in n trials: (1 - p)^n = alpha.
        for (trials, alpha) in [(8, 1e-3), (100, 0.05)] {
            let bound = upper_bound(0, trials, alpha);
            assert!(((1.0 - bound).powi(trials as i32) / alpha - 1.0).abs() < 1e-6, "{bound}");
            assert!((lower_bound(trials, trials, alpha) - (1.0 - bound)).abs() < 1e-9);
        }
        assert_eq!(upper_bound(5, 5, 0.01), 1.0);
        assert!(lower_bound(40, 80, 0.01) < 0.5 && upper_bound(40, 80, 0.01) > 0.5);
    }

    #[test]
    fn endpoints_that_always_differ_are_told_apart_at_once_and_equal_ones_never() {
        let mut draw = Draw::new(1, "calibrate");
        assert!(rates_of(&mut draw, 0.0, 1.0, 16).is_some());
        let told = (0..200).filter(|_| rates_of(&mut draw, 0.5, 0.5, 512).is_some()).count();
        assert!(told <= 1, "{told} of 200 equal endpoints were told apart");
    }

    #[test]
    fn rare_differences_take_more_trials_and_are_still_decided_rightly() {
        let mut draw = Draw::new(2, "decide");
        for (good, bad) in [(0.0, 1.0), (0.0, 0.1), (0.3, 0.7)] {
            let rates = rates_of(&mut draw, good, bad, 4096).expect("apart");
            for (rate, expected) in [(good, false), (bad, true)] {
                for _ in 0..100 {
                    let mut test = Sprt::new(rates);
                    let decided = loop {
                        if let Some(decided) = test.observe(draw.rng().random_bool(rate)) {
                            break decided;
                        }
                    };
                    assert_eq!(decided, expected, "rates {good} and {bad}");
                }
            }
        }
    }
}
