//! `grouped_linear_swiglu`: launchers of `kernels/cuda/experts/grouped_linear_swiglu.cu`,
//! `grouped_linear_swiglu_hopper.cu` and `grouped_linear_swiglu_hopper_large.cu` (inference 5.4,
//! 5.5, 5.7, 5.8, 11.1, 11.3).

use crate::arguments::{Argument, Arguments, Signature, read, write};
use crate::experts::grouped_linear::{
    Extents, Grouped, begin_units, blocks, of_experts, units_module,
};
use crate::experts::swiglu_quantize;
use crate::formats::gate_up_interleave::GRANULE;
use crate::formats::scale_layout::Scales;
use crate::projections::linear::{
    BLOCK, FEW_ROWS, LARGE_TILE, ScaleAxes, ScaleTensor, Weights, expert_tile, hopper_defines,
    large_boxes, maps_of, quantized_defines, token_tiles, with_maps,
};
use dsv4_runtime::params::Params;
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, Result, Views};

const FILE: &str = "grouped_linear_swiglu.cu";
const HOPPER_FILE: &str = "grouped_linear_swiglu_hopper.cu";
const HOPPER: &str = "grouped_linear_swiglu_hopper";
const HOPPER_LARGE_FILE: &str = "grouped_linear_swiglu_hopper_large.cu";
/// Its kernels, for single blocks and for pairs: with gate's rows first, and with gate's rows
/// interleaved with up's.
const HOPPER_LARGE: [[&str; 2]; 2] = [
    ["grouped_linear_swiglu_hopper_large", "grouped_linear_swiglu_hopper_large_interleaved"],
    [
        "grouped_linear_swiglu_hopper_large_pairs",
        "grouped_linear_swiglu_hopper_large_interleaved_pairs",
    ],
];
const CHECK: Arguments = Arguments { operator: "grouped_linear_swiglu" };
/// `out_features` is a multiple of this: gate and up each have rows in groups of eight.
pub const MULTIPLE: usize = 2 * GRANULE;
/// Columns of a tile, gate and up together; `COLUMNS` in the kernel source.
const COLUMNS: usize = 256;
/// Rows of the large tiles; `LargeTile::ROWS` in the kernel source.
const MANY_ROWS: usize = 64;

/// Every module that the launcher compiles.
pub fn modules() -> Vec<Module> {
    let formats = [(Weights::Fp8, 128), (Weights::Mxfp4, 128), (Weights::Mxfp4, 32)];
    let portable = formats.map(|(weights, group)| module(FILE, &quantized_defines(weights, group)));
    let hopper = formats.into_iter().flat_map(|(weights, group)| {
        let of =
            move |&tokens: &usize| module(HOPPER_FILE, &hopper_defines(tokens, weights, group));
        let tiles: &[usize] =
            if weights == Weights::Fp8 { &[FEW_ROWS] } else { token_tiles(weights) };
        tiles.iter().map(of)
    });
    let large = [module(HOPPER_LARGE_FILE, &[]), units_module()];
    portable.into_iter().chain(hopper).chain(large).collect()
}

/// The GEMM of a call, the order of rows of gate and up, and how the result is quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The GEMM. For FP8 weights with rows of gate before those of up, the Hopper kernels require
    /// that up starts at a multiple of 128, so that its blocks have separate scales.
    pub grouped: Grouped,
    /// Whether rows of gate and up are interleaved by eight, as `gate_up_interleave` writes them;
    /// otherwise all rows of gate come first.
    pub interleaved: bool,
    /// Groups, scales, and whether values are rounded to bf16 before they are quantized.
    pub quantized: swiglu_quantize::Options,
}

const OF_ROWS: ScaleAxes = ScaleAxes {
    plain: &["num_rows", "num_groups"],
    blocks: &[],
    words: &["num_words", "aligned_rows"],
    groups: &["num_groups", "aligned_rows"],
    tiles: &["row_tiles", "group_tiles", "tile_bytes"],
};
const OF_EXPERTS_ROWS: ScaleAxes = ScaleAxes {
    plain: &["num_experts", "num_rows", "num_groups"],
    blocks: &[],
    words: &["num_experts", "num_words", "aligned_rows"],
    groups: &["num_experts", "num_groups", "aligned_rows"],
    tiles: &["num_experts", "row_tiles", "group_tiles", "tile_bytes"],
};

impl Options {
    /// The scales of the codes; if masked, those of one expert's part.
    pub fn scales(&self, extents: Extents) -> Scales {
        self.quantized.scales(extents.num_rows, extents.out_features / 2)
    }

