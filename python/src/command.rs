//! `parity`, as the Rust binary.

use std::ffi::OsString;

use dsv4_parity::{command, prepare_process};
use pyo3::prelude::*;

/// Runs `parity` with the words of a command line, the program's name first, and returns its exit
/// code. Call it once, in a process that does nothing else: an interrupt, or an error of usage,
/// ends the process.
#[pyfunction]
pub fn main(py: Python<'_>, words: Vec<OsString>) -> PyResult<u8> {
    let signal = py.import("signal")?;
    // Python would only note an interrupt while Rust runs.
    signal.call_method1("signal", (signal.getattr("SIGINT")?, signal.getattr("SIG_DFL")?))?;
    Ok(py.detach(|| {
        prepare_process();
        command::main(words).code()
    }))
}
