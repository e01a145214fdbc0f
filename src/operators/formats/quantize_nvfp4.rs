//! `quantize_nvfp4` (inference 5.3, 5.6, 5.7): `kernels/cuda/formats/quantize_nvfp4.cu` against
//! `reference/src/formats/quantize_nvfp4.rs`.
//!
//! Every rounding is to nearest and part of the definition. So every code, every scale and every
//! decoded value must equal the oracle's.

use dsv4_kernels::formats::quantize_nvfp4::{self as launcher, GROUP, ScaleLayout};
use dsv4_reference::Format;
use dsv4_reference::formats::quantize_nvfp4 as reference;
use dsv4_reference::quantize::{ScaleType, scale_of};
use rand::Rng;

use crate::operator::declaration::{Axis, TensorSpec};
use crate::operator::prelude::*;
use crate::operators::contents::{Contents, Groups, draw_e2m1_codes};
use crate::operators::formats::cut_scales;
use crate::operators::formats::quantize_fp8::{format_of, layout_of_oracle, scale_axes};

/// The operator.
pub struct QuantizeNvfp4;

/// The operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    /// Values to the scale of the tensor.
    GlobalScale,
    /// Values to codes and scales of groups.
    Quantize,
    /// Codes and scales to values.
    Dequantize,
}

/// A case: operation, sizes, formats, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QuantizeNvfp4Case {
    /// The operation.
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
    /// The tensor scale, where it is given.
    pub global_scale: f32,
    /// Drawn values.
    #[serde(flatten)]
    pub data: Data,
}

fn plain(task: Task, num_rows: usize, width: usize) -> QuantizeNvfp4Case {
    let (layout, contents, data) = (ScaleLayout::Plain, Contents::Drawn, Data::normal(1.0));
    // A little above that of a few thousand normal values.
    QuantizeNvfp4Case {
        task,
        num_rows,
        width,
        dtype: Float::Bf16,
        layout,
        contents,
        global_scale: 0.002,
        data,
    }
}

