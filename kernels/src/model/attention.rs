//! The attention of a layer (inference 5.1, 6 to 9, 13): projections, caches, compressed entries,
//! the indexer's choice, the attention itself, and the output projection.

use dsv4_runtime::{DType, Result, TensorView, Views};

use crate::attention::decode_attention;
use crate::cache::cache_layout::{Contents, LayerKind};
use crate::cache::compressor::Epilogue;
use crate::cache::{compressor_stream, indexer_cache_write, kv_cache_write, kv_norm_rope_write};
use crate::formats::hadamard::Stored;
use crate::indexer::{indexer_logits, indexer_query, topk};
use crate::model::step::{Step, shaped};
use crate::projections::linear::{self, Products};
use crate::projections::{query_norm_rope, rope};

/// The names of a compressor's weights, buffers and lists.
struct Compressor {
    weights: [&'static str; 3],
    products: &'static str,
    entries: &'static str,
    contents: Contents,
}

const MAIN: Compressor = Compressor {
    weights: ["compressor", "ape", "compressor_norm"],
    products: "compressed",
    entries: "entries",
    contents: Contents::Compressor,
};
const INDEXER: Compressor = Compressor {
    weights: ["index_compressor", "index_ape", "index_norm"],
    products: "index_compressed",
    entries: "index_entries",
    contents: Contents::IndexerCompressor,
};

/// What the queries attend to in addition to the window: pages, slots, and rows of a page.
struct Compressed {
    pages: TensorView,
    indices: TensorView,
    page_size: usize,
}

impl Step<'_, '_> {
    /// The output of the attention for its normed input `u`.
    pub fn attention(
        &mut self,
        layer: usize,
        kind: LayerKind,
        u: &TensorView,
        w: &Views,
    ) -> Result<TensorView> {
        let codes = self.quantized(["u_codes", "u_scales"], u)?;
        let q_a = self.product("q_a", &codes, [&w["wq_a"], &w["wq_a_scales"]])?;
        let qr = self.norm("qr", &q_a, &w["q_norm"])?;
        let qr_codes = self.quantized(["qr_codes", "qr_scales"], &qr)?;
        let q = self.query(kind, &qr_codes, w)?;
        self.window(layer, kind, &codes, w)?;
        let compressed = match kind {
            LayerKind::Window => None,
            LayerKind::Hca => Some(self.all_entries(layer, u, w)?),
            LayerKind::Csa => Some(self.chosen_entries(layer, u, &qr_codes, w)?),
        };
        let out = self.core(layer, &q, compressed.as_ref(), &w["sink"])?;
        self.output(kind, &out, w)
    }

    /// The query heads, normed and turned, `[num_tokens, num_heads, head_dim]`.
    fn query(&mut self, kind: LayerKind, qr: &[TensorView; 2], w: &Views) -> Result<TensorView> {
        let (tokens, heads, dim) = (self.num_tokens(), self.config.num_heads, self.config.head_dim);
        let q = self.product("q", qr, [&w["wq_b"], &w["wq_b_scales"]])?;
        let q = shaped(&q, &[tokens, heads, dim]);
        let rstd = self.rows("q_rstd", DType::F32, heads)?;
        let views = self.turning(kind)?.with("x", &q).with("y", &q).with("rstd", &rstd);
        let eps = self.config.norm_eps as f32;
        self.launch("query_norm_rope", "q", &views, |device, views| {
            query_norm_rope::forward(device, views, eps)
        })?;
        Ok(q)
    }

    /// The tables of a layer's kind, and the positions.
    fn turning(&mut self, kind: LayerKind) -> Result<Views> {
        let positions = self.positions()?;
        let [cos, sin] = self.tables.of(kind);
        Ok(Views::from([("cos", cos), ("sin", sin), ("positions", &positions)]))
    }

    /// Writes the rows of K = V of the normed input `u` to the window, and does nothing else.
    pub fn window_rows(
        &mut self,
        layer: usize,
        kind: LayerKind,
        u: &TensorView,
        w: &Views,
    ) -> Result<()> {
        let codes = self.quantized(["u_codes", "u_scales"], u)?;
        self.window(layer, kind, &codes, w)
    }

