//! What the sites of residual streams share: their parameters, and how cases are drawn.

use crate::operator::declaration::{Axis, TensorSpec};
use crate::operator::prelude::*;
use crate::operators::streams::mhc_post::near_equal;

/// `fn` of these axes, `scale` and `base`. The logits of `channels` channels of a token have a
/// standard deviation of about 1 before `scale`; `base` is uniform up to `logits`.
pub(crate) fn parameters(
    fn_axes: [Axis; 3],
    groups: Axis,
    channels: usize,
    logits: f32,
) -> [TensorSpec; 3] {
    let deviation = (channels.max(1) as f64).sqrt().recip();
    [
        input("fn", DType::F32, &fn_axes).drawn(Distribution::Normal, deviation),
        input("scale", DType::F32, &[groups]).drawn(Distribution::Normal, 1.0),
        input("base", DType::F32, &fn_axes[..1]).drawn(Distribution::Uniform, logits.into()),
    ]
}

/// Gradients of [`parameters`].
pub(crate) fn gradients() -> [TensorSpec; 3] {
    [("dfn", "fn"), ("dscale", "scale"), ("dbase", "base")]
        .map(|(name, of)| gradient(name, of, DType::F32))
}

/// The numbers that a site's cases have, which are above 0.
pub(crate) fn with_numbers(specs: Specs, norm_eps: f32, hc_eps: f32, logits: f32) -> Specs {
    specs.positive("norm_eps", norm_eps).positive("hc_eps", hc_eps).positive("logits", logits)
}

/// Iterations of the Sinkhorn normalisation, mostly the model's.
pub(crate) fn iterations() -> impl Strategy<Value = usize> {
    prop_oneof![3 => Just(20usize), 1 => Just(1), 1 => 2..=10usize]
}

/// norm_eps and hc_eps.
pub(crate) fn eps() -> impl Strategy<Value = (f32, f32)> {
    (select(vec![1e-6f32, 1e-2]), select(vec![1e-6f32, 1e-2]))
}

/// Whether the streams of a token are nearly equal.
pub(crate) fn nearness() -> impl Strategy<Value = bool> {
    prop_oneof![2 => Just(false), 1 => Just(true)]
}

/// Makes the streams of each token nearly equal, where a case says so.
pub(crate) fn amend(wanted: bool, hidden_size: usize, tensors: &mut Tensors) {
    if wanted {
        tensors.edit("streams", |x| near_equal(x, hidden_size));
    }
}
