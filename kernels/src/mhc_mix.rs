//! `mhc_mix`: launcher of `kernels/cuda/mhc_mix.cu` and `mhc_mix_backward.cu` (inference 2.1 and 2.2, training 11.1).

use crate::arguments::{Arguments, Signature, read, saved, scratch, write};
use crate::mhc_post::NUM_STREAMS;
use crate::runtime::device::{Module, module};
use crate::runtime::params::{DeviceAddress, Params};
use crate::runtime::{DType, Device, LaunchConfig, Result, TensorView, Views};

const FILE: &str = "mhc_mix.cu";
const BACKWARD_FILE: &str = "mhc_mix_backward.cu";
const CHECK: Arguments = Arguments { operator: "mhc_mix" };
/// Coefficients of a token: pre, post, and comb by sources.
pub const NUM_COLUMNS: usize = 2 * NUM_STREAMS + NUM_STREAMS * NUM_STREAMS;
/// Most iterations, whose matrices the backward keeps.
pub const MAX_ITERATIONS: usize = 48;
/// Tokens of a block of the projection, and channels of a step: `BLOCK_TOKENS` and `PIECE * BLOCK_PIECES` in the kernel
/// source.
const BLOCK_TOKENS: usize = 128;
const STEP: usize = 64;
/// Fewest steps of a part of the channels.
const FEWEST_STEPS: usize = 4;
/// Tokens of a block of the scalar projection: one a warp.
const SCALAR_TOKENS: usize = 8;
/// Floats that the projection leaves of a token.
const PARTIAL_WIDTH: usize = 32;
/// Tokens of a block of the coefficients, forward and backward.
const COEFFICIENT_TOKENS: usize = 8;
/// Threads of the backward's blocks, and the floats that it leaves of a token.
const BACKWARD_THREADS: usize = 128;
const NUMBERS: usize = NUM_COLUMNS + 4;
/// Tokens of a part of them in the backward: two times what its blocks hold of their numbers at once.
const FEWEST_TOKENS: usize = 64;
/// Most parts, each of which leaves sums of its own for dfn.
const MOST_PARTS: usize = 16;

/// How the wide kernel of a backward works.
#[derive(Clone, Copy)]
pub(crate) struct Wide {
    /// Channels that a thread owns.
    pub channels: usize,
    /// Blocks that a multiprocessor has at once: registers or shared memory allow no more.
    pub blocks: usize,
}

const WIDE: Wide = Wide { channels: 4, blocks: 2 };

/// Every module that the launchers compile.
pub fn modules() -> Vec<Module> {
    [FILE, BACKWARD_FILE].map(|file| module(file, &[])).to_vec()
}

/// The numbers of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Numbers {
    /// Iterations of the Sinkhorn normalisation, the softmax with its columns being the first: 1 to [`MAX_ITERATIONS`].
    pub sinkhorn_iters: usize,
    /// Added to the mean square of a token.
    pub norm_eps: f32,
    /// Added to pre, behind the softmax, and to each sum that the Sinkhorn iteration divides by.
    pub hc_eps: f32,
}

impl Numbers {
    /// As arguments of the operator `check`.
    pub(crate) fn check(self, check: Arguments) -> Result<()> {
        if !(1..=MAX_ITERATIONS).contains(&self.sinkhorn_iters) {
            let reason = format!("{} must be 1 to {MAX_ITERATIONS}", self.sinkhorn_iters);
            return check.refuse("sinkhorn_iters", reason);
        }
        check.positive("norm_eps", self.norm_eps)?;
        check.positive("hc_eps", self.hc_eps)
    }
}

/// Checks the tensors of a call, and returns them with its tokens and their channels.
fn bind(views: &Views, backward: bool) -> Result<(Signature<'_>, [usize; 2])> {
    let gates = &["num_tokens", "num_streams"];
    let matrix = &["num_tokens", "source", "destination"];
    let tensors = [
        read("streams").of(&[DType::Bf16]).axes(&["num_tokens", "num_streams", "hidden_size"]).rows(),
        read("fn").axes(&["num_columns", "num_streams", "hidden_size"]),
        read("scale").axes(&["num_groups"]),
        read("base").axes(&["num_columns"]),
        write("pre").axes(gates).when(!backward),
        write("post").axes(gates).when(!backward),
        write("comb").axes(matrix).when(!backward),
        saved("mix", backward).axes(&["num_tokens", "num_columns"]),
        saved("rstd", backward).axes(&["num_tokens"]),
        read("dpre").axes(gates).when(backward),
        read("dpost").axes(gates).when(backward),
        read("dcomb").axes(matrix).when(backward),
        write("dstreams").like("streams").rows().when(backward),
        write("dfn").like("fn").when(backward),
        write("dscale").like("scale").when(backward),
        write("dbase").like("base").when(backward),
        scratch("workspace", 16),
    ];
    let signature = CHECK.signature(views, tensors).given("num_streams", NUM_STREAMS).given("num_groups", 3);
    let signature = signature.given("source", NUM_STREAMS).given("destination", NUM_STREAMS);
    let signature = signature.given("num_columns", NUM_COLUMNS).wide("num_tokens");
    // All streams of a token together are counted in 32 bits.
    let mut signature = signature.extent("hidden_size", 1, i32::MAX as usize / NUM_STREAMS);
    let extents = signature.bind(["num_tokens", "hidden_size"])?;
    Ok((signature, extents))
}

