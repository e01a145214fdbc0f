//! An operator as a declaration: what its case is, its tensors, its oracle, its launches and its
//! laws.
//!
//! [`Operator`] is what an operator's file implements. Everything else is derived of it, once for
//! all operators, behind [`AnyOperator`](super::any::AnyOperator), which does not know the types
//! of cases.

use std::borrow::Cow;

use dsv4_reference::Named;
use dsv4_reference::precision::Rounding;
use dsv4_runtime::{Device, DeviceArena, Environment, HostTensor, RuntimeError, TensorView, Views};
use proptest::strategy::BoxedStrategy;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::benchmarks::Benchmark;
use super::declaration::Specs;
#[cfg(doc)]
use super::declaration::{Part, TensorSpec};
use super::golden::{Golden, Reading};
use super::laws::Laws;
use super::tensors::{Bound, Tensors};
use super::{ModuleSpecification, Profile};
#[cfg(doc)]
use crate::operator::golden_file::GoldenFile;
use crate::record::Family;

/// What is said of an operator apart from any case.
#[derive(Clone, Copy, Debug)]
pub struct About {
    /// Its one name: that of its kernel file, launcher, oracle and operator file.
    pub name: &'static str,
    /// The part of the model that it belongs to.
    pub family: Family,
    /// One sentence.
    pub summary: &'static str,
    /// Sections of the specification.
    pub specification: &'static [&'static str],
    /// Every path that a record may say ran.
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

/// Refuses a field of a case.
///
/// # Errors
/// Always.
pub fn refuse<T>(field: &'static str, reason: impl Into<String>) -> Result<T, Refused> {
    Err(Refused { field: field.into(), reason: reason.into() })
}

/// A number of a case that must be finite and above 0.
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

/// A number of a case that must be finite.
///
/// # Errors
/// It is not.
pub fn finite(field: &'static str, value: f64) -> Result<(), Refused> {
    if value.is_finite() { Ok(()) } else { refuse(field, format!("{value} must be finite")) }
}

/// An extent of a case that may not be 0.
///
/// # Errors
/// It is.
pub fn not_empty(field: &'static str, extent: usize) -> Result<(), Refused> {
    if extent > 0 { Ok(()) } else { refuse(field, "0: there must be at least one") }
}

/// Elements of the largest input that finite differences are taken of, unless an operator says
/// otherwise.
const SMOOTH_ELEMENTS: usize = 4096;

