//! `scale_swizzle` (inference 5.7): `kernels/cuda/formats/scale_swizzle.cu` against
//! `reference/src/formats/scale_swizzle.rs`.
//!
//! Nothing is computed, so every byte must equal the oracle's.

use std::rc::Rc;

use dsv4_kernels::formats::scale_swizzle as launcher;
use dsv4_reference::formats::scale_layout::{ScaleLayout, Scales};
use dsv4_reference::formats::scale_swizzle as reference;
use rand::Rng;

use crate::operator::benchmarks::Whole;
use crate::operator::declaration::{Axis, TensorSpec};
use crate::operator::fields::extent;
use crate::operator::prelude::*;
use crate::operators::formats::cut_scales;

/// The operator.
pub struct ScaleSwizzle;

/// Rows of a tile.
const TILE_ROWS: usize = 128;

/// A case: sizes, direction, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScaleSwizzleCase {
    /// Rows; 0 is allowed.
    pub num_rows: usize,
    /// Scales of a row.
    pub num_groups: usize,
    /// Whether scales are read from tiles instead of written to them.
    pub inverse: bool,
    /// Seed of the bytes.
    pub seed: u64,
}

fn plain(num_rows: usize, num_groups: usize, inverse: bool) -> ScaleSwizzleCase {
    ScaleSwizzleCase { num_rows, num_groups, inverse, seed: 1 }
}

impl Operator for ScaleSwizzle {
    type Case = ScaleSwizzleCase;

    const ABOUT: About = About {
        name: "scale_swizzle",
        family: Family::Formats,
        summary: "rows of byte scales to tiles of 128 rows by 4 groups, and back",
        specification: &["inference 5.7"],
        paths: &[
            "scale_swizzle_vector",
            "scale_swizzle_scalar",
            "scale_unswizzle_vector",
            "scale_unswizzle_scalar",
        ],
        modules: launcher::modules,
        cases: [16, 40, 80],
    };

    fn tensors(c: &ScaleSwizzleCase) -> Specs {
        let groups = axis("num_groups", c.num_groups).multiples(1, launcher::MAX_GROUPS);
        let [row_tiles, group_tiles] = launcher::tiles(c.num_rows, c.num_groups);
        let tiles = [
            axis("row_tiles", row_tiles),
            axis("group_tiles", group_tiles),
            axis("tile_bytes", launcher::TILE_BYTES),
        ];
        let side = |name, axes: &[Axis], written: bool| -> TensorSpec {
            if written {
                output(name, DType::U8, axes).exact()
            } else {
                input(name, DType::U8, axes).exact()
            }
        };
        let scales = side("scales", &[axis("num_rows", c.num_rows), groups], c.inverse).rows();
        let tiles = side("tiles", &tiles, !c.inverse).aligned_rows();
        Specs::new(c.seed, if c.inverse { [tiles, scales] } else { [scales, tiles] })
    }

    fn strategy(profile: Profile) -> BoxedStrategy<ScaleSwizzleCase> {
        let [rows, groups] = profile.of([[300, 90], [900, 300], [5000, 500]]);
        (extent(rows, 128), extent(groups, 16), any::<bool>(), 0..1000u64)
            .prop_map(|(num_rows, num_groups, inverse, seed)| ScaleSwizzleCase {
                num_rows,
                num_groups,
                inverse,
                seed,
            })
            .boxed()
    }

    fn typical() -> Vec<ScaleSwizzleCase> {
        vec![plain(130, 16, false), plain(130, 16, true), plain(40, 7, false), plain(40, 7, true)]
    }

    fn edge_cases(_: Profile) -> Vec<ScaleSwizzleCase> {
        // One scale. A row more than a warp takes of a quarter, than a quarter and than a tile. A
        // group more than a tile, than a lane takes and than a warp. A lane and a warp whose last
        // whole tile is the last of all.
        let extents = [
            (0, 3),
            (1, 1),
            (17, 4),
            (33, 5),
            (2, 20),
            (128, 16),
            (129, 17),
            (257, 35),
            (129, 48),
            (145, 64),
        ];
        extents
            .into_iter()
            .flat_map(|(rows, groups)| [false, true].map(|inverse| plain(rows, groups, inverse)))
            .collect()
    }

