//! Inputs of a case: which distribution, and the reproducible stream of each tensor.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

/// How a case's numbers are distributed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Distribution {
    /// Standard normal.
    Normal,
    /// Uniform in [-1, 1].
    Uniform,
    /// Normal, and one element in 64 is 32 times larger: what activations look like.
    Outliers,
    /// Normal times a log-uniform factor between 1/8 and 8 for each row: rows of unlike size.
    RowScaled,
    /// Powers of two with random signs: sums cancel exactly, or not at all.
    PowersOfTwo,
}

impl Distribution {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Normal, Self::Uniform, Self::Outliers, Self::RowScaled, Self::PowersOfTwo];
}

/// Reproducible random inputs: one stream for each tensor name, so that a change of one tensor's
/// shape leaves the others as they were.
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

    /// Stream `number` of several of one name.
    pub fn numbered(seed: u64, name: &str, number: usize) -> Self {
        Self::new(seed.wrapping_add(number as u64), name)
    }

    /// The generator itself.
    pub fn rng(&mut self) -> &mut ChaCha8Rng {
        &mut self.rng
    }

    /// One standard normal deviate (Box-Muller).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.rng.random::<f64>()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.rng.random::<f64>()).cos()
    }

    /// `rows × row_len` numbers of a distribution, times `magnitude`.
    pub fn values(&mut self, distribution: Distribution, rows: usize, row_len: usize, magnitude: f64) -> Vec<f64> {
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
