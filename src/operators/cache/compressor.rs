//! `compressor` (inference 5.4, 6, training 9): `kernels/cuda/cache/compressor.cu` against
//! `reference/src/cache/compressor.rs`.
//!
//! With an epilogue, the oracle's runs check only that entries are near the right values, within
//! the rounding to codes. A law checks the exact relation: entries without an epilogue, quantized
//! and decoded, must equal the entries with one, bit for bit.

use std::ops::Range;
use std::rc::Rc;

use candle_core::{Device as Cpu, Tensor};
use dsv4_kernels::cache::compressor::{
    self as launcher, Epilogue, Extents, MAX_HEAD_DIM, MAX_RATIO, OVERLAP_RATIO, QUAD,
};
use dsv4_kernels::formats::hadamard;
use dsv4_reference::cache::compressor::{self as reference, Entry, Finish};
use dsv4_reference::precision::Precision;
use dsv4_reference::projections::rope::{YarnParameters, inv_freq_f32, table};
use rand::Rng;

use crate::operator::benchmarks::{Whole, last};
use crate::operator::declaration::Axis;
use crate::operator::fields::{LARGEST_DRAWN, elements};
use crate::operator::prelude::*;
use crate::operator::tensors::permuted_along;
use crate::operator::{Pooling, format_of};
use crate::operators::ranks;

/// The operator.
pub struct Compressor;

/// The lengths of the sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Packing {
    /// Any length: some are empty or shorter than a group. Some tokens at the end are padding.
    Drawn,
    /// All the same length.
    Equal,
    /// Any length, without padding: as ranks share them ([`ranks::lengths`]).
    Filled,
}

/// A case: sizes, sequences, types, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CompressorCase {
    /// Tokens, padding included; 0 is allowed.
    pub num_tokens: usize,
    /// Packed sequences; 0 is allowed.
    pub num_sequences: usize,
    /// Rows of entries. Rows beyond the existing entries become zero; entries beyond the rows are
    /// skipped.
    pub num_entries: usize,
    /// Tokens of a group, 1 to 128; 4 where groups overlap.
    pub ratio: usize,
    /// Whether an entry also covers the group before its own.
    pub overlaps: bool,
    /// Channels of an entry, a multiple of 4 up to 512.
    pub head_dim: usize,
    /// Channels that rotate, the last ones: a multiple of 4.
    pub rope_dim: usize,
    /// Positions of the table; entries beyond are NaN.
    pub table_rows: usize,
    /// Type of entries, and of what is saved for them.
    pub dtype: Float,
    /// Type of the gradients of kv and gate; bf16 is what a GEMM's backward takes.
    pub gradients: Float,
    /// The lengths of the sequences.
    pub packing: Packing,
    /// Whether inputs that no entry pools are NaN.
    pub poison: bool,
    /// Whether the forward saves what it pooled. If not, as in inference, a separate forward saves
    /// it for the backward.
    pub saves_pooled: bool,
    /// The format of stored entries. Only `none` has a backward.
    pub epilogue: Epilogue,
    /// Added to the mean square.
    pub eps: f32,
    /// Deviation of gate and ape: from nearly equal weights to a single dominant one.
    pub scores: f64,
    /// kv.
    #[serde(flatten)]
    pub data: Data,
}

/// As many rows as the sequences have, and one more.
fn plain(
    lengths: [usize; 2],
    ratio: usize,
    overlaps: bool,
    [head_dim, rope_dim]: [usize; 2],
) -> CompressorCase {
    let [num_tokens, num_sequences] = lengths;
    let case = CompressorCase {
        num_tokens,
        num_sequences,
        num_entries: usize::MAX,
        ratio,
        overlaps,
        head_dim,
        rope_dim,
        table_rows: num_tokens.max(1),
        dtype: Float::Bf16,
        gradients: Float::F32,
        packing: Packing::Drawn,
        poison: false,
        saves_pooled: true,
        epilogue: Epilogue::None,
        eps: 1e-6,
        scores: 2.0,
        data: Data::normal(1.0),
    };
    CompressorCase { num_entries: case.num_rows() + 1, ..case }
}

/// Groups of 4 that overlap.
fn overlapping(num_tokens: usize, num_sequences: usize, head: [usize; 2]) -> CompressorCase {
    plain([num_tokens, num_sequences], OVERLAP_RATIO, true, head)
}

impl CompressorCase {
    fn width(&self) -> usize {
        if self.overlaps { 2 * self.head_dim } else { self.head_dim }
    }

    pub(crate) fn lengths(&self) -> Vec<usize> {
        match self.packing {
            Packing::Equal => {
                return vec![self.num_tokens / self.num_sequences.max(1); self.num_sequences];
            }
            Packing::Filled => {
                return ranks::lengths(self.data.seed, self.num_sequences, self.num_tokens);
            }
            Packing::Drawn => {}
        }
        let mut draw = Draw::new(self.data.seed, "lengths");
        let mut left = self.num_tokens - (self.num_tokens / 8).min(self.ratio + 1);
        let length = |number: usize| {
            let groups = left / self.ratio / (self.num_sequences - number).max(1);
            let of_groups = draw.rng().random_range(0..=2 * groups) * self.ratio;
            let drawn = match draw.rng().random_range(0..8) {
                0 => 0,
                1 => draw.rng().random_range(0..self.ratio),
                2 => of_groups,
                _ => of_groups + draw.rng().random_range(0..self.ratio),
            };
            let length = if number + 1 == self.num_sequences { left } else { drawn.min(left) };
            left -= length;
            length
        };
        (0..self.num_sequences).map(length).collect()
    }

