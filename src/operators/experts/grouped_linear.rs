//! `grouped_linear` (inference 5.5, 5.7, 11.1, 11.3): `kernels/cuda/experts/grouped_linear.cu` and
//! `grouped_linear_hopper.cu` against `reference/src/experts/grouped_linear.rs`.
//!
//! Rows of no expert, their scales, and the weights of experts without rows are NaN, where codes
//! and scales have a NaN. No kernel may read them.

use std::rc::Rc;

use dsv4_kernels::experts::grouped_linear::{
    self as launcher, Extents, Grouped, Grouping, WORKSPACE_BYTES,
};
use dsv4_kernels::experts::moe_map::{MAX_EXPERTS, positions};
use dsv4_kernels::projections::linear::{MAX_FEATURES, ScaleLayout, ScaleTensor, Weights};
use dsv4_reference::experts::grouped_linear as reference;
use dsv4_reference::formats::scale_layout::Scales;

use crate::operator::benchmarks::{Whole, last, spread_blocks};
use crate::operator::declaration::{Axis, TensorSpec, state};
use crate::operator::fields::{Implementation, extent};
use crate::operator::prelude::*;
use crate::operators::experts::moe_map::{Experts, MoeMapCase, draw_experts};
use crate::operators::formats::quantize_fp8::format_of;
use crate::operators::projections::linear::{
    Codes, Linear, LinearCase, QUANTIZED, SAMPLED_FEATURES, doubled, keep_scales, quantized,
    set_codes, set_scales, takes_hopper,
};
use crate::record::Operands;

/// The operator.
pub struct GroupedLinear;

/// A case: rows of experts, formats, sizes, types, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupedLinearCase {
    /// The layout of the experts' rows.
    pub grouping: Grouping,
    /// Slots of the router. Slots without room have no row.
    pub num_slots: usize,
    /// The experts in the slots.
    pub experts: Experts,
    /// Experts, up to 512.
    pub num_experts: usize,
    /// Rows of x; in a masked case those of each expert; 0 is allowed.
    pub num_rows: usize,
    /// The alignment of each expert's first row, where rows are contiguous.
    pub alignment: usize,
    /// The number of rows for each expert that the launcher is given as a hint.
    pub expected_rows: usize,
    /// Features of a row of y.
    pub out_features: usize,
    /// Features of a row of x.
    pub in_features: usize,
    /// Type of y.
    pub output: Float,
    /// Formats of w and x, except bf16.
    pub weights: Weights,
    /// Values of x that share a scale.
    pub group: usize,
    /// Whether scales are bytes instead of fp32 values.
    pub scale_bytes: bool,
    /// Layout of the scales of rows.
    pub layout: ScaleLayout,
    /// The contents of codes and scales.
    pub codes: Codes,
    /// Which kernels run.
    pub implementation: Implementation,
    /// The scales of x.
    #[serde(flatten)]
    pub data: Data,
}

/// Contiguous rows of that many slots and experts, with rows of no expert. FP8 with scales in
/// bytes.
pub(crate) fn sorted(
    [num_slots, num_experts]: [usize; 2],
    alignment: usize,
    features: [usize; 2],
) -> GroupedLinearCase {
    let [out_features, in_features] = features;
    GroupedLinearCase {
        grouping: Grouping::Contiguous,
        num_slots,
        experts: Experts::Hostile,
        num_experts,
        num_rows: positions(num_slots, num_experts, alignment) + 3,
        alignment,
        expected_rows: num_slots / num_experts.max(1),
        out_features,
        in_features,
        output: Float::Bf16,
        weights: Weights::Fp8,
        group: 128,
        scale_bytes: true,
        layout: ScaleLayout::Plain,
        codes: Codes::Drawn,
        implementation: Implementation::Portable,
        data: Data::normal(1.0),
    }
}

/// Experts with that many rows each, some of which slots use.
pub(crate) fn masked(
    [num_slots, num_experts, num_rows]: [usize; 3],
    features: [usize; 2],
) -> GroupedLinearCase {
    GroupedLinearCase {
        grouping: Grouping::Masked,
        num_rows,
        ..sorted([num_slots, num_experts], 1, features)
    }
}

fn hopper(case: GroupedLinearCase) -> GroupedLinearCase {
    GroupedLinearCase { implementation: Implementation::Hopper, ..case }
}

fn nvfp4(case: GroupedLinearCase) -> GroupedLinearCase {
    GroupedLinearCase { weights: Weights::Nvfp4, group: 16, ..case }
}

pub(crate) fn mxfp4(group: usize, case: GroupedLinearCase) -> GroupedLinearCase {
    GroupedLinearCase { weights: Weights::Mxfp4, group, ..case }
}

/// The formats whose x is e4m3, with the groups of x.
pub(crate) const OF_E4M3: [(Weights, usize); 3] =
    [(Weights::Fp8, 128), (Weights::Mxfp4, 128), (Weights::Mxfp4, 32)];

impl GroupedLinearCase {
    pub(crate) fn is_masked(&self) -> bool {
        self.grouping == Grouping::Masked
    }

    /// A linear layer of all rows, or of one expert's part, with the same formats and data.
    pub(crate) fn of_one(&self) -> LinearCase {
        let Self { output, scale_bytes, layout, codes, implementation, data, .. } = *self;
        let one = quantized(
            self.weights,
            self.group,
            [self.num_rows, self.out_features, self.in_features],
        );
        LinearCase { output, scale_bytes, layout, codes, implementation, data, ..one }
    }

    pub(crate) fn extents(&self) -> Extents {
        let Self { num_experts, num_rows, out_features, in_features, .. } = *self;
        Extents { num_experts, num_rows, out_features, in_features }
    }

    pub(crate) fn of_launcher(&self) -> Grouped {
        let quantized = self.of_one().of_launcher();
        Grouped { quantized, grouping: self.grouping, expected_rows: self.expected_rows }
    }

