//! A whole model (inference 12 to 15): its configuration, its checkpoint, its weights on a device,
//! and prefill, decode and drafts through the launchers of all operators.

mod attention;
mod batch;
mod buffers;
mod caches;
pub mod checkpoint;
pub mod config;
mod context;
mod drafts;
pub mod engine;
mod experts;
mod graphs;
mod head;
pub mod memory;
mod step;
mod tables;
pub mod tap;
pub mod weights;
