//! `score_recompute` (training 5): `kernels/cuda/indexer/score_recompute.cu` and
//! `score_recompute_hopper.cu` against `reference/src/indexer/score_recompute.rs`.

use dsv4_kernels::indexer::score_recompute as launcher;
use dsv4_reference::indexer::score_recompute as reference;
use rand::seq::SliceRandom;

use crate::operator::benchmarks::Whole;
use crate::operator::fields::{Implementation, elements};
use crate::operator::prelude::*;
use crate::operator::tensors::permuted_along;
use crate::operators::attention::sinks::Sinks;
use crate::operators::head::logits;
use crate::operators::indexer::ranking::{self, Arrangement, RankedKeys, RankingClass};
use crate::operators::lists::{self, IndexClass, Lengths, compact, distinct};

/// The heads that a block of the kernel holds.
const LARGEST_HEADS: usize = 128;

/// The operator.
pub struct ScoreRecompute;

/// The normaliser of the exponentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormaliserClass {
    /// The log-sum-exp of only the ranked keys (V3.2).
    RankedKeys,
    /// That of the ranked keys and of a window together (V4).
    Joint,
}

/// A case: sizes, ranking, sequences, normaliser, scale, layout, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScoreRecomputeCase {
    /// Queries of all sequences; 0 is allowed.
    pub num_tokens: usize,
    /// Query heads, including padding heads; at most 128.
    pub num_heads: usize,
    /// That many of the last heads have q = 0 and an infinite lse: +inf and, for odd tokens, -inf.
    pub padding_heads: usize,
    /// Width of q and k: a multiple of 16 up to 576.
    pub head_dim: usize,
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
    /// Packed sequences, some without tokens or keys, followed by extra tokens and keys.
    /// Otherwise one sequence.
    pub packed: bool,
    /// Keys of the longest sequence that have no column. Of `causal` and `packed`, where lse is
    /// given.
    pub left_out: usize,
    /// The normaliser of the exponentials.
    pub normaliser: NormaliserClass,
    /// Whether lse is computed by the operator's own kernel, or given.
    pub recomputed: bool,
    /// How far the window's log-sum-exp is above that of the ranked keys. Far above, fp32 loses the
    /// row.
    pub outside: f64,
    /// The sinks.
    pub sinks: Sinks,
    /// Multiplies q·k.
    pub softmax_scale: f32,
    /// Standard deviation of the logits.
    pub logit_deviation: f64,
    /// Added to every logit.
    pub logit_shift: f64,
    /// Distribution of the data.
    pub distribution: Distribution,
    /// Whether keys that no valid slot references are NaN.
    pub poison_unreferenced: bool,
    /// Which kernels run. `score_recompute_lse` is portable only.
    pub implementation: Implementation,
    /// Everything is in the second of two sequences; the first is empty. A law's variant, which no
    /// JSON line can select.
    #[serde(skip)]
    whole: bool,
    /// Each token is a separate sequence, all with the same number of keys. A benchmark's sample,
    /// which no JSON line can select.
    #[serde(skip)]
    apart: bool,
    /// Seed of the data.
    pub seed: u64,
}

impl ScoreRecomputeCase {
    fn selected(
        num_tokens: usize,
        num_heads: usize,
        head_dim: usize,
        num_keys: usize,
        topk: usize,
    ) -> Self {
        Self {
            num_tokens,
            num_heads,
            padding_heads: 0,
            head_dim,
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
            normaliser: NormaliserClass::Joint,
            recomputed: false,
            outside: 0.0,
            sinks: Sinks::Normal,
            softmax_scale: (head_dim as f32).sqrt().recip(),
            logit_deviation: 2.0,
            logit_shift: 0.0,
            distribution: Distribution::Normal,
            poison_unreferenced: true,
            implementation: Implementation::Portable,
            whole: false,
            apart: false,
            seed: 1,
        }
    }

    fn causal(
        num_tokens: usize,
        num_heads: usize,
        head_dim: usize,
        num_keys: usize,
        ratio: usize,
    ) -> Self {
        let ranking = RankingClass::Causal;
        Self {
            ranking,
            ratio,
            q_off: true,
            ..Self::selected(num_tokens, num_heads, head_dim, num_keys, 0)
        }
    }

    /// The number of lists and of slots in each.
    fn lists(&self) -> [usize; 2] {
        [self.num_tokens, self.topk]
    }

    fn is_selected(&self) -> bool {
        self.ranking == RankingClass::Selected
    }

    /// The most keys that one token uses.
    fn slots(&self) -> usize {
        if self.is_selected() { self.topk } else { self.num_keys }
    }

    /// Whether a row of q or lse is of a padding head.
    fn is_padding(&self, row: usize) -> bool {
        row % self.num_heads >= self.num_heads - self.padding_heads
    }

