//! Every module of a tree of kernels, compiled by NVRTC for some targets.

use std::path::Path;

use anyhow::{Result, bail};
use dsv4_runtime::SourceTree;
use dsv4_runtime::cache::ModuleCache;
use dsv4_runtime::cuda::{self, Nvrtc};
use rayon::prelude::*;

use crate::change::{self, Candidate, Change, MOST_MODULES};
use crate::operator::ModuleSpecification;
use crate::operators::registry;

/// The header whose instructions exist on one target only, and that target.
const HOPPER: (&str, &str) = ("hopper.h", "sm_90a");

/// Every module that an operator launches, and those of the tests.
pub fn modules(tree: &SourceTree) -> Vec<ModuleSpecification> {
    let of_operators = registry::OPERATORS.iter().flat_map(|operator| operator.modules());
    of_operators.chain(test_modules(tree)).collect()
}

/// The modules that the commit of this checkout may concern, and what is skipped.
///
/// # Errors
/// A module whose source the tree does not have.
pub fn concerned(
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
///
/// # Errors
/// Names `--arch` and the target.
pub fn looked_for(target: &str) -> Result<()> {
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
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// The target, such as `sm_90a`.
    pub target: &'a str,
    /// The source.
    pub file: &'a str,
    /// Its defines.
    pub defines: &'a [(String, String)],
}

/// The result of a job.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// The cache has it.
    Stored,
    /// Bytes of the cubin.
    Compiled(usize),
    /// The compiler's message.
    Failed(String),
    /// Why it was not compiled.
    Skipped(String),
}

/// Compiles jobs on all cores, a few at a time: `each` sees them early and in their order. Returns
/// the outcomes in this order.
pub fn compile(
    jobs: &[Job],
    nvrtc: &Nvrtc,
    tree: &SourceTree,
    cache: Option<&ModuleCache>,
    each: &dyn Fn(&Job, &Outcome),
) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    for some in jobs.chunks(4 * rayon::current_num_threads()) {
        let new: Vec<Outcome> =
            some.par_iter().map(|job| job.compile(nvrtc, tree, cache)).collect();
        some.iter().zip(&new).for_each(|(job, outcome)| each(job, outcome));
        outcomes.extend(new);
    }
    outcomes
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
