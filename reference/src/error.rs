//! What an oracle says about inputs it cannot evaluate. Bad inputs never panic.

use candle_core::{DType, Tensor};

/// Why an oracle refused its inputs, or what the tensor library reported.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A tensor (or list) has the wrong shape.
    #[error("`{argument}` must have shape {expected}, but it has {actual:?}")]
    Shape {
        /// The argument.
        argument: &'static str,
        /// The shape that it must have, in the words of its documentation.
        expected: String,
        /// The shape that it has.
        actual: Vec<usize>,
    },
    /// A tensor was not widened to f64.
    #[error("`{argument}` must be f64, but it is {}", actual.as_str())]
    DType {
        /// The argument.
        argument: &'static str,
        /// The element type that it has.
        actual: DType,
    },
    /// A number lies outside of what the operator is defined for.
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
        return Err(Error::Shape { argument, expected: format!("{shape:?}"), actual: tensor.dims().to_vec() });
    }
    Ok(())
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

/// The error of a list that is no tensor yet.
pub(crate) fn wrong_shape_of(argument: &'static str, expected: &str, actual: &[usize]) -> Error {
    Error::Shape { argument, expected: expected.to_string(), actual: actual.to_vec() }
}

/// The error of a number that breaks `rule`.
pub(crate) fn wrong_value(argument: &'static str, value: impl ToString, rule: &'static str) -> Error {
    Error::Value { argument, value: value.to_string(), rule }
}
