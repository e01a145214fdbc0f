//! Compares the manager with a plain model of the caches: each row of memory holds the text from
//! which it was computed.
//!
//! A kernel computes a token's row from all tokens up to it. The model writes only the digest of
//! those tokens, at the slot of the manager's mapping. Each read of a sequence must then return the
//! digest of its own tokens. So after chunks, reused prefixes, rejected drafts and reused slots, a
//! sequence reads what a cold run would have written.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::prefixes::Prefixes;
use super::{Admitted, CacheError, CacheManager, Capacity, Prefix, SequenceId, SlotMapping};
use crate::cache::cache_layout::{CacheConfig, CacheLayout, LayerKind, TOKENS_PER_PAGE};
use crate::cache::kv_cache::RowFormat;

const MAX_DRAFT_TOKENS: usize = 6;

/// A row of memory: its kind, and its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Row {
    Window(i32),
    CsaState(i32),
    HcaState(i32),
    Entry(LayerKind, i32),
}

/// Mistakes of an engine that uses the manager. The model sees each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// Nothing.
    None,
    /// The state is not restored where a prefix is reused (FM-145).
    SkipsRestore,
    /// Only the last four of a step's rows of state are written (FM-148).
    KeepsFourRows,
    /// States are indexed by the order of the running sequences, not by their slots (FM-146).
    StateByBatchRow,
    /// A snapshot always saves the state of the first sequence (FM-146).
    SavesAnother,
    /// Entries are counted in tokens: a page is taken to hold 128 of them (FM-143).
    EntriesAsTokens,
    /// A rejected draft's rows stay, and its position is not written again (FM-148).
    KeepsRejected,
}

#[derive(Clone, Debug)]
enum Operation {
    /// A sequence starts with the text of this number.
    Admit(usize),
    /// This many tokens of one of the sequences, some of them drafts.
    Step {
        which: usize,
        tokens: usize,
        drafts: usize,
    },
    /// Fills the last page, whose state is then saved.
    FinishPage(usize),
    /// Some of the drafts.
    Accept {
        which: usize,
        accepted: usize,
    },
    Snapshot(usize),
    Release(usize),
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let which = 0..4usize;
    let tokens = prop_oneof![4 => 1..10usize, 3 => 100..200usize];
    let operation = prop_oneof![
        3 => (0..6usize).prop_map(Operation::Admit),
        8 => (which.clone(), tokens, 0..=MAX_DRAFT_TOKENS)
            .prop_map(|(which, tokens, drafts)| Operation::Step { which, tokens, drafts }),
        3 => (which.clone(), 0..=MAX_DRAFT_TOKENS).prop_map(|(which, accepted)| Operation::Accept { which, accepted }),
        4 => which.clone().prop_map(Operation::FinishPage),
        1 => which.clone().prop_map(Operation::Snapshot),
        2 => which.prop_map(Operation::Release),
    ];
    proptest::collection::vec(operation, 1..60)
}

/// A token of a text. Texts have their first one or two pages in common, except for a token in
/// some. The last text differs from the first in its first page and has the same second one.
fn token(text: usize, position: usize) -> u32 {
    let page = position / TOKENS_PER_PAGE;
    let own = match (text, page) {
        (_, 0) => usize::from(text == 5 && position == 77),
        (0..=2 | 5, 1) => usize::from(text == 2 && position == 255),
        _ => text,
    };
    (own * 1_000_003 + position) as u32
}

