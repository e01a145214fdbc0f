//! Commands that leave no process after any end, theirs or this process's, including `kill -9`; and
//! temporary folders that are removed with this process.
//!
//! Each command runs under a supervisor: this program, started again, which does nothing else. The
//! supervisor leads a separate session, so that no signal to a group or from a terminal reaches it.
//! It is the reaper of its command's processes (`PR_SET_CHILD_SUBREAPER`): a process whose parent
//! ends becomes the supervisor's child, also one that called `setsid` or forked twice. When the
//! command ends, or the connection to this process, it kills its children until none is left. A
//! folder has a keeper of the same kind, which removes it.
//!
//! This needs no privileges, no cgroup and no namespace. It cannot end a process that this user may
//! not kill, or one that another service starts on request (`at`, `systemd-run`, a container's
//! daemon). If the supervisor itself is killed, it cannot end processes outside of their command's
//! group.

use std::convert::Infallible;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, RawFd};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::process::{host, isolate, kill_group, this_program, wait_within};

/// Marks a program as a supervisor or a keeper: a [`Start`] as JSON.
pub(super) const VARIABLE: &str = "PARITY_SUPERVISOR";

/// How long ending a process, or removing a folder, is retried.
const PATIENCE: Duration = Duration::from_secs(10);

/// The start parameters of a supervisor; the arguments are its command.
#[derive(Serialize, Deserialize)]
struct Start {
    /// Arguments of the host that come before the command; `None` without a host.
    host_arguments: Option<usize>,
    /// Descriptor of the connection to the process that it works for.
    connection: i32,
    /// Parent of a folder to make; the process is then the folder's keeper and has no command.
    folder: Option<PathBuf>,
    /// Descriptors that only its command gets.
    passed: Vec<RawFd>,
}

/// Messages of a supervisor.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Message {
    /// The command runs as this process.
    Started(i32),
    /// The command could not be started, or the folder not be made: the system's error.
    Failed(i32),
    /// The command and all processes that it started have ended: its wait status.
    Ended(i32),
    /// A folder was made; its path of this many bytes follows.
    Made(i32),
}

impl Message {
    fn write(self, mut connection: &UnixStream) -> io::Result<()> {
        let (kind, value) = match self {
            Self::Started(value) => (0, value),
            Self::Failed(value) => (1, value),
            Self::Ended(value) => (2, value),
            Self::Made(value) => (3, value),
        };
        let [a, b, c, d] = value.to_le_bytes();
        connection.write_all(&[kind, a, b, c, d])
    }

    fn read(mut connection: &UnixStream) -> io::Result<Self> {
        let mut bytes = [0; 5];
        connection.read_exact(&mut bytes)?;
        let [kind, value @ ..] = bytes;
        let value = i32::from_le_bytes(value);
        match kind {
            0 => Ok(Self::Started(value)),
            1 => Ok(Self::Failed(value)),
            2 => Ok(Self::Ended(value)),
            3 => Ok(Self::Made(value)),
            _ => Err(unexpected()),
        }
    }
}

fn unexpected() -> io::Error {
    io::Error::other("a supervisor said something else")
}

// ---------------------------------------------------------------- of the process that has commands

/// A running command, with all processes that it started; dropping it ends all of them.
#[derive(Debug)]
pub struct Supervised {
    supervisor: Child,
    connection: UnixStream,
    leader: u32,
    ended: Option<ExitStatus>,
}

impl Supervised {
    /// Starts the program of `command` with its arguments, environment and folder, and with these
    /// streams.
    ///
    /// # Errors
    /// Errors of the system: the program or its supervisor cannot be started.
    pub fn spawn(command: &Command, streams: [Stdio; 3]) -> io::Result<Self> {
        Self::spawn_passing(command, streams, &[])
    }

