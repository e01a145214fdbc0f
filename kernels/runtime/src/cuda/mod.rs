//! The CUDA backend: NVRTC compiles to a cubin for the device, the driver API launches.
//!
//! Nothing of CUDA is linked. The driver comes from the loader's path and NVRTC from the place
//! where [`Nvrtc::load`] finds it. If either is missing, [`CudaBackend::new`] returns an error and
//! nothing panics. All work goes to one explicit stream; contexts are made current on the calling
//! thread.

pub mod blaslt;
mod driver;
mod graph;
mod library;
mod module;
pub mod nccl;
pub mod nvrtc;
mod sparse;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use rayon::prelude::*;

use self::blaslt::Blaslt;
use self::driver::{Context, Event, Properties};
use self::graph::Graph;
pub use self::module::CudaModule;
use self::nccl::Nccl;
pub use self::nvrtc::{Compiled, Nvrtc};
use self::sparse::SparseMemory;
use super::backend::{
    Allocation, Backend, BackendKind, Environment, LoadedModule, Placement, Recorded, Recorder,
    Reservation, granules,
};
use super::cache::ModuleCache;
use super::error::{Result, RuntimeError};
use super::matrix::{MatrixLibrary, MatrixProduct};
use super::source::{Module, SourceTree};
use super::tensor_map::{MapWords, TensorMap};
use super::world::Collectives;

/// Bytes of guard band on each side of an allocation, at least; also keeps its address aligned.
const GUARD_BAND: usize = 4096;

/// Usable sizes are rounded up to this, bytes; the remainder belongs to the back band.
const ROUNDING: usize = 256;

/// A reserved buffer may take this part of the free memory: half of it.
pub const RESERVED_PART: usize = 2;

/// How long an allocation that fits the device waits for other processes to free enough memory, and
/// how often it checks.
const ROOM_WAIT: Duration = Duration::from_secs(20);
const ROOM_POLL: Duration = Duration::from_millis(50);

/// The usual mapping granularity of devices, bytes, for callers without a device.
pub const MAPPED_GRANULE: usize = 2 << 20;

/// A buffer is mapped piece by piece if that takes less memory by this factor; each piece costs one
/// to four calls.
const WORTH_MAPPING: u64 = 2;

/// Touched ranges of a reserved buffer are rounded up to this, bytes.
const TOUCHED_GRANULE: u64 = 16;

/// A GPU.
pub struct CudaBackend {
    context: Arc<Context>,
    nvrtc: Nvrtc,
    cache: ModuleCache,
    environment: Environment,
    sparse: SparseMemory,
    /// Created at the first GEMM.
    blaslt: Mutex<Option<Arc<Blaslt>>>,
}

impl CudaBackend {
    /// The device that `PARITY_CUDA_DEVICE` names by its ordinal, or the first one.
    ///
    /// # Errors
    /// [`RuntimeError::BackendMissing`] where there is no driver, no such device or no NVRTC.
    pub fn new(cache: ModuleCache) -> Result<Self> {
        Self::of_device(chosen_device()?, cache)
    }

