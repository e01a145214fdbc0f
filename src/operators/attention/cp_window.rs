//! `cp_window` (training 10): attention over a window of keys of several ranks with consecutive
//! tokens, each with a halo of the ranks before, against the oracle of one device.

use std::marker::PhantomData;

use dsv4_kernels::attention::sparse_attention as attention;
use dsv4_kernels::parallel::{Halos, window as launcher};

use crate::operator::fields::Implementation;
use crate::operator::prelude::*;
use crate::operators::attention::of_ranks::Parallel;
use crate::operators::attention::sinks::Sinks;
use crate::operators::attention::sparse_attention::{
    KeyGradients, SparseAttention, SparseAttentionCase,
};
use crate::operators::lists::IndexClass;
use crate::operators::ranks::{self, Division, NoTaps, Partition, Parts, Ranks, Taps};

/// The operator. The registry's entry has no taps, and no case can select any.
pub struct CpWindow<T: Taps = NoTaps>(PhantomData<fn() -> T>);

/// A case: ranks, and the window attention of all tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpWindowCase {
    /// Ranks: 1 to 8. Each has consecutive tokens.
    pub ranks: usize,
    /// Packed sequences: 1 to `num_tokens`. Some may have no token.
    pub num_sequences: usize,
    /// Delays ranks before and after collectives, unless 0.
    pub delay_seed: u64,
    /// Tokens of all ranks, queries and keys; 0 is allowed.
    pub num_tokens: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Width of q and k, which are also the values: a multiple of 16 up to 512.
    pub head_dim: usize,
    /// Keys that a token sees, itself included: at least 1.
    pub window: usize,
    /// The sinks.
    pub sinks: Sinks,
    /// Multiplies q·k.
    pub softmax_scale: f32,
    /// Standard deviation of the logits.
    pub logit_deviation: f64,
    /// Type of dk.
    pub key_gradient: Float,
    /// Whether lse has its own upstream gradient.
    pub dlse: bool,
    /// How each rank sums dk.
    pub key_gradients: KeyGradients,
    /// Seed of the data.
    pub seed: u64,
}

impl CpWindowCase {
    fn plain(ranks: usize, num_tokens: usize, num_heads: usize, window: usize) -> Self {
        Self {
            ranks,
            num_sequences: 1,
            delay_seed: 0,
            num_tokens,
            num_heads,
            head_dim: 64,
            window,
            sinks: Sinks::Normal,
            softmax_scale: 0.125,
            logit_deviation: 2.0,
            key_gradient: Float::Bf16,
            dlse: false,
            key_gradients: KeyGradients::Deterministic,
            seed: 1,
        }
    }

    /// The attention of one device.
    fn attention(&self) -> SparseAttentionCase {
        let (tokens, heads, width) = (self.num_tokens, self.num_heads, self.head_dim);
        SparseAttentionCase {
            indices: IndexClass::Valid,
            sinks: self.sinks,
            softmax_scale: self.softmax_scale,
            logit_deviation: self.logit_deviation,
            key_gradient: self.key_gradient,
            dlse: self.dlse,
            implementation: Implementation::Portable,
            key_gradients: self.key_gradients,
            poison_unreferenced: false,
            seed: self.seed,
            ..SparseAttentionCase::plain(tokens, heads, width, tokens, self.window)
        }
    }

    fn lengths(&self) -> Vec<usize> {
        ranks::lengths(self.seed, self.num_sequences, self.num_tokens)
    }

    fn division(&self) -> Division {
        Division {
            ranks: self.ranks,
            partition: Partition::Contiguous,
            lengths: self.lengths(),
            delay_seed: self.delay_seed,
        }
    }

    fn halos(&self, ranks: &Ranks<'_, '_>) -> Result<Halos, RuntimeError> {
        Halos::new(ranks.shards(), &self.lengths(), self.window.saturating_sub(1))
    }

    fn options(&self) -> launcher::Options {
        let key_gradients = match self.key_gradients {
            KeyGradients::Atomic => attention::KeyGradients::Atomic,
            KeyGradients::Deterministic | KeyGradients::DeterministicAsAdvised => {
                attention::KeyGradients::Deterministic {
                    chunk_tokens: self.num_tokens.div_ceil(3).max(1),
                }
            }
        };
        let attention = attention::Options {
            v_dim: Some(self.head_dim),
            softmax_scale: self.softmax_scale,
            implementation: attention::Implementation::Portable,
            key_gradients,
        };
        launcher::Options { attention, window: self.window }
    }
}

