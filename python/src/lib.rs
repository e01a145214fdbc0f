//! `dsv4_parity._native`: the harness as a Python extension.

mod cases;
mod command;
mod devices;
mod dlpack;
mod emulated;
mod errors;
mod host;
mod judged;
mod plan;
mod signatures;

use pyo3::prelude::*;

/// The native part of `dsv4_parity`.
#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    host::work_if_started_for_that();
    host::declare(module)?;
    module.add("DeviceError", module.py().get_type::<errors::DeviceError>())?;
    module.add_class::<plan::Plan>()?;
    module.add_class::<plan::Bound>()?;
    module.add_function(wrap_pyfunction!(command::main, module)?)?;
    module.add_function(wrap_pyfunction!(signatures::operators, module)?)?;
    module.add_function(wrap_pyfunction!(signatures::describe, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan, module)?)?;
    module.add_function(wrap_pyfunction!(dlpack::from_dlpack, module)?)?;
    module.add_function(wrap_pyfunction!(cases::cases, module)?)?;
    module.add_function(wrap_pyfunction!(cases::case_of, module)?)?;
    module.add_function(wrap_pyfunction!(cases::case_of_sizes, module)?)?;
    module.add_function(wrap_pyfunction!(judged::judge, module)?)?;
    module.add_function(wrap_pyfunction!(judged::oracle, module)?)?;
    module.add_function(wrap_pyfunction!(judged::tensors_of, module)?)?;
    module.add_function(wrap_pyfunction!(judged::tolerances, module)?)?;
    Ok(())
}
