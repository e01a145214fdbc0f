//! Inputs of a case: their distribution, and the reproducible random stream of each tensor.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// The distribution of a case's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Distribution {
    /// Standard normal.
    Normal,
    /// Uniform in [-1, 1].
    Uniform,
    /// Normal, and one element in 64 is 32 times larger, as in real activations.
    Outliers,
    /// Normal times a log-uniform factor between 1/8 and 8 for each row: rows of different
    /// magnitude.
    RowScaled,
    /// Powers of two with random signs: sums cancel exactly, or not at all.
    PowersOfTwo,
}

impl Distribution {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Normal, Self::Uniform, Self::Outliers, Self::RowScaled, Self::PowersOfTwo];
}

/// Values that one thread draws at a time in large tensors ([`Draw::each`]).
const AT_ONCE: usize = 1 << 14;

/// Words of 32 bits of the stream for a normal value: two 64-bit fractions.
pub const NORMAL_WORDS: u32 = 4;
/// Words of the stream for a uniform value.
const UNIFORM_WORDS: u32 = 2;

/// Reproducible random inputs: one stream for each tensor name. A change of one tensor's shape does
/// not change the others.
#[derive(Clone)]
pub struct Draw {
    rng: ChaCha8Rng,
}

impl Draw {
    /// The stream of tensor `name` in a case with this seed.
    pub fn new(seed: u64, name: &str) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&seed.to_le_bytes()).update(name.as_bytes());
        Self { rng: ChaCha8Rng::from_seed(*hasher.finalize().as_bytes()) }
    }

    /// Stream `number` of several with one name.
    pub fn numbered(seed: u64, name: &str, number: usize) -> Self {
        Self::new(seed.wrapping_add(number as u64), name)
    }

    /// The generator itself.
    pub fn rng(&mut self) -> &mut ChaCha8Rng {
        &mut self.rng
    }

    /// Calls `one` `count` times. Each call takes `words` words of the stream. The result is the
    /// same as in sequence, but large counts use several threads. Each thread starts where its part
    /// of the stream starts.
    ///
    /// # Panics
    /// If `one` takes more words or fewer.
    pub fn each<T: Send>(
        &mut self,
        count: usize,
        words: u32,
        one: impl Fn(&mut Self) -> T + Sync,
    ) -> Vec<T> {
        if count <= AT_ONCE {
            return (0..count).map(|_| one(self)).collect();
        }
        let start = self.rng.get_word_pos();
        let place = |number: usize| start + number as u128 * u128::from(words);
        let part = |from: usize| {
            let (mut draw, end) = (self.clone(), count.min(from + AT_ONCE));
            draw.rng.set_word_pos(place(from));
            let drawn: Vec<T> = (from..end).map(|_| one(&mut draw)).collect();
            assert_eq!(
                draw.rng.get_word_pos(),
                place(end),
                "a value takes {words} words of the stream"
            );
            drawn
        };
        let parts: Vec<usize> = (0..count).step_by(AT_ONCE).collect();
        let drawn = parts.into_par_iter().flat_map_iter(part).collect();
        self.rng.set_word_pos(place(count));
        drawn
    }

    /// One standard normal value (Box-Muller).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.rng.random::<f64>()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.rng.random::<f64>()).cos()
    }

    /// `rows × row_len` values of a distribution, times `magnitude`.
    pub fn values(
        &mut self,
        distribution: Distribution,
        rows: usize,
        row_len: usize,
        magnitude: f64,
    ) -> Vec<f64> {
        let words = match distribution {
            Distribution::Normal => Some(NORMAL_WORDS),
            Distribution::Uniform => Some(UNIFORM_WORDS),
            // These take extra words at times, or one for a row.
            Distribution::Outliers | Distribution::RowScaled | Distribution::PowersOfTwo => None,
        };
        if let Some(words) = words {
            return self.each(rows * row_len, words, |draw| magnitude * draw.value(distribution));
        }
        let mut values = Vec::with_capacity(rows * row_len);
        for _ in 0..rows {
            let row_factor = match distribution {
                Distribution::RowScaled => 2f64.powf(self.rng.random_range(-3.0..3.0)),
                _ => 1.0,
            };
            for _ in 0..row_len {
                values.push(magnitude * row_factor * self.value(distribution));
            }
        }
        values
    }

    fn value(&mut self, distribution: Distribution) -> f64 {
        match distribution {
            Distribution::Normal | Distribution::RowScaled => self.normal(),
            Distribution::Uniform => self.rng.random_range(-1.0..=1.0),
            Distribution::Outliers => {
                let factor = if self.rng.random_ratio(1, 64) { 32.0 } else { 1.0 };
                factor * self.normal()
            }
            Distribution::PowersOfTwo => {
                let sign = if self.rng.random() { 1.0 } else { -1.0 };
                sign * 2f64.powi(self.rng.random_range(-3..=3))
            }
        }
    }
}

/// A random permutation of `0..count` from its own stream of the seed, for laws that permute.
pub fn permutation(seed: u64, count: usize) -> Vec<usize> {
    use rand::seq::SliceRandom;
    let mut order: Vec<usize> = (0..count).collect();
    order.shuffle(Draw::new(seed, "permutation").rng());
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_values_are_those_of_one_after_the_other_and_leave_the_stream_where_these_do() {
        for distribution in Distribution::ALL {
            let (rows, row_len) = (5, AT_ONCE / 2 + 7);
            let (mut together, mut apart) = (Draw::new(3, "x"), Draw::new(3, "x"));
            // Neither starts at a whole number of 64 bits.
            assert_eq!(together.rng().random::<bool>(), apart.rng().random::<bool>());
            let values = together.values(distribution, rows, row_len, 0.7);
            // For each row as many values as one thread draws at a time. A row's own factor comes
            // with its first value.
            let one_by_one: Vec<f64> =
                (0..rows).flat_map(|_| apart.values(distribution, 1, row_len, 0.7)).collect();
            assert!(values == one_by_one, "{distribution:?}");
            assert_eq!(together.normal(), apart.normal(), "{distribution:?}");
        }
    }

    #[test]
    #[should_panic(expected = "a value takes 1 words")]
    fn values_that_take_other_words_than_they_say_are_found_out() {
        Draw::new(1, "x").each(2 * AT_ONCE, 1, |draw| draw.normal());
    }
}
