//! Which pages and rows of the caches the tokens of each sequence own (inference 13.2 to 13.4).
//!
//! The manager is host code: it allocates slots and never touches device memory. Kernels do the
//! work that it requests, in the order of its results:
//!
//! ```text
//! admit     restore: copy the snapshot to the sequence's state; or reset the state (values 0, gates -inf)
//! step      write rows and entries to the slots of the mapping; -1 writes nothing
//! accept    nothing: rows are found by their position, and those of rejected drafts are written again
//! snapshot  copy the sequence's state to the snapshot
//! ```
//!
//! A page holds the entries of 128 tokens, of every layer. Sequences that start with the same
//! tokens share pages. A page is identified by the hash of all tokens up to its end, so a
//! difference at any earlier token gives another page (FM-144). The window and the compressors'
//! rows are not in pages. They are saved as a snapshot at the end of a page: only such a page can
//! be the last one of a reused prefix (FM-145).
//!
//! A rejected call changes nothing.

mod free_list;
mod prefixes;

use std::ops::Range;

use thiserror::Error;

use self::free_list::FreeList;
use self::prefixes::Prefixes;
use crate::cache::cache_layout::{CacheLayout, LayerKind, TOKENS_PER_PAGE, WINDOW};

/// The hash of all tokens from the first one to the end of a page.
type Prefix = [u8; 32];

/// The capacity of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Pages of the pool.
    pub num_pages: usize,
    /// Sequences that run at the same time: the number of states.
    pub num_sequences: usize,
    /// Saved states of prefixes; 0 disables the reuse of prefixes.
    pub num_snapshots: usize,
}

/// A running sequence. A later sequence in the same slot has another id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SequenceId {
    slot: u32,
    generation: u64,
}

impl SequenceId {
    /// The state of the sequence: `states + slot * state_stride`.
    pub fn slot(self) -> usize {
        self.slot as usize
    }
}

/// A new sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admitted {
    /// Its id.
    pub sequence: SequenceId,
    /// Tokens of the prompt whose entries are cached, a multiple of 128 and less than the prompt.
    /// The first step starts after them.
    pub cached_tokens: usize,
    /// The snapshot to copy to the sequence's state; `None` means that the state is reset.
    pub restore: Option<usize>,
}

/// Where the tokens of a step are written: an `i32` for each, or -1 for nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotMapping {
    /// Positions of the tokens.
    pub positions: Range<usize>,
    /// Rows of the windows, `state slot * window_rows + position mod window_rows`. If a step has
    /// more tokens than that, only the last ones have a row.
    pub window: Vec<i32>,
    /// Rows of the compressors of layers with 4 tokens an entry: only rows that a later entry can
    /// need.
    pub csa_state: Vec<i32>,
    /// The same of layers with 128.
    pub hca_state: Vec<i32>,
    /// Entries, and keys of the indexer, of layers with 4 tokens an entry, for the token that
    /// completes one.
    pub csa: Vec<i32>,
    /// Entries of layers with 128.
    pub hca: Vec<i32>,
}

/// Why a call was rejected. Nothing has changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CacheError {
    /// Free pages and unused prefixes together are not enough.
    #[error("{needed} more pages are needed, and {available} can be had")]
    OutOfPages {
        /// Pages that the step needs in addition to the sequence's own.
        needed: usize,
        /// Free pages, and pages of prefixes that no sequence holds.
        available: usize,
    },
    /// Every state is taken by a sequence.
    #[error("all {0} sequences are taken")]
    OutOfSequences(usize),
    /// The cache has no snapshots.
    #[error("the cache was made without snapshots")]
    NoSnapshots,
    /// Not a sequence, or one that was released.
    #[error("sequence {0:?} is not active")]
    UnknownSequence(SequenceId),
    /// A step, or a prompt, without tokens.
    #[error("there are no tokens")]
    NoTokens,
    /// More drafts than a step may have, or more than the tokens after its first.
    #[error("{drafts} of {tokens} tokens cannot be drafts: {most} at most, and not the first")]
    TooManyDrafts {
        /// Tokens of the step.
        tokens: usize,
        /// Drafts among them.
        drafts: usize,
        /// The most that a step may have.
        most: usize,
    },
    /// More drafts are accepted than there were.
    #[error("{accepted} drafts cannot be accepted of {drafts}")]
    TooManyAccepted {
        /// Drafts to accept.
        accepted: usize,
        /// Drafts of the last step.
        drafts: usize,
    },
    /// Drafts of the last step are neither accepted nor rejected.
    #[error("{0} drafts of the last step are neither accepted nor rejected")]
    OpenDrafts(usize),
    /// The state of a sequence can be saved at the end of a page.
    #[error("a sequence of {0} tokens does not end where a page ends")]
    NotAtPageEnd(usize),
    /// A position at which a sequence has no token yet.
    #[error("`position` is {position}: the sequence has {tokens} tokens")]
    NoSuchPosition {
        /// The position.
        position: usize,
        /// Tokens of the sequence.
        tokens: usize,
    },
    /// A slot number beyond `i32`.
    #[error("`{argument}` is {value}: slots would not fit into 32 bits")]
    TooMany {
        /// The quantity that is too large.
        argument: &'static str,
        /// Its value.
        value: usize,
    },
}

