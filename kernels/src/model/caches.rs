//! The caches of a model on a device: one pool of pages and one state for each sequence, packed as
//! [`crate::cache::cache_layout`] says (inference 13). After a state's regions follow the streams
//! of its last token, which the MTP module reads when the next token is known (inference 12.2).

use dsv4_runtime::{DType, Device, Result, TensorView};

use crate::cache::cache_layout::{CacheLayout, Contents, Region};
use crate::cache::cache_manager::Capacity;
use crate::model::memory::Memory;

/// Memory of the pool, of the states, and of saved states.
pub(super) struct Caches<'d> {
    memory: Memory<'d>,
    layout: CacheLayout,
    pool: TensorView,
    states: TensorView,
    snapshots: Option<TensorView>,
    tail_bytes: usize,
}

impl<'d> Caches<'d> {
    /// Zeroed caches. What they hold before it is written is never read. `tail_bytes` are those of
    /// a token's streams, 0 without a module that reads them.
    pub fn new(
        device: &'d Device,
        layout: &CacheLayout,
        capacity: Capacity,
        tail_bytes: usize,
    ) -> Result<Self> {
        let mut memory = Memory::new(device);
        let state_bytes = (layout.state_stride + tail_bytes).next_multiple_of(16);
        let mut zeros = |name, rows, bytes| memory.filled(name, DType::U8, &[rows, bytes], 0);
        let pool = zeros("pages of the cache", capacity.num_pages, layout.page_stride)?;
        let states = zeros("states of the cache", capacity.num_sequences, state_bytes)?;
        let snapshots = match capacity.num_snapshots {
            0 => None,
            count => Some(zeros("saved states of the cache", count, state_bytes)?),
        };
        Ok(Self { memory, layout: layout.clone(), pool, states, snapshots, tail_bytes })
    }

    /// The address of the streams of a sequence's last token.
    pub fn tail(&self, slot: usize) -> u64 {
        row_of(&self.states, slot) + self.layout.state_stride as u64
    }

    /// Bytes of such streams.
    pub fn tail_bytes(&self) -> usize {
        self.tail_bytes
    }

    /// Copies the state of a sequence to a snapshot.
    pub fn save(&self, slot: usize, snapshot: usize) -> Result<()> {
        let Some(snapshots) = &self.snapshots else { return Ok(()) };
        self.copy(row_of(snapshots, snapshot), row_of(&self.states, slot))
    }

    /// Copies a snapshot to the state of a sequence.
    pub fn restore(&self, snapshot: usize, slot: usize) -> Result<()> {
        let Some(snapshots) = &self.snapshots else { return Ok(()) };
        self.copy(row_of(&self.states, slot), row_of(snapshots, snapshot))
    }

    fn copy(&self, target: u64, source: u64) -> Result<()> {
        self.memory.device().backend().copy(target, source, self.states.shape[1])
    }

    /// The bytes of all pages, and of all states.
    pub fn contents(&self) -> Result<[Vec<u8>; 2]> {
        let backend = self.memory.device().backend();
        backend.synchronize()?;
        let mut contents = [&self.pool, &self.states].map(|view| vec![0; view.elements()]);
        for (view, bytes) in [&self.pool, &self.states].into_iter().zip(&mut contents) {
            backend.download(view.address, bytes)?;
        }
        Ok(contents)
    }

    fn region(&self, layer: usize, contents: Contents) -> Region {
        let region = self.layout.region(layer, contents).copied();
        region.unwrap_or_else(|| panic!("layer {layer} has no {contents:?}"))
    }

    /// A layer's part of each page, `[num_pages, bytes]`.
    pub fn pages(&self, layer: usize, contents: Contents) -> TensorView {
        part(&self.pool, self.region(layer, contents))
    }

    /// A layer's windows, `[num_sequences, window_rows * row_bytes]`: a page for each sequence.
    pub fn windows(&self, layer: usize) -> TensorView {
        part(&self.states, self.region(layer, Contents::Window))
    }

    /// Rows of a window.
    pub fn window_rows(&self) -> usize {
        self.layout.window_rows
    }

    /// A layer's rows of a compressor, `[num_sequences, rows, width]` f32.
    pub fn compressor(&self, layer: usize, contents: Contents) -> TensorView {
        let region = self.region(layer, contents);
        let bytes = part(&self.states, region);
        let words = size_of::<f32>();
        let width = region.bytes / region.rows / words;
        TensorView {
            dtype: DType::F32,
            shape: vec![bytes.shape[0], region.rows, width],
            strides: vec![bytes.strides[0] / words as i64, width as i64, 1],
            ..bytes
        }
    }
}

/// The address of a row of bytes.
fn row_of(rows: &TensorView, row: usize) -> u64 {
    rows.address + (row * rows.shape[1]) as u64
}

/// The bytes of a region in each entry of the first axis.
fn part(whole: &TensorView, region: Region) -> TensorView {
    TensorView {
        name: format!("{:?} of layer {}", region.contents, region.layer),
        address: whole.address + region.offset as u64,
        dtype: DType::U8,
        shape: vec![whole.shape[0], region.bytes],
        strides: whole.strides.clone(),
    }
}
