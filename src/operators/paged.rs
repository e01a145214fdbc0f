//! Stores of a paged cache as the operators' cases hold them: rows, slot by slot, and the pages that they are laid out
//! in (inference 8.3).

use dsv4_kernels::kv_cache::RowFormat;
use dsv4_reference::kv_cache::{self as reference, SCALE_BYTES, SCALE_GROUP};

use crate::operator::declared::{Refused, refuse};

/// Largest page of a case, in bytes: what the pages of a store have together is bounded by the layer.
const LARGEST_PAGE: usize = 1 << 31;

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

/// Bytes of a page, or why there is no such page.
pub(crate) fn page_bytes(format: RowFormat, page_size: usize) -> Result<usize, String> {
    if page_size == 0 {
        return Err("0: a page needs rows".into());
    }
    let bytes = page_size.saturating_mul(format.row_bytes());
    if bytes > LARGEST_PAGE {
        return Err(format!("{page_size} rows of {} bytes make a page of more than 2^31 bytes", format.row_bytes()));
    }
    Ok(bytes)
}

/// Bytes that bring a page to the stride of the model's caches, or of whole 16 bytes where the page's data are none.
pub(crate) fn page_gap(format: RowFormat, page_size: usize) -> usize {
    format.page_stride(page_size).next_multiple_of(16) - page_size * format.row_bytes()
}

/// The pages, one behind the other, of rows that lie slot by slot: a row's data, then its scales.
pub(crate) fn pages_of(format: RowFormat, page_size: usize, rows: &[u8]) -> Vec<u8> {
    let mut pages = vec![0; rows.len()];
    for (slot, row) in rows.chunks(format.row_bytes()).enumerate() {
        let (data, scales) = row.split_at(format.data_bytes());
        let (data_at, scales_at) = oracle(format).place(slot, page_size);
        pages[data_at..data_at + data.len()].copy_from_slice(data);
        pages[scales_at..scales_at + scales.len()].copy_from_slice(scales);
    }
    pages
}

/// The rows of pages that lie one behind the other, slot by slot: [`pages_of`] undone.
pub(crate) fn rows_of(format: RowFormat, page_size: usize, pages: &[u8]) -> Vec<u8> {
    let mut rows = Vec::with_capacity(pages.len());
    for slot in 0..pages.len() / format.row_bytes() {
        let (data_at, scales_at) = oracle(format).place(slot, page_size);
        rows.extend_from_slice(&pages[data_at..data_at + format.data_bytes()]);
        rows.extend_from_slice(&pages[scales_at..scales_at + format.scale_bytes()]);
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_what_pages_were_made_of_and_scales_lie_behind_the_data_of_a_page() {
        let format = RowFormat { nope_dim: 64, rope_dim: 8 };
        let rows: Vec<u8> = (0..6 * 88).map(|at| (at / 88) as u8 * 16 + u8::from(at % 88 >= 80)).collect();
        for page_size in [1, 2, 3, 6] {
            assert_eq!(rows_of(format, page_size, &pages_of(format, page_size, &rows)), rows);
        }
        let pages = pages_of(format, 3, &rows);
        assert_eq!((pages[0], pages[160], pages[3 * 80], pages[3 * 88 - 1], pages[3 * 88]), (0, 32, 1, 33, 48));
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
