//! Whole models: random checkpoints, and the oracle of a model on a device.

pub mod random;
pub mod reference;
