//! `mhc_post`: launcher of `kernels/cuda/streams/mhc_post.cu` (inference 2.4, training 11.1).

use crate::arguments::{
    Arguments, FLOATS, Signature, element_types, modules_of_floats, read, write,
};
use dsv4_runtime::source::Module;
use dsv4_runtime::{Device, LaunchConfig, Result, Views};

const FILE: &str = "mhc_post.cu";
const CHECK: Arguments = Arguments { operator: "mhc_post" };
/// Residual streams; `STREAMS` in the kernel sources.
pub const NUM_STREAMS: usize = 4;
/// Threads of a block of the forward; `FORWARD_THREADS` in the kernel source.
const FORWARD_THREADS: usize = 128;
/// Most threads of a block of the backward, `BACKWARD_THREADS` in the kernel source, and the pieces
/// of a row for each thread.
const BACKWARD_THREADS: usize = 256;
const PIECES: usize = 8;

/// Every module that the launchers compile.
pub fn modules() -> Vec<Module> {
    modules_of_floats(FILE, &["ELEMENT"])
}

/// Checks the tensors of a call. Returns them with the numbers of tokens and of channels.
fn bind(views: &Views, backward: bool) -> Result<(Signature<'_>, [usize; 2])> {
    let tensors = [
        read("streams").of(&FLOATS).axes(&["num_tokens", "source", "hidden_size"]).rows(),
        read("y").typed("streams").axes(&["num_tokens", "hidden_size"]).rows(),
        read("post").axes(&["num_tokens", "destination"]),
        read("comb").axes(&["num_tokens", "source", "destination"]),
        write("out")
            .typed("streams")
            .axes(&["num_tokens", "destination", "hidden_size"])
            .rows()
            .may_be("streams")
            .when(!backward),
        read("dout")
            .typed("streams")
            .axes(&["num_tokens", "destination", "hidden_size"])
            .rows()
            .when(backward),
        write("dstreams").like("streams").rows().when(backward),
        write("dy").like("y").rows().when(backward),
        write("dpost").like("post").when(backward),
        write("dcomb").like("comb").when(backward),
    ];
    let signature = CHECK
        .signature(views, tensors)
        .given("source", NUM_STREAMS)
        .given("destination", NUM_STREAMS);
    let mut signature = signature.extent("hidden_size", 1, i32::MAX as usize).wide("num_tokens");
    let extents = signature.bind(["num_tokens", "hidden_size"])?;
    Ok((signature, extents))
}

/// Threads that a row of this many pieces keeps busy, each with up to `pieces` of them: whole
/// warps, at most `most` threads.
pub(crate) fn threads(row: usize, pieces: usize, most: usize) -> usize {
    row.div_ceil(pieces).next_multiple_of(32).min(most)
}

/// Launches the forward, `out[j] = post[j] y + sum over i of comb[i,j] streams[i]`; returns the
/// kernel that ran. Its tensors:
///
/// - `streams` `[num_tokens, 4, hidden_size]`, bf16 or f32, rows contiguous, the source streams;
/// - `y` `[num_tokens, hidden_size]`, the type of `streams`, rows contiguous: the output of the
///   sublayer;
/// - `post` `[num_tokens, 4]` and `comb` `[num_tokens, 4, 4]` f32, sources before destinations;
/// - `out` of the type and shape of `streams`, rows contiguous: the destination streams; it may be
///   `streams` itself.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn forward(device: &Device, views: &Views) -> Result<&'static str> {
    let (signature, [num_tokens, hidden_size]) = bind(views, false)?;
    let element = views["streams"].dtype;
    let (name, row) = match signature.vectorised() {
        true => ("mhc_post_forward_vector", hidden_size * element.size() / 16),
        false => ("mhc_post_forward_scalar", hidden_size),
    };
    let threads = threads(row, 1, FORWARD_THREADS);
    let chunks = row.div_ceil(threads);
    let params = signature.params(&["streams", "y", "post", "comb", "out"]);
    let params = params.i32("hidden_size", hidden_size)?.i32("chunks", chunks)?;
    let kernel = device.kernel(FILE, &element_types(&[("ELEMENT", element)]), name)?;
    let blocks = (num_tokens as u64).saturating_mul(chunks as u64);
    kernel.launch(
        LaunchConfig::linear(CHECK.operator, "streams", blocks, threads as u32)?,
        &params,
    )?;
    Ok(name)
}

/// Launches the backward; returns the kernel that ran. Its tensors:
///
/// - `streams`, `y`, `post` and `comb` as the forward read them;
/// - `dout` of the type and shape of `streams`, rows contiguous: the gradient of the forward's
///   `out`;
/// - `dstreams` like `streams` and `dy` like `y`, rows contiguous; `dpost` and `dcomb` f32 like
///   `post` and `comb`. None of them shares memory with another tensor.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn backward(device: &Device, views: &Views) -> Result<&'static str> {
    let (signature, [num_tokens, hidden_size]) = bind(views, true)?;
    let element = views["streams"].dtype;
    let (name, row) = match signature.vectorised() {
        true => ("mhc_post_backward_vector", hidden_size * element.size() / 16),
        false => ("mhc_post_backward_scalar", hidden_size),
    };
    let params = signature
        .params(&["streams", "y", "post", "comb", "dout", "dstreams", "dy", "dpost", "dcomb"]);
    let params = params.i32("hidden_size", hidden_size)?;
    let kernel = device.kernel(FILE, &element_types(&[("ELEMENT", element)]), name)?;
    let threads = threads(row, PIECES, BACKWARD_THREADS) as u32;
    kernel.launch(
        LaunchConfig::linear(CHECK.operator, "streams", num_tokens as u64, threads)?,
        &params,
    )?;
    Ok(name)
}
