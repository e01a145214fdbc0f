//! Logits of attention: how large they are, and where they lie.

use crate::operator::tensors::Tensors;

/// Standard deviations that strategies draw: small ones too, where every weight is nearly the same
/// and an accumulator that is rescaled lazily, or never, shows.
pub(crate) const DEVIATIONS: [f64; 5] = [0.5, 0.01, 0.1, 2.0, 4.0];

/// The size of the numbers of q at which logits over keys of standard normal numbers deviate by
/// `deviation`.
pub(crate) fn query_size(deviation: f64, softmax_scale: f32, head_dim: usize) -> f64 {
    deviation / (f64::from(softmax_scale) * (head_dim as f64).sqrt())
}

/// Moves every logit by `shift`, through the first channel: q's is constant and so is k's.
pub(crate) fn shift(tensors: &mut Tensors, shift: f64, softmax_scale: f32, head_dim: usize) {
    if shift == 0.0 {
        return;
    }
    let size = (shift.abs() / f64::from(softmax_scale)).sqrt();
    let set = |value: f64| {
        move |rows: &mut [f64]| rows.iter_mut().step_by(head_dim).for_each(|first| *first = value)
    };
    tensors.edit("q", set(size * shift.signum()));
    tensors.edit("k", set(size));
}
