//! The rate of a bf16 matrix product through cublasLt: what the device can do, for rooflines.

use std::path::Path;
use std::sync::OnceLock;

use cudarc::cublaslt::sys::{self as lt, cublasStatus_t};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use super::CudaBackend;
use super::library::{Places, Wanted, loader_reason, search};
use crate::runtime::backend::{Allocation, Backend, Placement};
use crate::runtime::error::{Result, RuntimeError};

const CUBLASLT: Wanted = Wanted {
    file: "libcublasLt.so",
    loader_names: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
    variable: None,
    wheel_folders: &["nvidia/cu13/lib", "nvidia/cublas/lib"],
};

/// Scratch memory that an algorithm may ask for, bytes; NVIDIA's advice for Hopper.
const WORKSPACE: usize = 32 << 20;

/// Untimed products first: the library loads its kernels, the clock rises.
const WARM_UPS: usize = 3;

/// Seconds of each of `repeats` products `c = a b^T` of row-major bf16 `[n, n]` matrices with fp32
/// accumulation (2 n^3 FLOP each), by CUDA events. This is the layout of a linear layer. `a`, `b`
/// and `c` are device addresses of `2 n^2` bytes each; fill `a` and `b` with random numbers, since
/// zeros draw less power and run faster.
///
/// # Errors
/// [`RuntimeError::BackendMissing`] that names cublasLt where it is not to be found;
/// [`RuntimeError::Argument`] for an `n` that is no positive multiple of 8.
pub fn bf16_matmul_seconds(
    backend: &CudaBackend,
    n: usize,
    a: u64,
    b: u64,
    c: u64,
    repeats: usize,
) -> Result<Vec<f64>> {
    let rule = |name, value: &dyn std::fmt::Display, rule: &str| {
        RuntimeError::argument("bf16_matmul", name, format!("{value} is not {rule}"))
    };
    if n == 0 || !n.is_multiple_of(8) || n > 1 << 20 {
        return Err(rule("n", &n, "a multiple of 8 from 8 to 2^20"));
    }
    for (name, address) in [("a", a), ("b", b), ("c", c)] {
        if address == 0 || !address.is_multiple_of(16) {
            return Err(rule(name, &address, "an address aligned to 16 bytes"));
        }
    }
    load_library(backend.nvrtc().path())?;
    backend.context.enter()?;
    let product = Product::plan(backend, n)?;
    for _ in 0..WARM_UPS {
        product.enqueue(a, b, c)?;
    }
    let timed = || backend.time(&mut || product.enqueue(a, b, c)).map(|time| time.as_secs_f64());
    (0..repeats).map(|_| timed()).collect()
}

/// Makes cublasLt findable for cudarc, whose first call would panic without it.
fn load_library(nvrtc: &Path) -> Result<()> {
    static FOUND: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    // SAFETY: only asks the loader for the names that cudarc uses later.
    let present = || unsafe { lt::is_culib_present() };
    let found = FOUND.get_or_init(|| {
        if present() {
            return Ok(());
        }
        let places = Places::of_process().after(nvrtc.parent());
        let path = search(&CUBLASLT, &places, preload)?;
        // cudarc asks by name, which the loader answers with what is loaded under that name.
        if present() { Ok(()) } else { Err(format!("{path} has a version that is not known here")) }
    });
    found.clone().map_err(|reason| RuntimeError::BackendMissing {
        backend: "cuda",
        reason: format!("the matrix product needs cublasLt: {reason}"),
    })
}

fn preload(path: &Path) -> std::result::Result<String, String> {
    // SAFETY: loading runs the library's initialisers; a file by this name in CUDA's places is
    // trusted to be cublasLt.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.map_err(loader_reason)?;
    std::mem::forget(library);
    Ok(path.display().to_string())
}

fn check(status: cublasStatus_t, call: &str) -> Result<()> {
    if status == cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    let message = "cublasLt gives no further description".into();
    Err(RuntimeError::Cuda { call: call.into(), name: format!("{status:?}"), message })
}

/// A handle of cublasLt; destroyed when dropped.
struct Owned<T: Copy> {
    handle: T,
    destroy: unsafe fn(T) -> cublasStatus_t,
}

impl<T: Copy> Owned<*mut T> {
    fn create(
        call: &str,
        create: impl FnOnce(&mut *mut T) -> cublasStatus_t,
        destroy: unsafe fn(*mut T) -> cublasStatus_t,
    ) -> Result<Self> {
        let mut handle = std::ptr::null_mut();
        check(create(&mut handle), call)?;
        Ok(Self { handle, destroy })
    }
}

impl<T: Copy> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: created by the matching function, destroyed only here.
        let _ = unsafe { (self.destroy)(self.handle) };
    }
}

/// Device memory of this module's own; freed when dropped.
struct Scratch<'a> {
    backend: &'a CudaBackend,
    allocation: Allocation,
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        self.backend.free(&self.allocation);
    }
}

/// A chosen algorithm and everything that a call of it needs.
struct Product<'a> {
    handle: Owned<lt::cublasLtHandle_t>,
    operation: Owned<lt::cublasLtMatmulDesc_t>,
    layout: Owned<lt::cublasLtMatrixLayout_t>,
    algorithm: lt::cublasLtMatmulAlgo_t,
    workspace: Scratch<'a>,
}

