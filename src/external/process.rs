//! Processes that answer requests: one for each run of a case, or one worker for all. Neither
//! outlives its time limit. Nothing that they start outlives them or this process
//! ([`dsv4_runtime::supervisor`]). [`super::crew`] has one of them for each rank.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use dsv4_runtime::supervisor::Supervised;
use serde::Deserialize;
use serde_json::json;

use crate::case::shell::quoted;
use crate::judge::runner::RunError;
use crate::record::{Seconds, words};

/// Last lines of a process's output that go into a failure.
const WORDS: usize = 12;
/// Last lines of a worker that cannot start.
const LAST_LINES: usize = 6;
/// Longest line that is read at once, in bytes.
const LINE: u64 = 1 << 16;
/// How long to wait for a process that closed its output, and for the output of one that ended.
pub(super) const LAST_WORDS: Duration = Duration::from_millis(500);
/// How long a wait does not look whether it was stopped.
const STEP: Duration = Duration::from_millis(20);
/// Lines that a worker may write before they are read. A worker with endless output waits, and
/// takes no memory here.
const AHEAD: usize = 4;
/// Longest reason of a worker that is kept, in characters.
const REASON: usize = 200;

/// A command that answers requests.
pub trait Call {
    /// Starts the worker, if this is one.
    ///
    /// # Errors
    /// What happened instead.
    fn start(&mut self) -> Result<(), RunError> {
        Ok(())
    }

    /// Whether the worker still runs, though it got no request.
    ///
    /// # Errors
    /// That it has ended, with its last output.
    fn still_runs(&mut self) -> Result<(), RunError> {
        Ok(())
    }

    /// Runs the kernel, so that it writes the folder's `outputs.safetensors`.
    ///
    /// # Errors
    /// What happened instead.
    fn call(&mut self, folder: &Path) -> Result<Reply, RunError>;
}

/// What an answer holds in addition to the outputs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reply {
    /// How long the kernel took, by its own clock.
    pub seconds: Option<Seconds>,
    /// The kernel that ran, by its own name.
    pub kernel: Option<String>,
}

/// Variables of a command's environment, beside those of this process.
pub(super) type Variables = Vec<(&'static str, String)>;

/// Ends the waits of calls on other threads.
#[derive(Clone, Default)]
pub(super) struct Stop(Arc<AtomicBool>);

impl Stop {
    pub fn set(&self, stopped: bool) {
        self.0.store(stopped, Ordering::Relaxed);
    }

    fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// What kind of failure leaves a request without a reply, the most telling first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Cause {
    /// The process ended.
    Ended,
    /// It answered an error, or no answer.
    Answered,
    /// It answered that it does not support such a case.
    Unsupported,
    /// It did not answer within the time limit.
    Late,
    /// The wait was stopped.
    Stopped,
}

/// Why a request has no reply.
#[derive(Debug)]
pub(super) struct Failure {
    pub cause: Cause,
    pub error: RunError,
    /// How long a worker ran that ended during its first request.
    pub unproven: Option<Duration>,
}

impl Failure {
    fn new(cause: Cause, error: RunError) -> Self {
        Self { cause, error, unproven: None }
    }

    /// An answer that is no reply.
    fn of_answer(error: RunError) -> Self {
        let cause = if error.unsupported { Cause::Unsupported } else { Cause::Answered };
        Self::new(cause, error)
    }
}

/// A command that is run once for each request, with `{dir}` replaced by the folder.
pub struct OneShot {
    command: String,
    time_limit: Duration,
    pub(super) variables: Variables,
    pub(super) stop: Stop,
}

/// A command that is started once and answers a line for each line that it gets.
pub struct Worker {
    command: String,
    time_limit: Duration,
    pub(super) variables: Variables,
    pub(super) stop: Stop,
    running: Option<Running>,
    /// Whether it is known to start: it has answered, or it waits for a request.
    starts: bool,
}

/// Reads lines until the end and keeps the last ones; drops its end of a channel when it is done.
struct Words {
    heard: Arc<Mutex<Heard>>,
    done: Receiver<()>,
}

#[derive(Default)]
struct Heard {
    /// The last lines of all streams.
    lines: VecDeque<String>,
    /// The last line of the first one.
    answer: Option<String>,
}

impl Words {
    fn of(streams: Vec<Box<dyn Read + Send>>) -> Self {
        let heard = Arc::new(Mutex::new(Heard::default()));
        let (sender, done) = mpsc::channel::<()>();
        for (number, stream) in streams.into_iter().enumerate() {
            let (heard, sender) = (heard.clone(), sender.clone());
            std::thread::spawn(move || {
                let _until_the_end = sender;
                each_line(stream, |line| {
                    let mut heard = heard.lock().unwrap_or_else(|e| e.into_inner());
                    if number == 0 {
                        heard.answer = Some(line.clone());
                    }
                    heard.lines.push_back(line);
                    if heard.lines.len() > WORDS {
                        heard.lines.pop_front();
                    }
                    true
                });
            });
        }
        Self { heard, done }
    }

    /// All output of an ended process.
    fn heard(&self) -> MutexGuard<'_, Heard> {
        // No thread sends: all output is read when every reader has dropped its end.
        let _ = self.done.recv_timeout(LAST_WORDS);
        self.heard.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The last lines, each after a line break; of an ended process.
    fn last(&self) -> String {
        self.heard().lines.iter().map(|line| format!("\n    {line}")).collect()
    }
}

/// Passes on every line, cut at [`LINE`] bytes, until the end or until `take` wants no more.
fn each_line(stream: impl Read, mut take: impl FnMut(String) -> bool) {
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = Vec::new();
        match (&mut reader).take(LINE).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) if !take(String::from_utf8_lossy(&line).trim_end().to_owned()) => return,
            Ok(_) => {}
        }
    }
}

