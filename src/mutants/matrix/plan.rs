//! Which mutants run, which do not, and why.

use std::collections::BTreeSet;

use dsv4_runtime::{BackendKind, Environment, SourceTree};

use super::cases::{self, KnownCase};
use super::equivalent::{EquivalentError, Equivalents};
use super::trial::{NumberedCase, Subject, unjudged};
use crate::case::{Case, CaseError};
use crate::mutants::generated::{self, Class, GeneratedMutant, MutationError};
use crate::mutants::planted::Mutant;
use crate::operator::AnyOperator;
use crate::record::{Check, GeneratedRecord, MutantRecord, MutantStatus, Skip};

/// Options for the generated mutants.
#[derive(Clone, Copy, Debug)]
pub struct Choice {
    /// The most mutants of an operator; all where absent.
    pub sample: Option<usize>,
    /// Seed of the sample.
    pub seed: u64,
    /// Whether mutants listed as equivalent run too.
    pub run_equivalents: bool,
}

/// One operator's mutants.
#[derive(Default)]
pub struct Plan {
    /// The mutants to run, in this order.
    pub subjects: Vec<Subject>,
    /// The mutants that are listed as equivalent and do not run.
    pub equivalent: Vec<MutantRecord>,
    /// How many exist, and how many the sample skipped.
    pub counts: Option<GeneratedRecord>,
    /// What does not run, each with its reason.
    pub skips: Vec<Skip>,
}

/// All generated mutants of some operators, checked against the list of equivalent ones.
///
/// # Errors
/// A kernel that cannot be parsed; a list that is stale.
pub fn generate(
    tree: &SourceTree,
    operators: &[&str],
    equivalents: &Equivalents,
) -> Result<Vec<(String, Vec<GeneratedMutant>)>, PlanError> {
    let mut all = Vec::new();
    for operator in operators {
        all.push(((*operator).to_owned(), generated::generate(tree, operator)?));
    }
    let ids: BTreeSet<&str> =
        all.iter().flat_map(|(_, mutants)| mutants).map(|mutant| mutant.id.as_str()).collect();
    equivalents.check(&operators.iter().map(|name| (*name).to_owned()).collect(), &ids)?;
    Ok(all)
}

/// Why no plan is possible.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A kernel whose mutants cannot be generated.
    #[error(transparent)]
    Mutation(#[from] MutationError),
    /// The list of equivalent mutants.
    #[error(transparent)]
    Equivalent(#[from] EquivalentError),
}

/// Plans one operator: its planted mutants, and a sample of the generated ones that are not
/// equivalent.
///
/// # Errors
/// A planted mutant's case that cannot be read.
pub fn plan(
    operator: &AnyOperator,
    planted: &[Mutant],
    generated: Vec<GeneratedMutant>,
    known: &[KnownCase],
    equivalents: &Equivalents,
    choice: Choice,
    environment: &Environment,
) -> Result<Plan, CaseError> {
    let name = operator.name();
    let backend = environment.backend;
    let mut plan = Plan::default();
    for mutant in planted.iter().filter(|mutant| mutant.operator == name) {
        let cases =
            mutant.cases.iter().map(|line| Case::parse(line)).collect::<Result<Vec<_>, _>>()?;
        let cannot_run = cases.iter().find_map(|case| operator.cannot_run(case, environment));
        let hidden = || {
            let unseen = only_emulator_sees(&mutant.expected).then(|| EMULATOR_SEES.to_owned());
            unseen.or_else(|| mutant.hidden_on_gpu.clone()).filter(|_| backend == BackendKind::Cuda)
        };
        match cannot_run.or_else(hidden) {
            Some(why) => Skip::count(&mut plan.skips, format!("planted mutants of {name}"), &why),
            None => plan.subjects.push(Subject::Planted(Box::new(mutant.clone()))),
        }
    }
    let total = generated.len();
    let (runnable, unseen): (Vec<_>, Vec<_>) = generated
        .into_iter()
        .partition(|mutant| backend != BackendKind::Cuda || mutant.class != Class::Synchronization);
    for _ in &unseen {
        Skip::count(
            &mut plan.skips,
            format!("generated mutants of {name}, class synchronization"),
            EMULATOR_SEES,
        );
    }
    let (listed, counting): (Vec<_>, Vec<_>) = runnable
        .into_iter()
        .partition(|mutant| equivalents.reason(&mutant.id).is_some() && !choice.run_equivalents);
    for mutant in &listed {
        let reason = equivalents.reason(&mutant.id).unwrap_or_default().to_owned();
        plan.equivalent.push(MutantRecord {
            status: MutantStatus::Equivalent,
            reason,
            ..unjudged(mutant)
        });
    }
    let available = counting.len();
    let drawn = generated::sample(counting, choice.sample.unwrap_or(usize::MAX), choice.seed);
    let not_drawn = available - drawn.len();
    plan.counts = Some(GeneratedRecord {
        operator: name.to_owned(),
        generated: total as u64,
        not_drawn: not_drawn as u64,
        not_run: 0,
    });
    if not_drawn > 0 {
        let why = format!("--sample {}, seed {}", drawn.len(), choice.seed);
        let what = format!("generated mutants of {name}");
        plan.skips.push(Skip { what, why, count: not_drawn as u64 });
    }
    plan.subjects.extend(drawn.into_iter().map(|mutant| {
        let numbered =
            |one: &KnownCase| NumberedCase { number: one.number, case: one.case.clone() };
        let cases = cases::order(known, &mutant.kernels).into_iter().map(numbered).collect();
        Subject::Generated(Box::new(mutant), cases)
    }));
    Ok(plan)
}

const EMULATOR_SEES: &str = "guard pages and random schedules, which show them, are the emulator's";

/// Whether only the emulator has what a check needs.
fn only_emulator_sees(check: &Check) -> bool {
    matches!(check, Check::Launch | Check::ScheduleIndependent)
}
