//! Operators and cases without their types: the interface of the registry and of everything that
//! uses it.
//!
//! What an operator declares is called through [`Declaration`] and [`DeclaredCase`]. Only this part
//! is compiled once for each operator.

use std::collections::BTreeSet;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use dsv4_reference::Named;
use dsv4_reference::precision::Rounding;
use dsv4_reference::{Convention, Conventions};
use dsv4_runtime::{BackendKind, Device, Environment, HostTensor, RuntimeError, Views, tasks};
use proptest::strategy::{BoxedStrategy, Strategy as _};
use serde_json::Value;

use super::batches::{Batches, lot};
use super::benchmarks::{self, AnyBenchmark, Timed};
use super::declaration::Specs;
use super::declared::{About, Launches, Operator, Refused};
use super::golden::{Golden, Reading};
use super::inputs::Inputs;
use super::laws::Laws;
use super::layouts::{self, Layouts};
use super::lines::{
    Choices, SMS, SMS_OF_CASES, checked, field_error, has_invariant_path, line, read, too_large_on,
    within,
};
use super::size::{self, Limit};
use super::special::{self, Special};
use super::tensors::{Bound, Tensors};
use super::{
    Batched, GoldenCase, Law, ModuleSpecification, PreparedCase, Profile, documentation, limits,
    refusals,
};
use crate::case::{Case, CaseError};
use crate::operator::Family;
use crate::operator::fields::LARGEST_DRAWN;
use crate::operator::golden_file::GoldenFile;
use crate::record::{BatchAxis, OperatorRecord};

/// The SMs of a drawn case, by its seed: every second case has the default.
fn sms_of(seed: u64) -> Option<u32> {
    SMS_OF_CASES.get((seed / 2 % (2 * SMS_OF_CASES.len() as u64)) as usize).copied()
}

/// Typical cases that are run with dense tensors at addresses off by one.
const SHIFTED: usize = 2;

/// The case on an emulated device with one SM.
fn on_one_sm(mut case: Case) -> Case {
    case.fields.insert(SMS.to_owned(), 1.into());
    case
}

/// A case of any operator.
pub(super) type AnyCase = Arc<dyn DeclaredCase>;

/// What an operator declares for all cases: see [`Operator`].
pub(super) trait Declaration: Send + Sync {
    fn about(&self) -> &'static About;
    fn golden_kinds(&self) -> &'static [&'static str];
    fn chain(&self) -> &'static [&'static str];
    fn has_ranks(&self) -> bool;
    fn sum_lanes(&self) -> usize;
    fn conventions(&self) -> &'static [Convention];
    fn not_expressible(&self) -> &'static [(&'static str, &'static str)];
    /// Keeps fields that the operator does not know; the caller handles them.
    fn parse(&self, line: &Case) -> Result<AnyCase, CaseError>;
    fn strategy(&self, profile: Profile) -> BoxedStrategy<AnyCase>;
    fn typical(&self) -> Vec<AnyCase>;
    fn edge_cases(&self, profile: Profile) -> Vec<AnyCase>;
    fn long_cases(&self) -> Vec<AnyCase>;
    fn invariant_cases(&self) -> Vec<AnyCase>;
    fn golden(&self, file: &mut Reading<'_>) -> Result<Vec<Golden<AnyCase>>, String>;
    fn benchmarks(&self, environment: &Environment) -> Vec<AnyBenchmark>;
    fn reduced_benchmarks(&self, environment: &Environment) -> anyhow::Result<Vec<AnyBenchmark>>;
}

