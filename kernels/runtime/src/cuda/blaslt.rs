//! GEMMs by cublasLt: of bf16, the kernels that a user would call, and of bf16 and e4m3 the
//! device's rates for rooflines.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

use cudarc::cublaslt::sys::{self as lt, cublasStatus_t};
use cudarc::driver::sys as cuda;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use serde::{Deserialize, Serialize};

use super::CudaBackend;
use super::driver::{self, Context, locked};
use super::library::{Places, Wanted, loader_reason, search};
use crate::backend::Backend;
use crate::error::{Result, RuntimeError};
use crate::matrix::{Matrix, MatrixProduct};
use crate::tensor::DType;

const CUBLASLT: Wanted = Wanted {
    file: "libcublasLt.so",
    loader_names: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
    variable: None,
    wheel_folders: &["nvidia/cu13/lib", "nvidia/cublas/lib"],
};

/// The name of a GEMM in errors.
const CALL: &str = "cublasLtMatmul";

/// Scratch memory that an algorithm may use, bytes; NVIDIA's advice for Hopper.
const WORKSPACE: usize = 32 << 20;

/// Untimed GEMMs before the timed ones: the library loads its kernels, the clock rises.
const WARM_UPS: usize = 3;

/// The most plans that are kept: a sweep has another shape in each case.
const MOST_PLANS: usize = 256;

/// A larger alignment of addresses makes no difference to the library.
const LARGEST_ALIGNMENT: u32 = 256;

/// What the elements of both factors are. Sums are fp32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operands {
    /// bf16, 2 bytes each.
    #[default]
    Bf16,
    /// e4m3 without scales, 1 byte each; the output is bf16 or fp32. cublasLt has these for
    /// `a b^T` alone, and adds on the tensor cores (`FAST_ACCUM`), as its users have it.
    E4m3,
}

impl Operands {
    fn bytes(self) -> u64 {
        match self {
            Self::Bf16 => 2,
            Self::E4m3 => 1,
        }
    }

    fn dtype(self) -> lt::cudaDataType_t {
        match self {
            Self::Bf16 => lt::cudaDataType_t::CUDA_R_16BF,
            Self::E4m3 => lt::cudaDataType_t::CUDA_R_8F_E4M3,
        }
    }
}

/// Seconds of each of `repeats` products `c = a b^T` of row-major `[n, n]` matrices with fp32
/// accumulation and a bf16 result (2 n^3 FLOP each), by CUDA events. This is the layout of a linear
/// layer. `a`, `b` and `c` are device addresses of n^2 elements each; fill `a` and `b` with random
/// numbers, since zeros draw less power and run faster.
///
/// # Errors
/// [`RuntimeError::BackendMissing`] that names cublasLt if it cannot be found;
/// [`RuntimeError::Argument`] for an `n` that is not a positive multiple of 16.
pub fn matmul_seconds(
    backend: &CudaBackend,
    operands: Operands,
    n: usize,
    [a, b, c]: [u64; 3],
    repeats: usize,
) -> Result<Vec<f64>> {
    let rule = |name, value: &dyn std::fmt::Display, rule: &str| {
        RuntimeError::argument("matmul_seconds", name, format!("{value} is not {rule}"))
    };
    if n == 0 || !n.is_multiple_of(16) || n > 1 << 15 {
        return Err(rule("n", &n, "a multiple of 16 from 16 to 2^15"));
    }
    for (name, address) in [("a", a), ("b", b), ("c", c)] {
        if address == 0 || !address.is_multiple_of(16) {
            return Err(rule(name, &address, "an address aligned to 16 bytes"));
        }
    }
    load(backend.nvrtc().path())?;
    let library = backend.blaslt()?;
    let matrix = |address| Matrix { address, stride: n as i64, extents: [n, n], step: 0 };
    let product = MatrixProduct {
        a: matrix(a),
        b: matrix(b),
        transposed: [false, true],
        before: None,
        out: matrix(c),
        dtype: DType::Bf16,
        count: 1,
    };
    let multiply = || match library.multiply_of(&product, operands)? {
        true => Ok(()),
        false => check(cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED, CALL),
    };
    for _ in 0..WARM_UPS {
        multiply()?;
    }
    let timed = || backend.time(&mut || multiply()).map(|time| time.as_secs_f64());
    (0..repeats).map(|_| timed()).collect()
}

