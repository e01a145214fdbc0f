//! A model that runs: prefill in chunks, decode of a batch, with one packed cache (inference 12,
//! 13).

use dsv4_runtime::{DType, Device, RuntimeError, TensorView, Views};
use thiserror::Error;

use crate::cache::cache_layout::{CacheConfig, CacheLayout, LayoutError};
use crate::cache::cache_manager::{CacheError, CacheManager, Capacity, SequenceId};
use crate::cache::indexer_cache_write;
use crate::formats::hadamard::Stored;
use crate::head::{lm_head, sampler};
use crate::implementation::Implementation;
use crate::model::batch::Batch;
use crate::model::buffers::Buffers;
use crate::model::caches::Caches;
use crate::model::config::Config;
use crate::model::step::Step;
use crate::model::tables::Tables;
use crate::model::weights::Weights;
use crate::streams::mhc_head;

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
}

/// How a model's kernels run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernels {
    /// The implementation of all kernels that have several.
    pub implementation: Implementation,
    /// Whether the attention of a token is divided in the same way whatever other tokens a step
    /// has. It costs the balance of the blocks. Then steps of two tokens or more give a token the
    /// same bits, up to sizes at which a projection divides its sums (k above 256).
    pub batch_invariant: bool,
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

type Result<T> = std::result::Result<T, ModelError>;

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

/// A model on a device.
pub struct Model<'d> {
    device: &'d Device,
    config: Config,
    weights: Weights<'d>,
    limits: Limits,
    manager: CacheManager,
    caches: Caches<'d>,
    tables: Tables<'d>,
    buffers: Buffers<'d>,
    kernels: Kernels,
}

/// The layout of a model's caches.
fn layout(config: &Config, limits: Limits) -> Result<CacheLayout> {
    Ok(CacheLayout::new(&CacheConfig {
        layers: config.layers.clone(),
        row: config.row(),
        head_dim: config.head_dim,
        indexer_dim: config.index_head_dim,
        indexer_row_bytes: indexer_cache_write::row_bytes(Stored::E2m1),
        max_draft_tokens: limits.step_tokens - 1,
    })?)
}

