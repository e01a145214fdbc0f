//! The description of a tensor of which kernels copy TMA boxes (`tensor_copy_in` in `hopper.h`).

use serde::{Deserialize, Serialize};

use super::tensor::{DType, TensorView};

/// The map in a kernel's parameters: CUDA's own, or on the emulator [`TensorMap::words`].
pub type MapWords = [u64; 16];

/// Bytes of a row of a box.
pub const BOX_ROW_BYTES: usize = 128;
/// Limits of rows and strides in hardware.
const MOST_EXTENT: u64 = 1 << 32;
const MOST_STRIDE: u64 = 1 << 40;
const MOST_BOX_ROWS: u32 = 256;
/// The first of the emulator's words, which distinguishes them from other words.
const MARK: u64 = u64::from_le_bytes(*b"boxes of");

/// A tensor of bytes, `[matrices, rows, row_bytes]`, and the TMA boxes that kernels copy of it:
/// [`BOX_ROW_BYTES`] of each of `box_rows` rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorMap {
    /// Address of the first byte; a multiple of 16.
    pub address: u64,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// Rows of a matrix.
    pub rows: u64,
    /// Matrices.
    pub matrices: u64,
    /// Bytes from one row to the next; a multiple of 16.
    pub row_stride: u64,
    /// Bytes from one matrix to the next; a multiple of 16.
    pub matrix_stride: u64,
    /// Rows of a box, up to 256.
    pub box_rows: u32,
}

impl TensorMap {
    /// The map of a tensor of bytes, `[rows, row_bytes]` or `[matrices, rows, row_bytes]`, with
    /// contiguous rows. `None` if hardware cannot copy boxes of it: rows that overlap, have
    /// negative strides, or are not at multiples of 16 bytes; no elements; sizes of 2^32 or more;
    /// strides of 2^40 bytes or more.
    pub fn of(view: &TensorView, box_rows: u32) -> Option<Self> {
        let ([matrices, rows, row_bytes], [matrix_stride, row_stride, 1]) =
            (match (&view.shape[..], &view.strides[..]) {
                (&[matrices, rows, bytes], &[matrix, row, column]) => {
                    ([matrices, rows, bytes], [matrix, row, column])
                }
                (&[rows, bytes], &[row, column]) => ([1, rows, bytes], [0, row, column]),
                _ => return None,
            })
        else {
            return None;
        };
        let extents = [matrices, rows, row_bytes].map(|extent| extent as u64);
        let fits = extents.iter().all(|extent| (1..MOST_EXTENT).contains(extent))
            && view.dtype == DType::U8;
        // With one row or matrix its stride has no effect.
        let own_stride = (row_bytes as u64).next_multiple_of(16);
        let row_stride = if rows > 1 { u64::try_from(row_stride).ok()? } else { own_stride };
        let matrix_bytes = row_stride.checked_mul(rows as u64)?;
        let matrix_stride =
            if matrices > 1 { u64::try_from(matrix_stride).ok()? } else { matrix_bytes };
        // Matrices may be between the rows of one another.
        let strided = [row_stride, matrix_stride].iter().all(|stride| {
            stride.is_multiple_of(16) && (row_bytes as u64..MOST_STRIDE).contains(stride)
        });
        let known = fits
            && strided
            && view.address.is_multiple_of(16)
            && (1..=MOST_BOX_ROWS).contains(&box_rows);
        let [matrices, rows, row_bytes] = extents;
        known.then_some(Self {
            address: view.address,
            row_bytes,
            rows,
            matrices,
            row_stride,
            matrix_stride,
            box_rows,
        })
    }

    /// The emulator's form of it.
    pub fn words(&self) -> MapWords {
        let mut words = [0; 16];
        words[..8].copy_from_slice(&[
            MARK,
            self.address,
            self.row_bytes,
            self.rows,
            self.matrices,
            self.row_stride,
            self.matrix_stride,
            self.box_rows.into(),
        ]);
        words
    }

    /// The map of which [`Self::words`] are these words; `None` if they are not a map.
    pub fn from_words(words: &MapWords) -> Option<Self> {
        let &[MARK, address, row_bytes, rows, matrices, row_stride, matrix_stride, box_rows, ..] =
            words
        else {
            return None;
        };
        let box_rows = u32::try_from(box_rows).ok()?;
        Some(Self { address, row_bytes, rows, matrices, row_stride, matrix_stride, box_rows })
    }

    /// Address and length of the bytes that row `row` of a matrix has from byte `column` on, up to
    /// the width of a box.
    pub fn bytes_at(&self, column: i32, row: i64, matrix: i32) -> Option<(u64, usize)> {
        let inside =
            |coordinate: i64, extent: u64| u64::try_from(coordinate).ok().filter(|&at| at < extent);
        let (column, row) = (inside(column.into(), self.row_bytes)?, inside(row, self.rows)?);
        let matrix = inside(matrix.into(), self.matrices)?;
        let address = self.address + matrix * self.matrix_stride + row * self.row_stride + column;
        Some((address, (self.row_bytes - column).min(BOX_ROW_BYTES as u64) as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(shape: &[usize], strides: &[i64]) -> TensorView {
        let (shape, strides) = (shape.to_vec(), strides.to_vec());
        TensorView { name: "x".into(), address: 4096, dtype: DType::U8, shape, strides }
    }

    #[test]
    fn a_map_says_where_the_rows_of_a_box_are_and_which_there_are_not() {
        let map = TensorMap::of(&view(&[2, 3, 200], &[1024, 208, 1]), 64).unwrap();
        assert_eq!(map.bytes_at(0, 0, 0), Some((4096, 128)));
        assert_eq!(map.bytes_at(128, 2, 1), Some((4096 + 1024 + 416 + 128, 72)));
        for (column, row, matrix) in [(200, 0, 0), (0, 3, 0), (0, 0, 2), (-1, 0, 0), (0, -1, 0)] {
            assert_eq!(map.bytes_at(column, row, matrix), None, "{column}, {row}, {matrix}");
        }
        assert_eq!(TensorMap::from_words(&map.words()), Some(map));
        assert_eq!(TensorMap::from_words(&[0; 16]), None);
    }

    #[test]
    fn what_hardware_cannot_copy_has_no_map() {
        assert!(TensorMap::of(&view(&[3, 200], &[208, 1]), 64).is_some());
        // One row or matrix may have any stride.
        assert!(TensorMap::of(&view(&[1, 200], &[-7, 1]), 64).is_some());
        assert!(TensorMap::of(&view(&[1, 3, 200], &[1, 208, 1]), 64).is_some());
        // Matrices between the rows of one another.
        assert!(TensorMap::of(&view(&[2, 3, 200], &[208, 416, 1]), 64).is_some());
        for (shape, strides) in [
            (&[3, 200][..], &[200, 1][..]),
            (&[3, 200], &[192, 1]),
            (&[3, 200], &[0, 1]),
            (&[3, 200], &[-208, 1]),
            (&[3, 200], &[416, 2]),
            (&[3, 200], &[1 << 40, 1]),
            (&[0, 200], &[208, 1]),
            (&[2, 3, 200], &[192, 208, 1]),
            (&[200], &[1]),
        ] {
            assert_eq!(TensorMap::of(&view(shape, strides), 64), None, "{shape:?}, {strides:?}");
        }
        assert_eq!(TensorMap::of(&view(&[3, 200], &[208, 1]), 257), None);
        let odd = TensorView { address: 4104, ..view(&[3, 200], &[208, 1]) };
        assert_eq!(TensorMap::of(&odd, 64), None);
    }
}
