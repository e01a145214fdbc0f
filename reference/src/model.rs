//! A whole model as the composition of its operators' oracles (inference 0, 12.1): one sequence
//! from its first token on, without a cache.
//!
//! ```text
//! X = embedding, four times
//! each layer:   u = norm(pre X)     y = attention(u)     X = comb^T X + post y
//!               u = norm(pre X)     y = experts(u)       X = comb^T X + post y
//! logits = head(norm(mhc_head(X)))
//! ```
//!
//! Weights are in the formats of a checkpoint (FP8 blocks, MXFP4 experts, bf16, fp32; wo_a is
//! decoded), or all unquantized, as other implementations have them. What a cache would hold of a
//! token is computed at once: the rows of K = V as the cache decodes them, entries of all whole
//! groups, and the indexer's keys.
//!
//! # Rounding points
//!
//! Those of the operators; between them rows and streams are stored in bf16, coefficients, logits
//! of routers and the compressors' projections in fp32.

use candle_core::Tensor;

use crate::attention::sparse_attention::{self, Value};
use crate::cache::compressor::{self, Epilogue, Finish};
use crate::cache::kv_cache::RowFormat;
use crate::error::Result;
use crate::experts::moe::{self, Nvfp4Products, PlainProducts, QuantizedProducts};
use crate::format::Format;
use crate::formats::hadamard;
use crate::formats::scale_layout::ScaleLayout;
use crate::head::lm_head;
use crate::indexer::indexer_logits::{self, Keys};
use crate::indexer::indexer_query;
use crate::indexer::topk::{self, Index};
use crate::named::Named;
use crate::precision::{Accumulator, Rounding, values};
use crate::projections::linear::{self, BLOCK, Quantized, Weights};
use crate::projections::{kv_projection, output_projection, query_projection, rms_norm, rope};
use crate::quantize::simulated;
use crate::streams::mhc_post::NUM_STREAMS;
use crate::streams::{embed_streams, mhc_head, mhc_mix, mhc_post, mhc_pre};

/// What a layer attends to in addition to its window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Nothing.
    Window,
    /// Entries of 4 tokens, chosen by the indexer.
    Csa,
    /// All entries of 128 tokens.
    Hca,
}

impl Kind {
    /// Tokens of an entry.
    fn ratio(self) -> Option<usize> {
        match self {
            Self::Window => None,
            Self::Csa => Some(4),
            Self::Hca => Some(128),
        }
    }
}

/// The numbers of a model that no tensor holds.
#[derive(Debug, Clone, Copy)]
pub struct Numbers {
    /// Query heads.
    pub num_heads: usize,
    /// A row of K = V as the cache stores it.
    pub row: RowFormat,
    /// Tokens that attention sees uncompressed: 128.
    pub window: usize,
    /// Entries that the indexer chooses.
    pub index_topk: usize,
    /// Experts of a token.
    pub topk: usize,
    /// The sum of the routing weights of a token.
    pub route_scale: f64,
    /// The limit of SwiGLU's clamps.
    pub limit: f64,
    /// The residual streams' iterations and epsilons; its `norm_eps` is that of all norms.
    pub streams: mhc_mix::Numbers,
}

/// cos and sin of the positions, `[num_tokens, rope_dim / 2]`, stored in f32.
#[derive(Debug, Clone)]
pub struct Table {
    /// cos.
    pub cos: Tensor,
    /// sin.
    pub sin: Tensor,
}

/// A model.
#[derive(Debug, Clone)]
pub struct Model {
    /// Its numbers.
    pub numbers: Numbers,
    /// The rotation of window layers.
    pub main: Table,
    /// The rotation of layers with entries.
    pub compress: Table,
    /// `embed` and `head` `[vocab_size, hidden_size]`, `norm` `[hidden_size]`, and the head mix:
    /// `head_fn`, `head_scale`, `head_base`.
    pub shared: Named,
    /// The layers and their weights, named as in [`Model::logits`].
    pub layers: Vec<(Kind, Named)>,
    /// The weights of the MTP module, where there is one: those of a window layer, of
    /// [`crate::head::mtp_input`], and `norm`, `head_fn`, `head_scale`, `head_base`.
    pub module: Option<Named>,
}

