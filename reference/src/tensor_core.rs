//! Sums of products, bit for bit as Hopper's tensor cores compute them.
//!
//! [`crate::precision`] defines the error that a kernel's matrix product may have; this module
//! computes the exact result of the instruction. The emulator uses the same rule, so a kernel that
//! depends on it fails there too.
//!
//! An instruction adds `terms` products and its accumulator in one step. Write `E(x)` for the
//! exponent field of a factor (for a subnormal factor, that of the smallest normal number). Write
//! `E(c)` for the exponent field of the accumulator. Then
//!
//! ```text
//! e = max(E(a_k) + E(b_k) over products that are not zero, E(c))
//! s = sum_k cut(a_k b_k, 2^(e - aligned_bits)) + cut(c, 2^(e - aligned_bits))        exact
//! d = cut(s, ulp of s in a number of fraction_bits bits, no finer than fp32's subnormal numbers)
//! ```
//!
//! where `cut(x, g)` is the multiple of g next to x towards zero. The exponent of a product is not
//! that of its value: factors of 1.5 give 2.25, which counts as 2^0. A longer product is a chain of
//! steps.
//!
//! The form is that of Fasi, Higham, Mikaitis and Pranesh (Numerical behavior of NVIDIA tensor
//! cores, 2021) and of Khattak and Mikaitis (2025). Its parameters were fitted to an H100.
//! `fixtures/tensor_cores` holds a part of the measurements, and every bit agrees.

use crate::format::{Format, power_of_two};

/// How an instruction adds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TensorCore {
    /// Products of one step.
    pub terms: usize,
    /// Bits that terms keep below the largest exponent.
    pub aligned_bits: i32,
    /// Bits that a sum keeps below its leading one.
    pub fraction_bits: i32,
    /// Format of the factors.
    pub factors: Format,
}

impl TensorCore {
    /// bf16 factors on Hopper, by `mma.sync` or `wgmma`.
    pub const HOPPER_BF16: Self =
        Self { terms: 16, aligned_bits: 25, fraction_bits: 23, factors: Format::BF16 };

    /// e4m3 factors on Hopper, by `wgmma`.
    pub const HOPPER_E4M3: Self =
        Self { terms: 32, aligned_bits: 13, fraction_bits: 13, factors: Format::E4M3 };

    /// `c + sum_k a_k b_k` of finite values of [`Self::factors`] and an fp32 value `c`. Zeros fill
    /// the last step.
    ///
    /// # Panics
    /// When `a` and `b` have different lengths.
    pub fn sum(&self, a: &[f64], b: &[f64], c: f64) -> f64 {
        assert_eq!(a.len(), b.len(), "factors of unlike number");
        a.chunks(self.terms).zip(b.chunks(self.terms)).fold(c, |c, (a, b)| self.step(a, b, c))
    }

    fn step(&self, a: &[f64], b: &[f64], c: f64) -> f64 {
        let products = || a.iter().zip(b).filter(|(a, b)| **a != 0.0 && **b != 0.0);
        let exponents =
            products().map(|(&a, &b)| exponent(a, self.factors) + exponent(b, self.factors));
        let Some(largest) = exponents.chain((c != 0.0).then(|| exponent(c, Format::F32))).max()
        else {
            return 0.0;
        };
        let aligned = |x: f64| cut(x, largest - self.aligned_bits);
        let sum = products().map(|(a, b)| aligned(a * b)).sum::<f64>() + aligned(c);
        let subnormal = Format::F32.min_exponent - Format::F32.fraction_bits;
        if sum == 0.0 {
            0.0
        } else {
            cut(sum, (floor_log2(sum) - self.fraction_bits).max(subnormal))
        }
    }
}

/// The exponent field of a number that is not zero.
fn exponent(x: f64, format: Format) -> i32 {
    floor_log2(x).max(format.min_exponent)
}

fn floor_log2(x: f64) -> i32 {
    // Every value here is a normal f64: products of two fp32 values reach down to 2^-298.
    ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023
}

/// The multiple of `2^exponent` next to `x` towards zero.
fn cut(x: f64, exponent: i32) -> f64 {
    let gap = power_of_two(exponent);
    (x / gap).trunc() * gap
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::tensor_core_measurements;

    #[test]
    fn every_bit_that_an_h100_gave_follows() {
        let instructions = [
            ("mma_bf16", TensorCore::HOPPER_BF16),
            ("wgmma_bf16", TensorCore::HOPPER_BF16),
            ("wgmma_e4m3", TensorCore::HOPPER_E4M3),
        ];
        for (name, core) in instructions {
            let measured = tensor_core_measurements(name);
            assert!(measured.len() >= 3000, "{name}: {} sums", measured.len());
            for (i, sum) in measured.iter().enumerate() {
                let found = core.sum(&sum.a, &sum.b, sum.c);
                assert_eq!(
                    found, sum.d,
                    "{name}: sum {i} is {:e} on the GPU, {found:e} here",
                    sum.d
                );
            }
        }
    }

    #[test]
    fn no_other_numbers_fit_what_was_measured() {
        let measured = tensor_core_measurements("wgmma_bf16");
        let hopper = TensorCore::HOPPER_BF16;
        let others = [
            TensorCore { terms: 8, ..hopper },
            TensorCore { aligned_bits: 24, ..hopper },
            TensorCore { aligned_bits: 26, ..hopper },
            TensorCore { fraction_bits: 22, ..hopper },
        ];
        for core in others {
            assert!(
                measured.iter().any(|sum| core.sum(&sum.a, &sum.b, sum.c) != sum.d),
                "{core:?}"
            );
        }
    }

    #[test]
    fn small_terms_beside_a_large_one_are_cut_off_one_by_one() {
        let core = TensorCore::HOPPER_BF16;
        // Each is half a gap: none counts, although all of them together are eight gaps.
        let small = power_of_two(-26);
        assert_eq!(core.sum(&[small; 16], &[1.0; 16], 1.0), 1.0);
        assert_eq!(core.sum(&[2.0 * small; 16], &[1.0; 16], 1.0), 1.0 + 4.0 * power_of_two(-23));
        // An e4m3 accumulator loses a product that is 2^14 times smaller.
        let core = TensorCore::HOPPER_E4M3;
        assert_eq!(core.sum(&[1.0; 32], &[1.0; 32], power_of_two(14)), power_of_two(14));
        assert_eq!(core.sum(&[1.0; 32], &[1.0; 32], power_of_two(13)), power_of_two(13) + 32.0);
        assert_eq!(core.sum(&[], &[], 3.0), 3.0);
    }
}
