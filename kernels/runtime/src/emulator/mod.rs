//! The emulator: the same kernel source, on the host.
//!
//! From a kernel source to an error that names kernel, block and thread:
//!
//! - `compiler`: the host's C++ compiler builds a `.cu` file with `kernels/runtime/emulator/*.h`
//!   into a shared library.
//! - [`coverage`]: which lines of the kernels ran, where a device counts them.
//! - `pads`: bytes between static shared arrays that show writes beyond an array.
//! - `module`: loads the library. A launch spreads its blocks over the cores, and `watchdog` ends
//!   it when it takes too long.
//! - [`schedule`]: runs the blocks of one cluster, usually one block, each CUDA thread as a
//!   coroutine. `order` chooses the next thread and `cluster` the next block. `work` performs
//!   asynchronous work at a time that the rules allow.
//! - `host_api`: the functions that a thread calls to wait for others or to issue asynchronous
//!   work.
//! - `block`: the state of a block (`meeting` and `cluster_barrier` are where its threads wait). `copies`, `mbarrier`, `async_proxy`, `bulk` and `wgmma` each
//!   hold a part of it: asynchronous copies, and the Hopper features of `ptx/hopper.h`.
//! - `race`: races between threads: vector clocks, and the last accesses of each word.
//! - `accesses`: which blocks accessed which bytes of global memory, to find conflicts without an
//!   order.
//! - [`memory`]: buffers between guard pages; [`fault`]: signals and bad accesses.
//! - `source_lines`: source lines of a module's code, for the report of a race.
//! - `tape`: work that is recorded before it runs.
//! - `worker`: kernels run in a separate process ([`super::worker`]). A device starts it, sends
//!   requests (`message`) and replaces it when a kernel ends it. `serve` is the worker's side,
//!   `host` its state, `progress` its current position.
//!
//! No modules import each other in a circle; a test holds that for the whole runtime. `gemm` stands
//! for a library of matrix products.

mod accesses;
mod async_proxy;
pub mod block;
mod bulk;
mod cluster;
mod cluster_barrier;
mod compiler;
mod copies;
pub mod coverage;
pub mod dim3;
pub mod fault;
mod gemm;
mod host;
mod host_api;
mod mbarrier;
mod meeting;
pub mod memory;
mod message;
mod module;
mod order;
mod pads;
mod progress;
mod race;
pub mod schedule;
pub(super) mod serve;
mod shared;
mod source_lines;
mod tape;
mod watchdog;
mod wgmma;
mod work;
mod worker;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::compiler::Compiler;
pub use self::compiler::usual_compiler;
use self::shared::SHARED_BYTES_PER_BLOCK;
use self::tape::{TapedModule, Tapes, Work};
use self::worker::{Limits, Worker, WorkerModule};
use super::backend::{
    Allocation, Backend, BackendKind, Environment, LoadedModule, Placement, Recorder, Reservation,
};
use super::cache::ModuleCache;
use super::error::Result;
use super::matrix::{MatrixLibrary, MatrixProduct};
use super::source::SourceTree;

/// SMs by which launchers size their grids by default, on any host. The number is small, so that in a small
/// case a block processes several work tiles, and a case tests the same on every machine.
pub const SMS: u32 = 5;

/// The schedule of launches, their time limit, and their memory limit.
#[derive(Clone, Debug)]
pub struct EmulatorOptions {
    /// Seed of a random, reproducible schedule; `None` for the deterministic one.
    pub schedule_seed: Option<u64>,
    /// A launch that takes longer fails; time for which its threads wait for a core is not counted.
    pub time_limit: Duration,
    /// The C++ compiler; `None` for `PARITY_CXX`, or `c++`.
    pub compiler: Option<PathBuf>,
    /// A module that takes longer to compile fails.
    pub compile_limit: Duration,
    /// SMs by which launchers size their grids, at least 1.
    pub sms: u32,
    /// Bytes that the kernels' process may use for data: buffers, stacks, and allocations of a
    /// kernel. By default all memory of the machine.
    pub memory: u64,
    /// Folder for the counts of [`coverage`]; `None` counts nothing.
    pub coverage: Option<PathBuf>,
}

impl Default for EmulatorOptions {
    fn default() -> Self {
        Self {
            schedule_seed: None,
            time_limit: Duration::from_secs(120),
            compiler: None,
            compile_limit: Duration::from_secs(600),
            sms: SMS,
            memory: memory::of_machine(),
            coverage: None,
        }
    }
}

/// Device that runs kernels on the host's cores, in a separate process.
pub struct EmulatorBackend {
    environment: Environment,
    compiler: Compiler,
    worker: Arc<Worker>,
    tapes: Arc<Tapes>,
}

