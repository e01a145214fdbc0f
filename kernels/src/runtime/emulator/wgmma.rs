//! Warpgroup matrix products under way.
//!
//! Each warp of a warpgroup computes its own 16 rows. From the issue of a product to the wait that
//! covers it the accumulators in the lanes hold poison; the true ones are kept here. The products of
//! a warp read their operands in shared memory one after the other, each at some moment between its
//! issue and that wait.

use std::collections::VecDeque;

use super::async_proxy::AsyncReads;
use super::schedule::{Block, ThreadContext, scheduler};

/// Warps in a warpgroup.
const GROUP_WARPS: u32 = 4;
/// Rows that one warp computes.
const ROWS: usize = 16;

/// One warp's part of one product. Mirror of `emulator::WarpProduct` in `emulator.h`.
#[derive(Clone)]
#[repr(C)]
pub struct WarpProduct {
    a_descriptor: u64,
    b_descriptor: u64,
    columns: u32,
    /// Warp within its warpgroup.
    warp: u32,
    a_in_registers: u32,
    a_transposed: u32,
    b_transposed: u32,
    accumulate: u32,
    a_registers: [[u32; 4]; 32],
    /// The lanes' accumulators, on their stacks.
    accumulators: [*mut f32; 32],
    capture: unsafe extern "C" fn(*const Self, *mut f32),
    multiply: unsafe extern "C" fn(*const Self, *const AsyncReads, *mut f32),
    deliver: unsafe extern "C" fn(*const Self, *const f32) -> u32,
}

impl WarpProduct {
    /// What must be the same in all warps of a warpgroup.
    fn common(&self) -> [u64; 3] {
        let flags = [self.a_in_registers, self.a_transposed, self.b_transposed, self.accumulate];
        let flags = flags.iter().fold(u64::from(self.columns), |all, &flag| all << 1 | u64::from(flag));
        [if self.a_in_registers != 0 { 0 } else { self.a_descriptor }, self.b_descriptor, flags]
    }

    /// Bytes of one lane's accumulators.
    fn lane_bytes(&self) -> usize {
        ROWS * self.columns as usize / 32 * size_of::<f32>()
    }

    fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (self.accumulators[0] as usize, other.accumulators[0] as usize);
        a < b + other.lane_bytes() && b < a + self.lane_bytes()
    }
}

struct Issued {
    product: WarpProduct,
    group: u32,
    issuer_fence: u64,
}

/// Accumulators that belong to products under way.
struct Accumulators {
    /// Any product of them: says where they are.
    product: WarpProduct,
    /// Row after row.
    values: Vec<f32>,
    /// Group of the newest product.
    group: u32,
}

#[derive(Default)]
struct WarpQueue {
    /// Products that have not read their operands yet, oldest first.
    issued: VecDeque<Issued>,
    held: Vec<Accumulators>,
    /// Groups that each lane has committed.
    committed: [u32; 32],
    /// Lanes that have called wgmma_fence since the last wait.
    fenced: u32,
    count: usize,
}

/// The products of one block.
#[derive(Default)]
pub struct Products {
    /// By warp; empty before the first product.
    warps: Vec<WarpQueue>,
    /// By warpgroup: what each product was, in the order of issue.
    sequence: Vec<Vec<[u64; 3]>>,
    pending: usize,
}

impl Products {
    fn warp(&mut self, warp: u32, threads: usize) -> &mut WarpQueue {
        if self.warps.is_empty() {
            self.warps.resize_with(threads.div_ceil(32), WarpQueue::default);
            self.sequence.resize(threads.div_ceil(32 * GROUP_WARPS as usize), Vec::new());
        }
        &mut self.warps[warp as usize]
    }

    /// Products that have not read their operands.
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// A warp that issued fewer products than another of its warpgroup, and how many each did.
    pub fn unequal(&self) -> Option<(u32, usize, usize)> {
        let most = |warp: usize| self.sequence[warp / GROUP_WARPS as usize].len();
        let behind = self.warps.iter().enumerate().find(|(warp, queue)| queue.count < most(*warp));
        behind.map(|(warp, queue)| (warp as u32, queue.count, most(warp)))
    }
}

impl Block {
    /// Lets the warp's oldest product read its operands; false where none is under way.
    pub(super) fn land_product(&mut self, warp: u32) -> bool {
        let Some(queue) = self.products.warps.get_mut(warp as usize) else { return false };
        let Some(issued) = queue.issued.pop_front() else { return false };
        self.products.pending -= 1;
        let key = issued.product.accumulators[0];
        let held = queue.held.iter_mut().find(|held| held.product.accumulators[0] == key);
        let values = held.expect("held from the issue to the wait").values.as_mut_ptr();
        let reads = self.proxy.reads(issued.issuer_fence);
        // SAFETY: the module checked at the issue that all operands lie within the dynamic shared
        // memory; `values` has 16 x columns elements, as `multiply` expects.
        unsafe { (issued.product.multiply)(&issued.product, &reads, values) };
        true
    }

