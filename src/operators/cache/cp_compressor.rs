//! `cp_compressor` (training 9, 10): the compressor of several ranks with consecutive tokens, each
//! with a halo of the ranks before, against the oracle of one device.

use std::marker::PhantomData;
use std::rc::Rc;

use dsv4_kernels::cache::compressor::{Epilogue, MAX_RATIO, OVERLAP_RATIO};
use dsv4_kernels::parallel::{Groups, compressor as launcher};

use crate::operator::prelude::*;
use crate::operators::cache::compressor::{Compressor, CompressorCase, Packing};
use crate::operators::ranks::{
    self, Division, NoTaps, Partition, Parts, Ranks, Taps, written, written_whole,
};

/// The operator. The registry's entry has no taps, and no case can select any.
pub struct CpCompressor<T: Taps = NoTaps>(PhantomData<fn() -> T>);

/// A case: ranks, and the compressor of all tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CpCompressorCase {
    /// Ranks: 1 to 8. Each has consecutive tokens.
    pub ranks: usize,
    /// Packed sequences: 1 to `num_tokens`. Some may have no token.
    pub num_sequences: usize,
    /// Delays ranks before and after collectives, unless 0.
    pub delay_seed: u64,
    /// Tokens of all ranks; 0 is allowed.
    pub num_tokens: usize,
    /// Tokens of a group, 1 to 128; 4 where groups overlap.
    pub ratio: usize,
    /// Whether an entry also covers the group before its own.
    pub overlaps: bool,
    /// Channels of an entry, a multiple of 4 up to 512.
    pub head_dim: usize,
    /// Channels that rotate, the last ones: even.
    pub rope_dim: usize,
    /// Positions of the table; entries beyond are NaN.
    pub table_rows: usize,
    /// Type of entries, and of what is saved for them.
    pub dtype: Float,
    /// Whether inputs that no entry pools are NaN.
    pub poison: bool,
    /// Added to the mean square.
    pub eps: f32,
    /// Deviation of gate and ape: from nearly equal weights to a single dominant one.
    pub scores: f64,
    /// kv.
    #[serde(flatten)]
    pub data: Data,
}

impl CpCompressorCase {
    fn plain(ranks: usize, num_tokens: usize, ratio: usize, head: [usize; 2]) -> Self {
        let [head_dim, rope_dim] = head;
        Self {
            ranks,
            num_sequences: 1,
            delay_seed: 0,
            num_tokens,
            ratio,
            overlaps: false,
            head_dim,
            rope_dim,
            table_rows: num_tokens.max(1),
            dtype: Float::Bf16,
            poison: false,
            eps: 1e-6,
            scores: 2.0,
            data: Data::normal(1.0),
        }
    }

    fn overlapping(ranks: usize, num_tokens: usize, head: [usize; 2]) -> Self {
        Self { overlaps: true, ..Self::plain(ranks, num_tokens, OVERLAP_RATIO, head) }
    }

    fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    fn lengths(&self) -> Vec<usize> {
        ranks::lengths(self.data.seed, self.num_sequences, self.num_tokens)
    }

    /// The compressor of one device. Each row of entries has one.
    fn compressor(&self) -> CompressorCase {
        let ratio = self.ratio.max(1);
        CompressorCase {
            num_tokens: self.num_tokens,
            num_sequences: self.num_sequences,
            num_entries: self.lengths().into_iter().map(|length| length / ratio).sum(),
            ratio: self.ratio,
            overlaps: self.overlaps,
            head_dim: self.head_dim,
            rope_dim: self.rope_dim,
            table_rows: self.table_rows,
            dtype: self.dtype,
            gradients: Float::F32,
            packing: Packing::Filled,
            poison: self.poison,
            saves_pooled: true,
            epilogue: Epilogue::None,
            eps: self.eps,
            scores: self.scores,
            data: self.data,
        }
    }

    fn division(&self) -> Division {
        Division {
            ranks: self.ranks,
            partition: Partition::Contiguous,
            lengths: self.lengths(),
            delay_seed: self.delay_seed,
        }
    }

    fn groups(&self, ranks: &Ranks<'_, '_>) -> Result<Groups, RuntimeError> {
        Groups::new(ranks.shards(), &self.lengths(), self.ratio, self.overlaps)
    }
}

/// The tensors that a rank reads in both directions.
fn given(ranks: &Ranks<'_, '_>, v: &Views, rank: usize) -> Result<Parts, RuntimeError> {
    let mut parts = ranks.given_tokens(v, &["kv", "gate"], rank)?;
    parts.extend(ranks.given_whole(v, &["ape", "norm_weight", "cos", "sin"])?);
    Ok(parts)
}

