//! `mtp_input` (inference 12.2): the residual streams that enter the MTP module. The embedding of
//! the next token and every stream are normed and projected, and the projection of the embedding
//! is added to that of each stream. Forward and backward, composed as in a layer.
//!
//! ```text
//! forward    e = rms_norm(embedding) enorm      e_y = e e_proj^T
//!            hh = rms_norm(streams) hnorm       h_y = hh h_proj^T      out = e_y + h_y, stream by stream
//! backward   de_y = sum of dout over streams    de, de_proj            dembedding, denorm
//!            dhh, dh_proj of dout               dstreams, dhnorm
//! FP8        codes of e and hh, e_y and h_y of codes
//! ```
//!
//! Each operator may be correct by itself, and still the streams may be wrong. For example, one
//! norm has the other's weight, or a stream gets the embedding of another token. Or e_y is added to
//! one stream only, or its gradient lacks a stream. The sum is `moe_reduce` with a slot for each
//! stream, whose row is its token's; its gradient is that of `moe_expand`.

use dsv4_kernels::experts::{moe_expand, moe_reduce};
use dsv4_kernels::projections::{linear, rms_norm};
use dsv4_kernels::streams::mhc_post::NUM_STREAMS;
use dsv4_reference::head::mtp_input as reference;
use dsv4_runtime::TensorView;

use crate::operator::fields::extent;
use crate::operator::prelude::*;
use crate::operators::projections::chain::ChainProduct;
use crate::operators::projections::rms_norm::sizes_of_rows;

/// The operators in sequence.
pub struct MtpInput;

/// A case: sizes, formats, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MtpInputCase {
    /// Tokens; 0 is allowed.
    pub num_tokens: usize,
    /// Channels of the embedding and of a stream, at most 32768.
    pub hidden_size: usize,
    /// Added to mean squares, of both norms.
    pub eps: f32,
    /// Whether weights and their operands are e4m3 codes, as in serving.
    pub quantized: bool,
    /// The streams and the embedding.
    #[serde(flatten)]
    pub data: Data,
}

fn plain(num_tokens: usize, hidden_size: usize) -> MtpInputCase {
    let (eps, quantized, data) = (1e-6, false, Data::normal(1.0));
    MtpInputCase { num_tokens, hidden_size, eps, quantized, data }
}

/// Its name.
const NAME: &str = "mtp_input";
/// The most channels that the norms support.
const WIDEST: usize = rms_norm::MAX_WIDTH;
/// The row of e_y of each stream, as the slots of `moe_reduce`.
const TOKENS: &str = "tokens_of_streams";
/// The rows of the streams of each token, as the slots of `moe_expand`.
const STREAMS: &str = "streams_of_tokens";

/// The token of each stream's row, and the rows of each token's streams.
fn set_rows(tensors: &mut Tensors, num_tokens: usize, quantized: bool) {
    let rows = 0..(NUM_STREAMS * num_tokens) as i32;
    let of_streams: Vec<i32> = rows.clone().map(|row| row / NUM_STREAMS as i32).collect();
    tensors.put(TOKENS, HostTensor::from_i32(&[of_streams.len(), 1], &of_streams));
    if !quantized {
        let rows: Vec<i32> = rows.collect();
        tensors.put(STREAMS, HostTensor::from_i32(&[num_tokens, NUM_STREAMS], &rows));
    }
}

impl Operator for MtpInput {
    type Case = MtpInputCase;
    const SUM_LANES: usize = 32;

    const ABOUT: About = About {
        name: NAME,
        family: Family::Head,
        summary: "the streams of the MTP module: norms and projections of the streams and of the next token's embedding",
        specification: &["inference 3", "inference 5.2", "inference 12.2"],
        paths: &[
            "rms_norm_forward_warp",
            "rms_norm_forward_scalar",
            "linear_forward_large",
            "linear_forward_one",
            "linear_forward_small",
            "linear_forward_scalar",
            "linear_sum",
            "quantize_fp8_vector",
            "quantize_fp8_scalar",
            "linear_quantized_large<fp8>",
            "linear_quantized_small<fp8>",
            "linear_quantized_scalar<fp8>",
            "linear_quantized_sum<fp8>",
            "moe_reduce_forward_vector",
            "moe_reduce_forward_scalar",
            "backward moe_expand_backward_vector",
            "backward moe_expand_backward_scalar",
            "backward linear_dx_large",
            "backward linear_dx_small",
            "backward linear_dx_scalar",
            "backward linear_dw_large",
            "backward linear_dw_scalar",
            "backward linear_sum",
            "backward rms_norm_backward_warp",
            "backward rms_norm_backward_scalar",
            "backward rms_norm_dweight",
        ],
        modules: Vec::new,
        cases: [8, 20, 40],
    };

