//! `swiglu_quantize`: launcher of `kernels/cuda/experts/swiglu_quantize.cu` (inference 5.4, 5.7,
//! 11.1, training 11.2).

use serde::{Deserialize, Serialize};

use crate::arguments::{Arguments, FLOATS, element_types, modules_of_floats, read, write};
use crate::experts::swiglu;
use crate::formats::scale_layout::extents_of;
pub use crate::formats::scale_layout::{MAX_WIDTH, ScaleLayout, ScaleType, Scales};
use dsv4_runtime::source::Module;
use dsv4_runtime::{DType, Device, Result, Views};

const FILE: &str = "swiglu_quantize.cu";
const CHECK: Arguments = Arguments { operator: "swiglu_quantize" };

/// Which values share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Group {
    /// 32 neighbours in a row.
    Row32,
    /// 128 neighbours in a row.
    Row128,
}

impl Group {
    /// Columns of a group.
    pub fn columns(self) -> usize {
        if self == Self::Row32 { 32 } else { 128 }
    }
}

/// How the product is quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Which values share a scale.
    pub group: Group,
    /// What a scale is.
    pub scale: ScaleType,
    /// The layout of the scales.
    pub layout: ScaleLayout,
    /// Whether the product is rounded to bf16 before.
    pub round_to_bf16: bool,
}

impl Options {
    /// The scales of a matrix.
    pub fn scales(self, num_rows: usize, width: usize) -> Scales {
        let (bytes, groups) = (self.scale == ScaleType::E8m0, width.div_ceil(self.group.columns()));
        Scales { bytes, layout: self.layout, rows: num_rows, of_rows: true, groups }
    }
}

/// Every module that the launcher compiles.
pub fn modules() -> Vec<Module> {
    [modules_of_floats(FILE, &["ELEMENT"]), swiglu::modules()].concat()
}

/// Launches the forward; returns the kernel that ran. Its tensors:
///
/// - `gate`, `up` `[num_rows, width]`, bf16 or f32, of one type, rows contiguous, of up to
///   [`MAX_WIDTH`] elements: the halves of one `[num_rows, 2 * width]` tensor are allowed;
/// - `weight` `[num_rows]` f32, the routing weight, absent for ones;
/// - `pos_to_token_topk` `[num_rows]` i32, negative for padding rows, which are quantized as
///   zeros; absent without padding rows;
/// - `codes` `[num_rows, width]` u8: e4m3, rows contiguous;
/// - `scales`, dense, of the type and shape of [`Scales::tensor`]; padding is written as 0.
///
/// # Errors
/// A rejected argument (`limit`, of the clamps, is above 0; `layout`: tiles of scales are bytes), a
/// compile error, a rejected launch.
pub fn forward(
    device: &Device,
    views: &Views,
    limit: f32,
    options: Options,
) -> Result<&'static str> {
    let [rows, columns] = extents_of(views, "gate");
    let scales = options.scales(rows, columns);
    scales.check(CHECK)?;
    let tensors = [
        read("gate").of(&FLOATS).axes(&["num_rows", "width"]).rows(),
        read("up").like("gate").rows(),
        read("weight").axes(&["num_rows"]).optional(),
        read("pos_to_token_topk").of(&[DType::I32]).axes(&["num_rows"]).optional(),
        write("codes").of(&[DType::U8]).axes(&["num_rows", "width"]).rows(),
        scales.written(),
    ];
    let signature = CHECK.signature(views, tensors).extent("width", 1, MAX_WIDTH).wide("num_rows");
    let mut call = scales.bound(signature);
    let [num_rows, width] = call.bind(["num_rows", "width"])?;
    CHECK.positive("limit", limit)?;
    let (row_warps, blocks) = scales.grid(CHECK, "gate", options.group.columns())?;
    let params = call.params(&["gate", "up", "weight", "pos_to_token_topk", "codes", "scales"]);
    let params = scales
        .params(params, num_rows, width, row_warps)?
        .i32("scale_type", options.scale as usize)?;
    let params = params.i32("log2_group", options.group.columns().trailing_zeros() as usize)?;
    let params = params.flag("round_to_bf16", options.round_to_bf16).f32("limit", limit);
    let name = if call.vectorised() { "swiglu_quantize_vector" } else { "swiglu_quantize_scalar" };
    let kernel = device.kernel(FILE, &element_types(&[("ELEMENT", views["gate"].dtype)]), name)?;
    kernel.launch_blocks("gate", blocks, &params)?;
    Ok(name)
}

/// Launches the backward, which treats the product as not quantized. It is the backward of
/// [`swiglu::launch`] and takes its tensors.
///
/// # Errors
/// As [`swiglu::launch`].
pub fn backward(device: &Device, views: &Views, limit: f32) -> Result<&'static str> {
    swiglu::launch(device, views, limit, true)
}
