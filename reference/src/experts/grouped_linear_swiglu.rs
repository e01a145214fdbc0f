//! The first linear layer of experts, SwiGLU with the routing weight, and the quantization of the
//! result (inference 5.4, 5.5, 5.8, 11.1, 11.3):
//!
//! ```text
//! y[p]            = the product of x[p] with its expert's weights          [`crate::experts::grouped_linear`]
//! gate, up        = the halves of bf16(y), or as in [`crate::formats::gate_up_interleave`]
//! codes, scales   = of swiglu(gate, up, weight)                            [`crate::experts::swiglu_quantize`]
//! ```
//!
//! Rows without an expert give the result of zero rows, whatever x and weight hold there.
//!
//! # Rounding points
//!
//! Those of the three operators. gate and up are rounded to bf16, like the product where it is
//! stored.

use candle_core::Tensor;

use crate::error::{Result, require_that};
use crate::named::Named;
use crate::precision::Rounding;
use crate::projections::linear::Quantized;
use crate::quantize::ScaleType;
use crate::{experts::grouped_linear, experts::swiglu_quantize, formats::gate_up_interleave};

/// Options that no tensor holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Options {
    /// How the operands of the product are quantized.
    pub quantized: Quantized,
    /// Whether rows of gate and up are interleaved by eight, instead of each being one half of the
    /// rows.
    pub interleaved: bool,
    /// The limit of the clamps.
    pub limit: f64,
    /// Values of a row that share a scale.
    pub group: usize,
    /// The type of a scale.
    pub scale: ScaleType,
    /// Whether values are rounded to bf16 before they are quantized.
    pub round_to_bf16: bool,
}

/// `decoded`, `group_scales` and `quotients` of [`swiglu_quantize::forward`], for all rows of x,
/// one part after the other, for these inputs:
///
/// - those of [`grouped_linear::forward`], whose `w` has the rows of gate and of up, the same
///   number of each;
/// - `weight`, one value for each row of x, in its order; absent for ones.
///
/// # Errors
/// Those of [`grouped_linear::forward`]; an odd number of features.
pub fn forward(inputs: &Named, options: &Options, rounding: &mut Rounding) -> Result<Named> {
    let owned = grouped_linear::owned_rows(inputs, &options.quantized)?;
    let product = grouped_linear::forward(inputs, &options.quantized, rounding)?;
    let both = inputs.tensor("w")?.dim(1)?;
    require_that("w", both, both > 0 && both % 2 == 0, "gate and up have as many rows")?;
    let product = rounding.bf16(&product.tensor("y")?.reshape((owned.len(), both))?)?;
    let product = if options.interleaved { separated(&product)? } else { product };
    let half = |at: usize| {
        Ok::<_, crate::Error>(product.narrow(1, at * both / 2, both / 2)?.contiguous()?)
    };
    let named = Named::new().with("gate", half(0)?).with("up", half(1)?);
    let weight = inputs.get("weight").map(|weight| weight.reshape(owned.len())).transpose()?;
    let marks: Vec<f64> = owned.iter().map(|&owned| if owned { 0.0 } else { -1.0 }).collect();
    let marks = Tensor::from_vec(marks, owned.len(), product.device())?;
    let named = named.maybe("weight", weight).with("pos_to_token_topk", marks);
    let Options { limit, group, scale, round_to_bf16, .. } = *options;
    swiglu_quantize::forward(&named, limit, group, scale, round_to_bf16, rounding)
}