    /// The device with this number.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn of_device(ordinal: u32, cache: ModuleCache) -> Result<Self> {
        let context = Context::open(ordinal)?;
        let nvrtc = Nvrtc::load()?;
        let properties = &context.properties;
        let environment = Environment {
            backend: BackendKind::Cuda,
            device: properties.name.clone(),
            driver: properties.driver.clone(),
            compiler: nvrtc.name(),
            target: properties.target(),
            processors: properties.sms,
            shared_bytes_per_block: properties.shared_opt_in,
        };
        let sparse = SparseMemory::new(&context);
        Ok(Self { context, nvrtc, cache, environment, sparse, blaslt: Mutex::default() })
    }

    /// The compiler in use.
    pub fn nvrtc(&self) -> &Nvrtc {
        &self.nvrtc
    }

    /// The library for GEMMs, if [`blaslt::load`] has found one.
    fn blaslt(&self) -> Result<Arc<Blaslt>> {
        let mut made = driver::locked(&self.blaslt);
        if let Some(library) = &*made {
            return Ok(library.clone());
        }
        let library = Arc::new(Blaslt::new(&self.context)?);
        *made = Some(library.clone());
        Ok(library)
    }

    /// Waits until this many bytes are within the part of the free memory that a reserved buffer
    /// gets.
    fn wait_for_room(&self, name: &str, needed: usize) -> Result<()> {
        let begun = Instant::now();
        loop {
            let (free, all) = self.context.free_memory()?;
            let limit = free / RESERVED_PART;
            if needed <= limit {
                return Ok(());
            }
            if needed > all / RESERVED_PART || begun.elapsed() > ROOM_WAIT {
                return Err(RuntimeError::TooLarge {
                    name: name.to_owned(),
                    needed,
                    limit,
                    of: "bytes of device memory",
                });
            }
            std::thread::sleep(ROOM_POLL);
        }
    }

    /// `runs`: offsets from the buffer's first address, as in [`sparse_runs`].
    fn reserve_sparse(
        &self,
        bytes: usize,
        total: usize,
        runs: &[Range<u64>],
    ) -> Result<Allocation> {
        let base = self.sparse.reserve(total)?;
        let runs: Vec<_> = runs.iter().map(|run| base + run.start..base + run.end).collect();
        if let Err(error) = self.sparse.map(base, &runs) {
            self.sparse.free(base);
            return Err(error);
        }
        Ok(allocation_at(base, bytes, total))
    }

    fn load_stored(&self, path: &Path, file: &str) -> std::result::Result<CudaModule, String> {
        let cubin = std::fs::read(path).map_err(|error| error.to_string())?;
        CudaModule::load(&self.context, file, &cubin).map_err(|error| error.to_string())
    }
}

/// The compilation target for a device of this compute capability (80, 90): `sm_80`, `sm_90a`. From
/// Hopper on, the kernels use features that exist only in the architecture-specific variant, which
/// other architectures do not run.
pub fn target_of(capability: u32) -> String {
    format!("sm_{capability}{}", if capability >= 90 { "a" } else { "" })
}

/// Runs `work`, whose launches on this thread go to a stream of the caller instead of the backend's
/// own: a `CUstream` of the device's primary context, 0 for its default stream. They are not waited
/// for. The thread's current context is the same afterwards.
///
/// # Errors
/// Those of the driver, and of `work`.
pub fn on_stream<T>(stream: u64, work: impl FnOnce() -> Result<T>) -> Result<T> {
    driver::on_stream(stream, work)
}

/// Only checks that there is a driver.
///
/// # Errors
/// [`RuntimeError::BackendMissing`] where there is none.
pub fn require_driver() -> Result<()> {
    driver::require()
}

/// How many devices there are.
///
/// # Errors
/// [`RuntimeError::BackendMissing`] where there is no driver, or none that works.
pub fn device_count() -> Result<u32> {
    driver::device_count()
}

/// Bytes of memory of the device with this number, including memory in use.
///
/// # Errors
/// As [`device_count`], and for a value that is not a device number.
pub fn device_memory(device: &OsStr) -> Result<u64> {
    driver::device_memory(numbered(device)?)
}

/// The id of the device that [`CudaBackend::new`] opens, as `nvidia-smi -L` prints it: two GPUs of
/// one kind differ in it.
///
/// # Errors
/// As [`device_count`].
pub fn device_uuid() -> Result<String> {
    driver::device_uuid(chosen_device()?)
}

/// How a GPU reaches another one's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Link {
    /// Directly, atomics included, as over NVLink.
    PeerWithAtomics,
    /// Directly, without atomics, as over PCIe.
    Peer,
    /// Through the host's memory.
    Host,
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::PeerWithAtomics => "peer memory with atomics, as over NVLink",
            Self::Peer => "peer memory without atomics, as over PCIe",
            Self::Host => "memory of the host",
        })
    }
}

