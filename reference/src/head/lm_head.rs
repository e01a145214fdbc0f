//! Logits of sampled rows: hidden states times the head's weights (inference 12.1).
//!
//! ```text
//! logits[i, v] = sum_k hidden[rows[i], k] weight[v, k]        -infinity where rows[i] names no token
//! ```
//!
//! Operands are bf16, products are added in fp32, and only the sum is rounded.

use candle_core::Tensor;

use crate::error::{Result, wrong_value};
use crate::named::Named;
use crate::precision::{Rounding, values};

/// `logits` `[num_rows, vocab_size]`, stored in f32, for these inputs:
///
/// - `hidden` `[num_tokens, hidden_size]` and `weight` `[vocab_size, hidden_size]`, stored in bf16;
/// - `rows` `[num_rows]`, stored in i32: the sampled tokens; absent where all are sampled, in their
///   order.
///
/// # Errors
/// Tensors whose shapes do not match.
pub fn forward(inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    let tensors: [(&[_], &[_]); 3] = [
        (&["hidden"], &["num_tokens", "hidden_size"]),
        (&["weight"], &["vocab_size", "hidden_size"]),
        (&["rows"], &["num_rows"]),
    ];
    let [num_tokens, vocab_size, hidden_size] =
        inputs.extents(["num_tokens", "vocab_size", "hidden_size"], &tensors)?;
    if hidden_size == 0 {
        return Err(wrong_value("hidden_size", hidden_size, "there must be at least one"));
    }
    let (hidden, weight) = (inputs.tensor("hidden")?, inputs.tensor("weight")?);
    let rows: Option<Vec<Option<usize>>> = match inputs.get("rows") {
        None => None,
        Some(rows) => Some(values(rows)?.into_iter().map(|row| token(row, num_tokens)).collect()),
    };
    let Some(rows) = rows else {
        return Ok(
            Named::new().with("logits", rounding.matmul_f32(hidden, &weight.t()?.contiguous()?)?)
        );
    };
    // A row that names no token is a row of zeros until its logits are set to -infinity.
    let given = values(hidden)?;
    let row = |row: &Option<usize>| match row {
        Some(token) => given[token * hidden_size..][..hidden_size].to_vec(),
        None => vec![0.0; hidden_size],
    };
    let chosen: Vec<f64> = rows.iter().flat_map(row).collect();
    let chosen = Tensor::from_vec(chosen, (rows.len(), hidden_size), hidden.device())?;
    let logits = rounding.matmul_f32(&chosen, &weight.t()?.contiguous()?)?;
    let mut logits = values(&logits)?;
    for (row, logits) in rows.iter().zip(logits.chunks_mut(vocab_size.max(1))) {
        if row.is_none() {
            logits.fill(f64::NEG_INFINITY);
        }
    }
    Ok(Named::new()
        .with("logits", Tensor::from_vec(logits, (rows.len(), vocab_size), hidden.device())?))
}

fn token(row: f64, num_tokens: usize) -> Option<usize> {
    (row >= 0.0 && row < num_tokens as f64).then_some(row as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Golden, assert_within, f64_tensor};

    fn logits(inputs: &Named) -> Tensor {
        forward(inputs, &mut Rounding::exact())
            .expect("an oracle")
            .tensor("logits")
            .expect("logits")
            .clone()
    }

    fn small() -> Named {
        let hidden = f64_tensor(&[1.0, 2.0, 0.0, -1.0], &[2, 2]);
        Named::new()
            .with("hidden", hidden)
            .with("weight", f64_tensor(&[1.0, 0.0, 3.0, 1.0, 0.0, 5.0], &[3, 2]))
    }

    #[test]
    fn a_logit_is_the_product_of_a_token_and_a_row_of_the_weights() {
        assert_eq!(values(&logits(&small())).expect("numbers"), [1.0, 5.0, 10.0, 0.0, -1.0, -5.0]);
    }

    #[test]
    fn rows_name_tokens_and_those_that_name_none_have_no_logits() {
        let rows = [1.0, 1.0, -1.0, 2.0, 0.0];
        let found =
            values(&logits(&small().with("rows", f64_tensor(&rows, &[5])))).expect("numbers");
        let (token, none) = ([0.0, -1.0, -5.0], [f64::NEG_INFINITY; 3]);
        assert_eq!(found, [token, token, none, none, [1.0, 5.0, 10.0]].concat());
    }

    /// Whole models: the final norm, as stored, times the head's weights. They may differ only by
    /// the rounding of both when they are stored.
    #[test]
    fn the_heads_of_golden_models_agree() {
        for name in ["one", "batch", "long", "six"] {
            let file = Golden::load(&format!("model_prefill__{name}"));
            let flat = |key: &str, of: Tensor| {
                of.flatten(0, 1).unwrap_or_else(|error| panic!("{key}: {error}"))
            };
            let hidden = flat("mid.final_norm", file.f64("mid.final_norm"));
            let weight = file.f64("param.lm_head.weight");
            let expected = flat("out.logits", file.f64("out.logits"));
            let found = logits(&Named::new().with("hidden", hidden).with("weight", weight.clone()));
            let stored = flat("mid.final_norm", file.storage_error("mid.final_norm"));
            let of_hidden = stored
                .matmul(&weight.abs().and_then(|w| w.t()).expect("weights"))
                .expect("a product");
            let of_logits = flat("out.logits", file.storage_error("out.logits"));
            assert_within(name, &found, &expected, &(of_hidden + of_logits).expect("a sum"));
        }
    }
}
