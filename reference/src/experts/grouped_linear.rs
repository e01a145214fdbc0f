//! Linear layers of experts: each row times the quantized weights of its expert (inference 5.5,
//! 11.1, 11.3).
//!
//! ```text
//! y[p,o] = sum over i of x[p,i] w[e,o,i]      for the rows p of expert e
//! ```
//!
//! for the decoded values of codes and scales, as [`crate::projections::linear`] defines for one
//! expert. Rows are *sorted* or *masked*. Sorted rows are `[num_rows, ..]`: those of expert e are
//! the first `counts[e]` from `expert_offsets[e]` on, and y is 0 in all other rows. Masked rows are
//! `[num_experts, num_rows, ..]`: those of expert e are the first `counts[e]` of its part, and y is
//! unchanged in all other rows.
//!
//! # Rounding points
//!
//! Those of [`linear::forward_quantized`]. Rows without an expert have none.

use candle_core::{D, Device, Tensor};

use crate::error::{Result, require_that, wrong_value};
use crate::formats::scale_layout::{ScaleLayout, Scales};
use crate::named::Named;
use crate::precision::{Rounding, values};
use crate::projections::linear::{self, Quantized, Weights};

/// `y`, stored in bf16 or f32, `[num_rows, out_features]` or, masked,
/// `[num_experts, num_rows, out_features]`, for these inputs, with codes and scales as the values
/// of their bytes:
///
/// - `x` `[num_rows, ..]` or, masked, `[num_experts, num_rows, ..]`, `..` as in
///   [`linear::forward_quantized`];
/// - `w` `[num_experts, out_features, ..]`, `..` as in [`linear::forward_quantized`]; `w_scales`,
///   `[num_experts, ..]`, `..` as [`Quantized::w_scales`] stores them;
/// - `x_scales`, as [`Quantized::x_scales`] stores them, or, masked, `[num_experts, ..]`;
/// - `x_global_scale` `[1]` and `w_global_scale` `[num_experts]`, for NVFP4;
/// - `counts` `[num_experts]`: rows of each expert;
/// - `expert_offsets` `[num_experts + 1]`: the first row of each expert, and the end of all;
///   absent where rows are masked;
/// - `y_before`, of the shape and type of `y`, where rows are masked: the previous contents of `y`.
///
/// # Errors
/// Tensors whose shapes do not match.
pub fn forward(inputs: &Named, quantized: &Quantized, rounding: &mut Rounding) -> Result<Named> {
    let call = Call::read(inputs, quantized)?;
    let mut y = match inputs.get("y_before").filter(|_| call.masked) {
        Some(before) => values(before)?,
        None => vec![0.0; call.parts * call.num_rows * call.out_features],
    };
    for expert in 0..call.num_experts {
        let rows = call.rows_of(expert);
        if rows.is_empty() {
            continue;
        }
        let product = linear::forward_quantized(
            &call.of_expert(expert, rows.clone())?,
            &call.plain(),
            rounding,
        )?;
        let first = call.part(expert) * call.num_rows + rows.start;
        let places = first * call.out_features..(first + rows.len()) * call.out_features;
        y[places].copy_from_slice(&values(product.tensor("y")?)?);
    }
    let shape =
        [&[call.num_experts][..usize::from(call.masked)], &[call.num_rows, call.out_features]]
            .concat();
    Ok(Named::new().with("y", Tensor::from_vec(y, shape, &Device::Cpu)?))
}

/// Whether each row of x has an expert, for all parts one after the other, for the inputs of
/// [`forward`].
///
/// # Errors
/// Those of [`forward`].
pub fn owned_rows(inputs: &Named, quantized: &Quantized) -> Result<Vec<bool>> {
    let call = Call::read(inputs, quantized)?;
    let mut owned = vec![false; call.parts * call.num_rows];
    for expert in 0..call.num_experts {
        let (first, rows) = (call.part(expert) * call.num_rows, call.rows_of(expert));
        owned[first + rows.start..first + rows.end].fill(true);
    }
    Ok(owned)
}

/// The tensors of a call, and their sizes.
struct Call<'a> {
    inputs: &'a Named,
    quantized: &'a Quantized,
    masked: bool,
    /// Experts, and parts of x: one part per expert where rows are masked, otherwise one part.
    num_experts: usize,
    parts: usize,
    /// Rows of a part.
    num_rows: usize,
    out_features: usize,
    in_features: usize,
    counts: Vec<f64>,
    offsets: Vec<f64>,
    /// Values of stored scales, row by row: of each part of x, of each expert's w.
    x_scales: Vec<Vec<f64>>,
    w_scales: Vec<Vec<f64>>,
}

