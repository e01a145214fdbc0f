//! `mhc_head`: launcher of `kernels/cuda/streams/mhc_head.cu`, `mhc_head_backward.cu` and, for
//! Hopper, `mhc_head_hopper.cu` and `mhc_head_hopper_backward.cu` (inference 2.5, training 11.1).

use crate::arguments::{Arguments, Signature, read, write};
pub use crate::implementation::Implementation;
use crate::streams::mhc_mix::{
    Wide, fits_wide, has_few_projected_tokens, parts_of_tokens, projection_blocks,
};
use crate::streams::mhc_post::{NUM_STREAMS, threads};
use crate::streams::site::{MOST_CHANNELS, ProjectionSizes, bind_streams, site, size_params};
use dsv4_runtime::params::DeviceAddress;
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, LaunchConfig, Result, Views};

const FILE: &str = "mhc_head.cu";
const HOPPER_FILE: &str = "mhc_head_hopper.cu";
const BACKWARD_FILE: &str = "mhc_head_backward.cu";
const HOPPER_BACKWARD_FILE: &str = "mhc_head_hopper_backward.cu";
const CHECK: Arguments = Arguments { operator: "mhc_head" };
/// Floats that the projection stores for a token; `PARTIAL_WIDTH<STREAMS>` in the kernel source.
const PARTIAL_WIDTH: usize = 8;
/// Most threads of a block of the mix, and of the backward's coefficients; `MIX_THREADS` and
/// `COEFFICIENT_THREADS` there.
const MIX_THREADS: usize = 128;
const COEFFICIENT_THREADS: usize = 256;
/// Pieces of a row for each thread of the coefficients.
const PIECES: usize = 8;
/// Threads of the other kernels of the backward.
const BACKWARD_THREADS: usize = 128;
/// The configuration of its wide kernel.
const WIDE: Wide = Wide { channels: 8, blocks: 3 };
/// Floats that the coefficients store for a token: `NUMBERS` and `PRODUCTS` in the kernel source.
const NUMBERS: usize = 3 * NUM_STREAMS;
const PRODUCTS: usize = 2 * NUM_STREAMS;
/// Blocks of a cluster, and tokens of a batch in its forward and its backward: `CLUSTER` and
/// `TOKENS` in the kernel source.
const CLUSTER: usize = 8;
const BATCH: usize = 4;
const BACKWARD_BATCH: usize = 2;
/// The kernels for Hopper, forward and backward, each with the most channels that it takes and the
/// blocks that an SM holds.
const CLUSTER_KERNELS: [(usize, [&str; 2], [usize; 2]); 3] = [
    (1024, ["mhc_head_hopper_1024", "mhc_head_backward_hopper_1024"], [8, 8]),
    (4096, ["mhc_head_hopper_4096", "mhc_head_backward_hopper_4096"], [4, 3]),
    (MOST_HOPPER_CHANNELS, ["mhc_head_hopper_7168", "mhc_head_backward_hopper_7168"], [2, 2]),
];
/// Most channels that the kernels for Hopper take: with more, a block does not hold enough tokens.
pub const MOST_HOPPER_CHANNELS: usize = 7168;
/// Most tokens of a cluster where tokens are few: as many as one cluster for each eight SMs
/// processes.
const FEW_RUN: usize = 8;
/// Tokens of a cluster of the forward where tokens are many. Fewer would read the weights too
/// often. With more, some clusters would still run when others have ended.
const RUN: [usize; 2] = [16, 64];

/// Every module that the launchers compile.
pub fn modules() -> Vec<Module> {
    [FILE, HOPPER_FILE, BACKWARD_FILE, HOPPER_BACKWARD_FILE].map(|file| module(file, &[])).to_vec()
}

/// The numeric options of a call.
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

