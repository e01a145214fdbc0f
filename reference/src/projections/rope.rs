//! Partial rotary embedding and its tables (inference 4, training 8).
//!
//! The **last** `rope_dim` channels of a head rotate in adjacent pairs; the leading ones are
//! copied. With `C = cos[p, i]`, `S = sin[p, i]` for the position p of the token and pair i of
//! those channels,
//!
//! ```text
//! y[2i]   = x[2i] C - x[2i+1] S           inverse: S becomes -S
//! y[2i+1] = x[2i] S + x[2i+1] C
//! dx      = the opposite rotation of dy
//! ```
//!
//! A token whose position is outside of the table has NaN in its rotated channels (and in their
//! gradient), so that the mistake is visible. Its leading channels are copied.
//!
//! The tables: pair i rotates by `f_i` per position. The angle is rounded to fp32 before the cosine
//! is taken. At position 10^6 this changes the second decimal.
//!
//! ```text
//! b_i = theta^(-2i / rope_dim)
//! f_i = (b_i / factor) ramp_i + b_i (1 - ramp_i)          YaRN; f_i = b_i without
//! ramp_i = clamp((i - lo) / (hi - lo), 0, 1)
//! D(z) = rope_dim ln(original_max_position / (2 pi z)) / (2 ln theta)
//! lo = max(floor(D(beta_fast)), 0)    hi = min(ceil(D(beta_slow)), rope_dim - 1)    hi += 0.001 if lo == hi
//! cos[p, i] = cos(fp32(fp32(p) f_i))
//! ```
//!
//! Cosine and sine are not multiplied by YaRN's magnitude factor: in this model the rotation keeps
//! norms.

use candle_core::{Device, Tensor, Var};

use crate::error::{Error, Result, require, require_f64, wrong_shape, wrong_value};
use crate::format::Format;
use crate::precision::{Rounding, values};

/// Inputs of the rotation, widened to f64.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// `[num_tokens, num_heads, head_dim]`, stored in bf16 or f32.
    pub x: Tensor,
    /// `[table_rows, rope_dim / 2]`, stored in f32.
    pub cos: Tensor,
    /// `[table_rows, rope_dim / 2]`, stored in f32.
    pub sin: Tensor,
    /// Table row of each token, `num_tokens` of them; absent when token t uses row t.
    pub positions: Option<Vec<i64>>,
    /// Whether to rotate backwards, as the attention output is.
    pub inverse: bool,
}

/// Outputs of the rotation.
#[derive(Debug, Clone)]
pub struct Outputs {
    /// `[num_tokens, num_heads, head_dim]`, stored in the type of `x`.
    pub y: Tensor,
}

/// Gradients with respect to [`Inputs`].
#[derive(Debug, Clone)]
pub struct Gradients {
    /// `[num_tokens, num_heads, head_dim]`, stored in the type of `x`.
    pub dx: Tensor,
}

/// Rotates `x`.
pub fn forward(inputs: &Inputs, rounding: &mut Rounding) -> Result<Outputs> {
    let dims = inputs.check()?;
    let y = rotate(inputs, &dims, &inputs.x, inputs.inverse, rounding)?;
    Ok(Outputs { y })
}

/// Rotates the upstream gradient `dy` `[num_tokens, num_heads, head_dim]` in the opposite
/// direction. `x` itself is not read: this backward pass needs only the tables to be saved.
pub fn backward(inputs: &Inputs, dy: &Tensor, rounding: &mut Rounding) -> Result<Gradients> {
    let dims = inputs.check()?;
    require("dy", dy, inputs.x.dims())?;
    let dx = rotate(inputs, &dims, dy, !inputs.inverse, rounding)?;
    Ok(Gradients { dx })
}

