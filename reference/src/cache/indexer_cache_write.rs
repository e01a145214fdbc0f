//! Keys of the indexer: transformed, quantized and scattered to the slots of a paged store
//! (inference 5.4, 7, 7.1, 13.2).
//!
//! ```text
//! for each token t with 0 <= slots[t] < num_slots:    pages[slots[t]] = codes and scales of the Hadamard transform of k[t]
//! ```
//!
//! All other bytes are unchanged. A page of B rows keeps the codes of all its rows, 64 bytes each
//! (e2m1) or 128 (e4m3). After them come four bytes of scales for each row: four e8m0 bytes, or an
//! f32 value. Only the fp32 sums of the transform are rounded, in an order that
//! [`crate::formats::hadamard`] fixes. Only one answer is right.

use candle_core::Tensor;

use crate::cache::kv_cache::RowBytes;
use crate::error::{Error, Result, wrong_value};
use crate::formats::hadamard::{self, DIM, Stored};
use crate::named::Named;
use crate::precision::{Rounding, values};

/// Bytes of a row's scales.
pub const SCALE_BYTES: usize = 4;

/// Inputs of the write.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// `[num_tokens, 128]`, stored in bf16: keys after their rotation by position.
    pub k: Tensor,
    /// `[num_tokens]`: any value; slots outside of the store write nothing. No slot of the store
    /// occurs twice.
    pub slots: Vec<i32>,
    /// How keys are stored: e2m1 or e4m3.
    pub stored: Stored,
    /// Rows of a page, at least 1.
    pub page_size: usize,
    /// The pages before the write, one after the other.
    pub pages: Vec<u8>,
}

/// Bytes of a stored key.
pub fn row_bytes(stored: Stored) -> RowBytes {
    let data = match stored {
        Stored::Values => 2 * DIM,
        Stored::E2m1 => DIM / 2,
        Stored::E4m3 => DIM,
    };
    RowBytes { data, scales: SCALE_BYTES }
}

/// The pages after the write.
///
/// # Errors
/// Shapes that do not match, keys stored as values instead of codes, a slot that occurs twice.
pub fn forward(inputs: &Inputs) -> Result<Vec<u8>> {
    let Inputs { k, slots, stored, page_size, .. } = inputs;
    if *stored == Stored::Values {
        return Err(wrong_value("stored", "values", "a store has e2m1 or e4m3"));
    }
    let rows =
        hadamard::forward(&Named::new().with("x", k.clone()), *stored, &mut Rounding::exact())?;
    if slots.len() != k.dims()[0] {
        let (expected, actual) = (format!("[{}]", k.dims()[0]), vec![slots.len()]);
        return Err(Error::Shape { argument: "slots", expected, actual });
    }
    let bytes = row_bytes(*stored);
    let codes: Vec<u8> =
        values(rows.tensor("codes")?)?.into_iter().map(|code| code as u8).collect();
    let scales: Vec<u8> = match stored {
        Stored::E4m3 => values(rows.tensor("scales")?)?
            .into_iter()
            .flat_map(|s| (s as f32).to_ne_bytes())
            .collect(),
        _ => values(rows.tensor("scale_bytes")?)?.into_iter().map(|byte| byte as u8).collect(),
    };
    let part = |bytes: &[u8], width: usize, token: usize| {
        bytes[token * width..(token + 1) * width].to_vec()
    };
    let mut pages = inputs.pages.clone();
    bytes.scatter(&mut pages, *page_size, slots, |token| {
        (part(&codes, bytes.data, token), part(&scales, SCALE_BYTES, token))
    })?;
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Format;
    use crate::testing::{Draw, f64_tensor};

    fn inputs(slots: Vec<i32>, stored: Stored) -> Inputs {
        let k = Draw::new(1).bf16(&[slots.len(), DIM], 1.0);
        Inputs {
            k,
            slots,
            stored,
            page_size: 3,
            pages: vec![0xa5; 2 * row_bytes(stored).page_bytes(3)],
        }
    }

    #[test]
    fn codes_of_a_page_lie_before_its_scales_and_no_other_byte_changes() -> Result<()> {
        for stored in [Stored::E2m1, Stored::E4m3] {
            let inputs = inputs(vec![4, -1, 6, i32::MIN, 0], stored);
            let pages = forward(&inputs)?;
            let rows = hadamard::forward(
                &Named::new().with("x", inputs.k.clone()),
                stored,
                &mut Rounding::exact(),
            )?;
            let codes = values(rows.tensor("codes")?)?;
            let bytes = row_bytes(stored);
            for slot in 0..6 {
                let at = slot / 3 * bytes.page_bytes(3) + slot % 3 * bytes.data;
                let own = inputs.slots.iter().position(|&s| s == slot as i32);
                let stored: Vec<f64> =
                    pages[at..at + bytes.data].iter().map(|&byte| byte.into()).collect();
                match own {
                    Some(token) => {
                        assert_eq!(stored, codes[token * bytes.data..(token + 1) * bytes.data])
                    }
                    None => assert!(stored.iter().all(|&byte| byte == 165.0), "slot {slot}"),
                }
            }
        }
        Ok(())
    }

    #[test]
    fn scales_are_four_e8m0_bytes_or_one_number() -> Result<()> {
        // A row of equal values transforms to one value, 2^-0.5 * 128 / 8, and zeros: only the
        // first group is above its floor.
        let k = f64_tensor(&[1.0; DIM], &[1, DIM]);
        let e2m1 = Inputs {
            k: k.clone(),
            page_size: 1,
            pages: vec![0; 68],
            ..inputs(vec![0], Stored::E2m1)
        };
        assert_eq!(forward(&e2m1)?[64..], [128, 1, 1, 1]);
        let e4m3 = Inputs { k, page_size: 1, pages: vec![0; 132], ..inputs(vec![0], Stored::E4m3) };
        let scale = f32::from_ne_bytes(forward(&e4m3)?[128..].try_into().expect("four bytes"));
        assert_eq!(f64::from(scale), 2f64.powi(-5));
        assert!(11.3125 <= Format::E4M3.largest * f64::from(scale));
        Ok(())
    }

    #[test]
    fn inputs_that_do_not_fit_are_refused() {
        assert!(forward(&inputs(vec![1, 1], Stored::E2m1)).is_err());
        assert!(forward(&inputs(vec![1], Stored::Values)).is_err());
        assert!(forward(&Inputs { slots: vec![1], ..inputs(vec![1, 2], Stored::E4m3) }).is_err());
        assert!(forward(&Inputs { page_size: 0, ..inputs(vec![1], Stored::E4m3) }).is_err());
        assert!(forward(&Inputs { pages: vec![0; 7], ..inputs(vec![1], Stored::E4m3) }).is_err());
        assert!(
            forward(&Inputs {
                k: f64_tensor(&[0.0; 6], &[2, 3]),
                ..inputs(vec![1, 2], Stored::E4m3)
            })
            .is_err()
        );
    }
}
