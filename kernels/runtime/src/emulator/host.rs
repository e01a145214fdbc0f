//! The emulated device itself: memory, modules and launches in its process.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::fault;
use super::memory::GuardedMemory;
use super::message::{Answer, Request};
use super::module::EmulatorModule;
use super::shared::{Schedule, Shared};
use crate::error::{Result, RuntimeError};

/// The state of a worker process.
pub struct Host {
    shared: Arc<Shared>,
    modules: HashMap<u64, EmulatorModule>,
    next_module: u64,
}

impl Host {
    /// Without buffers and modules; `memory` is the file of its device.
    pub fn new(time_limit: Duration, memory: File) -> Self {
        fault::install_handlers();
        let workers = std::thread::available_parallelism().map_or(1, usize::from);
        let shared = Shared {
            memory: GuardedMemory::of(memory),
            time_limit,
            endless: Mutex::default(),
            schedule: Mutex::new(Schedule { seed: None, watches_races: true, launches: 0 }),
            workers,
            stacks: Mutex::default(),
        };
        Self { shared: Arc::new(shared), modules: HashMap::new(), next_module: 0 }
    }

    /// Handles a request; `bytes` came with it.
    ///
    /// # Errors
    /// Errors of loading and launching, missing memory, and an unknown module.
    pub fn serve(&mut self, request: Request, bytes: &[u8]) -> Result<Answer> {
        match request {
            Request::Load { path, file } => return self.load(&path, &file),
            Request::Exports { module, kernel } => {
                return self.module(module)?.exports(&kernel).map(Answer::Exports);
            }
            Request::Launch { module, kernel, grid, block, shared_bytes } => {
                self.module(module)?.launch(&kernel, grid, block, shared_bytes, bytes)?;
            }
            Request::Map(placed) => self.shared.memory.adopt(placed)?,
            Request::Seal(placed) => self.shared.memory.protect(&placed)?,
            Request::Unmap(placed) => self.shared.memory.forget(&placed),
            Request::Unload { module } => drop(self.modules.remove(&module)),
            Request::Schedule { seed, watches_races } => {
                *self.shared.schedule.lock().unwrap_or_else(|e| e.into_inner()) =
                    Schedule { seed, watches_races, launches: 0 };
            }
        }
        Ok(Answer::Done)
    }

    fn load(&mut self, path: &Path, file: &str) -> Result<Answer> {
        let module = EmulatorModule::load(path, file, self.shared.clone())?;
        self.next_module += 1;
        self.modules.insert(self.next_module, module);
        Ok(Answer::Module(self.next_module))
    }

    fn module(&self, number: u64) -> Result<&EmulatorModule> {
        self.modules.get(&number).ok_or_else(|| {
            let reason = format!("module {number} was never loaded, or is gone");
            RuntimeError::system(
                "looking a module up",
                std::io::Error::new(std::io::ErrorKind::NotFound, reason),
            )
        })
    }
}
