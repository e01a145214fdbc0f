//! Rows and blocks as e4m3 codes with scales, and back (inference 5.3, 5.4, 5.7). With x the values
//! of a group, which are neighbours in a row or a square of 128 by 128,
//!
//! ```text
//! amax = max(max |x|, 1e-4)           s = the least power of two with amax <= 448 s,  or  fp32(amax fp32(1/448))
//! code = e4m3(fp32(x / s))            y = fp32(value(code) s), rounded once more where it is stored in bf16
//! ```
//!
//! A group at the end of a row, or of all rows, may be smaller. A group with a NaN or an infinity
//! has the scale NaN and codes of NaN.
//!
//! # Rounding points
//!
//! Those in the formulas, each to nearest: codes, scales and their decoded values have one value.

use candle_core::Tensor;

use crate::conventions::Conventions;
use crate::error::{Error, Result, require_that};
use crate::format::Format;
use crate::formats::scale_layout::{ScaleLayout, Scales};
use crate::named::Named;
use crate::precision::values;
use crate::quantize::{ScaleType, codes_by, scale_by};

/// The rows of a square group.
pub const SQUARE: usize = 128;

/// The values that share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// This many neighbours in a row.
    Row(usize),
    /// Squares of 128 rows and 128 columns.
    Square,
}

impl Group {
    /// Rows and columns of a group.
    pub fn extents(self) -> [usize; 2] {
        match self {
            Self::Row(columns) => [1, columns],
            Self::Square => [SQUARE; 2],
        }
    }
}

/// Options of the quantization.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// The values that share a scale.
    pub group: Group,
    /// The type of a scale.
    pub scale: ScaleType,
    /// Layout of the scales; those of squares are row by row.
    pub layout: ScaleLayout,
}

impl Options {
    /// The scales of a matrix.
    pub fn scales(self, num_rows: usize, width: usize) -> Scales {
        let [rows, columns] = self.group.extents();
        let bytes = self.scale == ScaleType::E8m0;
        Scales {
            layout: self.layout,
            bytes,
            rows: num_rows.div_ceil(rows),
            groups: width.div_ceil(columns),
        }
    }

    fn check(self) -> Result<()> {
        let plain = self.layout == ScaleLayout::Plain;
        let of_rows = matches!(self.group, Group::Row(_));
        require_that(
            "layout",
            format!("{:?}", self.layout),
            plain || of_rows,
            "scales of squares lie row by row",
        )?;
        let in_tiles = self.layout == ScaleLayout::Blocked;
        let bytes = self.scale == ScaleType::E8m0;
        require_that("layout", "Blocked", !in_tiles || bytes, "tiles of scales hold bytes")
    }
}

/// The elements of each group, row by row of groups, of a matrix `[num_rows, width]`.
fn groups(group: Group, [num_rows, width]: [usize; 2]) -> impl Iterator<Item = Vec<usize>> {
    let [rows, columns] = group.extents();
    let of = move |top: usize, left: usize| {
        let row = move |row: usize| {
            (left..(left + columns).min(width)).map(move |column| row * width + column)
        };
        (top..(top + rows).min(num_rows)).flat_map(row).collect()
    };
    (0..num_rows)
        .step_by(rows)
        .flat_map(move |top| (0..width).step_by(columns).map(move |left| of(top, left)))
}

/// The outputs for `x` `[num_rows, width]`, stored in bf16 or f32:
///
/// - `codes` `[num_rows, width]`, bytes;
/// - `scales`, of the shape that [`Options::scales`] gives: bytes, words of four bytes, or stored
///   in f32.
///
/// # Errors
/// A tensor of the wrong shape, or scales of squares or of fp32 in an unsupported layout.
pub fn quantize(inputs: &Named, options: Options) -> Result<Named> {
    quantize_by(inputs, options, Conventions::default())
}

