//! Collapses the residual streams to one before the final norm (inference 2.5, training 11.1). For
//! each token, let X be its four streams, with rstd and `mix[i]` of their projection as in
//! [`crate::streams::mhc_mix`]:
//!
//! ```text
//! s[i] = sigmoid(mix[i] scale + base[i])      w[i] = s[i] + hc_eps      out = sum over i of w[i] X[i]
//!
//! dw[i] = sum over the channels of X[i] dout                            dz = dw s (1 - s)        dmix = dz scale
//! dbase = sum over tokens of dz               dscale = sum over tokens and i of dz mix
//! dX[i] = w[i] dout + what comes back through the projection, as dfn does
//! ```
//!
//! # Rounding points
//!
//! All values are fp32; the streams are stored in bf16, and out and dX are rounded to it once.

use candle_core::Tensor;

use crate::error::{Result, require_that};
use crate::named::Named;
use crate::precision::Rounding;
use crate::streams::mhc_mix::{Projected, gradients_of_projection, project};
use crate::streams::mhc_post::NUM_STREAMS;

/// The parameters of a call.
#[derive(Clone, Copy, Debug)]
pub struct Numbers {
    /// Added to the mean square of a token; positive.
    pub norm_eps: f64,
    /// Added to the sigmoids; positive.
    pub hc_eps: f64,
}

/// `out` `[num_tokens, hidden_size]`, stored in bf16, and for the backward `mix` `[num_tokens, 4]`
/// and `rstd` `[num_tokens]`, stored in f32, for these inputs:
///
/// - `streams` `[num_tokens, 4, hidden_size]`, stored in bf16;
/// - `fn` `[4, 4, hidden_size]`, `scale` `[1]` and `base` `[4]`, stored in f32.
pub fn forward(inputs: &Named, numbers: Numbers, rounding: &mut Rounding) -> Result<Named> {
    let (Projected { rstd, mix }, z) = logits(inputs, numbers, rounding)?;
    let gates = rounding.sigmoid_f32(&z)?;
    let w = rounding.f32(&(gates + numbers.hc_eps)?)?;
    let terms = rounding.f32(&w.unsqueeze(2)?.broadcast_mul(inputs.tensor("streams")?)?)?;
    let out = rounding.sum_f32(&terms, 1)?;
    Ok(Named::new().with("out", out).with("mix", mix).with("rstd", rstd.squeeze(1)?))
}

/// `dstreams`, stored in bf16, `dfn`, `dscale` and `dbase`, stored in f32, by the formulas of the
/// module documentation. The inputs are those of [`forward`] and `dout`, of the shape of `out`,
/// stored in bf16.
pub fn backward(inputs: &Named, numbers: Numbers, rounding: &mut Rounding) -> Result<Named> {
    let (projected, z) = logits(inputs, numbers, rounding)?;
    let s = rounding.sigmoid_f32(&z)?;
    let slope = rounding.sigmoid_slope_f32(&s, &z)?;
    let w = rounding.f32(&(s + numbers.hc_eps)?)?;
    let dout = inputs.tensor("dout")?.unsqueeze(1)?;
    let terms = rounding.f32(&inputs.tensor("streams")?.broadcast_mul(&dout)?)?;
    let dw = rounding.sum_f32(&terms, 2)?;
    let dz = rounding.f32(&(dw * slope)?)?;

    let dbase = rounding.sum_f32(&dz, 0)?;
    let products = rounding.f32(&(&dz * &projected.mix)?)?;
    let of_streams = rounding.sum_f32(&products, 0)?;
    let dscale = rounding.sum_keepdim_f32(&of_streams, 0)?;

    let dmix = rounding.f32(&dz.broadcast_mul(inputs.tensor("scale")?)?)?;
    let [through, dfn] = gradients_of_projection(inputs, &projected, &dmix, rounding)?;
    let own = rounding.f32(&w.unsqueeze(2)?.broadcast_mul(&dout)?)?;
    let dstreams = rounding.f32(&(through + own)?)?;
    Ok(Named::new()
        .with("dstreams", dstreams)
        .with("dfn", dfn)
        .with("dscale", dscale)
        .with("dbase", dbase))
}