/// How each two devices reach each other's memory: the numbers of both, and the slower direction.
///
/// # Errors
/// As [`device_count`].
pub fn links() -> Result<Vec<([u32; 2], Link)>> {
    let count = device_count()?;
    let pairs = (0..count).flat_map(|from| (from + 1..count).map(move |to| [from, to]));
    let link = |[from, to]: [u32; 2]| {
        Ok(([from, to], driver::link(from, to)?.max(driver::link(to, from)?)))
    };
    pairs.map(link).collect()
}

/// The ids of all devices, by their numbers.
///
/// # Errors
/// As [`device_count`].
pub fn device_uuids() -> Result<Vec<String>> {
    (0..device_count()?).map(driver::device_uuid).collect()
}

/// Modules that a cache lacks, ready to be compiled into it. Needs no GPU. A module that is
/// compiled on any machine for a device's [`Environment::target`] is found by the device, if
/// source, defines, options and NVRTC are the same.
pub struct Missing<'a> {
    nvrtc: Nvrtc,
    cache: &'a ModuleCache,
    tree: &'a SourceTree,
    target: &'a str,
    /// Each with its cache key.
    modules: Vec<(&'a Module, String)>,
}

impl<'a> Missing<'a> {
    /// Those of `modules` that `cache` does not hold for `target`; a duplicate counts once.
    ///
    /// # Errors
    /// [`RuntimeError::BackendMissing`] where there is no NVRTC.
    pub fn from(
        cache: &'a ModuleCache,
        tree: &'a SourceTree,
        modules: &'a [Module],
        target: &'a str,
    ) -> Result<Self> {
        let nvrtc = Nvrtc::load()?;
        let wanted: BTreeSet<&Module> = modules.iter().collect();
        let missing = wanted.into_iter().filter_map(|module| {
            // A missing source is reported at the launch.
            let key = nvrtc.cache_key(tree, &module.0, &module.1, target).ok()?;
            cache.find(&key, "cubin").is_none().then_some((module, key))
        });
        let modules = missing.collect();
        Ok(Self { nvrtc, cache, tree, target, modules })
    }

    /// The number of missing modules.
    pub fn count(&self) -> usize {
        self.modules.len()
    }

    /// Compiles them on all cores, so that several processes need not compile them again. `done` is
    /// called after each. A module that cannot be compiled or stored is skipped: its first user
    /// gets the error. Returns the number of skipped ones.
    pub fn compile(&self, done: &(dyn Fn() + Sync)) -> usize {
        let failed = self.modules.par_iter().filter(|((file, defines), key)| {
            let build = || {
                self.nvrtc
                    .compile(self.tree, file, defines, self.target)
                    .map(|compiled| compiled.cubin)
            };
            // Another thread of this process may be compiling the same module.
            let built = self.cache.find_or_build(key, "cubin", build);
            done();
            built.inspect_err(|error| tracing::info!("not compiled in advance: {error}")).is_err()
        });
        failed.count()
    }
}

fn chosen_device() -> Result<u32> {
    let chosen = crate::process::variable("PARITY_CUDA_DEVICE");
    chosen.map_or(Ok(0), |value| numbered(&value))
}

fn numbered(value: &OsStr) -> Result<u32> {
    value.to_str().and_then(|text| text.parse().ok()).ok_or_else(|| RuntimeError::BackendMissing {
        backend: "cuda",
        reason: format!("PARITY_CUDA_DEVICE is {value:?}, which is not a device's number"),
    })
}

/// Bytes of an allocation with this many usable bytes.
fn banded(bytes: usize) -> Option<usize> {
    bytes.checked_next_multiple_of(ROUNDING)?.checked_add(2 * GUARD_BAND)
}

