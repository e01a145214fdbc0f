//! Merges partial attention results over disjoint sets of keys (inference 8.2).
//!
//! Part s of a row has the softmax-weighted sum `o_s` over its own keys and their base-2
//! log-sum-exp `e_s`, both without the sink. A part whose `e_s` is infinite, of either sign, has no
//! valid key and is ignored. With `m = max_s e_s` over the other parts,
//!
//! ```text
//! Z   = sum_s 2^(e_s - m)
//! lse = (m + log2 Z) ln 2                                          natural, WITHOUT the sink; +inf without any key
//! out = sum_s 2^(e_s - m) o_s / (Z + exp(sink - m ln 2))           0 without any key
//! ```
//!
//! The sink is a logit in natural units without a value row. It enters only here; `+inf` makes
//! `out` 0.
//!
//! # Rounding points
//!
//! Exponents, exponentials, the two sums and their quotient are fp32; `log2 e` and `ln 2` are fp32
//! constants. The terms of `out` are products of fp32 values that are summed in fp32.

use candle_core::{Device, Tensor};

use crate::error::Result;
use crate::named::Named;
use crate::precision::{Rounding, values};
use crate::select::select;

/// `out` `[num_tokens, num_heads, v_dim]`, stored in bf16, and `lse` `[num_tokens, num_heads]`,
/// stored in f32, of these inputs:
///
/// - `partial_out` `[num_parts, num_tokens, num_heads, v_dim]`, stored in f32; rows of parts
///   without keys may hold anything;
/// - `partial_lse` `[num_parts, num_tokens, num_heads]`, stored in f32: base 2;
/// - `sink` `[num_heads]`, stored in f32: a natural logit, of any value, infinities included;
///   absent for no sink.
pub fn forward(inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    let (out, lse) = (inputs.tensor("partial_out")?, inputs.tensor("partial_lse")?);
    let axes: &[&str] = &["num_parts", "num_tokens", "num_heads", "v_dim"];
    let tensors: [(&[_], &[_]); 3] =
        [(&["partial_out"], axes), (&["partial_lse"], &axes[..3]), (&["sink"], &axes[2..3])];
    let extents = inputs.extents(["num_parts", "num_tokens", "num_heads", "v_dim"], &tensors)?;
    let [num_parts, num_tokens, num_heads, v_dim] = extents;
    if num_parts * num_tokens * num_heads == 0 {
        let out = Tensor::full(0.0, &[num_tokens, num_heads, v_dim], &Device::Cpu)?;
        let lse = Tensor::full(f64::INFINITY, &[num_tokens, num_heads], &Device::Cpu)?;
        return Ok(Named::new().with("out", out).with("lse", lse));
    }
    let parts = Parts::new(out, lse)?;
    // m cancels in both results except for rounding.
    let m = select(&parts.any, &parts.exponents.max(0)?, 0.0)?;
    let shifted = rounding.f32(&parts.exponents.broadcast_sub(&m)?)?;
    let weights = rounding.approximate_f32(&exp2(&shifted)?)?;
    let sum = rounding.sum_f32(&weights, 0)?;
    let logarithm = select(&parts.any, &sum, 1.0)?.log()?;
    let log2 = rounding.approximate_f32(&(logarithm / std::f64::consts::LN_2)?)?;
    let e = rounding.f32(&(&m + log2)?)?;
    let ln_2 = rounding.constant_f32(std::f64::consts::LN_2);
    let lse = select(&parts.any, &(e * ln_2)?, f64::INFINITY)?;
    let shares = shares(inputs.get("sink"), &parts, &m, &weights, &sum, rounding)?;
    let terms = shares.unsqueeze(3)?.broadcast_mul(&parts.out)?;
    Ok(Named::new().with("out", rounding.sum_f32(&terms, 0)?).with("lse", lse))
}