impl<'a> Call<'a> {
    fn read(inputs: &'a Named, quantized: &'a Quantized) -> Result<Self> {
        let masked = inputs.get("expert_offsets").is_none();
        let (x, w) = (inputs.tensor("x")?, inputs.tensor("w")?);
        let (num_experts, out_features, _) = w.dims3()?;
        let (parts, num_rows, row_bytes) = if masked {
            x.dims3()?
        } else {
            let (rows, bytes) = x.dims2()?;
            (1, rows, bytes)
        };
        let codes = if quantized.weights == Weights::Nvfp4 { 2 } else { 1 };
        let in_features = codes * row_bytes;
        require_that("x", parts, !masked || parts == num_experts, "every expert has a part of it")?;
        let counts = values(inputs.tensor("counts")?)?;
        require_that(
            "counts",
            counts.len(),
            counts.len() == num_experts,
            "there is one of each expert",
        )?;
        let offsets = inputs.get("expert_offsets").map(values).transpose()?.unwrap_or_default();
        let ascends = offsets.is_sorted() && offsets.first().is_none_or(|&first| first >= 0.0);
        let fits = ascends && offsets.last().is_none_or(|&last| last <= num_rows as f64);
        require_that(
            "expert_offsets",
            offsets.len(),
            masked || offsets.len() == num_experts + 1,
            "one more than experts",
        )?;
        require_that(
            "expert_offsets",
            num_rows,
            fits,
            "they ascend from 0 on, and end with the rows at most",
        )?;
        let x_scales =
            logical("x_scales", inputs, quantized.x_scales(num_rows, in_features), parts)?;
        let w_scales = logical(
            "w_scales",
            inputs,
            quantized.w_scales(out_features, in_features),
            num_experts,
        )?;
        Ok(Self {
            inputs,
            quantized,
            masked,
            num_experts,
            parts,
            num_rows,
            out_features,
            in_features,
            counts,
            offsets,
            x_scales,
            w_scales,
        })
    }

    /// The part of x that holds the rows of an expert.
    fn part(&self, expert: usize) -> usize {
        if self.masked { expert } else { 0 }
    }

    /// An expert's rows in its part.
    fn rows_of(&self, expert: usize) -> std::ops::Range<usize> {
        let [first, end] = match self.masked {
            true => [0, self.num_rows],
            false => [self.offsets[expert] as usize, self.offsets[expert + 1] as usize],
        };
        // A negative count is 0 rows.
        first..(first + self.counts[expert] as usize).min(end)
    }

    /// The quantization of the call's operands, with scales row by row.
    fn plain(&self) -> Quantized {
        Quantized { layout: ScaleLayout::Plain, ..*self.quantized }
    }

    /// The operands of one expert's product.
    fn of_expert(&self, expert: usize, rows: std::ops::Range<usize>) -> Result<Named> {
        let part = self.part(expert);
        let x = self.inputs.tensor("x")?;
        let row_bytes = x.dim(D::Minus1)?;
        let x = x.reshape((self.parts, self.num_rows, row_bytes))?;
        let x = x.get(part)?.narrow(0, rows.start, rows.len())?;
        let w = self.inputs.tensor("w")?.get(expert)?;
        let of_x = self.quantized.x_scales(rows.len(), self.in_features);
        let of_w = self.quantized.w_scales(self.out_features, self.in_features);
        let of_rows = &self.x_scales[part][rows.start * of_x.groups..rows.end * of_x.groups];
        let tensor = |numbers: &[f64], scales: Scales| {
            Tensor::from_slice(numbers, (scales.rows, scales.groups), &Device::Cpu)
        };
        let named = Named::new().with("x", x).with("w", w).with("x_scales", tensor(of_rows, of_x)?);
        let named = named.with("w_scales", tensor(&self.w_scales[expert], of_w)?);
        if self.quantized.weights != Weights::Nvfp4 {
            return Ok(named);
        }
        let of_x = self.inputs.tensor("x_global_scale")?.clone();
        let of_w = self.inputs.tensor("w_global_scale")?.narrow(0, expert, 1)?;
        Ok(named.with("x_global_scale", of_x).with("w_global_scale", of_w))
    }
}