    fn amend(c: &ScaleSwizzleCase, tensors: &mut Tensors) -> OracleResult<()> {
        let mut draw = Draw::new(c.seed, "bytes");
        // The padding of tiles is not 0 here: no kernel may read it.
        let bytes =
            tensors.bytes_mut(if c.inverse { "tiles" } else { "scales" }).unwrap_or_default();
        bytes.iter_mut().for_each(|byte| *byte = draw.rng().random());
        Ok(())
    }

    fn forward(c: &ScaleSwizzleCase, t: &Bound<'_>, _: &mut Rounding) -> OracleResult<Named> {
        let named = t.named()?;
        if c.inverse {
            reference::unswizzle(&named, c.num_rows, c.num_groups)
        } else {
            reference::swizzle(&named)
        }
    }

    fn launch(c: &ScaleSwizzleCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::launch(device, v, c.inverse))
    }

    fn invariant(_: &ScaleSwizzleCase, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn batches(c: &ScaleSwizzleCase, batches: &mut Batches<'_, Self>) {
        // Tiles have no axis of rows: only their inverse writes rows.
        if c.inverse {
            let (layout, groups) = (ScaleLayout::Blocked, c.num_groups);
            let tiles = |rows| Scales { layout, bytes: true, rows, groups };
            batches.rows_with("num_rows", |tensors, cut| {
                cut_scales(tensors, "tiles", c.num_rows, tiles, cut);
                Vec::new()
            });
        }
    }

    fn laws(c: &ScaleSwizzleCase, laws: &mut Laws<'_, Self>) {
        // A single row of tiles has no other row to compare.
        if c.num_rows <= TILE_ROWS {
            return;
        }
        // Other bytes in the middle row, or in its tiles, do not change other tiles' rows.
        let (row, [row_tiles, _]) = (c.num_rows / 2, launcher::tiles(c.num_rows, c.num_groups));
        let (name, entry) = if c.inverse { ("tiles", row / TILE_ROWS) } else { ("scales", row) };
        let entries = if c.inverse { row_tiles } else { c.num_rows };
        let change = |v: &mut Variant<Self>| {
            let bytes = v.tensors.bytes_mut(name).unwrap_or_default();
            let len = bytes.len() / entries;
            bytes[entry * len..(entry + 1) * len].iter_mut().for_each(|byte| *byte ^= 0x55);
        };
        let at = row / TILE_ROWS;
        let relation = if c.inverse {
            ("scales", Relation::EqualRows(Rc::new(move |row| row / TILE_ROWS != at)))
        } else {
            ("tiles", Relation::EqualExcept { axis: 0, at })
        };
        laws.law("tiles know nothing of each other", change, [relation]);
    }

    /// The scales of groups of 16 and of 32 in the model's hidden states. Rows are sampled, and
    /// tiles have no row axis, so the timed kernel reads scales from tiles.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let gpu = [(32768, 224), (32768, 448), (4096, 224)];
        let shapes = if on_gpu(environment) { &gpu[..] } else { &[(256, 32)] };
        let benchmark = |&(num_rows, num_groups): &(usize, usize)| {
            let case = plain(num_rows, num_groups, true);
            let benchmark = Benchmark::new(
                Direction::Forward,
                format!("{num_rows}x{num_groups} inverse"),
                case.clone(),
                "num_rows",
            );
            // All tiles are drawn, because they have no such axis.
            Benchmark { drawn: case, sampled: keep_rows, ..benchmark.streaming(&[], 0.0) }
        };
        shapes.iter().map(benchmark).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![Reduced::forward(
            &["32768x224 inverse"],
            json!({"num_rows": 261, "num_groups": 35}),
            json!({}),
        )]
    }
}

/// Writes the sampled rows to separate tiles.
fn keep_rows(whole: &Whole<'_, ScaleSwizzle>, c: &mut ScaleSwizzleCase, tensors: &mut Tensors) {
    let all = Scales {
        layout: ScaleLayout::Blocked,
        bytes: true,
        rows: whole.case.num_rows,
        groups: c.num_groups,
    };
    let few = Scales { rows: c.num_rows, ..all };
    let stored = &tensors.tensor("tiles").bytes;
    let row = |&row: &usize| (0..all.groups).map(move |group| stored[all.place(row, group)]);
    let bytes = few.arranged(&whole.rows.iter().flat_map(row).collect::<Vec<_>>());
    tensors.put("tiles", HostTensor { dtype: DType::U8, shape: few.shape(), bytes });
}
