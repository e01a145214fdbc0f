//! The output projection of the attention (inference 9, training 14), in the steps of a layer:
//!
//! ```text
//! rotated = R^-1 attn_out            R rotates the last channels of each head of token t
//!                                    by its position             [`crate::projections::rope`]
//! z[:,g]  = rotated[:,g] wo_a[g]^T   a group g is o_groups-th part of the heads          [`crate::projections::linear::grouped_forward`]
//! y       = z wo_b^T                 z of all groups side by side                                [`crate::projections::linear::forward`]
//!
//! dz      = dy wo_b                  dwo_b    = dy^T z
//! drotated[:,g] = dz[:,g] wo_a[g]    dwo_a[g] = dz[:,g]^T rotated[:,g]
//! dattn_out = R drotated
//! ```
//!
//! The attention's backward reads `attn_out`, so it is not changed.
//!
//! [`forward_quantized`] is the same for FP8 weights. Either only wo_b is quantized, with its
//! operand z quantized in groups of 128. Or wo_a is quantized too, with the rotated output as
//! operand, quantized by [`crate::attention::inverse_rope_quantize`].
//!
//! # Rounding points
//!
//! Those of the steps; rotated, z and their gradients are stored in bf16 between them. Codes of the
//! rotated output have one value in all runs. Codes of z follow from sums whose order the kernel
//! decides, so their rounding is a rounding point.

use candle_core::Tensor;

use crate::attention::inverse_rope_quantize;
use crate::error::{Result, require_that, wrong_shape};
use crate::format::Format;
use crate::formats::quantize_fp8::{self, Group};
use crate::formats::scale_layout::ScaleLayout;
use crate::named::Named;
use crate::precision::{Accumulator, Rounding};
use crate::projections::linear::{self, BLOCK, Weights};
use crate::projections::rope;
use crate::quantize::{ScaleType, simulated};
use crate::select::entry;

/// The results of the first two steps, as the next one reads them.
struct Run {
    /// Before the store, `[num_tokens, num_heads, head_dim]`.
    rotated: Tensor,
    /// Stored, `[num_tokens, o_groups, group_width]`.
    x: Tensor,
    /// Before the store, `[num_tokens, o_groups * o_lora_rank]`.
    z: Tensor,
    /// The same after the store.
    z_stored: Tensor,
}

/// Heads side by side, in groups.
fn in_groups(heads: &Tensor, o_groups: usize) -> Result<Tensor> {
    let (num_tokens, num_heads, head_dim) = heads.dims3()?;
    let divides = o_groups > 0 && num_heads.is_multiple_of(o_groups);
    require_that("o_groups", o_groups, divides, "groups have as many heads each")?;
    Ok(heads.reshape((num_tokens, o_groups, num_heads / o_groups * head_dim))?)
}

fn run(rotation: &rope::Inputs, wo_a: &Tensor, rounding: &mut Rounding) -> Result<Run> {
    let &[o_groups, o_lora_rank, _] = wo_a.dims() else {
        return Err(wrong_shape("wo_a", "[o_groups, o_lora_rank, group_width]", wo_a));
    };
    let rotated = rope::forward(rotation, rounding)?.y;
    let x = in_groups(&rounding.bf16(&rotated)?, o_groups)?;
    let z = linear::grouped_forward(
        &Named::new().with("x", x.clone()).with("w", wo_a.clone()),
        rounding,
    )?;
    let z = z.tensor("y")?.reshape((x.dim(0)?, o_groups * o_lora_rank))?;
    let z_stored = rounding.bf16(&z)?;
    Ok(Run { rotated, x, z, z_stored })
}

