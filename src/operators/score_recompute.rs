//! `score_recompute` (training 5): `kernels/cuda/score_recompute.cu` and `score_recompute_hopper.cu` against
//! `reference/src/score_recompute.rs`.

use dsv4_kernels::runtime::{
    Contract, DType, Device, DeviceArena, Environment, HostTensor, Role, RuntimeError, TensorView,
};
use dsv4_kernels::score_recompute as launcher;
use dsv4_reference::precision::{Precision, Rounding};
use dsv4_reference::score_recompute as reference;
use proptest::prelude::*;
use proptest::strategy::BoxedStrategy;
use rand::Rng;
use rand::seq::SliceRandom;
use serde::{Deserialize, Serialize};

use super::sparse_attention::{IndexClass, Lengths, Sinks};
use super::{
    Implementation, deterministic, elements, layout, oracle_error, oracle_tensor, permuted, scaled, tensor, widened,
};
use crate::case::{Case, CaseError, Distribution, Draw};
use crate::judge::checks::permutation;
use crate::judge::golden::GoldenFile;
use crate::operator::{
    GoldenCase, KernelRun, Law, ModuleSpecification, Operator, OracleTensor, Prepared, Profile, Relation, Side,
};
use crate::record::OperatorRecord;

pub(crate) const NAME: &str = "score_recompute";
/// A block of the kernel holds so many heads.
const LARGEST_HEADS: usize = 128;

/// The operator.
pub struct ScoreRecompute;

/// Which keys a token ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RankingClass {
    /// A list of selected keys: the sparse target.
    Selected,
    /// All keys up to a causal limit: the dense scores.
    Causal,
}

/// What the exponentials are divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormaliserClass {
    /// The log-sum-exp of the ranked keys alone (V3.2).
    RankedKeys,
    /// That of the ranked keys and of a window beside them (V4).
    Joint,
}

/// A case: extents, ranking, sequences, normaliser, scale, layout, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScoreRecomputeCase {
    /// Queries of all sequences; 0 is legal.
    pub num_tokens: usize,
    /// Query heads, padding heads among them; at most 128.
    pub num_heads: usize,
    /// So many of the last heads have q = 0 and an infinite lse: +inf and, for odd tokens, -inf.
    pub padding_heads: usize,
    /// Width of q and k: a multiple of 16 up to 576.
    pub head_dim: usize,
    /// Keys of all sequences; 0 is legal.
    pub num_keys: usize,
    /// Which keys a token ranks.
    pub ranking: RankingClass,
    /// Slots of a list; 0 is legal. Of `selected`.
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
    /// Five packed sequences, one without tokens and one without keys, and tokens behind them; otherwise one.
    pub packed: bool,
    /// What the exponentials are divided by.
    pub normaliser: NormaliserClass,
    /// Whether lse is computed by the operator's own kernel, or given.
    pub recomputed: bool,
    /// How far the window's log-sum-exp lies above that of the ranked keys: far above, fp32 loses the row.
    pub outside: f64,
    /// The sinks.
    pub sinks: Sinks,
    /// Multiplies q·k.
    pub softmax_scale: f32,
    /// Standard deviation of the logits.
    pub logit_deviation: f64,
    /// Added to every logit.
    pub logit_shift: f64,
    /// Elements after each row, which belong to nobody; a multiple of 8.
    pub padding: usize,
    /// Distribution of the data.
    pub distribution: Distribution,
    /// Whether keys that no valid slot names are NaN.
    pub poison_unreferenced: bool,
    /// Which kernels run; portable in lines written before there was a choice. `score_recompute_lse` is portable only.
    #[serde(default)]
    pub implementation: Implementation,
    /// Seed of the data.
    pub seed: u64,
}

impl ScoreRecomputeCase {
    fn selected(num_tokens: usize, num_heads: usize, head_dim: usize, num_keys: usize, topk: usize) -> Self {
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
            normaliser: NormaliserClass::Joint,
            recomputed: false,
            outside: 0.0,
            sinks: Sinks::Normal,
            softmax_scale: (head_dim as f32).sqrt().recip(),
            logit_deviation: 2.0,
            logit_shift: 0.0,
            padding: 0,
            distribution: Distribution::Normal,
            poison_unreferenced: true,
            implementation: Implementation::Portable,
            seed: 1,
        }
    }

    fn causal(num_tokens: usize, num_heads: usize, head_dim: usize, num_keys: usize, ratio: usize) -> Self {
        let ranking = RankingClass::Causal;
        Self { ranking, ratio, q_off: true, ..Self::selected(num_tokens, num_heads, head_dim, num_keys, 0) }
    }

    fn check(&self) -> Result<(), CaseError> {
        let refuse = |field, reason: String| Err(CaseError::Field { operator: NAME, field, reason });
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(16) || self.head_dim > 576 {
            return refuse("head_dim", format!("{} must be a multiple of 16 up to 576", self.head_dim));
        }
        if self.implementation == Implementation::Hopper && !self.head_dim.is_multiple_of(64) {
            return refuse("implementation", format!("hopper takes multiples of 64, not head_dim {}", self.head_dim));
        }
        if self.num_heads == 0 || self.num_heads > LARGEST_HEADS {
            return refuse("num_heads", format!("{} must be 1 to {LARGEST_HEADS}", self.num_heads));
        }
        if self.padding_heads > self.num_heads || self.recomputed && self.padding_heads > 0 {
            let reason = "it exceeds num_heads, or lse is recomputed, which knows of no padding";
            return refuse("padding_heads", format!("{}: {reason}", self.padding_heads));
        }
        if self.ranking == RankingClass::Causal && self.topk > 0 {
            return refuse("topk", format!("{}: a causal ranking has no lists", self.topk));
        }
        if self.ratio == 0 || i32::try_from(self.ratio).is_err() {
            return refuse("ratio", format!("{} must be at least 1 and fit 32 bits", self.ratio));
        }
        if !(self.softmax_scale.is_finite() && self.softmax_scale > 0.0) {
            return refuse("softmax_scale", format!("{} must be finite and above 0", self.softmax_scale));
        }
        if !(self.logit_deviation.is_finite() && self.logit_deviation > 0.0 && self.logit_shift.is_finite()) {
            return refuse("logit_deviation", format!("{} must be finite and above 0", self.logit_deviation));
        }
        if !self.outside.is_finite() {
            return refuse("outside", format!("{} must be finite", self.outside));
        }
        if !self.padding.is_multiple_of(8) {
            return refuse("padding", format!("{} must be a multiple of 8: rows are 16-byte aligned", self.padding));
        }
        let slots = if self.ranking == RankingClass::Selected { self.topk } else { self.num_keys };
        let gathered = self.num_tokens.saturating_mul(slots).saturating_mul(self.head_dim.max(self.num_heads));
        let queries = self.num_tokens.saturating_mul(self.num_heads).saturating_mul(self.head_dim);
        if gathered.max(queries).max(self.num_keys.saturating_mul(self.head_dim)) > 1 << 31 {
            return refuse("num_tokens", "the case has more than 2^31 elements in one tensor".into());
        }
        Ok(())
    }
}

