//! The projection of K = V for the window (inference 5.1, training 14), in the steps of a layer:
//!
//! ```text
//! kv_a = h wkv^T                                                                               [`crate::projections::linear`]
//! n    = kv_norm kv_a rstd                                                                   [`crate::projections::rms_norm`]
//! kv   = n, last channels rotated by the position of its token       [`crate::projections::rope`]
//! ```
//!
//! and the gradients of all steps, last step first. In serving, the steps after the product are one
//! operator, which also quantizes and writes the cache: [`forward_cached`], with weights in bf16 or
//! FP8.
//!
//! # Rounding points
//!
//! Those of the steps; kv_a, n and their gradients are stored in bf16 between them. Codes of h have
//! one value in all runs.

use candle_core::Tensor;

use crate::cache::kv_cache::RowFormat;
use crate::error::Result;
use crate::formats::quantize_fp8::{self, Group};
use crate::formats::scale_layout::ScaleLayout;
use crate::named::Named;
use crate::precision::{Accumulator, Rounding};
use crate::projections::linear::{self, BLOCK, Weights};
use crate::quantize::ScaleType;
use crate::{cache::kv_norm_rope_write, projections::rms_norm, projections::rope};

/// The rotation of the rows and the epsilon of the norm: tables `[table_rows, rope_dim / 2]`,
/// stored in f32, and the row of each token.
#[derive(Debug, Clone)]
pub struct Turn {
    /// cos.
    pub cos: Tensor,
    /// sin.
    pub sin: Tensor,
    /// Table row of each token; absent when token t uses row t.
    pub positions: Option<Vec<i64>>,
    /// Epsilon of the norm.
    pub eps: f64,
}

impl Turn {
    /// The rows as heads, one per token.
    fn of(&self, rows: &Tensor) -> Result<rope::Inputs> {
        let (cos, sin, positions) = (self.cos.clone(), self.sin.clone(), self.positions.clone());
        Ok(rope::Inputs { x: rows.unsqueeze(1)?, cos, sin, positions, inverse: false })
    }
}

fn product(inputs: &Named) -> Result<Named> {
    Ok(Named::new().with("x", inputs.tensor("h")?.clone()).with("w", inputs.tensor("wkv")?.clone()))
}

fn norm_inputs(kv_a: &Tensor, inputs: &Named) -> Result<Named> {
    Ok(Named::new().with("x", kv_a.clone()).with("weight", inputs.tensor("kv_norm")?.clone()))
}

/// `kv_a`, `n` and `kv` `[num_tokens, head_dim]`, stored in bf16, and `rstd` `[num_tokens]`, stored
/// in f32, for these inputs:
///
/// - `h` `[num_tokens, hidden_size]` and `wkv` `[head_dim, hidden_size]`, stored in bf16;
/// - `kv_norm` `[head_dim]`, stored in f32.
///
/// # Errors
/// Tensors whose shapes do not match.
pub fn forward(turn: &Turn, inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    let kv_a = linear::forward(&product(inputs)?, rounding)?.tensor("y")?.clone();
    let norm =
        rms_norm::forward(&norm_inputs(&rounding.bf16(&kv_a)?, inputs)?, turn.eps, rounding)?;
    let n = norm.tensor("y")?.clone();
    let kv = rope::forward(&turn.of(&rounding.bf16(&n)?)?, rounding)?.y.squeeze(1)?;
    Ok(Named::new()
        .with("kv_a", kv_a)
        .with("n", n)
        .with("rstd", norm.tensor("rstd")?.clone())
        .with("kv", kv))
}

