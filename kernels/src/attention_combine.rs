//! `attention_combine`: launcher of `kernels/cuda/attention_combine.cu` (inference 8.2).

use crate::arguments::{Arguments, read_at, write_at};
use crate::runtime::device::{Module, module};
use crate::runtime::{DType, Device, Result, TensorView};

const FILE: &str = "attention_combine.cu";
const CHECK: Arguments = Arguments { operator: "attention_combine" };
/// Rows of a block: one a warp.
const ROWS_PER_BLOCK: usize = 8;

/// Arguments of [`forward`].
#[derive(Clone, Copy, Debug)]
pub struct Forward<'a> {
    /// `[num_parts, num_tokens, num_heads, v_dim]` f32: each part's softmax-weighted sum, without the sink. Rows of
    /// parts that have seen no key are not read.
    pub partial_out: &'a TensorView,
    /// `[num_parts, num_tokens, num_heads]` f32: each part's log-sum-exp in **base 2**, without the sink; an infinity
    /// of either sign says that the part has seen no key.
    pub partial_lse: &'a TensorView,
    /// `[num_heads]` f32: a natural logit, not scaled; `None` is no sink.
    pub sink: Option<&'a TensorView>,
    /// `[num_tokens, num_heads, v_dim]` bf16; 0 for a row that has seen no key.
    pub out: &'a TensorView,
    /// `[num_tokens, num_heads]` f32: natural log-sum-exp without the sink; `+inf` for such a row.
    pub lse: &'a TensorView,
}

fn defines(v_dim: usize) -> Vec<(&'static str, String)> {
    vec![("V_DIM", v_dim.to_string())]
}

/// Modules of the model's width and of small ones.
pub fn modules() -> Vec<Module> {
    [512, 64, 40].into_iter().map(|v_dim| module(FILE, &defines(v_dim))).collect()
}

/// Merges the parts; returns the kernel that ran.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn forward(device: &Device, arguments: &Forward<'_>) -> Result<&'static str> {
    let Forward { partial_out, partial_lse, sink, out, lse } = *arguments;
    let tensors = [
        read_at("partial_out", partial_out).axes(&["num_parts", "num_tokens", "num_heads", "v_dim"]).aligned_rows(),
        read_at("partial_lse", partial_lse).axes(&["num_parts", "num_tokens", "num_heads"]),
        read_at("sink", sink).axes(&["num_heads"]),
        write_at("out", out).of(&[DType::Bf16]).axes(&["num_tokens", "num_heads", "v_dim"]).aligned_rows(),
        write_at("lse", lse).axes(&["num_tokens", "num_heads"]),
    ];
    let mut signature = CHECK.signature_at(tensors).extent("v_dim", 8, i32::MAX as usize).wide("num_tokens");
    let [num_parts, num_tokens, num_heads, v_dim] =
        signature.bind(["num_parts", "num_tokens", "num_heads", "v_dim"])?;
    let params = signature.params(&["partial_out", "partial_lse", "sink", "out", "lse"]);
    let params = params.i64("num_rows", num_tokens * num_heads)?;
    let params = params.i32("num_parts", num_parts)?.i32("num_heads", num_heads)?;
    let name = "attention_combine";
    let kernel = device.kernel(FILE, &defines(v_dim), name)?;
    kernel.launch_blocks("partial_out", (num_tokens * num_heads).div_ceil(ROWS_PER_BLOCK), &params)?;
    Ok(name)
}
