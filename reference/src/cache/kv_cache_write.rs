//! Quantizes rows of K = V and scatters them to the slots of a paged cache (inference 5.4, 8.3,
//! 13.2).
//!
//! ```text
//! for each token t with 0 <= slots[t] < num_slots:    cache[slots[t]] = encode(kv[t])
//! ```
//!
//! All other bytes are unchanged. [`RowFormat`] defines the bytes of a row. They follow from bf16
//! inputs without rounding any intermediate result. So only one answer is right, and no working
//! precision exists.

use candle_core::Tensor;

use crate::cache::kv_cache::RowFormat;
use crate::conventions::Conventions;
use crate::error::{Error, Result, require, wrong_shape};
use crate::precision::values;

/// Inputs of the write.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// `[num_tokens, head_dim]`, stored in bf16.
    pub kv: Tensor,
    /// `[num_tokens]`: any value; slots outside of the cache write nothing. No slot of the cache
    /// occurs twice.
    pub slots: Vec<i32>,
    /// How a row is stored.
    pub format: RowFormat,
    /// Rows of a page, at least 1.
    pub page_size: usize,
    /// The pages before the write, one after the other.
    pub pages: Vec<u8>,
}

/// The pages after the write.
///
/// # Errors
/// Shapes that do not match, a slot that occurs twice.
pub fn forward(inputs: &Inputs) -> Result<Vec<u8>> {
    forward_by(inputs, Conventions::default())
}

/// The same by these conventions of a kernel.
///
/// # Errors
/// As [`forward`].
pub fn forward_by(inputs: &Inputs, conventions: Conventions) -> Result<Vec<u8>> {
    inputs.check()?;
    let head_dim = inputs.format.head_dim();
    let kv = values(&inputs.kv)?;
    let mut pages = inputs.pages.clone();
    let row = |token: usize| {
        inputs.format.encode_by(&kv[token * head_dim..(token + 1) * head_dim], conventions)
    };
    inputs.format.bytes().scatter(&mut pages, inputs.page_size, &inputs.slots, row)?;
    Ok(pages)
}

impl Inputs {
    fn check(&self) -> Result<()> {
        self.format.check()?;
        let &[num_tokens, _] = self.kv.dims() else {
            return Err(wrong_shape("kv", "[num_tokens, head_dim]", &self.kv));
        };
        require("kv", &self.kv, &[num_tokens, self.format.head_dim()])?;
        if self.slots.len() != num_tokens {
            let (expected, actual) = (format!("[{num_tokens}]"), vec![self.slots.len()]);
            return Err(Error::Shape { argument: "slots", expected, actual });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Draw, f64_tensor};

    const FORMAT: RowFormat = RowFormat { nope_dim: 64, rope_dim: 8 };

    fn inputs(slots: Vec<i32>) -> Inputs {
        let kv = Draw::new(1).bf16(&[slots.len(), FORMAT.head_dim()], 1.0);
        Inputs {
            kv,
            slots,
            format: FORMAT,
            page_size: 3,
            pages: vec![0xa5; 2 * FORMAT.bytes().page_bytes(3)],
        }
    }

    #[test]
    fn a_row_goes_to_its_slot_and_no_other_byte_changes() -> Result<()> {
        let inputs = inputs(vec![4, -1, 6, i32::MIN, 0]);
        let pages = forward(&inputs)?;
        let kv = values(&inputs.kv)?;
        for slot in 0..6 {
            let (data_at, scales_at) = FORMAT.bytes().place(slot, 3);
            let (data, scales) = (&pages[data_at..data_at + 80], &pages[scales_at..scales_at + 8]);
            match inputs.slots.iter().position(|&s| s == slot as i32) {
                Some(token) => {
                    let (own_data, own_scales) = FORMAT.encode(&kv[token * 72..(token + 1) * 72]);
                    assert_eq!((data, scales), (&own_data[..], &own_scales[..]), "slot {slot}");
                }
                None => assert!(data.iter().chain(scales).all(|&byte| byte == 0xa5), "slot {slot}"),
            }
        }
        Ok(())
    }

    #[test]
    fn inputs_that_do_not_fit_are_refused() {
        assert!(forward(&inputs(vec![1, 1])).is_err());
        assert!(forward(&Inputs { slots: vec![1], ..inputs(vec![1, 2]) }).is_err());
        assert!(forward(&Inputs { page_size: 0, ..inputs(vec![1]) }).is_err());
        assert!(forward(&Inputs { pages: vec![0; 7], ..inputs(vec![1]) }).is_err());
        assert!(
            forward(&Inputs { kv: f64_tensor(&[0.0; 6], &[2, 3]), ..inputs(vec![1, 2]) }).is_err()
        );
    }
}
