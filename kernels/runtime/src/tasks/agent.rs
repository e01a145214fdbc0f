//! What the tasks other than task 0 do: they start the processes of their ranks, and end with task
//! 0.

use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use super::message::{Answer, Request};
use super::{Step, message, own_gpu};
use crate::interrupt;
use crate::remote::job_of_rank;
use crate::worker::process;

/// What an agent waits for.
enum Event {
    /// A process of task 0 has connected.
    Came(UnixStream),
    /// A connection has ended, and the process that it was for.
    Left,
    /// No connection can come any more.
    Deaf(io::Error),
}

/// Works for task 0 of a step, as the task that this process is, until no process of task 0 is
/// connected any more. Signals to all processes of the step do not end it: task 0 decides.
///
/// # Errors
/// Task 0 did not come within `patience`; another process is this task already.
pub fn serve(step: &Step, patience: Duration) -> io::Result<()> {
    interrupt::outlive_signals()?;
    work(step, patience)
}

/// As [`serve`], without a change to what signals do to this process.
pub(super) fn work(step: &Step, patience: Duration) -> io::Result<()> {
    let listener = message::listen(step).map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => {
            io::Error::new(error.kind(), "another process is this task already")
        }
        _ => error,
    })?;
    let (sender, events) = channel();
    let came = sender.clone();
    std::thread::Builder::new().name("tasks".into()).spawn(move || {
        loop {
            let event = match listener.accept() {
                Ok((stream, _)) => Event::Came(stream),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => Event::Deaf(error),
            };
            let ends = matches!(event, Event::Deaf(_));
            if came.send(event).is_err() || ends {
                break;
            }
        }
    })?;
    attend(step, patience, &sender, &events)
}

/// Counts connections until the last one has ended.
fn attend(
    step: &Step,
    patience: Duration,
    sender: &Sender<Event>,
    events: &Receiver<Event>,
) -> io::Result<()> {
    let mut open = 0;
    loop {
        let limit = if open == 0 { patience } else { Duration::MAX };
        match events.recv_timeout(limit) {
            Ok(Event::Came(stream)) => {
                // Another user's connection is closed, and does not count.
                if message::has_same_user(&stream).is_err() {
                    continue;
                }
                open += 1;
                let (left, step) = (sender.clone(), step.clone());
                std::thread::Builder::new().spawn(move || {
                    // The caller is gone: an error has no receiver.
                    let _ = answer(&step, &stream);
                    drop(stream);
                    let _ = left.send(Event::Left);
                })?;
            }
            Ok(Event::Left) => {
                open -= 1;
                if open == 0 {
                    return Ok(());
                }
            }
            Ok(Event::Deaf(error)) => return Err(error),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                let seconds = patience.as_secs_f64();
                let why = format!("task 0 did not come within {seconds} s; is it this program?");
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
        }
    }
}

/// Does what a connection asks for, until it is closed.
fn answer(step: &Step, stream: &UnixStream) -> io::Result<()> {
    let (request, descriptors) = message::receive(stream)?;
    match request {
        Request::Attend => {
            message::send(stream, &Answer::Present, &[])?;
            let mut stream = stream;
            stream.read(&mut [0]).map(drop)
        }
        Request::Gpu => {
            let answer = own_gpu(step).map_or_else(Answer::Failed, Answer::Gpu);
            message::send(stream, &answer, &[])
        }
        Request::Start { tag } => match <[OwnedFd; 2]>::try_from(descriptors) {
            Ok([connection, meeting]) => start(stream, connection, meeting, tag),
            Err(_) => {
                let why = "the process's descriptors are missing".to_owned();
                message::send(stream, &Answer::Failed(why), &[])
            }
        },
    }
}

/// Starts a rank's process, and reports its end, unless the connection ends first.
fn start(stream: &UnixStream, connection: OwnedFd, meeting: OwnedFd, tag: u64) -> io::Result<()> {
    let place = Some(meeting.as_raw_fd());
    let started = job_of_rank(place)
        .and_then(|job| process::supervised(job, connection.as_raw_fd(), tag, place, None));
    // The process has them, and its end must be seen where the other ends are.
    drop((connection, meeting));
    let mut process = match started {
        Ok(process) => process,
        Err(error) => return message::send(stream, &Answer::Failed(error.to_string()), &[]),
    };
    message::send(stream, &Answer::Started(process.id()), &[])?;
    match process.wait_unless_closed(stream)? {
        Some(status) => message::send(stream, &Answer::Ended(status.into_raw()), &[]),
        None => Ok(()),
    }
}
