//! Tensors on the host (owned bytes) and views of tensors on a device.

use std::fmt;

use half::bf16;
use serde::{Deserialize, Serialize};

/// Element types that cross to a kernel.
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

/// What there is to say of an element type.
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
    /// Extents, outermost first.
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
    /// Rounds f64 values to the nearest of `dtype` (ties to even). An integer type takes what it has.
    ///
    /// # Panics
    /// When `values` does not have the elements of `shape`, or one of them is none of an integer type's.
    pub fn from_f64(dtype: DType, shape: &[usize], values: &[f64]) -> Self {
        assert_eq!(values.len(), shape.iter().product::<usize>(), "values do not fill shape {shape:?}");
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
    /// When `values` does not have the elements of `shape`.
    pub fn from_i32(shape: &[usize], values: &[i32]) -> Self {
        assert_eq!(values.len(), shape.iter().product::<usize>(), "values do not fill shape {shape:?}");
        Self { dtype: DType::I32, shape: shape.to_vec(), bytes: values.iter().flat_map(|v| v.to_ne_bytes()).collect() }
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Every element, widened: exactly, but for integers of more than 53 bits ([`Self::to_integers`] has those).
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

/// Values as the integers that they are.
///
/// # Panics
/// For one that `dtype` does not have.
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

/// A tensor on a device: where it is and how it is laid out. Owned by the arena that made it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorView {
    /// Name in errors and reports.
    pub name: String,
    /// Device address of element 0.
    pub address: u64,
    /// Element type.
    pub dtype: DType,
    /// Extents, outermost first.
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
        self.shape.iter().zip(self.strides.iter().zip(&dense)).all(|(&extent, (a, b))| extent <= 1 || a == b)
    }

    /// The half-open range of device addresses from the first byte of the view to its last.
    pub fn span(&self) -> (u64, u64) {
        if self.elements() == 0 {
            return (self.address, self.address);
        }
        let last: i64 =
            self.shape.iter().zip(&self.strides).map(|(&extent, &stride)| (extent as i64 - 1) * stride).sum();
        (self.address, self.address + (last as u64 + 1) * self.dtype.size() as u64)
    }

    /// Whether two views may share memory: their address ranges meet, and they are not two combs of rows
    /// whose teeth pass each other.
    pub fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (self.span(), other.span());
        a.0 < b.1 && b.0 < a.1 && !self.interleaves(other)
    }

    /// Whether rows of two views of one layout alternate without touching.
    fn interleaves(&self, other: &Self) -> bool {
        let (Some((&row, outer)), Some((&1, strides))) = (self.shape.split_last(), self.strides.split_last()) else {
            return false;
        };
        let pitches = || outer.iter().zip(strides).filter(|(extent, _)| **extent > 1).map(|(_, &stride)| stride);
        let Some(pitch) = pitches().min().filter(|&pitch| pitch > 0) else { return false };
        let bytes = other.address as i64 - self.address as i64;
        let size = self.dtype.size() as i64;
        let alike = self.dtype == other.dtype && self.shape == other.shape && self.strides == other.strides;
        let shift = (bytes / size).rem_euclid(pitch);
        alike
            && bytes % size == 0
            && pitches().all(|stride| stride % pitch == 0)
            && shift >= row as i64
            && shift + row as i64 <= pitch
    }

    /// Whether two views are the same elements in the same order.
    pub fn same_elements(&self, other: &Self) -> bool {
        self.address == other.address && self.shape == other.shape && self.strides == other.strides
    }

    /// Byte offsets of the view's contiguous pieces from element 0, in row-major order, and the bytes of each.
    /// A dense tensor is one piece.
    pub fn pieces(&self) -> (Vec<usize>, usize) {
        let size = self.dtype.size();
        if self.elements() == 0 {
            return (Vec::new(), 0);
        }
        if self.is_dense() {
            return (vec![0], self.elements() * size);
        }
        let (outer, row) = match (self.shape.split_last(), self.strides.last()) {
            (Some((&last, outer)), Some(1)) => (outer, last),
            _ => (&self.shape[..], 1),
        };
        let mut offsets = vec![0usize];
        for (&extent, &stride) in outer.iter().zip(&self.strides) {
            let along = |&base: &usize| (0..extent).map(move |i| base + i * stride as usize * size);
            offsets = offsets.iter().flat_map(along).collect();
        }
        (offsets, row * size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_takes_its_own_values_and_gives_them_back() {
        for dtype in DType::ALL {
            let values: &[f64] = if dtype.is_integer() { &[0.0, 7.0, 255.0] } else { &[0.0, -1.5, f64::INFINITY] };
            let tensor = HostTensor::from_f64(dtype, &[3], values);
            assert_eq!((tensor.bytes.len(), tensor.to_f64()), (3 * dtype.size(), values.to_vec()), "{dtype}");
            let integers = dtype.is_integer().then(|| vec![0, 7, 255]);
            assert_eq!(tensor.to_integers(), integers, "{dtype}");
        }
    }

    #[test]
    fn integers_of_64_bits_are_read_whole() {
        let value = (1i64 << 60) + 1;
        let tensor = HostTensor { dtype: DType::I64, shape: vec![1], bytes: value.to_ne_bytes().into() };
        assert_eq!(tensor.to_integers(), Some(vec![value]));
    }

    #[test]
    #[should_panic(expected = "0.5 is no value of i64")]
    fn a_fraction_is_no_integer() {
        HostTensor::from_f64(DType::I64, &[1], &[0.5]);
    }
}
