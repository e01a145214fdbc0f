//! One block: its threads, what each waits for, and who runs next.
//!
//! A thread runs until it has to wait. Waiting is arrival at a rendezvous: a warp collective (all
//! lanes of the mask, one operation), a barrier (a count of threads) or an mbarrier ([`mbarrier`]). The
//! last to arrive releases the others. Asynchronous work (copies, bulk copies, matrix products) is done at
//! a random moment under a schedule seed, and as late as possible without one. When nobody can run, nothing
//! is on its way and somebody waits, the block has diverged, and that is an error which names who waits
//! for what.
//!
//! [`mbarrier`]: super::mbarrier

use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_void};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::async_proxy::{AsyncProxy, fence_async_proxy, shared_store};
use super::bulk::{BulkWork, bulk_add, bulk_commit, bulk_copy_in, bulk_wait};
use super::fault::{self, BadAccess, Ending, Running};
use super::mbarrier::{Mbarriers, copy_arrive, mbarrier_arrive, mbarrier_init, mbarrier_wait};
use super::wgmma::{Products, WarpProduct, wgmma_commit, wgmma_fence, wgmma_issue, wgmma_wait};

/// Why a block that did nothing wrong was abandoned.
pub const STOPPED: &str = "the launch was stopped";
/// Why a launch was stopped.
pub const TIME_LIMIT: &str = "did not end within the time limit";

/// CUDA's `dim3`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Dim3 {
    /// Fastest-running extent.
    pub x: u32,
    /// Second extent.
    pub y: u32,
    /// Third extent.
    pub z: u32,
}

impl Dim3 {
    /// From an array `[x, y, z]`.
    pub fn new([x, y, z]: [u32; 3]) -> Self {
        Self { x, y, z }
    }

    /// Index number `linear` within this extent, x fastest.
    pub fn unflatten(self, linear: u64) -> Self {
        let (x, y) = (u64::from(self.x), u64::from(self.y));
        Self { x: (linear % x) as u32, y: (linear / x % y) as u32, z: (linear / (x * y)) as u32 }
    }

    /// Number of indices.
    pub fn count(self) -> u64 {
        u64::from(self.x) * u64::from(self.y) * u64::from(self.z)
    }
}

impl std::fmt::Display for Dim3 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "({}, {}, {})", self.x, self.y, self.z)
    }
}

/// Mirror of `emulator::ThreadContext` in `emulator.h`.
#[repr(C)]
pub struct ThreadContext {
    thread_idx: Dim3,
    block_idx: Dim3,
    block_dim: Dim3,
    grid_dim: Dim3,
    lane: u32,
    warp: u32,
    dynamic_shared: *mut u8,
    pub(super) dynamic_shared_bytes: u64,
    scheduler: *mut Block,
}

/// `emulator::CollectiveOp`: runs once over the payloads of all lanes of the mask.
type CollectiveOp = unsafe extern "C" fn(payloads: *const *mut c_void, mask: u32);

/// Where in the source a check failed. Mirror of `emulator::Place` in `emulator.h`.
#[repr(C)]
pub struct Place {
    /// Null where it is not known.
    file: *const c_char,
    line: u32,
    column: u32,
}

impl std::fmt::Display for Place {
    /// `, FILE:LINE`, or nothing.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.file.is_null() { Ok(()) } else { write!(f, ", {}:{}", name(self.file), self.line) }
    }
}

/// Mirror of `emulator::HostApi` in `emulator.h`.
#[repr(C)]
pub struct HostApi {
    collective: unsafe extern "C" fn(*mut ThreadContext, u32, *const c_char, CollectiveOp, *mut c_void),
    barrier: unsafe extern "C" fn(*mut ThreadContext, u32, u32, u32, u32) -> u32,
    copy_async: unsafe extern "C" fn(*mut ThreadContext, *mut c_void, *const c_void, u32, u32),
    copy_commit: unsafe extern "C" fn(*mut ThreadContext),
    copy_wait: unsafe extern "C" fn(*mut ThreadContext, u32),
    copy_arrive: unsafe extern "C" fn(*mut ThreadContext, u32),
    fail: unsafe extern "C" fn(*mut ThreadContext, *const c_char),
    stop: unsafe extern "C" fn(*mut ThreadContext, *const Place, *const c_char),
    misaligned: unsafe extern "C" fn(*mut ThreadContext, *const Place, *const c_void, u32, *const c_char),
    shared_store: unsafe extern "C" fn(*mut ThreadContext, u32, u32),
    fence_async_proxy: unsafe extern "C" fn(*mut ThreadContext),
    mbarrier_init: unsafe extern "C" fn(*mut ThreadContext, u32, u32),
    mbarrier_arrive: unsafe extern "C" fn(*mut ThreadContext, u32, u32),
    mbarrier_wait: unsafe extern "C" fn(*mut ThreadContext, u32, u32),
    bulk_copy_in: unsafe extern "C" fn(*mut ThreadContext, u32, *const u8, u32, u32),
    bulk_add: unsafe extern "C" fn(*mut ThreadContext, *mut f32, u32, u32),
    bulk_commit: unsafe extern "C" fn(*mut ThreadContext),
    bulk_wait: unsafe extern "C" fn(*mut ThreadContext, u32),
    wgmma_issue: unsafe extern "C" fn(*mut ThreadContext, *const WarpProduct),
    wgmma_fence: unsafe extern "C" fn(*mut ThreadContext),
    wgmma_commit: unsafe extern "C" fn(*mut ThreadContext),
    wgmma_wait: unsafe extern "C" fn(*mut ThreadContext, u32),
}

