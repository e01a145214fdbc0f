//! The grid on which a kernel's values lie, element by element, and the error of its last rounding.

use dsv4_reference::{Format, statistics};
use dsv4_runtime::DType;

use crate::operator::{Grid, OracleTensor};

/// A [`Grid`] with the scales that it names.
#[derive(Clone, Debug, PartialEq)]
pub enum Steps {
    /// No rounding.
    Exact,
    /// Steps of a format.
    Float(Format),
    /// Steps of a format times the element's scale.
    Scaled {
        /// Format of the codes.
        format: Format,
        /// For each element the scale of its block.
        scales: Vec<f64>,
    },
}

impl From<DType> for Steps {
    fn from(dtype: DType) -> Self {
        match Grid::from(dtype) {
            Grid::Float(format) => Self::Float(format),
            Grid::Exact | Grid::Scaled { .. } => Self::Exact,
        }
    }
}

impl Steps {
    /// The steps of a tensor of `shape`; scales are taken from the oracle's tensors.
    ///
    /// # Errors
    /// Scales that the oracle does not have, or that do not fit the tensor.
    pub fn of(grid: Grid, shape: &[usize], oracle: &[OracleTensor]) -> Result<Self, String> {
        match grid {
            Grid::Exact => Ok(Self::Exact),
            Grid::Float(format) => Ok(Self::Float(format)),
            Grid::Scaled { format, block, scales } => {
                let of = oracle.iter().find(|tensor| tensor.name == scales);
                let of = of.ok_or_else(|| format!("the oracle has no scales `{scales}`"))?;
                Ok(Self::Scaled { format, scales: spread(of, block, shape)? })
            }
        }
    }

    /// A tensor's elements after it is stored on this grid. Values that overflow stay as they are.
    pub fn store(&self, values: &[f64]) -> Vec<f64> {
        match self {
            Self::Exact => values.to_vec(),
            Self::Float(format) => statistics::stored(*format, values),
            Self::Scaled { format, scales } => {
                let in_scales: Vec<f64> =
                    values.iter().zip(scales).map(|(value, scale)| value / scale).collect();
                let stored = statistics::stored(*format, &in_scales);
                let of = |((stored, scale), value): ((f64, &f64), &f64)| {
                    if stored.is_finite() { stored * scale } else { *value }
                };
                stored.into_iter().zip(scales).zip(values).map(of).collect()
            }
        }
    }

    /// Half a unit in the last place of element number `index` at magnitude `value`.
    pub fn half_ulp(&self, index: usize, value: f64) -> f64 {
        match self {
            Self::Exact => 0.0,
            Self::Float(format) => format.half_ulp(value),
            Self::Scaled { format, scales } => {
                let scale = scales[index].abs();
                // A block of scale zero holds only zeros, and one without a finite scale holds no
                // number.
                if scale > 0.0 && scale.is_finite() {
                    format.half_ulp(value / scale) * scale
                } else {
                    0.0
                }
            }
        }
    }

    /// A unit in the last place, for reports. Integers are one apart.
    pub fn ulp(&self, index: usize, value: f64) -> f64 {
        match self {
            Self::Exact => 1.0,
            _ => 2.0 * self.half_ulp(index, value),
        }
    }
}

/// For each element of a tensor of `shape` the scale of its block.
fn spread(scales: &OracleTensor, block: [usize; 2], shape: &[usize]) -> Result<Vec<f64>, String> {
    // A vector counts as one row.
    let matrix = |shape: &[usize]| match *shape {
        [] => (Vec::new(), 1, 1),
        [columns] => (Vec::new(), 1, columns),
        [ref outer @ .., rows, columns] => (outer.to_vec(), rows, columns),
    };
    let (outer, rows, columns) = matrix(shape);
    let blocks = (rows.div_ceil(block[0].max(1)), columns.div_ceil(block[1].max(1)));
    let (scales_outer, scale_rows, scale_columns) = matrix(&scales.shape);
    if block.contains(&0) || scales_outer != outer || (scale_rows, scale_columns) != blocks {
        let (name, found) = (scales.name, &scales.shape);
        return Err(format!(
            "scales `{name}` have shape {found:?}, which is not one for each {block:?} of {shape:?}"
        ));
    }
    let place = |i: usize| {
        let (matrix, row, column) = (i / (rows * columns), i / columns % rows, i % columns);
        (matrix * blocks.0 + row / block[0]) * blocks.1 + column / block[1]
    };
    Ok((0..shape.iter().product()).map(|i| scales.values[place(i)]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operator::Side;

    fn scales(shape: &[usize], values: &[f64]) -> OracleTensor {
        OracleTensor {
            name: "s",
            side: Side::Forward,
            shape: shape.to_vec(),
            values: values.to_vec(),
        }
    }

    const GRID: Grid = Grid::Scaled { format: Format::E2M1, block: [2, 4], scales: "s" };

    #[test]
    fn an_element_has_the_steps_of_its_blocks_scale() {
        // Two matrices of 3 rows and 5 columns, blocks of 2 by 4: the last row and the last column
        // are in partial blocks.
        let oracle = [scales(&[2, 2, 2], &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 0.0])];
        let steps = Steps::of(GRID, &[2, 3, 5], &oracle).unwrap();
        // Elements [0, 1, 3], [0, 1, 4], [0, 2, 0], [1, 0, 0], and [1, 2, 4], the last in a block
        // without numbers.
        let halves = [(8, 0.25), (9, 0.5), (10, 1.0), (15, 4.0), (29, 0.0)];
        for (index, half) in halves {
            assert_eq!(steps.half_ulp(index, 0.0), half, "{index}");
        }
        // 12 is 6 in units of scale 2, and neighbours there are 2 apart.
        assert_eq!((steps.half_ulp(9, 12.0), steps.ulp(9, -12.0)), (2.0, 4.0));
    }

    #[test]
    fn scales_that_do_not_exist_or_do_not_fit_are_refused() {
        let refused =
            |oracle: &[OracleTensor], shape: &[usize]| Steps::of(GRID, shape, oracle).unwrap_err();
        assert!(refused(&[], &[2, 4]).contains("no scales `s`"));
        let one = [scales(&[1, 1], &[1.0])];
        assert!(Steps::of(GRID, &[2, 4], &one).is_ok());
        for shape in [&[2, 5][..], &[3, 4], &[1, 2, 4]] {
            assert!(refused(&one, shape).contains("[1, 1]"), "{shape:?}");
        }
    }

    #[test]
    fn integers_are_not_rounded_and_are_one_apart_in_reports() {
        for dtype in [DType::I32, DType::I64, DType::U8] {
            let steps = Steps::from(dtype);
            assert_eq!((steps.half_ulp(0, 5.0), steps.ulp(0, 5.0)), (0.0, 1.0));
        }
        assert_eq!(Steps::from(DType::Bf16), Steps::Float(Format::BF16));
    }
}