    const CHAIN: &'static [&'static str] =
        &["rms_norm", "linear", "quantize_fp8", "moe_reduce", "moe_expand"];

    fn tensors(c: &MtpInputCase) -> Specs {
        let (bf16, f32, u8, i32) = (DType::Bf16, DType::F32, DType::U8, DType::I32);
        let (coded, numbers) = (c.quantized, !c.quantized);
        let (tokens, stream) = (axis("num_tokens", c.num_tokens), axis("stream", NUM_STREAMS));
        let channels = axis("hidden_size", c.hidden_size).multiples(1, WIDEST);
        let features = axis("out_features", c.hidden_size);
        let blocks = |name| axis(name, c.hidden_size.div_ceil(linear::BLOCK));
        let (in_blocks, out_blocks) = (blocks("hidden_blocks"), blocks("out_blocks"));
        let (rows, streams) = ([tokens, channels], [tokens, stream, channels]);
        let (y, streams_of_y) = ([tokens, features], [tokens, stream, features]);
        let deviation = (c.hidden_size.max(1) as f64).sqrt().recip();
        let norm = |name| input(name, f32, &[channels]).drawn(Distribution::Normal, 1.0);
        let weight = |name| {
            let weight = input(name, bf16, &[features, channels]).rows();
            weight.drawn(Distribution::Normal, deviation).when(numbers)
        };
        let codes = |name| input(name, u8, &[features, channels]).rows().when(coded);
        let scales = |name| input(name, u8, &[out_blocks, in_blocks]).when(coded);
        // Row numbers, which do not follow their tokens.
        let slots = axis("num_slots", NUM_STREAMS * c.num_tokens);
        let sums = axis("num_sums", c.num_tokens);
        let tensors = [
            input("embedding", bf16, &rows).rows().drawn_as(c.data),
            input("streams", bf16, &streams).rows().joined().drawn_as(c.data),
            norm("enorm"),
            norm("hnorm"),
            weight("e_proj"),
            weight("h_proj"),
            codes("e_proj_codes"),
            scales("e_proj_scales"),
            codes("h_proj_codes"),
            scales("h_proj_scales"),
            input(TOKENS, i32, &[slots, axis("of_stream", 1)]),
            input(STREAMS, i32, &[sums, stream]).when(numbers),
            output("e", bf16, &rows).rows(),
            output("e_rstd", f32, &rows[..1]),
            scratch("e_codes", u8, &rows).when(coded),
            scratch("e_scales", u8, &[tokens, in_blocks]).when(coded),
            output("e_y", bf16, &y).rows(),
            output("hh", bf16, &streams).rows().joined(),
            output("h_rstd", f32, &streams[..2]),
            scratch("h_codes", u8, &streams).when(coded),
            scratch("h_scales", u8, &[tokens, stream, in_blocks]).when(coded),
            output("h_y", bf16, &streams_of_y).rows().joined(),
            output("out", bf16, &streams_of_y).rows().joined(),
            upstream("dout", "out").when(numbers),
            gradient("de_y", "e_y", bf16).when(numbers),
            gradient("de_proj", "e_proj", f32),
            gradient("de", "e", bf16).when(numbers),
            gradient("denorm", "enorm", f32).when(numbers),
            gradient("dembedding", "embedding", bf16).when(numbers),
            gradient("dh_proj", "h_proj", f32),
            gradient("dhh", "hh", bf16).when(numbers),
            gradient("dhnorm", "hnorm", f32).when(numbers),
            gradient("dstreams", "streams", bf16).when(numbers),
        ];
        Specs::new(c.data.seed, tensors).positive("eps", c.eps)
    }

    fn check(c: &MtpInputCase) -> Result<(), Refused> {
        c.data.check()
    }

    /// The decoded weights are in no tensor.
    fn oracle_elements(c: &MtpInputCase) -> u128 {
        8 * (c.hidden_size as u128).pow(2)
    }

    fn strategy(profile: Profile) -> BoxedStrategy<MtpInputCase> {
        let [tokens, features] = profile.of([[8, 50], [20, 150], [80, 600]]);
        let eps = prop_oneof![3 => Just(1e-6f32), 1 => Just(1e-2f32)];
        let quantized = prop_oneof![2 => Just(false), 1 => Just(true)];
        // Gradients through the norm of a single channel are only rounding.
        let hidden_size = extent(features, 8).prop_map(|features| features.max(2));
        (0..=tokens, hidden_size, eps, quantized, Data::strategy(-8..=8))
            .prop_map(|(num_tokens, hidden_size, eps, quantized, data)| MtpInputCase {
                num_tokens,
                hidden_size,
                eps,
                quantized,
                data,
            })
            .boxed()
    }

    fn typical() -> Vec<MtpInputCase> {
        // 16 bytes at a time, and one element.
        vec![plain(5, 24), plain(3, 13), plain(5, 144).with(|case| case.quantized = true)]
    }

    fn edge_cases(profile: Profile) -> Vec<MtpInputCase> {
        let coded = |case| MtpInputCase { quantized: true, ..case };
        let mut cases = vec![
            plain(0, 24),
            plain(0, 24).then(coded),
            plain(1, 8),
            // More tokens than small tiles have; more streams than they have.
            plain(18, 40),
            plain(4, 7),
            // Split-k.
            plain(2, 264),
            plain(1, 131).then(coded),
            plain(18, 32).then(coded),
            plain(2, 584).then(coded),
        ];
        if profile == Profile::Full {
            cases.extend([
                plain(2, 1032),
                plain(34, 1032),
                plain(50, 4096),
                plain(1, 4096).then(coded),
            ]);
            cases.extend([plain(50, 4096).then(coded), plain(7, 7168).then(coded)]);
        }
        cases
    }

    fn amend(c: &MtpInputCase, tensors: &mut Tensors) -> OracleResult<()> {
        set_rows(tensors, c.num_tokens, c.quantized);
        if !c.quantized {
            return Ok(());
        }
        let extents = [c.hidden_size; 2];
        OF_EMBEDDING.product.set_weight(c.data.seed, tensors, extents)?;
        OF_STREAMS.product.set_weight(c.data.seed, tensors, extents)
    }

    fn forward(c: &MtpInputCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        let forward = if c.quantized { reference::forward_quantized } else { reference::forward };
        forward(&named(t)?, t.scalar("eps", c.eps.into()), rounding)
    }

    fn backward(c: &MtpInputCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        if c.quantized {
            return Ok(Named::new());
        }
        reference::backward(&named(t)?, t.scalar("eps", c.eps.into()), rounding)
    }

    /// Sequential tensors may share memory: launches have one order.
    fn workspaces(
        c: &MtpInputCase,
        _: &Views,
        device: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        let (rows, width) = (NUM_STREAMS * c.num_tokens, c.hidden_size);
        let of = |rows: usize| {
            let forward = linear::forward_workspace_bytes(device, 1, rows, width, width);
            let backward = linear::backward_workspace_bytes(device, 1, rows, width, width);
            let coded = linear::quantized_workspace_bytes(device, rows, width, width);
            let norm = rms_norm::workspace_bytes(device, DType::Bf16, rows, width);
            forward.max(backward).max(coded).max(norm)
        };
        // Fewer rows may be divided into more parts.
        Ok(vec![("workspace", of(c.num_tokens).max(of(rows)))])
    }

    fn launch(c: &MtpInputCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        for side in [&OF_EMBEDDING, &OF_STREAMS] {
            side.normed(c, v, run)?;
            side.projected(c, v, run)?;
        }
        let sum = v.only(&["e_y", TOKENS]).renamed(&[("e_y", "y"), (TOKENS, "token_topk_to_pos")]);
        let sum = sum.with("shared", &rows_of("h_y", v)?).with("out", &rows_of("out", v)?);
        run.launch(|device| moe_reduce::launch(device, &sum, false))
    }

    fn launch_backward(
        c: &MtpInputCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        if c.quantized {
            return Ok(());
        }
        let sum = v.only(&["de_y", STREAMS]);
        let sum = sum.renamed(&[("de_y", "dx"), (STREAMS, "token_topk_to_pos")]);
        let sum = sum.with("dy", &rows_of("dout", v)?);
        let mut ran = vec![moe_expand::launch(run.device(), &sum, true)?];
        run.freeze(&v["de_y"])?;
        for side in [&OF_EMBEDDING, &OF_STREAMS] {
            ran.extend(side.backward(v, run)?);
        }
        run.ran_backward(ran);
        Ok(())
    }

    fn invariant(_: &MtpInputCase, path: bool) -> &'static [BatchAxis] {
        if path { BatchAxis::OF_ROWS } else { &[] }
    }

    fn batches(c: &MtpInputCase, batches: &mut Batches<'_, Self>) {
        batches.rows_with("num_tokens", |tensors, cut| {
            set_rows(tensors, cut.order.len(), c.quantized);
            Vec::new()
        });
    }

    fn laws(c: &MtpInputCase, laws: &mut Laws<'_, Self>) {
        if !c.quantized {
            laws.scale_upstreams();
        }
        laws.separate("num_tokens", "tokens may be permuted");
    }

    /// The norm of one channel passes a gradient only through eps. What remains before it is the
    /// rounding of terms that cancel.
    fn is_smooth(c: &MtpInputCase) -> bool {
        let elements = c.hidden_size * (5 * c.num_tokens + 2 * c.hidden_size);
        !c.quantized && c.hidden_size > 1 && elements <= 2048
    }

    /// A row bends over its own magnitude.
    fn bends_over(c: &MtpInputCase, tensors: &Tensors, input: &str) -> Option<Vec<f64>> {
        if input != "embedding" && input != "streams" {
            return None;
        }
        let sizes = sizes_of_rows(&tensors.values(input), c.hidden_size, 0.0);
        Some(sizes.into_iter().map(|size| size / 8.0).collect())
    }
}

