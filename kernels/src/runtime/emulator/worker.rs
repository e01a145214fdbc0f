//! A device's side of its worker process ([`super::serve`]): starts it, asks it, and starts another when it is gone.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read as _, Write as _};
use std::ops::Range;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::message::{self, Answer, Request};
use super::progress::Page;
use super::serve::{self, DISCONNECTED, Start, VARIABLE};
use crate::runtime::backend::{Allocation, KernelExports, LoadedModule, Placement, Reservation};
use crate::runtime::error::{Result, RuntimeError};
use crate::runtime::process::kill_group;

/// What a launch may take beyond its time limit: its worker's own watchdog, which names block and thread, comes first.
const GRACE: Duration = Duration::from_secs(2);

/// What a worker that ends by itself may take for it.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// What does not depend on which process it is.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Of a launch.
    pub time: Duration,
    /// Bytes that the process may have for data.
    pub memory: u64,
}

/// A worker process, and those that follow it.
pub struct Worker {
    limits: Limits,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    process: Option<Process>,
    /// Processes started so far.
    started: u64,
    /// Allocations of the process that runs, from the first byte of the front band to the last of the back band.
    memory: BTreeMap<u64, u64>,
    schedule: Option<u64>,
}

/// A process that runs.
struct Process {
    child: Child,
    requests: BufWriter<UnixStream>,
    answers: BufReader<UnixStream>,
    page: Page,
    /// Of the next message.
    tag: u64,
}

impl Worker {
    /// None runs before it is needed.
    pub fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self { limits, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Asks the process that runs, or a new one.
    fn ask(&self, state: &mut State, request: &Request, bytes: &[u8], target: &mut [u8]) -> Result<Answer> {
        if state.process.is_none() {
            let doing = |error| RuntimeError::system("starting a worker process of the emulator", error);
            state.started += 1;
            state.process = Some(Process::start(self.limits, state.started).map_err(doing)?);
            if state.schedule.is_some() {
                self.ask(state, &Request::Schedule { seed: state.schedule }, &[], &mut [])?;
            }
        }
        let Some(process) = &mut state.process else { unreachable!("one was started") };
        match process.ask(request, bytes, target) {
            Ok(Answer::Failed(failure)) => Err(failure.into()),
            Ok(answer) => Ok(answer),
            Err(error) => {
                let process = state.process.take();
                state.memory.clear();
                Err(match process {
                    Some(process) => process.end(request, &error),
                    None => RuntimeError::system("asking a worker", error),
                })
            }
        }
    }

    /// Asks for what concerns `bytes` bytes of memory at `address`, if these are an allocation's.
    fn ask_about(&self, places: &[(u64, usize)], request: &Request, bytes: &[u8], target: &mut [u8]) -> Result<()> {
        let mut state = self.state();
        for &(address, bytes) in places {
            let end = state.memory.range(..=address).next_back().map(|(_, &end)| end);
            if bytes > 0 && end.is_none_or(|end| address.checked_add(bytes as u64).is_none_or(|last| last > end)) {
                let gone = io::Error::other("its process ended, by an earlier launch");
                return Err(RuntimeError::system(format!("using memory at {address:#x}"), gone));
            }
        }
        self.ask(&mut state, request, bytes, target).map(drop)
    }

    /// See [`Backend::allocate`](crate::runtime::backend::Backend::allocate) and its `reserve`.
    pub fn allocate(
        &self,
        name: &str,
        bytes: usize,
        touched: Option<&[Range<i64>]>,
        placement: Placement,
    ) -> Result<Reservation> {
        let touched = touched.map(<[_]>::to_vec);
        let mut state = self.state();
        let request = Request::Allocate { name: name.to_owned(), bytes, touched, placement };
        let Answer::Memory(made) = self.ask(&mut state, &request, &[], &mut [])? else { return Err(unexpected()) };
        let Range { start, end } = with_bands(&made.allocation);
        state.memory.insert(start, end);
        Ok(made)
    }

    /// See [`Backend::free`](crate::runtime::backend::Backend::free); memory of a process that is gone is gone with it.
    pub fn free(&self, allocation: &Allocation) {
        let mut state = self.state();
        if state.memory.remove(&with_bands(allocation).start).is_some() {
            // Should the process have ended, the next request finds out.
            let _ = self.ask(&mut state, &Request::Free(*allocation), &[], &mut []);
        }
    }

    /// Sets bytes.
    pub fn fill(&self, address: u64, byte: u8, bytes: usize) -> Result<()> {
        self.ask_about(&[(address, bytes)], &Request::Fill { address, byte, bytes }, &[], &mut [])
    }

    /// Copies to the device.
    pub fn upload(&self, address: u64, source: &[u8]) -> Result<()> {
        self.ask_about(&[(address, source.len())], &Request::Upload { address }, source, &mut [])
    }

    /// Copies from the device.
    pub fn download(&self, address: u64, target: &mut [u8]) -> Result<()> {
        let bytes = target.len();
        self.ask_about(&[(address, bytes)], &Request::Download { address, bytes }, &[], target)
    }

    /// Copies on the device.
    pub fn copy(&self, target: u64, source: u64, bytes: usize) -> Result<()> {
        let places = [(target, bytes), (source, bytes)];
        self.ask_about(&places, &Request::Copy { target, source, bytes }, &[], &mut [])
    }

    /// The schedule of launches from now on, of processes to come as well.
    pub fn set_schedule_seed(&self, seed: Option<u64>) {
        let mut state = self.state();
        state.schedule = seed;
        if state.process.is_some() {
            let _ = self.ask(&mut state, &Request::Schedule { seed }, &[], &mut []);
        }
    }
}

fn with_bands(allocation: &Allocation) -> Range<u64> {
    let Allocation { address, bytes, front_band, back_band } = *allocation;
    address - front_band as u64..address + (bytes + back_band) as u64
}

fn unexpected() -> RuntimeError {
    RuntimeError::system("asking a worker process", io::Error::other("it answered something else"))
}

impl Process {
    fn start(limits: Limits, generation: u64) -> io::Result<Self> {
        assert!(serve::is_linked(), "a program without its initialiser");
        let (ours, theirs) = UnixStream::pair()?;
        let page = Page::file()?;
        let passed = [theirs.as_raw_fd(), page.as_raw_fd()];
        let start =
            Start { connection: passed[0], page: passed[1], time_limit: limits.time, generation, tag: rand::random() };
        let mut command = Command::new("/proc/self/exe");
        command.env(VARIABLE, serde_json::to_string(&start)?).process_group(0).stdin(Stdio::null());
        // What a kernel prints is no output of this program.
        command.stdout(Stdio::from(File::from(io::stderr().as_fd().try_clone_to_owned()?)));
        // SAFETY: between fork and exec only fcntl and setrlimit are called, which are async-signal-safe.
        unsafe { command.pre_exec(move || prepare(passed, limits.memory)) };
        let child = command.spawn()?;
        let answers = BufReader::with_capacity(1 << 16, ours.try_clone()?);
        ours.set_read_timeout(Some(limits.time + GRACE))?;
        Ok(Self {
            child,
            requests: BufWriter::with_capacity(1 << 16, ours),
            answers,
            page: Page::of(&page)?,
            tag: start.tag,
        })
    }

