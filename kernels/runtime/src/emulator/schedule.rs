//! The blocks of a cluster, usually one: their threads, what each waits for, and which runs next.
//!
//! A thread runs until it has to wait. To wait is to arrive at a rendezvous: a warp collective (all
//! lanes of the mask, one operation), a barrier (a count of threads), that of a cluster
//! ([`cluster`]) or an mbarrier ([`mbarrier`]). The last to arrive releases the others.
//! Asynchronous work (copies, bulk copies, MMAs) completes at a random time under a schedule seed,
//! and as late as possible without one. If no thread can run, nothing is in flight and a thread
//! waits, the block has diverged. The error names which threads wait for what.
//!
//! [`cluster`]: super::cluster
//! [`mbarrier`]: super::mbarrier

use std::cell::RefCell;
use std::ffi::c_void;
use std::fmt::Write as _;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};

use super::accesses::Accesses;
use super::async_proxy::AsyncProxy;
use super::block::{BarrierState, Block, BlockFault, State, ThreadContext, name};
use super::bulk::{BulkWork, FORGOTTEN};
use super::cluster::BlockOrder;
use super::cluster_barrier::ClusterBarrier;
use super::copies::AsyncCopies;
use super::dim3::Dim3;
use super::fault::{self, BadAccess, Ending, Running};
use super::mbarrier::Mbarriers;
use super::meeting::Meeting;
use super::order::ReadySet;
use super::pads::PadsOfThread;
use super::progress;
use super::race::{Races, SharedRaces};
use super::wgmma::Products;

/// Why a block without a fault was abandoned.
pub const STOPPED: &str = "the launch was stopped";
/// Why a launch was stopped.
pub const TIME_LIMIT: &str = "did not end within the time limit";

/// The fault of a thread that called `abort`; its message is on the standard error stream.
const ABORTED: &str = "aborted: a failed assertion, an exception that nobody catches, or a local array written beyond its end";

/// Bits of `ThreadContext::watched`, mirrored in `emulator.h`: accesses to global memory are held
/// against those of other blocks.
const WATCHED_BETWEEN_BLOCKS: u32 = 1;
/// All accesses are held against those of other threads.
const WATCHED_BETWEEN_THREADS: u32 = 2;

/// A unit of a parameter struct, with the largest alignment of any field.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct ParamUnit(pub [u8; 64]);

/// The properties of the module and the launch that a block needs.
pub struct BlockLaunch<'a> {
    /// `<kernel>_entry`.
    pub entry: unsafe extern "C" fn(*const c_void),
    /// `emulator_enter`.
    pub enter: unsafe extern "C" fn(*mut ThreadContext),
    /// Machine code of the module.
    pub code: (usize, usize),
    /// Address from which offsets in the module count.
    pub base: usize,
    /// Size of the grid.
    pub grid: Dim3,
    /// Size of a block.
    pub block: Dim3,
    /// Blocks of a cluster, neighbours in x.
    pub cluster: u32,
    /// All buffers of global memory, in the order of their addresses.
    pub buffers: &'a [Range<usize>],
    /// The recorded accesses of its blocks to global memory, if they are recorded.
    pub accesses: Option<Arc<Accesses>>,
    /// Parameter struct.
    pub params: &'a [ParamUnit],
    /// Seed of the schedule; `None` for the deterministic one.
    pub schedule_seed: Option<u64>,
    /// Whether races between threads are looked for.
    pub watches_races: bool,
    /// Byte that fills shared memory before a block starts.
    pub shared_poison: u8,
    /// Set when the launch ran out of time or another block failed.
    pub cancelled: &'a AtomicBool,
}

impl BlockLaunch<'_> {
    /// The number of clusters along each axis.
    pub fn clusters(&self) -> Dim3 {
        Dim3 { x: self.grid.x / self.cluster, ..self.grid }
    }
}

