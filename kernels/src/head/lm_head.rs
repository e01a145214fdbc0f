//! `lm_head`: launcher of `kernels/cuda/head/lm_head.cu` (inference 12.1).

use crate::arguments::{Arguments, read, write};
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, Result, Views};

const FILE: &str = "lm_head.cu";
const CHECK: Arguments = Arguments { operator: "lm_head" };
/// Rows of the weights that a block processes, in tiles or in the kernel of single elements.
const TILE_VOCAB: usize = 128;
const SCALAR_VOCAB: usize = 4;
/// Rows of the logits that a block processes: up to [`FEW_ROWS`] rows, beyond, and in the kernel of
/// single elements.
const FEW_ROWS: usize = 16;
const MANY_ROWS: usize = 128;
const SCALAR_ROWS: usize = 8;

/// Every module that the launcher compiles.
pub fn modules() -> Vec<Module> {
    vec![module(FILE, &[])]
}

/// Launches the head for the sampled rows; returns the kernel that ran. Its tensors:
///
/// - `hidden` `[num_tokens, hidden_size]` bf16, rows contiguous: the normed hidden states;
/// - `weight` `[vocab_size, hidden_size]` bf16, rows contiguous;
/// - `rows` `[num_rows]` i32: the tokens that are sampled; absent where all are, in their order. A
///   row outside the tokens gets logits of -infinity;
/// - `logits` `[num_rows, vocab_size]` f32, rows contiguous.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn forward(device: &Device, views: &Views) -> Result<&'static str> {
    let tensors = [
        read("hidden").of(&[DType::Bf16]).axes(&["num_tokens", "hidden_size"]).rows(),
        read("weight").of(&[DType::Bf16]).axes(&["vocab_size", "hidden_size"]).rows(),
        read("rows").of(&[DType::I32]).axes(&["num_rows"]).optional(),
        write("logits").axes(&["num_rows", "vocab_size"]).rows(),
    ];
    let signature = CHECK.signature(views, tensors).extent("hidden_size", 1, i32::MAX as usize);
    let mut call = signature.wide("num_tokens").wide("num_rows");
    let axes = ["num_tokens", "num_rows", "vocab_size", "hidden_size"];
    let [num_tokens, num_rows, vocab_size, hidden_size] = call.bind(axes)?;
    if views.get("rows").is_none() && num_rows != num_tokens {
        return CHECK.refuse(
            "logits",
            format!("{num_rows} rows of {num_tokens} tokens need a list of which they are"),
        );
    }
    let params = call.params(&["hidden", "weight", "rows", "logits"]);
    let params = params.i64("num_tokens", num_tokens)?.i64("num_rows", num_rows)?;
    let params = params.i32("vocab_size", vocab_size)?.i32("hidden_size", hidden_size)?;
    let (name, tile_rows, tile_vocab) = match call.vectorised_rows(&["hidden", "weight"]) {
        false => ("lm_head_scalar", SCALAR_ROWS, SCALAR_VOCAB),
        true if num_rows <= FEW_ROWS => ("lm_head_few", FEW_ROWS, TILE_VOCAB),
        true => ("lm_head_many", MANY_ROWS, TILE_VOCAB),
    };
    let blocks = num_rows.div_ceil(tile_rows) * vocab_size.div_ceil(tile_vocab);
    device.kernel(FILE, &[], name)?.launch_blocks("logits", blocks, &params)?;
    Ok(name)
}
