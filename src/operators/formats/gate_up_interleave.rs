//! `gate_up_interleave` (inference 5.8): `kernels/cuda/formats/gate_up_interleave.cu` against
//! `reference/src/formats/gate_up_interleave.rs`.
//!
//! Nothing is computed, so every byte must equal the oracle's.

use std::rc::Rc;

use dsv4_kernels::formats::gate_up_interleave::{
    self as launcher, GRANULE, MAX_ROW_BYTES, MAX_ROWS,
};
use dsv4_reference::formats::gate_up_interleave as reference;
use rand::Rng;

use crate::operator::declaration::TensorSpec;
use crate::operator::fields::extent;
use crate::operator::prelude::*;

/// The operator.
pub struct GateUpInterleave;

/// A case: sizes, direction, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GateUpInterleaveCase {
    /// Experts; 0 is allowed.
    pub num_experts: usize,
    /// Rows of an expert, gate and up together: a multiple of 16.
    pub num_rows: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// Whether the kernel deinterleaves rows.
    pub inverse: bool,
    /// Seed of the bytes.
    pub seed: u64,
}

fn plain([num_experts, num_rows, row_bytes]: [usize; 3], inverse: bool) -> GateUpInterleaveCase {
    GateUpInterleaveCase { num_experts, num_rows, row_bytes, inverse, seed: 1 }
}

impl GateUpInterleaveCase {
    fn given(&self) -> &'static str {
        if self.inverse { "interleaved" } else { "logical" }
    }

    fn written(&self) -> &'static str {
        if self.inverse { "logical" } else { "interleaved" }
    }

    /// The interleaved row of a logical one, or the reverse.
    fn written_row(&self, row: usize) -> usize {
        let half = self.num_rows / 2;
        if self.inverse {
            row / GRANULE % 2 * half + row / (2 * GRANULE) * GRANULE + row % GRANULE
        } else {
            row % half / GRANULE * (2 * GRANULE) + row / half * GRANULE + row % GRANULE
        }
    }
}

impl Operator for GateUpInterleave {
    type Case = GateUpInterleaveCase;

    const ABOUT: About = About {
        name: "gate_up_interleave",
        family: Family::Formats,
        summary: "rows of gate and up of expert weights, or of their scales, interleaved by eight, and back",
        specification: &["inference 5.8"],
        paths: &[
            "gate_up_interleave_vector",
            "gate_up_interleave_scalar",
            "gate_up_separate_vector",
            "gate_up_separate_scalar",
        ],
        modules: launcher::modules,
        cases: [16, 40, 80],
    };

    fn tensors(c: &GateUpInterleaveCase) -> Specs {
        let rows = axis("num_rows", c.num_rows).multiples(2 * GRANULE, MAX_ROWS);
        let axes = [
            axis("num_experts", c.num_experts),
            rows,
            axis("row_bytes", c.row_bytes).multiples(1, MAX_ROW_BYTES),
        ];
        let exact = |spec: TensorSpec| spec.exact().rows();
        let (given, written) =
            (input(c.given(), DType::U8, &axes), output(c.written(), DType::U8, &axes));
        Specs::new(c.seed, [exact(given), exact(written)])
    }

    fn strategy(profile: Profile) -> BoxedStrategy<GateUpInterleaveCase> {
        let [experts, eights, bytes] = profile.of([[4, 6, 300], [6, 10, 900], [12, 40, 4000]]);
        (0..=experts, 1..=eights, extent(bytes, 16), any::<bool>(), 0..1000u64)
            .prop_map(|(num_experts, eights, row_bytes, inverse, seed)| {
                let num_rows = 2 * GRANULE * eights;
                GateUpInterleaveCase { num_experts, num_rows, row_bytes, inverse, seed }
            })
            .boxed()
    }

    fn typical() -> Vec<GateUpInterleaveCase> {
        [[3, 48, 32], [2, 48, 7]]
            .into_iter()
            .flat_map(|extents| [false, true].map(|i| plain(extents, i)))
            .collect()
    }

    fn edge_cases(_: Profile) -> Vec<GateUpInterleaveCase> {
        // No expert; one byte; one group of eight; a piece more than a block takes, with 16-byte
        // and single-byte accesses.
        let extents =
            [[0, 16, 16], [1, 16, 1], [3, 16, 16], [2, 176, 48], [1, 48, 33], [5, 32, 224]];
        extents
            .into_iter()
            .flat_map(|extents| [false, true].map(|inverse| plain(extents, inverse)))
            .collect()
    }

    fn amend(c: &GateUpInterleaveCase, tensors: &mut Tensors) -> OracleResult<()> {
        let mut draw = Draw::new(c.seed, "bytes");
        let bytes = tensors.bytes_mut(c.given()).unwrap_or_default();
        bytes.iter_mut().for_each(|byte| *byte = draw.rng().random());
        Ok(())
    }

    fn forward(c: &GateUpInterleaveCase, t: &Bound<'_>, _: &mut Rounding) -> OracleResult<Named> {
        let named = t.named()?;
        if c.inverse { reference::separate(&named) } else { reference::interleave(&named) }
    }

    fn launch(
        c: &GateUpInterleaveCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::launch(device, v, c.inverse))
    }

    /// Its rows are those of weights, which are rearranged once.
    fn batches(_: &GateUpInterleaveCase, _: &mut Batches<'_, Self>) {}

    fn laws(c: &GateUpInterleaveCase, laws: &mut Laws<'_, Self>) {
        laws.permute("experts may be permuted", "num_experts");
        if c.num_experts == 0 {
            return;
        }
        // Other bytes in one row change exactly one row of the output.
        let (expert, row) = (c.num_experts / 2, c.num_rows / 2);
        let (changed, written) =
            (expert * c.num_rows + row, expert * c.num_rows + c.written_row(row));
        let change = |v: &mut Variant<Self>| {
            let bytes = v.tensors.bytes_mut(c.given()).unwrap_or_default();
            bytes[changed * c.row_bytes..(changed + 1) * c.row_bytes]
                .iter_mut()
                .for_each(|byte| *byte ^= 0x55);
        };
        let others = Relation::EqualRows(Rc::new(move |row| row != written));
        laws.law("a row goes to one row", change, [(c.written(), others)]);
    }

    /// Weights in e2m1 and their scales, with the experts of one rank of eight: the two models'.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let gpu = [[32, 4096, 2048], [32, 4096, 128], [48, 6144, 3584], [48, 6144, 224]];
        let shapes = if on_gpu(environment) { &gpu[..] } else { &[[3, 64, 96]] };
        let benchmark = |&extents: &[usize; 3]| {
            [false, true].map(|inverse| {
                let [num_experts, num_rows, row_bytes] = extents;
                let name = format!(
                    "{num_experts}x{num_rows}x{row_bytes}{}",
                    if inverse { " inverse" } else { "" }
                );
                let case = plain(extents, inverse);
                Benchmark::new(Direction::Forward, name, case, "num_experts").streaming(&[], 0.0)
            })
        };
        shapes.iter().flat_map(benchmark).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![Reduced::forward(
            &["32x4096x2048", "32x4096x128 inverse"],
            json!({"num_experts": 5, "num_rows": 48, "row_bytes": 48}),
            json!({"num_experts": 2}),
        )]
    }
}
