//! The residual streams that enter the MTP module (inference 12.2), of the streams after the last
//! layer of the main model and the embedding of the next token:
//!
//! ```text
//! e        = enorm embedding e_rstd             over all channels of a token      [`crate::projections::rms_norm`]
//! hh[s]    = hnorm streams[s] h_rstd[s]         over all channels of a stream
//! e_y      = e e_proj^T                         of a token                        [`crate::projections::linear`]
//! h_y[s]   = hh[s] h_proj^T                     of every stream s
//! out[s]   = e_y + h_y[s]                                                         [`crate::experts::moe_reduce`]
//! ```
//!
//! and the gradients of all steps, last step first; that of e_y is the sum over the streams
//! ([`crate::experts::moe_expand`]). [`forward_quantized`] is the same for FP8 weights, whose
//! operands e and hh are quantized in groups of 128.
//!
//! # Rounding points
//!
//! Those of the steps; e, hh, e_y, h_y and their gradients are stored in bf16 between them. Codes
//! of e and hh follow from norms whose order the kernel decides, so their rounding is a rounding
//! point.

use candle_core::{Device, Tensor};

use crate::error::{Result, require_that};
use crate::experts::{moe_expand, moe_reduce};
use crate::format::Format;
use crate::formats::quantize_fp8::{self, Group};
use crate::formats::scale_layout::ScaleLayout;
use crate::named::Named;
use crate::precision::Rounding;
use crate::projections::linear::{self, BLOCK};
use crate::projections::rms_norm;
use crate::quantize::{ScaleType, simulated};
use crate::streams::mhc_post::NUM_STREAMS;

/// One of the two operands: its norm and its projection.
struct Side {
    x: &'static str,
    norm: &'static str,
    projection: &'static str,
    codes: &'static str,
    scales: &'static str,
}

const OF_EMBEDDING: Side = Side {
    x: "embedding",
    norm: "enorm",
    projection: "e_proj",
    codes: "e_proj_codes",
    scales: "e_proj_scales",
};
const OF_STREAMS: Side = Side {
    x: "streams",
    norm: "hnorm",
    projection: "h_proj",
    codes: "h_proj_codes",
    scales: "h_proj_scales",
};

/// The normed rows of a side and their product, before and after the store.
struct Rows {
    normed: Tensor,
    rstd: Tensor,
    normed_stored: Tensor,
    y: Tensor,
}

impl Side {
    fn norm_inputs(&self, inputs: &Named) -> Result<Named> {
        let (x, weight) = (inputs.tensor(self.x)?, inputs.tensor(self.norm)?);
        let width = weight.elem_count();
        let x = x.reshape((x.elem_count() / width.max(1), width))?;
        Ok(Named::new().with("x", x).with("weight", weight.clone()))
    }

    fn product(&self, normed: &Tensor, inputs: &Named) -> Result<Named> {
        let w = inputs.tensor(self.projection)?.clone();
        Ok(Named::new().with("x", normed.clone()).with("w", w))
    }

    fn rows(
        &self,
        inputs: &Named,
        eps: f64,
        rounding: &mut Rounding,
        product: impl FnOnce(&Tensor, &mut Rounding) -> Result<Tensor>,
    ) -> Result<Rows> {
        let norm = rms_norm::forward(&self.norm_inputs(inputs)?, eps, rounding)?;
        let (normed, rstd) = (norm.tensor("y")?.clone(), norm.tensor("rstd")?.clone());
        let normed_stored = rounding.bf16(&normed)?;
        let y = product(&normed_stored, rounding)?;
        Ok(Rows { normed, rstd, normed_stored, y })
    }

    fn rows_of_numbers(&self, inputs: &Named, eps: f64, rounding: &mut Rounding) -> Result<Rows> {
        self.rows(inputs, eps, rounding, |normed, rounding| {
            let y = linear::forward(&self.product(normed, inputs)?, rounding)?;
            Ok(y.tensor("y")?.clone())
        })
    }

    fn rows_of_codes(&self, inputs: &Named, eps: f64, rounding: &mut Rounding) -> Result<Rows> {
        let of_weights = quantize_fp8::Options {
            group: Group::Square,
            scale: ScaleType::E8m0,
            layout: ScaleLayout::Plain,
        };
        let w = Named::new()
            .with("codes", inputs.tensor(self.codes)?.clone())
            .with("scales", inputs.tensor(self.scales)?.clone());
        let w = quantize_fp8::dequantize(&w, of_weights, Format::F32)?.tensor("y")?.clone();
        self.rows(inputs, eps, rounding, |normed, rounding| {
            let x = simulated(normed, BLOCK, Format::E4M3, rounding)?;
            let product = linear::forward(&Named::new().with("x", x).with("w", w), rounding)?;
            Ok(product.tensor("y")?.clone())
        })
    }

