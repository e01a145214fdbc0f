//! `mhc_block` (inference 0 and 2, training 11.1): a layer on its residual streams. It has two
//! sites with their norms and stand-ins for their sublayers, forward and backward, composed as in a
//! training step.
//!
//! ```text
//! forward    attn_pre, attn_post, attn_comb = mhc_mix(streams)     attn_h = mhc_pre(streams, attn_pre)
//!            attn_u = rms_norm(attn_h)                             attn_y = attn_u + attn_add
//!            between, ffn_pre, ffn_post, ffn_comb, ffn_h = mhc_post_mix_pre(streams, attn_y, attn_post, attn_comb)
//!            ffn_u = rms_norm(ffn_h)                               ffn_y  = ffn_u + ffn_add
//!            out = mhc_post(between, ffn_y, ffn_post, ffn_comb)
//! backward   the same from the end, on what was saved; the gradients of streams that several operators read are added
//! ```
//!
//! Each operator may be correct by itself, and still a block may be wrong. For example, the
//! coefficients of one site are used in the other, or a gradient is added twice or never. Or
//! `between` uses the memory of the streams that the backward reads. The stand-ins add rows to
//! their input: `moe_reduce` with one slot for each token and a shared row. Its gradients are those
//! of its output.

use dsv4_kernels::streams::mhc_mix::NUM_COLUMNS;
use dsv4_kernels::streams::mhc_post::NUM_STREAMS;
use dsv4_kernels::{
    experts::moe_reduce, projections::rms_norm, streams::mhc_mix, streams::mhc_post,
    streams::mhc_post_mix_pre, streams::mhc_pre,
};
use dsv4_reference::streams::mhc_block as reference;
use dsv4_runtime::Device;

use crate::operator::prelude::*;
use crate::operators::streams::mhc_mix::{check_iterations, of_oracle as numbers_of_oracle};
use crate::operators::streams::site;

/// The operators in sequence.
pub struct MhcBlock;

/// A case: sizes, values, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MhcBlockCase {
    /// Tokens; 0 is allowed.
    pub num_tokens: usize,
    /// Channels of a stream, at most 32768.
    pub hidden_size: usize,
    /// Iterations of the Sinkhorn normalisation, 1 to 48.
    pub sinkhorn_iters: usize,
    /// Added to the mean squares of tokens and of the norms' rows.
    pub norm_eps: f32,
    /// Added to pre, after the softmax, and to each sum that the Sinkhorn iteration divides by.
    pub hc_eps: f32,
    /// The bases are uniform between this and its negative: the spread of the logits.
    pub logits: f32,
    /// Whether the streams of a token differ by only a few percent, as in a trained model.
    pub near_equal: bool,
    /// The streams and the rows that the stand-ins add.
    #[serde(flatten)]
    pub data: Data,
}

fn plain(num_tokens: usize, hidden_size: usize) -> MhcBlockCase {
    let (sinkhorn_iters, norm_eps, hc_eps, logits) = (20, 1e-6, 1e-6, 2.0);
    let (near_equal, data) = (false, Data::normal(1.0));
    MhcBlockCase {
        num_tokens,
        hidden_size,
        sinkhorn_iters,
        norm_eps,
        hc_eps,
        logits,
        near_equal,
        data,
    }
}

impl MhcBlockCase {
    fn of_launcher(&self) -> mhc_mix::Numbers {
        let Self { sinkhorn_iters, norm_eps, hc_eps, .. } = *self;
        mhc_mix::Numbers { sinkhorn_iters, norm_eps, hc_eps }
    }
}

/// The rows of the stand-ins' slots: one for each token.
const ROWS: &str = "token_topk_to_pos";

impl Operator for MhcBlock {
    type Case = MhcBlockCase;
    const SUM_LANES: usize = 4;

