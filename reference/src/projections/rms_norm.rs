//! RMSNorm over the last dimension (inference 3, training 11.3).
//!
//! With `mean` over the `width` channels of one row,
//!
//! ```text
//! r  = 1 / sqrt(mean(x^2) + eps)          rstd, one number per row
//! y  = w (x r)                            w = 1 when there is no weight
//!
//! g  = dy w
//! dx = r (g - x r^2 mean(g x))
//! dw = sum over rows of dy x r
//! ```
//!
//! The weight is `w`, not `1 + w`. `eps` is inside the root. A row of zeros gives zeros. A kernel
//! reads bf16 or fp32, computes in fp32, keeps `rstd` in fp32 for the backward pass and rounds each
//! output once.

use candle_core::Tensor;

use crate::error::{Result, require_that};
use crate::named::Named;
use crate::precision::Rounding;

/// `y` `[num_rows, width]`, stored in the type of `x`, and `rstd` `[num_rows]`, stored in f32, for
/// these inputs:
///
/// - `x` `[num_rows, width]`, stored in bf16 or f32; `num_rows` may be 0, `width` may not;
/// - `weight` `[width]`, stored in bf16 or f32; absent for the query heads;
///
/// and the positive `eps`.
pub fn forward(inputs: &Named, eps: f64, rounding: &mut Rounding) -> Result<Named> {
    check(inputs, eps)?;
    let rstd = reciprocal_root(inputs.tensor("x")?, eps, rounding)?;
    // Each product is an fp32 value before the store: at a tie of the narrower type that decides
    // the last bit.
    let normalised = rounding.f32(&inputs.tensor("x")?.broadcast_mul(&rstd)?)?;
    let y = match inputs.get("weight") {
        Some(weight) => rounding.f32(&normalised.broadcast_mul(weight)?)?,
        None => normalised,
    };
    Ok(Named::new().with("y", y).with("rstd", rstd.squeeze(1)?))
}

/// `dx` `[num_rows, width]`, stored in the type of `x`, and with a weight `dweight` `[width]`,
/// stored in f32, by the formulas of the module documentation. The inputs are those of [`forward`]
/// and `dy`, of the shape and type of x. `rstd` is recomputed and rounded as the forward pass
/// stores it.
pub fn backward(inputs: &Named, eps: f64, rounding: &mut Rounding) -> Result<Named> {
    let width = check(inputs, eps)?;
    let (x, dy) = (inputs.tensor("x")?, inputs.tensor("dy")?);
    let rstd = reciprocal_root(x, eps, rounding)?;

    // g = dy w
    let g = match inputs.get("weight") {
        Some(weight) => rounding.f32(&dy.broadcast_mul(weight)?)?,
        None => dy.clone(),
    };
    // mean(g x)
    let products = rounding.f32(&(&g * x)?)?;
    let mean = rounding.sum_keepdim_f32(&products, 1)?;
    let mean = rounding.f32(&(mean / width as f64)?)?;
    // dx = r (g - x r^2 mean(g x))
    let factor = rounding.f32(&rstd.sqr()?)?;
    let factor = rounding.f32(&(factor * mean)?)?;
    let projection = rounding.f32(&x.broadcast_mul(&factor)?)?;
    let orthogonal = rounding.f32(&(&g - projection)?)?;
    let dx = rounding.f32(&orthogonal.broadcast_mul(&rstd)?)?;

    let dweight =
        inputs.get("weight").map(|_| weight_gradient(x, dy, &rstd, rounding)).transpose()?;
    Ok(Named::new().with("dx", dx).maybe("dweight", dweight))
}

/// Checks every argument and returns the width.
fn check(inputs: &Named, eps: f64) -> Result<usize> {
    let rows = ["num_rows", "width"];
    let [_, width] = inputs.extents(rows, &[(&["x", "dy"], &rows), (&["weight"], &rows[1..])])?;
    require_that("width", width, width > 0, "a row without channels has no mean")?;
    require_that("eps", eps, eps > 0.0 && eps.is_finite(), "it must be positive and finite")?;
    Ok(width)
}

