//! `attention_combine` (inference 8.2): `kernels/cuda/attention/attention_combine.cu` against
//! `reference/src/attention/attention_combine.rs`.

use dsv4_kernels::attention::attention_combine as launcher;
use dsv4_reference::attention::attention_combine as reference;
use rand::Rng;

use crate::case::Draw;
use crate::case::permutation;
use crate::operator::Relation;
use crate::operator::fields::{LARGEST_DRAWN, extent};
use crate::operator::laws::Variant;
use crate::operator::prelude::*;
use crate::operator::tensors::permuted_along;
use crate::operators::attention::sinks::Sinks;

/// The operator.
pub struct AttentionCombine;

/// Which parts have no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EmptyParts {
    /// None.
    None,
    /// A third of all rows of all parts; their log-sum-exp is `-inf`, or `+inf` as attention
    /// writes it.
    Some,
    /// The same, and every third row in all parts.
    WholeRows,
}

/// A case: sizes, empty parts, sinks, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionCombineCase {
    /// Parts; 0 is allowed.
    pub num_parts: usize,
    /// Tokens; 0 is allowed.
    pub num_tokens: usize,
    /// Heads.
    pub num_heads: usize,
    /// Columns: a multiple of 8.
    pub v_dim: usize,
    /// Which parts have no key. Their rows hold NaN.
    pub empty: EmptyParts,
    /// The sinks.
    pub sinks: Sinks,
    /// Standard deviation of the parts' log-sum-exp, natural.
    pub lse_deviation: f64,
    /// Their mean.
    pub lse_shift: f64,
    /// The partial sums.
    #[serde(flatten)]
    pub data: Data,
}

/// With a sink, and rows without keys.
fn plain(
    num_parts: usize,
    num_tokens: usize,
    num_heads: usize,
    v_dim: usize,
) -> AttentionCombineCase {
    AttentionCombineCase {
        num_parts,
        num_tokens,
        num_heads,
        v_dim,
        empty: EmptyParts::WholeRows,
        sinks: Sinks::Normal,
        lse_deviation: 2.0,
        lse_shift: 4.0,
        data: Data::normal(1.0),
    }
}

impl Operator for AttentionCombine {
    type Case = AttentionCombineCase;

    const ABOUT: About = About {
        name: "attention_combine",
        family: Family::Attention,
        summary: "merges partial attention results over disjoint keys and applies the sink once",
        specification: &["inference 8.1", "inference 8.2"],
        paths: &["attention_combine"],
        modules: launcher::modules,
        cases: [16, 40, 100],
    };

    fn tensors(c: &AttentionCombineCase) -> Specs {
        let (parts, tokens) = (axis("num_parts", c.num_parts), axis("num_tokens", c.num_tokens));
        let (heads, v_dim) = (
            axis("num_heads", c.num_heads).not_empty(),
            axis("v_dim", c.v_dim).multiples(8, usize::MAX),
        );
        let tensors = [
            input("partial_out", DType::F32, &[parts, tokens, heads, v_dim])
                .aligned_rows()
                .of_any_size()
                .drawn_as(c.data),
            input("partial_lse", DType::F32, &[parts, tokens, heads]),
            input("sink", DType::F32, &[heads]).when(c.sinks != Sinks::Absent),
            output("out", DType::Bf16, &[tokens, heads, v_dim]).aligned_rows(),
            output("lse", DType::F32, &[tokens, heads]),
        ];
        Specs::new(c.data.seed, tensors).finite("lse_shift", c.lse_shift)
    }

    fn check(c: &AttentionCombineCase) -> Result<(), Refused> {
        if !(c.lse_deviation.is_finite() && c.lse_deviation >= 0.0) {
            return refuse(
                "lse_deviation",
                format!("{} must be finite and not negative", c.lse_deviation),
            );
        }
        Ok(())
    }

    fn strategy(profile: Profile) -> BoxedStrategy<AttentionCombineCase> {
        let [parts, tokens, heads] = profile.of([[9usize, 8, 12], [40, 12, 40], [140, 60, 130]]);
        let shape = (
            prop_oneof![1 => Just(1usize), 4 => 1..=parts],
            extent(tokens, 4),
            extent(heads, 16),
            select(vec![512usize, 64, 40]),
        );
        let empty = select(vec![EmptyParts::None, EmptyParts::Some, EmptyParts::WholeRows]);
        let sinks = select(vec![Sinks::Normal, Sinks::Absent, Sinks::Extreme]);
        let lse = (select(vec![0.0, 0.5, 2.0, 10.0]), select(vec![0.0, 6.0, -200.0, 300.0]));
        (shape, empty, sinks, lse, Data::strategy(-18..=18))
            .prop_map(|(shape, empty, sinks, (lse_deviation, lse_shift), data)| {
                let (num_parts, num_tokens, num_heads, v_dim) = shape;
                let num_tokens =
                    num_tokens.min((LARGEST_DRAWN / (num_parts * num_heads * v_dim)).max(1));
                AttentionCombineCase {
                    empty,
                    sinks,
                    lse_deviation,
                    lse_shift,
                    data,
                    ..plain(num_parts, num_tokens, num_heads, v_dim)
                }
            })
            .boxed()
    }

    fn typical() -> Vec<AttentionCombineCase> {
        vec![plain(3, 4, 5, 64)]
    }