/// What a case's record may say that ran.
const PATHS: &[&str] = &[
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
];

impl Operator for ScoreRecompute {
    fn describe(&self) -> OperatorRecord {
        let list = |items: &[&str]| items.iter().map(|item| (*item).to_owned()).collect();
        OperatorRecord {
            name: NAME.into(),
            summary: "the indexer's distillation target: attention scores summed over the heads, sparse or dense"
                .into(),
            specification: list(&["training 5"]),
            kernel_file: "kernels/cuda/score_recompute.cu".into(),
            oracle_file: "reference/src/score_recompute.rs".into(),
            dtypes: list(&["q, k bf16", "lse, sink, target, scores, l1 f32", "indices i32"]),
            axes: list(&[
                "extents",
                "sparse or dense",
                "index classes",
                "lengths",
                "local or global indices",
                "ratio and offsets",
                "packed sequences",
                "normaliser",
                "lse given or recomputed",
                "mass outside",
                "sinks",
                "padding heads",
                "scale",
                "logit size",
                "strides",
                "distribution",
                "unreferenced NaN",
                "implementation",
            ]),
            has_backward: false,
            paths: list(PATHS),
        }
    }

    fn strategy(&self, profile: Profile) -> BoxedStrategy<Case> {
        let lists = (
            prop::sample::select(vec![
                IndexClass::Valid,
                IndexClass::Duplicates,
                IndexClass::Hostile,
                IndexClass::LeadingMasked,
                IndexClass::EmptyRows,
            ]),
            prop::sample::select(vec![Lengths::Absent, Lengths::Within, Lengths::Hostile]),
            any::<bool>(),
        );
        let causal = (prop::sample::select(vec![1usize, 4, 128, 3]), prop_oneof![3 => Just(true), 1 => Just(false)]);
        let normaliser = (
            prop::sample::select(vec![NormaliserClass::Joint, NormaliserClass::RankedKeys]),
            any::<bool>(),
            prop_oneof![3 => Just(0.0), 1 => Just(8.0), 1 => Just(300.0)],
            prop::sample::select(vec![Sinks::Normal, Sinks::Absent, Sinks::Extreme]),
            prop_oneof![2 => Just(0usize), 1 => 1..=3usize],
        );
        // Powers of two and not; the model's own are 512^-1/2 and 192^-1/2.
        let scale = prop::sample::select(vec![0.044_194_174f32, 0.072_168_78, 0.125, 0.3, 1.0]);
        let logits = (scale, prop::sample::select(vec![0.5, 2.0, 4.0]), prop_oneof![4 => Just(0.0), 1 => Just(-200.0)]);
        let data = (
            prop_oneof![3 => Just(0usize), 1 => Just(8usize), 1 => Just(24usize)],
            prop::sample::select(vec![Distribution::Normal, Distribution::Uniform, Distribution::RowScaled]),
            any::<bool>(),
            prop_oneof![1 => Just(Implementation::Portable), 1 => Just(Implementation::Hopper)],
            0..1000u64,
        );
        (shape_strategy(profile), lists, causal, any::<bool>(), normaliser, logits, data)
            .prop_map(|(shape, lists, causal, packed, normaliser, logits, data)| {
                let (ranking, num_tokens, num_heads, head_dim, num_keys, topk) = shape;
                let (indices, lengths, global) = lists;
                let (ratio, q_off) = causal;
                let (normaliser, recomputed, outside, sinks, padding_heads) = normaliser;
                let (softmax_scale, logit_deviation, logit_shift) = logits;
                let (padding, distribution, poison_unreferenced, implementation, seed) = data;
                // Other widths have the portable kernel only.
                let hopper = head_dim.is_multiple_of(64);
                let implementation = if hopper { implementation } else { Implementation::Portable };
                // Scaled rows do not scale logits to hundreds.
                let logit_deviation = if distribution == Distribution::RowScaled { 0.1 } else { logit_deviation };
                let topk = if ranking == RankingClass::Selected { topk } else { 0 };
                let padding_heads = if recomputed { 0 } else { padding_heads.min(num_heads - 1) };
                let case = ScoreRecomputeCase {
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
                    normaliser,
                    recomputed,
                    outside,
                    sinks,
                    softmax_scale,
                    logit_deviation,
                    logit_shift,
                    padding,
                    distribution,
                    poison_unreferenced,
                    implementation,
                    seed,
                };
                Case::new(NAME, &case)
            })
            .boxed()
    }

