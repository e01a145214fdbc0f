//! Bulk copies, stores to other blocks, bulk additions: issue, commit, wait.

use std::sync::atomic::{AtomicU32, Ordering};

use super::super::accesses::AccessKind;
use super::super::async_proxy::CHUNK_BYTES;
use super::super::block::{
    Block, ThreadContext, abandon, abandon_access, maybe_yield, scheduler, stop_at_fault,
};
use super::super::bulk::{BulkAdd, BulkCopy, BulkSource};
use super::super::fault::BadAccess;
use super::super::mbarrier::MBARRIER_BYTES;
use super::accessed;
use crate::tensor_map::{BOX_ROW_BYTES, MapWords, TensorMap};

/// The period of the swizzle of 128 bytes.
const SWIZZLE_BYTES: u32 = 1024;

impl Block {
    /// The fault of bulk work between these two addresses, named `what`, if any.
    fn bulk_fault(&self, what: &str, global: usize, shared: u32, bytes: u32) -> Option<BulkFault> {
        let misaligned = |address: usize| BadAccess::Misaligned {
            address,
            bytes: CHUNK_BYTES,
            what: what.to_owned(),
        };
        if bytes == 0 || !bytes.is_multiple_of(CHUNK_BYTES) {
            return Some(BulkFault::Other(format!(
                "{what} of {bytes} bytes: must be a multiple of 16, and not 0"
            )));
        }
        if !self.proxy.contains(shared, bytes) {
            return Some(BulkFault::Other(format!(
                "{what} of {bytes} bytes at shared offset {shared:#x}: outside the dynamic shared memory"
            )));
        }
        let addresses = [global, self.proxy.pointer(shared) as usize];
        let bad =
            addresses.into_iter().find(|address| !address.is_multiple_of(CHUNK_BYTES as usize))?;
        Some(BulkFault::Access(misaligned(bad)))
    }

    /// The running thread has issued a store to block `rank` of its cluster, at some moment before
    /// the mbarrier there has counted its bytes.
    fn watch_copy(&mut self, rank: u32, target: u32, bytes: u32, barrier: u32) {
        let thread = self.current;
        let Ok(peer) = self.peer(rank) else { return };
        let [address, stamp] = [target, barrier].map(|at| peer.proxy.pointer(at) as usize);
        let Ok(counting) = peer.mbarriers.at(barrier).map(|barrier| barrier.counting()) else {
            return;
        };
        self.checked(thread, |races, who| {
            races.uses(who, stamp, MBARRIER_BYTES as usize)?;
            races.copy(who, address, bytes as usize, Some(counting))
        });
        // Its completion is a release: it follows all that its thread did before the issue.
        let clock =
            self.told(thread, |races, (own, _)| Some(races.issue(own, std::iter::once(thread))));
        let barrier = self.peer(rank).and_then(|peer| peer.mbarriers.at(barrier));
        if let (Some(clock), Ok(barrier)) = (clock, barrier) {
            barrier.release.add(&clock);
        }
    }

    /// Why a word cannot go to this block of the cluster.
    fn unfit_for_word(&mut self, target: u32, barrier: u32, rank: u32) -> Option<String> {
        if self.peers.len() == 1 {
            return Some(format!(
                "a store to block {rank} of a cluster, in a launch without clusters"
            ));
        }
        if !target.is_multiple_of(WORD_BYTES) || !self.proxy.contains(target, WORD_BYTES) {
            let wanted = "must be a multiple of 4 within the dynamic shared memory";
            return Some(format!("a store to shared offset {target:#x} of block {rank}: {wanted}"));
        }
        let Some(block) = 1u32.checked_shl(rank) else { return self.peer(rank).err() };
        self.unfit_for(target, WORD_BYTES, barrier, block)
    }

    /// Why bytes cannot go to some of these blocks of the cluster.
    fn unfit_for(&mut self, target: u32, bytes: u32, barrier: u32, blocks: u32) -> Option<String> {
        ranks(blocks).find_map(|rank| match self.peer(rank) {
            Ok(peer) => peer
                .mbarriers
                .fenced(barrier)
                .err()
                .or_else(|| peer.mbarriers.overlap(target, bytes)),
            Err(what) => Some(what),
        })
    }
}

/// Bytes of a store to a block of the cluster.
const WORD_BYTES: u32 = 4;

/// The blocks of a cluster whose bits are set.
fn ranks(blocks: u32) -> impl Iterator<Item = u32> {
    (0..u32::BITS).filter(move |rank| blocks & 1 << rank != 0)
}

/// The fault of a bulk copy or addition.
enum BulkFault {
    Access(BadAccess),
    Other(String),
}

impl BulkFault {
    /// Ends the thread that issued it.
    unsafe fn abandon(self, context: *mut ThreadContext) -> ! {
        match self {
            Self::Access(access) => unsafe { abandon_access(context, access) },
            Self::Other(what) => unsafe { abandon(context, what) },
        }
    }
}

// SAFETY of the functions below: see `scheduler`. A bad global address raises a signal on this
// coroutine's stack, which ends it with an error.

