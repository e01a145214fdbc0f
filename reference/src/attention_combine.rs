//! Partial attention results over disjoint sets of keys, merged (inference 8.2).
//!
//! Part s of a row has the softmax-weighted sum `o_s` over its own keys and their base-2 log-sum-exp `e_s`, both
//! without the sink. A part whose `e_s` is infinite, of either sign, has seen no key and counts for nothing. With
//! `m = max_s e_s` over the others,
//!
//! ```text
//! Z   = sum_s 2^(e_s - m)
//! lse = (m + log2 Z) ln 2                                          natural, WITHOUT the sink; +inf without any key
//! out = sum_s 2^(e_s - m) o_s / (Z + exp(sink - m ln 2))           0 without any key
//! ```
//!
//! The sink, a logit in natural units that has no value row, enters here and nowhere else; `+inf` makes `out` 0.
//!
//! # Rounding points
//!
//! Exponents, powers, the two sums and their quotient are fp32; `log2 e` and `ln 2` are fp32 constants. The terms
//! of `out` are products of fp32 numbers that are summed in fp32.

use candle_core::{Device, Tensor};

use crate::error::{Result, extents};
use crate::precision::{Rounding, values};
use crate::select::select;

/// What the merge reads, widened to f64.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// `[num_parts, num_tokens, num_heads, v_dim]`, stored in f32. Rows of parts without keys may hold anything.
    pub partial_out: Tensor,
    /// `[num_parts, num_tokens, num_heads]`, stored in f32: base 2.
    pub partial_lse: Tensor,
    /// `[num_heads]`, stored in f32: a natural logit. Any value, infinities included.
    pub sink: Option<Tensor>,
}

/// What the merge writes.
#[derive(Debug, Clone)]
pub struct Outputs {
    /// `[num_tokens, num_heads, v_dim]`, stored in bf16.
    pub out: Tensor,
    /// `[num_tokens, num_heads]`, stored in f32.
    pub lse: Tensor,
}

/// `out` and `lse`.
pub fn forward(inputs: &Inputs, rounding: &mut Rounding) -> Result<Outputs> {
    let [num_parts, num_tokens, num_heads, v_dim] = inputs.check()?;
    if num_parts * num_tokens * num_heads == 0 {
        let full = |value: f64, shape: &[usize]| Tensor::full(value, shape, &Device::Cpu);
        return Ok(Outputs {
            out: full(0.0, &[num_tokens, num_heads, v_dim])?,
            lse: full(f64::INFINITY, &[num_tokens, num_heads])?,
        });
    }
    let parts = Parts::new(inputs)?;
    // m cancels out of both results but for rounding.
    let m = select(&parts.any, &parts.exponents.max(0)?, 0.0)?;
    let shifted = rounding.f32(&parts.exponents.broadcast_sub(&m)?)?;
    let weights = rounding.approximate_f32(&exp2(&shifted)?)?;
    let sum = rounding.sum_f32(&weights, 0)?;
    let logarithm = select(&parts.any, &sum, 1.0)?.log()?;
    let log2 = rounding.approximate_f32(&(logarithm / std::f64::consts::LN_2)?)?;
    let e = rounding.f32(&(&m + log2)?)?;
    let ln_2 = rounding.constant_f32(std::f64::consts::LN_2);
    let lse = select(&parts.any, &(e * ln_2)?, f64::INFINITY)?;
    let shares = shares(inputs, &parts, &m, &weights, &sum, rounding)?;
    let terms = shares.unsqueeze(3)?.broadcast_mul(&parts.out)?;
    Ok(Outputs { out: rounding.sum_f32(&terms, 0)?, lse })
}

/// `2^(e_s - m) / (Z + exp(sink) 2^-m)`, `[num_parts, num_tokens, num_heads]`: 0 for parts without keys.
fn shares(
    inputs: &Inputs,
    parts: &Parts,
    m: &Tensor,
    weights: &Tensor,
    sum: &Tensor,
    rounding: &mut Rounding,
) -> Result<Tensor> {
    let Some(sink) = &inputs.sink else {
        let sum = select(&parts.any, sum, 1.0)?;
        let inverse = rounding.f32(&sum.recip()?)?;
        return rounding.f32(&weights.broadcast_mul(&inverse)?);
    };
    let log2_e = rounding.constant_f32(std::f64::consts::LOG2_E);
    let sink = (sink.broadcast_as(m.shape())? * log2_e)?;
    // A sink beyond the range of fp32 in base 2 is infinite there: out is 0 either way.
    let sink = rounding.f32(&sink)?;
    let sink_power = rounding.f32(&(sink - m)?)?;
    let sink_power = rounding.approximate_f32(&exp2(&sink_power)?)?;
    let denominator = rounding.f32(&(select(&parts.any, sum, 1.0)? + sink_power)?)?;
    let inverse = rounding.f32(&denominator.recip()?)?;
    rounding.f32(&weights.broadcast_mul(&inverse)?)
}