/// Checks the tensors of a forward, or of a backward. Returns them with the numbers of tokens and
/// of channels.
fn bind(
    views: &Views,
    backward: bool,
    implementation: Implementation,
) -> Result<(Signature<'_>, [usize; 2])> {
    let hopper = implementation == Implementation::Hopper;
    let streams =
        read("streams").of(&[DType::Bf16]).axes(&["num_tokens", "num_streams", "hidden_size"]);
    let out = write("out").of(&[DType::Bf16]).axes(&["num_tokens", "hidden_size"]).when(!backward);
    let dout = read("dout").of(&[DType::Bf16]).axes(&["num_tokens", "hidden_size"]).when(backward);
    let dstreams = write("dstreams").like("streams").when(backward);
    let [streams, out, dout, dstreams] = [streams, out, dout, dstreams]
        .map(|rows| if hopper { rows.aligned_rows() } else { rows.rows() });
    let tensors = [streams, out, dout, dstreams]
        .into_iter()
        .chain(site(&["num_columns", "num_streams", "hidden_size"], backward));
    let (multiple, most) = if hopper { (8, MOST_HOPPER_CHANNELS) } else { (1, MOST_CHANNELS) };
    let sizes = ProjectionSizes { num_columns: NUM_STREAMS, num_groups: 1, multiple, most };
    bind_streams(CHECK, views, tensors, sizes)
}

/// How the tokens of a call are divided among clusters.
struct Clusters {
    kernels: [&'static str; 2],
    count: usize,
    /// Tokens of each cluster; the last may have fewer.
    run: usize,
}

impl Clusters {
    /// For a forward. With few tokens there are as many clusters as run at once. With many tokens
    /// there are several clusters for each slot, because the number of slots depends on the SMs
    /// that a device lacks.
    fn of_forward(processors: usize, num_tokens: usize, hidden_size: usize) -> Self {
        let run = match num_tokens.div_ceil((processors / CLUSTER).max(1)) {
            few if few <= FEW_RUN => few.max(1),
            _ => num_tokens.div_ceil(processors).next_multiple_of(BATCH).clamp(RUN[0], RUN[1]),
        };
        Self { kernels: kernels_of(hidden_size).1, count: num_tokens.div_ceil(run), run }
    }