/// The table that every module is given when it is loaded.
pub static HOST_API: HostApi = HostApi {
    collective,
    barrier,
    copy_async,
    copy_commit,
    copy_wait,
    copy_arrive,
    fail,
    stop,
    misaligned,
    shared_store,
    fence_async_proxy,
    mbarrier_init,
    mbarrier_arrive,
    mbarrier_wait,
    bulk_copy_in,
    bulk_add,
    bulk_commit,
    bulk_wait,
    wgmma_issue,
    wgmma_fence,
    wgmma_commit,
    wgmma_wait,
};

/// What a block needs of its module and launch.
pub struct BlockLaunch<'a> {
    /// `<kernel>_entry`.
    pub entry: unsafe extern "C" fn(*const c_void),
    /// `emulator_enter`.
    pub enter: unsafe extern "C" fn(*mut ThreadContext),
    /// `emulator_poison_static_shared`.
    pub poison_static_shared: unsafe extern "C" fn(u8),
    /// Machine code of the module.
    pub code: (usize, usize),
    /// Extent of the grid.
    pub grid: Dim3,
    /// Extent of a block.
    pub block: Dim3,
    /// Parameter struct, as bytes aligned to 16.
    pub params: &'a [u128],
    /// Seed of the schedule; `None` for the deterministic one.
    pub schedule_seed: Option<u64>,
    /// Set when the launch's time ran out or another block failed.
    pub cancelled: &'a AtomicBool,
}

/// What went wrong in a block.
#[derive(Clone, Debug)]
pub struct BlockFault {
    /// Block index.
    pub block: Dim3,
    /// Thread index.
    pub thread: Dim3,
    /// The access that is the fault, if one is; the launch then puts its words in place of `what`.
    pub access: Option<BadAccess>,
    /// What the thread did.
    pub what: String,
}

/// What a thread does.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum State {
    Ready,
    AtCollective { mask: u32, op: usize, what: *const c_char, payload: *mut c_void },
    AtBarrier { id: u32 },
    AtMbarrier { offset: u32, parity: u32 },
    Exited,
}

#[derive(Default)]
struct BarrierState {
    expected: u32,
    arrived: u32,
    votes: u32,
    waiting: Vec<u32>,
    /// Votes of the last completed use, read by those it released.
    result: u32,
}

struct PendingCopy {
    target: *mut u8,
    source: *const u8,
    bytes: u32,
    source_bytes: u32,
    /// Groups committed before this copy was issued.
    group: u32,
    /// Copies that the thread issued before this one.
    number: u64,
}

/// An arrival at an mbarrier that waits for copies.
struct CopyArrival {
    offset: u32,
    /// Copies with a smaller number must land first.
    behind: u64,
}

#[derive(Default)]
struct AsyncCopies {
    pending: Vec<PendingCopy>,
    committed_groups: u32,
    issued: u64,
    /// In the order of issue.
    arrivals: VecDeque<CopyArrival>,
}

/// Schedules the threads of one block; lives on the worker's own stack while the block runs.
pub struct Block {
    contexts: Vec<ThreadContext>,
    pub(super) states: Vec<State>,
    yielders: Vec<*const Yielder<(), ()>>,
    copies: Vec<AsyncCopies>,
    barriers: [BarrierState; 16],
    ready: ReadySet,
    pub(super) current: u32,
    failure: Option<BlockFault>,
    copies_pending: usize,
    arrivals_pending: usize,
    /// Thread at which the search for arrivals goes on when nobody can run.
    next_arrival: usize,
    pub(super) mbarriers: Mbarriers,
    pub(super) proxy: AsyncProxy,
    pub(super) bulk: BulkWork,
    pub(super) products: Products,
}

