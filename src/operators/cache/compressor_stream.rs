//! `compressor_stream` (inference 5.4, 6, 6.2): `kernels/cuda/cache/compressor_stream.cu` against
//! `reference/src/cache/compressor_stream.rs`.
//!
//! A case is several steps of the same sequences on one state. Each step is a separate call.

use dsv4_kernels::cache::compressor::{Epilogue, MAX_HEAD_DIM, MAX_RATIO, OVERLAP_RATIO, QUAD};
use dsv4_kernels::cache::compressor_stream as launcher;
use dsv4_reference::cache::compressor::Finish;
use dsv4_reference::cache::compressor_stream::{self as reference, Piece};
use dsv4_reference::projections::rope::{YarnParameters, inv_freq_f32, table};
use rand::Rng;
use rand::seq::SliceRandom;

use crate::operator::declaration::state;
use crate::operator::fields::elements;
use crate::operator::format_of;
use crate::operator::prelude::*;
use crate::operators::cache::compressor::{
    EPILOGUE_LAW, check_epilogue, drawn_epilogue, epilogue_of_oracle, golden_projections,
    golden_table, made_by, of_width, pooling_of,
};
use crate::operators::lists::Hostile;

/// The operator.
pub struct CompressorStream;

/// A case: sequences, their steps, sizes, types, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CompressorStreamCase {
    /// Sequences; 0 is allowed.
    pub num_sequences: usize,
    /// Tokens that a step adds to each sequence, step by step.
    pub chunks: Vec<usize>,
    /// Whether each sequence takes the chunks in a different order, starting at its own index.
    pub staggered: bool,
    /// Tokens at the end of each step that the next step rejects.
    pub drafts: usize,
    /// The position of the first sequence's first token. 0 starts all sequences at 0; otherwise
    /// each starts one further.
    pub position: usize,
    /// Slots of the state, at least as many as sequences.
    pub num_slots: usize,
    /// Rows of a slot: at least the slots of an entry plus the drafts.
    pub num_rows: usize,
    /// Rows of each step behind those of the last sequence, as a bucket of fixed size has.
    #[serde(default)]
    pub spare_entries: usize,
    /// Whether every third sequence has a nonexistent slot, and every second one a row too many.
    pub hostile: bool,
    /// Tokens of a group, 1 to 128; 4 where groups overlap.
    pub ratio: usize,
    /// Whether an entry also covers the group before its own.
    pub overlaps: bool,
    /// Channels of an entry, a multiple of 4 up to 512.
    pub head_dim: usize,
    /// Channels that rotate, the last ones: an even number.
    pub rope_dim: usize,
    /// Positions of the table; entries beyond are NaN.
    pub table_rows: usize,
    /// Type of entries.
    pub dtype: Float,
    /// The format of stored entries.
    pub epilogue: Epilogue,
    /// Whether slots start with NaN before new sequences use them.
    pub poison: bool,
    /// Added to the mean square.
    pub eps: f32,
    /// Deviation of gate and ape.
    pub scores: f64,
    /// kv, and C of the state.
    #[serde(flatten)]
    pub data: Data,
}

/// One step: the ranges of its tokens and entries among those of all steps.
struct Step {
    token: usize,
    num_tokens: usize,
    entry: usize,
    num_entries: usize,
    cu_seqlens: Vec<i32>,
    cu_entries: Vec<i32>,
    first_positions: Vec<i32>,
}

/// Sequences in twice as many slots, with the given steps.
fn plain(
    num_sequences: usize,
    chunks: &[usize],
    form: (usize, bool),
    head: [usize; 2],
) -> CompressorStreamCase {
    let (ratio, overlaps) = form;
    let slots = if overlaps { 2 * ratio } else { ratio };
    CompressorStreamCase {
        num_sequences,
        chunks: chunks.to_vec(),
        staggered: true,
        drafts: 0,
        position: 0,
        num_slots: 2 * num_sequences + 1,
        num_rows: slots + 1,
        spare_entries: 0,
        hostile: false,
        ratio,
        overlaps,
        head_dim: head[0],
        rope_dim: head[1],
        table_rows: chunks.iter().sum::<usize>() + num_sequences + 16,
        dtype: Float::Bf16,
        epilogue: Epilogue::None,
        poison: false,
        eps: 1e-6,
        scores: 2.0,
        data: Data::normal(1.0),
    }
}

