//! The query projection of the attention (inference 5.1, training 14), in the steps of a layer:
//!
//! ```text
//! q_a = h wq_a^T                            [`crate::projections::linear`]
//! qr  = q_norm q_a rstd                     over all channels of a token; the indexer reads it, too   [`crate::projections::rms_norm`]
//! q_b = qr wq_b^T                           [`crate::projections::linear`], heads side by side
//! q   = q_b over the root mean square of its head, rotated by position
//!                                           [`crate::projections::query_norm_rope`]
//! ```
//!
//! and the gradients of all steps, last step first. [`forward_quantized`] is the same for FP8
//! weights, whose operands h and qr are quantized in groups of 128.
//!
//! # Rounding points
//!
//! Those of the steps; q_a, qr, q_b and their gradients are stored in bf16 between them. Codes of h
//! have one value in all runs. Codes of qr follow from sums whose order the kernel decides, so
//! their rounding is a rounding point.

use candle_core::Tensor;

use crate::error::{Result, require_that};
use crate::format::Format;
use crate::formats::quantize_fp8::{self, Group};
use crate::formats::scale_layout::ScaleLayout;
use crate::named::Named;
use crate::precision::{Accumulator, Rounding};
use crate::projections::linear::{self, BLOCK, Weights};
use crate::quantize::{ScaleType, simulated};
use crate::{projections::query_norm_rope, projections::rms_norm, projections::rope};

/// The rotation of the queries and the epsilon of the norms: tables `[table_rows, rope_dim / 2]`,
/// stored in f32, and the row of each token.
#[derive(Debug, Clone)]
pub struct Turn {
    /// cos.
    pub cos: Tensor,
    /// sin.
    pub sin: Tensor,
    /// Table row of each token; absent when token t uses row t.
    pub positions: Option<Vec<i64>>,
    /// Query heads.
    pub num_heads: usize,
    /// Epsilon of both norms.
    pub eps: f64,
}

impl Turn {
    fn of(&self, q_b: &Tensor) -> Result<rope::Inputs> {
        let (num_tokens, width) = q_b.dims2()?;
        let divides = self.num_heads > 0 && width.is_multiple_of(self.num_heads);
        require_that("num_heads", self.num_heads, divides, "heads have as many channels each")?;
        let x = q_b.reshape((num_tokens, self.num_heads, width / self.num_heads))?;
        let (cos, sin, positions) = (self.cos.clone(), self.sin.clone(), self.positions.clone());
        Ok(rope::Inputs { x, cos, sin, positions, inverse: false })
    }
}

/// The results of the steps, before and after the store.
struct Run {
    q_a: Tensor,
    qr: Tensor,
    rstd: Tensor,
    q_b: Tensor,
    q_a_stored: Tensor,
    qr_stored: Tensor,
}

fn norm_inputs(q_a: &Tensor, inputs: &Named) -> Result<Named> {
    Ok(Named::new().with("x", q_a.clone()).with("weight", inputs.tensor("q_norm")?.clone()))
}

fn linear_inputs(x: &Tensor, w: &Tensor) -> Named {
    Named::new().with("x", x.clone()).with("w", w.clone())
}

/// The steps after q_a; `second` computes the second product.
fn run(
    q_a: Tensor,
    turn: &Turn,
    inputs: &Named,
    rounding: &mut Rounding,
    second: impl FnOnce(&Tensor, &mut Rounding) -> Result<Tensor>,
) -> Result<Run> {
    let q_a_stored = rounding.bf16(&q_a)?;
    let norm = rms_norm::forward(&norm_inputs(&q_a_stored, inputs)?, turn.eps, rounding)?;
    let (qr, rstd) = (norm.tensor("y")?.clone(), norm.tensor("rstd")?.clone());
    let qr_stored = rounding.bf16(&qr)?;
    let q_b = second(&qr_stored, rounding)?;
    Ok(Run { q_a, qr, rstd, q_b, q_a_stored, qr_stored })
}

