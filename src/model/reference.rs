//! The oracle of a model whose weights are on a device, and what it would have sampled.
//!
//! Weights are downloaded: the oracle reads what the kernels read. All of them are f64 then, so this
//! is for small models.

use candle_core::Tensor;
use dsv4_kernels::cache::cache_layout::{LayerKind, WINDOW};
use dsv4_kernels::model::config::Config;
use dsv4_kernels::model::engine::Sampling;
use dsv4_kernels::model::weights::Weights;
use dsv4_reference::cache::kv_cache::RowFormat;
use dsv4_reference::formats::quantize_fp8::{self, Group};
use dsv4_reference::formats::scale_layout::ScaleLayout;
use dsv4_reference::head::sampler;
use dsv4_reference::model::{Kind, Model, Numbers, Table};
use dsv4_reference::projections::rope::{self, YarnParameters};
use dsv4_reference::quantize::ScaleType;
use dsv4_reference::streams::mhc_mix;
use dsv4_reference::{Format, Named, Rounding};
use dsv4_runtime::{Device, HostTensor, RuntimeError, TensorView, Views};
use thiserror::Error;

use crate::operator::fields::{elements, tensor};

/// Why there is no reference.
#[derive(Debug, Error)]
pub enum ReferenceError {
    /// A download.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// An oracle.
    #[error(transparent)]
    Oracle(#[from] dsv4_reference::Error),
}

impl From<candle_core::Error> for ReferenceError {
    fn from(error: candle_core::Error) -> Self {
        Self::Oracle(error.into())
    }
}

type Result<T> = std::result::Result<T, ReferenceError>;

/// The names of weights that the oracle has under others.
const RENAMED: [(&str, &str); 7] = [
    ("wq_a", "wq_a_codes"),
    ("wq_b", "wq_b_codes"),
    ("wkv", "wkv_codes"),
    ("wo_b", "wo_b_codes"),
    ("gate", "gate_weight"),
    ("e_proj", "e_proj_codes"),
    ("h_proj", "h_proj_codes"),
];

fn downloaded(device: &Device, view: &TensorView) -> Result<Tensor> {
    let mut bytes = vec![0; view.elements() * view.dtype.size()];
    device.backend().download(view.address, &mut bytes)?;
    let host = HostTensor { dtype: view.dtype, shape: view.shape.clone(), bytes };
    Ok(tensor(host.to_f64(), &view.shape)?)
}

/// Weights under the oracle's names. The indexer's projection is decoded.
fn named(device: &Device, views: &Views) -> Result<Named> {
    let own = |name| RENAMED.iter().find(|(from, _)| *from == name).map_or(name, |&(_, to)| to);
    let all = views.iter().try_fold(Named::new(), |all, (name, view)| {
        Ok::<_, ReferenceError>(all.with(own(name), downloaded(device, view)?))
    })?;
    let (Some(codes), Some(scales)) = (all.get("index_wq_b"), all.get("index_wq_b_scales")) else {
        return Ok(all);
    };
    let coded = Named::new().with("codes", codes.clone()).with("scales", scales.clone());
    let (group, scale, layout) = (Group::Square, ScaleType::E8m0, ScaleLayout::Plain);
    let options = quantize_fp8::Options { group, scale, layout };
    let decoded = quantize_fp8::dequantize(&coded, options, Format::F32)?.tensor("y")?.clone();
    Ok(all.with("index_wq_b", decoded))
}

/// The table of the first positions, rounded to fp32.
fn table(parameters: &YarnParameters, tokens: usize) -> Result<Table> {
    let positions: Vec<i64> = (0..tokens as i64).collect();
    let (cos, sin) = rope::table(&rope::inv_freq_f32(parameters)?, &positions)?;
    let stored = |table: &Tensor| -> Result<Tensor> {
        let rounded = elements(table)?.into_iter().map(|x| Format::F32.nearest(x)).collect();
        Ok(tensor(rounded, table.dims())?)
    };
    Ok(Table { cos: stored(&cos)?, sin: stored(&sin)? })
}

/// The oracle of a model, for a sequence of at most that many tokens.
///
/// # Errors
/// A download that fails, weights that the oracle does not take.
pub fn oracle(
    device: &Device,
    config: &Config,
    weights: &Weights<'_>,
    tokens: usize,
) -> Result<Model> {
    let (rope_dim, yarn) = (config.rope_dim, config.yarn);
    let main = YarnParameters { theta: config.rope_theta, rope_dim, ..YarnParameters::main() };
    let compress = YarnParameters {
        theta: config.compress_rope_theta,
        rope_dim,
        factor: Some(yarn.factor),
        original_max_position: yarn.original_positions as f64,
        beta_fast: yarn.beta_fast,
        beta_slow: yarn.beta_slow,
    };
    let kind = |kind: &LayerKind| match kind {
        LayerKind::Window => Kind::Window,
        LayerKind::Csa => Kind::Csa,
        LayerKind::Hca => Kind::Hca,
    };
    let layers = config.layers.iter().map(kind).zip(&weights.layers);
    let layers = layers.map(|(kind, views)| Ok((kind, named(device, views)?)));
    Ok(Model {
        numbers: Numbers {
            num_heads: config.num_heads,
            row: RowFormat { nope_dim: config.head_dim - rope_dim, rope_dim },
            window: WINDOW,
            index_topk: config.index_topk,
            topk: config.topk,
            route_scale: config.route_scale,
            limit: config.swiglu_limit,
            streams: mhc_mix::Numbers {
                sinkhorn_iters: config.sinkhorn_iters,
                norm_eps: config.norm_eps,
                hc_eps: config.hc_eps,
            },
        },
        main: table(&main, tokens)?,
        compress: table(&compress, tokens)?,
        shared: named(device, &weights.shared)?,
        layers: layers.collect::<Result<_>>()?,
        module: weights.mtp.as_ref().map(|views| named(device, views)).transpose()?,
    })
}

/// A token that the kernels sampled, and the oracle's after the same tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// The kernels' token.
    pub token: u32,
    /// The oracle's; `None` where no logit is above -infinity.
    pub reference: Option<u32>,
    /// By how much the kernels' token would have to gain in logits to be the oracle's, too.
    pub margin: f64,
}

