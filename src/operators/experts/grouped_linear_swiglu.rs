//! `grouped_linear_swiglu` (inference 5.4, 5.5, 5.7, 5.8, 11.1, 11.3):
//! `kernels/cuda/experts/grouped_linear_swiglu.cu`, `grouped_linear_swiglu_hopper.cu` and
//! `grouped_linear_swiglu_hopper_large.cu` against
//! `reference/src/experts/grouped_linear_swiglu.rs`.
//!
//! Codes and scales are compared by what they mean, as those of `swiglu_quantize` are, whose
//! declaration gives the reason. Rows of no expert and the padding of scales are compared byte for
//! byte.

use candle_core::{Device as Cpu, Tensor};
use dsv4_kernels::experts::grouped_linear::WORKSPACE_BYTES;
use dsv4_kernels::experts::grouped_linear_swiglu::{self as launcher, MULTIPLE};
use dsv4_kernels::experts::swiglu_quantize::{self, Group, ScaleType};
use dsv4_kernels::formats::gate_up_interleave::GRANULE;
use dsv4_kernels::projections::linear::{BLOCK, MAX_FEATURES, ScaleLayout, Weights};
use dsv4_reference::experts::grouped_linear_swiglu as reference;
use dsv4_reference::quantize::scale_by;
use dsv4_reference::{Format, experts::swiglu_quantize as codes_of_oracle, formats::quantize_fp8};
use rand::Rng;

use crate::operator::benchmarks::{Whole, last};
use crate::operator::declaration::{Axis, TensorSpec, observed, state};
use crate::operator::fields::Implementation;
use crate::operator::prelude::*;
use crate::operator::tensors::permuted_along;
use crate::operator::{Grid, Pooling};
use crate::operators::experts::grouped_linear::{
    GroupedLinear, GroupedLinearCase, OF_E4M3, batches_of_experts, drawn, keep_experts_of,
    laws_of_rows, masked, mxfp4,
};
use crate::operators::experts::grouped_linear::{of_whole_case, sorted};
use crate::operators::experts::moe_map::Experts;
use crate::operators::formats::quantize_fp8::{layout_of_oracle, scale_of_oracle};
use crate::operators::projections::linear::Codes;
use crate::record::Operands;

/// The operator.
pub struct GroupedLinearSwiglu;

/// A case: the GEMM, the row order of gate and up, the output format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupedLinearSwigluCase {
    /// The GEMM: `out_features` are those of gate and up together, a multiple of 16. `output` is
    /// bf16, to which gate and up are rounded.
    #[serde(flatten)]
    pub product: GroupedLinearCase,
    /// Whether rows of gate and up are interleaved by eight.
    pub interleaved: bool,
    /// Whether rows have weights.
    pub weighted: bool,
    /// The limit of the clamps.
    pub limit: f32,
    /// Which values of a row share an output scale.
    pub product_group: Group,
    /// Type of the output scales.
    pub product_scale: ScaleType,
    /// Layout of the output scales.
    pub product_layout: ScaleLayout,
    /// Whether values are rounded to bf16 before they are quantized.
    pub round_to_bf16: bool,
}

/// The magnitude of x that gives gates of a few hundred products a value of a few units.
const MAGNITUDE: f64 = 1.0 / (1 << 24) as f64;

/// A GEMM of this case, weighted, in groups of that many with scales in bytes.
fn of(product_group: Group, product: GroupedLinearCase) -> GroupedLinearSwigluCase {
    let (product_scale, product_layout) = (ScaleType::E8m0, ScaleLayout::Plain);
    GroupedLinearSwigluCase {
        product: GroupedLinearCase { data: Data::normal(MAGNITUDE), ..product },
        interleaved: false,
        weighted: true,
        limit: 10.0,
        product_group,
        product_scale,
        product_layout,
        round_to_bf16: false,
    }
}

fn interleaved(case: GroupedLinearSwigluCase) -> GroupedLinearSwigluCase {
    GroupedLinearSwigluCase { interleaved: true, ..case }
}

fn hopper(case: GroupedLinearSwigluCase) -> GroupedLinearSwigluCase {
    let product = GroupedLinearCase { implementation: Implementation::Hopper, ..case.product };
    GroupedLinearSwigluCase { product, ..case }
}

fn expecting(expected_rows: usize, case: GroupedLinearCase) -> GroupedLinearCase {
    GroupedLinearCase { expected_rows, ..case }
}

fn of_bf16(case: GroupedLinearSwigluCase) -> GroupedLinearSwigluCase {
    GroupedLinearSwigluCase { round_to_bf16: true, ..case }
}

/// The case with these output scales.
fn with(
    scale: ScaleType,
    layout: ScaleLayout,
    case: GroupedLinearSwigluCase,
) -> GroupedLinearSwigluCase {
    GroupedLinearSwigluCase { product_scale: scale, product_layout: layout, ..case }
}

/// The contents of a scale's slot.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    /// The scale of a group of a row.
    Scale,
    /// Padding, which is 0.
    Zero,
    /// The bytes that were there before.
    Kept,
}

impl GroupedLinearSwigluCase {
    fn of_launcher(&self) -> launcher::Options {
        let Self {
            interleaved, product_group, product_scale, product_layout, round_to_bf16, ..
        } = *self;
        let (group, scale, layout) = (product_group, product_scale, product_layout);
        let quantized = swiglu_quantize::Options { group, scale, layout, round_to_bf16 };
        launcher::Options { grouped: self.product.of_launcher(), interleaved, quantized }
    }

    fn of_oracle(&self, limit: f64) -> reference::Options {
        let Self { interleaved, round_to_bf16, .. } = *self;
        let (quantized, group) = (self.product.of_one().of_oracle(), self.product_group.columns());
        let scale = scale_of_oracle(self.product_scale);
        reference::Options { quantized, interleaved, limit, group, scale, round_to_bf16 }
    }