/// The parts, those without keys made harmless.
struct Parts {
    /// `[num_parts, num_tokens, num_heads]`: base-2 log-sum-exp, `-inf` for parts without keys.
    exponents: Tensor,
    /// `[num_parts, num_tokens, num_heads, v_dim]`: 0 for parts without keys.
    out: Tensor,
    /// 1 where the row has a key, `[num_tokens, num_heads]`.
    any: Tensor,
}

impl Parts {
    fn new(inputs: &Inputs) -> Result<Self> {
        let shape = inputs.partial_lse.dims();
        let lse = values(&inputs.partial_lse)?;
        let has_keys: Vec<u8> = lse.iter().map(|e| u8::from(!e.is_infinite())).collect();
        let has_keys = Tensor::from_vec(has_keys, shape, &Device::Cpu)?;
        let of_rows = has_keys.unsqueeze(3)?.broadcast_as(inputs.partial_out.shape())?;
        Ok(Self {
            exponents: select(&has_keys, &inputs.partial_lse, f64::NEG_INFINITY)?,
            out: select(&of_rows, &inputs.partial_out, 0.0)?,
            any: has_keys.max(0)?,
        })
    }
}

fn exp2(tensor: &Tensor) -> Result<Tensor> {
    Ok((tensor * std::f64::consts::LN_2)?.exp()?)
}