    /// As [`Self::spawn`], for a command that also gets these descriptors, under the same numbers.
    ///
    /// # Errors
    /// Errors of [`Self::spawn`].
    pub fn spawn_passing(
        command: &Command,
        [stdin, stdout, stderr]: [Stdio; 3],
        passed: &[RawFd],
    ) -> io::Result<Self> {
        let (mut supervisor, connection) = start(None, passed, |supervisor| {
            supervisor.arg(command.get_program()).args(command.get_args());
            for (name, value) in command.get_envs() {
                match value {
                    Some(value) => supervisor.env(name, value),
                    None => supervisor.env_remove(name),
                };
            }
            if let Some(folder) = command.get_current_dir() {
                supervisor.current_dir(folder);
            }
            supervisor.stdin(stdin).stdout(stdout).stderr(stderr);
        })?;
        let failed = |supervisor: &mut Child, error| {
            let _ = supervisor.kill().and_then(|()| supervisor.wait());
            Err(error)
        };
        match Message::read(&connection) {
            Ok(Message::Started(leader)) => {
                Ok(Self { supervisor, connection, leader: leader.unsigned_abs(), ended: None })
            }
            Ok(Message::Failed(code)) => {
                failed(&mut supervisor, io::Error::from_raw_os_error(code))
            }
            Ok(_) => failed(&mut supervisor, unexpected()),
            Err(error) => failed(&mut supervisor, error),
        }
    }

    /// The number of the command's process.
    pub(super) fn id(&self) -> u32 {
        self.leader
    }

    /// The command's piped streams that were not taken yet.
    pub fn take_streams(
        &mut self,
    ) -> (Option<ChildStdin>, Option<ChildStdout>, Option<ChildStderr>) {
        (self.supervisor.stdin.take(), self.supervisor.stdout.take(), self.supervisor.stderr.take())
    }

    /// Waits for the command and the end of all processes that it started; `None` when the time
    /// limit is over.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn wait_within(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            // A limit of zero would mean no limit.
            self.connection.set_read_timeout(Some(limit.max(Duration::from_millis(1))))?;
            self.ended = match Message::read(&self.connection) {
                Ok(Message::Ended(status)) => Some(ExitStatus::from_raw(status)),
                Ok(_) => return Err(unexpected()),
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                    ) =>
                {
                    None
                }
                // The supervisor was killed, and its command dies with it.
                Err(_) => {
                    kill_group(self.leader);
                    Some(self.supervisor.wait()?)
                }
            };
        }
        Ok(self.ended)
    }

    /// Waits for the command and the end of all processes that it started; `None` when the other
    /// end of `stream` is closed first.
    ///
    /// # Errors
    /// Errors of the system.
    pub(super) fn wait_unless_closed(
        &mut self,
        stream: &UnixStream,
    ) -> io::Result<Option<ExitStatus>> {
        let awaited = |stream: &UnixStream, events| libc::pollfd {
            fd: stream.as_raw_fd(),
            events,
            revents: 0,
        };
        let mut both = [
            awaited(&self.connection, libc::POLLIN | libc::POLLRDHUP),
            awaited(stream, libc::POLLRDHUP),
        ];
        // SAFETY: two valid entries.
        while unsafe { libc::poll(both.as_mut_ptr(), 2, -1) } == -1 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        if both[0].revents != 0 { self.wait_within(PATIENCE) } else { Ok(None) }
    }

    /// Ends the command, if it has not ended, with all processes that it started.
    pub fn end(&mut self) {
        // It may have ended.
        let _ = self.connection.shutdown(std::net::Shutdown::Both);
        if !matches!(
            wait_within(&mut self.supervisor, PATIENCE + Duration::from_secs(1)),
            Ok(Some(_))
        ) {
            kill_group(self.leader);
            let _ = self.supervisor.kill().and_then(|()| self.supervisor.wait());
        }
    }
}

impl Drop for Supervised {
    fn drop(&mut self) {
        self.end();
    }
}

