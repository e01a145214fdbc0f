//! A linear layer without bias, and its gradients (inference 0, 5.5).
//!
//! ```text
//! y[t,o]  = y_before[t,o]  + sum over i of x[t,i] w[o,i]
//! dx[t,i] =                  sum over o of dy[t,o] w[o,i]
//! dw[o,i] = dw_before[o,i] + sum over t of dy[t,o] x[t,i]
//! ```
//!
//! [`forward_quantized`] is the same for the decoded values of codes with scales, where x and w are
//! quantized (inference 5.5, 5.6):
//!
//! ```text
//! FP8      y[t,o] = y_before[t,o] + sum over b of (sum over i in block b of qx[t,i] qw[o,i]) sx[t,b] sw[o/128,b]
//! MXFP4    y[t,o] = y_before[t,o] + sum over g of (sum over i in group g of qx[t,i] w[o,i]) sx[t,g]
//! NVFP4    y[t,o] = y_before[t,o] + (sum over i of x[t,i] w[o,i]) (gx gw)
//! ```
//!
//! with qx and qw values of codes. w (and x, for NVFP4) is such values times the scales of their
//! groups, in bf16. That is exact, except that e2m1 values times the largest powers of two are
//! infinite.
//!
//! [`grouped_forward`] is y of independent layers, each with its part of x (inference 9).
//!
//! `y_before` and `dw_before` are added to the result, such as the sum over earlier chunks of a
//! sequence; zeros where they are absent.
//!
//! # Rounding points
//!
//! x, w, dy and dx are stored in bf16, whose products are exact in fp32; the sums are fp32. The
//! previous value is added in fp32 to the whole sum, and the result is rounded once to the type in
//! which it is stored. With quantized operands, the products of a group are added in the
//! accumulator that the caller names. Their sum times each scale, and gx gw, are fp32, and so are
//! the sums over groups.

use candle_core::Tensor;

use crate::error::{Result, require, require_that, wrong_value};
use crate::format::{Format, unpack_nibbles};
use crate::formats::scale_layout::{ScaleLayout, Scales};
use crate::named::Named;
use crate::precision::{Accumulator, Rounding, values};
use crate::select::entry;

/// Rows, and values along k, of a block of FP8 weights that share a scale.
pub const BLOCK: usize = 128;

/// Formats of quantized operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weights {
    /// e4m3: x has a scale for each 128 values of a row, w for each block of 128 x 128.
    Fp8,
    /// w is e2m1 with e8m0 scales of 32 values, x e4m3 with e8m0 scales.
    Mxfp4,
    /// Both are e2m1 with e4m3 scales of 16 values and an fp32 scale of the tensor.
    Nvfp4,
}

/// How operands are quantized, and how their scales are stored.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Quantized {
    /// Formats.
    pub weights: Weights,
    /// Values of x that share a scale: 128 for FP8, 32 or 128 for MXFP4, 16 for NVFP4.
    pub group: usize,
    /// Whether scales are bytes: e8m0, for NVFP4 e4m3. FP8 may have fp32 scales.
    pub bytes: bool,
    /// Layout of the scales; those of FP8's blocks of weights are plain.
    pub layout: ScaleLayout,
    /// The accumulator of the products of a group.
    pub accumulator: Accumulator,
}

impl Quantized {
    /// The scales of x.
    pub fn x_scales(&self, num_tokens: usize, in_features: usize) -> Scales {
        let Self { bytes, layout, .. } = *self;
        Scales { layout, bytes, rows: num_tokens, groups: in_features.div_ceil(self.group) }
    }

    /// The scales of w.
    pub fn w_scales(&self, out_features: usize, in_features: usize) -> Scales {
        let Self { bytes, layout, .. } = *self;
        match self.weights {
            Weights::Fp8 => {
                let (rows, groups) = (out_features.div_ceil(BLOCK), in_features.div_ceil(BLOCK));
                Scales { layout: ScaleLayout::Plain, bytes, rows, groups }
            }
            Weights::Mxfp4 => {
                Scales { layout, bytes, rows: out_features, groups: in_features.div_ceil(32) }
            }
            Weights::Nvfp4 => {
                Scales { layout, bytes, rows: out_features, groups: in_features.div_ceil(16) }
            }
        }
    }

