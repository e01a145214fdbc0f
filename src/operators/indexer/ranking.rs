//! The keys that the tokens of a case rank (training 1, 2 and 5). These are lists of selected keys,
//! or all keys up to a causal limit. Shared by the operators of the indexer's training.

use dsv4_reference::indexer::ranking as reference;
use rand::Rng;

use crate::operator::declaration::TensorSpec;
use crate::operator::prelude::*;
use crate::operators::lists::{self, IndexClass, Lengths};

/// Which keys a token ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RankingClass {
    /// A list of selected keys: the sparse forms.
    Selected,
    /// All keys up to a causal limit: the dense forms.
    Causal,
}

/// How tokens and keys are divided into sequences, if not by the case's fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arrangement {
    /// By the case's fields.
    #[default]
    AsDrawn,
    /// Everything is in the second of two sequences; the first is empty. A law's variant, which no
    /// JSON line can select.
    Whole,
    /// Each token is a separate sequence, all with the same number of keys. A benchmark's sample,
    /// which no JSON line can select.
    Apart,
}

/// Sizes, lists, limits and sequences: fields that are flattened into cases.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankedKeys {
    /// Queries of all sequences; 0 is allowed.
    pub num_tokens: usize,
    /// Keys of all sequences; 0 is allowed.
    pub num_keys: usize,
    /// Which keys a token ranks.
    pub ranking: RankingClass,
    /// Slots of a list; 0 is allowed. Of `selected`.
    pub topk: usize,
    /// What the lists look like. Of `selected`.
    pub indices: IndexClass,
    /// How many slots count. Of `selected`.
    pub lengths: Lengths,
    /// Whether indices are rows of all keys, or count from the sequence's first. Of `selected`.
    pub global: bool,
    /// Tokens that a key covers. Of `causal`.
    pub ratio: usize,
    /// Whether the sequences' first queries have positions other than 0. Of `causal`.
    pub q_off: bool,
    /// Packed sequences ([`draw_sequences`]), some without tokens or keys, followed by extra tokens
    /// and keys. Otherwise one sequence.
    pub packed: bool,
    /// Keys of the longest sequence that a row has no column for. Of `causal` and `packed`.
    pub left_out: usize,
    /// How tokens and keys are divided, if not by the case's fields.
    #[serde(skip)]
    pub(crate) arrangement: Arrangement,
    /// Seed of the data.
    pub seed: u64,
}

impl RankedKeys {
    /// Lists of `topk` slots.
    pub(crate) fn selected(num_tokens: usize, num_keys: usize, topk: usize) -> Self {
        Self {
            num_tokens,
            num_keys,
            ranking: RankingClass::Selected,
            topk,
            indices: IndexClass::Hostile,
            lengths: Lengths::Absent,
            global: false,
            ratio: 1,
            q_off: false,
            packed: false,
            left_out: 0,
            arrangement: Arrangement::AsDrawn,
            seed: 1,
        }
    }

    /// A causal limit.
    pub(crate) fn causal(num_tokens: usize, num_keys: usize, ratio: usize) -> Self {
        Self {
            ranking: RankingClass::Causal,
            ratio,
            q_off: true,
            ..Self::selected(num_tokens, num_keys, 0)
        }
    }

    /// Draws a case with at most that many tokens, keys and slots of a list.
    pub(crate) fn strategy([tokens, keys, slots]: [usize; 3]) -> BoxedStrategy<Self> {
        let lists = (IndexClass::strategy(), Lengths::strategy(), any::<bool>());
        let causal = (
            select(vec![1usize, 4, 128, 3]),
            prop_oneof![3 => Just(true), 1 => Just(false)],
            left_out(),
        );
        let extents = (
            1..=tokens,
            crate::operator::fields::extent(keys, 16),
            crate::operator::fields::extent(slots, 64),
        );
        (extents, any::<bool>(), lists, causal, any::<bool>(), 0..1000u64)
            .prop_map(
                |(
                    (num_tokens, num_keys, topk),
                    is_selected,
                    lists,
                    (ratio, q_off, left_out),
                    packed,
                    seed,
                )| {
                    let (indices, lengths, global) = lists;
                    let drawn = match is_selected {
                        true => Self {
                            indices,
                            lengths,
                            global,
                            ..Self::selected(num_tokens, num_keys, topk)
                        },
                        false => {
                            let left_out = if packed { left_out } else { 0 };
                            Self { q_off, left_out, ..Self::causal(num_tokens, num_keys, ratio) }
                        }
                    };
                    Self { packed, seed, ..drawn }
                },
            )
            .boxed()
    }

