//! Gradients three ways: autograd, the written-out backward formula, and finite differences.
//!
//! Kernels are judged by the oracle's gradients, so these are judged first. For a random upstream
//! `g` and a random direction `v` of each input `x`:
//!
//! 1. **formula**: the written-out backward equals candle's autograd, element by element;
//! 2. **directional derivative**: `<autograd(g), v>` equals `d/dt <g, f(x + t v)>` by central
//!    differences;
//! 3. **adjoint identity**: `<g', J v>`, with `J v` by central differences of the outputs and a
//!    new `g'`, equals `<formula(g'), v>`.
//!
//! Bounds are derived. Central differences with step `h` err by `h² |F'''|/6`. That is estimated by
//! the difference between steps `h` and `2h`, which is three times as large.
//!
//! The rounding of `F` over `h` is added. A sum of `n` products rounds by at most `sqrt(n) · eps ·
//! |terms|`. The terms of the oracle's longest sum are counted as well, which covers the oracle's
//! own depth.
//!
//! A moved value `x + t v` is rounded, and again by the first operation on it: `eps |x|` in each of
//! two evaluations. The gradient propagates this as `eps |gradient x| / h` (a gate of -190, moved
//! by 1 where the function bends over 1).
//!
//! The two ways to a gradient differ by as much, over the distance over which the function bends.
//! That distance is the size of the input unless something else is declared, so the bound is
//! `sqrt(n) · eps · |g f| / |x|`. A gradient that is zero because its terms cancel is that large in
//! either way (a score next to others 2^-60 as large, whose logit is -60).

use crate::case::{CaseError, Draw};
use crate::operator::GradientProbe;
use crate::record::figures;

/// One comparison.
pub struct Finding {
    /// Input whose gradient it is, and which way.
    pub input: String,
    /// Elements compared.
    pub compared: u64,
    /// What disagreed.
    pub problem: Option<String>,
    /// Whether a bound follows. None does where values leave the range of f64, or are no numbers
    /// from the start: then nothing is learnt of the gradient.
    pub judged: bool,
}

/// Balances truncation (h²) against rounding (eps/h).
fn step() -> f64 {
    f64::EPSILON.cbrt()
}

/// Compares the three ways at the probe's inputs.
///
/// # Errors
/// What the oracle rejects.
pub fn triangulate(probe: &dyn GradientProbe) -> Result<Vec<Finding>, CaseError> {
    let named = probe.inputs();
    let inputs: Vec<Vec<f64>> = named.iter().map(|(_, values)| values.clone()).collect();
    let finite = |scales: Vec<f64>, values: &[f64]| {
        let size = size_of(values);
        scales
            .into_iter()
            .map(|scale| if scale.is_finite() { scale } else { size })
            .collect::<Vec<_>>()
    };
    let scales = probe.scales().into_iter().zip(&inputs);
    let scales: Vec<_> =
        scales.map(|(scales, values)| scales.map(|scales| finite(scales, values))).collect();
    let outputs = probe.outputs(&inputs)?;
    let upstream = random_like(&outputs, "upstream");
    let fresh = random_like(&outputs, "fresh upstream");
    let autograd = probe.autograd(&upstream)?;
    let formula = probe.backward(&upstream)?;
    let formula_fresh = probe.backward(&fresh)?;
    let in_range = inputs.iter().chain(&outputs).flatten().all(|&value| in_range(value));
    let mut findings = Vec::new();
    for (index, (name, values)) in named.iter().enumerate() {
        if values.is_empty() {
            continue;
        }
        let terms = rounding_of_terms(&upstream, &outputs, values.len());
        let sizes = scales[index].clone().unwrap_or_else(|| vec![size_of(values); values.len()]);
        // No terms cancel along an input that does not move.
        let cancelled: Vec<f64> =
            sizes.iter().map(|&size| if size > 0.0 { terms / size } else { 0.0 }).collect();
        let own = compare_formula(name, &autograd[index], &formula[index], &cancelled);
        findings.push(own.within(in_range));
        let direction = direction_of(values, scales[index].as_deref(), name);
        let line = Line { probe, inputs: &inputs, index, direction: &direction };
        let slope = line.slope(&upstream)?;
        let own = line.compare("directional derivative", name, &autograd[index], slope);
        findings.push(own.within(in_range));
        let slope = line.slope(&fresh)?;
        let own = line.compare("adjoint identity", name, &formula_fresh[index], slope);
        findings.push(own.within(in_range));
    }
    Ok(findings)
}

