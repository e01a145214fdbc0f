//! `cp_indexer` (training 1, 2, 5, 6, 7, 10): a step of the indexer's training by several ranks,
//! each with some of the tokens and of the keys, against the oracle of one device.
//!
//! Lists name rows of all keys, not of the token's sequence: a rank's lists have a meaning on every
//! other rank.

use std::marker::PhantomData;

use candle_core::{Device as Cpu, Tensor};
use dsv4_kernels::implementation::Implementation as Kernels;
use dsv4_kernels::indexer::indexer_backward;
use dsv4_kernels::indexer::indexer_loss::{Form, Reduction};
use dsv4_kernels::parallel::ranges::{self, Sequences};
use dsv4_kernels::parallel::{Shards, indexer as launcher};

use crate::operator::fields::elements;
use crate::operator::prelude::*;
use crate::operators::attention::sparse_attention::KeyGradients;
use crate::operators::indexer::indexer_distillation::{
    self as step, IndexerDistillation, IndexerDistillationCase,
};
use crate::operators::indexer::ranking::RankedKeys;
use crate::operators::ranks::{
    self, Division, NoTaps, Partition, Parts, Ranks, Taps, integers, written, written_whole,
};

/// The operator. The registry's entry has no taps, and no case can select any.
pub struct CpIndexer<T: Taps = NoTaps>(PhantomData<fn() -> T>);

/// A case: ranks, and the step of all tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CpIndexerCase {
    /// Ranks: 1 to 8.
    pub ranks: usize,
    /// How tokens, and keys, are divided among them.
    pub partition: Partition,
    /// Delays ranks before and after collectives, unless 0.
    pub delay_seed: u64,
    /// How each rank sums the gradient of keys.
    pub key_gradients: KeyGradients,
    /// The step of one device.
    #[serde(flatten)]
    pub step: IndexerDistillationCase,
}

/// Ends of the sequences' tokens and of their keys.
type Ends = [Vec<i32>; 2];

impl CpIndexerCase {
    fn of(ranks: usize, keys: RankedKeys, listed: usize) -> Self {
        Self {
            ranks,
            partition: Partition::Zigzag,
            delay_seed: 0,
            key_gradients: KeyGradients::Deterministic,
            step: step::of(keys, listed),
        }
    }

    fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    fn keys(&self) -> &RankedKeys {
        &self.step.keys
    }

    fn ends(&self) -> Ends {
        let whole = |count: usize| vec![0, count as i32];
        match self.keys().sequences() {
            Some(sequences) => [sequences.cu_q, sequences.cu_k],
            None => [whole(self.keys().num_tokens), whole(self.keys().num_keys)],
        }
    }

    /// Lengths of sequences whose ends these are, and of what follows the last one.
    fn lengths(ends: &[i32], all: usize) -> Vec<usize> {
        let of_sequences = ends.windows(2).map(|ends| (ends[1] - ends[0]) as usize);
        let rest = all - ends.last().map_or(0, |&end| end as usize);
        of_sequences.chain([rest]).collect()
    }

    fn division(&self) -> Division {
        Division {
            ranks: self.ranks,
            partition: self.partition,
            lengths: Self::lengths(&self.ends()[0], self.keys().num_tokens),
            delay_seed: self.delay_seed,
        }
    }

    /// Which rank has which keys.
    fn key_shards(&self) -> Result<Shards, RuntimeError> {
        let lengths = Self::lengths(&self.ends()[1], self.keys().num_keys);
        Shards::new(self.partition.launcher(), self.ranks, &lengths)
    }

    fn options(&self) -> launcher::Options {
        // A rank has all tokens at most.
        let third = self.keys().num_tokens.div_ceil(3).max(1);
        let key_gradients = match self.key_gradients {
            KeyGradients::Atomic => indexer_backward::KeyGradients::Atomic,
            KeyGradients::Deterministic | KeyGradients::DeterministicAsAdvised => {
                indexer_backward::KeyGradients::Deterministic { chunk_tokens: third }
            }
        };
        launcher::Options {
            num_tokens: self.keys().num_tokens,
            num_keys: self.keys().num_keys,
            sm_scale: self.step.sm_scale,
            softmax_scale: self.step.softmax_scale(),
            form: self.step.form,
            reduction: self.step.reduction,
            loss_coeff: self.step.loss_coeff,
            key_gradients,
            implementation: Kernels::Portable,
        }
    }

