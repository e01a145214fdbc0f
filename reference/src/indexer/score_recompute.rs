//! Attention scores, recomputed as the target of the indexer's distillation (training 5).
//!
//! Every token t ranks some keys of its sequence, and all heads share them. *Selected*: slot j of a
//! list names a key; it is valid when `j < clamp(topk_length[t], 0, topk)` and the key belongs to
//! the sequence. *Causal*: slot j is key j of the sequence; it is valid when
//!
//! ```text
//! j < lim(t) = clamp(floor((q_off + t + 1) / ratio), 0, keys)          t counted within the sequence
//! ```
//!
//! In this case the last of the tokens that key j covers, `j * ratio + ratio - 1`, is not after t.
//! Over the valid slots, each counted as often as it occurs,
//!
//! ```text
//! z[h, j] = softmax_scale * q[t, h] . k[key(t, j)]
//! L[h]    = ln(exp(lse[t, h]) + exp(sink[h]))
//! A[j]    = sum_h exp(z[h, j] - L[h])                    0 in invalid slots
//! l1      = sum_j A[j]
//! target  = A / l1                                       0 where l1 = 0
//! ```
//!
//! `lse` is natural and without the sink. With the lse of only the ranked keys, the target is the
//! mean of the heads' softmaxes (V3.2: l1 is the number of heads). With the lse of the whole
//! softmax, window included, each head is weighted by the mass of its ranked keys (V4). Where no
//! forward pass provides it, [`lse`] computes
//!
//! ```text
//! lse[t, h] = ln(sum_j exp(z[h, j]) + exp(lse_beside[t, h]))           +inf without any term
//! ```
//!
//! A NaN in q, k, lse or sink makes every A that it enters NaN, and with l1 the whole row of the
//! target.
//!
//! A head whose lse is infinite, of either sign, adds nothing: padding heads have `+inf`, and a row
//! without any key has one or the other. A head whose L is beyond fp32 in base 2 also adds nothing
//! (a sink of `+inf`, or above 2.36e38).
//!
//! No gradient passes: q, k, lse and sink are detached, and indices have none. This operator has no
//! backward.
//!
//! # The shift of a row
//!
//! Where window and sink have nearly all of the mass of a row, every exponential may be below the
//! fp32 range although their quotients are ordinary. If `e = max_hj (z - L)` is further from 0 than
//! `64 ln 2`, all L of the row are replaced by `L + e`. The target does not change; [`scores`]
//! reports `shift = e`, and A and l1 are `exp(-shift)` times the above.
//!
//! # Rounding points
//!
//! * matrix products and sums accumulate in fp32; exponents, exponentials and sums over heads are
//!   fp32;
//! * all computation is in base 2: `softmax_scale log2 e` is one fp32 constant, lse and sink are
//!   multiplied by another, and results are converted back by `ln 2`. `z - L` is rounded once,
//!   after the subtraction;
//! * l1 sums the unrounded A; the target is A times the rounded reciprocal of l1.
//!
//! Invalid slots read a row of zeros after the last key and are set to 0, or to `-inf`, by a
//! select.

use candle_core::{DType, Device, Tensor};

use crate::error::{Result, require, require_f64, wrong_shape, wrong_value};
use crate::indexer::ranking::RankedKeys;
pub use crate::indexer::ranking::{Ranking, Sequences};
use crate::precision::{Rounding, values};
use crate::select::{select, unless};

/// The largest exponent of a row, in base 2, that is not shifted.
const LARGEST_EXPONENT: f64 = 64.0;

/// Inputs of the operator, widened to f64.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// `[num_tokens, num_heads, head_dim]`, stored in bf16.
    pub q: Tensor,
    /// `[num_keys, head_dim]`, stored in bf16. `num_keys` may be 0.
    pub k: Tensor,
    /// The keys that a token ranks.
    pub ranking: Ranking,
    /// `None` is one sequence of all tokens and keys.
    pub sequences: Option<Sequences>,
    /// Multiplies the dot products; finite.
    pub softmax_scale: f64,
}

/// The logarithm of the divisor of the exponentials.
#[derive(Debug, Clone)]
pub struct Normaliser {
    /// `[num_tokens, num_heads]`, stored in f32: natural, without the sink. An infinity excludes
    /// the head.
    pub lse: Tensor,
    /// `[num_heads]`, stored in f32: a logit (not scaled) in natural units. Any value, infinities
    /// included.
    pub sink: Option<Tensor>,
}

