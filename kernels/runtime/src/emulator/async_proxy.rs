//! What the asynchronous proxy sees of shared memory.
//!
//! MMAs and bulk copies read shared memory through another proxy than ordinary instructions. They
//! are certain to see an ordinary store (or a `cp.async`) only after a proxy fence: by the writer
//! after its write, or by the reader before its read was issued. For each 16 bytes this records the
//! time of the last ordinary write and its thread, and for each thread the time of its last fence.
//! A read that no fence covers gets poison.

use super::shared::SHARED_BYTES_PER_BLOCK;

/// Granularity of the record.
pub const CHUNK_BYTES: u32 = 16;
/// A write is `time << WRITER_BITS | writer`; 0 means no write.
const WRITER_BITS: u32 = 10;

/// The state that a read through the proxy needs. Mirror of `emulator::AsyncReads` in `emulator.h`.
#[repr(C)]
pub struct AsyncReads {
    shared: *const u8,
    /// By chunk; null before the first ordinary write.
    writes: *const u64,
    /// By thread.
    fences: *const u64,
    /// Last fence of the warp that issued the read, at its issue.
    issuer_fence: u64,
    /// One bit for each chunk, set when it is read; null if reads are not recorded.
    touched: *mut u64,
}

/// The chunks that an MMA reads.
pub struct Touched(Vec<u64>);

impl Touched {
    /// None so far; without room for any unless `asked`.
    pub fn new(asked: bool) -> Self {
        let chunks = SHARED_BYTES_PER_BLOCK.div_ceil(u64::from(CHUNK_BYTES));
        Self(if asked { vec![0; chunks.div_ceil(64) as usize] } else { Vec::new() })
    }

    /// For [`AsyncReads`].
    pub fn words(&mut self) -> *mut u64 {
        if self.0.is_empty() { std::ptr::null_mut() } else { self.0.as_mut_ptr() }
    }

    /// Offsets and sizes of neighbouring chunks, in bytes.
    pub fn runs(&self) -> Vec<(u32, usize)> {
        let mut runs: Vec<(u32, usize)> = Vec::new();
        for (word, &bits) in (0..).zip(&self.0).filter(|(_, bits)| **bits != 0) {
            for bit in (0..64).filter(|bit| bits >> bit & 1 != 0) {
                let offset = (word * 64 + bit) * CHUNK_BYTES;
                match runs.last_mut() {
                    Some((start, bytes)) if *start + *bytes as u32 == offset => {
                        *bytes += CHUNK_BYTES as usize;
                    }
                    _ => runs.push((offset, CHUNK_BYTES as usize)),
                }
            }
        }
        runs
    }
}

/// The record of one block.
pub struct AsyncProxy {
    shared: *mut u8,
    shared_bytes: usize,
    clock: u64,
    writes: Vec<u64>,
    fences: Vec<u64>,
}

impl AsyncProxy {
    /// The record of a block of `threads` threads with this dynamic shared memory.
    pub fn new(shared: (*mut u8, usize), threads: u32) -> Self {
        Self {
            shared: shared.0,
            shared_bytes: shared.1,
            clock: 0,
            writes: Vec::new(),
            fences: vec![0; threads as usize],
        }
    }

    /// Thread `writer` wrote these bytes with an ordinary instruction.
    pub fn ordinary_write(&mut self, offset: u32, bytes: u32, writer: u32) {
        self.clock += 1;
        self.record(offset, bytes, self.clock << WRITER_BITS | u64::from(writer));
    }

    /// These bytes were written through the proxy itself.
    pub fn own_write(&mut self, offset: u32, bytes: u32) {
        self.record(offset, bytes, 0);
    }

    fn record(&mut self, offset: u32, bytes: u32, write: u64) {
        if self.writes.is_empty() {
            self.writes = vec![0; self.shared_bytes.div_ceil(CHUNK_BYTES as usize)];
        }
        let (first, behind) = (offset / CHUNK_BYTES, (offset + bytes).div_ceil(CHUNK_BYTES));
        if let Some(chunks) = self.writes.get_mut(first as usize..behind as usize) {
            chunks.fill(write);
        }
    }

    /// Offset of a pointer into the dynamic shared memory.
    pub fn offset_of(&self, pointer: *const u8) -> u32 {
        (pointer as usize).wrapping_sub(self.shared as usize) as u32
    }

    /// Host address of an offset that is known to lie within the dynamic shared memory.
    pub fn pointer(&self, offset: u32) -> *mut u8 {
        self.shared.wrapping_add(offset as usize)
    }

    /// Whether `bytes` bytes at `offset` lie within the dynamic shared memory.
    pub fn contains(&self, offset: u32, bytes: u32) -> bool {
        u64::from(offset) + u64::from(bytes) <= self.shared_bytes as u64
    }

    pub fn fence(&mut self, thread: u32) {
        self.clock += 1;
        self.fences[thread as usize] = self.clock;
    }

    /// Last fence of any lane of `thread`'s warp.
    pub fn warp_fence(&self, thread: u32) -> u64 {
        let lanes = self.fences.chunks(32).nth(thread as usize / 32).unwrap_or_default();
        lanes.iter().copied().max().unwrap_or(0)
    }

    /// The state for a read whose issuer's last fence was at `issuer_fence`.
    pub fn reads(&self, issuer_fence: u64, touched: *mut u64) -> AsyncReads {
        let writes = if self.writes.is_empty() { std::ptr::null() } else { self.writes.as_ptr() };
        let fences = self.fences.as_ptr();
        AsyncReads { shared: self.shared, writes, fences, issuer_fence, touched }
    }

    /// Whether such a read sees the contents of the chunk at `offset`.
    pub fn sees(&self, offset: u32, issuer_fence: u64) -> bool {
        let write = self.writes.get((offset / CHUNK_BYTES) as usize).copied().unwrap_or(0);
        let (time, writer) = (write >> WRITER_BITS, write as usize & ((1 << WRITER_BITS) - 1));
        write == 0 || self.fences[writer] > time || issuer_fence > time
    }
}
