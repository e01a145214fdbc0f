//! Which keys a query scores, by its place among the tokens of all ranks (training 1, 10).

use dsv4_runtime::{Result, RuntimeError};

/// Packed sequences of all ranks together.
#[derive(Clone, Copy, Debug)]
pub struct Sequences<'a> {
    /// `[num_sequences + 1]`: the first token of each sequence, and the end of the last one.
    pub cu_q: &'a [i32],
    /// `[num_sequences + 1]`: the same of its keys.
    pub cu_k: &'a [i32],
    /// `[num_sequences]`: the position of each sequence's first token; absent where it is 0.
    pub q_off: Option<&'a [i32]>,
}

impl Sequences<'_> {
    fn check(&self) -> Result<()> {
        let Self { cu_q, cu_k, q_off } = *self;
        let refused = |argument, reason| Err(RuntimeError::argument("ranges", argument, reason));
        for (name, ends) in [("cu_q", cu_q), ("cu_k", cu_k)] {
            if ends.first() != Some(&0) || !ends.is_sorted() {
                return refused(name, format!("{ends:?} must start at 0 and not decrease"));
            }
        }
        let sequences = cu_q.len() - 1;
        if cu_k.len() != cu_q.len() {
            return refused("cu_k", format!("{} ends of {sequences} sequences", cu_k.len()));
        }
        match q_off {
            Some(offsets) if offsets.len() != sequences => {
                refused("q_off", format!("{} offsets of {sequences} sequences", offsets.len()))
            }
            _ => Ok(()),
        }
    }
}

/// `ks` and `ke` of the tokens at these places of the batch: each scores the keys of its sequence
/// whose `ratio` tokens are none after it. A token of no sequence scores none.
///
/// # Errors
/// Ends that do not start at 0, or decrease; ends or offsets of other sequences; a ratio of 0.
pub fn ranges(tokens: &[i32], sequences: Sequences<'_>, ratio: usize) -> Result<[Vec<i32>; 2]> {
    sequences.check()?;
    let Sequences { cu_q, cu_k, q_off } = sequences;
    let Some(ratio) = i64::try_from(ratio).ok().filter(|&ratio| ratio > 0) else {
        let reason = format!("{ratio} must be at least 1");
        return Err(RuntimeError::argument("ranges", "ratio", reason));
    };
    let range = |&token: &i32| {
        let after = cu_q.partition_point(|&start| start <= token);
        if after == 0 || after == cu_q.len() {
            return (0, 0);
        }
        let number = after - 1;
        let offset = q_off.map_or(0, |offsets| i64::from(offsets[number]));
        let seen = (offset + i64::from(token - cu_q[number]) + 1).div_euclid(ratio);
        let (first, keys) = (cu_k[number], cu_k[after] - cu_k[number]);
        (first, first + seen.clamp(0, i64::from(keys)) as i32)
    };
    let (ks, ke) = tokens.iter().map(range).unzip();
    Ok([ks, ke])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_scores_the_keys_of_its_sequence_that_end_at_it_or_before() {
        let (cu_q, cu_k) = ([0, 4, 10], [0, 3, 9]);
        let packed = Sequences { cu_q: &cu_q, cu_k: &cu_k, q_off: Some(&[1, 2]) };
        let tokens: Vec<i32> = (0..11).collect();
        let [ks, ke] = ranges(&tokens, packed, 2).expect("ranges");
        assert_eq!(ks, [0, 0, 0, 0, 3, 3, 3, 3, 3, 3, 0]);
        assert_eq!(ke, [1, 1, 2, 2, 4, 5, 5, 6, 6, 7, 0]);
        // Any part of the tokens has the same ranges.
        assert_eq!(ranges(&[7, 2, 10], packed, 2).expect("ranges"), [[3, 0, 0], [6, 2, 0]]);
        let before = Sequences { q_off: Some(&[-9, 100]), ..packed };
        assert_eq!(ranges(&[0, 5], before, 4).expect("ranges"), [[0, 3], [0, 9]]);
        let empty = Sequences { cu_q: &[0, 0, 3, 3], cu_k: &[0, 2, 4, 9], q_off: None };
        assert_eq!(ranges(&[0, 2, 3], empty, 1).expect("ranges"), [[2, 2, 0], [3, 4, 0]]);
    }

    #[test]
    fn sequences_that_do_not_fit_are_refused() {
        let packed = Sequences { cu_q: &[0, 4], cu_k: &[0, 3], q_off: None };
        let said = |sequences, ratio| ranges(&[0], sequences, ratio).unwrap_err().to_string();
        assert!(said(packed, 0).contains("argument `ratio`"));
        assert!(said(Sequences { cu_q: &[], ..packed }, 1).contains("argument `cu_q`"));
        assert!(said(Sequences { cu_q: &[0, 4, 2], ..packed }, 1).contains("argument `cu_q`"));
        assert!(said(Sequences { cu_k: &[0], ..packed }, 1).contains("argument `cu_k`"));
        let offsets = Sequences { q_off: Some(&[1, 2]), ..packed };
        assert!(said(offsets, 1).contains("argument `q_off`"));
    }
}
