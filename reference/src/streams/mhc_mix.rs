//! The coefficients of the residual streams (inference 2.1 and 2.2, training 11.1). For each token,
//! with v its four streams one after the other,
//!
//! ```text
//! rstd = 1 / sqrt(mean(v^2) + norm_eps)       mix[q] = rstd (sum over e of fn[q,e] v[e])          q = 0 .. 23
//! z    = mix scale + base                     scale[0] for q = 0..3, scale[1] for 4..7, scale[2] for 8..23
//!
//! pre[i]    = sigmoid(z[i]) + hc_eps          post[j] = 2 sigmoid(z[4 + j])
//! P         = softmax over j of z[8 + 4 i + j]                              i the source, j the destination
//! comb      = M after the last of 2 sinkhorn_iters - 1 passes, starting from M = P + hc_eps:
//!             M /= (sum over i of M) + hc_eps in the first, third, ... last one,
//!             M /= (sum over j of M) + hc_eps in the others
//!
//! dz    = dpre s (1 - s), 2 dpost s (1 - s) with s = sigmoid(z), and of comb's logits, from the last pass back,
//!         dM = (dM' - sum of dM' M') / s, s being the sum and hc_eps that divided, over its elements,
//!         and P (dP - sum over j of dP P)
//! dbase = sum over tokens of dz               dscale[g] = sum over tokens and columns of group g of dz mix
//! dmix  = dz scale                            dfn[q,e] = sum over tokens of (rstd dmix[q]) v[e]
//! dv[e] = sum over q of fn[q,e] (rstd dmix[q]) - v[e] rstd^2 / (4 hidden_size) (sum over q of dmix[q] mix[q])
//! ```
//!
//! # Rounding points
//!
//! All values are fp32; the streams are stored in bf16. Products of v and fn are exact. Tensor
//! cores multiply v by three parts of fn, and add 64 channels from zero, with truncation after
//! every 16 products. These sums are added in fp32. (On Hopper each part has a separate sum, which
//! truncates less.) Exponentials, quotients and the root are approximated. In the backward, tensor
//! cores multiply three parts of rstd dmix by v, 16 tokens from zero, and by three parts of fn, all
//! columns at once. What that omits or truncates is about one rounding of fp32.

use candle_core::Tensor;

use crate::error::{Result, require_that};
use crate::named::Named;
use crate::precision::{Accumulator, Rounding};
use crate::select::max_or_nan;
use crate::streams::mhc_post::NUM_STREAMS;

/// Coefficients of a token: pre, post, and comb by sources.
pub const NUM_COLUMNS: usize = 2 * NUM_STREAMS + NUM_STREAMS * NUM_STREAMS;
/// The first column and the number of columns of pre, post and comb.
const GROUPS: [(usize, usize); 3] =
    [(0, NUM_STREAMS), (NUM_STREAMS, NUM_STREAMS), (2 * NUM_STREAMS, NUM_STREAMS * NUM_STREAMS)];

/// The accumulator of the projection: of 16 products that it adds at a time a third are of other
/// terms.
const ACCUMULATOR: Accumulator =
    Accumulator { block_terms: 5, ..Accumulator::F32 }.promoted_every(64);

/// The parameters of a call.
#[derive(Clone, Copy, Debug)]
pub struct Numbers {
    /// Iterations of the Sinkhorn normalization. The softmax with the normalization of its columns
    /// is the first; at least 1.
    pub sinkhorn_iters: usize,
    /// Added to the mean square of a token; positive.
    pub norm_eps: f64,
    /// Added to pre, after the softmax, and to each sum that is a divisor; positive.
    pub hc_eps: f64,
}

