//! Tensors on the host (owned bytes) and views of tensors on a device.

use std::cmp::Reverse;
use std::fmt;

use half::bf16;
use serde::{Deserialize, Serialize};

use super::error::{Result, RuntimeError};

/// Element types of kernel tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// bfloat16.
    Bf16,
    /// Two's complement, 32 bits.
    I32,
    /// Two's complement, 64 bits.
    I64,
    /// Bytes (codes of narrow formats, two nibbles to a byte, packed cache rows).
    U8,
}

/// The properties of an element type.
struct Description {
    name: &'static str,
    c_name: &'static str,
    size: usize,
    integer: bool,
}

impl DType {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::F32, Self::Bf16, Self::I32, Self::I64, Self::U8];

    const fn description(self) -> Description {
        match self {
            Self::F32 => Description { name: "f32", c_name: "float", size: 4, integer: false },
            Self::Bf16 => Description { name: "bf16", c_name: "bf16", size: 2, integer: false },
            Self::I32 => Description { name: "i32", c_name: "int32_t", size: 4, integer: true },
            Self::I64 => Description { name: "i64", c_name: "int64_t", size: 8, integer: true },
            Self::U8 => Description { name: "u8", c_name: "uint8_t", size: 1, integer: true },
        }
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        self.description().size
    }

    /// The element type's name in kernel sources.
    pub fn c_name(self) -> &'static str {
        self.description().c_name
    }

    /// Whether it holds integers.
    pub fn is_integer(self) -> bool {
        self.description().integer
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.description().name)
    }
}

/// A dense row-major tensor on the host.
#[derive(Clone, PartialEq, Eq)]
pub struct HostTensor {
    /// Element type.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Elements in the machine's byte order.
    pub bytes: Vec<u8>,
}

impl fmt::Debug for HostTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostTensor({} {:?})", self.dtype, self.shape)
    }
}

impl HostTensor {
    /// Rounds f64 values to the nearest of `dtype` (ties to even). An integer type takes only its
    /// own values.
    ///
    /// # Panics
    /// When `values` does not have the number of elements of `shape`, or one of them is not a value
    /// of an integer type.
    pub fn from_f64(dtype: DType, shape: &[usize], values: &[f64]) -> Self {
        assert_eq!(
            values.len(),
            shape.iter().product::<usize>(),
            "values do not fill shape {shape:?}"
        );
        let bytes = match dtype {
            DType::F32 => values.iter().flat_map(|&v| (v as f32).to_ne_bytes()).collect(),
            DType::Bf16 => values.iter().flat_map(|&v| bf16::from_f64(v).to_ne_bytes()).collect(),
            DType::I32 => whole(dtype, values).flat_map(|v| (v as i32).to_ne_bytes()).collect(),
            DType::I64 => whole(dtype, values).flat_map(i64::to_ne_bytes).collect(),
            DType::U8 => whole(dtype, values).map(|v| v as u8).collect(),
        };
        Self { dtype, shape: shape.to_vec(), bytes }
    }

