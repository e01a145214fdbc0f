//! Norms, rotation and projections.

pub mod linear;
pub mod query_norm_rope;
pub mod rms_norm;
pub mod rope;
pub(crate) mod rotation;
