//! `mhc_mix`: launcher of `kernels/cuda/streams/mhc_mix.cu`, `mhc_mix_hopper.cu`,
//! `mhc_mix_backward.cu` and `mhc_mix_hopper_backward.cu` (inference 2.1 and 2.2, training 11.1).

use crate::arguments::{Arguments, Signature, read, write};
pub use crate::implementation::Implementation;
use crate::streams::mhc_post::NUM_STREAMS;
use crate::streams::site::{MOST_CHANNELS, ProjectionSizes, bind_streams, site, size_params};
use dsv4_runtime::params::{DeviceAddress, Params};
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::tensor_map::TensorMap;
use dsv4_runtime::{DType, Device, LaunchConfig, Result, TensorView, Views};

const FILE: &str = "mhc_mix.cu";
const HOPPER_FILE: &str = "mhc_mix_hopper.cu";
const BACKWARD_FILE: &str = "mhc_mix_backward.cu";
const HOPPER_BACKWARD_FILE: &str = "mhc_mix_hopper_backward.cu";
const CHECK: Arguments = Arguments { operator: "mhc_mix" };
/// Coefficients of a token: pre, post, and comb by sources.
pub const NUM_COLUMNS: usize = 2 * NUM_STREAMS + NUM_STREAMS * NUM_STREAMS;
/// Most iterations, whose matrices the backward keeps.
pub const MAX_ITERATIONS: usize = 48;
/// Tokens of a block of the projection, and channels of a step. A part of the channels has at least
/// one step of each stream: `BLOCK_TOKENS` and `PIECE * BLOCK_PIECES` in the kernel source.
const BLOCK_TOKENS: usize = 128;
const STEP: usize = 64;
/// Tokens of a block of the projection for Hopper: `TILE_TOKENS` in the kernel source. Its steps
/// have the same width, and a part of the channels has at least one step of each stream.
const HOPPER_TOKENS: usize = 256;
/// Cost of a block of it in addition to its steps, in steps.
const HOPPER_OVERHEAD: usize = 3;
/// Upper bound on its blocks for each SM, where there are several parts of the channels.
const HOPPER_ROUNDS: usize = 4;
/// Up to this many tokens the portable kernels run, unless others are requested: a block for Hopper
/// would spend most of its work on missing tokens.
pub const FEW_TOKENS: usize = HOPPER_TOKENS;
/// Tokens of a block of the projection for few tokens, `FEW_TOKENS` in the kernel source. It runs
/// only for calls with at most one such block.
const FEW_PROJECTED_TOKENS: usize = 4;
/// Channels of each stream that such a block has: `FEW_PIECES * PIECE` in the kernel source.
const FEW_CHANNELS: usize = 64;
/// Tokens of a block of the scalar projection: one a warp.
const SCALAR_TOKENS: usize = 8;
/// Floats that the projection stores for a token.
const PARTIAL_WIDTH: usize = 32;
/// Tokens of a block of the coefficients, forward and backward.
const COEFFICIENT_TOKENS: usize = 8;
/// Most blocks of the backward's coefficients for each SM: they wait for one pass after the other.
const COEFFICIENT_BLOCKS: usize = 4;
/// Most tokens for which each has a separate block of the coefficients, where the channels are in
/// many parts; and the most parts that are not many. All of these blocks run at once.
const FEW_COEFFICIENT_TOKENS: usize = 1024;
const FEW_PARTS: usize = 4;
/// Threads of the backward's blocks except those with MMA, and the floats that it stores for a
/// token.
const BACKWARD_THREADS: usize = 128;
const NUMBERS: usize = NUM_COLUMNS + 4;
/// Tokens of a part of them in the backward: twice the number whose values its blocks hold at once.
const FEWEST_TOKENS: usize = 64;
/// Tokens of a TMA box of streams that the backward for Hopper copies, 64 channels wide, and
/// adjacent boxes that a block processes: `PANEL_TOKENS` and `PANELS` in the kernel source.
const PANEL_TOKENS: usize = 64;
const BLOCK_PANELS: usize = 4;
/// Most parts, each of which leaves separate sums for dfn.
const MOST_PARTS: usize = 16;

