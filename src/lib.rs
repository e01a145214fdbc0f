//! Numerical verification and parity harness for DeepSeek-V4's CUDA kernels.
//!
//! Data flows in one direction: `strategy -> case -> inputs -> { oracle, kernel } -> checks ->
//! record -> report`.
//!
//! - [`operator`]: what an operator declares, its strategy first, and the registry of all
//!   operators;
//! - [`operators`]: for each operator: strategy, case, inputs, oracle, kernel, laws;
//! - [`calls`]: operators as functions of a caller's tensors;
//! - [`case`]: one comparison, one line of JSON, and how its inputs are drawn;
//! - [`external`]: a third-party kernel in a separate process;
//! - [`gallery`]: public kernels of a list, each judged in processes of its own;
//! - [`judge`]: what runs a case, what is compared, and how strictly;
//! - [`blame`]: which call of a whole model, or of another stack, is outside its own budget;
//! - [`record`]: the record of one case, and the journal of a run;
//! - [`sweep`]: many cases, saved failing cases, and many workers that may be killed;
//! - [`coverage`]: which lines of the kernels the cases of a sweep run;
//! - [`mutants`]: planted mutants, generated mutants, and which checks see them;
//! - [`power`]: which errors the verdicts of a sweep would see;
//! - [`model`]: whole models: random checkpoints, and the oracle of a model on a device;
//! - [`parallel_time`]: the time of the attention of ranks, next to that of its parts;
//! - [`change`]: what a commit must run of all that;
//! - [`compile`]: every module of the kernels, compiled for some targets;
//! - [`report`]: the pages of one run, the comparison of two runs, and the history of many;
//! - [`bisect`]: which commit made a kernel wrong, imprecise, slow or non-deterministic;
//! - [`specification`]: the sections that the code cites;
//! - [`command`]: the command line.

// Both macros panic when standard output is closed. Commands print through `command::output`.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod bisect;
pub mod blame;
pub mod calls;
pub mod case;
pub mod change;
pub mod command;
pub mod compile;
pub mod coverage;
pub mod external;
pub mod gallery;
pub mod judge;
pub mod model;
pub mod mutants;
pub mod operator;
pub mod operators;
pub mod parallel_time;
pub mod power;
pub mod record;
pub mod report;
pub mod specification;
pub mod sweep;

/// Prepares a process that judges kernels and does nothing else. Call it before any thread is
/// started.
pub fn prepare_process() {
    dsv4_runtime::process::keep_freed_memory();
    for (name, value) in dsv4_reference::ONE_THREAD_EACH {
        let set = dsv4_runtime::process::set_variable_if_alone(name, value);
        tracing::debug!(name, value, set, "one thread for each operation of an oracle");
    }
    let threads = std::env::var(THREADS).ok().and_then(|threads| threads.parse().ok());
    if let Some(threads) = threads {
        let built = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
        tracing::debug!(threads, ?built, "threads of oracles");
    }
}

/// The environment variable that says how many threads a worker's oracles have. It is not
/// `RAYON_NUM_THREADS`, by which candle would divide each product.
pub const THREADS: &str = "PARITY_THREADS";
