//! Converts scales from rows to tiles of 128 rows by 4 groups, and back (inference 5.7). The
//! offsets are those of [`Scales`] with the layout [`ScaleLayout::Blocked`]. Padding of rows and
//! groups is 0, and is not read back.
//!
//! Nothing is computed: each byte is only moved.

use candle_core::Tensor;

use crate::error::{Result, require};
use crate::formats::scale_layout::{ScaleLayout, Scales};
use crate::named::Named;
use crate::precision::values;

fn blocked(rows: usize, groups: usize) -> Scales {
    Scales { layout: ScaleLayout::Blocked, bytes: true, rows, groups }
}

/// `tiles` `[row_tiles, group_tiles, 512]` of `scales` `[num_rows, num_groups]`, bytes.
///
/// # Errors
/// A tensor of the wrong shape.
pub fn swizzle(inputs: &Named) -> Result<Named> {
    let axes = ["num_rows", "num_groups"];
    let [rows, groups] = inputs.extents(axes, &[(&["scales"], &axes)])?;
    let scales = inputs.tensor("scales")?;
    let tiles = blocked(rows, groups).arranged(&values(scales)?);
    Ok(Named::new()
        .with("tiles", Tensor::from_vec(tiles, blocked(rows, groups).shape(), scales.device())?))
}

/// `scales` `[num_rows, num_groups]` of `tiles` as [`swizzle`] returns them: the inverse of
/// [`swizzle`].
///
/// # Errors
/// A tensor of the wrong shape.
pub fn unswizzle(inputs: &Named, num_rows: usize, num_groups: usize) -> Result<Named> {
    let (tiles, blocked) = (inputs.tensor("tiles")?, blocked(num_rows, num_groups));
    require("tiles", tiles, &blocked.shape())?;
    let scales = blocked.gathered(&values(tiles)?);
    Ok(Named::new()
        .with("scales", Tensor::from_vec(scales, (num_rows, num_groups), tiles.device())?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::f64_tensor;

    #[test]
    fn what_was_put_into_tiles_comes_out_of_them_and_what_pads_them_is_zero() -> Result<()> {
        for (rows, groups) in [(1, 1), (33, 6), (129, 4), (0, 3)] {
            let numbers: Vec<f64> = (0..rows * groups).map(|at| (at % 255 + 1) as f64).collect();
            let tiles =
                swizzle(&Named::new().with("scales", f64_tensor(&numbers, &[rows, groups])))?;
            let zeros = values(tiles.tensor("tiles")?)?.iter().filter(|&&byte| byte == 0.0).count();
            assert_eq!(zeros, rows.div_ceil(128) * groups.div_ceil(4) * 512 - rows * groups);
            assert_eq!(values(unswizzle(&tiles, rows, groups)?.tensor("scales")?)?, numbers);
        }
        Ok(())
    }

    #[test]
    fn tiles_of_another_shape_are_refused() {
        let tiles = Named::new().with("tiles", f64_tensor(&[0.0; 512], &[1, 1, 512]));
        assert!(unswizzle(&tiles, 129, 4).unwrap_err().to_string().contains("tiles"));
    }
}