/// The configuration of the wide kernel of a backward.
#[derive(Clone, Copy)]
pub(crate) struct Wide {
    /// Channels that a thread owns.
    pub channels: usize,
    /// Blocks that an SM holds at once, limited by registers or shared memory.
    pub blocks: usize,
}

/// Of a block's [`BACKWARD_THREADS`] threads, of which the source has twice as many:
/// `PRODUCT_CHANNELS` for all of them.
pub(crate) const WIDE: Wide = Wide { channels: 4, blocks: 1 };

/// Every module that the launchers compile.
pub fn modules() -> Vec<Module> {
    [FILE, HOPPER_FILE, BACKWARD_FILE, HOPPER_BACKWARD_FILE].map(|file| module(file, &[])).to_vec()
}

/// The numeric options of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Numbers {
    /// Iterations of the Sinkhorn normalisation, of which the first is the softmax with its
    /// columns: 1 to [`MAX_ITERATIONS`].
    pub sinkhorn_iters: usize,
    /// Added to the mean square of a token.
    pub norm_eps: f32,
    /// Added to pre, after the softmax, and to each divisor of the Sinkhorn iteration.
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

/// Checks the tensors of a forward by these kernels, or of a backward. Returns them with the
/// numbers of tokens and of channels.
fn bind(
    views: &Views,
    backward: bool,
    implementation: Implementation,
) -> Result<(Signature<'_>, [usize; 2])> {
    let gates = &["num_tokens", "num_streams"];
    let matrix = &["num_tokens", "source", "destination"];
    let hopper = implementation == Implementation::Hopper;
    let streams =
        read("streams").of(&[DType::Bf16]).axes(&["num_tokens", "num_streams", "hidden_size"]);
    let dstreams = write("dstreams").like("streams").when(backward);
    let [streams, dstreams] =
        [streams, dstreams].map(|rows| if hopper { rows.aligned_rows() } else { rows.rows() });
    let tensors = [
        streams,
        write("pre").axes(gates).when(!backward),
        write("post").axes(gates).when(!backward),
        write("comb").axes(matrix).when(!backward),
        read("dpre").axes(gates).when(backward),
        read("dpost").axes(gates).when(backward),
        read("dcomb").axes(matrix).when(backward),
        dstreams,
    ];
    let tensors =
        tensors.into_iter().chain(site(&["num_columns", "num_streams", "hidden_size"], backward));
    let multiple = if hopper { 8 } else { 1 };
    let (num_columns, num_groups, most) = (NUM_COLUMNS, 3, MOST_CHANNELS);
    let sizes = ProjectionSizes { num_columns, num_groups, multiple, most };
    bind_streams(CHECK, views, tensors, sizes)
}

/// Most parts of the channels of an invariant path. A token's partial sums are then an eighth of
/// its streams.
const INVARIANT_PARTS: usize = 32;

/// The same of the projection for Hopper with many tokens: `FEW_WARPS` in the kernel source. With
/// few tokens each group of channels is a part, and the kernel that adds them adds these first.
const INVARIANT_HOPPER_PARTS: usize = 8;

/// Whether a single block of the projection has all tokens, if 16-byte accesses fit their rows. An
/// invariant path has one projection for any number of tokens.
pub(crate) fn has_few_projected_tokens(device: &Device, num_tokens: usize) -> bool {
    (1..=FEW_PROJECTED_TOKENS).contains(&num_tokens) && !device.is_invariant()
}

/// Blocks of tokens and parts of the channels of the projection with MMA.
fn projection(device: &Device, num_tokens: usize, hidden_size: usize) -> [usize; 2] {
    let (tiles, wanted) =
        (num_tokens.div_ceil(BLOCK_TOKENS), 2 * device.environment().processors as usize);
    if device.is_invariant() {
        return [tiles, hidden_size.div_ceil(STEP).clamp(1, INVARIANT_PARTS)];
    }
    [tiles, (wanted / tiles.max(1)).clamp(1, hidden_size.div_ceil(STEP).max(1))]
}

