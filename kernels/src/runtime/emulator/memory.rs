//! Buffers between guard pages, and the names by which a bad address is reported.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::fault::BadAccess;
use crate::runtime::backend::{Allocation, Placement, Reservation, granules};
use crate::runtime::error::{Result, RuntimeError};

/// Bytes of inaccessible memory on each side of a buffer. Wide, so that an index that is off by a
/// row or two of a large tensor still lands in it.
const GUARD_BYTES: usize = 1 << 20;

/// The same for a reserved buffer: an offset of 32 bits that wrapped, times the largest element's 4 bytes, lands in it
/// whether it is read as signed or as unsigned, and not in some other buffer.
const RESERVED_GUARD_BYTES: usize = 4 << 32;

/// Bytes of the largest reserved buffer. A process has 128 of these.
const MOST_RESERVED_BYTES: usize = 1 << 40;

/// Most touched ranges of a reserved buffer. Each splits a mapping, of which Linux grants a process 65530.
const MOST_RANGES: usize = 8192;

/// Address space of this process, unmapped when dropped.
struct Mapping {
    start: usize,
    bytes: usize,
}

/// Where global memory lies, so that code can tell its accesses from those to stacks and shared memory at a glance
/// (`emulator.h`). Systems place nothing there unless they are asked to.
const GLOBAL: Range<usize> = 1 << 44..5 << 44;

/// Where the next buffer of global memory is asked for.
static NEXT_GLOBAL: AtomicUsize = AtomicUsize::new(GLOBAL.start);

impl Mapping {
    /// Maps `bytes` inaccessible bytes for global memory. Where the system has no room in [`GLOBAL`] they lie elsewhere, and
    /// who accesses them is not seen.
    fn global(bytes: usize) -> io::Result<Self> {
        for _ in 0..2 {
            let start = NEXT_GLOBAL.fetch_add(bytes.next_multiple_of(GUARD_BYTES), Ordering::Relaxed);
            if start.checked_add(bytes).is_some_and(|end| end <= GLOBAL.end) {
                return Self::at(start, bytes);
            }
            // All of it was used once: from the start again, where buffers are long gone.
            NEXT_GLOBAL.store(GLOBAL.start, Ordering::Relaxed);
        }
        Self::at(0, bytes)
    }

    /// Maps `bytes` inaccessible bytes at an address, or where the system prefers to.
    fn at(start: usize, bytes: usize) -> io::Result<Self> {
        // SAFETY: an anonymous private mapping; without MAP_FIXED the address is a wish, and replaces nothing.
        let start = unsafe {
            libc::mmap(
                start as *mut _,
                bytes,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            Err(io::Error::last_os_error())
        } else {
            Ok(Self { start: start as usize, bytes })
        }
    }

    /// Makes whole pages of the mapping accessible.
    fn open(&self, pages: &Range<u64>) -> io::Result<()> {
        assert!(self.start as u64 <= pages.start && pages.end <= (self.start + self.bytes) as u64, "pages of another");
        let bytes = (pages.end - pages.start) as usize;
        // SAFETY: the range lies within this mapping (checked above), which nothing but kernels and copies uses.
        match unsafe { libc::mprotect(pages.start as *mut _, bytes, libc::PROT_READ | libc::PROT_WRITE) } {
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
    name: String,
    mapping: Mapping,
    data: usize,
    data_bytes: usize,
}

/// All buffers of one emulated device.
#[derive(Default)]
pub struct GuardedMemory {
    /// By mapping start.
    regions: Mutex<BTreeMap<usize, Region>>,
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
    /// The memory of a device's process number `generation`: it begins elsewhere than those of the last few before it, so that an
    /// address of one is none of another.
    pub fn from_generation(generation: u64) -> Self {
        let places = (GLOBAL.end - GLOBAL.start) as u64 / MOST_RESERVED_BYTES as u64;
        let start = GLOBAL.start + (generation % places) as usize * MOST_RESERVED_BYTES;
        NEXT_GLOBAL.store(start, Ordering::Relaxed);
        Self::default()
    }

    fn regions(&self) -> MutexGuard<'_, BTreeMap<usize, Region>> {
        self.regions.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Maps a buffer of `bytes` bytes; see [`Placement`] for which of its ends touches a guard page.
    pub fn allocate(&self, name: &str, bytes: usize, placement: Placement) -> Result<Allocation> {
        let mapping = Mapping::global;
        self.map(name, bytes, placement, mapping, GUARD_BYTES, |pages, _| vec![pages]).map(|made| made.allocation)
    }

    /// Maps the dynamic shared memory of a block: its end touches a guard page, and where it begins matters to nobody.
    pub fn allocate_shared(&self, bytes: usize) -> Result<Allocation> {
        let (placement, mapping) = (Placement::FlushBack, |bytes| Mapping::at(0, bytes));
        let made = self.map("dynamic shared memory", bytes, placement, mapping, GUARD_BYTES, |pages, _| vec![pages])?;
        Ok(made.allocation)
    }

    /// Maps a buffer of which only the pages that hold some of `touched` can be accessed; see
    /// [`Backend::reserve`](crate::runtime::backend::Backend::reserve).
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
            of: of.into(),
        };
        if bytes > MOST_RESERVED_BYTES {
            return Err(too_large(bytes, MOST_RESERVED_BYTES, "bytes of addresses"));
        }
        // Before anything is mapped: how many there are does not depend on where they lie, but for two that share a page.
        if touched.len() > MOST_RANGES {
            return Err(too_large(touched.len(), MOST_RANGES, "ranges of memory far apart"));
        }
        let page = page_bytes() as u64;
        let mapping = Mapping::global;
        self.map(name, bytes, placement, mapping, RESERVED_GUARD_BYTES, |pages, data| {
            granules(touched, data, &pages, page)
        })
    }

    /// Maps a buffer and makes those of its pages accessible that `choose` names, given all of them and the address of
    /// the first usable byte.
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
        let failed = |error| RuntimeError::system(format!("mapping {bytes} bytes for `{name}`"), error);
        let usable = bytes.max(1).checked_next_multiple_of(page);
        let sizes = usable.and_then(|usable| Some((usable, usable.checked_add(2 * guard)?)));
        let (usable, mapped) = sizes.ok_or_else(|| failed(io::ErrorKind::OutOfMemory.into()))?;
        let mapping = make(mapped).map_err(failed)?;
        let start = mapping.start + guard;
        let front_band = match placement {
            // Kernels may rely on 16-byte alignment, so up to 15 bytes behind the end stay a band.
            Placement::FlushBack => (usable - bytes) / 16 * 16,
            Placement::FlushFront => 0,
        };
        let data = start + front_band;
        let touched = choose(start as u64..(start + usable) as u64, data as u64);
        touched.iter().try_for_each(|pages| mapping.open(pages)).map_err(failed)?;
        let region = Region { name: name.to_owned(), mapping, data, data_bytes: bytes };
        self.regions().insert(region.mapping.start, region);
        let back_band = usable - bytes - front_band;
        Ok(Reservation { allocation: Allocation { address: data as u64, bytes, front_band, back_band }, touched })
    }