impl<'a> Product<'a> {
    fn plan(backend: &'a CudaBackend, n: usize) -> Result<Self> {
        let allocation = backend.allocate("cublasLt workspace", WORKSPACE, Placement::FlushBack)?;
        let workspace = Scratch { backend, allocation };
        // SAFETY: the context is current, as cublasLt requires.
        let handle = Owned::create("cublasLtCreate", |h| unsafe { lt::cublasLtCreate(h) }, lt::cublasLtDestroy)?;
        let operation = transposed_times_plain()?;
        let side = n as u64;
        // SAFETY: writes one live handle; one layout serves all three square matrices.
        let make = |h: &mut _| unsafe {
            lt::cublasLtMatrixLayoutCreate(h, lt::cudaDataType_t::CUDA_R_16BF, side, side, side.cast_signed())
        };
        let layout = Owned::create("cublasLtMatrixLayoutCreate", make, lt::cublasLtMatrixLayoutDestroy)?;
        let algorithm = choose_algorithm(handle.handle, operation.handle, layout.handle)?;
        Ok(Self { handle, operation, layout, algorithm, workspace })
    }

    /// cublasLt thinks in columns: the row-major `c = a b^T` is `c^T = b a^T` to it, where the
    /// memory of `b` reads as `b^T` (hence transposed) and that of `a` as `a^T`.
    fn enqueue(&self, a: u64, b: u64, c: u64) -> Result<()> {
        self.workspace.backend.context.enter()?;
        let (alpha, beta) = (1f32, 0f32);
        let layout = self.layout.handle;
        // SAFETY: handles and descriptors are alive; the scales are fp32 as the descriptor says;
        // the caller's addresses hold [n, n] bf16 each; the workspace outlives the work, since its
        // drop waits for the stream.
        let status = unsafe {
            lt::cublasLtMatmul(
                self.handle.handle,
                self.operation.handle,
                (&raw const alpha).cast(),
                b as *const _,
                layout,
                a as *const _,
                layout,
                (&raw const beta).cast(),
                c as *const _,
                layout,
                c as *mut _,
                layout,
                &self.algorithm,
                self.workspace.allocation.address as *mut _,
                WORKSPACE,
                self.workspace.backend.context.stream().cast(),
            )
        };
        check(status, "cublasLtMatmul")
    }
}

/// Left operand transposed, right one as it is; fp32 accumulation and scales.
fn transposed_times_plain() -> Result<Owned<lt::cublasLtMatmulDesc_t>> {
    // SAFETY: writes one live handle.
    let make = |h: &mut _| unsafe {
        lt::cublasLtMatmulDescCreate(h, lt::cublasComputeType_t::CUBLAS_COMPUTE_32F, lt::cudaDataType_t::CUDA_R_32F)
    };
    let operation = Owned::create("cublasLtMatmulDescCreate", make, lt::cublasLtMatmulDescDestroy)?;
    let transposed: i32 = 1; // CUBLAS_OP_T
    // SAFETY: the attribute is an i32, which is live during the call.
    let status = unsafe {
        lt::cublasLtMatmulDescSetAttribute(
            operation.handle,
            lt::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
            (&raw const transposed).cast(),
            size_of_val(&transposed),
        )
    };
    check(status, "cublasLtMatmulDescSetAttribute")?;
    Ok(operation)
}

/// The algorithm that cublasLt's heuristic puts first.
fn choose_algorithm(
    handle: lt::cublasLtHandle_t,
    operation: lt::cublasLtMatmulDesc_t,
    layout: lt::cublasLtMatrixLayout_t,
) -> Result<lt::cublasLtMatmulAlgo_t> {
    // SAFETY: writes one live handle.
    let make = |h: &mut _| unsafe { lt::cublasLtMatmulPreferenceCreate(h) };
    let preference = Owned::create("cublasLtMatmulPreferenceCreate", make, lt::cublasLtMatmulPreferenceDestroy)?;
    let most = WORKSPACE;
    // SAFETY: the attribute is a size_t, which is live during the call.
    let status = unsafe {
        lt::cublasLtMatmulPreferenceSetAttribute(
            preference.handle,
            lt::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            (&raw const most).cast(),
            size_of_val(&most),
        )
    };
    check(status, "cublasLtMatmulPreferenceSetAttribute")?;
    // SAFETY: integers, floats and a status whose zero is success: all zeros are valid.
    let mut best: lt::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
    let mut count = 0;
    // SAFETY: all handles are alive, and one result is asked for, for which there is room.
    let status = unsafe {
        lt::cublasLtMatmulAlgoGetHeuristic(
            handle,
            operation,
            layout,
            layout,
            layout,
            layout,
            preference.handle,
            1,
            &mut best,
            &mut count,
        )
    };
    check(status, "cublasLtMatmulAlgoGetHeuristic")?;
    if count == 0 {
        check(cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED, "cublasLtMatmulAlgoGetHeuristic")?;
    }
    Ok(best.algo)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named() {
        match load_library(Path::new("/nonexistent/libnvrtc.so.13")) {
            Ok(()) => eprintln!("skipped: this machine has cublasLt"),
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("cublasLt") && text.contains("/nonexistent"), "{text}");
            }
        }
    }
}