/// Threads that can run, and the order in which they do.
struct ReadySet {
    /// Deterministic schedule: first in, first out.
    queue: VecDeque<u32>,
    random: Option<RandomOrder>,
}

/// How long a priority may last: for about two steps of a warp, in which warps mix, or for so many that a warp is
/// done with a tile, or with its whole work, before another begins.
const STEPS_OF_A_PRIORITY: [u32; 3] = [64, 1024, 16384];
/// How many sixteenths of a block's asynchronous work may be done in the moment of its issue.
const DONE_AT_ONCE: [u32; 3] = [0, 4, 16];

struct RandomOrder {
    rng: ChaCha8Rng,
    by_warp: Vec<Vec<u32>>,
    /// A permutation of the warps: the first with a ready lane runs. Drawn anew now and then, so
    /// that one warp may run far ahead of, or far behind, all others.
    priority: Vec<u32>,
    /// Steps of a thread between two such draws, on average; one of [`STEPS_OF_A_PRIORITY`].
    steps: u32,
    /// Sixteenths of the copies that land in the moment of their issue; one of [`DONE_AT_ONCE`].
    copies_at_once: u32,
    /// The same of matrix products, which then read their operands.
    products_at_once: u32,
    ready: usize,
}

impl ReadySet {
    fn new(threads: u32, seed: Option<u64>) -> Self {
        let warps = threads.div_ceil(32);
        let random = seed.map(|seed| RandomOrder {
            rng: ChaCha8Rng::seed_from_u64(seed),
            by_warp: vec![Vec::with_capacity(32); warps as usize],
            priority: (0..warps).collect(),
            steps: STEPS_OF_A_PRIORITY[0],
            copies_at_once: DONE_AT_ONCE[0],
            products_at_once: DONE_AT_ONCE[0],
            ready: 0,
        });
        let mut set = Self { queue: VecDeque::with_capacity(threads as usize), random };
        if let Some(random) = &mut set.random {
            random.draw_manner();
            random.draw_priority();
        }
        (0..threads).for_each(|thread| set.push(thread));
        set
    }

    fn push(&mut self, thread: u32) {
        match &mut self.random {
            None => self.queue.push_back(thread),
            Some(random) => {
                random.by_warp[(thread / 32) as usize].push(thread);
                random.ready += 1;
            }
        }
    }

    fn pop(&mut self) -> Option<u32> {
        match &mut self.random {
            None => self.queue.pop_front(),
            Some(random) => random.pop(),
        }
    }
}

impl RandomOrder {
    fn draw_manner(&mut self) {
        let mut one_of = |choices: [u32; 3]| choices[self.rng.random_range(0..choices.len())];
        self.steps = one_of(STEPS_OF_A_PRIORITY);
        self.copies_at_once = one_of(DONE_AT_ONCE);
        self.products_at_once = one_of(DONE_AT_ONCE);
    }

    fn draw_priority(&mut self) {
        for i in (1..self.priority.len()).rev() {
            let j = self.rng.random_range(0..=i);
            self.priority.swap(i, j);
        }
    }

    fn pop(&mut self) -> Option<u32> {
        if self.ready == 0 {
            return None;
        }
        if self.rng.random_ratio(1, self.steps) {
            self.draw_priority();
        }
        let warp = *self.priority.iter().find(|&&warp| !self.by_warp[warp as usize].is_empty())?;
        let lanes = &mut self.by_warp[warp as usize];
        let pick = self.rng.random_range(0..lanes.len());
        self.ready -= 1;
        Some(lanes.swap_remove(pick))
    }
}

