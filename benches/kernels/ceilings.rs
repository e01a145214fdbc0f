//! The ceilings of the device: measured in the same run, and from the data sheet.

use anyhow::{Result, anyhow};
use dsv4_parity::case::{Distribution, Draw};
use dsv4_parity::record::{Ceilings, Operands};
use dsv4_reference::cache::kv_cache::e4m3_code;
use dsv4_runtime::cache::ModuleCache;
use dsv4_runtime::cuda::{CudaBackend, blaslt};
use dsv4_runtime::{Contract, DType, Device, DeviceArena, HostTensor, RuntimeError, TensorView};

use crate::session::Callee;

/// Bytes of each side of the copy whose rate is the ceiling.
const COPY_BYTES: usize = 2 << 30;
/// Bytes of each side of the copies that are benchmarks. A copy of few bytes is far below the
/// ceiling, and so is every kernel.
pub const SMALLER_COPIES: [usize; 8] =
    [1 << 10, 1 << 20, 4 << 20, 16 << 20, 32 << 20, 40 << 20, 64 << 20, 256 << 20];
/// Least total bytes of the buffer sets of such a copy: several times the L2.
const COPIES_SPAN: usize = 512 << 20;
/// The most sets. Copies of few bytes would need more, but they measure launches and not memory.
const MOST_COPIES: usize = 64;
/// Size of the square GEMM.
const MATRIX: usize = 8192;
/// Random values for an operand, which repeats them.
const DRAWN: usize = 1 << 20;
/// Timed repetitions of each, after some untimed ones.
const REPEATS: usize = 15;
const WARM_UPS: usize = 3;

/// Rates that no measurement on a device can exceed, from its data sheet.
pub struct Datasheet {
    /// Bytes per second of device memory.
    pub bytes_per_second: f64,
    /// Dense FLOP per second of the narrowest operands, e4m3: twice those of bf16.
    pub flops_per_second: f64,
}

/// The data sheet of a device by the driver's name for it; `None` if this file has none.
pub fn datasheet(device: &str) -> Option<Datasheet> {
    device
        .starts_with("NVIDIA H200")
        .then_some(Datasheet { bytes_per_second: 4.8e12, flops_per_second: 1979e12 })
}

/// Measures the copy rate and, if cublasLt is found, the rates of GEMMs.
///
/// # Errors
/// The device's. A missing cublasLt is reported on stderr and is not an error.
pub fn measure(device: &Device) -> Result<Ceilings> {
    let ceilings = Ceilings {
        copy_bytes_per_second: copy_rate(device)?,
        matrix_flops_per_second: matrix_rate(device, Operands::Bf16)?,
        e4m3_flops_per_second: matrix_rate(device, Operands::E4m3)?,
    };
    let said = |rate: Option<f64>| match rate {
        Some(rate) => format!("{:.1} TFLOP/s", rate * 1e-12),
        None => "not measured".to_owned(),
    };
    let copy = ceilings.copy_bytes_per_second * 1e-9;
    println!(
        "device copy {copy:.0} GB/s (read + written), {MATRIX}^3 matrix product: bf16 {}, e4m3 {}\n",
        said(ceilings.matrix_flops_per_second),
        said(ceilings.e4m3_flops_per_second),
    );
    Ok(ceilings)
}

/// Bytes per second of a copy within the device, read plus written.
fn copy_rate(device: &Device) -> Result<f64> {
    let mut arena = DeviceArena::new(device, Contract::NAN);
    let source = normal(&mut arena, "copy source", &[COPY_BYTES / 2])?;
    let target = arena.output("copy target", DType::U8, &[COPY_BYTES])?;
    let backend = device.backend();
    let mut seconds = Vec::with_capacity(REPEATS);
    for repeat in 0..WARM_UPS + REPEATS {
        let time =
            backend.time(&mut || backend.copy(target.address, source.address, COPY_BYTES))?;
        if repeat >= WARM_UPS {
            seconds.push(time.as_secs_f64());
        }
    }
    Ok(2.0 * COPY_BYTES as f64 / median(seconds))
}

/// Copies by the driver of that many bytes, round-robin over sets of buffers. A kernel that moves
/// as many bytes is compared with them.
pub struct Copies<'d> {
    arena: DeviceArena<'d>,
    pairs: Vec<[TensorView; 2]>,
    bytes: usize,
}

