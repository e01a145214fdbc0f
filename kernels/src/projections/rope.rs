//! `rope`: launchers of `kernels/cuda/projections/rope.cu` (inference 4, training 8).

use crate::arguments::{
    Arguments, FLOATS, Signature, element_types, is_aligned, modules_of_floats, read, write,
};
use crate::projections::rotation;
use dsv4_runtime::source::Module;
use dsv4_runtime::{DType, Device, LaunchConfig, Result, Views};

const FILE: &str = "rope.cu";
const CHECK: Arguments = Arguments { operator: "rope" };
/// Threads of a block; `THREADS` in the kernel source.
const THREADS: u32 = 256;
/// The most heads that one thread processes; `HEADS` in the kernel source.
const HEADS: u32 = 8;
/// The most blocks in y, far below CUDA's limit, so that a grid of few tokens also has several in
/// z, where tests see it.
const MOST_IN_Y: u64 = 256;
/// CUDA's limit of blocks in z.
const MOST_IN_Z: u64 = 65535;

/// Every module that the launchers compile.
pub fn modules() -> Vec<Module> {
    modules_of_floats(FILE, &["ELEMENT"])
}

/// Rotates the last `rope_dim` channels of each head, in adjacent pairs; copies the others.
/// Returns the kernel that ran.
///
/// - `x` `[num_tokens, num_heads, head_dim]`, bf16 or f32, channels contiguous;
/// - `y` the shape and type of `x`; may be `x` itself;
/// - `cos`, `sin` `[table_rows, rope_dim / 2]` f32, rows contiguous, at separate strides;
/// - `positions` `[num_tokens]` i32; absent, token `t` has the table's row `t`. A position outside
///   of the table turns the token's rotated channels into NaN.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn forward(device: &Device, views: &Views, inverse: bool) -> Result<&'static str> {
    let (signature, [num_tokens, num_heads, head_dim, table_rows, half]) = check(views)?;
    let (x, y, rope_dim) = (&views["x"], &views["y"], 2 * half);
    let fits = |extent: usize| (extent * x.dtype.size()).is_multiple_of(16);
    let vectorised = fits(head_dim) && fits(rope_dim) && is_aligned(x) && is_aligned(y);
    let name = if vectorised { "rope_forward" } else { "rope_forward_scalar" };
    let kernel = device.kernel(FILE, &element_types(&[("ELEMENT", x.dtype)]), name)?;
    let params = signature.params(&["x", "y", "cos", "sin", "positions"]);
    let params = params.i64("num_tokens", num_tokens)?.i64("table_rows", table_rows)?;
    let params =
        params.i32("num_heads", num_heads)?.i32("head_dim", head_dim)?.i32("rope_dim", rope_dim)?;
    let copied = if x.address == y.address { 0 } else { head_dim - rope_dim };
    let units =
        if vectorised { (copied + rope_dim) * x.dtype.size() / 16 } else { copied + rope_dim / 2 };
    let processors = device.environment().processors.max(1).into();
    let (config, heads_per_thread) = launch_config(units, [num_tokens, num_heads], processors)?;
    let params = params.flag("inverse", inverse).i32("heads_per_thread", heads_per_thread)?;
    kernel.launch(config, &params)?;
    Ok(name)
}

/// The gradient of a rotation is the opposite rotation of the upstream gradient: `x` is `dy`, `y`
/// is `dx`, and `inverse` is that of the forward. Returns the kernel that ran.
///
/// # Errors
/// As [`forward`].
pub fn backward(device: &Device, views: &Views, inverse: bool) -> Result<&'static str> {
    forward(device, views, !inverse)
}

