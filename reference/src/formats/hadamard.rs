//! The orthonormal Walsh-Hadamard transform of rows of 128, stored or quantized (inference 5.4, 7,
//! 7.1).
//!
//! ```text
//! y[i] = 128^-0.5 sum over j of (-1)^popcount(i AND j) x[j]
//! ```
//!
//! It is symmetric and its own inverse, so that `dx` is the transform of `dy`.
//!
//! # Rounding points
//!
//! The sums are those of seven steps of butterflies, `(a, b) -> (a + b, a - b)` for pairs at
//! distance 1, 2, 4 ... 64, in this order. Each sum is an fp32 value; so is the product with
//! 128^-0.5. Values are rounded to bf16 before they are quantized. Codes and scales follow from
//! these values without any free choice: every run gives the same.

use candle_core::Tensor;

use crate::error::{Result, require_that};
use crate::format::{Format, pack_nibbles};
use crate::named::Named;
use crate::precision::{Precision, Rounding, values};
use crate::quantize::{Quantized, quantize};

/// Length of a row.
pub const DIM: usize = 128;

/// How the transform is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// As values.
    Values,
    /// As e2m1 codes with an e8m0 scale for each 32 of them.
    E2m1,
    /// As e4m3 codes with an fp32 scale, a power of two, for each row.
    E4m3,
}

/// The outputs for `x` `[num_rows, 128]`, in the form of `stored`:
///
/// - `y` `[num_rows, 128]`;
/// - `codes` `[num_rows, 64]`, two to a byte, the even one in the low nibble, and `scale_bytes`
///   `[num_rows, 4]`;
/// - `codes` `[num_rows, 128]`, bytes, and `scales` `[num_rows]`, stored in f32.
///
/// # Errors
/// A tensor of the wrong shape.
pub fn forward(inputs: &Named, stored: Stored, rounding: &mut Rounding) -> Result<Named> {
    let x = inputs.tensor("x")?;
    let num_rows = check(inputs, "x")?;
    let (format, group) = match stored {
        Stored::Values => return Ok(Named::new().with("y", transform(x, rounding)?)),
        Stored::E2m1 => (Format::E2M1, 32),
        Stored::E4m3 => (Format::E4M3, DIM),
    };
    let y = transform(x, &mut Rounding::new(Precision::Nearest { seed: 0 }))?;
    let y: Vec<f64> = values(&y)?.into_iter().map(|y| Format::BF16.nearest(y)).collect();
    let Quantized { codes, scale_bytes } = quantize(&y, group, format);
    let rows = |bytes: Vec<u8>, width: usize| -> Result<Tensor> {
        Ok(Tensor::from_vec(
            bytes.into_iter().map(f64::from).collect(),
            (num_rows, width),
            x.device(),
        )?)
    };
    if stored == Stored::E2m1 {
        let codes = rows(pack_nibbles(&codes, DIM)?, DIM / 2)?;
        return Ok(Named::new()
            .with("codes", codes)
            .with("scale_bytes", rows(scale_bytes, DIM / group)?));
    }
    let scales: Vec<f64> =
        scale_bytes.into_iter().map(|byte| Format::E8M0.value(byte.into())).collect();
    let scales = Tensor::from_vec(scales, num_rows, x.device())?;
    Ok(Named::new().with("codes", rows(codes, DIM)?).with("scales", scales))
}

/// `dx` `[num_rows, 128]` for `dy`, of the shape and type of y. The result is empty without a `dy`,
/// because codes have no gradient.
///
/// # Errors
/// A tensor of the wrong shape.
pub fn backward(inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    let Some(dy) = inputs.get("dy") else { return Ok(Named::new()) };
    check(inputs, "dy")?;
    Ok(Named::new().with("dx", transform(dy, rounding)?))
}

/// The number of rows.
fn check(inputs: &Named, name: &'static str) -> Result<usize> {
    let [num_rows, dim] =
        inputs.extents(["num_rows", "head_dim"], &[(&[name], &["num_rows", "head_dim"])])?;
    require_that("head_dim", dim, dim == DIM, "the transform is one of 128")?;
    Ok(num_rows)
}

