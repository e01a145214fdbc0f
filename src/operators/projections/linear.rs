//! `linear` (inference 0, 5.2 to 5.7): `kernels/cuda/projections/linear.cu`, `linear_quantized.cu`
//! and `linear_hopper.cu` against `reference/src/projections/linear.rs`.

use dsv4_kernels::projections::linear::{
    self as launcher, MAX_FEATURES, MAX_GROUPS, ScaleLayout, Weights,
};
use dsv4_reference::Format;
use dsv4_reference::formats::scale_layout::{Scales, words_of};
use dsv4_reference::precision::Accumulator;
use dsv4_reference::projections::linear as reference;
use rand::Rng;

use crate::case::NORMAL_WORDS;
use crate::operator::benchmarks::{Whole, spread_blocks};
use crate::operator::declaration::{Axis, TensorSpec};
use crate::operator::fields::{Implementation, extent};
use crate::operator::prelude::*;
use crate::operator::tensors::permuted_along;
use crate::operators::formats::cut_scales;
use crate::operators::formats::quantize_fp8::{format_of, layout_of_oracle};
use crate::record::Operands;

/// The operator.
pub struct Linear;

/// The tensor that a result is added to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Before {
    /// Nothing.
    Absent,
    /// A separate tensor.
    Apart,
    /// The memory of y, and a separate tensor for dw.
    InPlace,
}

/// The contents of quantized operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Codes {
    /// Codes of normal values whose largest ones are those of their format, with scales some powers
    /// of two apart.
    Drawn,
    /// Any code but NaN, including subnormal ones and zeros of both signs.
    Any,
    /// Small whole numbers, and powers of two as scales that differ by group and by row. The result
    /// is exact, bit for bit.
    Exact,
    /// As drawn ones, of MXFP4. The scales of the first 128 rows of w are 2^14 apart, the most that
    /// a block folds into e4m3 (inference 5.5). Those of other rows are up to 2^40 apart.
    FarApart,
    /// As drawn ones, of MXFP4. Kernels must not multiply sums of products by these scales of w
    /// before that of x. They are 2^84 to 2^125 in even rows, 2^-80 to 2^-64 in odd ones.
    Extreme,
    /// As drawn ones, of MXFP4. Scales of w are too small for that, 2^-110 to 2^-95, with scales of
    /// x around 2^88.
    SmallWeights,
    /// e4m3 codes: the first product of a row is 2^14 and all others are 1, with scales of 1.
    OneLarge,
    /// e4m3 codes below 2^-5, of FP8 weights, and scales of both operands around 2^64. Products of
    /// two scales leave fp32's range, but the scaled results do not.
    LargeScales,
}

impl Codes {
    /// Drawn contents, where these apply only to FP8 and the weights are not FP8.
    pub(crate) fn of_weights(self, weights: Weights) -> Codes {
        if self == Codes::LargeScales && weights != Weights::Fp8 { Codes::Drawn } else { self }
    }
}

/// A case: formats, sizes, types, what results are added to, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinearCase {
    /// Tokens; 0 is allowed.
    pub num_tokens: usize,
    /// Independent layers of the same sizes, each with a part of x. 0 is one layer whose tensors
    /// have no axis of groups.
    pub num_groups: usize,
    /// Features of a row of y.
    pub out_features: usize,
    /// Features of a row of x.
    pub in_features: usize,
    /// Type of y.
    pub output: Float,
    /// Type of dw.
    pub weight_gradient: Float,
    /// The tensors that y and dw are added to.
    pub before: Before,
    /// Formats of w and x.
    pub weights: Weights,
    /// Values of quantized x that share a scale.
    pub group: usize,
    /// Whether scales are bytes instead of fp32 values.
    pub scale_bytes: bool,
    /// Layout of the scales of rows.
    pub layout: ScaleLayout,
    /// The contents of quantized operands.
    pub codes: Codes,
    /// Which kernels run.
    pub implementation: Implementation,
    /// Whether the device's GEMM library computes the supported bf16 GEMMs instead of our kernels.
    pub library: bool,
    /// x; of quantized x the scales.
    #[serde(flatten)]
    pub data: Data,
}

fn plain(num_tokens: usize, out_features: usize, in_features: usize) -> LinearCase {
    let (output, weight_gradient, before, data) =
        (Float::Bf16, Float::F32, Before::Absent, Data::normal(1.0));
    LinearCase {
        num_tokens,
        num_groups: 0,
        out_features,
        in_features,
        output,
        weight_gradient,
        before,
        weights: Weights::Bf16,
        group: 0,
        scale_bytes: false,
        layout: ScaleLayout::Plain,
        codes: Codes::Drawn,
        implementation: Implementation::Portable,
        library: false,
        data,
    }
}

/// The supported bf16 GEMMs by the device's library.
fn library(case: LinearCase) -> LinearCase {
    LinearCase { library: true, ..case }
}

/// A case of groups: tokens, groups, features out and in.
fn grouped([num_tokens, num_groups, out_features, in_features]: [usize; 4]) -> LinearCase {
    LinearCase { num_groups, ..plain(num_tokens, out_features, in_features) }
}

/// Quantized operands with scales in bytes; `group` of x.
pub(crate) fn quantized(weights: Weights, group: usize, extents: [usize; 3]) -> LinearCase {
    let [num_tokens, out_features, in_features] = extents;
    LinearCase { weights, group, scale_bytes: true, ..plain(num_tokens, out_features, in_features) }
}

fn fp8(extents: [usize; 3]) -> LinearCase {
    quantized(Weights::Fp8, 128, extents)
}

fn hopper(extents: [usize; 3]) -> LinearCase {
    LinearCase { implementation: Implementation::Hopper, ..fp8(extents) }
}

/// MXFP4 with the kernels for Hopper, with that many values of x in a group.
fn mxfp4_hopper(group: usize, extents: [usize; 3]) -> LinearCase {
    LinearCase {
        implementation: Implementation::Hopper,
        ..quantized(Weights::Mxfp4, group, extents)
    }
}

/// The formats that are quantized, with the groups of x.
pub(crate) const QUANTIZED: [(Weights, usize); 4] =
    [(Weights::Fp8, 128), (Weights::Mxfp4, 128), (Weights::Mxfp4, 32), (Weights::Nvfp4, 16)];

impl LinearCase {
    fn is_quantized(&self) -> bool {
        self.weights != Weights::Bf16
    }

    fn is_on_hopper(&self) -> bool {
        self.implementation == Implementation::Hopper
    }

    fn extents(&self) -> [usize; 3] {
        [self.num_tokens, self.out_features, self.in_features]
    }

    fn is_grouped(&self) -> bool {
        self.num_groups > 0
    }

    /// Groups, at least one.
    fn layers(&self) -> usize {
        self.num_groups.max(1)
    }

