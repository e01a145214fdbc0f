//! `sparse_attention` (inference 8, training 3 and 4): `kernels/cuda/sparse_attention.cu` against
//! `reference/src/sparse_attention.rs`.

use dsv4_kernels::runtime::{
    Contract, DType, Device, DeviceArena, Environment, HostTensor, Role, RuntimeError, TensorView,
};
use dsv4_kernels::sparse_attention as launcher;
use dsv4_reference::precision::{Precision, Rounding};
use dsv4_reference::sparse_attention as reference;
use proptest::prelude::*;
use proptest::strategy::BoxedStrategy;
use rand::Rng;
use rand::seq::SliceRandom;
use serde::{Deserialize, Serialize};

use super::{
    Float, Implementation, deterministic, elements, layout, oracle_error, oracle_tensor, permuted, scaled, tensor,
    widened,
};
use crate::case::{Case, CaseError, Distribution, Draw};
use crate::judge::checks::permutation;
use crate::judge::golden::GoldenFile;
use crate::operator::{
    ExpectedTensor, GoldenCase, GradientProbe, KernelRun, KernelTensor, Law, ModuleSpecification, Operator,
    OracleTensor, Prepared, Profile, Relation, Side,
};
use crate::record::OperatorRecord;

pub(crate) const NAME: &str = "sparse_attention";

/// The operator.
pub struct SparseAttention;

/// Where the values come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Values {
    /// The whole key row.
    Shared,
    /// The first `v_dim` channels of the key row.
    Prefix,
    /// A tensor of their own.
    Separate,
}

/// What the index lists look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IndexClass {
    /// Distinct valid keys where there are enough.
    Valid,
    /// Valid keys with repetitions.
    Duplicates,
    /// Some -1, some out of range, some `i32::MIN` and `i32::MAX`.
    Hostile,
    /// The first half of each list is -1: whole leading tiles without a key.
    LeadingMasked,
    /// Every third token has no valid slot at all.
    EmptyRows,
}

/// How many slots count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lengths {
    /// No length given.
    Absent,
    /// Between 0 and `topk`.
    Within,
    /// Negative, zero, beyond `topk`, and within.
    Hostile,
}

/// The sinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sinks {
    /// None.
    Absent,
    /// Normal with deviation 3: of the order of lse.
    Normal,
    /// Both infinities, ±2.4e38 and ordinary ones in turn.
    Extreme,
}

/// How the gradients of keys are summed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeyGradients {
    /// By fp32 atomics.
    #[default]
    Atomic,
    /// In one order, a third of the tokens at a time: the borders of chunks are a place for bugs.
    Deterministic,
}

/// A case: extents, lists, sinks, scale, layout, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SparseAttentionCase {
    /// Queries; 0 is legal.
    pub num_tokens: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Width of q and k: a multiple of 16 up to 576.
    pub head_dim: usize,
    /// Where the values come from.
    pub values: Values,
    /// Width of the values: a multiple of 16 up to 512.
    pub v_dim: usize,
    /// Keys; 0 is legal.
    pub num_keys: usize,
    /// Slots of a list; 0 is legal.
    pub topk: usize,
    /// What the lists look like.
    pub indices: IndexClass,
    /// How many slots count.
    pub lengths: Lengths,
    /// The sinks.
    pub sinks: Sinks,
    /// Multiplies q·k.
    pub softmax_scale: f32,
    /// Standard deviation of the logits.
    pub logit_deviation: f64,
    /// Added to every logit: far below zero, exp(0 - lse) of a wrongly counted slot overflows.
    pub logit_shift: f64,
    /// Type of dk and dv.
    pub key_gradient: Float,
    /// Whether lse has a gradient of its own.
    pub dlse: bool,
    /// Elements after each row, which belong to nobody; a multiple of 8.
    pub padding: usize,
    /// Distribution of the data.
    pub distribution: Distribution,
    /// Whether keys that no valid slot names are NaN.
    pub poison_unreferenced: bool,
    /// Which kernels run; portable in lines written before there was a choice.
    #[serde(default)]
    pub implementation: Implementation,
    /// How dk and dv are summed; by atomics in lines written before there was a choice.
    #[serde(default)]
    pub key_gradients: KeyGradients,
    /// Seed of the data.
    pub seed: u64,
}

impl SparseAttentionCase {
    pub(crate) fn plain(num_tokens: usize, num_heads: usize, head_dim: usize, num_keys: usize, topk: usize) -> Self {
        Self {
            num_tokens,
            num_heads,
            head_dim,
            values: Values::Shared,
            v_dim: head_dim,
            num_keys,
            topk,
            indices: IndexClass::Hostile,
            lengths: Lengths::Absent,
            sinks: Sinks::Normal,
            softmax_scale: (head_dim as f32).sqrt().recip(),
            logit_deviation: 2.0,
            logit_shift: 0.0,
            key_gradient: Float::Bf16,
            dlse: false,
            padding: 0,
            distribution: Distribution::Normal,
            poison_unreferenced: true,
            implementation: Implementation::Portable,
            key_gradients: KeyGradients::Atomic,
            seed: 1,
        }
    }

    pub(crate) fn key_gradients(&self) -> launcher::KeyGradients {
        match self.key_gradients {
            KeyGradients::Atomic => launcher::KeyGradients::Atomic,
            KeyGradients::Deterministic => {
                launcher::KeyGradients::Deterministic { chunk_tokens: self.num_tokens.div_ceil(3).max(1) }
            }
        }
    }

