//! Whole models: random checkpoints.

pub mod random;
