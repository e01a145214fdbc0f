//! The position of each router slot when rows are sorted by expert (inference 11.3).
//!
//! ```text
//! slot             = token * topk + its place;  it counts when its entry of topk_indices is one of 0 .. num_experts - 1
//! counts[e]        = slots of expert e
//! expert_offsets   = 0 and the running sums of the counts, each rounded up to a multiple of the alignment
//! position of slot = expert_offsets[e] + how many slots of expert e come before it
//! ```
//!
//! A token that names an expert twice has two of its rows. Nothing is rounded: only one answer is
//! right.

use candle_core::{Device, Tensor};

use crate::error::{Result, require_that};
use crate::named::Named;
use crate::precision::values;

/// The value of rows without a slot, and the position of a slot that does not count.
const NONE: f64 = -1.0;

/// `counts` `[num_experts]`, `expert_offsets` `[num_experts + 1]`, `token_topk_to_pos`
/// `[num_tokens, topk]` and, each `[num_positions]`, `pos_to_expert`, `pos_to_token` and
/// `pos_to_token_topk`. All are stored in i32, as is the input `topk_indices` `[num_tokens, topk]`.
/// The value -1 is the position of a slot that does not count, and the value of all maps in a row
/// without a slot.
///
/// # Errors
/// Fewer positions than required rows; an alignment of 0.
pub fn forward(
    inputs: &Named,
    num_experts: usize,
    alignment: usize,
    num_positions: usize,
) -> Result<Named> {
    let [num_tokens, topk] =
        inputs.extents(["num_tokens", "topk"], &[(&["topk_indices"], &["num_tokens", "topk"])])?;
    require_that("alignment", alignment, alignment > 0, "rows are aligned to 1 at least")?;
    let experts = values(inputs.tensor("topk_indices")?)?;
    let slots_of = |expert: usize| {
        experts.iter().enumerate().filter(move |slot| *slot.1 == expert as f64).map(|slot| slot.0)
    };
    let (mut counts, mut offsets) = (Vec::new(), vec![0.0]);
    let mut positions = vec![NONE; experts.len()];
    let mut rows = vec![[NONE; 3]; num_positions];
    let mut end = 0;
    for expert in 0..num_experts {
        let slots: Vec<usize> = slots_of(expert).collect();
        let first = end;
        end += slots.len().next_multiple_of(alignment);
        require_that("num_positions", num_positions, end <= num_positions, "every row needs one")?;
        for (position, &slot) in (first..).zip(&slots) {
            positions[slot] = position as f64;
            rows[position] = [expert as f64, (slot / topk) as f64, slot as f64];
        }
        counts.push(slots.len() as f64);
        offsets.push(end as f64);
    }
    let list = |numbers: Vec<f64>| Tensor::new(numbers, &Device::Cpu);
    let column = |number: usize| list(rows.iter().map(|row| row[number]).collect());
    let maps = Named::new().with("counts", list(counts)?).with("expert_offsets", list(offsets)?);
    let maps = maps
        .with("token_topk_to_pos", Tensor::from_vec(positions, (num_tokens, topk), &Device::Cpu)?);
    let maps = maps.with("pos_to_expert", column(0)?).with("pos_to_token", column(1)?);
    Ok(maps.with("pos_to_token_topk", column(2)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Draw, f64_tensor};

    fn of(experts: &[f64], topk: usize) -> Named {
        Named::new().with("topk_indices", f64_tensor(experts, &[experts.len() / topk, topk]))
    }

    fn list(maps: &Named, name: &'static str) -> Vec<f64> {
        values(maps.tensor(name).expect("a map")).expect("numbers")
    }

    #[test]
    fn rows_are_sorted_by_expert_then_by_slot_and_what_is_left_is_nobodys() {
        // Token 0 names expert 1 twice, and no token names expert 0; -1 and 3 are not experts.
        let maps = forward(&of(&[1.0, 1.0, -1.0, 2.0, 3.0, 1.0], 2), 3, 2, 8).expect("it fits");
        assert_eq!(list(&maps, "counts"), [0.0, 3.0, 1.0]);
        assert_eq!(list(&maps, "expert_offsets"), [0.0, 0.0, 4.0, 6.0]);
        assert_eq!(list(&maps, "token_topk_to_pos"), [0.0, 1.0, -1.0, 4.0, -1.0, 2.0]);
        assert_eq!(list(&maps, "pos_to_expert"), [1.0, 1.0, 1.0, -1.0, 2.0, -1.0, -1.0, -1.0]);
        assert_eq!(list(&maps, "pos_to_token"), [0.0, 0.0, 2.0, -1.0, 1.0, -1.0, -1.0, -1.0]);
        assert_eq!(list(&maps, "pos_to_token_topk"), [0.0, 1.0, 5.0, -1.0, 3.0, -1.0, -1.0, -1.0]);
    }

    #[test]
    fn maps_are_inverses_of_each_other_and_offsets_follow_from_counts() {
        let mut draw = Draw::new(1);
        let experts: Vec<f64> = (0..37 * 6).map(|_| draw.below(13) as f64 - 2.0).collect();
        let maps = forward(&of(&experts, 6), 9, 8, 37 * 6 + 7 * 9).expect("it fits");
        let (positions, slots) =
            (list(&maps, "token_topk_to_pos"), list(&maps, "pos_to_token_topk"));
        let counted = positions.iter().enumerate().filter(|(_, position)| **position >= 0.0);
        assert!(
            counted.clone().count() > 100
                && counted.clone().all(|(slot, &at)| slots[at as usize] == slot as f64)
        );
        assert_eq!(slots.iter().filter(|slot| **slot >= 0.0).count(), counted.count());
        let (counts, offsets) = (list(&maps, "counts"), list(&maps, "expert_offsets"));
        let ends =
            counts.iter().zip(&offsets).map(|(count, offset)| offset + (count / 8.0).ceil() * 8.0);
        assert!(ends.eq(offsets[1..].iter().copied()));
    }

    #[test]
    fn no_tokens_are_legal_and_too_few_positions_are_refused() {
        let maps = forward(&of(&[], 2), 3, 4, 0).expect("no rows");
        assert_eq!((list(&maps, "counts"), list(&maps, "pos_to_token")), (vec![0.0; 3], vec![]));
        assert!(forward(&of(&[1.0, 2.0], 2), 3, 4, 7).is_err());
        assert!(forward(&of(&[1.0, 2.0], 2), 3, 0, 7).is_err());
    }
}
