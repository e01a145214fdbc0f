//! `attention_combine`: launcher of `kernels/cuda/attention/attention_combine.cu` (inference 8.2).

use crate::arguments::{Arguments, read, write};
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, Result, Views};

const FILE: &str = "attention_combine.cu";
const CHECK: Arguments = Arguments { operator: "attention_combine" };
/// Rows of a block: one a warp.
const ROWS_PER_BLOCK: usize = 8;

fn defines(v_dim: usize) -> Vec<(&'static str, String)> {
    vec![("V_DIM", v_dim.to_string())]
}

/// Modules of the model's width and of small ones.
pub fn modules() -> Vec<Module> {
    [512, 64, 40].into_iter().map(|v_dim| module(FILE, &defines(v_dim))).collect()
}

/// Merges the parts; returns the kernel that ran. Its tensors:
///
/// - `partial_out` `[num_parts, num_tokens, num_heads, v_dim]` f32, rows 16-byte aligned: each
///   part's softmax-weighted sum, without the sink. Rows of parts that have no key are not read;
/// - `partial_lse` `[num_parts, num_tokens, num_heads]` f32: each part's log-sum-exp in **base
///   2**, without the sink; an infinity of either sign means that the part has no key;
/// - `sink` `[num_heads]` f32: a natural logit, not scaled; absent without sinks;
/// - `out` `[num_tokens, num_heads, v_dim]` bf16, rows 16-byte aligned: 0 for a row that has no
///   key;
/// - `lse` `[num_tokens, num_heads]` f32: natural log-sum-exp without the sink; `+inf` for such a
///   row.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn forward(device: &Device, views: &Views) -> Result<&'static str> {
    let tensors = [
        read("partial_out").axes(&["num_parts", "num_tokens", "num_heads", "v_dim"]).aligned_rows(),
        read("partial_lse").axes(&["num_parts", "num_tokens", "num_heads"]),
        read("sink").axes(&["num_heads"]).optional(),
        write("out").of(&[DType::Bf16]).axes(&["num_tokens", "num_heads", "v_dim"]).aligned_rows(),
        write("lse").axes(&["num_tokens", "num_heads"]),
    ];
    let mut call = CHECK.signature(views, tensors).extent("v_dim", 8, i32::MAX as usize);
    let [num_parts, num_tokens, num_heads, v_dim] =
        call.bind(["num_parts", "num_tokens", "num_heads", "v_dim"])?;
    let (num_rows, name) = (num_tokens * num_heads, "attention_combine");
    CHECK.int32("partial_out", num_rows)?;
    let params = call
        .params(&["partial_out", "partial_lse", "sink", "out", "lse"])
        .i64("num_rows", num_rows)?;
    let params = params.i32("num_parts", num_parts)?.i32("num_heads", num_heads)?;
    let kernel = device.kernel(FILE, &defines(v_dim), name)?;
    kernel.launch_blocks("partial_out", num_rows.div_ceil(ROWS_PER_BLOCK), &params)?;
    Ok(name)
}