const OVERLAP: (usize, bool) = (OVERLAP_RATIO, true);

impl CompressorStreamCase {
    fn width(&self) -> usize {
        if self.overlaps { 2 * self.head_dim } else { self.head_dim }
    }

    fn slots_of_an_entry(&self) -> usize {
        if self.overlaps { 2 * self.ratio } else { self.ratio }
    }

    /// Every step, in order.
    fn steps(&self) -> Vec<Step> {
        let begin = |sequence: usize| if self.position == 0 { 0 } else { self.position + sequence };
        let mut positions: Vec<usize> = (0..self.num_sequences).map(begin).collect();
        let (mut token, mut entry, mut steps) = (0, 0, Vec::new());
        for number in 0..self.chunks.len() {
            let first_positions = positions.iter().map(|&position| position as i32).collect();
            let (mut cu_seqlens, mut cu_entries) = (vec![0], vec![0]);
            for (sequence, position) in positions.iter_mut().enumerate() {
                let chunk = self.chunks
                    [(number + if self.staggered { sequence } else { 0 }) % self.chunks.len()];
                let tokens = chunk + self.drafts;
                let complete = (*position + tokens) / self.ratio - *position / self.ratio;
                let entries = complete + usize::from(self.hostile && sequence % 2 == 0);
                cu_seqlens.push(cu_seqlens[sequence] + tokens as i32);
                cu_entries.push(cu_entries[sequence] + entries as i32);
                *position += chunk;
            }
            let [num_tokens, num_entries] =
                [&cu_seqlens, &cu_entries].map(|ends| ends[self.num_sequences] as usize);
            let num_entries = num_entries + self.spare_entries;
            steps.push(Step {
                token,
                num_tokens,
                entry,
                num_entries,
                cu_seqlens,
                cu_entries,
                first_positions,
            });
            (token, entry) = (token + num_tokens, entry + num_entries);
        }
        steps
    }

    /// The same in one step. For one sequence the tokens of all steps are consecutive, and so are
    /// its entries.
    fn at_once(&self) -> Option<Self> {
        let one = self.num_sequences == 1 && self.drafts == 0 && !self.hostile;
        let whole = Self { chunks: vec![self.chunks.iter().sum()], ..self.clone() };
        (one && self.chunks.len() > 1).then_some(whole)
    }

    /// Tokens and entries of all steps.
    fn totals(&self) -> [usize; 2] {
        let steps = self.steps();
        [
            steps.iter().map(|step| step.num_tokens).sum(),
            steps.iter().map(|step| step.num_entries).sum(),
        ]
    }

    fn draw_slots(&self) -> Vec<i32> {
        let mut draw = Draw::new(self.data.seed, "slots");
        let mut order: Vec<i32> = (0..self.num_slots as i32).collect();
        order.shuffle(draw.rng());
        let values = [-1, self.num_slots as i32, i32::MAX, i32::MIN];
        let mut hostile = Hostile::new(self.data.seed, "slots", &values);
        let slot = |sequence: usize| match self.hostile && sequence % 3 == 1 {
            true => hostile.take(),
            false => order[sequence],
        };
        (0..self.num_sequences).map(slot).collect()
    }
}

