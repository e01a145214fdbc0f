//! Processes that answer requests: one for each case, or one that lives on. Neither outlives its time
//! limit, and none leaves children behind: each leads a process group that is killed whole.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dsv4_kernels::runtime::process::{isolate, kill_group, wait_within};
use serde::Deserialize;
use serde_json::json;

use crate::judge::runner::RunError;

/// Last lines of a process's own words that go into a failure.
const WORDS: usize = 12;
/// Longest line that is read at once, in bytes.
const LINE: u64 = 1 << 16;
/// How long the words of an ended process are waited for: its children may hold its output open.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// Whoever answers a request.
pub trait Call {
    /// Has the folder's `outputs.safetensors` written.
    ///
    /// # Errors
    /// What happened instead.
    fn call(&mut self, folder: &Path) -> Result<(), RunError>;
}

/// A command that is run once for each request, with `{dir}` replaced by the folder.
pub struct OneShot {
    /// The command, for `sh -c`.
    pub command: String,
    /// How long one request may take.
    pub time_limit: Duration,
}

/// A command that is started once and answers a line for each line that it gets.
pub struct Worker {
    command: String,
    time_limit: Duration,
    running: Option<Running>,
}

/// Reads lines until the end, keeping the last ones; drops its end of a channel when it is done.
struct Words {
    lines: Arc<Mutex<VecDeque<String>>>,
    done: Receiver<()>,
}

impl Words {
    fn of(streams: Vec<Box<dyn Read + Send>>) -> Self {
        let lines = Arc::new(Mutex::new(VecDeque::new()));
        let (sender, done) = mpsc::channel::<()>();
        for stream in streams {
            let (lines, sender) = (lines.clone(), sender.clone());
            std::thread::spawn(move || {
                let _until_the_end = sender;
                each_line(stream, |line| {
                    let mut lines = lines.lock().unwrap_or_else(|e| e.into_inner());
                    lines.push_back(line);
                    if lines.len() > WORDS {
                        lines.pop_front();
                    }
                    true
                });
            });
        }
        Self { lines, done }
    }

    /// The last lines, each after a line break; of an ended process.
    fn last(&self) -> String {
        // Nobody sends: it is over when every reader has dropped its end.
        let _ = self.done.recv_timeout(LAST_WORDS);
        let lines = self.lines.lock().unwrap_or_else(|e| e.into_inner());
        lines.iter().map(|line| format!("\n    {line}")).collect()
    }
}

/// Hands over every line, cut at [`LINE`] bytes, until the end or until `take` wants no more.
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

fn shell(command: &str) -> Command {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(command).stdout(Stdio::piped()).stderr(Stdio::piped());
    isolate(&mut shell);
    shell
}

fn start(shell: &mut Command) -> Result<Child, RunError> {
    shell.spawn().map_err(|e| RunError::error(format!("starting sh: {e}")))
}

/// How a process ended, in words.
fn ending(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        // What a shell says of a command that a signal ended.
        (Some(code), _) if code > 128 => format!("exit code {code} (as after signal {})", code - 128),
        (Some(code), _) => format!("exit code {code}"),
        (_, Some(signal)) => format!("signal {signal}"),
        _ => status.to_string(),
    }
}

/// Kills the whole group and waits for its leader.
fn end(child: &mut Child) {
    kill_group(child.id());
    // It is dead or dying; whether it was waited for before does not matter.
    let _ = child.wait();
}

impl Call for OneShot {
    fn call(&mut self, folder: &Path) -> Result<(), RunError> {
        let folder = format!("'{}'", folder.display().to_string().replace('\'', "'\\''"));
        let mut child = start(shell(&self.command.replace("{dir}", &folder)).stdin(Stdio::null()))?;
        let streams: [Option<Box<dyn Read + Send>>; 2] = [
            child.stdout.take().map(|s| Box::new(s) as Box<dyn Read + Send>),
            child.stderr.take().map(|s| Box::new(s) as Box<dyn Read + Send>),
        ];
        let words = Words::of(streams.into_iter().flatten().collect());
        let status = wait_within(&mut child, self.time_limit);
        // Whatever the command left running is ended, too.
        end(&mut child);
        match status {
            Ok(Some(status)) if status.success() => Ok(()),
            Ok(Some(status)) => {
                Err(RunError::error(format!("the command ended with {}{}", ending(status), words.last())))
            }
            Ok(None) => {
                let seconds = self.time_limit.as_secs_f64();
                Err(RunError::error(format!("the command was killed at the time limit of {seconds} s{}", words.last())))
            }
            Err(error) => Err(RunError::error(format!("waiting for the command: {error}"))),
        }
    }
}

