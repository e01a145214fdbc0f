//! `indexer_query` (inference 7, 7.1): `kernels/cuda/indexer/indexer_query.cu` against
//! `reference/src/indexer/indexer_query.rs`.
//!
//! Codes and scales are fully determined and must equal the oracle's. Values are compared with the
//! formula and have a gradient.

use dsv4_kernels::indexer::indexer_query::{self as launcher, DIM, ROPE_DIM, Stored};
use dsv4_reference::indexer::indexer_query as reference;

use crate::operator::declaration::Axis;
use crate::operator::fields::extent;
use crate::operator::prelude::*;
use crate::operators::projections::rope::{TableForm, Turning, turned_by};

/// The operator.
pub struct IndexerQuery;

/// A case: sizes, rotation, how the queries are stored, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IndexerQueryCase {
    /// Tokens; 0 is allowed.
    pub num_tokens: usize,
    /// Query heads.
    pub num_heads: usize,
    /// How tokens select their table rows.
    pub table: TableForm,
    /// Rows of the table where there are positions.
    pub table_rows: usize,
    /// How the queries are stored.
    pub stored: Stored,
    /// Type of the weights.
    pub weights: Float,
    /// Multiplies the weights; `(128 num_heads)^-0.5` in the model.
    pub weights_scale: f32,
    /// Queries and weights.
    #[serde(flatten)]
    pub data: Data,
}

fn plain(num_tokens: usize, num_heads: usize, stored: Stored) -> IndexerQueryCase {
    let (table, table_rows, weights) = (TableForm::RowPerToken, 0, Float::Bf16);
    // For 64 heads.
    let (weights_scale, data) = (0.011_048_543, Data::normal(1.0));
    IndexerQueryCase {
        num_tokens,
        num_heads,
        table,
        table_rows,
        stored,
        weights,
        weights_scale,
        data,
    }
}

impl IndexerQueryCase {
    fn turning(&self) -> Turning {
        let Self { num_tokens, table: form, table_rows, .. } = *self;
        Turning { form, table_rows, num_tokens, rope_dim: ROPE_DIM, seed: self.data.seed }
    }
}

fn inputs(c: &IndexerQueryCase, t: &Bound<'_>) -> OracleResult<reference::Inputs> {
    let rotation = turned_by(t, t.f64("q")?, false)?;
    Ok(reference::Inputs { rotation, weights: t.f64("weights")?, weights_scale: c.weights_scale })
}

impl Operator for IndexerQuery {
    type Case = IndexerQueryCase;

    const ABOUT: About = About {
        name: "indexer_query",
        family: Family::Indexer,
        summary: "the indexer's queries, turned by position, transformed and stored as numbers, e2m1 or e4m3, and its head weights",
        specification: &["inference 7", "inference 7.1"],
        paths: &[
            "indexer_query_vector",
            "indexer_query_scalar",
            "backward indexer_query_backward_vector",
            "backward indexer_query_backward_scalar",
        ],
        modules: launcher::modules,
        cases: [24, 60, 120],
    };

    fn tensors(c: &IndexerQueryCase) -> Specs {
        let (values, e2m1) = (c.stored == Stored::Values, c.stored == Stored::E2m1);
        let heads = [axis("num_tokens", c.num_tokens), axis("num_heads", c.num_heads)];
        let of_heads = |width: Axis| [heads[0], heads[1], width];
        let q = of_heads(axis("head_dim", DIM));
        let [cos, sin, positions] = c.turning().tensors();
        let tensors = [
            input("q", DType::Bf16, &q).rows().drawn_as(c.data).of_any_size(),
            cos,
            sin,
            positions,
            // Independent of the queries' magnitude, because scales of large queries are folded
            // into them.
            input("weights", c.weights.dtype(), &heads)
                .rows()
                .drawn(Distribution::Normal, 1.0)
                .of_any_size(),
            output("y", DType::Bf16, &q).rows().may_be("q").when(values),
            output("codes", DType::U8, &of_heads(axis("code_bytes", c.stored.code_bytes())))
                .rows()
                .exact()
                .when(!values),
            output("scale_bytes", DType::U8, &of_heads(axis("num_groups", DIM / 32)))
                .exact()
                .when(e2m1),
            output("w", DType::F32, &heads).rows(),
            upstream("dy", "y"),
            upstream("dw", "w").when(values),
            gradient("dq", "q", DType::Bf16).rows().may_be("dy").when(values),
            gradient("dweights", "weights", c.weights.dtype()).rows().when(values),
        ];
        Specs::new(c.data.seed, tensors).finite("weights_scale", c.weights_scale)
    }

    fn check(c: &IndexerQueryCase) -> Result<(), Refused> {
        c.turning().check()?;
        c.data.check()
    }

