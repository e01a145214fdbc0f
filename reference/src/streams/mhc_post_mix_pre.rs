//! The residual streams after a sublayer, the coefficients of the next site, and the input of its
//! sublayer (inference 2.1 to 2.4, training 11.1). These are [`crate::streams::mhc_post`],
//! [`crate::streams::mhc_mix`] and [`crate::streams::mhc_pre`], one after the other. With X' the
//! streams after the sublayer,
//!
//! ```text
//! X'                       = mhc_post(X, y, post, comb)             stored
//! pre, post, comb          = mhc_mix(X') of the next site           h = mhc_pre(X', pre)
//!
//! dX' total = dX' + (mhc_pre's gradient of dh) + (mhc_mix's of dpre, dpost and dcomb)
//!                            dpre from dh only; stored
//! dX, dy, dpost, dcomb     = mhc_post's gradients of the total
//! ```
//!
//! # Rounding points
//!
//! Those of the three operators, and two more. X' is stored in bf16 before any other step reads it.
//! The total is stored in bf16 too. Its three terms are added in fp32: dX' and `mhc_pre`'s first,
//! then `mhc_mix`'s. In the backward, the products of `mhc_mix` are those of tensor cores too.

use candle_core::Tensor;

use crate::error::Result;
use crate::named::Named;
use crate::precision::Rounding;
use crate::streams::mhc_mix::{self, Numbers};
use crate::{streams::mhc_post, streams::mhc_pre};

/// `out` `[num_tokens, 4, hidden_size]` and `h` `[num_tokens, hidden_size]`, stored in bf16,
/// `next_pre` and `next_post` `[num_tokens, 4]`, `next_comb` `[num_tokens, 4, 4]` (source,
/// destination), `mix` `[num_tokens, 24]` and `rstd` `[num_tokens]`, stored in f32, for these
/// inputs:
///
/// - `streams` `[num_tokens, 4, hidden_size]` and `y` `[num_tokens, hidden_size]`, stored in bf16;
/// - `post` `[num_tokens, 4]` and `comb` `[num_tokens, 4, 4]`, stored in f32, of the previous site;
/// - `fn` `[24, 4, hidden_size]`, `scale` `[3]` and `base` `[24]`, stored in f32, of the next site.
pub fn forward(inputs: &Named, numbers: Numbers, rounding: &mut Rounding) -> Result<Named> {
    let (out, site) = front(inputs, rounding)?;
    let coefficients = mhc_mix::forward(&site, numbers, rounding)?;
    let pre = coefficients.tensor("pre")?.clone();
    let mixed =
        Named::new().with("streams", site.tensor("streams")?.clone()).with("pre", pre.clone());
    let outputs = mhc_pre::forward(&mixed, None, rounding)?.with("out", out).with("next_pre", pre);
    let outputs = outputs.with("next_post", coefficients.tensor("post")?.clone());
    let outputs = outputs.with("next_comb", coefficients.tensor("comb")?.clone());
    Ok(outputs
        .with("mix", coefficients.tensor("mix")?.clone())
        .with("rstd", coefficients.tensor("rstd")?.clone()))
}

/// `dout_total`, `dstreams` and `dy`, stored in bf16, `dpost`, `dcomb`, `dfn`, `dscale` and
/// `dbase`, stored in f32, by the formulas of the module documentation. The inputs are those of
/// [`forward`], and `dout`, `dh`, `dnext_post` and `dnext_comb`, of the shapes of its outputs.
pub fn backward(inputs: &Named, numbers: Numbers, rounding: &mut Rounding) -> Result<Named> {
    let (_, site) = front(inputs, rounding)?;
    let pre = mhc_mix::forward(&site, numbers, rounding)?.tensor("pre")?.clone();
    let site = site.with("pre", pre).with("dout", inputs.tensor("dout")?.clone());
    let site = site
        .with("dh", inputs.tensor("dh")?.clone())
        .with("dpost", inputs.tensor("dnext_post")?.clone());
    let of_site = site_backward(
        &site.with("dcomb", inputs.tensor("dnext_comb")?.clone()),
        numbers,
        rounding,
    )?;
    let total = of_site.tensor("dstreams")?.clone();
    let front =
        mhc_post::backward(&front_inputs(inputs)?.with("dout", rounding.bf16(&total)?), rounding)?;
    ["dfn", "dscale", "dbase"].into_iter().try_fold(front.with("dout_total", total), |all, name| {
        Ok(all.with(name, of_site.tensor(name)?.clone()))
    })
}

