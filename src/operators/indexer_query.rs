//! `indexer_query` (inference 7, 7.1): `kernels/cuda/indexer_query.cu` against `reference/src/indexer_query.rs`.
//!
//! The order of the sums is part of the definition, so that codes and scales have one value: every byte must be the
//! oracle's.

use dsv4_kernels::indexer_query::{self as launcher, HEAD_DIM, MAX_PAIRS, Stored};
use dsv4_reference::{hadamard, indexer_query as reference};
use rand::Rng;

use super::extent;
use crate::operator::prelude::*;

/// The operator.
pub struct IndexerQuery;

/// How tokens find their rows of the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Positions {
    /// Token t has row t.
    Absent,
    /// A position each.
    Within,
    /// The same, some being negative or beyond the table.
    Hostile,
}

/// A case: extents, tables, types, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IndexerQueryCase {
    /// Tokens; 0 is legal.
    pub num_tokens: usize,
    /// Heads of a token.
    pub num_heads: usize,
    /// Channels at the end of a row that turn: even, up to 128.
    pub rope_dim: usize,
    /// How tokens find their rows of the tables.
    pub positions: Positions,
    /// Rows of the tables where there are positions.
    pub table_rows: usize,
    /// Type of the projected head weights.
    pub weight: Float,
    /// How the queries are stored.
    pub stored: Stored,
    /// The queries.
    #[serde(flatten)]
    pub data: Data,
}

fn plain(num_tokens: usize, num_heads: usize, stored: Stored) -> IndexerQueryCase {
    let (positions, weight, data) = (Positions::Within, Float::Bf16, Data::normal(1.0));
    IndexerQueryCase { num_tokens, num_heads, rope_dim: 64, positions, table_rows: 23, weight, stored, data }
}

impl Declared for IndexerQuery {
    type Case = IndexerQueryCase;

    const ABOUT: About = About {
        name: "indexer_query",
        summary: "the indexer's queries rotated, transformed and quantised, and its head weights with all scales once",
        specification: &["inference 5.4", "inference 7", "inference 7.1"],
        paths: &["indexer_query_vector", "indexer_query_scalar"],
        modules: launcher::modules,
        cases: [24, 60, 120],
    };

    fn tensors(c: &IndexerQueryCase) -> Specs {
        let (tokens, heads) = (axis("num_tokens", c.num_tokens), axis("num_heads", c.num_heads).not_empty());
        let (values, row) = (c.stored == Stored::Values, axis("head_dim", HEAD_DIM));
        let table_rows = match c.positions {
            Positions::Absent => tokens,
            Positions::Within | Positions::Hostile => axis("table_rows", c.table_rows),
        };
        let table = [table_rows, axis("half", c.rope_dim / 2).multiples(1, MAX_PAIRS)];
        let codes = [tokens, heads, axis("code_bytes", c.stored.code_bytes())];
        let scale_bytes = [tokens, heads, axis("num_groups", HEAD_DIM / 32)];
        let tensors = [
            input("q", DType::Bf16, &[tokens, heads, row]).rows().drawn_as(c.data).of_any_size(),
            input("cos", DType::F32, &table).rows(),
            input("sin", DType::F32, &table).rows(),
            input("positions", DType::I32, &[tokens]).when(c.positions != Positions::Absent),
            input("weights", c.weight.dtype(), &[tokens, heads]).rows().of_any_size().drawn(Distribution::Normal, 1.0),
            output("y", DType::Bf16, &[tokens, heads, row]).rows().when(values),
            output("codes", DType::U8, &codes).rows().exact().when(!values),
            output("scale_bytes", DType::U8, &scale_bytes).exact().when(c.stored == Stored::E2m1),
            output("w", DType::F32, &[tokens, heads]).rows(),
        ];
        Specs::new(c.data.seed, tensors)
    }

    fn check(c: &IndexerQueryCase) -> Result<(), Refused> {
        match c.rope_dim % 2 {
            0 => Ok(()),
            _ => refuse("rope_dim", format!("{} must be even", c.rope_dim)),
        }
    }

    fn strategy(profile: Profile) -> BoxedStrategy<IndexerQueryCase> {
        let [tokens, heads] = profile.of([[9, 20], [30, 64], [200, 64]]);
        let rope_dim = prop_oneof![3 => Just(64usize), 1 => (1..=MAX_PAIRS).prop_map(|half| 2 * half)];
        let positions = select(vec![Positions::Absent, Positions::Within, Positions::Hostile]);
        let stored = select(Stored::ALL.to_vec());
        (
            extent(tokens, 4),
            extent(heads, 8),
            rope_dim,
            positions,
            1..=40usize,
            Float::strategy(),
            stored,
            Data::strategy(-40..=40),
        )
            .prop_map(|(num_tokens, num_heads, rope_dim, positions, table_rows, weight, stored, data)| {
                IndexerQueryCase { num_tokens, num_heads, rope_dim, positions, table_rows, weight, stored, data }
            })
            .boxed()
    }

