//! An operator as a declaration: what its case is, its tensors, its oracle, its launches and its laws. Everything else
//! is derived here, once for all operators.
//!
//! [`Declared`] is what an operator's file implements; [`Op`] makes an entry of the registry of it.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::marker::PhantomData;
use std::sync::Arc;

use candle_core::Tensor;
use dsv4_kernels::runtime::cuda::{MAPPED_GRANULE, RESERVED_PART};
use dsv4_kernels::runtime::{
    BackendKind, Contract, DType, Device, DeviceArena, Environment, HostTensor, Role, RuntimeError, TensorView, Views,
};
use dsv4_reference::precision::{Precision, Rounding};
use dsv4_reference::{Named, Products};
use proptest::prelude::*;
use proptest::strategy::BoxedStrategy;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::benchmarks::{Benchmark, Timed};
use super::declaration::{Part, Specs, TensorSpec};
use super::family::Family;
use super::laws::{self, Laws};
use super::layouts::{self, Layouts, TensorLayout};
use super::limits;
use super::memory::Placed;
use super::probe::Probe;
use super::sequence;
use super::size::{self, Limit};
use super::special::{self, Special};
use super::tensors::{Bound, Tensors};
use super::{
    Arithmetic, GoldenCase, GradientProbe, KernelRun, KernelTensor, Law, ModuleSpecification, Operator, OracleTensor,
    Prepared, Profile, RoundingPoints, Sequence, Side,
};
use crate::case::{Case, CaseError};
use crate::judge::golden::GoldenFile;
use crate::operator::golden::{Golden, Reading};
use crate::operators::elements;
use crate::record::{OperatorRecord, Seconds};

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
    if value.is_finite() && value > 0.0 { Ok(()) } else { refuse(field, format!("{value} must be finite and above 0")) }
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

/// The tensors of a case, where its fields are what they must be.
///
/// # Errors
/// The field, its value and the rule.
pub(super) fn checked<K: Declared>(case: &K::Case) -> Result<Specs, Refused> {
    bound_numbers(&Value::Object(Case::new(K::ABOUT.name, case).fields), "")?;
    K::check(case)?;
    let specs = K::tensors(case);
    specs.check()?;
    Ok(specs)
}

/// Largest whole number of a case but its seed: a sum of two of them fits an i32, and a product of two 64 bits, so that no
/// operator has to think of numbers that wrap.
const LARGEST_NUMBER: u64 = (1 << 30) - 1;

/// What may be any number of 64 bits.
const SEED: &str = "seed";

/// Refuses whole numbers above [`LARGEST_NUMBER`], wherever they stand in a case.
fn bound_numbers(value: &Value, path: &str) -> Result<(), Refused> {
    match value {
        Value::Object(fields) => fields.iter().filter(|(name, _)| *name != SEED).try_for_each(|(name, value)| {
            let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            bound_numbers(value, &path)
        }),
        Value::Array(values) => values.iter().try_for_each(|value| bound_numbers(value, path)),
        Value::Number(number) if number.as_u64().is_some_and(|number| number > LARGEST_NUMBER) => {
            Err(Refused { field: path.to_owned().into(), reason: format!("{number} is more than {LARGEST_NUMBER}") })
        }
        _ => Ok(()),
    }
}

/// Elements of the largest input that finite differences are taken of, unless an operator says otherwise.
const SMOOTH_ELEMENTS: usize = 4096;

