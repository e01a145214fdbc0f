//! Stores of a paged cache in the operators' cases: rows, slot by slot, and the pages that hold
//! them (inference 8.3).

use dsv4_kernels::cache::kv_cache::RowFormat;
use dsv4_reference::cache::kv_cache::{self as reference, RowBytes, SCALE_BYTES, SCALE_GROUP};
use dsv4_runtime::{DType, HostTensor};
use rand::seq::SliceRandom;
use serde::{Deserialize, Serialize};

use crate::case::Draw;
use crate::operator::Same;
use crate::operator::batches::Cut;
use crate::operator::declaration::Axis;
use crate::operator::declared::{Refused, refuse};
use crate::operator::tensors::{Tensors, permuted_along};
use crate::operators::lists::Hostile;

/// Largest page of a case, in bytes. The layer bounds the pages of a store together.
const LARGEST_PAGE: usize = 1 << 31;

/// The slots that tokens are written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SlotClass {
    /// Consecutive slots from 0 on, as a prefill writes them.
    Consecutive,
    /// Distinct slots anywhere.
    Scattered,
    /// The same, but every third token has no slot, or one beyond the cache, or `i32::MIN` or
    /// `i32::MAX`.
    Hostile,
}

impl SlotClass {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Consecutive, Self::Scattered, Self::Hostile];

    /// A slot for each token. Slots of the store are distinct; -1 where too few exist.
    pub(crate) fn draw(self, seed: u64, num_tokens: usize, num_slots: usize) -> Vec<i32> {
        let mut draw = Draw::new(seed, "slots");
        let num_slots = num_slots as i32;
        let beyond = num_slots.saturating_add(5);
        let values = [-1, num_slots, i32::MIN, i32::MAX, beyond, -num_slots.max(1)];
        let mut hostile = Hostile::new(seed, "slots", &values);
        let mut order: Vec<i32> = (0..num_slots).collect();
        if self != Self::Consecutive {
            order.shuffle(draw.rng());
        }
        let slot = |token: usize| {
            if self == Self::Hostile && token % 3 == 1 {
                hostile.take()
            } else {
                order.get(token).copied().unwrap_or(-1)
            }
        };
        (0..num_tokens).map(slot).collect()
    }
}

/// The format as the oracle knows it.
pub(crate) fn oracle(format: RowFormat) -> reference::RowFormat {
    let RowFormat { nope_dim, rope_dim } = format;
    reference::RowFormat { nope_dim, rope_dim }
}

/// Whether a row's scales are enough for its e4m3 channels.
pub(crate) fn check_nope_dim(nope_dim: usize) -> Result<(), Refused> {
    if nope_dim.is_multiple_of(SCALE_GROUP) && nope_dim <= SCALE_GROUP * SCALE_BYTES {
        return Ok(());
    }
    refuse("nope_dim", format!("{nope_dim} must be a multiple of 64 up to 512"))
}

/// Bytes of a page, or why such a page cannot exist.
pub(crate) fn page_bytes(format: RowFormat, page_size: usize) -> Result<usize, String> {
    if page_size == 0 {
        return Err("0: a page needs rows".into());
    }
    let bytes = page_size.saturating_mul(format.row_bytes());
    if bytes > LARGEST_PAGE {
        return Err(format!(
            "{page_size} rows of {} bytes make a page of more than 2^31 bytes",
            format.row_bytes()
        ));
    }
    Ok(bytes)
}

/// Bytes that pad a page to the stride of the model's caches, rounded up to a multiple of 16.
pub(crate) fn page_gap(format: RowFormat, page_size: usize) -> usize {
    format.page_stride(page_size).next_multiple_of(16) - page_size * format.row_bytes()
}

/// The consecutive pages of rows that are given slot by slot: a row's data, then its scales.
pub(crate) fn pages_of(bytes: RowBytes, page_size: usize, rows: &[u8]) -> Vec<u8> {
    let mut pages = vec![0; rows.len()];
    for (slot, row) in rows.chunks(bytes.page_bytes(1)).enumerate() {
        let (data, scales) = row.split_at(bytes.data);
        let (data_at, scales_at) = bytes.place(slot, page_size);
        pages[data_at..data_at + data.len()].copy_from_slice(data);
        pages[scales_at..scales_at + scales.len()].copy_from_slice(scales);
    }
    pages
}

/// The rows of consecutive pages, slot by slot: the inverse of [`pages_of`].
pub(crate) fn rows_of(bytes: RowBytes, page_size: usize, pages: &[u8]) -> Vec<u8> {
    let mut rows = Vec::with_capacity(pages.len());
    for slot in 0..pages.len() / bytes.page_bytes(1) {
        let (data_at, scales_at) = bytes.place(slot, page_size);
        rows.extend_from_slice(&pages[data_at..data_at + bytes.data]);
        rows.extend_from_slice(&pages[scales_at..scales_at + bytes.scales]);
    }
    rows
}

