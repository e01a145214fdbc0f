//! Number formats: which values exist, independent of how many bytes store them.
//!
//! A [`Format`] is the set of values of a type, with a rule for values outside the set. f32 storage
//! may hold values of tf32. A byte may hold an e4m3 value, an e8m0 scale or two e2m1 codes
//! ([`pack_nibbles`]).
//!
//! Codes are sign and magnitude: the sign bit is the highest of [`Format::bits`], and the other
//! bits ascend with the magnitude.

use crate::error::{Result, wrong_shape_of};
use crate::wide::wide;

/// The result of a value that rounds beyond the largest finite one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overflow {
    /// The largest finite value of its sign, also for an infinity.
    Saturate,
    /// The infinity of its sign.
    Infinity,
    /// NaN, also for an infinity.
    Nan,
}

/// A binary floating-point format.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Format {
    /// Its usual name.
    pub name: &'static str,
    /// Bits of a code.
    pub bits: u32,
    /// Explicitly stored significand bits.
    pub fraction_bits: i32,
    /// Exponent of the smallest normal value; below it the grid does not get finer.
    pub min_exponent: i32,
    /// The largest finite number.
    pub largest: f64,
    /// Whether the lowest exponent field holds zero and the subnormal values. If not, it holds
    /// `2^min_exponent` like any other field, and zero does not exist.
    pub subnormals: bool,
    /// Whether the format has a sign; without one, negative values become NaN.
    pub signed: bool,
    /// Whether the format has a NaN; without one, NaN becomes the largest value, as with
    /// `cvt.satfinite`.
    pub has_nan: bool,
    /// The result of values that are too large.
    pub overflow: Overflow,
}

impl Format {
    /// IEEE binary32.
    pub const F32: Self = Self {
        name: "f32",
        bits: 32,
        fraction_bits: 23,
        min_exponent: -126,
        largest: f32::MAX as f64,
        subnormals: true,
        signed: true,
        has_nan: true,
        overflow: Overflow::Infinity,
    };

    /// bfloat16.
    pub const BF16: Self = Self {
        name: "bf16",
        bits: 16,
        fraction_bits: 7,
        largest: 255.0 * power_of_two(120),
        ..Self::F32
    };

    /// The part of an fp32 operand that tensor cores keep: 10 bits of fraction, the range of fp32.
    pub const TF32: Self = Self {
        name: "tf32",
        bits: 19,
        fraction_bits: 10,
        largest: 2047.0 * power_of_two(117),
        ..Self::F32
    };

    /// e4m3fn: no infinities, one NaN of each sign, largest value 448; larger values saturate.
    pub const E4M3: Self = Self {
        name: "e4m3",
        bits: 8,
        fraction_bits: 3,
        min_exponent: -6,
        largest: 448.0,
        overflow: Overflow::Saturate,
        ..Self::F32
    };

    /// e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; neither infinities nor NaN.
    pub const E2M1: Self = Self {
        name: "e2m1",
        bits: 4,
        fraction_bits: 1,
        min_exponent: 0,
        largest: 6.0,
        has_nan: false,
        overflow: Overflow::Saturate,
        ..Self::F32
    };

    /// e8m0: powers of two from 2^-127 to 2^127, and NaN. From the midpoint between two powers on,
    /// the nearest is the upper one. Scales are made by [`Self::round_up`].
    pub const E8M0: Self = Self {
        name: "e8m0",
        bits: 8,
        fraction_bits: 0,
        min_exponent: -127,
        largest: power_of_two(127),
        subnormals: false,
        signed: false,
        overflow: Overflow::Saturate,
        ..Self::F32
    };

    /// The integers that f64 holds exactly: below 2^53 in magnitude.
    pub const INTEGER: Self = Self {
        name: "integer",
        bits: 54,
        fraction_bits: 52,
        min_exponent: 52,
        largest: 9_007_199_254_740_991.0,
        has_nan: false,
        overflow: Overflow::Saturate,
        ..Self::F32
    };

    /// The same values with another rule for values that are too large, such as NaN for e4m3.
    pub const fn overflowing(self, overflow: Overflow) -> Self {
        Self { overflow, ..self }
    }

    /// The nearest value, ties to even.
    pub fn nearest(self, x: f64) -> f64 {
        self.round_by(x, f64::round_ties_even)
    }