    /// Only the slots.
    fn slots(&self) -> MoeMapCase {
        let Self { num_slots, num_experts, alignment, experts, data, .. } = *self;
        MoeMapCase {
            num_tokens: num_slots,
            topk: 1,
            num_experts,
            alignment,
            spare_positions: 0,
            experts,
            seed: data.seed,
        }
    }

    /// Rows of each expert: one for each slot with it, as long as there is room.
    fn rows_of_experts(&self) -> Vec<usize> {
        let mut rows = vec![0; self.num_experts];
        let mut room = self.num_rows / self.alignment.max(1);
        for expert in draw_experts(&self.slots()) {
            let Some(own) = usize::try_from(expert).ok().and_then(|expert| rows.get_mut(expert))
            else {
                continue;
            };
            if self.is_masked() {
                *own = (*own + 1).min(self.num_rows);
            } else if *own % self.alignment != 0 {
                *own += 1;
            } else if room > 0 {
                (*own, room) = (*own + 1, room - 1);
            }
        }
        rows
    }

    /// The row counts that the kernel receives. Hostile masked counts are also negative or larger
    /// than the number of rows.
    fn counts(&self) -> Vec<i32> {
        let hostile = self.is_masked() && self.experts == Experts::Hostile;
        let count = |(expert, rows): (usize, usize)| match expert % 8 {
            1 if hostile => -5,
            3 if hostile => i32::MIN,
            5 if hostile => self.num_rows as i32 + 7,
            7 if hostile => i32::MAX,
            _ => rows as i32,
        };
        self.rows_of_experts().into_iter().enumerate().map(count).collect()
    }

    /// The first row of each expert, and the end of all. In a hostile case the first expert starts
    /// after row 0, if unused rows exist.
    fn offsets(&self) -> Vec<i32> {
        let rows =
            self.rows_of_experts().into_iter().map(|rows| rows.next_multiple_of(self.alignment));
        let spare = self.num_rows - rows.clone().sum::<usize>();
        let first = if self.experts == Experts::Hostile { spare.min(2) } else { 0 };
        let ends = rows.scan(first, |end, rows| {
            *end += rows;
            Some(*end as i32)
        });
        [first as i32].into_iter().chain(ends).collect()
    }

    /// The expert of each row of x (masked: of each expert's part in sequence). `None` for rows of
    /// no expert.
    pub(crate) fn experts_of_rows(&self) -> Vec<Option<usize>> {
        let offsets = if self.is_masked() { Vec::new() } else { self.offsets() };
        let mut owners =
            vec![None; self.num_rows * if self.is_masked() { self.num_experts } else { 1 }];
        for (expert, count) in self.counts().into_iter().enumerate() {
            let first =
                if self.is_masked() { expert * self.num_rows } else { offsets[expert] as usize };
            let count = (count.max(0) as usize).min(self.num_rows);
            owners[first..first + count].fill(Some(expert));
        }
        owners
    }

    /// Axes of rows with that many features.
    pub(crate) fn rows(&self, features: Axis) -> Vec<Axis> {
        let rows = axis("num_rows", self.num_rows);
        if self.is_masked() {
            vec![self.experts_axis(), rows, features]
        } else {
            vec![rows, features]
        }
    }

    pub(crate) fn experts_axis(&self) -> Axis {
        axis("num_experts", self.num_experts).multiples(1, MAX_EXPERTS)
    }

    /// Codes and scales.
    pub(crate) fn operands(&self) -> [TensorSpec; 4] {
        let is_hopper = self.implementation == Implementation::Hopper;
        // A byte holds two codes of four bits, and an access takes 16 bytes.
        let (codes, at_once) =
            (1 + usize::from(self.weights == Weights::Mxfp4), if is_hopper { 16 } else { 1 });
        let ins = axis("in_features", self.in_features).multiples(codes * at_once, MAX_FEATURES);
        let bytes = axis("code_bytes", self.in_features / 2).multiples(at_once, MAX_FEATURES / 2);
        let [of_x, of_w] = match self.weights {
            Weights::Nvfp4 => [bytes, bytes],
            Weights::Mxfp4 => [ins, bytes],
            Weights::Fp8 | Weights::Bf16 => [ins, ins],
        };
        let codes = |name, axes: &[Axis]| {
            let spec = input(name, DType::U8, axes);
            if is_hopper { spec.aligned_rows() } else { spec.rows() }
        };
        let scales = |name, (dtype, axes): ScaleTensor| {
            let axes: Vec<Axis> =
                axes.into_iter().map(|(name, extent)| axis(name, extent)).collect();
            let spec = input(name, dtype, &axes);
            // Bytes that are not written keep their values, for every magnitude of the scales.
            if self.is_masked() || self.codes == Codes::Exact { spec } else { spec.of_any_size() }
        };
        let [x_scales, w_scales] = self.of_launcher().scale_tensors(self.extents());
        let outs = axis("out_features", self.out_features).multiples(1, MAX_FEATURES);
        [
            codes("x", &self.rows(of_x)),
            codes("w", &[self.experts_axis(), outs, of_w]),
            scales("x_scales", x_scales),
            scales("w_scales", w_scales),
        ]
    }

    /// The scales of x and of each expert's w as a whole, of NVFP4.
    fn global_scales(&self) -> [TensorSpec; 2] {
        let of = |name, axis| input(name, DType::F32, &[axis]).when(self.weights == Weights::Nvfp4);
        [of("x_global_scale", axis("one", 1)), of("w_global_scale", self.experts_axis())]
    }

    /// The rows of each expert.
    pub(crate) fn lists(&self) -> [TensorSpec; 2] {
        let ends = axis("num_experts_and_one", self.num_experts + 1);
        [
            input("counts", DType::I32, &[self.experts_axis()]),
            input("expert_offsets", DType::I32, &[ends]).when(!self.is_masked()),
        ]
    }