/// Outputs of the dense form.
#[derive(Debug, Clone)]
pub struct Scores {
    /// `[num_tokens, columns]`, stored in f32: A.
    pub scores: Tensor,
    /// `[num_tokens]`, stored in f32.
    pub l1: Tensor,
    /// `[num_tokens]`, stored in f32: A and l1 are `exp(-shift)` times the formula; usually 0.
    pub shift: Tensor,
}

/// The sparse target, `[num_tokens, topk]`: each row sums to 1, or is 0.
pub fn target(inputs: &Inputs, normaliser: &Normaliser, rounding: &mut Rounding) -> Result<Tensor> {
    let sums = HeadSums::of(inputs, normaliser, rounding)?;
    let Some(sums) = sums else {
        return Ok(Tensor::zeros(
            (inputs.q.dim(0)?, inputs.ranking.slots()),
            DType::F64,
            &Device::Cpu,
        )?);
    };
    let divisor = unless(&sums.l1.eq(0.0)?, &sums.l1, 1.0)?;
    let reciprocal = rounding.f32(&divisor.recip()?)?;
    rounding.f32(&sums.scores.broadcast_mul(&reciprocal)?)
}

/// The dense scores with their row sums.
pub fn scores(inputs: &Inputs, normaliser: &Normaliser, rounding: &mut Rounding) -> Result<Scores> {
    let sums = HeadSums::of(inputs, normaliser, rounding)?;
    let Some(sums) = sums else {
        let tokens = inputs.q.dim(0)?;
        let zeros = Tensor::zeros(tokens, DType::F64, &Device::Cpu)?;
        return Ok(Scores {
            scores: Tensor::zeros((tokens, inputs.ranking.slots()), DType::F64, &Device::Cpu)?,
            l1: zeros.clone(),
            shift: zeros,
        });
    };
    let shift = Base::new(rounding).natural(&sums.added, rounding)?;
    Ok(Scores {
        scores: sums.scores,
        l1: sums.l1.squeeze(1)?,
        shift: shift.squeeze(2)?.squeeze(1)?,
    })
}

/// Log-sum-exp of the ranked keys and of the keys next to them, `[num_tokens, num_heads]`: `+inf`
/// without any term. `lse_beside` has that shape too; its infinities, of either sign, are not
/// terms.
pub fn lse(
    inputs: &Inputs,
    lse_beside: Option<&Tensor>,
    rounding: &mut Rounding,
) -> Result<Tensor> {
    let (tokens, heads) = inputs.check()?;
    if let Some(beside) = lse_beside {
        require("lse_beside", beside, &[tokens, heads])?;
    }
    if tokens == 0 || heads == 0 {
        return Ok(Tensor::zeros((tokens, heads), DType::F64, &Device::Cpu)?);
    }
    let gathered = Gathered::new(inputs)?;
    let base = Base::new(rounding);
    let z = gathered.products(inputs, &base, rounding)?;
    let z = rounding.f32(&z)?;
    let z = select(&gathered.valid.broadcast_as(z.shape())?, &z, f64::NEG_INFINITY)?;
    let max = z.max_keepdim(2)?;
    let is_empty = max.eq(f64::NEG_INFINITY)?;
    let reference = unless(&is_empty, &max, 0.0)?;
    let exponents = rounding.f32(&z.broadcast_sub(&reference)?)?;
    let sum = base.exp2(&exponents, rounding)?;
    let sum = rounding.sum_keepdim_f32(&sum, 2)?;
    let logarithm = base.log2(&unless(&is_empty, &sum, 1.0)?, rounding)?;
    let keys = rounding.f32(&(reference + logarithm)?)?;
    let mut lse = unless(&is_empty, &keys, f64::NEG_INFINITY)?;
    if let Some(beside) = lse_beside {
        let beside = base.two(&beside.unsqueeze(2)?, rounding)?;
        let beside = unless(&is_infinite(&beside)?, &beside, f64::NEG_INFINITY)?;
        lse = base.log2_add_exp2(&lse, &beside, rounding)?;
    }
    let natural = base.natural(&lse, rounding)?;
    Ok(unless(&lse.eq(f64::NEG_INFINITY)?, &natural, f64::INFINITY)?.squeeze(2)?)
}

