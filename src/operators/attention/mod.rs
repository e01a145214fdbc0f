//! Attention and what follows it.

pub mod attention_combine;
pub mod attention_layer;
pub mod attention_output_rotation;
pub mod cp_sparse_attention;
pub mod cp_window;
pub mod decode_attention;
pub mod inverse_rope_quantize;
mod of_ranks;
pub mod sinks;
pub mod sparse_attention;
