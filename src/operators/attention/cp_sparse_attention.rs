//! `cp_sparse_attention` (training 10): sparse attention of several ranks, each with some of the
//! tokens, against the oracle of one device.

use std::marker::PhantomData;

use dsv4_kernels::parallel::attention as launcher;

use crate::operator::fields::Implementation;
use crate::operator::prelude::*;
use crate::operators::attention::of_ranks::Parallel;
use crate::operators::attention::sinks::Sinks;
use crate::operators::attention::sparse_attention::{
    self, KeyGradients, SparseAttention, SparseAttentionCase, Values,
};
use crate::operators::lists::{IndexClass, Lengths};
use crate::operators::ranks::{self, Division, NoTaps, Partition, Parts, Ranks, Taps, integers};

/// The operator. The registry's entry has no taps, and no case can select any.
pub struct CpSparseAttention<T: Taps = NoTaps>(PhantomData<fn() -> T>);

/// How lists, which name keys by position, find gathered rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Keys {
    /// Gathered rows are brought into the order of positions.
    Reordered,
    /// Lists are mapped to gathered rows.
    Remapped,
}

/// A case: ranks, and the attention of all tokens. A token sees keys of its own sequence up to its
/// own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpSparseAttentionCase {
    /// Ranks: 1 to 8.
    pub ranks: usize,
    /// How tokens are divided among them.
    pub partition: Partition,
    /// How lists find gathered rows.
    pub keys: Keys,
    /// Packed sequences: 1 to `num_tokens`. Some may have no token.
    pub num_sequences: usize,
    /// Delays ranks before and after collectives, unless 0.
    pub delay_seed: u64,
    /// Tokens of all ranks, queries and keys; 0 is allowed.
    pub num_tokens: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Width of q and k: a multiple of 16 up to 576.
    pub head_dim: usize,
    /// Where the values come from.
    pub values: Values,
    /// Width of the values: a multiple of 16 up to 512.
    pub v_dim: usize,
    /// Slots of a list; 0 is allowed.
    pub topk: usize,
    /// What the lists look like, before they are held to causality.
    pub indices: IndexClass,
    /// How many slots count.
    pub lengths: Lengths,
    /// The sinks.
    pub sinks: Sinks,
    /// Multiplies q·k.
    pub softmax_scale: f32,
    /// Standard deviation of the logits.
    pub logit_deviation: f64,
    /// Type of dk and dv.
    pub key_gradient: Float,
    /// Whether lse has its own upstream gradient.
    pub dlse: bool,
    /// Which kernels run.
    pub implementation: Implementation,
    /// How each rank sums dk and dv.
    pub key_gradients: KeyGradients,
    /// Seed of the data.
    pub seed: u64,
}

impl CpSparseAttentionCase {
    fn plain(
        ranks: usize,
        num_tokens: usize,
        num_heads: usize,
        head_dim: usize,
        topk: usize,
    ) -> Self {
        Self {
            ranks,
            partition: Partition::Zigzag,
            keys: Keys::Remapped,
            num_sequences: 1,
            delay_seed: 0,
            num_tokens,
            num_heads,
            head_dim,
            values: Values::Shared,
            v_dim: head_dim,
            topk,
            indices: IndexClass::Hostile,
            lengths: Lengths::Absent,
            sinks: Sinks::Normal,
            softmax_scale: (head_dim as f32).sqrt().recip(),
            logit_deviation: 2.0,
            key_gradient: Float::Bf16,
            dlse: false,
            implementation: Implementation::Portable,
            key_gradients: KeyGradients::Deterministic,
            seed: 1,
        }
    }

    /// The attention of one device.
    fn attention(&self) -> SparseAttentionCase {
        SparseAttentionCase {
            values: self.values,
            v_dim: self.v_dim,
            indices: self.indices,
            lengths: self.lengths,
            sinks: self.sinks,
            softmax_scale: self.softmax_scale,
            logit_deviation: self.logit_deviation,
            key_gradient: self.key_gradient,
            dlse: self.dlse,
            implementation: self.implementation,
            key_gradients: self.key_gradients,
            seed: self.seed,
            ..SparseAttentionCase::plain(
                self.num_tokens,
                self.num_heads,
                self.head_dim,
                self.num_tokens,
                self.topk,
            )
        }
    }