    /// For a backward: no more clusters than certainly run at once, an eighth fewer than the slots
    /// of eight blocks, since each leaves a part of dfn. At least one cluster, so that the sums are
    /// zero without tokens.
    fn of_backward(processors: usize, num_tokens: usize, hidden_size: usize) -> Self {
        let (_, kernels, [_, resident]) = kernels_of(hidden_size);
        let most = (7 * resident * processors / (8 * CLUSTER)).max(2);
        let run = num_tokens.div_ceil(most).max(FEW_RUN).next_multiple_of(BACKWARD_BATCH);
        Self { kernels, count: num_tokens.div_ceil(run).max(1), run }
    }
}

/// The first pair that takes this many channels.
fn kernels_of(hidden_size: usize) -> (usize, [&'static str; 2], [usize; 2]) {
    CLUSTER_KERNELS
        .into_iter()
        .find(|&(most, ..)| hidden_size <= most)
        .unwrap_or(CLUSTER_KERNELS[2])
}

/// Whether the kernels for Hopper run.
///
/// # Errors
/// They are requested and cannot run.
fn runs_clusters(
    device: &Device,
    signature: &Signature<'_>,
    views: &Views,
    hidden_size: usize,
    implementation: Implementation,
) -> Result<bool> {
    let misfit = if !signature.vectorised() || !views["fn"].address.is_multiple_of(16) {
        Some("rows lie at no multiples of 16 bytes".to_owned())
    } else {
        let too_wide = hidden_size > MOST_HOPPER_CHANNELS || !hidden_size.is_multiple_of(8);
        too_wide.then(|| format!("channels are no multiple of 8 up to {MOST_HOPPER_CHANNELS}"))
    };
    implementation.runs_hopper(CHECK, device.environment(), usize::MAX, misfit)
}

/// Bytes of scratch memory that [`forward`] needs.
pub fn forward_workspace_bytes(device: &Device, num_tokens: usize, hidden_size: usize) -> usize {
    projection_blocks(device, num_tokens, hidden_size, true)[1] * num_tokens * PARTIAL_WIDTH * 4
}

/// Launches the forward; returns the kernels that ran. Its tensors:
///
/// - `streams` `[num_tokens, 4, hidden_size]` bf16, rows contiguous;
/// - `fn` `[4, 4, hidden_size]`, `scale` `[1]` and `base` `[4]` f32;
/// - `out` `[num_tokens, hidden_size]` bf16, rows contiguous;
/// - `mix` `[num_tokens, 4]` and `rstd` `[num_tokens]` f32, for the backward;
/// - `workspace`, scratch memory of [`forward_workspace_bytes`] bytes at a multiple of 16.
///
/// The kernels for Hopper take rows of streams and of out at multiples of 16 bytes, and
/// `hidden_size` a multiple of 8 up to [`MOST_HOPPER_CHANNELS`].
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn forward(
    device: &Device,
    views: &Views,
    numbers: Numbers,
    implementation: Implementation,
) -> Result<Vec<&'static str>> {
    let (signature, [num_tokens, hidden_size]) = bind(views, false, implementation)?;
    numbers.check()?;
    let workspace = &views["workspace"];
    CHECK.holds(
        "workspace",
        workspace,
        forward_workspace_bytes(device, num_tokens, hidden_size),
    )?;
    if runs_clusters(device, &signature, views, hidden_size, implementation)? {
        let Clusters { kernels: [name, _], count, run } =
            Clusters::of_forward(device.environment().processors as usize, num_tokens, hidden_size);
        let params = signature.params(&["streams", "fn", "scale", "base", "out", "mix", "rstd"]);
        let params = params.i64("num_tokens", num_tokens)?;
        let params = params.i32("hidden_size", hidden_size)?.i32("run", run)?;
        let params = params.f32("norm_eps", numbers.norm_eps).f32("hc_eps", numbers.hc_eps);
        let blocks = count.saturating_mul(CLUSTER);
        device.kernel(HOPPER_FILE, &[], name)?.launch_blocks("streams", blocks, &params)?;
        return Ok(vec![name]);
    }
    let aligned = signature.vectorised_rows(&["streams"]) && views["fn"].address.is_multiple_of(16);
    let [blocks, splits] = projection_blocks(device, num_tokens, hidden_size, aligned);
    let project = match aligned {
        true if has_few_projected_tokens(device, num_tokens) => "mhc_head_project_few",
        true => "mhc_head_project",
        false => "mhc_head_project_scalar",
    };
    let params = signature.params(&["streams", "fn"]).ptr("partials", workspace);
    let params = size_params(params, [num_tokens, hidden_size], splits)?;
    device.kernel(FILE, &[], project)?.launch_blocks("streams", blocks, &params)?;
    let (name, row) = match signature.vectorised() {
        true => ("mhc_head_mix_vector", hidden_size / 8),
        false => ("mhc_head_mix_scalar", hidden_size),
    };
    let threads = threads(row, 1, MIX_THREADS);
    let chunks = row.div_ceil(threads);
    let params = signature.params(&["streams"]).ptr("partials", workspace);
    let params = signature.append(params, &["scale", "base", "out", "mix", "rstd"]);
    let params = size_params(params, [num_tokens, hidden_size], splits)?.i32("chunks", chunks)?;
    let params = params.f32("norm_eps", numbers.norm_eps).f32("hc_eps", numbers.hc_eps);
    let blocks = (num_tokens as u64).saturating_mul(chunks as u64);
    let config = LaunchConfig::linear(CHECK.operator, "streams", blocks, threads as u32)?;
    device.kernel(FILE, &[], name)?.launch(config, &params)?;
    Ok(vec![project, name])
}

/// Floats of each token's numbers, of its products, and of the parts of dfn. Each part starts at a
/// multiple of 16 bytes.
fn floats(device: &Device, num_tokens: usize, hidden_size: usize) -> [usize; 3] {
    let splits = parts_of_tokens(device, num_tokens, hidden_size, WIDE);
    [num_tokens * NUMBERS, num_tokens * PRODUCTS, splits * NUM_STREAMS * NUM_STREAMS * hidden_size]
}

/// The same for the clusters' products and parts of dfn.
fn floats_of_clusters(clusters: &Clusters, hidden_size: usize) -> [usize; 2] {
    [clusters.count * PRODUCTS, clusters.count * NUM_STREAMS * NUM_STREAMS * hidden_size]
}

/// Bytes of scratch memory that [`backward`] needs.
pub fn backward_workspace_bytes(device: &Device, num_tokens: usize, hidden_size: usize) -> usize {
    let clusters =
        Clusters::of_backward(device.environment().processors as usize, num_tokens, hidden_size);
    let of_clusters = floats_of_clusters(&clusters, hidden_size).iter().sum::<usize>();
    4 * floats(device, num_tokens, hidden_size).iter().sum::<usize>().max(of_clusters)
}

/// Launches the backward; returns the kernels that ran. Its tensors:
///
/// - `streams`, `fn`, `scale`, `base`, `mix` and `rstd` as the forward read and saved them;
/// - `dout` like the forward's `out`, rows contiguous: its gradient;
/// - `dstreams` like `streams`, rows contiguous; `dfn`, `dscale` and `dbase` f32 like `fn`,
///   `scale` and `base`;
/// - `workspace`, scratch memory of [`backward_workspace_bytes`] bytes at a multiple of 16.
///
/// The kernels for Hopper take rows of streams, dout and dstreams at multiples of 16 bytes, and
/// `hidden_size` as in the forward.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn backward(
    device: &Device,
    views: &Views,
    numbers: Numbers,
    implementation: Implementation,
) -> Result<Vec<&'static str>> {
    let (signature, [num_tokens, hidden_size]) = bind(views, true, implementation)?;
    numbers.check()?;
    let workspace = &views["workspace"];
    CHECK.holds(
        "workspace",
        workspace,
        backward_workspace_bytes(device, num_tokens, hidden_size),
    )?;
    let call = Backward { device, views, signature: &signature, numbers, num_tokens, hidden_size };
    let (mut names, left) =
        match runs_clusters(device, &signature, views, hidden_size, implementation)? {
            true => call.clusters()?,
            false => call.tokens()?,
        };
    call.sums(left)?;
    names.extend(["mhc_head_backward_sums", "mhc_head_backward_parameters"]);
    Ok(names)
}