    /// The format of a part's stored codes.
    fn stored(&self) -> quantize_fp8::Options {
        let group = quantize_fp8::Group::Row(self.product_group.columns());
        let (scale, layout) =
            (scale_of_oracle(self.product_scale), layout_of_oracle(self.product_layout));
        quantize_fp8::Options { group, scale, layout }
    }

    /// Whether scales are powers of two.
    fn has_powers(&self) -> bool {
        self.product_scale != ScaleType::Fp32
    }

    /// What the features of gate and up together are a multiple of. Hopper's GEMMs have blocks of
    /// FP8 weights for only gate or only up.
    fn multiple(&self) -> usize {
        let Self {
            product: GroupedLinearCase { implementation, weights, .. }, interleaved, ..
        } = *self;
        let apart =
            implementation == Implementation::Hopper && weights == Weights::Fp8 && !interleaved;
        if apart { 2 * BLOCK } else { MULTIPLE }
    }

    fn intermediate_size(&self) -> usize {
        self.product.out_features / 2
    }

    fn parts(&self) -> usize {
        if self.product.is_masked() { self.product.num_experts } else { 1 }
    }

    fn features(&self) -> Axis {
        axis("intermediate_size", self.intermediate_size())
    }

    fn groups(&self) -> usize {
        self.intermediate_size().div_ceil(self.product_group.columns())
    }

    /// For each row of all parts in sequence, whether an expert has it, from these tensors.
    fn owned_rows(&self, given: &Tensors) -> Vec<bool> {
        let (rows, offsets) = (self.product.num_rows, given.maybe_i32s("expert_offsets"));
        let mut owned = vec![false; self.parts() * rows];
        for (expert, count) in given.i32s("counts").into_iter().enumerate() {
            let [first, end] = match &offsets {
                Some(offsets) => [offsets[expert] as usize, offsets[expert + 1] as usize],
                None => [expert * rows, (expert + 1) * rows],
            };
            owned[first..end.min(first + count.max(0) as usize)].fill(true);
        }
        owned
    }

    /// The contents of each scale slot, for all parts, where an expert has these rows.
    fn places(&self, owned: &[bool]) -> Vec<Place> {
        let scales = self.of_launcher().scales(self.product.extents());
        let placed = self.stored().scales(scales.rows, self.intermediate_size());
        let of_others = if self.product.is_masked() { Place::Kept } else { Place::Zero };
        let of_part = |part: usize| {
            let mut places = vec![of_others; placed.places()];
            for row in 0..scales.rows {
                let owned = !self.product.is_masked() || owned[part * scales.rows + row];
                for group in (0..scales.padded_groups()).filter(|_| owned) {
                    let place = if group < scales.groups { Place::Scale } else { Place::Zero };
                    places[placed.place(row, group)] = place;
                }
            }
            places
        };
        (0..self.parts()).flat_map(of_part).collect()
    }

    /// The number of slots.
    fn num_places(&self) -> usize {
        let scales = self.of_launcher().scales(self.product.extents());
        self.parts().saturating_mul(scales.padded_rows()).saturating_mul(scales.padded_groups())
    }

    /// Whether some slots hold no scale.
    fn has_others(&self) -> bool {
        self.product.is_masked() || self.product_layout != ScaleLayout::Plain
    }

    /// The stored output.
    fn results(&self) -> [TensorSpec; 2] {
        let (dtype, axes) = self.of_launcher().scale_tensor(self.product.extents());
        let axes: Vec<Axis> = axes.into_iter().map(|(name, extent)| axis(name, extent)).collect();
        let rows = self.product.rows(self.features());
        match self.product.is_masked() {
            true => [state("codes", DType::U8, &rows).rows(), state("scales", dtype, &axes)],
            false => [
                output("codes", DType::U8, &rows).rows().partly_undefined(true),
                output("scales", dtype, &axes).partly_undefined(true),
            ],
        }
    }

    /// The decoded values of codes and scales.
    fn observed(&self) -> [TensorSpec; 6] {
        let (powers, columns) = (self.has_powers(), self.product_group.columns());
        let rows = self.product.rows(self.features());
        let groups = self.product.rows(axis("num_groups", self.groups()));
        let grid =
            Grid::Scaled { format: Format::E4M3, block: [1, columns], scales: "group_scales" };
        [
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
            observed("beside_scales", DType::F32, &[axis("places", self.num_places())])
                .exact()
                .when(self.has_others()),
            observed("kept_codes", DType::U8, &rows).exact().when(self.product.is_masked()),
        ]
    }
}

/// Largest magnitude of scales with which products, and their gate times up, are fp32 numbers.
const MOST_MAGNITUDE: f64 = (1u64 << 40) as f64;

impl Operator for GroupedLinearSwiglu {
    type Case = GroupedLinearSwigluCase;

    const ABOUT: About = About {
        name: "grouped_linear_swiglu",
        family: Family::Experts,
        summary: "gate and up of experts' rows, SwiGLU with the routing weight, as e4m3 codes with scales of 32 or 128, at once",
        specification: &[
            "inference 5.4",
            "inference 5.5",
            "inference 5.7",
            "inference 5.8",
            "inference 11.1",
            "inference 11.3",
        ],
        paths: &[
            "grouped_linear_swiglu_large<fp8>",
            "grouped_linear_swiglu_small<fp8>",
            "grouped_linear_swiglu_scalar<fp8>",
            "grouped_linear_swiglu_large<mxfp4, 128>",
            "grouped_linear_swiglu_small<mxfp4, 128>",
            "grouped_linear_swiglu_scalar<mxfp4, 128>",
            "grouped_linear_swiglu_large<mxfp4, 32>",
            "grouped_linear_swiglu_small<mxfp4, 32>",
            "grouped_linear_swiglu_scalar<mxfp4, 32>",
            "grouped_linear_swiglu_hopper<16>",
            "grouped_linear_swiglu_hopper<8, mxfp4, 128>",
            "grouped_linear_swiglu_hopper<16, mxfp4, 128>",
            "grouped_linear_swiglu_hopper<64, mxfp4, 128>",
            "grouped_linear_swiglu_hopper<128, mxfp4, 128>",
            "grouped_linear_swiglu_hopper<8, mxfp4, 32>",
            "grouped_linear_swiglu_hopper<16, mxfp4, 32>",
            "grouped_linear_swiglu_hopper<64, mxfp4, 32>",
            "grouped_linear_swiglu_hopper<128, mxfp4, 32>",
            "grouped_linear_swiglu_hopper_large",
            "grouped_linear_swiglu_hopper_large_interleaved",
            "grouped_linear_swiglu_hopper_large_pairs",
            "grouped_linear_swiglu_hopper_large_interleaved_pairs",
        ],
        modules: launcher::modules,
        cases: [16, 40, 80],
    };