    fn edge_cases(profile: Profile) -> Vec<AttentionCombineCase> {
        let mut cases = vec![
            plain(3, 0, 4, 64),
            plain(0, 2, 5, 64),
            // One part without a sink is the output itself.
            plain(1, 4, 6, 512).with(|case| {
                case.sinks = Sinks::Absent;
                case.empty = EmptyParts::None;
            }),
            plain(4, 5, 12, 512).with(|case| case.sinks = Sinks::Extreme),
            // More parts than lanes, of different sizes.
            plain(70, 2, 9, 40).with(|case| case.lse_deviation = 10.0),
            // One part outweighs the others by more than an fp32 exponent holds. One lane has more
            // columns than others.
            plain(70, 2, 9, 264).with(|case| case.lse_deviation = 100.0),
            plain(5, 3, 7, 64).with(|case| case.lse_shift = -200.0),
        ];
        if profile == Profile::Full {
            cases.extend([plain(8, 32, 64, 512), plain(18, 8, 128, 512)]);
        }
        cases
    }

    fn amend(c: &AttentionCombineCase, tensors: &mut Tensors) -> OracleResult<()> {
        let (parts, rows) = (c.num_parts, c.num_tokens * c.num_heads);
        let mut out = tensors.values("partial_out");
        let mut draw = Draw::new(c.data.seed, "partial_lse");
        let mut lse = Vec::with_capacity(parts * rows);
        for part_row in 0..parts * rows {
            let e = (c.lse_shift + c.lse_deviation * draw.normal()) * std::f64::consts::LOG2_E;
            let (one_in_three, positive) =
                (draw.rng().random_ratio(1, 3), draw.rng().random_ratio(1, 2));
            let empty = match c.empty {
                EmptyParts::None => false,
                EmptyParts::Some => one_in_three,
                EmptyParts::WholeRows => one_in_three || part_row % rows % 3 == 0,
            };
            let infinity = if positive { f64::INFINITY } else { f64::NEG_INFINITY };
            lse.push(if empty { infinity } else { e });
            if empty {
                out[part_row * c.v_dim..(part_row + 1) * c.v_dim].fill(f64::NAN);
            }
        }
        tensors.set("partial_out", &out);
        tensors.set("partial_lse", &lse);
        if let Some(sink) = c.sinks.draw(c.data.seed, c.num_heads, c.lse_shift) {
            tensors.put("sink", sink);
        }
        Ok(())
    }

    fn forward(
        _: &AttentionCombineCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        reference::forward(&t.named()?, rounding)
    }

    fn launch(
        _: &AttentionCombineCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::forward(device, v))
    }

    fn invariant(_: &AttentionCombineCase, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn laws(c: &AttentionCombineCase, laws: &mut Laws<'_, Self>) {
        if c.num_tokens == 0 || c.num_parts == 0 {
            return;
        }
        laws.scale("a scale counts once", "partial_out", 4.0, &[("out", 4.0), ("lse", 1.0)]);
        laws.separate("num_tokens", "tokens may be permuted");
        let (parts, rows) = (c.num_parts, c.num_tokens * c.num_heads);
        // Splitting a part into two of half the weight keeps its sum; each has an lse smaller by
        // one in base 2.
        let twice: Vec<usize> = (0..parts).chain([parts - 1]).collect();
        let halved = |v: &mut Variant<Self>| {
            pick_parts(v, &twice);
            v.tensors.edit("partial_lse", |lse| {
                lse[(parts - 1) * rows..].iter_mut().for_each(|e| *e -= 1.0)
            });
        };
        laws.alike("a part may be halved", Relation::WithinBudget, halved);
        // Parts without keys at the end change no bit.
        let longer: Vec<usize> = (0..parts).chain([0, parts - 1]).collect();
        let padded = |v: &mut Variant<Self>| {
            pick_parts(v, &longer);
            v.tensors.edit("partial_lse", |lse| {
                lse[parts * rows..(parts + 1) * rows].fill(f64::NEG_INFINITY);
                lse[(parts + 1) * rows..].fill(f64::INFINITY);
            });
        };
        laws.alike("a part without keys adds nothing", Relation::Times(1.0), padded);
        if parts > 1 {
            let order = permutation(c.data.seed, parts);
            laws.alike("parts may be permuted", Relation::WithinBudget, |v| pick_parts(v, &order));
        }
    }

    /// The parts of a batch of decoded tokens: few parts of many rows, and many parts of few.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let gpu = [(2, 128, 128), (8, 128, 128), (18, 1, 128)];
        let shapes = if on_gpu(environment) { &gpu[..] } else { &[(4, 2, 8)] };
        let benchmark = |&(num_parts, num_tokens, num_heads): &(usize, usize, usize)| {
            let whole = plain(num_parts, num_tokens, num_heads, 512);
            let case =
                AttentionCombineCase { empty: EmptyParts::None, lse_deviation: 1.0, ..whole };
            let (parts, rows) = (num_parts as f64, (num_tokens * num_heads) as f64);
            // Every part read, the merged row written. One product and one sum for each element
            // read.
            let bytes = rows * (parts * (4 * case.v_dim + 4) as f64 + (2 * case.v_dim + 4) as f64);
            let flops = 2.0 * parts * rows * case.v_dim as f64;
            let name = format!("{num_parts} parts {num_tokens}x{num_heads}x{}", case.v_dim);
            Benchmark {
                bytes,
                flops,
                ..Benchmark::new(Direction::Forward, name, case, "num_tokens")
            }
        };
        shapes.iter().map(benchmark).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![Reduced::forward(
            &["8 parts 128x128x512"],
            json!({"num_tokens": 9, "num_heads": 3}),
            json!({"num_tokens": 2}),
        )]
    }
}

/// Parts in the given order; a part may occur more than once.
fn pick_parts(variant: &mut Variant<AttentionCombine>, order: &[usize]) {
    variant.case.num_parts = order.len();
    for name in ["partial_out", "partial_lse"] {
        let picked = permuted_along(variant.tensors.tensor(name), 0, order);
        variant.tensors.put(name, picked);
    }
}
