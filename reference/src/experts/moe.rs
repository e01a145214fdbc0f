//! A layer of experts as a serving step composes it (inference 10, 11). It has a router, rows
//! sorted by expert, both GEMMs of the experts with SwiGLU between them, the shared expert, and the
//! sum.
//!
//! ```text
//! logits = hidden gate_weight^T                            topk_indices, topk_weights = router(logits)
//! row p of expert e, slot k of token t:   x[p] = hidden[t]      w[p] = topk_weights[t][k]
//! gate_up[p] = first(x[p], e)             a[p] = bf16(w[p] swiglu(gate_up[p]))        y[p] = second(a[p], e)
//! shared[t]  = shared_second(bf16(swiglu(shared_first(hidden[t]))))
//! out[t]     = sum over the slots of t of y, in their order, + shared[t]
//! ```
//!
//! The routing weight enters only in a, before it is quantized: neither after the second product
//! nor in the shared expert. [`Products`] defines the operands of the products: for
//! [`QuantizedProducts`], values that are quantized first.
//!
//! # Rounding points
//!
//! Those of the operators: [`crate::projections::linear`], [`crate::experts::router`],
//! [`crate::experts::grouped_linear`], [`crate::experts::swiglu`], [`crate::experts::moe_reduce`].
//! gate_up, a, y and shared are stored in bf16. Values are quantized as they are stored; a is
//! quantized after its rounding. A value near the midpoint of two codes may become either code. The
//! router selects by exact logits: inputs are such that fp32 holds them exactly.

use candle_core::{Device, Tensor};

use crate::error::Result;
use crate::formats::quantize_fp8::{self, Group};
use crate::formats::quantize_nvfp4;
use crate::formats::scale_layout::ScaleLayout;
use crate::named::Named;
use crate::precision::{Rounding, values};
use crate::projections::linear::{self, Quantized, Weights};
use crate::quantize::ScaleType;
use crate::{
    experts::grouped_linear, experts::moe_expand, experts::moe_map, experts::moe_reduce,
    experts::router, experts::swiglu,
};

/// Parameters of a layer that no tensor holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Layer {
    /// Slots of a token.
    pub topk: usize,
    /// The sum of the routing weights of a token.
    pub route_scale: f64,
    /// The limit of SwiGLU's clamps.
    pub limit: f64,
    /// The rows of an expert are padded to a multiple of this.
    pub alignment: usize,
    /// Rows of all experts, including rows without a token.
    pub num_positions: usize,
}

/// The products of a layer, before they are rounded to bf16.
pub trait Products {
    /// Gate and up, `[num_positions, 2 * intermediate_size]`, of rows
    /// `[num_positions, hidden_size]` with the weights of their experts. The `maps` of
    /// [`moe_map::forward`] define the rows of each expert.
    ///
    /// # Errors
    /// Tensors whose shapes do not match.
    fn first(&self, rows: &Tensor, maps: &Named, rounding: &mut Rounding) -> Result<Tensor>;

    /// `[num_positions, hidden_size]`, of rows `[num_positions, intermediate_size]`.
    ///
    /// # Errors
    /// Tensors whose shapes do not match.
    fn second(&self, rows: &Tensor, maps: &Named, rounding: &mut Rounding) -> Result<Tensor>;

    /// Gate and up of the shared expert, `[num_tokens, 2 * intermediate_size]`.
    ///
    /// # Errors
    /// Tensors whose shapes do not match.
    fn shared_first(&self, hidden: &Tensor, rounding: &mut Rounding) -> Result<Tensor>;

    /// `[num_tokens, hidden_size]`, of rows `[num_tokens, intermediate_size]`.
    ///
    /// # Errors
    /// Tensors whose shapes do not match.
    fn shared_second(&self, rows: &Tensor, rounding: &mut Rounding) -> Result<Tensor>;
}