/// The names of a site's weights: projection, scale, base, norm.
type Site = [&'static str; 4];
const ATTN: Site = ["attn_fn", "attn_scale", "attn_base", "attn_norm"];
const FFN: Site = ["ffn_fn", "ffn_scale", "ffn_base", "ffn_norm"];

impl Model {
    /// `[num_tokens, vocab_size]`, stored in f32, of the tokens of one sequence. The weights of a
    /// layer, codes and scales as the values of bytes:
    ///
    /// - of each site, `attn` and `ffn`: `.._fn` `[24, 4, hidden_size]`, `.._scale`, `.._base`,
    ///   `.._norm`;
    /// - `wq_a_codes`, `wq_a_scales`, `q_norm`, `wq_b_codes`, `wq_b_scales`, `wkv_codes`,
    ///   `wkv_scales`, `kv_norm`, `sink`, `wo_a`, `wo_b_codes`, `wo_b_scales`;
    /// - with entries `compressor` (values, then gates), `ape`, `compressor_norm`; with an indexer
    ///   `index_wq_b` (decoded), `index_weights`, `index_compressor`, `index_ape`, `index_norm`;
    /// - `gate_weight`, `bias` or `tid2eid`, and the weights of [`QuantizedProducts`].
    ///
    /// An unquantized layer has `wq_a`, `wq_b`, `wkv` and `wo_b` instead of codes and scales, and
    /// the weights of [`PlainProducts`]. Its rows, entries and keys are not quantized.
    ///
    /// # Errors
    /// Those of the operators.
    pub fn logits(&self, token_ids: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
        let streams = self.streams(token_ids, rounding)?;
        self.head(&streams, &self.shared, rounding)
    }

    /// The same model for so many tokens.
    ///
    /// # Errors
    /// More tokens than its tables have.
    pub fn shortened(&self, tokens: usize) -> Result<Self> {
        let of = |table: &Table| -> Result<Table> {
            Ok(Table { cos: table.cos.narrow(0, 0, tokens)?, sin: table.sin.narrow(0, 0, tokens)? })
        };
        Ok(Self { main: of(&self.main)?, compress: of(&self.compress)?, ..self.clone() })
    }

    /// The embeddings of tokens, so many times, `[num_tokens, times, hidden_size]`.
    fn embedding(&self, token_ids: &Tensor, times: usize) -> Result<Tensor> {
        let embedded = Named::new()
            .with("table", self.shared.tensor("embed")?.clone())
            .with("token_ids", token_ids.clone());
        Ok(embed_streams::forward(&embedded, times)?.tensor("out")?.clone())
    }

    /// The streams after the last layer.
    fn streams(&self, token_ids: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
        let mut streams = self.embedding(token_ids, NUM_STREAMS)?;
        for (kind, w) in &self.layers {
            streams = self.layer(&streams, *kind, w, token_ids, rounding)?;
        }
        Ok(streams)
    }

    /// The streams after a layer.
    fn layer(
        &self,
        streams: &Tensor,
        kind: Kind,
        w: &Named,
        token_ids: &Tensor,
        rounding: &mut Rounding,
    ) -> Result<Tensor> {
        let streams = self
            .site(streams, w, ATTN, rounding, |u, rounding| self.attention(kind, u, w, rounding))?;
        self.site(&streams, w, FFN, rounding, |u, rounding| self.experts(u, token_ids, w, rounding))
    }

    /// The streams after a sublayer.
    fn site(
        &self,
        streams: &Tensor,
        w: &Named,
        [projection, scale, base, norm]: Site,
        rounding: &mut Rounding,
        sublayer: impl FnOnce(&Tensor, &mut Rounding) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let x = Named::new().with("streams", streams.clone());
        let mix = x.clone().with("fn", w.tensor(projection)?.clone());
        let mix = mix.with("scale", w.tensor(scale)?.clone());
        let mix = mix.with("base", w.tensor(base)?.clone());
        let mix = mhc_mix::forward(&mix, self.numbers.streams, rounding)?;
        let of = |name| -> Result<Tensor> { Ok(mix.tensor(name)?.clone()) };
        let h = mhc_pre::forward(&x.clone().with("pre", of("pre")?), None, rounding)?;
        let u = self.norm(&rounding.bf16(h.tensor("h")?)?, w.tensor(norm)?, rounding)?;
        let y = sublayer(&u, rounding)?;
        let y = rounding.bf16(&y)?;
        let post = x.with("y", y).with("post", of("post")?).with("comb", of("comb")?);
        let out = mhc_post::forward(&post, rounding)?;
        rounding.bf16(out.tensor("out")?)
    }

    /// Rows over their root mean square, times a weight, as stored.
    fn norm(&self, x: &Tensor, weight: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
        let inputs = Named::new().with("x", x.clone()).with("weight", weight.clone());
        let y = rms_norm::forward(&inputs, self.numbers.streams.norm_eps, rounding)?;
        rounding.bf16(y.tensor("y")?)
    }

    fn table(&self, kind: Kind) -> &Table {
        if kind == Kind::Window { &self.main } else { &self.compress }
    }

    fn attention(
        &self,
        kind: Kind,
        u: &Tensor,
        w: &Named,
        rounding: &mut Rounding,
    ) -> Result<Tensor> {
        let [q, qr, rows] = self.projected(kind, u, w, rounding)?;
        let (keys, chosen) = self.entries(kind, u, &qr, w, rounding)?;
        let k = Tensor::cat(&[Some(rows), keys].into_iter().flatten().collect::<Vec<_>>(), 0)?;
        let (indices, topk) = lists(&chosen, u.dim(0)?, self.numbers.window);
        let inputs = sparse_attention::Inputs {
            softmax_scale: (q.dim(2)? as f64).sqrt().recip(),
            q,
            k,
            value: Value::Shared,
            sink: Some(w.tensor("sink")?.clone()),
            indices,
            topk,
            topk_length: None,
        };
        let out = sparse_attention::forward(&inputs, rounding)?.out;
        let rotation = self.rotation(kind, rounding.bf16(&out)?, true);
        let y = match is_plain(w) {
            true => output_projection::forward(&rotation, w, rounding)?,
            false => {
                output_projection::forward_quantized(&rotation, w, ScaleLayout::Plain, rounding)?
            }
        };
        Ok(y.tensor("y")?.clone())
    }

    /// The query heads `[num_tokens, num_heads, head_dim]`, qr, and the rows of K = V, as stored.
    fn projected(
        &self,
        kind: Kind,
        u: &Tensor,
        w: &Named,
        rounding: &mut Rounding,
    ) -> Result<[Tensor; 3]> {
        let (numbers, table) = (&self.numbers, self.table(kind));
        let (num_heads, eps, positions) = (numbers.num_heads, numbers.streams.norm_eps, None);
        let (cos, sin) = (table.cos.clone(), table.sin.clone());
        let inputs = w.clone().with("h", u.clone());
        let turn = query_projection::Turn { cos, sin, positions, num_heads, eps };
        let query = match is_plain(w) {
            true => query_projection::forward(&turn, &inputs, rounding)?,
            false => query_projection::forward_quantized(&turn, &inputs, rounding)?,
        };
        let q = rounding.bf16(query.tensor("q")?)?;
        let (tokens, width) = q.dims2()?;
        let q = q.reshape((tokens, num_heads, width / num_heads))?;
        let qr = rounding.bf16(query.tensor("qr")?)?;
        let (cos, sin) = (table.cos.clone(), table.sin.clone());
        let turn = kv_projection::Turn { cos, sin, positions: None, eps };
        let rows = match is_plain(w) {
            true => kv_projection::forward(&turn, &inputs, rounding)?,
            false => kv_projection::forward_cached(&turn, &inputs, numbers.row, rounding)?,
        };
        Ok([q, qr, rounding.bf16(rows.tensor("kv")?)?])
    }

    fn rotation(&self, kind: Kind, x: Tensor, inverse: bool) -> rope::Inputs {
        let Table { cos, sin } = self.table(kind).clone();
        rope::Inputs { x, cos, sin, positions: None, inverse }
    }

    /// The entries of a layer as the cache decodes them, and which of them each token reads.
    fn entries(
        &self,
        kind: Kind,
        u: &Tensor,
        qr: &Tensor,
        w: &Named,
        rounding: &mut Rounding,
    ) -> Result<(Option<Tensor>, Vec<Vec<usize>>)> {
        let tokens = u.dim(0)?;
        let count = kind.ratio().map_or(0, |ratio| tokens / ratio);
        let Some(ratio) = kind.ratio().filter(|_| count > 0) else {
            return Ok((None, vec![Vec::new(); tokens]));
        };
        let names = ["compressor", "ape", "compressor_norm"];
        let epilogue = if is_plain(w) { Epilogue::None } else { Epilogue::Fp8 };
        let entries = self.compressed(ratio, u, w, names, epilogue, rounding)?;
        let seen: Vec<usize> = (0..tokens).map(|token| (token + 1) / ratio).collect();
        let chosen = match kind {
            Kind::Csa => self.chosen(u, qr, w, &seen, rounding)?,
            _ => seen.into_iter().map(|seen| (0..seen).collect()).collect(),
        };
        Ok((Some(entries), chosen))
    }

    /// The entries of all whole groups, as stored.
    fn compressed(
        &self,
        ratio: usize,
        u: &Tensor,
        w: &Named,
        [projection, ape, norm]: [&'static str; 3],
        epilogue: Epilogue,
        rounding: &mut Rounding,
    ) -> Result<Tensor> {
        let both = wide_product(u, w.tensor(projection)?, rounding)?;
        let (tokens, width) = (u.dim(0)?, both.dim(1)? / 2);
        let count = tokens / ratio;
        let Table { cos, sin } = self.compress.clone();
        let inputs = compressor::Inputs {
            kv: both.narrow(1, 0, width)?.contiguous()?,
            gate: both.narrow(1, width, width)?.contiguous()?,
            ape: w.tensor(ape)?.clone(),
            cu_seqlens: vec![0, tokens as i32],
            cu_entries: vec![0, count as i32],
            num_entries: count,
            finish: Finish {
                norm_weight: w.tensor(norm)?.clone(),
                cos,
                sin,
                eps: self.numbers.streams.norm_eps,
                stored: Format::BF16,
                epilogue,
            },
        };
        let entries = compressor::forward(&inputs, rounding)?;
        rounding.bf16(entries.tensor("entries")?)
    }

    /// The entries that the indexer chooses for each token, of as many as it sees.
    fn chosen(
        &self,
        u: &Tensor,
        qr: &Tensor,
        w: &Named,
        seen: &[usize],
        rounding: &mut Rounding,
    ) -> Result<Vec<Vec<usize>>> {
        let names = ["index_compressor", "index_ape", "index_norm"];
        let epilogue = if is_plain(w) { Epilogue::None } else { Epilogue::HadamardFp4 };
        let keys = self.compressed(4, u, w, names, epilogue, rounding)?;
        let [q, head_weights] = self.index_query(u, qr, w, rounding)?;
        let inputs = indexer_logits::Inputs {
            q,
            w: head_weights,
            columns: keys.dim(0)?,
            k: keys,
            k_scales: None,
            keys: Keys::Causal { ratio: 4, q_off: None, sequences: None },
            sm_scale: 1.0,
        };
        let scores = indexer_logits::forward(&inputs, Accumulator::F32, rounding)?;
        let lengths: Vec<f64> = seen.iter().map(|&seen| seen as f64).collect();
        let lengths = Tensor::new(lengths, scores.device())?;
        let ranked = Named::new().with("scores", scores).with("lengths", lengths);
        let count = self.numbers.index_topk;
        let ranked = topk::forward(&ranked, count, Index::Column)?;
        let indices = values(ranked.tensor("indices")?)?;
        let of_token = |row: &[f64]| -> Vec<usize> {
            row.iter().filter(|&&at| at >= 0.0).map(|&at| at as usize).collect()
        };
        Ok(indices.chunks(count).map(of_token).collect())
    }

    /// The indexer's queries as its kernels decode them, and its head weights.
    fn index_query(
        &self,
        u: &Tensor,
        qr: &Tensor,
        w: &Named,
        rounding: &mut Rounding,
    ) -> Result<[Tensor; 2]> {
        let weights = wide_product(u, w.tensor("index_weights")?, rounding)?;
        let ((tokens, heads), wq_b) = (weights.dims2()?, w.tensor("index_wq_b")?);
        let dim = wq_b.dim(0)? / heads;
        let scale = ((dim * heads) as f64).sqrt().recip() as f32;
        let plain = is_plain(w);
        let x = match plain {
            true => qr.clone(),
            false => simulated(qr, BLOCK, Format::E4M3, rounding)?,
        };
        let product = Named::new().with("x", x).with("w", wq_b.clone());
        let q = linear::forward(&product, rounding)?.tensor("y")?.clone();
        let q = rounding.bf16(&q)?;
        let rotation = self.rotation(Kind::Csa, q.reshape((tokens, heads, dim))?, false);
        if plain {
            // A transform of queries and keys alike changes no score.
            let q = rope::forward(&rotation, rounding)?.y;
            let q = rounding.bf16(&q)?;
            return Ok([q, rounding.f32(&(weights * f64::from(scale))?)?]);
        }
        let query = indexer_query::Inputs { rotation, weights, weights_scale: scale };
        let query = indexer_query::forward(&query, hadamard::Stored::Values, rounding)?;
        let q = rounding.bf16(query.tensor("y")?)?.reshape((tokens * heads, dim))?;
        let q = simulated(&q, 32, Format::E2M1, rounding)?.reshape((tokens, heads, dim))?;
        Ok([q, query.tensor("w")?.clone()])
    }

    fn experts(
        &self,
        u: &Tensor,
        token_ids: &Tensor,
        w: &Named,
        rounding: &mut Rounding,
    ) -> Result<Tensor> {
        let inputs = Named::new()
            .with("hidden", u.clone())
            .with("gate_weight", w.tensor("gate_weight")?.clone())
            .with("token_ids", token_ids.clone());
        let inputs = inputs
            .maybe("bias", w.get("bias").cloned())
            .maybe("tid2eid", w.get("tid2eid").cloned());
        let topk = self.numbers.topk;
        let layer = moe::Layer {
            topk,
            route_scale: self.numbers.route_scale,
            limit: self.numbers.limit,
            alignment: 1,
            num_positions: u.dim(0)? * topk,
        };
        let of = |weights| Quantized {
            weights,
            group: BLOCK,
            bytes: true,
            layout: ScaleLayout::Plain,
            accumulator: Accumulator::F32,
        };
        let (routed, shared) = (of(Weights::Mxfp4), of(Weights::Fp8));
        let found = match is_plain(w) {
            true => moe::forward(&inputs, &layer, &PlainProducts { inputs: w }, rounding)?,
            false if w.get("w1").is_some() => {
                moe::forward(&inputs, &layer, &Nvfp4Products { inputs: w, shared }, rounding)?
            }
            false => {
                let products = QuantizedProducts { inputs: w, routed, shared };
                moe::forward(&inputs, &layer, &products, rounding)?
            }
        };
        Ok(found.tensor("out")?.clone())
    }

    /// The logits, by the head mix and the norm of `w`.
    fn head(&self, streams: &Tensor, w: &Named, rounding: &mut Rounding) -> Result<Tensor> {
        let mhc_mix::Numbers { norm_eps, hc_eps, .. } = self.numbers.streams;
        let mix = Named::new()
            .with("streams", streams.clone())
            .with("fn", w.tensor("head_fn")?.clone())
            .with("scale", w.tensor("head_scale")?.clone())
            .with("base", w.tensor("head_base")?.clone());
        let x = mhc_head::forward(&mix, mhc_head::Numbers { norm_eps, hc_eps }, rounding)?;
        let hidden = self.norm(&rounding.bf16(x.tensor("out")?)?, w.tensor("norm")?, rounding)?;
        let head =
            Named::new().with("hidden", hidden).with("weight", self.shared.tensor("head")?.clone());
        Ok(lm_head::forward(&head, rounding)?.tensor("logits")?.clone())
    }
}

/// Whether the weights of a layer are not quantized.
fn is_plain(w: &Named) -> bool {
    w.get("wq_a").is_some()
}

/// The product of bf16 rows with a bf16 weight, stored in f32.
fn wide_product(x: &Tensor, w: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
    let inputs = Named::new().with("x", x.clone()).with("w", w.clone());
    let y = linear::forward(&inputs, rounding)?;
    rounding.f32(y.tensor("y")?)
}

/// The rows that each token attends to: those of its window, then its entries, which come after
/// the rows of all tokens. Lists of one length, padded with -1.
fn lists(chosen: &[Vec<usize>], tokens: usize, window: usize) -> (Vec<i32>, usize) {
    let of_token = |(token, entries): (usize, &Vec<usize>)| -> Vec<i32> {
        let window = (token + 1).saturating_sub(window)..=token;
        window.chain(entries.iter().map(|entry| tokens + entry)).map(|row| row as i32).collect()
    };
    let lists: Vec<Vec<i32>> = chosen.iter().enumerate().map(of_token).collect();
    let topk = lists.iter().map(Vec::len).max().unwrap_or(0);
    let padded = lists.into_iter().flat_map(|mut list| {
        list.resize(topk, -1);
        list
    });
    (padded.collect(), topk)
}

mod module;
#[cfg(test)]
mod tests;