    /// Writes the rows of K = V to the window.
    fn window(
        &mut self,
        layer: usize,
        kind: LayerKind,
        codes: &[TensorView; 2],
        w: &Views,
    ) -> Result<()> {
        let kv = self.product("kv", codes, [&w["wkv"], &w["wkv_scales"]])?;
        let slots = self.list("window_slots", &[self.num_tokens()])?;
        let views = self.turning(kind)?.with("x", &kv).with("y", &kv).with("slots", &slots);
        let views = views.with("weight", &w["kv_norm"]).with("cache", &self.caches.windows(layer));
        let (rows, eps) = (self.caches.window_rows(), self.config.norm_eps as f32);
        let row = self.config.row();
        self.launch("kv_norm_rope_write", "window", &views, |device, views| {
            kv_norm_rope_write::forward(device, views, row, rows, eps)
        })
    }

    /// The entries that the step completes, bf16, with the state written.
    fn new_entries(
        &mut self,
        layer: usize,
        kind: LayerKind,
        compressor: &Compressor,
        u: &TensorView,
        w: &Views,
    ) -> Result<TensorView> {
        let [weights, ape, norm] = compressor.weights;
        let both = self.wide_product(compressor.products, u, &w[weights])?;
        let width = both.shape[1] / 2;
        let (sequences, dim) = (self.batch.num_sequences(), w[norm].shape[0]);
        let count = self.batch.entries(kind).slots.len();
        let entries = self.buffers.view(compressor.entries, DType::Bf16, &[count, dim])?;
        let ends = [sequences + 1];
        let list = if kind == LayerKind::Hca { "hca_entries" } else { "csa_entries" };
        let workspace = compressor_stream::workspace_bytes(DType::Bf16, count, dim);
        let views = self.turning(kind)?.without(&["positions"]);
        let views = views.with("kv", &both.narrow(1, 0, width)?);
        let views = views.with("gate", &both.narrow(1, width, width)?);
        let views = views.with("ape", &w[ape]).with("norm_weight", &w[norm]);
        let state = self.caches.compressor(layer, compressor.contents);
        let views = views.with("state", &state).with("entries", &entries);
        let views = views.with("cu_seqlens", &self.list("cu_seqlens", &ends)?);
        let views = views.with("cu_entries", &self.list(list, &ends)?);
        let views = views.with("first_positions", &self.list("first_positions", &[sequences])?);
        let views = views.with("slots", &self.list("states", &[sequences])?);
        let views = views.with("workspace", &self.buffers.workspace(workspace)?);
        let eps = self.config.norm_eps as f32;
        self.launch("compressor_stream", compressor.entries, &views, |device, views| {
            compressor_stream::forward(device, views, eps, Epilogue::None)
        })?;
        Ok(entries)
    }

    /// Computes a layer's new entries and writes them to its pages; returns these.
    fn write_entries(
        &mut self,
        layer: usize,
        kind: LayerKind,
        u: &TensorView,
        w: &Views,
    ) -> Result<TensorView> {
        let entries = self.new_entries(layer, kind, &MAIN, u, w)?;
        let pages = self.caches.pages(layer, Contents::Entries);
        let slots = self.slots(kind)?;
        let views = Views::from([("kv", &entries), ("slots", &slots), ("cache", &pages)]);
        let (row, size) = (self.config.row(), kind.entries_per_page());
        self.launch("kv_cache_write", "entries", &views, |device, views| {
            kv_cache_write::forward(device, views, row, size)
        })?;
        Ok(pages)
    }

    /// The slots of the new entries of layers of a kind.
    fn slots(&mut self, kind: LayerKind) -> Result<TensorView> {
        let count = self.batch.entries(kind).slots.len();
        self.list(if kind == LayerKind::Hca { "hca_slots" } else { "csa_slots" }, &[count])
    }

    /// All entries that each token sees.
    fn all_entries(&mut self, layer: usize, u: &TensorView, w: &Views) -> Result<Compressed> {
        let pages = self.write_entries(layer, LayerKind::Hca, u, w)?;
        let shape = [self.num_tokens(), 1, self.batch.hca_width];
        let indices = self.list("hca_indices", &shape)?;
        Ok(Compressed { pages, indices, page_size: LayerKind::Hca.entries_per_page() })
    }

