//! `indexer_recompute` (training 1, 6): `kernels/cuda/indexer/indexer_recompute.cu` and
//! `indexer_recompute_hopper.cu` against `reference/src/indexer/indexer_recompute.rs`.

use dsv4_kernels::indexer::indexer_recompute::{self as launcher, HEAD_DIM, MAX_HEADS};
use dsv4_reference::indexer::indexer_recompute as reference;

use crate::operator::benchmarks::Whole;
use crate::operator::fields::Implementation;
use crate::operator::prelude::*;
use crate::operators::indexer::ranking::{self, RankedKeys};
use crate::operators::lists::{self, IndexClass, Lengths, compact, distinct};

/// The operator.
pub struct IndexerRecompute;

/// A case: lists, heads, types, scale, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IndexerRecomputeCase {
    /// Sizes, lists and sequences.
    #[serde(flatten)]
    pub keys: RankedKeys,
    /// Indexer heads, up to 64.
    pub num_heads: usize,
    /// Type of w.
    pub weight: Float,
    /// Multiplies the logits.
    pub sm_scale: f32,
    /// Distribution of q, k and w.
    pub distribution: Distribution,
    /// Scale of q.
    pub magnitude: f64,
    /// Whether queries of tokens without a valid slot, and keys that no valid slot references, are
    /// NaN.
    pub poison_unreferenced: bool,
    /// Which kernels run.
    pub implementation: Implementation,
}

fn of(keys: RankedKeys, num_heads: usize) -> IndexerRecomputeCase {
    IndexerRecomputeCase {
        keys,
        num_heads,
        weight: Float::F32,
        sm_scale: 0.088_388_35,
        distribution: Distribution::Normal,
        magnitude: 1.0,
        poison_unreferenced: true,
        implementation: Implementation::Portable,
    }
}

fn selected(
    num_tokens: usize,
    num_heads: usize,
    num_keys: usize,
    topk: usize,
) -> IndexerRecomputeCase {
    of(RankedKeys::selected(num_tokens, num_keys, topk), num_heads)
}

fn hopper(case: IndexerRecomputeCase) -> IndexerRecomputeCase {
    IndexerRecomputeCase { implementation: Implementation::Hopper, ..case }
}

impl IndexerRecomputeCase {
    fn options(&self) -> launcher::Options {
        launcher::Options {
            global: self.keys.global,
            sm_scale: self.sm_scale,
            implementation: self.implementation.launcher(),
        }
    }
}

impl Operator for IndexerRecompute {
    type Case = IndexerRecomputeCase;
    // A lane adds the heads of every fourth pair.
    const SUM_LANES: usize = 4;

    const ABOUT: About = About {
        name: "indexer_recompute",
        family: Family::Indexer,
        summary: "the indexer's logits of the keys that each token's list names, computed again for its loss",
        specification: &["training 1", "training 6"],
        paths: &["indexer_recompute", "indexer_recompute_hopper"],
        modules: launcher::modules,
        cases: [24, 60, 120],
    };

    fn tensors(c: &IndexerRecomputeCase) -> Specs {
        let (tokens, keys) =
            (axis("num_tokens", c.keys.num_tokens), axis("num_keys", c.keys.num_keys));
        let (heads, head_dim) =
            (axis("num_heads", c.num_heads).multiples(1, MAX_HEADS), axis("head_dim", HEAD_DIM));
        let query = |name, dtype, axes: &[_]| input(name, dtype, axes).of_any_size();
        let operands = [
            query("q", DType::Bf16, &[tokens, heads, head_dim])
                .aligned_rows()
                .drawn(c.distribution, c.magnitude),
            query("k", DType::Bf16, &[keys, head_dim]).aligned_rows().drawn(c.distribution, 1.0),
            query("w", c.weight.dtype(), &[tokens, heads]).rows().drawn(c.distribution, 1.0),
        ];
        let logits = output("logits", DType::F32, &[tokens, axis("topk", c.keys.topk)]).rows();
        let tensors = operands.into_iter().chain(c.keys.tensors()).chain([logits]);
        Specs::new(c.keys.seed, tensors)
            .positive("sm_scale", c.sm_scale)
            .positive("magnitude", c.magnitude)
    }

    fn check(c: &IndexerRecomputeCase) -> Result<(), Refused> {
        if !c.keys.is_selected() {
            return refuse("ranking", "causal: logits of all keys are those of indexer_logits");
        }
        c.keys.check()
    }

    fn cannot_run(c: &IndexerRecomputeCase, environment: &Environment) -> Option<String> {
        c.implementation.launcher().cannot_run_on(environment)
    }

    fn fastest(c: &IndexerRecomputeCase, environment: &Environment) -> IndexerRecomputeCase {
        IndexerRecomputeCase {
            implementation: Implementation::fastest_for(environment, c.num_heads, true),
            ..c.clone()
        }
    }

