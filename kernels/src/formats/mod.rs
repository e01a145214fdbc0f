//! Number formats: quantization, and the layouts of codes and scales.

pub mod gate_up_interleave;
pub(crate) mod group_format;
pub mod hadamard;
pub mod quantize_fp8;
pub mod quantize_mxfp4;
pub mod quantize_nvfp4;
pub mod scale_layout;
pub mod scale_swizzle;
