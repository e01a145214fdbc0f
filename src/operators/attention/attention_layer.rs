//! `attention_layer` (training 6, 9 and 14): an attention layer, forward and backward, composed as
//! in a training step: over a window alone, or over a window and compressed entries (CSA with a
//! ratio of 4 and overlap, HCA with 128).
//!
//! ```text
//! forward    q = query_projection(h)     kv = kv_projection(h)
//!            entries = compressor(h wkv_c^T, h wgate_c^T)          keys = kv and then entries
//!            attn_out, lse = attention(q, keys, sink, lists)       y = output_projection(attn_out)
//! backward   dattn_out, dwo_a, dwo_b of dy
//!            dq, dkeys, dsink of dattn_out, on the saved attn_out and lse
//!            dwq_a, dq_norm, dwq_b of dq     dwkv, dkv_norm of dkeys
//!            dape, dc_norm, dwkv_c, dwgate_c of dkeys
//!            dh = the sum of what all projections give
//! ```
//!
//! Each operator may be correct by itself, and still a layer may be wrong. A row of kv is key and
//! value, so its rotation reaches the output, which is turned back by the position of its token. h
//! has gradients from several sides. What one backward reads, another may have overwritten. Heads
//! of q, of the output and of the groups of wo_a must be the same ones. Rows of entries follow
//! those of tokens, and an entry is seen only from its last token on.
//!
//! Lists are given: which entries a token lists is the indexer's choice (`indexer_distillation`).
//! Packed sequences have as many tokens each, but for the last one. Positions start again in each,
//! and no list names a key of another.

use dsv4_kernels::attention::inverse_rope_quantize::ScaleLayout;
use dsv4_kernels::cache::compressor::{self, Epilogue, Extents, OVERLAP_RATIO};
use dsv4_kernels::experts::moe_reduce;
use dsv4_kernels::projections::linear;
use dsv4_reference::attention::attention_layer as reference;
use dsv4_reference::attention::sparse_attention::{Saved, sink_gradient_of_saved};
use dsv4_reference::projections::rope::{self, YarnParameters};
use dsv4_runtime::TensorView;
use rand::seq::index;

use crate::operator::fields::{Implementation, elements, extent};
use crate::operator::prelude::*;
use crate::operators::attention::inverse_rope_quantize::check_groups;
use crate::operators::attention::sinks::Sinks;
use crate::operators::attention::sparse_attention::{
    KeyGradients, SparseAttention, SparseAttentionCase,
};
use crate::operators::projections::chain::{ChainProduct, parted};
use crate::operators::projections::kv_projection::{KvProjection, KvProjectionCase, Stored};
use crate::operators::projections::output_projection::{
    OutputProjection, OutputProjectionCase, Quantized,
};
use crate::operators::projections::query_projection::{QueryProjection, QueryProjectionCase};
use crate::operators::projections::rms_norm::sizes_of_rows;
use crate::operators::projections::rope::TableForm;

/// The operators in sequence. `FAULT` plants an error of the composition, which no kernel has; the
/// tests show that it is found.
pub struct AttentionLayer<const FAULT: u8 = 0>;

/// h's gradient lacks what comes through the queries.
pub const TERM_OF_QUERIES_MISSING: u8 = 1;

/// h's gradient has what comes through the keys twice, and nothing of the queries.
pub const TERM_OF_KEYS_TWICE: u8 = 2;

/// The attention's backward reads keys before their rotation.
pub const KEYS_NOT_TURNED_IN_BACKWARD: u8 = 3;

/// A case: sizes, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionLayerCase {
    /// Tokens of all sequences; 0 is allowed.
    pub num_tokens: usize,
    /// Tokens of each sequence but the last one, which may have fewer.
    pub sequence_length: usize,
    /// Tokens that a token sees, itself included.
    pub window: usize,
    /// Tokens of a compressed entry; 0 for a layer over a window alone.
    pub ratio: usize,
    /// Whether entries are pooled from the tokens of two groups: with a ratio of 4.
    pub overlaps: bool,
    /// Entries that a token lists, drawn from those that it sees; 0 without entries.
    pub listed: usize,
    /// Features of h and y.
    pub hidden_size: usize,
    /// Features between wq_a and wq_b.
    pub q_lora_rank: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Channels of a head and of kv: a multiple of 16.
    pub head_dim: usize,
    /// Channels that rotate: the last ones of a head. Even, at least 2.
    pub rope_dim: usize,
    /// Groups of heads of wo_a.
    pub o_groups: usize,
    /// Features between wo_a and wo_b, of each group.
    pub o_lora_rank: usize,
    /// Which kernels the attention takes.
    pub implementation: Implementation,
    /// Added to mean squares, of all norms.
    pub eps: f32,
    /// h.
    #[serde(flatten)]
    pub data: Data,
}

/// Which row of a term of h's gradient belongs to each token: its own, as `moe_reduce` asks.
const ROWS: &str = "token_topk_to_pos";

/// The compressor's products.
const PRODUCTS: [ChainProduct; 2] = [
    ChainProduct {
        x: ["h", "", ""],
        w: ["wkv_c", "", ""],
        y: "c_kv",
        gradients: ["dh_of_c_kv", "dwkv_c", "dc_kv"],
    },
    ChainProduct {
        x: ["h", "", ""],
        w: ["wgate_c", "", ""],
        y: "c_gate",
        gradients: ["dh_of_c_gate", "dwgate_c", "dc_gate"],
    },
];

