//! Random checkpoints with the official names, shards and formats (inference 5.2, 15).
//!
//! Weights are normal, of a magnitude at which activations keep theirs, then quantized as released
//! ones are. Each tensor has a random stream of its own, which its name and the seed determine: the
//! same seed gives the same bytes.

use std::borrow::Cow;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use dsv4_kernels::cache::cache_layout::LayerKind;
use dsv4_kernels::model::checkpoint::INDEX;
use dsv4_kernels::model::checkpoint::tensors::{Format, LayerId, TensorSpec, of_layer, shared};
use dsv4_kernels::model::config::{Config, ExpertFormat, FILE};
use dsv4_reference::formats::quantize_fp8::{self, Group};
use dsv4_reference::formats::quantize_mxfp4;
use dsv4_reference::formats::quantize_nvfp4;
use dsv4_reference::formats::scale_layout::ScaleLayout;
use dsv4_reference::quantize::ScaleType;
use dsv4_reference::{Named, Result as OracleResult};
use dsv4_runtime::{DType, HostTensor};
use rand::seq::index;
use rayon::prelude::*;
use safetensors::tensor::{Dtype, View, serialize_to_file};
use serde_json::json;
use thiserror::Error;

use crate::case::{Distribution, Draw};
use crate::operator::fields::{elements, tensor};

/// The sizes of a small model; all others follow from them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// What each main layer attends to.
    pub layers: Vec<LayerKind>,
    /// Channels of a residual stream: a multiple of 128.
    pub hidden_size: usize,
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Routed experts.
    pub num_experts: usize,
    /// Experts of a token.
    pub topk: usize,
    /// Main layers with a hashed router.
    pub num_hash_layers: usize,
    /// MTP modules, 0 or 1.
    pub num_mtp_layers: usize,
    /// How the experts of main layers are stored.
    pub expert_format: ExpertFormat,
}

impl Sizes {
    /// The configuration of a model of these sizes. [`Config::parse`] of its JSON checks it.
    pub fn config(&self) -> Config {
        let scale = (self.hidden_size / 512).max(1);
        Config {
            num_mtp_layers: self.num_mtp_layers,
            num_hash_layers: self.num_hash_layers,
            hidden_size: self.hidden_size,
            vocab_size: self.vocab_size,
            num_heads: 4 * scale,
            head_dim: 128,
            q_lora_rank: 128 * scale,
            o_groups: 2,
            o_lora_rank: 128,
            index_heads: 16,
            index_topk: 8,
            num_experts: self.num_experts,
            topk: self.topk,
            expert_width: 128 * scale,
            expert_format: self.expert_format,
            max_positions: 4096,
            ..Config::flash(self.layers.clone())
        }
    }
}

/// Why no checkpoint was written.
#[derive(Debug, Error)]
pub enum RandomError {
    /// The folder has files.
    #[error("{0} is not empty: a checkpoint is written to a new folder")]
    NotEmpty(PathBuf),
    /// A file cannot be written.
    #[error("writing {path}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A shard cannot be written.
    #[error("writing {path}: {reason}")]
    Shard {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// Values that cannot be quantized.
    #[error("quantizing `{name}`: {reason}")]
    Quantize {
        /// The tensor.
        name: String,
        /// Why.
        reason: String,
    },
}

/// A tensor of a shard.
pub(super) struct Stored {
    dtype: Dtype,
    shape: Vec<usize>,
    pub(super) bytes: Vec<u8>,
}

impl View for &Stored {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Writes a random checkpoint: a shard of the tensors outside of all layers and one of each layer,
/// then the index, then `config.json`. A folder without the last two is no checkpoint, so an
/// interrupted call leaves none. `progress` gets the name and the bytes of each tensor.
///
/// # Errors
/// A folder with files in it, and a file that cannot be written.
pub fn write(
    folder: &Path,
    config: &Config,
    seed: u64,
    progress: &(dyn Fn(&str, usize) + Sync),
) -> Result<(), RandomError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| RandomError::Write { path, source }
    };
    fs::create_dir_all(folder).map_err(failed(folder))?;
    if fs::read_dir(folder).map_err(failed(folder))?.next().is_some() {
        return Err(RandomError::NotEmpty(folder.to_owned()));
    }
    let layers = LayerId::all(config);
    let count = 1 + layers.len();
    let mut weight_map = serde_json::Map::new();
    let mut total = 0;
    let parts =
        [shared(config)].into_iter().chain(layers.into_iter().map(|id| of_layer(config, id)));
    for (number, specs) in parts.enumerate() {
        let name = format!("model-{:05}-of-{count:05}.safetensors", number + 1);
        total += specs.iter().map(TensorSpec::bytes).sum::<usize>();
        write_shard(&folder.join(&name), config, &specs, seed, progress)?;
        weight_map.extend(specs.into_iter().map(|spec| (spec.name, json!(name))));
    }
    let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
    for (name, text) in [(INDEX, format!("{index:#}\n")), (FILE, config.to_json())] {
        let path = folder.join(name);
        fs::write(&path, text).map_err(failed(&path))?;
    }
    Ok(())
}

