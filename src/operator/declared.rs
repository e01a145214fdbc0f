//! An operator as a declaration: its case type, its tensors, its oracle, its launches and its laws.
//!
//! [`Operator`] is what an operator's file implements. Everything else is derived from it, once for
//! all operators, through [`AnyOperator`](super::any::AnyOperator), which does not know the case
//! types.

use std::borrow::Cow;

use dsv4_reference::Named;
use dsv4_reference::precision::Rounding;
use dsv4_reference::{Convention, Conventions};
use dsv4_runtime::arena::Violation;
use dsv4_runtime::{
    Contract, Device, DeviceArena, Environment, HostTensor, RuntimeError, TensorView, Views,
};
use proptest::strategy::BoxedStrategy;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::batches::Batches;
use super::benchmarks::{Benchmark, Reduced};
use super::declaration::Specs;
#[cfg(doc)]
use super::declaration::{Part, TensorSpec};
use super::elsewhere::Elsewhere;
use super::golden::{Golden, Reading};
use super::laws::Laws;
use super::tensors::{Bound, Tensors};
use super::{ModuleSpecification, Profile};
#[cfg(doc)]
use crate::operator::golden_file::GoldenFile;
use crate::record::{BatchAxis, Family};

/// Facts about an operator that hold for every case.
#[derive(Clone, Copy, Debug)]
pub struct About {
    /// Its name: the same for its kernel file, launcher, oracle and operator file.
    pub name: &'static str,
    /// The part of the model that it belongs to.
    pub family: Family,
    /// One sentence.
    pub summary: &'static str,
    /// Sections of the specification.
    pub specification: &'static [&'static str],
    /// Every path that a record may report.
    pub paths: &'static [&'static str],
    /// Every module that its launchers may compile.
    pub modules: fn() -> Vec<ModuleSpecification>,
    /// How many cases a sweep draws: quick, ci, full.
    pub cases: [usize; 3],
}

/// A field of a case that its operator cannot take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The field; those of a part of the case with the part's name before them.
    pub field: Cow<'static, str>,
    /// Its value, and the rule.
    pub reason: String,
}

/// Rejects a field of a case.
///
/// # Errors
/// Always.
pub fn refuse<T>(field: &'static str, reason: impl Into<String>) -> Result<T, Refused> {
    Err(Refused { field: field.into(), reason: reason.into() })
}

/// Requires a number of a case to be finite and above 0.
///
/// # Errors
/// It is not.
pub fn positive(field: &'static str, value: f64) -> Result<(), Refused> {
    if value.is_finite() && value > 0.0 {
        Ok(())
    } else {
        refuse(field, format!("{value} must be finite and above 0"))
    }
}

/// Requires a number of a case to be finite.
///
/// # Errors
/// It is not.
pub fn finite(field: &'static str, value: f64) -> Result<(), Refused> {
    if value.is_finite() { Ok(()) } else { refuse(field, format!("{value} must be finite")) }
}

/// Largest shift of logits. Softmax in fp32 sees their differences to 2^-24 of it.
const LARGEST_SHIFT: f64 = 4096.0;

/// Requires a shift of logits to leave softmax in fp32 something of their differences.
///
/// # Errors
/// It is not finite, or larger than 4096.
pub fn shift_of_logits(field: &'static str, value: f64) -> Result<(), Refused> {
    if value.abs() <= LARGEST_SHIFT {
        return Ok(());
    }
    refuse(field, format!("{value} must be a number from -{LARGEST_SHIFT} to {LARGEST_SHIFT}"))
}

/// Requires an extent of a case not to be 0.
///
/// # Errors
/// It is.
pub fn not_empty(field: &'static str, extent: usize) -> Result<(), Refused> {
    if extent > 0 { Ok(()) } else { refuse(field, "0: there must be at least one") }
}

/// Default limit on the elements of the largest input for finite differences.
const SMOOTH_ELEMENTS: usize = 4096;

