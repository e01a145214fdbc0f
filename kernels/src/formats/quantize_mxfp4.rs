//! `quantize_mxfp4`: launcher of `kernels/cuda/formats/quantize_mxfp4.cu` (inference 5.3, 5.4,
//! 5.7).

use crate::arguments::{Arguments, modules_of_floats};
use crate::formats::group_format::GroupFormat;
pub use crate::formats::scale_layout::{MAX_WIDTH, ScaleLayout, Scales};
use dsv4_runtime::source::Module;
use dsv4_runtime::{Device, Result, Views};

const FILE: &str = "quantize_mxfp4.cu";
const CHECK: Arguments = Arguments { operator: "quantize_mxfp4" };
/// Neighbours in a row that share a scale.
pub const GROUP: usize = 32;
const FORMAT: GroupFormat = GroupFormat {
    check: CHECK,
    file: FILE,
    group: GROUP,
    elements_per_byte: 2,
    has_global_scale: false,
};

/// The scales of a matrix, which are bytes.
pub fn scales(layout: ScaleLayout, num_rows: usize, width: usize) -> Scales {
    Scales::of_bytes(layout, num_rows, width, GROUP)
}

/// Every module that the launcher compiles.
pub fn modules() -> Vec<Module> {
    modules_of_floats(FILE, &["ELEMENT"])
}

/// Quantizes; returns the kernel that ran. Its tensors:
///
/// - `x` `[num_rows, width]`, bf16 or f32, rows contiguous; the width is even, up to [`MAX_WIDTH`];
/// - `codes` `[num_rows, width / 2]` u8: two e2m1 codes each, the even one in the low nibble, rows
///   contiguous;
/// - `scales`, e8m0, dense, of the type and shape of [`Scales::tensor`]; padding is written as 0.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn quantize(device: &Device, views: &Views, layout: ScaleLayout) -> Result<&'static str> {
    let names = ["quantize_mxfp4_scalar", "quantize_mxfp4_vector"];
    FORMAT.launch(device, views, layout, true, names)
}

/// Decodes; returns the kernel that ran. Its tensors:
///
/// - `y` `[num_rows, width]`, bf16 or f32, rows contiguous; the width is even, up to [`MAX_WIDTH`];
/// - `codes` and `scales` as [`quantize`] writes them; padding of the scales is not read.
///
/// # Errors
/// As [`quantize`].
pub fn dequantize(device: &Device, views: &Views, layout: ScaleLayout) -> Result<&'static str> {
    let names = ["dequantize_mxfp4_scalar", "dequantize_mxfp4_vector"];
    FORMAT.launch(device, views, layout, false, names)
}