/// The backward of only a site: `dstreams`, stored in bf16, `dfn`, `dscale` and `dbase`, stored in
/// f32. The inputs are the `streams`, `fn`, `scale` and `base` that the site reads, its `pre`,
/// `dout` (the gradient of the streams from all other uses), `dh`, `dpost` and `dcomb`.
pub(crate) fn site_backward(
    inputs: &Named,
    numbers: Numbers,
    rounding: &mut Rounding,
) -> Result<Named> {
    let of = |names: &[&'static str]| {
        let with = |all: Named, name: &&'static str| {
            Ok::<_, crate::Error>(all.with(name, inputs.tensor(name)?.clone()))
        };
        names.iter().try_fold(Named::new(), with)
    };
    let of_h = mhc_pre::backward(&of(&["streams", "pre", "dh"])?, None, rounding)?;
    let site = of(&["streams", "fn", "scale", "base", "dpost", "dcomb"])?
        .with("dpre", of_h.tensor("dpre")?.clone());
    let of_site = mhc_mix::backward(&site, numbers, rounding)?;
    let known = rounding.f32(&(inputs.tensor("dout")? + of_h.tensor("dstreams")?)?)?;
    let total = rounding.f32(&(known + of_site.tensor("dstreams")?)?)?;
    Ok(of_site.with("dstreams", total))
}

/// The inputs of `mhc_post`.
fn front_inputs(inputs: &Named) -> Result<Named> {
    ["streams", "y", "post", "comb"]
        .into_iter()
        .try_fold(Named::new(), |all, name| Ok(all.with(name, inputs.tensor(name)?.clone())))
}

