//! Rows times a factor (inference 3): `y = factor x`.
//!
//! # Rounding points
//!
//! The product is an fp32 value; y is rounded once to the type in which it is stored.

use crate::error::Result;
use crate::named::Named;
use crate::precision::Rounding;

/// `y` `[num_rows, width]`, stored in the type of `x`, for `x` `[num_rows, width]`, stored in bf16
/// or f32.
pub fn forward(inputs: &Named, factor: f64, rounding: &mut Rounding) -> Result<Named> {
    let y = rounding.f32(&(inputs.tensor("x")? * factor)?)?;
    Ok(Named::new().with("y", y))
}
