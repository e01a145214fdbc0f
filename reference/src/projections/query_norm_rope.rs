//! The norm of the query heads and their rotation by position (inference 3, 4, 5.1, training 8,
//! 11.3):
//!
//! ```text
//! n  = x rstd, with rstd = 1 / sqrt(mean(x^2) + eps) over the channels of a head          [`crate::projections::rms_norm`]
//! y  = n with its last channels rotated by the position of its token                          [`crate::projections::rope`]
//!
//! g  = dy rotated backwards                   dx = rstd (g - x rstd^2 mean(g x))
//! ```
//!
//! # Rounding points
//!
//! Those of both; n is bf16 between them, g is fp32. rstd is stored in f32.

use candle_core::Tensor;

use crate::error::Result;
use crate::named::Named;
use crate::precision::Rounding;
use crate::projections::rms_norm;
use crate::projections::rope;

/// The heads of all tokens as rows.
fn rows(heads: &Tensor) -> Result<Tensor> {
    Ok(heads.flatten_to(1)?)
}

/// `y` `[num_tokens, num_heads, head_dim]`, stored in bf16, and `rstd` `[num_tokens, num_heads]`,
/// stored in f32. The inputs are `x` in `rotation`, of the shape of `y` and stored in bf16, not
/// inverse, and the positive `eps`.
///
/// # Errors
/// Tensors whose shapes do not match.
pub fn forward(rotation: &rope::Inputs, eps: f64, rounding: &mut Rounding) -> Result<Named> {
    let (num_tokens, num_heads, _) = rotation.x.dims3()?;
    let norm = rms_norm::forward(&Named::new().with("x", rows(&rotation.x)?), eps, rounding)?;
    let n = rounding.bf16(norm.tensor("y")?)?.reshape(rotation.x.shape())?;
    let y = rope::forward(&rope::Inputs { x: n, ..rotation.clone() }, rounding)?.y;
    Ok(Named::new()
        .with("y", y)
        .with("rstd", norm.tensor("rstd")?.reshape((num_tokens, num_heads))?))
}

/// `dx`, of the shape of `x` and stored in bf16. The inputs are those of [`forward`] and `dy`, of
/// the shape of `y`.
///
/// # Errors
/// As [`forward`].
pub fn backward(
    rotation: &rope::Inputs,
    dy: &Tensor,
    eps: f64,
    rounding: &mut Rounding,
) -> Result<Named> {
    let g = rope::backward(rotation, dy, rounding)?.dx;
    let named = Named::new().with("x", rows(&rotation.x)?).with("dy", rows(&g)?);
    let dx = rms_norm::backward(&named, eps, rounding)?;
    Ok(Named::new().with("dx", dx.tensor("dx")?.reshape(rotation.x.shape())?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::precision::values;
    use crate::testing::{Draw, Golden, UNIT_ROUNDOFF, assert_within, differentiated, f64_tensor};

    const EPS: f64 = 1e-6;

    fn inputs() -> (rope::Inputs, Tensor) {
        let mut draw = Draw::new(6);
        let (sin, cos): (Vec<f64>, Vec<f64>) =
            (0..6).map(|angle| (0.9 * f64::from(angle)).sin_cos()).unzip();
        let (cos, sin) = (f64_tensor(&cos, &[3, 2]), f64_tensor(&sin, &[3, 2]));
        let x = draw.bf16(&[4, 2, 6], 3.0);
        (
            rope::Inputs { x, cos, sin, positions: Some(vec![2, 0, 1, 2]), inverse: false },
            draw.bf16(&[4, 2, 6], 1.0),
        )
    }

    #[test]
    fn a_head_that_can_be_followed_by_hand() -> Result<()> {
        // (1, 7) has the mean square 25; a rotation by 90 degrees turns (a, b) into (-b, a).
        let table = |number: f64| f64_tensor(&[number], &[1, 1]);
        let x = f64_tensor(&[1.0, 7.0], &[1, 1, 2]);
        let rotation =
            rope::Inputs { x, cos: table(0.0), sin: table(1.0), positions: None, inverse: false };
        let found = forward(&rotation, 1e-300, &mut Rounding::exact())?;
        assert_eq!(values(found.tensor("rstd")?)?, [0.2]);
        let y = values(found.tensor("y")?)?;
        let within =
            |x: f64, expected: f64| (x - expected).abs() <= 4.0 * UNIT_ROUNDOFF * expected.abs();
        assert!(within(y[0], -1.4) && within(y[1], 0.2), "{y:?}");
        Ok(())
    }

    #[test]
    fn the_written_gradient_equals_that_of_automatic_differentiation() -> Result<()> {
        let (rotation, dy) = inputs();
        let written = backward(&rotation, &dy, EPS, &mut Rounding::exact())?;
        let objective = |inputs: &Named| {
            let rotation = rope::Inputs { x: inputs.tensor("x")?.clone(), ..rotation.clone() };
            Ok((forward(&rotation, EPS, &mut Rounding::exact())?.tensor("y")? * &dy)?)
        };
        let automatic =
            differentiated(&Named::new().with("x", rotation.x.clone()), &[("x", "dx")], objective)?;
        let automatic = automatic.tensor("dx")?;
        // Six channels, about twenty roundings of values of size 1.
        let bound = (automatic.ones_like()? * (4096.0 * UNIT_ROUNDOFF))?;
        assert_within("dx", written.tensor("dx")?, automatic, &bound);
        Ok(())
    }

    #[test]
    fn queries_of_a_published_layer_are_those_of_its_latent() -> Result<()> {
        let golden = Golden::load("attention_csa__all");
        let latent = golden.f64("mid.q_latent");
        let expected = golden.f64("mid.q");
        let &[batch, heads, tokens, channels] = expected.dims() else {
            panic!("{:?}", expected.dims())
        };
        let weight = golden.f64("param.self_attn.q_b_proj.weight");
        let latent = latent.reshape((batch * tokens, ()))?;
        let x = latent.matmul(&weight.t()?)?.reshape((batch * tokens, heads, channels))?;
        let table = |name: &str| {
            let rows = golden
                .f64(&format!("mid.rope.compress.{name}"))
                .squeeze(0)
                .expect("one table for all batches");
            Tensor::cat(&vec![rows; batch], 0).expect("a table")
        };
        let rotation = rope::Inputs {
            x,
            cos: table("cos"),
            sin: table("sin"),
            positions: None,
            inverse: false,
        };
        let found = forward(&rotation, EPS, &mut Rounding::exact())?;
        let expected =
            expected.transpose(1, 2)?.contiguous()?.reshape((batch * tokens, heads, channels))?;
        // The latent is stored in f32, each value off by 2^-24 of itself. The norm of a head
        // divides by the size of its largest values. Products with the weights of a row, in which
        // errors do not cancel, are a few times that.
        let size = latent.abs()?.matmul(&weight.abs()?.t()?)?.reshape(expected.shape())?;
        let rstd = found.tensor("rstd")?.unsqueeze(2)?;
        let largest = values(&size.broadcast_mul(&rstd)?)?.into_iter().fold(0.0, f64::max);
        // The error of the value itself, of its partner in the rotation and of rstd, and of the
        // storage of the result.
        let bound = (expected.ones_like()? * (2f64.powi(-24) * (4.0 * largest + 4.0)))?;
        assert_within("q", found.tensor("y")?, &expected, &bound);
        Ok(())
    }
}
