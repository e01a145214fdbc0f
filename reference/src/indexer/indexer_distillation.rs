//! A step of the indexer's training, from its operands to their gradients (training 1, 2, 5, 6, 7).
//!
//! ```text
//! logits = sm_scale sum_h w max(q . k, 0)          of every key up to the causal limit      (indexer_logits.rs)
//! list   = the topk largest logits of each token                                            (topk.rs)
//! target = the attention scores of the listed keys, normalized              (score_recompute.rs)
//! loss   = s sum_t KL(target || softmax of the listed logits)                               (indexer_loss.rs)
//! ```
//!
//! and the gradients of q, k and w. Lists and target are constants, so only the gradient of the
//! loss with respect to the listed logits flows back (indexer_backward.rs).
//!
//! # Rounding points
//!
//! Those of the operators, and one between them: what one operator passes to the next is an fp32
//! value. Lists follow from logits without any rounding, in every run. The operands of a case are
//! therefore such that fp32 holds each of their sums exactly; otherwise runs would differ by whole
//! keys.

use candle_core::{Device, Tensor, Var};

use crate::error::Result;
use crate::indexer::indexer_backward::{self, Gradients};
use crate::indexer::indexer_logits::{self, Keys};
use crate::indexer::indexer_loss::{self, Form, Reduction, Teacher};
use crate::indexer::ranking::{RankedKeys, Ranking, Sequences};
use crate::indexer::score_recompute::{self, Normaliser};
use crate::indexer::topk::{self, Index};
use crate::named::Named;
use crate::precision::{Accumulator, Rounding, values};
use crate::select::select;

/// Inputs of a step, widened to f64.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// The indexer's queries, `[num_tokens, index_heads, 128]`, stored in bf16.
    pub index_q: Tensor,
    /// The indexer's keys, `[num_keys, 128]`, stored in bf16.
    pub index_k: Tensor,
    /// The weights of the indexer's heads, `[num_tokens, index_heads]`, stored in f32.
    pub index_w: Tensor,
    /// Tokens that one key covers, at least 1.
    pub ratio: usize,
    /// `[num_sequences]`: position of each sequence's first query; `None` where it is 0.
    pub q_off: Option<Vec<i32>>,
    /// `None` is one sequence of all tokens and keys.
    pub sequences: Option<Sequences>,
    /// Columns of the logits.
    pub columns: usize,
    /// Length of a list.
    pub topk: usize,
    /// Multiplies the logits; above 0.
    pub sm_scale: f64,
    /// The attention's queries, `[num_tokens, num_heads, head_dim]`, stored in bf16.
    pub q: Tensor,
    /// The attention's keys, `[num_keys, head_dim]`, stored in bf16.
    pub k: Tensor,
    /// Multiplies the attention's products.
    pub softmax_scale: f64,
    /// The divisor of the attention's exponentials.
    pub normaliser: Normaliser,
    /// The definition of the loss.
    pub form: Form,
    /// The divisor of the sum over the rows.
    pub reduction: Reduction,
    /// Multiplies the loss.
    pub loss_coeff: f64,
}

/// Outputs of the forward.
#[derive(Debug, Clone)]
pub struct Outputs {
    /// `[num_tokens, columns]`, stored in f32; -infinity beyond the limit.
    pub logits: Tensor,
    /// `[num_tokens, topk]`, stored in i32: keys of the token's sequence, in ascending order, then
    /// -1.
    pub indices: Tensor,
    /// `[num_tokens, topk]`, stored in f32: their logits, then -infinity.
    pub values: Tensor,
    /// `[num_tokens, topk]`, stored in f32.
    pub target: Tensor,
    /// The loss, each row's divergence, and the log-sum-exp of its listed logits.
    pub loss: indexer_loss::Outputs,
}

/// The forward.
///
/// # Errors
/// Tensors whose shapes do not match.
pub fn forward(inputs: &Inputs, rounding: &mut Rounding) -> Result<Outputs> {
    let lists = inputs.lists()?;
    let Handed { loss, logits, values, target } = inputs.handed(&lists, rounding)?;
    let indices: Vec<f64> = lists.into_iter().map(f64::from).collect();
    let indices = Tensor::from_vec(indices, values.dims(), &Device::Cpu)?;
    Ok(Outputs { logits, indices, values, target, loss: indexer_loss::forward(&loss, rounding)? })
}