    const CONVENTIONS: &'static [Convention] = &[Convention::ScaleDivided, Convention::ScaleFloor];

    fn tensors(c: &GroupedLinearSwigluCase) -> Specs {
        // The activation is not homogeneous in its input.
        let operands = c.product.operands().map(|spec| {
            let outs = |axis: Axis| {
                if axis.name == "out_features" {
                    axis.multiples(c.multiple(), MAX_FEATURES)
                } else {
                    axis
                }
            };
            TensorSpec {
                any_size: false,
                axes: spec.axes.iter().copied().map(outs).collect(),
                ..spec
            }
        });
        let rows = c.product.rows(c.features());
        let weight = input("weight", DType::F32, &rows[..rows.len() - 1])
            .of_any_size()
            .drawn(Distribution::Normal, 1.0);
        let given = operands.into_iter().chain(c.product.lists()).chain([weight.when(c.weighted)]);
        Specs::new(c.product.data.seed, given.chain(c.results()).chain(c.observed()))
            .positive("limit", c.limit)
    }

    fn check(c: &GroupedLinearSwigluCase) -> Result<(), Refused> {
        if !matches!(c.product.weights, Weights::Fp8 | Weights::Mxfp4) {
            return refuse("weights", "the rows that it writes are those of FP8 or MXFP4 weights");
        }
        if c.product.output != Float::Bf16 {
            return refuse("output", "gate and up are rounded to bf16");
        }
        if c.product_scale != ScaleType::E8m0 && c.product_layout == ScaleLayout::Blocked {
            return refuse("product_layout", "tiles of scales hold bytes");
        }
        if c.product.data.magnitude > MOST_MAGNITUDE {
            let magnitude = c.product.data.magnitude;
            return refuse(
                "magnitude",
                format!("{magnitude} is more than 2^40: products overflow"),
            );
        }
        GroupedLinear::check(&c.product)
    }

    fn cannot_run(c: &GroupedLinearSwigluCase, environment: &Environment) -> Option<String> {
        GroupedLinear::cannot_run(&c.product, environment)
    }

    fn fastest(c: &GroupedLinearSwigluCase, environment: &Environment) -> GroupedLinearSwigluCase {
        let fastest = GroupedLinearSwigluCase {
            product: GroupedLinear::fastest(&c.product, environment),
            ..c.clone()
        };
        if c.product.out_features.is_multiple_of(fastest.multiple()) { fastest } else { c.clone() }
    }

    fn strategy(profile: Profile) -> BoxedStrategy<GroupedLinearSwigluCase> {
        let scale = select(vec![ScaleType::E8m0, ScaleType::PowerOfTwo, ScaleType::Fp32]);
        let layout = select(vec![ScaleLayout::Plain, ScaleLayout::MnMajor, ScaleLayout::Blocked]);
        let written = (select(vec![Group::Row32, Group::Row128]), scale, layout, any::<bool>());
        let rows = (any::<bool>(), any::<bool>(), select(vec![10.0f32, 1.0, 0.7]));
        (drawn(profile, &OF_E4M3), rows, written, Data::strategy(-32..=-16))
            .prop_map(
                |(
                    product,
                    (interleaved, weighted, limit),
                    (group, scale, layout, round_to_bf16),
                    data,
                )| {
                    let product = GroupedLinearCase { output: Float::Bf16, data, ..product };
                    let tiles = layout == ScaleLayout::Blocked && scale != ScaleType::E8m0;
                    let case = with(
                        scale,
                        if tiles { ScaleLayout::MnMajor } else { layout },
                        of(group, product.clone()),
                    );
                    let case = GroupedLinearSwigluCase {
                        product,
                        interleaved,
                        weighted,
                        limit,
                        round_to_bf16,
                        ..case
                    };
                    let out_features = case.product.out_features.next_multiple_of(case.multiple());
                    let product = GroupedLinearCase { out_features, ..case.product };
                    GroupedLinearSwigluCase { product, ..case }
                },
            )
            .boxed()
    }

    fn typical() -> Vec<GroupedLinearSwigluCase> {
        let (short, long) = (Group::Row32, Group::Row128);
        vec![
            of(long, sorted([13, 4], 4, [48, 144])),
            with(ScaleType::Fp32, ScaleLayout::MnMajor, of(short, masked([9, 3, 6], [48, 144]))),
            with(
                ScaleType::E8m0,
                ScaleLayout::MnMajor,
                of(short, mxfp4(32, masked([9, 3, 6], [48, 96]))).then(interleaved),
            ),
            with(
                ScaleType::E8m0,
                ScaleLayout::Blocked,
                of(long, mxfp4(128, sorted([13, 4], 4, [48, 96]))).then(of_bf16),
            ),
            of(long, sorted([13, 4], 4, [256, 144])).then(hopper),
            with(
                ScaleType::Fp32,
                ScaleLayout::MnMajor,
                of(short, masked([9, 3, 6], [48, 144])).then(interleaved).then(hopper),
            ),
            with(
                ScaleType::E8m0,
                ScaleLayout::Blocked,
                of(long, mxfp4(32, masked([9, 3, 6], [48, 96]))).then(hopper),
            ),
            of(long, sorted([13, 4], 4, [256, 144]).then(|case| expecting(40, case))).then(hopper),
        ]
    }

