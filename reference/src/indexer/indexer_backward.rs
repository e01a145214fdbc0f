//! The backward of the indexer's logits (training 1; stage 2 of training 7).
//!
//! The valid slots of row t are those of its ranking ([`crate::indexer::ranking`]); slot j has key
//! `i(j)`. With G = dlogits, over valid slots,
//!
//! ```text
//! d[t, h, j] = q[t, h] . k[i(j)]
//! A[t, h, j] = G[t, j] w[t, h]                                0 where d <= 0
//! dq[t, h]   = sm_scale sum_j A[t, h, j] k[i(j)]
//! dk[i]      = sm_scale sum over (t, h, j) with i(j) = i of A[t, h, j] q[t, h]
//! dw[t, h]   = sm_scale sum_j G[t, j] max(d[t, h, j], 0)
//! ```
//!
//! which is the gradient of `sm_scale sum_h w[t, h] max(q[t, h] . k[i(j)], 0)` where none of the
//! products is 0; at 0 the gradient is 0. A product that is NaN passes. Invalid slots read nothing
//! and add nothing.
//!
//! # Rounding points
//!
//! Products accumulate in fp32. A is an fp32 product that is rounded to bf16, the operand of two
//! products. `sm_scale` multiplies their fp32 sums. For dk it multiplies the sum of each slot, and
//! these are added in fp32.

use candle_core::{DType, Device, Tensor};

use crate::error::{Result, require, require_that, wrong_shape};
use crate::indexer::ranking::{RankedKeys, Ranking, Sequences};
use crate::precision::Rounding;
use crate::select::{select, spread, unless};

/// Inputs of the operator, widened to f64.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// `[num_tokens, num_heads, head_dim]`, stored in bf16.
    pub q: Tensor,
    /// `[num_keys, head_dim]`, stored in bf16.
    pub k: Tensor,
    /// `[num_tokens, num_heads]`, stored in f32 or bf16: the heads' weights.
    pub w: Tensor,
    /// `[num_tokens, slots]`, stored in f32: the gradient with respect to the logits of the slots.
    pub dlogits: Tensor,
    /// Which slots are valid.
    pub ranking: Ranking,
    /// `None` is one sequence of all tokens and keys.
    pub sequences: Option<Sequences>,
    /// Multiplies the logits; above 0.
    pub sm_scale: f64,
}

/// The gradients.
#[derive(Debug, Clone)]
pub struct Gradients {
    /// `[num_tokens, num_heads, head_dim]`, stored in bf16.
    pub dq: Tensor,
    /// `[num_keys, head_dim]`, stored in f32.
    pub dk: Tensor,
    /// `[num_tokens, num_heads]`, stored in the type of `w`.
    pub dw: Tensor,
}

/// The gradients.
///
/// # Errors
/// Tensors or lists whose shapes do not match.
pub fn backward(inputs: &Inputs, rounding: &mut Rounding) -> Result<Gradients> {
    let [num_tokens, num_heads, slots, num_keys] = inputs.check()?;
    if num_tokens == 0 || num_heads == 0 || slots == 0 {
        return Ok(Gradients {
            dq: inputs.q.zeros_like()?,
            dk: inputs.k.zeros_like()?,
            dw: inputs.w.zeros_like()?,
        });
    }
    let gathered = Gathered::new(inputs, [num_tokens, slots, num_keys])?;
    let d = rounding.matmul_f32(&inputs.q, &gathered.k.transpose(1, 2)?.contiguous()?)?;
    let valid = spread(&gathered.valid, d.shape())?;
    let upstream = select(&gathered.valid, &inputs.dlogits.unsqueeze(1)?, 0.0)?;
    let stops = d.le(0.0)?;

    let a = rounding.f32(&inputs.w.unsqueeze(2)?.broadcast_mul(&upstream)?)?;
    let a = select(&valid, &unless(&stops, &a, 0.0)?, 0.0)?;
    let a = rounding.bf16(&a)?;
    let dq = rounding.matmul_f32(&a, &gathered.k)?;
    let dq = rounding.f32(&(dq * inputs.sm_scale)?)?;

    // What does not pass adds nothing, also to infinities.
    let terms = unless(&stops, &upstream.broadcast_mul(&d)?, 0.0)?;
    let dw = rounding.sum_f32(&select(&valid, &terms, 0.0)?, 2)?;
    let dw = rounding.f32(&(dw * inputs.sm_scale)?)?;
    Ok(Gradients { dq, dk: gathered.key_gradients(&a, inputs, rounding)?, dw })
}

