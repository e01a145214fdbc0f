//! Pools tokens into compressed entries while sequences grow (inference 6, 6.2).
//!
//! ```text
//! state[slot][t mod num_rows] = (C[t], S[t])        of each token of a call; S[t] = Z[t] + ape[t mod ratio]
//! ```
//!
//! An entry whose last token belongs to the call is made from its tokens as in
//! [`compressor`](crate::cache::compressor). It takes tokens of the call directly, and earlier ones
//! from the state. Tokens before position 0 are absent, whatever the state holds. When tokens from
//! a position on were rejected, the position comes again and overwrites its row. Of several tokens
//! of one call with one row, the last one stays. A sequence without a slot writes nothing and makes
//! no entry, and rows without an entry are zero.
//!
//! # Rounding points
//!
//! Those of `compressor`; S is an fp32 value, both in the state and outside of it.

use candle_core::Tensor;

use crate::cache::compressor::{Finish, Pooling, halves_below_each_other, scattered};
use crate::error::{Result, require, require_that, wrong_shape};
use crate::named::Named;
use crate::precision::Rounding;

/// Inputs of the operator.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// `[num_tokens, width]`, stored in f32: the tokens of all calls.
    pub kv: Tensor,
    /// As `kv`.
    pub gate: Tensor,
    /// `[ratio, width]`, stored in f32.
    pub ape: Tensor,
    /// `[num_slots, num_rows, 2 width]`, stored in f32, before the first call: C, then S.
    pub state: Tensor,
    /// Norm and rotation.
    pub finish: Finish,
    /// Rows of `entries`.
    pub num_entries: usize,
    /// The tokens of the sequences, call by call.
    pub pieces: Vec<Piece>,
}

/// The tokens of one sequence in one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The first of them, as an index into the tokens of all calls.
    pub token: usize,
    /// The number of tokens.
    pub num_tokens: usize,
    /// The position of the first one.
    pub position: usize,
    /// The sequence's slot, if it exists.
    pub slot: Option<usize>,
    /// The first row of its entries.
    pub entry: usize,
    /// Rows of its entries.
    pub num_entries: usize,
}

/// An entry: its row, its position, and where the tokens of its slots are: rows of kv, then rows of
/// the state.
struct Made {
    row: usize,
    position: usize,
    sources: Vec<Option<usize>>,
}

/// `entries` `[num_entries, head_dim]`, stored as the inputs define, and the `state` after the last
/// call.
///
/// # Errors
/// A tensor of the wrong shape, a piece outside of the tensors.
pub fn forward(inputs: &Inputs, rounding: &mut Rounding) -> Result<Named> {
    let dims = inputs.check()?;
    let (made, last) = dims.simulate(&inputs.pieces);
    let ape: Vec<i64> = dims.ape_rows(&inputs.pieces);
    let ape = Tensor::from_vec(ape, dims.num_tokens, inputs.kv.device())?;
    let state = inputs.state.reshape((dims.num_slots * dims.num_rows, 2 * dims.width))?;
    // Without tokens no row of ape exists.
    let (mut value, mut score) =
        (state.narrow(1, 0, dims.width)?, state.narrow(1, dims.width, dims.width)?);
    if dims.num_tokens > 0 {
        let own = rounding.f32_apart(&(&inputs.gate + inputs.ape.index_select(&ape, 0)?)?)?;
        (value, score) = (Tensor::cat(&[&inputs.kv, &value], 0)?, Tensor::cat(&[&own, &score], 0)?);
    }
    let state = Tensor::cat(&[&value, &score], 1)?;
    let order: Vec<i64> = last.iter().map(|&row| row as i64).collect();
    let state = if order.is_empty() {
        inputs.state.clone()
    } else {
        let order = Tensor::from_vec(order, dims.num_slots * dims.num_rows, state.device())?;
        state.index_select(&order, 0)?.reshape(inputs.state.shape())?
    };
    let rows = dims.entries(inputs, &made, &value, &score, rounding)?;
    let entries = scattered(&rows, made.iter().map(|made| made.row).zip(0..), inputs.num_entries)?;
    Ok(Named::new().with("entries", entries).with("state", state))
}

