//! The oracle's results for one case, and the bounds that follow from them.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, OnceLock};

use dsv4_reference::Products;
use dsv4_reference::precision::{CHOICES, Precision};
use dsv4_runtime::DType;
use rayon::prelude::*;
use thiserror::Error;

use crate::case::CaseError;
use crate::judge::agreement;
use crate::judge::budget::Budget;
use crate::judge::grid::Steps;
use crate::judge::power;
use crate::judge::yardstick::{Yardstick, working_precisions};
use crate::operator::WORKING_RUNS;
use crate::operator::{
    Arithmetic, Comparison, Grid, KernelRun, KernelTensor, OracleTensor, Pooling, PreparedCase,
    RoundingPoints,
};
use crate::record::{Power, figures};

/// What sums of 2^30 terms by fp32 atomics in global memory may lose: they take each value below
/// 2^-126 for zero (inference 0).
const LOST_BY_ATOMICS: f64 = f64::from_bits((1023 - 96) << 52);

/// Oracle runs where only elements are compared; Student's quantile accounts for the small count.
const ELEMENT_RUNS: usize = 8;

/// The oracle's runs of a case for kernels of one arithmetic, and the bounds that follow from them.
pub struct Truth {
    /// `Exact`.
    pub exact: Vec<OracleTensor>,
    /// The runs of [`working_precisions`].
    pub working: Vec<Vec<OracleTensor>>,
    arithmetic: Arithmetic,
    products: Products,
    /// Bounds that were already derived: many kernels may share one truth.
    held: Mutex<Vec<(Stored, Arc<Held>)>>,
}

/// How a kernel stores an exact tensor.
#[derive(Clone, Copy, PartialEq)]
struct Stored {
    index: usize,
    dtype: DType,
    grid: Option<Grid>,
    pooling: Pooling,
    comparison: Comparison,
    deterministic: bool,
}

/// Why a tensor has no bounds.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Unheld {
    /// The oracle's runs leave the range of its arithmetic: nothing is known of a kernel there, and
    /// the tensor is not judged.
    #[error("{0}")]
    NoBound(String),
    /// The kernel's tensor or its declaration is wrong.
    #[error("{0}")]
    Wrong(String),
}

/// The bounds on a tensor of a kernel.
pub struct Held {
    /// The grid of its values.
    pub steps: Steps,
    /// The allowed error of each element.
    pub budget: Budget,
    /// Bounds on it as a whole, where it is compared within rounding.
    pub yardstick: Option<Yardstick>,
    power: OnceLock<Option<Power>>,
    powerless: OnceLock<bool>,
}

impl Truth {
    /// Runs the oracle, in all precisions at once: each has its own seed, so the order does not
    /// matter.
    ///
    /// # Errors
    /// What the oracle rejects.
    pub fn of(prepared: &dyn PreparedCase, arithmetic: Arithmetic) -> Result<Self, CaseError> {
        Self::of_runs(arithmetic, |precision, products| {
            prepared.oracle_sharing(precision, products)
        })
    }

    /// As [`Self::of`], with so few runs that only elements can be judged by them.
    ///
    /// # Errors
    /// What the oracle rejects.
    pub fn of_elements(
        prepared: &dyn PreparedCase,
        arithmetic: Arithmetic,
    ) -> Result<Self, CaseError> {
        let precisions = working_precisions().take(ELEMENT_RUNS).collect();
        Self::of_precisions(arithmetic, precisions, |precision, products| {
            prepared.oracle_sharing(precision, products)
        })
    }

    /// As [`Self::of`], for an oracle that does not cover a whole case, such as that of some rows,
    /// or of only the forward.
    ///
    /// # Errors
    /// What the oracle rejects.
    pub fn of_runs<O>(arithmetic: Arithmetic, oracle: O) -> Result<Self, CaseError>
    where
        O: Fn(Precision, &Products) -> Result<Vec<OracleTensor>, CaseError> + Sync,
    {
        Self::of_precisions(arithmetic, working_precisions().collect(), oracle)
    }

    /// The gradients that follow from what these kernels saved ([`PreparedCase::oracle_of_saved`]);
    /// `None` where no gradient does.
    ///
    /// # Errors
    /// What the oracle rejects.
    pub fn of_saved(
        prepared: &dyn PreparedCase,
        written: &KernelRun,
        arithmetic: Arithmetic,
    ) -> Result<Option<Self>, CaseError> {
        if prepared.oracle_of_saved(written, Precision::Exact, &Products::default())?.is_empty() {
            return Ok(None);
        }
        let oracle =
            |precision, products: &Products| prepared.oracle_of_saved(written, precision, products);
        Self::of_runs(arithmetic, oracle).map(Some)
    }