/// Values that both directions compute: the projection, and z `[num_tokens, 4]`.
fn logits(
    inputs: &Named,
    numbers: Numbers,
    rounding: &mut Rounding,
) -> Result<(Projected, Tensor)> {
    let tensors: [(&[&'static str], &[&'static str]); 5] = [
        (&["streams"], &["num_tokens", "num_streams", "hidden_size"]),
        (&["fn"], &["num_columns", "num_streams", "hidden_size"]),
        (&["scale"], &["num_groups"]),
        (&["base"], &["num_columns"]),
        (&["dout"], &["num_tokens", "hidden_size"]),
    ];
    let axes = ["num_streams", "num_columns", "num_groups", "hidden_size"];
    let [num_streams, num_columns, num_groups, hidden_size] = inputs.extents(axes, &tensors)?;
    require_that(
        "num_streams",
        num_streams,
        num_streams == NUM_STREAMS,
        "a token has four streams",
    )?;
    require_that(
        "num_columns",
        num_columns,
        num_columns == NUM_STREAMS,
        "each stream has a coefficient",
    )?;
    require_that("num_groups", num_groups, num_groups == 1, "there is one scale")?;
    require_that("hidden_size", hidden_size, hidden_size > 0, "a stream has at least one channel")?;
    for (name, eps) in [("norm_eps", numbers.norm_eps), ("hc_eps", numbers.hc_eps)] {
        require_that(name, eps, eps > 0.0 && eps.is_finite(), "it must be positive and finite")?;
    }
    let projected = project(inputs, numbers.norm_eps, rounding)?;
    let scaled = rounding.f32(&projected.mix.broadcast_mul(inputs.tensor("scale")?)?)?;
    let z = rounding.f32(&scaled.broadcast_add(inputs.tensor("base")?)?)?;
    Ok((projected, z))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::precision::values;
    use crate::testing::{Draw, UNIT_ROUNDOFF, assert_within, differentiated, f64_tensor};

    const NUMBERS: Numbers = Numbers { norm_eps: 1e-6, hc_eps: 1e-2 };
    const GRADIENTS: [(&str, &str); 4] =
        [("streams", "dstreams"), ("fn", "dfn"), ("scale", "dscale"), ("base", "dbase")];

    fn case(seed: u64, num_tokens: usize, hidden_size: usize) -> Named {
        let mut draw = Draw::new(seed);
        let named =
            Named::new().with("streams", draw.bf16(&[num_tokens, NUM_STREAMS, hidden_size], 1.0));
        let deviation = ((NUM_STREAMS * hidden_size) as f64).sqrt().recip();
        let named =
            named.with("fn", draw.normal(&[NUM_STREAMS, NUM_STREAMS, hidden_size], deviation));
        let named = named
            .with("scale", draw.normal(&[1], 1.0))
            .with("base", draw.normal(&[NUM_STREAMS], 1.0));
        named.with("dout", draw.bf16(&[num_tokens, hidden_size], 1.0))
    }

    #[test]
    fn streams_are_weighted_by_their_sigmoids_and_eps() -> Result<()> {
        let streams = f64_tensor(&[1.0, 10.0, 100.0, 1000.0], &[1, 4, 1]);
        let inputs = case(1, 1, 1).with("streams", streams).with("scale", f64_tensor(&[0.0], &[1]));
        let inputs = inputs.with("base", f64_tensor(&[0.0, 40.0, -40.0, 0.0], &[4]));
        let out = forward(&inputs, NUMBERS, &mut Rounding::exact())?;
        let expected = 0.51 + 10.1 + 1.0 + 510.0;
        assert!((values(out.tensor("out")?)?[0] - expected).abs() < 1e-9);
        Ok(())
    }

    #[test]
    fn explicit_backward_equals_autograd() -> Result<()> {
        for (seed, num_tokens, hidden_size) in [(1, 1, 2), (2, 5, 37), (3, 3, 16)] {
            let inputs = case(seed, num_tokens, hidden_size);
            let explicit = backward(&inputs, NUMBERS, &mut Rounding::exact())?;
            let automatic = differentiated(&inputs, &GRADIENTS, |inputs| {
                Ok((forward(inputs, NUMBERS, &mut Rounding::exact())?.tensor("out")?
                    * inputs.tensor("dout")?)?)
            })?;
            // No intermediate is larger than all values together.
            let roundings = 2.0 * (16.0 * hidden_size as f64 + 128.0);
            for (name, gradient) in explicit.into_tensors() {
                let size: f64 = 1.0 + values(&gradient)?.iter().map(|x| x.abs()).sum::<f64>();
                let bound = (gradient.ones_like()? * (UNIT_ROUNDOFF * roundings * size))?;
                assert_within(name, &gradient, automatic.tensor(name)?, &bound);
            }
        }
        Ok(())
    }

    #[test]
    fn what_is_no_shape_or_number_of_the_operator_is_refused() {
        let refused = |inputs: Named, numbers| {
            forward(&inputs, numbers, &mut Rounding::exact()).map(|_| ()).unwrap_err().to_string()
        };
        assert!(
            refused(case(1, 2, 3), Numbers { hc_eps: 0.0, ..NUMBERS }).contains("`hc_eps` is 0")
        );
        let scales = case(1, 2, 3).with("scale", f64_tensor(&[1.0, 2.0], &[2]));
        assert!(refused(scales, NUMBERS).contains("`num_groups` is 2"));
    }
}