    /// Which keys the tokens rank.
    fn ranked(&self) -> RankedKeys {
        let arrangement = match (self.whole, self.apart) {
            (true, _) => Arrangement::Whole,
            (_, true) => Arrangement::Apart,
            _ => Arrangement::AsDrawn,
        };
        RankedKeys {
            num_tokens: self.num_tokens,
            num_keys: self.num_keys,
            ranking: self.ranking,
            topk: self.topk,
            indices: self.indices,
            lengths: self.lengths,
            global: self.global,
            ratio: self.ratio,
            q_off: self.q_off,
            packed: self.packed,
            left_out: self.left_out,
            arrangement,
            seed: self.seed,
        }
    }

    fn sequences(&self) -> Option<reference::Sequences> {
        self.ranked().sequences()
    }

    /// Columns of the dense scores: the longest sequence's keys, without the skipped ones.
    fn columns(&self) -> usize {
        self.ranked().columns()
    }
}

impl Operator for ScoreRecompute {
    type Case = ScoreRecomputeCase;
    const SUM_LANES: usize = 4;

    const ABOUT: About = About {
        name: "score_recompute",
        family: Family::Indexer,
        summary: "the indexer's distillation target: attention scores summed over the heads, sparse or dense",
        specification: &["training 5"],
        paths: &[
            "score_recompute<16, selected>",
            "score_recompute<16, causal>",
            "score_recompute<64, selected>",
            "score_recompute<64, causal>",
            "score_recompute<128, selected>",
            "score_recompute<128, causal>",
            "score_recompute_hopper<64, selected>",
            "score_recompute_hopper<64, causal>",
            "score_recompute_hopper<128, selected>",
            "score_recompute_hopper<128, causal>",
            "score_recompute_lse<16, selected>",
            "score_recompute_lse<16, causal>",
            "score_recompute_lse<64, selected>",
            "score_recompute_lse<64, causal>",
            "score_recompute_lse<128, selected>",
            "score_recompute_lse<128, causal>",
        ],
        modules: launcher::modules,
        cases: [24, 60, 100],
    };

    fn tensors(c: &ScoreRecomputeCase) -> Specs {
        let (tokens, heads) = (
            axis("num_tokens", c.num_tokens),
            axis("num_heads", c.num_heads).multiples(1, LARGEST_HEADS),
        );
        let (keys, head_dim) =
            (axis("num_keys", c.num_keys), axis("head_dim", c.head_dim).multiples(16, 576));
        let (topk, columns) = (axis("topk", c.topk), axis("columns", c.columns()));
        let (selected, per_head) = (c.is_selected(), [tokens, heads]);
        let q_size = logits::query_size(c.logit_deviation, c.softmax_scale, c.head_dim);
        let lse = |axes: &[_]| match c.recomputed {
            true => output("lse", DType::F32, axes).only_in("lse"),
            false => input("lse", DType::F32, axes),
        };
        let joint = c.recomputed && c.normaliser == NormaliserClass::Joint;
        let operands = [
            input("q", DType::Bf16, &[tokens, heads, head_dim])
                .aligned_rows()
                .drawn(c.distribution, q_size),
            input("k", DType::Bf16, &[keys, head_dim]).aligned_rows().drawn(c.distribution, 1.0),
        ];
        let tensors = [
            input("sink", DType::F32, &[heads]).when(c.sinks != Sinks::Absent).only_in("scores"),
            input("lse_beside", DType::F32, &per_head).when(joint).only_in("lse"),
            lse(&per_head),
            output("target", DType::F32, &[tokens, topk]).rows().only_in("scores").when(selected),
            output("scores", DType::F32, &[tokens, columns])
                .rows()
                .only_in("scores")
                .when(!selected),
            output("l1", DType::F32, &[tokens]).when(!selected).only_in("scores"),
            output("shift", DType::F32, &[tokens]).when(!selected).only_in("scores"),
        ];
        let tensors = operands.into_iter().chain(c.ranked().tensors()).chain(tensors);
        let specs = Specs::new(c.seed, tensors).positive("softmax_scale", c.softmax_scale);
        let specs = specs
            .positive("logit_deviation", c.logit_deviation)
            .shift_of_logits("logit_deviation", c.logit_deviation);
        specs.shift_of_logits("logit_shift", c.logit_shift).shift_of_logits("outside", c.outside)
    }

    fn check(c: &ScoreRecomputeCase) -> Result<(), Refused> {
        if c.implementation == Implementation::Hopper && !c.head_dim.is_multiple_of(64) {
            return refuse(
                "implementation",
                format!("hopper takes multiples of 64, not head_dim {}", c.head_dim),
            );
        }
        if c.padding_heads > c.num_heads || c.recomputed && c.padding_heads > 0 {
            let reason = "it exceeds num_heads, or lse is recomputed, which knows of no padding";
            return refuse("padding_heads", format!("{}: {reason}", c.padding_heads));
        }
        if c.left_out > 0 && c.recomputed {
            return refuse(
                "left_out",
                format!("{}: an lse that is recomputed is of all keys", c.left_out),
            );
        }
        c.ranked().check()
    }

