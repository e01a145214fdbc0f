//! The progress of a worker process, in memory that its device can read when the process is gone:
//! the current block of each of its threads, and the current CUDA thread.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use super::dim3::Dim3;
use super::memory::file_of_memory;

/// Most threads whose blocks are recorded.
const SLOTS: usize = 256;

/// What a thread of the worker currently runs.
#[repr(C)]
#[derive(Default)]
struct Slot {
    state: AtomicU32,
    block: [AtomicU32; 3],
    block_dim: [AtomicU32; 3],
    /// Number of the thread within its block.
    thread: AtomicU32,
}

const IDLE: u32 = 0;
const RUNNING: u32 = 1;
/// This thread ends the process.
const ENDING: u32 = 2;

/// Memory that a device shares with its worker.
pub struct Page {
    slots: NonNull<Slot>,
}

// SAFETY: slots are atomics in a mapping that lives as long as the page.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    /// A memory file for one page; it is gone with its last descriptor.
    pub fn file() -> io::Result<File> {
        file_of_memory(size_of::<[Slot; SLOTS]>() as u64)
    }

    /// Maps the file.
    pub fn of(file: &File) -> io::Result<Self> {
        let (bytes, protection) = (size_of::<[Slot; SLOTS]>(), libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: a new mapping of an open file; nothing is replaced.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                protection,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        match NonNull::new(start.cast()) {
            Some(slots) if start != libc::MAP_FAILED => Ok(Self { slots }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn slots(&self) -> &[Slot] {
        // SAFETY: the file was made with room for that many slots, zero bytes are idle slots, and
        // the mapping lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.slots.as_ptr(), SLOTS) }
    }

    /// The blocks that ran when the worker ended, each with its thread. If a thread is marked as
    /// the one that ended it, only that one.
    pub fn running(&self) -> Vec<(Dim3, Dim3)> {
        let in_state = |state| {
            self.slots().iter().filter(move |slot| slot.state.load(Ordering::Relaxed) == state)
        };
        let known: Vec<_> = in_state(ENDING).map(Slot::place).collect();
        if known.is_empty() { in_state(RUNNING).map(Slot::place).collect() } else { known }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: mapped by `of`, unmapped once, here.
        unsafe { libc::munmap(self.slots.as_ptr().cast(), size_of::<[Slot; SLOTS]>()) };
    }
}

impl Slot {
    fn place(&self) -> (Dim3, Dim3) {
        let load =
            |index: &[AtomicU32; 3]| Dim3::new([0, 1, 2].map(|i| index[i].load(Ordering::Relaxed)));
        let thread = self.thread.load(Ordering::Relaxed);
        (load(&self.block), load(&self.block_dim).unflatten(u64::from(thread)))
    }
}

/// The page of this process, if it is a worker.
static PAGE: OnceLock<Page> = OnceLock::new();

thread_local! {
    static SLOT: Cell<Option<&'static Slot>> = const { Cell::new(None) };
}

/// Publishes this process's progress on a page.
pub fn tell(page: Page) {
    let _ = PAGE.set(page);
    // SAFETY: both functions take a handler without arguments; this one stores to memory that is
    // never unmapped here.
    unsafe {
        libc::atexit(on_exit);
        at_quick_exit(on_exit);
    }
}

unsafe extern "C" {
    fn at_quick_exit(handler: extern "C" fn()) -> libc::c_int;
}

extern "C" fn on_exit() {
    if let Some(slot) = SLOT.get() {
        slot.state.store(ENDING, Ordering::Relaxed);
    }
}

/// Records what the calling thread, number `number` of the launch, runs from now on, in a separate
/// slot.
pub fn take_slot(number: usize) {
    SLOT.set(PAGE.get().and_then(|page| page.slots().get(number)));
}

/// The calling thread runs this block.
pub fn enter_block(block: Dim3, block_dim: Dim3) {
    let Some(slot) = SLOT.get() else { return };
    let store = |to: &[AtomicU32; 3], Dim3 { x, y, z }: Dim3| {
        to.iter().zip([x, y, z]).for_each(|(to, extent)| to.store(extent, Ordering::Relaxed));
    };
    store(&slot.block, block);
    store(&slot.block_dim, block_dim);
    slot.state.store(RUNNING, Ordering::Relaxed);
}

/// The calling thread runs this thread of its block.
pub fn run_thread(thread: u32) {
    if let Some(slot) = SLOT.get() {
        slot.thread.store(thread, Ordering::Relaxed);
    }
}

/// The calling thread runs no block.
pub fn leave_block() {
    if let Some(slot) = SLOT.get() {
        slot.state.store(IDLE, Ordering::Relaxed);
    }
}
