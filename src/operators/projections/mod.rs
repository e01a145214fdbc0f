//! Norms, rotation and projections.

pub(crate) mod chain;
pub mod kv_projection;
pub mod linear;
pub mod output_projection;
pub mod query_norm_rope;
pub mod query_projection;
pub mod rms_norm;
pub mod rope;