impl Inputs {
    fn ranked(&self, num_keys: usize) -> RankedKeys<'_> {
        RankedKeys { ranking: &self.ranking, sequences: self.sequences.as_ref(), num_keys }
    }

    /// `(num_tokens, num_heads)`.
    fn check(&self) -> Result<(usize, usize)> {
        require_f64("q", &self.q)?;
        let &[num_tokens, num_heads, head_dim] = self.q.dims() else {
            return Err(wrong_shape("q", "[num_tokens, num_heads, head_dim]", &self.q));
        };
        let &[num_keys, _] = self.k.dims() else {
            return Err(wrong_shape("k", "[num_keys, head_dim]", &self.k));
        };
        require("k", &self.k, &[num_keys, head_dim])?;
        if head_dim == 0 {
            return Err(wrong_value("head_dim", head_dim, "a head needs channels"));
        }
        if !self.softmax_scale.is_finite() {
            return Err(wrong_value("softmax_scale", self.softmax_scale, "it must be finite"));
        }
        self.ranked(num_keys).check(num_tokens)?;
        Ok((num_tokens, num_heads))
    }
}

/// The keys of all slots.
struct Gathered {
    /// 1 where the slot is valid, `[num_tokens, 1, slots]`.
    valid: Tensor,
    /// `[num_tokens, slots, head_dim]`; zeros in invalid slots.
    k: Tensor,
}

impl Gathered {
    fn new(inputs: &Inputs) -> Result<Self> {
        let tokens = inputs.q.dim(0)?;
        // A row without slots has one invalid slot, so that no tensor is empty.
        let slots = inputs.ranking.slots().max(1);
        let null_row = inputs.k.dim(0)? as i64;
        let mut rows = vec![null_row; tokens * slots];
        let ranked = inputs.ranked(inputs.k.dim(0)?);
        for token in 0..tokens {
            for (row, ranked) in rows[token * slots..].iter_mut().zip(ranked.rows(token)) {
                *row = ranked.unwrap_or(null_row);
            }
        }
        let valid: Vec<u8> = rows.iter().map(|&row| u8::from(row != null_row)).collect();
        let head_dim = inputs.k.dim(1)?;
        let zeros = Tensor::zeros((1, head_dim), DType::F64, &Device::Cpu)?;
        let keys = if null_row == 0 { zeros } else { Tensor::cat(&[&inputs.k, &zeros], 0)? };
        let rows = Tensor::from_vec(rows, tokens * slots, &Device::Cpu)?;
        Ok(Self {
            valid: Tensor::from_vec(valid, (tokens, 1, slots), &Device::Cpu)?,
            k: keys.index_select(&rows, 0)?.reshape((tokens, slots, head_dim))?,
        })
    }

    /// `softmax_scale q . k` in base 2, `[num_tokens, num_heads, slots]`, not yet rounded; 0 in
    /// invalid slots.
    fn products(&self, inputs: &Inputs, base: &Base, rounding: &mut Rounding) -> Result<Tensor> {
        let products = rounding.matmul_f32(&inputs.q, &self.k.transpose(1, 2)?)?;
        Ok((products * rounding.constant_f32(inputs.softmax_scale * base.log2_e))?)
    }
}

/// Arithmetic in base 2, as in kernels; the constants for the conversions are fp32.
struct Base {
    log2_e: f64,
    ln_2: f64,
}

impl Base {
    fn new(rounding: &mut Rounding) -> Self {
        Self {
            log2_e: rounding.constant_f32(std::f64::consts::LOG2_E),
            ln_2: rounding.constant_f32(std::f64::consts::LN_2),
        }
    }

    fn two(&self, natural: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
        rounding.f32(&(natural * self.log2_e)?)
    }

    /// The last step before a store; the store is not modelled here.
    fn natural(&self, two: &Tensor, rounding: &Rounding) -> Result<Tensor> {
        // Not `log2_e` and its inverse: their product is 1 only up to the last digits of f64.
        let ln_2 = if rounding.is_exact() { std::f64::consts::LN_2 } else { self.ln_2 };
        Ok((two * ln_2)?)
    }

    fn exp2(&self, exponents: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
        rounding.approximate_f32(&(exponents * std::f64::consts::LN_2)?.exp()?)
    }

    fn log2(&self, x: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
        rounding.approximate_f32(&(x.log()? * std::f64::consts::LOG2_E)?)
    }

