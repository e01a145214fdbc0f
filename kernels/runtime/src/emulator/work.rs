//! Performs a block's asynchronous work: copies complete, additions and MMAs read shared memory.
//! This happens at a random time under a schedule seed, and as late as possible without one.

use std::sync::atomic::{AtomicU32, Ordering};

use rand::Rng;

use super::async_proxy::{CHUNK_BYTES, Touched};
use super::block::Block;
use super::bulk::{BulkCopy, BulkSource, FORGOTTEN};
use super::copies::{CopyArrival, PendingCopy};
use crate::tensor_map::{BOX_ROW_BYTES, TensorMap};

impl Block {
    /// Under a schedule seed asynchronous work may complete at any time.
    pub(super) fn land_some_work(&mut self) {
        let kinds = [
            self.copies_pending,
            self.bulk.copies_pending(),
            self.bulk.adds_pending(),
            self.products.pending(),
        ];
        let busy = kinds.iter().filter(|&&pending| pending > 0).count();
        let Some(random) = &mut self.ready.random else { return };
        if busy == 0 || !random.rng.random_ratio(1, 8) {
            return;
        }
        let nth = random.rng.random_range(0..busy);
        let (kind, &pending) = kinds
            .iter()
            .enumerate()
            .filter(|&(_, &pending)| pending > 0)
            .nth(nth)
            .expect("fewer than `busy`");
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

    /// No thread can run: performs a part of the asynchronous work that some thread may wait for.
    pub(super) fn land_awaited_work(&mut self) -> bool {
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
        // Work that releases a thread comes first: work that no thread waits for may be late.
        let order = || (self.next_arrival..threads).chain(0..self.next_arrival);
        let next = |thread: usize| self.copies[thread].arrivals.front();
        let awaited = |&thread: &usize| {
            next(thread).is_some_and(|arrival| self.mbarriers.is_awaited(arrival.offset))
        };
        let any = || order().find(|&thread| next(thread).is_some());
        let Some(thread) = order().find(awaited).or_else(any) else { return false };
        self.next_arrival = thread;
        let behind = self.copies[thread].arrivals[0].behind;
        self.land_copies(thread, |copy| copy.number < behind);
        self.fire_arrivals(thread);
        true
    }

    /// Completes those of the thread's copies that `wanted` selects.
    pub(super) fn land_copies(&mut self, thread: usize, wanted: impl Fn(&PendingCopy) -> bool) {
        let mut index = 0;
        while index < self.copies[thread].pending.len() {
            if wanted(&self.copies[thread].pending[index]) {
                self.land_copy(thread, index);
            } else {
                index += 1;
            }
        }
    }

    /// Copies that no thread waited for still complete before the block ends. They do not complete
    /// when their thread returns, because a thread that returns waits for nothing.
    pub(super) fn land_last_copies(&mut self) {
        for thread in 0..self.copies.len() {
            self.land_copies(thread, |_| true);
            self.fire_arrivals(thread);
        }
    }

    /// The component and the phase of the mbarrier at which the thread arrives when this copy and
    /// those before it have landed; none if it does not.
    fn counted(&mut self, thread: usize, number: u64) -> Option<(u32, u32)> {
        let arrival =
            self.copies[thread].arrivals.iter().find(|arrival| number < arrival.behind)?;
        Some(self.mbarriers.at(arrival.offset).ok()?.counting())
    }

    pub(super) fn land_copy(&mut self, thread: usize, index: usize) {
        let copy = self.copies[thread].pending.swap_remove(index);
        self.copies_pending -= 1;
        self.proxy.ordinary_write(self.proxy.offset_of(copy.target), copy.bytes, thread as u32);
        let counted = self.counted(thread, copy.number);
        let (address, bytes) = (copy.target as usize, copy.bytes as usize);
        self.told(thread as u32, |races, who| races.copy_landed(who, address, bytes, counted));
        copy.land();
    }

    /// Queues an arrival of the thread after the copies that it has issued.
    pub(super) fn queue_arrival(&mut self, thread: u32, offset: u32) {
        let clock =
            self.told(thread, |races, (rank, _)| Some(races.issue(rank, [thread].into_iter())));
        let copies = &mut self.copies[thread as usize];
        copies.arrivals.push_back(CopyArrival { offset, behind: copies.issued, clock });
        self.arrivals_pending += 1;
        self.fire_arrivals(thread as usize);
    }

    /// Performs the thread's arrivals whose copies have all completed.
    pub(super) fn fire_arrivals(&mut self, thread: usize) {
        while let Some(CopyArrival { offset, behind, clock }) = self.copies[thread].arrivals.front()
        {
            let (offset, behind, clock) = (*offset, *behind, clock.clone());
            if self.copies[thread].pending.iter().any(|copy| copy.number < behind) {
                return;
            }
            if let (Ok(barrier), Some(clock)) = (self.mbarriers.at(offset), &clock) {
                barrier.release.add(clock);
            }
            self.copies[thread].arrivals.pop_front();
            self.arrivals_pending -= 1;
            if let Err(what) = self.mbarrier_arrival(offset, 0) {
                self.fail_at(thread as u32, what);
            }
        }
    }
}

impl Block {
    /// One arrival at the mbarrier at `offset`, which expects `bytes` bytes more.
    pub(super) fn mbarrier_arrival(&mut self, offset: u32, bytes: u32) -> Result<(), String> {
        let barrier = self.mbarriers.at(offset)?;
        barrier.expect(bytes);
        let released = barrier
            .arrive()
            .map_err(|why| format!("arrives at the mbarrier at offset {offset:#x}: {why}"))?;
        released.into_iter().for_each(|thread| self.make_ready(thread));
        Ok(())
    }