impl Block {
    /// Runs one block to its end.
    ///
    /// # Errors
    /// The first fault; the block's other threads are abandoned.
    pub fn run(
        launch: &BlockLaunch<'_>,
        block_idx: Dim3,
        shared: (*mut u8, usize),
        stacks: &mut Vec<DefaultStack>,
    ) -> Result<(), BlockFault> {
        let threads = launch.block.count() as u32;
        let seed = launch.schedule_seed.map(|seed| block_seed(seed, block_idx));
        let mut block = Box::new(Self {
            contexts: Vec::with_capacity(threads as usize),
            states: vec![State::Ready; threads as usize],
            yielders: vec![std::ptr::null(); threads as usize],
            copies: (0..threads).map(|_| AsyncCopies::default()).collect(),
            barriers: Default::default(),
            ready: ReadySet::new(threads, seed),
            current: 0,
            failure: None,
            copies_pending: 0,
            arrivals_pending: 0,
            next_arrival: 0,
            mbarriers: Mbarriers::default(),
            proxy: AsyncProxy::new(shared, threads),
            bulk: BulkWork::default(),
            products: Products::default(),
        });
        let scheduler: *mut Self = &mut *block;
        for thread in 0..threads {
            block.contexts.push(ThreadContext {
                thread_idx: launch.block.unflatten(u64::from(thread)),
                block_idx,
                block_dim: launch.block,
                grid_dim: launch.grid,
                lane: thread % 32,
                warp: thread / 32,
                dynamic_shared: shared.0,
                dynamic_shared_bytes: shared.1 as u64,
                scheduler,
            });
        }
        let mut coroutines: Vec<_> = (0..threads).map(|thread| spawn(launch, scheduler, thread, stacks)).collect();
        let result = Self::drive(scheduler, launch, &mut coroutines);
        for mut coroutine in coroutines {
            if !coroutine.done() {
                // SAFETY: the coroutine holds only kernel code and the shallow frames of the host
                // API, none of which own anything.
                unsafe { coroutine.force_reset() };
            }
            stacks.push(coroutine.into_stack());
        }
        result
    }

    /// Resumes ready threads until all have returned.
    fn drive(scheduler: *mut Self, launch: &BlockLaunch<'_>, coroutines: &mut [Thread]) -> Result<(), BlockFault> {
        // SAFETY (all dereferences of `scheduler` here): it points to the boxed block of `run`,
        // which outlives this call; the host API functions dereference it too, but only while a
        // coroutine runs, and no reference from here is alive across `resume`.
        let mut exited = 0;
        while let Some(thread) = unsafe { (*scheduler).next_thread() } {
            unsafe { (launch.enter)(&mut (&mut (*scheduler).contexts)[thread as usize]) };
            let coroutine = &mut coroutines[thread as usize];
            fault::set_running(Some(Running { trap: coroutine.trap_handler(), code: launch.code }));
            let result = coroutine.resume(());
            fault::set_running(None);
            let block = unsafe { &mut *scheduler };
            if let CoroutineResult::Return(ending) = result {
                block.finish_thread(thread, ending);
                exited += 1;
            }
            if let Some(failure) = block.failure.take() {
                return Err(failure);
            }
            if launch.cancelled.load(Ordering::Relaxed) {
                return Err(block.fault_at(thread, STOPPED.into()));
            }
        }
        let block = unsafe { &mut *scheduler };
        block.land_last_copies();
        if let Some(failure) = block.failure.take() {
            return Err(failure);
        }
        if exited < coroutines.len() { Err(block.divergence()) } else { block.check_end() }
    }

    /// Nothing may be left undone that uses shared memory when the block's is given to another.
    fn check_end(&self) -> Result<(), BlockFault> {
        if let Some(thread) = self.bulk.forgotten_copy() {
            return Err(self.fault_at(thread, "issued a bulk copy that the block did not wait for".into()));
        }
        if let Some((warp, count, most)) = self.products.unequal() {
            let what = format!("warp {warp} issued {count} wgmmas, another warp of its warpgroup {most}");
            return Err(self.fault_at(warp * 32, what));
        }
        Ok(())
    }

    fn next_thread(&mut self) -> Option<u32> {
        self.land_some_work();
        while self.failure.is_none() {
            if let Some(thread) = self.ready.pop() {
                self.current = thread;
                return Some(thread);
            }
            let over = self.states.iter().all(|&state| state == State::Exited);
            if over || !self.land_awaited_work() {
                break;
            }
        }
        None
    }

    /// Under a schedule seed asynchronous work may be done at any moment.
    fn land_some_work(&mut self) {
        let kinds =
            [self.copies_pending, self.bulk.copies_pending(), self.bulk.adds_pending(), self.products.pending()];
        let busy = kinds.iter().filter(|&&pending| pending > 0).count();
        let Some(random) = &mut self.ready.random else { return };
        if busy == 0 || !random.rng.random_ratio(1, 8) {
            return;
        }
        let nth = random.rng.random_range(0..busy);
        let (kind, &pending) =
            kinds.iter().enumerate().filter(|&(_, &pending)| pending > 0).nth(nth).expect("fewer than `busy`");
        let pick = random.rng.random_range(0..pending);
        let anyone = random.rng.random_range(0..self.states.len());
        match kind {
            0 if !self.copies[anyone].pending.is_empty() => {
                self.land_copy(anyone, pick % self.copies[anyone].pending.len());
                self.fire_arrivals(anyone);
            }
            0 => {}
            1 => self.land_bulk_copy(pick),
            2 => self.land_bulk_add(pick),
            _ => {
                self.land_product(anyone as u32 / 32);
            }
        }
    }

