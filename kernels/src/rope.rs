//! `rope`: launchers of `kernels/cuda/rope.cu` (inference 4, training 8).

use crate::arguments::{Arguments, FLOATS, element_types, is_aligned, modules_of_floats, read_at, write_at};
use crate::runtime::device::Module;
use crate::runtime::{DType, Device, LaunchConfig, Result, TensorView};

const FILE: &str = "rope.cu";
const CHECK: Arguments = Arguments { operator: "rope" };
/// Threads of a block; `THREADS` in the kernel source.
const THREADS: u32 = 256;
/// Heads that one thread serves; `HEADS` in the kernel source.
const HEADS_PER_THREAD: u32 = 8;

/// Arguments of [`forward`], and of [`backward`] with `x` the upstream gradient and `y` the gradient.
#[derive(Clone, Copy, Debug)]
pub struct Forward<'a> {
    /// `[num_tokens, num_heads, head_dim]`, bf16 or f32, channels contiguous.
    pub x: &'a TensorView,
    /// The shape and type of `x`; may be `x` itself.
    pub y: &'a TensorView,
    /// `[table_rows, rope_dim / 2]` f32, rows contiguous.
    pub cos: &'a TensorView,
    /// Like `cos`; its rows may lie at another stride.
    pub sin: &'a TensorView,
    /// `[num_tokens]` i32; `None` gives token `t` the table's row `t`. A position outside of the table
    /// turns the token's rotated channels into NaN.
    pub positions: Option<&'a TensorView>,
    /// Rotate backwards.
    pub inverse: bool,
}

/// Every module that the launchers compile.
pub fn modules() -> Vec<Module> {
    modules_of_floats(FILE, &["ELEMENT"])
}

/// Rotates the last `rope_dim` channels of each head, in adjacent pairs; copies the others.
/// Returns the kernel that ran.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn forward(device: &Device, arguments: &Forward<'_>) -> Result<&'static str> {
    let Forward { x, y, cos, sin, positions, inverse } = *arguments;
    let [num_tokens, num_heads, head_dim, table_rows, half] = check(arguments)?;
    let rope_dim = 2 * half;
    let fits = |extent: usize| (extent * x.dtype.size()).is_multiple_of(16);
    let vectorised = fits(head_dim) && fits(rope_dim) && is_aligned(x) && is_aligned(y);
    let name = if vectorised { "rope_forward" } else { "rope_forward_scalar" };
    let kernel = device.kernel(FILE, &element_types(&[("ELEMENT", x.dtype)]), name)?;
    let params = CHECK.params().heads("x", x).heads("y", y).rows("cos", cos).rows("sin", sin);
    let params = params.ptr("positions", positions).i64("num_tokens", num_tokens)?.i64("table_rows", table_rows)?;
    let params = params.i32("num_heads", num_heads)?.i32("head_dim", head_dim)?.i32("rope_dim", rope_dim)?;
    let in_place = x.address == y.address;
    let copied = if in_place { 0 } else { head_dim - rope_dim };
    let units = if vectorised { (copied + rope_dim) * x.dtype.size() / 16 } else { copied + rope_dim / 2 };
    kernel.launch(launch_config(units, num_tokens, num_heads)?, &params.flag("inverse", inverse))?;
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

/// `[num_tokens, num_heads, head_dim, table_rows, half]`.
fn check(arguments: &Forward<'_>) -> Result<[usize; 5]> {
    let Forward { x, y, cos, sin, positions, .. } = *arguments;
    let tensors = [
        read_at("x", x).of(&FLOATS).axes(&["num_tokens", "num_heads", "head_dim"]).rows(),
        read_at("cos", cos).axes(&["table_rows", "half"]).rows(),
        read_at("sin", sin).like("cos").rows(),
        read_at("positions", positions).of(&[DType::I32]).axes(&["num_tokens"]),
        write_at("y", y).like("x").rows().may_be("x"),
    ];
    let mut signature = CHECK.signature_at(tensors).wide("num_tokens").wide("table_rows");
    let extents = signature.bind(["num_tokens", "num_heads", "head_dim", "table_rows", "half"])?;
    let [num_tokens, _, head_dim, table_rows, half] = extents;
    if half == 0 || 2 * half > head_dim {
        return CHECK.refuse("cos", format!("{half} columns rotate {} channels of {head_dim}", 2 * half));
    }
    if positions.is_none() && table_rows < num_tokens {
        return CHECK.refuse("cos", format!("{table_rows} rows must cover {num_tokens} tokens without positions"));
    }
    Ok(extents)
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
    let tensors = [
        read_at("inv_freq", inv_freq).axes(&["half"]),
        read_at("positions", positions).of(&[DType::I32]).axes(&["num_positions"]),
        write_at("cos", cos).axes(&["num_positions", "half"]),
        write_at("sin", sin).like("cos"),
    ];
    let [num_positions, half] = CHECK.signature_at(tensors).wide("num_positions").bind(["num_positions", "half"])?;
    let kernel = device.kernel(FILE, &element_types(&[("ELEMENT", DType::F32)]), "rope_table")?;
    let params = CHECK.params().ptr("inv_freq", inv_freq).ptr("positions", positions).ptr("cos", cos).ptr("sin", sin);
    let params = params.i64("num_positions", num_positions)?.i32("half", half)?;
    let blocks = (num_positions * half).div_ceil(THREADS as usize).min(i32::MAX as usize);
    kernel.launch_blocks("positions", blocks, &params)?;
    Ok("rope_table")
}