/// An operator: a declaration, an oracle, launches and laws.
pub trait Operator: Sized + Send + Sync + 'static {
    /// One comparison: sizes, types, classes of data, a seed. Plain data, one line of JSON.
    type Case: Serialize + DeserializeOwned + Clone + std::fmt::Debug + Send + Sync + 'static;

    /// Name, specification, paths, sizes of sweeps.
    const ABOUT: About;

    /// The kinds of golden files for this operator ([`GoldenFile::operator`]). Every such file
    /// becomes cases of it.
    const GOLDEN: &'static [&'static str] = &[];

    /// For a chain without a kernel of its own: the operators whose launches it composes, in order.
    /// Their kernels are mutated and their launchers tested with bad arguments under their own
    /// names.
    const CHAIN: &'static [&'static str] = &[];

    /// Whether several ranks compute it, each in a process of its own. Then it is no function of a
    /// caller's tensors on one device.
    const RANKS: bool = false;

    /// The least number of lanes in which its kernels add the values of a row. The lanes are added
    /// as a tree ([`dsv4_reference::precision`]). 1 declares nothing.
    const SUM_LANES: usize = 1;

    /// What other kernels do otherwise, where the oracle can follow them: an adapter declares it.
    const CONVENTIONS: &'static [Convention] = &[];

    /// What public kernels of the same name compute, and no case of it can: what, and why not.
    /// `parity ops NAME` prints it.
    const NOT_EXPRESSIBLE: &'static [(&'static str, &'static str)] = &[];

    /// The tensors of a case. Called for cases that passed [`Operator::check`].
    fn tensors(case: &Self::Case) -> Specs;

    /// Checks that the fields of a case fit together. Its tensors declare other rules: limits of an
    /// axis, and values that are positive or finite. Sizes need no upper bound: the layer bounds
    /// every tensor.
    ///
    /// # Errors
    /// The field, its value and the rule.
    fn check(_case: &Self::Case) -> Result<(), Refused> {
        Ok(())
    }

    /// Draws cases; shrinks towards the smallest.
    fn strategy(profile: Profile) -> BoxedStrategy<Self::Case>;

    /// Small cases, one for each family of kernels. The layer varies their layouts in every sweep.
    /// It also corrupts their arguments one by one, which launchers must reject.
    fn typical() -> Vec<Self::Case>;

    /// Cases that every sweep runs, because chance must not leave them out.
    fn edge_cases(profile: Profile) -> Vec<Self::Case>;

    /// Cases in which one block has very many work tiles. They are edge cases on an emulated device
    /// with one SM, where a small case has a block with a long loop.
    fn long_cases() -> Vec<Self::Case> {
        Vec::new()
    }

    /// Why a case cannot run on a device like this one; `None` where it can.
    fn cannot_run(_case: &Self::Case, _environment: &Environment) -> Option<String> {
        None
    }

    /// The same call with the fastest kernels that run on a device like this one, for as much of it
    /// as they can compute. Another kernel's time is compared with it. The case itself where it
    /// chooses no kernel.
    fn fastest(case: &Self::Case, _environment: &Environment) -> Self::Case {
        case.clone()
    }

    /// The same call with the kernels that an invariant device's launchers choose for it, where they
    /// choose others than for its size alone: what invariance costs is measured on them.
    fn invariantly(case: &Self::Case, _environment: &Environment) -> Self::Case {
        case.clone()
    }

    /// Sets what no distribution generates: lists, tables, zero rows, rows that no kernel may read.
    ///
    /// # Errors
    /// The oracle's, where inputs are computed by it.
    fn amend(_case: &Self::Case, _tensors: &mut Tensors) -> dsv4_reference::Result<()> {
        Ok(())
    }

    /// The oracle's outputs.
    ///
    /// # Errors
    /// What the oracle rejects.
    fn forward(
        case: &Self::Case,
        tensors: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> dsv4_reference::Result<Named>;

    /// The oracle's gradients, by its written-out formulas; nothing where the operator has no
    /// backward.
    ///
    /// # Errors
    /// What the oracle rejects.
    fn backward(
        _case: &Self::Case,
        _tensors: &Bound<'_>,
        _rounding: &mut Rounding,
    ) -> dsv4_reference::Result<Named> {
        Ok(Named::new())
    }

    /// Gradients that follow at small cost from what kernels saved. The tensors hold the inputs and
    /// everything that the kernels wrote. This comparison shows errors far below the rounding of
    /// what was saved, such as those of a small sink. Rounding points are those of
    /// [`Operator::backward`].
    ///
    /// # Errors
    /// What the oracle rejects.
    fn backward_of_saved(
        _case: &Self::Case,
        _tensors: &Bound<'_>,
        _rounding: &mut Rounding,
    ) -> dsv4_reference::Result<Named> {
        Ok(Named::new())
    }

    /// Bytes of the workspaces that the launches need, by name. They are placed after all other
    /// tensors.
    ///
    /// # Errors
    /// The launcher's.
    fn workspaces(
        _case: &Self::Case,
        _views: &Views,
        _device: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        Ok(Vec::new())
    }

    /// Launches the forward. What it writes is frozen before [`Operator::launch_backward`].
    ///
    /// # Errors
    /// What the launcher rejects, and what the kernel did wrong.
    fn launch(case: &Self::Case, views: &Views, run: &mut Launches<'_>)
    -> Result<(), RuntimeError>;

    /// Launches the backward, where one exists. An input that the forward overwrote, as declared,
    /// has its original values.
    ///
    /// # Errors
    /// As [`Operator::launch`].
    fn launch_backward(
        _case: &Self::Case,
        _views: &Views,
        _run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        Ok(())
    }

    /// What stored bytes mean: the tensors of [`Part::Observed`], in the order of their
    /// declaration. Computed from the given tensors and everything that the kernels or the oracle
    /// wrote, by the conventions of the kernels.
    fn observe(
        _case: &Self::Case,
        _given: &Tensors,
        _written: &Tensors,
        _conventions: Conventions,
    ) -> Vec<(&'static str, HostTensor)> {
        Vec::new()
    }

    /// Elements that one run of the oracle holds at the same time in addition to the tensors of the
    /// case. An example is the gathered rows of lists. A case is rejected before that takes too
    /// much memory. `None` where it is not declared.
    fn oracle_elements(_case: &Self::Case) -> u128 {
        0
    }

    /// Relations between the case and variants of it that need no oracle.
    fn laws(_case: &Self::Case, _laws: &mut Laws<'_, Self>) {}

    /// The axes along which the kernels of this case are invariant: bits of a row do not depend on
    /// the batch. What is declared is checked. Along others a difference is measured and shown.
    /// `path`: whether the launchers are asked for their invariant paths ([`Device::invariant`]).
    fn invariant(_case: &Self::Case, _path: bool) -> &'static [BatchAxis] {
        &[]
    }

    /// Cases that every sweep runs on the invariant path, where they have one.
    fn invariant_cases() -> Vec<Self::Case> {
        Self::typical()
    }

    /// The rows of the case in other batches. Default: those that the layer makes of the axis of
    /// rows.
    fn batches(_case: &Self::Case, batches: &mut Batches<'_, Self>) {
        batches.of_rows();
    }

    /// Whether the oracle's gradients of this case can be triangulated: it must be smooth and
    /// small. Finite differences run the oracle dozens of times, and large cases show nothing more.
    fn is_smooth(case: &Self::Case) -> bool {
        Self::tensors(case).gradients().all(|(input, _)| input.elements() <= SMOOTH_ELEMENTS)
    }

    /// The distance over which the oracle bends, for each element of a differentiable input. `None`
    /// means that its declaration ([`TensorSpec::clamped`]) or its own size gives it. Infinite
    /// where the element has no effect: the step then follows the input's size.
    fn bends_over(_case: &Self::Case, _tensors: &Tensors, _input: &str) -> Option<Vec<f64>> {
        None
    }

    /// The cases that a golden file of [`Self::GOLDEN`] gives for this operator.
    ///
    /// # Errors
    /// A file that does not fit.
    fn golden(_file: &mut Reading<'_>) -> Result<Vec<Golden<Self::Case>>, String> {
        Ok(Vec::new())
    }

    /// The benchmarks: on a GPU the shapes of the model, on the emulator small ones.
    fn benchmarks(_environment: &Environment) -> Vec<Benchmark<Self>> {
        Vec::new()
    }

    /// Those of a GPU at a size for the emulator, for tests: at least one in each direction.
    fn reduced_benchmarks() -> Vec<Reduced> {
        Vec::new()
    }
}

/// A tensor that must not change any more, and its bytes when it was frozen.
pub(super) type Frozen = (TensorView, HostTensor);

/// The path that a launcher reports: one or several of [`About::paths`].
pub struct Ran(Vec<String>);

impl From<&str> for Ran {
    fn from(path: &str) -> Self {
        Self(vec![path.to_owned()])
    }
}

impl From<String> for Ran {
    fn from(path: String) -> Self {
        Self(vec![path])
    }
}

impl<T: Into<String>> From<Vec<T>> for Ran {
    fn from(paths: Vec<T>) -> Self {
        Self(paths.into_iter().map(T::into).collect())
    }
}

/// The launches of one run: the device, the paths that ran, and the frozen tensors.
pub struct Launches<'r> {
    device: &'r Device,
    /// Reads back what is frozen. Absent where waiting for the device is not allowed.
    arena: Option<&'r DeviceArena<'r>>,
    paths: Vec<String>,
    frozen: Vec<Frozen>,
    violations: Vec<Violation>,
    /// The ranks, where they run elsewhere.
    elsewhere: Option<&'r Elsewhere>,
}