    /// Scales of x and w, and how many of each kind are consecutive.
    fn scales(&self) -> [(&'static str, Scales, usize); 2] {
        let oracle = self.of_one().of_oracle();
        let parts = if self.is_masked() { self.num_experts } else { 1 };
        [
            ("x_scales", oracle.x_scales(self.num_rows, self.in_features), parts),
            ("w_scales", oracle.w_scales(self.out_features, self.in_features), self.num_experts),
        ]
    }
}

/// One row of an expert is expected: the smallest tiles.
fn expecting_one(case: GroupedLinearCase) -> GroupedLinearCase {
    GroupedLinearCase { expected_rows: 1, ..case }
}

impl Operator for GroupedLinear {
    type Case = GroupedLinearCase;

    const ABOUT: About = About {
        name: "grouped_linear",
        family: Family::Experts,
        summary: "rows of experts times their FP8, MXFP4 or NVFP4 weights, sorted by expert or apart with counts",
        specification: &["inference 5.5", "inference 5.7", "inference 11.1", "inference 11.3"],
        paths: &[
            "grouped_linear_large<fp8>",
            "grouped_linear_small<fp8>",
            "grouped_linear_scalar<fp8>",
            "grouped_linear_large<mxfp4, 128>",
            "grouped_linear_small<mxfp4, 128>",
            "grouped_linear_scalar<mxfp4, 128>",
            "grouped_linear_large<mxfp4, 32>",
            "grouped_linear_small<mxfp4, 32>",
            "grouped_linear_scalar<mxfp4, 32>",
            "grouped_linear_large<nvfp4>",
            "grouped_linear_small<nvfp4>",
            "grouped_linear_scalar<nvfp4>",
            "grouped_linear_hopper<16>",
            "grouped_linear_hopper<64>",
            "grouped_linear_hopper<8, mxfp4, 128>",
            "grouped_linear_hopper<16, mxfp4, 128>",
            "grouped_linear_hopper<64, mxfp4, 128>",
            "grouped_linear_hopper<128, mxfp4, 128>",
            "grouped_linear_hopper<8, mxfp4, 32>",
            "grouped_linear_hopper<16, mxfp4, 32>",
            "grouped_linear_hopper<64, mxfp4, 32>",
            "grouped_linear_hopper<128, mxfp4, 32>",
            "grouped_linear_hopper_large",
            "grouped_linear_hopper_large_pairs",
        ],
        modules: launcher::modules,
        cases: [24, 60, 120],
    };

    const NOT_EXPRESSIBLE: &'static [(&'static str, &'static str)] = &[
        (
            "products of bf16 operands",
            "the model quantizes the experts' rows and weights; `linear` has bf16 groups",
        ),
        ("gradients of weights from FP8 operands", "the training forward keeps bf16 rows for them"),
    ];

    fn tensors(c: &GroupedLinearCase) -> Specs {
        let outs = axis("out_features", c.out_features).multiples(1, MAX_FEATURES);
        let (dtype, rows) = (c.output.dtype(), c.rows(outs));
        let y = match c.grouping {
            Grouping::Contiguous => output("y", dtype, &rows),
            Grouping::Masked => state("y", dtype, &rows).drawn(Distribution::Normal, 1.0),
        };
        let y = if c.codes == Codes::Exact { y.exact() } else { y };
        let given = c.operands().into_iter().chain(c.global_scales()).chain(c.lists());
        Specs::new(c.data.seed, given.chain([y.rows()]))
    }

    fn check(c: &GroupedLinearCase) -> Result<(), Refused> {
        if c.weights == Weights::Bf16 {
            return refuse("weights", "experts have FP8, MXFP4 or NVFP4 weights");
        }
        MoeMapCase::check_alignment(c.alignment)?;
        Linear::check(&c.of_one())
    }

    fn cannot_run(c: &GroupedLinearCase, environment: &Environment) -> Option<String> {
        c.implementation.launcher().cannot_run_on(environment)
    }

    fn fastest(c: &GroupedLinearCase, environment: &Environment) -> GroupedLinearCase {
        let implementation = Linear::fastest(&c.of_one(), environment).implementation;
        GroupedLinearCase { implementation, ..c.clone() }
    }

    fn strategy(profile: Profile) -> BoxedStrategy<GroupedLinearCase> {
        drawn(profile, &QUANTIZED)
    }

    fn typical() -> Vec<GroupedLinearCase> {
        let in_layout = |layout| move |case| GroupedLinearCase { layout, ..case };
        let fp32 = |case| GroupedLinearCase { scale_bytes: false, output: Float::F32, ..case };
        vec![
            sorted([13, 4], 4, [24, 144]),
            masked([9, 3, 6], [24, 144]).then(fp32).then(in_layout(ScaleLayout::MnMajor)),
            sorted([13, 4], 1, [24, 144]).then(hopper),
            masked([9, 3, 6], [24, 96])
                .then(|case| mxfp4(32, case))
                .then(in_layout(ScaleLayout::MnMajor)),
            sorted([13, 4], 4, [24, 96])
                .then(|case| mxfp4(128, case))
                .then(in_layout(ScaleLayout::Blocked)),
            sorted([13, 4], 1, [24, 160]).then(|case| mxfp4(128, case)).then(hopper),
            sorted([13, 4], 4, [24, 96]).then(nvfp4),
            masked([9, 3, 6], [24, 96]).then(nvfp4).then(in_layout(ScaleLayout::Blocked)),
            masked([9, 3, 6], [24, 96])
                .then(|case| mxfp4(32, case))
                .then(hopper)
                .then(in_layout(ScaleLayout::MnMajor)),
        ]
    }