    /// Products that the accumulator holds before their sum is scaled: those of a group of x. For
    /// MXFP4 weights in an accumulator narrower than fp32: those of a group of w.
    fn held(&self) -> usize {
        let narrow = self.accumulator != Accumulator::F32;
        if self.weights == Weights::Mxfp4 && narrow { self.group.min(32) } else { self.group }
    }

    fn x_format(&self) -> Format {
        if self.weights == Weights::Nvfp4 { Format::E2M1 } else { Format::E4M3 }
    }

    fn w_format(&self) -> Format {
        if self.weights == Weights::Fp8 { Format::E4M3 } else { Format::E2M1 }
    }

    fn scale_format(&self) -> Format {
        if self.weights == Weights::Nvfp4 { Format::E4M3 } else { Format::E8M0 }
    }
}

/// The power of two at or below the largest magnitude of each row, `[rows, 1]`; 1 where that
/// magnitude is zero or not finite.
fn powers_of_rows(rows: &Tensor) -> Result<Tensor> {
    let largest =
        |row: &Vec<f64>| row.iter().fold(0.0f64, |largest, number| largest.max(number.abs()));
    let power = |largest: f64| match largest > 0.0 && largest.is_finite() {
        true => 2f64.powi(largest.log2().floor() as i32),
        false => 1.0,
    };
    let powers: Vec<f64> = rows.to_vec2::<f64>()?.iter().map(|row| power(largest(row))).collect();
    Ok(Tensor::from_vec(powers, (rows.dim(0)?, 1), rows.device())?)
}

/// `y` `[num_tokens, out_features]`, stored in bf16 or f32, for these inputs, with codes and scales
/// as the values of their bytes:
///
/// - `x` `[num_tokens, in_features]`, a code in each byte, or `[num_tokens, in_features / 2]`, two
///   codes of e2m1, the even one in the low nibble; `w` `[out_features, ..]` likewise;
/// - `x_scales` and `w_scales`, as [`Quantized::x_scales`] and [`Quantized::w_scales`] store them;
/// - `x_global_scale` and `w_global_scale` `[1]`, for NVFP4;
/// - `y_before`, of the shape and type of `y`; absent for zeros.
///
/// # Errors
/// Tensors whose shapes do not match.
pub fn forward_quantized(
    inputs: &Named,
    quantized: &Quantized,
    rounding: &mut Rounding,
) -> Result<Named> {
    let operands = Operands::decode(inputs, quantized)?;
    let Operands { x, w, x_scales, w_scales } = &operands;
    let (num_tokens, out_features) = (x.dim(0)?, w.dim(0)?);
    if let Some(before) = inputs.get("y_before") {
        require("y_before", before, &[num_tokens, out_features])?;
    }
    if num_tokens == 0 {
        return Ok(Named::new().with("y", Tensor::zeros((0, out_features), x.dtype(), x.device())?));
    }
    let held = quantized.held();
    let promoted = quantized.accumulator.promoted_every(held);
    let of_tokens =
        |piece_number: usize, piece: Tensor, rounding: &mut Rounding| -> Result<Tensor> {
            let group = piece_number * held / quantized.group;
            rounding.f32(&piece.broadcast_mul(&x_scales.narrow(1, group, 1)?)?)
        };
    let y = match quantized.weights {
        Weights::Fp8 => {
            rounding.matmul_of_pieces(x, &w.t()?, promoted, |block, piece, rounding| {
                let scaled = of_tokens(block, piece, rounding)?;
                rounding.f32(&scaled.broadcast_mul(&w_scales.narrow(1, block, 1)?.t()?)?)
            })?
        }
        Weights::Mxfp4 => {
            // The kernel decides at which point it multiplies by a scale of w. A power of two for
            // each feature, removed first and restored last, changes no rounding. It keeps every
            // sum in the fp32 range until the scale of x is applied.
            let powers = powers_of_rows(w)?;
            let normalised = w.broadcast_div(&powers)?;
            let y = rounding.matmul_of_pieces(x, &normalised.t()?, promoted, of_tokens)?;
            y.broadcast_mul(&powers.t()?)?
        }
        Weights::Nvfp4 => {
            let product = rounding.matmul(x, &w.t()?, quantized.accumulator)?;
            let factor = (inputs.tensor("x_global_scale")? * inputs.tensor("w_global_scale")?)?;
            let factor = rounding.f32(&factor)?;
            rounding.f32(&product.broadcast_mul(&factor)?)?
        }
    };
    Ok(Named::new().with("y", added(y, inputs.get("y_before"), rounding)?))
}