/// Whether each block of the projection with MMA has one step of each stream.
pub(crate) fn has_a_step_of_each_stream(
    device: &Device,
    num_tokens: usize,
    hidden_size: usize,
) -> bool {
    let [_, splits] = projection(device, num_tokens, hidden_size);
    num_tokens > 0 && splits == hidden_size.div_ceil(STEP) && !device.is_invariant()
}

/// Blocks of the projection, and parts of the channels.
pub(crate) fn projection_blocks(
    device: &Device,
    num_tokens: usize,
    hidden_size: usize,
    wide: bool,
) -> [usize; 2] {
    if wide && has_few_projected_tokens(device, num_tokens) {
        return [hidden_size.div_ceil(FEW_CHANNELS); 2];
    }
    let [tiles, splits] = projection(device, num_tokens, hidden_size);
    if wide {
        [tiles.saturating_mul(splits), splits]
    } else {
        [num_tokens.div_ceil(SCALAR_TOKENS), 1]
    }
}

/// Blocks of tokens and parts of the channels of the projection for Hopper. Of all numbers of
/// parts, the fastest is used, and the smallest if several are equal.
fn hopper_projection(processors: usize, num_tokens: usize, hidden_size: usize) -> [usize; 2] {
    let (tiles, processors) = (num_tokens.div_ceil(HOPPER_TOKENS), processors.max(1));
    let groups = hidden_size.div_ceil(STEP);
    let steps_of = |splits: usize| NUM_STREAMS * groups.div_ceil(splits);
    let time = |splits: &usize| {
        (tiles * splits).div_ceil(processors) * (steps_of(*splits) + HOPPER_OVERHEAD)
    };
    let most = (HOPPER_ROUNDS * processors / tiles.max(1)).clamp(1, groups.max(1));
    [tiles, (1..=most).min_by_key(time).unwrap_or(1)]
}

/// Blocks of the projection for Hopper, and parts of the channels.
fn hopper_blocks(device: &Device, num_tokens: usize, hidden_size: usize) -> [usize; 2] {
    let [tiles, splits] =
        hopper_projection(device.environment().processors as usize, num_tokens, hidden_size);
    let groups = hidden_size.div_ceil(STEP).max(1);
    let splits = match device.is_invariant() {
        true if num_tokens <= FEW_COEFFICIENT_TOKENS => groups,
        true => groups.min(INVARIANT_HOPPER_PARTS),
        false => splits,
    };
    [tiles.saturating_mul(splits), splits]
}

/// Upper bound on the parts of the channels of either projection: the scratch memory has this many
/// slots for each token.
pub(crate) fn most_splits(device: &Device, num_tokens: usize, hidden_size: usize) -> usize {
    let [_, portable] = projection_blocks(device, num_tokens, hidden_size, true);
    let [_, hopper] = hopper_blocks(device, num_tokens, hidden_size);
    portable.max(hopper)
}

/// Whether the kernels for Hopper run for this call of the operator `check`. `misfit` is the reason
/// why they cannot take its tensors, if there is one.
///
/// # Errors
/// They are requested and cannot run.
pub(crate) fn runs_hopper(
    check: Arguments,
    device: &Device,
    implementation: Implementation,
    num_tokens: usize,
    misfit: Option<String>,
) -> Result<bool> {
    let few = implementation == Implementation::Auto
        && num_tokens <= FEW_TOKENS
        && !device.is_invariant();
    let implementation = if few { Implementation::Portable } else { implementation };
    // Without tokens nothing is launched.
    implementation.runs_hopper(
        check,
        device.environment(),
        usize::MAX,
        misfit.filter(|_| num_tokens > 0),
    )
}

