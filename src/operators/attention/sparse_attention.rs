//! `sparse_attention` (inference 8, training 3 and 4):
//! `kernels/cuda/attention/sparse_attention.cu` against
//! `reference/src/attention/sparse_attention.rs`.

use dsv4_kernels::attention::sparse_attention as launcher;
use dsv4_reference::attention::sparse_attention as reference;
use rand::seq::SliceRandom;

use crate::operator::declaration::TensorSpec;
use crate::operator::fields::Implementation;
use crate::operator::prelude::*;
use crate::operators::attention::sinks::Sinks;
use crate::operators::head::logits;
use crate::operators::lists::{self, IndexClass, Lengths, compact, distinct};

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
    /// A separate tensor.
    Separate,
}

/// How the gradients of keys are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeyGradients {
    /// By fp32 atomics.
    Atomic,
    /// In one order, a third of the tokens at a time. This tests the borders of chunks.
    Deterministic,
    /// In one order, in chunks of the size that the launcher recommends.
    DeterministicAsAdvised,
}

/// A case: sizes, lists, sinks, scale, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SparseAttentionCase {
    /// Queries; 0 is allowed.
    pub num_tokens: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Width of q and k: a multiple of 16 up to 576.
    pub head_dim: usize,
    /// Where the values come from.
    pub values: Values,
    /// Width of the values: a multiple of 16 up to 512.
    pub v_dim: usize,
    /// Keys; 0 is allowed.
    pub num_keys: usize,
    /// Slots of a list; 0 is allowed.
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
    /// Whether lse has its own upstream gradient.
    pub dlse: bool,
    /// Distribution of the data.
    pub distribution: Distribution,
    /// Whether keys that no valid slot references are NaN.
    pub poison_unreferenced: bool,
    /// Which kernels run.
    pub implementation: Implementation,
    /// How dk and dv are summed.
    pub key_gradients: KeyGradients,
    /// Seed of the data.
    pub seed: u64,
}

impl SparseAttentionCase {
    pub(crate) fn plain(
        num_tokens: usize,
        num_heads: usize,
        head_dim: usize,
        num_keys: usize,
        topk: usize,
    ) -> Self {
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
            distribution: Distribution::Normal,
            poison_unreferenced: true,
            implementation: Implementation::Portable,
            key_gradients: KeyGradients::Atomic,
            seed: 1,
        }
    }

    /// The number of lists and of slots in each.
    fn lists(&self) -> [usize; 2] {
        [self.num_tokens, self.topk]
    }

    /// What launchers receive in addition to the tensors.
    pub(crate) fn options(&self, v: &Views) -> Result<launcher::Options, RuntimeError> {
        let options = launcher::Options {
            v_dim: (self.values != Values::Separate).then_some(self.v_dim),
            softmax_scale: self.softmax_scale,
            implementation: self.implementation.launcher(),
            key_gradients: launcher::KeyGradients::Atomic,
        };
        let chunk_tokens = match self.key_gradients {
            KeyGradients::Atomic => return Ok(options),
            KeyGradients::Deterministic => self.num_tokens.div_ceil(3).max(1),
            KeyGradients::DeterministicAsAdvised => launcher::default_chunk_tokens(v, options)?,
        };
        Ok(launcher::Options {
            key_gradients: launcher::KeyGradients::Deterministic { chunk_tokens },
            ..options
        })
    }
}