    fn corner_cases(&self, profile: Profile) -> Vec<Case> {
        let (selected, causal) = (ScoreRecomputeCase::selected, ScoreRecomputeCase::causal);
        let (v32, joint) = (NormaliserClass::RankedKeys, NormaliserClass::Joint);
        let mut cases = vec![
            selected(0, 4, 64, 9, 5),
            causal(0, 4, 64, 9, 4),
            ScoreRecomputeCase { indices: IndexClass::Valid, recomputed: true, ..selected(3, 5, 64, 0, 7) },
            causal(3, 5, 64, 0, 4),
            selected(2, 3, 64, 11, 0),
            ScoreRecomputeCase {
                indices: IndexClass::LeadingMasked,
                recomputed: true,
                logit_shift: -200.0,
                ..selected(3, 5, 64, 30, 270)
            },
            // Far from 0, and more heads than one row of products: a running maximum that starts anywhere but at -inf.
            ScoreRecomputeCase {
                indices: IndexClass::Valid,
                recomputed: true,
                logit_shift: -200.0,
                ..selected(1, 17, 64, 30, 130)
            },
            ScoreRecomputeCase { lengths: Lengths::Hostile, sinks: Sinks::Extreme, ..selected(7, 10, 64, 23, 70) },
            ScoreRecomputeCase { packed: true, lengths: Lengths::Within, ..selected(9, 24, 64, 60, 65) },
            ScoreRecomputeCase {
                packed: true,
                global: true,
                indices: IndexClass::Duplicates,
                ..selected(9, 5, 64, 60, 65)
            },
            ScoreRecomputeCase { outside: 300.0, normaliser: joint, padding_heads: 2, ..selected(3, 5, 64, 40, 140) },
            ScoreRecomputeCase { packed: true, recomputed: true, outside: 300.0, ..causal(9, 5, 64, 400, 4) },
            ScoreRecomputeCase { normaliser: v32, sinks: Sinks::Absent, recomputed: true, ..causal(5, 66, 64, 290, 1) },
            ScoreRecomputeCase { q_off: false, normaliser: v32, sinks: Sinks::Absent, ..causal(13, 5, 80, 9, 3) },
            ScoreRecomputeCase { recomputed: true, ..selected(2, 20, 64, 40, 50) },
            ScoreRecomputeCase { recomputed: true, ..selected(2, 70, 64, 40, 50) },
            ScoreRecomputeCase { recomputed: true, ..causal(7, 20, 64, 40, 2) },
            // Fewer columns than a panel has.
            selected(2, 3, 32, 20, 30),
            selected(2, 5, 512, 50, 70),
            ScoreRecomputeCase { normaliser: v32, sinks: Sinks::Absent, ..selected(1, 66, 576, 33, 65) },
            // Several tiles, the last one cut short.
            hopper(selected(1, 128, 512, 40, 270)),
            hopper(ScoreRecomputeCase { lengths: Lengths::Within, ..selected(2, 64, 576, 40, 150) }),
            hopper(ScoreRecomputeCase { indices: IndexClass::EmptyRows, ..selected(3, 17, 64, 23, 70) }),
            hopper(ScoreRecomputeCase { outside: 300.0, padding_heads: 2, padding: 8, ..selected(2, 40, 64, 40, 141) }),
            hopper(ScoreRecomputeCase { outside: 300.0, padding_heads: 2, ..selected(2, 100, 64, 40, 300) }),
            hopper(ScoreRecomputeCase { packed: true, sinks: Sinks::Extreme, ..causal(9, 17, 64, 200, 4) }),
            hopper(ScoreRecomputeCase { outside: 300.0, sinks: Sinks::Absent, ..causal(3, 66, 128, 290, 1) }),
            hopper(selected(2, 70, 64, 11, 0)),
        ];
        if profile == Profile::Full {
            cases.extend(production_cases());
        }
        cases.iter().map(|case| Case::new(NAME, case)).collect()
    }

    fn default_cases(&self, profile: Profile) -> usize {
        match profile {
            Profile::Quick => 24,
            Profile::Ci => 60,
            Profile::Full => 100,
        }
    }

    fn modules(&self) -> Vec<ModuleSpecification> {
        launcher::modules()
    }

    fn cannot_run(&self, case: &Case, environment: &Environment) -> Option<String> {
        // A case that is not understood is no skip: to prepare it will say what is wrong.
        let case: ScoreRecomputeCase = case.fields().ok()?;
        case.implementation.launcher().cannot_run_on(environment)
    }

    fn prepare(&self, case: &Case) -> Result<Box<dyn Prepared>, CaseError> {
        let case: ScoreRecomputeCase = case.fields()?;
        case.check()?;
        Ok(Box::new(Inputs::draw(case).map_err(|e| oracle_error(NAME, e))?))
    }

    /// No golden file is about the target.
    fn golden(&self, _: &GoldenFile) -> Result<Vec<GoldenCase>, CaseError> {
        Ok(Vec::new())
    }
}

fn hopper(case: ScoreRecomputeCase) -> ScoreRecomputeCase {
    ScoreRecomputeCase { implementation: Implementation::Hopper, ..case }
}

/// The heads and lists of the two production models, with as many tokens as the oracle can bear.
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