    fn division(&self) -> Division {
        Division {
            ranks: self.ranks,
            partition: self.partition,
            lengths: ranks::lengths(self.seed, self.num_sequences, self.num_tokens),
            delay_seed: self.delay_seed,
        }
    }

    /// What the launcher of a rank receives in addition to its tensors.
    fn options(&self, v: &Views, backward: bool) -> Result<launcher::Options, RuntimeError> {
        let attended = v.only(&["q", "k", "v", "sink", "indices", "topk_length"]);
        let attention = self.attention();
        // The Hopper backward has one geometry less than the forward.
        let implementation = match backward && self.head_dim != 512 {
            true => Implementation::Portable,
            false => self.implementation,
        };
        Ok(launcher::Options {
            attention: dsv4_kernels::attention::sparse_attention::Options {
                implementation: implementation.launcher(),
                ..attention.options(&attended)?
            },
            num_keys: self.num_tokens,
            keys: match self.keys {
                Keys::Reordered => launcher::Keys::Reordered,
                Keys::Remapped => launcher::Keys::Remapped,
            },
        })
    }

    /// Holds lists to causality: an index of a key becomes one of the token's own sequence, up to
    /// the token. Others stay what they are.
    fn causal(&self, lists: &mut [i32]) {
        let mut start = 0;
        for length in self.division().lengths {
            for token in start..start + length {
                for index in &mut lists[token * self.topk..(token + 1) * self.topk] {
                    if (0..self.num_tokens as i32).contains(index) {
                        *index = (start + *index as usize % (token - start + 1)) as i32;
                    }
                }
            }
            start += length;
        }
    }
}

/// Collectives and kernels of rows, as records name them.
const OF_RANKS: [&str; 6] = [
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "gathered_slots",
    "gathered_lists",
    "gathered_copy",
];

const PATHS: [&str; sparse_attention::PATHS.len() + OF_RANKS.len()] = {
    let (mut all, mut at) = ([""; sparse_attention::PATHS.len() + OF_RANKS.len()], 0);
    while at < all.len() {
        let attention = sparse_attention::PATHS.len();
        all[at] =
            if at < attention { sparse_attention::PATHS[at] } else { OF_RANKS[at - attention] };
        at += 1;
    }
    all
};

/// Bytes of the scratch memory of a rank.
fn workspace(c: &CpSparseAttentionCase, v: &Views) -> Result<usize, RuntimeError> {
    launcher::workspace_bytes(v, &c.options(v, false)?, c.ranks)
}

/// The tensors that a rank reads in both directions.
fn given(ranks: &Ranks<'_, '_>, v: &Views, rank: usize) -> Result<Parts, RuntimeError> {
    let mut parts = ranks.given_tokens(v, &["q", "indices", "topk_length"], rank)?;
    parts.extend(ranks.given(v, &["k", "v"], |keys| ranks.padded(&keys, rank))?);
    parts.extend(ranks.given_whole(v, &["sink"])?);
    parts.push(integers("positions", &ranks.shards().positions(rank)));
    Ok(parts)
}

impl<T: Taps> Operator for CpSparseAttention<T> {
    type Case = CpSparseAttentionCase;
    const SUM_LANES: usize = 4;

    const ABOUT: About = About {
        name: "cp_sparse_attention",
        family: Family::Attention,
        summary: "sparse_attention of several ranks: keys gathered, their gradients reduced and scattered",
        specification: &["training 3", "training 4", "training 10"],
        paths: &PATHS,
        modules: dsv4_kernels::parallel::modules,
        cases: [16, 40, 80],
    };