impl Inputs {
    /// `[num_tokens, num_heads, slots, num_keys]`.
    fn check(&self) -> Result<[usize; 4]> {
        let &[num_tokens, num_heads, head_dim] = self.q.dims() else {
            return Err(wrong_shape("q", "[num_tokens, num_heads, head_dim]", &self.q));
        };
        require("q", &self.q, &[num_tokens, num_heads, head_dim])?;
        let &[num_keys, _] = self.k.dims() else {
            return Err(wrong_shape("k", "[num_keys, head_dim]", &self.k));
        };
        require("k", &self.k, &[num_keys, head_dim])?;
        require("w", &self.w, &[num_tokens, num_heads])?;
        let slots = self.ranking.slots();
        require("dlogits", &self.dlogits, &[num_tokens, slots])?;
        let positive = self.sm_scale.is_finite() && self.sm_scale > 0.0;
        require_that("sm_scale", self.sm_scale, positive, "it must be positive and finite")?;
        self.ranked(num_keys).check(num_tokens)?;
        Ok([num_tokens, num_heads, slots, num_keys])
    }

    fn ranked(&self, num_keys: usize) -> RankedKeys<'_> {
        RankedKeys { ranking: &self.ranking, sequences: self.sequences.as_ref(), num_keys }
    }
}

/// The keys of all slots.
struct Gathered {
    /// The row of `k` of each slot, one after the other; `num_keys` where it is invalid.
    rows: Tensor,
    /// 1 where the slot is valid, `[num_tokens, 1, slots]`.
    valid: Tensor,
    /// `[num_tokens, slots, head_dim]`; zeros in invalid slots.
    k: Tensor,
    num_keys: usize,
}

impl Gathered {
    fn new(inputs: &Inputs, [num_tokens, slots, num_keys]: [usize; 3]) -> Result<Self> {
        let none = num_keys as i64;
        let ranked = inputs.ranked(num_keys);
        let of_token = |token| ranked.rows(token).into_iter().map(|row| row.unwrap_or(none));
        let rows: Vec<i64> = (0..num_tokens).flat_map(of_token).collect();
        let valid: Vec<u8> = rows.iter().map(|&row| u8::from(row != none)).collect();
        let head_dim = inputs.k.dim(1)?;
        let zeros = Tensor::zeros((1, head_dim), DType::F64, &Device::Cpu)?;
        let keys = if num_keys == 0 { zeros } else { Tensor::cat(&[&inputs.k, &zeros], 0)? };
        let rows = Tensor::from_vec(rows, num_tokens * slots, &Device::Cpu)?;
        Ok(Self {
            valid: Tensor::from_vec(valid, (num_tokens, 1, slots), &Device::Cpu)?,
            k: keys.index_select(&rows, 0)?.reshape((num_tokens, slots, head_dim))?,
            rows,
            num_keys,
        })
    }

    /// The products `A^T q` of the slots, summed for each key.
    fn key_gradients(
        &self,
        a: &Tensor,
        inputs: &Inputs,
        rounding: &mut Rounding,
    ) -> Result<Tensor> {
        let scale = inputs.sm_scale;
        let sum = (self.of_keys(a, &inputs.q)? * scale)?;
        let squares = || Ok((self.of_keys(&a.sqr()?, &inputs.q.sqr()?)? * (scale * scale))?);
        let Some(squares) = rounding.noise_scale(squares)? else { return rounding.f32(&sum) };
        let heads = Tensor::full(a.dim(1)? as f64, (self.rows.elem_count(), 1), &Device::Cpu)?;
        let counts = spread(&self.added(&heads)?, sum.shape())?;
        rounding.accumulated_f32(&sum, &squares, &counts)
    }

    /// `[num_keys, head_dim]`: sums of `a[t, h, j] b[t, h]` over all (t, h, j) that name a key.
    fn of_keys(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        self.added(&a.transpose(1, 2)?.contiguous()?.matmul(b)?.flatten_to(1)?)
    }

