//! `hadamard` (inference 5.4, 7, 7.1): `kernels/cuda/formats/hadamard.cu` against
//! `reference/src/formats/hadamard.rs`.
//!
//! The order of the sums is part of the definition, so codes and scales are fully determined. Every
//! byte must equal the oracle's.

use dsv4_kernels::formats::hadamard::{self as launcher, DIM, Stored};
use dsv4_reference::formats::hadamard as reference;

use crate::operator::fields::extent;
use crate::operator::prelude::*;

/// The operator.
pub struct Hadamard;

/// A case: rows, types, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HadamardCase {
    /// Rows of 128; 0 is allowed.
    pub num_rows: usize,
    /// Type of x, y, dy and dx.
    pub dtype: Float,
    /// The output format of the transform.
    pub stored: Stored,
    /// The rows.
    #[serde(flatten)]
    pub data: Data,
}

fn plain(num_rows: usize, dtype: Float, stored: Stored) -> HadamardCase {
    HadamardCase { num_rows, dtype, stored, data: Data::normal(1.0) }
}

/// The oracle's name for the format of the rows.
pub(crate) fn of_oracle(stored: Stored) -> reference::Stored {
    match stored {
        Stored::Values => reference::Stored::Values,
        Stored::E2m1 => reference::Stored::E2m1,
        Stored::E4m3 => reference::Stored::E4m3,
    }
}

impl Operator for Hadamard {
    type Case = HadamardCase;

    const ABOUT: About = About {
        name: "hadamard",
        family: Family::Formats,
        summary: "the orthonormal Walsh-Hadamard transform of rows of 128, as numbers, e2m1 or e4m3",
        specification: &["inference 5.4", "inference 7", "inference 7.1"],
        paths: &["hadamard_vector", "hadamard_scalar", "hadamard_codes"],
        modules: launcher::modules,
        cases: [24, 60, 120],
    };

    fn tensors(c: &HadamardCase) -> Specs {
        let (dtype, values) = (c.dtype.dtype(), c.stored == Stored::Values);
        let rows = [axis("num_rows", c.num_rows), axis("head_dim", DIM)];
        let codes = [rows[0], axis("code_bytes", c.stored.code_bytes())];
        let scale_bytes = [rows[0], axis("num_groups", DIM / 32)];
        let tensors = [
            input("x", dtype, &rows).rows().drawn_as(c.data).of_any_size(),
            output("y", dtype, &rows).rows().may_be("x").when(values),
            output("codes", DType::U8, &codes).rows().exact().when(!values),
            output("scale_bytes", DType::U8, &scale_bytes).exact().when(c.stored == Stored::E2m1),
            output("scales", DType::F32, &rows[..1]).exact().when(c.stored == Stored::E4m3),
            upstream("dy", "y"),
            gradient("dx", "x", dtype).rows().may_be("dy").when(values),
        ];
        Specs::new(c.data.seed, tensors)
    }

    fn strategy(profile: Profile) -> BoxedStrategy<HadamardCase> {
        let num_rows = extent(profile.of([60, 300, 4000]), 16);
        (num_rows, Float::strategy(), select(Stored::ALL.to_vec()), Data::strategy(-40..=40))
            .prop_map(|(num_rows, dtype, stored, data)| HadamardCase {
                num_rows,
                dtype,
                stored,
                data,
            })
            .boxed()
    }

    fn typical() -> Vec<HadamardCase> {
        vec![
            plain(5, Float::Bf16, Stored::Values),
            plain(5, Float::Bf16, Stored::E2m1),
            plain(5, Float::F32, Stored::E4m3),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<HadamardCase> {
        // A block takes 32 rows, and so does a round of a block of hadamard_codes. A warp of the
        // others takes 8.
        let rows = [0, 1, 32, 33, 70]
            .into_iter()
            .flat_map(|num_rows| Stored::ALL.map(|stored| (num_rows, stored)));
        let mut cases: Vec<_> =
            rows.map(|(num_rows, stored)| plain(num_rows, Float::Bf16, stored)).collect();
        cases.extend(Stored::ALL.map(|stored| plain(19, Float::F32, stored)));
        // After a round of tiles on five SMs of twelve blocks of hadamard_codes: groups of 8 rows,
        // the last of one row; tiles for some of the blocks, the last of eight rows. After two
        // rounds: groups, of which some blocks have two.
        let turn = 5 * 12 * 32;
        for num_rows in [turn + 65, turn + 1000, 2 * turn + 700] {
            cases.extend(
                [Stored::E2m1, Stored::E4m3].map(|stored| plain(num_rows, Float::Bf16, stored)),
            );
        }
        // Around the floors of the scales, and at their largest values.
        for (stored, exponent) in
            [(Stored::E2m1, -125), (Stored::E2m1, -128), (Stored::E4m3, -13), (Stored::E4m3, 120)]
        {
            let data = Data { magnitude: 2f64.powi(exponent), ..Data::normal(1.0) };
            cases.push(plain(33, Float::Bf16, stored).with(|case| case.data = data));
        }
        if profile == Profile::Full {
            cases.extend(Stored::ALL.map(|stored| plain(30_000, Float::Bf16, stored)));
        }
        cases
    }

    fn forward(c: &HadamardCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::forward(&t.named()?, of_oracle(c.stored), rounding)
    }

    fn backward(_: &HadamardCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::backward(&t.named()?, rounding)
    }

    fn launch(c: &HadamardCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::launch(device, v, c.stored, false))
    }

    fn launch_backward(
        c: &HadamardCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::launch(device, v, c.stored, true))
    }

    fn invariant(_: &HadamardCase, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn laws(c: &HadamardCase, laws: &mut Laws<'_, Self>) {
        if c.stored == Stored::Values {
            laws.scale("the transform is linear", "x", 0.5, &[("y", 0.5), ("dx", 1.0)]);
            laws.scale_upstreams();
        }
        laws.separate("num_rows", "rows may be permuted");
    }

    /// The indexer's queries of 4096 tokens, 64 heads each.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let num_rows = if on_gpu(environment) { 4096 * 64 } else { 64 };
        let benchmark = |stored: Stored| {
            let name =
                format!("{num_rows}x128 bf16 to {}", ["bf16", "e2m1", "e4m3"][stored as usize]);
            // Seven steps and a product.
            let case = plain(num_rows, Float::Bf16, stored);
            Benchmark::new(Direction::Forward, name, case, "num_rows").streaming(&[], 8.0)
        };
        Stored::ALL.map(benchmark).into()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![Reduced::forward(
            &["262144x128 bf16 to bf16", "262144x128 bf16 to e2m1"],
            json!({"num_rows": 21}),
            json!({"num_rows": 4}),
        )]
    }
}
