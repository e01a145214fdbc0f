//! Contents of groups of values that share a scale: drawn values, and values at the limits and
//! midpoints of a format's codes.

use dsv4_reference::Format;
use dsv4_reference::quantize::{ScaleType, floor_of, scale_of};
use rand::Rng;
use serde::{Deserialize, Serialize};

use crate::case::{Distribution, Draw};
use crate::operator::fields::Data;
use crate::operator::tensors::Tensors;

/// The contents of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Contents {
    /// Values of the case's distribution and magnitude.
    Drawn,
    /// Values midway between two codes.
    Ties,
    /// Groups of zeros, of -0, below the floor and around it. Groups at and just above the largest
    /// code times a power of two. Groups of subnormal and of the largest bf16 values.
    Corners,
    /// Each group's largest value is another bf16 value, spread over all bf16 values.
    Amax,
    /// Some are NaN or infinite.
    NotFinite,
    /// Every bf16 value that is not above the format's largest, under the scale 1.
    EveryNumber,
}

/// Values in rows of groups, and what the groups have in common.
pub struct Groups {
    /// What they hold.
    pub contents: Contents,
    /// The format of the codes.
    pub format: Format,
    /// The type in which the values are stored.
    pub stored: Format,
    /// The type of a scale.
    pub scale: ScaleType,
    /// Values in a group. The last group of a row may have fewer.
    pub group: usize,
    /// The case's seed.
    pub seed: u64,
}

impl Groups {
    /// Drawn rows. Some values are NaN or infinite where the contents require it.
    pub fn draw(
        &self,
        draw: &mut Draw,
        [rows, width]: [usize; 2],
        distribution: Distribution,
        size: f64,
    ) -> Vec<f64> {
        let mut numbers = draw.values(distribution, rows, width, size);
        if self.contents == Contents::NotFinite {
            let bad = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
            for value in numbers.iter_mut() {
                if draw.rng().random_ratio(1, 150) {
                    *value = bad[draw.rng().random_range(0..bad.len())];
                }
            }
        }
        numbers
    }

    /// Sets tensor `x`, with that many rows and columns, to rows with these contents. Drawn
    /// contents leave it unchanged.
    pub(crate) fn set_rows(&self, tensors: &mut Tensors, [rows, width]: [usize; 2], data: Data) {
        if self.contents == Contents::Drawn {
            return;
        }
        let mut draw = Draw::new(self.seed, "contents");
        let mut x = self.draw(&mut draw, [rows, width], data.distribution, data.magnitude);
        self.fill_rows(&mut x, width, &mut draw);
        tensors.set("x", &x);
    }

    /// Sets the values of group `number` of all groups. Drawn contents leave them unchanged.
    pub fn fill(&self, group: &mut [f64], number: usize, draw: &mut Draw) {
        match self.contents {
            Contents::Ties => self.fill_with_ties(group, draw),
            Contents::Corners => self.fill_with_corner(group, number),
            Contents::Amax => {
                // The step is prime to the count of positive bf16 values, so it reaches all of
                // them, far apart.
                let bits = ((number as u64 * 10007 + self.seed) % 0x7f80).max(1) as u32;
                let amax = f64::from(f32::from_bits(bits << 16));
                group.iter_mut().enumerate().for_each(|(i, x)| *x = -amax / (1 + i) as f64);
            }
            Contents::EveryNumber => self.fill_with_numbers(group, number),
            Contents::Drawn | Contents::NotFinite => {}
        }
    }

    /// Sets all groups of rows with that many values.
    pub fn fill_rows(&self, numbers: &mut [f64], width: usize, draw: &mut Draw) {
        let groups = numbers.chunks_mut(width.max(1)).flat_map(|row| row.chunks_mut(self.group));
        groups.enumerate().for_each(|(number, group)| self.fill(group, number, draw));
    }

    /// The largest code, so that the scale is known, and midpoints between adjacent codes.
    fn fill_with_ties(&self, group: &mut [f64], draw: &mut Draw) {
        let format = self.format;
        let power = 2f64.powi(draw.rng().random_range(-12..=12));
        // For types with enough bits: midpoints times any scale. Their quotient is the midpoint or
        // next to it.
        let any = self.scale == ScaleType::Fp32 && self.stored == Format::F32;
        let largest =
            format.largest * if any { power * draw.rng().random_range(1.0..2.0) } else { power };
        let scale = scale_of(&[self.stored.nearest(largest)], format, self.scale);
        for (channel, x) in group.iter_mut().enumerate() {
            let code: u64 = draw.rng().random_range(0..format.code(format.largest) as u8).into();
            let middle = (format.value(code) + format.value(code + 1)) / 2.0;
            let sign = if draw.rng().random() { 1.0 } else { -1.0 };
            *x = if channel == 0 { largest } else { sign * middle * scale };
        }
    }

    /// Groups at the limits of the formats, round-robin.
    fn fill_with_corner(&self, group: &mut [f64], number: usize) {
        let power = 2f64.powi(number as i32 % 20 - 10);
        let (largest, floor, len) = (self.format.largest, floor_of(self.format), group.len());
        let above = self.stored.value(self.stored.code(largest) + 1);
        match number % 9 {
            0 => group.fill(0.0),
            1 => group.fill(-0.0),
            // Below the floor.
            2 => group
                .iter_mut()
                .enumerate()
                .for_each(|(i, x)| *x = 0.1 * floor * (-0.6f64).powi(i as i32)),
            3 => group[7 % len] = -largest * power,
            4 => group[9 % len] = above * power,
            5 => group
                .iter_mut()
                .enumerate()
                .for_each(|(i, x)| *x = 2f64.powi(-133) * (i as f64 - 30.0)),
            6 => group[63 % len] = f64::from(f32::from_bits(0xff7f_0000)),
            // The two values of the type around the floor, or the floor itself and its neighbour.
            7 => group
                .fill(self.stored.value(
                    self.stored.code(floor) - u64::from(self.stored.nearest(floor) > floor),
                )),
            _ => {
                group.fill(self.stored.value(
                    self.stored.code(floor) + u64::from(self.stored.nearest(floor) <= floor),
                ))
            }
        }
        if matches!(number % 9, 3 | 4) {
            group.iter_mut().for_each(|x| *x = x.clamp(-above * power, above * power));
        }
    }

    /// The largest value, and others from all of them in sequence.
    fn fill_with_numbers(&self, group: &mut [f64], number: usize) {
        let magnitudes = Format::BF16.code(self.format.largest) + 1;
        let first = (number * (self.group - 1)) as u64;
        for (i, x) in group.iter_mut().enumerate() {
            let at = (first + i as u64).wrapping_sub(1);
            let sign = if (at / magnitudes).is_multiple_of(2) { 1.0 } else { -1.0 };
            *x = if i == 0 {
                self.format.largest
            } else {
                sign * Format::BF16.value(at % magnitudes)
            };
        }
    }
}

/// Draws tensor `codes`, bytes of two e2m1 codes each. If `every` is set, the nibbles of sixteen
/// bytes hold all codes.
pub(crate) fn draw_e2m1_codes(every: bool, draw: &mut Draw, tensors: &mut Tensors) {
    for (i, code) in tensors.bytes_mut("codes").unwrap_or_default().iter_mut().enumerate() {
        *code = if every { (i % 16 * 16 + 15 - i % 16) as u8 } else { draw.rng().random() };
    }
}
