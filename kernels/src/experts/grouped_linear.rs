//! `grouped_linear`: launchers of `kernels/cuda/experts/grouped_linear.cu` and
//! `grouped_linear_hopper.cu` (inference 5.5, 5.7, 11.1, 11.3).

use serde::{Deserialize, Serialize};

use crate::arguments::{Argument, Arguments, FLOATS, Signature, is_aligned, read, scratch, write};
use crate::experts::moe_map::MAX_EXPERTS;
use crate::formats::scale_layout::{Scales, product_params};
use crate::implementation::Implementation;
use crate::projections::linear::{
    FEATURE_TILE, FEW_ROWS, FORMATS, LARGE_TILE, MAX_FEATURES, Quantized, ScaleAxes, ScaleTensor,
    Weights, expert_tile, hopper_defines, hopper_modules, large_maps, quantized_defines,
    token_tiles, with_maps,
};
use dsv4_runtime::params::Params;
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, Result, TensorView, Views};

const FILE: &str = "grouped_linear.cu";
const HOPPER_FILE: &str = "grouped_linear_hopper.cu";
const HOPPER_LARGE: &str = "grouped_linear_hopper_large.cu";
const UNITS: &str = "grouped_linear_units.cu";

/// Bytes of a call's workspace: the counter of work tiles that the kernels for many rows have
/// taken.
pub const WORKSPACE_BYTES: usize = 16;
const CHECK: Arguments = Arguments { operator: "grouped_linear" };

/// Every module that the launcher compiles.
pub fn modules() -> Vec<Module> {
    let portable = FORMATS.map(|(weights, group)| module(FILE, &quantized_defines(weights, group)));
    let large = [module(HOPPER_LARGE, &[]), units_module()];
    portable.into_iter().chain(hopper_modules(HOPPER_FILE)).chain(large).collect()
}

/// The module of the kernel that runs before the kernels for many rows.
pub(crate) fn units_module() -> Module {
    module(UNITS, &[])
}

/// Resets the counter of taken work tiles, for kernels whose blocks take work tiles when free.
pub(crate) fn begin_units(device: &Device, views: &Views) -> Result<()> {
    let params = CHECK.params().ptr("num_taken", &views["workspace"]);
    device.kernel(UNITS, &[], "grouped_linear_units")?.launch_blocks("workspace", 1, &params)
}

/// How the rows of experts are arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grouping {
    /// One expert after the other, each from its offset on.
    Contiguous,
    /// Each expert has a separate part, of which only the first rows are used.
    Masked,
}

/// How the operands of a call are quantized, how rows of experts are arranged, and which kernels
/// run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grouped {
    /// Formats, except bf16, layouts of scales, and which kernels run. Those for Hopper take FP8 and
    /// MXFP4, with rows of x and w at multiples of 16 bytes, whose length is a multiple of 16 bytes.
    pub quantized: Quantized,
    /// How the rows of experts are arranged.
    pub grouping: Grouping,
    /// Estimated number of rows of an expert: the kernels with tiles for that number run. It does
    /// not change any result.
    pub expected_rows: usize,
}

/// Kernels: name, and blocks that an SM holds.
const LARGE: (&str, usize) = ("grouped_linear_large", 1);
const SMALL: (&str, usize) = ("grouped_linear_small", 4);
const SCALAR: (&str, usize) = ("grouped_linear_scalar", 4);

const OF_ROWS: ScaleAxes = ScaleAxes {
    plain: &["num_rows", "x_groups"],
    blocks: &[],
    words: &["x_words", "x_aligned_rows"],
    groups: &["x_groups", "x_aligned_rows"],
    tiles: &["x_row_tiles", "x_group_tiles", "tile_bytes"],
};
const OF_EXPERTS_ROWS: ScaleAxes = ScaleAxes {
    plain: &["num_experts", "num_rows", "x_groups"],
    blocks: &[],
    words: &["num_experts", "x_words", "x_aligned_rows"],
    groups: &["num_experts", "x_groups", "x_aligned_rows"],
    tiles: &["num_experts", "x_row_tiles", "x_group_tiles", "tile_bytes"],
};
const OF_WEIGHTS: ScaleAxes = ScaleAxes {
    plain: &["num_experts", "out_features", "w_groups"],
    blocks: &["num_experts", "w_row_blocks", "w_groups"],
    words: &["num_experts", "w_words", "w_aligned_rows"],
    groups: &["num_experts", "w_groups", "w_aligned_rows"],
    tiles: &["num_experts", "w_row_tiles", "w_group_tiles", "tile_bytes"],
};

const SORTED_RESULT: &[&str] = &["num_rows", "out_features"];
const MASKED_RESULT: &[&str] = &["num_experts", "num_rows", "out_features"];

