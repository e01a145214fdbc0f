//! The interface of a backend: memory, compilation, launches, time.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::error::{Result, RuntimeError};
use super::matrix::MatrixLibrary;
use super::source::SourceTree;
use super::tensor_map::{MapWords, TensorMap};
use super::turns::Turn;
use super::world::Collectives;

/// What ran a kernel: one of the two implementations of the runtime, or an external process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BackendKind {
    /// An NVIDIA GPU through the driver API.
    Cuda,
    /// CUDA threads as coroutines on the host.
    Emulator,
    /// A third-party kernel in a separate process: no [`Backend`], only a name in reports.
    External,
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cuda => "cuda",
            Self::Emulator => "emulator",
            Self::External => "external",
        })
    }
}

/// What ran the kernels; goes into every report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Environment {
    /// Which backend.
    pub backend: BackendKind,
    /// GPU name, or the host's processor.
    pub device: String,
    /// Driver version, or the operating system.
    pub driver: String,
    /// NVRTC or host compiler, with its version.
    pub compiler: String,
    /// Compilation target: `sm_90a`, or the host's architecture.
    pub target: String,
    /// SMs, or on the emulator the number that it reports.
    pub processors: u32,
    /// Bytes of dynamic shared memory that one block may have.
    pub shared_bytes_per_block: u64,
}

/// The end of an allocation at which an access outside of it is caught at once (emulator only).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Placement {
    /// A guard page follows the last byte (within alignment).
    FlushBack,
    /// A guard page precedes the first byte.
    FlushFront,
}

/// A device allocation with bands of known bytes on both sides.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Allocation {
    /// Device address of the first usable byte, 16-byte aligned at least.
    pub address: u64,
    /// Usable bytes.
    pub bytes: usize,
    /// Guard band before the first usable byte, in bytes.
    pub front_band: usize,
    /// Guard band after the last usable byte, in bytes.
    pub back_band: usize,
}

/// An allocation of which only some parts are usable memory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Reservation {
    /// As [`Backend::allocate`] returns it; `bytes` includes the untouched parts.
    pub allocation: Allocation,
    /// Device addresses that may be filled, uploaded to and downloaded, ascending, with a gap
    /// between any two. They are the requested ranges, rounded up to the granularity of the device.
    pub touched: Vec<Range<u64>>,
}

/// Widens `ranges` (bytes from `address`, ascending by their starts) to multiples of `granule`,
/// cuts them to `within` and joins adjacent ones.
pub(super) fn granules(
    ranges: &[Range<i64>],
    address: u64,
    within: &Range<u64>,
    granule: u64,
) -> Vec<Range<u64>> {
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        let start = address.saturating_add_signed(range.start) / granule * granule;
        let end = address.saturating_add_signed(range.end);
        let end = end.checked_next_multiple_of(granule).unwrap_or(u64::MAX);
        let (start, end) = (start.max(within.start), end.min(within.end));
        match joined.last_mut() {
            _ if start >= end => {}
            Some(last) if start <= last.end => last.end = last.end.max(end),
            _ => joined.push(start..end),
        }
    }
    joined
}

/// What a compiled module exports for one kernel, next to its code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelExports {
    /// Size of the parameter struct in bytes.
    pub params_size: u64,
    /// Layout hash of the parameter struct.
    pub params_hash: u64,
    /// Largest number of threads in a block.
    pub max_threads: u32,
    /// Dynamic shared memory that the kernel needs, if it exports that.
    pub shared_bytes: Option<u64>,
    /// Lower bound on the blocks that its registers allow on an SM at once, if it exports that.
    pub resident_blocks: Option<u64>,
    /// Blocks of a cluster, neighbours in x; 1 where it is launched without clusters.
    pub cluster: u32,
    /// Clusters that the device runs at once, for kernels launched in clusters, if it reports that.
    /// Some parts of a device have a number of SMs that is not a multiple of a cluster's blocks;
    /// the remainder stays idle.
    pub resident_clusters: Option<u32>,
}

impl KernelExports {
    /// Why a grid cannot be launched in this kernel's clusters. A device takes clusters of up to
    /// `most` blocks.
    pub(super) fn cluster_misfit(&self, grid: [u32; 3], most: u32) -> Option<String> {
        let blocks = self.cluster;
        if blocks == 0 || blocks > most {
            return Some(format!("clusters of {blocks} blocks; 1 to {most} are possible"));
        }
        let whole = grid[0].is_multiple_of(blocks);
        (!whole).then(|| {
            format!(
                "a grid of {} blocks in x, which is no multiple of a cluster's {blocks}",
                grid[0]
            )
        })
    }
}

