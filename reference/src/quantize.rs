//! Groups of values as codes with a power-of-two scale (inference 5.3, 5.4).
//!
//! ```text
//! amax = max(max |x|, floor)      s = the least power of two with amax <= largest * s      code = nearest(x / s)
//! ```
//!
//! The specification multiplies amax by fp32(1/448), or fp32(1/6), and takes the exponent from the
//! bits of the product. For every bf16 amax the result is the same power of two. Scales that are
//! not powers of two are this product itself ([`ScaleType::Fp32`]); then x / s is rounded to fp32
//! before it is rounded to a code. A group with a NaN or an infinity has the scale NaN (byte 255)
//! and the codes of NaN.

use candle_core::Tensor;

use crate::conventions::{Convention, Conventions};
use crate::error::Result;
use crate::format::Format;
use crate::precision::{Rounding, values};

/// The smallest scale of kernels with [`Convention::ScaleFloor`].
const SCALE_FLOOR: f64 = 1e-4;

/// Byte of the e8m0 NaN.
const E8M0_NAN: u8 = 255;

/// Codes, one per byte, and the e8m0 byte of the scale of each group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quantized {
    /// One for each value.
    pub codes: Vec<u8>,
    /// One for each group.
    pub scale_bytes: Vec<u8>,
}

/// The type of the scale of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleType {
    /// A power of two, stored as an e8m0 byte.
    E8m0,
    /// A power of two, stored in fp32.
    PowerOfTwo,
    /// `amax * fp32(1/largest)`, an fp32 value.
    Fp32,
}

/// The smallest amax of a format: groups of smaller values are scaled as if they held this one.
pub fn floor_of(format: Format) -> f64 {
    // The floor of e2m1 keeps the scale a normal fp32 value.
    if format == Format::E2M1 { 6.0 * 2f64.powi(-126) } else { 1e-4 }
}

/// Quantizes consecutive groups of `group` values in this format.
pub fn quantize(numbers: &[f64], group: usize, format: Format) -> Quantized {
    quantize_by(numbers, group, format, Conventions::default())
}

/// The same by these conventions of a kernel.
pub fn quantize_by(
    numbers: &[f64],
    group: usize,
    format: Format,
    conventions: Conventions,
) -> Quantized {
    let (mut codes, mut scale_bytes) = (Vec::with_capacity(numbers.len()), Vec::new());
    for group in numbers.chunks(group) {
        let byte = byte_by(group, format, floor_by(format, conventions));
        let scale = Format::E8M0.value(byte.into());
        scale_bytes.push(byte);
        codes.extend(codes_by(group, scale, format, conventions));
    }
    Quantized { codes, scale_bytes }
}

/// The code of a quotient in fp32, by these conventions of a kernel.
fn code_by(quotient: f64, format: Format, conventions: Conventions) -> u8 {
    let code = format.code(quotient) as u8;
    if !conventions.have(Convention::TiesTowardZero) || format != Format::E2M1 {
        return code;
    }
    let (sign, magnitude) = (code & 8, code & 7);
    let value = |code: u8| format.value(code.into());
    let is_tie = |below: u8| quotient.abs() == f64::midpoint(value(below), value(magnitude));
    match magnitude.checked_sub(1).filter(|&below| is_tie(below)).unwrap_or(magnitude) {
        0 => 0,
        magnitude => sign | magnitude,
    }
}

/// The decoded values of codes with scales of `group` neighbours, for `x` `[num_rows, width]`,
/// whose width is not 0. The rounding to codes is a rounding point. In a run without rounding, x is
/// returned unchanged, except for the groups whose scale is NaN.
///
/// # Errors
/// A tensor of the wrong shape.
pub fn simulated(
    x: &Tensor,
    group: usize,
    format: Format,
    rounding: &mut Rounding,
) -> Result<Tensor> {
    let (_, width) = x.dims2()?;
    let conventions = rounding.conventions();
    let scale = |group: &[f64]| scale_by(group, format, ScaleType::E8m0, conventions);
    let of_group = |group: &[f64]| vec![scale(group); group.len()];
    let scales = values(x)?
        .chunks(width)
        .flat_map(|row| row.chunks(group))
        .flat_map(of_group)
        .collect::<Vec<_>>();
    let scales = Tensor::from_vec(scales, x.shape(), x.device())?;
    let codes = rounding.to(format, &(x / &scales)?)?;
    Ok((codes * scales)?)
}