/// An operator: a declaration, an oracle, launches and laws.
pub trait Declared: Sized + Send + Sync + 'static {
    /// One comparison: extents, types, classes of data, a seed. Plain data, one line of JSON.
    type Case: Serialize + DeserializeOwned + Clone + std::fmt::Debug + Send + Sync + 'static;

    /// Name, specification, paths, sizes of sweeps.
    const ABOUT: About;

    /// The kinds of golden files that are about it ([`GoldenFile::operator`]): every file of these is cases of it.
    const GOLDEN: &'static [&'static str] = &[];

    /// The operators whose launches it composes, in their order, where it is a chain and has no kernel of its own. Their
    /// kernels are mutated, and their launchers given bad arguments, as theirs.
    const CHAIN: &'static [&'static str] = &[];

    /// In how many lanes its kernels add the numbers of a row, at least: these are then added as a tree
    /// ([`dsv4_reference::precision`]). 1 says nothing.
    const SUM_LANES: usize = 1;

    /// The tensors of a case. Called for cases that passed [`Declared::check`].
    fn tensors(case: &Self::Case) -> Specs;

    /// Whether the fields of a case go together, beside what its tensors say by themselves (what an axis may be, numbers
    /// that are positive or finite). Extents need no upper bound: the layer bounds every tensor.
    ///
    /// # Errors
    /// The field, its value and the rule.
    fn check(_case: &Self::Case) -> Result<(), Refused> {
        Ok(())
    }

    /// Draws cases; shrinks towards the smallest.
    fn strategy(profile: Profile) -> BoxedStrategy<Self::Case>;

    /// Small cases, one for each family of kernels: the layer varies their layouts in every sweep, and spoils their
    /// arguments one by one, which launchers must refuse.
    fn typical() -> Vec<Self::Case>;

    /// Cases that every sweep runs, because chance must not leave them out.
    fn edge_cases(profile: Profile) -> Vec<Self::Case>;

    /// Why a case cannot run on a device like this one; `None` where it can.
    fn cannot_run(_case: &Self::Case, _environment: &Environment) -> Option<String> {
        None
    }

    /// The same call by the fastest kernels that there are for it on a device like this one, on as much of it as they can use:
    /// what another kernel is timed beside. As the case says where it chooses nothing.
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
    fn forward(case: &Self::Case, tensors: &Bound<'_>, rounding: &mut Rounding) -> dsv4_reference::Result<Named>;

    /// The oracle's gradients, by its written-out formulas; nothing where the operator has no backward.
    ///
    /// # Errors
    /// What the oracle refuses.
    fn backward(_case: &Self::Case, _tensors: &Bound<'_>, _rounding: &mut Rounding) -> dsv4_reference::Result<Named> {
        Ok(Named::new())
    }

    /// Gradients that follow at small cost from what kernels saved: the tensors hold everything that they wrote, beside the
    /// inputs. Held to these, a gradient shows errors that lie far below the rounding of what was saved, such as those of a
    /// small sink. Rounding points are those of [`Declared::backward`].
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

    /// Bytes of the workspaces that the launches need, by name. They are placed after all other tensors.
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

    /// Launches the forward. What it writes is frozen before [`Declared::launch_backward`].
    ///
    /// # Errors
    /// What the launcher refuses, and what the kernel did wrong.
    fn launch(case: &Self::Case, views: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError>;

    /// Launches the backward, where there is one. An input that the forward overwrote, as declared, is there as it was.
    ///
    /// # Errors
    /// As [`Declared::launch`].
    fn launch_backward(_case: &Self::Case, _views: &Views, _run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        Ok(())
    }

    /// What stored bytes mean: the tensors of [`Part::Observed`], from what was given and all that was written (by the kernels
    /// or the oracle), in the order of their declaration.
    fn observe(_case: &Self::Case, _given: &Tensors, _written: &Tensors) -> Vec<(&'static str, HostTensor)> {
        Vec::new()
    }

    /// Elements that one run of the oracle holds at the same time beside the tensors of the case, such as the rows that lists
    /// name: a case is refused before that takes too much memory. None where it is not said.
    fn oracle_elements(_case: &Self::Case) -> u128 {
        0
    }

    /// Relations between the case and variants of it that need no oracle.
    fn laws(_case: &Self::Case, _laws: &mut Laws<'_, Self>) {}

    /// Whether the oracle's gradients of this case can be triangulated: smooth where it is, and small, since finite
    /// differences run the oracle dozens of times and large cases learn nothing more from them.
    fn is_smooth(case: &Self::Case) -> bool {
        Self::tensors(case).gradients().all(|(input, _)| input.elements() <= SMOOTH_ELEMENTS)
    }

    /// The distance over which the oracle bends, for each element of a differentiable input; `None` where its declaration
    /// ([`TensorSpec::clamped`]) or its own size says it. Infinite along what has no effect: it moves by the input's size.
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

    /// What was written so far to `view` is final: it is compared as it is now, and a later launch that changes it is
    /// found out.
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

/// A declared operator as an entry of the registry.
pub struct Op<K>(PhantomData<fn() -> K>);

impl<K: Declared> Op<K> {
    /// The entry.
    pub const fn new() -> Self {
        Self(PhantomData)
    }
}

impl<K: Declared> Default for Op<K> {
    fn default() -> Self {
        Self::new()
    }
}

/// What this layer chooses of a case beside the operator's own fields.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Choices {
    pub layouts: Layouts,
    pub special: Option<Special>,
}

/// The field of a case's line that holds layouts, and the one that held the gap behind all rows before that.
const LAYOUTS: &str = "layouts";
/// The field that says which special numbers inputs hold.
const SPECIAL: &str = "special";
const PADDING: &str = "padding";

pub(super) fn field_error<K: Declared>(refused: Refused) -> CaseError {
    CaseError::Field { operator: K::ABOUT.name, field: refused.field, reason: refused.reason }
}

fn layout_error<K: Declared>(reason: String) -> CaseError {
    field_error::<K>(Refused { field: LAYOUTS.into(), reason })
}

fn special_error<K: Declared>(reason: String) -> CaseError {
    field_error::<K>(Refused { field: SPECIAL.into(), reason })
}

/// The oracle's error as a case's.
pub(super) fn oracle_error<K: Declared>(error: impl std::fmt::Display) -> CaseError {
    CaseError::Oracle { operator: K::ABOUT.name, reason: error.to_string() }
}

/// A case with what the layer chose, as a line of JSON.
pub(super) fn case_of<K: Declared>(case: &K::Case, choices: &Choices) -> Case {
    let mut line = Case::new(K::ABOUT.name, case);
    if let Some(special) = &choices.special {
        line.fields.insert(SPECIAL.to_owned(), serde_json::json!(special));
    }
    if !choices.layouts.is_empty() {
        line.fields.insert(LAYOUTS.to_owned(), serde_json::json!(choices.layouts));
    }
    line
}

fn with_special(special: Special) -> Choices {
    Choices { special: Some(special), ..Choices::default() }
}

/// What is special of each tensor, in the typical cases by turns.
fn special_in_turn<K: Declared>() -> Vec<Case> {
    let typical = K::typical();
    let all: BTreeSet<_> = typical.iter().flat_map(|case| Special::of_each_tensor(&K::tensors(case))).collect();
    let turns = all.into_iter().enumerate().filter_map(|(turn, special)| {
        let mut cases = (0..typical.len()).map(|i| &typical[(turn + i) % typical.len()]);
        let case = cases.find(|case| special.fits(&K::tensors(case)))?;
        Some(case_of::<K>(case, &with_special(special)))
    });
    turns.collect()
}

/// Reads a line; lines written before layouts had a field of their own say `padding`.
pub(super) fn read<K: Declared>(line: &Case) -> Result<(K::Case, Choices), CaseError> {
    let mut line = line.clone();
    let layouts = line.fields.remove(LAYOUTS);
    let padding = line.fields.remove(PADDING);
    let special = line.fields.remove(SPECIAL);
    let case: K::Case = line.fields()?;
    no_unknown_field::<K>(&line, &case)?;
    let specs = checked::<K>(&case).map_err(field_error::<K>)?;
    bound_sizes::<K>(&specs)?;
    let said = if padding.is_some() { PADDING } else { LAYOUTS };
    let layouts = match (layouts, padding) {
        (Some(value), None) => serde_json::from_value(value).map_err(|e| layout_error::<K>(e.to_string()))?,
        (None, Some(value)) => layouts::padded(&specs, padding_of::<K>(&value)?),
        (None, None) => Layouts::new(),
        (Some(_), Some(_)) => return Err(layout_error::<K>("`padding` beside `layouts`: say it there".into())),
    };
    check_layouts(&specs, &layouts, said).map_err(field_error::<K>)?;
    let special = special.map(serde_json::from_value).transpose().map_err(|e| special_error::<K>(e.to_string()))?;
    if let Some(special) = special.as_ref().filter(|special: &&Special| !special.fits(&specs)) {
        return Err(special_error::<K>(special.why_not()));
    }
    Ok((case, Choices { layouts, special }))
}

/// Cases that share fields with others flatten them, and serde cannot refuse what is unknown there.
fn no_unknown_field<K: Declared>(line: &Case, case: &K::Case) -> Result<(), CaseError> {
    let known = Case::new(K::ABOUT.name, case).fields;
    match line.fields.keys().find(|field| !known.contains_key(*field)) {
        None => Ok(()),
        Some(field) => {
            let known: Vec<_> = known.keys().map(String::as_str).collect();
            let (name, known) = (K::ABOUT.name, known.join(", "));
            Err(CaseError::Malformed(format!("unknown field `{field}` in a case of `{name}`; it has {known}")))
        }
    }
}

fn padding_of<K: Declared>(value: &Value) -> Result<usize, CaseError> {
    let number = value.as_u64().and_then(|number| usize::try_from(number).ok());
    number.ok_or_else(|| CaseError::Field {
        operator: K::ABOUT.name,
        field: PADDING.into(),
        reason: format!("{value} is no number of elements"),
    })
}

/// Largest tensor of a case, in elements.
const LARGEST_TENSOR: usize = 1 << 31;

fn bound_sizes<K: Declared>(specs: &Specs) -> Result<(), CaseError> {
    let Some(large) = specs.present().find(|spec| spec.elements() > LARGEST_TENSOR) else { return Ok(()) };
    let longest = large.axes.iter().max_by_key(|axis| axis.extent);
    Err(CaseError::Field {
        operator: K::ABOUT.name,
        field: longest.map_or("extents", |axis| axis.name).into(),
        reason: format!("`{}` {:?} has more than 2^31 elements", large.name, large.shape()),
    })
}

/// Refuses a case that takes more memory than it may.
///
/// # Errors
/// The longest axis of the largest tensor, and what the case takes.
pub(super) fn within<K: Declared>(
    case: &K::Case,
    specs: &Specs,
    layouts: &Layouts,
    limit: Limit,
) -> Result<(), Refused> {
    let bytes = size::bytes_of(specs, layouts, K::oracle_elements(case));
    if limit.allows(bytes) {
        return Ok(());
    }
    let largest = size::largest(specs);
    // Where the tensors alone would fit, it is what lies between their rows.
    let dense = size::bytes_of(&specs.clone().without_gaps(), &Layouts::new(), K::oracle_elements(case));
    if limit.allows(dense) {
        let own =
            specs.present().find(|spec| spec.gap_of.is_some() && spec.minimum_gap > 0).and_then(|spec| spec.gap_of);
        let field = if layouts.is_empty() { own.unwrap_or(LAYOUTS) } else { LAYOUTS };
        let takes = [bytes, dense].map(size::in_words);
        let [takes, dense] = takes;
        let reason = format!("the case takes up to {takes} of memory, dense {dense}; {limit} are allowed (--memory)");
        return refuse(field, reason);
    }
    let longest = largest.and_then(|spec| spec.axes.iter().max_by_key(|axis| axis.extent));
    let takes = size::in_words(bytes);
    let shape = largest.map_or_else(String::new, |spec| format!(", with `{}` {:?}", spec.name, spec.shape()));
    refuse(
        longest.map_or("extents", |axis| axis.name),
        format!("the case takes up to {takes} of memory{shape}; {limit} are allowed (--memory)"),
    )
}

/// Refuses layouts, which the field `said` says, that the case's tensors do not take or no device can hold.
fn check_layouts(specs: &Specs, layouts: &Layouts, said: &'static str) -> Result<(), Refused> {
    for name in layouts.keys() {
        if specs.find(name).is_none() {
            let names: Vec<_> = specs.present().map(|spec| spec.name).collect();
            return refuse(said, format!("no tensor `{name}`; the case has {}", names.join(", ")));
        }
    }
    let mut addresses = 0usize;
    for spec in specs.present().filter(|spec| spec.is_stored()) {
        // A gap may also be the operator's own, which another field says.
        let field = spec.gap_of.filter(|_| !layouts.contains_key(spec.name)).unwrap_or(said);
        let placed = layout_of(spec, layouts).place(spec).and_then(|placed| layouts::bounded(spec, &placed));
        addresses = addresses.saturating_add(placed.or_else(|reason| refuse(field, reason))?);
    }
    let most = 4 * layouts::MOST_ADDRESSES;
    if addresses > most {
        return refuse(said, format!("they spread the case over {addresses} bytes; {most} at most"));
    }
    Ok(())
}

/// Memory that the tensors of one case may take together on a GPU, where each row that lies far from the others takes a piece of its
/// own: a GPU of 80 GB that a dozen processes share has it, times [`RESERVED_PART`].
const LARGEST_CASE: usize = 24 << 30;

/// Why a case does not fit a GPU so many times over: rows with huge steps between them take a piece of its memory each.
pub(super) fn too_large_on(
    environment: &Environment,
    specs: &Specs,
    layouts: &Layouts,
    times: usize,
) -> Option<String> {
    let total = buffers_on(environment, specs, layouts).fold(0usize, usize::saturating_add);
    (total.saturating_mul(times) > LARGEST_CASE)
        .then(|| format!("its layouts take more than the {} GiB that a case may have on a GPU", LARGEST_CASE >> 30))
}

/// Bytes of a GPU's memory that are to be free where a case is to have all its buffers.
fn room_on(environment: &Environment, specs: &Specs, layouts: &Layouts) -> u64 {
    let buffers: Vec<usize> = buffers_on(environment, specs, layouts).collect();
    // Calls that follow one another have two sets of buffers, and the largest of the second one has its part of what the first one
    // leaves.
    let of_largest = buffers.iter().copied().max().unwrap_or(0).saturating_mul(RESERVED_PART);
    buffers.into_iter().fold(of_largest, usize::saturating_add) as u64
}

/// Bytes of a GPU's memory for the buffer of each tensor; none on the emulator.
fn buffers_on(environment: &Environment, specs: &Specs, layouts: &Layouts) -> impl Iterator<Item = usize> {
    let bytes = |spec: &TensorSpec| {
        let layout = layout_of(spec, layouts).place(spec);
        let bytes = layout.map_or(0, |layout| layout.memory_bytes(&spec.shape(), spec.dtype, MAPPED_GRANULE));
        usize::try_from(bytes).unwrap_or(usize::MAX)
    };
    let on_gpu = environment.backend == BackendKind::Cuda;
    specs.present().filter(move |spec| on_gpu && spec.is_stored() && spec.placed.is_none()).map(bytes)
}

pub(super) fn layout_of(spec: &TensorSpec, layouts: &Layouts) -> TensorLayout {
    layouts.get(spec.name).cloned().unwrap_or_default()
}

impl<K: Declared> Operator for Op<K> {
    fn name(&self) -> &'static str {
        K::ABOUT.name
    }

    fn family(&self) -> Family {
        K::ABOUT.family
    }

    fn describe(&self) -> OperatorRecord {
        let list = |items: &[&str]| -> Vec<String> { items.iter().map(|item| (*item).to_owned()).collect() };
        let About { name, family, summary, specification, paths, .. } = K::ABOUT;
        let tensors = super::documentation::tensors::<K>();
        let files = |file: &dyn Fn(&str) -> String| {
            let of = if K::CHAIN.is_empty() { &[name] } else { K::CHAIN };
            of.iter().map(|name| file(name)).collect::<Vec<_>>().join(", ")
        };
        OperatorRecord {
            name: name.into(),
            family: Some(family),
            summary: summary.into(),
            specification: list(specification),
            kernel_file: files(&|name| format!("kernels/cuda/{name}.cu")),
            oracle_file: files(&|name| format!("reference/src/{name}.rs")),
            dtypes: tensors.iter().map(|tensor| format!("{} {}", tensor.name, tensor.dtypes.join("|"))).collect(),
            axes: super::documentation::axes::<K>(),
            has_backward: tensors.iter().any(|tensor| tensor.part == "gradient"),
            paths: list(paths),
            tensors,
        }
    }

    fn chain(&self) -> &'static [&'static str] {
        K::CHAIN
    }

    fn strategy(&self, profile: Profile) -> BoxedStrategy<Case> {
        (K::strategy(profile), layouts::strategy(layouts::MOST_TENSORS), special::strategy())
            .prop_map(|(case, layouts, special)| {
                // A case that is refused says so when it runs: it has no tensors to lay out.
                let Ok(specs) = checked::<K>(&case) else { return case_of::<K>(&case, &Choices::default()) };
                let special = special.filter(|special| special.fits(&specs));
                case_of::<K>(&case, &Choices { layouts: layouts::resolve(&specs, &layouts), special })
            })
            .boxed()
    }

    fn edge_cases(&self, profile: Profile) -> Vec<Case> {
        // Rows with gaps, so that every kernel that an edge case reaches meets strides that are no extents, and no two
        // tensors with the same ones.
        let own = K::edge_cases(profile).into_iter().chain(limits::edge_cases::<K>(profile)).map(|case| {
            let layouts = layouts::unlike_gaps(&K::tensors(&case));
            case_of::<K>(&case, &Choices { layouts, ..Choices::default() })
        });
        let varied = K::typical().into_iter().flat_map(|case| {
            let specs = K::tensors(&case);
            let special = Special::OF_CLAMPS.into_iter().filter(|special| special.fits(&specs)).map(with_special);
            let laid_out = layouts::edge_cases(&specs).into_iter();
            let laid_out = laid_out.map(|layouts| Choices { layouts, ..Choices::default() });
            let choices: Vec<Choices> = special.chain(laid_out).collect();
            choices.into_iter().map(move |choices| case_of::<K>(&case, &choices))
        });
        own.chain(varied).chain(special_in_turn::<K>()).collect()
    }

    fn laid_out(&self, case: &Case) -> Result<[Case; 2], CaseError> {
        let (case, choices) = read::<K>(case)?;
        let spread = layouts::spread(&K::tensors(&case));
        Ok([Layouts::new(), spread].map(|layouts| case_of::<K>(&case, &Choices { layouts, ..choices.clone() })))
    }

    fn check(&self, case: &Case) -> Result<(), CaseError> {
        read::<K>(case).map(drop)
    }

    fn default_cases(&self, profile: Profile) -> usize {
        profile.of(K::ABOUT.cases)
    }

    fn modules(&self) -> Vec<ModuleSpecification> {
        (K::ABOUT.modules)()
    }

    fn cannot_run(&self, case: &Case, environment: &Environment) -> Option<String> {
        // A case that is not understood is no skip: to prepare it will say what is wrong.
        let (case, choices) = read::<K>(case).ok()?;
        let too_large = |specs: &Specs| {
            let of_this_process = within::<K>(&case, specs, &choices.layouts, size::limit());
            // Its own words name the numbers of this case: skips are counted by their reason.
            let why = || format!("it takes more than the {} of memory that a case may (--memory)", size::limit());
            too_large_on(environment, specs, &choices.layouts, 1).or_else(|| of_this_process.err().map(|_| why()))
        };
        K::cannot_run(&case, environment).or_else(|| too_large(&K::tensors(&case)))
    }

    fn prepare_within(&self, case: &Case, limit: Limit) -> Result<Box<dyn Prepared>, CaseError> {
        let (case, choices) = read::<K>(case)?;
        within::<K>(&case, &K::tensors(&case), &choices.layouts, limit).map_err(field_error::<K>)?;
        Ok(Box::new(Inputs::<K>::draw(case, choices)?))
    }

    fn bytes(&self, case: &Case) -> Result<u128, CaseError> {
        let (case, choices) = read::<K>(case)?;
        Ok(size::bytes_of(&K::tensors(&case), &choices.layouts, K::oracle_elements(&case)))
    }

    fn elements(&self, case: &Case) -> Result<u128, CaseError> {
        let (case, _) = read::<K>(case)?;
        Ok(size::elements_of(&K::tensors(&case), K::oracle_elements(&case)))
    }

    fn golden_kinds(&self) -> &'static [&'static str] {
        K::GOLDEN
    }

    fn golden(&self, file: &GoldenFile) -> Result<Vec<GoldenCase>, CaseError> {
        if !K::GOLDEN.contains(&file.operator.as_str()) {
            return Ok(Vec::new());
        }
        let cases = K::golden(&mut Reading::of(file));
        let cases = cases.map_err(|reason| CaseError::Malformed(format!("{}: {reason}", file.name)))?;
        if cases.is_empty() {
            let (name, file) = (K::ABOUT.name, &file.name);
            return Err(CaseError::Malformed(format!("{file} is about `{name}`, which makes no case of it")));
        }
        cases.into_iter().map(|golden| golden.finish::<K>(file)).collect()
    }

    fn refusals(&self, device: &Device) -> Result<Vec<super::refusals::Refusal>, CaseError> {
        if !K::CHAIN.is_empty() {
            return Ok(Vec::new());
        }
        super::refusals::of::<K>(device)
    }

    fn benchmarks(&self, environment: &Environment) -> Vec<Box<dyn Timed>> {
        let erased = |benchmark| Box::new(Arc::new(benchmark)) as Box<dyn Timed>;
        K::benchmarks(environment).into_iter().map(erased).collect()
    }
}