/// `r = 1 / sqrt(mean(x^2) + eps)`, `[num_rows, 1]`. The result of the hardware's root is used for
/// the multiplication, stored for the backward pass, and returned.
fn reciprocal_root(x: &Tensor, eps: f64, rounding: &mut Rounding) -> Result<Tensor> {
    let squares = rounding.f32(&x.sqr()?)?;
    let sum = rounding.sum_keepdim_f32(&squares, 1)?;
    let mean = rounding.f32(&(sum / x.dim(1)? as f64)?)?;
    let shifted = rounding.f32(&(mean + eps)?)?;
    rounding.approximate_f32(&shifted.sqrt()?.recip()?)
}

/// `dw = sum over rows of dy x r`.
fn weight_gradient(
    x: &Tensor,
    dy: &Tensor,
    rstd: &Tensor,
    rounding: &mut Rounding,
) -> Result<Tensor> {
    let normalised = rounding.f32(&x.broadcast_mul(rstd)?)?;
    let terms = rounding.f32(&(dy * normalised)?)?;
    rounding.sum_f32(&terms, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Precision;
    use crate::error::Error;
    use crate::precision::values;
    use crate::testing::{
        Draw, Golden, UNIT_ROUNDOFF, assert_directional_derivative, assert_unbiased, assert_within,
        differentiated, dot, dot_of_magnitudes, f64_tensor,
    };

    const EPS: f64 = 1e-6;

    fn case(seed: u64, num_rows: usize, width: usize, weighted: bool) -> Named {
        let mut draw = Draw::new(seed);
        let named = Named::new().with("x", draw.bf16(&[num_rows, width], 3.0));
        let named = named.maybe("weight", weighted.then(|| draw.bf16(&[width], 1.0)));
        named.with("dy", draw.bf16(&[num_rows, width], 1.0))
    }

    fn exactly_forward(inputs: &Named) -> Result<Named> {
        forward(inputs, EPS, &mut Rounding::exact())
    }

    fn exactly_backward(inputs: &Named) -> Result<Named> {
        backward(inputs, EPS, &mut Rounding::exact())
    }

    /// Automatic differentiation of the exact [`forward`].
    fn backward_autograd(inputs: &Named) -> Result<Named> {
        differentiated(inputs, &[("x", "dx"), ("weight", "dweight")], |inputs| {
            Ok((exactly_forward(inputs)?.tensor("y")? * inputs.tensor("dy")?)?)
        })
    }

    /// Bounds of the rounding errors of y, dx and dw.
    ///
    /// In any order of evaluation the longest chain to `r` is `width` roundings for the squares and
    /// their sum, then the quotient, eps, the root and its reciprocal: `width + 4`. dx uses r three
    /// times, mean(g x) (`width + 2` roundings) once, and five products and differences of its own.
    /// dw uses r once, sums `num_rows` terms and multiplies twice. To first order the error is that
    /// count times the unit roundoff times the formula with every term replaced by its magnitude.
    /// Two evaluations differ by at most twice that.
    fn bounds(inputs: &Named) -> Result<Named> {
        let width = check(inputs, EPS)? as f64;
        let mut magnitudes = Named::new();
        for (name, tensor) in inputs.clone().into_tensors() {
            magnitudes = magnitudes.with(name, tensor.abs()?);
        }
        let (x, dy) = (magnitudes.tensor("x")?, magnitudes.tensor("dy")?);
        let outputs = exactly_forward(&magnitudes)?;
        let rstd = outputs.tensor("rstd")?.unsqueeze(1)?;
        let g = match magnitudes.get("weight") {
            Some(weight) => dy.broadcast_mul(weight)?,
            None => dy.clone(),
        };
        let mean = ((&g * x)?.sum_keepdim(1)? / width)?;
        let dx = (g + x.broadcast_mul(&(rstd.sqr()? * mean)?)?)?.broadcast_mul(&rstd)?;
        let dweight = weight_gradient(x, dy, &rstd, &mut Rounding::exact())?;
        let to_rstd = width + 4.0;
        let scaled = |t: &Tensor, roundings: f64| t * (2.0 * UNIT_ROUNDOFF * roundings);
        let bounds = Named::new().with("y", scaled(outputs.tensor("y")?, to_rstd + 2.0)?);
        let bounds = bounds.with("dx", scaled(&dx, 3.0 * to_rstd + (width + 2.0) + 5.0)?);
        Ok(bounds.with("dweight", scaled(&dweight, to_rstd + x.dim(0)? as f64 + 2.0)?))
    }

    #[test]
    fn explicit_backward_equals_autograd() -> Result<()> {
        for (seed, num_rows, width, weighted) in
            [(1, 1, 1, true), (2, 7, 37, true), (3, 5, 512, false), (4, 129, 24, true)]
        {
            let inputs = case(seed, num_rows, width, weighted);
            let (explicit, automatic) = (exactly_backward(&inputs)?, backward_autograd(&inputs)?);
            let bounds = bounds(&inputs)?;
            assert_eq!(explicit.get("dweight").is_some(), weighted);
            for (name, gradient) in explicit.into_tensors() {
                assert_within(name, &gradient, automatic.tensor(name)?, bounds.tensor(name)?);
            }
        }
        Ok(())
    }

    #[test]
    fn backward_equals_directional_finite_differences() -> Result<()> {
        let inputs = case(5, 6, 40, true);
        let gradients = exactly_backward(&inputs)?;
        let mut draw = Draw::new(6);
        let (vx, vw) = (draw.normal(&[6, 40], 1.0), draw.normal(&[40], 1.0));
        let (x, weight, dy) = (inputs.tensor("x")?, inputs.tensor("weight")?, inputs.tensor("dy")?);
        let objective = |h: f64| -> Result<f64> {
            let moved =
                Named::new().with("x", (x + (&vx * h)?)?).with("weight", (weight + (&vw * h)?)?);
            Ok(dot(exactly_forward(&moved)?.tensor("y")?, dy))
        };
        let y = exactly_forward(&inputs)?;
        // Each product <dy, y> carries the roundings of y (width + 6) and of a sum of 240 terms.
        let noise = (40.0 + 6.0 + 240.0) * UNIT_ROUNDOFF * dot_of_magnitudes(dy, y.tensor("y")?);
        let claimed = dot(gradients.tensor("dx")?, &vx) + dot(gradients.tensor("dweight")?, &vw);
        assert_directional_derivative("rms_norm", objective, 1.0, noise, claimed)
    }

    #[test]
    fn the_weight_enters_linearly_and_its_gradient_is_the_adjoint() -> Result<()> {
        // y is linear in the weight: <dy, y(v)> = <dw, v> for every v.
        let inputs = case(7, 9, 33, true);
        let dy = inputs.tensor("dy")?;
        let v = Draw::new(8).normal(&[33], 1.0);
        let y = exactly_forward(&inputs.clone().with("weight", v.clone()))?;
        let gradients = exactly_backward(&inputs)?;
        let error = (dot(dy, y.tensor("y")?) - dot(gradients.tensor("dweight")?, &v)).abs();
        // Both sides sum 297 products, each with the roundings of x r (width + 5) and two more.
        let bound =
            2.0 * UNIT_ROUNDOFF * (297.0 + 33.0 + 7.0) * dot_of_magnitudes(dy, y.tensor("y")?);
        assert!(error <= bound, "{error:e} > {bound:e}");
        Ok(())
    }

    #[test]
    fn a_power_of_two_in_the_weight_scales_the_output_exactly() -> Result<()> {
        let inputs = case(9, 4, 16, true);
        let scaled = inputs.clone().with("weight", (inputs.tensor("weight")? * 8.0)?);
        let (y, y8) = (exactly_forward(&inputs)?, exactly_forward(&scaled)?);
        assert_eq!(values(&(y.tensor("y")? * 8.0)?)?, values(y8.tensor("y")?)?);
        Ok(())
    }

    #[test]
    fn rows_of_zeros_stay_zero_and_their_rstd_is_the_root_of_eps() -> Result<()> {
        let inputs = Named::new().with("x", f64_tensor(&[0.0; 6], &[2, 3]));
        let outputs = forward(&inputs, 2f64.powi(-20), &mut Rounding::exact())?;
        assert_eq!(values(outputs.tensor("y")?)?, [0.0; 6]);
        assert_eq!(values(outputs.tensor("rstd")?)?, [1024.0; 2]);
        Ok(())
    }

    #[test]
    fn no_rows_are_a_legal_input_in_both_precisions() -> Result<()> {
        for precision in [Precision::Exact, Precision::Working { seed: 1 }] {
            let none = f64_tensor(&[], &[0, 8]);
            let inputs = Named::new()
                .with("x", none.clone())
                .with("weight", f64_tensor(&[1.0; 8], &[8]))
                .with("dy", none);
            let mut rounding = Rounding::new(precision);
            let outputs = forward(&inputs, EPS, &mut rounding)?;
            assert_eq!(
                (outputs.tensor("y")?.dims(), outputs.tensor("rstd")?.dims()),
                (&[0, 8][..], &[0][..])
            );
            let gradients = backward(&inputs, EPS, &mut rounding)?;
            assert_eq!(gradients.tensor("dx")?.dims(), [0, 8]);
            assert_eq!(values(gradients.tensor("dweight")?)?, [0.0; 8]);
            assert_eq!(values(backward_autograd(&inputs)?.tensor("dweight")?)?, [0.0; 8]);
        }
        Ok(())
    }

    #[test]
    fn bad_inputs_are_refused_by_name() {
        let inputs = case(10, 2, 4, true);
        let x = inputs.tensor("x").unwrap();
        for (argument, wrong) in [
            ("x", x.flatten_all().unwrap()),
            ("weight", f64_tensor(&[1.0], &[1])),
            ("dy", x.narrow(0, 0, 1).unwrap()),
        ] {
            let refused = exactly_backward(&inputs.clone().with(argument, wrong));
            assert!(
                matches!(refused, Err(Error::Shape { argument: a, .. }) if a == argument),
                "{argument}"
            );
        }
        let refused =
            |inputs: Named, eps| forward(&inputs, eps, &mut Rounding::exact()).unwrap_err();
        assert!(matches!(refused(inputs.clone(), f64::NAN), Error::Value { argument: "eps", .. }));
        let empty = Named::new().with("x", f64_tensor(&[], &[2, 0]));
        assert!(matches!(refused(empty, 1.0), Error::Value { argument: "width", .. }));
        assert!(matches!(refused(Named::new(), 1.0), Error::Value { argument: "width", .. }));
        let single = inputs.clone().with("x", x.to_dtype(candle_core::DType::F32).unwrap());
        assert!(matches!(refused(single, 1.0), Error::DType { argument: "x", .. }));
    }

    #[test]
    fn working_runs_scatter_around_the_exact_result() -> Result<()> {
        let inputs = case(11, 6, 64, true);
        let dx = |precision| -> Result<Tensor> {
            Ok(backward(&inputs, EPS, &mut Rounding::new(precision))?.tensor("dx")?.clone())
        };
        let runs = (0..64).map(|seed| dx(Precision::Working { seed }));
        let runs = runs.collect::<Result<Vec<_>>>()?;
        // The six rows share no intermediate.
        assert_unbiased("dx", &dx(Precision::Exact)?, &runs, 6);
        Ok(())
    }

    #[test]
    fn golden_files_agree() -> Result<()> {
        for name in ["u3", "u4", "u5", "w0", "w1", "w2"] {
            let golden = Golden::load(&format!("rmsnorm__{name}"));
            let width = *golden.raw("in.x").dims().last().expect("channels");
            let rows = |t: Tensor| t.reshape(((), width));
            let weighted = golden.has("param.norm.weight");
            let inputs = Named::new()
                .with("x", rows(golden.f64("in.x"))?)
                .with("dy", rows(golden.f64("gout.y"))?);
            let inputs = inputs.maybe("weight", weighted.then(|| golden.f64("param.norm.weight")));
            let (outputs, gradients) = (exactly_forward(&inputs)?, exactly_backward(&inputs)?);
            let bounds = bounds(&inputs)?;
            let agrees = |actual: &Tensor, name: &'static str, key: &str| -> Result<()> {
                let expected = golden.f64(key).reshape(actual.shape())?;
                let allowed =
                    (bounds.tensor(name)? + golden.storage_error(key).reshape(actual.shape())?)?;
                assert_within(name, actual, &expected, &allowed);
                Ok(())
            };
            agrees(outputs.tensor("y")?, "y", "out.y")?;
            agrees(gradients.tensor("dx")?, "dx", "grad.in.x")?;
            if weighted {
                agrees(gradients.tensor("dweight")?, "dweight", "grad.param.norm.weight")?;
            }
        }
        Ok(())
    }
}