/// The codes of values with the scale of their group, by these conventions of a kernel. By those of
/// the specification: one fp32 quotient each, exact where the scale is a power of two.
pub fn codes_by(
    group: &[f64],
    scale: f64,
    format: Format,
    conventions: Conventions,
) -> impl Iterator<Item = u8> {
    let f32 = |x: f64| Format::F32.nearest(x);
    let factor = if conventions.have(Convention::CodesByInverse) {
        Some(f32(scale.recip()))
    } else if conventions.have(Convention::CodesByAmax) {
        Some(f32(format.largest / amax_of(group, f32(floor_by(format, conventions)))))
    } else {
        None
    };
    // A group that is not finite has no codes but NaN.
    let factor = factor.map(|factor| if scale.is_nan() { scale } else { factor });
    let quotient = move |x: &f64| factor.map_or(x / scale, |factor| x * factor);
    group.iter().map(move |x| code_by(f32(quotient(x)), format, conventions))
}

/// The scale of a group; NaN where one of its values is not finite.
pub fn scale_of(group: &[f64], format: Format, scale_type: ScaleType) -> f64 {
    scale_by(group, format, scale_type, Conventions::default())
}

/// The scale of a group by these conventions of a kernel.
pub fn scale_by(
    group: &[f64],
    format: Format,
    scale_type: ScaleType,
    conventions: Conventions,
) -> f64 {
    let floor = floor_by(format, conventions);
    let power = Format::E8M0.value(byte_by(group, format, floor).into());
    if scale_type != ScaleType::Fp32 || power.is_nan() {
        return power;
    }
    let f32 = |x: f64| Format::F32.nearest(x);
    let (floor, least) = match conventions.have(Convention::ScaleFloor) {
        true => (0.0, f32(SCALE_FLOOR)),
        false => (f32(floor), 0.0),
    };
    let amax = amax_of(group, floor);
    let scale = match conventions.have(Convention::ScaleDivided) {
        true => amax / format.largest,
        false => amax * f32(format.largest.recip()),
    };
    f32(scale).max(least)
}

/// The smallest amax of a format, by these conventions of a kernel.
fn floor_by(format: Format, conventions: Conventions) -> f64 {
    if conventions.have(Convention::ScaleFloor) {
        format.largest * SCALE_FLOOR
    } else if conventions.have(Convention::AmaxFloor) {
        floor_of(Format::E4M3)
    } else {
        floor_of(format)
    }
}

/// The largest magnitude of a group, at least `floor`.
fn amax_of(group: &[f64], floor: f64) -> f64 {
    group.iter().fold(floor, |amax, x| amax.max(x.abs()))
}

/// The scale of a group as a byte, by these conventions of a kernel: 127 plus the smallest e with
/// `amax <= largest * 2^e`.
pub fn scale_byte(group: &[f64], format: Format, conventions: Conventions) -> u8 {
    byte_by(group, format, floor_by(format, conventions))
}

