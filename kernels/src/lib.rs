//! DeepSeek-V4's operators in CUDA C++, their launchers, and the runtime that runs them.
//!
//! `kernels/cuda/NAME.cu` is what runs, `kernels/src/NAME.rs` is how it is launched. Nothing here
//! knows the oracles (`reference/`): a kernel cannot borrow its own judge.

mod arguments;
pub mod attention_combine;
pub mod cache_layout;
pub mod cache_manager;
pub mod compressor;
pub mod compressor_stream;
pub mod decode_attention;
pub mod embed_streams;
pub mod gate_up_interleave;
pub mod grouped_linear;
pub mod grouped_linear_swiglu;
pub mod hadamard;
pub mod implementation;
pub mod indexer_backward;
pub mod indexer_cache_write;
pub mod indexer_logits;
pub mod indexer_loss;
pub mod indexer_query;
pub mod indexer_recompute;
pub mod inverse_rope_quantize;
pub mod kv_cache;
pub mod kv_cache_write;
pub mod kv_norm_rope_write;
pub mod linear;
pub mod lm_head;
pub mod mhc_head;
pub mod mhc_mix;
pub mod mhc_post;
pub mod mhc_post_mix_pre;
pub mod mhc_pre;
pub mod moe_expand;
pub mod moe_map;
pub mod moe_reduce;
pub mod quantize_fp8;
pub mod quantize_mxfp4;
pub mod quantize_nvfp4;
pub mod query_norm_rope;
pub mod rms_norm;
pub mod rope;
pub mod router;
pub mod runtime;
pub mod sampler;
pub mod scale_layout;
pub mod scale_swizzle;
pub mod score_recompute;
pub mod sparse_attention;
pub mod swiglu;
pub mod swiglu_quantize;
pub mod topk;