/// The partial sums of dfn, dscale and dbase that kernels leave.
struct Left {
    dfn_partials: DeviceAddress,
    splits: usize,
    products: DeviceAddress,
    rows: usize,
}

/// A call of a backward.
struct Backward<'a> {
    device: &'a Device,
    views: &'a Views,
    signature: &'a Signature<'a>,
    numbers: Numbers,
    num_tokens: usize,
    hidden_size: usize,
}

impl Backward<'_> {
    /// The address after this many floats of the workspace.
    fn behind(&self, floats: usize) -> DeviceAddress {
        DeviceAddress(self.views["workspace"].address + 4 * floats as u64)
    }

    /// dstreams, and each cluster's part of the sums.
    fn clusters(&self) -> Result<(Vec<&'static str>, Left)> {
        let Self { device, signature, num_tokens, hidden_size, .. } = *self;
        let clusters = Clusters::of_backward(
            device.environment().processors as usize,
            num_tokens,
            hidden_size,
        );
        let (count, [_, name]) = (clusters.count, clusters.kernels);
        let [of_products, _] = floats_of_clusters(&clusters, hidden_size);
        let left = Left {
            dfn_partials: self.behind(of_products),
            splits: count,
            products: self.behind(0),
            rows: count,
        };
        let params = signature
            .params(&["streams", "dout", "fn", "mix", "rstd", "scale", "base", "dstreams"]);
        let params = params.ptr("dfn_partials", left.dfn_partials).ptr("products", left.products);
        let params = params
            .i64("num_tokens", num_tokens)?
            .i32("hidden_size", hidden_size)?
            .i32("run", clusters.run)?;
        let params = params.f32("hc_eps", self.numbers.hc_eps);
        let blocks = count.saturating_mul(CLUSTER);
        device
            .kernel(HOPPER_BACKWARD_FILE, &[], name)?
            .launch_blocks("streams", blocks, &params)?;
        Ok((vec![name], left))
    }

    /// The same with two kernels, of which the first stores numbers and products of each token.
    fn tokens(&self) -> Result<(Vec<&'static str>, Left)> {
        let Self { device, views, signature, num_tokens, hidden_size, .. } = *self;
        let [of_tokens, of_products, _] = floats(device, num_tokens, hidden_size);
        let [tokens, products, dfn_partials] =
            [0, of_tokens, of_tokens + of_products].map(|at| self.behind(at));
        let (coefficients, row) = match signature.vectorised() {
            true => ("mhc_head_backward_coefficients_vector", hidden_size / 8),
            false => ("mhc_head_backward_coefficients_scalar", hidden_size),
        };
        let params = signature.params(&["streams", "dout", "mix", "rstd", "scale", "base"]);
        let params = params.ptr("numbers", tokens).ptr("products", products);
        let params = params.i32("hidden_size", hidden_size)?.f32("hc_eps", self.numbers.hc_eps);
        let threads = threads(row, PIECES, COEFFICIENT_THREADS) as u32;
        let config = LaunchConfig::linear(CHECK.operator, "streams", num_tokens as u64, threads)?;
        device.kernel(BACKWARD_FILE, &[], coefficients)?.launch(config, &params)?;

        let (streams, channels) =
            match fits_wide(views, &["streams", "dstreams", "dout"], hidden_size) {
                true => ("mhc_head_backward_streams_wide", WIDE.channels),
                false => ("mhc_head_backward_streams_scalar", 1),
            };
        let splits = parts_of_tokens(device, num_tokens, hidden_size, WIDE);
        let params = signature.params(&["streams", "dout", "fn"]).ptr("numbers", tokens);
        let params = signature.append(params, &["dstreams"]);
        let params = params.ptr("dfn_partials", dfn_partials);
        let params = size_params(params, [num_tokens, hidden_size], splits)?;
        let columns = (NUM_STREAMS * hidden_size).div_ceil(channels * BACKWARD_THREADS);
        let blocks = columns.saturating_mul(splits);
        device.kernel(BACKWARD_FILE, &[], streams)?.launch_blocks("streams", blocks, &params)?;
        Ok((vec![coefficients, streams], Left { dfn_partials, splits, products, rows: num_tokens }))
    }

    /// dfn, dscale and dbase from the partial sums.
    fn sums(&self, left: Left) -> Result<()> {
        let Self { device, views, hidden_size, .. } = *self;
        let numbers = NUM_STREAMS * NUM_STREAMS * hidden_size;
        let params =
            CHECK.params().ptr("dfn_partials", left.dfn_partials).ptr("dfn", &views["dfn"]);
        let params = params.i64("numbers", numbers)?.i32("splits", left.splits)?;
        let kernel = device.kernel(BACKWARD_FILE, &[], "mhc_head_backward_sums")?;
        kernel.launch_blocks("streams", numbers.div_ceil(BACKWARD_THREADS), &params)?;
        let params = CHECK.params().ptr("products", left.products).ptr("dscale", &views["dscale"]);
        let params = params.ptr("dbase", &views["dbase"]).i64("num_tokens", left.rows)?;
        device
            .kernel(BACKWARD_FILE, &[], "mhc_head_backward_parameters")?
            .launch_blocks("streams", 1, &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forward(num_tokens: usize) -> [usize; 2] {
        let Clusters { count, run, .. } = Clusters::of_forward(132, num_tokens, 7168);
        [count, run]
    }

    #[test]
    fn few_tokens_have_all_clusters_and_many_several_each() {
        assert_eq!(
            [forward(0), forward(1), forward(16), forward(17)],
            [[0, 1], [1, 1], [16, 1], [9, 2]]
        );
        assert_eq!([forward(128), forward(129), forward(4096)], [[16, 8], [9, 16], [128, 32]]);
        assert_eq!(forward(32_768), [512, 64]);
    }

    #[test]
    fn clusters_of_a_backward_run_at_once() {
        let backward =
            |num_tokens, hidden_size| Clusters::of_backward(132, num_tokens, hidden_size);
        assert_eq!(
            [0, 1, 128, 4096, 32_768].map(|tokens| backward(tokens, 7168).count),
            [1, 1, 16, 28, 28]
        );
        assert_eq!(backward(32_768, 4096).count, 43);
    }
}
