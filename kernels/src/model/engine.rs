//! A model that runs: prefill in chunks, decode of a batch, with one packed cache (inference 12,
//! 13).

use dsv4_runtime::{DType, Device, RuntimeError};
use thiserror::Error;

use crate::cache::cache_layout::{
    CacheConfig, CacheLayout, LayerKind, LayoutError, TOKENS_PER_PAGE,
};
use crate::cache::cache_manager::{self, CacheError, CacheManager, Capacity, SequenceId};
use crate::cache::indexer_cache_write;
use crate::formats::hadamard::Stored;
use crate::implementation::Implementation;
use crate::model::batch::{Batch, Fed};
use crate::model::buffers::Buffers;
use crate::model::caches::Caches;
use crate::model::config::Config;
use crate::model::graphs::Graphs;
use crate::model::head::Wanted;
use crate::model::step::{Parts, Step};
use crate::model::tables::Tables;
use crate::model::tap::Tap;
use crate::model::weights::Weights;
use crate::streams::mhc_post::NUM_STREAMS;

/// The sizes of a running model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Pages of 128 tokens.
    pub num_pages: usize,
    /// Sequences that run at the same time.
    pub num_sequences: usize,
    /// The most tokens that a sequence has in one step, 1 to 127. A longer chunk takes several
    /// steps. Each window holds that many rows in addition to 127.
    pub step_tokens: usize,
    /// Saved states of prefixes, from which later sequences start; 0 disables the reuse of
    /// prefixes. A state is saved wherever a step ends at the end of a page.
    pub num_snapshots: usize,
    /// Whether the MTP module runs and drafts tokens. It has a window of its own.
    pub drafts: bool,
}

/// Why a model does not run, or a call was rejected. A rejected call changes nothing.
#[derive(Debug, Error)]
pub enum ModelError {
    /// The device, or a launcher.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// The cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A configuration without a cache.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A limit that no model has.
    #[error("`{argument}` is {value}: it must be {rule}")]
    Limit {
        /// The limit.
        argument: &'static str,
        /// Its value.
        value: usize,
        /// The rule.
        rule: &'static str,
    },
    /// Weights that are not those of this model.
    #[error("`{0}` of the new weights has another shape or type, or only one of both has it")]
    OtherWeights(String),
    /// A token that the vocabulary does not have.
    #[error("token {token} of a sequence: the vocabulary has {vocab_size}")]
    UnknownToken {
        /// The token.
        token: u32,
        /// Tokens of the vocabulary.
        vocab_size: usize,
    },
    /// More tokens than the model has positions.
    #[error("a sequence of {tokens} tokens: the model has {most} positions")]
    TooLong {
        /// Tokens that the sequence would have.
        tokens: usize,
        /// Positions.
        most: usize,
    },
}

pub(super) type Result<T> = std::result::Result<T, ModelError>;

/// How a token is sampled (inference 12.3).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// The largest logit is taken where it is not above 0.
    pub temperature: f32,
    /// The largest probabilities up to this sum are kept; 1 keeps all.
    pub top_p: f32,
    /// Seed of the request's random numbers.
    pub seed: u64,
}

impl Sampling {
    /// The largest logit.
    pub const GREEDY: Self = Self { temperature: 0.0, top_p: 1.0, seed: 0 };
}

/// New tokens of a sequence: a chunk of its prompt, or what it decodes.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a> {
    /// The sequence.
    pub sequence: SequenceId,
    /// Its next tokens, at least one.
    pub tokens: &'a [u32],
}

/// A new sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admitted {
    /// The sequence.
    pub sequence: SequenceId,
    /// Tokens of the prompt that it already has, from a prefix of an earlier sequence: a multiple
    /// of 128, and less than the prompt. The others are to be fed.
    pub cached_tokens: usize,
}

/// A model on a device.
pub struct Model<'d> {
    // Dropped first: it uses the memory of what follows.
    graphs: Option<Graphs<'d>>,
    pub(super) parts: Parts<'d>,
    pub(super) weights: Weights<'d>,
    pub(super) limits: Limits,
    pub(super) manager: CacheManager,
}

/// The layout of a model's caches. The window of the MTP module follows the main layers.
fn layout(config: &Config, limits: Limits) -> Result<CacheLayout> {
    let module = limits.drafts.then_some(LayerKind::Window);
    Ok(CacheLayout::new(&CacheConfig {
        layers: config.layers.iter().copied().chain(module).collect(),
        row: config.row(),
        head_dim: config.head_dim,
        indexer_dim: config.index_head_dim,
        indexer_row_bytes: indexer_cache_write::row_bytes(Stored::E2m1),
        max_draft_tokens: limits.step_tokens - 1,
    })?)
}

