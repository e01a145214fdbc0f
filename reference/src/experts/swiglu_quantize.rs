//! SwiGLU with clamps and an optional row weight, quantized to e4m3 in groups of a row (inference
//! 5.4, 11.1, training 11.2):
//!
//! ```text
//! o = swiglu(gate, up, weight)           [`crate::experts::swiglu`], optionally rounded to bf16
//! codes, scales = quantize(o)            [`crate::formats::quantize_fp8`]
//! ```
//!
//! A padding row is quantized as a row of zeros. Gradients are those of o without the quantization.
//!
//! # Rounding points
//!
//! Those of [`crate::experts::swiglu`] and the rounding to bf16. The compared values are the
//! decoded codes and scales. The rounding to codes is therefore the last one, and this oracle does
//! not apply it.

use candle_core::Tensor;

use crate::conventions::Conventions;
use crate::error::{Result, require};
use crate::experts::swiglu;
use crate::format::Format;
use crate::formats::quantize_fp8::{Options, read_scales};
use crate::named::Named;
use crate::precision::{Rounding, values};
use crate::quantize::{ScaleType, scale_by};
use crate::select::unless;

/// For the inputs of [`swiglu::forward`], in groups of `group` along a row:
///
/// - `decoded` `[num_rows, width]`: the value that codes and scales decode to, before o is rounded
///   to codes; NaN in groups that are not finite;
/// - `group_scales` `[num_rows, num_groups]`: the scales;
/// - `quotients` `[num_rows, width]`: o divided by its scale, before it is rounded to codes.
///
/// # Errors
/// Those of [`swiglu::forward`].
pub fn forward(
    inputs: &Named,
    limit: f64,
    group: usize,
    scale: ScaleType,
    round_to_bf16: bool,
    rounding: &mut Rounding,
) -> Result<Named> {
    let product = swiglu::forward(inputs, limit, rounding)?;
    let product = product.tensor("y")?;
    let product = if round_to_bf16 { rounding.bf16(product)? } else { product.clone() };
    let (num_rows, width) = product.dims2()?;
    let (mut scales, mut undefined, mut quotients) = (Vec::new(), Vec::new(), Vec::new());
    let conventions = rounding.conventions();
    for group in values(&product)?.chunks(width).flat_map(|row| row.chunks(group)) {
        let scale = scale_by(group, Format::E4M3, scale, conventions);
        undefined.extend(group.iter().map(|_| u8::from(scale.is_nan())));
        quotients.extend(group.iter().map(|x| x / scale));
        scales.push(scale);
    }
    let quotients =
        rounding.f32(&Tensor::from_vec(quotients, (num_rows, width), product.device())?)?;
    let undefined = Tensor::from_vec(undefined, (num_rows, width), product.device())?;
    let scales = Tensor::from_vec(scales, (num_rows, width.div_ceil(group)), product.device())?;
    let decoded = unless(&undefined, &product, f64::NAN)?;
    Ok(Named::new()
        .with("decoded", decoded)
        .with("group_scales", scales)
        .with("quotients", quotients))
}

/// `dgate`, `dup` and, where a weight is present, `dweight`: those of [`swiglu::backward`].
///
/// # Errors
/// Those of [`swiglu::backward`].
pub fn backward(inputs: &Named, limit: f64, rounding: &mut Rounding) -> Result<Named> {
    swiglu::backward(inputs, limit, rounding)
}

/// The meaning of stored `codes` and `scales`.
pub struct Stored {
    /// The values of the codes, row by row.
    pub values: Vec<f64>,
    /// The values of the scales, row by row of groups.
    pub scales: Vec<f64>,
    /// For each group, row by row, whether no smaller scale would suffice. This is true if half the
    /// scale could not represent the largest code (for scales that are not powers of two, the
    /// largest of all codes). It is also true if the scale is the smallest possible one, or NaN.
    /// Twice the smallest scale passes where the largest value is rounded to half of the largest
    /// code.
    pub least: Vec<bool>,
}