/// What an operator declares for one case: see [`Operator`].
pub(super) trait DeclaredCase: fmt::Debug + Send + Sync {
    fn operator(&self) -> &'static dyn Declaration;
    /// Without what the layer chooses of a case.
    fn line(&self) -> Case;
    fn check(&self) -> Result<(), Refused>;
    fn tensors(&self) -> Specs;
    fn cannot_run(&self, environment: &Environment) -> Option<String>;
    fn fastest(&self, environment: &Environment) -> AnyCase;
    fn invariantly(&self, environment: &Environment) -> AnyCase;
    fn amend(&self, tensors: &mut Tensors) -> dsv4_reference::Result<()>;
    fn forward(
        &self,
        tensors: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> dsv4_reference::Result<Named>;
    fn backward(
        &self,
        tensors: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> dsv4_reference::Result<Named>;
    fn backward_of_saved(
        &self,
        tensors: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> dsv4_reference::Result<Named>;
    fn workspaces(
        &self,
        views: &Views,
        device: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError>;
    fn launch(&self, views: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError>;
    fn launch_backward(&self, views: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError>;
    fn observe(
        &self,
        given: &Tensors,
        written: &Tensors,
        conventions: Conventions,
    ) -> Vec<(&'static str, HostTensor)>;
    fn oracle_elements(&self) -> u128;
    fn laws(&self, inputs: &Inputs) -> Vec<Law>;
    fn invariant(&self, path: bool) -> &'static [BatchAxis];
    fn batches(&self, inputs: &Inputs) -> Batched;
    fn is_smooth(&self) -> bool;
    fn bends_over(&self, tensors: &Tensors, input: &str) -> Option<Vec<f64>>;

    fn name(&self) -> &'static str {
        self.operator().about().name
    }
}

/// A typed case as a case of any operator.
pub(super) fn any<K: Operator>(case: K::Case) -> AnyCase {
    Arc::new(Of::<K>(case))
}

fn all<K: Operator>(cases: Vec<K::Case>) -> Vec<AnyCase> {
    cases.into_iter().map(any::<K>).collect()
}

struct Type<K>(PhantomData<fn() -> K>);

const fn declaration<K: Operator>() -> &'static dyn Declaration {
    const { &Type::<K>(PhantomData) }
}

impl<K: Operator> Declaration for Type<K> {
    fn about(&self) -> &'static About {
        &K::ABOUT
    }

    fn golden_kinds(&self) -> &'static [&'static str] {
        K::GOLDEN
    }

    fn chain(&self) -> &'static [&'static str] {
        K::CHAIN
    }

    fn has_ranks(&self) -> bool {
        K::RANKS
    }

    fn sum_lanes(&self) -> usize {
        K::SUM_LANES
    }

    fn conventions(&self) -> &'static [Convention] {
        K::CONVENTIONS
    }

    fn not_expressible(&self) -> &'static [(&'static str, &'static str)] {
        K::NOT_EXPRESSIBLE
    }

    fn parse(&self, line: &Case) -> Result<AnyCase, CaseError> {
        line.fields().map(any::<K>)
    }

    fn strategy(&self, profile: Profile) -> BoxedStrategy<AnyCase> {
        K::strategy(profile).prop_map(any::<K>).boxed()
    }

    fn typical(&self) -> Vec<AnyCase> {
        all::<K>(K::typical())
    }

    fn edge_cases(&self, profile: Profile) -> Vec<AnyCase> {
        all::<K>(K::edge_cases(profile))
    }

    fn long_cases(&self) -> Vec<AnyCase> {
        all::<K>(K::long_cases())
    }

    fn invariant_cases(&self) -> Vec<AnyCase> {
        all::<K>(K::invariant_cases())
    }

    fn golden(&self, file: &mut Reading<'_>) -> Result<Vec<Golden<AnyCase>>, String> {
        Ok(K::golden(file)?.into_iter().map(|golden| golden.of_any(any::<K>)).collect())
    }

    fn benchmarks(&self, environment: &Environment) -> Vec<AnyBenchmark> {
        K::benchmarks(environment).into_iter().map(AnyBenchmark::from).collect()
    }

    fn reduced_benchmarks(&self, environment: &Environment) -> anyhow::Result<Vec<AnyBenchmark>> {
        benchmarks::reduced::<K>(environment)
    }
}

struct Of<K: Operator>(K::Case);