/// `2^(e_s - m) / (Z + exp(sink) 2^-m)`, `[num_parts, num_tokens, num_heads]`: 0 for parts without
/// keys.
fn shares(
    sink: Option<&Tensor>,
    parts: &Parts,
    m: &Tensor,
    weights: &Tensor,
    sum: &Tensor,
    rounding: &mut Rounding,
) -> Result<Tensor> {
    let Some(sink) = sink else {
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
    // A part without keys has no share, whatever the sink is.
    select(&parts.has_keys, &rounding.f32(&weights.broadcast_mul(&inverse)?)?, 0.0)
}

/// The parts; those without keys hold harmless values.
struct Parts {
    /// `[num_parts, num_tokens, num_heads]`: base-2 log-sum-exp, `-inf` for parts without keys.
    exponents: Tensor,
    /// `[num_parts, num_tokens, num_heads, v_dim]`: 0 for parts without keys.
    out: Tensor,
    /// 1 where the part has a key, `[num_parts, num_tokens, num_heads]`.
    has_keys: Tensor,
    /// 1 where the row has a key, `[num_tokens, num_heads]`.
    any: Tensor,
}

impl Parts {
    fn new(out: &Tensor, lse: &Tensor) -> Result<Self> {
        let has_keys: Vec<u8> = values(lse)?.iter().map(|e| u8::from(!e.is_infinite())).collect();
        let has_keys = Tensor::from_vec(has_keys, lse.shape(), &Device::Cpu)?;
        let of_rows = has_keys.unsqueeze(3)?.broadcast_as(out.shape())?;
        let (exponents, out) =
            (select(&has_keys, lse, f64::NEG_INFINITY)?, select(&of_rows, out, 0.0)?);
        Ok(Self { exponents, out, any: has_keys.max(0)?, has_keys })
    }
}

fn exp2(tensor: &Tensor) -> Result<Tensor> {
    Ok((tensor * std::f64::consts::LN_2)?.exp()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::sparse_attention as attention;
    use crate::testing::{Draw, UNIT_ROUNDOFF, assert_unbiased, assert_within, f64_tensor};
    use crate::{Error, Precision, Result};

    const LOG2_E: f64 = std::f64::consts::LOG2_E;

    /// Attention of 5 tokens over 40 keys, some of them masked, with a sink.
    fn whole() -> attention::Inputs {
        let mut draw = Draw::new(3);
        let indices = (0..5 * 40)
            .map(|slot| if slot % 7 == 3 { -1 } else { draw.below(30) as i32 })
            .collect();
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

    /// The slots `range` of every list as a separate part.
    fn part(whole: &attention::Inputs, range: std::ops::Range<usize>) -> Result<(Tensor, Tensor)> {
        let lists = whole
            .indices
            .chunks(whole.topk)
            .flat_map(|list| list[range.clone()].to_vec())
            .collect();
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

    fn named(partial_out: Tensor, partial_lse: Tensor, sink: Option<Tensor>) -> Named {
        Named::new()
            .with("partial_out", partial_out)
            .with("partial_lse", partial_lse)
            .maybe("sink", sink)
    }

    fn split(whole: &attention::Inputs, at: &[usize]) -> Result<Named> {
        let parts: Vec<_> =
            at.windows(2).map(|ends| part(whole, ends[0]..ends[1])).collect::<Result<_>>()?;
        let (out, lse): (Vec<Tensor>, Vec<Tensor>) = parts.into_iter().unzip();
        Ok(named(Tensor::stack(&out, 0)?, Tensor::stack(&lse, 0)?, whole.sink.clone()))
    }

    #[test]
    fn parts_of_any_number_merge_to_the_whole() -> Result<()> {
        let whole = whole();
        let expected = attention::forward(&whole, &mut Rounding::exact())?;
        for at in [&[0, 40][..], &[0, 20, 40], &[0, 1, 13, 14, 39, 40]] {
            let merged = forward(&split(&whole, at)?, &mut Rounding::exact())?;
            let bound = (expected.out.ones_like()? * (64.0 * UNIT_ROUNDOFF))?;
            assert_within("out", merged.tensor("out")?, &expected.out, &bound);
            let (lse, expected_lse) = (values(merged.tensor("lse")?)?, values(&expected.lse)?);
            for (merged, expected) in lse.iter().zip(&expected_lse) {
                let equal = merged == expected
                    || (merged - expected).abs() <= 64.0 * UNIT_ROUNDOFF * expected.abs();
                assert!(equal, "lse {merged} against {expected}");
            }
        }
        Ok(())
    }

    #[test]
    fn a_part_without_keys_counts_for_nothing_whatever_it_holds() -> Result<()> {
        let numbers = [1.0, 2.0, f64::NAN, f64::NAN];
        let merge = |e: f64, sink: f64| -> Result<[Vec<f64>; 2]> {
            let (out, lse) =
                (f64_tensor(&numbers, &[2, 1, 1, 2]), f64_tensor(&[3.0, e], &[2, 1, 1]));
            let merged =
                forward(&named(out, lse, Some(f64_tensor(&[sink], &[1]))), &mut Rounding::exact())?;
            Ok([values(merged.tensor("out")?)?, values(merged.tensor("lse")?)?])
        };
        for infinity in [f64::INFINITY, f64::NEG_INFINITY] {
            let [out, lse] = merge(infinity, f64::NEG_INFINITY)?;
            assert_eq!(out, [1.0, 2.0]);
            assert!((lse[0] - 8f64.ln()).abs() < 1e-15);
            assert_eq!(merge(infinity, f64::INFINITY)?[0], [0.0, 0.0]);
            // exp(sink) = 8, as much as the keys.
            let [halved, _] = merge(infinity, 8f64.ln())?;
            assert!((halved[0] - 0.5).abs() < 1e-15 && (halved[1] - 1.0).abs() < 1e-15);
        }
        assert!(
            merge(0.0, 0.0)?[0].iter().all(|x| x.is_nan()),
            "a part with keys that is NaN shows"
        );
        Ok(())
    }

    #[test]
    fn rows_without_any_key_are_zero_and_their_lse_infinite() -> Result<()> {
        for num_parts in [0, 1, 3] {
            let out = Tensor::full(f64::NAN, (num_parts, 2, 3, 8), &Device::Cpu)?;
            let lse = Tensor::full(f64::NEG_INFINITY, (num_parts, 2, 3), &Device::Cpu)?;
            let inputs =
                named(out, lse, Some(f64_tensor(&[0.0, f64::INFINITY, f64::NEG_INFINITY], &[3])));
            for precision in [Precision::Exact, Precision::Working { seed: 1 }] {
                let merged = forward(&inputs, &mut Rounding::new(precision))?;
                assert!(values(merged.tensor("out")?)?.iter().all(|&x| x == 0.0));
                assert!(values(merged.tensor("lse")?)?.iter().all(|&x| x == f64::INFINITY));
            }
        }
        Ok(())
    }

    #[test]
    fn working_runs_have_the_exact_result_as_their_mean() -> Result<()> {
        let inputs = split(&whole(), &[0, 7, 20, 40])?;
        let run = |rounding: &mut Rounding| {
            Ok(forward(&inputs, rounding)?.tensor("out")?.narrow(1, 0, 2)?)
        };
        let working = (0..256).map(|seed| run(&mut Rounding::new(Precision::Working { seed })));
        // Of 15 rows a third has an infinite sink and one token has no key: 8 rows err, each by its
        // own shares.
        assert_unbiased(
            "out",
            &run(&mut Rounding::exact())?,
            &working.collect::<Result<Vec<_>>>()?,
            8,
        );
        Ok(())
    }

    #[test]
    fn inputs_that_do_not_fit_are_refused() {
        let merge = |parts: usize, heads: usize| {
            let (out, lse) = (
                f64_tensor(&[0.0; 48], &[2, 1, 3, 8]),
                f64_tensor(&vec![0.0; parts * 3], &[parts, 1, 3]),
            );
            forward(
                &named(out, lse, Some(f64_tensor(&vec![0.0; heads], &[heads]))),
                &mut Rounding::exact(),
            )
        };
        assert!(merge(2, 3).is_ok());
        assert!(matches!(merge(1, 3), Err(Error::Shape { argument: "partial_lse", .. })));
        assert!(matches!(merge(2, 2), Err(Error::Shape { argument: "sink", .. })));
        let lse = Named::new().with("partial_lse", f64_tensor(&[], &[0, 1, 3]));
        let refused = forward(&lse, &mut Rounding::exact());
        assert!(
            matches!(refused, Err(Error::Value { argument: "partial_out", .. })),
            "{refused:?}"
        );
    }
}