    fn typical() -> Vec<IndexerQueryCase> {
        vec![
            plain(3, 5, Stored::Values),
            IndexerQueryCase { positions: Positions::Absent, weight: Float::F32, ..plain(5, 3, Stored::E2m1) },
            plain(4, 4, Stored::E4m3),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<IndexerQueryCase> {
        // A block takes 16 rows, a warp 4.
        let rows = [(0, 4), (1, 1), (2, 8), (1, 17), (5, 7)].into_iter();
        let rows = rows.flat_map(|(tokens, heads)| Stored::ALL.map(|stored| plain(tokens, heads, stored)));
        let hostile =
            Stored::ALL.map(|stored| IndexerQueryCase { positions: Positions::Hostile, ..plain(7, 3, stored) });
        let turning = [2, 62, 126, 128].map(|rope_dim| IndexerQueryCase { rope_dim, ..plain(3, 6, Stored::E2m1) });
        let mut cases: Vec<_> = rows.chain(hostile).chain(turning).collect();
        cases.push(IndexerQueryCase { positions: Positions::Absent, weight: Float::F32, ..plain(9, 4, Stored::E4m3) });
        // Around the floors of the scales, and where they are as large as they get.
        for (stored, exponent) in [(Stored::E2m1, -125), (Stored::E2m1, -128), (Stored::E4m3, -13), (Stored::E4m3, 110)]
        {
            let data = Data { magnitude: 2f64.powi(exponent), ..Data::normal(1.0) };
            cases.push(IndexerQueryCase { data, ..plain(5, 7, stored) });
        }
        if profile == Profile::Full {
            cases.extend(Stored::ALL.map(|stored| plain(470, 64, stored)));
        }
        cases
    }

    fn amend(c: &IndexerQueryCase, tensors: &mut Tensors) -> OracleResult<()> {
        let mut draw = Draw::new(c.data.seed, "angles");
        let angles: Vec<f64> = tensors.values("cos").iter().map(|_| 10.0 * draw.normal()).collect();
        tensors.set("cos", &angles.iter().map(|angle| angle.cos()).collect::<Vec<_>>());
        tensors.set("sin", &angles.iter().map(|angle| angle.sin()).collect::<Vec<_>>());
        let mut draw = Draw::new(c.data.seed, "positions");
        let rows = c.table_rows as i32;
        let outside = [-1, rows, i32::MIN, i32::MAX];
        let mut position = |token: usize| match c.positions {
            Positions::Hostile if token % 3 == 1 => outside[token / 3 % outside.len()],
            _ => draw.rng().random_range(0..rows.max(1)),
        };
        if c.positions != Positions::Absent {
            tensors.set_i32s("positions", &(0..c.num_tokens).map(&mut position).collect::<Vec<_>>());
        }
        Ok(())
    }

    fn forward(c: &IndexerQueryCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        let stored = match c.stored {
            Stored::Values => hadamard::Stored::Values,
            Stored::E2m1 => hadamard::Stored::E2m1,
            Stored::E4m3 => hadamard::Stored::E4m3,
        };
        reference::forward(&t.named()?, stored, rounding)
    }

    fn launch(c: &IndexerQueryCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::forward(device, v, c.stored))
    }

    fn laws(c: &IndexerQueryCase, laws: &mut Laws<'_, Self>) {
        if c.stored == Stored::Values {
            laws.scale("queries are linear", "q", 0.5, &[("y", 0.5), ("w", 1.0)]);
        }
        let once = [("w", 0.5), ("y", 1.0), ("codes", 1.0), ("scale_bytes", 1.0)];
        laws.scale("weights count once", "weights", 0.5, &once);
        laws.separate("num_tokens", "tokens may be permuted");
        laws.permute("heads may be permuted", "num_heads");
    }

    /// The model's 64 heads of 4096 tokens.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let [num_tokens, num_heads] = if on_gpu(environment) { [4096, 64] } else { [4, 16] };
        let benchmark = |stored: Stored| {
            let name = format!("{num_tokens}x{num_heads}x{HEAD_DIM} to {}", ["bf16", "e2m1", "e4m3"][stored as usize]);
            let case = IndexerQueryCase { table_rows: num_tokens, ..plain(num_tokens, num_heads, stored) };
            // A rotation of half of the channels, seven steps and a product.
            Benchmark::new(Direction::Forward, name, case, "num_tokens").streaming(&[], 10.0)
        };
        Stored::ALL.map(benchmark).to_vec()
    }
}
