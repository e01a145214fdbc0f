//! Barriers in shared memory that count arrivals and bytes, phase after phase.
//!
//! The state is kept here, by the barrier's offset in the block's dynamic shared memory. The 8
//! bytes there hold a stamp, which shows stores through a pointer.

use std::collections::BTreeMap;

use super::race::clock::{Clock, Release};

/// Bytes that an mbarrier takes in shared memory.
pub(super) const MBARRIER_BYTES: u32 = 8;
/// What they hold: NaN in floating-point types, and no integer that a kernel would store.
const STAMP: [u8; MBARRIER_BYTES as usize] = [0xa5, 0xff, 0xa5, 0xff, 0xa5, 0xff, 0xa5, 0xff];
/// The most arrivals that an mbarrier can be initialised with.
const MOST_ARRIVALS: u32 = (1 << 20) - 1;

/// One mbarrier.
#[derive(Default)]
pub struct Mbarrier {
    /// Arrivals that a phase needs.
    pub(super) arrivals: u32,
    /// The thread that initialised it.
    initialiser: u32,
    /// Whether a fence followed, after which copies and other blocks may use it.
    fenced: bool,
    /// Arrivals that the current phase still needs.
    pub(super) missing: u32,
    /// Bytes that the current phase expects and that have not arrived; negative while more have
    /// arrived than were announced.
    pub(super) missing_bytes: i64,
    pub(super) completed_phases: u64,
    /// Threads that wait for the current phase.
    pub(super) waiting: Vec<u32>,
    /// Its component of the clocks, if races are looked for.
    pub(super) component: u32,
    /// What the threads know that have arrived since the start.
    pub(super) release: Release,
    /// The same at the end of the last phase of each parity.
    pub(super) clocks: [Clock; 2],
}

impl Mbarrier {
    fn new(arrivals: u32, initialiser: u32) -> Self {
        Self { arrivals, initialiser, missing: arrivals, ..Self::default() }
    }

    /// Whether a wait for the phase of this parity returns at once: the current phase has the other
    /// parity.
    pub fn passed(&self, parity: u32) -> bool {
        (self.completed_phases & 1) as u32 != parity
    }

    /// One arrival; returns the threads that it releases.
    ///
    /// # Errors
    /// The phase has all its arrivals already and waits only for bytes.
    pub fn arrive(&mut self) -> Result<Vec<u32>, String> {
        if self.missing == 0 {
            return Err(format!("all {} arrivals of its phase have come already", self.arrivals));
        }
        self.missing -= 1;
        Ok(self.complete())
    }

    pub fn expect(&mut self, bytes: u32) {
        self.missing_bytes += i64::from(bytes);
    }

    /// Bytes have arrived; returns the threads that this releases.
    pub fn land(&mut self, bytes: u32) -> Vec<u32> {
        self.missing_bytes -= i64::from(bytes);
        self.complete()
    }

    /// Its component, and the phase that counts what is issued now.
    pub fn counting(&self) -> (u32, u32) {
        (self.component, self.completed_phases as u32 + 1)
    }

    fn complete(&mut self) -> Vec<u32> {
        if self.missing > 0 || self.missing_bytes != 0 {
            return Vec::new();
        }
        let parity = (self.completed_phases & 1) as usize;
        self.completed_phases += 1;
        if self.component != 0 {
            self.release.add_epoch(self.component, self.completed_phases as u32);
            self.clocks[parity] = self.release.clock();
        }
        self.missing = self.arrivals;
        std::mem::take(&mut self.waiting)
    }
}

/// The mbarriers of one block, by offset.
#[derive(Default)]
pub struct Mbarriers {
    pub(super) by_offset: BTreeMap<u32, Mbarrier>,
    /// The positions of their stamps, in the order of initialization: checked whenever a thread
    /// stops.
    stamps: Vec<*mut [u8; MBARRIER_BYTES as usize]>,
}

