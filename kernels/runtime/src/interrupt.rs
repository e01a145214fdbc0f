//! Handling of an interrupt of this process by a person (SIGINT), and of signals to all processes of
//! a job.

use std::io::{self, Read as _};
use std::os::fd::{FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

/// The end of a pipe that the handler writes to; -1 while no thread listens.
static WAKE: AtomicI32 = AtomicI32::new(-1);

extern "C" fn interrupted(_signal: libc::c_int) {
    let byte = 1u8;
    // SAFETY: write is async-signal-safe; the byte lives until it returns, and a descriptor of -1
    // is an error that reports it.
    unsafe { libc::write(WAKE.load(Ordering::Relaxed), (&raw const byte).cast(), 1) };
}

/// From now on an interrupt runs `then` in a separate thread instead of ending the process; `then`
/// must end it. Child processes handle interrupts as before.
///
/// # Errors
/// Errors of the system; a second call in one process.
pub fn on_interrupt(then: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let mut ends = [-1; 2];
    // SAFETY: the array has room for the two descriptors that pipe2 writes.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: both were just made, and nothing else owns them.
    let [mut read, write] =
        ends.map(|end| std::fs::File::from(unsafe { OwnedFd::from_raw_fd(end) }));
    // Open for as long as the process lives, since the handler may run at any time.
    let write = write.into_raw_fd();
    if WAKE.compare_exchange(-1, write, Ordering::Relaxed, Ordering::Relaxed).is_err() {
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "interrupts are listened for already",
        ));
    }
    std::thread::Builder::new().name("interrupt".into()).spawn(move || {
        if read.read_exact(&mut [0]).is_ok() {
            then();
        }
    })?;
    let handler = interrupted as extern "C" fn(libc::c_int);
    // SAFETY: the handler calls nothing that is not async-signal-safe.
    match unsafe { libc::signal(libc::SIGINT, handler as libc::sighandler_t) } {
        libc::SIG_ERR => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Signals by which a job's manager tells all processes of a job to end, or what else its user has
/// sent them.
const OF_JOBS: [libc::c_int; 5] =
    [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2];

extern "C" fn outlived(_signal: libc::c_int) {}

/// From now on this process outlives signals to all processes of a job: another one decides for it.
/// Child processes handle them as before, which they would not if the signals were ignored.
///
/// # Errors
/// Errors of the system.
pub fn outlive_signals() -> io::Result<()> {
    for signal in OF_JOBS {
        let handler = outlived as extern "C" fn(libc::c_int);
        // SAFETY: the handler does nothing.
        if unsafe { libc::signal(signal, handler as libc::sighandler_t) } == libc::SIG_ERR {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
