//! `attention_layer` (training 14): an attention layer over a window, forward and backward,
//! composed as in a training step.
//!
//! ```text
//! forward    q = query_projection(h)               kv = kv_projection(h)
//!            attn_out, lse = attention(q, kv, sink, lists)
//!            y = output_projection(attn_out)
//! backward   dattn_out, dwo_a, dwo_b of dy
//!            dq, dkv, dsink of dattn_out, on the saved attn_out and lse
//!            dh_of_q, dwq_a, dq_norm, dwq_b of dq  dh_of_kv, dwkv, dkv_norm of dkv
//!            dh = dh_of_q + dh_of_kv
//! ```
//!
//! Each operator may be correct by itself, and still a layer may be wrong. A row of kv is key and
//! value, so its rotation reaches the output, which is turned back by the position of its token. h
//! has gradients from two sides. What one backward reads, another may have overwritten. Heads of q,
//! of the output and of the groups of wo_a must be the same ones.
//!
//! Packed sequences have as many tokens each, but for the last one. Positions start again in each,
//! and no list names a row of another.

use dsv4_kernels::attention::inverse_rope_quantize::ScaleLayout;
use dsv4_kernels::experts::moe_reduce;
use dsv4_reference::attention::attention_layer as reference;
use dsv4_reference::attention::sparse_attention::{Saved, sink_gradient_of_saved};
use dsv4_reference::projections::rope::{self, YarnParameters};
use dsv4_runtime::TensorView;

use crate::operator::fields::{Implementation, elements, extent};
use crate::operator::prelude::*;
use crate::operators::attention::inverse_rope_quantize::check_groups;
use crate::operators::attention::sinks::Sinks;
use crate::operators::attention::sparse_attention::{
    KeyGradients, SparseAttention, SparseAttentionCase,
};
use crate::operators::projections::chain::parted;
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

/// h's gradient lacks what comes through the keys.
pub const TERM_OF_KEYS_MISSING: u8 = 1;

/// h's gradient has what comes through the keys twice, and nothing of the queries.
pub const TERM_OF_KEYS_TWICE: u8 = 2;

/// The attention's backward reads keys before their rotation.
pub const KEYS_NOT_TURNED_IN_BACKWARD: u8 = 3;

/// A case: sizes, kernels, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionLayerCase {
    /// Tokens of all sequences; 0 is allowed.
    pub num_tokens: usize,
    /// Tokens of each sequence but the last one, which may have fewer.
    pub sequence_length: usize,
    /// Tokens that a token sees, itself included.
    pub window: usize,
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
    /// Added to mean squares, of all norms.
    pub eps: f32,
    /// Which kernels of the attention run.
    pub implementation: Implementation,
    /// h.
    #[serde(flatten)]
    pub data: Data,
}

/// Which row of a term of h's gradient belongs to each token: its own, as `moe_reduce` asks.
const ROWS: &str = "token_topk_to_pos";

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
        hidden_size,
        q_lora_rank,
        num_heads,
        head_dim,
        rope_dim: head_dim / 4 * 2,
        o_groups,
        o_lora_rank,
        eps: 1e-6,
        implementation: Implementation::Portable,
        data: Data::normal(1.0),
    }
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
        let Self { num_tokens, num_heads, head_dim, window, implementation, .. } = *self;
        SparseAttentionCase {
            implementation,
            key_gradients: KeyGradients::Deterministic,
            seed: self.data.seed,
            ..SparseAttentionCase::plain(num_tokens, num_heads, head_dim, num_tokens, window)
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

    /// The rows that each token sees, the nearest last; -1 before the start of its sequence.
    fn lists(&self) -> Vec<i32> {
        let list = |token: usize| {
            (0..self.window).rev().map(move |distance| {
                if distance <= self.position(token) { (token - distance) as i32 } else { -1 }
            })
        };
        (0..self.num_tokens).flat_map(list).collect()
    }

    fn of_oracle(&self, t: &Bound<'_>) -> OracleResult<reference::Layer> {
        Ok(reference::Layer {
            cos: t.f64("cos")?,
            sin: t.f64("sin")?,
            indices: t.host().i32s("indices"),
            window: self.window,
            num_heads: self.num_heads,
            eps: t.scalar("eps", self.eps.into()),
            softmax_scale: t.scalar("softmax_scale", self.attention().softmax_scale.into()),
        })
    }
}