/// For each generated token what the oracle would have sampled from the same random numbers, by its
/// exact logits.
///
/// # Errors
/// Those of the oracles.
pub fn choices(
    oracle: &Model,
    prompt: &[u32],
    generated: &[u32],
    sampling: Sampling,
) -> Result<Vec<Choice>> {
    if prompt.is_empty() || generated.is_empty() {
        return Ok(Vec::new());
    }
    // Nothing follows from the last token.
    let read: Vec<f64> =
        [prompt, &generated[..generated.len() - 1]].concat().into_iter().map(f64::from).collect();
    let oracle = oracle.shortened(read.len())?;
    let count = generated.len();
    let ids = tensor(read.clone(), &[read.len()])?;
    let logits = oracle.logits(&ids, &mut Rounding::exact())?;
    let logits = logits.narrow(0, prompt.len() - 1, count)?.contiguous()?;
    let all = |value: f64| tensor(vec![value; count], &[count]);
    let steps = (prompt.len()..prompt.len() + count).map(|at| at as f64).collect();
    let inputs = Named::new()
        .with("logits", logits.clone())
        .with("temperature", all(sampling.temperature.into())?)
        .with("top_p", all(sampling.top_p.into())?)
        .with("seed", all(sampling.seed as i64 as f64)?)
        .with("step", tensor(steps, &[count])?);
    let sampled = sampler::forward(&inputs, &mut Rounding::exact())?;
    let (tokens, scores) =
        (elements(sampled.tensor("tokens")?)?, elements(sampled.tensor("scores")?)?);
    let (logits, width) = (elements(&logits)?, logits.dim(1)?);
    let temperature = f64::from(sampling.temperature).max(sampler::LEAST_TEMPERATURE);
    let choice = |(row, &token): (usize, &u32)| {
        let reference = (tokens[row] >= 0.0).then_some(tokens[row] as u32);
        let ahead = |numbers: &[f64]| {
            reference.map_or(0.0, |other| {
                numbers[row * width + other as usize] - numbers[row * width + token as usize]
            })
        };
        let margin = match sampling.temperature > 0.0 {
            true => ahead(&scores) * temperature * std::f64::consts::LN_2,
            false => ahead(&logits),
        };
        Choice { token, reference, margin }
    };
    Ok(generated.iter().enumerate().map(choice).collect())
}