/// All of gate, then all of up, of each row.
fn separated(product: &Tensor) -> Result<Tensor> {
    let rows = Named::new().with("interleaved", product.unsqueeze(2)?);
    Ok(gate_up_interleave::separate(&rows)?.tensor("logical")?.squeeze(2)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Format;
    use crate::formats::scale_layout::ScaleLayout;
    use crate::precision::{Accumulator, values};
    use crate::projections::linear::Weights;
    use crate::testing::f64_tensor;

    /// Features of gate, and of up.
    const FEATURES: usize = 16;
    const LIMIT: f64 = 3.0;

    fn options(interleaved: bool) -> Options {
        let (weights, layout, accumulator) = (Weights::Mxfp4, ScaleLayout::Plain, Accumulator::F32);
        let quantized = Quantized { weights, group: 32, bytes: true, layout, accumulator };
        Options {
            quantized,
            interleaved,
            limit: LIMIT,
            group: 32,
            scale: ScaleType::E8m0,
            round_to_bf16: false,
        }
    }

    /// Three sorted rows: 1 of the first expert, NaN of no expert, 1 of the second. The weights of
    /// each expert have their rows in this order: gate is the value of e2m1 with the row's code,
    /// and up is half of it.
    fn case(order: &[usize]) -> Named {
        let of_experts = |of_row: fn(usize) -> f64| {
            let rows: Vec<f64> = [order, order].concat().into_iter().map(of_row).collect();
            f64_tensor(&rows, &[2, 2 * FEATURES, 1])
        };
        let x = f64_tensor(&[56.0, 0.0, 127.0, 127.0, 64.0, 0.0], &[3, 2]);
        let named =
            Named::new().with("x", x).with("x_scales", f64_tensor(&[127.0, 255.0, 126.0], &[3, 1]));
        let named = named.with("w", of_experts(|row| (row % FEATURES) as f64));
        let named =
            named.with("w_scales", of_experts(|row| if row < FEATURES { 127.0 } else { 126.0 }));
        let named = named.with("counts", f64_tensor(&[1.0, 1.0], &[2]));
        let named = named.with("expert_offsets", f64_tensor(&[0.0, 2.0, 3.0], &[3]));
        named.with("weight", f64_tensor(&[0.5, f64::NAN, -2.0], &[3]))
    }

    fn decoded(named: &Named, options: &Options) -> Result<Vec<f64>> {
        values(forward(named, options, &mut Rounding::exact())?.tensor("decoded")?)
    }

    #[test]
    fn rows_are_the_weighted_swiglu_of_their_experts_products_and_those_of_nobody_zeros()
    -> Result<()> {
        let named = case(&(0..2 * FEATURES).collect::<Vec<_>>());
        let of_row = |weight: f64| {
            (0..FEATURES).map(move |code| {
                let gate = Format::E2M1.value(code as u64);
                let (a, b) = (gate.min(LIMIT), (gate / 2.0).clamp(-LIMIT, LIMIT));
                weight * (a / (1.0 + (-a).exp()) * b)
            })
        };
        let expected: Vec<f64> = of_row(0.5).chain([0.0; FEATURES]).chain(of_row(-2.0)).collect();
        for (at, (x, expected)) in
            decoded(&named, &options(false))?.into_iter().zip(expected).enumerate()
        {
            assert!((x - expected).abs() <= 1e-14, "{at}: {x} {expected}");
        }
        Ok(())
    }

    #[test]
    fn interleaved_rows_are_those_that_gate_up_interleave_writes() -> Result<()> {
        let numbers: Vec<f64> = (0..2 * FEATURES).map(|row| row as f64).collect();
        let logical = Named::new().with("logical", f64_tensor(&numbers, &[1, 2 * FEATURES, 1]));
        let interleaved = gate_up_interleave::interleave(&logical)?;
        let order = values(interleaved.tensor("interleaved")?)?
            .into_iter()
            .map(|row| row as usize)
            .collect::<Vec<_>>();
        let halves = decoded(&case(&(0..2 * FEATURES).collect::<Vec<_>>()), &options(false))?;
        assert_eq!(decoded(&case(&order), &options(true))?, halves);
        assert_ne!(decoded(&case(&order), &options(false))?, halves);
        Ok(())
    }

    #[test]
    fn an_odd_number_of_features_is_refused() {
        let named = case(&(0..2 * FEATURES).collect::<Vec<_>>());
        let named = named
            .with("w", f64_tensor(&[0.0; 6], &[2, 3, 1]))
            .with("w_scales", f64_tensor(&[127.0; 6], &[2, 3, 1]));
        let refused =
            forward(&named, &options(false), &mut Rounding::exact()).unwrap_err().to_string();
        assert!(refused.contains('w'), "{refused}");
    }
}
