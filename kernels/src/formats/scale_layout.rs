//! Scales of groups (inference 5.4, 5.7): their types and layouts.

use serde::{Deserialize, Serialize};

use crate::arguments::{Argument, Arguments, Signature, read, write};
use dsv4_runtime::params::Params;
use dsv4_runtime::{DType, Result, Views};

/// Bytes of a tile of scales: 128 rows by 4 groups.
pub const TILE_BYTES: usize = 512;
/// Elements of a row that a warp processes, and warps of a block, in the kernels that loop over
/// rows of groups.
const WARP_ELEMENTS: usize = 512;
const WARPS: usize = 8;
/// Elements of the longest row that they take.
pub const MAX_WIDTH: usize = 1 << 30;

/// The type of the scale of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleType {
    /// A power of two, as an e8m0 byte.
    E8m0,
    /// A power of two, in fp32.
    PowerOfTwo,
    /// The largest magnitude divided by the format's largest value, in fp32.
    Fp32,
}

/// The layout of scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleLayout {
    /// Row by row.
    Plain,
    /// Group by group, rows padded to a multiple of 4; bytes of four groups in one word.
    MnMajor,
    /// Tiles of 128 rows by 4 groups; bytes only.
    Blocked,
}

/// The scales of a matrix, one for each group of a row (or of several rows).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scales {
    /// Whether each is a byte, otherwise an fp32 value.
    pub bytes: bool,
    /// Their layout.
    pub layout: ScaleLayout,
    /// Rows of groups.
    pub rows: usize,
    /// Whether a row of groups is one row of the matrix, otherwise several.
    pub of_rows: bool,
    /// Groups of a row.
    pub groups: usize,
}

impl Scales {
    /// Bytes, one for each `group` elements of a row.
    pub(crate) fn of_bytes(
        layout: ScaleLayout,
        num_rows: usize,
        width: usize,
        group: usize,
    ) -> Self {
        let groups = width.div_ceil(group);
        Self { bytes: true, layout, rows: num_rows, of_rows: true, groups }
    }

    /// Rows of groups that have scales, including padding.
    pub fn padded_rows(self) -> usize {
        self.rows.next_multiple_of(match self.layout {
            ScaleLayout::Plain => 1,
            ScaleLayout::MnMajor => 4,
            ScaleLayout::Blocked => 128,
        })
    }

    /// Groups of a row that have scales, including padding.
    pub fn padded_groups(self) -> usize {
        let fours = self.bytes && self.layout != ScaleLayout::Plain;
        if fours { self.groups.next_multiple_of(4) } else { self.groups }
    }

