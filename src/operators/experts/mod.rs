//! Mixture of experts.

pub mod grouped_linear;
pub mod grouped_linear_swiglu;
pub mod moe;
pub mod moe_expand;
pub mod moe_map;
pub mod moe_reduce;
pub mod moe_rows;
pub mod router;
pub mod swiglu;
pub mod swiglu_quantize;