    /// The entries that the indexer chooses for each token.
    fn chosen_entries(
        &mut self,
        layer: usize,
        u: &TensorView,
        qr: &[TensorView; 2],
        w: &Views,
    ) -> Result<Compressed> {
        let (kind, page_size) = (LayerKind::Csa, LayerKind::Csa.entries_per_page());
        let pages = self.write_entries(layer, kind, u, w)?;
        let keys = self.new_entries(layer, kind, &INDEXER, u, w)?;
        let stored = self.caches.pages(layer, Contents::IndexerKeys);
        let slots = self.slots(kind)?;
        let views = Views::from([("k", &keys), ("slots", &slots), ("pages", &stored)]);
        self.launch("indexer_cache_write", "keys", &views, |device, views| {
            indexer_cache_write::forward(device, views, Stored::E2m1, page_size)
        })?;
        let query = self.index_query(u, qr, w)?;
        let logits = self.index_logits(query, &stored)?;
        let (tokens, count) = (self.num_tokens(), self.config.index_topk);
        let indices = self.rows_of_ids("chosen", count)?;
        let table = self.list("block_table", &[tokens, self.batch.table_pages])?;
        let lengths = self.list("csa_lengths", &[tokens])?;
        let views = Views::from([("scores", &logits), ("lengths", &lengths)]);
        let views = views.with("block_table", &table).with("indices", &indices);
        self.launch("topk", "chosen", &views, |device, views| {
            topk::forward(device, views, page_size)
        })?;
        let indices = shaped(&indices, &[tokens, 1, count]);
        Ok(Compressed { pages, indices, page_size })
    }

    fn rows_of_ids(&mut self, name: &'static str, width: usize) -> Result<TensorView> {
        self.rows(name, DType::I32, width)
    }

    /// The indexer's queries as e2m1 codes with their scales, and its head weights.
    fn index_query(
        &mut self,
        u: &TensorView,
        qr: &[TensorView; 2],
        w: &Views,
    ) -> Result<[TensorView; 3]> {
        let (tokens, heads, dim) =
            (self.num_tokens(), self.config.index_heads, self.config.index_head_dim);
        let weights = [&w["index_wq_b"], &w["index_wq_b_scales"]];
        let q = self.product("index_q", qr, weights)?;
        let q = shaped(&q, &[tokens, heads, dim]);
        let head_weights = self.wide_product("index_weights", u, &w["index_weights"])?;
        let bytes = Stored::E2m1.code_bytes();
        let codes = self.buffers.view("index_codes", DType::U8, &[tokens, heads, bytes])?;
        let scales = self.buffers.view("index_scales", DType::U8, &[tokens, heads, dim / 32])?;
        let scaled = self.rows("index_w", DType::F32, heads)?;
        let views = self.turning(LayerKind::Csa)?.with("q", &q).with("weights", &head_weights);
        let views = views.with("codes", &codes).with("scale_bytes", &scales).with("w", &scaled);
        let scale = ((dim * heads) as f64).sqrt().recip() as f32;
        self.launch("indexer_query", "index_q", &views, |device, views| {
            indexer_query::forward(device, views, Stored::E2m1, scale)
        })?;
        Ok([codes, scales, scaled])
    }

    /// The scores of each token's entries, `[num_tokens, columns]`.
    fn index_logits(
        &mut self,
        [codes, scales, weights]: [TensorView; 3],
        pages: &TensorView,
    ) -> Result<TensorView> {
        let (tokens, page_size) = (self.num_tokens(), LayerKind::Csa.entries_per_page());
        let columns = self.batch.table_pages * page_size;
        let logits = self.rows("index_logits", DType::F32, columns)?;
        let by_request = |view: &TensorView| {
            let shape = [&[tokens, 1][..], &view.shape[1..]].concat();
            shaped(view, &shape)
        };
        let table = self.list("block_table", &[tokens, self.batch.table_pages])?;
        let lengths = self.list("csa_lengths", &[tokens, 1])?;
        let views = Views::from([
            ("q", &by_request(&codes)),
            ("q_scale_bytes", &by_request(&scales)),
            ("w", &by_request(&weights)),
            ("logits", &by_request(&logits)),
        ]);
        let views = views.with("pages", pages).with("block_table", &table);
        let options = indexer_logits::Options {
            operands: indexer_logits::Operands::E2m1,
            ratio: 1,
            page_size,
            sm_scale: 1.0,
            clean_logits: true,
            implementation: self.implementation,
        };
        let views = views.with("context_lens", &lengths);
        self.launch("indexer_logits", "index_logits", &views, |device, views| {
            indexer_logits::forward(device, views, &options)
        })?;
        Ok(logits)
    }

