//! An attention layer over a window, in the steps of a training step (training 14):
//!
//! ```text
//! q        = query_projection(h)            wq_a, its norm, wq_b, the norm of each head, rotation       [`crate::projections::query_projection`]
//! kv       = kv_projection(h)               wkv, its norm, rotation; a row is key and value             [`crate::projections::kv_projection`]
//! attn_out = attention(q, kv, sink)         over the rows that each token's list names                  [`crate::attention::sparse_attention`]
//! y        = output_projection(attn_out)    rotation back, grouped wo_a, wo_b                           [`crate::projections::output_projection`]
//! ```
//!
//! and the gradients of all steps, last step first. h is read by both projections, so its gradient
//! is the sum of two.
//!
//! # Rounding points
//!
//! Those of the steps. q, kv, attn_out and their gradients are stored in bf16 between them, and so
//! are both terms of h's gradient; the log-sum-exp of a token's logits is stored in f32.

use candle_core::Tensor;

use crate::attention::sparse_attention::{self, Upstream, Value};
use crate::error::Result;
use crate::named::Named;
use crate::precision::Rounding;
use crate::projections::{kv_projection, output_projection, query_projection, rope};

/// What is not a tensor of bf16 or f32 numbers, and the rotation of tokens.
#[derive(Debug, Clone)]
pub struct Layer {
    /// `[num_tokens, rope_dim / 2]`, stored in f32: of each token's position.
    pub cos: Tensor,
    /// As `cos`.
    pub sin: Tensor,
    /// `[num_tokens, window]` in row-major order: the rows that a token attends to. Others than rows
    /// count for nothing.
    pub indices: Vec<i32>,
    /// Length of a list.
    pub window: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Epsilon of the norms.
    pub eps: f64,
    /// Multiplies the logits.
    pub softmax_scale: f64,
}

/// What the attention was given and wrote, as stored.
struct Attended {
    /// Outputs of both projections, before the store.
    projected: Named,
    attention: sparse_attention::Inputs,
    outputs: sparse_attention::Outputs,
    attn_out: Tensor,
}

impl Layer {
    fn queries(&self) -> query_projection::Turn {
        let (cos, sin, num_heads) = (self.cos.clone(), self.sin.clone(), self.num_heads);
        query_projection::Turn { cos, sin, positions: None, num_heads, eps: self.eps }
    }

    fn keys(&self) -> kv_projection::Turn {
        let (cos, sin) = (self.cos.clone(), self.sin.clone());
        kv_projection::Turn { cos, sin, positions: None, eps: self.eps }
    }

    /// The rotation of the attention's output, back to the frame of its token.
    fn back(&self, attn_out: &Tensor) -> rope::Inputs {
        let (x, cos, sin) = (attn_out.clone(), self.cos.clone(), self.sin.clone());
        rope::Inputs { x, cos, sin, positions: None, inverse: true }
    }

    /// The inputs of the attention: q `[num_tokens, num_heads * head_dim]` and kv `[num_tokens,
    /// head_dim]`, as stored, and the sink.
    ///
    /// # Errors
    /// Channels that are not those of all heads.
    pub fn attention(
        &self,
        q: &Tensor,
        kv: &Tensor,
        sink: &Tensor,
    ) -> Result<sparse_attention::Inputs> {
        let (num_tokens, width) = q.dims2()?;
        let heads = (num_tokens, self.num_heads, width / self.num_heads.max(1));
        Ok(sparse_attention::Inputs {
            q: q.reshape(heads)?,
            k: kv.clone(),
            value: Value::Shared,
            sink: Some(sink.clone()),
            indices: self.indices.clone(),
            topk: self.window,
            topk_length: None,
            softmax_scale: self.softmax_scale,
        })
    }

    /// Projections and attention.
    fn attended(&self, inputs: &Named, rounding: &mut Rounding) -> Result<Attended> {
        let of_q = query_projection::forward(&self.queries(), inputs, rounding)?;
        let of_kv = kv_projection::forward(&self.keys(), inputs, rounding)?;
        let q = rounding.bf16(of_q.tensor("q")?)?;
        let kv = rounding.bf16(of_kv.tensor("kv")?)?;
        let attention = self.attention(&q, &kv, inputs.tensor("sink")?)?;
        let outputs = sparse_attention::forward(&attention, rounding)?;
        let attn_out = rounding.bf16(&outputs.out)?;
        let projected = of_q.with("kv_rstd", of_kv.tensor("rstd")?.clone());
        let projected = of_step(projected, &of_kv, &["kv_a", "n", "kv"])?;
        Ok(Attended { projected, attention, outputs, attn_out })
    }
}

/// The outputs of the steps under their own names (`kv_rstd` is that of the rows of kv): those of
/// the projections, `attn_out` `[num_tokens, num_heads, head_dim]`, stored in bf16, `lse` and
/// `max_logits` `[num_tokens, num_heads]`, stored in f32. The inputs are those of the projections,
/// but for `attn_out`, and `sink` `[num_heads]`, stored in f32.
///
/// # Errors
/// Tensors whose shapes do not match.
pub fn forward(layer: &Layer, inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    let Attended { projected, outputs, attn_out, .. } = layer.attended(inputs, rounding)?;
    let last = output_projection::forward(&layer.back(&attn_out), inputs, rounding)?;
    let named = projected.with("attn_out", outputs.out).with("lse", outputs.lse);
    let named = named.with("max_logits", outputs.max_logits);
    of_step(named, &last, &["rotated", "z", "y"])
}

