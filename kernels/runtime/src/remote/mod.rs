//! A device in a separate process.
//!
//! An illegal address or instruction of a kernel makes a GPU's context unusable for the rest of its
//! process, and an endless kernel blocks it for ever. So the context is in a [worker
//! process](super::worker): `host` is its side, with the actual device, and [`RemoteBackend`] has
//! the same interface here. A fault fails the launch that caused it, with the driver's message. A
//! request that takes too long ends the process, and counts as the fault of the last launch. The
//! next case gets a new process, after all memory of the old one was freed.

pub(super) mod host;
mod message;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, AsRawFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use self::message::{Answer, Request, Span};
use super::backend::{
    Allocation, Backend, BackendKind, Environment, KernelExports, LoadedModule, Placement,
    Recorded, Recorder, Reservation,
};
use super::error::{Result, RuntimeError};
use super::matrix::{MatrixLibrary, MatrixProduct};
use super::source::SourceTree;
use super::tasks::Tasks;
use super::tensor_map::{MapWords, TensorMap};
use super::worker::process::{Ender, Process};
use super::worker::program::Job;
use super::world::Call;
use super::world::meeting::{Meeting, Seat};

/// Time limit of the compilation of a module.
const COMPILE_LIMIT: Duration = Duration::from_secs(600);

/// The most kernels that an error names.
const NAMED: usize = 8;

/// The name of its job in the table of jobs.
pub(super) const JOB: &str = "device";

/// The name of a library's GEMM in errors.
const LIBRARY: &str = "a library's matrix product";

/// What a process starts with.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Place {
    /// The descriptor of the memory in which it meets the other ranks, if it is a rank.
    pub meeting: Option<i32>,
}

/// The job of a rank's process, with the descriptor of the memory in which ranks meet.
pub(super) fn job_of_rank(meeting: Option<i32>) -> io::Result<Job> {
    Job::new(JOB, Place { meeting })
}

/// A rank's part of a crew of processes.
#[derive(Clone)]
pub struct Rank {
    /// Where the ranks meet.
    pub meeting: Arc<Meeting>,
    /// The number of its GPU, among those that its process sees; `None` for the chosen one.
    pub ordinal: Option<u32>,
    /// The task that starts its process; `None` for this one.
    pub task: Option<(&'static Tasks, usize)>,
}

/// Options of a device in another process.
#[derive(Clone, Copy, Debug)]
pub struct RemoteOptions {
    /// A longer request fails; its time includes a launch and all that waits for it.
    pub time_limit: Duration,
}

impl Default for RemoteOptions {
    fn default() -> Self {
        Self { time_limit: Duration::from_secs(120) }
    }
}

/// A device in a separate process.
pub struct RemoteBackend {
    remote: Arc<Remote>,
    environment: Environment,
    records: bool,
    /// Whether the process has a library for GEMMs: the search for it takes time.
    multiplies: OnceLock<bool>,
}

/// The process, and its successors.
struct Remote {
    kind: BackendKind,
    cache_dir: PathBuf,
    options: RemoteOptions,
    rank: Option<Rank>,
    /// The number of the running process, if there is one, and what ends it while others wait for
    /// its answer.
    running: Mutex<Option<(u32, Ender)>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    process: Option<Process>,
    /// Processes started so far.
    started: u64,
    schedule: Option<u64>,
    /// Addresses of allocations in the running process.
    live: HashSet<u64>,
    /// Addresses of allocations in an ended process that are not freed yet.
    stale: HashSet<u64>,
    /// Kernels launched since the last wait for the device, the latest last.
    launched: Vec<String>,
}

impl RemoteBackend {
    /// A device of this kind, in a new process.
    ///
    /// # Errors
    /// [`RuntimeError::BackendMissing`] if there is no such device; a process that cannot be
    /// started.
    pub fn open(kind: BackendKind, cache_dir: PathBuf, options: RemoteOptions) -> Result<Self> {
        Self::start(kind, cache_dir, options, None)
    }

    /// A device of this kind, in a new process that is one of several ranks.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn of_rank(
        kind: BackendKind,
        cache_dir: PathBuf,
        options: RemoteOptions,
        rank: Rank,
    ) -> Result<Self> {
        Self::start(kind, cache_dir, options, Some(rank))
    }

