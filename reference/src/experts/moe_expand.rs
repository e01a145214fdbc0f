//! Copies rows of tokens to rows of experts, and sums them back (inference 11.3).
//!
//! ```text
//! y[token_topk_to_pos[t][k]] = x[t] for every slot that has a position;  0 in rows whose pos_to_token is negative
//! dx[t] = sum over the slots k of t that have a position of dy[token_topk_to_pos[t][k]]
//! ```
//!
//! A position outside of `0 .. num_positions` is not valid. The contents of a row without a slot
//! are never used.
//!
//! # Rounding points
//!
//! Rows are copied. A sum over slots is an fp32 sum in their order; it is rounded once to the type
//! in which it is stored.

use candle_core::{DType, Device, Tensor};

use crate::error::{Result, require_that};
use crate::named::Named;
use crate::precision::{Rounding, values};
use crate::select::{spread, unless};

/// `y` `[num_positions, hidden_size]`, stored in the type of `x`, of these inputs:
///
/// - `x` `[num_tokens, hidden_size]`, stored in bf16 or f32;
/// - `token_topk_to_pos` `[num_tokens, topk]` and `pos_to_token` `[num_positions]`, stored in i32:
///   the maps of [`crate::experts::moe_map::forward`].
///
/// # Errors
/// Tensors whose shapes do not match; a row without a slot that is not marked as such, or the
/// reverse.
pub fn forward(inputs: &Named) -> Result<Named> {
    let slots = Slots::new(inputs)?;
    let x = inputs.tensor("x")?;
    let tokens: Vec<u32> =
        slots.token_of_row.iter().map(|token| token.unwrap_or(0) as u32).collect();
    let rows = select_rows(x, tokens)?;
    Ok(Named::new().with("y", slots.without_unused_rows(&rows)?))
}

/// `dx` `[num_tokens, hidden_size]`, stored in the type of `x`, for the maps of [`forward`] and
/// `dy` `[num_positions, hidden_size]`, stored in the type of y.
///
/// # Errors
/// As [`forward`].
pub fn backward(inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    let slots = Slots::new(inputs)?;
    let rows = slots.rows_of_slots(inputs.tensor("dy")?)?;
    Ok(Named::new().with("dx", slots.sum(&rows, rounding)?))
}

/// The rows with these indices.
fn select_rows(tensor: &Tensor, rows: Vec<u32>) -> Result<Tensor> {
    let (count, width) = (rows.len(), tensor.dim(1)?);
    if tensor.dim(0)? == 0 {
        return Ok(Tensor::zeros((count, width), DType::F64, &Device::Cpu)?);
    }
    Ok(tensor.index_select(&Tensor::from_vec(rows, count, &Device::Cpu)?, 0)?)
}

/// The row of each slot, and the token of each row.
pub(crate) struct Slots {
    topk: usize,
    row_of_slot: Vec<Option<usize>>,
    token_of_row: Vec<Option<usize>>,
}

impl Slots {
    /// Reads `token_topk_to_pos` and `pos_to_token`.
    pub(crate) fn new(inputs: &Named) -> Result<Self> {
        let of_tokens = ["num_tokens", "hidden_size"];
        let of_rows = ["num_positions", "hidden_size"];
        let tensors: [(&[_], &[_]); 4] = [
            (&["x", "dx", "shared", "dout"], &of_tokens),
            (&["y", "dy"], &of_rows),
            (&["token_topk_to_pos", "topk_weights"], &["num_tokens", "topk"]),
            (&["pos_to_token"], &["num_positions"]),
        ];
        let [num_positions, topk] = inputs.extents(["num_positions", "topk"], &tensors)?;
        let positions = values(inputs.tensor("token_topk_to_pos")?)?;
        let within = |position: f64| {
            (0.0..num_positions as f64).contains(&position).then_some(position as usize)
        };
        let row_of_slot: Vec<Option<usize>> = positions.into_iter().map(within).collect();
        let mut token_of_row = vec![None; num_positions];
        for (slot, row) in row_of_slot.iter().enumerate() {
            if let Some(row) = *row {
                token_of_row[row] = Some(slot / topk);
            }
        }
        let marks = values(inputs.tensor("pos_to_token")?)?;
        let agree =
            marks.iter().zip(&token_of_row).all(|(mark, token)| (*mark >= 0.0) == token.is_some());
        require_that("pos_to_token", "a map", agree, "its rows are those of the slots")?;
        Ok(Self { topk, row_of_slot, token_of_row })
    }

    fn num_tokens(&self) -> usize {
        self.row_of_slot.len() / self.topk.max(1)
    }

    /// 1 for a slot without a row, `[num_tokens, topk]`.
    pub(crate) fn unused(&self) -> Result<Tensor> {
        let unused: Vec<u8> = self.row_of_slot.iter().map(|row| u8::from(row.is_none())).collect();
        Ok(Tensor::from_vec(unused, (self.num_tokens(), self.topk), &Device::Cpu)?)
    }

    /// The rows of the slots, `[num_tokens, topk, hidden_size]`; 0 for a slot without a row.
    pub(crate) fn rows_of_slots(&self, rows: &Tensor) -> Result<Tensor> {
        let index: Vec<u32> = self.row_of_slot.iter().map(|row| row.unwrap_or(0) as u32).collect();
        let shape = (self.num_tokens(), self.topk, rows.dim(1)?);
        let rows = select_rows(rows, index)?.reshape(shape)?;
        unless(&spread(&self.unused()?.unsqueeze(2)?, shape)?, &rows, 0.0)
    }