    fn oracle_elements(c: &ScoreRecomputeCase) -> u128 {
        lists::gathered(c.num_tokens, c.slots(), c.head_dim, c.num_heads)
    }

    fn strategy(profile: Profile) -> BoxedStrategy<ScoreRecomputeCase> {
        let lists = (IndexClass::strategy(), Lengths::strategy(), any::<bool>());
        let q_off = prop_oneof![3 => Just(true), 1 => Just(false)];
        let causal = (prop::sample::select(vec![1usize, 4, 128, 3]), q_off, ranking::left_out());
        let normaliser = (
            prop::sample::select(vec![NormaliserClass::Joint, NormaliserClass::RankedKeys]),
            any::<bool>(),
            prop_oneof![3 => Just(0.0), 1 => Just(8.0), 1 => Just(300.0)],
            Sinks::strategy(),
            prop_oneof![2 => Just(0usize), 1 => 1..=3usize],
        );
        // Powers of two and others; the model's own are 512^-1/2 and 192^-1/2.
        let scale = prop::sample::select(vec![0.044_194_174f32, 0.072_168_78, 0.125, 0.3, 1.0]);
        let logits = (
            scale,
            prop::sample::select(logits::DEVIATIONS.to_vec()),
            prop_oneof![4 => Just(0.0), 1 => Just(-200.0)],
        );
        let data = (
            prop::sample::select(vec![
                Distribution::Normal,
                Distribution::Uniform,
                Distribution::RowScaled,
            ]),
            any::<bool>(),
            prop_oneof![1 => Just(Implementation::Portable), 1 => Just(Implementation::Hopper)],
            0..1000u64,
        );
        (shape_strategy(profile), lists, causal, any::<bool>(), normaliser, logits, data)
            .prop_map(|(shape, lists, causal, packed, normaliser, logits, data)| {
                let (ranking, num_tokens, num_heads, head_dim, num_keys, topk) = shape;
                let (indices, lengths, global) = lists;
                let (ratio, q_off, left_out) = causal;
                let (normaliser, recomputed, outside, sinks, padding_heads) = normaliser;
                let (softmax_scale, logit_deviation, logit_shift) = logits;
                let (distribution, poison_unreferenced, implementation, seed) = data;
                // Only the portable kernel supports other widths.
                let hopper = head_dim.is_multiple_of(64);
                let implementation = if hopper { implementation } else { Implementation::Portable };
                // Scaled rows do not scale logits to hundreds.
                let logit_deviation =
                    if distribution == Distribution::RowScaled { 0.1 } else { logit_deviation };
                let topk = if ranking == RankingClass::Selected { topk } else { 0 };
                let padding_heads = if recomputed { 0 } else { padding_heads.min(num_heads - 1) };
                let columns = packed && !recomputed && ranking == RankingClass::Causal;
                let left_out = if columns { left_out } else { 0 };
                ScoreRecomputeCase {
                    num_tokens,
                    num_heads,
                    padding_heads,
                    head_dim,
                    num_keys,
                    ranking,
                    topk,
                    indices,
                    lengths,
                    global,
                    ratio,
                    q_off,
                    packed,
                    left_out,
                    normaliser,
                    recomputed,
                    outside,
                    sinks,
                    softmax_scale,
                    logit_deviation,
                    logit_shift,
                    distribution,
                    poison_unreferenced,
                    implementation,
                    whole: false,
                    apart: false,
                    seed,
                }
            })
            .boxed()
    }