    fn long_cases() -> Vec<GroupedLinearCase> {
        // More work tiles for a block than it lists at its start.
        let distinct = |case| GroupedLinearCase { experts: Experts::Distinct, ..case };
        let exact = |case| GroupedLinearCase { codes: Codes::Exact, output: Float::F32, ..case };
        vec![
            sorted([280, 280], 1, [8, 144])
                .then(distinct)
                .then(expecting_one)
                .then(hopper)
                .then(exact),
            sorted([280, 280], 1, [8, 96])
                .then(distinct)
                .then(expecting_one)
                .then(|case| mxfp4(32, case))
                .then(hopper)
                .then(exact),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<GroupedLinearCase> {
        let with = |experts| move |case| GroupedLinearCase { experts, ..case };
        let exact = |case| GroupedLinearCase { codes: Codes::Exact, output: Float::F32, ..case };
        let any = |case| GroupedLinearCase { codes: Codes::Any, ..case };
        let fp32 = |case| GroupedLinearCase { scale_bytes: false, ..case };
        let in_layout = |layout| move |case| GroupedLinearCase { layout, ..case };
        let expecting = |expected_rows| move |case| GroupedLinearCase { expected_rows, ..case };
        let (mn, tiles) = (ScaleLayout::MnMajor, ScaleLayout::Blocked);
        let one_large =
            |case| GroupedLinearCase { codes: Codes::OneLarge, output: Float::F32, ..case };
        let small_scales = |case| GroupedLinearCase {
            data: Data::normal(2f64.powi(-142)),
            output: Float::F32,
            ..case
        };
        let large_scales =
            |case| GroupedLinearCase { codes: Codes::LargeScales, output: Float::F32, ..case };
        let mut cases = vec![
            // No rows; only rows of no expert; one row.
            sorted([0, 3], 4, [8, 16]).with(|case| case.num_rows = 0),
            sorted([5, 3], 4, [20, 33]).then(with(Experts::None)),
            sorted([5, 3], 128, [8, 32]).then(with(Experts::None)).then(hopper),
            masked([0, 3, 0], [8, 16]),
            sorted([1, 1], 1, [1, 1]).then(with(Experts::Distinct)),
            masked([1, 9, 1], [8, 16]).then(with(Experts::Distinct)).then(hopper),
            // All rows belong to one expert in the middle; several tiles of it, the last one
            // partial.
            sorted([37, 5], 4, [72, 144]).then(with(Experts::One)).then(exact),
            sorted([133, 3], 8, [136, 160])
                .then(fp32)
                .then(with(Experts::One))
                .then(expecting(100))
                .then(exact),
            sorted([67, 3], 1, [136, 144])
                .then(with(Experts::One))
                .then(expecting(1))
                .then(hopper)
                .then(exact),
            sorted([131, 4], 16, [12, 272])
                .then(with(Experts::Skewed))
                .then(in_layout(mn))
                .then(expecting(100))
                .then(hopper)
                .then(exact),
            // Groups that end in the middle of a tile and start in the next one; more experts than
            // a warp has lanes.
            sorted([40, 7], 1, [24, 192]).then(in_layout(tiles)).then(exact),
            sorted([40, 70], 1, [24, 144])
                .then(fp32)
                .then(in_layout(mn))
                .then(expecting(40))
                .then(hopper)
                .then(exact),
            masked([40, 9, 13], [20, 160]).then(in_layout(tiles)).then(hopper).then(any),
            masked([30, 9, 18], [130, 272]).then(fp32).then(in_layout(mn)).then(exact),
            sorted([20, 6], 2, [21, 71]).then(fp32).then(any),
            masked([70, 3, 21], [136, 128]).then(expecting(40)).then(with(Experts::Repeated)),
            sorted([2, 2], 1, [4, 2048]).then(with(Experts::One)).then(hopper).then(one_large),
            // Large tiles: more k-blocks than stages; products of two scales that are not normal
            // values.
            sorted([131, 3], 1, [136, 1168])
                .then(with(Experts::One))
                .then(expecting(100))
                .then(hopper),
            sorted([70, 2], 1, [136, 272])
                .then(with(Experts::One))
                .then(expecting(100))
                .then(hopper)
                .then(small_scales),
            sorted([70, 2], 1, [136, 272])
                .then(fp32)
                .then(with(Experts::One))
                .then(expecting(100))
                .then(hopper)
                .then(large_scales),
            masked([9, 3, 6], [24, 144]).then(hopper).then(large_scales),
            masked([9, 3, 6], [24, 144]).then(large_scales),
            // In pairs: tiles of rows whose last ones are full or have a few rows, or one tile that
            // two blocks share. More k-blocks than stages; several work tiles for each block.
            sorted([420, 3], 16, [264, 272])
                .then(with(Experts::Skewed))
                .then(expecting(300))
                .then(hopper)
                .then(exact),
            sorted([300, 2], 1, [776, 144])
                .then(in_layout(mn))
                .then(with(Experts::One))
                .then(expecting(300))
                .then(hopper)
                .then(any),
            masked([300, 2, 160], [264, 144])
                .then(in_layout(tiles))
                .then(expecting(300))
                .then(hopper),
            sorted([40, 6], 1, [264, 1168])
                .then(fp32)
                .then(expecting(300))
                .then(hopper)
                .then(exact),
            // More work tiles for each block, and for each pair, than slots for their values.
            sorted([100, 100], 1, [8, 144])
                .then(with(Experts::Distinct))
                .then(expecting(100))
                .then(hopper)
                .then(exact),
            sorted([40, 40], 1, [264, 144])
                .then(with(Experts::Distinct))
                .then(expecting(300))
                .then(hopper)
                .then(exact),
        ];
        // Of four-bit weights.
        let portable = |of: &dyn Fn(GroupedLinearCase) -> GroupedLinearCase| {
            [
                of(sorted([20, 5], 4, [72, 96])).then(exact),
                of(sorted([19, 3], 1, [20, 160]).then(with(Experts::One)))
                    .then(in_layout(mn))
                    .then(expecting(40))
                    .then(exact),
                of(masked([33, 9, 7], [130, 42])).then(in_layout(tiles)).then(exact),
                of(sorted([12, 4], 8, [9, 352])).then(in_layout(tiles)).then(any),
            ]
        };
        cases.extend(portable(&nvfp4));
        cases.push(
            sorted([133, 3], 8, [136, 224])
                .then(nvfp4)
                .then(with(Experts::One))
                .then(expecting(100)),
        );
        for group in [128, 32] {
            cases.extend(portable(&|case| mxfp4(group, case)));
            let of = |case| mxfp4(group, case).then(hopper);
            let extreme = |case| GroupedLinearCase { codes: Codes::Extreme, ..case };
            let small_weights = |case| GroupedLinearCase { codes: Codes::SmallWeights, ..case };
            let far_apart = |case| GroupedLinearCase { codes: Codes::FarApart, ..case };
            cases.extend([
                sorted([5, 3], 128, [8, 32]).then(with(Experts::None)).then(of),
                masked([1, 9, 1], [8, 32]).then(with(Experts::Distinct)).then(of),
                // Several tiles of an expert, the last one partial; groups that end in the middle
                // of one; a last k-block of one group.
                sorted([67, 3], 1, [136, 160])
                    .then(with(Experts::One))
                    .then(expecting(1))
                    .then(of)
                    .then(exact),
                sorted([40, 70], 1, [24, 96])
                    .then(in_layout(mn))
                    .then(expecting(40))
                    .then(of)
                    .then(exact),
                sorted([133, 4], 16, [12, 288])
                    .then(with(Experts::Skewed))
                    .then(in_layout(tiles))
                    .then(expecting(100))
                    .then(of)
                    .then(exact),
                masked([40, 9, 13], [20, 160]).then(in_layout(tiles)).then(of).then(any),
                masked([30, 9, 18], [130, 352]).then(in_layout(mn)).then(of).then(exact),
                masked([30, 3, 18], [130, 160])
                    .then(in_layout(tiles))
                    .then(expecting(12))
                    .then(of)
                    .then(exact),
                masked([20, 3, 12], [20, 1184]).then(of).then(any),
                sorted([20, 3], 4, [136, 288]).then(in_layout(mn)).then(of).then(far_apart),
                masked([9, 3, 6], [20, 160]).then(of).then(extreme),
                masked([9, 3, 6], [24, 96]).then(of).then(small_weights),
                // Tiles without a partial row or k-block: scales are loaded four at a time.
                sorted([20, 3], 1, [256, 256]).then(expecting(1)).then(of).then(exact),
                sorted([18, 2], 1, [24, 64])
                    .then(in_layout(tiles))
                    .then(expecting(40))
                    .then(of)
                    .then(extreme),
            ]);
        }
        if profile == Profile::Full {
            let model = |case| with(Experts::Distinct)(case);
            cases.extend([
                sorted([700, 9], 128, [1030, 1024]).then(model).then(hopper),
                masked([40, 16, 64], [520, 1536]).then(model),
            ]);
            cases.push(
                sorted([1, 2], 1, [2, 7168]).then(with(Experts::One)).then(hopper).then(one_large),
            );
        }
        cases
    }

    fn amend(c: &GroupedLinearCase, tensors: &mut Tensors) -> OracleResult<()> {
        let one = c.of_one();
        set_codes(&one, "x", c.weights != Weights::Nvfp4, tensors);
        set_codes(&one, "w", c.weights == Weights::Fp8, tensors);
        // Large x has large scales.
        let exponents = [c.data.magnitude.log2().round() as i32, 0];
        for ((name, scales, parts), exponent) in c.scales().into_iter().zip(exponents) {
            set_scales(&one, name, (scales, parts), exponent, tensors);
        }
        tensors.set_i32s("counts", &c.counts());
        if !c.is_masked() {
            tensors.set_i32s("expert_offsets", &c.offsets());
        }
        if c.weights == Weights::Nvfp4 {
            let exact = c.codes == Codes::Exact;
            tensors.set("x_global_scale", &[if exact { 0.25 } else { 0.011 }]);
            // An expert's own, up to four times that of the first one.
            let of_expert = |expert: usize| match exact {
                true => 0.25 * 2f64.powi((expert % 3) as i32),
                false => 0.37 * (1.0 + (expert * 5 % 8) as f64 * 0.43),
            };
            tensors.set("w_global_scale", &(0..c.num_experts).map(of_expert).collect::<Vec<_>>());
        }
        spoil_what_nobody_reads(c, tensors);
        Ok(())
    }

    fn forward(
        c: &GroupedLinearCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        let (named, quantized) = (t.named()?, c.of_one().of_oracle());
        let named = match named.get("y").filter(|_| c.is_masked()).cloned() {
            Some(before) => named.with("y_before", before),
            None => named,
        };
        if c.codes != Codes::Exact {
            return reference::forward(&named, &quantized, rounding);
        }
        let y = reference::forward(&named, &quantized, &mut Rounding::exact())?;
        let y = y.tensor("y")?;
        let mut stored = crate::operator::fields::elements(y)?;
        format_of(c.output).round_all(&mut stored);
        Ok(Named::new().with("y", crate::operator::fields::tensor(stored, y.dims())?))
    }

    fn workspaces(
        _: &GroupedLinearCase,
        _: &Views,
        _: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        Ok(vec![("workspace", WORKSPACE_BYTES)])
    }

    fn launch(
        c: &GroupedLinearCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::forward(device, v, c.of_launcher()))
    }

    fn invariant(_: &GroupedLinearCase, _: bool) -> &'static [BatchAxis] {
        &[BatchAxis::Experts]
    }

