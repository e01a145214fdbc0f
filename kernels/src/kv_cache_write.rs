//! `kv_cache_write`: launcher of `kernels/cuda/kv_cache_write.cu` (inference 5.4, 8.3, 13.2).

use crate::arguments::Arguments;
use crate::kernel_params;
use crate::kv_cache::{Cache, RowFormat};
use crate::rms_norm::owned;
use crate::runtime::params::DeviceAddress;
use crate::runtime::{DType, Device, LaunchConfig, Result, TensorView};

const FILE: &str = "kv_cache_write.cu";
const CHECK: Arguments = Arguments { operator: "kv_cache_write" };
/// Tokens of a block: one a warp.
const TOKENS_PER_BLOCK: u64 = 8;

kernel_params! {
    /// Mirror of `KvCacheWriteParams`.
    struct KvCacheWriteParams {
        kv: DeviceAddress,
        slots: DeviceAddress,
        pages: DeviceAddress,
        kv_stride: i64,
        page_stride: i64,
        num_tokens: i32,
        num_slots: i32,
        page_size: i32,
    }
}

/// Arguments of [`forward`].
#[derive(Clone, Copy, Debug)]
pub struct Forward<'a> {
    /// `[num_tokens, head_dim]` bf16.
    pub kv: &'a TensorView,
    /// `[num_tokens]` i32: the slot of each token's row. A slot that is negative or beyond the cache writes nothing.
    /// No slot may occur twice: which row it would hold is undefined.
    pub slots: &'a TensorView,
    /// How the rows are stored.
    pub format: RowFormat,
    /// The store that receives the rows; all other bytes stay as they are.
    pub cache: Cache<'a>,
}

/// Modules of the model's format, of bf16 rows, and of small ones.
pub fn modules() -> Vec<(String, Vec<(String, String)>)> {
    let formats = [
        RowFormat::MODEL,
        RowFormat::bf16(512),
        RowFormat { nope_dim: 64, rope_dim: 64 },
        RowFormat { nope_dim: 128, rope_dim: 32 },
    ];
    formats.into_iter().map(|format| (FILE.to_owned(), owned(format.defines()))).collect()
}

/// Quantises and scatters the rows; returns the kernel that ran.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn forward(device: &Device, arguments: &Forward<'_>) -> Result<&'static str> {
    let Forward { kv, slots, format, cache } = *arguments;
    format.check(CHECK)?;
    let [num_tokens, width] = CHECK.extents("kv", kv)?;
    if width != format.head_dim() {
        return CHECK.refuse("kv", format!("width {width} must be the format's {}", format.head_dim()));
    }
    CHECK.dtype("kv", kv, &[DType::Bf16])?;
    CHECK.rows("kv", kv)?;
    CHECK.aligned("kv", kv)?;
    CHECK.dense_tensor("slots", slots, &[num_tokens], &[DType::I32])?;
    cache.check(CHECK, "cache", format)?;
    for read in [kv, slots] {
        CHECK.apart("cache", cache.pages, read)?;
    }
    let params = KvCacheWriteParams {
        kv: DeviceAddress(kv.address),
        slots: DeviceAddress(slots.address),
        pages: DeviceAddress(cache.pages.address),
        kv_stride: kv.strides[0],
        page_stride: cache.page_stride(),
        num_tokens: CHECK.int32("kv", num_tokens)?,
        num_slots: CHECK.int32("cache", cache.num_slots())?,
        page_size: CHECK.int32("cache", cache.page_size)?,
    };
    let name = "kv_cache_write";
    let kernel = device.kernel::<KvCacheWriteParams>(FILE, &format.defines(), name)?;
    let blocks = (num_tokens as u64).div_ceil(TOKENS_PER_BLOCK);
    kernel.launch(LaunchConfig::linear(CHECK.operator, "kv", blocks, kernel.max_threads())?, &params)?;
    Ok(name)
}