/// Makes cublasLt findable for cudarc, whose first call would panic without it; `nvrtc` may be in
/// the same folder.
///
/// # Errors
/// [`RuntimeError::BackendMissing`] if it cannot be found.
pub(super) fn load(nvrtc: &Path) -> Result<()> {
    static FOUND: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    // SAFETY: only searches the loader for the names that cudarc uses later.
    let present = || unsafe { lt::is_culib_present() };
    let found = FOUND.get_or_init(|| {
        if present() {
            return Ok(());
        }
        let places = Places::of_process().after(nvrtc.parent());
        let path = search(&CUBLASLT, &places, preload)?;
        // cudarc loads by name, and the loader returns the library that is loaded under that name.
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
    let library =
        unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.map_err(loader_reason)?;
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

type Operation = Owned<lt::cublasLtMatmulDesc_t>;
type Layout = Owned<lt::cublasLtMatrixLayout_t>;

/// Device memory of this module; freed when dropped.
struct Scratch {
    context: Arc<Context>,
    address: u64,
}

impl Scratch {
    fn allocate(context: &Arc<Context>) -> Result<Self> {
        context.enter()?;
        let mut address = 0;
        // SAFETY: the context is current; the memory is freed once, in `drop`.
        let result = unsafe { cuda::cuMemAlloc_v2(&mut address, WORKSPACE) };
        context.check(result, format_args!("cuMemAlloc(cublasLt workspace, {WORKSPACE} bytes)"))?;
        Ok(Self { context: context.clone(), address })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Enqueued work may still use it; after a fault nothing more can be done.
        let _ = self.context.synchronize();
        // SAFETY: allocated in `allocate`, freed only here.
        let result = unsafe { cuda::cuMemFree_v2(self.address) };
        if let Err(error) = driver::check(result, "cuMemFree(cublasLt workspace)") {
            tracing::debug!("{error}");
        }
    }
}

/// All properties that the choice of an algorithm depends on: a GEMM without its addresses, but
/// with their alignments.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    product: MatrixProduct,
    operands: Operands,
    alignments: [u32; 4],
}

impl Shape {
    fn of(product: &MatrixProduct, operands: Operands) -> Self {
        let MatrixProduct { a, b, before, out, .. } = *product;
        // The alignments of the addresses of b, a, before and out, as cublasLt has them.
        let bytes = operands.bytes();
        let sizes = [bytes, bytes, product.dtype.size() as u64, product.dtype.size() as u64];
        let alignments =
            [b, a, before.unwrap_or(out), out].map(|matrix| (matrix.address, matrix.step as u64));
        let alignments =
            std::array::from_fn(|i| alignment(alignments[i].0 | (alignments[i].1 * sizes[i])));
        let anywhere = |matrix: Matrix| Matrix { address: 0, ..matrix };
        let (a, b, before, out) = (anywhere(a), anywhere(b), before.map(anywhere), anywhere(out));
        Self { product: MatrixProduct { a, b, before, out, ..*product }, operands, alignments }
    }
}

fn alignment(address: u64) -> u32 {
    1u32.checked_shl(address.trailing_zeros()).unwrap_or(LARGEST_ALIGNMENT).min(LARGEST_ALIGNMENT)
}

/// A matrix as cublasLt has it, column-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Columns {
    rows: u64,
    columns: u64,
    /// Elements from a column to the next.
    leading: i64,
    /// Elements from a matrix to the next.
    step: i64,
}

impl Columns {
    /// The transpose of a matrix: its rows are columns then.
    fn of_transposed(matrix: Matrix) -> Self {
        let [rows, columns] = matrix.extents.map(|extent| extent as u64);
        Self { rows: columns, columns: rows, leading: matrix.stride, step: matrix.step }
    }
}

/// The operands of `D = op(A) op(B) + C` that is the transpose of a GEMM, `out^T = b^T a^T +
/// before^T`: A, B, C and D, and whether op transposes A, and B.
fn transposed_product(product: &MatrixProduct) -> ([Columns; 4], [bool; 2]) {
    let MatrixProduct { a, b, transposed, before, out, .. } = *product;
    let operands = [b, a, before.unwrap_or(out), out].map(Columns::of_transposed);
    (operands, [transposed[1], transposed[0]])
}

/// A chosen algorithm and its descriptors.
struct Plan {
    operation: Operation,
    layouts: [Layout; 4],
    algorithm: lt::cublasLtMatmulAlgo_t,
}

/// cublasLt on one device.
pub(super) struct Blaslt {
    handle: Owned<lt::cublasLtHandle_t>,
    /// GEMMs run one after the other on one stream and share it.
    workspace: Scratch,
    name: Arc<str>,
    /// `None` where the library has no algorithm.
    plans: Mutex<HashMap<Shape, Option<Arc<Plan>>>>,
}

// SAFETY: the handles belong to the process, not to a thread, cublasLt may be called from any
// number of threads, and nothing changes a descriptor once it is part of a plan.
unsafe impl Send for Blaslt {}
// SAFETY: as above.
unsafe impl Sync for Blaslt {}
// SAFETY: as above; a plan's handles are only read.
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

impl Blaslt {
    /// Call it after [`load`] has found the library.
    ///
    /// # Errors
    /// Errors of the library, and of the driver: no memory.
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        let workspace = Scratch::allocate(context)?;
        // SAFETY: the context is current, as cublasLt requires.
        let handle = Owned::create(
            "cublasLtCreate",
            |h| unsafe { lt::cublasLtCreate(h) },
            lt::cublasLtDestroy,
        )?;
        Ok(Self { handle, workspace, name: CALL.into(), plans: Mutex::default() })
    }

    fn plan(&self, product: &MatrixProduct, operands: Operands) -> Result<Option<Arc<Plan>>> {
        let shape = Shape::of(product, operands);
        let mut plans = locked(&self.plans);
        if let Some(plan) = plans.get(&shape) {
            return Ok(plan.clone());
        }
        if plans.len() == MOST_PLANS {
            plans.clear();
        }
        let plan = Plan::choose(&self.handle, &shape)?.map(Arc::new);
        plans.insert(shape, plan.clone());
        Ok(plan)
    }

    /// Enqueues a GEMM of bf16; returns whether there is an algorithm for it.
    pub fn multiply(&self, product: &MatrixProduct) -> Result<bool> {
        self.multiply_of(product, Operands::Bf16)
    }

    fn multiply_of(&self, product: &MatrixProduct, operands: Operands) -> Result<bool> {
        let context = &self.workspace.context;
        context.enter()?;
        let Some(plan) = self.plan(product, operands)? else { return Ok(false) };
        let [of_a, of_b, of_c, of_d] = plan.layouts.each_ref().map(|layout| layout.handle);
        let MatrixProduct { a, b, before, out, .. } = *product;
        // Without a `before`, that operand is not read.
        let (alpha, beta) = (1f32, if before.is_some() { 1f32 } else { 0f32 });
        // SAFETY: handles and descriptors are alive; the scales are fp32 as the descriptor
        // declares; the caller's addresses hold what the layouts describe; the workspace outlives
        // the work, since its drop waits for the stream.
        let status = unsafe {
            lt::cublasLtMatmul(
                self.handle.handle,
                plan.operation.handle,
                (&raw const alpha).cast(),
                b.address as *const _,
                of_a,
                a.address as *const _,
                of_b,
                (&raw const beta).cast(),
                before.unwrap_or(out).address as *const _,
                of_c,
                out.address as *mut _,
                of_d,
                &plan.algorithm,
                self.workspace.address as *mut _,
                WORKSPACE,
                context.stream().cast(),
            )
        };
        check(status, CALL)?;
        context.note_launch(&self.name);
        Ok(true)
    }
}