    fn strategy(profile: Profile) -> BoxedStrategy<IndexerQueryCase> {
        let tokens = 0..=profile.of([9usize, 40, 400]);
        let heads = prop_oneof![1 => Just(64usize), 3 => extent(profile.of([20, 40, 70]), 16)];
        let table =
            select(vec![TableForm::RowPerToken, TableForm::Positions, TableForm::HostilePositions]);
        let scale = select(vec![0.011_048_543f32, 1.0, 0.3]);
        let stored = (select(Stored::ALL.to_vec()), Float::strategy(), scale);
        (tokens, heads, table, 1..200usize, stored, Data::strategy(-30..=30))
            .prop_map(
                |(num_tokens, num_heads, table, rows, (stored, weights, weights_scale), data)| {
                    let table_rows = if table == TableForm::RowPerToken { 0 } else { rows };
                    IndexerQueryCase {
                        table,
                        table_rows,
                        weights,
                        weights_scale,
                        data,
                        ..plain(num_tokens, num_heads, stored)
                    }
                },
            )
            .boxed()
    }

    fn typical() -> Vec<IndexerQueryCase> {
        let positions =
            |case| IndexerQueryCase { table: TableForm::Positions, table_rows: 9, ..case };
        vec![
            plain(3, 5, Stored::Values),
            plain(4, 3, Stored::E2m1).then(positions),
            plain(2, 17, Stored::E4m3).then(positions).with(|case| case.weights = Float::F32),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<IndexerQueryCase> {
        // A block takes 32 heads, a warp 8.
        let heads = [(0, 3), (1, 1), (2, 32), (3, 33), (2, 64)];
        let mut cases: Vec<_> = heads
            .into_iter()
            .flat_map(|(tokens, heads)| Stored::ALL.map(|stored| plain(tokens, heads, stored)))
            .collect();
        let hostile = |stored| {
            plain(11, 3, stored).with(|case| {
                case.table = TableForm::HostilePositions;
                case.table_rows = 5;
            })
        };
        cases.extend(Stored::ALL.map(hostile));
        // Around the floors of the scales, and at their largest values.
        for (stored, exponent) in [(Stored::E2m1, -125), (Stored::E4m3, -13), (Stored::E4m3, 118)] {
            let data = Data { magnitude: 2f64.powi(exponent), ..Data::normal(1.0) };
            cases.push(plain(5, 5, stored).with(|case| {
                case.data = data;
                case.weights = Float::F32;
            }));
        }
        if profile == Profile::Full {
            cases.extend(Stored::ALL.map(|stored| plain(300, 64, stored)));
        }
        cases
    }

    fn amend(c: &IndexerQueryCase, tensors: &mut Tensors) -> OracleResult<()> {
        c.turning().amend(tensors)
    }

    fn forward(
        c: &IndexerQueryCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        reference::forward(
            &inputs(c, t)?,
            crate::operators::formats::hadamard::of_oracle(c.stored),
            rounding,
        )
    }

    fn backward(
        c: &IndexerQueryCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        if c.stored != Stored::Values {
            return Ok(Named::new());
        }
        reference::backward(&inputs(c, t)?, &t.f64("dy")?, &t.f64("dw")?, rounding)
    }

    fn launch(c: &IndexerQueryCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        let own =
            v.only(&["q", "weights", "y", "codes", "scale_bytes", "w", "cos", "sin", "positions"]);
        run.launch(|device| launcher::forward(device, &own, c.stored, c.weights_scale))
    }

    fn launch_backward(
        c: &IndexerQueryCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        let gradient = v.without(&["y", "codes", "scale_bytes", "w"]);
        run.ran(format!(
            "backward {}",
            launcher::backward(run.device(), &gradient, c.weights_scale)?
        ));
        Ok(())
    }

    fn invariant(_: &IndexerQueryCase, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn laws(c: &IndexerQueryCase, laws: &mut Laws<'_, Self>) {
        if c.stored == Stored::Values {
            laws.scale(
                "queries are linear",
                "q",
                0.5,
                &[("y", 0.5), ("w", 1.0), ("dq", 1.0), ("dweights", 1.0)],
            );
            laws.scale_upstreams();
        }
        laws.scale("a power of two of the weights is one of w", "weights", 2.0, &[("w", 2.0)]);
        laws.separate("num_tokens", "tokens may be permuted");
        laws.separate("num_heads", "heads may be permuted");
    }

    /// Tokens with a hostile position have NaN outputs, so finite differences do not exist.
    fn is_smooth(c: &IndexerQueryCase) -> bool {
        c.stored == Stored::Values
            && c.num_tokens * c.num_heads <= 64
            && c.table != TableForm::HostilePositions
    }

    /// The queries of 4096 tokens, 64 heads each.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let (num_tokens, num_heads) = if on_gpu(environment) { (4096, 64) } else { (8, 8) };
        let benchmark = |stored: Stored| {
            let name = format!(
                "{num_tokens}x{num_heads}x128 to {}",
                ["bf16", "e2m1", "e4m3"][stored as usize]
            );
            // Three operations of the rotation for half of the channels, seven steps and a product.
            let case = plain(num_tokens, num_heads, stored);
            Benchmark::new(Direction::Forward, name, case, "num_tokens").streaming(&[], 9.5)
        };
        Stored::ALL.map(benchmark).into()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![Reduced::forward(
            &["4096x64x128 to e2m1", "4096x64x128 to e4m3"],
            json!({"num_tokens": 11, "num_heads": 3}),
            json!({"num_tokens": 2}),
        )]
    }
}
