//! The messages between the emulator's device and its worker process, without the parameters of a
//! launch.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::memory::Placed;
use crate::backend::KernelExports;
use crate::worker::failure::Failure;

/// Requests to a worker. The first three are answered. An error of another request is the answer to
/// the next of these three.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// Loads a compiled module; answered by [`Answer::Module`].
    Load { path: PathBuf, file: String },
    /// What a module exports for a kernel.
    Exports { module: u64, kernel: String },
    /// Runs a kernel; the bytes are its parameters.
    Launch { module: u64, kernel: String, grid: [u32; 3], block: [u32; 3], shared_bytes: u32 },
    /// Maps a buffer.
    Map(Placed),
    /// Makes it read-only.
    Seal(Placed),
    /// Unmaps it.
    Unmap(Placed),
    /// Unloads a module.
    Unload { module: u64 },
    /// The schedule of later launches.
    Schedule { seed: Option<u64>, watches_races: bool },
}

impl Request {
    /// Whether the worker answers.
    pub fn is_answered(&self) -> bool {
        use Request::*;
        matches!(self, Load { .. } | Exports { .. } | Launch { .. })
    }
}

/// Answers of a worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// Success without a result.
    Done,
    /// A module is loaded under this number.
    Module(u64),
    /// Of a kernel.
    Exports(KernelExports),
    /// The request failed.
    Failed(Failure),
}
