//! What the launchers of sites share: operators that project residual streams to coefficients
//! (inference 2.1, 2.5, training 11.1).

use crate::arguments::{Argument, Arguments, Signature, read, saved, scratch, write};
use crate::streams::mhc_post::NUM_STREAMS;
use dsv4_runtime::params::Params;
use dsv4_runtime::{Result, Views};

/// The parameters of a site, what its forward saves for the backward, and their gradients:
///
/// - `fn` of these axes, `scale` `[num_groups]` and `base` `[num_columns]` f32;
/// - `mix` `[num_tokens, num_columns]` and `rstd` `[num_tokens]` f32, written by the forward;
/// - `dfn`, `dscale` and `dbase` in the backward;
/// - `workspace`, scratch memory at a multiple of 16.
pub(crate) fn site<'a>(fn_axes: &'static [&'static str], backward: bool) -> [Argument<'a>; 9] {
    [
        read("fn").axes(fn_axes),
        read("scale").axes(&["num_groups"]),
        read("base").axes(&["num_columns"]),
        saved("mix", backward).axes(&["num_tokens", "num_columns"]),
        saved("rstd", backward).axes(&["num_tokens"]),
        write("dfn").like("fn").when(backward),
        write("dscale").like("scale").when(backward),
        write("dbase").like("base").when(backward),
        scratch("workspace", 16),
    ]
}

/// The sizes of a site's projection.
pub(crate) struct ProjectionSizes {
    /// Coefficients of a token, and factors that scale groups of them.
    pub num_columns: usize,
    pub num_groups: usize,
    /// `hidden_size` is a multiple of this up to `most`.
    pub multiple: usize,
    pub most: usize,
}

/// Most channels of a stream: all streams of a token together are counted in 32 bits.
pub(crate) const MOST_CHANNELS: usize = i32::MAX as usize / NUM_STREAMS;

/// Checks the tensors of a call. Returns them with the numbers of tokens and of channels.
///
/// # Errors
/// A rejected argument.
pub(crate) fn bind_streams<'a>(
    check: Arguments,
    views: &'a Views,
    tensors: impl IntoIterator<Item = Argument<'a>>,
    sizes: ProjectionSizes,
) -> Result<(Signature<'a>, [usize; 2])> {
    let ProjectionSizes { num_columns, num_groups, multiple, most } = sizes;
    let signature = ["num_streams", "source", "destination"]
        .into_iter()
        .fold(check.signature(views, tensors), |signature, axis| signature.given(axis, NUM_STREAMS))
        .given("num_columns", num_columns)
        .given("num_groups", num_groups);
    let mut signature = signature.wide("num_tokens").extent("hidden_size", multiple, most);
    let extents = signature.bind(["num_tokens", "hidden_size"])?;
    Ok((signature, extents))
}

/// The parameters that end those of a projection.
pub(crate) fn size_params(
    params: Params,
    [num_tokens, hidden_size]: [usize; 2],
    splits: usize,
) -> Result<Params> {
    params.i64("num_tokens", num_tokens)?.i32("hidden_size", hidden_size)?.i32("splits", splits)
}