/// The allocation whose front band starts at `base`, with this many usable bytes and `total` bytes
/// including the bands.
fn allocation_at(base: u64, bytes: usize, total: usize) -> Allocation {
    let back_band = total - GUARD_BAND - bytes;
    Allocation { address: base + GUARD_BAND as u64, bytes, front_band: GUARD_BAND, back_band }
}

/// The ranges that must be mapped for `touched`, in multiples of `granule`, as offsets from the
/// first address of a buffer, where its front band starts.
fn sparse_runs(total: usize, touched: &[Range<i64>], granule: u64) -> Option<Vec<Range<u64>>> {
    let within = 0..(total as u64).checked_next_multiple_of(granule)?;
    Some(granules(touched, GUARD_BAND as u64, &within, granule))
}

fn extent_of(runs: &[Range<u64>]) -> u64 {
    runs.iter().map(|run| run.end - run.start).sum()
}

/// The device addresses of `touched`, clipped to the allocation and its bands.
fn touched_of(allocation: &Allocation, touched: &[Range<i64>]) -> Vec<Range<u64>> {
    let end = allocation.address + (allocation.bytes + allocation.back_band) as u64;
    let within = allocation.address - allocation.front_band as u64..end;
    granules(touched, allocation.address, &within, TOUCHED_GRANULE)
}

impl Backend for CudaBackend {
    fn environment(&self) -> &Environment {
        &self.environment
    }

    fn load(
        &self,
        tree: &SourceTree,
        file: &str,
        defines: &[(String, String)],
    ) -> Result<Box<dyn LoadedModule>> {
        let target = &self.environment.target;
        let key = self.nvrtc.cache_key(tree, file, defines, target)?;
        if let Some(path) = self.cache.find(&key, "cubin") {
            match self.load_stored(&path, file) {
                Ok(module) => return Ok(Box::new(module)),
                Err(error) => {
                    tracing::warn!("recompiling `{file}`: cached {}: {error}", path.display())
                }
            }
        }
        let cubin = self.nvrtc.compile(tree, file, defines, target)?.cubin;
        let module = CudaModule::load(&self.context, file, &cubin)?;
        if let Err(error) = self.cache.store(&key, "cubin", &cubin) {
            // Without a cache the next process compiles again; nothing else changes.
            tracing::warn!("{error}");
        }
        Ok(Box::new(module))
    }

    /// Placement has no effect here: only the bands show accesses beyond an allocation.
    fn allocate(&self, name: &str, bytes: usize, _placement: Placement) -> Result<Allocation> {
        let total = banded(bytes).ok_or_else(|| RuntimeError::Cuda {
            call: format!("cuMemAlloc({name}, {bytes} bytes)"),
            name: "CUDA_ERROR_OUT_OF_MEMORY".into(),
            message: "the size exceeds the address space".into(),
        })?;
        self.context.enter()?;
        let mut base = 0;
        // SAFETY: the context is current; the memory is freed by `free`, or with the context.
        let result = unsafe { sys::cuMemAlloc_v2(&mut base, total) };
        self.context.check(result, format_args!("cuMemAlloc({name}, {total} bytes)"))?;
        Ok(allocation_at(base, bytes, total))
    }

    /// Maps memory for the touched ranges, or makes a plain allocation with the gaps, if that takes
    /// little more. A buffer gets only a part of the free memory: other buffers, threads and
    /// processes need the rest.
    fn reserve(
        &self,
        name: &str,
        bytes: usize,
        touched: &[Range<i64>],
        placement: Placement,
    ) -> Result<Reservation> {
        let total = banded(bytes).unwrap_or(usize::MAX);
        let runs = self.sparse.granule().and_then(|granule| sparse_runs(total, touched, granule));
        let needed = runs.as_deref().map_or(u64::MAX, extent_of);
        let allocation = match runs.filter(|_| needed < total as u64 / WORTH_MAPPING) {
            Some(runs) => {
                self.wait_for_room(name, needed as usize)?;
                self.reserve_sparse(bytes, total, &runs)?
            }
            None => {
                self.wait_for_room(name, total)?;
                self.allocate(name, bytes, placement)?
            }
        };
        Ok(Reservation { touched: touched_of(&allocation, touched), allocation })
    }

