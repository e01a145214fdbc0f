//! DeepSeek-V4's operators in CUDA C++, their launchers, and the runtime that runs them.
//!
//! `kernels/cuda/FAMILY/NAME.cu` is what runs, `kernels/src/FAMILY/NAME.rs` is how it is launched. Nothing here
//! knows the oracles (`reference/`): a kernel cannot borrow its own judge.

mod arguments;
pub mod attention;
pub mod cache;
pub mod experts;
pub mod formats;
pub mod head;
pub mod implementation;
pub mod indexer;
pub mod projections;
pub mod runtime;
pub mod streams;
