//! `swiglu`: launchers of `kernels/cuda/swiglu.cu` (inference 11.1, training 11.2).

use crate::arguments::{Arguments, FLOATS, element_types, modules_of_floats, read, write};
use crate::runtime::device::Module;
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

/// Every module that the launchers compile.
pub fn modules() -> Vec<Module> {
    modules_of_floats(FILE, &["ELEMENT"])
}

/// `y = weight * silu(min(gate, limit)) * clamp(up, -limit, limit)`, `[num_rows, width]`, the type of `gate`; returns the
/// kernel that ran.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn forward(device: &Device, inputs: &Inputs<'_>, y: &TensorView) -> Result<&'static str> {
    launch(device, ["swiglu_forward_vector", "swiglu_forward_scalar"], inputs, Some(y), None)
}

/// The gradients for the upstream gradient `dy` `[num_rows, width]` of the type of `gate`; returns the kernel that ran.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn backward(device: &Device, inputs: &Inputs<'_>, dy: &TensorView, to: &Gradients<'_>) -> Result<&'static str> {
    launch(device, ["swiglu_backward_vector", "swiglu_backward_scalar"], inputs, None, Some((dy, to)))
}

/// Launches the first of the kernels where every access may be 16 bytes wide, the second elsewhere.
fn launch(
    device: &Device,
    [vector, scalar]: [&'static str; 2],
    &Inputs { gate, up, weight, pos_to_token_topk, limit }: &Inputs<'_>,
    y: Option<&TensorView>,
    backward: Option<(&TensorView, &Gradients<'_>)>,
) -> Result<&'static str> {
    let (dy, to) = backward.unzip();
    let tensors = [
        read("gate", gate).of(&FLOATS).axes(&["num_rows", "width"]).rows(),
        read("up", up).like("gate").rows(),
        read("weight", weight).axes(&["num_rows"]),
        read("pos_to_token_topk", pos_to_token_topk).of(&[DType::I32]).axes(&["num_rows"]),
        write("y", y).like("gate").rows(),
        read("dy", dy).like("gate").rows(),
        write("dgate", to.map(|to| to.dgate)).like("gate").rows(),
        write("dup", to.map(|to| to.dup)).like("gate").rows(),
        write("dweight", to.and_then(|to| to.dweight)).axes(&["num_rows"]).with(&["weight", "dy"]),
    ];
    let mut call = CHECK.signature(tensors).extent("width", 1, i32::MAX as usize).wide("num_rows");
    let [num_rows, width] = call.bind(["num_rows", "width"])?;
    CHECK.positive("limit", limit)?;
    let params = call.params(&["gate", "up", "weight", "pos_to_token_topk", "y", "dy", "dgate", "dup", "dweight"]);
    let params = params.i64("num_rows", num_rows)?.i32("width", width)?.f32("limit", limit);
    let name = if call.vectorised() { vector } else { scalar };
    let kernel = device.kernel(FILE, &element_types(&[("ELEMENT", gate.dtype)]), name)?;
    kernel.launch_blocks("gate", num_rows.div_ceil(ROWS_PER_BLOCK), &params)?;
    Ok(name)
}