impl<'d> Copies<'d> {
    /// Fills the sources with random values.
    ///
    /// # Errors
    /// The device's.
    pub fn place(device: &'d Device, bytes: usize) -> Result<Self> {
        let mut arena = DeviceArena::new(device, Contract::NAN);
        let sets = COPIES_SPAN.div_ceil(2 * bytes).clamp(2, MOST_COPIES);
        // One source is random, and the others are its copies.
        let first = normal(&mut arena, "source", &[bytes / 2])?;
        let mut pairs = vec![[first.clone(), arena.output("target", DType::U8, &[bytes])?]];
        for _ in 1..sets {
            let source = arena.output("source", DType::U8, &[bytes])?;
            device.backend().copy(source.address, first.address, bytes)?;
            pairs.push([source, arena.output("target", DType::U8, &[bytes])?]);
        }
        Ok(Self { arena, pairs, bytes })
    }
}

impl Callee for Copies<'_> {
    fn sets(&self) -> usize {
        self.pairs.len()
    }

    fn call(&self, set: usize) -> std::result::Result<(), RuntimeError> {
        let [source, target] = &self.pairs[set];
        self.arena.device().backend().copy(target.address, source.address, self.bytes)
    }

    fn recheck(&self, set: usize) -> Result<u64> {
        let read = |view: &TensorView| {
            let mut bytes = vec![0; self.bytes];
            self.arena.device().backend().download(view.address, &mut bytes).map(|()| bytes)
        };
        let [source, target] = &self.pairs[set];
        if read(source)? == read(target)? {
            Ok(self.bytes as u64)
        } else {
            Err(anyhow!("the copy is another one"))
        }
    }
}

/// A bf16 tensor of normally distributed random values, which repeat.
fn normal(arena: &mut DeviceArena<'_>, name: &str, shape: &[usize]) -> Result<TensorView> {
    let drawn = Draw::new(0, name).values(Distribution::Normal, 1, DRAWN, 1.0);
    let drawn = HostTensor::from_f64(DType::Bf16, &[DRAWN], &drawn);
    repeated(arena, name, &drawn, shape)
}

/// The e4m3 codes of such values.
fn normal_codes(arena: &mut DeviceArena<'_>, name: &str, shape: &[usize]) -> Result<TensorView> {
    let drawn = Draw::new(0, name).values(Distribution::Normal, 1, DRAWN, 1.0);
    let bytes = drawn.into_iter().map(e4m3_code).collect();
    repeated(arena, name, &HostTensor { dtype: DType::U8, shape: vec![DRAWN], bytes }, shape)
}

/// A tensor of the drawn elements, again and again.
fn repeated(
    arena: &mut DeviceArena<'_>,
    name: &str,
    drawn: &HostTensor,
    shape: &[usize],
) -> Result<TensorView> {
    let view = arena.output(name, drawn.dtype, shape)?;
    let drawn = &drawn.bytes;
    let bytes = view.elements() * view.dtype.size();
    for at in (0..bytes).step_by(drawn.len()) {
        arena
            .device()
            .backend()
            .upload(view.address + at as u64, &drawn[..drawn.len().min(bytes - at)])?;
    }
    Ok(view)
}

/// FLOP per second of the GEMM, whose factors are normally distributed.
fn matrix_rate(device: &Device, operands: Operands) -> Result<Option<f64>> {
    let mut arena = DeviceArena::new(device, Contract::NAN);
    let shape = [MATRIX, MATRIX];
    let factor = match operands {
        Operands::Bf16 => normal,
        Operands::E4m3 => normal_codes,
    };
    let a = factor(&mut arena, "matrix a", &shape)?;
    let b = factor(&mut arena, "matrix b", &shape)?;
    let c = arena.output("matrix c", DType::Bf16, &shape)?;
    // The GEMM runs on a separate backend, and so on a separate stream.
    device.backend().synchronize()?;
    let product =
        CudaBackend::new(ModuleCache::new(ModuleCache::default_dir())).and_then(|backend| {
            let addresses = [a.address, b.address, c.address];
            blaslt::matmul_seconds(&backend, operands, MATRIX, addresses, REPEATS)
        });
    match product {
        Ok(seconds) => Ok(Some(2.0 * (MATRIX as f64).powi(3) / median(seconds))),
        Err(error @ RuntimeError::BackendMissing { .. }) => {
            eprintln!("no matrix rate: {error}");
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