    fn ask(&mut self, request: &Request, bytes: &[u8], target: &mut [u8]) -> io::Result<Answer> {
        let tag = self.tag;
        self.tag = tag.wrapping_add(1);
        message::write(&mut self.requests, tag, request, bytes)?;
        if !request.is_answered() {
            return Ok(Answer::Done);
        }
        self.requests.flush()?;
        let (answer, count) = message::read(&mut self.answers, tag)?;
        if count != target.len() as u64 && count != 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "other bytes than were asked for"));
        }
        self.answers.read_exact(&mut target[..count as usize])?;
        Ok(answer)
    }

    /// What becomes of a process that did not answer: it ends, if it has not, and what it did is an error.
    fn end(mut self, request: &Request, error: &io::Error) -> RuntimeError {
        let is_late = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
        let what = match self.wait(if is_late { Duration::ZERO } else { LAST_WORDS }) {
            Some(status) => describe(status),
            None if is_late => super::schedule::TIME_LIMIT.to_owned(),
            None => "wrote to the files of its process".to_owned(),
        };
        let blocks = self.page.running();
        drop(self);
        let (mut block, mut thread) = ("unknown".to_owned(), "unknown".to_owned());
        if let [(first, first_thread), others @ ..] = &blocks[..] {
            let or = |words: String, other: String| if words == other { words } else { format!("{words} or {other}") };
            block = others.iter().fold(first.to_string(), |words, (other, _)| or(words, other.to_string()));
            thread = others.iter().fold(first_thread.to_string(), |words, (_, other)| or(words, other.to_string()));
        }
        match request {
            Request::Launch { kernel, .. } => RuntimeError::Fault { kernel: kernel.clone(), block, thread, what },
            Request::Load { file, .. } => RuntimeError::Load { file: file.clone(), what },
            _ => {
                RuntimeError::system("asking a worker process of the emulator", io::Error::other(format!("it {what}")))
            }
        }
    }

    /// How the process ended, if it does within this time.
    fn wait(&mut self, limit: Duration) -> Option<ExitStatus> {
        let (step, mut waited) = (Duration::from_millis(2), Duration::ZERO);
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                _ if waited >= limit => return None,
                _ => std::thread::sleep(step),
            }
            waited += step;
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        kill_group(self.child.id());
        // What was killed is waited for, so that nothing is left of it.
        let _ = self.child.wait();
    }
}

