//! Vector clocks: what happened before a thread's present.
//!
//! Each component (a thread, the MMAs of a warp, the bytes that an mbarrier counts) numbers its
//! epochs from 1. A clock holds, by component, the last epoch that its owner knows to be over.
//! Threads that met at a barrier share one clock.

use std::rc::Rc;

/// By component, the last epoch that is known. A component beyond the end is not known at all.
#[derive(Clone)]
pub struct Clock(Rc<[u32]>);

impl Default for Clock {
    fn default() -> Self {
        Self(Rc::from([]))
    }
}

impl Clock {
    /// That of an owner who knows one epoch of one component.
    pub fn of(component: u32, epoch: u32) -> Self {
        let mut release = Release::default();
        release.add_epoch(component, epoch);
        release.clock()
    }

    /// The last epoch of a component that is known; 0 for none.
    pub fn epoch(&self, component: u32) -> u32 {
        self.0.get(component as usize).copied().unwrap_or(0)
    }

    /// Whether the two are one object.
    pub fn is(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    /// What both know together. If one of them knows all of it, that one is returned.
    pub fn joined(&self, other: &Self) -> Self {
        let within = |a: &[u32], b: &[u32]| {
            a.iter().zip(b).all(|(a, b)| a <= b) && a.iter().skip(b.len()).all(|&epoch| epoch == 0)
        };
        if within(&other.0, &self.0) {
            return self.clone();
        }
        if within(&self.0, &other.0) {
            return other.clone();
        }
        let mut release = Release::default();
        release.add(self);
        release.add(other);
        release.clock()
    }
}

/// What several owners know together: what they hand over at a barrier.
#[derive(Clone, Default)]
pub struct Release {
    known: Vec<u32>,
    /// The clock that was added last: the next is nearly always the same.
    last: Option<Clock>,
}

impl Release {
    /// Adds what a clock knows.
    pub fn add(&mut self, clock: &Clock) {
        if self.last.as_ref().is_some_and(|last| last.is(clock)) {
            return;
        }
        if self.known.len() < clock.0.len() {
            self.known.resize(clock.0.len(), 0);
        }
        self.known.iter_mut().zip(clock.0.iter()).for_each(|(mine, &its)| *mine = its.max(*mine));
        self.last = Some(clock.clone());
    }

    /// Adds one component's epoch.
    pub fn add_epoch(&mut self, component: u32, epoch: u32) {
        let at = component as usize;
        if self.known.len() <= at {
            self.known.resize(at + 1, 0);
        }
        self.known[at] = self.known[at].max(epoch);
    }

    /// All that was added.
    pub fn clock(&self) -> Clock {
        Clock(Rc::from(self.known.as_slice()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_join_knows_what_either_knows_and_returns_the_larger_one_itself() {
        let (a, b) = (Clock::of(0, 3), Clock::of(5, 2));
        let both = a.joined(&b);
        assert_eq!([0, 1, 5, 6].map(|component| both.epoch(component)), [3, 0, 2, 0]);
        assert!(both.joined(&a).is(&both) && a.joined(&both).is(&both));
        assert!(Clock::default().joined(&a).is(&a) && a.joined(&Clock::default()).is(&a));
    }

    #[test]
    fn a_release_gathers_the_last_epochs_of_all() {
        let mut release = Release::default();
        let clock = Clock::of(1, 7);
        release.add(&clock);
        release.add(&clock);
        release.add_epoch(1, 4);
        release.add_epoch(2, 9);
        let gathered = release.clock();
        assert_eq!([0, 1, 2, 3].map(|component| gathered.epoch(component)), [0, 7, 9, 0]);
    }
}