    /// The oracle's outputs with lists of rows of all keys.
    fn global(&self, named: Named) -> OracleResult<Named> {
        let [cu_q, cu_k] = self.ends();
        let listed = named.tensor("indices")?;
        let first = |token: usize| {
            let after = cu_q.partition_point(|&start| start as usize <= token);
            // A token of no sequence lists nothing.
            if after < cu_q.len() { f64::from(cu_k[after - 1]) } else { 0.0 }
        };
        let slots = self.step.listed.max(1);
        let rows: Vec<f64> = elements(listed)?
            .into_iter()
            .enumerate()
            .map(|(at, index)| if index < 0.0 { index } else { index + first(at / slots) })
            .collect();
        let indices = Tensor::from_vec(rows, listed.dims(), &Cpu::Cpu)?;
        Ok(named.with("indices", indices))
    }
}

/// The tensors that each rank is given: of its tokens, and of its keys.
fn given(
    ranks: &Ranks<'_, '_>,
    key_shards: &Shards,
    v: &Views,
    [of_tokens, of_keys]: [&[&'static str]; 2],
    rank: usize,
) -> Result<Parts, RuntimeError> {
    let mut parts = ranks.given_tokens(v, of_tokens, rank)?;
    parts.extend(ranks.given(v, of_keys, |keys| ranks.padded_by(key_shards, &keys, rank))?);
    parts.push(integers("positions", &key_shards.positions(rank)));
    Ok(parts)
}

/// The keys that each token of a rank scores.
fn scored(
    c: &CpIndexerCase,
    ranks: &Ranks<'_, '_>,
    v: &Views,
    rank: usize,
) -> Result<Parts, RuntimeError> {
    let [cu_q, cu_k] = c.ends();
    let q_off = v.get("q_off").map(|view| ranks.read(view)).transpose()?;
    let q_off = q_off.map(|offsets| offsets.to_i32());
    let sequences = Sequences { cu_q: &cu_q, cu_k: &cu_k, q_off: q_off.as_deref() };
    let ranges = ranges::ranges(ranks.shards().tokens(rank), sequences, c.keys().ratio)?;
    Ok(["ks", "ke"].into_iter().zip(&ranges).map(|(name, all)| integers(name, all)).collect())
}

/// Rows of tokens that the forward writes, and the backward.
const OUTPUTS: [&str; 6] = ["logits", "indices", "values", "target", "idx_lse", "kl"];
const GRADIENTS: [&str; 3] = ["dvalues", "dindex_q", "dindex_w"];

impl<T: Taps> Operator for CpIndexer<T> {
    type Case = CpIndexerCase;
    const SUM_LANES: usize = 4;

    const ABOUT: About = About {
        name: "cp_indexer",
        family: Family::Indexer,
        summary: "a step of the indexer's training by several ranks: keys gathered, lists of all keys, one mean, one sum of key gradients",
        specification: &[
            "training 1",
            "training 2",
            "training 5",
            "training 6",
            "training 7",
            "training 10",
        ],
        paths: &[
            "gathered_slots",
            "gathered_copy",
            "gathered_ranges",
            "indexer_logits<bf16, 16>",
            "indexer_logits<bf16, 32>",
            "indexer_logits<bf16, 64>",
            "topk",
            "score_recompute<16, selected>",
            "score_recompute<64, selected>",
            "score_recompute<128, selected>",
            "indexer_loss_vector",
            "indexer_loss_scalar",
            "indexer_loss_sum",
            "backward indexer_loss_vector",
            "backward indexer_loss_scalar",
            "backward indexer_backward_zero",
            "backward indexer_backward<selected>",
            "backward indexer_backward<selected, deterministic>",
            "backward indexer_backward_sum",
            "all_gather",
            "reduce_scatter",
            "all_reduce",
        ],
        modules: dsv4_kernels::parallel::modules_of_indexer,
        cases: [8, 20, 40],
    };

    const CHAIN: &'static [&'static str] =
        &["indexer_logits", "topk", "score_recompute", "indexer_loss", "indexer_backward"];
    const RANKS: bool = true;

    fn tensors(c: &CpIndexerCase) -> Specs {
        step::specs(&c.step, c.key_gradients == KeyGradients::Atomic)
    }

    fn check(c: &CpIndexerCase) -> Result<(), Refused> {
        ranks::check(c.ranks, 1, 1)?;
        IndexerDistillation::check(&c.step)
    }

    fn oracle_elements(c: &CpIndexerCase) -> u128 {
        // Each rank holds the rows of all.
        let rows = c.keys().num_keys as u128 * c.step.head_dim as u128;
        IndexerDistillation::oracle_elements(&c.step) + rows * 4 * c.ranks as u128
    }

    fn strategy(profile: Profile) -> BoxedStrategy<CpIndexerCase> {
        let sums = select(vec![KeyGradients::Deterministic, KeyGradients::Atomic]);
        // Each law runs all ranks again.
        let most = profile.of([[6usize, 60], [8, 100], [24, 1200]]);
        (IndexerDistillation::strategy(profile), ranks::strategy(), sums)
            .prop_map(move |(mut step, (ranks, partition, _, delay_seed), key_gradients)| {
                let keys = &mut step.keys;
                keys.num_tokens = keys.num_tokens.min(most[0]);
                keys.num_keys = keys.num_keys.min(most[1]);
                // Sequences of few keys may all be empty, with no key to list.
                keys.packed &= keys.columns() > 0;
                step.index_heads = step.index_heads.min(20);
                CpIndexerCase { ranks, partition, delay_seed, key_gradients, step }
            })
            .boxed()
    }

    fn typical() -> Vec<CpIndexerCase> {
        let packed = RankedKeys { packed: true, ..RankedKeys::causal(6, 20, 1) };
        vec![
            CpIndexerCase::of(2, RankedKeys::causal(5, 16, 2), 6),
            CpIndexerCase::of(2, packed, 7).with(|case| {
                case.partition = Partition::Contiguous;
                case.delay_seed = 1;
                case.key_gradients = KeyGradients::Atomic;
                case.step.form = Form::Exact;
                case.step.reduction = Reduction::Sum;
            }),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<CpIndexerCase> {
        let (of, causal) = (CpIndexerCase::of, RankedKeys::causal);
        let packed =
            |tokens, keys, ratio| RankedKeys { packed: true, ..causal(tokens, keys, ratio) };
        let contiguous = |case: &mut CpIndexerCase| case.partition = Partition::Contiguous;
        let mut cases = vec![
            of(2, causal(0, 9, 4), 5),
            // Ranks without tokens, and without keys.
            of(3, causal(1, 1, 1), 1),
            of(8, causal(5, 12, 1), 16).with(contiguous),
            of(4, RankedKeys { q_off: false, ..causal(11, 11, 1) }, 16),
            // Rows that are all incomplete, and lists longer than the number of keys.
            of(3, RankedKeys { q_off: false, ..causal(9, 40, 4) }, 48).with(contiguous),
            // One rank: communication changes nothing.
            of(1, packed(9, 30, 1), 8),
            of(4, packed(9, 70, 1), 33).with(|case| {
                case.delay_seed = 9;
                case.step.index_heads = 64;
                case.step.num_heads = 17;
            }),
            of(8, packed(12, 40, 1), 9).with(|case| {
                case.partition = Partition::Contiguous;
                case.delay_seed = 7;
                case.key_gradients = KeyGradients::Atomic;
            }),
            of(2, causal(5, 70, 2), 32).with(|case| {
                case.step.index_heads = 32;
                case.step.num_heads = 66;
                case.step.form = Form::Exact;
            }),
        ];
        if profile == Profile::Full {
            cases.push(of(4, causal(32, 2048, 1), 512).with(|case| {
                case.step.index_heads = 64;
                case.step.num_heads = 64;
            }));
        }
        cases
    }

    fn amend(c: &CpIndexerCase, tensors: &mut Tensors) -> OracleResult<()> {
        IndexerDistillation::amend(&c.step, tensors)
    }

    fn forward(c: &CpIndexerCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        c.global(IndexerDistillation::forward(&c.step, t, rounding)?)
    }

    fn backward(c: &CpIndexerCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        IndexerDistillation::backward(&c.step, t, rounding)
    }

    fn launch(c: &CpIndexerCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        let mut ranks = Ranks::of(c.division(), run)?;
        let (options, key_shards) = (c.options(), c.key_shards()?);
        let names = [&["index_q", "index_w", "q", "lse"][..], &["index_k", "k"]];
        let parts = |ranks: &Ranks<'_, '_>, rank: usize| {
            let mut parts = given(ranks, &key_shards, v, names, rank)?;
            parts.extend(scored(c, ranks, v, rank)?);
            parts.extend(written(v, &OUTPUTS, ranks.shards().tokens(rank).len()));
            parts.extend(written_whole(v, &["loss"]));
            Ok(parts)
        };
        let written = ranks.launch::<T>(
            parts,
            &|_, v, _| launcher::workspace_bytes(v, &options, c.ranks),
            &|device, v, tap| launcher::forward(device, v, &options, tap),
        )?;
        OUTPUTS.into_iter().try_for_each(|name| ranks.unite(&written, name, &v[name]))?;
        ranks.agreed(&written, "loss", &v["loss"])
    }

    fn launch_backward(
        c: &CpIndexerCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        let mut ranks = Ranks::of(c.division(), run)?;
        let (options, key_shards) = (c.options(), c.key_shards()?);
        let saved = ["index_q", "index_w", "indices", "values", "target", "idx_lse"];
        let parts = |ranks: &Ranks<'_, '_>, rank: usize| {
            let mut parts = given(ranks, &key_shards, v, [&saved, &["index_k"]], rank)?;
            parts.extend(ranks.given_whole(v, &["grad_loss"])?);
            parts.extend(written(v, &GRADIENTS, ranks.shards().tokens(rank).len()));
            parts.extend(written(v, &["dindex_k"], key_shards.rows()));
            Ok(parts)
        };
        let written = ranks.launch::<T>(
            parts,
            &|_, v, _| launcher::workspace_bytes(v, &options, c.ranks),
            &|device, v, tap| launcher::backward(device, v, &options, tap),
        )?;
        GRADIENTS.into_iter().try_for_each(|name| ranks.unite(&written, name, &v[name]))?;
        let of_keys = |rank| ranks::numbers(&key_shards, rank);
        ranks.unite_rows(&written, "dindex_k", &v["dindex_k"], of_keys)
    }

    /// The rows of a case have no other batches: the loss is a mean over them.
    fn batches(_: &CpIndexerCase, _: &mut Batches<'_, Self>) {}

    fn laws(c: &CpIndexerCase, laws: &mut Laws<'_, Self>) {
        if c.keys().num_tokens == 0 {
            return;
        }
        let bits = || Relation::Times(1.0);
        let ordered = c.key_gradients != KeyGradients::Atomic;
        let relations = |same: bool| {
            let rows = OUTPUTS.into_iter().chain(GRADIENTS).map(|name| (name, bits()));
            let of = |bitwise: bool| if bitwise { bits() } else { Relation::WithinBudget };
            let sums = [("loss", of(same)), ("dindex_k", of(same && ordered))];
            rows.chain(sums).collect::<Vec<_>>()
        };
        laws.law("delays change nothing", |v| v.case.delay_seed += 11, relations(true));
        let other = match c.partition {
            Partition::Zigzag => Partition::Contiguous,
            Partition::Contiguous => Partition::Zigzag,
        };
        let ranks = c.ranks % 4 + 1;
        // One variant of both: each runs all ranks again.
        let change = |v: &mut Variant<Self>| (v.case.partition, v.case.ranks) = (other, ranks);
        laws.law("a token's rank and their number do not matter", change, relations(false));
    }

    fn is_smooth(c: &CpIndexerCase) -> bool {
        IndexerDistillation::is_smooth(&c.step)
    }
}