/// X' before the store, and the inputs of `mhc_mix` of the next site.
fn front(inputs: &Named, rounding: &mut Rounding) -> Result<(Tensor, Named)> {
    let out = mhc_post::forward(&front_inputs(inputs)?, rounding)?.tensor("out")?.clone();
    let site = Named::new().with("streams", rounding.bf16(&out)?);
    let site = ["fn", "scale", "base"].into_iter().try_fold(site, |all, name| {
        Ok::<_, crate::Error>(all.with(name, inputs.tensor(name)?.clone()))
    })?;
    Ok((out, site))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::precision::values;
    use crate::streams::mhc_mix::NUM_COLUMNS;
    use crate::streams::mhc_post::NUM_STREAMS;
    use crate::testing::{
        Draw, UNIT_ROUNDOFF, assert_derivative_along_all, assert_within, differentiated, f64_tensor,
    };

    const OUTPUTS: [(&str, &str); 4] =
        [("out", "dout"), ("h", "dh"), ("next_post", "dnext_post"), ("next_comb", "dnext_comb")];
    const GRADIENTS: [(&str, &str); 7] = [
        ("streams", "dstreams"),
        ("y", "dy"),
        ("post", "dpost"),
        ("comb", "dcomb"),
        ("fn", "dfn"),
        ("scale", "dscale"),
        ("base", "dbase"),
    ];
    const NUMBERS: Numbers = Numbers { sinkhorn_iters: 3, norm_eps: 1e-6, hc_eps: 1e-2 };

    fn case(seed: u64, num_tokens: usize, hidden_size: usize) -> Named {
        let mut draw = Draw::new(seed);
        let (gates, matrix) = ([num_tokens, NUM_STREAMS], [num_tokens, NUM_STREAMS, NUM_STREAMS]);
        let (streams, row) = ([num_tokens, NUM_STREAMS, hidden_size], [num_tokens, hidden_size]);
        let named =
            Named::new().with("streams", draw.bf16(&streams, 1.0)).with("y", draw.bf16(&row, 1.0));
        let named =
            named.with("post", draw.normal(&gates, 1.0)).with("comb", draw.normal(&matrix, 0.5));
        let deviation = ((NUM_STREAMS * hidden_size) as f64).sqrt().recip();
        let named =
            named.with("fn", draw.normal(&[NUM_COLUMNS, NUM_STREAMS, hidden_size], deviation));
        let named = named
            .with("scale", draw.normal(&[3], 1.0))
            .with("base", draw.normal(&[NUM_COLUMNS], 1.0));
        let named = named.with("dout", draw.bf16(&streams, 1.0)).with("dh", draw.bf16(&row, 1.0));
        named
            .with("dnext_post", draw.normal(&gates, 1.0))
            .with("dnext_comb", draw.normal(&matrix, 1.0))
    }

    /// The outputs times their upstream gradients.
    fn objective(inputs: &Named) -> Result<Tensor> {
        let outputs = forward(inputs, NUMBERS, &mut Rounding::exact())?;
        let terms = OUTPUTS.into_iter().map(|(output, upstream)| {
            Ok((outputs.tensor(output)? * inputs.tensor(upstream)?)?.flatten_all()?)
        });
        Ok(Tensor::cat(&terms.collect::<Result<Vec<_>>>()?, 0)?)
    }

    #[test]
    fn the_next_site_reads_the_streams_behind_the_sublayer() -> Result<()> {
        // Stream 0 goes only to destination 1; the weights are zero, and the base makes every pre
        // except that of destination 1 zero.
        let mut comb = [0.0; 16];
        comb[1] = 1.0;
        let (mut base, shut) = (vec![0.0; NUM_COLUMNS], -200.0);
        (base[0], base[2], base[3]) = (shut, shut, shut);
        let inputs = Named::new().with("streams", f64_tensor(&[8.0, 1.0, 2.0, 3.0], &[1, 4, 1]));
        let inputs = inputs
            .with("y", f64_tensor(&[5.0], &[1, 1]))
            .with("post", f64_tensor(&[0.0; 4], &[1, 4]));
        let inputs = inputs
            .with("comb", f64_tensor(&comb, &[1, 4, 4]))
            .with("base", f64_tensor(&base, &[24]));
        let inputs = inputs
            .with("fn", f64_tensor(&[0.0; 96], &[24, 4, 1]))
            .with("scale", f64_tensor(&[0.0; 3], &[3]));
        let outputs = forward(&inputs, NUMBERS, &mut Rounding::exact())?;
        assert_eq!(values(outputs.tensor("out")?)?, [0.0, 8.0, 0.0, 0.0]);
        assert_eq!(values(outputs.tensor("h")?)?, [8.0 * (0.5 + NUMBERS.hc_eps)]);
        Ok(())
    }

    #[test]
    fn explicit_backward_equals_autograd() -> Result<()> {
        for (seed, num_tokens, hidden_size) in [(1, 1, 2), (2, 5, 37), (3, 3, 16)] {
            let inputs = case(seed, num_tokens, hidden_size);
            let explicit = backward(&inputs, NUMBERS, &mut Rounding::exact())?;
            let automatic = differentiated(&inputs, &GRADIENTS, objective)?;
            // Each of the passes, and each of the sums' terms, rounds once; no intermediate is
            // larger than all values together.
            let roundings =
                4.0 * (64.0 * NUMBERS.sinkhorn_iters as f64 + 8.0 * hidden_size as f64 + 64.0);
            let size = |tensor: &Tensor| -> Result<f64> {
                Ok(values(tensor)?.iter().map(|x| x.abs()).sum())
            };
            let total = size(explicit.tensor("dout_total")?)?;
            for (_, name) in GRADIENTS {
                let gradient = explicit.tensor(name)?;
                let bound = (gradient.ones_like()?
                    * (UNIT_ROUNDOFF * roundings * (1.0 + total + size(gradient)?)))?;
                assert_within(name, gradient, automatic.tensor(name)?, &bound);
            }
        }
        Ok(())
    }

    #[test]
    fn backward_equals_directional_finite_differences() -> Result<()> {
        let inputs = case(4, 3, 24);
        let gradients = backward(&inputs, NUMBERS, &mut Rounding::exact())?;
        let size: f64 = values(&objective(&inputs)?)?.iter().map(|term| term.abs()).sum();
        let noise = 512.0 * UNIT_ROUNDOFF * size;
        assert_derivative_along_all(
            "mhc_post_mix_pre",
            [&inputs, &gradients],
            &GRADIENTS,
            0.1,
            noise,
            |moved| Ok(values(&objective(moved)?)?.into_iter().sum()),
        )
    }

    #[test]
    fn no_tokens_have_no_outputs_and_gradients_of_zero() -> Result<()> {
        let inputs = case(1, 0, 3);
        assert_eq!(forward(&inputs, NUMBERS, &mut Rounding::exact())?.tensor("h")?.dims(), [0, 3]);
        let gradients = backward(&inputs, NUMBERS, &mut Rounding::exact())?;
        assert_eq!(values(gradients.tensor("dbase")?)?, [0.0; NUM_COLUMNS]);
        assert_eq!(gradients.tensor("dout_total")?.dims(), [0, 4, 3]);
        Ok(())
    }

    #[test]
    fn what_is_no_shape_of_the_operator_is_refused() {
        let inputs = case(1, 2, 3).with("y", f64_tensor(&[0.0; 8], &[2, 4]));
        let refused =
            forward(&inputs, NUMBERS, &mut Rounding::exact()).map(|_| ()).unwrap_err().to_string();
        assert!(refused.contains("hidden_size"), "{refused}");
    }
}
