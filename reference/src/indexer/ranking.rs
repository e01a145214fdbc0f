//! The keys that a token ranks (training 1, 2 and 5).
//!
//! Every token t ranks some keys of its sequence. *Selected*: slot j of a list names a key; it is
//! valid when `j < clamp(topk_length[t], 0, topk)` and the key belongs to the sequence. *Causal*:
//! slot j is key j of the sequence; it is valid when
//!
//! ```text
//! j < lim(t) = clamp(floor((q_off + t + 1) / ratio), 0, keys)          t counted within the sequence
//! ```
//!
//! In this case the last of the tokens that key j covers, `j * ratio + ratio - 1`, is not after t.

use crate::error::{Error, Result, wrong_value};

/// The keys that a token ranks.
#[derive(Debug, Clone)]
pub enum Ranking {
    /// A list for each token.
    Selected {
        /// `[num_tokens, topk]` in row-major order. Any value.
        indices: Vec<i32>,
        /// Slots per token; may be 0.
        topk: usize,
        /// `[num_tokens]`: leading slots that count. Any value; clamped to `0 ..= topk`.
        topk_length: Option<Vec<i32>>,
        /// Whether indices are rows of `k`; otherwise they count from the sequence's first key.
        global: bool,
    },
    /// All keys of the sequence up to a causal limit.
    Causal {
        /// Tokens that one key covers, at least 1.
        ratio: usize,
        /// `[num_sequences]`: position of each sequence's first query. Any value.
        q_off: Option<Vec<i32>>,
        /// Columns of a row; keys beyond are skipped.
        columns: usize,
    },
}

/// Packed sequences: sequence b has the tokens `cu_q[b] .. cu_q[b + 1]` and the keys `cu_k[b] ..
/// cu_k[b + 1]`.
#[derive(Debug, Clone)]
pub struct Sequences {
    /// `[num_sequences + 1]`, starting at 0, non-decreasing, at most `num_tokens`. Tokens after the
    /// last sequence rank nothing.
    pub cu_q: Vec<i32>,
    /// The same for the keys.
    pub cu_k: Vec<i32>,
}

impl Ranking {
    /// Slots, or columns, of a row.
    pub fn slots(&self) -> usize {
        match self {
            Self::Selected { topk, .. } => *topk,
            Self::Causal { columns, .. } => *columns,
        }
    }
}

/// A ranking with the sequences and the number of keys that it refers to.
#[derive(Debug, Clone, Copy)]
pub struct RankedKeys<'a> {
    /// The keys that a token ranks.
    pub ranking: &'a Ranking,
    /// `None` is one sequence of all tokens and keys.
    pub sequences: Option<&'a Sequences>,
    /// Keys of all sequences.
    pub num_keys: usize,
}

impl RankedKeys<'_> {
    /// Checks lists and ends for this many tokens.
    ///
    /// # Errors
    /// The list whose length does not match, or ends that decrease or exceed the tensor.
    pub fn check(&self, num_tokens: usize) -> Result<()> {
        let num_sequences = self.check_sequences(num_tokens)?;
        self.check_lists(num_tokens, num_sequences)
    }

    fn check_sequences(&self, num_tokens: usize) -> Result<usize> {
        let Some(Sequences { cu_q, cu_k }) = self.sequences else { return Ok(1) };
        for (argument, ends, total) in [("cu_q", cu_q, num_tokens), ("cu_k", cu_k, self.num_keys)] {
            let rises = ends.windows(2).all(|pair| pair[0] <= pair[1]);
            let fits = ends
                .last()
                .is_some_and(|&last| usize::try_from(last).is_ok_and(|last| last <= total));
            if ends.first() != Some(&0) || !rises || !fits {
                let rule = "it must start at 0, not fall, and end within the tensor";
                return Err(wrong_value(argument, format!("{ends:?}"), rule));
            }
        }
        require_length("cu_k", cu_k.len(), cu_q.len())?;
        Ok(cu_q.len() - 1)
    }

    fn check_lists(&self, num_tokens: usize, num_sequences: usize) -> Result<()> {
        match self.ranking {
            Ranking::Selected { indices, topk, topk_length, .. } => {
                if num_tokens.checked_mul(*topk) != Some(indices.len()) {
                    return Err(Error::Shape {
                        argument: "indices",
                        expected: format!("[{num_tokens}, {topk}]"),
                        actual: vec![indices.len()],
                    });
                }
                topk_length
                    .as_ref()
                    .map_or(Ok(()), |list| require_length("topk_length", list.len(), num_tokens))
            }
            Ranking::Causal { ratio: 0, .. } => {
                Err(wrong_value("ratio", 0, "a key covers at least one token"))
            }
            Ranking::Causal { q_off, .. } => q_off
                .as_ref()
                .map_or(Ok(()), |list| require_length("q_off", list.len(), num_sequences)),
        }
    }

    /// Sequence of a token, with its first token and its keys; `None` after the last sequence.
    fn sequence(&self, token: usize) -> Option<Sequence> {
        let Some(Sequences { cu_q, cu_k }) = self.sequences else {
            return Some(Sequence {
                number: 0,
                first_token: 0,
                first_key: 0,
                num_keys: self.num_keys as i64,
            });
        };
        let number =
            (0..cu_q.len() - 1).find(|&b| (cu_q[b]..cu_q[b + 1]).contains(&(token as i32)))?;
        let (first_key, last_key) = (i64::from(cu_k[number]), i64::from(cu_k[number + 1]));
        Some(Sequence {
            number,
            first_token: i64::from(cu_q[number]),
            first_key,
            num_keys: last_key - first_key,
        })
    }

    /// The key row of each slot of a token; `None` where the slot is invalid.
    pub fn rows(&self, token: usize) -> Vec<Option<i64>> {
        let mut rows = vec![None; self.ranking.slots()];
        let Some(sequence) = self.sequence(token) else { return rows };
        match self.ranking {
            Ranking::Selected { indices, topk, topk_length, global } => {
                let length = match topk_length {
                    Some(lengths) => usize::try_from(lengths[token]).unwrap_or(0),
                    None => *topk,
                };
                let list = &indices[token * topk..][..*topk];
                for (row, &index) in rows.iter_mut().zip(list).take(length) {
                    let local = i64::from(index) - if *global { sequence.first_key } else { 0 };
                    *row = (0 <= local && local < sequence.num_keys)
                        .then_some(sequence.first_key + local);
                }
            }
            Ranking::Causal { ratio, q_off, .. } => {
                let offset = q_off.as_ref().map_or(0, |q_off| i64::from(q_off[sequence.number]));
                let covered = offset + token as i64 - sequence.first_token + 1;
                let limit = covered.div_euclid(*ratio as i64).clamp(0, sequence.num_keys);
                for (row, key) in rows.iter_mut().zip(0..limit) {
                    *row = Some(sequence.first_key + key);
                }
            }
        }
        rows
    }
}

struct Sequence {
    number: usize,
    first_token: i64,
    first_key: i64,
    num_keys: i64,
}

fn require_length(argument: &'static str, actual: usize, expected: usize) -> Result<()> {
    if actual == expected {
        return Ok(());
    }
    Err(Error::Shape { argument, expected: format!("[{expected}]"), actual: vec![actual] })
}