    /// The axes of inputs, weights and outputs.
    fn axes(&self) -> [Vec<Axis>; 3] {
        let (tokens, groups) =
            (axis("num_tokens", self.num_tokens), axis("num_groups", self.num_groups));
        let groups = self.is_grouped().then(|| groups.multiples(1, MAX_GROUPS));
        let outs = self.features("out_features", self.out_features);
        let ins = self.features("in_features", self.in_features);
        let of = |outer: Option<Axis>, middle: Option<Axis>, inner: [Option<Axis>; 2]| {
            [outer, middle].into_iter().chain(inner).flatten().collect()
        };
        [
            of(Some(tokens), groups, [Some(ins), None]),
            of(groups, Some(outs), [Some(ins), None]),
            of(Some(tokens), groups, [Some(outs), None]),
        ]
    }

    pub(crate) fn of_launcher(&self) -> launcher::Quantized {
        let Self { weights, group, scale_bytes, layout, .. } = *self;
        let implementation = self.implementation.launcher();
        launcher::Quantized { weights, group, scale_bytes, layout, implementation }
    }

    fn products(&self) -> launcher::Products {
        if self.library { launcher::Products::Library } else { launcher::Products::Own }
    }

    pub(crate) fn of_oracle(&self) -> reference::Quantized {
        let weights = match self.weights {
            Weights::Nvfp4 => reference::Weights::Nvfp4,
            Weights::Mxfp4 => reference::Weights::Mxfp4,
            Weights::Fp8 | Weights::Bf16 => reference::Weights::Fp8,
        };
        let accumulator = match self.implementation {
            Implementation::Hopper => Accumulator::HOPPER_E4M3,
            Implementation::Portable => Accumulator::F32,
        };
        let layout = layout_of_oracle(self.layout);
        reference::Quantized {
            weights,
            group: self.group.max(1),
            bytes: self.scale_bytes,
            layout,
            accumulator,
        }
    }

    /// The formats of quantized operands, and their scales.
    fn quantized_operands(&self) -> Vec<TensorSpec> {
        let (tokens, outs) =
            (axis("num_tokens", self.num_tokens), self.features("out_features", self.out_features));
        let hopper = self.is_on_hopper();
        // A byte holds two codes of four bits, and an access takes 16 bytes.
        let codes = 1 + usize::from(self.weights == Weights::Mxfp4);
        let bytes_at_once = if hopper { 16 } else { 1 };
        let bytes =
            axis("code_bytes", self.in_features / 2).multiples(bytes_at_once, MAX_FEATURES / 2);
        let ins =
            axis("in_features", self.in_features).multiples(codes * bytes_at_once, MAX_FEATURES);
        let rows = |spec: TensorSpec| if hopper { spec.aligned_rows() } else { spec.rows() };
        let (of_x, of_w) = match self.weights {
            Weights::Nvfp4 => (bytes, bytes),
            Weights::Mxfp4 => (ins, bytes),
            Weights::Fp8 | Weights::Bf16 => (ins, ins),
        };
        let scales = |name, (dtype, axes): launcher::ScaleTensor| {
            let axes: Vec<Axis> =
                axes.into_iter().map(|(name, extent)| axis(name, extent)).collect();
            let spec = input(name, dtype, &axes);
            if self.before == Before::Absent && self.codes != Codes::Exact {
                spec.of_any_size()
            } else {
                spec
            }
        };
        let [num_tokens, out_features, in_features] = self.extents();
        let [x_scales, w_scales] =
            self.of_launcher().scale_tensors(num_tokens, out_features, in_features);
        let global =
            |name| input(name, DType::F32, &[axis("one", 1)]).when(self.weights == Weights::Nvfp4);
        vec![
            rows(input("x", DType::U8, &[tokens, of_x])),
            rows(input("w", DType::U8, &[outs, of_w])),
            scales("x_scales", x_scales),
            scales("w_scales", w_scales),
            global("x_global_scale"),
            global("w_global_scale"),
        ]
    }

    /// The scales of a cut's rows of x.
    fn cut_x_scales(&self, tensors: &mut Tensors, cut: &Cut) {
        let groups = self.in_features.div_ceil(self.group.max(1));
        let (layout, bytes) = (layout_of_oracle(self.layout), self.scale_bytes);
        let scales = |rows| Scales { layout, bytes, rows, groups };
        cut_scales(tensors, "x_scales", self.num_tokens, scales, cut);
    }

    fn features(&self, name: &'static str, extent: usize) -> Axis {
        axis(name, extent).multiples(1, MAX_FEATURES)
    }
}

/// Features of a benchmark's result that are compared with the oracle.
pub(crate) const SAMPLED_FEATURES: usize = 256;

/// The scales of the sampled blocks of weights.
fn sample_scales(whole: &Whole<'_, Linear>, c: &mut LinearCase, tensors: &mut Tensors) {
    keep_scales(c.weights, whole.further, 0, tensors);
}

/// Keeps the scales of the blocks that these features fill; `axis` of the scales has the blocks.
pub(crate) fn keep_scales(
    weights: Weights,
    features: &[usize],
    axis: usize,
    tensors: &mut Tensors,
) {
    if weights == Weights::Fp8 {
        let firsts = features.iter().filter(|out| out.is_multiple_of(reference::BLOCK));
        let blocks: Vec<usize> = firsts.map(|out| out / reference::BLOCK).collect();
        tensors.put("w_scales", permuted_along(tensors.tensor("w_scales"), axis, &blocks));
    }
}

/// Whether kernels for Hopper support it.
pub(crate) fn takes_hopper(weights: Weights) -> bool {
    matches!(weights, Weights::Fp8 | Weights::Mxfp4)
}

/// Most products of a drawn case: ten runs of the oracle take about a second.
const LARGEST_PRODUCT: usize = 1 << 22;

impl Operator for Linear {
    type Case = LinearCase;

    const ABOUT: About = About {
        name: "linear",
        family: Family::Projections,
        summary: "y = x wᵀ of bf16, FP8, MXFP4 and NVFP4 weights, added to what was there or not; of bf16 its gradients",
        specification: &[
            "inference 0",
            "inference 5.2",
            "inference 5.3",
            "inference 5.5",
            "inference 5.6",
            "inference 5.7",
            "inference 9",
        ],
        paths: &[
            "linear_forward_large",
            "linear_forward_large_folded",
            "linear_forward_one",
            "linear_forward_small",
            "linear_forward_scalar",
            "linear_forward<library>",
            "linear_sum",
            "linear_quantized_large<fp8>",
            "linear_quantized_small<fp8>",
            "linear_quantized_scalar<fp8>",
            "linear_quantized_sum<fp8>",
            "linear_quantized_large<mxfp4, 128>",
            "linear_quantized_small<mxfp4, 128>",
            "linear_quantized_scalar<mxfp4, 128>",
            "linear_quantized_sum<mxfp4, 128>",
            "linear_quantized_large<mxfp4, 32>",
            "linear_quantized_small<mxfp4, 32>",
            "linear_quantized_scalar<mxfp4, 32>",
            "linear_quantized_sum<mxfp4, 32>",
            "linear_quantized_large<nvfp4>",
            "linear_quantized_small<nvfp4>",
            "linear_quantized_scalar<nvfp4>",
            "linear_quantized_sum<nvfp4>",
            "linear_hopper<16>",
            "linear_hopper<64>",
            "linear_hopper_large",
            "linear_hopper_large_pairs",
            "linear_hopper<8, mxfp4, 128>",
            "linear_hopper<16, mxfp4, 128>",
            "linear_hopper<64, mxfp4, 128>",
            "linear_hopper<128, mxfp4, 128>",
            "linear_hopper<8, mxfp4, 32>",
            "linear_hopper<16, mxfp4, 32>",
            "linear_hopper<64, mxfp4, 32>",
            "linear_hopper<128, mxfp4, 32>",
            "backward linear_dx<library>",
            "backward linear_dw<library>",
            "backward linear_dx_large",
            "backward linear_dx_large_folded",
            "backward linear_dx_small",
            "backward linear_dx_scalar",
            "backward linear_dw_large",
            "backward linear_dw_scalar",
            "backward linear_sum",
        ],
        modules: launcher::modules,
        cases: [24, 60, 120],
    };