/// `pre` and `post` `[num_tokens, 4]`, `comb` `[num_tokens, 4, 4]` (source, destination), and for
/// the backward `mix` `[num_tokens, 24]` and `rstd` `[num_tokens]`, all stored in f32, for these
/// inputs:
///
/// - `streams` `[num_tokens, 4, hidden_size]`, stored in bf16;
/// - `fn` `[24, 4, hidden_size]`, `scale` `[3]` and `base` `[24]`, stored in f32.
pub fn forward(inputs: &Named, numbers: Numbers, rounding: &mut Rounding) -> Result<Named> {
    check(inputs, numbers)?;
    let streams = inputs.tensor("streams")?;
    if streams.dim(0)? == 0 {
        let none = |shape: &[usize]| Tensor::zeros(shape, streams.dtype(), streams.device());
        let gates = none(&[0, NUM_STREAMS])?;
        let outputs = Named::new().with("pre", gates.clone()).with("post", gates);
        let outputs = outputs.with("comb", none(&[0, NUM_STREAMS, NUM_STREAMS])?);
        return Ok(outputs.with("mix", none(&[0, NUM_COLUMNS])?).with("rstd", none(&[0])?));
    }
    let (Projected { rstd, mix }, z) = logits_of(inputs, numbers, rounding)?;
    let gates = rounding.sigmoid_f32(&z.narrow(1, 0, 2 * NUM_STREAMS)?)?;
    let pre = rounding.f32(&(gates.narrow(1, 0, NUM_STREAMS)? + numbers.hc_eps)?)?;
    let post = (gates.narrow(1, NUM_STREAMS, NUM_STREAMS)? * 2.0)?;
    let comb = Sinkhorn::of(&logits(&z)?, numbers, rounding)?.comb()?;
    let outputs = Named::new().with("pre", pre).with("post", post).with("comb", comb);
    Ok(outputs.with("mix", mix).with("rstd", rstd.squeeze(1)?))
}

/// `dstreams`, stored in bf16, `dfn`, `dscale` and `dbase`, stored in f32, by the formulas of the
/// module documentation. The inputs are those of [`forward`] and `dpre`, `dpost` and `dcomb`, of
/// the shapes of its outputs.
pub fn backward(inputs: &Named, numbers: Numbers, rounding: &mut Rounding) -> Result<Named> {
    check(inputs, numbers)?;
    if inputs.tensor("streams")?.dim(0)? == 0 {
        // Sums over zero tokens.
        let zeros = |name| Ok::<_, crate::Error>(inputs.tensor(name)?.zeros_like()?);
        let gradients = Named::new().with("dstreams", zeros("streams")?).with("dfn", zeros("fn")?);
        return Ok(gradients.with("dscale", zeros("scale")?).with("dbase", zeros("base")?));
    }
    let (Projected { rstd, mix }, z) = logits_of(inputs, numbers, rounding)?;
    let gates = z.narrow(1, 0, 2 * NUM_STREAMS)?;
    let s = rounding.sigmoid_f32(&gates)?;
    let slope = rounding.sigmoid_slope_f32(&s, &gates)?;
    let of_gates =
        Tensor::cat(&[inputs.tensor("dpre")?.clone(), (inputs.tensor("dpost")? * 2.0)?], 1)?;
    let of_gates = rounding.f32(&(of_gates * slope)?)?;
    let of_comb = Sinkhorn::of(&logits(&z)?, numbers, rounding)?
        .gradient(inputs.tensor("dcomb")?, rounding)?;
    let dz = Tensor::cat(&[of_gates, of_comb.flatten_from(1)?], 1)?;

    let dbase = rounding.sum_f32(&dz, 0)?;
    let products = rounding.f32(&(&dz * &mix)?)?;
    let of_columns = rounding.sum_f32(&products, 0)?;
    let of_group = |(first, count), rounding: &mut Rounding| {
        rounding.sum_keepdim_f32(&of_columns.narrow(0, first, count)?, 0)
    };
    let dscale =
        GROUPS.into_iter().map(|group| of_group(group, rounding)).collect::<Result<Vec<_>>>()?;

    let dmix = rounding.f32(&dz.broadcast_mul(&by_columns(inputs.tensor("scale")?)?)?)?;
    let [dstreams, dfn] =
        gradients_of_projection(inputs, &Projected { rstd, mix }, &dmix, rounding)?;
    let gradients = Named::new().with("dstreams", dstreams).with("dfn", dfn);
    Ok(gradients.with("dscale", Tensor::cat(&dscale, 0)?).with("dbase", dbase))
}