/// The contents of the list tensors: the oracle's pieces, step by step.
fn pieces(c: &CompressorStreamCase, host: &Tensors) -> Vec<Piece> {
    let [cu_seqlens, cu_entries] = ["cu_seqlens", "cu_entries"].map(|name| host.i32s(name));
    let (first_positions, slots) = (host.i32s("first_positions"), host.i32s("slots"));
    let (mut token, mut entry, mut pieces) = (0, 0, Vec::new());
    let ends = c.num_sequences + 1;
    for step in 0..c.chunks.len() {
        let [tokens, entries] =
            [&cu_seqlens, &cu_entries].map(|all| &all[step * ends..(step + 1) * ends]);
        for sequence in 0..c.num_sequences {
            let range = |ends: &[i32]| {
                (ends[sequence] as usize, (ends[sequence + 1] - ends[sequence]) as usize)
            };
            let ((first_token, num_tokens), (first_entry, num_entries)) =
                (range(tokens), range(entries));
            pieces.push(Piece {
                token: token + first_token,
                num_tokens,
                position: first_positions[step * c.num_sequences + sequence] as usize,
                slot: usize::try_from(slots[sequence]).ok().filter(|&slot| slot < c.num_slots),
                entry: entry + first_entry,
                num_entries,
            });
        }
        token += tokens[c.num_sequences] as usize;
        entry += entries[c.num_sequences] as usize + c.spare_entries;
    }
    pieces
}

/// The lists of all steps.
fn set_steps(c: &CompressorStreamCase, tensors: &mut Tensors) {
    let steps = c.steps();
    let mut set =
        |name, list: Vec<i32>| tensors.put(name, HostTensor::from_i32(&[list.len()], &list));
    set("cu_seqlens", steps.iter().flat_map(|step| step.cu_seqlens.clone()).collect());
    set("cu_entries", steps.iter().flat_map(|step| step.cu_entries.clone()).collect());
    set("first_positions", steps.iter().flat_map(|step| step.first_positions.clone()).collect());
}

impl Operator for CompressorStream {
    type Case = CompressorStreamCase;
    // A thread adds four values of a row.
    const SUM_LANES: usize = 4;

    const ABOUT: About = About {
        name: "compressor_stream",
        family: Family::Cache,
        summary: "entries of growing sequences from a state of their last tokens; rejected tokens are written again",
        specification: &["inference 5.4", "inference 6", "inference 6.2"],
        paths: &[
            "compressor_stream_overlap_vector",
            "compressor_stream_overlap_scalar",
            "compressor_stream_pool_vector",
            "compressor_stream_pool_scalar",
            "compressor_stream_norm_write_vector",
            "compressor_stream_norm_write_scalar",
            "compressor_stream_write_vector",
            "compressor_stream_write_scalar",
            "compressor_stream_step_vector",
            "compressor_stream_step_scalar",
        ],
        modules: launcher::modules,
        cases: [24, 60, 120],
    };

