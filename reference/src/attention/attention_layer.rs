//! An attention layer in the steps of a training step (training 14): over a window alone, or over a
//! window and compressed entries.
//!
//! ```text
//! q        = query_projection(h)            wq_a, its norm, wq_b, the norm of each head, rotation       [`crate::projections::query_projection`]
//! kv       = kv_projection(h)               wkv, its norm, rotation; a row is key and value             [`crate::projections::kv_projection`]
//! c_kv     = h wkv_c^T     c_gate = h wgate_c^T                                                         [`crate::projections::linear`]
//! entries  = compressor(c_kv, c_gate)       pooled, normed, rotated by the position of their first token [`crate::cache::compressor`]
//! attn_out = attention(q, keys, sink)       over the keys that each token's list names; keys are the rows
//!                                           of kv and then the entries                                  [`crate::attention::sparse_attention`]
//! y        = output_projection(attn_out)    rotation back, grouped wo_a, wo_b                           [`crate::projections::output_projection`]
//! ```
//!
//! and the gradients of all steps, last step first. h is read by all projections, so its gradient is
//! the sum of theirs. Lists are given.
//!
//! # Rounding points
//!
//! Those of the steps. q, keys, attn_out and their gradients are stored in bf16 between them, and so
//! are the gradients of c_kv and c_gate and the terms of h's gradient. c_kv, c_gate and the
//! log-sum-exp of a token's logits are stored in f32.

use candle_core::Tensor;

use crate::attention::sparse_attention::{self, Upstream, Value};
use crate::cache::compressor::{self, Epilogue, Finish};
use crate::error::Result;
use crate::format::Format;
use crate::named::Named;
use crate::precision::Rounding;
use crate::projections::{kv_projection, linear, output_projection, query_projection, rope};

/// What is not a tensor of bf16 or f32 numbers, and the rotation of tokens.
#[derive(Debug, Clone)]
pub struct Layer {
    /// `[num_tokens, rope_dim / 2]`, stored in f32: of each token's position.
    pub cos: Tensor,
    /// As `cos`.
    pub sin: Tensor,
    /// `[num_tokens, slots]` in row-major order: the keys that a token attends to. What names no key
    /// counts for nothing.
    pub indices: Vec<i32>,
    /// Length of a list.
    pub slots: usize,
    /// How tokens are compressed; `None` for a layer over a window alone.
    pub compression: Option<Compression>,
    /// Query heads.
    pub num_heads: usize,
    /// Epsilon of the norms.
    pub eps: f64,
    /// Multiplies the logits.
    pub softmax_scale: f64,
}

/// The sequences and their entries.
#[derive(Debug, Clone)]
pub struct Compression {
    /// As in [`compressor::Inputs`].
    pub cu_seqlens: Vec<i32>,
    /// As in [`compressor::Inputs`].
    pub cu_entries: Vec<i32>,
    /// Entries of all sequences.
    pub num_entries: usize,
    /// `[positions, rope_dim / 2]`, stored in f32: of each position in a sequence.
    pub cos: Tensor,
    /// As `cos`.
    pub sin: Tensor,
}

impl Compression {
    fn inputs(
        &self,
        inputs: &Named,
        eps: f64,
        [kv, gate]: [&Tensor; 2],
    ) -> Result<compressor::Inputs> {
        let finish = Finish {
            norm_weight: inputs.tensor("c_norm")?.clone(),
            cos: self.cos.clone(),
            sin: self.sin.clone(),
            eps,
            stored: Format::BF16,
            epilogue: Epilogue::None,
        };
        Ok(compressor::Inputs {
            kv: kv.clone(),
            gate: gate.clone(),
            ape: inputs.tensor("ape")?.clone(),
            cu_seqlens: self.cu_seqlens.clone(),
            cu_entries: self.cu_entries.clone(),
            num_entries: self.num_entries,
            finish,
        })
    }
}

