//! Residual streams: embedding and mHC.

pub mod embed_streams;
pub mod mhc_block;
pub mod mhc_head;
pub mod mhc_mix;
pub mod mhc_post;
pub mod mhc_post_mix_pre;
pub mod mhc_pre;
mod site;
