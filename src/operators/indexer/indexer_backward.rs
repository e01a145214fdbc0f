//! `indexer_backward` (training 1, stage 2 of training 7):
//! `kernels/cuda/indexer/indexer_backward.cu` against `reference/src/indexer/indexer_backward.rs`.

use dsv4_kernels::indexer::indexer_backward::{self as launcher, HEAD_DIM, MAX_HEADS};
use dsv4_reference::indexer::indexer_backward as reference;
use rand::seq::SliceRandom;

use crate::case::permutation;
use crate::operator::benchmarks::Whole;
use crate::operator::prelude::*;
use crate::operator::tensors::permuted_along;
use crate::operators::attention::sparse_attention::KeyGradients;
use crate::operators::indexer::ranking::{self, Arrangement, RankedKeys};
use crate::operators::lists::{self, IndexClass, Lengths, compact, distinct};

/// The operator.
pub struct IndexerBackward;

/// A case: which slots are valid, heads, types, scale, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IndexerBackwardCase {
    /// Sizes, lists, limits and sequences.
    #[serde(flatten)]
    pub keys: RankedKeys,
    /// Indexer heads, up to 64.
    pub num_heads: usize,
    /// Type of w and dw.
    pub weight: Float,
    /// Multiplies the logits.
    pub sm_scale: f32,
    /// The order of the sums of dk.
    pub key_gradients: KeyGradients,
    /// q is 2^this times as large as k.
    pub query_exponent: i32,
    /// Whether every product of q and k is negative or 0, so that no gradient passes.
    pub nothing_passes: bool,
    /// Whether queries of tokens without a valid slot, keys that no valid slot references, and
    /// upstream gradients of invalid slots are NaN.
    pub poison_unreferenced: bool,
}

/// Values of q and k are multiples of this, so all their products are multiples of its square. The
/// order of sums and rounding then never decide whether a product is above 0. Some products are 0.
const GRID: f64 = 0.125;

impl IndexerBackwardCase {
    fn of(keys: RankedKeys, num_heads: usize) -> Self {
        Self {
            keys,
            num_heads,
            weight: Float::F32,
            sm_scale: 0.088_388_35,
            key_gradients: KeyGradients::Atomic,
            query_exponent: 0,
            nothing_passes: false,
            poison_unreferenced: true,
        }
    }

    fn selected(num_tokens: usize, num_heads: usize, num_keys: usize, topk: usize) -> Self {
        Self::of(RankedKeys::selected(num_tokens, num_keys, topk), num_heads)
    }

    fn causal(num_tokens: usize, num_heads: usize, num_keys: usize, ratio: usize) -> Self {
        Self::of(RankedKeys::causal(num_tokens, num_keys, ratio), num_heads)
    }

    fn options(&self, v: &Views) -> Result<launcher::Options, RuntimeError> {
        let options = launcher::Options {
            global: self.keys.global,
            ratio: self.keys.ratio,
            sm_scale: self.sm_scale,
            key_gradients: launcher::KeyGradients::Atomic,
        };
        let chunk_tokens = match self.key_gradients {
            KeyGradients::Atomic => return Ok(options),
            KeyGradients::Deterministic => self.keys.num_tokens.div_ceil(3).max(1),
            KeyGradients::DeterministicAsAdvised => launcher::default_chunk_tokens(v, options)?,
        };
        Ok(launcher::Options {
            key_gradients: launcher::KeyGradients::Deterministic { chunk_tokens },
            ..options
        })
    }

    fn is_atomic(&self) -> bool {
        self.key_gradients == KeyGradients::Atomic
    }
}

impl Operator for IndexerBackward {
    type Case = IndexerBackwardCase;
    const SUM_LANES: usize = 4;

    const ABOUT: About = About {
        name: "indexer_backward",
        family: Family::Indexer,
        summary: "gradients of the indexer's queries, keys and head weights from that of its logits, sparse or dense",
        specification: &["training 1", "training 7"],
        paths: &[
            "indexer_backward<selected>",
            "indexer_backward<causal>",
            "indexer_backward<selected, deterministic>",
            "indexer_backward<causal, deterministic>",
            "indexer_backward_zero",
            "indexer_backward_sum",
        ],
        modules: launcher::modules,
        cases: [24, 60, 100],
    };

