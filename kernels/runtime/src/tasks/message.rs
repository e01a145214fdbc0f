//! The messages between the tasks of a step: JSON and its length, with descriptors.

use std::io::{self, IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use rustix::process::geteuid;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Gpu, Step};

/// The most descriptors of a message.
const MOST_DESCRIPTORS: usize = 2;

/// The longest message.
const LONGEST: usize = 1 << 16;

/// What task 0 asks of another task, one request on a connection.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// To be there until the connection is closed.
    Attend,
    /// For the GPU of its rank.
    Gpu,
    /// For a process of a rank until the connection is closed. With it come the process's end of
    /// its own connection, and the memory in which ranks meet.
    Start {
        /// The tag of its first message.
        tag: u64,
    },
}

/// What a task answers.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// It is there.
    Present,
    /// The GPU of its rank.
    Gpu(Gpu),
    /// A process with this number was started.
    Started(u32),
    /// What was asked for cannot be had.
    Failed(String),
    /// The process has ended: its wait status.
    Ended(i32),
}

/// Where a task listens. Such a name is in no file system, and is gone with its owner.
fn address(step: &Step, task: usize) -> io::Result<SocketAddr> {
    let (user, Step { job, number, .. }) = (geteuid().as_raw(), step);
    SocketAddr::from_abstract_name(format!("dsv4-parity-{user}-{job}.{number}-{task}"))
}

/// Listens as the task that this process is.
pub(super) fn listen(step: &Step) -> io::Result<UnixListener> {
    UnixListener::bind_addr(&address(step, step.task)?)
}

/// Connects to a task.
pub(super) fn connect(step: &Step, task: usize) -> io::Result<UnixStream> {
    let stream = UnixStream::connect_addr(&address(step, task)?)?;
    has_same_user(&stream)?;
    Ok(stream)
}

/// Whether the other end belongs to this user: any user may bind or connect to an abstract name.
pub(super) fn has_same_user(stream: &UnixStream) -> io::Result<()> {
    let (other, own) = (socket_peercred(stream)?.uid, geteuid());
    if other == own {
        return Ok(());
    }
    let why = format!("it belongs to user {}, not to {}", other.as_raw(), own.as_raw());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

pub(super) fn unexpected() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it answered something else")
}

/// Whether the other end is closed.
pub(super) fn is_closed(stream: &UnixStream) -> bool {
    let mut hung_up = libc::pollfd { fd: stream.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: one valid pollfd.
    unsafe { libc::poll(&mut hung_up, 1, 0) == 1 }
}

/// Sends a message with descriptors.
pub(super) fn send(
    stream: &UnixStream,
    message: &impl Serialize,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    let bytes = [&(text.len() as u32).to_le_bytes()[..], &text].concat();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors"));
    }
    let sent = rustix::io::retry_on_intr(|| {
        sendmsg(stream, &[IoSlice::new(&bytes)], &mut beside, SendFlags::NOSIGNAL)
    })?;
    (&*stream).write_all(&bytes[sent..])
}

/// Receives a message and its descriptors, which no later child process inherits.
pub(super) fn receive<M: DeserializeOwned>(stream: &UnixStream) -> io::Result<(M, Vec<OwnedFd>)> {
    let mut length = [0; 4];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::io::retry_on_intr(|| {
        let parts = &mut [IoSliceMut::new(&mut length)];
        recvmsg(stream, parts, &mut beside, RecvFlags::CMSG_CLOEXEC)
    })?;
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let rights = beside.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let descriptors = rights.flatten().collect();
    let mut stream = stream;
    stream.read_exact(&mut length[received.bytes..])?;
    let length = u32::from_le_bytes(length) as usize;
    if length > LONGEST {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "no message of a task"));
    }
    let mut text = vec![0; length];
    stream.read_exact(&mut text)?;
    Ok((serde_json::from_slice(&text)?, descriptors))
}
