//! The calls of a run of a model.

use anyhow::Result;
use dsv4_kernels::model::config::Config;
use dsv4_kernels::model::engine::{Chunk, Limits, Model, Sampling};
use dsv4_kernels::model::weights::Weights;
use dsv4_runtime::Device;

use super::calls::{self, Called};
use crate::model::text::usual_kernels;

/// What a model runs.
#[derive(Clone, Copy, Debug)]
pub struct Run<'r> {
    /// Tokens of the prompt.
    pub prompt: &'r [u32],
    /// Tokens after it; all but the last are fed.
    pub max_tokens: usize,
    /// The most tokens of a step of the prefill.
    pub chunk: usize,
}

impl Run<'_> {
    /// Tokens of the prompt, and those after it.
    pub fn num_tokens(&self) -> usize {
        self.prompt.len() + self.max_tokens
    }
}

/// Runs a model and records its calls.
///
/// # Errors
/// A configuration, weights or tokens that the model rejects; a launch that fails.
pub fn record<'d>(
    device: &'d Device,
    config: &Config,
    weights: Weights<'d>,
    run: Run,
) -> Result<Vec<Called>> {
    let limits = Limits {
        num_pages: run.num_tokens().div_ceil(128).max(1),
        num_sequences: 1,
        step_tokens: run.chunk,
        num_snapshots: 0,
        drafts: config.num_mtp_layers > 0 && run.chunk > 1,
    };
    let mut model = Model::new(device, config, weights, limits, usual_kernels(device))?;
    let (tap, calls) = calls::recorder(config);
    model.set_tap(Some(tap));
    steps(&mut model, run, limits.drafts)?;
    model.set_tap(None);
    Ok(calls.take())
}

/// The prompt, tokens after it, and with an MTP module a draft of each.
fn steps(model: &mut Model<'_>, run: Run, drafts: bool) -> Result<()> {
    let sequence = model.admit(run.prompt)?.sequence;
    let (sampling, mut next) = ([Sampling::GREEDY], run.prompt.to_vec());
    for _ in 0..run.max_tokens {
        next = model.sample(&[Chunk { sequence, tokens: &next }], &sampling)?;
        if drafts {
            model.draft(&[Chunk { sequence, tokens: &next }], 1, &sampling)?;
        }
    }
    Ok(())
}
