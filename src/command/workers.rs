//! `parity run --workers N`: divides the sweep over processes of this program, and joins their
//! results.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Result;
use dsv4_runtime::{BackendKind, Environment};

use super::progress::Steps;
use super::run::RunArguments;
use super::sweep::Only;
use super::{cores, modules, output, progress};
use crate::operators::registry;
use crate::record::Report;
use crate::record::journal::Shard;
use crate::sweep::merge;
use crate::sweep::workers::{self, Request, Workers};

/// Sweeps with that many workers. Their files are removed when the report is complete; until then
/// `--resume` continues from them.
pub(super) fn sweep(
    arguments: &RunArguments,
    workers: u32,
    environment: &Environment,
) -> Result<Report> {
    let backend = environment.backend;
    let log = super::LOG_FILTER.get().map_or("warn", String::as_str);
    let request = Request {
        out: &arguments.out,
        workers,
        backend,
        resume: arguments.resume,
        cores: cores(),
        environment: vec![("PARITY_LOG", log.into())],
        arguments: &|shard, dir| shard_arguments(arguments, shard, backend, dir),
        // Their failures and logs go to this process's standard error.
        words: |line| errln!("{line}"),
    };
    workers::prepare(&request)?;
    if backend == BackendKind::Cuda {
        // Otherwise each worker would compile all of them.
        let operators = registry::select(arguments.ops.as_deref())?;
        modules::compile_in_advance(&operators, &arguments.device.tree()?, environment)?;
    }
    let mut running = Workers::start(&request)?;
    watch(&mut running, workers, &arguments.out)?;
    Ok(merge::merge(running.parts()?, arguments.sweep.seed.command())?)
}

/// Shows the progress of the workers until all have ended.
fn watch(running: &mut Workers, workers: u32, out: &Path) -> Result<()> {
    let recorded = Arc::<AtomicU64>::default();
    progress::say_when_interrupted(recorded.clone(), None, out)?;
    let steps = Steps::of(None, &format!("{workers} workers"));
    running.wait(&|cases| {
        recorded.store(cases, Ordering::Relaxed);
        steps.set(cases);
    })?;
    steps.end();
    Ok(())
}

/// The arguments of the `parity run` that is one shard of this one.
fn shard_arguments(
    arguments: &RunArguments,
    shard: Shard,
    backend: BackendKind,
    dir: &Path,
) -> Vec<OsString> {
    let RunArguments { ops, sweep, only, ranks, schedules, regressions, costs, .. } = arguments;
    let (device, ranks): (_, Vec<String>) =
        (&arguments.device, ranks.iter().map(u16::to_string).collect());
    let text = |text: String| Some(OsString::from(text));
    let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.clone().into_os_string());
    let valued = [
        ("--ops", ops.clone().and_then(text)),
        ("--profile", text(sweep.profile().name().to_owned())),
        ("--cases", sweep.cases.and_then(|number| text(number.to_string()))),
        ("--edge-cases", sweep.edge_cases.and_then(|number| text(number.to_string()))),
        ("--only", only.and_then(|Only::BatchInvariance| text("batch_invariance".to_owned()))),
        ("--seed", text(sweep.seed.number().to_string())),
        ("--ranks", (!ranks.is_empty()).then(|| ranks.join(",").into())),
        ("--schedules", schedules.and_then(|number| text(number.to_string()))),
        ("--regressions", path(regressions)),
        ("--costs", path(costs)),
        ("--backend", text(backend.to_string())),
        ("--kernels", path(&device.kernels)),
        ("--out", Some(dir.into())),
        ("--shard", text(shard.to_string())),
        ("--annotations", text("none".to_owned())),
        ("--color", text(if output::stderr_has_color() { "always" } else { "never" }.to_owned())),
    ];
    let flags = [
        ("--resume", arguments.resume),
        ("--in-process", device.in_process),
        (super::tasks::PART_OF_ANOTHER, true),
    ];
    let valued = valued
        .into_iter()
        .filter_map(|(name, value)| Some([OsString::from(name), value?]))
        .flatten();
    let flags = flags.into_iter().filter(|(_, set)| *set).map(|(name, _)| name.into());
    [OsString::from("run")].into_iter().chain(valued).chain(flags).collect()
}
