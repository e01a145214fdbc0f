//! `mhc_pre`: launcher of `kernels/cuda/streams/mhc_pre.cu` and `mhc_pre_norm.cu` (inference 2.3
//! and 3, training 11.1 and 11.3).

use crate::arguments::{
    Arguments, FLOATS, Signature, element_types, modules_of_floats, read, saved, scratch, write,
};
use crate::projections::rms_norm;
use crate::streams::mhc_post::{NUM_STREAMS, threads};
use dsv4_runtime::source::Module;
use dsv4_runtime::{DType, Device, LaunchConfig, Result, Views};

const FILE: &str = "mhc_pre.cu";
const NORM_FILE: &str = "mhc_pre_norm.cu";
const CHECK: Arguments = Arguments { operator: "mhc_pre" };
/// Most threads of a block without the norm, forward and backward; the names are those of the
/// kernel source.
const FORWARD_THREADS: usize = 128;
const BACKWARD_THREADS: usize = 256;
/// Pieces of a row for each thread of the backward.
const PIECES: usize = 8;

/// Most channels of a stream where the norm follows.
pub const MAX_NORMALISED: usize = NORM_THREADS * HELD;
/// Most threads of a block with the norm; `THREADS` in the kernel source.
const NORM_THREADS: usize = 512;
/// Most threads of its forward for few tokens; `FEW_THREADS` in the kernel source.
const FEW_THREADS: usize = 1024;
/// Elements that a thread of its forward holds.
const HELD: usize = 32;
/// Pieces that a thread of its staged backward processes; `GRADIENT_HELD` in the kernel source.
const GRADIENT_HELD: usize = 2;
/// Rows in shared memory: two stages of `ROWS` in the kernel source.
const STAGED_ROWS: usize = 2 * (NUM_STREAMS + 1);
/// An upper bound of the shared memory that the staged backward has in addition to them.
const OWN_SHARED_BYTES: u64 = 1024;

/// Every module that the launchers compile.
pub fn modules() -> Vec<Module> {
    let own = [FILE, NORM_FILE].into_iter().flat_map(|file| modules_of_floats(file, &["ELEMENT"]));
    own.chain(FLOATS.map(rms_norm::dweight_module)).collect()
}

/// The options of a norm after the mix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// Added to the mean square.
    pub eps: f32,
}

/// Checks the tensors of a call. Returns them with the numbers of tokens and of channels.
fn bind(views: &Views, norm: bool, backward: bool) -> Result<(Signature<'_>, [usize; 2])> {
    let rstd = saved("rstd", backward).axes(&["num_tokens"]).when(norm);
    let channels = &["num_tokens", "hidden_size"];
    let tensors = [
        read("streams").of(&FLOATS).axes(&["num_tokens", "num_streams", "hidden_size"]).rows(),
        read("pre").axes(&["num_tokens", "num_streams"]),
        read("weight").axes(&["hidden_size"]).when(norm),
        write("h").typed("streams").axes(channels).rows().when(!norm && !backward),
        write("y").typed("streams").axes(channels).rows().when(norm && !backward),
        if backward { rstd } else { rstd.optional() },
        read("dh").typed("streams").axes(channels).rows().when(!norm && backward),
        read("dy").typed("streams").axes(channels).rows().when(norm && backward),
        write("dstreams").like("streams").rows().when(backward),
        write("dpre").like("pre").when(backward),
        write("dweight").axes(&["hidden_size"]).when(norm && backward),
        scratch("workspace", 4).when(norm && backward),
    ];
    let most = if norm { MAX_NORMALISED } else { i32::MAX as usize };
    let signature = CHECK.signature(views, tensors).given("num_streams", NUM_STREAMS);
    let mut signature = signature.extent("hidden_size", 1, most).wide("num_tokens");
    let extents = signature.bind(["num_tokens", "hidden_size"])?;
    Ok((signature, extents))
}

