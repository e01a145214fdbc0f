//! `mhc_post_mix_pre`: launcher of `kernels/cuda/streams/mhc_post_mix_pre.cu`,
//! `mhc_post_mix_pre_hopper.cu` and `mhc_post_mix_pre_backward.cu` (inference 2.1 to 2.4, training
//! 11.1).

use crate::arguments::{Arguments, Signature, element_types, read, saved, write};
pub use crate::implementation::Implementation;
use crate::streams::mhc_mix::{
    self, Backward, NUM_COLUMNS, Numbers, Projected, has_a_step_of_each_stream,
    has_few_projected_tokens, streams_map,
};
use crate::streams::mhc_post::{self, NUM_STREAMS, threads};
use crate::streams::mhc_pre;
use crate::streams::site::{MOST_CHANNELS, ProjectionSizes, bind_streams, site, size_params};
use dsv4_runtime::params::DeviceAddress;
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::tensor_map::TensorMap;
use dsv4_runtime::{DType, Device, LaunchConfig, Result, TensorView, Views};

const FILE: &str = "mhc_post_mix_pre.cu";
const HOPPER_FILE: &str = "mhc_post_mix_pre_hopper.cu";
const BACKWARD_FILE: &str = "mhc_post_mix_pre_backward.cu";
const CHECK: Arguments = Arguments { operator: "mhc_post_mix_pre" };
/// Pieces of a row that a thread processes.
const PIECES: usize = 8;
/// Most threads of dpre's blocks; `DPRE_THREADS` in the kernel source.
const DPRE_THREADS: usize = 256;
/// Tokens of the TMA boxes that the kernel for Hopper copies; `CONSUMER_TOKENS` in the kernel
/// source.
const BOX_TOKENS: usize = 64;
/// The axes of the projection's weights.
const FN_AXES: &[&str] = &["num_columns", "destination", "hidden_size"];
/// The forward's outputs for the next site: the names of this operator and of that site.
const OF_NEXT_SITE: [(&str, &str); 3] =
    [("next_pre", "pre"), ("next_post", "post"), ("next_comb", "comb")];

/// Every module that the launchers compile.
pub fn modules() -> Vec<Module> {
    let element = element_types(&[("ELEMENT", DType::Bf16)]);
    let own = [FILE, HOPPER_FILE, BACKWARD_FILE].map(|file| module(file, &[]));
    let others = ["mhc_post.cu", "mhc_pre.cu"].map(|file| module(file, &element));
    own.into_iter().chain(mhc_mix::modules()).chain(others).collect()
}

/// Checks the tensors of a forward by these kernels, or of a backward. Returns them with the
/// numbers of tokens and of channels.
fn bind(views: &Views, forward: Option<Implementation>) -> Result<(Signature<'_>, [usize; 2])> {
    let (backward, hopper) = (forward.is_none(), forward == Some(Implementation::Hopper));
    let (gates, matrix) =
        (&["num_tokens", "destination"], &["num_tokens", "source", "destination"]);
    let streams = &["num_tokens", "destination", "hidden_size"];
    let bf16 = |name| read(name).of(&[DType::Bf16]).rows();
    let out = saved("out", backward).of(&[DType::Bf16]).axes(streams).may_be("streams");
    let [of_sources, y, out] = [
        read("streams").of(&[DType::Bf16]).axes(&["num_tokens", "source", "hidden_size"]),
        read("y").of(&[DType::Bf16]).axes(&["num_tokens", "hidden_size"]),
        out,
    ]
    .map(|rows| if hopper { rows.aligned_rows() } else { rows.rows() });
    let tensors = [
        of_sources,
        y,
        read("post").axes(gates),
        read("comb").axes(matrix),
        out,
        saved("next_pre", backward).axes(gates),
        write("next_post").axes(gates).when(!backward),
        write("next_comb").axes(matrix).when(!backward),
        write("h").like("y").rows().when(!backward),
        bf16("dout").axes(streams).when(backward),
        bf16("dh").axes(&["num_tokens", "hidden_size"]).when(backward),
        read("dnext_post").axes(gates).when(backward),
        read("dnext_comb").axes(matrix).when(backward),
        write("dout_total").typed("dout").axes(streams).rows().when(backward),
        write("dstreams").like("streams").rows().when(backward),
        write("dy").like("y").rows().when(backward),
        write("dpost").like("post").when(backward),
        write("dcomb").like("comb").when(backward),
    ];
    let tensors = tensors.into_iter().chain(site(FN_AXES, backward));
    bind_streams(CHECK, views, tensors, sizes(if hopper { 8 } else { 1 }))
}

