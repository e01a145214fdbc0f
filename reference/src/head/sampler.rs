//! Samples one token for each row of logits: temperature, top-k, top-p and min-p by the exponential
//! race (inference 12.3).
//!
//! ```text
//! order  = ids from the largest logit down, of equal ones the lower id first; -0 equals 0; NaN and -infinity never,
//!          nor a logit below an infinite maximum
//! t      = max(temperature, 1e-5), at most the largest fp32 value
//! weight = exp((logit - max) / t), 1 at an infinite maximum; above 0, however small
//! kept   = the first n of the order, n the smallest of
//!          top_k, where that is above 0;
//!          the smallest number, 1 or more, whose weights reach top_p of the sum of all weights,
//!          where top_p is below 1;
//!          the number of weights of at least min(min_p, 1), where min_p is above 0
//! x      = word id % 4 of Philox4x32-10 of counter (id / 4, step low, step high, 0) and key (seed low, seed high)
//! v      = (x + 0.5) / 2^32 in fp32;  g = -log1p(-v)
//! score  = logit / (t ln 2) - log2(g) of kept ids, only -log2(g) for an infinite logit;
//!          -infinity of other ids
//! token  = the id with the largest score, the lowest of equals; the first of the order where temperature > 0 does not
//!          hold; -1 where no logit is above -infinity
//! ```
//!
//! The largest `p / g` is the largest `log2 p - log2 g`. The sum that normalizes a weight to `p` is
//! one value for the row.

use candle_core::{Device, Tensor};

use crate::conventions::{Convention, Conventions};
use crate::error::Result;
use crate::indexer::topk::ordered;
use crate::named::Named;
use crate::precision::{Rounding, values};

/// The smallest temperature by which logits are divided.
pub const LEAST_TEMPERATURE: f64 = 1e-5;

/// The divisor of the logits.
fn divisor(temperature: f64) -> f64 {
    temperature.clamp(LEAST_TEMPERATURE, f64::from(f32::MAX))
}

/// Score of an id that is kept and whose `g` is infinite: below every other kept id, above ids that
/// are not kept.
const LOST: f64 = -1e300;

/// Four words of the counter-based generator Philox4x32-10 (Salmon et al., 2011).
pub fn philox(counter: [u32; 4], seed: u64) -> [u32; 4] {
    let [mut a, mut b, mut c, mut d] = counter;
    let [mut low, mut high] = halves(seed);
    for _ in 0..10 {
        let [first_low, first_high] = halves(u64::from(a) * 0xd251_1f53);
        let [second_low, second_high] = halves(u64::from(c) * 0xcd9e_8d57);
        [a, b, c, d] = [second_high ^ b ^ low, second_low, first_high ^ d ^ high, first_low];
        (low, high) = (low.wrapping_add(0x9e37_79b9), high.wrapping_add(0xbb67_ae85));
    }
    [a, b, c, d]
}

fn halves(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}

/// The random word of an id.
pub fn word(seed: u64, step: u64, id: usize) -> u32 {
    let [low, high] = halves(step);
    philox([(id / 4) as u32, low, high, 0], seed)[id % 4]
}

/// `v` of a word: both roundings are to nearest in fp32, in every precision.
pub fn uniform(word: u32) -> f32 {
    ((f64::from(word as f32) + 0.5) * 2f64.powi(-32)) as f32
}

/// The filters of a row; 0, 1 and 0 keep all ids.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Filters {
    /// The largest number of kept ids; 0 or less is no limit.
    pub top_k: f64,
    /// The share of the sum that is kept; 1 or more, or NaN, keeps all of it.
    pub top_p: f64,
    /// The smallest weight that is kept; 0 or less, or NaN, is no limit.
    pub min_p: f64,
}

/// The ids of a row from the largest logit down, and their weights, without ids that can never be
/// selected. A weight that underflows in f64 is 0 here, and its id is still ranked: it wins where
/// all ids before it lose.
pub fn ranked(logits: &[f64], temperature: f64) -> (Vec<usize>, Vec<f64>) {
    let mut order: Vec<usize> =
        (0..logits.len()).filter(|&id| ordered(logits[id]) > f64::NEG_INFINITY).collect();
    // Stable: of equal logits the lower id stays first.
    order.sort_by(|&a, &b| ordered(logits[b]).total_cmp(&ordered(logits[a])));
    let most = order.first().map_or(0.0, |&id| logits[id]);
    if most.is_infinite() {
        order.retain(|&id| logits[id] == most);
    }
    let weight = |&id: &usize| match logits[id] {
        logit if logit == most => 1.0,
        logit => ((logit - most) / divisor(temperature)).exp(),
    };
    let weights = order.iter().map(weight).collect();
    (order, weights)
}

