//! Rows of the paged KV cache (inference 5.3, 5.4, 8.3): their bytes, written and read in exact
//! arithmetic.
//!
//! A row of `nope_dim + rope_dim` channels keeps the first `nope_dim` as e4m3 codes and the others
//! as bf16. A group of 64 codes shares a power-of-two scale,
//!
//! ```text
//! amax  = max(max |x|, 1e-4)                 s = the smallest power of two with amax <= 448 s
//! code  = e4m3(x / s)                        byte of s = 127 + log2 s
//! x'    = bf16(e4m3 value * 2^(byte - 127))
//! ```
//!
//! so that `|x / s| <= 448`. The specification multiplies by fp32(1/448) and takes the exponent
//! from the bits of the product; for every bf16 amax that is the same power ([`crate::quantize`]).
//! A group with a NaN or an infinity has the scale byte 255, which decodes to NaN, and NaN codes.
//! Bytes that pad the scales are 0.

use crate::conventions::Conventions;
use crate::error::{Error, Result, wrong_value};
use crate::format::Format;
use crate::quantize::{Quantized, quantize_by};

/// Channels that share a scale.
pub const SCALE_GROUP: usize = 64;
/// Bytes of scales of a row that has quantized channels.
pub const SCALE_BYTES: usize = 8;

/// Bytes of a row of a paged store: its data, and its scales, which are stored after the data of
/// all rows of its page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowBytes {
    /// Bytes of data.
    pub data: usize,
    /// Bytes of scales.
    pub scales: usize,
}

impl RowBytes {
    /// Bytes of a page: the data of its rows, then their scales.
    pub fn page_bytes(self, page_size: usize) -> usize {
        page_size * (self.data + self.scales)
    }

    /// Offsets of the data and the scales of a slot in a dense store of pages.
    pub fn place(self, slot: usize, page_size: usize) -> (usize, usize) {
        let page = slot / page_size * self.page_bytes(page_size);
        let row = slot % page_size;
        (page + row * self.data, page + page_size * self.data + row * self.scales)
    }

    /// Writes the row of each token to its slot: `encode` returns its data and its scales. A slot
    /// that is negative or beyond the pages writes nothing. All other bytes are unchanged.
    ///
    /// # Errors
    /// An incomplete page, a slot that occurs twice.
    pub fn scatter(
        self,
        pages: &mut [u8],
        page_size: usize,
        slots: &[i32],
        encode: impl Fn(usize) -> (Vec<u8>, Vec<u8>),
    ) -> Result<()> {
        if page_size == 0 {
            return Err(wrong_value("page_size", 0, "a page needs rows"));
        }
        let page = self.page_bytes(page_size);
        if !pages.len().is_multiple_of(page) {
            let (expected, actual) = (format!("[pages * {page}]"), vec![pages.len()]);
            return Err(Error::Shape { argument: "pages", expected, actual });
        }
        let mut written = vec![false; pages.len() / page * page_size];
        for (token, &slot) in slots.iter().enumerate() {
            let Some(slot) = usize::try_from(slot).ok().filter(|&slot| slot < written.len()) else {
                continue;
            };
            if std::mem::replace(&mut written[slot], true) {
                return Err(wrong_value("slots", slot, "a slot must not occur twice"));
            }
            let ((data, scales), (data_at, scales_at)) =
                (encode(token), self.place(slot, page_size));
            pages[data_at..data_at + data.len()].copy_from_slice(&data);
            pages[scales_at..scales_at + scales.len()].copy_from_slice(&scales);
        }
        Ok(())
    }
}

/// How a row is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowFormat {
    /// Channels stored as e4m3, a multiple of 64 up to 512; 0 is a row of bf16 without scales.
    pub nope_dim: usize,
    /// Channels stored as bf16.
    pub rope_dim: usize,
}

impl RowFormat {
    /// Channels of a row.
    pub fn head_dim(self) -> usize {
        self.nope_dim + self.rope_dim
    }

    /// Bytes of a row's channels.
    pub fn data_bytes(self) -> usize {
        self.nope_dim + 2 * self.rope_dim
    }

    /// Bytes of a row's scales.
    pub fn scale_bytes(self) -> usize {
        if self.nope_dim > 0 { SCALE_BYTES } else { 0 }
    }

    /// The bytes of a row.
    pub fn bytes(self) -> RowBytes {
        RowBytes { data: self.data_bytes(), scales: self.scale_bytes() }
    }

    /// Rejects an invalid format.
    ///
    /// # Errors
    /// The invalid dimension.
    pub fn check(self) -> Result<()> {
        if !self.nope_dim.is_multiple_of(SCALE_GROUP) || self.nope_dim > SCALE_GROUP * SCALE_BYTES {
            return Err(wrong_value(
                "nope_dim",
                self.nope_dim,
                "it must be a multiple of 64 up to 512",
            ));
        }
        if self.head_dim() == 0 {
            return Err(wrong_value("rope_dim", self.rope_dim, "a row needs channels"));
        }
        Ok(())
    }

    /// The bytes of a row's data and of its scales. The bf16 channels must be values of that type.
    pub fn encode(self, row: &[f64]) -> (Vec<u8>, Vec<u8>) {
        self.encode_by(row, Conventions::default())
    }

    /// The same by these conventions of a kernel.
    pub fn encode_by(self, row: &[f64], conventions: Conventions) -> (Vec<u8>, Vec<u8>) {
        let (nope, rope) = row.split_at(self.nope_dim);
        let (mut data, mut scales) =
            (Vec::with_capacity(self.data_bytes()), Vec::with_capacity(self.scale_bytes()));
        for group in nope.chunks(SCALE_GROUP) {
            let Quantized { codes, scale_bytes } =
                quantize_by(group, SCALE_GROUP, Format::E4M3, conventions);
            scales.extend(scale_bytes);
            data.extend(codes);
        }
        scales.resize(self.scale_bytes(), 0);
        data.extend(rope.iter().flat_map(|&x| bf16_bits(x).to_ne_bytes()));
        (data, scales)
    }