/// All values that a layer computes, by name: `logits`, `topk_indices`, `topk_weights`, the maps of
/// [`moe_map::forward`], `rows` (x of the formulas), `row_weights`, `gate_up`, `y`,
/// `shared_gate_up`, `shared` and `out`. The inputs are:
///
/// - `hidden` `[num_tokens, hidden_size]` and `gate_weight` `[num_experts, hidden_size]`, stored
///   in bf16;
/// - `bias`, or `tid2eid` and `token_ids`: those of [`router::forward`].
///
/// # Errors
/// Those of the operators.
pub fn forward(
    inputs: &Named,
    layer: &Layer,
    products: &impl Products,
    rounding: &mut Rounding,
) -> Result<Named> {
    let (hidden, gate_weight) = (inputs.tensor("hidden")?, inputs.tensor("gate_weight")?);
    let of_gate = Named::new().with("x", hidden.clone()).with("w", gate_weight.clone());
    let logits = linear::forward(&of_gate, rounding)?.tensor("y")?.clone();
    let exact = linear::forward(&of_gate, &mut Rounding::exact())?.tensor("y")?.clone();
    let routed = ["bias", "tid2eid", "token_ids"]
        .into_iter()
        .fold(Named::new().with("logits", exact), |all, name| {
            all.maybe(name, inputs.get(name).cloned())
        });
    let routed = router::forward(&routed, layer.topk, layer.route_scale, rounding)?;
    let maps =
        moe_map::forward(&routed, gate_weight.dim(0)?, layer.alignment, layer.num_positions)?;

    let expanded =
        ["token_topk_to_pos", "pos_to_token"].into_iter().try_fold(Named::new(), |all, name| {
            Ok::<_, crate::Error>(all.with(name, maps.tensor(name)?.clone()))
        })?;
    let rows =
        moe_expand::forward(&expanded.clone().with("x", hidden.clone()))?.tensor("y")?.clone();
    let row_weights = weights_of_rows(
        &rounding.f32(routed.tensor("topk_weights")?)?,
        maps.tensor("pos_to_token_topk")?,
    )?;
    let gate_up = products.first(&rows, &maps, rounding)?;
    let of_slots = Named::new().with("weight", row_weights.clone());
    let of_slots = of_slots.with("pos_to_token_topk", maps.tensor("pos_to_token_topk")?.clone());
    let a = gated(of_slots, &gate_up, layer.limit, rounding)?;
    let y = products.second(&a, &maps, rounding)?;

    let shared_gate_up = products.shared_first(hidden, rounding)?;
    let a = gated(Named::new(), &shared_gate_up, layer.limit, rounding)?;
    let shared = products.shared_second(&a, rounding)?;
    let reduced = expanded.with("y", rounding.bf16(&y)?).with("shared", rounding.bf16(&shared)?);
    let out = moe_reduce::forward(&reduced, rounding)?.tensor("out")?.clone();

    let all = routed.into_tensors().into_iter().chain(maps.into_tensors());
    let all =
        all.fold(Named::new().with("logits", logits), |all, (name, tensor)| all.with(name, tensor));
    let all = all
        .with("rows", rows)
        .with("row_weights", row_weights)
        .with("gate_up", gate_up)
        .with("y", y);
    Ok(all.with("shared_gate_up", shared_gate_up).with("shared", shared).with("out", out))
}

/// `[num_positions]`: the weight of the slot of each row, 0 in rows without a token.
fn weights_of_rows(topk_weights: &Tensor, pos_to_token_topk: &Tensor) -> Result<Tensor> {
    let weights = values(topk_weights)?;
    let of_row = |slot: f64| if slot < 0.0 { 0.0 } else { weights[slot as usize] };
    let of_rows: Vec<f64> = values(pos_to_token_topk)?.into_iter().map(of_row).collect();
    Ok(Tensor::new(of_rows, &Device::Cpu)?)
}

/// SwiGLU of gate and up as stored, rounded to bf16; `slots` holds weights and padding.
fn gated(slots: Named, gate_up: &Tensor, limit: f64, rounding: &mut Rounding) -> Result<Tensor> {
    let gate_up = rounding.bf16(gate_up)?;
    let width = gate_up.dim(1)? / 2;
    if gate_up.dim(0)? == 0 {
        return Ok(Tensor::zeros((0, width), gate_up.dtype(), gate_up.device())?);
    }
    let half = |at: usize| Ok::<_, crate::Error>(gate_up.narrow(1, at, width)?.contiguous()?);
    let product =
        swiglu::forward(&slots.with("gate", half(0)?).with("up", half(width)?), limit, rounding)?;
    rounding.bf16(product.tensor("y")?)
}

