//! `parity`: the command line. Exit codes: 0 all agreed, 1 disagreement, 2 bad usage or input, 3 the
//! demanded backend is missing; `parity replay` alone: 125 the kernels do not compile or cannot run.

use std::process::ExitCode;

use clap::Parser;
use dsv4_kernels::runtime::process::keep_freed_memory;
use dsv4_parity::command::{self, Command};
use dsv4_parity::operator::size::{self, Limit};
use dsv4_parity::record::words;
use tracing_subscriber::EnvFilter;

#[derive(Parser)]
#[command(name = "parity", version, about = "Parity of DeepSeek-V4's CUDA kernels with slow f64 oracles")]
struct Arguments {
    /// The most memory that one case may take, such as 8GiB: one that needs more is refused, and left out of a sweep; half
    /// of the machine's, or of the control group's, when absent
    #[arg(long, global = true, value_name = "BYTES|GiB", env = "PARITY_MEMORY")]
    memory: Option<Limit>,
    #[command(subcommand)]
    command: Command,
}

fn main() -> ExitCode {
    keep_freed_memory();
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::try_from_env("PARITY_LOG").unwrap_or_else(|_| EnvFilter::new("warn")))
        .with_writer(std::io::stderr)
        .init();
    // clap itself exits with 2 on bad usage.
    let arguments = Arguments::parse();
    if let Some(limit) = arguments.memory {
        size::set_limit(limit);
    }
    match command::execute(arguments.command) {
        Ok(code) => code.into(),
        Err(error) => {
            eprintln!("parity: {}", words::printable(&words::of_error(&error)));
            command::exit_code_of(&error).into()
        }
    }
}
