//! The two rotation tables of a model (inference 4.1).

use dsv4_runtime::{DType, Device, Result, TensorView, Views};

use crate::cache::cache_layout::LayerKind;
use crate::model::config::{Config, Yarn};
use crate::model::memory::Memory;
use crate::projections::rope;

/// cos and sin of every position.
pub(super) struct Tables<'d> {
    _memory: Memory<'d>,
    main: [TensorView; 2],
    compress: [TensorView; 2],
}

impl<'d> Tables<'d> {
    /// The tables of the first `rows` positions.
    pub fn new(device: &'d Device, config: &Config, rows: usize) -> Result<Self> {
        let mut memory = Memory::new(device);
        let positions: Vec<u8> = (0..rows as i32).flat_map(i32::to_ne_bytes).collect();
        let positions = memory.upload("positions", DType::I32, &[rows], &positions)?;
        let mut table = |frequencies: Vec<f32>| -> Result<[TensorView; 2]> {
            let half = frequencies.len();
            let bytes: Vec<u8> = frequencies.into_iter().flat_map(f32::to_ne_bytes).collect();
            let frequencies = memory.upload("inv_freq", DType::F32, &[half], &bytes)?;
            let cos = memory.tensor("cos", DType::F32, &[rows, half])?;
            let sin = memory.tensor("sin", DType::F32, &[rows, half])?;
            let views = Views::from([("inv_freq", &frequencies), ("positions", &positions)]);
            rope::table(device, &views.with("cos", &cos).with("sin", &sin))?;
            Ok([cos, sin])
        };
        let main = table(frequencies(config.rope_theta, config.rope_dim, None))?;
        let compress =
            table(frequencies(config.compress_rope_theta, config.rope_dim, Some(config.yarn)))?;
        device.backend().synchronize()?;
        Ok(Self { _memory: memory, main, compress })
    }

    /// cos and sin of a layer's kind.
    pub fn of(&self, kind: LayerKind) -> &[TensorView; 2] {
        if kind == LayerKind::Window { &self.main } else { &self.compress }
    }
}

/// The angle per position of each pair, in fp32 and in the published order of operations; the
/// range of the ramp is computed in f64.
fn frequencies(theta: f64, rope_dim: usize, yarn: Option<Yarn>) -> Vec<f32> {
    let width = rope_dim as f64;
    let of_pair = |pair: usize| {
        let exponent = (2 * pair) as f32 / rope_dim as f32;
        let plain = 1.0 / theta.powf(f64::from(exponent)) as f32;
        let Some(yarn) = yarn else { return plain };
        let pair_of = |turns: f64| {
            let context = yarn.original_positions as f64 / (turns * std::f64::consts::TAU);
            width * context.ln() / (2.0 * theta.ln())
        };
        let low = pair_of(yarn.beta_fast).floor().max(0.0);
        let high = pair_of(yarn.beta_slow).ceil().min(width - 1.0);
        let high = if low == high { high + 0.001 } else { high };
        let ramp = ((pair as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
        let smooth = 1.0 - ramp;
        plain / yarn.factor as f32 * (1.0 - smooth) + plain * smooth
    };
    (0..rope_dim / 2).map(of_pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_are_those_of_the_specification() {
        let yarn =
            Yarn { factor: 16.0, original_positions: 65_536, beta_fast: 32.0, beta_slow: 1.0 };
        let found = frequencies(160_000.0, 64, Some(yarn));
        // The values of inference 4.1, given with seven digits or exactly.
        let printed = [
            (0, 1.0, 0.0),
            (8, 5.0e-2, 0.0),
            (15, 3.635539e-3, 5e-10),
            (16, 2.265625e-3, 0.0),
            (20, 2.969778e-4, 5e-11),
            (24, 1.953125e-5, 0.0),
            (25, 5.372313e-6, 5e-13),
            (31, 5.680529e-7, 5e-14),
        ];
        for (pair, value, half_digit) in printed {
            let error = (f64::from(found[pair]) - value).abs();
            // fp32 rounds the power, its reciprocal, and up to four products and sums of the ramp.
            let rounding = 6.0 * f64::from(f32::EPSILON) / 2.0 * value;
            assert!(error <= half_digit + rounding, "f[{pair}] = {}", found[pair]);
        }
        let plain = frequencies(10_000.0, 64, None);
        assert_eq!((plain[0], plain.len()), (1.0, 32));
        assert_eq!(plain[16], 1e-2);
    }
}