/// Ranking, tokens, heads, width, keys, slots. The widths are few because each is a module of its own.
fn shape_strategy(profile: Profile) -> BoxedStrategy<Shape> {
    let ranking = || prop::sample::select(vec![RankingClass::Selected, RankingClass::Causal]);
    let heads = |largest: usize| prop_oneof![1 => Just(1usize), 1 => Just(16usize), 3 => 1..=largest];
    let slots = |largest: usize| prop_oneof![1 => Just(128usize), 1 => Just(1usize), 5 => 1..=largest];
    let narrow = || prop::sample::select(vec![64usize, 80]);
    let wide = || prop::sample::select(vec![512usize, 576]);
    let few = (ranking(), 1..=9usize, heads(40), narrow(), 1..=200usize, slots(280));
    match profile {
        Profile::Quick => few.boxed(),
        Profile::Ci => {
            let wide = (ranking(), 1..=3usize, heads(20), wide(), 1..=90usize, slots(140));
            prop_oneof![5 => few, 1 => wide].boxed()
        }
        Profile::Full => {
            let many = (ranking(), 1..=16usize, heads(LARGEST_HEADS), narrow(), 1..=900usize, slots(700));
            let wide = (ranking(), 1..=6usize, heads(LARGEST_HEADS), wide(), 1..=900usize, slots(600));
            prop_oneof![1 => few, 2 => many, 2 => wide].boxed()
        }
    }
}

/// A case with its tensors.
#[derive(Clone)]
struct Inputs {
    case: ScoreRecomputeCase,
    q: HostTensor,
    k: HostTensor,
    indices: Vec<i32>,
    topk_length: Option<Vec<i32>>,
    sequences: Option<reference::Sequences>,
    q_off: Option<Vec<i32>>,
    /// What is given: the normaliser, or (recomputed) what lies beside the keys.
    lse: Option<HostTensor>,
    lse_beside: Option<HostTensor>,
    sink: Option<HostTensor>,
    /// The oracle's scale, of which the case's is the rounded value.
    softmax_scale: f64,
    /// Which slots of each token are looked at, in which order; `None` is all as they are. Of `selected`.
    shown: Option<Vec<Vec<usize>>>,
}

impl Inputs {
    fn draw(case: ScoreRecomputeCase) -> Result<Self, dsv4_reference::Error> {
        let rows = case.num_tokens * case.num_heads;
        let values = |name: &str, rows: usize, magnitude: f64| {
            Draw::new(case.seed, name).values(case.distribution, rows, case.head_dim, magnitude)
        };
        let scale = f64::from(case.softmax_scale);
        let q_size = case.logit_deviation / (scale * (case.head_dim as f64).sqrt());
        let (mut q, mut k) = (values("q", rows, q_size), values("k", case.num_keys, 1.0));
        shift_logits(&case, &mut q, &mut k, scale);
        let is_padding = |row: usize| row % case.num_heads >= case.num_heads - case.padding_heads;
        for (_, row) in q.chunks_mut(case.head_dim).enumerate().filter(|(row, _)| is_padding(*row)) {
            row.fill(0.0);
        }
        let sequences = case.packed.then(|| draw_sequences(&case));
        let selected = case.ranking == RankingClass::Selected;
        let mut inputs = Self {
            q: HostTensor::from_f64(DType::Bf16, &[case.num_tokens, case.num_heads, case.head_dim], &q),
            k: HostTensor::from_f64(DType::Bf16, &[case.num_keys, case.head_dim], &k),
            indices: if selected {
                case.indices.draw(case.seed, "indices", case.num_tokens, case.topk, case.num_keys)
            } else {
                Vec::new()
            },
            topk_length: if selected {
                case.lengths.draw(case.seed, "topk_length", case.num_tokens, case.topk)
            } else {
                None
            },
            q_off: (!selected && case.q_off).then(|| draw_offsets(&case, sequences.as_ref())),
            sequences,
            lse: None,
            lse_beside: None,
            sink: case.sinks.draw(case.seed, case.num_heads, case.logit_shift),
            softmax_scale: scale,
            shown: None,
            case,
        };
        inputs.name_own_sequences_keys();
        inputs.draw_normaliser()?;
        if inputs.case.poison_unreferenced {
            inputs.poison_unreferenced();
        }
        Ok(inputs)
    }

    /// Of packed sequences most slots name a key of their own; one in four stays what it was, some other's.
    fn name_own_sequences_keys(&mut self) {
        let Some(reference::Sequences { cu_k, .. }) = &self.sequences else { return };
        let cu_k = cu_k.clone();
        let mut draw = Draw::new(self.case.seed, "foreign");
        for token in 0..self.case.num_tokens {
            let Some(sequence) = self.sequence(token) else { continue };
            let (first, count) = (cu_k[sequence], cu_k[sequence + 1] - cu_k[sequence]);
            for index in &mut self.indices[token * self.case.topk..][..self.case.topk] {
                let foreign = draw.rng().random_ratio(1, 4);
                if !foreign && count > 0 && (0..self.case.num_keys as i32).contains(index) {
                    *index = *index % count + if self.case.global { first } else { 0 };
                }
            }
        }
    }

    fn sequence(&self, token: usize) -> Option<usize> {
        let Some(reference::Sequences { cu_q, .. }) = &self.sequences else { return Some(0) };
        cu_q.windows(2).position(|ends| (ends[0]..ends[1]).contains(&(token as i32)))
    }

