//! A loaded cubin: its exports, and launches that are checked before the driver gets them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::{self, CUfunction_attribute_enum as FunctionAttribute};

use super::driver::{Code, Context, Properties, Shape, check, function_attribute, launch, locked};
use crate::backend::{KernelExports, LoadedModule};
use crate::error::{Result, RuntimeError};

/// The most blocks of a cluster that every device with clusters runs.
const MOST_CLUSTER_BLOCKS: u32 = 8;

/// One compiled source file on the device.
pub struct CudaModule {
    file: String,
    kernels: Mutex<HashMap<String, Arc<Kernel>>>,
    code: Code,
    /// It contains the names of the module's symbols.
    cubin: Vec<u8>,
}

/// An entry point, with the properties that the module and the driver report.
struct Kernel {
    name: Arc<str>,
    function: sys::CUfunction,
    exports: KernelExports,
    own: OwnLimits,
    /// Whether the kernel itself waits for earlier kernels, so that it may be launched before they
    /// have ended.
    waits: bool,
    /// Dynamic shared memory that the driver allows so far; bytes.
    allowed_shared: Mutex<u64>,
}

// SAFETY: a function handle belongs to the process as its module does; `CudaModule` keeps it no
// longer than the module.
unsafe impl Send for Kernel {}
// SAFETY: as above; mutable state is protected by a mutex.
unsafe impl Sync for Kernel {}

/// The device's limits for one compiled kernel.
#[derive(Clone, Copy, Debug)]
struct OwnLimits {
    /// Static shared memory, bytes.
    static_shared: u64,
    /// Most threads in a block for which its registers suffice.
    max_threads: u32,
}

impl CudaModule {
    /// Loads a complete cubin, made from `file`.
    pub(super) fn load(context: &Arc<Context>, file: &str, cubin: &[u8]) -> Result<Self> {
        let code = Code::load(context, cubin)?;
        Ok(Self { file: file.into(), kernels: Mutex::default(), code, cubin: cubin.to_vec() })
    }

    /// A variable that a kernel may or may not export. The driver is called only for symbols that
    /// the cubin names: a memory checker would report the failed call.
    fn optional_number(&self, symbol: &str) -> Result<Option<u64>> {
        let named = self.cubin.windows(symbol.len()).any(|window| window == symbol.as_bytes());
        if !named {
            return Ok(None);
        }
        Ok(self.code.numbers::<1>(symbol)?.map(|[number]| number))
    }

    fn kernel(&self, name: &str) -> Result<Arc<Kernel>> {
        if let Some(kernel) = locked(&self.kernels).get(name) {
            return Ok(kernel.clone());
        }
        let kernel = Arc::new(self.look_up(name)?);
        // Another thread may have been faster; its entry, with the memory that it allowed, stays.
        Ok(locked(&self.kernels).entry(name.into()).or_insert(kernel).clone())
    }

    fn look_up(&self, name: &str) -> Result<Kernel> {
        let missing =
            |symbol: String| RuntimeError::SymbolMissing { file: self.file.clone(), symbol };
        let function = self.code.function(name)?.ok_or_else(|| missing(name.into()))?;
        let layout = format!("{name}_layout");
        let [params_size, params_hash, max_threads] =
            self.code.numbers(&layout)?.ok_or_else(|| missing(layout))?;
        let shared_bytes = self.optional_number(&format!("{name}_shared_bytes"))?;
        let resident_blocks = self.optional_number(&format!("{name}_resident_blocks"))?;
        let cluster = self.optional_number(&format!("{name}_cluster"))?.unwrap_or(1);
        let waits = self.optional_number(&format!("{name}_waits"))? == Some(1);
        let own = OwnLimits {
            static_shared: function_attribute(
                function,
                FunctionAttribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
            )?
            .into(),
            max_threads: function_attribute(
                function,
                FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
            )?,
        };
        let without_opt_in = self.code.context().properties.shared_without_opt_in;
        let mut kernel = Kernel {
            name: name.into(),
            function,
            exports: KernelExports {
                params_size,
                params_hash,
                max_threads: u32::try_from(max_threads).unwrap_or(u32::MAX),
                shared_bytes,
                resident_blocks,
                cluster: u32::try_from(cluster).unwrap_or(u32::MAX),
                resident_clusters: None,
            },
            own,
            waits,
            allowed_shared: Mutex::new(without_opt_in.saturating_sub(own.static_shared)),
        };
        kernel.exports.resident_clusters = Self::resident_clusters(&kernel)?;
        Ok(kernel)
    }

