//! `mhc_head`: launcher of `kernels/cuda/mhc_head.cu`, `mhc_head_hopper.cu` and `mhc_head_backward.cu` (inference 2.5,
//! training 11.1).

use crate::arguments::{Arguments, Signature, read, saved, scratch, write};
pub use crate::implementation::Implementation;
use crate::mhc_mix::{Projection, Wide, fits_wide, most_splits, parts_of_tokens};
use crate::mhc_post::{NUM_STREAMS, threads};
use crate::runtime::device::{Module, module};
use crate::runtime::params::DeviceAddress;
use crate::runtime::{DType, Device, LaunchConfig, Result, Views};

const FILE: &str = "mhc_head.cu";
const HOPPER_FILE: &str = "mhc_head_hopper.cu";
const BACKWARD_FILE: &str = "mhc_head_backward.cu";
const CHECK: Arguments = Arguments { operator: "mhc_head" };
/// Floats that the projection leaves of a token; `PARTIAL_WIDTH<STREAMS>` in the kernel source.
const PARTIAL_WIDTH: usize = 8;
/// Most threads of a block of the mix, and of the backward's coefficients; `MIX_THREADS` and `COEFFICIENT_THREADS`
/// there.
const MIX_THREADS: usize = 128;
const COEFFICIENT_THREADS: usize = 256;
/// How often a thread of the coefficients takes a piece of a row.
const PIECES: usize = 8;
/// Threads of the other kernels of the backward.
const BACKWARD_THREADS: usize = 128;
/// How its wide kernel works.
const WIDE: Wide = Wide { channels: 8, blocks: 3 };
/// Floats that the coefficients leave of a token: `NUMBERS` and `PRODUCTS` in the kernel source.
const NUMBERS: usize = 3 * NUM_STREAMS;
const PRODUCTS: usize = 2 * NUM_STREAMS;

/// Every module that the launchers compile.
pub fn modules() -> Vec<Module> {
    [FILE, HOPPER_FILE, BACKWARD_FILE].map(|file| module(file, &[])).to_vec()
}

/// The numbers of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Numbers {
    /// Added to the mean square of a token.
    pub norm_eps: f32,
    /// Added to the sigmoids.
    pub hc_eps: f32,
}

impl Numbers {
    fn check(self) -> Result<()> {
        CHECK.positive("norm_eps", self.norm_eps)?;
        CHECK.positive("hc_eps", self.hc_eps)
    }
}

/// Checks the tensors of a forward by these kernels, or of a backward, and returns them with its tokens and their channels.
fn bind(views: &Views, forward: Option<Implementation>) -> Result<(Signature<'_>, [usize; 2])> {
    let backward = forward.is_none();
    let hopper = forward == Some(Implementation::Hopper);
    let streams = read("streams").of(&[DType::Bf16]).axes(&["num_tokens", "num_streams", "hidden_size"]);
    let tensors = [
        if hopper { streams.aligned_rows() } else { streams.rows() },
        read("fn").axes(&["num_columns", "num_streams", "hidden_size"]),
        read("scale").axes(&["num_groups"]),
        read("base").axes(&["num_columns"]),
        write("out").of(&[DType::Bf16]).axes(&["num_tokens", "hidden_size"]).rows().when(!backward),
        saved("mix", backward).axes(&["num_tokens", "num_columns"]),
        saved("rstd", backward).axes(&["num_tokens"]),
        read("dout").of(&[DType::Bf16]).axes(&["num_tokens", "hidden_size"]).rows().when(backward),
        write("dstreams").like("streams").rows().when(backward),
        write("dfn").like("fn").when(backward),
        write("dscale").like("scale").when(backward),
        write("dbase").like("base").when(backward),
        scratch("workspace", 16),
    ];
    let signature = CHECK.signature(views, tensors).given("num_streams", NUM_STREAMS).given("num_groups", 1);
    let signature = signature.given("num_columns", NUM_STREAMS).wide("num_tokens");
    // All streams of a token together are counted in 32 bits.
    let mut signature = signature.extent("hidden_size", if hopper { 8 } else { 1 }, i32::MAX as usize / NUM_STREAMS);
    let extents = signature.bind(["num_tokens", "hidden_size"])?;
    Ok((signature, extents))
}

