//! Logits and sampling.

pub mod lm_head;
pub mod sampler;