/// Runs the blocks of a cluster to their ends. `first` is the first block, and `shared` has the
/// shared memory of each.
///
/// # Errors
/// The first fault; all other threads are abandoned.
pub fn run_cluster(
    launch: &BlockLaunch<'_>,
    first: Dim3,
    shared: &[(*mut u8, usize)],
    pads: &PadsOfThread<'_>,
    stacks: &mut Vec<DefaultStack>,
) -> Result<(), BlockFault> {
    let threads = launch.block.count() as usize;
    let barrier = Rc::new(RefCell::new(ClusterBarrier::new(threads * shared.len())));
    // Whether two accesses have an order depends on no schedule: one is enough.
    let races = (launch.watches_races && threads > 1)
        .then(|| Rc::new(RefCell::new(Races::new(shared.len(), threads))));
    let at = |rank: usize| Dim3 { x: first.x + rank as u32, ..first };
    let indexed = shared.iter().enumerate();
    let mut blocks: Vec<_> = indexed
        .map(|(rank, &shared)| {
            let joint = (barrier.clone(), races.clone());
            Block::new(launch, at(rank), rank as u32, shared, joint)
        })
        .collect();
    let schedulers: Vec<*mut Block> = blocks.iter_mut().map(|block| &raw mut **block).collect();
    let mut coroutines = Vec::with_capacity(blocks.len());
    for (block, &scheduler) in blocks.iter_mut().zip(&schedulers) {
        block.peers.clone_from(&schedulers);
        block.contexts.iter_mut().for_each(|context| context.scheduler = scheduler);
        let spawned = (0..threads as u32).map(|thread| spawn(launch, scheduler, thread, stacks));
        coroutines.push(spawned.collect::<Vec<_>>());
    }
    let result = drive(&schedulers, launch, pads, &mut coroutines);
    for mut coroutine in coroutines.into_iter().flatten() {
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
    schedulers: &[*mut Block],
    launch: &BlockLaunch<'_>,
    pads: &PadsOfThread<'_>,
    coroutines: &mut [Vec<Thread>],
) -> Result<(), BlockFault> {
    // SAFETY (all dereferences of `schedulers` here): they point to the boxed blocks of
    // `run_cluster`, which outlive this call; the host API functions dereference them too, but
    // only while a coroutine runs, and no reference from here is alive across `resume`.
    let seed = unsafe { (*schedulers[0]).seed(launch) };
    let mut order = BlockOrder::new(schedulers.len(), seed);
    let mut running = None;
    while let Some((rank, thread)) = unsafe { next_thread(schedulers, &order) } {
        order.step();
        let scheduler = schedulers[rank];
        let context = unsafe { &mut (&mut (*scheduler).contexts)[thread as usize] };
        if running != Some(rank) {
            progress::enter_block(context.block_idx, launch.block);
            running = Some(rank);
        }
        progress::run_thread(thread);
        unsafe { (launch.enter)(context) };
        let coroutine = &mut coroutines[rank][thread as usize];
        fault::set_running(Some(Running { trap: coroutine.trap_handler(), code: launch.code }));
        let result = coroutine.resume(());
        fault::set_running(None);
        let block = unsafe { &mut *scheduler };
        block.checked(thread, |races, _| races.settle());
        if let CoroutineResult::Return(ending) = result {
            block.finish_thread(thread, ending);
        }
        if let Some(what) =
            pads.overrun(false).or_else(|| block.mbarriers.corrupted(block.proxy.pointer(0)))
        {
            block.fail_at(thread, what);
        }
        if let Some(failure) = block.failure.take() {
            return Err(failure);
        }
        if launch.cancelled.load(Ordering::Relaxed) {
            return Err(block.fault_at(thread, STOPPED.into()));
        }
    }
    for &scheduler in schedulers {
        let block = unsafe { &mut *scheduler };
        block.land_last_copies();
        if let Some(what) = pads.overrun(true) {
            block.fail_at(block.current, what);
        }
    }
    let blocks = || schedulers.iter().map(|&scheduler| unsafe { &mut *scheduler });
    if let Some(failure) = blocks().find_map(|block| block.failure.take()) {
        return Err(failure);
    }
    match blocks().find(|block| !block.has_ended()) {
        Some(block) => Err(block.divergence()),
        None => blocks().try_for_each(|block| block.check_end()),
    }
}

/// The block and the thread that run next; `None` if all have returned, one has failed, or none can
/// run.
///
/// # Safety
/// The pointers are those of [`drive`], and no thread runs.
unsafe fn next_thread(schedulers: &[*mut Block], order: &BlockOrder) -> Option<(usize, u32)> {
    // SAFETY: see above; no reference outlives its statement.
    let block = |scheduler: *mut Block| unsafe { &mut *scheduler };
    let blocks = || order.ranks().map(move |rank| (rank, block(schedulers[rank])));
    if let Some((_, first)) = blocks().next() {
        first.land_some_work();
    }
    while blocks().all(|(_, block)| block.failure.is_none()) {
        for (rank, block) in blocks() {
            if let Some(thread) = block.ready.pop() {
                block.current = thread;
                return Some((rank, thread));
            }
        }
        let over = blocks().all(|(_, block)| block.has_ended());
        if over || !blocks().any(|(_, block)| block.land_awaited_work()) {
            break;
        }
    }
    None
}

impl Block {
    /// Block `block_idx` of a launch, before any of its threads has run: its coroutines and its
    /// cluster are set later.
    fn new(
        launch: &BlockLaunch<'_>,
        block_idx: Dim3,
        rank: u32,
        shared: (*mut u8, usize),
        (cluster, races): (Rc<RefCell<ClusterBarrier>>, SharedRaces),
    ) -> Box<Self> {
        let threads = launch.block.count() as u32;
        let seed = launch.schedule_seed.map(|seed| block_seed(seed, block_idx));
        let accesses = launch
            .accesses
            .clone()
            .map(|accesses| (accesses, launch.grid.flatten(block_idx) as u32));
        let between_blocks = if accesses.is_some() { WATCHED_BETWEEN_BLOCKS } else { 0 };
        let between_threads = if races.is_some() { WATCHED_BETWEEN_THREADS } else { 0 };
        let watched = between_blocks | between_threads;
        let context = |thread: u32| ThreadContext {
            thread_idx: launch.block.unflatten(u64::from(thread)),
            block_idx,
            block_dim: launch.block,
            grid_dim: launch.grid,
            lane: thread % 32,
            warp: thread / 32,
            dynamic_shared: shared.0,
            dynamic_shared_bytes: shared.1 as u64,
            scheduler: std::ptr::null_mut(),
            watched,
            cluster_rank: rank,
        };
        Box::new(Self {
            accesses,
            contexts: (0..threads).map(context).collect(),
            states: vec![State::Ready; threads as usize],
            exited: 0,
            module_start: launch.base,
            buffers: launch.buffers as *const _,
            races,
            rank,
            peers: Vec::new(),
            cluster,
            cluster_arrivals: vec![None; threads as usize],
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
        })
    }

    /// The seed of its schedule.
    fn seed(&self, launch: &BlockLaunch<'_>) -> Option<u64> {
        launch.schedule_seed.map(|seed| block_seed(seed, self.contexts[0].block_idx))
    }

    /// No work that uses shared memory may be unfinished when the block's memory is reused.
    fn check_end(&self) -> Result<(), BlockFault> {
        if let Some(thread) = self.bulk.forgotten_copy() {
            return Err(self.fault_at(thread, FORGOTTEN.into()));
        }
        if let Some((warp, count, most)) = self.products.unequal() {
            let what =
                format!("warp {warp} issued {count} wgmmas, another warp of its warpgroup {most}");
            return Err(self.fault_at(warp * 32, what));
        }
        Ok(())
    }

    fn finish_thread(&mut self, thread: u32, ending: Ending) {
        self.states[thread as usize] = State::Exited;
        self.exited += 1;
        self.leave_cluster(thread);
        self.meetings[thread as usize / 32].exited |= 1 << (thread % 32);
        let what = match ending {
            Ending::Returned if self.bulk.still_reads(thread) => {
                "returned while its bulk additions may still read shared memory".to_owned()
            }
            Ending::Returned => return,
            Ending::Segfault { stack_overflow: true, .. } => "overflowed its stack".to_owned(),
            Ending::Segfault { address, .. } => {
                return self.fail_access(thread, BadAccess::Outside { address });
            }
            Ending::DivisionByZero => "divided an integer by zero".to_owned(),
            Ending::Aborted => ABORTED.to_owned(),
            Ending::IllegalInstruction => {
                "came to where the compiler knows that control never comes".to_owned()
            }
            Ending::Interrupted => return self.fail_late(thread),
        };
        self.fail_at(thread, what);
    }

    /// Records that this thread does not end, and where another one waits, unless there is a fault.
    fn fail_late(&mut self, thread: u32) {
        if self.failure.is_none() {
            let waits_at = self.other_that_waits(thread).and_then(|(_, state)| place_of(state));
            let what = format!("{TIME_LIMIT}{}", self.others_wait(thread));
            self.failure = Some(BlockFault { waits_at, ..self.fault_at(thread, what) });
        }
    }

    /// The first thread that waits, other than this one.
    fn other_that_waits(&self, running: u32) -> Option<(usize, &State)> {
        self.states.iter().enumerate().find(|(thread, state)| {
            *thread != running as usize && !matches!(state, State::Exited | State::Ready)
        })
    }

    /// What the first other thread that waits, waits for, in brackets; nothing if none waits.
    fn others_wait(&self, running: u32) -> String {
        let Some((first, state)) = self.other_that_waits(running) else {
            return String::new();
        };
        format!(" (thread {} {})", self.contexts[first].thread_idx, self.wait(state))
    }

    /// Which threads have not come to a barrier of the whole block, and what they do instead: by
    /// numbers within the block.
    fn absent(&self, barrier: &BarrierState) -> String {
        let mut groups: Vec<(&str, Vec<u32>)> = Vec::new();
        for (thread, state) in (0..).zip(&self.states) {
            if barrier.waiting.contains(&thread) {
                continue;
            }
            let what = match state {
                State::Exited => "returned",
                State::Ready => "still run",
                _ => "wait elsewhere",
            };
            match groups.iter_mut().find(|(known, _)| *known == what) {
                Some((_, threads)) => threads.push(thread),
                None => groups.push((what, vec![thread])),
            }
        }
        let named = |(what, threads): &(&str, Vec<u32>)| format!("{} {what}", ranges(threads));
        groups.iter().map(named).collect::<Vec<_>>().join(", ")
    }

    /// No thread can run and some wait: reports which threads wait for what, and which never
    /// arrived.
    fn divergence(&self) -> BlockFault {
        let waiting = |state: &State| !matches!(state, State::Exited | State::Ready);
        let first = self.states.iter().position(waiting).unwrap_or(0);
        let mut what = self.wait(&self.states[first]);
        let _ = write!(
            what,
            " (divergence: {} of {} threads have returned",
            self.exited,
            self.states.len()
        );
        let other = self
            .states
            .iter()
            .enumerate()
            .skip(first + 1)
            .find(|(_, s)| waiting(s) && !self.same_place(first, s));
        if let Some((thread, state)) = other {
            let _ =
                write!(what, "; thread {} {}", self.contexts[thread].thread_idx, self.wait(state));
        }
        what.push(')');
        BlockFault { waits_at: place_of(&self.states[first]), ..self.fault_at(first as u32, what) }
    }

    /// What a thread in this state waits for.
    fn wait(&self, state: &State) -> String {
        match *state {
            State::AtBarrier { id } => {
                let barrier = &self.barriers[id as usize];
                let (arrived, expected) = (barrier.arrived, barrier.expected);
                let arrived = format!("where {arrived} of {expected} threads arrived");
                // Threads of a named barrier may arrive without waiting.
                if barrier.place.is_null() {
                    return format!("waits at barrier {id}, {arrived}");
                }
                let place = name(barrier.place);
                let line = place.split('#').next().unwrap_or_default();
                let absent = self.absent(barrier);
                format!("waits at barrier {id}, the __syncthreads at {line}, {arrived}; {absent}")
            }
            State::AtCollective { mask, what, .. } => {
                format!("waits in {} with mask {mask:#010x} for lanes that never come", name(what))
            }
            State::AtMbarrier { offset, parity, .. } => {
                let lacks = self.mbarriers.lacks(offset);
                format!(
                    "waits at the mbarrier at offset {offset:#x} for parity {parity}, where {lacks}"
                )
            }
            State::AtClusterBarrier => {
                format!("waits at its cluster's barrier, where {}", self.cluster.borrow().lacks())
            }
            State::Ready | State::Exited => {
                "waits for nothing, and the block cannot go on".to_owned()
            }
        }
    }

    fn same_place(&self, first: usize, other: &State) -> bool {
        match (&self.states[first], other) {
            (State::AtBarrier { id: a }, State::AtBarrier { id: b }) => a == b,
            (State::AtClusterBarrier, State::AtClusterBarrier) => true,
            (
                State::AtMbarrier { offset: a, parity: p, .. },
                State::AtMbarrier { offset: b, parity: q, .. },
            ) => (a, p) == (b, q),
            (
                State::AtCollective { op: a, mask: m, .. },
                State::AtCollective { op: b, mask: n, .. },
            ) => a == b && m == n,
            _ => false,
        }
    }
}

/// Where in the module's code a thread waits, if its state says so.
fn place_of(state: &State) -> Option<u32> {
    match *state {
        State::AtMbarrier { place, .. } => Some(place),
        _ => None,
    }
}

/// Ascending numbers of threads, as `threads 0, 2 to 31`; of many ranges the first ones.
fn ranges(threads: &[u32]) -> String {
    const SHOWN: usize = 4;
    let mut runs: Vec<[u32; 2]> = Vec::new();
    for &thread in threads {
        match runs.last_mut().filter(|[_, last]| *last + 1 == thread) {
            Some([_, last]) => *last = thread,
            None => runs.push([thread; 2]),
        }
    }
    let run = |[first, last]: &[u32; 2]| match first == last {
        true => first.to_string(),
        false => format!("{first} to {last}"),
    };
    let mut text: Vec<String> = runs.iter().take(SHOWN).map(run).collect();
    if runs.len() > SHOWN {
        text.push("…".into());
    }
    format!("threads {}", text.join(", "))
}

/// A coroutine that is one CUDA thread.
type Thread = Coroutine<(), (), Ending, DefaultStack>;

/// Bytes of stack for one CUDA thread; mapped lazily, with a guard page. CUDA allows a thread 512
/// KiB of local memory.
const STACK_BYTES: usize = 1024 * 1024;

fn spawn(
    launch: &BlockLaunch<'_>,
    scheduler: *mut Block,
    thread: u32,
    stacks: &mut Vec<DefaultStack>,
) -> Thread {
    let stack = stacks.pop().unwrap_or_else(|| {
        DefaultStack::new(STACK_BYTES)
            .expect("the system has no memory for a 1 MiB coroutine stack")
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
