//! The tasks of a Slurm step as the places of ranks: `srun -N 1 -n 4` starts four tasks, and rank
//! `r` of a world is a process in task `r`.
//!
//! Slurm gives each task its control group, its cores and its GPUs. Task 0 does the program's work,
//! as without Slurm. Each other task is an [agent](serve): it listens on an abstract Unix socket
//! whose name has the user, the job, the step and the task. Task 0 connects to all of them before
//! it does anything ([`join`]), and asks them for processes. It sends their end of the connection
//! and the memory in which ranks meet, as descriptors. Both sides require that the other one has
//! the same user.
//!
//! An agent ends when no process of task 0 is connected any more, with all processes that it
//! started. So nothing is left after any end of task 0. Processes of an agent that ends, end with
//! it.
//!
//! - [`step`]: which step this process is a task of, from Slurm's variables.
//! - [`agent`]: what the other tasks do.
//! - [`guest`]: a process in another task, as task 0 sees it.
//! - [`message`]: the messages between them, with descriptors.

mod agent;
mod guest;
mod message;
mod step;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

pub use self::agent::serve;
pub(crate) use self::guest::Guest;
use self::message::{Answer, Request};
pub use self::step::Step;
use crate::cuda;
use crate::error::{Result, RuntimeError};

/// How long a task waits for the others: Slurm starts the tasks of a step at the same time.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// How often a task looks for another one that does not listen yet.
const LOOK: Duration = Duration::from_millis(5);

/// The tasks of this process's step, if it has joined them.
static JOINED: OnceLock<Tasks> = OnceLock::new();

/// What task 0 does when another task is gone: ranks of it cannot go on.
type Lost = Box<dyn Fn(usize) + Send + Sync>;

/// The tasks of a step, as task 0 sees them.
pub struct Tasks {
    step: Step,
    /// Open for as long as this process lives: the other tasks end with them.
    attended: Vec<UnixStream>,
    /// The GPU of each task, once it is known.
    gpus: Vec<OnceLock<Gpu>>,
    lost: Lost,
}

/// The GPU of a task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// Its number among those that the task sees.
    pub ordinal: u32,
    /// Its id, which is that of no other GPU.
    pub uuid: String,
}

/// Makes this process, which is task 0 of a step, ask the other tasks for the processes of its
/// ranks from now on. `lost` is called by whoever needs a task that has ended; it should end this
/// process.
///
/// # Errors
/// Names the task that did not come within `patience`, or that belongs to another user.
pub fn join(
    step: Step,
    patience: Duration,
    lost: impl Fn(usize) + Send + Sync + 'static,
) -> io::Result<()> {
    let tasks = Tasks::of(step, patience, Box::new(lost))?;
    let again = || io::Error::new(io::ErrorKind::AlreadyExists, "the tasks were joined before");
    JOINED.set(tasks).map_err(|_| again())
}

/// The tasks that this process has joined.
pub fn joined() -> Option<&'static Tasks> {
    JOINED.get()
}

/// Why a world cannot have this many ranks here; `None` where it can.
pub fn too_many(ranks: usize) -> Option<String> {
    let tasks = joined()?.count();
    (ranks > tasks).then(|| format!("{ranks} ranks, and srun started {tasks} tasks"))
}

impl Tasks {
    fn of(step: Step, patience: Duration, lost: Lost) -> io::Result<Self> {
        let start = Instant::now();
        let attend = |task| {
            attend(&step, task, start, patience).map_err(|error| {
                let of = step.tasks;
                io::Error::new(error.kind(), format!("task {task} of {of} of srun: {error}"))
            })
        };
        let attended = (1..step.tasks).map(attend).collect::<io::Result<_>>()?;
        let gpus = (0..step.tasks).map(|_| OnceLock::new()).collect();
        Ok(Self { step, attended, gpus, lost })
    }

    /// Their number.
    pub fn count(&self) -> usize {
        self.step.tasks
    }

    /// The step.
    pub fn step(&self) -> &Step {
        &self.step
    }