/// The decoded operands of a call.
struct Operands {
    /// `[num_tokens, in_features]` and `[out_features, in_features]`: values of codes, with the
    /// scales that stay with them.
    x: Tensor,
    w: Tensor,
    /// `[num_tokens, groups]` and `[out_features, groups]`: scales of sums; ones where the scales
    /// stay with the values, and no multiplication happens.
    x_scales: Tensor,
    w_scales: Tensor,
}

impl Operands {
    fn decode(inputs: &Named, quantized: &Quantized) -> Result<Self> {
        let x = numbers("x", inputs.tensor("x")?, quantized.x_format())?;
        let w = numbers("w", inputs.tensor("w")?, quantized.w_format())?;
        let ((num_tokens, in_features), (out_features, width)) = (x.dims2()?, w.dims2()?);
        require_that(
            "w",
            width,
            width == in_features && width > 0,
            "rows of x and w have equally many numbers",
        )?;
        require_that(
            "out_features",
            out_features,
            out_features > 0,
            "a layer has at least one output",
        )?;
        let x_scales =
            scales_of(inputs, "x_scales", quantized, quantized.x_scales(num_tokens, in_features))?;
        let w_scales = scales_of(
            inputs,
            "w_scales",
            quantized,
            quantized.w_scales(out_features, in_features),
        )?;
        let kept =
            |numbers: &Tensor, scales: &Tensor, group: usize| with_scales(numbers, scales, group);
        Ok(match quantized.weights {
            Weights::Fp8 => {
                let rows: Vec<u32> = (0..out_features).map(|row| (row / BLOCK) as u32).collect();
                let rows = Tensor::new(rows, w.device())?;
                Self { x, w, x_scales, w_scales: w_scales.index_select(&rows, 0)? }
            }
            Weights::Mxfp4 => Self { w: kept(&w, &w_scales, 32)?, x, x_scales, w_scales },
            Weights::Nvfp4 => Self {
                x: kept(&x, &x_scales, 16)?,
                w: kept(&w, &w_scales, 16)?,
                x_scales,
                w_scales,
            },
        })
    }
}

/// The values of rows of codes.
fn numbers(name: &'static str, codes: &Tensor, format: Format) -> Result<Tensor> {
    let &[rows, width] = codes.dims() else {
        return Err(wrong_value(name, codes.rank(), "it has two axes"));
    };
    let bytes: Vec<u8> = values(codes)?.into_iter().map(|byte| byte as u8).collect();
    let in_nibbles = format == Format::E2M1;
    let codes_of_bytes = if in_nibbles { unpack_nibbles(&bytes) } else { bytes };
    let width = if in_nibbles { 2 * width } else { width };
    Ok(Tensor::from_vec(format.values(&codes_of_bytes), (rows, width), codes.device())?)
}

/// Stored scales, `[rows, groups]`.
fn scales_of(
    inputs: &Named,
    name: &'static str,
    quantized: &Quantized,
    scales: Scales,
) -> Result<Tensor> {
    let stored = inputs.tensor(name)?;
    require(name, stored, &scales.shape())?;
    let stored_numbers = values(stored)?;
    let numbers: Vec<f64> = match quantized.bytes {
        true => quantized.scale_format().values(&scales.read_bytes(&stored_numbers)),
        false => scales.gathered(&stored_numbers),
    };
    Ok(Tensor::from_vec(numbers, (scales.rows, scales.groups), stored.device())?)
}

/// Values times the scales of their groups, in bf16.
fn with_scales(numbers: &Tensor, scales: &Tensor, group: usize) -> Result<Tensor> {
    let (scale, groups, width) = (values(scales)?, scales.dim(1)?, numbers.dim(1)?);
    let scaled = |(at, x): (usize, f64)| {
        Format::BF16.nearest(x * scale[at / width * groups + at % width / group])
    };
    let numbers_with: Vec<f64> = values(numbers)?.into_iter().enumerate().map(scaled).collect();
    Ok(Tensor::from_vec(numbers_with, numbers.shape(), numbers.device())?)
}

/// `y` `[num_tokens, out_features]`, stored in bf16 or f32, for these inputs:
///
/// - `x` `[num_tokens, in_features]` and `w` `[out_features, in_features]`, stored in bf16;
/// - `y_before`, of the shape and type of `y`; absent for zeros.
///
/// # Errors
/// Tensors whose shapes do not match.
pub fn forward(inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    check(inputs)?;
    let product = matmul(inputs.tensor("x")?, &inputs.tensor("w")?.t()?, rounding)?;
    Ok(Named::new().with("y", added(product, inputs.get("y_before"), rounding)?))
}