/// A worker that is up.
struct Running {
    child: Child,
    requests: ChildStdin,
    answers: Receiver<String>,
    words: Words,
}

/// A line of a worker.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Answer {
    #[serde(default)]
    ok: bool,
    #[serde(default)]
    error: Option<String>,
}

impl Running {
    fn start(command: &str) -> Result<Self, RunError> {
        let mut child = start(shell(command).stdin(Stdio::piped()))?;
        let (Some(requests), Some(stdout), Some(stderr)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            end(&mut child);
            return Err(RunError::error("the worker has no standard streams"));
        };
        let (sender, answers) = mpsc::channel();
        std::thread::spawn(move || each_line(stdout, |line| sender.send(line).is_ok()));
        Ok(Self { child, requests, answers, words: Words::of(vec![Box::new(stderr)]) })
    }

    /// What went wrong, with how the worker ended (if it did by itself) and its last words. It is ended here.
    fn failed(mut self, what: &str) -> RunError {
        // A worker that closed its output is about to end by itself, and its status says why.
        let status = wait_within(&mut self.child, LAST_WORDS).ok().flatten();
        end(&mut self.child);
        let ending = status.map(|status| format!(" with {}", ending(status))).unwrap_or_default();
        RunError::error(format!("the worker {what}{ending}{}", self.words.last()))
    }

    /// As [`Self::failed`], for a worker that would not end by itself.
    fn killed(mut self, what: &str) -> RunError {
        end(&mut self.child);
        RunError::error(format!("the worker {what}{}", self.words.last()))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

impl Worker {
    /// A worker that is started with the first request.
    pub fn new(command: String, time_limit: Duration) -> Self {
        Self { command, time_limit, running: None }
    }

    fn request(&mut self, folder: &Path) -> Result<(), RunError> {
        let mut worker = match self.running.take() {
            Some(worker) => worker,
            None => Running::start(&self.command)?,
        };
        match worker.answers.try_recv() {
            Ok(line) => return Err(worker.killed(&format!("wrote `{line}` to its standard output without a request"))),
            Err(TryRecvError::Disconnected) => return Err(worker.failed("ended")),
            Err(TryRecvError::Empty) => {}
        }
        let line = format!("{}\n", json!({ "dir": folder }));
        if worker.requests.write_all(line.as_bytes()).and_then(|()| worker.requests.flush()).is_err() {
            return Err(worker.failed("ended"));
        }
        let line = match worker.answers.recv_timeout(self.time_limit) {
            Ok(line) => line,
            Err(RecvTimeoutError::Disconnected) => return Err(worker.failed("ended")),
            Err(RecvTimeoutError::Timeout) => {
                let seconds = self.time_limit.as_secs_f64();
                return Err(worker.killed(&format!("was killed at the time limit of {seconds} s")));
            }
        };
        match serde_json::from_str(&line) {
            Ok(Answer { ok: true, error: None }) => {
                self.running = Some(worker);
                Ok(())
            }
            Ok(Answer { ok: false, error: Some(error) }) => {
                self.running = Some(worker);
                Err(RunError::error(format!("the worker reported: {error}")))
            }
            _ => {
                let start: String = line.chars().take(200).collect();
                Err(worker.killed(&format!("answered `{start}`, not {{\"ok\":true}} or {{\"error\":…}}")))
            }
        }
    }
}

impl Call for Worker {
    fn call(&mut self, folder: &Path) -> Result<(), RunError> {
        // One that ended between two requests, having answered the first, is no failure of the second.
        if self.running.as_mut().is_some_and(|worker| matches!(worker.child.try_wait(), Ok(Some(_)))) {
            self.running = None;
        }
        self.request(folder)
    }
}
