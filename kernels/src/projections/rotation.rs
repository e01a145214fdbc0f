//! Rotations by position: what the launchers of kernels that turn channels share.

use crate::arguments::{Argument, Arguments, read};
use dsv4_runtime::{DType, Result, Views};

/// The tensors that determine the rotation of a token: `cos` and `sin` `[table_rows,
/// half_rope_dim]` f32, rows contiguous, and `positions` `[num_tokens]` i32, absent where token `t`
/// has the table's row `t`.
pub(crate) fn tables<'a>() -> [Argument<'a>; 3] {
    [
        read("cos").axes(&["table_rows", "half_rope_dim"]).rows().one_stride(),
        read("sin").like("cos").rows().one_stride(),
        read("positions").of(&[DType::I32]).axes(&["num_tokens"]).optional(),
    ]
}

/// The tables turn some of the channels of a head.
///
/// # Errors
/// They turn none, or more than there are.
pub(crate) fn check_half(check: Arguments, half: usize, head_dim: usize) -> Result<()> {
    if half == 0 || 2 * half > head_dim {
        return check
            .refuse("cos", format!("{half} columns rotate {} channels of {head_dim}", 2 * half));
    }
    Ok(())
}

/// The tables have a row for each token, where there are no positions.
///
/// # Errors
/// They have fewer.
pub(crate) fn check_rows(
    check: Arguments,
    views: &Views,
    table_rows: usize,
    num_tokens: usize,
) -> Result<()> {
    if views.get("positions").is_none() && table_rows < num_tokens {
        return check.refuse(
            "cos",
            format!("{table_rows} rows must cover {num_tokens} tokens without positions"),
        );
    }
    Ok(())
}