type Result<T> = std::result::Result<T, CacheError>;

/// A page of the pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Page {
    /// Sequences that have it in their table.
    holders: usize,
    /// The prefix that ends with this page, if it can be found.
    prefix: Option<Prefix>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Sequence {
    generation: u64,
    tokens: Vec<u32>,
    /// How many of the last tokens are drafts.
    drafts: usize,
    block_table: Vec<usize>,
}

/// Pages, states and snapshots, and which sequence has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheManager {
    layout: CacheLayout,
    capacity: Capacity,
    /// Pages that were ever taken.
    pages: Vec<Page>,
    free_pages: FreeList,
    free_snapshots: FreeList,
    cached: Prefixes,
    /// States that were ever taken.
    sequences: Vec<Option<Sequence>>,
    /// Counts admissions and uses of prefixes.
    clock: u64,
}

impl CacheManager {
    /// A cache in which every page and every state is free.
    ///
    /// # Errors
    /// More pages or sequences than 32-bit slot numbers allow.
    pub fn new(layout: CacheLayout, capacity: Capacity) -> Result<Self> {
        let state_rows =
            LayerKind::ALL.map(|kind| layout.state_rows(kind)).into_iter().max().unwrap_or(0);
        let limits = [
            ("num_pages", capacity.num_pages, LayerKind::Csa.entries_per_page()),
            ("num_sequences", capacity.num_sequences, layout.window_rows.max(state_rows)),
            ("num_snapshots", capacity.num_snapshots, 1),
        ];
        for (argument, value, slots_each) in limits {
            if value.checked_mul(slots_each).is_none_or(|slots| i32::try_from(slots).is_err()) {
                return Err(CacheError::TooMany { argument, value });
            }
        }
        Ok(Self {
            pages: Vec::new(),
            free_pages: FreeList::below(capacity.num_pages),
            free_snapshots: FreeList::below(capacity.num_snapshots),
            cached: Prefixes::default(),
            sequences: Vec::new(),
            clock: 0,
            layout,
            capacity,
        })
    }

    /// The memory layout that the slots refer to.
    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// Pages that a step can get: free pages, and pages of prefixes that no sequence holds.
    pub fn available_pages(&self) -> usize {
        self.free_pages.len() + self.cached.evictable()
    }

    /// Starts a sequence with the longest cached prefix of its prompt that has a snapshot. The
    /// prefix is always shorter than the prompt: at least one token is computed.
    ///
    /// # Errors
    /// An empty prompt, or no free state.
    pub fn admit(&mut self, prompt: &[u32]) -> Result<Admitted> {
        if prompt.is_empty() {
            return Err(CacheError::NoTokens);
        }
        let released = self.sequences.iter().position(Option::is_none);
        let slot = released.unwrap_or(self.sequences.len());
        if slot == self.capacity.num_sequences {
            return Err(CacheError::OutOfSequences(slot));
        }
        let found = self.longest_prefix(&prompt[..prompt.len() - 1]);
        let restore = found.last().and_then(|prefix| self.cached.snapshot(prefix));
        self.clock += 1;
        let mut block_table = Vec::with_capacity(found.len());
        for &prefix in &found {
            if let Some(page) = self.cached.used(prefix, self.clock) {
                self.pages[page].holders += 1;
                self.cached.set_held(prefix, true);
                block_table.push(page);
            }
        }
        let cached_tokens = found.len() * TOKENS_PER_PAGE;
        let tokens = prompt[..cached_tokens].to_vec();
        self.sequences.resize(self.sequences.len().max(slot + 1), None);
        self.sequences[slot] =
            Some(Sequence { generation: self.clock, tokens, drafts: 0, block_table });
        let sequence = SequenceId { slot: slot as u32, generation: self.clock };
        Ok(Admitted { sequence, cached_tokens, restore })
    }