/// Whether every access may be 16 bytes wide.
fn vectorised(signature: &Signature<'_>, views: &Views) -> bool {
    signature.vectorised()
        && views.get("weight").is_none_or(|weight| weight.address.is_multiple_of(16))
}

/// Launches the forward, `h = sum over i of pre[i] streams[i]`, or with a `norm` `y = weight (h
/// rstd)`; returns the kernel that ran. Its tensors:
///
/// - `streams` `[num_tokens, 4, hidden_size]`, bf16 or f32, rows contiguous; `pre` `[num_tokens,
///   4]` f32;
/// - without a norm `h` `[num_tokens, hidden_size]`, the type of `streams`, rows contiguous;
/// - with one `y` of that type and shape, `weight` `[hidden_size]` f32, and `rstd` `[num_tokens]`
///   f32, for the backward, which may be absent; `hidden_size` is then at most [`MAX_NORMALISED`].
///
/// # Errors
/// A rejected argument (`eps` is above 0), a compile error, a rejected launch.
pub fn forward(device: &Device, views: &Views, norm: Option<Norm>) -> Result<&'static str> {
    let (signature, [num_tokens, hidden_size]) = bind(views, norm.is_some(), false)?;
    let element = views["streams"].dtype;
    let (defines, vectorised) =
        (element_types(&[("ELEMENT", element)]), vectorised(&signature, views));
    let row = if vectorised { hidden_size * element.size() / 16 } else { hidden_size };
    if let Some(Norm { eps }) = norm {
        CHECK.positive("eps", eps)?;
        // One token for each SM. With more tokens, other blocks work while one waits. The sums of
        // few tokens have another order, which an invariant path must not have.
        let few = num_tokens <= device.environment().processors as usize
            && row <= FEW_THREADS
            && !device.is_invariant();
        let (name, held, most) = match vectorised {
            true if few => ("mhc_pre_norm_forward_few", 1, FEW_THREADS),
            true => ("mhc_pre_norm_forward_vector", HELD * element.size() / 16, NORM_THREADS),
            false => ("mhc_pre_norm_forward_scalar", PIECES, NORM_THREADS),
        };
        let params = signature.params(&["streams", "pre", "weight", "y", "rstd"]);
        let params = params.i32("hidden_size", hidden_size)?.f32("eps", eps);
        let threads = threads(row, held, most) as u32;
        let config = LaunchConfig::linear(CHECK.operator, "streams", num_tokens as u64, threads)?;
        device.kernel(NORM_FILE, &defines, name)?.launch(config, &params)?;
        return Ok(name);
    }
    let name = if vectorised { "mhc_pre_forward_vector" } else { "mhc_pre_forward_scalar" };
    let threads = threads(row, 1, FORWARD_THREADS);
    let chunks = row.div_ceil(threads);
    let params = signature
        .params(&["streams", "pre", "h"])
        .i32("hidden_size", hidden_size)?
        .i32("chunks", chunks)?;
    let blocks = (num_tokens as u64).saturating_mul(chunks as u64);
    let config = LaunchConfig::linear(CHECK.operator, "streams", blocks, threads as u32)?;
    device.kernel(FILE, &defines, name)?.launch(config, &params)?;
    Ok(name)
}

/// The launch of the backward of a norm.
struct NormBackward {
    name: &'static str,
    blocks: usize,
    threads: usize,
    shared_bytes: u32,
}

