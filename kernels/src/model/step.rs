//! One step of a model on a device: its streams through the layers (inference 0, 2, 12).

use dsv4_runtime::{DType, Device, Result, TensorView, Views};

use crate::cache::cache_layout::LayerKind;
use crate::formats::quantize_fp8::{self, Group, ScaleType};
use crate::implementation::Implementation;
use crate::model::batch::Batch;
use crate::model::buffers::{Buffers, bytes_of};
use crate::model::caches::Caches;
use crate::model::config::Config;
use crate::model::head::Wanted;
use crate::model::tables::Tables;
use crate::model::tap::{Site, Tap};
use crate::projections::linear::{self, BLOCK, Products, Quantized, ScaleLayout, Weights};
use crate::projections::rms_norm;
use crate::streams::mhc_post::NUM_STREAMS;
use crate::streams::{embed_streams, mhc_mix, mhc_post, mhc_post_mix_pre, mhc_pre};

/// The two sites of a layer: the names of their weights.
#[derive(Clone, Copy)]
pub(super) struct Sublayer {
    name: &'static str,
    norm: &'static str,
    projection: &'static str,
    scale: &'static str,
    base: &'static str,
}

pub(super) const ATTN: Sublayer = Sublayer {
    name: "attn",
    norm: "attn_norm",
    projection: "attn_fn",
    scale: "attn_scale",
    base: "attn_base",
};
pub(super) const FFN: Sublayer = Sublayer {
    name: "ffn",
    norm: "ffn_norm",
    projection: "ffn_fn",
    scale: "ffn_scale",
    base: "ffn_base",
};

/// The names of coefficients. One site's are read while the next one's are written.
const COEFFICIENTS: [[&str; 3]; 2] = [["pre", "post", "comb"], ["pre'", "post'", "comb'"]];

/// A dense view with other axes.
pub(super) fn shaped(view: &TensorView, shape: &[usize]) -> TensorView {
    TensorView::dense(view.name.clone(), view.address, view.dtype, shape)
}

/// What a model has for all its steps.
pub(super) struct Parts<'d> {
    pub device: &'d Device,
    pub config: Config,
    pub tables: Tables<'d>,
    pub caches: Caches<'d>,
    pub buffers: Buffers<'d>,
    /// That of all kernels that have several.
    pub implementation: Implementation,
    pub tap: Option<Box<dyn Tap + 'd>>,
}

impl<'d> Parts<'d> {
    /// A step with the lists of this batch.
    pub fn step<'s>(&'s mut self, batch: &'s Batch) -> Step<'s, 'd> {
        Step {
            device: self.device,
            config: &self.config,
            tables: &self.tables,
            caches: &self.caches,
            buffers: &mut self.buffers,
            implementation: self.implementation,
            tap: self.tap.as_deref_mut(),
            batch,
            layer: None,
            current: 0,
        }
    }

    /// A buffer with the streams of tokens at these addresses, that many from each on,
    /// `[num_tokens, 4, hidden_size]`.
    pub fn gathered(&mut self, sources: &[(u64, usize)]) -> Result<TensorView> {
        let tokens: usize = sources.iter().map(|(_, count)| count).sum();
        let shape = [tokens, NUM_STREAMS, self.config.hidden_size];
        let rows = self.buffers.view("module_streams", DType::Bf16, &shape)?;
        let bytes = self.caches.tail_bytes();
        let mut target = rows.address;
        for &(source, count) in sources {
            self.device.backend().copy(target, source, count * bytes)?;
            target += (count * bytes) as u64;
        }
        Ok(rows)
    }
}

/// What every launch of a step needs.
pub(super) struct Step<'s, 'd> {
    pub device: &'d Device,
    pub config: &'s Config,
    pub tables: &'s Tables<'d>,
    pub caches: &'s Caches<'d>,
    pub buffers: &'s mut Buffers<'d>,
    /// That of all kernels that have several.
    pub implementation: Implementation,
    pub tap: Option<&'s mut (dyn Tap + 'd)>,
    pub batch: &'s Batch,
    /// The layer that is launched.
    pub layer: Option<usize>,
    /// Which of [`COEFFICIENTS`] are those of the current site.
    pub current: usize,
}

impl Step<'_, '_> {
    pub fn num_tokens(&self) -> usize {
        self.batch.num_tokens()
    }

