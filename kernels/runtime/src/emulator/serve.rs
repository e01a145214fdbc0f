//! The worker process's side of the emulator: handles the requests of its device.

use std::convert::Infallible;
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::coverage;
use super::host::Host;
use super::message::{Answer, Request};
use super::progress::{self, Page};
use crate::worker::link::Link;

/// The name of its job in the table of jobs.
pub const JOB: &str = "emulator";

/// The start parameters of a worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Start {
    /// Descriptor of the file of a [`Page`].
    pub page: i32,
    /// Descriptor of the file of global memory.
    pub memory: i32,
    /// The time limit of launches.
    pub time_limit: Duration,
    /// Where modules add up how often their lines ran.
    pub coverage: Option<PathBuf>,
}

/// Handles requests until the connection is closed, which is an error.
///
/// # Errors
/// A connection that is closed, by the device or by a kernel.
pub fn serve(start: Start, link: &mut Link) -> io::Result<Infallible> {
    // SAFETY: the device made these descriptors for this process, and nothing else here knows them.
    let [page, memory] = unsafe {
        [start.page, start.memory].map(|descriptor| File::from(OwnedFd::from_raw_fd(descriptor)))
    };
    progress::tell(Page::of(&page)?);
    drop(page);
    if let Some(folder) = &start.coverage {
        coverage::count_into(folder);
    }
    // A kernel may have closed its files: the process ends without closing them again.
    let mut host = ManuallyDrop::new(Host::new(start.time_limit, memory));
    let mut failed = None;
    loop {
        let (request, bytes) = link.receive::<Request>()?;
        let is_answered = request.is_answered();
        let done = match failed.take() {
            // The request depends on an earlier one that failed.
            Some(earlier) if is_answered => Err(earlier),
            earlier => host.serve(request, &bytes).map_err(|error| earlier.unwrap_or(error)),
        };
        if is_answered {
            link.answer(&done.unwrap_or_else(|error| Answer::Failed(error.into())), &[])?;
        } else {
            failed = done.err();
        }
    }
}
