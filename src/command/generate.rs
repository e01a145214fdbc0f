//! `parity generate`.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, bail};
use clap::Args;
use dsv4_kernels::implementation::Implementation;
use dsv4_kernels::model::checkpoint::Checkpoint;
use dsv4_kernels::model::engine::{Chunk, Kernels, Limits, Model, Sampling};
use dsv4_kernels::model::weights::Weights;
use dsv4_runtime::BackendKind;
use serde_json::json;

use super::checkpoint::progress;
use super::{DeviceArguments, Exit, output};
use crate::model::reference::{self, Choice};

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
    /// Compare each token with the oracle's, for a small model
    ///
    /// The oracle samples from its exact logits after the same tokens, by the same random numbers.
    /// A divergence is no verdict: its margin says how near the choice was.
    #[arg(long)]
    reference: bool,
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
    let device = arguments.device.open()?;
    let bar = progress(checkpoint.total_bytes());
    let weights = Weights::load(&device, &checkpoint, &mut |name, bytes| {
        bar.set_message(name.to_owned());
        bar.inc(bytes as u64);
    })?;
    bar.finish_and_clear();
    let tokens = arguments.prompt_tokens.len() + max_tokens;
    let limits =
        Limits { num_pages: tokens.div_ceil(128), num_sequences: 1, step_tokens: arguments.chunk };
    // The Hopper kernels run on the emulator, too, but slower.
    let implementation = match device.environment().backend {
        BackendKind::Emulator => Implementation::Portable,
        _ => Implementation::Auto,
    };
    let oracle = arguments
        .reference
        .then(|| reference::oracle(&device, checkpoint.config(), &weights, tokens))
        .transpose()?;
    let (config, kernels) =
        (checkpoint.config(), Kernels { implementation, batch_invariant: false });
    let mut model = Model::new(&device, config, weights, limits, kernels)?;
    let start = Instant::now();
    let sampling = Sampling { temperature, top_p, seed };
    let mut next = arguments.prompt_tokens.clone();
    let (sequence, mut generated) = (model.admit()?, Vec::new());
    while generated.len() < max_tokens {
        let chunk = Chunk { sequence, tokens: &next };
        let token = model.sample(&[chunk], &[sampling])?[0];
        generated.push(token);
        if token == config.eos && !arguments.ignore_eos {
            break;
        }
        next = vec![token];
    }
    let seconds = start.elapsed().as_secs_f64();
    let prompt = &arguments.prompt_tokens;
    let choices = oracle
        .map(|oracle| reference::choices(&oracle, prompt, &generated, sampling))
        .transpose()?;
    show(arguments, &generated, choices.as_deref(), seconds)
}

fn show(
    arguments: &GenerateArguments,
    generated: &[u32],
    choices: Option<&[Choice]>,
    seconds: f64,
) -> Result<Exit> {
    if arguments.json {
        let choice =
            |choice: &Choice| json!({ "token": choice.reference, "margin": choice.margin });
        output::json(&json!({
            "prompt": arguments.prompt_tokens,
            "tokens": generated,
            "reference": choices.map(|all| all.iter().map(choice).collect::<Vec<_>>()),
            "seconds": seconds,
        }))?;
        return Ok(Exit::Agreed);
    }
    let tokens: Vec<String> = generated.iter().map(ToString::to_string).collect();
    outln!("{}", tokens.join(","));
    detailln!("{} tokens in {seconds:.1} s", generated.len());
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