/// The same gradient by automatic differentiation of the exact [`forward`].
pub fn backward_autograd(inputs: &Inputs, dy: &Tensor) -> Result<Gradients> {
    inputs.check()?;
    require("dy", dy, inputs.x.dims())?;
    let x = Var::from_tensor(&inputs.x)?;
    let variables = Inputs { x: x.as_tensor().clone(), ..inputs.clone() };
    let outputs = forward(&variables, &mut Rounding::exact())?;
    let gradients = (outputs.y * dy)?.sum_all()?.backward()?;
    let dx = match gradients.get(&x) {
        Some(gradient) => gradient.clone(),
        None => x.zeros_like()?,
    };
    Ok(Gradients { dx })
}

struct Dims {
    num_tokens: usize,
    num_heads: usize,
    head_dim: usize,
    table_rows: usize,
    num_pairs: usize,
}

impl Inputs {
    fn check(&self) -> Result<Dims> {
        require_f64("x", &self.x)?;
        let &[num_tokens, num_heads, head_dim] = self.x.dims() else {
            return Err(wrong_shape("x", "[num_tokens, num_heads, head_dim]", &self.x));
        };
        let &[table_rows, num_pairs] = self.cos.dims() else {
            return Err(wrong_shape("cos", "[table_rows, rope_dim / 2]", &self.cos));
        };
        require("cos", &self.cos, &[table_rows, num_pairs])?;
        require("sin", &self.sin, &[table_rows, num_pairs])?;
        if 2 * num_pairs > head_dim {
            let rule = "at most head_dim channels can rotate";
            return Err(wrong_value("rope_dim", 2 * num_pairs, rule));
        }
        if let Some(positions) = &self.positions
            && positions.len() != num_tokens
        {
            return Err(Error::Shape {
                argument: "positions",
                expected: format!("[{num_tokens}]"),
                actual: vec![positions.len()],
            });
        }
        Ok(Dims { num_tokens, num_heads, head_dim, table_rows, num_pairs })
    }
}

/// `x` rotated by the table, or backwards when `inverse`.
fn rotate(
    inputs: &Inputs,
    dims: &Dims,
    x: &Tensor,
    inverse: bool,
    rounding: &mut Rounding,
) -> Result<Tensor> {
    let pairs = (dims.num_tokens, dims.num_heads, dims.num_pairs, 2);
    if dims.num_tokens * dims.num_heads * dims.num_pairs == 0 {
        return Ok(x.clone());
    }
    let leading = dims.head_dim - 2 * dims.num_pairs;
    let rotated = x.narrow(2, leading, 2 * dims.num_pairs)?.reshape(pairs)?;
    let even = rotated.narrow(3, 0, 1)?.squeeze(3)?;
    let odd = rotated.narrow(3, 1, 1)?.squeeze(3)?;
    let cos = table_rows(&inputs.cos, inputs, dims)?;
    let sin = table_rows(&inputs.sin, inputs, dims)?;
    let sin = if inverse { sin.neg()? } else { sin };

    // Each product is rounded to fp32 (a fused multiply-add rounds one of them less), and so is the
    // sum before the store: at a tie of the narrower type that decides the last bit.
    let even_cos = rounding.f32(&even.broadcast_mul(&cos)?)?;
    let odd_sin = rounding.f32(&odd.broadcast_mul(&sin)?)?;
    let even_sin = rounding.f32(&even.broadcast_mul(&sin)?)?;
    let odd_cos = rounding.f32(&odd.broadcast_mul(&cos)?)?;
    let pair = [rounding.f32(&(even_cos - odd_sin)?)?, rounding.f32(&(even_sin + odd_cos)?)?];
    let turned = Tensor::stack(&pair, 3)?.flatten_from(2)?;
    if leading == 0 {
        return Ok(turned);
    }
    Ok(Tensor::cat(&[&x.narrow(2, 0, leading)?, &turned], 2)?)
}

