//! The indexer's distillation loss and its score gradient (training 6; stage 1 of training 7).
//!
//! The valid slots v of row t are those of its ranking ([`crate::indexer::ranking`]), none if the
//! row is padding. With its logits x and its target T, both read only in valid slots,
//!
//! ```text
//! lse  = ln sum_v exp x                  given, or computed; +inf where the sum is 0
//! ell  = x - lse                         log-probability of the prediction
//! Pred = exp ell
//!
//! (E) exact         kl = sum_v T (ln max(T, 1e-10) - ell)              g = -T
//! (C) clipped log   kl = sum_v T' (ln T' - min(max(ell, -100), 0))     g = 0 where ell < -100, else -T'
//!                   T' = max(T, e^-100)
//!
//! dkl/dx  = g - Pred sum_v g             0 in all other slots
//! loss    = s sum_t kl                   s = loss_coeff / R
//! dlogits = grad_loss s dkl/dx
//! ```
//!
//! T is given (sparse), or is `min(scores / l1, 1)`, 0 where `l1` is 0 (dense). R is the number of
//! rows, or the number of rows that are not padding, at least 1, or 1 (a sum over tokens). Clipping
//! is decided on logarithms, because e^-100 is subnormal in fp32, where exponentials are flushed to
//! 0. Equality passes the gradient on, and so does NaN.
//!
//! Rows without a valid slot, and padding rows, have kl = 0 and no gradient, whatever they hold.
//! Values in a valid slot that are not finite follow the formulas.
//!
//! # Rounding points
//!
//! Differences, products and quotients are fp32, sums accumulate in fp32. Exponentials and
//! logarithms are taken in base 2 and approximated. The error of the logarithm near 1 is no smaller
//! than that near 2. `lse` is an fp32 value before it is subtracted, because the forward stores it
//! for the backward.

use candle_core::{DType, Device, Tensor};

use crate::error::{Result, require, require_that, wrong_shape};
use crate::indexer::ranking::{RankedKeys, Ranking, Sequences};
use crate::precision::Rounding;
use crate::select::{select, spread, unless};

/// The smallest logarithm of a probability in the clipped form.
const CLIP_LOG_MIN: f64 = -100.0;
/// The lower bound of the exact form's target before its logarithm is taken.
const EXACT_FLOOR: f64 = 1e-10;

/// The target of the prediction.
#[derive(Debug, Clone)]
pub enum Teacher {
    /// `[num_tokens, topk]`, stored in f32: the target itself.
    Target(Tensor),
    /// The dense target before its rows are divided by their sums.
    Scores {
        /// `[num_tokens, columns]`, stored in f32: A.
        scores: Tensor,
        /// `[num_tokens]`, stored in f32: sums of the rows of A.
        l1: Tensor,
    },
}

/// The definition of the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Form (E).
    Exact,
    /// Form (C).
    ClippedLog,
}

/// The divisor of the sum over the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// All rows, including empty and padding rows.
    MeanOfRows,
    /// The rows that are not padding, at least 1.
    MeanOfRealRows,
    /// No division.
    Sum,
}

/// Inputs of the operator, widened to f64.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// `[num_tokens, slots]`, stored in f32: all logits of a row, or those of its slots.
    pub logits: Tensor,
    /// The target, of the same shape.
    pub teacher: Teacher,
    /// Which slots are valid.
    pub ranking: Ranking,
    /// Keys of all sequences.
    pub num_keys: usize,
    /// `None` is one sequence of all tokens and keys.
    pub sequences: Option<Sequences>,
    /// `[num_tokens]`: 0 for a padding row; `None` where no row is padding.
    pub row_mask: Option<Vec<u8>>,
    /// `[num_tokens]`, stored in f32, natural; `None` where it is computed from the valid logits.
    pub lse: Option<Tensor>,
    /// The definition of the loss.
    pub form: Form,
    /// The divisor of the sum over the rows.
    pub reduction: Reduction,
    /// Multiplies the loss; finite, may be 0.
    pub loss_coeff: f64,
}

/// Outputs of the forward.
#[derive(Debug, Clone)]
pub struct Outputs {
    /// `[1]`, stored in f32.
    pub loss: Tensor,
    /// `[num_tokens]`, stored in f32: each row's divergence, neither scaled nor divided.
    pub kl: Tensor,
    /// `[num_tokens]`, stored in f32: the given or computed one.
    pub lse: Tensor,
    /// Number of rows that are not padding.
    pub real_rows: usize,
}

