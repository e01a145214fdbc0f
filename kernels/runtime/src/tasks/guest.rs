//! A process in another task, as task 0 sees it.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::Duration;

use super::message::{Answer, Request};
use super::{PATIENCE, Tasks, is_late, message};

/// How long a task may take to end a process with all that it started.
const END: Duration = Duration::from_secs(12);

/// A process in another task. When dropped, it is ended there with all processes that it started,
/// and waited for.
pub(crate) struct Guest {
    tasks: &'static Tasks,
    task: usize,
    id: u32,
    /// Closed, it ends the process.
    stream: UnixStream,
    ended: Option<ExitStatus>,
}

impl Guest {
    /// Starts a rank's process in a task: `connection` is the process's end of its connection, and
    /// `tag` that of its first message.
    ///
    /// # Errors
    /// A task that has ended, and those of the task.
    pub(crate) fn start(
        tasks: &'static Tasks,
        task: usize,
        [connection, meeting]: [BorrowedFd<'_>; 2],
        tag: u64,
    ) -> io::Result<Self> {
        let stream = tasks.connect(task)?;
        let answered = message::send(&stream, &Request::Start { tag }, &[connection, meeting])
            .and_then(|()| stream.set_read_timeout(Some(PATIENCE)))
            .and_then(|()| message::receive(&stream));
        match answered.inspect_err(|error| tasks.note(task, error))? {
            (Answer::Started(id), _) => Ok(Self { tasks, task, id, stream, ended: None }),
            (Answer::Failed(why), _) => Err(io::Error::other(why)),
            _ => Err(message::unexpected()),
        }
    }

    /// Its number, as its task knows it.
    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    /// What ends the process when it is shut down, while others wait for its answer.
    pub(crate) fn ender(&self) -> io::Result<UnixStream> {
        Ok(self.stream.as_fd().try_clone_to_owned()?.into())
    }

    /// Waits for its end; `None` when the time limit is over.
    ///
    /// # Errors
    /// A task that has ended, and its processes with it.
    pub(crate) fn wait_within(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        if self.ended.is_some() {
            return Ok(self.ended);
        }
        // A limit of zero would mean no limit.
        self.stream.set_read_timeout(Some(limit.max(Duration::from_millis(1))))?;
        match message::receive(&self.stream) {
            Ok((Answer::Ended(status), _)) => {
                self.ended = Some(ExitStatus::from_raw(status));
                Ok(self.ended)
            }
            Ok(_) => Err(message::unexpected()),
            Err(error) if is_late(&error) => Ok(None),
            Err(error) => {
                self.tasks.note(self.task, &error);
                Err(error)
            }
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // The task closes its end when the process and all that it started are gone.
        let ends = self.stream.shutdown(Shutdown::Write);
        let waits = ends.and_then(|()| self.stream.set_read_timeout(Some(END)));
        while waits.is_ok() && message::receive::<Answer>(&self.stream).is_ok() {}
    }
}