/// One compiled source file, loaded.
pub trait LoadedModule: Send + Sync {
    /// Reads what the module exports for `kernel`.
    ///
    /// # Errors
    /// [`RuntimeError::SymbolMissing`].
    fn exports(&self, kernel: &str) -> Result<KernelExports>;

    /// Enqueues one launch; `params` are the bytes of the parameter struct. On the emulator the
    /// launch is complete when this returns.
    ///
    /// # Errors
    /// A rejected configuration, or a fault of the kernel (on CUDA: at the latest at
    /// [`Backend::synchronize`]).
    fn launch(
        &self,
        kernel: &str,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        params: &[u8],
    ) -> Result<()>;
}

/// Recorded work that can run any number of times, each time on the current memory contents.
pub trait Recorded {
    /// Enqueues all of it. Keep `self`, and the memory that the work uses, until the device has
    /// finished it.
    ///
    /// # Errors
    /// Errors of the device.
    fn launch(&self) -> Result<()>;
}

/// A backend that records work before it runs.
pub trait Recorder {
    /// Records what `work` enqueues; none of it runs. `work` must not wait for the device, nor
    /// allocate or compile.
    ///
    /// # Errors
    /// Those of `work` and of the device.
    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Box<dyn Recorded + '_>>;
}

/// A device of either kind. Addresses are device addresses; on the emulator they are host pointers.
pub trait Backend: Send + Sync {
    /// What this is.
    fn environment(&self) -> &Environment;