/// Starts this program again as a supervisor, or as the keeper of a folder that it makes.
fn start(
    folder: Option<&Path>,
    passed: &[RawFd],
    set_up: impl FnOnce(&mut Command),
) -> io::Result<(Child, UnixStream)> {
    let (ours, theirs) = UnixStream::pair()?;
    let connection = theirs.as_raw_fd();
    // Naming the initialiser here keeps it in the program: the linker drops unreferenced code.
    std::hint::black_box(&INITIALISER);
    let mut supervisor = this_program();
    set_up(&mut supervisor);
    let start = Start {
        host_arguments: host().map(|host| host.arguments.len()),
        connection,
        folder: folder.map(Path::to_owned),
        passed: passed.to_vec(),
    };
    supervisor.env(VARIABLE, serde_json::to_string(&start)?);
    let kept: Vec<RawFd> = passed.iter().copied().chain([connection]).collect();
    // SAFETY: between fork and exec only fcntl is called, which is async-signal-safe; the list is
    // the closure's.
    unsafe {
        supervisor.pre_exec(move || {
            kept.iter().try_for_each(|&descriptor| {
                checked(libc::fcntl(descriptor, libc::F_SETFD, 0)).map(drop)
            })
        });
    }
    Ok((supervisor.spawn()?, ours))
}

/// A folder for temporary files, which is removed when the value is dropped, and after any end of
/// this process.
///
/// # Errors
/// Errors of the system.
pub fn temporary_folder(prefix: &str) -> io::Result<tempfile::TempDir> {
    /// The common parent folder, and the connection that its keeper watches.
    static ALL: Mutex<Option<(PathBuf, UnixStream)>> = Mutex::new(None);
    let mut all = ALL.lock().unwrap_or_else(|e| e.into_inner());
    let (folder, _) = match &mut *all {
        Some(all) => all,
        none => none.insert(kept_folder(&std::env::temp_dir())?),
    };
    tempfile::Builder::new().prefix(prefix).tempdir_in(folder)
}

/// A folder with a keeper, which removes it when the connection ends.
fn kept_folder(parent: &Path) -> io::Result<(PathBuf, UnixStream)> {
    let (_keeper, connection) = start(Some(parent), &[], |keeper| {
        keeper.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    })?;
    match Message::read(&connection)? {
        Message::Made(length) => {
            let mut path = vec![0; length.unsigned_abs() as usize];
            (&connection).read_exact(&mut path)?;
            Ok((std::ffi::OsString::from_vec(path).into(), connection))
        }
        Message::Failed(code) => Err(io::Error::from_raw_os_error(code)),
        _ => Err(unexpected()),
    }
}

// ---------------------------------------------------------------- of a supervisor

// SAFETY of the section: its entries are functions without results that the loader calls before
// `main`, with arguments that this one ignores.
#[used]
#[unsafe(link_section = ".init_array")]
static INITIALISER: extern "C" fn() = initialise;

extern "C" fn initialise() {
    become_supervisor(false);
}

/// Supervises, if this program was started for that; then it never returns. A host is not ready
/// before it has loaded the library, so that the initialiser leaves its start to `in_host`.
pub(super) fn become_supervisor(in_host: bool) {
    let Ok(start) = std::env::var(VARIABLE) else { return };
    let Ok(start) = serde_json::from_str::<Start>(&start) else {
        eprintln!("{VARIABLE} is set by nobody but this program");
        end(2);
    };
    if start.host_arguments.is_some() != in_host {
        return;
    }
    // SAFETY: no other thread runs before `main`, or before a host that was started for this has
    // loaded the library. A command is not a supervisor.
    unsafe { std::env::remove_var(VARIABLE) };
    // SAFETY: the descriptor was made for this process, and nothing else here knows it.
    let connection = unsafe { UnixStream::from_raw_fd(start.connection) };
    let failed = match &start.folder {
        Some(parent) => keep_folder(&connection, parent),
        None => supervise(&connection, &start),
    };
    let Err(error) = failed;
    // If this cannot be sent, the receiver is gone.
    let _ = Message::Failed(error.raw_os_error().unwrap_or(libc::EIO)).write(&connection);
    end(1);
}