fn digest(tokens: &[u32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    tokens.hash(&mut hasher);
    hasher.finish()
}

/// A sequence in the model.
struct Running {
    id: SequenceId,
    text: usize,
    tokens: Vec<u32>,
    drafts: usize,
    /// Rejected drafts, after which another text continues.
    rejected: usize,
}

struct Model {
    manager: CacheManager,
    memory: HashMap<Row, u64>,
    snapshots: HashMap<usize, Vec<(Row, u64)>>,
    running: Vec<Running>,
    fault: Fault,
    reused: usize,
}

impl Model {
    fn new(capacity: Capacity, fault: Fault) -> Self {
        let config = CacheConfig {
            layers: vec![
                LayerKind::Window,
                LayerKind::Csa,
                LayerKind::Hca,
                LayerKind::Csa,
                LayerKind::Hca,
            ],
            row: RowFormat::MODEL,
            head_dim: 512,
            indexer_dim: 128,
            indexer_row_bytes: 132,
            max_draft_tokens: MAX_DRAFT_TOKENS,
        };
        let layout = CacheLayout::new(&config).expect("a layout");
        let manager = CacheManager::new(layout, capacity).expect("a manager");
        Self {
            manager,
            memory: HashMap::new(),
            snapshots: HashMap::new(),
            running: Vec::new(),
            fault,
            reused: 0,
        }
    }

    /// Rows of a slot's state: their kinds and their positions in the state.
    fn state_rows(&self, slot: usize) -> Vec<(Row, Row)> {
        let layout = self.manager.layout();
        let rows = |count: usize, row: fn(i32) -> Row| {
            (0..count)
                .map(move |at| (row((slot * count + at) as i32), row(at as i32)))
                .collect::<Vec<_>>()
        };
        let mut all = rows(layout.window_rows, Row::Window);
        all.extend(rows(layout.state_rows(LayerKind::Csa), Row::CsaState));
        all.extend(rows(layout.state_rows(LayerKind::Hca), Row::HcaState));
        all
    }

    fn save(&self, slot: usize) -> Vec<(Row, u64)> {
        let saved = |(row, at): (Row, Row)| Some((at, *self.memory.get(&row)?));
        self.state_rows(slot).into_iter().filter_map(saved).collect()
    }

    fn restore(&mut self, slot: usize, saved: &[(Row, u64)]) {
        for (row, at) in self.state_rows(slot) {
            match saved.iter().find(|(place, _)| *place == at) {
                Some((_, content)) => self.memory.insert(row, *content),
                None => self.memory.remove(&row),
            };
        }
    }

    /// Performs one operation of an engine, or checks that a rejection changes nothing.
    fn run(&mut self, operation: &Operation) {
        let before = self.manager.clone();
        let refused = match *operation {
            Operation::Admit(text) => self.admit(text).err(),
            Operation::Step { which, tokens, drafts } => {
                self.at(which, |m, at| m.step(at, tokens, drafts))
            }
            Operation::Accept { which, accepted } => self.at(which, |m, at| m.accept(at, accepted)),
            Operation::FinishPage(which) => self.at(which, Self::finish_page),
            Operation::Snapshot(which) => self.at(which, Self::snapshot),
            Operation::Release(which) => self.at(which, Self::release),
        };
        if let Some(error) = refused {
            assert!(self.manager == before, "a refused call changed the manager: {error}");
            if let CacheError::OutOfPages { needed, available } = error {
                assert!(needed > available && available == self.manager.available_pages());
            }
        }
    }

    fn at(
        &mut self,
        which: usize,
        call: impl FnOnce(&mut Self, usize) -> super::Result<()>,
    ) -> Option<CacheError> {
        let at = which.checked_rem(self.running.len())?;
        call(self, at).err()
    }

    fn admit(&mut self, text: usize) -> super::Result<()> {
        let prompt: Vec<u32> =
            (0..3 * TOKENS_PER_PAGE).map(|position| token(text, position)).collect();
        let Admitted { sequence: id, cached_tokens, restore } = self.manager.admit(&prompt)?;
        assert!(cached_tokens < prompt.len() && cached_tokens.is_multiple_of(TOKENS_PER_PAGE));
        assert_eq!(
            restore.is_some(),
            cached_tokens > 0,
            "a prefix ends with a snapshot, and nothing else is restored"
        );
        let saved = restore.map_or(Vec::new(), |snapshot| self.snapshots[&snapshot].clone());
        if self.fault != Fault::SkipsRestore {
            self.restore(id.slot(), &saved);
        }
        self.reused += usize::from(cached_tokens > 0);
        let tokens = prompt[..cached_tokens].to_vec();
        self.running.push(Running { id, text, tokens, drafts: 0, rejected: 0 });
        Ok(())
    }

    fn step(&mut self, at: usize, tokens: usize, drafts: usize) -> super::Result<()> {
        let Running { id, text, rejected, .. } = self.running[at];
        let from = self.running[at].tokens.len();
        // After rejected drafts the text continues with other tokens.
        let new: Vec<u32> =
            (from..from + tokens).map(|position| token(text, position) + rejected as u32).collect();
        let mapping = self.manager.step(id, &new, drafts)?;
        self.running[at].tokens.extend(new);
        self.running[at].drafts = drafts;
        self.write(at, &mapping);
        Ok(())
    }

    fn finish_page(&mut self, at: usize) -> super::Result<()> {
        self.step(at, TOKENS_PER_PAGE - self.running[at].tokens.len() % TOKENS_PER_PAGE, 0)?;
        match self.snapshot(at) {
            // The previous step was not rejected: what follows is compared with the manager after
            // it.
            Err(CacheError::NoSnapshots) => Ok(()),
            other => other,
        }
    }

    fn write(&mut self, at: usize, mapping: &SlotMapping) {
        let tokens = self.running[at].tokens.clone();
        let unwritten =
            if self.fault == Fault::KeepsRejected { self.running[at].rejected.min(1) } else { 0 };
        let count = mapping.positions.len();
        let mut written = HashSet::new();
        for (number, position) in mapping.positions.clone().enumerate().skip(unwritten) {
            let content = digest(&tokens[..=position]);
            let kept = self.fault != Fault::KeepsFourRows || number + 4 >= count;
            let slot = |slots: &[i32]| Some(slots[number]).filter(|&slot| slot >= 0);
            let of_state = |slots: &[i32], rows: usize| {
                let slot = slot(slots).filter(|_| kept)?;
                let by_batch = self.fault == Fault::StateByBatchRow;
                Some(if by_batch { (at * rows) as i32 + slot % rows as i32 } else { slot })
            };
            let layout = self.manager.layout();
            let rows = [
                slot(&mapping.window).map(Row::Window),
                of_state(&mapping.csa_state, layout.state_rows(LayerKind::Csa)).map(Row::CsaState),
                of_state(&mapping.hca_state, layout.state_rows(LayerKind::Hca)).map(Row::HcaState),
                slot(&mapping.csa).map(|slot| Row::Entry(LayerKind::Csa, slot)),
                slot(&mapping.hca).map(|slot| Row::Entry(LayerKind::Hca, slot)),
            ];
            for row in rows.into_iter().flatten() {
                assert!(written.insert(row), "{row:?} is written twice in a step");
                self.memory.insert(row, content);
            }
        }
    }

    fn accept(&mut self, at: usize, accepted: usize) -> super::Result<()> {
        let running = &self.running[at];
        self.manager.accept(running.id, accepted)?;
        let running = &mut self.running[at];
        let rejected = running.drafts - accepted;
        running.tokens.truncate(running.tokens.len() - rejected);
        running.rejected += rejected;
        running.drafts = 0;
        Ok(())
    }

    fn snapshot(&mut self, at: usize) -> super::Result<()> {
        if let Some(snapshot) = self.manager.snapshot(self.running[at].id)? {
            let of = if self.fault == Fault::SavesAnother { 0 } else { at };
            self.snapshots.insert(snapshot, self.save(self.running[of].id.slot()));
        }
        Ok(())
    }

    fn release(&mut self, at: usize) -> super::Result<()> {
        self.manager.release(self.running[at].id)?;
        let released = self.running.remove(at);
        assert_eq!(
            self.manager.num_tokens(released.id),
            Err(CacheError::UnknownSequence(released.id))
        );
        Ok(())
    }

    /// Checks that each sequence reads only results of its own tokens; otherwise returns the
    /// difference.
    fn check(&self) -> Result<(), String> {
        let CacheManager { cached, free_snapshots, capacity, .. } = &self.manager;
        assert_eq!(
            cached.num_snapshots() + free_snapshots.len(),
            capacity.num_snapshots,
            "a snapshot is lost"
        );
        let mut owners: HashMap<i32, (usize, u64)> = HashMap::new();
        for running in &self.running {
            let Running { id, tokens, .. } = running;
            assert_eq!(self.manager.num_tokens(*id), Ok(tokens.len()));
            for (number, page) in
                self.manager.block_table(*id).expect("a sequence").into_iter().enumerate()
            {
                let shared = digest(&tokens[..((number + 1) * TOKENS_PER_PAGE).min(tokens.len())]);
                let owner = owners.entry(page).or_insert((number, shared));
                assert_eq!(*owner, (number, shared), "a page of sequences with other tokens");
            }
            self.reads(running)?;
        }
        Ok(())
    }

    fn reads(&self, Running { id, tokens, .. }: &Running) -> Result<(), String> {
        let Some(position) = tokens.len().checked_sub(1) else { return Ok(()) };
        let read = |row: Row, token: usize| match self.memory.get(&row) {
            Some(&content) if content == digest(&tokens[..=token]) => Ok(()),
            content => Err(format!("{row:?} of token {token} of {id:?} holds {content:?}")),
        };
        for kind in [LayerKind::Csa, LayerKind::Hca] {
            let ratio = kind.ratio().expect("entries");
            for (entry, slot) in self
                .manager
                .entry_slots(*id, kind, position)
                .expect("slots")
                .into_iter()
                .enumerate()
            {
                let slot = match self.fault {
                    Fault::EntriesAsTokens => {
                        slot / kind.entries_per_page() as i32 * 128 + entry as i32 % 128
                    }
                    _ => slot,
                };
                read(Row::Entry(kind, slot), (entry + 1) * ratio - 1)?;
            }
        }
        let window = self.manager.window_slots(*id, position).expect("slots");
        let first = tokens.len().saturating_sub(128);
        assert_eq!(window.iter().filter(|&&slot| slot >= 0).count(), tokens.len() - first);
        for (at, token) in (first..tokens.len()).enumerate() {
            read(Row::Window(window[at]), token)?;
        }
        let layout = self.manager.layout();
        for (kind, row) in
            [(LayerKind::Csa, Row::CsaState as fn(i32) -> Row), (LayerKind::Hca, Row::HcaState)]
        {
            let rows = layout.state_rows(kind);
            for token in tokens.len().saturating_sub(kind.state_tokens())..tokens.len() {
                read(row((id.slot() * rows + token % rows) as i32), token)?;
            }
        }
        Ok(())
    }

    fn run_all(&mut self, operations: &[Operation]) -> Result<(), String> {
        operations.iter().try_for_each(|operation| {
            self.run(operation);
            self.check().map_err(|difference| format!("after {operation:?}: {difference}"))
        })
    }
}

fn capacity() -> impl Strategy<Value = Capacity> {
    (3..14usize, 1..4usize, 0..3usize).prop_map(|(num_pages, num_sequences, num_snapshots)| {
        Capacity { num_pages, num_sequences, num_snapshots }
    })
}

/// The first objection of the model among this many random histories.
fn objection(fault: Fault, cases: u32) -> Option<String> {
    let config =
        Config { cases, max_shrink_iters: 0, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new(config);
    let ran = runner.run(&(capacity(), operations()), |(capacity, operations)| {
        Model::new(capacity, fault).run_all(&operations).map_err(TestCaseError::fail)
    });
    ran.err().map(|error| error.to_string())
}

proptest! {
    #![proptest_config(Config { cases: 300, failure_persistence: None, ..Config::default() })]

    #[test]
    fn whatever_happens_a_sequence_reads_what_a_cold_run_would_have_written((capacity, operations) in (capacity(), operations())) {
        let mut model = Model::new(capacity, Fault::None);
        model.run_all(&operations).map_err(TestCaseError::fail)?;
        for running in std::mem::take(&mut model.running) {
            model.manager.release(running.id).expect("a sequence");
        }
        // Nothing is lost: all pages can be allocated again, at once.
        prop_assert_eq!(model.manager.available_pages(), capacity.num_pages);
        let all = vec![0; capacity.num_pages * TOKENS_PER_PAGE];
        let last = model.manager.admit(&all).expect("a free state").sequence;
        let missing = all.len() - model.manager.num_tokens(last).expect("a sequence");
        prop_assert!(model.manager.step(last, &all[..missing], 0).is_ok());
    }
}

#[test]
fn what_an_engine_does_wrong_with_its_answers_is_seen() {
    let faults = [
        Fault::SkipsRestore,
        Fault::KeepsFourRows,
        Fault::StateByBatchRow,
        Fault::SavesAnother,
        Fault::EntriesAsTokens,
        Fault::KeepsRejected,
    ];
    for fault in faults {
        assert!(objection(fault, 2000).is_some(), "{fault:?} was not seen");
    }
}

#[test]
fn drawn_histories_reuse_prefixes() {
    let mut reused = 0;
    let mut runner = TestRunner::deterministic();
    for _ in 0..200 {
        use proptest::strategy::ValueTree;
        let (capacity, operations) =
            (capacity(), operations()).new_tree(&mut runner).expect("a history").current();
        let mut model = Model::new(capacity, Fault::None);
        model.run_all(&operations).expect("agreement");
        reused += model.reused;
    }
    assert!(reused > 60, "{reused} prefixes");
}

/// A sequence of pages of this text, saved at the end of each page.
fn saved(model: &mut Model, tokens: &[u32]) -> SequenceId {
    let id = model.manager.admit(tokens).expect("a sequence").sequence;
    for page in tokens.chunks(TOKENS_PER_PAGE) {
        model.manager.step(id, page, 0).expect("pages");
        model.manager.snapshot(id).expect("a snapshot");
    }
    id
}

#[test]
fn a_difference_at_any_position_of_a_prefix_is_another_prefix() {
    let mut model =
        Model::new(Capacity { num_pages: 12, num_sequences: 3, num_snapshots: 4 }, Fault::None);
    let tokens: Vec<u32> = (0..3 * 128).collect();
    saved(&mut model, &tokens);
    for differs in 0..tokens.len() {
        let mut other = tokens.clone();
        other[differs] += 1;
        other.push(7);
        let admitted = model.manager.admit(&other).expect("a sequence");
        assert_eq!(admitted.cached_tokens, differs / 128 * 128, "at {differs}");
        assert_eq!(admitted.restore.is_some(), differs >= 128);
        model.manager.release(admitted.sequence).expect("a sequence");
    }
    // A page after a different page is a different page, whatever its own tokens.
    let first: Vec<u32> = (1000..1128).collect();
    saved(&mut model, &first);
    let admitted = model.manager.admit(&[&first[..], &tokens[128..]].concat()).expect("a sequence");
    assert_eq!(admitted.cached_tokens, 128);
    model.manager.release(admitted.sequence).expect("a sequence");
    // The last token is computed again to get its logits: a prompt of exactly two pages reuses one.
    let admitted = model.manager.admit(&tokens[..256]).expect("a sequence");
    assert_eq!(admitted.cached_tokens, 128);
}

#[test]
fn a_cache_that_is_full_refuses_without_losing_anything_and_serves_again_after_a_release() {
    let mut model =
        Model::new(Capacity { num_pages: 3, num_sequences: 2, num_snapshots: 1 }, Fault::None);
    let first = saved(&mut model, &(0..256).collect::<Vec<u32>>());
    let admitted = model.manager.admit(&[9; 200]).expect("a sequence");
    let before = model.manager.clone();
    let refused = model.manager.step(admitted.sequence, &[9; 200], 0);
    assert_eq!(refused, Err(CacheError::OutOfPages { needed: 2, available: 1 }));
    assert_eq!(
        refused.expect_err("a refusal").to_string(),
        "2 more pages are needed, and 1 can be had"
    );
    assert_eq!(model.manager.admit(&[1]), Err(CacheError::OutOfSequences(2)));
    assert!(model.manager == before);
    model.manager.release(first).expect("a sequence");
    // The prefix is still cached; its last page is evicted first, and the snapshot with it.
    let mapping = model.manager.step(admitted.sequence, &[9; 200], 0).expect("pages");
    assert_eq!(mapping.csa.iter().filter(|&&slot| slot >= 0).count(), 50);
    assert_eq!(model.manager.available_pages(), 1);
}

#[test]
fn a_prefix_that_a_running_sequence_continues_is_not_given_up() {
    let mut model =
        Model::new(Capacity { num_pages: 4, num_sequences: 3, num_snapshots: 3 }, Fault::None);
    let tokens: Vec<u32> = (0..256).collect();
    // Both compute the first page. The first sequence's page is registered, and the second
    // sequence's second page continues it.
    let first = model.manager.admit(&tokens[..129]).expect("a sequence").sequence;
    let second = model.manager.admit(&tokens).expect("a sequence").sequence;
    for id in [first, second] {
        model.manager.step(id, &tokens[..128], 0).expect("a page");
        model.manager.snapshot(id).expect("a snapshot");
    }
    model.manager.step(second, &tokens[128..], 0).expect("a page");
    model.manager.snapshot(second).expect("a snapshot");
    model.manager.release(first).expect("a sequence");
    let third = model.manager.admit(&[1]).expect("a sequence").sequence;
    let refused = model.manager.step(third, &[1; 256], 0);
    assert_eq!(refused, Err(CacheError::OutOfPages { needed: 2, available: 1 }));
    model.manager.release(second).expect("a sequence");
    assert_eq!(model.manager.available_pages(), 4);
    model.manager.step(third, &[1; 512], 0).expect("all pages");
}

#[test]
fn slots_are_those_of_the_specification() {
    let mut model =
        Model::new(Capacity { num_pages: 5, num_sequences: 3, num_snapshots: 0 }, Fault::None);
    model.manager.admit(&[1]).expect("a sequence");
    let id = model.manager.admit(&[1]).expect("a sequence").sequence;
    model.manager.step(id, &[0; 126], 0).expect("a page");
    let mapping = model.manager.step(id, &[0; 6], 5).expect("a page");
    let pages = model.manager.block_table(id).expect("a table");
    assert_eq!((mapping.positions.clone(), pages.len()), (126..132, 2));
    // A window of 128 + 6 rows, of the second sequence: token 127 completes an entry of each kind,
    // token 131 one of four tokens.
    assert_eq!(mapping.window, [260, 261, 262, 263, 264, 265]);
    assert_eq!(mapping.csa, [-1, pages[0] * 32 + 31, -1, -1, -1, pages[1] * 32]);
    assert_eq!(mapping.hca, [-1, pages[0], -1, -1, -1, -1]);
    let rows = model.manager.layout().state_rows(LayerKind::Csa) as i32;
    assert_eq!((rows, mapping.csa_state[0]), (14, rows));
    assert_eq!(model.manager.window_slots(id, 1).expect("slots")[..3], [134, 135, -1]);
    assert_eq!(model.manager.window_slots(id, 131).expect("slots")[..2], [134 + 4, 134 + 5]);
    // All drafts are rejected, and with them the second page.
    model.manager.accept(id, 0).expect("drafts");
    assert_eq!(model.manager.block_table(id), Ok(pages[..1].to_vec()));
    // A step that is longer than the ring buffers writes their last rows.
    let long = model.manager.step(id, &[0; 300], 0).expect("pages");
    assert_eq!(long.window.iter().filter(|&&slot| slot >= 0).count(), 134);
    assert_eq!(long.hca_state.iter().position(|&slot| slot >= 0), Some(300 - 134));
}

#[test]
fn calls_that_make_no_sense_are_refused_by_name() {
    let mut model =
        Model::new(Capacity { num_pages: 4, num_sequences: 1, num_snapshots: 0 }, Fault::None);
    assert_eq!(model.manager.admit(&[]), Err(CacheError::NoTokens));
    let id = model.manager.admit(&[1]).expect("a sequence").sequence;
    assert_eq!(model.manager.step(id, &[], 0), Err(CacheError::NoTokens));
    let too_many = CacheError::TooManyDrafts { tokens: 2, drafts: 2, most: MAX_DRAFT_TOKENS };
    assert_eq!(model.manager.step(id, &[1, 2], 2), Err(too_many));
    model.manager.step(id, &[1, 2], 1).expect("a page");
    assert_eq!(model.manager.step(id, &[3], 0), Err(CacheError::OpenDrafts(1)));
    assert_eq!(model.manager.snapshot(id), Err(CacheError::OpenDrafts(1)));
    assert_eq!(
        model.manager.accept(id, 2),
        Err(CacheError::TooManyAccepted { accepted: 2, drafts: 1 })
    );
    model.manager.accept(id, 1).expect("a draft");
    assert_eq!(model.manager.snapshot(id), Err(CacheError::NotAtPageEnd(2)));
    model.manager.step(id, &[0; 126], 0).expect("a page");
    assert_eq!(model.manager.snapshot(id), Err(CacheError::NoSnapshots));
    model.manager.release(id).expect("a sequence");
    // The id of a released sequence stays invalid, also when its state is taken again.
    let next = model.manager.admit(&[1]).expect("a sequence").sequence;
    assert_eq!(next.slot(), id.slot());
    assert_eq!(model.manager.release(id), Err(CacheError::UnknownSequence(id)));
    let layout = model.manager.layout().clone();
    let huge = Capacity { num_pages: 1 << 26, num_sequences: 1, num_snapshots: 0 };
    let refused = CacheManager::new(layout, huge).expect_err("a refusal").to_string();
    assert!(refused.contains("`num_pages` is 67108864"), "{refused}");
    let none = CacheError::NoSuchPosition { position: usize::MAX, tokens: 0 };
    assert_eq!(model.manager.window_slots(next, usize::MAX), Err(none));
    assert_eq!(model.manager.entry_slots(next, LayerKind::Csa, usize::MAX), Err(none));
}

#[test]
fn the_largest_capacity_takes_memory_for_what_is_used_alone() {
    let small = Capacity { num_pages: 1, num_sequences: 1, num_snapshots: 0 };
    let layout = Model::new(small, Fault::None).manager.layout().clone();
    let most = i32::MAX as usize;
    let largest = Capacity {
        num_pages: most / LayerKind::Csa.entries_per_page(),
        num_sequences: most / layout.window_rows.max(layout.state_rows(LayerKind::Hca)),
        num_snapshots: most,
    };
    let mut manager = CacheManager::new(layout, largest).expect("a manager");
    let id = manager.admit(&[1]).expect("a sequence").sequence;
    manager.step(id, &[0; 128], 0).expect("a page");
    assert_eq!(manager.snapshot(id), Ok(Some(0)));
    assert_eq!((manager.pages.len(), manager.sequences.len()), (1, 1));
}

/// The prefixes that `needed` evictions take, by the definition: always the first of all that are
/// neither held nor continued.
fn evicted_by_definition(
    entries: &[(u64, usize, Option<usize>, bool)],
    needed: usize,
) -> Vec<usize> {
    let mut left: Vec<usize> = (0..entries.len()).collect();
    let mut evicted = Vec::new();
    while evicted.len() < needed {
        let free = |&&at: &&usize| {
            !entries[at].3 && !left.iter().any(|&other| entries[other].2 == Some(at))
        };
        let age = |&&at: &&usize| (entries[at].0, std::cmp::Reverse(entries[at].1), at);
        let Some(&next) = left.iter().filter(free).min_by_key(age) else { break };
        left.retain(|&at| at != next);
        evicted.push(next);
    }
    evicted
}

#[test]
fn prefixes_are_evicted_in_the_order_of_the_definition() {
    let name = |at: usize| -> Prefix {
        let mut prefix = [0; 32];
        prefix[..8].copy_from_slice(&(at as u64).to_be_bytes());
        prefix
    };
    let entry = (0..4u64, any::<prop::sample::Index>(), any::<bool>(), 0..3u8);
    let lists = proptest::collection::vec(entry, 1..40);
    let mut runner =
        TestRunner::new(Config { cases: 300, failure_persistence: None, ..Config::default() });
    let checked = runner.run(&(lists, 0..45usize), |(list, needed)| {
        let (mut prefixes, mut entries) = (Prefixes::default(), Vec::new());
        for (at, (clock, parent, has_parent, held)) in list.into_iter().enumerate() {
            let parent = (has_parent && at > 0).then(|| parent.index(at));
            let depth = parent.map_or(0, |parent: usize| {
                let of: &(u64, usize, Option<usize>, bool) = &entries[parent];
                of.1
            });
            let above = parent.map(|parent| (name(parent), depth));
            prefixes.remember(name(at), at, above, clock);
            prefixes.set_held(name(at), held == 0);
            entries.push((clock, depth + 1, parent, held == 0));
        }
        let expected = evicted_by_definition(&entries, needed);
        let found = prefixes.to_evict(needed, 0);
        if expected.len() < needed {
            let available = expected.len();
            prop_assert_eq!(found, Err(CacheError::OutOfPages { needed, available }));
        } else {
            prop_assert_eq!(found, Ok(expected.into_iter().map(name).collect()));
        }
        Ok(())
    });
    checked.expect("every order");
}

#[test]
fn a_step_beside_a_long_cached_chain_evicts_its_end_alone() {
    let pages = 2048;
    let capacity = Capacity { num_pages: pages + 1, num_sequences: 2, num_snapshots: 1 };
    let mut model = Model::new(capacity, Fault::None);
    let chain: Vec<u32> = (0..(pages * TOKENS_PER_PAGE) as u32).collect();
    let first = model.manager.admit(&chain).expect("a sequence").sequence;
    model.manager.step(first, &chain, 0).expect("pages");
    model.manager.snapshot(first).expect("a snapshot");
    model.manager.release(first).expect("a sequence");
    let second = model.manager.admit(&[7]).expect("a sequence").sequence;
    let last = *model.manager.cached.to_evict(2, 1).expect("pages").last().expect("one");
    model.manager.step(second, &[7; 129], 0).expect("two pages");
    assert!(!model.manager.cached.contains(&last));
    assert_eq!(model.manager.available_pages(), pages - 1);
    let tables = model.manager.block_table(second).expect("a table");
    assert_eq!(tables, [pages as i32 - 1, pages as i32]);
}
