//! A whole model: its configuration, its checkpoint, and its weights on a device (inference 14 and
//! 15).

pub mod checkpoint;
pub mod config;
pub mod memory;
pub mod weights;