/// Experts, rows (if masked, those of one expert), features out and in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extents {
    /// Experts.
    pub num_experts: usize,
    /// Rows of x; if masked, those of one expert.
    pub num_rows: usize,
    /// Features of a row of y.
    pub out_features: usize,
    /// Features of a row of x.
    pub in_features: usize,
}

impl Grouped {
    pub(crate) fn is_masked(&self) -> bool {
        self.grouping == Grouping::Masked
    }

    /// The scales of x (if masked, of one expert's part), and of one expert's w.
    pub(crate) fn scales(&self, extents: Extents) -> [Scales; 2] {
        let Extents { num_rows, out_features, in_features, .. } = extents;
        [
            self.quantized.x_scales(num_rows, in_features),
            self.quantized.w_scales(out_features, in_features),
        ]
    }

    fn scale_axes(&self) -> [&'static ScaleAxes; 2] {
        [if self.is_masked() { &OF_EXPERTS_ROWS } else { &OF_ROWS }, &OF_WEIGHTS]
    }

    /// The types and axes of `x_scales` and `w_scales`.
    pub fn scale_tensors(&self, extents: Extents) -> [ScaleTensor; 2] {
        let [x_scales, w_scales] = self.scales(extents);
        let [x_axes, w_axes] = self.scale_axes();
        let of = |scales: Scales, axes: &ScaleAxes, of_experts: bool| {
            let (dtype, own) = scales.tensor();
            let experts = of_experts.then_some(extents.num_experts);
            let all = experts.into_iter().chain(own.into_iter().map(|(_, extent)| extent));
            (dtype, axes.of(scales).iter().copied().zip(all).collect())
        };
        [of(x_scales, x_axes, self.is_masked()), of(w_scales, w_axes, true)]
    }

    /// The sizes of a call, from x and w; their other properties are checked later.
    pub(crate) fn extents_of(&self, views: &Views) -> Extents {
        let shape = |name: &str| views.get(name).map_or(&[][..], |view| &view.shape[..]);
        let [num_experts, out_features] = match *shape("w") {
            [experts, outs, _] => [experts, outs.min(MAX_FEATURES)],
            _ => [0, 0],
        };
        let [num_rows, in_features] = match *shape("x") {
            [.., rows, bytes] => {
                let codes = 1 + usize::from(self.quantized.weights == Weights::Nvfp4);
                [rows.min(i32::MAX as usize), bytes.saturating_mul(codes).min(MAX_FEATURES)]
            }
            _ => [0, 0],
        };
        Extents { num_experts, num_rows, out_features, in_features }
    }