/// The inputs of the backward of a projection: rstd `[num_tokens, 1]` and mix
/// `[num_tokens, num_columns]`.
pub(crate) struct Projected {
    pub rstd: Tensor,
    pub mix: Tensor,
}

/// rstd and mix of `streams` and `fn` `[num_columns, 4, hidden_size]`.
pub(crate) fn project(inputs: &Named, norm_eps: f64, rounding: &mut Rounding) -> Result<Projected> {
    let (v, projection) =
        (inputs.tensor("streams")?.flatten_from(1)?, inputs.tensor("fn")?.flatten_from(1)?);
    let squares = rounding.f32(&v.sqr()?)?;
    let mean = rounding.sum_keepdim_f32(&squares, 1)?;
    let mean = rounding.f32(&(mean / v.dim(1)? as f64)?)?;
    let shifted = rounding.f32(&(mean + norm_eps)?)?;
    let rstd = rounding.approximate_f32(&shifted.sqrt()?.recip()?)?;
    let product = rounding.matmul(&v, &projection.t()?, ACCUMULATOR)?;
    let mix = rounding.f32(&product.broadcast_mul(&rstd)?)?;
    Ok(Projected { rstd, mix })
}

/// The gradients of the streams and of `fn`, through the projection, from the gradient of mix.
pub(crate) fn gradients_of_projection(
    inputs: &Named,
    Projected { rstd, mix }: &Projected,
    dmix: &Tensor,
    rounding: &mut Rounding,
) -> Result<[Tensor; 2]> {
    let (v, projection) =
        (inputs.tensor("streams")?.flatten_from(1)?, inputs.tensor("fn")?.flatten_from(1)?);
    let weights = rounding.f32(&dmix.broadcast_mul(rstd)?)?;
    let dfn = rounding.matmul_f32(&weights.t()?, &v)?.reshape(inputs.tensor("fn")?.shape())?;
    // rstd^2 mean(dmix mix) over the channels, although the sum is over columns.
    let products = rounding.f32(&(dmix * mix)?)?;
    let radial = rounding.sum_keepdim_f32(&products, 1)?;
    let radial = rounding.f32(&(radial / v.dim(1)? as f64)?)?;
    let radial = rounding.f32(&(radial * rstd)?)?;
    let radial = rounding.f32(&(radial * rstd)?)?;
    let along = rounding.f32(&v.broadcast_mul(&radial)?)?;
    let across = rounding.matmul_f32(&weights, &projection)?;
    let dv = rounding.f32(&(across - along)?)?;
    Ok([dv.reshape(inputs.tensor("streams")?.shape())?, dfn])
}

/// Values that both directions compute: the projection, and z `[num_tokens, 24]`.
fn logits_of(
    inputs: &Named,
    numbers: Numbers,
    rounding: &mut Rounding,
) -> Result<(Projected, Tensor)> {
    let projected = project(inputs, numbers.norm_eps, rounding)?;
    let scaled =
        rounding.f32(&projected.mix.broadcast_mul(&by_columns(inputs.tensor("scale")?)?)?)?;
    // In rows of comb's logits only differences matter; each sigmoid uses one logit.
    let z = rounding.f32_apart(&scaled.broadcast_add(inputs.tensor("base")?)?)?;
    Ok((projected, z))
}

/// The scale of each column.
fn by_columns(scale: &Tensor) -> Result<Tensor> {
    let of = |(group, (_, count)): (usize, (usize, usize))| {
        scale.narrow(0, group, 1)?.broadcast_as(count)
    };
    let columns =
        GROUPS.into_iter().enumerate().map(of).collect::<candle_core::Result<Vec<_>>>()?;
    Ok(Tensor::cat(&columns, 0)?)
}

/// The logits of comb, `[num_tokens, source, destination]`.
fn logits(z: &Tensor) -> Result<Tensor> {
    let (first, count) = GROUPS[2];
    Ok(z.narrow(1, first, count)?.reshape((z.dim(0)?, NUM_STREAMS, NUM_STREAMS))?)
}

