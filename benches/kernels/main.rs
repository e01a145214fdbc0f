//! Criterion benchmarks of every operator's kernels.
//!
//! On a GPU the clock is a pair of CUDA events around many launches ([`clock`]), buffers rotate so that
//! the second-level cache holds nothing of them ([`data`]), and the device's own rates are measured in the
//! same run ([`ceilings`]). After timing, rows of what the timed launches wrote are compared with the
//! oracle ([`recheck`]). Without a GPU the emulator and the oracles are timed on small shapes.
//!
//! Results go to criterion's directory, with the facts that `parity run --criterion DIR` needs beside them.
//! The exit code is 0 only when every benchmark that ran was compared, agreed, and stayed below what the
//! device can do on paper.

mod attention_combine;
mod ceilings;
mod clock;
mod data;
mod decode_attention;
mod kv_cache_write;
mod oracle;
mod recheck;
mod rms_norm;
mod rope;
mod score_recompute;
mod session;
mod sparse_attention;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser as _;
use dsv4_kernels::runtime::BackendKind;
use dsv4_parity::command::{DeviceArguments, exit_code_of};

use data::Lab;
use session::Session;

/// The device of `PARITY_BACKEND`; criterion reads the command line.
#[derive(clap::Parser)]
struct Environment {
    #[command(flatten)]
    device: DeviceArguments,
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
    let device = Environment::try_parse_from(["kernels"])?.device.open()?;
    let lab = Lab::new(&device);
    let mut session = Session::new(&lab);
    let benchmarks = match device.environment().backend {
        BackendKind::Cuda => {
            session.measure_ceilings()?;
            [
                rms_norm::production(),
                rope::production(),
                sparse_attention::production(),
                decode_attention::production(),
                attention_combine::production(),
                kv_cache_write::production(),
                score_recompute::production(),
            ]
        }
        BackendKind::Emulator | BackendKind::External => [
            rms_norm::small(),
            rope::small(),
            sparse_attention::small(),
            decode_attention::small(),
            attention_combine::small(),
            kv_cache_write::small(),
            score_recompute::small(),
        ],
    };
    for benchmark in benchmarks.into_iter().flatten() {
        session.run(&benchmark)?;
    }
    session.finish()
}