    /// The gradients of the projection, of the normed rows, of the norm's weight and of its rows,
    /// from that of the product, as stored.
    fn backward(
        &self,
        inputs: &Named,
        rows: &Rows,
        dy: Tensor,
        eps: f64,
        rounding: &mut Rounding,
    ) -> Result<[Tensor; 4]> {
        let product = self.product(&rows.normed_stored, inputs)?.with("dy", dy);
        let product = linear::backward(&product, rounding)?;
        let dnormed = product.tensor("dx")?.clone();
        let norm = self.norm_inputs(inputs)?.with("dy", rounding.bf16(&dnormed)?);
        let norm = rms_norm::backward(&norm, eps, rounding)?;
        Ok([
            product.tensor("dw")?.clone(),
            dnormed,
            norm.tensor("dweight")?.clone(),
            norm.tensor("dx")?.clone(),
        ])
    }
}

/// The tokens and the channels of a call.
fn extents(inputs: &Named) -> Result<[usize; 2]> {
    let tensors: [(&[&'static str], &[&'static str]); 5] = [
        (&["embedding"], &["num_tokens", "hidden_size"]),
        (&["streams", "dout"], &["num_tokens", "stream", "hidden_size"]),
        (&["enorm", "hnorm"], &["hidden_size"]),
        (&["e_proj", "h_proj"], &["out_features", "hidden_size"]),
        (&["e_proj_codes", "h_proj_codes"], &["out_features", "hidden_size"]),
    ];
    let [num_tokens, streams, hidden_size, out_features] =
        inputs.extents(["num_tokens", "stream", "hidden_size", "out_features"], &tensors)?;
    require_that("stream", streams, streams == NUM_STREAMS, "a token has four streams")?;
    let square = out_features == hidden_size;
    require_that("out_features", out_features, square, "a projection keeps the hidden size")?;
    Ok([num_tokens, hidden_size])
}

/// The token of each row of the streams, as the slots of [`moe_reduce`].
fn tokens_of_rows(num_tokens: usize) -> Result<Named> {
    let tokens = (0..num_tokens * NUM_STREAMS).map(|row| (row / NUM_STREAMS) as f64).collect();
    let slots = Tensor::from_vec::<_, f64>(tokens, (num_tokens * NUM_STREAMS, 1), &Device::Cpu)?;
    let used = Tensor::zeros(num_tokens, candle_core::DType::F64, &Device::Cpu)?;
    Ok(Named::new().with("token_topk_to_pos", slots).with("pos_to_token", used))
}

/// The rows of the streams of each token, as the slots of [`moe_expand`].
fn rows_of_tokens(num_tokens: usize) -> Result<Named> {
    let rows: Vec<f64> = (0..num_tokens * NUM_STREAMS).map(|row| row as f64).collect();
    let slots = Tensor::from_vec(rows, (num_tokens, NUM_STREAMS), &Device::Cpu)?;
    let used = Tensor::zeros(num_tokens * NUM_STREAMS, candle_core::DType::F64, &Device::Cpu)?;
    Ok(Named::new().with("token_topk_to_pos", slots).with("pos_to_token", used))
}

/// The outputs, including the last step.
fn outputs(
    [num_tokens, hidden_size]: [usize; 2],
    e: Rows,
    h: Rows,
    rounding: &mut Rounding,
) -> Result<Named> {
    let streams = (num_tokens, NUM_STREAMS, hidden_size);
    let sum = tokens_of_rows(num_tokens)?
        .with("y", rounding.bf16(&e.y)?)
        .with("shared", rounding.bf16(&h.y)?);
    let out = moe_reduce::forward(&sum, rounding)?.tensor("out")?.reshape(streams)?;
    let named = Named::new().with("e", e.normed).with("e_rstd", e.rstd).with("e_y", e.y);
    let named = named
        .with("hh", h.normed.reshape(streams)?)
        .with("h_rstd", h.rstd.reshape((num_tokens, NUM_STREAMS))?);
    Ok(named.with("h_y", h.y.reshape(streams)?).with("out", out))
}

