//! The tests that decide what counts as growth. None has a tolerance; each has a false-alarm rate.
//!
//! Every `p` here is one-sided: the probability, without a change, of evidence for "larger" at
//! least as strong as what was seen.

use statrs::distribution::{ContinuousCDF, Normal};

/// Above this many ranks the null distribution is taken from the normal limit. The exact one would
/// need a table that grows with the cube of this number, and the limit is close by then.
const EXACT: usize = 60;

/// Wilcoxon's signed-rank test that `differences` lean upwards.
///
/// A change that only reorders roundings makes each difference as likely to rise as to fall.
/// Differences of exactly 0 (bit-equal runs) are no evidence and are dropped. The test is exact
/// with ties, given the ranks, up to 60 differences. The smallest `p` of n differences is `2^-n`.
pub fn signed_rank(differences: &[f64]) -> f64 {
    let kept: Vec<f64> = differences.iter().copied().filter(|d| !d.is_nan() && *d != 0.0).collect();
    let sizes: Vec<f64> = kept.iter().map(|d| d.abs()).collect();
    let ranks = double_ranks(&sizes);
    let rising: usize =
        ranks.iter().zip(&kept).filter(|(_, d)| **d > 0.0).map(|(rank, _)| rank).sum();
    let total: usize = ranks.iter().sum();
    if kept.is_empty() {
        return 1.0;
    }
    if kept.len() > EXACT {
        let variance = ranks.iter().map(|rank| (*rank as f64).powi(2)).sum::<f64>() / 4.0;
        return upper_tail(rising as f64, total as f64 / 2.0, variance);
    }
    // chance[s]: probability that the ranks with a rising sign sum to s, each sign a fair coin.
    let mut chance = vec![0.0; total + 1];
    chance[0] = 1.0;
    for rank in ranks {
        for sum in (0..=total).rev() {
            let with = if sum >= rank { chance[sum - rank] } else { 0.0 };
            chance[sum] = 0.5 * (chance[sum] + with);
        }
    }
    chance[rising..].iter().sum::<f64>().min(1.0)
}

/// The rank-sum test of Mann and Whitney that `head` lies above `base`, for runs without common
/// cases. Without a change, every assignment of the pooled values to the two runs is equally
/// likely. It is exact with ties up to 60 values in all.
pub fn rank_sum(base: &[f64], head: &[f64]) -> f64 {
    let number =
        |values: &[f64]| values.iter().copied().filter(|v| !v.is_nan()).collect::<Vec<_>>();
    let (base, head) = (number(base), number(head));
    if base.is_empty() || head.is_empty() {
        return 1.0;
    }
    let ranks = double_ranks(&[head.as_slice(), base.as_slice()].concat());
    let (count, chosen) = (ranks.len(), head.len());
    let observed: usize = ranks[..chosen].iter().sum();
    let total: usize = ranks.iter().sum();
    if count > EXACT {
        let mean = total as f64 / count as f64;
        let scatter = ranks.iter().map(|rank| (*rank as f64 - mean).powi(2)).sum::<f64>()
            / (count - 1) as f64;
        let variance = scatter * chosen as f64 * base.len() as f64 / count as f64;
        return upper_tail(observed as f64, mean * chosen as f64, variance);
    }
    // ways[k][s]: subsets of k ranks that sum to s, as a share of all subsets of `chosen` ranks in
    // the end.
    let mut ways = vec![vec![0.0; total + 1]; chosen + 1];
    ways[0][0] = 1.0;
    for rank in ranks {
        for size in (1..=chosen).rev() {
            let (smaller, larger) = ways.split_at_mut(size);
            for sum in rank..=total {
                larger[0][sum] += smaller[size - 1][sum - rank];
            }
        }
    }
    let all: f64 = ways[chosen].iter().sum();
    (ways[chosen][observed..].iter().sum::<f64>() / all).min(1.0)
}

/// The chance that something seen in `seen` of `base` cases is seen in none of `head` cases from
/// the same distribution: all `seen` of the pooled cases are on the side of `base`.
pub fn absence(seen: u64, base: u64, head: u64) -> f64 {
    (0..seen.min(base)).map(|taken| (base - taken) as f64 / (base + head - taken) as f64).product()
}

/// Which of several tests are significant at a joint false-alarm rate (Holm's step-down). The
/// chance that any of them is wrong is at most `rate`, however they depend on each other.
pub fn holm(ps: &[f64], rate: f64) -> Vec<bool> {
    let mut order: Vec<usize> = (0..ps.len()).collect();
    order.sort_by(|a, b| ps[*a].total_cmp(&ps[*b]));
    let mut stands = vec![false; ps.len()];
    for (place, index) in order.into_iter().enumerate() {
        if ps[index] > rate / (ps.len() - place) as f64 {
            break;
        }
        stands[index] = true;
    }
    stands
}

