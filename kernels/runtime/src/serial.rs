//! Threads that share a device take turns: one call at a time, and a whole recording or measurement
//! at a time.
//!
//! A GPU's device has one stream. While one thread records what it enqueues there, work of another
//! thread would be recorded too, and a call that waits for the stream would end the recording with
//! an error. So a thread that records or measures holds the device until it is done, and others
//! wait. [`Serial`] does that for any backend that has one stream.

use std::ops::{Deref, Range};
use std::sync::Arc;
use std::time::Duration;

use super::backend::{
    Allocation, Backend, Environment, KernelExports, LoadedModule, Placement, Recorded, Recorder,
    Reservation,
};
use super::error::{Result, RuntimeError};
use super::matrix::{MatrixLibrary, MatrixProduct};
use super::source::SourceTree;
use super::tensor_map::{MapWords, TensorMap};
use super::turns::{Turn, Turns};

/// A backend whose threads take turns.
pub(super) struct Serial {
    backend: Box<dyn Backend>,
    turns: Arc<Turns>,
}

impl Serial {
    /// This backend, for any number of threads.
    pub fn new(backend: Box<dyn Backend>) -> Self {
        Self { backend, turns: Arc::default() }
    }
}

/// An object of the device that is also dropped in a turn: the drop waits for the device.
struct InTurns<T> {
    value: Option<T>,
    turns: Arc<Turns>,
}

impl<T> InTurns<T> {
    fn new(value: T, turns: &Arc<Turns>) -> Self {
        Self { value: Some(value), turns: turns.clone() }
    }
}

impl<T> Deref for InTurns<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("nothing but the drop takes it")
    }
}

impl<T> Drop for InTurns<T> {
    fn drop(&mut self) {
        let _turn = self.turns.take();
        drop(self.value.take());
    }
}

impl LoadedModule for InTurns<Box<dyn LoadedModule>> {
    fn exports(&self, kernel: &str) -> Result<KernelExports> {
        let _turn = self.turns.take();
        (**self).exports(kernel)
    }

    fn launch(
        &self,
        kernel: &str,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        params: &[u8],
    ) -> Result<()> {
        let _turn = self.turns.take();
        (**self).launch(kernel, grid, block, shared_bytes, params)
    }
}

impl Recorded for InTurns<Box<dyn Recorded + '_>> {
    fn launch(&self) -> Result<()> {
        let _turn = self.turns.take();
        (**self).launch()
    }
}

impl Backend for Serial {
    fn environment(&self) -> &Environment {
        self.backend.environment()
    }

    fn runs(&self) -> bool {
        self.backend.runs()
    }

    fn turn(&self) -> Option<Turn<'_>> {
        Some(self.turns.take())
    }

    fn load(
        &self,
        tree: &SourceTree,
        file: &str,
        defines: &[(String, String)],
    ) -> Result<Box<dyn LoadedModule>> {
        let _turn = self.turns.take();
        Ok(Box::new(InTurns::new(self.backend.load(tree, file, defines)?, &self.turns)))
    }

    fn assembly(
        &self,
        tree: &SourceTree,
        file: &str,
        defines: &[(String, String)],
    ) -> Result<Option<Vec<u8>>> {
        let _turn = self.turns.take();
        self.backend.assembly(tree, file, defines)
    }

    fn allocate(&self, name: &str, bytes: usize, placement: Placement) -> Result<Allocation> {
        let _turn = self.turns.take();
        self.backend.allocate(name, bytes, placement)
    }

    fn seal(&self, allocation: &Allocation) -> Result<()> {
        let _turn = self.turns.take();
        self.backend.seal(allocation)
    }

    fn reserve(
        &self,
        name: &str,
        bytes: usize,
        touched: &[Range<i64>],
        placement: Placement,
    ) -> Result<Reservation> {
        let _turn = self.turns.take();
        self.backend.reserve(name, bytes, touched, placement)
    }

    fn free(&self, allocation: &Allocation) {
        let _turn = self.turns.take();
        self.backend.free(allocation);
    }

    fn fill(&self, address: u64, byte: u8, bytes: usize) -> Result<()> {
        let _turn = self.turns.take();
        self.backend.fill(address, byte, bytes)
    }

    fn upload(&self, address: u64, source: &[u8]) -> Result<()> {
        let _turn = self.turns.take();
        self.backend.upload(address, source)
    }

    fn download(&self, address: u64, target: &mut [u8]) -> Result<()> {
        let _turn = self.turns.take();
        self.backend.download(address, target)
    }

    fn copy(&self, target: u64, source: u64, bytes: usize) -> Result<()> {
        let _turn = self.turns.take();
        self.backend.copy(target, source, bytes)
    }

    fn synchronize(&self) -> Result<()> {
        let _turn = self.turns.take();
        self.backend.synchronize()
    }

    fn set_schedule_seed(&self, seed: Option<u64>) {
        let _turn = self.turns.take();
        self.backend.set_schedule_seed(seed);
    }

    fn schedule_seed(&self) -> Option<u64> {
        let _turn = self.turns.take();
        self.backend.schedule_seed()
    }

    fn watch_races(&self, watch: bool) {
        let _turn = self.turns.take();
        self.backend.watch_races(watch);
    }

    /// The time includes no work of other threads.
    fn time(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
        let _turn = self.turns.take();
        self.backend.time(work)
    }

    fn time_recorded(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
        let _turn = self.turns.take();
        self.backend.time_recorded(work)
    }

    fn recorder(&self) -> Option<&dyn Recorder> {
        self.backend.recorder().is_some().then_some(self)
    }

    fn matrix_library(&self) -> Option<&dyn MatrixLibrary> {
        let _turn = self.turns.take();
        self.backend.matrix_library().is_some().then_some(self)
    }

    fn tensor_map(&self, map: &TensorMap) -> Result<MapWords> {
        let _turn = self.turns.take();
        self.backend.tensor_map(map)
    }
}

impl MatrixLibrary for Serial {
    fn multiply(&self, product: &MatrixProduct) -> Result<bool> {
        let _turn = self.turns.take();
        // The library of a backend stays available once it was found.
        self.backend.matrix_library().map_or(Ok(false), |library| library.multiply(product))
    }
}

impl Recorder for Serial {
    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Box<dyn Recorded + '_>> {
        let _turn = self.turns.take();
        let none = || {
            RuntimeError::system(
                "recording work",
                std::io::Error::other("the device records nothing"),
            )
        };
        let recorder = self.backend.recorder().ok_or_else(none)?;
        Ok(Box::new(InTurns::new(recorder.record(work)?, &self.turns)))
    }
}

#[cfg(test)]
mod tests;
