//! `quantize_mxfp4`: launcher of `kernels/cuda/formats/quantize_mxfp4.cu` (inference 5.3, 5.4,
//! 5.7).

use crate::arguments::{Arguments, FLOATS, element_types, modules_of_floats, read, write};
use crate::formats::scale_layout::extents_of;
pub use crate::formats::scale_layout::{MAX_WIDTH, ScaleLayout, Scales};
use dsv4_runtime::source::Module;
use dsv4_runtime::{DType, Device, Result, Views};

const FILE: &str = "quantize_mxfp4.cu";
const CHECK: Arguments = Arguments { operator: "quantize_mxfp4" };
/// Neighbours in a row that share a scale.
pub const GROUP: usize = 32;

/// The scales of a matrix, which are bytes.
pub fn scales(layout: ScaleLayout, num_rows: usize, width: usize) -> Scales {
    Scales { bytes: true, layout, rows: num_rows, of_rows: true, groups: width.div_ceil(GROUP) }
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
    let [rows, columns] = extents_of(views, "x");
    let scales = scales(layout, rows, columns);
    let tensors = [
        read("x").of(&FLOATS).axes(&["num_rows", "width"]).rows(),
        write("codes").of(&[DType::U8]).axes(&["num_rows", "code_bytes"]).rows(),
        scales.written(),
    ];
    let signature = CHECK.signature(views, tensors).extent("width", 2, MAX_WIDTH).wide("num_rows");
    let mut call = scales.bound(signature.given("code_bytes", columns / 2));
    let [num_rows, width] = call.bind(["num_rows", "width"])?;
    let (row_warps, blocks) = scales.grid(CHECK, "x", GROUP)?;
    let params =
        scales.params(call.params(&["x", "codes", "scales"]), num_rows, width, row_warps)?;
    let name = if call.vectorised() { "quantize_mxfp4_vector" } else { "quantize_mxfp4_scalar" };
    device
        .kernel(FILE, &element_types(&[("ELEMENT", views["x"].dtype)]), name)?
        .launch_blocks("x", blocks, &params)?;
    Ok(name)
}

/// Decodes; returns the kernel that ran. Its tensors:
///
/// - `y` `[num_rows, width]`, bf16 or f32, rows contiguous; the width is even, up to [`MAX_WIDTH`];
/// - `codes` and `scales` as [`quantize`] writes them; padding of the scales is not read.
///
/// # Errors
/// As [`quantize`].
pub fn dequantize(device: &Device, views: &Views, layout: ScaleLayout) -> Result<&'static str> {
    let [rows, columns] = extents_of(views, "y");
    let scales = scales(layout, rows, columns);
    let tensors = [
        write("y").of(&FLOATS).axes(&["num_rows", "width"]).rows(),
        read("codes").of(&[DType::U8]).axes(&["num_rows", "code_bytes"]).rows(),
        scales.read(),
    ];
    let signature = CHECK.signature(views, tensors).extent("width", 2, MAX_WIDTH).wide("num_rows");
    let mut call = scales.bound(signature.given("code_bytes", columns / 2));
    let [num_rows, width] = call.bind(["num_rows", "width"])?;
    // Rows of elements, without padding.
    let of_rows = Scales { layout: ScaleLayout::Plain, ..scales };
    let (row_warps, blocks) = of_rows.grid(CHECK, "y", GROUP)?;
    let params =
        scales.params(call.params(&["codes", "y", "scales"]), num_rows, width, row_warps)?;
    let name =
        if call.vectorised() { "dequantize_mxfp4_vector" } else { "dequantize_mxfp4_scalar" };
    device
        .kernel(FILE, &element_types(&[("ELEMENT", views["y"].dtype)]), name)?
        .launch_blocks("y", blocks, &params)?;
    Ok(name)
}