    pub(crate) fn check(&self) -> Result<(), CaseError> {
        let refuse = |field, reason: String| Err(CaseError::Field { operator: NAME, field, reason });
        let width = |value: usize, largest: usize| value > 0 && value.is_multiple_of(16) && value <= largest;
        if !width(self.head_dim, 576) {
            return refuse("head_dim", format!("{} must be a multiple of 16 up to 576", self.head_dim));
        }
        let v_fits = match self.values {
            Values::Shared => self.v_dim == self.head_dim && width(self.v_dim, 512),
            Values::Prefix => self.v_dim <= self.head_dim && width(self.v_dim, 512),
            Values::Separate => width(self.v_dim, 512),
        };
        if !v_fits {
            return refuse(
                "v_dim",
                format!("{} does not fit {:?} values of head_dim {}", self.v_dim, self.values, self.head_dim),
            );
        }
        if self.num_heads == 0 {
            return refuse("num_heads", "0: there must be a head".into());
        }
        if !(self.softmax_scale.is_finite() && self.softmax_scale > 0.0) {
            return refuse("softmax_scale", format!("{} must be finite and above 0", self.softmax_scale));
        }
        if !(self.logit_deviation.is_finite() && self.logit_deviation > 0.0 && self.logit_shift.is_finite()) {
            return refuse("logit_deviation", format!("{} must be finite and above 0", self.logit_deviation));
        }
        let hopper = self.values != Values::Separate && self.v_dim == 512 && [512, 576].contains(&self.head_dim);
        if self.implementation == Implementation::Hopper && !hopper {
            let shape = format!("{:?} values of {} in head_dim {}", self.values, self.v_dim, self.head_dim);
            return refuse(
                "implementation",
                format!("hopper takes a V that is 512 columns of 512 or 576, not {shape}"),
            );
        }
        if !self.padding.is_multiple_of(8) {
            return refuse("padding", format!("{} must be a multiple of 8: rows are 16-byte aligned", self.padding));
        }
        let gathered = self.num_tokens.saturating_mul(self.topk).saturating_mul(self.head_dim);
        let queries = self.num_tokens.saturating_mul(self.num_heads).saturating_mul(self.head_dim);
        if gathered.max(queries).max(self.num_keys.saturating_mul(self.head_dim)) > 1 << 31 {
            return refuse("num_tokens", "the case has more than 2^31 elements in one tensor".into());
        }
        Ok(())
    }
}

/// What a case's record may say that ran.
const PATHS: &[&str] = &[
    "sparse_attention_forward<16>",
    "sparse_attention_forward<64>",
    "sparse_attention_hopper_forward",
    "sparse_attention_delta",
    "sparse_attention_dsink",
    "sparse_attention_zero",
    "sparse_attention_cast",
    "sparse_attention_backward<16>",
    "sparse_attention_backward<64>",
    "sparse_attention_backward<16,deterministic>",
    "sparse_attention_backward<64,deterministic>",
    "sparse_attention_hopper_backward",
    "sparse_attention_hopper_backward<deterministic>",
    "sparse_attention_count",
    "sparse_attention_reserve",
    "sparse_attention_fill",
    "sparse_attention_order",
    "sparse_attention_sum",
];

impl Operator for SparseAttention {
    fn describe(&self) -> OperatorRecord {
        let list = |items: &[&str]| items.iter().map(|item| (*item).to_owned()).collect();
        OperatorRecord {
            name: NAME.into(),
            summary: "attention of each query over a list of gathered keys, with a sink per head".into(),
            specification: list(&["inference 8, 8.1", "training 3", "training 4"]),
            kernel_file: "kernels/cuda/sparse_attention.cu".into(),
            oracle_file: "reference/src/sparse_attention.rs".into(),
            dtypes: list(&["q, k, v, out bf16", "lse, max_logits, sink f32", "dk, dv bf16|f32", "indices i32"]),
            axes: list(&[
                "extents",
                "value storage",
                "index classes",
                "lengths",
                "sinks",
                "scale",
                "logit size",
                "dlse",
                "strides",
                "distribution",
                "unreferenced NaN",
                "sums of key gradients",
            ]),
            has_backward: true,
            paths: list(PATHS),
        }
    }

    fn strategy(&self, profile: Profile) -> BoxedStrategy<Case> {
        let shape = shape_strategy(profile);
        let lists = (
            prop::sample::select(vec![
                IndexClass::Valid,
                IndexClass::Duplicates,
                IndexClass::Hostile,
                IndexClass::LeadingMasked,
                IndexClass::EmptyRows,
            ]),
            prop::sample::select(vec![Lengths::Absent, Lengths::Within, Lengths::Hostile]),
            prop::sample::select(vec![Sinks::Normal, Sinks::Absent, Sinks::Extreme]),
        );
        // Powers of two and not; the model's own are 512^-1/2 and 192^-1/2.
        let scale = prop::sample::select(vec![0.044_194_174f32, 0.072_168_78, 0.125, 0.3, 1.0]);
        let logits = (scale, prop::sample::select(vec![0.5, 2.0, 4.0]), prop_oneof![4 => Just(0.0), 1 => Just(-200.0)]);
        let sums = prop_oneof![Just(KeyGradients::Atomic), Just(KeyGradients::Deterministic)];
        let gradients = (prop_oneof![Just(Float::Bf16), Just(Float::F32)], any::<bool>(), sums);
        let data = (
            prop_oneof![3 => Just(0usize), 1 => Just(8usize), 1 => Just(24usize)],
            prop::sample::select(vec![Distribution::Normal, Distribution::Uniform, Distribution::RowScaled]),
            any::<bool>(),
            prop_oneof![1 => Just(Implementation::Portable), 2 => Just(Implementation::Hopper)],
            0..1000u64,
        );
        (shape, lists, logits, gradients, data)
            .prop_map(|(shape, lists, logits, (key_gradient, dlse, key_gradients), data)| {
                let (num_tokens, num_heads, (values, head_dim, v_dim), num_keys, topk) = shape;
                let (indices, lengths, sinks) = lists;
                let (softmax_scale, logit_deviation, logit_shift) = logits;
                let (padding, distribution, poison_unreferenced, implementation, seed) = data;
                // Hopper's geometries are few; the others have the portable kernels only.
                let hopper = values != Values::Separate && v_dim == 512;
                let implementation = if hopper { implementation } else { Implementation::Portable };
                // One key that takes all of a softmax leaves gradients that vanish under the rounding of what
                // they are a difference of. So scaled rows do not scale logits to hundreds, and where most
                // softmaxes are that sharp, or most sinks or lists leave no gradient, there are more of them.
                let logit_deviation = if distribution == Distribution::RowScaled { 0.1 } else { logit_deviation };
                let sharp = logit_deviation > 2.0 || sinks == Sinks::Extreme;
                let num_heads = if sharp { num_heads.max(6) } else { num_heads };
                let num_tokens = if lengths == Lengths::Hostile { num_tokens.max(7) } else { num_tokens };
                let case = SparseAttentionCase {
                    num_tokens,
                    num_heads,
                    head_dim,
                    values,
                    v_dim,
                    num_keys,
                    topk,
                    indices,
                    lengths,
                    sinks,
                    softmax_scale,
                    logit_deviation,
                    logit_shift,
                    key_gradient,
                    dlse,
                    padding,
                    distribution,
                    poison_unreferenced,
                    implementation,
                    key_gradients,
                    seed,
                };
                Case::new(NAME, &case)
            })
            .boxed()
    }