/// Blocks of tokens and parts of the channels of the projection by tensor cores.
pub(crate) fn projection(device: &Device, num_tokens: usize, hidden_size: usize) -> [usize; 2] {
    let (tiles, wanted) = (num_tokens.div_ceil(BLOCK_TOKENS), 2 * device.environment().processors as usize);
    let most = (NUM_STREAMS * hidden_size).div_ceil(STEP).div_ceil(FEWEST_STEPS);
    [tiles, (wanted / tiles.max(1)).clamp(1, most)]
}

/// Blocks of the projection, and parts of the channels.
pub(crate) fn projection_blocks(device: &Device, num_tokens: usize, hidden_size: usize, wide: bool) -> [usize; 2] {
    let [tiles, splits] = projection(device, num_tokens, hidden_size);
    if wide { [tiles.saturating_mul(splits), splits] } else { [num_tokens.div_ceil(SCALAR_TOKENS), 1] }
}

/// Bytes of scratch memory that [`forward`] needs.
pub fn forward_workspace_bytes(device: &Device, num_tokens: usize, hidden_size: usize) -> usize {
    let [_, splits] = projection(device, num_tokens, hidden_size);
    splits * num_tokens * PARTIAL_WIDTH * 4
}

/// Launches the forward; returns the kernels that ran. Its tensors:
///
/// - `streams` `[num_tokens, 4, hidden_size]` bf16, rows contiguous;
/// - `fn` `[24, 4, hidden_size]`, `scale` `[3]` and `base` `[24]` f32: 4 columns of pre, 4 of post, 16 of comb by
///   sources;
/// - `pre` and `post` `[num_tokens, 4]` and `comb` `[num_tokens, 4, 4]` (source, destination) f32;
/// - `mix` `[num_tokens, 24]` and `rstd` `[num_tokens]` f32, for the backward;
/// - `workspace`, scratch memory of [`forward_workspace_bytes`] bytes at a multiple of 16.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn forward(device: &Device, views: &Views, numbers: Numbers) -> Result<Vec<&'static str>> {
    let (signature, [num_tokens, hidden_size]) = bind(views, false)?;
    numbers.check(CHECK)?;
    let workspace = &views["workspace"];
    CHECK.holds("workspace", workspace, forward_workspace_bytes(device, num_tokens, hidden_size))?;
    let wide = signature.vectorised() && views["fn"].address.is_multiple_of(16);
    let [blocks, splits] = projection_blocks(device, num_tokens, hidden_size, wide);
    let name = if wide { "mhc_mix_project" } else { "mhc_mix_project_scalar" };
    let params = signature.params(&["streams", "fn"]).ptr("partials", workspace);
    let params = params.i64("num_tokens", num_tokens)?.i32("hidden_size", hidden_size)?.i32("splits", splits)?;
    device.kernel(FILE, &[], name)?.launch_blocks("streams", blocks, &params)?;
    let params = CHECK.params().ptr("partials", workspace);
    let params = ["scale", "base", "pre", "post", "comb", "mix", "rstd"]
        .into_iter()
        .fold(params, |params, name| params.ptr(name, &views[name]));
    let params = params.i64("num_tokens", num_tokens)?.i32("hidden_size", hidden_size)?.i32("splits", splits)?;
    let params = params.i32("sinkhorn_iters", numbers.sinkhorn_iters)?;
    let params = params.f32("norm_eps", numbers.norm_eps).f32("hc_eps", numbers.hc_eps);
    let kernel = device.kernel(FILE, &[], "mhc_mix_coefficients")?;
    kernel.launch_blocks("streams", num_tokens.div_ceil(COEFFICIENT_TOKENS), &params)?;
    Ok(vec![name, "mhc_mix_coefficients"])
}

