//! `rms_norm`: launchers of `kernels/cuda/rms_norm.cu` (inference 3, training 11.3).

use crate::arguments::{Arguments, address, is_aligned};
use crate::kernel_params;
use crate::runtime::params::DeviceAddress;
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

kernel_params! {
    /// Mirror of `RmsNormForwardParams`.
    struct RmsNormForwardParams {
        x: DeviceAddress,
        y: DeviceAddress,
        weight: DeviceAddress,
        rstd: DeviceAddress,
        num_rows: i64,
        x_row_stride: i64,
        y_row_stride: i64,
        width: i32,
        eps: f32,
    }
}

kernel_params! {
    /// Mirror of `RmsNormBackwardParams`.
    struct RmsNormBackwardParams {
        dy: DeviceAddress,
        x: DeviceAddress,
        weight: DeviceAddress,
        rstd: DeviceAddress,
        dx: DeviceAddress,
        dweight_partials: DeviceAddress,
        num_rows: i64,
        dy_row_stride: i64,
        x_row_stride: i64,
        dx_row_stride: i64,
        width: i32,
    }
}

kernel_params! {
    /// Mirror of `RmsNormDweightParams`.
    struct RmsNormDweightParams {
        dweight_partials: DeviceAddress,
        dweight: DeviceAddress,
        num_partials: i32,
        width: i32,
    }
}

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

fn defines(x: DType, weight: Option<DType>) -> Vec<(&'static str, String)> {
    // Without a weight its type is free: the type of x needs no second module.
    let weight = weight.unwrap_or(x);
    vec![("ELEMENT", x.c_name().to_owned()), ("WEIGHT_ELEMENT", weight.c_name().to_owned())]
}

/// Every module that the launchers compile.
pub fn modules() -> Vec<(String, Vec<(String, String)>)> {
    let types = [DType::Bf16, DType::F32];
    let pairs = types.iter().flat_map(|&x| types.iter().map(move |&weight| defines(x, Some(weight))));
    pairs.map(|defines| (FILE.to_owned(), owned(defines))).collect()
}