/// The loss.
///
/// # Errors
/// Tensors or lists whose shapes do not match.
pub fn forward(inputs: &Inputs, rounding: &mut Rounding) -> Result<Outputs> {
    let rows = Rows::of(inputs, rounding)?;
    let real_rows = inputs.real_rows(rows.num_tokens);
    let Some(terms) = &rows.terms else {
        let zeros = Tensor::zeros(rows.num_tokens, DType::F64, &Device::Cpu)?;
        let lse = unless(&zeros.eq(0.0)?, &zeros, f64::INFINITY)?;
        let loss = Tensor::zeros(1, DType::F64, &Device::Cpu)?;
        return Ok(Outputs { loss, kl: zeros, lse: inputs.lse.clone().unwrap_or(lse), real_rows });
    };
    let logarithm = logarithm(&terms.floored(inputs.form, rounding)?, rounding)?;
    let difference = rounding.f32(&(logarithm - terms.clipped(inputs.form)?)?)?;
    let weights = terms.weights(inputs.form, rounding)?;
    let term = rounding.f32(&(weights * difference)?)?;
    let kl = rounding.sum_f32(&select(&terms.valid, &term, 0.0)?, 1)?;
    let stored = rounding.f32(&kl)?;
    let sum = rounding.sum_keepdim_f32(&stored, 0)?;
    let loss = (rounding.f32(&sum)? * inputs.scale(real_rows, rounding))?;
    let loss = rounding.f32(&loss)?;
    Ok(Outputs { loss, kl, lse: terms.lse.squeeze(1)?, real_rows })
}

/// The gradient with respect to the logits, of their shape, stored in f32. `grad_loss` is `[1]`,
/// stored in f32.
///
/// # Errors
/// Tensors or lists whose shapes do not match.
pub fn backward(inputs: &Inputs, grad_loss: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
    require("grad_loss", grad_loss, &[1])?;
    let rows = Rows::of(inputs, rounding)?;
    let Some(terms) = &rows.terms else { return Ok(inputs.logits.zeros_like()?) };
    let g = terms.weights(inputs.form, rounding)?.neg()?;
    let g = match inputs.form {
        Form::Exact => g,
        Form::ClippedLog => unless(&terms.ell.lt(CLIP_LOG_MIN)?, &g, 0.0)?,
    };
    let g = select(&terms.valid, &g, 0.0)?;
    let sum = rounding.sum_keepdim_f32(&g, 1)?;
    let sum = rounding.f32(&sum)?;
    let predicted = rounding.exp_f32(&terms.ell)?;
    let mean = rounding.f32(&predicted.broadcast_mul(&sum)?)?;
    let gradient = rounding.f32(&(g - mean)?)?;
    let scale = (grad_loss * inputs.scale(inputs.real_rows(rows.num_tokens), rounding))?;
    let scaled = gradient.broadcast_mul(&rounding.f32(&scale)?.reshape((1, 1))?)?;
    select(&terms.valid, &rounding.f32(&scaled)?, 0.0)
}

impl Inputs {
    fn real_rows(&self, num_tokens: usize) -> usize {
        self.row_mask
            .as_ref()
            .map_or(num_tokens, |mask| mask.iter().filter(|&&real| real != 0).count())
    }

    /// `loss_coeff / R`, an fp32 value.
    fn scale(&self, real_rows: usize, rounding: &mut Rounding) -> f64 {
        let rows = match self.reduction {
            Reduction::MeanOfRows => self.logits.dims()[0],
            Reduction::MeanOfRealRows => real_rows,
            Reduction::Sum => 1,
        };
        rounding.constant_f32(self.loss_coeff / rows.max(1) as f64)
    }