    /// Clusters of a kernel's largest blocks that the device runs at once, for a kernel launched in
    /// clusters.
    fn resident_clusters(kernel: &Kernel) -> Result<Option<u32>> {
        let KernelExports { cluster, max_threads, shared_bytes, .. } = kernel.exports;
        let bytes = shared_bytes.and_then(|bytes| u32::try_from(bytes).ok()).unwrap_or(0);
        // A cluster that does not fit is rejected at the launch.
        if !(2..=MOST_CLUSTER_BLOCKS).contains(&cluster)
            || Self::allow_shared(kernel, bytes).is_err()
        {
            return Ok(None);
        }
        let config = sys::CUlaunchConfig {
            gridDimX: cluster,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: max_threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: bytes,
            hStream: std::ptr::null_mut(),
            attrs: std::ptr::null_mut(),
            numAttrs: 0,
        };
        let mut clusters = 0;
        // SAFETY: the function belongs to a loaded module, and its context is current; both
        // pointers are to what outlives the call.
        let result = unsafe {
            sys::cuOccupancyMaxActiveClusters(&raw mut clusters, kernel.function, &raw const config)
        };
        check(result, format_args!("cuOccupancyMaxActiveClusters({})", kernel.name))?;
        Ok(u32::try_from(clusters).ok().filter(|clusters| *clusters > 0))
    }

    /// Allows this kernel more dynamic shared memory than the driver's default.
    fn allow_shared(kernel: &Kernel, bytes: u32) -> Result<()> {
        let mut allowed = locked(&kernel.allowed_shared);
        if u64::from(bytes) <= *allowed {
            return Ok(());
        }
        let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function belongs to a loaded module, and its context is current.
        let result =
            unsafe { sys::cuFuncSetAttribute(kernel.function, attribute, bytes.cast_signed()) };
        check(
            result,
            format_args!(
                "cuFuncSetAttribute({}, {bytes} bytes of dynamic shared memory)",
                kernel.name
            ),
        )?;
        *allowed = bytes.into();
        Ok(())
    }
}

impl LoadedModule for CudaModule {
    fn exports(&self, kernel: &str) -> Result<KernelExports> {
        Ok(self.kernel(kernel)?.exports)
    }

    fn launch(
        &self,
        kernel: &str,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        params: &[u8],
    ) -> Result<()> {
        let kernel = self.kernel(kernel)?;
        let context = self.code.context();
        let refused = |reason| RuntimeError::Launch { kernel: kernel.name.to_string(), reason };
        check_limits(&context.properties, &kernel.exports, kernel.own, grid, block, shared_bytes)
            .map_err(refused)?;
        if params.len() as u64 != kernel.exports.params_size {
            let expected = kernel.exports.params_size;
            return Err(refused(format!(
                "{} bytes of parameters, but the kernel takes {expected}",
                params.len()
            )));
        }
        context.enter()?;
        Self::allow_shared(&kernel, shared_bytes)?;
        let params = aligned(params);
        let shape = Shape { grid, block, shared_bytes, waits: kernel.waits };
        // SAFETY: the function is of this module, which is loaded; its parameter is as large as
        // the exported size, of which `params` holds at least as many bytes; the macro that
        // exports `waits` puts the wait before the kernel's first line.
        let result = unsafe { launch(context, kernel.function, shape, params.as_ptr().cast()) };
        context.check(result, format_args!("cuLaunchKernelEx({})", kernel.name))?;
        context.note_launch(&kernel.name);
        Ok(())
    }
}

/// The bytes at an address aligned to 16, at least one element.
fn aligned(bytes: &[u8]) -> Vec<u128> {
    let mut units = vec![0u128; bytes.len().div_ceil(16).max(1)];
    for (unit, chunk) in units.iter_mut().zip(bytes.chunks(16)) {
        let mut whole = [0; 16];
        whole[..chunk.len()].copy_from_slice(chunk);
        *unit = u128::from_ne_bytes(whole);
    }
    units
}

