//! Memory layouts of the scales of groups (inference 5.7).
//!
//! Let a row have G groups, and let `aligned(n, m)` be the smallest multiple of m that is not below
//! n. The scale of group g of row r has the offset
//!
//! ```text
//! plain                r G + g
//! mn_major, fp32       g aligned(rows, 4) + r
//! mn_major, bytes      (g/4 aligned(rows, 4) + r) 4 + g%4                 byte g%4 of a little-endian word of 32 bits
//! blocked, bytes       (r/128 aligned(G, 4)/4 + g/4) 512 + r%32 16 + r%128/32 4 + g%4
//! ```
//!
//! Offsets of padding rows and padding groups hold 0.

/// How the scales of rows of groups are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleLayout {
    /// Row by row.
    Plain,
    /// Group by group, the rows padded to a multiple of 4; bytes of four groups in one word.
    MnMajor,
    /// Tiles of 128 rows by 4 groups, for block-scaled products.
    Blocked,
}

/// The scales of a matrix: `rows` rows of `groups` groups, each scale a byte or an fp32 value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scales {
    /// Their layout.
    pub layout: ScaleLayout,
    /// Whether each is a byte.
    pub bytes: bool,
    /// Rows, at least those of the matrix.
    pub rows: usize,
    /// Groups of a row.
    pub groups: usize,
}

impl Scales {
    /// The shape of the tensor that holds them. One entry of it is a scale, or a word of four
    /// scales.
    pub fn shape(self) -> Vec<usize> {
        let Self { layout, bytes, rows, groups } = self;
        match layout {
            ScaleLayout::Plain => vec![rows, groups],
            ScaleLayout::MnMajor if bytes => vec![groups.div_ceil(4), rows.next_multiple_of(4)],
            ScaleLayout::MnMajor => vec![groups, rows.next_multiple_of(4)],
            ScaleLayout::Blocked => vec![rows.div_ceil(128), groups.div_ceil(4), 512],
        }
    }

    /// Whether an entry of the tensor is a word of four scales.
    pub fn in_words(self) -> bool {
        self.bytes && self.layout == ScaleLayout::MnMajor
    }

    /// Number of scales in memory, including padding.
    pub fn places(self) -> usize {
        self.shape().iter().product::<usize>() * if self.in_words() { 4 } else { 1 }
    }

    /// The offset of the scale of a group of a row.
    pub fn place(self, row: usize, group: usize) -> usize {
        let aligned_rows = self.rows.next_multiple_of(4);
        match self.layout {
            ScaleLayout::Plain => row * self.groups + group,
            ScaleLayout::MnMajor if self.bytes => (group / 4 * aligned_rows + row) * 4 + group % 4,
            ScaleLayout::MnMajor => group * aligned_rows + row,
            ScaleLayout::Blocked => {
                let tile = row / 128 * self.groups.div_ceil(4) + group / 4;
                tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4
            }
        }
    }

    /// All rows and groups, row by row.
    fn indices(self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.rows).flat_map(move |row| (0..self.groups).map(move |group| (row, group)))
    }

    /// Scales, row by row, at their offsets; 0 at those of padding.
    pub fn arranged<T: Copy + Default>(self, scales: &[T]) -> Vec<T> {
        let mut places = vec![T::default(); self.places()];
        self.indices()
            .zip(scales)
            .for_each(|((row, group), &scale)| places[self.place(row, group)] = scale);
        places
    }

    /// The inverse of [`Self::arranged`].
    pub fn gathered<T: Copy>(self, places: &[T]) -> Vec<T> {
        self.indices().map(|(row, group)| places[self.place(row, group)]).collect()
    }
}

impl Scales {
    /// Bytes, row by row, as the values of the tensor that holds them: bytes, or words of four
    /// bytes.
    pub fn stored_bytes(self, bytes: &[u8]) -> Vec<f64> {
        let placed = self.arranged(bytes);
        if self.in_words() {
            return words_of(&placed).into_iter().map(f64::from).collect();
        }
        placed.into_iter().map(f64::from).collect()
    }