/// Bytes of scratch memory that [`forward`] needs.
pub fn forward_workspace_bytes(device: &Device, num_tokens: usize, hidden_size: usize) -> usize {
    most_splits(device, num_tokens, hidden_size) * num_tokens * PARTIAL_WIDTH * 4
}

/// Launches the forward; returns the kernels that ran. Its tensors:
///
/// - `streams` `[num_tokens, 4, hidden_size]` bf16, rows contiguous;
/// - `fn` `[4, 4, hidden_size]`, `scale` `[1]` and `base` `[4]` f32;
/// - `out` `[num_tokens, hidden_size]` bf16, rows contiguous;
/// - `mix` `[num_tokens, 4]` and `rstd` `[num_tokens]` f32, for the backward;
/// - `workspace`, scratch memory of [`forward_workspace_bytes`] bytes at a multiple of 16.
///
/// The kernels for Hopper take streams whose rows lie at multiples of 16 bytes, and `hidden_size` a multiple of 8.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn forward(
    device: &Device,
    views: &Views,
    numbers: Numbers,
    implementation: Implementation,
) -> Result<Vec<&'static str>> {
    let (signature, [num_tokens, hidden_size]) = bind(views, Some(implementation))?;
    numbers.check()?;
    let workspace = &views["workspace"];
    CHECK.holds("workspace", workspace, forward_workspace_bytes(device, num_tokens, hidden_size))?;
    let vectorised = signature.vectorised();
    let aligned = signature.vectorised_rows(&["streams"]) && views["fn"].address.is_multiple_of(16);
    let projection = Projection { check: CHECK, device, views, num_tokens, hidden_size, aligned };
    let names = ["mhc_head_project_hopper", "mhc_head_project", "mhc_head_project_few", "mhc_head_project_scalar"];
    let (project, splits) = projection.launch(implementation, [FILE, HOPPER_FILE], names)?;
    let (name, row) = match vectorised {
        true => ("mhc_head_mix_vector", hidden_size / 8),
        false => ("mhc_head_mix_scalar", hidden_size),
    };
    let threads = threads(row, 1, MIX_THREADS);
    let chunks = row.div_ceil(threads);
    let params = signature.params(&["streams"]).ptr("partials", workspace).ptr("scale", &views["scale"]);
    let params = params.ptr("base", &views["base"]).strided("out", &views["out"], ["token_stride"]);
    let params = params.ptr("mix", &views["mix"]).ptr("rstd", &views["rstd"]).i64("num_tokens", num_tokens)?;
    let params = params.i32("hidden_size", hidden_size)?.i32("splits", splits)?.i32("chunks", chunks)?;
    let params = params.f32("norm_eps", numbers.norm_eps).f32("hc_eps", numbers.hc_eps);
    let blocks = (num_tokens as u64).saturating_mul(chunks as u64);
    let config = LaunchConfig::linear(CHECK.operator, "streams", blocks, threads as u32)?;
    device.kernel(FILE, &[], name)?.launch(config, &params)?;
    Ok(vec![project, name])
}

/// Floats of each token's numbers, of its products, and of the parts of dfn. Each begins at a multiple of 16 bytes.
fn floats(device: &Device, num_tokens: usize, hidden_size: usize) -> [usize; 3] {
    let splits = parts_of_tokens(device, num_tokens, hidden_size, WIDE);
    [num_tokens * NUMBERS, num_tokens * PRODUCTS, splits * NUM_STREAMS * NUM_STREAMS * hidden_size]
}

/// Bytes of scratch memory that [`backward`] needs.
pub fn backward_workspace_bytes(device: &Device, num_tokens: usize, hidden_size: usize) -> usize {
    4 * floats(device, num_tokens, hidden_size).iter().sum::<usize>()
}

