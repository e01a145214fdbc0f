//! The input of a sublayer from the residual streams (inference 2.3, training 11.1), with or
//! without the RMSNorm that follows (inference 3, training 11.3). For each token, with its streams
//! X `[stream, channel]` and the coefficients `pre[stream]`,
//!
//! ```text
//! h     = sum over i of pre[i] X[i]
//! dX[i] = pre[i] dh                     dpre[i] = sum over the channels of X[i] dh
//! ```
//!
//! With the norm, h is stored, which rounds it, and y = w (h rstd) as in
//! [`crate::projections::rms_norm`], whose `dx` is dh.
//!
//! # Rounding points
//!
//! Each product is an fp32 value and is added in fp32. The outputs h and dX are rounded once to the
//! type of the streams, h also where only the norm reads it. The gradient dh stays in fp32 between
//! the norm and the mix. Coefficients and their gradients are fp32.

use candle_core::Tensor;

use crate::error::{Result, require_that};
use crate::format::Format;
use crate::named::Named;
use crate::precision::Rounding;
use crate::projections::rms_norm;
use crate::streams::mhc_post::NUM_STREAMS;

/// The norm after the mix.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// Added to the mean square; positive.
    pub eps: f64,
    /// The type in which h is stored: that of the streams.
    pub stored: Format,
}

/// `h` `[num_tokens, hidden_size]`, stored in the type of the streams, or with a norm `y` of that
/// shape and type and `rstd` `[num_tokens]`, stored in f32, for these inputs:
///
/// - `streams` `[num_tokens, 4, hidden_size]`, stored in bf16 or f32;
/// - `pre` `[num_tokens, 4]`, stored in f32;
/// - with a norm `weight` `[hidden_size]`, stored in f32.
pub fn forward(inputs: &Named, norm: Option<Norm>, rounding: &mut Rounding) -> Result<Named> {
    let h = mixed(inputs, rounding)?;
    match norm {
        None => Ok(Named::new().with("h", h)),
        Some(Norm { eps, stored }) => {
            let inputs = Named::new()
                .with("x", rounding.to(stored, &h)?)
                .with("weight", inputs.tensor("weight")?.clone());
            rms_norm::forward(&inputs, eps, rounding)
        }
    }
}

/// `dstreams`, stored in the type of the streams, `dpre`, stored in f32, and with a norm
/// `dweight`, stored in f32, by the formulas of the module documentation. The inputs are those of
/// [`forward`] and `dh`, or with a norm `dy`, of the shape and type of its output.
pub fn backward(inputs: &Named, norm: Option<Norm>, rounding: &mut Rounding) -> Result<Named> {
    let h = mixed(inputs, rounding)?;
    let (dh, dweight) = match norm {
        None => (inputs.tensor("dh")?.clone(), None),
        Some(Norm { eps, stored }) => {
            let normed = Named::new().with("x", rounding.to(stored, &h)?);
            let normed = normed.with("weight", inputs.tensor("weight")?.clone());
            let gradients = rms_norm::backward(
                &normed.with("dy", inputs.tensor("dy")?.clone()),
                eps,
                rounding,
            )?;
            (gradients.tensor("dx")?.clone(), gradients.get("dweight").cloned())
        }
    };
    let dh = dh.unsqueeze(1)?;
    let dstreams = rounding.f32(&inputs.tensor("pre")?.unsqueeze(2)?.broadcast_mul(&dh)?)?;
    let terms = rounding.f32(&inputs.tensor("streams")?.broadcast_mul(&dh)?)?;
    let dpre = rounding.sum_f32(&terms, 2)?;
    Ok(Named::new().with("dstreams", dstreams).with("dpre", dpre).maybe("dweight", dweight))
}