    /// The inverse of [`Self::stored_bytes`].
    pub fn read_bytes(self, stored: &[f64]) -> Vec<u8> {
        if self.in_words() {
            return self
                .gathered(&bytes_of(&stored.iter().map(|&word| word as i32).collect::<Vec<_>>()));
        }
        self.gathered(stored).into_iter().map(|byte| byte as u8).collect()
    }
}

/// Words of 32 bits, each of four bytes, the first one lowest.
pub fn words_of(bytes: &[u8]) -> Vec<i32> {
    bytes.as_chunks().0.iter().map(|&bytes| i32::from_le_bytes(bytes)).collect()
}

/// The bytes of words of 32 bits, the lowest one first.
pub fn bytes_of(words: &[i32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [(ScaleLayout, bool); 5] = [
        (ScaleLayout::Plain, true),
        (ScaleLayout::Plain, false),
        (ScaleLayout::MnMajor, true),
        (ScaleLayout::MnMajor, false),
        (ScaleLayout::Blocked, true),
    ];

    #[test]
    fn every_scale_has_a_place_of_its_own_and_the_others_hold_zeros() {
        for (layout, bytes) in ALL {
            for (rows, groups) in [(0, 3), (1, 1), (3, 5), (33, 4), (129, 7), (128, 4)] {
                let scales = Scales { layout, bytes, rows, groups };
                let numbers: Vec<u32> = (1..).take(rows * groups).collect();
                let places = scales.arranged(&numbers);
                assert_eq!(scales.gathered(&places), numbers, "{scales:?}");
                let zeros = places.iter().filter(|&&scale| scale == 0).count();
                assert_eq!(
                    (places.len(), zeros),
                    (scales.places(), scales.places() - numbers.len()),
                    "{scales:?}"
                );
            }
        }
    }

    /// Inference 5.7 defines packed words whose rows are permuted within each 128 as the same
    /// tiles.
    #[test]
    fn tiles_of_128_rows_are_packed_words_of_permuted_rows() {
        let of = |layout| Scales { layout, bytes: true, rows: 256, groups: 12 };
        let (blocked, packed) = (of(ScaleLayout::Blocked), of(ScaleLayout::MnMajor));
        for (row, group) in blocked.indices() {
            let permuted = row / 128 * 128 + row % 32 * 4 + row % 128 / 32;
            let (word, byte) = (packed.place(permuted, group) / 4, group % 4);
            // Words are stored group by group over all rows there, tile by tile here.
            let (word_group, in_tile) = (word / 256, word % 128);
            let tile = row / 128 * 3 + word_group;
            assert_eq!(blocked.place(row, group), tile * 512 + in_tile * 4 + byte, "{row} {group}");
        }
    }

    #[test]
    fn places_are_those_of_the_specification() {
        let at = |layout, bytes, row, group| {
            Scales { layout, bytes, rows: 130, groups: 6 }.place(row, group)
        };
        assert_eq!(at(ScaleLayout::Plain, true, 129, 5), 779);
        assert_eq!(at(ScaleLayout::MnMajor, false, 129, 5), 5 * 132 + 129);
        assert_eq!(at(ScaleLayout::MnMajor, true, 129, 5), (132 + 129) * 4 + 1);
        assert_eq!(at(ScaleLayout::Blocked, true, 129, 5), 3 * 512 + 16 + 1);
        assert_eq!(at(ScaleLayout::Blocked, true, 97, 2), 16 + 12 + 2);
    }

    #[test]
    fn words_hold_the_first_of_four_bytes_lowest() {
        assert_eq!(words_of(&[1, 2, 3, 0x84]), [-0x7bfc_fdff]);
        assert_eq!(bytes_of(&[-0x7bfc_fdff]), [1, 2, 3, 0x84]);
    }
}
