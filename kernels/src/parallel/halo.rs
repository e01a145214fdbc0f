//! Halos of a contiguous partition: rows of earlier ranks that a rank's first tokens read (training
//! 10).

use std::ops::Range;

use super::partition::Shards;
use dsv4_runtime::{Result, RuntimeError};

/// Which rows of earlier ranks each rank reads. A halo ends where a sequence starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Halos {
    /// The tokens of each rank.
    own: Vec<Range<usize>>,
    /// The tokens before them that it reads.
    halos: Vec<Range<usize>>,
    /// The sequence of each token.
    sequences: Vec<Range<usize>>,
}

impl Halos {
    /// The halos of `reach` tokens of a contiguous partition of packed sequences of these lengths.
    ///
    /// # Errors
    /// A partition whose ranks do not have consecutive tokens; lengths of other tokens.
    pub fn new(shards: &Shards, lengths: &[usize], reach: usize) -> Result<Self> {
        let first = |own: &Range<usize>, sequence: &Range<usize>| {
            own.start.saturating_sub(reach).max(sequence.start)
        };
        Self::from_first("Halos::new", shards, lengths, first)
    }

    /// The halos from the token on that `first` says, of a rank's tokens and of the sequence of the
    /// first one of them. It is one of that sequence, and no later one than the rank's.
    pub(super) fn from_first(
        caller: &'static str,
        shards: &Shards,
        lengths: &[usize],
        first: impl Fn(&Range<usize>, &Range<usize>) -> usize,
    ) -> Result<Self> {
        let refused = |argument, reason| Err(RuntimeError::argument(caller, argument, reason));
        let sequences: Vec<Range<usize>> = sequences(lengths)
            .flat_map(|sequence| std::iter::repeat_n(sequence.clone(), sequence.len()))
            .collect();
        let (mut own, mut next) = (Vec::new(), 0);
        for rank in 0..shards.ranks() {
            let tokens = shards.tokens(rank);
            let from = next as i32;
            if !tokens.iter().copied().eq(from..from + tokens.len() as i32) {
                return refused(
                    "shards",
                    format!("rank {rank} has other tokens than those from {next} on"),
                );
            }
            own.push(next..next + tokens.len());
            next += tokens.len();
        }
        if next != sequences.len() {
            return refused(
                "lengths",
                format!("{} tokens, and ranks have {next}", sequences.len()),
            );
        }
        let halo = |own: &Range<usize>| match sequences.get(own.start) {
            Some(sequence) if !own.is_empty() => first(own, sequence)..own.start,
            _ => own.start..own.start,
        };
        let halos = own.iter().map(halo).collect();
        Ok(Self { own, halos, sequences })
    }

    /// Whether these are the halos of a world of `size` ranks.
    ///
    /// # Errors
    /// They are those of another number of ranks.
    pub(super) fn check(&self, caller: &'static str, size: usize) -> Result<()> {
        if self.own.len() == size {
            return Ok(());
        }
        let reason = format!("of {} ranks, and the world has {size}", self.own.len());
        Err(RuntimeError::argument(caller, "partition", reason))
    }

    /// The tokens of a rank.
    pub fn own(&self, rank: usize) -> Range<usize> {
        self.own[rank].clone()
    }

    /// The tokens before them that it reads.
    pub fn halo(&self, rank: usize) -> Range<usize> {
        self.halos[rank].clone()
    }

    /// Where the sequences of a rank's tokens start, counted from the first token of its halo,
    /// ascending: 0 for one that starts before it.
    pub(super) fn starts(&self, rank: usize) -> Vec<i32> {
        let first = self.halos[rank].start;
        let (mut token, end) = (self.own[rank].start, self.own[rank].end);
        let mut starts = Vec::new();
        while token < end {
            let sequence = &self.sequences[token];
            starts.push(sequence.start.saturating_sub(first) as i32);
            token = sequence.end;
        }
        starts
    }

    /// The ranks that have a rank's halo, ascending, and which tokens of it.
    pub fn receives(&self, rank: usize) -> Vec<(usize, Range<usize>)> {
        let owners = self.own.iter().enumerate();
        let parts = owners.map(|(owner, own)| (owner, common(own, &self.halos[rank])));
        parts.filter(|(_, part)| !part.is_empty()).collect()
    }

    /// The ranks whose halo has tokens of a rank, ascending, and which.
    pub fn sends(&self, rank: usize) -> Vec<(usize, Range<usize>)> {
        let readers = self.halos.iter().enumerate();
        let parts = readers.map(|(reader, halo)| (reader, common(&self.own[rank], halo)));
        parts.filter(|(_, part)| !part.is_empty()).collect()
    }
}

/// The tokens of each of several packed sequences.
pub(super) fn sequences(lengths: &[usize]) -> impl Iterator<Item = Range<usize>> + '_ {
    lengths.iter().scan(0, |end, &length| {
        let start = *end;
        *end += length;
        Some(start..*end)
    })
}

fn common(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.max(b.start)..a.end.min(b.end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parallel::Partition;

    fn halos(ranks: usize, lengths: &[usize], reach: usize) -> Halos {
        let shards = Shards::new(Partition::Contiguous, ranks, lengths).expect("a partition");
        Halos::new(&shards, lengths, reach).expect("halos")
    }

    #[test]
    fn a_halo_has_as_many_tokens_as_are_read_and_ends_where_a_sequence_starts() {
        let one = halos(3, &[12], 3);
        assert_eq!([one.halo(0), one.halo(1), one.halo(2)], [0..0, 1..4, 5..8]);
        assert_eq!(one.receives(2), [(1, 5..8)]);
        assert_eq!((one.sends(0), one.sends(2)), (vec![(1, 1..4)], vec![]));
        let packed = halos(3, &[3, 9], 3);
        assert_eq!([packed.halo(1), packed.halo(2)], [3..4, 5..8]);
        assert_eq!(halos(2, &[6, 6], 5).halo(1), 6..6);
        assert_eq!((one.starts(0), one.starts(2)), (vec![0], vec![0]));
        // Rank 1 has a sequence's last tokens, and a whole one after an empty one.
        let several = halos(2, &[7, 0, 3, 2], 3);
        assert_eq!((several.starts(0), several.starts(1)), (vec![0], vec![0, 4, 7]));
    }

    #[test]
    fn a_halo_longer_than_a_shard_comes_from_several_ranks() {
        let long = halos(4, &[8], 5);
        assert_eq!(long.receives(3), [(0, 1..2), (1, 2..4), (2, 4..6)]);
        assert_eq!(long.sends(0), [(1, 0..2), (2, 0..2), (3, 1..2)]);
        // The last ranks have no token, and so no halo.
        let few = halos(4, &[2], 5);
        assert_eq!((few.receives(2), few.receives(1)), (vec![], vec![(0, 0..1)]));
    }

    #[test]
    fn other_partitions_and_other_lengths_are_refused() {
        let zigzag = Shards::new(Partition::Zigzag, 2, &[8]).expect("a partition");
        let error = Halos::new(&zigzag, &[8], 3).unwrap_err().to_string();
        assert!(error.contains("rank 0 has other tokens"), "{error}");
        let shards = Shards::new(Partition::Contiguous, 2, &[8]).expect("a partition");
        assert!(Halos::new(&shards, &[7], 3).is_err());
        let error = halos(2, &[8], 3).check("cp_window", 3).unwrap_err().to_string();
        assert!(error.contains("of 2 ranks, and the world has 3"), "{error}");
        assert!(halos(2, &[8], 3).check("cp_window", 2).is_ok());
    }
}