    fn typical() -> Vec<ScoreRecomputeCase> {
        let (selected, causal) = (ScoreRecomputeCase::selected, ScoreRecomputeCase::causal);
        vec![
            selected(4, 5, 64, 40, 60).with(|case| {
                case.recomputed = true;
                case.lengths = Lengths::Within;
            }),
            causal(9, 17, 64, 90, 4).with(|case| case.packed = true).then(hopper),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<ScoreRecomputeCase> {
        let (selected, causal) = (ScoreRecomputeCase::selected, ScoreRecomputeCase::causal);
        let (v32, joint) = (NormaliserClass::RankedKeys, NormaliserClass::Joint);
        let mut cases = vec![
            selected(0, 4, 64, 9, 5),
            causal(0, 4, 64, 9, 4),
            selected(3, 5, 64, 0, 7).with(|case| {
                case.indices = IndexClass::Valid;
                case.recomputed = true;
            }),
            causal(3, 5, 64, 0, 4),
            selected(2, 3, 64, 11, 0),
            selected(3, 5, 64, 30, 270).with(|case| {
                case.indices = IndexClass::LeadingMasked;
                case.recomputed = true;
                case.logit_shift = -200.0;
            }),
            selected(3, 5, 512, 30, 270)
                .with(|case| {
                    case.indices = IndexClass::Valid;
                    case.recomputed = true;
                    case.logit_shift = -200.0;
                })
                .then(hopper),
            // Far from 0, and more heads than one row of products. This detects a running maximum
            // that does not start at -inf.
            selected(1, 17, 64, 30, 130).with(|case| {
                case.indices = IndexClass::Valid;
                case.recomputed = true;
                case.logit_shift = -200.0;
            }),
            selected(7, 10, 64, 23, 70).with(|case| {
                case.lengths = Lengths::Hostile;
                case.sinks = Sinks::Extreme;
            }),
            selected(9, 24, 64, 60, 65).with(|case| {
                case.packed = true;
                case.lengths = Lengths::Within;
            }),
            selected(9, 5, 64, 60, 65).with(|case| {
                case.packed = true;
                case.global = true;
                case.indices = IndexClass::Duplicates;
            }),
            selected(3, 5, 64, 40, 140).with(|case| {
                case.outside = 300.0;
                case.normaliser = joint;
                case.padding_heads = 2;
            }),
            causal(9, 5, 64, 400, 4).with(|case| {
                case.packed = true;
                case.recomputed = true;
                case.outside = 300.0;
            }),
            // Keys after the last column.
            causal(9, 5, 64, 200, 1).with(|case| {
                case.packed = true;
                case.left_out = 40;
                case.seed = 3;
            }),
            causal(5, 66, 64, 290, 1).with(|case| {
                case.normaliser = v32;
                case.sinks = Sinks::Absent;
                case.recomputed = true;
            }),
            causal(13, 5, 80, 9, 3).with(|case| {
                case.q_off = false;
                case.normaliser = v32;
                case.sinks = Sinks::Absent;
            }),
            selected(2, 20, 64, 40, 50).with(|case| case.recomputed = true),
            selected(2, 70, 64, 40, 50).with(|case| case.recomputed = true),
            causal(7, 20, 64, 40, 2).with(|case| case.recomputed = true),
            // Fewer columns than a panel has.
            selected(2, 3, 32, 20, 30),
            selected(2, 5, 512, 50, 70),
            selected(1, 66, 576, 33, 65).with(|case| {
                case.normaliser = v32;
                case.sinks = Sinks::Absent;
            }),
            // Several tiles, the last one partial.
            selected(1, 128, 512, 40, 270).then(hopper),
            selected(2, 64, 576, 40, 150).with(|case| case.lengths = Lengths::Within).then(hopper),
            selected(3, 17, 64, 23, 70)
                .with(|case| case.indices = IndexClass::EmptyRows)
                .then(hopper),
            selected(2, 40, 64, 40, 141)
                .with(|case| {
                    case.outside = 300.0;
                    case.padding_heads = 2;
                })
                .then(hopper),
            selected(2, 100, 64, 40, 300)
                .with(|case| {
                    case.outside = 300.0;
                    case.padding_heads = 2;
                })
                .then(hopper),
            causal(9, 17, 64, 200, 4)
                .with(|case| {
                    case.packed = true;
                    case.sinks = Sinks::Extreme;
                })
                .then(hopper),
            causal(3, 66, 128, 290, 1)
                .with(|case| {
                    case.outside = 300.0;
                    case.sinks = Sinks::Absent;
                })
                .then(hopper),
            selected(2, 70, 64, 11, 0).then(hopper),
        ];
        if profile == Profile::Full {
            cases.extend(production_cases());
        }
        cases
    }

    fn fastest(c: &ScoreRecomputeCase, environment: &Environment) -> ScoreRecomputeCase {
        let implementation =
            Implementation::fastest_for(environment, c.num_heads, c.head_dim.is_multiple_of(64));
        ScoreRecomputeCase { implementation, ..c.clone() }
    }

    fn cannot_run(c: &ScoreRecomputeCase, environment: &Environment) -> Option<String> {
        c.implementation.launcher().cannot_run_on(environment)
    }

    fn amend(c: &ScoreRecomputeCase, tensors: &mut Tensors) -> OracleResult<()> {
        logits::shift(tensors, c.logit_shift, c.softmax_scale, c.head_dim);
        tensors.edit("q", |q| {
            let rows = q.chunks_mut(c.head_dim.max(1)).enumerate();
            rows.filter(|(row, _)| c.is_padding(*row)).for_each(|(_, row)| row.fill(0.0));
        });
        c.ranked().amend(tensors);
        if let Some(sink) = c.sinks.draw(c.seed, c.num_heads, c.logit_shift) {
            tensors.put("sink", sink);
        }
        draw_normaliser(c, tensors)?;
        if c.poison_unreferenced {
            poison_unreferenced(c, tensors);
        }
        Ok(())
    }

    fn forward(
        c: &ScoreRecomputeCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        let inputs = inputs(c, t)?;
        let mut computed = Named::new();
        let lse = if c.recomputed {
            let lse = reference::lse(&inputs, t.maybe("lse_beside")?.as_ref(), rounding)?;
            computed = computed.with("lse", lse.clone());
            // The next kernel reads it from memory.
            rounding.f32(&lse)?
        } else {
            t.f64("lse")?
        };
        let normaliser = reference::Normaliser { lse, sink: t.maybe("sink")? };
        if c.is_selected() {
            return Ok(computed.with("target", reference::target(&inputs, &normaliser, rounding)?));
        }
        let outputs = reference::scores(&inputs, &normaliser, rounding)?;
        Ok(computed
            .with("scores", outputs.scores)
            .with("l1", outputs.l1)
            .with("shift", outputs.shift))
    }

    fn launch(
        c: &ScoreRecomputeCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        let ScoreRecomputeCase { global, ratio, softmax_scale, .. } = *c;
        let implementation = c.implementation.launcher();
        let options = launcher::Options { global, ratio, softmax_scale, implementation };
        if c.recomputed {
            run.launch(|device| launcher::lse(device, v, options))?;
            run.freeze(&v["lse"])?;
        }
        let launch = if c.is_selected() { launcher::target } else { launcher::scores };
        run.launch(|device| launch(device, v, options))
    }

    fn invariant(_: &ScoreRecomputeCase, _: bool) -> &'static [BatchAxis] {
        &[BatchAxis::Company, BatchAxis::Buckets, BatchAxis::Chunks]
    }

    fn batches(c: &ScoreRecomputeCase, batches: &mut Batches<'_, Self>) {
        if c.packed {
            batches.skip(BatchAxis::Company, "its sequences are packed");
        } else if c.is_selected() {
            batches.rows("num_tokens");
        } else {
            let first = batches.tensors().maybe_i32s("q_off").map_or(0, |offsets| offsets[0]);
            batches.chunks("num_tokens", |v, from, tokens| {
                (v.case.num_tokens, v.case.q_off) = (tokens, true);
                v.tensors.put("q_off", HostTensor::from_i32(&[1], &[first + from as i32]));
            });
        }
    }

    fn laws(c: &ScoreRecomputeCase, laws: &mut Laws<'_, Self>) {
        if c.num_tokens == 0 {
            return;
        }
        scale_law(laws);
        if c.packed {
            let equal = laws.all(Relation::Times(1.0));
            ranking::ends_law(laws, c.num_keys, equal);
        }
        laws.independent("num_tokens");
        if !c.packed {
            packing_law(laws);
        }
        if c.is_selected() && !c.packed {
            laws.permute("tokens may be permuted", "num_tokens");
        }
        if c.is_selected() && c.topk > 0 {
            slot_law(c, laws);
            padding_law(c, laws);
        }
        if !c.recomputed && c.num_heads + EXTRA_HEADS <= LARGEST_HEADS {
            padding_heads_law(c, laws);
        }
    }

    /// The sparse target of 4096 queries at the model's two head counts, and the dense scores.
    /// Every slot is valid.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let fastest = Implementation::fastest_on(environment);
        let form = |case| ScoreRecomputeCase {
            indices: IndexClass::Valid,
            global: true,
            normaliser: NormaliserClass::RankedKeys,
            logit_deviation: 1.0,
            poison_unreferenced: false,
            implementation: fastest,
            ..case
        };
        let selected = |tokens, heads, topk, keys| {
            form(ScoreRecomputeCase::selected(tokens, heads, 512, keys, topk))
        };
        let causal =
            |tokens, heads, keys| form(ScoreRecomputeCase::causal(tokens, heads, 512, keys, 4));
        if !on_gpu(environment) {
            return [selected(2, 16, 32, 64), causal(2, 16, 64)]
                .map(|case| timed(case, false))
                .into();
        }
        let (flash, pro, dense) = (
            selected(4096, 64, 512, 8192),
            selected(4096, 128, 1024, 8192),
            causal(4096, 64, 2048),
        );
        let all = [flash.clone(), pro.clone(), selected(4096, 128, 1024, 65536), dense.clone()];
        let portable =
            |case| ScoreRecomputeCase { implementation: Implementation::Portable, ..case };
        let portable = [flash, pro, dense].map(|case| timed(portable(case), true));
        all.map(|case| timed(case, false)).into_iter().chain(portable).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![
            Reduced::forward(
                &["q4096 k8192 H64 D512 topk512", "q4096 k8192 H64 D512 topk512 portable"],
                json!({"num_tokens": 7, "num_heads": 5, "num_keys": 90, "topk": 40}),
                json!({"num_tokens": 2, "num_keys": 44}),
            ),
            Reduced::forward(
                &["q4096 k2048 H64 D512 dense", "q4096 k2048 H64 D512 dense portable"],
                json!({"num_tokens": 9, "num_heads": 5, "num_keys": 30}),
                json!({"num_tokens": 2}),
            ),
        ]
    }
}

