//! A linear layer without bias, and its gradients (inference 0, 5.5).
//!
//! ```text
//! y[t,o]  = y_before[t,o]  + sum over i of x[t,i] w[o,i]
//! dx[t,i] =                  sum over o of dy[t,o] w[o,i]
//! dw[o,i] = dw_before[o,i] + sum over t of dy[t,o] x[t,i]
//! ```
//!
//! `y_before` and `dw_before` are what the result is added to, such as the sum over earlier chunks of a sequence; zeros
//! where they are absent.
//!
//! # Rounding points
//!
//! x, w, dy and dx are stored in bf16, whose products are exact in fp32; the sums are fp32. What was there before is
//! added in fp32 to the whole sum, and the result is rounded once to the type in which it is stored.

use candle_core::Tensor;

use crate::error::{Result, require_that};
use crate::named::Named;
use crate::precision::Rounding;

/// `y` `[num_tokens, out_features]`, stored in bf16 or f32, of these inputs:
///
/// - `x` `[num_tokens, in_features]` and `w` `[out_features, in_features]`, stored in bf16;
/// - `y_before`, of the shape and type of `y`; absent for zeros.
///
/// # Errors
/// Tensors that do not fit.
pub fn forward(inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    check(inputs)?;
    let product = matmul(inputs.tensor("x")?, &inputs.tensor("w")?.t()?, rounding)?;
    Ok(Named::new().with("y", added(product, inputs.get("y_before"), rounding)?))
}

/// `dx`, of the shape and type of `x`, and `dw`, of the shape of `w`, stored in bf16 or f32. The inputs are those of
/// [`forward`], `dy`, of the shape of `y`, stored in bf16, and `dw_before`, of the shape and type of `dw`; absent for
/// zeros.
///
/// # Errors
/// As [`forward`].
pub fn backward(inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    check(inputs)?;
    let dy = inputs.tensor("dy")?;
    let dx = matmul(dy, inputs.tensor("w")?, rounding)?;
    let dw = matmul(&dy.t()?, inputs.tensor("x")?, rounding)?;
    Ok(Named::new().with("dx", dx).with("dw", added(dw, inputs.get("dw_before"), rounding)?))
}

/// `a @ b`, accumulated in fp32; zeros where there is nothing to add.
fn matmul(a: &Tensor, b: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
    let ((rows, depth), columns) = (a.dims2()?, b.dim(1)?);
    if rows == 0 || depth == 0 {
        return Ok(Tensor::zeros((rows, columns), a.dtype(), a.device())?);
    }
    rounding.matmul_f32(a, b)
}

fn added(sum: Tensor, before: Option<&Tensor>, rounding: &mut Rounding) -> Result<Tensor> {
    match before {
        Some(before) => rounding.f32(&(sum + before)?),
        None => Ok(sum),
    }
}