/// Those of the backward, and what it writes.
fn of_backward(
    ranks: &Ranks<'_, '_>,
    groups: &Groups,
    v: &Views,
    rank: usize,
) -> Result<Parts, RuntimeError> {
    let mut parts = given(ranks, v, rank)?;
    let entries = |all: HostTensor| ranks.rows(&all, groups.entries(rank));
    parts.extend(ranks.given(v, &["pooled", "dentries"], entries)?);
    parts.extend(written(v, &["dkv", "dgate"], ranks.shards().tokens(rank).len()));
    parts.extend(written_whole(v, &["dape", "dnorm_weight"]));
    Ok(parts)
}

const OUTPUTS: [&str; 2] = ["entries", "pooled"];

impl<T: Taps> Operator for CpCompressor<T> {
    type Case = CpCompressorCase;
    const SUM_LANES: usize = 4;

    const ABOUT: About = About {
        name: "cp_compressor",
        family: Family::Cache,
        summary: "compressor of several ranks: halos of groups that a rank's start cuts, and their gradients sent back",
        specification: &["training 9", "training 10"],
        paths: &[
            "gathered_numbers",
            "compressor_overlap_vector",
            "compressor_overlap_scalar",
            "compressor_pool_vector",
            "compressor_pool_scalar",
            "compressor_norm_vector",
            "compressor_norm_scalar",
            "compressor_overlap_backward_vector",
            "compressor_overlap_backward_scalar",
            "compressor_norm_backward_vector",
            "compressor_norm_backward_scalar",
            "compressor_pool_backward_vector",
            "compressor_pool_backward_scalar",
            "compressor_sums_vector",
            "compressor_sums_scalar",
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

    const CHAIN: &'static [&'static str] = &["compressor", "sparse_attention"];
    const RANKS: bool = true;

    fn tensors(c: &CpCompressorCase) -> Specs {
        Compressor::tensors(&c.compressor())
    }

    fn check(c: &CpCompressorCase) -> Result<(), Refused> {
        ranks::check(c.ranks, c.num_sequences, c.num_tokens)?;
        Compressor::check(&c.compressor())
    }

    fn oracle_elements(c: &CpCompressorCase) -> u128 {
        Compressor::oracle_elements(&c.compressor())
    }

    fn strategy(profile: Profile) -> BoxedStrategy<CpCompressorCase> {
        let tokens = 1..=profile.of([40usize, 100, 400]);
        let ratio = prop_oneof![1 => Just(MAX_RATIO), 6 => 1..=9usize];
        let heads = select(vec![[16usize, 8], [12, 12], [24, 4], [36, 0], [128, 64], [512, 64]]);
        let numbers = (
            prop_oneof![6 => Just(1usize), 1 => Just(2)],
            prop_oneof![3 => Just(1e-6f32), 1 => Just(1e-2f32)],
            select(vec![2.0, 2.0, 0.3, 60.0]),
        );
        let form = (any::<bool>(), ratio, heads, Float::strategy(), any::<bool>());
        (ranks::strategy(), tokens, form, numbers, Data::strategy(-18..=18))
            .prop_map(|((ranks, _, sequences, delay_seed), tokens, form, numbers, data)| {
                let (overlaps, ratio, head, dtype, poison) = form;
                let ((shorter, eps, scores), plain) = (numbers, CpCompressorCase::plain);
                // Of whole groups, where they are long.
                let tokens = if !overlaps && ratio == MAX_RATIO { 4 * tokens } else { tokens };
                let case = match overlaps {
                    true => CpCompressorCase::overlapping(ranks, tokens, head),
                    false => plain(ranks, tokens, ratio, head),
                };
                CpCompressorCase {
                    num_sequences: sequences.min(tokens),
                    delay_seed,
                    table_rows: case.table_rows.div_ceil(shorter),
                    dtype,
                    poison,
                    eps,
                    scores,
                    data,
                    ..case
                }
            })
            .boxed()
    }

    fn typical() -> Vec<CpCompressorCase> {
        let (plain, overlapping) = (CpCompressorCase::plain, CpCompressorCase::overlapping);
        vec![
            overlapping(2, 27, [16, 8]).with(|case| case.num_sequences = 2),
            plain(3, 23, 5, [24, 8]).with(|case| {
                case.delay_seed = 1;
                case.dtype = Float::F32;
            }),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<CpCompressorCase> {
        let (plain, overlapping) = (CpCompressorCase::plain, CpCompressorCase::overlapping);
        let mut cases = vec![
            overlapping(2, 0, [16, 8]),
            plain(3, 2, 4, [8, 4]),
            // Ranks whose start is that of a group: only overlap needs a halo.
            overlapping(4, 32, [16, 8]).with(|case| case.poison = true),
            plain(4, 32, 8, [16, 8]),
            // Groups of several ranks, ranks that end before a group does, and without tokens.
            plain(8, 30, 9, [12, 4]).with(|case| case.poison = true),
            overlapping(8, 19, [12, 4]).with(|case| case.delay_seed = 5),
            plain(3, 280, 128, [72, 8]),
            plain(4, 21, 1, [8, 8]),
            // One rank: communication changes nothing.
            overlapping(1, 22, [16, 8]),
            // Sequences that start before, at and after the start of a rank, some of them empty.
            overlapping(4, 41, [16, 6]).with(|case| {
                case.num_sequences = 4;
                case.poison = true;
                case.delay_seed = 9;
            }),
            plain(3, 40, 3, [12, 6]).with(|case| case.num_sequences = 5),
            // The table ends before the last entries, of which some are in a later part of a
            // sequence.
            overlapping(3, 44, [16, 8]).with(|case| case.table_rows = 17),
            // The model's.
            overlapping(2, 26, [512, 64]).with(|case| case.num_sequences = 2),
            overlapping(3, 50, [128, 64]).with(|case| case.dtype = Float::F32),
        ];
        if profile == Profile::Full {
            cases.push(overlapping(4, 2000, [512, 64]).with(|case| case.num_sequences = 5));
            cases.push(plain(4, 3000, 128, [512, 64]).with(|case| case.num_sequences = 3));
        }
        cases
    }

    fn amend(c: &CpCompressorCase, tensors: &mut Tensors) -> OracleResult<()> {
        Compressor::amend(&c.compressor(), tensors)
    }

    fn forward(
        c: &CpCompressorCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        Compressor::forward(&c.compressor(), t, rounding)
    }

    fn backward(
        c: &CpCompressorCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        Compressor::backward(&c.compressor(), t, rounding)
    }

    fn backward_of_saved(
        c: &CpCompressorCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        Compressor::backward_of_saved(&c.compressor(), t, rounding)
    }

    fn launch(c: &CpCompressorCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        let mut ranks = Ranks::of(c.division(), run)?;
        let groups = c.groups(&ranks)?;
        let parts = |ranks: &Ranks<'_, '_>, rank: usize| {
            let mut parts = given(ranks, v, rank)?;
            parts.extend(written(v, &OUTPUTS, groups.entries(rank).len()));
            Ok(parts)
        };
        let written = ranks.launch::<T>(
            parts,
            &|device, v, rank| Ok(launcher::workspace_bytes(device, v, &groups, rank)),
            &|device, v, tap| launcher::forward(device, v, c.eps, &groups, tap),
        )?;
        OUTPUTS.into_iter().try_for_each(|name| {
            ranks.unite_rows(&written, name, &v[name], |rank| groups.entries(rank))
        })
    }

    fn launch_backward(
        c: &CpCompressorCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        let mut ranks = Ranks::of(c.division(), run)?;
        let groups = c.groups(&ranks)?;
        let written = ranks.launch::<T>(
            |ranks, rank| of_backward(ranks, &groups, v, rank),
            &|device, v, rank| Ok(launcher::workspace_bytes(device, v, &groups, rank)),
            &|device, v, tap| launcher::backward(device, v, c.eps, &groups, tap),
        )?;
        for name in ["dkv", "dgate"] {
            ranks.unite(&written, name, &v[name])?;
        }
        ["dape", "dnorm_weight"]
            .into_iter()
            .try_for_each(|name| ranks.agreed(&written, name, &v[name]))
    }

    /// The rows of a case have no other batches: they are a batch's tokens, and share entries.
    fn batches(_: &CpCompressorCase, _: &mut Batches<'_, Self>) {}

    fn laws(c: &CpCompressorCase, laws: &mut Laws<'_, Self>) {
        if c.num_tokens == 0 {
            return;
        }
        let bits = || Relation::Times(1.0);
        let relations = |columns: Relation, parameters: Relation| {
            let entries = OUTPUTS.map(|name| (name, bits()));
            let columns = ["dkv", "dgate"].map(|name| (name, columns.clone()));
            let sums = ["dape", "dnorm_weight"].map(|name| (name, parameters.clone()));
            entries.into_iter().chain(columns).chain(sums).collect::<Vec<_>>()
        };
        laws.law("delays change nothing", |v| v.case.delay_seed += 11, relations(bits(), bits()));
        let ranks = c.ranks % 4 + 1;
        // Each half of a token has the gradient of one entry, whichever rank pools it, and zeros of
        // other ranks: -0 becomes 0, and nothing else changes.
        let same = Relation::MadeOf(Rc::new(HostTensor::to_f64));
        laws.law(
            "the number of ranks does not matter",
            |v| v.case.ranks = ranks,
            relations(same, Relation::WithinBudget),
        );
    }

    fn is_smooth(c: &CpCompressorCase) -> bool {
        Compressor::is_smooth(&c.compressor())
    }

    fn bends_over(c: &CpCompressorCase, tensors: &Tensors, input: &str) -> Option<Vec<f64>> {
        Compressor::bends_over(&c.compressor(), tensors, input)
    }
}
