//! `topk`: launcher of `kernels/cuda/topk.cu` (inference 7, 7.2).

use crate::arguments::{Arguments, read, write};
use crate::runtime::device::{Module, module};
use crate::runtime::{DType, Device, LaunchConfig, Result, Views};

const FILE: &str = "topk.cu";
const CHECK: Arguments = Arguments { operator: "topk" };
/// The most indices of a row.
pub const MAX_TOPK: usize = 4096;
/// The most scores of a row.
pub const MAX_COLUMNS: usize = 1 << 20;
/// Threads of a block for rows up to [`SHORT_COLUMNS`], and beyond.
const THREADS: [usize; 2] = [256, 1024];
/// Rows up to here are short: several blocks share a multiprocessor.
const SHORT_COLUMNS: usize = 4096;
/// Shared memory of a block apart from a row's keys, at most; bytes.
const OWN_SHARED_BYTES: u64 = 10 << 10;

/// Every module that the launcher compiles.
pub fn modules() -> Vec<Module> {
    THREADS.iter().map(|threads| module(FILE, &[("THREADS", threads.to_string())])).collect()
}

/// Selects the `topk` largest scores of each row; returns the kernel that ran. Its tensors:
///
/// - `scores` `[num_rows, num_columns]` f32, rows contiguous, up to 1048576 columns;
/// - `lengths` `[num_rows]` i32: how many of a row's columns count, clamped to what there is; absent where all do;
/// - `offsets` `[num_rows]` i32, what is added to a row's columns; or `block_table` `[num_rows, num_pages]` i32, rows contiguous,
///   the pages of `page_size` slots that a row's columns lie in, negative for none; one of them, or neither;
/// - `indices` `[num_rows, topk]` i32, rows contiguous: the columns, offset or mapped, from the lowest up, then -1; up to 4096;
/// - `values` `[num_rows, topk]` f32, rows contiguous: their scores, then -infinity; absent where nobody asks.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn forward(device: &Device, views: &Views, page_size: usize) -> Result<&'static str> {
    let tensors = [
        read("scores").axes(&["num_rows", "num_columns"]).rows(),
        read("lengths").of(&[DType::I32]).axes(&["num_rows"]).optional(),
        read("offsets").of(&[DType::I32]).axes(&["num_rows"]).optional(),
        read("block_table").of(&[DType::I32]).axes(&["num_rows", "num_pages"]).rows().optional(),
        write("indices").of(&[DType::I32]).axes(&["num_rows", "topk"]).rows(),
        write("values").axes(&["num_rows", "topk"]).rows().optional(),
    ];
    let signature = CHECK.signature(views, tensors).extent("topk", 1, MAX_TOPK);
    let mut call = signature.extent("num_columns", 1, MAX_COLUMNS);
    let [num_rows, num_columns, topk, num_pages] = call.bind(["num_rows", "num_columns", "topk", "num_pages"])?;
    if views.get("block_table").is_some() {
        if views.get("offsets").is_some() {
            return CHECK.refuse("offsets", "there is a block table, too: an index is offset or mapped, not both");
        }
        if page_size == 0 || num_pages.checked_mul(page_size).is_none_or(|slots| slots < num_columns) {
            let reason = format!("{page_size}: {num_pages} pages of so many slots do not hold {num_columns} columns");
            return CHECK.refuse("page_size", reason);
        }
    }
    let params = call.params(&["scores", "lengths", "offsets", "block_table", "indices", "values"]);
    let params = params.i32("num_columns", num_columns)?.i32("topk", topk)?.i32("page_size", page_size)?;
    let key_bytes = 4 * num_columns as u64;
    let resident = key_bytes + OWN_SHARED_BYTES <= device.environment().shared_bytes_per_block;
    let name = if resident { "topk_resident" } else { "topk_streamed" };
    let threads = THREADS[usize::from(num_columns > SHORT_COLUMNS)];
    let kernel = device.kernel(FILE, &[("THREADS", threads.to_string())], name)?;
    let config = LaunchConfig::linear("topk", "scores", num_rows as u64, threads as u32)?;
    let shared_bytes = if resident { key_bytes as u32 } else { 0 };
    kernel.launch(LaunchConfig { shared_bytes, ..config }, &params)?;
    Ok(name)
}
