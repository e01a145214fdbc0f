//! Asynchronous copies of threads: issue, commit, wait.

use std::ffi::c_void;

use super::super::accesses::AccessKind;
use super::super::block::{ThreadContext, abandon, scheduler, stop_at_fault};
use super::super::copies::PendingCopy;
use super::accessed;

// SAFETY of the functions below: see `scheduler`.

pub unsafe extern "C" fn copy_async(
    context: *mut ThreadContext,
    target: *mut c_void,
    source: *const c_void,
    bytes: u32,
    source_bytes: u32,
) {
    unsafe { accessed(context, source, source_bytes.into(), AccessKind::Read, std::ptr::null()) };
    let (target, source) = (target.cast::<u8>(), source.cast::<u8>());
    // Touch both ends of both ranges here, on the issuing thread, so that a bad address is its
    // fault. SAFETY: a bad address raises a signal on this coroutine's stack, which ends it with
    // an error.
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
    let (thread, address) = (block.current, target as usize);
    block.checked(thread, |races, who| races.copy(who, address, bytes as usize, None));
    unsafe { stop_at_fault(context) };
    let thread = thread as usize;
    let copies = &mut block.copies[thread];
    let (group, number) = (copies.committed_groups, copies.issued);
    copies.issued += 1;
    copies.pending.push(PendingCopy { target, source, bytes, source_bytes, group, number });
    block.copies_pending += 1;
    if block.draw_copy_at_once() {
        block.land_copy(thread, block.copies[thread].pending.len() - 1);
    }
}

pub unsafe extern "C" fn copy_commit(context: *mut ThreadContext) {
    let block = unsafe { scheduler(context) };
    let thread = block.current as usize;
    block.copies[thread].committed_groups += 1;
}

pub unsafe extern "C" fn copy_wait(context: *mut ThreadContext, pending: u32) {
    let block = unsafe { scheduler(context) };
    let thread = block.current as usize;
    // An uncommitted group is not waited for, as on the hardware.
    let landed_below = block.copies[thread].committed_groups.saturating_sub(pending);
    block.land_copies(thread, |copy| copy.group < landed_below);
    block.fire_arrivals(thread);
}

pub unsafe extern "C" fn copy_arrive(context: *mut ThreadContext, offset: u32) {
    let block = unsafe { scheduler(context) };
    let thread = block.current;
    if let Err(what) = block.mbarriers.at(offset) {
        unsafe { abandon(context, what) };
    }
    block.queue_arrival(thread, offset);
}
