//! Sinks of attention: for each head, a logit without a value.

use dsv4_runtime::{DType, HostTensor};
use proptest::sample::select;
use proptest::strategy::Strategy;
use serde::{Deserialize, Serialize};

use crate::case::Draw;

/// The sinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sinks {
    /// None.
    Absent,
    /// Normal with deviation 3, about the magnitude of lse.
    Normal,
    /// Both infinities, ±2.4e38 and ordinary values, round-robin.
    Extreme,
}

impl Sinks {
    /// Draws any of them.
    pub(crate) fn strategy() -> impl Strategy<Value = Self> {
        select(&[Self::Normal, Self::Absent, Self::Extreme][..])
    }

    /// `[num_heads]` f32 around `mean`, which has the magnitude of lse: a shift of the logits moves
    /// both.
    pub(crate) fn draw(self, seed: u64, num_heads: usize, mean: f64) -> Option<HostTensor> {
        let mut draw = Draw::new(seed, "sink");
        let extreme = [f64::INFINITY, f64::NEG_INFINITY, 2.4e38, -2.4e38];
        let sinks: Vec<f64> = (0..num_heads)
            .map(|head| {
                let normal = mean + 3.0 * draw.normal();
                match self {
                    Self::Extreme => extreme.get(head % 6).copied().unwrap_or(normal),
                    Self::Absent | Self::Normal => normal,
                }
            })
            .collect();
        (self != Self::Absent).then(|| HostTensor::from_f64(DType::F32, &[num_heads], &sinks))
    }
}
