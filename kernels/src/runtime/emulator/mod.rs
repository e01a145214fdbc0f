//! The emulator: the same kernel source, on the host.
//!
//! The host's C++ compiler builds a `.cu` file with `kernels/emulator/*.h` into a shared library.
//! Each CUDA thread is a coroutine, blocks are spread over the cores ([`schedule`]), buffers lie
//! between guard pages ([`memory`]), Hopper's asynchronous machinery is that of `include/hopper.h`
//! (`mbarrier`, `async_proxy`, `bulk`, `wgmma`), and an access outside of them or a kernel that never ends
//! becomes an error that names kernel, block and thread ([`fault`]).

mod async_proxy;
mod bulk;
pub mod fault;
mod mbarrier;
pub mod memory;
pub mod schedule;
mod wgmma;

use std::ffi::c_void;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use corosensei::stack::DefaultStack;
use libloading::os::unix::Library;

use self::memory::GuardedMemory;
use self::schedule::{Block, BlockFault, BlockLaunch, Dim3, HOST_API, HostApi, STOPPED, TIME_LIMIT, ThreadContext};
use super::backend::{
    Allocation, Backend, BackendKind, Environment, KernelExports, LoadedModule, Placement, Reservation,
};
use super::cache::ModuleCache;
use super::error::{Result, RuntimeError};
use super::source::{SourceTree, emulator_headers};

/// Dynamic shared memory of a block: what an H100 or H200 offers.
const SHARED_BYTES_PER_BLOCK: u64 = 227 * 1024;
/// Multiprocessors that launchers size their grids by, whatever the host: few, so that in a small case a block has a
/// second turn, and what a case exercises is the same on every machine.
const MULTIPROCESSORS: u32 = 5;
/// CUDA's limit of threads in a block.
const THREADS_PER_BLOCK: u64 = 1024;
/// Byte that fills shared memory before a block starts: NaN in every floating-point type.
const SHARED_POISON: u8 = 0xff;

/// Options for g++ and clang++ alike. No contraction: an fma happens where the source says so. Kernels run as fast from -O1
/// as from -O2 (switching between coroutines takes most of the time), and compile in two thirds of the time.
const COMPILE_OPTIONS: &[&str] = &[
    "-std=c++20",
    "-O1",
    "-g1",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-DPARITY_EMULATOR",
    "-DPARITY_SM=90",
];

/// What ends a launch beside a wild address: an index outside an array whose size the compiler knows (a GPU reads or
/// spoils the neighbour in silence), and a shift by more bits than there are.
const CHECKS_OF_GCC: &[&str] = &["-fsanitize=bounds-strict,shift-exponent", "-fsanitize-undefined-trap-on-error"];
const CHECKS_OF_CLANG: &[&str] = &["-fsanitize=bounds,shift-exponent", "-fsanitize-trap=bounds,shift-exponent"];

/// All options for a compiler that calls itself so.
fn compile_options(compiler: &str) -> impl Iterator<Item = &'static str> + use<> {
    let checks = if compiler.contains("clang") { CHECKS_OF_CLANG } else { CHECKS_OF_GCC };
    COMPILE_OPTIONS.iter().chain(checks).copied()
}

/// How launches are scheduled and how long they may take.
#[derive(Clone, Debug)]
pub struct EmulatorOptions {
    /// Seed of a random, reproducible schedule; `None` for the deterministic one.
    pub schedule_seed: Option<u64>,
    /// A launch that takes longer ends with an error.
    pub time_limit: Duration,
}

impl Default for EmulatorOptions {
    fn default() -> Self {
        Self { schedule_seed: None, time_limit: Duration::from_secs(120) }
    }
}

/// Device that runs kernels on the host's cores.
pub struct EmulatorBackend {
    environment: Environment,
    compiler: PathBuf,
    cache: ModuleCache,
    shared: Arc<Shared>,
}

/// What modules share with the device that loaded them.
struct Shared {
    memory: GuardedMemory,
    time_limit: Duration,
    schedule: Mutex<Schedule>,
    workers: usize,
    stacks: Mutex<Vec<DefaultStack>>,
}

/// The schedule of the launches to come.
struct Schedule {
    seed: Option<u64>,
    /// Launches since the seed was set: each has a schedule of its own.
    launches: u64,
}