    const NOT_EXPRESSIBLE: &'static [(&'static str, &'static str)] = &[(
        "gradients of weights from FP8 operands",
        "the model keeps activations in bf16 for them",
    )];

    const GOLDEN: &'static [&'static str] = &["router_topk", "router_hash"];

    fn tensors(c: &LinearCase) -> Specs {
        let [inputs, weights, outputs] = c.axes();
        let (output_type, gradient_type) = (c.output.dtype(), c.weight_gradient.dtype());
        let added = c.before != Before::Absent;
        // A result that is added to another tensor has no scale of its own.
        let of = |name, axes: &[_]| {
            let spec = input(name, DType::Bf16, axes).rows();
            if added { spec } else { spec.of_any_size() }
        };
        let before =
            |name, dtype, axes: &[_]| input(name, dtype, axes).rows().drawn_as(c.data).when(added);
        let aliasing =
            if c.before == Before::InPlace { Aliasing::InPlace } else { Aliasing::OutOfPlace };
        let y = output("y", output_type, &outputs)
            .rows()
            .placed(aliasing, "y_before")
            .only_in("forward");
        let y = if c.codes == Codes::Exact { y.exact() } else { y };
        let y_before = before("y_before", output_type, &outputs);
        if c.is_quantized() {
            let operands = c.quantized_operands();
            return Specs::new(c.data.seed, operands.into_iter().chain([y_before, y]));
        }
        let tensors = [
            of("x", &inputs).drawn_as(c.data),
            of("w", &weights).drawn(Distribution::Normal, 1.0),
            y_before,
            before("dw_before", gradient_type, &weights),
            y,
            upstream("dy", "y").stored_in(DType::Bf16),
            gradient("dx", "x", DType::Bf16).rows(),
            gradient("dw", "w", gradient_type).rows().may_be("dw_before"),
        ];
        Specs::new(c.data.seed, tensors)
    }

    fn check(c: &LinearCase) -> Result<(), Refused> {
        if !c.is_quantized() {
            let quantized = [
                ("group", c.group > 0),
                ("scale_bytes", c.scale_bytes),
                ("layout", c.layout != ScaleLayout::Plain),
                ("codes", c.codes != Codes::Drawn),
                ("implementation", c.implementation != Implementation::Portable),
            ];
            if let Some((field, _)) = quantized.into_iter().find(|(_, given)| *given) {
                return refuse(field, "bf16 weights have no codes, scales and kernels for Hopper");
            }
            return c.data.check();
        }
        if c.library {
            return refuse("library", "true: a library's products are those of bf16 operands");
        }
        if c.is_grouped() {
            return refuse(
                "num_groups",
                format!("{}: layers of bf16 weights alone have groups", c.num_groups),
            );
        }
        let in_bytes = c.weights != Weights::Fp8;
        if !QUANTIZED.contains(&(c.weights, c.group)) {
            return refuse(
                "group",
                format!("{}: FP8 has groups of 128, MXFP4 of 128 or 32, NVFP4 of 16", c.group),
            );
        }
        if in_bytes && !c.scale_bytes {
            return refuse("scale_bytes", "false: scales of four-bit weights are bytes");
        }
        if !c.scale_bytes && c.layout == ScaleLayout::Blocked {
            return refuse("layout", "blocked: tiles of scales hold bytes");
        }
        if c.weights == Weights::Nvfp4 && !c.in_features.is_multiple_of(2) {
            return refuse("in_features", format!("{}: two codes lie in a byte", c.in_features));
        }
        if in_bytes && c.codes == Codes::OneLarge {
            return refuse("codes", "one_large: of FP8 weights alone");
        }
        if c.codes == Codes::LargeScales && c.weights != Weights::Fp8 {
            return refuse("codes", "large_scales: of FP8 weights alone");
        }
        if matches!(c.codes, Codes::FarApart | Codes::Extreme | Codes::SmallWeights)
            && c.weights != Weights::Mxfp4
        {
            return refuse("codes", "far_apart, extreme and small_weights: of MXFP4 weights alone");
        }
        if c.is_on_hopper() && !takes_hopper(c.weights) {
            return refuse("implementation", "hopper: of FP8 and MXFP4 weights alone");
        }
        if c.codes == Codes::Exact && c.before != Before::Absent {
            return refuse("codes", "exact: a result that is added to something is rounded");
        }
        c.data.check()
    }

    fn cannot_run(c: &LinearCase, environment: &Environment) -> Option<String> {
        c.implementation.launcher().cannot_run_on(environment)
    }

    fn fastest(c: &LinearCase, environment: &Environment) -> LinearCase {
        let multiple = if c.weights == Weights::Fp8 { 16 } else { 32 };
        let takes = takes_hopper(c.weights) && c.in_features.is_multiple_of(multiple);
        let implementation =
            if takes { Implementation::fastest_on(environment) } else { c.implementation };
        LinearCase { implementation, library: !c.is_quantized(), ..c.clone() }
    }

    fn strategy(profile: Profile) -> BoxedStrategy<LinearCase> {
        let [tokens, features] = profile.of([[40usize, 150], [200, 300], [700, 3000]]);
        let features = move || prop_oneof![3 => extent(features, 16), 1 => 1..=features];
        let before = select(vec![Before::Absent, Before::Absent, Before::Apart, Before::InPlace]);
        let tokens = prop_oneof![2 => extent(tokens, 16), 1 => 0..=17usize];
        let types = (Float::strategy(), Float::strategy(), before);
        let groups = prop_oneof![2 => Just(0), 1 => 1..=5usize];
        let format = prop_oneof![2 => groups.prop_map(|groups| (groups, None)),
            3 => select(QUANTIZED.to_vec()).prop_map(|format| (0, Some(format)))];
        let layout = select(vec![ScaleLayout::Plain, ScaleLayout::MnMajor, ScaleLayout::Blocked]);
        let codes =
            select(vec![Codes::Drawn, Codes::Drawn, Codes::Any, Codes::Exact, Codes::LargeScales]);
        let kernels = (layout, any::<bool>(), codes, any::<bool>());
        (
            tokens,
            features(),
            features(),
            types,
            (format, kernels, any::<bool>()),
            Data::strategy(-30..=30),
        )
            .prop_map(
                |(
                    tokens,
                    outs,
                    ins,
                    (output, weight_gradient, before),
                    (format, kernels, library),
                    data,
                )| {
                    let (groups, format) = format;
                    let num_tokens = tokens.min(LARGEST_PRODUCT / (outs * ins * groups.max(1)));
                    let plain = grouped([num_tokens, groups, outs, ins]);
                    let case = LinearCase { output, weight_gradient, before, data, ..plain };
                    match format {
                        Some(format) => drawn_quantized(case, format, kernels),
                        None => LinearCase { library, ..case },
                    }
                },
            )
            .boxed()
    }

    fn typical() -> Vec<LinearCase> {
        let added = plain(5, 24, 72).with(|case| {
            case.before = Before::Apart;
            case.output = Float::F32;
        });
        let narrow = plain(18, 9, 13).with(|case| case.weight_gradient = Float::Bf16);
        let in_layout = |layout| move |case| LinearCase { layout, ..case };
        let fp32 = fp8([5, 24, 144]).with(|case| {
            case.scale_bytes = false;
            case.before = Before::Apart;
        });
        vec![
            plain(18, 24, 40),
            added,
            narrow,
            grouped([18, 3, 24, 40]),
            grouped([3, 2, 9, 13]).with(|case| case.before = Before::Apart),
            fp8([18, 24, 144]),
            in_layout(ScaleLayout::MnMajor)(fp32),
            hopper([5, 24, 144]),
            quantized(Weights::Mxfp4, 128, [5, 24, 96]),
            mxfp4_hopper(128, [5, 24, 96]),
            mxfp4_hopper(32, [5, 24, 96]).then(in_layout(ScaleLayout::Blocked)),
            quantized(Weights::Mxfp4, 32, [5, 24, 72]).then(in_layout(ScaleLayout::MnMajor)),
            quantized(Weights::Nvfp4, 16, [5, 24, 96]).then(in_layout(ScaleLayout::Blocked)),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<LinearCase> {
        let f32s = |case| LinearCase { output: Float::F32, ..case };
        let before = |before| move |case| LinearCase { before, ..case };
        let mut cases = vec![
            plain(0, 24, 40),
            plain(0, 24, 40).then(before(Before::InPlace)),
            plain(1, 1, 1),
            plain(1, 8, 8),
            // One row more than the small tiles have, one more than a k-block, a last k-block of
            // eight.
            plain(16, 72, 128),
            plain(17, 72, 64),
            plain(3, 136, 72).then(f32s),
            // Rows of y that are whole accesses in fp32 but not in bf16; odd ones.
            plain(4, 12, 16).then(f32s),
            plain(4, 12, 16),
            plain(65, 67, 70),
            // Two tiles and a partial one in each direction. More rows of tiles than one group of
            // tiles has, with one and with two columns of tiles.
            plain(130, 136, 72),
            plain(1030, 8, 8),
            plain(1030, 136, 8),
            // Split-k, with sums added to existing values. The k-blocks do not divide evenly among
            // the parts.
            plain(2, 8, 1480).then(f32s).then(before(Before::Apart)),
            plain(17, 16, 584).then(before(Before::InPlace)),
            plain(600, 8, 8).then(f32s).then(before(Before::InPlace)),
            plain(5, 7, 535).then(before(Before::Apart)),
            // One token: rows of w that one warp reads, with more features than a block has. Rows
            // shared by two, four and eight warps of a block, of which the last one has a few
            // values or none.
            plain(1, 265, 1040).then(f32s).then(before(Before::Apart)),
            plain(1, 280, 24).then(before(Before::InPlace)),
            plain(1, 41, 584),
            plain(1, 21, 1544).then(f32s),
            plain(1, 5, 3336).then(before(Before::InPlace)),
            grouped([1, 3, 20, 1032]),
            grouped([1, 2, 9, 40]).then(f32s).then(before(Before::Apart)),
            // Shapes that a library supports, with fp32 accumulation into y; bf16 that it would
            // round twice; one row too few for it; rows not at multiples of 16 bytes.
            plain(17, 40, 72).then(library),
            plain(18, 24, 40).then(before(Before::InPlace)).then(library),
            plain(33, 20, 24).then(f32s).then(before(Before::Apart)).then(library),
            plain(40, 8, 16).then(f32s).then(before(Before::InPlace)).then(library),
            plain(16, 24, 16).then(library),
            plain(18, 13, 21).then(library),
            plain(0, 24, 16).then(library),
        ];
        cases.extend([
            grouped([0, 2, 24, 40]),
            grouped([1, 1, 8, 16]),
            // More groups than tokens; small tiles, large ones, scalar ones; split-k, with sums in
            // each group.
            grouped([3, 16, 72, 64]),
            grouped([130, 2, 136, 72]),
            grouped([5, 3, 7, 13]),
            grouped([2, 3, 20, 584]).then(before(Before::InPlace)),
            grouped([300, 2, 12, 8]).then(f32s).then(before(Before::Apart)),
            // By a library: one layer, many, fp32 accumulation into y; too few rows; rows that it
            // does not support.
            grouped([17, 1, 40, 72]).then(library),
            grouped([66, 5, 24, 40]).then(library),
            grouped([33, 3, 16, 24]).then(f32s).then(before(Before::InPlace)).then(library),
            grouped([16, 2, 24, 16]).then(library),
            grouped([40, 3, 7, 13]).then(library),
        ]);
        cases.extend(quantized_edge_cases());
        if profile == Profile::Full {
            let one_large = |case| f32s(case).with(|case| case.codes = Codes::OneLarge);
            cases.extend([fp8([1, 2, 7168]).then(one_large), hopper([1, 2, 7168]).then(one_large)]);
            cases.extend([hopper([300, 1030, 4096]), hopper([1, 7168, 1536])]);
            // On an H200: more rounds of a block than are listed.
            cases.extend([hopper([1, 1_100_000, 16]), mxfp4_hopper(128, [1, 2_200_000, 32])]);
            cases.extend([
                plain(1, 7168, 1536),
                plain(300, 1030, 4096),
                plain(4096, 264, 520).then(f32s),
            ]);
            cases.extend([grouped([1, 16, 1024, 4096]), grouped([200, 4, 264, 1032])]);
        }
        cases
    }

    fn amend(c: &LinearCase, tensors: &mut Tensors) -> OracleResult<()> {
        if c.is_quantized() {
            set_codes(c, "x", c.weights != Weights::Nvfp4, tensors);
            set_codes(c, "w", c.weights == Weights::Fp8, tensors);
            let oracle = c.of_oracle();
            // Large x has large scales.
            let exponent = c.data.magnitude.log2().round() as i32;
            set_scales(
                c,
                "x_scales",
                (oracle.x_scales(c.num_tokens, c.in_features), 1),
                exponent,
                tensors,
            );
            set_scales(
                c,
                "w_scales",
                (oracle.w_scales(c.out_features, c.in_features), 1),
                0,
                tensors,
            );
            for (name, scale) in [("x_global_scale", 0.011), ("w_global_scale", 0.37)] {
                if tensors.get(name).is_some() {
                    tensors.set(name, &[if c.codes == Codes::Exact { 0.25 } else { scale }]);
                }
            }
        }
        Ok(())
    }

    fn forward(c: &LinearCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        if c.is_grouped() {
            return reference::grouped_forward(&t.named()?, rounding);
        }
        if !c.is_quantized() {
            return reference::forward(&t.named()?, rounding);
        }
        if c.codes != Codes::Exact {
            return reference::forward_quantized(&t.named()?, &c.of_oracle(), rounding);
        }
        let y = reference::forward_quantized(&t.named()?, &c.of_oracle(), &mut Rounding::exact())?;
        let y = y.tensor("y")?;
        let mut stored = crate::operator::fields::elements(y)?;
        format_of(c.output).round_all(&mut stored);
        Ok(Named::new().with("y", crate::operator::fields::tensor(stored, y.dims())?))
    }

    fn backward(c: &LinearCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        if c.is_quantized() {
            return Ok(Named::new());
        }
        if c.is_grouped() {
            return reference::grouped_backward(&t.named()?, rounding);
        }
        reference::backward(&t.named()?, rounding)
    }

    fn workspaces(
        c: &LinearCase,
        _: &Views,
        device: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        if c.is_quantized() {
            let bytes = launcher::quantized_workspace_bytes(
                device,
                c.num_tokens,
                c.out_features,
                c.in_features,
            );
            return Ok(vec![("workspace", bytes)]);
        }
        let of = |bytes: fn(&Device, usize, usize, usize, usize) -> usize| {
            bytes(device, c.layers(), c.num_tokens, c.out_features, c.in_features)
        };
        let (forward, backward) =
            (of(launcher::forward_workspace_bytes), of(launcher::backward_workspace_bytes));
        Ok(vec![("workspace", forward.max(backward))])
    }

    fn launch(c: &LinearCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        if c.is_quantized() {
            return run.launch(|device| launcher::forward_quantized(device, v, c.of_launcher()));
        }
        let own = v.without(&["dy", "dx", "dw"]);
        if c.is_grouped() {
            return run.launch(|device| launcher::grouped_forward(device, &own, c.products()));
        }
        run.launch(|device| launcher::forward(device, &own, c.products()))
    }

    fn launch_backward(
        c: &LinearCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        if c.is_quantized() {
            return Ok(());
        }
        let (device, own) = (run.device(), v.without(&["y"]));
        let ran = match c.is_grouped() {
            true => launcher::grouped_backward(device, &own, c.products())?,
            false => launcher::backward(device, &own, c.products())?,
        };
        run.ran_backward(ran);
        Ok(())
    }

    fn invariant(_: &LinearCase, path: bool) -> &'static [BatchAxis] {
        if path { BatchAxis::OF_ROWS } else { &[] }
    }

    fn invariant_cases() -> Vec<LinearCase> {
        // Blocks that take all parts of k, of the forward and of dx.
        let folded = [[260, 8, 264], [260, 264, 8]].map(|[tokens, outs, ins]| {
            plain(tokens, outs, ins).with(|case| case.output = Float::F32)
        });
        Self::typical().into_iter().chain(folded).collect()
    }

    fn batches(c: &LinearCase, batches: &mut Batches<'_, Self>) {
        batches.rows_with("num_tokens", |tensors, cut| {
            c.cut_x_scales(tensors, cut);
            Vec::new()
        });
    }

    fn laws(c: &LinearCase, laws: &mut Laws<'_, Self>) {
        if c.is_quantized() {
            return laws_of_scales(c, laws);
        }
        if c.before == Before::Absent {
            laws.scale("x counts once", "x", 0.5, &[("y", 0.5), ("dx", 1.0), ("dw", 0.5)]);
            laws.scale("w counts once", "w", 0.5, &[("y", 0.5), ("dx", 0.5), ("dw", 1.0)]);
            laws.scale_upstreams();
        }
        laws.separate("num_tokens", "tokens may be permuted");
        laws.separate("out_features", "outputs may be permuted");
        laws.independent("in_features");
        if c.is_grouped() {
            laws.separate("num_groups", "groups may be permuted");
        }
    }

    /// dw is not a gradient where it is added to existing values.
    fn is_smooth(c: &LinearCase) -> bool {
        let elements = c.layers() * c.out_features.max(c.num_tokens) * c.in_features;
        !c.is_quantized() && c.before == Before::Absent && elements <= 4096
    }

    /// The logits of a router.
    fn golden(file: &mut Reading<'_>) -> Result<Vec<Golden<LinearCase>>, String> {
        let (rows, weight) = (["..tokens", "hidden"], ["experts", "hidden"]);
        file.floats("in.hidden", &rows)?;
        file.floats("param.gate.weight", &weight)?;
        let [tokens, experts, hidden] =
            [file.extent("tokens")?, file.extent("experts")?, file.extent("hidden")?];
        let golden =
            Golden::new(LinearCase { output: Float::F32, ..plain(tokens, experts, hidden) });
        let golden = golden.stored(file, "x", "in.hidden", &rows)?;
        let golden = golden.stored(file, "w", "param.gate.weight", &weight)?;
        Ok(vec![golden.expect(file, "y", "out.logits", &["tokens", "experts"])?])
    }

    /// Projections of the model: bf16 for training, all formats of serving, for few and for many
    /// tokens.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        use Direction::{Backward, Forward};
        let of = |case: LinearCase, direction: Direction| {
            let [num_tokens, out_features, in_features] = case.extents();
            let portable = match case.weights {
                Weights::Fp8 => case.implementation == Implementation::Portable,
                Weights::Bf16 => !case.library,
                Weights::Mxfp4 | Weights::Nvfp4 => false,
            };
            let weights = case.weights;
            let format = format!("{weights:?}").to_lowercase();
            let groups = if case.is_grouped() {
                format!(" in {} groups", case.num_groups)
            } else {
                String::new()
            };
            let suffix = Implementation::suffix(portable);
            let name =
                format!("{num_tokens}x{out_features}x{in_features} {format}{groups}{suffix}");
            let products = case.extents().map(|extent| extent as f64).iter().product::<f64>();
            let flops = 2.0 * case.layers() as f64 * products;
            // Tensors without a token axis are drawn along their rows.
            let benchmark = Benchmark::new(direction, name, case, "num_tokens")
                .also_drawn_along("out_features");
            // A result with few tokens needs all weights, except along the axis that is not summed
            // over.
            let further = if direction == Forward { "out_features" } else { "in_features" };
            let benchmark = benchmark.also_sampled_along(further, SAMPLED_FEATURES, spread_blocks);
            let benchmark = Benchmark { sampled: sample_scales, ..benchmark };
            let flops = if direction == Forward { flops } else { 2.0 * flops };
            let operands = match weights {
                Weights::Bf16 => Operands::Bf16,
                Weights::Fp8 | Weights::Mxfp4 | Weights::Nvfp4 => Operands::E4m3,
            };
            benchmark.streaming(&[], 0.0).computing(flops).multiplying(operands)
        };
        let gpu = on_gpu(environment);
        let [projections, gradients]: [Vec<[usize; 3]>; 2] = if gpu {
            let projections = [[65536, 1536], [7168, 16384]].into_iter();
            let of_tokens =
                |[outs, ins]: [usize; 2]| [1, 64, 4096].map(|num_tokens| [num_tokens, outs, ins]);
            [
                projections.flat_map(of_tokens).collect(),
                vec![[4096, 7168, 16384], [4096, 1536, 7168]],
            ]
        } else {
            [vec![[9, 64, 144]], vec![[40, 64, 72]]]
        };
        // The first half of the output projection.
        let groups = if gpu {
            vec![[1, 16, 1024, 4096], [64, 16, 1024, 4096], [4096, 16, 1024, 4096]]
        } else {
            vec![[9, 3, 40, 72]]
        };
        // Decoding, whose narrow layers have too few features for all SMs.
        let decoded: &[[usize; 3]] = match gpu {
            true => &[[1, 1536, 7168], [1, 512, 7168], [16, 7168, 16384]],
            false => &[],
        };
        let bf16 = |&[num_tokens, outs, ins]: &[usize; 3]| plain(num_tokens, outs, ins);
        // Our own kernels next to those of a library, which does not support few rows.
        let by_either = |case: LinearCase| {
            let own = (case.num_tokens > 16).then(|| case.clone());
            [Some(library(case)), own].into_iter().flatten()
        };
        let forward = projections
            .iter()
            .chain(decoded)
            .map(bf16)
            .flat_map(by_either)
            .map(|case| of(case, Forward));
        let backward =
            gradients.iter().map(bf16).flat_map(by_either).map(|case| of(case, Backward));
        let in_groups = groups
            .iter()
            .flat_map(|&extents| by_either(grouped(extents)))
            .map(|case| of(case, Forward));
        let groups_backward =
            groups.last().into_iter().flat_map(|&extents| by_either(grouped(extents)));
        let groups_backward = groups_backward.map(|case| of(case, Backward));
        let serving =
            [(Weights::Fp8, 128), (Weights::Mxfp4, 128), (Weights::Nvfp4, 16)].into_iter();
        let serving = serving.flat_map(|(weights, group)| {
            projections.iter().map(move |&extents| quantized(weights, group, extents))
        });
        let fastest = serving.map(|case| of(Self::fastest(&case, environment), Forward));
        let portable = projections
            .iter()
            .filter(|_| Implementation::fastest_on(environment) == Implementation::Hopper);
        let portable = portable.map(|&extents| of(fp8(extents), Forward));
        forward
            .chain(in_groups)
            .chain(backward)
            .chain(groups_backward)
            .chain(fastest)
            .chain(portable)
            .collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![
            // More features than are sampled, and a partial last block of them.
            Reduced::forward(
                &["4096x65536x1536 bf16", "4096x65536x1536 bf16 portable"],
                json!({"num_tokens": 21, "out_features": 400, "in_features": 72}),
                json!({"num_tokens": 4, "out_features": 16}),
            ),
            Reduced::backward(
                &["4096x7168x16384 bf16", "4096x7168x16384 bf16 portable"],
                json!({"num_tokens": 21, "out_features": 40, "in_features": 400}),
                json!({"num_tokens": 4, "out_features": 16}),
            ),
            Reduced::forward(
                &["4096x1024x4096 bf16 in 16 groups"],
                json!({"num_tokens": 21, "num_groups": 3, "out_features": 400, "in_features": 72}),
                json!({"num_tokens": 4, "out_features": 16}),
            ),
            Reduced::backward(
                &["4096x1024x4096 bf16 in 16 groups"],
                json!({"num_tokens": 21, "num_groups": 3, "out_features": 40, "in_features": 400}),
                json!({"num_tokens": 4, "out_features": 16}),
            ),
            Reduced::forward(
                &[
                    "4096x7168x16384 fp8",
                    "4096x7168x16384 fp8 portable",
                    "4096x7168x16384 mxfp4",
                    "4096x7168x16384 nvfp4",
                ],
                json!({"num_tokens": 21, "out_features": 400, "in_features": 160}),
                json!({"num_tokens": 4, "out_features": 16}),
            ),
        ]
    }
}