    /// lse of the ranked keys, and of a window beside them, as a forward pass would have stored them.
    fn draw_normaliser(&mut self) -> Result<(), dsv4_reference::Error> {
        let case = &self.case;
        let shape = [case.num_tokens, case.num_heads];
        let keys = elements(&reference::lse(&self.reference()?, None, &mut Rounding::exact())?)?;
        let mut draw = Draw::new(case.seed, "beside");
        // Infinities of both signs stand for a window without a key, and for rows without any.
        let signs = [f64::INFINITY, f64::NEG_INFINITY];
        let beside: Vec<f64> = keys
            .iter()
            .enumerate()
            .map(|(i, &lse)| {
                let above = case.outside + 2.0 * draw.normal();
                let around = if lse.is_finite() { lse } else { case.logit_shift };
                if i % 11 == 5 { signs[i % 2] } else { around + above }
            })
            .collect();
        let beside = HostTensor::from_f64(DType::F32, &shape, &beside);
        let beside = (case.normaliser == NormaliserClass::Joint).then_some(beside);
        if !case.recomputed {
            let widened = beside.as_ref().map(widened).transpose()?;
            let mut lse = elements(&reference::lse(&self.reference()?, widened.as_ref(), &mut Rounding::exact())?)?;
            for (row, lse) in lse.iter_mut().enumerate() {
                let is_padding = row % case.num_heads >= case.num_heads - case.padding_heads;
                if is_padding || lse.is_infinite() {
                    *lse = signs[row / case.num_heads % 2];
                }
            }
            self.lse = Some(HostTensor::from_f64(DType::F32, &shape, &lse));
            return Ok(());
        }
        self.lse_beside = beside;
        Ok(())
    }

    /// Turns every key row that no valid slot names into NaN.
    fn poison_unreferenced(&mut self) {
        let mut referenced = vec![false; self.case.num_keys];
        for token in 0..self.case.num_tokens {
            for key in self.ranked_keys(token) {
                referenced[key] = true;
            }
        }
        let row = self.case.head_dim * self.k.dtype.size();
        for key in (0..self.case.num_keys).filter(|&key| !referenced[key]) {
            // 0xffff is NaN in bf16.
            self.k.bytes[key * row..(key + 1) * row].fill(0xff);
        }
    }

    /// The keys that a token ranks, from the definition: every key is asked whether it is one.
    fn ranked_keys(&self, token: usize) -> Vec<usize> {
        let Some(sequence) = self.sequence(token) else { return Vec::new() };
        let case = &self.case;
        let (first_token, first, last) = match &self.sequences {
            None => (0, 0, case.num_keys),
            Some(s) => (s.cu_q[sequence] as usize, s.cu_k[sequence] as usize, s.cu_k[sequence + 1] as usize),
        };
        let topk = case.topk;
        let length = self.topk_length.as_ref().map_or(topk, |lengths| lengths[token].clamp(0, topk as i32) as usize);
        let named = |key: usize| {
            let name = if case.global { key } else { key - first } as i32;
            self.indices[token * topk..][..length].contains(&name)
        };
        let offset = self.q_off.as_ref().map_or(0, |offsets| i64::from(offsets[sequence]));
        let position = offset + (token - first_token) as i64;
        // The last token that a key covers is not after this one.
        let visible = |key: usize| ((key - first + 1) * case.ratio) as i64 - 1 <= position;
        let ranked = |key: &usize| if case.ranking == RankingClass::Selected { named(*key) } else { visible(*key) };
        (first..last).filter(ranked).collect()
    }

    /// Columns of the dense scores: the longest sequence's keys.
    fn columns(&self) -> usize {
        match &self.sequences {
            None => self.case.num_keys,
            Some(s) => s.cu_k.windows(2).map(|ends| (ends[1] - ends[0]) as usize).max().unwrap_or(0),
        }
    }

    fn reference(&self) -> Result<reference::Inputs, candle_core::Error> {
        let ranking = match self.case.ranking {
            RankingClass::Selected => reference::Ranking::Selected {
                indices: self.indices.clone(),
                topk: self.case.topk,
                topk_length: self.topk_length.clone(),
                global: self.case.global,
            },
            RankingClass::Causal => reference::Ranking::Causal {
                ratio: self.case.ratio,
                q_off: self.q_off.clone(),
                columns: self.columns(),
            },
        };
        Ok(reference::Inputs {
            q: widened(&self.q)?,
            k: widened(&self.k)?,
            ranking,
            sequences: self.sequences.clone(),
            softmax_scale: self.softmax_scale,
        })
    }

    fn run_oracle(&self, precision: Precision) -> Result<Vec<OracleTensor>, dsv4_reference::Error> {
        let inputs = self.reference()?;
        let mut rounding = Rounding::new(precision);
        let mut tensors = Vec::new();
        let lse = match &self.lse {
            Some(lse) => widened(lse)?,
            None => {
                let beside = self.lse_beside.as_ref().map(widened).transpose()?;
                let lse = reference::lse(&inputs, beside.as_ref(), &mut rounding)?;
                tensors.push(oracle_tensor("lse", Side::Forward, &lse)?);
                // The next kernel reads it from memory.
                rounding.f32(&lse)?
            }
        };
        let normaliser = reference::Normaliser { lse, sink: self.sink.as_ref().map(widened).transpose()? };
        match self.case.ranking {
            RankingClass::Selected => {
                let target = reference::target(&inputs, &normaliser, &mut rounding)?;
                let target = tensor(self.shown_of(&elements(&target)?), &self.shown_shape())?;
                tensors.push(oracle_tensor("target", Side::Forward, &target)?);
            }
            RankingClass::Causal => {
                let outputs = reference::scores(&inputs, &normaliser, &mut rounding)?;
                let named = [("scores", &outputs.scores), ("l1", &outputs.l1), ("shift", &outputs.shift)];
                for (name, tensor) in named {
                    tensors.push(oracle_tensor(name, Side::Forward, tensor)?);
                }
            }
        }
        Ok(tensors)
    }

    fn shown_shape(&self) -> [usize; 2] {
        let all = self.case.topk;
        [self.case.num_tokens, self.shown.as_ref().map_or(all, |shown| shown.first().map_or(0, Vec::len))]
    }