/// Ends the process at once: exit handlers belong to the program, which never started.
fn end(code: i32) -> ! {
    // SAFETY: _exit takes an integer and does not return.
    unsafe { libc::_exit(code) }
}

fn checked(result: i32) -> io::Result<i32> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Makes this process unreachable for signals to groups and from a terminal. Returns the signals
/// that were blocked.
fn withdraw(connection: &UnixStream) -> io::Result<libc::sigset_t> {
    // SAFETY: calls with integers, and with signal sets of this function; the zeroed one is
    // written before it is read.
    unsafe {
        checked(libc::fcntl(connection.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC))?;
        // It fails for the leader of a group, which already has a separate group.
        libc::setsid();
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        checked(libc::sigprocmask(libc::SIG_SETMASK, &all, &mut before))?;
        Ok(before)
    }
}

/// Runs the command of this process's arguments until it or the connection ends.
fn supervise(connection: &UnixStream, start: &Start) -> io::Result<Infallible> {
    let unblocked = withdraw(connection)?;
    // SAFETY: prctl and signalfd with integers, and with a signal set of this function.
    let children = unsafe {
        checked(libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1))?;
        let mut child = std::mem::zeroed();
        libc::sigemptyset(&mut child);
        libc::sigaddset(&mut child, libc::SIGCHLD);
        File::from_raw_fd(checked(libc::signalfd(
            -1,
            &child,
            libc::SFD_CLOEXEC | libc::SFD_NONBLOCK,
        ))?)
    };
    let mut arguments = std::env::args_os().skip(1 + start.host_arguments.unwrap_or(0));
    let mut command = Command::new(arguments.next().ok_or_else(unexpected)?);
    command.args(arguments);
    isolate(&mut command);
    // SAFETY: between fork and exec only sigprocmask is called, which is async-signal-safe; the
    // set is the closure's.
    unsafe {
        command.pre_exec(move || {
            checked(libc::sigprocmask(libc::SIG_SETMASK, &unblocked, std::ptr::null_mut()))
                .map(drop)
        });
    }
    let leader = command.spawn()?.id() as i32;
    leave_streams();
    for &descriptor in &start.passed {
        // SAFETY: these descriptors were passed through for the command, and nothing here uses
        // them.
        unsafe { libc::close(descriptor) };
    }
    let told = Message::Started(leader).write(connection);
    let status = if told.is_ok() { status_of(leader, connection, &children) } else { None };
    end_children();
    if let Some(status) = status {
        Message::Ended(status).write(connection)?;
    }
    end(0)
}

/// Only the command has the streams: their readers see the end when the command ends.
fn leave_streams() {
    let Ok(nothing) = File::options().read(true).write(true).open("/dev/null") else { return };
    for stream in 0..3 {
        // SAFETY: dup2 with integers; nothing else here uses the standard streams.
        unsafe { libc::dup2(nothing.as_raw_fd(), stream) };
    }
}

/// The wait status of the command; `None` when the connection ends first.
fn status_of(leader: i32, connection: &UnixStream, children: &File) -> Option<i32> {
    let awaited = |descriptor: i32| libc::pollfd {
        fd: descriptor,
        events: libc::POLLIN | libc::POLLRDHUP,
        revents: 0,
    };
    loop {
        while let Some((child, status)) = reap() {
            if child == leader {
                return Some(status);
            }
        }
        let mut both = [awaited(connection.as_raw_fd()), awaited(children.as_raw_fd())];
        // SAFETY: two valid entries.
        unsafe { libc::poll(both.as_mut_ptr(), 2, -1) };
        if both[0].revents != 0 {
            return None;
        }
        // The number of the child does not matter: all ended children are reaped.
        let _ = (&mut &*children).read(&mut [0; 1024]);
    }
}

/// A child that has ended, and its status; `None` where none has.
fn reap() -> Option<(i32, i32)> {
    let mut status = 0;
    // SAFETY: a valid place for the status.
    let child = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) };
    (child > 0).then_some((child, status))
}