    /// `x` with the error of rounding on a grid displaced by `phase` gaps between neighbours, with
    /// `phase` in [0, 1). Over random phases the error is uniform in half a gap either way, for
    /// every `x`. Values of the format, and values that overflow, are rounded as [`Self::nearest`]
    /// rounds them.
    pub fn dithered(self, x: f64, phase: f64) -> f64 {
        let nearest = self.nearest(x);
        if nearest == x || !nearest.is_finite() || !x.is_finite() {
            return nearest;
        }
        let gap = self.gap(x);
        let displaced = x.abs() / gap + phase;
        let error = (displaced + 0.5).floor() - displaced;
        ((x.abs() / gap + error).max(0.0) * gap).min(self.largest).copysign(x)
    }

    /// [`Self::nearest`] of all values, in place.
    pub fn round_all(self, numbers: &mut [f64]) {
        self.in_gaps_all(
            numbers,
            |in_gaps| (in_gaps + TO_INTEGERS) - TO_INTEGERS,
            |x| self.nearest(x),
        );
    }

    /// [`Self::dithered`] of all values, in place; of two equally near values it may take the other
    /// one.
    pub fn dither_all(self, numbers: &mut [f64], phase: f64) {
        let rule = |in_gaps: f64| {
            let displaced = in_gaps + phase;
            let error = ((displaced + TO_INTEGERS) - TO_INTEGERS) - displaced;
            // Values of the format have distance zero from the grid.
            let stays = (in_gaps + TO_INTEGERS) - TO_INTEGERS == in_gaps;
            let rounded = in_gaps + if stays { 0.0 } else { error };
            if rounded > 0.0 { rounded } else { 0.0 }
        };
        self.in_gaps_all(numbers, rule, |x| self.dithered(x, phase));
    }

    /// Applies a rule to magnitudes in units of the gap between neighbours. Values to which the
    /// rule does not apply (too large, or not finite) go to `otherwise`. The loop has no branches,
    /// because an oracle spends most of its time here. The few values that remain are written after
    /// the loop.
    fn in_gaps_all(
        self,
        numbers: &mut [f64],
        rule: impl Fn(f64) -> f64,
        otherwise: impl Fn(f64) -> f64,
    ) {
        if !self.signed || !self.subnormals || self.fraction_bits >= 52 {
            return numbers.iter_mut().for_each(|x| *x = otherwise(*x));
        }
        wide(
            #[inline(always)]
            || self.in_gaps_of_many(numbers, rule, otherwise),
        );
    }

    /// [`Self::in_gaps_all`] of a signed format with subnormal numbers.
    #[inline(always)]
    fn in_gaps_of_many(
        self,
        numbers: &mut [f64],
        rule: impl Fn(f64) -> f64,
        otherwise: impl Fn(f64) -> f64,
    ) {
        const AT_ONCE: usize = 64;
        const EXPONENT: u64 = 0x7ff << 52;
        // Below the power of two of the largest value, rounding gives values of the format.
        let top = power_of_two(exponent_of(self.largest));
        let left_of = |(place, x): (usize, &f64)| u64::from(x.abs() >= top || x.is_nan()) << place;
        let least = power_of_two(self.min_exponent);
        let (to_gap, to_inverse) =
            (power_of_two(-self.fraction_bits), power_of_two(self.fraction_bits));
        for numbers in numbers.chunks_mut(AT_ONCE) {
            let mut left = numbers.iter().enumerate().map(left_of).fold(0, |all, one| all | one);
            let mut before = [0.0; AT_ONCE];
            if left != 0 {
                before[..numbers.len()].copy_from_slice(numbers);
            }
            for x in numbers.iter_mut() {
                let magnitude = x.abs();
                let normal = if magnitude > least { magnitude } else { least };
                let power = normal.to_bits() & EXPONENT;
                let gap = f64::from_bits(power) * to_gap;
                // Wraps for values that are not finite, whose result is not used.
                let inverse = f64::from_bits((2046u64 << 52).wrapping_sub(power)) * to_inverse;
                *x = (rule(magnitude * inverse) * gap).copysign(*x);
            }
            while left != 0 {
                let place = left.trailing_zeros() as usize;
                numbers[place] = otherwise(before[place]);
                left &= left - 1;
            }
        }
    }

    /// The smallest value whose magnitude is not below that of `x`.
    pub fn round_up(self, x: f64) -> f64 {
        self.round_by(x, f64::ceil)
    }

