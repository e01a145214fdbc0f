//! Warpgroup MMAs in flight.
//!
//! Each warp of a warpgroup computes 16 rows. From the issue of an MMA to the wait that covers it,
//! the accumulators in the lanes hold poison; the true ones are kept here. The MMAs of a warp read
//! their operands in shared memory one after the other, each at some time between its issue and
//! that wait.

use std::collections::VecDeque;

use super::async_proxy::AsyncReads;
use super::race::clock::Clock;

/// Warps in a warpgroup.
pub(super) const GROUP_WARPS: u32 = 4;
/// Rows that one warp computes.
pub(super) const ROWS: usize = 16;

/// One warp's part of one MMA. Mirror of `emulator::WarpProduct` in `emulator.h`.
#[derive(Clone)]
#[repr(C)]
pub struct WarpProduct {
    pub(super) a_descriptor: u64,
    pub(super) b_descriptor: u64,
    pub(super) columns: u32,
    /// Warp within its warpgroup.
    pub(super) warp: u32,
    pub(super) a_in_registers: u32,
    pub(super) a_transposed: u32,
    pub(super) b_transposed: u32,
    pub(super) accumulate: u32,
    pub(super) a_registers: [[u32; 4]; 32],
    /// The lanes' accumulators, on their stacks.
    pub(super) accumulators: [*mut f32; 32],
    pub(super) capture: unsafe extern "C" fn(*const Self, *mut f32),
    pub(super) multiply: unsafe extern "C" fn(*const Self, *const AsyncReads, *mut f32),
    pub(super) deliver: unsafe extern "C" fn(*const Self, *const f32) -> u32,
}

impl WarpProduct {
    /// The parts that must be the same in all warps of a warpgroup.
    pub(super) fn common(&self) -> [u64; 3] {
        let flags = [self.a_in_registers, self.a_transposed, self.b_transposed, self.accumulate];
        let flags =
            flags.iter().fold(u64::from(self.columns), |all, &flag| all << 1 | u64::from(flag));
        [if self.a_in_registers != 0 { 0 } else { self.a_descriptor }, self.b_descriptor, flags]
    }

    /// Bytes of one lane's accumulators.
    pub(super) fn lane_bytes(&self) -> usize {
        ROWS * self.columns as usize / 32 * size_of::<f32>()
    }

    pub(super) fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (self.accumulators[0] as usize, other.accumulators[0] as usize);
        a < b + other.lane_bytes() && b < a + self.lane_bytes()
    }
}

pub(super) struct Issued {
    pub(super) product: WarpProduct,
    pub(super) group: u32,
    pub(super) issuer_fence: u64,
    /// What the warp knew at the issue, if races are looked for.
    pub(super) clock: Option<Clock>,
}

/// Accumulators of MMAs in flight.
pub(super) struct Accumulators {
    /// Any of these MMAs: it has the positions of the accumulators.
    pub(super) product: WarpProduct,
    /// Row after row.
    pub(super) values: Vec<f32>,
    /// Group of the newest MMA.
    pub(super) group: u32,
}

#[derive(Default)]
pub(super) struct WarpQueue {
    /// MMAs that have not read their operands yet, oldest first.
    pub(super) issued: VecDeque<Issued>,
    pub(super) held: Vec<Accumulators>,
    /// Groups that each lane has committed.
    pub(super) committed: [u32; 32],
    /// Lanes that have called wgmma_fence since the last wait.
    pub(super) fenced: u32,
    pub(super) count: usize,
}

/// The MMAs of one block.
#[derive(Default)]
pub struct Products {
    /// By warp; empty before the first MMA.
    pub(super) warps: Vec<WarpQueue>,
    /// By warpgroup: the common parts of each MMA, in the order of issue.
    pub(super) sequence: Vec<Vec<[u64; 3]>>,
    pub(super) pending: usize,
}

impl Products {
    pub(super) fn warp(&mut self, warp: u32, threads: usize) -> &mut WarpQueue {
        if self.warps.is_empty() {
            self.warps.resize_with(threads.div_ceil(32), WarpQueue::default);
            self.sequence.resize(threads.div_ceil(32 * GROUP_WARPS as usize), Vec::new());
        }
        &mut self.warps[warp as usize]
    }

    /// MMAs that have not read their operands.
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// A warp that issued fewer MMAs than another of its warpgroup, and both numbers.
    pub fn unequal(&self) -> Option<(u32, usize, usize)> {
        let most = |warp: usize| self.sequence[warp / GROUP_WARPS as usize].len();
        let behind = self.warps.iter().enumerate().find(|(warp, queue)| queue.count < most(*warp));
        behind.map(|(warp, queue)| (warp as u32, queue.count, most(warp)))
    }
}