    /// `[num_tokens, slots]`.
    fn check(&self) -> Result<[usize; 2]> {
        let &[num_tokens, slots] = self.logits.dims() else {
            return Err(wrong_shape("logits", "[num_tokens, slots]", &self.logits));
        };
        require("logits", &self.logits, &[num_tokens, slots])?;
        match &self.teacher {
            Teacher::Target(target) => require("target", target, &[num_tokens, slots])?,
            Teacher::Scores { scores, l1 } => {
                require("scores", scores, &[num_tokens, slots])?;
                require("l1", l1, &[num_tokens])?;
            }
        }
        if let Some(lse) = &self.lse {
            require("idx_lse", lse, &[num_tokens])?;
        }
        let marked = self.row_mask.as_ref().map_or(num_tokens, Vec::len);
        require_that(
            "row_mask",
            marked,
            marked == num_tokens,
            "it must have an entry for each row",
        )?;
        let ranked = self.ranking.slots();
        require_that(
            "ranking",
            ranked,
            ranked == slots,
            "it must have as many slots as the logits",
        )?;
        require_that(
            "loss_coeff",
            self.loss_coeff,
            self.loss_coeff.is_finite(),
            "it must be finite",
        )?;
        self.ranked().check(num_tokens)?;
        Ok([num_tokens, slots])
    }

    fn ranked(&self) -> RankedKeys<'_> {
        RankedKeys {
            ranking: &self.ranking,
            sequences: self.sequences.as_ref(),
            num_keys: self.num_keys,
        }
    }

    /// 1 in the valid slots of rows that are not padding.
    fn valid(&self, num_tokens: usize, slots: usize) -> Result<Tensor> {
        let mut valid = Vec::with_capacity(num_tokens * slots);
        for token in 0..num_tokens {
            let real = self.row_mask.as_ref().is_none_or(|mask| mask[token] != 0);
            valid.extend(
                self.ranked().rows(token).into_iter().map(|row| u8::from(real && row.is_some())),
            );
        }
        Ok(Tensor::from_vec(valid, (num_tokens, slots), &Device::Cpu)?)
    }
}

/// Values that both directions compute.
struct Rows {
    num_tokens: usize,
    /// `None` without tokens or without slots.
    terms: Option<Terms>,
}

struct Terms {
    /// 1 in valid slots. It has the shape `[num_tokens, slots]`, like all fields after it.
    valid: Tensor,
    target: Tensor,
    ell: Tensor,
    /// For the rows, `[num_tokens, 1]`.
    lse: Tensor,
}

impl Rows {
    fn of(inputs: &Inputs, rounding: &mut Rounding) -> Result<Self> {
        let [num_tokens, slots] = inputs.check()?;
        if num_tokens == 0 || slots == 0 {
            return Ok(Self { num_tokens, terms: None });
        }
        let valid = inputs.valid(num_tokens, slots)?;
        let x = select(&valid, &inputs.logits, 0.0)?;
        let target = match &inputs.teacher {
            Teacher::Target(target) => select(&valid, target, 0.0)?,
            Teacher::Scores { scores, l1 } => {
                let l1 = l1.unsqueeze(1)?;
                let empty = spread(&l1.eq(0.0)?, valid.shape())?;
                let l1 = unless(&l1.eq(0.0)?, &l1, 1.0)?;
                let share = select(&valid, scores, 0.0)?.broadcast_div(&l1)?;
                let share = rounding.f32(&share)?;
                unless(&empty, &unless(&share.gt(1.0)?, &share, 1.0)?, 0.0)?
            }
        };
        let lse = match &inputs.lse {
            Some(given) => given.unsqueeze(1)?,
            None => log_sum_exp(&x, &valid, rounding)?,
        };
        // The lse of a row without a valid slot may be anything.
        let subtracted = rounding.f32(&select(&valid.max_keepdim(1)?, &lse, 0.0)?)?;
        let ell = rounding.f32(&x.broadcast_sub(&subtracted)?)?;
        Ok(Self { num_tokens, terms: Some(Terms { valid, target, ell, lse }) })
    }
}

impl Terms {
    /// The argument of the logarithm.
    fn floored(&self, form: Form, rounding: &mut Rounding) -> Result<Tensor> {
        match form {
            Form::Exact => raised(&self.target, rounding.constant_f32(EXACT_FLOOR)),
            Form::ClippedLog => self.weights(form, rounding),
        }
    }

    /// T, or T'.
    fn weights(&self, form: Form, rounding: &mut Rounding) -> Result<Tensor> {
        match form {
            Form::Exact => Ok(self.target.clone()),
            Form::ClippedLog => raised(&self.target, rounding.constant_f32(CLIP_LOG_MIN.exp())),
        }
    }

