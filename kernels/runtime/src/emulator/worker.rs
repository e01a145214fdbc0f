//! A device's side of its worker process ([`super::serve`]): sends requests, and starts another
//! process when it is gone.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::memory::{self, GuardedMemory};
use super::message::{Answer, Request};
use super::progress::Page;
use super::serve::{JOB, Start};
use super::watchdog::OF_A_PROCESS;
use crate::backend::{Allocation, KernelExports, LoadedModule};
use crate::error::{Result, RuntimeError};
use crate::worker::process::Process;
use crate::worker::program::Job;

/// Time that a launch may take beyond its limit. The worker's own watchdog, which names block and
/// thread, comes first.
const GRACE: Duration = Duration::from_secs(2);

/// The limits, which are the same for every process.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Time limit of a launch.
    pub time: Duration,
    /// Bytes that the process may use for data.
    pub memory: u64,
}

/// A worker process, and its successors.
pub struct Worker {
    limits: Limits,
    /// Where modules add up how often their lines ran.
    coverage: Option<PathBuf>,
    memory: GuardedMemory,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    process: Option<Running>,
    /// Processes started so far.
    started: u64,
    schedule: Option<u64>,
    /// Whether races are left out.
    unwatched: bool,
}

impl State {
    fn schedule_request(&self) -> Request {
        Request::Schedule { seed: self.schedule, watches_races: !self.unwatched }
    }
}

/// A process that runs.
struct Running {
    process: Process,
    page: Page,
    time_limit: Duration,
}

