//! Where the ranks of a world meet: shared memory with a place for each.
//!
//! Before a collective each rank writes an [`Announcement`] to its place, counts a step, and waits
//! until all have counted it. Then each compares the announcements of all. A place is written again
//! only after a further step, when all have read it.
//!
//! What ends a rank is written to the head of the memory: who waits for it stops waiting.

use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::slice;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use memmap2::MmapRaw;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{Rng as _, SeedableRng as _};
use serde::{Deserialize, Serialize};

use super::{Announcement, Call, Collective, Collectives, MOST_RANKS, World};
use crate::emulator::memory::file_of_memory;
use crate::error::{Result, RuntimeError};

/// Bytes of the head.
const HEAD: usize = 4096;
/// Where the head has the state of the world, the number of bytes of its text, and the text.
const STATE: usize = 0;
const TEXT_BYTES: usize = 4;
const TEXT: usize = 8;
/// Bytes of a rank's place, without its pieces of tensors.
const PLACE: usize = 16384;
/// Where a place has the steps, whether the rank has left, the bytes of its text, and the text.
const STEPS: usize = 0;
const LEFT: usize = 8;
const WORD_BYTES: usize = 12;
const WORDS: usize = 16;
/// Bytes of a tensor that a rank shows to the others at a time.
pub const PIECE: usize = 1 << 20;

/// States of a world.
const WHOLE: u32 = 0;
const BREAKING: u32 = 1;
const BROKEN: u32 = 2;

/// How often a rank looks again before it sleeps, and the longest sleep between two looks.
const LOOKS: u32 = 64;
const LONGEST_NAP: Duration = Duration::from_micros(400);
/// The longest delay by a seed.
const LONGEST_DELAY_MICROS: u64 = 3000;

/// The shared memory of the ranks of a world.
pub struct Meeting {
    memory: MmapRaw,
    /// Kept by who made it, so that processes can be given it.
    file: Option<std::fs::File>,
}

/// A place in a world, as a process is given it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Seat {
    /// The rank.
    pub rank: usize,
    /// The number of ranks.
    pub size: usize,
    /// Delays the rank before and after collectives, and chooses the order of what has none.
    pub delays: Option<u64>,
    /// How long a rank waits for another one.
    pub limit: Duration,
}

impl Meeting {
    /// Memory for a new world.
    ///
    /// # Errors
    /// The system's.
    pub fn create() -> io::Result<Self> {
        let file = file_of_memory((HEAD + MOST_RANKS * (PLACE + PIECE)) as u64)?;
        Ok(Self { memory: MmapRaw::map_raw(&file)?, file: Some(file) })
    }