/// The sizes of the next site's projection, with `multiple` channels at a time.
fn sizes(multiple: usize) -> ProjectionSizes {
    ProjectionSizes { num_columns: NUM_COLUMNS, num_groups: 3, multiple, most: MOST_CHANNELS }
}

/// Bytes of scratch memory that [`forward`] and [`forward_separate`] need.
pub fn forward_workspace_bytes(device: &Device, num_tokens: usize, hidden_size: usize) -> usize {
    mhc_mix::forward_workspace_bytes(device, num_tokens, hidden_size)
}

/// Launches the forward. With many tokens on Hopper, one kernel computes the streams and their
/// projection; the other kernels of `mhc_mix` and `mhc_pre` follow. With few tokens one kernel
/// computes the coefficients and `h`. With very few tokens one also computes the streams and their
/// projection. Otherwise the kernels of `mhc_post`, `mhc_mix` and `mhc_pre` run. Returns the
/// kernels that ran. Its tensors:
///
/// - `streams` `[num_tokens, 4, hidden_size]` and `y` `[num_tokens, hidden_size]` bf16, rows
///   contiguous: the streams before a sublayer and its output;
/// - `post` `[num_tokens, 4]` and `comb` `[num_tokens, 4, 4]` (source, destination) f32, the
///   coefficients of its site;
/// - `fn` `[24, 4, hidden_size]`, `scale` `[3]` and `base` `[24]` f32, the parameters of the next
///   site;
/// - `out` like `streams`, rows contiguous, which may be `streams` itself: the streams after the
///   sublayer;
/// - `next_pre` and `next_post` `[num_tokens, 4]` and `next_comb` `[num_tokens, 4, 4]` f32, the
///   coefficients of the next site, `mix` `[num_tokens, 24]` and `rstd` `[num_tokens]` f32, for
///   the backward, and `h` like `y`, rows contiguous, which the next sublayer's norm reads;
/// - `workspace`, scratch memory of [`forward_workspace_bytes`] bytes at a multiple of 16.
///
/// The kernels for Hopper take `streams`, `y` and `out` with rows at multiples of 16 bytes, and
/// `hidden_size` a multiple of 8.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn forward(
    device: &Device,
    views: &Views,
    numbers: Numbers,
    implementation: Implementation,
) -> Result<Vec<&'static str>> {
    launch(device, views, numbers, implementation, true)
}

/// The same as [`forward`] with the launchers of `mhc_post`, `mhc_mix` and `mhc_pre`, one after the
/// other, for any number of tokens. It gives the same bits and is the baseline of its time.
///
/// # Errors
/// Those of [`forward`].
pub fn forward_separate(
    device: &Device,
    views: &Views,
    numbers: Numbers,
    implementation: Implementation,
) -> Result<Vec<&'static str>> {
    launch(device, views, numbers, implementation, false)
}

/// A call of the forward, with all arguments checked.
struct Forward<'a> {
    device: &'a Device,
    views: &'a Views,
    signature: Signature<'a>,
    /// The tensors of the next site by the names of `mhc_mix`.
    site: Views,
    numbers: Numbers,
    implementation: Implementation,
    num_tokens: usize,
    hidden_size: usize,
    /// Whether 16-byte accesses fit every row of the projected streams, of their inputs and of the
    /// weights.
    vectorised: bool,
}