/// Each of these parts of the rows as a tensor of bytes with a row for each slot. A part is a name
/// and a number of bytes.
pub(crate) fn parts_of(
    bytes: RowBytes,
    page_size: usize,
    parts: &[(&'static str, Axis)],
    pages: &[u8],
) -> Vec<(&'static str, HostTensor)> {
    let rows = rows_of(bytes, page_size, pages);
    let num_slots = rows.len() / bytes.page_bytes(1);
    let mut from = 0;
    let part = |&(name, Axis { extent, .. }): &(&'static str, Axis)| {
        let columns = from..from + extent;
        from = columns.end;
        let all = rows.chunks(bytes.page_bytes(1)).flat_map(|row| row[columns.clone()].to_vec());
        (
            name,
            HostTensor { dtype: DType::U8, shape: vec![num_slots, extent], bytes: all.collect() },
        )
    };
    parts.iter().map(part).collect()
}

/// The slots of a cut's tokens. Each token is written once, and padding nowhere. What is compared
/// of `observed`, which has a row for each slot.
pub(crate) fn cut_slots(
    tensors: &mut Tensors,
    num_slots: usize,
    observed: &[&'static str],
    cut: &Cut,
) -> Vec<Same> {
    let mut written = Vec::new();
    tensors.edit_i32s("slots", |slots| {
        for (row, slot) in slots.iter_mut().enumerate() {
            if !cut.is_first(row) {
                *slot = -1;
            } else if let Some(at) = usize::try_from(*slot).ok().filter(|&at| at < num_slots) {
                written.push((at, at));
            }
        }
    });
    observed.iter().map(|name| Same::along(name, 0, &written)).collect()
}

/// For each slot the token that is written there.
pub(crate) fn writers(num_slots: usize, slots: &[i32]) -> Vec<Option<usize>> {
    let mut writers = vec![None; num_slots];
    for (token, &slot) in slots.iter().enumerate() {
        if let Some(writer) = usize::try_from(slot).ok().and_then(|slot| writers.get_mut(slot)) {
            *writer = Some(token);
        }
    }
    writers
}

/// Keeps the part of `rows` and their slots that is written to these pages. Slots stay the same
/// where all pages are kept. Returns the number of rows.
pub(crate) fn keep_writers(
    pages: &[usize],
    page_size: usize,
    rows: &'static str,
    tensors: &mut Tensors,
) -> usize {
    let place = |slot: i32| {
        let slot = usize::try_from(slot).ok()?;
        let page = pages.iter().position(|&page| page == slot / page_size)?;
        Some((page * page_size + slot % page_size) as i32)
    };
    let slots = tensors.i32s("slots").into_iter().enumerate();
    let (tokens, slots): (Vec<usize>, Vec<i32>) =
        slots.filter_map(|(token, s)| Some((token, place(s)?))).unzip();
    let kept = permuted_along(tensors.tensor(rows), 0, &tokens);
    tensors.put(rows, kept);
    tensors.put("slots", HostTensor::from_i32(&[slots.len()], &slots));
    slots.len()
}

/// Flips every sign in the row of one token, including that of a NaN.
pub(crate) fn turn_signs_of_bf16(
    tensors: &mut Tensors,
    rows: &'static str,
    width: usize,
    token: usize,
) {
    let row = tensors
        .bytes_mut(rows)
        .into_iter()
        .flat_map(|rows| rows.chunks_mut(2 * width).skip(token).take(1));
    row.flatten().skip(1).step_by(2).for_each(|byte| *byte ^= 0x80);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_what_pages_were_made_of_and_scales_lie_behind_the_data_of_a_page() {
        let bytes = oracle(RowFormat { nope_dim: 64, rope_dim: 8 }).bytes();
        let rows: Vec<u8> =
            (0..6 * 88).map(|at| (at / 88) as u8 * 16 + u8::from(at % 88 >= 80)).collect();
        for page_size in [1, 2, 3, 6] {
            assert_eq!(rows_of(bytes, page_size, &pages_of(bytes, page_size, &rows)), rows);
        }
        let pages = pages_of(bytes, 3, &rows);
        assert_eq!(
            (pages[0], pages[160], pages[3 * 80], pages[3 * 88 - 1], pages[3 * 88]),
            (0, 32, 1, 33, 48)
        );
    }

    #[test]
    fn a_page_without_rows_and_one_that_no_cache_holds_are_refused() {
        let model = RowFormat::MODEL;
        assert_eq!(page_bytes(model, 64), Ok(64 * 584));
        assert!(page_bytes(model, 0).unwrap_err().starts_with('0'));
        assert!(page_bytes(model, usize::MAX).is_err());
        assert_eq!([1, 2, 64].map(|page_size| page_gap(model, page_size)), [568, 560, 64]);
    }
}
