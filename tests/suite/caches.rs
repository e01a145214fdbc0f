//! A cold run, chunks, a reused prefix, rejected drafts and reused slots leave the same bytes in
//! the caches (inference 13).
//!
//! Layers of all kinds, two of each that has entries, share one pool of pages and one state for
//! each sequence. The manager determines the layout, and the production kernels write the rows. As
//! in a model, the row of a token depends on all tokens up to it. So a row of another history
//! shows.

use std::hash::{DefaultHasher, Hash, Hasher};

use dsv4_kernels::cache::cache_layout::{CacheConfig, CacheLayout, Contents, LayerKind, Region};
use dsv4_kernels::cache::cache_manager::{
    CacheError, CacheManager, Capacity, SequenceId, SlotMapping,
};
use dsv4_kernels::cache::kv_cache::RowFormat;
use dsv4_kernels::formats::hadamard::{DIM, Stored};
use dsv4_kernels::{cache::indexer_cache_write, cache::kv_cache_write};
use dsv4_reference::cache::kv_cache::RowBytes;
use dsv4_runtime::arena::Layout;
use dsv4_runtime::{Contract, DType, DeviceArena, HostTensor, Role, TensorView, Views};

use crate::extent::left_out;
use crate::support;

/// Rooms whose changes run the long tests of this file.
const CACHES: [&str; 2] = ["kernels/src/cache/", "kernels/cuda/cache/"];

const ROW: RowFormat = RowFormat { nope_dim: 64, rope_dim: 64 };
const STORED: Stored = Stored::E2m1;
const MAX_DRAFT_TOKENS: usize = 4;
const CAPACITY: Capacity = Capacity { num_pages: 7, num_sequences: 3, num_snapshots: 2 };

fn config() -> CacheConfig {
    let layers =
        vec![LayerKind::Csa, LayerKind::Window, LayerKind::Hca, LayerKind::Csa, LayerKind::Hca];
    let indexer_row_bytes = indexer_cache_write::row_bytes(STORED);
    let (head_dim, indexer_dim) = (ROW.head_dim(), DIM);
    CacheConfig {
        layers,
        row: ROW,
        head_dim,
        indexer_dim,
        indexer_row_bytes,
        max_draft_tokens: MAX_DRAFT_TOKENS,
    }
}

/// A layout fault of an engine.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// Nothing.
    None,
    /// The writer of the indexer's keys adds a region's offset within its layer to the pool, and
    /// not to the layer's own offset (FM-141).
    DropsLayerOffset,
}

/// The caches of a model on the device, and their manager.
struct Engine {
    fault: Fault,
    manager: CacheManager,
    arena: DeviceArena<'static>,
    pool: TensorView,
    states: TensorView,
    snapshots: TensorView,
}

impl Engine {
    fn new() -> Self {
        let layout = CacheLayout::new(&config()).expect("a layout");
        let mut arena = DeviceArena::new(support::device(), Contract::NAN);
        let mut memory = |name: &str, rows: usize, stride: usize| {
            // These bytes belong to no row.
            let host = HostTensor {
                dtype: DType::U8,
                shape: vec![rows, stride],
                bytes: vec![0xa5; rows * stride],
            };
            arena
                .upload(name, &host, &Layout::dense(&[rows, stride]), Role::InPlace)
                .expect("memory")
        };
        let pool = memory("pool", CAPACITY.num_pages, layout.page_stride);
        let states = memory("states", CAPACITY.num_sequences, layout.state_stride);
        let snapshots = memory("snapshots", CAPACITY.num_snapshots, layout.state_stride);
        let manager = CacheManager::new(layout, CAPACITY).expect("a manager");
        Self { fault: Fault::None, manager, arena, pool, states, snapshots }
    }

    /// A region of all pages, or of all states.
    fn view(&self, region: &Region) -> TensorView {
        let of_pages = matches!(region.contents, Contents::Entries | Contents::IndexerKeys);
        let whole = if of_pages { &self.pool } else { &self.states };
        let address = whole.address + region.offset as u64;
        TensorView { address, shape: vec![whole.shape[0], region.bytes], ..whole.clone() }
    }

    /// The view through which a region is written.
    fn written_view(&self, region: &Region) -> TensorView {
        if self.fault == Fault::None || region.contents != Contents::IndexerKeys {
            return self.view(region);
        }
        let of_layer =
            self.manager.layout().page.iter().filter(|other| other.layer == region.layer);
        let layer_offset = of_layer.map(|other| other.offset).min().expect("its own");
        self.view(&Region { offset: region.offset - layer_offset, ..*region })
    }

