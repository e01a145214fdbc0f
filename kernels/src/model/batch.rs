//! What a step computes: new tokens of several sequences, packed, and where their rows and entries
//! are (inference 6.2, 8, 13).

use crate::cache::cache_layout::{LayerKind, WINDOW};
use crate::cache::cache_manager::{CacheError, CacheManager, SequenceId};

/// New entries of the layers of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Entries {
    /// The first row of each sequence's new entries, and the end.
    pub cu_entries: Vec<i32>,
    /// The slot of each new entry in the pages.
    pub slots: Vec<i32>,
}

/// New tokens of a sequence in a step, of which the last `drafts` may be rejected afterwards.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fed<'a> {
    pub sequence: SequenceId,
    pub tokens: &'a [u32],
    pub drafts: usize,
}

/// Rows of the MTP module: row i has the streams of position `first + i` and the embedding of the
/// token after it, `next[i]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct ModuleRows<'a> {
    pub sequence: SequenceId,
    pub first: usize,
    pub next: &'a [u32],
}

/// The extents of a step's lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Extents {
    num_tokens: usize,
    num_sequences: usize,
    table_pages: usize,
    hca_width: usize,
    num_entries: [usize; 2],
}

/// A step on the host. Lists have a row for each token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Batch {
    pub token_ids: Vec<i32>,
    pub positions: Vec<i32>,
    /// The first token of each sequence, and the end.
    pub cu_seqlens: Vec<i32>,
    pub first_positions: Vec<i32>,
    /// The state of each sequence.
    pub states: Vec<i32>,
    /// Where each token's row of the window is written.
    pub window: Vec<i32>,
    /// The rows of the window that each token sees, [`WINDOW`] of them.
    pub window_indices: Vec<i32>,
    pub csa: Entries,
    pub hca: Entries,
    /// Pages of each token's sequence, padded with -1.
    pub block_table: Vec<i32>,
    pub table_pages: usize,
    /// How many entries of 4 tokens each token sees.
    pub csa_lengths: Vec<i32>,
    /// Slots of the entries of 128 tokens that each token sees, padded with -1.
    pub hca_indices: Vec<i32>,
    pub hca_width: usize,
}

