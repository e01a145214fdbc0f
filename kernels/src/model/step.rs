//! One step of a model on a device: its streams through the layers (inference 0, 2, 12).

use dsv4_runtime::{DType, Device, Result, TensorView, Views};

use crate::cache::cache_layout::LayerKind;
use crate::formats::quantize_fp8::{self, Group, ScaleType};
use crate::model::batch::Batch;
use crate::model::buffers::Buffers;
use crate::model::caches::Caches;
use crate::model::config::Config;
use crate::model::engine::Kernels;
use crate::model::tables::Tables;
use crate::projections::linear::{self, BLOCK, Products, Quantized, ScaleLayout, Weights};
use crate::projections::rms_norm;
use crate::streams::mhc_post::NUM_STREAMS;
use crate::streams::{embed_streams, mhc_mix, mhc_post, mhc_post_mix_pre, mhc_pre};

/// The two sites of a layer: the names of their weights.
#[derive(Clone, Copy)]
pub(super) struct Site {
    norm: &'static str,
    projection: &'static str,
    scale: &'static str,
    base: &'static str,
}

pub(super) const ATTN: Site =
    Site { norm: "attn_norm", projection: "attn_fn", scale: "attn_scale", base: "attn_base" };
pub(super) const FFN: Site =
    Site { norm: "ffn_norm", projection: "ffn_fn", scale: "ffn_scale", base: "ffn_base" };

/// The names of coefficients. One site's are read while the next one's are written.
const COEFFICIENTS: [[&str; 3]; 2] = [["pre", "post", "comb"], ["pre'", "post'", "comb'"]];

/// What every launch of a step needs.
pub(super) struct Step<'s, 'd> {
    pub device: &'d Device,
    pub config: &'s Config,
    pub tables: &'s Tables<'d>,
    pub caches: &'s Caches<'d>,
    pub buffers: &'s mut Buffers<'d>,
    pub kernels: Kernels,
    pub batch: &'s Batch,
    /// Which of [`COEFFICIENTS`] are those of the current site.
    pub current: usize,
}

impl Step<'_, '_> {
    pub fn num_tokens(&self) -> usize {
        self.batch.num_tokens()
    }

    /// A buffer with rows of tokens.
    pub fn rows(&mut self, name: &'static str, dtype: DType, width: usize) -> Result<TensorView> {
        let tokens = self.num_tokens();
        self.buffers.view(name, dtype, &[tokens, width])
    }

    /// The residual streams, `[num_tokens, 4, hidden_size]`.
    pub fn streams(&mut self) -> Result<TensorView> {
        let shape = [self.num_tokens(), NUM_STREAMS, self.config.hidden_size];
        self.buffers.view("streams", DType::Bf16, &shape)
    }

