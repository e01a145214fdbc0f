//! The time limit of a launch.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use super::fault;

/// Waits for the workers of a launch, and interrupts them when it takes too long.
pub struct Watchdog {
    running: Mutex<usize>,
    workers: Mutex<Vec<libc::pthread_t>>,
    changed: Condvar,
}

/// Counts a worker as ended when dropped, also when it panics.
pub struct CountAtEnd<'a>(&'a Watchdog);

impl Drop for CountAtEnd<'_> {
    fn drop(&mut self) {
        *self.0.running.lock().unwrap_or_else(|e| e.into_inner()) -= 1;
        self.0.changed.notify_all();
    }
}

impl Watchdog {
    /// For this many workers.
    pub fn new(workers: usize) -> Self {
        Self { running: Mutex::new(workers), workers: Mutex::default(), changed: Condvar::new() }
    }

    /// Registers the calling worker until the guard is dropped.
    pub fn enter(&self) -> CountAtEnd<'_> {
        // SAFETY: pthread_self has no preconditions.
        self.workers
            .lock()
            .unwrap_or_else(|e| e.into_inner())
            .push(unsafe { libc::pthread_self() });
        CountAtEnd(self)
    }

    /// Returns once every worker has ended. No worker may be joined before that.
    pub fn watch(&self, limit: Duration, cancelled: &AtomicBool) {
        let mut running = self.running.lock().unwrap_or_else(|e| e.into_inner());
        let (mut wait, mut signalled) = (limit, false);
        while *running > 0 {
            let waited = self.changed.wait_timeout_while(running, wait, |running| *running > 0);
            let (guard, timeout) = waited.unwrap_or_else(|e| e.into_inner());
            running = guard;
            if *running > 0 && timeout.timed_out() {
                // The signal first, so that the endless thread is the one in the error; the flag
                // then stops workers that are between two coroutines.
                for &worker in self.workers.lock().unwrap_or_else(|e| e.into_inner()).iter() {
                    // SAFETY: the caller keeps every worker joinable until this function returns.
                    unsafe { libc::pthread_kill(worker, fault::INTERRUPT) };
                }
                if signalled {
                    cancelled.store(true, Ordering::Relaxed);
                }
                (signalled, wait) = (true, Duration::from_millis(20));
            }
        }
    }
}