    fn long_cases() -> Vec<GroupedLinearSwigluCase> {
        // More work tiles for a block than it lists at its start; whole tiles, whose scales are
        // loaded four at a time.
        let distinct = |case| GroupedLinearCase { experts: Experts::Distinct, ..case };
        vec![
            of(
                Group::Row128,
                sorted([280, 280], 1, [256, 144]).then(distinct).then(|case| expecting(1, case)),
            )
            .then(hopper),
            of(
                Group::Row128,
                mxfp4(32, sorted([13, 4], 4, [512, 256]).then(|case| expecting(1, case))),
            )
            .then(hopper),
        ]
    }

    fn edge_cases(_: Profile) -> Vec<GroupedLinearSwigluCase> {
        use ScaleLayout::{Blocked, MnMajor, Plain};
        use ScaleType::{E8m0, Fp32, PowerOfTwo};
        let (short, long) = (Group::Row32, Group::Row128);
        let slots = |experts| move |case| GroupedLinearCase { experts, ..case };
        let any = |case| GroupedLinearCase { codes: Codes::Any, ..case };
        let many = |case| expecting(40, case);
        let in_layout = |layout| move |case| GroupedLinearCase { layout, ..case };
        let fp32 = |case| GroupedLinearCase { scale_bytes: false, ..case };
        let extreme = |case| GroupedLinearCase { codes: Codes::Extreme, ..case };
        let small_weights = |case| GroupedLinearCase { codes: Codes::SmallWeights, ..case };
        let large_scales = |case| GroupedLinearCase { codes: Codes::LargeScales, ..case };
        let bare = |case| GroupedLinearSwigluCase { weighted: false, ..case };
        let clamped = |case| GroupedLinearSwigluCase { limit: 0.7, ..case };
        let small = |case: GroupedLinearSwigluCase| {
            let product = (case.product).with(|case| case.data = Data::normal(2f64.powi(-40)));
            GroupedLinearSwigluCase { product, ..case }
        };
        let no_rows = |features| sorted([0, 3], 4, features).with(|case| case.num_rows = 0);
        let mut cases = vec![
            // No rows; only rows of no expert; one row.
            of(short, no_rows([16, 16])),
            of(long, no_rows([256, 16])).then(hopper),
            with(
                E8m0,
                Blocked,
                of(short, sorted([5, 3], 4, [48, 32]).then(slots(Experts::None)))
                    .then(interleaved)
                    .then(hopper),
            ),
            with(
                Fp32,
                MnMajor,
                of(long, masked([0, 3, 2], [256, 16]).then(slots(Experts::None))).then(hopper),
            ),
            of(long, sorted([1, 1], 1, [16, 16]).then(slots(Experts::Distinct)))
                .then(interleaved)
                .then(hopper)
                .then(bare),
            with(E8m0, Blocked, of(long, sorted([5, 3], 4, [32, 33]).then(slots(Experts::None)))),
            of(short, masked([0, 3, 0], [16, 16])),
            with(E8m0, MnMajor, of(long, masked([0, 3, 2], [16, 16]).then(slots(Experts::None)))),
            of(long, sorted([1, 1], 1, [16, 1]).then(slots(Experts::Distinct))).then(bare),
            // Several tiles of features, the last one partial, with groups of either size; blocks
            // of w that gate and up share.
            with(E8m0, MnMajor, of(long, sorted([9, 3], 4, [272, 144]))),
            with(Fp32, MnMajor, of(short, sorted([9, 3], 4, [336, 160])).then(interleaved)),
            with(
                E8m0,
                Blocked,
                of(short, masked([12, 5, 4], [304, 48])).then(of_bf16).then(interleaved),
            ),
            with(
                PowerOfTwo,
                MnMajor,
                of(long, masked([9, 2, 5], [528, 48]).then(fp32)).then(clamped),
            ),
            // All rows belong to one expert; several tiles of rows, the last one partial; rows of
            // an odd length.
            with(
                Fp32,
                Plain,
                of(
                    long,
                    sorted([133, 3], 8, [64, 48])
                        .then(slots(Experts::One))
                        .then(|case| expecting(100, case)),
                ),
            ),
            of(short, sorted([37, 5], 4, [80, 80]).then(slots(Experts::One))),
            of(short, sorted([20, 6], 2, [48, 71]).then(fp32).then(any)).then(bare).then(clamped),
            // More experts than a warp has lanes.
            with(E8m0, Blocked, of(short, sorted([40, 70], 1, [32, 16]).then(in_layout(MnMajor)))),
            // So small that the floor determines the scale.
            of(long, sorted([9, 3], 4, [48, 48])).then(small),
            // Hopper, many rows: half work tiles, with groups that both consumers share and groups
            // of one consumer. A work tile that ends within a group, and one without features for
            // the second consumer.
            with(
                Fp32,
                Plain,
                of(long, sorted([40, 5], 4, [256, 272]).then(many)).then(hopper).then(of_bf16),
            ),
            with(
                E8m0,
                Blocked,
                of(short, masked([12, 5, 4], [512, 48]).then(fp32).then(many)).then(hopper),
            ),
            with(
                E8m0,
                Blocked,
                of(long, sorted([9, 3], 4, [304, 144]).then(many))
                    .then(interleaved)
                    .then(hopper)
                    .then(clamped),
            ),
            with(
                E8m0,
                MnMajor,
                of(short, masked([33, 3, 20], [464, 160]).then(many))
                    .then(interleaved)
                    .then(hopper)
                    .then(bare),
            ),
            // Whole work tiles, and the same before a half one; 65 rows, of which a consumer has
            // one; a block with several work tiles.
            with(
                PowerOfTwo,
                Plain,
                of(long, sorted([133, 3], 8, [512, 144]).then(slots(Experts::One)).then(many))
                    .then(hopper),
            ),
            with(
                E8m0,
                Blocked,
                of(short, masked([65, 3, 70], [256, 160]).then(slots(Experts::One)).then(many))
                    .then(hopper)
                    .then(of_bf16),
            ),
            with(
                E8m0,
                MnMajor,
                of(long, sorted([70, 3], 1, [176, 1168]).then(slots(Experts::One)).then(many))
                    .then(interleaved)
                    .then(hopper),
            ),
            with(
                Fp32,
                MnMajor,
                of(short, sorted([131, 2], 1, [336, 48]).then(slots(Experts::One)).then(many))
                    .then(interleaved)
                    .then(hopper)
                    .then(clamped),
            ),
            with(
                E8m0,
                Blocked,
                of(long, sorted([90, 70], 1, [256, 16]).then(in_layout(MnMajor)).then(many))
                    .then(hopper),
            ),
            // In pairs: tiles of rows whose last ones are full or have a few rows, or one tile that
            // two blocks share. More k-blocks than stages; several work tiles for each block.
            with(
                Fp32,
                Plain,
                of(
                    long,
                    sorted([420, 3], 16, [512, 272])
                        .then(slots(Experts::Skewed))
                        .then(|case| expecting(300, case)),
                )
                .then(hopper),
            ),
            with(
                E8m0,
                MnMajor,
                of(
                    short,
                    sorted([300, 2], 1, [464, 144])
                        .then(slots(Experts::One))
                        .then(|case| expecting(300, case)),
                )
                .then(interleaved)
                .then(hopper)
                .then(clamped),
            ),
            with(
                E8m0,
                Blocked,
                of(short, masked([300, 2, 160], [512, 144]).then(|case| expecting(300, case)))
                    .then(hopper)
                    .then(of_bf16),
            ),
            with(
                E8m0,
                MnMajor,
                of(long, sorted([40, 6], 1, [336, 1168]).then(|case| expecting(300, case)))
                    .then(interleaved)
                    .then(hopper)
                    .then(bare),
            ),
            // What registers and shared memory hold of other values.
            of(short, sorted([20, 6], 2, [256, 64]).then(fp32).then(any).then(many)).then(hopper),
            of(long, sorted([9, 3], 4, [48, 48]).then(many))
                .then(interleaved)
                .then(hopper)
                .then(small),
            // Hopper, few rows: several tiles of features, the last one partial, with groups of
            // either size; blocks of a cluster without features; 16 rows, and 17. More k-blocks
            // than stages; many work tiles for each cluster.
            with(
                Fp32,
                MnMajor,
                of(long, sorted([40, 5], 4, [512, 272])).then(hopper).then(of_bf16),
            ),
            with(E8m0, Blocked, of(short, masked([12, 5, 4], [512, 48]).then(fp32)).then(hopper)),
            with(
                E8m0,
                Blocked,
                of(long, sorted([9, 3], 4, [304, 144]))
                    .then(interleaved)
                    .then(hopper)
                    .then(clamped),
            ),
            with(
                E8m0,
                MnMajor,
                of(short, masked([33, 3, 20], [464, 160]))
                    .then(interleaved)
                    .then(hopper)
                    .then(bare),
            ),
            with(
                PowerOfTwo,
                Plain,
                of(
                    long,
                    masked([16, 2, 17], [256, 1168])
                        .then(slots(Experts::One))
                        .then(|case| expecting(16, case)),
                )
                .then(hopper),
            ),
            with(
                Fp32,
                Plain,
                of(
                    short,
                    sorted([17, 3], 1, [80, 144])
                        .then(slots(Experts::One))
                        .then(|case| expecting(3, case)),
                )
                .then(interleaved)
                .then(hopper),
            ),
            with(
                E8m0,
                MnMajor,
                of(long, sorted([90, 70], 1, [256, 16]).then(in_layout(MnMajor))).then(hopper),
            ),
            of(short, sorted([20, 6], 2, [256, 64]).then(fp32).then(any)).then(hopper),
            of(long, sorted([9, 3], 4, [48, 48])).then(interleaved).then(hopper).then(small),
            of(long, masked([9, 3, 6], [256, 144]).then(fp32).then(large_scales)).then(hopper),
            // One token with regular scales among tokens with irregular ones.
            of(
                long,
                sorted([13, 1], 4, [256, 144])
                    .then(slots(Experts::One))
                    .then(|case| expecting(3, case))
                    .then(large_scales),
            )
            .then(hopper),
        ];
        for group in [128, 32] {
            let of_format = |case| mxfp4(group, case);
            cases.extend([
                of(
                    short,
                    sorted([19, 3], 1, [176, 160])
                        .then(of_format)
                        .then(in_layout(MnMajor))
                        .then(|case| expecting(40, case)),
                )
                .then(interleaved),
                with(
                    Fp32,
                    Plain,
                    of(
                        long,
                        masked([33, 9, 7], [144, 42]).then(of_format).then(in_layout(Blocked)),
                    )
                    .then(of_bf16),
                ),
                with(
                    E8m0,
                    MnMajor,
                    of(long, sorted([12, 4], 8, [272, 96]).then(of_format).then(any))
                        .then(interleaved),
                ),
            ]);
            // Hopper: no rows; one row; 8 and 9 of a tile of 8, 16 and 17 of one of 16, 64 and 65,
            // 128 and 129; several tiles of features; rows of up at any start; more k-blocks than
            // stages; scales of any magnitude.
            cases.extend([
                with(
                    E8m0,
                    Blocked,
                    of(
                        short,
                        sorted([5, 3], 4, [48, 32]).then(of_format).then(slots(Experts::None)),
                    )
                    .then(hopper),
                ),
                of(
                    long,
                    sorted([1, 1], 1, [16, 32]).then(slots(Experts::Distinct)).then(of_format),
                )
                .then(hopper)
                .then(bare),
                with(
                    Fp32,
                    MnMajor,
                    of(
                        long,
                        masked([8, 2, 9], [144, 160]).then(slots(Experts::One)).then(of_format),
                    )
                    .then(hopper),
                ),
                with(
                    E8m0,
                    MnMajor,
                    of(
                        short,
                        sorted([9, 3], 1, [400, 96])
                            .then(slots(Experts::One))
                            .then(of_format)
                            .then(in_layout(Blocked)),
                    )
                    .then(hopper),
                ),
                with(
                    E8m0,
                    Blocked,
                    of(
                        long,
                        sorted([40, 20], 2, [304, 288]).then(of_format).then(in_layout(Blocked)),
                    )
                    .then(interleaved)
                    .then(hopper),
                ),
                with(
                    PowerOfTwo,
                    Plain,
                    of(
                        long,
                        masked([17, 3, 20], [272, 96])
                            .then(slots(Experts::One))
                            .then(of_format)
                            .then(|case| expecting(12, case))
                            .then(in_layout(MnMajor)),
                    )
                    .then(hopper)
                    .then(clamped),
                ),
                with(
                    Fp32,
                    Plain,
                    of(
                        short,
                        sorted([16, 2], 1, [80, 160])
                            .then(slots(Experts::One))
                            .then(of_format)
                            .then(|case| expecting(16, case)),
                    )
                    .then(interleaved)
                    .then(hopper)
                    .then(of_bf16),
                ),
                with(
                    E8m0,
                    MnMajor,
                    of(
                        long,
                        masked([65, 3, 70], [336, 160])
                            .then(slots(Experts::One))
                            .then(of_format)
                            .then(many)
                            .then(in_layout(MnMajor)),
                    )
                    .then(hopper),
                ),
                with(
                    E8m0,
                    Blocked,
                    of(
                        short,
                        sorted([64, 2], 1, [144, 1184])
                            .then(slots(Experts::One))
                            .then(of_format)
                            .then(many),
                    )
                    .then(interleaved)
                    .then(hopper),
                ),
                with(
                    Fp32,
                    MnMajor,
                    of(
                        short,
                        sorted([129, 3], 1, [208, 96])
                            .then(slots(Experts::One))
                            .then(of_format)
                            .then(|case| expecting(100, case))
                            .then(in_layout(Blocked)),
                    )
                    .then(hopper)
                    .then(bare),
                ),
                with(
                    E8m0,
                    Plain,
                    of(
                        long,
                        masked([150, 3, 128], [304, 224])
                            .then(slots(Experts::Skewed))
                            .then(of_format)
                            .then(|case| expecting(128, case)),
                    )
                    .then(interleaved)
                    .then(hopper),
                ),
                of(long, masked([20, 3, 12], [48, 1184]).then(of_format).then(any)).then(hopper),
                of(short, masked([9, 3, 6], [80, 160]).then(of_format).then(extreme))
                    .then(interleaved)
                    .then(hopper),
                of(long, masked([9, 3, 6], [48, 96]).then(of_format).then(small_weights))
                    .then(hopper),
                of(
                    long,
                    sorted([18, 2], 1, [48, 64])
                        .then(of_format)
                        .then(extreme)
                        .then(|case| expecting(40, case)),
                )
                .then(hopper),
            ]);
        }
        cases
    }