    const ABOUT: About = About {
        name: "mhc_block",
        family: Family::Streams,
        summary: "a layer as its residual streams see it: two sites, their norms, and stand-ins for their sublayers",
        specification: &[
            "inference 2.1",
            "inference 2.2",
            "inference 2.3",
            "inference 2.4",
            "inference 3",
            "training 11.1",
        ],
        paths: &[
            "mhc_mix_project",
            "mhc_mix_project_at_once",
            "mhc_mix_project_few",
            "mhc_mix_project_hopper",
            "mhc_mix_project_scalar",
            "mhc_mix_coefficients",
            "mhc_mix_coefficients_few",
            "mhc_pre_forward_vector",
            "mhc_pre_forward_scalar",
            "rms_norm_forward_warp",
            "rms_norm_forward_scalar",
            "moe_reduce_forward_vector",
            "moe_reduce_forward_scalar",
            "mhc_post_mix_pre_project",
            "mhc_post_mix_pre_project_few",
            "mhc_post_mix_pre_project_hopper",
            "mhc_post_mix_pre_mix",
            "mhc_post_forward_vector",
            "mhc_post_forward_scalar",
            "mhc_post_backward_vector",
            "mhc_post_backward_scalar",
            "rms_norm_backward_warp",
            "rms_norm_backward_scalar",
            "rms_norm_dweight",
            "mhc_post_mix_pre_dpre_vector",
            "mhc_post_mix_pre_dpre_scalar",
            "mhc_mix_backward_coefficients",
            "mhc_post_mix_pre_total_wide",
            "mhc_post_mix_pre_total_scalar",
            "mhc_mix_backward_sums",
        ],
        modules: Vec::new,
        cases: [6, 16, 32],
    };

