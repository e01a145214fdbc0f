//! Runs the cases of a plan on several devices at the same time. Each device is an emulator that
//! computes with one thread.
//!
//! The main thread assigns the cases, records results and shrinks failing cases. Each worker thread
//! has a device and runs what it gets. A worker takes the cases of one operator one after the
//! other: its modules are compiled once, and two operators compile at the same time. When every
//! operator has a worker, a free worker helps with the longest one. Cases in flight together take
//! no more memory than one case may take.

use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Scope, ScopedJoinHandle};

use anyhow::Result;
use dsv4_runtime::Device;

use crate::case::Case;
use crate::judge::checks::CheckOptions;
use crate::judge::runner::Runner;
use crate::operator::size;
use crate::operators::registry;
use crate::record::Origin;
use crate::sweep::progress::Progress;
use crate::sweep::{self, Observer, PlannedCase, Ran, SweepOptions, Turn};

/// Opens the device of one thread.
pub type Open<'a> = dyn Fn() -> Result<Device> + Sync + 'a;

/// Calls `work` with each number below `count`, on that many threads, each with a device.
///
/// # Errors
/// A device that cannot be opened; the first error of `work` on a thread, which ends the thread.
pub fn each(
    count: usize,
    devices: usize,
    open: &Open<'_>,
    work: &(dyn Fn(&Device, usize) -> Result<()> + Sync),
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let thread = || -> Result<()> {
        let device = open()?;
        loop {
            match next.fetch_add(1, Ordering::Relaxed) {
                number if number < count => work(&device, number)?,
                _ => return Ok(()),
            }
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..devices.max(1)).map(|_| scope.spawn(thread)).collect();
        threads.into_iter().try_for_each(|one| one.join().unwrap_or_else(|e| resume_unwind(e)))
    })
}

/// Runs these cases, each with its number in the plan, on that many devices. `runner` shrinks
/// failing cases.
///
/// # Errors
/// A device that cannot be opened. Results reported before stay reported.
pub fn run(
    cases: Vec<(u64, PlannedCase)>,
    devices: usize,
    open: &Open<'_>,
    runner: &dyn Runner,
    options: &SweepOptions,
    progress: &mut Progress,
    observer: &mut dyn Observer,
) -> Result<()> {
    let mut queue = Queue::new(cases, devices);
    std::thread::scope(|scope| {
        let (ran, results) = channel();
        let workers: Vec<_> = (0..devices)
            .map(|at| Worker::start(scope, at, open, options.checks, ran.clone()))
            .collect();
        drop(ran);
        let mut flight = Flight { in_flight: (0..devices).map(|_| None).collect(), bytes: 0 };
        loop {
            flight.fill(&mut queue, &workers, options, progress);
            if flight.is_empty() {
                break;
            }
            // A thread that ends while cases are left has failed: joining it returns the error.
            let Ok((at, Some(ran))) = results.recv() else { break };
            let Some(planned) = flight.land(at) else { break };
            // The free thread continues before this result is reported and shrunk.
            flight.fill(&mut queue, &workers, options, progress);
            sweep::settle(planned, ran, runner, options, progress, observer);
        }
        workers.into_iter().try_for_each(Worker::join)
    })
}

/// A case and the memory that it takes.
struct Job {
    number: u64,
    planned: PlannedCase,
    bytes: u128,
}

/// Cases not yet assigned: runs of cases of one operator, in the order of the plan.
struct Queue {
    batches: Vec<VecDeque<Job>>,
    /// The current batch of each thread.
    own: Vec<Option<usize>>,
    /// The first batch that no thread has taken.
    next: usize,
}

impl Queue {
    fn new(cases: Vec<(u64, PlannedCase)>, threads: usize) -> Self {
        let mut batches: Vec<VecDeque<Job>> = Vec::new();
        for (number, planned) in cases {
            let operator = registry::find(&planned.case.operator);
            let bytes = operator.and_then(|operator| operator.bytes(&planned.case)).unwrap_or(0);
            let job = Job { number, planned, bytes };
            match batches
                .last_mut()
                .filter(|batch| batch[0].planned.case.operator == job.planned.case.operator)
            {
                Some(batch) => batch.push_back(job),
                None => batches.push([job].into()),
            }
        }
        Self { batches, own: vec![None; threads], next: 0 }
    }

    /// The batch that a thread takes its next case from.
    fn batch_for(&mut self, thread: usize) -> Option<usize> {
        let own = self.own[thread].filter(|&batch| !self.batches[batch].is_empty());
        let batch = own.or_else(|| self.untaken()).or_else(|| self.longest());
        self.own[thread] = batch;
        batch
    }