    /// `[num_tokens * slots, width]`, summed over the slots of each key.
    fn added(&self, per_slot: &Tensor) -> Result<Tensor> {
        let zeros = Tensor::zeros((self.num_keys + 1, per_slot.dim(1)?), DType::F64, &Device::Cpu)?;
        let sums = zeros.index_add(&self.rows, &per_slot.contiguous()?, 0)?;
        // The last row holds the invalid slots.
        Ok(sums.narrow(0, 0, self.num_keys)?)
    }
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

    const TOKENS: usize = 6;
    const HEADS: usize = 3;
    const HEAD_DIM: usize = 8;
    const KEYS: usize = 9;
    const SCALE: f64 = 0.3;

    fn inputs(seed: u64, ranking: Ranking) -> Inputs {
        let mut draw = Draw::new(seed);
        Inputs {
            q: draw.bf16(&[TOKENS, HEADS, HEAD_DIM], 1.0),
            k: draw.bf16(&[KEYS, HEAD_DIM], 1.0),
            w: draw.bf16(&[TOKENS, HEADS], 1.0),
            dlogits: draw.bf16(&[TOKENS, ranking.slots()], 1.0),
            ranking,
            sequences: Some(Sequences { cu_q: vec![0, 2, 5], cu_k: vec![0, 4, 9] }),
            sm_scale: SCALE,
        }
    }

    /// Lists with bad slots and repetitions, local to their sequences; token 1 has no valid slot,
    /// token 5 no sequence.
    fn selected(seed: u64) -> Inputs {
        let mut draw = Draw::new(seed + 100);
        let mut indices: Vec<i32> = (0..TOKENS * 7).map(|_| draw.below(7) as i32 - 1).collect();
        indices[7..14].fill(i32::MAX);
        inputs(seed, Ranking::Selected { indices, topk: 7, topk_length: None, global: false })
    }

    fn causal(seed: u64) -> Inputs {
        inputs(seed, Ranking::Causal { ratio: 2, q_off: Some(vec![3, 5]), columns: 5 })
    }

    fn exact(inputs: &Inputs) -> Gradients {
        backward(inputs, &mut Rounding::exact()).unwrap()
    }

    /// The sum of the logits weighted by dlogits, slot by slot, for candle's own differentiation.
    fn weighted_logits(inputs: &Inputs, q: &Tensor, k: &Tensor, w: &Tensor) -> Tensor {
        let upstream = values(&inputs.dlogits).unwrap();
        let mut sum = Tensor::zeros((), DType::F64, &Device::Cpu).unwrap();
        for token in 0..TOKENS {
            for (slot, row) in inputs.ranked(KEYS).rows(token).into_iter().enumerate() {
                let Some(row) = row else { continue };
                let (query, key) = (q.get(token).unwrap(), k.narrow(0, row as usize, 1).unwrap());
                let relu =
                    query.matmul(&key.t().unwrap()).unwrap().relu().unwrap().squeeze(1).unwrap();
                let logit =
                    ((relu * w.get(token).unwrap()).unwrap().sum_all().unwrap() * SCALE).unwrap();
                sum = (sum + (logit * upstream[token * inputs.ranking.slots() + slot]).unwrap())
                    .unwrap();
            }
        }
        sum
    }

    #[test]
    fn the_gradients_are_those_of_the_logits_by_automatic_differentiation() {
        for inputs in [selected(1), selected(2), causal(3)] {
            let [q, k, w] =
                [&inputs.q, &inputs.k, &inputs.w].map(|tensor| Var::from_tensor(tensor).unwrap());
            let gradients = weighted_logits(&inputs, &q, &k, &w).backward().unwrap();
            let Gradients { dq, dk, dw } = exact(&inputs);
            for (name, actual, variable) in [("dq", dq, q), ("dk", dk, k), ("dw", dw, w)] {
                let expected = gradients.get(&variable).unwrap();
                assert!(dot_of_magnitudes(expected, expected) > 0.0, "{name}");
                // Sums of a few hundred terms of the size of their largest.
                let bound =
                    ((expected.abs().unwrap() + 8.0).unwrap() * (256.0 * UNIT_ROUNDOFF)).unwrap();
                assert_within(name, &actual, expected, &bound);
            }
        }
    }

