//! The residual streams after a sublayer (inference 2.4, training 11.1). For each token, with its
//! streams X `[source, channel]` before the sublayer, the sublayer's output y and the coefficients
//! `post[destination]` and `comb[source, destination]`,
//!
//! ```text
//! out[j]     = post[j] y + sum over i of comb[i,j] X[i]            comb^T X: the sum runs over the first index of comb
//!
//! dX[i]      = sum over j of comb[i,j] dout[j]                     dy       = sum over j of post[j] dout[j]
//! dcomb[i,j] = sum over the channels of X[i] dout[j]               dpost[j] = sum over the channels of y dout[j]
//! ```
//!
//! # Rounding points
//!
//! Each product is an fp32 value and is added in fp32. `out`, `dX` and `dy` are rounded once to the
//! type in which they are stored; coefficients and their gradients stay in fp32.

use candle_core::Tensor;

use crate::error::{Result, require_that};
use crate::named::Named;
use crate::precision::Rounding;

/// The residual streams of a token.
pub const NUM_STREAMS: usize = 4;

/// `out` `[num_tokens, 4, hidden_size]`, stored in the type of `streams`, for these inputs:
///
/// - `streams` `[num_tokens, 4, hidden_size]`, stored in bf16 or f32: the sources;
/// - `y` `[num_tokens, hidden_size]`, stored in the same type: the output of the sublayer;
/// - `post` `[num_tokens, 4]` and `comb` `[num_tokens, 4, 4]` (source, destination), stored in f32.
pub fn forward(inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    check(inputs)?;
    let (x, comb) = (inputs.tensor("streams")?, inputs.tensor("comb")?);
    // [num_tokens, 1, destination, hidden_size], and for each source [num_tokens, source,
    // destination, hidden_size].
    let of_y = inputs
        .tensor("post")?
        .unsqueeze(2)?
        .broadcast_mul(&inputs.tensor("y")?.unsqueeze(1)?)?
        .unsqueeze(1)?;
    let of_sources = comb.unsqueeze(3)?.broadcast_mul(&x.unsqueeze(2)?)?;
    let terms = rounding.f32(&Tensor::cat(&[of_y, of_sources], 1)?)?;
    Ok(Named::new().with("out", rounding.sum_f32(&terms, 1)?))
}

/// `dstreams` and `dy`, stored in the type of `streams`, `dpost` and `dcomb`, stored in f32, by
/// the formulas of the module documentation. The inputs are those of [`forward`] and `dout`, of
/// the shape and type of `out`.
pub fn backward(inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    check(inputs)?;
    // [num_tokens, source, destination, hidden_size]
    let (x, dout) = (inputs.tensor("streams")?.unsqueeze(2)?, inputs.tensor("dout")?.unsqueeze(1)?);
    let terms = rounding.f32(&inputs.tensor("comb")?.unsqueeze(3)?.broadcast_mul(&dout)?)?;
    let dstreams = rounding.sum_f32(&terms, 2)?;
    let terms = rounding.f32(&x.broadcast_mul(&dout)?)?;
    let dcomb = rounding.sum_f32(&terms, 3)?;
    // [num_tokens, destination, hidden_size]
    let (y, dout) = (inputs.tensor("y")?.unsqueeze(1)?, inputs.tensor("dout")?);
    let terms = rounding.f32(&inputs.tensor("post")?.unsqueeze(2)?.broadcast_mul(dout)?)?;
    let dy = rounding.sum_f32(&terms, 1)?;
    let terms = rounding.f32(&y.broadcast_mul(dout)?)?;
    let dpost = rounding.sum_f32(&terms, 2)?;
    Ok(Named::new()
        .with("dstreams", dstreams)
        .with("dy", dy)
        .with("dpost", dpost)
        .with("dcomb", dcomb))
}

