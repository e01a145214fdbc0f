//! Which blocks of a launch accessed which bytes of global memory, and how.
//!
//! Blocks of one launch have no order and may run at the same time. So if one block stores a byte
//! plainly, no other block may read, store or update it. The resulting loss (of an addition by
//! load, add and store, say) appears only in some runs, while the set of accesses is the same in
//! every order. The compiler's instrumentation reports loads and stores (`emulator.h`); the host
//! API reports its own copies and updates. Atomic operations do not order blocks either: kernels
//! here have no fence for that.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// The kind of an access. Mirror of `emulator::AccessKind` in `emulator.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum AccessKind {
    /// A plain load.
    Read = 0,
    /// A plain store.
    Write = 1,
    /// An atomic update.
    Atomic = 2,
}

impl AccessKind {
    const ALL: [Self; 3] = [Self::Read, Self::Write, Self::Atomic];

    /// Whether two threads or blocks without an order may not access the same byte in these two ways.
    pub(super) fn conflicts(self, other: Self) -> bool {
        let [a, b] = [self, other];
        (a == Self::Write || b == Self::Write) || (a == Self::Atomic) != (b == Self::Atomic)
    }

    /// The access as a verb.
    pub fn verb(self) -> &'static str {
        match self {
            Self::Read => "reads",
            Self::Write => "stores",
            Self::Atomic => "updates",
        }
    }
}

/// Two accesses of one byte by two blocks without an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The first byte that both access.
    pub address: usize,
    /// The kind of the later access.
    pub kind: AccessKind,
    /// Number of the block that accessed it first.
    pub other_block: u32,
    /// The kind of its access.
    pub other_kind: AccessKind,
}

/// Accesses of one kind to a word, by the first two blocks. Bytes that only a third block accesses
/// are not recorded: elements of 2 or more bytes have no such bytes.
#[derive(Clone, Copy, Default)]
struct Seen {
    /// Numbers of the blocks plus one; 0 for no block.
    blocks: [u32; 2],
    /// The bytes of each block: bit i for byte i.
    bytes: [u8; 2],
}

impl Seen {
    /// A block other than this one that accessed one of these bytes.
    fn by_another(&self, block: u32, bytes: u8) -> Option<u32> {
        let of = |i: &usize| self.blocks[*i] != block && self.bytes[*i] & bytes != 0;
        (0..2).find(of).map(|i| self.blocks[i] - 1)
    }

    fn add(&mut self, block: u32, bytes: u8) {
        if let Some(i) = (0..2).find(|&i| self.blocks[i] == block || self.blocks[i] == 0) {
            self.blocks[i] = block;
            self.bytes[i] |= bytes;
        }
    }
}

/// Bytes of a word, the recorded unit.
const WORD: usize = 4;
const PAGE_WORDS: usize = 1024;
type Page = [[Seen; 3]; PAGE_WORDS];

/// What all blocks of a launch accessed so far.
pub struct Accesses {
    /// Buffers of global memory, in the order of their addresses.
    buffers: Vec<Range<usize>>,
    pages: Mutex<Pages>,
}

/// Pages of words, by their numbers.
struct Pages {
    places: HashMap<usize, u32>,
    /// For each remainder of a page number the most recently used page, and its index: most
    /// accesses need only this.
    recent: [(usize, u32); 64],
    pages: Vec<Box<Page>>,
}

impl Pages {
    fn of(&mut self, number: usize) -> &mut Page {
        let slot = number % self.recent.len();
        if self.recent[slot].0 != number {
            let place = *self.places.entry(number).or_insert_with(|| {
                self.pages.push(Box::new([[Seen::default(); 3]; PAGE_WORDS]));
                self.pages.len() as u32 - 1
            });
            self.recent[slot] = (number, place);
        }
        &mut self.pages[self.recent[slot].1 as usize]
    }
}

