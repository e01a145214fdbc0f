//! Matrix products that several runs of one oracle share, with everything that only scales their
//! noise.
//!
//! Where the operands of a product are inputs, which are already on their grid, all runs have the
//! same product. [`Products`] saves those of the exact run. Every later run compares its own
//! operands with the saved ones by content, so no result depends on which code made a tensor. Where
//! they are equal, the run takes the saved product. An oracle may have thousands of products, such
//! as one for each expert. Some values of both operands therefore select the candidates.
//!
//! The size of the noise of a sum (such as the sum of the squares of its terms) is always that of
//! the exact run. Rounding changes it by a few percent at most, and computing it costs as much as
//! the product. Nothing of a later run is saved. Memory is that of one run, and no run waits for
//! another.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{CpuStorage, Layout, Storage, Tensor};

use crate::conventions::Conventions;
use crate::error::Result;
use crate::precision::values;

/// The products of one oracle on one set of inputs; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Products(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// By [`mark`].
    entries: Mutex<HashMap<u64, Vec<Entry>>>,
    noise_scales: Mutex<Vec<Tensor>>,
    multiplied: AtomicUsize,
    lanes: usize,
    unknown_scales: bool,
    conventions: Conventions,
}

#[derive(Debug, Clone)]
struct Entry {
    a: Tensor,
    b: Tensor,
    product: Tensor,
}

impl Products {
    /// An empty set, for the runs of a kernel that adds in this many lanes
    /// ([`Rounding::with_lanes`](crate::precision::Rounding::with_lanes)), and whose scales may be
    /// unknown
    /// ([`Rounding::with_unknown_scales`](crate::precision::Rounding::with_unknown_scales)), with
    /// these conventions.
    pub fn of_kernel(lanes: usize, unknown_scales: bool, conventions: Conventions) -> Self {
        Self(Arc::new(Shared { lanes, unknown_scales, conventions, ..Shared::default() }))
    }

    /// The conventions of the kernel.
    pub fn conventions(&self) -> Conventions {
        self.0.conventions
    }

    /// Whether the rounding scales of the kernel are unknown.
    pub fn has_unknown_scales(&self) -> bool {
        self.0.unknown_scales
    }

    /// The lanes of the kernel.
    pub fn lanes(&self) -> usize {
        self.0.lanes.max(1)
    }

    /// `a @ b`, saved or newly computed.
    pub(crate) fn of(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        self.marked(mark(a, b), a, b)
    }

    fn marked(&self, mark: u64, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        // A clone of handles: comparing takes long, and must not happen under the lock.
        let entries =
            self.0.entries.lock().unwrap_or_else(PoisonError::into_inner).get(&mark).cloned();
        for Entry { a: known_a, b: known_b, product } in entries.into_iter().flatten() {
            if same(&known_a, a)? && same(&known_b, b)? {
                return Ok(product);
            }
        }
        self.0.multiplied.fetch_add(1, Ordering::Relaxed);
        Ok(a.matmul(b)?)
    }

    /// As [`Self::of`], and saves the product.
    pub(crate) fn remember(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let mark = mark(a, b);
        let product = self.marked(mark, a, b)?;
        let entry = Entry { a: a.clone(), b: b.clone(), product: product.clone() };
        let mut entries = self.0.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.entry(mark).or_default().push(entry);
        Ok(product)
    }

    /// Saves a quantity that scales noise under the next number; a second exact run finds its own
    /// ones there.
    pub(crate) fn keep_noise_scale(&self, number: usize, scale: Tensor) {
        let mut kept = self.0.noise_scales.lock().unwrap_or_else(PoisonError::into_inner);
        if number == kept.len() {
            kept.push(scale);
        }
    }

    /// The quantity that was saved with this number.
    pub(crate) fn noise_scale(&self, number: usize) -> Option<Tensor> {
        self.0.noise_scales.lock().unwrap_or_else(PoisonError::into_inner).get(number).cloned()
    }