    /// Nobody can run: does a piece of the asynchronous work that some thread may wait for.
    fn land_awaited_work(&mut self) -> bool {
        let (bulk, arrivals) = (self.bulk.copies_pending(), self.arrivals_pending);
        let (threads, mut first_bulk, mut take_bulk) = (self.copies.len(), 0, bulk > 0);
        if let Some(random) = &mut self.ready.random
            && bulk + arrivals > 0
        {
            take_bulk = random.rng.random_range(0..bulk + arrivals) < bulk;
            first_bulk = random.rng.random_range(0..bulk.max(1));
            self.next_arrival = random.rng.random_range(0..threads);
        }
        if take_bulk {
            self.land_bulk_copy(first_bulk);
            return true;
        }
        // Sooner those that release somebody: what nobody waits for may be late.
        let order = || (self.next_arrival..threads).chain(0..self.next_arrival);
        let next = |thread: usize| self.copies[thread].arrivals.front();
        let awaited = |&thread: &usize| next(thread).is_some_and(|arrival| self.mbarriers.is_awaited(arrival.offset));
        let any = || order().find(|&thread| next(thread).is_some());
        let Some(thread) = order().find(awaited).or_else(any) else { return false };
        self.next_arrival = thread;
        let behind = self.copies[thread].arrivals[0].behind;
        self.land_copies(thread, |copy| copy.number < behind);
        self.fire_arrivals(thread);
        true
    }

    /// Lands those of the thread's copies that `wanted` names.
    fn land_copies(&mut self, thread: usize, wanted: impl Fn(&PendingCopy) -> bool) {
        let mut index = 0;
        while index < self.copies[thread].pending.len() {
            if wanted(&self.copies[thread].pending[index]) {
                self.land_copy(thread, index);
            } else {
                index += 1;
            }
        }
    }

    /// Copies that nobody waited for still land before the block is gone; not when their thread returns, since a
    /// thread that returns waits for nothing.
    fn land_last_copies(&mut self) {
        for thread in 0..self.copies.len() {
            self.land_copies(thread, |_| true);
            self.fire_arrivals(thread);
        }
    }

    fn land_copy(&mut self, thread: usize, index: usize) {
        let copy = self.copies[thread].pending.swap_remove(index);
        self.copies_pending -= 1;
        self.proxy.ordinary_write(self.proxy.offset_of(copy.target), copy.bytes, thread as u32);
        copy.land();
    }

    /// Queues an arrival of the thread behind the copies that it has issued.
    pub(super) fn queue_arrival(&mut self, thread: u32, offset: u32) {
        let copies = &mut self.copies[thread as usize];
        copies.arrivals.push_back(CopyArrival { offset, behind: copies.issued });
        self.arrivals_pending += 1;
        self.fire_arrivals(thread as usize);
    }

    /// Lets the thread's arrivals happen whose copies have all landed.
    fn fire_arrivals(&mut self, thread: usize) {
        while let Some(&CopyArrival { offset, behind }) = self.copies[thread].arrivals.front() {
            if self.copies[thread].pending.iter().any(|copy| copy.number < behind) {
                return;
            }
            self.copies[thread].arrivals.pop_front();
            self.arrivals_pending -= 1;
            if let Err(what) = self.mbarrier_arrival(offset, 0) {
                self.fail_at(thread as u32, what);
            }
        }
    }

    /// Whether a copy is to land in the moment of its issue.
    pub(super) fn draw_copy_at_once(&mut self) -> bool {
        self.ready.random.as_mut().is_some_and(|random| random.rng.random_ratio(random.copies_at_once, 16))
    }

    /// Whether a matrix product is to read its operands in the moment of its issue.
    pub(super) fn draw_product_at_once(&mut self) -> bool {
        self.ready.random.as_mut().is_some_and(|random| random.rng.random_ratio(random.products_at_once, 16))
    }

    /// Records a fault of this thread, unless there is one already.
    pub(super) fn fail_at(&mut self, thread: u32, what: String) {
        if self.failure.is_none() {
            self.failure = Some(self.fault_at(thread, what));
        }
    }

    fn fail_access(&mut self, thread: u32, access: BadAccess) {
        if self.failure.is_none() {
            let fault = self.fault_at(thread, "accessed memory that it may not".to_owned());
            self.failure = Some(BlockFault { access: Some(access), ..fault });
        }
    }

