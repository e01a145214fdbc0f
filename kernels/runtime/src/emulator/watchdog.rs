//! The time limit of a launch. The time that a worker waits for a core does not count: on a machine
//! with other work a right kernel takes longer.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use super::fault;

/// A worker process that does not answer is ended after that many times the limit of a launch: it
/// may wait for a core.
pub const OF_A_PROCESS: u32 = 4;

/// How long an interrupted worker has before it is interrupted again.
const AGAIN: Duration = Duration::from_millis(20);

/// Waits for the workers of a launch, and interrupts them when it takes too long.
pub struct Watchdog {
    running: Mutex<usize>,
    workers: Mutex<Vec<Worker>>,
    changed: Condvar,
}

/// A thread of a launch.
struct Worker {
    thread: libc::pthread_t,
    /// Its number in the system.
    number: libc::pid_t,
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
        // SAFETY: neither has preconditions.
        let (thread, number) = unsafe { (libc::pthread_self(), libc::gettid()) };
        self.workers.lock().unwrap_or_else(|e| e.into_inner()).push(Worker { thread, number });
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
        let by_the_clock = start.elapsed();
        let used = |worker: &Worker| Some(by_the_clock.saturating_sub(worker.waited_for_a_core()?));
        // Before any has started, and after all have ended, there is nothing to stop.
        limit.saturating_sub(workers.iter().filter_map(used).max().unwrap_or_default())
    }

    /// The signal comes before the flag, so that the endless thread is the one in the error; the
    /// flag then stops workers that are between two coroutines.
    fn interrupt(&self) {
        for worker in self.workers.lock().unwrap_or_else(|e| e.into_inner()).iter() {
            // SAFETY: the caller keeps every worker joinable until `watch` returns.
            unsafe { libc::pthread_kill(worker.thread, fault::INTERRUPT) };
        }
    }
}

impl Worker {
    /// How long it was ready to run and had no core, since it started; `None` if it has ended.
    /// Nothing where the system does not say: then its time is that of the clock.
    fn waited_for_a_core(&self) -> Option<Duration> {
        let task = PathBuf::from(format!("/proc/self/task/{}", self.number));
        let said = std::fs::read_to_string(task.join("schedstat")).ok();
        // Nanoseconds on a core, nanoseconds ready, and how often.
        let ready = said.as_ref().and_then(|said| said.split(' ').nth(1)?.parse().ok());
        match ready {
            None if !task.exists() => None,
            ready => Some(Duration::from_nanos(ready.unwrap_or(0))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_millis(150);

    /// Watches workers with this limit, and returns whether they were told to stop and how long it
    /// took.
    fn watched(workers: usize, work: impl Fn(&AtomicBool) + Sync) -> (bool, Duration) {
        let (start, cancelled, watchdog) =
            (Instant::now(), AtomicBool::new(false), Watchdog::new(workers));
        std::thread::scope(|scope| {
            let one = || {
                scope.spawn(|| {
                    let _counted = watchdog.enter();
                    work(&cancelled);
                })
            };
            let handles: Vec<_> = (0..workers).map(|_| one()).collect();
            watchdog.watch(LIMIT, &cancelled);
            drop(handles);
        });
        (cancelled.into_inner(), start.elapsed())
    }

    #[test]
    fn a_worker_that_waits_for_a_core_has_not_reached_its_limit() {
        // More workers than cores, of which each needs a share of the limit.
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let own = LIMIT * 2 / 3;
        let busy = |_: &AtomicBool| {
            let start = processor_time();
            while processor_time() - start < own {
                std::hint::spin_loop();
            }
        };
        let (cancelled, took) = watched(4 * cores, busy);
        assert!(!cancelled && took > 2 * LIMIT, "{took:?}");
    }

    /// What the calling thread has had of a processor.
    fn processor_time() -> Duration {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: it writes to the variable that it is given.
        unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }

    #[test]
    fn an_endless_worker_is_stopped_after_its_limit_and_one_that_waits_for_ever_as_well() {
        let (cancelled, took) = watched(1, |cancelled| {
            while !cancelled.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        assert!(cancelled && took >= LIMIT, "{took:?}");
        let (cancelled, took) = watched(1, |cancelled| {
            while !cancelled.load(Ordering::Relaxed) {
                std::thread::sleep(AGAIN / 4);
            }
        });
        assert!(cancelled && took >= LIMIT && took < 4 * LIMIT, "{took:?}");
    }
}
