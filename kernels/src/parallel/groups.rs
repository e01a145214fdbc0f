//! Groups of tokens under a contiguous partition: which rank pools each, and what it reads of
//! earlier ranks (training 9, 10).

use std::ops::Range;

use super::halo::{Halos, sequences};
use super::partition::Shards;
use dsv4_runtime::{Result, RuntimeError};

/// The groups that each rank pools: those whose last token it has. Its halo has the tokens before
/// its own of the first one, and where groups overlap those of the group before that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Groups {
    halos: Halos,
    lengths: Vec<usize>,
    ratio: usize,
    overlaps: bool,
}

/// Whole sequences, or the rest of one, that a rank pools in one launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Its rows among those of the halo and the rank.
    pub tokens: Range<usize>,
    /// Its rows among the entries of all pieces.
    pub entries: Range<usize>,
    /// How many of its first entries are another rank's.
    pub skipped: usize,
    /// Where the first token is in its sequence: a multiple of the ratio, if there is an entry.
    pub position: usize,
    /// Ends of its sequences' tokens, and of their entries.
    pub ends: [Vec<i32>; 2],
}

impl Groups {
    /// The groups of `ratio` tokens of packed sequences of these lengths, and of a contiguous
    /// partition of them. Tokens after the last whole group of a sequence are in none.
    ///
    /// # Errors
    /// A ratio of 0; a partition whose ranks do not have consecutive tokens; lengths of other
    /// tokens.
    pub fn new(shards: &Shards, lengths: &[usize], ratio: usize, overlaps: bool) -> Result<Self> {
        const NAME: &str = "Groups::new";
        if ratio == 0 {
            let reason = "0: a group has at least one token";
            return Err(RuntimeError::argument(NAME, "ratio", reason));
        }
        let first = |own: &Range<usize>, sequence: &Range<usize>| {
            let group = own.start - (own.start - sequence.start) % ratio;
            let before = if overlaps && group > sequence.start { ratio } else { 0 };
            let is_whole = group + ratio <= sequence.end.min(own.end);
            if is_whole { group - before } else { own.start }
        };
        let halos = Halos::from_first(NAME, shards, lengths, first)?;
        Ok(Self { halos, lengths: lengths.to_vec(), ratio, overlaps })
    }

    /// What ranks read of earlier ones.
    pub fn halos(&self) -> &Halos {
        &self.halos
    }

    /// Tokens of a group.
    pub fn ratio(&self) -> usize {
        self.ratio
    }

    /// Whether an entry also covers the group before its own.
    pub fn overlaps(&self) -> bool {
        self.overlaps
    }

    /// The entries of a rank, among those of all sequences, sequence after sequence.
    pub fn entries(&self, rank: usize) -> Range<usize> {
        let own = self.halos.own(rank);
        let before = |token: usize| -> usize {
            let of = |sequence: Range<usize>| {
                (token.min(sequence.end).saturating_sub(sequence.start)) / self.ratio
            };
            sequences(&self.lengths).map(of).sum()
        };
        before(own.start)..before(own.end)
    }

    /// What a rank launches: the rest of a sequence that starts before its first row, and all
    /// others. At least one piece, so that a rank without tokens has gradients of parameters too.
    pub(super) fn pieces(&self, rank: usize) -> Vec<Piece> {
        let (own, from) = (self.halos.own(rank), self.halos.halo(rank).start);
        let (mut rest, mut whole) = (None, Piece::after(0, 0));
        for sequence in sequences(&self.lengths) {
            let part = sequence.start.max(from)..sequence.end.min(own.end);
            if part.is_empty() {
                continue;
            }
            // A halo has a whole group only where it is the one before the first that is pooled.
            let skipped = own.start.saturating_sub(part.start) / self.ratio;
            if part.start == sequence.start {
                whole.add(part.len(), self.ratio, skipped);
                continue;
            }
            let mut piece = Piece::after(0, 0);
            piece.add(part.len(), self.ratio, skipped);
            piece.position = part.start - sequence.start;
            whole = Piece::after(piece.tokens.end, piece.entries.end);
            rest = Some(piece);
        }
        let needed = rest.is_none() || whole.ends[0].len() > 1;
        rest.into_iter().chain(needed.then_some(whole)).collect()
    }
}

