//! Stores to shared memory, and the fence after which the asynchronous proxy sees them.

use super::super::block::{ThreadContext, abandon, scheduler};

// SAFETY of the functions below: see `scheduler`.

pub unsafe extern "C" fn fence_async_proxy(context: *mut ThreadContext) {
    let block = unsafe { scheduler(context) };
    block.proxy.fence(block.current);
    block.mbarriers.fence(block.current);
}

pub unsafe extern "C" fn shared_store(context: *mut ThreadContext, offset: u32, bytes: u32) {
    let block = unsafe { scheduler(context) };
    if let Some(what) = block.mbarriers.overlap(offset, bytes) {
        unsafe { abandon(context, what) };
    }
    block.proxy.ordinary_write(offset, bytes, block.current);
}