/// The Sinkhorn normalization with the values that its backward needs.
struct Sinkhorn {
    softmax: Tensor,
    passes: Vec<Pass>,
}

/// One division by sums along a dimension: M after it, and the factor of M.
struct Pass {
    dim: usize,
    m: Tensor,
    factor: Tensor,
}

impl Sinkhorn {
    fn of(logits: &Tensor, numbers: Numbers, rounding: &mut Rounding) -> Result<Self> {
        let top = max_or_nan(logits, 2)?.detach();
        let power = rounding.f32(&logits.broadcast_sub(&top)?)?;
        let power = rounding.exp_f32(&power)?;
        let sum = rounding.sum_keepdim_f32(&power, 2)?;
        let quotient = rounding.approximate_f32(&sum.recip()?)?;
        let softmax = rounding.f32(&power.broadcast_mul(&quotient)?)?;
        let mut m = rounding.f32(&(&softmax + numbers.hc_eps)?)?;
        let mut passes = Vec::new();
        for pass in 1..2 * numbers.sinkhorn_iters {
            // Over sources in the odd passes, over destinations in the others.
            let dim = if pass % 2 == 1 { 1 } else { 2 };
            let sum = rounding.sum_keepdim_f32(&m, dim)?;
            let sum = rounding.f32(&(sum + numbers.hc_eps)?)?;
            let factor = rounding.approximate_f32(&sum.recip()?)?;
            m = rounding.f32(&m.broadcast_mul(&factor)?)?;
            passes.push(Pass { dim, m: m.clone(), factor });
        }
        Ok(Self { softmax, passes })
    }

    /// The result of the last pass. (At least one pass exists, because at least one iteration
    /// does.)
    fn comb(&self) -> Result<Tensor> {
        Ok(self.passes.last().map_or(&self.softmax, |pass| &pass.m).clone())
    }

    /// The gradient with respect to the logits.
    fn gradient(&self, dcomb: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
        let mut gradient = dcomb.clone();
        for Pass { dim, m, factor } in self.passes.iter().rev() {
            let rest = across(&gradient, m, *dim, rounding)?;
            gradient = rounding.f32(&rest.broadcast_mul(factor)?)?;
        }
        let rest = across(&gradient, &self.softmax, 2, rounding)?;
        rounding.f32(&(rest * &self.softmax)?)
    }
}

/// `gradient - sum along dim of gradient m`.
fn across(gradient: &Tensor, m: &Tensor, dim: usize, rounding: &mut Rounding) -> Result<Tensor> {
    let products = rounding.f32(&(gradient * m)?)?;
    let sum = rounding.sum_keepdim_f32(&products, dim)?;
    rounding.f32(&gradient.broadcast_sub(&sum)?)
}