/// Mean of a benchmark's lse: that of a thousand standard normal logits.
const LSE: f64 = 7.4;
/// Tokens that a benchmark draws, because the oracle computes their lse.
const DRAWN_TOKENS: usize = 16;

/// A benchmark; `portable` means that its name contains it.
fn timed(case: ScoreRecomputeCase, portable: bool) -> Benchmark<ScoreRecompute> {
    let ScoreRecomputeCase { num_tokens, num_keys, num_heads, head_dim, topk, .. } = case;
    let ranking = if case.is_selected() { format!("topk{topk}") } else { "dense".to_owned() };
    let portable = Implementation::suffix(portable);
    let name = format!("q{num_tokens} k{num_keys} H{num_heads} D{head_dim} {ranking}{portable}");
    // Slots that count, over all tokens.
    let ranked: usize = match case.ranking {
        RankingClass::Selected => num_tokens * topk,
        RankingClass::Causal => {
            (0..num_tokens).map(|token| (first_position(&case) + token + 1) / case.ratio).sum()
        }
    };
    // One GEMM of 2·H·D FLOP for each slot. Every tensor once; rows of K once for each key.
    let (heads, rows) = (num_tokens * num_heads, 4 * num_tokens * case.slots());
    let lists = if case.is_selected() { rows } else { 0 };
    let flops = 2.0 * (ranked * num_heads * head_dim) as f64;
    Benchmark {
        drawn: ScoreRecomputeCase {
            num_tokens: num_tokens.min(DRAWN_TOKENS),
            num_keys: num_keys.min(DRAWN / head_dim),
            ..case.clone()
        },
        bytes: (2 * heads * head_dim
            + 4 * heads
            + 2 * num_keys.min(ranked) * head_dim
            + lists
            + rows) as f64,
        amend: |c, tensors| {
            if c.is_selected() {
                let lists =
                    distinct((c.seed, "indices"), [c.num_tokens, c.topk, c.num_keys], |_| 0);
                tensors.put("indices", HostTensor::from_i32(&[c.num_tokens, c.topk], &lists));
            } else {
                tensors.set_i32s("q_off", &[first_position(c) as i32]);
            }
            let mut draw = Draw::new(c.seed, "lse");
            tensors.edit("lse", |lse| lse.iter_mut().for_each(|lse| *lse = LSE + draw.normal()));
        },
        sampled: set_apart,
        ..Benchmark::new(Direction::Forward, name, case, "num_tokens").computing(flops)
    }
}