/// Products of values that are quantized in groups of a row, e4m3 with e8m0 scales, with quantized
/// weights.
pub struct QuantizedProducts<'a> {
    /// Weights, with scales in bytes, row by row or block by block: `w13`, `w13_scales`, `w2` and
    /// `w2_scales` of [`grouped_linear::forward`], `shared_w13`, `shared_w13_scales`, `shared_w2`
    /// and `shared_w2_scales` of [`linear::forward_quantized`].
    pub inputs: &'a Named,
    /// Formats of the experts' weights, and the group size of their rows.
    pub routed: Quantized,
    /// The same for the shared expert.
    pub shared: Quantized,
}

/// Codes and scales of rows `[num_rows, width]` as stored: `codes` and `scales`.
///
/// # Errors
/// Tensors whose shapes do not match.
pub fn quantized_rows(rows: &Tensor, group: usize) -> Result<Named> {
    let options = quantize_fp8::Options {
        group: Group::Row(group),
        scale: ScaleType::E8m0,
        layout: ScaleLayout::Plain,
    };
    quantize_fp8::quantize(&Named::new().with("x", rows.clone()), options)
}

impl QuantizedProducts<'_> {
    /// The inputs of products with these weights.
    fn operands(
        &self,
        rows: &Tensor,
        group: usize,
        [w, scales]: [&'static str; 2],
    ) -> Result<Named> {
        let x = quantized_rows(rows, group)?;
        let named = Named::new()
            .with("x", x.tensor("codes")?.clone())
            .with("x_scales", x.tensor("scales")?.clone());
        Ok(named
            .with("w", self.inputs.tensor(w)?.clone())
            .with("w_scales", self.inputs.tensor(scales)?.clone()))
    }

    fn of_experts(
        &self,
        rows: &Tensor,
        maps: &Named,
        names: [&'static str; 2],
        rounding: &mut Rounding,
    ) -> Result<Tensor> {
        let named = self
            .operands(rows, self.routed.group, names)?
            .with("counts", maps.tensor("counts")?.clone());
        let named = named.with("expert_offsets", maps.tensor("expert_offsets")?.clone());
        Ok(grouped_linear::forward(&named, &self.routed, rounding)?.tensor("y")?.clone())
    }

    fn of_shared(
        &self,
        rows: &Tensor,
        names: [&'static str; 2],
        rounding: &mut Rounding,
    ) -> Result<Tensor> {
        let named = self.operands(rows, self.shared.group, names)?;
        Ok(linear::forward_quantized(&named, &self.shared, rounding)?.tensor("y")?.clone())
    }
}

impl Products for QuantizedProducts<'_> {
    fn first(&self, rows: &Tensor, maps: &Named, rounding: &mut Rounding) -> Result<Tensor> {
        self.of_experts(rows, maps, ["w13", "w13_scales"], rounding)
    }

    fn second(&self, rows: &Tensor, maps: &Named, rounding: &mut Rounding) -> Result<Tensor> {
        self.of_experts(rows, maps, ["w2", "w2_scales"], rounding)
    }

    fn shared_first(&self, hidden: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
        self.of_shared(hidden, ["shared_w13", "shared_w13_scales"], rounding)
    }

    fn shared_second(&self, rows: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
        self.of_shared(rows, ["shared_w2", "shared_w2_scales"], rounding)
    }
}

/// Products with NVFP4 weights of the experts, and quantized ones of the shared expert.
pub struct Nvfp4Products<'a> {
    /// For each of `w1`, `w3` and `w2` codes, `_scales` and `_global_scale`, as the weights of
    /// [`grouped_linear::forward`]; `w13_input_scale` and `w2_input_scale` `[1]`, the scales of all
    /// rows. The shared expert's weights are those of [`QuantizedProducts`].
    pub inputs: &'a Named,
    /// The shared expert's formats.
    pub shared: Quantized,
}

