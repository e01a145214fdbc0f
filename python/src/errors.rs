//! Errors as Python's exceptions.

use dsv4_parity::case::CaseError;
use dsv4_runtime::RuntimeError;
use pyo3::PyErr;
use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyValueError};

create_exception!(
    dsv4_parity,
    DeviceError,
    PyRuntimeError,
    "A device that is missing or failed, a kernel that does not compile, or one that did something \
     wrong."
);

/// A rejected argument is a `ValueError`; everything else is the device's.
pub fn of_runtime(error: &RuntimeError) -> PyErr {
    match error {
        RuntimeError::Argument { .. } => PyValueError::new_err(error.to_string()),
        _ => DeviceError::new_err(error.to_string()),
    }
}

/// A case that an operator cannot take is a `ValueError`.
pub fn of_case(error: &CaseError) -> PyErr {
    match error {
        CaseError::Untestable { .. } => DeviceError::new_err(error.to_string()),
        _ => PyValueError::new_err(error.to_string()),
    }
}