/// Position of the first query of a benchmark in the dense form: the last one sees the last key.
fn first_position(c: &ScoreRecomputeCase) -> usize {
    c.ratio * c.num_keys - c.num_tokens
}

/// Removes keys that no sampled token references. In the dense form each token becomes a separate
/// sequence.
fn set_apart(whole: &Whole<'_, ScoreRecompute>, c: &mut ScoreRecomputeCase, tensors: &mut Tensors) {
    if c.is_selected() {
        c.num_keys = compact(tensors, "indices", &["k"], 1);
        return;
    }
    let order: Vec<usize> = whole.rows.iter().flat_map(|_| 0..c.num_keys).collect();
    let keys = permuted_along(tensors.tensor("k"), 0, &order);
    tensors.put("k", keys);
    (c.apart, c.num_keys) = (true, order.len());
    let offsets: Vec<i32> =
        whole.rows.iter().map(|row| (first_position(whole.case) + row) as i32).collect();
    tensors.put("q_off", HostTensor::from_i32(&[offsets.len()], &offsets));
    if let Some(reference::Sequences { cu_q, cu_k }) = c.sequences() {
        tensors.put("cu_q", HostTensor::from_i32(&[cu_q.len()], &cu_q));
        tensors.put("cu_k", HostTensor::from_i32(&[cu_k.len()], &cu_k));
    }
}

fn inputs(c: &ScoreRecomputeCase, t: &Bound<'_>) -> OracleResult<reference::Inputs> {
    let ranking = c.ranked().reference(t.host());
    let softmax_scale = t.scalar("softmax_scale", f64::from(c.softmax_scale));
    Ok(reference::Inputs {
        q: t.f64("q")?,
        k: t.f64("k")?,
        ranking,
        sequences: c.sequences(),
        softmax_scale,
    })
}

fn hopper(case: ScoreRecomputeCase) -> ScoreRecomputeCase {
    ScoreRecomputeCase { implementation: Implementation::Hopper, ..case }
}

