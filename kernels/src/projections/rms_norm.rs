//! `rms_norm`: launchers of `kernels/cuda/projections/rms_norm.cu` (inference 3, training 11.3).

use crate::arguments::{
    Arguments, Defines, FLOATS, Signature, element_types, modules_of_floats, read, scratch, write,
};
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, LaunchConfig, Result, TensorView, Views};

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
/// Most threads of the forward block kernel for few rows; `FEW_THREADS` in the kernel source.
const FEW_THREADS: u32 = 512;
/// Widest block of the backward block kernel; `BACKWARD_BLOCK_THREADS` in the kernel source.
const BACKWARD_BLOCK_THREADS: usize = 896;

fn defines(x: DType, weight: Option<&TensorView>) -> Defines {
    // Without a weight its type is arbitrary: the type of x needs no second module.
    element_types(&[("ELEMENT", x), ("WEIGHT_ELEMENT", weight.map_or(x, |weight| weight.dtype))])
}

/// Every module that the launchers compile.
pub fn modules() -> Vec<Module> {
    modules_of_floats(FILE, &["ELEMENT", "WEIGHT_ELEMENT"])
}

/// Checks the tensors of a call, and returns them with its rows and their width.
fn bind(views: &Views, backward: bool) -> Result<(Signature<'_>, [usize; 2])> {
    let rstd = if backward { read("rstd") } else { write("rstd").optional() };
    let tensors = [
        read("x").of(&FLOATS).axes(&["num_rows", "width"]).rows(),
        read("weight").of(&FLOATS).axes(&["width"]).optional(),
        write("y").like("x").rows().may_be("x").when(!backward),
        rstd.axes(&["num_rows"]),
        read("dy").like("x").rows().when(backward),
        write("dx").like("x").rows().when(backward),
        write("dweight").axes(&["width"]).with(&["weight"]).when(backward),
        scratch("workspace", 16).with(&["weight"]).when(backward),
    ];
    let mut signature =
        CHECK.signature(views, tensors).extent("width", 1, MAX_WIDTH).wide("num_rows");
    let extents = signature.bind(["num_rows", "width"])?;
    Ok((signature, extents))
}

/// Whether every access may be 16 bytes wide.
fn vectorised(signature: &Signature<'_>, weight: Option<&TensorView>) -> bool {
    // The kernel reads the same number of weights as elements of x, in accesses of up to 16 bytes.
    signature.vectorised() && weight.is_none_or(|w| w.address.is_multiple_of(16))
}

/// Threads of a block kernel: enough that `held` elements a thread hold the row.
fn block_threads(width: usize, held: usize) -> u32 {
    (width.div_ceil(held).div_ceil(32) * 32) as u32
}

/// Rows that one block of the warp kernels processes at a time: a lane holds 32 elements, of one
/// row or, where rows are short, of several.
fn rows_per_block(x: DType, width: usize) -> usize {
    let vector = 16 / x.size();
    let vectors_per_lane = (width / vector).div_ceil(32).next_power_of_two();
    (WARP_KERNEL_THREADS / 32) as usize * (HELD / vector / vectors_per_lane).max(1)
}

/// Launches the forward, `y = weight * (x * rstd)` with `rstd = 1 / sqrt(mean(x^2) + eps)`;
/// returns the kernel that ran.
///
/// - `x` `[num_rows, width]`, bf16 or f32, rows contiguous;
/// - `weight` `[width]`, bf16 or f32; absent for a weight of ones;
/// - `y` `[num_rows, width]`, the type of `x`; may be `x` itself;
/// - `rstd` `[num_rows]` f32, for the backward; may be absent.
///
/// # Errors
/// A rejected argument (`eps` is above 0), a compile error, a rejected launch.
pub fn forward(device: &Device, views: &Views, eps: f32) -> Result<&'static str> {
    let (signature, [num_rows, width]) = bind(views, false)?;
    let (x, weight) = (views["x"].dtype, views.get("weight"));
    CHECK.positive("eps", eps)?;
    let (name, blocks, threads) =
        forward_launch(device, x, num_rows, width, vectorised(&signature, weight));
    let kernel = device.kernel(FILE, &defines(x, weight), name)?;
    let params = signature.params(&["x", "y", "weight", "rstd"]);
    let params = params.i64("num_rows", num_rows)?.i32("width", width)?.f32("eps", eps);
    kernel.launch(LaunchConfig::linear(CHECK.operator, "x", blocks as u64, threads)?, &params)?;
    Ok(name)
}