    fn tensors(c: &IndexerBackwardCase) -> Specs {
        let (tokens, keys) =
            (axis("num_tokens", c.keys.num_tokens), axis("num_keys", c.keys.num_keys));
        let (heads, head_dim) =
            (axis("num_heads", c.num_heads).multiples(1, MAX_HEADS), axis("head_dim", HEAD_DIM));
        let (slots, weight) = (axis(c.keys.slot_axis(), c.keys.slots()), c.weight.dtype());
        let (normal, q_size) = (Distribution::Normal, f64::from(c.query_exponent).exp2());
        let operands = [
            input("q", DType::Bf16, &[tokens, heads, head_dim])
                .aligned_rows()
                .of_any_size()
                .drawn(normal, q_size),
            input("k", DType::Bf16, &[keys, head_dim])
                .aligned_rows()
                .of_any_size()
                .drawn(normal, 1.0),
            input("w", weight, &[tokens, heads]).rows().of_any_size().drawn(normal, 1.0),
            input("dlogits", DType::F32, &[tokens, slots]).rows().of_any_size().drawn(normal, 1.0),
        ];
        let gradients = [
            output("dq", DType::Bf16, &[tokens, heads, head_dim]).aligned_rows(),
            output("dk", DType::F32, &[keys, head_dim]).aligned_rows().atomic_if(c.is_atomic()),
            output("dw", weight, &[tokens, heads]).rows(),
        ];
        let tensors = operands.into_iter().chain(c.keys.tensors()).chain(gradients);
        Specs::new(c.keys.seed, tensors).positive("sm_scale", c.sm_scale)
    }

    fn check(c: &IndexerBackwardCase) -> Result<(), Refused> {
        if !(-60..=60).contains(&c.query_exponent) {
            return refuse("query_exponent", format!("{} must be -60 to 60", c.query_exponent));
        }
        c.keys.check()
    }

    fn oracle_elements(c: &IndexerBackwardCase) -> u128 {
        lists::gathered(c.keys.num_tokens, c.keys.slots(), HEAD_DIM, c.num_heads)
    }

    fn strategy(profile: Profile) -> BoxedStrategy<IndexerBackwardCase> {
        let keys =
            RankedKeys::strategy(profile.of([[7, 120, 150], [9, 300, 300], [16, 1200, 1100]]));
        let heads = prop_oneof![1 => Just(64usize), 1 => Just(1usize), 3 => 1..=MAX_HEADS];
        // Powers of two and others; the model's own is 128^-1/2.
        let sm_scale = select(vec![0.088_388_35f32, 0.3, 1.0, 0.125]);
        let sums = select(vec![KeyGradients::Atomic, KeyGradients::Deterministic]);
        let classes = (
            select(vec![0, 0, -20, 5]),
            prop_oneof![9 => Just(false), 1 => Just(true)],
            any::<bool>(),
        );
        (keys, heads, Float::strategy(), sm_scale, sums, classes)
            .prop_map(|(keys, num_heads, weight, sm_scale, key_gradients, classes)| {
                let (query_exponent, nothing_passes, poison_unreferenced) = classes;
                let of = IndexerBackwardCase::of(keys, num_heads);
                IndexerBackwardCase {
                    weight,
                    sm_scale,
                    key_gradients,
                    query_exponent,
                    nothing_passes,
                    poison_unreferenced,
                    ..of
                }
            })
            .boxed()
    }