    /// Uploads the lists that all layers read.
    pub fn upload(&mut self) -> Result<()> {
        let (batch, tokens, ends) = (self.batch, self.num_tokens(), self.batch.cu_seqlens.len());
        let sequences = batch.num_sequences();
        let lists: [(&'static str, &[usize], &[i32]); 11] = [
            ("token_ids", &[tokens], &batch.token_ids),
            ("positions", &[tokens], &batch.positions),
            ("cu_seqlens", &[ends], &batch.cu_seqlens),
            ("first_positions", &[sequences], &batch.first_positions),
            ("states", &[sequences], &batch.states),
            ("window_slots", &[tokens], &batch.window),
            ("csa_entries", &[ends], &batch.csa.cu_entries),
            ("csa_slots", &[batch.csa.slots.len()], &batch.csa.slots),
            ("hca_entries", &[ends], &batch.hca.cu_entries),
            ("hca_slots", &[batch.hca.slots.len()], &batch.hca.slots),
            ("csa_lengths", &[tokens], &batch.csa_lengths),
        ];
        for (name, shape, numbers) in lists {
            self.buffers.upload(name, shape, numbers)?;
        }
        let window = batch.window_indices.len() / tokens.max(1);
        self.buffers.upload("window_indices", &[tokens, 1, window], &batch.window_indices)?;
        let table = [tokens, batch.table_pages];
        self.buffers.upload("block_table", &table, &batch.block_table)?;
        let hca = [tokens, 1, batch.hca_width];
        self.buffers.upload("hca_indices", &hca, &batch.hca_indices)?;
        Ok(())
    }

    /// A list that [`Self::upload`] has uploaded.
    pub fn list(&mut self, name: &'static str, shape: &[usize]) -> Result<TensorView> {
        self.buffers.view(name, DType::I32, shape)
    }

    pub fn positions(&mut self) -> Result<TensorView> {
        self.list("positions", &[self.num_tokens()])
    }

    /// The streams of the tokens' embeddings.
    pub fn embed(&mut self, table: &TensorView) -> Result<()> {
        let ids = self.list("token_ids", &[self.num_tokens()])?;
        let views = Views::from([("table", table), ("token_ids", &ids), ("out", &self.streams()?)]);
        embed_streams::forward(self.device, &views, NUM_STREAMS)?;
        Ok(())
    }

    fn numbers(&self) -> mhc_mix::Numbers {
        mhc_mix::Numbers {
            sinkhorn_iters: self.config.sinkhorn_iters,
            norm_eps: self.config.norm_eps as f32,
            hc_eps: self.config.hc_eps as f32,
        }
    }

    fn coefficients(&mut self, set: usize) -> Result<[TensorView; 3]> {
        let (tokens, [pre, post, comb]) = (self.num_tokens(), COEFFICIENTS[set]);
        Ok([
            self.buffers.view(pre, DType::F32, &[tokens, NUM_STREAMS])?,
            self.buffers.view(post, DType::F32, &[tokens, NUM_STREAMS])?,
            self.buffers.view(comb, DType::F32, &[tokens, NUM_STREAMS, NUM_STREAMS])?,
        ])
    }

    /// The views of a site's projection, with scratch memory.
    fn site(&mut self, site: Site, w: &Views) -> Result<Views> {
        let (tokens, hidden) = (self.num_tokens(), self.config.hidden_size);
        let bytes = mhc_mix::forward_workspace_bytes(self.device, tokens, hidden)
            .max(mhc_post_mix_pre::forward_workspace_bytes(self.device, tokens, hidden));
        let workspace = self.buffers.workspace(bytes)?;
        let views = Views::from([("fn", &w[site.projection]), ("scale", &w[site.scale])]);
        let views = views.with("base", &w[site.base]).with("workspace", &workspace);
        let views = views.with("streams", &self.streams()?);
        let views = views.with("mix", &self.rows("mix", DType::F32, mhc_mix::NUM_COLUMNS)?);
        Ok(views.with("rstd", &self.buffers.view("rstd", DType::F32, &[tokens])?))
    }

    /// The input of the first sublayer: its coefficients, the mix of the streams, its norm.
    pub fn first_site(&mut self, site: Site, w: &Views) -> Result<TensorView> {
        let [pre, post, comb] = self.coefficients(self.current)?;
        let views = self.site(site, w)?.with("pre", &pre).with("post", &post).with("comb", &comb);
        mhc_mix::forward(self.device, &views, self.numbers(), self.kernels.implementation)?;
        let h = self.rows("h", DType::Bf16, self.config.hidden_size)?;
        let views = Views::from([("streams", &self.streams()?), ("pre", &pre), ("h", &h)]);
        mhc_pre::forward(self.device, &views, None)?;
        self.norm("u", &h, &w[site.norm])
    }

    /// The streams after a sublayer with output `y`, and the input of the next one.
    pub fn next_site(&mut self, y: &TensorView, site: Site, w: &Views) -> Result<TensorView> {
        let [_, post, comb] = self.coefficients(self.current)?;
        self.current = 1 - self.current;
        let [next_pre, next_post, next_comb] = self.coefficients(self.current)?;
        let h = self.rows("h", DType::Bf16, self.config.hidden_size)?;
        let views = self.site(site, w)?.with("y", y).with("post", &post).with("comb", &comb);
        let views = views.with("out", &self.streams()?).with("h", &h);
        let views = views.with("next_pre", &next_pre).with("next_post", &next_post);
        let views = views.with("next_comb", &next_comb);
        mhc_post_mix_pre::forward(
            self.device,
            &views,
            self.numbers(),
            self.kernels.implementation,
        )?;
        self.norm("u", &h, &w[site.norm])
    }

    /// The streams after the last sublayer.
    pub fn last(&mut self, y: &TensorView) -> Result<()> {
        let ([_, post, comb], streams) = (self.coefficients(self.current)?, self.streams()?);
        let views = Views::from([("streams", &streams), ("y", y), ("post", &post)]);
        mhc_post::forward(self.device, &views.with("comb", &comb).with("out", &streams))?;
        Ok(())
    }

    /// Rows over their root mean square, times a weight.
    pub fn norm(
        &mut self,
        name: &'static str,
        x: &TensorView,
        weight: &TensorView,
    ) -> Result<TensorView> {
        let y = self.buffers.view(name, DType::Bf16, &x.shape)?;
        let views = Views::from([("x", x), ("weight", weight), ("y", &y)]);
        rms_norm::forward(self.device, &views, self.config.norm_eps as f32)?;
        Ok(y)
    }

    /// e4m3 codes of rows, and their scales in groups of 128.
    pub fn quantized(
        &mut self,
        [codes, scales]: [&'static str; 2],
        x: &TensorView,
    ) -> Result<[TensorView; 2]> {
        let [rows, width] = [x.shape[0], x.shape[1]];
        let codes = self.buffers.view(codes, DType::U8, &[rows, width])?;
        let scales = self.buffers.view(scales, DType::U8, &[rows, width.div_ceil(BLOCK)])?;
        let views = Views::from([("x", x), ("codes", &codes), ("scales", &scales)]);
        let (group, scale, layout) = (Group::Row128, ScaleType::E8m0, ScaleLayout::Plain);
        quantize_fp8::quantize(
            self.device,
            &views,
            quantize_fp8::Options { group, scale, layout },
        )?;
        Ok([codes, scales])
    }

    /// Products with quantized weights.
    pub fn quantized_products(&self, weights: Weights) -> Quantized {
        Quantized {
            weights,
            group: BLOCK,
            scale_bytes: true,
            layout: ScaleLayout::Plain,
            implementation: self.kernels.implementation,
        }
    }

    /// The product of codes with an FP8 weight, in bf16.
    pub fn product(
        &mut self,
        name: &'static str,
        [x, x_scales]: &[TensorView; 2],
        [w, w_scales]: [&TensorView; 2],
    ) -> Result<TensorView> {
        let [rows, ins, outs] = [x.shape[0], x.shape[1], w.shape[0]];
        let y = self.buffers.view(name, DType::Bf16, &[rows, outs])?;
        let bytes = linear::quantized_workspace_bytes(self.device, rows, outs, ins);
        let workspace = self.buffers.workspace(bytes)?;
        let views = Views::from([("x", x), ("x_scales", x_scales), ("w", w)]);
        let views = views.with("w_scales", w_scales).with("y", &y).with("workspace", &workspace);
        linear::forward_quantized(self.device, &views, self.quantized_products(Weights::Fp8))?;
        Ok(y)
    }

    /// The product of bf16 rows with a bf16 weight, in fp32.
    pub fn wide_product(
        &mut self,
        name: &'static str,
        x: &TensorView,
        w: &TensorView,
    ) -> Result<TensorView> {
        let [rows, ins, outs] = [x.shape[0], x.shape[1], w.shape[0]];
        let y = self.buffers.view(name, DType::F32, &[rows, outs])?;
        let bytes = linear::forward_workspace_bytes(self.device, 1, rows, outs, ins);
        let workspace = self.buffers.workspace(bytes)?;
        let views = Views::from([("x", x), ("w", w), ("y", &y), ("workspace", &workspace)]);
        linear::forward(self.device, &views, Products::Own)?;
        Ok(y)
    }

    /// All main layers, from the tokens' ids to the streams after the last one.
    pub fn main_layers(
        &mut self,
        kinds: &[LayerKind],
        table: &TensorView,
        layers: &[Views],
    ) -> Result<()> {
        self.embed(table)?;
        let mut y: Option<TensorView> = None;
        for (layer, (&kind, w)) in kinds.iter().zip(layers).enumerate() {
            let u = match &y {
                Some(y) => self.next_site(y, ATTN, w)?,
                None => self.first_site(ATTN, w)?,
            };
            y = Some(self.sublayers(layer, kind, &u, w)?);
        }
        y.map_or(Ok(()), |y| self.last(&y))
    }

    /// Both sublayers of a layer, from the input of the first to the output of the second.
    pub fn sublayers(
        &mut self,
        layer: usize,
        kind: LayerKind,
        u: &TensorView,
        w: &Views,
    ) -> Result<TensorView> {
        let y = self.attention(layer, kind, u, w)?;
        let u = self.next_site(&y, FFN, w)?;
        self.experts(&u, w)
    }
}