/// Parts of the tokens, each of which has blocks of its own for all channels: as many as leave the fewest
/// multiprocessors idle at the end.
pub(crate) fn parts_of_tokens(device: &Device, num_tokens: usize, hidden_size: usize, wide: Wide) -> usize {
    let columns = (NUM_STREAMS * hidden_size).div_ceil(wide.channels * BACKWARD_THREADS);
    let at_once = wide.blocks * device.environment().processors as usize;
    let most = num_tokens.div_ceil(FEWEST_TOKENS).clamp(1, MOST_PARTS);
    // Of the places of whole rounds of blocks how many are empty, in 2^20ths; of equal ones the fewest parts.
    let idle = |parts: &usize| {
        let blocks = columns * parts;
        let places = blocks.div_ceil(at_once) * at_once;
        ((places - blocks) << 20) / places
    };
    (1..=most).min_by_key(idle).unwrap_or(1)
}

/// How the backward is spread over a device.
struct Spread {
    /// Blocks of the coefficients.
    blocks: usize,
    /// Parts of the tokens.
    splits: usize,
}

impl Spread {
    fn of(device: &Device, num_tokens: usize, hidden_size: usize) -> Self {
        let processors = device.environment().processors as usize;
        // At least one block, so that no tokens give sums of zero.
        let blocks = num_tokens.div_ceil(COEFFICIENT_TOKENS).clamp(1, 2 * processors);
        Self { blocks, splits: parts_of_tokens(device, num_tokens, hidden_size, WIDE) }
    }

    /// Floats of each token's numbers, of the parts of dbase and dscale, and of dfn. Each begins at a multiple of 16
    /// bytes.
    fn floats(&self, num_tokens: usize, hidden_size: usize) -> [usize; 3] {
        let dfn = self.splits * NUM_COLUMNS * NUM_STREAMS * hidden_size;
        [num_tokens * NUMBERS, self.blocks * 2 * NUM_COLUMNS, dfn]
    }
}

/// The launches of a backward, one after the other, and the memory that they share.
pub(crate) struct Backward<'a> {
    device: &'a Device,
    check: Arguments,
    num_tokens: usize,
    hidden_size: usize,
    spread: Spread,
    /// Each token's numbers, the parts of dbase and dscale, and of dfn.
    numbers: DeviceAddress,
    partials: DeviceAddress,
    dfn_partials: DeviceAddress,
}

impl<'a> Backward<'a> {
    /// Of the operator `check`, with [`backward_workspace_bytes`] bytes from `workspace` on, a multiple of 16.
    pub fn of(
        device: &'a Device,
        check: Arguments,
        workspace: DeviceAddress,
        [num_tokens, hidden_size]: [usize; 2],
    ) -> Self {
        let spread = Spread::of(device, num_tokens, hidden_size);
        let [of_tokens, of_blocks, _] = spread.floats(num_tokens, hidden_size);
        let [numbers, partials, dfn_partials] =
            [0, of_tokens, of_tokens + of_blocks].map(|floats| DeviceAddress(workspace.0 + 4 * floats as u64));
        Self { device, check, num_tokens, hidden_size, spread, numbers, partials, dfn_partials }
    }