impl EmulatorBackend {
    /// A device that compiles with `PARITY_CXX`, or `c++`.
    ///
    /// # Errors
    /// [`RuntimeError::BackendMissing`] when there is no C++ compiler.
    pub fn new(cache: ModuleCache, options: EmulatorOptions) -> Result<Self> {
        let compiler = PathBuf::from(std::env::var_os("PARITY_CXX").unwrap_or_else(|| "c++".into()));
        let version = compiler_version(&compiler)?;
        fault::install_handlers();
        let workers = std::thread::available_parallelism().map_or(1, usize::from);
        let environment = Environment {
            backend: BackendKind::Emulator,
            device: processor_name(),
            driver: format!("{} {}", std::env::consts::OS, kernel_release()),
            compiler: version,
            target: std::env::consts::ARCH.to_owned(),
            processors: MULTIPROCESSORS,
            shared_bytes_per_block: SHARED_BYTES_PER_BLOCK,
        };
        let shared = Shared {
            memory: GuardedMemory::default(),
            time_limit: options.time_limit,
            schedule: Mutex::new(Schedule { seed: options.schedule_seed, launches: 0 }),
            workers,
            stacks: Mutex::default(),
        };
        Ok(Self { environment, compiler, cache, shared: Arc::new(shared) })
    }

    fn build(&self, tree: &SourceTree, file: &str, defines: &[(String, String)]) -> Result<PathBuf> {
        let headers = emulator_headers();
        let compiler = &self.environment.compiler;
        let identity = format!("{compiler} {}", compile_options(compiler).collect::<Vec<_>>().join(" "));
        let extra = headers.iter().map(|(name, text)| (name.as_str(), text.as_str()));
        let key = ModuleCache::key(tree, file, defines, extra, &identity)?;
        if let Some(path) = self.cache.find(&key, "so") {
            return Ok(path);
        }
        let scratch = tempfile::tempdir().map_err(|e| RuntimeError::system("making a scratch directory", e))?;
        let write = |name: &str, text: &str| {
            std::fs::write(scratch.path().join(name), text)
                .map_err(|e| RuntimeError::system(format!("writing {name} for the compiler"), e))
        };
        for (name, text) in tree.headers() {
            write(name, text)?;
        }
        for (name, text) in &headers {
            write(name, text)?;
        }
        write(file, tree.text(file)?)?;
        let library = self.run_compiler(scratch.path(), file, defines)?;
        let bytes = std::fs::read(&library).map_err(|e| RuntimeError::system("reading the compiled module", e))?;
        self.cache.store(&key, "so", &bytes)
    }

    fn run_compiler(&self, scratch: &Path, file: &str, defines: &[(String, String)]) -> Result<PathBuf> {
        let library = scratch.join("module.so");
        let output = Command::new(&self.compiler)
            .args(compile_options(&self.environment.compiler))
            .args(defines.iter().map(|(name, value)| format!("-D{name}={value}")))
            .arg("-I.")
            .args(["-x", "c++"])
            .arg(file)
            .arg("-o")
            .arg(&library)
            .current_dir(scratch)
            .output()
            .map_err(|e| RuntimeError::system(format!("running {}", self.compiler.display()), e))?;
        if output.status.success() {
            return Ok(library);
        }
        Err(RuntimeError::Compile {
            compiler: self.environment.compiler.clone(),
            file: file.to_owned(),
            defines: defines.iter().map(|(name, value)| format!(" -D{name}={value}")).collect(),
            log: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        })
    }
}

/// First line of `c++ --version`.
fn compiler_version(compiler: &Path) -> Result<String> {
    let missing = |why: String| RuntimeError::BackendMissing {
        backend: "emulator",
        reason: format!(
            "it needs a C++20 compiler; `{}` {why}. Install g++ or clang++, or set PARITY_CXX",
            compiler.display()
        ),
    };
    let output =
        Command::new(compiler).arg("--version").output().map_err(|e| missing(format!("could not be run ({e})")))?;
    if !output.status.success() {
        return Err(missing(format!("answered {} to --version", output.status)));
    }
    Ok(String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or("unknown").trim().to_owned())
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
    std::fs::read_to_string("/proc/sys/kernel/osrelease").map_or_else(|_| String::new(), |text| text.trim().to_owned())
}

impl Backend for EmulatorBackend {
    fn environment(&self) -> &Environment {
        &self.environment
    }

    fn load(&self, tree: &SourceTree, file: &str, defines: &[(String, String)]) -> Result<Box<dyn LoadedModule>> {
        let path = self.build(tree, file, defines)?;
        Ok(Box::new(EmulatorModule::load(&path, file, self.shared.clone())?))
    }