/// The rotation of `x`, stored in bf16, row by row, for kernels whose codes have one value: every
/// operation is part of the definition. Pairs are `bf16(fp32(x0 C - fp32(x1 S)))` and
/// `bf16(fp32(x0 S + fp32(x1 C)))`, with one rounding of each sum of a product.
///
/// # Errors
/// As [`forward`].
pub fn turned(inputs: &Inputs) -> Result<Vec<f64>> {
    let Dims { num_heads, head_dim, table_rows, num_pairs, .. } = inputs.check()?;
    let (mut x, cos, sin) = (values(&inputs.x)?, values(&inputs.cos)?, values(&inputs.sin)?);
    for (row, x) in x.chunks_mut(head_dim.max(1)).enumerate() {
        let token = row / num_heads;
        let position = inputs.positions.as_ref().map_or(token as i64, |positions| positions[token]);
        let inside = usize::try_from(position).ok().filter(|&position| position < table_rows);
        for (pair, x) in x[head_dim - 2 * num_pairs..].chunks_mut(2).enumerate() {
            let [cos, sin] = [&cos, &sin]
                .map(|table| inside.map_or(f64::NAN, |row| table[row * num_pairs + pair]));
            let sin = if inputs.inverse { -sin } else { sin };
            let [even, odd] = [x[0], x[1]];
            x[0] = Format::BF16.nearest(fused(even, cos, -f32_of(odd * sin)));
            x[1] = Format::BF16.nearest(fused(even, sin, f32_of(odd * cos)));
        }
    }
    Ok(x)
}

fn f32_of(x: f64) -> f64 {
    f64::from(x as f32)
}

/// `fp32(x c + p)` of bf16 x, fp32 c and p, rounded once. The product has 32 bits. What the sum
/// loses in f64 is kept in its last bit (rounding to odd), where it decides what would otherwise be
/// a tie.
fn fused(x: f64, c: f64, p: f64) -> f64 {
    let product = x * c;
    let sum = product + p;
    let kept = sum - product;
    let lost = (product - (sum - kept)) + (p - kept);
    if lost == 0.0 || !lost.is_finite() || sum.to_bits() & 1 == 1 {
        return f32_of(sum);
    }
    let away = (lost > 0.0) == (sum > 0.0);
    f32_of(f64::from_bits(if away { sum.to_bits() + 1 } else { sum.to_bits() - 1 }))
}

/// The table row of every token, `[num_tokens, 1, rope_dim / 2]`; a row of NaN for positions
/// outside of the table.
fn table_rows(table: &Tensor, inputs: &Inputs, dims: &Dims) -> Result<Tensor> {
    let nan_row = Tensor::full(f64::NAN, (1, dims.num_pairs), table.device())?;
    let extended = if dims.table_rows == 0 { nan_row } else { Tensor::cat(&[table, &nan_row], 0)? };
    let row = |position: i64| match usize::try_from(position) {
        Ok(row) if row < dims.table_rows => row as i64,
        _ => dims.table_rows as i64,
    };
    let rows: Vec<i64> = match &inputs.positions {
        Some(positions) => positions.iter().map(|&p| row(p)).collect(),
        None => (0..dims.num_tokens as i64).map(row).collect(),
    };
    let rows = Tensor::from_vec(rows, dims.num_tokens, table.device())?;
    Ok(extended.index_select(&rows, 0)?.unsqueeze(1)?)
}

/// The rotation frequencies of the pairs.
#[derive(Debug, Clone, PartialEq)]
pub struct YarnParameters {
    /// Base of the frequencies, above 1.
    pub theta: f64,
    /// Rotated channels of a head; even.
    pub rope_dim: usize,
    /// YaRN's extension factor; absent for plain frequencies.
    pub factor: Option<f64>,
    /// Context length before the extension, in tokens.
    pub original_max_position: f64,
    /// Rotations over the original context above which a pair keeps its frequency.
    pub beta_fast: f64,
    /// Rotations over the original context below which a pair is slowed by the whole factor.
    pub beta_slow: f64,
}