/// Rejects limits that no model has.
fn check_limits(limits: Limits, weights: &Weights<'_>) -> Result<()> {
    let refuse = |argument, value, rule| Err(ModelError::Limit { argument, value, rule });
    match limits {
        Limits { step_tokens: value @ (0 | 128..), .. } => refuse("step_tokens", value, "1 to 127"),
        Limits { num_pages: 0, .. } => refuse("num_pages", 0, "at least 1"),
        Limits { num_sequences: 0, .. } => refuse("num_sequences", 0, "at least 1"),
        Limits { drafts: true, .. } if weights.mtp.is_none() => {
            refuse("drafts", 1, "0: the checkpoint has no MTP module")
        }
        _ => Ok(()),
    }
}

/// A part of a chunk: its number, and its first token and the end in a step.
pub(super) type Piece = (usize, usize, usize);

impl<'d> Model<'d> {
    /// A model with an empty cache, whose kernels have this implementation if they have several.
    ///
    /// On a device for which [`Device::is_invariant`] holds, the logits after a token have the same
    /// bits whatever else its step has: alone or in a batch, in any chunk, as a draft, after a
    /// cached prefix.
    ///
    /// # Errors
    /// Limits that no model has, a device without enough memory.
    pub fn new(
        device: &'d Device,
        config: &Config,
        weights: Weights<'d>,
        limits: Limits,
        implementation: Implementation,
    ) -> Result<Self> {
        check_limits(limits, &weights)?;
        let layout = layout(config, limits)?;
        let Limits { num_pages, num_sequences, num_snapshots, .. } = limits;
        let capacity = Capacity { num_pages, num_sequences, num_snapshots };
        let rows = config.max_positions.min(num_pages * TOKENS_PER_PAGE);
        let tail = DType::Bf16.size() * NUM_STREAMS * config.hidden_size;
        let tail = if limits.drafts { tail } else { 0 };
        Ok(Self {
            graphs: None,
            weights,
            limits,
            parts: Parts {
                device,
                config: config.clone(),
                caches: Caches::new(device, &layout, capacity, tail)?,
                tables: Tables::new(device, config, rows)?,
                buffers: Buffers::new(device),
                implementation,
                tap: None,
            },
            manager: CacheManager::new(layout, capacity)?,
        })
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.parts.config
    }

    /// Lets a tap run every later launch; `None` ends that.
    pub fn set_tap(&mut self, tap: Option<Box<dyn Tap + 'd>>) {
        self.parts.tap = tap;
    }

    /// Records steps from now on, and replays them: those in which each sequence has the same number
    /// of tokens, at most `most_tokens`, such as one and its drafts. Nothing changes where the
    /// device records nothing. A tap sees each launch, so with one nothing is replayed.
    pub fn record_steps(&mut self, most_tokens: usize) {
        let recorder = self.parts.device.backend().recorder();
        self.graphs = recorder.map(|recorder| Graphs::new(recorder, most_tokens));
    }

    /// Enqueues the last step once more if it was a replay, with the same lists; returns whether it
    /// was. Its rows, entries and tokens are written again, with the values that they have: for
    /// measurements.
    ///
    /// # Errors
    /// The device's.
    pub fn repeat_step(&self) -> Result<bool> {
        Ok(self.graphs.as_ref().map_or(Ok(false), Graphs::repeat)?)
    }

