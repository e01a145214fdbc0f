//! Rows as e2m1 codes with scales of two levels, and back (inference 5.3, 5.6, 5.7). The scale s2
//! is that of the tensor, and amax is the largest magnitude of each group of 16 neighbours in a
//! row:
//!
//! ```text
//! s2   = max(fp32(amax of the tensor / 2688), 2^-126)         1 where all numbers are 0, NaN where one is not finite
//! sb   = e4m3(fp32(fp32(amax / 6) / s2))                      NaN where a number of the group is not finite
//! code = e2m1(fp32(x / fp32(sb s2)))                          0 where sb s2 is; 6 where it is NaN, as e2m1 has no NaN
//! y    = fp32(value(code) sb s2), rounded once more where it is stored in bf16
//! ```
//!
//! The last group of a row may be smaller.
//!
//! # Rounding points
//!
//! Those in the formulas, each to nearest: codes, scales and their decoded values have one value.

use candle_core::Tensor;

use crate::error::{Result, require, require_that};
use crate::format::{Format, pack_nibbles, power_of_two, unpack_nibbles};
use crate::formats::scale_layout::{ScaleLayout, Scales};
use crate::named::Named;
use crate::precision::values;

/// Neighbours in a row that share a scale.
pub const GROUP: usize = 16;

/// The scales of a matrix.
pub fn scales(layout: ScaleLayout, num_rows: usize, width: usize) -> Scales {
    Scales { layout, bytes: true, rows: num_rows, groups: width.div_ceil(GROUP) }
}

fn quotient(x: f64, y: f64) -> f64 {
    Format::F32.nearest(x / y)
}

/// The largest magnitude; NaN where a value is not finite.
fn amax(numbers: &[f64]) -> f64 {
    let largest = numbers.iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
    if numbers.iter().all(|x| x.is_finite()) { largest } else { f64::NAN }
}

/// `global_scale` `[1]`, stored in f32, of `x` `[num_rows, width]`.
///
/// # Errors
/// A tensor of the wrong shape.
pub fn global_scale(inputs: &Named) -> Result<Named> {
    let axes = ["num_rows", "width"];
    inputs.extents(axes, &[(&["x"], &axes)])?;
    let x = inputs.tensor("x")?;
    let amax = amax(&values(x)?);
    let least = power_of_two(Format::F32.min_exponent);
    let largest_code = Format::E2M1.largest * Format::E4M3.largest;
    let scale = match amax {
        0.0 => 1.0,
        amax if amax.is_nan() => f64::NAN,
        amax => quotient(amax, largest_code).max(least),
    };
    Ok(Named::new().with("global_scale", Tensor::from_vec(vec![scale], 1, x.device())?))
}

/// The e4m3 code of the scale of a group and the e2m1 codes of its values.
fn quantize_group(group: &[f64], global_scale: f64) -> (u8, Vec<u8>) {
    let amax = amax(group);
    let scale = Format::E4M3.code(quotient(quotient(amax, Format::E2M1.largest), global_scale));
    let divisor = Format::F32.nearest(Format::E4M3.value(scale) * global_scale);
    let code =
        |x: &f64| if divisor == 0.0 { 0 } else { Format::E2M1.code(quotient(*x, divisor)) as u8 };
    (scale as u8, group.iter().map(code).collect())
}

/// The outputs for `x` `[num_rows, width]`, stored in bf16 or f32, of an even width, and
/// `global_scale` `[1]`, stored in f32:
///
/// - `codes` `[num_rows, width / 2]`, two to a byte, the even one in the low nibble;
/// - `scales`, e4m3, of the shape that [`scales`] gives: bytes, or words of four bytes.
///
/// # Errors
/// A tensor of the wrong shape.
pub fn quantize(inputs: &Named, layout: ScaleLayout) -> Result<Named> {
    let axes = ["num_rows", "width"];
    let [num_rows, width] = inputs.extents(axes, &[(&["x"], &axes)])?;
    require_that("width", width, width.is_multiple_of(2) && width > 0, "two codes fill a byte")?;
    let (x, global_scale) = (inputs.tensor("x")?, inputs.tensor("global_scale")?);
    require("global_scale", global_scale, &[1])?;
    let global_scale = values(global_scale)?[0];
    let (mut codes, mut bytes) = (Vec::new(), Vec::new());
    for group in values(x)?.chunks(width).flat_map(|row| row.chunks(GROUP)) {
        let (scale, of_group) = quantize_group(group, global_scale);
        codes.extend(pack_nibbles(&of_group, of_group.len())?.into_iter().map(f64::from));
        bytes.push(scale);
    }
    let scales = scales(layout, num_rows, width);
    Ok(Named::new()
        .with("codes", Tensor::from_vec(codes, (num_rows, width / 2), x.device())?)
        .with("scales", Tensor::from_vec(scales.stored_bytes(&bytes), scales.shape(), x.device())?))
}