    /// The slots that are looked at, of a target `[num_tokens, topk]`.
    fn shown_of(&self, target: &[f64]) -> Vec<f64> {
        let topk = self.case.topk;
        let Some(shown) = &self.shown else { return target.to_vec() };
        shown.iter().enumerate().flat_map(|(t, slots)| slots.iter().map(move |slot| target[t * topk + slot])).collect()
    }

    fn with(&self, change: impl FnOnce(&mut Self)) -> Box<dyn Prepared> {
        let mut variant = self.clone();
        change(&mut variant);
        Box::new(variant)
    }
}

/// Moves every logit by `logit_shift`, through one channel: q's is constant and so is k's.
fn shift_logits(case: &ScoreRecomputeCase, q: &mut [f64], k: &mut [f64], scale: f64) {
    if case.logit_shift == 0.0 {
        return;
    }
    let size = (case.logit_shift.abs() / scale).sqrt();
    q.iter_mut().step_by(case.head_dim).for_each(|value| *value = size * case.logit_shift.signum());
    k.iter_mut().step_by(case.head_dim).for_each(|value| *value = size);
}

/// Five sequences: the second has no token, the fourth no key. A token in two cases of three belongs to none.
fn draw_sequences(case: &ScoreRecomputeCase) -> reference::Sequences {
    let mut draw = Draw::new(case.seed, "sequences");
    let mut ends = |total: usize, empty: usize| {
        let mut ends: Vec<i32> = (0..4).map(|_| draw.rng().random_range(0..=total as i32)).collect();
        ends.sort_unstable();
        ends.insert(0, 0);
        ends.push(total as i32);
        ends[empty + 1] = ends[empty];
        ends
    };
    let unowned = usize::from(!case.seed.is_multiple_of(3));
    let cu_q = ends(case.num_tokens.saturating_sub(unowned), 1);
    reference::Sequences { cu_q, cu_k: ends(case.num_keys, 3) }
}

/// From before a sequence's first key to behind its last.
fn draw_offsets(case: &ScoreRecomputeCase, sequences: Option<&reference::Sequences>) -> Vec<i32> {
    let mut draw = Draw::new(case.seed, "q_off");
    let ratio = case.ratio as i32;
    let lengths = match sequences {
        None => vec![case.num_keys as i32],
        Some(sequences) => sequences.cu_k.windows(2).map(|ends| ends[1] - ends[0]).collect(),
    };
    lengths.into_iter().map(|keys| draw.rng().random_range(-ratio..=ratio * keys)).collect()
}

/// What the kernels read, on the device.
struct DeviceInputs {
    q: TensorView,
    k: TensorView,
    indices: Option<TensorView>,
    topk_length: Option<TensorView>,
    q_off: Option<TensorView>,
    cu: Option<(TensorView, TensorView)>,
    sink: Option<TensorView>,
    lse_beside: Option<TensorView>,
    ratio: usize,
    global: bool,
    softmax_scale: f32,
}

impl DeviceInputs {
    fn upload(arena: &mut DeviceArena<'_>, inputs: &Inputs) -> Result<Self, RuntimeError> {
        let case = &inputs.case;
        let rows = |tensor: &HostTensor| layout(&tensor.shape, case.padding);
        let list = |arena: &mut DeviceArena<'_>, name: &str, list: &[i32]| {
            arena.input(name, &HostTensor::from_i32(&[list.len()], list))
        };
        let optional = |arena: &mut DeviceArena<'_>, name: &str, values: &Option<Vec<i32>>| {
            values.as_ref().map(|values| list(arena, name, values)).transpose()
        };
        let floats = |arena: &mut DeviceArena<'_>, name: &str, tensor: &Option<HostTensor>| {
            tensor.as_ref().map(|tensor| arena.input(name, tensor)).transpose()
        };
        let indices = HostTensor::from_i32(&[case.num_tokens, case.topk], &inputs.indices);
        let selected = case.ranking == RankingClass::Selected;
        Ok(Self {
            q: arena.upload("q", &inputs.q, &rows(&inputs.q), Role::Input)?,
            k: arena.upload("k", &inputs.k, &rows(&inputs.k), Role::Input)?,
            indices: selected.then(|| arena.input("indices", &indices)).transpose()?,
            topk_length: optional(arena, "topk_length", &inputs.topk_length)?,
            q_off: optional(arena, "q_off", &inputs.q_off)?,
            cu: match &inputs.sequences {
                None => None,
                Some(s) => Some((list(arena, "cu_q", &s.cu_q)?, list(arena, "cu_k", &s.cu_k)?)),
            },
            sink: floats(arena, "sink", &inputs.sink)?,
            lse_beside: floats(arena, "lse_beside", &inputs.lse_beside)?,
            ratio: case.ratio,
            global: case.global,
            softmax_scale: case.softmax_scale,
        })
    }

    fn launcher(&self) -> launcher::Inputs<'_> {
        let ranking = match &self.indices {
            Some(indices) => {
                launcher::Ranking::Selected { indices, topk_length: self.topk_length.as_ref(), global: self.global }
            }
            None => launcher::Ranking::Causal { ratio: self.ratio, q_off: self.q_off.as_ref() },
        };
        launcher::Inputs {
            q: &self.q,
            k: &self.k,
            ranking,
            sequences: self.cu.as_ref().map(|(cu_q, cu_k)| launcher::Sequences { cu_q, cu_k }),
            softmax_scale: self.softmax_scale,
        }
    }
}

/// What the kernels write: the target, or the dense scores with l1 and shift.
struct DeviceOutputs {
    scores: TensorView,
    l1: Option<TensorView>,
    shift: Option<TensorView>,
}