    const CHAIN: &'static [&'static str] = &["sparse_attention"];
    const RANKS: bool = true;

    fn tensors(c: &CpSparseAttentionCase) -> Specs {
        SparseAttention::tensors(&c.attention())
    }

    fn check(c: &CpSparseAttentionCase) -> Result<(), Refused> {
        ranks::check(c.ranks, c.num_sequences, c.num_tokens)?;
        SparseAttention::check(&c.attention())
    }

    fn oracle_elements(c: &CpSparseAttentionCase) -> u128 {
        // Each rank holds the rows of all.
        let rows = c.num_tokens as u128 * (c.head_dim + c.v_dim) as u128;
        SparseAttention::oracle_elements(&c.attention()) + rows * 4 * c.ranks as u128
    }

    fn strategy(profile: Profile) -> BoxedStrategy<CpSparseAttentionCase> {
        let keys = select(vec![Keys::Remapped, Keys::Reordered]);
        let tokens = profile.of([24usize, 40, 90]);
        (SparseAttention::strategy(profile), ranks::strategy(), keys, 1..=tokens)
            .prop_map(|(attention, (ranks, partition, sequences, delay_seed), keys, num_tokens)| {
                // Wide rows take the oracle most of its time.
                let num_tokens =
                    if attention.head_dim > 128 { num_tokens.min(9) } else { num_tokens };
                CpSparseAttentionCase {
                    partition,
                    keys,
                    num_sequences: sequences.min(num_tokens),
                    delay_seed,
                    values: attention.values,
                    v_dim: attention.v_dim,
                    indices: attention.indices,
                    lengths: attention.lengths,
                    sinks: attention.sinks,
                    softmax_scale: attention.softmax_scale,
                    logit_deviation: attention.logit_deviation,
                    key_gradient: attention.key_gradient,
                    dlse: attention.dlse,
                    implementation: attention.implementation,
                    key_gradients: attention.key_gradients,
                    seed: attention.seed,
                    ..CpSparseAttentionCase::plain(
                        ranks,
                        num_tokens,
                        attention.num_heads.min(20),
                        attention.head_dim,
                        attention.topk.min(80),
                    )
                }
            })
            .boxed()
    }

    fn typical() -> Vec<CpSparseAttentionCase> {
        let plain = CpSparseAttentionCase::plain;
        vec![
            CpSparseAttentionCase {
                num_sequences: 2,
                lengths: Lengths::Within,
                dlse: true,
                ..plain(2, 13, 5, 64, 21)
            },
            CpSparseAttentionCase {
                keys: Keys::Reordered,
                values: Values::Separate,
                v_dim: 32,
                delay_seed: 1,
                key_gradient: Float::F32,
                ..plain(3, 11, 4, 64, 18)
            },
            CpSparseAttentionCase {
                partition: Partition::Contiguous,
                key_gradients: KeyGradients::Atomic,
                ..plain(2, 9, 17, 64, 18)
            },
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<CpSparseAttentionCase> {
        let plain = CpSparseAttentionCase::plain;
        let contiguous = |case| CpSparseAttentionCase { partition: Partition::Contiguous, ..case };
        let reordered = |case| CpSparseAttentionCase { keys: Keys::Reordered, ..case };
        let atomic = |case| CpSparseAttentionCase { key_gradients: KeyGradients::Atomic, ..case };
        let hopper =
            |case| CpSparseAttentionCase { implementation: Implementation::Hopper, ..case };
        let separate = |case| CpSparseAttentionCase { values: Values::Separate, v_dim: 32, ..case };
        let mut cases = vec![
            plain(2, 0, 4, 64, 5),
            contiguous(reordered(plain(3, 0, 4, 64, 5))),
            plain(2, 7, 3, 64, 0),
            // Ranks without tokens, at the end and between others.
            contiguous(plain(4, 5, 5, 64, 9)),
            reordered(plain(8, 3, 5, 64, 9)),
            CpSparseAttentionCase { num_sequences: 4, ..plain(4, 9, 5, 64, 12) },
            // One rank: communication changes nothing.
            reordered(separate(plain(1, 9, 6, 64, 15))),
            // All shapes of collectives, with delays.
            CpSparseAttentionCase {
                delay_seed: 7,
                ..contiguous(separate(plain(3, 16, 4, 64, 20)))
            },
            CpSparseAttentionCase {
                delay_seed: 9,
                num_sequences: 3,
                lengths: Lengths::Hostile,
                sinks: Sinks::Extreme,
                dlse: true,
                ..reordered(plain(8, 40, 6, 64, 21))
            },
            CpSparseAttentionCase { sinks: Sinks::Absent, ..plain(2, 12, 6, 64, 70) },
            atomic(plain(2, 11, 4, 64, 9)),
            atomic(separate(plain(3, 12, 20, 64, 30))),
            CpSparseAttentionCase {
                values: Values::Prefix,
                v_dim: 48,
                ..contiguous(reordered(plain(2, 10, 20, 80, 30)))
            },
            hopper(plain(2, 6, 20, 512, 40)),
            atomic(hopper(reordered(plain(2, 6, 20, 512, 40)))),
        ];
        if profile == Profile::Full {
            cases.push(hopper(plain(2, 300, 64, 512, 512)));
            cases.push(hopper(contiguous(plain(4, 300, 64, 512, 512))));
        }
        cases
    }

    fn fastest(c: &CpSparseAttentionCase, environment: &Environment) -> CpSparseAttentionCase {
        let fastest = SparseAttention::fastest(&c.attention(), environment);
        CpSparseAttentionCase { implementation: fastest.implementation, ..c.clone() }
    }

    fn cannot_run(c: &CpSparseAttentionCase, environment: &Environment) -> Option<String> {
        SparseAttention::cannot_run(&c.attention(), environment)
    }

    fn amend(c: &CpSparseAttentionCase, tensors: &mut Tensors) -> OracleResult<()> {
        let attention = SparseAttentionCase { poison_unreferenced: false, ..c.attention() };
        SparseAttention::amend(&attention, tensors)?;
        tensors.edit_i32s("indices", |lists| c.causal(lists));
        sparse_attention::poison_unreferenced(&attention, tensors);
        Ok(())
    }

    fn forward(
        c: &CpSparseAttentionCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        SparseAttention::forward(&c.attention(), t, rounding)
    }

    fn backward(
        c: &CpSparseAttentionCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        SparseAttention::backward(&c.attention(), t, rounding)
    }

    fn backward_of_saved(
        c: &CpSparseAttentionCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        SparseAttention::backward_of_saved(&c.attention(), t, rounding)
    }

    fn launch(
        c: &CpSparseAttentionCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        let mut ranks = Ranks::of(c.division(), run)?;
        Parallel {
            given: &|ranks, rank| given(ranks, v, rank),
            workspace: &|_, v, _| workspace(c, v),
            launch: &|device, v, tap| launcher::forward(device, v, &c.options(v, false)?, tap),
        }
        .forward::<T>(&mut ranks, v)
    }

    fn launch_backward(
        c: &CpSparseAttentionCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        let mut ranks = Ranks::of(c.division(), run)?;
        Parallel {
            given: &|ranks, rank| given(ranks, v, rank),
            workspace: &|_, v, _| workspace(c, v),
            launch: &|device, v, tap| launcher::backward(device, v, &c.options(v, true)?, tap),
        }
        .backward::<T>(&mut ranks, v, |ranks, _| ranks.shards().rows())
    }

    /// The rows of a case have no other batches: they are a batch's tokens, and see one another.
    fn batches(_: &CpSparseAttentionCase, _: &mut Batches<'_, Self>) {}

    fn laws(c: &CpSparseAttentionCase, laws: &mut Laws<'_, Self>) {
        if c.num_tokens == 0 {
            return;
        }
        let ordered = c.key_gradients != KeyGradients::Atomic;
        let bits = || Relation::Times(1.0);
        let of_keys = |same: bool| if same && ordered { bits() } else { Relation::WithinBudget };
        let relations = |same: bool| {
            let rows = ["out", "lse", "max_logits", "dq"].map(|name| (name, bits()));
            let sink = if same { bits() } else { Relation::WithinBudget };
            let keys = [("dk", of_keys(same)), ("dv", of_keys(same)), ("dsink", sink)];
            rows.into_iter().chain(keys).collect::<Vec<_>>()
        };
        laws.law("delays change nothing", |v| v.case.delay_seed += 11, relations(true));
        let other = if c.keys == Keys::Remapped { Keys::Reordered } else { Keys::Remapped };
        laws.law("either order of keys is the same", |v| v.case.keys = other, relations(true));
        let other = match c.partition {
            Partition::Zigzag => Partition::Contiguous,
            Partition::Contiguous => Partition::Zigzag,
        };
        laws.law("a token's rank does not matter", |v| v.case.partition = other, relations(false));
        let ranks = c.ranks % 4 + 1;
        laws.law("the number of ranks does not matter", |v| v.case.ranks = ranks, relations(false));
    }

    fn is_smooth(c: &CpSparseAttentionCase) -> bool {
        SparseAttention::is_smooth(&c.attention())
    }
}