    /// How many sequences run.
    pub fn num_running(&self) -> usize {
        self.sequences.iter().flatten().count()
    }

    /// Forgets every prefix that no running sequence holds: what computed them is no longer right.
    ///
    /// # Errors
    /// None while the counts of pages are consistent.
    pub fn forget_prefixes(&mut self) -> Result<()> {
        self.evict(self.available_pages())
    }

    /// Appends tokens, of which the last `drafts` may be rejected afterwards. Returns where they
    /// are written.
    ///
    /// # Errors
    /// No tokens, too many drafts, drafts of the last step that are neither accepted nor rejected,
    /// or too few pages.
    pub fn step(&mut self, id: SequenceId, tokens: &[u32], drafts: usize) -> Result<SlotMapping> {
        let sequence = self.sequence(id)?;
        if sequence.drafts > 0 {
            return Err(CacheError::OpenDrafts(sequence.drafts));
        }
        if tokens.is_empty() {
            return Err(CacheError::NoTokens);
        }
        let most = self.layout.max_draft_tokens;
        if drafts > most || drafts >= tokens.len() {
            return Err(CacheError::TooManyDrafts { tokens: tokens.len(), drafts, most });
        }
        let from = sequence.tokens.len();
        let wanted = (from + tokens.len()).div_ceil(TOKENS_PER_PAGE);
        let pages = self.take_pages(wanted.saturating_sub(sequence.block_table.len()))?;
        let sequence = self.sequence_mut(id)?;
        sequence.block_table.extend(pages);
        sequence.tokens.extend(tokens);
        sequence.drafts = drafts;
        let block_table = sequence.block_table.clone();
        Ok(self.mapping(id.slot(), &block_table, from..from + tokens.len()))
    }

    /// Keeps the first `accepted` drafts of the last step and rejects the others. The next step
    /// starts after those kept, and writes the rows of the others again. Pages that hold nothing
    /// else become free.
    ///
    /// # Errors
    /// More drafts than the last step had.
    pub fn accept(&mut self, id: SequenceId, accepted: usize) -> Result<()> {
        let sequence = self.sequence_mut(id)?;
        let drafts = sequence.drafts;
        if accepted > drafts {
            return Err(CacheError::TooManyAccepted { accepted, drafts });
        }
        let length = sequence.tokens.len() - (drafts - accepted);
        sequence.tokens.truncate(length);
        sequence.drafts = 0;
        let given_back = sequence.block_table.split_off(length.div_ceil(TOKENS_PER_PAGE));
        self.give_back(given_back);
        Ok(())
    }

    /// Lets later sequences that start with the same tokens reuse this one's pages. Returns the
    /// snapshot to which its state must be copied, or `None` where one of this prefix exists. The
    /// least recently used snapshot is evicted.
    ///
    /// # Errors
    /// A sequence that does not end at the end of a page, or has open drafts; a cache without
    /// snapshots.
    pub fn snapshot(&mut self, id: SequenceId) -> Result<Option<usize>> {
        let sequence = self.sequence(id)?;
        let length = sequence.tokens.len();
        if sequence.drafts > 0 {
            return Err(CacheError::OpenDrafts(sequence.drafts));
        }
        if length == 0 || !length.is_multiple_of(TOKENS_PER_PAGE) {
            return Err(CacheError::NotAtPageEnd(length));
        }
        if self.capacity.num_snapshots == 0 {
            return Err(CacheError::NoSnapshots);
        }
        let (prefixes, block_table) = (prefixes_of(&sequence.tokens), sequence.block_table.clone());
        self.clock += 1;
        for (at, (&prefix, &page)) in prefixes.iter().zip(&block_table).enumerate() {
            let parent = at.checked_sub(1).map(|before| (prefixes[before], at));
            if self.cached.remember(prefix, page, parent, self.clock) {
                self.pages[page].prefix = Some(prefix);
            }
        }
        let last = prefixes[prefixes.len() - 1];
        if self.cached.snapshot(&last).is_some() {
            return Ok(None);
        }
        let free = self.free_snapshots.take();
        let snapshot = free.or_else(|| self.cached.take_oldest_snapshot());
        self.cached.set_snapshot(last, snapshot);
        Ok(snapshot)
    }

