//! Interleaves the rows of gate and up of expert weights by eight, and separates them (inference
//! 5.8).
//!
//! ```text
//! logical      gate 0 .. I-1, up 0 .. I-1
//! interleaved  gate 0 .. 7, up 0 .. 7, gate 8 .. 15, up 8 .. 15 ...
//! ```
//!
//! Nothing is computed: each byte is only moved, for weights and scales alike.

use candle_core::Tensor;

use crate::error::{Result, require_that};
use crate::named::Named;

/// Neighbouring rows of gate, or of up.
pub const GRANULE: usize = 8;

/// `interleaved` of `logical`, both `[num_experts, num_rows, row_bytes]`, bytes. Half of the rows
/// belong to gate, the others to up; each half is a multiple of eight.
///
/// # Errors
/// A tensor of the wrong shape.
pub fn interleave(inputs: &Named) -> Result<Named> {
    let [experts, rows, bytes] = extents(inputs, "logical")?;
    let logical =
        inputs.tensor("logical")?.reshape((experts, 2, rows / (2 * GRANULE), GRANULE, bytes))?;
    Ok(Named::new().with("interleaved", transposed(&logical)?.reshape((experts, rows, bytes))?))
}

/// `logical` of `interleaved`: the inverse of [`interleave`].
///
/// # Errors
/// A tensor of the wrong shape.
pub fn separate(inputs: &Named) -> Result<Named> {
    let [experts, rows, bytes] = extents(inputs, "interleaved")?;
    let interleaved = inputs.tensor("interleaved")?.reshape((
        experts,
        rows / (2 * GRANULE),
        2,
        GRANULE,
        bytes,
    ))?;
    Ok(Named::new().with("logical", transposed(&interleaved)?.reshape((experts, rows, bytes))?))
}

fn extents(inputs: &Named, name: &'static str) -> Result<[usize; 3]> {
    let axes = ["num_experts", "num_rows", "row_bytes"];
    let extents = inputs.extents(axes, &[(&[name], &axes)])?;
    require_that(
        "num_rows",
        extents[1],
        extents[1].is_multiple_of(2 * GRANULE),
        "gate and up have eights of rows",
    )?;
    Ok(extents)
}

/// Transposes the halves and the groups of eight.
fn transposed(rows: &Tensor) -> Result<Tensor> {
    Ok(rows.transpose(1, 2)?.contiguous()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::precision::values;
    use crate::testing::f64_tensor;

    /// Every byte is the index of its row.
    fn numbered(experts: usize, rows: usize, bytes: usize) -> Tensor {
        let numbers: Vec<f64> = (0..experts * rows * bytes).map(|at| (at / bytes) as f64).collect();
        f64_tensor(&numbers, &[experts, rows, bytes])
    }

    #[test]
    fn eight_rows_of_gate_come_before_the_eight_of_up_with_the_same_numbers() -> Result<()> {
        let interleaved = interleave(&Named::new().with("logical", numbered(2, 48, 1)))?;
        let rows = values(interleaved.tensor("interleaved")?)?;
        let first: Vec<usize> =
            [0..8, 24..32, 8..16, 32..40, 16..24, 40..48].into_iter().flatten().collect();
        let both: Vec<f64> = first
            .iter()
            .chain(first.iter().map(|row| row + 48).collect::<Vec<_>>().iter())
            .map(|&row| row as f64)
            .collect();
        assert_eq!(rows, both);
        Ok(())
    }

    #[test]
    fn what_was_interleaved_comes_apart_again() -> Result<()> {
        for (experts, rows, bytes) in [(0, 16, 3), (1, 16, 1), (3, 64, 5)] {
            let logical = numbered(experts, rows, bytes);
            let interleaved = interleave(&Named::new().with("logical", logical.clone()))?;
            assert_eq!(values(separate(&interleaved)?.tensor("logical")?)?, values(&logical)?);
        }
        Ok(())
    }

    #[test]
    fn halves_that_are_no_eights_are_refused() {
        let refused =
            interleave(&Named::new().with("logical", numbered(1, 24, 1))).unwrap_err().to_string();
        assert!(refused.contains("num_rows"), "{refused}");
    }
}
