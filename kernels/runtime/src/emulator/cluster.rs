//! Clusters: blocks that run together and access each other's shared memory.
//!
//! Most clusters have one block. The threads of all blocks are coroutines of one operating-system
//! thread, which alternates between the blocks. Under a schedule seed one block may run far ahead
//! of the others.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::block::{Block, State};

/// The most blocks of a cluster that every device of sm_90a runs.
pub(super) const MOST_BLOCKS: u32 = 8;

/// Thread steps for which one block has priority over the others, on average.
const STEPS_OF_A_BLOCK: [u32; 3] = [4, 256, 16384];

impl Block {
    /// Another block of the cluster, or this one.
    ///
    /// # Errors
    /// No such block exists, or it has ended: its shared memory may belong to another cluster by
    /// then.
    pub(super) fn peer(&mut self, rank: u32) -> Result<&mut Self, String> {
        let Some(&peer) = self.peers.get(rank as usize) else {
            return Err(format!(
                "reaches for block {rank} of its cluster, which has {}",
                self.peers.len()
            ));
        };
        // SAFETY: the blocks of a cluster live as long as each other, one operating-system thread
        // runs them all, and no reference to another one than that of the running thread is ever
        // held for longer than a call.
        let peer = if rank == self.rank { self } else { unsafe { &mut *peer } };
        if peer.has_ended() {
            return Err(format!(
                "reaches for block {} of its cluster, which has ended",
                peer.contexts[0].block_idx
            ));
        }
        Ok(peer)
    }

    /// Whether all its threads have returned.
    pub(super) fn has_ended(&self) -> bool {
        self.exited == self.states.len()
    }

    /// The running thread arrives at the cluster's barrier.
    pub(super) fn arrive_at_cluster(&mut self) -> Result<(), String> {
        let thread = self.current as usize;
        if self.cluster_arrivals[thread].is_some() {
            return Err(
                "arrives at its cluster's barrier a second time without waiting there".to_owned()
            );
        }
        let released = {
            let mut barrier = self.cluster.borrow_mut();
            self.cluster_arrivals[thread] = Some(barrier.phase);
            self.told(thread as u32, |races, who| races.release(who, &mut barrier.release));
            barrier.arrived += 1;
            barrier.complete()
        };
        self.release_cluster(released);
        Ok(())
    }

    /// Whether the running thread has to wait at the cluster's barrier; if so, it is recorded as
    /// waiting.
    pub(super) fn waits_at_cluster(&mut self) -> Result<bool, String> {
        let thread = self.current;
        let Some(arrived) = self.cluster_arrivals[thread as usize].take() else {
            return Err("waits at its cluster's barrier, where it has not arrived".to_owned());
        };
        let mut barrier = self.cluster.borrow_mut();
        if barrier.phase > arrived {
            self.told(thread, |races, who| races.acquire(who, &barrier.clock));
            return Ok(false);
        }
        barrier.waiting.push((self.rank, thread));
        self.states[thread as usize] = State::AtClusterBarrier;
        Ok(true)
    }

    /// A thread has returned: the cluster's barrier no longer waits for it.
    pub(super) fn leave_cluster(&mut self, thread: u32) {
        let released = {
            let mut barrier = self.cluster.borrow_mut();
            barrier.running -= 1;
            if self.cluster_arrivals[thread as usize].take() == Some(barrier.phase) {
                barrier.arrived -= 1;
            }
            barrier.complete()
        };
        self.release_cluster(released);
    }

    fn release_cluster(&mut self, released: Vec<(u32, u32)>) {
        for (rank, thread) in released {
            // A block with a waiting thread has not ended.
            let clock = self.cluster.borrow().clock.clone();
            if let Ok(block) = self.peer(rank) {
                block.told(thread, |races, who| races.acquire(who, &clock));
                block.make_ready(thread);
            }
        }
    }
}

/// Which block of a cluster runs next.
pub(super) struct BlockOrder {
    blocks: usize,
    /// The block with priority; the others follow by rank.
    first: usize,
    random: Option<(ChaCha8Rng, u32)>,
}

impl BlockOrder {
    pub(super) fn new(blocks: usize, seed: Option<u64>) -> Self {
        let random = seed.filter(|_| blocks > 1).map(|seed| {
            let mut rng = ChaCha8Rng::seed_from_u64(!seed);
            let steps = STEPS_OF_A_BLOCK[rng.random_range(0..STEPS_OF_A_BLOCK.len())];
            (rng, steps)
        });
        Self { blocks, first: 0, random }
    }

    /// The ranks in the order in which their threads are searched.
    pub(super) fn ranks(&self) -> impl Iterator<Item = usize> + use<> {
        let (first, blocks) = (self.first, self.blocks);
        (0..blocks).map(move |rank| (first + rank) % blocks)
    }

    /// A thread is about to run.
    pub(super) fn step(&mut self) {
        let Some((rng, steps)) = &mut self.random else {
            self.first = (self.first + 1) % self.blocks;
            return;
        };
        if rng.random_ratio(1, *steps) {
            self.first = rng.random_range(0..self.blocks);
        }
    }
}