/// One of the two operands, by the names of its tensors.
struct Side {
    x: &'static str,
    norm: &'static str,
    rstd: &'static str,
    /// Of the normed rows.
    product: ChainProduct,
    dnorm: &'static str,
    dx: &'static str,
}

const OF_EMBEDDING: Side = Side {
    x: "embedding",
    norm: "enorm",
    rstd: "e_rstd",
    product: ChainProduct {
        x: ["e", "e_codes", "e_scales"],
        w: ["e_proj", "e_proj_codes", "e_proj_scales"],
        y: "e_y",
        gradients: ["de", "de_proj", "de_y"],
    },
    dnorm: "denorm",
    dx: "dembedding",
};
const OF_STREAMS: Side = Side {
    x: "streams",
    norm: "hnorm",
    rstd: "h_rstd",
    product: ChainProduct {
        x: ["hh", "h_codes", "h_scales"],
        w: ["h_proj", "h_proj_codes", "h_proj_scales"],
        y: "h_y",
        gradients: ["dhh", "dh_proj", "dout"],
    },
    dnorm: "dhnorm",
    dx: "dstreams",
};

/// The tensor with its streams as rows.
fn rows_of(name: &'static str, v: &Views) -> Result<TensorView, RuntimeError> {
    let view = &v[name];
    view.merged().ok_or_else(|| {
        let reason = format!("strides {:?} must space all streams evenly", view.strides);
        RuntimeError::argument(NAME, name, reason)
    })
}

