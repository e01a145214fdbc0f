//! `parity doctor`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use dsv4_kernels::implementation::Implementation;
use dsv4_runtime::emulator::usual_compiler;
use dsv4_runtime::tasks::{self, Tasks};
use dsv4_runtime::world::crew::Means;
use dsv4_runtime::{BackendKind, Device, RuntimeError, cuda};
use serde_json::json;

use super::{Exit, cores, output};
use crate::judge::checks::CheckOptions;
use crate::operator::{AnyOperator, Profile};
use crate::operators::registry;
use crate::record::words::printable;
use crate::record::{Origin, Verdict};
use crate::sweep;

/// Options of `parity doctor`.
#[derive(Debug, Args)]
pub struct DoctorArguments {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Reports which backends work here, and how ranks communicate; succeeds when at least one backend
/// works.
pub fn execute(arguments: &DoctorArguments) -> Result<Exit> {
    let cuda = cuda::probe()
        .map_err(|reason| reason.to_string())
        .and_then(|found| try_out(BackendKind::Cuda).map(|tried| format!("{found} {tried}")));
    let mut found = vec![("cuda", cuda), ("emulator", try_out(BackendKind::Emulator))];
    let works = found.iter().any(|(_, found)| found.is_ok());
    let kinds = [BackendKind::Cuda, BackendKind::Emulator];
    if let Some(at) = found.iter().position(|(_, found)| found.is_ok()) {
        found.push(("ranks", try_ranks(kinds[at])));
    }
    if let Some(tasks) = tasks::joined() {
        found.push(("srun", tasks_of(tasks)));
    }
    if arguments.json {
        let of = |(backend, found): &(&str, Result<String, String>)| {
            let (Ok(details) | Err(details)) = found;
            json!({ "backend": backend, "works": found.is_ok(), "details": details })
        };
        output::json(&found.iter().map(of).collect::<Vec<_>>())?;
    } else {
        for (name, found) in &found {
            match found {
                Ok(found) => outln!("{name:9} {}: {found}", output::good("works")),
                Err(reason) => {
                    outln!("{name:9} {}: {}", output::bad("does not work"), printable(reason))
                }
            }
        }
    }
    Ok(if works { Exit::Agreed } else { Exit::BackendMissing })
}

/// Compiles the kernels of rms_norm on a backend, runs the first of its edge cases that has an
/// element, and compares. A compiler that answers and a device that exists are not enough.
fn try_out(kind: BackendKind) -> Result<String, String> {
    let device =
        Device::open(kind, dsv4_kernels::device_options()).map_err(|error| error.to_string())?;
    let operator = registry::find("rms_norm").map_err(|error| error.to_string())?;
    compare(operator, &device)?;
    Ok(works(kind, &device, operator.name()))
}

/// Says which tasks have the processes of ranks.
fn tasks_of(tasks: &Tasks) -> Result<String, String> {
    let (count, step) = (tasks.count(), tasks.step());
    match tasks.ended() {
        Some(task) => Err(format!("task {task} of {count} has ended")),
        None => Ok(format!(
            "step {}.{} has {count} tasks on this host. Rank r is a process in task r",
            step.job, step.number
        )),
    }
}

/// Runs two ranks on a backend that works, and says how they communicate.
fn try_ranks(kind: BackendKind) -> Result<String, String> {
    let words = |error: RuntimeError| error.to_string();
    let device = Device::open(kind, dsv4_kernels::device_options()).map_err(words)?;
    let operator = registry::find("cp_sparse_attention").map_err(|error| error.to_string())?;
    compare(operator, &device)?;
    let (means, nccl) = (device.means(2).map_err(words)?, cuda::nccl::find());
    let by = match (means, nccl) {
        (Some(Means::Nccl), Ok(found)) => format!("by {found}"),
        (_, Ok(found)) => format!("by shared memory ({found}, needs a GPU for each rank)"),
        (_, Err(_)) => "by shared memory; NCCL is not found (PARITY_NCCL names it)".into(),
    };
    let (name, links) =
        (operator.name(), if kind == BackendKind::Cuda { linked()? } else { String::new() });
    Ok(format!(
        "ranks of the {kind} communicate {by}{links}. A case of {name} was run and compared"
    ))
}

/// How the GPUs reach each other's memory, for each kind of link; empty for one GPU.
fn linked() -> Result<String, String> {
    let links = cuda::links().map_err(|error| error.to_string())?;
    let mut kinds: BTreeMap<_, Vec<String>> = BTreeMap::new();
    for ([one, other], link) in links {
        kinds.entry(link).or_default().push(format!("{one}-{other}"));
    }
    let said = kinds.iter().map(|(link, pairs)| format!("; GPUs {} by {link}", pairs.join(", ")));
    Ok(said.collect())
}

/// Runs the first edge case that has an element, and compares.
fn compare(operator: &AnyOperator, device: &Device) -> Result<(), String> {
    for case in operator.edge_cases(Profile::Quick) {
        let record = sweep::run_case(&case, Origin::Given, device, CheckOptions::of_kernels(0));
        if let Some(check) = record.checks.iter().find(|check| check.verdict != Verdict::Pass) {
            return Err(format!(
                "a case of {} came to this: {} {}: {}",
                case.operator, check.check, check.tensor, check.message
            ));
        }
        if record.checks.iter().any(|check| check.compared > 0) {
            return Ok(());
        }
    }
    Err(format!("no case of {} compares anything", operator.name()))
}

fn works(kind: BackendKind, device: &Device, operator: &str) -> String {
    let environment = device.environment();
    let cores = cores();
    let place = match kind {
        BackendKind::Emulator => {
            let compiler =
                compiler().map_or_else(String::new, |path| format!(", {}", path.display()));
            format!(
                "{} ({cores} cores), by {}{compiler}. ",
                environment.device, environment.compiler
            )
        }
        _ => String::new(),
    };
    // A GPU of another generation has no Hopper kernels: said before anybody reads its times.
    let portable = match Implementation::Hopper.cannot_run_on(environment) {
        Some(why) => format!("; {why}: the portable ones run"),
        None => String::new(),
    };
    format!("{place}A case of {operator} was compiled, run and compared{portable}")
}

/// The path of the emulator's compiler.
fn compiler() -> Option<PathBuf> {
    let name = usual_compiler();
    let folders = std::env::var_os("PATH")?;
    // A path with a folder is used as it is; a bare name is searched on the path.
    let given = name.components().nth(1).is_some();
    let candidates = if given {
        vec![name]
    } else {
        std::env::split_paths(&folders).map(|f| f.join(&name)).collect()
    };
    candidates
        .into_iter()
        .filter(|path| path.is_file())
        .find_map(|path| std::path::absolute(path).ok())
}
