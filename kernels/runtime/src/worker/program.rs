//! A worker process: this program, started again by a device of its own ([`super::process`]),
//! which runs kernels and nothing else.
//!
//! Every program that this library is linked into can be a worker, tests and benchmarks as well:
//! before its `main` begins, an initialiser looks whether it was started as one, and if so it
//! never begins.

use std::convert::Infallible;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use serde::{Deserialize, Serialize};

use super::link::Link;
use crate::{emulator, remote, supervisor};

/// Tells a program that it is a worker: a [`Start`] as JSON.
pub const VARIABLE: &str = "PARITY_WORKER";

/// The code with which a worker ends that cannot read or write its connection while its device
/// holds it: a kernel closed it.
pub const DISCONNECTED: i32 = 113;

/// What a worker starts with.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Start {
    /// Descriptor of the connection to the device.
    pub connection: i32,
    /// The tag of the first message.
    pub tag: u64,
    /// Bytes that the process may have for data, where that is bounded.
    pub memory_limit: Option<u64>,
    /// What it is for.
    pub work: Work,
}

/// What a worker does.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Work {
    /// It runs launches of the emulator.
    Emulator(emulator::serve::Start),
    /// It is a device.
    Device,
}

// SAFETY of the section: its entries are functions without results that the loader calls before
// `main`, with arguments that this one leaves alone.
#[used]
#[unsafe(link_section = ".init_array")]
static INITIALISER: extern "C" fn() = become_worker;

/// Keeps the initialiser in the program: what nobody refers to is left out by the linker.
pub fn is_linked() -> bool {
    std::hint::black_box(&INITIALISER) as *const extern "C" fn() as usize != 0
}

extern "C" fn become_worker() {
    // The supervisor of a worker is told what its worker is to do; which of the initialisers runs
    // first, the linker decides.
    if std::env::var_os(supervisor::VARIABLE).is_some() {
        return;
    }
    let Ok(start) = std::env::var(VARIABLE) else { return };
    // SAFETY: no other thread runs before `main`. What a kernel starts is no worker.
    unsafe { std::env::remove_var(VARIABLE) };
    let Ok(start) = serde_json::from_str::<Start>(&start) else {
        eprintln!("{VARIABLE} is set by no device of this program");
        end(2);
    };
    // A thread of its own, since the first one's stack is not as large everywhere, and has no
    // guard that is known here.
    let served = std::thread::Builder::new().stack_size(8 << 20).spawn(move || serve(start));
    // Where it returns, the process is no worker yet, or none any more.
    let _ = served.map(|thread| thread.join());
    end(DISCONNECTED);
}

/// Ends the process at once: what would run at an ordinary end is the program's, which never began.
fn end(code: i32) -> ! {
    // SAFETY: _exit takes an integer and does not return.
    unsafe { libc::_exit(code) }
}

/// Bounds what this process may take. A kernel that crashes leaves no image of it on disk. Where a
/// lower limit stands already, that one holds.
fn limit(memory: Option<u64>) {
    let memory = memory.map(|bytes| (libc::RLIMIT_DATA, bytes));
    for (of, bytes) in memory.into_iter().chain([(libc::RLIMIT_CORE, 0)]) {
        let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
        // SAFETY: a valid limit of this process.
        unsafe { libc::setrlimit(of, &limit) };
    }
}

/// Works until the device closes the connection.
fn serve(start: Start) -> io::Result<Infallible> {
    limit(start.memory_limit);
    // SAFETY: the device made the descriptor for this process, and nothing else here knows it.
    let connection = UnixStream::from(unsafe { OwnedFd::from_raw_fd(start.connection) });
    die_with(connection.as_raw_fd());
    let mut link = Link::new(connection, start.tag)?;
    let worked = match start.work {
        Work::Emulator(start) => emulator::serve::serve(start, &mut link),
        Work::Device => remote::host::serve(&mut link),
    };
    match worked {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => end(0),
        // Before anything is closed that a kernel has closed already.
        _ => end(DISCONNECTED),
    }
}

/// Ends this process when the device's end of the connection is closed, also in the midst of a
/// launch.
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
