//! `kv_cache_write`: launcher of `kernels/cuda/kv_cache_write.cu` (inference 5.4, 8.3, 13.2).

use crate::arguments::{Arguments, read_at, write_at};
use crate::kv_cache::{Cache, RowFormat};
use crate::runtime::device::{Module, module};
use crate::runtime::{DType, Device, Result, TensorView};

const FILE: &str = "kv_cache_write.cu";
const CHECK: Arguments = Arguments { operator: "kv_cache_write" };
/// Tokens of a block: one a warp.
const TOKENS_PER_BLOCK: usize = 8;

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
pub fn modules() -> Vec<Module> {
    let formats = [
        RowFormat::MODEL,
        RowFormat::bf16(512),
        RowFormat { nope_dim: 64, rope_dim: 64 },
        RowFormat { nope_dim: 128, rope_dim: 32 },
    ];
    formats.into_iter().map(|format| module(FILE, &format.defines())).collect()
}

/// Quantises and scatters the rows; returns the kernel that ran.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn forward(device: &Device, arguments: &Forward<'_>) -> Result<&'static str> {
    let Forward { kv, slots, format, cache } = *arguments;
    format.check(CHECK)?;
    cache.check(CHECK, "cache")?;
    let tensors = [
        read_at("kv", kv).of(&[DType::Bf16]).axes(&["num_tokens", "width"]).aligned_rows(),
        read_at("slots", slots).of(&[DType::I32]).axes(&["num_tokens"]),
        Cache::argument(write_at("cache", cache.pages), &["num_pages", "page_bytes"]),
    ];
    let mut signature = CHECK.signature_at(tensors).given("page_bytes", cache.page_bytes(format));
    let [num_tokens, width] = signature.bind(["num_tokens", "width"])?;
    if width != format.head_dim() {
        return CHECK.refuse("kv", format!("width {width} must be the format's {}", format.head_dim()));
    }
    let params = CHECK.params().rows("kv", kv).ptr("slots", slots).rows("pages", cache.pages);
    let params = params.i32("num_tokens", num_tokens)?.i32("num_slots", cache.num_slots())?;
    let params = params.i32("page_size", cache.page_size)?;
    let name = "kv_cache_write";
    let kernel = device.kernel(FILE, &format.defines(), name)?;
    kernel.launch_blocks("kv", num_tokens.div_ceil(TOKENS_PER_BLOCK), &params)?;
    Ok(name)
}
