//! `attention_combine`: launcher of `kernels/cuda/attention_combine.cu` (inference 8.2).

use crate::arguments::{Arguments, address};
use crate::kernel_params;
use crate::rms_norm::owned;
use crate::runtime::params::DeviceAddress;
use crate::runtime::{DType, Device, LaunchConfig, Result, TensorView};

const FILE: &str = "attention_combine.cu";
const CHECK: Arguments = Arguments { operator: "attention_combine" };
/// Rows of a block: one a warp.
const ROWS_PER_BLOCK: u64 = 8;

kernel_params! {
    /// Mirror of `AttentionCombineParams`.
    struct AttentionCombineParams {
        partial_out: DeviceAddress,
        partial_lse: DeviceAddress,
        sink: DeviceAddress,
        out: DeviceAddress,
        lse: DeviceAddress,
        part_stride: i64,
        token_stride: i64,
        head_stride: i64,
        out_token_stride: i64,
        out_head_stride: i64,
        num_rows: i64,
        num_parts: i32,
        num_heads: i32,
    }
}

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
pub fn modules() -> Vec<(String, Vec<(String, String)>)> {
    [512, 64, 40].into_iter().map(|v_dim| (FILE.to_owned(), owned(defines(v_dim)))).collect()
}

/// Merges the parts; returns the kernel that ran.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn forward(device: &Device, arguments: &Forward<'_>) -> Result<&'static str> {
    let Forward { partial_out, partial_lse, sink, out, lse } = *arguments;
    let [num_parts, num_tokens, num_heads, v_dim] = check(arguments)?;
    let params = AttentionCombineParams {
        partial_out: DeviceAddress(partial_out.address),
        partial_lse: DeviceAddress(partial_lse.address),
        sink: address(sink),
        out: DeviceAddress(out.address),
        lse: DeviceAddress(lse.address),
        part_stride: partial_out.strides[0],
        token_stride: partial_out.strides[1],
        head_stride: partial_out.strides[2],
        out_token_stride: out.strides[0],
        out_head_stride: out.strides[1],
        num_rows: (num_tokens * num_heads) as i64,
        num_parts: CHECK.int32("partial_out", num_parts)?,
        num_heads: CHECK.int32("partial_out", num_heads)?,
    };
    let name = "attention_combine";
    let kernel = device.kernel::<AttentionCombineParams>(FILE, &defines(v_dim), name)?;
    let blocks = ((num_tokens * num_heads) as u64).div_ceil(ROWS_PER_BLOCK);
    kernel.launch(LaunchConfig::linear(CHECK.operator, "partial_out", blocks, kernel.max_threads())?, &params)?;
    Ok(name)
}

fn check(arguments: &Forward<'_>) -> Result<[usize; 4]> {
    let Forward { partial_out, partial_lse, sink, out, lse } = *arguments;
    let extents = CHECK.extents("partial_out", partial_out)?;
    let [num_parts, num_tokens, num_heads, v_dim] = extents;
    if v_dim == 0 || !v_dim.is_multiple_of(8) {
        return CHECK.refuse("partial_out", format!("width {v_dim} must be a multiple of 8"));
    }
    CHECK.dtype("partial_out", partial_out, &[DType::F32])?;
    CHECK.rows("partial_out", partial_out)?;
    CHECK.aligned("partial_out", partial_out)?;
    CHECK.dense_tensor("partial_lse", partial_lse, &[num_parts, num_tokens, num_heads], &[DType::F32])?;
    if let Some(sink) = sink {
        CHECK.dense_tensor("sink", sink, &[num_heads], &[DType::F32])?;
    }
    CHECK.shape("out", out, &[num_tokens, num_heads, v_dim])?;
    CHECK.dtype("out", out, &[DType::Bf16])?;
    CHECK.rows("out", out)?;
    CHECK.aligned("out", out)?;
    CHECK.dense_tensor("lse", lse, &[num_tokens, num_heads], &[DType::F32])?;
    let read = [Some(partial_out), Some(partial_lse), sink];
    for read in read.into_iter().flatten() {
        CHECK.apart("out", out, read)?;
        CHECK.apart("lse", lse, read)?;
    }
    CHECK.apart("lse", lse, out)?;
    Ok(extents)
}