    fn batches(c: &GroupedLinearCase, batches: &mut Batches<'_, Self>) {
        batches_of_experts(c, batches, &["y"]);
    }

    fn laws(c: &GroupedLinearCase, laws: &mut Laws<'_, Self>) {
        laws_of_scales(c, laws);
        let other = if c.expected_rows > 64 { 1 } else { 1000 };
        laws.alike("tiles change no bit", Relation::Times(1.0), |v| v.case.expected_rows = other);
        laws_of_rows(c, laws, &["y"]);
    }

    /// Gate and up of the models' experts: sorted rows for a prefill, masked ones for decode steps.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        type Experts = (usize, [usize; 2]);
        let (flash, pro): (Experts, Experts) = ((256, [4096, 4096]), (384, [6144, 7168]));
        let (gpu, small): (bool, Experts) = (on_gpu(environment), (3, [24, 144]));
        let prefills = [(24_576, flash), (196_608, flash), (24_576, pro), (196_608, pro)];
        let sizes = if gpu { prefills.to_vec() } else { vec![(30, small)] };
        let batches =
            if gpu { vec![(6, flash), (192, flash), (768, flash)] } else { vec![(9, small)] };
        let fastest = |case: GroupedLinearCase| Self::fastest(&case, environment);
        let prefill = sizes.iter().map(|&(slots, (experts, features)): &(usize, Experts)| {
            let alignment = if gpu { 128 } else { 8 };
            // As many rows as evenly spread slots need.
            let num_rows = experts * slots.div_ceil(experts).next_multiple_of(alignment);
            fastest(GroupedLinearCase { num_rows, ..sorted([slots, experts], alignment, features) })
        });
        let decode = batches.iter().flat_map(|&(slots, (experts, features)): &(usize, Experts)| {
            let case = masked([slots, experts, if gpu { 128 } else { 8 }], features);
            [fastest(case.clone()), fastest(mxfp4(128, case))]
        });
        prefill.chain(decode).map(benchmark).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![
            Reduced::forward(
                &["24576 contiguous 256x4096x4096 fp8"],
                json!({"num_slots": 30, "num_experts": 5, "num_rows": 40, "alignment": 4, "out_features": 24, "in_features": 160}),
                json!({"num_experts": 2, "num_rows": 8}),
            ),
            Reduced::forward(
                &["192 masked 256x4096x4096 fp8", "192 masked 256x4096x4096 mxfp4"],
                json!({"num_slots": 30, "num_experts": 5, "num_rows": 40, "alignment": 4, "out_features": 24, "in_features": 160}),
                json!({"num_experts": 2, "out_features": 8}),
            ),
        ]
    }
}