/// Whether a value leaves room to f32's largest: its square, or its product with another one, does
/// not leave the range of f64. A sentinel (a sink of minus infinity, the lse of an empty row) is no
/// value.
fn in_range(value: f64) -> bool {
    value == f64::NEG_INFINITY || value.abs() < f64::from(f32::MAX)
}

impl Finding {
    /// Not judged where values are out of range and the bound is no number. In range, a bound that
    /// is no number is a problem of the oracle.
    fn within(self, in_range: bool) -> Self {
        if self.judged || in_range {
            Self { judged: true, ..self }
        } else {
            Self { problem: None, ..self }
        }
    }
}

fn random_like(tensors: &[Vec<f64>], name: &str) -> Vec<Vec<f64>> {
    let mut draw = Draw::new(0, name);
    // Outputs that are not finite (an empty row's lse) have no gradient to weigh.
    tensors
        .iter()
        .map(|t| t.iter().map(|v| if v.is_finite() { draw.normal() } else { 0.0 }).collect())
        .collect()
}

/// A random direction in units of the input's scale. Infinite entries (a sink) stay where they are.
fn direction_of(values: &[f64], scales: Option<&[f64]>, name: &str) -> Vec<f64> {
    if let Some(scales) = scales {
        let mut draw = Draw::new(0, name);
        return scales.iter().map(|scale| scale * draw.normal()).collect();
    }
    let scale = size_of(values);
    let mut draw = Draw::new(0, name);
    values.iter().map(|v| if v.is_finite() { scale * draw.normal() } else { 0.0 }).collect()
}

/// The root mean square of an input's finite values, without sentinels; 1 where they are zero.
fn size_of(values: &[f64]) -> f64 {
    let finite = || {
        values.iter().filter(|v| v.is_finite() && v.abs() < f64::from(f32::MAX) / 2.0f64.powi(64))
    };
    let rms = (finite().map(|v| v * v).sum::<f64>() / finite().count().max(1) as f64).sqrt();
    if rms > 0.0 { rms } else { 1.0 }
}

/// The rounding of the f64 sums that make a gradient where all of their terms cancel, times the
/// distance over which the function bends. The terms are as large as the weighted outputs over that
/// distance.
fn rounding_of_terms(upstream: &[Vec<f64>], outputs: &[Vec<f64>], inputs: usize) -> f64 {
    let products = || upstream.iter().flatten().zip(outputs.iter().flatten()).map(|(g, y)| g * y);
    let finite = || products().filter(|product| product.is_finite());
    let terms = (finite().count() + inputs) as f64;
    finite().map(|product| product * product).sum::<f64>().sqrt() * f64::EPSILON * terms.sqrt()
}

/// `cancelled`: how far each element may be off where all of its terms cancel.
fn compare_formula(name: &str, autograd: &[f64], formula: &[f64], cancelled: &[f64]) -> Finding {
    let norm = autograd.iter().map(|v| v * v).sum::<f64>().sqrt();
    // Half way, in digits, between the rounding of f32 and that of f64. Two orders of f64 sums stay
    // far below it, whatever cancels in them. A computation that uses f32 by mistake is far above
    // it.
    let rounding = norm * (f64::EPSILON * f64::from(f32::EPSILON)).sqrt();
    let pairs = autograd.iter().zip(formula).zip(cancelled);
    let judged = cancelled.iter().all(|cancelled| (rounding + cancelled).is_finite());
    let mut compared = pairs.map(|((a, b), cancelled)| ((a - b).abs(), rounding + cancelled));
    let apart = compared.find(|(apart, bound)| apart > bound || apart.is_nan());
    Finding {
        input: format!("{name} (formula)"),
        compared: autograd.len() as u64,
        judged,
        problem: apart.map(|(apart, bound)| {
            format!(
                "autograd and the backward formula differ by {}, bound {}",
                figures::measure(apart, 3),
                figures::measure(bound, 3)
            )
        }),
    }
}