    /// The channels of a row, rounded to bf16 as an MMA instruction reads them.
    pub fn decode(self, data: &[u8], scales: &[u8]) -> Vec<f64> {
        let (codes, rope) = data.split_at(self.nope_dim);
        let value = |(channel, &code): (usize, &u8)| {
            // A product of an e4m3 value and a scale is a bf16 value, unless it is out of range.
            Format::BF16.nearest(e4m3_value(code) * e8m0_value(scales[channel / SCALE_GROUP]))
        };
        let nope = codes.iter().enumerate().map(value);
        let rope =
            rope.chunks_exact(2).map(|pair| bf16_value(u16::from_ne_bytes([pair[0], pair[1]])));
        nope.chain(rope).collect()
    }
}

/// The value of an e8m0 byte.
pub fn e8m0_value(byte: u8) -> f64 {
    Format::E8M0.value(byte.into())
}

/// The value of an e4m3 code: exponent bias 7, three bits of significand, step 2^-9 below 2^-6, no
/// infinities.
pub fn e4m3_value(code: u8) -> f64 {
    Format::E4M3.value(code.into())
}

/// The code of the nearest e4m3 value, ties to even; beyond 448 the code of 448, NaN of NaN.
pub fn e4m3_code(x: f64) -> u8 {
    Format::E4M3.code(x) as u8
}

fn bf16_bits(x: f64) -> u16 {
    ((x as f32).to_bits() >> 16) as u16
}

fn bf16_value(bits: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(bits) << 16))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::precision::values;
    use crate::testing::Draw;

    const MODEL: RowFormat = RowFormat { nope_dim: 448, rope_dim: 64 };

    #[test]
    fn the_models_row_has_584_bytes_and_its_pages_the_documented_size() {
        assert_eq!((MODEL.data_bytes(), MODEL.bytes().page_bytes(1)), (576, 584));
        let strides = [(64, 37440), (32, 19008), (2, 1728), (1, 1152)];
        for (page_size, stride) in strides {
            assert_eq!(MODEL.bytes().page_bytes(page_size).next_multiple_of(576), stride);
        }
        // Data of the second page's third row, and its scales.
        assert_eq!(MODEL.bytes().place(4 + 2, 4), (4 * 584 + 2 * 576, 4 * 584 + 4 * 576 + 2 * 8));
    }

    #[test]
    fn every_code_is_the_code_of_its_value() {
        for code in 0..=255u8 {
            let value = e4m3_value(code);
            let canonical = if value.is_nan() { 0x7f } else { code };
            assert_eq!(e4m3_code(value), canonical, "{code:#x}");
        }
    }

    #[test]
    fn codes_are_those_of_the_nearest_number_and_ties_go_to_the_even_one() {
        for code in 0..0x7eu8 {
            let (low, high) = (e4m3_value(code), e4m3_value(code + 1));
            let middle = (low + high) / 2.0;
            let even = if code % 2 == 0 { code } else { code + 1 };
            assert_eq!(e4m3_code(middle), even, "{middle}");
            assert_eq!(e4m3_code(middle * (1.0 - 1e-12)), code, "below {middle}");
            assert_eq!(e4m3_code(-middle * (1.0 + 1e-12)), 0x80 | (code + 1), "beyond -{middle}");
        }
        assert_eq!((e4m3_code(2f64.powi(-10)), e4m3_code(-0.0), e4m3_code(1e9)), (0, 0x80, 0x7e));
    }

    #[test]
    fn a_decoded_row_is_the_row_within_half_a_step_and_bf16_channels_are_unchanged() {
        let row = values(&Draw::new(1).bf16(&[512], 3.0)).expect("values");
        let (data, scales) = MODEL.encode(&row);
        let decoded = MODEL.decode(&data, &scales);
        assert_eq!(decoded[448..], row[448..]);
        for (channel, (x, y)) in row.iter().zip(&decoded).enumerate().take(448) {
            let scale = e8m0_value(scales[channel / 64]);
            // Eight steps to a power of two, 2^-9 scales at least.
            let half_step = (x.abs() / 16.0).max(scale * 2f64.powi(-10));
            assert!((x - y).abs() <= half_step, "{x} became {y}");
        }
        assert_eq!((data.len(), scales.len(), scales[7]), (576, 8, 0));
        // Decoded values do not change, although an amax that was rounded down may halve its scale.
        let (data, scales) = MODEL.encode(&decoded);
        assert_eq!(MODEL.decode(&data, &scales), decoded);
    }

    #[test]
    fn a_group_that_is_not_finite_decodes_to_nan_and_leaves_the_others_alone() {
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let mut row = vec![1.0; 512];
            row[70] = bad;
            let (data, scales) = MODEL.encode(&row);
            let decoded = MODEL.decode(&data, &scales);
            assert!(decoded[64..128].iter().all(|x| x.is_nan()), "{bad}");
            assert!(decoded[..64].iter().chain(&decoded[128..]).all(|&x| x == 1.0), "{bad}");
        }
    }

    #[test]
    fn products_beyond_the_range_of_bf16_are_rounded() {
        assert_eq!(Format::BF16.nearest(448.0 * 2f64.powi(127)), f64::INFINITY);
        assert_eq!(Format::BF16.nearest(2f64.powi(-136)), 0.0);
        assert_eq!(Format::BF16.nearest(3.0 * 2f64.powi(-134)), 2f64.powi(-132));
    }
}