impl Inputs {
    fn check(&self) -> Result<[usize; 4]> {
        let axes = ["num_parts", "num_tokens", "num_heads", "v_dim"];
        extents(
            axes,
            &[
                ("partial_out", Some(&self.partial_out), &axes),
                ("partial_lse", Some(&self.partial_lse), &axes[..3]),
                ("sink", self.sink.as_ref(), &axes[2..3]),
            ],
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sparse_attention as attention;
    use crate::testing::{Draw, UNIT_ROUNDOFF, assert_unbiased, assert_within, f64_tensor};
    use crate::{Precision, Result};

    const LOG2_E: f64 = std::f64::consts::LOG2_E;

    /// Attention of 5 tokens over 40 keys, some of them masked, with a sink.
    fn whole() -> attention::Inputs {
        let mut draw = Draw::new(3);
        let indices = (0..5 * 40).map(|slot| if slot % 7 == 3 { -1 } else { draw.below(30) as i32 }).collect();
        attention::Inputs {
            q: draw.bf16(&[5, 3, 16], 2.0),
            k: draw.bf16(&[30, 16], 1.0),
            value: attention::Value::Shared,
            sink: Some(f64_tensor(&[1.0, f64::NEG_INFINITY, f64::INFINITY], &[3])),
            indices,
            topk: 40,
            topk_length: Some(vec![40, 0, 13, 40, 1]),
            softmax_scale: 0.25,
        }
    }

    /// The slots `range` of every list as a part of its own.
    fn part(whole: &attention::Inputs, range: std::ops::Range<usize>) -> Result<(Tensor, Tensor)> {
        let lists = whole.indices.chunks(whole.topk).flat_map(|list| list[range.clone()].to_vec()).collect();
        let lengths = whole.topk_length.as_ref().expect("lengths");
        let lengths = lengths.iter().map(|&length| length - range.start as i32).collect();
        let part = attention::Inputs {
            indices: lists,
            topk: range.len(),
            topk_length: Some(lengths),
            sink: None,
            ..whole.clone()
        };
        let outputs = attention::forward(&part, &mut Rounding::exact())?;
        Ok((outputs.out, (outputs.lse * LOG2_E)?))
    }

    fn split(whole: &attention::Inputs, at: &[usize]) -> Result<Inputs> {
        let parts: Vec<_> = at.windows(2).map(|ends| part(whole, ends[0]..ends[1])).collect::<Result<_>>()?;
        let stack = |tensors: Vec<&Tensor>| Tensor::stack(&tensors, 0);
        Ok(Inputs {
            partial_out: stack(parts.iter().map(|(out, _)| out).collect())?,
            partial_lse: stack(parts.iter().map(|(_, lse)| lse).collect())?,
            sink: whole.sink.clone(),
        })
    }

    #[test]
    fn parts_of_any_number_merge_to_the_whole() -> Result<()> {
        let whole = whole();
        let expected = attention::forward(&whole, &mut Rounding::exact())?;
        for at in [&[0, 40][..], &[0, 20, 40], &[0, 1, 13, 14, 39, 40]] {
            let merged = forward(&split(&whole, at)?, &mut Rounding::exact())?;
            let bound = (expected.out.ones_like()? * (64.0 * UNIT_ROUNDOFF))?;
            assert_within("out", &merged.out, &expected.out, &bound);
            let (lse, expected_lse) = (values(&merged.lse)?, values(&expected.lse)?);
            for (merged, expected) in lse.iter().zip(&expected_lse) {
                let equal = merged == expected || (merged - expected).abs() <= 64.0 * UNIT_ROUNDOFF * expected.abs();
                assert!(equal, "lse {merged} against {expected}");
            }
        }
        Ok(())
    }

    #[test]
    fn a_part_without_keys_counts_for_nothing_whatever_it_holds() -> Result<()> {
        let numbers = [1.0, 2.0, f64::NAN, f64::NAN];
        let merge = |e: f64, sink: f64| {
            let inputs = Inputs {
                partial_out: f64_tensor(&numbers, &[2, 1, 1, 2]),
                partial_lse: f64_tensor(&[3.0, e], &[2, 1, 1]),
                sink: Some(f64_tensor(&[sink], &[1])),
            };
            forward(&inputs, &mut Rounding::exact())
        };
        for infinity in [f64::INFINITY, f64::NEG_INFINITY] {
            let merged = merge(infinity, f64::NEG_INFINITY)?;
            assert_eq!(values(&merged.out)?, [1.0, 2.0]);
            assert!((values(&merged.lse)?[0] - 8f64.ln()).abs() < 1e-15);
            assert_eq!(values(&merge(infinity, f64::INFINITY)?.out)?, [0.0, 0.0]);
            // exp(sink) = 8, as much as the keys.
            let halved = values(&merge(infinity, 8f64.ln())?.out)?;
            assert!((halved[0] - 0.5).abs() < 1e-15 && (halved[1] - 1.0).abs() < 1e-15);
        }
        assert!(values(&merge(0.0, 0.0)?.out)?.iter().all(|x| x.is_nan()), "a part with keys that is NaN shows");
        Ok(())
    }

    #[test]
    fn rows_without_any_key_are_zero_and_their_lse_infinite() -> Result<()> {
        for num_parts in [0, 1, 3] {
            let inputs = Inputs {
                partial_out: Tensor::full(f64::NAN, (num_parts, 2, 3, 8), &Device::Cpu)?,
                partial_lse: Tensor::full(f64::NEG_INFINITY, (num_parts, 2, 3), &Device::Cpu)?,
                sink: Some(f64_tensor(&[0.0, f64::INFINITY, f64::NEG_INFINITY], &[3])),
            };
            for precision in [Precision::Exact, Precision::Working { seed: 1 }] {
                let merged = forward(&inputs, &mut Rounding::new(precision))?;
                assert!(values(&merged.out)?.iter().all(|&x| x == 0.0));
                assert!(values(&merged.lse)?.iter().all(|&x| x == f64::INFINITY));
            }
        }
        Ok(())
    }

    #[test]
    fn working_runs_have_the_exact_result_as_their_mean() -> Result<()> {
        let inputs = split(&whole(), &[0, 7, 20, 40])?;
        let exact = forward(&inputs, &mut Rounding::exact())?.out;
        let runs: Vec<Tensor> = (0..256)
            .map(|seed| Ok(forward(&inputs, &mut Rounding::new(Precision::Working { seed }))?.out))
            .collect::<Result<_>>()?;
        // Of 15 rows a third has an infinite sink and one token no key: 8 rows err, each by its own shares.
        assert_unbiased("out", &exact.narrow(1, 0, 2)?, &narrowed(&runs)?, 8);
        Ok(())
    }

    fn narrowed(runs: &[Tensor]) -> Result<Vec<Tensor>> {
        Ok(runs.iter().map(|run| run.narrow(1, 0, 2)).collect::<std::result::Result<_, _>>()?)
    }

    #[test]
    fn inputs_that_do_not_fit_are_refused() {
        let inputs = |parts: usize, heads: usize| Inputs {
            partial_out: f64_tensor(&[0.0; 48], &[2, 1, 3, 8]),
            partial_lse: f64_tensor(&vec![0.0; parts * 3], &[parts, 1, 3]),
            sink: Some(f64_tensor(&vec![0.0; heads], &[heads])),
        };
        assert!(forward(&inputs(2, 3), &mut Rounding::exact()).is_ok());
        assert!(forward(&inputs(1, 3), &mut Rounding::exact()).is_err());
        assert!(forward(&inputs(2, 2), &mut Rounding::exact()).is_err());
    }
}
