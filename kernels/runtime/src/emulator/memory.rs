//! Buffers between guard pages, and their names for the report of a bad address.
//!
//! A device and its worker process map the same memory file at the same addresses: the device fills
//! and reads the buffers of the worker's kernels. Only the device places buffers; it sends their
//! positions to the worker ([`Placed`]).

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use serde::{Deserialize, Serialize};

use super::fault::BadAccess;
use crate::backend::{Allocation, Placement, Reservation, granules};
use crate::error::{Result, RuntimeError};

/// Bytes of inaccessible memory on each side of a buffer. Wide, so that an index with an error of a
/// row or two of a large tensor still hits it.
const GUARD_BYTES: usize = 1 << 20;

/// The same for a reserved buffer. A wrapped 32-bit offset, times the largest element's 4 bytes,
/// hits it as a signed or an unsigned value, and does not hit another buffer.
const RESERVED_GUARD_BYTES: usize = 4 << 32;

/// Bytes of the largest reserved buffer. A process has address space for 128 of these.
const MOST_RESERVED_BYTES: usize = 1 << 40;

/// Most touched ranges of a reserved buffer. Each splits a mapping; Linux allows 65530 mappings for
/// a process.
const MOST_RANGES: usize = 8192;

/// Address space of this process, unmapped when dropped.
struct Mapping {
    start: usize,
    bytes: usize,
}

/// The address range of global memory, so that code can quickly distinguish it from stacks and
/// shared memory (`emulator.h`). Systems place nothing there by default.
pub(super) const GLOBAL: Range<usize> = 1 << 44..5 << 44;

/// The most places that are tried for a buffer; some are still in use.
const MOST_PLACES: usize = 10_000;

/// The next address for a buffer of global memory.
static NEXT_GLOBAL: AtomicUsize = AtomicUsize::new(GLOBAL.start);

impl Mapping {
    /// Inaccessible bytes of the private memory of this process, at any address.
    fn private(bytes: usize) -> io::Result<Self> {
        Self::new(0, bytes, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    }

    /// Inaccessible bytes of global memory, at an address that was not used recently.
    fn global(bytes: usize, file: &File) -> io::Result<Self> {
        for _ in 0..MOST_PLACES {
            let start =
                NEXT_GLOBAL.fetch_add(bytes.next_multiple_of(GUARD_BYTES), Ordering::Relaxed);
            if start.checked_add(bytes).is_none_or(|end| end > GLOBAL.end) {
                // All of it was used once: continue from the start, where most buffers are already
                // freed.
                NEXT_GLOBAL.store(GLOBAL.start, Ordering::Relaxed);
                continue;
            }
            match Self::of_file(start, bytes, file) {
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::AlreadyExists | io::ErrorKind::AddrInUse
                    ) => {}
                made => return made,
            }
        }
        Err(io::ErrorKind::OutOfMemory.into())
    }

    /// Inaccessible bytes of global memory at this address: the part of the file at the same
    /// distance from its start.
    fn of_file(start: usize, bytes: usize, file: &File) -> io::Result<Self> {
        let offset = start.checked_sub(GLOBAL.start).ok_or(io::ErrorKind::InvalidInput)?;
        let how = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE;
        let mapping = Self::new(start, bytes, how, file.as_raw_fd(), offset as libc::off_t)?;
        // Systems that do not support the flag take the address only as a hint.
        if mapping.start == start { Ok(mapping) } else { Err(io::ErrorKind::AddrInUse.into()) }
    }

    fn new(
        start: usize,
        bytes: usize,
        how: i32,
        file: i32,
        offset: libc::off_t,
    ) -> io::Result<Self> {
        let how = how | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, of nothing or of an open file, that replaces none.
        let start =
            unsafe { libc::mmap(start as *mut _, bytes, libc::PROT_NONE, how, file, offset) };
        if start == libc::MAP_FAILED {
            Err(io::Error::last_os_error())
        } else {
            Ok(Self { start: start as usize, bytes })
        }
    }

    /// Makes whole pages of the mapping accessible.
    fn open(&self, pages: &Range<u64>) -> io::Result<()> {
        self.protect(pages, libc::PROT_READ | libc::PROT_WRITE)
    }