    /// The memory that another process made, by the descriptor that this one got. It is closed.
    ///
    /// # Errors
    /// The system's.
    pub fn of_descriptor(descriptor: i32) -> io::Result<Self> {
        // SAFETY: the starting process made the descriptor for this one, and nothing else uses it.
        let file = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(descriptor) });
        Ok(Self { memory: MmapRaw::map_raw(&file)?, file: None })
    }

    /// The file to pass on, for who made it.
    pub fn file(&self) -> Option<&std::fs::File> {
        self.file.as_ref()
    }

    fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset < self.memory.len(), "an offset within the shared memory");
        // SAFETY: within the mapping, as just checked.
        unsafe { self.memory.as_mut_ptr().add(offset) }
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: mapped for as long as `self` lives, aligned, and only used atomically.
        unsafe { &*self.at(offset).cast::<AtomicU32>() }
    }

    fn steps(&self, rank: usize) -> &AtomicU64 {
        // SAFETY: as in `word`; places are multiples of 8.
        unsafe { &*self.at(place(rank) + STEPS).cast::<AtomicU64>() }
    }

    fn has_left(&self, rank: usize) -> &AtomicU32 {
        self.word(place(rank) + LEFT)
    }

    /// Makes it as new. No process of the world may be in a collective.
    pub fn reset(&self) {
        for rank in 0..MOST_RANKS {
            self.steps(rank).store(0, Ordering::Release);
            self.has_left(rank).store(0, Ordering::Release);
            self.word(place(rank) + WORD_BYTES).store(0, Ordering::Release);
        }
        self.word(TEXT_BYTES).store(0, Ordering::Release);
        self.word(STATE).store(WHOLE, Ordering::Release);
    }

    /// A rank takes part in no further collective.
    pub fn leave(&self, rank: usize) {
        self.has_left(rank).store(1, Ordering::Release);
    }

    /// No rank waits any more: the world has broken, for this reason. The first reason stays.
    pub fn break_off(&self, why: &str) {
        let state = self.word(STATE);
        if state.compare_exchange(WHOLE, BREAKING, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return;
        }
        self.write(TEXT, TEXT_BYTES, why.as_bytes(), HEAD);
        state.store(BROKEN, Ordering::Release);
    }

    /// Why the world has broken, if it has.
    fn broken(&self) -> Option<String> {
        match self.word(STATE).load(Ordering::Acquire) {
            WHOLE => None,
            BROKEN => Some(String::from_utf8_lossy(&self.read(TEXT, TEXT_BYTES, HEAD)).into()),
            _ => Some("another rank failed".into()),
        }
    }

    /// Writes a text that ends before `end`, and its length.
    fn write(&self, at: usize, length: usize, text: &[u8], end: usize) {
        let text = &text[..text.len().min(end - at)];
        // SAFETY: within the mapping; by the rules of the module no rank reads it now.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), self.at(at), text.len()) };
        self.word(length).store(text.len() as u32, Ordering::Release);
    }

    fn read(&self, at: usize, length: usize, end: usize) -> Vec<u8> {
        let bytes = self.word(length).load(Ordering::Acquire) as usize;
        let mut text = vec![0; bytes.min(end - at)];
        // SAFETY: within the mapping; by the rules of the module no rank writes it now.
        unsafe { std::ptr::copy_nonoverlapping(self.at(at), text.as_mut_ptr(), text.len()) };
        text
    }

    /// What a rank announced last; `None` before its first collective.
    pub fn last_of(&self, rank: usize) -> Option<Announcement> {
        let start = place(rank);
        let words = self.read(start + WORDS, start + WORD_BYTES, start + PLACE);
        serde_json::from_slice(&words).ok()
    }

    /// The piece of a rank, for that rank alone.
    ///
    /// # Safety
    /// Only the rank itself, between a step after which all have read and the one before which they
    /// wait to read.
    #[allow(clippy::mut_from_ref, reason = "memory that processes share has no one owner")]
    pub unsafe fn own_piece(&self, rank: usize) -> &mut [u8] {
        // SAFETY: within the mapping; exclusive by the rules of the caller.
        unsafe { slice::from_raw_parts_mut(self.at(piece(rank)), PIECE) }
    }

    /// The piece of any rank, to be read.
    ///
    /// # Safety
    /// Only between the step after which it was written and the next one.
    pub unsafe fn piece_of(&self, rank: usize) -> &[u8] {
        // SAFETY: within the mapping; no rank writes, by the rules of the caller.
        unsafe { slice::from_raw_parts(self.at(piece(rank)), PIECE) }
    }
}

fn place(rank: usize) -> usize {
    HEAD + rank * PLACE
}

fn piece(rank: usize) -> usize {
    HEAD + MOST_RANKS * PLACE + rank * PIECE
}

/// A rank at its place.
pub struct Seated {
    meeting: std::sync::Arc<Meeting>,
    seat: Seat,
    chance: Mutex<Option<StdRng>>,
}

impl Seated {
    /// The rank of a seat.
    pub fn new(meeting: std::sync::Arc<Meeting>, seat: Seat) -> Self {
        let of_rank = |seed: u64| {
            StdRng::seed_from_u64(seed.wrapping_mul(MOST_RANKS as u64) ^ seat.rank as u64)
        };
        Self { meeting, seat, chance: Mutex::new(seat.delays.map(of_rank)) }
    }

    /// Its seat.
    pub fn seat(&self) -> &Seat {
        &self.seat
    }

    /// The shared memory.
    pub fn meeting(&self) -> &Meeting {
        &self.meeting
    }

    /// Waits for a time that the seed of the delays chooses.
    fn delay(&self) {
        let mut chance = self.chance.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(chance) = &mut *chance else { return };
        let micros = if chance.random_ratio(1, 2) {
            0
        } else {
            chance.random_range(0..LONGEST_DELAY_MICROS)
        };
        std::thread::sleep(Duration::from_micros(micros));
    }

    /// All ranks, in an order that the seed of the delays chooses: of what has no order.
    pub fn ranks_in_any_order(&self) -> Vec<usize> {
        let mut ranks: Vec<usize> = (0..self.seat.size).collect();
        let mut chance = self.chance.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(chance) = &mut *chance {
            ranks.shuffle(chance);
        }
        ranks
    }

    fn error(&self, rank: usize, collective: &str, what: String) -> RuntimeError {
        RuntimeError::Rank { rank, size: self.seat.size, collective: collective.into(), what }
    }

    /// Counts a step, and waits until all ranks have.
    ///
    /// # Errors
    /// A world that has broken, a rank that has left, and one that does not come.
    pub fn step(&self) -> Result<()> {
        let Seat { rank, size, limit, .. } = self.seat;
        let own = self.meeting.steps(rank).fetch_add(1, Ordering::AcqRel) + 1;
        let start = Instant::now();
        for other in 0..size {
            self.wait_for(other, own, start, limit)?;
        }
        Ok(())
    }

