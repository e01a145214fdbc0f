//! `parity`: the command line. Exit codes: 0 all agreed, 1 disagreement, 2 bad usage or input, 3
//! the demanded backend is missing, 141 standard output is closed. Only `parity replay` has 125:
//! the kernels do not compile or cannot run.

use std::process::ExitCode;

use dsv4_parity::command;
use dsv4_runtime::process::keep_freed_memory;

fn main() -> ExitCode {
    keep_freed_memory();
    command::main(std::env::args_os()).into()
}