/// The weights of the compressor's products, and those products.
const PRODUCTS: [(&str, &str); 2] = [("wkv_c", "c_kv"), ("wgate_c", "c_gate")];

fn product(inputs: &Named, weight: &'static str) -> Result<Named> {
    let (h, w) = (inputs.tensor("h")?.clone(), inputs.tensor(weight)?.clone());
    Ok(Named::new().with("x", h).with("w", w))
}

/// What the attention was given and wrote, as stored.
struct Attended {
    /// The compressor's inputs, as stored.
    compressed: Option<compressor::Inputs>,
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

    /// The inputs of the attention: q `[num_tokens, num_heads * head_dim]` and keys `[num_keys,
    /// head_dim]`, as stored, and the sink.
    ///
    /// # Errors
    /// Channels that are not those of all heads.
    pub fn attention(
        &self,
        q: &Tensor,
        keys: &Tensor,
        sink: &Tensor,
    ) -> Result<sparse_attention::Inputs> {
        let (num_tokens, width) = q.dims2()?;
        let heads = (num_tokens, self.num_heads, width / self.num_heads.max(1));
        Ok(sparse_attention::Inputs {
            q: q.reshape(heads)?,
            k: keys.clone(),
            value: Value::Shared,
            sink: Some(sink.clone()),
            indices: self.indices.clone(),
            topk: self.slots,
            topk_length: None,
            softmax_scale: self.softmax_scale,
        })
    }

    /// Projections and attention.
    fn attended(&self, inputs: &Named, rounding: &mut Rounding) -> Result<Attended> {
        let of_q = query_projection::forward(&self.queries(), inputs, rounding)?;
        let of_kv = kv_projection::forward(&self.keys(), inputs, rounding)?;
        let projected = of_q.with("kv_rstd", of_kv.tensor("rstd")?.clone());
        let mut projected = of_step(projected, &of_kv, &["kv_a", "n"])?;
        let mut keys = of_kv.tensor("kv")?.clone();
        let mut compressed = None;
        if let Some(compression) = &self.compression {
            let mut stored = Vec::new();
            for (weight, name) in PRODUCTS {
                let y = linear::forward(&product(inputs, weight)?, rounding)?.tensor("y")?.clone();
                stored.push(rounding.f32(&y)?);
                projected = projected.with(name, y);
            }
            let of = compression.inputs(inputs, self.eps, [&stored[0], &stored[1]])?;
            let made = compressor::forward(&of, rounding)?;
            projected = projected.with("pooled", made.tensor("pooled")?.clone());
            if compression.num_entries > 0 {
                keys = Tensor::cat(&[&keys, made.tensor("entries")?], 0)?;
            }
            compressed = Some(of);
        }
        let q = rounding.bf16(projected.tensor("q")?)?;
        let attention = self.attention(&q, &rounding.bf16(&keys)?, inputs.tensor("sink")?)?;
        let outputs = sparse_attention::forward(&attention, rounding)?;
        let attn_out = rounding.bf16(&outputs.out)?;
        let projected = projected.with("keys", keys);
        Ok(Attended { compressed, projected, attention, outputs, attn_out })
    }
}

/// The outputs of the steps under their own names (`kv_rstd` is that of the rows of kv): those of
/// the projections, `keys` `[num_keys, head_dim]` and `attn_out` `[num_tokens, num_heads,
/// head_dim]`, stored in bf16, `lse` and `max_logits` `[num_tokens, num_heads]`, stored in f32. With
/// a compressor also `c_kv` and `c_gate` `[num_tokens, width]`, stored in f32, and `pooled`. The
/// inputs are those of the projections, but for `attn_out`, and `sink` `[num_heads]`, stored in
/// f32; with a compressor also `wkv_c` and `wgate_c` `[width, hidden_size]`, stored in bf16, `ape`
/// `[ratio, width]` and `c_norm` `[head_dim]`, stored in f32.
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

