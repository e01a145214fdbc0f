//! Buffers between guard pages, and the names by which a bad address is reported.

use std::collections::BTreeMap;
use std::sync::Mutex;

use super::fault::BadAccess;
use crate::runtime::backend::{Allocation, Placement};
use crate::runtime::error::{Result, RuntimeError};

/// Bytes of inaccessible memory on each side of a buffer. Wide, so that an index that is off by a
/// row or two of a large tensor still lands in it.
const GUARD_BYTES: usize = 1 << 20;

struct Region {
    name: String,
    mapping: usize,
    mapping_bytes: usize,
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

impl GuardedMemory {
    /// Maps a buffer of `bytes` bytes; see [`Placement`] for which of its ends touches a guard page.
    pub fn allocate(&self, name: &str, bytes: usize, placement: Placement) -> Result<Allocation> {
        let page = page_bytes();
        let usable = bytes.next_multiple_of(page).max(page);
        let mapping_bytes = usable + 2 * GUARD_BYTES;
        // SAFETY: an anonymous private mapping at an address of the system's choice.
        let mapping = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapping_bytes,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if mapping == libc::MAP_FAILED {
            return Err(RuntimeError::system(
                format!("mapping {bytes} bytes for `{name}`"),
                std::io::Error::last_os_error(),
            ));
        }
        let mapping = mapping as usize;
        let start = mapping + GUARD_BYTES;
        // SAFETY: the range lies within the mapping made above.
        if unsafe { libc::mprotect(start as *mut _, usable, libc::PROT_READ | libc::PROT_WRITE) } != 0 {
            let error = std::io::Error::last_os_error();
            // SAFETY: unmaps the mapping made above, which nothing uses yet.
            unsafe { libc::munmap(mapping as *mut _, mapping_bytes) };
            return Err(RuntimeError::system(format!("mapping {bytes} bytes for `{name}`"), error));
        }
        let front_band = match placement {
            // Kernels may rely on 16-byte alignment, so up to 15 bytes behind the end stay a band.
            Placement::FlushBack => (usable - bytes) / 16 * 16,
            Placement::FlushFront => 0,
        };
        let data = start + front_band;
        let region = Region { name: name.to_owned(), mapping, mapping_bytes, data, data_bytes: bytes };
        self.regions.lock().unwrap_or_else(|e| e.into_inner()).insert(mapping, region);
        Ok(Allocation { address: data as u64, bytes, front_band, back_band: usable - bytes - front_band })
    }

    /// Unmaps a buffer.
    pub fn free(&self, allocation: &Allocation) {
        let mapping = allocation.address as usize - allocation.front_band - GUARD_BYTES;
        let region = self.regions.lock().unwrap_or_else(|e| e.into_inner()).remove(&mapping);
        if let Some(region) = region {
            // SAFETY: the region was mapped by `allocate` and is unmapped once, here.
            unsafe { libc::munmap(region.mapping as *mut _, region.mapping_bytes) };
        }
    }

    /// Says which buffer an access concerned.
    pub fn describe(&self, access: &BadAccess) -> String {
        match access {
            BadAccess::Outside { address } => self.describe_outside(*address),
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

    fn describe_outside(&self, address: usize) -> String {
        match self.place(address) {
            Some((name, offset, bytes)) => {
                let place = if offset < 0 {
                    format!("{} bytes before the start", -offset)
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
        let regions = self.regions.lock().unwrap_or_else(|e| e.into_inner());
        let (_, near) = regions.range(..=address).next_back()?;
        (address < near.mapping + near.mapping_bytes)
            .then(|| (near.name.clone(), address as i128 - near.data as i128, near.data_bytes))
    }
}

impl Drop for GuardedMemory {
    fn drop(&mut self) {
        let regions = self.regions.get_mut().unwrap_or_else(|e| e.into_inner());
        for region in regions.values() {
            // SAFETY: mapped by `allocate`, not yet unmapped (it would be gone from the map).
            unsafe { libc::munmap(region.mapping as *mut _, region.mapping_bytes) };
        }
    }
}