    /// Ends of the sequences' tokens, and of their rows of entries. Drawn sequences have a row for
    /// an incomplete group.
    fn ends(&self) -> [Vec<i32>; 2] {
        let (mut ends, mut tokens, mut entries) = ([vec![0], vec![0]], 0, 0);
        for length in self.lengths() {
            tokens += length;
            let (ratio, drawn) = (self.ratio.max(1), self.packing == Packing::Drawn);
            let rows = if drawn { length.div_ceil(ratio) } else { length / ratio };
            entries = (entries + rows).min(self.num_entries);
            ends[0].push(tokens as i32);
            ends[1].push(entries as i32);
        }
        ends
    }

    /// Rows that the sequences have.
    fn num_rows(&self) -> usize {
        self.ends()[1].last().map_or(0, |&end| end as usize)
    }

    fn entries(&self) -> Vec<Entry> {
        let [cu_seqlens, cu_entries] = self.ends();
        reference::entries_of(&cu_seqlens, &cu_entries, self.ratio)
    }

    /// For each half of a token, row by row, whether an entry pools it.
    fn pooled_halves(&self) -> Vec<bool> {
        let halves = self.width() / self.head_dim;
        let mut pooled = vec![false; self.num_tokens * halves];
        for entry in self.entries() {
            for token in entry.token..entry.token + self.ratio {
                pooled[token * halves + halves - 1] = true;
                if self.overlaps && entry.position > 0 {
                    pooled[(token - self.ratio) * halves] = true;
                }
            }
        }
        pooled
    }

    fn has_backward(&self) -> bool {
        self.epilogue == Epilogue::None
    }

    fn extents(&self) -> Extents {
        let Self { num_tokens, num_entries, ratio, head_dim, .. } = *self;
        Extents { num_tokens, num_entries, ratio, width: self.width(), head_dim }
    }
}

fn inputs(c: &CompressorCase, t: &Bound<'_>) -> OracleResult<reference::Inputs> {
    let finish = Finish {
        norm_weight: t.f64("norm_weight")?,
        cos: t.f64("cos")?,
        sin: t.f64("sin")?,
        eps: t.scalar("eps", c.eps.into()),
        stored: format_of(c.dtype.dtype()).expect("a floating-point type"),
        epilogue: epilogue_of_oracle(c.epilogue),
    };
    Ok(reference::Inputs {
        kv: t.f64("kv")?,
        gate: t.f64("gate")?,
        ape: t.f64("ape")?,
        cu_seqlens: t.host().i32s("cu_seqlens"),
        cu_entries: t.host().i32s("cu_entries"),
        num_entries: c.num_entries,
        finish,
    })
}

/// The oracle's name for it.
pub(crate) fn epilogue_of_oracle(epilogue: Epilogue) -> reference::Epilogue {
    match epilogue {
        Epilogue::None => reference::Epilogue::None,
        Epilogue::Fp8 => reference::Epilogue::Fp8,
        Epilogue::HadamardFp4 => reference::Epilogue::HadamardFp4,
    }
}

/// Whether entries of this width have the epilogue.
pub(crate) fn check_epilogue(epilogue: Epilogue, head_dim: usize) -> Result<(), Refused> {
    if epilogue == Epilogue::HadamardFp4 && head_dim != hadamard::DIM {
        return refuse("epilogue", format!("the transform is one of {} channels", hadamard::DIM));
    }
    Ok(())
}

/// Channels of an entry that share a scale.
pub(crate) fn pooling_of(epilogue: Epilogue) -> Pooling {
    match epilogue {
        Epilogue::None => Pooling::LastAxis,
        Epilogue::Fp8 => Pooling::Group(64),
        Epilogue::HadamardFp4 => Pooling::Group(32),
    }
}

/// Entries with an epilogue equal the epilogue of entries without one, bit for bit.
pub(crate) fn made_by(epilogue: Epilogue, rope_dim: usize, dtype: Float) -> Relation {
    let stored = format_of(dtype.dtype()).expect("a floating-point type");
    let made = move |z: &HostTensor| -> OracleResult<Vec<f64>> {
        // Every value follows the hardware's rule, which allows only one result.
        let mut to_nearest = Rounding::new(Precision::Nearest { seed: 0 });
        let z = Tensor::from_vec(z.to_f64(), z.shape.as_slice(), &Cpu::Cpu)?;
        Ok(elements(&epilogue_of_oracle(epilogue).of(&z, rope_dim, stored, &mut to_nearest)?)?)
    };
    Relation::MadeOf(Rc::new(move |entries| made(entries).unwrap_or_default()))
}

