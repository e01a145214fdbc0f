//! The operators: how each one's kernel and oracle are compared.

pub mod attention_combine;
pub mod decode_attention;
pub mod kv_cache_write;
pub mod rms_norm;
pub mod rope;
pub mod score_recompute;
pub mod sparse_attention;
pub mod swiglu;

use candle_core::{Device as Cpu, Tensor};
use dsv4_kernels::runtime::arena::Layout;
use dsv4_kernels::runtime::{DType, DeviceArena, HostTensor, Role, RuntimeError, TensorView};
use proptest::prelude::*;
use proptest::strategy::BoxedStrategy;
use serde::{Deserialize, Serialize};

use crate::case::CaseError;
use crate::operator::{KernelTensor, OracleTensor, Side};

/// Floating-point types of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Float {
    /// bfloat16.
    Bf16,
    /// IEEE binary32.
    F32,
}

impl Float {
    /// The runtime's name of it.
    pub fn dtype(self) -> DType {
        match self {
            Self::Bf16 => DType::Bf16,
            Self::F32 => DType::F32,
        }
    }
}

/// How an output lies relative to its input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aliasing {
    /// A buffer of its own.
    OutOfPlace,
    /// The input itself, declared as such.
    InPlace,
    /// A view of the input's buffer: rows of input and output alternate.
    Interleaved,
}

/// Elements of the largest tensor that a strategy draws: ten oracle runs of it take a second or so.
pub(crate) const LARGEST_DRAWN: usize = 1 << 20;

/// An extent of a case: 1, an exact multiple of `unit`, or anything up to `largest`.
pub(crate) fn extent(largest: usize, unit: usize) -> BoxedStrategy<usize> {
    let multiples = (largest / unit).max(1);
    prop_oneof![
        1 => Just(1),
        2 => (1..=multiples).prop_map(move |n| n * unit),
        5 => 1..=largest,
    ]
    .boxed()
}

/// Magnitudes, log-uniform over powers of two, and not only those.
pub(crate) fn magnitude(log2: std::ops::RangeInclusive<i32>) -> BoxedStrategy<f64> {
    (log2, prop_oneof![Just(1.0), Just(1.375)]).prop_map(|(exponent, factor)| factor * 2f64.powi(exponent)).boxed()
}

/// A candle tensor in f64.
pub(crate) fn tensor(values: Vec<f64>, shape: &[usize]) -> Result<Tensor, candle_core::Error> {
    Tensor::from_vec(values, shape, &Cpu::Cpu)
}

/// A host tensor as the oracle sees it: widened.
pub(crate) fn widened(host: &HostTensor) -> Result<Tensor, candle_core::Error> {
    tensor(host.to_f64(), &host.shape)
}

/// A candle tensor's elements, row-major.
pub(crate) fn elements(tensor: &Tensor) -> Result<Vec<f64>, candle_core::Error> {
    tensor.flatten_all()?.to_vec1()
}

/// The oracle's error as a case's.
pub(crate) fn oracle_error(operator: &'static str, error: impl std::fmt::Display) -> CaseError {
    CaseError::Oracle { operator, reason: error.to_string() }
}

/// An oracle's tensor.
pub(crate) fn oracle_tensor(
    name: &'static str,
    side: Side,
    tensor: &Tensor,
) -> Result<OracleTensor, candle_core::Error> {
    Ok(OracleTensor { name, side, shape: tensor.dims().to_vec(), values: elements(tensor)? })
}

/// A kernel's tensor whose bits two runs must repeat.
pub(crate) fn deterministic(name: &'static str, tensor: HostTensor) -> KernelTensor {
    KernelTensor { name, tensor, deterministic: true }
}

/// Dense, or with `padding` elements after each row.
pub(crate) fn layout(shape: &[usize], padding: usize) -> Layout {
    if padding == 0 { Layout::dense(shape) } else { Layout::padded(shape, padding) }
}

/// Two tensors of one shape in one buffer: row `r` of the first, then row `r` of the second.
fn interleaved(shape: &[usize]) -> (Layout, usize) {
    let row = shape.last().copied().unwrap_or(1);
    let rows: usize = shape[..shape.len() - 1].iter().product();
    let mut layout = Layout::padded(shape, row);
    layout.elements = 2 * rows * row;
    (layout, row)
}

/// Uploads `x` and places a `y` of its shape as `aliasing` says, with `padding` elements after each row.
pub(crate) fn place(
    arena: &mut DeviceArena<'_>,
    x: &HostTensor,
    aliasing: Aliasing,
    padding: usize,
) -> Result<(TensorView, TensorView), RuntimeError> {
    let padded = layout(&x.shape, padding);
    match aliasing {
        Aliasing::OutOfPlace => {
            let input = arena.upload("x", x, &padded, Role::Input)?;
            let output = arena.allocate("y", x.dtype, &x.shape, &padded, Role::Output)?;
            Ok((input, output))
        }
        Aliasing::InPlace => {
            let both = arena.upload("x", x, &padded, Role::InPlace)?;
            Ok((both.clone(), both))
        }
        Aliasing::Interleaved => {
            let (layout, row) = interleaved(&x.shape);
            let input = arena.upload("x", x, &layout, Role::Input)?;
            let address = input.address + (row * x.dtype.size()) as u64;
            let output = TensorView { name: "y".into(), address, ..input.clone() };
            arena.also_writes(&output);
            Ok((input, output))
        }
    }
}

/// The tensor times a factor, rounded to its own type (exactly, for a power of two).
pub(crate) fn scaled(tensor: &HostTensor, factor: f64) -> HostTensor {
    let values: Vec<f64> = tensor.to_f64().iter().map(|value| value * factor).collect();
    HostTensor::from_f64(tensor.dtype, &tensor.shape, &values)
}

/// Entry `i` along the first axis is entry `order[i]` of `tensor`.
pub(crate) fn permuted(tensor: &HostTensor, order: &[usize]) -> HostTensor {
    let entry = tensor.bytes.len() / order.len().max(1);
    let bytes = order.iter().flat_map(|&from| tensor.bytes[from * entry..(from + 1) * entry].iter().copied()).collect();
    HostTensor { bytes, ..tensor.clone() }
}

/// Which kernels run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Implementation {
    /// `NAME.cu`.
    #[default]
    Portable,
    /// `NAME_hopper*.cu`.
    Hopper,
}

impl Implementation {
    pub(crate) fn launcher(self) -> dsv4_kernels::implementation::Implementation {
        match self {
            Self::Portable => dsv4_kernels::implementation::Implementation::Portable,
            Self::Hopper => dsv4_kernels::implementation::Implementation::Hopper,
        }
    }
}
