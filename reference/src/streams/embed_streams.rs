//! The residual streams of a token; each is its embedding (inference 1).
//!
//! ```text
//! out[t][s] = table[token_ids[t]] for every stream s;  0 where the id is none of 0 .. vocab_size - 1
//! dtable[v] = sum over the tokens t with token_ids[t] = v and over their streams s of dout[t][s]
//! ```
//!
//! # Rounding points
//!
//! Rows are copied. A row of the gradient is an fp32 sum of all streams of its tokens.

use candle_core::{DType, Device, Tensor};

use crate::error::{Result, require_that};
use crate::named::Named;
use crate::precision::{Rounding, values};
use crate::select::unless;

/// `out` `[num_tokens, num_streams, hidden_size]`, stored in the type of `table`, for these inputs:
///
/// - `table` `[vocab_size, hidden_size]`, stored in bf16 or f32;
/// - `token_ids` `[num_tokens]`, stored in i32.
///
/// # Errors
/// Tensors whose shapes do not match; zero streams.
pub fn forward(inputs: &Named, num_streams: usize) -> Result<Named> {
    let ids = Ids::new(inputs, num_streams)?;
    let rows = ids.rows(inputs.tensor("table")?)?;
    let shape = (ids.of_tokens.len(), num_streams, rows.dim(1)?);
    Ok(Named::new().with("out", rows.unsqueeze(1)?.broadcast_as(shape)?.contiguous()?))
}

/// `dtable` `[vocab_size, hidden_size]`, stored in f32, for the inputs of [`forward`] and `dout`,
/// of the shape and type of out.
///
/// # Errors
/// As [`forward`].
pub fn backward(inputs: &Named, num_streams: usize, rounding: &mut Rounding) -> Result<Named> {
    let ids = Ids::new(inputs, num_streams)?;
    let dout = inputs.tensor("dout")?;
    let (width, numbers) = (dout.dim(2)?, values(dout)?);
    let size = ids.vocab_size * width;
    let (mut sums, mut squares, mut counts) = (vec![0.0; size], vec![0.0; size], vec![0.0; size]);
    for (row, stream) in numbers.chunks(width.max(1)).enumerate() {
        let Some(id) = ids.of_tokens[row / num_streams] else { continue };
        for (at, number) in (id * width..).zip(stream) {
            sums[at] += number;
            squares[at] += number * number;
            counts[at] += 1.0;
        }
    }
    let tensor =
        |numbers: Vec<f64>| Tensor::from_vec(numbers, (ids.vocab_size, width), &Device::Cpu);
    let dtable = rounding.accumulated_f32(&tensor(sums)?, &tensor(squares)?, &tensor(counts)?)?;
    Ok(Named::new().with("dtable", dtable))
}

/// The table row of each token.
struct Ids {
    of_tokens: Vec<Option<usize>>,
    vocab_size: usize,
}

impl Ids {
    fn new(inputs: &Named, num_streams: usize) -> Result<Self> {
        let tensors: [(&[_], &[_]); 3] = [
            (&["table"], &["vocab_size", "hidden_size"]),
            (&["token_ids"], &["num_tokens"]),
            (&["dout"], &["num_tokens", "num_streams", "hidden_size"]),
        ];
        let [vocab_size, given] = inputs.extents(["vocab_size", "num_streams"], &tensors)?;
        let fits = num_streams > 0 && (given == num_streams || inputs.get("dout").is_none());
        require_that(
            "num_streams",
            num_streams,
            fits,
            "there is one at least, and dout has as many",
        )?;
        let row = |id: f64| (0.0..vocab_size as f64).contains(&id).then_some(id as usize);
        let of_tokens = values(inputs.tensor("token_ids")?)?.into_iter().map(row).collect();
        Ok(Self { of_tokens, vocab_size })
    }