    /// The attention over the window and the compressed entries, `[num_tokens, num_heads,
    /// head_dim]`. Each token is a request of its own.
    fn core(
        &mut self,
        layer: usize,
        q: &TensorView,
        compressed: Option<&Compressed>,
        sink: &TensorView,
    ) -> Result<TensorView> {
        let [tokens, heads, dim] = [q.shape[0], q.shape[1], q.shape[2]];
        let out = self.buffers.view("attn_out", DType::Bf16, &[tokens, 1, heads, dim])?;
        let lse = self.buffers.view("attn_lse", DType::F32, &[tokens, 1, heads])?;
        let width = self.batch.window_indices.len() / tokens.max(1);
        let indices = self.list("window_indices", &[tokens, 1, width])?;
        let views = Views::from([("q", &shaped(q, &[tokens, 1, heads, dim])), ("sink", sink)]);
        let views = views.with("window", &self.caches.windows(layer));
        let mut views = views.with("window_indices", &indices);
        if let Some(Compressed { pages, indices, .. }) = compressed {
            views = views.with("compressed", pages).with("compressed_indices", indices);
        }
        let compressed_topk = compressed.map(|compressed| compressed.indices.shape[2]);
        let topk: Vec<usize> = [width].into_iter().chain(compressed_topk).collect();
        let options = decode_attention::Options {
            format: self.config.row(),
            window_page_size: self.caches.window_rows(),
            compressed_page_size: compressed.map_or(1, |compressed| compressed.page_size),
            softmax_scale: (dim as f64).sqrt().recip() as f32,
            num_blocks: self.attention_blocks(heads, &topk),
            implementation: self.implementation,
        };
        let bytes = decode_attention::workspace_bytes(&views, &options)?;
        let views = views.with("out", &out).with("lse", &lse);
        let views = views.with("workspace", &self.buffers.workspace(bytes)?);
        self.launch("decode_attention", "attn_out", &views, |device, views| {
            decode_attention::forward(device, views, &options)
        })?;
        Ok(shaped(&out, &[tokens, heads, dim]))
    }

    /// Blocks of the attention: one for each SM, or one for each tile of keys, which divides every
    /// token alike.
    fn attention_blocks(&self, heads: usize, topk: &[usize]) -> usize {
        if !self.device.is_invariant() {
            return decode_attention::natural_blocks(self.device);
        }
        let (extents, most) = ([self.num_tokens(), 1, heads], usize::MAX);
        let spread = decode_attention::spread(extents, topk, most, self.implementation);
        spread.num_blocks.max(1)
    }

    /// The inverse rotation, and both output projections.
    fn output(&mut self, kind: LayerKind, out: &TensorView, w: &Views) -> Result<TensorView> {
        let tokens = self.num_tokens();
        let [groups, rank, width] = [w["wo_a"].shape[0], w["wo_a"].shape[1], w["wo_a"].shape[2]];
        let rotated = self.buffers.view("rotated", DType::Bf16, &out.shape)?;
        let views = self.turning(kind)?.with("x", out).with("y", &rotated);
        self.launch("rope", "rotated", &views, |device, views| rope::forward(device, views, true))?;
        let z = self.buffers.view("z", DType::Bf16, &[tokens, groups, rank])?;
        let bytes = linear::forward_workspace_bytes(self.device, groups, tokens, rank, width);
        let workspace = self.buffers.workspace(bytes)?;
        let views = Views::from([("x", &shaped(&rotated, &[tokens, groups, width])), ("y", &z)]);
        let views = views.with("w", &w["wo_a"]).with("workspace", &workspace);
        self.launch("linear", "wo_a", &views, |device, views| {
            linear::grouped_forward(device, views, Products::Own)
        })?;
        let codes =
            self.quantized(["z_codes", "z_scales"], &shaped(&z, &[tokens, groups * rank]))?;
        self.product("y", &codes, [&w["wo_b"], &w["wo_b_scales"]])
    }
}