    fn typical() -> Vec<IndexerBackwardCase> {
        let (selected, causal) = (IndexerBackwardCase::selected, IndexerBackwardCase::causal);
        let within = RankedKeys {
            lengths: Lengths::Within,
            packed: true,
            ..RankedKeys::selected(5, 40, 70)
        };
        vec![
            IndexerBackwardCase::of(within, 21),
            causal(4, 17, 33, 2).with(|case| case.weight = Float::Bf16).then(summed),
            selected(3, 5, 20, 19).then(summed),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<IndexerBackwardCase> {
        let (selected, causal) = (IndexerBackwardCase::selected, IndexerBackwardCase::causal);
        let keys = |case: IndexerBackwardCase, change: fn(RankedKeys) -> RankedKeys| {
            IndexerBackwardCase { keys: change(case.keys.clone()), ..case }
        };
        let mut cases = vec![
            selected(0, 4, 9, 5),
            causal(0, 4, 9, 4).then(summed),
            selected(3, 5, 0, 7),
            selected(3, 5, 0, 7).then(summed),
            causal(3, 5, 0, 4),
            selected(2, 3, 11, 0).then(summed),
            selected(2, 3, 11, 0),
            causal(1, 1, 1, 1),
            selected(2, 64, 90, 140),
            keys(selected(5, 64, 40, 64), |keys| RankedKeys {
                indices: IndexClass::EmptyRows,
                ..keys
            }),
            keys(selected(7, 17, 23, 70), |keys| RankedKeys { lengths: Lengths::Hostile, ..keys }),
            keys(selected(9, 33, 60, 65), |keys| RankedKeys {
                packed: true,
                lengths: Lengths::Within,
                ..keys
            }),
            keys(selected(9, 5, 60, 65).then(summed), |keys| RankedKeys {
                packed: true,
                global: true,
                ..keys
            }),
            keys(selected(5, 16, 7, 130), |keys| RankedKeys {
                indices: IndexClass::Duplicates,
                ..keys
            }),
            keys(selected(7, 3, 1, 120).then(summed), |keys| RankedKeys {
                indices: IndexClass::Duplicates,
                ..keys
            }),
            keys(selected(3, 8, 50, 150), |keys| RankedKeys {
                indices: IndexClass::LeadingMasked,
                ..keys
            }),
            keys(causal(9, 32, 150, 4), |keys| RankedKeys { packed: true, ..keys }),
            keys(causal(13, 5, 9, 3), |keys| RankedKeys { q_off: false, ..keys }),
            // Keys after the last column.
            keys(causal(9, 6, 90, 1), |keys| RankedKeys { packed: true, left_out: 40, ..keys }),
            keys(causal(9, 6, 90, 1).then(summed), |keys| RankedKeys {
                packed: true,
                left_out: 40,
                ..keys
            }),
            causal(5, 40, 200, 1).then(summed),
            selected(3, 24, 40, 70).with(|case| case.nothing_passes = true),
            selected(3, 20, 40, 70).with(|case| {
                case.query_exponent = -20;
                case.weight = Float::Bf16;
                case.sm_scale = 0.3;
            }),
        ];
        if profile == Profile::Full {
            cases.extend([
                selected(12, 64, 4096, 512),
                selected(6, 64, 4096, 1024),
                selected(8, 64, 2000, 1024).then(summed),
            ]);
            cases.push(causal(8, 64, 1500, 1));
        }
        cases
    }

    fn amend(c: &IndexerBackwardCase, tensors: &mut Tensors) -> OracleResult<()> {
        let q_size = f64::from(c.query_exponent).exp2();
        let side = |x: f64, sign: f64| if c.nothing_passes { sign * x.abs() } else { x };
        for (name, size, sign) in [("q", q_size, 1.0), ("k", 1.0, -1.0)] {
            let on_grid = |x: f64| side((x / size / GRID).round() * GRID * size, sign);
            tensors.edit(name, |numbers| numbers.iter_mut().for_each(|x| *x = on_grid(*x)));
        }
        // All products of every seventh key are 0 as well, and do not pass.
        tensors
            .edit("k", |k| k.chunks_mut(HEAD_DIM).skip(3).step_by(7).for_each(|row| row.fill(0.0)));
        c.keys.amend(tensors);
        if c.poison_unreferenced {
            c.keys.poison_unreferenced(tensors, c.num_heads * HEAD_DIM, HEAD_DIM);
        }
        Ok(())
    }

    fn forward(
        c: &IndexerBackwardCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        let inputs = reference::Inputs {
            q: t.f64("q")?,
            k: t.f64("k")?,
            w: t.f64("w")?,
            dlogits: t.f64("dlogits")?,
            ranking: c.keys.reference(t.host()),
            sequences: c.keys.sequences(),
            sm_scale: t.scalar("sm_scale", f64::from(c.sm_scale)),
        };
        let reference::Gradients { dq, dk, dw } = reference::backward(&inputs, rounding)?;
        Ok(Named::new().with("dq", dq).with("dk", dk).with("dw", dw))
    }

    fn workspaces(
        c: &IndexerBackwardCase,
        v: &Views,
        _: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        let bytes = launcher::workspace_bytes(v, c.options(v)?)?;
        Ok((bytes > 0).then_some(("workspace", bytes)).into_iter().collect())
    }

    fn launch(
        c: &IndexerBackwardCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        let options = c.options(v)?;
        run.launch(|device| launcher::backward(device, v, options))
    }

    fn invariant(_: &IndexerBackwardCase, _: bool) -> &'static [BatchAxis] {
        &[BatchAxis::Company, BatchAxis::Buckets, BatchAxis::Chunks]
    }

    fn batches(c: &IndexerBackwardCase, batches: &mut Batches<'_, Self>) {
        ranking::batches(&c.keys, batches, |case| &mut case.keys);
    }

    fn laws(c: &IndexerBackwardCase, laws: &mut Laws<'_, Self>) {
        if c.keys.num_tokens == 0 {
            return;
        }
        let dk = |factor: f64| {
            if c.is_atomic() { Relation::WithinBudget } else { Relation::Times(factor) }
        };
        let of = |dq: f64, dw: f64| {
            [("dq", Relation::Times(dq)), ("dw", Relation::Times(dw)), ("dk", dk(1.0))]
        };
        laws.exchange(
            "sm_scale counts once",
            "w",
            "sm_scale",
            |case| &mut case.sm_scale,
            of(1.0, 0.25),
        );
        laws.exchange(
            "sm_scale counts once in dk",
            "q",
            "sm_scale",
            |case| &mut case.sm_scale,
            of(0.25, 1.0),
        );
        let linear = [("dq", 4.0), ("dw", 4.0), ("dk", 4.0)];
        laws.scale(
            "dlogits scales the gradients once",
            "dlogits",
            4.0,
            &linear[..if c.is_atomic() { 2 } else { 3 }],
        );
        if c.keys.packed {
            ranking::ends_law(laws, c.keys.num_keys, of(1.0, 1.0));
        }
        laws.independent("num_tokens");
        if c.keys.is_selected() && !c.keys.packed {
            token_law(c, laws);
        }
        if c.keys.is_selected() && c.keys.topk > 1 {
            slot_law(c, laws);
        }
    }

    /// 4096 queries of the model's 64 heads over lists of its two lengths. Every slot is valid, and
    /// the slots of a token are distinct.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let form = |case: IndexerBackwardCase| IndexerBackwardCase {
            keys: RankedKeys { indices: IndexClass::Valid, global: true, ..case.keys },
            poison_unreferenced: false,
            ..case
        };
        let (selected, causal) = (IndexerBackwardCase::selected, IndexerBackwardCase::causal);
        let advised = |case| IndexerBackwardCase {
            key_gradients: KeyGradients::DeterministicAsAdvised,
            ..case
        };
        let cases = match on_gpu(environment) {
            true => {
                let flash = selected(4096, 64, 8192, 512);
                vec![
                    flash.clone(),
                    selected(4096, 64, 8192, 1024),
                    causal(4096, 64, 2048, 4),
                    advised(flash),
                ]
            }
            false => vec![
                selected(4, 16, 64, 32),
                causal(4, 16, 64, 4),
                advised(selected(4, 16, 64, 32)),
            ],
        };
        cases.into_iter().map(|case| timed(form(case))).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![
            Reduced::forward(
                &["q4096 k8192 H64 D128 topk512", "q4096 k8192 H64 D128 topk512 deterministic"],
                json!({"num_tokens": 7, "num_heads": 5, "num_keys": 90, "topk": 40}),
                json!({"num_tokens": 2, "num_keys": 44}),
            ),
            Reduced::forward(
                &["q4096 k2048 H64 D128 dense"],
                json!({"num_tokens": 9, "num_heads": 5, "num_keys": 30}),
                json!({"num_tokens": 2}),
            ),
        ]
    }
}

