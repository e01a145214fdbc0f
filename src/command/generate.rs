//! `parity generate`.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, bail};
use clap::Args;
use dsv4_kernels::model::checkpoint::Checkpoint;
use dsv4_kernels::model::engine::{Limits, Model, Sampling};
use serde_json::json;

use super::checkpoint::{loaded, opened};
use super::{DeviceArguments, Exit, output};
use crate::model::reference::{self, Choice};
use crate::model::text::{self, Length, Text, usual_kernels};

/// Options of `parity generate`.
#[derive(Debug, Args)]
#[command(
    after_help = "Example: parity generate --model tiny --prompt-tokens 1,2,3 --max-tokens 32",
    mut_arg("memory", |argument| argument.hide(true))
)]
pub struct GenerateArguments {
    /// Folder of a checkpoint, such as one of `parity checkpoint`
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Tokens of the prompt, as numbers
    #[arg(long, value_name = "IDS", value_delimiter = ',', required = true)]
    prompt_tokens: Vec<u32>,
    /// The most tokens to generate
    #[arg(long, value_name = "N", default_value_t = 32)]
    max_tokens: usize,
    /// Generate on after the token that ends a text
    #[arg(long)]
    ignore_eos: bool,
    /// Divides the logits; 0 takes the largest
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f32,
    /// Keep the largest probabilities up to this sum
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f32,
    /// Seed of the random numbers
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// The most tokens of a step of the prefill, 1 to 127
    #[arg(long, value_name = "N", default_value_t = 127)]
    chunk: usize,
    /// Draft tokens of a decode step, by the MTP module of the checkpoint
    ///
    /// A step then verifies them. Drafts change how many steps are needed, not what is sampled.
    /// The default is 1 for a checkpoint with an MTP module.
    #[arg(long, value_name = "N")]
    drafts: Option<usize>,
    /// Compare each token with the oracle's, for a small model
    ///
    /// The oracle samples from its exact logits after the same tokens, by the same random numbers.
    /// A divergence is no verdict: its margin says how near the choice was.
    #[arg(long)]
    reference: bool,
    /// Run kernels whose bits depend on no other token of a step
    ///
    /// The logits of a token are then the same bits with any chunk and any drafts, alone or in a
    /// batch.
    #[arg(long)]
    invariant: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArguments,
}

/// Generates tokens of one sequence, and prints them.
pub fn execute(arguments: &GenerateArguments) -> Result<Exit> {
    let GenerateArguments { max_tokens, temperature, top_p, seed, .. } = *arguments;
    if !temperature.is_finite() || !top_p.is_finite() {
        bail!("--temperature is {temperature} and --top-p is {top_p}: they must be numbers");
    }
    let checkpoint = Checkpoint::open(&arguments.model)?;
    let device = opened(&arguments.device, arguments.invariant)?;
    let weights = loaded(&device, &checkpoint)?;
    let tokens = arguments.prompt_tokens.len() + max_tokens;
    let config = checkpoint.config();
    let drafts =
        arguments.drafts.unwrap_or(config.num_mtp_layers.min(arguments.chunk.saturating_sub(1)));
    let limits = Limits {
        num_pages: tokens.div_ceil(128),
        num_sequences: 1,
        step_tokens: arguments.chunk,
        num_snapshots: 0,
        drafts: drafts > 0,
    };
    let oracle = arguments
        .reference
        .then(|| reference::oracle(&device, config, &weights, tokens))
        .transpose()?;
    let mut model = Model::new(&device, config, weights, limits, usual_kernels(&device))?;
    model.record_steps(1 + drafts);
    let start = Instant::now();
    let sampling = Sampling { temperature, top_p, seed };
    let prompt = &arguments.prompt_tokens;
    let length = Length { max_tokens, drafts, ends: !arguments.ignore_eos, sampling };
    let text = text::generate(&mut model, prompt, length)?;
    let seconds = start.elapsed().as_secs_f64();
    let choices = oracle
        .map(|oracle| reference::choices(&oracle, prompt, &text.tokens, sampling))
        .transpose()?;
    show(arguments, &text, choices.as_deref(), seconds)
}

fn show(
    arguments: &GenerateArguments,
    text: &Text,
    choices: Option<&[Choice]>,
    seconds: f64,
) -> Result<Exit> {
    if arguments.json {
        let choice =
            |choice: &Choice| json!({ "token": choice.reference, "margin": choice.margin });
        output::json(&json!({
            "prompt": arguments.prompt_tokens,
            "tokens": text.tokens,
            "drafts": { "proposed": text.proposed, "accepted": text.accepted },
            "reference": choices.map(|all| all.iter().map(choice).collect::<Vec<_>>()),
            "seconds": seconds,
        }))?;
        return Ok(Exit::Agreed);
    }
    let tokens: Vec<String> = text.tokens.iter().map(ToString::to_string).collect();
    outln!("{}", tokens.join(","));
    let Text { proposed, accepted, .. } = text;
    let drafts = match proposed {
        0 => String::new(),
        _ => format!("; {accepted} of {proposed} drafts accepted"),
    };
    detailln!("{} tokens in {seconds:.1} s{drafts}", text.tokens.len());
    if let Some(choices) = choices {
        outln!("{}", compared(choices));
    }
    Ok(Exit::Agreed)
}

/// How many tokens are the oracle's, and the first that is not.
fn compared(choices: &[Choice]) -> String {
    let differs = |choice: &&Choice| choice.reference != Some(choice.token);
    let (count, others) = (choices.len(), choices.iter().filter(differs).count());
    let Some(at) = choices.iter().position(|choice| differs(&choice)) else {
        return format!("the oracle samples the same {count} tokens");
    };
    let Choice { token, reference, margin } = choices[at];
    let reference = reference.map_or_else(|| "none".to_owned(), |id| id.to_string());
    format!(
        "the oracle samples another token for {others} of {count}; first for token {at}: \
         {reference}, not {token}, which is behind by {margin:.4} in logits"
    )
}