/// The limit that a launch would exceed, with both values.
fn check_limits(
    device: &Properties,
    exports: &KernelExports,
    own: OwnLimits,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
) -> std::result::Result<(), String> {
    for (what, size, most) in [("grid", grid, device.max_grid), ("block", block, device.max_block)]
    {
        for ((axis, size), most) in ["x", "y", "z"].into_iter().zip(size).zip(most) {
            if size == 0 || size > most {
                return Err(format!("{what} dimension {axis} is {size}, outside of 1 to {most}"));
            }
        }
    }
    if let Some(reason) = exports.cluster_misfit(grid, MOST_CLUSTER_BLOCKS) {
        return Err(reason);
    }
    let threads: u64 = block.iter().map(|&size| u64::from(size)).product();
    let most = exports.max_threads.min(own.max_threads).min(device.max_threads);
    if threads > most.into() {
        return Err(format!(
            "{threads} threads in a block, but this kernel on this device takes at most {most}"
        ));
    }
    let most = device.shared_opt_in.saturating_sub(own.static_shared);
    if u64::from(shared_bytes) > most {
        let own = own.static_shared;
        return Err(format!(
            "{shared_bytes} bytes of dynamic shared memory, but {most} are left beside {own} static ones"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: OwnLimits = OwnLimits { static_shared: 1024, max_threads: 512 };

    fn device() -> Properties {
        Properties {
            name: "a GPU".into(),
            capability: (9, 0),
            sms: 132,
            driver: String::new(),
            max_grid: [i32::MAX as u32, 65535, 65535],
            max_block: [1024, 1024, 64],
            max_threads: 1024,
            shared_without_opt_in: 49152,
            shared_opt_in: 232448,
        }
    }

    fn refusal(grid: [u32; 3], block: [u32; 3], shared_bytes: u32) -> Option<String> {
        refusal_in_clusters(1, grid, block, shared_bytes)
    }

    fn refusal_in_clusters(
        cluster: u32,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
    ) -> Option<String> {
        let exports = KernelExports {
            params_size: 8,
            params_hash: 0,
            max_threads: 256,
            shared_bytes: None,
            resident_blocks: None,
            cluster,
            resident_clusters: None,
        };
        check_limits(&device(), &exports, OWN, grid, block, shared_bytes).err()
    }

    #[test]
    fn launches_within_the_limits_pass() {
        assert_eq!(refusal([1, 1, 1], [1, 1, 1], 0), None);
        assert_eq!(refusal([i32::MAX as u32, 65535, 65535], [256, 1, 1], 232448 - 1024), None);
    }

    #[test]
    fn launches_beyond_a_limit_are_refused_with_both_numbers() {
        for (grid, block, shared, words) in [
            ([0, 1, 1], [1, 1, 1], 0, ["grid dimension x is 0", "2147483647"]),
            ([1, 65536, 1], [1, 1, 1], 0, ["grid dimension y is 65536", "65535"]),
            ([1, 1, 1], [1, 1, 65], 0, ["block dimension z is 65", "64"]),
            ([1, 1, 1], [257, 1, 1], 0, ["257 threads", "256"]),
            ([1, 1, 1], [32, 32, 64], 0, ["65536 threads", "256"]),
            ([1, 1, 1], [1, 1, 1], 231425, ["231425 bytes", "231424"]),
        ] {
            let reason = refusal(grid, block, shared).expect("refused");
            assert!(words.iter().all(|word| reason.contains(word)), "{reason}");
        }
    }

    #[test]
    fn grids_of_clusters_are_whole_clusters() {
        let refusal =
            |cluster, blocks| refusal_in_clusters(cluster, [blocks, 1, 1], [256, 1, 1], 0);
        assert_eq!((refusal(2, 132), refusal(8, 8)), (None, None));
        assert!(
            refusal(2, 131).is_some_and(
                |reason| reason.contains("131 blocks") && reason.contains("cluster's 2")
            )
        );
        assert!([0, 9].into_iter().all(|cluster| refusal(cluster, 144).is_some()));
    }

    #[test]
    fn parameters_keep_their_bytes_when_aligned() {
        for length in [0, 1, 16, 17, 40] {
            let bytes: Vec<u8> = (0..length).collect();
            let units = aligned(&bytes);
            let back: Vec<u8> = units.iter().flat_map(|unit| unit.to_ne_bytes()).collect();
            assert_eq!(&back[..bytes.len()], bytes);
            assert_eq!(units.as_ptr().addr() % 16, 0);
        }
    }

    #[test]
    fn targets_take_their_own_variant_from_hopper_on() {
        let target = |capability| Properties { capability, ..device() }.target();
        assert_eq!(target((8, 0)), "sm_80");
        assert_eq!(target((8, 9)), "sm_89");
        assert_eq!(target((9, 0)), "sm_90a");
        assert_eq!(target((10, 0)), "sm_100a");
    }
}
