//! Numbers that are free to take.

use std::ops::Range;

/// Free numbers below a limit. Those that were never taken need no memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FreeList {
    returned: Vec<usize>,
    unused: Range<usize>,
}

impl FreeList {
    pub fn below(limit: usize) -> Self {
        Self { returned: Vec::new(), unused: 0..limit }
    }

    pub fn len(&self) -> usize {
        self.returned.len() + self.unused.len()
    }

    /// Takes the number that was returned last, or else the least one that was never taken.
    pub fn take(&mut self) -> Option<usize> {
        self.returned.pop().or_else(|| self.unused.next())
    }

    pub fn give_back(&mut self, number: usize) {
        self.returned.push(number);
    }
}
