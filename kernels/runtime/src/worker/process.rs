//! A device's side of a worker process ([`super::program`]).

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::link::Link;
use super::program::{DISCONNECTED, Job, Start, VARIABLE};
use crate::process::{host, this_program, variable};
use crate::supervisor::Supervised;
use crate::tasks::{Guest, Tasks};

/// Time in which an ending worker may exit by itself.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Whether NCCL uses multicast over NVLink.
const MULTICAST: &str = "NCCL_NVLS_ENABLE";

/// A running worker process. When dropped, it is killed with all processes that it started, and
/// waited for.
pub struct Process {
    process: Place,
    link: Link,
}

/// Where a process was started.
enum Place {
    /// By this process.
    Here(Supervised),
    /// By another task of this one's step.
    Task(Guest),
}

/// What ends a process while others wait for its answer.
pub enum Ender {
    /// Its number: it was started by this process.
    Here(u32),
    /// The connection to the task that started it.
    Task(UnixStream),
}

impl Process {
    /// Starts a process that does `job`. It gets the descriptors `passed` and, if that is bounded,
    /// at most this many bytes of memory.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn start(job: Job, passed: &[i32], memory: Option<u64>) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let tag = rand::random();
        let process = supervised(job, theirs.as_raw_fd(), tag, passed.iter().copied(), memory)?;
        Ok(Self { process: Place::Here(process), link: Link::new(ours, tag)? })
    }

    /// Starts the process of a rank in another task of this one's step, with the memory in which it
    /// meets the other ranks.
    ///
    /// # Errors
    /// Errors of the system, and of the task.
    pub fn start_in(
        tasks: &'static Tasks,
        task: usize,
        meeting: BorrowedFd<'_>,
    ) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let tag = rand::random();
        let guest = Guest::start(tasks, task, [theirs.as_fd(), meeting], tag)?;
        Ok(Self { process: Place::Task(guest), link: Link::new(ours, tag)? })
    }

    /// Its number, as its task knows it.
    pub fn id(&self) -> u32 {
        match &self.process {
            Place::Here(process) => process.id(),
            Place::Task(guest) => guest.id(),
        }
    }

    /// What ends it while others wait for its answer.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn ender(&self) -> io::Result<Ender> {
        match &self.process {
            Place::Here(process) => Ok(Ender::Here(process.id())),
            Place::Task(guest) => guest.ender().map(Ender::Task),
        }
    }

    /// See [`Link::tell`].
    ///
    /// # Errors
    /// A process that is gone.
    pub fn tell(&mut self, request: &impl Serialize, bytes: &[u8]) -> io::Result<()> {
        self.link.tell(request, bytes)
    }

    /// See [`Link::ask`].
    ///
    /// # Errors
    /// A process that is gone, or does not answer within the time limit.
    pub fn ask<A: DeserializeOwned>(
        &mut self,
        request: &impl Serialize,
        bytes: &[u8],
        limit: Duration,
    ) -> io::Result<(A, Vec<u8>)> {
        self.link.set_time_limit(limit)?;
        self.link.ask(request, bytes)
    }

    /// The fate of a process that did not answer for this reason, as words that continue "it". The
    /// process has ended, or the drop that must follow ends it; `late` is used if the time limit
    /// was over.
    pub fn fate(&mut self, error: &io::Error, late: &str) -> String {
        let is_late = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
        let limit = if is_late { Duration::ZERO } else { LAST_WORDS };
        let ended = match &mut self.process {
            Place::Here(process) => process.wait_within(limit),
            Place::Task(guest) => guest.wait_within(limit),
        };
        match ended.ok().flatten() {
            Some(status) => describe(status),
            None if is_late => late.to_owned(),
            None => "wrote to the files of its process".to_owned(),
        }
    }
}

impl Ender {
    /// Ends the process, if it has not ended. It must not have been waited for.
    pub fn end(&self) {
        match self {
            Self::Here(id) => {
                let Ok(id) = libc::pid_t::try_from(*id) else { return };
                // SAFETY: kill takes two integers; the process is not waited for, so the number is
                // its own.
                unsafe { libc::kill(id, libc::SIGKILL) };
            }
            Self::Task(stream) => {
                // It may have ended.
                let _ = stream.shutdown(Shutdown::Write);
            }
        }
    }
}

/// Starts a process that does `job`, with its end of the connection and other descriptors. It gets,
/// if that is bounded, at most this many bytes of memory.
///
/// # Errors
/// Errors of the system.
pub fn supervised(
    job: Job,
    connection: RawFd,
    tag: u64,
    passed: impl IntoIterator<Item = RawFd>,
    memory_limit: Option<u64>,
) -> io::Result<Supervised> {
    let start = Start { in_host: host().is_some(), connection, tag, memory_limit, job };
    let mut command = this_program();
    command.env(VARIABLE, serde_json::to_string(&start)?);
    // Not every host lets its GPUs use multicast over NVLink, and NCCL then hangs: it has to be
    // asked for.
    if variable(MULTICAST).is_none() {
        command.env(MULTICAST, "0");
    }
    // Output of a kernel is not output of this program.
    let errors = || io::stderr().as_fd().try_clone_to_owned().map(Stdio::from);
    let passed: Vec<RawFd> = passed.into_iter().chain([connection]).collect();
    Supervised::spawn_passing(&command, [Stdio::null(), errors()?, errors()?], &passed)
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(DISCONNECTED), _) => "closed the files of its process".to_owned(),
        (Some(code), _) => format!("ended its process, with code {code}"),
        (_, Some(signal)) => format!("was killed by signal {signal}{}", name_of(signal)),
        _ => format!("ended: {status}"),
    }
}

fn name_of(signal: i32) -> &'static str {
    match signal {
        libc::SIGABRT => " (SIGABRT)",
        libc::SIGSEGV => " (SIGSEGV)",
        libc::SIGBUS => " (SIGBUS)",
        libc::SIGILL => " (SIGILL)",
        libc::SIGKILL => " (SIGKILL)",
        libc::SIGTRAP => " (SIGTRAP)",
        _ => "",
    }
}