fn check(inputs: &Named) -> Result<()> {
    let tensors: [(&[&'static str], &[&'static str]); 5] = [
        (&["streams"], &["num_tokens", "source", "hidden_size"]),
        (&["y"], &["num_tokens", "hidden_size"]),
        (&["post"], &["num_tokens", "destination"]),
        (&["comb"], &["num_tokens", "source", "destination"]),
        (&["dout"], &["num_tokens", "destination", "hidden_size"]),
    ];
    let [source, destination, hidden_size] =
        inputs.extents(["source", "destination", "hidden_size"], &tensors)?;
    for (axis, extent) in [("source", source), ("destination", destination)] {
        require_that(axis, extent, extent == NUM_STREAMS, "a token has four streams")?;
    }
    require_that("hidden_size", hidden_size, hidden_size > 0, "a stream has at least one channel")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Precision;
    use crate::precision::values;
    use crate::testing::{
        Draw, UNIT_ROUNDOFF, assert_derivative_along_all, assert_unbiased, assert_within,
        differentiated, dot, dot_of_magnitudes, f64_tensor,
    };

    const GRADIENTS: [(&str, &str); 4] =
        [("streams", "dstreams"), ("y", "dy"), ("post", "dpost"), ("comb", "dcomb")];

    fn case(seed: u64, num_tokens: usize, hidden_size: usize) -> Named {
        let mut draw = Draw::new(seed);
        let streams = [num_tokens, NUM_STREAMS, hidden_size];
        let named = Named::new().with("streams", draw.bf16(&streams, 1.0));
        let named = named.with("y", draw.bf16(&[num_tokens, hidden_size], 1.0));
        let named = named.with("post", draw.normal(&[num_tokens, NUM_STREAMS], 1.0));
        let named = named.with("comb", draw.normal(&[num_tokens, NUM_STREAMS, NUM_STREAMS], 0.5));
        named.with("dout", draw.bf16(&streams, 1.0))
    }

    fn out(inputs: &Named) -> Result<Tensor> {
        Ok(forward(inputs, &mut Rounding::exact())?.tensor("out")?.clone())
    }

    #[test]
    fn the_sum_runs_over_the_first_index_of_comb() -> Result<()> {
        // Stream i holds 10^i; comb sends stream 0 to stream 1 and half of stream 2 to stream 3.
        let streams = f64_tensor(&[1.0, 10.0, 100.0, 1000.0], &[1, 4, 1]);
        let mut comb = [0.0; 16];
        (comb[1], comb[2 * 4 + 3]) = (1.0, 0.5);
        let inputs =
            Named::new().with("streams", streams).with("comb", f64_tensor(&comb, &[1, 4, 4]));
        let inputs = inputs.with("y", f64_tensor(&[7.0], &[1, 1]));
        let inputs = inputs.with("post", f64_tensor(&[2.0, 0.0, 0.0, 1.0], &[1, 4]));
        assert_eq!(values(&out(&inputs)?)?, [14.0, 1.0, 0.0, 57.0]);
        Ok(())
    }

    #[test]
    fn explicit_backward_equals_autograd() -> Result<()> {
        for (seed, num_tokens, hidden_size) in [(1, 1, 1), (2, 5, 37), (3, 2, 128)] {
            let inputs = case(seed, num_tokens, hidden_size);
            let explicit = backward(&inputs, &mut Rounding::exact())?;
            let automatic = differentiated(&inputs, &GRADIENTS, |inputs| {
                Ok((out(inputs)? * inputs.tensor("dout")?)?)
            })?;
            // With every term replaced by its magnitude, and a rounding for each product and sum of
            // the longer of both evaluations.
            let magnitudes = inputs
                .into_tensors()
                .into_iter()
                .try_fold(Named::new(), |all, (name, tensor)| {
                    Ok::<_, crate::Error>(all.with(name, tensor.abs()?))
                })?;
            let bounds = backward(&magnitudes, &mut Rounding::exact())?;
            let roundings = 2.0 * (hidden_size.max(5) as f64 + 1.0);
            for (name, gradient) in explicit.into_tensors() {
                let bound = (bounds.tensor(name)? * (UNIT_ROUNDOFF * roundings))?;
                assert_within(name, &gradient, automatic.tensor(name)?, &bound);
            }
        }
        Ok(())
    }

    #[test]
    fn backward_equals_directional_finite_differences() -> Result<()> {
        let inputs = case(4, 3, 24);
        let gradients = backward(&inputs, &mut Rounding::exact())?;
        let dout = inputs.tensor("dout")?;
        let noise = (10.0 + 288.0) * UNIT_ROUNDOFF * dot_of_magnitudes(&out(&inputs)?, dout);
        assert_derivative_along_all(
            "mhc_post",
            [&inputs, &gradients],
            &GRADIENTS,
            1.0,
            noise,
            |moved| Ok(dot(&out(moved)?, dout)),
        )
    }

    #[test]
    fn working_runs_scatter_around_the_exact_one() -> Result<()> {
        let inputs = case(6, 4, 32);
        let run = |precision| -> Result<Vec<Tensor>> {
            let rounding = &mut Rounding::new(precision);
            let outputs = forward(&inputs, rounding)?.into_tensors().into_iter();
            Ok(outputs
                .chain(backward(&inputs, rounding)?.into_tensors())
                .map(|(_, tensor)| tensor)
                .collect())
        };
        let exact = run(Precision::Exact)?;
        let runs =
            (0..64).map(|seed| run(Precision::Working { seed })).collect::<Result<Vec<_>>>()?;
        for (at, exact) in exact.iter().enumerate() {
            let runs: Vec<_> = runs.iter().map(|run| run[at].clone()).collect();
            assert_unbiased("mhc_post", exact, &runs, 4);
        }
        Ok(())
    }

    #[test]
    fn other_numbers_of_streams_and_no_channels_are_refused_and_no_tokens_are_not() -> Result<()> {
        let refused = |num_streams: usize, hidden_size: usize| {
            let zeros = |shape: &[usize]| {
                Tensor::zeros(shape, candle_core::DType::F64, &candle_core::Device::Cpu)
            };
            let inputs = Named::new().with("streams", zeros(&[2, num_streams, hidden_size])?);
            let inputs =
                inputs.with("y", zeros(&[2, hidden_size])?).with("post", zeros(&[2, num_streams])?);
            out(&inputs.with("comb", zeros(&[2, num_streams, num_streams])?))
        };
        assert!(refused(3, 5).unwrap_err().to_string().contains("`source` is 3"));
        assert!(refused(4, 0).unwrap_err().to_string().contains("`hidden_size` is 0"));
        assert_eq!(out(&case(7, 0, 5))?.dims(), [0, 4, 5]);
        Ok(())
    }
}