impl Plan {
    /// The first algorithm of cublasLt's heuristic; `None` if it has none.
    fn choose(handle: &Owned<lt::cublasLtHandle_t>, shape: &Shape) -> Result<Option<Self>> {
        let (columns, transposed) = transposed_product(&shape.product);
        let out_type = match shape.product.dtype {
            DType::F32 => lt::cudaDataType_t::CUDA_R_32F,
            _ => lt::cudaDataType_t::CUDA_R_16BF,
        };
        let [a, b, c, d] = columns;
        let operand = shape.operands.dtype();
        let layout = |columns, dtype| layout(columns, dtype, shape.product.count);
        let layouts =
            [layout(a, operand)?, layout(b, operand)?, layout(c, out_type)?, layout(d, out_type)?];
        let operation = operation(transposed, shape.operands)?;
        let algorithm = choose_algorithm(handle, &operation, &layouts, shape.alignments)?;
        Ok(algorithm.map(|algorithm| Self { operation, layouts, algorithm }))
    }
}

/// The layout of `count` matrices.
fn layout(columns: Columns, dtype: lt::cudaDataType_t, count: usize) -> Result<Layout> {
    use lt::cublasLtMatrixLayoutAttribute_t as Attribute;
    let Columns { rows, columns, leading, step } = columns;
    // SAFETY: writes one live handle.
    let make =
        |h: &mut _| unsafe { lt::cublasLtMatrixLayoutCreate(h, dtype, rows, columns, leading) };
    let layout =
        Owned::create("cublasLtMatrixLayoutCreate", make, lt::cublasLtMatrixLayoutDestroy)?;
    if count == 1 {
        return Ok(layout);
    }
    let set = |attribute, at: *const std::ffi::c_void, bytes: usize| {
        // SAFETY: `at` points to a live value of that many bytes, which is the attribute's type.
        let status =
            unsafe { lt::cublasLtMatrixLayoutSetAttribute(layout.handle, attribute, at, bytes) };
        check(status, "cublasLtMatrixLayoutSetAttribute")
    };
    let too_many =
        |_| RuntimeError::argument(CALL, "count", format!("{count} products are too many"));
    let matrices = i32::try_from(count).map_err(too_many)?;
    set(
        Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
        (&raw const matrices).cast(),
        size_of_val(&matrices),
    )?;
    set(
        Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
        (&raw const step).cast(),
        size_of_val(&step),
    )?;
    Ok(layout)
}