    fn of_precisions<O>(
        arithmetic: Arithmetic,
        precisions: Vec<Precision>,
        oracle: O,
    ) -> Result<Self, CaseError>
    where
        O: Fn(Precision, &Products) -> Result<Vec<OracleTensor>, CaseError> + Sync,
    {
        let unknown = arithmetic.points == RoundingPoints::Undeclared;
        let products = Products::of_kernel(arithmetic.lanes, unknown, arithmetic.conventions);
        let run = |precision| oracle(precision, &products);
        let exact = run(Precision::Exact)?;
        let working =
            precisions.par_iter().map(|&precision| run(precision)).collect::<Result<_, _>>()?;
        Ok(Self { exact, working, arithmetic, products, held: Mutex::default() })
    }

    /// One more run of the oracle of this truth, in the same arithmetic.
    ///
    /// # Errors
    /// What the oracle rejects.
    pub fn fresh(
        &self,
        prepared: &dyn PreparedCase,
        precision: Precision,
    ) -> Result<Vec<OracleTensor>, CaseError> {
        prepared.oracle_sharing(precision, &self.products)
    }

    /// The budget of exact tensor number `index`, stored as `dtype`.
    pub fn budget(&self, index: usize, dtype: DType) -> Budget {
        Budget::derive(&self.exact[index], &self.runs(index), dtype)
    }

    /// The bounds on exact tensor number `index` as the kernel's tensor declares itself: its grid
    /// and what pools. No error is allowed where it is not compared within rounding.
    ///
    /// # Errors
    /// Scales that the oracle does not have, or that do not fit; an element without a bound, since
    /// the oracle's runs leave the range of its arithmetic.
    pub fn held(&self, index: usize, found: &KernelTensor) -> Result<Arc<Held>, Unheld> {
        let KernelTensor { grid, pooling, comparison, deterministic, .. } = *found;
        let stored =
            Stored { index, dtype: found.tensor.dtype, grid, pooling, comparison, deterministic };
        if let Some(held) = self.known(stored) {
            return Ok(held);
        }
        // Not under the lock: a thread that waits for others may do work that needs it.
        let held = Arc::new(self.derive(index, found)?);
        self.held.lock().unwrap_or_else(|e| e.into_inner()).push((stored, held.clone()));
        Ok(held)
    }

    fn known(&self, stored: Stored) -> Option<Arc<Held>> {
        let known = self.held.lock().unwrap_or_else(|e| e.into_inner());
        known.iter().find(|(of, _)| *of == stored).map(|(_, held)| held.clone())
    }

    fn derive(&self, index: usize, found: &KernelTensor) -> Result<Held, Unheld> {
        let exact = &self.exact[index];
        let runs = self.runs_of(index, found);
        let runs: Vec<_> = runs.iter().map(|run| &**run).collect();
        let (steps, budget) = self.allowed(index, found, &runs)?;
        let yardstick = (found.comparison == Comparison::Rounded)
            .then(|| Yardstick::derive(exact, &runs, &steps, &budget, self.arithmetic.points));
        Ok(Held { steps, budget, yardstick, power: OnceLock::new(), powerless: OnceLock::new() })
    }

    /// The bounds on each element of exact tensor number `index`: its grid and its allowed error.
    ///
    /// # Errors
    /// Scales that the oracle does not have, or that do not fit; an element without a bound, since
    /// the oracle's runs leave the range of its arithmetic.
    pub fn of_each_element(
        &self,
        index: usize,
        found: &KernelTensor,
    ) -> Result<(Steps, Budget), Unheld> {
        let runs = self.runs_of(index, found);
        self.allowed(index, found, &runs.iter().map(|run| &**run).collect::<Vec<_>>())
    }

    fn allowed(
        &self,
        index: usize,
        found: &KernelTensor,
        runs: &[&OracleTensor],
    ) -> Result<(Steps, Budget), Unheld> {
        let exact = &self.exact[index];
        let steps = Steps::of(found.grid(), &exact.shape, &self.exact).map_err(Unheld::Wrong)?;
        let budget = match found.comparison {
            Comparison::Rounded => Budget::derive_pooled(exact, runs, &steps, found.pooling),
            _ => Budget::nothing(exact),
        };
        // No error exceeds NaN or an infinity: whatever the kernel wrote would pass.
        let is_rounded = found.comparison == Comparison::Rounded;
        if let Some(unbounded) = budget.unbounded(exact).filter(|_| is_rounded) {
            let at = agreement::unflatten(unbounded, &exact.shape);
            let value = exact.values[unbounded];
            return Err(Unheld::NoBound(format!(
                "no bound follows from the oracle's runs: at {at:?} it is {}, and some run is no finite fp32 number",
                figures::element(value)
            )));
        }
        Ok((steps, budget))
    }