    fn amend(c: &GroupedLinearSwigluCase, tensors: &mut Tensors) -> OracleResult<()> {
        GroupedLinear::amend(&c.product, tensors)?;
        // Rows of no expert have no weight that counts.
        let owners = c.product.experts_of_rows();
        tensors.edit("weight", |weights| {
            weights
                .iter_mut()
                .zip(&owners)
                .filter(|(_, owner)| owner.is_none())
                .for_each(|(weight, _)| *weight = f64::NAN);
        });
        // The bytes that masked rows of no expert keep.
        for name in ["codes", "scales"] {
            let mut draw = Draw::new(c.product.data.seed, name);
            if tensors.get(name).is_some_and(|before| before.dtype == DType::F32) {
                tensors.edit(name, |before| before.fill_with(|| draw.rng().random_range(1.0..2.0)));
            } else {
                tensors.bytes_mut(name).unwrap_or_default().fill_with(|| draw.rng().random());
            }
        }
        Ok(())
    }

    fn forward(
        c: &GroupedLinearSwigluCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        let limit = t.scalar("limit", c.limit.into());
        let named = reference::forward(&t.named()?, &c.of_oracle(limit), rounding)?;
        let shape = |extent: usize| {
            c.product.rows(axis("", extent)).iter().map(|axis| axis.extent).collect::<Vec<_>>()
        };
        let of = |name, extent| {
            Ok::<_, dsv4_reference::Error>(named.tensor(name)?.reshape(shape(extent))?)
        };
        let compared = if c.has_powers() { "decoded" } else { "quotients" };
        let least = Tensor::ones(shape(c.groups()), candle_core::DType::F64, &Cpu::Cpu)?;
        let owned = c.owned_rows(t.host());
        // Masked rows of no expert keep the given bytes.
        let before = [t.host().get("codes"), t.host().get("scales")];
        let [codes, scales] = before.map(|before| before.filter(|_| c.product.is_masked()));
        let beside = Tensor::from_vec(beside_scales(c, &owned, scales), c.num_places(), &Cpu::Cpu)?;
        let kept = codes
            .map(|codes| {
                Tensor::from_vec(kept_codes(c, &owned, codes), codes.shape.clone(), &Cpu::Cpu)
            })
            .transpose()?;
        Ok(Named::new()
            .with(compared, of(compared, c.intermediate_size())?)
            .with("group_scales", of("group_scales", c.groups())?)
            .with("scale_is_least", least)
            .maybe("beside_scales", c.has_others().then_some(beside))
            .maybe("kept_codes", kept))
    }

