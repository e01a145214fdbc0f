//! The runtime: one kernel source, two backends.
//!
//! [`Device`] hides whether kernels run on a GPU ([`cuda`]) or on the host ([`emulator`]). Both
//! compile `kernels/cuda/*.cu` at run time, cache what they compiled on disk ([`cache`]) and launch
//! by name with one parameter struct. [`arena`] wraps launches in the memory contract.

pub mod arena;
pub mod backend;
pub mod cache;
pub mod cuda;
pub mod device;
pub mod emulator;
pub mod error;
pub mod files;
pub mod interrupt;
pub mod matrix;
pub mod params;
pub mod process;
pub mod recording;
pub mod remote;
mod serial;
pub mod source;
pub mod supervisor;
pub mod tensor;
pub mod tensor_map;
pub mod views;
mod worker;

pub use arena::{Contract, DeviceArena, Role};
pub use backend::{BackendKind, Environment, Placement};
pub use device::{Device, DeviceOptions, Kernel, LaunchConfig, NamedTensors};
pub use error::{Result, RuntimeError};
pub use source::SourceTree;
pub use tensor::{DType, HostTensor, TensorView};
pub use tensor_map::TensorMap;
pub use views::Views;