    /// The weights, for another model on the same device.
    pub fn into_weights(self) -> Weights<'d> {
        self.weights
    }

    /// How many steps have been recorded: one for each number of sequences, of tokens, and power of
    /// two of pages.
    pub fn num_recorded(&self) -> usize {
        self.graphs.as_ref().map_or(0, Graphs::len)
    }

    /// Takes other weights of the same shapes, and returns those it had. What prefixes hold was
    /// computed with these, so prefixes are forgotten.
    ///
    /// # Errors
    /// Weights of other shapes; sequences that run, whose caches were computed with the old ones.
    pub fn replace_weights(&mut self, weights: Weights<'d>) -> Result<Weights<'d>> {
        let running = self.manager.num_running();
        if running > 0 {
            let (argument, rule) = ("sequences", "0: release them first");
            return Err(ModelError::Limit { argument, value: running, rule });
        }
        if let Some(name) = self.weights.difference(&weights) {
            return Err(ModelError::OtherWeights(name));
        }
        self.manager.forget_prefixes()?;
        if let Some(graphs) = &mut self.graphs {
            graphs.clear();
        }
        Ok(std::mem::replace(&mut self.weights, weights))
    }

    /// Starts a sequence, with the longest prefix of its prompt whose state is saved.
    ///
    /// # Errors
    /// An empty prompt, every state of the cache is taken.
    pub fn admit(&mut self, prompt: &[u32]) -> Result<Admitted> {
        let admitted = self.manager.admit(prompt)?;
        let cache_manager::Admitted { sequence, cached_tokens, restore } = admitted;
        if let Some(snapshot) = restore {
            self.parts.caches.restore(snapshot, sequence.slot())?;
        }
        Ok(Admitted { sequence, cached_tokens })
    }

    /// Ends a sequence; its pages and its state are free.
    ///
    /// # Errors
    /// A sequence that is not running.
    pub fn release(&mut self, sequence: SequenceId) -> Result<()> {
        Ok(self.manager.release(sequence)?)
    }

    /// Tokens of a sequence.
    ///
    /// # Errors
    /// A sequence that is not running.
    pub fn num_tokens(&self, sequence: SequenceId) -> Result<usize> {
        Ok(self.manager.num_tokens(sequence)?)
    }

    /// The bytes of all pages, and of all states, to compare runs. Rows at and beyond the end of a
    /// sequence hold whatever was last written there, which no kernel reads.
    ///
    /// # Errors
    /// The device's.
    pub fn cache_contents(&self) -> Result<[Vec<u8>; 2]> {
        Ok(self.parts.caches.contents()?)
    }

    /// Appends tokens to their sequences, chunks of prompts and decoded ones alike. Returns the
    /// logits after each of the tokens, `vocab_size` for each, chunk by chunk.
    ///
    /// # Errors
    /// A rejected call, which changes nothing; a fault of the device.
    pub fn logits(&mut self, chunks: &[Chunk<'_>]) -> Result<Vec<Vec<Vec<f32>>>> {
        self.check(chunks)?;
        let mut all: Vec<Vec<Vec<f32>>> = vec![Vec::new(); chunks.len()];
        for pieces in self.pieces(chunks)? {
            let fed = of_pieces(chunks, &pieces);
            let batch = self.batch(&fed)?;
            let wanted = Wanted::logits(batch.num_tokens());
            self.step(&batch, &wanted)?;
            let mut logits = self.read_logits(&wanted)?.into_iter();
            for &(chunk, from, to) in &pieces {
                all[chunk].extend((from..to).filter_map(|_| logits.next()));
            }
            self.settle(&batch, &fed)?;
        }
        Ok(all)
    }

    /// Appends tokens to their sequences, and samples the token after the last one of each. The
    /// random numbers of a sample depend on the seed and on the position of the sampled token, on
    /// nothing else.
    ///
    /// # Errors
    /// As [`Self::logits`].
    pub fn sample(&mut self, chunks: &[Chunk<'_>], sampling: &[Sampling]) -> Result<Vec<u32>> {
        self.check(chunks)?;
        check_sampling(chunks, sampling)?;
        let mut sampled = vec![0; chunks.len()];
        for pieces in self.pieces(chunks)? {
            let fed = of_pieces(chunks, &pieces);
            let batch = self.batch(&fed)?;
            // Rows whose chunk ends in this step.
            let mut ends = Vec::new();
            let mut row = 0;
            for &(chunk, from, to) in &pieces {
                row += to - from;
                if to == chunks[chunk].tokens.len() {
                    ends.push((chunk, row as i32 - 1));
                }
            }
            let request = |&(chunk, row): &(usize, i32)| {
                (sampling[chunk], batch.positions[row as usize] as u64 + 1)
            };
            let wanted = Wanted {
                rows: ends.iter().map(|&(_, row)| row).collect(),
                requests: ends.iter().map(request).collect(),
            };
            self.step(&batch, &wanted)?;
            if !ends.is_empty() {
                let tokens = self.read_tokens(&wanted)?;
                ends.iter().zip(tokens).for_each(|(&(chunk, _), token)| sampled[chunk] = token);
            }
            self.settle(&batch, &fed)?;
        }
        Ok(sampled)
    }

    /// Everything that a call may refuse, for the whole of all chunks.
    pub(super) fn check(&self, chunks: &[Chunk<'_>]) -> Result<()> {
        let vocab_size = self.config().vocab_size;
        let mut needed = 0;
        for (at, Chunk { sequence, tokens }) in chunks.iter().enumerate() {
            let length = self.manager.num_tokens(*sequence)?;
            if tokens.is_empty() {
                return Err(CacheError::NoTokens.into());
            }
            if chunks[..at].iter().any(|other| other.sequence == *sequence) {
                return Err(CacheError::UnknownSequence(*sequence).into());
            }
            if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocab_size) {
                return Err(ModelError::UnknownToken { token, vocab_size });
            }
            let tokens = length + tokens.len();
            self.check_length(tokens)?;
            let held = self.manager.block_table(*sequence)?.len();
            needed += tokens.div_ceil(TOKENS_PER_PAGE).saturating_sub(held);
        }
        let available = self.manager.available_pages();
        if needed > available {
            return Err(CacheError::OutOfPages { needed, available }.into());
        }
        Ok(())
    }

    /// Rejects more tokens than the model has positions.
    pub(super) fn check_length(&self, tokens: usize) -> Result<()> {
        let most = self.config().max_positions;
        if tokens > most { Err(ModelError::TooLong { tokens, most }) } else { Ok(()) }
    }

    /// Chunks as steps. Where states are saved, no step crosses the end of a page.
    fn pieces(&self, chunks: &[Chunk<'_>]) -> Result<Vec<Vec<Piece>>> {
        let mut starts = vec![0; chunks.len()];
        let mut steps = Vec::new();
        loop {
            let mut pieces = Vec::new();
            for (number, chunk) in chunks.iter().enumerate() {
                let from = starts[number];
                if from == chunk.tokens.len() {
                    continue;
                }
                let position = self.manager.num_tokens(chunk.sequence)? + from;
                let most = match self.limits.num_snapshots {
                    0 => self.limits.step_tokens,
                    _ => self.limits.step_tokens.min(TOKENS_PER_PAGE - position % TOKENS_PER_PAGE),
                };
                starts[number] = chunk.tokens.len().min(from + most);
                pieces.push((number, from, starts[number]));
            }
            if pieces.is_empty() {
                return Ok(steps);
            }
            steps.push(pieces);
        }
    }

    /// The lists of a step, whose tokens are appended to their sequences.
    pub(super) fn batch(&mut self, fed: &[Fed<'_>]) -> Result<Batch> {
        let mut batch = Batch::new(&mut self.manager, fed)?;
        if let Some(tokens) = self.graphs.as_ref().and_then(|graphs| graphs.takes(&batch)) {
            batch.widen(tokens);
        }
        Ok(batch)
    }

    /// One step: the streams of its tokens after the last layer, and what is wanted of them.
    pub(super) fn step(&mut self, batch: &Batch, wanted: &Wanted) -> Result<()> {
        let (shared, layers) = (&self.weights.shared, &self.weights.layers);
        let is_tapped = self.parts.tap.is_some();
        let mut step: Step<'_, 'd> = self.parts.step(batch);
        step.upload(wanted)?;
        let mut launch = |step: &mut Step<'_, 'd>| {
            step.main_layers(&shared["embed"], layers)?;
            step.head(wanted, shared, &shared["head"])
        };
        match &mut self.graphs {
            Some(graphs) if !is_tapped && graphs.takes(batch).is_some() => {
                let shape = (batch.extents(), wanted.rows.len(), !wanted.requests.is_empty());
                graphs.run(&mut step, shape, &mut launch)?;
            }
            graphs => {
                graphs.iter_mut().for_each(Graphs::launched);
                launch(&mut step)?;
            }
        }
        Ok(())
    }

    /// What remains of a step when its head has run, for the tokens that were kept: the window of
    /// the MTP module, and states of prefixes.
    pub(super) fn settle(&mut self, batch: &Batch, kept: &[Fed<'_>]) -> Result<()> {
        if self.limits.drafts {
            self.feed_module(batch, kept)?;
        }
        for Fed { sequence, .. } in kept {
            let tokens = self.manager.num_tokens(*sequence)?;
            let is_saved = self.limits.num_snapshots > 0 && tokens.is_multiple_of(TOKENS_PER_PAGE);
            let snapshot = if is_saved { self.manager.snapshot(*sequence)? } else { None };
            if let Some(snapshot) = snapshot {
                self.parts.caches.save(sequence.slot(), snapshot)?;
            }
        }
        Ok(())
    }
}

/// The tokens of pieces of chunks.
fn of_pieces<'c>(chunks: &[Chunk<'c>], pieces: &[Piece]) -> Vec<Fed<'c>> {
    let of = |&(chunk, from, to): &Piece| {
        let Chunk { sequence, tokens } = chunks[chunk];
        Fed { sequence, tokens: &tokens[from..to], drafts: 0 }
    };
    pieces.iter().map(of).collect()
}

/// Rejects another number of samplings than of chunks.
pub(super) fn check_sampling(chunks: &[Chunk<'_>], sampling: &[Sampling]) -> Result<()> {
    if sampling.len() == chunks.len() {
        return Ok(());
    }
    let (argument, value) = ("sampling", sampling.len());
    Err(ModelError::Limit { argument, value, rule: "one for each chunk" })
}