/// Draws cases of these formats.
pub(crate) fn drawn(
    profile: Profile,
    formats: &[(Weights, usize)],
) -> BoxedStrategy<GroupedLinearCase> {
    let [slots, experts, features] =
        profile.of([[30usize, 6, 150], [150, 20, 260], [600, 60, 1200]]);
    let features = move || prop_oneof![3 => extent(features, 16), 1 => 1..=features];
    let rows =
        (extent(slots, 8), select(Experts::ALL.to_vec()), 1..=experts, any::<bool>(), 0..12usize);
    let alignment = select(vec![1usize, 4, 8, 37, 64, 128]);
    let format = (select(formats.to_vec()), Float::strategy(), any::<bool>(), any::<bool>());
    let layout = select(vec![ScaleLayout::Plain, ScaleLayout::MnMajor, ScaleLayout::Blocked]);
    let codes =
        select(vec![Codes::Drawn, Codes::Drawn, Codes::Any, Codes::Exact, Codes::LargeScales]);
    let held = (layout, codes, select(vec![1usize, 40, 200, 300]), Data::strategy(-30..=30));
    (rows, alignment, [features(), features()], format, held)
        .prop_map(|(rows, alignment, features, format, (layout, codes, expected_rows, data))| {
            let (num_slots, experts, num_experts, is_masked, spare) = rows;
            let case = match is_masked {
                true => masked(
                    [num_slots, num_experts, num_slots.div_ceil(num_experts) + spare],
                    features,
                ),
                false => sorted([num_slots, num_experts], alignment, features),
            };
            let num_rows = if is_masked { case.num_rows } else { case.num_rows + spare };
            let case =
                GroupedLinearCase { num_rows, experts, layout, codes, expected_rows, data, ..case };
            fitted(case, format)
        })
        .boxed()
}

/// Limits a drawn case to what the format supports.
fn fitted(
    case: GroupedLinearCase,
    ((weights, group), output, bytes, on_hopper): ((Weights, usize), Float, bool, bool),
) -> GroupedLinearCase {
    let fp8 = weights == Weights::Fp8;
    let scale_bytes = bytes || !fp8;
    let layout = if scale_bytes || case.layout != ScaleLayout::Blocked {
        case.layout
    } else {
        ScaleLayout::MnMajor
    };
    let on_hopper = takes_hopper(weights) && on_hopper;
    let multiple = (if on_hopper { 16 } else { 1 }) * (1 + usize::from(!fp8));
    let in_features = case.in_features.next_multiple_of(multiple);
    let implementation = if on_hopper { Implementation::Hopper } else { Implementation::Portable };
    let codes = case.codes.of_weights(weights);
    GroupedLinearCase {
        weights,
        group,
        output,
        scale_bytes,
        layout,
        codes,
        in_features,
        implementation,
        ..case
    }
}

/// Sets NaN, where codes and scales have one, in rows of no expert and in weights of experts
/// without rows.
fn spoil_what_nobody_reads(c: &GroupedLinearCase, tensors: &mut Tensors) {
    const NAN: u8 = 0x7f;
    let owners = c.experts_of_rows();
    let of_rows: Vec<bool> = owners.iter().map(Option::is_some).collect();
    let has_rows: Vec<bool> =
        (0..c.num_experts).map(|expert| owners.contains(&Some(expert))).collect();
    if c.weights != Weights::Nvfp4 {
        spoil(tensors.bytes_mut("x"), c.in_features, &of_rows, NAN);
    }
    if c.weights == Weights::Fp8 {
        spoil(tensors.bytes_mut("w"), c.out_features * c.in_features, &has_rows, NAN);
    }
    let [(x, of_x, _), (w, of_w, _)] = c.scales();
    let used: Vec<bool> = of_rows
        .chunks(c.num_rows.max(1))
        .flat_map(|part| {
            of_x.arranged(
                &part.iter().flat_map(|&read| vec![read; of_x.groups]).collect::<Vec<_>>(),
            )
        })
        .collect();
    spoil_scales(c, x, &used, tensors);
    let of_experts: Vec<bool> =
        has_rows.iter().flat_map(|&read| vec![read; of_w.places()]).collect();
    spoil_scales(c, w, &of_experts, tensors);
}