/// The paths that a case's record may report.
pub(crate) const PATHS: &[&str] = &[
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

fn inputs(c: &SparseAttentionCase, t: &Bound<'_>) -> OracleResult<reference::Inputs> {
    let value = match t.maybe("v")? {
        Some(v) => reference::Value::Separate(v),
        None if c.v_dim == c.head_dim => reference::Value::Shared,
        None => reference::Value::Prefix { v_dim: c.v_dim },
    };
    Ok(reference::Inputs {
        q: t.f64("q")?,
        k: t.f64("k")?,
        value,
        sink: t.maybe("sink")?,
        indices: t.host().i32s("indices"),
        topk: c.topk,
        topk_length: t.host().maybe_i32s("topk_length"),
        softmax_scale: t.scalar("softmax_scale", f64::from(c.softmax_scale)),
    })
}

impl Operator for SparseAttention {
    type Case = SparseAttentionCase;
    const SUM_LANES: usize = 4;

    const ABOUT: About = About {
        name: "sparse_attention",
        family: Family::Attention,
        summary: "attention of each query over a list of gathered keys, with a sink per head",
        specification: &["inference 8", "inference 8.1", "training 3", "training 4"],
        paths: PATHS,
        modules: launcher::modules,
        cases: [24, 60, 100],
    };

    const GOLDEN: &'static [&'static str] = &["attn_core"];

    fn tensors(c: &SparseAttentionCase) -> Specs {
        let (tokens, heads) =
            (axis("num_tokens", c.num_tokens), axis("num_heads", c.num_heads).not_empty());
        let (width, v_dim) = (
            axis("head_dim", c.head_dim).multiples(16, 576),
            axis("v_dim", c.v_dim).multiples(16, 512),
        );
        let (keys, slots) = (axis("num_keys", c.num_keys), axis("topk", c.topk));
        let (per_head, gathered) = ([tokens, heads], c.key_gradient.dtype());
        let atomic = c.key_gradients == KeyGradients::Atomic;
        let drawn = |spec: TensorSpec, size| spec.aligned_rows().drawn(c.distribution, size);
        let q_size = logits::query_size(c.logit_deviation, c.softmax_scale, c.head_dim);
        let tensors = [
            drawn(input("q", DType::Bf16, &[tokens, heads, width]), q_size),
            drawn(input("k", DType::Bf16, &[keys, width]), 1.0),
            drawn(input("v", DType::Bf16, &[keys, v_dim]).of_any_size(), 1.0)
                .when(c.values == Values::Separate),
            input("sink", DType::F32, &[heads]).when(c.sinks != Sinks::Absent),
            input("indices", DType::I32, &[tokens, slots]).rows(),
            input("topk_length", DType::I32, &[tokens]).when(c.lengths != Lengths::Absent),
            output("out", DType::Bf16, &[tokens, heads, v_dim]).aligned_rows(),
            output("lse", DType::F32, &per_head),
            output("max_logits", DType::F32, &per_head),
            upstream("dout", "out").drawn(c.distribution, 1.0),
            upstream("dlse", "lse").when(c.dlse),
            gradient("dq", "q", DType::Bf16),
            gradient("dk", "k", gathered).atomic_if(atomic),
            gradient("dv", "v", gathered).atomic_if(atomic),
            gradient("dsink", "sink", DType::F32),
        ];
        let specs = Specs::new(c.seed, tensors).positive("softmax_scale", c.softmax_scale);
        specs
            .positive("logit_deviation", c.logit_deviation)
            .shift_of_logits("logit_deviation", c.logit_deviation)
            .shift_of_logits("logit_shift", c.logit_shift)
    }

    fn check(c: &SparseAttentionCase) -> Result<(), Refused> {
        let v_fits = match c.values {
            Values::Shared => c.v_dim == c.head_dim,
            Values::Prefix => c.v_dim <= c.head_dim,
            Values::Separate => true,
        };
        if !v_fits {
            return refuse(
                "v_dim",
                format!(
                    "{} does not fit {:?} values of head_dim {}",
                    c.v_dim, c.values, c.head_dim
                ),
            );
        }
        if c.implementation == Implementation::Hopper && !fits_hopper(c) {
            let shape = format!("{:?} values of {} in head_dim {}", c.values, c.v_dim, c.head_dim);
            return refuse(
                "implementation",
                format!("hopper takes a V that is 512 columns of 512 or 576, not {shape}"),
            );
        }
        Ok(())
    }

    fn oracle_elements(c: &SparseAttentionCase) -> u128 {
        let width = c.head_dim + if c.values == Values::Separate { c.v_dim } else { 0 };
        lists::gathered(c.num_tokens, c.topk, width, c.num_heads)
    }

    fn strategy(profile: Profile) -> BoxedStrategy<SparseAttentionCase> {
        let shape = shape_strategy(profile);
        let lists = (IndexClass::strategy(), Lengths::strategy(), Sinks::strategy());
        // Powers of two and others; the model's own are 512^-1/2 and 192^-1/2.
        let scale = prop::sample::select(vec![0.044_194_174f32, 0.072_168_78, 0.125, 0.3, 1.0]);
        let logits = (
            scale,
            prop::sample::select(logits::DEVIATIONS.to_vec()),
            prop_oneof![4 => Just(0.0), 1 => Just(-200.0)],
        );
        let sums = prop_oneof![Just(KeyGradients::Atomic), Just(KeyGradients::Deterministic)];
        let gradients = (prop_oneof![Just(Float::Bf16), Just(Float::F32)], any::<bool>(), sums);
        let data = (
            prop::sample::select(vec![
                Distribution::Normal,
                Distribution::Uniform,
                Distribution::RowScaled,
            ]),
            any::<bool>(),
            prop_oneof![1 => Just(Implementation::Portable), 2 => Just(Implementation::Hopper)],
            0..1000u64,
        );
        (shape, lists, logits, gradients, data)
            .prop_map(|(shape, lists, logits, (key_gradient, dlse, key_gradients), data)| {
                let (num_tokens, num_heads, (values, head_dim, v_dim), num_keys, topk) = shape;
                let (indices, lengths, sinks) = lists;
                let (softmax_scale, logit_deviation, logit_shift) = logits;
                let (distribution, poison_unreferenced, implementation, seed) = data;
                // Hopper supports few geometries; only the portable kernels support the others.
                let hopper = values != Values::Separate && v_dim == 512;
                let implementation = if hopper { implementation } else { Implementation::Portable };
                // One key that takes all of a softmax leaves gradients below the rounding of the
                // terms that they are a difference of. So scaled rows must not scale logits to
                // hundreds. Where most softmaxes are that sharp, or most sinks or lists leave no
                // gradient, the case has more of them.
                let logit_deviation =
                    if distribution == Distribution::RowScaled { 0.1 } else { logit_deviation };
                let sharp = logit_deviation > 2.0 || sinks == Sinks::Extreme;
                let num_heads = if sharp { num_heads.max(6) } else { num_heads };
                let num_tokens =
                    if lengths == Lengths::Hostile { num_tokens.max(7) } else { num_tokens };
                SparseAttentionCase {
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
                    distribution,
                    poison_unreferenced,
                    implementation,
                    key_gradients,
                    seed,
                }
            })
            .boxed()
    }

    fn typical() -> Vec<SparseAttentionCase> {
        let plain = SparseAttentionCase::plain;
        vec![
            plain(3, 21, 64, 23, 37).with(|case| {
                case.lengths = Lengths::Within;
                case.dlse = true;
            }),
            // Sums of dk go directly to its rows, not to dense ones that are rounded into them.
            plain(3, 21, 64, 23, 37).with(|case| case.key_gradient = Float::F32),
            plain(4, 20, 64, 19, 21).with(|case| {
                case.values = Values::Separate;
                case.v_dim = 32;
                case.key_gradient = Float::F32;
                case.key_gradients = KeyGradients::Deterministic;
            }),
            plain(2, 35, 512, 20, 70)
                .with(|case| {
                    case.dlse = true;
                    case.key_gradient = Float::F32;
                })
                .then(hopper),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<SparseAttentionCase> {
        let plain = SparseAttentionCase::plain;
        let mut cases = vec![
            plain(0, 4, 64, 9, 5),
            plain(3, 5, 64, 0, 7).with(|case| case.indices = IndexClass::Valid),
            plain(2, 3, 64, 11, 0),
            plain(3, 5, 64, 30, 141).with(|case| {
                case.indices = IndexClass::LeadingMasked;
                case.logit_shift = -200.0;
            }),
            plain(7, 10, 64, 23, 70).with(|case| {
                case.lengths = Lengths::Hostile;
                case.sinks = Sinks::Extreme;
                case.dlse = true;
            }),
            plain(4, 20, 64, 40, 65).with(|case| {
                case.values = Values::Separate;
                case.v_dim = 32;
            }),
            plain(2, 5, 512, 50, 70),
            plain(2, 20, 576, 33, 65).with(|case| {
                case.values = Values::Prefix;
                case.v_dim = 512;
            }),
            plain(2, 20, 512, 50, 70).then(hopper),
            // A head that is the only one among its warp's rows, over six tiles.
            plain(2, 17, 512, 90, 330).then(hopper),
            // Rows with few weights, whose maximum rises far from one tile to the next.
            plain(1, 20, 512, 400, 330)
                .with(|case| {
                    case.indices = IndexClass::Valid;
                    case.logit_deviation = 8.0;
                })
                .then(hopper),
            // Three tiles, and one head that is the only one in its block.
            plain(7, 65, 512, 90, 140)
                .with(|case| {
                    case.lengths = Lengths::Hostile;
                    case.sinks = Sinks::Extreme;
                    case.dlse = true;
                })
                .then(hopper),
            plain(2, 20, 576, 33, 65)
                .with(|case| {
                    case.values = Values::Prefix;
                    case.v_dim = 512;
                })
                .then(hopper),
            // Lists of one tile, in sequence through one block: state left by one work tile reaches
            // the next.
            plain(12, 1, 512, 9, 5).then(hopper),
            // Rows of dk that are one product each. Single elements show what is rounded: dS, not
            // softmax_scale dS.
            plain(1, 1, 512, 200, 128)
                .with(|case| {
                    case.indices = IndexClass::Valid;
                    case.key_gradient = Float::F32;
                    case.logit_deviation = 4.0;
                })
                .then(hopper),
        ];
        // Summed in one order: no token, no slot, one key for every slot, two blocks of heads,
        // lists of thousands.
        cases.extend([
            plain(0, 4, 64, 9, 5).then(summed),
            plain(2, 3, 64, 11, 0).then(summed),
            plain(7, 3, 64, 1, 120).with(|case| case.indices = IndexClass::Duplicates).then(summed),
            plain(5, 70, 64, 40, 65)
                .with(|case| {
                    case.values = Values::Separate;
                    case.v_dim = 32;
                    case.dlse = true;
                })
                .then(summed),
            plain(1, 1, 64, 3, 8300).then(summed),
            plain(3, 20, 512, 50, 70).then(hopper).then(summed),
        ]);
        if profile == Profile::Full {
            cases.extend(production_cases());
        }
        cases
    }

    fn fastest(c: &SparseAttentionCase, environment: &Environment) -> SparseAttentionCase {
        let implementation = Implementation::fastest_for(environment, c.num_heads, fits_hopper(c));
        SparseAttentionCase { implementation, ..c.clone() }
    }

    fn cannot_run(c: &SparseAttentionCase, environment: &Environment) -> Option<String> {
        c.implementation.launcher().cannot_run_on(environment)
    }

    fn amend(c: &SparseAttentionCase, tensors: &mut Tensors) -> OracleResult<()> {
        logits::shift(tensors, c.logit_shift, c.softmax_scale, c.head_dim);
        tensors.set_i32s(
            "indices",
            &c.indices.draw(c.seed, "indices", c.num_tokens, c.topk, c.num_keys),
        );
        if let Some(lengths) = c.lengths.draw(c.seed, "topk_length", c.num_tokens, c.topk) {
            tensors.set_i32s("topk_length", &lengths);
        }
        if let Some(sink) = c.sinks.draw(c.seed, c.num_heads, c.logit_shift) {
            tensors.put("sink", sink);
        }
        if c.poison_unreferenced {
            poison_unreferenced(c, tensors);
        }
        Ok(())
    }

    fn forward(
        c: &SparseAttentionCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        let reference::Outputs { out, lse, max_logits } =
            reference::forward(&inputs(c, t)?, rounding)?;
        Ok(Named::new().with("out", out).with("lse", lse).with("max_logits", max_logits))
    }

    fn backward(
        c: &SparseAttentionCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        let upstream = reference::Upstream { dout: t.f64("dout")?, dlse: t.maybe("dlse")? };
        let reference::Gradients { dq, dk, dv, dsink } =
            reference::backward(&inputs(c, t)?, &upstream, rounding)?;
        Ok(Named::new().with("dq", dq).with("dk", dk).maybe("dv", dv).maybe("dsink", dsink))
    }

    fn backward_of_saved(
        c: &SparseAttentionCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        let saved = reference::Saved { out: t.f64("out")?, lse: t.f64("lse")? };
        let dsink =
            reference::sink_gradient_of_saved(&inputs(c, t)?, &saved, &t.f64("dout")?, rounding)?;
        Ok(Named::new().maybe("dsink", dsink))
    }

    fn workspaces(
        c: &SparseAttentionCase,
        v: &Views,
        _: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        Ok(vec![(
            "workspace",
            launcher::workspace_bytes(v, c.options(v)?, c.key_gradient.dtype())?,
        )])
    }

    fn launch(
        c: &SparseAttentionCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        let options = c.options(v)?;
        run.launch(|device| launcher::forward(device, v, options))
    }

    fn launch_backward(
        c: &SparseAttentionCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        // The Hopper backward has one geometry less than the forward.
        let implementation =
            if c.head_dim == 512 { c.implementation } else { Implementation::Portable };
        let options =
            launcher::Options { implementation: implementation.launcher(), ..c.options(v)? };
        run.launch(|device| launcher::backward(device, v, options))
    }

    fn invariant(_: &SparseAttentionCase, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn laws(c: &SparseAttentionCase, laws: &mut Laws<'_, Self>) {
        if c.num_tokens == 0 {
            return;
        }
        scale_law(c, laws);
        laws.permute("tokens may be permuted", "num_tokens");
        laws.independent("num_tokens");
        if c.topk > 0 {
            slot_law(c, laws);
            padding_law(c, laws);
        }
    }

    /// Finite differences do not exist at infinite sinks.
    fn is_smooth(c: &SparseAttentionCase) -> bool {
        let work = c.num_tokens * c.num_heads * c.topk * c.head_dim;
        c.sinks != Sinks::Extreme && work <= 1 << 18
    }

    fn golden(file: &mut Reading<'_>) -> Result<Vec<Golden<SparseAttentionCase>>, String> {
        Ok(vec![golden_case(file)?])
    }

    /// 4096 queries over gathered keys at the model's two head counts. Every slot is valid, and the
    /// slots of a token are distinct.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let fastest = Implementation::fastest_on(environment);
        let case = |num_tokens, num_heads, topk, num_keys| SparseAttentionCase {
            indices: IndexClass::Valid,
            logit_deviation: 1.0,
            poison_unreferenced: false,
            implementation: fastest,
            ..SparseAttentionCase::plain(num_tokens, num_heads, 512, num_keys, topk)
        };
        let advised = |case| SparseAttentionCase {
            key_gradients: KeyGradients::DeterministicAsAdvised,
            ..case
        };
        let backward = |case| timed(case, Direction::Backward, false);
        let both = |case: SparseAttentionCase, portable| {
            [Direction::Forward, Direction::Backward]
                .map(|direction| timed(case.clone(), direction, portable))
        };
        if !on_gpu(environment) {
            let small = case(2, 16, 32, 64);
            return both(small.clone(), false)
                .into_iter()
                .chain([backward(advised(small))])
                .collect();
        }
        let (flash, pro) = (case(4096, 64, 512, 8192), case(4096, 128, 1024, 8192));
        let portable =
            |case| SparseAttentionCase { implementation: Implementation::Portable, ..case };
        // No Hopper kernel exists for separate values.
        let separate = portable(SparseAttentionCase { values: Values::Separate, ..flash.clone() });
        let shared = [
            flash.clone(),
            case(4096, 64, 512, 32768),
            pro.clone(),
            case(4096, 128, 1024, 65536),
            separate,
        ];
        let shared = shared.into_iter().flat_map(|case| both(case, false));
        let of_both = [flash, pro];
        let portable = of_both.clone().into_iter().flat_map(|case| both(portable(case), true));
        shared
            .chain(portable)
            .chain(of_both.into_iter().map(|case| backward(advised(case))))
            .collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![
            Reduced::forward(
                &["q4096 k8192 H64 D512 topk512", "q4096 k8192 H64 D512 topk512 V"],
                json!({"num_tokens": 7, "num_heads": 5, "num_keys": 90, "topk": 40}),
                json!({"num_tokens": 2, "num_keys": 44}),
            ),
            Reduced::backward(
                &[
                    "q4096 k8192 H64 D512 topk512",
                    "q4096 k8192 H64 D512 topk512 V",
                    "q4096 k8192 H64 D512 topk512 deterministic",
                ],
                json!({"num_tokens": 7, "num_heads": 5, "num_keys": 90, "topk": 40}),
                json!({"num_tokens": 2, "num_keys": 44}),
            ),
        ]
    }
}

/// A benchmark; `portable` means that its name contains it.
fn timed(
    case: SparseAttentionCase,
    direction: Direction,
    portable: bool,
) -> Benchmark<SparseAttention> {
    let SparseAttentionCase { num_tokens, num_heads, head_dim, num_keys, topk, .. } = case;
    let (separate, atomic) =
        (case.values == Values::Separate, case.key_gradients == KeyGradients::Atomic);
    let value = if separate { " V" } else { "" };
    let (portable, order) =
        (Implementation::suffix(portable), if atomic { "" } else { " deterministic" });
    let name = format!(
        "q{num_tokens} k{num_keys} H{num_heads} D{head_dim} topk{topk}{value}{portable}{order}"
    );
    // Two GEMMs forward, five backward, of 2·T·H·topk·D FLOP each. Lists of that many random slots
    // reference every row of K (and V).
    let products = if direction == Direction::Forward { 2.0 } else { 5.0 };
    let product = 2.0 * (num_tokens * num_heads * topk * head_dim) as f64;
    let benchmark =
        Benchmark::new(direction, name, case, "num_tokens").also_drawn_along("num_keys");
    Benchmark {
        amend: |c, tensors| {
            let lists = distinct((c.seed, "indices"), [c.num_tokens, c.topk, c.num_keys], |_| 0);
            tensors.put("indices", HostTensor::from_i32(&[c.num_tokens, c.topk], &lists));
        },
        sampled: |_, c, tensors| {
            let rows = if c.values == Values::Separate { &["k", "v"][..] } else { &["k"] };
            c.num_keys = compact(tensors, "indices", rows, 1);
        },
        ..benchmark.streaming(&["out", "lse"], 0.0).computing(products * product)
    }
}

/// `(a q) · k · (scale / a)` is the same logit: the scale is applied once, everywhere.
fn scale_law(c: &SparseAttentionCase, laws: &mut Laws<'_, SparseAttention>) {
    let kept = ["out", "lse", "max_logits", "dsink"].map(|name| (name, Relation::Times(1.0)));
    let gradients = [("dk", same_sum(c)), ("dv", same_sum(c)), ("dq", Relation::Times(0.25))];
    let relations = kept.into_iter().chain(gradients);
    laws.exchange(
        "softmax_scale counts once",
        "q",
        "softmax_scale",
        |case| &mut case.softmax_scale,
        relations,
    );
}

/// The relation for dk and dv where their sums have the same terms, in the same order of tokens and
/// slots.
fn same_sum(c: &SparseAttentionCase) -> Relation {
    match c.key_gradients {
        KeyGradients::Atomic => Relation::WithinBudget,
        KeyGradients::Deterministic | KeyGradients::DeterministicAsAdvised => Relation::Times(1.0),
    }
}

/// The order of the slots does not matter. Slots beyond a length stay beyond it.
fn slot_law(c: &SparseAttentionCase, laws: &mut Laws<'_, SparseAttention>) {
    let counts = lists::within_lengths(laws.tensors(), "topk_length", c.lists());
    let relations = laws.all(Relation::WithinBudget);
    let shuffle = |lists: &mut [i32]| {
        for (token, (list, &count)) in lists.chunks_mut(c.topk).zip(&counts).enumerate() {
            list[..count].shuffle(Draw::numbered(c.seed, "slots", token).rng());
        }
    };
    laws.law("slots may be permuted", |v| v.tensors.edit_i32s("indices", shuffle), relations);
}

/// Invalid slots at the end of a list change no bit.
fn padding_law(c: &SparseAttentionCase, laws: &mut Laws<'_, SparseAttention>) {
    let extra = [-1, c.num_keys as i32, i32::MIN, i32::MAX, -1].repeat(14);
    let kept = ["out", "lse", "max_logits", "dq"].map(|name| (name, Relation::Times(1.0)));
    let keys = ["dk", "dv"].map(|name| (name, same_sum(c)));
    laws.law(
        "invalid slots add nothing",
        |v| {
            v.case.topk += extra.len();
            lists::append(&mut v.tensors, ("indices", "topk_length"), c.lists(), &extra);
        },
        kept.into_iter().chain(keys),
    );
}

pub(crate) fn summed(case: SparseAttentionCase) -> SparseAttentionCase {
    SparseAttentionCase { key_gradients: KeyGradients::Deterministic, ..case }
}

/// Whether V is 512 columns of keys of 512 or 576, the shapes of the Hopper kernels.
fn fits_hopper(c: &SparseAttentionCase) -> bool {
    c.values != Values::Separate && c.v_dim == 512 && [512, 576].contains(&c.head_dim)
}

pub(crate) fn hopper(case: SparseAttentionCase) -> SparseAttentionCase {
    SparseAttentionCase { implementation: Implementation::Hopper, ..case }
}

/// The heads and lists of the two production models, with as many tokens as the oracle can compute.
fn production_cases() -> Vec<SparseAttentionCase> {
    let plain = SparseAttentionCase::plain;
    vec![
        plain(12, 64, 512, 4096, 640),
        hopper(plain(12, 64, 512, 4096, 640)),
        plain(6, 128, 512, 4096, 1152),
        hopper(plain(6, 128, 512, 4096, 1152)),
        hopper(SparseAttentionCase {
            values: Values::Prefix,
            v_dim: 512,
            ..plain(5, 128, 576, 3000, 1025)
        }),
        // More tokens than any GPU has SMs: a block of the forward continues with a second one.
        hopper(plain(300, 3, 512, 90, 140)),
        SparseAttentionCase {
            values: Values::Separate,
            v_dim: 512,
            dlse: true,
            ..plain(5, 64, 512, 3000, 700)
        },
    ]
}

type Shape = (usize, usize, (Values, usize, usize), usize, usize);

/// Tokens, heads, geometry, keys, slots. Each geometry is a separate module, so the choices are
/// few.
fn shape_strategy(profile: Profile) -> BoxedStrategy<Shape> {
    let small = prop::sample::select(vec![
        (Values::Shared, 64, 64),
        (Values::Separate, 64, 32),
        (Values::Prefix, 80, 48),
    ]);
    let wide = prop::sample::select(vec![
        (Values::Shared, 512, 512),
        (Values::Prefix, 576, 512),
        (Values::Separate, 512, 512),
    ]);
    let heads =
        |largest: usize| prop_oneof![1 => Just(1usize), 1 => Just(16usize), 3 => 1..=largest];
    let slots =
        |largest: usize| prop_oneof![1 => Just(64usize), 1 => Just(1usize), 5 => 1..=largest];
    let few = (1..=9usize, heads(40), small.clone(), 1..=90usize, slots(150));
    match profile {
        Profile::Smoke | Profile::Quick => few.boxed(),
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

/// Keys that some valid slot references.
fn referenced(c: &SparseAttentionCase, tensors: &Tensors) -> Vec<bool> {
    let mut referenced = vec![false; c.num_keys];
    let (indices, counts) =
        (tensors.i32s("indices"), lists::within_lengths(tensors, "topk_length", c.lists()));
    for (token, count) in counts.into_iter().enumerate() {
        for &index in &indices[token * c.topk..][..count] {
            if let Some(key) =
                usize::try_from(index).ok().and_then(|index| referenced.get_mut(index))
            {
                *key = true;
            }
        }
    }
    referenced
}

/// Sets every key (and value) row that no valid slot references to NaN.
pub(crate) fn poison_unreferenced(c: &SparseAttentionCase, tensors: &mut Tensors) {
    let referenced = referenced(c, tensors);
    for (name, width) in [("k", c.head_dim), ("v", c.v_dim)] {
        let Some(bytes) = tensors.bytes_mut(name) else { continue };
        for (row, _) in bytes
            .chunks_mut(width * DType::Bf16.size())
            .zip(&referenced)
            .filter(|(_, named)| !**named)
        {
            // 0xffff is NaN in bf16.
            row.fill(0xff);
        }
    }
}

/// `attn_core`: every visible key of a row is a slot of its list; batches are stacked.
fn golden_case(file: &mut Reading<'_>) -> Result<Golden<SparseAttentionCase>, String> {
    let (of_q, of_kv) =
        (["batch", "heads", "tokens", "channels"], ["batch", "1", "keys", "channels"]);
    let of_out = ["batch", "tokens", "heads", "channels"];
    let q = file.floats("in.q", &of_q)?;
    let k = file.floats("in.kv", &of_kv)?.to_vec();
    let visible = file.mask("mid.visible", &["batch", "1", "tokens", "keys"])?;
    let [batches, heads, tokens] =
        [file.extent("batch")?, file.extent("heads")?, file.extent("tokens")?];
    let [keys, head_dim] = [file.extent("keys")?, file.extent("channels")?];
    let heads_last = |values: &[f64]| -> Vec<f64> {
        let at = |b: usize, t: usize, h: usize| ((b * heads + h) * tokens + t) * head_dim;
        let rows = (0..batches)
            .flat_map(|b| (0..tokens).flat_map(move |t| (0..heads).map(move |h| (b, t, h))));
        rows.flat_map(|(b, t, h)| values[at(b, t, h)..at(b, t, h) + head_dim].iter().copied())
            .collect()
    };
    let slot = |b: usize, t: usize, key: usize| {
        if visible[(b * tokens + t) * keys + key] { (b * keys + key) as i32 } else { -1 }
    };
    let indices = (0..batches)
        .flat_map(|b| (0..tokens).flat_map(move |t| (0..keys).map(move |key| (b, t, key))))
        .map(|(b, t, key)| slot(b, t, key))
        .collect();
    let softmax_scale = file.number("scale")?;
    let of_width = |head_dim: usize| SparseAttentionCase {
        softmax_scale: softmax_scale as f32,
        poison_unreferenced: false,
        ..SparseAttentionCase::plain(batches * tokens, heads, head_dim, batches * keys, keys)
    };
    let skip = (!head_dim.is_multiple_of(16)).then(|| {
        let why = format!("head_dim {head_dim} is no multiple of 16, which the kernel needs");
        (why, of_width(head_dim.next_multiple_of(16)))
    });
    let golden =
        Golden::new(of_width(head_dim)).kernel_skips(skip).scalar("softmax_scale", softmax_scale);
    let golden = golden.values("q", heads_last(q)).values("k", k).integers("indices", indices);
    let golden = golden
        .stored(file, "sink", "in.sinks", &["heads"])?
        .stored(file, "dout", "gout.y", &of_out)?;
    let golden = golden.expect(file, "out", "out.y", &of_out)?;
    let golden = golden.expect_reordered(file, "dq", "grad.in.q", &of_q, &heads_last)?;
    golden.expect(file, "dk", "grad.in.kv", &of_kv)?.expect(
        file,
        "dsink",
        "grad.in.sinks",
        &["heads"],
    )
}