/// The TMA boxes of `box_tokens` tokens of streams `[num_tokens, 4, hidden_size]` that projections
/// for Hopper copy. `None` where hardware cannot copy boxes of such a tensor or count its tokens.
pub(crate) fn streams_map(streams: &TensorView, box_tokens: usize) -> Option<TensorMap> {
    let (&[tokens, streams_of_token, width], &[token, stream, column]) =
        (&streams.shape[..], &streams.strides[..])
    else {
        return None;
    };
    i32::try_from(tokens).ok()?;
    // Strides beyond 2^40 bytes do not fit a map in any case.
    let bytes = |elements: i64| elements.checked_mul(2);
    let (shape, strides) =
        (vec![streams_of_token, tokens, 2 * width], vec![bytes(stream)?, bytes(token)?, column]);
    TensorMap::of(
        &TensorView { dtype: DType::U8, shape, strides, ..streams.clone() },
        box_tokens as u32,
    )
}

/// The first launch of [`forward`], already checked: the launch itself rejects nothing.
pub(crate) struct Projection<'a> {
    device: &'a Device,
    call: Signature<'a>,
    num_tokens: usize,
    hidden_size: usize,
    /// Whether 16-byte accesses fit every row of streams and weights.
    aligned: bool,
    /// The map of the kernel for Hopper, if that kernel runs.
    map: Option<TensorMap>,
}

impl<'a> Projection<'a> {
    /// With all of [`forward`]'s checks of its arguments.
    ///
    /// # Errors
    /// A rejected argument; kernels for Hopper that are requested and cannot run.
    pub fn of(
        device: &'a Device,
        views: &'a Views,
        numbers: Numbers,
        implementation: Implementation,
    ) -> Result<Self> {
        let (call, [num_tokens, hidden_size]) = check(device, views, numbers, implementation)?;
        let aligned = call.vectorised() && views["fn"].address.is_multiple_of(16);
        let map = aligned.then(|| streams_map(&views["streams"], HOPPER_TOKENS)).flatten();
        let misfit = map.is_none().then(|| {
            "hardware copies no boxes of streams: their rows overlap or lie at no multiples of 16 bytes".to_owned()
        });
        let hopper = runs_hopper(CHECK, device, implementation, num_tokens, misfit)?;
        Ok(Self { device, call, num_tokens, hidden_size, aligned, map: map.filter(|_| hopper) })
    }

    /// Launches one of the projections: for Hopper, for all hardware, for blocks with one step of
    /// each stream, for few tokens, or for any layout.
    ///
    /// # Errors
    /// A compile error, a rejected launch.
    pub fn launch(&self) -> Result<Projected> {
        let Self { device, num_tokens, hidden_size, .. } = *self;
        let sizes = |params, splits| size_params(params, [num_tokens, hidden_size], splits);
        let in_order = device.is_invariant() && self.map.is_none();
        let projected =
            |kernel, splits| Projected { kernel, splits, num_tokens, hidden_size, in_order };
        if let Some(map) = &self.map {
            let [blocks, splits] = hopper_blocks(device, num_tokens, hidden_size);
            let params = self.call.append_as(self.call.params(&["fn"]), "partials", "workspace");
            let params =
                sizes(params, splits)?.tensor_map("streams_map", Some(device.tensor_map(map)?));
            let name = "mhc_mix_project_hopper";
            device.kernel(HOPPER_FILE, &[], name)?.launch_blocks("streams", blocks, &params)?;
            return Ok(projected(name, splits));
        }
        let [blocks, splits] = projection_blocks(device, num_tokens, hidden_size, self.aligned);
        // One block of tokens, as the other kernel has for so few: its blocks are the parts of the
        // channels as well.
        let name = match self.aligned {
            true if has_few_projected_tokens(device, num_tokens) => "mhc_mix_project_few",
            true if has_a_step_of_each_stream(device, num_tokens, hidden_size) => {
                "mhc_mix_project_at_once"
            }
            true => "mhc_mix_project",
            false => "mhc_mix_project_scalar",
        };
        let params = self.call.params(&["streams", "fn"]);
        let params = sizes(self.call.append_as(params, "partials", "workspace"), splits)?;
        device.kernel(FILE, &[], name)?.launch_blocks("streams", blocks, &params)?;
        Ok(projected(name, splits))
    }
}