impl<const FAULT: u8> Operator for AttentionLayer<FAULT> {
    type Case = AttentionLayerCase;
    const SUM_LANES: usize = 4;

    const ABOUT: About = About {
        name: "attention_layer",
        family: Family::Attention,
        summary: "an attention layer over a window: both projections, attention, output projection, and the gradients of all",
        specification: &["inference 5.1", "inference 8", "inference 9", "training 14"],
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
            "query_norm_rope_scalar",
            "rope_forward",
            "rope_forward_scalar",
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
            "backward query_norm_rope_backward_scalar",
            "backward linear_dx_large",
            "backward linear_dx_small",
            "backward linear_dx_scalar",
            "backward linear_dw_large",
            "backward linear_dw_scalar",
            "backward linear_sum",
            "backward rms_norm_backward_warp",
            "backward rms_norm_backward_block",
            "backward rms_norm_backward_scalar",
            "backward rms_norm_dweight",
            "backward rope_forward",
            "backward rope_forward_scalar",
        ],
        modules: Vec::new,
        cases: [6, 16, 32],
    };

    const CHAIN: &'static [&'static str] =
        &["linear", "rms_norm", "query_norm_rope", "rope", "sparse_attention", "moe_reduce"];

    const GOLDEN: &'static [&'static str] = &["attention_swa"];

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
            input("indices", i32, &[tokens, axis("window", c.window)]).rows(),
            weight("wo_a", &[groups, group_rank, group_width], output_case.group_width()),
            weight("wo_b", &[hidden, latent], output_case.latent()),
            input(ROWS, i32, &[tokens, axis("one", 1)]),
            output("q_a", bf16, &[tokens, rank]).rows(),
            output("qr", bf16, &[tokens, rank]).rows(),
            output("qr_rstd", f32, &[tokens]),
            output("q_b", bf16, &[tokens, all]).rows(),
            output("q", bf16, &[tokens, all]).aligned_rows(),
            output("q_rstd", f32, &[tokens, heads]),
            output("kv_a", bf16, &[tokens, dim]).rows(),
            output("n", bf16, &[tokens, dim]).rows(),
            output("kv_rstd", f32, &[tokens]),
            output("kv", bf16, &[tokens, dim]).aligned_rows(),
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
            gradient("dkv", "kv", bf16),
            gradient("dsink", "sink", f32),
            gradient("dq_b", "q_b", bf16),
            gradient("dwq_b", "wq_b", f32),
            gradient("dqr", "qr", bf16),
            gradient("dq_norm", "q_norm", f32),
            gradient("dq_a", "q_a", bf16),
            gradient("dwq_a", "wq_a", f32),
            gradient("dn", "n", bf16),
            gradient("dkv_norm", "kv_norm", f32),
            gradient("dkv_a", "kv_a", bf16),
            gradient("dwkv", "wkv", f32),
            scratch("dh_of_q", bf16, &[tokens, hidden]),
            scratch("dh_of_kv", bf16, &[tokens, hidden]),
            gradient("dh", "h", bf16),
        ];
        Specs::new(c.data.seed, tensors).positive("eps", c.eps)
    }

    fn check(c: &AttentionLayerCase) -> Result<(), Refused> {
        not_empty("sequence_length", c.sequence_length)?;
        not_empty("window", c.window)?;
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
        (tokens, features, heads, rank, eps, Data::strategy(-8..=8))
            .prop_map(|(tokens, (hidden, q_rank), heads, o_rank, eps, data)| {
                let ((tokens, length, window), (groups, of_group, dim, half)) = (tokens, heads);
                let case = plain(
                    [tokens, length, window],
                    [hidden, q_rank, groups * of_group, dim],
                    [groups, o_rank],
                );
                AttentionLayerCase { rope_dim: 2 * half, eps, data, ..case }
            })
            .boxed()
    }

    fn typical() -> Vec<AttentionLayerCase> {
        vec![
            plain([9, 5, 4], [24, 16, 4, 32], [2, 8]),
            // Rows of features that are not multiples of 16 bytes.
            plain([5, 9, 3], [13, 7, 3, 16], [3, 5]),
            plain([3, 2, 2], [24, 16, 2, 512], [1, 8]).then(hopper),
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
            plain([6, 6, 4], [24, 16, 3, 512], [1, 16]).then(hopper),
        ];
        if profile == Profile::Full {
            let model = plain([300, 200, 128], [1024, 512, 16, 512], [4, 128]);
            cases.push(hopper(AttentionLayerCase { rope_dim: 64, ..model }));
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
        tensors.set_i32s(ROWS, &(0..c.num_tokens as i32).collect::<Vec<_>>());
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
        let attended = layer.attention(&t.f64("q")?, &t.f64("kv")?, &t.f64("sink")?)?;
        let dout = t.f64("dattn_out")?;
        Ok(Named::new().maybe("dsink", sink_gradient_of_saved(&attended, &saved, &dout, rounding)?))
    }

    /// Sequential launches share the memory: they have one order.
    fn workspaces(
        c: &AttentionLayerCase,
        v: &Views,
        device: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        let of_steps = [
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
        KvProjection::launch(&c.keys(), &v.renamed(OF_KEYS), run)?;
        run.freeze(&v["kv"])?;
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
        ["dq", "dkv"].into_iter().try_for_each(|name| run.freeze(&v[name]))?;
        let own = v.without(&["dh"]);
        let of_q = own.renamed(&[("dh_of_q", "dh")]);
        QueryProjection::launch_backward(&c.queries(), &of_q, run)?;
        let of_kv = own.renamed(&[("dh_of_kv", "dh")]).renamed(OF_KEYS);
        KvProjection::launch_backward(&c.keys(), &of_kv, run)?;
        let terms = v.only(&["dh_of_q", "dh_of_kv", "dh", ROWS]);
        let mut terms = terms.renamed(&[("dh_of_q", "y"), ("dh_of_kv", "shared"), ("dh", "out")]);
        match FAULT {
            TERM_OF_KEYS_MISSING => terms = terms.without(&["shared"]),
            TERM_OF_KEYS_TWICE => terms.put("y", v["dh_of_kv"].clone()),
            _ => {}
        }
        run.launch(|device| moe_reduce::launch(device, &terms, false))
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
        let width = c.num_heads * c.head_dim;
        let features = c.num_tokens + c.q_lora_rank + c.outputs().latent();
        c.q_lora_rank > 1 && features * (c.hidden_size + width) <= 4096
    }

    /// A token bends over its own magnitude, and weights before a norm over theirs, which the norm
    /// removes. The others bend over that of logits.
    fn bends_over(c: &AttentionLayerCase, tensors: &Tensors, input: &str) -> Option<Vec<f64>> {
        let width = match input {
            "h" | "wq_a" | "wkv" => c.hidden_size,
            "q_norm" | "wq_b" => c.q_lora_rank,
            "kv_norm" => c.head_dim,
            _ => return Some(vec![1.0 / 8.0; tensors.values(input).len()]),
        };
        let sizes = sizes_of_rows(&tensors.values(input), width, 0.0);
        Some(sizes.into_iter().map(|size| size / 8.0).collect())
    }

    /// Layers over a window alone.
    fn golden(file: &mut Reading<'_>) -> Result<Vec<Golden<AttentionLayerCase>>, String> {
        let (rows, of_table) = (["batch", "tokens", "hidden"], ["1", "tokens", "half"]);
        let of_heads = ["batch", "tokens", "heads", "channels"];
        let h = file.floats("in.hidden", &rows)?.to_vec();
        file.floats("mid.core_out", &of_heads)?;
        file.floats("mid.q_latent", &["batch", "tokens", "rank"])?;
        let [cos, sin] = ["mid.rope.main.cos", "mid.rope.main.sin"]
            .map(|name| file.floats(name, &of_table).map(<[f64]>::to_vec));
        let [batches, tokens, hidden, heads, channels, rank, half] = [
            file.extent("batch")?,
            file.extent("tokens")?,
            file.extent("hidden")?,
            file.extent("heads")?,
            file.extent("channels")?,
            file.extent("rank")?,
            file.extent("half")?,
        ];
        let [groups, group_rank] = [file.whole("o_groups")?, file.whole("o_lora_rank")?];
        file.hold("latent", groups * group_rank, "config o_groups and o_lora_rank")?;
        let window = file.whole("sliding_window")?.min(tokens);
        let eps = file.number("rms_norm_eps")? as f32;
        let of_width = |channels| {
            let widths = [hidden, rank, heads, channels];
            let case = plain([batches * tokens, tokens, window], widths, [groups, group_rank]);
            AttentionLayerCase { rope_dim: 2 * half, eps, ..case }
        };
        let skip = (!channels.is_multiple_of(16)).then(|| {
            let why = format!("head_dim {channels} is no multiple of 16, which the kernel needs");
            (why, of_width(channels.next_multiple_of(16)))
        });
        let again = |table: Vec<f64>| table.repeat(batches);
        let golden = Golden::new(of_width(channels)).kernel_skips(skip).values("h", h);
        let golden = golden.values("cos", again(cos?));
        let golden = golden.values("sin", again(sin?));
        let golden = golden.scalar("eps", file.number("rms_norm_eps")?);
        let mut golden = golden.scalar("softmax_scale", (channels as f64).sqrt().recip());
        for (own, gradient, stored, axes) in PARAMETERS {
            golden = golden.stored(file, own, &format!("param.self_attn.{stored}"), axes)?;
            let name = format!("grad.param.self_attn.{stored}");
            golden = golden.expect(file, gradient, &name, axes)?;
        }
        let golden = golden.stored(file, "dy", "gout.y", &rows)?;
        let golden = golden.expect(file, "attn_out", "mid.core_out", &of_heads)?;
        let golden = golden.expect(file, "y", "out.y", &rows)?;
        Ok(vec![golden.expect(file, "dh", "grad.in.hidden", &rows)?])
    }
}

/// A golden file's parameters: the case's names, their gradients' names, the file's names, and
/// their axes.
const PARAMETERS: [(&str, &str, &str, &[&str]); 8] = [
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

/// The tensors of the attention's forward.
const ATTENDED: &[&str] =
    &["q", "kv", "sink", "indices", "attn_out", "lse", "max_logits", "workspace"];

/// Those of its backward.
const GRADIENTS: &[&str] = &[
    "q",
    "kv",
    "sink",
    "indices",
    "attn_out",
    "lse",
    "dattn_out",
    "dq",
    "dkv",
    "dsink",
    "workspace",
];

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
    let of_keys = [("kv", "k"), ("dkv", "dk")];
    Ok(views.renamed(&of_keys).renamed(&[("attn_out", "out"), ("dattn_out", "dout")]))
}

/// Longer lists whose further slots name no row change no bit of what is not summed over slots.
fn padding_law<O: Operator<Case = AttentionLayerCase>>(
    c: &AttentionLayerCase,
    laws: &mut Laws<'_, O>,
) {
    let relations = laws.all(Relation::Times(1.0));
    let (window, further) = (c.window, 3);
    laws.law(
        "slots that name no row add nothing",
        |v| {
            v.case.window += further;
            let lists = v.tensors.i32s("indices");
            let longer: Vec<i32> = lists
                .chunks(window)
                .flat_map(|list| list.iter().copied().chain([-1, i32::MIN, i32::MAX]))
                .collect();
            v.tensors
                .put("indices", HostTensor::from_i32(&[c.num_tokens, window + further], &longer));
        },
        relations,
    );
}

/// The oracle's inputs.
fn named(t: &Bound<'_>) -> OracleResult<Named> {
    let names = ["h", "wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "sink", "wo_a", "wo_b", "dy"];
    names.into_iter().try_fold(Named::new(), |all, name| Ok(all.maybe(name, t.maybe(name)?)))
}