    fn untaken(&mut self) -> Option<usize> {
        let batch =
            (self.next..self.batches.len()).find(|&batch| !self.batches[batch].is_empty())?;
        self.next = batch + 1;
        Some(batch)
    }

    fn longest(&self) -> Option<usize> {
        let left = (0..self.batches.len()).filter(|&batch| !self.batches[batch].is_empty());
        left.max_by_key(|&batch| self.batches[batch].len())
    }

    /// The next case for a thread. Cases that do not run are counted. `None` where no case is left,
    /// or where the next one takes more than `room`.
    fn next_for(
        &mut self,
        thread: usize,
        room: Option<u128>,
        options: &SweepOptions,
        progress: &mut Progress,
    ) -> Option<Job> {
        while let Some(batch) = self.batch_for(thread) {
            let fits = |job: &Job| room.is_none_or(|room| job.bytes <= room);
            if !self.batches[batch].front().is_some_and(fits) {
                return None;
            }
            let job = self.batches[batch].pop_front()?;
            if progress.admits(&job.planned, options) {
                return Some(job);
            }
        }
        None
    }
}

/// The cases in flight.
struct Flight {
    in_flight: Vec<Option<(PlannedCase, u128)>>,
    bytes: u128,
}

impl Flight {
    fn is_empty(&self) -> bool {
        self.in_flight.iter().all(Option::is_none)
    }

    /// Gives every free thread a case, as long as cases are left and memory allows.
    fn fill(
        &mut self,
        queue: &mut Queue,
        workers: &[Worker<'_>],
        options: &SweepOptions,
        progress: &mut Progress,
    ) {
        for (thread, worker) in workers.iter().enumerate() {
            if self.in_flight[thread].is_some() {
                continue;
            }
            // A case that runs without others has the memory that every case may have.
            let room = (!self.is_empty())
                .then(|| u128::from(size::limit().number()).saturating_sub(self.bytes));
            let Some(job) = queue.next_for(thread, room, options, progress) else { continue };
            self.bytes += job.bytes;
            worker.give(job.number, &job.planned);
            self.in_flight[thread] = Some((job.planned, job.bytes));
        }
    }

    fn land(&mut self, thread: usize) -> Option<PlannedCase> {
        let (planned, bytes) = self.in_flight[thread].take()?;
        self.bytes -= bytes;
        Some(planned)
    }
}

/// What a thread gets of a planned case.
type Given = (u64, Case, Origin, Turn);

/// A thread with a device.
struct Worker<'scope> {
    jobs: Sender<Given>,
    thread: ScopedJoinHandle<'scope, Result<()>>,
}

impl<'scope> Worker<'scope> {
    fn start<'env>(
        scope: &'scope Scope<'scope, 'env>,
        at: usize,
        open: &'scope Open<'env>,
        checks: CheckOptions,
        results: Sender<(usize, Option<Ran>)>,
    ) -> Self {
        let (jobs, given) = channel();
        let results = Results { at, sender: results };
        Self { jobs, thread: scope.spawn(move || work(open, checks, &given, &results)) }
    }

    fn give(&self, number: u64, planned: &PlannedCase) {
        // Joining the thread reports why it ended.
        let (case, turn) = (planned.case.clone(), planned.turn.clone());
        let _ = self.jobs.send((number, case, planned.origin, turn));
    }

    fn join(self) -> Result<()> {
        drop(self.jobs);
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// Sends what a thread ran, and `None` when the thread ends for any reason.
struct Results {
    at: usize,
    sender: Sender<(usize, Option<Ran>)>,
}

impl Drop for Results {
    fn drop(&mut self) {
        // After the last case nothing receives any more.
        let _ = self.sender.send((self.at, None));
    }
}

/// Runs the jobs of one thread on its own device.
fn work(
    open: &Open<'_>,
    checks: CheckOptions,
    given: &Receiver<Given>,
    results: &Results,
) -> Result<()> {
    let device = open()?;
    // As many threads as cores run already: more threads for an oracle would only wait for each
    // other.
    let alone = rayon::ThreadPoolBuilder::new().num_threads(1).build();
    let run = |number, case: &Case, origin, turn: &Turn| {
        Ran::of((case, origin, turn), number, &device, checks)
    };
    for (number, case, origin, turn) in given {
        let ran = match &alone {
            Ok(alone) => alone.install(|| run(number, &case, origin, &turn)),
            Err(_) => run(number, &case, origin, &turn),
        };
        if results.sender.send((results.at, Some(ran))).is_err() {
            break;
        }
    }
    Ok(())
}