    fn scale_axes(&self) -> &'static ScaleAxes {
        if self.grouped.is_masked() { &OF_EXPERTS_ROWS } else { &OF_ROWS }
    }

    /// The type and the axes of `scales`.
    pub fn scale_tensor(&self, extents: Extents) -> ScaleTensor {
        let scales = self.scales(extents);
        let (dtype, own) = scales.tensor();
        let experts = self.grouped.is_masked().then_some(extents.num_experts);
        let all = experts.into_iter().chain(own.into_iter().map(|(_, extent)| extent));
        (dtype, self.scale_axes().of(scales).iter().copied().zip(all).collect())
    }

    /// The arguments in addition to the operands.
    fn results<'a>(&self, scales: Scales) -> [Argument<'a>; 3] {
        let masked = self.grouped.is_masked();
        let [weight, codes]: [&'static [_]; 2] = match masked {
            true => {
                [&["num_experts", "num_rows"], &["num_experts", "num_rows", "intermediate_size"]]
            }
            false => [&["num_rows"], &["num_rows", "intermediate_size"]],
        };
        let types: &[DType] = match scales.tensor().0 {
            DType::U8 => &[DType::U8],
            DType::I32 => &[DType::I32],
            _ => &[DType::F32],
        };
        [
            read("weight").of(&[DType::F32]).axes(weight).optional(),
            write("codes").of(&[DType::U8]).axes(codes).rows(),
            write("scales").of(types).axes(self.scale_axes().of(scales)),
        ]
    }

    fn bind<'a>(&self, views: &'a Views) -> Result<(Signature<'a>, Extents)> {
        // The scales' axes are checked against the sizes of x and w.
        let extents = self.grouped.extents_of(views);
        let scales = self.scales(extents);
        let (signature, extents) =
            self.grouped.signature(CHECK, views, MULTIPLE, self.results(scales));
        let signature = signature.given("intermediate_size", extents.out_features / 2);
        let (_, axes) = self.scale_tensor(extents);
        let known =
            axes.into_iter().filter(|(axis, _)| !["num_experts", "num_rows"].contains(axis));
        let mut signature =
            known.fold(signature, |signature, (axis, extent)| signature.given(axis, extent));
        signature.bind([])?;
        self.grouped.check_rows(CHECK, views, extents)?;
        Ok((signature, extents))
    }

    fn check(&self) -> Result<()> {
        if self.grouped.quantized.weights == Weights::Nvfp4 {
            return CHECK
                .refuse("weights", "the rows that it writes are those of FP8 or MXFP4 weights");
        }
        self.grouped.quantized.check(CHECK)?;
        self.scales(Extents { num_experts: 1, num_rows: 0, out_features: MULTIPLE, in_features: 1 })
            .check(CHECK)
    }

    /// Why the Hopper kernels do not take a call.
    fn hopper_misfit(&self, extents: Extents, vectorised: bool) -> Option<String> {
        let in_blocks = self.grouped.quantized.weights == Weights::Fp8 && !self.interleaved;
        let shared = in_blocks && !(extents.out_features / 2).is_multiple_of(BLOCK);
        let reason = || {
            format!(
                "the Hopper kernels need rows of up that begin at a multiple of {BLOCK}, or interleaved ones"
            )
        };
        shared.then(reason).or_else(|| self.grouped.quantized.hopper_misfit(vectorised))
    }

    /// Whether the Hopper kernel for few rows is slower than the one for many rows, if that takes
    /// the call.
    fn suits_large(&self) -> bool {
        self.grouped.quantized.weights == Weights::Fp8 && self.grouped.expected_rows > FEW_ROWS
    }

    /// The portable kernel for a call, blocks that an SM holds, rows of a tile.
    fn kernel(&self, vectorised: bool) -> (&'static str, usize, usize) {
        match vectorised {
            false => ("grouped_linear_swiglu_scalar", 3, FEW_ROWS),
            true if self.grouped.expected_rows <= FEW_ROWS => {
                ("grouped_linear_swiglu_small", 3, FEW_ROWS)
            }
            true => ("grouped_linear_swiglu_large", 1, MANY_ROWS),
        }
    }
}

