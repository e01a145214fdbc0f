//! `parity`: the command line. Exit codes: 0 all agreed, 1 disagreement, 2 bad usage or input, 3
//! the demanded backend is missing, 141 standard output is closed. Only `parity replay` has 125:
//! the kernels do not compile or cannot run.

use std::process::ExitCode;

use dsv4_parity::{command, prepare_process};

fn main() -> ExitCode {
    prepare_process();
    command::main(std::env::args_os()).into()
}
