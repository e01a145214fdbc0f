//! Backends in this process: of a device here, and of one in the process that serves it.

use super::backend::{Backend, BackendKind};
use super::cache::ModuleCache;
use super::cuda::CudaBackend;
use super::emulator::{EmulatorBackend, EmulatorOptions};
use super::error::{Result, RuntimeError};

/// The backend of this kind; of GPUs the one with this number, or the chosen one.
///
/// # Errors
/// [`RuntimeError::BackendMissing`] that lists what was searched for.
pub fn open(
    kind: BackendKind,
    ordinal: Option<u32>,
    cache: ModuleCache,
    emulator: EmulatorOptions,
) -> Result<Box<dyn Backend>> {
    Ok(match kind {
        BackendKind::Cuda => Box::new(match ordinal {
            Some(ordinal) => CudaBackend::of_device(ordinal, cache)?,
            None => CudaBackend::new(cache)?,
        }),
        BackendKind::Emulator => Box::new(EmulatorBackend::new(cache, emulator)?),
        BackendKind::External => {
            let reason = "an external kernel has no device of ours".to_owned();
            return Err(RuntimeError::BackendMissing { backend: "external", reason });
        }
    })
}
