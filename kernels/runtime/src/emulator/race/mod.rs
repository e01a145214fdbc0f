//! Races between the threads of a cluster: two accesses of one byte, one of them a store, with
//! nothing that orders them.
//!
//! Each thread has a vector clock ([`clock`]). A barrier, `__syncwarp`, an mbarrier or the
//! cluster's barrier hands the clocks of those who arrive to those who wait. Shuffles, votes and
//! MMAs order no memory, as CUDA's programming guide says. Each access is held against the last
//! accesses of the same bytes ([`shadow`]). The verdict is the same under every schedule, so one
//! schedule is enough: the deterministic one.
//!
//! Asynchronous work has components of its own:
//!
//! | work | its accesses are over for |
//! | --- | --- |
//! | `cp.async` | its thread, after the wait; or those who wait at the mbarrier of its arrival |
//! | bulk copies and TMA | those who wait at the mbarrier that counts its bytes |
//! | the operands of a wgmma | the lanes of its warp, after the wait |
//! | bulk additions | their thread, after the wait |
//!
//! Two threads may store the same value to the same bytes without an order: CUDA promises that one
//! of the stores happens. So a store after an unordered store is a race only if it changes the
//! bytes, which is known when the thread goes on.

pub(super) mod clock;
mod shadow;

use std::cell::RefCell;
use std::rc::Rc;

use self::clock::{Clock, Release};
use self::shadow::{Earlier, IN_FLIGHT, Shadow, View};
use super::accesses::AccessKind;

/// The races of one cluster, shared by its blocks; `None` where they are not looked for.
pub(super) type SharedRaces = Option<Rc<RefCell<Races>>>;

/// Two accesses of the same bytes without an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Race {
    /// The first byte that both access.
    pub address: usize,
    /// What the later access does.
    pub kind: AccessKind,
    /// Offset of its code in the module; 0 if unknown.
    pub place: u32,
    /// Who accessed first.
    pub other: Party,
    /// What that access did.
    pub other_kind: AccessKind,
    /// Offset of its code.
    pub other_place: u32,
}

/// Who accesses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Party {
    /// A thread.
    Thread {
        /// Rank of its block in the cluster.
        rank: u32,
        /// Number in the block.
        thread: u32,
    },
    /// A copy of a thread (`cp.async`) that is in flight.
    Copy {
        /// Rank of the thread's block.
        rank: u32,
        /// Number of the thread.
        thread: u32,
    },
    /// An MMA of a warp (`wgmma`).
    Product {
        /// Rank of the warp's block.
        rank: u32,
        /// Number of the warp.
        warp: u32,
    },
    /// A copy whose bytes the mbarrier at this offset counts.
    Counted {
        /// Rank of the mbarrier's block.
        rank: u32,
        /// Offset in its dynamic shared memory.
        offset: u32,
    },
}

/// A thread's own part of the clocks.
#[derive(Clone)]
struct Present {
    known: Clock,
    epoch: u32,
}

/// A store after an unordered store, until it is known whether it changes the bytes.
struct Suspect {
    race: Race,
    before: Vec<u8>,
}

/// The clocks and accesses of all threads of a cluster.
pub(super) struct Races {
    /// Threads of a block, rounded up to whole warps.
    padded: u32,
    blocks: u32,
    threads: Vec<Present>,
    /// By warp: the present epoch of its MMAs.
    products: Vec<u32>,
    /// Ranks and offsets of mbarriers, in the order of their initialisation.
    mbarriers: Vec<(u32, u32)>,
    /// The last join: two clocks and what they know together.
    joined: Option<[Clock; 3]>,
    shadow: Shadow,
    suspects: Vec<Suspect>,
}

impl Races {
    /// No access so far, of a cluster of `blocks` blocks.
    pub(super) fn new(blocks: usize, threads: usize) -> Self {
        let padded = threads.next_multiple_of(32);
        let present = Present { known: Clock::default(), epoch: 1 };
        Self {
            padded: padded as u32,
            blocks: blocks as u32,
            threads: vec![present; blocks * padded],
            products: vec![1; blocks * padded / 32],
            mbarriers: Vec::new(),
            joined: None,
            shadow: Shadow::default(),
            suspects: Vec::new(),
        }
    }

    fn thread(&self, rank: u32, thread: u32) -> u32 {
        rank * self.padded + thread
    }

    fn product(&self, rank: u32, thread: u32) -> u32 {
        self.blocks * self.padded + self.thread(rank, thread) / 32
    }