/// `y` `[num_rows, width]`, stored in `format`, for `codes`, `scales` and `global_scale` as in
/// [`quantize`].
///
/// # Errors
/// A tensor of the wrong shape.
pub fn dequantize(inputs: &Named, layout: ScaleLayout, format: Format) -> Result<Named> {
    let axes = ["num_rows", "code_bytes"];
    let [num_rows, code_bytes] = inputs.extents(axes, &[(&["codes"], &axes)])?;
    let (codes, stored) = (inputs.tensor("codes")?, inputs.tensor("scales")?);
    let (width, bytes) =
        (2 * code_bytes, values(codes)?.into_iter().map(|byte| byte as u8).collect::<Vec<_>>());
    let scales = scales(layout, num_rows, width);
    require("scales", stored, &scales.shape())?;
    require("global_scale", inputs.tensor("global_scale")?, &[1])?;
    let global_scale = values(inputs.tensor("global_scale")?)?[0];
    let of_groups = scales.read_bytes(&values(stored)?);
    let y = |(at, code): (usize, u8)| {
        let scale =
            Format::E4M3.value(of_groups[at / width * scales.groups + at % width / GROUP].into());
        format.nearest(Format::F32.nearest(Format::E2M1.value(code.into()) * scale * global_scale))
    };
    let y: Vec<f64> = unpack_nibbles(&bytes).into_iter().enumerate().map(y).collect();
    Ok(Named::new().with("y", Tensor::from_vec(y, (num_rows, width), codes.device())?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Draw, f64_tensor};

    fn with_global_scale(x: Tensor) -> Result<Named> {
        let x = Named::new().with("x", x);
        let scale = global_scale(&x)?.tensor("global_scale")?.clone();
        Ok(x.with("global_scale", scale))
    }

    #[test]
    fn what_is_quantized_decodes_to_numbers_half_a_step_away_and_the_largest_keep_their_size()
    -> Result<()> {
        let x = Draw::new(1).bf16(&[33, 72], 3.0);
        for layout in [ScaleLayout::Plain, ScaleLayout::MnMajor, ScaleLayout::Blocked] {
            let inputs = with_global_scale(x.clone())?;
            let s2 = inputs.tensor("global_scale")?.clone();
            let quantized = quantize(&inputs, layout)?.with("global_scale", s2);
            let y = values(dequantize(&quantized, layout, Format::F32)?.tensor("y")?)?;
            let x = values(&x)?;
            for (row_x, row_y) in x.chunks(72).zip(y.chunks(72)) {
                for (x, y) in row_x.chunks(GROUP).zip(row_y.chunks(GROUP)) {
                    // A scale of e4m3 is off by a sixteenth at most, and a step of e2m1 is a third
                    // of its value.
                    let amax = amax(x);
                    assert!(
                        x.iter()
                            .zip(y)
                            .all(|(x, y)| (x - y).abs() <= amax * (1.0 / 6.0 + 1.0 / 16.0)),
                        "{layout:?}"
                    );
                }
            }
        }
        Ok(())
    }

    #[test]
    fn the_scale_of_the_tensor_is_one_of_zeros_never_subnormal_and_nan_where_a_number_is()
    -> Result<()> {
        let of = |x: f64| -> Result<f64> {
            Ok(values(with_global_scale(f64_tensor(&[0.0, x], &[1, 2]))?.tensor("global_scale")?)?
                [0])
        };
        assert_eq!([of(0.0)?, of(-2688.0)?, of(1e-40)?], [1.0, 1.0, 2f64.powi(-126)]);
        assert!(of(f64::NAN)?.is_nan() && of(f64::INFINITY)?.is_nan());
        Ok(())
    }

    #[test]
    fn a_group_that_is_not_finite_decodes_to_nan_and_one_of_small_numbers_to_zeros() -> Result<()> {
        let mut x = vec![1e-9; 48];
        x[3] = f64::NEG_INFINITY;
        x[20] = 6.0;
        let inputs = Named::new()
            .with("x", f64_tensor(&x, &[1, 48]))
            .with("global_scale", f64_tensor(&[1.0], &[1]));
        let quantized = quantize(&inputs, ScaleLayout::Plain)?;
        assert_eq!(values(quantized.tensor("scales")?)?, [127.0, 56.0, 0.0]);
        let quantized = quantized.with("global_scale", f64_tensor(&[1.0], &[1]));
        let y = values(dequantize(&quantized, ScaleLayout::Plain, Format::BF16)?.tensor("y")?)?;
        assert!(
            y[..16].iter().all(|y| y.is_nan()) && y[32..].iter().all(|&y| y == 0.0) && y[20] == 6.0
        );
        Ok(())
    }

    #[test]
    fn odd_widths_and_tensors_of_another_shape_are_refused() {
        let one = || Named::new().with("global_scale", f64_tensor(&[1.0], &[1]));
        let odd = quantize(&one().with("x", f64_tensor(&[0.0; 3], &[1, 3])), ScaleLayout::Plain);
        assert!(odd.unwrap_err().to_string().contains("width"));
        let two = one()
            .with("global_scale", f64_tensor(&[1.0; 2], &[2]))
            .with("x", f64_tensor(&[0.0; 4], &[1, 4]));
        assert!(
            quantize(&two, ScaleLayout::Plain).unwrap_err().to_string().contains("global_scale")
        );
    }
}
