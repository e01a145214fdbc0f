//! Attention of decoded tokens over a paged cache (inference 8 to 8.4).
//!
//! A request has `s_q` tokens. Each token has a list of slots in the store of raw rows (the window)
//! and a list of slots in the store of compressed entries. Both take part in one softmax. Slot j of
//! a list is *valid* when `j < clamp(length, 0, topk)` and its index names a row of its store. A
//! row is both K and V, as its bytes decode ([`RowFormat`]). With the rows kv of a token's valid
//! slots
//!
//! ```text
//! z[h, j] = softmax_scale * q[h] . kv[j]
//! lse[h]  = ln(sum_j exp z)                       natural, WITHOUT the sink; +inf when no slot is valid
//! out[h]  = sum_j exp(z - lse) kv[j] / (1 + exp(sink[h] - lse))                     0 when no slot is valid
//! ```
//!
//! # Rounding points
//!
//! Those of [`sparse_attention`] over the joined list. A list that is cut into parts is attended to
//! part by part without the sink, each part relative to its own maximum. The output and base-2
//! log-sum-exp of a part are stored in f32 and merged as in [`attention_combine`], where the sink
//! enters. The position of the cuts changes only rounding. With a few dominant keys this change is
//! as large as the rounding itself, because the cuts decide which weights are 1.
//!
//! [`sparse_attention`]: crate::attention::sparse_attention

use candle_core::{DType, Device, Tensor};

use crate::attention::attention_combine;
use crate::attention::sparse_attention as attention;
use crate::cache::kv_cache::RowFormat;
use crate::error::{Error, Result, require_f64, wrong_shape, wrong_value};
use crate::named::Named;
use crate::precision::Rounding;

/// A store of rows, and a list of its slots for each token.
#[derive(Debug, Clone)]
pub struct Store {
    /// The pages, one after the other.
    pub pages: Vec<u8>,
    /// Rows of a page, at least 1.
    pub page_size: usize,
    /// `[batch, s_q, topk]`: slots, `page * page_size + row`. Any value.
    pub indices: Vec<i32>,
    /// Slots of a list; may be 0.
    pub topk: usize,
    /// `[batch]`: leading slots that count, for all tokens of the request. Any value; clamped to
    /// `0 ..= topk`.
    pub length: Option<Vec<i32>>,
}

/// Inputs of the attention.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// `[batch, s_q, num_heads, head_dim]`, stored in bf16.
    pub q: Tensor,
    /// How the rows are stored.
    pub format: RowFormat,
    /// Raw rows.
    pub window: Store,
    /// Compressed entries.
    pub compressed: Option<Store>,
    /// `[num_heads]`, stored in f32: a logit (not scaled) in natural units. Any value, infinities
    /// included.
    pub sink: Option<Tensor>,
    /// Multiplies the dot products; finite.
    pub softmax_scale: f64,
    /// How the lists are cut. This changes only rounding.
    pub split: Split,
}

/// Where the joined lists are cut into parts.
#[derive(Debug, Clone)]
pub struct Split {
    /// Slots of a tile, at least 1: the window's list is padded to whole tiles, and cuts are
    /// between tiles.
    pub tile_slots: usize,
    /// Heads that share their cuts, at least 1: a unit is a token with this many of its heads.
    pub unit_heads: usize,
    /// For each unit, `token * ceil(num_heads / unit_heads) + head / unit_heads`, the tiles at
    /// which another part starts, in ascending order, without the first tile.
    pub cuts: Vec<Vec<usize>>,
}

impl Split {
    /// Without cuts.
    pub fn whole(units: usize) -> Self {
        Self { tile_slots: 1, unit_heads: usize::MAX, cuts: vec![Vec::new(); units] }
    }
}

/// Outputs of the attention.
#[derive(Debug, Clone)]
pub struct Outputs {
    /// `[batch, s_q, num_heads, head_dim]`, stored in bf16.
    pub out: Tensor,
    /// `[batch, s_q, num_heads]`, stored in f32.
    pub lse: Tensor,
}

