//! The barrier of a cluster of blocks.

use super::race::clock::{Clock, Release};

/// The barrier of a cluster: a phase ends when all threads that have not returned have arrived.
#[derive(Default)]
pub(super) struct ClusterBarrier {
    /// Threads of all blocks that have not returned.
    pub(super) running: usize,
    /// How many of them have arrived in the current phase.
    pub(super) arrived: usize,
    pub(super) phase: u64,
    /// What the threads know that have arrived since the start.
    pub(super) release: Release,
    /// The same when the last phase ended.
    pub(super) clock: Clock,
    /// Rank of the block, and thread.
    pub(super) waiting: Vec<(u32, u32)>,
}

impl ClusterBarrier {
    /// For this many threads of all blocks.
    pub(super) fn new(running: usize) -> Self {
        Self { running, ..Self::default() }
    }

    /// The released threads, if the current phase is complete.
    pub(super) fn complete(&mut self) -> Vec<(u32, u32)> {
        if self.arrived < self.running || self.arrived == 0 {
            return Vec::new();
        }
        self.phase += 1;
        self.clock = self.release.clock();
        self.arrived = 0;
        std::mem::take(&mut self.waiting)
    }

    /// What the current phase lacks.
    pub(super) fn lacks(&self) -> String {
        format!("{} of {} threads arrived", self.arrived, self.running)
    }
}
