//! Errors of an oracle for inputs that it cannot evaluate. Bad inputs never panic.

use candle_core::{DType, Tensor};

/// Why an oracle rejected its inputs, or what the tensor library reported.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A tensor (or list) has the wrong shape.
    #[error("`{argument}` must have shape {expected}, but it has {actual:?}")]
    Shape {
        /// The argument.
        argument: &'static str,
        /// The required shape, in the words of its documentation.
        expected: String,
        /// The actual shape.
        actual: Vec<usize>,
    },
    /// A tensor was not widened to f64.
    #[error("`{argument}` must be f64, but it is {}", actual.as_str())]
    DType {
        /// The argument.
        argument: &'static str,
        /// The actual element type.
        actual: DType,
    },
    /// A number is outside of the range for which the operator is defined.
    #[error("`{argument}` is {value}, but {rule}")]
    Value {
        /// The argument.
        argument: &'static str,
        /// Its value.
        value: String,
        /// The rule that it breaks.
        rule: &'static str,
    },
    /// The tensor library failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// Result of every fallible function of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Checks that `tensor` is f64 with exactly this shape.
pub(crate) fn require(argument: &'static str, tensor: &Tensor, shape: &[usize]) -> Result<()> {
    require_f64(argument, tensor)?;
    if tensor.dims() != shape {
        return Err(Error::Shape {
            argument,
            expected: format!("{shape:?}"),
            actual: tensor.dims().to_vec(),
        });
    }
    Ok(())
}

/// A tensor by the name of its argument, if present, with its axes.
pub(crate) type WithAxes<'a> = (&'static str, Option<&'a Tensor>, &'a [&'static str]);

/// Checks that the tensors are f64 and that axes of one name have one size. Returns the sizes of
/// these axes, 0 for an axis that no present tensor has.
pub(crate) fn extents<const N: usize>(
    axes: [&str; N],
    tensors: &[WithAxes<'_>],
) -> Result<[usize; N]> {
    let mut known: Vec<(&str, usize)> = Vec::new();
    let extent = |known: &[(&str, usize)], axis: &str| {
        known.iter().find(|(name, _)| *name == axis).map(|known| known.1)
    };
    for &(argument, tensor, names) in tensors {
        let Some(tensor) = tensor else { continue };
        require_f64(argument, tensor)?;
        if tensor.rank() != names.len() {
            return Err(wrong_shape(argument, &format!("[{}]", names.join(", ")), tensor));
        }
        for (&name, &own) in names.iter().zip(tensor.dims()) {
            if extent(&known, name).is_none() {
                known.push((name, own));
            }
        }
        let expected: Vec<usize> = names.iter().filter_map(|name| extent(&known, name)).collect();
        if tensor.dims() != expected {
            return Err(wrong_shape(
                argument,
                &format!("{expected:?} ({})", names.join(", ")),
                tensor,
            ));
        }
    }
    Ok(axes.map(|axis| extent(&known, axis).unwrap_or(0)))
}

/// Checks a rule for a number.
pub(crate) fn require_that(
    argument: &'static str,
    value: impl ToString,
    kept: bool,
    rule: &'static str,
) -> Result<()> {
    if kept { Ok(()) } else { Err(wrong_value(argument, value, rule)) }
}

/// Checks that `tensor` is f64.
pub(crate) fn require_f64(argument: &'static str, tensor: &Tensor) -> Result<()> {
    match tensor.dtype() {
        DType::F64 => Ok(()),
        actual => Err(Error::DType { argument, actual }),
    }
}

/// The error of a tensor whose rank is wrong; `expected` names its dimensions.
pub(crate) fn wrong_shape(argument: &'static str, expected: &str, tensor: &Tensor) -> Error {
    Error::Shape { argument, expected: expected.to_string(), actual: tensor.dims().to_vec() }
}

/// The error of a list that is not yet a tensor.
pub(crate) fn wrong_shape_of(argument: &'static str, expected: &str, actual: &[usize]) -> Error {
    Error::Shape { argument, expected: expected.to_string(), actual: actual.to_vec() }
}

/// The error of a number that breaks `rule`.
pub(crate) fn wrong_value(
    argument: &'static str,
    value: impl ToString,
    rule: &'static str,
) -> Error {
    Error::Value { argument, value: value.to_string(), rule }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zeros(shape: &[usize]) -> Tensor {
        Tensor::zeros(shape, DType::F64, &candle_core::Device::Cpu).expect("a tensor")
    }

    #[test]
    fn axes_of_one_name_have_one_extent_and_errors_name_argument_and_shape() {
        let axes = ["num_rows", "width"];
        let of = |x: &Tensor, weight: Option<&Tensor>| {
            extents(axes, &[("x", Some(x), &axes), ("weight", weight, &axes[1..])])
                .map_err(|error| error.to_string())
        };
        assert_eq!(of(&zeros(&[2, 3]), Some(&zeros(&[3]))), Ok([2, 3]));
        assert_eq!(of(&zeros(&[2, 0]), None), Ok([2, 0]));
        let error =
            |x: &[usize], weight: &[usize]| of(&zeros(x), Some(&zeros(weight))).unwrap_err();
        assert_eq!(error(&[2, 3], &[4]), "`weight` must have shape [3] (width), but it has [4]");
        assert_eq!(error(&[6], &[6]), "`x` must have shape [num_rows, width], but it has [6]");
        let single = zeros(&[3]).to_dtype(DType::F32).expect("a cast");
        assert_eq!(
            of(&zeros(&[2, 3]), Some(&single)),
            Err("`weight` must be f64, but it is f32".into())
        );
        assert_eq!(extents(["batch"], &[]).expect("no tensor"), [0]);
    }
}