fn spoil(bytes: Option<&mut [u8]>, width: usize, used: &[bool], with: u8) {
    let rows = bytes.unwrap_or_default().chunks_mut(width.max(1)).zip(used);
    rows.filter(|(_, used)| !**used).for_each(|(row, _)| row.fill(with));
}

/// Sets unused scales to NaN.
fn spoil_scales(c: &GroupedLinearCase, name: &'static str, used: &[bool], tensors: &mut Tensors) {
    if c.scale_bytes {
        return spoil(tensors.bytes_mut(name), 1, used, 255);
    }
    tensors.edit(name, |scales| {
        scales
            .iter_mut()
            .zip(used)
            .filter(|(_, used)| !**used)
            .for_each(|(scale, _)| *scale = f64::NAN);
    });
}

/// Scales count once: doubling all of them doubles y, including rows of no expert, which are 0.
fn laws_of_scales(c: &GroupedLinearCase, laws: &mut Laws<'_, GroupedLinear>) {
    if c.is_masked() {
        return;
    }
    if c.weights == Weights::Nvfp4 {
        laws.scale("the scale of x counts once", "x_global_scale", 0.5, &[("y", 0.5)]);
        laws.scale("the scales of w count once", "w_global_scale", 0.5, &[("y", 0.5)]);
        return;
    }
    for (law, name) in
        [("scales of x count once", "x_scales"), ("scales of w count once", "w_scales")]
    {
        let moderate = (-40..=40).contains(&(c.data.magnitude.log2() as i32));
        if !c.scale_bytes {
            laws.scale(law, name, 0.5, &[("y", 0.5)]);
        } else if let Some(scales) = doubled(laws.tensors(), name).filter(|_| moderate) {
            laws.law(law, |v| v.tensors.put(name, scales), [("y", Relation::Times(2.0))]);
        }
    }
}

/// Data of one row, or of one expert's weights, do not affect other rows of these tensors. Data in
/// rows of no expert affect no row.
pub(crate) fn laws_of_rows<K: Operator>(
    c: &GroupedLinearCase,
    laws: &mut Laws<'_, K>,
    written: &'static [&'static str],
) {
    let owners = Rc::new(c.experts_of_rows());
    let real: Vec<usize> = (0..owners.len()).filter(|&row| owners[row].is_some()).collect();
    let (width, signs_of_x) = match c.weights {
        Weights::Nvfp4 => (c.in_features / 2, 0x88),
        _ => (c.in_features, 0x80),
    };
    if real.len() < owners.len() {
        let others = owners.clone();
        laws.alike("rows of nobody may hold anything", Relation::Times(1.0), |v| {
            let rows = v.tensors.bytes_mut("x").unwrap_or_default().chunks_mut(width.max(1));
            rows.zip(others.iter())
                .filter(|(_, owner)| owner.is_none())
                .for_each(|(row, _)| row.fill(0x39));
        });
    }
    let Some(&middle) = real.get(real.len() / 2).filter(|_| owners.len() > 1) else { return };
    let turn = |bytes: &mut [u8], signs: u8| bytes.iter_mut().for_each(|byte| *byte ^= signs);
    laws.law(
        "a row is nothing to others",
        |v| {
            turn(
                &mut v.tensors.bytes_mut("x").unwrap_or_default()
                    [middle * width..(middle + 1) * width],
                signs_of_x,
            )
        },
        equal_rows(written, Rc::new(move |row| row != middle)),
    );
    let expert = owners[middle].unwrap_or(0);
    if owners.iter().all(|owner| *owner == Some(expert)) {
        return;
    }
    let (signs, row) =
        if c.weights == Weights::Fp8 { (0x80, width) } else { (0x88, c.in_features / 2) };
    let own = expert * c.out_features * row..(expert + 1) * c.out_features * row;
    laws.law(
        "an expert's weights are nothing to others",
        |v| turn(&mut v.tensors.bytes_mut("w").unwrap_or_default()[own], signs),
        equal_rows(written, Rc::new(move |row| owners[row] != Some(expert))),
    );
}

/// The rows of the expert with most: with none for other experts, and fewer for this one.
pub(crate) fn batches_of_experts<K: Operator>(
    c: &GroupedLinearCase,
    batches: &mut Batches<'_, K>,
    written: &[&'static str],
) {
    let owners = c.experts_of_rows();
    let rows_of = |expert: usize| -> Vec<usize> {
        (0..owners.len()).filter(|&row| owners[row] == Some(expert)).collect()
    };
    let Some(expert) = (0..c.num_experts).max_by_key(|&expert| rows_of(expert).len()) else {
        return;
    };
    let (rows, axes) = (rows_of(expert), if c.is_masked() { 2 } else { 1 });
    for kept in [rows.len(), rows.len().div_ceil(2)] {
        let pairs: Vec<(usize, usize)> = rows[..kept].iter().map(|&row| (row, row)).collect();
        let same = written.iter().map(|name| Same::leading(name, [axes; 2], &pairs)).collect();
        let extents = format!("{kept} of {} rows of expert {expert}, none of others", rows.len());
        batches.run(BatchAxis::Experts, extents, |v| {
            let mut counts = vec![0; c.num_experts];
            counts[expert] = kept as i32;
            v.tensors.set_i32s("counts", &counts);
            same
        });
    }
}

/// These rows of each of the tensors are the same.
fn equal_rows(
    written: &'static [&'static str],
    rows: Rc<dyn Fn(usize) -> bool>,
) -> impl Iterator<Item = (&'static str, Relation)> {
    written.iter().map(move |&name| (name, Relation::EqualRows(rows.clone())))
}

impl GroupedLinearCase {
    /// With slots that spread over all experts. In a masked case the last expert has rows, which
    /// are the sample.
    pub(crate) fn spread(&self) -> Self {
        let of_seed = |seed| {
            let data = Data { seed, ..self.data };
            Self { experts: Experts::Distinct, data, ..self.clone() }
        };
        let has_rows = |case: &Self| case.rows_of_experts().last().is_some_and(|&rows| rows > 0);
        (1..1000).map(of_seed).find(has_rows).unwrap_or_else(|| of_seed(1))
    }

