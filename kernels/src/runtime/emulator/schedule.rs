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

use std::ffi::c_void;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};

use super::accesses::Accesses;
use super::async_proxy::AsyncProxy;
use super::block::{Block, BlockFault, Dim3, State, ThreadContext, name};
use super::bulk::BulkWork;
use super::copies::AsyncCopies;
use super::fault::{self, BadAccess, Ending, Running};
use super::host_api::collective::Meeting;
use super::mbarrier::Mbarriers;
use super::order::ReadySet;
use super::pads::PadsOfThread;
use super::progress;
use super::wgmma::Products;

/// Why a block that did nothing wrong was abandoned.
pub const STOPPED: &str = "the launch was stopped";
/// Why a launch was stopped.
pub const TIME_LIMIT: &str = "did not end within the time limit";

/// What a thread did that called `abort`; what it says about it stands on the standard error stream.
const ABORTED: &str =
    "aborted: a failed assertion, an exception that nobody catches, or a local array written beyond its end";

/// A piece of a parameter struct, as aligned as any field may be.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct ParamUnit(pub [u8; 64]);

/// What a block needs of its module and launch.
pub struct BlockLaunch<'a> {
    /// `<kernel>_entry`.
    pub entry: unsafe extern "C" fn(*const c_void),
    /// `emulator_enter`.
    pub enter: unsafe extern "C" fn(*mut ThreadContext),
    /// Machine code of the module.
    pub code: (usize, usize),
    /// Extent of the grid.
    pub grid: Dim3,
    /// Extent of a block.
    pub block: Dim3,
    /// What its blocks access in global memory, where that is asked for.
    pub accesses: Option<Arc<Accesses>>,
    /// Parameter struct.
    pub params: &'a [ParamUnit],
    /// Seed of the schedule; `None` for the deterministic one.
    pub schedule_seed: Option<u64>,
    /// Set when the launch's time ran out or another block failed.
    pub cancelled: &'a AtomicBool,
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
        pads: &PadsOfThread<'_>,
        stacks: &mut Vec<DefaultStack>,
    ) -> Result<(), BlockFault> {
        let threads = launch.block.count() as u32;
        let seed = launch.schedule_seed.map(|seed| block_seed(seed, block_idx));
        let accesses = launch.accesses.clone().map(|accesses| (accesses, launch.grid.flatten(block_idx) as u32));
        let watched = accesses.is_some().into();
        let mut block = Box::new(Self {
            accesses,
            contexts: Vec::with_capacity(threads as usize),
            states: vec![State::Ready; threads as usize],
            meetings: vec![Meeting::default(); threads.div_ceil(32) as usize],
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
                watched,
            });
        }
        let mut coroutines: Vec<_> = (0..threads).map(|thread| spawn(launch, scheduler, thread, stacks)).collect();
        let result = Self::drive(scheduler, launch, pads, &mut coroutines);
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
    fn drive(
        scheduler: *mut Self,
        launch: &BlockLaunch<'_>,
        pads: &PadsOfThread<'_>,
        coroutines: &mut [Thread],
    ) -> Result<(), BlockFault> {
        // SAFETY (all dereferences of `scheduler` here): it points to the boxed block of `run`,
        // which outlives this call; the host API functions dereference it too, but only while a
        // coroutine runs, and no reference from here is alive across `resume`.
        let mut exited = 0;
        while let Some(thread) = unsafe { (*scheduler).next_thread() } {
            progress::run_thread(thread);
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
            if let Some(what) = pads.overrun(false).or_else(|| block.mbarriers.spoilt(block.proxy.pointer(0))) {
                block.fail_at(thread, what);
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
        if let Some(what) = pads.overrun(true) {
            block.fail_at(block.current, what);
        }
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

    fn finish_thread(&mut self, thread: u32, ending: Ending) {
        self.states[thread as usize] = State::Exited;
        self.meetings[thread as usize / 32].exited |= 1 << (thread % 32);
        let what = match ending {
            Ending::Returned if self.bulk.still_reads(thread) => {
                "returned while its bulk additions may still read shared memory".to_owned()
            }
            Ending::Returned => return,
            Ending::Segfault { stack_overflow: true, .. } => "overflowed its stack".to_owned(),
            Ending::Segfault { address, .. } => return self.fail_access(thread, BadAccess::Outside { address }),
            Ending::DivisionByZero => "divided an integer by zero".to_owned(),
            Ending::Aborted => ABORTED.to_owned(),
            Ending::IllegalInstruction => "came to where the compiler knows that control never comes".to_owned(),
            Ending::Interrupted => TIME_LIMIT.to_owned(),
        };
        self.fail_at(thread, what);
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
}

/// A coroutine that is one CUDA thread.
type Thread = Coroutine<(), (), Ending, DefaultStack>;

/// Bytes of stack for one CUDA thread; mapped lazily, with a guard page. CUDA gives a thread 512 KiB of local memory.
const STACK_BYTES: usize = 1024 * 1024;

fn spawn(launch: &BlockLaunch<'_>, scheduler: *mut Block, thread: u32, stacks: &mut Vec<DefaultStack>) -> Thread {
    let stack = stacks.pop().unwrap_or_else(|| {
        DefaultStack::new(STACK_BYTES).expect("the system has no memory for a 1 MiB coroutine stack")
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