    /// Ends a sequence. Its pages become free, except pages of cached prefixes, which stay until
    /// they are evicted.
    ///
    /// # Errors
    /// A sequence that is not running.
    pub fn release(&mut self, id: SequenceId) -> Result<()> {
        self.sequence(id)?;
        if let Some(sequence) = self.sequences[id.slot()].take() {
            self.give_back(sequence.block_table);
        }
        Ok(())
    }

    /// Tokens of a sequence, drafts included.
    ///
    /// # Errors
    /// A sequence that is not running.
    pub fn num_tokens(&self, id: SequenceId) -> Result<usize> {
        Ok(self.sequence(id)?.tokens.len())
    }

    /// Pages of a sequence in the order of its tokens.
    ///
    /// # Errors
    /// A sequence that is not running.
    pub fn block_table(&self, id: SequenceId) -> Result<Vec<i32>> {
        Ok(self.sequence(id)?.block_table.iter().map(|&page| page as i32).collect())
    }

    /// Slots of the entries that a query at this position sees, in order: floor((position + 1) /
    /// ratio) of them (inference 6.1). Empty where the layer has no entries.
    ///
    /// # Errors
    /// A sequence that is not running, or a position that it does not have.
    pub fn entry_slots(
        &self,
        id: SequenceId,
        kind: LayerKind,
        position: usize,
    ) -> Result<Vec<i32>> {
        let sequence = self.at(id, position)?;
        let Some(ratio) = kind.ratio() else { return Ok(Vec::new()) };
        let entries = (position + 1) / ratio;
        Ok((0..entries).map(|entry| entry_slot(&sequence.block_table, kind, entry)).collect())
    }

    /// Slots of the window rows that a query at this position sees, oldest first, padded with -1
    /// (inference 13.3).
    ///
    /// # Errors
    /// A sequence that is not running, or a position that it does not have.
    pub fn window_slots(&self, id: SequenceId, position: usize) -> Result<Vec<i32>> {
        self.at(id, position)?;
        Ok(self.window_of(id.slot(), position))
    }

    /// The row of a window to which a draft module writes at this position, and the slots that a
    /// query there sees, as [`Self::window_slots`]. The position may be ahead of the sequence's
    /// tokens: a module that drafts several tokens reads its own. Its rows there are written again.
    ///
    /// # Errors
    /// A sequence that is not running; a position at or beyond its tokens and the most drafts.
    pub fn window_ahead(&self, id: SequenceId, position: usize) -> Result<(i32, Vec<i32>)> {
        let tokens = self.sequence(id)?.tokens.len();
        if position >= tokens + self.layout.max_draft_tokens {
            return Err(CacheError::NoSuchPosition { position, tokens });
        }
        let row = row_slot(id.slot(), self.layout.window_rows, position);
        Ok((row, self.window_of(id.slot(), position)))
    }

    fn window_of(&self, slot: usize, position: usize) -> Vec<i32> {
        let rows = self.layout.window_rows;
        let first = (position + 1).saturating_sub(WINDOW);
        let mut slots: Vec<i32> =
            (first..=position).map(|token| row_slot(slot, rows, token)).collect();
        slots.resize(WINDOW, -1);
        slots
    }

    fn sequence(&self, id: SequenceId) -> Result<&Sequence> {
        let own = self.sequences.get(id.slot()).and_then(Option::as_ref);
        own.filter(|sequence| sequence.generation == id.generation)
            .ok_or(CacheError::UnknownSequence(id))
    }

    /// The sequence, which has this position.
    fn at(&self, id: SequenceId, position: usize) -> Result<&Sequence> {
        let sequence = self.sequence(id)?;
        let tokens = sequence.tokens.len();
        if position < tokens {
            return Ok(sequence);
        }
        Err(CacheError::NoSuchPosition { position, tokens })
    }

    fn sequence_mut(&mut self, id: SequenceId) -> Result<&mut Sequence> {
        let own = self.sequences.get_mut(id.slot()).and_then(Option::as_mut);
        own.filter(|sequence| sequence.generation == id.generation)
            .ok_or(CacheError::UnknownSequence(id))
    }

