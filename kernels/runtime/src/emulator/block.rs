//! The state of one block, and the common operations of all parts of the emulator: threads become
//! ready, yield, fail.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use corosensei::Yielder;
use rand::Rng;

use super::accesses::{AccessKind, Accesses, Conflict};
use super::async_proxy::AsyncProxy;
use super::bulk::BulkWork;
use super::cluster_barrier::ClusterBarrier;
use super::copies::AsyncCopies;
use super::dim3::Dim3;
use super::fault::BadAccess;
use super::mbarrier::Mbarriers;
use super::meeting::Meeting;
use super::order::ReadySet;
use super::race::clock::Release;
use super::race::{Race, Races, SharedRaces};
use super::wgmma::Products;

/// Mirror of `emulator::ThreadContext` in `emulator.h`.
#[repr(C)]
pub struct ThreadContext {
    pub(super) thread_idx: Dim3,
    pub(super) block_idx: Dim3,
    pub(super) block_dim: Dim3,
    pub(super) grid_dim: Dim3,
    pub(super) lane: u32,
    pub(super) warp: u32,
    pub(super) dynamic_shared: *mut u8,
    pub(super) dynamic_shared_bytes: u64,
    pub(super) scheduler: *mut Block,
    pub(super) watched: u32,
    pub(super) cluster_rank: u32,
}

/// A fault in a block.
#[derive(Clone, Debug)]
pub struct BlockFault {
    /// Block index.
    pub block: Dim3,
    /// Thread index.
    pub thread: Dim3,
    /// The access that is the fault, if any; the launch then replaces `what` by its description.
    pub access: Option<BadAccess>,
    /// The thread's action.
    pub what: String,
    /// The race that is the fault, if any; the launch then replaces `what` by its description.
    pub race: Option<Box<Race>>,
    /// Where in the module's code a thread waits, if that is the fault and known; the launch then
    /// adds the line.
    pub waits_at: Option<u32>,
}

/// The state of a thread.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum State {
    Ready,
    AtCollective { mask: u32, op: usize, what: *const c_char, payload: *mut c_void },
    AtBarrier { id: u32 },
    AtMbarrier { offset: u32, parity: u32, place: u32 },
    AtClusterBarrier,
    Exited,
}

#[derive(Default)]
pub(super) struct BarrierState {
    pub(super) expected: u32,
    pub(super) arrived: u32,
    pub(super) votes: u32,
    pub(super) waiting: Vec<u32>,
    /// Where in the source the last arrived thread arrived, if all must arrive at the same place:
    /// text of the module, or null.
    pub(super) place: *const c_char,
    /// What the arrived threads know.
    pub(super) release: Release,
    /// Votes of the last completed use, read by the threads that it released.
    pub(super) result: u32,
}

/// One block; lives on the worker's own stack while the block runs.
pub struct Block {
    /// All accesses of the launch, and the number of this block, if accesses are recorded.
    pub(super) accesses: Option<(Arc<Accesses>, u32)>,
    pub(super) contexts: Vec<ThreadContext>,
    pub(super) states: Vec<State>,
    /// Threads that have returned.
    pub(super) exited: usize,
    /// All buffers of global memory, in the order of their addresses; the launch outlives the block.
    pub(super) buffers: *const [Range<usize>],
    /// Where the module's code starts.
    pub(super) module_start: usize,
    /// The clocks and accesses of all threads of the cluster, if races are looked for.
    pub(super) races: SharedRaces,
    /// Number within the cluster, and all blocks of it by their ranks.
    pub(super) rank: u32,
    pub(super) peers: Vec<*mut Self>,
    pub(super) cluster: Rc<RefCell<ClusterBarrier>>,
    /// By thread: the phase of the cluster's barrier at which it has arrived but not waited.
    pub(super) cluster_arrivals: Vec<Option<u64>>,
    /// By warp.
    pub(super) meetings: Vec<Meeting>,
    pub(super) yielders: Vec<*const Yielder<(), ()>>,
    pub(super) copies: Vec<AsyncCopies>,
    pub(super) barriers: [BarrierState; 16],
    pub(super) ready: ReadySet,
    pub(super) current: u32,
    pub(super) failure: Option<BlockFault>,
    pub(super) copies_pending: usize,
    pub(super) arrivals_pending: usize,
    /// Thread at which the search for arrivals continues when no thread can run.
    pub(super) next_arrival: usize,
    pub(super) mbarriers: Mbarriers,
    pub(super) proxy: AsyncProxy,
    pub(super) bulk: BulkWork,
    pub(super) products: Products,
}

impl Block {
    /// Whether a copy completes at the time of its issue.
    pub(super) fn draw_copy_at_once(&mut self) -> bool {
        self.ready
            .random
            .as_mut()
            .is_some_and(|random| random.rng.random_ratio(random.copies_at_once, 16))
    }

    /// Whether an MMA reads its operands at the time of its issue.
    pub(super) fn draw_product_at_once(&mut self) -> bool {
        self.ready
            .random
            .as_mut()
            .is_some_and(|random| random.rng.random_ratio(random.products_at_once, 16))
    }

    /// The offset in the module of an address of its code; 0 for none.
    pub(super) fn place_of(&self, code: *const c_void) -> u32 {
        (code as usize).saturating_sub(self.module_start) as u32
    }