/// A drawn case of quantized operands, limited to what the format supports.
fn drawn_quantized(
    case: LinearCase,
    (weights, group): (Weights, usize),
    (layout, bytes, codes, on_hopper): (ScaleLayout, bool, Codes, bool),
) -> LinearCase {
    let fp8 = weights == Weights::Fp8;
    let on_hopper = takes_hopper(weights) && on_hopper;
    let far_apart = on_hopper && !fp8 && !bytes && codes == Codes::Exact;
    let codes = if far_apart { Codes::FarApart } else { codes.of_weights(weights) };
    let scale_bytes = bytes || !fp8;
    let layout =
        if scale_bytes || layout != ScaleLayout::Blocked { layout } else { ScaleLayout::MnMajor };
    let implementation = if on_hopper { Implementation::Hopper } else { Implementation::Portable };
    let multiple = (if on_hopper { 16 } else { 1 }) * (if fp8 { 1 } else { 2 });
    LinearCase {
        in_features: case.in_features.next_multiple_of(multiple),
        before: if codes == Codes::Exact { Before::Absent } else { case.before },
        weights,
        group,
        scale_bytes,
        layout,
        codes,
        implementation,
        ..case
    }
}

/// Around tiles, stages and groups of every format; exact results; the accumulator of e4m3
/// products.
fn quantized_edge_cases() -> Vec<LinearCase> {
    let f32s = |case| LinearCase { output: Float::F32, ..case };
    let exact = |case| LinearCase { codes: Codes::Exact, ..f32s(case) };
    let any = |case| LinearCase { codes: Codes::Any, ..case };
    let fp32 = |case| LinearCase { scale_bytes: false, ..case };
    let in_layout = |layout, case| LinearCase { layout, ..case };
    let before = |before, case| LinearCase { before, ..case };
    let (mn, tiles) = (ScaleLayout::MnMajor, ScaleLayout::Blocked);
    let one_large = |case| LinearCase { codes: Codes::OneLarge, ..f32s(case) };
    let small_scales = |case| LinearCase { data: Data::normal(2f64.powi(-142)), ..case };
    let large_scales = |case| LinearCase { codes: Codes::LargeScales, ..f32s(case) };
    let mut cases = vec![
        fp8([0, 24, 144]),
        hopper([0, 24, 144]),
        fp8([1, 1, 1]),
        hopper([1, 1, 16]),
        // Blocks of weights: one and a few rows, one and a few values more.
        exact(fp8([3, 136, 144])),
        exact(fp32(fp8([17, 131, 133]))),
        exact(in_layout(mn, fp8([18, 260, 320]))),
        exact(in_layout(mn, fp32(fp8([5, 24, 512])))),
        exact(in_layout(tiles, fp8([130, 9, 400]))),
        any(fp8([4, 20, 192])),
        any(fp32(fp8([4, 21, 71]))),
        before(Before::InPlace, fp8([2, 8, 584])),
        exact(hopper([3, 136, 144])),
        exact(fp32(hopper([65, 264, 272]))),
        exact(in_layout(mn, hopper([18, 20, 1152]))),
        // Whole tiles.
        exact(hopper([16, 128, 256])),
        // Products of two scales that are not normal values, while the sums are.
        small_scales(f32s(hopper([20, 12, 272]))),
        small_scales(f32s(fp32(hopper([5, 260, 128])))),
        large_scales(fp8([18, 131, 272])),
        large_scales(hopper([20, 12, 272])),
        large_scales(fp32(hopper([5, 260, 128]))),
        large_scales(hopper([129, 264, 384])),
        exact(in_layout(tiles, hopper([130, 12, 400]))),
        // Few tokens: a last work tile that two blocks share, with more k-blocks than stages.
        hopper([3, 648, 1168]),
        // Pairs of tiles of tokens: whole ones, a partial second one, and none after many tiles. A
        // third work tile for each block, of one k-block; more k-blocks than stages.
        exact(fp32(hopper([256, 512, 272]))),
        any(in_layout(mn, hopper([641, 520, 128]))),
        f32s(hopper([129, 264, 1168])),
        f32s(hopper([65, 264, 1168])),
        any(hopper([1921, 16, 144])),
        any(hopper([4, 20, 192])),
        before(Before::Apart, f32s(hopper([2, 8, 1168]))),
        one_large(fp8([1, 2, 2048])),
        one_large(hopper([1, 2, 2048])),
    ];
    // Few tokens of MXFP4: a last work tile that two blocks share; an SM holds two blocks.
    cases.push(mxfp4_hopper(32, [3, 1288, 1056]));
    // On five SMs: as many rounds of a block as are listed, with the last one for all blocks, and
    // one more.
    cases.extend([exact(hopper([1, 40_950, 16])), exact(hopper([1, 40_970, 16]))]);
    let far_apart = |case| LinearCase { codes: Codes::FarApart, ..case };
    let extreme = |case| LinearCase { codes: Codes::Extreme, ..case };
    let small_weights = |case| LinearCase { codes: Codes::SmallWeights, ..case };
    for group in [128, 32] {
        let of = |extents| mxfp4_hopper(group, extents);
        cases.extend([
            of([0, 24, 96]),
            of([1, 1, 32]),
            // Whole blocks; a last one of one group, with rows that are not a whole block; more
            // k-blocks than stages.
            f32s(of([16, 128, 256])),
            f32s(of([18, 131, 160])),
            any(in_layout(mn, of([3, 20, 1184]))),
            any(in_layout(tiles, of([66, 140, 352]))),
            before(Before::InPlace, f32s(in_layout(tiles, of([2, 8, 544])))),
            exact(of([3, 136, 160])),
            exact(of([11, 136, 160])),
            exact(in_layout(mn, of([65, 24, 352]))),
            exact(in_layout(tiles, of([130, 140, 96]))),
            // Scales far apart; scales of values that are added one by one.
            far_apart(f32s(of([5, 136, 288]))),
            far_apart(in_layout(tiles, of([20, 140, 160]))),
            far_apart(in_layout(mn, of([67, 136, 64]))),
            extreme(f32s(of([5, 20, 160]))),
            extreme(in_layout(mn, of([66, 136, 64]))),
            extreme(in_layout(tiles, of([130, 9, 96]))),
            small_weights(f32s(of([9, 24, 160]))),
            // Tiles of a last round, each shared with a block that has no tile.
            f32s(of([2, 2100, 32])),
        ]);
    }
    for (weights, group) in QUANTIZED.into_iter().skip(1) {
        let of = |extents| quantized(weights, group, extents);
        cases.extend([
            of([0, 24, 96]),
            of([1, 1, 2]),
            exact(of([3, 72, 96])),
            exact(in_layout(mn, of([17, 20, 160]))),
            exact(in_layout(tiles, of([33, 130, 42]))),
            any(in_layout(tiles, of([5, 9, 352]))),
            before(Before::InPlace, f32s(of([2, 8, 544]))),
        ]);
    }
    cases
}