/// Mann's and Kendall's test that a series rises: of all orders of the values, the share with at
/// least as many rising pairs. Exact without ties. Ties do not count as a rise, which makes the
/// test more conservative.
pub fn trend(series: &[f64]) -> f64 {
    let length = series.len();
    let pairs = length * length.saturating_sub(1) / 2;
    let falls = (0..length)
        .flat_map(|i| (0..i).map(move |j| (j, i)))
        .filter(|(j, i)| series[*i] <= series[*j])
        .count();
    if length > EXACT {
        let variance = (length * (length - 1)) as f64 * (2 * length + 5) as f64 / 72.0;
        return upper_tail((pairs - falls) as f64, pairs as f64 / 2.0, variance);
    }
    // chance[k]: probability of k inversions; the i-th value falls below 0..i-1 of those before it.
    let mut chance = vec![0.0; pairs + 1];
    chance[0] = 1.0;
    for place in 2..=length {
        chance = (0..=pairs)
            .map(|k| chance[k.saturating_sub(place - 1)..=k].iter().sum::<f64>() / place as f64)
            .collect();
    }
    chance[..=falls].iter().sum::<f64>().min(1.0)
}

/// `P(X >= observed)` of a normal deviate with this mean and variance.
fn upper_tail(observed: f64, mean: f64, variance: f64) -> f64 {
    match Normal::new(mean, variance.sqrt()) {
        Ok(normal) if variance > 0.0 => normal.sf(observed),
        _ => 1.0,
    }
}

/// Twice the rank of each value, counted from the smallest. Equal values share the mean of their
/// ranks, and the doubling keeps it whole.
fn double_ranks(values: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*a].total_cmp(&values[*b]));
    let mut ranks = vec![0; values.len()];
    let mut first = 0;
    while first < order.len() {
        let equal = order[first..]
            .iter()
            .take_while(|index| values[**index] == values[order[first]])
            .count();
        for index in &order[first..first + equal] {
            ranks[*index] = 2 * first + equal + 1;
        }
        first += equal;
    }
    ranks
}

/// Median; NaN for no values.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        length if length % 2 == 1 => sorted[length / 2],
        length => f64::midpoint(sorted[length / 2 - 1], sorted[length / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;

    #[test]
    fn signed_ranks_have_their_tabulated_tails() {
        assert_relative_eq!(signed_rank(&[1.0, 2.0, 3.0, 4.0, 5.0]), 1.0 / 32.0, epsilon = 1e-12);
        // n = 5, W+ = 14: two of the 32 sign patterns reach it.
        assert_relative_eq!(signed_rank(&[-1.0, 2.0, 3.0, 4.0, 5.0]), 2.0 / 32.0, epsilon = 1e-12);
        assert_eq!(signed_rank(&[0.0, f64::NAN]), 1.0);
        assert!(signed_rank(&[-1.0, -2.0, -3.0]) > 0.99);
        assert_relative_eq!(signed_rank(&[f64::INFINITY; 10]), 1.0 / 1024.0, epsilon = 1e-12);
    }

    #[test]
    fn rank_sums_have_their_tabulated_tails() {
        assert_relative_eq!(
            rank_sum(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0]),
            1.0 / 20.0,
            epsilon = 1e-12
        );
        assert_relative_eq!(
            rank_sum(&[1.0, 2.0, 4.0], &[3.0, 5.0, 6.0]),
            2.0 / 20.0,
            epsilon = 1e-12
        );
        assert_eq!(rank_sum(&[1.0; 4], &[1.0; 4]), 1.0);
        assert_eq!(rank_sum(&[], &[1.0]), 1.0);
    }

    #[test]
    fn the_normal_limit_continues_the_exact_tails() {
        let alternating = |count: usize| {
            (1..=count).map(|i| if i % 3 == 0 { -(i as f64) } else { i as f64 }).collect()
        };
        let (exact, limit): (Vec<f64>, Vec<f64>) = (alternating(EXACT), alternating(EXACT + 3));
        let (exact, limit) = (signed_rank(&exact), signed_rank(&limit));
        assert!(limit < exact && exact < 1.5 * limit, "{exact} {limit}");
        let (low, high): (Vec<f64>, Vec<f64>) =
            ((0..30).map(f64::from).collect(), (8..38).map(f64::from).collect());
        let exact = rank_sum(&low, &high);
        let longer: Vec<f64> = (8..39).map(f64::from).collect();
        let limit = rank_sum(&low, &longer);
        assert!(limit < exact && exact < 3.0 * limit, "{exact} {limit}");
    }

    #[test]
    fn a_trend_is_as_rare_as_the_orders_that_show_it() {
        assert_relative_eq!(trend(&[1.0, 2.0, 3.0, 4.0]), 1.0 / 24.0, epsilon = 1e-12);
        assert_relative_eq!(trend(&[2.0, 1.0, 3.0, 4.0]), 4.0 / 24.0, epsilon = 1e-12);
        assert_relative_eq!(trend(&[4.0, 3.0, 2.0, 1.0]), 1.0, epsilon = 1e-12);
        assert_eq!((trend(&[]), trend(&[1.0])), (1.0, 1.0));
    }

    #[test]
    fn holm_keeps_the_joint_rate() {
        assert_eq!(holm(&[0.004, 0.02, 0.011], 0.03), [true, true, true]);
        assert_eq!(holm(&[0.011, 0.02, 0.9], 0.03), [false, false, false]);
    }

    #[test]
    fn absence_is_sure_only_of_what_was_common() {
        assert_relative_eq!(absence(1, 10, 10), 0.5, epsilon = 1e-12);
        assert!(absence(10, 10, 10) < 1e-5);
        assert_eq!(absence(3, 10, 0), 1.0);
    }
}
