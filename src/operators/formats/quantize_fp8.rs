//! `quantize_fp8` (inference 5.3, 5.4, 5.7): `kernels/cuda/formats/quantize_fp8.cu` against
//! `reference/src/formats/quantize_fp8.rs`.
//!
//! Every rounding is to nearest and part of the definition. So every code, every scale and every
//! decoded value must equal the oracle's.

use dsv4_kernels::formats::quantize_fp8::{
    self as launcher, Group, Options, ScaleLayout, ScaleType,
};
use dsv4_reference::formats::quantize_fp8 as reference;
use dsv4_reference::quantize::{self, floor_of};
use dsv4_reference::{Format, formats::scale_layout};
use rand::Rng;

use crate::operator::declaration::{Axis, TensorSpec};
use crate::operator::prelude::*;
use crate::operator::tensors::permuted_along;
use crate::operators::contents::{Contents, Groups};
use crate::operators::formats::cut_scales;

/// The operator.
pub struct QuantizeFp8;

/// The direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    /// Values to codes and scales.
    Quantize,
    /// Codes and scales to values.
    Dequantize,
}

/// A case: direction, sizes, formats, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QuantizeFp8Case {
    /// The direction.
    pub task: Task,
    /// Rows; 0 is allowed.
    pub num_rows: usize,
    /// Elements of a row.
    pub width: usize,
    /// Type of the values.
    pub dtype: Float,
    /// Which values share a scale.
    pub group: Group,
    /// Type of the scales.
    pub scale: ScaleType,
    /// Layout of the scales.
    pub layout: ScaleLayout,
    /// The contents of the groups that are quantized. For codes, `every_number` is each code with
    /// each scale.
    pub contents: Contents,
    /// Drawn values.
    #[serde(flatten)]
    pub data: Data,
}

fn plain(task: Task, num_rows: usize, width: usize, group: Group) -> QuantizeFp8Case {
    let (scale, layout, contents, data) =
        (ScaleType::E8m0, ScaleLayout::Plain, Contents::Drawn, Data::normal(1.0));
    QuantizeFp8Case {
        task,
        num_rows,
        width,
        dtype: Float::Bf16,
        group,
        scale,
        layout,
        contents,
        data,
    }
}

/// The oracle's name for the scale type.
pub(crate) fn scale_of_oracle(scale: ScaleType) -> quantize::ScaleType {
    match scale {
        ScaleType::E8m0 => quantize::ScaleType::E8m0,
        ScaleType::PowerOfTwo => quantize::ScaleType::PowerOfTwo,
        ScaleType::Fp32 => quantize::ScaleType::Fp32,
    }
}

/// The oracle's name for the scale layout.
pub(crate) fn layout_of_oracle(layout: ScaleLayout) -> scale_layout::ScaleLayout {
    match layout {
        ScaleLayout::Plain => scale_layout::ScaleLayout::Plain,
        ScaleLayout::MnMajor => scale_layout::ScaleLayout::MnMajor,
        ScaleLayout::Blocked => scale_layout::ScaleLayout::Blocked,
    }
}

/// The type and the axes of a tensor of scales.
pub(crate) fn scale_axes(scales: launcher::Scales) -> (DType, Vec<Axis>) {
    let (dtype, axes) = scales.tensor();
    (dtype, axes.into_iter().map(|(name, extent)| axis(name, extent)).collect())
}

/// The oracle's format for stored values.
pub(crate) fn format_of(dtype: Float) -> Format {
    if dtype == Float::Bf16 { Format::BF16 } else { Format::F32 }
}

impl QuantizeFp8Case {
    fn options(&self) -> Options {
        Options { group: self.group, scale: self.scale, layout: self.layout }
    }

    fn of_oracle(&self) -> reference::Options {
        let group = match self.group {
            Group::Row64 => reference::Group::Row(64),
            Group::Row128 => reference::Group::Row(128),
            Group::Square128 => reference::Group::Square,
        };
        reference::Options {
            group,
            scale: scale_of_oracle(self.scale),
            layout: layout_of_oracle(self.layout),
        }
    }

    fn quantizes(&self) -> bool {
        self.task == Task::Quantize
    }

    /// What the groups of a row have in common.
    fn groups(&self) -> Groups {
        let [_, group] = self.group.extents();
        let (contents, scale, seed) = (self.contents, scale_of_oracle(self.scale), self.data.seed);
        Groups { contents, format: Format::E4M3, stored: format_of(self.dtype), scale, group, seed }
    }
}

impl Operator for QuantizeFp8 {
    type Case = QuantizeFp8Case;