/// Bytes of scratch memory that [`forward`] needs.
pub fn forward_workspace_bytes(device: &Device, num_tokens: usize, hidden_size: usize) -> usize {
    most_splits(device, num_tokens, hidden_size) * num_tokens * PARTIAL_WIDTH * 4
}

/// Launches the forward; returns the kernels that ran. Its tensors:
///
/// - `streams` `[num_tokens, 4, hidden_size]` bf16, rows contiguous;
/// - `fn` `[24, 4, hidden_size]`, `scale` `[3]` and `base` `[24]` f32: 4 columns of pre, 4 of
///   post, 16 of comb by sources;
/// - `pre` and `post` `[num_tokens, 4]` and `comb` `[num_tokens, 4, 4]` (source, destination) f32;
/// - `mix` `[num_tokens, 24]` and `rstd` `[num_tokens]` f32, for the backward;
/// - `workspace`, scratch memory of [`forward_workspace_bytes`] bytes at a multiple of 16.
///
/// The kernels for Hopper take streams with rows at multiples of 16 bytes, and `hidden_size`
/// a multiple of 8.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn forward(
    device: &Device,
    views: &Views,
    numbers: Numbers,
    implementation: Implementation,
) -> Result<Vec<&'static str>> {
    let projected = Projection::of(device, views, numbers, implementation)?.launch()?;
    Ok(vec![projected.kernel, coefficients(device, views, numbers, projected)?])
}

/// The result of a projection in `workspace`.
#[derive(Clone, Copy)]
pub(crate) struct Projected {
    /// The kernel that ran.
    pub kernel: &'static str,
    /// Parts of the channels.
    pub splits: usize,
    num_tokens: usize,
    hidden_size: usize,
    /// Whether the parts are added one after the other for any number of tokens: those of an
    /// invariant path, but for the projection for Hopper.
    in_order: bool,
}

impl Projected {
    /// Whether there are few tokens with many parts; then each token has a block in the next
    /// kernel.
    pub fn has_few_tokens(self) -> bool {
        self.num_tokens <= FEW_COEFFICIENT_TOKENS && self.splits > FEW_PARTS && !self.in_order
    }

    /// The parameters of the kernels after it, from it and from a call.
    pub fn params(self, params: Params, numbers: Numbers) -> Result<Params> {
        let params =
            params.i64("num_tokens", self.num_tokens)?.i32("hidden_size", self.hidden_size)?;
        let params =
            params.i32("splits", self.splits)?.i32("sinkhorn_iters", numbers.sinkhorn_iters)?;
        Ok(params.f32("norm_eps", numbers.norm_eps).f32("hc_eps", numbers.hc_eps))
    }
}

/// Checks the arguments of [`forward`]. Returns its tensors with the numbers of tokens and
/// channels.
fn check<'a>(
    device: &Device,
    views: &'a Views,
    numbers: Numbers,
    implementation: Implementation,
) -> Result<(Signature<'a>, [usize; 2])> {
    let (signature, extents) = bind(views, false, implementation)?;
    numbers.check(CHECK)?;
    CHECK.holds(
        "workspace",
        &views["workspace"],
        forward_workspace_bytes(device, extents[0], extents[1]),
    )?;
    Ok((signature, extents))
}

/// Checks a call as [`Projection::of`] does, for a kernel of another operator with the same result.
/// That kernel replaces the one for Hopper, or one for rows of whole 16-byte accesses. Returns its
/// blocks and the description of its result.
pub(crate) fn projected_by(
    device: &Device,
    views: &Views,
    numbers: Numbers,
    kernel: &'static str,
    implementation: Implementation,
) -> Result<(usize, Projected)> {
    let (_, [num_tokens, hidden_size]) = check(device, views, numbers, implementation)?;
    let [blocks, splits] = match implementation {
        Implementation::Hopper => hopper_blocks(device, num_tokens, hidden_size),
        _ => projection_blocks(device, num_tokens, hidden_size, true),
    };
    let in_order = device.is_invariant() && implementation != Implementation::Hopper;
    Ok((blocks, Projected { kernel, splits, num_tokens, hidden_size, in_order }))
}