/// `out` and `lse`.
pub fn forward(inputs: &Inputs, rounding: &mut Rounding) -> Result<Outputs> {
    let [batch, s_q, num_heads, head_dim] = inputs.check()?;
    let tokens = batch * s_q;
    if tokens * num_heads == 0 {
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F64, &Device::Cpu);
        return Ok(Outputs { out: inputs.q.zeros_like()?, lse: zeros(&[batch, s_q, num_heads])? });
    }
    let stores: Vec<&Store> =
        [Some(&inputs.window), inputs.compressed.as_ref()].into_iter().flatten().collect();
    let k = decoded(inputs.format, &stores)?;
    let lists = joined_lists(inputs, &stores, tokens, s_q);
    let q = inputs.q.reshape((tokens, num_heads, head_dim))?;
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    let blocks = num_heads.div_ceil(inputs.split.unit_heads);
    for block in 0..blocks {
        let first = block * inputs.split.unit_heads;
        let heads = (num_heads - first).min(inputs.split.unit_heads);
        let block_inputs = BlockInputs {
            q: q.narrow(1, first, heads)?.contiguous()?,
            k: k.clone(),
            sink: inputs.sink.as_ref().map(|sink| sink.narrow(0, first, heads)).transpose()?,
            softmax_scale: inputs.softmax_scale,
        };
        let parts: Vec<Vec<&[i32]>> = lists
            .iter()
            .enumerate()
            .map(|(token, list)| inputs.split.parts(token * blocks + block, list))
            .collect();
        let [block_out, block_lse] = block_inputs.forward(&parts, rounding)?;
        out.push(block_out);
        lse.push(block_lse);
    }
    Ok(Outputs {
        out: Tensor::cat(&out, 1)?.reshape((batch, s_q, num_heads, head_dim))?,
        lse: Tensor::cat(&lse, 1)?.reshape((batch, s_q, num_heads))?,
    })
}

/// The inputs of the units of one block of heads.
struct BlockInputs {
    q: Tensor,
    k: Tensor,
    sink: Option<Tensor>,
    softmax_scale: f64,
}

impl BlockInputs {
    /// Attention over the parts of each token's list, merged: `out` and `lse`.
    fn forward(&self, parts: &[Vec<&[i32]>], rounding: &mut Rounding) -> Result<[Tensor; 2]> {
        let most = parts.iter().map(Vec::len).max().unwrap_or(0);
        if most <= 1 {
            let whole = attention::forward(&self.part(parts, 0, self.sink.clone()), rounding)?;
            return Ok([whole.out, whole.lse]);
        }
        let (mut partial_out, mut partial_lse) = (Vec::new(), Vec::new());
        for number in 0..most {
            let outputs = attention::forward(&self.part(parts, number, None), rounding)?;
            partial_out.push(rounding.f32(&outputs.out)?);
            partial_lse.push(rounding.f32(&(outputs.lse * std::f64::consts::LOG2_E)?)?);
        }
        let (partial_out, partial_lse) =
            (Tensor::stack(&partial_out, 0)?, Tensor::stack(&partial_lse, 0)?);
        let parts = Named::new().with("partial_out", partial_out).with("partial_lse", partial_lse);
        let merged = attention_combine::forward(&parts.maybe("sink", self.sink.clone()), rounding)?;
        Ok([merged.tensor("out")?.clone(), merged.tensor("lse")?.clone()])
    }

    /// Part `number` of every token's list; a list with fewer parts has no slot there.
    fn part(
        &self,
        parts: &[Vec<&[i32]>],
        number: usize,
        sink: Option<Tensor>,
    ) -> attention::Inputs {
        let list = |token: &Vec<&[i32]>| token.get(number).map_or(Vec::new(), |list| list.to_vec());
        let mut lists: Vec<Vec<i32>> = parts.iter().map(list).collect();
        let topk = lists.iter().map(Vec::len).max().unwrap_or(0);
        lists.iter_mut().for_each(|list| list.resize(topk, -1));
        attention::Inputs {
            q: self.q.clone(),
            k: self.k.clone(),
            value: attention::Value::Shared,
            sink,
            indices: lists.concat(),
            topk,
            topk_length: None,
            softmax_scale: self.softmax_scale,
        }
    }
}