/// `dh`, stored in bf16, `dwkv` and `dkv_norm`, stored in f32, and the gradients between the steps,
/// `dn` and `dkv_a`, stored in bf16. The inputs are those of [`forward`] and `dkv`, of the shape of
/// `kv`.
///
/// # Errors
/// As [`forward`].
pub fn backward(turn: &Turn, inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    let kv_a = linear::forward(&product(inputs)?, rounding)?.tensor("y")?.clone();
    let kv_a = rounding.bf16(&kv_a)?;
    let dkv = inputs.tensor("dkv")?;
    let dn = rope::backward(&turn.of(dkv)?, &dkv.unsqueeze(1)?, rounding)?.dx.squeeze(1)?;
    let norm = norm_inputs(&kv_a, inputs)?.with("dy", rounding.bf16(&dn)?);
    let norm = rms_norm::backward(&norm, turn.eps, rounding)?;
    let dkv_a = norm.tensor("dx")?.clone();
    let first = linear::backward(&product(inputs)?.with("dy", rounding.bf16(&dkv_a)?), rounding)?;
    let named = Named::new()
        .with("dn", dn)
        .with("dkv_norm", norm.tensor("dweight")?.clone())
        .with("dkv_a", dkv_a);
    Ok(named.with("dwkv", first.tensor("dw")?.clone()).with("dh", first.tensor("dx")?.clone()))
}

/// `kv_a` and `kv`, both as in [`forward`]; kv is the decoded row of the cache
/// ([`kv_norm_rope_write::forward`]). With FP8 weights, also `h_codes` and `h_scales`. The inputs
/// are those of [`forward`], or instead of `wkv`, as the values of bytes: `wkv_codes`, e4m3, and
/// `wkv_scales`, e8m0, one for each block of 128 by 128.
///
/// # Errors
/// As [`forward`].
pub fn forward_cached(
    turn: &Turn,
    inputs: &Named,
    format: RowFormat,
    rounding: &mut Rounding,
) -> Result<Named> {
    let (outputs, kv_a) = match inputs.get("wkv") {
        Some(_) => {
            (Named::new(), linear::forward(&product(inputs)?, rounding)?.tensor("y")?.clone())
        }
        None => product_of_codes(inputs, rounding)?,
    };
    let rotation = turn.of(&rounding.bf16(&kv_a)?)?;
    let kv = kv_norm_rope_write::forward(
        &rotation,
        inputs.tensor("kv_norm")?,
        format,
        turn.eps,
        rounding,
    )?;
    Ok(outputs.with("kv_a", kv_a).with("kv", kv))
}

