//! A process for each rank of a case. All get their requests at the same time, in the folders
//! [`folder_of`] of one folder, and may meet at the address that their environment names, as
//! `torch.distributed` does.
//!
//! The first failure ends the run of a case: other ranks may wait in a collective for one that does
//! not come. Then all processes end, and the next run starts new ones.

use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::process::{Call, Cause, Failure, LAST_WORDS, OneShot, Reply, Stop, Variables, Worker};
use crate::judge::runner::RunError;
use crate::record::Seconds;

/// How long other ranks may still say what they know after one has failed: of a process that ended,
/// it takes [`LAST_WORDS`] to learn how.
const GRACE: Duration = LAST_WORDS.saturating_mul(2);

/// The folder of a rank within that of a run.
pub fn folder_of(run: &Path, rank: usize) -> PathBuf {
    run.join(format!("rank{rank}"))
}

/// A rank among all, in words.
pub fn named(rank: usize, ranks: usize) -> String {
    format!("rank {rank} of {ranks}")
}

/// Processes of ranks.
pub struct Crew {
    members: Vec<Member>,
    stop: Stop,
}

/// The process of a rank.
enum Member {
    Worker(Worker),
    OneShot(OneShot),
}

impl Member {
    /// The terms of its next process.
    fn begin(&mut self, variables: Variables) {
        match self {
            Self::Worker(worker) => worker.variables = variables,
            Self::OneShot(command) => command.variables = variables,
        }
    }

    fn answer(&mut self, folder: &Path) -> Result<Reply, Failure> {
        match self {
            Self::Worker(worker) => worker.answer(folder),
            Self::OneShot(command) => command.answer(folder),
        }
    }

    fn runs(&mut self) -> bool {
        match self {
            Self::Worker(worker) => worker.runs(),
            Self::OneShot(_) => false,
        }
    }

    fn end(&mut self) {
        if let Self::Worker(worker) = self {
            worker.end();
        }
    }

    fn worker(&mut self) -> Option<&mut Worker> {
        match self {
            Self::Worker(worker) => Some(worker),
            Self::OneShot(_) => None,
        }
    }
}

impl Crew {
    /// Workers that are started with the first request, one for each rank.
    pub fn of_workers(command: &str, time_limit: Duration, ranks: usize) -> Self {
        Self::of(ranks, |stop| {
            let mut worker = Worker::new(command.to_owned(), time_limit);
            worker.stop = stop;
            Member::Worker(worker)
        })
    }

    /// Commands that are run for each request, one for each rank.
    pub fn of_commands(command: &str, time_limit: Duration, ranks: usize) -> Self {
        Self::of(ranks, |stop| {
            let mut command = OneShot::new(command.to_owned(), time_limit);
            command.stop = stop;
            Member::OneShot(command)
        })
    }

    fn of(ranks: usize, member: impl Fn(Stop) -> Member) -> Self {
        let stop = Stop::default();
        Self { members: (0..ranks).map(|_| member(stop.clone())).collect(), stop }
    }

    /// Ends all processes, and sets the terms of the next ones: a world with another port.
    fn begin(&mut self) -> Result<(), RunError> {
        self.members.iter_mut().for_each(Member::end);
        let port = free_port()
            .map_err(|e| RunError::error(format!("finding a free port for the ranks: {e}")))?;
        let size = self.members.len();
        for (rank, member) in self.members.iter_mut().enumerate() {
            member.begin(vec![
                ("RANK", rank.to_string()),
                ("LOCAL_RANK", rank.to_string()),
                ("WORLD_SIZE", size.to_string()),
                ("MASTER_ADDR", Ipv4Addr::LOCALHOST.to_string()),
                ("MASTER_PORT", port.to_string()),
            ]);
        }
        Ok(())
    }

    /// The answers of all ranks, by rank.
    fn answers(&mut self, folder: &Path) -> Vec<Result<Reply, Failure>> {
        self.stop.set(false);
        let (members, stop) = (&mut self.members, &self.stop);
        let ranks = members.len();
        std::thread::scope(|scope| {
            let (sender, answers) = mpsc::channel();
            for (rank, member) in members.iter_mut().enumerate() {
                let (sender, folder) = (sender.clone(), folder_of(folder, rank));
                // The receiver waits for all.
                scope.spawn(move || sender.send((rank, member.answer(&folder))).is_ok());
            }
            drop(sender);
            gathered(ranks, &answers, stop)
        })
    }

    /// The error of a rank whose worker cannot start, if it ended during its first request and ends
    /// without one as well. It may need the others to get that far.
    fn cannot_start(&mut self, rank: usize, lived: Duration) -> Option<RunError> {
        self.start().ok()?;
        let error = self.members[rank].worker()?.ends_idle_within(LAST_WORDS.max(2 * lived))?;
        Some(of_rank(error, rank, self.members.len()))
    }
}

/// A port of this machine that nothing listens at.
fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// An error with the rank that it is of.
pub fn of_rank(error: RunError, rank: usize, ranks: usize) -> RunError {
    RunError { message: format!("{}: {}", named(rank, ranks), error.message), ..error }
}