/// The first token and the first row of entries of each sequence, and the ends.
fn set_ends(c: &CompressorCase, tensors: &mut Tensors) {
    let [cu_seqlens, cu_entries] = c.ends();
    tensors.put("cu_seqlens", HostTensor::from_i32(&[cu_seqlens.len()], &cu_seqlens));
    tensors.put("cu_entries", HostTensor::from_i32(&[cu_entries.len()], &cu_entries));
}

impl Operator for Compressor {
    type Case = CompressorCase;
    // A thread adds four values of a row.
    const SUM_LANES: usize = 4;

    const ABOUT: About = About {
        name: "compressor",
        family: Family::Cache,
        summary: "tokens pooled into entries by a softmax of each channel, which are normed and turned by position",
        specification: &["inference 5.4", "inference 6", "training 9"],
        paths: &[
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
        ],
        modules: launcher::modules,
        cases: [24, 60, 120],
    };

    const GOLDEN: &'static [&'static str] = &["compressor_csa", "compressor_hca"];

    fn tensors(c: &CompressorCase) -> Specs {
        let head_dim = axis("head_dim", c.head_dim).multiples(QUAD, MAX_HEAD_DIM);
        let tokens = [axis("num_tokens", c.num_tokens), axis("width", c.width())];
        let ape = [axis("ratio", c.ratio).multiples(1, MAX_RATIO), tokens[1]];
        let entries = [axis("num_entries", c.num_entries), head_dim];
        let ends: [Axis; 1] = [axis("num_sequences_and_one", c.num_sequences + 1)];
        let positions = [axis("table_rows", c.table_rows), axis("half_rope_dim", c.rope_dim / 2)];
        let scores = |name, axes: &[Axis]| {
            input(name, DType::F32, axes).drawn(Distribution::Normal, c.scores).bends_over(1.0)
        };
        let dtype = c.dtype.dtype();
        let tensors = [
            input("kv", DType::F32, &tokens).rows().of_any_size().drawn_as(c.data),
            scores("gate", &tokens).rows(),
            scores("ape", &ape),
            input("norm_weight", DType::F32, &entries[1..])
                .of_any_size()
                .drawn(Distribution::Normal, 1.0),
            input("cu_seqlens", DType::I32, &ends),
            input("cu_entries", DType::I32, &ends),
            input("cos", DType::F32, &positions).rows(),
            input("sin", DType::F32, &positions).rows(),
            output("entries", dtype, &entries)
                .rows()
                .only_in("forward")
                .pooled(pooling_of(c.epilogue)),
            output("pooled", dtype, &entries)
                .only_in(if c.saves_pooled { "forward" } else { "saving forward" })
                .when(c.saves_pooled || c.has_backward()),
            upstream("dentries", "entries").when(c.has_backward()),
            gradient("dkv", "kv", c.gradients.dtype()).when(c.has_backward()),
            gradient("dgate", "gate", c.gradients.dtype()).when(c.has_backward()),
            gradient("dape", "ape", DType::F32).when(c.has_backward()),
            gradient("dnorm_weight", "norm_weight", DType::F32).when(c.has_backward()),
            scratch("entries_of_saving_forward", dtype, &entries)
                .rows()
                .when(!c.saves_pooled && c.has_backward())
                .argument("entries"),
        ];
        Specs::new(c.data.seed, tensors).positive("eps", c.eps)
    }

    fn check(c: &CompressorCase) -> Result<(), Refused> {
        if c.ratio == 0 || c.overlaps && c.ratio != OVERLAP_RATIO {
            return refuse(
                "ratio",
                format!("{} must be 1 to 128, {OVERLAP_RATIO} where groups overlap", c.ratio),
            );
        }
        if !c.rope_dim.is_multiple_of(2) || c.rope_dim > c.head_dim {
            return refuse(
                "rope_dim",
                format!("{} must be even, and head_dim at most", c.rope_dim),
            );
        }
        if c.packing == Packing::Filled && c.num_sequences == 0 {
            return refuse("num_sequences", "0: filled sequences have all tokens");
        }
        if !c.overlaps && !c.saves_pooled {
            return refuse("saves_pooled", "without overlap what was pooled goes through memory");
        }
        not_empty("head_dim", c.head_dim)?;
        check_epilogue(c.epilogue, c.head_dim)?;
        c.data.check()
    }

    fn strategy(profile: Profile) -> BoxedStrategy<CompressorCase> {
        let tokens = profile.of([60usize, 150, 1500]);
        let heads = vec![[16usize, 8], [12, 12], [24, 4], [24, 10], [36, 0], [128, 64], [512, 64]];
        let ratio = prop_oneof![Just(128usize), 1..=9usize];
        let types = (Float::strategy(), Float::strategy());
        let form = (any::<bool>(), ratio, select(heads), types);
        let shape = (0..=tokens, 0..=6usize, -1..=2i64);
        let flags = (
            any::<bool>(),
            any::<bool>(),
            prop_oneof![6 => Just(1usize), 1 => Just(2)],
            drawn_epilogue(),
        );
        let numbers = (
            prop_oneof![3 => Just(1e-6f32), 1 => Just(1e-2f32)],
            select(vec![2.0, 2.0, 0.3, 60.0]),
        );
        (form, shape, flags, numbers, Data::strategy(-18..=18))
            .prop_map(
                |(
                    (overlaps, ratio, head, (dtype, gradients)),
                    (tokens, sequences, more),
                    flags,
                    numbers,
                    data,
                )| {
                    let ((poison, saves_pooled, shorter, epilogue), (eps, scores)) =
                        (flags, numbers);
                    let epilogue = of_width(epilogue, head[0]);
                    let ratio = if overlaps { OVERLAP_RATIO } else { ratio };
                    let tokens = tokens.max(if ratio == MAX_RATIO { 2 * tokens } else { 0 });
                    let tokens = tokens.min(LARGEST_DRAWN / 8 / head[0]);
                    let drawn = CompressorCase {
                        data,
                        num_entries: usize::MAX,
                        ..plain([tokens, sequences], ratio, overlaps, head)
                    };
                    let num_entries = (drawn.num_rows() as i64 + more).max(0) as usize;
                    let (table_rows, saves_pooled) =
                        (drawn.table_rows.div_ceil(shorter), saves_pooled || !overlaps);
                    CompressorCase {
                        num_entries,
                        dtype,
                        gradients,
                        poison,
                        saves_pooled,
                        epilogue,
                        table_rows,
                        eps,
                        scores,
                        ..drawn
                    }
                },
            )
            .boxed()
    }

    fn typical() -> Vec<CompressorCase> {
        let f32 = |case| CompressorCase { dtype: Float::F32, ..case };
        vec![
            overlapping(26, 3, [16, 8]),
            plain([23, 3], 3, false, [24, 8]).with(|case| case.gradients = Float::Bf16),
            // Rows that are not multiples of 16 bytes: the scalar kernels'.
            overlapping(19, 2, [12, 4]),
            plain([13, 2], 2, false, [8, 4]).then(f32),
            overlapping(13, 2, [80, 8]).with(|case| {
                case.epilogue = Epilogue::Fp8;
                case.saves_pooled = false;
            }),
            plain([9, 2], 2, false, [128, 8]).with(|case| case.epilogue = Epilogue::HadamardFp4),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<CompressorCase> {
        let poisoned = |case| CompressorCase { poison: true, ..case };
        let stored = |epilogue| move |case| CompressorCase { epilogue, ..case };
        let mut cases = vec![
            overlapping(0, 0, [16, 8]),
            plain([0, 1], 2, false, [8, 4]),
            // Shorter than a group; exactly one group; the table ends before the last entries.
            overlapping(3, 1, [16, 8]).then(poisoned),
            overlapping(8, 2, [16, 8]).with(|case| case.packing = Packing::Equal),
            overlapping(30, 2, [16, 8]).with(|case| {
                case.table_rows = 9;
                case.scores = 100.0;
            }),
            // The model's: several warps for each entry, one warp for each entry.
            overlapping(26, 3, [512, 64]).then(poisoned),
            overlapping(70, 5, [128, 64]).then(poisoned),
            plain([300, 2], 128, false, [72, 8]).then(poisoned),
            plain([20, 1], 10, false, [512, 64]).with(|case| case.packing = Packing::Equal),
            // Gradients in bf16, of halves of tokens and of whole ones that no entry pools, too.
            overlapping(27, 2, [16, 8]).with(|case| case.gradients = Float::Bf16),
            overlapping(14, 1, [12, 4]).with(|case| case.gradients = Float::Bf16),
            // As in inference.
            overlapping(21, 2, [16, 8]).with(|case| case.saves_pooled = false),
            // An entry takes two warps; more entries than blocks; too few rows.
            overlapping(30, 4, [140, 8]).then(poisoned),
            overlapping(400, 7, [8, 4]),
            overlapping(41, 4, [16, 0]).with(|case| case.num_entries = 3),
            plain([60, 3], 1, false, [8, 8]),
            // More sequences than a warp has lanes, and a row after the last one's.
            overlapping(700, 70, [8, 4]),
            // Scores of different warps' slots are so far apart that only the maximum over all
            // warps bounds their exponentials.
            plain([300, 2], 128, false, [72, 8]).with(|case| case.scores = 100.0),
            plain([40, 3], 5, false, [132, 4]).with(|case| case.num_entries = 2),
            // The model's in inference; an incomplete last group, and no group; the table ends
            // before the last entries.
            overlapping(26, 3, [512, 64])
                .then(poisoned)
                .with(|case| case.saves_pooled = false)
                .then(stored(Epilogue::Fp8)),
            overlapping(70, 5, [128, 64])
                .with(|case| case.saves_pooled = false)
                .then(stored(Epilogue::HadamardFp4)),
            plain([40, 3], 3, false, [128, 64])
                .with(|case| case.table_rows = 9)
                .then(stored(Epilogue::HadamardFp4)),
            plain([40, 3], 3, false, [140, 8])
                .with(|case| case.table_rows = 9)
                .then(stored(Epilogue::Fp8)),
            overlapping(30, 2, [72, 4])
                .with(|case| case.dtype = Float::F32)
                .then(stored(Epilogue::Fp8)),
            overlapping(9, 1, [8, 8]).then(stored(Epilogue::Fp8)),
            // A thread of which only the last pair is rotated.
            overlapping(26, 3, [16, 6]),
            plain([23, 3], 3, false, [24, 14]),
            overlapping(13, 2, [80, 10]).then(stored(Epilogue::Fp8)),
            overlapping(9, 1, [8, 2]),
        ];
        if profile == Profile::Full {
            cases.extend([
                overlapping(2000, 9, [512, 64]).then(poisoned),
                plain([3000, 5], 128, false, [512, 64]).then(poisoned),
            ]);
        }
        cases
    }

    fn amend(c: &CompressorCase, tensors: &mut Tensors) -> OracleResult<()> {
        set_ends(c, tensors);
        let parameters = YarnParameters { rope_dim: c.rope_dim, ..YarnParameters::compress() };
        let (cos, sin) =
            table(&inv_freq_f32(&parameters)?, &(0..c.table_rows as i64).collect::<Vec<_>>())?;
        // Rounded as a kernel stores them.
        tensors.set("cos", &elements(&cos)?);
        tensors.set("sin", &elements(&sin)?);
        if c.poison {
            let pooled = c.pooled_halves();
            for name in ["kv", "gate"] {
                let spoil = |(half, pooled): (&mut [f64], &bool)| {
                    if !pooled {
                        half.fill(f64::NAN)
                    }
                };
                tensors.edit(name, |x| x.chunks_mut(c.head_dim).zip(&pooled).for_each(spoil));
            }
        }
        Ok(())
    }

    fn forward(c: &CompressorCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        let named = reference::forward(&inputs(c, t)?, rounding)?;
        let pooled = (c.saves_pooled || c.has_backward())
            .then(|| named.tensor("pooled").cloned())
            .transpose()?;
        Ok(Named::new().with("entries", named.tensor("entries")?.clone()).maybe("pooled", pooled))
    }

    fn backward(c: &CompressorCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        if !c.has_backward() {
            return Ok(Named::new());
        }
        reference::backward(&inputs(c, t)?, &t.f64("dentries")?, None, rounding)
    }

    fn backward_of_saved(
        c: &CompressorCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        if !c.has_backward() {
            return Ok(Named::new());
        }
        reference::backward(&inputs(c, t)?, &t.f64("dentries")?, Some(&t.f64("pooled")?), rounding)
    }

    fn workspaces(
        c: &CompressorCase,
        _: &Views,
        device: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        Ok(vec![("workspace", launcher::workspace_bytes(device, &c.extents()))])
    }

    fn launch(c: &CompressorCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        let given = ["kv", "gate", "ape", "norm_weight", "cu_seqlens", "cu_entries", "cos", "sin"];
        let own = v.only(&given);
        if let Some(entries) = v.get("entries_of_saving_forward") {
            let own = own.clone().with("entries", entries).with("pooled", &v["pooled"]);
            launcher::forward(run.device(), &own, c.eps, c.epilogue)?;
        }
        let own = own.with("entries", &v["entries"]);
        let own = if c.saves_pooled { own.with("pooled", &v["pooled"]) } else { own };
        run.launch(|device| launcher::forward(device, &own, c.eps, c.epilogue))
    }

    fn launch_backward(
        c: &CompressorCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        let own = v.without(&["entries", "entries_of_saving_forward"]);
        run.launch(|device| launcher::backward(device, &own, c.eps))
    }

    fn oracle_elements(c: &CompressorCase) -> u128 {
        // Values, scores, exponentials and their gradients, for every slot.
        16 * c.num_entries as u128 * (2 * c.ratio * c.head_dim) as u128
    }

    fn invariant(_: &CompressorCase, _: bool) -> &'static [BatchAxis] {
        &[BatchAxis::Company]
    }

    fn batches(c: &CompressorCase, batches: &mut Batches<'_, Self>) {
        sequence_alone(c, batches);
    }

    fn laws(c: &CompressorCase, laws: &mut Laws<'_, Self>) {
        let halved = [
            ("entries", 0.5),
            ("pooled", 1.0),
            ("dkv", 0.5),
            ("dgate", 0.5),
            ("dape", 0.5),
            ("dnorm_weight", 1.0),
        ];
        // For entries stored as e4m3, the floor of scales does not scale.
        let halved = if c.epilogue == Epilogue::Fp8 { &halved[1..] } else { &halved[..] };
        laws.scale("the norm's weight scales once", "norm_weight", 0.5, halved);
        laws.scale("what is pooled is linear in kv", "kv", 4.0, &[("pooled", 4.0)]);
        laws.scale_upstreams();
        independence_law(c, laws);
        if !c.has_backward() {
            let made = made_by(c.epilogue, c.rope_dim, c.dtype);
            let change = |v: &mut Variant<Self>| {
                v.case.epilogue = Epilogue::None;
                // The variant has a backward, which is not used.
                let entries = [c.num_entries, c.head_dim];
                let dentries = HostTensor::from_f64(
                    c.dtype.dtype(),
                    &entries,
                    &vec![0.0; c.num_entries * c.head_dim],
                );
                v.tensors.put("dentries", dentries);
            };
            laws.law(EPILOGUE_LAW, change, [("entries", made)]);
        }
    }

    fn is_smooth(c: &CompressorCase) -> bool {
        let within_table = c
            .entries()
            .last()
            .is_none_or(|_| c.entries().iter().all(|e| e.position < c.table_rows));
        let small =
            Self::tensors(c).gradients().all(|(input, _)| input.elements() <= SMOOTH_ELEMENTS);
        small && within_table && !c.poison && c.entries().len() <= SMOOTH_ENTRIES
    }

    /// An entry bends over its own root mean square, or over the root of eps if that is larger.
    fn bends_over(c: &CompressorCase, tensors: &Tensors, input: &str) -> Option<Vec<f64>> {
        let kv = (input == "kv").then(|| tensors.values("kv"))?;
        let mean_square = kv.iter().map(|x| x * x).sum::<f64>() / kv.len().max(1) as f64;
        let scale = (mean_square + tensors.scalar("eps", c.eps.into())).sqrt();
        Some(vec![scale; kv.len()])
    }

    fn golden(file: &mut Reading<'_>) -> Result<Vec<Golden<CompressorCase>>, String> {
        let main = golden_case(
            file,
            "param.compressor",
            "out.compressed_kv",
            &["batch", "1", "entries", "head_dim"],
        )?;
        let golden = main.stored(
            file,
            "dentries",
            "gout.compressed_kv",
            &["batch", "1", "entries", "head_dim"],
        )?;
        let of = |name| format!("grad.param.compressor.{name}");
        let golden = golden.expect(file, "dape", &of("position_bias"), &["ratio", "width"])?;
        let golden = golden.expect(file, "dnorm_weight", &of("kv_norm.weight"), &["head_dim"])?;
        let mut all = vec![golden.computed_in_f32()];
        if file.kind() == "compressor_csa" {
            let axes = ["batch", "index_entries", "index_head_dim"];
            all.push(
                golden_case(file, "param.compressor.indexer", "mid.indexer.scorer.k", &axes)?
                    .computed_in_f32(),
            );
        }
        Ok(all)
    }

    /// The three configurations of the model: the entries of the two kinds of layers, and the
    /// indexer's.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let lengths = if on_gpu(environment) { &[[4096, 8], [32768, 64]][..] } else { &[[256, 2]] };
        let forms =
            [(OVERLAP_RATIO, true, 512), (OVERLAP_RATIO, true, 128), (MAX_RATIO, false, 512)];
        let all = lengths.iter().flat_map(|&lengths| forms.map(|form| (lengths, form)));
        let both = [Direction::Forward, Direction::Backward];
        all.flat_map(|(lengths, form)| both.map(|direction| benchmark(lengths, form, direction)))
            .collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![
            Reduced::both(
                &["32768x512 ratio 4"],
                json!({"num_tokens": 48, "num_sequences": 3, "num_entries": 12, "head_dim": 128, "table_rows": 16}),
                json!({"num_tokens": 24, "num_entries": 5}),
            ),
            Reduced::both(
                &["32768x512 ratio 128"],
                json!({"num_tokens": 1536, "num_sequences": 3, "num_entries": 12, "head_dim": 128, "table_rows": 512}),
                json!({"num_tokens": 768, "num_entries": 5}),
            ),
        ]
    }
}

