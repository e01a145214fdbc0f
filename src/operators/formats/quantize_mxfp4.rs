//! `quantize_mxfp4` (inference 5.3, 5.4, 5.7): `kernels/cuda/formats/quantize_mxfp4.cu` against
//! `reference/src/formats/quantize_mxfp4.rs`.
//!
//! Every rounding is to nearest and part of the definition. So every code, every scale and every
//! decoded value must equal the oracle's.

use dsv4_kernels::formats::quantize_mxfp4::{self as launcher, GROUP, ScaleLayout};
use dsv4_reference::Format;
use dsv4_reference::formats::quantize_mxfp4 as reference;
use dsv4_reference::quantize::{ScaleType, floor_of};
use rand::Rng;

use crate::operator::declaration::{Axis, TensorSpec};
use crate::operator::prelude::*;
use crate::operators::contents::{Contents, Groups, draw_e2m1_codes};
use crate::operators::formats::cut_scales;
use crate::operators::formats::quantize_fp8::{Task, format_of, layout_of_oracle, scale_axes};

/// The operator.
pub struct QuantizeMxfp4;

/// A case: direction, sizes, formats, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QuantizeMxfp4Case {
    /// The direction.
    pub task: Task,
    /// Rows; 0 is allowed.
    pub num_rows: usize,
    /// Elements of a row; even.
    pub width: usize,
    /// Type of the values.
    pub dtype: Float,
    /// Layout of the scales.
    pub layout: ScaleLayout,
    /// The contents of the groups that are quantized. For codes, `every_number` is each code with
    /// each scale.
    pub contents: Contents,
    /// Drawn values.
    #[serde(flatten)]
    pub data: Data,
}

fn plain(task: Task, num_rows: usize, width: usize) -> QuantizeMxfp4Case {
    let (layout, contents, data) = (ScaleLayout::Plain, Contents::Drawn, Data::normal(1.0));
    QuantizeMxfp4Case { task, num_rows, width, dtype: Float::Bf16, layout, contents, data }
}

impl QuantizeMxfp4Case {
    fn quantizes(&self) -> bool {
        self.task == Task::Quantize
    }

    fn groups(&self) -> Groups {
        let (contents, stored, seed) = (self.contents, format_of(self.dtype), self.data.seed);
        Groups {
            contents,
            format: Format::E2M1,
            stored,
            scale: ScaleType::E8m0,
            group: GROUP,
            seed,
        }
    }
}

impl Operator for QuantizeMxfp4 {
    type Case = QuantizeMxfp4Case;

    const ABOUT: About = About {
        name: "quantize_mxfp4",
        family: Family::Formats,
        summary: "rows as e2m1 codes with e8m0 scales of 32 numbers, and back",
        specification: &["inference 5.3", "inference 5.4", "inference 5.7"],
        paths: &[
            "quantize_mxfp4_vector",
            "quantize_mxfp4_scalar",
            "dequantize_mxfp4_vector",
            "dequantize_mxfp4_scalar",
        ],
        modules: launcher::modules,
        cases: [24, 60, 120],
    };

    const CONVENTIONS: &'static [Convention] = &[Convention::TiesTowardZero, Convention::AmaxFloor];

    const NOT_EXPRESSIBLE: &'static [(&'static str, &'static str)] =
        &[("e2m1 in groups of 128", "the model stores e2m1 with a scale byte for 32 values")];

