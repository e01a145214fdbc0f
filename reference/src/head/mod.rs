//! Logits and sampling.

pub mod lm_head;
pub mod mtp_input;
pub mod sampler;