    fn protect(&self, pages: &Range<u64>, access: i32) -> io::Result<()> {
        assert!(
            self.start as u64 <= pages.start && pages.end <= (self.start + self.bytes) as u64,
            "pages of another"
        );
        let bytes = (pages.end - pages.start) as usize;
        // SAFETY: the range lies within this mapping (checked above), which nothing but kernels
        // and copies uses.
        match unsafe { libc::mprotect(pages.start as *mut _, bytes, access) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, unmapped once, here; the buffer's owner has freed it.
        unsafe { libc::munmap(self.start as *mut _, self.bytes) };
    }
}

struct Region {
    placed: Placed,
    mapping: Mapping,
}

/// The position of a buffer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Placed {
    name: String,
    /// Its mapping, including guard pages.
    mapped: Range<usize>,
    /// Its first byte, and its size.
    data: usize,
    data_bytes: usize,
    /// Pages that can be accessed.
    open: Vec<Range<u64>>,
    /// Kernels may only read it.
    sealed: bool,
}

/// All buffers of one emulated device, in one of its two processes.
pub struct GuardedMemory {
    /// The file of global memory.
    file: File,
    /// By mapping start.
    regions: Mutex<BTreeMap<usize, Region>>,
}

/// A file of zeros in memory. Only written pages take memory, and it is gone with its last
/// descriptor.
pub fn file_of_memory(bytes: u64) -> io::Result<File> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a C string; nothing else owns the returned descriptor.
    let file = match unsafe { libc::memfd_create(c"parity".as_ptr(), flags) } {
        -1 => return Err(io::Error::last_os_error()),
        descriptor => File::from(unsafe { OwnedFd::from_raw_fd(descriptor) }),
    };
    file.set_len(bytes)?;
    Ok(file)
}

/// A file for the global memory of a device. Only written pages take memory, and it is gone with
/// its last process. A kernel that finds it cannot truncate the mapped part.
pub fn new_file() -> io::Result<File> {
    let file = file_of_memory((GLOBAL.end - GLOBAL.start) as u64)?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: fcntl with F_ADD_SEALS takes integers.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(file),
    }
}

