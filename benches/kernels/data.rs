//! Random inputs of any size at little cost, and buffers that no cache can hold.
//!
//! One block of normal deviates is drawn on the host and uploaded; every large tensor is a stretch of it
//! that begins somewhere else and wraps around, copied within the device. The host knows every element
//! without ever holding the tensor.

use std::cell::OnceCell;

use dsv4_kernels::runtime::arena::Layout;
use dsv4_kernels::runtime::{BackendKind, Contract, DType, Device, DeviceArena, HostTensor, Result, Role, TensorView};
use dsv4_parity::case::Draw;
use half::bf16;
use rand::Rng;

/// Bytes of the block on a GPU: an odd multiple of 16, so that the rows of no tensor soon repeat.
const BLOCK: usize = (64 << 20) - 16;
/// The same for the emulator's small shapes.
const SMALL_BLOCK: usize = (1 << 20) - 16;
/// An upper bound of the second-level cache, bytes (H100 and H200: 50 to 60 MB).
const L2: usize = 60_000_000;
/// Buffers of a benchmark together are at least so many times the cache.
const CACHES: usize = 4;

/// A device with the block.
pub struct Lab<'d> {
    /// The device.
    pub device: &'d Device,
    block: OnceCell<Block<'d>>,
}

struct Block<'d> {
    host: Vec<u8>,
    on_device: TensorView,
    _memory: DeviceArena<'d>,
}

impl<'d> Lab<'d> {
    /// Nothing is drawn until something is placed.
    pub fn new(device: &'d Device) -> Self {
        Self { device, block: OnceCell::new() }
    }

    /// Buffers of a benchmark; freed when dropped. Whatever is not placed by [`Lab::normal`] or
    /// [`Lab::upload`] starts as NaN.
    pub fn arena(&self) -> DeviceArena<'d> {
        DeviceArena::new(self.device, Contract::NAN)
    }

    fn block(&self) -> Result<&Block<'d>> {
        if let Some(block) = self.block.get() {
            return Ok(block);
        }
        let bytes = match self.device.environment().backend {
            BackendKind::Cuda => BLOCK,
            BackendKind::Emulator | BackendKind::External => SMALL_BLOCK,
        };
        let host = normal_block(bytes);
        let mut memory = self.arena();
        let on_device = memory.output("random block", DType::U8, &[bytes])?;
        self.device.backend().upload(on_device.address, &host)?;
        Ok(self.block.get_or_init(|| Block { host, on_device, _memory: memory }))
    }

    /// Places a bf16 tensor of normal deviates; `name` and `set` decide where in the block it begins.
    ///
    /// # Errors
    /// The device's.
    pub fn normal(
        &self,
        arena: &mut DeviceArena<'d>,
        name: &'static str,
        set: usize,
        shape: &[usize],
    ) -> Result<Normal> {
        let view = arena.allocate(name, DType::Bf16, shape, &Layout::dense(shape), Role::InPlace)?;
        let block = self.block()?;
        let start = 16 * Draw::new(set as u64, name).rng().random_range(0..block.host.len() / 16);
        let total = view.elements() * view.dtype.size();
        let (mut done, mut from) = (0, start);
        while done < total {
            let bytes = (block.host.len() - from).min(total - done);
            self.device.backend().copy(view.address + done as u64, block.on_device.address + from as u64, bytes)?;
            (done, from) = (done + bytes, 0);
        }
        Ok(Normal { view, start })
    }

    /// Uploads a small tensor as it is.
    ///
    /// # Errors
    /// The device's.
    pub fn upload(&self, arena: &mut DeviceArena<'d>, name: &str, tensor: &HostTensor) -> Result<TensorView> {
        let view = arena.output(name, tensor.dtype, &tensor.shape)?;
        self.device.backend().upload(view.address, &tensor.bytes)?;
        Ok(view)
    }

    /// Rows of a placed tensor (all axes but the last `inner` ones, flattened), as the host knows them:
    /// `[rows, inner extents]`, widened.
    ///
    /// # Errors
    /// The device's, when nothing was placed before.
    pub fn rows(&self, tensor: &Normal, inner: usize, rows: &[usize]) -> Result<Vec<f64>> {
        let host = &self.block()?.host;
        let row_len: usize = tensor.view.shape[tensor.view.shape.len() - inner..].iter().product();
        let element = |index: usize| {
            let at = (tensor.start + 2 * index) % host.len();
            bf16::from_ne_bytes([host[at], host[at + 1]]).to_f64()
        };
        Ok(rows.iter().flat_map(|row| row * row_len..(row + 1) * row_len).map(element).collect())
    }

    /// Rows of a dense tensor on the device, downloaded.
    ///
    /// # Errors
    /// The device's.
    pub fn download_rows(&self, view: &TensorView, inner: usize, rows: &[usize]) -> Result<Vec<f64>> {
        let row_len: usize = view.shape[view.shape.len() - inner..].iter().product();
        let mut values = Vec::with_capacity(rows.len() * row_len);
        for row in rows {
            let mut bytes = vec![0; row_len * view.dtype.size()];
            self.device.backend().download(view.address + (row * bytes.len()) as u64, &mut bytes)?;
            values.extend(HostTensor { dtype: view.dtype, shape: vec![row_len], bytes }.to_f64());
        }
        Ok(values)
    }
}

/// A bf16 tensor of normal deviates whose elements the host knows.
pub struct Normal {
    /// Where it lies.
    pub view: TensorView,
    /// First byte within the block.
    start: usize,
}

/// Sets of buffers of `bytes` each, so that all of them together are several times the cache.
pub fn sets(device: &Device, bytes: f64) -> usize {
    match device.environment().backend {
        BackendKind::Cuda => ((CACHES * L2) as f64 / bytes).ceil().max(2.0) as usize,
        BackendKind::Emulator | BackendKind::External => 2,
    }
}

/// Small tensors of normal deviates around `mean`, in f32.
pub fn normal_f32(name: &str, count: usize, mean: f64) -> HostTensor {
    let mut draw = Draw::new(0, name);
    let values: Vec<f64> = (0..count).map(|_| mean + draw.normal()).collect();
    HostTensor::from_f64(DType::F32, &[count], &values)
}

/// `count` rows spread over `0..total`, the last one among them.
pub fn sample(total: usize, count: usize) -> Vec<usize> {
    let count = count.min(total);
    (1..=count).map(|i| i * total / count - 1).collect()
}

/// bf16 of a nearly normal distribution (a sum of four uniform numbers, standardised).
fn normal_block(bytes: usize) -> Vec<u8> {
    // Four numbers uniform in 0..2^16 have mean 2 (2^16 - 1) and variance 4 (2^32 - 1) / 12.
    let (mean, deviation) = (131_070.0, 37_837.2);
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut block = Vec::with_capacity(bytes);
    for _ in 0..bytes / 2 {
        // xorshift64*
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        let word = state.wrapping_mul(0x2545_f491_4f6c_dd1d);
        let sum: u32 = [0, 16, 32, 48].iter().map(|shift| (word >> shift) as u32 & 0xffff).sum();
        block.extend(bf16::from_f32((sum as f32 - mean) / deviation).to_ne_bytes());
    }
    block
}