impl<K: Operator> fmt::Debug for Of<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<K: Operator> DeclaredCase for Of<K> {
    fn operator(&self) -> &'static dyn Declaration {
        declaration::<K>()
    }

    fn line(&self) -> Case {
        Case::new(K::ABOUT.name, &self.0)
    }

    fn check(&self) -> Result<(), Refused> {
        K::check(&self.0)
    }

    fn tensors(&self) -> Specs {
        K::tensors(&self.0)
    }

    fn cannot_run(&self, environment: &Environment) -> Option<String> {
        K::cannot_run(&self.0, environment)
    }

    fn fastest(&self, environment: &Environment) -> AnyCase {
        any::<K>(K::fastest(&self.0, environment))
    }

    fn invariantly(&self, environment: &Environment) -> AnyCase {
        any::<K>(K::invariantly(&self.0, environment))
    }

    fn amend(&self, tensors: &mut Tensors) -> dsv4_reference::Result<()> {
        K::amend(&self.0, tensors)
    }

    fn forward(
        &self,
        tensors: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> dsv4_reference::Result<Named> {
        K::forward(&self.0, tensors, rounding)
    }

    fn backward(
        &self,
        tensors: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> dsv4_reference::Result<Named> {
        K::backward(&self.0, tensors, rounding)
    }

    fn backward_of_saved(
        &self,
        tensors: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> dsv4_reference::Result<Named> {
        K::backward_of_saved(&self.0, tensors, rounding)
    }

    fn workspaces(
        &self,
        views: &Views,
        device: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        K::workspaces(&self.0, views, device)
    }

    fn launch(&self, views: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        K::launch(&self.0, views, run)
    }

    fn launch_backward(&self, views: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        K::launch_backward(&self.0, views, run)
    }

    fn observe(
        &self,
        given: &Tensors,
        written: &Tensors,
        conventions: Conventions,
    ) -> Vec<(&'static str, HostTensor)> {
        K::observe(&self.0, given, written, conventions)
    }

    fn oracle_elements(&self) -> u128 {
        K::oracle_elements(&self.0)
    }

    fn laws(&self, inputs: &Inputs) -> Vec<Law> {
        let mut laws = Laws::new(&self.0, inputs);
        K::laws(&self.0, &mut laws);
        laws.finish()
    }

    fn invariant(&self, path: bool) -> &'static [BatchAxis] {
        K::invariant(&self.0, path)
    }

    fn batches(&self, inputs: &Inputs) -> Batched {
        let mut batches = Batches::new(&self.0, inputs);
        K::batches(&self.0, &mut batches);
        batches.finish()
    }

    fn is_smooth(&self) -> bool {
        K::is_smooth(&self.0)
    }

    fn bends_over(&self, tensors: &Tensors, input: &str) -> Option<Vec<f64>> {
        K::bends_over(&self.0, tensors, input)
    }
}

/// Any operator: an entry of the registry.
pub struct AnyOperator(pub(super) &'static dyn Declaration);

impl AnyOperator {
    /// The operator that `K` declares.
    pub const fn of<K: Operator>() -> Self {
        Self(declaration::<K>())
    }

    /// What it declares for all cases.
    pub(super) fn declaration(&self) -> &'static dyn Declaration {
        self.0
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        self.0.about().name
    }

    /// The part of the model that it belongs to.
    pub fn family(&self) -> Family {
        self.0.about().family
    }

    /// What it computes, in one sentence.
    pub fn summary(&self) -> &'static str {
        self.0.about().summary
    }

    /// Name, files, types, axes. Gathering them prepares many of its cases: call it only for more
    /// than the name.
    pub fn describe(&self) -> OperatorRecord {
        documentation::of(self.0)
    }

    /// The operators whose launches it composes, where it has no kernel of its own.
    pub fn chain(&self) -> &'static [&'static str] {
        self.0.chain()
    }

    /// Whether several ranks compute it, each in a process of its own.
    pub fn has_ranks(&self) -> bool {
        self.0.has_ranks()
    }

    /// Draws cases of at most [`LARGEST_DRAWN`] elements for each result; shrinks towards the
    /// smallest.
    pub fn strategy(&self, profile: Profile) -> BoxedStrategy<Case> {
        let layouts = layouts::strategy(layouts::MOST_TENSORS);
        let has_ranks = self.has_ranks();
        let cases = self.0.strategy(profile).prop_filter("too large", |case| is_drawn(&**case));
        (cases, layouts, special::strategy())
            .prop_map(move |(case, layouts, special)| {
                // A rejected case fails when it runs: it has no tensors to lay out.
                let Ok(specs) = checked(&*case) else { return case.line() };
                let special = special.filter(|special| special.fits(&specs));
                let (layouts, sms) = match has_ranks {
                    // As for edge cases.
                    true => (Layouts::new(), None),
                    false => (layouts::resolve(&specs, &layouts), sms_of(specs.seed)),
                };
                // Every third case takes the invariant path, where there is one. The line decides,
                // so that a seed draws the same cases of other operators.
                let invariant = has_invariant_path(&*case) && lot(&case.line()).is_multiple_of(3);
                line(&*case, &Choices { layouts, special, sms, invariant })
            })
            .boxed()
    }

    /// One small case for each way in which the operator is used, with gaps between rows.
    pub fn typical_cases(&self) -> Vec<Case> {
        self.0.typical().iter().map(with_unlike_gaps).collect()
    }

    /// Cases that every sweep runs first, because chance must not skip them.
    pub fn edge_cases(&self, profile: Profile) -> Vec<Case> {
        if self.has_ranks() {
            // Ranks get dense copies of their tokens. Sizes and SMs that the kernels tell apart are
            // cases of the operators whose kernels they are.
            let own = self.0.edge_cases(profile);
            let own = own.iter().map(|case| case.line());
            return own.chain(special_in_turn(&self.0.typical())).collect();
        }
        let (own, grown) = (self.0.edge_cases(profile), limits::edge_cases(self.0, profile));
        let known: Vec<AnyCase> = own.iter().chain(&grown).cloned().collect();
        let long_already: Vec<AnyCase> = grown.iter().step_by(2).cloned().collect();
        let limits::Beyond { tiles, long } =
            limits::beyond_tiles(self.0, profile, &known, &long_already);
        let beyond = tiles.into_iter().chain(limits::of_production(self.0, &known));
        let own = own.into_iter().chain(beyond).map(|case| with_unlike_gaps(&case));
        // Every second one has all its work tiles in one block.
        let grown = grown.into_iter().enumerate().map(|(turn, case)| {
            let case = with_unlike_gaps(&case);
            if turn % 2 == 0 { on_one_sm(case) } else { case }
        });
        let long = self.0.long_cases().into_iter().chain(long);
        let long = long.map(|case| on_one_sm(with_unlike_gaps(&case)));
        let asked = self.0.invariant_cases();
        let asked = asked.iter().filter_map(asked_for_invariance);
        let own = own.chain(grown).chain(long).chain(asked);
        let varied = self.0.typical().into_iter().flat_map(|case| {
            let specs = case.tensors();
            let special = Special::OF_CLAMPS
                .into_iter()
                .filter(|special| special.fits(&specs))
                .map(with_special);
            let laid_out = layouts::edge_cases(&specs).into_iter();
            let laid_out = laid_out.map(|layouts| Choices { layouts, ..Choices::default() });
            let choices: Vec<Choices> = special.chain(laid_out).collect();
            choices.into_iter().map(move |choices| line(&*case, &choices))
        });
        // Addresses alone forbid wide accesses.
        let shifted = self.0.typical().into_iter().take(SHIFTED).filter_map(|case| {
            let layouts = layouts::dense_off_by_one(&case.tensors());
            let choices = Choices { layouts, ..Choices::default() };
            (!choices.layouts.is_empty()).then(|| line(&*case, &choices))
        });
        let gridded = self.with_other_sms().chain(shifted);
        own.chain(varied).chain(special_in_turn(&self.0.typical())).chain(gridded).collect()
    }

    /// The typical cases on emulated devices with other numbers of SMs: the first on each, every
    /// other on one of them.
    fn with_other_sms(&self) -> impl Iterator<Item = Case> {
        let of_case = |(at, case): (usize, AnyCase)| {
            let (from, most) = if at == 0 { (0, SMS_OF_CASES.len()) } else { (at, 1) };
            let chosen = SMS_OF_CASES.into_iter().cycle().skip(from).take(most);
            chosen
                .map(move |sms| line(&*case, &Choices { sms: Some(sms), ..Choices::default() }))
                .collect::<Vec<_>>()
        };
        self.0.typical().into_iter().enumerate().flat_map(of_case)
    }

    /// Whether a tensor of the case has no elements.
    ///
    /// # Errors
    /// A field that the operator cannot take.
    pub fn has_an_empty_tensor(&self, case: &Case) -> Result<bool, CaseError> {
        let (case, _) = read(self.0, case)?;
        Ok(case.tensors().present().any(|spec| spec.elements() == 0))
    }

    /// Whether the case differs from another one only on an emulated device.
    pub fn is_for_the_emulator(&self, case: &Case) -> bool {
        case.fields.contains_key(SMS)
    }

    /// A small case with data, as an example for users.
    pub fn example(&self) -> Case {
        self.0.typical()[0].line()
    }

    /// The case dense, and with every tensor in a non-dense layout ([`layouts::spread`]).
    ///
    /// # Errors
    /// A field that the operator cannot take.
    pub fn laid_out(&self, case: &Case) -> Result<[Case; 2], CaseError> {
        let (case, choices) = read(self.0, case)?;
        let spread = layouts::spread(&case.tensors());
        Ok([Layouts::new(), spread]
            .map(|layouts| line(&*case, &Choices { layouts, ..choices.clone() })))
    }

    /// Whether the case is valid, without making its data.
    ///
    /// # Errors
    /// A field that the operator cannot take.
    pub fn check(&self, case: &Case) -> Result<(), CaseError> {
        read(self.0, case).map(drop)
    }

    /// The default number of cases that a sweep draws.
    pub fn default_cases(&self, profile: Profile) -> usize {
        match profile {
            Profile::Smoke => 0,
            _ => profile.of(self.0.about().cases),
        }
    }

    /// Every module that its launcher may compile, for checks without a GPU.
    pub fn modules(&self) -> Vec<ModuleSpecification> {
        (self.0.about().modules)()
    }

    /// Why a case cannot run on a device like this one, such as kernels of another GPU generation.
    /// `None` where it can. A sweep counts such cases as skips.
    pub fn cannot_run(&self, case: &Case, environment: &Environment) -> Option<String> {
        // An invalid case is not a skip: preparing it reports the error.
        let (line, (case, choices)) = (case, read(self.0, case).ok()?);
        let ranks = line.fields.get("ranks").filter(|_| self.has_ranks()).and_then(Value::as_u64);
        if let Some(why) = ranks.and_then(|ranks| tasks::too_many(ranks as usize)) {
            return Some(why);
        }
        if choices.invariant && environment.backend == BackendKind::External {
            return Some("an external kernel has no second path".to_owned());
        }
        let too_large = |specs: &Specs| {
            let of_this_process = within(&*case, specs, &choices.layouts, size::limit());
            // The case's own text names its values, but skips are counted by reason.
            let why = || {
                format!(
                    "it takes more than the {} of memory that a case may (--memory)",
                    size::limit()
                )
            };
            too_large_on(environment, specs, &choices.layouts, 1)
                .or_else(|| of_this_process.err().map(|_| why()))
        };
        case.cannot_run(environment).or_else(|| too_large(&case.tensors()))
    }

    /// Makes the inputs of a case, if its memory is within the limit of this process
    /// ([`size::limit`]).
    ///
    /// # Errors
    /// A field that the operator cannot take; a case that takes more.
    pub fn prepare(&self, case: &Case) -> Result<Box<dyn PreparedCase>, CaseError> {
        self.prepare_within(case, size::limit())
    }

    /// Makes the inputs of a case, if its memory is within this limit: on the host, on the emulator
    /// and in the oracle together. Nothing is allocated before the check.
    ///
    /// # Errors
    /// As [`Self::prepare`].
    pub fn prepare_within(
        &self,
        case: &Case,
        limit: Limit,
    ) -> Result<Box<dyn PreparedCase>, CaseError> {
        Ok(Box::new(self.drawn_within(case, limit)?))
    }

    /// The drawn inputs of a case, if its memory is within this limit.
    pub(super) fn drawn_within(&self, case: &Case, limit: Limit) -> Result<Inputs, CaseError> {
        let (case, choices) = read(self.0, case)?;
        within(&*case, &case.tensors(), &choices.layouts, limit)
            .map_err(|refused| field_error(case.name(), refused))?;
        Inputs::draw(case, choices)
    }

    /// An upper bound of the bytes that the case takes of the machine's memory.
    ///
    /// # Errors
    /// A field that the operator cannot take.
    pub fn bytes(&self, case: &Case) -> Result<u128, CaseError> {
        let (case, choices) = read(self.0, case)?;
        Ok(size::bytes_of(&case.tensors(), &choices.layouts, case.oracle_elements()))
    }

    /// Elements of all tensors of a case and of what one run of its oracle holds in addition. The
    /// time of a case grows with it. The same on every machine.
    ///
    /// # Errors
    /// A field that the operator cannot take.
    pub fn elements(&self, case: &Case) -> Result<u128, CaseError> {
        let (case, _) = read(self.0, case)?;
        Ok(size::elements_of(&case.tensors(), case.oracle_elements()))
    }

    /// The kinds of golden files for it ([`GoldenFile::operator`]).
    pub fn golden_kinds(&self) -> &'static [&'static str] {
        self.0.golden_kinds()
    }

    /// The cases that a golden file gives for this operator; none for a file of another operator.
    ///
    /// # Errors
    /// A file of [`Self::golden_kinds`] that does not fit, or that gives no case.
    pub fn golden(&self, file: &GoldenFile) -> Result<Vec<GoldenCase>, CaseError> {
        if !self.golden_kinds().contains(&file.operator.as_str()) {
            return Ok(Vec::new());
        }
        let cases = self.0.golden(&mut Reading::of(file));
        let cases =
            cases.map_err(|reason| CaseError::Malformed(format!("{}: {reason}", file.name)))?;
        if cases.is_empty() {
            let (name, file) = (self.name(), &file.name);
            return Err(CaseError::Malformed(format!(
                "{file} is about `{name}`, which makes no case of it"
            )));
        }
        cases.into_iter().map(|golden| golden.finish(file)).collect()
    }

    /// Corrupts the launchers' arguments one by one, and reports the result of each.
    ///
    /// # Errors
    /// Arguments that cannot be made, or that are rejected before they are corrupted.
    pub fn refusals(&self, device: &Device) -> Result<Vec<refusals::Refusal>, CaseError> {
        if self.chain().is_empty() { refusals::of(self.0, device) } else { Ok(Vec::new()) }
    }

    /// The benchmarks on a device like this one.
    pub fn benchmarks(&self, environment: &Environment) -> Vec<Box<dyn Timed>> {
        let all = self.0.benchmarks(environment).into_iter();
        let both = all.flat_map(|one| {
            let invariant = one.by_invariant_path(environment);
            [Some(one), invariant].into_iter().flatten()
        });
        both.map(AnyBenchmark::timed).collect()
    }

    /// Those of a GPU like this one at a size for the emulator.
    ///
    /// # Errors
    /// A declaration that names no benchmark of its own, or no fields of its cases.
    pub fn reduced_benchmarks(
        &self,
        environment: &Environment,
    ) -> anyhow::Result<Vec<Box<dyn Timed>>> {
        let all = self.0.reduced_benchmarks(environment)?;
        Ok(all.into_iter().map(AnyBenchmark::timed).collect())
    }
}

