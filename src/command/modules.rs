//! Compiles the modules that a sweep or benchmarks on a GPU need before they start, on all cores.
//! They themselves would compile one at a time.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use anyhow::Result;
use dsv4_runtime::cache::ModuleCache;
use dsv4_runtime::cuda::Missing;
use dsv4_runtime::{BackendKind, Environment, SourceTree};
use indicatif::{ProgressBar, ProgressStyle};

use super::output;
use crate::operator::AnyOperator;

/// Compiles the operators' modules that are not in the cache, and shows the progress. On a terminal
/// it shows a bar, otherwise a line before and one after. It does nothing without a GPU, where
/// compilation takes little time.
///
/// # Errors
/// Sources that a module needs and that are not in the tree.
pub fn compile_in_advance(
    operators: &[&AnyOperator],
    tree: &SourceTree,
    environment: &Environment,
) -> Result<()> {
    if environment.backend != BackendKind::Cuda {
        return Ok(());
    }
    let modules: Vec<_> = operators.iter().flat_map(|operator| operator.modules()).collect();
    let cache = ModuleCache::new(ModuleCache::default_dir());
    compile_missing(
        &Missing::from(&cache, tree, &modules, &environment.target)?,
        &environment.target,
    );
    Ok(())
}

/// Compiles all missing modules.
fn compile_missing(missing: &Missing<'_>, target: &str) {
    let (count, cores) = (missing.count(), rayon::current_num_threads());
    if count == 0 {
        return;
    }
    let begun = Instant::now();
    let what = format!(
        "compiling {count} kernel modules for {target} on {cores} cores, kept for later runs"
    );
    if !std::io::stderr().is_terminal() {
        errln!("{what}");
    }
    let bar = if output::is_quiet() { ProgressBar::hidden() } else { bar(count, what) };
    let failed = missing.compile(&|| bar.inc(1));
    bar.finish_and_clear();
    errln!("{}", compiled(count, failed, begun.elapsed()));
}

/// A bar that only a terminal shows.
fn bar(count: usize, what: String) -> ProgressBar {
    let bar = ProgressBar::new(count as u64);
    if let Ok(style) = ProgressStyle::with_template("{msg}\n{bar:40} {pos}/{len} {elapsed}") {
        bar.set_style(style);
    }
    bar.set_message(what);
    bar.enable_steady_tick(Duration::from_millis(500));
    bar
}

/// The message when all are compiled.
fn compiled(count: usize, failed: usize, took: Duration) -> String {
    let line = format!("compiled {} kernel modules in {:.1} s", count - failed, took.as_secs_f64());
    if failed == 0 {
        line
    } else {
        format!("{line}; {failed} did not compile, which their cases report")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_compiled_is_one_line_with_counts_and_seconds() {
        let took = Duration::from_millis(61_449);
        assert_eq!(compiled(412, 0, took), "compiled 412 kernel modules in 61.4 s");
        let failed =
            "compiled 410 kernel modules in 61.4 s; 2 did not compile, which their cases report";
        assert_eq!(compiled(412, 2, took), failed);
    }
}