    fn first_mbarrier(&self) -> u32 {
        self.blocks * self.padded + self.products.len() as u32
    }

    fn party(&self, component: u32) -> Party {
        let of = |component: u32| (component / self.padded, component % self.padded);
        let (rank, thread) = of(component & !IN_FLIGHT);
        if component & IN_FLIGHT != 0 {
            return Party::Copy { rank, thread };
        }
        if let Some(index) = component.checked_sub(self.first_mbarrier()) {
            let (rank, offset) = self.mbarriers[index as usize];
            return Party::Counted { rank, offset };
        }
        match component.checked_sub(self.blocks * self.padded) {
            Some(warp) => {
                let warps = self.padded / 32;
                Party::Product { rank: warp / warps, warp: warp % warps }
            }
            None => Party::Thread { rank, thread },
        }
    }

    fn race(&self, kind: AccessKind, place: u32, (address, earlier): (usize, Earlier)) -> Race {
        let Earlier { touch, kind: other_kind } = earlier;
        let other = self.party(touch.who);
        Race { address, kind, place, other, other_kind, other_place: touch.place }
    }

    /// A component reads bytes in one of its epochs, knowing `issued` of the others.
    fn async_read(
        &mut self,
        (me, epoch): (u32, u32),
        issued: &Clock,
        address: usize,
        bytes: usize,
    ) -> Result<(), Race> {
        let view = View { me, epoch, known: issued };
        let found = self.shadow.access(address, bytes, AccessKind::Read, view, 0);
        found.map_or(Ok(()), |found| Err(self.race(AccessKind::Read, 0, found)))
    }

    /// A thread accesses memory.
    ///
    /// # Errors
    /// The race with an earlier access.
    pub(super) fn access(
        &mut self,
        (rank, thread): (u32, u32),
        address: usize,
        bytes: usize,
        kind: AccessKind,
        place: u32,
    ) -> Result<(), Race> {
        self.settle()?;
        let me = self.thread(rank, thread);
        let Present { known, epoch } = &self.threads[me as usize];
        let view = View { me, epoch: *epoch, known };
        let Some(found) = self.shadow.access(address, bytes, kind, view, place) else {
            return Ok(());
        };
        let race = self.race(kind, place, found);
        let stores = [kind, race.other_kind] == [AccessKind::Write; 2];
        if !stores || !matches!(race.other, Party::Thread { .. }) {
            return Err(race);
        }
        // SAFETY: the thread is about to store these bytes. If they are not its memory, it ends at
        // this read by the same signal as at the store.
        let before = unsafe { std::slice::from_raw_parts(address as *const u8, bytes) }.to_vec();
        self.suspects.push(Suspect { race: Race { address, ..race }, before });
        Ok(())
    }

    /// Decides about stores after unordered stores, which have happened by now.
    ///
    /// # Errors
    /// The race of one that changed its bytes.
    pub(super) fn settle(&mut self) -> Result<(), Race> {
        if self.suspects.is_empty() {
            return Ok(());
        }
        let changed = |suspect: &Suspect| {
            let address = suspect.race.address as *const u8;
            // SAFETY: `access` read the same bytes, and the memory of a cluster outlives it.
            let now = unsafe { std::slice::from_raw_parts(address, suspect.before.len()) };
            now != suspect.before
        };
        let found = std::mem::take(&mut self.suspects).into_iter().find(changed);
        found.map_or(Ok(()), |suspect| Err(suspect.race))
    }

    /// A thread that arrives somewhere hands over all that it knows and has done.
    pub(super) fn release(&mut self, (rank, thread): (u32, u32), to: &mut Release) {
        let me = self.thread(rank, thread);
        let present = &mut self.threads[me as usize];
        to.add(&present.known);
        to.add_epoch(me, present.epoch);
        present.epoch += 1;
    }

    /// A thread that has waited knows all of `clock`.
    pub(super) fn acquire(&mut self, (rank, thread): (u32, u32), clock: &Clock) {
        let me = self.thread(rank, thread) as usize;
        let known = &self.threads[me].known;
        if known.is(clock) {
            return;
        }
        let joined = match &self.joined {
            Some([a, b, both]) if a.is(known) && b.is(clock) => both.clone(),
            _ => {
                let both = known.joined(clock);
                self.joined = Some([known.clone(), clock.clone(), both.clone()]);
                both
            }
        };
        self.threads[me].known = joined;
    }