/// Whether a sweep draws the case: its results are no larger than [`LARGEST_DRAWN`]. What is only
/// given may be four times as large, since no oracle run has a copy of it. A rejected case fails
/// when it runs.
fn is_drawn(case: &dyn DeclaredCase) -> bool {
    let fits = |specs: Specs| {
        specs.compared().all(|spec| spec.elements() <= LARGEST_DRAWN)
            && specs.present().all(|spec| spec.elements() <= 4 * LARGEST_DRAWN)
    };
    checked(case).map_or(true, fits)
}

/// The case with gaps between rows: its kernels get strides that differ from the sizes, and no two
/// tensors have the same ones.
fn with_unlike_gaps(case: &AnyCase) -> Case {
    let layouts = layouts::unlike_gaps(&case.tensors());
    line(&**case, &Choices { layouts, ..Choices::default() })
}

/// The case on its invariant path, if there is one.
fn asked_for_invariance(case: &AnyCase) -> Option<Case> {
    let asked = Choices { invariant: true, ..Choices::default() };
    has_invariant_path(&**case).then(|| line(&**case, &asked))
}

fn with_special(special: Special) -> Choices {
    Choices { special: Some(special), ..Choices::default() }
}

/// The special values of each tensor, distributed over the typical cases in turn.
fn special_in_turn(typical: &[AnyCase]) -> Vec<Case> {
    let all: BTreeSet<_> =
        typical.iter().flat_map(|case| Special::of_each_tensor(&case.tensors())).collect();
    let turns = all.into_iter().enumerate().filter_map(|(turn, special)| {
        let mut cases = (0..typical.len()).map(|i| &typical[(turn + i) % typical.len()]);
        let case = cases.find(|case| special.fits(&case.tensors()))?;
        Some(line(&**case, &with_special(special)))
    });
    turns.collect()
}

#[cfg(test)]
mod tests {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    use super::*;
    use crate::operators::registry;

    /// How many of a hundred drawn cases are small enough.
    fn share<T: fmt::Debug>(strategy: &BoxedStrategy<T>, is_small: impl Fn(T) -> bool) -> usize {
        let mut runner = TestRunner::deterministic();
        let mut drawn = || strategy.new_tree(&mut runner).expect("a case").current();
        (0..100).filter(|_| is_small(drawn())).count()
    }

    #[test]
    fn no_drawn_result_is_larger_than_its_limit_and_few_draws_are_thrown_away() {
        let mut thrown_away = 0;
        for operator in registry::select(None).expect("all operators") {
            let profile = Profile::Full;
            let declared = share(&operator.0.strategy(profile), |case| is_drawn(&*case));
            assert!(declared >= 25, "{}: {declared} of 100", operator.name());
            thrown_away += 100 - declared;
            let drawn = share(&operator.strategy(profile), |line| {
                is_drawn(&*read(operator.0, &line).expect("a case").0)
            });
            assert_eq!(drawn, 100, "{}", operator.name());
        }
        assert!(thrown_away > 0, "the limit does nothing");
    }
}