    fn corner_cases(&self, profile: Profile) -> Vec<Case> {
        let plain = SparseAttentionCase::plain;
        let mut cases = vec![
            plain(0, 4, 64, 9, 5),
            SparseAttentionCase { indices: IndexClass::Valid, ..plain(3, 5, 64, 0, 7) },
            plain(2, 3, 64, 11, 0),
            SparseAttentionCase { indices: IndexClass::LeadingMasked, logit_shift: -200.0, ..plain(3, 5, 64, 30, 141) },
            SparseAttentionCase {
                lengths: Lengths::Hostile,
                sinks: Sinks::Extreme,
                dlse: true,
                ..plain(7, 10, 64, 23, 70)
            },
            SparseAttentionCase { values: Values::Separate, v_dim: 32, ..plain(4, 20, 64, 40, 65) },
            plain(2, 5, 512, 50, 70),
            SparseAttentionCase { values: Values::Prefix, v_dim: 512, ..plain(2, 20, 576, 33, 65) },
            hopper(plain(2, 20, 512, 50, 70)),
            // A head that stands alone among its warp's rows, over six tiles.
            hopper(plain(2, 17, 512, 90, 330)),
            // Rows of few weights, whose maximum rises far from one tile to the next.
            hopper(SparseAttentionCase {
                indices: IndexClass::Valid,
                logit_deviation: 8.0,
                ..plain(1, 20, 512, 400, 330)
            }),
            // Three tiles, and one head that stands alone in its block.
            hopper(SparseAttentionCase {
                lengths: Lengths::Hostile,
                sinks: Sinks::Extreme,
                dlse: true,
                ..plain(7, 65, 512, 90, 140)
            }),
            hopper(SparseAttentionCase { values: Values::Prefix, v_dim: 512, ..plain(2, 20, 576, 33, 65) }),
            // Lists of one tile, one after another through one block: what a work leaves behind meets the next one.
            hopper(plain(12, 1, 512, 9, 5)),
            // Rows of dk that are one product each: what is rounded, dS and not softmax_scale dS, shows in single elements.
            hopper(SparseAttentionCase {
                indices: IndexClass::Valid,
                key_gradient: Float::F32,
                logit_deviation: 4.0,
                ..plain(1, 1, 512, 200, 128)
            }),
        ];
        // Summed in one order: no token, no slot, one key of every slot, two blocks of heads, lists of thousands.
        let summed = |case| SparseAttentionCase { key_gradients: KeyGradients::Deterministic, ..case };
        cases.extend([
            summed(plain(0, 4, 64, 9, 5)),
            summed(plain(2, 3, 64, 11, 0)),
            summed(SparseAttentionCase { indices: IndexClass::Duplicates, ..plain(7, 3, 64, 1, 120) }),
            summed(SparseAttentionCase { values: Values::Separate, v_dim: 32, dlse: true, ..plain(5, 70, 64, 40, 65) }),
            summed(plain(1, 1, 64, 3, 8300)),
            summed(hopper(plain(3, 20, 512, 50, 70))),
        ]);
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
        let case: SparseAttentionCase = case.fields().ok()?;
        case.implementation.launcher().cannot_run_on(environment)
    }

    fn prepare(&self, case: &Case) -> Result<Box<dyn Prepared>, CaseError> {
        let case: SparseAttentionCase = case.fields()?;
        case.check()?;
        Ok(Box::new(Inputs::draw(case)))
    }

    fn golden(&self, file: &GoldenFile) -> Result<Vec<GoldenCase>, CaseError> {
        if file.operator != "attn_core" {
            return Ok(Vec::new());
        }
        golden_case(file).map(|case| vec![case]).map_err(CaseError::Malformed)
    }
}

fn hopper(case: SparseAttentionCase) -> SparseAttentionCase {
    SparseAttentionCase { implementation: Implementation::Hopper, ..case }
}

/// The heads and lists of the two production models, with as many tokens as the oracle can bear.
fn production_cases() -> Vec<SparseAttentionCase> {
    let plain = SparseAttentionCase::plain;
    vec![
        plain(12, 64, 512, 4096, 640),
        hopper(plain(12, 64, 512, 4096, 640)),
        plain(6, 128, 512, 4096, 1152),
        hopper(plain(6, 128, 512, 4096, 1152)),
        hopper(SparseAttentionCase { values: Values::Prefix, v_dim: 512, ..plain(5, 128, 576, 3000, 1025) }),
        // More tokens than any GPU has multiprocessors: a block of the forward goes on to a second one.
        hopper(plain(300, 3, 512, 90, 140)),
        SparseAttentionCase { values: Values::Separate, v_dim: 512, dlse: true, ..plain(5, 64, 512, 3000, 700) },
    ]
}

type Shape = (usize, usize, (Values, usize, usize), usize, usize);

/// Tokens, heads, geometry, keys, slots. The geometries are few because each is a module of its own.
fn shape_strategy(profile: Profile) -> BoxedStrategy<Shape> {
    let small =
        prop::sample::select(vec![(Values::Shared, 64, 64), (Values::Separate, 64, 32), (Values::Prefix, 80, 48)]);
    let wide = prop::sample::select(vec![
        (Values::Shared, 512, 512),
        (Values::Prefix, 576, 512),
        (Values::Separate, 512, 512),
    ]);
    let heads = |largest: usize| prop_oneof![1 => Just(1usize), 1 => Just(16usize), 3 => 1..=largest];
    let slots = |largest: usize| prop_oneof![1 => Just(64usize), 1 => Just(1usize), 5 => 1..=largest];
    let few = (1..=9usize, heads(40), small.clone(), 1..=90usize, slots(150));
    match profile {
        Profile::Quick => few.boxed(),
        Profile::Ci => {
            let wide = (1..=3usize, heads(20), wide, 1..=90usize, slots(140));
            prop_oneof![4 => few, 1 => wide].boxed()
        }
        Profile::Full => {
            let many = (1..=16usize, heads(130), small, 1..=900usize, slots(400));
            let wide = (1..=6usize, heads(130), wide, 1..=900usize, slots(600));
            prop_oneof![1 => few, 2 => many, 2 => wide].boxed()
        }
    }
}