fn check(inputs: &Named, numbers: Numbers) -> Result<()> {
    let tensors: [(&[&'static str], &[&'static str]); 6] = [
        (&["streams"], &["num_tokens", "num_streams", "hidden_size"]),
        (&["fn"], &["num_columns", "num_streams", "hidden_size"]),
        (&["scale"], &["num_groups"]),
        (&["base"], &["num_columns"]),
        (&["dpre", "dpost"], &["num_tokens", "num_streams"]),
        (&["dcomb"], &["num_tokens", "source", "destination"]),
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
        num_columns == NUM_COLUMNS,
        "a token has 24 coefficients",
    )?;
    require_that(
        "num_groups",
        num_groups,
        num_groups == GROUPS.len(),
        "pre, post and comb have a scale each",
    )?;
    require_that("hidden_size", hidden_size, hidden_size > 0, "a stream has at least one channel")?;
    let Numbers { sinkhorn_iters, norm_eps, hc_eps } = numbers;
    require_that(
        "sinkhorn_iters",
        sinkhorn_iters,
        sinkhorn_iters > 0,
        "there is at least one iteration",
    )?;
    for (name, eps) in [("norm_eps", norm_eps), ("hc_eps", hc_eps)] {
        require_that(name, eps, eps > 0.0 && eps.is_finite(), "it must be positive and finite")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::precision::values;
    use crate::testing::{
        Draw, Golden, UNIT_ROUNDOFF, assert_derivative_along_all, assert_within, differentiated,
        f64_tensor,
    };

    const OUTPUTS: [(&str, &str); 3] = [("pre", "dpre"), ("post", "dpost"), ("comb", "dcomb")];
    const GRADIENTS: [(&str, &str); 4] =
        [("streams", "dstreams"), ("fn", "dfn"), ("scale", "dscale"), ("base", "dbase")];
    const NUMBERS: Numbers = Numbers { sinkhorn_iters: 20, norm_eps: 1e-6, hc_eps: 1e-6 };

    fn case(seed: u64, num_tokens: usize, hidden_size: usize) -> Named {
        let mut draw = Draw::new(seed);
        let named =
            Named::new().with("streams", draw.bf16(&[num_tokens, NUM_STREAMS, hidden_size], 1.0));
        let deviation = ((NUM_STREAMS * hidden_size) as f64).sqrt().recip();
        let named =
            named.with("fn", draw.normal(&[NUM_COLUMNS, NUM_STREAMS, hidden_size], deviation));
        let named = named
            .with("scale", draw.normal(&[3], 1.0))
            .with("base", draw.normal(&[NUM_COLUMNS], 1.0));
        let named = named.with("dpre", draw.normal(&[num_tokens, NUM_STREAMS], 1.0));
        let named = named.with("dpost", draw.normal(&[num_tokens, NUM_STREAMS], 1.0));
        named.with("dcomb", draw.normal(&[num_tokens, NUM_STREAMS, NUM_STREAMS], 1.0))
    }

    /// The outputs times their upstream gradients.
    fn objective(inputs: &Named, numbers: Numbers) -> Result<Tensor> {
        let outputs = forward(inputs, numbers, &mut Rounding::exact())?;
        let terms = OUTPUTS.into_iter().map(|(output, upstream)| {
            Ok((outputs.tensor(output)? * inputs.tensor(upstream)?)?.flatten_all()?)
        });
        Ok(Tensor::cat(&terms.collect::<Result<Vec<_>>>()?, 0)?)
    }

    #[test]
    fn columns_of_comb_sum_to_one_and_its_rows_are_sources() -> Result<()> {
        let inputs = case(1, 3, 5);
        let comb = forward(&inputs, NUMBERS, &mut Rounding::exact())?.tensor("comb")?.clone();
        for sum in values(&comb.sum(1)?)? {
            assert!((sum - 1.0).abs() < 2e-6, "{sum}");
        }
        // One iteration, and logits that send source 0 only to destination 1: the row of the
        // softmax is known.
        let mut base = vec![0.0; NUM_COLUMNS];
        base[8 + 1] = 50.0;
        let inputs = inputs
            .with("scale", f64_tensor(&[0.0; 3], &[3]))
            .with("base", f64_tensor(&base, &[NUM_COLUMNS]));
        let comb =
            forward(&inputs, Numbers { sinkhorn_iters: 1, ..NUMBERS }, &mut Rounding::exact())?;
        let comb = values(comb.tensor("comb")?)?;
        assert!(
            (comb[1] - 1.0 / 1.75).abs() < 1e-5
                && (comb[4] - 1.0 / 3.0).abs() < 1e-5
                && comb[0] < 1e-5,
            "{comb:?}"
        );
        Ok(())
    }

    #[test]
    fn explicit_backward_equals_autograd() -> Result<()> {
        for (seed, num_tokens, hidden_size, sinkhorn_iters, hc_eps) in
            [(1, 1, 2, 1, 1e-2), (2, 5, 37, 20, 1e-6), (3, 3, 16, 3, 1e-2)]
        {
            let (inputs, numbers) = (
                case(seed, num_tokens, hidden_size),
                Numbers { sinkhorn_iters, hc_eps, ..NUMBERS },
            );
            let explicit = backward(&inputs, numbers, &mut Rounding::exact())?;
            let automatic =
                differentiated(&inputs, &GRADIENTS, |inputs| objective(inputs, numbers))?;
            // Each of the passes, and each of the sums' terms, rounds once; no intermediate is
            // larger than all values together.
            let roundings = 2.0 * (64.0 * sinkhorn_iters as f64 + 8.0 * hidden_size as f64 + 64.0);
            for (name, gradient) in explicit.into_tensors() {
                let size: f64 = 1.0 + values(&gradient)?.iter().map(|x| x.abs()).sum::<f64>();
                let bound = (gradient.ones_like()? * (UNIT_ROUNDOFF * roundings * size))?;
                assert_within(name, &gradient, automatic.tensor(name)?, &bound);
            }
        }
        Ok(())
    }

    #[test]
    fn backward_equals_directional_finite_differences() -> Result<()> {
        let inputs = case(4, 3, 24);
        let gradients = backward(&inputs, NUMBERS, &mut Rounding::exact())?;
        let size: f64 = values(&objective(&inputs, NUMBERS)?)?.iter().map(|term| term.abs()).sum();
        let noise = 512.0 * UNIT_ROUNDOFF * size;
        assert_derivative_along_all(
            "mhc_mix",
            [&inputs, &gradients],
            &GRADIENTS,
            0.1,
            noise,
            |moved| Ok(values(&objective(moved, NUMBERS)?)?.into_iter().sum()),
        )
    }

    #[test]
    fn golden_coefficients_are_those_of_the_file_also_with_one_iteration_and_a_large_eps()
    -> Result<()> {
        for (file, num_tokens, hidden_size, sinkhorn_iters, hc_eps) in
            [("hc__b", 9, 24, 2, 1e-2), ("hc__one", 1, 96, 1, 1e-6)]
        {
            let golden = Golden::load(file);
            let streams =
                golden.f64("in.streams").reshape((num_tokens, NUM_STREAMS, hidden_size))?;
            let projection =
                golden.f64("param.attn_hc.fn").reshape((NUM_COLUMNS, NUM_STREAMS, hidden_size))?;
            let inputs = Named::new().with("streams", streams).with("fn", projection);
            let inputs = inputs.with("scale", golden.f64("param.attn_hc.scale"));
            let inputs = inputs.with("base", golden.f64("param.attn_hc.base"));
            let numbers = Numbers { sinkhorn_iters, hc_eps, ..NUMBERS };
            let outputs = forward(&inputs, numbers, &mut Rounding::exact())?;
            for (name, stored) in [("post", "out.post"), ("comb", "out.comb")] {
                let expected = golden.f64(stored).reshape(outputs.tensor(name)?.shape())?;
                let bound = (expected.ones_like()? * (1024.0 * UNIT_ROUNDOFF))?;
                assert_within(name, outputs.tensor(name)?, &expected, &bound);
            }
        }
        Ok(())
    }

    #[test]
    fn no_tokens_have_no_coefficients_and_gradients_of_zero() -> Result<()> {
        let inputs = case(1, 0, 3);
        assert_eq!(
            forward(&inputs, NUMBERS, &mut Rounding::exact())?.tensor("comb")?.dims(),
            [0, 4, 4]
        );
        let gradients = backward(&inputs, NUMBERS, &mut Rounding::exact())?;
        assert_eq!(values(gradients.tensor("dbase")?)?, [0.0; NUM_COLUMNS]);
        assert_eq!(gradients.tensor("dfn")?.dims(), [NUM_COLUMNS, NUM_STREAMS, 3]);
        Ok(())
    }

    #[test]
    fn what_is_no_shape_or_number_of_the_operator_is_refused() {
        let refused = |inputs: Named, numbers| {
            forward(&inputs, numbers, &mut Rounding::exact()).map(|_| ()).unwrap_err().to_string()
        };
        let none = Numbers { sinkhorn_iters: 0, ..NUMBERS };
        assert!(refused(case(1, 2, 3), none).contains("`sinkhorn_iters` is 0"));
        assert!(
            refused(case(1, 2, 3), Numbers { hc_eps: 0.0, ..NUMBERS }).contains("`hc_eps` is 0")
        );
        assert!(
            refused(case(1, 2, 3).with("scale", f64_tensor(&[1.0], &[1])), NUMBERS)
                .contains("`num_groups` is 1")
        );
    }
}
