//! The rows of K = V after their projection: normalized, rotated by position, quantized and written
//! to the window cache (inference 3, 4, 5.1, 5.4, 8.3):
//!
//! ```text
//! n = weight x rstd                        [`crate::projections::rms_norm`]
//! r = n with its last channels rotated by the position of its token                              [`crate::projections::rope`]
//! y = r, first channels replaced by decoded codes with scales of 64      [`crate::quantize`]
//! cache[slots[t]] = the row of these codes, scales and the other channels of r              [`crate::cache::kv_cache`]
//! ```
//!
//! # Rounding points
//!
//! Those of the steps; n and r are bf16 between them, and the rounding to codes is a rounding
//! point. The cache row is not a separate result. It must decode to y bit for bit, with the
//! smallest scales, and rows of no token must be unchanged. [`rows_that_hold`] returns where this
//! is true.

use candle_core::Tensor;

use crate::cache::compressor::Epilogue;
use crate::cache::kv_cache::{RowFormat, SCALE_GROUP, e4m3_value};
use crate::conventions::Conventions;
use crate::error::{Result, require_that};
use crate::format::Format;
use crate::named::Named;
use crate::precision::Rounding;
use crate::projections::rms_norm;
use crate::projections::rope;
use crate::quantize::scale_byte;

/// `y` `[num_tokens, head_dim]`, stored in bf16, for these inputs: `x` in `rotation`
/// `[num_tokens, 1, head_dim]`, stored in bf16, whose last channels rotate (not inversely), and
/// `weight` `[head_dim]`, stored in f32.
///
/// # Errors
/// Tensors that do not match the format.
pub fn forward(
    rotation: &rope::Inputs,
    weight: &Tensor,
    format: RowFormat,
    eps: f64,
    rounding: &mut Rounding,
) -> Result<Tensor> {
    format.check()?;
    let (_, heads, head_dim) = rotation.x.dims3()?;
    let fits =
        heads == 1 && head_dim == format.head_dim() && 2 * rotation.cos.dim(1)? == format.rope_dim;
    require_that(
        "x",
        format!("{:?}", rotation.x.dims()),
        fits,
        "rows are those of the format, and its last part turns",
    )?;
    let norm = Named::new().with("x", rotation.x.flatten_to(1)?).with("weight", weight.clone());
    let norm = rms_norm::forward(&norm, eps, rounding)?;
    let n = rounding.bf16(norm.tensor("y")?)?.reshape(rotation.x.shape())?;
    let r = rope::forward(&rope::Inputs { x: n, ..rotation.clone() }, rounding)?.y;
    Epilogue::Fp8.of(&r.squeeze(1)?, format.rope_dim, Format::BF16, rounding)
}

/// For each slot of a cache, whether it holds what it must. Where a token wrote, the row must
/// decode to the token's row of `y`, and zeros must follow its scales. Elsewhere the row must be
/// unchanged. Also, for each slot and group, whether no smaller scale would suffice and the scale
/// is not below that of the smallest amax. This is true for every slot that no token wrote.
pub fn rows_that_hold(
    format: RowFormat,
    page_size: usize,
    [before, after]: [&[u8]; 2],
    slots: &[i32],
    y: &[f64],
    conventions: Conventions,
) -> [Vec<bool>; 2] {
    let (head_dim, groups) = (format.head_dim(), format.nope_dim / SCALE_GROUP);
    let num_slots = after.len() / format.bytes().page_bytes(1);
    let least_byte = scale_byte(&[0.0], Format::E4M3, conventions);
    let (mut rows, mut least) =
        (Vec::with_capacity(num_slots), Vec::with_capacity(num_slots * groups));
    for slot in 0..num_slots {
        let (data, scales) = row_of(format, page_size, after, slot);
        let Some(token) = slots.iter().position(|&own| usize::try_from(own) == Ok(slot)) else {
            rows.push(row_of(format, page_size, before, slot) == (data, scales));
            least.extend(vec![true; groups]);
            continue;
        };
        let same = |(a, b): (&f64, &f64)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
        let decoded = format.decode(data, scales);
        let decodes = decoded.iter().zip(&y[token * head_dim..(token + 1) * head_dim]).all(same);
        rows.push(decodes && scales[groups..].iter().all(|&byte| byte == 0));
        least.extend(data.chunks(SCALE_GROUP).zip(&scales[..groups]).map(|(codes, &scale)| {
            let largest = codes.iter().map(|&code| e4m3_value(code).abs()).fold(0.0, f64::max);
            // Twice the smallest scale passes where the largest value is rounded to half of the
            // largest code.
            let no_less =
                largest >= Format::E4M3.largest / 2.0 || scale == least_byte || scale == 255;
            no_less && scale >= least_byte
        }));
    }
    [rows, least]
}