/// fp32 accumulation and scales; whether A and B are transposed.
fn operation(transposed: [bool; 2], operands: Operands) -> Result<Operation> {
    // SAFETY: writes one live handle.
    let make = |h: &mut _| unsafe {
        lt::cublasLtMatmulDescCreate(
            h,
            lt::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            lt::cudaDataType_t::CUDA_R_32F,
        )
    };
    let operation = Owned::create("cublasLtMatmulDescCreate", make, lt::cublasLtMatmulDescDestroy)?;
    use lt::cublasLtMatmulDescAttributes_t as Attribute;
    let attributes =
        [Attribute::CUBLASLT_MATMUL_DESC_TRANSA, Attribute::CUBLASLT_MATMUL_DESC_TRANSB];
    for (attribute, transposed) in attributes.into_iter().zip(transposed) {
        // CUBLAS_OP_N and CUBLAS_OP_T.
        let value = i32::from(transposed);
        // SAFETY: the attribute is an i32, which is live during the call.
        let status = unsafe {
            let at = (&raw const value).cast();
            lt::cublasLtMatmulDescSetAttribute(operation.handle, attribute, at, size_of_val(&value))
        };
        check(status, "cublasLtMatmulDescSetAttribute")?;
    }
    if operands == Operands::E4m3 {
        let (attribute, fast) = (Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, 1i8);
        // SAFETY: the attribute is an i8, which is live during the call.
        let status = unsafe {
            let at = (&raw const fast).cast();
            lt::cublasLtMatmulDescSetAttribute(operation.handle, attribute, at, size_of_val(&fast))
        };
        check(status, "cublasLtMatmulDescSetAttribute")?;
    }
    Ok(operation)
}

/// What an algorithm may do: use this much scratch memory, and add parts of k in fp32, each in a
/// deterministic order; and which alignments it may rely on.
fn preference(alignments: [u32; 4]) -> Result<Owned<lt::cublasLtMatmulPreference_t>> {
    use lt::cublasLtMatmulPreferenceAttributes_t as Attribute;
    // SAFETY: writes one live handle.
    let make = |h: &mut _| unsafe { lt::cublasLtMatmulPreferenceCreate(h) };
    let preference =
        Owned::create("cublasLtMatmulPreferenceCreate", make, lt::cublasLtMatmulPreferenceDestroy)?;
    let set = |attribute, at: *const std::ffi::c_void, bytes: usize| {
        // SAFETY: `at` points to a live value of that many bytes, which is the attribute's type.
        let status = unsafe {
            lt::cublasLtMatmulPreferenceSetAttribute(preference.handle, attribute, at, bytes)
        };
        check(status, "cublasLtMatmulPreferenceSetAttribute")
    };
    let most = WORKSPACE;
    set(
        Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
        (&raw const most).cast(),
        size_of_val(&most),
    )?;
    // Not in the output's type: partial sums would be rounded to bf16.
    let schemes = lt::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
    set(
        Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        (&raw const schemes).cast(),
        size_of_val(&schemes),
    )?;
    let attributes = [
        Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
        Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
        Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
    ];
    for (attribute, alignment) in attributes.into_iter().zip(&alignments) {
        set(attribute, std::ptr::from_ref(alignment).cast(), size_of_val(alignment))?;
    }
    Ok(preference)
}