    #[test]
    fn the_gradients_are_those_of_the_logits_by_central_differences() -> Result<()> {
        for inputs in [selected(4), causal(5)] {
            let mut draw = Draw::new(6);
            let [toward_q, toward_k, toward_w] =
                [&inputs.q, &inputs.k, &inputs.w].map(|x| draw.normal(x.dims(), 1.0));
            let at = |h: f64| {
                let moved = |x: &Tensor, toward: &Tensor| (x + (toward * h).unwrap()).unwrap();
                let [q, k] = [moved(&inputs.q, &toward_q), moved(&inputs.k, &toward_k)];
                Ok(values(
                    &weighted_logits(&inputs, &q, &k, &moved(&inputs.w, &toward_w)).reshape(1)?,
                )?[0])
            };
            let Gradients { dq, dk, dw } = exact(&inputs);
            let claimed = dot(&dq, &toward_q) + dot(&dk, &toward_k) + dot(&dw, &toward_w);
            let noise = 1024.0 * UNIT_ROUNDOFF * (TOKENS * HEADS * 7) as f64;
            assert_directional_derivative("q, k and w", at, 0.01, noise, claimed)?;
        }
        Ok(())
    }

    #[test]
    fn a_product_of_0_passes_nothing_and_keys_that_nobody_names_have_no_gradient() {
        let ranking = Ranking::Selected {
            indices: vec![0, 1, 0, -1],
            topk: 4,
            topk_length: None,
            global: true,
        };
        let inputs = Inputs {
            q: f64_tensor(&[1.0, 1.0], &[1, 1, 2]),
            k: f64_tensor(&[1.0, -1.0, 2.0, 0.0, 5.0, 5.0], &[3, 2]),
            w: f64_tensor(&[-2.0], &[1, 1]),
            dlogits: f64_tensor(&[3.0, 0.5, 7.0, f64::NAN], &[1, 4]),
            ranking,
            sequences: None,
            sm_scale: 0.5,
        };
        let Gradients { dq, dk, dw } = exact(&inputs);
        assert_eq!(values(&dq).unwrap(), [-1.0, 0.0]);
        assert_eq!(values(&dk).unwrap(), [0.0, 0.0, -0.5, -0.5, 0.0, 0.0]);
        assert_eq!(values(&dw).unwrap(), [0.5]);
    }

    #[test]
    fn working_runs_err_around_the_exact_gradients() {
        for inputs in [selected(7), causal(8)] {
            let run = |precision| backward(&inputs, &mut Rounding::new(precision)).unwrap();
            let runs: Vec<Gradients> =
                (0..64).map(|seed| run(Precision::Working { seed })).collect();
            let exact = exact(&inputs);
            // Rows with errors: those of tokens with slots, and of keys that are named.
            let erring = |of: fn(&Gradients) -> &Tensor| {
                let numbers = |g: &Gradients| values(of(g)).unwrap();
                let base = numbers(&exact);
                let at: Vec<usize> = (0..base.len())
                    .filter(|&i| runs.iter().any(|run| numbers(run)[i] != base[i]))
                    .collect();
                let kept = |g: &Gradients| {
                    let all = numbers(g);
                    f64_tensor(&at.iter().map(|&i| all[i]).collect::<Vec<_>>(), &[at.len()])
                };
                assert!(at.len() > 6);
                (kept(&exact), runs.iter().map(kept).collect::<Vec<_>>())
            };
            for (name, of) in [
                ("dq", (|g| &g.dq) as fn(&Gradients) -> &Tensor),
                ("dk", |g| &g.dk),
                ("dw", |g| &g.dw),
            ] {
                let (exact, runs) = erring(of);
                assert_unbiased(name, &exact, &runs, 4);
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let inputs = selected(9);
        let refuse = |inputs: Inputs, name: &str| {
            let error = backward(&inputs, &mut Rounding::exact()).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        };
        refuse(Inputs { w: f64_tensor(&[0.0; 4], &[2, 2]), ..inputs.clone() }, "w");
        refuse(Inputs { dlogits: f64_tensor(&[0.0; 4], &[2, 2]), ..inputs.clone() }, "dlogits");
        refuse(Inputs { sm_scale: -1.0, ..inputs }, "sm_scale");
    }
}