/// Scales count once: doubling all of them doubles y. One token's scales do not affect other
/// tokens.
fn laws_of_scales(c: &LinearCase, laws: &mut Laws<'_, Linear>) {
    if c.before == Before::Absent {
        let halved = [("y", 0.5)];
        if c.weights == Weights::Nvfp4 {
            laws.scale("the scale of x counts once", "x_global_scale", 0.5, &halved);
            laws.scale("the scale of w counts once", "w_global_scale", 0.5, &halved);
        } else if c.scale_bytes {
            law_of_doubled_bytes(c, laws, "scales of x count once", "x_scales");
            law_of_doubled_bytes(c, laws, "scales of w count once", "w_scales");
        } else if has_moderate_scales(c) {
            laws.scale("scales of x count once", "x_scales", 0.5, &halved);
            laws.scale("scales of w count once", "w_scales", 0.5, &halved);
        }
    }
    // In other layouts, and where rows of w share scales, rows have no separate axis.
    if c.layout == ScaleLayout::Plain {
        laws.separate("num_tokens", "tokens may be permuted");
        if c.weights != Weights::Fp8 {
            laws.separate("out_features", "outputs may be permuted");
        }
    }
}

/// Doubling all scales in bytes doubles y, where every value stays in fp32's range.
fn law_of_doubled_bytes(
    c: &LinearCase,
    laws: &mut Laws<'_, Linear>,
    law: &'static str,
    name: &'static str,
) {
    if let Some(scales) = doubled(laws.tensors(), name).filter(|_| has_moderate_scales(c)) {
        laws.law(law, |v| v.tensors.put(name, scales), [("y", Relation::Times(2.0))]);
    }
}