/// A case of tokens, tokens of a sequence and window; of features, rank, heads and channels; of
/// groups and their rank.
fn plain(
    [num_tokens, sequence_length, window]: [usize; 3],
    [hidden_size, q_lora_rank, num_heads, head_dim]: [usize; 4],
    [o_groups, o_lora_rank]: [usize; 2],
) -> AttentionLayerCase {
    AttentionLayerCase {
        num_tokens,
        sequence_length,
        window,
        ratio: 0,
        overlaps: false,
        listed: 0,
        hidden_size,
        q_lora_rank,
        num_heads,
        head_dim,
        rope_dim: head_dim / 4 * 2,
        o_groups,
        o_lora_rank,
        implementation: Implementation::Portable,
        eps: 1e-6,
        data: Data::normal(1.0),
    }
}

/// With entries of so many tokens, of which a token lists so many; those of four tokens overlap.
fn compressed(ratio: usize, listed: usize) -> impl Fn(AttentionLayerCase) -> AttentionLayerCase {
    move |case| AttentionLayerCase { ratio, overlaps: ratio == OVERLAP_RATIO, listed, ..case }
}

fn hopper(case: AttentionLayerCase) -> AttentionLayerCase {
    AttentionLayerCase { implementation: Implementation::Hopper, ..case }
}

impl AttentionLayerCase {
    fn queries(&self) -> QueryProjectionCase {
        QueryProjectionCase {
            num_tokens: self.num_tokens,
            hidden_size: self.hidden_size,
            q_lora_rank: self.q_lora_rank,
            num_heads: self.num_heads,
            head_dim: self.head_dim,
            rope_dim: self.rope_dim,
            eps: self.eps,
            table: TableForm::RowPerToken,
            table_rows: 0,
            quantized: false,
            data: self.data,
        }
    }

    fn keys(&self) -> KvProjectionCase {
        KvProjectionCase {
            num_tokens: self.num_tokens,
            hidden_size: self.hidden_size,
            nope_dim: self.head_dim.saturating_sub(self.rope_dim),
            rope_dim: self.rope_dim,
            eps: self.eps,
            table: TableForm::RowPerToken,
            table_rows: 0,
            stored: Stored::Rows,
            num_pages: 0,
            page_size: 1,
            data: self.data,
        }
    }

    fn attention(&self) -> SparseAttentionCase {
        let Self { num_tokens, num_heads, head_dim, implementation, .. } = *self;
        let num_keys = num_tokens.saturating_add(self.num_entries());
        let slots = self.window.saturating_add(self.listed);
        SparseAttentionCase {
            implementation,
            key_gradients: KeyGradients::Deterministic,
            seed: self.data.seed,
            ..SparseAttentionCase::plain(num_tokens, num_heads, head_dim, num_keys, slots)
        }
    }

    fn outputs(&self) -> OutputProjectionCase {
        OutputProjectionCase {
            num_tokens: self.num_tokens,
            num_heads: self.num_heads,
            head_dim: self.head_dim,
            rope_dim: self.rope_dim,
            o_groups: self.o_groups,
            o_lora_rank: self.o_lora_rank,
            hidden_size: self.hidden_size,
            table: TableForm::RowPerToken,
            table_rows: 0,
            quantized: Quantized::None,
            layout: ScaleLayout::Plain,
            data: self.data,
        }
    }

    /// The position of a token in its sequence.
    fn position(&self, token: usize) -> usize {
        token % self.sequence_length.max(1)
    }

    fn num_sequences(&self) -> usize {
        self.num_tokens.div_ceil(self.sequence_length.max(1))
    }

    /// Whether there are entries.
    fn compresses(&self) -> bool {
        self.ratio > 0
    }

    fn entries_of(&self, length: usize) -> usize {
        length.checked_div(self.ratio).unwrap_or(0)
    }

    /// Entries of so many tokens in sequences.
    fn entries_before(&self, token: usize) -> usize {
        let length = self.sequence_length.max(1);
        let whole = (token / length).saturating_mul(self.entries_of(length));
        whole.saturating_add(self.entries_of(token % length))
    }

    /// Entries of all sequences.
    fn num_entries(&self) -> usize {
        self.entries_before(self.num_tokens)
    }

    /// First token and first entry of each sequence, and their ends.
    fn ends(&self) -> [Vec<i32>; 2] {
        let starts = (0..self.num_tokens).step_by(self.sequence_length.max(1));
        let tokens: Vec<usize> = starts.chain([self.num_tokens]).collect();
        let entries = tokens.iter().map(|token| self.entries_before(*token) as i32).collect();
        [tokens.into_iter().map(|token| token as i32).collect(), entries]
    }

    /// Columns of the compressor's products.
    fn width(&self) -> usize {
        if self.overlaps { self.head_dim.saturating_mul(2) } else { self.head_dim }
    }

    fn extents(&self) -> Extents {
        let Self { num_tokens, ratio, head_dim, .. } = *self;
        Extents {
            num_tokens,
            num_entries: self.num_entries(),
            ratio,
            width: self.width(),
            head_dim,
        }
    }

    /// How many projections read h besides that of the queries.
    fn terms(&self) -> usize {
        if self.compresses() { 1 + PRODUCTS.len() } else { 1 }
    }

    /// The keys that a token lists: entries that end before it or with it, drawn without
    /// repetition, then the rows of its window, the nearest last; -1 where there are fewer.
    fn lists(&self) -> Vec<i32> {
        let of_token = |token: usize| {
            let position = self.position(token);
            let seen = self.entries_of(position + 1);
            let mut draw = Draw::numbered(self.data.seed, "entries", token);
            let drawn = index::sample(draw.rng(), seen, self.listed.min(seen)).into_vec();
            let first = (self.num_tokens + self.entries_before(token - position)) as i32;
            let absent = vec![-1; self.listed - drawn.len()];
            let entries = drawn.into_iter().map(move |entry| first + entry as i32);
            let window = (0..self.window).rev().map(move |distance| {
                if distance <= position { (token - distance) as i32 } else { -1 }
            });
            entries.chain(absent).chain(window)
        };
        (0..self.num_tokens).flat_map(of_token).collect()
    }