/// The result of [`made_by`].
pub(crate) const EPILOGUE_LAW: &str = "an epilogue's entries are what their codes decode to";

/// Two of five cases have an epilogue.
pub(crate) fn drawn_epilogue() -> impl Strategy<Value = Epilogue> {
    prop_oneof![3 => Just(Epilogue::None), 1 => Just(Epilogue::Fp8), 1 => Just(Epilogue::HadamardFp4)]
}

/// The epilogue, or the other one where entries of this width do not support it.
pub(crate) fn of_width(epilogue: Epilogue, head_dim: usize) -> Epilogue {
    if check_epilogue(epilogue, head_dim).is_ok() { epilogue } else { Epilogue::Fp8 }
}

/// Small, because finite differences run the oracle dozens of times.
const SMOOTH_ELEMENTS: usize = 4096;
const SMOOTH_ENTRIES: usize = 64;

/// Sequences of one length; the last one is sampled.
fn benchmark(
    lengths: [usize; 2],
    (ratio, overlaps, head_dim): (usize, bool, usize),
    direction: Direction,
) -> Benchmark<Compressor> {
    let [num_tokens, num_sequences] = lengths;
    let packed = CompressorCase {
        packing: Packing::Equal,
        ..plain(lengths, ratio, overlaps, [head_dim, 64])
    };
    let (num_entries, table_rows) = (num_tokens / ratio, num_tokens / num_sequences);
    let saves_pooled = direction == Direction::Backward || !overlaps;
    // In inference an entry is stored in the format that attention, or the indexer, reads.
    let as_read = if head_dim == hadamard::DIM { Epilogue::HadamardFp4 } else { Epilogue::Fp8 };
    let epilogue = if direction == Direction::Forward { as_read } else { Epilogue::None };
    let case = CompressorCase { num_entries, table_rows, saves_pooled, epilogue, ..packed };
    let (axis, rows) = match direction {
        Direction::Forward => ("num_entries", num_entries / num_sequences),
        Direction::Backward => ("num_tokens", num_tokens / num_sequences),
    };
    // Score, maximum, exponential, two sums. The backward adds two products, a difference and a
    // sum.
    let flops = if direction == Direction::Forward { 6.0 } else { 12.0 };
    let name = format!("{num_tokens}x{head_dim} ratio {ratio}");
    let benchmark = Benchmark::new(direction, name, case, axis).streaming(&["pooled"], flops);
    let other = if direction == Direction::Forward { "num_tokens" } else { "num_entries" };
    Benchmark {
        rows,
        chosen: last,
        amend: set_ends,
        sampled: last_sequences,
        ..benchmark.also_drawn_along(other)
    }
}

