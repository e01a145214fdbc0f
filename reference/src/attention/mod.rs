//! Attention and its postprocessing.

pub mod attention_combine;
pub mod attention_layer;
pub mod decode_attention;
pub mod inverse_rope_quantize;
pub mod sparse_attention;