    fn free(&self, allocation: &Allocation) {
        // Enqueued work may still use it; a fault is reported by the next synchronize call.
        let _ = self.context.synchronize();
        let base = allocation.address.wrapping_sub(allocation.front_band as u64);
        if self.sparse.free(base) {
            return;
        }
        // SAFETY: the caller gives back what `allocate` returned, once; the driver rejects others.
        let result = unsafe { sys::cuMemFree_v2(base) };
        if let Err(error) = driver::check(result, format_args!("cuMemFree({base:#x})")) {
            tracing::debug!("{error}");
        }
    }

    fn fill(&self, address: u64, byte: u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.context.enter()?;
        // SAFETY: touches device memory only; an address that is not the caller's is the driver's
        // to reject, or shows in the guard bands.
        let result = unsafe { sys::cuMemsetD8Async(address, byte, bytes, self.context.stream()) };
        self.context.check(result, format_args!("cuMemsetD8Async({address:#x}, {bytes} bytes)"))
    }

    fn upload(&self, address: u64, source: &[u8]) -> Result<()> {
        self.context.upload(address, source)
    }

    fn download(&self, address: u64, target: &mut [u8]) -> Result<()> {
        self.context.download(address, target)
    }

    fn copy(&self, target: u64, source: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.context.enter()?;
        // SAFETY: as in `fill`.
        let result =
            unsafe { sys::cuMemcpyDtoDAsync_v2(target, source, bytes, self.context.stream()) };
        self.context.check(
            result,
            format_args!("cuMemcpyDtoDAsync({target:#x}, {source:#x}, {bytes} bytes)"),
        )
    }

    fn synchronize(&self) -> Result<()> {
        self.context.synchronize()
    }

    /// Work that other threads enqueue on this device at the same time is included.
    fn time(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
        let (start, end) = (Event::new(&self.context)?, Event::new(&self.context)?);
        start.record()?;
        work()?;
        end.record()?;
        end.elapsed_since(&start)
    }

    fn time_recorded(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
        let (start, end) = (Event::new(&self.context)?, Event::new(&self.context)?);
        let graph = Graph::record(&self.context, &mut || {
            start.record_in_graph()?;
            work()?;
            end.record_in_graph()
        })?;
        graph.launch()?;
        end.elapsed_since(&start)
    }

    fn recorder(&self) -> Option<&dyn Recorder> {
        Some(self)
    }

    fn name_of_world(&self) -> Result<Vec<u8>> {
        nccl::name_of_world()
    }

    fn collectives(
        &self,
        name: &[u8],
        rank: usize,
        size: usize,
    ) -> Result<Box<dyn Collectives + '_>> {
        Ok(Box::new(Nccl::join(&self.context, name, rank, size)?))
    }

    fn matrix_library(&self) -> Option<&dyn MatrixLibrary> {
        blaslt::load(self.nvrtc.path()).ok().map(|()| self as &dyn MatrixLibrary)
    }

    fn tensor_map(&self, map: &TensorMap) -> Result<MapWords> {
        driver::tensor_map(map)
    }
}

impl MatrixLibrary for CudaBackend {
    fn multiply(&self, product: &MatrixProduct) -> Result<bool> {
        self.blaslt()?.multiply(product)
    }
}

impl Recorder for CudaBackend {
    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Box<dyn Recorded + '_>> {
        Ok(Box::new(Graph::record(&self.context, work)?))
    }
}