    /// Launches an operator on its tensors. `name` is what it computes there, see
    /// [`Site::name`].
    pub fn launch<R>(
        &mut self,
        operator: &'static str,
        name: &str,
        views: &Views,
        launch: impl Fn(&Device, &Views) -> Result<R>,
    ) -> Result<()> {
        let device = self.device;
        let mut run = || launch(device, views).map(drop);
        match &mut self.tap {
            Some(tap) => {
                tap.around(device, Site { operator, name, layer: self.layer, views }, &mut run)
            }
            None => run(),
        }
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

    /// Uploads the lists of all launches.
    pub fn upload(&mut self, wanted: &Wanted) -> Result<()> {
        let batch = self.batch;
        let lists: [(&'static str, &[i32]); 14] = [
            ("token_ids", &batch.token_ids),
            ("positions", &batch.positions),
            ("cu_seqlens", &batch.cu_seqlens),
            ("first_positions", &batch.first_positions),
            ("states", &batch.states),
            ("window_slots", &batch.window),
            ("csa_entries", &batch.csa.cu_entries),
            ("csa_slots", &batch.csa.slots),
            ("hca_entries", &batch.hca.cu_entries),
            ("hca_slots", &batch.hca.slots),
            ("csa_lengths", &batch.csa_lengths),
            ("window_indices", &batch.window_indices),
            ("block_table", &batch.block_table),
            ("hca_indices", &batch.hca_indices),
        ];
        let mut lists: Vec<(&'static str, Vec<u8>)> =
            lists.into_iter().map(|(name, numbers)| (name, bytes_of(numbers))).collect();
        lists.extend(wanted.lists());
        self.buffers.upload(&lists)
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
        self.launch("embed_streams", "embed", &views, |device, views| {
            embed_streams::forward(device, views, NUM_STREAMS)
        })
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
    fn site(&mut self, site: Sublayer, w: &Views) -> Result<Views> {
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
    pub fn first_site(&mut self, site: Sublayer, w: &Views) -> Result<TensorView> {
        let [pre, post, comb] = self.coefficients(self.current)?;
        let views = self.site(site, w)?.with("pre", &pre).with("post", &post).with("comb", &comb);
        let (numbers, implementation) = (self.numbers(), self.implementation);
        self.launch("mhc_mix", site.name, &views, |device, views| {
            mhc_mix::forward(device, views, numbers, implementation)
        })?;
        let h = self.rows("h", DType::Bf16, self.config.hidden_size)?;
        let views = Views::from([("streams", &self.streams()?), ("pre", &pre), ("h", &h)]);
        self.launch("mhc_pre", site.name, &views, |device, views| {
            mhc_pre::forward(device, views, None)
        })?;
        self.norm("u", &h, &w[site.norm])
    }

    /// The streams after a sublayer with output `y`, and the input of the next one.
    pub fn next_site(&mut self, y: &TensorView, site: Sublayer, w: &Views) -> Result<TensorView> {
        let [_, post, comb] = self.coefficients(self.current)?;
        self.current = 1 - self.current;
        let [next_pre, next_post, next_comb] = self.coefficients(self.current)?;
        let h = self.rows("h", DType::Bf16, self.config.hidden_size)?;
        let views = self.site(site, w)?.with("y", y).with("post", &post).with("comb", &comb);
        let views = views.with("out", &self.streams()?).with("h", &h);
        let views = views.with("next_pre", &next_pre).with("next_post", &next_post);
        let views = views.with("next_comb", &next_comb);
        let (numbers, implementation) = (self.numbers(), self.implementation);
        self.launch("mhc_post_mix_pre", site.name, &views, |device, views| {
            mhc_post_mix_pre::forward(device, views, numbers, implementation)
        })?;
        self.norm("u", &h, &w[site.norm])
    }

    /// The streams after the last sublayer.
    pub fn last(&mut self, y: &TensorView) -> Result<()> {
        let ([_, post, comb], streams) = (self.coefficients(self.current)?, self.streams()?);
        let views = Views::from([("streams", &streams), ("y", y), ("post", &post)]);
        let views = views.with("comb", &comb).with("out", &streams);
        self.launch("mhc_post", "streams", &views, mhc_post::forward)
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
        let eps = self.config.norm_eps as f32;
        self.launch("rms_norm", &weight.name, &views, |device, views| {
            rms_norm::forward(device, views, eps)
        })?;
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
        let options = quantize_fp8::Options { group, scale, layout };
        self.launch("quantize_fp8", &x.name, &views, |device, views| {
            quantize_fp8::quantize(device, views, options)
        })?;
        Ok([codes, scales])
    }

    /// Products with quantized weights.
    pub fn quantized_products(&self, weights: Weights) -> Quantized {
        Quantized {
            weights,
            group: BLOCK,
            scale_bytes: true,
            layout: ScaleLayout::Plain,
            implementation: self.implementation,
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
        let products = self.quantized_products(Weights::Fp8);
        self.launch("linear", &w.name, &views, |device, views| {
            linear::forward_quantized(device, views, products)
        })?;
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
        self.launch("linear", &w.name, &views, |device, views| {
            linear::forward(device, views, Products::Own)
        })?;
        Ok(y)
    }

    /// All main layers, from the tokens' ids to the streams after the last one.
    pub fn main_layers(&mut self, table: &TensorView, layers: &[Views]) -> Result<()> {
        self.embed(table)?;
        let mut y: Option<TensorView> = None;
        for (layer, (&kind, w)) in self.config.layers.iter().zip(layers).enumerate() {
            self.layer = Some(layer);
            let u = match &y {
                Some(y) => self.next_site(y, ATTN, w)?,
                None => self.first_site(ATTN, w)?,
            };
            y = Some(self.sublayers(layer, kind, &u, w)?);
        }
        y.map_or(Ok(()), |y| self.last(&y))?;
        self.layer = None;
        Ok(())
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