    /// ell as it is subtracted. A value that exceeds 0 by a rounding error is set to 0, and passes
    /// a derivative on.
    fn clipped(&self, form: Form) -> Result<Tensor> {
        if form == Form::Exact {
            return Ok(self.ell.clone());
        }
        let above = unless(&self.ell.gt(0.0)?.eq(0u8)?, &self.ell, 0.0)?.detach();
        unless(&self.ell.lt(CLIP_LOG_MIN)?, &(&self.ell - above)?, CLIP_LOG_MIN)
    }
}

/// `max(x, floor)`; NaN stays.
fn raised(x: &Tensor, floor: f64) -> Result<Tensor> {
    unless(&x.lt(floor)?, x, floor)
}

/// `[num_tokens, 1]`: the natural log-sum-exp of each row's valid values; `+inf` where the sum is
/// 0.
fn log_sum_exp(x: &Tensor, valid: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
    let largest = select(valid, x, f64::NEG_INFINITY)?.detach().max_keepdim(1)?;
    let largest = unless(&largest.eq(f64::NEG_INFINITY)?, &largest, 0.0)?;
    let difference = rounding.f32(&x.broadcast_sub(&largest)?)?;
    let power = rounding.exp_f32(&select(valid, &difference, 0.0)?)?;
    let sum = rounding.sum_keepdim_f32(&select(valid, &power, 0.0)?, 1)?;
    let empty = sum.eq(0.0)?;
    let logarithm = logarithm(&unless(&empty, &sum, 1.0)?, rounding)?;
    unless(&empty, &rounding.f32(&(largest + logarithm)?)?, f64::INFINITY)
}

/// The natural logarithm, which kernels compute in base 2. The error of the approximation is a
/// share of the result. Near 1, where the result vanishes, it is as large as where the result is 1.
/// So 1 is added to the magnitude of the result while it is approximated.
fn logarithm(x: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
    if rounding.is_exact() {
        return Ok(x.log()?);
    }
    let binary = (x.log()? * std::f64::consts::LOG2_E)?;
    let side = unless(&binary.lt(0.0)?, &binary.ones_like()?, -1.0)?;
    let approximated = (rounding.approximate_f32(&(binary + &side)?)? - side)?;
    Ok((approximated * rounding.constant_f32(std::f64::consts::LN_2))?)
}

#[cfg(test)]
mod tests {
    use candle_core::Var;

    use super::*;
    use crate::Precision;
    use crate::precision::values;
    use crate::testing::{
        Draw, UNIT_ROUNDOFF, assert_directional_derivative, assert_unbiased, assert_within, dot,
        dot_of_magnitudes, f64_tensor,
    };

    const TOKENS: usize = 7;
    const SLOTS: usize = 11;
    const KEYS: usize = 9;

    fn both() -> [Form; 2] {
        [Form::Exact, Form::ClippedLog]
    }

    /// Lists with bad slots; token 0 has no valid slot. Targets are as large on low logits as on
    /// high ones.
    fn sparse(seed: u64, spread: f64, form: Form) -> Inputs {
        let mut draw = Draw::new(seed);
        let hostile = [-1, KEYS as i32, i32::MIN, i32::MAX];
        let mut indices: Vec<i32> =
            (0..TOKENS * SLOTS).map(|_| draw.below(KEYS + 4) as i32).collect();
        indices
            .iter_mut()
            .filter(|i| **i >= KEYS as i32)
            .for_each(|i| *i = hostile[*i as usize - KEYS]);
        indices[..SLOTS].fill(-1);
        let logits = draw.normal(&[TOKENS, SLOTS], spread / 4.0);
        let target = draw.normal(&[TOKENS, SLOTS], 1.0).exp().unwrap();
        let target = target.broadcast_div(&target.sum_keepdim(1).unwrap()).unwrap();
        Inputs {
            logits,
            teacher: Teacher::Target(target),
            ranking: Ranking::Selected { indices, topk: SLOTS, topk_length: None, global: true },
            num_keys: KEYS,
            sequences: None,
            row_mask: None,
            lse: None,
            form,
            reduction: Reduction::Sum,
            loss_coeff: 0.7,
        }
    }

