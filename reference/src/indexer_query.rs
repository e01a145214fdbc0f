//! The indexer's queries, from their projection to the operands of its logits, and the weights of its heads (inference
//! 7, 7.1).
//!
//! The last `rope_dim` channels of each head turn in adjacent pairs by the token's row of the tables and are rounded to
//! bf16; the whole row is transformed ([`crate::hadamard`]), and stored as numbers, as e2m1 with a scale for each 32
//! channels, or as e4m3 with one scale s for the row. The head weights are
//!
//! ```text
//! w[t, h] = weights[t, h] * 128^-0.5 * num_heads^-0.5           and, with e4m3, * s
//! ```
//!
//! so that each scale counts once: what is stored as e4m3 has none of its own. A position outside of the table makes
//! what turns NaN, so all of the row, its codes and scales, and with e4m3 its weight.
//!
//! # Rounding points
//!
//! A rotation is two products: the one with the odd channel is rounded to fp32, the other is added to it without a
//! rounding between (a fused multiply-add), and the sum is rounded to bf16. Codes and scales follow without a choice:
//! every run gives the same. `w` is an fp32 product with one fp32 constant; the scale is a power of two.

use candle_core::Tensor;

use crate::error::{Result, require_that};
use crate::format::Format;
use crate::hadamard::{self, DIM, Stored};
use crate::named::Named;
use crate::precision::{Precision, Rounding, values};

/// Of these inputs, as `stored` says, `y` `[num_tokens, num_heads, 128]`, or `codes` `[num_tokens, num_heads, 64 or
/// 128]` and, of e2m1, `scale_bytes` `[num_tokens, num_heads, 4]`; and `w` `[num_tokens, num_heads]`, stored in f32:
///
/// - `q` `[num_tokens, num_heads, 128]`, stored in bf16;
/// - `cos`, `sin` `[table_rows, rope_dim / 2]`, stored in f32;
/// - `positions` `[num_tokens]`, stored in i32: the table's row of each token; absent where token `t` has row `t`;
/// - `weights` `[num_tokens, num_heads]`, stored in f32 or bf16.
///
/// # Errors
/// Tensors whose extents do not fit.
pub fn forward(inputs: &Named, stored: Stored, rounding: &mut Rounding) -> Result<Named> {
    let table = ["table_rows", "half"];
    let tensors: [(&[_], &[_]); 4] = [
        (&["q"], &["num_tokens", "num_heads", "head_dim"]),
        (&["cos", "sin"], &table),
        (&["positions"], &["num_tokens"]),
        (&["weights"], &["num_tokens", "num_heads"]),
    ];
    let axes = ["num_tokens", "num_heads", "head_dim", "table_rows", "half"];
    let [num_tokens, num_heads, head_dim, _, half] = inputs.extents(axes, &tensors)?;
    require_that("head_dim", head_dim, head_dim == DIM, "the transform is one of 128")?;
    require_that("rope_dim", 2 * half, half > 0 && 2 * half <= DIM, "as many channels turn as there are, at the most")?;
    let head_scale = rounding.constant_f32(((DIM * num_heads.max(1)) as f64).sqrt().recip());
    let w = rounding.f32(&(inputs.tensor("weights")? * head_scale)?)?;
    let rows = |rounding: &mut Rounding| -> Result<Named> {
        let rotated = rotated(inputs, [num_heads, half], rounding)?;
        Ok(Named::new().with("x", rotated.reshape((num_tokens * num_heads, DIM))?))
    };
    if stored == Stored::Values {
        let y = hadamard::forward(&rows(rounding)?, stored, rounding)?;
        let y = y.tensor("y")?.reshape((num_tokens, num_heads, DIM))?;
        return Ok(Named::new().with("y", y).with("w", w));
    }
    let nearest = &mut Rounding::new(Precision::Nearest { seed: 0 });
    let quantised = hadamard::forward(&rows(nearest)?, stored, nearest)?;
    let of_heads = |name| -> Result<Tensor> { Ok(quantised.tensor(name)?.reshape((num_tokens, num_heads, ()))?) };
    if num_tokens * num_heads == 0 {
        let empty = |width: usize| Tensor::zeros((num_tokens, num_heads, width), w.dtype(), w.device());
        let named = Named::new().with("w", w.clone());
        return Ok(match stored {
            Stored::E2m1 => named.with("codes", empty(DIM / 2)?).with("scale_bytes", empty(DIM / 32)?),
            _ => named.with("codes", empty(DIM)?),
        });
    }
    let named = Named::new().with("codes", of_heads("codes")?);
    if stored == Stored::E2m1 {
        return Ok(named.with("scale_bytes", of_heads("scale_bytes")?).with("w", w));
    }
    let scales = quantised.tensor("scales")?.reshape((num_tokens, num_heads))?;
    Ok(named.with("w", rounding.f32(&(w * scales)?)?))
}