    /// The signature of a call that also has `others`, tensors that it writes or reads. Returns it
    /// with its sizes. `out_features` is a multiple of `out_multiple`.
    pub(crate) fn signature<'a>(
        &self,
        check: Arguments,
        views: &'a Views,
        out_multiple: usize,
        others: impl IntoIterator<Item = Argument<'a>>,
    ) -> (Signature<'a>, Extents) {
        let extents = self.extents_of(views);
        let (masked, hopper) =
            (self.is_masked(), self.quantized.implementation == Implementation::Hopper);
        let mxfp4 = self.quantized.weights == Weights::Mxfp4;
        let nvfp4 = self.quantized.weights == Weights::Nvfp4;
        let rows =
            |argument: Argument<'a>| if hopper { argument.aligned_rows() } else { argument.rows() };
        let [of_x, of_w] = self.scales(extents);
        let [x_axes, w_axes] = self.scale_axes();
        let x: &'static [_] = match (masked, nvfp4) {
            (true, false) => &["num_experts", "num_rows", "in_features"],
            (true, true) => &["num_experts", "num_rows", "code_bytes"],
            (false, false) => &["num_rows", "in_features"],
            (false, true) => &["num_rows", "code_bytes"],
        };
        let w: &'static [_] = match mxfp4 || nvfp4 {
            true => &["num_experts", "out_features", "code_bytes"],
            false => &["num_experts", "out_features", "in_features"],
        };
        let operands = [
            rows(read("x").of(&[DType::U8]).axes(x)),
            rows(read("w").of(&[DType::U8]).axes(w)),
            read("counts").of(&[DType::I32]).axes(&["num_experts"]),
            read("expert_offsets").of(&[DType::I32]).axes(&["num_experts_and_one"]).when(!masked),
        ];
        // After the tensors that determine their sizes.
        let scales = [
            Quantized::read_scales("x_scales", of_x.tensor().0, x_axes.of(of_x)),
            Quantized::read_scales("w_scales", of_w.tensor().0, w_axes.of(of_w)),
            read("x_global_scale").axes(&["one"]).when(nvfp4),
            read("w_global_scale").axes(&["num_experts"]).when(nvfp4),
        ];
        let tensors =
            operands.into_iter().chain(others).chain(scales).chain([scratch("workspace", 16)]);
        let signature = check.signature(views, tensors).extent("num_experts", 1, MAX_EXPERTS);
        let signature = signature.extent("out_features", out_multiple, MAX_FEATURES);
        // A byte holds two codes, an access 16 bytes.
        let bytes = if hopper { 16 } else { 1 };
        let signature =
            signature.extent("in_features", (1 + usize::from(mxfp4)) * bytes, MAX_FEATURES);
        let signature = signature.extent("code_bytes", bytes, MAX_FEATURES / 2).given("one", 1);
        let signature = signature.given("num_experts_and_one", extents.num_experts + 1);
        let signature =
            if mxfp4 { signature.given("code_bytes", extents.in_features / 2) } else { signature };
        let scales = self.scale_tensors(extents).map(|(_, axes)| axes).concat();
        let of_others = ["num_experts", "num_rows", "out_features"];
        let known = scales.into_iter().filter(|(axis, _)| !of_others.contains(axis));
        (known.fold(signature, |signature, (axis, extent)| signature.given(axis, extent)), extents)
    }

    /// Tiles of all experts are counted in 32 bits. The workspace has room for the counter of work
    /// tiles.
    pub(crate) fn check_rows(
        &self,
        check: Arguments,
        views: &Views,
        extents: Extents,
    ) -> Result<()> {
        let Extents { num_experts, num_rows, .. } = extents;
        check.holds("workspace", &views["workspace"], WORKSPACE_BYTES)?;
        let smallest = token_tiles(self.quantized.weights)[0];
        let tiles = num_experts.saturating_mul(num_rows.div_ceil(smallest));
        if !self.is_masked() || i32::try_from(tiles).is_ok() {
            return Ok(());
        }
        let most = i32::MAX;
        check.refuse(
            "x",
            format!("{num_experts} experts of {num_rows} rows: there may be {most} tiles of {smallest} rows"),
        )
    }

    /// Whether blocks of the Hopper kernels for many rows work in pairs. An even number of tiles of
    /// features leaves no block without a partner. Experts with no more than a pair of tiles of
    /// rows would share too little.
    pub(crate) fn takes_pairs(&self, extents: Extents) -> bool {
        let [rows, features] = LARGE_TILE;
        extents.out_features.div_ceil(features).is_multiple_of(2) && self.expected_rows > 2 * rows
    }

    /// A bound that nearly every expert's rows stay below. Tokens choose experts independently, so
    /// the numbers of rows scatter by the square root. With 64 expected rows, half of the experts
    /// would have more rows than a tile of 64, and would read their weights twice.
    fn rows_of_most(&self) -> usize {
        self.expected_rows.saturating_add(2 * self.expected_rows.isqrt())
    }

    /// The portable kernel for a call, and blocks that an SM holds.
    fn portable(&self, vectorised: bool) -> (&'static str, usize) {
        match vectorised {
            false => SCALAR,
            true if self.expected_rows <= FEW_ROWS => SMALL,
            true => LARGE,
        }
    }
}