    /// Half a unit in the last place at magnitude `value`; zero where `value` is not finite.
    pub fn half_ulp(self, value: f64) -> f64 {
        if value.is_finite() { 0.5 * self.gap(value) } else { 0.0 }
    }

    /// Whether `x` is a value of this format, or a special value that it has.
    pub fn holds(self, x: f64) -> bool {
        let nearest = self.nearest(x);
        nearest == x || nearest.is_nan() && x.is_nan()
    }

    /// The code of the nearest value. NaN has a positive sign.
    pub fn code(self, x: f64) -> u64 {
        let rounded = self.nearest(x);
        if rounded.is_nan() {
            return self.nan_code();
        }
        let sign = if self.signed && rounded.is_sign_negative() { self.sign_bit() } else { 0 };
        sign | if rounded.is_infinite() {
            self.largest_code() + 1
        } else {
            self.magnitude_code(rounded.abs())
        }
    }

    /// The value of a code; bits beyond [`Self::bits`] are ignored.
    pub fn value(self, code: u64) -> f64 {
        let code = code & ((1 << self.bits) - 1);
        let (negative, magnitude) = if self.signed {
            (code & self.sign_bit() != 0, code & (self.sign_bit() - 1))
        } else {
            (false, code)
        };
        let value = match magnitude.checked_sub(self.largest_code()) {
            None | Some(0) => self.magnitude_of(magnitude),
            Some(1) if self.overflow == Overflow::Infinity => f64::INFINITY,
            Some(_) => f64::NAN,
        };
        if negative { -value } else { value }
    }

    /// [`Self::value`] of each of many codes of at most eight bits, by a table.
    pub fn values(self, codes: &[u8]) -> Vec<f64> {
        let table: Vec<f64> = (0..=u8::MAX).map(|code| self.value(code.into())).collect();
        codes.iter().map(|&code| table[usize::from(code)]).collect()
    }

    /// Distance between the neighbours of a finite `x`.
    fn gap(self, x: f64) -> f64 {
        power_of_two(exponent_of(x).max(self.min_exponent) - self.fraction_bits)
    }

    /// Rounds the magnitude of `x`, in units of the gap between neighbours, by a rule.
    fn round_by(self, x: f64, rule: impl Fn(f64) -> f64) -> f64 {
        if x.is_nan() {
            return if self.has_nan { x } else { self.largest };
        }
        if x < 0.0 && !self.signed {
            return f64::NAN;
        }
        if x == 0.0 && self.subnormals {
            return x;
        }
        if x.is_infinite() {
            return self.overflowed(x);
        }
        let gap = self.gap(x);
        let mut magnitude = rule(x.abs() / gap) * gap;
        if !self.subnormals {
            magnitude = magnitude.max(power_of_two(self.min_exponent));
        }
        if magnitude > self.largest { self.overflowed(x) } else { magnitude.copysign(x) }
    }

    fn overflowed(self, x: f64) -> f64 {
        match self.overflow {
            Overflow::Saturate => self.largest.copysign(x),
            Overflow::Infinity => f64::INFINITY.copysign(x),
            Overflow::Nan => f64::NAN,
        }
    }

    fn sign_bit(self) -> u64 {
        1 << (self.bits - 1)
    }

    fn largest_code(self) -> u64 {
        self.magnitude_code(self.largest)
    }

    /// Formats with infinities have their NaN after the infinity, with the first bit of the
    /// fraction set.
    fn nan_code(self) -> u64 {
        match self.overflow {
            Overflow::Infinity => self.largest_code() + 1 + (1 << (self.fraction_bits - 1)),
            Overflow::Saturate | Overflow::Nan => self.largest_code() + 1,
        }
    }

    /// Steps from code 0 to a finite magnitude of this format.
    fn magnitude_code(self, magnitude: f64) -> u64 {
        let exponent = exponent_of(magnitude).max(self.min_exponent);
        let in_gaps = (magnitude / power_of_two(exponent - self.fraction_bits)) as u64;
        let fields = (exponent - self.min_exponent) as u64;
        // A significand starts with the bit that is not stored, which is the number of the first
        // field. Without subnormal values the fields are counted from 0.
        (fields << self.fraction_bits) + in_gaps
            - if self.subnormals { 0 } else { 1 << self.fraction_bits }
    }