/// `q` with its last channels turned, and rounded to bf16.
fn rotated(inputs: &Named, [num_heads, half]: [usize; 2], rounding: &mut Rounding) -> Result<Tensor> {
    let q = inputs.tensor("q")?;
    let num_tokens = q.dim(0)?;
    if num_tokens * num_heads == 0 {
        return Ok(q.clone());
    }
    let [cos, sin] = [of_tokens(inputs, "cos")?, of_tokens(inputs, "sin")?];
    let turning = q.narrow(2, DIM - 2 * half, 2 * half)?.reshape((num_tokens, num_heads, half, 2))?;
    let (even, odd) = (turning.narrow(3, 0, 1)?.squeeze(3)?, turning.narrow(3, 1, 1)?.squeeze(3)?);
    let odd_sin = rounding.f32(&odd.broadcast_mul(&sin)?)?;
    let odd_cos = rounding.f32(&odd.broadcast_mul(&cos)?)?;
    let pair = [
        rounding.f32(&(even.broadcast_mul(&cos)? - odd_sin)?)?,
        rounding.f32(&(even.broadcast_mul(&sin)? + odd_cos)?)?,
    ];
    let turned = rounding.to(Format::BF16, &Tensor::stack(&pair, 3)?.flatten_from(2)?)?;
    Ok(Tensor::cat(&[&q.narrow(2, 0, DIM - 2 * half)?, &turned], 2)?)
}