/// Kills children until none is left: the children of a killed one become this process's children.
fn end_children() {
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        let children = children();
        for &child in &children {
            // SAFETY: kill with integers. A child that was not waited for keeps its number, and
            // only this thread waits.
            unsafe { libc::kill(child, libc::SIGKILL) };
        }
        while reap().is_some() {}
        // SAFETY: waitid asks only whether there are children at all.
        let none = unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) } == -1;
        if none {
            return;
        }
        // A killed process takes a moment to end.
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Process numbers of this process's children.
fn children() -> Vec<i32> {
    let own = std::process::id();
    // Fast where the system supports it: it must also catch a process that forks and ends without
    // pause.
    if let Ok(list) = std::fs::read_to_string(format!("/proc/{own}/task/{own}/children")) {
        return list.split_whitespace().filter_map(|child| child.parse().ok()).collect();
    }
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    numbers.filter(|&number| parent_of(number) == Some(own)).collect()
}

fn parent_of(process: i32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name, in parentheses, may contain any text.
    stat.rsplit(')').next()?.split_whitespace().nth(1)?.parse().ok()
}

/// Makes a folder, and removes it when the connection ends.
fn keep_folder(connection: &UnixStream, parent: &Path) -> io::Result<Infallible> {
    withdraw(connection)?;
    let folder = tempfile::Builder::new().prefix("parity-").tempdir_in(parent)?.keep();
    let path = folder.clone().into_os_string().into_vec();
    let told = Message::Made(path.len() as i32)
        .write(connection)
        .and_then(|()| (&*connection).write_all(&path));
    if told.is_ok() {
        let _ = (&*connection).read(&mut [0]);
    }
    let start = Instant::now();
    // Commands that are ending may still write into it.
    while let Err(error) = std::fs::remove_dir_all(&folder) {
        if error.kind() == io::ErrorKind::NotFound || start.elapsed() > PATIENCE {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    end(0)
}

/// The result of a command that ended in time.
#[derive(Debug)]
pub struct Ended {
    /// Its exit status.
    pub status: ExitStatus,
    /// What it wrote to both streams.
    pub words: String,
}

/// Runs a command to its end, supervised; `None` if it does not end within the limit. In both cases
/// no process that it started is left.
///
/// # Errors
/// A command that cannot be started, and an error of the output file.
pub fn run_within(command: &Command, limit: Duration) -> io::Result<Option<Ended>> {
    // A file takes any amount of output; a full pipe without a reader would block the command.
    let mut words: File = tempfile::tempfile()?;
    let streams = [Stdio::null(), words.try_clone()?.into(), words.try_clone()?.into()];
    let Some(status) = Supervised::spawn(command, streams)?.wait_within(limit)? else {
        return Ok(None);
    };
    let mut bytes = Vec::new();
    words.rewind()?;
    words.read_to_end(&mut bytes)?;
    Ok(Some(Ended { status, words: String::from_utf8_lossy(&bytes).into_owned() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_does_not_end_is_killed_with_what_it_started() {
        let shell = |script: &str| {
            let mut shell = Command::new("sh");
            shell.args(["-c", script]);
            shell
        };
        let ended = run_within(&shell("echo out; echo err >&2; exit 3"), Duration::from_secs(10));
        let ended = ended.expect("it runs").expect("in time");
        assert_eq!((ended.status.code(), ended.words.as_str()), (Some(3), "out\nerr\n"));
        let dir = tempfile::tempdir().expect("a scratch directory");
        let file = dir.path().join("late");
        // One process of its group, and one that left the group, the session and its parent.
        let late = format!(
            "(sleep 1; touch {0}) & (setsid sh -c 'sleep 1; touch {0}' &) ; sleep 100",
            file.display()
        );
        assert!(run_within(&shell(&late), Duration::from_millis(200)).expect("it runs").is_none());
        let missing = run_within(&Command::new("no-such-program"), Duration::from_secs(10))
            .expect_err("there is none");
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        std::thread::sleep(Duration::from_millis(1500));
        assert!(!file.exists(), "what it started went on");
    }
}