/// Starts a command in a shell, with its output and its errors piped.
fn start(command: &str, variables: &Variables, stdin: Stdio) -> Result<Supervised, RunError> {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(command).envs(variables.iter().map(|(name, value)| (name, value)));
    Supervised::spawn(&shell, [stdin, Stdio::piped(), Stdio::piped()])
        .map_err(|e| RunError::error(format!("starting sh: {e}")))
}

/// How a process ended, in words.
fn ending(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        // The exit code that a shell reports for a command that a signal ended.
        (Some(code), _) if code > 128 => {
            format!("exit code {code} (as after signal {})", code - 128)
        }
        (Some(code), _) => format!("exit code {code}"),
        (_, Some(signal)) => format!("signal {signal}"),
        _ => status.to_string(),
    }
}

/// A line of a worker, and the last line of a command's output where it is one.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Answer {
    #[serde(default)]
    ok: bool,
    #[serde(default)]
    seconds: Option<Seconds>,
    #[serde(default)]
    kernel: Option<String>,
    #[serde(default)]
    error: Option<String>,
    #[serde(default)]
    unsupported: Option<String>,
}

impl Answer {
    /// The answer of the line; `None` where it is not an answer.
    fn read(line: &str) -> Option<Result<Reply, RunError>> {
        match serde_json::from_str(line).ok()? {
            Self { ok: true, seconds, kernel, error: None, unsupported: None } => {
                Some(match seconds {
                    Some(seconds) if !seconds.are_times() => Err(RunError::error(format!(
                        "the worker's seconds {seconds:?} are no times"
                    ))),
                    seconds => Ok(Reply { seconds, kernel: kernel.map(named) }),
                })
            }
            Self { ok: false, seconds: None, kernel: _, error: Some(error), unsupported: None } => {
                Some(Err(RunError::error(format!("the worker reported: {error}"))))
            }
            Self { ok: false, seconds: None, kernel: _, error: None, unsupported: Some(why) } => {
                Some(Err(RunError::unsupported(named(why))))
            }
            _ => None,
        }
    }
}

/// Words of a worker that become a line of a report.
fn named(words: String) -> String {
    words::line(&words.chars().take(REASON).collect::<String>())
}

/// What a user may try where a worker cannot start.
fn hint(status: ExitStatus, said: &str) -> String {
    let module =
        said.split("No module named ").nth(1).and_then(|rest| rest.split(['\'', '"']).nth(1));
    match (module, status.code()) {
        (Some("dsv4_external"), _) => {
            "that package is in fixtures/external: put it on PYTHONPATH".to_owned()
        }
        (Some(module), _) => {
            format!("that Python has no `{module}`: install it, or name the Python that has it")
        }
        (None, Some(126 | 127)) => {
            "the command is not found: is its path right, seen from this folder?".to_owned()
        }
        (None, Some(0)) => {
            "it must wait for lines on its standard input, and end with that".to_owned()
        }
        _ => "the command by itself, in a terminal, must wait for a line on its standard input"
            .to_owned(),
    }
}

/// Waits up to a limit, in steps that look whether the wait was stopped. `step` returns nothing
/// where its own time is over.
fn wait<T>(
    limit: Duration,
    stop: &Stop,
    mut step: impl FnMut(Duration) -> Option<T>,
) -> Result<T, Cause> {
    let begun = Instant::now();
    loop {
        let left = limit.saturating_sub(begun.elapsed());
        match step(left.min(STEP)) {
            Some(found) => return Ok(found),
            None if stop.is_set() => return Err(Cause::Stopped),
            None if left.is_zero() => return Err(Cause::Late),
            None => {}
        }
    }
}