impl Piece {
    /// A piece without sequences, after others.
    fn after(token: usize, entry: usize) -> Self {
        Self {
            tokens: token..token,
            entries: entry..entry,
            skipped: 0,
            position: 0,
            ends: [vec![0], vec![0]],
        }
    }

    /// Adds a sequence, of whose entries the first `skipped` are another rank's.
    fn add(&mut self, tokens: usize, ratio: usize, skipped: usize) {
        self.skipped += skipped;
        self.tokens.end += tokens;
        self.entries.end += tokens / ratio;
        self.ends[0].push(self.tokens.len() as i32);
        self.ends[1].push(self.entries.len() as i32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parallel::Partition;

    fn groups(ranks: usize, lengths: &[usize], ratio: usize, overlaps: bool) -> Groups {
        let shards = Shards::new(Partition::Contiguous, ranks, lengths).expect("a partition");
        Groups::new(&shards, lengths, ratio, overlaps).expect("groups")
    }

    #[test]
    fn a_group_is_pooled_by_the_rank_of_its_last_token() {
        let cut = groups(3, &[15], 4, false);
        assert_eq!([cut.entries(0), cut.entries(1), cut.entries(2)], [0..1, 1..2, 2..3]);
        let halo = |groups: &Groups, rank| groups.halos().halo(rank);
        assert_eq!([halo(&cut, 1), halo(&cut, 2)], [4..5, 8..10]);
        // With overlap the group before the first one too, but none before the sequence.
        let overlapping = groups(3, &[15], 4, true);
        assert_eq!([halo(&overlapping, 1), halo(&overlapping, 2)], [0..5, 4..10]);
        assert_eq!(halo(&groups(2, &[12], 4, true), 1), 0..6);
        assert_eq!(halo(&groups(2, &[8], 4, true), 1), 0..4);
        assert_eq!(halo(&groups(2, &[8], 4, false), 1), 4..4);
        assert_eq!(halo(&groups(2, &[4, 4], 4, true), 1), 4..4);
        // A shard that ends before its first group does pools nothing, and reads nothing.
        let short = groups(4, &[8], 8, false);
        assert_eq!([halo(&short, 2), halo(&short, 3)], [4..4, 0..6]);
        assert_eq!([short.entries(2), short.entries(3)], [0..0, 0..1]);
    }

    #[test]
    fn pieces_have_each_entry_once_and_start_where_groups_do() {
        for lengths in [&[31][..], &[9, 0, 14, 8], &[3, 2, 5], &[1], &[0], &[8, 8, 8, 8]] {
            for (ratio, overlaps) in [(4, true), (4, false), (1, false), (7, false)] {
                for ranks in 1..=8 {
                    let groups = groups(ranks, lengths, ratio, overlaps);
                    let mut next = 0;
                    for rank in 0..ranks {
                        let (entries, pieces) = (groups.entries(rank), groups.pieces(rank));
                        let rows = groups.halos().halo(rank).len() + groups.halos().own(rank).len();
                        assert_eq!(entries.start, next);
                        next = entries.end;
                        assert_eq!(
                            pieces.iter().map(|piece| piece.tokens.len()).sum::<usize>(),
                            rows
                        );
                        let own = |piece: &Piece| piece.entries.len() - piece.skipped;
                        assert_eq!(pieces.iter().map(own).sum::<usize>(), entries.len());
                        for piece in &pieces {
                            let aligned = piece.position.is_multiple_of(ratio);
                            assert!(aligned || piece.entries.is_empty());
                        }
                    }
                    assert_eq!(next, lengths.iter().map(|length| length / ratio).sum::<usize>());
                }
            }
        }
    }

    #[test]
    fn a_group_without_tokens_is_refused() {
        let shards = Shards::new(Partition::Contiguous, 2, &[8]).expect("a partition");
        let error = Groups::new(&shards, &[8], 0, false).unwrap_err().to_string();
        assert!(error.contains("ratio") && error.contains("Groups::new"), "{error}");
        let zigzag = Shards::new(Partition::Zigzag, 2, &[8]).expect("a partition");
        assert!(Groups::new(&zigzag, &[8], 4, true).is_err());
    }
}
