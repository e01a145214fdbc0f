//! What a verdict could have seen: the smallest defects that it would have failed.
//!
//! A correct kernel's tensor (that of an oracle run to nearest) is corrupted before it is stored,
//! and judged again. The *bias* is a uniform relative error: every element times `1 + 2^-k` and
//! times `1 - 2^-k`. The largest `k` at which both fail counts. The *element* is the error of a
//! single element that fails wherever it is.
//!
//! The same corrupted tensors are given to the rules of other projects, so that a report shows what
//! these would have seen:
//!
//! - `assert_close`: `|y - e| <= atol + rtol |e|` with the defaults of
//!   `torch.testing.assert_close` for the type;
//! - `cosine`: `<y, e> / (|y| |e|) >= 0.999`;
//! - `flash_mla`: FlashMLA's `check_is_allclose` ([`FLASH_MLA_OUTPUTS`], [`FLASH_MLA_STATISTICS`]):
//!   each element within an absolute or a relative error, and `1 - 2 <y, e> / (|y|² + |e|²)` within
//!   a third number;
//! - `flash_attention`: FlashAttention's tests (`hopper/test_flash_attn.py` at 9241ae3): the
//!   largest error is at most twice that of a plain implementation in the same types, plus twice
//!   the error of adding 0.3 and subtracting it again in the type.

use dsv4_reference::Format;
use rayon::prelude::*;

use crate::judge::agreement::budget_use;
use crate::judge::grid::Steps;
use crate::judge::truth::Held;
use crate::judge::yardstick::Yardstick;
use crate::operator::OracleTensor;
use crate::record::{Power, Seen};

/// A relative error that every verdict must see, to count as agreement.
pub const FLOOR: f64 = 0.1;

/// What FlashMLA allows an output: absolute, relative, and the cosine difference. The values are
/// those of its dense decoding (`tests/test_flash_mla_dense_decoding.py` at 0251105), the strictest
/// of its tests. Sparse decoding has 1e-3 instead of 8e-4, sparse prefill 3.01/128 and 7e-6.
pub const FLASH_MLA_OUTPUTS: [f64; 3] = [8e-4, 2.01 / 128.0, 5e-6];

/// What FlashMLA allows fp32 statistics: `lse` and `max_logits` in
/// `tests/test_flash_mla_sparse_prefill.py` at 0251105. The last number is the default of
/// `check_is_allclose`.
pub const FLASH_MLA_STATISTICS: [f64; 3] = [1e-6, 2.01 / 65536.0, 1e-7];

/// What FlashMLA adds to a magnitude before it divides by it, and the sum of squares below which it
/// compares no angle.
const FLASH_MLA_GUARDS: [f64; 2] = [1e-6, 1e-12];

/// Biases below `2^-30` do not matter in fp32.
const SMALLEST_BIAS: u32 = 30;

/// The power of the verdict over one tensor. `run` is that of the oracle to nearest, not stored
/// yet; `powerless` is the result of [`is_missing`]. `None` where a bias does not change what is
/// stored.
pub fn of(exact: &OracleTensor, held: &Held, run: &[f64], powerless: bool) -> Option<Power> {
    if !can_be_biased(exact, held) {
        return None;
    }
    let tensor = Tensor { exact, held, run };
    let rules = Rules::of(exact, held, run);
    let judges: [&Judge<'_>; 5] = [
        &|y| fails(exact, held, y),
        &|y| rules.assert_close(y),
        &|y| rules.cosine(y),
        &|y| rules.flash_mla(y),
        &|y| rules.flash_attention(y),
    ];
    let seen: Vec<Seen> = judges.par_iter().map(|judge| tensor.smallest_bias(judge)).collect();
    let &[bias, assert_close, cosine, flash_mla, flash_attention] = seen.as_slice() else {
        return None;
    };
    let element = relative_element(exact, held);
    Some(Power { bias, powerless, element, assert_close, cosine, flash_mla, flash_attention })
}

/// Whether a tensor fails.
type Judge<'a> = dyn Fn(&[f64]) -> bool + Sync + 'a;

/// Whether the verdict over one tensor would pass an error of 10 %, where that changes anything.
pub fn is_missing(exact: &OracleTensor, held: &Held, run: &[f64]) -> bool {
    can_be_biased(exact, held)
        && !Tensor { exact, held, run }.sees(FLOOR, &|y| fails(exact, held, y))
}

/// Whether something is compared within rounding, and not stored as zero.
fn can_be_biased(exact: &OracleTensor, held: &Held) -> bool {
    let stays = |(i, e): (usize, &f64)| e.is_finite() && e.abs() > held.steps.half_ulp(i, 0.0);
    held.yardstick.is_some() && exact.values.iter().enumerate().any(stays)
}

/// Whether a tensor fails, by an element's budget or as a whole.
pub fn fails(exact: &OracleTensor, held: &Held, written: &[f64]) -> bool {
    let over = |i: usize| budget_use(written[i], exact.values[i], held.budget.allowed[i]) > 1.0;
    let whole = |yardstick: &Yardstick| {
        yardstick.problems(yardstick.numbers(exact, written)).iter().any(Option::is_some)
    };
    (0..written.len()).any(over) || held.yardstick.as_ref().is_some_and(whole)
}

