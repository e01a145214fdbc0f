//! The router selects the experts of a token and their weights (inference 10, training 11.4). With
//!
//! ```text
//! softplus(x) = max(x, 0) + log1p(exp(-|x|))      s = sqrt(softplus(logits))      Z = max(sum of s over the slots, 1e-20)
//!
//! learned : topk_indices = the topk experts with the largest s + bias, from the lowest id up
//! hashed  : topk_indices = tid2eid[token id], in the table's order
//! topk_weights = route_scale s / Z
//!
//! ds_j       = route_scale / Z (dtopk_weights_j - [Z is the sum] sum_k dtopk_weights_k s_k / Z)
//! dlogits[e] = sum over the slots j of e of ds_j sigmoid(logits[e]) / (2 s_e)
//! ```
//!
//! Of equal `s + bias` the lower id is selected, and a NaN counts as -infinity. Ids are therefore
//! distinct and valid whatever the logits hold. A token whose id is negative, or (hashed) beyond
//! the table, is padding: ids -1, weights and gradients 0, whatever its logits hold. A slot of the
//! table that names no expert is -1 with weight 0, and is not part of the sum. The selection and
//! the bias have no gradient.
//!
//! # Rounding points
//!
//! The selection uses exact scores: inputs are such that no rounding decides it. Exponentials and
//! logarithms are approximated in fp32. Sums, roots, products and quotients are fp32 values, and
//! sums over slots are fp32 sums. Below logits of -18 the score is the exponential of half the
//! logit. Its square would be subnormal in fp32 for logits below -87, so no run computes the square
//! there. Results are rounded once.

use candle_core::{Device, Tensor};

use crate::conventions::Convention;
use crate::error::{Result, require_that};
use crate::indexer::topk::ordered;
use crate::named::Named;
use crate::precision::{Rounding, values};
use crate::select::{select, unless};

/// The smallest divisor of a token's scores.
const SUM_FLOOR: f64 = 1e-20;
/// Logits below this have scores that are exponentials of half of them.
const SMALL_LOGIT: f64 = -18.0;

/// `topk_indices` and `topk_weights` `[num_tokens, topk]`, stored in i32 and f32, for these inputs:
///
/// - `logits` `[num_tokens, num_experts]`, stored in f32;
/// - `bias` `[num_experts]`, stored in f32, for a learned router; or `tid2eid`
///   `[vocab_size, topk]`, stored in i32, for a hashed one;
/// - `token_ids` `[num_tokens]`, stored in i32: rows of the table. A negative id, or one beyond the
///   table, is padding. Optional for a learned router.
///
/// # Errors
/// Tensors whose shapes do not match, a table together with a bias, more slots than experts, a
/// scale that is not above 0.
pub fn forward(
    inputs: &Named,
    topk: usize,
    route_scale: f64,
    rounding: &mut Rounding,
) -> Result<Named> {
    let slots = Slots::new(inputs, topk, route_scale)?;
    let weights = slots.weights(rounding)?;
    let topk_weights = unless(&slots.unused, &(weights.normalised * route_scale)?, 0.0)?;
    Ok(Named::new().with("topk_indices", slots.indices()?).with("topk_weights", topk_weights))
}

