//! A text of one sequence, token by token or with drafts.

use anyhow::Result;
use dsv4_kernels::implementation::Implementation;
use dsv4_kernels::model::engine::{Chunk, Model, Sampling};
use dsv4_runtime::{BackendKind, Device};

/// Generated tokens, and how many of the drafts among them were proposed and accepted.
#[derive(Clone, Debug, Default)]
pub struct Text {
    /// The tokens after the prompt.
    pub tokens: Vec<u32>,
    /// Drafts.
    pub proposed: usize,
    /// Drafts that the model would have sampled itself.
    pub accepted: usize,
}

/// How a text goes on and where it ends.
#[derive(Clone, Copy, Debug)]
pub struct Length {
    /// The most tokens.
    pub max_tokens: usize,
    /// The most drafts of a step.
    pub drafts: usize,
    /// Whether the model's last token ends it.
    pub ends: bool,
    /// How each token is sampled.
    pub sampling: Sampling,
}

/// The kernels that a model runs there unless others are asked for.
pub fn usual_kernels(device: &Device) -> Implementation {
    // The Hopper kernels run on the emulator, too, but slower.
    match device.environment().backend {
        BackendKind::Emulator => Implementation::Portable,
        _ => Implementation::Auto,
    }
}

/// Generates tokens of a new sequence after its prompt.
///
/// # Errors
/// A step that the model rejects.
pub fn generate(model: &mut Model<'_>, prompt: &[u32], length: Length) -> Result<Text> {
    let Length { max_tokens, drafts, ends, sampling } = length;
    let eos = ends.then_some(model.config().eos);
    let mut text = Text::default();
    if max_tokens == 0 {
        return Ok(text);
    }
    let sequence = model.admit(prompt)?.sequence;
    let first = model.sample(&[Chunk { sequence, tokens: prompt }], &[sampling])?[0];
    text.tokens.push(first);
    while text.tokens.len() < max_tokens && text.tokens.last().copied() != eos {
        let mut next: Vec<u32> = text.tokens.last().copied().into_iter().collect();
        // No token that is not printed needs a position.
        let count = drafts.min(max_tokens - text.tokens.len() - 1);
        if count > 0 {
            let chunk = Chunk { sequence, tokens: &next };
            let drafted = model.draft(&[chunk], count, &[sampling])?.remove(0);
            next.extend(drafted);
        }
        let chunk = Chunk { sequence, tokens: &next };
        let mut sampled = model.verify(&[chunk], &[sampling])?.remove(0);
        text.proposed += count;
        text.accepted += sampled.len() - 1;
        if let Some(end) = sampled.iter().position(|&token| Some(token) == eos) {
            sampled.truncate(end + 1);
        }
        text.tokens.extend(sampled);
    }
    Ok(text)
}