    fn start(
        kind: BackendKind,
        cache_dir: PathBuf,
        options: RemoteOptions,
        rank: Option<Rank>,
    ) -> Result<Self> {
        let (running, state) = Default::default();
        let remote = Arc::new(Remote { kind, cache_dir, options, rank, running, state });
        let (environment, records) = remote.start(&mut remote.state())?;
        Ok(Self { remote, environment, records, multiplies: OnceLock::new() })
    }

    /// The number of the running process.
    pub fn process(&self) -> Option<u32> {
        self.remote.running().as_ref().map(|(id, _)| *id)
    }

    /// Kills the running process. Whoever waits for its answer gets an error.
    pub fn kill(&self) {
        if let Some((_, ender)) = &*self.remote.running() {
            ender.end();
        }
    }

    /// A name for a new world of the device's library of collectives.
    ///
    /// # Errors
    /// As [`Backend::name_of_world`].
    pub fn name_world(&self) -> Result<Vec<u8>> {
        self.ask(Request::NameWorld, &[]).map(|(_, name)| name)
    }

    /// Takes a seat in a world: of the library's with this name, or of shared memory without one.
    ///
    /// # Errors
    /// As [`Backend::collectives`].
    pub fn join(&self, seat: Seat, name: &[u8]) -> Result<()> {
        self.done(Request::Join(seat), name)
    }

    /// Takes part in a collective of the world that was joined last.
    ///
    /// # Errors
    /// As [`World::take_part`](super::world::World::take_part).
    pub fn take_part(&self, call: &Call) -> Result<()> {
        self.done(Request::TakePart(call.clone()), &[])
    }

    fn ask(&self, request: Request, bytes: &[u8]) -> Result<(Answer, Vec<u8>)> {
        self.remote.ask(&mut self.remote.state(), &request, bytes)
    }

    fn done(&self, request: Request, bytes: &[u8]) -> Result<()> {
        self.ask(request, bytes).map(drop)
    }

    /// Lets the other process measure or record the requests of `work`.
    fn span(&self, span: Span, work: &mut dyn FnMut() -> Result<()>) -> Result<Answer> {
        self.done(Request::Begin(span), &[])?;
        let begun = Begun { backend: self };
        let worked = work();
        std::mem::forget(begun);
        let ended = self.ask(Request::End { failed: worked.is_err() }, &[]);
        worked?;
        ended.map(|(answer, _)| answer)
    }

    fn taken(&self, span: Span, work: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
        match self.span(span, work)? {
            Answer::Taken(time) => Ok(time),
            _ => Err(unexpected()),
        }
    }

    fn has(&self, request: Request) -> Result<bool> {
        match self.ask(request, &[])? {
            (Answer::Has(has), _) => Ok(has),
            _ => Err(unexpected()),
        }
    }
}

/// A started span. It ends when dropped, also after a panic in its work: otherwise all later
/// requests would be in it.
struct Begun<'b> {
    backend: &'b RemoteBackend,
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        let _ = self.backend.ask(Request::End { failed: true }, &[]);
    }
}

fn unexpected() -> RuntimeError {
    RuntimeError::system(
        "asking the process that the device is in",
        io::Error::other("it answered something else"),
    )
}

impl Remote {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn running(&self) -> MutexGuard<'_, Option<(u32, Ender)>> {
        self.running.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Starts a process, in the task of a rank.
    fn process(&self) -> io::Result<Process> {
        let meeting = self.rank.as_ref().and_then(|rank| rank.meeting.file());
        match (self.rank.as_ref().and_then(|rank| rank.task), meeting) {
            (Some((tasks, task)), Some(meeting)) => Process::start_in(tasks, task, meeting.as_fd()),
            (_, meeting) => {
                let meeting = meeting.map(AsRawFd::as_raw_fd);
                Process::start(job_of_rank(meeting)?, meeting.as_slice(), None)
            }
        }
    }