    /// Every token with every key and head, before and after the sum.
    fn oracle_elements(c: &IndexerRecomputeCase) -> u128 {
        let all = (c.keys.num_tokens as u128).saturating_mul(c.keys.num_keys as u128);
        3 * all.saturating_mul(c.num_heads as u128)
            + lists::gathered(c.keys.num_tokens, c.keys.topk, 1, 1)
    }

    fn strategy(profile: Profile) -> BoxedStrategy<IndexerRecomputeCase> {
        let [tokens, num_keys, topk] = profile.of([[7, 120, 300], [9, 300, 500], [16, 1200, 1100]]);
        let keys = RankedKeys::strategy([tokens, num_keys, topk]).prop_map(|keys| {
            match keys.is_selected() {
                true => keys,
                // As many slots as keys.
                false => RankedKeys {
                    packed: keys.packed,
                    seed: keys.seed,
                    ..RankedKeys::selected(keys.num_tokens, keys.num_keys, keys.num_keys)
                },
            }
        });
        let heads = prop_oneof![1 => Just(64usize), 1 => Just(1usize), 3 => 1..=MAX_HEADS];
        // Powers of two and others; the model's own is 128^-1/2.
        let sm_scale = select(vec![0.088_388_35f32, 0.3, 1.0, 0.125]);
        let implementation = select(vec![Implementation::Portable, Implementation::Hopper]);
        (
            keys,
            heads,
            Float::strategy(),
            sm_scale,
            Data::strategy(-20..=20),
            any::<bool>(),
            implementation,
        )
            .prop_map(
                |(keys, num_heads, weight, sm_scale, data, poison_unreferenced, implementation)| {
                    let Data { distribution, magnitude, .. } = data;
                    let of = of(keys, num_heads);
                    let of = IndexerRecomputeCase { weight, sm_scale, implementation, ..of };
                    IndexerRecomputeCase { distribution, magnitude, poison_unreferenced, ..of }
                },
            )
            .boxed()
    }

    fn typical() -> Vec<IndexerRecomputeCase> {
        let within = RankedKeys {
            lengths: Lengths::Within,
            packed: true,
            ..RankedKeys::selected(5, 40, 170)
        };
        let few = selected(3, 5, 20, 19).with(|case| case.weight = Float::Bf16);
        vec![of(within.clone(), 21), few.clone(), of(within, 21).then(hopper), hopper(few)]
    }

    fn edge_cases(profile: Profile) -> Vec<IndexerRecomputeCase> {
        let keys = |case: IndexerRecomputeCase, change: fn(RankedKeys) -> RankedKeys| {
            IndexerRecomputeCase { keys: change(case.keys.clone()), ..case }
        };
        let mut cases = vec![
            selected(0, 4, 9, 5),
            selected(3, 5, 0, 7),
            selected(2, 3, 11, 0),
            selected(1, 1, 1, 1),
            // A tile of each warp, one slot more and one less; more tiles than are in flight.
            selected(2, 64, 90, 128),
            selected(2, 64, 90, 129),
            selected(2, 63, 90, 127),
            selected(1, 8, 90, 700),
            keys(selected(5, 64, 40, 64), |keys| RankedKeys {
                indices: IndexClass::EmptyRows,
                ..keys
            }),
            keys(selected(7, 17, 23, 70), |keys| RankedKeys { lengths: Lengths::Hostile, ..keys }),
            keys(selected(9, 33, 60, 165), |keys| RankedKeys {
                packed: true,
                lengths: Lengths::Within,
                ..keys
            }),
            keys(selected(9, 5, 60, 65), |keys| RankedKeys { packed: true, global: true, ..keys }),
            keys(selected(5, 16, 7, 130), |keys| RankedKeys {
                indices: IndexClass::Duplicates,
                ..keys
            }),
            keys(selected(3, 8, 50, 150), |keys| RankedKeys {
                indices: IndexClass::LeadingMasked,
                ..keys
            }),
        ];
        let on_hopper = [
            selected(0, 4, 9, 5),
            selected(3, 5, 0, 7),
            selected(2, 3, 11, 0),
            selected(1, 1, 1, 1),
            // A tile, one slot more and one less; more tiles than are in flight. Tokens with fewer
            // tiles than consumers, in sequence in one block.
            selected(1, 64, 90, 64),
            selected(1, 63, 90, 65),
            selected(1, 64, 90, 63),
            selected(1, 8, 90, 850),
            selected(9, 20, 40, 70),
            keys(selected(9, 64, 40, 64), |keys| RankedKeys {
                indices: IndexClass::EmptyRows,
                ..keys
            }),
            keys(selected(9, 17, 23, 270), |keys| RankedKeys { lengths: Lengths::Hostile, ..keys }),
            keys(selected(9, 33, 60, 165), |keys| RankedKeys {
                packed: true,
                lengths: Lengths::Within,
                ..keys
            }),
            keys(selected(9, 5, 60, 65), |keys| RankedKeys { packed: true, global: true, ..keys }),
        ];
        cases.extend(on_hopper.map(hopper));
        if profile == Profile::Full {
            cases.extend([selected(12, 64, 1000, 512), selected(6, 64, 1000, 1024)]);
            cases.extend([selected(12, 64, 1000, 512), selected(6, 64, 1000, 1024)].map(hopper));
        }
        cases
    }

