//! Kernels that are Python callables, judged in this process by the checks of an operator's cases.

use std::cell::RefCell;
use std::collections::BTreeMap;

use dsv4_parity::calls::observed::hopper;
use dsv4_parity::case::Case;
use dsv4_parity::external::{recorded, zeros};
use dsv4_parity::judge::checks::CheckOptions;
use dsv4_parity::judge::runner::{RunError, Runner};
use dsv4_parity::judge::truth::Truth;
use dsv4_parity::operator::given::Given;
use dsv4_parity::operator::{Arithmetic, KernelRun, OracleTensor, PreparedCase, Side};
use dsv4_parity::operators::registry;
use dsv4_parity::record::{CaseRecord, Check, Verdict};
use dsv4_parity::report::diagnosis::{self, terminal};
use dsv4_parity::sweep;
use dsv4_reference::{Conventions, Precision};
use dsv4_runtime::arena::{Violation, ViolationKind};
use dsv4_runtime::{BackendKind, Contract, Device, Environment, HostTensor};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde_json::json;

use crate::errors;

/// Findings of a failing case that the diagnosis shows.
const FINDINGS: usize = 3;

/// A Python callable as a kernel.
struct Callable {
    /// It takes tensors by name, the outputs' descriptions and the case's line, and returns
    /// what it wrote and which inputs it changed.
    call: Py<PyAny>,
    replay: String,
    recorder: Device,
    case: RefCell<Option<Case>>,
    /// The names of the tensors that it returned.
    returned: RefCell<Option<Vec<String>>>,
    /// What it raised.
    raised: RefCell<Option<PyErr>>,
}

/// A device that records what a case reads.
fn recorder() -> Device {
    let environment = Environment {
        backend: BackendKind::External,
        device: "a Python callable".into(),
        ..hopper()
    };
    Device::recording(environment, dsv4_kernels::sources())
}

/// A tensor by name: its type, its sizes, and its bytes or its side.
type Described<'py, T> = (String, String, Vec<usize>, T);

/// What kernels of a case read.
type Inputs<'py> = Vec<Described<'py, Bound<'py, PyBytes>>>;

/// What a callable wrote, by name, and the inputs that it changed.
type Returned = (BTreeMap<String, Vec<u8>>, Vec<String>);

impl Callable {
    fn new(call: Py<PyAny>, replay: String) -> Self {
        let (case, returned, raised) = Default::default();
        let recorder = recorder();
        Self { call, replay, recorder, case, returned, raised }
    }

    /// Calls it, and returns the outputs' bytes by name and the inputs that it changed.
    fn called(
        &self,
        line: &str,
        inputs: &[(String, HostTensor)],
        expected: &[(&'static str, HostTensor, bool)],
    ) -> PyResult<Returned> {
        Python::attach(|py| {
            let given: Inputs<'_> =
                inputs.iter().map(|(name, tensor)| described(py, name, tensor)).collect();
            let wanted: Vec<Described<'_, &str>> = expected
                .iter()
                .map(|(name, tensor, gradient)| {
                    let side = if *gradient { "gradient" } else { "forward" };
                    ((*name).to_owned(), tensor.dtype.to_string(), tensor.shape.clone(), side)
                })
                .collect();
            self.call.call1(py, (line, given, wanted))?.extract(py)
        })
    }
}

fn described<'py>(
    py: Python<'py>,
    name: &str,
    tensor: &HostTensor,
) -> Described<'py, Bound<'py, PyBytes>> {
    let bytes = PyBytes::new(py, &tensor.bytes);
    (name.to_owned(), tensor.dtype.to_string(), tensor.shape.clone(), bytes)
}

impl Runner for Callable {
    fn begin(&self, case: &Case) {
        self.case.replace(Some(case.clone()));
    }

