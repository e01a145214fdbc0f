//! `query_projection` (inference 5.1, training 14): wq_a, its norm, wq_b, the norm of each head and
//! its rotation, forward and backward, composed as in a layer.
//!
//! ```text
//! forward    q_a = h wq_a^T     qr = rms_norm(q_a) q_norm     q_b = qr wq_b^T     q = query_norm_rope(q_b)
//! backward   dq_b               dqr, dwq_b of dq_b            dq_a, dq_norm       dh, dwq_a
//! FP8        codes of h, q_a of codes, qr, codes of qr, q_b of codes, q
//! ```
//!
//! Each operator may be correct by itself, and still a projection may be wrong. For example, qr or
//! q_b uses the memory of what the backward reads. Or the norm of one row is applied to another, or
//! heads do not match wq_b's rows.

use dsv4_kernels::{projections::linear, projections::query_norm_rope, projections::rms_norm};
use dsv4_reference::projections::query_projection as reference;

use crate::operator::fields::extent;
use crate::operator::prelude::*;
use crate::operators::attention::inverse_rope_quantize::check_rope_dim;
use crate::operators::projections::chain::{ChainProduct, parted};
use crate::operators::projections::rms_norm::sizes_of_rows;
use crate::operators::projections::rope::{TableForm, Turning, positions_of, tokens_first};

/// The operators in sequence.
pub struct QueryProjection;

const FIRST: ChainProduct = ChainProduct {
    x: ["h", "h_codes", "h_scales"],
    w: ["wq_a", "wq_a_codes", "wq_a_scales"],
    y: "q_a",
    gradients: ["dh", "dwq_a", "dq_a"],
};
const SECOND: ChainProduct = ChainProduct {
    x: ["qr", "qr_codes", "qr_scales"],
    w: ["wq_b", "wq_b_codes", "wq_b_scales"],
    y: "q_b",
    gradients: ["dqr", "dwq_b", "dq_b"],
};

/// A case: sizes, rotation, formats, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QueryProjectionCase {
    /// Tokens; 0 is allowed.
    pub num_tokens: usize,
    /// Features of h.
    pub hidden_size: usize,
    /// Features of qr, at most 8192.
    pub q_lora_rank: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Channels of a head: even, at most 1024.
    pub head_dim: usize,
    /// Channels that rotate: the last ones of a head. Even, at least 2.
    pub rope_dim: usize,
    /// Added to mean squares, of both norms.
    pub eps: f32,
    /// How tokens select their table rows.
    pub table: TableForm,
    /// Rows of the table where there are positions.
    pub table_rows: usize,
    /// Whether weights and their operands are e4m3 codes, as in serving.
    pub quantized: bool,
    /// h.
    #[serde(flatten)]
    pub data: Data,
}

/// A case of hidden size, rank, heads and channels.
fn plain(num_tokens: usize, extents: [usize; 4]) -> QueryProjectionCase {
    let [hidden_size, q_lora_rank, num_heads, head_dim] = extents;
    QueryProjectionCase {
        num_tokens,
        hidden_size,
        q_lora_rank,
        num_heads,
        head_dim,
        rope_dim: head_dim / 4 * 2,
        eps: 1e-6,
        table: TableForm::RowPerToken,
        table_rows: 0,
        quantized: false,
        data: Data::normal(1.0),
    }
}

impl QueryProjectionCase {
    fn turning(&self) -> Turning {
        let Self { num_tokens, table: form, table_rows, rope_dim, .. } = *self;
        Turning { form, table_rows, num_tokens, rope_dim, seed: self.data.seed }
    }

    fn of_oracle(&self, t: &Bound<'_>) -> OracleResult<reference::Turn> {
        let eps = t.scalar("eps", self.eps.into());
        Ok(reference::Turn {
            cos: t.f64("cos")?,
            sin: t.f64("sin")?,
            positions: positions_of(t),
            num_heads: self.num_heads,
            eps,
        })
    }

    /// Channels of all heads.
    fn width(&self) -> usize {
        self.num_heads * self.head_dim
    }
}

impl Operator for QueryProjection {
    type Case = QueryProjectionCase;
    const SUM_LANES: usize = 32;

