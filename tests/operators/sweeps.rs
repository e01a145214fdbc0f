//! `sweep::OPERATOR`: its saved cases, its edge cases, and drawn cases.

use std::collections::BTreeSet;
use std::sync::LazyLock;
use std::time::Duration;

use dsv4_parity::change::{FIXED, MOST_EDGE_CASES, MOST_REMEMBERED_CASES};
use dsv4_parity::judge::checks::CheckOptions;
use dsv4_parity::operator::{AnyOperator, Profile};
use dsv4_parity::record::{CaseRecord, Origin, Skip, TensorRecord, Verdict, without_power};
use dsv4_parity::sweep::regressions::Regressions;
use dsv4_parity::sweep::{
    self, EMULATOR_BUDGET, EMULATOR_BUDGET_OF_ALL, GivenCases, LeftOut, SweepOptions,
};
use dsv4_runtime::BackendKind;
use libtest_mimic::Trial;

use crate::shared::Shares;
use crate::support::Collected;
use crate::{Extent, shared, support};

const SEED: u64 = 11;

/// No edge case.
const NONE: GivenCases = GivenCases::Lots { most: 0, seed: FIXED };

/// Checks that must run for some case of every operator.
const OF_EVERY_OPERATOR: [&str; 8] = [
    "forward",
    "guards",
    "inputs_unchanged",
    "fully_written",
    "repeatable",
    "poison_independent",
    "sequence",
    "schedule_independent",
];
/// The same for an operator with a tensor that is compared within a budget.
const OF_ROUNDED_TENSORS: [&str; 3] = ["precision", "bias", "special_values"];
/// The same for an operator with a backward kernel.
const OF_GRADIENTS: [&str; 2] = ["gradient", "oracle_gradients"];

/// The same for an operator with a gradient that follows cheaply from what was saved.
const OF_SINK_GRADIENTS: [&str; 1] = ["gradient_of_saved"];

pub fn trial(operator: &'static AnyOperator, extent: Extent) -> Option<Trial> {
    let name = format!("sweep::{}", operator.name());
    Some(crate::trial(name, move || {
        run(operator, budget(operator, extent)?, given_cases(operator, extent)?)
    }))
}

fn regressions() -> Regressions {
    Regressions::new(support::fixtures().join("regressions"))
}

/// Which edge cases and saved cases run. An operator that the commit concerns runs its share of
/// them. Any other operator runs one saved case and its typical cases. On a GPU all run.
fn given_cases(operator: &AnyOperator, extent: Extent) -> Result<[GivenCases; 2], String> {
    if extent != Extent::Commit || support::backend() == BackendKind::Cuda {
        return Ok([GivenCases::All; 2]);
    }
    static SHARES: LazyLock<[Shares; 2]> = LazyLock::new(|| {
        let remembered = |operator: &AnyOperator| {
            regressions().load(operator.name()).map_or(0, |cases| cases.len())
        };
        [
            shared::shares(
                |operator| operator.edge_cases(Profile::Quick).len(),
                MOST_EDGE_CASES,
                0,
            ),
            shared::shares(remembered, MOST_REMEMBERED_CASES, 1),
        ]
    });
    let part = |shares: &Shares| -> Result<GivenCases, String> {
        let share = shares.as_ref().map_err(Clone::clone)?.get(operator.name());
        Ok(share.map_or(GivenCases::All, |&most| GivenCases::Lots { most, seed: FIXED }))
    };
    Ok([part(&SHARES[0])?, part(&SHARES[1])?])
}

/// Seconds for the drawn cases; on a GPU drawn cases take little time.
fn budget(operator: &AnyOperator, extent: Extent) -> Result<Option<Duration>, String> {
    if extent == Extent::All || support::backend() == BackendKind::Cuda {
        return Ok(None);
    }
    match std::env::var("PARITY_SWEEP_SECONDS") {
        Err(_) if extent == Extent::Commit => {
            let concerned = shared::concerned()?;
            let own = EMULATOR_BUDGET.min(EMULATOR_BUDGET_OF_ALL / concerned.len().max(1) as u32);
            Ok(Some(if concerned.contains(operator.name()) { own } else { Duration::ZERO }))
        }
        Err(_) => Ok(Some(EMULATOR_BUDGET)),
        Ok(text) => {
            let seconds = text
                .parse()
                .map_err(|_| format!("PARITY_SWEEP_SECONDS is `{text}`, no number of seconds"))?;
            Ok(Some(Duration::from_secs(seconds)))
        }
    }
}

