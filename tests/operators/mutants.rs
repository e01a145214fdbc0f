//! `mutant::ID`: the check that is expected to see a planted bug sees it, and its cases pass where
//! nothing is planted.
//!
//! Always on the emulator: guard pages, schedules and poison detect a third of the bugs. A wild
//! write would cost a GPU its context and so the other tests. Where a GPU is under test these tests
//! show nothing about it, so they run only if they are named.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, LazyLock, Mutex};

use dsv4_parity::case::Case;
use dsv4_parity::change::{self, Candidate, MOST_MUTANTS};
use dsv4_parity::judge::checks::{self, CheckOptions};
use dsv4_parity::judge::truths::Truths;
use dsv4_parity::mutants::planted::{self, Mutant};
use dsv4_parity::operators::registry;
use dsv4_parity::record::{Check, MutantRecord};
use dsv4_runtime::{BackendKind, Device};
use libtest_mimic::Trial;

use crate::{Extent, shared, support};

/// Random schedules for each case: only a few, because a race that they miss is a weakness that
/// should show.
const SCHEDULES: u32 = 4;

static TRUTHS: LazyLock<Truths> = LazyLock::new(Truths::default);

/// A test of every planted mutant; those that the commit skips are ignored, and this is reported.
pub fn trials(extent: Extent) -> Result<Vec<Trial>, String> {
    let mutants =
        planted::load(&support::fixtures().join("mutants")).map_err(|error| error.to_string())?;
    let chosen =
        if extent == Extent::Commit { choose(&mutants)? } else { vec![true; mutants.len()] };
    let trial = |(mutant, chosen): (Mutant, bool)| {
        crate::trial(format!("mutant::{}", mutant.id), move || run(&mutant))
            .with_ignored_flag(!chosen)
    };
    Ok(mutants.into_iter().zip(chosen).map(trial).collect())
}

/// Which mutants this commit runs; prints what is skipped, and why.
fn choose(mutants: &[Mutant]) -> Result<Vec<bool>, String> {
    if support::backend() == BackendKind::Cuda {
        let count = mutants.len();
        let why = "they run on the emulator, whatever is under test; a name or PARITY_TESTS=all runs them";
        eprintln!("{count} planted mutants are left out: {why}");
        return Ok(vec![false; count]);
    }
    let Some(change) = shared::change() else { return Ok(vec![true; mutants.len()]) };
    let mut files = BTreeMap::new();
    for operator in registry::OPERATORS {
        let name = operator.name();
        let lists = mutants
            .iter()
            .filter(|mutant| mutant.operator == name)
            .map(|mutant| mutant.list.clone());
        let of = change::files_of(operator, &dsv4_kernels::sources(), &lists.collect());
        files.insert(name, of.map_err(|error| error.to_string())?);
    }
    let none = BTreeSet::new();
    let own: Vec<String> =
        mutants.iter().map(|mutant| format!("kernels/cuda/{}", mutant.file)).collect();
    let candidates: Vec<_> = mutants
        .iter()
        .zip(&own)
        .map(|(Mutant { id, operator, .. }, own)| Candidate {
            id,
            own,
            files: files.get(operator.as_str()).unwrap_or(&none),
        })
        .collect();
    let chosen = change.choose(&candidates, MOST_MUTANTS);
    eprintln!(
        "{}; PARITY_TESTS=all runs them",
        change.left_out(&chosen, "planted mutants", MOST_MUTANTS)
    );
    Ok(chosen.flags)
}

fn run(mutant: &Mutant) -> Result<String, String> {
    shared::on_emulator_for_mutants(|device| {
        for line in &mutant.cases {
            clean(device, line)?;
        }
        let record = mutant
            .run_to_expected(device, SCHEDULES, &TRUTHS)
            .map_err(|error| error.to_string())?;
        let seen = record.killers();
        if record.killed_by.contains(&mutant.expected) || is_seen_by_its_cause(&record) {
            return Ok(format!("seen by {seen}"));
        }
        let (id, catalogue, expected) = (&mutant.id, &mutant.catalogue, &mutant.expected);
        Err(format!(
            "`{id}` ({catalogue}) was to be seen by `{expected}`, and was by: {seen}\n  {}",
            record.summary
        ))
    })
}

/// Whether the emulator reported what the kernel does wrong: a race, an access outside of a
/// buffer, or a store to an input. Such a fault ends the run before the expected check compares its result.
fn is_seen_by_its_cause(record: &MutantRecord) -> bool {
    let causes = ["nothing orders the two (a race)", "accessed `", "which is an input"];
    record.killed_by.contains(&Check::Launch)
        && causes.iter().any(|cause| record.reason.contains(cause))
}

/// Filled by the first thread that locks it.
type Slot = Arc<Mutex<Option<Result<(), String>>>>;

/// A case on the unmutated kernels: the first thread that needs it runs it once.
fn clean(device: &Device, line: &str) -> Result<(), String> {
    static RUNS: LazyLock<Mutex<HashMap<String, Slot>>> = LazyLock::new(Mutex::default);
    let case = Case::parse(line).map_err(|error| error.to_string())?;
    let slot =
        RUNS.lock().unwrap_or_else(|e| e.into_inner()).entry(case.line()).or_default().clone();
    let mut slot = slot.lock().unwrap_or_else(|e| e.into_inner());
    slot.get_or_insert_with(|| run_clean(device, &case)).clone()
}

fn run_clean(device: &Device, case: &Case) -> Result<(), String> {
    let refused = |error| format!("{}: {error}", case.line());
    let prepared = registry::prepare(case).map_err(refused)?;
    let truth = TRUTHS.of(case, &*prepared).map_err(refused)?;
    let options = CheckOptions::of_kernels(SCHEDULES);
    let outcome = checks::run_by(&truth, &*prepared, device, options, |_| false);
    if outcome.passed() {
        return Ok(());
    }
    let failures =
        outcome.failures().map(|c| format!("\n  {} {}: {}", c.check, c.tensor, c.message));
    let replay = case.replay_command(device, SCHEDULES);
    Err(format!(
        "where nothing is planted, this case fails: {}{}\n  replay: {replay}",
        case.line(),
        failures.collect::<String>()
    ))
}