/// `dlogits` `[num_tokens, num_experts]`, stored in f32, for the inputs of [`forward`] and
/// `dtopk_weights` `[num_tokens, topk]`, stored in f32.
///
/// # Errors
/// As [`forward`].
pub fn backward(
    inputs: &Named,
    topk: usize,
    route_scale: f64,
    rounding: &mut Rounding,
) -> Result<Named> {
    let slots = Slots::new(inputs, topk, route_scale)?;
    let Weights { scores, sum, divisor, normalised } = slots.weights(rounding)?;
    let upstream = unless(&slots.unused, inputs.tensor("dtopk_weights")?, 0.0)?;
    let terms = rounding.f32(&(&upstream * unless(&slots.unused, &normalised, 0.0)?)?)?;
    let along = rounding.sum_keepdim_f32(&terms, 1)?;
    // A divisor that is no sum has no gradient.
    let along = match rounding.conventions().have(Convention::SumPlusFloor) {
        true => along,
        false => unless(&sum.lt(SUM_FLOOR)?, &along, 0.0)?,
    };
    let factor = rounding.f32(&(divisor.recip()? * route_scale)?)?;
    let dscores = rounding.f32(&upstream.broadcast_sub(&along)?)?;
    let dscores = rounding.f32(&dscores.broadcast_mul(&factor)?)?;
    let slopes = slopes(&slots.logits, &scores, rounding)?;
    let dlogits = rounding.f32(&(dscores * slopes)?)?;
    Ok(Named::new().with("dlogits", slots.scattered(&dlogits)?))
}

/// The experts of the slots of each token: `[num_tokens, topk]`.
struct Slots {
    /// The expert, or 0 for an unused slot.
    experts: Tensor,
    /// 1 for an unused slot.
    unused: Tensor,
    /// The logit of the expert, 0 for an unused slot.
    logits: Tensor,
    num_experts: usize,
}

/// Scores and the values derived from them, `[num_tokens, topk]`, and their sums,
/// `[num_tokens, 1]`.
struct Weights {
    scores: Tensor,
    sum: Tensor,
    divisor: Tensor,
    normalised: Tensor,
}

impl Slots {
    fn new(inputs: &Named, topk: usize, route_scale: f64) -> Result<Self> {
        let tensors: [(&[_], &[_]); 5] = [
            (&["logits"], &["num_tokens", "num_experts"]),
            (&["bias"], &["num_experts"]),
            (&["tid2eid"], &["vocab_size", "topk"]),
            (&["token_ids"], &["num_tokens"]),
            (&["dtopk_weights"], &["num_tokens", "topk"]),
        ];
        let [num_tokens, num_experts, listed] =
            inputs.extents(["num_tokens", "num_experts", "topk"], &tensors)?;
        let hashed = inputs.get("tid2eid").is_some();
        require_that(
            "tid2eid",
            "a table",
            hashed != inputs.get("bias").is_some(),
            "a router has a bias or a table",
        )?;
        require_that(
            "topk",
            topk,
            topk == listed || listed == 0,
            "other tensors have other slots",
        )?;
        require_that("topk", topk, hashed || topk <= num_experts, "there are not so many experts")?;
        require_that(
            "route_scale",
            route_scale,
            route_scale > 0.0 && route_scale.is_finite(),
            "it is above 0",
        )?;
        let experts =
            if hashed { listed_experts(inputs, topk)? } else { best_experts(inputs, topk)? };
        let index: Vec<u32> = experts.iter().map(|expert| expert.unwrap_or(0) as u32).collect();
        let unused: Vec<u8> = experts.iter().map(|expert| u8::from(expert.is_none())).collect();
        let experts = Tensor::from_vec(index, (num_tokens, topk), &Device::Cpu)?;
        let unused = Tensor::from_vec(unused, (num_tokens, topk), &Device::Cpu)?;
        let logits = unless(&unused, &inputs.tensor("logits")?.gather(&experts, 1)?, 0.0)?;
        Ok(Self { experts, unused, logits, num_experts })
    }

    fn indices(&self) -> Result<Tensor> {
        unless(&self.unused, &self.experts.to_dtype(candle_core::DType::F64)?, -1.0)
    }

    fn weights(&self, rounding: &mut Rounding) -> Result<Weights> {
        let scores = unless(&self.unused, &scores(&self.logits, rounding)?, 0.0)?;
        let sum = rounding.sum_keepdim_f32(&scores, 1)?;
        let divisor = match rounding.conventions().have(Convention::SumPlusFloor) {
            true => rounding.f32(&(&sum + SUM_FLOOR)?)?,
            false => unless(&sum.lt(SUM_FLOOR)?, &sum, SUM_FLOOR)?,
        };
        let normalised = rounding.f32(&scores.broadcast_div(&divisor)?)?;
        Ok(Weights { scores, sum, divisor, normalised })
    }

