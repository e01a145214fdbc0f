//! A loaded module, and its launches: blocks spread over the cores.

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use corosensei::stack::DefaultStack;
use libloading::os::unix::Library;

use super::accesses::Accesses;
use super::block::{BlockFault, ThreadContext};
use super::cluster::MOST_BLOCKS;
use super::coverage;
use super::dim3::Dim3;
use super::fault;
use super::host_api::{HOST_API, HostApi};
use super::pads::{Pads, PadsOfThread};
use super::progress;
use super::race::{Party, Race};
use super::schedule::{BlockLaunch, ParamUnit, STOPPED, TIME_LIMIT, run_cluster};
use super::shared::{SHARED_BYTES_PER_BLOCK, Shared};
use super::source_lines::source_lines;
use super::watchdog::Watchdog;
use crate::backend::KernelExports;
use crate::error::{Result, RuntimeError};

/// CUDA's limit of threads in a block.
const THREADS_PER_BLOCK: u64 = 1024;

/// Byte that fills shared memory before a block starts: NaN in every floating-point type. Under a
/// schedule seed it alternates between contents that earlier blocks might have left: zeros, values
/// of ordinary size, or negative ones, which are large as unsigned integers. Comparisons with NaN
/// are false, so NaN alone may not show a read of unwritten memory.
fn shared_poison(turn: Option<u64>) -> u8 {
    turn.map_or(0xff, |turn| [0xc0, 0x3f, 0][(turn % 3) as usize])
}

type Enter = unsafe extern "C" fn(*mut ThreadContext);
type PoisonStaticShared = unsafe extern "C" fn(u8);
type ThreadStorage = unsafe extern "C" fn() -> *mut u8;
type Entry = unsafe extern "C" fn(*const c_void);

/// A kernel file, compiled and loaded.
pub struct EmulatorModule {
    file: String,
    library: Library,
    enter: Enter,
    poison_static_shared: PoisonStaticShared,
    thread_storage: ThreadStorage,
    pads: Pads,
    code: (usize, usize),
    /// Address at which it is loaded.
    base: usize,
    /// Its file, which names source lines.
    path: PathBuf,
    shared: Arc<Shared>,
}

impl EmulatorModule {
    /// Loads a library that the compiler built from `file`.
    pub fn load(path: &Path, file: &str, shared: Arc<Shared>) -> Result<Self> {
        let loading = |error: std::io::Error| {
            RuntimeError::system(format!("loading {}", path.display()), error)
        };
        let pads = Pads::of(&std::fs::read(path).map_err(loading)?)
            .ok_or_else(|| loading(std::io::Error::other("its symbols cannot be read")))?;
        // SAFETY: the library was built from a kernel source by this runtime; it has no
        // initialisers beyond those of plain variables.
        let library = unsafe { Library::new(path) }
            .map_err(|e| loading(std::io::Error::other(e.to_string())))?;
        // SAFETY: the four functions are defined by emulator.h with these signatures.
        let (attach, enter, poison_static_shared, thread_storage) = unsafe {
            (
                *symbol::<unsafe extern "C" fn(*const HostApi)>(&library, file, "emulator_attach")?,
                *symbol::<Enter>(&library, file, "emulator_enter")?,
                *symbol::<PoisonStaticShared>(&library, file, "emulator_poison_static_shared")?,
                *symbol::<ThreadStorage>(&library, file, "emulator_thread_storage")?,
            )
        };
        // SAFETY: HOST_API is static and has the layout that emulator.h declares.
        unsafe { attach(&HOST_API) };
        let code = code_range(enter as usize);
        let base = load_address(enter as usize);
        Ok(Self {
            file: file.to_owned(),
            library,
            enter,
            poison_static_shared,
            thread_storage,
            pads,
            code,
            base,
            path: path.to_owned(),
            shared,
        })
    }

