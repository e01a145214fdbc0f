//! The caches of a model on a device: one pool of pages and one state for each sequence, packed as
//! [`crate::cache::cache_layout`] says (inference 13).

use dsv4_runtime::{DType, Device, Result, TensorView};

use crate::cache::cache_layout::{CacheLayout, Contents, Region};
use crate::cache::cache_manager::Capacity;
use crate::model::memory::Memory;

/// Memory of the pool and of the states.
pub(super) struct Caches<'d> {
    _memory: Memory<'d>,
    layout: CacheLayout,
    pool: TensorView,
    states: TensorView,
}

impl<'d> Caches<'d> {
    /// Zeroed caches. What they hold before it is written is never read.
    pub fn new(device: &'d Device, layout: &CacheLayout, capacity: Capacity) -> Result<Self> {
        let mut memory = Memory::new(device);
        let pages = [capacity.num_pages, layout.page_stride];
        let states = [capacity.num_sequences, layout.state_stride];
        let pool = memory.filled("pages of the cache", DType::U8, &pages, 0)?;
        let states = memory.filled("states of the cache", DType::U8, &states, 0)?;
        Ok(Self { _memory: memory, layout: layout.clone(), pool, states })
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
