//! Logits of attention: their magnitude and their shift.

use crate::operator::tensors::Tensors;

/// Standard deviations that strategies draw. Small ones give nearly equal weights, which show an
/// accumulator that is rescaled lazily, or never.
pub(crate) const DEVIATIONS: [f64; 5] = [0.5, 0.01, 0.1, 2.0, 4.0];

/// The magnitude of q at which logits over standard normal keys have this `deviation`.
pub(crate) fn query_size(deviation: f64, softmax_scale: f32, head_dim: usize) -> f64 {
    deviation / (f64::from(softmax_scale) * (head_dim as f64).sqrt())
}

/// Moves every logit by `shift`, through the first channel, which is constant in q and in k.
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