fn write_shard(
    path: &Path,
    config: &Config,
    specs: &[TensorSpec],
    seed: u64,
    progress: &(dyn Fn(&str, usize) + Sync),
) -> Result<(), RandomError> {
    let of = |(at, _): (usize, &TensorSpec)| -> Result<Vec<(String, Stored)>, RandomError> {
        let made = made(config, &specs[at..], seed)?;
        if let Some((name, _)) = made.first() {
            progress(name, made.iter().map(|(_, stored)| stored.bytes.len()).sum());
        }
        Ok(made)
    };
    let tensors: Vec<Vec<(String, Stored)>> =
        specs.par_iter().enumerate().map(of).collect::<Result<_, _>>()?;
    let all = tensors.iter().flatten().map(|(name, stored)| (name.as_str(), stored));
    serialize_to_file(all, None, path).map_err(|error| {
        let (path, reason) = (path.to_owned(), error.to_string());
        RandomError::Shard { path, reason }
    })
}

/// The first of some tensors, and those that are made with it: the scales of quantized weights follow
/// the codes, in the list as in what is made. Nothing for a tensor that is made with an earlier one.
pub(super) fn made(
    config: &Config,
    specs: &[TensorSpec],
    seed: u64,
) -> Result<Vec<(String, Stored)>, RandomError> {
    let Some(spec) = specs.first() else { return Ok(Vec::new()) };
    let with_scales = |made: &mut dyn Iterator<Item = Vec<u8>>| {
        let of = |(spec, bytes): (&TensorSpec, Vec<u8>)| (spec.name.clone(), stored(spec, bytes));
        specs.iter().zip(made).map(of).collect()
    };
    Ok(match spec.format {
        Format::E8m0 | Format::Nvfp4Scales => Vec::new(),
        Format::F32 if spec.is_global_scale() => Vec::new(),
        Format::Nvfp4Pairs => {
            with_scales(&mut nvfp4(spec, seed).map_err(failed(spec))?.into_iter())
        }
        Format::E4m3 | Format::E2m1Pairs => {
            with_scales(&mut quantized(spec, seed).map_err(failed(spec))?.into_iter())
        }
        Format::I64 => vec![(spec.name.clone(), stored(spec, table(config, spec, seed)))],
        Format::Bf16 | Format::F32 => vec![(spec.name.clone(), stored(spec, numbers(spec, seed)))],
    })
}

/// What an oracle's refusal to quantize a tensor is to the caller.
fn failed(spec: &TensorSpec) -> impl Fn(dsv4_reference::Error) -> RandomError + '_ {
    |error| RandomError::Quantize { name: spec.name.clone(), reason: error.to_string() }
}

fn stored(spec: &TensorSpec, bytes: Vec<u8>) -> Stored {
    debug_assert_eq!(bytes.len(), spec.bytes(), "{}", spec.name);
    Stored { dtype: spec.format.stored(), shape: spec.shape.clone(), bytes }
}

/// The values of a weight `[out_features, in_features]`, of which a row of products with normal
/// values is normal.
fn weight(name: &str, [rows, columns]: [usize; 2], seed: u64) -> Vec<f64> {
    // Logits of some units let a random model prefer tokens.
    let scale = if name == "head.weight" { 4.0 } else { 1.0 };
    let magnitude = if name == "embed.weight" { 1.0 } else { scale / (columns as f64).sqrt() };
    Draw::new(seed, name).values(Distribution::Normal, rows, columns, magnitude)
}

