//! Where two results differ, in words.

use dsv4_runtime::HostTensor;

use crate::judge::agreement;
use crate::judge::budget::Budget;
use crate::judge::runner::Runner;
use crate::operator::OracleTensor;
use crate::record::figures;

/// Describes a difference in bits, with what the kernel's owner may declare if that is all.
pub(super) fn with_hint(
    problem: String,
    runner: &dyn Runner,
    last_bits: impl FnOnce() -> bool,
) -> String {
    match runner.may_round_freely() {
        Some(hint) if last_bits() => format!("{problem} ({hint})"),
        _ => problem,
    }
}

pub(super) fn first_difference(a: &HostTensor, b: &HostTensor) -> Option<String> {
    if a.shape != b.shape || a.dtype != b.dtype {
        return Some(format!("{a:?} against {b:?}"));
    }
    let size = a.dtype.size();
    let mut different = (0..a.elements())
        .filter(|i| a.bytes[i * size..(i + 1) * size] != b.bytes[i * size..(i + 1) * size]);
    let first = different.next()?;
    let count = 1 + different.count();
    let (x, y) = (a.to_f64()[first], b.to_f64()[first]);
    Some(format!(
        "{count} element(s) differ; first at {:?}: {} against {}",
        agreement::unflatten(first, &a.shape),
        figures::element(x),
        figures::element(y)
    ))
}

/// The first element whose value differs from the expected one; zeros are equal, and so are NaN.
pub(super) fn value_difference(found: &[f64], expected: &[f64], shape: &[usize]) -> Option<String> {
    if found.len() != expected.len() {
        return Some(format!("{} elements against {}", found.len(), expected.len()));
    }
    let differs = |(x, y): (&f64, &f64)| x != y && !(x.is_nan() && y.is_nan());
    let mut different = (0..found.len()).filter(|&i| differs((&found[i], &expected[i])));
    let first = different.next()?;
    let (count, at) = (1 + different.count(), agreement::unflatten(first, shape));
    let [found, expected] = [found[first], expected[first]].map(figures::element);
    Some(format!("{count} element(s) differ; first at {at:?}: {found} against {expected}"))
}

/// The element by which two runs differ most, if that is more than `budgets` times its budget. The
/// oracle's values only decide which elements are finite; agreement with them is another check.
pub(super) fn difference_beyond(
    a: &HostTensor,
    b: &HostTensor,
    exact: &OracleTensor,
    budget: &Budget,
    budgets: f64,
) -> Option<String> {
    let (a, b) = (a.to_f64(), b.to_f64());
    let worst = (0..a.len())
        .filter(|&i| exact.values[i].is_finite())
        .map(|i| (i, separation(a[i], b[i], budgets * budget.allowed[i])))
        .max_by(|x, y| x.1.total_cmp(&y.1))?;
    (worst.1 > 1.0).then(|| {
        let i = worst.0;
        let index = agreement::unflatten(i, &exact.shape);
        let [a, b] = [a[i], b[i]].map(figures::element);
        format!(
            "at {index:?}: {b} against {a}, {} of what may separate them",
            figures::measure(worst.1, 3)
        )
    })
}

/// The distance of two values over the allowed distance. A value that is not finite is infinitely
/// far from everything except the same value.
pub(super) fn separation(a: f64, b: f64, allowed: f64) -> f64 {
    if a == b || a.is_nan() && b.is_nan() {
        0.0
    } else if a.is_finite() && b.is_finite() {
        (a - b).abs() / allowed
    } else {
        f64::INFINITY
    }
}
