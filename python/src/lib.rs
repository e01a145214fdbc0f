//! `dsv4_parity._native`: the harness as a Python extension.

mod command;
mod host;

use pyo3::prelude::*;

/// The native part of `dsv4_parity`.
#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    host::work_if_started_for_that();
    host::declare(module)?;
    module.add_function(wrap_pyfunction!(command::main, module)?)?;
    Ok(())
}
