//! `scale_swizzle`: launcher of `kernels/cuda/formats/scale_swizzle.cu` (inference 5.7).

use crate::arguments::{Argument, Arguments, Signature, read, write};
pub use crate::formats::scale_layout::TILE_BYTES;
use crate::formats::scale_layout::extents_of;
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, Result, Views};

const FILE: &str = "scale_swizzle.cu";
const CHECK: Arguments = Arguments { operator: "scale_swizzle" };
/// Groups of a row at most.
pub const MAX_GROUPS: usize = 1 << 30;
/// Rows and groups of a tile, tiles of a warp, warps that share the same tiles, warps of a block.
const TILE: [usize; 2] = [128, 4];
const WARP_TILES: usize = 8;
const PARTS: usize = 2;
const WARPS: usize = 4;

/// The one module that the launcher compiles.
pub fn modules() -> Vec<Module> {
    vec![module(FILE, &Vec::new())]
}

/// Tiles along the rows and along the groups of a matrix of scales.
pub fn tiles(num_rows: usize, num_groups: usize) -> [usize; 2] {
    [num_rows.div_ceil(TILE[0]), num_groups.div_ceil(TILE[1])]
}

/// Packs rows of scales into tiles, or unpacks them (`inverse`). Returns the kernel that ran. Its
/// tensors:
///
/// - `scales` `[num_rows, num_groups]` u8, rows contiguous, of up to [`MAX_GROUPS`]; written by
///   the inverse;
/// - `tiles` `[row_tiles, group_tiles, 512]` u8, each tile at a multiple of 16 bytes; read by the
///   inverse. Padding of rows and groups is written as 0.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn launch(device: &Device, views: &Views, inverse: bool) -> Result<&'static str> {
    fn tensor<'a>(name: &'static str, written: bool) -> Argument<'a> {
        if written { write(name) } else { read(name) }.of(&[DType::U8])
    }
    let [rows, groups] = extents_of(views, "scales");
    let [row_tiles, group_tiles] = tiles(rows, groups);
    let tensors = [
        tensor("scales", inverse).axes(&["num_rows", "num_groups"]).rows(),
        tensor("tiles", !inverse).axes(&["row_tiles", "group_tiles", "tile_bytes"]).aligned_rows(),
    ];
    let signature: Signature<'_> =
        CHECK.signature(views, tensors).extent("num_groups", 1, MAX_GROUPS).wide("num_rows");
    let signature = signature.given("row_tiles", row_tiles).given("group_tiles", group_tiles);
    let mut call = signature.given("tile_bytes", TILE_BYTES);
    let [num_rows, num_groups] = call.bind(["num_rows", "num_groups"])?;
    let warps = row_tiles.saturating_mul(group_tiles.div_ceil(WARP_TILES)).saturating_mul(PARTS);
    if u32::try_from(warps).is_err() {
        return CHECK.refuse(
            "scales",
            format!("{num_rows} rows need {warps} warps; there may be {}", u32::MAX),
        );
    }
    let params = call
        .params(&["scales", "tiles"])
        .i64("num_rows", num_rows)?
        .i32("num_groups", num_groups)?;
    let names = [
        ["scale_swizzle_scalar", "scale_swizzle_vector"],
        ["scale_unswizzle_scalar", "scale_unswizzle_vector"],
    ];
    let name = names[usize::from(inverse)][usize::from(call.vectorised())];
    device.kernel(FILE, &Vec::new(), name)?.launch_blocks(
        "scales",
        warps.div_ceil(WARPS),
        &params,
    )?;
    Ok(name)
}
