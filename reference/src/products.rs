//! Matrix products that several runs of one oracle share.
//!
//! A `Working` run needs of each product the sum and the sum of squares (and, for a narrow accumulator, that of signs).
//! Where the operands are inputs, which lie on their grid already, all runs have the same. [`Products`] remembers those
//! of the exact run. Every later run compares its own operands with them, by content, so that no answer depends on who
//! made a tensor; where they are equal, it takes what is there. Nothing of a later run is remembered: memory is that of
//! one run, and no run waits for another.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::Tensor;

use crate::error::Result;
use crate::precision::values;

/// The products of one oracle on one set of inputs; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Products(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    entries: Mutex<Vec<Entry>>,
    multiplied: AtomicUsize,
}

/// What a `Working` run needs of `a @ b`.
#[derive(Debug, Clone)]
pub(crate) struct Product {
    /// The product.
    pub sum: Tensor,
    /// Sums of the squares of its terms.
    pub squares: Tensor,
    /// Sums of the signs of its terms, where they were asked for.
    pub signs: Option<Tensor>,
}

#[derive(Debug, Clone)]
struct Entry {
    a: Tensor,
    b: Tensor,
    product: Product,
}

impl Products {
    /// What there is of `a @ b`, remembered or made.
    pub(crate) fn of(&self, a: &Tensor, b: &Tensor, with_signs: bool) -> Result<Product> {
        // A clone of handles: comparing takes long, and may not happen under the lock.
        let entries = self.0.entries.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for Entry { a: known_a, b: known_b, product } in entries {
            if (product.signs.is_some() || !with_signs) && same(&known_a, a)? && same(&known_b, b)? {
                return Ok(product);
            }
        }
        self.0.multiplied.fetch_add(2 + usize::from(with_signs), Ordering::Relaxed);
        let signs = if with_signs { Some(a.sign()?.matmul(&b.sign()?)?) } else { None };
        Ok(Product { sum: a.matmul(b)?, squares: a.sqr()?.matmul(&b.sqr()?)?, signs })
    }

    /// As [`Self::of`], and it is there from then on.
    pub(crate) fn remember(&self, a: &Tensor, b: &Tensor, with_signs: bool) -> Result<Product> {
        let product = self.of(a, b, with_signs)?;
        let entry = Entry { a: a.clone(), b: b.clone(), product: product.clone() };
        self.0.entries.lock().unwrap_or_else(PoisonError::into_inner).push(entry);
        Ok(product)
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
    let (x, y) = (values(x)?, values(y)?);
    Ok(x.iter().zip(&y).all(|(x, y)| x.to_bits() == y.to_bits()))
}