/// The table's row of every token, `[num_tokens, 1, half]`; NaN for a position outside.
fn of_tokens(inputs: &Named, name: &'static str) -> Result<Tensor> {
    let (table, num_tokens) = (inputs.tensor(name)?, inputs.tensor("q")?.dim(0)?);
    let [table_rows, half] = [table.dim(0)?, table.dim(1)?];
    let entries = values(table)?;
    let positions = match inputs.get("positions") {
        Some(positions) => values(positions)?,
        None => (0..num_tokens).map(|token| token as f64).collect(),
    };
    let row = |position: f64| -> Vec<f64> {
        let inside = position >= 0.0 && position < table_rows as f64;
        if inside { entries[position as usize * half..][..half].to_vec() } else { vec![f64::NAN; half] }
    };
    let rows: Vec<f64> = positions.into_iter().flat_map(row).collect();
    Ok(Tensor::from_vec(rows, (num_tokens, 1, half), table.device())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Draw, UNIT_ROUNDOFF, assert_within, f64_tensor};

    const TOKENS: usize = 3;
    const HEADS: usize = 4;

    /// Positions 2, 0 and 5 of a table of four rows: the last is outside.
    fn inputs(seed: u64, half: usize) -> Named {
        let mut draw = Draw::new(seed);
        let angles = draw.normal(&[4, half], 3.0);
        let in_fp32 = |x: Tensor| Rounding::new(Precision::Nearest { seed: 0 }).f32(&x).unwrap();
        let named = Named::new().with("q", draw.bf16(&[TOKENS, HEADS, DIM], 1.0));
        let named = named.with("cos", in_fp32(angles.cos().unwrap())).with("sin", in_fp32(angles.sin().unwrap()));
        let named = named.with("weights", draw.bf16(&[TOKENS, HEADS], 1.0));
        named.with("positions", f64_tensor(&[2.0, 0.0, 5.0], &[3]))
    }

    fn exact(inputs: &Named, stored: Stored) -> Named {
        forward(inputs, stored, &mut Rounding::exact()).unwrap()
    }

    #[test]
    fn rows_are_turned_at_their_end_and_transformed_by_the_definition() {
        for half in [32, 64, 5] {
            let inputs = inputs(1, half);
            let (q, cos, sin) = ["q", "cos", "sin"].map(|name| values(inputs.tensor(name).unwrap()).unwrap()).into();
            let mut expected = Vec::new();
            for (token, position) in [2, 0].into_iter().enumerate() {
                for row in q[token * HEADS * DIM..][..HEADS * DIM].chunks(DIM) {
                    let mut row = row.to_vec();
                    for i in 0..half {
                        let (c, s) = (cos[position * half + i], sin[position * half + i]);
                        let at = DIM - 2 * half + 2 * i;
                        (row[at], row[at + 1]) = (row[at] * c - row[at + 1] * s, row[at] * s + row[at + 1] * c);
                    }
                    let sign = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
                    let sum = |i: usize| row.iter().enumerate().map(|(j, x)| sign(i, j) * x).sum::<f64>();
                    expected.extend((0..DIM).map(|i| sum(i) / 128f64.sqrt()));
                }
            }
            let y = exact(&inputs, Stored::Values).tensor("y").unwrap().clone();
            let expected = f64_tensor(&expected, &[2, HEADS, DIM]);
            let bound = ((expected.abs().unwrap() + 10.0).unwrap() * (256.0 * UNIT_ROUNDOFF)).unwrap();
            assert_within("y", &y.narrow(0, 0, 2).unwrap(), &expected, &bound);
            assert!(values(&y.narrow(0, 2, 1).unwrap()).unwrap().iter().all(|y| y.is_nan()), "a position outside");
        }
    }

    #[test]
    fn each_scale_is_in_the_weights_or_with_the_codes_and_never_in_both() {
        let inputs = inputs(2, 32);
        let [values_of, e2m1, e4m3] = [Stored::Values, Stored::E2m1, Stored::E4m3].map(|stored| exact(&inputs, stored));
        let numbers = |named: &Named, name| values(named.tensor(name).unwrap()).unwrap();
        let y: Vec<f64> = numbers(
            &forward(&inputs, Stored::Values, &mut Rounding::new(Precision::Nearest { seed: 0 })).unwrap(),
            "y",
        )
        .into_iter()
        .map(|y| Format::BF16.nearest(y))
        .collect();
        let weights = numbers(&inputs, "weights");
        for row in 0..2 * HEADS {
            let plain = weights[row] * (128.0 * HEADS as f64).sqrt().recip();
            assert!((numbers(&values_of, "w")[row] - plain).abs() <= plain.abs() * 4.0 * UNIT_ROUNDOFF);
            assert_eq!(numbers(&e2m1, "w")[row], numbers(&values_of, "w")[row]);
            // w times a code is the plain weight times the number, up to half a step of the code.
            let scale = numbers(&e4m3, "w")[row] / numbers(&values_of, "w")[row];
            let codes = &numbers(&e4m3, "codes")[row * DIM..][..DIM];
            for (code, y) in codes.iter().zip(&y[row * DIM..]) {
                let decoded = Format::E4M3.value(*code as u64) * scale;
                assert!((decoded - y).abs() <= (y.abs() / 16.0).max(scale / 1024.0), "{decoded} of {y}");
            }
        }
        assert!(numbers(&e4m3, "w")[2 * HEADS..].iter().all(|w| w.is_nan()), "its scale is NaN");
        assert!(numbers(&e2m1, "scale_bytes")[2 * HEADS * 4..].iter().all(|&byte| byte == 255.0));
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let refuse = |inputs: Named, name: &str| {
            let error = forward(&inputs, Stored::Values, &mut Rounding::exact()).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        };
        refuse(inputs(3, 32).with("weights", f64_tensor(&[1.0], &[1, 1])), "weights");
        refuse(inputs(3, 32).with("sin", f64_tensor(&[1.0], &[1, 1])), "sin");
        refuse(inputs(3, 65), "rope_dim");
    }
}