/// What launches leave.
pub(super) struct Launched {
    /// Paths that ran.
    pub paths: Vec<String>,
    /// What was frozen.
    pub frozen: Vec<Frozen>,
    /// Forbidden writes in the memory of ranks.
    pub violations: Vec<Violation>,
}

impl<'r> Launches<'r> {
    pub(super) fn new(device: &'r Device, arena: &'r DeviceArena<'r>) -> Self {
        Self { arena: Some(arena), ..Self::timed(device) }
    }

    /// Launches for timing: nothing is read back, so nothing is frozen.
    pub(super) fn timed(device: &'r Device) -> Self {
        let (paths, frozen, violations) = Default::default();
        Self { device, arena: None, paths, frozen, violations, elsewhere: None }
    }

    /// The same, of ranks that run elsewhere.
    pub(super) fn with_ranks(self, elsewhere: Option<&'r Elsewhere>) -> Self {
        Self { elsewhere, ..self }
    }

    /// The ranks, where they run elsewhere.
    pub(crate) fn elsewhere(&self) -> Option<&'r Elsewhere> {
        self.elsewhere
    }

    /// The device. Of an operator with ranks it holds the tensors of all of them.
    pub fn device(&self) -> &'r Device {
        self.device
    }

    /// The contract of the memory that ranks allocate.
    pub fn contract(&self) -> Contract {
        self.arena.map_or(Contract::NAN, DeviceArena::contract)
    }

    /// Records forbidden writes that a rank found in its own memory.
    pub fn found(&mut self, violations: impl IntoIterator<Item = Violation>) {
        self.violations.extend(violations);
    }

    /// Launches, and records the path that ran.
    ///
    /// # Errors
    /// The launcher's.
    pub fn launch<R: Into<Ran>>(
        &mut self,
        launch: impl FnOnce(&'r Device) -> Result<R, RuntimeError>,
    ) -> Result<(), RuntimeError> {
        self.ran(launch(self.device)?);
        Ok(())
    }

    /// Records the path that ran.
    pub fn ran(&mut self, ran: impl Into<Ran>) {
        self.paths.extend(ran.into().0);
    }

    /// Records paths of a backward, which are named as such.
    pub fn ran_backward(&mut self, ran: impl IntoIterator<Item = &'static str>) {
        self.paths.extend(ran.into_iter().map(|path| format!("backward {path}")));
    }

    /// Declares that what was written to `view` so far is final. It is compared as it is now. A
    /// later launch that changes it is detected.
    ///
    /// # Errors
    /// The device's.
    pub fn freeze(&mut self, view: &TensorView) -> Result<(), RuntimeError> {
        let known = |(frozen, _): &Frozen| frozen.name == view.name && frozen.same_elements(view);
        if let Some(arena) = self.arena
            && !self.frozen.iter().any(known)
        {
            self.frozen.push((view.clone(), arena.download(view)?));
        }
        Ok(())
    }

    pub(super) fn finish(self) -> Launched {
        Launched { paths: self.paths, frozen: self.frozen, violations: self.violations }
    }
}
