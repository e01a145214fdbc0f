//! `moe_reduce`: launcher of `kernels/cuda/experts/moe_reduce.cu` (inference 11.2, 11.3).

use crate::arguments::{Arguments, FLOATS, element_types, modules_of_floats, pieces, read, write};
use crate::experts::moe_expand::{THREADS, clearing_rows};
use dsv4_runtime::source::Module;
use dsv4_runtime::{DType, Device, Result, Views};

const FILE: &str = "moe_reduce.cu";
const CHECK: Arguments = Arguments { operator: "moe_reduce" };
/// The most slots of a token.
pub const MAX_TOPK: usize = 32;

/// Every module that the launcher compiles.
pub fn modules() -> Vec<Module> {
    modules_of_floats(FILE, &["ELEMENT"])
}

/// Launches the forward, or the `backward`; returns the kernel that ran. Its tensors:
///
/// - `y` `[num_positions, hidden_size]`, bf16 or f32, the experts' rows; `shared` `[num_tokens,
///   hidden_size]`, the shared expert's, absent where it is added elsewhere, and `out`, like it;
///   of the backward `dout`, like `out`, and `dy`, like `y`; all of one type, rows contiguous. The
///   gradient of `shared` is `dout` itself; a backward without weights does not need `y`;
/// - `token_topk_to_pos` `[num_tokens, topk]` i32, rows contiguous, up to 32 slots: the row of
///   each slot; a value outside `0 .. num_positions` is no row;
/// - `pos_to_token` `[num_positions]` i32: negative for rows that no slot has, whose gradients are
///   zeros; every other row is some slot's, as [`crate::experts::moe_map::forward`] writes both.
///   Not needed by the forward;
/// - `topk_weights` `[num_tokens, topk]` f32, rows contiguous, absent where the experts applied
///   them, and with it the backward's `dtopk_weights`.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn launch(device: &Device, views: &Views, backward: bool) -> Result<&'static str> {
    let map = read("pos_to_token").of(&[DType::I32]).axes(&["num_positions"]);
    let weighted = views.get("topk_weights").is_some();
    let y = read("y").of(&FLOATS).axes(&["num_positions", "hidden_size"]).rows();
    let shared = read("shared").axes(&["num_tokens", "hidden_size"]).rows().optional();
    let dout = read("dout").of(&FLOATS).axes(&["num_tokens", "hidden_size"]).rows();
    let tensors = [
        dout.when(backward),
        if backward && !weighted { y.typed("dout").optional() } else { y },
        read("token_topk_to_pos").of(&[DType::I32]).axes(&["num_tokens", "topk"]).rows(),
        if backward { map } else { map.optional() },
        read("topk_weights").axes(&["num_tokens", "topk"]).rows().optional(),
        shared.typed(if backward { "dout" } else { "y" }),
        write("out").typed("y").axes(&["num_tokens", "hidden_size"]).rows().when(!backward),
        write("dy").typed("dout").axes(&["num_positions", "hidden_size"]).rows().when(backward),
        write("dtopk_weights")
            .axes(&["num_tokens", "topk"])
            .rows()
            .with(&["topk_weights"])
            .when(backward),
    ];
    let signature = CHECK.signature(views, tensors).extent("topk", 1, MAX_TOPK);
    let mut call = signature.extent("hidden_size", 1, i32::MAX as usize).wide("num_tokens");
    let axes = ["num_tokens", "num_positions", "topk", "hidden_size"];
    let [num_tokens, num_positions, topk, hidden_size] = call.bind(axes)?;
    let rows: &[_] = if backward { &["y", "dout", "dy"] } else { &["y", "shared", "out"] };
    let vectorised = call.vectorised_rows(rows);
    let params = match backward {
        false => call.params(&["y", "token_topk_to_pos", "topk_weights", "shared", "out"]),
        true => call.params(&[
            "dout",
            "y",
            "token_topk_to_pos",
            "pos_to_token",
            "topk_weights",
            "dy",
            "dtopk_weights",
        ]),
    };
    let params = params.i64("num_tokens", num_tokens)?.i64("num_positions", num_positions)?;
    let params = params.i32("topk", topk)?.i32("hidden_size", hidden_size)?;
    let rows_per_block = clearing_rows(num_positions);
    let params = if backward { params.i32("rows_per_block", rows_per_block)? } else { params };
    let names = [
        ["moe_reduce_forward_scalar", "moe_reduce_forward_vector"],
        ["moe_reduce_backward_scalar", "moe_reduce_backward_vector"],
    ];
    let name = names[usize::from(backward)][usize::from(vectorised)];
    let dtype = views[if backward { "dout" } else { "y" }].dtype;
    let blocks = match backward {
        false => num_tokens.saturating_mul(pieces(hidden_size, dtype, vectorised, THREADS)),
        true => num_tokens.saturating_add(num_positions.div_ceil(rows_per_block)),
    };
    device.kernel(FILE, &element_types(&[("ELEMENT", dtype)]), name)?.launch_blocks(
        "token_topk_to_pos",
        blocks,
        &params,
    )?;
    Ok(name)
}