impl Forward<'_> {
    /// The TMA boxes of the kernel for Hopper, if that kernel runs.
    ///
    /// # Errors
    /// It is requested and cannot run.
    fn maps(&self) -> Result<Option<[TensorMap; 2]>> {
        let maps = || {
            let y = &self.views["y"];
            let (shape, strides) = (
                vec![self.num_tokens, 2 * self.hidden_size],
                vec![y.strides[0].checked_mul(2)?, 1],
            );
            let y = TensorView { dtype: DType::U8, shape, strides, ..y.clone() };
            Some([
                streams_map(&self.views["streams"], BOX_TOKENS)?,
                TensorMap::of(&y, BOX_TOKENS as u32)?,
            ])
        };
        let maps = self.vectorised.then(maps).flatten();
        let misfit = maps.is_none().then(|| {
            "hardware copies no boxes of streams or y: their rows overlap or lie at no multiples of 16 bytes".to_owned()
        });
        let hopper =
            mhc_mix::runs_hopper(CHECK, self.device, self.implementation, self.num_tokens, misfit)?;
        Ok(maps.filter(|_| hopper))
    }

    /// The streams and their projection by one kernel, if there is one with the same order of sums
    /// as `mhc_mix`.
    ///
    /// # Errors
    /// A rejected argument, a compile error, a rejected launch.
    fn project(&self) -> Result<Option<Projected>> {
        let Self { device, num_tokens, hidden_size, .. } = *self;
        let params = |names: &[&'static str], splits| {
            let params = self.signature.params(names).ptr("partials", &self.views["workspace"]);
            size_params(params, [num_tokens, hidden_size], splits)
        };
        if let Some([streams, y]) = self.maps()? {
            let kernel = "mhc_post_mix_pre_project_hopper";
            let (blocks, projected) = mhc_mix::projected_by(
                device,
                &self.site,
                self.numbers,
                kernel,
                Implementation::Hopper,
            )?;
            let params = params(&["post", "comb", "fn", "out"], projected.splits)?;
            let params = params.tensor_map("streams_map", Some(device.tensor_map(&streams)?));
            let params = params.tensor_map("y_map", Some(device.tensor_map(&y)?));
            device.kernel(HOPPER_FILE, &[], kernel)?.launch_blocks("streams", blocks, &params)?;
            return Ok(Some(projected));
        }
        let kernel = if !self.vectorised || self.implementation == Implementation::Hopper {
            return Ok(None);
        } else if has_few_projected_tokens(device, num_tokens) {
            "mhc_post_mix_pre_project_few"
        } else if num_tokens <= mhc_mix::FEW_TOKENS
            && has_a_step_of_each_stream(device, num_tokens, hidden_size)
        {
            "mhc_post_mix_pre_project"
        } else {
            return Ok(None);
        };
        let (blocks, projected) = mhc_mix::projected_by(
            device,
            &self.site,
            self.numbers,
            kernel,
            Implementation::Portable,
        )?;
        let params = params(&["streams", "y", "post", "comb", "fn", "out"], projected.splits)?;
        device.kernel(FILE, &[], kernel)?.launch_blocks("streams", blocks, &params)?;
        Ok(Some(projected))
    }

    /// Coefficients and `h` of few tokens by one kernel.
    ///
    /// # Errors
    /// A compile error, a rejected launch.
    fn mix(&self, projected: Projected) -> Result<&'static str> {
        let views = self.views;
        let params = self.signature.params(&["out"]).ptr("partials", &views["workspace"]);
        let params = self.signature.append(params, &["scale", "base"]);
        let params = OF_NEXT_SITE
            .into_iter()
            .fold(params, |params, (name, field)| params.ptr(field, &views[name]));
        let params = self.signature.append(params, &["mix", "rstd", "h"]);
        let params = projected.params(params, self.numbers)?;
        let kernel = "mhc_post_mix_pre_mix";
        self.device.kernel(FILE, &[], kernel)?.launch_blocks(
            "streams",
            self.num_tokens,
            &params,
        )?;
        Ok(kernel)
    }
}