/// Number of ids, from the first of the order on, that are kept for these weights.
pub fn num_kept(weights: &[f64], filters: Filters) -> usize {
    num_kept_by(weights, filters, Conventions::default())
}

/// The same by these conventions of a kernel.
pub fn num_kept_by(weights: &[f64], filters: Filters, conventions: Conventions) -> usize {
    let Filters { top_k, top_p, min_p } = filters;
    let mut by_count = if top_k > 0.0 { top_k as usize } else { usize::MAX };
    if let (true, Some(&last)) =
        (conventions.have(Convention::TiesKept), weights.get(by_count.wrapping_sub(1)))
    {
        by_count += weights[by_count..].iter().take_while(|&&weight| weight == last).count();
    }
    let by_weight = if min_p > 0.0 {
        weights.iter().filter(|&&w| w >= min_p.min(1.0)).count()
    } else {
        usize::MAX
    };
    let mut by_share = usize::MAX;
    if top_p < 1.0 {
        let of_kept = conventions.have(Convention::TopPOfKept);
        let shared = if of_kept { by_count.min(weights.len()) } else { weights.len() };
        let (wanted, mut sum) = (top_p * weights[..shared].iter().sum::<f64>(), 0.0);
        let reaches = |weight: &f64| {
            sum += weight;
            sum >= wanted
        };
        by_share = weights.iter().position(reaches).map_or(usize::MAX, |at| at + 1);
    }
    by_count.min(by_weight).min(by_share).min(weights.len())
}

/// `tokens` `[num_rows]`, stored in i32, and the `scores` `[num_rows, vocab_size]` by which they
/// are selected. In a row that takes the first id of the order, a score is the negative index in
/// that order. The inputs are:
///
/// - `logits` `[num_rows, vocab_size]`, stored in f32;
/// - `temperature` `[num_rows]`, stored in f32;
/// - `top_k` in i32, `top_p` and `min_p` in f32, `[num_rows]`, each absent for no limit;
/// - `seed` and `step` `[num_rows]`, stored in i64; at most 2^53 in size, which f64 holds.
///
/// # Errors
/// Tensors whose shapes do not match.
pub fn forward(inputs: &Named, rounding: &mut Rounding) -> Result<Named> {
    let of_rows: &[_] = &["temperature", "top_k", "top_p", "min_p", "seed", "step"];
    let tensors: [(&[_], &[_]); 2] =
        [(&["logits"], &["num_rows", "vocab_size"]), (of_rows, &["num_rows"])];
    let [num_rows, vocab_size] = inputs.extents(["num_rows", "vocab_size"], &tensors)?;
    let of = |name: &'static str| inputs.tensor(name).and_then(values);
    let optional = |name: &str| inputs.get(name).map(values).transpose();
    let (logits, temperature) = (of("logits")?, of("temperature")?);
    let (seed, step) = (of("seed")?, of("step")?);
    let (top_k, top_p, min_p) = (optional("top_k")?, optional("top_p")?, optional("min_p")?);
    let mut waiting = vec![f64::INFINITY; num_rows * vocab_size];
    let mut first = vec![None; num_rows];
    let mut kept = vec![false; num_rows * vocab_size];
    let mut places = vec![f64::NEG_INFINITY; num_rows * vocab_size];
    for row in 0..num_rows {
        let at = row * vocab_size;
        let (order, weights) = ranked(&logits[at..at + vocab_size], temperature[row]);
        first[row] = order.first().copied();
        if temperature[row] > 0.0 {
            let number = |tensor: &Option<Vec<f64>>, otherwise| {
                tensor.as_ref().map_or(otherwise, |all| all[row])
            };
            let filters = Filters {
                top_k: number(&top_k, 0.0),
                top_p: number(&top_p, 1.0),
                min_p: number(&min_p, 0.0),
            };
            for &id in &order[..num_kept_by(&weights, filters, rounding.conventions())] {
                kept[at + id] = true;
                let word = word(seed[row] as i64 as u64, step[row] as i64 as u64, id);
                waiting[at + id] = -f64::from(-uniform(word)).ln_1p();
            }
        } else {
            order.iter().enumerate().for_each(|(place, &id)| places[at + id] = -(place as f64));
        }
    }
    let scores = scores(&logits, &temperature, waiting, (num_rows, vocab_size), rounding)?;
    let score = |at: usize| match (temperature[at / vocab_size] > 0.0, kept[at]) {
        (false, _) => places[at],
        (true, true) => scores[at].max(LOST),
        (true, false) => f64::NEG_INFINITY,
    };
    let scores: Vec<f64> = (0..num_rows * vocab_size).map(score).collect();
    let token = |(row, first): (usize, Option<usize>)| {
        let scores = &scores[row * vocab_size..][..vocab_size];
        let larger = |best: usize, id: usize| if scores[id] > scores[best] { id } else { best };
        first.map_or(-1.0, |_| (0..vocab_size).reduce(larger).map_or(-1.0, |id| id as f64))
    };
    let tokens: Vec<f64> = first.into_iter().enumerate().map(token).collect();
    let named = Named::new().with("tokens", Tensor::from_vec(tokens, num_rows, &Device::Cpu)?);
    Ok(named.with("scores", Tensor::from_vec(scores, (num_rows, vocab_size), &Device::Cpu)?))
}