/// A block of `units × heads × tokens` threads; blocks in x for all heads, in y and z for all
/// tokens; and the heads that a thread processes: [`HEADS`], or a smaller power of two where there
/// would be fewer blocks than SMs.
fn launch_config(
    units: usize,
    extents: [usize; 2],
    processors: u64,
) -> Result<(LaunchConfig, usize)> {
    let [num_tokens, num_heads] = extents;
    let across = (units as u64).clamp(1, u64::from(THREADS)) as u32;
    let config = |heads_per_thread: u32| {
        let heads = (num_heads as u32).div_ceil(heads_per_thread).clamp(1, THREADS / across);
        // The z size of a block is at most 64.
        let tokens = (THREADS / across / heads).clamp(1, (num_tokens as u64).clamp(1, 64) as u32);
        let chunks = (num_heads as u64).div_ceil(u64::from(heads) * u64::from(heads_per_thread));
        ([chunks, (num_tokens as u64).div_ceil(u64::from(tokens))], [across, heads, tokens])
    };
    let mut heads_per_thread = HEADS;
    while heads_per_thread > 1
        && config(heads_per_thread).0.into_iter().fold(1, u64::saturating_mul) < processors
    {
        heads_per_thread /= 2;
    }
    let ([chunks, tiles], block) = config(heads_per_thread);
    let in_z = tiles.div_ceil(MOST_IN_Y);
    if in_z > MOST_IN_Z {
        let most = MOST_IN_Y * MOST_IN_Z;
        let reason = format!(
            "{num_tokens} tokens of {num_heads} heads need {tiles} blocks; there may be {most}"
        );
        return CHECK.refuse("x", reason);
    }
    let config = LaunchConfig::linear(CHECK.operator, "x", chunks, 0)?;
    let grid = [config.grid[0], tiles.min(MOST_IN_Y) as u32, in_z as u32];
    Ok((LaunchConfig { grid, block, ..config }, heads_per_thread as usize))
}

/// `[num_tokens, num_heads, head_dim, table_rows, half]`.
fn check(views: &Views) -> Result<(Signature<'_>, [usize; 5])> {
    let [cos, sin, positions] = rotation::tables();
    let tensors = [
        read("x").of(&FLOATS).axes(&["num_tokens", "num_heads", "head_dim"]).rows(),
        cos,
        sin,
        positions,
        write("y").like("x").rows().may_be("x"),
    ];
    let mut signature = CHECK.signature(views, tensors).wide("num_tokens").wide("table_rows");
    let axes = ["num_tokens", "num_heads", "head_dim", "table_rows", "half_rope_dim"];
    let extents = signature.bind(axes)?;
    let [num_tokens, _, head_dim, table_rows, half] = extents;
    rotation::check_half(CHECK, half, head_dim)?;
    rotation::check_rows(CHECK, views, table_rows, num_tokens)?;
    Ok((signature, extents))
}

/// Fills cos and sin of `fp32(position) * inv_freq`, the product rounded to f32. Returns the
/// kernel that ran.
///
/// - `inv_freq` `[rope_dim / 2]` f32, angle per position;
/// - `positions` `[num_positions]` i32;
/// - `cos`, `sin` `[num_positions, rope_dim / 2]` f32.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn table(device: &Device, views: &Views) -> Result<&'static str> {
    let tensors = [
        read("inv_freq").axes(&["half"]),
        read("positions").of(&[DType::I32]).axes(&["num_positions"]),
        write("cos").axes(&["num_positions", "half"]),
        write("sin").like("cos"),
    ];
    let mut signature = CHECK.signature(views, tensors).wide("num_positions");
    let [num_positions, half] = signature.bind(["num_positions", "half"])?;
    let kernel = device.kernel(FILE, &element_types(&[("ELEMENT", DType::F32)]), "rope_table")?;
    let params = signature.params(&["inv_freq", "positions", "cos", "sin"]);
    let params = params.i64("num_positions", num_positions)?.i32("half", half)?;
    let blocks = (num_positions * half).div_ceil(THREADS as usize).min(i32::MAX as usize);
    kernel.launch_blocks("positions", blocks, &params)?;
    Ok("rope_table")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens and heads that a launch covers.
    fn reached(units: usize, extents: [usize; 2], processors: u64) -> [u64; 2] {
        let (config, heads_per_thread) = launch_config(units, extents, processors).unwrap();
        let ([chunks, y, z], [_, heads, tokens]) =
            (config.grid.map(u64::from), config.block.map(u64::from));
        [y * z * tokens, chunks * heads * heads_per_thread as u64]
    }

    #[test]
    fn a_grid_reaches_every_token_and_head() {
        for units in [1, 8, 64, 258] {
            for extents in [[1, 1], [1, 300], [257, 1], [16384, 128], [70_001, 3]] {
                let [tokens, heads] = reached(units, extents, 132);
                assert!(
                    tokens >= extents[0] as u64 && heads >= extents[1] as u64,
                    "{units} units, {extents:?}"
                );
            }
        }
    }

    #[test]
    fn more_tokens_than_a_grid_has_blocks_for_are_refused_by_their_number() {
        let error = launch_config(256, [MOST_IN_Y as usize * MOST_IN_Z as usize + 1, 1], 132)
            .unwrap_err()
            .to_string();
        assert!(error.contains("16776961 tokens"), "{error}");
    }
}