    /// The values of each row's slot, `[num_positions, hidden_size]` from
    /// `[num_tokens, topk, hidden_size]`; 0 in a row without a slot.
    pub(crate) fn slots_of_rows(&self, numbers: &Tensor) -> Result<Tensor> {
        let mut slots = vec![0; self.token_of_row.len()];
        for (slot, row) in self.row_of_slot.iter().enumerate() {
            if let Some(row) = *row {
                slots[row] = slot as u32;
            }
        }
        let hidden_size = numbers.dim(2)?;
        let flat = numbers.reshape((self.row_of_slot.len(), hidden_size))?;
        self.without_unused_rows(&select_rows(&flat, slots)?)
    }

    fn without_unused_rows(&self, rows: &Tensor) -> Result<Tensor> {
        let unused: Vec<u8> =
            self.token_of_row.iter().map(|token| u8::from(token.is_none())).collect();
        let unused = Tensor::from_vec(unused, (self.token_of_row.len(), 1), &Device::Cpu)?;
        unless(&spread(&unused, rows.shape())?, rows, 0.0)
    }

    /// Sums over the slots of each token, with a term for each slot that has a row:
    /// `[num_tokens, hidden_size]`.
    pub(crate) fn sum(&self, terms: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
        let sum = terms.sum(1)?;
        let counts = self
            .row_of_slot
            .chunks(self.topk.max(1))
            .map(|rows| rows.iter().flatten().count() as f64);
        let counts = Tensor::from_vec(counts.collect(), (self.num_tokens(), 1), &Device::Cpu)?;
        rounding.accumulated_f32(&sum, &terms.sqr()?.sum(1)?, &spread(&counts, sum.shape())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experts::moe_map;
    use crate::testing::{Draw, UNIT_ROUNDOFF, assert_within, differentiated, dot, f64_tensor};

    /// Rows of tokens and of experts, with the maps of slots, some of which have no expert.
    pub(crate) fn case(
        seed: u64,
        [num_tokens, topk, num_experts, hidden_size]: [usize; 4],
    ) -> Result<Named> {
        let mut draw = Draw::new(seed);
        let experts: Vec<f64> =
            (0..num_tokens * topk).map(|_| draw.below(num_experts + 1) as f64 - 1.0).collect();
        let named = Named::new().with("topk_indices", f64_tensor(&experts, &[num_tokens, topk]));
        let num_positions = num_tokens * topk + 3 * num_experts;
        let maps = moe_map::forward(&named, num_experts, 4, num_positions)?;
        let named = Named::new().with("x", draw.bf16(&[num_tokens, hidden_size], 1.0));
        let named = named.with("dy", draw.bf16(&[num_positions, hidden_size], 1.0));
        let named = named.with("token_topk_to_pos", maps.tensor("token_topk_to_pos")?.clone());
        Ok(named.with("pos_to_token", maps.tensor("pos_to_token")?.clone()))
    }

    #[test]
    fn a_token_is_in_the_row_of_each_of_its_slots_and_other_rows_are_zero() -> Result<()> {
        let maps = Named::new()
            .with("token_topk_to_pos", f64_tensor(&[4.0, 0.0, -1.0, 9.0, 1.0, -7.0], &[3, 2]));
        let maps = maps.with("pos_to_token", f64_tensor(&[0.0, 2.0, -1.0, -1.0, 0.0], &[5]));
        let y =
            forward(&maps.clone().with("x", f64_tensor(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[3, 2])))?;
        assert_eq!(values(y.tensor("y")?)?, [1.0, 2.0, 5.0, 6.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0]);
        let nan = f64::NAN;
        let dy = f64_tensor(&[1.0, 2.0, 3.0, 4.0, nan, nan, nan, nan, 50.0, 60.0], &[5, 2]);
        let dx = backward(&maps.with("dy", dy), &mut Rounding::exact())?;
        assert_eq!(values(dx.tensor("dx")?)?, [51.0, 62.0, 0.0, 0.0, 3.0, 4.0]);
        Ok(())
    }

    #[test]
    fn the_backward_is_the_adjoint_of_the_forward_and_equals_autograd() -> Result<()> {
        let inputs = case(1, [11, 3, 5, 7])?;
        let gradients = backward(&inputs, &mut Rounding::exact())?;
        let dx = gradients.tensor("dx")?;
        let [left, right] = [
            dot(forward(&inputs)?.tensor("y")?, inputs.tensor("dy")?),
            dot(inputs.tensor("x")?, dx),
        ];
        assert!(
            (left - right).abs() <= 1000.0 * UNIT_ROUNDOFF * left.abs().max(1.0),
            "{left} {right}"
        );
        let automatic = differentiated(&inputs, &[("x", "dx")], |inputs| {
            Ok((forward(inputs)?.tensor("y")? * inputs.tensor("dy")?)?)
        })?;
        let bound = (dx.ones_like()? * (64.0 * UNIT_ROUNDOFF))?;
        assert_within("dx", dx, automatic.tensor("dx")?, &bound);
        Ok(())
    }

    #[test]
    fn no_tokens_and_no_positions_are_legal_and_maps_that_contradict_each_other_are_refused()
    -> Result<()> {
        let none = case(2, [0, 2, 3, 4])?;
        assert_eq!(values(forward(&none)?.tensor("y")?)?, [0.0; 36]);
        assert_eq!(backward(&none, &mut Rounding::exact())?.tensor("dx")?.dims(), [0, 4]);
        let inputs = case(3, [4, 2, 3, 4])?;
        let mut marks = values(inputs.tensor("pos_to_token")?)?;
        marks.iter_mut().for_each(|mark| *mark = -1.0);
        assert!(
            forward(&inputs.clone().with("pos_to_token", f64_tensor(&marks, &[marks.len()])))
                .is_err()
        );
        assert!(forward(&inputs.with("pos_to_token", f64_tensor(&[0.0], &[1]))).is_err());
        Ok(())
    }
}
