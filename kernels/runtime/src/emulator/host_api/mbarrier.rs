//! Mbarriers: initialisation, arrival, wait.

use std::ffi::c_void;

use super::super::accesses::AccessKind;
use super::super::block::{
    Block, State, ThreadContext, abandon, maybe_yield, scheduler, stop_at_fault, suspend,
};
use super::super::mbarrier::MBARRIER_BYTES;

impl Block {
    /// The running thread has initialised the mbarrier at `offset`: a store for the others.
    fn watch_mbarrier(&mut self, offset: u32) {
        let thread = self.current;
        let address = self.proxy.pointer(offset) as usize;
        let component = self.told(thread, |races, (rank, _)| races.new_mbarrier(rank, offset));
        if let Ok(barrier) = self.mbarriers.at(offset) {
            barrier.component = component;
        }
        self.checked(thread, |races, who| {
            races.access(who, address, MBARRIER_BYTES as usize, AccessKind::Write, 0)
        });
    }

    /// The running thread uses the mbarrier at `offset`, whose initialisation must be over for it.
    fn uses_mbarrier(&mut self, offset: u32) {
        let address = self.proxy.pointer(offset) as usize;
        let thread = self.current;
        self.checked(thread, |races, who| races.uses(who, address, MBARRIER_BYTES as usize));
    }

    /// Thread `thread` of this block arrives at an mbarrier of block `rank` of its cluster.
    fn thread_arrives(
        &mut self,
        rank: u32,
        thread: u32,
        offset: u32,
        bytes: u32,
    ) -> Result<(), String> {
        if rank != self.rank {
            self.peer(rank)?.mbarriers.fenced(offset)?;
        }
        let address = self.peer(rank)?.proxy.pointer(offset) as usize;
        self.checked(thread, |races, who| races.uses(who, address, MBARRIER_BYTES as usize));
        let mut release = std::mem::take(&mut self.peer(rank)?.mbarriers.at(offset)?.release);
        self.told(thread, |races, who| races.release(who, &mut release));
        let peer = self.peer(rank)?;
        peer.mbarriers.at(offset)?.release = release;
        peer.mbarrier_arrival(offset, bytes)
    }
}

// SAFETY of the functions below: see `scheduler`. `abandon` never returns, and no reference is
// alive there.

pub unsafe extern "C" fn mbarrier_init(context: *mut ThreadContext, offset: u32, arrivals: u32) {
    let (shared, shared_bytes) =
        unsafe { ((*context).dynamic_shared, (*context).dynamic_shared_bytes) };
    let block = unsafe { scheduler(context) };
    if let Err(what) = block.mbarriers.init(offset, arrivals, block.current, (shared, shared_bytes))
    {
        unsafe { abandon(context, what) };
    }
    block.watch_mbarrier(offset);
    unsafe { stop_at_fault(context) };
}

pub unsafe extern "C" fn fence_mbarrier_init(context: *mut ThreadContext) {
    let block = unsafe { scheduler(context) };
    block.mbarriers.fence(block.current);
}

pub unsafe extern "C" fn mbarrier_arrive(context: *mut ThreadContext, offset: u32, bytes: u32) {
    let block = unsafe { scheduler(context) };
    let (rank, thread) = (block.rank, block.current);
    if let Err(what) = block.thread_arrives(rank, thread, offset, bytes) {
        unsafe { abandon(context, what) };
    }
    unsafe { stop_at_fault(context) };
    unsafe { maybe_yield(context) };
}

pub unsafe extern "C" fn mbarrier_arrive_at(context: *mut ThreadContext, offset: u32, rank: u32) {
    let block = unsafe { scheduler(context) };
    let thread = block.current;
    if let Err(what) = block.thread_arrives(rank, thread, offset, 0) {
        unsafe { abandon(context, what) };
    }
    unsafe { stop_at_fault(context) };
    unsafe { maybe_yield(context) };
}

pub unsafe extern "C" fn mbarrier_wait(
    context: *mut ThreadContext,
    offset: u32,
    parity: u32,
    code: *const c_void,
) {
    if parity > 1 {
        unsafe {
            abandon(context, format!("mbarrier at offset {offset:#x}: waits for parity {parity}"))
        };
    }
    let mut waited = false;
    loop {
        let block = unsafe { scheduler(context) };
        let thread = block.current;
        let barrier = match block.mbarriers.at(offset) {
            Ok(barrier) => barrier,
            Err(what) => unsafe { abandon(context, what) },
        };
        if barrier.passed(parity) {
            let clock = barrier.clocks[parity as usize].clone();
            block.told(thread, |races, who| races.acquire(who, &clock));
            block.uses_mbarrier(offset);
            unsafe { stop_at_fault(context) };
            break;
        }
        // A late thread that one phase released may find the next phase complete as well. It then
        // continues to wait, as it would if it polled the barrier.
        barrier.waiting.push(thread);
        let place = block.place_of(code);
        block.states[thread as usize] = State::AtMbarrier { offset, parity, place };
        unsafe { suspend(context) };
        waited = true;
    }
    if !waited {
        unsafe { maybe_yield(context) };
    }
}