/// The outputs, including the last step.
fn outputs(run: Run, turn: &Turn, rounding: &mut Rounding) -> Result<Named> {
    let heads = turn.of(&rounding.bf16(&run.q_b)?)?;
    let q = query_norm_rope::forward(&heads, turn.eps, rounding)?;
    let named = Named::new()
        .with("q_a", run.q_a)
        .with("qr", run.qr)
        .with("qr_rstd", run.rstd)
        .with("q_b", run.q_b);
    Ok(named.with("q", q.tensor("y")?.flatten_from(1)?).with("q_rstd", q.tensor("rstd")?.clone()))
}

/// `q_a` and `qr` `[num_tokens, q_lora_rank]`, `q_b` and `q` `[num_tokens, num_heads * head_dim]`,
/// stored in bf16, `qr_rstd` `[num_tokens]` and `q_rstd` `[num_tokens, num_heads]`, stored in f32,
/// for these inputs:
///
/// - `h` `[num_tokens, hidden_size]`, `wq_a` `[q_lora_rank, hidden_size]` and `wq_b` `[num_heads *
///   head_dim, q_lora_rank]`, stored in bf16;
/// - `q_norm` `[q_lora_rank]`, stored in f32.
///
/// # Errors
/// Tensors whose shapes do not match.
pub fn forward(turn: &Turn, inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    let run = run_of_numbers(turn, inputs, rounding)?;
    outputs(run, turn, rounding)
}

fn run_of_numbers(turn: &Turn, inputs: &Named, rounding: &mut Rounding) -> Result<Run> {
    let first =
        linear::forward(&linear_inputs(inputs.tensor("h")?, inputs.tensor("wq_a")?), rounding)?;
    let wq_b = inputs.tensor("wq_b")?;
    run(first.tensor("y")?.clone(), turn, inputs, rounding, |qr, rounding| {
        Ok(linear::forward(&linear_inputs(qr, wq_b), rounding)?.tensor("y")?.clone())
    })
}

/// `dh`, stored in bf16, `dwq_a`, `dwq_b` and `dq_norm`, stored in f32, and the gradients between
/// the steps, `dq_b`, `dqr` and `dq_a`, stored in bf16. The inputs are those of [`forward`] and
/// `dq`, of the shape of `q`.
///
/// # Errors
/// As [`forward`].
pub fn backward(turn: &Turn, inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    let run = run_of_numbers(turn, inputs, rounding)?;
    let heads = turn.of(&rounding.bf16(&run.q_b)?)?;
    let dq = inputs.tensor("dq")?.reshape(heads.x.shape())?;
    let dq_b = query_norm_rope::backward(&heads, &dq, turn.eps, rounding)?
        .tensor("dx")?
        .flatten_from(1)?;
    let second =
        linear_inputs(&run.qr_stored, inputs.tensor("wq_b")?).with("dy", rounding.bf16(&dq_b)?);
    let second = linear::backward(&second, rounding)?;
    let dqr = second.tensor("dx")?.clone();
    let norm = norm_inputs(&run.q_a_stored, inputs)?.with("dy", rounding.bf16(&dqr)?);
    let norm = rms_norm::backward(&norm, turn.eps, rounding)?;
    let dq_a = norm.tensor("dx")?.clone();
    let first = linear_inputs(inputs.tensor("h")?, inputs.tensor("wq_a")?)
        .with("dy", rounding.bf16(&dq_a)?);
    let first = linear::backward(&first, rounding)?;
    let named = Named::new()
        .with("dq_b", dq_b)
        .with("dwq_b", second.tensor("dw")?.clone())
        .with("dqr", dqr);
    let named = named.with("dq_norm", norm.tensor("dweight")?.clone()).with("dq_a", dq_a);
    Ok(named.with("dwq_a", first.tensor("dw")?.clone()).with("dh", first.tensor("dx")?.clone()))
}