impl Mbarriers {
    /// Thread `initialiser` initialises the one at `offset` of the dynamic shared memory `shared`,
    /// `shared_bytes` long, which outlives the block.
    pub fn init(
        &mut self,
        offset: u32,
        arrivals: u32,
        initialiser: u32,
        (shared, shared_bytes): (*mut u8, u64),
    ) -> Result<(), String> {
        if !offset.is_multiple_of(MBARRIER_BYTES) {
            return Err(format!("mbarrier at offset {offset:#x}: not 8-byte aligned"));
        }
        if u64::from(offset) + u64::from(MBARRIER_BYTES) > shared_bytes {
            return Err(format!(
                "mbarrier at offset {offset:#x}: outside the dynamic shared memory"
            ));
        }
        if arrivals == 0 || arrivals > MOST_ARRIVALS {
            return Err(format!(
                "mbarrier at offset {offset:#x}: initialised with {arrivals} arrivals; 1 to {MOST_ARRIVALS} are allowed"
            ));
        }
        if self.by_offset.contains_key(&offset) {
            return Err(format!("mbarrier at offset {offset:#x}: initialised a second time"));
        }
        self.by_offset.insert(offset, Mbarrier::new(arrivals, initialiser));
        let stamp = shared.wrapping_add(offset as usize).cast();
        // SAFETY: it lies within the block's shared memory, as just checked.
        unsafe { std::ptr::write_unaligned(stamp, STAMP) };
        self.stamps.push(stamp);
        Ok(())
    }

    /// The mbarrier at `offset`.
    ///
    /// # Errors
    /// No mbarrier was initialized there.
    pub fn at(&mut self, offset: u32) -> Result<&mut Mbarrier, String> {
        self.by_offset
            .get_mut(&offset)
            .ok_or_else(|| format!("mbarrier at offset {offset:#x}: used before its init"))
    }

    /// A fence of this thread: what it has initialised may be used by copies and other blocks.
    pub fn fence(&mut self, thread: u32) {
        let own = |barrier: &&mut Mbarrier| barrier.initialiser == thread;
        self.by_offset.values_mut().filter(own).for_each(|barrier| barrier.fenced = true);
    }

    /// The mbarrier at `offset`, for a copy or another block.
    ///
    /// # Errors
    /// No mbarrier was initialised there, or no fence followed.
    pub fn fenced(&mut self, offset: u32) -> Result<&mut Mbarrier, String> {
        let barrier = self.at(offset)?;
        if barrier.fenced {
            return Ok(barrier);
        }
        Err(format!(
            "mbarrier at offset {offset:#x}: a copy or another block uses it, and no \
             fence_mbarrier_init or fence_async_proxy followed its init"
        ))
    }

    /// Whether a thread waits for the current phase of the mbarrier at `offset`.
    pub fn is_awaited(&self, offset: u32) -> bool {
        self.by_offset.get(&offset).is_some_and(|barrier| !barrier.waiting.is_empty())
    }

    /// What the current phase of the mbarrier at `offset` lacks.
    pub fn lacks(&self, offset: u32) -> String {
        let Some(barrier) = self.by_offset.get(&offset) else {
            return "none was initialised".into();
        };
        format!(
            "{} of {} arrivals and {} bytes are missing from phase {}",
            barrier.missing, barrier.arrivals, barrier.missing_bytes, barrier.completed_phases
        )
    }

    /// Reports a store through a pointer that corrupted an mbarrier of the shared memory that
    /// starts at `shared`.
    pub fn corrupted(&self, shared: *const u8) -> Option<String> {
        // SAFETY: see `init`; no thread runs meanwhile.
        let is_corrupted = |stamp: &&*mut [u8; MBARRIER_BYTES as usize]| unsafe { stamp.read_unaligned() } != STAMP;
        let offset = self.stamps.iter().find(is_corrupted)?.addr() - shared.addr();
        Some(format!("stored over the mbarrier at offset {offset:#x}"))
    }

    /// Reports an overlap of `bytes` bytes at `offset` with an mbarrier.
    pub fn overlap(&self, offset: u32, bytes: u32) -> Option<String> {
        let (&barrier, _) = self.by_offset.range(..offset.saturating_add(bytes)).next_back()?;
        (barrier + MBARRIER_BYTES > offset)
            .then(|| format!("writes {bytes} bytes at offset {offset:#x}, over the mbarrier at offset {barrier:#x}"))
    }
}