/// `dx`, of the shape and type of `x`, and `dw`, of the shape of `w`, stored in bf16 or f32. The
/// inputs are those of [`forward`], `dy`, of the shape of `y`, stored in bf16, and `dw_before`, of
/// the shape and type of `dw`; absent for zeros.
///
/// # Errors
/// As [`forward`].
pub fn backward(inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    check(inputs)?;
    let dy = inputs.tensor("dy")?;
    let dx = matmul(dy, inputs.tensor("w")?, rounding)?;
    let dw = matmul(&dy.t()?, inputs.tensor("x")?, rounding)?;
    Ok(Named::new().with("dx", dx).with("dw", added(dw, inputs.get("dw_before"), rounding)?))
}

/// [`forward`] of each group of a layer of independent ones (inference 9): `y`
/// `[num_tokens, num_groups, out_features]` for `x` `[num_tokens, num_groups, in_features]` and `w`
/// `[num_groups, out_features, in_features]`; `y_before` as `y`.
///
/// # Errors
/// Tensors whose shapes do not match.
pub fn grouped_forward(inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    let groups =
        (0..check_groups(inputs)?).map(|group| forward(&group_of(inputs, group)?, rounding));
    let y = groups.map(|y| Ok(y?.tensor("y")?.clone())).collect::<Result<Vec<_>>>()?;
    Ok(Named::new().with("y", Tensor::stack(&y, 1)?))
}

/// [`backward`] of each group: `dx` as `x`, `dw` as `w`. The inputs are those of
/// [`grouped_forward`], `dy` as `y`, and `dw_before` as `dw`.
///
/// # Errors
/// As [`grouped_forward`].
pub fn grouped_backward(inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    let groups =
        (0..check_groups(inputs)?).map(|group| backward(&group_of(inputs, group)?, rounding));
    let groups = groups.collect::<Result<Vec<_>>>()?;
    let of = |name: &'static str| {
        groups.iter().map(|group| Ok(group.tensor(name)?.clone())).collect::<Result<Vec<_>>>()
    };
    Ok(Named::new()
        .with("dx", Tensor::stack(&of("dx")?, 1)?)
        .with("dw", Tensor::stack(&of("dw")?, 0)?))
}

/// Tensors of tokens, whose second axis is the groups; for tensors of weights it is the first axis.
const OF_TOKENS: [&str; 3] = ["x", "y_before", "dy"];
const OF_WEIGHTS: [&str; 2] = ["w", "dw_before"];

/// The number of groups.
fn check_groups(inputs: &Named) -> Result<usize> {
    let [groups, tokens, outs, ins] = ["num_groups", "num_tokens", "out_features", "in_features"];
    let tensors: [(&[_], &[_]); 3] = [
        (&["x"], &[tokens, groups, ins]),
        (&OF_WEIGHTS, &[groups, outs, ins]),
        (&["y_before", "dy"], &[tokens, groups, outs]),
    ];
    let [num_groups] = inputs.extents([groups], &tensors)?;
    require_that("num_groups", num_groups, num_groups > 0, "a layer has at least one group")?;
    Ok(num_groups)
}

/// The inputs of one group.
fn group_of(inputs: &Named, group: usize) -> Result<Named> {
    let axes = OF_TOKENS.map(|name| (name, 1)).into_iter().chain(OF_WEIGHTS.map(|name| (name, 0)));
    axes.filter_map(|(name, axis)| Some((name, axis, inputs.get(name)?)))
        .try_fold(Named::new(), |named, (name, axis, tensor)| {
            Ok(named.with(name, entry(tensor, axis, group)?))
        })
}

/// `a @ b`, accumulated in fp32; zeros with nothing to add.
fn matmul(a: &Tensor, b: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
    let ((rows, depth), columns) = (a.dims2()?, b.dim(1)?);
    if rows == 0 || depth == 0 {
        return Ok(Tensor::zeros((rows, columns), a.dtype(), a.device())?);
    }
    rounding.matmul_f32(a, b)
}

fn added(sum: Tensor, before: Option<&Tensor>, rounding: &mut Rounding) -> Result<Tensor> {
    match before {
        Some(before) => rounding.f32(&(sum + before)?),
        None => Ok(sum),
    }
}