    /// The sums of slot values over the slots of each expert, `[num_tokens, num_experts]`.
    fn scattered(&self, numbers: &Tensor) -> Result<Tensor> {
        let (num_tokens, topk) = self.experts.dims2()?;
        let experts: Vec<u32> = self.experts.flatten_all()?.to_vec1()?;
        let unused: Vec<u8> = self.unused.flatten_all()?.to_vec1()?;
        let mut sums = vec![0.0; num_tokens * self.num_experts];
        for (slot, number) in
            values(numbers)?.into_iter().enumerate().filter(|(slot, _)| unused[*slot] == 0)
        {
            sums[slot / topk * self.num_experts + experts[slot] as usize] += number;
        }
        Ok(Tensor::from_vec(sums, (num_tokens, self.num_experts), &Device::Cpu)?)
    }
}

/// The experts of a learned router's slots.
fn best_experts(inputs: &Named, topk: usize) -> Result<Vec<Option<usize>>> {
    let logits = inputs.tensor("logits")?;
    let num_experts = logits.dim(1)?.max(1);
    let biased =
        values(&scores(logits, &mut Rounding::exact())?.broadcast_add(inputs.tensor("bias")?)?)?;
    let token_ids = inputs.get("token_ids").map(values).transpose()?;
    let is_padding = |token: usize| token_ids.as_ref().is_some_and(|ids| ids[token] < 0.0);
    let of_token = |(token, biased): (usize, &[f64])| {
        let mut experts: Vec<usize> = (0..num_experts).collect();
        // Stable: of equal scores the lower id stays first.
        experts.sort_by(|&a, &b| ordered(biased[b]).total_cmp(&ordered(biased[a])));
        experts.truncate(topk);
        experts.sort_unstable();
        experts
            .into_iter()
            .map(move |expert| (!is_padding(token)).then_some(expert))
            .collect::<Vec<_>>()
    };
    Ok(biased.chunks(num_experts).enumerate().flat_map(of_token).collect())
}

/// The experts of a hashed router's slots.
fn listed_experts(inputs: &Named, topk: usize) -> Result<Vec<Option<usize>>> {
    let (table, num_experts) =
        (values(inputs.tensor("tid2eid")?)?, inputs.tensor("logits")?.dim(1)?);
    let expert =
        |listed: f64| (0.0..num_experts as f64).contains(&listed).then_some(listed as usize);
    let of_token = |id: f64| {
        let row = if id < 0.0 { None } else { table.chunks(topk.max(1)).nth(id as usize) };
        row.map_or(vec![None; topk], |row| row.iter().map(|&listed| expert(listed)).collect())
    };
    Ok(values(inputs.tensor("token_ids")?)?.into_iter().flat_map(of_token).collect())
}

/// `log1p(e) / e` for e from 0 to 1, to the last bits of f64: by its series where the sum `1 + e`
/// would lose e.
fn log1p_ratio(e: &Tensor) -> Result<Tensor> {
    const SERIES_BELOW: f64 = 1.0 / 1024.0;
    let small = e.lt(SERIES_BELOW)?;
    let (series_of, log_of) = (select(&small, e, 0.0)?, unless(&small, e, 1.0)?);
    let coefficients = [1.0 / 5.0, -1.0 / 4.0, 1.0 / 3.0, -1.0 / 2.0, 1.0];
    let series =
        coefficients.into_iter().try_fold(e.zeros_like()?, |sum, c| (sum * &series_of)? + c)?;
    // The part of e that the sum 1 + e lost is added to the logarithm.
    let sum = (&log_of + 1.0)?;
    let lost = ((&log_of - (&sum - 1.0)?)? / &sum)?;
    let logarithm = ((sum.log()? + lost)? / log_of)?;
    Ok(small.where_cond(&series, &logarithm)?)
}