    /// Checks that the fields fit together.
    pub(crate) fn check(&self) -> Result<(), Refused> {
        if self.ranking == RankingClass::Causal && self.topk > 0 {
            return refuse("topk", format!("{}: a causal ranking has no lists", self.topk));
        }
        if self.left_out > 0 && (self.is_selected() || !self.packed) {
            let reason =
                "rows of lists have slots, and those of one sequence a column for every key";
            return refuse("left_out", format!("{}: {reason}", self.left_out));
        }
        if self.ratio == 0 || i32::try_from(self.ratio).is_err() {
            return refuse("ratio", format!("{} must be at least 1 and fit 32 bits", self.ratio));
        }
        Ok(())
    }

    /// The number of lists and of slots in each.
    pub(crate) fn lists(&self) -> [usize; 2] {
        [self.num_tokens, self.topk]
    }

    pub(crate) fn is_selected(&self) -> bool {
        self.ranking == RankingClass::Selected
    }

    /// Slots of a row: those of a list, or columns.
    pub(crate) fn slots(&self) -> usize {
        if self.is_selected() { self.topk } else { self.columns() }
    }

    /// The axis of a row's slots: `topk` or `columns`.
    pub(crate) fn slot_axis(&self) -> &'static str {
        if self.is_selected() { "topk" } else { "columns" }
    }

    pub(crate) fn sequences(&self) -> Option<reference::Sequences> {
        let (tokens, keys) = (self.num_tokens as i32, self.num_keys as i32);
        match self.arrangement {
            Arrangement::Apart => {
                let ends = |length: i32| (0..=tokens).map(|end| end * length).collect();
                Some(reference::Sequences { cu_q: ends(1), cu_k: ends(keys / tokens.max(1)) })
            }
            Arrangement::Whole => {
                Some(reference::Sequences { cu_q: vec![0, 0, tokens], cu_k: vec![0, 0, keys] })
            }
            Arrangement::AsDrawn => {
                self.packed.then(|| draw_sequences(self.seed, self.num_tokens, self.num_keys))
            }
        }
    }

    /// Columns of a dense form: the longest sequence's keys, without the skipped ones.
    pub(crate) fn columns(&self) -> usize {
        let longest = match self.sequences() {
            None => self.num_keys,
            Some(s) => {
                s.cu_k.windows(2).map(|ends| (ends[1] - ends[0]) as usize).max().unwrap_or(0)
            }
        };
        longest.saturating_sub(self.left_out)
    }

    /// The tensors that determine which keys are ranked.
    pub(crate) fn tensors(&self) -> [TensorSpec; 5] {
        let (tokens, topk) = (axis("num_tokens", self.num_tokens), axis("topk", self.topk));
        let ends = self.sequences().map_or(0, |s| s.cu_q.len());
        let (packed, selected) = (ends > 0, self.is_selected());
        let ends = [axis("num_sequences_and_one", ends)];
        let sequences = axis("num_sequences", if packed { ends[0].extent - 1 } else { 1 });
        [
            input("indices", DType::I32, &[tokens, topk]).rows().when(selected),
            input("topk_length", DType::I32, &[tokens])
                .when(selected && self.lengths != Lengths::Absent),
            input("q_off", DType::I32, &[sequences]).when(!selected && self.q_off),
            input("cu_q", DType::I32, &ends).when(packed),
            input("cu_k", DType::I32, &ends).when(packed),
        ]
    }

    /// Sets the tensors of [`Self::tensors`].
    pub(crate) fn amend(&self, tensors: &mut Tensors) {
        if self.is_selected() {
            let lists =
                self.indices.draw(self.seed, "indices", self.num_tokens, self.topk, self.num_keys);
            tensors.set_i32s("indices", &lists);
            if let Some(lengths) =
                self.lengths.draw(self.seed, "topk_length", self.num_tokens, self.topk)
            {
                tensors.set_i32s("topk_length", &lengths);
            }
        }
        let sequences = self.sequences();
        if let Some(offsets) = tensors
            .get("q_off")
            .map(|_| draw_offsets(self.seed, self.ratio, self.num_keys, sequences.as_ref()))
        {
            tensors.set_i32s("q_off", &offsets);
        }
        if let Some(reference::Sequences { cu_q, cu_k }) = &sequences {
            tensors.set_i32s("cu_q", cu_q);
            tensors.set_i32s("cu_k", cu_k);
        }
        self.name_own_sequences_keys(tensors);
    }

    /// The oracle's ranking, from the tensors that were set.
    pub(crate) fn reference(&self, host: &Tensors) -> reference::Ranking {
        if self.is_selected() {
            let (indices, topk_length) = (host.i32s("indices"), host.maybe_i32s("topk_length"));
            return reference::Ranking::Selected {
                indices,
                topk: self.topk,
                topk_length,
                global: self.global,
            };
        }
        reference::Ranking::Causal {
            ratio: self.ratio,
            q_off: host.maybe_i32s("q_off"),
            columns: self.columns(),
        }
    }

    /// The keys that a token ranks, from the definition: every key is tested.
    pub(crate) fn ranked_keys(&self, tensors: &Tensors, token: usize) -> Vec<usize> {
        let sequences = self.sequences();
        let Some(sequence) = sequence(sequences.as_ref().map(|s| &s.cu_q[..]), token) else {
            return Vec::new();
        };
        let (first_token, first, last) = match &sequences {
            None => (0, 0, self.num_keys),
            Some(s) => (
                s.cu_q[sequence] as usize,
                s.cu_k[sequence] as usize,
                s.cu_k[sequence + 1] as usize,
            ),
        };
        let length = lists::within_lengths(tensors, "topk_length", self.lists())[token];
        let indices = tensors.maybe_i32s("indices").unwrap_or_default();
        let named = |key: usize| {
            let name = if self.global { key } else { key - first } as i32;
            indices[token * self.topk..][..length].contains(&name)
        };
        let offset = tensors.maybe_i32s("q_off").map_or(0, |offsets| i64::from(offsets[sequence]));
        let position = offset + (token - first_token) as i64;
        // The last token that a key covers must not be after this one.
        let columns = self.columns();
        let visible = |key: usize| {
            key - first < columns && ((key - first + 1) * self.ratio) as i64 - 1 <= position
        };
        (first..last)
            .filter(|&key| if self.is_selected() { named(key) } else { visible(key) })
            .collect()
    }

    /// Sets everything that no valid slot uses to NaN: queries `q` of that many values each, keys
    /// `k`, upstream gradients `dlogits`.
    pub(crate) fn poison_unreferenced(
        &self,
        tensors: &mut Tensors,
        query_width: usize,
        key_width: usize,
    ) {
        let (ranking, sequences) = (self.reference(tensors), self.sequences());
        let ranked = reference::RankedKeys {
            ranking: &ranking,
            sequences: sequences.as_ref(),
            num_keys: self.num_keys,
        };
        let rows: Vec<Option<i64>> =
            (0..self.num_tokens).flat_map(|token| ranked.rows(token)).collect();
        let mut referenced = vec![false; self.num_keys];
        rows.iter().flatten().for_each(|&row| referenced[row as usize] = true);
        tensors.edit("dlogits", |all| {
            all.iter_mut()
                .zip(&rows)
                .filter(|(_, row)| row.is_none())
                .for_each(|(x, _)| *x = f64::NAN);
        });
        let rows = rows.chunks(self.slots().max(1));
        tensors.edit("q", |all| {
            let idle = all
                .chunks_mut(query_width)
                .zip(rows)
                .filter(|(_, rows)| rows.iter().all(Option::is_none));
            idle.for_each(|(token, _)| token.fill(f64::NAN));
        });
        tensors.edit("k", |all| {
            let unnamed = all.chunks_mut(key_width).zip(&referenced).filter(|(_, named)| !**named);
            unnamed.for_each(|(row, _)| row.fill(f64::NAN));
        });
    }

    /// In packed sequences most slots reference a key of their own sequence. One in four keeps its
    /// index, a key of another sequence.
    fn name_own_sequences_keys(&self, tensors: &mut Tensors) {
        let Some(reference::Sequences { cu_q, cu_k }) = self.sequences() else { return };
        let mut draw = Draw::new(self.seed, "foreign");
        tensors.edit_i32s("indices", |indices| {
            for token in 0..self.num_tokens {
                let Some(sequence) = sequence(Some(&cu_q), token) else { continue };
                let (first, count) = (cu_k[sequence], cu_k[sequence + 1] - cu_k[sequence]);
                for index in &mut indices[token * self.topk..][..self.topk] {
                    let foreign = draw.rng().random_ratio(1, 4);
                    if !foreign && count > 0 && (0..self.num_keys as i32).contains(index) {
                        *index = *index % count + if self.global { first } else { 0 };
                    }
                }
            }
        });
    }
}

