//! A device's side of a worker process ([`super::program`]).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::link::Link;
use super::program::{self, DISCONNECTED, Start, VARIABLE, Work};
use crate::runtime::process::{kill_group, wait_within};

/// What a worker that ends by itself may take for it.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// A worker process that runs. Dropped, it is killed with everything that it started, and waited for.
pub struct Process {
    child: Child,
    link: Link,
}

impl Process {
    /// Starts one that does `work`, for which it needs the descriptors `passed` and, where that is bounded, no more than so many
    /// bytes of memory.
    ///
    /// # Errors
    /// The system's.
    pub fn start(work: Work, passed: &[i32], memory: Option<u64>) -> io::Result<Self> {
        if !program::is_linked() {
            return Err(io::Error::other("this program was linked without the initialiser of workers"));
        }
        let (ours, theirs) = UnixStream::pair()?;
        let start = Start { connection: theirs.as_raw_fd(), tag: rand::random(), work };
        let mut command = Command::new("/proc/self/exe");
        command.env(VARIABLE, serde_json::to_string(&start)?).process_group(0).stdin(Stdio::null());
        // What a kernel prints is no output of this program.
        command.stdout(Stdio::from(File::from(io::stderr().as_fd().try_clone_to_owned()?)));
        let passed: Vec<i32> = passed.iter().copied().chain([theirs.as_raw_fd()]).collect();
        // SAFETY: between fork and exec only fcntl and setrlimit are called, which are async-signal-safe.
        unsafe { command.pre_exec(move || prepare(&passed, memory)) };
        let child = command.spawn()?;
        Ok(Self { child, link: Link::new(ours, start.tag)? })
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.child.id()
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

    /// What became of a process that did not answer for this reason, in words that go on from "it": it has ended, or is ended
    /// by the drop that must follow; `late` where the time limit was over.
    pub fn fate(&mut self, error: &io::Error, late: &str) -> String {
        let is_late = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
        let limit = if is_late { Duration::ZERO } else { LAST_WORDS };
        match wait_within(&mut self.child, limit).ok().flatten() {
            Some(status) => describe(status),
            None if is_late => late.to_owned(),
            None => "wrote to the files of its process".to_owned(),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        kill_group(self.child.id());
        // What was killed is waited for, so that nothing is left of it.
        let _ = self.child.wait();
    }
}

/// Between fork and exec: lets the descriptors through, and bounds memory. A kernel that crashes leaves no image of it on disk.
fn prepare(passed: &[i32], memory: Option<u64>) -> io::Result<()> {
    let limit = |of, bytes| {
        let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
        // SAFETY: a valid limit of this process.
        unsafe { libc::setrlimit(of, &limit) }
    };
    // Where a lower limit stands already, that one holds.
    if let Some(memory) = memory {
        limit(libc::RLIMIT_DATA, memory);
    }
    limit(libc::RLIMIT_CORE, 0);
    // SAFETY: fcntl with F_SETFD takes integers.
    let kept = passed.iter().all(|&descriptor| unsafe { libc::fcntl(descriptor, libc::F_SETFD, 0) } != -1);
    if kept { Ok(()) } else { Err(io::Error::last_os_error()) }
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