/// Logits whose score uses a logarithm, and logits whose score is an exponential. Each is 0, or the
/// border, at the other's elements.
fn by_size(logits: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
    let small = logits.lt(SMALL_LOGIT)?;
    Ok((unless(&small, logits, 0.0)?, select(&small, logits, SMALL_LOGIT)?, small))
}

/// `exp(-|x|)`.
fn power_of_magnitude(x: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
    let magnitude = x.lt(0.0)?.where_cond(&x.neg()?, x)?;
    rounding.approximate_f32(&magnitude.neg()?.exp()?)
}

/// `sqrt(softplus(x))`.
fn scores(logits: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
    let (usual, far, small) = by_size(logits)?;
    let power = power_of_magnitude(&usual, rounding)?;
    let logarithm = rounding.approximate_f32(&(&power * log1p_ratio(&power)?)?)?;
    let softplus = rounding.f32(&(unless(&usual.lt(0.0)?, &usual, 0.0)? + logarithm)?)?;
    let root = rounding.f32(&softplus.sqrt()?)?;
    // sqrt(e log1p(e) / e) with e = exp(x); the second factor is 1 in fp32.
    let power = rounding.approximate_f32(&(&far * 0.5)?.exp()?)?;
    let of_far = (power * log1p_ratio(&far.exp()?)?.sqrt()?)?;
    Ok(small.where_cond(&of_far, &root)?)
}