struct Dims {
    num_tokens: usize,
    num_slots: usize,
    num_rows: usize,
    ratio: usize,
    width: usize,
    head_dim: usize,
}

impl Inputs {
    fn check(&self) -> Result<Dims> {
        let &[num_slots, num_rows, state_width] = self.state.dims() else {
            return Err(wrong_shape("state", "[num_slots, num_rows, 2 width]", &self.state));
        };
        let (num_tokens, width) = self.kv.dims2()?;
        let (ratio, head_dim) = (self.ape.dim(0)?, self.finish.norm_weight.elem_count());
        require("gate", &self.gate, &[num_tokens, width])?;
        require("ape", &self.ape, &[ratio, width])?;
        require("state", &self.state, &[num_slots, num_rows, 2 * width])?;
        if width != head_dim && width != 2 * head_dim {
            return Err(wrong_shape("kv", "[num_tokens, head_dim or 2 head_dim]", &self.kv));
        }
        let dims = Dims { num_tokens, num_slots, num_rows, ratio, width, head_dim };
        require_that(
            "num_rows",
            num_rows,
            num_rows >= dims.slots(),
            "the state has the slots of an entry",
        )?;
        debug_assert_eq!(state_width, 2 * width);
        for piece in &self.pieces {
            let within = piece.token + piece.num_tokens <= num_tokens
                && piece.entry + piece.num_entries <= self.num_entries;
            require_that(
                "pieces",
                format!("{piece:?}"),
                within,
                "it is within kv and the entries",
            )?;
            require_that(
                "pieces",
                format!("{piece:?}"),
                piece.slot.is_none_or(|s| s < num_slots),
                "its slot exists",
            )?;
        }
        Ok(dims)
    }
}

impl Dims {
    fn slots(&self) -> usize {
        if self.width > self.head_dim { 2 * self.ratio } else { self.ratio }
    }

    /// For each token its row of ape; the first row for tokens of no sequence.
    fn ape_rows(&self, pieces: &[Piece]) -> Vec<i64> {
        let mut rows = vec![0; self.num_tokens];
        for piece in pieces {
            let positions = piece.position..piece.position + piece.num_tokens;
            positions
                .zip(&mut rows[piece.token..])
                .for_each(|(position, row)| *row = (position % self.ratio) as i64);
        }
        rows
    }

    /// The entries that the pieces make one after the other, and for each row of the state where
    /// its values are.
    fn simulate(&self, pieces: &[Piece]) -> (Vec<Made>, Vec<usize>) {
        let mut rows: Vec<usize> =
            (0..self.num_slots * self.num_rows).map(|row| self.num_tokens + row).collect();
        let mut all = Vec::new();
        for piece in pieces {
            let Some(slot) = piece.slot else { continue };
            let row_of = |position: usize| slot * self.num_rows + position % self.num_rows;
            let end = piece.position + piece.num_tokens;
            let first = piece.position / self.ratio;
            for (number, row) in
                (first..end / self.ratio).zip(piece.entry..piece.entry + piece.num_entries)
            {
                let end = (number + 1) * self.ratio;
                let source = |slot: usize| {
                    let position = (end + slot).checked_sub(self.slots())?;
                    let own = position.checked_sub(piece.position);
                    Some(own.map_or_else(|| rows[row_of(position)], |own| piece.token + own))
                };
                let sources = (0..self.slots()).map(source).collect();
                all.push(Made { row, position: number * self.ratio, sources });
            }
            for own in 0..piece.num_tokens {
                rows[row_of(piece.position + own)] = piece.token + own;
            }
        }
        (all, rows)
    }