fn transform(x: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
    let shape = x.dims2()?;
    let mut x = x.clone();
    if shape.0 == 0 {
        return Ok(x);
    }
    for h in (0..).map(|step| 1 << step).take_while(|&h| h < DIM) {
        let pairs = x.reshape((shape.0, DIM / (2 * h), 2, h))?;
        let (a, b) = (pairs.narrow(2, 0, 1)?, pairs.narrow(2, 1, 1)?);
        let (sum, difference) = (rounding.f32(&(&a + &b)?)?, rounding.f32(&(&a - &b)?)?);
        x = Tensor::cat(&[sum, difference], 2)?.reshape(shape)?;
    }
    let inverse_root = rounding.constant_f32((DIM as f64).sqrt().recip());
    rounding.f32(&(x * inverse_root)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::unpack_nibbles;
    use crate::testing::{Draw, UNIT_ROUNDOFF, assert_within, dot, dot_of_magnitudes, f64_tensor};

    /// The definition itself, sign by sign.
    fn by_definition(x: &[f64]) -> Vec<f64> {
        let sign =
            |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
        let row = |row: &[f64], i: usize| -> f64 {
            row.iter().enumerate().map(|(j, x)| sign(i, j) * x).sum()
        };
        x.chunks(DIM).flat_map(|x| (0..DIM).map(|i| row(x, i) * 128f64.sqrt().recip())).collect()
    }

    fn of(x: Tensor) -> Named {
        Named::new().with("x", x)
    }

    #[test]
    fn butterflies_are_the_definition_and_their_own_inverse() -> Result<()> {
        let x = Draw::new(1).normal(&[5, DIM], 1.0);
        let y = forward(&of(x.clone()), Stored::Values, &mut Rounding::exact())?;
        let y = y.tensor("y")?;
        // 128 terms, and the same number in another order.
        let bound =
            f64_tensor(&vec![4.0 * 128.0 * UNIT_ROUNDOFF * 128f64.sqrt(); 5 * DIM], &[5, DIM]);
        assert_within("y", y, &f64_tensor(&by_definition(&values(&x)?), &[5, DIM]), &bound);
        let back = forward(&of(y.clone()), Stored::Values, &mut Rounding::exact())?;
        assert_within("x", back.tensor("y")?, &x, &bound);
        Ok(())
    }

    #[test]
    fn the_backward_is_the_adjoint_of_the_forward() -> Result<()> {
        let mut draw = Draw::new(2);
        let (x, dy) = (draw.normal(&[3, DIM], 1.0), draw.normal(&[3, DIM], 1.0));
        let y = forward(&of(x.clone()), Stored::Values, &mut Rounding::exact())?;
        let dx = backward(&Named::new().with("dy", dy.clone()), &mut Rounding::exact())?;
        let (forward, backward) = (dot(y.tensor("y")?, &dy), dot(&x, dx.tensor("dx")?));
        let bound = 1024.0 * UNIT_ROUNDOFF * dot_of_magnitudes(&x, dx.tensor("dx")?);
        assert!((forward - backward).abs() <= bound, "{forward} {backward}");
        Ok(())
    }

    #[test]
    fn codes_and_scales_decode_to_the_nearest_numbers_and_are_the_same_in_every_run() -> Result<()>
    {
        let x = of(Draw::new(3).bf16(&[4, DIM], 3.0));
        let y = forward(&x, Stored::Values, &mut Rounding::new(Precision::Nearest { seed: 0 }))?;
        let y: Vec<f64> =
            values(y.tensor("y")?)?.into_iter().map(|y| Format::BF16.nearest(y)).collect();
        for (stored, format, group) in
            [(Stored::E2m1, Format::E2M1, 32), (Stored::E4m3, Format::E4M3, DIM)]
        {
            let exact = forward(&x, stored, &mut Rounding::exact())?;
            let noisy = forward(&x, stored, &mut Rounding::new(Precision::Working { seed: 5 }))?;
            let bytes = values(exact.tensor("codes")?)?;
            assert_eq!(bytes, values(noisy.tensor("codes")?)?);
            let bytes: Vec<u8> = bytes.into_iter().map(|byte| byte as u8).collect();
            let codes = if stored == Stored::E2m1 { unpack_nibbles(&bytes) } else { bytes };
            let scales: Vec<f64> = match stored {
                Stored::E2m1 => values(exact.tensor("scale_bytes")?)?
                    .into_iter()
                    .map(|b| Format::E8M0.value(b as u64))
                    .collect(),
                _ => values(exact.tensor("scales")?)?,
            };
            for (group, (y, codes)) in y.chunks(group).zip(codes.chunks(group)).enumerate() {
                let (scale, amax) =
                    (scales[group], y.iter().fold(0f64, |amax, y| amax.max(y.abs())));
                assert!(
                    amax <= format.largest * scale && amax > format.largest * scale / 2.0,
                    "{amax} {scale}"
                );
                for (y, &code) in y.iter().zip(codes) {
                    assert_eq!(format.value(code.into()), format.nearest(y / scale));
                }
            }
        }
        Ok(())
    }

    #[test]
    fn a_row_that_is_not_finite_decodes_to_nan_and_no_rows_and_other_lengths_are_told_apart()
    -> Result<()> {
        let mut x = vec![0.0; 2 * DIM];
        x[5] = f64::INFINITY;
        let x = of(f64_tensor(&x, &[2, DIM]));
        let e4m3 = forward(&x, Stored::E4m3, &mut Rounding::exact())?;
        let scales = values(e4m3.tensor("scales")?)?;
        assert!(scales[0].is_nan() && scales[1] == 2f64.powi(-22), "{scales:?}");
        assert!(values(e4m3.tensor("codes")?)?[..DIM].iter().all(|&code| code == 127.0));
        let e2m1 = forward(&x, Stored::E2m1, &mut Rounding::exact())?;
        assert_eq!(values(e2m1.tensor("scale_bytes")?)?, [255., 255., 255., 255., 1., 1., 1., 1.]);
        let none = forward(&of(f64_tensor(&[], &[0, DIM])), Stored::E2m1, &mut Rounding::exact())?;
        assert_eq!(none.tensor("codes")?.dims(), [0, 64]);
        assert!(
            forward(&of(f64_tensor(&[0.0; 64], &[1, 64])), Stored::Values, &mut Rounding::exact())
                .is_err()
        );
        Ok(())
    }
}