fn choose_algorithm(
    handle: &Owned<lt::cublasLtHandle_t>,
    operation: &Operation,
    layouts: &[Layout; 4],
    alignments: [u32; 4],
) -> Result<Option<lt::cublasLtMatmulAlgo_t>> {
    let preference = preference(alignments)?;
    let [a, b, c, d] = layouts.each_ref().map(|layout| layout.handle);
    // SAFETY: integers, floats and a status whose zero is success: all zeros are valid.
    let mut best: lt::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
    let mut count = 0;
    // SAFETY: all handles are alive, and one result is requested, for which there is room.
    let status = unsafe {
        lt::cublasLtMatmulAlgoGetHeuristic(
            handle.handle,
            operation.handle,
            a,
            b,
            c,
            d,
            preference.handle,
            1,
            &mut best,
            &mut count,
        )
    };
    if status == cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED {
        return Ok(None);
    }
    check(status, "cublasLtMatmulAlgoGetHeuristic")?;
    Ok((count > 0).then_some(best.algo))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named() {
        match load(Path::new("/nonexistent/libnvrtc.so.13")) {
            Ok(()) => eprintln!("skipped: this machine has cublasLt"),
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("cublasLt") && text.contains("/nonexistent"), "{text}");
            }
        }
    }

    /// A matrix of these sizes, with a gap after each row.
    fn matrix(rows: usize, columns: usize) -> Matrix {
        Matrix { address: 0, stride: columns as i64 + 3, extents: [rows, columns], step: 0 }
    }

    /// A different value for each position in memory.
    fn number(operand: usize, at: i64) -> i64 {
        (at * 7 + operand as i64 * 5) % 11 - 5
    }

    /// Element (i, j) of op of a column-major operand.
    fn element(operand: usize, columns: Columns, transposed: bool, i: u64, j: u64) -> i64 {
        let (i, j) = if transposed { (j, i) } else { (i, j) };
        assert!(i < columns.rows && j < columns.columns && columns.leading >= columns.rows as i64);
        number(operand, i as i64 + j as i64 * columns.leading)
    }

    #[test]
    fn what_cublaslt_is_told_is_the_transpose_of_the_product() {
        let [rows, columns, depth] = [3usize, 4, 5];
        for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
            let a = if ta { matrix(depth, rows) } else { matrix(rows, depth) };
            let b = if tb { matrix(columns, depth) } else { matrix(depth, columns) };
            let out = matrix(rows, columns);
            let (transposed, before, dtype) = ([ta, tb], Some(out), DType::Bf16);
            let product = MatrixProduct { a, b, transposed, before, out, dtype, count: 1 };
            assert_eq!(product.depth(), depth);
            let ([of_a, of_b, of_c, of_d], [op_a, op_b]) = transposed_product(&product);
            assert_eq!((of_c, of_d.rows, of_d.columns), (of_d, columns as u64, rows as u64));
            let stored = |operand, matrix: Matrix, transposed, row: usize, column: usize| {
                let (row, column) = if transposed { (column, row) } else { (row, column) };
                number(operand, row as i64 * matrix.stride + column as i64)
            };
            for (row, column) in
                (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)))
            {
                let terms =
                    (0..depth).map(|k| stored(0, a, ta, row, k) * stored(1, b, tb, k, column));
                // cublasLt's A is b, and its B is a.
                let told = (0..depth as u64).map(|k| {
                    element(1, of_a, op_a, column as u64, k) * element(0, of_b, op_b, k, row as u64)
                });
                assert_eq!(told.sum::<i64>(), terms.sum::<i64>(), "{ta} {tb} {row} {column}");
            }
        }
    }

    #[test]
    fn products_of_one_shape_have_one_plan_wherever_they_lie_as_long_as_it_is_as_well_aligned() {
        let at = |address| MatrixProduct {
            a: Matrix { address, ..matrix(3, 5) },
            b: Matrix { address: 256, ..matrix(5, 4) },
            transposed: [false; 2],
            before: None,
            out: Matrix { address: 512, ..matrix(3, 4) },
            dtype: DType::F32,
            count: 1,
        };
        let shape = |product: &MatrixProduct| Shape::of(product, Operands::Bf16);
        assert!(shape(&at(1 << 20)) == shape(&at(3 << 20)));
        assert!(shape(&at(1 << 20)) != shape(&at((1 << 20) + 16)));
        assert!(shape(&at(256)) != shape(&MatrixProduct { dtype: DType::Bf16, ..at(256) }));
        assert!(shape(&at(256)) != Shape::of(&at(256), Operands::E4m3));
        assert_eq!([0, 16, 48, 256, 4096].map(alignment), [256, 16, 16, 256, 256]);
    }
}