    /// The name of the axis of rows of groups.
    fn row_axis(self) -> &'static str {
        if self.of_rows { "num_rows" } else { "num_row_blocks" }
    }

    /// The type and the axes of the tensor that holds them.
    pub fn tensor(self) -> (DType, Vec<(&'static str, usize)>) {
        let (rows, groups) = (self.padded_rows(), self.padded_groups());
        match (self.layout, self.bytes) {
            (ScaleLayout::Plain, true) => {
                (DType::U8, vec![(self.row_axis(), rows), ("num_groups", groups)])
            }
            (ScaleLayout::Plain, false) => {
                (DType::F32, vec![(self.row_axis(), rows), ("num_groups", groups)])
            }
            (ScaleLayout::MnMajor, true) => {
                (DType::I32, vec![("num_words", groups / 4), ("aligned_rows", rows)])
            }
            (ScaleLayout::MnMajor, false) => {
                (DType::F32, vec![("num_groups", groups), ("aligned_rows", rows)])
            }
            (ScaleLayout::Blocked, _) => {
                let tiles = vec![
                    ("row_tiles", rows / 128),
                    ("group_tiles", groups / 4),
                    ("tile_bytes", TILE_BYTES),
                ];
                (DType::U8, tiles)
            }
        }
    }

    /// The kernels' number of the layout.
    pub(crate) fn number(self) -> usize {
        match (self.layout, self.bytes) {
            (ScaleLayout::Plain, _) => 0,
            (ScaleLayout::MnMajor, false) => 1,
            (ScaleLayout::MnMajor, true) => 2,
            (ScaleLayout::Blocked, _) => 3,
        }
    }

    /// Rejects tiles of scales that are not bytes.
    pub(crate) fn check(self, check: Arguments) -> Result<()> {
        if self.bytes || self.layout != ScaleLayout::Blocked {
            return Ok(());
        }
        check.refuse("layout", "tiles of scales hold bytes, and these are fp32 numbers")
    }

    /// The argument `scales`.
    fn argument<'a>(self, argument: Argument<'a>) -> Argument<'a> {
        let argument = argument.of(match self.tensor().0 {
            DType::U8 => &[DType::U8],
            DType::I32 => &[DType::I32],
            _ => &[DType::F32],
        });
        argument.axes(match (self.layout, self.bytes) {
            (ScaleLayout::Plain, _) if self.of_rows => &["num_rows", "num_groups"],
            (ScaleLayout::Plain, _) => &["num_row_blocks", "num_groups"],
            (ScaleLayout::MnMajor, true) => &["num_words", "aligned_rows"],
            (ScaleLayout::MnMajor, false) => &["num_groups", "aligned_rows"],
            (ScaleLayout::Blocked, _) => &["row_tiles", "group_tiles", "tile_bytes"],
        })
    }

    /// The argument `scales` of a kernel that writes them.
    pub(crate) fn written<'a>(self) -> Argument<'a> {
        self.argument(write("scales"))
    }

    /// The argument `scales` of a kernel that reads them.
    pub(crate) fn read<'a>(self) -> Argument<'a> {
        self.argument(read("scales"))
    }

    /// Sets the sizes of [`Self::written`] and [`Self::read`] to those of these scales.
    pub(crate) fn bound<'a>(self, signature: Signature<'a>) -> Signature<'a> {
        let known = self.tensor().1.into_iter().filter(|(axis, _)| *axis != "num_rows");
        known.fold(signature, |signature, (axis, extent)| signature.given(axis, extent))
    }

    /// Warps that process a row of this many elements in groups of this size, and blocks that
    /// process all rows.
    pub(crate) fn grid(
        self,
        check: Arguments,
        name: &'static str,
        group: usize,
    ) -> Result<(usize, usize)> {
        let row_warps = (self.padded_groups() * group).div_ceil(WARP_ELEMENTS).max(1);
        let warps = self.padded_rows().saturating_mul(row_warps);
        if u32::try_from(warps).is_err() {
            let (rows, limit) = (self.rows, u32::MAX);
            return check.refuse(
                name,
                format!("{rows} rows of {row_warps} warps each: there may be {limit} warps"),
            );
        }
        Ok((row_warps, warps.div_ceil(WARPS)))
    }

    /// Parameters of kernels that loop over rows of groups.
    pub(crate) fn params(
        self,
        params: Params,
        num_rows: usize,
        width: usize,
        row_warps: usize,
    ) -> Result<Params> {
        let params = params.i64("num_rows", num_rows)?.i64("padded_rows", self.padded_rows())?;
        let params = params.i32("width", width)?.i32("row_warps", row_warps)?;
        let params =
            params.i32("num_groups", self.groups)?.i32("padded_groups", self.padded_groups())?;
        params.i32("scale_layout", self.number())
    }
}

/// Parameters of the scales of a product's operands, `x` and `w`.
pub(crate) fn product_params(params: Params, [x, w]: [Scales; 2]) -> Result<Params> {
    let params = params.i64("x_padded_rows", x.padded_rows())?;
    let params = params.i64("w_padded_rows", w.padded_rows())?;
    let params = params.i32("x_groups", x.groups)?.i32("x_padded_groups", x.padded_groups())?;
    let params = params.i32("x_scale_layout", x.number())?;
    let params = params.i32("w_groups", w.groups)?.i32("w_padded_groups", w.padded_groups())?;
    params.i32("w_scale_layout", w.number())
}

/// The sizes of a tensor's two axes, if it has two; its other properties are checked with its
/// signature.
pub(crate) fn extents_of(views: &Views, name: &str) -> [usize; 2] {
    match views.get(name).map(|view| &view.shape[..]) {
        Some(&[rows, width]) => [rows.min(i64::MAX as usize / 512), width.min(MAX_WIDTH)],
        _ => [0, 0],
    }
}
