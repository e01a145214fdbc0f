//! Adds rows of experts to rows of tokens (inference 11.2, 11.3).
//!
//! ```text
//! out[t] = sum over the slots k of t that have a position p = token_topk_to_pos[t][k] of w y[p]  +  shared[t]
//! dy[p]  = w dout[t] for every such slot;  0 in rows that no slot has
//! dtopk_weights[t][k] = sum over the channels of dout[t] y[p];  0 for a slot without a position
//! ```
//!
//! w is the slot's weight, 1 where weights are absent. `shared[t]` is omitted where `shared` is
//! absent; its gradient is dout. The contents of a row without a slot, and the weight of a slot
//! without a position, are never used.
//!
//! # Rounding points
//!
//! Products are added fused, in fp32 and in the order of the slots; then the shared row is added. A
//! product in the gradient of a row is rounded once, to the type in which it is stored. The
//! gradient of a weight is an fp32 sum.

use candle_core::Tensor;

use crate::error::Result;
use crate::experts::moe_expand::Slots;
use crate::named::Named;
use crate::precision::Rounding;
use crate::select::{spread, unless};

/// `out` `[num_tokens, hidden_size]`, stored in the type of `y`, of these inputs:
///
/// - `y` `[num_positions, hidden_size]`, stored in bf16 or f32, and `shared`
///   `[num_tokens, hidden_size]`, stored in the same type, absent without a shared expert;
/// - `token_topk_to_pos` `[num_tokens, topk]` and `pos_to_token` `[num_positions]`, stored in i32:
///   the maps of [`crate::experts::moe_map::forward`];
/// - `topk_weights` `[num_tokens, topk]`, stored in f32; absent for ones.
///
/// # Errors
/// Tensors whose shapes do not match; maps that contradict each other.
pub fn forward(inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    let slots = Slots::new(inputs)?;
    let rows = slots.rows_of_slots(inputs.tensor("y")?)?;
    let terms = match weights(inputs, &slots)? {
        Some(weights) => rows.broadcast_mul(&weights)?,
        None => rows,
    };
    let routed = slots.sum(&terms, rounding)?;
    let out = match inputs.get("shared") {
        Some(shared) => (rounding.f32(&routed)? + shared)?,
        None => routed,
    };
    Ok(Named::new().with("out", rounding.f32(&out)?))
}

/// `dy`, stored in the type of `y`, and, where weights are present, `dtopk_weights`, stored in f32.
/// Each has the shape of its operand. The inputs are those of [`forward`] and `dout`, of the shape
/// and type of out.
///
/// # Errors
/// As [`forward`].
pub fn backward(inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    let slots = Slots::new(inputs)?;
    let rows = slots.rows_of_slots(inputs.tensor("y")?)?;
    let dout = spread(&inputs.tensor("dout")?.unsqueeze(1)?, rows.shape())?;
    let Some(weights) = weights(inputs, &slots)? else {
        return Ok(Named::new().with("dy", slots.slots_of_rows(&dout)?));
    };
    let dy = rounding.f32(&dout.broadcast_mul(&weights)?)?;
    let terms = rounding.f32(&(&dout * rows)?)?;
    // A product with an absent row is skipped: dout may be infinite.
    let dtopk_weights = unless(&slots.unused()?, &rounding.sum_f32(&terms, 2)?, 0.0)?;
    Ok(Named::new().with("dy", slots.slots_of_rows(&dy)?).with("dtopk_weights", dtopk_weights))
}