struct Tensor<'a> {
    exact: &'a OracleTensor,
    held: &'a Held,
    run: &'a [f64],
}

impl Tensor<'_> {
    fn sees(&self, bias: f64, fails: &Judge<'_>) -> bool {
        [1.0 + bias, 1.0 - bias].iter().all(|factor| {
            let corrupted: Vec<f64> = self.run.iter().map(|value| value * factor).collect();
            let mut corrupted = self.held.steps.store(&corrupted);
            // A bias does not apply to infinities and NaN.
            for (y, e) in
                corrupted.iter_mut().zip(&self.exact.values).filter(|(_, e)| !e.is_finite())
            {
                *y = *e;
            }
            fails(&corrupted)
        })
    }

    /// The largest `k` for which `2^-k` is seen, by bisection: a rule that sees an error sees a
    /// larger one.
    fn smallest_bias(&self, fails: &Judge<'_>) -> Seen {
        let seen = |k: u32| self.sees(0.5f64.powi(k as i32), fails);
        if self.sees(0.0, fails) {
            return Seen::FalseAlarm;
        }
        if !seen(1) {
            return Seen::Nothing;
        }
        let (mut sees, mut misses) = (1, SMALLEST_BIAS + 1);
        while misses - sees > 1 {
            let middle = (sees + misses) / 2;
            if seen(middle) { sees = middle } else { misses = middle }
        }
        Seen::Bias(sees)
    }
}

/// The error that fails at any element, over the tensor's root mean square.
fn relative_element(exact: &OracleTensor, held: &Held) -> f64 {
    let finite = || exact.values.iter().zip(&held.budget.allowed).filter(|(e, _)| e.is_finite());
    let rms = (finite().map(|(e, _)| e * e).sum::<f64>() / finite().count().max(1) as f64).sqrt();
    finite().map(|(_, allowed)| *allowed).fold(0.0, f64::max) / rms
}

fn largest_error(written: &[f64], exact: &[f64]) -> f64 {
    written
        .iter()
        .zip(exact)
        .filter(|(_, e)| e.is_finite())
        .map(|(y, e)| (y - e).abs())
        .fold(0.0, f64::max)
}

/// The rules of other projects; each returns whether it fails a tensor.
struct Rules<'a> {
    exact: &'a [f64],
    steps: &'a Steps,
    /// The largest error that FlashAttention's rule allows.
    flash_attention_allows: f64,
}

impl<'a> Rules<'a> {
    fn of(exact: &'a OracleTensor, held: &'a Held, run: &[f64]) -> Self {
        let (exact, steps) = (&exact.values, &held.steps);
        let plain_error = largest_error(&steps.store(run), exact);
        let e = steps.store(exact);
        let sum = steps.store(&e.iter().map(|e| e + 0.3).collect::<Vec<_>>());
        let back = steps.store(&sum.iter().map(|sum| sum - 0.3).collect::<Vec<_>>());
        let flash_attention_allows = 2.0 * plain_error + 2.0 * largest_error(&back, &e);
        Self { exact, steps, flash_attention_allows }
    }

    fn pairs<'b>(&'b self, written: &'b [f64]) -> impl Iterator<Item = (f64, f64)> + 'b {
        written.iter().copied().zip(self.exact.iter().copied()).filter(|(_, e)| e.is_finite())
    }

    fn is_f32(&self) -> bool {
        *self.steps == Steps::Float(Format::F32)
    }

    fn assert_close(&self, written: &[f64]) -> bool {
        let (relative, absolute) = if self.is_f32() { (1.3e-6, 1e-5) } else { (1.6e-2, 1e-5) };
        self.pairs(written).any(|(y, e)| (y - e).abs() > absolute + relative * e.abs())
    }

    fn cosine(&self, written: &[f64]) -> bool {
        let sums = self
            .pairs(written)
            .fold([0.0; 3], |[ye, yy, ee], (y, e)| [ye + y * e, yy + y * y, ee + e * e]);
        sums[0] / (sums[1] * sums[2]).sqrt() < 0.999
    }

    fn flash_mla(&self, written: &[f64]) -> bool {
        let [absolute, relative, angle] =
            if self.is_f32() { FLASH_MLA_STATISTICS } else { FLASH_MLA_OUTPUTS };
        let [guard, nothing] = FLASH_MLA_GUARDS;
        let far = |(y, e): (f64, f64)| {
            (y - e).abs() >= absolute && (y - e).abs() / (e.abs() + guard) >= relative
        };
        let sums = self
            .pairs(written)
            .fold([0.0; 3], |[ye, yy, ee], (y, e)| [ye + y * e, yy + y * y, ee + e * e]);
        let difference =
            if sums[2] < nothing { 0.0 } else { 1.0 - 2.0 * sums[0] / (sums[1] + sums[2]) };
        self.pairs(written).any(far) || difference.abs() > angle
    }