/// A case with its tensors.
#[derive(Clone)]
pub(crate) struct Inputs {
    pub(crate) case: SparseAttentionCase,
    pub(crate) q: HostTensor,
    pub(crate) k: HostTensor,
    pub(crate) v: Option<HostTensor>,
    pub(crate) sink: Option<HostTensor>,
    pub(crate) indices: Vec<i32>,
    pub(crate) topk_length: Option<Vec<i32>>,
    pub(crate) dout: HostTensor,
    pub(crate) dlse: Option<HostTensor>,
    /// The oracle's scale: what the kernel gets, or the unrounded one of a golden file.
    pub(crate) softmax_scale: f64,
}

impl Inputs {
    pub(crate) fn draw(case: SparseAttentionCase) -> Self {
        let rows = case.num_tokens * case.num_heads;
        let values = |name: &str, rows: usize, width: usize, magnitude: f64| {
            Draw::new(case.seed, name).values(case.distribution, rows, width, magnitude)
        };
        let scale = f64::from(case.softmax_scale);
        let q_size = case.logit_deviation / (scale * (case.head_dim as f64).sqrt());
        let mut q = values("q", rows, case.head_dim, q_size);
        let mut k = values("k", case.num_keys, case.head_dim, 1.0);
        shift_logits(&case, &mut q, &mut k, scale);
        let indices = case.indices.draw(case.seed, "indices", case.num_tokens, case.topk, case.num_keys);
        let topk_length = case.lengths.draw(case.seed, "topk_length", case.num_tokens, case.topk);
        let mut inputs = Self {
            q: HostTensor::from_f64(DType::Bf16, &[case.num_tokens, case.num_heads, case.head_dim], &q),
            k: HostTensor::from_f64(DType::Bf16, &[case.num_keys, case.head_dim], &k),
            v: (case.values == Values::Separate).then(|| {
                let v = values("v", case.num_keys, case.v_dim, 1.0);
                HostTensor::from_f64(DType::Bf16, &[case.num_keys, case.v_dim], &v)
            }),
            sink: case.sinks.draw(case.seed, case.num_heads, case.logit_shift),
            indices,
            topk_length,
            dout: HostTensor::from_f64(
                DType::Bf16,
                &[case.num_tokens, case.num_heads, case.v_dim],
                &values("dout", rows, case.v_dim, 1.0),
            ),
            dlse: case.dlse.then(|| {
                let dlse = Draw::new(case.seed, "dlse").values(Distribution::Normal, rows, 1, 1.0);
                HostTensor::from_f64(DType::F32, &[case.num_tokens, case.num_heads], &dlse)
            }),
            softmax_scale: scale,
            case,
        };
        if inputs.case.poison_unreferenced {
            inputs.poison_unreferenced();
        }
        inputs
    }

    /// Whether slot `slot` of token `token` counts.
    fn is_valid(&self, token: usize, slot: usize) -> bool {
        let topk = self.case.topk;
        let length = self.topk_length.as_ref().map_or(topk, |lengths| lengths[token].clamp(0, topk as i32) as usize);
        let index = self.indices[token * topk + slot];
        slot < length && (0..self.case.num_keys as i64).contains(&i64::from(index))
    }

    /// Keys that some valid slot names.
    fn referenced(&self) -> Vec<bool> {
        let mut referenced = vec![false; self.case.num_keys];
        for token in 0..self.case.num_tokens {
            for slot in 0..self.case.topk {
                if self.is_valid(token, slot) {
                    referenced[self.indices[token * self.case.topk + slot] as usize] = true;
                }
            }
        }
        referenced
    }

    /// Turns every key (and value) row that no valid slot names into NaN.
    fn poison_unreferenced(&mut self) {
        for (key, referenced) in self.referenced().into_iter().enumerate() {
            if referenced {
                continue;
            }
            for tensor in [Some(&mut self.k), self.v.as_mut()].into_iter().flatten() {
                let row = tensor.shape[1] * tensor.dtype.size();
                // 0xffff is NaN in bf16.
                tensor.bytes[key * row..(key + 1) * row].fill(0xff);
            }
        }
    }

    pub(crate) fn reference(&self) -> Result<(reference::Inputs, reference::Upstream), candle_core::Error> {
        let value = match &self.v {
            Some(v) => reference::Value::Separate(widened(v)?),
            None if self.case.v_dim == self.case.head_dim => reference::Value::Shared,
            None => reference::Value::Prefix { v_dim: self.case.v_dim },
        };
        let inputs = reference::Inputs {
            q: widened(&self.q)?,
            k: widened(&self.k)?,
            value,
            sink: self.sink.as_ref().map(widened).transpose()?,
            indices: self.indices.clone(),
            topk: self.case.topk,
            topk_length: self.topk_length.clone(),
            softmax_scale: self.softmax_scale,
        };
        let dlse = self.dlse.as_ref().map(widened).transpose()?;
        Ok((inputs, reference::Upstream { dout: widened(&self.dout)?, dlse }))
    }

    pub(crate) fn run_oracle(&self, precision: Precision) -> Result<Vec<OracleTensor>, dsv4_reference::Error> {
        let (inputs, upstream) = self.reference()?;
        let forward = reference::forward(&inputs, &mut Rounding::new(precision))?;
        let backward = reference::backward(&inputs, &upstream, &mut Rounding::new(precision))?;
        let mut tensors = vec![
            oracle_tensor("out", Side::Forward, &forward.out)?,
            oracle_tensor("lse", Side::Forward, &forward.lse)?,
            oracle_tensor("max_logits", Side::Forward, &forward.max_logits)?,
            oracle_tensor("dq", Side::Gradient, &backward.dq)?,
            oracle_tensor("dk", Side::Gradient, &backward.dk)?,
        ];
        if let Some(dv) = &backward.dv {
            tensors.push(oracle_tensor("dv", Side::Gradient, dv)?);
        }
        if let Some(dsink) = &backward.dsink {
            tensors.push(oracle_tensor("dsink", Side::Gradient, dsink)?);
        }
        Ok(tensors)
    }