/// `e` and `e_y` `[num_tokens, hidden_size]`, `hh`, `h_y` and `out` `[num_tokens, 4, hidden_size]`,
/// stored in bf16, `e_rstd` `[num_tokens]` and `h_rstd` `[num_tokens, 4]`, stored in f32, for these
/// inputs:
///
/// - `embedding` `[num_tokens, hidden_size]`, stored in bf16, of the token after each;
/// - `streams` `[num_tokens, 4, hidden_size]`, stored in bf16, after the last layer;
/// - `enorm` and `hnorm` `[hidden_size]`, stored in f32;
/// - `e_proj` and `h_proj` `[hidden_size, hidden_size]`, stored in bf16.
///
/// # Errors
/// Tensors whose shapes do not match.
pub fn forward(inputs: &Named, eps: f64, rounding: &mut Rounding) -> Result<Named> {
    let extents = extents(inputs)?;
    let e = OF_EMBEDDING.rows_of_numbers(inputs, eps, rounding)?;
    let h = OF_STREAMS.rows_of_numbers(inputs, eps, rounding)?;
    outputs(extents, e, h, rounding)
}

/// The outputs of [`forward`]. Instead of `e_proj` and `h_proj` the inputs have, for each, as the
/// values of bytes: `.._codes`, e4m3, and `.._scales`, e8m0, one for each block of 128 by 128.
///
/// # Errors
/// As [`forward`].
pub fn forward_quantized(inputs: &Named, eps: f64, rounding: &mut Rounding) -> Result<Named> {
    let extents = extents(inputs)?;
    let e = OF_EMBEDDING.rows_of_codes(inputs, eps, rounding)?;
    let h = OF_STREAMS.rows_of_codes(inputs, eps, rounding)?;
    outputs(extents, e, h, rounding)
}