impl Accesses {
    /// No accesses so far, for a launch that may access these buffers.
    pub fn new(buffers: Vec<Range<usize>>) -> Self {
        let pages =
            Pages { places: HashMap::new(), recent: [(usize::MAX, 0); 64], pages: Vec::new() };
        Self { buffers, pages: Mutex::new(pages) }
    }

    /// Records an access.
    ///
    /// # Errors
    /// The conflict with an access of another block.
    pub fn see(
        &self,
        block: u32,
        kind: AccessKind,
        address: usize,
        bytes: usize,
    ) -> Result<(), Conflict> {
        let at = self.buffers.partition_point(|range| range.end <= address);
        if bytes == 0 || self.buffers.get(at).is_none_or(|range| address < range.start) {
            return Ok(());
        }
        let mut pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        let (block, end) = (block + 1, address + bytes);
        for word in address / WORD..end.div_ceil(WORD) {
            let (from, to) = (address.max(word * WORD) % WORD, (end - word * WORD).min(WORD));
            let mask = (1u8 << to) - (1u8 << from);
            let seen = &mut pages.of(word / PAGE_WORDS)[word % PAGE_WORDS];
            for other_kind in AccessKind::ALL.into_iter().filter(|&other| kind.conflicts(other)) {
                if let Some(other_block) = seen[other_kind as usize].by_another(block, mask) {
                    return Err(Conflict {
                        address: word * WORD + from,
                        kind,
                        other_block,
                        other_kind,
                    });
                }
            }
            seen[kind as usize].add(block, mask);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::AccessKind::{Atomic, Read, Write};
    use super::*;

    fn accesses() -> Accesses {
        Accesses::new(vec![0x1000..0x3000, 0x9000..0x9100])
    }

    #[test]
    fn blocks_may_read_or_update_the_same_bytes_and_store_none_that_another_touches() {
        for (first, second, may) in [
            (Read, Read, true),
            (Atomic, Atomic, true),
            (Read, Write, false),
            (Write, Read, false),
            (Write, Write, false),
            (Write, Atomic, false),
            (Atomic, Write, false),
            (Atomic, Read, false),
            (Read, Atomic, false),
        ] {
            let seen = accesses();
            assert_eq!(seen.see(3, first, 0x1ffe, 4), Ok(()));
            assert_eq!(seen.see(3, second, 0x1ffe, 4), Ok(()), "a block has an order");
            let found = seen.see(4, second, 0x2001, 1);
            let conflict =
                Conflict { address: 0x2001, kind: second, other_block: 3, other_kind: first };
            // The error names whichever of the first block's two accesses is found first.
            match found {
                Ok(()) => assert!(may, "{first:?} {second:?}"),
                Err(found) => assert!(
                    !may && Conflict { other_kind: first, ..found } == conflict,
                    "{found:?}"
                ),
            }
        }
    }

    #[test]
    fn neighbouring_bytes_are_apart_and_what_is_no_buffer_is_nobodys_business() {
        let seen = accesses();
        assert_eq!(seen.see(0, Write, 0x1000, 2), Ok(()));
        assert_eq!(seen.see(1, Write, 0x1002, 18), Ok(()));
        assert_eq!(seen.see(0, Write, 0x1000, 2), Ok(()));
        assert!(seen.see(1, Write, 0x1001, 1).is_err() && seen.see(0, Read, 0x1013, 4).is_err());
        for address in [0x0fff, 0x3000, 0x8fff, 0x9100] {
            assert_eq!(
                (0..2).map(|block| seen.see(block, Write, address, 1)).collect::<Vec<_>>(),
                [Ok(()); 2]
            );
        }
        assert!(seen.see(0, Write, 0x90ff, 1).is_ok() && seen.see(1, Write, 0x90ff, 1).is_err());
    }

    #[test]
    fn a_reader_is_found_behind_its_own_blocks_reads() {
        let seen = accesses();
        (0..3).for_each(|block| assert_eq!(seen.see(block, Read, 0x1000, 4), Ok(())));
        assert_eq!(seen.see(0, Write, 0x1000, 4).map_err(|conflict| conflict.other_block), Err(1));
    }
}
