//! Whole models: random checkpoints, the oracle of a model on a device, and texts of a model.

pub mod latency;
pub mod random;
pub mod reference;
pub mod repeated;
pub mod text;