fn byte_by(group: &[f64], format: Format, floor: f64) -> u8 {
    if group.iter().any(|x| !x.is_finite()) {
        return E8M0_NAN;
    }
    let amax = amax_of(group, floor);
    (0..E8M0_NAN)
        .find(|&byte| amax <= format.largest * Format::E8M0.value(byte.into()))
        .unwrap_or(E8M0_NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The scale as the specification computes it, from the bits of an fp32 product.
    fn from_bits(amax: f64, format: Format) -> u8 {
        let inverse = format.largest.recip() as f32;
        let u = amax.max(floor_of(format)) as f32 * inverse;
        (u.to_bits() >> 23) as u8 + u8::from(u.to_bits() & 0x7f_ffff != 0)
    }

    #[test]
    fn a_floor_of_the_scale_is_one_of_every_type_and_codes_follow() {
        let floor = Conventions::of([Convention::ScaleFloor]);
        let of = |x: f64, scale_type| scale_by(&[x], Format::E4M3, scale_type, floor);
        assert_eq!(of(1e-9, ScaleType::E8m0), 2f64.powi(-13));
        assert_eq!(of(1.0, ScaleType::E8m0), scale_of(&[1.0], Format::E4M3, ScaleType::E8m0));
        assert_eq!(of(1e-9, ScaleType::Fp32), f64::from(1e-4f32));
        let Quantized { codes, scale_bytes } =
            quantize_by(&[2f64.powi(-13)], 1, Format::E4M3, floor);
        assert_eq!((codes, scale_bytes), (vec![Format::E4M3.code(1.0) as u8], vec![127 - 13]));
    }

    #[test]
    fn ties_of_e2m1_go_to_the_even_code_or_toward_zero() {
        let with = |x: f64, all: &[Convention]| {
            // The largest number makes the scale 1.
            let conventions = Conventions::of(all.iter().copied());
            let quantized = quantize_by(&[x, 6.0], 2, Format::E2M1, conventions);
            assert_eq!(quantized.scale_bytes, [127]);
            Format::E2M1.value(quantized.codes[0].into())
        };
        let toward_zero = [Convention::TiesTowardZero];
        for (x, even, zero) in [
            (0.25, 0.0, 0.0),
            (0.75, 1.0, 0.5),
            (1.25, 1.0, 1.0),
            (1.75, 2.0, 1.5),
            (2.5, 2.0, 2.0),
            (3.5, 4.0, 3.0),
            (5.0, 4.0, 4.0),
            (3.6, 4.0, 4.0),
            (0.8, 1.0, 1.0),
        ] {
            assert_eq!([with(x, &[]), with(x, &toward_zero)], [even, zero], "{x}");
            assert_eq!([with(-x, &[]), with(-x, &toward_zero)], [-even, -zero], "-{x}");
        }
        assert!(with(-0.1, &[]).is_sign_negative());
        assert!(with(-0.1, &toward_zero).is_sign_positive());
        let floor = |conventions| {
            quantize_by(&[0.0], 1, Format::E2M1, Conventions::of(conventions)).scale_bytes[0]
        };
        assert_eq!(floor(vec![]), 1);
        // 1e-4 / 6 is above 2^-16.
        assert_eq!(floor(vec![Convention::AmaxFloor]), 127 - 15);
    }

    #[test]
    fn the_least_power_is_that_of_the_bits_for_every_bf16_amax() {
        for bits in 1..0x7f80u32 {
            let amax = f64::from(f32::from_bits(bits << 16));
            for format in [Format::E2M1, Format::E4M3] {
                assert_eq!(
                    scale_byte(&[0.0, -amax], format, Conventions::default()),
                    from_bits(amax, format),
                    "{amax} {format}"
                );
            }
        }
    }

    #[test]
    fn around_the_largest_number_times_a_power_every_fp32_amax_has_the_power_of_the_bits() {
        for (format, exponent) in
            [Format::E2M1, Format::E4M3].into_iter().flat_map(|f| (-10..=10).map(move |e| (f, e)))
        {
            let bits = ((format.largest * 2f64.powi(exponent)) as f32).to_bits();
            for bits in bits - 4..=bits + 4 {
                let amax = f64::from(f32::from_bits(bits));
                assert_eq!(
                    scale_byte(&[amax], format, Conventions::default()),
                    from_bits(amax, format),
                    "{amax} {format}"
                );
            }
        }
    }

    #[test]
    fn scales_of_fp32_take_the_largest_magnitude_next_to_the_largest_code_and_never_above() {
        let mut bits = 7u32;
        for _ in 0..20_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // From slightly above the floor to the end of the fp32 range.
            let amax = f64::from(f32::from_bits((bits >> 1).clamp(0x38d2_0000, 0x7f7f_ffff)));
            let scale = scale_of(&[0.0, -amax], Format::E4M3, ScaleType::Fp32);
            assert!(
                Format::F32.holds(scale)
                    && (amax / scale / 448.0 - 1.0).abs() <= 2.0 * f64::from(f32::EPSILON)
            );
            assert_eq!(
                codes_by(&[-amax], scale, Format::E4M3, Conventions::default()).collect::<Vec<_>>(),
                [0xfe],
                "{amax}"
            );
        }
        let zeros = scale_of(&[0.0], Format::E4M3, ScaleType::Fp32);
        assert_eq!(zeros, f64::from(1e-4f32 * (1.0 / 448.0)));
        assert!(scale_of(&[1.0, f64::INFINITY], Format::E4M3, ScaleType::Fp32).is_nan());
        assert_eq!(scale_of(&[449.0], Format::E4M3, ScaleType::PowerOfTwo), 2.0);
    }

    #[test]
    fn groups_that_are_not_finite_have_no_scale_and_zeros_that_of_the_floor() {
        let not_finite = quantize(&[1.0, f64::NAN, f64::NEG_INFINITY, 0.0], 2, Format::E4M3);
        assert_eq!(not_finite, Quantized { codes: vec![0x7f; 4], scale_bytes: vec![255; 2] });
        let zeros = quantize(&[0.0, -0.0], 2, Format::E2M1);
        assert_eq!(zeros, Quantized { codes: vec![0, 8], scale_bytes: vec![1] });
    }
}