/// The codes of h, and their product with those of wkv.
fn product_of_codes(inputs: &Named, rounding: &mut Rounding) -> Result<(Named, Tensor)> {
    let of_rows = quantize_fp8::Options {
        group: Group::Row(BLOCK),
        scale: ScaleType::E8m0,
        layout: ScaleLayout::Plain,
    };
    let h = quantize_fp8::quantize(&Named::new().with("x", inputs.tensor("h")?.clone()), of_rows)?;
    let (codes, scales) = (h.tensor("codes")?.clone(), h.tensor("scales")?.clone());
    let named = Named::new().with("x", codes.clone()).with("x_scales", scales.clone());
    let named = named.with("w", inputs.tensor("wkv_codes")?.clone());
    let named = named.with("w_scales", inputs.tensor("wkv_scales")?.clone());
    let (weights, layout, accumulator) = (Weights::Fp8, ScaleLayout::Plain, Accumulator::F32);
    let quantized = linear::Quantized { weights, group: BLOCK, bytes: true, layout, accumulator };
    let y = linear::forward_quantized(&named, &quantized, rounding)?.tensor("y")?.clone();
    Ok((Named::new().with("h_codes", codes).with("h_scales", scales), y))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::precision::values;
    use crate::testing::{
        Draw, Golden, UNIT_ROUNDOFF, assert_gradients_are_automatic, assert_within, differentiated,
        f64_tensor,
    };

    fn case(head_dim: usize, half: usize) -> (Turn, Named) {
        let mut draw = Draw::new(8);
        let angles = |f: fn(f64) -> f64| -> Vec<f64> {
            (0..3 * half).map(|at| f(0.7 * at as f64)).collect()
        };
        let (cos, sin) =
            (f64_tensor(&angles(f64::cos), &[3, half]), f64_tensor(&angles(f64::sin), &[3, half]));
        let named = Named::new()
            .with("h", draw.bf16(&[4, 9], 1.0))
            .with("wkv", draw.bf16(&[head_dim, 9], 0.4));
        let named = named
            .with("kv_norm", draw.bf16(&[head_dim], 1.0))
            .with("dkv", draw.bf16(&[4, head_dim], 1.0));
        (Turn { cos, sin, positions: Some(vec![2, 0, 1, 2]), eps: 1e-6 }, named)
    }

    #[test]
    fn written_gradients_equal_those_of_automatic_differentiation() -> Result<()> {
        let (turn, named) = case(6, 2);
        let gradients = backward(&turn, &named, &mut Rounding::exact())?;
        let of = [("h", "dh"), ("wkv", "dwkv"), ("kv_norm", "dkv_norm")];
        let objective = |inputs: &Named| {
            Ok((forward(&turn, inputs, &mut Rounding::exact())?.tensor("kv")?
                * inputs.tensor("dkv")?)?)
        };
        let automatic = differentiated(&named, &of, objective)?;
        assert_gradients_are_automatic(&gradients, &automatic, &of)
    }

    #[test]
    fn rows_of_published_layers_are_those_of_their_hidden_states() -> Result<()> {
        for (name, table) in [("attention_csa__all", "compress"), ("attention_swa__hd512", "main")]
        {
            let golden = Golden::load(name);
            let h = golden.f64("in.hidden").squeeze(0)?;
            let of_table = |of: &str| {
                golden.f64(&format!("mid.rope.{table}.{of}")).squeeze(0).expect("one sequence")
            };
            let turn =
                Turn { cos: of_table("cos"), sin: of_table("sin"), positions: None, eps: 1e-6 };
            let named = Named::new()
                .with("h", h.clone())
                .with("wkv", golden.f64("param.self_attn.kv_proj.weight"));
            let named = named.with("kv_norm", golden.f64("param.self_attn.kv_norm.weight"));
            let found = forward(&turn, &named, &mut Rounding::exact())?;
            let all = golden.f64("mid.kv_all").squeeze(0)?.squeeze(0)?;
            let expected = all.narrow(0, 0, h.dim(0)?)?.contiguous()?;
            let largest =
                values(&expected)?.into_iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
            // Values stored in f32 are off by 2^-24 of themselves; eps is 1e-6 in both, up to a
            // rounding of f64.
            let bound = (expected.ones_like()? * (2f64.powi(-24) * largest))?;
            assert_within("kv", found.tensor("kv")?, &expected, &bound);
        }
        Ok(())
    }

    #[test]
    fn rows_of_the_cache_are_those_of_training_and_codes_of_h_make_the_same_of_what_they_decode_to()
    -> Result<()> {
        let (turn, named) = case(72, 4);
        let format = RowFormat { nope_dim: 64, rope_dim: 8 };
        let rows = forward(&turn, &named, &mut Rounding::exact())?;
        let cached = forward_cached(&turn, &named, format, &mut Rounding::exact())?;
        assert_eq!(values(cached.tensor("kv")?)?, values(rows.tensor("kv")?)?);
        let of = |group| quantize_fp8::Options {
            group,
            scale: ScaleType::E8m0,
            layout: ScaleLayout::Plain,
        };
        let coded = |name: &'static str, group| {
            quantize_fp8::quantize(&Named::new().with("x", named.tensor(name)?.clone()), of(group))
        };
        let decoded = |name, group| -> Result<Tensor> {
            let y = quantize_fp8::dequantize(&coded(name, group)?, of(group), crate::Format::F32)?;
            Ok(y.tensor("y")?.clone())
        };
        let numbers = named.clone().with("h", decoded("h", Group::Row(BLOCK))?);
        let numbers = forward(
            &turn,
            &numbers.with("wkv", decoded("wkv", Group::Square)?),
            &mut Rounding::exact(),
        )?;
        let wkv = coded("wkv", Group::Square)?;
        let codes = Named::new()
            .with("h", named.tensor("h")?.clone())
            .with("kv_norm", named.tensor("kv_norm")?.clone());
        let codes = codes.with("wkv_codes", wkv.tensor("codes")?.clone());
        let codes = codes.with("wkv_scales", wkv.tensor("scales")?.clone());
        let cached = forward_cached(&turn, &codes, format, &mut Rounding::exact())?;
        for name in ["kv_a", "kv"] {
            let bound = (numbers.tensor(name)?.ones_like()? * (4096.0 * UNIT_ROUNDOFF))?;
            assert_within(name, cached.tensor(name)?, numbers.tensor(name)?, &bound);
        }
        Ok(())
    }
}