fn check(inputs: &Named) -> Result<()> {
    let [tokens, outs, ins] = ["num_tokens", "out_features", "in_features"];
    let tensors: [(&[_], &[_]); 3] =
        [(&["x"], &[tokens, ins]), (&["w", "dw_before"], &[outs, ins]), (&["y_before", "dy"], &[tokens, outs])];
    let [out_features, in_features] = inputs.extents([outs, ins], &tensors)?;
    require_that("out_features", out_features, out_features > 0, "a layer has at least one output")?;
    require_that("in_features", in_features, in_features > 0, "a layer has at least one input")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Precision;
    use crate::precision::values;
    use crate::testing::{
        Draw, Golden, UNIT_ROUNDOFF, assert_unbiased, assert_within, differentiated, dot, dot_of_magnitudes, f64_tensor,
    };

    fn inputs(num_tokens: usize, out_features: usize, in_features: usize) -> Named {
        let mut draw = Draw::new(3);
        let named = Named::new().with("x", draw.bf16(&[num_tokens, in_features], 1.0));
        let named = named.with("w", draw.bf16(&[out_features, in_features], 1.0));
        named.with("dy", draw.bf16(&[num_tokens, out_features], 1.0))
    }

    #[test]
    fn a_layer_that_can_be_added_by_hand() -> Result<()> {
        let named = Named::new().with("x", f64_tensor(&[1.0, 2.0, 3.0], &[1, 3]));
        let named = named.with("w", f64_tensor(&[1.0, 10.0, 100.0, -1.0, 0.5, 0.0], &[2, 3]));
        let y = forward(&named, &mut Rounding::exact())?;
        assert_eq!(values(y.tensor("y")?)?, [321.0, 0.0]);
        let named =
            named.with("y_before", f64_tensor(&[1000.0, -1.0], &[1, 2])).with("dy", f64_tensor(&[1.0, 4.0], &[1, 2]));
        let y = forward(&named, &mut Rounding::exact())?;
        assert_eq!(values(y.tensor("y")?)?, [1321.0, -1.0]);
        let before = f64_tensor(&[1.0; 6], &[2, 3]);
        let gradients = backward(&named.with("dw_before", before), &mut Rounding::exact())?;
        assert_eq!(values(gradients.tensor("dx")?)?, [-3.0, 12.0, 100.0]);
        assert_eq!(values(gradients.tensor("dw")?)?, [2.0, 3.0, 4.0, 5.0, 9.0, 13.0]);
        Ok(())
    }

    #[test]
    fn no_tokens_have_no_rows_and_leave_what_was_there() -> Result<()> {
        let named = inputs(0, 3, 5);
        assert_eq!(forward(&named, &mut Rounding::exact())?.tensor("y")?.dims(), [0, 3]);
        let before = Draw::new(1).normal(&[3, 5], 1.0);
        let gradients = backward(&named.with("dw_before", before.clone()), &mut Rounding::exact())?;
        assert_eq!(values(gradients.tensor("dw")?)?, values(&before)?);
        Ok(())
    }

    #[test]
    fn written_gradients_equal_those_of_automatic_differentiation_and_are_adjoint() -> Result<()> {
        let named = inputs(5, 7, 11);
        let gradients = backward(&named, &mut Rounding::exact())?;
        let objective =
            |inputs: &Named| Ok((forward(inputs, &mut Rounding::exact())?.tensor("y")? * inputs.tensor("dy")?)?);
        let automatic = differentiated(&named, &[("x", "dx"), ("w", "dw")], objective)?;
        let absolute = Named::new().with("x", named.tensor("x")?.abs()?).with("w", named.tensor("w")?.abs()?);
        let sizes = backward(&absolute.with("dy", named.tensor("dy")?.abs()?), &mut Rounding::exact())?;
        for name in ["dx", "dw"] {
            let bound = (sizes.tensor(name)? * (2.0 * 12.0 * UNIT_ROUNDOFF))?;
            assert_within(name, gradients.tensor(name)?, automatic.tensor(name)?, &bound);
        }
        // Both products are linear: <dy, v w^T> = <dx, v> for every v, and <dy, x v^T> = <dw, v>.
        let mut draw = Draw::new(9);
        for (name, gradient, shape) in [("x", "dx", [5, 11]), ("w", "dw", [7, 11])] {
            let direction = draw.normal(&shape, 1.0);
            let moved = forward(&named.clone().with(name, direction.clone()), &mut Rounding::exact())?;
            let (gradient, dy) = (gradients.tensor(gradient)?, named.tensor("dy")?);
            let difference = dot(moved.tensor("y")?, dy) - dot(gradient, &direction);
            let bound = 2.0 * (12.0 + 77.0) * UNIT_ROUNDOFF * 77.0 * dot_of_magnitudes(gradient, &direction);
            assert!(difference.abs() <= bound, "{name}: {difference:e}");
        }
        Ok(())
    }

    #[test]
    fn working_runs_scatter_around_the_exact_one() -> Result<()> {
        let named = inputs(6, 8, 300).with("y_before", Draw::new(4).normal(&[6, 8], 1.0));
        let y =
            |precision| -> Result<Tensor> { Ok(forward(&named, &mut Rounding::new(precision))?.tensor("y")?.clone()) };
        let runs = (0..64).map(|seed| y(Precision::Working { seed })).collect::<Result<Vec<_>>>()?;
        assert_unbiased("y", &y(Precision::Exact)?, &runs, 48);
        Ok(())
    }

    #[test]
    fn golden_logits_of_a_router_agree() -> Result<()> {
        for name in ["router_topk__a", "router_topk__b", "router_topk__c", "router_hash__a"] {
            let golden = Golden::load(name);
            let weight = golden.f64("param.gate.weight");
            let hidden = golden.f64("in.hidden").reshape(((), weight.dim(1)?))?;
            let named = Named::new().with("x", hidden.clone()).with("w", weight.clone());
            let logits = golden.f64("out.logits").reshape(((), weight.dim(0)?))?;
            let terms = weight.dim(1)? as f64 + 1.0;
            let sizes = (hidden.abs()?.matmul(&weight.abs()?.t()?)? * (2.0 * terms * UNIT_ROUNDOFF))?;
            assert_within(name, forward(&named, &mut Rounding::exact())?.tensor("y")?, &logits, &sizes);
        }
        Ok(())
    }

    #[test]
    fn tensors_that_do_not_fit_are_refused() {
        let named = inputs(2, 3, 5);
        let mut draw = Draw::new(1);
        for (name, shape) in [("w", [3, 4]), ("y_before", [2, 4]), ("x", [2, 6])] {
            let wrong = named.clone().with(name, draw.normal(&shape, 1.0));
            assert!(forward(&wrong, &mut Rounding::exact()).is_err(), "{name}");
        }
        assert!(forward(&inputs(2, 0, 5), &mut Rounding::exact()).is_err());
        assert!(forward(&inputs(2, 3, 0), &mut Rounding::exact()).is_err());
    }
}
