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
//! There is no `1 + w`; `eps` stands inside the root; a row of zeros gives zeros. A kernel reads bf16 or
//! fp32, computes in fp32, keeps `rstd` in fp32 for the backward pass and rounds each output once.

use candle_core::{Tensor, Var};

use crate::error::{Result, extents, require, require_that};
use crate::precision::Rounding;

/// What RMSNorm reads, widened to f64.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// `[num_rows, width]`, stored in bf16 or f32. `num_rows` may be 0, `width` may not.
    pub x: Tensor,
    /// `[width]`, stored in bf16 or f32; absent for the query heads.
    pub weight: Option<Tensor>,
    /// Added to the mean square; positive.
    pub eps: f64,
}

/// What RMSNorm writes.
#[derive(Debug, Clone)]
pub struct Outputs {
    /// `[num_rows, width]`, stored in the type of `x`.
    pub y: Tensor,
    /// `[num_rows]`, stored in f32: the reciprocal root of mean square plus eps.
    pub rstd: Tensor,
}

/// Gradients with respect to [`Inputs`].
#[derive(Debug, Clone)]
pub struct Gradients {
    /// `[num_rows, width]`, stored in the type of `x`.
    pub dx: Tensor,
    /// `[width]`, stored in f32; present when there is a weight.
    pub dweight: Option<Tensor>,
}

/// `y = w (x r)` and `r` itself.
pub fn forward(inputs: &Inputs, rounding: &mut Rounding) -> Result<Outputs> {
    inputs.check()?;
    let rstd = reciprocal_root(inputs, rounding)?;
    // Each product is an fp32 number before it is stored: at a tie of the narrower type that decides the last bit.
    let normalised = rounding.f32(&inputs.x.broadcast_mul(&rstd)?)?;
    let y = match &inputs.weight {
        Some(weight) => rounding.f32(&normalised.broadcast_mul(weight)?)?,
        None => normalised,
    };
    Ok(Outputs { y, rstd: rstd.squeeze(1)? })
}

