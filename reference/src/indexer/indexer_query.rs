//! The indexer's queries and head weights (inference 7, 7.1).
//!
//! ```text
//! r = q with its last 64 channels rotated by the token's position       (rope.rs)
//! y = 128^-0.5 H r                                                       (hadamard.rs)
//! w = weights * weights_scale, with e4m3 times the scale of the head's codes
//! ```
//!
//! The backward: `dq = R^-1 (128^-0.5 H dy)` and `dweights = dw * weights_scale`.
//!
//! # Rounding points
//!
//! r and y are bf16. Codes and scales follow from fp32 values, and every operation is part of the
//! definition, so only one answer is right. Rotated pairs are those of [`rope::turned`], and sums
//! of the transform those of hadamard.rs. `y`, which has a gradient, is compared with the formula
//! instead.

use candle_core::Tensor;

use crate::error::{Result, require_that};
pub use crate::formats::hadamard::Stored;
use crate::formats::hadamard::{self, DIM};
use crate::named::Named;
use crate::precision::Rounding;
use crate::projections::rope;

/// Channels that rotate: the last ones of a head.
pub const ROPE_DIM: usize = 64;

/// Inputs of the operator.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// `q` `[num_tokens, num_heads, 128]`, with the table of its rotation, `[table_rows, 32]`; not
    /// `inverse`.
    pub rotation: rope::Inputs,
    /// `[num_tokens, num_heads]`.
    pub weights: Tensor,
    /// `128^-0.5 num_heads^-0.5` in the model.
    pub weights_scale: f32,
}

/// The stored queries, by these names: `y` `[num_tokens, num_heads, 128]`; or `codes`
/// `[num_tokens, num_heads, 64]` with `scale_bytes` `[num_tokens, num_heads, 4]`; or `codes`
/// `[num_tokens, num_heads, 128]`. In addition `w` `[num_tokens, num_heads]`.
///
/// # Errors
/// A tensor of the wrong shape.
pub fn forward(inputs: &Inputs, stored: Stored, rounding: &mut Rounding) -> Result<Named> {
    let [num_tokens, num_heads] = inputs.check()?;
    let rows = num_tokens * num_heads;
    let w = rounding.f32(&(&inputs.weights * f64::from(inputs.weights_scale))?)?;
    let transformed = |r: Tensor, rounding: &mut Rounding| -> Result<Named> {
        hadamard::forward(&Named::new().with("x", r.reshape((rows, DIM))?), stored, rounding)
    };
    if stored == Stored::Values {
        let r = rope::forward(&inputs.rotation, rounding)?.y;
        let y = transformed(rounding.bf16(&r)?, rounding)?;
        return Ok(Named::new()
            .with("y", y.tensor("y")?.reshape((num_tokens, num_heads, DIM))?)
            .with("w", w));
    }
    let turned =
        Tensor::from_vec(rope::turned(&inputs.rotation)?, (rows, DIM), inputs.weights.device())?;
    let coded = transformed(turned, rounding)?;
    let by_head = |name: &'static str| -> Result<Tensor> {
        let tensor = coded.tensor(name)?;
        Ok(tensor.reshape((num_tokens, num_heads, tensor.dim(1)?))?)
    };
    let codes = Named::new().with("codes", by_head("codes")?);
    if stored == Stored::E2m1 {
        return Ok(codes.with("scale_bytes", by_head("scale_bytes")?).with("w", w));
    }
    let scales = coded.tensor("scales")?.reshape((num_tokens, num_heads))?;
    Ok(codes.with("w", rounding.f32(&(w * scales)?)?))
}

/// `dq`, of the shape of `dy`, and `dweights`, of the shape of `dw`.
///
/// # Errors
/// As [`forward`].
pub fn backward(
    inputs: &Inputs,
    dy: &Tensor,
    dw: &Tensor,
    rounding: &mut Rounding,
) -> Result<Named> {
    let [num_tokens, num_heads] = inputs.check()?;
    let upstream = Named::new().with("dy", dy.reshape((num_tokens * num_heads, DIM))?);
    let dr = hadamard::backward(&upstream, rounding)?
        .tensor("dx")?
        .reshape((num_tokens, num_heads, DIM))?;
    let dq = rope::backward(&inputs.rotation, &dr, rounding)?.dx;
    let dweights = rounding.f32(&(dw * f64::from(inputs.weights_scale))?)?;
    Ok(Named::new().with("dq", dq).with("dweights", dweights))
}

