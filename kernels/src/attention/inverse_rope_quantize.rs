//! `inverse_rope_quantize`: launcher of `kernels/cuda/attention/inverse_rope_quantize.cu`
//! (inference 4, 5.4, 5.7, 9).

use crate::arguments::{Argument, Arguments, Defines, Signature, element_types, read, write};
pub use crate::formats::scale_layout::{MAX_WIDTH, ScaleLayout, ScaleType, Scales};
use crate::projections::rotation;
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, Result, Views};

const FILE: &str = "inverse_rope_quantize.cu";
const CHECK: Arguments = Arguments { operator: "inverse_rope_quantize" };
/// Channels that share a scale.
pub const GROUP: usize = 128;
/// Warps of a block; `WARPS` in the kernel source.
const WARPS: usize = 8;

/// How the output is quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Groups of the output projection, each with the same number of heads.
    pub o_groups: usize,
    /// What a scale is.
    pub scale: ScaleType,
    /// Layout of the scales of a group of the projection.
    pub layout: ScaleLayout,
}

impl Options {
    /// The scales of one group of the projection, whose rows are `group_width` channels wide.
    pub fn scales(self, num_tokens: usize, group_width: usize) -> Scales {
        let (bytes, groups) = (self.scale == ScaleType::E8m0, group_width.div_ceil(GROUP));
        Scales { bytes, layout: self.layout, rows: num_tokens, of_rows: true, groups }
    }

    /// The type of `scales`, and the axes of the scales of all groups of the projection.
    pub fn scale_tensor(
        self,
        num_tokens: usize,
        group_width: usize,
    ) -> (DType, Vec<(&'static str, usize)>) {
        let scales = self.scales(num_tokens, group_width);
        let (dtype, axes) = scales.tensor();
        let extents = [self.o_groups].into_iter().chain(axes.into_iter().map(|(_, extent)| extent));
        (dtype, axes_of(scales).iter().copied().zip(extents).collect())
    }
}

/// The names of the axes of `scales`.
fn axes_of(scales: Scales) -> &'static [&'static str] {
    match (scales.layout, scales.bytes) {
        (ScaleLayout::Plain, _) => &["o_groups", "num_tokens", "num_scales"],
        (ScaleLayout::MnMajor, true) => &["o_groups", "num_words", "aligned_rows"],
        (ScaleLayout::MnMajor, false) => &["o_groups", "num_scales", "aligned_rows"],
        (ScaleLayout::Blocked, _) => &["o_groups", "row_tiles", "group_tiles", "tile_bytes"],
    }
}

fn defines() -> Defines {
    element_types(&[("ELEMENT", DType::Bf16)])
}

/// The module that the launcher compiles.
pub fn modules() -> Vec<Module> {
    vec![module(FILE, &defines())]
}

