//! Warpgroup MMAs: issue, fence, commit, wait.

use super::super::block::{Block, ThreadContext, scheduler};
use super::super::wgmma::{Accumulators, GROUP_WARPS, Issued, ROWS, WarpProduct};

impl Block {
    fn check_product(&mut self, warp: u32, product: &WarpProduct) -> Result<(), String> {
        let threads = self.states.len();
        let group = warp / GROUP_WARPS;
        if threads < ((group + 1) * GROUP_WARPS * 32) as usize {
            return Err(format!(
                "wgmma in warp {warp}, whose warpgroup the block of {threads} threads does not fill"
            ));
        }
        let queue = self.products.warp(warp, threads);
        let key = product.accumulators[0];
        let chained = queue.held.iter().find(|held| held.product.overlaps(product));
        if chained.is_some_and(|held| {
            held.product.accumulators[0] != key || held.product.columns != product.columns
        }) {
            return Err(
                "the accumulators of a wgmma overlap those of another shape in flight".into()
            );
        }
        if queue.fenced != u32::MAX && (chained.is_none() || product.a_in_registers != 0) {
            return Err(
                "wgmma without a wgmma_fence by all lanes since the warp's last wgmma_wait".into(),
            );
        }
        let index = queue.count;
        queue.count += 1;
        let sequence = &mut self.products.sequence[group as usize];
        match sequence.get(index) {
            None => sequence.push(product.common()),
            Some(first) if *first != product.common() => {
                return Err(format!(
                    "wgmma number {index} of warp {warp} differs from that of its warpgroup"
                ));
            }
            Some(_) => {}
        }
        Ok(())
    }

    fn issue_product(&mut self, warp: u32, product: WarpProduct) {
        let issuer_fence = self.proxy.warp_fence(warp * 32);
        let at_once = self.draw_product_at_once();
        let clock =
            self.told(warp * 32, |races, (rank, first)| Some(races.issue(rank, first..first + 32)));
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
        queue.issued.push_back(Issued { product, group, issuer_fence, clock });
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
            return Err(format!(
                "the lanes of warp {warp} have not all called wgmma_commit equally often"
            ));
        }
        // An uncommitted group is not waited for, as on the hardware.
        let done_below = queue.committed[0].saturating_sub(pending);
        while self.products.warps[warp as usize]
            .issued
            .front()
            .is_some_and(|issued| issued.group < done_below)
        {
            self.land_product(warp);
        }
        self.told(warp * 32, |races, (rank, first)| races.products_done(rank, first..first + 32));
        let queue = &mut self.products.warps[warp as usize];
        let (done, held) =
            std::mem::take(&mut queue.held).into_iter().partition(|held| held.group < done_below);
        queue.held = held;
        for Accumulators { product, values, .. } in done as Vec<_> {
            // SAFETY: as in `issue_product`; the lanes wait in the collective of the wait.
            if unsafe { (product.deliver)(&product, values.as_ptr()) } != 0 {
                return Err(
                    "the accumulators of a wgmma in flight were written to before its wait".into(),
                );
            }
        }
        Ok(())
    }
}

// SAFETY of the functions below: see `scheduler`. The first and the last are called by the
// operation of a collective, which must return: a fault is recorded, and the collective gives the
// thread up.

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