/// What of a variant's tensor is looked at: its elements at these places, in this shape.
#[derive(Clone, Debug)]
pub(super) struct Shown {
    pub name: &'static str,
    pub shape: Vec<usize>,
    pub elements: Vec<usize>,
}

impl Shown {
    fn of_values(&self, values: &[f64]) -> Vec<f64> {
        self.elements.iter().map(|&at| values[at]).collect()
    }

    fn of_tensor(&self, tensor: &HostTensor) -> HostTensor {
        let size = tensor.dtype.size();
        let bytes = self.elements.iter().flat_map(|&at| tensor.bytes[at * size..(at + 1) * size].iter().copied());
        HostTensor { dtype: tensor.dtype, shape: self.shape.clone(), bytes: bytes.collect() }
    }
}

/// A case with its tensors.
pub struct Inputs<K: Declared> {
    pub(super) case: K::Case,
    pub(super) choices: Choices,
    pub(super) tensors: Arc<Tensors>,
    pub(super) shown: Vec<Shown>,
    /// Whether the case's line says all that sets these inputs apart but their numbers.
    pub(super) said: bool,
}

impl<K: Declared> Clone for Inputs<K> {
    fn clone(&self) -> Self {
        let (case, choices, tensors) = (self.case.clone(), self.choices.clone(), self.tensors.clone());
        Self { case, choices, tensors, shown: self.shown.clone(), said: self.said }
    }
}