/// Each block leaves one row of partial dweights, so there are only as many blocks as keep the
/// device busy.
fn norm_backward(
    device: &Device,
    element: DType,
    num_tokens: usize,
    hidden_size: usize,
    vectorised: bool,
) -> NormBackward {
    let environment = device.environment();
    let (row_bytes, processors) = (hidden_size * element.size(), environment.processors as usize);
    let (pieces, staged_bytes) =
        (row_bytes / 16, (STAGED_ROWS * row_bytes) as u64 + OWN_SHARED_BYTES);
    let resident = environment.shared_bytes_per_block / staged_bytes;
    if vectorised && resident > 0 && pieces <= NORM_THREADS * GRADIENT_HELD {
        return NormBackward {
            name: "mhc_pre_norm_backward_staged",
            blocks: num_tokens.min(resident.min(4) as usize * processors),
            threads: threads(pieces, GRADIENT_HELD, NORM_THREADS),
            shared_bytes: (STAGED_ROWS * row_bytes) as u32,
        };
    }
    let (name, row) = match vectorised {
        true => ("mhc_pre_norm_backward_wide", pieces),
        false => ("mhc_pre_norm_backward_scalar", hidden_size),
    };
    let blocks = num_tokens.min(2 * processors);
    NormBackward { name, blocks, threads: threads(row, 1, NORM_THREADS), shared_bytes: 0 }
}

/// Bytes of scratch memory that [`backward`] needs where the norm follows.
pub fn workspace_bytes(
    device: &Device,
    element: DType,
    num_tokens: usize,
    hidden_size: usize,
) -> usize {
    // The largest grid of any path, so that the result does not depend on alignment.
    let blocks = [true, false]
        .map(|wide| norm_backward(device, element, num_tokens, hidden_size, wide).blocks);
    blocks[0].max(blocks[1]) * hidden_size * 4
}

/// Launches the backward, with or without the `norm` of the forward; returns the kernels that ran.
/// Its tensors:
///
/// - `streams`, `pre`, with a norm `weight` and `rstd`, as the forward read and saved them;
/// - `dh`, or with a norm `dy`, of the type and shape of the forward's output, rows contiguous;
/// - `dstreams` like `streams`, rows contiguous, and `dpre` f32 like `pre`;
/// - with a norm `dweight` `[hidden_size]` f32, and `workspace`, scratch memory of
///   [`workspace_bytes`] bytes.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn backward(device: &Device, views: &Views, norm: bool) -> Result<Vec<&'static str>> {
    let (signature, [num_tokens, hidden_size]) = bind(views, norm, true)?;
    let element = views["streams"].dtype;
    let (defines, vectorised) =
        (element_types(&[("ELEMENT", element)]), vectorised(&signature, views));
    if norm {
        let workspace = &views["workspace"];
        CHECK.holds(
            "workspace",
            workspace,
            workspace_bytes(device, element, num_tokens, hidden_size),
        )?;
        let NormBackward { name, blocks, threads, shared_bytes } =
            norm_backward(device, element, num_tokens, hidden_size, vectorised);
        let params =
            signature.params(&["streams", "pre", "weight", "rstd", "dy", "dstreams", "dpre"]);
        let params = params.ptr("dweight_partials", workspace).i64("num_tokens", num_tokens)?;
        let params = params.i32("hidden_size", hidden_size)?;
        let config =
            LaunchConfig::linear(CHECK.operator, "streams", blocks as u64, threads as u32)?;
        device
            .kernel(NORM_FILE, &defines, name)?
            .launch(LaunchConfig { shared_bytes, ..config }, &params)?;
        let sum = rms_norm::sum_dweight(
            device,
            element,
            workspace,
            &views["dweight"],
            blocks,
            hidden_size,
        )?;
        return Ok(vec![name, sum]);
    }
    let (name, row) = match vectorised {
        true => ("mhc_pre_backward_vector", hidden_size * element.size() / 16),
        false => ("mhc_pre_backward_scalar", hidden_size),
    };
    let params = signature
        .params(&["streams", "pre", "dh", "dstreams", "dpre"])
        .i32("hidden_size", hidden_size)?;
    let threads = threads(row, PIECES, BACKWARD_THREADS) as u32;
    let config = LaunchConfig::linear(CHECK.operator, "streams", num_tokens as u64, threads)?;
    device.kernel(FILE, &defines, name)?.launch(config, &params)?;
    Ok(vec![name])
}