fn launch(
    device: &Device,
    views: &Views,
    numbers: Numbers,
    implementation: Implementation,
    may_fuse: bool,
) -> Result<Vec<&'static str>> {
    let (signature, [num_tokens, hidden_size]) = bind(views, Some(implementation))?;
    // Before any launch: out may be streams, which an error must not change.
    numbers.check(CHECK)?;
    CHECK.holds(
        "workspace",
        &views["workspace"],
        forward_workspace_bytes(device, num_tokens, hidden_size),
    )?;
    let site = views.without(&["streams", "y", "post", "comb", "h"]).renamed(&[("out", "streams")]);
    let site = site.renamed(&OF_NEXT_SITE);
    let vectorised = signature.vectorised_rows(&["streams", "y", "out"])
        && views["fn"].address.is_multiple_of(16);
    let mixes_few = may_fuse && signature.vectorised_rows(&["out", "h"]);
    let call = Forward {
        device,
        views,
        signature,
        site,
        numbers,
        implementation,
        num_tokens,
        hidden_size,
        vectorised,
    };
    let fused = if may_fuse { call.project()? } else { None };
    let (mut ran, projected) = if let Some(projected) = fused {
        (vec![projected.kernel], projected)
    } else {
        let projection = mhc_mix::Projection::of(device, &call.site, numbers, implementation)?;
        let post =
            mhc_post::forward(device, &views.only(&["streams", "y", "post", "comb", "out"]))?;
        let projected = projection.launch()?;
        (vec![post, projected.kernel], projected)
    };
    if mixes_few && projected.has_few_tokens() {
        ran.push(call.mix(projected)?);
        return Ok(ran);
    }
    let coefficients = mhc_mix::coefficients(device, &call.site, numbers, projected)?;
    let mixed =
        views.only(&["out", "next_pre", "h"]).renamed(&[("out", "streams"), ("next_pre", "pre")]);
    ran.extend([coefficients, mhc_pre::forward(device, &mixed, None)?]);
    Ok(ran)
}

/// Bytes of each token's dpre, stored before the workspace of `mhc_mix`'s kernels. A multiple of
/// 16.
fn dpre_bytes(num_tokens: usize) -> usize {
    4 * NUM_STREAMS * num_tokens
}

/// Bytes of scratch memory that [`backward`] needs.
pub fn backward_workspace_bytes(device: &Device, num_tokens: usize, hidden_size: usize) -> usize {
    dpre_bytes(num_tokens) + mhc_mix::backward_workspace_bytes(device, num_tokens, hidden_size)
}

/// Launches the backward; returns the kernels that ran. Its tensors:
///
/// - those that [`forward`] reads, and `out`, `next_pre`, `mix` and `rstd` as it wrote them;
/// - `dout` like `out`, rows contiguous: its gradient through all but the next site's
///   coefficients and `h`; `dh` like `h`, rows contiguous; `dnext_post` and `dnext_comb` f32 like
///   `next_post` and `next_comb`;
/// - `dout_total` like `out`, rows contiguous: the whole gradient of `out`;
/// - `dstreams` like `streams` and `dy` like `y`, rows contiguous; `dpost`, `dcomb`, `dfn`,
///   `dscale` and `dbase` f32 like the tensors of which they are the gradients;
/// - `workspace`, scratch memory of [`backward_workspace_bytes`] bytes at a multiple of 16.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn backward(device: &Device, views: &Views, numbers: Numbers) -> Result<Vec<&'static str>> {
    let (_, [num_tokens, hidden_size]) = bind(views, None)?;
    numbers.check(CHECK)?;
    let workspace = &views["workspace"];
    CHECK.holds(
        "workspace",
        workspace,
        backward_workspace_bytes(device, num_tokens, hidden_size),
    )?;
    let site = [
        "out",
        "next_pre",
        "fn",
        "scale",
        "base",
        "mix",
        "rstd",
        "dout",
        "dh",
        "dnext_post",
        "dnext_comb",
    ];
    let written = ["dout_total", "dfn", "dscale", "dbase", "workspace"];
    let site = views.only(&[&site[..], &written].concat()).renamed(&[
        ("out", "streams"),
        ("next_pre", "pre"),
        ("dnext_post", "dpost"),
        ("dnext_comb", "dcomb"),
        ("dout_total", "dstreams"),
    ]);
    let mut ran = site_backward(device, &site, numbers)?;
    let front = views.only(&[
        "streams",
        "y",
        "post",
        "comb",
        "dout_total",
        "dstreams",
        "dy",
        "dpost",
        "dcomb",
    ]);
    ran.push(mhc_post::backward(device, &front.renamed(&[("dout_total", "dout")]))?);
    Ok(ran)
}

