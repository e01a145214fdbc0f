//! One mutant on its cases. `parity mutants --trial` reads a trial as a line of JSON from standard
//! input. It answers with lines of JSON: a sign of life before each case, and the record.

use std::collections::BTreeSet;
use std::io::Write;

use dsv4_runtime::Device;
use serde::{Deserialize, Serialize};

use crate::case::{Case, CaseError};
use crate::judge::checks::{self, CheckOptions, Outcome};
use crate::mutants::generated::GeneratedMutant;
use crate::mutants::planted::{Mutant, MutantError};
use crate::operator::ModuleSpecification;
use crate::operators::registry;
use crate::record::{Check, CheckRecord, MutantRecord, MutantSource, MutantStatus, Verdict};

/// The request to a child process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Trial {
    /// The mutant.
    pub subject: Subject,
    /// Random schedules of each case (emulator).
    pub schedules: u32,
    /// Whether to make all checks of each case, and to continue after the first case that kills.
    /// Otherwise checks are those of a sweep.
    pub all_checks: bool,
}

/// A case, and its number among those of its operator.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NumberedCase {
    /// The number, which a sweep's checks of a case depend on.
    pub number: u64,
    /// The case.
    pub case: Case,
}

/// All checks of case number `number` that show whether kernels are right, or those of a sweep.
pub fn checks_of(schedules: u32, all: bool, device: &Device, number: u64) -> CheckOptions {
    let checks = CheckOptions::of_kernels(schedules);
    if all { checks } else { checks.in_a_sweep(device.environment().backend, number) }
}

/// A mutant of either kind.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    /// A planted mutant with its own cases.
    Planted(Box<Mutant>),
    /// A generated mutant with the cases that it runs, in this order.
    Generated(Box<GeneratedMutant>, Vec<NumberedCase>),
}

impl Subject {
    /// The mutant's id.
    pub fn id(&self) -> &str {
        match self {
            Self::Planted(mutant) => &mutant.id,
            Self::Generated(mutant, _) => &mutant.id,
        }
    }
}

/// One line of a child's answer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The case of this number is about to run.
    Case(u64),
    /// The result of the mutant.
    Record(Box<MutantRecord>),
}

/// The record of a generated mutant before its result is known.
pub fn unjudged(mutant: &GeneratedMutant) -> MutantRecord {
    MutantRecord {
        id: mutant.id.clone(),
        operator: mutant.operator.clone(),
        summary: mutant.summary.clone(),
        source: MutantSource::Generated,
        class: mutant.class.name().to_owned(),
        file: mutant.file.clone(),
        line: mutant.line as u64,
        original: mutant.original.clone(),
        mutated: mutant.mutated.clone(),
        ..MutantRecord::default()
    }
}

/// Runs a trial; `alive` receives the number of each case of a generated mutant before the case
/// runs.
///
/// # Errors
/// A planted mutant's anchor that does not match, or a case that cannot be prepared.
pub fn run(
    trial: &Trial,
    device: &Device,
    mut alive: impl FnMut(u64),
) -> Result<MutantRecord, MutantError> {
    match &trial.subject {
        Subject::Planted(mutant) => match mutant.run(device, trial.schedules) {
            Err(MutantError::NotRun { message, .. }) => Ok(MutantRecord {
                status: MutantStatus::Invalid,
                reason: message,
                ..mutant.unjudged(device.tree())
            }),
            judged => judged,
        },
        Subject::Generated(mutant, cases) => {
            let refused = |source| MutantError::Case { id: mutant.id.clone(), source };
            let planted = mutant
                .plant(device.tree())
                .map_err(|e| refused(CaseError::Malformed(e.to_string())))?;
            let mutated = device.with_tree(planted);
            let mut record = unjudged(mutant);
            let mut killed_by = BTreeSet::new();
            for NumberedCase { number, case } in cases {
                let options = checks_of(trial.schedules, trial.all_checks, device, *number);
                alive(record.cases_run);
                let prepared = registry::prepare(case).map_err(refused)?;
                let outcome = checks::run(&*prepared, &mutated, options);
                record.cases_run += 1;
                if let Some(error) = not_launched(&outcome) {
                    return Ok(MutantRecord {
                        status: MutantStatus::Invalid,
                        reason: error,
                        ..record
                    });
                }
                let mut seen =
                    outcome.failures().filter(|check| check.verdict == Verdict::Fail).peekable();
                if let (true, Some(first)) = (killed_by.is_empty(), seen.peek()) {
                    (record.killing_case, record.reason) = (case.line(), first.message.clone());
                }
                killed_by.extend(seen.map(|check| check.check.clone()));
                if !killed_by.is_empty() && !trial.all_checks {
                    break;
                }
            }
            if killed_by.is_empty()
                && let Some(reason) =
                    same_code(mutant, device, &mutated, || alive(record.cases_run))
            {
                return Ok(MutantRecord { status: MutantStatus::Equivalent, reason, ..record });
            }
            let status =
                if killed_by.is_empty() { MutantStatus::Survived } else { MutantStatus::Killed };
            Ok(MutantRecord { status, killed_by: killed_by.into_iter().collect(), ..record })
        }
    }
}

/// Why the kernels could not be launched, if they could not. A mutant that does not compile, or
/// whose launch is rejected, shows nothing about the checks.
fn not_launched(outcome: &Outcome) -> Option<String> {
    let error =
        |check: &&CheckRecord| check.verdict == Verdict::Error && check.check == Check::Launch;
    outcome.failures().find(error).map(|check| check.message.clone())
}

/// Why a mutant is equivalent, if the compiler makes the same code of it as of the kernel in every
/// module of its operator. An example is a change in a template's branch that the operator's
/// kernels do not take. `alive` is called before each module.
fn same_code(
    mutant: &GeneratedMutant,
    right: &Device,
    mutated: &Device,
    mut alive: impl FnMut(),
) -> Option<String> {
    let reads = |(file, _): &&ModuleSpecification| {
        let headers = right.tree().headers_of(file).unwrap_or_default();
        *file == mutant.file || headers.contains(&mutant.file.as_str())
    };
    let modules = registry::find(&mutant.operator).ok()?.modules();
    let concerned: Vec<_> = modules.iter().filter(reads).collect();
    let is_same = |module: &&ModuleSpecification| {
        alive();
        let assembly = |device: &Device| device.assembly(module).ok().flatten();
        assembly(mutated).is_some_and(|code| assembly(right) == Some(code))
    };
    let all_are = !concerned.is_empty() && concerned.iter().all(is_same);
    all_are.then(|| {
        format!("The compiler makes the same code of it, in all of {} modules.", concerned.len())
    })
}

/// Serves one trial: reads it from `input`, answers on `output`.
///
/// # Errors
/// A line that is not a trial, an answer that cannot be written, and those of [`run`].
pub fn serve(input: &str, device: &Device, output: &mut impl Write) -> anyhow::Result<()> {
    let trial: Trial = serde_json::from_str(input)?;
    let record = run(&trial, device, |number| {
        // A parent that has ended needs no sign of life.
        let _ = writeln!(
            output,
            "{}",
            serde_json::to_string(&Answer::Case(number)).unwrap_or_default()
        );
        let _ = output.flush();
    })?;
    writeln!(output, "{}", serde_json::to_string(&Answer::Record(Box::new(record)))?)?;
    Ok(output.flush()?)
}
