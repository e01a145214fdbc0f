//! Collectives of a warp: which one its lanes arrive at.

/// The collective at which the lanes of a warp currently arrive. Nearly always the next lane
/// arrives at the same one; then it needs no look-up.
#[derive(Clone, Copy, Default)]
pub(super) struct Meeting {
    pub(super) mask: u32,
    pub(super) op: usize,
    pub(super) arrived: u32,
    /// Lanes of the warp that have returned.
    pub(super) exited: u32,
    /// When the first lane arrived, no lane of the mask waited elsewhere.
    pub(super) alone: bool,
}

impl Meeting {
    /// Whether an arrival of `lane` here is certainly valid: the others wait here or have not
    /// arrived yet.
    pub(super) fn expects(&self, lane: u32, mask: u32, op: usize) -> bool {
        let joins = self.arrived != 0 && (self.mask, self.op) == (mask, op) && self.alone;
        joins && mask & (1 << lane) != 0 && mask & self.exited == 0
    }

    /// Lane `lane` arrives; returns whether all have arrived.
    pub(super) fn arrive(&mut self, lane: u32) -> bool {
        self.arrived |= 1 << lane;
        self.arrived == self.mask
    }
}
