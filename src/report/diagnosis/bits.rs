//! Sets of cases.

/// A subset of that many cases.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Bits {
    words: Vec<u64>,
    length: usize,
}

impl Bits {
    /// The items for which this is true.
    pub(super) fn of<T>(items: &[T], holds: impl Fn(&T) -> bool) -> Self {
        let mut words = vec![0; items.len().div_ceil(64)];
        for (at, _) in items.iter().enumerate().filter(|(_, item)| holds(item)) {
            words[at / 64] |= 1 << (at % 64);
        }
        Self { words, length: items.len() }
    }

    /// All of that many.
    pub(super) fn full(length: usize) -> Self {
        Self::of(&vec![(); length], |()| true)
    }

    /// How many.
    pub(super) fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Whether this one is in it.
    pub(super) fn has(&self, at: usize) -> bool {
        self.words[at / 64] >> (at % 64) & 1 == 1
    }

    /// Whether it is not empty.
    pub(super) fn any(&self) -> bool {
        self.words.iter().any(|word| *word != 0)
    }

    /// Whether it is all of them.
    pub(super) fn all(&self) -> bool {
        self.count() == self.length as u64
    }

    /// Those in both.
    pub(super) fn and(&self, other: &Self) -> Self {
        Self {
            words: self.words.iter().zip(&other.words).map(|(a, b)| a & b).collect(),
            length: self.length,
        }
    }

    /// How many are in both.
    pub(super) fn common(&self, other: &Self) -> u64 {
        self.words.iter().zip(&other.words).map(|(a, b)| u64::from((a & b).count_ones())).sum()
    }

    /// The others.
    pub(super) fn not(&self) -> Self {
        let mut words: Vec<u64> = self.words.iter().map(|word| !word).collect();
        if let (Some(last), true) = (words.last_mut(), !self.length.is_multiple_of(64)) {
            *last &= (1 << (self.length % 64)) - 1;
        }
        Self { words, length: self.length }
    }
}