/// What is said of a process that was ended because of its cause.
fn killed_for(cause: Cause, time_limit: Duration) -> String {
    match cause {
        Cause::Late => format!("was killed at the time limit of {} s", time_limit.as_secs_f64()),
        _ => "was ended".to_owned(),
    }
}

impl OneShot {
    /// A command, for `sh -c`, and how long one request may take.
    pub fn new(command: String, time_limit: Duration) -> Self {
        Self { command, time_limit, variables: Variables::new(), stop: Stop::default() }
    }

    pub(super) fn answer(&mut self, folder: &Path) -> Result<Reply, Failure> {
        let folder = quoted(&folder.display().to_string());
        let text = self.command.replace("{dir}", &folder);
        let mut command = start(&text, &self.variables, Stdio::null())
            .map_err(|error| Failure::new(Cause::Ended, error))?;
        let (_, stdout, stderr) = command.take_streams();
        let streams: [Option<Box<dyn Read + Send>>; 2] = [
            stdout.map(|s| Box::new(s) as Box<dyn Read + Send>),
            stderr.map(|s| Box::new(s) as Box<dyn Read + Send>),
        ];
        let words = Words::of(streams.into_iter().flatten().collect());
        let ended = wait(self.time_limit, &self.stop, |step| command.wait_within(step).transpose());
        // Processes that the command left running are ended, too.
        command.end();
        match ended {
            Ok(Ok(status)) => of_status(status, &words),
            Ok(Err(error)) => {
                let error = RunError::error(format!("waiting for the command: {error}"));
                Err(Failure::new(Cause::Ended, error))
            }
            Err(cause) => {
                let what = killed_for(cause, self.time_limit);
                let error = RunError::error(format!("the command {what}{}", words.last()));
                Err(Failure::new(cause, error))
            }
        }
    }
}

/// The answer of a command that has ended.
fn of_status(status: ExitStatus, words: &Words) -> Result<Reply, Failure> {
    if status.success() {
        let answer = words.heard().answer.take().and_then(|line| Answer::read(&line));
        return answer.unwrap_or_else(|| Ok(Reply::default())).map_err(Failure::of_answer);
    }
    let (ending, said) = (ending(status), words.last());
    // The exit code that a shell reports for a program that it cannot run: no case is the reason.
    let untestable = matches!(status.code(), Some(126 | 127));
    let message = match untestable {
        true => {
            let hint = hint(status, &said);
            format!("the command cannot start: {ending}{said}\n  hint: {hint}")
        }
        false => format!("the command ended with {ending}{said}"),
    };
    Err(Failure::new(Cause::Ended, RunError { untestable, ..RunError::error(message) }))
}

impl Call for OneShot {
    fn call(&mut self, folder: &Path) -> Result<Reply, RunError> {
        self.answer(folder).map_err(|failure| failure.error)
    }
}

/// A running worker; dropping it ends it and all that it started.
struct Running {
    process: Supervised,
    requests: ChildStdin,
    answers: Receiver<String>,
    words: Words,
    begun: Instant,
}

impl Running {
    fn start(command: &str, variables: &Variables) -> Result<Self, RunError> {
        let mut process = start(command, variables, Stdio::piped())?;
        let (Some(requests), Some(stdout), Some(stderr)) = process.take_streams() else {
            return Err(RunError::error("the worker has no standard streams"));
        };
        let (sender, answers) = mpsc::sync_channel(AHEAD);
        std::thread::spawn(move || each_line(stdout, |line| sender.send(line).is_ok()));
        Ok(Self {
            process,
            requests,
            answers,
            words: Words::of(vec![Box::new(stderr)]),
            begun: Instant::now(),
        })
    }

    /// What went wrong, with how the worker ended (if it did by itself) and its last output. Ends
    /// the worker.
    fn failed(mut self, what: &str) -> RunError {
        // A worker that closed its output is about to end by itself, and its status shows why.
        let status = self.process.wait_within(LAST_WORDS).ok().flatten();
        self.process.end();
        let ending = status.map(|status| format!(" with {}", ending(status))).unwrap_or_default();
        RunError::error(format!("the worker {what}{ending}{}", self.words.last()))
    }

    /// A worker that ended before any request: nothing is learnt about any case.
    fn cannot_start(mut self, status: ExitStatus) -> RunError {
        self.process.end();
        let said = self.words.last();
        let lines: Vec<&str> = said.lines().filter(|line| !line.trim().is_empty()).collect();
        let last = &lines[lines.len().saturating_sub(LAST_LINES)..];
        let last: String = last.iter().map(|line| format!("\n{line}")).collect();
        let message = format!(
            "the worker cannot start: it ended with {} before it was asked anything{last}\n  hint: {}",
            ending(status),
            hint(status, &said)
        );
        RunError { untestable: true, ..RunError::error(message) }
    }