    /// The first of the other tasks that has ended.
    pub fn ended(&self) -> Option<usize> {
        (1..)
            .zip(&self.attended)
            .find(|(_, stream)| message::is_closed(stream))
            .map(|(task, _)| task)
    }

    /// A connection to another task, for one request.
    fn connect(&self, task: usize) -> io::Result<UnixStream> {
        message::connect(&self.step, task).inspect_err(|error| self.note(task, error))
    }

    /// Notes an error of a connection to a task, which may have ended.
    fn note(&self, task: usize, error: &io::Error) {
        if is_gone(error) {
            (self.lost)(task);
        }
    }

    /// The GPU of a task's rank.
    ///
    /// # Errors
    /// [`RuntimeError::BackendMissing`] for a task that sees none.
    pub fn gpu(&self, task: usize) -> Result<Gpu> {
        if let Some(gpu) = self.gpus[task].get() {
            return Ok(gpu.clone());
        }
        let missing = |why: String| RuntimeError::BackendMissing {
            backend: "cuda",
            reason: format!("task {task} of srun: {why}"),
        };
        let gpu = match task {
            0 => own_gpu(&self.step).map_err(missing)?,
            _ => self.asked_gpu(task).map_err(|error| missing(error.to_string()))?,
        };
        Ok(self.gpus[task].get_or_init(|| gpu).clone())
    }

    fn asked_gpu(&self, task: usize) -> io::Result<Gpu> {
        let stream = self.connect(task)?;
        message::send(&stream, &Request::Gpu, &[])?;
        stream.set_read_timeout(Some(PATIENCE))?;
        match message::receive(&stream)?.0 {
            Answer::Gpu(gpu) => Ok(gpu),
            Answer::Failed(why) => Err(io::Error::other(why)),
            _ => Err(message::unexpected()),
        }
    }

    /// How many GPUs the first `size` tasks have. Two tasks that see one GPU have one.
    ///
    /// # Errors
    /// As [`Self::gpu`].
    pub fn gpus_of(&self, size: usize) -> Result<usize> {
        let gpus: Result<BTreeSet<String>> =
            (0..size.min(self.count())).map(|task| Ok(self.gpu(task)?.uuid)).collect();
        Ok(gpus?.len())
    }
}

/// Connects to a task that may not listen yet, or that is the one of an earlier program of this
/// step and about to end.
fn attend(step: &Step, task: usize, start: Instant, patience: Duration) -> io::Result<UnixStream> {
    loop {
        let attended = message::connect(step, task).and_then(|stream| {
            message::send(&stream, &Request::Attend, &[])?;
            // A limit of zero would mean no limit.
            let left = patience.saturating_sub(start.elapsed()).max(LOOK);
            stream.set_read_timeout(Some(left))?;
            let (Answer::Present, _) = message::receive(&stream)? else {
                return Err(message::unexpected());
            };
            Ok(stream)
        });
        match attended {
            Err(error) if is_gone(&error) || is_late(&error) => {}
            other => return other,
        }
        if start.elapsed() >= patience {
            let seconds = patience.as_secs_f64();
            let why = format!("it did not come within {seconds} s; is it this program?");
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
        std::thread::sleep(LOOK);
    }
}

/// Whether a task is not there yet, or no longer.
fn is_gone(error: &io::Error) -> bool {
    use io::ErrorKind as K;
    let kinds = [K::ConnectionRefused, K::ConnectionReset, K::BrokenPipe, K::UnexpectedEof];
    kinds.contains(&error.kind())
}

/// Whether the time limit of a connection is over.
fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// The GPU of the task that this process is: the only one that it sees, or the one of its number on
/// the host.
fn own_gpu(step: &Step) -> std::result::Result<Gpu, String> {
    let uuids = cuda::device_uuids().map_err(|error| error.to_string())?;
    chosen(&uuids, step.local).ok_or_else(|| "it sees no GPU".into())
}

fn chosen(uuids: &[String], local: usize) -> Option<Gpu> {
    let ordinal = local.checked_rem(uuids.len())?;
    Some(Gpu { ordinal: ordinal as u32, uuid: uuids[ordinal].clone() })
}