impl EmulatorBackend {
    /// A device that compiles with `PARITY_CXX`, or `c++`.
    ///
    /// # Errors
    /// [`RuntimeError::BackendMissing`](super::RuntimeError::BackendMissing) when there is no C++
    /// compiler.
    pub fn new(cache: ModuleCache, options: EmulatorOptions) -> Result<Self> {
        let compiler = Compiler::new(
            cache,
            options.compiler,
            options.compile_limit,
            options.coverage.as_deref(),
        )?;
        let environment = Environment {
            backend: BackendKind::Emulator,
            device: processor_name(),
            driver: format!("{} {}", std::env::consts::OS, kernel_release()),
            compiler: compiler.version.clone(),
            target: std::env::consts::ARCH.to_owned(),
            processors: options.sms.max(1),
            shared_bytes_per_block: SHARED_BYTES_PER_BLOCK,
        };
        let limits = Limits { time: options.time_limit, memory: options.memory };
        let worker = Worker::new(limits, options.coverage)?;
        worker.set_schedule_seed(options.schedule_seed);
        Ok(Self { environment, compiler, worker, tapes: Arc::default() })
    }
}

fn processor_name() -> String {
    std::fs::read_to_string("/proc/cpuinfo")
        .ok()
        .and_then(|text| {
            let line = text.lines().find(|line| line.starts_with("model name"))?;
            Some(line.split(':').nth(1)?.trim().to_owned())
        })
        .unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

fn kernel_release() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease")
        .map_or_else(|_| String::new(), |text| text.trim().to_owned())
}

impl Backend for EmulatorBackend {
    fn environment(&self) -> &Environment {
        &self.environment
    }

    fn load(
        &self,
        tree: &SourceTree,
        file: &str,
        defines: &[(String, String)],
    ) -> Result<Box<dyn LoadedModule>> {
        let path = self.compiler.build(tree, file, defines)?;
        let module = Arc::new(WorkerModule::load(&self.worker, &path, file)?);
        Ok(Box::new(TapedModule { module, tapes: self.tapes.clone() }))
    }

    fn assembly(
        &self,
        tree: &SourceTree,
        file: &str,
        defines: &[(String, String)],
    ) -> Result<Option<Vec<u8>>> {
        self.compiler.assembly(tree, file, defines).map(Some)
    }

    fn allocate(&self, name: &str, bytes: usize, placement: Placement) -> Result<Allocation> {
        self.worker.place(|memory| memory.allocate(name, bytes, placement), |made| *made)
    }

    fn seal(&self, allocation: &Allocation) -> Result<()> {
        self.worker.seal(allocation);
        Ok(())
    }

    fn reserve(
        &self,
        name: &str,
        bytes: usize,
        touched: &[Range<i64>],
        placement: Placement,
    ) -> Result<Reservation> {
        self.worker
            .place(|memory| memory.reserve(name, bytes, touched, placement), |made| made.allocation)
    }

    fn free(&self, allocation: &Allocation) {
        self.worker.free(allocation);
    }

    // SAFETY of the four below: addresses come from `allocate`, whose memory the caller keeps
    // alive, and launches are over when they return, so no kernel runs meanwhile.
    fn fill(&self, address: u64, byte: u8, bytes: usize) -> Result<()> {
        if self.tapes.keep(|| Work::Fill { address, byte, bytes }) {
            return Ok(());
        }
        unsafe { std::ptr::write_bytes(address as *mut u8, byte, bytes) };
        Ok(())
    }

    fn upload(&self, address: u64, source: &[u8]) -> Result<()> {
        self.tapes.refuse("an upload")?;
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), address as *mut u8, source.len()) };
        Ok(())
    }

    fn download(&self, address: u64, target: &mut [u8]) -> Result<()> {
        self.tapes.refuse("a download")?;
        unsafe {
            std::ptr::copy_nonoverlapping(address as *const u8, target.as_mut_ptr(), target.len())
        };
        Ok(())
    }

    fn copy(&self, target: u64, source: u64, bytes: usize) -> Result<()> {
        if self.tapes.keep(|| Work::Copy { target, source, bytes }) {
            return Ok(());
        }
        unsafe { std::ptr::copy(source as *const u8, target as *mut u8, bytes) };
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        self.tapes.refuse("waiting for the device")
    }

    fn set_schedule_seed(&self, seed: Option<u64>) {
        self.worker.set_schedule_seed(seed);
    }

    fn schedule_seed(&self) -> Option<u64> {
        self.worker.schedule_seed()
    }

    fn watch_races(&self, watch: bool) {
        self.worker.watch_races(watch);
    }

    fn time(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
        let start = Instant::now();
        work()?;
        Ok(start.elapsed())
    }

    fn recorder(&self) -> Option<&dyn Recorder> {
        Some(self)
    }

    fn matrix_library(&self) -> Option<&dyn MatrixLibrary> {
        Some(self)
    }
}

/// A GEMM on the host in place of a library's.
impl MatrixLibrary for EmulatorBackend {
    fn multiply(&self, product: &MatrixProduct) -> Result<bool> {
        if self.tapes.keep(|| Work::Multiply(*product)) {
            return Ok(true);
        }
        gemm::multiply(self, product).map(|()| true)
    }
}