impl<K: Declared> Inputs<K> {
    /// Draws the tensors of a case that was checked.
    pub(super) fn draw(case: K::Case, choices: Choices) -> Result<Self, CaseError> {
        let mut tensors = Tensors::draw(&K::tensors(&case), choices.special.as_ref());
        K::amend(&case, &mut tensors).map_err(oracle_error::<K>)?;
        let inputs = Self::of(case, choices, tensors);
        let Some(special) = &inputs.choices.special else { return Ok(inputs) };
        match special {
            Special::NanIn(name) => inputs.with_lone(name, f64::NAN),
            Special::InfinityIn(name) => inputs.with_lone(name, f64::INFINITY),
            Special::Large(name) => Ok(inputs.scaled_as_far_as_fp32_allows(name, 2.0)),
            Special::Small(name) => Ok(inputs.scaled_as_far_as_fp32_allows(name, 0.5)),
            Special::Subnormal(name) => Ok(inputs.subnormal(name)),
            Special::AtTheLimit | Special::NotFinite | Special::Alone(_) => Ok(inputs),
        }
    }

    /// The same inputs with a tensor of subnormal numbers.
    fn subnormal(&self, name: &str) -> Self {
        let Some(spec) = self.specs().find(name).cloned() else { return self.clone() };
        let mut tensors = (*self.tensors).clone();
        tensors.scale(spec.name, special::to_subnormal(&self.tensors.values(spec.name)));
        Self { tensors: Arc::new(tensors), ..self.clone() }
    }