/// Only the last of equally long sequences: as many as contain the sampled entries or tokens.
fn last_sequences(whole: &Whole<'_, Compressor>, c: &mut CompressorCase, tensors: &mut Tensors) {
    let length = whole.case.num_tokens / whole.case.num_sequences;
    let of_tokens = c.num_tokens < whole.case.num_tokens;
    c.num_sequences =
        if of_tokens { c.num_tokens / length } else { c.num_entries / (length / c.ratio) };
    (c.num_tokens, c.num_entries) =
        (c.num_sequences * length, c.num_sequences * (length / c.ratio));
    for (name, count) in [("kv", c.num_tokens), ("gate", c.num_tokens), ("dentries", c.num_entries)]
    {
        // Of the gradient, where there is a backward.
        let Some(tensor) = tensors.get(name) else { continue };
        let rows = tensor.shape[0];
        let narrowed =
            permuted_along(tensor, 0, &(rows - count.min(rows)..rows).collect::<Vec<_>>());
        tensors.put(name, narrowed);
    }
    set_ends(c, tensors);
}

/// Other values in the tokens of one sequence do not change another one.
fn independence_law(c: &CompressorCase, laws: &mut Laws<'_, Compressor>) {
    let [cu_seqlens, cu_entries] = c.ends();
    let lengths = cu_seqlens.windows(2).map(|ends| ends[1] - ends[0]);
    let longest =
        lengths.enumerate().max_by_key(|&(_, length)| length).filter(|&(_, length)| length > 0);
    let Some((sequence, _)) = longest else { return };
    let range = |ends: &[i32]| ends[sequence] as usize..ends[sequence + 1] as usize;
    let (tokens, rows, width) = (range(&cu_seqlens), range(&cu_entries), c.width());
    // Where all tokens are in the one sequence, nothing is compared.
    let others = |own: Range<usize>, extent: usize, names: [&'static str; 2]| {
        let some = own.len() < extent;
        let relation = Relation::EqualRows(Rc::new(move |row| !own.contains(&row)));
        let bound = some.then(|| names.map(|name| (name, relation.clone())));
        bound.into_iter().flatten()
    };
    let relations = others(rows, c.num_entries, ["entries", "pooled"]).chain(others(
        tokens.clone(),
        c.num_tokens,
        ["dkv", "dgate"],
    ));
    let changed = tokens.start * width..tokens.end * width;
    laws.law(
        "sequences know nothing of each other",
        |v| {
            for name in ["kv", "gate"] {
                v.tensors.edit(name, |x| x[changed.clone()].iter_mut().for_each(|x| *x = 3.0 - *x));
            }
        },
        relations.collect::<Vec<_>>(),
    );
}