/// `logit / (t ln 2) - log2(g)` of all ids: the factor of a row in fp32, both logarithms, and the
/// difference, rounded once.
fn scores(
    logits: &[f64],
    temperature: &[f64],
    waiting: Vec<f64>,
    extents: (usize, usize),
    rounding: &mut Rounding,
) -> Result<Vec<f64>> {
    let vocab_size = extents.1;
    let tensor = |numbers: Vec<f64>| Tensor::from_vec(numbers, extents, &Device::Cpu);
    let factor = |&t: &f64| std::f64::consts::LOG2_E / divisor(t);
    let factors =
        Tensor::from_vec(temperature.iter().map(factor).collect(), extents.0, &Device::Cpu)?;
    let factors = values(&rounding.f32(&factors)?)?;
    let waiting = values(&rounding.approximate_f32(&tensor(waiting)?)?)?;
    let power = rounding.approximate_f32(&tensor(waiting.iter().map(|g| g.log2()).collect())?)?;
    let product = |(at, power): (usize, f64)| match logits[at] {
        // An infinite g loses, whatever the logit is.
        _ if power == f64::INFINITY => f64::NEG_INFINITY,
        f64::INFINITY => -power,
        logit => logit * factors[at / vocab_size] - power,
    };
    let scores = values(&power)?.into_iter().enumerate().map(product).collect();
    values(&rounding.f32(&tensor(scores)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::f64_tensor;

    const NONE: Filters = Filters { top_k: 0.0, top_p: 1.0, min_p: 0.0 };

    fn row(logits: &[f64], temperature: f64, seed: u64) -> Named {
        let one = |number: f64| f64_tensor(&[number], &[1]);
        let named = Named::new().with("logits", f64_tensor(logits, &[1, logits.len()]));
        named
            .with("temperature", one(temperature))
            .with("seed", one(seed as f64))
            .with("step", one(0.0))
    }

    fn token(inputs: &Named) -> f64 {
        let outputs = forward(inputs, &mut Rounding::exact()).expect("an oracle");
        values(outputs.tensor("tokens").expect("tokens")).expect("numbers")[0]
    }

    /// The known answers that the authors of the generator publish.
    #[test]
    fn the_generator_gives_the_published_words() {
        assert_eq!(philox([0; 4], 0), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox([u32::MAX; 4], u64::MAX),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        let digits = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        let words = [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1];
        assert_eq!(philox(digits, 0x299f_31d0_a409_3822), words);
    }

    #[test]
    fn a_word_at_either_end_gives_a_positive_time_and_the_upper_end_loses() {
        assert_eq!(uniform(0), 2f32.powi(-33));
        assert_eq!(uniform(u32::MAX), 1.0);
        assert_eq!(uniform(u32::MAX - 127), 1.0);
        assert!(uniform(u32::MAX - 128) < 1.0);
        assert!(-(-uniform(0)).ln_1p() > 0.0 && -(-uniform(u32::MAX)).ln_1p() == f32::INFINITY);
    }

    #[test]
    fn other_kernels_keep_ties_and_take_a_share_of_what_is_left() {
        let kept = |filters, convention| {
            num_kept_by(&[1.0, 0.5, 0.5, 0.25], filters, Conventions::of([convention]))
        };
        let two = Filters { top_k: 2.0, ..NONE };
        assert_eq!(kept(two, Convention::TiesKept), 3);
        assert_eq!(kept(two, Convention::TopPOfKept), 2);
        assert_eq!(kept(Filters { top_k: 4.0, ..NONE }, Convention::TiesKept), 4);
        assert_eq!(kept(Filters { top_k: 9.0, ..NONE }, Convention::TiesKept), 4);
        // 0.6 of 2.25 takes two, of 1.5 one.
        let share = Filters { top_k: 2.0, top_p: 0.6, ..NONE };
        assert_eq!(kept(share, Convention::TiesKept), 2);
        assert_eq!(kept(share, Convention::TopPOfKept), 1);
    }

    #[test]
    fn filters_keep_the_shortest_prefix_of_the_order() {
        let weights = [0.4, 0.3, 0.2, 0.1];
        let kept = |filters| num_kept(&weights, filters);
        assert_eq!(kept(NONE), 4);
        assert_eq!(kept(Filters { top_p: 0.65, ..NONE }), 2);
        assert_eq!(kept(Filters { top_p: 0.71, ..NONE }), 3);
        assert_eq!(kept(Filters { top_p: -1.0, ..NONE }), 1);
        assert_eq!(kept(Filters { top_p: f64::NAN, min_p: f64::NAN, ..NONE }), 4);
        assert_eq!(kept(Filters { top_k: 3.0, top_p: 0.999, min_p: 0.25 }), 2);
        // A share that is reached exactly ends there.
        assert_eq!(num_kept(&[1.0; 16], Filters { top_p: 0.5, ..NONE }), 8);
        assert_eq!(num_kept(&[1.0; 16], Filters { min_p: 7.0, ..NONE }), 16);
        assert_eq!(num_kept(&[1.0, 0.0], NONE), 2, "no weight is 0 but for want of a number");
    }

    #[test]
    fn where_the_first_loses_the_next_wins_however_small_its_weight_unless_it_is_not_kept() {
        // The word of id 38 has all bits set, so its `g` is infinite.
        let seed = 40_222_668;
        assert_eq!(word(seed, 0, 38), u32::MAX);
        let mut logits = [0.0; 44];
        (logits[38], logits[7]) = (9.0, 3.0);
        let inputs = || row(&logits, 1e-3, seed);
        assert_eq!(((3.0 - 9.0) / 1e-3f64).exp(), 0.0);
        assert_eq!(token(&inputs()), 7.0);
        assert_eq!(token(&inputs().with("top_k", f64_tensor(&[2.0], &[1]))), 7.0);
        for filter in ["top_p", "min_p"] {
            assert_eq!(token(&inputs().with(filter, f64_tensor(&[0.5], &[1]))), 38.0, "{filter}");
        }
        logits[38] = f64::INFINITY;
        assert_eq!(
            token(&row(&logits, 1e-3, seed)),
            38.0,
            "beside an infinite logit no other one is kept"
        );
    }

    #[test]
    fn without_a_temperature_the_lowest_of_the_largest_is_taken() {
        for temperature in [0.0, -1.0, f64::NAN] {
            assert_eq!(token(&row(&[1.0, 3.0, f64::NAN, 3.0], temperature, 5)), 1.0);
        }
        assert_eq!(token(&row(&[-0.0, 0.0], 0.0, 5)), 0.0);
    }

    #[test]
    fn a_row_without_a_number_has_no_token_and_an_infinite_logit_has_all_of_it() {
        assert_eq!(token(&row(&[f64::NAN, f64::NEG_INFINITY], 1.0, 5)), -1.0);
        for seed in 0..20 {
            let token =
                token(&row(&[1e30, f64::INFINITY, f64::NEG_INFINITY, f64::INFINITY], 0.5, seed));
            assert!(token == 1.0 || token == 3.0, "{token}");
        }
    }

    /// The first of p and q = 1 - p wins the race with probability p: its share of 4000 samples is
    /// within five standard deviations.
    #[test]
    fn shares_of_draws_are_the_probabilities() {
        let draws = 4000;
        for p in [0.9, 0.25] {
            let logits = [f64::ln(p) * 0.7, f64::ln(1.0 - p) * 0.7];
            let first =
                (0..draws).filter(|&seed| token(&row(&logits, 0.7, seed)) == 0.0).count() as f64;
            let deviation = (draws as f64 * p * (1.0 - p)).sqrt();
            assert!(
                (first - draws as f64 * p).abs() < 5.0 * deviation,
                "{first} of {draws} with {p}"
            );
        }
    }

    #[test]
    fn runs_differ_by_rounding_alone_and_keep_what_is_kept() {
        let logits: Vec<f64> = (0..50).map(|id| f64::from(id as f32 * 0.37) % 5.0).collect();
        let inputs = row(&logits, 0.8, 3).with("top_k", f64_tensor(&[20.0], &[1]));
        let scores = |rounding: &mut Rounding| {
            let outputs = forward(&inputs, rounding).expect("an oracle");
            values(outputs.tensor("scores").expect("scores")).expect("numbers")
        };
        let exact = scores(&mut Rounding::exact());
        let working = scores(&mut Rounding::new(crate::Precision::Working { seed: 7 }));
        assert_eq!(exact.iter().filter(|score| score.is_finite()).count(), 20);
        for (exact, working) in exact.iter().zip(&working) {
            assert_eq!(exact.is_finite(), working.is_finite());
            let off = if exact.is_finite() { (exact - working).abs() } else { 0.0 };
            // Factor, both logarithms and the difference: four roundings or approximations of
            // values below 64.
            assert!(off < 4.0 * 64.0 * 2f64.powi(-22), "{exact} {working}");
        }
        assert!(exact.iter().zip(&working).any(|(a, b)| a != b));
    }
}
