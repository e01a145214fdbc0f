//! `rope`: launchers of `kernels/cuda/rope.cu` (inference 4, training 8).

use crate::arguments::{Arguments, address, is_aligned};
use crate::kernel_params;
use crate::rms_norm::owned;
use crate::runtime::params::DeviceAddress;
use crate::runtime::{DType, Device, LaunchConfig, Result, TensorView};

const FILE: &str = "rope.cu";
const CHECK: Arguments = Arguments { operator: "rope" };
/// Threads of a block; `THREADS` in the kernel source.
const THREADS: u32 = 256;
/// Heads that one thread serves; `HEADS` in the kernel source.
const HEADS_PER_THREAD: u32 = 8;

kernel_params! {
    /// Mirror of `RopeParams`.
    struct RopeParams {
        x: DeviceAddress,
        y: DeviceAddress,
        cos: DeviceAddress,
        sin: DeviceAddress,
        positions: DeviceAddress,
        num_tokens: i64,
        table_rows: i64,
        table_stride: i64,
        x_token_stride: i64,
        x_head_stride: i64,
        y_token_stride: i64,
        y_head_stride: i64,
        num_heads: i32,
        head_dim: i32,
        rope_dim: i32,
        inverse: i32,
    }
}

kernel_params! {
    /// Mirror of `RopeTableParams`.
    struct RopeTableParams {
        inv_freq: DeviceAddress,
        positions: DeviceAddress,
        cos: DeviceAddress,
        sin: DeviceAddress,
        num_positions: i64,
        half: i32,
    }
}

/// Arguments of [`forward`], and of [`backward`] with `x` the upstream gradient and `y` the gradient.
#[derive(Clone, Copy, Debug)]
pub struct Forward<'a> {
    /// `[num_tokens, num_heads, head_dim]`, bf16 or f32, channels contiguous.
    pub x: &'a TensorView,
    /// The shape and type of `x`; may be `x` itself.
    pub y: &'a TensorView,
    /// `[table_rows, rope_dim / 2]` f32, dense rows.
    pub cos: &'a TensorView,
    /// Like `cos`, with the same row stride.
    pub sin: &'a TensorView,
    /// `[num_tokens]` i32; `None` gives token `t` the table's row `t`. A position outside of the table
    /// turns the token's rotated channels into NaN.
    pub positions: Option<&'a TensorView>,
    /// Rotate backwards.
    pub inverse: bool,
}

fn defines(x: DType) -> Vec<(&'static str, String)> {
    vec![("ELEMENT", x.c_name().to_owned())]
}

/// Every module that the launchers compile.
pub fn modules() -> Vec<(String, Vec<(String, String)>)> {
    [DType::Bf16, DType::F32].into_iter().map(|x| (FILE.to_owned(), owned(defines(x)))).collect()
}

/// Rotates the last `rope_dim` channels of each head, in adjacent pairs; copies the others.
/// Returns the kernel that ran.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn forward(device: &Device, arguments: &Forward<'_>) -> Result<&'static str> {
    let Forward { x, y, cos, sin, positions, inverse } = *arguments;
    let [num_tokens, num_heads, head_dim] = check_tensors(arguments)?;
    let rope_dim = check_table(arguments, num_tokens, head_dim)?;
    let fits = |extent: usize| (extent * x.dtype.size()).is_multiple_of(16);
    let vectorised = fits(head_dim) && fits(rope_dim) && is_aligned(x) && is_aligned(y);
    let name = if vectorised { "rope_forward" } else { "rope_forward_scalar" };
    let kernel = device.kernel::<RopeParams>(FILE, &defines(x.dtype), name)?;
    let params = RopeParams {
        x: DeviceAddress(x.address),
        y: DeviceAddress(y.address),
        cos: DeviceAddress(cos.address),
        sin: DeviceAddress(sin.address),
        positions: address(positions),
        num_tokens: num_tokens as i64,
        table_rows: cos.shape[0] as i64,
        table_stride: if cos.shape[0] > 1 { cos.strides[0] } else { cos.shape[1] as i64 },
        x_token_stride: x.strides[0],
        x_head_stride: x.strides[1],
        y_token_stride: y.strides[0],
        y_head_stride: y.strides[1],
        num_heads: CHECK.int32("x", num_heads)?,
        head_dim: CHECK.int32("x", head_dim)?,
        rope_dim: rope_dim as i32,
        inverse: i32::from(inverse),
    };
    let in_place = x.address == y.address;
    let copied = if in_place { 0 } else { head_dim - rope_dim };
    let units = if vectorised { (copied + rope_dim) * x.dtype.size() / 16 } else { copied + rope_dim / 2 };
    kernel.launch(launch_config(units, num_tokens, num_heads)?, &params)?;
    Ok(name)
}