    fn allocate(&self, name: &str, bytes: usize, placement: Placement) -> Result<Allocation> {
        self.shared.memory.allocate(name, bytes, placement)
    }

    fn reserve(&self, name: &str, bytes: usize, touched: &[Range<i64>], placement: Placement) -> Result<Reservation> {
        self.shared.memory.reserve(name, bytes, touched, placement)
    }

    fn free(&self, allocation: &Allocation) {
        self.shared.memory.free(allocation);
    }

    // SAFETY of the four below: addresses come from `allocate`, whose memory the caller keeps alive,
    // and launches are over when they return, so no kernel runs meanwhile.
    fn fill(&self, address: u64, byte: u8, bytes: usize) -> Result<()> {
        unsafe { std::ptr::write_bytes(address as *mut u8, byte, bytes) };
        Ok(())
    }

    fn upload(&self, address: u64, source: &[u8]) -> Result<()> {
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), address as *mut u8, source.len()) };
        Ok(())
    }

    fn download(&self, address: u64, target: &mut [u8]) -> Result<()> {
        unsafe { std::ptr::copy_nonoverlapping(address as *const u8, target.as_mut_ptr(), target.len()) };
        Ok(())
    }

    fn copy(&self, target: u64, source: u64, bytes: usize) -> Result<()> {
        unsafe { std::ptr::copy(source as *const u8, target as *mut u8, bytes) };
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    fn set_schedule_seed(&self, seed: Option<u64>) {
        *self.shared.schedule.lock().unwrap_or_else(|e| e.into_inner()) = Schedule { seed, launches: 0 };
    }

    fn time(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
        let start = Instant::now();
        work()?;
        Ok(start.elapsed())
    }
}

type Enter = unsafe extern "C" fn(*mut ThreadContext);
type PoisonStaticShared = unsafe extern "C" fn(u8);
type Entry = unsafe extern "C" fn(*const c_void);

struct EmulatorModule {
    file: String,
    library: Library,
    enter: Enter,
    poison_static_shared: PoisonStaticShared,
    code: (usize, usize),
    shared: Arc<Shared>,
}

impl EmulatorModule {
    fn load(path: &Path, file: &str, shared: Arc<Shared>) -> Result<Self> {
        // SAFETY: the library was built from a kernel source by this runtime; it has no initialisers
        // beyond those of plain variables.
        let library = unsafe { Library::new(path) }.map_err(|e| {
            RuntimeError::system(format!("loading {}", path.display()), std::io::Error::other(e.to_string()))
        })?;
        // SAFETY: the three functions are defined by emulator.h with these signatures.
        let (attach, enter, poison_static_shared) = unsafe {
            (
                *symbol::<unsafe extern "C" fn(*const HostApi)>(&library, file, "emulator_attach")?,
                *symbol::<Enter>(&library, file, "emulator_enter")?,
                *symbol::<PoisonStaticShared>(&library, file, "emulator_poison_static_shared")?,
            )
        };
        // SAFETY: HOST_API is static and has the layout that emulator.h declares.
        unsafe { attach(&HOST_API) };
        let code = code_range(enter as usize);
        Ok(Self { file: file.to_owned(), library, enter, poison_static_shared, code, shared })
    }

    fn run_blocks(&self, launch: &BlockLaunch<'_>, shared_bytes: usize) -> std::result::Result<(), BlockFault> {
        let total = launch.grid.count();
        let next = AtomicU64::new(0);
        let first_fault: Mutex<Option<(u64, BlockFault)>> = Mutex::new(None);
        let workers = self.shared.workers.min(total as usize).max(1);
        let watchdog = Watchdog::new(workers);
        std::thread::scope(|scope| {
            let handles: Vec<_> = (0..workers)
                .map(|_| {
                    scope.spawn(|| {
                        let _counted = watchdog.enter();
                        self.work(launch, shared_bytes, &next, &first_fault);
                    })
                })
                .collect();
            watchdog.watch(self.shared.time_limit, launch.cancelled);
            // Neither joined nor detached before this point, so the watchdog's thread ids were valid.
            drop(handles);
        });
        match first_fault.into_inner().unwrap_or_else(|e| e.into_inner()) {
            // Nothing else went wrong, so it was the watchdog that stopped the launch.
            Some((_, fault)) if fault.what == STOPPED => Err(BlockFault { what: TIME_LIMIT.into(), ..fault }),
            Some((_, fault)) => Err(fault),
            None => Ok(()),
        }
    }