impl Nvfp4Products<'_> {
    fn product(
        &self,
        (rows, input_scale): (&Tensor, &'static str),
        [w, scales, global]: [&'static str; 3],
        maps: &Named,
        rounding: &mut Rounding,
    ) -> Result<Tensor> {
        let input_scale = self.inputs.tensor(input_scale)?;
        let x = Named::new().with("x", rows.clone()).with("global_scale", input_scale.clone());
        let x = quantize_nvfp4::quantize(&x, ScaleLayout::Plain)?;
        let named = Named::new()
            .with("x", x.tensor("codes")?.clone())
            .with("x_scales", x.tensor("scales")?.clone())
            .with("x_global_scale", input_scale.clone())
            .with("w", self.inputs.tensor(w)?.clone())
            .with("w_scales", self.inputs.tensor(scales)?.clone())
            .with("w_global_scale", self.inputs.tensor(global)?.clone());
        let named = named
            .with("counts", maps.tensor("counts")?.clone())
            .with("expert_offsets", maps.tensor("expert_offsets")?.clone());
        let quantized = Quantized {
            weights: Weights::Nvfp4,
            group: quantize_nvfp4::GROUP,
            bytes: true,
            layout: ScaleLayout::Plain,
            ..self.shared
        };
        Ok(grouped_linear::forward(&named, &quantized, rounding)?.tensor("y")?.clone())
    }

    fn of_shared(&self) -> QuantizedProducts<'_> {
        QuantizedProducts { inputs: self.inputs, routed: self.shared, shared: self.shared }
    }
}

impl Products for Nvfp4Products<'_> {
    fn first(&self, rows: &Tensor, maps: &Named, rounding: &mut Rounding) -> Result<Tensor> {
        let rows = (rows, "w13_input_scale");
        let gate = ["w1", "w1_scales", "w1_global_scale"];
        let gate = self.product(rows, gate, maps, rounding)?;
        let up = ["w3", "w3_scales", "w3_global_scale"];
        let up = self.product(rows, up, maps, rounding)?;
        Ok(Tensor::cat(&[gate, up], 1)?)
    }

    fn second(&self, rows: &Tensor, maps: &Named, rounding: &mut Rounding) -> Result<Tensor> {
        let weights = ["w2", "w2_scales", "w2_global_scale"];
        self.product((rows, "w2_input_scale"), weights, maps, rounding)
    }

    fn shared_first(&self, hidden: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
        self.of_shared().shared_first(hidden, rounding)
    }

    fn shared_second(&self, rows: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
        self.of_shared().shared_second(rows, rounding)
    }
}

/// Products of unquantized values with unquantized weights.
pub struct PlainProducts<'a> {
    /// `gate_up` `[num_experts, 2 * intermediate_size, hidden_size]`, gate's rows first, and `down`
    /// `[num_experts, hidden_size, intermediate_size]`; of the shared expert `shared_gate` and
    /// `shared_up` `[intermediate_size, hidden_size]`, and `shared_down`.
    pub inputs: &'a Named,
}

impl PlainProducts<'_> {
    fn of_experts(
        &self,
        rows: &Tensor,
        maps: &Named,
        name: &'static str,
        rounding: &mut Rounding,
    ) -> Result<Tensor> {
        let (weights, offsets) =
            (self.inputs.tensor(name)?, values(maps.tensor("expert_offsets")?)?);
        let mut parts = Vec::new();
        for expert in 0..weights.dim(0)? {
            let (first, end) = (offsets[expert] as usize, offsets[expert + 1] as usize);
            if end > first {
                let own = rows.narrow(0, first, end - first)?;
                parts.push(rounding.matmul_f32(&own, &weights.get(expert)?.t()?)?);
            }
        }
        let used = offsets.last().map_or(0, |&end| end as usize);
        let unused = (rows.dim(0)? - used, weights.dim(1)?);
        parts.push(Tensor::zeros(unused, rows.dtype(), rows.device())?);
        Ok(Tensor::cat(&parts, 0)?)
    }

    fn product(
        &self,
        rows: &Tensor,
        name: &'static str,
        rounding: &mut Rounding,
    ) -> Result<Tensor> {
        rounding.matmul_f32(rows, &self.inputs.tensor(name)?.t()?)
    }
}

