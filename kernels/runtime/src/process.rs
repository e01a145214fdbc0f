//! Child processes: process groups, time limits, and commands that run to their end; how this
//! program is started again; how this process handles its freed memory; and its environment.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Up to this many bytes of freed memory at the end of the heap are kept for later allocations.
const KEPT_BYTES: i32 = i32::MAX;
/// The smallest growth of the heap, in bytes.
const GROWTH_BYTES: i32 = 256 << 20;

/// Reuses freed memory for later allocations. By default glibc maps each large tensor again and
/// unmaps it when it is freed, and the kernel clears every page of it again: half of a large case's
/// processor time. Call it before any thread is started. With another allocator it has no effect.
pub fn keep_freed_memory() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [
        // Large blocks also come from the heap, and from a single heap: others cannot hold them.
        (libc::M_MMAP_MAX, 0),
        (libc::M_ARENA_MAX, 1),
        (libc::M_TRIM_THRESHOLD, KEPT_BYTES),
        (libc::M_TOP_PAD, GROWTH_BYTES),
    ] {
        // SAFETY: sets a parameter of the allocator, under its own lock. The allocator ignores an
        // unknown parameter.
        let known = unsafe { libc::mallopt(parameter, value) };
        tracing::debug!(parameter, value, known, "mallopt");
    }
}

/// Sets a variable of this process's environment for a library that reads it, where it is not set
/// yet and no other thread could read it at the same time. Returns whether it is set now.
pub fn set_variable_if_alone(name: &str, value: &str) -> bool {
    if std::env::var_os(name).is_some() {
        return true;
    }
    let alone = std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1);
    if alone {
        // SAFETY: this is the only thread, so no other one reads or changes the environment.
        unsafe { std::env::set_var(name, value) };
    }
    alone
}

/// The program that loaded this library, such as a Python interpreter, where that is not the
/// executable which the library was linked into.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// The interpreter.
    pub program: PathBuf,
    /// Its arguments, after which it loads the library and calls
    /// [`become_worker_of_host`](crate::become_worker_of_host) before anything else.
    /// Further arguments are those of [`this_program`].
    pub arguments: Vec<OsString>,
    /// The file of the library.
    pub library: PathBuf,
}

static HOST: OnceLock<Host> = OnceLock::new();

/// Declares that this library runs in a host. Without it, workers and supervisors are this
/// executable, started again.
///
/// # Errors
/// The host, if another one was declared before.
pub fn set_host(host: Host) -> Result<(), Host> {
    let known = HOST.get_or_init(|| host.clone());
    if *known == host { Ok(()) } else { Err(host) }
}

/// The host, if this library runs in one.
pub(crate) fn host() -> Option<&'static Host> {
    HOST.get()
}

/// A command that starts this program again.
pub fn this_program() -> Command {
    let Some(host) = host() else { return Command::new("/proc/self/exe") };
    let mut command = Command::new(&host.program);
    command.args(&host.arguments);
    command
}

/// The file that holds this program's code. Opened, it is the running one even after a rebuild has
/// replaced it, unless a host loaded it.
pub fn this_file() -> &'static Path {
    host().map_or(Path::new("/proc/self/exe"), |host| &host.library)
}

/// An environment variable; one that is empty counts as not set.
pub fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// Makes the command the leader of a new process group, which dies with the thread that starts it.
pub fn isolate(command: &mut Command) {
    command.process_group(0);
    // SAFETY: between fork and exec only prctl is called, which is async-signal-safe and touches
    // no memory.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        });
    }
}

/// Waits for a process; `None` when the time limit is over.
///
/// # Errors
/// Errors of the system.
pub fn wait_within(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    loop {
        match child.try_wait()? {
            Some(status) => return Ok(Some(status)),
            None if start.elapsed() >= limit => return Ok(None),
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}

/// Kills every process of the group that `leader` leads; a group that is already gone is not an
/// error.
///
/// The id of a waited-for leader is not reused while its group has members; without members there
/// is nothing to kill.
pub fn kill_group(leader: u32) {
    let Ok(leader) = libc::pid_t::try_from(leader) else { return };
    if leader > 1 {
        // SAFETY: kill takes two integers; the group is positive and not 1, so neither "every
        // process" nor this process's own group can be meant.
        unsafe { libc::kill(-leader, libc::SIGKILL) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_is_not_set_next_to_other_threads() {
        let name = "PARITY_TEST_OF_A_VARIABLE";
        // The test's own thread waits next to that of the harness.
        assert!(!set_variable_if_alone(name, "set"));
        assert_eq!(variable(name), None);
        // One that is set stays.
        assert!(set_variable_if_alone("PATH", "set"));
        assert_ne!(variable("PATH"), Some("set".into()));
    }
}