    /// These threads of a block meet: each knows what all did before.
    pub(super) fn meet(&mut self, rank: u32, threads: impl Iterator<Item = u32> + Clone) {
        let mut release = Release::default();
        threads.clone().for_each(|thread| self.release((rank, thread), &mut release));
        let clock = release.clock();
        threads.for_each(|thread| self.acquire((rank, thread), &clock));
    }

    /// The component of a new mbarrier.
    pub(super) fn new_mbarrier(&mut self, rank: u32, offset: u32) -> u32 {
        self.mbarriers.push((rank, offset));
        self.first_mbarrier() + self.mbarriers.len() as u32 - 1
    }

    /// A thread uses what another has stored here, in a way that is no plain access.
    ///
    /// # Errors
    /// The race with that store.
    pub(super) fn uses(
        &mut self,
        (rank, thread): (u32, u32),
        address: usize,
        bytes: usize,
    ) -> Result<(), Race> {
        let me = self.thread(rank, thread);
        let Present { known, epoch } = &self.threads[me as usize];
        let view = View { me, epoch: *epoch, known };
        match self.shadow.unordered_store(address, bytes, view) {
            Some(found) => Err(self.race(AccessKind::Read, 0, found)),
            None => Ok(()),
        }
    }

    /// A copy of this thread may store these bytes from now on. `counted`: the component and the
    /// phase of the mbarrier that counts them, or none for a `cp.async`.
    ///
    /// # Errors
    /// The race with an earlier access.
    pub(super) fn copy(
        &mut self,
        (rank, thread): (u32, u32),
        address: usize,
        bytes: usize,
        counted: Option<(u32, u32)>,
    ) -> Result<(), Race> {
        self.settle()?;
        let me = self.thread(rank, thread);
        let Present { known, epoch } = &self.threads[me as usize];
        let view = View { me, epoch: *epoch, known };
        let found = self.shadow.access(address, bytes, AccessKind::Write, view, 0);
        let in_flight = (me | IN_FLIGHT, u32::MAX);
        self.shadow.landed(address, bytes, me, counted.unwrap_or(in_flight));
        found.map_or(Ok(()), |found| Err(self.race(AccessKind::Write, 0, found)))
    }

    /// A `cp.async` has landed: its thread has waited, or an mbarrier counts it.
    pub(super) fn copy_landed(
        &mut self,
        (rank, thread): (u32, u32),
        address: usize,
        bytes: usize,
        counted: Option<(u32, u32)>,
    ) {
        let me = self.thread(rank, thread);
        let to = counted.unwrap_or((me, self.threads[me as usize].epoch));
        if let Some((component, phase)) = counted {
            // A thread that has waited for its copies need not wait at the mbarrier.
            self.acquire((rank, thread), &Clock::of(component, phase));
        }
        self.shadow.landed(address, bytes, me | IN_FLIGHT, to);
    }

    /// What asynchronous work of a thread that is issued now may see.
    pub(super) fn issue(&mut self, rank: u32, threads: impl Iterator<Item = u32>) -> Clock {
        let mut release = Release::default();
        threads.for_each(|thread| self.release((rank, thread), &mut release));
        release.clock()
    }

    /// An MMA of the warp of this thread reads these bytes; it saw `issued` at its issue.
    ///
    /// # Errors
    /// The race with a store.
    pub(super) fn product_reads(
        &mut self,
        (rank, thread): (u32, u32),
        issued: &Clock,
        address: usize,
        bytes: usize,
    ) -> Result<(), Race> {
        let me = self.product(rank, thread);
        let epoch = self.products[(self.thread(rank, thread) / 32) as usize];
        self.async_read((me, epoch), issued, address, bytes)
    }

    /// The lanes of a warp have waited for its MMAs.
    pub(super) fn products_done(&mut self, rank: u32, threads: impl Iterator<Item = u32> + Clone) {
        let Some(first) = threads.clone().next() else { return };
        let warp = (self.thread(rank, first) / 32) as usize;
        let clock = Clock::of(self.product(rank, first), self.products[warp]);
        self.products[warp] += 1;
        threads.for_each(|thread| self.acquire((rank, thread), &clock));
    }

    /// A bulk addition of this thread reads these bytes; it saw `issued` at its issue.
    ///
    /// # Errors
    /// The race with a store.
    pub(super) fn addition_reads(
        &mut self,
        (rank, thread): (u32, u32),
        issued: &Clock,
        address: usize,
        bytes: usize,
    ) -> Result<(), Race> {
        let me = self.thread(rank, thread);
        self.async_read((me, self.threads[me as usize].epoch), issued, address, bytes)
    }
}

#[cfg(test)]
mod tests;
