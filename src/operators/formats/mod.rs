//! Number formats: quantization, and the layouts of codes and scales.

use dsv4_reference::formats::scale_layout::{ScaleLayout, Scales};
use dsv4_runtime::HostTensor;

use crate::operator::batches::Cut;
use crate::operator::tensors::Tensors;

pub mod gate_up_interleave;
pub mod hadamard;
pub mod quantize_fp8;
pub mod quantize_mxfp4;
pub mod quantize_nvfp4;
pub mod scale_swizzle;

/// Scales of a cut's rows, where the layout gives rows no axis. `of` is the layout for a number of
/// rows, of which the case has `rows`.
pub(crate) fn cut_scales(
    tensors: &mut Tensors,
    name: &'static str,
    rows: usize,
    of: impl Fn(usize) -> Scales,
    cut: &Cut,
) {
    let Some(tensor) = tensors.get(name) else { return };
    let (from, to) = (of(rows), of(cut.order.len()));
    // Scales row by row have the axis, and are cut as every tensor is.
    if from.layout == ScaleLayout::Plain {
        return;
    }
    let bytes = if from.bytes { 1 } else { tensor.dtype.size() };
    let mut cut_bytes = vec![0; to.places() * bytes];
    for (row, &source) in cut.order.iter().enumerate() {
        for group in 0..from.groups {
            let (there, here) = (to.place(row, group) * bytes, from.place(source, group) * bytes);
            let scale = &tensor.bytes[here..here + bytes];
            cut_bytes[there..there + bytes].copy_from_slice(scale);
        }
    }
    let new = HostTensor { dtype: tensor.dtype, shape: to.shape(), bytes: cut_bytes };
    tensors.put(name, new);
}
