//! Mbarriers: initialisation, arrival, wait.

use super::super::block::{State, ThreadContext, abandon, maybe_yield, scheduler, suspend};

// SAFETY of the functions below: see `scheduler`. `abandon` never returns, and no reference is
// alive there.

pub unsafe extern "C" fn mbarrier_init(context: *mut ThreadContext, offset: u32, arrivals: u32) {
    let (shared, shared_bytes) =
        unsafe { ((*context).dynamic_shared, (*context).dynamic_shared_bytes) };
    let block = unsafe { scheduler(context) };
    if let Err(what) = block.mbarriers.init(offset, arrivals, shared, shared_bytes) {
        unsafe { abandon(context, what) };
    }
}

pub unsafe extern "C" fn mbarrier_arrive(context: *mut ThreadContext, offset: u32, bytes: u32) {
    let block = unsafe { scheduler(context) };
    if let Err(what) = block.mbarrier_arrival(offset, bytes) {
        unsafe { abandon(context, what) };
    }
    unsafe { maybe_yield(context) };
}

pub unsafe extern "C" fn mbarrier_arrive_at(context: *mut ThreadContext, offset: u32, rank: u32) {
    let block = unsafe { scheduler(context) };
    if let Err(what) = block.peer(rank).and_then(|peer| peer.mbarrier_arrival(offset, 0)) {
        unsafe { abandon(context, what) };
    }
    unsafe { maybe_yield(context) };
}

pub unsafe extern "C" fn mbarrier_wait(context: *mut ThreadContext, offset: u32, parity: u32) {
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
            break;
        }
        // A late thread that one phase released may find the next phase complete as well. It then
        // continues to wait, as it would if it polled the barrier.
        barrier.waiting.push(thread);
        block.states[thread as usize] = State::AtMbarrier { offset, parity };
        unsafe { suspend(context) };
        waited = true;
    }
    if !waited {
        unsafe { maybe_yield(context) };
    }
}