    /// The meaning of the codes and scales that kernels wrote. The oracle returns it directly.
    fn observe(
        c: &GroupedLinearSwigluCase,
        given: &Tensors,
        written: &Tensors,
        conventions: Conventions,
    ) -> Vec<(&'static str, HostTensor)> {
        let (Some(codes), Some(scales)) = (written.get("codes"), written.get("scales")) else {
            return Vec::new();
        };
        let owned = c.owned_rows(given);
        let mut observed = meaning(c, &owned, [codes, scales], conventions).unwrap_or_default();
        if c.has_others() {
            let beside = HostTensor::from_f64(
                DType::F32,
                &[c.num_places()],
                &stored_beside_scales(c, &owned, scales),
            );
            observed.push(("beside_scales", beside));
        }
        if c.product.is_masked() {
            let bytes = kept_codes(c, &owned, codes).into_iter().map(|code| code as u8).collect();
            observed.push((
                "kept_codes",
                HostTensor { dtype: DType::U8, shape: codes.shape.clone(), bytes },
            ));
        }
        observed
    }

    fn workspaces(
        _: &GroupedLinearSwigluCase,
        _: &Views,
        _: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        Ok(vec![("workspace", WORKSPACE_BYTES)])
    }

    fn launch(
        c: &GroupedLinearSwigluCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::forward(device, v, c.limit, c.of_launcher()))
    }

    fn invariant(_: &GroupedLinearSwigluCase, _: bool) -> &'static [BatchAxis] {
        &[BatchAxis::Experts]
    }

    fn batches(c: &GroupedLinearSwigluCase, batches: &mut Batches<'_, Self>) {
        batches_of_experts(&c.product, batches, &["decoded", "quotients"]);
    }

    fn laws(c: &GroupedLinearSwigluCase, laws: &mut Laws<'_, Self>) {
        let other = if c.product.expected_rows > 64 { 1 } else { 1000 };
        laws.alike("tiles change no bit", Relation::Times(1.0), |v| {
            v.case.product.expected_rows = other
        });
        // FP8 blocks have scales for rows in memory order.
        if c.product.weights == Weights::Mxfp4 && c.product.layout == ScaleLayout::Plain {
            let order = c.rows_in_the_other_order();
            laws.alike("rows of gate and up may be interleaved", Relation::Times(1.0), |v| {
                for name in ["w", "w_scales"] {
                    let other = permuted_along(v.tensors.tensor(name), 1, &order);
                    v.tensors.put(name, other);
                }
                v.case.interleaved = !c.interleaved;
            });
        }
        laws_of_rows(&c.product, laws, &["decoded", "quotients"]);
    }

    /// Gate and up of the models' experts, as in `grouped_linear`, and the output formats of
    /// `swiglu_quantize`: for a prefill and for decode steps.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        type Experts = (usize, [usize; 2]);
        let (gpu, flash): (bool, Experts) = (on_gpu(environment), (256, [4096, 4096]));
        let (alignment, rows) = if gpu { (128, 128) } else { (8, 8) };
        let prefills =
            if gpu { vec![(24_576, flash), (196_608, flash)] } else { vec![(30, (3, [48, 144]))] };
        let batches = if gpu {
            vec![(6, flash), (192, flash), (768, flash)]
        } else {
            vec![(9, (3, [48, 144]))]
        };
        let prefill =
            prefills.into_iter().flat_map(|(slots, (experts, features)): (usize, Experts)| {
                let num_rows = experts * slots.div_ceil(experts).next_multiple_of(alignment);
                let case =
                    GroupedLinearCase { num_rows, ..sorted([slots, experts], alignment, features) };
                [case.clone(), mxfp4(128, case)]
            });
        let decode =
            batches.into_iter().flat_map(|(slots, (experts, features)): (usize, Experts)| {
                let case = masked([slots, experts, rows], features);
                [case.clone(), mxfp4(128, case)]
            });
        let both = |case: GroupedLinearCase| {
            let official =
                with(ScaleType::Fp32, ScaleLayout::Plain, of_bf16(of(Group::Row128, case.clone())));
            [official, interleaved(of(Group::Row32, case))]
                .map(|case| Self::fastest(&case, environment))
        };
        prefill.chain(decode).flat_map(both).map(benchmark).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![
            // Rows of MXFP4 are whole 16-byte accesses, as the kernels for Hopper load them.
            Reduced::forward(
                &["24576 contiguous 256x4096x4096 fp8 in groups of 128"],
                json!({"num_slots": 30, "num_experts": 5, "num_rows": 40, "alignment": 4, "out_features": 256, "in_features": 144}),
                json!({"num_experts": 2, "num_rows": 8}),
            ),
            Reduced::forward(
                &["24576 contiguous 256x4096x4096 fp8 in groups of 32 interleaved"],
                json!({"num_slots": 30, "num_experts": 5, "num_rows": 40, "alignment": 4, "out_features": 80, "in_features": 144}),
                json!({"num_experts": 2, "num_rows": 8}),
            ),
            Reduced::forward(
                &["192 masked 256x4096x4096 fp8 in groups of 128"],
                json!({"num_slots": 30, "num_experts": 5, "num_rows": 40, "alignment": 4, "out_features": 512, "in_features": 144}),
                json!({"num_experts": 2, "out_features": 256}),
            ),
            Reduced::forward(
                &["192 masked 256x4096x4096 mxfp4 in groups of 32 interleaved"],
                json!({"num_slots": 30, "num_experts": 5, "num_rows": 40, "alignment": 4, "out_features": 80, "in_features": 160}),
                json!({"num_experts": 2, "out_features": 16}),
            ),
        ]
    }
}