/// The longest sequence alone: its tokens, and its entries with their positions.
fn sequence_alone(c: &CompressorCase, batches: &mut Batches<'_, Compressor>) {
    let [cu_seqlens, cu_entries] = c.ends();
    let lengths = cu_seqlens.windows(2).map(|ends| ends[1] - ends[0]);
    let longest = lengths.enumerate().max_by_key(|&(_, length)| length);
    let Some((sequence, _)) = longest.filter(|&(_, length)| length > 0) else { return };
    let range = |ends: &[i32], extent: usize| -> Vec<usize> {
        (ends[sequence] as usize..ends[sequence + 1] as usize).filter(|&at| at < extent).collect()
    };
    let (tokens, entries) = (range(&cu_seqlens, c.num_tokens), range(&cu_entries, c.num_entries));
    let pairs = |of_case: &[usize]| of_case.iter().copied().zip(0..).collect::<Vec<_>>();
    let mut same = batches.along("num_tokens", &pairs(&tokens));
    same.extend(batches.along("num_entries", &pairs(&entries)));
    let specs = Compressor::tensors(c);
    let extents = format!("sequence {sequence} of {} alone", c.num_sequences);
    batches.run(BatchAxis::Company, extents, |v| {
        (v.case.num_sequences, v.case.num_tokens, v.case.num_entries) =
            (1, tokens.len(), entries.len());
        v.tensors.permute(&specs, "num_tokens", &tokens);
        v.tensors.permute(&specs, "num_entries", &entries);
        let ends = |count: usize| HostTensor::from_i32(&[2], &[0, count as i32]);
        v.tensors.put("cu_seqlens", ends(tokens.len()));
        v.tensors.put("cu_entries", ends(entries.len()));
        same
    });
}

