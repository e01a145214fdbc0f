//! Numerical verification and parity harness for DeepSeek-V4's CUDA kernels.
//!
//! Data goes one way: `strategy -> case -> inputs -> { oracle, kernel } -> checks -> record -> report`.
//!
//! - [`operators`] and [`registry`]: what each operator brings;
//! - [`case`]: one comparison, one line of JSON;
//! - [`budget`], [`agreement`], [`checks`], [`triangulation`]: what is compared, and how strictly;
//! - [`sweep`] and [`regressions`]: many cases, and those that failed;
//! - [`mutants`], [`mutation`], [`kill_matrix`]: bugs planted on purpose, bugs by the hundred, and who sees them;
//! - [`runner`] and [`external`]: who runs a kernel: a device of ours, or somebody else's process;
//! - [`shard`], [`journal`], [`merge`]: one sweep over many workers, which may be killed;
//! - [`bisect`]: which commit made a kernel wrong, imprecise, slow or non-deterministic;
//! - [`golden`] and [`golden_run`]: what an independent implementation computed;
//! - [`record`], [`report`], [`benchmarks`]: what a run leaves behind, and what people read;
//! - [`specification`]: the sections that all of this cites;
//! - [`diff`] and [`history`]: two runs beside each other, and many after one another.

pub mod agreement;
pub mod benchmarks;
pub mod bisect;
pub mod budget;
pub mod case;
pub mod checks;
pub mod command;
pub mod diff;
pub mod external;
pub mod golden;
pub mod golden_run;
pub mod history;
pub mod journal;
pub mod kill_matrix;
pub mod merge;
pub mod mutants;
pub mod mutation;
pub mod operator;
pub mod operators;
pub mod record;
pub mod registry;
pub mod regressions;
pub mod report;
pub mod runner;
pub mod scenario;
pub mod shard;
pub mod specification;
pub mod sweep;
pub mod triangulation;