/// What the CUDA backend would use here, in a sentence or two, for `parity doctor`.
///
/// # Errors
/// [`RuntimeError::BackendMissing`] with the missing parts, and those that are present.
pub fn probe() -> Result<String> {
    let device =
        chosen_device().and_then(Context::open).map(|context| describe(&context.properties));
    let compiler =
        Nvrtc::load().map(|nvrtc| format!("{} is at {}", nvrtc.name(), nvrtc.path().display()));
    let reason = |error: RuntimeError| match error {
        RuntimeError::BackendMissing { reason, .. } => reason,
        other => other.to_string(),
    };
    let (device, compiler) = (device.map_err(reason), compiler.map_err(reason));
    if let (Ok(device), Ok(compiler)) = (&device, &compiler) {
        return Ok(format!("{device}. {compiler}."));
    }
    let (Ok(device) | Err(device)) = device;
    let (Ok(compiler) | Err(compiler)) = compiler;
    Err(RuntimeError::BackendMissing { backend: "cuda", reason: format!("{device}. {compiler}") })
}

fn describe(device: &Properties) -> String {
    format!(
        "{} ({}, {} SMs, {} KiB of shared memory per block) with {}",
        device.name,
        device.target(),
        device.sms,
        device.shared_opt_in / 1024,
        device.driver
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guard_bands_surround_every_size() {
        for bytes in [0, 1, 255, 256, 257, 1 << 30] {
            let total = banded(bytes).expect("fits");
            let back_band = allocation_at(0, bytes, total).back_band;
            assert!(back_band >= GUARD_BAND);
            assert_eq!(GUARD_BAND + bytes + back_band, total);
        }
        assert_eq!(banded(usize::MAX), None);
        assert_eq!(banded(usize::MAX - 300), None);
    }

    #[test]
    fn touched_ranges_reach_into_the_bands_and_no_further() {
        let total = banded(1000).expect("fits");
        let allocation = allocation_at((1 << 20) - GUARD_BAND as u64, 1000, total);
        let back_band = allocation.back_band;
        let touched = touched_of(&allocation, &[-5000..-4000, -10..20, 990..1 << 40]);
        let at = |offset: i64| (1u64 << 20).strict_add_signed(offset);
        assert_eq!(
            touched,
            [at(-4096)..at(-4000), at(-16)..at(32), at(976)..at(1000 + back_band as i64)]
        );
    }

    #[test]
    fn memory_is_mapped_around_what_is_touched_and_nowhere_else() {
        const GRANULE: u64 = 2 << 20;
        let rows: Vec<Range<i64>> =
            (0..3).map(|row| row << 32).map(|start| start - 512..start + 4096).collect();
        let runs = sparse_runs(3 << 32, &rows, GRANULE).expect("fits");
        assert_eq!(runs, [0..GRANULE, 1 << 32..(1 << 32) + GRANULE, 1 << 33..(1 << 33) + GRANULE]);
        assert_eq!(extent_of(&runs), 3 * GRANULE);
        // A band that starts a granule before its row.
        let row = (1 << 32) - 4352..(1 << 32) + 16;
        let runs = sparse_runs(3 << 32, std::slice::from_ref(&row), GRANULE).expect("fits");
        assert_eq!(runs.len(), 1);
        assert_eq!((runs[0].start, runs[0].end), ((1 << 32) - GRANULE, (1 << 32) + GRANULE));
        assert_eq!(sparse_runs(usize::MAX, &rows, GRANULE), None);
    }

    #[test]
    fn a_probe_says_what_was_found_or_why_not() {
        match probe() {
            Ok(text) => assert!(text.contains("sm_") && text.contains("NVRTC"), "{text}"),
            Err(RuntimeError::BackendMissing { reason, .. }) => {
                assert!(reason.contains("driver") || reason.contains("libnvrtc"), "{reason}");
            }
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn a_backend_without_a_device_is_an_error_and_no_panic() {
        let dir = tempfile::tempdir().expect("a directory");
        match CudaBackend::new(ModuleCache::new(dir.path().into())) {
            Ok(backend) => assert_eq!(backend.environment().backend, BackendKind::Cuda),
            Err(error) => assert!(matches!(error, RuntimeError::BackendMissing { .. }), "{error}"),
        }
    }
}
