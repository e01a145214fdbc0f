//! The experts of a layer (inference 10, 11).

use dsv4_runtime::{DType, Result, TensorView, Views};

use crate::experts::grouped_linear::{self, Grouped, Grouping};
use crate::experts::grouped_linear_swiglu;
use crate::experts::swiglu_quantize::{self, Group};
use crate::experts::{moe_expand, moe_map, moe_reduce, router, swiglu};
use crate::formats::quantize_nvfp4;
use crate::formats::scale_layout::ScaleType;
use crate::implementation::Implementation;
use crate::model::checkpoint::tensors::NVFP4_GROUP;
use crate::model::step::Step;
use crate::projections::linear::{BLOCK, Quantized, ScaleLayout, Weights};

/// Rows of experts need no alignment.
const ALIGNMENT: usize = 1;

/// How the product of gate and up is quantized: rounded to bf16, then in groups of 128.
const PRODUCT: swiglu_quantize::Options = swiglu_quantize::Options {
    group: Group::Row128,
    scale: ScaleType::E8m0,
    layout: ScaleLayout::Plain,
    round_to_bf16: true,
};

impl Step<'_, '_> {
    /// The output of routed and shared experts for their normed input `u`.
    pub fn experts(&mut self, u: &TensorView, w: &Views) -> Result<TensorView> {
        let maps = self.route(u, w)?;
        let rows = self.expanded(u, &maps)?;
        let y = match w.get("w1") {
            Some(_) => self.routed_nvfp4(&rows, &maps, w)?,
            None => self.routed(&rows, &maps, w)?,
        };
        let shared = self.shared_expert(u, w)?;
        let out = self.rows("y", DType::Bf16, self.config.hidden_size)?;
        let views = maps.only(&["token_topk_to_pos"]).with("y", &y);
        let views = views.with("shared", &shared).with("out", &out);
        self.launch("moe_reduce", "y", &views, |device, views| {
            moe_reduce::launch(device, views, false)
        })?;
        Ok(out)
    }

