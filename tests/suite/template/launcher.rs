//! `scaled_rows`: launcher of `kernels/cuda/formats/scaled_rows.cu` (inference 3).

use crate::arguments::{Arguments, FLOATS, element_types, modules_of_floats, read, write};
use dsv4_runtime::source::Module;
use dsv4_runtime::{Device, Result, Views};

const FILE: &str = "scaled_rows.cu";
const CHECK: Arguments = Arguments { operator: "scaled_rows" };
/// Channels of a row at most.
pub const MAX_WIDTH: usize = 1 << 24;
/// Threads of a block; `THREADS` in the kernel source.
const THREADS: usize = 256;

/// Every module that the launcher compiles.
pub fn modules() -> Vec<Module> {
    modules_of_floats(FILE, &["ELEMENT"])
}

/// Launches `y = factor x`; returns the kernel that ran. Its tensors:
///
/// - `x` `[num_rows, width]`, bf16 or f32, rows contiguous;
/// - `y` of the type and shape of `x`, rows contiguous.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn forward(device: &Device, views: &Views, factor: f32) -> Result<&'static str> {
    let tensors = [
        read("x").of(&FLOATS).axes(&["num_rows", "width"]).rows(),
        write("y").like("x").rows(),
    ];
    let mut call = CHECK.signature(views, tensors).extent("width", 1, MAX_WIDTH).wide("num_rows");
    let [num_rows, width] = call.bind(["num_rows", "width"])?;
    CHECK.positive("factor", factor)?;
    let params = call.params(&["x", "y"]).i64("num_rows", num_rows)?.i32("width", width)?;
    let params = params.f32("factor", factor);
    let kernel = device.kernel(FILE, &element_types(&[("ELEMENT", views["x"].dtype)]), "scaled_rows")?;
    kernel.launch_blocks("x", num_rows.saturating_mul(width).div_ceil(THREADS), &params)?;
    Ok("scaled_rows")
}