    /// Starts a process, and opens the device in it.
    fn start(&self, state: &mut State) -> Result<(Environment, bool)> {
        let doing = |error| RuntimeError::system("starting a process for the device", error);
        state.started += 1;
        let process = self.process().map_err(doing)?;
        *self.running() = Some((process.id(), process.ender().map_err(doing)?));
        state.process = Some(process);
        let ordinal = self.rank.as_ref().and_then(|rank| rank.ordinal);
        let open = Request::Open { kind: self.kind, cache_dir: self.cache_dir.clone(), ordinal };
        let (Answer::Opened { environment, records }, _) = self.ask_running(state, &open, &[])?
        else {
            return Err(unexpected());
        };
        if state.schedule.is_some() {
            self.ask_running(state, &Request::Schedule { seed: state.schedule }, &[])?;
        }
        Ok((environment, records))
    }

    /// Sends a request to the running process, or to a new one.
    fn ask(&self, state: &mut State, request: &Request, bytes: &[u8]) -> Result<(Answer, Vec<u8>)> {
        if state.process.is_none() {
            // A new process may reuse their addresses.
            if !state.stale.is_empty() {
                return Err(self
                    .gone("the process that the device was in has ended, and its memory with it"));
            }
            self.start(state)?;
        }
        self.ask_running(state, request, bytes)
    }

    fn ask_running(
        &self,
        state: &mut State,
        request: &Request,
        bytes: &[u8],
    ) -> Result<(Answer, Vec<u8>)> {
        let Some(process) = &mut state.process else { return Err(self.gone("it does not run")) };
        let limit = match request {
            Request::Load { .. } => COMPILE_LIMIT.max(self.options.time_limit),
            // A rank waits for the others that long, and says then who did not come.
            Request::TakePart(_) => 2 * self.options.time_limit,
            _ => self.options.time_limit,
        };
        match process.ask(request, bytes, limit) {
            Ok((Answer::Failed { failure, lost }, _)) => {
                if lost {
                    self.lose(state);
                }
                Err(failure.into())
            }
            Ok(answered) => {
                state.note(request, &answered.0);
                Ok(answered)
            }
            Err(error) => {
                let late = format!("did not end within {} s", limit.as_secs_f64());
                let what = process.fate(&error, &late);
                let error = self.fault(state, request, what);
                self.lose(state);
                Err(error)
            }
        }
    }

    /// Marks the process as unusable.
    fn lose(&self, state: &mut State) {
        *self.running() = None;
        state.lose();
    }

    /// The error for a process that did not answer: the fault of its kernels, if it ran any.
    fn fault(&self, state: &State, request: &Request, what: String) -> RuntimeError {
        let own = match request {
            Request::Launch { kernel, .. } => Some(&kernel[..]),
            Request::Multiply(_) => Some(LIBRARY),
            _ => None,
        };
        let kernels: Vec<&str> = state.launched.iter().map(String::as_str).chain(own).collect();
        match (request, kernels.is_empty()) {
            (Request::Load { file, .. }, _) => RuntimeError::system(
                format!("compiling `{file}`"),
                io::Error::other(format!("its process {what}")),
            ),
            (_, true) | (Request::TakePart(_) | Request::Join(_), _) => {
                self.gone(&format!("it {what}"))
            }
            _ => {
                let kernel = kernels.join(", ");
                RuntimeError::Fault {
                    kernel,
                    block: "unknown".into(),
                    thread: "unknown".into(),
                    what,
                }
            }
        }
    }

    fn gone(&self, what: &str) -> RuntimeError {
        let doing = format!("asking the process of the {} device", self.kind);
        RuntimeError::system(doing, io::Error::new(io::ErrorKind::NotConnected, what))
    }
}

impl State {
    /// Records the effects of an answer.
    fn note(&mut self, request: &Request, answer: &Answer) {
        match (request, answer) {
            (
                _,
                Answer::Allocated(allocation) | Answer::Reserved(Reservation { allocation, .. }),
            ) => {
                self.live.insert(allocation.address);
            }
            (Request::Free(allocation), _) => {
                self.live.remove(&allocation.address);
            }
            (Request::Launch { kernel, .. }, _) => self.note_launch(kernel),
            (Request::Multiply(_), Answer::Has(true)) => self.note_launch(LIBRARY),
            // Each of them waits for the device.
            (Request::Synchronize | Request::Download { .. } | Request::Upload { .. }, _) => {
                self.launched.clear()
            }
            _ => {}
        }
    }