    fn finish_thread(&mut self, thread: u32, ending: Ending) {
        self.states[thread as usize] = State::Exited;
        let what = match ending {
            Ending::Returned if self.bulk.still_reads(thread) => {
                "returned while its bulk additions may still read shared memory".to_owned()
            }
            Ending::Returned => return,
            Ending::Segfault { stack_overflow: true, .. } => "overflowed its stack".to_owned(),
            Ending::Segfault { address, .. } => return self.fail_access(thread, BadAccess::Outside { address }),
            Ending::DivisionByZero => "divided an integer by zero".to_owned(),
            Ending::IllegalInstruction => "came to where the compiler knows that control never comes".to_owned(),
            Ending::Interrupted => TIME_LIMIT.to_owned(),
        };
        self.fail_at(thread, what);
    }

    fn fault_at(&self, thread: u32, what: String) -> BlockFault {
        let context = &self.contexts[thread as usize];
        BlockFault { block: context.block_idx, thread: context.thread_idx, access: None, what }
    }

    /// Nobody can run and somebody waits: says who waits for what, and who never came.
    fn divergence(&self) -> BlockFault {
        let waiting = |state: &State| !matches!(state, State::Exited | State::Ready);
        let first = self.states.iter().position(waiting).unwrap_or(0);
        let mut what = self.wait(&self.states[first]);
        let exited = self.states.iter().filter(|&&s| s == State::Exited).count();
        let _ = write!(what, " (divergence: {exited} of {} threads have returned", self.states.len());
        let other =
            self.states.iter().enumerate().skip(first + 1).find(|(_, s)| waiting(s) && !self.same_place(first, s));
        if let Some((thread, state)) = other {
            let _ = write!(what, "; thread {} {}", self.contexts[thread].thread_idx, self.wait(state));
        }
        what.push(')');
        self.fault_at(first as u32, what)
    }

    /// What a thread in this state waits for.
    fn wait(&self, state: &State) -> String {
        match *state {
            State::AtBarrier { id } => {
                let barrier = &self.barriers[id as usize];
                format!("waits at barrier {id}, where {} of {} threads arrived", barrier.arrived, barrier.expected)
            }
            State::AtCollective { mask, what, .. } => {
                format!("waits in {} with mask {mask:#010x} for lanes that never come", name(what))
            }
            State::AtMbarrier { offset, parity } => {
                let lacks = self.mbarriers.lacks(offset);
                format!("waits at the mbarrier at offset {offset:#x} for parity {parity}, where {lacks}")
            }
            State::Ready | State::Exited => "waits for nothing, and the block cannot go on".to_owned(),
        }
    }

    fn same_place(&self, first: usize, other: &State) -> bool {
        match (&self.states[first], other) {
            (State::AtBarrier { id: a }, State::AtBarrier { id: b }) => a == b,
            (State::AtMbarrier { .. }, State::AtMbarrier { .. }) => self.states[first] == *other,
            (State::AtCollective { op: a, mask: m, .. }, State::AtCollective { op: b, mask: n, .. }) => {
                a == b && m == n
            }
            _ => false,
        }
    }

    pub(super) fn make_ready(&mut self, thread: u32) {
        self.states[thread as usize] = State::Ready;
        self.ready.push(thread);
    }

    /// What the lanes of the mask, all of which are here, have handed in.
    fn payloads(&self, warp_base: u32, mask: u32) -> [*mut c_void; 32] {
        let mut payloads = [std::ptr::null_mut(); 32];
        for lane in lanes(mask) {
            if let State::AtCollective { payload, .. } = self.states[(warp_base + lane) as usize] {
                payloads[lane as usize] = payload;
            }
        }
        payloads
    }

    /// The collective is done: its lanes may go on.
    fn release_collective(&mut self, warp_base: u32, mask: u32) {
        for lane in lanes(mask) {
            let thread = warp_base + lane;
            if thread != self.current {
                self.make_ready(thread);
            }
        }
        self.states[self.current as usize] = State::Ready;
    }

    /// Why lane `lane` can never meet the others of `mask`, if that is so.
    fn impossible_collective(&self, warp_base: u32, lane: u32, mask: u32, op: usize) -> Option<String> {
        if mask & (1 << lane) == 0 {
            return Some(format!("is not named in its own mask {mask:#010x}"));
        }
        lanes(mask).find_map(|other| {
            let thread = (warp_base + other) as usize;
            match self.states.get(thread) {
                None => Some(format!("mask {mask:#010x} names lane {other}, which the block does not have")),
                Some(State::Exited) => Some(format!("mask {mask:#010x} names lane {other}, which has exited")),
                Some(State::AtCollective { mask: theirs, op: their_op, what, .. })
                    if *theirs != mask || *their_op != op =>
                {
                    (theirs & (1 << lane) != 0).then(|| {
                        format!("mask {mask:#010x}: lane {other} waits in {} with mask {theirs:#010x}", name(*what))
                    })
                }
                Some(_) => None,
            }
        })
    }
}