/// The heads and lists of the two production models, with as many tokens as the oracle can compute.
fn production_cases() -> Vec<ScoreRecomputeCase> {
    let (selected, causal) = (ScoreRecomputeCase::selected, ScoreRecomputeCase::causal);
    vec![
        selected(12, 64, 512, 4096, 512),
        selected(6, 128, 512, 4096, 1024),
        ScoreRecomputeCase {
            normaliser: NormaliserClass::RankedKeys,
            sinks: Sinks::Absent,
            ..selected(4, 128, 576, 3000, 2048)
        },
        ScoreRecomputeCase { recomputed: true, ..causal(6, 64, 512, 1100, 4) },
        ScoreRecomputeCase { recomputed: true, packed: true, ..causal(9, 128, 512, 2100, 128) },
        hopper(selected(12, 64, 512, 4096, 512)),
        hopper(selected(6, 128, 512, 4096, 1024)),
        hopper(ScoreRecomputeCase { sinks: Sinks::Absent, ..selected(4, 128, 576, 3000, 2048) }),
        hopper(causal(6, 64, 512, 1100, 4)),
        hopper(ScoreRecomputeCase { packed: true, ..causal(9, 128, 512, 2100, 128) }),
    ]
}

type Shape = (RankingClass, usize, usize, usize, usize, usize);

/// Ranking, tokens, heads, width, keys, slots. Each width is a separate module, so the choices are
/// few.
fn shape_strategy(profile: Profile) -> BoxedStrategy<Shape> {
    let ranking = || prop::sample::select(vec![RankingClass::Selected, RankingClass::Causal]);
    let heads =
        |largest: usize| prop_oneof![1 => Just(1usize), 1 => Just(16usize), 3 => 1..=largest];
    let slots =
        |largest: usize| prop_oneof![1 => Just(128usize), 1 => Just(1usize), 5 => 1..=largest];
    let narrow = || prop::sample::select(vec![64usize, 80]);
    let wide = || prop::sample::select(vec![512usize, 576]);
    let few = (ranking(), 1..=9usize, heads(40), narrow(), 1..=200usize, slots(280));
    match profile {
        Profile::Smoke | Profile::Quick => few.boxed(),
        Profile::Ci => {
            let wide = (ranking(), 1..=3usize, heads(20), wide(), 1..=90usize, slots(140));
            prop_oneof![5 => few, 1 => wide].boxed()
        }
        Profile::Full => {
            let many =
                (ranking(), 1..=16usize, heads(LARGEST_HEADS), narrow(), 1..=900usize, slots(700));
            let wide =
                (ranking(), 1..=6usize, heads(LARGEST_HEADS), wide(), 1..=900usize, slots(600));
            prop_oneof![1 => few, 2 => many, 2 => wide].boxed()
        }
    }
}

/// lse of the ranked keys, and of a window next to them, as a forward pass stores them.
fn draw_normaliser(c: &ScoreRecomputeCase, tensors: &mut Tensors) -> OracleResult<()> {
    let shape = [c.num_tokens, c.num_heads];
    let lse_of = |tensors: &Tensors, beside: Option<&HostTensor>| {
        let bound = Bound::new(tensors);
        let beside = beside.map(crate::operator::fields::widened).transpose()?;
        Ok::<_, dsv4_reference::Error>(elements(&reference::lse(
            &inputs(c, &bound)?,
            beside.as_ref(),
            &mut Rounding::exact(),
        )?)?)
    };
    let keys = lse_of(tensors, None)?;
    let mut draw = Draw::new(c.seed, "beside");
    // Infinities of both signs mean a window without a key, and rows without any key.
    let signs = [f64::INFINITY, f64::NEG_INFINITY];
    let beside = keys.iter().enumerate().map(|(i, &lse)| {
        let above = c.outside + 2.0 * draw.normal();
        let around = if lse.is_finite() { lse } else { c.logit_shift };
        if i % 11 == 5 { signs[i % 2] } else { around + above }
    });
    let beside = HostTensor::from_f64(DType::F32, &shape, &beside.collect::<Vec<_>>());
    let beside = (c.normaliser == NormaliserClass::Joint).then_some(beside);
    if c.recomputed {
        if let Some(beside) = beside {
            tensors.put("lse_beside", beside);
        }
        return Ok(());
    }
    let mut lse = lse_of(tensors, beside.as_ref())?;
    for (row, lse) in lse.iter_mut().enumerate() {
        if c.is_padding(row) || lse.is_infinite() {
            *lse = signs[row / c.num_heads % 2];
        }
    }
    tensors.set("lse", &lse);
    Ok(())
}

/// Sets every key row that no valid slot references to NaN.
fn poison_unreferenced(c: &ScoreRecomputeCase, tensors: &mut Tensors) {
    let mut referenced = vec![false; c.num_keys];
    for token in 0..c.num_tokens {
        for key in c.ranked().ranked_keys(tensors, token) {
            referenced[key] = true;
        }
    }
    let row = c.head_dim * DType::Bf16.size();
    let Some(k) = tensors.bytes_mut("k") else { return };
    for key in (0..c.num_keys).filter(|&key| !referenced[key]) {
        // 0xffff is NaN in bf16.
        k[key * row..(key + 1) * row].fill(0xff);
    }
}

/// Heads that the padding law adds.
const EXTRA_HEADS: usize = 3;

