//! Draft tokens by the MTP module (inference 12.2), and their verification.
//!
//! Row i of the module has the streams of position i and the embedding of token i + 1. So the row
//! of a sequence's last token waits for the next token. Its streams are kept with the sequence's
//! state.
//!
//! ```text
//! step    tokens n .. m of a sequence are kept   module: rows n - 1 .. m - 1 of its window
//! draft   token m, not fed yet                   module: row m - 1, then rows of its own streams
//! ```
//!
//! What a step writes to the module's window follows from kept tokens only. Rows of drafts lie
//! ahead of the sequence, and later rows of these positions overwrite them.

use dsv4_runtime::{DType, TensorView, Views};

use crate::cache::cache_layout::{LayerKind, TOKENS_PER_PAGE};
use crate::cache::cache_manager::CacheError;
use crate::experts::moe_reduce;
use crate::model::batch::{Batch, Fed, ModuleRows};
use crate::model::engine::{Chunk, Model, ModelError, Result, Sampling, check_sampling};
use crate::model::head::Wanted;
use crate::model::step::{ATTN, Step, shaped};
use crate::streams::embed_streams;
use crate::streams::mhc_post::NUM_STREAMS;

impl Model<'_> {
    /// Appends to each sequence a token and drafts of those after it, and samples after each of
    /// them. Drafts are kept up to the first that is not what was sampled. The others leave no
    /// trace. Returns for each chunk the kept drafts and the token sampled after them, which are
    /// the tokens that [`Self::sample`] returns one by one. The sequence then lacks the last one.
    ///
    /// # Errors
    /// As [`Self::logits`]; more tokens than a step has.
    pub fn verify(&mut self, chunks: &[Chunk<'_>], sampling: &[Sampling]) -> Result<Vec<Vec<u32>>> {
        self.check(chunks)?;
        check_sampling(chunks, sampling)?;
        let most = self.limits.step_tokens;
        if let Some(chunk) = chunks.iter().find(|chunk| chunk.tokens.len() > most) {
            let (argument, value) = ("tokens", chunk.tokens.len());
            return Err(ModelError::Limit { argument, value, rule: "at most `step_tokens`" });
        }
        let fed = chunks.iter().map(|&Chunk { sequence, tokens }| Fed {
            sequence,
            tokens,
            drafts: tokens.len() - 1,
        });
        let batch = self.batch(&fed.collect::<Vec<_>>())?;
        let requests = chunks
            .iter()
            .zip(sampling)
            .flat_map(|(chunk, &sampling)| chunk.tokens.iter().map(move |_| sampling));
        let positions = batch.positions.iter().map(|&position| position as u64 + 1);
        let requests = requests.zip(positions).collect();
        let wanted = Wanted { requests, ..Wanted::logits(batch.num_tokens()) };
        self.step(&batch, &wanted)?;
        let sampled = self.read_tokens(&wanted)?;
        let (mut found, mut kept) = (Vec::new(), Vec::new());
        for (&Chunk { sequence, tokens }, &first) in chunks.iter().zip(&batch.cu_seqlens) {
            let sampled = &sampled[first as usize..][..tokens.len()];
            let accepted = tokens[1..].iter().zip(sampled).take_while(|(a, b)| a == b).count();
            self.manager.accept(sequence, accepted)?;
            found.push(sampled[..=accepted].to_vec());
            kept.push(Fed { sequence, tokens: &tokens[..=accepted], drafts: 0 });
        }
        self.settle(&batch, &kept)?;
        Ok(found)
    }

    /// Drafts of the tokens after the next one, which each chunk has and the sequence does not. No
    /// sequence changes. Drafts are sampled with the random numbers of their positions, so that a
    /// module as good as the model drafts what the model samples.
    ///
    /// # Errors
    /// A model without drafts, a chunk of other than one token, a sequence without tokens, more
    /// drafts than `step_tokens - 1`, positions that the model does not have.
    pub fn draft(
        &mut self,
        chunks: &[Chunk<'_>],
        count: usize,
        sampling: &[Sampling],
    ) -> Result<Vec<Vec<u32>>> {
        check_sampling(chunks, sampling)?;
        self.check_drafts(chunks, count)?;
        let mut drafts: Vec<Vec<u32>> = vec![Vec::new(); chunks.len()];
        let mut next: Vec<u32> = chunks.iter().map(|chunk| chunk.tokens[0]).collect();
        for ahead in 0..count {
            let wanted = self.module_step(chunks, &next, ahead, sampling)?;
            next = self.read_tokens(&wanted)?;
            drafts.iter_mut().zip(&next).for_each(|(drafts, &token)| drafts.push(token));
        }
        Ok(drafts)
    }

    /// The module's logits for the token after the next one of each sequence, as
    /// [`Self::draft`] samples the first draft from them.
    ///
    /// # Errors
    /// As [`Self::draft`].
    pub fn draft_logits(&mut self, chunks: &[Chunk<'_>]) -> Result<Vec<Vec<f32>>> {
        self.check_drafts(chunks, 1)?;
        let next: Vec<u32> = chunks.iter().map(|chunk| chunk.tokens[0]).collect();
        let wanted = self.module_step(chunks, &next, 0, &[])?;
        self.read_logits(&wanted)
    }

    fn check_drafts(&self, chunks: &[Chunk<'_>], count: usize) -> Result<()> {
        let refuse = |argument, value, rule| Err(ModelError::Limit { argument, value, rule });
        if !self.limits.drafts {
            return refuse("drafts", count, "0: the model was made without its MTP module");
        }
        if count >= self.limits.step_tokens {
            return refuse("drafts", count, "less than `step_tokens`");
        }
        self.check(chunks)?;
        let most = self.config().max_positions.min(self.limits.num_pages * TOKENS_PER_PAGE);
        for Chunk { sequence, tokens } in chunks {
            let length = self.manager.num_tokens(*sequence)?;
            if length == 0 {
                return Err(CacheError::NoTokens.into());
            }
            if tokens.len() != 1 {
                return refuse("tokens", tokens.len(), "1: the token after the sequence");
            }
            if length + count > most {
                return Err(ModelError::TooLong { tokens: length + count, most });
            }
        }
        Ok(())
    }

    /// Computes the module's logits of one row for each sequence, that many rows ahead of its last
    /// token, and with samplings a token after each. Returns what can be read then.
    fn module_step(
        &mut self,
        chunks: &[Chunk<'_>],
        next: &[u32],
        ahead: usize,
        sampling: &[Sampling],
    ) -> Result<Wanted> {
        let mut rows = Vec::new();
        for (chunk, next) in chunks.iter().zip(next) {
            let first = self.manager.num_tokens(chunk.sequence)? - 1 + ahead;
            let next = std::slice::from_ref(next);
            rows.push(ModuleRows { sequence: chunk.sequence, first, next });
        }
        let batch = Batch::of_module(&self.manager, &rows)?;
        let positions = batch.positions.iter().map(|&position| position as u64 + 2);
        let requests = sampling.iter().copied().zip(positions).collect();
        let wanted = Wanted { requests, ..Wanted::logits(batch.num_tokens()) };
        // Further rows read the streams of the module itself.
        let tails = rows.iter().map(|row| (self.parts.caches.tail(row.sequence.slot()), 1));
        let streams = match ahead {
            0 => self.parts.gathered(&tails.collect::<Vec<_>>())?,
            _ => self.parts.step(&batch).streams()?,
        };
        let (layer, Some(w)) = (self.config().layers.len(), &self.weights.mtp) else {
            return Err(CacheError::NoTokens.into());
        };
        let shared = &self.weights.shared;
        let mut step = self.parts.step(&batch);
        step.layer = Some(layer);
        step.upload(&wanted)?;
        step.module_input(w, &shared["embed"], &streams)?;
        let u = step.first_site(ATTN, w)?;
        let y = step.sublayers(layer, LayerKind::Window, &u, w)?;
        step.last(&y)?;
        step.head(&wanted, w, &shared["head"])?;
        Ok(wanted)
    }

    /// Writes the module's window for tokens that a step has kept, and keeps the streams of the
    /// last one of each sequence.
    pub(super) fn feed_module(&mut self, batch: &Batch, kept: &[Fed<'_>]) -> Result<()> {
        let Some(w) = &self.weights.mtp else { return Ok(()) };
        let (layer, parts) = (self.parts.config.layers.len(), &mut self.parts);
        let streams = parts.step(batch).streams()?.address;
        let bytes = parts.caches.tail_bytes() as u64;
        let (mut rows, mut sources, mut tails) = (Vec::new(), Vec::new(), Vec::new());
        for (number, &Fed { sequence, tokens, .. }) in kept.iter().enumerate() {
            let own = streams + batch.cu_seqlens[number] as u64 * bytes;
            let tail = parts.caches.tail(sequence.slot());
            let (first, next) = match batch.first_positions[number] {
                0 => (0, &tokens[1..]),
                position => (position as usize - 1, tokens),
            };
            if next.len() == tokens.len() {
                sources.push((tail, 1));
            }
            sources.push((own, tokens.len() - 1));
            tails.push((tail, own + (tokens.len() - 1) as u64 * bytes));
            if !next.is_empty() {
                rows.push(ModuleRows { sequence, first, next });
            }
        }
        let read = parts.gathered(&sources)?;
        for (target, source) in tails {
            parts.device.backend().copy(target, source, bytes as usize)?;
        }
        if rows.is_empty() {
            return Ok(());
        }
        let batch = Batch::of_module(&self.manager, &rows)?;
        let mut step = parts.step(&batch);
        step.layer = Some(layer);
        step.upload(&Wanted::default())?;
        step.module_input(w, &self.weights.shared["embed"], &read)?;
        let u = step.first_site(ATTN, w)?;
        Ok(step.window_rows(layer, LayerKind::Window, &u, w)?)
    }
}

impl Step<'_, '_> {
    /// The streams that enter the module, of the tokens' embeddings and of `streams`,
    /// `[num_tokens, 4, hidden_size]`: `mtp_input`, by its operators.
    fn module_input(
        &mut self,
        w: &Views,
        table: &TensorView,
        streams: &TensorView,
    ) -> dsv4_runtime::Result<()> {
        let (tokens, hidden) = (self.num_tokens(), self.config.hidden_size);
        let embedding = self.rows("embedding", DType::Bf16, hidden)?;
        let as_one = shaped(&embedding, &[tokens, 1, hidden]);
        let ids = self.list("token_ids", &[tokens])?;
        let views = Views::from([("table", table), ("token_ids", &ids), ("out", &as_one)]);
        self.launch("embed_streams", "embed", &views, |device, views| {
            embed_streams::forward(device, views, 1)
        })?;
        let e = self.norm("e", &embedding, &w["enorm"])?;
        let e = self.quantized(["e_codes", "e_scales"], &e)?;
        let e_y = self.product("e_y", &e, [&w["e_proj"], &w["e_proj_scales"]])?;
        let rows = tokens * NUM_STREAMS;
        let hh = self.norm("hh", &shaped(streams, &[rows, hidden]), &w["hnorm"])?;
        let hh = self.quantized(["hh_codes", "hh_scales"], &hh)?;
        let h_y = self.product("h_y", &hh, [&w["h_proj"], &w["h_proj_scales"]])?;
        let of_streams: Vec<i32> = (0..rows as i32).map(|row| row / NUM_STREAMS as i32).collect();
        let slots = self.buffers.own_list("tokens_of_streams", &[rows, 1], &of_streams)?;
        let out = shaped(&self.streams()?, &[rows, hidden]);
        let views = Views::from([("y", &e_y), ("shared", &h_y), ("out", &out)]);
        let views = views.with("token_topk_to_pos", &slots);
        self.launch("moe_reduce", "module_input", &views, |device, views| {
            moe_reduce::launch(device, views, false)
        })
    }
}
