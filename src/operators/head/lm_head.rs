//! `lm_head` (inference 12.1): `kernels/cuda/head/lm_head.cu` against
//! `reference/src/head/lm_head.rs`.

use dsv4_kernels::head::lm_head as launcher;
use dsv4_reference::head::lm_head as reference;
use rand::Rng;

use crate::operator::benchmarks::{Whole, spread};
use crate::operator::fields::extent;
use crate::operator::prelude::*;
use crate::operators::lists::Hostile;

/// The operator.
pub struct LmHead;

/// Which tokens are sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rows {
    /// All, in their order.
    All,
    /// Some, in any order, and some of them twice.
    Listed,
    /// The same, but every third entry names no token.
    Hostile,
}

/// A case: sizes, which tokens are sampled, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LmHeadCase {
    /// Tokens; 0 is allowed. Equal to the rows where all are sampled.
    pub num_tokens: usize,
    /// Sampled rows; 0 is allowed.
    pub num_rows: usize,
    /// Rows of the weights.
    pub vocab_size: usize,
    /// Values of a token.
    pub hidden_size: usize,
    /// Which tokens are sampled.
    pub rows: Rows,
    /// Drawn hidden states and weights.
    #[serde(flatten)]
    pub data: Data,
}

fn all(num_rows: usize, vocab_size: usize, hidden_size: usize) -> LmHeadCase {
    let data = Data::normal(1.0);
    LmHeadCase { num_tokens: num_rows, num_rows, vocab_size, hidden_size, rows: Rows::All, data }
}

fn listed(num_tokens: usize, num_rows: usize, vocab_size: usize, hidden_size: usize) -> LmHeadCase {
    LmHeadCase { num_tokens, rows: Rows::Hostile, ..all(num_rows, vocab_size, hidden_size) }
}

impl Operator for LmHead {
    type Case = LmHeadCase;

    const ABOUT: About = About {
        name: "lm_head",
        family: Family::Head,
        summary: "logits of the sampled rows: hidden states times the head's weights",
        specification: &["inference 12.1"],
        paths: &["lm_head_few", "lm_head_many", "lm_head_scalar"],
        modules: launcher::modules,
        cases: [16, 40, 100],
    };

    fn tensors(c: &LmHeadCase) -> Specs {
        let rows = axis("num_rows", c.num_rows);
        let tokens = if c.rows == Rows::All { rows } else { axis("num_tokens", c.num_tokens) };
        let (vocabulary, hidden) =
            (axis("vocab_size", c.vocab_size), axis("hidden_size", c.hidden_size).not_empty());
        let tensors = [
            input("hidden", DType::Bf16, &[tokens, hidden]).rows().drawn_as(c.data).of_any_size(),
            input("weight", DType::Bf16, &[vocabulary, hidden])
                .rows()
                .drawn_as(c.data)
                .of_any_size(),
            input("rows", DType::I32, &[rows]).when(c.rows != Rows::All),
            output("logits", DType::F32, &[rows, vocabulary]).rows(),
        ];
        Specs::new(c.data.seed, tensors)
    }

    fn check(c: &LmHeadCase) -> Result<(), Refused> {
        if c.rows == Rows::All && c.num_tokens != c.num_rows {
            return refuse(
                "num_tokens",
                format!("{} of {} rows: all are sampled", c.num_tokens, c.num_rows),
            );
        }
        Ok(())
    }

    fn strategy(profile: Profile) -> BoxedStrategy<LmHeadCase> {
        let [rows, vocabulary, hidden] =
            profile.of([[20usize, 150, 200], [150, 200, 300], [300, 1000, 1500]]);
        let hidden = prop_oneof![1 => (1..=hidden).boxed(), 2 => (1..=hidden / 8).prop_map(|n| 8 * n).boxed()];
        let which = select(vec![Rows::All, Rows::Listed, Rows::Hostile]);
        (
            extent(rows, 4),
            extent(rows, 4),
            extent(vocabulary, 16),
            hidden,
            which,
            Data::strategy(-10..=10),
        )
            .prop_map(|(num_tokens, num_rows, vocab_size, hidden_size, rows, data)| {
                let num_tokens = if rows == Rows::All { num_rows } else { num_tokens };
                LmHeadCase { num_tokens, num_rows, vocab_size, hidden_size, rows, data }
            })
            .boxed()
    }

    fn typical() -> Vec<LmHeadCase> {
        vec![listed(9, 5, 40, 72), listed(6, 3, 21, 13), all(19, 24, 64)]
    }