    /// `log2(2^a + 2^b)`, elementwise; an infinite larger operand is the result.
    fn log2_add_exp2(&self, a: &Tensor, b: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
        let larger = a.maximum(b)?;
        let is_infinite = is_infinite(&larger)?;
        let reference = unless(&is_infinite, &larger, 0.0)?;
        let difference = unless(&is_infinite, &(a.minimum(b)? - &reference)?, 0.0)?;
        let difference = rounding.f32(&difference)?;
        let term = self.exp2(&difference, rounding)?;
        let term = rounding.f32(&(term + 1.0)?)?;
        let logarithm = self.log2(&term, rounding)?;
        let sum = rounding.f32(&(reference + logarithm)?)?;
        let sum = is_infinite.where_cond(&larger, &sum)?;
        // The larger of a value and NaN is the value.
        let is_number = (a.eq(a)? * b.eq(b)?)?;
        select(&is_number, &sum, f64::NAN)
    }
}

/// Sums over the heads.
struct HeadSums {
    /// A, `[num_tokens, slots]`.
    scores: Tensor,
    /// `[num_tokens, 1]`.
    l1: Tensor,
    /// What was added to every L of a row, in base 2: `[num_tokens, 1, 1]`.
    added: Tensor,
}

impl HeadSums {
    /// `None` with nothing to sum: no token, or no slot.
    fn of(
        inputs: &Inputs,
        normaliser: &Normaliser,
        rounding: &mut Rounding,
    ) -> Result<Option<Self>> {
        let (tokens, heads) = inputs.check()?;
        require("lse", &normaliser.lse, &[tokens, heads])?;
        if let Some(sink) = &normaliser.sink {
            require("sink", sink, &[heads])?;
        }
        if tokens == 0 || heads == 0 || inputs.ranking.slots() == 0 {
            return Ok(None);
        }
        let gathered = Gathered::new(inputs)?;
        let base = Base::new(rounding);
        let products = gathered.products(inputs, &base, rounding)?;
        let (l, adds) = normalisers(normaliser, &base, rounding)?;
        let counts = adds.broadcast_mul(&gathered.valid)?;
        let exponents = rounding.f32(&products.broadcast_sub(&l)?)?;
        let added = Self::shift(&select(&counts, &exponents, f64::NEG_INFINITY)?)?;
        let l = rounding.f32(&l.broadcast_add(&added)?)?;
        let exponents = rounding.f32(&products.broadcast_sub(&l)?)?;
        // An excluded head may have any exponent, so it is excluded before the exponential.
        let exponents = select(&counts, &exponents, f64::NEG_INFINITY)?;
        let weights = base.exp2(&exponents, rounding)?;
        let scores = rounding.sum_f32(&weights, 1)?;
        let l1 = rounding.sum_keepdim_f32(&scores, 1)?;
        Ok(Some(Self { scores, l1, added }))
    }

    /// The largest exponent of each row where the fp32 range would lose the row, else 0.
    /// `[num_tokens, 1, 1]`.
    fn shift(exponents: &Tensor) -> Result<Tensor> {
        let largest = exponents.max_keepdim(2)?.max_keepdim(1)?;
        let shifted = values(&largest)?.into_iter().map(|e| {
            let is_lost = e.is_finite() && e.abs() > LARGEST_EXPONENT;
            if is_lost { e } else { 0.0 }
        });
        Ok(Tensor::from_vec(shifted.collect::<Vec<f64>>(), largest.shape(), &Device::Cpu)?)
    }
}

/// L in base 2, and 1 where the head adds something; both `[num_tokens, num_heads, 1]`. L is 0
/// where it does not.
fn normalisers(
    normaliser: &Normaliser,
    base: &Base,
    rounding: &mut Rounding,
) -> Result<(Tensor, Tensor)> {
    // Values beyond fp32 are infinite: f64 would still distinguish them.
    let in_fp32 = |tensor: &Tensor| -> Result<Tensor> {
        let stored = values(tensor)?
            .into_iter()
            .map(|x| if x.abs() > f64::from(f32::MAX) { f64::INFINITY.copysign(x) } else { x });
        Ok(Tensor::from_vec(stored.collect::<Vec<f64>>(), tensor.shape(), &Device::Cpu)?)
    };
    let lse = base.two(&normaliser.lse.unsqueeze(2)?, rounding)?;
    let lse = in_fp32(&lse)?;
    let is_out = is_infinite(&lse)?;
    let mut l = lse.clone();
    if let Some(sink) = &normaliser.sink {
        let sink = base
            .two(&sink.reshape((1, (), 1))?.broadcast_as(lse.shape())?.contiguous()?, rounding)?;
        l = base.log2_add_exp2(&lse, &in_fp32(&sink)?, rounding)?;
    }
    // A NaN adds, and makes the sum NaN.
    let adds = unless(&is_out, &l, f64::INFINITY)?.abs()?.ne(f64::INFINITY)?;
    Ok((select(&adds, &l, 0.0)?, adds))
}