    /// An `i32` tensor.
    ///
    /// # Panics
    /// When `values` does not have the number of elements of `shape`.
    pub fn from_i32(shape: &[usize], values: &[i32]) -> Self {
        assert_eq!(
            values.len(),
            shape.iter().product::<usize>(),
            "values do not fill shape {shape:?}"
        );
        Self {
            dtype: DType::I32,
            shape: shape.to_vec(),
            bytes: values.iter().flat_map(|v| v.to_ne_bytes()).collect(),
        }
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Every element, widened: exactly, except integers of more than 53 bits (see
    /// [`Self::to_integers`]).
    pub fn to_f64(&self) -> Vec<f64> {
        match self.dtype {
            DType::F32 => self.words::<4>().map(|b| f64::from(f32::from_ne_bytes(b))).collect(),
            DType::Bf16 => self.words::<2>().map(|b| bf16::from_ne_bytes(b).to_f64()).collect(),
            DType::I32 => self.words::<4>().map(|b| f64::from(i32::from_ne_bytes(b))).collect(),
            DType::I64 => self.words::<8>().map(|b| i64::from_ne_bytes(b) as f64).collect(),
            DType::U8 => self.bytes.iter().map(|&b| f64::from(b)).collect(),
        }
    }

    /// The elements of an `i32` tensor.
    ///
    /// # Panics
    /// For another element type.
    pub fn to_i32(&self) -> Vec<i32> {
        assert_eq!(self.dtype, DType::I32, "to_i32 reads i32 tensors");
        self.words::<4>().map(i32::from_ne_bytes).collect()
    }

    /// The elements of a tensor of integers; `None` for another type.
    pub fn to_integers(&self) -> Option<Vec<i64>> {
        Some(match self.dtype {
            DType::I32 => self.words::<4>().map(|b| i32::from_ne_bytes(b).into()).collect(),
            DType::I64 => self.words::<8>().map(i64::from_ne_bytes).collect(),
            DType::U8 => self.bytes.iter().map(|&b| b.into()).collect(),
            DType::F32 | DType::Bf16 => return None,
        })
    }

    fn words<const N: usize>(&self) -> impl Iterator<Item = [u8; N]> + '_ {
        self.bytes.chunks_exact(N).map(|chunk| {
            let mut word = [0; N];
            word.copy_from_slice(chunk);
            word
        })
    }
}

/// Values as integers.
///
/// # Panics
/// For a value that `dtype` does not have.
fn whole(dtype: DType, values: &[f64]) -> impl Iterator<Item = i64> {
    let (low, high) = match dtype {
        DType::U8 => (0.0, 255.0),
        DType::I32 => (f64::from(i32::MIN), f64::from(i32::MAX)),
        // Up to 2^53 every integer is an f64.
        _ => (-9_007_199_254_740_992.0, 9_007_199_254_740_992.0),
    };
    values.iter().map(move |&v| {
        assert!(v.fract() == 0.0 && (low..=high).contains(&v), "{v} is no value of {dtype}");
        v as i64
    })
}

/// Strides of a dense row-major tensor, in elements.
pub fn dense_strides(shape: &[usize]) -> Vec<i64> {
    let mut strides = vec![1i64; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis].max(1) as i64;
    }
    strides
}

/// A tensor on a device: its address and its layout. Owned by the arena that made it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorView {
    /// Name in errors and reports.
    pub name: String,
    /// Device address of element 0.
    pub address: u64,
    /// Element type.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Distance between neighbours along each axis, in elements.
    pub strides: Vec<i64>,
}

impl TensorView {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the elements lie densely, in row-major order.
    pub fn is_dense(&self) -> bool {
        let dense = dense_strides(&self.shape);
        self.shape
            .iter()
            .zip(self.strides.iter().zip(&dense))
            .all(|(&extent, (a, b))| extent <= 1 || a == b)
    }

    /// The half-open range of device addresses from the first byte of the view to its last.
    pub fn span(&self) -> (u64, u64) {
        if self.elements() == 0 {
            return (self.address, self.address);
        }
        let last: i64 = self
            .shape
            .iter()
            .zip(&self.strides)
            .map(|(&extent, &stride)| (extent as i64 - 1) * stride)
            .sum();
        (self.address, self.address + (last as u64 + 1) * self.dtype.size() as u64)
    }