    fn tensors(c: &QuantizeMxfp4Case) -> Specs {
        let rows = [
            axis("num_rows", c.num_rows),
            axis("width", c.width).multiples(2, launcher::MAX_WIDTH),
        ];
        let bytes = [rows[0], axis("code_bytes", c.width / 2)];
        let (dtype, axes) = scale_axes(launcher::scales(c.layout, c.num_rows, c.width));
        let codes = |spec: fn(&'static str, DType, &[Axis]) -> TensorSpec| {
            spec("codes", DType::U8, &bytes).rows()
        };
        let scales =
            |spec: fn(&'static str, DType, &[Axis]) -> TensorSpec| spec("scales", dtype, &axes);
        let x = input("x", c.dtype.dtype(), &rows).rows().drawn_as(c.data).of_any_size();
        let y = output("y", c.dtype.dtype(), &rows).rows().exact();
        let tensors = if c.quantizes() {
            vec![x, codes(output).exact(), scales(output).exact()]
        } else {
            vec![codes(input), scales(input), y]
        };
        Specs::new(c.data.seed, tensors)
    }

    fn check(c: &QuantizeMxfp4Case) -> Result<(), Refused> {
        c.data.check()
    }

    fn strategy(profile: Profile) -> BoxedStrategy<QuantizeMxfp4Case> {
        let extents = matrix(profile.of([[24, 1500], [150, 3000], [600, 20_000]]));
        let layout = select(vec![ScaleLayout::Plain, ScaleLayout::MnMajor, ScaleLayout::Blocked]);
        let contents = select(vec![
            Contents::Drawn,
            Contents::Drawn,
            Contents::Ties,
            Contents::Corners,
            Contents::Amax,
            Contents::NotFinite,
        ]);
        let task = prop_oneof![3 => Just(Task::Quantize), 1 => Just(Task::Dequantize)];
        (task, extents, Float::strategy(), layout, contents, Data::strategy(-40..=40))
            .prop_map(|(task, [num_rows, width], dtype, layout, contents, data)| {
                let width = width.next_multiple_of(2);
                QuantizeMxfp4Case { task, num_rows, width, dtype, layout, contents, data }
            })
            .boxed()
    }

    fn typical() -> Vec<QuantizeMxfp4Case> {
        let in_layout = |layout| move |case| QuantizeMxfp4Case { layout, ..case };
        vec![
            plain(Task::Quantize, 5, 192).then(in_layout(ScaleLayout::Blocked)),
            plain(Task::Quantize, 5, 106)
                .with(|case| case.dtype = Float::F32)
                .then(in_layout(ScaleLayout::MnMajor)),
            plain(Task::Dequantize, 5, 160),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<QuantizeMxfp4Case> {
        use Task::{Dequantize, Quantize};
        let in_layout = |layout| move |case| QuantizeMxfp4Case { layout, ..case };
        let holding = |contents| move |case| QuantizeMxfp4Case { contents, ..case };
        let f32s = |case| QuantizeMxfp4Case { dtype: Float::F32, ..case };
        let (mn, tiles) = (ScaleLayout::MnMajor, ScaleLayout::Blocked);
        let mut cases = vec![
            plain(Quantize, 0, 64),
            plain(Dequantize, 0, 64),
            plain(Quantize, 0, 64).then(in_layout(tiles)),
            plain(Quantize, 1, 2),
            // A warp has 512 elements; groups that end with a row; words and tiles with padding.
            plain(Quantize, 2, 544).then(in_layout(mn)),
            plain(Quantize, 33, 320).then(in_layout(tiles)),
            plain(Quantize, 129, 1120).then(in_layout(tiles)),
            plain(Quantize, 129, 42).then(f32s).then(in_layout(tiles)),
            plain(Dequantize, 3, 1056).then(in_layout(mn)),
            plain(Dequantize, 129, 160).then(in_layout(tiles)),
            // Every value, with the scale 1; each code with each scale.
            plain(Quantize, 67, 512).then(holding(Contents::EveryNumber)),
            plain(Quantize, 67, 512).then(f32s).then(holding(Contents::EveryNumber)),
            plain(Dequantize, 8, 1024).then(holding(Contents::EveryNumber)),
            plain(Dequantize, 8, 1024).then(f32s).then(holding(Contents::EveryNumber)),
        ];
        for contents in [Contents::Ties, Contents::Corners, Contents::Amax, Contents::NotFinite] {
            cases.push(plain(Quantize, 9, 512).then(holding(contents)));
            cases.push(plain(Quantize, 9, 330).then(f32s).then(holding(contents)));
        }
        if profile == Profile::Full {
            cases.extend([
                plain(Quantize, 1000, 4096),
                plain(Dequantize, 1000, 4096).then(in_layout(tiles)),
            ]);
        }
        cases
    }

    fn amend(c: &QuantizeMxfp4Case, tensors: &mut Tensors) -> OracleResult<()> {
        if c.quantizes() {
            c.groups().set_rows(tensors, [c.num_rows, c.width], c.data);
            return Ok(());
        }
        let mut draw = Draw::new(c.data.seed, "codes");
        let every = c.contents == Contents::EveryNumber;
        draw_e2m1_codes(every, &mut draw, tensors);
        draw_scales(c, every, &mut draw, tensors);
        Ok(())
    }

    fn forward(
        c: &QuantizeMxfp4Case,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        let layout = layout_of_oracle(c.layout);
        if c.quantizes() {
            return reference::quantize_by(&t.named()?, layout, rounding.conventions());
        }
        reference::dequantize(&t.named()?, layout, format_of(c.dtype))
    }

    fn launch(
        c: &QuantizeMxfp4Case,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        let launch = if c.quantizes() { launcher::quantize } else { launcher::dequantize };
        run.launch(|device| launch(device, v, c.layout))
    }

    fn invariant(_: &QuantizeMxfp4Case, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn batches(c: &QuantizeMxfp4Case, batches: &mut Batches<'_, Self>) {
        let scales = |rows| reference::scales(layout_of_oracle(c.layout), rows, c.width);
        batches.rows_with("num_rows", |tensors, cut| {
            cut_scales(tensors, "scales", c.num_rows, scales, cut);
            Vec::new()
        });
    }

    fn laws(c: &QuantizeMxfp4Case, laws: &mut Laws<'_, Self>) {
        // In other layouts rows have no separate axis.
        if c.layout == ScaleLayout::Plain {
            laws.separate("num_rows", "rows may be permuted");
        }
        let x = if c.quantizes() { laws.tensors().values("x") } else { Vec::new() };
        let smallest = x.iter().map(|x| x.abs()).fold(f64::INFINITY, f64::min);
        if !x.is_empty()
            && smallest >= floor_of(Format::E2M1)
            && x.iter().all(|x| x.abs() < 2f64.powi(100))
        {
            let same = [("codes", Relation::Times(1.0))];
            laws.law("a power of two moves the scales alone", |v| v.tensors.scale("x", 4.0), same);
        }
    }

    /// Activations of the model, and the shape that other projects measure.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        use Task::{Dequantize, Quantize};
        let in_layout = |layout, case| QuantizeMxfp4Case { layout, ..case };
        let cases = if on_gpu(environment) {
            let sizes =
                [(1, 7168), (128, 7168), (4096, 4096), (4096, 7168), (32768, 4096), (32768, 7168)];
            let mut cases: Vec<_> =
                sizes.map(|(rows, width)| plain(Quantize, rows, width)).to_vec();
            cases.push(in_layout(ScaleLayout::Blocked, plain(Quantize, 32768, 4096)));
            cases.push(plain(Dequantize, 32768, 4096));
            cases
        } else {
            vec![plain(Quantize, 64, 256), plain(Dequantize, 64, 256)]
        };
        let benchmark = |case: QuantizeMxfp4Case| {
            let QuantizeMxfp4Case { task, num_rows, width, layout, .. } = &case;
            let name = format!("{task:?} {num_rows}x{width} {layout:?}").to_lowercase();
            // A magnitude, a maximum, a product and a rounding.
            Benchmark::new(Direction::Forward, name, case, "num_rows").streaming(&[], 4.0)
        };
        cases.into_iter().map(benchmark).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![Reduced::forward(
            &["quantize 32768x4096 plain", "dequantize 32768x4096 plain"],
            json!({"num_rows": 21, "width": 512}),
            json!({"num_rows": 4}),
        )]
    }
}

/// Scales of codes: around the case's magnitude, or every byte in sequence. Their padding is NaN:
/// no kernel may read it.
fn draw_scales(c: &QuantizeMxfp4Case, every: bool, draw: &mut Draw, tensors: &mut Tensors) {
    let scales = reference::scales(layout_of_oracle(c.layout), c.num_rows, c.width);
    let exponent = c.data.magnitude.log2().round() as i32;
    let number = |at: usize, draw: &mut Draw| {
        let drawn = (127 + exponent + draw.rng().random_range(-6..=6)).clamp(0, 254) as u8;
        if every { at as u8 } else { drawn }
    };
    let numbers: Vec<_> =
        (0..scales.rows * scales.groups).map(|at| Some(number(at, draw))).collect();
    let placed = scales.arranged(&numbers);
    let bytes = tensors.bytes_mut("scales").unwrap_or_default();
    bytes.iter_mut().zip(placed).for_each(|(byte, scale)| *byte = scale.unwrap_or(255));
}
