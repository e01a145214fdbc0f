//! `parity compile`.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use dsv4_kernels::runtime::SourceTree;
use dsv4_kernels::runtime::cuda::Nvrtc;

use super::Exit;
use crate::operator::ModuleSpecification;
use crate::registry;

/// Options of `parity compile`.
#[derive(Debug, Args)]
pub struct CompileArguments {
    /// Targets to compile for
    #[arg(long, value_delimiter = ',', default_value = "sm_80,sm_90a")]
    arch: Vec<String>,
    /// Directory laid out as kernels/cuda, instead of the embedded kernels
    #[arg(long, value_name = "DIR")]
    kernels: Option<PathBuf>,
}

/// Compiles every specialisation that some operator launches, and the tests' own kernels.
pub fn execute(arguments: &CompileArguments) -> Result<Exit> {
    let nvrtc = Nvrtc::load()?;
    let tree = match &arguments.kernels {
        Some(dir) => SourceTree::from_dir(dir).with_context(|| format!("--kernels {}", dir.display()))?,
        None => SourceTree::embedded(),
    };
    println!("{} ({})", nvrtc.name(), nvrtc.path().display());
    let mut modules: Vec<_> = registry::OPERATORS.iter().flat_map(|operator| operator.modules()).collect();
    modules.extend(test_modules(&tree));
    let mut failures = 0;
    for target in &arguments.arch {
        for (file, defines) in &modules {
            let shown: String = defines.iter().map(|(name, value)| format!(" -D{name}={value}")).collect();
            match nvrtc.compile(&tree, file, defines, target) {
                Ok(cubin) => println!("{target} {file}{shown}: {} bytes", cubin.len()),
                Err(error) => {
                    failures += 1;
                    println!("{target} {file}{shown}: {error}");
                }
            }
        }
    }
    Ok(if failures == 0 { Exit::Agreed } else { Exit::Disagreed })
}

/// The sources that only tests launch, where the tree has them.
fn test_modules(tree: &SourceTree) -> Vec<ModuleSpecification> {
    let fault = vec![("FAULT".to_owned(), "missing_barrier".to_owned())];
    let all = [("selftest.cu", Vec::new()), ("selftest_faults.cu", fault)];
    let here = all.into_iter().filter(|(file, _)| tree.text(file).is_ok());
    here.map(|(file, defines)| (file.to_owned(), defines)).collect()
}