/// The tokens of a case in other batches: by rows where each has its list, in chunks where a causal
/// limit follows from its position.
pub(crate) fn batches<K: Operator>(
    c: &RankedKeys,
    batches: &mut Batches<'_, K>,
    keys: fn(&mut K::Case) -> &mut RankedKeys,
) {
    if c.packed {
        return batches.skip(BatchAxis::Company, "its sequences are packed");
    }
    if c.is_selected() {
        return batches.rows("num_tokens");
    }
    let first = batches.tensors().maybe_i32s("q_off").map_or(0, |offsets| offsets[0]);
    batches.chunks("num_tokens", |v, from, tokens| {
        let keys = keys(&mut v.case);
        (keys.num_tokens, keys.q_off) = (tokens, true);
        v.tensors.put("q_off", HostTensor::from_i32(&[1], &[first + from as i32]));
    });
}

/// For packed sequences that start before the first key and end after the last one: kernels must
/// not read keys that do not exist.
pub(crate) fn ends_law<K: Operator>(
    laws: &mut Laws<'_, K>,
    num_keys: usize,
    relations: impl IntoIterator<Item = (&'static str, Relation)>,
) {
    let beyond = |v: &mut Variant<K>| {
        v.tensors.edit_i32s("cu_k", |ends| {
            // Ends of the sequences behind the last one with keys, too.
            let all = ends.iter_mut().filter(|end| **end == num_keys as i32);
            all.for_each(|end| *end += 9);
            if let Some(first) = ends.first_mut().filter(|first| **first == 0) {
                *first = -5;
            }
        });
    };
    laws.law("ends beyond the keys are those of the keys", beyond, relations);
}

/// The number of keys without a column: mostly 0.
pub(crate) fn left_out() -> impl Strategy<Value = usize> {
    prop_oneof![2 => Just(0usize), 1 => 1..=60usize]
}

/// Of odd seeds five sequences, of which the second has no token and the fourth no key. Of even ones
/// one to nine, and keys after the last one, as where a buffer is longer than a batch needs; of every
/// second even one the lists are longer, too: two empty sequences stand at their end. In two of three
/// cases a token belongs to no sequence.
pub(crate) fn draw_sequences(
    seed: u64,
    num_tokens: usize,
    num_keys: usize,
) -> reference::Sequences {
    let mut draw = Draw::new(seed, "sequences");
    let count = if seed % 2 == 1 { 5 } else { 1 + draw.rng().random_range(0..9) };
    let padded = seed % 4 == 2;
    let mut ends = |total: usize, empty: usize| {
        let inner = (1..count).map(|_| draw.rng().random_range(0..=total as i32));
        let mut ends: Vec<i32> = inner.collect();
        ends.sort_unstable();
        ends.insert(0, 0);
        ends.push(total as i32);
        if empty + 1 < count {
            ends[empty + 1] = ends[empty];
        }
        if padded {
            ends.extend([total as i32; 2]);
        }
        ends
    };
    let unowned = usize::from(!seed.is_multiple_of(3));
    let cu_q = ends(num_tokens.saturating_sub(unowned), 1);
    let unowned = if seed.is_multiple_of(2) { num_keys / 5 } else { 0 };
    reference::Sequences { cu_q, cu_k: ends(num_keys - unowned, 3) }
}

/// Positions of the sequences' first queries: from before a sequence's first key to after its
/// last.
pub(crate) fn draw_offsets(
    seed: u64,
    ratio: usize,
    num_keys: usize,
    sequences: Option<&reference::Sequences>,
) -> Vec<i32> {
    let mut draw = Draw::new(seed, "q_off");
    let ratio = ratio as i32;
    let lengths = match sequences {
        None => vec![num_keys as i32],
        Some(sequences) => sequences.cu_k.windows(2).map(|ends| ends[1] - ends[0]).collect(),
    };
    lengths
        .into_iter()
        .map(|keys| draw.rng().random_range(-ratio..=ratio.saturating_mul(keys)))
        .collect()
}

/// The sequence of a token, if it belongs to one.
fn sequence(cu_q: Option<&[i32]>, token: usize) -> Option<usize> {
    let Some(cu_q) = cu_q else { return Some(0) };
    cu_q.windows(2).position(|ends| (ends[0]..ends[1]).contains(&(token as i32)))
}