impl YarnParameters {
    /// Table "main" of inference 4.1: layers without compression.
    pub fn main() -> Self {
        Self { theta: 10_000.0, factor: None, ..Self::compress() }
    }

    /// Table "compress" of inference 4.1: layers with compression ratio 4 or 128.
    pub fn compress() -> Self {
        Self {
            theta: 160_000.0,
            rope_dim: 64,
            factor: Some(16.0),
            original_max_position: 65_536.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
        }
    }

    /// First and last pair of the ramp, `(lo, hi)`, clamped to the channels.
    fn ramp_range(&self) -> (f64, f64) {
        let width = self.rope_dim as f64;
        let pair_of = |turns: f64| {
            let context = self.original_max_position / (turns * 2.0 * std::f64::consts::PI);
            width * context.ln() / (2.0 * self.theta.ln())
        };
        let lo = pair_of(self.beta_fast).floor().max(0.0);
        let hi = pair_of(self.beta_slow).ceil().min(width - 1.0);
        if lo == hi { (lo, hi + 0.001) } else { (lo, hi) }
    }

    fn check(&self) -> Result<()> {
        if !self.rope_dim.is_multiple_of(2) {
            return Err(wrong_value("rope_dim", self.rope_dim, "channels rotate in pairs"));
        }
        let above = |argument, value: f64, least: f64, rule| {
            // Written so that NaN is rejected too.
            if value > least && value.is_finite() {
                Ok(())
            } else {
                Err(wrong_value(argument, value, rule))
            }
        };
        above("theta", self.theta, 1.0, "it must be finite and above 1")?;
        if let Some(factor) = self.factor {
            above("factor", factor, 0.0, "it must be positive and finite")?;
            let positive = "it must be positive and finite";
            above("original_max_position", self.original_max_position, 0.0, positive)?;
            above("beta_fast", self.beta_fast, 0.0, positive)?;
            above("beta_slow", self.beta_slow, 0.0, positive)?;
        }
        Ok(())
    }
}

/// The inverse frequencies `f_i` (`rope_dim / 2` values), in fp32 and in the published order of
/// operations: the range of the ramp in f64, everything per pair in fp32.
pub fn inv_freq_f32(parameters: &YarnParameters) -> Result<Vec<f32>> {
    parameters.check()?;
    let (lo, hi) = parameters.ramp_range();
    let frequency = |pair: usize| {
        let exponent = (2 * pair) as f32 / parameters.rope_dim as f32;
        // A power with an error of a few f64 roundings still gives the correctly rounded fp32
        // power.
        let power = parameters.theta.powf(f64::from(exponent)) as f32;
        let plain = 1.0 / power;
        let Some(factor) = parameters.factor else {
            return plain;
        };
        let ramp = ((pair as f32 - lo as f32) / (hi - lo) as f32).clamp(0.0, 1.0);
        let smooth = 1.0 - ramp;
        plain / factor as f32 * (1.0 - smooth) + plain * smooth
    };
    Ok((0..parameters.rope_dim / 2).map(frequency).collect())
}