    fn of_oracle(&self, t: &Bound<'_>) -> OracleResult<reference::Layer> {
        Ok(reference::Layer {
            cos: t.f64("cos")?,
            sin: t.f64("sin")?,
            indices: t.host().i32s("indices"),
            slots: self.window + self.listed,
            compression: self.compression(t)?,
            num_heads: self.num_heads,
            eps: t.scalar("eps", self.eps.into()),
            softmax_scale: t.scalar("softmax_scale", self.attention().softmax_scale.into()),
        })
    }

    fn compression(&self, t: &Bound<'_>) -> OracleResult<Option<reference::Compression>> {
        let tables = || OracleResult::Ok([t.f64("entry_cos")?, t.f64("entry_sin")?]);
        let tables = self.compresses().then(tables).transpose()?;
        Ok(tables.map(|[cos, sin]| reference::Compression {
            cu_seqlens: t.host().i32s("cu_seqlens"),
            cu_entries: t.host().i32s("cu_entries"),
            num_entries: self.num_entries(),
            cos,
            sin,
        }))
    }
}

impl<const FAULT: u8> Operator for AttentionLayer<FAULT> {
    type Case = AttentionLayerCase;
    const SUM_LANES: usize = 4;

    const ABOUT: About = About {
        name: "attention_layer",
        family: Family::Attention,
        summary: "an attention layer over a window and compressed entries: projections, compressor, \
                  attention, output projection, and the gradients of all",
        specification: &[
            "inference 5.1",
            "inference 6",
            "inference 8",
            "inference 9",
            "training 9",
            "training 14",
        ],
        paths: &[
            "linear_forward_large",
            "linear_forward_one",
            "linear_forward_small",
            "linear_forward_scalar",
            "linear_sum",
            "rms_norm_forward_warp",
            "rms_norm_forward_block",
            "rms_norm_forward_block_few",
            "rms_norm_forward_scalar",
            "query_norm_rope_vector",
            "rope_forward",
            "rope_forward_scalar",
            "compressor_overlap_vector",
            "compressor_pool_vector",
            "compressor_norm_vector",
            "sparse_attention_forward<16>",
            "sparse_attention_forward<64>",
            "sparse_attention_hopper_forward",
            "sparse_attention_delta",
            "sparse_attention_dsink",
            "sparse_attention_zero",
            "sparse_attention_cast",
            "sparse_attention_backward<16,deterministic>",
            "sparse_attention_backward<64,deterministic>",
            "sparse_attention_hopper_backward<deterministic>",
            "sparse_attention_count",
            "sparse_attention_reserve",
            "sparse_attention_fill",
            "sparse_attention_order",
            "sparse_attention_sum",
            "moe_reduce_forward_vector",
            "moe_reduce_forward_scalar",
            "backward query_norm_rope_backward_vector",
            "backward linear_dx_large",
            "backward linear_dx_small",
            "backward linear_dx_scalar",
            "backward linear_dw_large",
            "backward linear_dw_scalar",
            "backward linear_sum",
            "backward compressor_overlap_backward_vector",
            "backward compressor_norm_backward_vector",
            "backward compressor_pool_backward_vector",
            "backward compressor_sums_vector",
            "backward rms_norm_backward_warp",
            "backward rms_norm_backward_block",
            "backward rms_norm_backward_scalar",
            "backward rms_norm_dweight",
            "backward rope_forward",
            "backward rope_forward_scalar",
        ],
        modules: Vec::new,
        cases: [4, 8, 24],
    };