/// Waits for the answers of all ranks. After a failure it waits no longer than [`GRACE`], and not at
/// all where it knows that a process has ended.
fn gathered(
    ranks: usize,
    answers: &Receiver<(usize, Result<Reply, Failure>)>,
    stop: &Stop,
) -> Vec<Result<Reply, Failure>> {
    let mut found: Vec<_> = (0..ranks).map(|_| None).collect();
    let mut until: Option<Instant> = None;
    loop {
        let received = match until {
            Some(until) => answers.recv_timeout(until.saturating_duration_since(Instant::now())),
            None => answers.recv().map_err(RecvTimeoutError::from),
        };
        match received {
            Ok((rank, answer)) => {
                match answer.as_ref().err().map(|failure| failure.cause) {
                    Some(Cause::Ended) => stop.set(true),
                    Some(Cause::Answered | Cause::Late) => {
                        until.get_or_insert_with(|| Instant::now() + GRACE);
                    }
                    _ => {}
                }
                found[rank] = Some(answer);
            }
            Err(RecvTimeoutError::Timeout) => {
                stop.set(true);
                until = None;
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    found.into_iter().flatten().collect()
}

/// What the answers of all ranks are together.
fn joined(answers: Vec<Result<Reply, Failure>>) -> Result<Reply, RunError> {
    let ranks = answers.len();
    let of = |cause| {
        let is = |answer: &Result<Reply, Failure>| {
            answer.as_ref().err().is_some_and(|failure| failure.cause == cause)
        };
        answers.iter().filter(|answer| is(answer)).count()
    };
    let unsupported = of(Cause::Unsupported);
    let (mut replies, mut failures) = (Vec::new(), Vec::new());
    for (rank, answer) in answers.into_iter().enumerate() {
        match answer {
            Ok(reply) => replies.push((rank, reply)),
            Err(failure) => failures.push((rank, failure)),
        }
    }
    if failures.is_empty() {
        return Ok(reply_of(replies.into_iter().map(|(_, reply)| reply).collect()));
    }
    failures.sort_by_key(|(rank, failure)| (failure.cause, *rank));
    if unsupported == ranks {
        return Err(failures.swap_remove(0).1.error);
    }
    let untestable = failures[0].1.error.untestable;
    let said = failures.iter().filter(|(_, failure)| failure.cause != Cause::Stopped);
    let said = said.map(|(rank, failure)| {
        let message = match failure.cause {
            Cause::Unsupported => {
                format!("the case is unsupported ({}), and not on all ranks", failure.error.message)
            }
            _ => failure.error.message.clone(),
        };
        format!("{}: {message}", named(*rank, ranks))
    });
    let mut said: Vec<String> = said.collect();
    if unsupported > 0 {
        let answered = replies.iter().map(|(rank, _)| format!("{}: it ran", named(*rank, ranks)));
        said.extend(answered);
    }
    Err(RunError { untestable, ..RunError::error(said.join("\n  ")) })
}

/// One reply for all ranks: the time of the slowest, and the kernels that ran.
fn reply_of(replies: Vec<Reply>) -> Reply {
    let slowest = |time: fn(&Seconds) -> Option<f64>| {
        let times: Option<Vec<f64>> =
            replies.iter().map(|reply| reply.seconds.as_ref().and_then(time)).collect();
        times.and_then(|times| times.into_iter().reduce(f64::max))
    };
    let (forward, backward) = (slowest(|of| of.forward), slowest(|of| of.backward));
    let some = forward.or(backward).is_some();
    let mut kernels: Vec<_> = replies.iter().map(|reply| reply.kernel.as_deref()).collect();
    kernels.sort_unstable();
    kernels.dedup();
    let kernel = match &kernels[..] {
        [None] | [] => None,
        all => {
            Some(all.iter().map(|name| name.unwrap_or("unnamed")).collect::<Vec<_>>().join(", "))
        }
    };
    Reply { seconds: some.then_some(Seconds { forward, backward }), kernel }
}

impl Call for Crew {
    fn start(&mut self) -> Result<(), RunError> {
        self.begin()?;
        let ranks = self.members.len();
        for (rank, member) in self.members.iter_mut().enumerate() {
            let started = member.worker().map_or(Ok(()), Worker::start);
            started.map_err(|error| of_rank(error, rank, ranks))?;
        }
        Ok(())
    }

    fn still_runs(&mut self) -> Result<(), RunError> {
        let ranks = self.members.len();
        for (rank, member) in self.members.iter_mut().enumerate() {
            let runs = member.worker().map_or(Ok(()), Worker::still_runs);
            runs.map_err(|error| of_rank(error, rank, ranks))?;
        }
        Ok(())
    }

    fn call(&mut self, folder: &Path) -> Result<Reply, RunError> {
        // The world of a process is over where another one has ended.
        if !self.members.iter_mut().all(Member::runs) {
            self.begin()?;
        }
        let answers = self.answers(folder);
        let ended = answers.iter().enumerate().find_map(|(rank, answer)| {
            Some((rank, answer.as_ref().err().and_then(|failure| failure.unproven)?))
        });
        let error = match joined(answers) {
            Err(error) if !error.unsupported => error,
            joined => return joined,
        };
        let cannot_start = ended.and_then(|(rank, lived)| self.cannot_start(rank, lived));
        self.members.iter_mut().for_each(Member::end);
        Err(cannot_start.unwrap_or(error))
    }
}