/// Launches, for the rows p of each expert e, `gate, up = bf16(x[p] w[e]^T)`, `o[p] = weight[p]
/// silu(min(gate, limit)) clamp(up, -limit, limit)` and its quantization; returns the kernel that
/// ran. Its tensors are `x`, `w`, `x_scales`, `w_scales`, `counts`, `expert_offsets` and
/// `workspace` of [`crate::experts::grouped_linear::forward`], whose `out_features` are gate and up
/// together, a multiple of 16, and:
///
/// - `weight` `[num_rows]` f32 or, masked, `[num_experts, num_rows]`: the routing weight, absent
///   for ones;
/// - `codes` u8, e4m3, `[num_rows, intermediate_size]` or, masked, `[num_experts, num_rows,
///   intermediate_size]`, half of `out_features`; rows contiguous. Unused rows are quantized as
///   zeros; if masked they stay unchanged;
/// - `scales`, dense, of the type and axes of [`Options::scale_tensor`]. Padding is written as 0;
///   if masked, padding of the rows of a part stays unchanged.
///
/// # Errors
/// A rejected argument (`limit`, of the clamps, is above 0; `layout`: tiles of scales are bytes), a
/// compile error, a rejected launch.
pub fn forward(device: &Device, views: &Views, limit: f32, options: Options) -> Result<String> {
    options.check()?;
    let (signature, extents) = options.bind(views)?;
    CHECK.positive("limit", limit)?;
    let (grouped, quantized) = (&options.grouped, &options.grouped.quantized);
    let vectorised = signature.vectorised_rows(&["x", "w"]);
    let misfit = options.hopper_misfit(extents, vectorised);
    // Any number of rows is large enough for it.
    let hopper =
        quantized.implementation.runs_hopper(CHECK, device.environment(), usize::MAX, misfit)?;
    let boxes = large_boxes(views).filter(|_| hopper && options.suits_large());
    let maps = boxes.map(|boxes| maps_of(device, boxes)).transpose()?;
    let params = params((views, &signature), &options, extents)?
        .flag("wide", signature.vectorised_rows(&["codes"]))
        .f32("limit", limit);
    let params = with_maps(params, maps);
    let processors = device.environment().processors as usize;
    if maps.is_some() {
        let name = HOPPER_LARGE[usize::from(grouped.takes_pairs(extents))]
            [usize::from(options.interleaved)];
        let blocks = blocks(grouped, extents, LARGE_TILE);
        begin_units(device, views)?;
        device
            .kernel(HOPPER_LARGE_FILE, &[], name)?
            .launch_clusters("x", blocks, processors, &params)?;
        return Ok(name.to_owned());
    }
    if hopper {
        // For FP8 the kernel only has tiles of few rows. It also runs where hardware copies no TMA
        // boxes for the kernel with large tiles.
        let tokens = match quantized.weights {
            Weights::Fp8 => FEW_ROWS,
            weights => expert_tile(weights, grouped.expected_rows),
        };
        let kernel = device.kernel(
            HOPPER_FILE,
            &hopper_defines(tokens, quantized.weights, quantized.group),
            HOPPER,
        )?;
        // A waiting cluster would start its work tiles only when others end theirs.
        let clusters = [
            blocks(grouped, extents, [tokens, COLUMNS]),
            kernel.resident_clusters(device.environment()),
        ];
        let [wanted, most] = clusters.map(|clusters| clusters.saturating_mul(kernel.cluster()));
        kernel.launch_clusters("x", wanted, most, &params)?;
        return Ok(quantized.hopper_path(HOPPER, tokens));
    }
    let (name, held, rows) = options.kernel(vectorised);
    let kernel =
        device.kernel(FILE, &quantized_defines(quantized.weights, quantized.group), name)?;
    let most = processors * held;
    kernel.launch_blocks("x", blocks(grouped, extents, [rows, COLUMNS]).min(most), &params)?;
    Ok(name.to_owned() + &quantized.suffix())
}

/// All parameters except the storage of codes and the limit.
fn params(
    (views, call): (&Views, &Signature),
    options: &Options,
    extents: Extents,
) -> Result<Params> {
    let (grouped, quantized) = (&options.grouped, options.quantized);
    let [x_scales, w_scales] = grouped.scales(extents);
    let params = of_experts(of_experts(CHECK.params(), "x", &views["x"]), "w", &views["w"]);
    let tensors = ["x_scales", "w_scales", "counts", "expert_offsets", "weight"];
    let params = of_experts(call.append(params, &tensors), "codes", &views["codes"]);
    let params = call.append(params, &["scales"]).i64("rows", extents.num_rows)?;
    let params = params.i64("columns", extents.out_features)?.i64("depth", extents.in_features)?;
    let params =
        params.i32("experts", extents.num_experts)?.i32("x_scale_layout", x_scales.number())?;
    let params = params.i32("w_scale_layout", w_scales.number())?;
    let params = params
        .flag("scale_bytes", grouped.quantized.scale_bytes)
        .flag("interleaved", options.interleaved);
    let params = params.i32("scale_layout", options.scales(extents).number())?;
    let params = params.i32("scale_type", quantized.scale as usize)?;
    let params = params.i32("log2_group", quantized.group.columns().trailing_zeros() as usize)?;
    let params = params.flag("round_to_bf16", quantized.round_to_bf16);
    Ok(call.append_as(params, "num_taken", "workspace"))
}