/// The data and scales of a slot.
fn row_of(format: RowFormat, page_size: usize, pages: &[u8], slot: usize) -> (&[u8], &[u8]) {
    let bytes = format.bytes();
    let (data_at, scales_at) = bytes.place(slot, page_size);
    (&pages[data_at..data_at + bytes.data], &pages[scales_at..scales_at + bytes.scales])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::kv_cache::e4m3_code;
    use crate::precision::{Precision, values};
    use crate::testing::{Draw, f64_tensor};

    const FORMAT: RowFormat = RowFormat { nope_dim: 128, rope_dim: 8 };

    fn rows(precision: Precision) -> Result<Tensor> {
        let mut draw = Draw::new(2);
        let (cos, sin) = (f64_tensor(&[0.6; 12], &[3, 4]), f64_tensor(&[0.8; 12], &[3, 4]));
        let x = draw.bf16(&[3, 1, 136], 2.0);
        let rotation = rope::Inputs { x, cos, sin, positions: None, inverse: false };
        forward(&rotation, &draw.bf16(&[136], 1.0), FORMAT, 1e-6, &mut Rounding::new(precision))
    }

    #[test]
    fn what_is_stored_of_a_row_is_the_row() -> Result<()> {
        // Values of the cache are values of y: encoding does not change them.
        let y = rows(Precision::Nearest { seed: 1 })?;
        let y: Vec<f64> = values(&y)?.into_iter().map(|y| Format::BF16.nearest(y)).collect();
        let page = FORMAT.bytes().page_bytes(2);
        let before: Vec<u8> = (0..2 * page).map(|at| at as u8).collect();
        let mut after = before.clone();
        let slots = [3, -1, 0];
        let row = |token: usize| FORMAT.encode(&y[token * 136..(token + 1) * 136]);
        FORMAT.bytes().scatter(&mut after, 2, &slots, row)?;
        let held = |after: &[u8]| {
            rows_that_hold(FORMAT, 2, [&before, after], &slots, &y, Conventions::default())
        };
        let [all, least] = held(&after);
        assert_eq!((all, least), (vec![true; 4], vec![true; 8]));
        // A byte of data, of a scale, of the padding of the scales, and of a row of no token.
        let (data, scales) = FORMAT.bytes().place(3, 2);
        let (nobodys, _) = FORMAT.bytes().place(1, 2);
        for (at, slot) in [(data + 7, 3), (scales, 3), (scales + 5, 3), (nobodys, 1)] {
            let mut wrong = after.clone();
            wrong[at] ^= 1;
            assert!(!held(&wrong)[0][slot], "{at}");
        }
        // Half of each value with twice the scale decodes alike, but is not the smallest scale.
        let mut coarse = after.clone();
        coarse[scales] += 1;
        coarse[data..data + 64]
            .iter_mut()
            .for_each(|code| *code = e4m3_code(e4m3_value(*code) / 2.0));
        assert!(!held(&coarse)[1][6]);
        // It also must not be less than that of the smallest amax, whatever the codes are.
        let mut fine = after.clone();
        fine[scales] = scale_byte(&[0.0], Format::E4M3, Conventions::default()) - 1;
        fine[data] = 0x7e;
        assert!(!held(&fine)[1][6]);
        Ok(())
    }

    #[test]
    fn channels_that_turn_are_kept_and_the_others_are_numbers_of_codes() -> Result<()> {
        let (exact, nearest) = (rows(Precision::Exact)?, rows(Precision::Nearest { seed: 1 })?);
        for (exact, nearest) in values(&exact)?.chunks(136).zip(values(&nearest)?.chunks(136)) {
            for (channel, (exact, nearest)) in exact.iter().zip(nearest).enumerate() {
                // Half a unit of the last place of three roundings to bf16, and of e4m3.
                let bound =
                    exact.abs() * (2f64.powi(-7) + if channel < 128 { 2f64.powi(-4) } else { 0.0 });
                assert!((exact - nearest).abs() <= bound + 0.02, "{channel}: {exact} {nearest}");
            }
        }
        let wrong = rope::Inputs {
            x: f64_tensor(&[1.0; 128], &[1, 1, 128]),
            cos: f64_tensor(&[1.0; 4], &[1, 4]),
            sin: f64_tensor(&[0.0; 4], &[1, 4]),
            positions: None,
            inverse: false,
        };
        assert!(
            forward(&wrong, &f64_tensor(&[1.0; 128], &[128]), FORMAT, 1e-6, &mut Rounding::exact())
                .is_err()
        );
        Ok(())
    }
}