/// The values of stored scales, row by row: bytes or fp32 values, of each of this many parts.
fn logical(
    name: &'static str,
    inputs: &Named,
    scales: Scales,
    parts: usize,
) -> Result<Vec<Vec<f64>>> {
    let stored = values(inputs.tensor(name)?)?;
    let of_part: usize = scales.shape().iter().product();
    if stored.len() != parts * of_part {
        return Err(wrong_value(name, stored.len(), "it holds the scales of every part"));
    }
    let read = |part: usize| {
        let stored = &stored[part * of_part..(part + 1) * of_part];
        match scales.bytes {
            true => scales.read_bytes(stored).into_iter().map(f64::from).collect(),
            false => scales.gathered(stored),
        }
    };
    Ok((0..parts).map(read).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::precision::Accumulator;
    use crate::testing::f64_tensor;

    fn quantized(weights: Weights, group: usize, layout: ScaleLayout) -> Quantized {
        Quantized { weights, group, bytes: true, layout, accumulator: Accumulator::F32 }
    }

    /// Bytes that are codes of every kind of value except NaN.
    fn codes(seed: usize, shape: &[usize], most: usize) -> Tensor {
        let count = shape.iter().product();
        f64_tensor(
            &(0..count).map(|at: usize| ((at * 37 + seed) % most) as f64).collect::<Vec<_>>(),
            shape,
        )
    }

    /// Scales of `parts` matrices, one after the other, and their bytes row by row.
    fn scales(seed: usize, scales: Scales, parts: usize) -> (Tensor, Vec<u8>) {
        let bytes: Vec<u8> = (0..parts * scales.rows * scales.groups)
            .map(|at| (112 + (at * 5 + seed) % 11) as u8)
            .collect();
        let of_part = scales.rows * scales.groups;
        let stored: Vec<f64> = (0..parts)
            .flat_map(|part| scales.stored_bytes(&bytes[part * of_part..(part + 1) * of_part]))
            .collect();
        (f64_tensor(&stored, &[&[parts][..], &scales.shape()].concat()), bytes)
    }

    const EXPERTS: usize = 4;
    const COUNTS: [usize; EXPERTS] = [2, 0, 3, 1];
    const GLOBAL_SCALES: [f64; EXPERTS] = [0.5, 3.0, 0.75, 8.0];

    /// Bytes of a row of x and of w.
    fn row_bytes(quantized: &Quantized, ins: usize) -> [usize; 2] {
        match quantized.weights {
            Weights::Fp8 => [ins, ins],
            Weights::Mxfp4 => [ins, ins / 2],
            Weights::Nvfp4 => [ins / 2, ins / 2],
        }
    }

    /// A call with four experts, and the index of each row of x with the expert that has it.
    fn call(
        quantized: &Quantized,
        masked: bool,
        outs: usize,
        ins: usize,
    ) -> (Named, Vec<(usize, usize)>) {
        let (rows, offsets) =
            if masked { (5, vec![]) } else { (11, vec![1.0, 4.0, 4.0, 8.0, 10.0]) };
        let [of_x, of_w] = row_bytes(quantized, ins);
        let x_shape = if masked { vec![EXPERTS, rows, of_x] } else { vec![rows, of_x] };
        let parts = if masked { EXPERTS } else { 1 };
        let x_scales = scales(1, quantized.x_scales(rows, ins), parts).0;
        let x_scales = if masked { x_scales } else { x_scales.squeeze(0).expect("one part") };
        let counts: Vec<f64> = COUNTS.iter().map(|&count| count as f64).collect();
        let named = Named::new()
            .with("x", codes(3, &x_shape, 0x78))
            .with("w", codes(11, &[EXPERTS, outs, of_w], 0x78));
        let named =
            named.with("x_scales", x_scales).with("counts", f64_tensor(&counts, &[EXPERTS]));
        let named = named.with("w_scales", scales(4, quantized.w_scales(outs, ins), EXPERTS).0);
        let named = named.with("x_global_scale", f64_tensor(&[0.25], &[1]));
        let named = named.with("w_global_scale", f64_tensor(&GLOBAL_SCALES, &[EXPERTS]));
        let first = |expert: usize| if masked { expert * rows } else { offsets[expert] as usize };
        let owned = (0..EXPERTS)
            .flat_map(|expert| (0..COUNTS[expert]).map(move |row| (row, expert)))
            .collect::<Vec<_>>();
        let owned = owned.into_iter().map(|(row, expert)| (first(expert) + row, expert)).collect();
        let offsets = (!masked).then(|| f64_tensor(&offsets, &[EXPERTS + 1]));
        let before =
            masked.then(|| f64_tensor(&vec![7.0; EXPERTS * rows * outs], &[EXPERTS, rows, outs]));
        (named.maybe("expert_offsets", offsets).maybe("y_before", before), owned)
    }

    /// Every row of an expert is that row's product with the expert's weights, computed separately.
    fn assert_rows_are_products(quantized: &Quantized, masked: bool) -> Result<()> {
        let (outs, ins) = (9, 160);
        let (named, owned) = call(quantized, masked, outs, ins);
        let y = forward(&named, quantized, &mut Rounding::exact())?;
        let (y, x, w) = (values(y.tensor("y")?)?, named.tensor("x")?, named.tensor("w")?);
        let x = x.reshape(((), row_bytes(quantized, ins)[0]))?;
        let rows = x.dim(0)?;
        let of_x = quantized.x_scales(if masked { rows / EXPERTS } else { rows }, ins);
        let of_w = quantized.w_scales(outs, ins);
        let parts = if masked { EXPERTS } else { 1 };
        let (x_bytes, w_bytes) = (scales(1, of_x, parts).1, scales(4, of_w, EXPERTS).1);
        let plain = Quantized { layout: ScaleLayout::Plain, ..*quantized };
        let tensor = |bytes: &[u8], groups: usize| {
            let numbers: Vec<f64> = bytes.iter().map(|&byte| byte.into()).collect();
            f64_tensor(&numbers, &[bytes.len() / groups, groups])
        };
        let mut expected = vec![if masked { 7.0 } else { 0.0 }; rows * outs];
        for (row, expert) in owned {
            let of_row = &x_bytes[row * of_x.groups..(row + 1) * of_x.groups];
            let of_expert =
                &w_bytes[expert * of_w.rows * of_w.groups..(expert + 1) * of_w.rows * of_w.groups];
            let one = Named::new().with("x", x.narrow(0, row, 1)?).with("w", w.get(expert)?);
            let one = one
                .with("x_scales", tensor(of_row, of_x.groups))
                .with("w_scales", tensor(of_expert, of_w.groups))
                .with("x_global_scale", f64_tensor(&[0.25], &[1]))
                .with("w_global_scale", f64_tensor(&[GLOBAL_SCALES[expert]], &[1]));
            let one = linear::forward_quantized(&one, &plain, &mut Rounding::exact())?;
            expected[row * outs..(row + 1) * outs].copy_from_slice(&values(one.tensor("y")?)?);
        }
        assert_eq!(y, expected, "{quantized:?} masked {masked}");
        Ok(())
    }

    #[test]
    fn rows_are_products_with_their_experts_weights_and_others_are_zero_or_as_they_were()
    -> Result<()> {
        for (weights, group) in
            [(Weights::Fp8, 128), (Weights::Mxfp4, 128), (Weights::Mxfp4, 32), (Weights::Nvfp4, 16)]
        {
            for layout in [ScaleLayout::Plain, ScaleLayout::MnMajor, ScaleLayout::Blocked] {
                for masked in [false, true] {
                    assert_rows_are_products(&quantized(weights, group, layout), masked)?;
                }
            }
        }
        Ok(())
    }

    #[test]
    fn counts_are_taken_as_far_as_there_is_room() -> Result<()> {
        let quantized = quantized(Weights::Fp8, 128, ScaleLayout::Plain);
        let (named, _) = call(&quantized, true, 3, 16);
        let y = |counts: [f64; 4]| -> Result<Vec<f64>> {
            let named = named.clone().with("counts", f64_tensor(&counts, &[EXPERTS]));
            values(forward(&named, &quantized, &mut Rounding::exact())?.tensor("y")?)
        };
        let (few, many) =
            (y([-3.0, f64::from(i32::MIN), 2.0, 0.0])?, y([5.0, 6.0, 2.0, f64::from(i32::MAX)])?);
        assert!(few[..30].iter().chain(&few[45..]).all(|&number| number == 7.0));
        assert!(many[..30].iter().chain(&many[45..]).all(|&number| number != 7.0));
        assert_eq!(few[30..36], many[30..36]);
        assert!(few[36..45].iter().chain(&many[36..45]).all(|&number| number == 7.0));
        Ok(())
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let of = |weights| quantized(weights, 128, ScaleLayout::Plain);
        let refused = |named: &Named, quantized: &Quantized| {
            assert!(forward(named, quantized, &mut Rounding::exact()).is_err());
        };
        let (named, _) = call(&of(Weights::Fp8), false, 3, 16);
        for offsets in
            [[1.0, 4.0, 3.0, 8.0, 10.0], [-1.0, 4.0, 4.0, 8.0, 10.0], [1.0, 4.0, 4.0, 8.0, 12.0]]
        {
            refused(
                &named.clone().with("expert_offsets", f64_tensor(&offsets, &[5])),
                &of(Weights::Fp8),
            );
        }
        refused(&named.clone().with("counts", f64_tensor(&[1.0; 3], &[3])), &of(Weights::Fp8));
        refused(
            &named.clone().with("w_scales", f64_tensor(&[1.0; 3], &[3, 1, 1])),
            &of(Weights::Fp8),
        );
        refused(&named, &of(Weights::Nvfp4));
    }
}
