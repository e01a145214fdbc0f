//! Slow oracles for the operators of DeepSeek-V4, in f64 on the CPU.
//!
//! Each module is one operator. It has the formulas, a struct of inputs, `forward`, and the
//! explicit `backward` of the specification. It also has `backward_autograd`, which differentiates
//! the same forward automatically. The tests of the module compare the three with each other, with
//! finite differences and with golden tensors.
//!
//! Every tensor is a candle `f64` tensor on the CPU: widen bf16 and f32 storage before the call.
//! The oracles have no strides, streams or aliasing, and never read what a kernel produced.
//!
//! # Two precisions
//!
//! [`Precision::Exact`] evaluates the formula. [`Precision::Working`] also rounds wherever a kernel
//! stores or multiplies in a narrower type. That rounding is random and without bias. Every sum
//! also gets the noise of its fp32 accumulation. The spread of `Working` runs around `Exact` is the
//! error that a kernel of that precision may have. [`Precision::Nearest`] rounds at the same points
//! as the hardware does.
//!
//! Results of a `Working` run are the values **before** the last rounding to the type of the
//! output. A comparison adds half a unit in the last place of that type itself. A narrow tensor
//! that is read again is rounded: the saved bf16 `out`, the fp32 `lse` and `rstd`, and P and dS
//! before a matrix product.
//!
//! # Threads
//!
//! A judge runs an oracle many times, each run on a thread of its own. candle then must not divide
//! each operation over threads as well: its threads wait in loops, which takes the cores from the
//! other runs, and before each product it reads the list of processors. A program therefore sets
//! [`ONE_THREAD_EACH`] before it starts threads, and does not set `RAYON_NUM_THREADS`: candle
//! divides products over as many threads as that says.
//!
//! [`Precision::Exact`]: precision::Precision::Exact
//! [`Precision::Working`]: precision::Precision::Working
//! [`Precision::Nearest`]: precision::Precision::Nearest

pub mod attention;
pub mod cache;
pub mod conventions;
pub mod error;
pub mod experts;
pub mod format;
pub mod formats;
pub mod head;
pub mod indexer;
pub mod model;
pub mod named;
pub mod precision;
pub mod products;
pub mod projections;
pub mod quantize;
mod select;
pub mod statistics;
pub mod streams;
pub mod tensor_core;
mod wide;

#[cfg(test)]
mod testing;

pub use conventions::{Convention, Conventions};
pub use error::{Error, Result};
pub use format::Format;
pub use named::Named;
pub use precision::{Accumulator, Precision, Rounding};
pub use products::Products;
pub use tensor_core::TensorCore;

/// The environment variables, and their values, with which candle computes each operation on the
/// thread that asked for it: the first for elementwise operations, the second for products.
pub const ONE_THREAD_EACH: [(&str, &str); 2] =
    [("CANDLE_NUM_THREADS", "1"), ("CANDLE_CPU_MASK", "0")];
