//! `rms_norm`: launchers of `kernels/cuda/rms_norm.cu` (inference 3, training 11.3).

use crate::arguments::{Argument, Arguments, Defines, FLOATS, Signature, element_types, modules_of_floats};
use crate::arguments::{read_at, scratch_at, write_at};
use crate::runtime::device::Module;
use crate::runtime::{DType, Device, LaunchConfig, Result, TensorView};

const FILE: &str = "rms_norm.cu";
const CHECK: Arguments = Arguments { operator: "rms_norm" };

/// Widest row, in elements.
pub const MAX_WIDTH: usize = 32768;
/// Widest row of the warp kernels; `WARP_WIDTH` in the kernel source.
const WARP_WIDTH: usize = 1024;
/// Threads of a block of the warp kernels: one warp a row.
const WARP_KERNEL_THREADS: u32 = 256;
/// Elements that one thread of a forward (backward) block kernel holds.
const HELD: usize = 32;
const GRADIENT_HELD: usize = 16;
/// Widest block of the backward block kernel; `BACKWARD_BLOCK_THREADS` in the kernel source.
const BACKWARD_BLOCK_THREADS: usize = 896;

/// Arguments of [`forward`]: `y = weight * (x * rstd)`, `rstd = 1 / sqrt(mean(x^2) + eps)`.
#[derive(Clone, Copy, Debug)]
pub struct Forward<'a> {
    /// `[num_rows, width]`, bf16 or f32, rows contiguous.
    pub x: &'a TensorView,
    /// `[width]`, bf16 or f32; `None` is a weight of ones.
    pub weight: Option<&'a TensorView>,
    /// `[num_rows, width]`, the type of `x`; may be `x` itself.
    pub y: &'a TensorView,
    /// `[num_rows]` f32, for the backward.
    pub rstd: Option<&'a TensorView>,
    /// Added to the mean square, inside the root; above 0.
    pub eps: f32,
}

/// Arguments of [`backward`]: `dx = r (g - x r^2 mean(g x))` with `g = dy * weight`, and
/// `dweight = sum over rows of dy * x * r`.
#[derive(Clone, Copy, Debug)]
pub struct Backward<'a> {
    /// `[num_rows, width]`, the type of `x`.
    pub dy: &'a TensorView,
    /// `[num_rows, width]`, bf16 or f32, as the forward read it.
    pub x: &'a TensorView,
    /// `[width]`, bf16 or f32; `None` is a weight of ones.
    pub weight: Option<&'a TensorView>,
    /// `[num_rows]` f32, saved by the forward.
    pub rstd: &'a TensorView,
    /// `[num_rows, width]`, the type of `x`; shares no memory with the inputs.
    pub dx: &'a TensorView,
    /// `[width]` f32; present exactly when `weight` is.
    pub dweight: Option<&'a TensorView>,
    /// Scratch memory of at least [`workspace_bytes`] bytes; present exactly when `weight` is.
    pub workspace: Option<&'a TensorView>,
}

fn defines(x: DType, weight: Option<&TensorView>) -> Defines {
    // Without a weight its type is free: the type of x needs no second module.
    element_types(&[("ELEMENT", x), ("WEIGHT_ELEMENT", weight.map_or(x, |weight| weight.dtype))])
}

/// Every module that the launchers compile.
pub fn modules() -> Vec<Module> {
    modules_of_floats(FILE, &["ELEMENT", "WEIGHT_ELEMENT"])
}

/// Checks the tensors of a call, and returns them with its rows and their width.
fn bind<'a>(tensors: impl IntoIterator<Item = Argument<'a>>) -> Result<(Signature<'a>, [usize; 2])> {
    let mut signature = CHECK.signature_at(tensors).extent("width", 1, MAX_WIDTH).wide("num_rows");
    let extents = signature.bind(["num_rows", "width"])?;
    Ok((signature, extents))
}

/// Whether every access may be 16 bytes wide.
fn vectorised(signature: &Signature<'_>, weight: Option<&TensorView>) -> bool {
    // The kernel reads as many weights as elements of x, in accesses of up to 16 bytes.
    signature.vectorised() && weight.is_none_or(|w| w.address.is_multiple_of(16))
}

/// Threads of a block kernel: enough that `held` elements a thread hold the row.
fn block_threads(width: usize, held: usize) -> u32 {
    (width.div_ceil(held).div_ceil(32) * 32) as u32
}

/// Rows that one block of the warp kernels takes at a time: a lane holds 32 elements, of one row or,
/// where rows are short, of several.
fn rows_per_block(x: DType, width: usize) -> usize {
    let vector = 16 / x.size();
    let vectors_per_lane = (width / vector).div_ceil(32).next_power_of_two();
    (WARP_KERNEL_THREADS / 32) as usize * (HELD / vector / vectors_per_lane).max(1)
}