    /// As [`Self::failed`], for a worker that would not end by itself.
    fn killed(mut self, what: &str) -> RunError {
        self.process.end();
        RunError::error(format!("the worker {what}{}", self.words.last()))
    }
}

impl Worker {
    /// A worker that is started with the first request.
    pub fn new(command: String, time_limit: Duration) -> Self {
        let (variables, stop) = (Variables::new(), Stop::default());
        Self { command, time_limit, variables, stop, running: None, starts: false }
    }

    /// Ends the process, if it runs. The next request starts another one.
    pub(super) fn end(&mut self) {
        self.running = None;
    }

    /// Whether the process runs and has not ended by itself.
    pub(super) fn runs(&mut self) -> bool {
        let ended = |worker: &mut Running| {
            matches!(worker.process.wait_within(Duration::ZERO), Ok(Some(_)))
        };
        self.running.as_mut().is_some_and(|worker| !ended(worker))
    }

    /// The error of a worker that cannot start, if it ends within this time without a request.
    pub(super) fn ends_idle_within(&mut self, limit: Duration) -> Option<RunError> {
        let mut idle = self.running.take()?;
        match idle.process.wait_within(limit) {
            Ok(Some(status)) => {
                self.starts = false;
                Some(idle.cannot_start(status))
            }
            _ => None,
        }
    }

    /// The failure of a worker that ended during a request.
    fn ended(&mut self, worker: Running) -> Failure {
        let lived = worker.begun.elapsed();
        let unproven = (!std::mem::replace(&mut self.starts, true)).then_some(lived);
        Failure { unproven, ..Failure::new(Cause::Ended, worker.failed("ended")) }
    }

    pub(super) fn answer(&mut self, folder: &Path) -> Result<Reply, Failure> {
        let mut worker = match self.running.take() {
            Some(worker) => worker,
            None => Running::start(&self.command, &self.variables)
                .map_err(|error| Failure::new(Cause::Ended, error))?,
        };
        match worker.answers.try_recv() {
            Ok(line) => {
                let what = format!("wrote `{line}` to its standard output without a request");
                return Err(Failure::of_answer(worker.killed(&what)));
            }
            Err(TryRecvError::Disconnected) => return Err(self.ended(worker)),
            Err(TryRecvError::Empty) => {}
        }
        let line = format!("{}\n", json!({ "dir": folder }));
        if worker
            .requests
            .write_all(line.as_bytes())
            .and_then(|()| worker.requests.flush())
            .is_err()
        {
            return Err(self.ended(worker));
        }
        let next = |step| match worker.answers.recv_timeout(step) {
            Ok(line) => Some(Some(line)),
            Err(RecvTimeoutError::Disconnected) => Some(None),
            Err(RecvTimeoutError::Timeout) => None,
        };
        match wait(self.time_limit, &self.stop, next) {
            Ok(Some(line)) => self.read(&line, worker),
            Ok(None) => Err(self.ended(worker)),
            Err(cause) => {
                Err(Failure::new(cause, worker.killed(&killed_for(cause, self.time_limit))))
            }
        }
    }

    /// The answer of a line.
    fn read(&mut self, line: &str, worker: Running) -> Result<Reply, Failure> {
        self.starts = true;
        match Answer::read(line) {
            Some(answer) => {
                self.running = Some(worker);
                answer.map_err(Failure::of_answer)
            }
            None => {
                let start: String = line.chars().take(REASON).collect();
                Err(Failure::of_answer(worker.killed(&format!(
                    "answered `{start}`, not {{\"ok\":true}}, {{\"error\":…}} or {{\"unsupported\":…}}"
                ))))
            }
        }
    }
}

impl Call for Worker {
    fn start(&mut self) -> Result<(), RunError> {
        self.running = Some(Running::start(&self.command, &self.variables)?);
        Ok(())
    }

    fn still_runs(&mut self) -> Result<(), RunError> {
        let Some(mut worker) = self.running.take() else { return Ok(()) };
        match worker.process.wait_within(Duration::ZERO) {
            Ok(Some(status)) => Err(worker.cannot_start(status)),
            _ => {
                self.running = Some(worker);
                Ok(())
            }
        }
    }

    fn call(&mut self, folder: &Path) -> Result<Reply, RunError> {
        // A worker that ended between two requests, after it answered the first, is not a failure
        // of the second.
        if self.starts && !self.runs() {
            self.end();
        }
        let failure = match self.answer(folder) {
            Ok(reply) => return Ok(reply),
            Err(failure) => failure,
        };
        // If it ended during its first request and ends without a request as well, it cannot start.
        // That is tried once, for twice the time that it ran.
        let Some(lived) = failure.unproven else { return Err(failure.error) };
        self.start()?;
        let cannot_start = self.ends_idle_within(LAST_WORDS.max(2 * lived));
        Err(cannot_start.unwrap_or(failure.error))
    }
}