    fn with(&self, change: impl FnOnce(&mut Self)) -> Box<dyn Prepared> {
        let mut variant = self.clone();
        change(&mut variant);
        Box::new(variant)
    }
}

/// Moves every logit by `logit_shift`, through one channel: q's is constant and so is k's.
fn shift_logits(case: &SparseAttentionCase, q: &mut [f64], k: &mut [f64], scale: f64) {
    if case.logit_shift == 0.0 {
        return;
    }
    let size = (case.logit_shift.abs() / scale).sqrt();
    q.iter_mut().step_by(case.head_dim).for_each(|value| *value = size * case.logit_shift.signum());
    k.iter_mut().step_by(case.head_dim).for_each(|value| *value = size);
}

impl IndexClass {
    /// `num_tokens` lists of `topk` slots, each naming one of `num_keys` rows or none; `name` is the random stream.
    pub(crate) fn draw(self, seed: u64, name: &str, num_tokens: usize, topk: usize, num_keys: usize) -> Vec<i32> {
        let mut draw = Draw::new(seed, name);
        let keys = num_keys as i32;
        let hostile = [-1, keys, keys.saturating_add(3), i32::MIN, i32::MAX, -1, -7];
        let mut all = Vec::with_capacity(num_tokens * topk);
        let mut order: Vec<i32> = (0..keys).collect();
        for token in 0..num_tokens {
            order.shuffle(draw.rng());
            for slot in 0..topk {
                let drawn = draw.rng().random_range(0..=i32::MAX);
                let repeated = if keys == 0 { -1 } else { drawn % keys };
                let distinct = order.get(slot).copied().unwrap_or(-1);
                let bad = hostile[drawn as usize % hostile.len()];
                let one_in_three = draw.rng().random_ratio(1, 3);
                all.push(match self {
                    Self::Valid => distinct,
                    Self::Duplicates => repeated,
                    Self::Hostile if one_in_three => bad,
                    Self::LeadingMasked if slot < topk / 2 => -1,
                    Self::EmptyRows if token % 3 == 0 => bad,
                    Self::Hostile | Self::LeadingMasked | Self::EmptyRows => repeated,
                });
            }
        }
        all
    }
}

impl Lengths {
    /// How many of `topk` slots count in each of `count` lists; `name` is the random stream.
    pub(crate) fn draw(self, seed: u64, name: &str, count: usize, topk: usize) -> Option<Vec<i32>> {
        let mut draw = Draw::new(seed, name);
        let topk = topk as i32;
        let hostile = [0, -1, topk + 5, i32::MIN, i32::MAX, topk];
        let within = |draw: &mut Draw| draw.rng().random_range(0..=topk);
        match self {
            Self::Absent => None,
            Self::Within => Some((0..count).map(|_| within(&mut draw)).collect()),
            Self::Hostile => {
                let pick = |token: usize| hostile.get(token % 9).copied();
                Some((0..count).map(|token| pick(token).unwrap_or_else(|| within(&mut draw))).collect())
            }
        }
    }
}

impl Sinks {
    /// `[num_heads]` f32 around `mean`, which is of the order of lse: the shift of logits moves both.
    pub(crate) fn draw(self, seed: u64, num_heads: usize, mean: f64) -> Option<HostTensor> {
        let mut draw = Draw::new(seed, "sink");
        let extreme = [f64::INFINITY, f64::NEG_INFINITY, 2.4e38, -2.4e38];
        let sinks: Vec<f64> = (0..num_heads)
            .map(|head| {
                let normal = mean + 3.0 * draw.normal();
                match self {
                    Self::Extreme => extreme.get(head % 6).copied().unwrap_or(normal),
                    Self::Absent | Self::Normal => normal,
                }
            })
            .collect();
        (self != Self::Absent).then(|| HostTensor::from_f64(DType::F32, &[num_heads], &sinks))
    }
}

/// What the kernels read, on the device.
pub(crate) struct DeviceInputs {
    pub(crate) q: TensorView,
    pub(crate) k: TensorView,
    pub(crate) v: Option<TensorView>,
    sink: Option<TensorView>,
    indices: TensorView,
    topk_length: Option<TensorView>,
    softmax_scale: f32,
    v_dim: usize,
}

impl DeviceInputs {
    pub(crate) fn upload(arena: &mut DeviceArena<'_>, inputs: &Inputs) -> Result<Self, RuntimeError> {
        let case = &inputs.case;
        let rows = |tensor: &HostTensor| layout(&tensor.shape, case.padding);
        let optional_i32 = |arena: &mut DeviceArena<'_>, name: &str, list: &Option<Vec<i32>>| {
            let upload = |list: &Vec<i32>| arena.input(name, &HostTensor::from_i32(&[list.len()], list));
            list.as_ref().map(upload).transpose()
        };
        Ok(Self {
            q: arena.upload("q", &inputs.q, &rows(&inputs.q), Role::Input)?,
            k: arena.upload("k", &inputs.k, &rows(&inputs.k), Role::Input)?,
            v: inputs.v.as_ref().map(|v| arena.upload("v", v, &rows(v), Role::Input)).transpose()?,
            sink: inputs.sink.as_ref().map(|sink| arena.input("sink", sink)).transpose()?,
            indices: arena.input("indices", &HostTensor::from_i32(&[case.num_tokens, case.topk], &inputs.indices))?,
            topk_length: optional_i32(arena, "topk_length", &inputs.topk_length)?,
            softmax_scale: case.softmax_scale,
            v_dim: case.v_dim,
        })
    }

    pub(crate) fn launcher(&self) -> launcher::Inputs<'_> {
        launcher::Inputs {
            q: &self.q,
            k: &self.k,
            value: self.v.as_ref().map_or(launcher::Value::Prefix { v_dim: self.v_dim }, launcher::Value::Separate),
            sink: self.sink.as_ref(),
            indices: &self.indices,
            topk_length: self.topk_length.as_ref(),
            softmax_scale: self.softmax_scale,
        }
    }
}