/// `rotated` `[num_tokens, num_heads * head_dim]`, `z` `[num_tokens, o_groups * o_lora_rank]` and
/// `y` `[num_tokens, hidden_size]`, stored in bf16. The inputs are the attention's output in
/// `rotation`, which is inverse, and, stored in bf16:
///
/// - `wo_a` `[o_groups, o_lora_rank, num_heads / o_groups * head_dim]`;
/// - `wo_b` `[hidden_size, o_groups * o_lora_rank]`.
///
/// # Errors
/// Tensors whose shapes do not match.
pub fn forward(rotation: &rope::Inputs, inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    let Run { rotated, z, z_stored, .. } = run(rotation, inputs.tensor("wo_a")?, rounding)?;
    let second = Named::new().with("x", z_stored).with("w", inputs.tensor("wo_b")?.clone());
    let y = linear::forward(&second, rounding)?.tensor("y")?.clone();
    Ok(Named::new().with("rotated", rotated.flatten_from(1)?).with("z", z).with("y", y))
}

/// `dattn_out`, stored in bf16, `dwo_a` and `dwo_b`, stored in f32, and the gradients between the
/// steps, `dz` and `drotated`, stored in bf16. Each has the shape of its operand. The inputs are
/// those of [`forward`] and `dy`, of the shape of `y`.
///
/// # Errors
/// As [`forward`].
pub fn backward(rotation: &rope::Inputs, inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    let (wo_a, wo_b) = (inputs.tensor("wo_a")?.clone(), inputs.tensor("wo_b")?.clone());
    let Run { rotated, x, z_stored, .. } = run(rotation, &wo_a, rounding)?;
    let second =
        Named::new().with("x", z_stored).with("w", wo_b).with("dy", inputs.tensor("dy")?.clone());
    let second = linear::backward(&second, rounding)?;
    let dz = second.tensor("dx")?;
    let (num_tokens, o_groups, o_lora_rank) = (x.dim(0)?, wo_a.dim(0)?, wo_a.dim(1)?);
    let dz_stored = rounding.bf16(dz)?.reshape((num_tokens, o_groups, o_lora_rank))?;
    let first = Named::new().with("x", x).with("w", wo_a).with("dy", dz_stored);
    let first = linear::grouped_backward(&first, rounding)?;
    let drotated = first.tensor("dx")?.reshape(rotated.shape())?;
    let dattn_out = rope::backward(rotation, &rounding.bf16(&drotated)?, rounding)?.dx;
    let named = Named::new().with("dz", dz.clone()).with("dwo_b", second.tensor("dw")?.clone());
    let named = named
        .with("drotated", drotated.flatten_from(1)?)
        .with("dwo_a", first.tensor("dw")?.clone());
    Ok(named.with("dattn_out", dattn_out))
}

/// The storage of weights in blocks of 128 by 128.
const OF_WEIGHTS: quantize_fp8::Options = quantize_fp8::Options {
    group: Group::Square,
    scale: ScaleType::E8m0,
    layout: ScaleLayout::Plain,
};

/// `y`, `z` and, with wo_a in bf16, `rotated`, or with wo_a quantized `codes` and `scales` as in
/// [`inverse_rope_quantize::forward`], in this layout. The inputs are those of [`forward`]. Instead
/// of each quantized weight they have, as the values of bytes:
///
/// - `wo_b_codes` `[hidden_size, o_groups * o_lora_rank]`, e4m3, and `wo_b_scales`, e8m0, one for
///   each block of 128 by 128;
/// - `wo_a_codes` `[o_groups, o_lora_rank, group_width]` and `wo_a_scales`, for each group those of
///   its blocks; absent where `wo_a` is present.
///
/// # Errors
/// As [`forward`].
pub fn forward_quantized(
    rotation: &rope::Inputs,
    inputs: &Named,
    layout: ScaleLayout,
    rounding: &mut Rounding,
) -> Result<Named> {
    let (outputs, z) = match inputs.get("wo_a") {
        Some(wo_a) => {
            let run = run(rotation, wo_a, rounding)?;
            (
                Named::new().with("rotated", run.rotated.flatten_from(1)?).with("z", run.z),
                run.z_stored,
            )
        }
        None => {
            let (coded, z) = quantized_groups(rotation, inputs, layout, rounding)?;
            let stored = rounding.bf16(&z)?;
            (coded.with("z", z), stored)
        }
    };
    let coded = Named::new().with("codes", inputs.tensor("wo_b_codes")?.clone());
    let coded = coded.with("scales", inputs.tensor("wo_b_scales")?.clone());
    let wo_b = quantize_fp8::dequantize(&coded, OF_WEIGHTS, Format::F32)?.tensor("y")?.clone();
    let z = simulated(&z, BLOCK, Format::E4M3, rounding)?;
    let y = linear::forward(&Named::new().with("x", z).with("w", wo_b), rounding)?;
    Ok(outputs.with("y", y.tensor("y")?.clone()))
}

