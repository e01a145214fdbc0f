//! A lock that threads take in turn, and a thread may take again.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread::ThreadId;

/// A reentrant lock that threads get in the order of their requests.
#[derive(Default)]
pub(super) struct Turns {
    state: Mutex<State>,
    released: Condvar,
}

#[derive(Default)]
pub(super) struct State {
    /// The thread that holds the lock, and how often it has taken it.
    pub(super) holder: Option<(ThreadId, u32)>,
    /// Tickets given to waiting threads, and the ticket that is served now.
    pub(super) given: u64,
    pub(super) serving: u64,
}

impl Turns {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Waits until no other thread has the lock.
    pub(super) fn take(&self) -> Turn<'_> {
        let own = std::thread::current().id();
        let mut state = self.state();
        match &mut state.holder {
            Some((holder, times)) if *holder == own => *times += 1,
            _ => {
                let number = state.given;
                state.given += 1;
                while state.holder.is_some() || state.serving != number {
                    state = self.released.wait(state).unwrap_or_else(|e| e.into_inner());
                }
                state.serving += 1;
                state.holder = Some((own, 1));
            }
        }
        Turn(self)
    }
}

/// A thread's turn, until it is dropped.
pub struct Turn<'t>(&'t Turns);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        match &mut state.holder {
            Some((_, times)) if *times > 1 => *times -= 1,
            _ => {
                state.holder = None;
                self.0.released.notify_all();
            }
        }
    }
}