impl Side {
    /// The tensor of this name, a row for each token or for each stream.
    fn rows(&self, name: &'static str, v: &Views) -> Result<TensorView, RuntimeError> {
        if self.x == OF_STREAMS.x { rows_of(name, v) } else { Ok(v[name].clone()) }
    }

    /// The tensors of the product in these rows.
    fn of_product(&self, v: &Views) -> Result<Views, RuntimeError> {
        let ChainProduct { x: [x, codes, scales], w: [w, w_codes, w_scales], y, gradients } =
            self.product;
        let [dx, dw, dy] = gradients;
        let weights = v.only(&[w, w_codes, w_scales, dw, "workspace"]);
        let names = [x, codes, scales, y, dx, dy];
        let mut rows = names.into_iter().filter(|name| v.get(name).is_some());
        rows.try_fold(weights, |views, name| Ok(views.with(name, &self.rows(name, v)?)))
    }

    fn normed(
        &self,
        c: &MtpInputCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        let [normed, ..] = self.product.x;
        let norm = Views::new().with("x", &self.rows(self.x, v)?).with("weight", &v[self.norm]);
        let norm = norm.with("y", &self.rows(normed, v)?);
        let norm = norm.with("rstd", &self.rows(self.rstd, v)?);
        run.launch(|device| rms_norm::forward(device, &norm, c.eps))?;
        run.freeze(&v[normed])
    }

    fn projected(
        &self,
        c: &MtpInputCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        self.product.launch(&self.of_product(v)?, run, c.quantized)?;
        run.freeze(&v[self.product.y])
    }

    /// From the gradient of the product to that of the rows; the kernels that ran.
    fn backward(
        &self,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<Vec<&'static str>, RuntimeError> {
        let [dnormed, ..] = self.product.gradients;
        let mut ran = self.product.backward(&self.of_product(v)?, run.device())?;
        run.freeze(&v[dnormed])?;
        let norm = Views::new().with("x", &self.rows(self.x, v)?).with("weight", &v[self.norm]);
        let norm = norm.with("rstd", &self.rows(self.rstd, v)?).with("dy", &self.rows(dnormed, v)?);
        let norm = norm.with("dx", &self.rows(self.dx, v)?).with("dweight", &v[self.dnorm]);
        let norm = norm.with("workspace", &v["workspace"]);
        ran.extend(rms_norm::backward(run.device(), &norm)?);
        Ok(ran)
    }
}

/// The oracle's inputs.
fn named(t: &Bound<'_>) -> OracleResult<Named> {
    let weights = ["e_proj", "h_proj", "e_proj_codes", "e_proj_scales"];
    let further = ["h_proj_codes", "h_proj_scales", "embedding", "streams", "enorm", "hnorm"];
    let names = weights.into_iter().chain(further).chain(["dout"]);
    names.into_iter().try_fold(Named::new(), |all, name| Ok(all.maybe(name, t.maybe(name)?)))
}
