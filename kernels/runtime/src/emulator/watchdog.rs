//! The time limit of a launch. It is of the processor's time that one of its workers used: on a
//! machine with other work a right kernel may take longer.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use super::fault;

/// A launch also ends after that many times its limit by the clock: a worker may wait for ever and
/// use no time of a processor.
pub const BY_THE_CLOCK: u32 = 8;

/// How long an interrupted worker has before it is interrupted again.
const AGAIN: Duration = Duration::from_millis(20);

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

    /// Registers the calling worker, a thread of this launch, until the guard is dropped.
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
        let start = Instant::now();
        let mut running = self.running.lock().unwrap_or_else(|e| e.into_inner());
        let (mut wait, mut signalled) = (limit, false);
        while *running > 0 {
            let waited = self.changed.wait_timeout_while(running, wait, |running| *running > 0);
            let (guard, timeout) = waited.unwrap_or_else(|e| e.into_inner());
            running = guard;
            if *running == 0 || !timeout.timed_out() {
                continue;
            }
            let left = self.left_of(limit, start);
            if left.is_zero() {
                self.interrupt();
                if signalled {
                    cancelled.store(true, Ordering::Relaxed);
                }
                (signalled, wait) = (true, AGAIN);
            } else {
                wait = left.max(AGAIN);
            }
        }
    }

    /// The least time after which the launch may have reached its limit.
    fn left_of(&self, limit: Duration, start: Instant) -> Duration {
        let workers = self.workers.lock().unwrap_or_else(|e| e.into_inner());
        let used = workers.iter().map(|&worker| processor_time(worker)).max().unwrap_or_default();
        let by_the_clock = (limit * BY_THE_CLOCK).saturating_sub(start.elapsed());
        limit.saturating_sub(used).min(by_the_clock)
    }

    /// The signal comes before the flag, so that the endless thread is the one in the error; the
    /// flag then stops workers that are between two coroutines.
    fn interrupt(&self) {
        for &worker in self.workers.lock().unwrap_or_else(|e| e.into_inner()).iter() {
            // SAFETY: the caller keeps every worker joinable until `watch` returns.
            unsafe { libc::pthread_kill(worker, fault::INTERRUPT) };
        }
    }
}

/// The processor's time of a thread that has not been joined; nothing of one that has ended.
fn processor_time(thread: libc::pthread_t) -> Duration {
    let mut clock: libc::clockid_t = 0;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the thread is joinable; both functions write to the variables that they are given.
    let found = unsafe {
        libc::pthread_getcpuclockid(thread, &raw mut clock) == 0
            && libc::clock_gettime(clock, &raw mut time) == 0
    };
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    if found { Duration::new(seconds, time.tv_nsec as u32) } else { Duration::ZERO }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_millis(150);

    /// Watches one worker with this limit, and returns whether it was told to stop and how long it
    /// took.
    fn watched(work: impl Fn(&AtomicBool) + Sync) -> (bool, Duration) {
        let (start, cancelled, watchdog) =
            (Instant::now(), AtomicBool::new(false), Watchdog::new(1));
        std::thread::scope(|scope| {
            let handle = scope.spawn(|| {
                let _counted = watchdog.enter();
                work(&cancelled);
            });
            watchdog.watch(LIMIT, &cancelled);
            drop(handle);
        });
        (cancelled.into_inner(), start.elapsed())
    }

    #[test]
    fn a_worker_that_the_machine_gives_no_time_has_not_reached_its_limit() {
        // It sleeps, as a thread does that waits for a core.
        let (cancelled, took) = watched(|_| std::thread::sleep(2 * LIMIT));
        assert!(!cancelled && took >= 2 * LIMIT, "{took:?}");
    }

    #[test]
    fn an_endless_worker_is_stopped_after_its_limit_and_one_that_waits_for_ever_as_well() {
        let (cancelled, took) = watched(|cancelled| {
            while !cancelled.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        assert!(cancelled && took >= LIMIT, "{took:?}");
        let (cancelled, took) = watched(|cancelled| {
            while !cancelled.load(Ordering::Relaxed) {
                std::thread::sleep(AGAIN / 4);
            }
        });
        assert!(cancelled && took >= BY_THE_CLOCK * LIMIT, "{took:?}");
    }
}
