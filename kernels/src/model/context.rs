//! Contexts that no layer has read: what the measurement of a long context starts from.

use dsv4_runtime::{DType, RuntimeError, TensorView, Views};

use crate::cache::cache_layout::{Contents, LayerKind};
use crate::cache::cache_manager::SequenceId;
use crate::cache::{indexer_cache_write, kv_cache_write};
use crate::formats::hadamard::Stored;
use crate::model::buffers::bytes_of;
use crate::model::engine::{Model, ModelError, Result};
use crate::model::memory::Memory;

/// Rows that are written at a time, to other slots each time.
const ROWS: usize = 1 << 14;

impl Model<'_> {
    /// A sequence that counts as having that many tokens, of which no layer has read any. What
    /// follows in it is computed from whatever its part of the caches holds: for measurements.
    ///
    /// # Errors
    /// No state or too few pages for it, more tokens than the model has positions.
    pub fn pretend(&mut self, num_tokens: usize) -> Result<SequenceId> {
        self.check_length(num_tokens)?;
        let sequence = self.manager.admit(&[0])?.sequence;
        if num_tokens == 0 {
            return Ok(sequence);
        }
        let stepped = self.manager.step(sequence, &vec![0; num_tokens], 0);
        if stepped.is_err() {
            self.manager.release(sequence)?;
        }
        stepped.map(|_| sequence).map_err(ModelError::from)
    }

    /// Writes rows to every slot of all pages and windows, by the operators that write new ones.
    /// `values` makes as many bf16 numbers as it is asked for.
    ///
    /// # Errors
    /// The device's.
    pub fn fill_caches(&mut self, values: &mut dyn FnMut(usize) -> Vec<u8>) -> Result<()> {
        let (device, config, caches) = (self.parts.device, self.config(), &self.parts.caches);
        let mut memory = Memory::new(device);
        let mut random = |name: &'static str, width: usize| {
            memory.upload(name, DType::Bf16, &[ROWS, width], &values(ROWS * width))
        };
        let (rows, keys) = (random("kv", config.head_dim)?, random("k", config.index_head_dim)?);
        let slots = memory.tensor("slots", DType::I32, &[ROWS])?;
        let every_slot =
            |given: &TensorView, target: &TensorView, size: usize, write: Write<'_>| {
                let total = target.shape[0] * size;
                for first in (0..total).step_by(ROWS) {
                    let count = ROWS.min(total - first);
                    let numbers: Vec<i32> =
                        (first..first + count).map(|slot| slot as i32).collect();
                    device.backend().upload(slots.address, &bytes_of(&numbers))?;
                    let views = Views::from([("slots", &slots.narrow(0, 0, count)?)]);
                    write(&views, &given.narrow(0, 0, count)?, target)?;
                }
                Ok::<_, RuntimeError>(())
            };
        let row = config.row();
        for (layer, &kind) in config.layers.iter().enumerate() {
            let size = kind.entries_per_page();
            let of_rows = |size: usize| {
                move |views: &Views, kv: &TensorView, cache: &TensorView| {
                    let views = views.clone().with("kv", kv).with("cache", cache);
                    kv_cache_write::forward(device, &views, row, size).map(drop)
                }
            };
            let window_rows = caches.window_rows();
            every_slot(&rows, &caches.windows(layer), window_rows, &of_rows(window_rows))?;
            if kind != LayerKind::Window {
                every_slot(&rows, &caches.pages(layer, Contents::Entries), size, &of_rows(size))?;
            }
            if kind == LayerKind::Csa {
                let pages = caches.pages(layer, Contents::IndexerKeys);
                every_slot(&keys, &pages, size, &|views, k, pages| {
                    let views = views.clone().with("k", k).with("pages", pages);
                    indexer_cache_write::forward(device, &views, Stored::E2m1, size).map(drop)
                })?;
            }
        }
        Ok(device.backend().synchronize()?)
    }
}

/// Writes rows to the slots of the views.
type Write<'w> =
    &'w dyn Fn(&Views, &TensorView, &TensorView) -> std::result::Result<(), RuntimeError>;