    /// Number of products that were computed so far.
    pub fn multiplied(&self) -> usize {
        self.0.multiplied.load(Ordering::Relaxed)
    }
}

/// The same for equal operands, in any memory layout, and for few others.
fn mark(a: &Tensor, b: &Tensor) -> u64 {
    let mut hasher = DefaultHasher::new();
    for x in [a, b] {
        x.dims().iter().for_each(|&extent| hasher.write_usize(extent));
        some_numbers(x, |number| hasher.write_u64(number.to_bits()));
    }
    hasher.finish()
}

/// Calls `see` with values of a tensor in f64, evenly spaced in the order of its elements; with all
/// of a small one.
fn some_numbers(x: &Tensor, mut see: impl FnMut(f64)) {
    const MOST: usize = 32;
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cpu(CpuStorage::F64(numbers)) = &*storage else { return };
    let count = x.elem_count();
    let step = count.div_ceil(MOST).max(1);
    for element in (0..count).step_by(step) {
        let (mut rest, mut at) = (element, layout.start_offset());
        for (extent, stride) in layout.dims().iter().zip(layout.stride()).rev() {
            at += rest % extent * stride;
            rest /= extent;
        }
        see(numbers[at]);
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

/// Whether two tensors of one layout have equal storage from their first to their last element. The
/// storage is compared in place: copying a transposed operand into the order of its elements takes
/// as long as multiplying it.
fn same_span(x: &Tensor, y: &Tensor) -> bool {
    let ((x_storage, x_layout), (y_storage, y_layout)) =
        (x.storage_and_layout(), y.storage_and_layout());
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
    /// Values that are compared without a branch between them.
    const AT_ONCE: usize = 64;
    let differs = |bits: u64, (x, y): (&f64, &f64)| bits | (x.to_bits() ^ y.to_bits());
    x.chunks(AT_ONCE).zip(y.chunks(AT_ONCE)).all(|(x, y)| x.iter().zip(y).fold(0, differs) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::f64_tensor;

    #[test]
    fn one_of_thousands_of_products_is_found_among_few_however_its_operands_lie() {
        let products = Products::default();
        let numbers: Vec<f64> = (0..6000).map(f64::from).collect();
        let operands = |group: usize| {
            let a = f64_tensor(&numbers[group..group + 6], &[2, 3]);
            // The same values, in row order and transposed.
            let rows = f64_tensor(&numbers[group..group + 6], &[3, 2]);
            let turned =
                rows.t().expect("a matrix").contiguous().expect("a copy").t().expect("a matrix");
            (a, rows, turned)
        };
        for group in 0..3000 {
            let (a, rows, _) = operands(group);
            products.remember(&a, &rows).expect("a product");
        }
        assert_eq!(products.multiplied(), 3000);
        for group in 0..3000 {
            let (a, rows, turned) = operands(group);
            let expected = values(&a.matmul(&rows).expect("a product")).expect("numbers");
            assert_eq!(
                values(&products.of(&a, &turned).expect("a product")).expect("numbers"),
                expected
            );
        }
        assert_eq!(products.multiplied(), 3000, "each is there already");
        let most = products.0.entries.lock().expect("nobody panicked").values().map(Vec::len).max();
        assert_eq!(most, Some(1), "none is looked for among others");
    }

    #[test]
    fn operands_that_differ_where_nobody_looks_first_are_told_apart() {
        let products = Products::default();
        let mut numbers = vec![1.0; 4096];
        let tensor = |numbers: &[f64]| f64_tensor(numbers, &[64, 64]);
        products.remember(&tensor(&numbers), &tensor(&numbers)).expect("a product");
        let unlike = (0..4096).filter(|&at| {
            numbers[at] = 2.0;
            let before = products.multiplied();
            products.of(&tensor(&numbers), &tensor(&[1.0; 4096])).expect("a product");
            numbers[at] = 1.0;
            products.multiplied() > before
        });
        assert_eq!(unlike.count(), 4096);
    }
}