/// Whether products of a token's scale and a weight's are normal fp32 values. A kernel may multiply
/// them first, so sums scale exactly only where that product is exact.
fn has_moderate_scales(c: &LinearCase) -> bool {
    (-40..=40).contains(&(c.data.magnitude.log2() as i32))
}

/// The scales of this name as bytes of powers of two that are twice as large. `None` where they are
/// not bytes, or where one of them would leave the range in which products of two stay normal fp32
/// values. Padding stays NaN.
pub(crate) fn doubled(tensors: &Tensors, name: &str) -> Option<HostTensor> {
    let scales = tensors.get(name)?;
    let may = |byte: &u8| (32..=222).contains(byte) || *byte == 255;
    if scales.dtype == DType::F32 || !scales.bytes.iter().all(may) {
        return None;
    }
    let bytes =
        scales.bytes.iter().map(|&byte| if byte == 255 { byte } else { byte + 1 }).collect();
    Some(HostTensor { bytes, ..scales.clone() })
}

/// Sets the codes of an operand, in e4m3 or, two in a byte, in e2m1.
pub(crate) fn set_codes(c: &LinearCase, name: &'static str, e4m3: bool, tensors: &mut Tensors) {
    let mut draw = Draw::new(c.data.seed, name);
    let row = if e4m3 { c.in_features } else { c.in_features / 2 };
    let bytes = tensors.bytes_mut(name).unwrap_or_default();
    let drawn = match (e4m3, c.codes) {
        // The sign takes a word.
        (true, Codes::Drawn | Codes::FarApart | Codes::Extreme | Codes::SmallWeights) => {
            draw.each(bytes.len(), 1 + NORMAL_WORDS, |draw| e4m3_code(c.codes, 0, draw))
        }
        (true, _) => (0..bytes.len()).map(|at| e4m3_code(c.codes, at % row, &mut draw)).collect(),
        // Each of two codes of 16 takes one.
        (
            false,
            Codes::Drawn | Codes::Any | Codes::FarApart | Codes::Extreme | Codes::SmallWeights,
        ) => draw.each(bytes.len(), 2, |draw| e2m1_codes(c.codes, draw)),
        (false, _) => (0..bytes.len()).map(|_| e2m1_codes(c.codes, &mut draw)).collect(),
    };
    bytes.copy_from_slice(&drawn);
    if c.codes == Codes::FarApart && name == "w" {
        // The row with the largest scales is 0. Next to it, the smallest values would be lost in
        // the error of a sum.
        let rows = bytes.chunks_mut(row).take(128);
        rows.step_by(3).for_each(|codes| codes.fill(0));
    }
}