    fn dense(seed: u64, spread: f64, form: Form) -> Inputs {
        let Teacher::Target(target) = sparse(seed, spread, form).teacher else {
            unreachable!("it is sparse")
        };
        let scores = (target * 5.0).unwrap();
        let inputs = sparse(seed, spread, form);
        let ranking = Ranking::Causal { ratio: 2, q_off: Some(vec![3]), columns: SLOTS };
        let valid = Inputs { ranking: ranking.clone(), num_keys: SLOTS, ..inputs.clone() }
            .valid(TOKENS, SLOTS)
            .unwrap();
        let l1 = select(&valid, &scores, 0.0).unwrap().sum(1).unwrap();
        Inputs { teacher: Teacher::Scores { scores, l1 }, ranking, num_keys: SLOTS, ..inputs }
    }

    fn all(seed: u64, spread: f64) -> Vec<Inputs> {
        both()
            .into_iter()
            .flat_map(|form| [sparse(seed, spread, form), dense(seed, spread, form)])
            .collect()
    }

    fn exact(inputs: &Inputs) -> Outputs {
        forward(inputs, &mut Rounding::exact()).unwrap()
    }

    fn gradient(inputs: &Inputs) -> Tensor {
        backward(inputs, &f64_tensor(&[1.3], &[1]), &mut Rounding::exact()).unwrap()
    }

    /// Valid slots, logits and targets of each row, in loops.
    fn rows(inputs: &Inputs) -> Vec<Vec<(usize, f64, f64)>> {
        let x = values(&inputs.logits).unwrap();
        let (target, l1) = match &inputs.teacher {
            Teacher::Target(target) => (values(target).unwrap(), None),
            Teacher::Scores { scores, l1 } => (values(scores).unwrap(), Some(values(l1).unwrap())),
        };
        let row = |t: usize| {
            let valid =
                inputs.ranked().rows(t).into_iter().enumerate().filter(|(_, row)| row.is_some());
            let share = |at: usize| {
                l1.as_ref()
                    .map_or(target[at], |l1| if l1[t] == 0.0 { 0.0 } else { target[at] / l1[t] })
            };
            valid.map(|(slot, _)| (slot, x[t * SLOTS + slot], share(t * SLOTS + slot))).collect()
        };
        (0..TOKENS).map(row).collect()
    }

    #[test]
    fn each_row_is_the_divergence_of_its_definition() {
        for spread in [1.0, 60.0, 400.0] {
            for inputs in all(1, spread) {
                let expected: Vec<f64> = rows(&inputs)
                    .into_iter()
                    .map(|row| {
                        let sum: f64 = row.iter().map(|(_, x, _)| x.exp()).sum();
                        let term = |&(_, x, t): &(usize, f64, f64)| match inputs.form {
                            Form::Exact => t * (t.max(1e-10).ln() - (x - sum.ln())),
                            Form::ClippedLog => {
                                let t = t.max((-100f64).exp());
                                t * (t.ln() - (x - sum.ln()).clamp(-100.0, 0.0))
                            }
                        };
                        row.iter().map(term).sum()
                    })
                    .collect();
                let expected = f64_tensor(&expected, &[TOKENS]);
                let outputs = exact(&inputs);
                // Terms are as large as the spread, with a few dozen roundings.
                let bound =
                    ((expected.abs().unwrap() + spread).unwrap() * (64.0 * UNIT_ROUNDOFF)).unwrap();
                assert_within("kl", &outputs.kl, &expected, &bound);
                let loss = 0.7 * values(&expected).unwrap().iter().sum::<f64>();
                let bound = (bound.sum_all().unwrap() * 2.0).unwrap().reshape(1).unwrap();
                assert_within("loss", &outputs.loss, &f64_tensor(&[loss], &[1]), &bound);
            }
        }
    }

    #[test]
    fn the_written_out_gradient_is_that_of_automatic_differentiation() {
        for spread in [1.0, 60.0, 400.0] {
            for inputs in all(2, spread) {
                let variable = Var::from_tensor(&inputs.logits).unwrap();
                let at = Inputs { logits: variable.as_tensor().clone(), ..inputs.clone() };
                let loss = (exact(&at).loss * 1.3).unwrap().sum_all().unwrap();
                let expected = loss.backward().unwrap().get(&variable).unwrap().clone();
                let bound = ((expected.abs().unwrap() + 1.0).unwrap()
                    * ((64.0 + spread) * UNIT_ROUNDOFF))
                    .unwrap();
                assert_within("dlogits", &gradient(&inputs), &expected, &bound);
            }
        }
    }

