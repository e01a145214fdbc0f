//! `swiglu_quantize` (inference 5.4, 5.7, 11.1, training 11.2):
//! `kernels/cuda/experts/swiglu_quantize.cu` against `reference/src/experts/swiglu_quantize.rs`.
//!
//! Exponentials and reciprocals are approximate, so a value near the midpoint of two codes may
//! become either. So the comparison is on what codes and scales decode to, and that each scale is
//! the least one. Where scales are not powers of two, scales and codes are compared separately,
//! because a scale's rounding moves all values of its group. The backward does not use either, so
//! only cases with powers of two have one.

use candle_core::{Device as Cpu, Tensor};
use dsv4_kernels::experts::swiglu_quantize::{
    self as launcher, Group, Options, ScaleLayout, ScaleType,
};
use dsv4_reference::Format;
use dsv4_reference::experts::swiglu_quantize as reference;
use dsv4_reference::formats::quantize_fp8;

use crate::operator::declaration::observed;
use crate::operator::prelude::*;
use crate::operator::{Grid, Pooling};
use crate::operators::experts::swiglu::routed_experts;
use crate::operators::formats::quantize_fp8::{layout_of_oracle, scale_axes, scale_of_oracle};

/// The operator.
pub struct SwigluQuantize;

/// A case: sizes, types, output format, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SwigluQuantizeCase {
    /// Rows; 0 is allowed.
    pub num_rows: usize,
    /// Channels of gate, and of up.
    pub width: usize,
    /// Type of gate, up, dy, dgate and dup.
    pub dtype: Float,
    /// Whether rows have weights.
    pub weighted: bool,
    /// Whether every third row is padding.
    pub padding_rows: bool,
    /// The limit of the clamps.
    pub limit: f32,
    /// Which values share a scale.
    pub group: Group,
    /// Type of the scales.
    pub scale: ScaleType,
    /// Layout of the scales.
    pub layout: ScaleLayout,
    /// Whether the product is rounded to bf16 before it is quantized.
    pub round_to_bf16: bool,
    /// Gate and up.
    #[serde(flatten)]
    pub data: Data,
}

/// bf16, weighted, with padding rows.
fn plain(num_rows: usize, width: usize, group: Group) -> SwigluQuantizeCase {
    let (dtype, weighted, padding_rows, limit, data) =
        (Float::Bf16, true, true, 10.0, Data::normal(8.0));
    let (scale, layout, round_to_bf16) = (ScaleType::E8m0, ScaleLayout::Plain, false);
    SwigluQuantizeCase {
        num_rows,
        width,
        dtype,
        weighted,
        padding_rows,
        limit,
        group,
        scale,
        layout,
        round_to_bf16,
        data,
    }
}

impl SwigluQuantizeCase {
    fn options(&self) -> Options {
        let Self { group, scale, layout, round_to_bf16, .. } = *self;
        Options { group, scale, layout, round_to_bf16 }
    }

    fn scales(&self) -> launcher::Scales {
        self.options().scales(self.num_rows, self.width)
    }

    fn stored(&self) -> quantize_fp8::Options {
        let group = quantize_fp8::Group::Row(self.group.columns());
        quantize_fp8::Options {
            group,
            scale: scale_of_oracle(self.scale),
            layout: layout_of_oracle(self.layout),
        }
    }

    /// Whether scales are powers of two.
    fn has_powers(&self) -> bool {
        self.scale != ScaleType::Fp32
    }

    /// Padding slots of scales.
    fn padding(&self) -> usize {
        let scales = self.scales();
        scales.padded_rows() * scales.padded_groups() - scales.rows * scales.groups
    }
}

impl Operator for SwigluQuantize {
    type Case = SwigluQuantizeCase;
    const SUM_LANES: usize = 32;

    const ABOUT: About = About {
        name: "swiglu_quantize",
        family: Family::Experts,
        summary: "weight · silu(min(gate, limit)) · clamp(up, ±limit) as e4m3 codes with scales of 32 or 128 channels",
        specification: &["inference 5.4", "inference 5.7", "inference 11.1", "training 11.2"],
        paths: &[
            "swiglu_quantize_vector",
            "swiglu_quantize_scalar",
            "backward swiglu_backward_vector",
            "backward swiglu_backward_scalar",
            "backward swiglu_backward_few_vector",
        ],
        modules: launcher::modules,
        cases: [24, 60, 120],
    };

