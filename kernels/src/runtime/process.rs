//! Child processes that can be ended with everything that they started.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Lets the command lead a process group of its own, and die with the thread that starts it: neither a
/// time limit nor the end of this process leaves anything behind.
pub fn isolate(command: &mut Command) {
    command.process_group(0);
    // SAFETY: between fork and exec only prctl is called, which is async-signal-safe and touches no memory.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        });
    }
}

/// Kills every process of the group that `leader` leads; one that is gone already is no error.
///
/// The id of a leader that was waited for is not given to another process while its group has members;
/// with none left there is nothing to kill.
pub fn kill_group(leader: u32) {
    let Ok(leader) = libc::pid_t::try_from(leader) else { return };
    if leader > 1 {
        // SAFETY: kill takes two integers; the group is positive and not 1, so neither "every process" nor
        // this process's own group can be meant.
        unsafe { libc::kill(-leader, libc::SIGKILL) };
    }
}