fn e4m3_code(codes: Codes, column: usize, draw: &mut Draw) -> u8 {
    let sign = u8::from(draw.rng().random::<bool>()) << 7;
    match codes {
        Codes::Drawn | Codes::FarApart | Codes::Extreme | Codes::SmallWeights => {
            let size = (120.0 * draw.normal()).abs().min(448.0);
            sign | Format::E4M3.code(Format::E4M3.nearest(size)) as u8
        }
        Codes::Any => sign | draw.rng().random_range(0..0x7f),
        // 0, 1, 2.
        Codes::Exact => sign | [0, 0x38, 0x40][draw.rng().random_range(0..3)],
        // 128, and 1.
        Codes::OneLarge => {
            if column == 0 {
                0x70
            } else {
                0x38
            }
        }
        // Subnormal values from 2^-9 on, and two powers of two of normal ones.
        Codes::LargeScales => sign | draw.rng().random_range(0..0x10),
    }
}

fn e2m1_codes(codes: Codes, draw: &mut Draw) -> u8 {
    let mut code = || match codes {
        Codes::Exact => [0, 2, 4, 8, 10, 12][draw.rng().random_range(0..6)],
        _ => draw.rng().random_range(0..16u8),
    };
    code() | code() << 4
}

/// Sets the scales of an operand, or of that many consecutive operands, around a power of two.
/// Their padding is NaN, which no kernel may read.
pub(crate) fn set_scales(
    c: &LinearCase,
    name: &'static str,
    (scales, parts): (Scales, usize),
    exponent: i32,
    tensors: &mut Tensors,
) {
    let mut draw = Draw::new(c.data.seed, name);
    let number = |at: usize, draw: &mut Draw| -> i32 {
        let (row, group) = ((at / scales.groups.max(1)) as i32, (at % scales.groups.max(1)) as i32);
        match c.codes {
            // Up to 2^6 apart between groups and between adjacent rows, so that the sums of a row
            // fit fp32.
            Codes::Exact => {
                (5 * group + 3 * row) % 7
                    + if c.weights == Weights::Nvfp4 { row % 2 } else { row * 11 % 30 - 15 }
            }
            Codes::OneLarge => 0,
            // One scale for each row; the row with the largest ones is 0.
            Codes::FarApart if name == "w_scales" && row < 128 => {
                exponent + [7, -7, -6][row as usize % 3]
            }
            Codes::FarApart if name == "w_scales" => exponent + draw.rng().random_range(-20..=20),
            Codes::Extreme if name == "w_scales" && row % 2 == 0 => {
                draw.rng().random_range(84..=125)
            }
            Codes::Extreme if name == "w_scales" => draw.rng().random_range(-80..=-64),
            Codes::Extreme => -40 + draw.rng().random_range(-6..=6),
            Codes::SmallWeights if name == "w_scales" => draw.rng().random_range(-110..=-95),
            Codes::SmallWeights => 88 + draw.rng().random_range(-6..=6),
            Codes::LargeScales => 64 + draw.rng().random_range(-2..=2),
            _ => exponent + draw.rng().random_range(-6..=6),
        }
    };
    let of_part = (scales.rows * scales.groups).max(1);
    let exponents: Vec<i32> =
        (0..parts * scales.rows * scales.groups).map(|at| number(at, &mut draw)).collect();
    if !c.scale_bytes {
        let factor = |draw: &mut Draw| match c.codes {
            Codes::Exact | Codes::OneLarge => 1.0,
            _ => draw.rng().random_range(1.0..2.0),
        };
        let scale = |exponent: i32| Some(2f64.powi(exponent) * factor(&mut draw));
        let numbers: Vec<Option<f64>> = exponents.into_iter().map(scale).collect();
        let placed = numbers.chunks(of_part).flat_map(|part| scales.arranged(part));
        return tensors
            .set(name, &placed.map(|scale| scale.unwrap_or(f64::NAN)).collect::<Vec<f64>>());
    }
    let byte = |exponent: i32| match (c.weights, c.codes) {
        // Powers of two of e4m3; otherwise any finite scale.
        (Weights::Nvfp4, Codes::Exact) => ((exponent + 7) << 3) as u8,
        (Weights::Nvfp4, _) => draw.rng().random_range(0..0x7f),
        _ => (127 + exponent).clamp(0, 254) as u8,
    };
    let bytes: Vec<Option<u8>> = exponents.into_iter().map(byte).map(Some).collect();
    let placed = bytes.chunks(of_part).flat_map(|part| scales.arranged(part));
    let placed: Vec<u8> = placed.map(|byte| byte.unwrap_or(255)).collect();
    if scales.in_words() {
        return tensors.set_i32s(name, &words_of(&placed));
    }
    tensors.bytes_mut(name).unwrap_or_default().copy_from_slice(&placed);
}