    const GOLDEN: &'static [&'static str] = &["compressor_stream_csa", "compressor_stream_hca"];

    fn tensors(c: &CompressorStreamCase) -> Specs {
        let ([num_tokens, num_entries], steps) = (c.totals(), c.chunks.len());
        let head_dim = axis("head_dim", c.head_dim).multiples(QUAD, MAX_HEAD_DIM);
        let tokens = [axis("num_tokens", num_tokens), axis("width", c.width())];
        let ape = [axis("ratio", c.ratio).multiples(1, MAX_RATIO), tokens[1]];
        let rows = [
            axis("num_slots", c.num_slots),
            axis("num_rows", c.num_rows),
            axis("state_width", 2 * c.width()),
        ];
        let ends = [axis("num_sequences_and_one", steps * (c.num_sequences + 1))];
        let firsts = [axis(
            if steps == 1 { "num_sequences" } else { "num_steps_sequences" },
            steps * c.num_sequences,
        )];
        let positions = [axis("table_rows", c.table_rows), axis("half_rope_dim", c.rope_dim / 2)];
        let scores =
            |name, axes| input(name, DType::F32, axes).drawn(Distribution::Normal, c.scores);
        let tensors = [
            input("kv", DType::F32, &tokens).rows().drawn_as(c.data),
            scores("gate", &tokens).rows(),
            scores("ape", &ape),
            input("norm_weight", DType::F32, &[head_dim])
                .of_any_size()
                .drawn(Distribution::Normal, 1.0),
            state("state", DType::F32, &rows).rows().drawn(Distribution::Normal, c.scores),
            input("cu_seqlens", DType::I32, &ends),
            input("cu_entries", DType::I32, &ends),
            input("first_positions", DType::I32, &firsts),
            input("slots", DType::I32, &[axis("num_sequences", c.num_sequences)]),
            input("cos", DType::F32, &positions).rows(),
            input("sin", DType::F32, &positions).rows(),
            output("entries", c.dtype.dtype(), &[axis("num_entries", num_entries), head_dim])
                .rows()
                .pooled(pooling_of(c.epilogue)),
        ];
        Specs::new(c.data.seed, tensors).positive("eps", c.eps)
    }

    fn check(c: &CompressorStreamCase) -> Result<(), Refused> {
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
        if c.num_slots < c.num_sequences {
            return refuse(
                "num_slots",
                format!("{} must be at least the {} sequences", c.num_slots, c.num_sequences),
            );
        }
        if c.num_rows < c.slots_of_an_entry() + c.drafts {
            let least = c.slots_of_an_entry() + c.drafts;
            return refuse(
                "num_rows",
                format!("{} must be at least {least}, of an entry and the drafts", c.num_rows),
            );
        }
        check_epilogue(c.epilogue, c.head_dim)?;
        let (steps, tokens) = (
            c.chunks.len(),
            c.chunks.iter().try_fold(c.position, |sum, &chunk| sum.checked_add(chunk)),
        );
        let size = tokens.and_then(|tokens| {
            tokens.checked_add(steps.checked_mul(c.drafts)?)?.checked_mul(c.num_sequences)
        });
        if steps == 0 || steps > 1 << 16 || size.is_none_or(|size| size > 1 << 28) {
            return refuse(
                "chunks",
                format!("{steps} of them: there must be some, of fewer tokens"),
            );
        }
        c.data.check()
    }

    fn strategy(profile: Profile) -> BoxedStrategy<CompressorStreamCase> {
        let (most, steps) = (profile.of([9usize, 14, 40]), profile.of([5usize, 8, 12]));
        let heads = vec![[16usize, 8], [12, 12], [24, 4], [24, 10], [36, 0], [128, 64]];
        let form = (
            any::<bool>(),
            prop_oneof![4 => 1..=9usize, 1 => Just(40usize)],
            select(heads),
            Float::strategy(),
        );
        let chunks =
            prop::collection::vec(prop_oneof![2 => Just(1usize), 3 => 0..=most], 1..=steps);
        let shape = (
            0..=5usize,
            chunks,
            any::<bool>(),
            0..=3usize,
            prop_oneof![2 => Just(0usize), 1 => 1..=20usize],
        );
        let flags = (
            (any::<bool>(), prop_oneof![2 => Just(0usize), 1 => 1..=9usize]),
            any::<bool>(),
            0..=3usize,
            select(vec![2.0, 2.0, 0.3, 60.0]),
            drawn_epilogue(),
        );
        (form, shape, flags, Data::strategy(-12..=12))
            .prop_map(|((overlaps, ratio, head, dtype), shape, flags, data)| {
                let (sequences, chunks, staggered, drafts, position) = shape;
                let ((hostile, spare_entries), poison, more, scores, epilogue) = flags;
                let epilogue = of_width(epilogue, head[0]);
                let ratio = if overlaps { OVERLAP_RATIO } else { ratio };
                let plain = plain(sequences, &chunks, (ratio, overlaps), head);
                let (num_rows, table_rows) =
                    (plain.num_rows - 1 + drafts + more, plain.table_rows + position);
                let choice = CompressorStreamCase {
                    staggered,
                    drafts,
                    position,
                    spare_entries,
                    hostile,
                    poison,
                    dtype,
                    ..plain
                };
                CompressorStreamCase { num_rows, table_rows, epilogue, scores, data, ..choice }
            })
            .boxed()
    }

    fn typical() -> Vec<CompressorStreamCase> {
        // One step each: of new sequences, and of others; by the scalar kernels.
        let further = |case| CompressorStreamCase { position: 5, ..case };
        let f32 = |case| CompressorStreamCase { dtype: Float::F32, ..case };
        let stored = |epilogue| move |case| CompressorStreamCase { epilogue, ..case };
        vec![
            plain(3, &[6], OVERLAP, [16, 8]).then(further),
            plain(3, &[4], (3, false), [24, 8]).then(further).then(f32),
            plain(2, &[9], OVERLAP, [12, 4]),
            // With fewer entries, codes of 4 bits would hide an error of a tenth.
            plain(2, &[13], OVERLAP, [128, 8]).then(further).then(stored(Epilogue::HadamardFp4)),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<CompressorStreamCase> {
        let poisoned = |case| CompressorStreamCase { poison: true, ..case };
        let stored = |epilogue| move |case| CompressorStreamCase { epilogue, ..case };
        let rejecting = |drafts| {
            move |case: CompressorStreamCase| {
                let num_rows = case.slots_of_an_entry() + drafts;
                CompressorStreamCase { drafts, num_rows, ..case }
            }
        };
        let one = |chunks: &[usize]| plain(1, chunks, OVERLAP, [16, 8]).then(poisoned);
        let further = |case| CompressorStreamCase { position: 6, ..case };
        let mut cases: Vec<_> = (1..13).map(|border| one(&[border, 13 - border])).collect();
        cases.extend([
            plain(0, &[3], OVERLAP, [16, 8]),
            // Rows behind the last sequence's, more than there are sequences.
            plain(3, &[6, 2], OVERLAP, [16, 8]).then(further).with(|case| case.spare_entries = 7),
            plain(2, &[7], (3, false), [24, 8]).with(|case| case.spare_entries = 5),
            // The same of steps of one token.
            plain(9, &[1, 1], OVERLAP, [16, 8]).then(further).with(|case| case.spare_entries = 3),
            plain(9, &[1], OVERLAP, [12, 4]).then(further).with(|case| case.spare_entries = 3),
            // A thread of which only the last pair is rotated.
            plain(3, &[6], OVERLAP, [16, 6]).then(further),
            plain(2, &[7], (3, false), [24, 14]).then(further),
            plain(2, &[6], OVERLAP, [80, 10]).then(further).then(stored(Epilogue::Fp8)),
            one(&[1; 13]),
            plain(1, &[3, 1, 2, 1, 1, 6], (3, false), [16, 8]).then(poisoned),
            // Others in between, some without a slot; more tokens than rows.
            plain(5, &[3, 2, 1, 1, 40], OVERLAP, [16, 8])
                .then(poisoned)
                .with(|case| case.hostile = true),
            plain(4, &[1, 2, 1], (2, false), [24, 8]).with(|case| {
                case.hostile = true;
                case.position = 7;
            }),
            // Rejected tokens, with the least number of rows.
            plain(2, &[5, 1, 1, 2, 3, 1], OVERLAP, [16, 8]).then(poisoned).then(rejecting(1)),
            plain(2, &[5, 1, 1, 2, 3, 1], OVERLAP, [16, 8]).then(poisoned).then(rejecting(8)),
            plain(2, &[5, 1, 1, 2, 3, 1], (3, false), [24, 8]).then(poisoned).then(rejecting(5)),
            // A token or two for each sequence; all tokens of a step in one sequence, with more
            // tokens than rows.
            one(&[2; 7]),
            plain(6, &[12, 0, 0, 0, 0, 0], OVERLAP, [16, 8]).with(|case| case.position = 5),
            plain(5, &[1, 2, 1, 1], OVERLAP, [24, 8]).with(|case| {
                case.hostile = true;
                case.position = 5;
            }),
            plain(4, &[1; 4], OVERLAP, [12, 4]).then(further),
            plain(4, &[1; 4], OVERLAP, [128, 64]).then(further).then(stored(Epilogue::HadamardFp4)),
            plain(3, &[1, 2, 1], OVERLAP, [512, 64]).then(further).then(stored(Epilogue::Fp8)),
            // The model's heads.
            plain(2, &[7, 1, 4], OVERLAP, [512, 64]),
            plain(3, &[9, 2], OVERLAP, [128, 64]),
            plain(1, &[130, 126], (128, false), [36, 8]),
            // Exponentials of scores far from all other slots; the table ends just before an entry.
            plain(1, &[40, 24], (32, false), [36, 8]).with(|case| case.scores = 100.0),
            plain(1, &[7, 6], OVERLAP, [16, 8]).with(|case| case.table_rows = 8),
            // Stored as attention and the indexer read them; in steps, with an incomplete last
            // group.
            plain(2, &[7, 1, 4], OVERLAP, [512, 64]).then(poisoned).then(stored(Epilogue::Fp8)),
            plain(3, &[9, 2], OVERLAP, [128, 64])
                .then(poisoned)
                .then(stored(Epilogue::HadamardFp4)),
            plain(1, &[3, 1, 5, 4], OVERLAP, [128, 64])
                .then(poisoned)
                .then(stored(Epilogue::HadamardFp4)),
            plain(1, &[3, 1, 2, 1, 6], (3, false), [140, 8])
                .then(poisoned)
                .then(stored(Epilogue::Fp8)),
        ]);
        if profile == Profile::Full {
            cases.push(plain(3, &[700, 1, 5, 300, 1, 1], OVERLAP, [512, 64]));
            cases.push(plain(2, &[700, 1, 5, 300, 1, 17], (128, false), [512, 64]));
        }
        cases
    }

    fn amend(c: &CompressorStreamCase, tensors: &mut Tensors) -> OracleResult<()> {
        set_steps(c, tensors);
        tensors.set_i32s("slots", &c.draw_slots());
        let parameters = YarnParameters { rope_dim: c.rope_dim, ..YarnParameters::compress() };
        let (cos, sin) =
            table(&inv_freq_f32(&parameters)?, &(0..c.table_rows as i64).collect::<Vec<_>>())?;
        // Rounded as a kernel stores them.
        tensors.set("cos", &elements(&cos)?);
        tensors.set("sin", &elements(&sin)?);
        let mut draw = Draw::new(c.data.seed, "values of the state");
        let (width, poison) = (c.width(), c.poison && c.position == 0);
        tensors.edit("state", |rows| {
            for row in rows.chunks_mut(2 * width) {
                let values = draw.values(c.data.distribution, 1, width, c.data.magnitude);
                row[..width].copy_from_slice(&values);
                if poison && draw.rng().random_ratio(2, 3) {
                    row.fill(f64::NAN);
                }
            }
        });
        Ok(())
    }

    fn forward(
        c: &CompressorStreamCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        let finish = Finish {
            norm_weight: t.f64("norm_weight")?,
            cos: t.f64("cos")?,
            sin: t.f64("sin")?,
            eps: t.scalar("eps", c.eps.into()),
            stored: format_of(c.dtype.dtype()).expect("a floating-point type"),
            epilogue: epilogue_of_oracle(c.epilogue),
        };
        let inputs = reference::Inputs {
            kv: t.f64("kv")?,
            gate: t.f64("gate")?,
            ape: t.f64("ape")?,
            state: t.f64("state")?,
            finish,
            num_entries: c.totals()[1],
            pieces: pieces(c, t.host()),
        };
        reference::forward(&inputs, rounding)
    }

    fn workspaces(
        c: &CompressorStreamCase,
        _: &Views,
        _: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        let most = c.steps().iter().map(|step| step.num_entries).max().unwrap_or(0);
        let bytes = launcher::workspace_bytes(c.dtype.dtype(), most, c.head_dim);
        Ok(if c.overlaps { Vec::new() } else { vec![("workspace", bytes)] })
    }

    fn launch(
        c: &CompressorStreamCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        let steps = c.steps();
        if steps.len() == 1 {
            return run.launch(|device| launcher::forward(device, v, c.eps, c.epilogue));
        }
        let ends = c.num_sequences + 1;
        for (number, step) in steps.iter().enumerate() {
            let part = |name: &str, first: usize, count: usize| v[name].narrow(0, first, count);
            let lists = |name: &str, each: usize| part(name, number * each, each);
            let entries = part("entries", step.entry, step.num_entries)?;
            let own = v.clone().with("kv", &part("kv", step.token, step.num_tokens)?);
            let own = own
                .with("gate", &part("gate", step.token, step.num_tokens)?)
                .with("entries", &entries);
            let own = own
                .with("cu_seqlens", &lists("cu_seqlens", ends)?)
                .with("cu_entries", &lists("cu_entries", ends)?);
            let own = own.with("first_positions", &lists("first_positions", c.num_sequences)?);
            run.launch(|device| launcher::forward(device, &own, c.eps, c.epilogue))?;
            run.freeze(&entries)?;
        }
        Ok(())
    }

    fn invariant(_: &CompressorStreamCase, _: bool) -> &'static [BatchAxis] {
        &[BatchAxis::Chunks]
    }

    fn batches(c: &CompressorStreamCase, batches: &mut Batches<'_, Self>) {
        let Some(whole) = c.at_once() else { return };
        let [_, num_entries] = c.totals();
        let every = |count: usize| (0..count).map(|at| (at, at)).collect::<Vec<_>>();
        let same = vec![
            Same::along("entries", 0, &every(num_entries)),
            Same::along("state", 0, &every(c.num_slots)),
        ];
        batches.run(BatchAxis::Chunks, format!("{} steps against one", c.chunks.len()), |v| {
            set_steps(&whole, &mut v.tensors);
            v.case = whole;
            same
        });
    }

    fn laws(c: &CompressorStreamCase, laws: &mut Laws<'_, Self>) {
        // For entries stored as e4m3, the floor of scales does not scale.
        let halved = if c.epilogue == Epilogue::Fp8 {
            &[("state", 1.0)][..]
        } else {
            &[("entries", 0.5), ("state", 1.0)]
        };
        laws.scale("the norm's weight scales once", "norm_weight", 0.5, halved);
        if c.epilogue != Epilogue::None {
            let made = made_by(c.epilogue, c.rope_dim, c.dtype);
            let change = |v: &mut Variant<Self>| v.case.epilogue = Epilogue::None;
            laws.law(EPILOGUE_LAW, change, [("entries", made), ("state", Relation::Times(1.0))]);
        }
        if let Some(whole) = c.at_once() {
            laws.alike("in steps equals at once", Relation::Times(1.0), |v| {
                set_steps(&whole, &mut v.tensors);
                v.case = whole;
            });
        }
    }

    fn golden(file: &mut Reading<'_>) -> Result<Vec<Golden<CompressorStreamCase>>, String> {
        let axes: golden::Axes<'_> = &["batch", "1", "entries", "head_dim"];
        let mut all = vec![golden_case(file, "param.compressor", "out.compressed_kv", axes)?];
        if file.kind() == "compressor_stream_csa" {
            let axes: golden::Axes<'_> = &["batch", "entries", "index_head_dim"];
            all.push(golden_case(
                file,
                "param.compressor.indexer",
                "out.state.indexer.compressed_kv",
                axes,
            )?);
        }
        Ok(all)
    }

    /// A step of one token that completes an entry in every sequence, and one that completes none.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let numbers: &[usize] = if on_gpu(environment) { &[1, 128] } else { &[6] };
        let forms = [(OVERLAP, 512), (OVERLAP, 128), ((MAX_RATIO, false), 512)];
        let benchmark = |num_sequences: usize, (form, head_dim): ((usize, bool), usize)| {
            let plain = plain(num_sequences, &[1], form, [head_dim, 64]);
            // Positions differ: of the sequences with overlap, a quarter completes an entry.
            let position = 2 * form.0 - 1;
            let (num_rows, table_rows) = (plain.slots_of_an_entry(), position + num_sequences + 1);
            let epilogue = of_width(Epilogue::HadamardFp4, head_dim);
            let slots = CompressorStreamCase { num_rows, num_slots: num_sequences, ..plain };
            let aligned = CompressorStreamCase { position, table_rows, epilogue, ..slots };
            let name = format!("{num_sequences} sequences x{head_dim} ratio {}", form.0);
            let entries = aligned.totals()[1];
            let numbers = entries * aligned.slots_of_an_entry() * head_dim;
            Benchmark {
                // The slots of each entry, its row, and each token's row read and written.
                bytes: (8 * numbers + 2 * entries * head_dim + 16 * num_sequences * aligned.width())
                    as f64,
                flops: (6 * numbers) as f64,
                // All of them: an entry needs all its channels.
                rows: usize::MAX,
                ..Benchmark::new(Direction::Forward, name, aligned, "head_dim")
            }
        };
        numbers.iter().flat_map(|&number| forms.map(|form| benchmark(number, form))).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![
            Reduced::forward(
                &["128 sequences x512 ratio 4"],
                json!({"num_sequences": 6, "num_slots": 6, "head_dim": 128}),
                json!({}),
            ),
            // One entry in e2m1, where no value has power by itself: the state is compared.
            Reduced::forward(&["1 sequences x128 ratio 4"], json!({}), json!({})),
        ]
    }
}