/// The second launch. Returns the kernel that ran.
pub(crate) fn coefficients(
    device: &Device,
    views: &Views,
    numbers: Numbers,
    projected: Projected,
) -> Result<&'static str> {
    let params = CHECK.params().ptr("partials", &views["workspace"]);
    let params = ["scale", "base", "pre", "post", "comb", "mix", "rstd"]
        .into_iter()
        .fold(params, |params, name| params.ptr(name, &views[name]));
    let (name, blocks) = match projected.has_few_tokens() {
        true => ("mhc_mix_coefficients_few", projected.num_tokens),
        false => ("mhc_mix_coefficients", projected.num_tokens.div_ceil(COEFFICIENT_TOKENS)),
    };
    let params = projected.params(params, numbers)?;
    device.kernel(FILE, &[], name)?.launch_blocks("streams", blocks, &params)?;
    Ok(name)
}

/// Parts of the tokens, each with separate blocks for all channels: the number that leaves the
/// fewest SMs idle at the end.
pub(crate) fn parts_of_tokens(
    device: &Device,
    num_tokens: usize,
    hidden_size: usize,
    wide: Wide,
) -> usize {
    let columns = (NUM_STREAMS * hidden_size).div_ceil(wide.channels * BACKWARD_THREADS);
    let at_once = wide.blocks * device.environment().processors as usize;
    let most = num_tokens.div_ceil(FEWEST_TOKENS).clamp(1, MOST_PARTS);
    // The empty slots among those of whole rounds of blocks, in 2^20ths; if several are equal, the
    // fewest parts.
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
        // At least one block, so that the sums are zero without tokens.
        let blocks =
            num_tokens.div_ceil(COEFFICIENT_TOKENS).clamp(1, COEFFICIENT_BLOCKS * processors);
        Self { blocks, splits: parts_of_tokens(device, num_tokens, hidden_size, WIDE) }
    }

    /// Floats of each token's numbers, of the parts of dbase and dscale, and of dfn. Each part
    /// starts at a multiple of 16 bytes.
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
    /// For the operator `check`, with [`backward_workspace_bytes`] bytes from `workspace` on, a
    /// multiple of 16.
    pub fn of(
        device: &'a Device,
        check: Arguments,
        workspace: DeviceAddress,
        [num_tokens, hidden_size]: [usize; 2],
    ) -> Self {
        let spread = Spread::of(device, num_tokens, hidden_size);
        let [of_tokens, of_blocks, _] = spread.floats(num_tokens, hidden_size);
        let [numbers, partials, dfn_partials] = [0, of_tokens, of_tokens + of_blocks]
            .map(|floats| DeviceAddress(workspace.0 + 4 * floats as u64));
        Self { device, check, num_tokens, hidden_size, spread, numbers, partials, dfn_partials }
    }

    /// Computes each token's numbers from mix, rstd, scale, base, dpre, dpost and dcomb, which
    /// `params` has in this order.
    pub fn coefficients(&self, params: Params, numbers: Numbers) -> Result<&'static str> {
        let params = params.ptr("numbers", self.numbers).ptr("partials", self.partials);
        let params =
            params.i64("num_tokens", self.num_tokens)?.i32("hidden_size", self.hidden_size)?;
        let params =
            params.i32("sinkhorn_iters", numbers.sinkhorn_iters)?.f32("hc_eps", numbers.hc_eps);
        let passes = 2 * numbers.sinkhorn_iters - 1;
        let shared_bytes = (passes * 2 * BACKWARD_THREADS * 4) as u32;
        let blocks = self.spread.blocks as u64;
        let config =
            LaunchConfig::linear(self.check.operator, "streams", blocks, BACKWARD_THREADS as u32)?;
        let kernel = self.device.kernel(BACKWARD_FILE, &[], "mhc_mix_backward_coefficients")?;
        kernel.launch(LaunchConfig { shared_bytes, ..config }, &params)?;
        Ok("mhc_mix_backward_coefficients")
    }

    /// The gradient of `streams` and the parts of that of `projection`, by a kernel whose threads
    /// own this many channels. `params` has its other parameters.
    pub fn streams(
        &self,
        (file, kernel, channels): (&str, &str, usize),
        params: Params,
        [streams, projection, dstreams]: [&TensorView; 3],
    ) -> Result<()> {
        let params = params
            .strided("streams", streams, ["token_stride", "stream_stride"])
            .ptr("fn", projection);
        let params = params.ptr("numbers", self.numbers);
        let params = params.strided("dstreams", dstreams, ["token_stride", "stream_stride"]);
        let params = params.ptr("dfn_partials", self.dfn_partials);
        let params = size_params(params, [self.num_tokens, self.hidden_size], self.spread.splits)?;
        let columns = (NUM_STREAMS * self.hidden_size).div_ceil(channels * BACKWARD_THREADS);
        let blocks = columns.saturating_mul(self.spread.splits);
        self.device.kernel(file, &[], kernel)?.launch_blocks("streams", blocks, &params)
    }

    /// The same by the kernel for Hopper, with the boxes of `map`; returns its name.
    fn streams_by_boxes(
        &self,
        map: &TensorMap,
        [projection, dstreams]: [&TensorView; 2],
    ) -> Result<&'static str> {
        let params = self.check.params().ptr("fn", projection).ptr("numbers", self.numbers);
        let params = params.strided("dstreams", dstreams, ["token_stride", "stream_stride"]);
        let params = params.ptr("dfn_partials", self.dfn_partials);
        let params = size_params(params, [self.num_tokens, self.hidden_size], self.spread.splits)?;
        let params = params.tensor_map("streams_map", Some(self.device.tensor_map(map)?));
        let panels = NUM_STREAMS * self.hidden_size.div_ceil(STEP);
        let blocks = panels.div_ceil(BLOCK_PANELS).saturating_mul(self.spread.splits);
        let kernel = "mhc_mix_backward_streams_hopper";
        self.device
            .kernel(HOPPER_BACKWARD_FILE, &[], kernel)?
            .launch_blocks("streams", blocks, &params)?;
        Ok(kernel)
    }

    /// Adds up the partial sums of dfn, dscale and dbase.
    pub fn sums(&self, views: &Views) -> Result<&'static str> {
        let channels = NUM_STREAMS * self.hidden_size;
        let params =
            self.check.params().ptr("dfn_partials", self.dfn_partials).ptr("dfn", &views["dfn"]);
        let params = params.ptr("partials", self.partials).ptr("dscale", &views["dscale"]);
        let params = params.ptr("dbase", &views["dbase"]).i64("channels", channels)?;
        let params = params.i32("splits", self.spread.splits)?.i32("blocks", self.spread.blocks)?;
        let kernel = self.device.kernel(BACKWARD_FILE, &[], "mhc_mix_backward_sums")?;
        kernel.launch_blocks(
            "streams",
            (NUM_COLUMNS * channels).div_ceil(BACKWARD_THREADS),
            &params,
        )?;
        Ok("mhc_mix_backward_sums")
    }
}