/// Launches the backward; returns the kernels that ran. Its tensors:
///
/// - `streams`, `fn`, `scale`, `base`, `mix` and `rstd` as the forward read and saved them;
/// - `dout` like the forward's `out`, rows contiguous: its gradient;
/// - `dstreams` like `streams`, rows contiguous; `dfn`, `dscale` and `dbase` f32 like `fn`, `scale` and `base`;
/// - `workspace`, scratch memory of [`backward_workspace_bytes`] bytes at a multiple of 16.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn backward(device: &Device, views: &Views, numbers: Numbers) -> Result<Vec<&'static str>> {
    let (signature, [num_tokens, hidden_size]) = bind(views, None)?;
    numbers.check()?;
    let workspace = &views["workspace"];
    CHECK.holds("workspace", workspace, backward_workspace_bytes(device, num_tokens, hidden_size))?;
    let [of_tokens, of_products, _] = floats(device, num_tokens, hidden_size);
    let [tokens, products, dfn_partials] =
        [0, of_tokens, of_tokens + of_products].map(|floats| workspace.address + 4 * floats as u64).map(DeviceAddress);
    let (coefficients, row) = match signature.vectorised() {
        true => ("mhc_head_backward_coefficients_vector", hidden_size / 8),
        false => ("mhc_head_backward_coefficients_scalar", hidden_size),
    };
    let params = signature.params(&["streams", "dout", "mix", "rstd", "scale", "base"]);
    let params = params.ptr("numbers", tokens).ptr("products", products);
    let params = params.i32("hidden_size", hidden_size)?.f32("hc_eps", numbers.hc_eps);
    let threads = threads(row, PIECES, COEFFICIENT_THREADS) as u32;
    let config = LaunchConfig::linear(CHECK.operator, "streams", num_tokens as u64, threads)?;
    device.kernel(BACKWARD_FILE, &[], coefficients)?.launch(config, &params)?;

    let (streams, channels) = match fits_wide(views, &["streams", "dstreams", "dout"], hidden_size) {
        true => ("mhc_head_backward_streams_wide", WIDE.channels),
        false => ("mhc_head_backward_streams_scalar", 1),
    };
    let splits = parts_of_tokens(device, num_tokens, hidden_size, WIDE);
    let params = signature.params(&["streams", "dout", "fn"]).ptr("numbers", tokens);
    let params = params.strided("dstreams", &views["dstreams"], ["token_stride", "stream_stride"]);
    let params = params.ptr("dfn_partials", dfn_partials).i64("num_tokens", num_tokens)?;
    let params = params.i32("hidden_size", hidden_size)?.i32("splits", splits)?;
    let columns = (NUM_STREAMS * hidden_size).div_ceil(channels * BACKWARD_THREADS);
    device.kernel(BACKWARD_FILE, &[], streams)?.launch_blocks("streams", columns.saturating_mul(splits), &params)?;

    let numbers = NUM_STREAMS * NUM_STREAMS * hidden_size;
    let params = CHECK.params().ptr("dfn_partials", dfn_partials).ptr("dfn", &views["dfn"]);
    let params = params.i64("numbers", numbers)?.i32("splits", splits)?;
    let kernel = device.kernel(BACKWARD_FILE, &[], "mhc_head_backward_sums")?;
    kernel.launch_blocks("streams", numbers.div_ceil(BACKWARD_THREADS), &params)?;
    let params = CHECK.params().ptr("products", products).ptr("dscale", &views["dscale"]).ptr("dbase", &views["dbase"]);
    let params = params.i64("num_tokens", num_tokens)?;
    device.kernel(BACKWARD_FILE, &[], "mhc_head_backward_parameters")?.launch_blocks("streams", 1, &params)?;
    Ok(vec![coefficients, streams, "mhc_head_backward_sums", "mhc_head_backward_parameters"])
}
