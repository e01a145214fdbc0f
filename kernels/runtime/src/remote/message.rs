//! The requests to a device in another process, and its answers.

use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::backend::{Allocation, BackendKind, Environment, KernelExports, Placement, Reservation};
use crate::matrix::MatrixProduct;
use crate::source::SourceTree;
use crate::tensor_map::{MapWords, TensorMap};
use crate::worker::failure::Failure;
use crate::world::Call;
use crate::world::meeting::Seat;

/// The methods of [`Backend`](crate::backend::Backend) and of its modules and recordings. Each is
/// answered.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// The first one: opens the device; answered by [`Answer::Opened`].
    Open {
        kind: BackendKind,
        cache_dir: PathBuf,
        /// The number of the GPU; `None` for the chosen one.
        ordinal: Option<u32>,
    },
    /// Answered by [`Answer::Module`].
    Load {
        tree: SourceTree,
        file: String,
        defines: Vec<(String, String)>,
    },
    Unload {
        module: u64,
    },
    /// Answered by [`Answer::Exports`].
    Exports {
        module: u64,
        kernel: String,
    },
    /// Its bytes are the parameters.
    Launch {
        module: u64,
        kernel: String,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
    },
    /// Answered by [`Answer::Allocated`].
    Allocate {
        name: String,
        bytes: usize,
        placement: Placement,
    },
    /// Answered by [`Answer::Reserved`].
    Reserve {
        name: String,
        bytes: usize,
        touched: Vec<Range<i64>>,
        placement: Placement,
    },
    Free(Allocation),
    Fill {
        address: u64,
        byte: u8,
        bytes: usize,
    },
    /// Its bytes are the source.
    Upload {
        address: u64,
    },
    /// The answer's bytes are what was copied.
    Download {
        address: u64,
        bytes: usize,
    },
    Copy {
        target: u64,
        source: u64,
        bytes: usize,
    },
    Synchronize,
    /// Whether there is a library for GEMMs; answered by [`Answer::Has`].
    MatrixLibrary,
    /// Lets the library multiply; answered by [`Answer::Has`].
    Multiply(MatrixProduct),
    /// Answered by [`Answer::TensorMap`].
    TensorMap(TensorMap),
    Schedule {
        seed: Option<u64>,
    },
    /// Kernels may only read the buffer from now on.
    Seal(Allocation),
    /// The answer's bytes are a name for a world of the library of collectives.
    NameWorld,
    /// Takes a seat in a world. Its bytes are the name of a world of the library, or none for
    /// shared memory.
    Join(Seat),
    /// Takes part in a collective of the world that was joined last.
    TakePart(Call),
    /// Requests from here to [`Request::End`] are timed or recorded.
    Begin(Span),
    /// Answered by [`Answer::Taken`] or [`Answer::Recorded`]; `failed` if the work failed on the
    /// device's side of the connection.
    End {
        failed: bool,
    },
    /// Launches what was recorded.
    Replay {
        recorded: u64,
    },
    Forget {
        recorded: u64,
    },
}

/// The purpose of a span of work.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Span {
    /// [`Backend::time`](crate::backend::Backend::time).
    Time,
    /// [`Backend::time_recorded`](crate::backend::Backend::time_recorded).
    TimeRecorded,
    /// [`Recorder::record`](crate::backend::Recorder::record).
    Record,
}

/// Answers to [`Request`]s.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Answer {
    Done,
    /// The device is open; it may support recording.
    Opened {
        environment: Environment,
        records: bool,
    },
    Module(u64),
    Exports(KernelExports),
    Allocated(Allocation),
    Reserved(Reservation),
    Taken(Duration),
    Recorded(u64),
    /// Whether the requested thing exists.
    Has(bool),
    TensorMap(MapWords),
    /// The request failed; `lost` if all later requests fail as well.
    Failed {
        failure: Failure,
        lost: bool,
    },
}