    fn wait_for(&self, other: usize, own: u64, start: Instant, limit: Duration) -> Result<()> {
        let meeting = &self.meeting;
        for look in 0u32.. {
            // Read first: a rank that left has counted its last step.
            let left = meeting.has_left(other).load(Ordering::Acquire) != 0;
            if meeting.steps(other).load(Ordering::Acquire) >= own {
                break;
            }
            let here =
                || meeting.last_of(self.seat.rank).map_or_else(String::new, |a| a.to_string());
            if let Some(why) = meeting.broken() {
                return Err(self.error(self.seat.rank, &here(), why));
            }
            if left {
                let what = format!("it ended without it; {}", self.last_words(other));
                return Err(self.error(other, &here(), what));
            }
            if start.elapsed() > limit {
                let seconds = limit.as_secs_f64();
                let what =
                    format!("it did not come within {seconds} s; {}", self.last_words(other));
                return Err(self.error(other, &here(), what));
            }
            if look < LOOKS {
                std::thread::yield_now();
            } else {
                std::thread::sleep(LONGEST_NAP.min(Duration::from_micros(u64::from(look))));
            }
        }
        Ok(())
    }

    fn last_words(&self, rank: usize) -> String {
        last_words(&self.meeting, rank)
    }

    /// Meets all ranks before a collective. Returns what each of them calls.
    ///
    /// # Errors
    /// Ranks that call different things; those of [`Self::step`].
    fn meet(&self, call: &Call) -> Result<Vec<Announcement>> {
        let Seat { rank, size, .. } = self.seat;
        let own = call.announcement(size);
        let text = serde_json::to_vec(&own).unwrap_or_default();
        let start = place(rank);
        self.meeting.write(start + WORDS, start + WORD_BYTES, &text, start + PLACE);
        self.step()?;
        let unread = || self.error(rank, &own.to_string(), "an announcement is unreadable".into());
        let all: Option<Vec<_>> = (0..size).map(|rank| self.meeting.last_of(rank)).collect();
        let all = all.ok_or_else(unread)?;
        match mismatch(&all) {
            None => Ok(all),
            Some((a, b)) => {
                let what = format!("it calls this, where rank {a} calls {}", all[a]);
                Err(self.error(b, &all[b].to_string(), what))
            }
        }
    }
}

/// What is known of a rank's last call.
pub fn last_words(meeting: &Meeting, rank: usize) -> String {
    match meeting.last_of(rank) {
        Some(last) => format!("its last collective was {last}"),
        None => "it came to no collective".into(),
    }
}

/// Two ranks whose calls do not go together.
fn mismatch(all: &[Announcement]) -> Option<(usize, usize)> {
    let first = all.first()?;
    let typed = all.iter().position(|a| a.dtype.is_some()).unwrap_or(0);
    for (rank, other) in all.iter().enumerate() {
        let dtype = |a: &Announcement| (a.dtype.is_some()).then_some(a.dtype);
        if (&other.name, other.elements) != (&first.name, first.elements) {
            return Some((0, rank));
        }
        // A rank that exchanges nothing has no type.
        if other.name != "exchange" && other.dtype != first.dtype
            || dtype(other).is_some_and(|own| own != all[typed].dtype)
        {
            return Some((typed.min(rank), typed.max(rank)));
        }
    }
    let pairs = (0..all.len()).flat_map(|a| (0..all.len()).map(move |b| (a, b)));
    pairs.into_iter().find(|&(a, b)| all[a].sends.get(b) != all[b].receives.get(a))
}

/// Moves what a collective moves, once all ranks have met.
pub trait Transport: Send + Sync {
    /// Moves it. `all` is what each rank announced.
    ///
    /// # Errors
    /// Errors of the device, and of [`Seated::step`].
    fn perform(&self, collective: &Collective, all: &[Announcement], rank: &Seated) -> Result<()>;
}

impl Transport for Box<dyn Collectives + '_> {
    fn perform(&self, collective: &Collective, _: &[Announcement], _: &Seated) -> Result<()> {
        self.enqueue(collective)
    }
}

/// A rank that meets the others and moves tensors by a transport.
pub struct Member<'t> {
    seated: &'t Seated,
    transport: &'t (dyn Transport + 't),
}

impl<'t> Member<'t> {
    /// A rank at its place, and its transport.
    pub fn new(seated: &'t Seated, transport: &'t (dyn Transport + 't)) -> Self {
        Self { seated, transport }
    }
}

impl World for Member<'_> {
    fn rank(&self) -> usize {
        self.seated.seat.rank
    }

    fn size(&self) -> usize {
        self.seated.seat.size
    }

    fn take_part(&self, call: &Call) -> Result<()> {
        self.seated.delay();
        let all = self.seated.meet(call)?;
        self.transport.perform(&call.collective, &all, self.seated)?;
        // All have read: places and pieces may be written again.
        self.seated.step()?;
        self.seated.delay();
        Ok(())
    }
}
