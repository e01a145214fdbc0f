//! `indexer_cache_write`: launcher of `kernels/cuda/cache/indexer_cache_write.cu` (inference 5.4,
//! 7, 7.1, 13.2).

use crate::arguments::{Arguments, Defines, element_types, read, write};
use crate::cache::kv_cache::num_slots;
use crate::formats::hadamard::{DIM, Stored};
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, Result, Views};

const FILE: &str = "indexer_cache_write.cu";
const CHECK: Arguments = Arguments { operator: "indexer_cache_write" };
/// Tokens of a block: one for every four lanes.
const TOKENS_PER_BLOCK: usize = 32;
/// Bytes of a key's scales: four e8m0 bytes, or an f32 number.
pub const SCALE_BYTES: usize = 4;

/// Bytes of a stored key, scales included.
pub fn row_bytes(stored: Stored) -> usize {
    stored.code_bytes() + SCALE_BYTES
}

fn defines(stored: Stored) -> Defines {
    let mut defines = element_types(&[("ELEMENT", DType::Bf16)]);
    defines.push(("STORED", (stored as usize).to_string()));
    defines
}

/// A module for each way to store a key.
pub fn modules() -> Vec<Module> {
    [Stored::E2m1, Stored::E4m3].map(|stored| module(FILE, &defines(stored))).to_vec()
}

/// Transforms and quantizes keys and scatters them to a paged store of this format, with pages of
/// `page_size` rows. Returns the kernel that ran. Its tensors:
///
/// - `k` `[num_tokens, 128]` bf16, rows 16-byte aligned;
/// - `slots` `[num_tokens]` i32: the slot `page * page_size + row` of each token's key. A slot
///   that is negative or beyond the store writes nothing. No slot may occur twice: which key it
///   would hold is undefined;
/// - `pages` `[num_pages, page_size * (code bytes + 4)]` u8, pages 16-byte aligned: the codes of a
///   page's rows, then their scales. All other bytes, also those between pages, stay unchanged.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn forward(
    device: &Device,
    views: &Views,
    stored: Stored,
    page_size: usize,
) -> Result<&'static str> {
    if stored == Stored::Values {
        return CHECK.refuse("stored", "values: keys are stored as e2m1 or e4m3");
    }
    if page_size == 0 {
        return CHECK.refuse("pages", "a page of 0 rows holds nothing");
    }
    CHECK.int32("pages", page_size)?;
    let tensors = [
        read("k").of(&[DType::Bf16]).axes(&["num_tokens", "head_dim"]).aligned_rows().one_stride(),
        read("slots").of(&[DType::I32]).axes(&["num_tokens"]),
        write("pages")
            .of(&[DType::U8])
            .axes(&["num_pages", "page_bytes"])
            .aligned_rows()
            .one_stride(),
    ];
    let page_bytes = page_size.saturating_mul(row_bytes(stored));
    let mut call =
        CHECK.signature(views, tensors).given("head_dim", DIM).given("page_bytes", page_bytes);
    let [num_tokens, num_pages] = call.bind(["num_tokens", "num_pages"])?;
    let num_slots = num_slots(CHECK, "pages", num_pages, page_size)?;
    let params = call.params(&["k", "slots", "pages"]);
    let params = params
        .i32("num_tokens", num_tokens)?
        .i32("num_slots", num_slots)?
        .i32("page_size", page_size)?;
    let name = "indexer_cache_write";
    let kernel = device.kernel(FILE, &defines(stored), name)?;
    kernel.launch_blocks("k", num_tokens.div_ceil(TOKENS_PER_BLOCK), &params)?;
    Ok(name)
}
