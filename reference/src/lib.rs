//! Slow oracles for the operators of DeepSeek-V4, in f64 on the CPU.
//!
//! One module is one operator: its formulas, a struct of inputs, `forward`, the explicit
//! `backward` of the specification, and `backward_autograd`, which differentiates the same forward
//! by machine. The three are held to each other, to finite differences and to golden tensors by
//! the tests beside them.
//!
//! Every tensor is a candle `f64` tensor on the CPU: widen bf16 and f32 storage before the call.
//! The oracles know nothing of strides, streams or aliasing, and never see what a kernel produced.
//!
//! # Two precisions
//!
//! [`Precision::Exact`] evaluates the formula. [`Precision::Working`] additionally rounds, at
//! random and without bias, wherever a kernel stores or multiplies in a narrower type, and adds to
//! every sum the noise of its fp32 accumulation. The spread of `Working` runs around `Exact` is
//! what a kernel of that precision may be wrong by. [`Precision::Nearest`] rounds there as the
//! hardware does.
//!
//! Results of a `Working` run are the values **before** the last rounding to the type of the
//! output: a comparison adds half a unit in the last place of that type itself. A narrow tensor
//! that is read again (the saved bf16 `out`, the fp32 `lse` and `rstd`, P and dS in front of a
//! matrix product) is rounded.
//!
//! [`Precision::Exact`]: precision::Precision::Exact
//! [`Precision::Working`]: precision::Precision::Working
//! [`Precision::Nearest`]: precision::Precision::Nearest

pub mod attention;
pub mod cache;
pub mod error;
pub mod experts;
pub mod format;
pub mod formats;
pub mod head;
pub mod indexer;
pub mod named;
pub mod precision;
pub mod products;
pub mod projections;
pub mod quantize;
mod select;
pub mod statistics;
pub mod streams;
pub mod tensor_core;

#[cfg(test)]
mod testing;

pub use error::{Error, Result};
pub use format::Format;
pub use named::Named;
pub use precision::{Accumulator, Precision, Rounding};
pub use products::Products;
pub use tensor_core::TensorCore;