/// Bytes of scratch memory that [`backward`] needs.
pub fn backward_workspace_bytes(device: &Device, num_tokens: usize, hidden_size: usize) -> usize {
    4 * Spread::of(device, num_tokens, hidden_size)
        .floats(num_tokens, hidden_size)
        .iter()
        .sum::<usize>()
}

/// Launches the backward; returns the kernels that ran. Its tensors:
///
/// - `streams`, `fn`, `scale`, `base`, `mix` and `rstd` as the forward read and saved them;
/// - `dpre`, `dpost`, `dcomb` f32: the gradients of the forward's outputs;
/// - `dstreams` like `streams`, rows contiguous: only the gradient through these coefficients;
///   `dfn`, `dscale` and `dbase` f32 like `fn`, `scale` and `base`;
/// - `workspace`, scratch memory of [`backward_workspace_bytes`] bytes at a multiple of 16.
///
/// The kernel for Hopper takes rows of streams and dstreams at multiples of 16 bytes, and a
/// multiple of 8 channels.
///
/// # Errors
/// A rejected argument; kernels for Hopper that are requested and cannot run; a compile error, a
/// rejected launch.
pub fn backward(
    device: &Device,
    views: &Views,
    numbers: Numbers,
    implementation: Implementation,
) -> Result<Vec<&'static str>> {
    let (signature, [num_tokens, hidden_size]) = bind(views, true, implementation)?;
    numbers.check(CHECK)?;
    let workspace = &views["workspace"];
    CHECK.holds(
        "workspace",
        workspace,
        backward_workspace_bytes(device, num_tokens, hidden_size),
    )?;
    let backward = Backward::of(device, CHECK, workspace.into(), [num_tokens, hidden_size]);
    let map = map_of_backward(device, views, [num_tokens, hidden_size], implementation)?;
    let params = signature.params(&["mix", "rstd", "scale", "base", "dpre", "dpost", "dcomb"]);
    let coefficients = backward.coefficients(params, numbers)?;
    let name = match map {
        Some(map) => backward.streams_by_boxes(&map, [&views["fn"], &views["dstreams"]])?,
        None => streams_by_rows(device, views, &backward)?,
    };
    Ok(vec![coefficients, name, backward.sums(views)?])
}