/// `dembedding` and `dstreams`, stored in bf16, `de_proj`, `dh_proj`, `denorm` and `dhnorm`, stored
/// in f32, and the gradients between the steps, `de_y`, `de` and `dhh`, stored in bf16. The inputs
/// are those of [`forward`] and `dout`, of the shape of `out`.
///
/// # Errors
/// As [`forward`].
pub fn backward(inputs: &Named, eps: f64, rounding: &mut Rounding) -> Result<Named> {
    let [num_tokens, hidden_size] = extents(inputs)?;
    let streams = (num_tokens, NUM_STREAMS, hidden_size);
    let e = OF_EMBEDDING.rows_of_numbers(inputs, eps, rounding)?;
    let h = OF_STREAMS.rows_of_numbers(inputs, eps, rounding)?;
    let dout = inputs.tensor("dout")?.reshape((num_tokens * NUM_STREAMS, hidden_size))?;
    let sum = rows_of_tokens(num_tokens)?.with("dy", dout.clone());
    let de_y = moe_expand::backward(&sum, rounding)?.tensor("dx")?.clone();
    let stored = rounding.bf16(&de_y)?;
    let [de_proj, de, denorm, dembedding] =
        OF_EMBEDDING.backward(inputs, &e, stored, eps, rounding)?;
    let [dh_proj, dhh, dhnorm, dstreams] = OF_STREAMS.backward(inputs, &h, dout, eps, rounding)?;
    let named = Named::new().with("de_y", de_y).with("de_proj", de_proj).with("de", de);
    let named = named.with("denorm", denorm).with("dembedding", dembedding);
    let named = named.with("dh_proj", dh_proj).with("dhh", dhh.reshape(streams)?);
    Ok(named.with("dhnorm", dhnorm).with("dstreams", dstreams.reshape(streams)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::precision::values;
    use crate::testing::{
        Draw, UNIT_ROUNDOFF, assert_gradients_are_automatic, assert_within, differentiated,
    };

    const EPS: f64 = 1e-6;

    fn case(num_tokens: usize, hidden_size: usize) -> Named {
        let mut draw = Draw::new(8);
        let streams = [num_tokens, NUM_STREAMS, hidden_size];
        let square = [hidden_size, hidden_size];
        let named = Named::new()
            .with("embedding", draw.bf16(&[num_tokens, hidden_size], 0.02))
            .with("streams", draw.bf16(&streams, 3.0));
        let named = named
            .with("enorm", draw.bf16(&[hidden_size], 1.0))
            .with("hnorm", draw.bf16(&[hidden_size], 1.0));
        let named =
            named.with("e_proj", draw.bf16(&square, 0.4)).with("h_proj", draw.bf16(&square, 0.4));
        named.with("dout", draw.bf16(&streams, 1.0))
    }

    fn out(named: &Named) -> Result<Tensor> {
        Ok(forward(named, EPS, &mut Rounding::exact())?.tensor("out")?.clone())
    }

    #[test]
    fn written_gradients_equal_those_of_automatic_differentiation() -> Result<()> {
        let named = case(3, 7);
        let gradients = backward(&named, EPS, &mut Rounding::exact())?;
        let of = [
            ("embedding", "dembedding"),
            ("streams", "dstreams"),
            ("enorm", "denorm"),
            ("hnorm", "dhnorm"),
            ("e_proj", "de_proj"),
            ("h_proj", "dh_proj"),
        ];
        let objective = |inputs: &Named| Ok((out(inputs)? * inputs.tensor("dout")?)?);
        let automatic = differentiated(&named, &of, objective)?;
        assert_gradients_are_automatic(&gradients, &automatic, &of)
    }

    /// Written from the formulas of inference 12.2, without the steps' oracles.
    #[test]
    fn every_stream_is_normed_by_itself_and_has_the_product_of_the_embedding() -> Result<()> {
        let (tokens, width) = (2, 5);
        let named = case(tokens, width);
        let of = |name: &'static str| values(named.tensor(name)?);
        let (embedding, streams) = (of("embedding")?, of("streams")?);
        let row = |x: &[f64], norm: &[f64], w: &[f64]| -> Vec<f64> {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / width as f64;
            let normed = x.iter().zip(norm).map(|(x, n)| n * x / (mean + EPS).sqrt());
            let normed: Vec<f64> = normed.collect();
            w.chunks(width).map(|w| w.iter().zip(&normed).map(|(w, x)| w * x).sum()).collect()
        };
        let (e_proj, h_proj) = (of("e_proj")?, of("h_proj")?);
        let (enorm, hnorm) = (of("enorm")?, of("hnorm")?);
        let found = values(&out(&named)?)?;
        for (at, stream) in streams.chunks(width).enumerate() {
            let token = at / NUM_STREAMS;
            let e = row(&embedding[token * width..][..width], &enorm, &e_proj);
            let h = row(stream, &hnorm, &h_proj);
            for (channel, (e, h)) in e.iter().zip(&h).enumerate() {
                let found = found[at * width + channel];
                // Some ten terms, each with a few roundings, of magnitude up to 10.
                assert!((found - e - h).abs() < 1e3 * UNIT_ROUNDOFF, "{found} {e} {h}");
            }
        }
        Ok(())
    }

    #[test]
    fn codes_give_what_their_decoded_numbers_give() -> Result<()> {
        let named = case(2, 130);
        let options = quantize_fp8::Options {
            group: Group::Square,
            scale: ScaleType::E8m0,
            layout: ScaleLayout::Plain,
        };
        let coded = |name: &'static str| {
            let x = Named::new().with("x", named.tensor(name)?.clone());
            quantize_fp8::quantize(&x, options)
        };
        let (mut codes, mut numbers) = (named.clone(), named.clone());
        for (name, of_codes, of_scales) in [
            ("e_proj", "e_proj_codes", "e_proj_scales"),
            ("h_proj", "h_proj_codes", "h_proj_scales"),
        ] {
            let quantized = coded(name)?;
            let decoded = quantize_fp8::dequantize(&quantized, options, Format::F32)?;
            numbers = numbers.with(name, decoded.tensor("y")?.clone());
            codes = codes.with(of_codes, quantized.tensor("codes")?.clone());
            codes = codes.with(of_scales, quantized.tensor("scales")?.clone());
        }
        let found = forward_quantized(&codes, EPS, &mut Rounding::exact())?;
        let expected = forward(&numbers, EPS, &mut Rounding::exact())?;
        let bound = (expected.tensor("out")?.ones_like()? * (4096.0 * UNIT_ROUNDOFF))?;
        assert_within("out", found.tensor("out")?, expected.tensor("out")?, &bound);
        Ok(())
    }

    #[test]
    fn tensors_whose_shapes_do_not_match_are_rejected() {
        let named = case(2, 6);
        let mut draw = Draw::new(3);
        let others: [(&'static str, &[usize]); 4] =
            [("streams", &[2, 3, 6]), ("embedding", &[3, 6]), ("e_proj", &[5, 6]), ("hnorm", &[7])];
        for (name, shape) in others {
            let other = named.clone().with(name, draw.bf16(shape, 1.0));
            assert!(forward(&other, EPS, &mut Rounding::exact()).is_err(), "{name} {shape:?}");
        }
    }
}