    /// One worker: takes block after block until none is left or one failed.
    fn work(
        &self,
        launch: &BlockLaunch<'_>,
        shared_bytes: usize,
        next: &AtomicU64,
        first_fault: &Mutex<Option<(u64, BlockFault)>>,
    ) {
        let memory = &self.shared.memory;
        // Its end touches a guard page; where it begins matters to nobody, since swizzles and descriptors go by offsets.
        let dynamic = memory.allocate("dynamic shared memory", shared_bytes, Placement::FlushBack);
        let Ok(dynamic) = dynamic else {
            launch.cancelled.store(true, Ordering::Relaxed);
            return;
        };
        let mut stacks = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= launch.grid.count() || launch.cancelled.load(Ordering::Relaxed) {
                break;
            }
            self.refill(&mut stacks, launch.block.count() as usize);
            // SAFETY: the allocation is this worker's own; poisoning TLS touches only this thread's.
            unsafe {
                std::ptr::write_bytes(dynamic.address as *mut u8, SHARED_POISON, dynamic.bytes);
                (self.poison_static_shared)(SHARED_POISON);
            }
            let block = launch.grid.unflatten(index);
            let ran = Block::run(launch, block, (dynamic.address as *mut u8, shared_bytes), &mut stacks);
            if let Err(mut fault) = ran {
                launch.cancelled.store(true, Ordering::Relaxed);
                // Here, because the shared memory is among the buffers for as long as this worker has it.
                if let Some(address) = fault.address {
                    fault.what = memory.describe(address);
                }
                let mut slot = first_fault.lock().unwrap_or_else(|e| e.into_inner());
                // The fault of the lowest block, and never the mere stop of another one.
                if slot.as_ref().is_none_or(|(first, _)| index < *first) && (fault.what != STOPPED || slot.is_none()) {
                    *slot = Some((index, fault));
                }
            }
        }
        memory.free(&dynamic);
        self.shared.stacks.lock().unwrap_or_else(|e| e.into_inner()).append(&mut stacks);
    }

    /// Takes as many pooled stacks as a block has threads; the block maps those still missing.
    fn refill(&self, stacks: &mut Vec<DefaultStack>, threads: usize) {
        if stacks.len() < threads {
            let mut pool = self.shared.stacks.lock().unwrap_or_else(|e| e.into_inner());
            let keep = pool.len() - pool.len().min(threads - stacks.len());
            stacks.extend(pool.drain(keep..));
        }
    }

    fn check_launch(&self, kernel: &str, grid: [u32; 3], block: [u32; 3], shared_bytes: u32) -> Result<()> {
        let refuse = |reason: String| Err(RuntimeError::Launch { kernel: kernel.to_owned(), reason });
        let threads = Dim3::new(block).count();
        let max_threads = u64::from(self.exports(kernel)?.max_threads).min(THREADS_PER_BLOCK);
        if threads == 0 || threads > max_threads {
            return refuse(format!("block {block:?} has {threads} threads; 1 to {max_threads} are allowed"));
        }
        if grid[0] == 0 || grid[0] > i32::MAX as u32 || grid[1..].iter().any(|&extent| extent == 0 || extent > 65535) {
            return refuse(format!("grid {grid:?}: x is 1 to 2147483647, y and z are 1 to 65535"));
        }
        if u64::from(shared_bytes) > SHARED_BYTES_PER_BLOCK {
            return refuse(format!(
                "{shared_bytes} bytes of dynamic shared memory; a block has {SHARED_BYTES_PER_BLOCK}"
            ));
        }
        Ok(())
    }
}

/// Looks a symbol up.
///
/// # Safety
/// `T` must be the symbol's type.
unsafe fn symbol<'a, T>(library: &'a Library, file: &str, name: &str) -> Result<libloading::os::unix::Symbol<T>>
where
    T: 'a,
{
    // SAFETY: the caller vouches for the type.
    unsafe { library.get(name.as_bytes()) }
        .map_err(|_| RuntimeError::SymbolMissing { file: file.to_owned(), symbol: name.to_owned() })
}

/// The executable mapping that holds `address`.
fn code_range(address: usize) -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines()
        .filter_map(|line| {
            let (start, rest) = line.split_once('-')?;
            let end = rest.split(' ').next()?;
            Some((usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?))
        })
        .find(|range| (range.0..range.1).contains(&address))
        .unwrap_or((0, 0))
}