/// What the kernels write, on the device.
pub(crate) struct DeviceOutputs {
    pub(crate) out: TensorView,
    pub(crate) lse: TensorView,
    pub(crate) max_logits: TensorView,
    pub(crate) dq: TensorView,
    pub(crate) dk: TensorView,
    pub(crate) dv: Option<TensorView>,
    pub(crate) dsink: Option<TensorView>,
    pub(crate) workspace: TensorView,
    /// How dk and dv are summed: what the workspace is large enough for.
    pub(crate) key_gradients: launcher::KeyGradients,
}

impl DeviceOutputs {
    pub(crate) fn allocate(
        arena: &mut DeviceArena<'_>,
        inputs: &Inputs,
        read: &DeviceInputs,
    ) -> Result<Self, RuntimeError> {
        let case = &inputs.case;
        let (gradient, key_gradients) = (case.key_gradient.dtype(), case.key_gradients());
        let mut output = |name: &str, dtype: DType, shape: &[usize], padding: usize| {
            arena.allocate(name, dtype, shape, &layout(shape, padding), Role::Output)
        };
        let per_head = [case.num_tokens, case.num_heads];
        let v = inputs.v.as_ref();
        Ok(Self {
            out: output("out", DType::Bf16, &inputs.dout.shape, case.padding)?,
            lse: output("lse", DType::F32, &per_head, 0)?,
            max_logits: output("max_logits", DType::F32, &per_head, 0)?,
            dq: output("dq", DType::Bf16, &inputs.q.shape, case.padding)?,
            dk: output("dk", gradient, &inputs.k.shape, case.padding)?,
            dv: v.map(|v| output("dv", gradient, &v.shape, case.padding)).transpose()?,
            dsink: inputs.sink.as_ref().map(|sink| output("dsink", DType::F32, &sink.shape, 0)).transpose()?,
            workspace: arena
                .workspace("workspace", launcher::workspace_bytes(&read.launcher(), gradient, key_gradients)?)?,
            key_gradients,
        })
    }

    pub(crate) fn download(&self, arena: &DeviceArena<'_>) -> Result<Vec<KernelTensor>, RuntimeError> {
        let mut tensors = Vec::new();
        let fixed = [
            ("out", Some(&self.out)),
            ("lse", Some(&self.lse)),
            ("max_logits", Some(&self.max_logits)),
            ("dq", Some(&self.dq)),
            ("dsink", self.dsink.as_ref()),
        ];
        for (name, view) in fixed {
            if let Some(view) = view {
                tensors.push(deterministic(name, arena.download(view)?));
            }
        }
        // Atomics add in whatever order the blocks come.
        let deterministic = self.key_gradients != launcher::KeyGradients::Atomic;
        for (name, view) in [("dk", Some(&self.dk)), ("dv", self.dv.as_ref())] {
            if let Some(view) = view {
                tensors.push(KernelTensor { deterministic, ..KernelTensor::new(name, arena.download(view)?) });
            }
        }
        Ok(tensors)
    }
}

impl Prepared for Inputs {
    fn operator(&self) -> &'static str {
        NAME
    }

    fn oracle(&self, precision: Precision) -> Result<Vec<OracleTensor>, CaseError> {
        self.run_oracle(precision).map_err(|e| oracle_error(NAME, e))
    }

    fn kernel(&self, device: &Device, contract: Contract) -> Result<KernelRun, RuntimeError> {
        let mut arena = DeviceArena::new(device, contract);
        let read = DeviceInputs::upload(&mut arena, self)?;
        let padding = self.case.padding;
        let dout = arena.upload("dout", &self.dout, &layout(&self.dout.shape, padding), Role::Input)?;
        let dlse = self.dlse.as_ref().map(|dlse| arena.input("dlse", dlse)).transpose()?;
        let written = DeviceOutputs::allocate(&mut arena, self, &read)?;
        let mut paths = Vec::new();
        let violations = arena.run(|device| {
            let DeviceOutputs { out, lse, max_logits, dq, dk, dv, dsink, workspace, key_gradients } = &written;
            let implementation = self.case.implementation.launcher();
            let forward = launcher::Forward { inputs: read.launcher(), implementation, out, lse, max_logits };
            paths.push(launcher::forward(device, &forward)?);
            // The Hopper backward has one geometry less than the forward.
            let both = self.case.head_dim == 512;
            let backward = launcher::Backward {
                inputs: read.launcher(),
                implementation: if both { implementation } else { launcher::Implementation::Portable },
                key_gradients: *key_gradients,
                out,
                lse,
                dout: &dout,
                dlse: dlse.as_ref(),
                dq,
                dk,
                dv: dv.as_ref(),
                dsink: dsink.as_ref(),
                workspace,
            };
            paths.extend(launcher::backward(device, &backward)?);
            Ok(())
        })?;
        Ok(KernelRun { tensors: written.download(&arena)?, violations, paths })
    }

    fn case(&self) -> Option<Case> {
        Some(Case::new(NAME, &self.case))
    }

    fn laws(&self) -> Vec<Law> {
        let case = &self.case;
        if case.num_tokens == 0 {
            return Vec::new();
        }
        let mut laws = vec![self.scale_law(), self.permutation_law()];
        if case.num_tokens > 1 {
            laws.push(self.independence_law());
        }
        if case.topk > 0 {
            laws.push(self.slot_law());
            laws.push(self.padding_law());
        }
        laws
    }

    fn gradient_probe(&self) -> Option<Box<dyn GradientProbe + '_>> {
        let case = &self.case;
        // Infinite sinks and NaN keys have no neighbourhood to differentiate in.
        let smooth = case.sinks != Sinks::Extreme;
        let work = case.num_tokens * case.num_heads * case.topk * case.head_dim;
        (smooth && work > 0 && work <= 1 << 18 && case.num_keys > 0)
            .then(|| Box::new(Probe::new(self)) as Box<dyn GradientProbe>)
    }
}