/// The tensors that a rank reads in both directions.
fn given(ranks: &Ranks<'_, '_>, v: &Views, rank: usize) -> Result<Parts, RuntimeError> {
    let mut parts = ranks.given_tokens(v, &["q", "k"], rank)?;
    parts.extend(ranks.given_whole(v, &["sink"])?);
    Ok(parts)
}

impl<T: Taps> Operator for CpWindow<T> {
    type Case = CpWindowCase;
    const SUM_LANES: usize = 4;

    const ABOUT: About = About {
        name: "cp_window",
        family: Family::Attention,
        summary: "attention over a window of several ranks: halos of keys, and their gradients sent back",
        specification: &["training 3", "training 4", "training 10"],
        paths: &[
            "gathered_numbers",
            "gathered_window",
            "sparse_attention_forward<16>",
            "sparse_attention_forward<64>",
            "sparse_attention_delta",
            "sparse_attention_dsink",
            "sparse_attention_zero",
            "sparse_attention_cast",
            "sparse_attention_backward<16>",
            "sparse_attention_backward<64>",
            "sparse_attention_backward<16,deterministic>",
            "sparse_attention_backward<64,deterministic>",
            "sparse_attention_count",
            "sparse_attention_reserve",
            "sparse_attention_fill",
            "sparse_attention_order",
            "sparse_attention_sum",
            "exchange",
            "all_reduce",
        ],
        modules: dsv4_kernels::parallel::modules_of_halos,
        cases: [12, 30, 60],
    };

