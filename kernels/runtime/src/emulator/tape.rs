//! Recorded work: what a thread enqueues while it records is kept, to run later.
//!
//! A launch of the emulator is complete when it returns, so a recording is the list of launches,
//! fills, copies and products, which a replay makes again.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, ThreadId};

use super::EmulatorBackend;
use super::worker::WorkerModule;
use crate::backend::{Backend, KernelExports, LoadedModule, Recorded, Recorder};
use crate::error::{Result, RuntimeError};
use crate::matrix::{MatrixLibrary, MatrixProduct};

/// One piece of recorded work.
pub(super) enum Work {
    Launch {
        module: Arc<WorkerModule>,
        kernel: String,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        params: Vec<u8>,
    },
    Fill {
        address: u64,
        byte: u8,
        bytes: usize,
    },
    Copy {
        target: u64,
        source: u64,
        bytes: usize,
    },
    Multiply(MatrixProduct),
}

/// What each thread that records has enqueued so far.
#[derive(Default)]
pub(super) struct Tapes {
    threads: Mutex<HashMap<ThreadId, Vec<Work>>>,
    /// How many threads record.
    count: AtomicUsize,
}

impl Tapes {
    fn threads(&self) -> MutexGuard<'_, HashMap<ThreadId, Vec<Work>>> {
        self.threads.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Keeps a piece of work if this thread records; returns whether it does.
    pub fn keep(&self, work: impl FnOnce() -> Work) -> bool {
        if self.count.load(Ordering::Acquire) == 0 {
            return false;
        }
        let mut threads = self.threads();
        let Some(tape) = threads.get_mut(&thread::current().id()) else { return false };
        tape.push(work());
        true
    }

    /// Rejects what no recording can have, if this thread records.
    pub fn refuse(&self, what: &str) -> Result<()> {
        let records = self.count.load(Ordering::Acquire) > 0
            && self.threads().contains_key(&thread::current().id());
        if !records {
            return Ok(());
        }
        let reason = io::Error::other(format!("{what} cannot be recorded"));
        Err(RuntimeError::system("recording work", reason))
    }
}

/// A thread that records, until this is dropped.
struct Recording<'t>(&'t Tapes);

impl<'t> Recording<'t> {
    fn start(tapes: &'t Tapes) -> Self {
        tapes.threads().insert(thread::current().id(), Vec::new());
        tapes.count.fetch_add(1, Ordering::Release);
        Self(tapes)
    }

    fn take(&self) -> Vec<Work> {
        self.0.threads().get_mut(&thread::current().id()).map(std::mem::take).unwrap_or_default()
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        self.0.threads().remove(&thread::current().id());
        self.0.count.fetch_sub(1, Ordering::Release);
    }
}

/// Recorded work of a device.
struct Tape<'e> {
    backend: &'e EmulatorBackend,
    works: Vec<Work>,
}

impl Recorded for Tape<'_> {
    fn launch(&self) -> Result<()> {
        self.works.iter().try_for_each(|work| match work {
            Work::Launch { module, kernel, grid, block, shared_bytes, params } => {
                module.launch(kernel, *grid, *block, *shared_bytes, params)
            }
            Work::Fill { address, byte, bytes } => self.backend.fill(*address, *byte, *bytes),
            Work::Copy { target, source, bytes } => self.backend.copy(*target, *source, *bytes),
            Work::Multiply(product) => self.backend.multiply(product).map(drop),
        })
    }
}

impl Recorder for EmulatorBackend {
    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Box<dyn Recorded + '_>> {
        self.tapes.refuse("a recording")?;
        let recording = Recording::start(&self.tapes);
        work()?;
        Ok(Box::new(Tape { backend: self, works: recording.take() }))
    }
}

/// A module whose launches are kept while their thread records.
pub(super) struct TapedModule {
    pub module: Arc<WorkerModule>,
    pub tapes: Arc<Tapes>,
}

impl LoadedModule for TapedModule {
    fn exports(&self, kernel: &str) -> Result<KernelExports> {
        self.module.exports(kernel)
    }

    fn launch(
        &self,
        kernel: &str,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        params: &[u8],
    ) -> Result<()> {
        let module = &self.module;
        let kept = self.tapes.keep(|| Work::Launch {
            module: module.clone(),
            kernel: kernel.to_owned(),
            grid,
            block,
            shared_bytes,
            params: params.to_vec(),
        });
        if kept { Ok(()) } else { module.launch(kernel, grid, block, shared_bytes, params) }
    }
}
