//! The signatures of operators, each made once.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use dsv4_parity::operator::AnyOperator;
use dsv4_parity::operators::registry;
use pyo3::prelude::*;

use crate::errors;
use dsv4_parity::calls::signature::Signature;

static KNOWN: Mutex<BTreeMap<&str, Arc<Signature>>> = Mutex::new(BTreeMap::new());

/// The signature of an operator.
pub fn signature(operator: &'static AnyOperator) -> Arc<Signature> {
    let known = || KNOWN.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(signature) = known().get(operator.name()) {
        return signature.clone();
    }
    // Two threads may make it at the same time; both are equal.
    let made = Arc::new(Signature::of(operator));
    known().entry(operator.name()).or_insert(made).clone()
}

/// Names of all operators that are functions of tensors on one device.
#[pyfunction]
pub fn operators() -> Vec<&'static str> {
    registry::functions().map(|operator| operator.name()).collect()
}

/// The arguments and results of an operator, as JSON.
#[pyfunction]
pub fn describe(py: Python<'_>, operator: &str) -> PyResult<String> {
    let operator = registry::find(operator).map_err(|error| errors::of_case(&error))?;
    Ok(py.detach(|| signature(operator).describe().to_string()))
}