impl DeviceOutputs {
    fn allocate(arena: &mut DeviceArena<'_>, inputs: &Inputs) -> Result<Self, RuntimeError> {
        let case = &inputs.case;
        let selected = case.ranking == RankingClass::Selected;
        let shape = [case.num_tokens, if selected { case.topk } else { inputs.columns() }];
        let name = if selected { "target" } else { "scores" };
        let scores = arena.allocate(name, DType::F32, &shape, &layout(&shape, case.padding), Role::Output)?;
        let mut per_row = |name: &str| arena.output(name, DType::F32, &[case.num_tokens]);
        let l1 = (!selected).then(|| per_row("l1")).transpose()?;
        Ok(Self { scores, l1, shift: (!selected).then(|| per_row("shift")).transpose()? })
    }

    fn launch(
        &self,
        device: &Device,
        inputs: launcher::Inputs<'_>,
        normaliser: launcher::Normaliser<'_>,
        implementation: launcher::Implementation,
    ) -> Result<String, RuntimeError> {
        let scores = &self.scores;
        match (&self.l1, &self.shift) {
            (Some(l1), Some(shift)) => {
                launcher::scores(device, &launcher::Scores { inputs, normaliser, implementation, scores, l1, shift })
            }
            _ => launcher::target(device, &launcher::Target { inputs, normaliser, implementation, target: scores }),
        }
    }
}

impl Prepared for Inputs {
    fn operator(&self) -> &'static str {
        NAME
    }

    /// None for what no case says: that only some slots of a target are looked at, or into what sequences a
    /// variant packs its tokens.
    fn case(&self) -> Option<Case> {
        let said = self.shown.is_none() && self.sequences.is_some() == self.case.packed;
        said.then(|| Case::new(NAME, &self.case))
    }

    fn oracle(&self, precision: Precision) -> Result<Vec<OracleTensor>, CaseError> {
        self.run_oracle(precision).map_err(|e| oracle_error(NAME, e))
    }

    fn kernel(&self, device: &Device, contract: Contract) -> Result<KernelRun, RuntimeError> {
        let mut arena = DeviceArena::new(device, contract);
        let read = DeviceInputs::upload(&mut arena, self)?;
        let lse = match &self.lse {
            Some(lse) => arena.input("lse", lse)?,
            None => arena.output("lse", DType::F32, &[self.case.num_tokens, self.case.num_heads])?,
        };
        let written = DeviceOutputs::allocate(&mut arena, self)?;
        let mut paths = Vec::new();
        let violations = arena.run(|device| {
            let inputs = read.launcher();
            if self.lse.is_none() {
                let arguments = launcher::Lse { inputs, lse_beside: read.lse_beside.as_ref(), lse: &lse };
                paths.push(launcher::lse(device, &arguments)?);
            }
            let normaliser = launcher::Normaliser { lse: &lse, sink: read.sink.as_ref() };
            paths.push(written.launch(device, inputs, normaliser, self.case.implementation.launcher())?);
            Ok(())
        })?;
        let mut tensors = Vec::new();
        if self.lse.is_none() {
            tensors.push(deterministic("lse", arena.download(&lse)?));
        }
        let scores = arena.download(&written.scores)?;
        match (&written.l1, &written.shift) {
            (Some(l1), Some(shift)) => {
                tensors.push(deterministic("scores", scores));
                tensors.push(deterministic("l1", arena.download(l1)?));
                tensors.push(deterministic("shift", arena.download(shift)?));
            }
            _ => {
                let shown = match self.shown {
                    None => scores,
                    Some(_) => HostTensor::from_f64(DType::F32, &self.shown_shape(), &self.shown_of(&scores.to_f64())),
                };
                tensors.push(deterministic("target", shown));
            }
        }
        Ok(KernelRun { tensors, violations, paths })
    }

    fn laws(&self) -> Vec<Law> {
        let case = &self.case;
        if case.num_tokens == 0 {
            return Vec::new();
        }
        let mut laws = vec![self.scale_law()];
        if case.num_tokens > 1 {
            laws.push(self.independence_law());
        }
        if !case.packed {
            laws.push(self.packing_law());
        }
        if case.ranking == RankingClass::Selected && !case.packed {
            laws.push(self.permutation_law());
        }
        if case.ranking == RankingClass::Selected && case.topk > 0 {
            laws.push(self.slot_law());
            laws.push(self.padding_law());
        }
        if !case.recomputed && case.num_heads + EXTRA_HEADS <= LARGEST_HEADS {
            laws.push(self.padding_heads_law());
        }
        laws
    }
}

/// Heads that the law of padding heads adds.
const EXTRA_HEADS: usize = 3;

