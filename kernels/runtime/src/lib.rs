//! The runtime: one kernel source, two backends. It contains no kernel.
//!
//! [`Device`] hides whether kernels run on a GPU ([`cuda`]) or on the host ([`emulator`]). Both
//! compile a [`SourceTree`] at run time and cache compiled modules on disk ([`cache`]). They launch
//! by name with one parameter struct. [`arena`] adds the memory contract to launches.

pub mod arena;
pub mod backend;
pub mod cache;
pub mod cuda;
pub mod device;
#[cfg(test)]
#[path = "../examples/emulate.rs"]
#[allow(dead_code, reason = "its `main` is the example")]
mod emulate;
pub mod emulator;
pub mod error;
pub mod files;
mod in_process;
pub mod interrupt;
mod jobs;
pub mod kept;
mod layouts;
pub mod mapped;
pub mod matrix;
pub mod params;
pub mod process;
pub mod recording;
pub mod remote;
mod serial;
pub mod source;
pub mod supervisor;
pub mod tasks;
pub mod tensor;
pub mod tensor_map;
#[cfg(test)]
mod testing;
mod turns;
pub mod views;
mod worker;
pub mod world;

pub use arena::{Contract, DeviceArena, Role};
pub use backend::{BackendKind, Environment, Placement};
pub use device::{Device, DeviceOptions, Kernel, LaunchConfig, NamedTensors};
pub use error::{Result, RuntimeError};
pub use jobs::become_worker_of_host;
pub use source::SourceTree;
pub use tensor::{DType, HostTensor, TensorView};
pub use tensor_map::TensorMap;
pub use views::Views;
pub use world::World;

// The example is tested here, and uses this crate by its name as other crates do.
#[cfg(test)]
extern crate self as dsv4_runtime;
