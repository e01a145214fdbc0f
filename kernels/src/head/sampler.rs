//! `sampler`: launcher of `kernels/cuda/head/sampler.cu` (inference 12.3).

use crate::arguments::{Arguments, read, write};
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, LaunchConfig, Result, Views};

const FILE: &str = "sampler.cu";
const CHECK: Arguments = Arguments { operator: "sampler" };
/// The most logits of a row.
pub const MAX_VOCAB_SIZE: usize = 1 << 20;
/// Threads of a block, and whether they list ids. The variants are for rows up to [`SHORT_ROW`],
/// for longer limited rows, and for longer rows without limits (which listing makes 6 % slower).
const VARIANTS: [(usize, bool); 3] = [(128, true), (1024, true), (1024, false)];
/// Rows up to this length are short: several blocks share an SM.
const SHORT_ROW: usize = 2048;
/// Upper bound on the shared memory of a block without the lists of its warps, for each of
/// [`VARIANTS`]; bytes.
const OWN_SHARED_BYTES: [u64; 3] = [24 << 10, 80 << 10, 12 << 10];
/// Ids that a warp can list, for each of [`VARIANTS`]: all of a short row, and twice its expected
/// share of a long one.
const SEGMENT: [usize; 3] = [512, 256, 0];
/// Bytes of a listed id: its logit, the id, and its score.
const LISTED_BYTES: usize = 12;
const WARP_SIZE: usize = 32;

/// Every module that the launcher compiles.
pub fn modules() -> Vec<Module> {
    VARIANTS.into_iter().map(|variant| module(FILE, &defines(variant))).collect()
}

fn defines((threads, lists): (usize, bool)) -> [(&'static str, String); 2] {
    [("THREADS", threads.to_string()), ("LISTS", u8::from(lists).to_string())]
}

/// Samples one token of each row. Returns the kernel that ran. Its tensors:
///
/// - `logits` `[num_rows, vocab_size]` f32, rows contiguous, up to 1048576 columns;
/// - `temperature` `[num_rows]` f32: where it is not above 0, the largest logit is taken;
/// - `top_k` `[num_rows]` i32, `top_p` and `min_p` `[num_rows]` f32: which ids are kept, each
///   absent where it does not limit. All three refer to the whole row's probabilities; top_k of 0
///   or less, top_p of 1 or more and min_p of 0 or less keep all, and so does NaN;
/// - `seed` and `step` `[num_rows]` i64: with the ids they determine the random words of a row;
/// - `tokens` `[num_rows]` i32: ids, -1 of a row without a logit above -infinity.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
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