    /// The same inputs with a tensor times the furthest power of a base, 2 or its inverse, that takes no intermediate out of
    /// fp32's range, nor into it; as they are if each does.
    fn scaled_as_far_as_fp32_allows(&self, name: &str, base: f64) -> Self {
        let Some(spec) = self.specs().find(name).cloned() else { return self.clone() };
        let of = |tensors: &Tensors| laws::outside_f32::<K>(&self.case, tensors);
        let (own, before) = (self.tensors.values(spec.name), of(&self.tensors));
        let scaled = |exponent: i32| {
            let factor = base.powi(exponent);
            let mut tensors = (*self.tensors).clone();
            tensors.scale(spec.name, factor);
            // A type whose own range ends earlier loses numbers: scaled back they are others.
            let back = tensors.values(spec.name).into_iter().map(|x| x / factor);
            let kept = back.zip(&own).all(|(a, b)| a == *b || a.is_nan() && b.is_nan());
            (kept && of(&tensors) == before).then_some(tensors)
        };
        match (1..=12).rev().find_map(|tens| scaled(10 * tens)) {
            Some(tensors) => Self { tensors: Arc::new(tensors), ..self.clone() },
            None => self.clone(),
        }
    }

    /// The same inputs with one number in another's place, where the oracle's results say that it counts; in the last place
    /// that was tried if they do in none.
    fn with_lone(&self, name: &str, number: f64) -> Result<Self, CaseError> {
        let results = |inputs: &Self| -> Result<Vec<u64>, CaseError> {
            let oracle = inputs.run_oracle(Precision::Exact, None, &Side::BOTH).map_err(oracle_error::<K>)?;
            Ok(oracle.iter().flat_map(|tensor| &tensor.values).map(|value| value.to_bits()).collect())
        };
        let specs = self.specs();
        let Some(spec) = specs.find(name) else { return Ok(self.clone()) };
        let before = results(self)?;
        let mut last = self.clone();
        for tensors in special::spoilt(spec, specs.seed, number, &self.tensors) {
            last = Self { tensors: Arc::new(tensors), ..self.clone() };
            if results(&last)? != before {
                break;
            }
        }
        Ok(last)
    }

