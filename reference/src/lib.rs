//! Slow oracles for the operators of DeepSeek-V4, in f64 on the CPU.
//!
//! One module is one operator: its formulas, a struct of inputs, `forward`, the explicit `backward` of
//! the specification, and `backward_autograd`, which differentiates the same forward by machine. The
//! three are held to each other, to finite differences and to golden tensors by the tests beside them.
//!
//! Every tensor is a candle `f64` tensor on the CPU: widen bf16 and f32 storage before the call. The
//! oracles know nothing of strides, streams or aliasing, and never see what a kernel produced.
//!
//! # Two precisions
//!
//! [`Precision::Exact`] evaluates the formula. [`Precision::Working`] additionally rounds, at random and
//! without bias, wherever a kernel stores or multiplies in a narrower type, and adds to every sum the
//! noise of its fp32 accumulation. The spread of `Working` runs around `Exact` is what a kernel of
//! that precision may be wrong by. [`Precision::Nearest`] rounds there as the hardware does.
//!
//! Results of a `Working` run are the values **before** the last rounding to the type of the output: a
//! comparison adds half a unit in the last place of that type itself. A narrow tensor that is read again
//! (the saved bf16 `out`, the fp32 `lse` and `rstd`, P and dS in front of a matrix product) is rounded.
//!
//! [`Precision::Exact`]: precision::Precision::Exact
//! [`Precision::Working`]: precision::Precision::Working
//! [`Precision::Nearest`]: precision::Precision::Nearest

pub mod attention_combine;
pub mod compressor;
pub mod compressor_stream;
pub mod decode_attention;
pub mod embed_streams;
pub mod error;
pub mod format;
pub mod gate_up_interleave;
pub mod grouped_linear;
pub mod grouped_linear_swiglu;
pub mod hadamard;
pub mod indexer_backward;
pub mod indexer_cache_write;
pub mod indexer_distillation;
pub mod indexer_logits;
pub mod indexer_loss;
pub mod indexer_query;
pub mod indexer_recompute;
pub mod inverse_rope_quantize;
pub mod kv_cache;
pub mod kv_cache_write;
pub mod kv_norm_rope_write;
pub mod kv_projection;
pub mod linear;
pub mod lm_head;
pub mod mhc_block;
pub mod mhc_head;
pub mod mhc_mix;
pub mod mhc_post;
pub mod mhc_post_mix_pre;
pub mod mhc_pre;
pub mod moe;
pub mod moe_expand;
pub mod moe_map;
pub mod moe_reduce;
pub mod named;
pub mod output_projection;
pub mod precision;
pub mod products;
pub mod quantise;
pub mod quantize_fp8;
pub mod quantize_mxfp4;
pub mod quantize_nvfp4;
pub mod query_norm_rope;
pub mod query_projection;
pub mod ranking;
pub mod rms_norm;
pub mod rope;
pub mod router;
pub mod sampler;
pub mod scale_layout;
pub mod scale_swizzle;
pub mod score_recompute;
mod select;
pub mod sparse_attention;
pub mod statistics;
pub mod swiglu;
pub mod swiglu_quantize;
pub mod tensor_core;
pub mod topk;

#[cfg(test)]
mod testing;

pub use error::{Error, Result};
pub use format::Format;
pub use named::Named;
pub use precision::{Accumulator, Precision, Rounding};
pub use products::Products;
pub use tensor_core::TensorCore;
