//! `swiglu`: launchers of `kernels/cuda/swiglu.cu` (inference 11.1, training 11.2).

use crate::arguments::{Argument, Arguments, FLOATS, is_aligned, read, write};
use crate::runtime::device::{Module, module};
use crate::runtime::{DType, Device, Result, TensorView};

const FILE: &str = "swiglu.cu";
const CHECK: Arguments = Arguments { operator: "swiglu" };
/// Rows of a block: one a warp.
const ROWS_PER_BLOCK: usize = 4;

/// What both directions read. All tensors of `[num_rows, width]` have contiguous rows and strides of their own: the halves
/// of one `[num_rows, 2 * width]` tensor will do.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// `[num_rows, width]`, bf16 or f32: clamped from above.
    pub gate: &'a TensorView,
    /// `[num_rows, width]`, the type of `gate`: clamped on both sides.
    pub up: &'a TensorView,
    /// `[num_rows]` f32: the routing weight; `None` is a weight of ones.
    pub weight: Option<&'a TensorView>,
    /// `[num_rows]` i32: negative for a padding row, which is not read and gets zeros; `None` where there is none.
    pub pos_to_token_topk: Option<&'a TensorView>,
    /// The limit of the clamps; above 0.
    pub limit: f32,
}

/// What the backward writes.
#[derive(Clone, Copy, Debug)]
pub struct Gradients<'a> {
    /// `[num_rows, width]`, the type of `gate`.
    pub dgate: &'a TensorView,
    /// `[num_rows, width]`, the type of `gate`.
    pub dup: &'a TensorView,
    /// `[num_rows]` f32; present exactly when `weight` is.
    pub dweight: Option<&'a TensorView>,
}

fn defines(element: DType) -> Vec<(&'static str, String)> {
    vec![("ELEMENT", element.c_name().to_owned())]
}

/// Every module that the launchers compile.
pub fn modules() -> Vec<Module> {
    FLOATS.map(|element| module(FILE, &defines(element))).into()
}

/// `y = weight * silu(min(gate, limit)) * clamp(up, -limit, limit)`, `[num_rows, width]`, the type of `gate`; returns the
/// kernel that ran.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn forward(device: &Device, inputs: &Inputs<'_>, y: &TensorView) -> Result<&'static str> {
    let kernels = ["swiglu_forward_vector", "swiglu_forward_scalar"];
    launch(device, inputs, kernels, &[write("y", y).like("gate").rows()], [Some(y), None, None, None], None)
}

/// The gradients for the upstream gradient `dy` `[num_rows, width]` of the type of `gate`; returns the kernel that ran.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn backward(device: &Device, inputs: &Inputs<'_>, dy: &TensorView, to: &Gradients<'_>) -> Result<&'static str> {
    let tensors = [
        read("dy", dy).like("gate").rows(),
        write("dgate", to.dgate).like("gate").rows(),
        write("dup", to.dup).like("gate").rows(),
        write("dweight", to.dweight).axes(&["num_rows"]).with("weight"),
    ];
    let kernels = ["swiglu_backward_vector", "swiglu_backward_scalar"];
    launch(device, inputs, kernels, &tensors, [None, Some(dy), Some(to.dgate), Some(to.dup)], to.dweight)
}

/// Launches the first of the kernels where every access may be 16 bytes wide, the second elsewhere. `rows` are y, dy,
/// dgate and dup.
fn launch(
    device: &Device,
    inputs: &Inputs<'_>,
    [vector, scalar]: [&'static str; 2],
    further: &[Argument<'_>],
    rows: [Option<&TensorView>; 4],
    dweight: Option<&TensorView>,
) -> Result<&'static str> {
    let Inputs { gate, up, weight, pos_to_token_topk, limit } = *inputs;
    let tensors = [
        read("gate", gate).of(&FLOATS).axes(&["num_rows", "width"]).rows(),
        read("up", up).like("gate").rows(),
        read("weight", weight).axes(&["num_rows"]),
        read("pos_to_token_topk", pos_to_token_topk).of(&[DType::I32]).axes(&["num_rows"]),
    ];
    let signature = CHECK.signature(tensors).and(further.iter().copied());
    let [num_rows, width] =
        signature.extent("width", 1, i32::MAX as usize).wide("num_rows").bind(["num_rows", "width"])?;
    CHECK.positive("limit", limit)?;
    let params = CHECK.params().strided("gate", gate, ["row_stride"]).strided("up", up, ["row_stride"]);
    let params = params.ptr("weight", weight).ptr("pos_to_token_topk", pos_to_token_topk);
    let named = ["y", "dy", "dgate", "dup"].into_iter().zip(rows);
    let params = named.fold(params, |params, (name, view)| params.strided(name, view, ["row_stride"]));
    let params = params.ptr("dweight", dweight).i64("num_rows", num_rows)?.i32("width", width)?.f32("limit", limit);
    let vectorised = (width * gate.dtype.size()).is_multiple_of(16);
    let aligned = [Some(gate), Some(up)].into_iter().chain(rows).flatten().all(is_aligned);
    let name = if vectorised && aligned { vector } else { scalar };
    let kernel = device.kernel(FILE, &defines(gate.dtype), name)?;
    kernel.launch_blocks("gate", num_rows.div_ceil(ROWS_PER_BLOCK), &params)?;
    Ok(name)
}