/// The gradient of a rotation is the opposite rotation of the upstream gradient: `x` is `dy`, `y` is
/// `dx`, and `inverse` is that of the forward. Returns the kernel that ran.
///
/// # Errors
/// As [`forward`].
pub fn backward(device: &Device, arguments: &Forward<'_>) -> Result<&'static str> {
    forward(device, &Forward { inverse: !arguments.inverse, ..*arguments })
}

/// A block of `units × heads × tokens` threads, and blocks for all of them.
fn launch_config(units: usize, num_tokens: usize, num_heads: usize) -> Result<LaunchConfig> {
    let across = (units as u64).clamp(1, u64::from(THREADS)) as u32;
    let heads = (num_heads as u32).div_ceil(HEADS_PER_THREAD).clamp(1, THREADS / across);
    // z of a block is at most 64.
    let tokens = (THREADS / across / heads).clamp(1, (num_tokens as u64).clamp(1, 64) as u32);
    let chunks = (num_heads as u64).div_ceil(u64::from(heads * HEADS_PER_THREAD));
    let items = (num_tokens as u64).div_ceil(u64::from(tokens)) * chunks;
    let config = LaunchConfig::linear(CHECK.operator, "x", items.min(i32::MAX as u64), 0)?;
    Ok(LaunchConfig { block: [across, heads, tokens], ..config })
}

fn check_tensors(arguments: &Forward<'_>) -> Result<[usize; 3]> {
    let Forward { x, y, cos, sin, positions, .. } = *arguments;
    let extents = CHECK.extents("x", x)?;
    CHECK.dtype("x", x, &[DType::Bf16, DType::F32])?;
    CHECK.rows("x", x)?;
    CHECK.shape("y", y, &x.shape)?;
    CHECK.dtype("y", y, &[x.dtype])?;
    CHECK.rows("y", y)?;
    CHECK.same_or_apart("y", y, x)?;
    for read in [Some(cos), Some(sin), positions].into_iter().flatten() {
        CHECK.apart("y", y, read)?;
    }
    Ok(extents)
}

/// Checks the table and returns `rope_dim`.
fn check_table(arguments: &Forward<'_>, num_tokens: usize, head_dim: usize) -> Result<usize> {
    let Forward { cos, sin, positions, .. } = *arguments;
    let [table_rows, half] = CHECK.extents("cos", cos)?;
    CHECK.dtype("cos", cos, &[DType::F32])?;
    CHECK.rows("cos", cos)?;
    CHECK.shape("sin", sin, &cos.shape)?;
    CHECK.dtype("sin", sin, &[DType::F32])?;
    CHECK.rows("sin", sin)?;
    if cos.strides[0] != sin.strides[0] && table_rows > 1 {
        return CHECK.refuse("sin", format!("row stride {} must be that of cos, {}", sin.strides[0], cos.strides[0]));
    }
    if half == 0 || 2 * half > head_dim {
        return CHECK.refuse("cos", format!("{half} columns rotate {} channels of {head_dim}", 2 * half));
    }
    match positions {
        Some(positions) => CHECK.dense_tensor("positions", positions, &[num_tokens], &[DType::I32])?,
        None if table_rows < num_tokens => {
            return CHECK.refuse("cos", format!("{table_rows} rows must cover {num_tokens} tokens without positions"));
        }
        None => {}
    }
    Ok(2 * half)
}

/// Arguments of [`table`].
#[derive(Clone, Copy, Debug)]
pub struct Table<'a> {
    /// `[rope_dim / 2]` f32, angle per position.
    pub inv_freq: &'a TensorView,
    /// `[num_positions]` i32.
    pub positions: &'a TensorView,
    /// `[num_positions, rope_dim / 2]` f32.
    pub cos: &'a TensorView,
    /// `[num_positions, rope_dim / 2]` f32.
    pub sin: &'a TensorView,
}

/// Fills cos and sin of `fp32(position) * inv_freq`, the product rounded to f32. Returns the kernel
/// that ran.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn table(device: &Device, arguments: &Table<'_>) -> Result<&'static str> {
    let Table { inv_freq, positions, cos, sin } = *arguments;
    let [half] = CHECK.extents("inv_freq", inv_freq)?;
    let [num_positions] = CHECK.extents("positions", positions)?;
    CHECK.dense_tensor("inv_freq", inv_freq, &[half], &[DType::F32])?;
    CHECK.dense_tensor("positions", positions, &[num_positions], &[DType::I32])?;
    CHECK.dense_tensor("cos", cos, &[num_positions, half], &[DType::F32])?;
    CHECK.dense_tensor("sin", sin, &[num_positions, half], &[DType::F32])?;
    CHECK.apart("sin", sin, cos)?;
    for read in [inv_freq, positions] {
        CHECK.apart("cos", cos, read)?;
        CHECK.apart("sin", sin, read)?;
    }
    let kernel = device.kernel::<RopeTableParams>(FILE, &defines(DType::F32), "rope_table")?;
    let params = RopeTableParams {
        inv_freq: DeviceAddress(inv_freq.address),
        positions: DeviceAddress(positions.address),
        cos: DeviceAddress(cos.address),
        sin: DeviceAddress(sin.address),
        num_positions: num_positions as i64,
        half: CHECK.int32("inv_freq", half)?,
    };
    let blocks = ((num_positions * half) as u64).div_ceil(u64::from(THREADS)).min(i32::MAX as u64);
    kernel.launch(LaunchConfig::linear(CHECK.operator, "positions", blocks, THREADS)?, &params)?;
    Ok("rope_table")
}