    const ABOUT: About = About {
        name: "query_projection",
        family: Family::Projections,
        summary: "wq_a, its norm, wq_b, the norm of every head and its rope, in bf16 with gradients or FP8",
        specification: &["inference 3", "inference 5.1", "inference 5.2", "training 14"],
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
            "quantize_fp8_vector",
            "quantize_fp8_scalar",
            "linear_quantized_large<fp8>",
            "linear_quantized_small<fp8>",
            "linear_quantized_scalar<fp8>",
            "linear_quantized_sum<fp8>",
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
        ],
        modules: Vec::new,
        cases: [8, 20, 40],
    };

    const CHAIN: &'static [&'static str] =
        &["linear", "rms_norm", "query_norm_rope", "quantize_fp8"];

    const GOLDEN: &'static [&'static str] = &["attention_csa", "attention_swa"];

    fn tensors(c: &QueryProjectionCase) -> Specs {
        let (bf16, f32, u8, normal) = (DType::Bf16, DType::F32, DType::U8, Distribution::Normal);
        let (coded, numbers) = (c.quantized, !c.quantized);
        let (tokens, heads) =
            (axis("num_tokens", c.num_tokens), axis("num_heads", c.num_heads).not_empty());
        let hidden = axis("hidden_size", c.hidden_size).not_empty();
        let rank = axis("q_lora_rank", c.q_lora_rank).multiples(1, WIDEST);
        let width = axis("all_channels", c.width());
        let blocks = |name, extent: usize| axis(name, extent.div_ceil(linear::BLOCK));
        let (of_hidden, of_rank) =
            (blocks("hidden_blocks", c.hidden_size), blocks("rank_blocks", c.q_lora_rank));
        let of_width = blocks("width_blocks", c.width());
        let deviation = |depth: usize| (depth.max(1) as f64).sqrt().recip();
        let [cos, sin, positions] = c.turning().tensors();
        let tensors = [
            input("h", bf16, &[tokens, hidden]).rows().drawn_as(c.data),
            input("wq_a", bf16, &[rank, hidden])
                .rows()
                .drawn(normal, deviation(c.hidden_size))
                .when(numbers),
            input("wq_a_codes", u8, &[rank, hidden]).rows().when(coded),
            input("wq_a_scales", u8, &[of_rank, of_hidden]).when(coded),
            input("q_norm", f32, &[rank]).drawn(normal, 1.0),
            input("wq_b", bf16, &[width, rank])
                .rows()
                .drawn(normal, deviation(c.q_lora_rank))
                .when(numbers),
            input("wq_b_codes", u8, &[width, rank]).rows().when(coded),
            input("wq_b_scales", u8, &[of_width, of_rank]).when(coded),
            cos,
            sin,
            positions,
            output("h_codes", u8, &[tokens, hidden]).rows().exact().when(coded),
            output("h_scales", u8, &[tokens, of_hidden]).exact().when(coded),
            output("q_a", bf16, &[tokens, rank]).rows(),
            output("qr", bf16, &[tokens, rank]).rows(),
            output("qr_rstd", f32, &[tokens]),
            scratch("qr_codes", u8, &[tokens, rank]).when(coded),
            scratch("qr_scales", u8, &[tokens, of_rank]).when(coded),
            output("q_b", bf16, &[tokens, width]).rows(),
            output("q", bf16, &[tokens, width]).rows(),
            output("q_rstd", f32, &[tokens, heads]),
            upstream("dq", "q").when(numbers),
            gradient("dq_b", "q_b", bf16).when(numbers),
            gradient("dwq_b", "wq_b", f32),
            gradient("dqr", "qr", bf16).when(numbers),
            gradient("dq_norm", "q_norm", f32).when(numbers),
            gradient("dq_a", "q_a", bf16).when(numbers),
            gradient("dwq_a", "wq_a", f32),
            gradient("dh", "h", bf16).when(numbers),
        ];
        Specs::new(c.data.seed, tensors).positive("eps", c.eps)
    }

    fn check(c: &QueryProjectionCase) -> Result<(), Refused> {
        let most = query_norm_rope::MAX_HEAD_DIM;
        if c.head_dim == 0 || !c.head_dim.is_multiple_of(2) || c.head_dim > most {
            return refuse(
                "head_dim",
                format!("{} must be a multiple of 2 up to {most}", c.head_dim),
            );
        }
        check_rope_dim(c.rope_dim, c.head_dim)?;
        c.turning().check()?;
        c.data.check()
    }

    /// The decoded weights are in no tensor.
    fn oracle_elements(c: &QueryProjectionCase) -> u128 {
        4 * c.q_lora_rank as u128 * (c.hidden_size + c.width()) as u128
    }

    fn strategy(profile: Profile) -> BoxedStrategy<QueryProjectionCase> {
        let [tokens, features] = profile.of([[10, 50], [40, 150], [150, 600]]);
        let head =
            (1..=8usize, 0..=12usize).prop_map(|(half, copied)| (2 * (half + copied), 2 * half));
        let heads = (1..=profile.of([3usize, 6, 12]), head);
        let table = select(vec![TableForm::RowPerToken, TableForm::Positions]);
        let eps = prop_oneof![3 => Just(1e-6f32), 1 => Just(1e-2f32)];
        // Gradients through the norm of a single channel are only rounding.
        let features = (extent(features, 8), extent(features, 8).prop_map(|rank| rank.max(2)));
        let quantized = prop_oneof![2 => Just(false), 1 => Just(true)];
        (
            0..=tokens,
            features,
            heads,
            (table, 1..100usize),
            (eps, quantized),
            Data::strategy(-8..=8),
        )
            .prop_map(
                |(
                    num_tokens,
                    (hidden, rank),
                    (heads, (head_dim, rope_dim)),
                    (table, rows),
                    format,
                    data,
                )| {
                    let (eps, quantized) = format;
                    let table_rows = if table == TableForm::RowPerToken { 0 } else { rows };
                    let plain = plain(num_tokens, [hidden, rank, heads, head_dim]);
                    QueryProjectionCase {
                        rope_dim,
                        eps,
                        table,
                        table_rows,
                        quantized,
                        data,
                        ..plain
                    }
                },
            )
            .boxed()
    }

    fn typical() -> Vec<QueryProjectionCase> {
        let positions =
            |case| QueryProjectionCase { table: TableForm::Positions, table_rows: 9, ..case };
        let coded = |case| QueryProjectionCase { quantized: true, ..case };
        vec![
            plain(5, [24, 16, 2, 16]).then(positions),
            // Rows that are not multiples of 16 bytes.
            plain(3, [13, 7, 3, 10]),
            plain(5, [144, 32, 2, 16]).then(positions).then(coded),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<QueryProjectionCase> {
        let coded = |case| QueryProjectionCase { quantized: true, ..case };
        let mut cases = vec![
            plain(0, [24, 16, 2, 16]),
            plain(0, [24, 16, 2, 16]).then(coded),
            plain(1, [8, 8, 1, 8]),
            // More tokens than small tiles have; split-k; a single token.
            plain(18, [40, 24, 3, 16]),
            plain(1, [584, 16, 1, 16]),
            plain(2, [584, 16, 1, 16]),
            // A norm with one block for each row, for few rows and for more: for the emulator's
            // SMs, and for a GPU's 132.
            plain(2, [8, 1032, 1, 8]),
            plain(6, [8, 1032, 1, 8]),
            plain(133, [8, 1032, 1, 8]).then(coded),
            plain(11, [16, 8, 2, 8]).with(|case| {
                case.table = TableForm::HostilePositions;
                case.table_rows = 5;
            }),
            plain(18, [32, 16, 1, 24]).then(coded),
            plain(3, [131, 9, 1, 14]).then(coded),
            plain(2, [584, 16, 1, 16]).then(coded),
        ];
        if profile == Profile::Full {
            let model =
                |num_tokens| plain(num_tokens, [1024, 512, 4, 512]).with(|case| case.rope_dim = 64);
            cases.extend([model(1), model(50), model(50).then(coded)]);
        }
        cases
    }

    fn amend(c: &QueryProjectionCase, tensors: &mut Tensors) -> OracleResult<()> {
        c.turning().amend(tensors)?;
        if c.quantized {
            FIRST.set_weight(c.data.seed, tensors, [c.q_lora_rank, c.hidden_size])?;
            SECOND.set_weight(c.data.seed, tensors, [c.width(), c.q_lora_rank])?;
        }
        Ok(())
    }

    fn forward(
        c: &QueryProjectionCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        let forward = if c.quantized { reference::forward_quantized } else { reference::forward };
        forward(&c.of_oracle(t)?, &named(t)?, rounding)
    }

    fn backward(
        c: &QueryProjectionCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        if c.quantized {
            return Ok(Named::new());
        }
        reference::backward(&c.of_oracle(t)?, &named(t)?, rounding)
    }

    /// Sequential tensors may share memory: launches have one order.
    fn workspaces(
        c: &QueryProjectionCase,
        _: &Views,
        device: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        let (tokens, first, second) =
            (c.num_tokens, [c.q_lora_rank, c.hidden_size], [c.width(), c.q_lora_rank]);
        let of = |[outs, ins]: [usize; 2]| {
            let forward = linear::forward_workspace_bytes(device, 1, tokens, outs, ins);
            let backward = linear::backward_workspace_bytes(device, 1, tokens, outs, ins);
            forward.max(backward).max(linear::quantized_workspace_bytes(device, tokens, outs, ins))
        };
        let norm = rms_norm::workspace_bytes(device, DType::Bf16, tokens, c.q_lora_rank);
        Ok(vec![("workspace", of(first).max(of(second)).max(norm))])
    }

    fn launch(
        c: &QueryProjectionCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        FIRST.launch(v, run, c.quantized)?;
        run.freeze(&v["q_a"])?;
        let norm = v.only(&["q_a", "q_norm", "qr", "qr_rstd"]);
        let norm =
            norm.renamed(&[("q_a", "x"), ("q_norm", "weight"), ("qr", "y"), ("qr_rstd", "rstd")]);
        run.launch(|device| rms_norm::forward(device, &norm, c.eps))?;
        run.freeze(&v["qr"])?;
        SECOND.launch(v, run, c.quantized)?;
        run.freeze(&v["q_b"])?;
        let turned = v.only(&["cos", "sin", "positions", "q_rstd"]).renamed(&[("q_rstd", "rstd")]);
        let turned = turned.with("x", &heads(c, v, "q_b")?).with("y", &heads(c, v, "q")?);
        run.launch(|device| query_norm_rope::forward(device, &turned, c.eps))
    }

    fn launch_backward(
        c: &QueryProjectionCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        if c.quantized {
            return Ok(());
        }
        let device = run.device();
        let turned = v.only(&["cos", "sin", "positions", "q_rstd"]).renamed(&[("q_rstd", "rstd")]);
        let turned = turned.with("x", &heads(c, v, "q_b")?).with("dy", &heads(c, v, "dq")?);
        let mut ran =
            vec![query_norm_rope::backward(device, &turned.with("dx", &heads(c, v, "dq_b")?))?];
        run.freeze(&v["dq_b"])?;
        ran.extend(SECOND.backward(v, device)?);
        run.freeze(&v["dqr"])?;
        let norm = v.only(&["q_a", "q_norm", "qr_rstd", "dqr", "dq_a", "dq_norm", "workspace"]);
        let names = [
            ("q_a", "x"),
            ("q_norm", "weight"),
            ("qr_rstd", "rstd"),
            ("dqr", "dy"),
            ("dq_a", "dx"),
            ("dq_norm", "dweight"),
        ];
        ran.extend(rms_norm::backward(device, &norm.renamed(&names))?);
        run.freeze(&v["dq_a"])?;
        ran.extend(FIRST.backward(v, device)?);
        run.ran_backward(ran);
        Ok(())
    }

    fn invariant(_: &QueryProjectionCase, path: bool) -> &'static [BatchAxis] {
        if path { BatchAxis::OF_ROWS } else { &[] }
    }

    fn laws(c: &QueryProjectionCase, laws: &mut Laws<'_, Self>) {
        if !c.quantized {
            laws.scale_upstreams();
        }
        laws.separate("num_tokens", "tokens may be permuted");
    }

    /// Tokens with a hostile position have NaN outputs, so finite differences do not exist. The
    /// norm of one channel passes a gradient only through eps. What remains before it is the
    /// rounding of terms that cancel.
    fn is_smooth(c: &QueryProjectionCase) -> bool {
        let elements = (c.num_tokens + c.q_lora_rank) * (c.hidden_size + c.width());
        !c.quantized
            && c.q_lora_rank > 1
            && c.table != TableForm::HostilePositions
            && elements <= 2048
    }

    /// A token bends over its own magnitude. Weights before a norm bend over their own magnitude,
    /// which the norm removes.
    fn bends_over(c: &QueryProjectionCase, tensors: &Tensors, input: &str) -> Option<Vec<f64>> {
        let width = if input == "h" || input == "wq_a" { c.hidden_size } else { c.q_lora_rank };
        Some(
            sizes_of_rows(&tensors.values(input), width, 0.0)
                .into_iter()
                .map(|size| size / 8.0)
                .collect(),
        )
    }

    /// The query side of attention layers.
    fn golden(file: &mut Reading<'_>) -> Result<Vec<Golden<QueryProjectionCase>>, String> {
        let table = if file.kind() == "attention_swa" { "main" } else { "compress" };
        let of_heads = ["batch", "heads", "tokens", "channels"];
        let (rows, of_table) = (["batch", "tokens", "hidden"], ["1", "tokens", "half"]);
        let h = file.floats("in.hidden", &rows)?.to_vec();
        file.floats("mid.q", &of_heads)?;
        let [cos, sin] = ["cos", "sin"].map(|name| format!("mid.rope.{table}.{name}"));
        let (cos, sin) =
            (file.floats(&cos, &of_table)?.to_vec(), file.floats(&sin, &of_table)?.to_vec());
        let latent = ["batch", "tokens", "rank"];
        file.floats("mid.q_latent", &latent)?;
        let [batches, heads, tokens, channels, hidden, rank, half] = [
            file.extent("batch")?,
            file.extent("heads")?,
            file.extent("tokens")?,
            file.extent("channels")?,
            file.extent("hidden")?,
            file.extent("rank")?,
            file.extent("half")?,
        ];
        let case = QueryProjectionCase {
            rope_dim: 2 * half,
            table: TableForm::Positions,
            table_rows: tokens,
            eps: file.number("rms_norm_eps")? as f32,
            ..plain(batches * tokens, [hidden, rank, heads, channels])
        };
        let golden = Golden::new(case).scalar("eps", file.number("rms_norm_eps")?).values("h", h);
        let golden = golden.values("cos", cos).values("sin", sin);
        // Batch rows share positions.
        let golden =
            golden.integers("positions", (0..batches).flat_map(|_| 0..tokens as i32).collect());
        let named = |name: &str| format!("param.self_attn.{name}.weight");
        let golden = golden.stored(file, "wq_a", &named("q_a_proj"), &["rank", "hidden"])?;
        let golden = golden.stored(file, "q_norm", &named("q_a_norm"), &["rank"])?;
        let golden = golden.stored(file, "wq_b", &named("q_b_proj"), &["width", "rank"])?;
        let golden = golden.expect(file, "qr", "mid.q_latent", &latent)?;
        let tokens_first =
            |values: &[f64]| tokens_first(values, [batches, heads, tokens, channels]);
        Ok(vec![golden.expect_reordered(file, "q", "mid.q", &of_heads, &tokens_first)?])
    }
}

/// The most features of qr; wider than any model's rows.
const WIDEST: usize = 8192;

/// The oracle's inputs in addition to the rotation.
fn named(t: &Bound<'_>) -> OracleResult<Named> {
    let weights = ["wq_a", "wq_b", "wq_a_codes", "wq_a_scales", "wq_b_codes", "wq_b_scales"];
    let names = ["h", "q_norm", "dq"].into_iter().chain(weights);
    names.into_iter().try_fold(Named::new(), |all, name| Ok(all.maybe(name, t.maybe(name)?)))
}

/// A tensor of rows as a tensor of heads.
fn heads(
    c: &QueryProjectionCase,
    v: &Views,
    name: &'static str,
) -> Result<dsv4_runtime::TensorView, RuntimeError> {
    parted("query_projection", name, &v[name], c.num_heads)
}