/// With these tensors of a step.
fn of_step(named: Named, step: &Named, names: &[&'static str]) -> Result<Named> {
    names.iter().try_fold(named, |all, name| Ok(all.with(name, step.tensor(name)?.clone())))
}

/// The gradients of the steps under their own names; `dkv` is that of the rows of kv, and `dh` the
/// sum over both projections. The inputs are those of [`forward`] and `dy`, of the shape of `y`.
///
/// # Errors
/// As [`forward`].
pub fn backward(layer: &Layer, inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    let Attended { attention, attn_out, .. } = layer.attended(inputs, rounding)?;
    let last = output_projection::backward(&layer.back(&attn_out), inputs, rounding)?;
    let upstream = Upstream { dout: rounding.bf16(last.tensor("dattn_out")?)?, dlse: None };
    let gradients = sparse_attention::backward(&attention, &upstream, rounding)?;
    let (dq, dkv) = (gradients.dq.flatten_from(1)?, gradients.dk);
    let stored = inputs.clone().with("dq", rounding.bf16(&dq)?);
    let of_q = query_projection::backward(&layer.queries(), &stored, rounding)?;
    let stored = stored.with("dkv", rounding.bf16(&dkv)?);
    let of_kv = kv_projection::backward(&layer.keys(), &stored, rounding)?;
    let dh = (rounding.bf16(of_q.tensor("dh")?)? + rounding.bf16(of_kv.tensor("dh")?)?)?;
    let named = Named::new().with("dq", dq).with("dkv", dkv).maybe("dsink", gradients.dsink);
    let named = named.with("dh", dh);
    let named = of_step(named, &last, &["dz", "dwo_b", "drotated", "dwo_a", "dattn_out"])?;
    let named = of_step(named, &of_q, &["dq_b", "dwq_b", "dqr", "dq_norm", "dq_a", "dwq_a"])?;
    of_step(named, &of_kv, &["dn", "dkv_norm", "dkv_a", "dwkv"])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Draw, UNIT_ROUNDOFF, assert_within, differentiated, f64_tensor};

    /// Two heads of four channels, two of them rotated, over windows of three tokens.
    fn case() -> (Layer, Named) {
        let (tokens, hidden, rank, heads, dim) = (5, 6, 5, 2, 4);
        let mut draw = Draw::new(3);
        let angles = |of: fn(f64) -> f64| {
            f64_tensor(&(0..tokens).map(|at| of(0.7 * at as f64)).collect::<Vec<_>>(), &[tokens, 1])
        };
        let window = 3;
        let list = |token: i32| (0..window as i32).map(move |slot| token - slot);
        let layer = Layer {
            cos: angles(f64::cos),
            sin: angles(f64::sin),
            indices: (0..tokens as i32).flat_map(list).collect(),
            window,
            num_heads: heads,
            eps: 1e-6,
            softmax_scale: 0.5,
        };
        let shapes: [(&str, &[usize], f64); 10] = [
            ("h", &[tokens, hidden], 1.0),
            ("wq_a", &[rank, hidden], 0.4),
            ("q_norm", &[rank], 1.0),
            ("wq_b", &[heads * dim, rank], 0.4),
            ("wkv", &[dim, hidden], 0.4),
            ("kv_norm", &[dim], 1.0),
            ("sink", &[heads], 1.0),
            ("wo_a", &[heads, 3, dim], 0.5),
            ("wo_b", &[hidden, heads * 3], 0.4),
            ("dy", &[tokens, hidden], 1.0),
        ];
        let drawn = shapes
            .into_iter()
            .fold(Named::new(), |all, (name, shape, size)| all.with(name, draw.bf16(shape, size)));
        (layer, drawn)
    }

    #[test]
    fn written_gradients_equal_those_of_automatic_differentiation() -> Result<()> {
        let (layer, named) = case();
        let gradients = backward(&layer, &named, &mut Rounding::exact())?;
        let of = [
            ("h", "dh"),
            ("wq_a", "dwq_a"),
            ("q_norm", "dq_norm"),
            ("wq_b", "dwq_b"),
            ("wkv", "dwkv"),
            ("kv_norm", "dkv_norm"),
            ("sink", "dsink"),
            ("wo_a", "dwo_a"),
            ("wo_b", "dwo_b"),
        ];
        let objective = |inputs: &Named| {
            let outputs = forward(&layer, inputs, &mut Rounding::exact())?;
            Ok((outputs.tensor("y")? * inputs.tensor("dy")?)?)
        };
        let automatic = differentiated(&named, &of, objective)?;
        for (_, gradient) in of {
            // Each element depends on a few hundred products of values of size 1.
            let bound = (automatic.tensor(gradient)?.ones_like()? * (65536.0 * UNIT_ROUNDOFF))?;
            let (written, automatic) = (gradients.tensor(gradient)?, automatic.tensor(gradient)?);
            assert_within(gradient, written, automatic, &bound);
        }
        Ok(())
    }

    #[test]
    fn a_token_depends_on_the_tokens_of_its_window_alone() -> Result<()> {
        let (layer, named) = case();
        let first = |inputs: &Named| -> Result<Tensor> {
            Ok(forward(&layer, inputs, &mut Rounding::exact())?.tensor("y")?.narrow(0, 3, 1)?)
        };
        let before = first(&named)?;
        for (token, is_seen) in [(0, false), (1, true), (3, true), (4, false)] {
            let changed = f64_tensor(&[2.0; 6], &[1, 6]);
            let h = named.tensor("h")?.slice_assign(&[token..token + 1, 0..6], &changed)?;
            let after = first(&named.clone().with("h", h))?;
            let moved = crate::precision::values(&(&after - &before)?.abs()?)?;
            assert_eq!(moved.iter().any(|x| *x > 0.0), is_seen, "token {token}");
        }
        Ok(())
    }
}