impl LoadedModule for EmulatorModule {
    fn exports(&self, kernel: &str) -> Result<KernelExports> {
        // SAFETY: KERNEL and SHARED_MEMORY define these symbols with these types.
        let layout = unsafe { **symbol::<*const [u64; 3]>(&self.library, &self.file, &format!("{kernel}_layout"))? };
        let shared = unsafe {
            symbol::<*const [u64; 1]>(&self.library, &self.file, &format!("{kernel}_shared_bytes")).map(|s| (**s)[0])
        };
        Ok(KernelExports {
            params_size: layout[0],
            params_hash: layout[1],
            max_threads: layout[2] as u32,
            shared_bytes: shared.ok(),
        })
    }

    fn launch(&self, kernel: &str, grid: [u32; 3], block: [u32; 3], shared_bytes: u32, params: &[u8]) -> Result<()> {
        self.check_launch(kernel, grid, block, shared_bytes)?;
        // SAFETY: KERNEL defines `<kernel>_entry` with this type.
        let entry = unsafe { *symbol::<Entry>(&self.library, &self.file, &format!("{kernel}_entry"))? };
        let aligned = aligned_copy(params);
        let cancelled = AtomicBool::new(false);
        let schedule_seed = {
            let mut schedule = self.shared.schedule.lock().unwrap_or_else(|e| e.into_inner());
            schedule.launches += 1;
            schedule.seed.map(|seed| seed ^ schedule.launches.wrapping_mul(0xd1b5_4a32_d192_ed03))
        };
        let launch = BlockLaunch {
            entry,
            enter: self.enter,
            poison_static_shared: self.poison_static_shared,
            code: self.code,
            grid: Dim3::new(grid),
            block: Dim3::new(block),
            params: &aligned,
            schedule_seed,
            cancelled: &cancelled,
        };
        self.run_blocks(&launch, shared_bytes as usize).map_err(|fault| RuntimeError::Fault {
            kernel: kernel.to_owned(),
            block: fault.block.to_string(),
            thread: fault.thread.to_string(),
            what: fault.what,
        })
    }
}

fn aligned_copy(params: &[u8]) -> Vec<u128> {
    let mut aligned = vec![0u128; params.len().div_ceil(16)];
    for (word, chunk) in aligned.iter_mut().zip(params.chunks(16)) {
        let mut bytes = [0; 16];
        bytes[..chunk.len()].copy_from_slice(chunk);
        *word = u128::from_ne_bytes(bytes);
    }
    aligned
}

/// Waits for the workers of a launch, and interrupts them when it takes too long.
struct Watchdog {
    running: Mutex<usize>,
    workers: Mutex<Vec<libc::pthread_t>>,
    changed: Condvar,
}

/// Counts a worker as ended when dropped, also when it panics.
struct CountAtEnd<'a>(&'a Watchdog);

impl Drop for CountAtEnd<'_> {
    fn drop(&mut self) {
        *self.0.running.lock().unwrap_or_else(|e| e.into_inner()) -= 1;
        self.0.changed.notify_all();
    }
}

impl Watchdog {
    fn new(workers: usize) -> Self {
        Self { running: Mutex::new(workers), workers: Mutex::default(), changed: Condvar::new() }
    }

    /// Registers the calling worker until the guard is dropped.
    fn enter(&self) -> CountAtEnd<'_> {
        // SAFETY: pthread_self has no preconditions.
        self.workers.lock().unwrap_or_else(|e| e.into_inner()).push(unsafe { libc::pthread_self() });
        CountAtEnd(self)
    }

    /// Returns once every worker has ended. Nobody may join them before that.
    fn watch(&self, limit: Duration, cancelled: &AtomicBool) {
        let mut running = self.running.lock().unwrap_or_else(|e| e.into_inner());
        let (mut wait, mut signalled) = (limit, false);
        while *running > 0 {
            let waited = self.changed.wait_timeout_while(running, wait, |running| *running > 0);
            let (guard, timeout) = waited.unwrap_or_else(|e| e.into_inner());
            running = guard;
            if *running > 0 && timeout.timed_out() {
                // The signal first, so that the endless thread is the one that is named; the flag
                // then stops workers that are between two coroutines.
                for &worker in self.workers.lock().unwrap_or_else(|e| e.into_inner()).iter() {
                    // SAFETY: the caller keeps every worker joinable until this function returns.
                    unsafe { libc::pthread_kill(worker, fault::INTERRUPT) };
                }
                if signalled {
                    cancelled.store(true, Ordering::Relaxed);
                }
                (signalled, wait) = (true, Duration::from_millis(20));
            }
        }
    }
}