    fn run(
        &self,
        prepared: &dyn PreparedCase,
        _exact: &[OracleTensor],
        _contract: Contract,
    ) -> Result<KernelRun, RunError> {
        if self.raised.borrow().is_some() {
            return Err(RunError::error("the callable raised an exception"));
        }
        let inputs = recorded(prepared, &self.recorder)?.inputs;
        let mut outputs = zeros(prepared);
        let expected: Vec<_> = outputs
            .iter()
            .map(|output| (output.name, output.tensor.clone(), output.side == Side::Gradient))
            .collect();
        let case = prepared.case().or_else(|| self.case.borrow().clone());
        let case = case.ok_or_else(|| RunError::error("it is not known which case this is"))?;
        let called = self.called(&case.line(), &inputs, &expected);
        let (mut written, changed) = called.map_err(|error| {
            let message = error.to_string();
            self.raised.replace(Some(error));
            RunError::error(message)
        })?;
        outputs.retain_mut(|output| match written.remove(output.name) {
            Some(bytes) => {
                output.tensor.bytes = bytes;
                true
            }
            None => false,
        });
        let stored = outputs.into_iter().map(|output| (output.name, output.tensor));
        let tensors = prepared.compared(stored.collect(), Conventions::default());
        self.returned.replace(Some(tensors.iter().map(|tensor| tensor.name.to_owned()).collect()));
        let violations = changed.into_iter().map(|buffer| Violation {
            buffer,
            kind: ViolationKind::Input,
            bytes: 1,
            first_offset: 0,
        });
        Ok(KernelRun { tensors, violations: violations.collect(), paths: vec!["external".into()] })
    }

    fn environment(&self) -> &Environment {
        self.recorder.environment()
    }

    fn arithmetic(&self, _prepared: &dyn PreparedCase) -> Arithmetic {
        Arithmetic::default()
    }

    fn kernels(&self) -> (String, String) {
        ("a Python callable".to_owned(), String::new())
    }

    fn replay_command(&self, _case: &Case, _schedules: u32) -> String {
        self.replay.clone()
    }

    fn blind_to(&self, check: &Check) -> Option<&'static str> {
        match check {
            Check::Guards | Check::FullyWritten | Check::PoisonIndependent => {
                Some("the callable makes its own outputs")
            }
            Check::ScheduleIndependent => Some("the callable schedules by itself"),
            Check::Sequence => Some("the callable has buffers of its own, new ones for each call"),
            Check::BatchInvariance => Some("check_batch_invariance makes it"),
            _ => None,
        }
    }

    fn leaves_out(&self, exact: &OracleTensor) -> Option<&'static str> {
        let returned = self.returned.borrow();
        let is_absent = returned
            .as_ref()
            .is_some_and(|names| !names.is_empty() && names.iter().all(|name| name != exact.name));
        is_absent.then_some("the callable does not return it")
    }

    fn may_round_freely(&self) -> Option<&'static str> {
        Some("all within the budget: the callable's sums may run in another order")
    }

    fn cannot_vary(&self, variant: &dyn PreparedCase) -> Option<&'static str> {
        let is_unknown = variant.case().is_none();
        is_unknown.then_some("the operator does not say with which scalars the variant goes")
    }
}

/// Judges a callable on a case. Returns the record of the case as JSON, and the diagnosis where it
/// failed. What the callable raises is raised here.
#[pyfunction]
pub fn judge(
    py: Python<'_>,
    case: &str,
    call: Py<PyAny>,
    replay: String,
    tensors: Given,
) -> PyResult<(String, String)> {
    let case = Case::parse(case).map_err(|error| errors::of_case(&error))?;
    let prepared = prepared(&case, tensors)?;
    let prepared = &*prepared;
    let (record, raised) = py.detach(move || {
        let callable = Callable::new(call, replay);
        let options = CheckOptions { triangulate: false, ..CheckOptions::everything(0) };
        let record = sweep::run_prepared(&case, prepared, &callable, options);
        (record, callable.raised.into_inner())
    });
    if let Some(error) = raised {
        return Err(error);
    }
    let text = if passed(&record) { String::new() } else { py.detach(|| diagnosis(&record)) };
    let record = serde_json::to_string(&record);
    Ok((record.map_err(|error| PyValueError::new_err(error.to_string()))?, text))
}

/// The case with tensors of the caller's.
fn prepared(case: &Case, tensors: Given) -> PyResult<Box<dyn PreparedCase>> {
    let operator = registry::find(&case.operator);
    let prepared = operator.and_then(|operator| operator.prepare_given(case, tensors));
    prepared.map_err(|error| errors::of_case(&error))
}

fn passed(record: &CaseRecord) -> bool {
    record.verdict() == Verdict::Pass && record.checks.iter().any(|check| check.compared > 0)
}

/// What failed, which known number explains it, where, and the command that runs it again.
fn diagnosis(record: &CaseRecord) -> String {
    let described = registry::find(&record.operator).map(|operator| operator.describe()).ok();
    let mut text = String::new();
    if let Some(diagnosis) = diagnosis::diagnose(described.as_ref(), &[record]) {
        text += &terminal::headed(&[diagnosis]);
    }
    text += &terminal::findings_text(described.as_ref(), record, FINDINGS);
    text + &format!("  replay: {}\n", record.replay)
}