fn check(inputs: &Named) -> Result<()> {
    let [tokens, outs, ins] = ["num_tokens", "out_features", "in_features"];
    let tensors: [(&[_], &[_]); 3] = [
        (&["x"], &[tokens, ins]),
        (&["w", "dw_before"], &[outs, ins]),
        (&["y_before", "dy"], &[tokens, outs]),
    ];
    let [out_features, in_features] = inputs.extents([outs, ins], &tensors)?;
    require_that(
        "out_features",
        out_features,
        out_features > 0,
        "a layer has at least one output",
    )?;
    require_that("in_features", in_features, in_features > 0, "a layer has at least one input")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Precision;
    use crate::precision::values;
    use crate::testing::{
        Draw, Golden, UNIT_ROUNDOFF, assert_unbiased, assert_within, differentiated, dot,
        dot_of_magnitudes, f64_tensor,
    };

    fn inputs(num_tokens: usize, out_features: usize, in_features: usize) -> Named {
        let mut draw = Draw::new(3);
        let named = Named::new().with("x", draw.bf16(&[num_tokens, in_features], 1.0));
        let named = named.with("w", draw.bf16(&[out_features, in_features], 1.0));
        named.with("dy", draw.bf16(&[num_tokens, out_features], 1.0))
    }

    #[test]
    fn a_layer_that_can_be_added_by_hand() -> Result<()> {
        let named = Named::new().with("x", f64_tensor(&[1.0, 2.0, 3.0], &[1, 3]));
        let named = named.with("w", f64_tensor(&[1.0, 10.0, 100.0, -1.0, 0.5, 0.0], &[2, 3]));
        let y = forward(&named, &mut Rounding::exact())?;
        assert_eq!(values(y.tensor("y")?)?, [321.0, 0.0]);
        let named = named
            .with("y_before", f64_tensor(&[1000.0, -1.0], &[1, 2]))
            .with("dy", f64_tensor(&[1.0, 4.0], &[1, 2]));
        let y = forward(&named, &mut Rounding::exact())?;
        assert_eq!(values(y.tensor("y")?)?, [1321.0, -1.0]);
        let before = f64_tensor(&[1.0; 6], &[2, 3]);
        let gradients = backward(&named.with("dw_before", before), &mut Rounding::exact())?;
        assert_eq!(values(gradients.tensor("dx")?)?, [-3.0, 12.0, 100.0]);
        assert_eq!(values(gradients.tensor("dw")?)?, [2.0, 3.0, 4.0, 5.0, 9.0, 13.0]);
        Ok(())
    }

    #[test]
    fn no_tokens_have_no_rows_and_leave_what_was_there() -> Result<()> {
        let named = inputs(0, 3, 5);
        assert_eq!(forward(&named, &mut Rounding::exact())?.tensor("y")?.dims(), [0, 3]);
        let before = Draw::new(1).normal(&[3, 5], 1.0);
        let gradients = backward(&named.with("dw_before", before.clone()), &mut Rounding::exact())?;
        assert_eq!(values(gradients.tensor("dw")?)?, values(&before)?);
        Ok(())
    }

    #[test]
    fn written_gradients_equal_those_of_automatic_differentiation_and_are_adjoint() -> Result<()> {
        let named = inputs(5, 7, 11);
        let gradients = backward(&named, &mut Rounding::exact())?;
        let objective = |inputs: &Named| {
            Ok((forward(inputs, &mut Rounding::exact())?.tensor("y")? * inputs.tensor("dy")?)?)
        };
        let automatic = differentiated(&named, &[("x", "dx"), ("w", "dw")], objective)?;
        let absolute =
            Named::new().with("x", named.tensor("x")?.abs()?).with("w", named.tensor("w")?.abs()?);
        let sizes =
            backward(&absolute.with("dy", named.tensor("dy")?.abs()?), &mut Rounding::exact())?;
        for name in ["dx", "dw"] {
            let bound = (sizes.tensor(name)? * (2.0 * 12.0 * UNIT_ROUNDOFF))?;
            assert_within(name, gradients.tensor(name)?, automatic.tensor(name)?, &bound);
        }
        // Both products are linear: <dy, v w^T> = <dx, v> for every v, and <dy, x v^T> = <dw, v>.
        let mut draw = Draw::new(9);
        for (name, gradient, shape) in [("x", "dx", [5, 11]), ("w", "dw", [7, 11])] {
            let direction = draw.normal(&shape, 1.0);
            let moved =
                forward(&named.clone().with(name, direction.clone()), &mut Rounding::exact())?;
            let (gradient, dy) = (gradients.tensor(gradient)?, named.tensor("dy")?);
            let difference = dot(moved.tensor("y")?, dy) - dot(gradient, &direction);
            let bound = 2.0
                * (12.0 + 77.0)
                * UNIT_ROUNDOFF
                * 77.0
                * dot_of_magnitudes(gradient, &direction);
            assert!(difference.abs() <= bound, "{name}: {difference:e}");
        }
        Ok(())
    }

    #[test]
    fn working_runs_scatter_around_the_exact_one() -> Result<()> {
        let named = inputs(6, 8, 300).with("y_before", Draw::new(4).normal(&[6, 8], 1.0));
        let y = |precision| -> Result<Tensor> {
            Ok(forward(&named, &mut Rounding::new(precision))?.tensor("y")?.clone())
        };
        let runs =
            (0..64).map(|seed| y(Precision::Working { seed })).collect::<Result<Vec<_>>>()?;
        assert_unbiased("y", &y(Precision::Exact)?, &runs, 48);
        Ok(())
    }

    fn quantized(weights: Weights, group: usize, layout: ScaleLayout) -> Quantized {
        Quantized { weights, group, bytes: true, layout, accumulator: Accumulator::F32 }
    }

    /// Codes and scales with bytes chosen by their index; every byte of padding is a NaN.
    fn coded(
        quantized: &Quantized,
        num_tokens: usize,
        out_features: usize,
        in_features: usize,
    ) -> Named {
        let codes = |seed: usize, rows: usize, format: Format| {
            let width = if format == Format::E2M1 { in_features / 2 } else { in_features };
            let bytes: Vec<f64> =
                (0..rows * width).map(|at| ((at * 37 + seed) % 0x78) as f64).collect();
            f64_tensor(&bytes, &[rows, width])
        };
        let scales = |seed: usize, scales: Scales| {
            let byte = |at: usize| {
                Some(
                    ((at * 5 + seed) % 9
                        + if quantized.weights == Weights::Nvfp4 { 50 } else { 122 })
                        as u8,
                )
            };
            let bytes: Vec<Option<u8>> = (0..scales.rows * scales.groups).map(byte).collect();
            let placed: Vec<u8> =
                scales.arranged(&bytes).into_iter().map(|byte| byte.unwrap_or(255)).collect();
            let numbers: Vec<f64> = match scales.in_words() {
                true => crate::formats::scale_layout::words_of(&placed)
                    .into_iter()
                    .map(f64::from)
                    .collect(),
                false => placed.into_iter().map(f64::from).collect(),
            };
            f64_tensor(&numbers, &scales.shape())
        };
        let named = Named::new().with("x", codes(3, num_tokens, quantized.x_format()));
        let named = named.with("w", codes(11, out_features, quantized.w_format()));
        let named = named.with("x_scales", scales(1, quantized.x_scales(num_tokens, in_features)));
        let named =
            named.with("w_scales", scales(4, quantized.w_scales(out_features, in_features)));
        named
            .with("x_global_scale", f64_tensor(&[0.3], &[1]))
            .with("w_global_scale", f64_tensor(&[1.7], &[1]))
    }

    /// Element by element from the formulas of inference 5.5 and 5.6, every value with all of its
    /// scales.
    fn by_elements(named: &Named, quantized: &Quantized, extents: [usize; 3]) -> Result<Vec<f64>> {
        let [num_tokens, out_features, in_features] = extents;
        let stored = |name: &'static str| values(named.tensor(name)?);
        let (x, w) = (stored("x")?, stored("w")?);
        let code =
            |codes: &[f64], row: usize, i: usize, format: Format| match format == Format::E2M1 {
                true => format
                    .value((codes[row * in_features / 2 + i / 2] as u64) >> (4 * (i % 2)) & 15),
                false => format.value(codes[row * in_features + i] as u64),
            };
        let of_x = quantized.x_scales(num_tokens, in_features);
        let of_w = quantized.w_scales(out_features, in_features);
        let (sx, sw) =
            (of_x.read_bytes(&stored("x_scales")?), of_w.read_bytes(&stored("w_scales")?));
        let scale = |bytes: &[u8], at: usize| quantized.scale_format().value(bytes[at].into());
        let (rows, group) = match quantized.weights {
            Weights::Fp8 => (128, 128),
            Weights::Mxfp4 => (1, 32),
            Weights::Nvfp4 => (1, 16),
        };
        let factor = if quantized.weights == Weights::Nvfp4 { 0.3 * 1.7 } else { 1.0 };
        let element = |token: usize, out: usize| -> f64 {
            let term = |i: usize| {
                let of_token = scale(&sx, token * of_x.groups + i / quantized.group);
                let of_weight = scale(&sw, out / rows * of_w.groups + i / group);
                code(&x, token, i, quantized.x_format())
                    * of_token
                    * code(&w, out, i, quantized.w_format())
                    * of_weight
            };
            factor * (0..in_features).map(term).sum::<f64>()
        };
        Ok((0..num_tokens * out_features)
            .map(|at| element(at / out_features, at % out_features))
            .collect())
    }

    #[test]
    fn quantized_products_are_those_of_every_number_with_all_of_its_scales() -> Result<()> {
        let formats = [
            (Weights::Fp8, 128),
            (Weights::Mxfp4, 128),
            (Weights::Mxfp4, 32),
            (Weights::Nvfp4, 16),
        ];
        for (weights, group) in formats {
            for layout in [ScaleLayout::Plain, ScaleLayout::MnMajor, ScaleLayout::Blocked] {
                let quantized = quantized(weights, group, layout);
                let extents = [3, 131, 168];
                let named = coded(&quantized, 3, 131, 168);
                let y = forward_quantized(&named, &quantized, &mut Rounding::exact())?;
                let (found, expected) =
                    (values(y.tensor("y")?)?, by_elements(&named, &quantized, extents)?);
                // Values of both signs are as large as their largest sum: 168 terms and three
                // roundings of each.
                let largest = expected.iter().fold(0.0, |largest: f64, y| largest.max(y.abs()));
                for (found, expected) in found.iter().zip(&expected) {
                    let bound = 172.0 * 172.0 * UNIT_ROUNDOFF * largest;
                    assert!((found - expected).abs() <= bound, "{quantized:?}: {found} {expected}");
                }
            }
        }
        Ok(())
    }

    #[test]
    fn e2m1_numbers_times_powers_of_two_2_to_the_14_apart_are_numbers_of_e4m3_and_times_others_not_all()
     {
        let holds = |exponent: i32| {
            (0..16u64)
                .all(|code| Format::E4M3.holds(Format::E2M1.value(code) * 2f64.powi(exponent)))
        };
        let folding: Vec<i32> = (-12..=12).filter(|&exponent| holds(exponent)).collect();
        assert_eq!(folding, (-8..=6).collect::<Vec<_>>());
    }

    #[test]
    fn what_a_narrow_accumulator_loses_lies_within_its_working_runs() -> Result<()> {
        // 2^14 and 1919 ones: with promotion every 128 terms 127 of them are lost, without
        // promotion all.
        let quantized = quantized(Weights::Fp8, 128, ScaleLayout::Plain);
        let row: Vec<f64> =
            (0..1920).map(|i| f64::from(if i == 0 { 0x70 } else { 0x38 })).collect();
        let ones = f64_tensor(&[127.0; 15], &[1, 15]);
        let named = Named::new()
            .with("x", f64_tensor(&row, &[1, 1920]))
            .with("w", f64_tensor(&row, &[1, 1920]));
        let named = named.with("x_scales", ones.clone()).with("w_scales", ones);
        let y = |accumulator, precision| -> Result<f64> {
            let quantized = Quantized { accumulator, ..quantized };
            let y = forward_quantized(&named, &quantized, &mut Rounding::new(precision))?;
            Ok(values(y.tensor("y")?)?[0])
        };
        let exact = y(Accumulator::HOPPER_E4M3, Precision::Exact)?;
        assert_eq!(exact, 16384.0 + 1919.0);
        let runs = (0..32).map(|seed| y(Accumulator::HOPPER_E4M3, Precision::Working { seed }));
        let errors = runs.map(|run| Ok((run? - exact).abs())).collect::<Result<Vec<f64>>>()?;
        let largest = errors.into_iter().fold(0.0, f64::max);
        assert!((64.0..1000.0).contains(&largest), "{largest}");
        Ok(())
    }

    #[test]
    fn weights_whose_scales_leave_fp32_before_that_of_x_is_there_have_runs_that_are_finite()
    -> Result<()> {
        let quantized = Quantized {
            accumulator: Accumulator::HOPPER_E4M3,
            ..quantized(Weights::Mxfp4, 32, ScaleLayout::Plain)
        };
        let named = coded(&quantized, 2, 3, 64);
        // 2^125 of w and 2^-40 of x.
        let all = |name: &'static str, byte: f64| -> Result<Tensor> {
            Ok((named.tensor(name)?.zeros_like()? + byte)?)
        };
        let (x_scales, w_scales) = (all("x_scales", 87.0)?, all("w_scales", 252.0)?);
        let named = named.clone().with("x_scales", x_scales).with("w_scales", w_scales);
        for precision in
            [Precision::Exact, Precision::Working { seed: 1 }, Precision::Nearest { seed: 1 }]
        {
            let y = forward_quantized(&named, &quantized, &mut Rounding::new(precision))?;
            let y = values(y.tensor("y")?)?;
            assert!(
                y.iter().all(|y| y.is_finite()) && y.iter().any(|y| *y != 0.0),
                "{precision:?}: {y:?}"
            );
        }
        Ok(())
    }

    #[test]
    fn groups_are_layers_by_themselves() -> Result<()> {
        let groups: Vec<Named> = (0..3).map(|_| inputs(4, 5, 7)).collect();
        // One seed for all groups: another sign distinguishes them.
        let of = |name: &'static str| {
            groups
                .iter()
                .zip([1.0, -1.0, 0.5])
                .map(|(group, sign)| Ok((group.tensor(name)? * sign)?))
                .collect()
        };
        let stacked = |name: &'static str, axis: usize| -> Result<Tensor> {
            let all: Result<Vec<Tensor>> = of(name);
            Ok(Tensor::stack(&all?, axis)?)
        };
        let named = Named::new()
            .with("x", stacked("x", 1)?)
            .with("w", stacked("w", 0)?)
            .with("dy", stacked("dy", 1)?);
        let (y, gradients) = (
            grouped_forward(&named, &mut Rounding::exact())?,
            grouped_backward(&named, &mut Rounding::exact())?,
        );
        for (group, factor) in [1.0, 1.0, 0.25].into_iter().enumerate() {
            let own = forward(&groups[group], &mut Rounding::exact())?;
            let found = entry(y.tensor("y")?, 1, group)?;
            assert_eq!(values(&found)?, values(&(own.tensor("y")? * factor)?)?);
            let own = backward(&groups[group], &mut Rounding::exact())?;
            for (name, axis) in [("dx", 1), ("dw", 0)] {
                let found = entry(gradients.tensor(name)?, axis, group)?;
                assert_eq!(values(&found)?, values(&(own.tensor(name)? * factor)?)?, "{name}");
            }
        }
        assert!(grouped_forward(&inputs(4, 5, 7), &mut Rounding::exact()).is_err());
        Ok(())
    }

    #[test]
    fn golden_logits_of_a_router_agree() -> Result<()> {
        for name in ["router_topk__a", "router_topk__b", "router_topk__c", "router_hash__a"] {
            let golden = Golden::load(name);
            let weight = golden.f64("param.gate.weight");
            let hidden = golden.f64("in.hidden").reshape(((), weight.dim(1)?))?;
            let named = Named::new().with("x", hidden.clone()).with("w", weight.clone());
            let logits = golden.f64("out.logits").reshape(((), weight.dim(0)?))?;
            let terms = weight.dim(1)? as f64 + 1.0;
            let sizes =
                (hidden.abs()?.matmul(&weight.abs()?.t()?)? * (2.0 * terms * UNIT_ROUNDOFF))?;
            assert_within(
                name,
                forward(&named, &mut Rounding::exact())?.tensor("y")?,
                &logits,
                &sizes,
            );
        }
        Ok(())
    }

    #[test]
    fn tensors_that_do_not_fit_are_refused() {
        let named = inputs(2, 3, 5);
        let mut draw = Draw::new(1);
        for (name, shape) in [("w", [3, 4]), ("y_before", [2, 4]), ("x", [2, 6])] {
            let wrong = named.clone().with(name, draw.normal(&shape, 1.0));
            assert!(forward(&wrong, &mut Rounding::exact()).is_err(), "{name}");
        }
        assert!(forward(&inputs(2, 0, 5), &mut Rounding::exact()).is_err());
        assert!(forward(&inputs(2, 3, 0), &mut Rounding::exact()).is_err());
    }
}