    /// What the verdict over exact tensor number `index` can see. `None` where it is not compared
    /// within rounding, or holds only zeros.
    pub fn power(&self, index: usize, held: &Held) -> Option<Power> {
        let of_run = || {
            let run = self.working.get(WORKING_RUNS)?;
            power::of(&self.exact[index], held, &run[index].values, self.is_powerless(index, held))
        };
        initialized(&held.power, of_run).clone()
    }

    /// Whether the verdict over exact tensor number `index` would pass an error of 10 %.
    pub fn is_powerless(&self, index: usize, held: &Held) -> bool {
        let of_run = || {
            let run = self.working.get(WORKING_RUNS);
            run.is_some_and(|run| power::is_missing(&self.exact[index], held, &run[index].values))
        };
        *initialized(&held.powerless, of_run)
    }

    /// The runs of a tensor as the kernel sums it. Atomics lose subnormal values
    /// ([`LOST_BY_ATOMICS`]), and so does every second run.
    fn runs_of(&self, index: usize, found: &KernelTensor) -> Vec<Cow<'_, OracleTensor>> {
        let may_be_lost = |value: &f64| *value != 0.0 && value.abs() < LOST_BY_ATOMICS;
        let runs = self.runs(index).into_iter().map(Cow::Borrowed);
        if found.deterministic || !self.exact[index].values.iter().any(may_be_lost) {
            return runs.collect();
        }
        let lost = |run: Cow<'_, OracleTensor>| {
            let mut run = run.into_owned();
            run.values.iter_mut().filter(|value| may_be_lost(value)).for_each(|value| *value = 0.0);
            Cow::Owned(run)
        };
        runs.enumerate()
            .map(|(number, run)| if number % 2 == 0 { lost(run) } else { run })
            .collect()
    }

    fn runs(&self, index: usize) -> Vec<&OracleTensor> {
        self.working.iter().map(|run| &run[index]).collect()
    }

    /// The scores called `name`, and how far each may be off: as the kernel returns them, or in
    /// fp32, the type in which kernels hold them.
    ///
    /// # Errors
    /// Scores that the oracle does not have.
    pub fn scores(&self, name: &str, run: &KernelRun) -> Result<(&OracleTensor, Vec<f64>), String> {
        let index = self.exact.iter().position(|exact| exact.name == name);
        let index = index.ok_or_else(|| format!("the oracle has no scores `{name}`"))?;
        let allowed = match run.tensors.iter().find(|tensor| tensor.name == name) {
            Some(found) => {
                let held = self.held(index, found).map_err(|unheld| unheld.to_string())?;
                held.budget.allowed.clone()
            }
            None => self.budget(index, DType::F32).allowed,
        };
        Ok((&self.exact[index], allowed))
    }

    /// Bytes of the oracle's tensors, and of the copies of them that bounds keep.
    pub fn size(&self) -> usize {
        let elements: usize = self.exact.iter().map(|tensor| tensor.values.len()).sum();
        // For each tensor in use: allowed errors, variances, weights, and a run of each choice.
        elements * (1 + self.working.len() + 3 + CHOICES) * size_of::<f64>()
    }
}

/// The value of a cell. It is computed outside: a thread that waits for others may do work that
/// needs the same cell.
fn initialized<T>(cell: &OnceLock<T>, value: impl FnOnce() -> T) -> &T {
    if let Some(known) = cell.get() {
        return known;
    }
    let value = value();
    cell.get_or_init(|| value)
}

#[cfg(test)]
mod tests {
    use dsv4_runtime::HostTensor;

    use super::*;
    use crate::operator::Side;

    #[test]
    fn a_tensor_whose_working_runs_overflow_has_no_bound() {
        // Elements of unlike scale, so that each is judged by its own runs.
        let run = |precision: Precision| {
            let values = match precision {
                Precision::Working { .. } => vec![1.001, f64::NAN, 4.0 + 1e-6],
                _ => vec![1.0, 2.0, 4.0],
            };
            OracleTensor { name: "t", side: Side::Forward, shape: vec![1, 3], values }
        };
        let arithmetic = Arithmetic::of_specification(1);
        let truth =
            Truth::of_runs(arithmetic, |precision, _| Ok(vec![run(precision)])).expect("a truth");
        let found =
            KernelTensor::new("t", HostTensor::from_f64(DType::F32, &[1, 3], &[1.0, 2.0, 4.0]));
        let unheld = truth.held(0, &found).err().expect("no bound");
        assert!(matches!(unheld, Unheld::NoBound(_)));
        let message = unheld.to_string();
        assert!(
            message.contains("no bound follows") && message.contains("[0, 1] it is 2,"),
            "{message}"
        );
        // A tensor that must be equal needs no bound.
        let exact = KernelTensor { comparison: Comparison::Exact, ..found };
        assert!(truth.held(0, &exact).is_ok());
    }
}