/// The tensors that kernels of a case read, and those that they write: name, type, sizes and bytes,
/// and name, type, sizes and side.
#[pyfunction]
pub fn tensors_of<'py>(
    py: Python<'py>,
    case: &str,
    tensors: Given,
) -> PyResult<(Inputs<'py>, Vec<Described<'py, String>>)> {
    let case = Case::parse(case).map_err(|error| errors::of_case(&error))?;
    let prepared = prepared(&case, tensors)?;
    let recorded = recorded(&*prepared, &recorder()).map_err(|error| errors::of_runtime(&error))?;
    let inputs = recorded.inputs.iter().map(|(name, tensor)| described(py, name, tensor)).collect();
    let outputs = zeros(&*prepared).into_iter().map(|output| {
        let (dtype, shape) = (output.tensor.dtype.to_string(), output.tensor.shape);
        let side = if output.side == Side::Gradient { "gradient" } else { "forward" };
        (output.name.to_owned(), dtype, shape, side.to_owned())
    });
    Ok((inputs, outputs.collect()))
}

/// The exact outputs of a case's forward, by the oracle: name, type, sizes and f64 values.
///
/// What the oracle does not make, such as codes of narrow formats, is not among them.
#[pyfunction]
pub fn oracle<'py>(py: Python<'py>, case: &str, tensors: Given) -> PyResult<Inputs<'py>> {
    let case = Case::parse(case).map_err(|error| errors::of_case(&error))?;
    let (exact, written) = py.detach(|| {
        let prepared = prepared(&case, tensors)?;
        // An operator learns from its launches what it is to write.
        recorded(&*prepared, &recorder()).map_err(|error| errors::of_runtime(&error))?;
        let exact = prepared.oracle(Precision::Exact).map_err(|error| errors::of_case(&error))?;
        Ok::<_, PyErr>((exact, zeros(&*prepared)))
    })?;
    let outputs = written.iter().filter(|output| output.side == Side::Forward);
    let exact = outputs.filter_map(|output| {
        let exact = exact.iter().find(|exact| exact.name == output.name)?;
        let values: Vec<u8> = exact.values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        let dtype = output.tensor.dtype.to_string();
        Some((output.name.to_owned(), dtype, exact.shape.clone(), PyBytes::new(py, &values)))
    });
    Ok(exact.collect())
}

/// The derived budgets of a case as tolerances, as JSON: for each tensor `atol` and `rtol`, which
/// together allow every element at least its budget, and the smallest uniform relative error of the
/// tensor that such a comparison sees.
#[pyfunction]
pub fn tolerances(py: Python<'_>, case: &str, tensors: Given) -> PyResult<String> {
    let case = Case::parse(case).map_err(|error| errors::of_case(&error))?;
    py.detach(|| {
        let prepared = prepared(&case, tensors)?;
        let recorded = recorded(&*prepared, &recorder());
        let outputs = recorded.map_err(|error| errors::of_runtime(&error))?.outputs;
        let truth = Truth::of(&*prepared, Arithmetic::default());
        let truth = truth.map_err(|error| errors::of_case(&error))?;
        let mut found = BTreeMap::new();
        for (index, exact) in truth.exact.iter().enumerate() {
            let output = outputs.iter().find(|output| output.name == exact.name);
            let Some(output) = output else { continue };
            let held = truth.held(index, output);
            let held = held.map_err(|unheld| PyValueError::new_err(unheld.to_string()))?;
            found.insert(exact.name, tolerance(&exact.values, &held.budget.allowed));
        }
        Ok(json!(found).to_string())
    })
}

fn tolerance(values: &[f64], allowed: &[f64]) -> serde_json::Value {
    let finite = || values.iter().zip(allowed).filter(|(v, a)| v.is_finite() && a.is_finite());
    let mut relative: Vec<f64> =
        finite().filter(|(v, _)| **v != 0.0).map(|(v, a)| a / v.abs()).collect();
    relative.sort_by(f64::total_cmp);
    let rtol = relative.get(relative.len() / 2).copied().unwrap_or(0.0);
    let atol = finite().map(|(v, a)| (a - rtol * v.abs()).max(0.0)).fold(0.0, f64::max);
    let largest = finite().map(|(v, _)| v.abs()).fold(0.0, f64::max);
    let seen = if largest > 0.0 { Some(rtol + atol / largest) } else { None };
    json!({ "atol": atol, "rtol": rtol, "sees": seen })
}