fn is_infinite(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.abs()?.eq(f64::INFINITY)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Precision;
    use crate::testing::{Draw, UNIT_ROUNDOFF, assert_unbiased, assert_within, f64_tensor};

    const TOKENS: usize = 7;
    const HEADS: usize = 3;
    const HEAD_DIM: usize = 16;
    const KEYS: usize = 11;

    fn causal(seed: u64, ratio: usize, offset: i32) -> Inputs {
        let mut draw = Draw::new(seed);
        Inputs {
            q: draw.bf16(&[TOKENS, HEADS, HEAD_DIM], 2.0),
            k: draw.bf16(&[KEYS, HEAD_DIM], 1.0),
            ranking: Ranking::Causal { ratio, q_off: Some(vec![offset]), columns: KEYS },
            sequences: None,
            softmax_scale: 0.3,
        }
    }

    /// A list with -1, indices out of range and duplicates; token 0 has no valid slot.
    fn selected(seed: u64) -> Inputs {
        let mut draw = Draw::new(seed + 100);
        let hostile = [-1, KEYS as i32, i32::MAX, i32::MIN];
        let slot = |draw: &mut Draw| draw.below(KEYS + 4) as i32;
        let mut indices: Vec<i32> = (0..TOKENS * 9).map(|_| slot(&mut draw)).collect();
        indices
            .iter_mut()
            .filter(|i| **i >= KEYS as i32)
            .for_each(|i| *i = hostile[*i as usize - KEYS]);
        indices[..9].fill(-1);
        let ranking = Ranking::Selected { indices, topk: 9, topk_length: None, global: true };
        Inputs { ranking, ..causal(seed, 1, 0) }
    }

    /// The key of each slot of a token, directly by the definition.
    fn keys_of(inputs: &Inputs, token: usize) -> Vec<Option<usize>> {
        match &inputs.ranking {
            Ranking::Selected { indices, topk, .. } => indices[token * topk..][..*topk]
                .iter()
                .map(|&index| usize::try_from(index).ok().filter(|&key| key < KEYS))
                .collect(),
            Ranking::Causal { ratio, q_off, .. } => {
                let position = i64::from(q_off.as_ref().unwrap()[0]) + token as i64;
                let last_token = |key: usize| (key * ratio + ratio - 1) as i64;
                (0..KEYS).map(|key| (last_token(key) <= position).then_some(key)).collect()
            }
        }
    }

    /// `exp` of every logit, `[tokens][heads][slots]`, in loops; 0 in invalid slots.
    fn exponentials(inputs: &Inputs) -> Vec<Vec<Vec<f64>>> {
        let (q, k) = (values(&inputs.q).unwrap(), values(&inputs.k).unwrap());
        let logit = |t: usize, h: usize, key: usize| -> f64 {
            let row = &q[(t * HEADS + h) * HEAD_DIM..][..HEAD_DIM];
            row.iter().zip(&k[key * HEAD_DIM..]).map(|(a, b)| a * b).sum::<f64>()
                * inputs.softmax_scale
        };
        let row = |t: usize, h: usize| {
            keys_of(inputs, t)
                .into_iter()
                .map(|key| key.map_or(0.0, |key| logit(t, h, key).exp()))
                .collect()
        };
        (0..TOKENS).map(|t| (0..HEADS).map(|h| row(t, h)).collect()).collect()
    }

    /// A relative bound: sums of a few dozen terms and exponents of a few dozen, in f64.
    fn bound(expected: &Tensor) -> Tensor {
        ((expected.abs().unwrap() + 1e-300).unwrap() * (1024.0 * UNIT_ROUNDOFF)).unwrap()
    }

    fn assert_close(what: &str, actual: &Tensor, expected: &[f64]) {
        let expected = f64_tensor(expected, actual.dims());
        assert_within(what, actual, &expected, &bound(&expected));
    }

    fn exact_lse(inputs: &Inputs, beside: Option<&Tensor>) -> Tensor {
        lse(inputs, beside, &mut Rounding::exact()).unwrap()
    }

    fn exact_target(inputs: &Inputs, lse: &Tensor, sink: Option<&Tensor>) -> Tensor {
        let normaliser = Normaliser { lse: lse.clone(), sink: sink.cloned() };
        target(inputs, &normaliser, &mut Rounding::exact()).unwrap()
    }

    #[test]
    fn with_the_ranked_keys_own_lse_the_target_is_the_mean_of_the_heads_softmaxes() {
        for inputs in [selected(1), causal(2, 1, 3), causal(3, 2, 9), causal(4, 3, -2)] {
            let lse = exact_lse(&inputs, None);
            let mut expected = Vec::new();
            for token in exponentials(&inputs) {
                let softmax =
                    |head: &Vec<f64>, j: usize| head[j] / head.iter().sum::<f64>().max(1e-300);
                expected.extend(
                    (0..token[0].len()).map(|j| token.iter().map(|h| softmax(h, j)).sum::<f64>()),
                );
            }
            match inputs.ranking {
                Ranking::Selected { .. } => {
                    let mean: Vec<f64> = expected.iter().map(|sum| sum / HEADS as f64).collect();
                    assert_close("target", &exact_target(&inputs, &lse, None), &mean);
                }
                Ranking::Causal { .. } => {
                    let normaliser = Normaliser { lse, sink: None };
                    let outputs = scores(&inputs, &normaliser, &mut Rounding::exact()).unwrap();
                    assert_close("scores", &outputs.scores, &expected);
                    let any = |t| keys_of(&inputs, t).iter().any(Option::is_some);
                    let l1: Vec<f64> =
                        (0..TOKENS).map(|t| if any(t) { HEADS as f64 } else { 0.0 }).collect();
                    assert_close("l1", &outputs.l1, &l1);
                    assert!(values(&outputs.shift).unwrap().iter().all(|&shift| shift == 0.0));
                }
            }
        }
    }

    #[test]
    fn a_joint_normaliser_weighs_each_head_by_the_mass_of_its_ranked_keys() {
        let inputs = selected(5);
        let mut draw = Draw::new(6);
        let (beside, sink) = (draw.normal(&[TOKENS, HEADS], 2.0), draw.normal(&[HEADS], 3.0));
        let (window, sinks) = (values(&beside).unwrap(), values(&sink).unwrap());
        let mut expected = Vec::new();
        for (t, token) in exponentials(&inputs).into_iter().enumerate() {
            let outside = |h: usize| window[t * HEADS + h].exp() + sinks[h].exp();
            let weight =
                |h: usize, j: usize| token[h][j] / (token[h].iter().sum::<f64>() + outside(h));
            let row: Vec<f64> = (0..9).map(|j| (0..HEADS).map(|h| weight(h, j)).sum()).collect();
            let l1 = row.iter().sum::<f64>();
            expected.extend(row.iter().map(|a| if l1 > 0.0 { a / l1 } else { 0.0 }));
        }
        let lse = exact_lse(&inputs, Some(&beside));
        let joint = exact_target(&inputs, &lse, Some(&sink));
        assert_close("target", &joint, &expected);
        let own = exact_target(&inputs, &exact_lse(&inputs, None), None);
        let difference =
            values(&(joint - own).unwrap().abs().unwrap()).unwrap().into_iter().fold(0.0, f64::max);
        assert!(difference > 0.01, "the two normalisers hardly differ: {difference}");
    }

    #[test]
    fn rows_that_fp32_would_lose_have_the_same_target_and_report_their_shift() {
        let (dense, sparse) = (causal(7, 1, 4), selected(7));
        // Exponents of 433 in base 2 round by up to 2^8 u, and three such differences make a
        // weight: 2^14 u is sufficient.
        for by in [-300.0, 300.0] {
            let moved = |inputs: &Inputs| (exact_lse(inputs, None) + by).unwrap();
            let lse = exact_lse(&sparse, None);
            let (plain, far) =
                (exact_target(&sparse, &lse, None), exact_target(&sparse, &moved(&sparse), None));
            let bound = ((plain.abs().unwrap() + 1e-300).unwrap()
                * (f64::from(1 << 14) * UNIT_ROUNDOFF))
                .unwrap();
            assert_within("target", &far, &plain, &bound);
            let of = |lse: Tensor| {
                scores(&dense, &Normaliser { lse, sink: None }, &mut Rounding::exact()).unwrap()
            };
            let (plain, far) = (of(exact_lse(&dense, None)), of(moved(&dense)));
            let factor = (&far.shift + by).unwrap().exp().unwrap();
            let unshifted = (far.l1 * factor).unwrap();
            let bound = (plain.l1.abs().unwrap() * (f64::from(1 << 14) * UNIT_ROUNDOFF)).unwrap();
            assert_within("l1", &unshifted, &plain.l1, &bound);
        }
    }

    #[test]
    fn heads_with_an_infinite_normaliser_add_nothing() {
        let inputs = selected(8);
        let lse = exact_lse(&inputs, None);
        let sink = f64_tensor(&[0.5, f64::INFINITY, 2.4e38], &[HEADS]);
        let alone =
            Inputs { q: inputs.q.narrow(1, 0, 1).unwrap().contiguous().unwrap(), ..inputs.clone() };
        let expected = exact_target(&alone, &lse.narrow(1, 0, 1).unwrap(), None);
        let by_sink = exact_target(&inputs, &lse, Some(&sink));
        let infinities =
            f64_tensor(&[f64::INFINITY, f64::NEG_INFINITY].repeat(TOKENS), &[TOKENS, 2]);
        let padded = Tensor::cat(&[&lse.narrow(1, 0, 1).unwrap(), &infinities], 1).unwrap();
        for actual in [by_sink, exact_target(&inputs, &padded, None)] {
            assert_within("target", &actual, &expected, &bound(&expected));
        }
    }

    #[test]
    fn sequences_packed_together_are_those_sequences_alone() {
        let inputs = causal(9, 2, 5);
        let ranking = Ranking::Causal { ratio: 2, q_off: Some(vec![3, 0, 5]), columns: 6 };
        let sequences = Some(Sequences { cu_q: vec![0, 4, 4, 6], cu_k: vec![0, 5, 5, 11] });
        let packed = exact_lse(&Inputs { ranking, sequences, ..inputs.clone() }, None);
        for (tokens, keys, offset) in [((0, 4), (0, 5), 3), ((4, 2), (5, 6), 5)] {
            let alone = Inputs {
                q: inputs.q.narrow(0, tokens.0, tokens.1).unwrap(),
                k: inputs.k.narrow(0, keys.0, keys.1).unwrap(),
                ranking: Ranking::Causal { ratio: 2, q_off: Some(vec![offset]), columns: keys.1 },
                ..inputs.clone()
            };
            let expected = values(&exact_lse(&alone, None)).unwrap();
            assert_eq!(values(&packed.narrow(0, tokens.0, tokens.1).unwrap()).unwrap(), expected);
        }
        assert!(
            values(&packed.narrow(0, 6, 1).unwrap())
                .unwrap()
                .iter()
                .all(|&lse| lse == f64::INFINITY)
        );
    }

    #[test]
    fn working_runs_err_around_the_exact_target() {
        let inputs = causal(10, 1, KEYS as i32);
        let inputs = Inputs {
            ranking: Ranking::Selected {
                indices: (0..TOKENS as i32 * 9).map(|i| i % KEYS as i32).collect(),
                topk: 9,
                topk_length: None,
                global: true,
            },
            ..inputs
        };
        let normaliser = Normaliser { lse: exact_lse(&inputs, None), sink: None };
        let run = |precision| target(&inputs, &normaliser, &mut Rounding::new(precision)).unwrap();
        let runs: Vec<Tensor> = (0..64).map(|seed| run(Precision::Working { seed })).collect();
        assert_unbiased("target", &run(Precision::Exact), &runs, TOKENS);
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let inputs = causal(11, 1, 0);
        let refuse = |inputs: Inputs, name: &str| {
            let error = lse(&inputs, None, &mut Rounding::exact()).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        };
        let falling = Some(Sequences { cu_q: vec![0, 3, 2], cu_k: vec![0, 1, 2] });
        refuse(Inputs { sequences: falling, ..inputs.clone() }, "cu_q");
        refuse(
            Inputs {
                ranking: Ranking::Causal { ratio: 0, q_off: None, columns: 4 },
                ..inputs.clone()
            },
            "ratio",
        );
        let short =
            Ranking::Selected { indices: vec![0; 3], topk: 2, topk_length: None, global: true };
        refuse(Inputs { ranking: short, ..inputs.clone() }, "indices");
        refuse(Inputs { softmax_scale: f64::NAN, ..inputs }, "softmax_scale");
    }
}