/// Launches `y[p] = x[p] w[e]^T` for the rows p of each expert e; returns the kernel that ran. Its
/// tensors:
///
/// - `x` u8, e4m3 codes, `[num_rows, in_features]` or, masked, `[num_experts, num_rows,
///   in_features]`; for NVFP4 half as many bytes, two e2m1 codes in each, the even one in the low
///   nibble; rows contiguous;
/// - `w` `[num_experts, out_features, in_features]` u8, e4m3 codes, or `[num_experts,
///   out_features, in_features / 2]`, e2m1 codes; rows contiguous; up to 512 experts;
/// - `x_scales` and `w_scales`, of the types and axes of [`Grouped::scale_tensors`], dense: as the
///   `quantize_*` operators write them, of x (masked: of each expert's part), and of each expert's
///   w; their padding and the scales of unused rows are not read;
/// - `x_global_scale` `[1]` and `w_global_scale` `[num_experts]` f32, for NVFP4: the factors of
///   decoding x, and each expert's w;
/// - `counts` `[num_experts]` i32: rows of each expert; rows beyond the expert's room are skipped,
///   and a negative count is 0;
/// - `expert_offsets` `[num_experts + 1]` i32, unless masked: the first row of each expert, and
///   the end of all; ascending, 0 to num_rows, of any alignment;
/// - `y`, bf16 or f32, `[num_rows, out_features]` or, masked, `[num_experts, num_rows,
///   out_features]`; rows contiguous. Unused rows become 0; if masked they stay unchanged;
/// - `workspace`, scratch memory of [`WORKSPACE_BYTES`] bytes at a multiple of 16.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn forward(device: &Device, views: &Views, grouped: Grouped) -> Result<String> {
    grouped.quantized.check(CHECK)?;
    let axes = if grouped.is_masked() { MASKED_RESULT } else { SORTED_RESULT };
    let (mut signature, extents) =
        grouped.signature(CHECK, views, 1, [write("y").of(&FLOATS).axes(axes).rows()]);
    signature.bind([])?;
    grouped.check_rows(CHECK, views, extents)?;
    let vectorised = signature.vectorised_rows(&["x", "w"]);
    let quantized = &grouped.quantized;
    // Any number of rows is large enough for it.
    let misfit = quantized.hopper_misfit(vectorised);
    let hopper =
        quantized.implementation.runs_hopper(CHECK, device.environment(), usize::MAX, misfit)?;
    let maps = if hopper {
        large_maps(device, views, quantized.weights, grouped.rows_of_most())?
    } else {
        None
    };
    let params = with_maps(params((views, &signature), &grouped, extents)?, maps);
    let processors = device.environment().processors as usize;
    if maps.is_some() {
        let name = if grouped.takes_pairs(extents) {
            "grouped_linear_hopper_large_pairs"
        } else {
            "grouped_linear_hopper_large"
        };
        let blocks = blocks(&grouped, extents, LARGE_TILE);
        begin_units(device, views)?;
        device
            .kernel(HOPPER_LARGE, &[], name)?
            .launch_clusters("x", blocks, processors, &params)?;
        return Ok(name.to_owned());
    }
    if hopper {
        let (name, tokens) =
            ("grouped_linear_hopper", expert_tile(quantized.weights, grouped.expected_rows));
        let kernel = device.kernel(
            HOPPER_FILE,
            &hopper_defines(tokens, quantized.weights, quantized.group),
            name,
        )?;
        let held = processors * quantized.hopper_held(tokens);
        kernel.launch_blocks(
            "x",
            blocks(&grouped, extents, [tokens, FEATURE_TILE]).min(held),
            &params,
        )?;
        return Ok(quantized.hopper_path(name, tokens));
    }
    let (name, held) = grouped.portable(vectorised);
    let kernel =
        device.kernel(FILE, &quantized_defines(quantized.weights, quantized.group), name)?;
    // The smallest tiles: a block without a tile exits at once.
    kernel.launch_blocks(
        "x",
        blocks(&grouped, extents, [FEW_ROWS, 64]).min(processors * held),
        &params,
    )?;
    Ok(name.to_owned() + &quantized.suffix())
}

/// Blocks that may have work: tiles of the result, where each expert may have one partial tile.
pub(crate) fn blocks(grouped: &Grouped, extents: Extents, [rows, columns]: [usize; 2]) -> usize {
    let Extents { num_experts, num_rows, out_features, .. } = extents;
    let row_tiles = match grouped.is_masked() {
        true => num_experts.saturating_mul(num_rows.div_ceil(rows)),
        false => num_rows.div_ceil(rows) + num_experts.min(num_rows),
    };
    row_tiles.saturating_mul(out_features.div_ceil(columns))
}

/// The strides of the experts (0 where there is no such axis) and of the rows of a tensor.
pub(crate) fn of_experts(params: Params, name: &str, view: &TensorView) -> Params {
    match view.strides[..] {
        [experts, rows, _] => params
            .ptr(name, view)
            .stride(format!("{name}_expert_stride"), experts)
            .stride(format!("{name}_stride"), rows),
        [rows, _] => params
            .ptr(name, view)
            .stride(format!("{name}_expert_stride"), 0)
            .stride(format!("{name}_stride"), rows),
        _ => params.ptr(name, view),
    }
}

fn params(
    (views, call): (&Views, &Signature),
    grouped: &Grouped,
    extents: Extents,
) -> Result<Params> {
    let (y, [x_scales, w_scales]) = (&views["y"], grouped.scales(extents));
    let params = of_experts(of_experts(CHECK.params(), "x", &views["x"]), "w", &views["w"]);
    let scales = ["x_scales", "w_scales", "x_global_scale", "w_global_scale"];
    let params = call.append(call.append(params, &scales), &["counts", "expert_offsets"]);
    let params = of_experts(params, "out", y);
    let places = |scales: Scales| scales.padded_rows() * scales.padded_groups();
    let of_x = if grouped.is_masked() { places(x_scales) } else { 0 };
    let params = params.i64("x_expert_scales", of_x)?.i64("w_expert_scales", places(w_scales))?;
    let params = params.i64("rows", extents.num_rows)?.i64("columns", extents.out_features)?;
    let params = params.i64("depth", extents.in_features)?;
    let params = product_params(params, [x_scales, w_scales])?
        .flag("scale_bytes", grouped.quantized.scale_bytes);
    let wide = (extents.out_features * y.dtype.size()).is_multiple_of(16) && is_aligned(y);
    let params =
        params.i32("experts", extents.num_experts)?.flag("out_is_f32", y.dtype == DType::F32);
    Ok(call.append_as(params.flag("wide", wide), "num_taken", "workspace"))
}