impl Split {
    /// The parts of a unit's list.
    fn parts<'a>(&self, unit: usize, list: &'a [i32]) -> Vec<&'a [i32]> {
        let at = |&tile: &usize| tile.saturating_mul(self.tile_slots).min(list.len());
        let ends: Vec<usize> =
            [0].into_iter().chain(self.cuts[unit].iter().map(at)).chain([list.len()]).collect();
        ends.windows(2).map(|ends| &list[ends[0]..ends[1]]).collect()
    }
}

/// The rows of all stores, one store after the other, `[rows, head_dim]`.
fn decoded(format: RowFormat, stores: &[&Store]) -> Result<Tensor> {
    let mut rows = Vec::new();
    let mut count = 0;
    for store in stores {
        for slot in 0..store.num_slots(format) {
            let (data_at, scales_at) = format.bytes().place(slot, store.page_size);
            let data = &store.pages[data_at..data_at + format.data_bytes()];
            let scales = &store.pages[scales_at..scales_at + format.scale_bytes()];
            rows.extend(format.decode(data, scales));
            count += 1;
        }
    }
    Ok(Tensor::from_vec(rows, (count, format.head_dim()), &Device::Cpu)?)
}

/// For each token its slots in all stores as rows of [`decoded`]; -1 where a slot is not valid. The
/// slots of each store are padded to whole tiles.
fn joined_lists(inputs: &Inputs, stores: &[&Store], tokens: usize, s_q: usize) -> Vec<Vec<i32>> {
    let list = |token: usize| {
        let mut rows_before = 0;
        let mut list = Vec::new();
        for store in stores {
            let num_slots = store.num_slots(inputs.format);
            let length = match &store.length {
                Some(lengths) => usize::try_from(lengths[token / s_q]).unwrap_or(0).min(store.topk),
                None => store.topk,
            };
            let own = &store.indices[token * store.topk..][..length];
            list.extend(own.iter().map(|&index| match usize::try_from(index) {
                Ok(index) if index < num_slots => (rows_before + index) as i32,
                _ => -1,
            }));
            list.resize(list.len().next_multiple_of(inputs.split.tile_slots), -1);
            rows_before += num_slots;
        }
        list
    };
    (0..tokens).map(list).collect()
}

impl Store {
    fn num_slots(&self, format: RowFormat) -> usize {
        self.pages.len() / format.bytes().page_bytes(self.page_size) * self.page_size
    }

    fn check(&self, format: RowFormat, batch: usize, s_q: usize) -> Result<()> {
        let unfit = |argument, expected: String, actual: usize| Error::Shape {
            argument,
            expected,
            actual: vec![actual],
        };
        if self.page_size == 0 {
            return Err(wrong_value("page_size", 0, "a page needs rows"));
        }
        let page = format.bytes().page_bytes(self.page_size);
        if !self.pages.len().is_multiple_of(page) {
            return Err(unfit("pages", format!("[pages * {page}]"), self.pages.len()));
        }
        if self.indices.len() != batch * s_q * self.topk {
            return Err(unfit(
                "indices",
                format!("[{batch}, {s_q}, {}]", self.topk),
                self.indices.len(),
            ));
        }
        match &self.length {
            Some(length) if length.len() != batch => {
                Err(unfit("length", format!("[{batch}]"), length.len()))
            }
            _ => Ok(()),
        }
    }
}

