//! `topk`: launcher of `kernels/cuda/indexer/topk.cu` (inference 7, 7.2).

use crate::arguments::{Arguments, read, write};
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, LaunchConfig, Result, Views};

const FILE: &str = "topk.cu";
const CHECK: Arguments = Arguments { operator: "topk" };
/// The most indices of a row.
pub const MAX_TOPK: usize = 4096;
/// The most scores of a row.
pub const MAX_COLUMNS: usize = 1 << 20;
/// Threads of a block by the length of its row: few where several blocks share an SM, more where
/// each has an SM to itself.
const THREADS: [usize; 3] = [256, 512, 1024];
/// Rows up to this length are short: more threads than the first number would have no work.
const SHORT_COLUMNS: usize = 4096;
/// Rows up to this length use fewer warps: waiting at barriers costs more than reading with few.
const MEDIUM_COLUMNS: usize = 1 << 15;
/// `MARKED_COLUMNS` in the kernel source: rows up to here have two bits a column in shared memory.
const MARKED_COLUMNS: usize = 1 << 17;

/// Every module that the launcher compiles.
pub fn modules() -> Vec<Module> {
    THREADS.iter().map(|threads| module(FILE, &[("THREADS", threads.to_string())])).collect()
}

/// The number of candidates that a block has room for: twice `topk`, plus the error of a sample.
fn candidates(topk: usize) -> usize {
    2 * topk + 1024
}

/// Selects the `topk` largest scores of each row; returns the kernel that ran. Its tensors:
///
/// - `scores` `[num_rows, num_columns]` f32, rows contiguous, up to 1048576 columns;
/// - `lengths` `[num_rows]` i32: how many of a row's columns count, clamped to the existing ones;
///   absent where all do;
/// - `offsets` `[num_rows]` i32, added to a row's columns; or `block_table` `[num_rows,
///   num_pages]` i32, rows contiguous, the pages of `page_size` slots that hold a row's columns,
///   negative for none; at most one of them;
/// - `indices` `[num_rows, topk]` i32, rows contiguous: the columns, offset or mapped, from the
///   lowest up, then -1; up to 4096;
/// - `values` `[num_rows, topk]` f32, rows contiguous: their scores, then -infinity; may be absent.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
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
    let [num_rows, num_columns, topk, num_pages] =
        call.bind(["num_rows", "num_columns", "topk", "num_pages"])?;
    if views.get("block_table").is_some() {
        if views.get("offsets").is_some() {
            return CHECK.refuse(
                "offsets",
                "there is a block table, too: an index is offset or mapped, not both",
            );
        }
        if page_size == 0
            || num_pages.checked_mul(page_size).is_none_or(|slots| slots < num_columns)
        {
            let reason = format!(
                "{page_size}: {num_pages} pages of so many slots do not hold {num_columns} columns"
            );
            return CHECK.refuse("page_size", reason);
        }
    }
    let params = call.params(&["scores", "lengths", "offsets", "block_table", "indices", "values"]);
    let params =
        params.i32("num_columns", num_columns)?.i32("topk", topk)?.i32("page_size", page_size)?;
    let capacity = candidates(topk);
    let params = params.i32("capacity", capacity)?;
    let few = num_rows <= device.environment().processors as usize;
    let longer =
        [SHORT_COLUMNS, MEDIUM_COLUMNS].into_iter().filter(|&columns| few && num_columns > columns);
    let threads = THREADS[longer.count()];
    let kernel = device.kernel(FILE, &[("THREADS", threads.to_string())], "topk")?;
    let marks = if num_columns <= MARKED_COLUMNS { 2 * num_columns.div_ceil(32) } else { 0 };
    let shared_bytes = (4 * (2 * capacity + marks)) as u32;
    let config = LaunchConfig::linear("topk", "scores", num_rows as u64, threads as u32)?;
    kernel.launch(LaunchConfig { shared_bytes, ..config }, &params)?;
    Ok("topk")
}
