//! `parity blame`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use dsv4_kernels::model::checkpoint::Checkpoint;
use serde_json::json;

use super::checkpoint::{loaded, opened};
use super::{DeviceArguments, Exit, output};
use crate::blame::recorded::{self, Run};
use crate::blame::summary::Blame;
use crate::blame::{dump, judge};
use crate::report::blame::{page, terminal};

/// Options of `parity blame`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:
  parity blame --model tiny --prompt-tokens 1,2,3
  parity blame --model tiny --prompt-tokens 1,2,3 --kernels mine --out blame
  parity blame --dump theirs
  parity blame --dump theirs --against ours",
    mut_arg("memory", |argument| argument.hide(true))
)]
pub struct BlameArguments {
    /// Folder of a checkpoint of a small model, such as one of `parity checkpoint`
    #[arg(long, value_name = "DIR", required_unless_present = "dump")]
    model: Option<PathBuf>,
    /// Tokens of the prompt, as numbers
    #[arg(long, value_name = "IDS", value_delimiter = ',', required_unless_present = "dump")]
    prompt_tokens: Vec<u32>,
    /// Tokens to generate after it; all but the last are fed
    #[arg(long, value_name = "N", default_value_t = 2)]
    max_tokens: usize,
    /// The most tokens of a step of the prefill, 1 to 127
    #[arg(long, value_name = "N", default_value_t = 127)]
    chunk: usize,
    /// Judge the calls of this folder instead, of any stack
    ///
    /// It holds safetensors files with tensors named NUMBER/LAYER/OPERATOR/NAME/TENSOR, under the
    /// operators' names (`parity ops NAME`); what the call wrote over is NAME:after. `calls.json`
    /// may hold fields that no tensor tells, and `config.json` the model's configuration.
    /// `dsv4_parity.dump` writes such a folder from PyTorch modules.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["model", "prompt_tokens", "save"])]
    dump: Option<PathBuf>,
    /// Compare the dump with this one, to the first divergence, instead of judging it
    #[arg(long, value_name = "DIR", requires = "dump")]
    against: Option<PathBuf>,
    /// Write the run's calls to this folder, as --dump reads them
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    /// Folder for the page, index.html, and its numbers, blame.json
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Run kernels whose bits depend on no other token of a step
    #[arg(long, conflicts_with = "dump")]
    invariant: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArguments,
}

/// Judges each call of a run by itself.
pub fn execute(arguments: &BlameArguments) -> Result<Exit> {
    if let (Some(one), Some(other)) = (&arguments.dump, &arguments.against) {
        return compare(arguments, one, other);
    }
    let blame = match &arguments.dump {
        Some(folder) => {
            let (calls, config) = dump::read(folder)?;
            let num_layers = config.map(|config| config.layers.len());
            let run = format!("{}", folder.display());
            Blame { run, num_layers, findings: judge::all(&calls) }
        }
        None => recorded(arguments)?,
    };
    if let Some(folder) = &arguments.out {
        write(folder, &blame)?;
    }
    match arguments.json {
        true => output::json(&blame)?,
        false => outln!("{}", terminal::text(&blame)),
    }
    if let Some(folder) = &arguments.out {
        detailln!("report: {}", folder.join("index.html").display());
    }
    Ok(match blame.first() {
        Some(_) => Exit::Disagreed,
        // Nothing was learnt of a run in which nothing was compared.
        None if blame.compared() == 0 => Exit::BadInput,
        None => Exit::Agreed,
    })
}

fn write(folder: &Path, blame: &Blame) -> Result<()> {
    let save = |name: &str, text: String| {
        let path = folder.join(name);
        std::fs::write(&path, text).with_context(|| format!("{}", path.display()))
    };
    std::fs::create_dir_all(folder).with_context(|| format!("{}", folder.display()))?;
    save("index.html", page::page(blame))?;
    save("blame.json", serde_json::to_string_pretty(blame)?)
}

/// Runs a model and judges its calls.
fn recorded(arguments: &BlameArguments) -> Result<Blame> {
    let folder = arguments.model.as_deref().context("--model is missing")?;
    let checkpoint = Checkpoint::open(folder)?;
    let (device, config) = (opened(&arguments.device, arguments.invariant)?, checkpoint.config());
    let weights = loaded(&device, &checkpoint)?;
    let (max_tokens, chunk) = (arguments.max_tokens, arguments.chunk);
    let run = Run { prompt: &arguments.prompt_tokens, max_tokens, chunk };
    let calls = recorded::record(&device, config, weights, run)?;
    if let Some(folder) = &arguments.save {
        dump::write(folder, config, &calls)?;
    }
    let run = format!("{}, {} tokens", folder.display(), run.num_tokens());
    Ok(Blame { run, num_layers: Some(config.layers.len()), findings: judge::all(&calls) })
}

/// Compares two dumps.
fn compare(arguments: &BlameArguments, one: &Path, other: &Path) -> Result<Exit> {
    let ((ours, _), (theirs, _)) = (dump::read(one)?, dump::read(other)?);
    let (apart, missing) = dump::compare(&ours, &theirs);
    let compared = ours.len() - missing.len();
    if arguments.json {
        let missing: Vec<_> = missing.iter().collect();
        output::json(&json!({ "compared": compared, "apart": apart, "missing": missing }))?;
    } else {
        outln!("{}", terminal::divergence(&apart, compared, missing.len()));
    }
    Ok(match (apart.is_empty(), compared) {
        (_, 0) => Exit::BadInput,
        (true, _) => Exit::Agreed,
        (false, _) => Exit::Disagreed,
    })
}