impl Batch {
    /// Appends the tokens to their sequences. A rejected call changes nothing.
    ///
    /// # Errors
    /// A sequence that is not running or occurs twice, no tokens, too few pages.
    pub fn new(manager: &mut CacheManager, parts: &[Fed<'_>]) -> Result<Self, CacheError> {
        check(manager, parts)?;
        let mut batch = Self::empty();
        for part in parts {
            batch.append(manager, *part)?;
        }
        batch.read(manager, parts)?;
        Ok(batch)
    }

    fn empty() -> Self {
        let mut batch =
            Self { cu_seqlens: vec![0], table_pages: 1, hca_width: 1, ..Self::default() };
        batch.csa.cu_entries.push(0);
        batch.hca.cu_entries.push(0);
        batch
    }

    /// The lists of rows of the MTP module, which has a window only. The sequences do not change.
    ///
    /// # Errors
    /// A sequence that is not running, a position farther ahead than its window has rows.
    pub fn of_module(manager: &CacheManager, parts: &[ModuleRows<'_>]) -> Result<Self, CacheError> {
        let mut batch = Self::empty();
        for &ModuleRows { sequence, first, next } in parts {
            batch.first_positions.push(first as i32);
            batch.states.push(sequence.slot() as i32);
            batch.token_ids.extend(next.iter().map(|&token| token as i32));
            for position in first..first + next.len() {
                let (row, seen) = manager.window_ahead(sequence, position)?;
                batch.positions.push(position as i32);
                batch.window.push(row);
                batch.window_indices.extend(seen);
                batch.csa_lengths.push(0);
                batch.block_table.push(-1);
                batch.hca_indices.push(-1);
            }
            batch.cu_seqlens.push(batch.positions.len() as i32);
            batch.csa.cu_entries.push(0);
            batch.hca.cu_entries.push(0);
        }
        Ok(batch)
    }

    /// How many tokens each sequence has, if all have as many.
    pub fn uniform_tokens(&self) -> Option<usize> {
        let count = self.num_tokens().checked_div(self.num_sequences())?;
        let is_uniform = self.cu_seqlens.windows(2).all(|ends| ends[1] - ends[0] == count as i32);
        is_uniform.then_some(count)
    }

    /// Widens lists whose lengths follow from positions, so that many steps have the same: tables to
    /// powers of two, new entries to the most that this many tokens of each sequence complete. What
    /// is added is skipped by every kernel.
    pub fn widen(&mut self, uniform_tokens: usize) {
        for (list, width) in [
            (&mut self.block_table, &mut self.table_pages),
            (&mut self.hca_indices, &mut self.hca_width),
        ] {
            let wide = width.next_power_of_two();
            let mut widened = vec![-1; list.len() / *width * wide];
            for (to, row) in widened.chunks_mut(wide).zip(list.chunks(*width)) {
                to[..row.len()].copy_from_slice(row);
            }
            *list = widened;
            *width = wide;
        }
        let sequences = self.num_sequences();
        for (entries, kind) in [(&mut self.csa, LayerKind::Csa), (&mut self.hca, LayerKind::Hca)] {
            let most = uniform_tokens.div_ceil(kind.ratio().unwrap_or(1));
            entries.slots.resize(sequences * most, -1);
        }
    }

    /// What the addresses and the launches of a step follow from, beside the number of rows of its
    /// head.
    pub fn extents(&self) -> Extents {
        Extents {
            num_tokens: self.num_tokens(),
            num_sequences: self.num_sequences(),
            table_pages: self.table_pages,
            hca_width: self.hca_width,
            num_entries: [self.csa.slots.len(), self.hca.slots.len()],
        }
    }

    pub fn num_tokens(&self) -> usize {
        self.positions.len()
    }

    pub fn num_sequences(&self) -> usize {
        self.states.len()
    }

    pub fn entries(&self, kind: LayerKind) -> &Entries {
        if kind == LayerKind::Hca { &self.hca } else { &self.csa }
    }

    fn append(
        &mut self,
        manager: &mut CacheManager,
        Fed { sequence: id, tokens, drafts }: Fed<'_>,
    ) -> Result<(), CacheError> {
        self.first_positions.push(manager.num_tokens(id)? as i32);
        let mapping = manager.step(id, tokens, drafts)?;
        self.states.push(id.slot() as i32);
        self.token_ids.extend(tokens.iter().map(|&token| token as i32));
        self.positions.extend(mapping.positions.map(|position| position as i32));
        self.cu_seqlens.push(self.positions.len() as i32);
        self.window.extend(mapping.window);
        for (entries, slots) in [(&mut self.csa, mapping.csa), (&mut self.hca, mapping.hca)] {
            entries.slots.extend(slots.into_iter().filter(|&slot| slot >= 0));
            entries.cu_entries.push(entries.slots.len() as i32);
        }
        Ok(())
    }

    /// The lists of what each token reads, when all pages are known.
    fn read(&mut self, manager: &CacheManager, parts: &[Fed<'_>]) -> Result<(), CacheError> {
        let tables: Vec<Vec<i32>> = parts
            .iter()
            .map(|part| manager.block_table(part.sequence))
            .collect::<Result<_, _>>()?;
        self.table_pages = tables.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let (mut at, mut seen) = (0, Vec::new());
        for (&Fed { sequence: id, tokens, .. }, table) in parts.iter().zip(&tables) {
            for &position in &self.positions[at..at + tokens.len()] {
                let position = position as usize;
                let window = manager.window_slots(id, position)?;
                debug_assert_eq!(window.len(), WINDOW);
                self.window_indices.extend(window);
                self.block_table.extend(table);
                self.block_table
                    .resize(self.block_table.len() + self.table_pages - table.len(), -1);
                let ratio = LayerKind::Csa.ratio().unwrap_or(1);
                self.csa_lengths.push(((position + 1) / ratio) as i32);
                seen.push(manager.entry_slots(id, LayerKind::Hca, position)?);
            }
            at += tokens.len();
        }
        self.hca_width = seen.iter().map(Vec::len).max().unwrap_or(0).max(1);
        for mut slots in seen {
            slots.resize(self.hca_width, -1);
            self.hca_indices.extend(slots);
        }
        Ok(())
    }
}

/// Everything that a step may refuse, before any sequence has changed.
fn check(manager: &CacheManager, parts: &[Fed<'_>]) -> Result<(), CacheError> {
    let mut needed = 0;
    for (at, &Fed { sequence: id, tokens, .. }) in parts.iter().enumerate() {
        let length = manager.num_tokens(id)?;
        if tokens.is_empty() {
            return Err(CacheError::NoTokens);
        }
        if parts[..at].iter().any(|other| other.sequence == id) {
            return Err(CacheError::UnknownSequence(id));
        }
        let wanted = (length + tokens.len()).div_ceil(crate::cache::cache_layout::TOKENS_PER_PAGE);
        needed += wanted.saturating_sub(manager.block_table(id)?.len());
    }
    let available = manager.available_pages();
    if needed > available {
        return Err(CacheError::OutOfPages { needed, available });
    }
    Ok(())
}