fn page_bytes() -> usize {
    // SAFETY: sysconf has no preconditions.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// Bytes of memory that the machine has.
pub fn of_machine() -> u64 {
    // SAFETY: sysconf has no preconditions.
    let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
    u64::try_from(pages).map_or(u64::MAX, |pages| pages.saturating_mul(page_bytes() as u64))
}

impl GuardedMemory {
    /// Without buffers; the file comes from [`new_file`].
    pub fn of(file: File) -> Self {
        Self { file, regions: Mutex::default() }
    }

    /// The file of global memory.
    pub fn file(&self) -> &File {
        &self.file
    }

    fn regions(&self) -> MutexGuard<'_, BTreeMap<usize, Region>> {
        self.regions.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The positions of all buffers.
    pub fn placed(&self) -> Vec<Placed> {
        self.regions().values().map(|region| region.placed.clone()).collect()
    }

    /// The position of the buffer at this address.
    pub fn placed_at(&self, allocation: &Allocation) -> Option<Placed> {
        let data = allocation.address as usize;
        let regions = self.regions();
        let (_, region) = regions.range(..=data).next_back()?;
        (region.placed.data == data).then(|| region.placed.clone())
    }

    /// Maps a buffer that the other process has placed.
    pub fn adopt(&self, placed: Placed) -> Result<()> {
        let failed =
            |error| RuntimeError::system(format!("mapping `{}` for kernels", placed.name), error);
        let mapping = Mapping::of_file(placed.mapped.start, placed.mapped.len(), &self.file)
            .map_err(failed)?;
        let access =
            if placed.sealed { libc::PROT_READ } else { libc::PROT_READ | libc::PROT_WRITE };
        placed.open.iter().try_for_each(|pages| mapping.protect(pages, access)).map_err(failed)?;
        self.regions().insert(mapping.start, Region { placed, mapping });
        Ok(())
    }

    /// Maps a buffer of `bytes` bytes; see [`Placement`] for which of its ends touches a guard
    /// page.
    pub fn allocate(&self, name: &str, bytes: usize, placement: Placement) -> Result<Allocation> {
        let mapping = |bytes| Mapping::global(bytes, &self.file);
        self.map(name, bytes, placement, mapping, GUARD_BYTES, |pages, _| vec![pages])
            .map(|made| made.allocation)
    }

    /// Maps the dynamic shared memory of a block: its end touches a guard page, and its start is
    /// arbitrary.
    pub fn allocate_shared(&self, bytes: usize) -> Result<Allocation> {
        let (placement, mapping) = (Placement::FlushBack, Mapping::private);
        let made = self.map(
            "dynamic shared memory",
            bytes,
            placement,
            mapping,
            GUARD_BYTES,
            |pages, _| vec![pages],
        )?;
        Ok(made.allocation)
    }

    /// Maps a buffer of which only the pages that hold some of `touched` can be accessed; see
    /// [`Backend::reserve`](crate::backend::Backend::reserve).
    pub fn reserve(
        &self,
        name: &str,
        bytes: usize,
        touched: &[Range<i64>],
        placement: Placement,
    ) -> Result<Reservation> {
        let too_large = |needed, limit, of: &'static str| RuntimeError::TooLarge {
            name: name.to_owned(),
            needed,
            limit,
            of,
        };
        if bytes > MOST_RESERVED_BYTES {
            return Err(too_large(bytes, MOST_RESERVED_BYTES, "bytes of addresses"));
        }
        // Before any mapping: the number of ranges does not depend on their addresses, except for
        // two that share a page.
        if touched.len() > MOST_RANGES {
            return Err(too_large(touched.len(), MOST_RANGES, "ranges of memory far apart"));
        }
        let page = page_bytes() as u64;
        let mapping = |bytes| Mapping::global(bytes, &self.file);
        self.map(name, bytes, placement, mapping, RESERVED_GUARD_BYTES, |pages, data| {
            granules(touched, data, &pages, page)
        })
    }

    /// Maps a buffer and makes the pages accessible that `choose` returns, from all its pages and
    /// the address of the first usable byte.
    fn map(
        &self,
        name: &str,
        bytes: usize,
        placement: Placement,
        make: impl FnOnce(usize) -> io::Result<Mapping>,
        guard: usize,
        choose: impl FnOnce(Range<u64>, u64) -> Vec<Range<u64>>,
    ) -> Result<Reservation> {
        let page = page_bytes();
        let failed =
            |error| RuntimeError::system(format!("mapping {bytes} bytes for `{name}`"), error);
        let usable = bytes.max(1).checked_next_multiple_of(page);
        let sizes = usable.and_then(|usable| Some((usable, usable.checked_add(2 * guard)?)));
        let (usable, mapped) = sizes.ok_or_else(|| failed(io::ErrorKind::OutOfMemory.into()))?;
        let mapping = make(mapped).map_err(failed)?;
        let start = mapping.start + guard;
        let front_band = match placement {
            // Kernels may rely on 16-byte alignment, so up to 15 bytes after the end remain a band.
            Placement::FlushBack => (usable - bytes) / 16 * 16,
            Placement::FlushFront => 0,
        };
        let data = start + front_band;
        let touched = choose(start as u64..(start + usable) as u64, data as u64);
        touched.iter().try_for_each(|pages| mapping.open(pages)).map_err(failed)?;
        let mapped = mapping.start..mapping.start + mapping.bytes;
        let placed = Placed {
            name: name.to_owned(),
            mapped,
            data,
            data_bytes: bytes,
            open: touched.clone(),
            sealed: false,
        };
        self.regions().insert(mapping.start, Region { placed, mapping });
        let back_band = usable - bytes - front_band;
        Ok(Reservation {
            allocation: Allocation { address: data as u64, bytes, front_band, back_band },
            touched,
        })
    }

    /// Marks a buffer that kernels may only read; its position, if that is news. This process may
    /// still write it.
    pub fn seal(&self, allocation: &Allocation) -> Option<Placed> {
        let mut regions = self.regions();
        let (_, region) = regions.range_mut(..=allocation.address as usize).next_back()?;
        let is_new = region.placed.data == allocation.address as usize && !region.placed.sealed;
        is_new.then(|| {
            region.placed.sealed = true;
            region.placed.clone()
        })
    }

    /// Makes a buffer read-only that the other process has sealed.
    pub fn protect(&self, placed: &Placed) -> Result<()> {
        let mut regions = self.regions();
        let Some(region) = regions.get_mut(&placed.mapped.start) else { return Ok(()) };
        region.placed.sealed = true;
        let failed =
            |error| RuntimeError::system(format!("sealing `{}` for kernels", placed.name), error);
        let mut pages = placed.open.iter();
        pages.try_for_each(|pages| region.mapping.protect(pages, libc::PROT_READ)).map_err(failed)
    }

    /// Unmaps a buffer.
    pub fn free(&self, allocation: &Allocation) {
        if let Some(placed) = self.placed_at(allocation) {
            self.forget(&placed);
        }
    }

    /// Unmaps a buffer, and frees its memory for both processes.
    pub fn release(&self, placed: &Placed) {
        self.forget(placed);
        let Range { start, end } = placed.mapped;
        let (offset, bytes) = ((start - GLOBAL.start) as libc::off_t, (end - start) as libc::off_t);
        // SAFETY: of an open file; nothing uses these bytes any more.
        unsafe {
            libc::fallocate(
                self.file.as_raw_fd(),
                libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                offset,
                bytes,
            )
        };
    }

    /// Unmaps a buffer.
    pub fn forget(&self, placed: &Placed) {
        let region = self.regions().remove(&placed.mapped.start);
        // Unmapped without the lock.
        drop(region);
    }

    /// Describes the buffer that an access concerned.
    pub fn describe(&self, access: &BadAccess) -> String {
        match access {
            BadAccess::Outside { address } => self.describe_outside(*address),
            BadAccess::Unordered { address, .. } => {
                self.describe_unordered(access).unwrap_or_else(|| self.describe_outside(*address))
            }
            BadAccess::Misaligned { address, bytes, what } => {
                let misaligned = format!(
                    "misaligned {bytes}-byte access ({what}): {} past a multiple of {bytes}",
                    address % *bytes as usize
                );
                match self.place(*address) {
                    Some((name, offset, _)) => {
                        format!("{misaligned}, at byte {offset} of `{name}`")
                    }
                    None => format!("{misaligned}, at address {address:#x}, which is no buffer's"),
                }
            }
        }
    }

    fn describe_unordered(&self, access: &BadAccess) -> Option<String> {
        let BadAccess::Unordered { address, kind, other, other_kind } = access else { return None };
        let (name, offset, _) = self.place(*address)?;
        let (kind, other_kind) = (kind.verb(), other_kind.verb());
        Some(format!(
            "{kind} byte {offset} of `{name}`, which block {other} {other_kind}: blocks have no order, and what one stores the \
             other may miss or undo"
        ))
    }

    /// `byte 8 of `out``, or the shared memory of a block.
    pub fn describe_byte(&self, address: usize) -> String {
        match self.place(address) {
            Some((name, offset, _)) => format!("byte {offset} of `{name}`"),
            None => "a byte of static shared memory".to_owned(),
        }
    }

    /// The buffers, in the order of their addresses.
    pub fn buffers(&self) -> Vec<Range<usize>> {
        self.regions()
            .values()
            .map(|Region { placed, .. }| placed.data..placed.data + placed.data_bytes)
            .collect()
    }

    fn describe_outside(&self, address: usize) -> String {
        if let Some((name, offset)) = self.sealed_place(address) {
            return format!("stored to byte {offset} of `{name}`, which is an input");
        }
        match self.place(address) {
            Some((name, offset, bytes)) => {
                let place = if offset < 0 {
                    format!("{} bytes before the start", -offset)
                } else if offset < bytes as i128 {
                    // An ordinary buffer is fully accessible, so this one is reserved.
                    format!("{offset} bytes past the start, in the gap between rows")
                } else {
                    format!("{} bytes past the end", offset - bytes as i128)
                };
                format!("accessed `{name}` {place} ({bytes} bytes long)")
            }
            None if address < 1 << 16 => format!("accessed address {address:#x}: a null pointer"),
            None => format!("accessed address {address:#x}, which is no buffer's"),
        }
    }

    /// The sealed buffer that contains `address`, and the offset.
    fn sealed_place(&self, address: usize) -> Option<(String, usize)> {
        let regions = self.regions();
        let (_, Region { placed, .. }) = regions.range(..=address).next_back()?;
        let offset = address.checked_sub(placed.data)?;
        (placed.sealed && offset < placed.data_bytes).then(|| (placed.name.clone(), offset))
    }

    /// The buffer that contains `address` or is next to it: its name, the offset from its start,
    /// its bytes.
    fn place(&self, address: usize) -> Option<(String, i128, usize)> {
        let regions = self.regions();
        let (_, near) = regions.range(..=address).next_back()?;
        let Placed { name, data, data_bytes, .. } = &near.placed;
        (address - near.mapping.start < near.mapping.bytes)
            .then(|| (name.clone(), address as i128 - *data as i128, *data_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrapped_offset_from_either_end_of_a_reserved_buffer_has_the_buffers_name() {
        let memory = GuardedMemory::of(new_file().unwrap());
        let bytes = 5usize << 32;
        let ends = [0..64, bytes as i64 - 64..bytes as i64];
        for placement in [Placement::FlushBack, Placement::FlushFront] {
            let Reservation { allocation, touched } =
                memory.reserve("x", bytes, &ends, placement).unwrap();
            assert_eq!(touched.len(), 2);
            let page = page_bytes() as u64;
            assert!(
                touched
                    .iter()
                    .all(|range| range.start % page == 0 && range.end - range.start <= 2 * page)
            );
            let start = allocation.address as usize;
            let said = |address: usize| memory.describe(&BadAccess::Outside { address });
            assert_eq!(
                said(start - (4 << 31)),
                format!("accessed `x` {} bytes before the start ({bytes} bytes long)", 4u64 << 31)
            );
            assert!(said(start + bytes + (3 << 32)).contains("`x` 12884901888 bytes past the end"));
            assert!(
                said(start + (1 << 32))
                    .contains("`x` 4294967296 bytes past the start, in the gap between rows")
            );
            memory.free(&allocation);
            assert!(said(start + (1 << 32)).contains("no buffer's"));
        }
    }

    #[test]
    fn a_place_that_another_buffer_still_has_is_passed_over() {
        let (memory, other) =
            (GuardedMemory::of(new_file().unwrap()), GuardedMemory::of(new_file().unwrap()));
        let first = memory.allocate("first", 100, Placement::FlushBack).unwrap();
        // As if all addresses had been used since.
        NEXT_GLOBAL.store(memory.placed()[0].mapped.start, Ordering::Relaxed);
        let second = other.allocate("second", 100, Placement::FlushBack).unwrap();
        assert_ne!(first.address, second.address);
        memory.free(&first);
        other.free(&second);
    }

    #[test]
    fn what_no_process_can_map_is_refused_by_name() {
        let memory = GuardedMemory::of(new_file().unwrap());
        let refused = |bytes, ranges: &[Range<i64>]| match memory.reserve(
            "x",
            bytes,
            ranges,
            Placement::FlushBack,
        ) {
            Err(RuntimeError::TooLarge { name, needed, limit, .. }) => (name, needed, limit),
            other => panic!("expected a refusal, not {other:?}"),
        };
        assert_eq!(refused(usize::MAX, &[]), ("x".into(), usize::MAX, MOST_RESERVED_BYTES));
        let rows: Vec<_> =
            (0..=MOST_RANGES as i64).map(|row| row << 20..(row << 20) + 16).collect();
        assert_eq!(refused(1 << 39, &rows), ("x".into(), MOST_RANGES + 1, MOST_RANGES));
        let most = memory.reserve("x", 1 << 39, &rows[1..], Placement::FlushBack).unwrap();
        assert_eq!(most.touched.len(), MOST_RANGES);
        memory.free(&most.allocation);
        assert!(memory.allocate("x", usize::MAX - 1, Placement::FlushBack).is_err());
    }
}
