//! The emulated device itself: memory, modules and launches of the process that it lives in.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::fault;
use super::memory::GuardedMemory;
use super::message::{Answer, Request};
use super::module::EmulatorModule;
use super::shared::{Schedule, Shared};
use crate::runtime::backend::Reservation;
use crate::runtime::error::{Result, RuntimeError};

/// What a worker process works on.
pub struct Host {
    shared: Arc<Shared>,
    modules: HashMap<u64, EmulatorModule>,
    next_module: u64,
}

impl Host {
    /// Without buffers and modules. `generation` tells workers of one device apart: each begins at addresses of its own.
    pub fn new(time_limit: Duration, generation: u64) -> Self {
        fault::install_handlers();
        let workers = std::thread::available_parallelism().map_or(1, usize::from);
        let shared = Shared {
            memory: GuardedMemory::from_generation(generation),
            time_limit,
            schedule: Mutex::new(Schedule { seed: None, launches: 0 }),
            workers,
            stacks: Mutex::default(),
        };
        Self { shared: Arc::new(shared), modules: HashMap::new(), next_module: 0 }
    }

    /// Does what is asked for; `bytes` came along, and those of a download are put there.
    ///
    /// # Errors
    /// Those of loading and launching, of memory that cannot be had, and of a module that is not there.
    pub fn serve(&mut self, request: Request, bytes: &mut Vec<u8>) -> Result<Answer> {
        match request {
            Request::Load { path, file } => return self.load(&path, &file),
            Request::Exports { module, kernel } => return self.module(module)?.exports(&kernel).map(Answer::Exports),
            Request::Launch { module, kernel, grid, block, shared_bytes } => {
                self.module(module)?.launch(&kernel, grid, block, shared_bytes, bytes)?;
            }
            Request::Allocate { name, bytes, touched: Some(touched), placement } => {
                return self.shared.memory.reserve(&name, bytes, &touched, placement).map(Answer::Memory);
            }
            Request::Allocate { name, bytes, touched: None, placement } => {
                let allocation = self.shared.memory.allocate(&name, bytes, placement)?;
                return Ok(Answer::Memory(Reservation { allocation, touched: Vec::new() }));
            }
            Request::Free(allocation) => self.shared.memory.free(&allocation),
            Request::Unload { module } => drop(self.modules.remove(&module)),
            Request::Schedule { seed } => {
                *self.shared.schedule.lock().unwrap_or_else(|e| e.into_inner()) = Schedule { seed, launches: 0 };
            }
            // SAFETY of the four below: the device asks for addresses within allocations that it has not given back, and
            // launches are over when they return, so no kernel runs meanwhile.
            Request::Fill { address, byte, bytes } => unsafe { std::ptr::write_bytes(address as *mut u8, byte, bytes) },
            Request::Upload { address } => unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len());
            },
            Request::Download { address, bytes: count } => {
                bytes.clear();
                bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(address as *const u8, count) });
            }
            Request::Copy { target, source, bytes } => unsafe {
                std::ptr::copy(source as *const u8, target as *mut u8, bytes);
            },
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
            RuntimeError::system("looking a module up", std::io::Error::new(std::io::ErrorKind::NotFound, reason))
        })
    }
}