    const CHAIN: &'static [&'static str] =
        &["mhc_mix", "mhc_pre", "rms_norm", "moe_reduce", "mhc_post_mix_pre", "mhc_post"];

    const GOLDEN: &'static [&'static str] = &["hc_block"];

    fn tensors(c: &MhcBlockCase) -> Specs {
        let tokens = axis("num_tokens", c.num_tokens);
        let (source, destination) = (axis("source", NUM_STREAMS), axis("destination", NUM_STREAMS));
        let channels = axis("hidden_size", c.hidden_size).multiples(1, WIDEST);
        let (columns, groups) = (axis("num_columns", NUM_COLUMNS), axis("num_groups", 3));
        let (gates, matrix) = ([tokens, destination], [tokens, source, destination]);
        let (rows, streams) = ([tokens, channels], [tokens, destination, channels]);
        let weights = [columns, destination, channels];
        let deviation = ((NUM_STREAMS * c.hidden_size).max(1) as f64).sqrt().recip();
        let (normal, bf16, f32) = (Distribution::Normal, DType::Bf16, DType::F32);
        let base =
            |name| input(name, f32, &[columns]).drawn(Distribution::Uniform, c.logits.into());
        let one_slot = [tokens, axis("topk", 1)];
        let tensors = [
            input("streams", bf16, &[tokens, source, channels]).rows().drawn_as(c.data),
            input(ROWS, DType::I32, &one_slot),
            input("attn_fn", f32, &weights).drawn(normal, deviation),
            input("attn_scale", f32, &[groups]).drawn(normal, 1.0),
            base("attn_base"),
            input("attn_weight", f32, &rows[1..]).drawn(normal, 1.0),
            input("attn_add", bf16, &rows).rows().drawn_as(c.data),
            input("ffn_fn", f32, &weights).drawn(normal, deviation),
            input("ffn_scale", f32, &[groups]).drawn(normal, 1.0),
            base("ffn_base"),
            input("ffn_weight", f32, &rows[1..]).drawn(normal, 1.0),
            input("ffn_add", bf16, &rows).rows().drawn_as(c.data),
            output("attn_pre", f32, &gates),
            output("attn_post", f32, &gates),
            output("attn_comb", f32, &matrix),
            output("attn_mix", f32, &[tokens, columns]),
            output("attn_rstd", f32, &rows[..1]),
            output("attn_h", bf16, &rows).rows(),
            output("attn_u", bf16, &rows).rows(),
            output("attn_norm_rstd", f32, &rows[..1]),
            output("attn_y", bf16, &rows).rows(),
            output("between", bf16, &streams).rows(),
            output("ffn_pre", f32, &gates),
            output("ffn_post", f32, &gates),
            output("ffn_comb", f32, &matrix),
            output("ffn_mix", f32, &[tokens, columns]),
            output("ffn_rstd", f32, &rows[..1]),
            output("ffn_h", bf16, &rows).rows(),
            output("ffn_u", bf16, &rows).rows(),
            output("ffn_norm_rstd", f32, &rows[..1]),
            output("ffn_y", bf16, &rows).rows(),
            output("out", bf16, &streams).rows(),
            upstream("dout", "out"),
            scratch("dbetween_of_post", bf16, &streams),
            scratch("dstreams_of_post", bf16, &streams),
            gradient("dffn_post", "ffn_post", f32),
            gradient("dffn_comb", "ffn_comb", f32),
            gradient("dffn_add", "ffn_add", bf16),
            gradient("dffn_h", "ffn_h", bf16),
            gradient("dffn_weight", "ffn_weight", f32),
            gradient("dffn_fn", "ffn_fn", f32),
            gradient("dffn_scale", "ffn_scale", f32),
            gradient("dffn_base", "ffn_base", f32),
            gradient("dbetween", "between", bf16),
            gradient("dattn_post", "attn_post", f32),
            gradient("dattn_comb", "attn_comb", f32),
            gradient("dattn_add", "attn_add", bf16),
            gradient("dattn_h", "attn_h", bf16),
            gradient("dattn_weight", "attn_weight", f32),
            gradient("dattn_fn", "attn_fn", f32),
            gradient("dattn_scale", "attn_scale", f32),
            gradient("dattn_base", "attn_base", f32),
            gradient("dstreams", "streams", bf16),
        ];
        let specs = Specs::new(c.data.seed, tensors);
        site::with_numbers(specs, c.norm_eps, c.hc_eps, c.logits)
    }

    fn check(c: &MhcBlockCase) -> Result<(), Refused> {
        check_iterations(c.sinkhorn_iters)
    }

    /// The products of all pairs of streams, several times.
    fn oracle_elements(c: &MhcBlockCase) -> u128 {
        8 * (NUM_STREAMS * (NUM_STREAMS + 1)) as u128 * c.num_tokens as u128 * c.hidden_size as u128
    }

    fn strategy(profile: Profile) -> BoxedStrategy<MhcBlockCase> {
        let extents = matrix(profile.of([[8, 200], [20, 600], [100, 4096]]));
        let iterations = site::iterations();
        let eps = site::eps();
        let near_equal = site::nearness();
        let logits = select(vec![0.5f32, 4.0, 20.0]);
        (extents, iterations, eps, logits, near_equal, Data::strategy(-4..=4))
            .prop_map(
                |(
                    [num_tokens, hidden_size],
                    sinkhorn_iters,
                    (norm_eps, hc_eps),
                    logits,
                    near_equal,
                    data,
                )| {
                    MhcBlockCase {
                        num_tokens,
                        hidden_size,
                        sinkhorn_iters,
                        norm_eps,
                        hc_eps,
                        logits,
                        near_equal,
                        data,
                    }
                },
            )
            .boxed()
    }

    fn typical() -> Vec<MhcBlockCase> {
        // 16 bytes at a time, and one element.
        vec![
            plain(5, 16),
            plain(3, 5).with(|case| {
                case.sinkhorn_iters = 3;
                case.hc_eps = 1e-2;
            }),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<MhcBlockCase> {
        let mut cases = vec![
            plain(0, 16),
            plain(1, 8),
            plain(2, 7),
            plain(3, 40).with(|case| case.near_equal = true),
            plain(9, 16).with(|case| case.logits = 20.0),
            // Tokens of a second warp.
            plain(17, 8),
            // More tokens than the portable projection handles on Hopper.
            plain(260, 8),
            // Few tokens, with channels in many parts.
            plain(2, 520),
        ];
        if profile == Profile::Full {
            cases.extend([plain(64, 4096), plain(100, 7168)]);
        }
        cases
    }

    fn amend(c: &MhcBlockCase, tensors: &mut Tensors) -> OracleResult<()> {
        site::amend(c.near_equal, c.hidden_size, tensors);
        tensors.set_i32s(ROWS, &(0..c.num_tokens as i32).collect::<Vec<_>>());
        Ok(())
    }

    fn forward(c: &MhcBlockCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::forward(&named(t)?, numbers_of_oracle(c.of_launcher(), t), rounding)
    }

    fn backward(c: &MhcBlockCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::backward(&named(t)?, numbers_of_oracle(c.of_launcher(), t), rounding)
    }

    /// Sequential tensors may share memory: launches have one order.
    fn workspaces(
        c: &MhcBlockCase,
        _: &Views,
        device: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        let (tokens, channels) = (c.num_tokens, c.hidden_size);
        let forward = mhc_mix::forward_workspace_bytes(device, tokens, channels);
        let site = mhc_post_mix_pre::backward_workspace_bytes(device, tokens, channels);
        let norm = rms_norm::workspace_bytes(device, DType::Bf16, tokens, channels);
        Ok(vec![("workspace", forward.max(site).max(norm))])
    }

    fn launch(c: &MhcBlockCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        let numbers = c.of_launcher();
        let own = [
            "streams",
            "attn_fn",
            "attn_scale",
            "attn_base",
            "attn_pre",
            "attn_post",
            "attn_comb",
            "attn_mix",
        ];
        let site = v.only(&[&own[..], &["attn_rstd", "workspace"]].concat()).renamed(ATTN);
        run.launch(|device| {
            mhc_mix::forward(device, &site, numbers, mhc_mix::Implementation::Auto)
        })?;
        let mixed = v.only(&["streams", "attn_pre", "attn_h"]).renamed(ATTN);
        run.launch(|device| mhc_pre::forward(device, &mixed, None))?;
        sublayer(
            c,
            v,
            run,
            ["attn_h", "attn_weight", "attn_u", "attn_norm_rstd", "attn_add", "attn_y"],
        )?;
        let given = [
            "streams",
            "attn_y",
            "attn_post",
            "attn_comb",
            "ffn_fn",
            "ffn_scale",
            "ffn_base",
            "workspace",
        ];
        let written =
            ["between", "ffn_pre", "ffn_post", "ffn_comb", "ffn_mix", "ffn_rstd", "ffn_h"];
        let fused = v.only(&[&given[..], &written].concat()).renamed(FUSED);
        run.launch(|device| {
            mhc_post_mix_pre::forward(device, &fused, numbers, mhc_mix::Implementation::Auto)
        })?;
        sublayer(c, v, run, ["ffn_h", "ffn_weight", "ffn_u", "ffn_norm_rstd", "ffn_add", "ffn_y"])?;
        let last = v.only(&["between", "ffn_y", "ffn_post", "ffn_comb", "out"]).renamed(LAST);
        run.launch(|device| mhc_post::forward(device, &last))?;
        // What the backward reads.
        SAVED.into_iter().try_for_each(|name| run.freeze(&v[name]))
    }

    fn launch_backward(
        c: &MhcBlockCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        let numbers = c.of_launcher();
        let given = ["between", "ffn_y", "ffn_post", "ffn_comb", "dout"];
        let written = ["dbetween_of_post", "dffn_add", "dffn_post", "dffn_comb"];
        let last = v.only(&[&given[..], &written].concat()).renamed(LAST);
        run.launch(|device| mhc_post::backward(device, &last))?;
        norm_backward(
            v,
            run,
            ["ffn_h", "ffn_weight", "ffn_norm_rstd", "dffn_add", "dffn_h", "dffn_weight"],
        )?;

        let given = [
            "streams",
            "attn_y",
            "attn_post",
            "attn_comb",
            "ffn_fn",
            "ffn_scale",
            "ffn_base",
            "workspace",
        ];
        let saved = ["between", "ffn_pre", "ffn_mix", "ffn_rstd"];
        let upstream = ["dbetween_of_post", "dffn_h", "dffn_post", "dffn_comb"];
        let written = ["dbetween", "dstreams_of_post", "dattn_add", "dattn_post", "dattn_comb"];
        let parameters = ["dffn_fn", "dffn_scale", "dffn_base"];
        let fused =
            v.only(&[&given[..], &saved, &upstream, &written, &parameters].concat()).renamed(FUSED);
        run.launch(|device| mhc_post_mix_pre::backward(device, &fused, numbers))?;
        norm_backward(
            v,
            run,
            ["attn_h", "attn_weight", "attn_norm_rstd", "dattn_add", "dattn_h", "dattn_weight"],
        )?;

        let given = [
            "streams",
            "attn_pre",
            "attn_fn",
            "attn_scale",
            "attn_base",
            "attn_mix",
            "attn_rstd",
            "workspace",
        ];
        let upstream = ["dstreams_of_post", "dattn_h", "dattn_post", "dattn_comb"];
        let written = ["dstreams", "dattn_fn", "dattn_scale", "dattn_base"];
        let site = v.only(&[&given[..], &upstream, &written].concat()).renamed(ATTN);
        run.launch(|device| mhc_post_mix_pre::site_backward(device, &site, numbers))
    }

    fn invariant(_: &MhcBlockCase, path: bool) -> &'static [BatchAxis] {
        if path { BatchAxis::OF_ROWS } else { &[] }
    }

    fn batches(_: &MhcBlockCase, batches: &mut Batches<'_, Self>) {
        batches.rows_with("num_tokens", |tensors, cut| {
            // Each token's own row.
            let rows: Vec<i32> = (0..cut.order.len() as i32).collect();
            tensors.set_i32s(ROWS, &rows);
            Vec::new()
        });
    }

    fn laws(_: &MhcBlockCase, laws: &mut Laws<'_, Self>) {
        laws.scale_upstreams();
        laws.independent("num_tokens");
    }

    fn bends_over(c: &MhcBlockCase, tensors: &Tensors, input: &str) -> Option<Vec<f64>> {
        let channels = NUM_STREAMS * c.hidden_size;
        let elements = tensors.values(input).len();
        let scales = ["attn_scale", "ffn_scale"].map(|name| tensors.values(name)).concat();
        let scale = scales.into_iter().fold(1.0, |scale: f64, own| scale.max(own.abs()));
        // Coefficients are near 1, so an added row moves the streams by its own size.
        let size = |x: &[f64]| {
            (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + f64::from(c.norm_eps)).sqrt()
        };
        Some(match input {
            "streams" => tensors
                .values(input)
                .chunks(channels)
                .flat_map(|v| vec![size(v) / scale; v.len()])
                .collect(),
            "attn_add" | "ffn_add" => tensors
                .values("streams")
                .chunks(channels)
                .flat_map(|v| vec![size(v) / scale; c.hidden_size])
                .collect(),
            "attn_weight" | "ffn_weight" => vec![1.0 / scale; elements],
            "attn_fn" | "ffn_fn" => vec![0.25 / scale; elements],
            "attn_scale" | "ffn_scale" => vec![0.25; elements],
            _ => vec![1.0; elements],
        })
    }

    fn golden(file: &mut Reading<'_>) -> Result<Vec<Golden<MhcBlockCase>>, String> {
        let (streams, rows) = (["..tokens", "streams", "hidden"], ["..tokens", "hidden"]);
        let x = file.floats("in.streams", &streams)?.to_vec();
        let hidden_size = file.extent("hidden")?;
        let case = MhcBlockCase {
            sinkhorn_iters: file.whole("sinkhorn_iters")?,
            norm_eps: file.number("rms_norm_eps")? as f32,
            hc_eps: file.number("hc_eps")? as f32,
            ..plain(x.len() / NUM_STREAMS / hidden_size, hidden_size)
        };
        let golden = Golden::new(case).values("streams", x).stored(
            file,
            "dout",
            "gout.streams",
            &streams,
        )?;
        let golden = golden
            .scalar("norm_eps", file.number("rms_norm_eps")?)
            .scalar("hc_eps", file.number("hc_eps")?);
        let mut golden = golden.stored(file, "attn_add", "in.attn_add", &rows)?.stored(
            file,
            "ffn_add",
            "in.mlp_add",
            &rows,
        )?;
        for (own, gradient, stored, axes) in PARAMETERS {
            golden = golden.stored(file, own, &format!("param.{stored}"), axes)?;
            golden = golden.expect(file, gradient, &format!("grad.param.{stored}"), axes)?;
        }
        let golden = golden.expect(file, "out", "out.streams", &streams)?;
        let golden = golden.expect(file, "attn_u", "mid.attn_in", &rows)?.expect(
            file,
            "ffn_u",
            "mid.mlp_in",
            &rows,
        )?;
        let golden = golden.expect(file, "dstreams", "grad.in.streams", &streams)?;
        let golden = golden.expect(file, "dattn_add", "grad.in.attn_add", &rows)?;
        Ok(vec![golden.expect(file, "dffn_add", "grad.in.mlp_add", &rows)?])
    }
}