/// A compressor's data in a golden file.
pub(crate) struct Projections {
    /// Projections of the hidden states, `[batch, tokens, width]`.
    pub kv: Vec<f64>,
    /// Like `kv`.
    pub gate: Vec<f64>,
    /// `[ratio, width]`.
    pub ape: Vec<f64>,
    /// `[head_dim]`.
    pub norm_weight: Vec<f64>,
    /// Tokens of a group.
    pub ratio: usize,
    /// Whether groups overlap.
    pub overlaps: bool,
    /// Channels of an entry, and the channels that rotate.
    pub head: [usize; 2],
    /// Added to the mean square.
    pub eps: f64,
}

/// The compressor whose parameter names start with this prefix. The axis `head` has the channels of
/// its entries.
pub(crate) fn golden_projections(
    file: &mut Reading<'_>,
    parameters: &str,
    head: &str,
) -> Result<Projections, String> {
    let hidden = file.floats("in.hidden", &["batch", "tokens", "hidden"])?;
    let [rows, width] = ["rows", "columns"].map(|axis| format!("{parameters} {axis}"));
    let project = |file: &mut Reading<'_>, name: &str| -> Result<Vec<f64>, String> {
        let weight = file.floats(&format!("{parameters}.{name}.weight"), &[&width, "hidden"])?;
        let hidden_size = file.extent("hidden")?;
        let of_token = |token: &[f64]| {
            weight.chunks(hidden_size).map(|row| dot(row, token)).collect::<Vec<_>>()
        };
        Ok(hidden.chunks(hidden_size).flat_map(of_token).collect())
    };
    let (kv, gate) = (project(file, "kv_proj")?, project(file, "gate_proj")?);
    let ape = file.floats(&format!("{parameters}.position_bias"), &[&rows, &width])?.to_vec();
    let norm_weight = file.floats(&format!("{parameters}.kv_norm.weight"), &[head])?.to_vec();
    let (ratio, width, head_dim) = (file.extent(&rows)?, file.extent(&width)?, file.extent(head)?);
    let (head, eps) = ([head_dim, file.whole("qk_rope_head_dim")?], file.number("rms_norm_eps")?);
    Ok(Projections { kv, gate, ape, norm_weight, ratio, overlaps: width > head_dim, head, eps })
}