    /// The first of these bytes of global memory that is no buffer's, if any: also of those within
    /// the page of a buffer's end.
    pub(super) fn outside(&self, address: usize, bytes: usize) -> Option<BadAccess> {
        // SAFETY: the launch that lends them outlives its blocks.
        let buffers = unsafe { &*self.buffers };
        let at = buffers.partition_point(|buffer| buffer.end <= address);
        let address = match buffers.get(at) {
            Some(buffer) if buffer.start <= address && address + bytes <= buffer.end => {
                return None;
            }
            Some(buffer) if buffer.start <= address => buffer.end,
            _ => address,
        };
        Some(BadAccess::Outside { address })
    }

    /// Records that this block accesses global memory.
    pub(super) fn accessed(
        &self,
        kind: AccessKind,
        address: usize,
        bytes: usize,
    ) -> Result<(), BadAccess> {
        let Some((accesses, block)) = &self.accesses else { return Ok(()) };
        accesses.see(*block, kind, address, bytes).map_err(|conflict| {
            let Conflict { address, kind, other_block, other_kind } = conflict;
            let other = self.contexts[0].grid_dim.unflatten(u64::from(other_block));
            BadAccess::Unordered { address, kind, other, other_kind }
        })
    }

    /// Records a fault of this thread, unless there is one already.
    pub(super) fn fail_at(&mut self, thread: u32, what: String) {
        if self.failure.is_none() {
            self.failure = Some(self.fault_at(thread, what));
        }
    }

    pub(super) fn fail_access(&mut self, thread: u32, access: BadAccess) {
        if self.failure.is_none() {
            let fault = self.fault_at(thread, "accessed memory that it may not".to_owned());
            self.failure = Some(BlockFault { access: Some(access), ..fault });
        }
    }

    pub(super) fn fail_race(&mut self, thread: u32, race: Race) {
        if self.failure.is_none() {
            let fault = self.fault_at(thread, "took part in a race".to_owned());
            self.failure = Some(BlockFault { race: Some(Box::new(race)), ..fault });
        }
    }

    /// Tells the cluster's clocks something about thread `thread` of this block.
    pub(super) fn told<T: Default>(
        &self,
        thread: u32,
        tell: impl FnOnce(&mut Races, (u32, u32)) -> T,
    ) -> T {
        let Some(races) = &self.races else { return T::default() };
        tell(&mut races.borrow_mut(), (self.rank, thread))
    }

    /// The same of something that may be a race, which then is this thread's fault.
    pub(super) fn checked(
        &mut self,
        thread: u32,
        check: impl FnOnce(&mut Races, (u32, u32)) -> Result<(), Race>,
    ) {
        if let Err(race) = self.told(thread, |races, who| Some(check(races, who))).unwrap_or(Ok(()))
        {
            self.fail_race(thread, race);
        }
    }

    pub(super) fn fault_at(&self, thread: u32, what: String) -> BlockFault {
        let context = &self.contexts[thread as usize];
        let (block, thread) = (context.block_idx, context.thread_idx);
        BlockFault { block, thread, access: None, what, race: None, waits_at: None }
    }

    pub(super) fn make_ready(&mut self, thread: u32) {
        self.states[thread as usize] = State::Ready;
        self.ready.push(thread);
    }
}

pub(super) fn name(what: *const c_char) -> String {
    // SAFETY: `what` is a string literal of the module, which stays loaded while its blocks run.
    unsafe { CStr::from_ptr(what) }.to_string_lossy().into_owned()
}

/// The scheduler of the calling thread.
///
/// SAFETY of every use below: a context's scheduler points to the block that is running on this
/// very OS thread; only one coroutine of it runs at a time, and references made here are never
/// held across a suspension.
pub(super) unsafe fn scheduler<'a>(context: *mut ThreadContext) -> &'a mut Block {
    unsafe { &mut *(*context).scheduler }
}

/// Yields until the scheduler resumes this thread.
pub(super) unsafe fn suspend(context: *mut ThreadContext) {
    let yielder = {
        let block = unsafe { scheduler(context) };
        block.yielders[block.current as usize]
    };
    // SAFETY: set by `spawn` when this coroutine started, and valid while it runs.
    unsafe { (*yielder).suspend(()) };
}

/// Records the fault and never returns: the block is abandoned.
pub(super) unsafe fn abandon(context: *mut ThreadContext, what: String) -> ! {
    let block = unsafe { scheduler(context) };
    block.fail_at(block.current, what);
    unsafe { never_return(context) }
}

/// As [`abandon`], for a bad access.
pub(super) unsafe fn abandon_access(context: *mut ThreadContext, access: BadAccess) -> ! {
    let block = unsafe { scheduler(context) };
    block.fail_access(block.current, access);
    unsafe { never_return(context) }
}

/// Gives the thread up if the block has a fault.
pub(super) unsafe fn stop_at_fault(context: *mut ThreadContext) {
    if unsafe { scheduler(context) }.failure.is_some() {
        unsafe { never_return(context) }
    }
}

/// Yields for ever: the block has a fault, so the scheduler resumes no thread.
unsafe fn never_return(context: *mut ThreadContext) -> ! {
    loop {
        unsafe { suspend(context) };
    }
}

/// Under a schedule seed the last thread to arrive does not necessarily continue first.
pub(super) unsafe fn maybe_yield(context: *mut ThreadContext) {
    let block = unsafe { scheduler(context) };
    if block.ready.random.is_some() {
        let thread = block.current;
        block.make_ready(thread);
        unsafe { suspend(context) };
    }
}