impl Inputs {
    fn check(&self) -> Result<[usize; 4]> {
        self.format.check()?;
        require_f64("q", &self.q)?;
        let &[batch, s_q, num_heads, head_dim] = self.q.dims() else {
            return Err(wrong_shape("q", "[batch, s_q, num_heads, head_dim]", &self.q));
        };
        if head_dim != self.format.head_dim() {
            return Err(wrong_value("head_dim", head_dim, "it must be the width of a row"));
        }
        let Split { tile_slots, unit_heads, cuts } = &self.split;
        if *tile_slots == 0 || *unit_heads == 0 {
            return Err(wrong_value("split", 0, "a tile needs slots and a unit heads"));
        }
        let units = batch * s_q * num_heads.div_ceil(*unit_heads);
        if cuts.len() != units {
            return Err(Error::Shape {
                argument: "cuts",
                expected: format!("[{units}]"),
                actual: vec![cuts.len()],
            });
        }
        for store in [Some(&self.window), self.compressed.as_ref()].into_iter().flatten() {
            store.check(self.format, batch, s_q)?;
        }
        Ok([batch, s_q, num_heads, head_dim])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::precision::values;
    use crate::testing::{Draw, UNIT_ROUNDOFF, assert_within, f64_tensor};

    const FORMAT: RowFormat = RowFormat { nope_dim: 64, rope_dim: 16 };

    fn store(
        draw: &mut Draw,
        page_size: usize,
        num_pages: usize,
        topk: usize,
        length: Vec<i32>,
    ) -> Store {
        let num_slots = page_size * num_pages;
        let rows = values(&draw.bf16(&[num_slots, FORMAT.head_dim()], 1.0)).expect("values");
        let mut pages = vec![0; num_pages * FORMAT.bytes().page_bytes(page_size)];
        for (slot, row) in rows.chunks(FORMAT.head_dim()).enumerate() {
            let (data, scales) = FORMAT.encode(row);
            let (data_at, scales_at) = FORMAT.bytes().place(slot, page_size);
            pages[data_at..data_at + data.len()].copy_from_slice(&data);
            pages[scales_at..scales_at + scales.len()].copy_from_slice(&scales);
        }
        // Also beyond both ends of the store.
        let indices = (0..4 * topk).map(|_| draw.below(num_slots + 4) as i32 - 2).collect();
        Store { pages, page_size, indices, topk, length: Some(length) }
    }

    /// Two requests of two tokens.
    fn inputs() -> Inputs {
        let mut draw = Draw::new(5);
        Inputs {
            q: draw.bf16(&[2, 2, 3, 80], 1.0),
            format: FORMAT,
            window: store(&mut draw, 3, 4, 9, vec![9, 0]),
            compressed: Some(store(&mut draw, 2, 5, 14, vec![-3, 11])),
            sink: Some(f64_tensor(&[0.5, f64::INFINITY, -1.0], &[3])),
            softmax_scale: 0.1,
            split: Split::whole(4),
        }
    }

    /// The formulas of the module documentation, computed directly.
    fn by_hand(inputs: &Inputs, request: usize, token: usize, head: usize) -> (Vec<f64>, f64) {
        let at = request * 2 + token;
        let mut rows = Vec::new();
        for store in [&inputs.window, inputs.compressed.as_ref().expect("a store")] {
            let length = store.length.as_ref().expect("lengths")[request]
                .clamp(0, store.topk as i32) as usize;
            for &index in &store.indices[at * store.topk..][..length] {
                if index >= 0 && (index as usize) < store.num_slots(FORMAT) {
                    let (data_at, scales_at) =
                        FORMAT.bytes().place(index as usize, store.page_size);
                    let data = &store.pages[data_at..data_at + FORMAT.data_bytes()];
                    rows.push(FORMAT.decode(data, &store.pages[scales_at..scales_at + 8]));
                }
            }
        }
        let q = values(&inputs.q).expect("values");
        let q = &q[(at * 3 + head) * 80..][..80];
        let weight =
            |row: &Vec<f64>| (0.1 * row.iter().zip(q).map(|(k, q)| k * q).sum::<f64>()).exp();
        let sum: f64 = rows.iter().map(weight).sum();
        let sink = values(inputs.sink.as_ref().expect("a sink")).expect("values")[head].exp();
        let out = (0..80)
            .map(|c| rows.iter().map(|row| weight(row) * row[c]).sum::<f64>() / (sum + sink))
            .collect();
        (out, sum.ln())
    }

    #[test]
    fn both_stores_share_one_softmax_and_only_valid_slots_count() -> Result<()> {
        let inputs = inputs();
        let outputs = forward(&inputs, &mut Rounding::exact())?;
        for (request, token, head) in [(0, 0, 0), (0, 1, 2), (1, 0, 1), (1, 1, 0)] {
            let (out, lse) = by_hand(&inputs, request, token, head);
            let found = outputs.out.get(request)?.get(token)?.get(head)?;
            let bound = f64_tensor(&[256.0 * UNIT_ROUNDOFF; 80], &[80]);
            assert_within("out", &found, &f64_tensor(&out, &[80]), &bound);
            let found: f64 = outputs.lse.get(request)?.get(token)?.get(head)?.to_scalar()?;
            assert!(
                (found - lse).abs() <= 64.0 * UNIT_ROUNDOFF * lse.abs().max(1.0),
                "{found} against {lse}"
            );
        }
        Ok(())
    }

    /// Cuts of the units of 4 tokens and 2 blocks of heads, all different.
    fn split(tile_slots: usize) -> Split {
        let tiles = 24 / tile_slots;
        let cuts = (0..8usize)
            .map(|unit| (1..tiles).filter(|tile| (tile + unit) % 3 == 0).collect())
            .collect();
        Split { tile_slots, unit_heads: 2, cuts }
    }

    #[test]
    fn cuts_anywhere_change_nothing_but_rounding() -> Result<()> {
        let whole = forward(&inputs(), &mut Rounding::exact())?;
        for tile_slots in [1, 2, 4, 11] {
            let parts =
                forward(&Inputs { split: split(tile_slots), ..inputs() }, &mut Rounding::exact())?;
            let bound = (whole.out.ones_like()? * (64.0 * UNIT_ROUNDOFF))?;
            assert_within("out", &parts.out, &whole.out, &bound);
            assert_within(
                "lse",
                &parts.lse,
                &whole.lse,
                &(whole.lse.abs()? * (64.0 * UNIT_ROUNDOFF))?,
            );
        }
        Ok(())
    }

    #[test]
    fn a_token_without_a_valid_slot_is_zero_and_its_lse_infinite() -> Result<()> {
        for split in [split(2), Split::whole(4)] {
            let mut inputs = Inputs { split, ..inputs() };
            inputs.window.length = Some(vec![0, 9]);
            let outputs = forward(&inputs, &mut Rounding::exact())?;
            assert!(values(&outputs.out.get(0)?)?.iter().all(|&x| x == 0.0));
            assert!(values(&outputs.lse.get(0)?)?.iter().all(|&x| x == f64::INFINITY));
            assert!(values(&outputs.lse.get(1)?)?.iter().all(|x| x.is_finite()));
        }
        Ok(())
    }

    #[test]
    fn inputs_that_do_not_fit_are_refused() {
        let refused = |change: &dyn Fn(&mut Inputs)| {
            let mut inputs = inputs();
            change(&mut inputs);
            assert!(forward(&inputs, &mut Rounding::exact()).is_err());
        };
        refused(&|i| i.split.tile_slots = 0);
        refused(&|i| i.split.cuts = Vec::new());
        refused(&|i| i.window.page_size = 0);
        refused(&|i| i.window.topk = 8);
        refused(&|i| i.window.length = Some(vec![1]));
        refused(&|i| i.window.pages.truncate(7));
        refused(&|i| i.format = RowFormat { nope_dim: 64, rope_dim: 8 });
    }
}