    fn run_blocks(
        &self,
        launch: &BlockLaunch<'_>,
        shared_bytes: usize,
        limit: Duration,
    ) -> std::result::Result<(), BlockFault> {
        let total = launch.clusters().count();
        let next = AtomicU64::new(0);
        let first_fault: Mutex<Option<(u64, BlockFault)>> = Mutex::new(None);
        let workers = self.shared.workers.min(total as usize).max(1);
        let watchdog = Watchdog::new(workers);
        std::thread::scope(|scope| {
            let handles: Vec<_> = (0..workers)
                .map(|number| {
                    let (watchdog, next, first_fault) = (&watchdog, &next, &first_fault);
                    scope.spawn(move || {
                        let _counted = watchdog.enter();
                        let _stack = fault::SignalStack::of_this_thread();
                        progress::take_slot(number);
                        self.work(launch, shared_bytes, next, first_fault);
                    })
                })
                .collect();
            watchdog.watch(limit, launch.cancelled);
            // Neither joined nor detached before this point, so the watchdog's thread ids were
            // valid.
            drop(handles);
        });
        match first_fault.into_inner().unwrap_or_else(|e| e.into_inner()) {
            // No other fault occurred, so the watchdog stopped the launch.
            Some((_, fault)) if fault.what == STOPPED => {
                Err(BlockFault { what: TIME_LIMIT.into(), ..fault })
            }
            Some((_, fault)) => Err(fault),
            None => Ok(()),
        }
    }

    /// One worker: runs one cluster after the other until none is left or one failed.
    fn work(
        &self,
        launch: &BlockLaunch<'_>,
        shared_bytes: usize,
        next: &AtomicU64,
        first_fault: &Mutex<Option<(u64, BlockFault)>>,
    ) {
        let memory = &self.shared.memory;
        let allocated = (0..launch.cluster)
            .map(|_| memory.allocate_shared(shared_bytes))
            .collect::<Result<Vec<_>>>();
        let Ok(allocated) = allocated else {
            launch.cancelled.store(true, Ordering::Relaxed);
            return;
        };
        let dynamic: Vec<_> =
            allocated.iter().map(|shared| (shared.address as *mut u8, shared_bytes)).collect();
        // SAFETY: the storage is this thread's own, and so is what is made of it.
        let pads = unsafe { PadsOfThread::new(&self.pads, (self.thread_storage)()) };
        let mut stacks = Vec::new();
        let poison = launch.shared_poison;
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= launch.clusters().count() || launch.cancelled.load(Ordering::Relaxed) {
                break;
            }
            self.refill(&mut stacks, launch.block.count() as usize * dynamic.len());
            // SAFETY: the allocations are this worker's own; poisoning TLS touches only this
            // thread's.
            unsafe {
                dynamic
                    .iter()
                    .for_each(|&(shared, bytes)| std::ptr::write_bytes(shared, poison, bytes));
                (self.poison_static_shared)(poison);
            }
            pads.fill();
            let cluster = launch.clusters().unflatten(index);
            let first = Dim3 { x: cluster.x * launch.cluster, ..cluster };
            let ran = run_cluster(launch, first, &dynamic, &pads, &mut stacks);
            progress::leave_block();
            if let Err(mut fault) = ran {
                launch.cancelled.store(true, Ordering::Relaxed);
                // Here, because the shared memory is among the buffers only while this worker has
                // it.
                if let Some(access) = &fault.access {
                    fault.what = memory.describe(access);
                }
                if let Some(race) = &fault.race {
                    fault.what = self.describe_race(race, launch.block, launch.cluster);
                }
                if let Some(at) = fault.waits_at
                    && let [Some(line)] = source_lines(&self.path, [at])
                {
                    fault.what += &format!("; it waits at {line}");
                }
                let mut slot = first_fault.lock().unwrap_or_else(|e| e.into_inner());
                // A block that was only stopped may come here before the block whose fault stopped
                // it. Any fault has priority over a stop, and the fault of the lowest block over
                // that of another.
                let rank = |index: u64, fault: &BlockFault| (fault.what == STOPPED, index);
                if slot
                    .as_ref()
                    .is_none_or(|(kept, first)| rank(index, &fault) < rank(*kept, first))
                {
                    *slot = Some((index, fault));
                }
            }
        }
        allocated.iter().for_each(|shared| memory.free(shared));
        self.shared.stacks.lock().unwrap_or_else(|e| e.into_inner()).append(&mut stacks);
    }

    /// Takes pooled stacks, one for each thread of a block; the block maps the missing ones.
    fn refill(&self, stacks: &mut Vec<DefaultStack>, threads: usize) {
        if stacks.len() < threads {
            let mut pool = self.shared.stacks.lock().unwrap_or_else(|e| e.into_inner());
            let keep = pool.len() - pool.len().min(threads - stacks.len());
            stacks.extend(pool.drain(keep..));
        }
    }

    /// Rejects what a device would reject; returns the blocks of a cluster.
    fn check_launch(
        &self,
        kernel: &str,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
    ) -> Result<u32> {
        let refuse =
            |reason: String| Err(RuntimeError::Launch { kernel: kernel.to_owned(), reason });
        let threads = Dim3::new(block).count();
        let exports = self.exports(kernel)?;
        let max_threads = u64::from(exports.max_threads).min(THREADS_PER_BLOCK);
        if threads == 0 || threads > max_threads {
            return refuse(format!(
                "block {block:?} has {threads} threads; 1 to {max_threads} are allowed"
            ));
        }
        if grid[0] == 0
            || grid[0] > i32::MAX as u32
            || grid[1..].iter().any(|&extent| extent == 0 || extent > 65535)
        {
            return refuse(format!("grid {grid:?}: x is 1 to 2147483647, y and z are 1 to 65535"));
        }
        if let Some(reason) = exports.cluster_misfit(grid, MOST_BLOCKS) {
            return refuse(reason);
        }
        // They would be one variable for all blocks of a cluster, which share the thread that runs
        // them.
        if let (2.., Some(name)) = (exports.cluster, self.pads.static_shared()) {
            return refuse(format!(
                "clusters of blocks, in a module with a static shared variable, `{name}`"
            ));
        }
        if u64::from(shared_bytes) > SHARED_BYTES_PER_BLOCK {
            return refuse(format!(
                "{shared_bytes} bytes of dynamic shared memory; a block has {SHARED_BYTES_PER_BLOCK}"
            ));
        }
        Ok(exports.cluster)
    }
}

