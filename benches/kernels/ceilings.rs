//! What the device can do: measured in the same run, and on paper.

use anyhow::Result;
use dsv4_kernels::runtime::cache::ModuleCache;
use dsv4_kernels::runtime::cuda::{CudaBackend, blaslt};
use dsv4_kernels::runtime::{Contract, DType, Device, DeviceArena, HostTensor, RuntimeError, TensorView};
use dsv4_parity::case::{Distribution, Draw};
use dsv4_parity::record::Ceilings;

/// Bytes of each side of the copy.
const COPY_BYTES: usize = 2 << 30;
/// Extent of the matrix product.
const MATRIX: usize = 8192;
/// Numbers that are drawn for an operand, which repeats them.
const DRAWN: usize = 1 << 20;
/// Timed repetitions of each, after some that are not.
const REPEATS: usize = 15;
const WARM_UPS: usize = 3;

/// Rates that no measurement on a device can exceed, from its data sheet.
pub struct Datasheet {
    /// Bytes per second of device memory.
    pub bytes_per_second: f64,
    /// Dense FLOP per second of the narrowest operands, e4m3: twice those of bf16. (Products of FP8 pass bf16's.)
    pub flops_per_second: f64,
}

/// The data sheet of a device by the driver's name for it; `None` where none is written down here.
pub fn datasheet(device: &str) -> Option<Datasheet> {
    device.starts_with("NVIDIA H200").then_some(Datasheet { bytes_per_second: 4.8e12, flops_per_second: 1979e12 })
}

/// Measures the copy rate and, where cublasLt is to be found, the rate of a matrix product.
///
/// # Errors
/// The device's. A missing cublasLt is said on stderr, and is none.
pub fn measure(device: &Device) -> Result<Ceilings> {
    let (copy_bytes_per_second, matrix_flops_per_second) = (copy_rate(device)?, matrix_rate(device)?);
    let ceilings = Ceilings { copy_bytes_per_second, matrix_flops_per_second };
    let matrix = match ceilings.matrix_flops_per_second {
        Some(rate) => format!("{:.1} TFLOP/s", rate * 1e-12),
        None => "not measured".to_owned(),
    };
    let copy = ceilings.copy_bytes_per_second * 1e-9;
    println!("device copy {copy:.0} GB/s (read + written), bf16 {MATRIX}^3 matrix product {matrix}\n");
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
        let time = backend.time(&mut || backend.copy(target.address, source.address, COPY_BYTES))?;
        if repeat >= WARM_UPS {
            seconds.push(time.as_secs_f64());
        }
    }
    Ok(2.0 * COPY_BYTES as f64 / median(seconds))
}

/// A bf16 tensor of normal deviates, which repeat.
fn normal(arena: &mut DeviceArena<'_>, name: &str, shape: &[usize]) -> Result<TensorView> {
    let drawn = Draw::new(0, name).values(Distribution::Normal, 1, DRAWN, 1.0);
    let drawn = HostTensor::from_f64(DType::Bf16, &[DRAWN], &drawn).bytes;
    let view = arena.output(name, DType::Bf16, shape)?;
    for at in (0..view.elements() * view.dtype.size()).step_by(drawn.len()) {
        arena.device().backend().upload(view.address + at as u64, &drawn)?;
    }
    Ok(view)
}

/// FLOP per second of the matrix product.
fn matrix_rate(device: &Device) -> Result<Option<f64>> {
    let mut arena = DeviceArena::new(device, Contract::NAN);
    let shape = [MATRIX, MATRIX];
    let a = normal(&mut arena, "matrix a", &shape)?;
    let b = normal(&mut arena, "matrix b", &shape)?;
    let c = arena.output("matrix c", DType::Bf16, &shape)?;
    // The product runs on a backend, and so on a stream, of its own.
    device.backend().synchronize()?;
    let product = CudaBackend::new(ModuleCache::new(ModuleCache::default_dir()))
        .and_then(|backend| blaslt::bf16_matmul_seconds(&backend, MATRIX, a.address, b.address, c.address, REPEATS));
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