/// h before the store.
fn mixed(inputs: &Named, rounding: &mut Rounding) -> Result<Tensor> {
    let tensors: [(&[&'static str], &[&'static str]); 4] = [
        (&["streams"], &["num_tokens", "num_streams", "hidden_size"]),
        (&["pre"], &["num_tokens", "num_streams"]),
        (&["weight"], &["hidden_size"]),
        (&["dh", "dy"], &["num_tokens", "hidden_size"]),
    ];
    let [num_streams, hidden_size] = inputs.extents(["num_streams", "hidden_size"], &tensors)?;
    require_that(
        "num_streams",
        num_streams,
        num_streams == NUM_STREAMS,
        "a token has four streams",
    )?;
    require_that("hidden_size", hidden_size, hidden_size > 0, "a stream has at least one channel")?;
    let terms = rounding
        .f32(&inputs.tensor("pre")?.unsqueeze(2)?.broadcast_mul(inputs.tensor("streams")?)?)?;
    rounding.sum_f32(&terms, 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Precision;
    use crate::precision::values;
    use crate::testing::{
        Draw, Golden, UNIT_ROUNDOFF, assert_derivative_along_all, assert_within, differentiated,
        dot_of_magnitudes, f64_tensor,
    };

    const NORMS: [Option<Norm>; 2] = [None, Some(Norm { eps: 1e-2, stored: Format::BF16 })];
    const GRADIENTS: [(&str, &str); 3] =
        [("streams", "dstreams"), ("pre", "dpre"), ("weight", "dweight")];

    fn case(seed: u64, num_tokens: usize, hidden_size: usize, norm: bool) -> Named {
        let mut draw = Draw::new(seed);
        let named =
            Named::new().with("streams", draw.bf16(&[num_tokens, NUM_STREAMS, hidden_size], 1.0));
        let named = named.with("pre", draw.normal(&[num_tokens, NUM_STREAMS], 1.0));
        let named = named.maybe("weight", norm.then(|| draw.normal(&[hidden_size], 1.0)));
        named.with(if norm { "dy" } else { "dh" }, draw.bf16(&[num_tokens, hidden_size], 1.0))
    }

    /// The sum of the output times its upstream gradient, element by element.
    fn objective(inputs: &Named, norm: Option<Norm>) -> Result<Tensor> {
        let outputs = forward(inputs, norm, &mut Rounding::exact())?;
        let [output, upstream] = if norm.is_some() { ["y", "dy"] } else { ["h", "dh"] };
        Ok((outputs.tensor(output)? * inputs.tensor(upstream)?)?)
    }

    #[test]
    fn streams_are_weighted_one_by_one() -> Result<()> {
        let streams = f64_tensor(&[1.0, 10.0, 100.0, 1000.0], &[1, 4, 1]);
        let inputs = Named::new()
            .with("streams", streams)
            .with("pre", f64_tensor(&[2.0, 0.5, 0.0, -1.0], &[1, 4]));
        let h = forward(&inputs, None, &mut Rounding::exact())?;
        assert_eq!(values(h.tensor("h")?)?, [2.0 + 5.0 - 1000.0]);
        Ok(())
    }

    #[test]
    fn the_norm_reads_what_the_mix_stores() -> Result<()> {
        // 1 + 2^-9 is halfway between two bf16 values and becomes 1: rstd is that of ones.
        let streams = f64_tensor(&[1.0, 2f64.powi(-9), 0.0, 0.0], &[1, 4, 1]);
        let inputs =
            Named::new().with("streams", streams).with("pre", f64_tensor(&[1.0; 4], &[1, 4]));
        let inputs = inputs.with("weight", f64_tensor(&[1.0], &[1]));
        let norm = |stored| Some(Norm { eps: 2f64.powi(-60), stored });
        let rstd = |stored, precision| -> Result<f64> {
            Ok(values(
                forward(&inputs, norm(stored), &mut Rounding::new(precision))?.tensor("rstd")?,
            )?[0])
        };
        let nearest = Precision::Nearest { seed: 0 };
        assert_eq!(rstd(Format::BF16, nearest)?, 1.0);
        assert!(rstd(Format::F32, nearest)? < 1.0 - 2f64.powi(-10));
        assert!(rstd(Format::BF16, Precision::Exact)? < 1.0 - 2f64.powi(-10));
        Ok(())
    }

    #[test]
    fn explicit_backward_equals_autograd() -> Result<()> {
        for (seed, num_tokens, hidden_size) in [(1, 1, 2), (2, 5, 37), (3, 2, 128)] {
            for norm in NORMS {
                let inputs = case(seed, num_tokens, hidden_size, norm.is_some());
                let explicit = backward(&inputs, norm, &mut Rounding::exact())?;
                let automatic =
                    differentiated(&inputs, &GRADIENTS, |inputs| objective(inputs, norm))?;
                // No intermediate is larger than the size of all values of its tensor by more than
                // the roots that eps bounds.
                let roundings = 2.0 * (8.0 * hidden_size as f64 + num_tokens as f64 + 64.0);
                for (name, gradient) in explicit.into_tensors() {
                    let size = values(&gradient)?.iter().fold(0.0, |size: f64, x| size + x.abs());
                    let bound = (gradient.ones_like()? * (UNIT_ROUNDOFF * roundings * size))?;
                    assert_within(name, &gradient, automatic.tensor(name)?, &bound);
                }
            }
        }
        Ok(())
    }

    #[test]
    fn backward_equals_directional_finite_differences() -> Result<()> {
        for norm in NORMS {
            let inputs = case(4, 3, 24, norm.is_some());
            let gradients = backward(&inputs, norm, &mut Rounding::exact())?;
            let terms = objective(&inputs, norm)?;
            let noise = 128.0 * UNIT_ROUNDOFF * dot_of_magnitudes(&terms, &terms.ones_like()?);
            assert_derivative_along_all(
                "mhc_pre",
                [&inputs, &gradients],
                &GRADIENTS,
                1.0,
                noise,
                |moved| Ok(values(&objective(moved, norm)?)?.into_iter().sum()),
            )?;
        }
        Ok(())
    }

    #[test]
    fn golden_streams_collapse_to_what_the_file_says() -> Result<()> {
        let golden = Golden::load("hc__b");
        let tokens = 9;
        let streams = golden.f64("in.streams").reshape((tokens, NUM_STREAMS, 24))?;
        // The file holds the sigmoid, without eps.
        let pre = (golden.f64("mid.pre_sigmoid").reshape((tokens, NUM_STREAMS))? + 1e-2)?;
        let h = forward(
            &Named::new().with("streams", streams).with("pre", pre),
            None,
            &mut Rounding::exact(),
        )?;
        let expected = golden.f64("out.collapsed").reshape((tokens, 24))?;
        let bound = (expected.ones_like()? * (64.0 * UNIT_ROUNDOFF))?;
        assert_within("h", h.tensor("h")?, &expected, &bound);
        Ok(())
    }

    #[test]
    fn other_numbers_of_streams_and_no_channels_are_refused_and_no_tokens_are_not() -> Result<()> {
        let of = |num_tokens: usize, num_streams: usize, hidden_size: usize| {
            let zeros = |shape: &[usize]| {
                Tensor::zeros(shape, candle_core::DType::F64, &candle_core::Device::Cpu)
            };
            let inputs =
                Named::new().with("streams", zeros(&[num_tokens, num_streams, hidden_size])?);
            forward(
                &inputs.with("pre", zeros(&[num_tokens, num_streams])?),
                None,
                &mut Rounding::exact(),
            )
        };
        assert!(of(2, 3, 5).unwrap_err().to_string().contains("`num_streams` is 3"));
        assert!(of(2, 4, 0).unwrap_err().to_string().contains("`hidden_size` is 0"));
        assert_eq!(of(0, 4, 5)?.tensor("h")?.dims(), [0, 5]);
        Ok(())
    }
}