/// Cosine and sine, each `[positions, inv_freq]` in f64, of the angle `fp32(fp32(p) f_i)`. A
/// kernel's table is these values rounded to fp32.
pub fn table(inv_freq: &[f32], positions: &[i64]) -> Result<(Tensor, Tensor)> {
    let shape = (positions.len(), inv_freq.len());
    let angles: Vec<f64> = positions
        .iter()
        .flat_map(|&p| inv_freq.iter().map(move |&f| f64::from(p as f32 * f)))
        .collect();
    let cos = angles.iter().map(|a| a.cos()).collect::<Vec<_>>();
    let sin = angles.iter().map(|a| a.sin()).collect::<Vec<_>>();
    Ok((Tensor::from_vec(cos, shape, &Device::Cpu)?, Tensor::from_vec(sin, shape, &Device::Cpu)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Precision;
    use crate::testing::{
        Draw, Golden, UNIT_ROUNDOFF, assert_directional_derivative, assert_within, dot,
        dot_of_magnitudes, f64_tensor,
    };

    fn case(seed: u64, inverse: bool) -> (Inputs, Tensor) {
        let mut draw = Draw::new(seed);
        let inv_freq =
            inv_freq_f32(&YarnParameters { rope_dim: 8, ..YarnParameters::main() }).unwrap();
        let (cos, sin) = table(&inv_freq, &[0, 1, 2, 3, 4, 5, 6, 700_000]).unwrap();
        let x = draw.bf16(&[5, 3, 20], 2.0);
        let dy = draw.bf16(&[5, 3, 20], 1.0);
        let positions = Some(vec![7, 0, 3, 3, 5]);
        (Inputs { x, cos, sin, positions, inverse }, dy)
    }

    /// Twice the error of one evaluation: two products and a sum round three times, at most
    /// `3 u (|x[2i]| + |x[2i+1]|)` as |C|, |S| <= 1. `[num_tokens, num_heads, head_dim]`, with
    /// equal values for both channels of a pair.
    fn bound(x: &Tensor) -> Result<Tensor> {
        let (num_tokens, num_heads, head_dim) = x.dims3()?;
        let pairs = x.abs()?.reshape((num_tokens, num_heads, head_dim / 2, 2))?;
        let both = pairs.sum_keepdim(3)?.broadcast_as(pairs.shape())?.flatten_from(2)?;
        Ok((both * (2.0 * 3.0 * UNIT_ROUNDOFF))?)
    }

    #[test]
    fn a_fused_sum_is_rounded_once_where_f64_has_lost_the_bit_that_decides() {
        // Ties go to even.
        assert_eq!(fused(1.0, 1.0, 2f64.powi(-24)), 1.0);
        assert_eq!(fused(1.0, 1.0 + 2f64.powi(-23), 2f64.powi(-24)), 1.0 + 2f64.powi(-22));
        let tie = (1.0 + 2f64.powi(-7)) * (1.0 + 2f64.powi(-17));
        // Halfway between two fp32 values: any addend decides, however small.
        assert_eq!(tie, 1.0 + 2f64.powi(-7) + 2f64.powi(-17) + 2f64.powi(-24));
        let (below, above) = (tie - 2f64.powi(-24), tie + 2f64.powi(-24));
        for (small, expected) in [(2f64.powi(-100), above), (-2f64.powi(-100), below)] {
            assert_eq!(fused(1.0 + 2f64.powi(-7), 1.0 + 2f64.powi(-17), small), expected);
        }
        assert!(
            fused(1.0, 1.0, f64::NAN).is_nan() && fused(1.0, f64::INFINITY, 1.0) == f64::INFINITY
        );
    }

    #[test]
    fn explicit_backward_equals_autograd() -> Result<()> {
        for inverse in [false, true] {
            let (inputs, dy) = case(1, inverse);
            let explicit = backward(&inputs, &dy, &mut Rounding::exact())?.dx;
            let automatic = backward_autograd(&inputs, &dy)?.dx;
            assert_within("dx", &explicit, &automatic, &bound(&dy)?);
        }
        Ok(())
    }

    #[test]
    fn the_backward_pass_is_the_adjoint_of_the_forward_pass() -> Result<()> {
        for inverse in [false, true] {
            let (inputs, dy) = case(2, inverse);
            let y = forward(&inputs, &mut Rounding::exact())?.y;
            let dx = backward(&inputs, &dy, &mut Rounding::exact())?.dx;
            let error = (dot(&dy, &y) - dot(&dx, &inputs.x)).abs();
            // Sums of 300 products of values that were rounded three times. The magnitude is at
            // most the sums over pairs (|a| + |b|)(|c| + |d|) <= 2 |(a, b)| |(c, d)|.
            let norms = dot(&dy, &dy).sqrt() * dot(&inputs.x, &inputs.x).sqrt();
            let allowed = 2.0 * (300.0 + 3.0) * UNIT_ROUNDOFF * 2.0 * norms;
            assert!(error <= allowed, "{error:e} > {allowed:e}");
        }
        Ok(())
    }

    #[test]
    fn backward_equals_directional_finite_differences() -> Result<()> {
        let (inputs, dy) = case(3, false);
        let dx = backward(&inputs, &dy, &mut Rounding::exact())?.dx;
        let v = Draw::new(4).normal(inputs.x.dims(), 1.0);
        let objective = |h: f64| -> Result<f64> {
            let moved = Inputs { x: (&inputs.x + (&v * h)?)?, ..inputs.clone() };
            Ok(dot(&forward(&moved, &mut Rounding::exact())?.y, &dy))
        };
        let y = forward(&inputs, &mut Rounding::exact())?.y;
        let magnitude = dot_of_magnitudes(&dy, &(y.abs()? + (bound(&inputs.x)? / UNIT_ROUNDOFF)?)?);
        let noise = (300.0 + 3.0) * UNIT_ROUNDOFF * magnitude;
        assert_directional_derivative("rope", objective, 1.0, noise, dot(&dx, &v))
    }

    #[test]
    fn the_inverse_undoes_the_rotation_and_leading_channels_are_copied() -> Result<()> {
        let (inputs, _) = case(5, false);
        let y = forward(&inputs, &mut Rounding::exact())?.y;
        assert_eq!(values(&y.narrow(2, 0, 12)?)?, values(&inputs.x.narrow(2, 0, 12)?)?,);
        let there = Inputs { x: y.clone(), inverse: true, ..inputs.clone() };
        let back = forward(&there, &mut Rounding::exact())?.y;
        // Two rotations, and cos^2 + sin^2 is 1 within the rounding of both: 2 (3 + 2) u per pair.
        let allowed = ((bound(&inputs.x)? + bound(&y)?)? * 2.0)?;
        assert_within("round trip", &back, &inputs.x, &allowed);
        Ok(())
    }

    #[test]
    fn positions_outside_of_the_table_give_nan_and_keep_the_leading_channels() -> Result<()> {
        let (mut inputs, dy) = case(6, false);
        inputs.positions = Some(vec![8, -1, i64::MIN, i64::MAX, 7]);
        for precision in [Precision::Exact, Precision::Working { seed: 3 }] {
            let rounding = &mut Rounding::new(precision);
            let y = forward(&inputs, rounding)?.y;
            let dx = backward(&inputs, &dy, rounding)?.dx;
            for (result, source) in [(y, &inputs.x), (dx, &dy)] {
                let outside = values(&result.narrow(0, 0, 4)?.narrow(2, 12, 8)?)?;
                assert!(outside.iter().all(|v| v.is_nan()));
                let inside = values(&result.narrow(0, 4, 1)?)?;
                assert!(inside.iter().all(|v| v.is_finite()));
                assert_eq!(values(&result.narrow(2, 0, 12)?)?, values(&source.narrow(2, 0, 12)?)?);
            }
        }
        let automatic =
            values(&backward_autograd(&inputs, &dy)?.dx.narrow(0, 0, 4)?.narrow(2, 12, 8)?)?;
        assert!(automatic.iter().all(|v| v.is_nan()));
        Ok(())
    }

    #[test]
    fn absent_positions_mean_row_t_for_token_t() -> Result<()> {
        let (inputs, _) = case(7, false);
        let listed = Inputs { positions: Some(vec![0, 1, 2, 3, 4]), ..inputs.clone() };
        let absent = Inputs { positions: None, ..inputs };
        let exact = &mut Rounding::exact();
        assert_eq!(values(&forward(&listed, exact)?.y)?, values(&forward(&absent, exact)?.y)?);
        Ok(())
    }

    #[test]
    fn empty_tensors_and_empty_tables_are_legal() -> Result<()> {
        let (inputs, _) = case(8, false);
        let exact = &mut Rounding::exact();
        let nobody = Inputs { x: f64_tensor(&[], &[0, 3, 20]), positions: None, ..inputs.clone() };
        assert_eq!(forward(&nobody, exact)?.y.dims(), [0, 3, 20]);
        assert_eq!(backward_autograd(&nobody, &nobody.x)?.dx.dims(), [0, 3, 20]);
        let bare = f64_tensor(&[], &[0, 4]);
        let no_table = Inputs { cos: bare.clone(), sin: bare, ..inputs.clone() };
        let y = forward(&no_table, exact)?.y;
        assert!(values(&y.narrow(2, 12, 8)?)?.iter().all(|v| v.is_nan()));
        Ok(())
    }

    #[test]
    fn bad_inputs_are_refused_by_name() {
        let (inputs, dy) = case(9, false);
        let exact = &mut Rounding::exact();
        let wide = f64_tensor(&[0.0; 22], &[2, 11]);
        let too_wide = Inputs { cos: wide.clone(), sin: wide, ..inputs.clone() };
        assert!(matches!(
            forward(&too_wide, exact),
            Err(Error::Value { argument: "rope_dim", .. })
        ));
        let short = Inputs { positions: Some(vec![0]), ..inputs.clone() };
        assert!(matches!(forward(&short, exact), Err(Error::Shape { argument: "positions", .. })));
        let uneven = Inputs { sin: f64_tensor(&[0.0], &[1, 1]), ..inputs.clone() };
        assert!(matches!(forward(&uneven, exact), Err(Error::Shape { argument: "sin", .. })));
        let flat = dy.flatten_all().unwrap();
        assert!(matches!(
            backward(&inputs, &flat, exact),
            Err(Error::Shape { argument: "dy", .. })
        ));
        let odd = YarnParameters { rope_dim: 3, ..YarnParameters::main() };
        assert!(matches!(inv_freq_f32(&odd), Err(Error::Value { argument: "rope_dim", .. })));
        let nan = YarnParameters { theta: f64::NAN, ..YarnParameters::main() };
        assert!(matches!(inv_freq_f32(&nan), Err(Error::Value { argument: "theta", .. })));
    }

    #[test]
    fn the_published_frequencies_come_out() -> Result<()> {
        let frequencies = inv_freq_f32(&YarnParameters::compress())?;
        assert_eq!(YarnParameters::compress().ramp_range(), (15.0, 25.0));
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
            let error = (f64::from(frequencies[pair]) - value).abs();
            // fp32 rounds theta^x, its reciprocal, and up to four products and sums of the ramp.
            let rounding = 6.0 * f64::from(f32::EPSILON) / 2.0 * value;
            assert!(error <= half_digit + rounding, "f[{pair}] = {}", frequencies[pair]);
        }
        Ok(())
    }

    #[test]
    fn golden_rotations_agree() -> Result<()> {
        for name in ["a", "full", "main", "real"] {
            let golden = Golden::load(&format!("rotary__{name}"));
            let (batch, heads, length, head_dim) = golden.raw("in.x").dims4()?;
            // [B, heads, S, head_dim] -> [B * S, heads, head_dim]
            let tokens = |t: Tensor| t.transpose(1, 2)?.reshape((batch * length, heads, head_dim));
            let positions = (0..batch * length).map(|token| (token % length) as i64).collect();
            let inputs = Inputs {
                x: tokens(golden.f64("in.x"))?,
                cos: golden.f64("mid.cos").squeeze(0)?,
                sin: golden.f64("mid.sin").squeeze(0)?,
                positions: Some(positions),
                inverse: false,
            };
            let backwards = Inputs { inverse: true, ..inputs.clone() };
            let exact = &mut Rounding::exact();
            let mut dx = inputs.x.zeros_like()?;
            let mut dx_bound = inputs.x.zeros_like()?;
            for (direction, inputs) in [("forward", &inputs), ("inverse", &backwards)] {
                let key = format!("out.{direction}");
                let allowed = (bound(&inputs.x)? + tokens(golden.storage_error(&key))?)?;
                let y = forward(inputs, exact)?.y;
                assert_within(&key, &y, &tokens(golden.f64(&key))?, &allowed);
                let dy = tokens(golden.f64(&format!("gout.{direction}")))?;
                dx = (dx + backward(inputs, &dy, exact)?.dx)?;
                // The sum of the two gradients rounds once more.
                dx_bound = (dx_bound + (bound(&dy)? * 2.0)?)?;
            }
            let allowed = (dx_bound + tokens(golden.storage_error("grad.in.x"))?)?;
            assert_within("grad.in.x", &dx, &tokens(golden.f64("grad.in.x"))?, &allowed);
        }
        Ok(())
    }

    /// The rope parameters that the golden files name in their headers.
    fn golden_parameters() -> [(&'static str, &'static str, YarnParameters); 6] {
        let plain = |theta, rope_dim| YarnParameters {
            theta,
            rope_dim,
            factor: None,
            ..YarnParameters::main()
        };
        let small = YarnParameters {
            rope_dim: 8,
            factor: Some(4.0),
            original_max_position: 64.0,
            ..YarnParameters::compress()
        };
        [
            ("plain", "main", plain(10_000.0, 16)),
            ("plain", "compress", plain(160_000.0, 16)),
            ("real", "main", YarnParameters::main()),
            ("real", "compress", YarnParameters::compress()),
            ("small_yarn", "main", plain(10_000.0, 8)),
            ("small_yarn", "compress", small),
        ]
    }

    #[test]
    fn golden_inverse_frequencies_are_bit_equal() -> Result<()> {
        for (file, kind, parameters) in golden_parameters() {
            let golden = Golden::load(&format!("rope_table__{file}"));
            let expected: Vec<f32> = golden.raw(&format!("out.{kind}.inv_freq")).to_vec1()?;
            assert_eq!(inv_freq_f32(&parameters)?, expected, "{file} {kind}");
        }
        Ok(())
    }

    #[test]
    fn golden_tables_agree() -> Result<()> {
        let half_ulp = f64::from(f32::EPSILON) / 2.0;
        for (file, kind, parameters) in golden_parameters() {
            let golden = Golden::load(&format!("rope_table__{file}"));
            let positions: Vec<i64> = golden.raw("in.positions").flatten_all()?.to_vec1()?;
            let inv_freq = inv_freq_f32(&parameters)?;
            let (cos, sin) = table(&inv_freq, &positions)?;
            let angle: Vec<f64> = positions
                .iter()
                .flat_map(|&p| inv_freq.iter().map(move |&f| (p as f64 * f64::from(f)).abs()))
                .collect();
            let angle = f64_tensor(&angle, cos.dims());
            for (name, ours) in [("cos", &cos), ("sin", &sin)] {
                // f32 table of the same f32 angle: a library cosine is within one unit in the last
                // place.
                let stored = golden.f64(&format!("out.{kind}.{name}")).squeeze(0)?;
                let unit_in_last_place = (ours.abs()? * (2.0 * half_ulp))?;
                assert_within(name, ours, &stored, &unit_in_last_place);
                // f64 table of the unrounded angle: off by the rounding of the angle, because
                // slopes are at most 1.
                let unrounded = golden.f64(&format!("mid.{kind}.{name}64")).squeeze(0)?;
                let allowed = ((&angle * half_ulp)? + UNIT_ROUNDOFF * 4.0)?;
                assert_within(name, ours, &unrounded, &allowed);
            }
        }
        Ok(())
    }
}