    const CHAIN: &'static [&'static str] = &["sparse_attention"];
    const RANKS: bool = true;

    fn tensors(c: &CpWindowCase) -> Specs {
        SparseAttention::tensors(&c.attention())
    }

    fn check(c: &CpWindowCase) -> Result<(), Refused> {
        ranks::check(c.ranks, c.num_sequences, c.num_tokens)?;
        not_empty("window", c.window)?;
        SparseAttention::check(&c.attention())
    }

    fn oracle_elements(c: &CpWindowCase) -> u128 {
        SparseAttention::oracle_elements(&c.attention())
    }

    fn strategy(profile: Profile) -> BoxedStrategy<CpWindowCase> {
        let sizes = (
            1..=profile.of([30usize, 60, 200]),
            prop_oneof![1 => Just(1usize), 1 => Just(16usize), 2 => 1..=20usize],
            prop_oneof![1 => Just(1usize), 3 => 1..=12usize, 1 => 1..=40usize],
        );
        let gradients = (
            select(vec![Float::Bf16, Float::F32]),
            select(vec![KeyGradients::Deterministic, KeyGradients::Atomic]),
            any::<bool>(),
        );
        (ranks::strategy(), sizes, gradients, Sinks::strategy(), 0..1000u64)
            .prop_map(|(ranks, (tokens, heads, window), (dtype, sums, dlse), sinks, seed)| {
                let (ranks, _, sequences, delay_seed) = ranks;
                CpWindowCase {
                    num_sequences: sequences.min(tokens),
                    delay_seed,
                    // Most sinks of a row of few heads leave no gradient.
                    num_heads: if sinks == Sinks::Extreme { heads.max(6) } else { heads },
                    sinks,
                    key_gradient: dtype,
                    key_gradients: sums,
                    dlse,
                    seed,
                    ..CpWindowCase::plain(ranks, tokens, heads, window)
                }
            })
            .boxed()
    }

    fn typical() -> Vec<CpWindowCase> {
        let plain = CpWindowCase::plain;
        vec![
            CpWindowCase { num_sequences: 2, dlse: true, ..plain(2, 13, 5, 4) },
            CpWindowCase {
                delay_seed: 1,
                key_gradient: Float::F32,
                key_gradients: KeyGradients::Atomic,
                ..plain(3, 14, 17, 6)
            },
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<CpWindowCase> {
        let plain = CpWindowCase::plain;
        let mut cases = vec![
            plain(2, 0, 4, 5),
            // No halo, and none needed.
            plain(3, 9, 4, 1),
            plain(1, 9, 4, 5),
            // Halos of several ranks, and ranks without tokens.
            plain(8, 12, 5, 9),
            CpWindowCase { delay_seed: 5, ..plain(4, 5, 5, 40) },
            CpWindowCase { num_sequences: 4, sinks: Sinks::Extreme, ..plain(4, 21, 6, 8) },
            CpWindowCase { sinks: Sinks::Absent, ..plain(3, 17, 20, 7) },
            CpWindowCase { key_gradients: KeyGradients::Atomic, ..plain(2, 11, 4, 6) },
        ];
        if profile == Profile::Full {
            cases.push(CpWindowCase { head_dim: 512, ..plain(4, 600, 64, 128) });
        }
        cases
    }

    fn amend(c: &CpWindowCase, tensors: &mut Tensors) -> OracleResult<()> {
        SparseAttention::amend(&c.attention(), tensors)?;
        let (mut lists, mut start) = (Vec::new(), 0);
        for length in c.lengths() {
            for token in start..start + length {
                let key = |slot: usize| (token + slot + 1).checked_sub(c.window);
                let seen =
                    |slot| key(slot).filter(|&key| key >= start).map_or(-1, |key| key as i32);
                lists.extend((0..c.window).map(seen));
            }
            start += length;
        }
        tensors.set_i32s("indices", &lists);
        Ok(())
    }

    fn forward(c: &CpWindowCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        SparseAttention::forward(&c.attention(), t, rounding)
    }

    fn backward(c: &CpWindowCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        SparseAttention::backward(&c.attention(), t, rounding)
    }

    fn backward_of_saved(
        c: &CpWindowCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        SparseAttention::backward_of_saved(&c.attention(), t, rounding)
    }

    fn launch(c: &CpWindowCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        let mut ranks = Ranks::of(c.division(), run)?;
        let (halos, options) = (c.halos(&ranks)?, c.options());
        Parallel {
            given: &|ranks, rank| given(ranks, v, rank),
            workspace: &|_, v, rank| launcher::workspace_bytes(v, &options, &halos, rank),
            launch: &|device, v, tap| launcher::forward(device, v, &options, &halos, tap),
        }
        .forward::<T>(&mut ranks, v)
    }

    fn launch_backward(
        c: &CpWindowCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        let mut ranks = Ranks::of(c.division(), run)?;
        let (halos, options) = (c.halos(&ranks)?, c.options());
        Parallel {
            given: &|ranks, rank| given(ranks, v, rank),
            workspace: &|_, v, rank| launcher::workspace_bytes(v, &options, &halos, rank),
            launch: &|device, v, tap| launcher::backward(device, v, &options, &halos, tap),
        }
        .backward::<T>(&mut ranks, v, |ranks, rank| ranks.shards().tokens(rank).len())
    }

    /// The rows of a case have no other batches: they are a batch's tokens, and see one another.
    fn batches(_: &CpWindowCase, _: &mut Batches<'_, Self>) {}

    fn laws(c: &CpWindowCase, laws: &mut Laws<'_, Self>) {
        if c.num_tokens == 0 {
            return;
        }
        let bits = || Relation::Times(1.0);
        let relations = |keys: Relation, sink: Relation| {
            let rows = ["out", "lse", "max_logits", "dq"].map(|name| (name, bits()));
            rows.into_iter().chain([("dk", keys), ("dsink", sink)]).collect::<Vec<_>>()
        };
        let keys = match c.key_gradients {
            KeyGradients::Atomic => Relation::WithinBudget,
            _ => bits(),
        };
        laws.law("delays change nothing", |v| v.case.delay_seed += 11, relations(keys, bits()));
        let (ranks, within) = (c.ranks % 4 + 1, || Relation::WithinBudget);
        laws.law(
            "the number of ranks does not matter",
            |v| v.case.ranks = ranks,
            relations(within(), within()),
        );
    }

    fn is_smooth(c: &CpWindowCase) -> bool {
        SparseAttention::is_smooth(&c.attention())
    }
}