/// Looks a symbol up.
///
/// # Safety
/// `T` must be the symbol's type.
unsafe fn symbol<'a, T>(
    library: &'a Library,
    file: &str,
    name: &str,
) -> Result<libloading::os::unix::Symbol<T>>
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

/// The address at which the library of this function is loaded.
fn load_address(function: usize) -> usize {
    // SAFETY: all-zero bytes are a value of the struct, which dladdr fills for any address.
    let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: see above.
    let is_found = unsafe { libc::dladdr(function as *const c_void, &mut found) } != 0;
    if is_found { found.dli_fbase as usize } else { 0 }
}

impl EmulatorModule {
    /// Names both accesses of a race, and the memory.
    fn describe_race(&self, race: &Race, block: Dim3, cluster: u32) -> String {
        let lines = source_lines(&self.path, [race.place, race.other_place]);
        let [here, there] =
            lines.map(|line| line.map_or(String::new(), |line| format!(" at {line}")));
        let memory = self.shared.memory.describe_byte(race.address);
        let of_block = |rank: u32| match cluster {
            1 => String::new(),
            _ => format!(" of block {rank} of the cluster"),
        };
        let thread_name = |thread: u32| block.unflatten(u64::from(thread));
        let (who, rank) = match race.other {
            Party::Thread { rank, thread } => (format!("thread {}", thread_name(thread)), rank),
            Party::Copy { rank, thread } => {
                (format!("a copy in flight (cp.async) of thread {}", thread_name(thread)), rank)
            }
            Party::Product { rank, warp } => (format!("a wgmma of warp {warp}"), rank),
            Party::Counted { rank, offset } => {
                (format!("a copy that the mbarrier at offset {offset:#x} counts"), rank)
            }
        };
        let (verb, other_verb) = (race.kind.verb(), race.other_kind.verb());
        let of_block = of_block(rank);
        format!(
            "{verb} {memory}{here}, which {who}{of_block} {other_verb}{there}: nothing orders the two (a race)"
        )
    }

