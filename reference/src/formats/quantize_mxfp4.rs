//! Rows as e2m1 codes with e8m0 scales of 32 neighbours, and back (inference 5.3, 5.4, 5.7):
//!
//! ```text
//! amax = max(max |x|, 6 * 2^-126)      s = the smallest power of two with amax <= 6 s
//! code = e2m1(x / s)                   y = value(code) s
//! ```
//!
//! The last group of a row may be smaller. A group with a NaN or an infinity has the scale NaN and,
//! because e2m1 has no NaN, codes of 6.
//!
//! # Rounding points
//!
//! Those in the formulas, each to nearest: codes, scales and their decoded values have one value.

use candle_core::Tensor;

use crate::conventions::Conventions;
use crate::error::{Result, require, require_that};
use crate::format::{Format, pack_nibbles, unpack_nibbles};
use crate::formats::quantize_fp8::{read_scales, stored_scales};
use crate::formats::scale_layout::{ScaleLayout, Scales};
use crate::named::Named;
use crate::precision::values;
use crate::quantize::{self, Quantized};

/// Neighbours in a row that share a scale.
pub const GROUP: usize = 32;

/// The scales of a matrix.
pub fn scales(layout: ScaleLayout, num_rows: usize, width: usize) -> Scales {
    Scales { layout, bytes: true, rows: num_rows, groups: width.div_ceil(GROUP) }
}

/// The outputs for `x` `[num_rows, width]`, stored in bf16 or f32, of an even width:
///
/// - `codes` `[num_rows, width / 2]`, two to a byte, the even one in the low nibble;
/// - `scales`, of the shape that [`scales`] gives: bytes, or words of four bytes.
///
/// # Errors
/// A tensor of the wrong shape.
pub fn quantize(inputs: &Named, layout: ScaleLayout) -> Result<Named> {
    quantize_by(inputs, layout, Conventions::default())
}

/// The same by these conventions of a kernel.
///
/// # Errors
/// As [`quantize()`].
pub fn quantize_by(inputs: &Named, layout: ScaleLayout, conventions: Conventions) -> Result<Named> {
    let axes = ["num_rows", "width"];
    let [num_rows, width] = inputs.extents(axes, &[(&["x"], &axes)])?;
    require_that("width", width, width.is_multiple_of(2) && width > 0, "two codes fill a byte")?;
    let x = inputs.tensor("x")?;
    let (mut codes, mut numbers) = (Vec::new(), Vec::new());
    for row in values(x)?.chunks(width) {
        let Quantized { codes: of_row, scale_bytes } =
            quantize::quantize_by(row, GROUP, Format::E2M1, conventions);
        codes.extend(pack_nibbles(&of_row, width)?.into_iter().map(f64::from));
        numbers.extend(scale_bytes.into_iter().map(|byte| Format::E8M0.value(byte.into())));
    }
    let (shape, stored) = stored_scales(scales(layout, num_rows, width), &numbers);
    Ok(Named::new()
        .with("codes", Tensor::from_vec(codes, (num_rows, width / 2), x.device())?)
        .with("scales", Tensor::from_vec(stored, shape, x.device())?))
}

/// `y` `[num_rows, width]`, stored in `format`, for `codes` and `scales` as [`quantize()`] returns
/// them.
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
    let numbers = read_scales(scales, &values(stored)?);
    let y = |(at, code): (usize, u8)| {
        let scale = numbers[at / width * scales.groups + at % width / GROUP];
        format.nearest(Format::F32.nearest(Format::E2M1.value(code.into()) * scale))
    };
    let y: Vec<f64> = unpack_nibbles(&bytes).into_iter().enumerate().map(y).collect();
    Ok(Named::new().with("y", Tensor::from_vec(y, (num_rows, width), codes.device())?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Draw, f64_tensor};

    #[test]
    fn what_is_quantized_decodes_to_numbers_half_a_step_away_at_most_in_every_layout() -> Result<()>
    {
        let x = Draw::new(1).bf16(&[33, 72], 3.0);
        for layout in [ScaleLayout::Plain, ScaleLayout::MnMajor, ScaleLayout::Blocked] {
            let quantized = quantize(&Named::new().with("x", x.clone()), layout)?;
            let y = dequantize(&quantized, layout, Format::F32)?;
            let numbers =
                read_scales(scales(layout, 33, 72), &values(quantized.tensor("scales")?)?);
            for (at, (x, y)) in values(&x)?.into_iter().zip(values(y.tensor("y")?)?).enumerate() {
                let scale = numbers[at / 72 * 3 + at % 72 / GROUP];
                assert!(
                    (x - y).abs() <= Format::E2M1.half_ulp(x / scale) * scale,
                    "{layout:?} {at}"
                );
            }
        }
        Ok(())
    }

    #[test]
    fn ties_go_to_the_even_code_and_the_first_of_two_lies_in_the_low_nibble() -> Result<()> {
        let ties = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0];
        let x = Named::new().with("x", f64_tensor(&ties, &[1, 10]));
        let quantized = quantize(&x, ScaleLayout::Plain)?;
        assert_eq!(values(quantized.tensor("scales")?)?, [127.0]);
        let codes: Vec<u8> =
            values(quantized.tensor("codes")?)?.into_iter().map(|byte| byte as u8).collect();
        assert_eq!(codes, [0x07, 0x22, 0x44, 0x66, 0xe8]);
        Ok(())
    }

    #[test]
    fn a_group_that_is_not_finite_decodes_to_nan_and_its_neighbours_do_not() -> Result<()> {
        let mut x = vec![0.0; 64];
        x[3] = f64::INFINITY;
        let quantized =
            quantize(&Named::new().with("x", f64_tensor(&x, &[1, 64])), ScaleLayout::Plain)?;
        assert_eq!(values(quantized.tensor("scales")?)?, [255.0, 1.0]);
        let y = values(dequantize(&quantized, ScaleLayout::Plain, Format::BF16)?.tensor("y")?)?;
        assert!(y[..32].iter().all(|y| y.is_nan()) && y[32..].iter().all(|&y| y == 0.0));
        Ok(())
    }

    #[test]
    fn odd_widths_and_scales_of_another_shape_are_refused_and_no_rows_are_no_error() -> Result<()> {
        let x = |shape: &[usize]| {
            Named::new().with("x", f64_tensor(&vec![0.0; shape.iter().product()], shape))
        };
        assert_eq!(quantize(&x(&[0, 64]), ScaleLayout::Plain)?.tensor("codes")?.dims(), [0, 32]);
        assert!(
            quantize(&x(&[1, 3]), ScaleLayout::Plain).unwrap_err().to_string().contains("width")
        );
        let quantized = quantize(&x(&[1, 64]), ScaleLayout::Plain)?;
        assert!(
            dequantize(&quantized, ScaleLayout::Blocked, Format::F32)
                .unwrap_err()
                .to_string()
                .contains("scales")
        );
        Ok(())
    }
}