    fn copy_state(&self, from: (&TensorView, usize), to: (&TensorView, usize)) {
        let stride = self.manager.layout().state_stride;
        let address = |(memory, at): (&TensorView, usize)| memory.address + (at * stride) as u64;
        support::device().backend().copy(address(to), address(from), stride).expect("a copy");
    }

    /// A new sequence, and how many tokens of it are cached.
    fn admit(&mut self, prompt: &[u32]) -> (SequenceId, usize) {
        let admitted = self.manager.admit(prompt).expect("a state");
        if let Some(snapshot) = admitted.restore {
            self.copy_state((&self.snapshots, snapshot), (&self.states, admitted.sequence.slot()));
        }
        (admitted.sequence, admitted.cached_tokens)
    }

    fn snapshot(&mut self, id: SequenceId) {
        if let Some(snapshot) = self.manager.snapshot(id).expect("the end of a page") {
            self.copy_state((&self.states, id.slot()), (&self.snapshots, snapshot));
        }
    }

    /// Runs `tokens` from token `from` on; the last `drafts` of them may be rejected.
    fn step(&mut self, id: SequenceId, tokens: &[u32], from: usize, drafts: usize) {
        let mapping = self.manager.step(id, &tokens[from..], drafts).expect("pages");
        assert_eq!(mapping.positions, from..tokens.len());
        for region in
            self.manager.layout().page.clone().iter().chain(&self.manager.layout().state.clone())
        {
            self.write(region, tokens, &mapping);
        }
    }

    fn write(&mut self, region: &Region, tokens: &[u32], mapping: &SlotMapping) {
        let of_four = region.rows == LayerKind::Csa.entries_per_page();
        let slots = match region.contents {
            Contents::Window => &mapping.window,
            Contents::Entries if of_four => &mapping.csa,
            Contents::Entries => &mapping.hca,
            Contents::IndexerKeys => &mapping.csa,
            // The compressor writes its own rows.
            Contents::Compressor | Contents::IndexerCompressor => return,
        };
        let width = if region.contents == Contents::IndexerKeys { DIM } else { ROW.head_dim() };
        let rows = mapping
            .positions
            .clone()
            .flat_map(|position| row_of(region, &tokens[..=position], width));
        let rows =
            HostTensor::from_f64(DType::Bf16, &[slots.len(), width], &rows.collect::<Vec<_>>());
        let pages = self.written_view(region);
        let rows = self.arena.input("rows", &rows).expect("rows");
        let slots =
            self.arena.input("slots", &HostTensor::from_i32(&[slots.len()], slots)).expect("slots");
        let views = Views::new().with("slots", &slots);
        let device = support::device();
        let written = if region.contents == Contents::IndexerKeys {
            let views = views.with("k", &rows).with("pages", &pages);
            indexer_cache_write::forward(device, &views, STORED, region.rows)
        } else {
            let views = views.with("kv", &rows).with("cache", &pages);
            kv_cache_write::forward(device, &views, ROW, region.rows)
        };
        written.expect("a launch");
    }

    /// What a query after the last token reads, region by region: data and scales of each row, in
    /// the order of the tokens.
    fn reads(&self, id: SequenceId) -> Vec<(Region, Vec<u8>)> {
        let position = self.manager.num_tokens(id).expect("a sequence") - 1;
        let layout = self.manager.layout();
        let mut reads = Vec::new();
        for region in layout.page.iter().chain(&layout.state) {
            let kind = config().layers[region.layer];
            let slots = match region.contents {
                Contents::Window => self.manager.window_slots(id, position),
                Contents::Entries | Contents::IndexerKeys => {
                    self.manager.entry_slots(id, kind, position)
                }
                Contents::Compressor | Contents::IndexerCompressor => continue,
            };
            reads.push((*region, self.rows_at(region, &slots.expect("slots"))));
        }
        reads
    }

