//! The last accesses of each word of memory, against which a later access is held.
//!
//! A word of 4 bytes has its last store, and the loads and atomic updates since. A word that is
//! accessed in parts has a record for each byte.

use std::collections::HashMap;

use super::clock::Clock;
use crate::emulator::accesses::AccessKind;

/// The bit of a component that is still in flight: no component knows it, not even its thread's own.
pub const IN_FLIGHT: u32 = 1 << 31;

/// Bytes of a word.
const WORD: usize = 4;
/// Words of a page.
const PAGE_WORDS: usize = 64;
/// Pages whose places are remembered by their remainders.
const RECENT: usize = 512;
/// Components of a group: readers of one group and one epoch share a record.
const GROUP: u32 = 32;

/// Who accesses, and what happened before it.
#[derive(Clone, Copy)]
pub struct View<'a> {
    /// The accessing component.
    pub me: u32,
    /// Its present epoch.
    pub epoch: u32,
    /// What it knows of the others.
    pub known: &'a Clock,
}

impl View<'_> {
    /// Whether this epoch of this component is over for the viewer.
    fn follows(&self, component: u32, epoch: u32) -> bool {
        component == self.me || (component < IN_FLIGHT && self.known.epoch(component) >= epoch)
    }
}

/// One access: who, in which epoch, and where in the module's code. Epoch 0 is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Touch {
    /// Component, which may be [`IN_FLIGHT`].
    pub who: u32,
    /// Its epoch.
    pub epoch: u32,
    /// Offset in the module, 0 if unknown.
    pub place: u32,
}

/// An access that has no order with a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Earlier {
    /// The access.
    pub touch: Touch,
    /// What it did.
    pub kind: AccessKind,
}

/// Loads, or atomic updates, of components of one group in one epoch.
#[derive(Clone, Copy, Default)]
struct Readers {
    group: u32,
    /// Which of the group: bits.
    members: u32,
    epoch: u32,
    place: u32,
}

impl Readers {
    fn of(view: View<'_>, place: u32) -> Self {
        let (group, member) = (view.me / GROUP, view.me % GROUP);
        Self { group, members: 1 << member, epoch: view.epoch, place }
    }

    /// The first member that has no order with the viewer.
    fn unordered(&self, view: View<'_>) -> Option<Touch> {
        let mut members = self.members;
        if self.group == view.me / GROUP {
            members &= !(1 << (view.me % GROUP));
        }
        while members != 0 {
            let who = self.group * GROUP + members.trailing_zeros();
            if !view.follows(who, self.epoch) {
                return Some(Touch { who, epoch: self.epoch, place: self.place });
            }
            members &= members - 1;
        }
        None
    }

    /// Takes another in, if one record can hold both, or if this one is over for the viewer.
    fn take(&mut self, new: Self, view: View<'_>) -> bool {
        if self.group == new.group && self.epoch == new.epoch {
            self.members |= new.members;
            return true;
        }
        if self.unordered(view).is_none() {
            *self = new;
            return true;
        }
        false
    }
}

/// The record of one word, or of one byte.
#[derive(Clone, Copy, Default)]
struct Cell {
    write: Touch,
    /// Loads since; without members, none.
    read: Readers,
    /// One more than the index of other loads and of atomic updates; 0 for none.
    others: u32,
    /// One more than the index of the records of its bytes; 0 for none.
    bytes: u32,
}

/// Loads and updates of one cell beyond its first.
type Others = Vec<(AccessKind, Readers)>;

/// What cells point to.
#[derive(Default)]
struct Lists {
    others: Vec<Others>,
    /// Indices that no cell uses.
    free: Vec<u32>,
}

impl Lists {
    fn of(&mut self, cell: &mut Cell) -> &mut Others {
        if cell.others == 0 {
            cell.others = self.free.pop().unwrap_or_else(|| {
                self.others.push(Vec::new());
                self.others.len() as u32
            });
        }
        &mut self.others[cell.others as usize - 1]
    }

    fn release(&mut self, cell: &mut Cell) {
        if cell.others != 0 {
            self.others[cell.others as usize - 1].clear();
            self.free.push(cell.others);
            cell.others = 0;
        }
    }

    /// An access of the cell that has no order with this one and conflicts with it.
    fn conflict(&self, cell: &Cell, kind: AccessKind, view: View<'_>) -> Option<Earlier> {
        if cell.write.epoch != 0 && !view.follows(cell.write.who, cell.write.epoch) {
            return Some(Earlier { touch: cell.write, kind: AccessKind::Write });
        }
        if kind != AccessKind::Read
            && let Some(touch) = cell.read.unordered(view)
        {
            return Some(Earlier { touch, kind: AccessKind::Read });
        }
        let others = self.others.get((cell.others as usize).wrapping_sub(1))?;
        others
            .iter()
            .filter(|(other, _)| kind.conflicts(*other))
            .find_map(|(kind, readers)| Some((kind, readers.unordered(view)?)))
            .map(|(&kind, touch)| Earlier { touch, kind })
    }