pub(crate) fn owned(defines: Vec<(&'static str, String)>) -> Vec<(String, String)> {
    defines.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn check_rows(argument: &'static str, view: &TensorView, shape: &[usize], dtype: DType) -> Result<()> {
    CHECK.shape(argument, view, shape)?;
    CHECK.dtype(argument, view, &[dtype])?;
    CHECK.rows(argument, view)
}

fn extents_of(x: &TensorView) -> Result<[usize; 2]> {
    let [num_rows, width] = CHECK.extents("x", x)?;
    CHECK.dtype("x", x, &[DType::Bf16, DType::F32])?;
    CHECK.rows("x", x)?;
    if !(1..=MAX_WIDTH).contains(&width) {
        return CHECK.refuse("x", format!("width {width} must be 1 to {MAX_WIDTH}"));
    }
    Ok([num_rows, width])
}

fn check_weight(weight: Option<&TensorView>, width: usize) -> Result<()> {
    weight.map_or(Ok(()), |w| CHECK.dense_tensor("weight", w, &[width], &[DType::Bf16, DType::F32]))
}

/// Whether every access may be 16 bytes wide.
fn vectorised(width: usize, rows: &[&TensorView], weight: Option<&TensorView>) -> bool {
    let size = rows[0].dtype.size();
    (width * size).is_multiple_of(16)
        && rows.iter().all(|view| is_aligned(view))
        // The kernel reads as many weights as elements of x, in accesses of up to 16 bytes.
        && weight.is_none_or(|w| w.address.is_multiple_of(16))
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
    let [num_rows, width] = extents_of(x)?;
    check_rows("y", y, &x.shape, x.dtype)?;
    check_weight(weight, width)?;
    if let Some(rstd) = rstd {
        CHECK.dense_tensor("rstd", rstd, &[num_rows], &[DType::F32])?;
        CHECK.apart("rstd", rstd, x)?;
        CHECK.apart("rstd", rstd, y)?;
    }
    CHECK.positive("eps", eps)?;
    CHECK.same_or_apart("y", y, x)?;
    if let Some(weight) = weight {
        CHECK.apart("y", y, weight)?;
        rstd.map_or(Ok(()), |rstd| CHECK.apart("rstd", rstd, weight))?;
    }
    let (name, blocks, threads) = forward_launch(x.dtype, num_rows, width, vectorised(width, &[x, y], weight));
    let kernel = device.kernel::<RmsNormForwardParams>(FILE, &defines(x.dtype, weight.map(|w| w.dtype)), name)?;
    let params = RmsNormForwardParams {
        x: DeviceAddress(x.address),
        y: DeviceAddress(y.address),
        weight: address(weight),
        rstd: address(rstd),
        num_rows: num_rows as i64,
        x_row_stride: x.strides[0],
        y_row_stride: y.strides[0],
        width: width as i32,
        eps,
    };
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
    let [num_rows, width] = extents_of(x)?;
    check_rows("dy", dy, &x.shape, x.dtype)?;
    check_rows("dx", dx, &x.shape, x.dtype)?;
    check_weight(weight, width)?;
    CHECK.dense_tensor("rstd", rstd, &[num_rows], &[DType::F32])?;
    for read in [Some(dy), Some(x), Some(rstd), weight].into_iter().flatten() {
        CHECK.apart("dx", dx, read)?;
    }
    check_dweight(device, arguments, num_rows, width)?;
    let (name, blocks, threads) =
        backward_launch(device, x.dtype, num_rows, width, vectorised(width, &[dy, x, dx], weight));
    let defines = defines(x.dtype, weight.map(|w| w.dtype));
    let kernel = device.kernel::<RmsNormBackwardParams>(FILE, &defines, name)?;
    let params = RmsNormBackwardParams {
        dy: DeviceAddress(dy.address),
        x: DeviceAddress(x.address),
        weight: address(weight),
        rstd: DeviceAddress(rstd.address),
        dx: DeviceAddress(dx.address),
        dweight_partials: address(workspace),
        num_rows: num_rows as i64,
        dy_row_stride: dy.strides[0],
        x_row_stride: x.strides[0],
        dx_row_stride: dx.strides[0],
        width: width as i32,
    };
    kernel.launch(LaunchConfig::linear(CHECK.operator, "x", blocks as u64, threads)?, &params)?;
    let (Some(dweight), Some(workspace)) = (dweight, workspace) else { return Ok(vec![name]) };
    let reduce = device.kernel::<RmsNormDweightParams>(FILE, &defines, "rms_norm_dweight")?;
    let params = RmsNormDweightParams {
        dweight_partials: DeviceAddress(workspace.address),
        dweight: DeviceAddress(dweight.address),
        num_partials: blocks as i32,
        width: width as i32,
    };
    let config = LaunchConfig::linear(CHECK.operator, "x", width.div_ceil(32) as u64, reduce.max_threads())?;
    reduce.launch(config, &params)?;
    Ok(vec![name, "rms_norm_dweight"])
}

fn check_dweight(device: &Device, arguments: &Backward<'_>, num_rows: usize, width: usize) -> Result<()> {
    let Backward { dy, x, weight, rstd, dx, dweight, workspace } = *arguments;
    if dweight.is_some() != weight.is_some() {
        return CHECK.refuse("dweight", "it must be present exactly when `weight` is");
    }
    if workspace.is_some() != weight.is_some() {
        return CHECK.refuse("workspace", "it must be present exactly when `weight` is");
    }
    let (Some(dweight), Some(workspace)) = (dweight, workspace) else { return Ok(()) };
    CHECK.dense_tensor("dweight", dweight, &[width], &[DType::F32])?;
    let needed = workspace_bytes(device, x.dtype, num_rows, width);
    if workspace.elements() * workspace.dtype.size() < needed {
        let bytes = workspace.elements() * workspace.dtype.size();
        return CHECK.refuse("workspace", format!("{bytes} bytes; it must have {needed}"));
    }
    if !workspace.address.is_multiple_of(4) {
        return CHECK.refuse("workspace", format!("address {:#x} must be a multiple of 4", workspace.address));
    }
    for read in [Some(dy), Some(x), Some(rstd), Some(dx), weight].into_iter().flatten() {
        CHECK.apart("dweight", dweight, read)?;
        CHECK.apart("workspace", workspace, read)?;
    }
    CHECK.apart("workspace", workspace, dweight)
}