impl<'d> Model<'d> {
    /// A model with an empty cache.
    ///
    /// # Errors
    /// Limits that no model has, a device without enough memory.
    pub fn new(
        device: &'d Device,
        config: &Config,
        weights: Weights<'d>,
        limits: Limits,
        kernels: Kernels,
    ) -> Result<Self> {
        let refuse = |argument, value, rule| Err(ModelError::Limit { argument, value, rule });
        match limits {
            Limits { step_tokens: value @ (0 | 128..), .. } => {
                return refuse("step_tokens", value, "1 to 127");
            }
            Limits { num_pages: 0, .. } => return refuse("num_pages", 0, "at least 1"),
            Limits { num_sequences: 0, .. } => return refuse("num_sequences", 0, "at least 1"),
            _ => {}
        }
        let layout = layout(config, limits)?;
        let Limits { num_pages, num_sequences, .. } = limits;
        let capacity = Capacity { num_pages, num_sequences, num_snapshots: 0 };
        let rows = config.max_positions.min(num_pages * TOKENS_PER_PAGE);
        Ok(Self {
            device,
            config: config.clone(),
            weights,
            limits,
            caches: Caches::new(device, &layout, capacity)?,
            manager: CacheManager::new(layout, capacity)?,
            tables: Tables::new(device, config, rows)?,
            buffers: Buffers::new(device),
            kernels,
        })
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Starts a sequence without tokens.
    ///
    /// # Errors
    /// Every state of the cache is taken.
    pub fn admit(&mut self) -> Result<SequenceId> {
        // No prefix is cached, so the prompt does not matter here.
        Ok(self.manager.admit(&[self.config.bos])?.sequence)
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

    /// Appends tokens to their sequences, chunks of prompts and decoded ones alike. Returns the
    /// logits after each of the tokens, `vocab_size` for each, chunk by chunk.
    ///
    /// # Errors
    /// A rejected call, which changes nothing; a fault of the device.
    pub fn logits(&mut self, chunks: &[Chunk<'_>]) -> Result<Vec<Vec<Vec<f32>>>> {
        self.check(chunks)?;
        let mut all: Vec<Vec<Vec<f32>>> = vec![Vec::new(); chunks.len()];
        for part in self.parts(chunks) {
            let batch = self.step(chunks, &part)?;
            let rows: Vec<i32> = (0..batch.num_tokens() as i32).collect();
            let logits = self.head(&batch, &rows)?;
            let mut logits = self.floats(&logits)?.into_iter();
            for &(chunk, from, to) in &part {
                all[chunk].extend((from..to).filter_map(|_| logits.next()));
            }
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
        if sampling.len() != chunks.len() {
            let (argument, value) = ("sampling", sampling.len());
            return Err(ModelError::Limit { argument, value, rule: "one for each chunk" });
        }
        let mut sampled = vec![0; chunks.len()];
        for part in self.parts(chunks) {
            let batch = self.step(chunks, &part)?;
            // Rows whose chunk ends in this step.
            let mut ends = Vec::new();
            let mut row = 0;
            for &(chunk, from, to) in &part {
                row += to - from;
                if to == chunks[chunk].tokens.len() {
                    ends.push((chunk, row as i32 - 1));
                }
            }
            if ends.is_empty() {
                continue;
            }
            let rows: Vec<i32> = ends.iter().map(|&(_, row)| row).collect();
            let logits = self.head(&batch, &rows)?;
            let requests: Vec<(Sampling, u64)> = ends
                .iter()
                .map(|&(chunk, row)| (sampling[chunk], batch.positions[row as usize] as u64 + 1))
                .collect();
            let tokens = self.draw(&logits, &requests)?;
            ends.iter().zip(tokens).for_each(|(&(chunk, _), token)| sampled[chunk] = token);
        }
        Ok(sampled)
    }

    /// Everything that a call may refuse, for the whole of all chunks.
    fn check(&self, chunks: &[Chunk<'_>]) -> Result<()> {
        let vocab_size = self.config.vocab_size;
        let (mut needed, most) = (0, self.config.max_positions);
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
            if tokens > most {
                return Err(ModelError::TooLong { tokens, most });
            }
            let held = self.manager.block_table(*sequence)?.len();
            needed += tokens.div_ceil(TOKENS_PER_PAGE).saturating_sub(held);
        }
        let available = self.manager.available_pages();
        if needed > available {
            return Err(CacheError::OutOfPages { needed, available }.into());
        }
        Ok(())
    }

    /// Chunks as steps: for each step the chunk, and its first and last tokens.
    fn parts(&self, chunks: &[Chunk<'_>]) -> Vec<Vec<(usize, usize, usize)>> {
        let most = self.limits.step_tokens;
        let steps = chunks.iter().map(|chunk| chunk.tokens.len().div_ceil(most)).max();
        let of_step = |step: usize| {
            let of_chunk = |(number, chunk): (usize, &Chunk<'_>)| {
                let (from, end) = (step * most, chunk.tokens.len());
                (from < end).then_some((number, from, end.min(from + most)))
            };
            chunks.iter().enumerate().filter_map(of_chunk).collect()
        };
        (0..steps.unwrap_or(0)).map(of_step).collect()
    }

    /// One step: the streams of its tokens after the last layer.
    fn step(&mut self, chunks: &[Chunk<'_>], part: &[(usize, usize, usize)]) -> Result<Batch> {
        let parts: Vec<(SequenceId, &[u32])> = part
            .iter()
            .map(|&(chunk, from, to)| (chunks[chunk].sequence, &chunks[chunk].tokens[from..to]))
            .collect();
        let batch = Batch::new(&mut self.manager, &parts)?;
        let mut step = Step {
            device: self.device,
            config: &self.config,
            tables: &self.tables,
            caches: &self.caches,
            buffers: &mut self.buffers,
            kernels: self.kernels,
            batch: &batch,
            current: 0,
        };
        step.upload()?;
        let kinds = &self.config.layers;
        step.main_layers(kinds, &self.weights.shared["embed"], &self.weights.layers)?;
        Ok(batch)
    }

    /// The logits of some of a step's tokens, `[num_rows, vocab_size]` f32.
    fn head(&mut self, batch: &Batch, rows: &[i32]) -> Result<TensorView> {
        let mut step = Step {
            device: self.device,
            config: &self.config,
            tables: &self.tables,
            caches: &self.caches,
            buffers: &mut self.buffers,
            kernels: self.kernels,
            batch,
            current: 0,
        };
        let hidden = step.final_hidden(&self.weights.shared)?;
        let rows = self.buffers.upload("sampled_rows", &[rows.len()], rows)?;
        let shape = [rows.shape[0], self.config.vocab_size];
        let logits = self.buffers.view("logits", DType::F32, &shape)?;
        let views = Views::from([("hidden", &hidden), ("weight", &self.weights.shared["head"])]);
        lm_head::forward(self.device, &views.with("rows", &rows).with("logits", &logits))?;
        Ok(logits)
    }

    /// A token for each row of logits, by the sampling of its request and the position.
    fn draw(&mut self, logits: &TensorView, requests: &[(Sampling, u64)]) -> Result<Vec<u32>> {
        let rows = [requests.len()];
        let words = |of: &dyn Fn(&(Sampling, u64)) -> u64| -> Vec<u8> {
            requests.iter().flat_map(|request| of(request).to_ne_bytes()).collect()
        };
        let floats = |of: &dyn Fn(&Sampling) -> f32| -> Vec<u8> {
            requests.iter().flat_map(|(sampling, _)| of(sampling).to_ne_bytes()).collect()
        };
        let lists = [
            ("temperature", DType::F32, floats(&|sampling| sampling.temperature)),
            ("top_p", DType::F32, floats(&|sampling| sampling.top_p)),
            ("seed", DType::I64, words(&|(sampling, _)| sampling.seed)),
            ("step", DType::I64, words(&|&(_, position)| position)),
        ];
        let mut views = Views::from([("logits", logits)]);
        for (name, dtype, bytes) in lists {
            views.put(name, self.buffers.upload_bytes(name, dtype, &rows, &bytes)?);
        }
        let tokens = self.buffers.view("tokens", DType::I32, &rows)?;
        sampler::forward(self.device, &views.with("tokens", &tokens))?;
        let bytes = self.download(&tokens)?;
        let ids = bytes.as_chunks::<4>().0.iter().map(|&bytes| i32::from_ne_bytes(bytes));
        // A row of NaN has no token; the text ends there.
        Ok(ids.map(|id| u32::try_from(id).unwrap_or(self.config.eos)).collect())
    }

    /// The bytes of a dense tensor, after all launches.
    fn download(&self, view: &TensorView) -> Result<Vec<u8>> {
        let backend = self.device.backend();
        backend.synchronize()?;
        let mut bytes = vec![0; view.elements() * view.dtype.size()];
        backend.download(view.address, &mut bytes)?;
        Ok(bytes)
    }

    /// The rows of an fp32 matrix.
    fn floats(&self, view: &TensorView) -> Result<Vec<Vec<f32>>> {
        let bytes = self.download(view)?;
        let numbers: Vec<f32> =
            bytes.as_chunks::<4>().0.iter().map(|&bytes| f32::from_ne_bytes(bytes)).collect();
        Ok(numbers.chunks(view.shape[1].max(1)).map(<[f32]>::to_vec).collect())
    }
}

impl Step<'_, '_> {
    /// The normed hidden state of each token, from the streams after the last layer.
    fn final_hidden(&mut self, w: &Views) -> dsv4_runtime::Result<TensorView> {
        let (tokens, hidden) = (self.num_tokens(), self.config.hidden_size);
        let out = self.rows("h", DType::Bf16, hidden)?;
        let bytes = mhc_head::forward_workspace_bytes(self.device, tokens, hidden);
        let views = Views::from([("fn", &w["head_fn"]), ("scale", &w["head_scale"])]);
        let views = views.with("base", &w["head_base"]).with("streams", &self.streams()?);
        let views = views.with("out", &out).with("mix", &self.rows("mix", DType::F32, 4)?);
        let views = views.with("rstd", &self.buffers.view("rstd", DType::F32, &[tokens])?);
        let views = views.with("workspace", &self.buffers.workspace(bytes)?);
        let numbers = mhc_head::Numbers {
            norm_eps: self.config.norm_eps as f32,
            hc_eps: self.config.hc_eps as f32,
        };
        mhc_head::forward(self.device, &views, numbers, self.kernels.implementation)?;
        self.norm("u", &out, &w["norm"])
    }
}

/// Tokens of a page.
const TOKENS_PER_PAGE: usize = crate::cache::cache_layout::TOKENS_PER_PAGE;