/// The gradients for the upstream gradient `dy` `[num_rows, width]` (stored in the type of `x`), by the
/// formulas of the module documentation. `rstd` is recomputed and rounded as the forward pass stores it.
pub fn backward(inputs: &Inputs, dy: &Tensor, rounding: &mut Rounding) -> Result<Gradients> {
    let (_, width) = inputs.check()?;
    require("dy", dy, inputs.x.dims())?;
    let x = &inputs.x;
    let rstd = reciprocal_root(inputs, rounding)?;

    // g = dy w
    let g = match &inputs.weight {
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

    let dweight = match &inputs.weight {
        Some(_) => Some(weight_gradient(x, dy, &rstd, rounding)?),
        None => None,
    };
    Ok(Gradients { dx, dweight })
}

/// The same gradients by automatic differentiation of the exact [`forward`].
pub fn backward_autograd(inputs: &Inputs, dy: &Tensor) -> Result<Gradients> {
    inputs.check()?;
    require("dy", dy, inputs.x.dims())?;
    let x = Var::from_tensor(&inputs.x)?;
    let weight = inputs.weight.as_ref().map(Var::from_tensor).transpose()?;
    let variables =
        Inputs { x: x.as_tensor().clone(), weight: weight.as_ref().map(|w| w.as_tensor().clone()), eps: inputs.eps };
    let outputs = forward(&variables, &mut Rounding::exact())?;
    let gradients = (outputs.y * dy)?.sum_all()?.backward()?;
    let of = |variable: &Var| match gradients.get(variable) {
        Some(gradient) => Ok(gradient.clone()),
        None => variable.zeros_like(),
    };
    Ok(Gradients { dx: of(&x)?, dweight: weight.as_ref().map(of).transpose()? })
}

impl Inputs {
    /// Checks every argument; `(num_rows, width)`.
    fn check(&self) -> Result<(usize, usize)> {
        let axes = ["num_rows", "width"];
        let tensors = [("x", Some(&self.x), &axes[..]), ("weight", self.weight.as_ref(), &axes[1..])];
        let [num_rows, width] = extents(axes, &tensors)?;
        require_that("width", width, width > 0, "a row without channels has no mean")?;
        let positive = self.eps > 0.0 && self.eps.is_finite();
        require_that("eps", self.eps, positive, "it must be positive and finite")?;
        Ok((num_rows, width))
    }
}

/// `r = 1 / sqrt(mean(x^2) + eps)`, `[num_rows, 1]`. What the hardware's root returns is what is multiplied
/// by, stored for the backward pass, and handed out.
fn reciprocal_root(inputs: &Inputs, rounding: &mut Rounding) -> Result<Tensor> {
    let width = inputs.x.dim(1)? as f64;
    let squares = rounding.f32(&inputs.x.sqr()?)?;
    let sum = rounding.sum_keepdim_f32(&squares, 1)?;
    let mean = rounding.f32(&(sum / width)?)?;
    let shifted = rounding.f32(&(mean + inputs.eps)?)?;
    rounding.approximate_f32(&shifted.sqrt()?.recip()?)
}

/// `dw = sum over rows of dy x r`.
fn weight_gradient(x: &Tensor, dy: &Tensor, rstd: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
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
        Draw, Golden, UNIT_ROUNDOFF, assert_directional_derivative, assert_unbiased, assert_within, dot,
        dot_of_magnitudes, f64_tensor,
    };

    fn case(seed: u64, num_rows: usize, width: usize, weighted: bool) -> (Inputs, Tensor) {
        let mut draw = Draw::new(seed);
        let x = draw.bf16(&[num_rows, width], 3.0);
        let weight = weighted.then(|| draw.bf16(&[width], 1.0));
        let dy = draw.bf16(&[num_rows, width], 1.0);
        (Inputs { x, weight, eps: 1e-6 }, dy)
    }

    /// Sizes of the roundings that y, dx and dw may have collected.
    ///
    /// In any order of evaluation the longest chain to `r` is `width` roundings for the squares and their sum,
    /// then the quotient, eps, the root and its reciprocal: `width + 4`. dx uses r three times, mean(g x)
    /// (`width + 2` roundings) once, and five products and differences of its own; dw uses r once, sums
    /// `num_rows` terms and multiplies twice. To first order the error is that count times the unit roundoff
    /// times the formula with every term taken by magnitude; two evaluations differ by at most twice that.
    fn bounds(inputs: &Inputs, dy: &Tensor) -> Result<(Tensor, Gradients)> {
        let (num_rows, width) = inputs.check()?;
        let magnitudes = Inputs {
            x: inputs.x.abs()?,
            weight: inputs.weight.as_ref().map(|w| w.abs()).transpose()?,
            eps: inputs.eps,
        };
        let exact = &mut Rounding::exact();
        let x = &magnitudes.x;
        let outputs = forward(&magnitudes, exact)?;
        let rstd = outputs.rstd.unsqueeze(1)?;
        let g = match &magnitudes.weight {
            Some(weight) => dy.abs()?.broadcast_mul(weight)?,
            None => dy.abs()?,
        };
        let mean = ((&g * x)?.sum_keepdim(1)? / width as f64)?;
        let dx = (g + x.broadcast_mul(&(rstd.sqr()? * mean)?)?)?.broadcast_mul(&rstd)?;
        let to_rstd = width as f64 + 4.0;
        let scaled = |t: Tensor, roundings: f64| t * (2.0 * UNIT_ROUNDOFF * roundings);
        let dweight = match &magnitudes.weight {
            Some(_) => {
                let dweight = weight_gradient(x, &dy.abs()?, &rstd, exact)?;
                Some(scaled(dweight, to_rstd + num_rows as f64 + 2.0)?)
            }
            None => None,
        };
        let dx = scaled(dx, 3.0 * to_rstd + (width as f64 + 2.0) + 5.0)?;
        Ok((scaled(outputs.y, to_rstd + 2.0)?, Gradients { dx, dweight }))
    }

    #[test]
    fn explicit_backward_equals_autograd() -> Result<()> {
        for (seed, num_rows, width, weighted) in
            [(1, 1, 1, true), (2, 7, 37, true), (3, 5, 512, false), (4, 129, 24, true)]
        {
            let (inputs, dy) = case(seed, num_rows, width, weighted);
            let explicit = backward(&inputs, &dy, &mut Rounding::exact())?;
            let automatic = backward_autograd(&inputs, &dy)?;
            let (_, bound) = bounds(&inputs, &dy)?;
            assert_within("dx", &explicit.dx, &automatic.dx, &bound.dx);
            assert_eq!(explicit.dweight.is_some(), weighted);
            if let (Some(a), Some(b)) = (&explicit.dweight, &automatic.dweight) {
                assert_within("dweight", a, b, &bound.dweight.unwrap());
            }
        }
        Ok(())
    }

    #[test]
    fn backward_equals_directional_finite_differences() -> Result<()> {
        let (inputs, dy) = case(5, 6, 40, true);
        let gradients = backward(&inputs, &dy, &mut Rounding::exact())?;
        let mut draw = Draw::new(6);
        let vx = draw.normal(inputs.x.dims(), 1.0);
        let vw = draw.normal(&[40], 1.0);
        let weight = inputs.weight.clone().unwrap();
        let objective = |h: f64| -> Result<f64> {
            let moved = Inputs { x: (&inputs.x + (&vx * h)?)?, weight: Some((&weight + (&vw * h)?)?), eps: inputs.eps };
            Ok(dot(&forward(&moved, &mut Rounding::exact())?.y, &dy))
        };
        let y = forward(&inputs, &mut Rounding::exact())?.y;
        // Each product <dy, y> carries the roundings of y (width + 6) and of a sum of 240 terms.
        let noise = (40.0 + 6.0 + 240.0) * UNIT_ROUNDOFF * dot_of_magnitudes(&dy, &y);
        let claimed = dot(&gradients.dx, &vx) + dot(&gradients.dweight.unwrap(), &vw);
        assert_directional_derivative("rms_norm", objective, 1.0, noise, claimed)
    }

    #[test]
    fn the_weight_enters_linearly_and_its_gradient_is_the_adjoint() -> Result<()> {
        // y is linear in the weight: <dy, y(v)> = <dw, v> for every v.
        let (inputs, dy) = case(7, 9, 33, true);
        let v = Draw::new(8).normal(&[33], 1.0);
        let moved = Inputs { weight: Some(v.clone()), ..inputs.clone() };
        let y = forward(&moved, &mut Rounding::exact())?.y;
        let dweight = backward(&inputs, &dy, &mut Rounding::exact())?.dweight.unwrap();
        let error = (dot(&dy, &y) - dot(&dweight, &v)).abs();
        // Both sides sum 297 products, each with the roundings of x r (width + 5) and two more.
        let bound = 2.0 * UNIT_ROUNDOFF * (297.0 + 33.0 + 7.0) * dot_of_magnitudes(&dy, &y);
        assert!(error <= bound, "{error:e} > {bound:e}");
        Ok(())
    }

    #[test]
    fn a_power_of_two_in_the_weight_scales_the_output_exactly() -> Result<()> {
        let (inputs, _) = case(9, 4, 16, true);
        let scaled = Inputs { weight: Some((inputs.weight.clone().unwrap() * 8.0)?), ..inputs.clone() };
        let y = forward(&inputs, &mut Rounding::exact())?.y;
        let y8 = forward(&scaled, &mut Rounding::exact())?.y;
        assert_eq!(values(&(y * 8.0)?)?, values(&y8)?);
        Ok(())
    }

    #[test]
    fn rows_of_zeros_stay_zero_and_their_rstd_is_the_root_of_eps() -> Result<()> {
        let inputs = Inputs { x: f64_tensor(&[0.0; 6], &[2, 3]), weight: None, eps: 2f64.powi(-20) };
        let outputs = forward(&inputs, &mut Rounding::exact())?;
        assert_eq!(values(&outputs.y)?, [0.0; 6]);
        assert_eq!(values(&outputs.rstd)?, [1024.0; 2]);
        Ok(())
    }

    #[test]
    fn no_rows_are_a_legal_input_in_both_precisions() -> Result<()> {
        for precision in [Precision::Exact, Precision::Working { seed: 1 }] {
            let inputs = Inputs { x: f64_tensor(&[], &[0, 8]), weight: Some(f64_tensor(&[1.0; 8], &[8])), eps: 1e-6 };
            let mut rounding = Rounding::new(precision);
            let outputs = forward(&inputs, &mut rounding)?;
            assert_eq!((outputs.y.dims(), outputs.rstd.dims()), (&[0, 8][..], &[0][..]));
            let gradients = backward(&inputs, &inputs.x, &mut rounding)?;
            assert_eq!(gradients.dx.dims(), [0, 8]);
            assert_eq!(values(&gradients.dweight.unwrap())?, [0.0; 8]);
            assert_eq!(values(&backward_autograd(&inputs, &inputs.x)?.dweight.unwrap())?, [0.0; 8]);
        }
        Ok(())
    }

    #[test]
    fn bad_inputs_are_refused_by_name() {
        let (inputs, dy) = case(10, 2, 4, true);
        let exact = &mut Rounding::exact();
        let flat = Inputs { x: inputs.x.flatten_all().unwrap(), ..inputs.clone() };
        assert!(matches!(forward(&flat, exact), Err(Error::Shape { argument: "x", .. })));
        let narrow = Inputs { weight: Some(f64_tensor(&[1.0], &[1])), ..inputs.clone() };
        assert!(matches!(forward(&narrow, exact), Err(Error::Shape { argument: "weight", .. })));
        let nan = Inputs { eps: f64::NAN, ..inputs.clone() };
        assert!(matches!(forward(&nan, exact), Err(Error::Value { argument: "eps", .. })));
        let empty = Inputs { x: f64_tensor(&[], &[2, 0]), weight: None, eps: 1.0 };
        assert!(matches!(forward(&empty, exact), Err(Error::Value { argument: "width", .. })));
        let half = dy.narrow(0, 0, 1).unwrap();
        assert!(matches!(backward(&inputs, &half, exact), Err(Error::Shape { argument: "dy", .. })));
        let single = Inputs { x: inputs.x.to_dtype(candle_core::DType::F32).unwrap(), ..inputs };
        assert!(matches!(forward(&single, exact), Err(Error::DType { argument: "x", .. })));
    }

    #[test]
    fn working_runs_scatter_around_the_exact_result() -> Result<()> {
        let (inputs, dy) = case(11, 6, 64, true);
        let dx = |precision| -> Result<Tensor> { Ok(backward(&inputs, &dy, &mut Rounding::new(precision))?.dx) };
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
            let shape = golden.raw("in.x").dims().to_vec();
            let width = shape[shape.len() - 1];
            let rows = |t: Tensor| t.reshape(((), width));
            let weighted = golden.has("param.norm.weight");
            let inputs = Inputs {
                x: rows(golden.f64("in.x"))?,
                weight: weighted.then(|| golden.f64("param.norm.weight")),
                eps: 1e-6,
            };
            let dy = rows(golden.f64("gout.y"))?;
            let (y_bound, bound) = bounds(&inputs, &dy)?;
            let stored = |key: &str| rows(golden.storage_error(key));

            let y = forward(&inputs, &mut Rounding::exact())?.y;
            assert_within(name, &y, &rows(golden.f64("out.y"))?, &(y_bound + stored("out.y")?)?);
            let gradients = backward(&inputs, &dy, &mut Rounding::exact())?;
            let allowed = (bound.dx + stored("grad.in.x")?)?;
            assert_within(name, &gradients.dx, &rows(golden.f64("grad.in.x"))?, &allowed);
            if weighted {
                let key = "grad.param.norm.weight";
                let allowed = (bound.dweight.unwrap() + golden.storage_error(key))?;
                assert_within(name, &gradients.dweight.unwrap(), &golden.f64(key), &allowed);
            }
        }
        Ok(())
    }
}
