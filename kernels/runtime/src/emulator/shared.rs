//! The state that modules share with the device that loaded them.

use std::collections::HashSet;
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
    /// Kernels of which a launch did not end, each with its file.
    pub endless: Mutex<HashSet<(String, String)>>,
    pub schedule: Mutex<Schedule>,
    pub workers: usize,
    pub stacks: Mutex<Vec<DefaultStack>>,
}

/// The part of the time limit that a launch has of a kernel that did not end before: its failure is
/// known, and a sweep has hundreds of launches.
const OF_ENDLESS: u32 = 24;

impl Shared {
    /// The time limit of the next launch of a kernel of a file.
    pub fn limit_of(&self, file: &str, kernel: &str) -> Duration {
        let endless = self.endless.lock().unwrap_or_else(|e| e.into_inner());
        let known = endless.contains(&(file.to_owned(), kernel.to_owned()));
        if known { self.time_limit / OF_ENDLESS } else { self.time_limit }
    }

    /// A launch of this kernel did not end.
    pub fn did_not_end(&self, file: &str, kernel: &str) {
        let mut endless = self.endless.lock().unwrap_or_else(|e| e.into_inner());
        endless.insert((file.to_owned(), kernel.to_owned()));
    }
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