    /// The name of a benchmark.
    pub(crate) fn name(&self) -> String {
        let Self { num_slots, num_experts, out_features, in_features, .. } = *self;
        let portable =
            self.weights == Weights::Fp8 && self.implementation == Implementation::Portable;
        let grouping = if self.is_masked() { "masked" } else { "contiguous" };
        format!(
            "{num_slots} {grouping} {num_experts}x{out_features}x{in_features} {}{}",
            format!("{:?}", self.weights).to_lowercase(),
            Implementation::suffix(portable)
        )
    }

    /// Bytes that a call must move when it writes that many bytes for each row, and its FLOP.
    pub(crate) fn work(&self, written: usize) -> [f64; 2] {
        let Self { out_features, in_features, .. } = *self;
        let rows: usize = self.rows_of_experts().into_iter().sum();
        let with_rows = self.rows_of_experts().into_iter().filter(|&rows| rows > 0).count();
        let [of_x, of_w] = self.of_launcher().quantized.row_bytes(in_features);
        let bytes = with_rows * out_features * of_w + rows * (of_x + written);
        [bytes as f64, 2.0 * rows as f64 * out_features as f64 * in_features as f64]
    }

    /// The experts of some rows; the first one where they have none.
    pub(crate) fn experts_of(&self, rows: &[usize]) -> Vec<usize> {
        let owners = self.experts_of_rows();
        let mut experts: Vec<usize> = rows.iter().filter_map(|&row| owners[row]).collect();
        experts.dedup();
        if experts.is_empty() {
            experts.push(0);
        }
        experts
    }

    /// With drawn weights for some rows of some experts; `whole` is the case.
    pub(crate) fn with_few_weights(&self, whole: &Self) -> Self {
        let out_features = whole.out_features.min(128);
        let num_experts = (DRAWN / (out_features * whole.in_features)).clamp(1, whole.num_experts);
        Self { num_experts, out_features, ..self.clone() }
    }
}

fn benchmark(case: GroupedLinearCase) -> Benchmark<GroupedLinear> {
    let case = case.spread();
    let ([bytes, flops], name) = (case.work(2 * case.out_features), case.name());
    let axis = if case.is_masked() { "num_experts" } else { "num_rows" };
    let benchmark: Benchmark<GroupedLinear> = Benchmark::new(Direction::Forward, name, case, axis)
        .computing(flops)
        .multiplying(Operands::E4m3)
        // A few rows need whole experts, except along the axis that is not summed over.
        .also_sampled_along("out_features", SAMPLED_FEATURES, spread_blocks);
    let drawn = benchmark.drawn.with_few_weights(&benchmark.case);
    let (chosen, rows, sampled) = match drawn.grouping {
        Grouping::Masked => (last as fn(_, _) -> _, 1, of_sampled_features as _),
        Grouping::Contiguous => (benchmark.chosen, 4, of_sampled_rows as _),
    };
    // Rows that are sorted by expert need the weights of theirs alone.
    let experts: fn(&GroupedLinearCase, &[usize]) -> _ = GroupedLinearCase::experts_of;
    let needed = (!benchmark.case.is_masked()).then_some(("num_experts", experts));
    Benchmark { drawn, bytes, amend: of_whole_case, chosen, rows, sampled, needed, ..benchmark }
}

/// Makes every row and weight finite, and sets the experts' rows of the whole case.
pub(crate) fn of_whole_case(c: &GroupedLinearCase, tensors: &mut Tensors) {
    for name in ["x", "w"] {
        let codes = tensors.bytes_mut(name).unwrap_or_default();
        codes.iter_mut().filter(|code| **code == 0x7f).for_each(|code| *code = 0x38);
    }
    for name in ["x_scales", "w_scales"] {
        let scales = tensors.bytes_mut(name).unwrap_or_default();
        scales.iter_mut().filter(|byte| **byte == 255).for_each(|byte| *byte = 127);
    }
    tensors.put("counts", HostTensor::from_i32(&[c.num_experts], &c.counts()));
    if !c.is_masked() {
        tensors.put("expert_offsets", HostTensor::from_i32(&[c.num_experts + 1], &c.offsets()));
    }
}

fn of_sampled_rows(
    whole: &Whole<'_, GroupedLinear>,
    c: &mut GroupedLinearCase,
    tensors: &mut Tensors,
) {
    keep_experts_of(whole.case, whole.rows, c, tensors);
    of_sampled_features(whole, c, tensors);
}

/// The scales of the sampled blocks of weights.
fn of_sampled_features(
    whole: &Whole<'_, GroupedLinear>,
    c: &mut GroupedLinearCase,
    tensors: &mut Tensors,
) {
    keep_scales(c.weights, whole.further, 1, tensors);
}

/// A sample of rows has only the experts of its rows, whose weights it has.
pub(crate) fn keep_experts_of(
    whole: &GroupedLinearCase,
    rows: &[usize],
    c: &mut GroupedLinearCase,
    tensors: &mut Tensors,
) {
    let experts = whole.experts_of(rows);
    let owners = whole.experts_of_rows();
    let owners: Vec<Option<usize>> = rows.iter().map(|&row| owners[row]).collect();
    let rows_of = |expert: &usize| {
        (0..owners.len()).filter(|&row| owners[row] == Some(*expert)).collect::<Vec<_>>()
    };
    let counts: Vec<i32> = experts.iter().map(|expert| rows_of(expert).len() as i32).collect();
    let firsts = experts.iter().map(|expert| rows_of(expert).first().copied().unwrap_or(0) as i32);
    let offsets: Vec<i32> = firsts.chain([owners.len() as i32]).collect();
    c.num_experts = experts.len();
    tensors.put("counts", HostTensor::from_i32(&[counts.len()], &counts));
    tensors.put("expert_offsets", HostTensor::from_i32(&[offsets.len()], &offsets));
}