impl Inputs {
    /// `(a q) · k · (scale / a)` is the same logit: the scale is applied once, everywhere.
    fn scale_law(&self) -> Law {
        let variant = self.with(|v| {
            v.q = scaled(&self.q, 4.0);
            v.case.softmax_scale /= 4.0;
            v.softmax_scale /= 4.0;
        });
        let mut relations = vec![("out", 1.0), ("lse", 1.0), ("max_logits", 1.0), ("dq", 0.25)];
        relations.extend(self.sink.as_ref().map(|_| ("dsink", 1.0)));
        let mut relations: Vec<_> = relations.into_iter().map(|(name, f)| (name, Relation::Times(f))).collect();
        relations.push(("dk", self.same_sum()));
        relations.extend(self.v.as_ref().map(|_| ("dv", self.same_sum())));
        Law { name: "softmax_scale counts once", variant, relations }
    }

    /// What binds dk and dv where the terms of their sums are the same, in the same order of tokens and slots.
    fn same_sum(&self) -> Relation {
        match self.case.key_gradients {
            KeyGradients::Atomic => Relation::WithinBudget,
            KeyGradients::Deterministic => Relation::Times(1.0),
        }
    }

    fn permutation_law(&self) -> Law {
        let heads = self.case.num_heads;
        let order = permutation(self.case.seed, self.case.num_tokens);
        let rows = |tensor: &HostTensor| permuted(tensor, &order);
        let variant = self.with(|v| {
            (v.q, v.dout) = (rows(&self.q), rows(&self.dout));
            v.dlse = self.dlse.as_ref().map(rows);
            let topk = self.case.topk;
            v.indices = order.iter().flat_map(|&t| self.indices[t * topk..(t + 1) * topk].iter().copied()).collect();
            v.topk_length = self.topk_length.as_ref().map(|list| order.iter().map(|&t| list[t]).collect());
        });
        let by_head: Vec<usize> = order.iter().flat_map(|&t| (0..heads).map(move |h| t * heads + h)).collect();
        let mut relations: Vec<_> = ["out", "dq"].map(|n| (n, Relation::PermutedRows(by_head.clone()))).into();
        relations.extend(["lse", "max_logits"].map(|n| (n, Relation::PermutedRows(order.clone()))));
        relations.push(("dk", Relation::WithinBudget));
        Law { name: "tokens may be permuted", variant, relations }
    }

    /// Another query and list for one token changes no other token's row.
    fn independence_law(&self) -> Law {
        let (heads, topk) = (self.case.num_heads, self.case.topk);
        let middle = self.case.num_tokens / 2;
        let variant = self.with(|v| {
            let row = heads * self.case.head_dim * 2;
            // The sign bit of every bf16 of the token's query.
            v.q.bytes[middle * row..(middle + 1) * row].iter_mut().skip(1).step_by(2).for_each(|byte| *byte ^= 0x80);
            v.indices[middle * topk..(middle + 1) * topk].reverse();
        });
        let mut relations: Vec<(&'static str, Relation)> =
            ["out", "dq"].map(|name| (name, Relation::EqualRows(Box::new(move |row| row / heads != middle)))).into();
        relations
            .extend(["lse", "max_logits"].map(|name| (name, Relation::EqualRows(Box::new(move |row| row != middle)))));
        Law { name: "independence", variant, relations }
    }

    /// The order of the slots does not matter. Slots beyond a length stay beyond it.
    fn slot_law(&self) -> Law {
        let topk = self.case.topk;
        let variant = self.with(|v| {
            for token in 0..self.case.num_tokens {
                let length = self.topk_length.as_ref().map_or(topk, |l| l[token].clamp(0, topk as i32) as usize);
                let list = &mut v.indices[token * topk..token * topk + length];
                list.shuffle(Draw::new(self.case.seed + token as u64, "slots").rng());
            }
        });
        let mut names = vec!["out", "lse", "max_logits", "dq", "dk"];
        names.extend(self.v.as_ref().map(|_| "dv"));
        names.extend(self.sink.as_ref().map(|_| "dsink"));
        let relations = names.into_iter().map(|name| (name, Relation::WithinBudget)).collect();
        Law { name: "slots may be permuted", variant, relations }
    }

    /// Invalid slots at the end of a list change no bit.
    fn padding_law(&self) -> Law {
        let topk = self.case.topk;
        let extra = [-1, self.case.num_keys as i32, i32::MIN, i32::MAX, -1].repeat(14);
        let variant = self.with(|v| {
            v.case.topk = topk + extra.len();
            let rows = (0..self.case.num_tokens).map(|t| &self.indices[t * topk..(t + 1) * topk]);
            v.indices = rows.flat_map(|row| row.iter().chain(&extra).copied()).collect();
            // A length beyond the old list would now reach the new slots: it stays clamped to the old.
            v.topk_length =
                self.topk_length.as_ref().map(|list| list.iter().map(|&l| l.clamp(0, topk as i32)).collect());
        });
        let mut relations: Vec<_> = ["out", "lse", "max_logits", "dq"].map(|name| (name, Relation::Times(1.0))).into();
        relations.push(("dk", self.same_sum()));
        relations.extend(self.v.as_ref().map(|_| ("dv", self.same_sum())));
        Law { name: "invalid slots add nothing", variant, relations }
    }
}

/// The oracle as a function of q, k, v and sink; NaN keys are replaced, nobody reads them.
struct Probe<'a> {
    inputs: &'a Inputs,
    k: HostTensor,
    v: Option<HostTensor>,
}

impl<'a> Probe<'a> {
    fn new(inputs: &'a Inputs) -> Self {
        let clean = |tensor: &HostTensor| {
            let values: Vec<f64> = tensor.to_f64().iter().map(|v| if v.is_nan() { 0.0 } else { *v }).collect();
            HostTensor::from_f64(tensor.dtype, &tensor.shape, &values)
        };
        Self { inputs, k: clean(&inputs.k), v: inputs.v.as_ref().map(clean) }
    }

