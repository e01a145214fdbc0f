//! The interpreter that loaded this library, as what workers and supervisors are started from.

use std::path::PathBuf;

use dsv4_runtime::become_worker_of_host;
use dsv4_runtime::process::{Host, set_host};
use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;

/// What the interpreter runs when it is started again: the library is loaded by its path, without
/// the package, and works if it was started for that. Otherwise it is `parity`.
const PROGRAM: &str = "\
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
path = sys.argv[1]
spec = spec_from_file_location('_native', path, loader=ExtensionFileLoader('_native', path))
native = module_from_spec(spec)
spec.loader.exec_module(native)
sys.exit(native.main(['parity', *sys.argv[2:]]))";

/// Works, and never returns, if a device or a command of this library started the interpreter.
pub fn work_if_started_for_that() {
    become_worker_of_host();
}

/// Declares the interpreter as the host. Where it has no executable, as in a program that embeds
/// it, workers cannot be started; then only their start is an error.
pub fn declare(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let program: Option<PathBuf> = py.import("sys")?.getattr("executable")?.extract()?;
    let library: PathBuf = module.filename()?.extract()?;
    let arguments = ["-I", "-S", "-c", PROGRAM].map(Into::into).into_iter();
    let host = Host {
        program: program.unwrap_or_default(),
        arguments: arguments.chain([library.clone().into_os_string()]).collect(),
        library,
    };
    set_host(host).map_err(|_| PyImportError::new_err("this library is loaded a second time"))
}