/// The most channels of a row that the norm supports.
const WIDEST: usize = 32768;

/// A golden file's parameters: the case's names, their gradients' names, the file's names, and
/// their axes.
const PARAMETERS: [(&str, &str, &str, &[&str]); 8] = [
    ("attn_fn", "dattn_fn", "attn_hc.fn", &["columns", "channels"]),
    ("attn_scale", "dattn_scale", "attn_hc.scale", &["groups"]),
    ("attn_base", "dattn_base", "attn_hc.base", &["columns"]),
    ("attn_weight", "dattn_weight", "input_layernorm.weight", &["hidden"]),
    ("ffn_fn", "dffn_fn", "ffn_hc.fn", &["columns", "channels"]),
    ("ffn_scale", "dffn_scale", "ffn_hc.scale", &["groups"]),
    ("ffn_base", "dffn_base", "ffn_hc.base", &["columns"]),
    ("ffn_weight", "dffn_weight", "post_attention_layernorm.weight", &["hidden"]),
];

/// The forward outputs that the backward reads.
const SAVED: [&str; 20] = [
    "attn_pre",
    "attn_post",
    "attn_comb",
    "attn_mix",
    "attn_rstd",
    "attn_h",
    "attn_u",
    "attn_norm_rstd",
    "attn_y",
    "between",
    "ffn_pre",
    "ffn_post",
    "ffn_comb",
    "ffn_mix",
    "ffn_rstd",
    "ffn_h",
    "ffn_u",
    "ffn_norm_rstd",
    "ffn_y",
    "out",
];