impl QuantizeNvfp4Case {
    fn takes_numbers(&self) -> bool {
        self.task != Task::Dequantize
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

impl Operator for QuantizeNvfp4 {
    type Case = QuantizeNvfp4Case;

    const ABOUT: About = About {
        name: "quantize_nvfp4",
        family: Family::Formats,
        summary: "rows as e2m1 codes with e4m3 scales of 16 numbers and one of the tensor, that one, and back",
        specification: &["inference 5.3", "inference 5.6", "inference 5.7"],
        paths: &[
            "nvfp4_amax_vector",
            "nvfp4_amax_scalar",
            "nvfp4_global_scale",
            "quantize_nvfp4_vector",
            "quantize_nvfp4_scalar",
            "dequantize_nvfp4_vector",
            "dequantize_nvfp4_scalar",
        ],
        modules: launcher::modules,
        cases: [24, 60, 120],
    };

    fn tensors(c: &QuantizeNvfp4Case) -> Specs {
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
        let one = [axis("one", 1)];
        let tensors = match c.task {
            Task::GlobalScale => vec![x, output("global_scale", DType::F32, &one).exact()],
            Task::Quantize => {
                vec![
                    x,
                    input("global_scale", DType::F32, &one).exact(),
                    codes(output).exact(),
                    scales(output).exact(),
                ]
            }
            Task::Dequantize => vec![
                codes(input),
                scales(input),
                input("global_scale", DType::F32, &one).exact(),
                y,
            ],
        };
        Specs::new(c.data.seed, tensors).positive("global_scale", c.global_scale)
    }

    fn check(c: &QuantizeNvfp4Case) -> Result<(), Refused> {
        c.data.check()
    }

    fn strategy(profile: Profile) -> BoxedStrategy<QuantizeNvfp4Case> {
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
        let task = prop_oneof![
            3 => Just(Task::Quantize), 1 => Just(Task::Dequantize), 1 => Just(Task::GlobalScale)
        ];
        let global_scale = prop_oneof![3 => -3..=3i32, 1 => -14..=14i32];
        (
            task,
            extents,
            Float::strategy(),
            layout,
            (contents, global_scale),
            Data::strategy(-40..=40),
        )
            .prop_map(|(task, [num_rows, width], dtype, layout, (contents, power), data)| {
                let width = width.next_multiple_of(2);
                // Around that of a few thousand values, and far from it.
                let global_scale = (0.0017 * data.magnitude * 2f64.powi(power)) as f32;
                QuantizeNvfp4Case {
                    task,
                    num_rows,
                    width,
                    dtype,
                    layout,
                    contents,
                    global_scale,
                    data,
                }
            })
            .boxed()
    }

    fn typical() -> Vec<QuantizeNvfp4Case> {
        let in_layout = |layout| move |case| QuantizeNvfp4Case { layout, ..case };
        vec![
            plain(Task::Quantize, 5, 192).then(in_layout(ScaleLayout::Blocked)),
            plain(Task::Quantize, 5, 106)
                .with(|case| case.dtype = Float::F32)
                .then(in_layout(ScaleLayout::MnMajor)),
            plain(Task::Dequantize, 5, 160),
            plain(Task::GlobalScale, 5, 160),
            plain(Task::GlobalScale, 3, 90).with(|case| case.dtype = Float::F32),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<QuantizeNvfp4Case> {
        use Task::{Dequantize, GlobalScale, Quantize};
        let in_layout = |layout| move |case| QuantizeNvfp4Case { layout, ..case };
        let holding = |contents| move |case| QuantizeNvfp4Case { contents, ..case };
        let f32s = |case| QuantizeNvfp4Case { dtype: Float::F32, ..case };
        let scaled = |global_scale| move |case| QuantizeNvfp4Case { global_scale, ..case };
        let (mn, tiles) = (ScaleLayout::MnMajor, ScaleLayout::Blocked);
        let mut cases = vec![
            plain(Quantize, 0, 64),
            plain(Dequantize, 0, 64),
            plain(GlobalScale, 0, 64),
            plain(Quantize, 0, 64).then(in_layout(tiles)),
            plain(Quantize, 1, 2),
            plain(GlobalScale, 1, 2),
            // A warp has 512 elements; groups that end with a row; words and tiles with padding.
            plain(Quantize, 2, 544).then(in_layout(mn)),
            plain(Quantize, 33, 176).then(in_layout(tiles)),
            plain(Quantize, 129, 1120).then(in_layout(tiles)),
            plain(Quantize, 129, 42).then(f32s).then(in_layout(tiles)),
            plain(Dequantize, 3, 1056).then(in_layout(mn)),
            plain(Dequantize, 129, 80).then(in_layout(tiles)),
            // Every value, with the scale 1 and divided by a scale that is not a power of two; each
            // code with each scale.
            plain(Quantize, 70, 512).then(holding(Contents::EveryNumber)).then(scaled(1.0)),
            plain(Quantize, 70, 512).then(holding(Contents::EveryNumber)).then(scaled(0.3)),
            // A divisor for which a product with the inverse falls on the other side of 0.75, 2.5
            // and 3.5 than the quotient.
            plain(Quantize, 70, 512).then(holding(Contents::EveryNumber)).then(scaled(0.5104167)),
            plain(Quantize, 70, 512).then(holding(Contents::EveryNumber)).then(scaled(0.97499996)),
            plain(Quantize, 70, 512).then(holding(Contents::EveryNumber)).then(scaled(0.8392858)),
            plain(Quantize, 70, 512)
                .then(f32s)
                .then(holding(Contents::EveryNumber))
                .then(scaled(1.0)),
            plain(Dequantize, 8, 1024).then(holding(Contents::EveryNumber)).then(scaled(1.0)),
            plain(Dequantize, 8, 1024)
                .then(f32s)
                .then(holding(Contents::EveryNumber))
                .then(scaled(0.3)),
            // Scales of groups that are 0 or the largest, and products of both levels outside
            // fp32's range.
            plain(Quantize, 5, 256).then(scaled(64.0)),
            plain(Quantize, 5, 256).then(scaled(1e-5)),
            plain(Quantize, 5, 256).then(scaled(1e-44)),
            plain(Quantize, 5, 256).then(scaled(3e38)),
            // Quotients that overflow.
            plain(Quantize, 5, 256).then(scaled(1e-23)).with(|case| case.data = Data::normal(1e37)),
            // More data than one round of the blocks that find the maximum.
            plain(GlobalScale, 8200, 2),
            plain(GlobalScale, 9, 512).then(holding(Contents::NotFinite)),
            plain(GlobalScale, 3, 64).then(f32s).with(|case| case.data = Data::normal(1e-40)),
        ];
        for contents in [Contents::Ties, Contents::Corners, Contents::Amax, Contents::NotFinite] {
            cases.push(plain(Quantize, 9, 512).then(holding(contents)).then(scaled(0.0625)));
            cases.push(
                plain(Quantize, 9, 330).then(f32s).then(holding(contents)).then(scaled(0.0625)),
            );
        }
        cases.push(
            plain(Quantize, 9, 512).then(f32s).then(holding(Contents::Ties)).then(scaled(0.37)),
        );
        if profile == Profile::Full {
            cases.extend([
                plain(Quantize, 1000, 4096),
                plain(Dequantize, 1000, 4096).then(in_layout(tiles)),
            ]);
            cases.push(plain(GlobalScale, 3000, 7168));
        }
        cases
    }

    fn amend(c: &QuantizeNvfp4Case, tensors: &mut Tensors) -> OracleResult<()> {
        if c.task != Task::GlobalScale {
            tensors.set("global_scale", &[c.global_scale.into()]);
        }
        if c.takes_numbers() {
            c.groups().set_rows(tensors, [c.num_rows, c.width], c.data);
            if c.contents == Contents::Ties && c.dtype == Float::F32 {
                set_ties_of_both_levels(c, tensors);
            }
            return Ok(());
        }
        let mut draw = Draw::new(c.data.seed, "codes");
        let every = c.contents == Contents::EveryNumber;
        draw_e2m1_codes(every, &mut draw, tensors);
        draw_scales(c, every, &mut draw, tensors);
        Ok(())
    }

    fn forward(c: &QuantizeNvfp4Case, t: &Bound<'_>, _: &mut Rounding) -> OracleResult<Named> {
        let (named, layout) = (t.named()?, layout_of_oracle(c.layout));
        match c.task {
            Task::GlobalScale => reference::global_scale(&named),
            Task::Quantize => reference::quantize(&named, layout),
            Task::Dequantize => reference::dequantize(&named, layout, format_of(c.dtype)),
        }
    }

    fn workspaces(
        c: &QuantizeNvfp4Case,
        _: &Views,
        _: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        let needed = c.task == Task::GlobalScale;
        Ok(needed.then_some(("workspace", launcher::WORKSPACE_BYTES)).into_iter().collect())
    }

    fn launch(
        c: &QuantizeNvfp4Case,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        match c.task {
            Task::GlobalScale => {
                run.launch(|device| Ok(launcher::global_scale(device, v)?.to_vec()))
            }
            Task::Quantize => run.launch(|device| launcher::quantize(device, v, c.layout)),
            Task::Dequantize => run.launch(|device| launcher::dequantize(device, v, c.layout)),
        }
    }

    fn invariant(_: &QuantizeNvfp4Case, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn batches(c: &QuantizeNvfp4Case, batches: &mut Batches<'_, Self>) {
        // The scale of a tensor is that of all its rows.
        if c.task == Task::GlobalScale {
            return;
        }
        let scales = |rows| reference::scales(layout_of_oracle(c.layout), rows, c.width);
        batches.rows_with("num_rows", |tensors, cut| {
            cut_scales(tensors, "scales", c.num_rows, scales, cut);
            Vec::new()
        });
    }

    fn laws(c: &QuantizeNvfp4Case, laws: &mut Laws<'_, Self>) {
        if c.task == Task::GlobalScale {
            laws.permute("rows may be permuted", "num_rows");
            return;
        }
        // In other layouts rows have no separate axis.
        if c.layout == ScaleLayout::Plain {
            laws.separate("num_rows", "rows may be permuted");
        }
        // Where both levels together stay normal values, the values and the tensor scale may both
        // be four times as large.
        let x = if c.task == Task::Quantize { laws.tensors().values("x") } else { Vec::new() };
        let small = |x: &f64| x.abs() < 2f64.powi(100) && (*x == 0.0 || x.abs() > 2f64.powi(-90));
        if !x.is_empty() && x.iter().all(small) && (1e-20..1e20).contains(&c.global_scale) {
            let scale_both = |v: &mut Variant<Self>| {
                v.tensors.scale("x", 4.0);
                v.tensors.scale("global_scale", 4.0);
            };
            laws.alike(
                "a power of two moves the scale of the tensor alone",
                Relation::Times(1.0),
                scale_both,
            );
        }
    }

    /// Activations of the model, and the shape that other projects measure.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        use Task::{Dequantize, Quantize};
        let in_layout = |layout, case| QuantizeNvfp4Case { layout, ..case };
        let cases = if on_gpu(environment) {
            let sizes = [(1, 7168), (128, 7168), (4096, 7168), (32768, 4096), (32768, 7168)];
            let mut cases: Vec<_> =
                sizes.map(|(rows, width)| plain(Quantize, rows, width)).to_vec();
            cases.push(in_layout(ScaleLayout::Blocked, plain(Quantize, 32768, 4096)));
            cases.push(plain(Dequantize, 32768, 4096));
            cases
        } else {
            vec![plain(Quantize, 64, 256), plain(Dequantize, 64, 256)]
        };
        let benchmark = |case: QuantizeNvfp4Case| {
            let QuantizeNvfp4Case { task, num_rows, width, layout, .. } = &case;
            let name = format!("{task:?} {num_rows}x{width} {layout:?}").to_lowercase();
            // A magnitude, a maximum, a quotient and a rounding.
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

/// Moves ties to what their group is divided by: both levels of its scale together, in fp32.
/// Before, they are midpoints of codes times a power of two. Their quotients become the midpoint,
/// or next to it.
fn set_ties_of_both_levels(c: &QuantizeNvfp4Case, tensors: &mut Tensors) {
    let mut x = tensors.values("x");
    for group in x.chunks_mut(c.width.max(1)).flat_map(|row| row.chunks_mut(GROUP)) {
        let amax = group.iter().fold(0.0f64, |amax, x| amax.max(x.abs()));
        let power = scale_of(group, Format::E2M1, ScaleType::E8m0);
        let of_group = Format::E4M3
            .nearest(f64::from(amax as f32 / 6.0 / c.global_scale).min(Format::E4M3.largest));
        let divisor = of_group as f32 * c.global_scale;
        if divisor.is_normal() {
            group
                .iter_mut()
                .for_each(|x| *x = Format::F32.nearest(*x / power * f64::from(divisor)));
        }
    }
    tensors.set("x", &x);
}

/// Scales of codes: any of them, or every byte in sequence. Their padding is NaN: no kernel may
/// read it.
fn draw_scales(c: &QuantizeNvfp4Case, every: bool, draw: &mut Draw, tensors: &mut Tensors) {
    let scales = reference::scales(layout_of_oracle(c.layout), c.num_rows, c.width);
    let number = |at: usize, draw: &mut Draw| {
        let drawn = draw.rng().random_range(0..0x7fu8);
        // Each scale for the two groups that hold every code.
        if every { (at / 2) as u8 } else { drawn }
    };
    let numbers: Vec<_> =
        (0..scales.rows * scales.groups).map(|at| Some(number(at, draw))).collect();
    let placed = scales.arranged(&numbers);
    let bytes = tensors.bytes_mut("scales").unwrap_or_default();
    bytes.iter_mut().zip(placed).for_each(|(byte, scale)| *byte = scale.unwrap_or(255));
}