    /// Adds how often lines ran to the module's file, if it counts them.
    fn add_counts(&self) {
        // SAFETY: emulator.h defines the function with this type, where lines are counted; no block
        // runs any more.
        unsafe {
            let found = symbol::<unsafe extern "C" fn()>(&self.library, &self.file, coverage::DUMP);
            if let Ok(add) = found {
                add();
            }
        }
    }

    /// Reads what the module exports for a kernel.
    pub fn exports(&self, kernel: &str) -> Result<KernelExports> {
        // SAFETY (also of `number`): the macros of KERNEL and SHARED_MEMORY define these symbols
        // with these types.
        let layout = unsafe {
            **symbol::<*const [u64; 3]>(&self.library, &self.file, &format!("{kernel}_layout"))?
        };
        let number = |what: &str| unsafe {
            symbol::<*const [u64; 1]>(&self.library, &self.file, &format!("{kernel}_{what}"))
                .map(|s| (**s)[0])
                .ok()
        };
        Ok(KernelExports {
            params_size: layout[0],
            params_hash: layout[1],
            max_threads: layout[2] as u32,
            shared_bytes: number("shared_bytes"),
            resident_blocks: number("resident_blocks"),
            cluster: number("cluster").map_or(1, |blocks| blocks as u32),
            resident_clusters: None,
        })
    }

    /// Runs one launch to its end.
    pub fn launch(
        &self,
        kernel: &str,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        params: &[u8],
    ) -> Result<()> {
        let cluster = self.check_launch(kernel, grid, block, shared_bytes)?;
        // SAFETY: KERNEL defines `<kernel>_entry` with this type.
        let entry =
            unsafe { *symbol::<Entry>(&self.library, &self.file, &format!("{kernel}_entry"))? };
        let aligned = aligned_copy(params);
        let cancelled = AtomicBool::new(false);
        let (schedule_seed, watches_races, poison_turn) = {
            let mut schedule = self.shared.schedule.lock().unwrap_or_else(|e| e.into_inner());
            schedule.launches += 1;
            let mixed = schedule.launches.wrapping_mul(0xd1b5_4a32_d192_ed03);
            (
                schedule.seed.map(|seed| seed ^ mixed),
                schedule.seed.is_none() && schedule.watches_races,
                schedule.seed.map(|seed| seed.wrapping_add(schedule.launches)),
            )
        };
        let grid = Dim3::new(grid);
        // Accesses of a single block have an order. The set of accesses of several blocks is the
        // same under every schedule: one schedule is enough.
        let watched = schedule_seed.is_some() && grid.count() > 1;
        let buffers = self.shared.memory.buffers();
        let launch = BlockLaunch {
            entry,
            enter: self.enter,
            code: self.code,
            base: self.base,
            grid,
            block: Dim3::new(block),
            cluster,
            accesses: watched.then(|| Arc::new(Accesses::new(buffers.clone()))),
            buffers: &buffers,
            params: &aligned,
            schedule_seed,
            watches_races,
            shared_poison: shared_poison(poison_turn),
            cancelled: &cancelled,
        };
        let limit = self.shared.limit_of(&self.file, kernel);
        let ran = self.run_blocks(&launch, shared_bytes as usize, limit);
        if ran.as_ref().is_err_and(|fault| fault.what.starts_with(TIME_LIMIT)) {
            self.shared.did_not_end(&self.file, kernel);
        }
        self.add_counts();
        ran.map_err(|fault| RuntimeError::Fault {
            kernel: kernel.to_owned(),
            block: fault.block.to_string(),
            thread: fault.thread.to_string(),
            what: fault.what,
        })
    }
}

fn aligned_copy(params: &[u8]) -> Vec<ParamUnit> {
    let unit = |chunk: &[u8]| {
        let mut bytes = [0; 64];
        bytes[..chunk.len()].copy_from_slice(chunk);
        ParamUnit(bytes)
    };
    params.chunks(64).map(unit).collect()
}