    fn names(&self) -> Vec<&'static str> {
        let mut names = vec!["q", "k"];
        names.extend(self.v.as_ref().map(|_| "v"));
        names.extend(self.inputs.sink.as_ref().map(|_| "sink"));
        names
    }

    fn at(&self, values: &[Vec<f64>]) -> Result<reference::Inputs, dsv4_reference::Error> {
        let (base, _) = self.inputs.reference()?;
        let mut inputs = base;
        for (name, values) in self.names().into_iter().zip(values) {
            match name {
                "q" => inputs.q = tensor(values.clone(), &self.inputs.q.shape)?,
                "k" => inputs.k = tensor(values.clone(), &self.k.shape)?,
                "v" => {
                    inputs.value =
                        reference::Value::Separate(tensor(values.clone(), &[self.k.shape[0], self.inputs.case.v_dim])?)
                }
                _ => inputs.sink = Some(tensor(values.clone(), &[self.inputs.case.num_heads])?),
            }
        }
        Ok(inputs)
    }

    fn values(&self) -> Vec<Vec<f64>> {
        self.inputs().into_iter().map(|(_, values)| values).collect()
    }

    fn upstream(&self, upstream: &[Vec<f64>]) -> Result<reference::Upstream, dsv4_reference::Error> {
        let case = &self.inputs.case;
        Ok(reference::Upstream {
            dout: tensor(upstream[0].clone(), &self.inputs.dout.shape)?,
            dlse: Some(tensor(upstream[1].clone(), &[case.num_tokens, case.num_heads])?),
        })
    }

    fn gradients(gradients: &reference::Gradients) -> Result<Vec<Vec<f64>>, dsv4_reference::Error> {
        let all = [Some(&gradients.dq), Some(&gradients.dk), gradients.dv.as_ref(), gradients.dsink.as_ref()];
        Ok(all.into_iter().flatten().map(elements).collect::<Result<_, _>>()?)
    }
}

impl GradientProbe for Probe<'_> {
    fn inputs(&self) -> Vec<(&'static str, Vec<f64>)> {
        let inputs = self.inputs;
        let mut all = vec![("q", inputs.q.to_f64()), ("k", self.k.to_f64())];
        all.extend(self.v.as_ref().map(|v| ("v", v.to_f64())));
        all.extend(inputs.sink.as_ref().map(|sink| ("sink", sink.to_f64())));
        all
    }

    fn outputs(&self, inputs: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CaseError> {
        let run = || {
            let outputs = reference::forward(&self.at(inputs)?, &mut Rounding::exact())?;
            Ok(vec![elements(&outputs.out)?, elements(&outputs.lse)?])
        };
        run().map_err(|e: dsv4_reference::Error| oracle_error(NAME, e))
    }

    fn autograd(&self, upstream: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CaseError> {
        let run = || {
            let inputs = self.at(&self.values())?;
            Self::gradients(&reference::backward_autograd(&inputs, &self.upstream(upstream)?)?)
        };
        run().map_err(|e| oracle_error(NAME, e))
    }

    fn backward(&self, upstream: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CaseError> {
        let run = || {
            let inputs = self.at(&self.values())?;
            Self::gradients(&reference::backward(&inputs, &self.upstream(upstream)?, &mut Rounding::exact())?)
        };
        run().map_err(|e| oracle_error(NAME, e))
    }
}

/// `attn_core`: every visible key of a row is a slot of its list; batches are stacked.
fn golden_case(file: &GoldenFile) -> Result<GoldenCase, String> {
    let (q, kv, visible) = (file.tensor("in.q")?, file.tensor("in.kv")?, file.tensor("mid.visible")?);
    let [batches, heads, tokens, head_dim] = <[usize; 4]>::try_from(q.shape.as_slice()).map_err(|_| "in.q: 4 axes")?;
    let keys = kv.shape[2];
    let heads_last = |values: &[f64]| -> Vec<f64> {
        let at = |b: usize, t: usize, h: usize| ((b * heads + h) * tokens + t) * head_dim;
        let rows = (0..batches).flat_map(|b| (0..tokens).flat_map(move |t| (0..heads).map(move |h| (b, t, h))));
        rows.flat_map(|(b, t, h)| values[at(b, t, h)..at(b, t, h) + head_dim].iter().copied()).collect()
    };
    let case = SparseAttentionCase {
        softmax_scale: file.number("scale")? as f32,
        poison_unreferenced: false,
        ..SparseAttentionCase::plain(batches * tokens, heads, head_dim, batches * keys, keys)
    };
    let row_shape = [batches * tokens, heads, head_dim];
    let slot = |b: usize, t: usize, key: usize| {
        if visible.values[(b * tokens + t) * keys + key] != 0.0 { (b * keys + key) as i32 } else { -1 }
    };
    let indices = (0..batches)
        .flat_map(|b| (0..tokens).flat_map(move |t| (0..keys).map(move |key| (b, t, key))))
        .map(|(b, t, key)| slot(b, t, key))
        .collect();
    let inputs = Inputs {
        q: HostTensor::from_f64(DType::Bf16, &row_shape, &heads_last(&q.values)),
        k: HostTensor::from_f64(DType::Bf16, &[batches * keys, head_dim], &kv.values),
        v: None,
        sink: Some(HostTensor::from_f64(DType::F32, &[heads], &file.tensor("in.sinks")?.values)),
        indices,
        topk_length: None,
        dout: HostTensor::from_f64(DType::Bf16, &row_shape, &file.tensor("gout.y")?.values),
        dlse: None,
        softmax_scale: file.number("scale")?,
        case,
    };
    let tensor = |name, stored_as: &str, reorder: bool| {
        let stored = file.tensor(stored_as)?;
        let values = if reorder { heads_last(&stored.values) } else { stored.values.clone() };
        Ok::<_, String>(ExpectedTensor {
            name,
            stored_as: stored_as.to_owned(),
            values,
            stored_f32: stored.stored_f32,
            computed_f32: false,
        })
    };
    let expected = vec![
        tensor("out", "out.y", false)?,
        tensor("dq", "grad.in.q", true)?,
        tensor("dk", "grad.in.kv", false)?,
        tensor("dsink", "grad.in.sinks", false)?,
    ];
    let kernel_skip = (!head_dim.is_multiple_of(16))
        .then(|| format!("head_dim {head_dim} is no multiple of 16, which the kernel needs"));
    Ok(GoldenCase { prepared: Box::new(inputs), expected, kernel_skip })
}
