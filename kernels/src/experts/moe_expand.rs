//! `moe_expand`: launcher of `kernels/cuda/experts/moe_expand.cu` (inference 11.3).

use crate::arguments::{Arguments, FLOATS, element_types, modules_of_floats, pieces, read, write};
use dsv4_runtime::source::Module;
use dsv4_runtime::{DType, Device, Result, Views};

const FILE: &str = "moe_expand.cu";
const CHECK: Arguments = Arguments { operator: "moe_expand" };
/// The most slots of a token.
pub const MAX_TOPK: usize = 32;
/// Threads of a block, and positions that it checks for rows without a slot.
pub(crate) const THREADS: usize = 128;

/// Every module that the launcher compiles.
pub fn modules() -> Vec<Module> {
    modules_of_floats(FILE, &["ELEMENT"])
}

/// Positions that a block checks for rows without a slot, of `num_positions`. This is the number of
/// its threads, or fewer where blocks would be too few to write such rows at memory bandwidth. A
/// multiple of its warps.
pub(crate) fn clearing_rows(num_positions: usize) -> usize {
    const WARPS: usize = THREADS / 32;
    const ENOUGH_BLOCKS: usize = 2048;
    (num_positions / ENOUGH_BLOCKS).next_multiple_of(WARPS).clamp(WARPS, THREADS)
}

/// Launches the forward, or the `backward`; returns the kernel that ran. Its tensors:
///
/// - `x` `[num_tokens, hidden_size]`, bf16 or f32, and with it `y` `[num_positions, hidden_size]`,
///   of the backward `dy`, like `y`, and `dx`, like `x`, all of one type, rows contiguous. The
///   backward does not need `x`;
/// - `token_topk_to_pos` `[num_tokens, topk]` i32, rows contiguous, up to 32 slots: the row of
///   each slot; a value outside `0 .. num_positions` is no row;
/// - `pos_to_token` `[num_positions]` i32: negative for rows that no slot has, which get zeros;
///   every other row is some slot's, as [`crate::experts::moe_map::forward`] writes both. Not
///   needed by the backward.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn launch(device: &Device, views: &Views, backward: bool) -> Result<&'static str> {
    let map = read("pos_to_token").of(&[DType::I32]).axes(&["num_positions"]);
    let x = read("x").axes(&["num_tokens", "hidden_size"]).rows();
    let dy = read("dy").of(&FLOATS).axes(&["num_positions", "hidden_size"]).rows();
    let tensors = [
        dy.when(backward),
        if backward { x.typed("dy").optional() } else { x.of(&FLOATS) },
        read("token_topk_to_pos").of(&[DType::I32]).axes(&["num_tokens", "topk"]).rows(),
        if backward { map.optional() } else { map },
        write("y").typed("x").axes(&["num_positions", "hidden_size"]).rows().when(!backward),
        write("dx").typed("dy").axes(&["num_tokens", "hidden_size"]).rows().when(backward),
    ];
    let signature = CHECK.signature(views, tensors).extent("topk", 1, MAX_TOPK);
    let mut call = signature.extent("hidden_size", 1, i32::MAX as usize).wide("num_tokens");
    let axes = ["num_tokens", "num_positions", "topk", "hidden_size"];
    let [num_tokens, num_positions, topk, hidden_size] = call.bind(axes)?;
    let rows: &[_] = if backward { &["dy", "dx"] } else { &["x", "y"] };
    let vectorised = call.vectorised_rows(rows);
    let params = match backward {
        false => call.params(&["x", "token_topk_to_pos", "pos_to_token", "y"]),
        true => call.params(&["dy", "token_topk_to_pos", "dx"]),
    };
    let params = params.i64("num_tokens", num_tokens)?.i64("num_positions", num_positions)?;
    let params = params.i32("topk", topk)?.i32("hidden_size", hidden_size)?;
    let rows_per_block = clearing_rows(num_positions);
    let params = if backward { params } else { params.i32("rows_per_block", rows_per_block)? };
    let names = [
        ["moe_expand_forward_scalar", "moe_expand_forward_vector"],
        ["moe_expand_backward_scalar", "moe_expand_backward_vector"],
    ];
    let name = names[usize::from(backward)][usize::from(vectorised)];
    let dtype = views[rows[0]].dtype;
    let of_tokens = num_tokens.saturating_mul(pieces(hidden_size, dtype, vectorised, THREADS));
    let of_positions = if backward { 0 } else { num_positions.div_ceil(rows_per_block) };
    let kernel = device.kernel(FILE, &element_types(&[("ELEMENT", dtype)]), name)?;
    kernel.launch_blocks("token_topk_to_pos", of_tokens.saturating_add(of_positions), &params)?;
    Ok(name)
}
