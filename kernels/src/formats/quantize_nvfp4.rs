//! `quantize_nvfp4`: launcher of `kernels/cuda/formats/quantize_nvfp4.cu` (inference 5.3, 5.6,
//! 5.7).

use crate::arguments::{Arguments, FLOATS, element_types, modules_of_floats, read, scratch, write};
use crate::formats::group_format::GroupFormat;
pub use crate::formats::scale_layout::{MAX_WIDTH, ScaleLayout, Scales};
use dsv4_runtime::source::Module;
use dsv4_runtime::{Device, Result, Views};

const FILE: &str = "quantize_nvfp4.cu";
const CHECK: Arguments = Arguments { operator: "quantize_nvfp4" };
/// Neighbours in a row that share a scale.
pub const GROUP: usize = 16;
const FORMAT: GroupFormat = GroupFormat {
    check: CHECK,
    file: FILE,
    group: GROUP,
    elements_per_byte: 2,
    has_global_scale: true,
};
/// Blocks that find the largest magnitude of a tensor: enough to fill any GPU.
const AMAX_BLOCKS: usize = 1024;

/// The scales of a matrix, which are bytes.
pub fn scales(layout: ScaleLayout, num_rows: usize, width: usize) -> Scales {
    Scales::of_bytes(layout, num_rows, width, GROUP)
}

/// Every module that the launcher compiles.
pub fn modules() -> Vec<Module> {
    modules_of_floats(FILE, &["ELEMENT"])
}

/// Bytes of the workspace of [`global_scale`].
pub const WORKSPACE_BYTES: usize = 4 * AMAX_BLOCKS;

/// The scale of a whole tensor, in two launches; returns the kernels that ran. Its tensors:
///
/// - `x` `[num_rows, width]`, bf16 or f32, rows contiguous, of up to [`MAX_WIDTH`] elements;
/// - `workspace`, of [`WORKSPACE_BYTES`] bytes, 4-byte aligned;
/// - `global_scale` `[1]` f32.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn global_scale(device: &Device, views: &Views) -> Result<[&'static str; 2]> {
    let tensors = [
        read("x").of(&FLOATS).axes(&["num_rows", "width"]).rows(),
        write("global_scale").axes(&["one"]),
        scratch("workspace", 4),
    ];
    let signature = CHECK.signature(views, tensors).extent("width", 1, MAX_WIDTH).wide("num_rows");
    let mut call = signature.given("one", 1);
    let [num_rows, width] = call.bind(["num_rows", "width"])?;
    CHECK.holds("workspace", &views["workspace"], WORKSPACE_BYTES)?;
    let (row_warps, blocks) =
        scales(ScaleLayout::Plain, num_rows, width).grid(CHECK, "x", GROUP)?;
    let blocks = blocks.clamp(1, AMAX_BLOCKS);
    let params =
        call.params(&["x"]).ptr("workspace", &views["workspace"]).i64("num_rows", num_rows)?;
    let params = params.i32("width", width)?.i32("row_warps", row_warps)?;
    let name = if call.vectorised() { "nvfp4_amax_vector" } else { "nvfp4_amax_scalar" };
    let types = element_types(&[("ELEMENT", views["x"].dtype)]);
    device.kernel(FILE, &types, name)?.launch_blocks("x", blocks, &params)?;
    let params = CHECK
        .params()
        .ptr("workspace", &views["workspace"])
        .ptr("global_scale", &views["global_scale"]);
    let params = params.i32("num_blocks", blocks)?;
    device.kernel(FILE, &types, "nvfp4_global_scale")?.launch_blocks("x", 1, &params)?;
    Ok([name, "nvfp4_global_scale"])
}

/// Quantizes; returns the kernel that ran. Its tensors:
///
/// - `x` `[num_rows, width]`, bf16 or f32, rows contiguous; the width is even, up to [`MAX_WIDTH`];
/// - `global_scale` `[1]` f32: the factor of all products of a code and its scale;
/// - `codes` `[num_rows, width / 2]` u8: two e2m1 codes each, the even one in the low nibble, rows
///   contiguous;
/// - `scales`, e4m3, dense, of the type and shape of [`Scales::tensor`]; padding is written as 0.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn quantize(device: &Device, views: &Views, layout: ScaleLayout) -> Result<&'static str> {
    let names = ["quantize_nvfp4_scalar", "quantize_nvfp4_vector"];
    FORMAT.launch(device, views, layout, true, names)
}

/// Decodes; returns the kernel that ran. Its tensors:
///
/// - `y` `[num_rows, width]`, bf16 or f32, rows contiguous; the width is even, up to [`MAX_WIDTH`];
/// - `codes`, `scales` and `global_scale` as in [`quantize`]; padding of the scales is not read.
///
/// # Errors
/// As [`quantize`].
pub fn dequantize(device: &Device, views: &Views, layout: ScaleLayout) -> Result<&'static str> {
    let names = ["dequantize_nvfp4_scalar", "dequantize_nvfp4_vector"];
    FORMAT.launch(device, views, layout, false, names)
}