    pub(super) fn of(case: K::Case, choices: Choices, tensors: Tensors) -> Self {
        Self { case, choices, tensors: Arc::new(tensors), shown: Vec::new(), said: true }
    }

    pub(super) fn specs(&self) -> Specs {
        K::tensors(&self.case)
    }

    /// Runs the oracle of these sides, by itself or as one of the runs that have `products` in common.
    pub(super) fn run_oracle(
        &self,
        precision: Precision,
        products: Option<&Products>,
        sides: &[Side],
    ) -> dsv4_reference::Result<Vec<OracleTensor>> {
        let specs = self.specs();
        let bound = Bound::new(&self.tensors);
        let mut tensors = Vec::new();
        // One for all sides: runs that share products ask for them in one order.
        let mut rounding = products.map_or_else(|| Rounding::new(precision), |p| Rounding::sharing(precision, p));
        for &side in sides {
            let computed = match side {
                Side::Forward => K::forward(&self.case, &bound, &mut rounding)?,
                Side::Gradient => K::backward(&self.case, &bound, &mut rounding)?,
            };
            for (name, tensor) in computed.into_tensors() {
                tensors.push(OracleTensor { name, side, shape: tensor.dims().to_vec(), values: elements(&tensor)? });
            }
        }
        self.observe_oracle(&specs, &mut tensors);
        for shown in &self.shown {
            if let Some(tensor) = tensors.iter_mut().find(|tensor| tensor.name == shown.name) {
                (tensor.values, tensor.shape) = (shown.of_values(&tensor.values), shown.shape.clone());
            }
        }
        Ok(tensors)
    }