    fn amend(c: &IndexerRecomputeCase, tensors: &mut Tensors) -> OracleResult<()> {
        c.keys.amend(tensors);
        if c.poison_unreferenced {
            c.keys.poison_unreferenced(tensors, c.num_heads * HEAD_DIM, HEAD_DIM);
        }
        Ok(())
    }

    fn forward(
        c: &IndexerRecomputeCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        let inputs = reference::Inputs {
            q: t.f64("q")?,
            w: t.f64("w")?,
            k: t.f64("k")?,
            ranking: c.keys.reference(t.host()),
            sequences: c.keys.sequences(),
            sm_scale: t.scalar("sm_scale", f64::from(c.sm_scale)),
        };
        Ok(Named::new().with("logits", reference::forward(&inputs, rounding)?))
    }

    fn launch(
        c: &IndexerRecomputeCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::forward(device, v, c.options()))
    }

    fn invariant(_: &IndexerRecomputeCase, _: bool) -> &'static [BatchAxis] {
        &[BatchAxis::Company, BatchAxis::Buckets, BatchAxis::Chunks]
    }

    fn batches(c: &IndexerRecomputeCase, batches: &mut Batches<'_, Self>) {
        ranking::batches(&c.keys, batches, |case| &mut case.keys);
    }

    fn laws(c: &IndexerRecomputeCase, laws: &mut Laws<'_, Self>) {
        if c.keys.num_tokens == 0 {
            return;
        }
        let equal = laws.all(Relation::Times(1.0));
        laws.exchange("sm_scale counts once", "w", "sm_scale", |case| &mut case.sm_scale, equal);
        // Doubling is exact where halving subnormal values is not.
        laws.scale("weights count once", "w", 2.0, &[("logits", 2.0)]);
        if c.keys.packed {
            let equal = laws.all(Relation::Times(1.0));
            ranking::ends_law(laws, c.keys.num_keys, equal);
            laws.independent("num_tokens");
        } else {
            laws.separate("num_tokens", "tokens may be permuted");
        }
        if c.keys.lengths == Lengths::Absent {
            laws.permute("slots may be permuted", "topk");
        }
    }

    /// 4096 queries of the model's 64 heads over lists of its two lengths. Every slot is valid, and
    /// the slots of a token are distinct.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let cases = match on_gpu(environment) {
            true => vec![selected(4096, 64, 8192, 512), selected(4096, 64, 8192, 1024)],
            false => vec![selected(4, 16, 64, 32)],
        };
        let implementation = Implementation::fastest_on(environment);
        cases
            .into_iter()
            .map(|case| timed(IndexerRecomputeCase { implementation, ..case }))
            .collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![Reduced::forward(
            &["q4096 k8192 H64 D128 topk512", "q4096 k8192 H64 D128 topk1024"],
            json!({"num_tokens": 7, "num_heads": 5, "num_keys": 90, "topk": 40}),
            json!({"num_tokens": 2, "num_keys": 44}),
        )]
    }
}

fn timed(case: IndexerRecomputeCase) -> Benchmark<IndexerRecompute> {
    let keys = RankedKeys { indices: IndexClass::Valid, global: true, ..case.keys };
    let case = IndexerRecomputeCase { keys, poison_unreferenced: false, ..case };
    let RankedKeys { num_tokens, num_keys, topk, .. } = case.keys;
    let name = format!("q{num_tokens} k{num_keys} H{} D{HEAD_DIM} topk{topk}", case.num_heads);
    let flops = 2.0 * (num_tokens * topk * case.num_heads * HEAD_DIM) as f64;
    let benchmark =
        Benchmark::new(Direction::Forward, name, case, "num_tokens").also_drawn_along("num_keys");
    Benchmark {
        amend: |c: &IndexerRecomputeCase, tensors| {
            let RankedKeys { num_tokens, topk, num_keys, seed, .. } = c.keys;
            let lists = distinct((seed, "indices"), [num_tokens, topk, num_keys], |_| 0);
            tensors.put("indices", HostTensor::from_i32(&[num_tokens, topk], &lists));
        },
        sampled: |_: &Whole<'_, IndexerRecompute>,
                  c: &mut IndexerRecomputeCase,
                  tensors: &mut Tensors| {
            c.keys.num_keys = compact(tensors, "indices", &["k"], 1);
        },
        ..benchmark.streaming(&[], 0.0).computing(flops)
    }
}
