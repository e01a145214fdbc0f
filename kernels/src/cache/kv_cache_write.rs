//! `kv_cache_write`: launcher of `kernels/cuda/cache/kv_cache_write.cu` (inference 5.4, 8.3, 13.2).

use crate::arguments::{Arguments, read, write};
use crate::cache::kv_cache::{RowFormat, num_slots};
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, Result, Views};

const FILE: &str = "kv_cache_write.cu";
const CHECK: Arguments = Arguments { operator: "kv_cache_write" };
/// Tokens of a block: one a warp.
const TOKENS_PER_BLOCK: usize = 8;

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

/// Quantizes rows and scatters them to a store in this format, with pages of `page_size` rows.
/// Returns the kernel that ran. Its tensors:
///
/// - `kv` `[num_tokens, head_dim]` bf16, rows 16-byte aligned;
/// - `slots` `[num_tokens]` i32: the slot `page * page_size + row` of each token's row. A slot
///   that is negative or beyond the cache writes nothing. No slot may occur twice: which row it
///   would hold is undefined;
/// - `cache` `[num_pages, page_size * row_bytes]` u8, pages 16-byte aligned: the store that
///   receives the rows. All other bytes, also those between pages, stay unchanged.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn forward(
    device: &Device,
    views: &Views,
    format: RowFormat,
    page_size: usize,
) -> Result<&'static str> {
    format.check(CHECK)?;
    let tensors = [
        read("kv").of(&[DType::Bf16]).axes(&["num_tokens", "head_dim"]).aligned_rows().one_stride(),
        read("slots").of(&[DType::I32]).axes(&["num_tokens"]),
        write("cache")
            .of(&[DType::U8])
            .axes(&["num_pages", "page_bytes"])
            .aligned_rows()
            .one_stride(),
    ];
    let page_bytes = format.page_bytes(CHECK, "cache", page_size)?;
    let mut call = CHECK
        .signature(views, tensors)
        .given("head_dim", format.head_dim())
        .given("page_bytes", page_bytes);
    let [num_tokens, num_pages] = call.bind(["num_tokens", "num_pages"])?;
    let num_slots = num_slots(CHECK, "cache", num_pages, page_size)?;
    let params = call.append_as(call.params(&["kv", "slots"]), "pages", "cache");
    let params = params
        .i32("num_tokens", num_tokens)?
        .i32("num_slots", num_slots)?
        .i32("page_size", page_size)?;
    let name = "kv_cache_write";
    let kernel = device.kernel(FILE, &format.defines(), name)?;
    kernel.launch_blocks("kv", num_tokens.div_ceil(TOKENS_PER_BLOCK), &params)?;
    Ok(name)
}
