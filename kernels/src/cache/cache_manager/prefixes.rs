//! Prefixes whose pages later sequences may find, and the order in which they are evicted.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

use super::{CacheError, Prefix};

/// The page that ends a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
struct CachedPage {
    page: usize,
    parent: Option<Prefix>,
    /// Pages of the prefix.
    depth: usize,
    /// Cached prefixes that continue it by one page.
    children: usize,
    /// Whether a sequence has the page in its table.
    held: bool,
    snapshot: Option<usize>,
    last_used: u64,
}

/// What is evicted first: the least recently used, and of those the longest. A longer prefix was
/// never used later than the prefix that it continues, so its page comes earlier.
type Age = (u64, Reverse<usize>, Prefix);

impl CachedPage {
    fn age(&self, prefix: Prefix) -> Age {
        (self.last_used, Reverse(self.depth), prefix)
    }
}

/// All cached prefixes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Prefixes {
    cached: HashMap<Prefix, CachedPage>,
    /// Prefixes that may be evicted now: no sequence holds them, and none continues them.
    leaves: BTreeSet<Age>,
    /// Last use and page of each prefix with a snapshot.
    snapshots: BTreeSet<(u64, usize, Prefix)>,
}

impl Prefixes {
    pub fn contains(&self, prefix: &Prefix) -> bool {
        self.cached.contains_key(prefix)
    }

    pub fn snapshot(&self, prefix: &Prefix) -> Option<usize> {
        self.cached.get(prefix)?.snapshot
    }

    /// The page of a prefix that is used at this time.
    pub fn used(&mut self, prefix: Prefix, clock: u64) -> Option<usize> {
        self.change(prefix, |cached| {
            cached.last_used = clock;
            cached.page
        })
    }

    /// Registers a page, which a sequence holds, as the end of a prefix. Where another page holds
    /// the same, that one is used. Returns whether the page was registered.
    pub fn remember(
        &mut self,
        prefix: Prefix,
        page: usize,
        parent: Option<(Prefix, usize)>,
        clock: u64,
    ) -> bool {
        if self.used(prefix, clock).is_some() {
            return false;
        }
        if let Some((parent, _)) = parent {
            self.change(parent, |cached| cached.children += 1);
        }
        let cached = CachedPage {
            page,
            parent: parent.map(|(parent, _)| parent),
            depth: parent.map_or(1, |(_, depth)| depth + 1),
            children: 0,
            held: true,
            snapshot: None,
            last_used: clock,
        };
        self.cached.insert(prefix, cached);
        true
    }

    /// A sequence holds the page of this prefix, or none does any longer.
    pub fn set_held(&mut self, prefix: Prefix, held: bool) {
        self.change(prefix, |cached| cached.held = held);
    }

    pub fn set_snapshot(&mut self, prefix: Prefix, snapshot: Option<usize>) {
        self.change(prefix, |cached| cached.snapshot = snapshot);
    }

    /// Takes the least recently used snapshot from its prefix.
    pub fn take_oldest_snapshot(&mut self) -> Option<usize> {
        let (_, _, prefix) = *self.snapshots.first()?;
        self.change(prefix, |cached| cached.snapshot.take()).flatten()
    }

    /// How many prefixes have a snapshot.
    #[cfg(test)]
    pub fn num_snapshots(&self) -> usize {
        self.snapshots.len()
    }

    /// How many prefixes no sequence holds, directly or through a longer prefix.
    pub fn evictable(&self) -> usize {
        self.oldest(usize::MAX).len()
    }

    /// The prefixes to evict for this many pages, in order, where `free` pages are free.
    ///
    /// # Errors
    /// [`CacheError::OutOfPages`].
    pub fn to_evict(&self, needed: usize, free: usize) -> Result<Vec<Prefix>, CacheError> {
        let wanted = needed.saturating_sub(free);
        let oldest = self.oldest(wanted);
        if oldest.len() < wanted {
            return Err(CacheError::OutOfPages { needed, available: free + oldest.len() });
        }
        Ok(oldest)
    }

    /// Up to `most` prefixes in the order of their eviction. A prefix joins once no prefix
    /// continues it.
    fn oldest(&self, most: usize) -> Vec<Prefix> {
        let mut leaves = self.leaves.iter().copied().peekable();
        let (mut joined, mut fewer) = (BTreeSet::new(), HashMap::new());
        let mut oldest = Vec::new();
        while oldest.len() < most {
            let from_joined = match (leaves.peek(), joined.first()) {
                (Some(leaf), Some(parent)) => parent < leaf,
                (None, None) => break,
                (leaf, _) => leaf.is_none(),
            };
            let next = if from_joined { joined.pop_first() } else { leaves.next() };
            let Some((_, _, prefix)) = next else { break };
            oldest.push(prefix);
            let Some(parent) = self.cached[&prefix].parent else { continue };
            let Some(cached) = self.cached.get(&parent) else { continue };
            let evicted = fewer.entry(parent).or_insert(0);
            *evicted += 1;
            if *evicted == cached.children && !cached.held {
                joined.insert(cached.age(parent));
            }
        }
        oldest
    }

    /// Removes a prefix that none continues, and returns its page and its snapshot.
    pub fn forget(&mut self, prefix: Prefix) -> Option<(usize, Option<usize>)> {
        self.unlist(prefix);
        let cached = self.cached.remove(&prefix)?;
        if let Some(parent) = cached.parent {
            self.change(parent, |parent| parent.children -= 1);
        }
        Some((cached.page, cached.snapshot))
    }

    /// Changes an entry, and keeps the orders in step.
    fn change<T>(
        &mut self,
        prefix: Prefix,
        change: impl FnOnce(&mut CachedPage) -> T,
    ) -> Option<T> {
        self.unlist(prefix);
        let cached = self.cached.get_mut(&prefix)?;
        let result = change(cached);
        if !cached.held && cached.children == 0 {
            self.leaves.insert(cached.age(prefix));
        }
        if cached.snapshot.is_some() {
            self.snapshots.insert((cached.last_used, cached.page, prefix));
        }
        Some(result)
    }

    fn unlist(&mut self, prefix: Prefix) {
        if let Some(cached) = self.cached.get(&prefix) {
            self.leaves.remove(&cached.age(prefix));
            self.snapshots.remove(&(cached.last_used, cached.page, prefix));
        }
    }
}
