//! GEMMs of bf16 by a library, if a backend has one: cublasLt on a GPU, and on the emulator a GEMM
//! on the host in its place. So the operands that launchers pass to a library are tested without a
//! GPU.

use serde::{Deserialize, Serialize};

use super::error::Result;
use super::tensor::{DType, TensorView};

/// Alignment of all rows of a GEMM in bytes.
const ALIGNMENT: u64 = 16;
/// A matrix spans fewer elements than this, gaps included: libraries count them with 32 bits.
const MOST_ELEMENTS: i64 = 1 << 31;

/// A matrix in device memory, or several at a constant step: its rows are contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Matrix {
    /// Device address of the first element.
    pub address: u64,
    /// Elements from one row to the next, at least the elements of a row.
    pub stride: i64,
    /// Rows, and elements of each.
    pub extents: [usize; 2],
    /// Elements from one matrix to the next, if there are several.
    pub step: i64,
}

/// `out = before + a b`, with sums in fp32 that are rounded once, for each of `count` matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MatrixProduct {
    /// bf16, `[rows, depth]`; stored transposed if `transposed[0]`.
    pub a: Matrix,
    /// bf16, `[depth, columns]`; stored transposed if `transposed[1]`.
    pub b: Matrix,
    /// Whether `a`, and `b`, are stored with columns as rows.
    pub transposed: [bool; 2],
    /// Like `out`, and possibly the same memory; absent for zeros.
    pub before: Option<Matrix>,
    /// `[rows, columns]`.
    pub out: Matrix,
    /// Type of `out` and `before`: bf16 or f32.
    pub dtype: DType,
    /// The number of products, at least 1: matrices and results that many steps apart.
    pub count: usize,
}

/// A backend's library for GEMMs.
pub trait MatrixLibrary {
    /// Enqueues a GEMM; returns whether the library supports it. The same GEMM always gets the same
    /// result, with the same sums in the same order.
    ///
    /// # Errors
    /// Errors of the library and of the device.
    fn multiply(&self, product: &MatrixProduct) -> Result<bool>;
}

impl Matrix {
    /// A matrix of two axes that libraries take: not empty, with disjoint rows that start at
    /// multiples of 16 bytes and span fewer than 2^31 elements; `None` for any other.
    pub fn of(view: &TensorView) -> Option<Self> {
        let &[rows, columns] = &view.shape[..] else { return None };
        let &[stride, step] = &view.strides[..] else { return None };
        let width = i64::try_from(columns).ok().filter(|_| rows > 0 && columns > 0)?;
        // The strides of axes of one entry have no meaning.
        let aligned = columns.checked_next_multiple_of(ALIGNMENT as usize / view.dtype.size())?;
        let stride = if rows == 1 { i64::try_from(aligned).ok()? } else { stride };
        let span = i64::try_from(rows).ok()?.checked_mul(stride)?;
        let fits = stride >= width && span < MOST_ELEMENTS && (step == 1 || columns == 1);
        let aligned = |bytes: u64| bytes.is_multiple_of(ALIGNMENT);
        (fits && aligned(view.address) && aligned(stride as u64 * view.dtype.size() as u64))
            .then_some(Self { address: view.address, stride, extents: [rows, columns], step: 0 })
    }

    /// Matrices one after the other along an axis of three, each as in [`Self::of`]; rows of one
    /// may be between those of another.
    pub fn of_each(view: &TensorView, axis: usize) -> Option<Self> {
        let (mut shape, mut strides) = (view.shape.clone(), view.strides.clone());
        if shape.len() != 3 || strides.len() != 3 || axis >= 3 {
            return None;
        }
        let (count, step) = (shape.remove(axis), strides.remove(axis));
        let aligned =
            (step as u64).wrapping_mul(view.dtype.size() as u64).is_multiple_of(ALIGNMENT);
        let matrix = Self::of(&TensorView { shape, strides, ..view.clone() })?;
        match count {
            0 => None,
            1 => Some(matrix),
            _ => (aligned && (1..MOST_ELEMENTS).contains(&step)).then_some(Self { step, ..matrix }),
        }
    }

    /// The matrix with this number, if there are several.
    pub(super) fn number(&self, number: usize, dtype: DType) -> Self {
        Self {
            address: self.address + number as u64 * self.step as u64 * dtype.size() as u64,
            ..*self
        }
    }

    pub(super) fn row_address(&self, row: usize, dtype: DType) -> u64 {
        self.address + row as u64 * self.stride as u64 * dtype.size() as u64
    }
}

impl MatrixProduct {
    /// Values that are added for each element.
    pub fn depth(&self) -> usize {
        self.a.extents[usize::from(!self.transposed[0])]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(address: u64, dtype: DType, shape: [usize; 2], strides: [i64; 2]) -> TensorView {
        TensorView {
            strides: strides.to_vec(),
            ..TensorView::dense("a view", address, dtype, &shape)
        }
    }

    #[test]
    fn matrices_that_a_library_could_misread_are_none_of_its_own() {
        let of = |address, shape, strides| Matrix::of(&view(address, DType::Bf16, shape, strides));
        let matrix = of(64, [3, 13], [16, 1]).expect("rows of 32 bytes");
        assert_eq!((matrix.address, matrix.stride, matrix.extents), (64, 16, [3, 13]));
        assert_eq!(
            of(64, [1, 13], [99, 1]).map(|matrix| matrix.stride),
            Some(16),
            "one row is nowhere else"
        );
        let refused = [
            ("an odd address", of(66, [3, 13], [16, 1])),
            ("rows between two multiples of 16 bytes", of(64, [3, 13], [13, 1])),
            ("rows that overlap", of(64, [3, 13], [8, 1])),
            ("rows backwards", of(64, [3, 13], [-16, 1])),
            ("columns apart", of(64, [3, 13], [32, 2])),
            ("no rows", of(64, [0, 13], [16, 1])),
            ("no columns", of(64, [3, 0], [16, 1])),
            ("more elements than 31 bits count", of(64, [3, 13], [1 << 30, 1])),
        ];
        for (what, matrix) in refused {
            assert_eq!(matrix, None, "{what}");
        }
        assert!(Matrix::of(&view(64, DType::F32, [3, 13], [12, 1])).is_none());
        assert!(Matrix::of(&TensorView::dense("x", 64, DType::Bf16, &[2, 3, 8])).is_none());
    }

    #[test]
    fn matrices_of_a_library_are_as_many_steps_apart_as_the_axis_says() {
        let view = TensorView::dense("x", 64, DType::Bf16, &[5, 3, 16]);
        let each = |axis| Matrix::of_each(&view, axis).map(|m| (m.extents, m.stride, m.step));
        assert_eq!(each(0), Some(([3, 16], 16, 48)));
        assert_eq!(each(1), Some(([5, 16], 48, 16)), "rows of one between those of another");
        assert_eq!(each(2), None, "elements apart");
        assert_eq!(each(3), None);
        let shifted = TensorView { strides: vec![52, 16, 1], ..view.clone() };
        assert_eq!(Matrix::of_each(&shifted, 0), None, "a step of 104 bytes");
        assert_eq!(
            Matrix::of_each(&TensorView { strides: vec![0, 16, 1], ..view }, 0),
            None,
            "all in one place"
        );
    }
}