    /// Records the access.
    fn record(&mut self, cell: &mut Cell, kind: AccessKind, view: View<'_>, place: u32) {
        let new = Readers::of(view, place);
        match kind {
            AccessKind::Write => {
                cell.write = Touch { who: view.me, epoch: view.epoch, place };
                cell.read.members = 0;
                self.release(cell);
            }
            AccessKind::Read if cell.read.members == 0 => cell.read = new,
            AccessKind::Read if cell.read.take(new, view) => {}
            _ => {
                let others = self.of(cell);
                let taken = others
                    .iter_mut()
                    .any(|(other, readers)| *other == kind && readers.take(new, view));
                if !taken {
                    others.push((kind, new));
                }
            }
        }
    }

    fn access(
        &mut self,
        cell: &mut Cell,
        kind: AccessKind,
        view: View<'_>,
        place: u32,
    ) -> Option<Earlier> {
        let Readers { group, members, epoch, .. } = cell.read;
        let seen = group == view.me / GROUP && epoch == view.epoch;
        if kind == AccessKind::Read && seen && members & 1 << (view.me % GROUP) != 0 {
            return None;
        }
        let conflict = self.conflict(cell, kind, view);
        self.record(cell, kind, view, place);
        conflict
    }
}

/// A record of all memory that the threads of a cluster accessed.
pub struct Shadow {
    places: HashMap<usize, u32>,
    /// For each remainder of a page number the page used last, and its index.
    recent: Vec<(usize, u32)>,
    pages: Vec<[Cell; PAGE_WORDS]>,
    parts: Vec<[Cell; WORD]>,
    lists: Lists,
}

impl Default for Shadow {
    fn default() -> Self {
        Self {
            places: HashMap::new(),
            recent: vec![(usize::MAX, 0); RECENT],
            pages: Vec::new(),
            parts: Vec::new(),
            lists: Lists::default(),
        }
    }
}

impl Shadow {
    /// The index of a page, which is made if it is new.
    fn page(&mut self, number: usize) -> usize {
        let slot = &mut self.recent[number % RECENT];
        if slot.0 != number {
            let next = self.pages.len() as u32;
            let place = *self.places.entry(number).or_insert(next);
            if place == next {
                self.pages.push([Cell::default(); PAGE_WORDS]);
            }
            *slot = (number, place);
        }
        slot.1 as usize
    }

    /// Calls `visit` for the records of these bytes: those of whole words, and of single bytes
    /// where only a part of a word is meant or was accessed before.
    fn visit(
        &mut self,
        address: usize,
        bytes: usize,
        mut visit: impl FnMut(&mut Lists, &mut Cell, usize),
    ) {
        let end = address + bytes;
        for word in address / WORD..end.div_ceil(WORD) {
            let (from, to) = (address.max(word * WORD) % WORD, (end - word * WORD).min(WORD));
            let page = self.page(word / PAGE_WORDS);
            let cell = &mut self.pages[page][word % PAGE_WORDS];
            let whole = to - from == WORD;
            if whole && cell.bytes == 0 {
                visit(&mut self.lists, cell, word * WORD);
                continue;
            }
            if cell.bytes == 0 {
                // Lists are of one cell each; a word with such a list is rarely split.
                let others = self.lists.others.get((cell.others as usize).wrapping_sub(1)).cloned();
                let part = Cell { others: 0, ..*cell };
                let mut parts = [part; WORD];
                if let Some(others) = others {
                    parts.iter_mut().for_each(|part| *self.lists.of(part) = others.clone());
                    self.lists.release(cell);
                }
                self.parts.push(parts);
                cell.bytes = self.parts.len() as u32;
            }
            let parts = &mut self.parts[cell.bytes as usize - 1];
            for (byte, part) in parts.iter_mut().enumerate().take(to).skip(from) {
                visit(&mut self.lists, part, word * WORD + byte);
            }
        }
    }

    /// Records an access; returns the first earlier one without an order, and its address.
    pub fn access(
        &mut self,
        address: usize,
        bytes: usize,
        kind: AccessKind,
        view: View<'_>,
        place: u32,
    ) -> Option<(usize, Earlier)> {
        let mut found = None;
        self.visit(address, bytes, |lists, cell, at| {
            if let Some(earlier) = lists.access(cell, kind, view, place) {
                found.get_or_insert((at, earlier));
            }
        });
        found
    }

    /// Whether some store of these bytes has no order with the viewer. Records nothing.
    pub fn unordered_store(
        &mut self,
        address: usize,
        bytes: usize,
        view: View<'_>,
    ) -> Option<(usize, Earlier)> {
        let mut found = None;
        self.visit(address, bytes, |lists, cell, at| {
            let conflict = lists.conflict(cell, AccessKind::Read, view);
            if let Some(earlier) = conflict.filter(|earlier| earlier.kind == AccessKind::Write) {
                found.get_or_insert((at, earlier));
            }
        });
        found
    }

    /// The store in flight `from` is over for whoever follows `to`.
    pub fn landed(&mut self, address: usize, bytes: usize, from: u32, to: (u32, u32)) {
        self.visit(address, bytes, |_, cell, _| {
            if cell.write.epoch != 0 && cell.write.who == from {
                (cell.write.who, cell.write.epoch) = to;
            }
        });
    }
}