type ScoreLaws<'l> = Laws<'l, ScoreRecompute>;

/// `(a q) · k · (scale / a)` is the same logit: the scale is applied once, everywhere.
fn scale_law(laws: &mut ScoreLaws<'_>) {
    let relations = laws.all(Relation::Times(1.0));
    laws.exchange(
        "softmax_scale counts once",
        "q",
        "softmax_scale",
        |case| &mut case.softmax_scale,
        relations,
    );
}

/// One packed sequence with all tokens equals no packing.
fn packing_law(laws: &mut ScoreLaws<'_>) {
    let relations = laws.all(Relation::Times(1.0));
    let change = |v: &mut Variant<ScoreRecompute>| {
        v.case.whole = true;
        v.unsaid();
        if let Some(reference::Sequences { cu_q, cu_k }) = v.case.sequences() {
            v.tensors.put("cu_q", HostTensor::from_i32(&[3], &cu_q));
            v.tensors.put("cu_k", HostTensor::from_i32(&[3], &cu_k));
        }
        if let Some(offsets) = v.tensors.maybe_i32s("q_off") {
            v.tensors.put("q_off", HostTensor::from_i32(&[2], &[7, offsets[0]]));
        }
    };
    laws.law("one sequence may be packed", change, relations);
}

/// The order of the slots does not matter: each key keeps its target. Slots beyond a length stay
/// beyond it.
fn slot_law(c: &ScoreRecomputeCase, laws: &mut ScoreLaws<'_>) {
    let (topk, relations) = (c.topk, laws.all(Relation::WithinBudget));
    let change = |v: &mut Variant<ScoreRecompute>| {
        let before = v.tensors.i32s("indices");
        let (mut after, mut shown) = (before.clone(), vec![0; before.len()]);
        for (token, length) in
            lists::within_lengths(&v.tensors, "topk_length", c.lists()).into_iter().enumerate()
        {
            let mut order: Vec<usize> = (0..topk).collect();
            order[..length].shuffle(Draw::numbered(c.seed, "slots", token).rng());
            for (slot, &from) in order.iter().enumerate() {
                after[token * topk + slot] = before[token * topk + from];
                shown[token * topk + from] = token * topk + slot;
            }
        }
        v.tensors.set_i32s("indices", &after);
        v.show("target", &[c.num_tokens, topk], shown);
    };
    laws.law("slots may be permuted", change, relations);
}

/// Invalid slots at the end of a list change no bit.
fn padding_law(c: &ScoreRecomputeCase, laws: &mut ScoreLaws<'_>) {
    let (topk, relations) = (c.topk, laws.all(Relation::Times(1.0)));
    let extra = [-1, c.num_keys as i32, i32::MIN, i32::MAX, -1].repeat(28);
    let change = |v: &mut Variant<ScoreRecompute>| {
        let longer = topk + extra.len();
        v.case.topk = longer;
        lists::append(&mut v.tensors, ("indices", "topk_length"), c.lists(), &extra);
        let shown = (0..c.num_tokens)
            .flat_map(|token| (0..topk).map(move |slot| token * longer + slot))
            .collect();
        v.show("target", &[c.num_tokens, topk], shown);
    };
    laws.law("invalid slots add nothing", change, relations);
}

/// Heads with an lse of +inf add nothing, for any queries.
fn padding_heads_law(c: &ScoreRecomputeCase, laws: &mut ScoreLaws<'_>) {
    let heads = c.num_heads;
    // Blocks of 16, 64 and 128 heads add them in different orders. Hopper has no blocks of 16.
    let hopper = c.implementation == Implementation::Hopper;
    let blocks = if hopper { &[64, LARGEST_HEADS][..] } else { &[16, 64, LARGEST_HEADS] };
    let block = |heads: usize| blocks.iter().position(|&block| heads <= block);
    let same = block(heads) == block(heads + EXTRA_HEADS);
    let relations = laws.all(if same { Relation::Times(1.0) } else { Relation::WithinBudget });
    // The first head repeated for each of them.
    let order: Vec<usize> = (0..heads).chain([0; EXTRA_HEADS]).collect();
    let change = |v: &mut Variant<ScoreRecompute>| {
        v.case.num_heads += EXTRA_HEADS;
        v.case.padding_heads += EXTRA_HEADS;
        for (name, at) in [("q", 1), ("lse", 1), ("sink", 0)] {
            if let Some(longer) =
                v.tensors.get(name).map(|tensor| permuted_along(tensor, at, &order))
            {
                v.tensors.put(name, longer);
            }
        }
        let last = |values: &mut [f64], to: f64| {
            values.chunks_mut(heads + EXTRA_HEADS).for_each(|row| row[heads..].fill(to));
        };
        v.tensors.edit("lse", |lse| last(lse, f64::INFINITY));
        v.tensors.edit("sink", |sink| last(sink, 0.0));
    };
    laws.law("padding heads add nothing", change, relations);
}