    fn entries(
        &self,
        inputs: &Inputs,
        made: &[Made],
        value: &Tensor,
        score: &Tensor,
        rounding: &mut Rounding,
    ) -> Result<Tensor> {
        let (count, slots) = (made.len(), self.slots());
        if count == 0 {
            return Ok(Tensor::zeros((0, self.head_dim), value.dtype(), value.device())?);
        }
        // With two halves, the first half of the slots has the first half of its tokens.
        let total = value.dim(0)?;
        let place = |slot: usize, source: usize| {
            if self.slots() > self.ratio && slot >= self.ratio { total + source } else { source }
        };
        let of_entry = |made: &Made| {
            let sources = made.sources.iter().enumerate();
            sources
                .map(|(slot, source)| source.map(|source| place(slot, source)))
                .collect::<Vec<_>>()
        };
        let places: Vec<Option<usize>> = made.iter().flat_map(of_entry).collect();
        let indices: Vec<i64> = places.iter().map(|place| place.unwrap_or(0) as i64).collect();
        let indices = Tensor::from_vec(indices, count * slots, value.device())?;
        let gathered = |tensor: &Tensor| -> Result<Tensor> {
            let halves =
                halves_below_each_other(tensor, self.head_dim)?.index_select(&indices, 0)?;
            Ok(halves.reshape((count, slots, self.head_dim))?)
        };
        let there = places.iter().map(|place| u8::from(place.is_some())).collect();
        let pooling = Pooling::of_slots(there, &gathered(value)?, &gathered(score)?, rounding)?;
        let positions = made.iter().map(|made| made.position as i64).collect();
        inputs.finish.entries(&pooling.pooled, positions, rounding)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::compressor::{self, Epilogue};
    use crate::format::Format;
    use crate::precision::values;
    use crate::projections::rope::{YarnParameters, inv_freq_f32, table};
    use crate::testing::{Draw, f64_tensor};

    /// One sequence in these pieces: tokens that stay, and tokens that are rejected. The state is
    /// that of another sequence.
    fn pieces(chunks: &[[usize; 2]], ratio: usize) -> (Vec<Piece>, Vec<usize>) {
        let (mut pieces, mut order, mut token, mut position, mut entry) =
            (Vec::new(), Vec::new(), 0, 0, 0);
        for &[stay, rejected] in chunks {
            let num_tokens = stay + rejected;
            let num_entries = (position + num_tokens) / ratio - position / ratio;
            pieces.push(Piece { token, num_tokens, position, slot: Some(1), entry, num_entries });
            order.extend(
                (0..(position + stay) / ratio - position / ratio).map(|number| entry + number),
            );
            (token, position, entry) = (token + num_tokens, position + stay, entry + num_entries);
        }
        (pieces, order)
    }

    fn stream(
        chunks: &[[usize; 2]],
        whole: &compressor::Inputs,
        num_rows: usize,
    ) -> (Inputs, Vec<usize>) {
        let (ratio, width) = whole.ape.dims2().unwrap();
        let (pieces, order) = pieces(chunks, ratio);
        let mut draw = Draw::new(77);
        let rejected = draw.normal(&[1, width], 9.0);
        let rows: Vec<Tensor> = pieces
            .iter()
            .zip(chunks)
            .flat_map(|(piece, &[stay, drafts])| {
                let kept = whole.kv.narrow(0, piece.position, stay).unwrap();
                std::iter::once(kept)
                    .chain((0..drafts).map(|_| rejected.clone()))
                    .collect::<Vec<_>>()
            })
            .collect();
        let gates: Vec<Tensor> = pieces
            .iter()
            .zip(chunks)
            .flat_map(|(piece, &[stay, drafts])| {
                let kept = whole.gate.narrow(0, piece.position, stay).unwrap();
                std::iter::once(kept)
                    .chain((0..drafts).map(|_| rejected.clone()))
                    .collect::<Vec<_>>()
            })
            .collect();
        let num_entries = pieces.last().map_or(0, |piece| piece.entry + piece.num_entries);
        let inputs = Inputs {
            kv: Tensor::cat(&rows, 0).unwrap(),
            gate: Tensor::cat(&gates, 0).unwrap(),
            ape: whole.ape.clone(),
            state: draw.normal(&[2, num_rows, 2 * width], 5.0),
            finish: whole.finish.clone(),
            num_entries,
            pieces,
        };
        (inputs, order)
    }

    fn whole(
        num_tokens: usize,
        ratio: usize,
        head_dim: usize,
        overlaps: bool,
    ) -> compressor::Inputs {
        let (mut draw, width) = (Draw::new(5), if overlaps { 2 * head_dim } else { head_dim });
        let inv_freq =
            inv_freq_f32(&YarnParameters { rope_dim: 4, ..YarnParameters::compress() }).unwrap();
        let (cos, sin) = table(&inv_freq, &(0..64).collect::<Vec<_>>()).unwrap();
        let norm_weight = draw.normal(&[head_dim], 1.0);
        compressor::Inputs {
            kv: draw.normal(&[num_tokens, width], 2.0),
            gate: draw.normal(&[num_tokens, width], 2.0),
            ape: draw.normal(&[ratio, width], 1.0),
            cu_seqlens: vec![0, num_tokens as i32],
            cu_entries: vec![0, (num_tokens / ratio) as i32],
            num_entries: num_tokens / ratio,
            finish: Finish {
                norm_weight,
                cos,
                sin,
                eps: 1e-6,
                stored: Format::BF16,
                epilogue: Epilogue::None,
            },
        }
    }

    #[test]
    fn whatever_the_chunks_and_whatever_was_rejected_the_entries_are_those_of_the_whole_sequence()
    -> Result<()> {
        for (ratio, overlaps) in [(4, true), (3, false)] {
            let whole = whole(23, ratio, 8, overlaps);
            let expected =
                compressor::forward(&whole, &mut Rounding::exact())?.tensor("entries")?.clone();
            let chunked = |border: usize| vec![[border, 0], [23 - border, 0]];
            let ones = vec![[1, 0]; 23];
            let rejecting = vec![[5, 2], [1, 2], [1, 2], [3, 1], [4, 2], [2, 2], [7, 0]];
            for chunks in (1..23).map(chunked).chain([ones, rejecting]) {
                let (inputs, order) = stream(&chunks, &whole, 10);
                let entries = values(forward(&inputs, &mut Rounding::exact())?.tensor("entries")?)?;
                let kept: Vec<f64> =
                    order.iter().flat_map(|&row| entries[8 * row..8 * row + 8].to_vec()).collect();
                assert_eq!(kept, values(&expected)?, "{chunks:?}");
            }
        }
        Ok(())
    }

    #[test]
    fn the_state_has_the_last_tokens_and_other_slots_keep_theirs() -> Result<()> {
        let whole = whole(23, 4, 8, true);
        let (inputs, _) = stream(&[[23, 0]], &whole, 10);
        let state = forward(&inputs, &mut Rounding::exact())?.tensor("state")?.clone();
        assert_eq!(values(&state.narrow(0, 0, 1)?)?, values(&inputs.state.narrow(0, 0, 1)?)?);
        for position in 13..23 {
            let row = state.narrow(0, 1, 1)?.narrow(1, position % 10, 1)?.flatten_all()?;
            let (kv, gate) =
                (inputs.kv.narrow(0, position, 1)?, inputs.gate.narrow(0, position, 1)?);
            let score = (gate + inputs.ape.narrow(0, position % 4, 1)?)?;
            assert_eq!(
                values(&row)?,
                values(&Tensor::cat(&[kv, score], 1)?.flatten_all()?)?,
                "{position}"
            );
        }
        Ok(())
    }

    #[test]
    fn a_sequence_without_a_slot_does_nothing_and_bad_inputs_are_refused_by_name() -> Result<()> {
        let whole = whole(12, 4, 8, true);
        let (mut inputs, _) = stream(&[[12, 0]], &whole, 8);
        inputs.pieces[0].slot = None;
        let outputs = forward(&inputs, &mut Rounding::exact())?;
        assert!(values(outputs.tensor("entries")?)?.iter().all(|x| *x == 0.0));
        assert_eq!(values(outputs.tensor("state")?)?, values(&inputs.state)?);
        let refused =
            |inputs: Inputs| forward(&inputs, &mut Rounding::exact()).unwrap_err().to_string();
        let far = Piece { slot: Some(2), ..inputs.pieces[0] };
        assert!(refused(Inputs { pieces: vec![far], ..inputs.clone() }).contains("pieces"));
        assert!(
            refused(Inputs { state: f64_tensor(&[0.0; 64], &[1, 2, 32]), ..inputs.clone() })
                .contains("num_rows")
        );
        assert!(refused(Inputs { gate: inputs.kv.narrow(0, 0, 1)?, ..inputs }).contains("gate"));
        Ok(())
    }
}