    /// Replaces the oracle's stored bytes by what they mean, where the operator observes them.
    fn observe_oracle(&self, specs: &Specs, tensors: &mut Vec<OracleTensor>) {
        if specs.present().all(|spec| spec.part != Part::Observed) {
            return;
        }
        let mut written = Tensors::default();
        for spec in specs.present().filter(|spec| spec.is_written()) {
            if let Some(tensor) = tensors.iter().find(|tensor| tensor.name == spec.name) {
                written.put(spec.name, stored(spec, &tensor.values));
            }
        }
        tensors.retain(|tensor| written.get(tensor.name).is_none() || specs.compares(tensor.name));
        let observed = K::observe(&self.case, &self.tensors, &written).into_iter().map(|(name, tensor)| OracleTensor {
            name,
            side: Side::Forward,
            shape: tensor.shape.clone(),
            values: tensor.to_f64(),
        });
        tensors.extend(observed);
    }

    /// Its tensors on a device, and the workspaces that its launches need.
    pub(super) fn placed<'d>(
        &self,
        device: &'d Device,
        contract: Contract,
        specs: &Specs,
    ) -> Result<Placed<'d>, RuntimeError> {
        let mut placed = Placed::place(device, contract, specs, &self.choices.layouts, &self.tensors)?;
        for (name, bytes) in K::workspaces(&self.case, placed.views(), device)? {
            placed.workspace(name, bytes)?;
        }
        Ok(placed)
    }

    /// Launches forward and backward on what was placed, and reads back what they wrote.
    pub(super) fn launched(&self, specs: &Specs, placed: &Placed<'_>) -> Result<KernelRun, RuntimeError> {
        let (mut paths, mut frozen, mut changed) = (Vec::new(), Vec::new(), Vec::new());
        let mut violations = placed.arena().run(|device| {
            let mut run = Launches::new(device, placed.arena());
            K::launch(&self.case, placed.views(), &mut run)?;
            if specs.gradients().next().is_some() {
                for spec in specs.present().filter(|spec| spec.part == Part::Output) {
                    run.freeze(&placed.views()[spec.name])?;
                }
                K::launch_backward(&self.case, placed.backward_views(), &mut run)?;
            }
            (paths, frozen) = run.finish();
            changed = placed.changed(&frozen)?;
            Ok(())
        })?;
        violations.extend(changed);
        Ok(KernelRun { tensors: self.collect(specs, placed, &frozen)?, violations, paths })
    }

    /// The given tensors as the device got them, where that is not what was drawn.
    fn uploaded(&self, specs: &Specs, placed: &Placed<'_>) -> Cow<'_, Tensors> {
        let mut given = Cow::Borrowed(&*self.tensors);
        for spec in specs.present().filter(|spec| spec.is_given()) {
            if let Some(tensor) = placed.replacement(spec.name) {
                given.to_mut().put(spec.name, tensor.clone());
            }
        }
        given
    }

    /// What was written: what was frozen as it was then, since a change of it is a matter of its own.
    pub(super) fn collect(
        &self,
        specs: &Specs,
        placed: &Placed<'_>,
        frozen: &[Frozen],
    ) -> Result<Vec<KernelTensor>, RuntimeError> {
        let mut tensors = Vec::new();
        let mut written = Tensors::default();
        for spec in specs.present().filter(|spec| spec.is_written() && spec.part != Part::Scratch) {
            let whole = &placed.views()[spec.name];
            let tensor = match frozen.iter().find(|(view, _)| view.name == whole.name && view.same_elements(whole)) {
                Some((_, tensor)) => tensor.clone(),
                None => placed.download(spec.name)?,
            };
            if specs.compares(spec.name) {
                tensors.push(kernel_tensor(spec, tensor.clone()));
            }
            written.put(spec.name, tensor);
        }
        if specs.present().any(|spec| spec.part == Part::Observed) {
            for (name, tensor) in K::observe(&self.case, &self.uploaded(specs, placed), &written) {
                if let Some(spec) = specs.find(name) {
                    tensors.push(kernel_tensor(spec, tensor));
                }
            }
        }
        for shown in &self.shown {
            if let Some(tensor) = tensors.iter_mut().find(|tensor| tensor.name == shown.name) {
                tensor.tensor = shown.of_tensor(&tensor.tensor);
            }
        }
        Ok(tensors)
    }
}

