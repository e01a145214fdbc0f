//! `parity checkpoint`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use dsv4_kernels::cache::cache_layout::LayerKind;
use dsv4_kernels::model::checkpoint::Checkpoint;
use dsv4_kernels::model::checkpoint::tensors::{self, LayerId, TensorSpec};
use dsv4_kernels::model::config::{Config, ExpertFormat};
use dsv4_kernels::model::weights::Weights;
use dsv4_runtime::Device;
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

use super::{DeviceArguments, Exit, output};
use crate::model::random::{self, Sizes};

/// Options of `parity checkpoint`.
#[derive(Debug, Args)]
#[command(
    after_help = "Example: parity checkpoint --layers window,csa,hca,csa --hidden 512 --seed 1 --out tiny"
)]
pub struct CheckpointArguments {
    /// Folder of the new checkpoint; it must be empty, or not exist
    #[arg(long, value_name = "DIR", required_unless_present = "check")]
    out: Option<PathBuf>,
    /// Check an existing checkpoint instead, and name all that is wrong with it
    #[arg(long, value_name = "DIR", conflicts_with_all = ["out", "config", "layers"])]
    check: Option<PathBuf>,
    /// Kinds of the layers, in their order
    #[arg(long, value_enum, value_delimiter = ',', default_value = "window,csa,hca,csa")]
    layers: Vec<Kind>,
    /// Channels of a residual stream, a multiple of 128
    #[arg(long, value_name = "N", default_value_t = 512)]
    hidden: usize,
    /// Tokens of the vocabulary
    #[arg(long, value_name = "N", default_value_t = 1024)]
    vocab: usize,
    /// Routed experts
    #[arg(long, value_name = "N", default_value_t = 8)]
    experts: usize,
    /// How the experts of main layers are stored; those of an MTP module are MXFP4
    #[arg(long, value_enum, default_value_t = Experts::Mxfp4)]
    expert_format: Experts,
    /// Experts of a token
    #[arg(long, value_name = "N", default_value_t = 2)]
    topk: usize,
    /// Layers whose router is a table of token ids
    #[arg(long, value_name = "N", default_value_t = 1)]
    hash_layers: usize,
    /// MTP modules: 0 or 1
    #[arg(long, value_name = "N", default_value_t = 1)]
    mtp: usize,
    /// Take every size from this config.json
    #[arg(long, value_name = "FILE", conflicts_with_all = SIZES)]
    config: Option<PathBuf>,
    /// Seed of the weights
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// The options that a configuration replaces.
const SIZES: [&str; 8] =
    ["layers", "hidden", "vocab", "experts", "expert_format", "topk", "hash_layers", "mtp"];

/// The format of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Experts {
    /// As released: e2m1 with an e8m0 scale for each 32 values
    Mxfp4,
    /// As third parties have them: e2m1 with an e4m3 scale for each 16 values and one of the matrix
    Nvfp4,
}

/// The kind of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Kind {
    /// A sliding window
    Window,
    /// A window, and entries of 4 tokens chosen by an indexer
    Csa,
    /// A window, and entries of 128 tokens
    Hca,
}

impl From<Kind> for LayerKind {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Window => Self::Window,
            Kind::Csa => Self::Csa,
            Kind::Hca => Self::Hca,
        }
    }
}

/// Writes a random checkpoint and reads it back, or checks one.
pub fn execute(arguments: &CheckpointArguments) -> Result<Exit> {
    if let Some(folder) = &arguments.check {
        summarize(folder)?;
        return Ok(Exit::Agreed);
    }
    let folder = arguments.out.as_deref().context("--out is missing")?;
    let config = arguments.config()?;
    let bytes: usize = tensors::all(&config).iter().map(TensorSpec::bytes).sum();
    let bar = progress(bytes);
    random::write(folder, &config, arguments.seed, &|name, bytes| {
        bar.set_message(name.to_owned());
        bar.inc(bytes as u64);
    })?;
    bar.finish_and_clear();
    summarize(folder)?;
    Ok(Exit::Agreed)
}

impl CheckpointArguments {
    /// The configuration, checked as one that is read from a file.
    fn config(&self) -> Result<Config> {
        let text = match &self.config {
            Some(path) => std::fs::read_to_string(path)
                .with_context(|| format!("--config {}", path.display()))?,
            None => Sizes {
                layers: self.layers.iter().copied().map(LayerKind::from).collect(),
                hidden_size: self.hidden,
                vocab_size: self.vocab,
                num_experts: self.experts,
                topk: self.topk,
                num_hash_layers: self.hash_layers,
                num_mtp_layers: self.mtp,
                expert_format: match self.expert_format {
                    Experts::Mxfp4 => ExpertFormat::Mxfp4,
                    Experts::Nvfp4 => ExpertFormat::Nvfp4,
                },
            }
            .config()
            .to_json(),
        };
        Ok(Config::parse(&text)?)
    }
}

/// A checkpoint's weights on a device, with a bar of the bytes on their way.
pub(super) fn loaded<'d>(device: &'d Device, checkpoint: &Checkpoint) -> Result<Weights<'d>> {
    let bar = progress(checkpoint.total_bytes());
    let weights = Weights::load(device, checkpoint, &mut |name, bytes| {
        bar.set_message(name.to_owned());
        bar.inc(bytes as u64);
    })?;
    bar.finish_and_clear();
    Ok(weights)
}

/// The device of a model; of its launchers' kernels those whose bits depend on no other token of a
/// step, if `invariant`.
pub(super) fn opened(arguments: &DeviceArguments, invariant: bool) -> Result<Device> {
    let device = arguments.open()?;
    Ok(if invariant { device.invariant() } else { device })
}

/// A bar of bytes.
fn progress(bytes: usize) -> ProgressBar {
    let bar =
        if output::is_quiet() { ProgressBar::hidden() } else { ProgressBar::new(bytes as u64) };
    let template = "{msg:40!} {wide_bar} {bytes}/{total_bytes} {elapsed}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// Opens a checkpoint, which checks it, and prints what it has.
fn summarize(folder: &Path) -> Result<()> {
    let checkpoint = Checkpoint::open(folder)?;
    let (config, bytes) = (checkpoint.config(), checkpoint.total_bytes());
    for layer in LayerId::all(config) {
        let kind = match layer.kind(config) {
            LayerKind::Window => "window",
            LayerKind::Csa => "csa",
            LayerKind::Hca => "hca",
        };
        let router = if layer.is_hashed(config) { "hashed" } else { "learned" };
        let bytes = HumanBytes(layer.bytes(config) as u64);
        detailln!("{layer}: {kind}, {router} router, {bytes}");
    }
    let count = tensors::all(config).len();
    outln!(
        "{}: {} layers, {count} tensors, {}",
        folder.display(),
        config.layers.len(),
        HumanBytes(bytes as u64)
    );
    Ok(())
}
