//! A device's side of a worker process ([`super::program`]).

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
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

/// Time in which an ending worker may exit by itself.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Whether NCCL uses multicast over NVLink.
const MULTICAST: &str = "NCCL_NVLS_ENABLE";

/// A running worker process. When dropped, it is killed with all processes that it started, and
/// waited for.
pub struct Process {
    process: Supervised,
    link: Link,
}

impl Process {
    /// Starts a process that does `job`. It gets the descriptors `passed` and, if that is bounded,
    /// at most this many bytes of memory.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn start(job: Job, passed: &[i32], memory: Option<u64>) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let start = Start {
            in_host: host().is_some(),
            connection: theirs.as_raw_fd(),
            tag: rand::random(),
            memory_limit: memory,
            job,
        };
        let mut command = this_program();
        command.env(VARIABLE, serde_json::to_string(&start)?);
        // Not every host lets its GPUs use multicast over NVLink, and NCCL then hangs: it has to be
        // asked for.
        if variable(MULTICAST).is_none() {
            command.env(MULTICAST, "0");
        }
        // Output of a kernel is not output of this program.
        let errors = || io::stderr().as_fd().try_clone_to_owned().map(Stdio::from);
        let passed: Vec<i32> = passed.iter().copied().chain([theirs.as_raw_fd()]).collect();
        let process =
            Supervised::spawn_passing(&command, [Stdio::null(), errors()?, errors()?], &passed)?;
        Ok(Self { process, link: Link::new(ours, start.tag)? })
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.process.id()
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
        match self.process.wait_within(limit).ok().flatten() {
            Some(status) => describe(status),
            None if is_late => late.to_owned(),
            None => "wrote to the files of its process".to_owned(),
        }
    }
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