/// Reads the outputs of a kernel with these conventions.
///
/// # Errors
/// Shapes that do not match.
pub fn stored(
    codes: &Tensor,
    scales: &Tensor,
    options: Options,
    conventions: Conventions,
) -> Result<Stored> {
    let (num_rows, width) = codes.dims2()?;
    let [_, columns] = options.group.extents();
    let expected = options.scales(num_rows, width);
    require("scales", scales, &expected.shape())?;
    let scales = read_scales(expected, &crate::precision::values(scales)?);
    let codes: Vec<u8> =
        crate::precision::values(codes)?.into_iter().map(|code| code as u8).collect();
    let values = Format::E4M3.values(&codes);
    let floor = scale_by(&[0.0], Format::E4M3, options.scale, conventions);
    let full = if options.scale == ScaleType::Fp32 {
        Format::E4M3.largest
    } else {
        Format::E4M3.largest / 2.0
    };
    let groups = values.chunks(width.max(1)).flat_map(|row| row.chunks(columns));
    let is_least = |(group, &scale): (&[f64], &f64)| {
        let largest = group.iter().fold(0.0, |largest: f64, value| largest.max(value.abs()));
        largest >= full || scale == floor || scale.is_nan()
    };
    let least = groups.zip(&scales).map(is_least).collect();
    Ok(Stored { values, scales, least })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::quantize_fp8::{self, Group};
    use crate::formats::scale_layout::ScaleLayout;
    use crate::quantize::scale_of;
    use crate::testing::{Draw, f64_tensor};

    fn case() -> Named {
        let mut draw = Draw::new(3);
        let (gate, up) = (draw.bf16(&[3, 70], 4.0), draw.bf16(&[3, 70], 4.0));
        let named =
            Named::new().with("gate", gate).with("up", up).with("weight", draw.bf16(&[3], 1.0));
        named.with("pos_to_token_topk", f64_tensor(&[4.0, -1.0, 0.0], &[3]))
    }

    fn of(case: &Named, scale: ScaleType) -> Result<[Vec<f64>; 2]> {
        let named = forward(case, 2.5, 32, scale, true, &mut Rounding::exact())?;
        Ok([values(named.tensor("decoded")?)?, values(named.tensor("group_scales")?)?])
    }

    #[test]
    fn what_is_decoded_is_the_product_and_scales_are_those_of_its_groups() -> Result<()> {
        for scale in [ScaleType::E8m0, ScaleType::Fp32] {
            let [decoded, scales] = of(&case(), scale)?;
            let product =
                values(swiglu::forward(&case(), 2.5, &mut Rounding::exact())?.tensor("y")?)?;
            assert_eq!(decoded, product);
            let groups = product.chunks(70).flat_map(|row| row.chunks(32));
            assert_eq!(
                scales,
                groups.map(|group| scale_of(group, Format::E4M3, scale)).collect::<Vec<_>>()
            );
        }
        Ok(())
    }

    #[test]
    fn a_padding_row_is_one_of_zeros_whatever_it_holds() -> Result<()> {
        let with = |x: f64| case().with("gate", f64_tensor(&[x; 210], &[3, 70]));
        for x in [1e30, f64::NAN] {
            let [decoded, scales] = of(&with(x), ScaleType::E8m0)?;
            assert!(decoded[70..140].iter().all(|&x| x == 0.0));
            assert_eq!(scales[3..6], [2f64.powi(-22); 3]);
            assert_eq!(decoded[0].is_nan(), x.is_nan());
        }
        Ok(())
    }

    #[test]
    fn a_group_with_a_nan_decodes_to_nan_and_its_neighbours_do_not() -> Result<()> {
        let mut gate = vec![1.0; 210];
        gate[40] = f64::NAN;
        let [decoded, scales] =
            of(&case().with("gate", f64_tensor(&gate, &[3, 70])), ScaleType::Fp32)?;
        let nan: Vec<usize> = (0..210).filter(|&i| decoded[i].is_nan()).collect();
        assert_eq!(nan, (32..64).collect::<Vec<_>>());
        assert!(scales[1].is_nan() && scales[0].is_finite());
        Ok(())
    }

    #[test]
    fn scales_that_are_twice_as_large_as_they_need_be_are_told_from_the_least() -> Result<()> {
        let options =
            Options { group: Group::Row(32), scale: ScaleType::E8m0, layout: ScaleLayout::Plain };
        let x = Named::new().with("x", Draw::new(4).bf16(&[4, 96], 3.0));
        let quantized = quantize_fp8::quantize(&x, options)?;
        let (codes, scales) = (quantized.tensor("codes")?, quantized.tensor("scales")?);
        assert!(
            stored(codes, scales, options, Conventions::default())?
                .least
                .iter()
                .all(|&least| least)
        );
        // Half of each value with twice the scale.
        let halved: Vec<f64> = values(codes)?
            .iter()
            .map(|&code| {
                let half = Format::E4M3.value(code as u64) / 2.0;
                Format::E4M3.code(half) as f64
            })
            .collect();
        let halved = f64_tensor(&halved, &[4, 96]);
        // A code of half of 448 may also come from a slightly larger value, which does not fit half
        // the scale. No code distinguishes the two.
        let largest = |group: &[f64]| {
            group.iter().fold(0.0, |m: f64, &code| m.max(Format::E4M3.value(code as u64).abs()))
        };
        let full: Vec<bool> =
            values(codes)?.chunks(32).map(|group| largest(group) == Format::E4M3.largest).collect();
        assert_eq!(stored(&halved, &(scales + 1.0)?, options, Conventions::default())?.least, full);
        assert!(full.iter().filter(|&&full| !full).count() > full.len() / 2);
        Ok(())
    }
}