/// Launches the forward; returns the kernel that ran.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn forward(device: &Device, arguments: &Forward<'_>) -> Result<&'static str> {
    let Forward { x, weight, y, rstd, eps } = *arguments;
    let (signature, [num_rows, width]) = bind([
        read_at("x", x).of(&FLOATS).axes(&["num_rows", "width"]).rows(),
        read_at("weight", weight).of(&FLOATS).axes(&["width"]),
        write_at("y", y).like("x").rows().may_be("x"),
        write_at("rstd", rstd).axes(&["num_rows"]),
    ])?;
    CHECK.positive("eps", eps)?;
    let (name, blocks, threads) = forward_launch(x.dtype, num_rows, width, vectorised(&signature, weight));
    let kernel = device.kernel(FILE, &defines(x.dtype, weight), name)?;
    let params = signature.params(&["x", "y", "weight", "rstd"]);
    let params = params.i64("num_rows", num_rows)?.i32("width", width)?.f32("eps", eps);
    kernel.launch(LaunchConfig::linear(CHECK.operator, "x", blocks as u64, threads)?, &params)?;
    Ok(name)
}

/// Kernel, blocks and threads of the forward.
fn forward_launch(x: DType, num_rows: usize, width: usize, vectorised: bool) -> (&'static str, usize, u32) {
    if vectorised && width <= WARP_WIDTH {
        ("rms_norm_forward_warp", num_rows.div_ceil(rows_per_block(x, width)), WARP_KERNEL_THREADS)
    } else if vectorised {
        ("rms_norm_forward_block", num_rows, block_threads(width, HELD))
    } else {
        ("rms_norm_forward_scalar", num_rows, block_threads(width, 1).min(1024))
    }
}

/// Kernel, blocks and threads of the backward. Each block leaves one row of partial dweights, so there
/// are only as many as keep the device busy.
fn backward_launch(
    device: &Device,
    x: DType,
    num_rows: usize,
    width: usize,
    vectorised: bool,
) -> (&'static str, usize, u32) {
    let processors = device.environment().processors as usize;
    if vectorised && width <= WARP_WIDTH {
        let blocks = num_rows.div_ceil(rows_per_block(x, width));
        ("rms_norm_backward_warp", blocks.min(4 * processors), WARP_KERNEL_THREADS)
    } else if vectorised && width <= BACKWARD_BLOCK_THREADS * GRADIENT_HELD {
        ("rms_norm_backward_block", num_rows.min(2 * processors), block_threads(width, GRADIENT_HELD))
    } else if vectorised {
        ("rms_norm_backward_wide", num_rows.min(2 * processors), block_threads(width, 16 / x.size()).min(1024))
    } else {
        ("rms_norm_backward_scalar", num_rows.min(2 * processors), block_threads(width, 1).min(1024))
    }
}

/// Bytes of scratch memory that [`backward`] needs for a weighted norm of these extents.
pub fn workspace_bytes(device: &Device, x: DType, num_rows: usize, width: usize) -> usize {
    // The largest grid of any path, so that the answer does not depend on alignment.
    let blocks = [true, false].map(|vectorised| backward_launch(device, x, num_rows, width, vectorised).1);
    blocks[0].max(blocks[1]) * width * 4
}

/// Launches the backward; returns the kernels that ran.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn backward(device: &Device, arguments: &Backward<'_>) -> Result<Vec<&'static str>> {
    let Backward { dy, x, weight, rstd, dx, dweight, workspace } = *arguments;
    let (signature, [num_rows, width]) = bind([
        read_at("x", x).of(&FLOATS).axes(&["num_rows", "width"]).rows(),
        read_at("dy", dy).like("x").rows(),
        read_at("weight", weight).of(&FLOATS).axes(&["width"]),
        read_at("rstd", rstd).axes(&["num_rows"]),
        write_at("dx", dx).like("x").rows(),
        write_at("dweight", dweight).axes(&["width"]).with(&["weight"]),
        scratch_at("workspace", workspace, 4).with(&["weight"]),
    ])?;
    if let Some(workspace) = workspace {
        CHECK.holds("workspace", workspace, workspace_bytes(device, x.dtype, num_rows, width))?;
    }
    let (name, blocks, threads) = backward_launch(device, x.dtype, num_rows, width, vectorised(&signature, weight));
    let defines = defines(x.dtype, weight);
    let kernel = device.kernel(FILE, &defines, name)?;
    let params = signature.params(&["dy", "x", "weight", "rstd", "dx"]);
    let params = params.ptr("dweight_partials", workspace).i64("num_rows", num_rows)?.i32("width", width)?;
    kernel.launch(LaunchConfig::linear(CHECK.operator, "x", blocks as u64, threads)?, &params)?;
    let (Some(dweight), Some(workspace)) = (dweight, workspace) else { return Ok(vec![name]) };
    let reduce = device.kernel(FILE, &defines, "rms_norm_dweight")?;
    let params = CHECK.params().ptr("dweight_partials", workspace).ptr("dweight", dweight);
    let params = params.i32("num_partials", blocks)?.i32("width", width)?;
    reduce.launch_blocks("x", width.div_ceil(32), &params)?;
    Ok(vec![name, "rms_norm_dweight"])
}