type Names = [(&'static str, &'static str)];

/// The names of the block's tensors for the first site's launchers.
const ATTN: &Names = &[
    ("attn_fn", "fn"),
    ("attn_scale", "scale"),
    ("attn_base", "base"),
    ("attn_pre", "pre"),
    ("attn_post", "post"),
    ("attn_comb", "comb"),
    ("attn_mix", "mix"),
    ("attn_rstd", "rstd"),
    ("attn_h", "h"),
    ("dstreams_of_post", "dout"),
    ("dattn_h", "dh"),
    ("dattn_post", "dpost"),
    ("dattn_comb", "dcomb"),
    ("dattn_fn", "dfn"),
    ("dattn_scale", "dscale"),
    ("dattn_base", "dbase"),
];

/// The names for the launchers of the fusion.
const FUSED: &Names = &[
    ("attn_y", "y"),
    ("attn_post", "post"),
    ("attn_comb", "comb"),
    ("ffn_fn", "fn"),
    ("ffn_scale", "scale"),
    ("ffn_base", "base"),
    ("between", "out"),
    ("ffn_pre", "next_pre"),
    ("ffn_post", "next_post"),
    ("ffn_comb", "next_comb"),
    ("ffn_mix", "mix"),
    ("ffn_rstd", "rstd"),
    ("ffn_h", "h"),
    ("dbetween_of_post", "dout"),
    ("dffn_h", "dh"),
    ("dffn_post", "dnext_post"),
    ("dffn_comb", "dnext_comb"),
    ("dbetween", "dout_total"),
    ("dstreams_of_post", "dstreams"),
    ("dattn_add", "dy"),
    ("dattn_post", "dpost"),
    ("dattn_comb", "dcomb"),
    ("dffn_fn", "dfn"),
    ("dffn_scale", "dscale"),
    ("dffn_base", "dbase"),
];

