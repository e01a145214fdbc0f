//! Asynchronous copies of threads (`cp.async`) in flight.

use std::collections::VecDeque;

use super::race::clock::Clock;

pub(super) struct PendingCopy {
    pub(super) target: *mut u8,
    pub(super) source: *const u8,
    pub(super) bytes: u32,
    pub(super) source_bytes: u32,
    /// Groups committed before this copy was issued.
    pub(super) group: u32,
    /// Copies that the thread issued before this one.
    pub(super) number: u64,
}

impl PendingCopy {
    pub(super) fn land(self) {
        // SAFETY: `copy_async` read both ranges' ends on the issuing thread, where a bad address
        // would have been reported; buffers outlive the launch.
        unsafe {
            std::ptr::copy_nonoverlapping(self.source, self.target, self.source_bytes as usize);
            std::ptr::write_bytes(
                self.target.add(self.source_bytes as usize),
                0,
                (self.bytes - self.source_bytes) as usize,
            );
        }
    }
}

/// An arrival at an mbarrier that waits for copies.
pub(super) struct CopyArrival {
    pub(super) offset: u32,
    /// Copies with a smaller number must land first.
    pub(super) behind: u64,
    /// What the thread knew at the issue, if races are looked for.
    pub(super) clock: Option<Clock>,
}

#[derive(Default)]
pub(super) struct AsyncCopies {
    pub(super) pending: Vec<PendingCopy>,
    pub(super) committed_groups: u32,
    pub(super) issued: u64,
    /// In the order of issue.
    pub(super) arrivals: VecDeque<CopyArrival>,
}
