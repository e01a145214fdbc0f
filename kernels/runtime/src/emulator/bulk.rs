//! Bulk copies into shared memory, stores to that of other blocks, and bulk additions from it.

use super::race::clock::Clock;
use crate::tensor_map::TensorMap;

/// The fault of a thread whose copy has not completed when its block ends.
pub(super) const FORGOTTEN: &str = "issued a bulk copy that the block did not wait for";

/// The source of a copy.
pub(super) enum BulkSource {
    /// Contiguous bytes.
    Bytes(*const u8),
    /// A TMA box of a tensor, from these coordinates on.
    Box { map: TensorMap, column: i32, row: i32, matrix: i32 },
    /// A word that a thread stores.
    Word(u32),
}

/// A copy or a store to shared memory that has not completed.
pub(super) struct BulkCopy {
    pub(super) source: BulkSource,
    /// Block of the cluster whose shared memory it goes to.
    pub(super) rank: u32,
    pub(super) target: u32,
    pub(super) bytes: u32,
    pub(super) barrier: u32,
    pub(super) thread: u32,
}

/// An addition that has not read shared memory yet.
pub(super) struct BulkAdd {
    pub(super) target: *mut f32,
    pub(super) source: u32,
    pub(super) bytes: u32,
    pub(super) thread: u32,
    /// Groups that the thread had committed before this addition was issued.
    pub(super) group: u32,
    pub(super) issuer_fence: u64,
    /// What the thread knew at the issue, if races are looked for.
    pub(super) clock: Option<Clock>,
}

/// The unfinished bulk copies of one block.
#[derive(Default)]
pub struct BulkWork {
    pub(super) copies: Vec<BulkCopy>,
    pub(super) adds: Vec<BulkAdd>,
    /// By thread; empty before the first commit.
    pub(super) committed_groups: Vec<u32>,
}

impl BulkWork {
    /// Copies into shared memory in flight.
    pub fn copies_pending(&self) -> usize {
        self.copies.len()
    }

    /// Additions in flight.
    pub fn adds_pending(&self) -> usize {
        self.adds.len()
    }

    /// A thread whose copy into shared memory no thread has waited for.
    pub fn forgotten_copy(&self) -> Option<u32> {
        self.copies.first().map(|copy| copy.thread)
    }

    /// Whether some addition of `thread` may still read shared memory.
    pub fn still_reads(&self, thread: u32) -> bool {
        self.adds.iter().any(|add| add.thread == thread)
    }

    pub fn committed(&self, thread: u32) -> u32 {
        self.committed_groups.get(thread as usize).copied().unwrap_or(0)
    }
}