fn run(
    operator: &AnyOperator,
    time_budget: Option<Duration>,
    given: [GivenCases; 2],
) -> Result<String, String> {
    let [edge_cases, remembered] = given;
    let options = SweepOptions {
        // An operator that the commit does not concern runs its typical cases.
        profile: if edge_cases == NONE { Profile::Smoke } else { Profile::Quick },
        cases: None,
        edge_cases,
        remembered,
        seed: SEED,
        checks: CheckOptions {
            power: false,
            ..CheckOptions::everything(Profile::Quick.schedules())
        },
        regressions: regressions(),
        remember: false,
        condition: None,
        left_out: LeftOut::default(),
        time_budget,
        deadline: None,
        ranks: Vec::new(),
    };
    shared::compiled(operator)?;
    let mut collected = Collected::default();
    let swept =
        shared::on_device(|device| sweep::sweep(operator, device, &options, &mut collected));
    let skips = swept.map_err(|error| error.to_string())?;
    nothing_failed(&collected.records, &skips)?;
    every_case_ran(operator, &collected, &skips)?;
    if edge_cases == GivenCases::All {
        everything_was_met(operator, &collected.records)?;
    }
    let count = |origin| collected.records.iter().filter(|record| record.origin == origin).count();
    let mut done = format!(
        "{} remembered cases, {} edge cases and drawn ones",
        count(Origin::Regression),
        count(Origin::Drawn)
    );
    for skip in &skips {
        done += &format!("; {}", skipped(skip));
    }
    Ok(done)
}

fn skipped(skip: &Skip) -> String {
    format!("skipped {} {}: {}", skip.count, skip.what, skip.why)
}

/// Each failing case with its replay command, shrunk cases first.
fn nothing_failed(records: &[CaseRecord], skips: &[Skip]) -> Result<(), String> {
    let mut failing: Vec<_> =
        records.iter().filter(|record| record.verdict() != Verdict::Pass).collect();
    if failing.is_empty() {
        return Ok(());
    }
    failing.sort_by_key(|record| record.origin != Origin::Shrunk);
    let texts = failing.iter().map(|record| sweep::failure_text(record));
    Err(texts.chain(skips.iter().map(skipped)).collect::<Vec<_>>().join("\n"))
}

/// Every planned case ran or was counted.
fn every_case_ran(
    operator: &AnyOperator,
    collected: &Collected,
    skips: &[Skip],
) -> Result<(), String> {
    let drawn_out = format!("drawn cases of {}", operator.name());
    let left_out: u64 =
        skips.iter().filter(|skip| skip.what == drawn_out).map(|skip| skip.count).sum();
    let (ran, planned) = (collected.records.len() as u64, collected.planned as u64);
    if ran + left_out == planned {
        return Ok(());
    }
    Err(format!("{planned} cases were planned, {ran} ran, {left_out} were skipped"))
}

/// Every path of the operator was taken, every check ran, and each had power. Some of the edge
/// cases may not be enough for that.
fn everything_was_met(operator: &AnyOperator, records: &[CaseRecord]) -> Result<(), String> {
    let described = operator.describe();
    let declared: BTreeSet<String> = described.paths.iter().cloned().collect();
    let ran: BTreeSet<String> = records.iter().flat_map(|record| record.paths.clone()).collect();
    if ran != declared {
        let never: Vec<_> = declared.difference(&ran).collect();
        let unknown: Vec<_> = ran.difference(&declared).collect();
        return Err(format!(
            "paths that no case took: {never:?}; paths that are not declared: {unknown:?}"
        ));
    }
    let made: BTreeSet<&str> =
        records.iter().flat_map(|r| &r.checks).map(|check| check.check.as_str()).collect();
    let of_gradients = if described.has_backward { &OF_GRADIENTS[..] } else { &[] };
    let rounded =
        |tensor: &TensorRecord| tensor.compared.as_ref().is_some_and(|how| how.contains("budget"));
    let of_rounded =
        if described.tensors.iter().any(rounded) { &OF_ROUNDED_TENSORS[..] } else { &[] };
    let has_sink_gradient = described.tensors.iter().any(|tensor| tensor.name == "dsink");
    let of_sinks = if has_sink_gradient { &OF_SINK_GRADIENTS[..] } else { &[] };
    let demanded = OF_EVERY_OPERATOR.iter().chain(of_gradients).chain(of_rounded).chain(of_sinks);
    let missing: Vec<_> = demanded.filter(|check| !made.contains(*check)).collect();
    if !missing.is_empty() {
        return Err(format!("no case came to the checks {missing:?}"));
    }
    let powerless = without_power(records);
    if !powerless.is_empty() {
        return Err(format!(
            "no case showed anything of {powerless:?}: rounding was as large as the values"
        ));
    }
    if !made.iter().any(|check| check.starts_with("law: ")) {
        return Err("no case came to a law".to_owned());
    }
    Ok(())
}
