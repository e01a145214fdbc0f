//! A worker process: this program, started again by one of its devices ([`super::process`]), which
//! runs kernels and nothing else.
//!
//! Every program that links this library can be a worker, including tests and benchmarks. Before
//! its `main` starts, an initialiser checks whether it was started as one; if so, `main` never
//! starts.

use std::convert::Infallible;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use serde::{Deserialize, Serialize};

use super::link::Link;
use crate::supervisor;

/// Marks a program as a worker: a [`Start`] as JSON.
pub const VARIABLE: &str = "PARITY_WORKER";

/// The exit code of a worker that cannot read or write its connection while its device holds it: a
/// kernel closed it.
pub const DISCONNECTED: i32 = 113;

/// The start parameters of a worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Start {
    /// Whether a host loads the library that this program is.
    pub in_host: bool,
    /// Descriptor of the connection to the device.
    pub connection: i32,
    /// The tag of the first message.
    pub tag: u64,
    /// Bytes that the process may use for data, if bounded.
    pub memory_limit: Option<u64>,
    /// What it is to do.
    pub job: Job,
}

/// What a worker is to do: a name of the program's table of jobs, and what the job starts with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// Its name.
    pub name: String,
    /// Its start parameters, as JSON.
    pub start: serde_json::Value,
}

impl Job {
    /// A job that starts with this.
    ///
    /// # Errors
    /// What is no JSON.
    pub fn new(name: &str, start: impl Serialize) -> io::Result<Self> {
        Ok(Self { name: name.to_owned(), start: serde_json::to_value(start)? })
    }
}

/// Handles the requests of a job, from its start parameters until its connection is closed.
pub type Serve = fn(serde_json::Value, &mut Link) -> io::Result<Infallible>;

/// Serves a job of the table, if this program was started for that; then it never returns. A host
/// is not ready before it has loaded the library, so the initialiser leaves its start to `in_host`.
pub fn become_worker(jobs: &'static [(&'static str, Serve)], in_host: bool) {
    // The supervisor of a worker also has the worker's variable; the linker decides which of the
    // initialisers runs first.
    if std::env::var_os(supervisor::VARIABLE).is_some() {
        return;
    }
    let Ok(start) = std::env::var(VARIABLE) else { return };
    let Ok(start) = serde_json::from_str::<Start>(&start) else {
        eprintln!("{VARIABLE} is set by no device of this program");
        end(2);
    };
    if start.in_host != in_host {
        return;
    }
    // SAFETY: no other thread runs before `main`, or before a host that was started for this has
    // loaded the library. A child process of a kernel is not a worker.
    unsafe { std::env::remove_var(VARIABLE) };
    // A separate thread, since the stack of the first thread is smaller on some systems, and has no
    // known guard.
    let served = std::thread::Builder::new().stack_size(8 << 20).spawn(move || serve(start, jobs));
    // If it returns, the process is not a worker yet, or no longer one.
    let _ = served.map(|thread| thread.join());
    end(DISCONNECTED);
}

/// Ends the process at once: exit handlers belong to the program, which never started.
fn end(code: i32) -> ! {
    // SAFETY: _exit takes an integer and does not return.
    unsafe { libc::_exit(code) }
}

/// Limits the resources of this process. A crashing kernel leaves no core dump on disk. An existing
/// lower limit stays.
fn limit(memory: Option<u64>) {
    let memory = memory.map(|bytes| (libc::RLIMIT_DATA, bytes));
    for (of, bytes) in memory.into_iter().chain([(libc::RLIMIT_CORE, 0)]) {
        let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
        // SAFETY: a valid limit of this process.
        unsafe { libc::setrlimit(of, &limit) };
    }
}

/// Handles requests until the device closes the connection.
fn serve(start: Start, jobs: &[(&str, Serve)]) -> io::Result<Infallible> {
    limit(start.memory_limit);
    // SAFETY: the device made the descriptor for this process, and nothing else here uses it.
    let connection = UnixStream::from(unsafe { OwnedFd::from_raw_fd(start.connection) });
    die_with(connection.as_raw_fd());
    let mut link = Link::new(connection, start.tag)?;
    let Some((_, job)) = jobs.iter().find(|(name, _)| *name == start.job.name) else {
        eprintln!("no job is called {}", start.job.name);
        end(2);
    };
    let worked = job(start.job.start, &mut link);
    match worked {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => end(0),
        // Before closing anything that a kernel has already closed.
        _ => end(DISCONNECTED),
    }
}

/// Ends this process when the device's end of the connection is closed, also during a launch.
fn die_with(connection: i32) {
    let wait = move || {
        let mut hung_up = libc::pollfd { fd: connection, events: libc::POLLRDHUP, revents: 0 };
        loop {
            // SAFETY: one valid pollfd.
            match unsafe { libc::poll(&mut hung_up, 1, -1) } {
                -1 if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
                _ if hung_up.revents & libc::POLLNVAL != 0 => end(DISCONNECTED),
                _ => end(0),
            }
        }
    };
    if std::thread::Builder::new().spawn(wait).is_err() {
        end(DISCONNECTED);
    }
}