impl Products for PlainProducts<'_> {
    fn first(&self, rows: &Tensor, maps: &Named, rounding: &mut Rounding) -> Result<Tensor> {
        self.of_experts(rows, maps, "gate_up", rounding)
    }

    fn second(&self, rows: &Tensor, maps: &Named, rounding: &mut Rounding) -> Result<Tensor> {
        self.of_experts(rows, maps, "down", rounding)
    }

    fn shared_first(&self, hidden: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
        let gate = self.product(hidden, "shared_gate", rounding)?;
        Ok(Tensor::cat(&[gate, self.product(hidden, "shared_up", rounding)?], 1)?)
    }

    fn shared_second(&self, rows: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
        self.product(rows, "shared_down", rounding)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Golden, UNIT_ROUNDOFF, assert_within, dot};

    /// The weights of a golden layer.
    fn of_products(gate_up: Tensor, down: Tensor, [gate, up, last]: [Tensor; 3]) -> Named {
        let routed = Named::new().with("gate_up", gate_up).with("down", down);
        routed.with("shared_gate", gate).with("shared_up", up).with("shared_down", last)
    }

    #[test]
    fn golden_layers_agree_from_the_logits_to_the_sum() -> Result<()> {
        for kind in ["topk", "hash"] {
            for (letter, limit) in [("a", 1.5), ("b", 0.7), ("c", 10.0)] {
                let name = format!("moe_{kind}__{letter}");
                let golden = Golden::load(&name);
                let of = |key: &str| golden.f64(&format!("param.mlp.{key}"));
                let hidden = golden.f64("in.hidden");
                let width = hidden.dim(2)?;
                let named = Named::new().with("hidden", hidden.reshape(((), width))?);
                let named = named.with("gate_weight", of("gate.weight"));
                let named = match kind {
                    "topk" => named.with("bias", of("gate.e_score_correction_bias")),
                    _ => {
                        let ids = golden.f64("in.input_ids").flatten_all()?;
                        named.with("tid2eid", of("gate.tid2eid")).with("token_ids", ids)
                    }
                };
                let shared = ["gate_proj", "up_proj", "down_proj"]
                    .map(|of_shared| of(&format!("shared_experts.{of_shared}.weight")));
                let (gate_up, down) = (of("experts.gate_up_proj"), of("experts.down_proj"));
                let num_positions = 2 * hidden.elem_count() / width + 7 * down.dim(0)?;
                let layer = Layer { topk: 2, route_scale: 1.5, limit, alignment: 8, num_positions };
                let found = forward(
                    &named,
                    &layer,
                    &PlainProducts { inputs: &of_products(gate_up, down, shared) },
                    &mut Rounding::exact(),
                )?;
                for (key, own) in
                    [("out.y", "out"), ("mid.shared_out", "shared"), ("mid.gate.logits", "logits")]
                {
                    let found = found.tensor(own)?;
                    let expected = golden.f64(key).reshape(found.shape())?;
                    let rms = (dot(&expected, &expected) / expected.elem_count() as f64).sqrt();
                    let stored = golden.storage_error(key).reshape(found.shape())?;
                    let allowed = ((stored * 2.0)? + rms * 4096.0 * UNIT_ROUNDOFF)?;
                    assert_within(&format!("{name} {key}"), found, &expected, &allowed);
                }
            }
        }
        Ok(())
    }

    #[test]
    fn golden_shared_experts_agree() -> Result<()> {
        for (letter, limit) in [("a", 1.5), ("b", 0.7), ("c", 10.0)] {
            let name = format!("shared_expert__{letter}");
            let golden = Golden::load(&name);
            let hidden = golden.f64("in.hidden");
            let rows = hidden.reshape(((), hidden.dim(candle_core::D::Minus1)?))?;
            let weights = ["gate_proj", "up_proj", "down_proj"]
                .map(|of| golden.f64(&format!("param.shared_experts.{of}.weight")));
            let none = rows.narrow(0, 0, 1)?;
            let inputs = of_products(none.clone(), none, weights);
            let plain = PlainProducts { inputs: &inputs };
            let mut exact = Rounding::exact();
            let both = plain.shared_first(&rows, &mut exact)?;
            let found =
                plain.shared_second(&gated(Named::new(), &both, limit, &mut exact)?, &mut exact)?;
            let expected = golden.f64("out.y").reshape(found.shape())?;
            let rms = (dot(&expected, &expected) / expected.elem_count() as f64).sqrt();
            let stored = golden.storage_error("out.y").reshape(found.shape())?;
            let allowed = ((stored * 2.0)? + rms * 4096.0 * UNIT_ROUNDOFF)?;
            assert_within(&name, &found, &expected, &allowed);
        }
        Ok(())
    }
}
