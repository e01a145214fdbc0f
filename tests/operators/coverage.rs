//! `coverage::OPERATOR`: the cases of its sweep run every line of its kernels. Other lines are in
//! `fixtures/coverage.toml`, each with the reason. A commit tests the operators that it concerns
//! most.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use dsv4_parity::case::Case;
use dsv4_parity::change::{self, Candidate, MOST_OPERATORS};
use dsv4_parity::coverage::{self, KernelCoverage, Reasons};
use dsv4_parity::judge::checks::CheckOptions;
use dsv4_parity::operator::{AnyOperator, Profile};
use dsv4_parity::operators::registry;
use dsv4_parity::sweep::regressions::Regressions;
use dsv4_parity::sweep::{self, GivenCases, LeftOut, SweepOptions};
use dsv4_runtime::emulator::{EmulatorOptions, coverage as counts};
use dsv4_runtime::{BackendKind, Device, DeviceOptions};
use libtest_mimic::Trial;

use crate::{Extent, shared, support};

/// The seed of `parity coverage`.
const SEED: u64 = 0;

pub fn trial(operator: &'static AnyOperator, extent: Extent) -> Option<Trial> {
    let name = format!("coverage::{}", operator.name());
    Some(crate::trial(name, move || run(operator, extent)))
}

fn run(operator: &'static AnyOperator, extent: Extent) -> Result<String, String> {
    if support::backend() != BackendKind::Emulator {
        return Ok("skipped: only the emulator counts lines".to_owned());
    }
    if extent == Extent::Commit && !concerned_most()?.contains(operator.name()) {
        return Ok("left out: the commit does not concern it".to_owned());
    }
    let files = operator.modules().into_iter().map(|(file, _)| file.to_string());
    let own: BTreeSet<String> =
        files.filter(|file| owner_of(file) == Some(operator.name())).collect();
    if own.is_empty() {
        return Ok("it has no kernels of its own".to_owned());
    }
    let (kernels, cases) = measured(operator).map_err(|error| format!("{error:#}"))?;
    let own = || kernels.iter().filter(|kernel| own.contains(&kernel.kernel));
    let missing: Vec<String> = own()
        .flat_map(|kernel| kernel.unexplained().map(|line| (&kernel.kernel, line)))
        .map(|(of, line)| format!("{of}: {}:{}: {}", line.file, line.line, line.text))
        .collect();
    if !missing.is_empty() {
        return Err(format!(
            "{} lines never ran, in {cases} cases, and fixtures/coverage.toml has no reason:\n{}",
            missing.len(),
            missing.join("\n")
        ));
    }
    let lines: usize = own().map(|kernel| kernel.lines).sum();
    Ok(format!("{lines} lines of {} kernels in {cases} cases", own().count()))
}

/// The operator whose name a kernel file starts with, the longest one.
fn owner_of(file: &str) -> Option<&'static str> {
    let names = registry::OPERATORS.iter().map(|operator| operator.name());
    names.filter(|name| file.starts_with(name)).max_by_key(|name| name.len())
}

/// What ran of all kernels that the operator's cases launch, and how many cases ran.
fn measured(operator: &'static AnyOperator) -> anyhow::Result<(Vec<KernelCoverage>, usize)> {
    let tree = dsv4_kernels::sources();
    let reasons = Reasons::read(&support::fixtures().join("coverage.toml"), &tree)?;
    let folder = tempfile::tempdir()?;
    let options = DeviceOptions {
        emulator: EmulatorOptions {
            coverage: Some(folder.path().to_path_buf()),
            ..EmulatorOptions::default()
        },
        ..dsv4_kernels::device_options()
    };
    let open = || Ok(Device::open(BackendKind::Emulator, options.clone())?);
    let regressions = Regressions::new(support::fixtures().join("regressions"));
    let saved = regressions.load(operator.name())?;
    let sweep = SweepOptions {
        profile: Profile::Quick,
        cases: None,
        edge_cases: GivenCases::All,
        remembered: GivenCases::All,
        seed: SEED,
        checks: CheckOptions::of_kernels(0),
        regressions,
        remember: false,
        condition: None,
        left_out: LeftOut::default(),
        time_budget: None,
        deadline: None,
        ranks: Vec::new(),
    };
    let (planned, _) = sweep::plan(operator, saved, &sweep, open()?.environment())?;
    let cases: Vec<Case> = planned.into_iter().map(|planned| planned.case).collect();
    // Other tests use the other cores.
    let launched = coverage::launch(&cases, 1, &open, &|| {})?;
    if let Some((case, why)) = launched.failed.first() {
        anyhow::bail!("{} cases did not run, the first: {why}\n{case}", launched.failed.len());
    }
    let counted = counts::read(folder.path(), None)?;
    Ok((coverage::of_kernels(&counted, &tree, &reasons)?, launched.cases))
}

/// The operators that the commit concerns, those with changed files of their own first.
fn concerned_most() -> Result<BTreeSet<&'static str>, String> {
    static CONCERNED: LazyLock<Result<BTreeSet<&'static str>, String>> = LazyLock::new(|| {
        let all = registry::OPERATORS;
        let Some(change) = shared::change() else {
            return Ok(all.iter().map(|operator| operator.name()).collect());
        };
        let tree = dsv4_kernels::sources();
        let files = all.iter().map(|one| change::files_of(one, &tree, &BTreeSet::new()));
        let files: Vec<_> = files.collect::<Result<_, _>>().map_err(|error| error.to_string())?;
        let owns: Vec<_> = all.iter().map(|operator| operator.describe().kernel_file).collect();
        let candidates: Vec<_> = (0..all.len())
            .map(|at| Candidate { id: all[at].name(), own: &owns[at], files: &files[at] })
            .collect();
        let chosen = change.choose(&candidates, MOST_OPERATORS).flags;
        let chosen = all.iter().zip(chosen).filter(|(_, chosen)| *chosen);
        Ok(chosen.map(|(operator, _)| operator.name()).collect())
    });
    CONCERNED.clone()
}