impl GroupedLinearSwigluCase {
    /// The rows of w in the other order.
    fn rows_in_the_other_order(&self) -> Vec<usize> {
        let half = self.intermediate_size();
        let logical =
            |row: usize| row / GRANULE % 2 * half + row / (2 * GRANULE) * GRANULE + row % GRANULE;
        let mut order: Vec<usize> = (0..2 * half).map(logical).collect();
        if self.interleaved {
            let places = order.clone();
            places.into_iter().enumerate().for_each(|(place, row)| order[row] = place);
        }
        order
    }
}

/// The stored values of slots without a scale, as bytes or fp32 values, and 0 for slots with one.
fn stored_beside_scales(
    c: &GroupedLinearSwigluCase,
    owned: &[bool],
    scales: &HostTensor,
) -> Vec<f64> {
    let bytes = || scales.bytes.iter().map(|&byte| byte.into()).collect();
    let numbers: Vec<f64> = if scales.dtype == DType::F32 { scales.to_f64() } else { bytes() };
    let places = c.places(owned).into_iter();
    numbers
        .into_iter()
        .zip(places)
        .map(|(number, place)| if place == Place::Scale { 0.0 } else { number })
        .collect()
}

/// The expected bytes there: the previous ones where they are kept, otherwise 0.
fn beside_scales(
    c: &GroupedLinearSwigluCase,
    owned: &[bool],
    before: Option<&HostTensor>,
) -> Vec<f64> {
    let Some(before) = before else { return vec![0.0; c.num_places()] };
    let numbers = stored_beside_scales(c, owned, before).into_iter().zip(c.places(owned));
    numbers.map(|(number, place)| if place == Place::Kept { number } else { 0.0 }).collect()
}

