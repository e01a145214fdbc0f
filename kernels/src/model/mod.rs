//! A whole model (inference 12 to 15): its configuration, its checkpoint, its weights on a device,
//! and prefill and decode through the launchers of all operators.

mod attention;
mod batch;
mod buffers;
mod caches;
pub mod checkpoint;
pub mod config;
pub mod engine;
mod experts;
pub mod memory;
mod step;
mod tables;
pub mod weights;