impl Worker {
    /// No process runs before it is needed. `coverage`: where its modules count their lines.
    ///
    /// # Errors
    /// Memory that cannot be allocated.
    pub fn new(limits: Limits, coverage: Option<PathBuf>) -> Result<Arc<Self>> {
        let file = memory::new_file()
            .map_err(|e| RuntimeError::system("making a file for global memory", e))?;
        let memory = GuardedMemory::of(file);
        Ok(Arc::new(Self { limits, coverage, memory, state: Mutex::default() }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Sends a request to the running process, or to a new one.
    fn ask(&self, state: &mut State, request: &Request, bytes: &[u8]) -> Result<Answer> {
        let process = match &mut state.process {
            Some(process) => process,
            None => {
                let doing = |error| {
                    RuntimeError::system("starting a worker process of the emulator", error)
                };
                state.started += 1;
                let mut process =
                    Running::start(self.limits, self.coverage.clone(), self.memory.file())
                        .map_err(doing)?;
                for placed in self.memory.placed() {
                    process.ask(&Request::Map(placed), &[]).map_err(doing)?;
                }
                process.ask(&state.schedule_request(), &[]).map_err(doing)?;
                state.process.insert(process)
            }
        };
        match process.ask(request, bytes) {
            Ok(Answer::Failed(failure)) => Err(failure.into()),
            Ok(answer) => Ok(answer),
            Err(error) => Err(match state.process.take() {
                Some(process) => process.end(request, &error),
                None => RuntimeError::system("asking a worker", error),
            }),
        }
    }

    /// Notifies the running process, if one runs; a later one gets the whole state when it starts.
    fn tell(&self, state: &mut State, request: &Request) {
        if state.process.is_some() {
            // If the process has ended, the next request starts another.
            let _ = self.ask(state, request, &[]);
        }
    }

    /// Places a buffer, and notifies the process.
    pub fn place<M>(
        &self,
        make: impl FnOnce(&GuardedMemory) -> Result<M>,
        at: impl FnOnce(&M) -> Allocation,
    ) -> Result<M> {
        // Held for both: a process that starts in between would get the buffer twice.
        let mut state = self.state();
        let made = make(&self.memory)?;
        if let Some(placed) = self.memory.placed_at(&at(&made)) {
            self.tell(&mut state, &Request::Map(placed));
        }
        Ok(made)
    }

    /// See [`Backend::seal`](crate::backend::Backend::seal).
    pub fn seal(&self, allocation: &Allocation) {
        let mut state = self.state();
        if let Some(placed) = self.memory.seal(allocation) {
            self.tell(&mut state, &Request::Seal(placed));
        }
    }

    /// See [`Backend::free`](crate::backend::Backend::free).
    pub fn free(&self, allocation: &Allocation) {
        let mut state = self.state();
        if let Some(placed) = self.memory.placed_at(allocation) {
            self.memory.release(&placed);
            self.tell(&mut state, &Request::Unmap(placed));
        }
    }

    /// The schedule of launches from now on, also in later processes.
    pub fn set_schedule_seed(&self, seed: Option<u64>) {
        let mut state = self.state();
        state.schedule = seed;
        let request = state.schedule_request();
        self.tell(&mut state, &request);
    }

    /// The seed of the schedule.
    pub fn schedule_seed(&self) -> Option<u64> {
        self.state().schedule
    }

    /// Whether launches from now on look for races, also in later processes.
    pub fn watch_races(&self, watch: bool) {
        let mut state = self.state();
        state.unwatched = !watch;
        let request = state.schedule_request();
        self.tell(&mut state, &request);
    }
}

fn unexpected() -> RuntimeError {
    RuntimeError::system("asking a worker process", io::Error::other("it answered something else"))
}

impl Running {
    fn start(limits: Limits, coverage: Option<PathBuf>, memory: &File) -> io::Result<Self> {
        let page = Page::file()?;
        let passed = [page.as_raw_fd(), memory.as_raw_fd()];
        let [page_file, memory] = passed;
        let start = Start { page: page_file, memory, time_limit: limits.time, coverage };
        let job = Job::new(JOB, start)?;
        let process = Process::start(job, &passed, Some(limits.memory))?;
        Ok(Self { process, page: Page::of(&page)?, time_limit: limits.time * OF_A_PROCESS + GRACE })
    }

    fn ask(&mut self, request: &Request, bytes: &[u8]) -> io::Result<Answer> {
        if !request.is_answered() {
            return self.process.tell(request, bytes).map(|()| Answer::Done);
        }
        self.process.ask(request, bytes, self.time_limit).map(|(answer, _)| answer)
    }

    /// Handles a process that did not answer: it ends, if it has not ended yet, and the cause
    /// becomes an error.
    fn end(mut self, request: &Request, error: &io::Error) -> RuntimeError {
        let what = self.process.fate(error, super::schedule::TIME_LIMIT);
        let blocks = self.page.running();
        drop(self);
        let (mut block, mut thread) = ("unknown".to_owned(), "unknown".to_owned());
        if let [(first, first_thread), others @ ..] = &blocks[..] {
            let or = |words: String, other: String| {
                if words == other { words } else { format!("{words} or {other}") }
            };
            block = others
                .iter()
                .fold(first.to_string(), |words, (other, _)| or(words, other.to_string()));
            thread = others
                .iter()
                .fold(first_thread.to_string(), |words, (_, other)| or(words, other.to_string()));
        }
        match request {
            Request::Launch { kernel, .. } => {
                RuntimeError::Fault { kernel: kernel.clone(), block, thread, what }
            }
            Request::Load { file, .. } => RuntimeError::Load { file: file.clone(), what },
            _ => RuntimeError::system(
                "asking a worker process of the emulator",
                io::Error::other(format!("it {what}")),
            ),
        }
    }
}

/// A module that the worker has loaded; a new process loads it again.
pub struct WorkerModule {
    worker: Arc<Worker>,
    path: PathBuf,
    file: String,
    /// The start number of the process that has it, and the module's number there.
    loaded: Mutex<(u64, u64)>,
}

impl WorkerModule {
    /// Loads the compiler's output for `file`.
    pub fn load(worker: &Arc<Worker>, path: &Path, file: &str) -> Result<Self> {
        let module = Self {
            worker: worker.clone(),
            path: path.to_owned(),
            file: file.to_owned(),
            loaded: Mutex::default(),
        };
        module.with(&mut worker.state(), |_, _| Ok(()))?;
        Ok(module)
    }

    /// Applies a function to the module's number in the running process.
    fn with<T>(
        &self,
        state: &mut State,
        ask: impl FnOnce(&mut State, u64) -> Result<T>,
    ) -> Result<T> {
        let mut loaded = self.loaded.lock().unwrap_or_else(|e| e.into_inner());
        if state.process.is_none() || loaded.0 != state.started {
            let request = Request::Load { path: self.path.clone(), file: self.file.clone() };
            let Answer::Module(number) = self.worker.ask(state, &request, &[])? else {
                return Err(unexpected());
            };
            *loaded = (state.started, number);
        }
        ask(state, loaded.1)
    }
}

impl Drop for WorkerModule {
    fn drop(&mut self) {
        let (started, module) = *self.loaded.lock().unwrap_or_else(|e| e.into_inner());
        let mut state = self.worker.state();
        if state.process.is_some() && state.started == started {
            let _ = self.worker.ask(&mut state, &Request::Unload { module }, &[]);
        }
    }
}

impl LoadedModule for WorkerModule {
    fn exports(&self, kernel: &str) -> Result<KernelExports> {
        self.with(&mut self.worker.state(), |state, module| {
            let request = Request::Exports { module, kernel: kernel.to_owned() };
            match self.worker.ask(state, &request, &[])? {
                Answer::Exports(exports) => Ok(exports),
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
        self.with(&mut self.worker.state(), |state, module| {
            let request =
                Request::Launch { module, kernel: kernel.to_owned(), grid, block, shared_bytes };
            self.worker.ask(state, &request, params).map(drop)
        })
    }
}