pub unsafe extern "C" fn bulk_copy_in(
    context: *mut ThreadContext,
    target: u32,
    source: *const u8,
    bytes: u32,
    barrier: u32,
) {
    let block = unsafe { scheduler(context) };
    let thread = block.current;
    if let Some(fault) = block.bulk_fault("bulk copy", source as usize, target, bytes) {
        unsafe { fault.abandon(context) };
    }
    let unfit = block.mbarriers.fenced(barrier).err();
    if let Some(what) = unfit.or_else(|| block.mbarriers.overlap(target, bytes)) {
        unsafe { abandon(context, what) };
    }
    unsafe {
        source.read_volatile();
        source.add(bytes as usize - 1).read_volatile();
    }
    unsafe { accessed(context, source.cast(), bytes.into(), AccessKind::Read, std::ptr::null()) };
    let (source, rank) = (BulkSource::Bytes(source), block.rank);
    block.bulk.copies.push(BulkCopy { source, rank, target, bytes, barrier, thread });
    block.watch_copy(rank, target, bytes, barrier);
    unsafe { stop_at_fault(context) };
    unsafe { maybe_yield(context) };
}

pub unsafe extern "C" fn tensor_copy_in(
    context: *mut ThreadContext,
    target: u32,
    map: *const MapWords,
    column: i32,
    row: i32,
    matrix: i32,
    barrier: u32,
    blocks: u32,
) {
    let block = unsafe { scheduler(context) };
    let thread = block.current;
    let Some(map) = TensorMap::from_words(unsafe { &*map }) else {
        unsafe {
            abandon(context, "a copy of a box by a map that the launcher has not made".to_owned())
        }
    };
    let bytes = map.box_rows * BOX_ROW_BYTES as u32;
    if let Some(fault) = block.bulk_fault("copy of a box", 0, target, bytes) {
        unsafe { fault.abandon(context) };
    }
    let misplaced = !target.is_multiple_of(SWIZZLE_BYTES) || column.rem_euclid(16) != 0;
    let misplaced = misplaced.then(|| {
        format!(
            "a copy of a box to shared offset {target:#x}, from byte {column} of rows: must be multiples of 1024 and 16"
        )
    });
    let nobody = (blocks == 0).then(|| "a copy of a box to no block of the cluster".to_owned());
    if let Some(what) =
        misplaced.or(nobody).or_else(|| block.unfit_for(target, bytes, barrier, blocks))
    {
        unsafe { abandon(context, what) };
    }
    for box_row in 0..i64::from(map.box_rows) {
        let Some((address, count)) = map.bytes_at(column, i64::from(row) + box_row, matrix) else {
            continue;
        };
        let source = address as *const u8;
        unsafe {
            source.read_volatile();
            source.add(count - 1).read_volatile();
            accessed(context, source.cast(), count as u64, AccessKind::Read, std::ptr::null());
        }
    }
    // Each block's part completes at a separate time.
    for rank in ranks(blocks) {
        let source = BulkSource::Box { map, column, row, matrix };
        block.bulk.copies.push(BulkCopy { source, rank, target, bytes, barrier, thread });
        block.watch_copy(rank, target, bytes, barrier);
        unsafe { stop_at_fault(context) };
    }
    unsafe { maybe_yield(context) };
}

pub unsafe extern "C" fn store_at(
    context: *mut ThreadContext,
    target: u32,
    value: u32,
    barrier: u32,
    rank: u32,
) {
    let block = unsafe { scheduler(context) };
    let thread = block.current;
    if let Some(what) = block.unfit_for_word(target, barrier, rank) {
        unsafe { abandon(context, what) };
    }
    let source = BulkSource::Word(value);
    block.bulk.copies.push(BulkCopy { source, rank, target, bytes: WORD_BYTES, barrier, thread });
    block.watch_copy(rank, target, WORD_BYTES, barrier);
    unsafe { stop_at_fault(context) };
    unsafe { maybe_yield(context) };
}

pub unsafe extern "C" fn bulk_add(
    context: *mut ThreadContext,
    target: *mut f32,
    source: u32,
    bytes: u32,
) {
    let block = unsafe { scheduler(context) };
    let thread = block.current;
    if let Some(fault) = block.bulk_fault("bulk addition", target as usize, source, bytes) {
        unsafe { fault.abandon(context) };
    }
    unsafe {
        // Adding zero is a write, as the addition itself will be.
        for end in [0, bytes as usize / 4 - 1] {
            AtomicU32::from_ptr(target.add(end).cast()).fetch_or(0, Ordering::Relaxed);
        }
    }
    let (address, kind) = (target.cast_const().cast(), AccessKind::Atomic);
    unsafe { accessed(context, address, bytes.into(), kind, std::ptr::null()) };
    let (group, issuer_fence) = (block.bulk.committed(thread), block.proxy.warp_fence(thread));
    let clock =
        block.told(thread, |races, (rank, _)| Some(races.issue(rank, [thread].into_iter())));
    block.bulk.adds.push(BulkAdd { target, source, bytes, thread, group, issuer_fence, clock });
    unsafe { maybe_yield(context) };
}

pub unsafe extern "C" fn bulk_commit(context: *mut ThreadContext) {
    let block = unsafe { scheduler(context) };
    let threads = block.states.len();
    block.bulk.committed_groups.resize(threads, 0);
    block.bulk.committed_groups[block.current as usize] += 1;
}

pub unsafe extern "C" fn bulk_wait(context: *mut ThreadContext, pending: u32) {
    let block = unsafe { scheduler(context) };
    let thread = block.current;
    // An uncommitted group is not waited for, as on the hardware.
    let read_below = block.bulk.committed(thread).saturating_sub(pending);
    while let Some(index) =
        block.bulk.adds.iter().position(|add| add.thread == thread && add.group < read_below)
    {
        block.land_bulk_add(index);
    }
}
