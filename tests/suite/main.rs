//! One binary for every integration test: `cargo test --test suite NAME`.
//!
//! Everything runs on the emulator, or on a GPU with `PARITY_BACKEND=cuda`. If the demanded backend
//! is missing, that is an error, never a skip.

mod bad_input;
mod benchmarks;
mod beside;
mod bisect;
mod blame;
mod caches;
mod calls;
mod cases;
mod checkpoint;
mod command_line;
mod coverage;
mod decode;
mod dependencies;
mod diagnosis;
mod diff;
mod drafts;
mod emulator;
mod extent;
mod external;
mod external_ranks;
mod external_views;
mod fuzz;
mod golden;
mod history;
mod hopper;
mod hostile;
mod kill_matrix;
mod launchers;
mod layouts;
mod model;
mod mutants;
mod output;
mod paths;
mod prefixes;
mod races;
mod rank_processes;
mod ranks;
mod readme;
mod sampler;
mod scenario;
mod seams;
mod selftest;
mod sequence;
mod shard;
mod slurm;
mod smoke;
mod solution;
mod specification;
mod steps;
mod support;
mod sweep;
mod template;
mod threads;