/// The codes of the rotated output, and its z before the store.
fn quantized_groups(
    rotation: &rope::Inputs,
    inputs: &Named,
    layout: ScaleLayout,
    rounding: &mut Rounding,
) -> Result<(Named, Tensor)> {
    let (codes, scales) = (inputs.tensor("wo_a_codes")?, inputs.tensor("wo_a_scales")?);
    let (o_groups, o_lora_rank, _) = codes.dims3()?;
    let options = inverse_rope_quantize::Options { o_groups, scale: ScaleType::E8m0, layout };
    let coded = inverse_rope_quantize::forward(rotation, options)?;
    let quantized = linear::Quantized {
        weights: Weights::Fp8,
        group: BLOCK,
        bytes: true,
        layout,
        accumulator: Accumulator::F32,
    };
    let groups = (0..o_groups).map(|group| {
        let named = Named::new().with("x", entry(coded.tensor("codes")?, 1, group)?);
        let named = named.with("x_scales", entry(coded.tensor("scales")?, 0, group)?);
        let named =
            named.with("w", entry(codes, 0, group)?).with("w_scales", entry(scales, 0, group)?);
        Ok(linear::forward_quantized(&named, &quantized, rounding)?.tensor("y")?.clone())
    });
    let z = Tensor::stack(&groups.collect::<Result<Vec<_>>>()?, 1)?;
    let z = z.reshape((z.dim(0)?, o_groups * o_lora_rank))?;
    Ok((coded, z))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::precision::values;
    use crate::testing::{Draw, Golden, UNIT_ROUNDOFF, assert_within, differentiated, f64_tensor};

    fn case() -> (rope::Inputs, Named) {
        let mut draw = Draw::new(11);
        let (sin, cos): (Vec<f64>, Vec<f64>) =
            (0..6).map(|angle| (0.7 * f64::from(angle)).sin_cos()).unzip();
        let (cos, sin) = (f64_tensor(&cos, &[3, 2]), f64_tensor(&sin, &[3, 2]));
        let x = draw.bf16(&[3, 4, 6], 1.0);
        let named = Named::new()
            .with("wo_a", draw.bf16(&[2, 5, 12], 0.3))
            .with("wo_b", draw.bf16(&[7, 10], 0.3));
        let named = named.with("dy", draw.bf16(&[3, 7], 1.0));
        (rope::Inputs { x, cos, sin, positions: Some(vec![2, 0, 1]), inverse: true }, named)
    }

    #[test]
    fn an_output_that_can_be_followed_by_hand() -> Result<()> {
        // Two heads of two channels, each a group; a rotation by -90 degrees: (a, b) becomes (b,
        // -a).
        let table = |number: f64| f64_tensor(&[number], &[1, 1]);
        let x = f64_tensor(&[1.0, 2.0, 3.0, 4.0], &[1, 2, 2]);
        let rotation =
            rope::Inputs { x, cos: table(0.0), sin: table(1.0), positions: None, inverse: true };
        let named = Named::new().with("wo_a", f64_tensor(&[1.0, 10.0, 100.0, 1.0], &[2, 1, 2]));
        let named = named.with("wo_b", f64_tensor(&[1.0, 1.0, 2.0, 0.0], &[2, 2]));
        let found = forward(&rotation, &named, &mut Rounding::exact())?;
        assert_eq!(values(found.tensor("rotated")?)?, [2.0, -1.0, 4.0, -3.0]);
        assert_eq!(values(found.tensor("z")?)?, [-8.0, 397.0]);
        assert_eq!(values(found.tensor("y")?)?, [389.0, -16.0]);
        Ok(())
    }

    #[test]
    fn written_gradients_equal_those_of_automatic_differentiation() -> Result<()> {
        let (rotation, named) = case();
        let gradients = backward(&rotation, &named, &mut Rounding::exact())?;
        let of_weights = [("wo_a", "dwo_a"), ("wo_b", "dwo_b"), ("attn_out", "dattn_out")];
        let objective = |inputs: &Named| {
            let rotation =
                rope::Inputs { x: inputs.tensor("attn_out")?.clone(), ..rotation.clone() };
            Ok((forward(&rotation, inputs, &mut Rounding::exact())?.tensor("y")?
                * inputs.tensor("dy")?)?)
        };
        let automatic = differentiated(
            &named.clone().with("attn_out", rotation.x.clone()),
            &of_weights,
            objective,
        )?;
        for (_, gradient) in of_weights {
            // Each element depends on at most 12 + 10 + 7 products of values of size 1 and a
            // rotation.
            let bound = (automatic.tensor(gradient)?.ones_like()? * (4096.0 * UNIT_ROUNDOFF))?;
            assert_within(
                gradient,
                gradients.tensor(gradient)?,
                automatic.tensor(gradient)?,
                &bound,
            );
        }
        Ok(())
    }

    fn largest(tensor: &Tensor) -> Result<f64> {
        Ok(values(tensor)?.into_iter().fold(0.0, |largest: f64, x| largest.max(x.abs())))
    }

    #[test]
    fn the_output_of_published_layers_is_turned_back_and_projected_as_theirs() -> Result<()> {
        for (name, table) in [("attention_csa__all", "compress"), ("attention_swa__one", "main")] {
            let golden = Golden::load(name);
            let x = golden.f64("mid.core_out");
            let &[batch, tokens, heads, channels] = x.dims() else {
                panic!("{name}: {:?}", x.dims())
            };
            let of_tokens = |stored: &str| {
                let rows = golden.f64(stored).squeeze(0).expect("one table for all batches");
                Tensor::cat(&vec![rows; batch], 0).expect("a table")
            };
            let (cos, sin) = (
                of_tokens(&format!("mid.rope.{table}.cos")),
                of_tokens(&format!("mid.rope.{table}.sin")),
            );
            // Values stored in f32 are off by 2^-24 of themselves: x through products with at most
            // two values of size 1 each, then the weights of a row of wo_a, then of wo_b.
            let mut error = 2.0 * 2f64.powi(-24) * largest(&x)?;
            let x = x.reshape((batch * tokens, heads, channels))?;
            let rotation = rope::Inputs { x, cos, sin, positions: None, inverse: true };
            let z = golden.f64("mid.o_a_out");
            let (groups, rank) = (z.dim(2)?, z.dim(3)?);
            let wo_a = golden.f64("param.self_attn.o_a_proj.weight").reshape((groups, rank, ()))?;
            let named = Named::new()
                .with("wo_a", wo_a)
                .with("wo_b", golden.f64("param.self_attn.o_b_proj.weight"));
            let found = forward(&rotation, &named, &mut Rounding::exact())?;
            let outputs = [
                ("rotated", "mid.core_out_derotated", None),
                ("z", "mid.o_a_out", Some("wo_a")),
                ("y", "out.y", Some("wo_b")),
            ];
            for (own, stored, weight) in outputs {
                if let Some(weight) = weight {
                    let weight = named.tensor(weight)?;
                    error *= weight.dims()[weight.rank() - 1] as f64 * largest(weight)?;
                }
                let expected = golden.f64(stored).reshape(found.tensor(own)?.shape())?;
                let bound =
                    (expected.ones_like()? * (error + 2f64.powi(-24) * largest(&expected)?))?;
                assert_within(own, found.tensor(own)?, &expected, &bound);
            }
        }
        Ok(())
    }

    #[test]
    fn what_is_quantized_is_the_whole_of_what_is_not_within_its_codes() -> Result<()> {
        let mut draw = Draw::new(4);
        let (cos, sin) = (f64_tensor(&[1.0; 3], &[3, 1]), f64_tensor(&[0.0; 3], &[3, 1]));
        let rotation = rope::Inputs {
            x: draw.bf16(&[3, 2, 128], 1.0),
            cos,
            sin,
            positions: None,
            inverse: true,
        };
        let coded =
            |x: &Tensor| quantize_fp8::quantize(&Named::new().with("x", x.clone()), OF_WEIGHTS);
        let decoded = |coded: &Named| quantize_fp8::dequantize(coded, OF_WEIGHTS, Format::F32);
        let (wo_b, wo_a) = (coded(&draw.bf16(&[9, 6], 1.0))?, coded(&draw.bf16(&[3, 128], 1.0))?);
        let twice = |x: &Tensor| Ok::<_, crate::Error>(Tensor::stack(&[x, x], 0)?);
        let weights = Named::new().with("wo_a", twice(decoded(&wo_a)?.tensor("y")?)?);
        let weights = weights.with("wo_b", decoded(&wo_b)?.tensor("y")?.clone());
        let whole = forward(&rotation, &weights, &mut Rounding::exact())?;
        let codes = Named::new().with("wo_b_codes", wo_b.tensor("codes")?.clone());
        let codes = codes.with("wo_b_scales", wo_b.tensor("scales")?.clone());
        let second = codes.clone().with("wo_a", weights.tensor("wo_a")?.clone());
        let second =
            forward_quantized(&rotation, &second, ScaleLayout::Plain, &mut Rounding::exact())?;
        assert_eq!(values(second.tensor("y")?)?, values(whole.tensor("y")?)?);
        let both = codes.with("wo_a_codes", twice(wo_a.tensor("codes")?)?);
        let both = both.with("wo_a_scales", twice(wo_a.tensor("scales")?)?);
        // A code is within 2^-4 of its value, or within 2^-10 of a scale, which is below amax /
        // 224.
        let absolute = rope::Inputs { x: rotation.x.abs()?, ..rotation.clone() };
        let sizes = Named::new().with("wo_a", weights.tensor("wo_a")?.abs()?);
        let sizes = forward(
            &absolute,
            &sizes.with("wo_b", weights.tensor("wo_b")?.clone()),
            &mut Rounding::exact(),
        )?;
        let small =
            128.0 * largest(weights.tensor("wo_a")?)? * largest(&rotation.x)? / 224.0 / 1024.0;
        let bound = ((sizes.tensor("z")? / 16.0)? + small)?;
        for layout in [ScaleLayout::Plain, ScaleLayout::MnMajor, ScaleLayout::Blocked] {
            let both = forward_quantized(&rotation, &both, layout, &mut Rounding::exact())?;
            assert_within("z", both.tensor("z")?, whole.tensor("z")?, &bound);
            assert_ne!(values(both.tensor("z")?)?, values(whole.tensor("z")?)?);
        }
        Ok(())
    }

    #[test]
    fn weights_that_do_not_fit_are_refused() {
        let (rotation, named) = case();
        for (name, shape) in [("wo_a", &[2, 5, 11][..]), ("wo_a", &[3, 5, 12]), ("wo_b", &[7, 9])] {
            let wrong = named.clone().with(name, Draw::new(1).normal(shape, 1.0));
            assert!(
                forward(&rotation, &wrong, &mut Rounding::exact()).is_err(),
                "{name} {shape:?}"
            );
        }
    }
}