    const GOLDEN: &'static [&'static str] = &["experts"];

    const CONVENTIONS: &'static [Convention] = &[Convention::ScaleDivided, Convention::ScaleFloor];

    fn tensors(c: &SwigluQuantizeCase) -> Specs {
        let (dtype, limit, columns) = (c.dtype.dtype(), f64::from(c.limit), c.group.columns());
        let rows = [
            axis("num_rows", c.num_rows),
            axis("width", c.width).multiples(1, launcher::MAX_WIDTH),
        ];
        let groups = [rows[0], axis("num_groups", c.width.div_ceil(columns))];
        let (scale_dtype, scale_axes) = scale_axes(c.scales());
        let element = |name| input(name, dtype, &rows).rows().drawn_as(c.data).bends_over(1.0); // as silu does
        let powers = c.has_powers();
        let grid =
            Grid::Scaled { format: Format::E4M3, block: [1, columns], scales: "group_scales" };
        let tensors = [
            element("gate").clamped(f64::NEG_INFINITY, limit),
            element("up").clamped(-limit, limit),
            input("weight", DType::F32, &rows[..1])
                .of_any_size()
                .drawn(Distribution::Normal, 1.0)
                .with_zeros()
                .when(c.weighted),
            input("pos_to_token_topk", DType::I32, &rows[..1]).marks_padding().when(c.padding_rows),
            output("codes", DType::U8, &rows).rows().partly_undefined(true),
            output("scales", scale_dtype, &scale_axes).partly_undefined(true),
            observed("decoded", DType::F32, &rows)
                .on_grid(grid)
                .pooled(Pooling::Group(columns))
                .when(powers),
            observed("quotients", DType::F32, &rows)
                .on_grid(Grid::Float(Format::E4M3))
                .pooled(Pooling::Group(columns))
                .when(!powers),
            observed("group_scales", DType::F32, &groups).when(!powers),
            observed("scale_is_least", DType::U8, &groups).exact(),
            observed("scale_padding", DType::F32, &[axis("padding", c.padding())])
                .exact()
                .when(c.layout != ScaleLayout::Plain),
            upstream("dy", "decoded").stored_in(dtype).rows(),
            gradient("dgate", "gate", dtype).when(powers),
            gradient("dup", "up", dtype).when(powers),
            gradient("dweight", "weight", DType::F32).when(powers),
        ];
        Specs::new(c.data.seed, tensors).positive("limit", c.limit)
    }

    fn check(c: &SwigluQuantizeCase) -> Result<(), Refused> {
        if c.scale != ScaleType::E8m0 && c.layout == ScaleLayout::Blocked {
            return refuse("layout", "tiles of scales hold bytes");
        }
        Ok(())
    }

    fn strategy(profile: Profile) -> BoxedStrategy<SwigluQuantizeCase> {
        let extents = matrix(profile.of([[12, 1100], [40, 3000], [600, 20_000]]));
        let limit = select(vec![10.0f32, 1.0, 0.7]);
        let scale = select(vec![ScaleType::E8m0, ScaleType::PowerOfTwo, ScaleType::Fp32]);
        let layout = select(vec![ScaleLayout::Plain, ScaleLayout::MnMajor, ScaleLayout::Blocked]);
        let rows = (Float::strategy(), any::<bool>(), any::<bool>(), any::<bool>());
        let stored = (select(vec![Group::Row32, Group::Row128]), scale, layout);
        (extents, rows, limit, stored, Data::strategy(-8..=8))
            .prop_map(|([num_rows, width], rows, limit, (group, scale, layout), data)| {
                let (dtype, weighted, padding_rows, round_to_bf16) = rows;
                let tiles = layout == ScaleLayout::Blocked && scale != ScaleType::E8m0;
                let layout = if tiles { ScaleLayout::Plain } else { layout };
                let plain = plain(num_rows, width, group);
                SwigluQuantizeCase {
                    dtype,
                    weighted,
                    padding_rows,
                    limit,
                    scale,
                    layout,
                    round_to_bf16,
                    data,
                    ..plain
                }
            })
            .boxed()
    }

    fn typical() -> Vec<SwigluQuantizeCase> {
        let fp32 = |case| SwigluQuantizeCase {
            scale: ScaleType::Fp32,
            layout: ScaleLayout::MnMajor,
            ..case
        };
        vec![
            plain(5, 64, Group::Row32),
            plain(5, 137, Group::Row128).with(|case| case.dtype = Float::F32).then(fp32),
            plain(5, 160, Group::Row128).with(|case| case.round_to_bf16 = true),
        ]
    }

    fn edge_cases(_: Profile) -> Vec<SwigluQuantizeCase> {
        let (short, long) = (Group::Row32, Group::Row128);
        let in_layout = |layout| move |case| SwigluQuantizeCase { layout, ..case };
        let bf16 = |case| SwigluQuantizeCase { round_to_bf16: true, ..case };
        let fp32 = |case| SwigluQuantizeCase { scale: ScaleType::Fp32, ..case };
        let bare = |case| SwigluQuantizeCase { weighted: false, padding_rows: false, ..case };
        let (mn, tiles) = (ScaleLayout::MnMajor, ScaleLayout::Blocked);
        vec![
            plain(0, 64, short),
            plain(0, 64, short).then(in_layout(tiles)),
            // One channel; groups that end with a row; one more than a warp takes; words and tiles
            // with padding.
            plain(1, 1, long),
            plain(6, 33, short).then(bare),
            plain(33, 320, short).then(in_layout(mn)),
            plain(7, 528, long).then(fp32).then(bf16).then(in_layout(mn)),
            plain(31, 272, short).then(bf16).then(in_layout(tiles)),
            // Tiles below and next to each other.
            plain(131, 144, short).then(in_layout(tiles)),
            plain(3, 640, long).with(|case| case.scale = ScaleType::PowerOfTwo).then(bf16),
            // More rows than threads for each access on 132 SMs: the backward of a GPU for many
            // rows.
            plain(530, 8, short),
            // So small that the floor determines the scale.
            plain(5, 128, long).with(|case| case.data = Data::normal(2f64.powi(-14))),
        ]
    }

    fn forward(
        c: &SwigluQuantizeCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        let (limit, scale) = (t.scalar("limit", c.limit.into()), scale_of_oracle(c.scale));
        let named = reference::forward(
            &t.named()?,
            limit,
            c.group.columns(),
            scale,
            c.round_to_bf16,
            rounding,
        )?;
        let compared = if c.has_powers() { "decoded" } else { "quotients" };
        let least =
            Tensor::ones((c.num_rows, c.scales().groups), candle_core::DType::F64, &Cpu::Cpu)?;
        let padding = Tensor::zeros(c.padding(), candle_core::DType::F64, &Cpu::Cpu)?;
        Ok(Named::new()
            .with(compared, named.tensor(compared)?.clone())
            .with("group_scales", named.tensor("group_scales")?.clone())
            .with("scale_is_least", least)
            .maybe("scale_padding", (c.layout != ScaleLayout::Plain).then_some(padding)))
    }

    fn backward(
        c: &SwigluQuantizeCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        if !c.has_powers() {
            return Ok(Named::new());
        }
        reference::backward(&t.named()?, t.scalar("limit", c.limit.into()), rounding)
    }

    /// The meaning of the codes and scales that kernels wrote. The oracle returns it directly.
    fn observe(
        c: &SwigluQuantizeCase,
        _: &Tensors,
        written: &Tensors,
        conventions: Conventions,
    ) -> Vec<(&'static str, HostTensor)> {
        let (Some(codes), Some(scales)) = (written.get("codes"), written.get("scales")) else {
            return Vec::new();
        };
        read(c, [codes, scales], conventions).unwrap_or_default()
    }

    fn launch(
        c: &SwigluQuantizeCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        let views = v.without(&["dy", "dgate", "dup", "dweight"]);
        run.launch(|device| launcher::forward(device, &views, c.limit, c.options()))
    }

    fn launch_backward(
        c: &SwigluQuantizeCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        let views = v.without(&["codes", "scales"]);
        run.launch(|device| {
            Ok(format!("backward {}", launcher::backward(device, &views, c.limit)?))
        })
    }

    fn invariant(_: &SwigluQuantizeCase, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn laws(c: &SwigluQuantizeCase, laws: &mut Laws<'_, Self>) {
        if c.has_powers() {
            laws.scale(
                "weight counts once",
                "weight",
                0.5,
                &[("dgate", 0.5), ("dup", 0.5), ("dweight", 1.0)],
            );
            laws.scale_upstreams();
        }
        laws.separate("num_rows", "rows may be permuted");
    }

    /// The gradients of the experts' weights, as in `swiglu`: quantizing the product does not
    /// change them.
    fn golden(file: &mut Reading<'_>) -> Result<Vec<Golden<SwigluQuantizeCase>>, String> {
        let case = |num_rows, width, limit| {
            let plain = plain(num_rows, width, Group::Row32);
            SwigluQuantizeCase { dtype: Float::F32, padding_rows: false, limit, ..plain }
        };
        Ok(vec![routed_experts(file, case)?])
    }

    /// The model's experts, and the shape that other projects measure.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let mn = |scale, case| SwigluQuantizeCase {
            scale,
            layout: ScaleLayout::MnMajor,
            padding_rows: false,
            ..case
        };
        let extents = if on_gpu(environment) { &[1, 128, 4096, 24576][..] } else { &[16] };
        // As many rows as a large prefill of grouped_linear_swiglu, which fuses this and
        // grouped_linear.
        let of_experts: &[usize] = if on_gpu(environment) { &[196_608] } else { &[] };
        let forward = |&num_rows: &usize| {
            let cases = [
                mn(
                    ScaleType::Fp32,
                    SwigluQuantizeCase {
                        round_to_bf16: true,
                        ..plain(num_rows, 2048, Group::Row128)
                    },
                ),
                mn(ScaleType::E8m0, plain(num_rows, 2048, Group::Row32)),
            ];
            cases.map(|case| {
                let name = format!("{num_rows}x2048 bf16 groups of {}", case.group.columns());
                // Three bounds, three operations of silu, two products; a magnitude, a maximum, a
                // product and a rounding.
                Benchmark::new(Direction::Forward, name, case, "num_rows").streaming(&[], 12.0)
            })
        };
        let backward = |&num_rows: &usize| {
            let case = mn(ScaleType::E8m0, plain(num_rows, 2048, Group::Row128));
            Benchmark::new(Direction::Backward, format!("{num_rows}x2048 bf16"), case, "num_rows")
                .streaming(&[], 18.0)
        };
        extents
            .iter()
            .chain(of_experts)
            .flat_map(forward)
            .chain(extents.iter().map(backward))
            .collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![
            Reduced::forward(
                &["24576x2048 bf16 groups of 128", "24576x2048 bf16 groups of 32"],
                json!({"num_rows": 20, "width": 512}),
                json!({"num_rows": 4}),
            ),
            Reduced::backward(
                &["24576x2048 bf16"],
                json!({"num_rows": 20, "width": 512}),
                json!({"num_rows": 4}),
            ),
            // One row, whose scales have space for four.
            Reduced::forward(&["1x2048 bf16 groups of 128"], json!({"width": 512}), json!({})),
        ]
    }
}

