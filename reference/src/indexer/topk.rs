//! The topk largest scores of each row, by index (inference 7, 7.2).
//!
//! ```text
//! order   = scores from the largest down, of equal ones the lower column first; -0 equals 0, and NaN counts as -infinity
//! indices = the first min(topk, length) columns in that order, from the lowest column up, then -1
//! values  = their scores, -infinity for NaN, then -infinity
//! ```
//!
//! Nothing is rounded: only one answer is right.

use candle_core::Tensor;

use crate::error::{Result, wrong_value};
use crate::named::Named;
use crate::precision::values;

/// How a column becomes an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Index {
    /// The column, plus the row's entry of `offsets` if present.
    Column,
    /// `block_table[row][column / page_size] * page_size + column % page_size`; -1 where that
    /// entry is negative.
    Paged {
        /// Slots of a page.
        page_size: usize,
    },
}

/// `indices` and `values` `[num_rows, topk]`, stored in i32 and f32, for these inputs:
///
/// - `scores` `[num_rows, num_columns]`, stored in f32;
/// - `lengths` `[num_rows]`, stored in i32: the number of columns that count, clamped to the number
///   of columns; absent where all do;
/// - `offsets` `[num_rows]`, or `block_table` `[num_rows, num_pages]`, stored in i32; absent where
///   a column is an index.
///
/// # Errors
/// Tensors whose shapes do not match.
pub fn forward(inputs: &Named, topk: usize, index: Index) -> Result<Named> {
    let tensors: [(&[_], &[_]); 3] = [
        (&["scores"], &["num_rows", "num_columns"]),
        (&["lengths", "offsets"], &["num_rows"]),
        (&["block_table"], &["num_rows", "num_pages"]),
    ];
    let [num_rows, num_columns, num_pages] =
        inputs.extents(["num_rows", "num_columns", "num_pages"], &tensors)?;
    let optional = |name: &str| inputs.get(name).map(values).transpose();
    let (scores, lengths) = (values(inputs.tensor("scores")?)?, optional("lengths")?);
    let (offsets, table) = (optional("offsets")?, optional("block_table")?);
    if let Index::Paged { page_size } = index
        && (page_size == 0 || num_pages * page_size < num_columns)
    {
        return Err(wrong_value(
            "page_size",
            page_size,
            "pages of so many slots must hold every column",
        ));
    }
    let (mut indices, mut chosen_values) = (Vec::new(), Vec::new());
    for row in 0..num_rows {
        let length = lengths
            .as_ref()
            .map_or(num_columns, |lengths| lengths[row].clamp(0.0, num_columns as f64) as usize);
        let scores = &scores[row * num_columns..][..length];
        let chosen = chosen(scores, topk);
        let index_of = |column: usize| match (index, &table, &offsets) {
            (Index::Paged { page_size }, Some(table), _) => {
                match table[row * num_pages + column / page_size] {
                    page if page < 0.0 => -1.0,
                    page => page * page_size as f64 + (column % page_size) as f64,
                }
            }
            (_, _, Some(offsets)) => offsets[row] + column as f64,
            _ => column as f64,
        };
        indices.extend(chosen.iter().map(|&column| index_of(column)));
        chosen_values.extend(chosen.iter().map(|&column| ordered(scores[column])));
        indices.resize((row + 1) * topk, -1.0);
        chosen_values.resize((row + 1) * topk, f64::NEG_INFINITY);
    }
    let tensor = |numbers| Tensor::from_vec(numbers, (num_rows, topk), &candle_core::Device::Cpu);
    Ok(Named::new().with("indices", tensor(indices)?).with("values", tensor(chosen_values)?))
}

/// The value by which a score is ordered.
pub(crate) fn ordered(score: f64) -> f64 {
    // Adding 0 turns -0 into 0.
    if score.is_nan() { f64::NEG_INFINITY } else { score + 0.0 }
}

/// The selected columns, in ascending order.
fn chosen(scores: &[f64], topk: usize) -> Vec<usize> {
    let mut columns: Vec<usize> = (0..scores.len()).collect();
    // Stable: of equal scores the lower column stays first.
    columns.sort_by(|&a, &b| ordered(scores[b]).total_cmp(&ordered(scores[a])));
    columns.truncate(topk);
    columns.sort_unstable();
    columns
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Draw, f64_tensor};

    fn of(scores: &[f64]) -> Named {
        Named::new().with("scores", f64_tensor(scores, &[1, scores.len()]))
    }

    fn selected(inputs: &Named, topk: usize, index: Index) -> [Vec<f64>; 2] {
        let outputs = forward(inputs, topk, index).expect("it fits");
        ["indices", "values"]
            .map(|name| values(outputs.tensor(name).expect("an output")).expect("numbers"))
    }

    #[test]
    fn the_largest_are_chosen_ties_go_to_the_lower_column_and_what_is_missing_is_padding() {
        let inf = f64::INFINITY;
        let scores = of(&[1.0, -0.0, f64::NAN, 0.0, -inf, 3.0, 1.0, inf, 1.0]);
        assert_eq!(
            selected(&scores, 4, Index::Column),
            [vec![0., 5., 6., 7.], vec![1., 3., 1., inf]]
        );
        // Of the two zeros the one at column 1; its sign is lost.
        let [indices, values] = selected(&scores, 6, Index::Column);
        assert_eq!((indices, values[1].to_bits()), (vec![0., 1., 5., 6., 7., 8.], 0));
        // NaN ranks as -infinity, and comes before it here.
        assert_eq!(selected(&scores, 8, Index::Column)[0], [0., 1., 2., 3., 5., 6., 7., 8.]);
        let short = scores.with("lengths", f64_tensor(&[2.0], &[1]));
        assert_eq!(
            selected(&short, 4, Index::Column),
            [vec![0., 1., -1., -1.], vec![1., 0., -inf, -inf]]
        );
    }

    #[test]
    fn it_is_what_taking_the_largest_again_and_again_gives() {
        let scores = values(&Draw::new(1).bf16(&[40], 1.0)).expect("numbers");
        let mut left: Vec<(usize, f64)> = scores.iter().copied().enumerate().collect();
        let mut largest: Vec<f64> = (0..13)
            .map(|_| {
                let best = (0..left.len())
                    .fold(0, |best, i| if left[i].1 > left[best].1 { i } else { best });
                left.remove(best).0 as f64
            })
            .collect();
        largest.sort_by(f64::total_cmp);
        assert_eq!(selected(&of(&scores), 13, Index::Column)[0], largest);
    }

    #[test]
    fn indices_are_offset_or_mapped_by_pages_and_a_page_that_is_not_there_is_none() {
        let scores = of(&[5.0, 4.0, 3.0, 2.0, 1.0]);
        let offset = scores.clone().with("offsets", f64_tensor(&[100.0], &[1]));
        assert_eq!(selected(&offset, 2, Index::Column)[0], [100., 101.]);
        let paged = scores.with("block_table", f64_tensor(&[7.0, -3.0, 0.0], &[1, 3]));
        assert_eq!(selected(&paged, 5, Index::Paged { page_size: 2 })[0], [14., 15., -1., -1., 0.]);
        assert!(forward(&paged, 5, Index::Paged { page_size: 1 }).is_err());
    }
}