    #[test]
    fn the_gradient_is_that_of_central_differences_also_where_entries_are_clipped() -> Result<()> {
        for spread in [1.0, 60.0, 400.0] {
            for (number, inputs) in all(3, spread).into_iter().enumerate() {
                let direction = Draw::new(4).normal(&[TOKENS, SLOTS], 1.0);
                let at = |h: f64| {
                    let logits = (&inputs.logits + (&direction * h)?)?;
                    Ok(1.3 * values(&exact(&Inputs { logits, ..inputs.clone() }).loss)?[0])
                };
                let claimed = gradient(&inputs);
                let noise = 64.0 * UNIT_ROUNDOFF * (at(0.0)?.abs() + spread * TOKENS as f64);
                assert!(dot_of_magnitudes(&claimed, &direction) > 0.0);
                let what = format!("spread {spread}, {number}");
                assert_directional_derivative(&what, at, 0.1, noise, dot(&claimed, &direction))?;
            }
        }
        Ok(())
    }

    #[test]
    fn entries_are_clipped_below_minus_100_and_not_at_it_and_those_of_the_exact_form_never() {
        let just_below = -100.0 - 2f64.powi(-40);
        let logits = f64_tensor(&[0.0, -100.0, just_below], &[1, 3]);
        let lse = Some(f64_tensor(&[0.0], &[1]));
        let of = |form| Inputs {
            logits: logits.clone(),
            teacher: Teacher::Target(f64_tensor(&[0.0, 0.5, 0.5], &[1, 3])),
            ranking: Ranking::Causal { ratio: 1, q_off: Some(vec![9]), columns: 3 },
            num_keys: 3,
            lse: lse.clone(),
            loss_coeff: 1.0,
            ..sparse(1, 1.0, form)
        };
        let of = |form| {
            values(&backward(&of(form), &f64_tensor(&[1.0], &[1]), &mut Rounding::exact()).unwrap())
                .unwrap()
        };
        let [exact, clipped] = both().map(of);
        assert_eq!((exact[1], exact[2], exact[0]), (-0.5, -0.5, 1.0));
        assert_eq!((clipped[1], clipped[0]), (-0.5, 0.5));
        // What remains is the share of the prediction.
        assert_eq!(clipped[2], 0.5 * just_below.exp());
    }

    #[test]
    fn what_is_not_valid_is_not_read_and_has_no_gradient() {
        for inputs in all(5, 10.0) {
            let masked = Inputs { row_mask: Some(vec![1, 1, 0, 255, 0, 1, 1]), ..inputs };
            let valid = masked.valid(TOKENS, SLOTS).unwrap();
            let spoil = |x: &Tensor| select(&valid, x, f64::NAN).unwrap();
            let teacher = match &masked.teacher {
                Teacher::Target(target) => Teacher::Target(spoil(target)),
                Teacher::Scores { scores, l1 } => {
                    Teacher::Scores { scores: spoil(scores), l1: l1.clone() }
                }
            };
            let corrupted = Inputs { logits: spoil(&masked.logits), teacher, ..masked.clone() };
            let (before, after) = (exact(&masked), exact(&corrupted));
            let bits =
                |x: &Tensor| values(x).unwrap().into_iter().map(f64::to_bits).collect::<Vec<_>>();
            assert_eq!(
                (bits(&before.kl), bits(&before.loss)),
                (bits(&after.kl), bits(&after.loss))
            );
            assert_eq!(bits(&gradient(&masked)), bits(&gradient(&corrupted)));
            let kl = values(&after.kl).unwrap();
            assert_eq!((kl[2], kl[4], values(&after.lse).unwrap()[2]), (0.0, 0.0, f64::INFINITY));
            assert!(kl.iter().filter(|&&kl| kl != 0.0).count() >= 4, "{kl:?}");
            assert_eq!(values(&gradient(&corrupted)).unwrap()[2 * SLOTS..3 * SLOTS], [0.0; SLOTS]);
        }
    }