/// The observed tensors of stored codes and scales.
fn read(
    c: &SwigluQuantizeCase,
    [codes, scales]: [&HostTensor; 2],
    conventions: Conventions,
) -> OracleResult<Vec<(&'static str, HostTensor)>> {
    let tensor =
        |host: &HostTensor| Tensor::from_vec(host.to_f64(), host.shape.as_slice(), &Cpu::Cpu);
    let stored = reference::stored(&tensor(codes)?, &tensor(scales)?, c.stored(), conventions)?;
    let (width, columns) = (c.width, c.group.columns());
    let groups = [c.num_rows, c.scales().groups];
    let numbers =
        |shape: &[usize], numbers: &[f64]| HostTensor::from_f64(DType::F32, shape, numbers);
    let mut observed = Vec::new();
    if c.has_powers() {
        let scale = |at: usize| stored.scales[at / width * groups[1] + at % width / columns];
        let decoded: Vec<f64> =
            stored.values.iter().enumerate().map(|(at, value)| value * scale(at)).collect();
        observed.push(("decoded", numbers(&codes.shape, &decoded)));
    } else {
        observed.push(("quotients", numbers(&codes.shape, &stored.values)));
        observed.push(("group_scales", numbers(&groups, &stored.scales)));
    }
    let least = stored.least.iter().map(|&least| least.into()).collect();
    observed.push((
        "scale_is_least",
        HostTensor { dtype: DType::U8, shape: groups.to_vec(), bytes: least },
    ));
    if c.layout != ScaleLayout::Plain {
        observed.push(("scale_padding", numbers(&[c.padding()], &padding_of(c, scales))));
    }
    Ok(observed)
}

/// The contents of every slot without a scale.
fn padding_of(c: &SwigluQuantizeCase, scales: &HostTensor) -> Vec<f64> {
    let placed = c.stored().scales(c.num_rows, c.width);
    let real = placed.arranged(&vec![true; placed.rows * placed.groups]);
    let bytes = || scales.bytes.iter().map(|&byte| byte.into()).collect();
    let numbers: Vec<f64> = if placed.bytes { bytes() } else { scales.to_f64() };
    numbers.into_iter().zip(real).filter(|(_, real)| !real).map(|(number, _)| number).collect()
}