/// A compressor of a golden file, whose projections are rounded to f32.
fn golden_case(
    file: &mut Reading<'_>,
    parameters: &str,
    entries: &str,
    axes: golden::Axes<'_>,
) -> Result<Golden<CompressorCase>, String> {
    let given = golden_projections(file, parameters, axes.last().copied().unwrap_or("head_dim"))?;
    let (batch, tokens) = (file.extent("batch")?, file.extent("tokens")?);
    let (cos, sin) = golden_table(file, given.head[1], tokens)?;
    let case = CompressorCase {
        num_entries: batch * (tokens / given.ratio),
        packing: Packing::Equal,
        table_rows: tokens,
        dtype: Float::F32,
        eps: given.eps as f32,
        ..plain([batch * tokens, batch], given.ratio, given.overlaps, given.head)
    };
    let golden = Golden::new(case)
        .scalar("eps", given.eps)
        .values("kv", given.kv)
        .values("gate", given.gate);
    let golden = golden.values("ape", given.ape).values("norm_weight", given.norm_weight);
    golden.values("cos", cos).values("sin", sin).expect(file, "entries", entries, axes)
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// cos and sin of the positions from 0 on, by the file's parameters.
pub(crate) fn golden_table(
    file: &Reading<'_>,
    rope_dim: usize,
    positions: usize,
) -> Result<(Vec<f64>, Vec<f64>), String> {
    let parameters = &file.config("rope_parameters")["compress"];
    let number = |name: &str| {
        parameters[name].as_f64().ok_or_else(|| format!("rope_parameters have no `{name}`"))
    };
    let parameters = YarnParameters {
        theta: number("rope_theta")?,
        rope_dim,
        factor: Some(number("factor")?),
        original_max_position: number("original_max_position_embeddings")?,
        beta_fast: number("beta_fast")?,
        beta_slow: number("beta_slow")?,
    };
    let made = || {
        let (cos, sin) =
            table(&inv_freq_f32(&parameters)?, &(0..positions as i64).collect::<Vec<_>>())?;
        Ok((elements(&cos)?, elements(&sin)?))
    };
    made().map_err(|error: dsv4_reference::Error| error.to_string())
}
