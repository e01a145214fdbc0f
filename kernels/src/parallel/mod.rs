//! Context parallelism: each rank has some of a batch's tokens (training 10).
//!
//! [`partition`] says which. The launchers here run on every rank at the same time, each with the
//! tensors of its own tokens, and communicate by the device's [`World`](dsv4_runtime::World). They
//! launch the operators' own kernels: what they add is which rows go where.

pub mod attention;
mod collectives;
pub mod compressor;
pub mod groups;
pub mod halo;
pub mod indexer;
pub mod partition;
pub mod ranges;
mod rows;
mod steps;
pub mod window;

pub use attention::Keys;
pub use groups::Groups;
pub use halo::Halos;
pub use partition::{Partition, Shards};
pub use rows::{modules, modules_of_halos, modules_of_indexer};