    /// `bytes` bytes have arrived that the mbarrier at `offset` counts.
    pub(super) fn mbarrier_landing(&mut self, offset: u32, bytes: u32) -> Result<(), String> {
        let released = self.mbarriers.at(offset)?.land(bytes);
        released.into_iter().for_each(|thread| self.make_ready(thread));
        Ok(())
    }

    /// Completes the copy with this index (in the order of issue).
    pub(super) fn land_bulk_copy(&mut self, index: usize) {
        let copy = self.bulk.copies.remove(index);
        let thread = copy.thread;
        if copy.rank == self.rank && self.has_ended() {
            return self.fail_at(thread, FORGOTTEN.into());
        }
        let landed = self.peer(copy.rank).and_then(|block| block.receive_bulk_copy(copy));
        if let Err(what) = landed {
            self.fail_at(thread, what);
        }
    }

    /// A copy arrives in this block's shared memory.
    fn receive_bulk_copy(&mut self, copy: BulkCopy) -> Result<(), String> {
        let target = self.proxy.pointer(copy.target);
        // SAFETY: the issuing thread read the source's ends (of a box those of each row) and
        // checked that the target lies within the dynamic shared memory, of which all blocks of a
        // cluster have the same; buffers outlive the launch.
        unsafe {
            match copy.source {
                BulkSource::Bytes(source) => {
                    std::ptr::copy_nonoverlapping(source, target, copy.bytes as usize)
                }
                BulkSource::Box { map, column, row, matrix } => {
                    land_box(target, &map, column, row, matrix)
                }
                BulkSource::Word(value) => target.cast::<u32>().write(value),
            }
        }
        match copy.source {
            BulkSource::Word(_) => self.proxy.ordinary_write(copy.target, copy.bytes, copy.thread),
            _ => self.proxy.own_write(copy.target, copy.bytes),
        }
        self.mbarrier_landing(copy.barrier, copy.bytes)
    }

    /// Performs the addition with this index (in the order of issue).
    pub(super) fn land_bulk_add(&mut self, index: usize) {
        let add = self.bulk.adds.remove(index);
        if let Some(clock) = &add.clock {
            let address = self.proxy.pointer(add.source) as usize;
            self.checked(add.thread, |races, who| {
                races.addition_reads(who, clock, address, add.bytes as usize)
            });
        }
        for i in 0..add.bytes / 4 {
            let offset = add.source + 4 * i;
            let chunk = offset / CHUNK_BYTES * CHUNK_BYTES;
            let seen = self.proxy.sees(chunk, add.issuer_fence);
            // SAFETY: `bulk_add` touched the target's ends on the issuing thread and checked that
            // the source lies within the dynamic shared memory; both are 16-byte aligned. Other
            // blocks add to the same floats, so they are read and written as atomics.
            let (value, target) = unsafe {
                let value = self.proxy.pointer(offset).cast::<f32>().read();
                (value, AtomicU32::from_ptr(add.target.add(i as usize).cast()))
            };
            let value = if seen { value } else { f32::NAN };
            let _ = target.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |old| {
                Some((f32::from_bits(old) + value).to_bits())
            });
        }
    }

    /// The warp's oldest MMA reads its operands; returns false if none is in flight.
    pub(super) fn land_product(&mut self, warp: u32) -> bool {
        let Some(queue) = self.products.warps.get_mut(warp as usize) else { return false };
        let Some(issued) = queue.issued.pop_front() else { return false };
        self.products.pending -= 1;
        let key = issued.product.accumulators[0];
        let held = queue.held.iter_mut().find(|held| held.product.accumulators[0] == key);
        let values = held.expect("held from the issue to the wait").values.as_mut_ptr();
        let mut touched = Touched::new(self.races.is_some());
        let reads = self.proxy.reads(issued.issuer_fence, touched.words());
        // SAFETY: the module checked at the issue that all operands lie within the dynamic shared
        // memory; `values` has 16 x columns elements, as `multiply` expects.
        unsafe { (issued.product.multiply)(&issued.product, &reads, values) };
        if let Some(clock) = &issued.clock {
            for (offset, bytes) in touched.runs() {
                let address = self.proxy.pointer(offset) as usize;
                self.checked(warp * 32, |races, who| {
                    races.product_reads(who, clock, address, bytes)
                });
            }
        }
        true
    }
}

/// Writes a TMA box of a tensor to `target`: rows of 128 bytes, whose eight chunks of 16 bytes are
/// at chunk ^ (row % 8), and zeros outside of the tensor.
///
/// # Safety
/// `target` has room for the box, and the bytes that the map names can be read.
unsafe fn land_box(target: *mut u8, map: &TensorMap, column: i32, row: i32, matrix: i32) {
    for box_row in 0..map.box_rows as usize {
        let mut bytes = [0u8; BOX_ROW_BYTES];
        if let Some((address, count)) =
            map.bytes_at(column, i64::from(row) + box_row as i64, matrix)
        {
            // SAFETY: see above; `count` is at most a row of the box.
            unsafe {
                std::ptr::copy_nonoverlapping(address as *const u8, bytes.as_mut_ptr(), count)
            };
        }
        for (chunk, part) in bytes.chunks(16).enumerate() {
            let place = box_row * BOX_ROW_BYTES + (chunk ^ (box_row % 8)) * 16;
            // SAFETY: within the row's 128 bytes.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), target.add(place), part.len()) };
        }
    }
}