    const ABOUT: About = About {
        name: "quantize_fp8",
        family: Family::Formats,
        summary: "rows and squares as e4m3 codes with scales of 64, 128 or 128 by 128 numbers, and back",
        specification: &["inference 5.3", "inference 5.4", "inference 5.7"],
        paths: &[
            "quantize_fp8_vector",
            "quantize_fp8_scalar",
            "quantize_fp8_squares_vector",
            "quantize_fp8_squares_scalar",
            "dequantize_fp8_vector",
            "dequantize_fp8_scalar",
        ],
        modules: launcher::modules,
        cases: [30, 80, 160],
    };

    const CONVENTIONS: &'static [Convention] = &[
        Convention::ScaleDivided,
        Convention::ScaleFloor,
        Convention::CodesByInverse,
        Convention::CodesByAmax,
    ];

    const NOT_EXPRESSIBLE: &'static [(&'static str, &'static str)] = &[
        ("groups of 32 in a row", "the model has groups of 64 and 128; `quantize_mxfp4` has 32"),
        (
            "a scale for each row, each channel, or 32 by 32 values",
            "no tensor of the model has such scales",
        ),
    ];

    fn tensors(c: &QuantizeFp8Case) -> Specs {
        let rows = [
            axis("num_rows", c.num_rows),
            axis("width", c.width).multiples(1, launcher::MAX_WIDTH),
        ];
        let (dtype, axes) = scale_axes(c.options().scales(c.num_rows, c.width));
        let codes = |spec: fn(&'static str, DType, &[Axis]) -> TensorSpec| {
            spec("codes", DType::U8, &rows).rows()
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

    fn check(c: &QuantizeFp8Case) -> Result<(), Refused> {
        if c.group == Group::Square128 && c.layout != ScaleLayout::Plain {
            return refuse("layout", "scales of squares lie row by row");
        }
        if c.scale != ScaleType::E8m0 && c.layout == ScaleLayout::Blocked {
            return refuse("layout", "tiles of scales hold bytes");
        }
        c.data.check()
    }

    fn strategy(profile: Profile) -> BoxedStrategy<QuantizeFp8Case> {
        let extents = matrix(profile.of([[24, 1500], [150, 3000], [600, 20_000]]));
        let scale = select(vec![ScaleType::E8m0, ScaleType::PowerOfTwo, ScaleType::Fp32]);
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
        let format = (Float::strategy(), select(Group::ALL.to_vec()), scale, layout);
        (task, extents, format, contents, Data::strategy(-40..=40))
            .prop_map(|(task, [num_rows, width], (dtype, group, scale, layout), contents, data)| {
                let tiles = layout == ScaleLayout::Blocked && scale != ScaleType::E8m0;
                let layout =
                    if tiles || group == Group::Square128 { ScaleLayout::Plain } else { layout };
                QuantizeFp8Case {
                    task,
                    num_rows,
                    width,
                    dtype,
                    group,
                    scale,
                    layout,
                    contents,
                    data,
                }
            })
            .boxed()
    }

    fn typical() -> Vec<QuantizeFp8Case> {
        let fp32 =
            |case| QuantizeFp8Case { scale: ScaleType::Fp32, layout: ScaleLayout::MnMajor, ..case };
        vec![
            plain(Task::Quantize, 5, 256, Group::Row128),
            plain(Task::Quantize, 5, 203, Group::Row64)
                .with(|case| case.dtype = Float::F32)
                .then(fp32),
            plain(Task::Quantize, 130, 144, Group::Square128),
            plain(Task::Dequantize, 5, 320, Group::Row64)
                .with(|case| case.layout = ScaleLayout::MnMajor),
            plain(Task::Dequantize, 130, 144, Group::Square128)
                .with(|case| case.scale = ScaleType::Fp32),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<QuantizeFp8Case> {
        use Task::{Dequantize, Quantize};
        let in_layout = |layout| move |case| QuantizeFp8Case { layout, ..case };
        let holding = |contents| move |case| QuantizeFp8Case { contents, ..case };
        let fp32 = |case| QuantizeFp8Case { scale: ScaleType::Fp32, ..case };
        let f32s = |case| QuantizeFp8Case { dtype: Float::F32, ..case };
        let (mn, tiles) = (ScaleLayout::MnMajor, ScaleLayout::Blocked);
        let mut cases = vec![
            plain(Quantize, 0, 128, Group::Row128),
            plain(Dequantize, 0, 128, Group::Row128),
            plain(Quantize, 0, 128, Group::Square128),
            plain(Quantize, 0, 64, Group::Row64).then(in_layout(tiles)),
            // One row, one element, of a group and of a square.
            plain(Quantize, 1, 1, Group::Row128),
            plain(Quantize, 1, 1, Group::Square128),
            // A warp has 512 elements. Groups that end with a row, and words and tiles with more
            // groups than the row.
            plain(Quantize, 2, 528, Group::Row128).then(in_layout(mn)),
            plain(Quantize, 33, 320, Group::Row64).then(fp32).then(in_layout(mn)),
            plain(Quantize, 33, 320, Group::Row64).then(in_layout(mn)),
            plain(Quantize, 129, 640, Group::Row128).then(in_layout(tiles)),
            plain(Dequantize, 3, 1040, Group::Row128).then(in_layout(mn)),
            plain(Dequantize, 129, 320, Group::Row64).then(in_layout(tiles)),
            plain(Quantize, 129, 130, Group::Square128).then(fp32).then(f32s),
            // Every value, with the scale 1, and divided by a scale that is not a power of two.
            plain(Quantize, 69, 512, Group::Row128).then(holding(Contents::EveryNumber)),
            plain(Quantize, 69, 512, Group::Row128).then(fp32).then(holding(Contents::EveryNumber)),
            // Each code with each scale.
            plain(Dequantize, 64, 1024, Group::Row64).then(holding(Contents::EveryNumber)),
            plain(Dequantize, 64, 1024, Group::Row64)
                .then(f32s)
                .then(holding(Contents::EveryNumber)),
        ];
        for contents in [Contents::Ties, Contents::Corners, Contents::Amax, Contents::NotFinite] {
            cases.push(plain(Quantize, 9, 512, Group::Row128).then(holding(contents)));
            cases.push(
                plain(Quantize, 9, 320, Group::Row64).then(fp32).then(f32s).then(holding(contents)),
            );
        }
        cases.push(plain(Quantize, 257, 128, Group::Square128).then(holding(Contents::Corners)));
        cases.push(
            plain(Quantize, 129, 272, Group::Square128)
                .then(fp32)
                .then(holding(Contents::NotFinite)),
        );
        if profile == Profile::Full {
            cases.extend(Group::ALL.map(|group| plain(Quantize, 1000, 4096, group)));
            cases.extend(Group::ALL.map(|group| plain(Dequantize, 1000, 4096, group).then(fp32)));
        }
        cases
    }

    fn amend(c: &QuantizeFp8Case, tensors: &mut Tensors) -> OracleResult<()> {
        if c.quantizes() {
            c.groups().set_rows(tensors, [c.num_rows, c.width], c.data);
            return Ok(());
        }
        let mut draw = Draw::new(c.data.seed, "codes");
        let every = c.contents == Contents::EveryNumber;
        let codes = tensors.bytes_mut("codes").unwrap_or_default();
        codes
            .iter_mut()
            .enumerate()
            .for_each(|(i, code)| *code = if every { i as u8 } else { draw.rng().random() });
        draw_scales(c, every, &mut draw, tensors);
        Ok(())
    }

    fn forward(c: &QuantizeFp8Case, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        if c.quantizes() {
            let conventions = rounding.conventions();
            return reference::quantize_by(&t.named()?, c.of_oracle(), conventions);
        }
        reference::dequantize(&t.named()?, c.of_oracle(), format_of(c.dtype))
    }

    fn launch(c: &QuantizeFp8Case, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        let launch = if c.quantizes() { launcher::quantize } else { launcher::dequantize };
        run.launch(|device| launch(device, v, c.options()))
    }

    fn invariant(_: &QuantizeFp8Case, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn batches(c: &QuantizeFp8Case, batches: &mut Batches<'_, Self>) {
        // The rows of a square share scales.
        if c.group != Group::Square128 {
            let scales = |rows| c.of_oracle().scales(rows, c.width);
            batches.rows_with("num_rows", |tensors, cut| {
                cut_scales(tensors, "scales", c.num_rows, scales, cut);
                Vec::new()
            });
        }
    }

    fn laws(c: &QuantizeFp8Case, laws: &mut Laws<'_, Self>) {
        // In other layouts rows have no separate axis, and the rows of a square share scales.
        if c.layout == ScaleLayout::Plain && c.group != Group::Square128 {
            laws.separate("num_rows", "rows may be permuted");
        }
        let x = if c.quantizes() { laws.tensors().values("x") } else { Vec::new() };
        let smallest = x.iter().map(|x| x.abs()).fold(f64::INFINITY, f64::min);
        let within =
            smallest >= floor_of(Format::E4M3) && x.iter().all(|x| x.abs() < 2f64.powi(100));
        if !x.is_empty() && within {
            let name = "a power of two moves the scales alone";
            let same = [("codes", Relation::Times(1.0))];
            let scaled = (c.scale != ScaleType::E8m0).then_some(("scales", Relation::Times(4.0)));
            laws.law(name, |v| v.tensors.scale("x", 4.0), same.into_iter().chain(scaled));
        }
    }

    /// Activations and weights of the model, and the shape that other projects measure.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        use Task::{Dequantize, Quantize};
        let in_layout = |layout, case| QuantizeFp8Case { layout, ..case };
        let fp32 = |case| QuantizeFp8Case { scale: ScaleType::Fp32, ..case };
        let (mn, row, square) = (ScaleLayout::MnMajor, Group::Row128, Group::Square128);
        let gpu = || {
            let sizes =
                [(1, 7168), (128, 7168), (4096, 4096), (4096, 7168), (32768, 4096), (32768, 7168)];
            let rows = sizes.into_iter().flat_map(|(rows, width)| {
                [
                    fp32(in_layout(mn, plain(Quantize, rows, width, row))),
                    in_layout(mn, plain(Quantize, rows, width, row)),
                ]
            });
            let others = [
                plain(Quantize, 32768, 4096, square),
                plain(Quantize, 4096, 7168, square),
                plain(Quantize, 32768, 4096, Group::Row64),
                plain(Dequantize, 32768, 4096, row),
                plain(Dequantize, 32768, 4096, square),
            ];
            rows.chain(others).collect()
        };
        let small = || {
            vec![
                plain(Quantize, 128, 256, row),
                plain(Quantize, 512, 128, square),
                plain(Dequantize, 128, 256, row),
            ]
        };
        let benchmark = |case: QuantizeFp8Case| {
            let QuantizeFp8Case { task, num_rows, width, group, scale, layout, .. } = &case;
            let [high, long] = group.extents();
            let name = format!("{task:?} {num_rows}x{width} {high}x{long} {scale:?} {layout:?}")
                .to_lowercase();
            // A magnitude, a maximum, a product and a rounding.
            let benchmark =
                Benchmark::new(Direction::Forward, name, case, "num_rows").streaming(&[], 4.0);
            if high == 1 {
                return benchmark;
            }
            // Rows of a square are sampled separately: they are equal.
            let drawn = QuantizeFp8Case { num_rows: 1, ..benchmark.drawn };
            Benchmark { drawn, sampled: |_, c, tensors| first_scales(c, tensors), ..benchmark }
        };
        (if on_gpu(environment) { gpu() } else { small() }).into_iter().map(benchmark).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![
            Reduced::forward(
                &[
                    "quantize 32768x4096 1x128 fp32 mnmajor",
                    "quantize 32768x4096 1x128 e8m0 mnmajor",
                    "dequantize 32768x4096 1x128 e8m0 plain",
                ],
                json!({"num_rows": 21, "width": 512}),
                json!({"num_rows": 4}),
            ),
            Reduced::forward(
                &[
                    "quantize 32768x4096 128x128 e8m0 plain",
                    "dequantize 32768x4096 128x128 e8m0 plain",
                ],
                json!({"num_rows": 261, "width": 256}),
                json!({"num_rows": 1}),
            ),
        ]
    }
}

/// The scales of a sample's rows, which share one square.
fn first_scales(c: &QuantizeFp8Case, tensors: &mut Tensors) {
    let squares: Vec<usize> = (0..c.num_rows.div_ceil(c.group.extents()[0])).collect();
    if let Some(scales) = tensors.get("scales").map(|scales| permuted_along(scales, 0, &squares)) {
        tensors.put("scales", scales);
    }
}

/// Scales of codes: around the case's magnitude, or every byte in sequence.
fn draw_scales(c: &QuantizeFp8Case, every: bool, draw: &mut Draw, tensors: &mut Tensors) {
    let scales = c.options().scales(c.num_rows, c.width);
    let exponent = c.data.magnitude.log2().round() as i32;
    let number = |at: usize, draw: &mut Draw| {
        let power = exponent + draw.rng().random_range(-6..=6);
        match (c.scale, every) {
            // Each scale for as many groups as hold every code.
            (ScaleType::E8m0, true) => f64::from((at / 4) as u8),
            (ScaleType::E8m0, false) => f64::from((127 + power).clamp(0, 254) as u8),
            (ScaleType::PowerOfTwo, _) => 2f64.powi(power),
            (ScaleType::Fp32, _) => draw.rng().random_range(1.0..2.0) * 2f64.powi(power),
        }
    };
    let numbers: Vec<_> =
        (0..scales.rows * scales.groups).map(|at| Some(number(at, draw))).collect();
    // Padding is NaN: no kernel may read it.
    let placed = c.of_oracle().scales(c.num_rows, c.width).arranged(&numbers).into_iter();
    if scales.bytes {
        let bytes = tensors.bytes_mut("scales").unwrap_or_default();
        bytes
            .iter_mut()
            .zip(placed)
            .for_each(|(byte, scale)| *byte = scale.map_or(255, |scale| scale as u8));
    } else {
        tensors.set("scales", &placed.map(|scale| scale.unwrap_or(f64::NAN)).collect::<Vec<_>>());
    }
}
