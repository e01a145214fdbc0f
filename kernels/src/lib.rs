//! DeepSeek-V4's operators in CUDA C++, their launchers, and the runtime that runs them.
//!
//! `kernels/cuda/NAME.cu` is what runs, `kernels/src/NAME.rs` is how it is launched. Nothing here
//! knows the oracles (`reference/`): a kernel cannot borrow its own judge.

mod arguments;
pub mod attention_combine;
pub mod compressor;
pub mod compressor_stream;
pub mod decode_attention;
pub mod hadamard;
pub mod implementation;
pub mod indexer_backward;
pub mod indexer_logits;
pub mod indexer_loss;
pub mod indexer_query;
pub mod kv_cache;
pub mod kv_cache_write;
pub mod rms_norm;
pub mod rope;
pub mod runtime;
pub mod score_recompute;
pub mod sparse_attention;
pub mod swiglu;
pub mod topk;