/// The same by these conventions of a kernel.
///
/// # Errors
/// As [`quantize`].
pub fn quantize_by(inputs: &Named, options: Options, conventions: Conventions) -> Result<Named> {
    options.check()?;
    let axes = ["num_rows", "width"];
    let shape = inputs.extents(axes, &[(&["x"], &axes)])?;
    let x = values(inputs.tensor("x")?)?;
    let mut codes = vec![0.0; x.len()];
    let mut scales = Vec::new();
    for group in groups(options.group, shape) {
        let numbers: Vec<f64> = group.iter().map(|&at| x[at]).collect();
        let scale = scale_by(&numbers, Format::E4M3, options.scale, conventions);
        group
            .iter()
            .zip(codes_by(&numbers, scale, Format::E4M3, conventions))
            .for_each(|(&at, code)| codes[at] = code.into());
        scales.push(scale);
    }
    let device = inputs.tensor("x")?.device();
    let scales = stored_scales(options.scales(shape[0], shape[1]), &scales);
    Ok(Named::new()
        .with("codes", Tensor::from_vec(codes, &shape, device)?)
        .with("scales", Tensor::from_vec(scales.1, scales.0, device)?))
}

/// Scales, row by row, as the tensor that holds them: its shape and its values.
pub fn stored_scales(scales: Scales, numbers: &[f64]) -> (Vec<usize>, Vec<f64>) {
    if !scales.bytes {
        return (scales.shape(), scales.arranged(numbers));
    }
    let bytes: Vec<u8> = numbers.iter().map(|&scale| Format::E8M0.code(scale) as u8).collect();
    (scales.shape(), scales.stored_bytes(&bytes))
}

/// The scales, row by row, that a tensor holds: the inverse of [`stored_scales`].
pub fn read_scales(scales: Scales, stored: &[f64]) -> Vec<f64> {
    if !scales.bytes {
        return scales.gathered(stored);
    }
    Format::E8M0.values(&scales.read_bytes(stored))
}