/// Applies the inverse rotation and quantizes. Returns the kernel that ran. Its tensors:
///
/// - `x` `[num_tokens, num_heads, head_dim]` bf16, channels contiguous: the attention's output,
///   which is not changed; `head_dim` is a multiple of [`GROUP`];
/// - `cos`, `sin` `[table_rows, rope_dim / 2]` f32, rows contiguous, at separate strides;
///   `positions` `[num_tokens]` i32, absent where token `t` has the table's row `t`: see
///   [`rope::forward`](crate::projections::rope::forward);
/// - `codes` `[num_tokens, o_groups, group_width]` u8: e4m3, rows contiguous, with
///   `group_width = num_heads / o_groups * head_dim`, at most [`MAX_WIDTH`];
/// - `scales`, dense, of the type and shape of [`Options::scale_tensor`]; padding is written as 0.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch. Rejected: for `x`, heads that groups do
/// not divide, and a `head_dim` that is not a multiple of 128; for `cos`, more columns than
/// channels, and fewer rows than tokens without positions; for `layout`, tiles of scales that are
/// not bytes.
pub fn forward(device: &Device, views: &Views, options: Options) -> Result<&'static str> {
    let [num_tokens, num_heads, head_dim] = extents_of_x(views)?;
    let o_groups = options.o_groups;
    if o_groups == 0 || num_heads == 0 || !num_heads.is_multiple_of(o_groups) {
        return CHECK.refuse(
            "x",
            format!("{num_heads} heads must be as many in each of {o_groups} groups"),
        );
    }
    let group_width = (num_heads / o_groups).saturating_mul(head_dim);
    if group_width > MAX_WIDTH {
        return CHECK.refuse("x", format!("{group_width} channels of a group may be {MAX_WIDTH}"));
    }
    let scales = options.scales(num_tokens, group_width);
    scales.check(CHECK)?;
    let signature = CHECK
        .signature(views, arguments(scales))
        .extent("head_dim", GROUP, MAX_WIDTH)
        .wide("num_tokens");
    let known = options
        .scale_tensor(num_tokens, group_width)
        .1
        .into_iter()
        .filter(|(axis, _)| *axis != "num_tokens");
    let signature =
        known.fold(signature, |signature, (axis, extent)| signature.given(axis, extent));
    let mut call = signature.wide("table_rows").given("group_width", group_width);
    let [table_rows, half] = call.bind(["table_rows", "half_rope_dim"])?;
    rotation::check_half(CHECK, half, head_dim)?;
    rotation::check_rows(CHECK, views, table_rows, num_tokens)?;
    let (row_warps, _) = scales.grid(CHECK, "x", GROUP)?;
    let warps = scales.padded_rows().saturating_mul(row_warps).saturating_mul(o_groups);
    if u32::try_from(warps).is_err() {
        let reason = format!(
            "{o_groups} groups of {num_tokens} rows of {row_warps} warps: there may be {}",
            u32::MAX
        );
        return CHECK.refuse("x", reason);
    }
    let name = names(&call);
    let group_bytes =
        scales.padded_rows() * scales.padded_groups() * if scales.bytes { 1 } else { 4 };
    let params = call.params(&["x"]);
    let params = params.strided("codes", &views["codes"], ["row_stride", "group_stride"]);
    let params = params.ptr("scales", &views["scales"]).i64("scale_group_bytes", group_bytes)?;
    let params = call.append(params, &["cos", "sin", "positions"]);
    let params = params.i64("table_rows", table_rows)?;
    let params = scales
        .params(params, num_tokens, group_width, row_warps)?
        .i32("scale_type", options.scale as usize)?;
    let params =
        params.i32("log2_group", GROUP.trailing_zeros() as usize)?.i32("o_groups", o_groups)?;
    let params = params.i32("group_heads", num_heads / o_groups)?.i32("head_dim", head_dim)?;
    let params = params.i32("rope_dim", 2 * half)?.flag("inverse", true);
    // Factors with which the kernel divides. Without rows the divisor is 0 and nothing divides by
    // it.
    let inverse = |divisor: usize| u32::MAX as usize / divisor.max(1);
    let params = params.i64("of_row_warps", inverse(row_warps))?;
    let params = params
        .i64("of_padded_rows", inverse(scales.padded_rows()))?
        .i64("of_head_dim", inverse(head_dim))?;
    device.kernel(FILE, &defines(), name)?.launch_blocks("x", warps.div_ceil(WARPS), &params)?;
    Ok(name)
}

fn arguments<'a>(scales: Scales) -> [Argument<'a>; 6] {
    let [cos, sin, positions] = rotation::tables();
    let types: &[DType] = match scales.tensor().0 {
        DType::U8 => &[DType::U8],
        DType::I32 => &[DType::I32],
        _ => &[DType::F32],
    };
    [
        read("x").of(&[DType::Bf16]).axes(&["num_tokens", "num_heads", "head_dim"]).rows(),
        cos,
        sin,
        positions,
        write("codes").of(&[DType::U8]).axes(&["num_tokens", "o_groups", "group_width"]).rows(),
        write("scales").of(types).axes(axes_of(scales)),
    ]
}

fn names(call: &Signature<'_>) -> &'static str {
    if call.vectorised_rows(&["x", "codes"]) {
        "inverse_rope_quantize_vector"
    } else {
        "inverse_rope_quantize_scalar"
    }
}

/// The sizes of `x`; its other properties are checked with the signature.
fn extents_of_x(views: &Views) -> Result<[usize; 3]> {
    match views.get("x").map(|view| &view.shape[..]) {
        Some(&[tokens, heads, channels]) => {
            Ok([tokens.min(i64::MAX as usize / 512), heads, channels])
        }
        Some(shape) => CHECK.refuse(
            "x",
            format!("shape {shape:?} must have 3 axes (num_tokens, num_heads, head_dim)"),
        ),
        None => CHECK.refuse("x", "it must be present"),
    }
}