/// Between fork and exec: lets the descriptors through, and bounds memory. A kernel that crashes leaves no image of it on disk.
fn prepare(passed: [i32; 2], memory: u64) -> io::Result<()> {
    let limit = |of, bytes| {
        let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
        // SAFETY: a valid limit of this process.
        unsafe { libc::setrlimit(of, &limit) }
    };
    // SAFETY: fcntl with F_SETFD takes integers.
    let kept = passed.map(|descriptor| unsafe { libc::fcntl(descriptor, libc::F_SETFD, 0) });
    // Where a lower limit stands already, that one holds.
    limit(libc::RLIMIT_DATA, memory);
    limit(libc::RLIMIT_CORE, 0);
    if kept.contains(&-1) { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(DISCONNECTED), _) => "closed the files of its process".to_owned(),
        (Some(code), _) => format!("ended its process, with code {code}"),
        (_, Some(signal)) => format!("was killed by signal {signal}{}", name_of(signal)),
        _ => format!("ended: {status}"),
    }
}

fn name_of(signal: i32) -> &'static str {
    match signal {
        libc::SIGABRT => " (SIGABRT)",
        libc::SIGSEGV => " (SIGSEGV)",
        libc::SIGBUS => " (SIGBUS)",
        libc::SIGILL => " (SIGILL)",
        libc::SIGKILL => " (SIGKILL)",
        libc::SIGTRAP => " (SIGTRAP)",
        _ => "",
    }
}

/// A module that the worker has loaded, or loads again where its process is another.
pub struct WorkerModule {
    worker: Arc<Worker>,
    path: PathBuf,
    file: String,
    /// The process that has it, by when it was started, and its number there.
    loaded: Mutex<(u64, u64)>,
}

impl WorkerModule {
    /// Loads what the compiler built from `file`.
    pub fn load(worker: &Arc<Worker>, path: &Path, file: &str) -> Result<Self> {
        let module =
            Self { worker: worker.clone(), path: path.to_owned(), file: file.to_owned(), loaded: Mutex::default() };
        module.with(&mut worker.state(), |_, _| Ok(()))?;
        Ok(module)
    }

    /// Does something with the module's number in the process that runs.
    fn with<T>(&self, state: &mut State, ask: impl FnOnce(&mut State, u64) -> Result<T>) -> Result<T> {
        let mut loaded = self.loaded.lock().unwrap_or_else(|e| e.into_inner());
        if state.process.is_none() || loaded.0 != state.started {
            let request = Request::Load { path: self.path.clone(), file: self.file.clone() };
            let Answer::Module(number) = self.worker.ask(state, &request, &[], &mut [])? else {
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
            let _ = self.worker.ask(&mut state, &Request::Unload { module }, &[], &mut []);
        }
    }
}

impl LoadedModule for WorkerModule {
    fn exports(&self, kernel: &str) -> Result<KernelExports> {
        self.with(&mut self.worker.state(), |state, module| {
            let request = Request::Exports { module, kernel: kernel.to_owned() };
            match self.worker.ask(state, &request, &[], &mut [])? {
                Answer::Exports(exports) => Ok(exports),
                _ => Err(unexpected()),
            }
        })
    }

    fn launch(&self, kernel: &str, grid: [u32; 3], block: [u32; 3], shared_bytes: u32, params: &[u8]) -> Result<()> {
        self.with(&mut self.worker.state(), |state, module| {
            let request = Request::Launch { module, kernel: kernel.to_owned(), grid, block, shared_bytes };
            self.worker.ask(state, &request, params, &mut []).map(drop)
        })
    }
}