    fn mapping(&self, slot: usize, block_table: &[usize], positions: Range<usize>) -> SlotMapping {
        let rows = |rows: usize| -> Vec<i32> {
            // Rows that a later token of the step overwrites are written once, by that token.
            let kept = |token: usize| rows > 0 && token + rows >= positions.end;
            positions
                .clone()
                .map(|token| if kept(token) { row_slot(slot, rows, token) } else { -1 })
                .collect()
        };
        let entries = |kind: LayerKind| -> Vec<i32> {
            let completes =
                |token: usize| kind.ratio().filter(|ratio| (token + 1).is_multiple_of(*ratio));
            let slot = |token: usize| {
                completes(token)
                    .map_or(-1, |ratio| entry_slot(block_table, kind, (token + 1) / ratio - 1))
            };
            positions.clone().map(slot).collect()
        };
        SlotMapping {
            window: rows(self.layout.window_rows),
            csa_state: rows(self.layout.state_rows(LayerKind::Csa)),
            hca_state: rows(self.layout.state_rows(LayerKind::Hca)),
            csa: entries(LayerKind::Csa),
            hca: entries(LayerKind::Hca),
            positions,
        }
    }

    /// The cached prefixes of these tokens, up to the last one that has a snapshot.
    fn longest_prefix(&self, tokens: &[u32]) -> Vec<Prefix> {
        let cached = |prefix: &Prefix| self.cached.contains(prefix);
        let mut found: Vec<Prefix> = prefixes_of(tokens).into_iter().take_while(cached).collect();
        let usable = found.iter().rposition(|prefix| self.cached.snapshot(prefix).is_some());
        found.truncate(usable.map_or(0, |last| last + 1));
        found
    }

    /// Returns `needed` pages, or none at all. Prefixes are evicted only as needed, the least
    /// recently used first, and never before the prefixes that continue them.
    fn take_pages(&mut self, needed: usize) -> Result<Vec<usize>> {
        self.evict(needed)?;
        let pages: Vec<usize> = (0..needed).filter_map(|_| self.free_pages.take()).collect();
        let last = pages.iter().max().map_or(0, |&page| page + 1);
        self.pages.resize(self.pages.len().max(last), Page::default());
        pages.iter().for_each(|&page| self.pages[page].holders = 1);
        Ok(pages)
    }

    /// Evicts prefixes until that many pages are free.
    fn evict(&mut self, needed: usize) -> Result<()> {
        for prefix in self.cached.to_evict(needed, self.free_pages.len())? {
            if let Some((page, snapshot)) = self.cached.forget(prefix) {
                snapshot.into_iter().for_each(|snapshot| self.free_snapshots.give_back(snapshot));
                self.pages[page].prefix = None;
                self.free_pages.give_back(page);
            }
        }
        Ok(())
    }

    fn give_back(&mut self, block_table: Vec<usize>) {
        for page in block_table {
            self.pages[page].holders -= 1;
            match self.pages[page] {
                Page { holders: 0, prefix: None } => self.free_pages.give_back(page),
                Page { holders: 0, prefix: Some(prefix) } => self.cached.set_held(prefix, false),
                _ => {}
            }
        }
    }
}

/// The slot of an entry: `page * entries_per_page + entry mod entries_per_page`.
fn entry_slot(block_table: &[usize], kind: LayerKind, entry: usize) -> i32 {
    let in_page = kind.entries_per_page();
    (block_table[entry / in_page] * in_page + entry % in_page) as i32
}

/// The row of a token in a ring of `rows` rows of the sequence in `slot`.
fn row_slot(slot: usize, rows: usize, token: usize) -> i32 {
    (slot * rows + token % rows) as i32
}

/// The hash of each whole page of these tokens, which includes all tokens before it.
fn prefixes_of(tokens: &[u32]) -> Vec<Prefix> {
    let mut prefix: Option<Prefix> = None;
    let pages = tokens.chunks_exact(TOKENS_PER_PAGE).map(|page| {
        let mut hasher = blake3::Hasher::new();
        hasher.update(prefix.as_ref().map_or(&[][..], |before| before));
        page.iter().for_each(|token| {
            hasher.update(&token.to_le_bytes());
        });
        *prefix.insert(*hasher.finalize().as_bytes())
    });
    pages.collect()
}

#[cfg(test)]
mod model;