/// The names for the launchers of the last operator.
const LAST: &Names = &[
    ("between", "streams"),
    ("ffn_y", "y"),
    ("ffn_post", "post"),
    ("ffn_comb", "comb"),
    ("dbetween_of_post", "dstreams"),
    ("dffn_add", "dy"),
    ("dffn_post", "dpost"),
    ("dffn_comb", "dcomb"),
];

/// The norm of h, plus the rows that the stand-in adds.
fn sublayer(
    c: &MhcBlockCase,
    v: &Views,
    run: &mut Launches<'_>,
    [h, weight, u, rstd, add, y]: [&'static str; 6],
) -> Result<(), RuntimeError> {
    let norm = v.only(&[h, weight, u, rstd]).renamed(&[
        (h, "x"),
        (weight, "weight"),
        (u, "y"),
        (rstd, "rstd"),
    ]);
    run.launch(|device| rms_norm::forward(device, &norm, c.norm_eps))?;
    let added = v.only(&[u, ROWS, add, y]).renamed(&[(u, "y"), (add, "shared"), (y, "out")]);
    run.launch(|device| moe_reduce::launch(device, &added, false))
}

fn norm_backward(
    v: &Views,
    run: &mut Launches<'_>,
    [h, weight, rstd, dy, dh, dweight]: [&'static str; 6],
) -> Result<(), RuntimeError> {
    let names = [
        (h, "x"),
        (weight, "weight"),
        (rstd, "rstd"),
        (dy, "dy"),
        (dh, "dx"),
        (dweight, "dweight"),
    ];
    let norm = v.only(&[h, weight, rstd, dy, dh, dweight, "workspace"]).renamed(&names);
    run.launch(|device| rms_norm::backward(device, &norm))
}

/// The oracle's inputs.
fn named(t: &Bound<'_>) -> OracleResult<Named> {
    let names = ["streams", "attn_fn", "attn_scale", "attn_base", "attn_weight", "attn_add"];
    let further = ["ffn_fn", "ffn_scale", "ffn_base", "ffn_weight", "ffn_add", "dout"];
    names
        .into_iter()
        .chain(further)
        .try_fold(Named::new(), |all, name| Ok(all.with(name, t.f64(name)?)))
}
