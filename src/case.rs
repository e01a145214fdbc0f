//! A case: one fully determined comparison, one line of JSON that replays anywhere.

use dsv4_kernels::runtime::{BackendKind, Device};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use thiserror::Error;

/// One comparison: the operator, and what the operator's own case type says.
///
/// As JSON: the operator's fields, with `"operator"` beside them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// Operator name.
    pub operator: String,
    /// The operator's fields.
    #[serde(flatten)]
    pub fields: serde_json::Map<String, Value>,
}

/// Why a case cannot be run.
#[derive(Debug, Error)]
pub enum CaseError {
    /// The line is no JSON object with an `operator`.
    #[error("malformed case: {0}")]
    Malformed(String),
    /// The registry has no such operator.
    #[error("unknown operator `{name}`; known are {known}")]
    UnknownOperator {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// A field has a value that the operator cannot take.
    #[error("case of `{operator}`: field `{field}`: {reason}")]
    Field {
        /// Operator.
        operator: &'static str,
        /// Field.
        field: &'static str,
        /// Value and rule.
        reason: String,
    },
    /// The oracle refused the inputs.
    #[error("oracle of `{operator}`: {reason}")]
    Oracle {
        /// Operator.
        operator: &'static str,
        /// The oracle's error.
        reason: String,
    },
}

impl Case {
    /// Parses one line.
    ///
    /// # Errors
    /// [`CaseError::Malformed`] with the parser's words.
    pub fn parse(line: &str) -> Result<Self, CaseError> {
        serde_json::from_str(line).map_err(|e| CaseError::Malformed(format!("{e} in `{}`", shorten(line))))
    }

    /// From an operator's own case type.
    ///
    /// # Panics
    /// When `fields` does not serialise to a JSON object, which every case type does.
    pub fn new(operator: &str, fields: &impl Serialize) -> Self {
        let Ok(Value::Object(fields)) = serde_json::to_value(fields) else {
            panic!("the case type of `{operator}` is no struct")
        };
        Self { operator: operator.to_owned(), fields }
    }

    /// The operator's own case type.
    ///
    /// # Errors
    /// [`CaseError::Malformed`] naming the field that is missing, unknown or of the wrong type.
    pub fn fields<T: DeserializeOwned>(&self) -> Result<T, CaseError> {
        serde_json::from_value(Value::Object(self.fields.clone()))
            .map_err(|e| CaseError::Malformed(format!("{e} in a case of `{}`", self.operator)))
    }

    /// The line that replays this case.
    pub fn line(&self) -> String {
        serde_json::to_string(self).expect("a case is JSON already")
    }

    /// The command that replays this case on a device like this one, under as many random schedules (emulator).
    pub fn replay_command(&self, device: &Device, schedules: u32) -> String {
        let quoted = |text: &str| format!("'{}'", text.replace('\'', "'\\''"));
        let backend = device.environment().backend;
        let mut command = format!("parity replay --backend {backend}");
        if let Some(directory) = device.tree().directory() {
            command += &format!(" --kernels {}", quoted(&directory.display().to_string()));
        }
        if backend == BackendKind::Emulator && schedules > 0 {
            command += &format!(" --schedules {schedules}");
        }
        format!("{command} {}", quoted(&self.line()))
    }
}

fn shorten(line: &str) -> String {
    if line.chars().count() <= 120 { line.to_owned() } else { line.chars().take(120).chain("…".chars()).collect() }
}

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