/// Checks the tensors of a site's backward. Returns them with the numbers of tokens and of
/// channels.
fn bind_site(views: &Views) -> Result<(Signature<'_>, [usize; 2])> {
    let (gates, streams) =
        (&["num_tokens", "destination"], &["num_tokens", "destination", "hidden_size"]);
    let bf16 = |name| read(name).of(&[DType::Bf16]).rows();
    let tensors = [
        bf16("streams").axes(streams),
        read("pre").axes(gates),
        bf16("dout").axes(streams),
        bf16("dh").axes(&["num_tokens", "hidden_size"]),
        read("dpost").axes(gates),
        read("dcomb").axes(&["num_tokens", "source", "destination"]),
        write("dstreams").like("streams").rows(),
    ];
    bind_streams(CHECK, views, tensors.into_iter().chain(site(FN_AXES, true)), sizes(1))
}

/// Launches only the backward of a site: of its coefficients and of the input of its sublayer.
/// Returns the kernels that ran. Its tensors:
///
/// - `streams` `[num_tokens, 4, hidden_size]` bf16, rows contiguous, and `fn`, `scale` and `base`,
///   which the site reads; `pre`, `mix` and `rstd` as its forward wrote them;
/// - `dout` like `streams`, rows contiguous: the gradient of the streams through all but this
///   site; `dh` `[num_tokens, hidden_size]` bf16, rows contiguous; `dpost` `[num_tokens, 4]` and
///   `dcomb` `[num_tokens, 4, 4]` f32;
/// - `dstreams` like `streams`, rows contiguous: the whole gradient of the streams; `dfn`,
///   `dscale` and `dbase` f32;
/// - `workspace`, scratch memory of [`backward_workspace_bytes`] bytes at a multiple of 16.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn site_backward(
    device: &Device,
    views: &Views,
    numbers: Numbers,
) -> Result<Vec<&'static str>> {
    let (signature, [num_tokens, hidden_size]) = bind_site(views)?;
    numbers.check(CHECK)?;
    let workspace = &views["workspace"];
    CHECK.holds(
        "workspace",
        workspace,
        backward_workspace_bytes(device, num_tokens, hidden_size),
    )?;
    let (dpre, row) = match signature.vectorised_rows(&["streams", "dh"]) {
        true => ("mhc_post_mix_pre_dpre_vector", hidden_size / 8),
        false => ("mhc_post_mix_pre_dpre_scalar", hidden_size),
    };
    let params = signature
        .params(&["streams", "dh"])
        .ptr("dpre", workspace)
        .i32("hidden_size", hidden_size)?;
    let threads = threads(row, PIECES, DPRE_THREADS) as u32;
    let config = LaunchConfig::linear(CHECK.operator, "streams", num_tokens as u64, threads)?;
    device.kernel(BACKWARD_FILE, &[], dpre)?.launch(config, &params)?;

    let rest = workspace.address + dpre_bytes(num_tokens) as u64;
    let site = Backward::of(device, CHECK, DeviceAddress(rest), [num_tokens, hidden_size]);
    let params = signature.params(&["mix", "rstd", "scale", "base"]).ptr("dpre", workspace);
    let params = signature.append(params, &["dpost", "dcomb"]);
    let coefficients = site.coefficients(params, numbers)?;
    let (wide, scalar) = ("mhc_post_mix_pre_total_wide", "mhc_post_mix_pre_total_scalar");
    let is_wide = mhc_mix::fits_wide(views, &["streams", "dh", "dout", "dstreams"], hidden_size)
        && device.kernel(BACKWARD_FILE, &[], wide)?.fits(device.environment());
    let (total, channels) = if is_wide { (wide, mhc_mix::WIDE.channels) } else { (scalar, 1) };
    let params = signature.params(&["dh", "dout", "pre"]);
    let streams = [&views["streams"], &views["fn"], &views["dstreams"]];
    site.streams((BACKWARD_FILE, total, channels), params, streams)?;
    Ok(vec![dpre, coefficients, total, site.sums(views)?])
}
