//! What projections are composed of: GEMMs with their names in the chain, of bf16 with gradients or
//! of FP8 codes.

use dsv4_kernels::attention::inverse_rope_quantize::ScaleLayout;
use dsv4_kernels::{formats::quantize_fp8, projections::linear};
use dsv4_reference::formats::quantize_fp8 as squares;
use dsv4_reference::quantize::ScaleType as OracleScale;
use dsv4_runtime::{Device, TensorView};

use crate::operator::fields::{elements, tensor};
use crate::operator::prelude::*;

/// Values that share a scale.
const BLOCK: usize = linear::BLOCK;

/// GEMMs of codes, with this scale layout of their operand.
pub(crate) fn of_codes(layout: ScaleLayout) -> linear::Quantized {
    let implementation = dsv4_kernels::implementation::Implementation::Portable;
    linear::Quantized {
        weights: linear::Weights::Fp8,
        group: BLOCK,
        scale_bytes: true,
        layout,
        implementation,
    }
}

/// The operand formats of quantized weights.
const OF_ROWS: quantize_fp8::Options = quantize_fp8::Options {
    group: quantize_fp8::Group::Row128,
    scale: quantize_fp8::ScaleType::E8m0,
    layout: quantize_fp8::ScaleLayout::Plain,
};

/// A GEMM of a chain, `y = x w^T`, by the names of its tensors. `workspace` is scratch memory.
pub(crate) struct ChainProduct {
    /// The input, its codes and their scales.
    pub x: [&'static str; 3],
    /// The weight, its codes and their scales.
    pub w: [&'static str; 3],
    pub y: &'static str,
    /// Gradients of x, w and y.
    pub gradients: [&'static str; 3],
}

impl ChainProduct {
    /// Launches the GEMM, `quantized` of codes, which are made of x before.
    ///
    /// # Errors
    /// Those of the launchers.
    pub fn launch(
        &self,
        v: &Views,
        run: &mut Launches<'_>,
        quantized: bool,
    ) -> Result<(), RuntimeError> {
        let Self { x: [x, x_codes, x_scales], w: [w, w_codes, w_scales], y, .. } = *self;
        if !quantized {
            let views = v.only(&[x, w, y, "workspace"]).renamed(&[(x, "x"), (w, "w"), (y, "y")]);
            return run.launch(|device| linear::forward(device, &views, linear::Products::Own));
        }
        let coded = v.only(&[x, x_codes, x_scales]);
        let coded = coded.renamed(&[(x, "x"), (x_codes, "codes"), (x_scales, "scales")]);
        run.launch(|device| quantize_fp8::quantize(device, &coded, OF_ROWS))?;
        let views = v.only(&[x_codes, x_scales, w_codes, w_scales, y, "workspace"]).renamed(&[
            (x_codes, "x"),
            (x_scales, "x_scales"),
            (w_codes, "w"),
            (w_scales, "w_scales"),
            (y, "y"),
        ]);
        run.launch(|device| linear::forward_quantized(device, &views, of_codes(ScaleLayout::Plain)))
    }

    /// Launches the backward of the GEMM of bf16. Returns the kernels that ran.
    ///
    /// # Errors
    /// Those of the launcher.
    pub fn backward(&self, v: &Views, device: &Device) -> Result<Vec<&'static str>, RuntimeError> {
        let Self { x: [x, ..], w: [w, ..], gradients: [dx, dw, dy], .. } = *self;
        let views = v.only(&[x, w, dy, dx, dw, "workspace"]);
        let names = [(x, "x"), (w, "w"), (dy, "dy"), (dx, "dx"), (dw, "dw")];
        linear::backward(device, &views.renamed(&names), linear::Products::Own)
    }

    /// Sets the codes and scales of the weight.
    ///
    /// # Errors
    /// Those of the oracle.
    pub fn set_weight(
        &self,
        seed: u64,
        tensors: &mut Tensors,
        [outs, ins]: [usize; 2],
    ) -> OracleResult<()> {
        let [_, codes, scales] = self.w;
        set_weight(seed, tensors, [codes, scales], [1, outs, ins])
    }
}

/// A tensor of rows as a tensor of heads, or of groups, concatenated in them.
pub(crate) fn parted(
    operator: &'static str,
    name: &'static str,
    view: &TensorView,
    parts: usize,
) -> Result<TensorView, RuntimeError> {
    view.parted(parts).ok_or_else(|| {
        let reason = format!("shape {:?} must have a last axis of {parts} equal parts", view.shape);
        RuntimeError::argument(operator, name, reason)
    })
}

/// Sets the codes and scales of weights in blocks, with different magnitudes for each block and
/// each group.
pub(crate) fn set_weight(
    seed: u64,
    tensors: &mut Tensors,
    [codes_name, scales_name]: [&'static str; 2],
    [groups, rows, columns]: [usize; 3],
) -> OracleResult<()> {
    let options = squares::Options {
        group: squares::Group::Square,
        scale: OracleScale::E8m0,
        layout: dsv4_reference::formats::scale_layout::ScaleLayout::Plain,
    };
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    let mut draw = Draw::new(seed, codes_name);
    for group in 0..groups {
        let mut numbers =
            draw.values(Distribution::Normal, rows, columns, (columns as f64).sqrt().recip());
        for (at, number) in numbers.iter_mut().enumerate() {
            let (row, column) = (at / columns / BLOCK, at % columns / BLOCK);
            *number *= 2f64.powi(((3 * row + 5 * column + 2 * group) % 4) as i32 - 2);
        }
        let quantized = squares::quantize(
            &Named::new().with("x", tensor(numbers, &[rows, columns])?),
            options,
        )?;
        codes.extend(elements(quantized.tensor("codes")?)?);
        scales.extend(elements(quantized.tensor("scales")?)?);
    }
    tensors.set(codes_name, &codes);
    tensors.set(scales_name, &scales);
    Ok(())
}