/// `y` `[num_rows, width]`, stored in `format`, for `codes` and `scales` as [`quantize`] returns
/// them.
///
/// # Errors
/// A tensor of the wrong shape, or scales of squares or of fp32 in an unsupported layout.
pub fn dequantize(inputs: &Named, options: Options, format: Format) -> Result<Named> {
    options.check()?;
    let axes = ["num_rows", "width"];
    let shape = inputs.extents(axes, &[(&["codes"], &axes)])?;
    let (codes, stored) = (inputs.tensor("codes")?, inputs.tensor("scales")?);
    let scales = options.scales(shape[0], shape[1]);
    if stored.dims() != scales.shape() {
        let (expected, actual) = (format!("{:?}", scales.shape()), stored.dims().to_vec());
        return Err(Error::Shape { argument: "scales", expected, actual });
    }
    let mut y = values(codes)?;
    for (group, scale) in groups(options.group, shape).zip(read_scales(scales, &values(stored)?)) {
        for at in group {
            let product = Format::F32.nearest(Format::E4M3.value(y[at] as u64) * scale);
            y[at] = format.nearest(product);
        }
    }
    Ok(Named::new().with("y", Tensor::from_vec(y, &shape, codes.device())?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Draw, f64_tensor};

    const PLAIN: Options =
        Options { group: Group::Row(128), scale: ScaleType::E8m0, layout: ScaleLayout::Plain };

    fn all_options() -> Vec<Options> {
        let scales = [ScaleType::E8m0, ScaleType::PowerOfTwo, ScaleType::Fp32];
        let groups = [Group::Row(64), Group::Row(128), Group::Square];
        let layouts = [ScaleLayout::Plain, ScaleLayout::MnMajor];
        let of = |group| {
            scales
                .into_iter()
                .flat_map(move |scale| layouts.map(|layout| Options { group, scale, layout }))
        };
        groups.into_iter().flat_map(of).filter(|options| options.check().is_ok()).collect()
    }

    #[test]
    fn what_is_quantized_decodes_to_numbers_half_a_step_away_at_most() -> Result<()> {
        let x = Draw::new(1).bf16(&[131, 200], 3.0);
        for options in all_options() {
            let quantized = quantize(&Named::new().with("x", x.clone()), options)?;
            let y = dequantize(&quantized, options, Format::F32)?;
            let scales =
                read_scales(options.scales(131, 200), &values(quantized.tensor("scales")?)?);
            let (x, y) = (values(&x)?, values(y.tensor("y")?)?);
            for (group, scale) in groups(options.group, [131, 200]).zip(scales) {
                for at in group {
                    // The quotient of fp32 scales, and the product, are rounded to fp32 in addition
                    // to the code.
                    let half = Format::E4M3.half_ulp(x[at] / scale)
                        * scale
                        * (1.0 + f64::from(f32::EPSILON));
                    assert!(
                        (x[at] - y[at]).abs() <= half + x[at].abs() * f64::from(f32::EPSILON),
                        "{options:?}"
                    );
                }
            }
        }
        Ok(())
    }

    #[test]
    fn a_layout_places_the_same_scales_and_power_of_two_are_stored_as_bytes_or_numbers()
    -> Result<()> {
        let x = Named::new().with("x", Draw::new(2).bf16(&[5, 700], 100.0));
        let read = |scale, layout| -> Result<Vec<f64>> {
            let options = Options { scale, layout, ..PLAIN };
            Ok(read_scales(
                options.scales(5, 700),
                &values(quantize(&x, options)?.tensor("scales")?)?,
            ))
        };
        let plain = read(ScaleType::E8m0, ScaleLayout::Plain)?;
        for (scale, layout) in [
            (ScaleType::E8m0, ScaleLayout::MnMajor),
            (ScaleType::E8m0, ScaleLayout::Blocked),
            (ScaleType::PowerOfTwo, ScaleLayout::Plain),
            (ScaleType::PowerOfTwo, ScaleLayout::MnMajor),
        ] {
            assert_eq!(read(scale, layout)?, plain, "{scale:?} {layout:?}");
        }
        assert_eq!(
            read(ScaleType::Fp32, ScaleLayout::Plain)?,
            read(ScaleType::Fp32, ScaleLayout::MnMajor)?
        );
        Ok(())
    }

    #[test]
    fn the_last_group_is_that_of_the_numbers_that_are_left() -> Result<()> {
        let mut x = vec![1.0; 3 * 130];
        x[2 * 130 + 129] = 1000.0;
        let x = Named::new().with("x", f64_tensor(&x, &[3, 130]));
        let scales = |group| values(quantize(&x, Options { group, ..PLAIN })?.tensor("scales")?);
        // 1 / 448 is above 2^-9, and 1000 / 448 above 2.
        assert_eq!(scales(Group::Row(128))?, [119.0, 119.0, 119.0, 119.0, 119.0, 129.0]);
        assert_eq!(scales(Group::Square)?, [119.0, 129.0]);
        Ok(())
    }

    #[test]
    fn a_group_that_is_not_finite_decodes_to_nan_and_its_neighbours_do_not() -> Result<()> {
        let mut x = vec![0.0; 256];
        x[3] = f64::NEG_INFINITY;
        let x = Named::new().with("x", f64_tensor(&x, &[1, 256]));
        for scale in [ScaleType::E8m0, ScaleType::PowerOfTwo, ScaleType::Fp32] {
            let options = Options { scale, ..PLAIN };
            let y =
                values(dequantize(&quantize(&x, options)?, options, Format::BF16)?.tensor("y")?)?;
            assert!(
                y[..128].iter().all(|y| y.is_nan()) && y[128..].iter().all(|&y| y == 0.0),
                "{scale:?}"
            );
        }
        Ok(())
    }

    #[test]
    fn shapes_and_layouts_that_do_not_fit_are_refused_and_no_rows_are_no_error() -> Result<()> {
        let x = |shape: &[usize]| {
            Named::new().with("x", f64_tensor(&vec![0.0; shape.iter().product()], shape))
        };
        assert_eq!(quantize(&x(&[0, 128]), PLAIN)?.tensor("scales")?.dims(), [0, 1]);
        assert!(quantize(&x(&[128]), PLAIN).is_err());
        let square = Options { group: Group::Square, layout: ScaleLayout::MnMajor, ..PLAIN };
        assert!(quantize(&x(&[1, 128]), square).unwrap_err().to_string().contains("layout"));
        let tiles = Options { scale: ScaleType::Fp32, layout: ScaleLayout::Blocked, ..PLAIN };
        assert!(quantize(&x(&[1, 128]), tiles).unwrap_err().to_string().contains("layout"));
        let quantized =
            quantize(&x(&[2, 128]), PLAIN)?.with("scales", f64_tensor(&[0.0; 4], &[2, 2]));
        assert!(
            dequantize(&quantized, PLAIN, Format::F32).unwrap_err().to_string().contains("scales")
        );
        Ok(())
    }
}