/// An operator: a declaration, an oracle, launches and laws.
pub trait Operator: Sized + Send + Sync + 'static {
    /// One comparison: extents, types, classes of data, a seed. Plain data, one line of JSON.
    type Case: Serialize + DeserializeOwned + Clone + std::fmt::Debug + Send + Sync + 'static;

    /// Name, specification, paths, sizes of sweeps.
    const ABOUT: About;

    /// The kinds of golden files that are about it ([`GoldenFile::operator`]): every file of these
    /// is cases of it.
    const GOLDEN: &'static [&'static str] = &[];

    /// The operators whose launches it composes, in their order, where it is a chain and has no
    /// kernel of its own. Their kernels are mutated, and their launchers given bad arguments, as
    /// theirs.
    const CHAIN: &'static [&'static str] = &[];

    /// In how many lanes its kernels add the numbers of a row, at least: these are then added as a
    /// tree ([`dsv4_reference::precision`]). 1 says nothing.
    const SUM_LANES: usize = 1;

    /// The tensors of a case. Called for cases that passed [`Operator::check`].
    fn tensors(case: &Self::Case) -> Specs;

    /// Whether the fields of a case go together, beside what its tensors say by themselves (what
    /// an axis may be, numbers that are positive or finite). Extents need no upper bound: the
    /// layer bounds every tensor.
    ///
    /// # Errors
    /// The field, its value and the rule.
    fn check(_case: &Self::Case) -> Result<(), Refused> {
        Ok(())
    }

    /// Draws cases; shrinks towards the smallest.
    fn strategy(profile: Profile) -> BoxedStrategy<Self::Case>;

    /// Small cases, one for each family of kernels: the layer varies their layouts in every sweep,
    /// and spoils their arguments one by one, which launchers must refuse.
    fn typical() -> Vec<Self::Case>;

    /// Cases that every sweep runs, because chance must not leave them out.
    fn edge_cases(profile: Profile) -> Vec<Self::Case>;

    /// Why a case cannot run on a device like this one; `None` where it can.
    fn cannot_run(_case: &Self::Case, _environment: &Environment) -> Option<String> {
        None
    }

    /// The same call by the fastest kernels that there are for it on a device like this one, on as
    /// much of it as they can use: what another kernel is timed beside. As the case says where it
    /// chooses nothing.
    fn fastest(case: &Self::Case, _environment: &Environment) -> Self::Case {
        case.clone()
    }

    /// Sets what no distribution draws: lists, tables, zero rows, rows that nobody may read.
    ///
    /// # Errors
    /// The oracle's, where inputs are computed by it.
    fn amend(_case: &Self::Case, _tensors: &mut Tensors) -> dsv4_reference::Result<()> {
        Ok(())
    }

    /// The oracle's outputs.
    ///
    /// # Errors
    /// What the oracle refuses.
    fn forward(
        case: &Self::Case,
        tensors: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> dsv4_reference::Result<Named>;

    /// The oracle's gradients, by its written-out formulas; nothing where the operator has no
    /// backward.
    ///
    /// # Errors
    /// What the oracle refuses.
    fn backward(
        _case: &Self::Case,
        _tensors: &Bound<'_>,
        _rounding: &mut Rounding,
    ) -> dsv4_reference::Result<Named> {
        Ok(Named::new())
    }

    /// Gradients that follow at small cost from what kernels saved: the tensors hold everything
    /// that they wrote, beside the inputs. Held to these, a gradient shows errors that lie far
    /// below the rounding of what was saved, such as those of a small sink. Rounding points are
    /// those of [`Operator::backward`].
    ///
    /// # Errors
    /// What the oracle refuses.
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
    /// What the launcher refuses, and what the kernel did wrong.
    fn launch(case: &Self::Case, views: &Views, run: &mut Launches<'_>)
    -> Result<(), RuntimeError>;

    /// Launches the backward, where there is one. An input that the forward overwrote, as
    /// declared, is there as it was.
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

    /// What stored bytes mean: the tensors of [`Part::Observed`], from what was given and all that
    /// was written (by the kernels or the oracle), in the order of their declaration.
    fn observe(
        _case: &Self::Case,
        _given: &Tensors,
        _written: &Tensors,
    ) -> Vec<(&'static str, HostTensor)> {
        Vec::new()
    }

    /// Elements that one run of the oracle holds at the same time beside the tensors of the case,
    /// such as the rows that lists name: a case is refused before that takes too much memory. None
    /// where it is not said.
    fn oracle_elements(_case: &Self::Case) -> u128 {
        0
    }

    /// Relations between the case and variants of it that need no oracle.
    fn laws(_case: &Self::Case, _laws: &mut Laws<'_, Self>) {}

    /// Whether the oracle's gradients of this case can be triangulated: smooth where it is, and
    /// small, since finite differences run the oracle dozens of times and large cases learn
    /// nothing more from them.
    fn is_smooth(case: &Self::Case) -> bool {
        Self::tensors(case).gradients().all(|(input, _)| input.elements() <= SMOOTH_ELEMENTS)
    }

    /// The distance over which the oracle bends, for each element of a differentiable input;
    /// `None` where its declaration ([`TensorSpec::clamped`]) or its own size says it. Infinite
    /// along what has no effect: it moves by the input's size.
    fn bends_over(_case: &Self::Case, _tensors: &Tensors, _input: &str) -> Option<Vec<f64>> {
        None
    }

    /// What a golden file of [`Self::GOLDEN`] says of this operator.
    ///
    /// # Errors
    /// A file that does not fit.
    fn golden(_file: &mut Reading<'_>) -> Result<Vec<Golden<Self::Case>>, String> {
        Ok(Vec::new())
    }

    /// What is timed: on a GPU the shapes of the model, elsewhere some that the emulator can bear.
    fn benchmarks(_environment: &Environment) -> Vec<Benchmark<Self>> {
        Vec::new()
    }
}

/// A tensor that may not change any more, and what it was when that was said.
pub(super) type Frozen = (TensorView, HostTensor);

/// What a launcher says ran: one or several of [`About::paths`].
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

/// The launches of one run: on which device, what ran, and what may not change any more.
pub struct Launches<'r> {
    device: &'r Device,
    /// What is frozen is read back through it; absent where nothing may wait for the device.
    arena: Option<&'r DeviceArena<'r>>,
    paths: Vec<String>,
    frozen: Vec<Frozen>,
}

impl<'r> Launches<'r> {
    pub(super) fn new(device: &'r Device, arena: &'r DeviceArena<'r>) -> Self {
        Self { device, arena: Some(arena), paths: Vec::new(), frozen: Vec::new() }
    }

    /// Launches under the clock: nothing is read back, so nothing is frozen.
    pub(super) fn timed(device: &'r Device) -> Self {
        Self { device, arena: None, paths: Vec::new(), frozen: Vec::new() }
    }

    /// The device to launch on, where an operator knows of one alone: that of rank 0.
    pub fn device(&self) -> &'r Device {
        self.device
    }

    /// How many ranks the launches are spread over.
    pub fn world_size(&self) -> usize {
        1
    }

    /// The device of a rank.
    ///
    /// # Errors
    /// A rank that the world does not have.
    pub fn rank(&self, rank: usize) -> Result<&'r Device, RuntimeError> {
        if rank < self.world_size() {
            return Ok(self.device);
        }
        let reason = format!("{rank} must be below {}, the number of ranks", self.world_size());
        Err(RuntimeError::argument("launches", "rank", reason))
    }

    /// Launches, and takes down what ran.
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

    /// Takes down what ran.
    pub fn ran(&mut self, ran: impl Into<Ran>) {
        self.paths.extend(ran.into().0);
    }

    /// What was written so far to `view` is final: it is compared as it is now, and a later launch
    /// that changes it is found out.
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

    /// Paths that ran, and what was frozen.
    pub(super) fn finish(self) -> (Vec<String>, Vec<Frozen>) {
        (self.paths, self.frozen)
    }
}