/// A coroutine that is one CUDA thread.
type Thread = Coroutine<(), (), Ending, DefaultStack>;

/// Bytes of stack for one CUDA thread; mapped lazily, with a guard page.
const STACK_BYTES: usize = 256 * 1024;

fn spawn(launch: &BlockLaunch<'_>, scheduler: *mut Block, thread: u32, stacks: &mut Vec<DefaultStack>) -> Thread {
    let stack = stacks.pop().unwrap_or_else(|| {
        DefaultStack::new(STACK_BYTES).expect("the system has no memory for a 256 KiB coroutine stack")
    });
    let (entry, params) = (launch.entry, launch.params.as_ptr().cast::<c_void>());
    Coroutine::with_stack(stack, move |yielder: &Yielder<(), ()>, ()| {
        // SAFETY: the scheduler outlives its coroutines, and the yielder stays where it is for as
        // long as this coroutine lives.
        unsafe { (&mut (*scheduler).yielders)[thread as usize] = yielder };
        // SAFETY: `params` is the launch's parameter struct, whose layout was checked against the
        // module's, and the module's context is this thread's.
        unsafe { entry(params) };
        Ending::Returned
    })
}

fn block_seed(seed: u64, block: Dim3) -> u64 {
    let mixed = u64::from(block.x) | u64::from(block.y) << 24 | u64::from(block.z) << 44;
    seed ^ mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn lanes(mask: u32) -> impl Iterator<Item = u32> {
    (0..32).filter(move |lane| mask & (1 << lane) != 0)
}

fn name(what: *const c_char) -> String {
    // SAFETY: `what` is a string literal of the module, which stays loaded while its blocks run.
    unsafe { CStr::from_ptr(what) }.to_string_lossy().into_owned()
}

impl PendingCopy {
    fn land(self) {
        // SAFETY: `copy_async` read both ranges' ends on the issuing thread, where a bad address
        // would have been reported; buffers outlive the launch.
        unsafe {
            std::ptr::copy_nonoverlapping(self.source, self.target, self.source_bytes as usize);
            std::ptr::write_bytes(
                self.target.add(self.source_bytes as usize),
                0,
                (self.bytes - self.source_bytes) as usize,
            );
        }
    }
}

/// The scheduler of the calling thread.
///
/// SAFETY of every use below: a context's scheduler points to the block that is running on this
/// very OS thread; only one coroutine of it runs at a time, and references made here are never
/// held across a suspension.
pub(super) unsafe fn scheduler<'a>(context: *mut ThreadContext) -> &'a mut Block {
    unsafe { &mut *(*context).scheduler }
}

/// Gives the processor away until the scheduler resumes this thread.
pub(super) unsafe fn suspend(context: *mut ThreadContext) {
    let yielder = {
        let block = unsafe { scheduler(context) };
        block.yielders[block.current as usize]
    };
    // SAFETY: set by `spawn` when this coroutine started, and valid while it runs.
    unsafe { (*yielder).suspend(()) };
}

/// Records the fault and never comes back: the block is abandoned.
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

/// Gives the processor away for good: the block has a fault, so the scheduler resumes nobody.
unsafe fn never_return(context: *mut ThreadContext) -> ! {
    loop {
        unsafe { suspend(context) };
    }
}

unsafe extern "C" fn collective(
    context: *mut ThreadContext,
    mask: u32,
    what: *const c_char,
    op: CollectiveOp,
    payload: *mut c_void,
) {
    let block = unsafe { scheduler(context) };
    let thread = block.current;
    let (warp_base, lane) = (thread / 32 * 32, thread % 32);
    if let Some(reason) = block.impossible_collective(warp_base, lane, mask, op as usize) {
        unsafe { abandon(context, format!("{}: {reason} (divergence)", name(what))) };
    }
    let here = State::AtCollective { mask, op: op as usize, what, payload };
    block.states[thread as usize] = here;
    let all_here = lanes(mask).all(|other| {
        matches!(block.states[(warp_base + other) as usize],
            State::AtCollective { mask: m, op: o, .. } if m == mask && o == op as usize)
    });
    if all_here {
        let payloads = block.payloads(warp_base, mask);
        // SAFETY: every payload points into the stack of a suspended (or this) coroutine, whose
        // type is the one that `op` was instantiated for: all lanes arrived with the same `op`.
        // `op` may call the host API, so no reference to the block is alive here.
        unsafe { op(payloads.as_ptr(), mask) };
        let block = unsafe { scheduler(context) };
        block.release_collective(warp_base, mask);
        if block.failure.is_some() {
            unsafe { suspend(context) };
        }
        unsafe { maybe_yield(context) };
    } else {
        unsafe { suspend(context) };
    }
}

/// Under a schedule seed the last to arrive has no right to go first.
pub(super) unsafe fn maybe_yield(context: *mut ThreadContext) {
    let block = unsafe { scheduler(context) };
    if block.ready.random.is_some() {
        let thread = block.current;
        block.make_ready(thread);
        unsafe { suspend(context) };
    }
}

unsafe extern "C" fn barrier(context: *mut ThreadContext, id: u32, count: u32, wait: u32, vote: u32) -> u32 {
    let block = unsafe { scheduler(context) };
    let thread = block.current;
    if id >= 16 {
        unsafe { abandon(context, format!("uses barrier {id}; a block has barriers 0 to 15")) };
    }
    let barrier = &mut block.barriers[id as usize];
    if barrier.arrived > 0 && barrier.expected != count {
        let expected = barrier.expected;
        unsafe {
            abandon(context, format!("arrives at barrier {id} for {count} threads while others wait for {expected}"))
        };
    }
    barrier.expected = count;
    barrier.arrived += 1;
    barrier.votes += u32::from(vote != 0);
    if barrier.arrived == count {
        let released = std::mem::take(&mut barrier.waiting);
        barrier.result = barrier.votes;
        (barrier.arrived, barrier.votes) = (0, 0);
        released.into_iter().for_each(|other| block.make_ready(other));
        unsafe { maybe_yield(context) };
    } else if wait != 0 {
        barrier.waiting.push(thread);
        block.states[thread as usize] = State::AtBarrier { id };
        unsafe { suspend(context) };
    }
    unsafe { scheduler(context) }.barriers[id as usize].result
}

unsafe extern "C" fn copy_async(
    context: *mut ThreadContext,
    target: *mut c_void,
    source: *const c_void,
    bytes: u32,
    source_bytes: u32,
) {
    let (target, source) = (target.cast::<u8>(), source.cast::<u8>());
    // Touch both ends of both ranges here, on the issuing thread, so that a bad address is its fault.
    // SAFETY: a bad address raises a signal on this coroutine's stack, which ends it with an error.
    unsafe {
        if source_bytes > 0 {
            source.read_volatile();
            source.add(source_bytes as usize - 1).read_volatile();
        }
        target.read_volatile();
        target.add(bytes as usize - 1).read_volatile();
    }
    let block = unsafe { scheduler(context) };
    if let Some(what) = block.mbarriers.overlap(block.proxy.offset_of(target), bytes) {
        unsafe { abandon(context, what) };
    }
    let thread = block.current as usize;
    let copies = &mut block.copies[thread];
    let (group, number) = (copies.committed_groups, copies.issued);
    copies.issued += 1;
    copies.pending.push(PendingCopy { target, source, bytes, source_bytes, group, number });
    block.copies_pending += 1;
    if block.draw_copy_at_once() {
        block.land_copy(thread, block.copies[thread].pending.len() - 1);
    }
}

unsafe extern "C" fn copy_commit(context: *mut ThreadContext) {
    let block = unsafe { scheduler(context) };
    let thread = block.current as usize;
    block.copies[thread].committed_groups += 1;
}

unsafe extern "C" fn copy_wait(context: *mut ThreadContext, pending: u32) {
    let block = unsafe { scheduler(context) };
    let thread = block.current as usize;
    // A group that is not committed yet is not waited for, as on the hardware.
    let landed_below = block.copies[thread].committed_groups.saturating_sub(pending);
    block.land_copies(thread, |copy| copy.group < landed_below);
    block.fire_arrivals(thread);
}

unsafe extern "C" fn fail(context: *mut ThreadContext, message: *const c_char) {
    let what = name(message);
    // A collective's operation reports through here as well and must return to the scheduler.
    let block = unsafe { scheduler(context) };
    block.fail_at(block.current, what);
}

// `place` of both is a structure of the module or on the calling thread's stack.

unsafe extern "C" fn stop(context: *mut ThreadContext, place: *const Place, message: *const c_char) {
    let what = unsafe { format!("{}{}", name(message), *place) };
    unsafe { abandon(context, what) }
}

unsafe extern "C" fn misaligned(
    context: *mut ThreadContext,
    place: *const Place,
    address: *const c_void,
    bytes: u32,
    what: *const c_char,
) {
    let what = unsafe { format!("{}{}", name(what), *place) };
    unsafe { abandon_access(context, BadAccess::Misaligned { address: address as usize, bytes, what }) }
}