/// The weights `[num_tokens, topk, 1]`, if present; 0 for slots without a position.
fn weights(inputs: &Named, slots: &Slots) -> Result<Option<Tensor>> {
    let Some(weights) = inputs.get("topk_weights") else { return Ok(None) };
    Ok(Some(unless(&slots.unused()?, weights, 0.0)?.unsqueeze(2)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Precision;
    use crate::experts::moe_map;
    use crate::experts::swiglu;
    use crate::precision::values;
    use crate::testing::{
        Draw, Golden, UNIT_ROUNDOFF, assert_unbiased, assert_within, differentiated, dot,
        f64_tensor,
    };

    fn case(seed: u64, [num_tokens, topk, num_experts, hidden_size]: [usize; 4]) -> Result<Named> {
        let mut draw = Draw::new(seed);
        let experts: Vec<f64> =
            (0..num_tokens * topk).map(|_| draw.below(num_experts + 1) as f64 - 1.0).collect();
        let named = Named::new().with("topk_indices", f64_tensor(&experts, &[num_tokens, topk]));
        let num_positions = num_tokens * topk + 3 * num_experts;
        let maps = moe_map::forward(&named, num_experts, 4, num_positions)?;
        let named = Named::new().with("y", draw.bf16(&[num_positions, hidden_size], 1.0));
        let named = named.with("shared", draw.bf16(&[num_tokens, hidden_size], 1.0));
        let named = named.with("topk_weights", draw.bf16(&[num_tokens, topk], 1.0));
        let named = named.with("dout", draw.bf16(&[num_tokens, hidden_size], 1.0));
        let named = named.with("token_topk_to_pos", maps.tensor("token_topk_to_pos")?.clone());
        Ok(named.with("pos_to_token", maps.tensor("pos_to_token")?.clone()))
    }

    #[test]
    fn rows_are_weighted_and_added_and_the_shared_row_once() -> Result<()> {
        let nan = f64::NAN;
        let inputs =
            Named::new().with("token_topk_to_pos", f64_tensor(&[2.0, 0.0, -1.0, 5.0], &[2, 2]));
        let inputs = inputs.with("pos_to_token", f64_tensor(&[0.0, -1.0, 0.0], &[3]));
        let inputs = inputs.with("y", f64_tensor(&[1.0, 2.0, nan, nan, 3.0, 4.0], &[3, 2]));
        let inputs = inputs.with("dout", f64_tensor(&[1.0, 10.0, nan, nan], &[2, 2]));
        let out = |inputs: &Named| values(forward(inputs, &mut Rounding::exact())?.tensor("out")?);
        assert_eq!(out(&inputs)?, [4.0, 6.0, 0.0, 0.0]);
        let inputs = inputs.with("topk_weights", f64_tensor(&[10.0, 2.0, nan, nan], &[2, 2]));
        assert_eq!(out(&inputs)?, [32.0, 44.0, 0.0, 0.0]);
        let inputs = inputs.with("shared", f64_tensor(&[0.5, 0.25, 7.0, 8.0], &[2, 2]));
        assert_eq!(out(&inputs)?, [32.5, 44.25, 7.0, 8.0]);
        let gradients = backward(&inputs, &mut Rounding::exact())?;
        assert_eq!(values(gradients.tensor("dy")?)?, [2.0, 20.0, 0.0, 0.0, 10.0, 100.0]);
        assert_eq!(values(gradients.tensor("dtopk_weights")?)?, [43.0, 21.0, 0.0, 0.0]);
        Ok(())
    }

    #[test]
    fn explicit_backward_equals_autograd() -> Result<()> {
        let inputs = case(1, [9, 3, 4, 6])?;
        let explicit = backward(&inputs, &mut Rounding::exact())?;
        let automatic =
            differentiated(&inputs, &[("y", "dy"), ("topk_weights", "dtopk_weights")], |inputs| {
                Ok((forward(inputs, &mut Rounding::exact())?.tensor("out")?
                    * inputs.tensor("dout")?)?)
            })?;
        for (name, gradient) in explicit.into_tensors() {
            let bound = (gradient.ones_like()? * (256.0 * UNIT_ROUNDOFF))?;
            assert_within(name, &gradient, automatic.tensor(name)?, &bound);
        }
        Ok(())
    }

    #[test]
    fn no_tokens_are_legal_in_both_precisions() -> Result<()> {
        for precision in [Precision::Exact, Precision::Working { seed: 1 }] {
            let (inputs, rounding) = (case(2, [0, 2, 3, 4])?, &mut Rounding::new(precision));
            assert_eq!(forward(&inputs, rounding)?.tensor("out")?.dims(), [0, 4]);
            assert_eq!(values(backward(&inputs, rounding)?.tensor("dy")?)?, [0.0; 36]);
        }
        Ok(())
    }

    #[test]
    fn working_runs_scatter_around_the_exact_result() -> Result<()> {
        let inputs = case(3, [16, 6, 4, 12])?;
        let run = |precision| -> Result<Tensor> {
            Ok(forward(&inputs, &mut Rounding::new(precision))?.tensor("out")?.clone())
        };
        let runs =
            (0..64).map(|seed| run(Precision::Working { seed })).collect::<Result<Vec<_>>>()?;
        assert_unbiased("out", &run(Precision::Exact)?, &runs, 16);
        Ok(())
    }

    #[test]
    fn golden_experts_agree_when_their_rows_are_sorted_and_reduced() -> Result<()> {
        for (name, limit) in [("a", 1.5), ("b", 0.7), ("c", 10.0), ("one", 1.0)] {
            let golden = Golden::load(&format!("experts__{name}"));
            let (hidden, chosen) = (golden.f64("in.hidden"), golden.f64("in.top_k_index"));
            let (gate_up, down) =
                (golden.f64("param.experts.gate_up_proj"), golden.f64("param.experts.down_proj"));
            let (num_experts, width, topk) = (down.dim(0)?, down.dim(2)?, chosen.dim(1)?);
            let num_positions = chosen.elem_count() + 7 * num_experts;
            let maps = moe_map::forward(
                &Named::new().with("topk_indices", chosen),
                num_experts,
                8,
                num_positions,
            )?;
            let tokens = maps.tensor("pos_to_token")?.clone();
            let inputs =
                Named::new().with("token_topk_to_pos", maps.tensor("token_topk_to_pos")?.clone());
            let inputs = inputs.with("pos_to_token", tokens);
            let rows = crate::experts::moe_expand::forward(&inputs.clone().with("x", hidden))?
                .tensor("y")?
                .clone();
            let offsets = values(maps.tensor("expert_offsets")?)?;
            let mut outputs = Vec::new();
            for expert in 0..num_experts {
                let (first, end) = (offsets[expert] as usize, offsets[expert + 1] as usize);
                if end > first {
                    let both =
                        rows.narrow(0, first, end - first)?.matmul(&gate_up.get(expert)?.t()?)?;
                    let half =
                        |at: usize| Ok::<_, crate::Error>(both.narrow(1, at, width)?.contiguous()?);
                    let gated = Named::new().with("gate", half(0)?).with("up", half(width)?);
                    let y = swiglu::forward(&gated, limit, &mut Rounding::exact())?;
                    outputs.push(y.tensor("y")?.matmul(&down.get(expert)?.t()?)?);
                }
            }
            let used = offsets[num_experts] as usize;
            outputs.push(rows.narrow(0, used, num_positions - used)?);
            let inputs =
                inputs.with("y", Tensor::cat(&outputs, 0)?).with("dout", golden.f64("gout.y"));
            let inputs = inputs.with("topk_weights", golden.f64("in.top_k_weights"));
            let out = forward(&inputs, &mut Rounding::exact())?.tensor("out")?.clone();
            let dweights =
                backward(&inputs, &mut Rounding::exact())?.tensor("dtopk_weights")?.clone();
            assert_eq!(dweights.dim(1)?, topk);
            for (key, found) in [("out.y", out), ("grad.in.top_k_weights", dweights)] {
                let expected = golden.f64(key);
                let rms = (dot(&expected, &expected) / expected.elem_count() as f64).sqrt();
                let allowed = ((golden.storage_error(key) * 2.0)? + rms * 4096.0 * UNIT_ROUNDOFF)?;
                assert_within(&format!("{name} {key}"), &found, &expected, &allowed);
            }
        }
        Ok(())
    }
}
