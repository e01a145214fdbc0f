//! `parity compile`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use dsv4_runtime::SourceTree;
use dsv4_runtime::cache::ModuleCache;
use dsv4_runtime::cuda::Nvrtc;
use serde_json::json;

use super::{Exit, output};
use crate::compile::{self, Job, Outcome};
use crate::record::words::printable;

/// Options of `parity compile`.
#[derive(Debug, Args)]
pub struct CompileArguments {
    /// Targets to compile for
    #[arg(long, value_delimiter = ',', default_value = "sm_80,sm_90a")]
    arch: Vec<String>,
    /// Directory of kernel sources, laid out as kernels/cuda [default: the embedded ones]
    #[arg(long, value_name = "DIR")]
    kernels: Option<PathBuf>,
    /// Only what this commit concerns, and a smoke test of the rest
    ///
    /// The current directory must be the commit's checkout.
    #[arg(long, conflicts_with = "kernels")]
    changed: bool,
    /// Keep what is compiled in this cache of modules, for PARITY_CACHE_DIR on a GPU machine
    ///
    /// A run on a GPU of a target of --arch then compiles nothing, if its kernels are the same and
    /// its NVRTC is the same release and build: carry libnvrtc along, and name it by PARITY_NVRTC.
    /// With another NVRTC it compiles again.
    #[arg(long, value_name = "DIR")]
    into: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The advice where NVRTC is missing; the error lists where it was searched.
const INSTALL: &str = "NVRTC is needed. Run `pip install nvidia-cuda-nvrtc`, or install a CUDA toolkit (12 or later), or \
                       set PARITY_NVRTC to libnvrtc.so";

/// Compiles every specialization that an operator launches, and the tests' own kernels. The exit
/// code is 1 where the compiler rejects one or has a remark.
pub fn execute(arguments: &CompileArguments) -> Result<Exit> {
    let nvrtc = Nvrtc::load().context(INSTALL)?;
    if arguments.into.is_some() {
        arguments.arch.iter().try_for_each(|target| compile::looked_for(target))?;
    }
    let cache = arguments.into.clone().map(ModuleCache::new);
    let tree = match &arguments.kernels {
        Some(dir) => {
            SourceTree::from_dir(dir).with_context(|| format!("--kernels {}", dir.display()))?
        }
        None => dsv4_kernels::sources(),
    };
    let mut modules = compile::modules(&tree);
    if !arguments.json {
        detailln!("{} ({})", nvrtc.name(), nvrtc.path().display());
    }
    if arguments.changed {
        let left_out;
        (modules, left_out) = compile::concerned(modules, &tree)?;
        if !arguments.json {
            detailln!("{left_out}");
        }
    }
    let jobs: Vec<Job> = arguments
        .arch
        .iter()
        .flat_map(|target| modules.iter().map(move |(file, defines)| Job { target, file, defines }))
        .collect();
    let each = |job: &Job, outcome: &Outcome| {
        if !arguments.json {
            print(job, outcome);
        }
    };
    let outcomes = compile::compile(&jobs, &nvrtc, &tree, cache.as_ref(), &each);
    let count = |is: fn(&Outcome) -> bool| outcomes.iter().filter(|outcome| is(outcome)).count();
    let failed = count(|outcome| matches!(outcome, Outcome::Failed(_)));
    if arguments.json {
        output::json(
            &jobs
                .iter()
                .zip(&outcomes)
                .map(|(job, outcome)| as_json(job, outcome))
                .collect::<Vec<_>>(),
        )?;
    } else {
        let compiled = count(|outcome| matches!(outcome, Outcome::Compiled(_) | Outcome::Stored));
        let skipped = count(|outcome| matches!(outcome, Outcome::Skipped(_)));
        let verdict = match failed {
            0 => output::good(format!("{compiled} compiled")),
            _ => output::bad(format!("{failed} failed, {compiled} compiled")),
        };
        outln!("{verdict}, {skipped} skipped, which need another target");
    }
    Ok(if failed == 0 { Exit::Agreed } else { Exit::Disagreed })
}

fn print(job: &Job, outcome: &Outcome) {
    let Job { target, file, defines } = job;
    let shown: String = defines.iter().map(|(name, value)| format!(" -D{name}={value}")).collect();
    match outcome {
        Outcome::Compiled(bytes) => detailln!("{target} {file}{shown}: {bytes} bytes"),
        Outcome::Stored => detailln!("{target} {file}{shown}: stored already"),
        Outcome::Failed(why) => {
            outln!("{} {file}{shown}: {}", output::bad(target), printable(why))
        }
        Outcome::Skipped(why) => detailln!("{target} {file}: skipped, {why}"),
    }
}

fn as_json(job: &Job, outcome: &Outcome) -> serde_json::Value {
    let Job { target, file, defines } = job;
    let (outcome, bytes, why) = match outcome {
        Outcome::Compiled(bytes) => ("compiled", Some(bytes), None),
        Outcome::Stored => ("stored", None, None),
        Outcome::Failed(why) => ("failed", None, Some(why)),
        Outcome::Skipped(why) => ("skipped", None, Some(why)),
    };
    let defines: BTreeMap<_, _> = defines.iter().cloned().collect();
    json!({ "target": target, "file": file, "defines": defines, "outcome": outcome, "bytes": bytes, "why": why })
}