/// `sigmoid(x) / (2 s)`, the derivative of the score s.
fn slopes(logits: &Tensor, scores: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
    let (usual, far, small) = by_size(logits)?;
    let power = power_of_magnitude(&usual, rounding)?;
    let numerator = usual.lt(0.0)?.where_cond(&power, &power.ones_like()?)?;
    let denominator = rounding.f32(&(power + 1.0)?)?;
    let denominator = rounding.f32(&(denominator * (scores * 2.0)?)?)?;
    let slope = rounding.f32(&(numerator / denominator)?)?;
    // s^2 = e log1p(e) / e and sigmoid(x) = e / (1 + e), with e = exp(x).
    let power = far.exp()?;
    let factor = ((&power + 1.0)? * log1p_ratio(&power)?)?.recip()?;
    let of_far = ((scores * 0.5)? * factor)?;
    Ok(small.where_cond(&of_far, &slope)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Precision;
    use crate::conventions::Conventions;
    use crate::testing::{
        Draw, Golden, UNIT_ROUNDOFF, assert_directional_derivative, assert_unbiased, assert_within,
        differentiated, dot, dot_of_magnitudes, f64_tensor,
    };

    const SCALE: f64 = 2.5;

    fn learned(seed: u64, [num_tokens, num_experts, topk]: [usize; 3], deviation: f64) -> Named {
        let mut draw = Draw::new(seed);
        let named = Named::new().with("logits", draw.bf16(&[num_tokens, num_experts], deviation));
        let named = named.with("bias", draw.bf16(&[num_experts], 1.0));
        named.with("dtopk_weights", draw.bf16(&[num_tokens, topk], 1.0))
    }

    fn hashed(seed: u64, [num_tokens, num_experts, topk]: [usize; 3]) -> Named {
        let mut draw = Draw::new(seed);
        let named = Named::new().with("logits", draw.bf16(&[num_tokens, num_experts], 3.0));
        // Every expert occurs in some row, and some occur twice.
        let table: Vec<f64> = (0..7 * topk).map(|_| draw.below(num_experts) as f64).collect();
        let ids: Vec<f64> = (0..num_tokens).map(|_| draw.below(7) as f64).collect();
        let named = named
            .with("tid2eid", f64_tensor(&table, &[7, topk]))
            .with("token_ids", f64_tensor(&ids, &[num_tokens]));
        named.with("dtopk_weights", draw.bf16(&[num_tokens, topk], 1.0))
    }

    fn routed(inputs: &Named, topk: usize) -> [Vec<f64>; 2] {
        let outputs = forward(inputs, topk, SCALE, &mut Rounding::exact()).expect("it fits");
        ["topk_indices", "topk_weights"]
            .map(|name| values(outputs.tensor(name).expect("an output")).expect("numbers"))
    }

    fn one_token(logits: &[f64], bias: &[f64]) -> Named {
        let shape = [1, logits.len()];
        Named::new()
            .with("logits", f64_tensor(logits, &shape))
            .with("bias", f64_tensor(bias, &shape[1..]))
    }

    /// The score by another formula.
    fn score(x: f64) -> f64 {
        if x > 30.0 { x.sqrt() } else { x.exp().ln_1p().sqrt() }
    }

    #[test]
    fn the_bias_chooses_and_the_unbiased_scores_of_the_chosen_sum_to_the_scale() {
        let [indices, weights] =
            routed(&one_token(&[3.0, -1.0, 0.5, 2.0], &[-9.0, 4.0, 0.0, -0.25]), 2);
        assert_eq!(indices, [1.0, 3.0]);
        let sum = score(-1.0) + score(2.0);
        for (weight, logit) in weights.iter().zip([-1.0, 2.0]) {
            assert!(
                (weight - SCALE * score(logit) / sum).abs() <= 8.0 * UNIT_ROUNDOFF * SCALE,
                "{weights:?}"
            );
        }
    }

    #[test]
    fn scores_keep_their_precision_from_the_smallest_to_the_largest_logit() {
        for x in [
            -170.0, -103.0, -40.0, -18.1, -18.0, -17.9, -7.0, -6.9, -1e-3, 0.0, 1e-3, 3.0, 20.0,
            88.0, 1e4,
        ] {
            let found =
                values(&scores(&f64_tensor(&[x], &[1, 1]), &mut Rounding::exact()).unwrap())
                    .unwrap()[0];
            let expected = score(x);
            assert!(
                (found - expected).abs() <= 16.0 * UNIT_ROUNDOFF * expected,
                "{x}: {found:e} {expected:e}"
            );
        }
    }

    #[test]
    fn ids_are_distinct_and_valid_and_ties_go_to_the_lower_one_whatever_the_logits_hold() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        let zeros = [0.0; 5];
        assert_eq!(routed(&one_token(&[nan; 5], &zeros), 3)[0], [0.0, 1.0, 2.0]);
        assert_eq!(routed(&one_token(&[-inf; 5], &zeros), 3), [vec![0.0, 1.0, 2.0], vec![0.0; 3]]);
        assert_eq!(routed(&one_token(&zeros, &[-inf; 5]), 3)[0], [0.0, 1.0, 2.0]);
        assert_eq!(routed(&one_token(&[1.0, nan, 1.0, 0.0, 1.0], &zeros), 3)[0], [0.0, 2.0, 4.0]);
        assert_eq!(routed(&one_token(&[1.0, nan, 1.0, 0.0, 1.0], &[-10.0; 5]), 2)[0], [0.0, 2.0]);
        // A selected NaN makes every weight NaN; a NaN that is not selected has no effect.
        let [indices, weights] = routed(&one_token(&[nan, 1.0, -inf], &[0.0, 0.0, -inf]), 2);
        assert!(
            indices == [0.0, 1.0] && weights.iter().all(|weight| weight.is_nan()),
            "{indices:?} {weights:?}"
        );
        let [indices, weights] = routed(&one_token(&[inf, 1.0, 0.0], &zeros[..3]), 2);
        assert!(indices == [0.0, 1.0] && weights[0].is_nan() && weights[1] == 0.0, "{weights:?}");
    }

    #[test]
    fn a_sum_below_the_floor_is_the_floor_and_has_no_gradient() -> Result<()> {
        let inputs = one_token(&[-100.0, -101.0, -300.0], &[0.0; 3]);
        let [indices, weights] = routed(&inputs, 2);
        assert_eq!(indices, [0.0, 1.0]);
        let expected = SCALE * (-50f64).exp() / SUM_FLOOR;
        assert!((weights[0] - expected).abs() <= 8.0 * UNIT_ROUNDOFF * expected, "{weights:?}");
        let inputs = inputs.with("dtopk_weights", f64_tensor(&[1.0, 0.0], &[1, 2]));
        let dlogits =
            values(backward(&inputs, 2, SCALE, &mut Rounding::exact())?.tensor("dlogits")?)?;
        assert!(
            (dlogits[0] - expected / 2.0).abs() <= 8.0 * UNIT_ROUNDOFF * expected
                && dlogits[1..] == [0.0; 2]
        );
        Ok(())
    }

    #[test]
    fn padding_tokens_and_ids_beyond_the_table_get_no_expert_whatever_their_logits_hold()
    -> Result<()> {
        let nan = f64::NAN;
        let table = Named::new()
            .with("tid2eid", f64_tensor(&[2.0, 0.0, 3.0, 3.0, -1.0, 1.0, 4.0, 9.0], &[4, 2]));
        let ids = f64_tensor(&[0.0, -1.0, 4.0, f64::from(i32::MAX), 1.0, 2.0, 3.0], &[7]);
        let mut logits = vec![0.0; 28];
        logits[4..16].fill(nan);
        logits[24..].fill(nan);
        let inputs = table.with("token_ids", ids).with("logits", f64_tensor(&logits, &[7, 4]));
        let [indices, weights] = routed(&inputs, 2);
        let none = [-1.0, -1.0];
        assert_eq!(indices, [[2.0, 0.0], none, none, none, [3.0, 3.0], [-1.0, 1.0], none].concat());
        let halves = [SCALE / 2.0; 2];
        assert_eq!(
            weights,
            [halves, [0.0; 2], [0.0; 2], [0.0; 2], halves, [0.0, SCALE], [0.0; 2]].concat()
        );
        let inputs = inputs.with("dtopk_weights", f64_tensor(&[1.0; 14], &[7, 2]));
        let dlogits =
            values(backward(&inputs, 2, SCALE, &mut Rounding::exact())?.tensor("dlogits")?)?;
        assert!(
            dlogits.iter().all(|gradient| *gradient == 0.0),
            "equal upstreams move no weight: {dlogits:?}"
        );
        let learned = one_token(&[nan; 3], &[0.0; 3]).with("token_ids", f64_tensor(&[-7.0], &[1]));
        assert_eq!(routed(&learned, 2), [vec![-1.0; 2], vec![0.0; 2]]);
        Ok(())
    }

    #[test]
    fn explicit_backward_equals_autograd_of_learned_and_hashed_routers() -> Result<()> {
        let cases = [
            (learned(1, [1, 1, 1], 3.0), 1),
            (learned(2, [5, 17, 6], 3.0), 6),
            (learned(3, [4, 9, 2], 30.0), 2),
            (hashed(4, [9, 5, 3]), 3),
            (learned(5, [3, 9, 2], 3.0).with("token_ids", f64_tensor(&[0.0, -1.0, 2.0], &[3])), 2),
        ];
        for (inputs, topk) in cases {
            let explicit = backward(&inputs, topk, SCALE, &mut Rounding::exact())?;
            let automatic = differentiated(&inputs, &[("logits", "dlogits")], |inputs| {
                let outputs = forward(inputs, topk, SCALE, &mut Rounding::exact())?;
                Ok((outputs.tensor("topk_weights")? * inputs.tensor("dtopk_weights")?)?)
            })?;
            let found = explicit.tensor("dlogits")?;
            // Scores and sums have one size. Each of fewer than 64 roundings is of upstreams times
            // a slope of 1 at most.
            let size = values(&inputs.tensor("dtopk_weights")?.abs()?.sum_keepdim(1)?)?;
            let bound: Vec<f64> =
                size.iter().map(|size| 64.0 * UNIT_ROUNDOFF * SCALE * size).collect();
            let bound = f64_tensor(&bound, &[bound.len(), 1]).broadcast_as(found.shape())?;
            assert_within("dlogits", found, automatic.tensor("dlogits")?, &bound);
        }
        Ok(())
    }

    #[test]
    fn backward_equals_directional_finite_differences() -> Result<()> {
        let plus = Conventions::of([Convention::SumPlusFloor]);
        // Sums about as large as the floor, which is then a part of the divisor.
        let tiny = learned(5, [6, 12, 4], 3.0);
        let tiny = tiny.clone().with("logits", (tiny.tensor("logits")? - 92.0)?);
        for (inputs, topk, conventions) in [
            (learned(5, [6, 12, 4], 3.0), 4, Conventions::default()),
            (hashed(6, [6, 12, 4]), 4, Conventions::default()),
            (learned(5, [6, 12, 4], 3.0), 4, plus),
            (tiny, 4, plus),
        ] {
            let exact = || Rounding::exact().with_conventions(conventions);
            let gradients = backward(&inputs, topk, SCALE, &mut exact())?;
            let direction = Draw::new(7).normal(&[6, 12], 1.0);
            let weights = |h: f64| -> Result<Tensor> {
                let moved = (inputs.tensor("logits")? + (&direction * h)?)?;
                let outputs =
                    forward(&inputs.clone().with("logits", moved), topk, SCALE, &mut exact())?;
                Ok(outputs.tensor("topk_weights")?.clone())
            };
            let upstream = inputs.tensor("dtopk_weights")?;
            let noise = 64.0 * UNIT_ROUNDOFF * dot_of_magnitudes(upstream, &weights(0.0)?);
            let claimed = dot(gradients.tensor("dlogits")?, &direction);
            assert_directional_derivative(
                "router",
                |h| Ok(dot(&weights(h)?, upstream)),
                1.0,
                noise,
                claimed,
            )?;
        }
        Ok(())
    }

    #[test]
    fn no_tokens_are_a_legal_input_in_both_precisions() -> Result<()> {
        for precision in [Precision::Exact, Precision::Working { seed: 1 }] {
            let rounding = &mut Rounding::new(precision);
            let inputs = learned(8, [0, 4, 2], 1.0);
            assert_eq!(
                forward(&inputs, 2, SCALE, rounding)?.tensor("topk_weights")?.dims(),
                [0, 2]
            );
            assert_eq!(backward(&inputs, 2, SCALE, rounding)?.tensor("dlogits")?.dims(), [0, 4]);
        }
        Ok(())
    }

    #[test]
    fn bad_inputs_are_refused_by_name() {
        let inputs = learned(9, [2, 4, 2], 1.0);
        let refused = |inputs: &Named, topk: usize, scale: f64| {
            let error = forward(inputs, topk, scale, &mut Rounding::exact())
                .expect_err("refused")
                .to_string();
            error.split('`').nth(1).unwrap_or_default().to_owned()
        };
        let table = f64_tensor(&[0.0; 4], &[2, 2]);
        assert_eq!(refused(&inputs.clone().with("tid2eid", table.clone()), 2, 1.0), "tid2eid");
        assert_eq!(refused(&inputs, 3, 1.0), "topk");
        let wide = Named::new()
            .with("logits", f64_tensor(&[0.0; 2], &[1, 2]))
            .with("bias", f64_tensor(&[0.0; 2], &[2]));
        assert_eq!(refused(&wide, 3, 1.0), "topk");
        assert_eq!(refused(&wide, 1, 0.0), "route_scale");
        assert_eq!(
            refused(&wide.clone().with("bias", f64_tensor(&[0.0; 3], &[3])), 1, 1.0),
            "bias"
        );
        let without_ids =
            Named::new().with("logits", f64_tensor(&[0.0; 2], &[1, 2])).with("tid2eid", table);
        assert_eq!(refused(&without_ids, 2, 1.0), "token_ids");
    }

    #[test]
    fn working_runs_scatter_around_the_exact_result() -> Result<()> {
        let inputs = learned(10, [16, 24, 6], 4.0);
        let run = |precision| -> Result<[Tensor; 2]> {
            let rounding = &mut Rounding::new(precision);
            let weights = forward(&inputs, 6, SCALE, rounding)?.tensor("topk_weights")?.clone();
            let dlogits = backward(&inputs, 6, SCALE, rounding)?.tensor("dlogits")?.clone();
            // Only the selected experts: the others have no gradient.
            let chosen = Slots::new(&inputs, 6, SCALE)?.experts;
            Ok([weights, dlogits.gather(&chosen, 1)?])
        };
        let runs =
            (0..64).map(|seed| run(Precision::Working { seed })).collect::<Result<Vec<_>>>()?;
        let exact = run(Precision::Exact)?;
        for (i, what) in ["topk_weights", "dlogits"].into_iter().enumerate() {
            let runs: Vec<Tensor> = runs.iter().map(|run| run[i].clone()).collect();
            assert_unbiased(what, &exact[i], &runs, 16);
        }
        Ok(())
    }

    #[test]
    fn golden_routers_agree() -> Result<()> {
        for name in ["topk__a", "topk__b", "topk__c", "hash__a", "hash__b", "hash__c"] {
            let golden = Golden::load(&format!("router_{name}"));
            let (logits, hidden) = (golden.f64("out.logits"), golden.f64("in.hidden"));
            let (indices, dense) = (golden.f64("out.indices"), golden.f64("gout.dense"));
            let topk = indices.dim(1)?;
            let inputs = Named::new().with("logits", logits.clone());
            let inputs = if golden.has("param.gate.tid2eid") {
                let ids = golden.f64("in.input_ids").flatten_all()?;
                inputs.with("tid2eid", golden.f64("param.gate.tid2eid")).with("token_ids", ids)
            } else {
                inputs.with("bias", golden.f64("param.gate.e_score_correction_bias"))
            };
            let outputs = forward(&inputs, topk, 1.5, &mut Rounding::exact())?;
            let found = outputs.tensor("topk_indices")?;
            let in_order = |tensor: &Tensor| -> Result<Vec<Vec<f64>>> {
                let mut rows: Vec<Vec<f64>> =
                    values(tensor)?.chunks(topk).map(<[f64]>::to_vec).collect();
                rows.iter_mut().for_each(|row| row.sort_by(f64::total_cmp));
                Ok(rows)
            };
            assert_eq!(in_order(found)?, in_order(&indices)?, "{name}");
            let experts = found.to_dtype(candle_core::DType::U32)?;
            let zeros = logits.zeros_like()?;
            let weights = zeros.scatter_add(&experts, outputs.tensor("topk_weights")?, 1)?;
            let allowed = (golden.f64("out.dense").abs()? * (1024.0 * UNIT_ROUNDOFF))?;
            assert_within(name, &weights, &golden.f64("out.dense"), &allowed);
            let inputs = inputs.with("dtopk_weights", dense.gather(&experts, 1)?);
            let gradients = backward(&inputs, topk, 1.5, &mut Rounding::exact())?;
            let dlogits = gradients.tensor("dlogits")?;
            let hidden = hidden.reshape(((), hidden.dims()[2]))?;
            for (key, found) in [
                ("grad.in.hidden", dlogits.matmul(&golden.f64("param.gate.weight"))?),
                ("grad.param.gate.weight", dlogits.t()?.matmul(&hidden)?),
            ] {
                let expected = golden.f64(key);
                let rms = (dot(&expected, &expected) / expected.elem_count() as f64).sqrt();
                let allowed = ((golden.storage_error(key) * 2.0)? + rms * 4096.0 * UNIT_ROUNDOFF)?;
                assert_within(
                    &format!("{name} {key}"),
                    &found.reshape(expected.shape())?,
                    &expected,
                    &allowed,
                );
            }
        }
        Ok(())
    }
}
