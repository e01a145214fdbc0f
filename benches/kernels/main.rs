//! Criterion benchmarks of every operator's kernels, as their declarations define them
//! ([`dsv4_parity::operator::declared::Operator::benchmarks`]).
//!
//! On a GPU the clock is a pair of CUDA events around many launches ([`clock`]). Buffers rotate so
//! that the L2 holds none of them. The device's own rates are measured in the same run
//! ([`ceilings`]), with copies of fewer bytes among the benchmarks. After timing, some rows that
//! the timed launches wrote are compared with the oracle. Without a GPU the emulator and the
//! oracles are timed on small shapes.
//!
//! Results go to criterion's directory, next to the facts that `parity run --criterion DIR` needs.
//! `PARITY_BENCH_LOG` names a file to which a turn and its samples are appended for `parity
//! beside`; benchmarks that earlier turns did not reach run first. `PARITY_BENCH_PAIRS` names the
//! list of pairs, and then only the benchmarks of that list run. Criterion's filter, a regular
//! expression, selects benchmarks, and `--exact` takes one id. The exit code is 0 only when every
//! benchmark that ran was compared, agreed, and stayed below the data sheet's rates.

mod ceilings;
mod clock;
mod session;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser as _;
use dsv4_parity::command::{DeviceArguments, compile_in_advance, exit_code_of};
use dsv4_parity::operator::benchmarks::Timed;
use dsv4_parity::operators::registry::OPERATORS;
use dsv4_parity::report::beside::pairs::Pairs;
use dsv4_runtime::BackendKind;

use session::Session;

/// The device of `PARITY_BACKEND` and the files of `parity beside`; criterion parses the command
/// line.
#[derive(clap::Parser)]
struct Environment {
    #[command(flatten)]
    device: DeviceArguments,
    #[arg(long, env = "PARITY_BENCH_LOG")]
    log: Option<PathBuf>,
    #[arg(long, env = "PARITY_BENCH_PAIRS")]
    pairs: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            exit_code_of(&error).into()
        }
    }
}

fn run() -> Result<bool> {
    // The library of the GEMM rate works on memory of this process, and nothing is between a launch
    // and its time.
    let environment = Environment::try_parse_from(["kernels", "--in-process"])?;
    let device = environment.device.open()?;
    let gpu = device.environment().backend == BackendKind::Cuda;
    let all: Vec<_> =
        OPERATORS.iter().map(|operator| operator.benchmarks(device.environment())).collect();
    let pairs = environment.pairs.as_deref().map(Pairs::read).transpose()?;
    let mut session = Session::new(&device, pairs);
    let mut order: Vec<&dyn Timed> = all.iter().flatten().map(|benchmark| &**benchmark).collect();
    session.check_pairs(order.iter().copied())?;
    if gpu {
        let operators = session.operators(order.iter().copied());
        compile_in_advance(&operators, device.tree(), device.environment())?;
        session.measure_ceilings()?;
    }
    if let Some(path) = &environment.log {
        session.start_log(path, &mut order)?;
    }
    if gpu {
        session.run_copies()?;
    }
    for benchmark in order {
        session.run(benchmark)?;
    }
    if !gpu {
        for benchmark in all.iter().filter_map(|benchmarks| benchmarks.first()) {
            session.run_oracle(&**benchmark)?;
        }
    }
    session.finish()
}