    /// The rows of the tokens, `[num_tokens, hidden_size]`; 0 for a token without a row.
    fn rows(&self, table: &Tensor) -> Result<Tensor> {
        let (num_tokens, width) = (self.of_tokens.len(), table.dim(1)?);
        if self.vocab_size == 0 || num_tokens == 0 {
            return Ok(Tensor::zeros((num_tokens, width), DType::F64, &Device::Cpu)?);
        }
        let index: Vec<u32> = self.of_tokens.iter().map(|id| id.unwrap_or(0) as u32).collect();
        let absent: Vec<u8> = self.of_tokens.iter().map(|id| u8::from(id.is_none())).collect();
        let rows = table.index_select(&Tensor::from_vec(index, num_tokens, &Device::Cpu)?, 0)?;
        let absent = Tensor::from_vec(absent, (num_tokens, 1), &Device::Cpu)?
            .broadcast_as(rows.shape())?
            .contiguous()?;
        unless(&absent, &rows, 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{
        Draw, UNIT_ROUNDOFF, assert_unbiased, assert_within, differentiated, f64_tensor,
    };
    use crate::{Precision, Rounding};

    fn case(seed: u64, [num_tokens, vocab_size, num_streams, hidden_size]: [usize; 4]) -> Named {
        let mut draw = Draw::new(seed);
        let ids: Vec<f64> =
            (0..num_tokens).map(|_| draw.below(vocab_size + 2) as f64 - 1.0).collect();
        let named = Named::new().with("table", draw.bf16(&[vocab_size, hidden_size], 1.0));
        let named = named.with("token_ids", f64_tensor(&ids, &[num_tokens]));
        named.with("dout", draw.bf16(&[num_tokens, num_streams, hidden_size], 1.0))
    }

    #[test]
    fn every_stream_is_the_row_of_the_id_and_ids_beyond_the_table_give_zeros() -> Result<()> {
        let ids = [1.0, -1.0, 2.0, 1.0, f64::from(i32::MAX), 0.0];
        let inputs = Named::new().with("token_ids", f64_tensor(&ids, &[6]));
        let inputs = inputs.with("table", f64_tensor(&[1.0, 2.0, 3.0, f64::NAN], &[2, 2]));
        let out = values(forward(&inputs, 2)?.tensor("out")?)?;
        let rows: Vec<String> = out.chunks(4).map(|token| format!("{token:?}")).collect();
        let (nan, zeros) = ("[3.0, NaN, 3.0, NaN]", "[0.0, 0.0, 0.0, 0.0]");
        assert_eq!(rows, [nan, zeros, zeros, nan, zeros, "[1.0, 2.0, 1.0, 2.0]"]);
        let dout: Vec<f64> = (0..24).map(f64::from).collect();
        let inputs = inputs.with("dout", f64_tensor(&dout, &[6, 2, 2]));
        let dtable = backward(&inputs, 2, &mut Rounding::exact())?;
        // The streams of token 5, and those of tokens 0 and 3.
        assert_eq!(
            values(dtable.tensor("dtable")?)?,
            [20.0 + 22.0, 21.0 + 23.0, 2.0 + 26.0, 4.0 + 28.0]
        );
        Ok(())
    }

    #[test]
    fn explicit_backward_equals_autograd() -> Result<()> {
        let inputs = case(1, [23, 5, 4, 6]);
        let explicit = backward(&inputs, 4, &mut Rounding::exact())?;
        let automatic = differentiated(&inputs, &[("table", "dtable")], |inputs| {
            Ok((forward(inputs, 4)?.tensor("out")? * inputs.tensor("dout")?)?)
        })?;
        let found = explicit.tensor("dtable")?;
        let bound = (found.ones_like()? * (4096.0 * UNIT_ROUNDOFF))?;
        assert_within("dtable", found, automatic.tensor("dtable")?, &bound);
        Ok(())
    }

    #[test]
    fn working_runs_scatter_around_the_exact_result() -> Result<()> {
        let inputs = case(2, [40, 6, 4, 16]);
        let run = |precision| -> Result<Tensor> {
            Ok(backward(&inputs, 4, &mut Rounding::new(precision))?.tensor("dtable")?.clone())
        };
        let runs =
            (0..64).map(|seed| run(Precision::Working { seed })).collect::<Result<Vec<_>>>()?;
        assert_unbiased("dtable", &run(Precision::Exact)?, &runs, 16);
        Ok(())
    }

    #[test]
    fn no_tokens_and_no_rows_are_legal_and_bad_inputs_are_refused() -> Result<()> {
        let none = case(3, [0, 3, 2, 4]);
        assert_eq!(forward(&none, 2)?.tensor("out")?.dims(), [0, 2, 4]);
        assert_eq!(
            values(backward(&none, 2, &mut Rounding::exact())?.tensor("dtable")?)?,
            [0.0; 12]
        );
        let empty = case(4, [3, 0, 2, 4]);
        assert_eq!(values(forward(&empty, 2)?.tensor("out")?)?, [0.0; 24]);
        assert!(forward(&empty, 0).is_err() && forward(&empty, 3).is_err());
        Ok(())
    }
}