    /// Keeps other threads off the device until it is dropped. The thread that holds it may use the
    /// device, and take it again. `None` on a backend whose threads need not wait for each other. A
    /// thread that takes another lock while it uses the device takes this one first.
    fn turn(&self) -> Option<Turn<'_>> {
        None
    }

    /// Whether the backend has compiled modules, and runs launches.
    fn runs(&self) -> bool {
        true
    }

    /// Compiles `file` of `tree` (or takes it from the disk cache) and loads it.
    ///
    /// # Errors
    /// [`RuntimeError::Compile`] with the compiler's log.
    fn load(
        &self,
        tree: &SourceTree,
        file: &str,
        defines: &[(String, String)],
    ) -> Result<Box<dyn LoadedModule>>;

    /// The compiled form of `file` of `tree`. Equal forms of two trees mean that their modules do
    /// the same. `None` on a backend without such a form.
    ///
    /// # Errors
    /// As [`Backend::load`].
    fn assembly(
        &self,
        _tree: &SourceTree,
        _file: &str,
        _defines: &[(String, String)],
    ) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    /// Allocates `bytes` with guard bands; contents are undefined. `name` appears in errors.
    ///
    /// # Errors
    /// Out of memory.
    fn allocate(&self, name: &str, bytes: usize, placement: Placement) -> Result<Allocation>;

    /// Kernels may only read this buffer from now on. A backend that cannot hold them to it leaves
    /// it as it is.
    ///
    /// # Errors
    /// The system's.
    fn seal(&self, _allocation: &Allocation) -> Result<()> {
        Ok(())
    }

    /// Reserves `bytes` bytes of addresses with guard bands, of which only `touched` will be used:
    /// for tensors whose strides leave gigabytes between rows. `touched` is in bytes from the first
    /// one, ascending by the starts; ranges may reach into the bands. Other addresses take no
    /// memory where the device allows it, and hold undefined bytes or are unmapped. `name` appears
    /// in errors.
    ///
    /// # Errors
    /// [`RuntimeError::TooLarge`], and those of
    /// [`Backend::allocate`].
    fn reserve(
        &self,
        name: &str,
        bytes: usize,
        touched: &[Range<i64>],
        placement: Placement,
    ) -> Result<Reservation>;

    /// Frees an allocation made by this backend; nothing may use it afterwards.
    fn free(&self, allocation: &Allocation);

    /// Sets `bytes` bytes at `address`, in stream order.
    ///
    /// # Errors
    /// Errors of the device.
    fn fill(&self, address: u64, byte: u8, bytes: usize) -> Result<()>;

    /// Copies from the host, in stream order.
    ///
    /// # Errors
    /// Errors of the device.
    fn upload(&self, address: u64, source: &[u8]) -> Result<()>;

    /// Waits for the stream and copies to the host.
    ///
    /// # Errors
    /// Errors of the device, including those of earlier launches.
    fn download(&self, address: u64, target: &mut [u8]) -> Result<()>;

    /// Copies within the device, in stream order.
    ///
    /// # Errors
    /// Errors of the device.
    fn copy(&self, target: u64, source: u64, bytes: usize) -> Result<()>;

    /// Waits for everything enqueued.
    ///
    /// # Errors
    /// Faults of launches since the last call.
    fn synchronize(&self) -> Result<()>;

    /// Chooses the schedule of later launches: `None` is the deterministic one, a seed a random one
    /// that the same seed repeats. A GPU does its own scheduling and ignores this.
    fn set_schedule_seed(&self, _seed: Option<u64>) {}

    /// The seed of [`Backend::set_schedule_seed`].
    fn schedule_seed(&self) -> Option<u64> {
        None
    }

    /// Whether later launches under the deterministic schedule look for races, as they do at first.
    /// Launches of the same kernels on the same data need not: they would find the same. A GPU
    /// ignores this.
    fn watch_races(&self, _watch: bool) {}

    /// Device time of the work that `work` enqueues: CUDA events around it, or the wall clock.
    ///
    /// # Errors
    /// Those of `work` and of the device.
    fn time(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Duration>;

    /// As [`Backend::time`], but all that `work` enqueues is recorded before any of it runs. The
    /// time then excludes the launch overhead of the host. `work` must not wait for the device, nor
    /// allocate or compile.
    ///
    /// # Errors
    /// Those of `work` and of the device.
    fn time_recorded(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
        self.time(work)
    }

    /// Records work for later runs; `None` on a backend that cannot record.
    fn recorder(&self) -> Option<&dyn Recorder> {
        None
    }

    /// The library for matrix products, with other kernels than ours; `None` where there is no
    /// library.
    fn matrix_library(&self) -> Option<&dyn MatrixLibrary> {
        None
    }

    /// A name for a new world of a library of collectives, which all its ranks give to
    /// [`Backend::collectives`].
    ///
    /// # Errors
    /// [`RuntimeError::BackendMissing`] where there is no such
    /// library.
    fn name_of_world(&self) -> Result<Vec<u8>> {
        Err(no_collectives(self.environment().backend))
    }

    /// Joins a world of a library of collectives. It waits until all of its ranks do.
    ///
    /// # Errors
    /// As [`Backend::name_of_world`]; errors of the library.
    fn collectives(
        &self,
        _name: &[u8],
        _rank: usize,
        _size: usize,
    ) -> Result<Box<dyn Collectives + '_>> {
        Err(no_collectives(self.environment().backend))
    }

    /// The value that a kernel's parameters hold for a tensor of which it copies TMA boxes.
    ///
    /// # Errors
    /// Errors of the device.
    fn tensor_map(&self, map: &TensorMap) -> Result<MapWords> {
        Ok(map.words())
    }
}

fn no_collectives(kind: BackendKind) -> RuntimeError {
    let reason = format!("the {kind} device has no library of collectives");
    RuntimeError::BackendMissing { backend: "nccl", reason }
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use super::*;

    #[test]
    fn ranges_are_widened_cut_and_joined_where_they_meet() {
        let within = 1000..1200;
        assert_eq!(granules(&[-8..3, 40..41, 50..60], 1008, &within, 16), [1000..1024, 1040..1072]);
        assert_eq!(granules(&[0..16, 16..32, 20..24], 1008, &within, 16), from_ref(&(1008..1040)));
        assert_eq!(
            granules(&[0..100, 8..16, 101..102], 1008, &within, 16),
            from_ref(&(1008..1120))
        );
        assert_eq!(
            granules(&[180..900, 1 << 40..1 << 41], 1008, &within, 16),
            from_ref(&(1184..1200))
        );
        assert_eq!(granules(&[i64::MIN..-16, 0..0], 1008, &within, 16), []);
        assert_eq!(granules(from_ref(&(i64::MIN..i64::MAX)), 1008, &within, 16), from_ref(&within));
    }
}