/// The map of the backward for Hopper, if that kernel runs.
///
/// # Errors
/// It is requested and cannot run.
fn map_of_backward(
    device: &Device,
    views: &Views,
    [num_tokens, hidden_size]: [usize; 2],
    implementation: Implementation,
) -> Result<Option<TensorMap>> {
    let fits = fits_wide(views, &["streams", "dstreams"], hidden_size)
        && views["fn"].address.is_multiple_of(16);
    let map = fits.then(|| streams_map(&views["streams"], PANEL_TOKENS)).flatten();
    let misfit = map.is_none().then(|| {
        "hardware copies no boxes of streams, or dstreams: their rows overlap or lie at no multiples of 16 bytes"
            .to_owned()
    });
    let hopper = runs_hopper(CHECK, device, implementation, num_tokens, misfit)?;
    Ok(map.filter(|_| hopper && num_tokens > 0))
}

/// The gradient of the streams by the kernels for all hardware. Returns the one that ran.
fn streams_by_rows(
    device: &Device,
    views: &Views,
    backward: &Backward<'_>,
) -> Result<&'static str> {
    let (wide, scalar) = ("mhc_mix_backward_streams_wide", "mhc_mix_backward_streams_scalar");
    let is_wide = fits_wide(views, &["streams", "dstreams"], backward.hidden_size)
        && device.kernel(BACKWARD_FILE, &[], wide)?.fits(device.environment());
    let (name, channels) = if is_wide { (wide, WIDE.channels) } else { (scalar, 1) };
    let read = [&views["streams"], &views["fn"], &views["dstreams"]];
    backward.streams((BACKWARD_FILE, name, channels), CHECK.params(), read)?;
    Ok(name)
}

/// Whether 16-byte accesses fit every row of these tensors.
pub(crate) fn fits_wide(views: &Views, names: &[&str], hidden_size: usize) -> bool {
    const CHANNELS: usize = 8;
    let fits = |name: &&str| {
        let view = &views[*name];
        let (_, outer) = view.strides.split_last().unwrap_or((&1, &[]));
        view.address.is_multiple_of(2 * CHANNELS as u64)
            && outer.iter().all(|stride| stride % CHANNELS as i64 == 0)
    };
    hidden_size.is_multiple_of(CHANNELS) && names.iter().all(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_projection_for_hopper_fills_the_device_whatever_the_tokens_are() {
        let of = |tokens| hopper_projection(132, tokens, 7168);
        // Two blocks of tokens: as many parts as SMs process at once, of 8 steps each.
        assert_eq!([of(512), of(8192), of(32_768)], [[2, 56], [32, 4], [128, 1]]);
        // A hundred blocks would leave a quarter of the SMs idle.
        assert_eq!(of(25_600), [100, 5]);
        assert_eq!([hopper_projection(132, 0, 16), hopper_projection(1, 1, 8)], [[0, 1], [1, 1]]);
    }
}