    /// Unmaps a buffer.
    pub fn free(&self, allocation: &Allocation) {
        let data = allocation.address as usize;
        let mut regions = self.regions();
        let found = regions.range(..=data).next_back().filter(|(_, region)| region.data == data).map(|(&key, _)| key);
        let region = found.and_then(|key| regions.remove(&key));
        // Unmapped without the lock.
        drop(regions);
        drop(region);
    }

    /// Says which buffer an access concerned.
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
                    Some((name, offset, _)) => format!("{misaligned}, at byte {offset} of `{name}`"),
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

    /// The buffers, in the order of their addresses.
    pub fn buffers(&self) -> Vec<Range<usize>> {
        self.regions().values().map(|region| region.data..region.data + region.data_bytes).collect()
    }

    fn describe_outside(&self, address: usize) -> String {
        match self.place(address) {
            Some((name, offset, bytes)) => {
                let place = if offset < 0 {
                    format!("{} bytes before the start", -offset)
                } else if offset < bytes as i128 {
                    // All of an ordinary buffer can be accessed, so that this one is reserved.
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

    /// The buffer that `address` belongs to or lies near: its name, the offset from its start, its bytes.
    fn place(&self, address: usize) -> Option<(String, i128, usize)> {
        let regions = self.regions();
        let (_, near) = regions.range(..=address).next_back()?;
        (address - near.mapping.start < near.mapping.bytes)
            .then(|| (near.name.clone(), address as i128 - near.data as i128, near.data_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrapped_offset_from_either_end_of_a_reserved_buffer_has_the_buffers_name() {
        let memory = GuardedMemory::default();
        let bytes = 5usize << 32;
        let ends = [0..64, bytes as i64 - 64..bytes as i64];
        for placement in [Placement::FlushBack, Placement::FlushFront] {
            let Reservation { allocation, touched } = memory.reserve("x", bytes, &ends, placement).unwrap();
            assert_eq!(touched.len(), 2);
            let page = page_bytes() as u64;
            assert!(touched.iter().all(|range| range.start % page == 0 && range.end - range.start <= 2 * page));
            let start = allocation.address as usize;
            let said = |address: usize| memory.describe(&BadAccess::Outside { address });
            assert_eq!(
                said(start - (4 << 31)),
                format!("accessed `x` {} bytes before the start ({bytes} bytes long)", 4u64 << 31)
            );
            assert!(said(start + bytes + (3 << 32)).contains("`x` 12884901888 bytes past the end"));
            assert!(said(start + (1 << 32)).contains("`x` 4294967296 bytes past the start, in the gap between rows"));
            memory.free(&allocation);
            assert!(said(start + (1 << 32)).contains("no buffer's"));
        }
    }

    #[test]
    fn what_no_process_can_map_is_refused_by_name() {
        let memory = GuardedMemory::default();
        let refused = |bytes, ranges: &[Range<i64>]| match memory.reserve("x", bytes, ranges, Placement::FlushBack) {
            Err(RuntimeError::TooLarge { name, needed, limit, .. }) => (name, needed, limit),
            other => panic!("expected a refusal, not {other:?}"),
        };
        assert_eq!(refused(usize::MAX, &[]), ("x".into(), usize::MAX, MOST_RESERVED_BYTES));
        let rows: Vec<_> = (0..=MOST_RANGES as i64).map(|row| row << 20..(row << 20) + 16).collect();
        assert_eq!(refused(1 << 39, &rows), ("x".into(), MOST_RANGES + 1, MOST_RANGES));
        let most = memory.reserve("x", 1 << 39, &rows[1..], Placement::FlushBack).unwrap();
        assert_eq!(most.touched.len(), MOST_RANGES);
        memory.free(&most.allocation);
        assert!(memory.allocate("x", usize::MAX - 1, Placement::FlushBack).is_err());
    }
}
