//! Which elements of a tensor fail a check, axis by axis and in few words.
//! [`crate::report::diagnosis`] reads it.

use crate::judge::agreement::unflatten;
use crate::record::{Factor, FailingElements, FailingEntries};

/// Runs of an axis that are kept: a reader sees no pattern in more.
const MOST_RUNS: usize = 16;

/// Gathers these row-major elements of a tensor along each of its axes; `None` where none fails.
/// `values` are the kernel's and the oracle's, where a factor between them is meaningful.
pub fn elements(
    failing: &[usize],
    shape: &[usize],
    values: Option<(&[f64], &[f64])>,
) -> Option<FailingElements> {
    if failing.is_empty() {
        return None;
    }
    let mut fails: Vec<Vec<bool>> = shape.iter().map(|&extent| vec![false; extent]).collect();
    for &element in failing {
        for (axis, entry) in unflatten(element, shape).into_iter().enumerate() {
            fails[axis][entry as usize] = true;
        }
    }
    Some(FailingElements {
        count: failing.len() as u64,
        shape: shape.iter().map(|&extent| extent as u64).collect(),
        axes: fails.iter().map(|fails| entries(fails)).collect(),
        factor: values.and_then(|(kernel, oracle)| factor(failing, kernel, oracle)),
    })
}

/// The entries of an axis that have a failing element.
fn entries(fails: &[bool]) -> FailingEntries {
    let period = period(fails);
    let mut runs: Vec<[u64; 2]> = Vec::new();
    for entry in (0..period).filter(|&entry| fails[entry]) {
        match runs.last_mut() {
            Some([_, last]) if *last + 1 == entry as u64 => *last += 1,
            _ => runs.push([entry as u64; 2]),
        }
    }
    if runs.len() > MOST_RUNS {
        runs.clear();
    }
    let entries = fails.iter().filter(|&&fails| fails).count() as u64;
    FailingEntries { period: period as u64, runs, entries }
}

/// The number of entries after which all repeat, at least twice. It is the axis's size where they
/// do not repeat or are all the same. The smallest period of a text is its length minus that of its
/// longest border (Knuth, Morris and Pratt).
fn period(fails: &[bool]) -> usize {
    let mut borders = vec![0; fails.len()];
    for at in 1..fails.len() {
        let mut border: usize = borders[at - 1];
        while border > 0 && fails[border] != fails[at] {
            border = borders[border - 1];
        }
        borders[at] = border + usize::from(fails[border] == fails[at]);
    }
    let period = fails.len() - borders.last().copied().unwrap_or(0);
    if period > 1 && 2 * period <= fails.len() { period } else { fails.len() }
}

/// The least-squares factor, and the part of the kernel's values that it leaves unexplained.
fn factor(failing: &[usize], kernel: &[f64], oracle: &[f64]) -> Option<Factor> {
    let (mut product, mut exact, mut found) = (0.0, 0.0, 0.0);
    for &i in failing {
        product += kernel[i] * oracle[i];
        exact += oracle[i] * oracle[i];
        found += kernel[i] * kernel[i];
    }
    let value = product / exact;
    let left: f64 = failing.iter().map(|&i| (kernel[i] - value * oracle[i]).powi(2)).sum();
    let rest = if found > 0.0 { (left / found).sqrt() } else { 0.0 };
    (value.is_finite() && rest.is_finite()).then_some(Factor { value, rest })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn along(axis: usize, shape: &[usize], fails: impl Fn(&[u64]) -> bool) -> FailingEntries {
        let failing: Vec<usize> = (0..shape.iter().product())
            .filter(|&element| fails(&unflatten(element, shape)))
            .collect();
        elements(&failing, shape, None).expect("some fail").axes[axis].clone()
    }

    #[test]
    fn runs_and_periods_are_found_along_each_axis() {
        let shape = [6, 512];
        let columns = along(1, &shape, |at| at[1] >= 448);
        assert_eq!((columns.period, columns.runs, columns.entries), (512, vec![[448, 511]], 64));
        assert_eq!(along(0, &shape, |at| at[1] >= 448).runs, [[0, 5]]);
        let heads = along(0, &[12, 5], |at| at[0] % 4 == 3);
        assert_eq!((heads.period, heads.runs, heads.entries), (4, vec![[3, 3]], 3));
        // One occurrence is no period, and neither is everything.
        assert_eq!(along(0, &[7, 1], |at| at[0] == 3).period, 7);
        assert_eq!(
            along(0, &[8, 1], |_| true),
            FailingEntries { period: 8, runs: vec![[0, 7]], entries: 8 }
        );
        let scattered = along(0, &[100, 1], |at| at[0] * at[0] % 7 == 1 && at[0] > 20);
        assert!(scattered.runs.is_empty() && scattered.entries > 16);
    }

    #[test]
    fn a_factor_is_that_of_the_failing_elements() {
        let oracle = [1.0, 2.0, -3.0, 5.0];
        let kernel = [1.0, 0.5, -0.75, 5.0];
        let found =
            elements(&[1, 2], &[4], Some((&kernel, &oracle))).and_then(|found| found.factor);
        assert_eq!(found, Some(Factor { value: 0.25, rest: 0.0 }));
        let undefined =
            elements(&[1], &[2], Some((&[1.0, f64::NAN], &[1.0, 1.0]))).expect("one fails");
        assert!(undefined.factor.is_none());
        assert!(elements(&[], &[4], None).is_none());
    }
}