    /// Whether two views may share memory: their address ranges overlap, and they are not
    /// interleaved.
    pub fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (self.span(), other.span());
        a.0 < b.1 && b.0 < a.1 && !self.interleaves(other)
    }

    /// Whether the views are in two separate intervals of addresses modulo one of their strides:
    /// columns of one buffer.
    fn interleaves(&self, other: &Self) -> bool {
        let distance = i128::from(other.address) - i128::from(self.address);
        let mut pitches = self.byte_strides().chain(other.byte_strides()).map(|(_, stride)| stride);
        !pitches.clone().any(|stride| stride < 0)
            && pitches.any(|pitch| {
                let shift = if pitch > 0 { distance.rem_euclid(pitch) } else { 0 };
                shift >= self.bytes_within(pitch) && shift + other.bytes_within(pitch) <= pitch
            })
    }

    /// Size and stride in bytes of each axis that has more than one entry.
    fn byte_strides(&self) -> impl Iterator<Item = (i128, i128)> + Clone {
        let size = self.dtype.size() as i128;
        let axes = self.shape.iter().zip(&self.strides).filter(|(extent, _)| **extent > 1);
        axes.map(move |(&extent, &stride)| (extent as i128, i128::from(stride) * size))
    }

    /// Bytes from the first to the last of the view, ignoring axes that keep the address modulo
    /// `pitch`.
    fn bytes_within(&self, pitch: i128) -> i128 {
        let inner = self.byte_strides().filter(|&(_, stride)| pitch > 0 && stride % pitch != 0);
        self.dtype.size() as i128
            + inner.map(|(extent, stride)| (extent - 1) * stride).sum::<i128>()
    }

    /// Whether two views are the same elements in the same order.
    pub fn same_elements(&self, other: &Self) -> bool {
        let strides = self.strides.iter().zip(&other.strides);
        self.address == other.address
            && (self.dtype, &self.shape) == (other.dtype, &other.shape)
            && self.shape.iter().zip(strides).all(|(&extent, (a, b))| extent <= 1 || a == b)
    }

    /// A dense tensor at `address`.
    pub fn dense(name: impl Into<String>, address: u64, dtype: DType, shape: &[usize]) -> Self {
        Self {
            name: name.into(),
            address,
            dtype,
            shape: shape.to_vec(),
            strides: dense_strides(shape),
        }
    }

    /// The view without the first `entries` entries of its first axis.
    pub fn skip(&self, entries: usize) -> Self {
        let mut rest = self.clone();
        rest.address += entries as u64 * self.strides[0] as u64 * self.dtype.size() as u64;
        rest.shape[0] = rest.shape[0].saturating_sub(entries);
        rest
    }

    /// The view with its first two axes merged into one; `None` if their entries are not evenly
    /// spaced.
    pub fn merged(&self) -> Option<Self> {
        let ([outer, inner, ..], [outer_stride, inner_stride, ..]) =
            (&self.shape[..], &self.strides[..])
        else {
            return None;
        };
        let stride = if *inner > 1 { *inner_stride } else { *outer_stride };
        let even = *outer <= 1
            || *inner <= 1
            || i128::from(*outer_stride) == *inner as i128 * i128::from(stride);
        let mut merged = self.clone();
        merged.shape.splice(..2, [outer * inner]);
        merged.strides.splice(..2, [stride]);
        even.then_some(merged)
    }

    /// The `len` entries from entry `from` on along an axis: a chunk of a sequence, a page of a
    /// store. The view has the same memory and the same name.
    ///
    /// # Errors
    /// [`RuntimeError::Argument`] for an axis that the view does not have, and for entries beyond
    /// its size.
    pub fn narrow(&self, axis: usize, from: usize, len: usize) -> Result<Self> {
        let refused =
            |argument, reason| RuntimeError::argument("TensorView::narrow", argument, reason);
        let Some((&extent, &stride)) = self.shape.get(axis).zip(self.strides.get(axis)) else {
            let reason = format!(
                "{axis}: `{}` of shape {:?} has {} axes",
                self.name,
                self.shape,
                self.shape.len()
            );
            return Err(refused("axis", reason));
        };
        if from > extent || len > extent - from {
            let reason = format!(
                "{len} entries from {from} on: axis {axis} of `{}` has {extent}",
                self.name
            );
            return Err(refused("len", reason));
        }
        let mut narrowed = self.clone();
        narrowed.shape[axis] = len;
        // A view without elements has no memory: its strides may be arbitrary.
        if narrowed.elements() > 0 {
            let bytes = from as i64 * stride * self.dtype.size() as i64;
            narrowed.address = self.address.wrapping_add_signed(bytes);
        }
        Ok(narrowed)
    }

    /// The entry `index` along an axis, without that axis: one of the groups of a layer.
    ///
    /// # Errors
    /// As [`Self::narrow`].
    pub fn entry(&self, axis: usize, index: usize) -> Result<Self> {
        let mut entry = self.narrow(axis, index, 1)?;
        entry.shape.remove(axis);
        entry.strides.remove(axis);
        Ok(entry)
    }

    /// The view with its last axis split into two, of `parts` entries and the rest; `None` if there
    /// is no axis, or `parts` does not divide it.
    pub fn parted(&self, parts: usize) -> Option<Self> {
        let (&width, &stride) = (self.shape.last()?, self.strides.last()?);
        let part = width.checked_div(parts).filter(|part| part * parts == width)?;
        let mut parted = self.clone();
        parted.shape.splice(self.shape.len() - 1.., [parts, part]);
        parted.strides.splice(self.strides.len() - 1.., [part as i64 * stride, stride]);
        Some(parted)
    }

    /// The same elements with the axes from outermost to innermost in memory, without axes of one
    /// element.
    pub(super) fn in_memory_order(&self) -> Self {
        let mut axes: Vec<usize> =
            (0..self.shape.len()).filter(|&axis| self.shape[axis] != 1).collect();
        axes.sort_by_key(|&axis| Reverse(self.strides[axis]));
        Self {
            shape: axes.iter().map(|&axis| self.shape[axis]).collect(),
            strides: axes.iter().map(|&axis| self.strides[axis]).collect(),
            ..self.clone()
        }
    }

    /// Byte offsets of the view's contiguous pieces from element 0, in row-major order, and the
    /// bytes of each. The last axes that are dense together make a piece. A dense tensor is one
    /// piece; where the last axis is strided, every element is one.
    pub fn pieces(&self) -> (Vec<usize>, usize) {
        let size = self.dtype.size();
        if self.elements() == 0 {
            return (Vec::new(), 0);
        }
        let (mut outer, mut elements) = (self.shape.len(), 1);
        while outer > 0
            && (self.shape[outer - 1] == 1 || self.strides[outer - 1] == elements as i64)
        {
            outer -= 1;
            elements *= self.shape[outer];
        }
        let mut offsets = vec![0usize];
        for (&extent, &stride) in self.shape[..outer].iter().zip(&self.strides) {
            let mut along = Vec::with_capacity(offsets.len() * extent);
            for base in offsets {
                along.extend((0..extent).map(|i| base + i * stride as usize * size));
            }
            offsets = along;
        }
        (offsets, elements * size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(shape: &[usize], strides: &[i64]) -> TensorView {
        TensorView {
            name: "x".into(),
            address: 0,
            dtype: DType::Bf16,
            shape: shape.to_vec(),
            strides: strides.to_vec(),
        }
    }

    /// The definition: each element separately.
    fn element_offsets(view: &TensorView) -> Vec<usize> {
        let mut offsets = vec![0];
        for (&extent, &stride) in view.shape.iter().zip(&view.strides) {
            offsets = offsets
                .iter()
                .flat_map(|base| (0..extent).map(move |i| base + 2 * i * stride as usize))
                .collect();
        }
        offsets
    }

    #[test]
    fn an_entry_loses_its_axis_and_a_parted_row_gains_one() {
        let rows = TensorView {
            strides: vec![100, 1],
            ..TensorView::dense("rows", 64, DType::Bf16, &[3, 12])
        };
        let parted = rows.parted(4).expect("four of three");
        assert_eq!((&parted.shape[..], &parted.strides[..]), (&[3, 4, 3][..], &[100, 3, 1][..]));
        let entry = parted.entry(1, 2).expect("the third of four");
        assert_eq!(
            (entry.address, &entry.shape[..], &entry.strides[..]),
            (64 + 12, &[3, 3][..], &[100, 1][..])
        );
        assert!(
            rows.parted(5).is_none() && rows.parted(0).is_none() && parted.entry(1, 4).is_err()
        );
    }

    #[test]
    fn pieces_are_the_elements_in_row_major_order_and_as_long_as_the_layout_allows() {
        for (shape, strides, pieces, bytes) in [
            (vec![], vec![], 1, 2),
            (vec![2, 3, 4], vec![12, 4, 1], 1, 48),
            (vec![2, 3, 4], vec![15, 5, 1], 6, 8),
            (vec![2, 3, 4], vec![1 << 33, 4, 1], 2, 24),
            (vec![2, 3, 4], vec![4, 8, 1], 6, 8),
            (vec![2, 3, 4], vec![1, 2, 6], 24, 2),
            (vec![2, 1, 4], vec![4, 99, 1], 1, 16),
            (vec![2, 3, 1], vec![1 << 40, 1, 7], 2, 6),
            (vec![2, 0, 4], vec![4, 4, 1], 0, 0),
        ] {
            let view = view(&shape, &strides);
            let (offsets, piece) = view.pieces();
            assert_eq!((offsets.len(), piece), (pieces, bytes), "{shape:?} {strides:?}");
            let elements: Vec<usize> =
                offsets.iter().flat_map(|at| (*at..at + piece).step_by(2)).collect();
            assert_eq!(elements, element_offsets(&view), "{shape:?} {strides:?}");
        }
    }

    #[test]
    fn chunks_of_a_view_are_its_elements_in_order_whatever_the_layout() {
        for strides in [[12, 4, 1], [40, 9, 1], [4, 8, 1], [1, 2, 6], [1 << 33, 4, 1]] {
            let whole = view(&[2, 3, 4], &strides);
            for axis in 0..3 {
                let extent = whole.shape[axis];
                for from in 0..=extent {
                    for len in 0..=extent - from {
                        let chunk = whole.narrow(axis, from, len).expect("within the view");
                        let outer: usize = whole.shape[..axis].iter().product();
                        let inner: usize = whole.shape[axis + 1..].iter().product();
                        let all = element_offsets(&whole);
                        let places = (0..outer)
                            .flat_map(|o| (from..from + len).map(move |entry| o * extent + entry));
                        let expected: Vec<usize> = places
                            .flat_map(|at| all[at * inner..(at + 1) * inner].to_vec())
                            .collect();
                        let own = element_offsets(&chunk)
                            .into_iter()
                            .map(|offset| chunk.address as usize + offset);
                        assert_eq!(
                            own.collect::<Vec<_>>(),
                            expected,
                            "{from} {len} of axis {axis}, strides {strides:?}"
                        );
                        assert_eq!(chunk.span().0 == chunk.span().1, len == 0);
                    }
                }
            }
        }
    }

    #[test]
    fn a_chunk_beyond_the_view_is_refused_with_the_argument() {
        let x = view(&[2, 3], &[3, 1]);
        for (axis, from, len, named) in [
            (2, 0, 0, "axis"),
            (1, 4, 0, "len"),
            (1, 2, 2, "len"),
            (0, 3, 0, "len"),
            (0, 1, usize::MAX, "len"),
        ] {
            match x.narrow(axis, from, len) {
                Err(RuntimeError::Argument { argument, .. }) => assert_eq!(argument, named),
                other => panic!("{len} entries from {from} on along axis {axis}: {other:?}"),
            }
        }
    }

    #[test]
    fn in_memory_order_a_permuted_tensor_is_dense_and_a_gap_stays_a_gap() {
        let order = |shape: &[usize], strides: &[i64]| view(shape, strides).in_memory_order();
        assert_eq!(order(&[2, 3, 4], &[1, 2, 6]).pieces(), (vec![0], 48));
        assert_eq!(order(&[2, 1, 3, 4], &[4, 0, 9, 1]).strides, [9, 4, 1]);
        assert_eq!(order(&[2, 3, 4], &[4, 9, 1]).pieces(), (vec![0, 18, 36], 16));
    }

    fn view_at(address: u64, dtype: DType, shape: &[usize], strides: &[i64]) -> TensorView {
        TensorView {
            strides: strides.to_vec(),
            ..TensorView::dense("a view", address, dtype, shape)
        }
    }

    /// Whether any byte belongs to both, element by element.
    fn shares(a: &TensorView, b: &TensorView) -> bool {
        let bytes = |view: &TensorView| -> Vec<u64> {
            let mut starts = vec![view.address];
            for (&extent, &stride) in view.shape.iter().zip(&view.strides) {
                let step = stride as u64 * view.dtype.size() as u64;
                starts = starts
                    .iter()
                    .flat_map(|&start| (0..extent as u64).map(move |i| start + i * step))
                    .collect();
            }
            starts.iter().flat_map(|&start| start..start + view.dtype.size() as u64).collect()
        };
        let b = bytes(b);
        bytes(a).iter().any(|byte| b.contains(byte))
    }

    #[test]
    fn views_whose_bytes_meet_always_overlap_and_columns_of_one_buffer_do_not() {
        let layouts: [(DType, &[usize], &[i64]); 6] = [
            (DType::Bf16, &[3, 4], &[16, 1]),
            (DType::F32, &[3, 2], &[8, 1]),
            (DType::Bf16, &[2, 3, 4], &[4, 16, 1]),
            (DType::Bf16, &[3, 2, 4], &[16, 4, 1]),
            (DType::U8, &[2, 5], &[32, 1]),
            (DType::Bf16, &[7], &[1]),
        ];
        let mut apart = 0;
        for (dtype, shape, strides) in layouts {
            let a = view_at(128, dtype, shape, strides);
            for (dtype, shape, strides) in layouts {
                for address in (64..300).step_by(dtype.size()) {
                    let b = view_at(address, dtype, shape, strides);
                    assert!(a.overlaps(&b) || !shares(&a, &b), "{a:?} and {b:?}");
                    let meet = a.span().0 < b.span().1 && b.span().0 < a.span().1;
                    apart += usize::from(meet && !a.overlaps(&b));
                }
            }
        }
        assert!(apart > 100, "{apart} pairs pass each other");
    }

    #[test]
    fn columns_of_rows_of_unlike_width_and_type_pass_each_other() {
        let wide = view_at(0, DType::Bf16, &[4, 6], &[16, 1]);
        assert!(!wide.overlaps(&view_at(16, DType::F32, &[4, 4], &[8, 1])));
        assert!(wide.overlaps(&view_at(8, DType::F32, &[4, 4], &[8, 1])));
    }

    #[test]
    fn strides_of_axes_with_one_entry_do_not_tell_views_apart() {
        let x = view_at(64, DType::Bf16, &[1, 4], &[4, 1]);
        assert!(x.same_elements(&view_at(64, DType::Bf16, &[1, 4], &[99, 1])));
        assert!(!x.same_elements(&view_at(64, DType::I32, &[1, 4], &[4, 1])));
        assert!(!view_at(64, DType::Bf16, &[2, 4], &[4, 1]).same_elements(&view_at(
            64,
            DType::Bf16,
            &[2, 4],
            &[8, 1]
        )));
    }

    #[test]
    fn evenly_spaced_axes_merge_and_others_do_not() {
        let merged =
            |shape: &[usize], strides: &[i64]| view_at(0, DType::Bf16, shape, strides).merged();
        let even = merged(&[2, 3, 4, 8], &[96, 32, 8, 1]).expect("dense");
        assert_eq!((even.shape, even.strides), (vec![6, 4, 8], vec![32, 8, 1]));
        let heads_first = merged(&[2, 3, 4, 8], &[24, 8, 48, 1]).expect("tokens are 8 apart");
        assert_eq!(heads_first.strides, [8, 48, 1]);
        assert_eq!(merged(&[2, 3, 4, 8], &[128, 32, 8, 1]), None);
        assert_eq!(merged(&[5, 1, 8], &[40, 3, 1]).expect("one token each").strides, [40, 1]);
        assert_eq!(merged(&[1, 5, 8], &[3, 40, 1]).expect("one request").strides, [40, 1]);
    }

    #[test]
    fn every_type_takes_its_own_values_and_gives_them_back() {
        for dtype in DType::ALL {
            let values: &[f64] =
                if dtype.is_integer() { &[0.0, 7.0, 255.0] } else { &[0.0, -1.5, f64::INFINITY] };
            let tensor = HostTensor::from_f64(dtype, &[3], values);
            assert_eq!(
                (tensor.bytes.len(), tensor.to_f64()),
                (3 * dtype.size(), values.to_vec()),
                "{dtype}"
            );
            let integers = dtype.is_integer().then(|| vec![0, 7, 255]);
            assert_eq!(tensor.to_integers(), integers, "{dtype}");
        }
    }

    #[test]
    fn integers_of_64_bits_are_read_whole() {
        let value = (1i64 << 60) + 1;
        let tensor =
            HostTensor { dtype: DType::I64, shape: vec![1], bytes: value.to_ne_bytes().into() };
        assert_eq!(tensor.to_integers(), Some(vec![value]));
    }

    #[test]
    #[should_panic(expected = "0.5 is no value of i64")]
    fn a_fraction_is_no_integer() {
        HostTensor::from_f64(DType::I64, &[1], &[0.5]);
    }
}
