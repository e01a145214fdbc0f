//! `parity compile`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use dsv4_runtime::SourceTree;
use dsv4_runtime::cache::ModuleCache;
use dsv4_runtime::cuda::{self, Nvrtc};
use rayon::prelude::*;
use serde_json::json;

use super::{Exit, output};
use crate::change::{self, Candidate, Change, MOST_MODULES};
use crate::operator::ModuleSpecification;
use crate::operators::registry;
use crate::record::words::printable;

/// The header whose instructions exist on one target only, and that target.
const HOPPER: (&str, &str) = ("hopper.h", "sm_90a");

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
        arguments.arch.iter().try_for_each(|target| looked_for(target))?;
    }
    let cache = arguments.into.clone().map(ModuleCache::new);
    let tree = match &arguments.kernels {
        Some(dir) => {
            SourceTree::from_dir(dir).with_context(|| format!("--kernels {}", dir.display()))?
        }
        None => dsv4_kernels::sources(),
    };
    let mut modules: Vec<_> =
        registry::OPERATORS.iter().flat_map(|operator| operator.modules()).collect();
    modules.extend(test_modules(&tree));
    if !arguments.json {
        detailln!("{} ({})", nvrtc.name(), nvrtc.path().display());
    }
    if arguments.changed {
        let left_out;
        (modules, left_out) = concerned(modules, &tree)?;
        if !arguments.json {
            detailln!("{left_out}");
        }
    }
    let jobs: Vec<Job> = arguments
        .arch
        .iter()
        .flat_map(|target| modules.iter().map(move |(file, defines)| Job { target, file, defines }))
        .collect();
    let mut outcomes: Vec<Outcome> = Vec::new();
    // A few at a time on all cores: lines come early and in the order of the jobs.
    for some in jobs.chunks(4 * rayon::current_num_threads()) {
        let new: Vec<Outcome> =
            some.par_iter().map(|job| job.compile(&nvrtc, &tree, cache.as_ref())).collect();
        for (job, outcome) in some.iter().zip(&new).filter(|_| !arguments.json) {
            job.print(outcome);
        }
        outcomes.extend(new);
    }
    let count = |is: fn(&Outcome) -> bool| outcomes.iter().filter(|outcome| is(outcome)).count();
    let failed = count(|outcome| matches!(outcome, Outcome::Failed(_)));
    if arguments.json {
        output::json(
            &jobs
                .iter()
                .zip(&outcomes)
                .map(|(job, outcome)| job.as_json(outcome))
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

/// The modules that the commit of this checkout may concern, and what is skipped.
fn concerned(
    modules: Vec<ModuleSpecification>,
    tree: &SourceTree,
) -> Result<(Vec<ModuleSpecification>, String)> {
    let change = match Change::of_checkout(Path::new(".")) {
        Ok(change) => change,
        Err(why) => return Ok((modules, format!("every module is compiled: {why}"))),
    };
    let named = |(file, defines): &ModuleSpecification| {
        let sources = change::sources_of(file, tree)?;
        Ok((format!("{file} {defines:?}"), format!("kernels/cuda/{}", tree.path_of(file)), sources))
    };
    let named = modules.iter().map(named).collect::<Result<Vec<_>>>()?;
    let candidates: Vec<_> =
        named.iter().map(|(id, own, files)| Candidate { id, own, files }).collect();
    let chosen = change.choose(&candidates, MOST_MODULES);
    let left_out = change.left_out(&chosen, "modules", MOST_MODULES);
    let modules = modules.into_iter().zip(chosen.flags);
    Ok((
        modules.filter_map(|(module, chosen)| chosen.then_some(module)).collect(),
        left_out.to_string(),
    ))
}

/// Rejects a target under which no device searches its modules.
fn looked_for(target: &str) -> Result<()> {
    let number = target
        .strip_prefix("sm_")
        .map(|number| number.trim_end_matches(|c: char| c.is_ascii_lowercase()));
    let number = number.and_then(|number| number.parse().ok());
    match number.map(cuda::target_of) {
        Some(wanted) if wanted == target => Ok(()),
        Some(wanted) => {
            bail!("--arch {target}: a device of this kind looks for modules of {wanted}")
        }
        None => bail!("--arch {target}: is not of the form sm_80 or sm_90a"),
    }
}

/// One source and its defines, for one target.
struct Job<'a> {
    target: &'a str,
    file: &'a str,
    defines: &'a [(String, String)],
}

/// The result of a job.
enum Outcome {
    /// The cache has it.
    Stored,
    /// Bytes of the cubin.
    Compiled(usize),
    /// The compiler's message.
    Failed(String),
    /// Why it was not compiled.
    Skipped(String),
}

impl Job<'_> {
    fn compile(&self, nvrtc: &Nvrtc, tree: &SourceTree, cache: Option<&ModuleCache>) -> Outcome {
        let Self { target, file, defines } = self;
        if *target != HOPPER.1 && includes(tree, file, HOPPER.0) {
            return Outcome::Skipped(format!("it includes {} and so needs {}", HOPPER.0, HOPPER.1));
        }
        let compiled = match cache {
            None => nvrtc.compile(tree, file, defines, target).map(Some),
            Some(cache) => nvrtc.compile_into(cache, tree, (file, defines), target),
        };
        match compiled {
            Ok(None) => Outcome::Stored,
            Ok(Some(compiled)) if compiled.remarks.is_empty() => {
                Outcome::Compiled(compiled.cubin.len())
            }
            // A serialized wgmma costs a tenth of a kernel's speed, and nothing else reports it.
            Ok(Some(compiled)) => Outcome::Failed(format!("compiles, but: {}", compiled.remarks)),
            Err(error) => Outcome::Failed(error.to_string()),
        }
    }

    fn print(&self, outcome: &Outcome) {
        let Self { target, file, defines } = self;
        let shown: String =
            defines.iter().map(|(name, value)| format!(" -D{name}={value}")).collect();
        match outcome {
            Outcome::Compiled(bytes) => detailln!("{target} {file}{shown}: {bytes} bytes"),
            Outcome::Stored => detailln!("{target} {file}{shown}: stored already"),
            Outcome::Failed(why) => {
                outln!("{} {file}{shown}: {}", output::bad(target), printable(why))
            }
            Outcome::Skipped(why) => detailln!("{target} {file}: skipped, {why}"),
        }
    }

    fn as_json(&self, outcome: &Outcome) -> serde_json::Value {
        let Self { target, file, defines } = self;
        let (outcome, bytes, why) = match outcome {
            Outcome::Compiled(bytes) => ("compiled", Some(bytes), None),
            Outcome::Stored => ("stored", None, None),
            Outcome::Failed(why) => ("failed", None, Some(why)),
            Outcome::Skipped(why) => ("skipped", None, Some(why)),
        };
        let defines: BTreeMap<_, _> = defines.iter().cloned().collect();
        json!({ "target": target, "file": file, "defines": defines, "outcome": outcome, "bytes": bytes, "why": why })
    }
}