/// A compressor of a golden file. Every sequence takes the same chunks. Entries here are ordered by
/// chunk, and in the file by sequence.
fn golden_case(
    file: &mut Reading<'_>,
    parameters: &str,
    entries: &str,
    axes: golden::Axes<'_>,
) -> Result<Golden<CompressorStreamCase>, String> {
    let given = golden_projections(file, parameters, axes.last().copied().unwrap_or("head_dim"))?;
    let chunks = file.config("chunks").as_array().ok_or("config has no `chunks`")?;
    let chunks = chunks
        .iter()
        .map(|chunk| chunk.as_u64().map(|chunk| chunk as usize))
        .collect::<Option<Vec<_>>>();
    let chunks = chunks.ok_or("`chunks` holds something else than numbers of tokens")?;
    let (batch, tokens) = (file.extent("batch")?, file.extent("tokens")?);
    file.hold("tokens", chunks.iter().sum(), "config.chunks")?;
    let [head_dim, rope_dim] = given.head;
    let plain = plain(batch, &chunks, (given.ratio, given.overlaps), [head_dim, rope_dim]);
    let (cos, sin) = golden_table(file, rope_dim, tokens)?;
    let (dtype, eps) = (Float::F32, given.eps as f32);
    let case = CompressorStreamCase { staggered: false, table_rows: tokens, dtype, eps, ..plain };
    // The same positions of each sequence in every step.
    let in_steps = |all: &[f64], of_positions: &dyn Fn(usize) -> usize, width: usize| -> Vec<f64> {
        let per_sequence = all.len() / batch;
        let (mut from, mut ordered) = (0, Vec::with_capacity(all.len()));
        for chunk in &chunks {
            let rows = of_positions(from) * width..of_positions(from + chunk) * width;
            (0..batch).for_each(|b| {
                ordered.extend_from_slice(
                    &all[b * per_sequence + rows.start..b * per_sequence + rows.end],
                )
            });
            from += chunk;
        }
        ordered
    };
    let of_tokens = |all: &[f64]| in_steps(all, &|position| position, case.width());
    let golden =
        Golden::new(case.clone()).scalar("eps", given.eps).values("kv", of_tokens(&given.kv));
    let golden = golden.values("gate", of_tokens(&given.gate)).values("ape", given.ape);
    let golden =
        golden.values("norm_weight", given.norm_weight).values("cos", cos).values("sin", sin);
    let of_entries = |all: &[f64]| in_steps(all, &|position| position / case.ratio, head_dim);
    Ok(golden.expect_reordered(file, "entries", entries, axes, &of_entries)?.computed_in_f32())
}
