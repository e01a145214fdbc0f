//! `sampler`: launcher of `kernels/cuda/head/sampler.cu` (inference 12.3).

use crate::arguments::{Arguments, read, write};
use dsv4_runtime::device::{Module, module};
use dsv4_runtime::{DType, Device, LaunchConfig, Result, Views};

const FILE: &str = "sampler.cu";
const CHECK: Arguments = Arguments { operator: "sampler" };
/// The most logits of a row.
pub const MAX_VOCAB_SIZE: usize = 1 << 20;
/// Threads of a block, and whether they list ids: for rows up to [`SHORT_ROW`], and for longer
/// ones that are limited and that are not (6 % slower where they could be).
const VARIANTS: [(usize, bool); 3] = [(128, true), (1024, true), (1024, false)];
/// Rows up to here are short: several blocks share a multiprocessor.
const SHORT_ROW: usize = 2048;
/// Shared memory of a block apart from what its warps list, at most, for each of [`VARIANTS`];
/// bytes.
const OWN_SHARED_BYTES: [u64; 3] = [24 << 10, 80 << 10, 12 << 10];
/// Ids that a warp has room to list, at most, for each of [`VARIANTS`]: all of a short row, and
/// twice what it is to find of a long one.
const SEGMENT: [usize; 3] = [512, 256, 0];
/// Bytes of an id that is listed: its logit, itself, and its score.
const LISTED_BYTES: usize = 12;
const WARP_SIZE: usize = 32;

/// Every module that the launcher compiles.
pub fn modules() -> Vec<Module> {
    VARIANTS.into_iter().map(|variant| module(FILE, &defines(variant))).collect()
}

fn defines((threads, lists): (usize, bool)) -> [(&'static str, String); 2] {
    [("THREADS", threads.to_string()), ("LISTS", u8::from(lists).to_string())]
}

/// Draws one token of each row; returns the kernel that ran. Its tensors:
///
/// - `logits` `[num_rows, vocab_size]` f32, rows contiguous, up to 1048576 columns;
/// - `temperature` `[num_rows]` f32: where it is not above 0, the largest logit is taken;
/// - `top_k` `[num_rows]` i32, `top_p` and `min_p` `[num_rows]` f32: what is kept, each absent
///   where nobody limits. All three are of the whole row's probabilities; top_k of 0 or less,
///   top_p of 1 or more and min_p of 0 or less keep all, and so does NaN;
/// - `seed` and `step` `[num_rows]` i64: what the random words of a row follow from, beside the
///   ids;
/// - `tokens` `[num_rows]` i32: ids, -1 of a row without a logit above -infinity.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn forward(device: &Device, views: &Views) -> Result<&'static str> {
    let tensors = [
        read("logits").axes(&["num_rows", "vocab_size"]).rows(),
        read("temperature").axes(&["num_rows"]),
        read("top_k").of(&[DType::I32]).axes(&["num_rows"]).optional(),
        read("top_p").axes(&["num_rows"]).optional(),
        read("min_p").axes(&["num_rows"]).optional(),
        read("seed").of(&[DType::I64]).axes(&["num_rows"]),
        read("step").of(&[DType::I64]).axes(&["num_rows"]),
        write("tokens").of(&[DType::I32]).axes(&["num_rows"]),
    ];
    let mut call = CHECK.signature(views, tensors).extent("vocab_size", 1, MAX_VOCAB_SIZE);
    let [num_rows, vocab_size] = call.bind(["num_rows", "vocab_size"])?;
    let limited = ["top_k", "top_p", "min_p"].iter().any(|name| views.get(name).is_some());
    let kind = if vocab_size <= SHORT_ROW { 0 } else { 2 - usize::from(limited) };
    let ((threads, _), own) = (VARIANTS[kind], OWN_SHARED_BYTES[kind]);
    let of_an_id = threads / WARP_SIZE * LISTED_BYTES;
    let room = device.environment().shared_bytes_per_block.saturating_sub(own) as usize / of_an_id;
    let segment = SEGMENT[kind].min(room);
    let params = call.params(&[
        "logits",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "step",
        "tokens",
    ]);
    let params = params.i32("vocab_size", vocab_size)?.i32("segment", segment)?;
    let name = if call.vectorised_rows(&["logits"]) { "sampler_vector" } else { "sampler_scalar" };
    let kernel = device.kernel(FILE, &defines(VARIANTS[kind]), name)?;
    let config = LaunchConfig::linear("sampler", "logits", num_rows as u64, threads as u32)?;
    kernel.launch(LaunchConfig { shared_bytes: (of_an_id * segment) as u32, ..config }, &params)?;
    Ok(name)
}