/// The gradient of the loss with respect to the listed logits, `[num_tokens, topk]`, stored in f32,
/// and the gradients of the indexer's queries, keys and weights. `grad_loss` is `[1]`.
///
/// # Errors
/// As [`forward`].
pub fn backward(
    inputs: &Inputs,
    grad_loss: &Tensor,
    rounding: &mut Rounding,
) -> Result<(Tensor, Gradients)> {
    let lists = inputs.lists()?;
    let dlogits =
        indexer_loss::backward(&inputs.handed(&lists, rounding)?.loss, grad_loss, rounding)?;
    let handed = indexer_backward::Inputs {
        q: inputs.index_q.clone(),
        k: inputs.index_k.clone(),
        w: inputs.index_w.clone(),
        dlogits: rounding.f32(&dlogits)?,
        ranking: inputs.selected(lists),
        sequences: inputs.sequences.clone(),
        sm_scale: inputs.sm_scale,
    };
    Ok((dlogits, indexer_backward::backward(&handed, rounding)?))
}

/// The gradients by automatic differentiation.
///
/// # Errors
/// As [`forward`].
pub fn backward_autograd(inputs: &Inputs, grad_loss: &Tensor) -> Result<Gradients> {
    let of = |tensor: &Tensor| Var::from_tensor(tensor);
    let (q, k, w) = (of(&inputs.index_q)?, of(&inputs.index_k)?, of(&inputs.index_w)?);
    let own = |variable: &Var| variable.as_tensor().clone();
    let variables =
        Inputs { index_q: own(&q), index_k: own(&k), index_w: own(&w), ..inputs.clone() };
    let loss = forward(&variables, &mut Rounding::exact())?.loss.loss;
    let gradients = (loss * grad_loss)?.sum_all()?.backward()?;
    let gradient =
        |variable: &Var| gradients.get(variable).cloned().map_or_else(|| variable.zeros_like(), Ok);
    Ok(Gradients { dq: gradient(&q)?, dk: gradient(&k)?, dw: gradient(&w)? })
}

/// The inputs of the loss.
struct Handed {
    loss: indexer_loss::Inputs,
    /// The logits of all keys that a token sees.
    logits: Tensor,
    /// The listed logits, before they are stored.
    values: Tensor,
    /// The target, before it is stored.
    target: Tensor,
}

impl Inputs {
    fn logits(&self) -> indexer_logits::Inputs {
        indexer_logits::Inputs {
            q: self.index_q.clone(),
            w: self.index_w.clone(),
            k: self.index_k.clone(),
            k_scales: None,
            keys: Keys::Causal {
                ratio: self.ratio,
                q_off: self.q_off.clone(),
                sequences: self.sequences.clone(),
            },
            columns: self.columns,
            sm_scale: self.sm_scale,
        }
    }

    fn ranked<'a>(&'a self, ranking: &'a Ranking) -> RankedKeys<'a> {
        let num_keys = self.index_k.dims().first().copied().unwrap_or(0);
        RankedKeys { ranking, sequences: self.sequences.as_ref(), num_keys }
    }

    /// Number of keys that each token sees.
    pub fn limits(&self) -> Result<Vec<i32>> {
        let ranking =
            Ranking::Causal { ratio: self.ratio, q_off: self.q_off.clone(), columns: self.columns };
        let num_tokens = self.index_q.dim(0)?;
        self.ranked(&ranking).check(num_tokens)?;
        let seen = |token| self.ranked(&ranking).rows(token).iter().flatten().count() as i32;
        Ok((0..num_tokens).map(seen).collect())
    }

    /// The lists, `[num_tokens, topk]`, from exact logits.
    fn lists(&self) -> Result<Vec<i32>> {
        let exact =
            indexer_logits::forward(&self.logits(), Accumulator::F32, &mut Rounding::exact())?;
        let limits: Vec<f64> = self.limits()?.into_iter().map(f64::from).collect();
        let limits = Tensor::from_vec(limits, exact.dim(0)?, &Device::Cpu)?;
        let chosen = topk::forward(
            &Named::new().with("scores", exact).with("lengths", limits),
            self.topk,
            Index::Column,
        )?;
        Ok(values(chosen.tensor("indices")?)?.into_iter().map(|index| index as i32).collect())
    }

    fn selected(&self, indices: Vec<i32>) -> Ranking {
        Ranking::Selected { indices, topk: self.topk, topk_length: None, global: false }
    }

