//! `parity compile`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use dsv4_kernels::runtime::SourceTree;
use dsv4_kernels::runtime::cuda::Nvrtc;
use rayon::prelude::*;

use super::Exit;
use crate::change::{self, Candidate, Change, MOST_MODULES};
use crate::operator::ModuleSpecification;
use crate::operator::registry;
use crate::record::words::printable;

/// The header whose instructions one target alone has, and that target.
const HOPPER: (&str, &str) = ("hopper.h", "sm_90a");

/// Options of `parity compile`.
#[derive(Debug, Args)]
pub struct CompileArguments {
    /// Targets to compile for
    #[arg(long, value_delimiter = ',', default_value = "sm_80,sm_90a")]
    arch: Vec<String>,
    /// Directory laid out as kernels/cuda, instead of the embedded kernels
    #[arg(long, value_name = "DIR")]
    kernels: Option<PathBuf>,
    /// Only what this commit may concern, and a rotating eighth of the rest: the current directory is its checkout
    #[arg(long, conflicts_with = "kernels")]
    changed: bool,
}

/// Compiles every specialisation that some operator launches, and the tests' own kernels; 1 where the compiler refuses one
/// or has a remark.
pub fn execute(arguments: &CompileArguments) -> Result<Exit> {
    let nvrtc = Nvrtc::load()?;
    let tree = match &arguments.kernels {
        Some(dir) => SourceTree::from_dir(dir).with_context(|| format!("--kernels {}", dir.display()))?,
        None => SourceTree::embedded(),
    };
    println!("{} ({})", nvrtc.name(), nvrtc.path().display());
    let mut modules: Vec<_> = registry::OPERATORS.iter().flat_map(|operator| operator.modules()).collect();
    modules.extend(test_modules(&tree));
    if arguments.changed {
        modules = concerned(modules, &tree)?;
    }
    let jobs: Vec<Job> = arguments
        .arch
        .iter()
        .flat_map(|target| modules.iter().map(move |(file, defines)| Job { target, file, defines }))
        .collect();
    let (mut failures, mut skipped) = (0, 0);
    // A few at a time on all cores: lines come in the order of the jobs, and soon.
    for some in jobs.chunks(4 * rayon::current_num_threads()) {
        let outcomes: Vec<Outcome> = some.par_iter().map(|job| job.compile(&nvrtc, &tree)).collect();
        for outcome in outcomes {
            let (Outcome::Compiled(line) | Outcome::Failed(line) | Outcome::Skipped(line)) = &outcome;
            println!("{}", printable(line));
            failures += usize::from(matches!(outcome, Outcome::Failed(_)));
            skipped += usize::from(matches!(outcome, Outcome::Skipped(_)));
        }
    }
    if skipped > 0 {
        println!("{skipped} skipped, which need another target");
    }
    Ok(if failures == 0 { Exit::Agreed } else { Exit::Disagreed })
}

/// The modules that the commit of this checkout may concern; says what is left out.
fn concerned(modules: Vec<ModuleSpecification>, tree: &SourceTree) -> Result<Vec<ModuleSpecification>> {
    let change = match Change::of_checkout(Path::new(".")) {
        Ok(change) => change,
        Err(why) => {
            println!("every module is compiled: {why}");
            return Ok(modules);
        }
    };
    let named = |(file, defines): &ModuleSpecification| {
        let sources = change::sources_of(file, tree)?;
        Ok((format!("{file} {defines:?}"), format!("kernels/cuda/{file}"), sources))
    };
    let named = modules.iter().map(named).collect::<Result<Vec<_>>>()?;
    let candidates: Vec<_> = named.iter().map(|(id, own, files)| Candidate { id, own, files }).collect();
    let chosen = change.choose(&candidates, MOST_MODULES);
    println!("{}", change.left_out(&chosen, "modules", MOST_MODULES));
    Ok(modules.into_iter().zip(chosen.flags).filter_map(|(module, chosen)| chosen.then_some(module)).collect())
}

/// One source with its defines, for one target.
struct Job<'a> {
    target: &'a str,
    file: &'a str,
    defines: &'a [(String, String)],
}

/// What became of a job, as a line for a reader.
enum Outcome {
    Compiled(String),
    Failed(String),
    Skipped(String),
}

impl Job<'_> {
    fn compile(&self, nvrtc: &Nvrtc, tree: &SourceTree) -> Outcome {
        let Self { target, file, defines } = self;
        if *target != HOPPER.1 && includes(tree, file, HOPPER.0) {
            let line = format!("{target} {file}: skipped, it includes {} and so needs {}", HOPPER.0, HOPPER.1);
            return Outcome::Skipped(line);
        }
        let shown: String = defines.iter().map(|(name, value)| format!(" -D{name}={value}")).collect();
        match nvrtc.compile(tree, file, defines, target) {
            Ok(compiled) if compiled.remarks.is_empty() => {
                Outcome::Compiled(format!("{target} {file}{shown}: {} bytes", compiled.cubin.len()))
            }
            // Products that it serialises cost a tenth of a kernel's speed, and nothing else says so.
            Ok(compiled) => Outcome::Failed(format!("{target} {file}{shown}: compiles, but: {}", compiled.remarks)),
            Err(error) => Outcome::Failed(format!("{target} {file}{shown}: {error}")),
        }
    }
}

/// The sources that only tests launch, where the tree has them.
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

/// Whether a source includes `header`, itself or through the tree's headers.
fn includes(tree: &SourceTree, file: &str, header: &str) -> bool {
    let headers = tree.headers_of(file).unwrap_or_default();
    headers.iter().any(|path| path.strip_prefix("include/") == Some(header))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_that_includes_a_header_through_another_needs_it_and_a_comment_does_not() {
        let tree = SourceTree::embedded()
            .with_text("direct.cu", "#include \"hopper.h\"\n".into(), "a source")
            .with_text("include/between.h", "#pragma once\n#include \"hopper.h\"\n".into(), "a header")
            .with_text("through.cu", "#include \"between.h\"\n".into(), "a source")
            .with_text("without.cu", "// as hopper.h has it\n#include \"memory.h\"\n".into(), "a source");
        let found = ["direct.cu", "through.cu", "without.cu"].map(|file| includes(&tree, file, HOPPER.0));
        assert_eq!(found, [true, true, false]);
    }
}
