//! The indexer's logits of selected keys, recomputed for its loss (training 1, 6).
//!
//! ```text
//! logits[t, j] = sm_scale sum_h w[t, h] max(q[t, h] . k[i(j)], 0)
//! ```
//!
//! for each valid slot j of token t, with `i(j)` the row of its key ([`crate::indexer::ranking`]).
//! Other slots are -infinity and read nothing. Values and rounding points are those of
//! [`crate::indexer::indexer_logits`], so the loss uses the logits by which the keys were selected.

use candle_core::Tensor;

use crate::error::Result;
use crate::indexer::indexer_logits::{self, Keys};
use crate::indexer::ranking::{Ranking, Sequences};
use crate::precision::{Accumulator, Rounding};

/// Inputs of the operator, widened to f64.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// `[num_tokens, num_heads, head_dim]`, stored in bf16.
    pub q: Tensor,
    /// `[num_keys, head_dim]`, stored in bf16.
    pub k: Tensor,
    /// `[num_tokens, num_heads]`, stored in f32 or bf16: the heads' weights.
    pub w: Tensor,
    /// The valid slots and their keys.
    pub ranking: Ranking,
    /// `None` is one sequence of all tokens and keys.
    pub sequences: Option<Sequences>,
    /// Multiplies the logits; above 0.
    pub sm_scale: f64,
}

/// `[num_tokens, slots]`, stored in f32.
///
/// # Errors
/// Tensors or lists whose shapes do not match.
pub fn forward(inputs: &Inputs, rounding: &mut Rounding) -> Result<Tensor> {
    let Inputs { q, k, w, ranking, sequences, sm_scale } = inputs.clone();
    let (columns, keys) = (ranking.slots(), Keys::Selected { ranking, sequences });
    let all = indexer_logits::Inputs { q, w, k, k_scales: None, keys, columns, sm_scale };
    indexer_logits::forward(&all, Accumulator::F32, rounding)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::precision::values;
    use crate::testing::Draw;

    const SHAPE: [usize; 4] = [5, 3, 7, 6];

    /// Whole numbers, so that sums are exact in any order.
    fn whole(numbers: Tensor) -> Tensor {
        (numbers * 4.0).and_then(|x| x.round()).expect("numbers")
    }

    fn inputs(
        indices: Vec<i32>,
        topk_length: Option<Vec<i32>>,
        sequences: Option<Sequences>,
    ) -> Inputs {
        let [tokens, heads, keys, width] = SHAPE;
        let mut draw = Draw::new(3);
        Inputs {
            q: whole(draw.normal(&[tokens, heads, width], 1.0)),
            k: whole(draw.normal(&[keys, width], 1.0)),
            w: whole(draw.normal(&[tokens, heads], 1.0)),
            ranking: Ranking::Selected {
                topk: indices.len() / tokens,
                indices,
                topk_length,
                global: false,
            },
            sequences,
            sm_scale: 0.25,
        }
    }

    /// The definition, slot by slot.
    fn by_definition(inputs: &Inputs, rows: &[Option<usize>]) -> Result<Vec<f64>> {
        let [_, heads, _, width] = SHAPE;
        let (q, k, w) = (values(&inputs.q)?, values(&inputs.k)?, values(&inputs.w)?);
        let slots = rows.len() / SHAPE[0];
        let logit = |(at, row): (usize, &Option<usize>)| {
            let (token, Some(row)) = (at / slots, row) else { return f64::NEG_INFINITY };
            let head = |h: usize| {
                let of_q = &q[(token * heads + h) * width..][..width];
                let product: f64 =
                    of_q.iter().zip(&k[row * width..][..width]).map(|(q, k)| q * k).sum();
                w[token * heads + h] * product.max(0.0)
            };
            0.25 * (0..heads).map(head).sum::<f64>()
        };
        Ok(rows.iter().enumerate().map(logit).collect())
    }

    #[test]
    fn logits_are_those_of_the_listed_keys_and_minus_infinity_where_a_slot_is_not_valid()
    -> Result<()> {
        let lists = vec![6, 0, 0, 3, -1, 2, 7, 1, i32::MIN, 5, 5, i32::MAX, 4, 2, 1];
        let inputs = inputs(lists, Some(vec![3, 2, 9, -1, 1]), None);
        let rows = [
            Some(6),
            Some(0),
            Some(0),
            Some(3),
            None,
            None,
            None,
            Some(1),
            None,
            None,
            None,
            None,
            Some(4),
            None,
            None,
        ];
        let logits = forward(&inputs, &mut Rounding::exact())?;
        assert_eq!(values(&logits)?, by_definition(&inputs, &rows)?);
        Ok(())
    }

    #[test]
    fn indices_count_from_the_first_key_of_their_own_sequence() -> Result<()> {
        let sequences = Sequences { cu_q: vec![0, 2, 4], cu_k: vec![0, 3, 7] };
        let inputs = inputs(vec![0, 2, 3, 1, 0, 3, 4, 1, 0, 1], None, Some(sequences));
        // The last token belongs to no sequence.
        let rows = [Some(0), Some(2), None, Some(1), Some(3), Some(6), None, Some(4), None, None];
        let logits = forward(&inputs, &mut Rounding::exact())?;
        assert_eq!(values(&logits)?, by_definition(&inputs, &rows)?);
        Ok(())
    }
}