    fn handed(&self, lists: &[i32], rounding: &mut Rounding) -> Result<Handed> {
        let ranking = self.selected(lists.to_vec());
        let (num_tokens, num_keys) = (self.index_q.dim(0)?, self.index_k.dim(0)?);
        let shape = (num_tokens, self.topk);
        let rows: Vec<Option<i64>> =
            (0..num_tokens).flat_map(|token| self.ranked(&ranking).rows(token)).collect();
        let listed = Tensor::from_vec(
            rows.iter().map(|row| u8::from(row.is_some())).collect(),
            shape,
            &Device::Cpu,
        )?;
        let rows: Vec<u32> = rows.into_iter().map(|row| row.unwrap_or(0) as u32).collect();
        // Computed once: the listed logits are bit for bit those that are stored as logits.
        let some = num_tokens > 0 && num_keys > 0 && self.index_q.dim(1)? > 0;
        let all = some.then(|| self.logits().all_logits(Accumulator::F32, rounding)).transpose()?;
        let values = match &all {
            Some(all) if !rows.is_empty() => {
                let gathered = all.gather(&Tensor::from_vec(rows, shape, &Device::Cpu)?, 1)?;
                let listed = select(&listed, &gathered, f64::NEG_INFINITY)?;
                // A logit that is NaN is listed as -infinity.
                select(&listed.eq(&listed)?, &listed, f64::NEG_INFINITY)?
            }
            _ => Tensor::full(f64::NEG_INFINITY, shape, &Device::Cpu)?,
        };
        let attention = score_recompute::Inputs {
            q: self.q.clone(),
            k: self.k.clone(),
            ranking: ranking.clone(),
            sequences: self.sequences.clone(),
            softmax_scale: self.softmax_scale,
        };
        let target = score_recompute::target(&attention, &self.normaliser, rounding)?;
        let loss = indexer_loss::Inputs {
            logits: rounding.f32(&values)?,
            teacher: Teacher::Target(rounding.f32(&target)?),
            ranking,
            num_keys,
            sequences: self.sequences.clone(),
            row_mask: None,
            lse: None,
            form: self.form,
            reduction: self.reduction,
            loss_coeff: self.loss_coeff,
        };
        Ok(Handed { loss, logits: self.logits().placed(all.as_ref())?, values, target })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Draw, assert_within, f64_tensor};

    fn grid(draw: &mut Draw, shape: &[usize]) -> Tensor {
        let numbers = values(&draw.bf16(shape, 1.0)).expect("numbers");
        f64_tensor(&numbers.into_iter().map(|x| (2.0 * x).round() / 2.0).collect::<Vec<_>>(), shape)
    }

    fn inputs(form: Form) -> Inputs {
        let mut draw = Draw::new(5);
        let (tokens, keys) = (11, 9);
        Inputs {
            index_q: grid(&mut draw, &[tokens, 3, 128]),
            index_k: grid(&mut draw, &[keys, 128]),
            index_w: grid(&mut draw, &[tokens, 3]),
            ratio: 2,
            q_off: Some(vec![1, 2]),
            sequences: Some(Sequences { cu_q: vec![0, 4, 10], cu_k: vec![0, 3, 9] }),
            columns: 6,
            topk: 4,
            sm_scale: 0.011,
            q: draw.bf16(&[tokens, 2, 16], 1.0),
            k: draw.bf16(&[keys, 16], 1.0),
            softmax_scale: 0.25,
            normaliser: Normaliser { lse: f64_tensor(&[1.5; 22], &[tokens, 2]), sink: None },
            form,
            reduction: Reduction::MeanOfRows,
            loss_coeff: 0.3,
        }
    }

    #[test]
    fn the_chain_of_explicit_gradients_is_what_the_machine_differentiates() -> Result<()> {
        for form in [Form::Exact, Form::ClippedLog] {
            let (inputs, grad_loss) = (inputs(form), f64_tensor(&[1.75], &[1]));
            let (_, explicit) = backward(&inputs, &grad_loss, &mut Rounding::exact())?;
            let machine = backward_autograd(&inputs, &grad_loss)?;
            for (name, explicit, machine) in [
                ("dq", explicit.dq, machine.dq),
                ("dk", explicit.dk, machine.dk),
                ("dw", explicit.dw, machine.dw),
            ] {
                assert!(values(&machine)?.iter().any(|x| x.abs() > 1e-5), "{name} is nothing");
                // Nothing is clipped: the two forms differ by e^-100.
                let bound = (machine.abs()? * 1e-11)?.broadcast_add(&f64_tensor(&[1e-15], &[1]))?;
                assert_within(name, &explicit, &machine, &bound);
            }
        }
        Ok(())
    }

    #[test]
    fn a_token_lists_the_keys_that_it_sees_and_one_of_no_sequence_none() -> Result<()> {
        let inputs = inputs(Form::Exact);
        assert_eq!(inputs.limits()?, [1, 1, 2, 2, 1, 2, 2, 3, 3, 4, 0]);
        let outputs = forward(&inputs, &mut Rounding::exact())?;
        let indices = values(&outputs.indices)?;
        assert_eq!(indices[..4], [0., -1., -1., -1.]);
        assert_eq!(indices[36..], [0., 1., 2., 3., -1., -1., -1., -1.]);
        let sums = values(&outputs.target.sum(1)?)?;
        assert!(
            sums[..10].iter().all(|sum| (sum - 1.0).abs() < 1e-12) && sums[10] == 0.0,
            "{sums:?}"
        );
        Ok(())
    }
}
