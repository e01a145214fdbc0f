//! Matrix products that several runs of one oracle share, and everything that only scales their noise.
//!
//! Where the operands of a product are inputs, which lie on their grid already, all runs have the same. [`Products`] remembers
//! those of the exact run. Every later run compares its own operands with them, by content, so that no answer depends on who
//! made a tensor; where they are equal, it takes what is there. The size of the noise of a sum (the sum of its terms' squares,
//! say) is that of the exact run wherever it is asked for: rounding moves it by a few parts in a hundred at most, and
//! it costs as much as the product. Nothing of a later run is remembered: memory is that of one run, and no run waits for
//! another.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{CpuStorage, Layout, Storage, Tensor};

use crate::error::Result;
use crate::precision::values;

/// The products of one oracle on one set of inputs; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Products(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    entries: Mutex<Vec<Entry>>,
    noise_scales: Mutex<Vec<Tensor>>,
    multiplied: AtomicUsize,
    lanes: usize,
    unknown_scales: bool,
}

#[derive(Debug, Clone)]
struct Entry {
    a: Tensor,
    b: Tensor,
    product: Tensor,
}

impl Products {
    /// Nothing so far, for the runs of a kernel that adds in so many lanes
    /// ([`Rounding::with_lanes`](crate::precision::Rounding::with_lanes)), and of whose scales nothing may be known
    /// ([`Rounding::with_unknown_scales`](crate::precision::Rounding::with_unknown_scales)).
    pub fn of_kernel(lanes: usize, unknown_scales: bool) -> Self {
        Self(Arc::new(Shared { lanes, unknown_scales, ..Shared::default() }))
    }

    /// Whether nothing is known of the scales at which the kernel that the runs are of rounds.
    pub fn has_unknown_scales(&self) -> bool {
        self.0.unknown_scales
    }

    /// The lanes of the kernel that the runs are of.
    pub fn lanes(&self) -> usize {
        self.0.lanes.max(1)
    }

    /// `a @ b`, remembered or made.
    pub(crate) fn of(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        // A clone of handles: comparing takes long, and may not happen under the lock.
        let entries = self.0.entries.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for Entry { a: known_a, b: known_b, product } in entries {
            if same(&known_a, a)? && same(&known_b, b)? {
                return Ok(product);
            }
        }
        self.0.multiplied.fetch_add(1, Ordering::Relaxed);
        Ok(a.matmul(b)?)
    }

    /// As [`Self::of`], and it is there from then on.
    pub(crate) fn remember(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let product = self.of(a, b)?;
        let entry = Entry { a: a.clone(), b: b.clone(), product: product.clone() };
        self.0.entries.lock().unwrap_or_else(PoisonError::into_inner).push(entry);
        Ok(product)
    }

    /// Keeps a quantity that scales noise under the next number; a second exact run finds its own there already.
    pub(crate) fn keep_noise_scale(&self, number: usize, scale: Tensor) {
        let mut kept = self.0.noise_scales.lock().unwrap_or_else(PoisonError::into_inner);
        if number == kept.len() {
            kept.push(scale);
        }
    }

    /// The one that was kept with this number.
    pub(crate) fn noise_scale(&self, number: usize) -> Option<Tensor> {
        self.0.noise_scales.lock().unwrap_or_else(PoisonError::into_inner).get(number).cloned()
    }

    /// How many products were multiplied out so far.
    pub fn multiplied(&self) -> usize {
        self.0.multiplied.load(Ordering::Relaxed)
    }
}

/// Whether two tensors are equal bit for bit.
fn same(x: &Tensor, y: &Tensor) -> Result<bool> {
    if x.id() == y.id() {
        return Ok(true);
    }
    if x.dims() != y.dims() {
        return Ok(false);
    }
    if x.stride() == y.stride() && same_span(x, y) {
        return Ok(true);
    }
    let (x, y) = (values(x)?, values(y)?);
    Ok(equal_bits(&x, &y))
}

/// Whether two tensors of one layout have equal storage from their first to their last element. It is compared where it
/// lies: copying a transposed operand into the order of its elements takes as long as multiplying it.
fn same_span(x: &Tensor, y: &Tensor) -> bool {
    let ((x_storage, x_layout), (y_storage, y_layout)) = (x.storage_and_layout(), y.storage_and_layout());
    match (span(&x_storage, x_layout), span(&y_storage, y_layout)) {
        (Some(x), Some(y)) => equal_bits(x, y),
        _ => false,
    }
}

fn span<'a>(storage: &'a Storage, layout: &Layout) -> Option<&'a [f64]> {
    let Storage::Cpu(CpuStorage::F64(numbers)) = storage else { return None };
    let extents = layout.dims().iter().zip(layout.stride());
    let last: usize = extents.map(|(extent, stride)| extent.saturating_sub(1) * stride).sum();
    let start = layout.start_offset();
    numbers.get(start..=start + last)
}

fn equal_bits(x: &[f64], y: &[f64]) -> bool {
    /// Numbers that are compared without a branch between them.
    const AT_ONCE: usize = 64;
    let differs = |bits: u64, (x, y): (&f64, &f64)| bits | (x.to_bits() ^ y.to_bits());
    x.chunks(AT_ONCE).zip(y.chunks(AT_ONCE)).all(|(x, y)| x.iter().zip(y).fold(0, differs) == 0)
}