    fn rows_at(&self, region: &Region, slots: &[i32]) -> Vec<u8> {
        let bytes = match region.contents {
            Contents::IndexerKeys => {
                RowBytes { data: STORED.code_bytes(), scales: indexer_cache_write::SCALE_BYTES }
            }
            _ => RowBytes { data: ROW.data_bytes(), scales: ROW.scale_bytes() },
        };
        let view = self.view(region);
        let memory = self.arena.download(&view).expect("memory").bytes;
        let pages: Vec<&[u8]> = memory.chunks(region.bytes).collect();
        let mut rows = Vec::new();
        for slot in slots.iter().filter_map(|&slot| usize::try_from(slot).ok()) {
            let (data_at, scales_at) = bytes.place(slot % region.rows, region.rows);
            let page = pages[slot / region.rows];
            rows.extend_from_slice(&page[data_at..][..bytes.data]);
            rows.extend_from_slice(&page[scales_at..][..bytes.scales]);
        }
        rows
    }
}

/// A layer's values for the last of these tokens: they depend on all of them.
fn row_of(region: &Region, tokens: &[u32], width: usize) -> Vec<f64> {
    let mut hasher = DefaultHasher::new();
    (region.layer, region.contents, tokens).hash(&mut hasher);
    let seed = hasher.finish();
    let number = |channel: usize| seed.wrapping_mul(channel as u64 * 2 + 1) >> 56;
    (0..width).map(|channel| number(channel) as f64 / 16.0 - 8.0).collect()
}

/// A text of that many tokens; texts of other numbers differ from token `own_from` on.
fn text(length: usize, own_from: usize, number: u32) -> Vec<u32> {
    (0..length as u32)
        .map(
            |position| {
                if position as usize >= own_from { position + 1000 * number } else { position }
            },
        )
        .collect()
}

/// What a sequence reads after one cold run in empty caches.
fn cold(tokens: &[u32]) -> Vec<(Region, Vec<u8>)> {
    let mut engine = Engine::new();
    let (id, cached) = engine.admit(tokens);
    assert_eq!(cached, 0);
    engine.step(id, tokens, 0, 0);
    engine.reads(id)
}

fn assert_cold(engine: &Engine, id: SequenceId, tokens: &[u32], what: &str) {
    let (reads, expected) = (engine.reads(id), cold(tokens));
    assert_eq!(reads.len(), expected.len());
    for ((region, found), (_, cold)) in reads.iter().zip(&expected) {
        assert!(!cold.is_empty() || tokens.len() < 128, "{what}: nothing is read of {region:?}");
        assert!(found == cold, "{what}: {region:?}");
    }
}

#[test]
fn chunks_leave_the_bytes_of_a_cold_run() {
    let mut engine = Engine::new();
    let tokens = text(261, 0, 1);
    let (id, _) = engine.admit(&tokens);
    let mut from = 0;
    for chunk in [1, 2, 3, 121, 1, 130, 3] {
        engine.step(id, &tokens[..from + chunk], from, 0);
        from += chunk;
    }
    assert_cold(&engine, id, &tokens, "chunks");
}

#[test]
fn a_reused_prefix_leaves_the_bytes_of_a_cold_run_wherever_texts_part() {
    for own_from in [128, 130, 255, 256, 257] {
        let mut engine = Engine::new();
        let first = text(256, own_from, 1);
        let (id, _) = engine.admit(&first);
        for end in [128, 256] {
            engine.step(id, &first[..end], end - 128, 0);
            engine.snapshot(id);
        }
        // Another sequence takes the state of the first one, whose pages stay.
        engine.manager.release(id).expect("a sequence");
        let second = text(300, own_from, 2);
        let (id, cached) = engine.admit(&second);
        assert_eq!(cached, own_from / 128 * 128);
        engine.step(id, &second, cached, 0);
        assert_cold(&engine, id, &second, "a reused prefix");
    }
}

#[test]
fn rejected_drafts_leave_the_bytes_of_a_cold_run_at_every_residue() {
    if left_out(&CACHES) {
        return;
    }
    for start in 124..132 {
        for accepted in 0..=MAX_DRAFT_TOKENS {
            let mut engine = Engine::new();
            let tokens = text(start + 12, start + 1 + accepted, 3);
            let drafted = text(start + 1 + MAX_DRAFT_TOKENS, start + 1 + accepted, 4);
            let (id, _) = engine.admit(&tokens);
            engine.step(id, &tokens[..start], 0, 0);
            engine.step(id, &drafted, start, MAX_DRAFT_TOKENS);
            engine.manager.accept(id, accepted).expect("drafts");
            let kept = start + 1 + accepted;
            assert_cold(&engine, id, &tokens[..kept], "rejected drafts");
            engine.step(id, &tokens, kept, 0);
            assert_cold(&engine, id, &tokens, "what follows rejected drafts");
        }
    }
}