/// Bytes of a spec's type that hold the oracle's numbers.
fn stored(spec: &TensorSpec, values: &[f64]) -> HostTensor {
    let shape = spec.shape();
    match spec.dtype {
        DType::U8 => HostTensor { dtype: DType::U8, shape, bytes: values.iter().map(|&value| value as u8).collect() },
        DType::I32 => HostTensor::from_i32(&shape, &values.iter().map(|&value| value as i32).collect::<Vec<_>>()),
        dtype => HostTensor::from_f64(dtype, &shape, values),
    }
}

pub(super) fn kernel_tensor(spec: &TensorSpec, tensor: HostTensor) -> KernelTensor {
    let TensorSpec { deterministic, comparison, grid, pooling, .. } = *spec;
    KernelTensor { deterministic, comparison, grid, pooling, ..KernelTensor::new(spec.name, tensor) }
}

impl<K: Declared> Prepared for Inputs<K> {
    fn operator(&self) -> &'static str {
        K::ABOUT.name
    }

    fn case(&self) -> Option<Case> {
        self.said.then(|| case_of::<K>(&self.case, &self.choices))
    }

    fn oracle(&self, precision: Precision) -> Result<Vec<OracleTensor>, CaseError> {
        self.run_oracle(precision, None, &Side::BOTH).map_err(oracle_error::<K>)
    }

    fn arithmetic(&self) -> Arithmetic {
        Arithmetic { points: RoundingPoints::Specification, lanes: K::SUM_LANES }
    }

    fn oracle_sharing(&self, precision: Precision, products: &Products) -> Result<Vec<OracleTensor>, CaseError> {
        self.run_oracle(precision, Some(products), &Side::BOTH).map_err(oracle_error::<K>)
    }

    fn oracle_of_saved(
        &self,
        written: &KernelRun,
        precision: Precision,
        products: &Products,
    ) -> Result<Vec<OracleTensor>, CaseError> {
        let mut tensors = (*self.tensors).clone();
        for saved in &written.tensors {
            tensors.put(saved.name, saved.tensor.clone());
        }
        let mut rounding = Rounding::sharing(precision, products);
        let computed = K::backward_of_saved(&self.case, &Bound::new(&tensors), &mut rounding);
        let side = Side::Gradient;
        let of = |(name, tensor): (&'static str, Tensor)| {
            Ok(OracleTensor { name, side, shape: tensor.dims().to_vec(), values: elements(&tensor)? })
        };
        let tensors = computed.and_then(|named| named.into_tensors().into_iter().map(of).collect());
        tensors.map_err(oracle_error::<K>)
    }

    fn room_on_gpu(&self, environment: &Environment) -> u64 {
        room_on(environment, &self.specs(), &self.choices.layouts)
    }

    fn kernel(&self, device: &Device, contract: Contract) -> Result<KernelRun, RuntimeError> {
        let specs = self.specs();
        self.launched(&specs, &self.placed(device, contract, &specs)?)
    }

    fn seconds(&self, device: &Device) -> Result<Seconds, RuntimeError> {
        super::timing::of(self, device)
    }

    fn sequence(&self, device: &Device, contract: Contract) -> Result<Option<Sequence>, RuntimeError> {
        sequence::of(self, device, contract).map(Some)
    }

    fn laws(&self) -> Vec<Law> {
        let mut laws = Laws::new(self);
        K::laws(&self.case, &mut laws);
        laws.finish()
    }

    fn gradient_probe(&self) -> Option<Box<dyn GradientProbe + '_>> {
        let specs = self.specs();
        let whole = specs.gradients().next().is_some() && specs.present().all(|spec| spec.elements() > 0);
        let finite = self.choices.special.as_ref().is_none_or(Special::is_finite);
        (whole && finite && K::is_smooth(&self.case))
            .then(|| Box::new(Probe::new(self, &specs)) as Box<dyn GradientProbe>)
    }
}

/// Roles of the arena by part.
pub(super) fn role(part: Part) -> Role {
    match part {
        Part::Input | Part::Upstream { .. } => Role::Input,
        Part::State => Role::InPlace,
        Part::Output | Part::Gradient { .. } => Role::Output,
        Part::Scratch | Part::Observed => Role::Workspace,
    }
}