/// Kernel, blocks and threads of the forward.
fn forward_launch(
    device: &Device,
    x: DType,
    num_rows: usize,
    width: usize,
    vectorised: bool,
) -> (&'static str, usize, u32) {
    // One row for each SM. With more rows, other blocks work while one waits for the weight.
    let few = num_rows <= device.environment().processors as usize
        && block_threads(width, HELD) <= FEW_THREADS;
    if vectorised && width <= WARP_WIDTH {
        ("rms_norm_forward_warp", num_rows.div_ceil(rows_per_block(x, width)), WARP_KERNEL_THREADS)
    } else if vectorised && few {
        ("rms_norm_forward_block_few", num_rows, block_threads(width, HELD))
    } else if vectorised {
        ("rms_norm_forward_block", num_rows, block_threads(width, HELD))
    } else {
        ("rms_norm_forward_scalar", num_rows, block_threads(width, 1).min(1024))
    }
}

/// Kernel, blocks and threads of the backward. Each block leaves one row of partial dweights, so
/// there are only as many blocks as keep the device busy.
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
        (
            "rms_norm_backward_block",
            num_rows.min(2 * processors),
            block_threads(width, GRADIENT_HELD),
        )
    } else if vectorised {
        (
            "rms_norm_backward_wide",
            num_rows.min(2 * processors),
            block_threads(width, 16 / x.size()).min(1024),
        )
    } else {
        (
            "rms_norm_backward_scalar",
            num_rows.min(2 * processors),
            block_threads(width, 1).min(1024),
        )
    }
}

/// Bytes of scratch memory that [`backward`] needs for a weighted norm of these sizes.
pub fn workspace_bytes(device: &Device, x: DType, num_rows: usize, width: usize) -> usize {
    // The largest grid of any path, so that the result does not depend on alignment.
    let blocks =
        [true, false].map(|vectorised| backward_launch(device, x, num_rows, width, vectorised).1);
    blocks[0].max(blocks[1]) * width * 4
}

/// Launches the backward, `dx = r (g - x r^2 mean(g x))` with `g = dy * weight` and r the
/// forward's `rstd`, and `dweight = sum over rows of dy * x * r`; returns the kernels that ran.
///
/// - `x`, `weight` and `rstd` as the forward read and saved them;
/// - `dy`, `dx` `[num_rows, width]`, the type of `x`; `dx` shares no memory with the inputs;
/// - `dweight` `[width]` f32, and `workspace`, scratch memory of [`workspace_bytes`] bytes:
///   present exactly when `weight` is.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn backward(device: &Device, views: &Views) -> Result<Vec<&'static str>> {
    let (signature, [num_rows, width]) = bind(views, true)?;
    let (x, weight, workspace) = (views["x"].dtype, views.get("weight"), views.get("workspace"));
    if let Some(workspace) = workspace {
        CHECK.holds("workspace", workspace, workspace_bytes(device, x, num_rows, width))?;
    }
    let (name, blocks, threads) =
        backward_launch(device, x, num_rows, width, vectorised(&signature, weight));
    let defines = defines(x, weight);
    let kernel = device.kernel(FILE, &defines, name)?;
    let params = signature.params(&["dy", "x", "weight", "rstd", "dx"]);
    let params =
        params.ptr("dweight_partials", workspace).i64("num_rows", num_rows)?.i32("width", width)?;
    kernel.launch(LaunchConfig::linear(CHECK.operator, "x", blocks as u64, threads)?, &params)?;
    let (Some(dweight), Some(workspace)) = (views.get("dweight"), workspace) else {
        return Ok(vec![name]);
    };
    Ok(vec![name, sum_partials(device, &defines, workspace, dweight, [blocks, width])?])
}

/// Adds up `num_partials` rows of partial dweights in a fixed order; returns the kernel that ran.
fn sum_partials(
    device: &Device,
    defines: &Defines,
    partials: &TensorView,
    dweight: &TensorView,
    [num_partials, width]: [usize; 2],
) -> Result<&'static str> {
    let reduce = device.kernel(FILE, defines, "rms_norm_dweight")?;
    let params = CHECK.params().ptr("dweight_partials", partials).ptr("dweight", dweight);
    let params = params.i32("num_partials", num_partials)?.i32("width", width)?;
    reduce.launch_blocks("x", width.div_ceil(32), &params)?;
    Ok("rms_norm_dweight")
}

/// The sum of partial dweights for another operator that ends in a norm of rows of `element` with
/// an f32 weight.
pub(crate) fn sum_dweight(
    device: &Device,
    element: DType,
    partials: &TensorView,
    dweight: &TensorView,
    num_partials: usize,
    width: usize,
) -> Result<&'static str> {
    sum_partials(device, &defines(element, Some(dweight)), partials, dweight, [num_partials, width])
}

/// The module of [`sum_dweight`].
pub(crate) fn dweight_module(element: DType) -> Module {
    module(FILE, &element_types(&[("ELEMENT", element), ("WEIGHT_ELEMENT", DType::F32)]))
}