/// The values of a tensor of bf16 or fp32, as bytes.
fn numbers(spec: &TensorSpec, seed: u64) -> Vec<u8> {
    let (name, count) = (spec.name.as_str(), spec.shape.iter().product());
    let normal = |offset: f64, magnitude: f64| -> Vec<f64> {
        let drawn = Draw::new(seed, name).values(Distribution::Normal, 1, count, magnitude);
        drawn.into_iter().map(|value| offset + value).collect()
    };
    let is_norm = name.ends_with("norm.weight") || name.ends_with("hnorm.weight");
    let values = match spec.shape[..] {
        _ if is_norm || name.ends_with("_scale") => normal(1.0, 0.1),
        _ if name.ends_with("gate.bias") => normal(0.0, 0.1),
        _ if name.ends_with("ape") => normal(0.0, 0.5),
        [rows, columns] => weight(name, [rows, columns], seed),
        _ => normal(0.0, 1.0),
    };
    let dtype = if spec.format == Format::Bf16 { DType::Bf16 } else { DType::F32 };
    HostTensor::from_f64(dtype, &spec.shape, &values).bytes
}

/// The values of a weight, `x`. Weights have been bf16 before they are quantized.
fn in_bf16(spec: &TensorSpec, columns: usize, seed: u64) -> OracleResult<Named> {
    let shape = [spec.shape[0], columns];
    let numbers = HostTensor::from_f64(DType::Bf16, &shape, &weight(&spec.name, shape, seed));
    Ok(Named::new().with("x", tensor(numbers.to_f64(), &shape)?))
}

/// Codes and scales as they are stored.
fn stored_bytes(found: &Named) -> OracleResult<[Vec<u8>; 2]> {
    let bytes = |name| -> OracleResult<Vec<u8>> {
        Ok(elements(found.tensor(name)?)?.into_iter().map(|byte| byte as u8).collect())
    };
    Ok([bytes("codes")?, bytes("scales")?])
}

/// Codes and scales of a quantized weight.
fn quantized(spec: &TensorSpec, seed: u64) -> OracleResult<[Vec<u8>; 2]> {
    if spec.format == Format::E2m1Pairs {
        let x = in_bf16(spec, 2 * spec.shape[1], seed)?;
        return stored_bytes(&quantize_mxfp4::quantize(&x, ScaleLayout::Plain)?);
    }
    let (group, scale, layout) = (Group::Square, ScaleType::E8m0, ScaleLayout::Plain);
    let options = quantize_fp8::Options { group, scale, layout };
    stored_bytes(&quantize_fp8::quantize(&in_bf16(spec, spec.shape[1], seed)?, options)?)
}

/// Codes, scales, the scale of the matrix and that of its inputs, of NVFP4.
fn nvfp4(spec: &TensorSpec, seed: u64) -> OracleResult<[Vec<u8>; 4]> {
    let x = in_bf16(spec, 2 * spec.shape[1], seed)?;
    let global = quantize_nvfp4::global_scale(&x)?.tensor("global_scale")?.clone();
    let scale = elements(&global)?[0];
    let found = quantize_nvfp4::quantize(&x.with("global_scale", global), ScaleLayout::Plain)?;
    let [codes, scales] = stored_bytes(&found)?;
    // The largest of some hundred normal values, over the largest code; no two experts' are equal.
    let input = Draw::new(seed, &spec.name).values(Distribution::Uniform, 1, 1, 1.0)[0];
    let fp32 = |value: f64| (value as f32).to_le_bytes().to_vec();
    Ok([codes, scales, fp32(scale), fp32((4.0 + input) / 2688.0)])
}

/// The table of a hashed router: for each token different experts.
fn table(config: &Config, spec: &TensorSpec, seed: u64) -> Vec<u8> {
    let mut draw = Draw::new(seed, &spec.name);
    let row = |_| index::sample(draw.rng(), config.num_experts, config.topk).into_vec();
    let ids = (0..config.vocab_size).flat_map(row);
    ids.flat_map(|id| (id as i64).to_le_bytes()).collect()
}