    const CHAIN: &'static [&'static str] = &[
        "linear",
        "rms_norm",
        "query_norm_rope",
        "rope",
        "compressor",
        "sparse_attention",
        "moe_reduce",
    ];

    const GOLDEN: &'static [&'static str] = &["attention_csa", "attention_hca", "attention_swa"];

    fn tensors(c: &AttentionLayerCase) -> Specs {
        let (bf16, f32, i32, normal) = (DType::Bf16, DType::F32, DType::I32, Distribution::Normal);
        let tokens = axis("num_tokens", c.num_tokens);
        let hidden = axis("hidden_size", c.hidden_size).not_empty();
        let rank = axis("q_lora_rank", c.q_lora_rank).multiples(1, 8192);
        let heads = axis("num_heads", c.num_heads).not_empty();
        let dim = axis("head_dim", c.head_dim).multiples(16, 512);
        let (all, half) = (
            axis("all_channels", c.num_heads.saturating_mul(c.head_dim)),
            axis("half_rope_dim", c.rope_dim / 2),
        );
        let output_case = c.outputs();
        let (groups, group_rank) = (
            axis("o_groups", c.o_groups).not_empty(),
            axis("o_lora_rank", c.o_lora_rank).not_empty(),
        );
        let (group_width, latent) =
            (axis("group_width", output_case.group_width()), axis("latent", output_case.latent()));
        let deviation = |depth: usize| (depth.max(1) as f64).sqrt().recip();
        let weight = |name, axes: &[_], depth: usize| {
            input(name, bf16, axes).rows().drawn(normal, deviation(depth))
        };
        let compresses = c.compresses();
        let (keys, slots) = (
            axis("num_keys", c.num_tokens.saturating_add(c.num_entries())),
            axis("slots", c.window.saturating_add(c.listed)),
        );
        let of_tokens = [tokens, axis("width", c.width())];
        let entries = axis("num_entries", c.num_entries());
        let of_ape = [axis("ratio", c.ratio), of_tokens[1]];
        let ends = [axis("num_sequences_and_one", c.num_sequences() + 1)];
        let table = [axis("positions", c.sequence_length), half];
        let terms = axis("terms", c.terms());
        let tensors = [
            input("h", bf16, &[tokens, hidden]).rows().drawn_as(c.data),
            weight("wq_a", &[rank, hidden], c.hidden_size),
            input("q_norm", f32, &[rank]).drawn(normal, 1.0),
            weight("wq_b", &[all, rank], c.q_lora_rank),
            weight("wkv", &[dim, hidden], c.hidden_size),
            input("kv_norm", f32, &[dim]).drawn(normal, 1.0),
            input("sink", f32, &[heads]),
            input("cos", f32, &[tokens, half]).rows(),
            input("sin", f32, &[tokens, half]).rows(),
            weight("wkv_c", &[of_tokens[1], hidden], c.hidden_size).when(compresses),
            weight("wgate_c", &[of_tokens[1], hidden], c.hidden_size).when(compresses),
            input("ape", f32, &of_ape).drawn(normal, 1.0).when(compresses),
            input("c_norm", f32, &[dim]).drawn(normal, 1.0).when(compresses),
            input("cu_seqlens", i32, &ends).when(compresses),
            input("cu_entries", i32, &ends).when(compresses),
            input("entry_cos", f32, &table).rows().when(compresses),
            input("entry_sin", f32, &table).rows().when(compresses),
            input("indices", i32, &[tokens, slots]).rows(),
            weight("wo_a", &[groups, group_rank, group_width], output_case.group_width())
                .never_infinite(),
            weight("wo_b", &[hidden, latent], output_case.latent()).never_infinite(),
            input(ROWS, i32, &[tokens, terms]),
            output("q_a", bf16, &[tokens, rank]).rows(),
            output("qr", bf16, &[tokens, rank]).rows(),
            output("qr_rstd", f32, &[tokens]),
            // Other layouts of q_b take another kernel, as do those of c_kv: `query_projection` and
            // `compressor` try them.
            output("q_b", bf16, &[tokens, all]).aligned_rows(),
            output("q", bf16, &[tokens, all]).aligned_rows(),
            output("q_rstd", f32, &[tokens, heads]),
            output("kv_a", bf16, &[tokens, dim]).rows(),
            output("n", bf16, &[tokens, dim]).rows(),
            output("kv_rstd", f32, &[tokens]),
            output("c_kv", f32, &of_tokens).aligned_rows().when(compresses),
            output("c_gate", f32, &of_tokens).aligned_rows().when(compresses),
            output("pooled", bf16, &[entries, dim]).when(compresses),
            output("keys", bf16, &[keys, dim]).aligned_rows(),
            output("attn_out", bf16, &[tokens, heads, dim]).aligned_rows(),
            output("lse", f32, &[tokens, heads]),
            output("max_logits", f32, &[tokens, heads]),
            output("rotated", bf16, &[tokens, all]).rows(),
            output("z", bf16, &[tokens, latent]).rows(),
            output("y", bf16, &[tokens, hidden]).rows(),
            upstream("dy", "y"),
            gradient("dz", "z", bf16),
            gradient("dwo_b", "wo_b", f32),
            gradient("drotated", "rotated", bf16),
            gradient("dwo_a", "wo_a", f32),
            gradient("dattn_out", "attn_out", bf16),
            gradient("dq", "q", bf16),
            gradient("dkeys", "keys", bf16),
            gradient("dsink", "sink", f32),
            gradient("dq_b", "q_b", bf16).aligned_rows(),
            gradient("dwq_b", "wq_b", f32),
            gradient("dqr", "qr", bf16),
            gradient("dq_norm", "q_norm", f32),
            gradient("dq_a", "q_a", bf16),
            gradient("dwq_a", "wq_a", f32),
            gradient("dn", "n", bf16),
            gradient("dkv_norm", "kv_norm", f32),
            gradient("dkv_a", "kv_a", bf16),
            gradient("dwkv", "wkv", f32),
            gradient("dape", "ape", f32).when(compresses),
            gradient("dc_norm", "c_norm", f32).when(compresses),
            gradient("dc_kv", "c_kv", bf16).aligned_rows().when(compresses),
            gradient("dwkv_c", "wkv_c", f32).when(compresses),
            gradient("dc_gate", "c_gate", bf16).aligned_rows().when(compresses),
            gradient("dwgate_c", "wgate_c", f32).when(compresses),
            scratch("dh_of_q", bf16, &[tokens, hidden]),
            scratch("dh_of_keys", bf16, &[terms, tokens, hidden]),
            gradient("dh", "h", bf16),
        ];
        Specs::new(c.data.seed, tensors).positive("eps", c.eps)
    }

    fn check(c: &AttentionLayerCase) -> Result<(), Refused> {
        not_empty("sequence_length", c.sequence_length)?;
        not_empty("window", c.window)?;
        if !c.compresses() && c.listed > 0 {
            return refuse("listed", format!("{}: there are no entries", c.listed));
        }
        if c.overlaps != (c.ratio == OVERLAP_RATIO) || c.ratio > compressor::MAX_RATIO {
            let why =
                format!("{} must be at most 128; entries of 4 overlap, others do not", c.ratio);
            return refuse("ratio", why);
        }
        check_groups(c.o_groups, c.num_heads)?;
        QueryProjection::check(&c.queries())?;
        KvProjection::check(&c.keys())?;
        SparseAttention::check(&c.attention())
    }

    fn oracle_elements(c: &AttentionLayerCase) -> u128 {
        SparseAttention::oracle_elements(&c.attention())
    }

    fn strategy(profile: Profile) -> BoxedStrategy<AttentionLayerCase> {
        let [tokens, features] = profile.of([[12, 40], [40, 120], [150, 500]]);
        let tokens = (0..=tokens, extent(tokens, 4), extent(profile.of([9, 40, 140]), 8));
        let features = (extent(features, 8), extent(features, 8).prop_map(|rank| rank.max(2)));
        let head = select(vec![16usize, 32, 48, 64]);
        let heads = (1..=3usize, 1..=profile.of([2usize, 3, 5]), head, 1..=8usize);
        let rank = extent(profile.of([24, 60, 200]), 8);
        let eps = prop_oneof![3 => Just(1e-6f32), 1 => Just(1e-2f32)];
        let ratio = prop_oneof![
            2 => Just((0usize, 0usize)),
            2 => (Just(OVERLAP_RATIO), 0..=9usize),
            1 => (select(vec![1usize, 2, 3, 5, 128]), 0..=9usize),
        ];
        (tokens, features, heads, (rank, ratio), eps, Data::strategy(-8..=8))
            .prop_map(|(tokens, (hidden, q_rank), heads, (o_rank, entries), eps, data)| {
                let ((tokens, length, window), (groups, of_group, dim, half)) = (tokens, heads);
                let case = plain(
                    [tokens, length, window],
                    [hidden, q_rank, groups * of_group, dim],
                    [groups, o_rank],
                );
                let case = case.then(compressed(entries.0, entries.1));
                AttentionLayerCase { rope_dim: 2 * half, eps, data, ..case }
            })
            .boxed()
    }

    fn typical() -> Vec<AttentionLayerCase> {
        vec![
            plain([13, 9, 3], [24, 16, 4, 16], [2, 8]).then(compressed(OVERLAP_RATIO, 2)),
            // Rows of features that are not multiples of 16 bytes.
            plain([5, 9, 3], [13, 7, 3, 16], [3, 5]),
            plain([9, 8, 1], [24, 16, 2, 16], [1, 8]).then(compressed(3, 2)),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<AttentionLayerCase> {
        let mut cases = vec![
            plain([0, 1, 4], [24, 16, 2, 16], [2, 8]),
            plain([1, 1, 1], [8, 8, 1, 16], [1, 8]),
            // Windows longer than any sequence, and sequences of one token.
            plain([7, 3, 12], [16, 8, 2, 16], [1, 8]),
            plain([5, 1, 3], [16, 8, 2, 16], [2, 8]),
            // More tokens than small tiles have, more heads than one block's.
            plain([19, 11, 6], [40, 24, 18, 16], [3, 8]),
            // Split-k.
            plain([2, 2, 2], [584, 8, 1, 16], [1, 8]),
            // A norm with one block for each row, for few rows and for more.
            plain([3, 3, 2], [8, 1032, 1, 16], [1, 8]),
            plain([133, 70, 2], [8, 1032, 1, 16], [1, 8]),
            // Sequences shorter than an entry, beside one that has some; lists without entries.
            plain([7, 3, 2], [16, 8, 1, 16], [1, 8]).then(compressed(OVERLAP_RATIO, 3)),
            plain([18, 9, 2], [16, 8, 1, 16], [1, 8]).then(compressed(OVERLAP_RATIO, 0)),
            // Every entry that is seen, and the model's ratios.
            plain([12, 12, 1], [13, 8, 2, 48], [2, 5]).then(compressed(1, 12)),
            plain([134, 134, 4], [16, 8, 1, 16], [1, 8]).then(compressed(128, 1)),
            plain([6, 6, 2], [24, 16, 3, 512], [1, 16])
                .then(compressed(OVERLAP_RATIO, 1))
                .then(hopper),
        ];
        if profile == Profile::Full {
            let model = plain([300, 200, 128], [1024, 512, 16, 512], [4, 128]);
            let model = AttentionLayerCase { rope_dim: 64, ..model };
            let ratios = [(OVERLAP_RATIO, 64), (128, 2)];
            let of_ratio = |(ratio, listed)| model.clone().then(compressed(ratio, listed));
            cases.extend(ratios.into_iter().map(of_ratio).chain([model.clone()]).map(hopper));
        }
        cases
    }

    fn fastest(c: &AttentionLayerCase, environment: &Environment) -> AttentionLayerCase {
        let SparseAttentionCase { implementation, .. } =
            SparseAttention::fastest(&c.attention(), environment);
        AttentionLayerCase { implementation, ..c.clone() }
    }

    fn cannot_run(c: &AttentionLayerCase, environment: &Environment) -> Option<String> {
        SparseAttention::cannot_run(&c.attention(), environment)
    }

    fn amend(c: &AttentionLayerCase, tensors: &mut Tensors) -> OracleResult<()> {
        let parameters = YarnParameters { rope_dim: c.rope_dim, ..YarnParameters::compress() };
        let positions: Vec<i64> = (0..c.num_tokens).map(|token| c.position(token) as i64).collect();
        let (cos, sin) = rope::table(&rope::inv_freq_f32(&parameters)?, &positions)?;
        tensors.set("cos", &elements(&cos)?);
        tensors.set("sin", &elements(&sin)?);
        tensors.set_i32s("indices", &c.lists());
        let row =
            |token: usize| (0..c.terms()).map(move |term| (term * c.num_tokens + token) as i32);
        tensors.set_i32s(ROWS, &(0..c.num_tokens).flat_map(row).collect::<Vec<_>>());
        if c.compresses() {
            let [cu_seqlens, cu_entries] = c.ends();
            tensors.set_i32s("cu_seqlens", &cu_seqlens);
            tensors.set_i32s("cu_entries", &cu_entries);
            let positions: Vec<i64> = (0..c.sequence_length as i64).collect();
            let (cos, sin) = rope::table(&rope::inv_freq_f32(&parameters)?, &positions)?;
            tensors.set("entry_cos", &elements(&cos)?);
            tensors.set("entry_sin", &elements(&sin)?);
        }
        if let Some(sink) = Sinks::Normal.draw(c.data.seed, c.num_heads, 0.0) {
            tensors.put("sink", sink);
        }
        Ok(())
    }

    fn forward(
        c: &AttentionLayerCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        reference::forward(&c.of_oracle(t)?, &named(t)?, rounding)
    }

    fn backward(
        c: &AttentionLayerCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        reference::backward(&c.of_oracle(t)?, &named(t)?, rounding)
    }

    fn backward_of_saved(
        c: &AttentionLayerCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        let layer = c.of_oracle(t)?;
        let saved = Saved { out: t.f64("attn_out")?, lse: t.f64("lse")? };
        let attended = layer.attention(&t.f64("q")?, &t.f64("keys")?, &t.f64("sink")?)?;
        let dout = t.f64("dattn_out")?;
        Ok(Named::new().maybe("dsink", sink_gradient_of_saved(&attended, &saved, &dout, rounding)?))
    }

    /// Sequential launches share the memory: they have one order.
    fn workspaces(
        c: &AttentionLayerCase,
        v: &Views,
        device: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        let (tokens, width, hidden) = (c.num_tokens, c.width(), c.hidden_size);
        let of_compressor = if c.compresses() {
            let forward = linear::forward_workspace_bytes(device, 1, tokens, width, hidden);
            let backward = linear::backward_workspace_bytes(device, 1, tokens, width, hidden);
            let pooling = compressor::workspace_bytes(device, &c.extents());
            vec![("workspace", forward.max(backward).max(pooling))]
        } else {
            Vec::new()
        };
        let of_steps = [
            of_compressor,
            QueryProjection::workspaces(&c.queries(), v, device)?,
            KvProjection::workspaces(&c.keys(), v, device)?,
            SparseAttention::workspaces(&c.attention(), &attention(c, v, ATTENDED)?, device)?,
            OutputProjection::workspaces(&c.outputs(), v, device)?,
        ];
        let bytes = of_steps.iter().flatten().map(|(_, bytes)| *bytes).max();
        Ok(vec![("workspace", bytes.unwrap_or(0))])
    }

    fn launch(
        c: &AttentionLayerCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        QueryProjection::launch(&c.queries(), v, run)?;
        run.freeze(&v["q"])?;
        let of_kv = v.clone().with("kv", &rows(&v["keys"], 0, c.num_tokens));
        KvProjection::launch(&c.keys(), &of_kv.renamed(OF_KEYS), run)?;
        if c.compresses() {
            for product in &PRODUCTS {
                product.launch(v, run, false)?;
            }
            ["c_kv", "c_gate"].into_iter().try_for_each(|name| run.freeze(&v[name]))?;
            let entries = rows(&v["keys"], c.num_tokens, c.num_entries());
            let made = v.only(COMPRESSED).renamed(OF_ENTRIES).with("entries", &entries);
            let made = made.with("pooled", &v["pooled"]);
            run.launch(|device| compressor::forward(device, &made, c.eps, Epilogue::None))?;
            run.freeze(&v["pooled"])?;
        }
        run.freeze(&v["keys"])?;
        SparseAttention::launch(&c.attention(), &attention(c, v, ATTENDED)?, run)?;
        // What the attention's backward reads.
        ["attn_out", "lse"].into_iter().try_for_each(|name| run.freeze(&v[name]))?;
        OutputProjection::launch(&c.outputs(), v, run)
    }

    fn launch_backward(
        c: &AttentionLayerCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        OutputProjection::launch_backward(&c.outputs(), v, run)?;
        run.freeze(&v["dattn_out"])?;
        let mut attended = attention(c, v, GRADIENTS)?;
        if FAULT == KEYS_NOT_TURNED_IN_BACKWARD {
            attended.put("k", v["n"].clone());
        }
        SparseAttention::launch_backward(&c.attention(), &attended, run)?;
        ["dq", "dkeys"].into_iter().try_for_each(|name| run.freeze(&v[name]))?;
        let own = v.without(&["dh"]);
        let of_q = own.renamed(&[("dh_of_q", "dh")]);
        QueryProjection::launch_backward(&c.queries(), &of_q, run)?;
        let terms = &v["dh_of_keys"];
        let of_kv = own.clone().with("dkv", &rows(&v["dkeys"], 0, c.num_tokens));
        let of_kv = of_kv.with("dh", &term(terms, 0)).renamed(OF_KEYS);
        KvProjection::launch_backward(&c.keys(), &of_kv, run)?;
        if c.compresses() {
            let dentries = rows(&v["dkeys"], c.num_tokens, c.num_entries());
            let given = [COMPRESSED, &["pooled", "workspace"], ENTRY_GRADIENTS].concat();
            let made = v.only(&given).renamed(OF_ENTRIES).with("dentries", &dentries);
            run.ran_backward(compressor::backward(run.device(), &made, c.eps)?);
            ["dc_kv", "dc_gate"].into_iter().try_for_each(|name| run.freeze(&v[name]))?;
            for (number, product) in PRODUCTS.iter().enumerate() {
                let of_product = own.clone().with(product.gradients[0], &term(terms, 1 + number));
                run.ran_backward(product.backward(&of_product, run.device())?);
            }
        }
        sum_of_terms::<FAULT>(c, v, run)
    }

    fn invariant(_: &AttentionLayerCase, _: bool) -> &'static [BatchAxis] {
        &[]
    }

    /// The rows of a case have no other batches: they are tokens that see one another.
    fn batches(_: &AttentionLayerCase, _: &mut Batches<'_, Self>) {}

    fn laws(c: &AttentionLayerCase, laws: &mut Laws<'_, Self>) {
        laws.scale_upstreams();
        if c.num_tokens > 0 {
            padding_law(c, laws);
        }
    }

    /// The norm of one channel passes a gradient only through eps.
    fn is_smooth(c: &AttentionLayerCase) -> bool {
        let width = c.num_heads * c.head_dim + c.terms() * c.width();
        let features = c.num_tokens + c.q_lora_rank + c.outputs().latent();
        c.q_lora_rank > 1 && features * (c.hidden_size + width) <= 4096
    }

    /// A token bends over its own magnitude, and weights before a norm over theirs, which the norm
    /// removes. The others bend over that of logits.
    fn bends_over(c: &AttentionLayerCase, tensors: &Tensors, input: &str) -> Option<Vec<f64>> {
        let width = match input {
            "h" | "wq_a" | "wkv" | "wkv_c" | "wgate_c" => c.hidden_size,
            "q_norm" | "wq_b" => c.q_lora_rank,
            "kv_norm" | "c_norm" => c.head_dim,
            _ => return Some(vec![1.0 / 8.0; tensors.values(input).len()]),
        };
        let sizes = sizes_of_rows(&tensors.values(input), width, 0.0);
        Some(sizes.into_iter().map(|size| size / 8.0).collect())
    }

    /// Layers of all kinds. Lists are those of the file: all keys that a token may see.
    fn golden(file: &mut Reading<'_>) -> Result<Vec<Golden<AttentionLayerCase>>, String> {
        let table = if file.kind() == "attention_swa" { "main" } else { "compress" };
        let (rows, of_table) = (["batch", "tokens", "hidden"], ["1", "tokens", "half"]);
        let of_heads = ["batch", "tokens", "heads", "channels"];
        let h = file.floats("in.hidden", &rows)?.to_vec();
        file.floats("param.self_attn.sinks", &["heads"])?;
        file.floats("param.self_attn.kv_norm.weight", &["channels"])?;
        file.floats("param.self_attn.q_a_norm.weight", &["rank"])?;
        // The largest file has no attention output.
        let has_output = file.floats("mid.core_out", &of_heads).is_ok();
        let visible = file.mask("mid.visible_all", &["batch", "1", "tokens", "keys"])?;
        let [cos, sin] = ["cos", "sin"].map(|name| {
            let name = format!("mid.rope.{table}.{name}");
            file.floats(&name, &of_table).map(<[f64]>::to_vec)
        });
        let [batches, tokens, hidden, heads, channels, rank, half, keys] = [
            file.extent("batch")?,
            file.extent("tokens")?,
            file.extent("hidden")?,
            file.extent("heads")?,
            file.extent("channels")?,
            file.extent("rank")?,
            file.extent("half")?,
            file.extent("keys")?,
        ];
        let [groups, group_rank] = [file.whole("o_groups")?, file.whole("o_lora_rank")?];
        file.hold("latent", groups * group_rank, "config o_groups and o_lora_rank")?;
        let (eps, ratio) = (file.number("rms_norm_eps")? as f32, file.whole("ratio")?);
        let entries = keys.checked_sub(tokens).ok_or("fewer keys than tokens")?;
        let of_width = |channels| {
            let widths = [hidden, rank, heads, channels];
            let case = plain([batches * tokens, tokens, tokens], widths, [groups, group_rank]);
            let case = case.then(compressed(ratio, entries));
            AttentionLayerCase { rope_dim: 2 * half, eps, ..case }
        };
        let skip = (!channels.is_multiple_of(16)).then(|| {
            let why = format!("head_dim {channels} is no multiple of 16, which the kernel needs");
            (why, of_width(channels.next_multiple_of(16)))
        });
        // Rows of tokens of all batches come before those of entries.
        let slot = |(number, is_visible): (usize, &bool)| {
            let (batch, key) = (number / keys / tokens, number % keys);
            let row = if key < tokens {
                batch * tokens + key
            } else {
                batches * tokens + batch * entries + key - tokens
            };
            if *is_visible { row as i32 } else { -1 }
        };
        let (cos, sin) = (cos?, sin?);
        let golden = Golden::new(of_width(channels)).kernel_skips(skip).values("h", h);
        let golden = golden.values("cos", cos.repeat(batches)).values("sin", sin.repeat(batches));
        let golden = golden.integers("indices", visible.iter().enumerate().map(slot).collect());
        let golden = golden.scalar("eps", file.number("rms_norm_eps")?);
        let mut golden = golden.scalar("softmax_scale", (channels as f64).sqrt().recip());
        let of_entries = if ratio > 0 { &OF_COMPRESSOR[..] } else { &[] };
        if ratio > 0 {
            golden = golden.values("entry_cos", cos).values("entry_sin", sin);
        }
        // No gradient reaches the compressor of a sequence without entries.
        let reaches = |(_, _, stored, _): &Parameter| entries > 0 || !stored.contains("compressor");
        for parameter in PARAMETERS.iter().chain(of_entries) {
            let (own, gradient, stored, axes) = *parameter;
            golden = golden.stored(file, own, &format!("param.self_attn.{stored}"), axes)?;
            if reaches(parameter) {
                let name = format!("grad.param.self_attn.{stored}");
                golden = golden.expect(file, gradient, &name, axes)?;
            }
        }
        golden = golden.stored(file, "dy", "gout.y", &rows)?;
        if has_output {
            golden = golden.expect(file, "attn_out", "mid.core_out", &of_heads)?;
        }
        let golden = golden.expect(file, "y", "out.y", &rows)?;
        Ok(vec![golden.expect(file, "dh", "grad.in.hidden", &rows)?])
    }
}

/// The case's name of a parameter, its gradient's name, the file's name, and its axes there.
type Parameter = (&'static str, &'static str, &'static str, &'static [&'static str]);

/// The parameters of a golden file's compressor.
const OF_COMPRESSOR: [Parameter; 4] = [
    ("wkv_c", "dwkv_c", "compressor.kv_proj.weight", &["width_c", "hidden"]),
    ("wgate_c", "dwgate_c", "compressor.gate_proj.weight", &["width_c", "hidden"]),
    ("ape", "dape", "compressor.position_bias", &["ratio_c", "width_c"]),
    ("c_norm", "dc_norm", "compressor.kv_norm.weight", &["channels"]),
];

/// The parameters of a golden file's layer.
const PARAMETERS: [Parameter; 8] = [
    ("wq_a", "dwq_a", "q_a_proj.weight", &["rank", "hidden"]),
    ("q_norm", "dq_norm", "q_a_norm.weight", &["rank"]),
    ("wq_b", "dwq_b", "q_b_proj.weight", &["all", "rank"]),
    ("wkv", "dwkv", "kv_proj.weight", &["channels", "hidden"]),
    ("kv_norm", "dkv_norm", "kv_norm.weight", &["channels"]),
    ("sink", "dsink", "sinks", &["heads"]),
    ("wo_a", "dwo_a", "o_a_proj.weight", &["latent", "width"]),
    ("wo_b", "dwo_b", "o_b_proj.weight", &["hidden", "latent"]),
];

/// The layer's names of what the projection of kv has under shorter ones.
const OF_KEYS: &[(&str, &str)] = &[("kv_rstd", "rstd")];

/// What the compressor reads, by the layer's names.
const COMPRESSED: &[&str] =
    &["c_kv", "c_gate", "ape", "c_norm", "cu_seqlens", "cu_entries", "entry_cos", "entry_sin"];

/// What its backward writes.
const ENTRY_GRADIENTS: &[&str] = &["dc_kv", "dc_gate", "dape", "dc_norm"];

/// The layer's names of what the compressor has under shorter ones.
const OF_ENTRIES: &[(&str, &str)] = &[
    ("c_kv", "kv"),
    ("c_gate", "gate"),
    ("c_norm", "norm_weight"),
    ("entry_cos", "cos"),
    ("entry_sin", "sin"),
    ("dc_kv", "dkv"),
    ("dc_gate", "dgate"),
    ("dc_norm", "dnorm_weight"),
];

/// The tensors of the attention's forward.
const ATTENDED: &[&str] =
    &["q", "keys", "sink", "indices", "attn_out", "lse", "max_logits", "workspace"];

/// Those of its backward.
const GRADIENTS: &[&str] = &[
    "q",
    "keys",
    "sink",
    "indices",
    "attn_out",
    "lse",
    "dattn_out",
    "dq",
    "dkeys",
    "dsink",
    "workspace",
];

/// So many rows of a tensor, from the `first` on.
fn rows(view: &TensorView, first: usize, count: usize) -> TensorView {
    let bytes = first as i64 * view.strides[0] * view.dtype.size() as i64;
    let shape = [&[count], &view.shape[1..]].concat();
    TensorView { address: view.address.wrapping_add_signed(bytes), shape, ..view.clone() }
}

/// One of the terms of h's gradient.
fn term(terms: &TensorView, number: usize) -> TensorView {
    let one = rows(terms, number, 1);
    let (shape, strides) = (one.shape[1..].to_vec(), one.strides[1..].to_vec());
    TensorView { shape, strides, ..one }
}

/// h's gradient: what the queries give, and the terms of all other projections.
fn sum_of_terms<const FAULT: u8>(
    c: &AttentionLayerCase,
    v: &Views,
    run: &mut Launches<'_>,
) -> Result<(), RuntimeError> {
    let terms = v.only(&["dh_of_q", "dh", ROWS]).renamed(&[("dh_of_q", "shared"), ("dh", "out")]);
    let all = &v["dh_of_keys"];
    // Dense: the tokens of each term follow those of the one before.
    let shape = vec![c.terms() * c.num_tokens, c.hidden_size];
    let strides = all.strides[1..].to_vec();
    let mut terms = terms.with("y", &TensorView { shape, strides, ..all.clone() });
    match FAULT {
        TERM_OF_QUERIES_MISSING => terms = terms.without(&["shared"]),
        TERM_OF_KEYS_TWICE => terms.put("shared", term(all, 0)),
        _ => {}
    }
    run.launch(|device| moe_reduce::launch(device, &terms, false))
}

/// The tensors of these names under those of the attention, with heads.
fn attention(
    c: &AttentionLayerCase,
    v: &Views,
    names: &[&'static str],
) -> Result<Views, RuntimeError> {
    let mut views = v.only(names);
    for name in ["q", "dq"] {
        if let Some(view) = views.get(name) {
            let heads: TensorView = parted("attention_layer", name, view, c.num_heads)?;
            views.put(name, heads);
        }
    }
    let of_keys = [("keys", "k"), ("dkeys", "dk")];
    Ok(views.renamed(&of_keys).renamed(&[("attn_out", "out"), ("dattn_out", "dout")]))
}

/// Longer lists whose further slots name no row change no bit of what is not summed over slots.
fn padding_law<O: Operator<Case = AttentionLayerCase>>(
    c: &AttentionLayerCase,
    laws: &mut Laws<'_, O>,
) {
    let relations = laws.all(Relation::Times(1.0));
    let (slots, further) = (c.window + c.listed, 3);
    laws.law(
        "slots that name no row add nothing",
        |v| {
            v.case.window += further;
            let lists = v.tensors.i32s("indices");
            let longer: Vec<i32> = lists
                .chunks(slots)
                .flat_map(|list| list.iter().copied().chain([-1, i32::MIN, i32::MAX]))
                .collect();
            v.tensors
                .put("indices", HostTensor::from_i32(&[c.num_tokens, slots + further], &longer));
        },
        relations,
    );
}

/// The oracle's inputs.
fn named(t: &Bound<'_>) -> OracleResult<Named> {
    let names = ["h", "wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "sink", "wo_a", "wo_b", "dy"];
    let of_entries = ["wkv_c", "wgate_c", "ape", "c_norm"];
    names
        .into_iter()
        .chain(of_entries)
        .try_fold(Named::new(), |all, name| Ok(all.maybe(name, t.maybe(name)?)))
}