/// The codes of rows of no expert, and 0 for experts' rows.
fn kept_codes(c: &GroupedLinearSwigluCase, owned: &[bool], codes: &HostTensor) -> Vec<f64> {
    let rows = codes.bytes.chunks(c.intermediate_size().max(1)).zip(owned);
    rows.flat_map(|(row, &owned)| {
        row.iter().map(move |&code| if owned { 0.0 } else { code.into() })
    })
    .collect()
}

/// The meaning of stored codes and scales, part by part. Masked rows of no expert decode to zeros.
fn meaning(
    c: &GroupedLinearSwigluCase,
    owned: &[bool],
    [codes, scales]: [&HostTensor; 2],
    conventions: Conventions,
) -> OracleResult<Vec<(&'static str, HostTensor)>> {
    let (width, columns, groups) = (c.intermediate_size(), c.product_group.columns(), c.groups());
    let (parts, rows) = (c.parts(), c.product.num_rows);
    let part = |host: &HostTensor| {
        let own = &host.shape[usize::from(c.product.is_masked())..];
        Tensor::from_vec(host.to_f64(), [&[parts][..], own].concat(), &Cpu::Cpu)
    };
    let (all_codes, all_scales) = (part(codes)?, part(scales)?);
    let (mut values, mut of_groups, mut least) = (Vec::new(), Vec::new(), Vec::new());
    for part in 0..parts {
        let (codes, scales) = (all_codes.get(part)?, all_scales.get(part)?);
        let stored = codes_of_oracle::stored(&codes, &scales, c.stored(), conventions)?;
        values.extend(stored.values);
        of_groups.extend(stored.scales);
        least.extend(stored.least.into_iter().map(u8::from));
    }
    let scale = scale_of_oracle(c.product_scale);
    let nobodys = scale_by(&[0.0], Format::E4M3, scale, conventions);
    let masked = c.product.is_masked();
    for row in (0..owned.len()).filter(|&row| masked && !owned[row]) {
        values[row * width..(row + 1) * width].fill(0.0);
        of_groups[row * groups..(row + 1) * groups].fill(nobodys);
        least[row * groups..(row + 1) * groups].fill(1);
    }
    let shape = |extent: usize| [&[parts][..usize::from(masked)], &[rows, extent]].concat();
    let numbers =
        |extent: usize, numbers: &[f64]| HostTensor::from_f64(DType::F32, &shape(extent), numbers);
    let least =
        ("scale_is_least", HostTensor { dtype: DType::U8, shape: shape(groups), bytes: least });
    if !c.has_powers() {
        return Ok(vec![
            ("quotients", numbers(width, &values)),
            ("group_scales", numbers(groups, &of_groups)),
            least,
        ]);
    }
    let scale = |at: usize| of_groups[at / width * groups + at % width / columns];
    let decoded: Vec<f64> =
        values.iter().enumerate().map(|(at, value)| value * scale(at)).collect();
    Ok(vec![("decoded", numbers(width, &decoded)), least])
}

fn benchmark(case: GroupedLinearSwigluCase) -> Benchmark<GroupedLinearSwiglu> {
    let case = GroupedLinearSwigluCase { product: case.product.spread(), ..case };
    let scale_bytes = if case.product_scale == ScaleType::E8m0 { 1 } else { 4 };
    let [bytes, flops] = case.product.work(case.intermediate_size() + scale_bytes * case.groups());
    let order = if case.interleaved { " interleaved" } else { "" };
    let name =
        format!("{} in groups of {}{order}", case.product.name(), case.product_group.columns());
    let axis = if case.product.is_masked() { "num_experts" } else { "num_rows" };
    let benchmark: Benchmark<GroupedLinearSwiglu> =
        Benchmark::new(Direction::Forward, name, case, axis)
            .computing(flops)
            .multiplying(Operands::E4m3);
    let product = benchmark.drawn.product.with_few_weights(&benchmark.case.product);
    let out_features = product.out_features.next_multiple_of(benchmark.case.multiple());
    let product = GroupedLinearCase { out_features, ..product };
    let drawn = GroupedLinearSwigluCase { product, ..benchmark.drawn };
    let (chosen, rows, sampled) = match drawn.product.is_masked() {
        true => (last as fn(_, _) -> _, 1, benchmark.sampled),
        false => (benchmark.chosen, 4, of_sampled_rows as _),
    };
    let experts: fn(&GroupedLinearSwigluCase, &[usize]) -> _ = |c, rows| c.product.experts_of(rows);
    let needed = (!benchmark.case.product.is_masked()).then_some(("num_experts", experts));
    Benchmark { drawn, bytes, amend: with_whole_lists, chosen, rows, sampled, needed, ..benchmark }
}

/// As in `grouped_linear`, with every weight finite.
fn with_whole_lists(c: &GroupedLinearSwigluCase, tensors: &mut Tensors) {
    of_whole_case(&c.product, tensors);
    tensors.edit("weight", |weights| {
        weights.iter_mut().filter(|weight| weight.is_nan()).for_each(|weight| *weight = 0.5);
    });
}

fn of_sampled_rows(
    whole: &Whole<'_, GroupedLinearSwiglu>,
    c: &mut GroupedLinearSwigluCase,
    tensors: &mut Tensors,
) {
    keep_experts_of(&whole.case.product, whole.rows, &mut c.product, tensors);
}
