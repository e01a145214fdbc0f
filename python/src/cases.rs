//! The cases of an operator's sweep, for tests that are made from them.

use dsv4_parity::calls::observed::hopper;
use dsv4_parity::case::condition::Condition;
use dsv4_parity::case::{Case, CaseError};
use dsv4_parity::judge::checks::CheckOptions;
use dsv4_parity::operator::Profile;
use dsv4_parity::operator::given::Sizes;
use dsv4_parity::operators::registry;
use dsv4_parity::sweep::regressions::Regressions;
use dsv4_parity::sweep::{GivenCases, LeftOut, SweepOptions, plan};
use dsv4_runtime::{BackendKind, Environment};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors;

/// The cases of an operator that meet a condition: digest and line of each. Edge cases come first,
/// or `edge_cases` of them, then as many drawn ones as the profile has, or `drawn`.
#[pyfunction]
#[pyo3(signature = (operator, profile, condition, seed, edge_cases, drawn))]
pub fn cases(
    py: Python<'_>,
    operator: &str,
    profile: &str,
    condition: Option<&str>,
    seed: u64,
    edge_cases: Option<usize>,
    drawn: Option<usize>,
) -> PyResult<Vec<(String, String)>> {
    let operator = registry::find(operator).map_err(|error| errors::of_case(&error))?;
    let all = [Profile::Smoke, Profile::Quick, Profile::Ci, Profile::Full];
    let Some(profile) = all.into_iter().find(|known| known.name() == profile) else {
        let names = all.map(Profile::name).join(", ");
        return Err(PyValueError::new_err(format!("profile {profile:?} must be one of {names}")));
    };
    let condition = condition
        .map(Condition::parse)
        .transpose()
        .map_err(|reason| PyValueError::new_err(format!("where: {reason}")))?;
    let edge_cases =
        edge_cases.map_or(GivenCases::All, |count| GivenCases::Lots { most: count, seed });
    let options = SweepOptions {
        profile,
        cases: drawn,
        edge_cases,
        remembered: GivenCases::All,
        seed,
        checks: CheckOptions::of_kernels(0),
        regressions: Regressions::new(""),
        remember: false,
        condition,
        left_out: LeftOut::default(),
        time_budget: None,
        deadline: None,
        ranks: Vec::new(),
    };
    let environment = Environment { backend: BackendKind::External, ..hopper() };
    let named = |case: Case| (case.digest(), case.line());
    let planned = py.detach(|| {
        let (planned, _) = plan(operator, Vec::new(), &options, &environment)?;
        Ok(planned.into_iter().map(|planned| named(planned.case)).collect())
    });
    planned.map_err(|error| errors::of_case(&error))
}

/// The types and sizes of tensors by name.
type Described = Vec<(String, String, Vec<usize>)>;

/// The case of a line with tensors of these sizes, and the types and sizes of these tensors in it.
#[pyfunction]
pub fn case_of_sizes(line: &str, sizes: Sizes) -> PyResult<(String, Described)> {
    let of = || -> Result<(String, Described), CaseError> {
        let case = Case::parse(line)?;
        let operator = registry::find(&case.operator)?;
        let case = operator.of_sizes(&case, &sizes)?;
        let named = operator.forms(&case)?.into_iter().filter(|(name, _)| sizes.contains_key(name));
        let tensors = named.map(|(name, (dtype, shape))| (name, dtype.to_string(), shape));
        Ok((case.line(), tensors.collect()))
    };
    of().map_err(|error| errors::of_case(&error))
}

/// The case of a line, checked, and its digest.
#[pyfunction]
pub fn case_of(line: &str) -> PyResult<(String, String)> {
    let case = Case::parse(line).map_err(|error| errors::of_case(&error))?;
    let operator = registry::find(&case.operator).map_err(|error| errors::of_case(&error))?;
    operator.check(&case).map_err(|error| errors::of_case(&error))?;
    Ok((case.digest(), case.line()))
}