impl Inputs {
    /// Names of the outputs.
    fn outputs(&self) -> Vec<&'static str> {
        let mut names = if self.lse.is_none() { vec!["lse"] } else { Vec::new() };
        names.extend(match self.case.ranking {
            RankingClass::Selected => &["target"][..],
            RankingClass::Causal => &["scores", "l1", "shift"],
        });
        names
    }

    fn law(&self, name: &'static str, relation: impl Fn() -> Relation, variant: Box<dyn Prepared>) -> Law {
        Law { name, variant, relations: self.outputs().into_iter().map(|name| (name, relation())).collect() }
    }

    /// `(a q) · k · (scale / a)` is the same logit: the scale is applied once, everywhere.
    fn scale_law(&self) -> Law {
        let variant = self.with(|v| {
            v.q = scaled(&self.q, 4.0);
            v.case.softmax_scale /= 4.0;
            v.softmax_scale /= 4.0;
        });
        self.law("softmax_scale counts once", || Relation::Times(1.0), variant)
    }

    /// Another query and list for one token changes no other token's row.
    fn independence_law(&self) -> Law {
        let middle = self.case.num_tokens / 2;
        let variant = self.with(|v| {
            let row = self.case.num_heads * self.case.head_dim * 2;
            // The sign bit of every bf16 of the token's query.
            v.q.bytes[middle * row..(middle + 1) * row].iter_mut().skip(1).step_by(2).for_each(|byte| *byte ^= 0x80);
            if let Some(list) = v.indices.get_mut(middle * self.case.topk..(middle + 1) * self.case.topk) {
                list.reverse();
            }
        });
        let names = self.outputs().into_iter().filter(|name| !["l1", "shift"].contains(name));
        let relation = || Relation::EqualRows(Box::new(move |row| row != middle));
        Law { name: "independence", variant, relations: names.map(|name| (name, relation())).collect() }
    }

    /// One packed sequence of everything is no packing.
    fn packing_law(&self) -> Law {
        let (tokens, keys) = (self.case.num_tokens as i32, self.case.num_keys as i32);
        let variant = self.with(|v| {
            v.sequences = Some(reference::Sequences { cu_q: vec![0, 0, tokens], cu_k: vec![0, 0, keys] });
            v.q_off = self.q_off.as_ref().map(|offsets| vec![7, offsets[0]]);
        });
        self.law("one sequence may be packed", || Relation::Times(1.0), variant)
    }

    fn permutation_law(&self) -> Law {
        let order = permutation(self.case.seed, self.case.num_tokens);
        let topk = self.case.topk;
        let variant = self.with(|v| {
            v.q = permuted(&self.q, &order);
            v.lse = self.lse.as_ref().map(|lse| permuted(lse, &order));
            v.lse_beside = self.lse_beside.as_ref().map(|lse| permuted(lse, &order));
            v.indices = order.iter().flat_map(|&t| self.indices[t * topk..(t + 1) * topk].iter().copied()).collect();
            v.topk_length = self.topk_length.as_ref().map(|list| order.iter().map(|&t| list[t]).collect());
        });
        self.law("tokens may be permuted", || Relation::PermutedRows(order.clone()), variant)
    }

    /// The order of the slots does not matter: each key keeps its target. Slots beyond a length stay beyond it.
    fn slot_law(&self) -> Law {
        let topk = self.case.topk;
        let variant = self.with(|v| {
            let mut shown = Vec::with_capacity(self.case.num_tokens);
            for token in 0..self.case.num_tokens {
                let length = self.topk_length.as_ref().map_or(topk, |l| l[token].clamp(0, topk as i32) as usize);
                let mut order: Vec<usize> = (0..topk).collect();
                order[..length].shuffle(Draw::new(self.case.seed + token as u64, "slots").rng());
                let mut place = vec![0; topk];
                for (slot, &from) in order.iter().enumerate() {
                    v.indices[token * topk + slot] = self.indices[token * topk + from];
                    place[from] = slot;
                }
                shown.push(place);
            }
            v.shown = Some(shown);
        });
        self.law("slots may be permuted", || Relation::WithinBudget, variant)
    }

    /// Invalid slots at the end of a list change no bit.
    fn padding_law(&self) -> Law {
        let topk = self.case.topk;
        let extra = [-1, self.case.num_keys as i32, i32::MIN, i32::MAX, -1].repeat(28);
        let variant = self.with(|v| {
            v.case.topk = topk + extra.len();
            let rows = (0..self.case.num_tokens).map(|t| &self.indices[t * topk..(t + 1) * topk]);
            v.indices = rows.flat_map(|row| row.iter().chain(&extra).copied()).collect();
            // A length beyond the old list would now reach the new slots: it stays clamped to the old.
            v.topk_length =
                self.topk_length.as_ref().map(|list| list.iter().map(|&l| l.clamp(0, topk as i32)).collect());
            v.shown = Some(vec![(0..topk).collect(); self.case.num_tokens]);
        });
        self.law("invalid slots add nothing", || Relation::Times(1.0), variant)
    }

    /// Heads with an lse of +inf add nothing, whatever their queries are.
    fn padding_heads_law(&self) -> Law {
        let (heads, tokens) = (self.case.num_heads, self.case.num_tokens);
        let append = |host: &HostTensor, extra: &dyn Fn(&[u8]) -> Vec<u8>| -> Vec<u8> {
            let entry = host.bytes.len() / tokens;
            host.bytes.chunks(entry).flat_map(|row| [row.to_vec(), extra(row)].concat()).collect()
        };
        let variant = self.with(|v| {
            v.case.num_heads += EXTRA_HEADS;
            v.case.padding_heads += EXTRA_HEADS;
            let one = self.case.head_dim * 2;
            v.q.bytes = append(&self.q, &|row| row[..one].repeat(EXTRA_HEADS));
            v.q.shape[1] += EXTRA_HEADS;
            if let Some(lse) = &mut v.lse {
                lse.bytes = append(lse, &|_| f32::INFINITY.to_ne_bytes().repeat(EXTRA_HEADS));
                lse.shape[1] += EXTRA_HEADS;
            }
            if let Some(sink) = &mut v.sink {
                sink.bytes.extend(0f32.to_ne_bytes().repeat(EXTRA_HEADS));
                sink.shape[0] += EXTRA_HEADS;
            }
        });
        // Blocks of 16, 64 and 128 heads add them up in unlike orders; Hopper has none of 16.
        let hopper = self.case.implementation == Implementation::Hopper;
        let blocks = if hopper { &[64, LARGEST_HEADS][..] } else { &[16, 64, LARGEST_HEADS] };
        let block = |heads: usize| blocks.iter().position(|&block| heads <= block);
        let same = block(heads) == block(heads + EXTRA_HEADS);
        let relation = move || if same { Relation::Times(1.0) } else { Relation::WithinBudget };
        self.law("padding heads add nothing", relation, variant)
    }
}