struct Slope {
    value: f64,
    error: f64,
}

struct Line<'a> {
    probe: &'a dyn GradientProbe,
    inputs: &'a [Vec<f64>],
    index: usize,
    direction: &'a [f64],
}

impl Line<'_> {
    /// `(<weights, f(x + t v)>, sum of the magnitudes of its terms)`.
    fn at(&self, t: f64, weights: &[Vec<f64>]) -> Result<(f64, f64), CaseError> {
        let mut inputs = self.inputs.to_vec();
        for (x, v) in inputs[self.index].iter_mut().zip(self.direction) {
            *x += t * v;
        }
        let outputs = self.probe.outputs(&inputs)?;
        let mut sum = 0.0;
        let mut magnitude = 0.0;
        for (w, y) in weights.iter().flatten().zip(outputs.iter().flatten()) {
            if y.is_finite() {
                sum += w * y;
                magnitude += (w * y).abs();
            }
        }
        Ok((sum, magnitude))
    }

    fn slope(&self, weights: &[Vec<f64>]) -> Result<Slope, CaseError> {
        let h = step();
        let central = |h: f64| -> Result<(f64, f64), CaseError> {
            let (ahead, behind) = (self.at(h, weights)?, self.at(-h, weights)?);
            Ok(((ahead.0 - behind.0) / (2.0 * h), ahead.1 + behind.1))
        };
        let (fine, magnitude) = central(h)?;
        let (coarse, _) = central(2.0 * h)?;
        // D(2h) - D(h) = 3 · truncation(h) to leading order; not dividing by 3 covers the next
        // order.
        let truncation = (coarse - fine).abs();
        let terms = (weights.iter().map(Vec::len).sum::<usize>() + self.direction.len()) as f64;
        let rounding = magnitude * f64::EPSILON * terms.sqrt() / h;
        Ok(Slope { value: fine, error: truncation + rounding })
    }

    fn compare(&self, way: &str, name: &str, gradient: &[f64], slope: Slope) -> Finding {
        let terms = || gradient.iter().zip(self.direction).map(|(g, d)| g * d);
        let along: f64 = terms().sum();
        let magnitude: f64 = terms().map(f64::abs).sum();
        let error = (along - slope.value).abs();
        let bound = slope.error
            + magnitude * f64::EPSILON * gradient.len() as f64
            + self.rounding_of_inputs(gradient);
        let agrees = error <= bound;
        Finding {
            input: format!("{name} ({way})"),
            compared: gradient.len() as u64,
            judged: bound.is_finite(),
            problem: (!agrees).then(|| {
                format!(
                    "gradient says {}, finite differences {}: {} apart, bound {}",
                    figures::element(along),
                    figures::element(slope.value),
                    figures::measure(error, 3),
                    figures::measure(bound, 3)
                )
            }),
        }
    }

    /// The error of the slope that comes from rounding the moved values.
    fn rounding_of_inputs(&self, gradient: &[f64]) -> f64 {
        let moved = self.inputs[self.index]
            .iter()
            .zip(gradient)
            .zip(self.direction)
            .filter(|(_, v)| **v != 0.0);
        moved.map(|((x, g), _)| (x * g).abs()).sum::<f64>() * f64::EPSILON / step()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_that_is_no_number_is_not_judged_out_of_range_and_a_problem_within_it() {
        let unbounded = || compare_formula("x", &[f64::NAN], &[1.0], &[0.0]);
        let (outside, inside) = (unbounded().within(false), unbounded().within(true));
        assert!(!outside.judged && outside.problem.is_none());
        assert!(inside.judged && inside.problem.is_some());
        // With a bound a difference is one, whatever the values are.
        let apart = compare_formula("x", &[1.0], &[2.0], &[0.0]).within(false);
        assert!(apart.judged && apart.problem.is_some());
        assert!(in_range(f64::NEG_INFINITY) && in_range(-1e38));
        assert!(!in_range(f64::INFINITY) && !in_range(f64::NAN) && !in_range(1e39));
    }
}
