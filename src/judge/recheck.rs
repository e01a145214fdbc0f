//! What a timed call wrote, compared with the oracle after the clock has stopped.

use anyhow::{Result, anyhow};

use super::checks;
use super::truth::Truth;
use crate::operator::benchmarks::Buffers;

/// Compares sampled entries of what the last call on `set` wrote with the oracle, and returns how
/// many elements it compared.
///
/// # Errors
/// What disagrees or could not be compared, and a sample in which nothing was compared.
pub fn recheck(buffers: &dyn Buffers, set: usize) -> Result<u64> {
    let sampling = buffers.sampled(set)?;
    let truth = Truth::of_runs(sampling.arithmetic, |precision, products| {
        sampling.oracle(precision, products)
    })?;
    let (outcome, axis) = (checks::hold(&truth, &sampling.run), sampling.axis);
    if let Some(failure) = outcome.failures().next() {
        return Err(anyhow!(
            "{} {}, sampled along {axis}: {}",
            failure.check,
            failure.tensor,
            failure.message
        ));
    }
    let compared = outcome.checks.iter().filter(|check| check.check.is_agreement());
    match compared.map(|check| check.compared).sum() {
        0 => Err(anyhow!("nothing was compared: no tensor that is written has the axis {axis}")),
        elements => Ok(elements),
    }
}