    fn magnitude_of(self, code: u64) -> f64 {
        let code = code + if self.subnormals { 0 } else { 1 << self.fraction_bits };
        let field = (code >> self.fraction_bits) as i32;
        let fraction = code & ((1 << self.fraction_bits) - 1);
        let (significand, exponent) = if field == 0 {
            (fraction, self.min_exponent)
        } else {
            (fraction + (1 << self.fraction_bits), self.min_exponent + field - 1)
        };
        significand as f64 * power_of_two(exponent - self.fraction_bits)
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// `(x + TO_INTEGERS) - TO_INTEGERS` is the integer next to x, ties to even: f64 has units there.
const TO_INTEGERS: f64 = 1.5 * (1u64 << 52) as f64;

/// Packs codes of four bits along the last axis, two to a byte: the even one in the low nibble.
///
/// # Errors
/// Codes that are not a whole number of rows, or rows of an odd length.
pub fn pack_nibbles(codes: &[u8], row_len: usize) -> Result<Vec<u8>> {
    if !row_len.is_multiple_of(2) || row_len == 0 && !codes.is_empty() {
        return Err(wrong_shape_of(
            "codes",
            "[rows, row_len] with an even row_len",
            &[codes.len(), row_len],
        ));
    }
    if row_len > 0 && !codes.len().is_multiple_of(row_len) {
        return Err(wrong_shape_of(
            "codes",
            "[rows, row_len], whole rows",
            &[codes.len(), row_len],
        ));
    }
    Ok(codes.as_chunks::<2>().0.iter().map(|[even, odd]| even & 15 | odd << 4).collect())
}

/// The four-bit codes of some bytes: of each byte the low nibble, then the high one.
pub fn unpack_nibbles(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().flat_map(|byte| [byte & 15, byte >> 4]).collect()
}

/// `2^exponent` for exponents of normal f64 numbers.
pub(crate) const fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// `floor(log2 |x|)` of a normal f64, exactly; -1023 of zero and of subnormal numbers.
fn exponent_of(x: f64) -> i32 {
    ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023
}

#[cfg(test)]
mod tests {
    use super::*;

    const NARROW: [Format; 4] = [Format::BF16, Format::E4M3, Format::E2M1, Format::E8M0];

    fn codes(format: Format) -> impl Iterator<Item = u64> {
        0..1 << format.bits
    }

    /// Finite magnitudes, ascending.
    fn magnitudes(format: Format) -> Vec<f64> {
        (0..=format.largest_code()).map(|code| format.value(code)).collect()
    }

    #[test]
    fn every_code_is_the_code_of_its_value() {
        for format in NARROW {
            for code in codes(format) {
                let value = format.value(code);
                if value.is_nan() {
                    assert!(
                        format.has_nan && format.value(format.code(value)).is_nan(),
                        "{format} {code:#x}"
                    );
                } else {
                    assert_eq!(format.code(value), code, "{format} {code:#x}");
                    assert!(format.holds(value));
                }
            }
        }
    }

    #[test]
    fn numbers_round_together_as_they_round_alone() {
        let inf = f64::INFINITY;
        let formats = [
            Format::F32,
            Format::TF32,
            Format::BF16,
            Format::E4M3,
            Format::E2M1,
            Format::E8M0,
            Format::INTEGER,
        ];
        // Significands of few bits, at the midpoint of each gap and on both sides of it, at all
        // nearby exponents.
        let of = |exponent: i32, fraction: u64| {
            [0, 1, 1 << 40].map(|tail| {
                f64::from_bits(((exponent + 1023) as u64) << 52 | fraction << 42 | tail)
            })
        };
        let sizes =
            (-160..140).flat_map(|e| (0..1u64 << 10).flat_map(move |fraction| of(e, fraction)));
        let mut numbers: Vec<f64> = sizes.flat_map(|x| [x, -x]).collect();
        // Some chunks have special values, or values beyond the range, at one index or at many;
        // some have none.
        let others = [0.0, -0.0, f64::NAN, inf, -inf].into_iter();
        let others: Vec<f64> = others
            .chain(formats.iter().flat_map(|format| [format.largest, -format.largest]))
            .collect();
        numbers.extend(&others);
        for (place, other) in (0..20_000).step_by(97).zip(others.iter().cycle()) {
            numbers[place] = *other;
        }
        for format in formats {
            let (mut rounded, mut dithered) = (numbers.clone(), numbers.clone());
            format.round_all(&mut rounded);
            format.dither_all(&mut dithered, 0.3);
            for ((x, rounded), dithered) in numbers.iter().zip(rounded).zip(dithered) {
                let same = |a: f64, b: f64| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                assert!(same(rounded, format.nearest(*x)), "{format} {x:e}: {rounded:e}");
                assert!(same(dithered, format.dithered(*x, 0.3)), "{format} {x:e}: {dithered:e}");
            }
        }
    }

    #[test]
    fn codes_have_the_documented_values() {
        let e2m1: Vec<f64> = (0..16).map(|code| Format::E2M1.value(code)).collect();
        assert_eq!(e2m1[..8], [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
        assert!((0..8).all(|code| e2m1[8 + code] == -e2m1[code]));
        let e4m3 = |code| Format::E4M3.value(code);
        assert_eq!(
            (e4m3(0x7e), e4m3(0x08), e4m3(0x01), e4m3(0xfe)),
            (448.0, 2f64.powi(-6), 2f64.powi(-9), -448.0)
        );
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        let e8m0: Vec<f64> = (0..255).map(|code| Format::E8M0.value(code)).collect();
        assert!((0..255).all(|code| e8m0[code] == 2f64.powi(code as i32 - 127)));
        assert!(Format::E8M0.value(255).is_nan() && Format::E8M0.code(f64::NAN) == 255);
        let widest =
            [(Format::F32, f64::from(f32::MAX)), (Format::TF32, 2f64.powi(128) - 2f64.powi(117))];
        assert!(widest.iter().all(|(format, largest)| format.largest == *largest));
    }

    #[test]
    fn bf16_is_the_bf16_of_the_half_crate() {
        for bits in 0..=u16::MAX {
            let ours = Format::BF16.value(bits.into());
            let theirs = half::bf16::from_bits(bits).to_f64();
            assert!(
                ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
                "{bits:#x}"
            );
        }
        // Every bf16 value, the midpoint to the next one, and the f32 values next to both.
        for bits in 0..0x7f80u32 {
            for offset in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(bits << 16 | offset);
                for x in [x, -x] {
                    let theirs = half::bf16::from_f32(x).to_f64();
                    assert_eq!(Format::BF16.nearest(x.into()).to_bits(), theirs.to_bits(), "{x:e}");
                }
            }
        }
    }

    #[test]
    fn f32_is_the_f32_of_the_machine_and_tf32_lies_between() {
        let mut bits = 1u64;
        for _ in 0..20_000 {
            bits = bits
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            // Exponents from those of subnormal f32 values to those beyond the largest.
            let x = f64::from_bits(bits >> 12 | (1023 - 150 + bits % 280) << 52);
            assert_eq!(Format::F32.nearest(x), f64::from(x as f32), "{x:e}");
            assert_eq!(Format::F32.code(x), u64::from((x as f32).to_bits()));
            let tf32 = Format::TF32.nearest(x);
            assert!(
                Format::F32.holds(tf32) && (tf32 - x).abs() <= Format::TF32.half_ulp(x)
                    || tf32.is_infinite()
            );
        }
    }

    #[test]
    fn a_table_has_the_value_of_every_code() {
        let codes: Vec<u8> = (0..=u8::MAX).collect();
        for format in [Format::E4M3, Format::E2M1, Format::E8M0] {
            let values = format.values(&codes);
            let alike = |(&code, value): (&u8, &f64)| {
                format.value(code.into()).to_bits() == value.to_bits()
            };
            assert!(codes.iter().zip(&values).all(alike), "{format}");
        }
    }

    #[test]
    fn nearest_numbers_are_nearest_and_ties_go_to_the_even_code() {
        for format in [Format::BF16, Format::E4M3, Format::E2M1] {
            for (code, pair) in magnitudes(format).windows(2).enumerate() {
                let middle = (pair[0] + pair[1]) / 2.0;
                let even = pair[code % 2];
                let cases =
                    [(middle, even), (middle.next_down(), pair[0]), (middle.next_up(), pair[1])];
                for (x, expected) in cases {
                    assert_eq!(format.nearest(x), expected, "{format} {x:e}");
                    assert_eq!(format.nearest(-x), -expected, "{format} -{x:e}");
                }
            }
        }
    }

    #[test]
    fn dithered_numbers_err_by_half_a_gap_at_most_and_by_nothing_where_the_format_holds_them() {
        for format in NARROW {
            for pair in magnitudes(format).windows(2) {
                let (gap, x) = (pair[1] - pair[0], pair[0] + 0.375 * (pair[1] - pair[0]));
                // Phase 0 is the grid of the format itself; the error falls by the phase, and wraps
                // at half a gap.
                for (phase, error) in
                    [(0.0, -0.375), (0.0625, -0.4375), (0.25, 0.375), (0.625, 0.0), (0.75, -0.125)]
                {
                    let expected = (0.375 + error) * gap + pair[0];
                    assert_eq!(
                        format.dithered(x, phase),
                        expected.max(0.0),
                        "{format} {x:e} {phase}"
                    );
                }
                assert!(
                    [0.0, 0.5, 0.9999]
                        .iter()
                        .all(|&phase| format.dithered(pair[1], phase) == pair[1])
                );
            }
            let beyond = 4.0 * format.largest;
            assert_eq!(
                format.dithered(beyond, 0.5).to_bits(),
                format.nearest(beyond).to_bits(),
                "{format}"
            );
        }
    }

    #[test]
    fn half_an_ulp_is_half_the_way_to_the_next_magnitude() {
        for format in NARROW {
            for pair in magnitudes(format).windows(2) {
                let half = (pair[1] - pair[0]) / 2.0;
                assert_eq!(format.half_ulp(pair[0]), half, "{format} {:e}", pair[0]);
                assert_eq!(format.half_ulp(-pair[1].next_down()), half, "{format}");
            }
            assert_eq!(format.half_ulp(f64::INFINITY), 0.0);
        }
        assert_eq!((Format::INTEGER.half_ulp(0.0), Format::INTEGER.half_ulp(1e15)), (0.5, 0.5));
    }

    #[test]
    fn numbers_beyond_the_largest_follow_the_rule() {
        // From 464 on, 448 is not the nearest value any more: 464 is the midpoint to the next value
        // that would exist.
        let nan = Format::E4M3.overflowing(Overflow::Nan);
        assert_eq!((nan.nearest(464.0), Format::E4M3.nearest(1e9)), (448.0, 448.0));
        assert!(nan.nearest(464.0f64.next_up()).is_nan() && nan.nearest(f64::INFINITY).is_nan());
        assert_eq!(Format::E4M3.nearest(f64::NEG_INFINITY), -448.0);
        assert!(Format::E4M3.nearest(f64::NAN).is_nan());
        assert_eq!((Format::E2M1.nearest(-7.5), Format::E2M1.nearest(f64::NAN)), (-6.0, 6.0));
        assert_eq!(Format::BF16.nearest(2f64.powi(128) - 2f64.powi(119)), f64::INFINITY);
        assert_eq!(Format::E8M0.nearest(1e300), 2f64.powi(127));
    }

    #[test]
    fn scales_round_up_to_powers_of_two_and_are_never_zero_or_negative() {
        for (x, power) in
            [(1.0, 0), (1.0f64.next_up(), 1), (3.0, 2), (4.0, 2), (0.0, -127), (1e-300, -127)]
        {
            assert_eq!(Format::E8M0.round_up(x), 2f64.powi(power), "{x:e}");
        }
        assert!(Format::E8M0.round_up(-1.0).is_nan() && Format::E8M0.nearest(f64::NAN).is_nan());
    }

    #[test]
    fn integers_are_whole_and_their_codes_count() {
        assert_eq!((Format::INTEGER.nearest(2.5), Format::INTEGER.nearest(-0.75)), (2.0, -1.0));
        for x in [0, 1, 5, (1 << 52) - 1, 1 << 52, (1 << 53) - 1] {
            assert!(Format::INTEGER.holds(x as f64));
            assert_eq!(Format::INTEGER.code(x as f64), x);
            assert_eq!(Format::INTEGER.value(x), x as f64);
        }
    }

    #[test]
    fn nibbles_are_packed_low_one_first_and_odd_rows_are_refused() {
        let codes: Vec<u8> = (0..16).chain((0..16).rev()).collect();
        let bytes = pack_nibbles(&codes, 16).unwrap();
        assert_eq!((bytes.len(), bytes[0], bytes[15]), (16, 0x10, 0x01));
        assert_eq!(unpack_nibbles(&bytes), codes);
        for (codes, row_len) in [(&codes[..6], 3), (&codes[..6], 4), (&codes[..2], 0)] {
            assert!(pack_nibbles(codes, row_len).unwrap_err().to_string().contains("codes"));
        }
    }
}