    fn edge_cases(profile: Profile) -> Vec<LmHeadCase> {
        let mut cases = vec![
            all(0, 40, 64),
            all(1, 1, 1),
            all(1, 130, 8),
            all(2, 0, 16),
            listed(0, 3, 20, 64),
            listed(5, 0, 20, 64),
            // One row less than a tile, a tile, one row more.
            listed(20, 16, 127, 264),
            listed(20, 17, 129, 136),
            all(129, 12, 72),
            listed(40, 20, 9, 33),
        ];
        if profile == Profile::Full {
            cases.extend([
                listed(300, 128, 4096, 7168),
                all(4, 129_280, 512),
                all(700, 2000, 4096),
            ]);
        }
        cases
    }

    fn amend(c: &LmHeadCase, tensors: &mut Tensors) -> OracleResult<()> {
        if c.rows != Rows::All {
            tensors.set_i32s("rows", &draw_rows(c));
        }
        Ok(())
    }

    fn forward(_: &LmHeadCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::forward(&t.named()?, rounding)
    }

    fn launch(_: &LmHeadCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::forward(device, v))
    }

    fn invariant(_: &LmHeadCase, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn batches(c: &LmHeadCase, batches: &mut Batches<'_, Self>) {
        if c.rows == Rows::All {
            batches.also("num_tokens");
        }
        batches.rows("num_rows");
    }

    fn laws(_: &LmHeadCase, laws: &mut Laws<'_, Self>) {
        laws.scale("hidden states are linear", "hidden", 0.5, &[("logits", 0.5)]);
        laws.scale("weights are linear", "weight", 0.5, &[("logits", 0.5)]);
        laws.separate("num_rows", "rows may be permuted");
        laws.separate("vocab_size", "ids may be permuted");
    }

    /// The model's heads: for a decode step of some sequences, and for a prefill with logits for
    /// all tokens.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let gpu = [(1, 4096), (1, 7168), (16, 7168), (128, 4096), (128, 7168), (4096, 7168)];
        let (shapes, vocab_size) =
            if on_gpu(environment) { (&gpu[..], 129_280) } else { (&[(20, 72)][..], 140) };
        let benchmark = |&(num_rows, hidden_size): &(usize, usize)| {
            let case = all(num_rows, vocab_size, hidden_size);
            let name = format!("{num_rows}x{vocab_size}x{hidden_size} bf16");
            let benchmark =
                Benchmark::new(Direction::Forward, name, case, "vocab_size").streaming(&[], 0.0);
            let benchmark = benchmark.also_sampled_along("num_rows", SAMPLED_ROWS, spread);
            let benchmark = Benchmark { sampled: sample_tokens, ..benchmark };
            let flops = 2.0 * (num_rows * vocab_size * hidden_size) as f64;
            // Few rows are limited by the bytes of the weights.
            if num_rows > 128 {
                benchmark.computing(flops)
            } else {
                Benchmark { flops, ..benchmark }
            }
        };
        shapes.iter().map(benchmark).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![
            Reduced::forward(
                &["1x129280x7168 bf16"],
                json!({"num_tokens": 3, "num_rows": 3, "vocab_size": 200, "hidden_size": 72}),
                json!({"vocab_size": 50}),
            ),
            Reduced::forward(
                &["128x129280x7168 bf16"],
                json!({"num_tokens": 140, "num_rows": 140, "vocab_size": 200, "hidden_size": 72}),
                json!({"vocab_size": 50}),
            ),
        ]
    }
}

/// Rows of a benchmark's result that are compared with the oracle.
const SAMPLED_ROWS: usize = 128;

/// As many tokens as sampled rows.
fn sample_tokens(_: &Whole<'_, LmHead>, c: &mut LmHeadCase, _: &mut Tensors) {
    c.num_tokens = c.num_rows;
}

/// Tokens in any order. In a hostile list every third entry is not a token.
fn draw_rows(c: &LmHeadCase) -> Vec<i32> {
    let mut draw = Draw::new(c.data.seed, "rows");
    let tokens = c.num_tokens as i32;
    let mut hostile = Hostile::new(c.data.seed, "rows", &[-1, tokens, i32::MAX, i32::MIN]);
    let row = |at: usize| match c.rows {
        Rows::Hostile if at % 3 == 1 => hostile.take(),
        _ if tokens == 0 => -1,
        _ => draw.rng().random_range(0..tokens),
    };
    (0..c.num_rows).map(row).collect()
}