    #[test]
    fn a_mean_divides_by_all_rows_or_by_those_that_are_no_padding_and_a_sum_by_none() {
        let of = |reduction, row_mask: Option<Vec<u8>>| {
            let inputs =
                Inputs { reduction, row_mask, loss_coeff: 1.0, ..sparse(6, 4.0, Form::Exact) };
            let outputs = exact(&inputs);
            let sum: f64 = values(&outputs.kl).unwrap().iter().sum();
            let gradient = values(&gradient(&inputs)).unwrap().iter().map(|g| g.abs()).sum::<f64>();
            let whole = Inputs { reduction: Reduction::Sum, ..inputs.clone() };
            let scale = gradient
                / values(
                    &super::backward(&whole, &f64_tensor(&[1.3], &[1]), &mut Rounding::exact())
                        .unwrap(),
                )
                .unwrap()
                .iter()
                .map(|g| g.abs())
                .sum::<f64>();
            (
                (sum / values(&outputs.loss).unwrap()[0] * 1e6).round() / 1e6,
                (1e6 / scale).round() / 1e6,
            )
        };
        let mask = || Some(vec![1, 0, 1, 1, 0, 1, 1]);
        assert_eq!(of(Reduction::MeanOfRows, mask()), (7.0, 7.0));
        assert_eq!(of(Reduction::MeanOfRealRows, mask()), (5.0, 5.0));
        assert_eq!(of(Reduction::MeanOfRealRows, None), (7.0, 7.0));
        assert_eq!(of(Reduction::Sum, mask()), (1.0, 1.0));
        let none = Inputs {
            row_mask: Some(vec![0; TOKENS]),
            reduction: Reduction::MeanOfRealRows,
            ..sparse(6, 4.0, Form::Exact)
        };
        assert_eq!(values(&exact(&none).loss).unwrap(), [0.0]);
    }

    #[test]
    fn a_coefficient_of_0_gives_a_loss_and_gradients_of_0() {
        for inputs in all(7, 4.0) {
            let inputs = Inputs { loss_coeff: 0.0, ..inputs };
            assert_eq!(values(&exact(&inputs).loss).unwrap(), [0.0]);
            assert_eq!(values(&gradient(&inputs)).unwrap(), [0.0; TOKENS * SLOTS]);
        }
    }

    #[test]
    fn working_runs_err_around_the_exact_divergence_and_gradient() {
        for inputs in all(8, 6.0) {
            let grad_loss = f64_tensor(&[1.3], &[1]);
            let of = |precision| {
                let mut rounding = Rounding::new(precision);
                (
                    forward(&inputs, &mut rounding).unwrap().kl,
                    backward(&inputs, &grad_loss, &mut rounding).unwrap(),
                )
            };
            let exact = of(Precision::Exact);
            let (kl, gradients): (Vec<_>, Vec<_>) =
                (0..64).map(|seed| of(Precision::Working { seed })).unzip();
            assert_unbiased("kl", &exact.0, &kl, TOKENS);
            let valid = inputs.valid(TOKENS, SLOTS).unwrap().to_dtype(DType::F64).unwrap();
            let counted = values(&valid).unwrap().iter().sum::<f64>();
            assert!(counted > 20.0);
            // Slots without a gradient never err.
            let of_valid = |tensor: &Tensor| {
                let numbers = values(tensor).unwrap().into_iter().zip(values(&valid).unwrap());
                let kept: Vec<f64> =
                    numbers.filter(|(_, valid)| *valid != 0.0).map(|(x, _)| x).collect();
                f64_tensor(&kept, &[kept.len()])
            };
            let gradients: Vec<Tensor> = gradients.iter().map(of_valid).collect();
            assert_unbiased("dlogits", &of_valid(&exact.1), &gradients, TOKENS);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let inputs = sparse(9, 1.0, Form::Exact);
        let refuse = |inputs: Inputs, name: &str| {
            let error = forward(&inputs, &mut Rounding::exact()).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        };
        refuse(
            Inputs { teacher: Teacher::Target(f64_tensor(&[0.0; 4], &[2, 2])), ..inputs.clone() },
            "target",
        );
        refuse(Inputs { row_mask: Some(vec![1; 3]), ..inputs.clone() }, "row_mask");
        refuse(Inputs { lse: Some(f64_tensor(&[0.0; 4], &[4])), ..inputs.clone() }, "idx_lse");
        refuse(Inputs { loss_coeff: f64::NAN, ..inputs.clone() }, "loss_coeff");
        refuse(
            Inputs { ranking: Ranking::Causal { ratio: 1, q_off: None, columns: 4 }, ..inputs },
            "ranking",
        );
    }
}
