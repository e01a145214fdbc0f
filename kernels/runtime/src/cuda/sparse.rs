//! Buffers of which only some parts are memory: addresses are reserved for the whole buffer, and
//! memory is mapped where it is touched.
//!
//! Addresses between are unmapped: an access there ends the kernel with an error of the driver, as
//! after any buffer's pages.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys;

use super::driver::{Context, locked};
use crate::error::Result;

/// Memory for one run of addresses.
struct Mapped {
    addresses: Range<u64>,
    handle: sys::CUmemGenericAllocationHandle,
}

/// A buffer's addresses, and its mapped parts.
struct Buffer {
    bytes: usize,
    mapped: Vec<Mapped>,
}

/// The sparse buffers of a device, by their first address.
pub(super) struct SparseMemory {
    context: Arc<Context>,
    properties: sys::CUmemAllocationProp,
    /// Granularity of mapped memory, bytes; `None` where the device does not support mapping.
    granule: Option<u64>,
    buffers: Mutex<HashMap<u64, Buffer>>,
}

// SAFETY: the one pointer of the properties is null, and everything else is plain data that a
// mutex protects.
unsafe impl Send for SparseMemory {}
// SAFETY: as above.
unsafe impl Sync for SparseMemory {}

impl SparseMemory {
    pub fn new(context: &Arc<Context>) -> Self {
        // SAFETY: plain data, for which zeros are valid.
        let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = location(context);
        let mut granule = 0;
        let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: reads the properties, writes one live number.
        let result =
            unsafe { sys::cuMemGetAllocationGranularity(&mut granule, &properties, least) };
        let known = context.check(result, "cuMemGetAllocationGranularity");
        let granule = known.ok().map(|()| granule as u64).filter(|&granule| granule > 0);
        Self { context: context.clone(), properties, granule, buffers: Mutex::default() }
    }

    /// Granularity of mapped memory, bytes; `None` where the device does not support mapping.
    pub fn granule(&self) -> Option<u64> {
        self.granule
    }

    /// Reserves addresses for this many bytes or a few more; returns the first one.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn reserve(&self, bytes: usize) -> Result<u64> {
        let bytes = bytes.next_multiple_of(self.granule.unwrap_or(1) as usize);
        let mut base = 0;
        self.context.enter()?;
        // SAFETY: writes one live number; the addresses are released once, by `free`.
        let result = unsafe { sys::cuMemAddressReserve(&mut base, bytes, 0, 0, 0) };
        self.context.check(result, format_args!("cuMemAddressReserve({bytes} bytes)"))?;
        locked(&self.buffers).insert(base, Buffer { bytes, mapped: Vec::new() });
        Ok(base)
    }

    /// Maps memory at these addresses of the buffer at `base`: disjoint multiples of the granule
    /// that are not mapped yet.
    ///
    /// # Errors
    /// Errors of the driver; mapped parts stay until the buffer is freed.
    pub fn map(&self, base: u64, runs: &[Range<u64>]) -> Result<()> {
        self.context.enter()?;
        runs.iter().try_for_each(|run| {
            let mapped = self.map_run(run)?;
            if let Some(buffer) = locked(&self.buffers).get_mut(&base) {
                buffer.mapped.push(mapped);
            }
            Ok(())
        })
    }

    fn map_run(&self, run: &Range<u64>) -> Result<Mapped> {
        let (bytes, mut handle) = ((run.end - run.start) as usize, 0);
        // SAFETY: reads the properties, writes one live number; the handle is released once, by
        // `unmap` or below.
        let result = unsafe { sys::cuMemCreate(&mut handle, bytes, &self.properties, 0) };
        self.context.check(result, format_args!("cuMemCreate({bytes} bytes)"))?;
        // SAFETY: the addresses are reserved and unmapped, the handle has as many bytes.
        let result = unsafe { sys::cuMemMap(run.start, bytes, 0, handle, 0) };
        if let Err(error) =
            self.context.check(result, format_args!("cuMemMap({:#x}, {bytes} bytes)", run.start))
        {
            // SAFETY: created above, and mapped nowhere.
            let _ = unsafe { sys::cuMemRelease(handle) };
            return Err(error);
        }
        let mapped = Mapped { addresses: run.clone(), handle };
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = sys::CUmemAccessDesc { location: self.properties.location, flags };
        // SAFETY: the addresses were just mapped; reads one description.
        let result = unsafe { sys::cuMemSetAccess(run.start, bytes, &access, 1) };
        let allowed = self
            .context
            .check(result, format_args!("cuMemSetAccess({:#x}, {bytes} bytes)", run.start));
        allowed.inspect_err(|_| unmap(&mapped)).map(|()| mapped)
    }

    /// Frees the buffer that starts at `base`, which nothing uses any more; returns false if no
    /// such buffer exists.
    pub fn free(&self, base: u64) -> bool {
        let Some(buffer) = locked(&self.buffers).remove(&base) else { return false };
        buffer.mapped.iter().for_each(unmap);
        // SAFETY: reserved by `reserve` with as many bytes, and nothing is mapped there any more.
        let result = unsafe { sys::cuMemAddressFree(base, buffer.bytes) };
        if let Err(error) = self.context.check(result, format_args!("cuMemAddressFree({base:#x})"))
        {
            tracing::debug!("{error}");
        }
        true
    }
}

fn location(context: &Context) -> sys::CUmemLocation {
    // SAFETY: plain data, for which zeros are valid.
    let mut location: sys::CUmemLocation = unsafe { std::mem::zeroed() };
    location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    location.id = context.device();
    location
}

/// After a fault both calls fail, and the memory goes with the process.
fn unmap(mapped: &Mapped) {
    let Range { start, end } = mapped.addresses;
    // SAFETY: mapped by `map_run` with this handle, and taken from its buffer by the caller.
    unsafe {
        let _ = sys::cuMemUnmap(start, (end - start) as usize);
        let _ = sys::cuMemRelease(mapped.handle);
    }
}