/// The outputs of [`forward`] and `h_codes` and `h_scales`, e4m3 and e8m0, as in
/// [`quantize_fp8::quantize`]. The inputs are those of [`forward`]. Instead of `wq_a` and `wq_b`
/// they have, for each, as the values of bytes: `.._codes`, e4m3, and `.._scales`, e8m0, one for
/// each block of 128 by 128.
///
/// # Errors
/// As [`forward`].
pub fn forward_quantized(turn: &Turn, inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    let of_rows = quantize_fp8::Options {
        group: Group::Row(BLOCK),
        scale: ScaleType::E8m0,
        layout: ScaleLayout::Plain,
    };
    let of_weights = quantize_fp8::Options { group: Group::Square, ..of_rows };
    let h = quantize_fp8::quantize(&Named::new().with("x", inputs.tensor("h")?.clone()), of_rows)?;
    let (codes, scales) = (h.tensor("codes")?.clone(), h.tensor("scales")?.clone());
    let first =
        linear_inputs(&codes, inputs.tensor("wq_a_codes")?).with("x_scales", scales.clone());
    let first = first.with("w_scales", inputs.tensor("wq_a_scales")?.clone());
    let quantized = linear::Quantized {
        weights: Weights::Fp8,
        group: BLOCK,
        bytes: true,
        layout: ScaleLayout::Plain,
        accumulator: Accumulator::F32,
    };
    let q_a = linear::forward_quantized(&first, &quantized, rounding)?.tensor("y")?.clone();
    let wq_b = Named::new().with("codes", inputs.tensor("wq_b_codes")?.clone());
    let wq_b = wq_b.with("scales", inputs.tensor("wq_b_scales")?.clone());
    let wq_b = quantize_fp8::dequantize(&wq_b, of_weights, Format::F32)?.tensor("y")?.clone();
    let run = run(q_a, turn, inputs, rounding, |qr, rounding| {
        let qr = simulated(qr, BLOCK, Format::E4M3, rounding)?;
        Ok(linear::forward(&linear_inputs(&qr, &wq_b), rounding)?.tensor("y")?.clone())
    })?;
    Ok(outputs(run, turn, rounding)?.with("h_codes", codes).with("h_scales", scales))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::precision::values;
    use crate::testing::{
        Draw, UNIT_ROUNDOFF, assert_gradients_are_automatic, assert_within, differentiated,
        f64_tensor,
    };

    fn case(num_tokens: usize) -> (Turn, Named) {
        let mut draw = Draw::new(8);
        let (sin, cos): (Vec<f64>, Vec<f64>) =
            (0..6).map(|angle| (0.8 * f64::from(angle)).sin_cos()).unzip();
        let (cos, sin) = (f64_tensor(&cos, &[3, 2]), f64_tensor(&sin, &[3, 2]));
        let positions = Some((0..num_tokens as i64).map(|token| (token + 1) % 3).collect());
        let named = Named::new()
            .with("h", draw.bf16(&[num_tokens, 9], 1.0))
            .with("wq_a", draw.bf16(&[5, 9], 0.4));
        let named =
            named.with("q_norm", draw.bf16(&[5], 1.0)).with("wq_b", draw.bf16(&[12, 5], 0.5));
        let named = named.with("dq", draw.bf16(&[num_tokens, 12], 1.0));
        (Turn { cos, sin, positions, num_heads: 2, eps: 1e-6 }, named)
    }

    #[test]
    fn written_gradients_equal_those_of_automatic_differentiation() -> Result<()> {
        let (turn, named) = case(3);
        let gradients = backward(&turn, &named, &mut Rounding::exact())?;
        let of = [("h", "dh"), ("wq_a", "dwq_a"), ("q_norm", "dq_norm"), ("wq_b", "dwq_b")];
        let objective = |inputs: &Named| {
            Ok((forward(&turn, inputs, &mut Rounding::exact())?.tensor("q")?
                * inputs.tensor("dq")?)?)
        };
        let automatic = differentiated(&named, &of, objective)?;
        assert_gradients_are_automatic(&gradients, &automatic, &of)
    }

    #[test]
    fn rows_are_normed_once_and_every_head_once_more() -> Result<()> {
        let (turn, named) = case(2);
        let found = forward(&turn, &named, &mut Rounding::exact())?;
        let mean_squares = |name: &'static str, width: usize| -> Result<Vec<f64>> {
            let all = values(found.tensor(name)?)?;
            Ok(all
                .chunks(width)
                .map(|row| row.iter().map(|x| x * x).sum::<f64>() / width as f64)
                .collect())
        };
        // For a head it is m / (m + eps) = 1 - eps rstd^2, whatever the weights are; the rotation
        // does not change it. A head has six channels, with about ten roundings each.
        let roundings = 64.0 * UNIT_ROUNDOFF;
        let rstd = values(found.tensor("q_rstd")?)?;
        for (mean_square, rstd) in mean_squares("q", 6)?.into_iter().zip(&rstd) {
            assert!(
                (mean_square - 1.0 + turn.eps * rstd * rstd).abs() < roundings,
                "{mean_square}"
            );
        }
        let doubled = named.clone().with("wq_b", (named.tensor("wq_b")? * 2.0)?);
        let doubled = forward(&turn, &doubled, &mut Rounding::exact())?;
        let ratio: Vec<f64> = values(doubled.tensor("q_rstd")?)?;
        for (twice, once) in ratio.iter().zip(&rstd) {
            // 1 / twice^2 - eps is four times 1 / once^2 - eps.
            let (after, before) = (twice.powi(-2), once.powi(-2));
            assert!(
                (after - 4.0 * before + 3.0 * turn.eps).abs() < roundings * after,
                "{twice} {once}"
            );
        }
        assert!(forward(&Turn { num_heads: 5, ..turn }, &named, &mut Rounding::exact()).is_err());
        Ok(())
    }

    #[test]
    fn what_is_quantized_is_what_is_not_of_decoded_numbers() -> Result<()> {
        let (turn, named) = case(3);
        let options = |group| quantize_fp8::Options {
            group,
            scale: ScaleType::E8m0,
            layout: ScaleLayout::Plain,
        };
        let coded = |name: &'static str, group| {
            quantize_fp8::quantize(
                &Named::new().with("x", named.tensor(name)?.clone()),
                options(group),
            )
        };
        let decoded = |name, group| -> Result<Tensor> {
            let y = quantize_fp8::dequantize(&coded(name, group)?, options(group), Format::F32)?;
            Ok(y.tensor("y")?.clone())
        };
        let numbers = named.clone().with("h", decoded("h", Group::Row(BLOCK))?);
        let numbers = numbers.with("wq_a", decoded("wq_a", Group::Square)?);
        let numbers = numbers.with("wq_b", decoded("wq_b", Group::Square)?);
        let of = |name, part| -> Result<Tensor> {
            Ok(coded(name, Group::Square)?.tensor(part)?.clone())
        };
        let codes = named
            .clone()
            .with("wq_a_codes", of("wq_a", "codes")?)
            .with("wq_a_scales", of("wq_a", "scales")?);
        let codes = codes
            .with("wq_b_codes", of("wq_b", "codes")?)
            .with("wq_b_scales", of("wq_b", "scales")?);
        let expected = forward(&turn, &numbers, &mut Rounding::exact())?;
        let found = forward_quantized(&turn, &codes, &mut Rounding::exact())?;
        for name in ["q_a", "qr", "q"] {
            let bound = (expected.tensor(name)?.ones_like()? * (4096.0 * UNIT_ROUNDOFF))?;
            assert_within(name, found.tensor(name)?, expected.tensor(name)?, &bound);
        }
        Ok(())
    }
}