    fn note_launch(&mut self, kernel: &str) {
        if self.launched.last().is_some_and(|last| last == kernel) {
            return;
        }
        if self.launched.len() == NAMED {
            self.launched.remove(0);
        }
        self.launched.push(kernel.to_owned());
    }

    /// Marks the process as unusable.
    fn lose(&mut self) {
        self.process = None;
        self.launched.clear();
        self.stale.extend(self.live.drain());
    }
}

impl Backend for RemoteBackend {
    fn environment(&self) -> &Environment {
        &self.environment
    }

    fn load(
        &self,
        tree: &SourceTree,
        file: &str,
        defines: &[(String, String)],
    ) -> Result<Box<dyn LoadedModule>> {
        let request = Request::Load {
            tree: tree.part_of(file)?,
            file: file.to_owned(),
            defines: defines.to_vec(),
        };
        let module =
            RemoteModule { remote: self.remote.clone(), request, loaded: Mutex::default() };
        module.with(&mut self.remote.state(), |_, _| Ok(()))?;
        Ok(Box::new(module))
    }

    fn allocate(&self, name: &str, bytes: usize, placement: Placement) -> Result<Allocation> {
        match self.ask(Request::Allocate { name: name.to_owned(), bytes, placement }, &[])? {
            (Answer::Allocated(allocation), _) => Ok(allocation),
            _ => Err(unexpected()),
        }
    }

    fn seal(&self, allocation: &Allocation) -> Result<()> {
        // A GPU cannot, and need not be asked.
        match self.environment.backend {
            BackendKind::Emulator => self.done(Request::Seal(*allocation), &[]),
            _ => Ok(()),
        }
    }

    fn reserve(
        &self,
        name: &str,
        bytes: usize,
        touched: &[Range<i64>],
        placement: Placement,
    ) -> Result<Reservation> {
        let request =
            Request::Reserve { name: name.to_owned(), bytes, touched: touched.to_vec(), placement };
        match self.ask(request, &[])? {
            (Answer::Reserved(reservation), _) => Ok(reservation),
            _ => Err(unexpected()),
        }
    }

    fn free(&self, allocation: &Allocation) {
        let mut state = self.remote.state();
        if !state.stale.remove(&allocation.address) && state.process.is_some() {
            // Memory that cannot be freed is gone with the process.
            let _ = self.remote.ask(&mut state, &Request::Free(*allocation), &[]);
        }
    }

    fn fill(&self, address: u64, byte: u8, bytes: usize) -> Result<()> {
        self.done(Request::Fill { address, byte, bytes }, &[])
    }

    fn upload(&self, address: u64, source: &[u8]) -> Result<()> {
        self.done(Request::Upload { address }, source)
    }

    fn download(&self, address: u64, target: &mut [u8]) -> Result<()> {
        let (_, bytes) = self.ask(Request::Download { address, bytes: target.len() }, &[])?;
        if bytes.len() != target.len() {
            return Err(unexpected());
        }
        target.copy_from_slice(&bytes);
        Ok(())
    }

    fn copy(&self, target: u64, source: u64, bytes: usize) -> Result<()> {
        self.done(Request::Copy { target, source, bytes }, &[])
    }

    fn synchronize(&self) -> Result<()> {
        self.done(Request::Synchronize, &[])
    }

    fn set_schedule_seed(&self, seed: Option<u64>) {
        let mut state = self.remote.state();
        state.schedule = seed;
        if state.process.is_some() {
            // A later process gets the schedule when it starts.
            let _ = self.remote.ask(&mut state, &Request::Schedule { seed }, &[]);
        }
    }

    fn schedule_seed(&self) -> Option<u64> {
        self.remote.state().schedule
    }

    fn time(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
        self.taken(Span::Time, work)
    }

    fn time_recorded(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
        self.taken(Span::TimeRecorded, work)
    }

