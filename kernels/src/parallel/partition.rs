//! Which rank has which tokens, and where a gathered row is (training 10).

use dsv4_runtime::{Result, RuntimeError};

/// The position of a row that has no token.
pub const PADDING: i32 = -1;

/// How the tokens of packed sequences are divided among ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Partition {
    /// Rank `r` has the `r`-th part of all tokens, whatever sequence they are of.
    Contiguous,
    /// Rank `r` has the `r`-th and the `r`-th last of `2 · ranks` parts of every sequence, so that
    /// causal work is even. A sequence counts as long as the next multiple of `2 · ranks`.
    Zigzag,
}

/// The tokens of each rank. A position is a token's place among all tokens of the batch, sequence
/// after sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shards {
    /// For each rank the positions of its tokens, ascending within each sequence.
    tokens: Vec<Vec<i32>>,
    /// Rows of each rank's gathered tensors: the tokens of the rank that has most of them.
    rows: usize,
}

impl Shards {
    /// Divides packed sequences of these lengths among `ranks` ranks.
    ///
    /// # Errors
    /// No rank; more tokens than 32 bits count.
    pub fn new(partition: Partition, ranks: usize, lengths: &[usize]) -> Result<Self> {
        let refused =
            |argument, reason| Err(RuntimeError::argument("Shards::new", argument, reason));
        if ranks == 0 {
            return refused("ranks", "0: there must be at least one".into());
        }
        let total = lengths.iter().try_fold(0usize, |sum, &length| sum.checked_add(length));
        let Some(total) = total.and_then(|total| i32::try_from(total).ok()) else {
            return refused("lengths", format!("{lengths:?} are more tokens than 32 bits count"));
        };
        let mut tokens = vec![Vec::new(); ranks];
        match partition {
            Partition::Contiguous => {
                let part = (total as usize).div_ceil(ranks).max(1);
                (0..total).for_each(|token| tokens[token as usize / part].push(token));
            }
            Partition::Zigzag => {
                let mut start = 0;
                for &length in lengths {
                    let part = length.div_ceil(2 * ranks).max(1);
                    for token in 0..length {
                        let chunk = token / part;
                        let rank = if chunk < ranks { chunk } else { 2 * ranks - 1 - chunk };
                        tokens[rank].push((start + token) as i32);
                    }
                    start += length;
                }
            }
        }
        let rows = tokens.iter().map(Vec::len).max().unwrap_or(0);
        Ok(Self { tokens, rows })
    }

    /// The positions of a rank's tokens.
    pub fn tokens(&self, rank: usize) -> &[i32] {
        &self.tokens[rank]
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.tokens.len()
    }

    /// Rows of each rank's gathered tensors.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The positions of all [`Self::rows`] rows of a rank: padding follows its tokens.
    pub fn positions(&self, rank: usize) -> Vec<i32> {
        let mut positions = self.tokens[rank].clone();
        positions.resize(self.rows, PADDING);
        positions
    }
}

/// For each of `num_keys` positions the gathered row that has it: the inverse of `positions`, which
/// may have padding.
///
/// # Errors
/// The position that no row has, that two rows have, or that is beyond all keys.
pub fn slots(positions: &[i32], num_keys: usize) -> Result<Vec<i32>> {
    let refused = |reason| Err(RuntimeError::argument("slots", "positions", reason));
    let mut slots = vec![PADDING; num_keys];
    for (row, &position) in positions.iter().enumerate().filter(|(_, at)| **at != PADDING) {
        let slot = usize::try_from(position).ok().and_then(|position| slots.get_mut(position));
        match slot {
            Some(slot) if *slot == PADDING => *slot = row as i32,
            Some(slot) => {
                return refused(format!("rows {slot} and {row} both have position {position}"));
            }
            None => {
                let reason = format!("row {row} has position {position} of {num_keys} keys");
                return refused(reason);
            }
        }
    }
    match slots.iter().position(|&slot| slot == PADDING) {
        Some(missing) => refused(format!("no row has position {missing} of {num_keys} keys")),
        None => Ok(slots),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shards(partition: Partition, ranks: usize, lengths: &[usize]) -> Shards {
        Shards::new(partition, ranks, lengths).expect("a partition")
    }

    #[test]
    fn zigzag_gives_a_rank_a_chunk_from_each_end_of_every_sequence() {
        let two = shards(Partition::Zigzag, 2, &[8, 4]);
        assert_eq!(two.positions(0), [0, 1, 6, 7, 8, 11]);
        assert_eq!(two.positions(1), [2, 3, 4, 5, 9, 10]);
        // By the formula of training 10.
        let (ranks, chunk) = (3, 5);
        let three = shards(Partition::Zigzag, ranks, &[2 * ranks * chunk]);
        let all: Vec<i32> = (0..ranks).flat_map(|rank| three.positions(rank)).collect();
        let slots = slots(&all, all.len()).expect("a permutation");
        for (position, &slot) in slots.iter().enumerate() {
            let part = position / chunk;
            let rank = if part < ranks { part } else { 2 * ranks - 1 - part };
            let back = if part < ranks { 0 } else { chunk };
            assert_eq!(slot as usize, rank * 2 * chunk + back + position % chunk);
        }
    }

    #[test]
    fn every_token_has_one_rank_and_padding_follows_a_ranks_tokens() {
        for partition in [Partition::Contiguous, Partition::Zigzag] {
            for ranks in 1..=8 {
                for lengths in [&[][..], &[0], &[1], &[7], &[3, 0, 17], &[2, 2, 2, 2, 1]] {
                    let of = shards(partition, ranks, lengths);
                    let total: usize = lengths.iter().sum();
                    let all: Vec<i32> = (0..ranks).flat_map(|rank| of.positions(rank)).collect();
                    assert_eq!(all.len(), ranks * of.rows());
                    assert!(slots(&all, total).is_ok(), "{partition:?} {ranks} {lengths:?}");
                    for rank in 0..ranks {
                        let padding = &of.positions(rank)[of.tokens(rank).len()..];
                        assert!(padding.iter().all(|&position| position == PADDING));
                        assert!(of.tokens(rank).is_sorted());
                    }
                }
            }
        }
        assert_eq!(shards(Partition::Contiguous, 3, &[4]).positions(2), [PADDING; 2]);
        assert!(Shards::new(Partition::Zigzag, 0, &[1]).is_err());
        assert!(Shards::new(Partition::Zigzag, 2, &[usize::MAX, 2]).is_err());
    }

    #[test]
    fn positions_that_are_no_permutation_are_refused_with_the_row() {
        let error = |positions: &[i32], keys| slots(positions, keys).unwrap_err().to_string();
        assert!(error(&[0, 1, 1], 3).contains("rows 1 and 2 both have position 1"));
        assert!(error(&[0, 3, 1], 3).contains("row 1 has position 3 of 3"));
        assert!(error(&[0, -2, 1], 2).contains("row 1 has position -2"));
        assert!(error(&[0, PADDING, 2], 3).contains("no row has position 1"));
        assert_eq!(slots(&[1, PADDING, 0], 2).unwrap(), [2, 0]);
    }
}
