//! What a module calls: the table [`HOST_API`], whose functions are those of `emulator::HostApi`
//! in `emulator.h`.

mod async_proxy;
mod bulk;
pub(super) mod collective;
mod copies;
mod mbarrier;
mod wgmma;

use std::ffi::{c_char, c_void};

use self::async_proxy::{fence_async_proxy, shared_store};
use self::bulk::{bulk_add, bulk_commit, bulk_copy_in, bulk_wait, store_at, tensor_copy_in};
use self::collective::{CollectiveOp, barrier, cluster_barrier, collective, warp_sync};
use self::copies::{copy_arrive, copy_async, copy_commit, copy_wait};
use self::mbarrier::{
    fence_mbarrier_init, mbarrier_arrive, mbarrier_arrive_at, mbarrier_init, mbarrier_wait,
};
use self::wgmma::{wgmma_commit, wgmma_fence, wgmma_issue, wgmma_wait};
use super::accesses::AccessKind;
use super::block::{ThreadContext, abandon, abandon_access, name, scheduler, stop_at_fault};
use super::fault::BadAccess;
use super::memory::GLOBAL;
use super::wgmma::WarpProduct;
use crate::tensor_map::MapWords;

/// Mirror of `emulator::HostApi` in `emulator.h`.
#[repr(C)]
pub struct HostApi {
    collective:
        unsafe extern "C" fn(*mut ThreadContext, u32, *const c_char, CollectiveOp, *mut c_void),
    barrier: unsafe extern "C" fn(*mut ThreadContext, u32, u32, u32, u32, *const c_char) -> u32,
    copy_async: unsafe extern "C" fn(*mut ThreadContext, *mut c_void, *const c_void, u32, u32),
    copy_commit: unsafe extern "C" fn(*mut ThreadContext),
    copy_wait: unsafe extern "C" fn(*mut ThreadContext, u32),
    copy_arrive: unsafe extern "C" fn(*mut ThreadContext, u32),
    fail: unsafe extern "C" fn(*mut ThreadContext, *const c_char),
    stop: unsafe extern "C" fn(*mut ThreadContext, *const Place, *const c_char),
    misaligned:
        unsafe extern "C" fn(*mut ThreadContext, *const Place, *const c_void, u32, *const c_char),
    accessed:
        unsafe extern "C" fn(*mut ThreadContext, *const c_void, u64, AccessKind, *const c_void),
    shared_store: unsafe extern "C" fn(*mut ThreadContext, u32, u32),
    fence_async_proxy: unsafe extern "C" fn(*mut ThreadContext),
    mbarrier_init: unsafe extern "C" fn(*mut ThreadContext, u32, u32),
    mbarrier_arrive: unsafe extern "C" fn(*mut ThreadContext, u32, u32),
    mbarrier_wait: unsafe extern "C" fn(*mut ThreadContext, u32, u32, *const c_void),
    bulk_copy_in: unsafe extern "C" fn(*mut ThreadContext, u32, *const u8, u32, u32),
    bulk_add: unsafe extern "C" fn(*mut ThreadContext, *mut f32, u32, u32),
    bulk_commit: unsafe extern "C" fn(*mut ThreadContext),
    bulk_wait: unsafe extern "C" fn(*mut ThreadContext, u32),
    wgmma_issue: unsafe extern "C" fn(*mut ThreadContext, *const WarpProduct),
    wgmma_fence: unsafe extern "C" fn(*mut ThreadContext),
    wgmma_commit: unsafe extern "C" fn(*mut ThreadContext),
    wgmma_wait: unsafe extern "C" fn(*mut ThreadContext, u32),
    tensor_copy_in:
        unsafe extern "C" fn(*mut ThreadContext, u32, *const MapWords, i32, i32, i32, u32, u32),
    mbarrier_arrive_at: unsafe extern "C" fn(*mut ThreadContext, u32, u32),
    store_at: unsafe extern "C" fn(*mut ThreadContext, u32, u32, u32, u32),
    cluster_barrier: unsafe extern "C" fn(*mut ThreadContext, u32),
    warp_sync: unsafe extern "C" fn(*mut ThreadContext, u32),
    fence_mbarrier_init: unsafe extern "C" fn(*mut ThreadContext),
}

/// The table that every module gets when it is loaded.
pub static HOST_API: HostApi = HostApi {
    collective,
    barrier,
    copy_async,
    copy_commit,
    copy_wait,
    copy_arrive,
    fail,
    stop,
    misaligned,
    accessed,
    shared_store,
    fence_async_proxy,
    mbarrier_init,
    mbarrier_arrive,
    mbarrier_wait,
    bulk_copy_in,
    bulk_add,
    bulk_commit,
    bulk_wait,
    wgmma_issue,
    wgmma_fence,
    wgmma_commit,
    wgmma_wait,
    tensor_copy_in,
    mbarrier_arrive_at,
    store_at,
    cluster_barrier,
    warp_sync,
    fence_mbarrier_init,
};

/// The source position of a failed check. Mirror of `emulator::Place` in `emulator.h`.
#[repr(C)]
pub struct Place {
    /// Null if it is not known.
    file: *const c_char,
    line: u32,
    column: u32,
}

impl std::fmt::Display for Place {
    /// `, FILE:LINE`, or nothing.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.file.is_null() { Ok(()) } else { write!(f, ", {}:{}", name(self.file), self.line) }
    }
}

// SAFETY of the functions below: see `scheduler`. `place` is a structure of the module or on the
// calling thread's stack.

unsafe extern "C" fn fail(context: *mut ThreadContext, message: *const c_char) {
    let what = name(message);
    // A collective's operation reports through here as well and must return to the scheduler.
    let block = unsafe { scheduler(context) };
    block.fail_at(block.current, what);
}

unsafe extern "C" fn stop(
    context: *mut ThreadContext,
    place: *const Place,
    message: *const c_char,
) {
    let what = unsafe { format!("{}{}", name(message), *place) };
    unsafe { abandon(context, what) }
}

unsafe extern "C" fn misaligned(
    context: *mut ThreadContext,
    place: *const Place,
    address: *const c_void,
    bytes: u32,
    what: *const c_char,
) {
    let what = unsafe { format!("{}{}", name(what), *place) };
    unsafe {
        abandon_access(context, BadAccess::Misaligned { address: address as usize, bytes, what })
    }
}

unsafe extern "C" fn accessed(
    context: *mut ThreadContext,
    address: *const c_void,
    bytes: u64,
    kind: AccessKind,
    code: *const c_void,
) {
    if bytes == 0 {
        return;
    }
    let block = unsafe { scheduler(context) };
    let (address, bytes) = (address as usize, bytes as usize);
    if GLOBAL.contains(&address)
        && let Some(access) = block.outside(address, bytes)
    {
        unsafe { abandon_access(context, access) }
    }
    if let Err(access) = block.accessed(kind, address, bytes) {
        unsafe { abandon_access(context, access) }
    }
    let (thread, place) = (block.current, block.place_of(code));
    block.checked(thread, |races, who| races.access(who, address, bytes, kind, place));
    unsafe { stop_at_fault(context) };
}
