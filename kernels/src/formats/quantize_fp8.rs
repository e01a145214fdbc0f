//! `quantize_fp8`: launcher of `kernels/cuda/formats/quantize_fp8.cu` (inference 5.3, 5.4, 5.7).

use serde::{Deserialize, Serialize};

use crate::arguments::{Arguments, modules_of_floats};
use crate::formats::group_format::{GroupCall, GroupFormat};
pub use crate::formats::scale_layout::{MAX_WIDTH, ScaleLayout, ScaleType, Scales};
use dsv4_runtime::source::Module;
use dsv4_runtime::{Device, Result, Views};

const FILE: &str = "quantize_fp8.cu";
const CHECK: Arguments = Arguments { operator: "quantize_fp8" };

/// Which values share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Group {
    /// 64 neighbours in a row.
    Row64,
    /// 128 neighbours in a row.
    Row128,
    /// Squares of 128 rows and 128 columns; their scales are stored row by row.
    Square128,
}

impl Group {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Row64, Self::Row128, Self::Square128];

    /// Rows and columns of a group.
    pub fn extents(self) -> [usize; 2] {
        match self {
            Self::Row64 => [1, 64],
            Self::Row128 => [1, 128],
            Self::Square128 => [128, 128],
        }
    }
}

/// How values are quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Which values share a scale.
    pub group: Group,
    /// What a scale is.
    pub scale: ScaleType,
    /// The layout of the scales.
    pub layout: ScaleLayout,
}

impl Options {
    /// The scales of a matrix.
    pub fn scales(self, num_rows: usize, width: usize) -> Scales {
        let [rows, columns] = self.group.extents();
        Scales {
            bytes: self.scale == ScaleType::E8m0,
            layout: self.layout,
            rows: num_rows.div_ceil(rows),
            of_rows: rows == 1,
            groups: width.div_ceil(columns),
        }
    }

    fn check(self, scales: Scales) -> Result<()> {
        if self.group == Group::Square128 && self.layout != ScaleLayout::Plain {
            return CHECK.refuse("layout", "scales of squares lie row by row");
        }
        scales.check(CHECK)
    }

    /// Checks the arguments of a call.
    fn call(self, views: &Views, quantizes: bool) -> Result<GroupCall<'_>> {
        let [rows, columns] = GroupFormat::extents(views, quantizes);
        let scales = self.scales(rows, columns);
        self.check(scales)?;
        let [_, group] = self.group.extents();
        let format = GroupFormat {
            check: CHECK,
            file: FILE,
            group,
            elements_per_byte: 1,
            has_global_scale: false,
        };
        format.call(views, scales, quantizes)?.with(|params| {
            params.i32("scale_type", self.scale as usize)?.i32("log2_group", log2(group))
        })
    }
}

/// Every module that the launcher compiles.
pub fn modules() -> Vec<Module> {
    modules_of_floats(FILE, &["ELEMENT"])
}

/// Quantizes; returns the kernel that ran. Its tensors:
///
/// - `x` `[num_rows, width]`, bf16 or f32, rows contiguous, of up to [`MAX_WIDTH`] elements;
/// - `codes` of the same shape, u8: e4m3, rows contiguous;
/// - `scales`, dense, of the type and shape of [`Scales::tensor`]; padding is written as 0.
///
/// # Errors
/// A rejected argument (`layout`: scales of squares are stored row by row, tiles of scales are
/// bytes), a compile error, a rejected launch.
pub fn quantize(device: &Device, views: &Views, options: Options) -> Result<&'static str> {
    let mut call = options.call(views, true)?;
    let square = options.group == Group::Square128;
    if square {
        let [rows, columns] = GroupFormat::extents(views, true);
        let scales = options.scales(rows, columns);
        call.blocks = scales.rows.saturating_mul(scales.groups);
    }
    let names = [
        ["quantize_fp8_scalar", "quantize_fp8_vector"],
        ["quantize_fp8_squares_scalar", "quantize_fp8_squares_vector"],
    ];
    call.launch(device, names[usize::from(square)])
}

/// Decodes; returns the kernel that ran. Its tensors:
///
/// - `codes` `[num_rows, width]` u8: e4m3, rows contiguous, of up to [`MAX_WIDTH`] elements;
/// - `scales` as [`quantize`] writes them; padding is not read;
/// - `y` of the shape of `codes`, bf16 or f32, rows contiguous.
///
/// # Errors
/// As [`quantize`].
pub fn dequantize(device: &Device, views: &Views, options: Options) -> Result<&'static str> {
    let [group_rows, _] = options.group.extents();
    let call = options.call(views, false)?;
    let call = call.with(|params| params.i32("log2_group_rows", log2(group_rows)))?;
    call.launch(device, ["dequantize_fp8_scalar", "dequantize_fp8_vector"])
}

fn log2(power: usize) -> usize {
    power.trailing_zeros() as usize
}
