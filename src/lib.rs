//! Numerical verification and parity harness for DeepSeek-V4's CUDA kernels.
//!
//! Data goes one way: `strategy -> case -> inputs -> { oracle, kernel } -> checks -> record ->
//! report`.
//!
//! - [`operator`]: what an operator brings, its strategy first, and the registry of all of them;
//! - [`operators`]: each operator's: strategy, case, inputs, oracle, kernel, laws;
//! - [`case`]: one comparison, one line of JSON, and how its inputs are drawn;
//! - [`external`]: a kernel that is somebody else's process;
//! - [`judge`]: who runs a case, what is compared, and how strictly;
//! - [`record`]: what one case leaves behind, and the journal of a run;
//! - [`sweep`]: many cases, those that failed, and many workers that may be killed;
//! - [`mutants`]: bugs planted on purpose, bugs by the hundred, and which checks see them;
//! - [`change`]: what a commit has to run of all that;
//! - [`report`]: what people read of a run, of two beside each other, and of many after one
//!   another;
//! - [`bisect`]: which commit made a kernel wrong, imprecise, slow or non-deterministic;
//! - [`specification`]: the sections that all of this cites;
//! - [`command`]: the command line.

// Both panic where nobody reads: commands print by `command::output`, and nothing else prints.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod bisect;
pub mod case;
pub mod change;
pub mod command;
pub mod external;
pub mod judge;
pub mod mutants;
pub mod operator;
pub mod operators;
pub mod record;
pub mod report;
pub mod specification;
pub mod sweep;