#[test]
fn sequences_that_run_by_turns_and_slots_that_are_used_again_leave_the_bytes_of_cold_runs() {
    let mut engine = Engine::new();
    let texts: Vec<Vec<u32>> = (1..4).map(|number| text(150, 0, number)).collect();
    let ids: Vec<SequenceId> = texts.iter().map(|tokens| engine.admit(tokens).0).collect();
    for (from, end) in [(0, 70), (70, 129), (129, 150)] {
        // In another order each time, so that tables are not monotone.
        for at in [[0, 1, 2], [2, 0, 1], [1, 2, 0]][from % 3] {
            engine.step(ids[at], &texts[at][..end], from, 0);
        }
    }
    engine.manager.release(ids[1]).expect("a sequence");
    // The others have four of seven pages. A text too long for three pages is rejected, and nothing
    // is lost.
    let (long, _) = engine.admit(&text(500, 0, 8));
    let refused = engine.manager.step(long, &text(500, 0, 8), 0).map(|_| ());
    assert_eq!(refused, Err(CacheError::OutOfPages { needed: 4, available: 3 }));
    engine.manager.release(long).expect("a sequence");
    let fourth = text(260, 0, 7);
    let (id, _) = engine.admit(&fourth);
    engine.step(id, &fourth, 0, 0);
    assert_eq!(engine.manager.admit(&fourth).map(|_| ()), Err(CacheError::OutOfSequences(3)));
    assert_cold(&engine, id, &fourth, "a slot that is used again");
    for at in [0, 2] {
        assert_cold(&engine, ids[at], &texts[at], "a neighbour of it");
    }
}

#[test]
fn layers_of_one_pool_hold_unlike_rows_and_touch_no_byte_between_their_regions() {
    let mut engine = Engine::new();
    let tokens = text(256, 0, 1);
    let (id, _) = engine.admit(&tokens);
    engine.step(id, &tokens, 0, 0);
    let reads = engine.reads(id);
    for (at, (region, rows)) in reads.iter().enumerate() {
        assert!(!rows.is_empty());
        let same = reads[..at].iter().find(|(_, other)| other == rows);
        assert!(same.is_none(), "{region:?} holds what {same:?} does");
    }
    let layout = engine.manager.layout();
    let pool = engine.arena.download(&engine.pool).expect("memory").bytes;
    let owned = |at: usize| {
        layout
            .page
            .iter()
            .any(|r| (r.offset..r.offset + r.bytes).contains(&(at % layout.page_stride)))
    };
    let between: Vec<u8> = (0..pool.len()).filter(|&at| !owned(at)).map(|at| pool[at]).collect();
    assert!(!between.is_empty() && between.iter().all(|&byte| byte == 0xa5));
    // The compressors' rows belong to no sequence here.
    for region in layout.state.iter().filter(|region| region.contents != Contents::Window) {
        let rows = engine.arena.download(&engine.view(region)).expect("memory").bytes;
        assert!(rows.iter().all(|&byte| byte == 0xa5), "{region:?}");
    }
}

/// Every kernel is right and every layer by itself is too, but one layer reads what another one
/// wrote (FM-141).
#[test]
fn an_engine_that_drops_the_offset_of_a_layer_is_seen_in_the_layers_that_share_a_pool() {
    let tokens = text(256, 0, 1);
    let mut engine = Engine { fault: Fault::DropsLayerOffset, ..Engine::new() };
    let (id, _) = engine.admit(&tokens);
    engine.step(id, &tokens, 0, 0);
    let (reads, expected) = (engine.reads(id), cold(&tokens));
    let pairs = reads.iter().zip(&expected).filter(|(found, cold)| found != cold);
    let wrong: Vec<_> = pairs.map(|((region, _), _)| (region.layer, region.contents)).collect();
    assert_eq!(wrong, [(0, Contents::IndexerKeys), (3, Contents::IndexerKeys)]);
    // The first layer has the keys of the other, which has the old contents of its memory.
    let keys = |all: &[(Region, Vec<u8>)], layer: usize| {
        let of =
            |region: &Region| region.layer == layer && region.contents == Contents::IndexerKeys;
        all.iter().find(|(region, _)| of(region)).expect("a region").1.clone()
    };
    assert!(
        keys(&reads, 0) == keys(&expected, 3) && keys(&reads, 3).iter().all(|&byte| byte == 0xa5)
    );
}
