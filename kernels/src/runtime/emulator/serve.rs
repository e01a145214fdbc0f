//! A worker process: this program, started again by a device of its own ([`super::worker`]), which runs kernels and nothing
//! else, so that whatever a kernel does to its process ends no more than one case.
//!
//! Every program that this library is linked into can be a worker, tests and benchmarks as well: before its `main` begins, an
//! initialiser looks whether it was started as one, and if so it never begins.

use std::convert::Infallible;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::host::Host;
use super::message::{self, Answer, Request};
use super::progress::{self, Page};

/// Tells a program that it is a worker: a [`Start`] as JSON.
pub const VARIABLE: &str = "PARITY_EMULATOR_WORKER";

/// The code with which a worker ends that cannot read or write its connection while its device holds it: a kernel closed it.
pub const DISCONNECTED: i32 = 113;

/// What a worker starts with.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Start {
    /// Descriptor of the connection to the device.
    pub connection: i32,
    /// Descriptor of the file of a [`Page`].
    pub page: i32,
    /// The time limit of launches.
    pub time_limit: Duration,
    /// Bytes that the process may have for data.
    pub memory_limit: u64,
    /// Descriptor of the file of global memory.
    pub memory: i32,
    /// The tag of the first message, in either direction; each has the next number. A kernel that writes to the files of its
    /// process does not know it.
    pub tag: u64,
}

// SAFETY of the section: its entries are functions without results that the loader calls before `main`, with arguments that
// this one leaves alone.
#[used]
#[unsafe(link_section = ".init_array")]
static INITIALISER: extern "C" fn() = become_worker;

/// Keeps the initialiser in the program: what nobody refers to is left out by the linker.
pub fn is_linked() -> bool {
    std::hint::black_box(&INITIALISER) as *const extern "C" fn() as usize != 0
}

extern "C" fn become_worker() {
    let Ok(start) = std::env::var(VARIABLE) else { return };
    // SAFETY: no other thread runs before `main`. What a kernel starts is no worker.
    unsafe { std::env::remove_var(VARIABLE) };
    let Ok(start) = serde_json::from_str::<Start>(&start) else {
        eprintln!("{VARIABLE} is set by no device of this program");
        end(2);
    };
    // A thread of its own, since the first one's stack is not as large everywhere, and has no guard that is known here.
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

/// Bounds what this process may take. A kernel that crashes leaves no image of it on disk. Where a lower limit stands already,
/// that one holds.
fn limit(memory: u64) {
    for (of, bytes) in [(libc::RLIMIT_DATA, memory), (libc::RLIMIT_CORE, 0)] {
        let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
        // SAFETY: a valid limit of this process.
        unsafe { libc::setrlimit(of, &limit) };
    }
}

/// Works until the device closes the connection.
fn serve(start: Start) -> io::Result<Infallible> {
    limit(start.memory_limit);
    // SAFETY: the device made these descriptors for this process, and nothing else here knows them.
    let [connection, page, memory] =
        unsafe { [start.connection, start.page, start.memory].map(|descriptor| OwnedFd::from_raw_fd(descriptor)) };
    let (connection, page) = (UnixStream::from(connection), File::from(page));
    progress::tell(Page::of(&page)?);
    die_with(connection.as_raw_fd());
    let mut requests = BufReader::with_capacity(1 << 16, connection.try_clone()?);
    let mut answers = BufWriter::with_capacity(1 << 16, connection);
    let mut host = Host::new(start.time_limit, memory.into());
    match work(&mut host, start.tag, &mut requests, &mut answers) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => end(0),
        // Before anything is closed that a kernel has closed already.
        _ => end(DISCONNECTED),
    }
}

/// Does what is asked for, until nobody asks any more, which is an error.
fn work(host: &mut Host, first_tag: u64, requests: &mut impl Read, answers: &mut impl Write) -> io::Result<Infallible> {
    let (mut bytes, mut failed) = (Vec::new(), None);
    for number in 0.. {
        let tag = first_tag.wrapping_add(number);
        let (request, count) = message::read::<Request>(requests, tag)?;
        bytes.resize(count as usize, 0);
        requests.read_exact(&mut bytes)?;
        let is_answered = request.is_answered();
        let done = match failed.take() {
            // What was asked for relies on what could not be done.
            Some(earlier) if is_answered => Err(earlier),
            earlier => host.serve(request, &bytes).map_err(|error| earlier.unwrap_or(error)),
        };
        if is_answered {
            message::write(answers, tag, &done.unwrap_or_else(|error| Answer::Failed(error.into())), &[])?;
            answers.flush()?;
        } else {
            failed = done.err();
        }
    }
    unreachable!("more messages than there are numbers")
}

/// Ends this process when the device's end of the connection is closed, also in the midst of a launch.
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