    /// The experts of each token, their weights, and the maps of their rows.
    fn route(&mut self, u: &TensorView, w: &Views) -> Result<Views> {
        let (tokens, topk, experts) =
            (self.num_tokens(), self.config.topk, self.config.num_experts);
        let logits = self.wide_product("router_logits", u, &w["gate"])?;
        let indices = self.rows("topk_indices", DType::I32, topk)?;
        let weights = self.rows("topk_weights", DType::F32, topk)?;
        let views = w.only(&["bias", "tid2eid"]).with("logits", &logits);
        let views = views.with("token_ids", &self.list("token_ids", &[tokens])?);
        let views = views.with("topk_indices", &indices).with("topk_weights", &weights);
        let route_scale = self.config.route_scale as f32;
        self.launch("router", "topk_indices", &views, |device, views| {
            router::forward(device, views, route_scale)
        })?;
        let positions = moe_map::positions(tokens * topk, experts, ALIGNMENT);
        let mut maps = Views::from([("topk_indices", &indices)]);
        let lists: [(&'static str, &[usize]); 6] = [
            ("counts", &[experts]),
            ("expert_offsets", &[experts + 1]),
            ("token_topk_to_pos", &[tokens, topk]),
            ("pos_to_expert", &[positions]),
            ("pos_to_token", &[positions]),
            ("pos_to_token_topk", &[positions]),
        ];
        for (name, shape) in lists {
            maps.put(name, self.list(name, shape)?);
        }
        let bytes = moe_map::workspace_bytes(tokens * topk, experts);
        let views = match bytes {
            0 => maps.clone(),
            _ => maps.clone().with("workspace", &self.buffers.workspace(bytes)?),
        };
        self.launch("moe_map", "maps", &views, |device, views| {
            moe_map::forward(device, views, ALIGNMENT)
        })?;
        Ok(maps.with("topk_weights", &weights))
    }

    /// The rows of experts, and the routing weight of each.
    fn expanded(&mut self, u: &TensorView, maps: &Views) -> Result<[TensorView; 2]> {
        let (positions, hidden) = (maps["pos_to_token"].shape[0], self.config.hidden_size);
        let rows = self.buffers.view("expert_rows", DType::Bf16, &[positions, hidden])?;
        let weights = self.buffers.view("row_weights", DType::F32, &[positions])?;
        let views = maps.only(&["token_topk_to_pos", "pos_to_token"]);
        let views = views.with("x", u).with("y", &rows);
        self.launch("moe_expand", "expert_rows", &views, |device, views| {
            moe_expand::launch(device, views, false)
        })?;
        // A slot is a token with one slot; its weight is a row of one channel.
        let column = |view: &TensorView| {
            TensorView::dense(view.name.clone(), view.address, view.dtype, &[view.elements(), 1])
        };
        let views = Views::from([
            ("x", &column(&maps["topk_weights"])),
            ("token_topk_to_pos", &column(&maps["token_topk_to_pos"])),
            ("pos_to_token", &maps["pos_to_token_topk"]),
            ("y", &column(&weights)),
        ]);
        self.launch("moe_expand", "row_weights", &views, |device, views| {
            moe_expand::launch(device, views, false)
        })?;
        Ok([rows, weights])
    }

    /// Products of that many rows, one expert after the other.
    fn grouped(&self, quantized: Quantized, positions: usize) -> Grouped {
        let expected_rows = positions.div_ceil(self.config.num_experts);
        Grouped { quantized, grouping: Grouping::Contiguous, expected_rows }
    }

    /// The routed experts' outputs for their rows.
    fn routed(
        &mut self,
        [rows, weights]: &[TensorView; 2],
        maps: &Views,
        w: &Views,
    ) -> Result<TensorView> {
        let (positions, width) = (rows.shape[0], self.config.expert_width);
        let grouped = self.grouped(self.quantized_products(Weights::Mxfp4), positions);
        let lists = maps.only(&["counts", "expert_offsets"]);
        let lists =
            lists.with("workspace", &self.buffers.workspace(grouped_linear::WORKSPACE_BYTES)?);
        let [x, x_scales] = self.quantized(["row_codes", "row_scales"], rows)?;
        let codes = self.buffers.view("product_codes", DType::U8, &[positions, width])?;
        let blocks = [positions, width.div_ceil(BLOCK)];
        let scales = self.buffers.view("product_scales", DType::U8, &blocks)?;
        let views = lists.clone().with("x", &x).with("x_scales", &x_scales);
        let views = views.with("w", &w["w13"]).with("w_scales", &w["w13_scales"]);
        let views = views.with("weight", weights).with("codes", &codes).with("scales", &scales);
        let options =
            grouped_linear_swiglu::Options { grouped, interleaved: false, quantized: PRODUCT };
        let limit = self.config.swiglu_limit as f32;
        self.launch("grouped_linear_swiglu", "w13", &views, |device, views| {
            grouped_linear_swiglu::forward(device, views, limit, options)
        })?;
        let y = self.buffers.view("expert_y", DType::Bf16, &rows.shape)?;
        let views = lists.with("x", &codes).with("x_scales", &scales).with("y", &y);
        let views = views.with("w", &w["w2"]).with("w_scales", &w["w2_scales"]);
        self.launch("grouped_linear", "w2", &views, |device, views| {
            grouped_linear::forward(device, views, grouped)
        })?;
        Ok(y)
    }

    /// The same with NVFP4 weights. Gate and up are separate products: each has its own scale.
    fn routed_nvfp4(
        &mut self,
        [rows, weights]: &[TensorView; 2],
        maps: &Views,
        w: &Views,
    ) -> Result<TensorView> {
        let width = self.config.expert_width;
        let input = &w["w13_input_scale"];
        let x = self.nvfp4_rows(["row_codes", "row_scales"], rows, input)?;
        let gate = self.nvfp4_product(
            ("expert_gate", width),
            (&x, input),
            [&w["w1"], &w["w1_scales"], &w["w1_global_scale"]],
            maps,
        )?;
        let up = self.nvfp4_product(
            ("expert_up", width),
            (&x, input),
            [&w["w3"], &w["w3_scales"], &w["w3_global_scale"]],
            maps,
        )?;
        let product = self.buffers.view("expert_product", DType::Bf16, &gate.shape)?;
        let views = Views::from([("gate", &gate), ("up", &up), ("y", &product)]);
        let limit = self.config.swiglu_limit as f32;
        self.launch(
            "swiglu",
            "expert_product",
            &views.with("weight", weights),
            |device, views| swiglu::launch(device, views, limit, false),
        )?;
        let input = &w["w2_input_scale"];
        let product = self.nvfp4_rows(["product_codes", "product_scales"], &product, input)?;
        self.nvfp4_product(
            ("expert_y", self.config.hidden_size),
            (&product, input),
            [&w["w2"], &w["w2_scales"], &w["w2_global_scale"]],
            maps,
        )
    }

    /// Codes and scales of rows, by this scale of all of them.
    fn nvfp4_rows(
        &mut self,
        [codes, scales]: [&'static str; 2],
        x: &TensorView,
        global_scale: &TensorView,
    ) -> Result<[TensorView; 2]> {
        let [rows, width] = [x.shape[0], x.shape[1]];
        let codes = self.buffers.view(codes, DType::U8, &[rows, width / 2])?;
        let scales = self.buffers.view(scales, DType::U8, &[rows, width / NVFP4_GROUP])?;
        let views = Views::from([("x", x), ("codes", &codes), ("scales", &scales)]);
        let views = views.with("global_scale", global_scale);
        self.launch("quantize_nvfp4", &x.name, &views, |device, views| {
            quantize_nvfp4::quantize(device, views, ScaleLayout::Plain)
        })?;
        Ok([codes, scales])
    }

    /// The products of experts' rows, in bf16, with that many features.
    fn nvfp4_product(
        &mut self,
        (name, features): (&'static str, usize),
        ([x, x_scales], x_global_scale): (&[TensorView; 2], &TensorView),
        [w, w_scales, w_global_scale]: [&TensorView; 3],
        maps: &Views,
    ) -> Result<TensorView> {
        let positions = x.shape[0];
        let y = self.buffers.view(name, DType::Bf16, &[positions, features])?;
        let workspace = self.buffers.workspace(grouped_linear::WORKSPACE_BYTES)?;
        let views = maps.only(&["counts", "expert_offsets"]).with("workspace", &workspace);
        let views = views.with("x", x).with("x_scales", x_scales).with("w", w);
        let views = views.with("w_scales", w_scales).with("x_global_scale", x_global_scale);
        let views = views.with("w_global_scale", w_global_scale).with("y", &y);
        let quantized = Quantized {
            group: NVFP4_GROUP,
            implementation: Implementation::Portable,
            ..self.quantized_products(Weights::Nvfp4)
        };
        let grouped = self.grouped(quantized, positions);
        self.launch("grouped_linear", &w.name, &views, |device, views| {
            grouped_linear::forward(device, views, grouped)
        })?;
        Ok(y)
    }

    fn shared_expert(&mut self, u: &TensorView, w: &Views) -> Result<TensorView> {
        let (tokens, width) = (self.num_tokens(), self.config.expert_width);
        let x = self.quantized(["u_codes", "u_scales"], u)?;
        let both = [&w["shared_w13"], &w["shared_w13_scales"]];
        let gate_up = self.product("shared_gate_up", &x, both)?;
        let codes = self.buffers.view("shared_codes", DType::U8, &[tokens, width])?;
        let blocks = [tokens, width.div_ceil(BLOCK)];
        let scales = self.buffers.view("shared_scales", DType::U8, &blocks)?;
        let views = Views::from([
            ("gate", &gate_up.narrow(1, 0, width)?),
            ("up", &gate_up.narrow(1, width, width)?),
            ("codes", &codes),
            ("scales", &scales),
        ]);
        let limit = self.config.swiglu_limit as f32;
        self.launch("swiglu_quantize", "shared_codes", &views, |device, views| {
            swiglu_quantize::forward(device, views, limit, PRODUCT)
        })?;
        self.product("shared_y", &[codes, scales], [&w["shared_w2"], &w["shared_w2_scales"]])
    }
}
