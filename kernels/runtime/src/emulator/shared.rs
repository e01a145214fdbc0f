//! The state that modules share with the device that loaded them.

use std::sync::Mutex;
use std::time::Duration;

use corosensei::stack::DefaultStack;

use super::memory::GuardedMemory;

/// Dynamic shared memory of a block, as on an H100 or H200.
pub const SHARED_BYTES_PER_BLOCK: u64 = 227 * 1024;

/// The state that modules share with the device that loaded them.
pub struct Shared {
    pub memory: GuardedMemory,
    pub time_limit: Duration,
    pub schedule: Mutex<Schedule>,
    pub workers: usize,
    pub stacks: Mutex<Vec<DefaultStack>>,
}

/// The schedule of later launches.
pub struct Schedule {
    /// Seed of a random schedule; `None` for the deterministic one.
    pub seed: Option<u64>,
    /// Whether the deterministic one looks for races.
    pub watches_races: bool,
    /// Launches since the seed was set: each has a different schedule.
    pub launches: u64,
}
