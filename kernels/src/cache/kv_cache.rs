//! The paged KV cache that kernels share (inference 8.3): the format of a row, and the checks of a
//! store.

use crate::arguments::Arguments;
use dsv4_runtime::Result;

/// Channels of the first part that share a scale.
pub(crate) const SCALE_GROUP: usize = 64;
/// Bytes of scales after each row that has quantized channels.
const SCALE_BYTES: usize = 8;

/// How a row of the cache is stored: `nope_dim` channels as e4m3 with one e8m0 scale for each 64,
/// then `rope_dim` channels as bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowFormat {
    /// e4m3 channels: a multiple of 64 up to 512. 0 is a row of bf16 without scales.
    pub nope_dim: usize,
    /// bf16 channels: a multiple of 8, at least 8.
    pub rope_dim: usize,
}

impl RowFormat {
    /// The model's row of 584 bytes: 448 e4m3, 64 bf16, 7 scales and a byte of padding.
    pub const MODEL: Self = Self { nope_dim: 448, rope_dim: 64 };

    /// A row of `head_dim` bf16.
    pub const fn bf16(head_dim: usize) -> Self {
        Self { nope_dim: 0, rope_dim: head_dim }
    }

    /// Channels of a row.
    pub fn head_dim(self) -> usize {
        self.nope_dim + self.rope_dim
    }

    /// Bytes of a row's channels.
    pub fn data_bytes(self) -> usize {
        self.nope_dim + 2 * self.rope_dim
    }

    /// Bytes of a row's scales, which are stored after the data of all rows of the page.
    pub fn scale_bytes(self) -> usize {
        if self.nope_dim > 0 { SCALE_BYTES } else { 0 }
    }

    /// Bytes of a row, scales included.
    pub fn row_bytes(self) -> usize {
        self.data_bytes() + self.scale_bytes()
    }

    /// Bytes from one page to the next in the model's caches: a whole number of data rows.
    pub fn page_stride(self, page_size: usize) -> usize {
        (page_size * self.row_bytes()).next_multiple_of(self.data_bytes())
    }

    pub(crate) fn defines(self) -> Vec<(&'static str, String)> {
        vec![("NOPE_DIM", self.nope_dim.to_string()), ("ROPE_DIM", self.rope_dim.to_string())]
    }

    pub(crate) fn check(self, operator: Arguments) -> Result<()> {
        let Self { nope_dim, rope_dim } = self;
        if !nope_dim.is_multiple_of(SCALE_GROUP) || nope_dim > SCALE_GROUP * SCALE_BYTES {
            return operator.refuse(
                "format",
                format!("nope_dim {nope_dim} must be a multiple of 64 up to 512"),
            );
        }
        if rope_dim == 0 || !rope_dim.is_multiple_of(8) {
            return operator
                .refuse("format", format!("rope_dim {rope_dim} must be a multiple of 8"));
        }
        Ok(())
    }

    /// Bytes of a page of `page_size` rows, at least 1; `argument` is the store that an error
    /// names.
    pub(crate) fn page_bytes(
        self,
        operator: Arguments,
        argument: &'static str,
        page_size: usize,
    ) -> Result<usize> {
        if page_size == 0 {
            return operator.refuse(argument, "a page of 0 rows holds nothing");
        }
        operator.int32(argument, page_size)?;
        Ok(page_size.saturating_mul(self.row_bytes()))
    }
}

/// Rows of all pages of a store; slot `page * page_size + row` is one of them.
pub(crate) fn num_slots(
    operator: Arguments,
    argument: &'static str,
    num_pages: usize,
    page_size: usize,
) -> Result<usize> {
    let num_slots = num_pages.saturating_mul(page_size);
    operator.int32(argument, num_slots)?;
    Ok(num_slots)
}
