//! `scaled_rows` (inference 3): `kernels/cuda/formats/scaled_rows.cu` against
//! `reference/src/formats/scaled_rows.rs`.

use dsv4_kernels::formats::scaled_rows::{self as launcher, MAX_WIDTH};
use dsv4_reference::formats::scaled_rows as reference;

use crate::operator::prelude::*;

/// The operator.
pub struct ScaledRows;

/// A case: sizes, type, factor, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScaledRowsCase {
    /// Rows; 0 is allowed.
    pub num_rows: usize,
    /// Channels.
    pub width: usize,
    /// Type of x and y.
    pub dtype: Float,
    /// The factor.
    pub factor: f32,
    /// x.
    #[serde(flatten)]
    pub data: Data,
}

fn plain(num_rows: usize, width: usize, dtype: Float) -> ScaledRowsCase {
    ScaledRowsCase { num_rows, width, dtype, factor: 1.75, data: Data::normal(1.0) }
}

impl Operator for ScaledRows {
    type Case = ScaledRowsCase;

    const ABOUT: About = About {
        name: "scaled_rows",
        family: Family::Formats,
        summary: "y = factor · x",
        specification: &["inference 3"],
        paths: &["scaled_rows"],
        modules: launcher::modules,
        cases: [8, 16, 32],
    };

    fn tensors(c: &ScaledRowsCase) -> Specs {
        let width = axis("width", c.width).multiples(1, MAX_WIDTH);
        let (rows, dtype) = ([axis("num_rows", c.num_rows), width], c.dtype.dtype());
        let x = input("x", dtype, &rows).rows().drawn_as(c.data);
        Specs::new(c.data.seed, [x, output("y", dtype, &rows).rows()]).positive("factor", c.factor)
    }

    fn strategy(profile: Profile) -> BoxedStrategy<ScaledRowsCase> {
        let extents = matrix(profile.of([[12, 600], [40, 2000], [200, 9000]]));
        let factor = select(vec![1.75f32, 0.3, 12.0]);
        (extents, Float::strategy(), factor, Data::strategy(-8..=8))
            .prop_map(|([num_rows, width], dtype, factor, data)| ScaledRowsCase {
                num_rows,
                width,
                dtype,
                factor,
                data,
            })
            .boxed()
    }

    fn typical() -> Vec<ScaledRowsCase> {
        vec![plain(5, 61, Float::Bf16), plain(5, 61, Float::F32)]
    }

    fn edge_cases(_: Profile) -> Vec<ScaledRowsCase> {
        vec![plain(0, 8, Float::Bf16), plain(1, 1, Float::F32), plain(3, 257, Float::Bf16)]
    }

    fn forward(c: &ScaledRowsCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::forward(&t.named()?, t.scalar("factor", c.factor.into()), rounding)
    }

    fn launch(c: &ScaledRowsCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::forward(device, v, c.factor))
    }

    fn laws(_: &ScaledRowsCase, laws: &mut Laws<'_, Self>) {
        laws.separate("num_rows", "rows may be permuted");
    }

    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let num_rows = if on_gpu(environment) { 4096 } else { 16 };
        let name = format!("{num_rows}x2048 bf16");
        let case = plain(num_rows, 2048, Float::Bf16);
        vec![Benchmark::new(Direction::Forward, name, case, "num_rows").streaming(&[], 1.0)]
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        let (whole, drawn) = (json!({"num_rows": 21, "width": 96}), json!({"num_rows": 4}));
        vec![Reduced::forward(&["4096x2048 bf16"], whole, drawn)]
    }
}