    /// From mix, rstd, scale, base, dpre, dpost and dcomb, which `params` has in this order, each token's numbers.
    pub fn coefficients(&self, params: Params, numbers: Numbers) -> Result<&'static str> {
        let params = params.ptr("numbers", self.numbers).ptr("partials", self.partials);
        let params = params.i64("num_tokens", self.num_tokens)?.i32("hidden_size", self.hidden_size)?;
        let params = params.i32("sinkhorn_iters", numbers.sinkhorn_iters)?.f32("hc_eps", numbers.hc_eps);
        let passes = 2 * numbers.sinkhorn_iters - 1;
        let shared_bytes = (passes * 2 * BACKWARD_THREADS * 4) as u32;
        let blocks = self.spread.blocks as u64;
        let config = LaunchConfig::linear(self.check.operator, "streams", blocks, BACKWARD_THREADS as u32)?;
        let kernel = self.device.kernel(BACKWARD_FILE, &[], "mhc_mix_backward_coefficients")?;
        kernel.launch(LaunchConfig { shared_bytes, ..config }, &params)?;
        Ok("mhc_mix_backward_coefficients")
    }

    /// The gradient of `streams` and the parts of that of `projection`, by a kernel whose threads own so many channels.
    /// `params` has what it takes beside these.
    pub fn streams(
        &self,
        (file, kernel, channels): (&str, &str, usize),
        params: Params,
        [streams, projection, dstreams]: [&TensorView; 3],
    ) -> Result<()> {
        let params = params.strided("streams", streams, ["token_stride", "stream_stride"]).ptr("fn", projection);
        let params = params.ptr("numbers", self.numbers);
        let params = params.strided("dstreams", dstreams, ["token_stride", "stream_stride"]);
        let params = params.ptr("dfn_partials", self.dfn_partials).i64("num_tokens", self.num_tokens)?;
        let params = params.i32("hidden_size", self.hidden_size)?.i32("splits", self.spread.splits)?;
        let columns = (NUM_STREAMS * self.hidden_size).div_ceil(channels * BACKWARD_THREADS);
        let blocks = columns.saturating_mul(self.spread.splits);
        self.device.kernel(file, &[], kernel)?.launch_blocks("streams", blocks, &params)
    }

    /// Adds up what the blocks left of dfn, dscale and dbase.
    pub fn sums(&self, views: &Views) -> Result<&'static str> {
        let channels = NUM_STREAMS * self.hidden_size;
        let params = self.check.params().ptr("dfn_partials", self.dfn_partials).ptr("dfn", &views["dfn"]);
        let params = params.ptr("partials", self.partials).ptr("dscale", &views["dscale"]);
        let params = params.ptr("dbase", &views["dbase"]).i64("channels", channels)?;
        let params = params.i32("splits", self.spread.splits)?.i32("blocks", self.spread.blocks)?;
        let kernel = self.device.kernel(BACKWARD_FILE, &[], "mhc_mix_backward_sums")?;
        kernel.launch_blocks("streams", (NUM_COLUMNS * channels).div_ceil(BACKWARD_THREADS), &params)?;
        Ok("mhc_mix_backward_sums")
    }
}

/// Bytes of scratch memory that [`backward`] needs.
pub fn backward_workspace_bytes(device: &Device, num_tokens: usize, hidden_size: usize) -> usize {
    4 * Spread::of(device, num_tokens, hidden_size).floats(num_tokens, hidden_size).iter().sum::<usize>()
}

/// Launches the backward; returns the kernels that ran. Its tensors:
///
/// - `streams`, `fn`, `scale`, `base`, `mix` and `rstd` as the forward read and saved them;
/// - `dpre`, `dpost`, `dcomb` f32: the gradients of the forward's outputs;
/// - `dstreams` like `streams`, rows contiguous: the gradient by way of these coefficients alone; `dfn`, `dscale` and
///   `dbase` f32
///   like `fn`, `scale` and `base`;
/// - `workspace`, scratch memory of [`backward_workspace_bytes`] bytes at a multiple of 16.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn backward(device: &Device, views: &Views, numbers: Numbers) -> Result<Vec<&'static str>> {
    let (signature, [num_tokens, hidden_size]) = bind(views, true)?;
    numbers.check(CHECK)?;
    let workspace = &views["workspace"];
    CHECK.holds("workspace", workspace, backward_workspace_bytes(device, num_tokens, hidden_size))?;
    let backward = Backward::of(device, CHECK, workspace.into(), [num_tokens, hidden_size]);
    let params = signature.params(&["mix", "rstd", "scale", "base", "dpre", "dpost", "dcomb"]);
    let coefficients = backward.coefficients(params, numbers)?;
    let (name, channels) = match fits_wide(views, &["streams", "dstreams"], hidden_size) {
        true => ("mhc_mix_backward_streams_wide", WIDE.channels),
        false => ("mhc_mix_backward_streams_scalar", 1),
    };
    let read = [&views["streams"], &views["fn"], &views["dstreams"]];
    backward.streams((BACKWARD_FILE, name, channels), CHECK.params(), read)?;
    Ok(vec![coefficients, name, backward.sums(views)?])
}

/// Whether accesses of 16 bytes fit every row of these tensors.
pub(crate) fn fits_wide(views: &Views, names: &[&str], hidden_size: usize) -> bool {
    fit(views, names, hidden_size, 8)
}

/// Whether accesses of two neighbouring channels fit every row of these tensors.
pub(crate) fn fits_pairs(views: &Views, names: &[&str], hidden_size: usize) -> bool {
    fit(views, names, hidden_size, 2)
}

/// Whether accesses of so many neighbouring channels of bf16 do.
fn fit(views: &Views, names: &[&str], hidden_size: usize, channels: usize) -> bool {
    let fits = |name: &&str| {
        let view = &views[*name];
        let (_, outer) = view.strides.split_last().unwrap_or((&1, &[]));
        view.address.is_multiple_of(2 * channels as u64) && outer.iter().all(|stride| stride % channels as i64 == 0)
    };
    hidden_size.is_multiple_of(channels) && names.iter().all(fits)
}