    fn check_product(&mut self, warp: u32, product: &WarpProduct) -> Result<(), String> {
        let threads = self.states.len();
        let group = warp / GROUP_WARPS;
        if threads < ((group + 1) * GROUP_WARPS * 32) as usize {
            return Err(format!("wgmma in warp {warp}, whose warpgroup the block of {threads} threads does not fill"));
        }
        let queue = self.products.warp(warp, threads);
        let key = product.accumulators[0];
        let chained = queue.held.iter().find(|held| held.product.overlaps(product));
        if chained.is_some_and(|held| held.product.accumulators[0] != key || held.product.columns != product.columns) {
            return Err("the accumulators of a wgmma overlap those of another shape under way".into());
        }
        if queue.fenced != u32::MAX && (chained.is_none() || product.a_in_registers != 0) {
            return Err("wgmma without a wgmma_fence by all lanes since the warp's last wgmma_wait".into());
        }
        let index = queue.count;
        queue.count += 1;
        let sequence = &mut self.products.sequence[group as usize];
        match sequence.get(index) {
            None => sequence.push(product.common()),
            Some(first) if *first != product.common() => {
                return Err(format!("wgmma number {index} of warp {warp} differs from that of its warpgroup"));
            }
            Some(_) => {}
        }
        Ok(())
    }

    fn issue_product(&mut self, warp: u32, product: WarpProduct) {
        let issuer_fence = self.proxy.warp_fence(warp * 32);
        let at_once = self.draw_product_at_once();
        let queue = &mut self.products.warps[warp as usize];
        let (group, key) = (queue.committed[0], product.accumulators[0]);
        match queue.held.iter_mut().find(|held| held.product.accumulators[0] == key) {
            Some(held) => held.group = group,
            None => {
                let mut values = vec![0.0; ROWS * product.columns as usize];
                // SAFETY: the accumulators are arrays on the stacks of lanes that wait in this very
                // collective, and `values` has 16 x columns elements.
                unsafe { (product.capture)(&product, values.as_mut_ptr()) };
                queue.held.push(Accumulators { product: product.clone(), values, group });
            }
        }
        queue.issued.push_back(Issued { product, group, issuer_fence });
        self.products.pending += 1;
        if at_once {
            while self.land_product(warp) {}
        }
    }

    fn wait_products(&mut self, warp: u32, pending: u32) -> Result<(), String> {
        let threads = self.states.len();
        let queue = self.products.warp(warp, threads);
        queue.fenced = 0;
        if queue.committed.iter().any(|&groups| groups != queue.committed[0]) {
            return Err(format!("the lanes of warp {warp} have not all called wgmma_commit equally often"));
        }
        // A group that is not committed yet is not waited for, as on the hardware.
        let done_below = queue.committed[0].saturating_sub(pending);
        while self.products.warps[warp as usize].issued.front().is_some_and(|issued| issued.group < done_below) {
            self.land_product(warp);
        }
        let queue = &mut self.products.warps[warp as usize];
        let (done, held) = std::mem::take(&mut queue.held).into_iter().partition(|held| held.group < done_below);
        queue.held = held;
        for Accumulators { product, values, .. } in done as Vec<_> {
            // SAFETY: as in `issue_product`; the lanes wait in the collective of the wait.
            if unsafe { (product.deliver)(&product, values.as_ptr()) } != 0 {
                return Err("the accumulators of a wgmma under way were written to before its wait".into());
            }
        }
        Ok(())
    }
}

// SAFETY of the functions below: see `scheduler`. The first and the last are called by the operation
// of a collective, which must return: a fault is recorded, and the collective gives the thread up.

pub unsafe extern "C" fn wgmma_issue(context: *mut ThreadContext, product: *const WarpProduct) {
    let block = unsafe { scheduler(context) };
    let product = unsafe { (*product).clone() };
    let warp = block.current / 32;
    match block.check_product(warp, &product) {
        Ok(()) => block.issue_product(warp, product),
        Err(what) => block.fail_at(block.current, what),
    }
}

pub unsafe extern "C" fn wgmma_fence(context: *mut ThreadContext) {
    let block = unsafe { scheduler(context) };
    let (thread, threads) = (block.current, block.states.len());
    block.products.warp(thread / 32, threads).fenced |= 1 << (thread % 32);
}

pub unsafe extern "C" fn wgmma_commit(context: *mut ThreadContext) {
    let block = unsafe { scheduler(context) };
    let (thread, threads) = (block.current, block.states.len());
    block.products.warp(thread / 32, threads).committed[thread as usize % 32] += 1;
}

pub unsafe extern "C" fn wgmma_wait(context: *mut ThreadContext, pending: u32) {
    let block = unsafe { scheduler(context) };
    if let Err(what) = block.wait_products(block.current / 32, pending) {
        block.fail_at(block.current, what);
    }
}