/// The sources that only tests launch, if the tree has them.
fn test_modules(tree: &SourceTree) -> Vec<ModuleSpecification> {
    let fault = vec![("FAULT".to_owned(), "missing_barrier".to_owned())];
    let all = [
        ("selftest.cu", Vec::new()),
        ("selftest_faults.cu", fault),
        ("selftest_hopper.cu", Vec::new()),
        ("selftest_wgmma.cu", Vec::new()),
    ];
    let here = all.into_iter().filter(|(file, _)| tree.text(file).is_ok());
    here.map(|(file, defines)| (file.to_owned(), defines)).collect()
}

/// Whether a source includes `header`, directly or through the tree's headers.
fn includes(tree: &SourceTree, file: &str, header: &str) -> bool {
    let headers = tree.headers_of(file).unwrap_or_default();
    headers.contains(&header)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_kept_for_targets_that_devices_look_for() {
        let refused = |target| looked_for(target).map_err(|error| error.to_string()).unwrap_err();
        assert!(
            ["sm_80", "sm_89", "sm_90a", "sm_100a"]
                .into_iter()
                .all(|target| looked_for(target).is_ok())
        );
        assert_eq!(
            refused("sm_90"),
            "--arch sm_90: a device of this kind looks for modules of sm_90a"
        );
        assert_eq!(
            refused("sm_80a"),
            "--arch sm_80a: a device of this kind looks for modules of sm_80"
        );
        assert!(
            ["90", "sm_", "sm_x"]
                .into_iter()
                .all(|target| refused(target).contains("is not of the form"))
        );
    }

    #[test]
    fn a_source_that_includes_a_header_through_another_needs_it_and_a_comment_does_not() {
        let tree = dsv4_kernels::sources()
            .with_text("direct.cu", "#include \"hopper.h\"\n".into(), "a source")
            .with_text("between.h", "#pragma once\n#include \"hopper.h\"\n".into(), "a header")
            .with_text("through.cu", "#include \"between.h\"\n".into(), "a source")
            .with_text(
                "without.cu",
                "// as hopper.h has it\n#include \"memory.h\"\n".into(),
                "a source",
            );
        let found =
            ["direct.cu", "through.cu", "without.cu"].map(|file| includes(&tree, file, HOPPER.0));
        assert_eq!(found, [true, true, false]);
    }
}