/// Position of the first query of a benchmark in the dense form: the last one sees the last key.
fn first_position(c: &IndexerBackwardCase) -> usize {
    (c.keys.ratio * c.keys.num_keys).saturating_sub(c.keys.num_tokens)
}

fn timed(case: IndexerBackwardCase) -> Benchmark<IndexerBackward> {
    let RankedKeys { num_tokens, num_keys, topk, ratio, .. } = case.keys;
    let first = first_position(&case);
    let seen = |token: usize| ((first + token + 1) / ratio).min(num_keys);
    let slots: usize =
        if case.keys.is_selected() { num_tokens * topk } else { (0..num_tokens).map(seen).sum() };
    let order = if case.is_atomic() { "" } else { " deterministic" };
    let rows = if case.keys.is_selected() { format!("topk{topk}") } else { "dense".to_owned() };
    let name = format!("q{num_tokens} k{num_keys} H{} D{HEAD_DIM} {rows}{order}", case.num_heads);
    // Three GEMMs of 2·H·D FLOP for each slot.
    let flops = 6.0 * (slots * case.num_heads * HEAD_DIM) as f64;
    let benchmark =
        Benchmark::new(Direction::Forward, name, case, "num_tokens").also_drawn_along("num_keys");
    Benchmark {
        amend: |c, tensors| {
            let RankedKeys { num_tokens, topk, num_keys, seed, .. } = c.keys;
            if c.keys.is_selected() {
                let lists = distinct((seed, "indices"), [num_tokens, topk, num_keys], |_| 0);
                tensors.put("indices", HostTensor::from_i32(&[num_tokens, topk], &lists));
            } else {
                tensors.set_i32s("q_off", &[first_position(c) as i32]);
            }
        },
        sampled: set_apart,
        ..benchmark.streaming(&[], 0.0).computing(flops)
    }
}

