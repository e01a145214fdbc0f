//! Which of a block's ready threads runs next.

use std::collections::VecDeque;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Threads that can run, and the order in which they do.
pub(super) struct ReadySet {
    /// Deterministic schedule: first in, first out.
    pub(super) queue: VecDeque<u32>,
    pub(super) random: Option<RandomOrder>,
}

/// The duration of a priority. About two steps of a warp mix the warps. With the larger values a
/// warp completes a tile, or its whole work, before another starts.
const STEPS_OF_A_PRIORITY: [u32; 3] = [64, 1024, 16384];
/// Sixteenths of a block's asynchronous work that complete at the time of issue.
const DONE_AT_ONCE: [u32; 3] = [0, 4, 16];

pub(super) struct RandomOrder {
    pub(super) rng: ChaCha8Rng,
    pub(super) by_warp: Vec<Vec<u32>>,
    /// A permutation of the warps: the first with a ready lane runs. It changes at random, so that
    /// one warp may run far ahead of, or far behind, all others.
    pub(super) priority: Vec<u32>,
    /// Steps of a thread between two changes, on average; one of [`STEPS_OF_A_PRIORITY`].
    pub(super) steps: u32,
    /// Sixteenths of the copies that complete at the time of issue; one of [`DONE_AT_ONCE`].
    pub(super) copies_at_once: u32,
    /// The same for MMAs, which then read their operands.
    pub(super) products_at_once: u32,
    pub(super) ready: usize,
}

impl ReadySet {
    pub(super) fn new(threads: u32, seed: Option<u64>) -> Self {
        let warps = threads.div_ceil(32);
        let random = seed.map(|seed| RandomOrder {
            rng: ChaCha8Rng::seed_from_u64(seed),
            by_warp: vec![Vec::with_capacity(32); warps as usize],
            priority: (0..warps).collect(),
            steps: STEPS_OF_A_PRIORITY[0],
            copies_at_once: DONE_AT_ONCE[0],
            products_at_once: DONE_AT_ONCE[0],
            ready: 0,
        });
        let mut set = Self { queue: VecDeque::with_capacity(threads as usize), random };
        if let Some(random) = &mut set.random {
            random.draw_manner();
            random.draw_priority();
        }
        (0..threads).for_each(|thread| set.push(thread));
        set
    }

    pub(super) fn push(&mut self, thread: u32) {
        match &mut self.random {
            None => self.queue.push_back(thread),
            Some(random) => {
                random.by_warp[(thread / 32) as usize].push(thread);
                random.ready += 1;
            }
        }
    }

    pub(super) fn pop(&mut self) -> Option<u32> {
        match &mut self.random {
            None => self.queue.pop_front(),
            Some(random) => random.pop(),
        }
    }
}

impl RandomOrder {
    fn draw_manner(&mut self) {
        let mut one_of = |choices: [u32; 3]| choices[self.rng.random_range(0..choices.len())];
        self.steps = one_of(STEPS_OF_A_PRIORITY);
        self.copies_at_once = one_of(DONE_AT_ONCE);
        self.products_at_once = one_of(DONE_AT_ONCE);
    }

    fn draw_priority(&mut self) {
        for i in (1..self.priority.len()).rev() {
            let j = self.rng.random_range(0..=i);
            self.priority.swap(i, j);
        }
    }

    fn pop(&mut self) -> Option<u32> {
        if self.ready == 0 {
            return None;
        }
        if self.rng.random_ratio(1, self.steps) {
            self.draw_priority();
        }
        let warp = *self.priority.iter().find(|&&warp| !self.by_warp[warp as usize].is_empty())?;
        let lanes = &mut self.by_warp[warp as usize];
        let pick = self.rng.random_range(0..lanes.len());
        self.ready -= 1;
        Some(lanes.swap_remove(pick))
    }
}