impl Inputs {
    /// `[num_tokens, num_heads]`.
    fn check(&self) -> Result<[usize; 2]> {
        let of =
            Named::new().with("q", self.rotation.x.clone()).with("cos", self.rotation.cos.clone());
        let of = of.with("weights", self.weights.clone());
        let tensors: [(&[_], &[_]); 3] = [
            (&["q"], &["num_tokens", "num_heads", "head_dim"]),
            (&["weights"], &["num_tokens", "num_heads"]),
            (&["cos"], &["table_rows", "half_rope_dim"]),
        ];
        let [num_tokens, num_heads, head_dim, half] =
            of.extents(["num_tokens", "num_heads", "head_dim", "half_rope_dim"], &tensors)?;
        require_that("head_dim", head_dim, head_dim == DIM, "the transform is one of 128")?;
        require_that("half_rope_dim", half, half == ROPE_DIM / 2, "64 channels turn")?;
        Ok([num_tokens, num_heads])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{Format, unpack_nibbles};
    use crate::precision::{Precision, values};
    use crate::projections::rope::{YarnParameters, inv_freq_f32, table};
    use crate::testing::{Draw, UNIT_ROUNDOFF, dot, dot_of_magnitudes, f64_tensor};

    fn inputs(num_tokens: usize, num_heads: usize) -> Inputs {
        let frequencies = inv_freq_f32(&YarnParameters::compress()).expect("the model's own");
        let positions: Vec<i64> = (0..num_tokens as i64).map(|token| 4096 + 37 * token).collect();
        let (cos, sin) = table(&frequencies, &positions).expect("positions that there are");
        let stored = |table: &Tensor| {
            let numbers: Vec<f64> = values(table).expect("numbers");
            let numbers: Vec<f64> = numbers.into_iter().map(|x| Format::F32.nearest(x)).collect();
            f64_tensor(&numbers, table.dims())
        };
        let mut draw = Draw::new(7);
        let x = draw.bf16(&[num_tokens, num_heads, DIM], 1.0);
        let rotation = rope::Inputs {
            x,
            cos: stored(&cos),
            sin: stored(&sin),
            positions: None,
            inverse: false,
        };
        Inputs {
            rotation,
            weights: draw.bf16(&[num_tokens, num_heads], 1.0),
            weights_scale: 0.011_048_543,
        }
    }

    #[test]
    fn codes_are_the_nearest_to_the_numbers_and_the_scale_of_e4m3_is_in_the_weight_alone()
    -> Result<()> {
        let inputs = inputs(3, 2);
        let values_of =
            |stored| forward(&inputs, stored, &mut Rounding::new(Precision::Nearest { seed: 0 }));
        let y = values_of(Stored::Values)?;
        let (y, w) = (values(y.tensor("y")?)?, values(y.tensor("w")?)?);
        let y: Vec<f64> = y.into_iter().map(|y| Format::BF16.nearest(y)).collect();
        let e2m1 = values_of(Stored::E2m1)?;
        let bytes: Vec<u8> =
            values(e2m1.tensor("codes")?)?.into_iter().map(|byte| byte as u8).collect();
        let scales = values(e2m1.tensor("scale_bytes")?)?;
        for (at, (y, code)) in y.iter().zip(unpack_nibbles(&bytes)).enumerate() {
            let scale = Format::E8M0.value(scales[at / 32] as u64);
            assert_eq!(Format::E2M1.value(code.into()), Format::E2M1.nearest(y / scale), "{at}");
        }
        assert_eq!(values(e2m1.tensor("w")?)?, w);
        let e4m3 = values_of(Stored::E4m3)?;
        let codes = values(e4m3.tensor("codes")?)?;
        for (row, scaled) in values(e4m3.tensor("w")?)?.into_iter().enumerate() {
            let scale = scaled / w[row];
            assert_eq!(scale.log2().fract(), 0.0);
            for at in row * DIM..(row + 1) * DIM {
                assert_eq!(
                    Format::E4M3.value(codes[at] as u64),
                    Format::E4M3.nearest(y[at] / scale),
                    "{at}"
                );
            }
        }
        Ok(())
    }

    #[test]
    fn the_backward_is_the_adjoint_of_the_forward() -> Result<()> {
        let inputs = inputs(2, 3);
        let mut draw = Draw::new(9);
        let (dy, dw) = (draw.normal(&[2, 3, DIM], 1.0), draw.normal(&[2, 3], 1.0));
        let outputs = forward(&inputs, Stored::Values, &mut Rounding::exact())?;
        let gradients = backward(&inputs, &dy, &dw, &mut Rounding::exact())?;
        for (output, upstream, input, gradient) in
            [("y", &dy, &inputs.rotation.x, "dq"), ("w", &dw, &inputs.weights, "dweights")]
        {
            let (forward, backward) =
                (dot(outputs.tensor(output)?, upstream), dot(input, gradients.tensor(gradient)?));
            // cos and sin are stored in fp32: their rotation is orthogonal up to that rounding, and
            // so is its transpose.
            let bound =
                4096.0 * UNIT_ROUNDOFF * dot_of_magnitudes(input, gradients.tensor(gradient)?);
            assert!((forward - backward).abs() <= bound, "{output}: {forward} {backward}");
        }
        Ok(())
    }

    #[test]
    fn a_position_that_is_not_there_is_nan_no_token_is_none_and_other_widths_are_refused()
    -> Result<()> {
        let mut hostile = inputs(2, 1);
        hostile.rotation.positions = Some(vec![0, 2]);
        let e4m3 = forward(&hostile, Stored::E4m3, &mut Rounding::exact())?;
        let w = values(e4m3.tensor("w")?)?;
        assert!(w[0].is_finite() && w[1].is_nan());
        let none = forward(&inputs(0, 4), Stored::E2m1, &mut Rounding::exact())?;
        assert_eq!(none.tensor("codes")?.dims(), [0, 4, 64]);
        let mut narrow = inputs(1, 1);
        narrow.rotation.cos = f64_tensor(&[1.0; 16], &[1, 16]);
        assert!(forward(&narrow, Stored::Values, &mut Rounding::exact()).is_err());
        Ok(())
    }
}