/// Removes keys that no sampled token references. In the dense form each token becomes a separate
/// sequence.
fn set_apart(
    whole: &Whole<'_, IndexerBackward>,
    c: &mut IndexerBackwardCase,
    tensors: &mut Tensors,
) {
    if c.keys.is_selected() {
        c.keys.num_keys = compact(tensors, "indices", &["k"], 1);
        return;
    }
    let order: Vec<usize> = whole.rows.iter().flat_map(|_| 0..whole.case.keys.num_keys).collect();
    let keys = permuted_along(tensors.tensor("k"), 0, &order);
    tensors.put("k", keys);
    (c.keys.arrangement, c.keys.num_keys) = (Arrangement::Apart, order.len());
    let offsets: Vec<i32> =
        whole.rows.iter().map(|row| (first_position(whole.case) + row) as i32).collect();
    tensors.put("q_off", HostTensor::from_i32(&[offsets.len()], &offsets));
    if let Some(sequences) = c.keys.sequences() {
        tensors.put("cu_q", HostTensor::from_i32(&[sequences.cu_q.len()], &sequences.cu_q));
        tensors.put("cu_k", HostTensor::from_i32(&[sequences.cu_k.len()], &sequences.cu_k));
    }
}

fn summed(case: IndexerBackwardCase) -> IndexerBackwardCase {
    IndexerBackwardCase { key_gradients: KeyGradients::Deterministic, ..case }
}

/// Tokens may come in another order. Their tensors follow it, and dk stays the same except for the
/// order of its sums.
fn token_law(c: &IndexerBackwardCase, laws: &mut Laws<'_, IndexerBackward>) {
    if c.keys.num_tokens < 2 {
        return;
    }
    let (specs, order) = (IndexerBackward::tensors(c), permutation(c.keys.seed, c.keys.num_tokens));
    let follows = |name| (name, Relation::PermutedAlong { axis: 0, order: order.clone() });
    let relations = [follows("dq"), follows("dw"), ("dk", Relation::WithinBudget)];
    laws.law(
        "tokens may be permuted",
        |v| v.tensors.permute(&specs, "num_tokens", &order),
        relations,
    );
}

/// The order of the slots does not matter. Slots beyond a length stay beyond it.
fn slot_law(c: &IndexerBackwardCase, laws: &mut Laws<'_, IndexerBackward>) {
    let [num_tokens, topk] = c.keys.lists();
    let relations = laws.all(Relation::WithinBudget);
    let change = |v: &mut Variant<IndexerBackward>| {
        let lengths = lists::within_lengths(&v.tensors, "topk_length", c.keys.lists());
        let mut from: Vec<usize> = (0..num_tokens * topk).collect();
        for (token, (slots, length)) in from.chunks_mut(topk).zip(lengths).enumerate() {
            slots[..length].shuffle(Draw::numbered(c.keys.seed, "slots", token).rng());
        }
        for name in ["dlogits", "indices"] {
            let tensor = v.tensors.tensor(name).clone();
            let flat = HostTensor { shape: vec![num_tokens * topk], ..tensor.clone() };
            let HostTensor { bytes, .. } = permuted_along(&flat, 0, &from);
            v.tensors.put(name, HostTensor { bytes, ..tensor });
        }
    };
    laws.law("slots may be permuted", change, relations);
}
