//! `parity latency`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use dsv4_kernels::cache::cache_layout::LayerKind;
use dsv4_kernels::model::config::Config;
use dsv4_runtime::Device;

use super::checkpoint::{Kind, opened};
use super::{DeviceArguments, Exit, command_line, output};
use crate::model::latency::{self, Work};
use crate::model::text::usual_kernels;
use crate::report::beside::log;
use crate::report::latency::{self as pages, Place};

/// Options of `parity latency`.
#[derive(Debug, Args)]
#[command(
    after_help = "Example: parity latency --backend cuda --batch 1,32 --context 8192",
    mut_arg("memory", |argument| argument.hide(true))
)]
pub struct LatencyArguments {
    /// Kinds of the layers, in their order; other sizes are those of the small released model
    #[arg(long, value_enum, value_delimiter = ',', default_value = "window,csa,hca,csa")]
    layers: Vec<Kind>,
    /// Take every size from this config.json
    #[arg(long, value_name = "FILE", conflicts_with = "layers")]
    config: Option<PathBuf>,
    /// Sequences that decode a token
    #[arg(long, value_name = "N,M", value_delimiter = ',', default_value = "1,32,128", value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: Vec<u32>,
    /// Tokens of each of them
    #[arg(long, value_name = "N,M", value_delimiter = ',', default_value = "8192,65536", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    context: Vec<u32>,
    /// Prompts of 127 tokens in a step of the prefill; 0 times none
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(0..=4096))]
    prompts: u32,
    /// Samples of each time
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = clap::value_parser!(u16).range(1..=1000))]
    samples: u16,
    /// Run kernels whose bits depend on no other token of a step
    #[arg(long)]
    invariant: bool,
    /// Also write a page
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArguments,
}

/// Times steps of a model with random weights, and their launches alone.
pub fn execute(arguments: &LatencyArguments) -> Result<Exit> {
    let config = configuration(arguments)?;
    let works = works(arguments);
    if let Some(work) = works.iter().find(|work| work.context > config.max_positions) {
        bail!("--context {}: the model has {} positions", work.context, config.max_positions);
    }
    let device = opened(&arguments.device, arguments.invariant)?;
    let samples = usize::from(arguments.samples);
    let all = latency::measure(&device, &config, &works, usual_kernels(&device), samples)?;
    if let Some(path) = &arguments.markdown {
        let page = pages::page(&place(&device, &config, arguments), &all);
        std::fs::write(path, page).with_context(|| format!("writing {}", path.display()))?;
    }
    if arguments.json {
        output::json(&all)?;
        return Ok(Exit::Agreed);
    }
    out!("{}", pages::tables(&all));
    detailln!("\n{}", output::faint(pages::LEGEND));
    Ok(Exit::Agreed)
}

fn configuration(arguments: &LatencyArguments) -> Result<Config> {
    let read = |path: &Path| -> Result<Config> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("--config {}", path.display()))?;
        Config::parse(&text).with_context(|| format!("--config {}", path.display()))
    };
    let kinds: Vec<LayerKind> = arguments.layers.iter().map(|&kind| kind.into()).collect();
    // One layer with a table of ids stands for the few that a released model has.
    let usual = || Config { num_hash_layers: 1, ..Config::flash(kinds) };
    let config = arguments.config.as_deref().map_or_else(|| Ok(usual()), read)?;
    // Steps are those of main layers.
    Ok(Config { num_mtp_layers: 0, ..config })
}

fn works(arguments: &LatencyArguments) -> Vec<Work> {
    let decode = arguments.context.iter().flat_map(|&context| {
        let of = move |&batch: &u32| Work {
            batch: batch as usize,
            context: context as usize,
            tokens: 1,
        };
        arguments.batch.iter().map(of)
    });
    let tokens = latency::STEP_TOKENS;
    let prompts = (arguments.prompts > 0).then_some(arguments.prompts as usize);
    let prefill = prompts.map(|batch| Work { batch, context: tokens, tokens });
    decode.chain(prefill).collect()
}

fn place(device: &Device, config: &Config, arguments: &LatencyArguments) -> Place {
    let environment = device.environment();
    let kinds: Vec<&str> = config
        .layers
        .iter()
        .map(|kind| match kind {
            LayerKind::Window => "window",
            LayerKind::Csa => "CSA",
            LayerKind::Hca => "HCA",
        })
        .collect();
    let Config { hidden_size, num_heads, num_experts, topk, .. } = config;
    Place {
        command: command_line().join(" "),
        device: environment.device.clone(),
        software: format!("{}, {}", environment.driver, environment.compiler),
        revision: log::revision(),
        unix: log::now(),
        model: format!(
            "{}; {hidden_size} channels, {num_heads} heads, {topk} of {num_experts} experts{}",
            kinds.join(", "),
            if arguments.invariant { ", invariant kernels" } else { "" }
        ),
        samples: arguments.samples.into(),
    }
}