    fn recorder(&self) -> Option<&dyn Recorder> {
        self.records.then_some(self)
    }

    fn matrix_library(&self) -> Option<&dyn MatrixLibrary> {
        let known = self.multiplies.get().copied();
        // If a process cannot answer, the next GEMM request reports why.
        let multiplies = known.or_else(|| self.has(Request::MatrixLibrary).ok());
        multiplies.map(|multiplies| self.multiplies.get_or_init(|| multiplies));
        multiplies.unwrap_or(true).then_some(self)
    }

    fn tensor_map(&self, map: &TensorMap) -> Result<MapWords> {
        match self.ask(Request::TensorMap(*map), &[])? {
            (Answer::TensorMap(words), _) => Ok(words),
            _ => Err(unexpected()),
        }
    }
}

impl MatrixLibrary for RemoteBackend {
    fn multiply(&self, product: &MatrixProduct) -> Result<bool> {
        self.has(Request::Multiply(*product))
    }
}

impl Recorder for RemoteBackend {
    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Box<dyn Recorded + '_>> {
        match self.span(Span::Record, work)? {
            Answer::Recorded(number) => Ok(Box::new(RemoteRecorded {
                remote: &self.remote,
                started: self.remote.state().started,
                number,
            })),
            _ => Err(unexpected()),
        }
    }
}

/// Work that the process has recorded.
struct RemoteRecorded<'r> {
    remote: &'r Remote,
    /// The start number of the process that has it.
    started: u64,
    number: u64,
}

impl Recorded for RemoteRecorded<'_> {
    fn launch(&self) -> Result<()> {
        let mut state = self.remote.state();
        if state.started != self.started || state.process.is_none() {
            return Err(self.remote.gone("the process that recorded the work has ended"));
        }
        self.remote.ask(&mut state, &Request::Replay { recorded: self.number }, &[]).map(drop)
    }
}

impl Drop for RemoteRecorded<'_> {
    fn drop(&mut self) {
        let mut state = self.remote.state();
        if state.started == self.started && state.process.is_some() {
            let _ = self.remote.ask(&mut state, &Request::Forget { recorded: self.number }, &[]);
        }
    }
}

/// A module that the process has loaded; a new process loads it again.
struct RemoteModule {
    remote: Arc<Remote>,
    /// The request that loads it.
    request: Request,
    /// The start number of the process that has it, and the module's number there.
    loaded: Mutex<(u64, u64)>,
}

impl RemoteModule {
    /// Applies a function to the module's number in the running process.
    fn with<T>(
        &self,
        state: &mut State,
        ask: impl FnOnce(&mut State, u64) -> Result<T>,
    ) -> Result<T> {
        let mut loaded = self.loaded.lock().unwrap_or_else(|e| e.into_inner());
        if state.process.is_none() || loaded.0 != state.started {
            let (Answer::Module(number), _) = self.remote.ask(state, &self.request, &[])? else {
                return Err(unexpected());
            };
            *loaded = (state.started, number);
        }
        ask(state, loaded.1)
    }
}

impl LoadedModule for RemoteModule {
    fn exports(&self, kernel: &str) -> Result<KernelExports> {
        self.with(&mut self.remote.state(), |state, module| {
            match self.remote.ask(
                state,
                &Request::Exports { module, kernel: kernel.to_owned() },
                &[],
            )? {
                (Answer::Exports(exports), _) => Ok(exports),
                _ => Err(unexpected()),
            }
        })
    }

    fn launch(
        &self,
        kernel: &str,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        params: &[u8],
    ) -> Result<()> {
        self.with(&mut self.remote.state(), |state, module| {
            let request =
                Request::Launch { module, kernel: kernel.to_owned(), grid, block, shared_bytes };
            self.remote.ask(state, &request, params).map(drop)
        })
    }
}

impl Drop for RemoteModule {
    fn drop(&mut self) {
        let (started, module) = *self.loaded.lock().unwrap_or_else(|e| e.into_inner());
        let mut state = self.remote.state();
        if state.process.is_some() && state.started == started {
            let _ = self.remote.ask(&mut state, &Request::Unload { module }, &[]);
        }
    }
}
