//! `kv_norm_rope_write`: launcher of `kernels/cuda/cache/kv_norm_rope_write.cu` (inference 3, 4,
//! 5.1, 5.4, 8.3, 13.2).

use crate::arguments::{Arguments, Defines, element_types, read, write};
use crate::cache::kv_cache::{RowFormat, num_slots};
use crate::projections::rotation;
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, Result, Views};

const FILE: &str = "kv_norm_rope_write.cu";
const CHECK: Arguments = Arguments { operator: "kv_norm_rope_write" };
/// Tokens of a block; `WARPS` in the kernel source.
const WARPS: usize = 4;
/// Most channels of a row.
pub const MAX_HEAD_DIM: usize = 512;

/// The model's rows, and small ones.
const FORMATS: [RowFormat; 3] = [
    RowFormat::MODEL,
    RowFormat { nope_dim: 64, rope_dim: 64 },
    RowFormat { nope_dim: 128, rope_dim: 32 },
];

fn defines(format: RowFormat) -> Defines {
    [element_types(&[("ELEMENT", DType::Bf16)]), format.defines()].concat()
}

/// Modules of the model's format and of small ones.
pub fn modules() -> Vec<Module> {
    FORMATS.into_iter().map(|format| module(FILE, &defines(format))).collect()
}

/// Norms rows, rotates their last `rope_dim` channels by position and quantizes the others.
/// Scatters the rows to a store in this format, with pages of `page_size` rows. Returns the kernel
/// that ran. Its tensors:
///
/// - `x` `[num_tokens, head_dim]` bf16, rows 16-byte aligned: the output of wkv; `weight`
///   `[head_dim]` f32 of the norm, at a multiple of 16 bytes;
/// - `cos`, `sin` `[table_rows, rope_dim / 2]` f32, rows contiguous; `positions` `[num_tokens]`
///   i32, absent where token `t` has the table's row `t`: see
///   [`rope::forward`](crate::projections::rope::forward);
/// - `slots` `[num_tokens]` i32 and `cache` `[num_pages, page_size * row_bytes]` u8 as in
///   [`kv_cache_write::forward`](crate::cache::kv_cache_write::forward);
/// - `y` as `x`, which may be `x` itself: the rows as the cache decodes them.
///
/// # Errors
/// A rejected argument (`format`: a row has e4m3 channels, and at most [`MAX_HEAD_DIM`] in all;
/// `eps` is above 0), a compile error, a rejected launch.
pub fn forward(
    device: &Device,
    views: &Views,
    format: RowFormat,
    page_size: usize,
    eps: f32,
) -> Result<&'static str> {
    format.check(CHECK)?;
    if format.nope_dim == 0 || format.head_dim() > MAX_HEAD_DIM {
        let RowFormat { nope_dim, rope_dim } = format;
        let reason = format!(
            "{nope_dim} e4m3 and {rope_dim} bf16 channels: a row has some of both, {MAX_HEAD_DIM} in all"
        );
        return CHECK.refuse("format", reason);
    }
    let [cos, sin, positions] = rotation::tables();
    let tensors = [
        read("x").of(&[DType::Bf16]).axes(&["num_tokens", "head_dim"]).aligned_rows().one_stride(),
        read("weight").axes(&["head_dim"]).aligned_rows(),
        cos,
        sin,
        positions,
        read("slots").of(&[DType::I32]).axes(&["num_tokens"]),
        write("y").like("x").aligned_rows().one_stride().may_be("x"),
        write("cache")
            .of(&[DType::U8])
            .axes(&["num_pages", "page_bytes"])
            .aligned_rows()
            .one_stride(),
    ];
    let page_bytes = format.page_bytes(CHECK, "cache", page_size)?;
    let call = CHECK
        .signature(views, tensors)
        .given("head_dim", format.head_dim())
        .given("page_bytes", page_bytes);
    let mut call = call.given("half_rope_dim", format.rope_dim / 2).wide("table_rows");
    let [num_tokens, num_pages, table_rows] =
        call.bind(["num_tokens", "num_pages", "table_rows"])?;
    CHECK.positive("eps", eps)?;
    rotation::check_rows(CHECK, views, table_rows, num_tokens)?;
    let num_slots = num_slots(CHECK, "cache", num_pages, page_size)?;
    let params = call.params(&["x", "weight", "y", "slots"]);
    let params = call.append_as(params, "pages", "cache");
    let params = call.append(params, &["cos", "sin", "positions"]);
    let params = params.i64("table_rows", table_rows)?;
    let params = params
        .i32("num_tokens", num_tokens)?
        .i32("num_slots", num_slots)?
        .i32("page_size", page_size)?;
    let params = params.i32("head_dim", format.head_dim())?.i32("rope_dim", format.rope_dim)?;
    let params = params.flag("inverse", false).f32("eps", eps);
    let name = "kv_norm_rope_write";
    device.kernel(FILE, &defines(format), name)?.launch_blocks(
        "x",
        num_tokens.div_ceil(WARPS),
        &params,
    )?;
    Ok(name)
}