    fn flash_attention(&self, written: &[f64]) -> bool {
        largest_error(written, self.exact) > self.flash_attention_allows
    }
}

#[cfg(test)]
mod tests {
    use dsv4_reference::precision::Precision;
    use dsv4_runtime::{DType, HostTensor};

    use super::*;
    use crate::case::Draw;
    use crate::judge::truth::Truth;
    use crate::operator::WORKING_RUNS;
    use crate::operator::{Arithmetic, KernelTensor, Side};

    const SHAPE: [usize; 2] = [32, 64];

    /// An oracle whose runs scatter by that share of each value.
    fn truth(spread: f64) -> Truth {
        let arithmetic = Arithmetic::of_specification(1);
        let run = |precision: Precision| {
            let (seed, spread) = match precision {
                Precision::Exact => (0, 0.0),
                Precision::Working { seed } => (seed, spread),
                Precision::Nearest { seed } => (1000 + seed, spread),
            };
            let (mut values, mut errors) = (Draw::new(7, "values"), Draw::new(seed, "errors"));
            let values = (0..SHAPE[0] * SHAPE[1])
                .map(|_| values.normal() * (1.0 + spread * errors.normal()));
            OracleTensor {
                name: "t",
                side: Side::Forward,
                shape: SHAPE.to_vec(),
                values: values.collect(),
            }
        };
        Truth::of_runs(arithmetic, |precision, _| Ok(vec![run(precision)])).expect("a truth")
    }

    fn power(truth: &Truth, dtype: DType) -> Power {
        let found =
            KernelTensor::new("t", HostTensor::from_f64(dtype, &SHAPE, &truth.exact[0].values));
        truth.power(0, &truth.held(0, &found).expect("bounds")).expect("a power")
    }

    #[test]
    fn the_smallest_bias_is_failed_and_half_of_it_is_not() {
        let truth = truth(1e-4);
        let found = KernelTensor::new(
            "t",
            HostTensor::from_f64(DType::F32, &SHAPE, &truth.exact[0].values),
        );
        let held = truth.held(0, &found).expect("bounds");
        let Seen::Bias(smallest) = power(&truth, DType::F32).bias else {
            panic!("no bias is seen")
        };
        let failed = |k: u32, sign: f64| {
            let factor = 1.0 + sign * 0.5f64.powi(k as i32);
            let biased = truth.working[WORKING_RUNS][0]
                .values
                .iter()
                .map(|value| value * factor)
                .collect::<Vec<_>>();
            fails(&truth.exact[0], &held, &held.steps.store(&biased))
        };
        assert!(failed(smallest, 1.0) && failed(smallest, -1.0));
        assert!(!(failed(smallest + 1, 1.0) && failed(smallest + 1, -1.0)));
        // The mean of that many elements is known far better than each of them.
        assert!(smallest > 14, "2^-{smallest}");
    }

    #[test]
    fn less_is_seen_where_runs_scatter_more_until_nothing_is() {
        let powers = [1e-6, 1e-4, 1e-2, 1.0].map(|spread| power(&truth(spread), DType::F32));
        assert!(
            powers
                .windows(2)
                .all(|pair| pair[0].bias > pair[1].bias && pair[0].element < pair[1].element)
        );
        assert_eq!(powers.map(|power| power.powerless), [false, false, false, true]);
    }

    #[test]
    fn the_rules_of_others_see_what_their_words_say() {
        let power = power(&truth(1e-6), DType::Bf16);
        // 1.6 % of an element, with half a bf16 step of its own; 2.01/128 of an element, or 8e-4.
        assert!(
            [Seen::Bias(6), Seen::Bias(7)].contains(&power.assert_close),
            "{:?}",
            power.assert_close
        );
        assert_eq!(power.cosine, Seen::Nothing, "a factor moves no angle");
        assert!(
            (Seen::Bias(6)..=Seen::Bias(9)).contains(&power.flash_mla),
            "{:?}",
            power.flash_mla
        );
        assert!(
            (Seen::Bias(7)..=Seen::Bias(9)).contains(&power.flash_attention),
            "{:?}",
            power.flash_attention
        );
        assert!(power.bias > power.flash_mla, "{:?}", power.bias);
        // Where runs differ by more than the rule allows, it fails a correct tensor.
        assert_eq!(super::tests::power(&truth(1e-1), DType::F32).assert_close, Seen::FalseAlarm);
    }

    #[test]
    fn zeros_have_no_power_to_speak_of() {
        let mut zeros = truth(1e-4);
        zeros.exact[0].values.fill(0.0);
        zeros.working.iter_mut().for_each(|run| run[0].values.fill(0.0));
        let found = KernelTensor::new(
            "t",
            HostTensor::from_f64(DType::F32, &SHAPE, &zeros.exact[0].values),
        );
        assert_eq!(zeros.power(0, &zeros.held(0, &found).expect("bounds")), None);
    }
}
