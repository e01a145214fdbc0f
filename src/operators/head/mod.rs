//! Logits and sampling.

pub mod lm_head;
pub(crate) mod logits;
pub mod mtp_input;
pub mod sampler;