/// The gradients of the steps under their own names; `dkeys` is that of all keys, and `dh` the sum
/// over all projections. The inputs are those of [`forward`] and `dy`, of the shape of `y`.
///
/// # Errors
/// As [`forward`].
pub fn backward(layer: &Layer, inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    let Attended { compressed, attention, attn_out, .. } = layer.attended(inputs, rounding)?;
    let last = output_projection::backward(&layer.back(&attn_out), inputs, rounding)?;
    let upstream = Upstream { dout: rounding.bf16(last.tensor("dattn_out")?)?, dlse: None };
    let gradients = sparse_attention::backward(&attention, &upstream, rounding)?;
    let (dq, dkeys) = (gradients.dq.flatten_from(1)?, gradients.dk);
    let stored = rounding.bf16(&dkeys)?;
    let num_tokens = inputs.tensor("h")?.dim(0)?;
    let dkv = stored.narrow(0, 0, num_tokens)?;
    let given = inputs.clone().with("dq", rounding.bf16(&dq)?).with("dkv", dkv);
    let of_q = query_projection::backward(&layer.queries(), &given, rounding)?;
    let of_kv = kv_projection::backward(&layer.keys(), &given, rounding)?;
    let mut dh = (rounding.bf16(of_q.tensor("dh")?)? + rounding.bf16(of_kv.tensor("dh")?)?)?;
    let mut named =
        Named::new().with("dq", dq).with("dkeys", dkeys).maybe("dsink", gradients.dsink);
    if let Some(of) = compressed {
        let dentries = stored.narrow(0, num_tokens, of.num_entries)?;
        let made = compressor::backward(&of, &dentries, None, rounding)?;
        named = named.with("dape", made.tensor("dape")?.clone());
        named = named.with("dc_norm", made.tensor("dnorm_weight")?.clone());
        let names = [["dkv", "dc_kv", "dwkv_c"], ["dgate", "dc_gate", "dwgate_c"]];
        for ((weight, _), [from, own, of_weight]) in PRODUCTS.into_iter().zip(names) {
            let dy = made.tensor(from)?.clone();
            let product = product(inputs, weight)?.with("dy", rounding.bf16(&dy)?);
            let product = linear::backward(&product, rounding)?;
            dh = (dh + rounding.bf16(product.tensor("dx")?)?)?;
            named = named.with(own, dy).with(of_weight, product.tensor("dw")?.clone());
        }
    }
    let named = named.with("dh", dh);
    let named = of_step(named, &last, &["dz", "dwo_b", "drotated", "dwo_a", "dattn_out"])?;
    let named = of_step(named, &of_q, &["dq_b", "dwq_b", "dqr", "dq_norm", "dq_a", "dwq_a"])?;
    of_step(named, &of_kv, &["dn", "dkv_norm", "dkv_a", "dwkv"])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Draw, UNIT_ROUNDOFF, assert_within, differentiated, f64_tensor};

    /// Two heads of four channels, two of them rotated, over windows of three tokens, and over the
    /// entries of so many tokens each that a token sees.
    fn case(ratio: Option<usize>) -> (Layer, Named) {
        let (tokens, hidden, rank, heads, dim) = (9, 6, 5, 2, 4);
        let mut draw = Draw::new(3);
        let angles = |of: fn(f64) -> f64| {
            f64_tensor(&(0..tokens).map(|at| of(0.7 * at as f64)).collect::<Vec<_>>(), &[tokens, 1])
        };
        let entries = ratio.map_or(0, |ratio| tokens / ratio);
        let list = |token: i32| {
            let seen = ratio.map_or(0, |ratio| (token + 1) / ratio as i32);
            let of_entries = (0..entries as i32)
                .map(move |entry| if entry < seen { tokens as i32 + entry } else { -1 });
            (0..3).map(move |slot| token - slot).chain(of_entries)
        };
        let compression = ratio.map(|_| Compression {
            cu_seqlens: vec![0, tokens as i32],
            cu_entries: vec![0, entries as i32],
            num_entries: entries,
            cos: angles(f64::cos),
            sin: angles(f64::sin),
        });
        let width = if ratio == Some(4) { 2 * dim } else { dim };
        let layer = Layer {
            cos: angles(f64::cos),
            sin: angles(f64::sin),
            indices: (0..tokens as i32).flat_map(list).collect(),
            slots: 3 + entries,
            compression,
            num_heads: heads,
            eps: 1e-6,
            softmax_scale: 0.5,
        };
        let shapes: [(&str, &[usize], f64); 14] = [
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
            ("wkv_c", &[width, hidden], 0.4),
            ("wgate_c", &[width, hidden], 0.4),
            ("ape", &[ratio.unwrap_or(1), width], 1.0),
            ("c_norm", &[dim], 1.0),
        ];
        let drawn = shapes
            .into_iter()
            .fold(Named::new(), |all, (name, shape, size)| all.with(name, draw.bf16(shape, size)));
        (layer, drawn)
    }

    #[test]
    fn written_gradients_equal_those_of_automatic_differentiation() -> Result<()> {
        for ratio in [None, Some(4), Some(2)] {
            assert_gradients_of(&case(ratio))?;
        }
        Ok(())
    }

    fn assert_gradients_of((layer, named): &(Layer, Named)) -> Result<()> {
        let gradients = backward(layer, named, &mut Rounding::exact())?;
        let mut of = vec![
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
        if layer.compression.is_some() {
            let of_entries = [("wkv_c", "dwkv_c"), ("wgate_c", "dwgate_c"), ("ape", "dape")];
            of.extend(of_entries.into_iter().chain([("c_norm", "dc_norm")]));
        }
        let objective = |inputs: &Named| {
            let outputs = forward(layer, inputs, &mut Rounding::exact())?;
            Ok((outputs.tensor("y")? * inputs.tensor("dy")?)?)
        };
        let automatic = differentiated(named, &of, objective)?;
        for (_, gradient) in of {
            // Each element depends on a few hundred products of values of size 1.
            let bound = (automatic.tensor(gradient)?.ones_like()? * (65536.0 * UNIT_ROUNDOFF))?;
            let (written, automatic) = (gradients.tensor(gradient)?, automatic.tensor(gradient)?);
            assert_within(gradient, written, automatic, &bound);
        }
        Ok(())
    }

    #[test]
    fn a_token_depends_on_the_tokens_of_its_window_and_of_entries_that_it_sees() -> Result<()> {
        let (layer, named) = case(None);
        assert_eq!(
            reach(&layer, &named, 7)?,
            [false, false, false, false, false, true, true, true, false]
        );
        // Two entries of four tokens each, whose groups overlap.
        let (layer, named) = case(Some(4));
        assert_eq!(
            reach(&layer, &named, 7)?,
            [true, true, true, true, true, true, true, true, false]
        );
        assert_eq!(
            reach(&layer, &named, 6)?[..],
            [true, true, true, true, true, true, true, false, false]
        );
        // One entry of four tokens, which the fourth of a window of three does not see.
        let (layer, named) = case(Some(4));
        assert_eq!(reach(&layer, &named, 2)?[3..], [false; 6]);
        Ok(())
    }

    /// Which tokens a token's output depends on.
    fn reach(layer: &Layer, named: &Named, token: usize) -> Result<Vec<bool>> {
        let output = |inputs: &Named| -> Result<Tensor> {
            Ok(forward(layer, inputs, &mut Rounding::exact())?.tensor("y")?.narrow(0, token, 1)?)
        };
        let (before, h) = (output(named)?, named.tensor("h")?);
        (0..h.dim(0)?)
            .map(|changed| {
                let row = f64_tensor(&[2.0; 6], &[1, 6]);
                let h = h.slice_assign(&[changed..changed + 1, 0..6], &row)?;
                let moved = (output(&named.clone().with("h", h))? - &before)?.abs()?;
                Ok(crate::precision::values(&moved)?.iter().any(|x| *x > 0.0))
            })
            .collect()
    }
}
