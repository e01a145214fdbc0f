//! Benchmarks as part of the declaration: an operator declares which cases are timed, and what one
//! call of each moves and computes. Buffers, data, the call and the recheck follow from the rest of
//! its declaration, here, for all operators.
//!
//! **Data.** Tensors are drawn (and amended) for a smaller case of the operator. They are repeated
//! along the axes in which that case is smaller: on the device along the outermost axis, on the
//! host along others. This does not change the kernels' time: each repetition has its own
//! addresses. Lists decide what is read together, so they are drawn in full ([`Benchmark::amend`]).
//! The host can compute every element and never holds the larger tensors.
//!
//! **Sets.** Several sets of buffers, together several times L2, are used round-robin by the calls.
//!
//! **Recheck.** Entries of one axis, spread over all of it, are compared with the oracle. Given
//! tensors with that axis are narrowed to these entries. The oracle of the case with that many
//! entries gives the expected results. Tensors without the axis, such as gradients that sum over
//! it, are left to the sweeps. For a GEMM a second axis is also sampled
//! ([`Benchmark::also_sampled_along`]), because a few rows of the result would still need all of
//! the other operand.

use std::sync::Arc;

use anyhow::{Context, Result};
use dsv4_reference::precision::Precision;
use dsv4_reference::{Conventions, Products};
use dsv4_runtime::{BackendKind, Contract, Device, Environment, HostTensor, RuntimeError, Views};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::any::{AnyCase, any};
use super::declaration::{Part, Specs, TensorSpec};
use super::declared::{Launches, Operator};
use super::inputs::{Inputs, kernel_tensor};
use super::lines::{Choices, checked, field_error, has_invariant_path, oracle_error};
use super::memory::Placed;
use super::tensors::{Tensors, permuted_along, repeated_along};
use super::{Arithmetic, KernelRun, OracleTensor, Side};
use crate::case::{Case, CaseError};
use crate::operator::fields::Aliasing;
use crate::record::{Operands, Work};

/// An upper bound of L2, bytes (H100 and H200: 50 to 60 MB).
const L2: usize = 60_000_000;
/// The buffers of a benchmark together are at least that many times L2.
const CACHES: usize = 4;
/// And at most that many bytes. A call that reads a few rows of a large table moves fewer.
const MOST_BYTES: usize = 16 << 30;

/// The direction of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// [`Operator::launch`].
    Forward,
    /// [`Operator::launch_backward`], on what one forward saved.
    Backward,
}

/// The rate that is printed next to the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rate {
    /// Bytes per second.
    Bytes,
    /// FLOP per second.
    Flops,
}

/// Elements of the largest tensor that is drawn for a benchmark, approximately. The rest repeats
/// them.
pub const DRAWN: usize = 1 << 22;

/// What the name of a benchmark ends with that takes the invariant path.
pub const BY_INVARIANT_PATH: &str = " invariant";

/// Whether the shapes of the model are timed, instead of small ones for the emulator.
pub fn on_gpu(environment: &Environment) -> bool {
    environment.backend == BackendKind::Cuda
}

/// Enqueues one call. It must not allocate, upload or wait, because what it enqueues is recorded.
pub type Call<K> =
    fn(&<K as Operator>::Case, &Views, &mut Launches<'_>) -> Result<(), RuntimeError>;

/// Changes the case of a sample and its tensors: see [`Benchmark::sampled`].
pub type Sampled<K> = fn(&Whole<'_, K>, &mut <K as Operator>::Case, &mut Tensors);

/// The whole case of a sample.
pub struct Whole<'a, K: Operator> {
    /// The case.
    pub case: &'a K::Case,
    /// The entries of the sampled axis.
    pub rows: &'a [usize],
    /// The entries of the further axis; empty where no further axis exists.
    pub further: &'a [usize],
}

/// An axis that is sampled in addition to [`Benchmark::axis`]. An output without it may be a sum
/// over all of it, so that output is left to the sweeps.
#[derive(Clone, Copy, Debug)]
pub struct Further {
    /// Its name, which is also the case's field with its extent.
    pub axis: &'static str,
    /// How many of its entries are sampled.
    pub entries: usize,
    /// As [`Benchmark::chosen`].
    pub chosen: fn(usize, usize) -> Vec<usize>,
}

/// The entries of an axis, from the case and its sampled entries.
pub type Needed<K> = (&'static str, fn(&<K as Operator>::Case, &[usize]) -> Vec<usize>);

/// A case whose call is timed.
pub struct Benchmark<K: Operator> {
    /// The direction. The group is `OPERATOR_forward` or `OPERATOR_backward`.
    pub direction: Direction,
    /// Name within the group: sizes and types. Reports identify a benchmark by group and name.
    pub name: String,
    /// The case.
    pub case: K::Case,
    /// A case with the same tensors and axes, none of them longer. Its tensors are drawn and then
    /// repeated.
    pub drawn: K::Case,
    /// Least bytes that one call must move: each input once, each output once.
    pub bytes: f64,
    /// Floating-point operations of one call.
    pub flops: f64,
    /// What the tensor cores multiply.
    pub operands: Operands,
    /// The rate that is reported.
    pub rate: Rate,
    /// The axis that is sampled after timing. The case has its extent in a field of the same name.
    pub axis: &'static str,
    /// How many of its entries are compared with the oracle.
    pub rows: usize,
    /// Chooses the entries, from the total and their count: [`spread`], or [`last`] where only
    /// neighbours make a case.
    pub chosen: fn(usize, usize) -> Vec<usize>,
    /// A second axis that is sampled.
    pub further: Option<Further>,
    /// Of another axis, the entries that the sampled ones need: the host holds no others of the
    /// given tensors.
    pub needed: Option<Needed<K>>,
    /// Sets the data that must be drawn for the whole case, such as lists of keys. It replaces what
    /// was drawn for the smaller case.
    pub amend: fn(&K::Case, &mut Tensors),
    /// Completes a sample where narrowing the axis is not enough: skips keys that no list names, or
    /// sets the position of a token.
    pub sampled: Sampled<K>,
    /// The one launch of several that is timed, by its name in the declaration's tensors
    /// ([`TensorSpec::only_in`]). It is then the call. `None` is all launches.
    pub only: Option<&'static str>,
    /// The call: the declaration's launch, unless only one of several is timed.
    pub call: Call<K>,
}

/// Benchmarks of the model's shapes at a size for the emulator. Tests hold repeated tensors and
/// sampled entries to the oracle with them.
#[derive(Clone, Debug)]
pub struct Reduced {
    /// Their directions.
    pub directions: &'static [Direction],
    /// Their names in each direction.
    pub names: &'static [&'static str],
    /// Fields of the case.
    pub whole: Value,
    /// Fields in which the drawn case then differs from it.
    pub drawn: Value,
}

impl Reduced {
    /// Of forwards.
    pub fn forward(names: &'static [&'static str], whole: Value, drawn: Value) -> Self {
        Self { directions: &[Direction::Forward], names, whole, drawn }
    }

    /// Of backwards.
    pub fn backward(names: &'static [&'static str], whole: Value, drawn: Value) -> Self {
        Self { directions: &[Direction::Backward], names, whole, drawn }
    }

    /// Of forwards and of backwards.
    pub fn both(names: &'static [&'static str], whole: Value, drawn: Value) -> Self {
        Self { directions: &[Direction::Forward, Direction::Backward], names, whole, drawn }
    }
}

/// The reduced benchmarks of an operator on a device like this one.
///
/// # Errors
/// One that has no benchmark, or fields that are none of its case's.
pub(super) fn reduced<K: Operator>(environment: &Environment) -> Result<Vec<AnyBenchmark>> {
    let one = |reduced: &Reduced, direction: Direction, name: &str| -> Result<AnyBenchmark> {
        let is_it =
            |benchmark: &Benchmark<K>| benchmark.name == name && benchmark.direction == direction;
        let found = K::benchmarks(environment).into_iter().find(is_it);
        let found =
            found.with_context(|| format!("{} has no benchmark `{name}`", K::ABOUT.name))?;
        Ok(AnyBenchmark::from(found.reduced(&reduced.whole, &reduced.drawn)?))
    };
    let mut all = Vec::new();
    for reduced in K::reduced_benchmarks() {
        for &direction in reduced.directions {
            for name in reduced.names {
                all.push(one(&reduced, direction, name)?);
            }
        }
    }
    Ok(all)
}

impl<K: Operator> Benchmark<K> {
    /// A benchmark whose tensors are drawn for at most [`DRAWN`] elements of the largest, along
    /// `axis`. Four entries along it are sampled. Bytes and FLOPs of a call are not set yet.
    pub fn new(
        direction: Direction,
        name: impl Into<String>,
        case: K::Case,
        axis: &'static str,
    ) -> Self {
        let (drawn, (bytes, flops)) = (shortened::<K>(&case, axis), (0.0, 0.0));
        Self {
            direction,
            name: name.into(),
            case,
            drawn,
            bytes,
            flops,
            operands: Operands::Bf16,
            rate: Rate::Bytes,
            axis,
            rows: 4,
            chosen: spread,
            further: None,
            needed: None,
            amend: |_, _| {},
            sampled: |_, _, _| {},
            only: None,
            call: if direction == Direction::Forward { K::launch } else { K::launch_backward },
        }
    }

    /// A call that moves each of its tensors once, and computes `flops` for each element of the
    /// largest. A backward moves inputs, upstreams, gradients and, of the forward's outputs, those
    /// that were `saved` for it.
    pub fn streaming(mut self, saved: &[&str], flops: f64) -> Self {
        let specs = placed_specs(&K::tensors(&self.case), self.direction, self.only);
        let forward = self.direction == Direction::Forward;
        let moved =
            |spec: &&TensorSpec| forward || spec.part != Part::Output || saved.contains(&spec.name);
        let moved = specs
            .present()
            .filter(|spec| spec.part != Part::Observed && spec.part != Part::Scratch)
            .filter(moved);
        self.bytes = moved.clone().map(|spec| (spec.elements() * spec.dtype.size()) as f64).sum();
        self.flops = flops * moved.map(TensorSpec::elements).max().unwrap_or(0) as f64;
        self
    }

    /// A call that is limited by this many floating-point operations.
    pub fn computing(self, flops: f64) -> Self {
        Self { flops, rate: Rate::Flops, ..self }
    }

    /// A call whose tensor cores multiply these.
    pub fn multiplying(self, operands: Operands) -> Self {
        Self { operands, ..self }
    }

    /// Also limits the drawn tensors along `axis`: the largest tensor with it has at most [`DRAWN`]
    /// elements.
    pub fn also_drawn_along(self, axis: &'static str) -> Self {
        Self { drawn: shortened::<K>(&self.drawn, axis), ..self }
    }

    /// Also limits the compared entries of another axis, in the tensors that have it.
    pub fn also_sampled_along(
        self,
        axis: &'static str,
        entries: usize,
        chosen: fn(usize, usize) -> Vec<usize>,
    ) -> Self {
        Self { further: Some(Further { axis, entries, chosen }), ..self }
    }

    /// The same at another size: `whole` has fields of its case, `drawn` those in which the drawn
    /// case then differs from it.
    ///
    /// # Errors
    /// Fields that are none of the case's.
    pub fn reduced(self, whole: &Value, drawn: &Value) -> Result<Self, CaseError> {
        let with = |case: &K::Case, changed: &Value| -> Result<K::Case, CaseError> {
            let mut line = Case::new(K::ABOUT.name, case);
            line.fields.extend(
                changed
                    .as_object()
                    .into_iter()
                    .flatten()
                    .map(|(name, value)| (name.clone(), value.clone())),
            );
            line.fields()
        };
        let case = with(&self.case, whole)?;
        Ok(Self { drawn: with(&case, drawn)?, case, ..self })
    }

    /// As a benchmark of any operator.
    pub fn timed(self) -> Box<dyn Timed> {
        AnyBenchmark::from(self).timed()
    }
}

/// The tensors that a call needs. A forward has no gradients. One of several launches has only its
/// own tensors.
fn placed_specs(specs: &Specs, direction: Direction, only: Option<&str>) -> Specs {
    let others =
        |spec: &TensorSpec| only.is_some() && spec.only_in.is_some_and(|of| Some(of) != only);
    let gradient =
        |spec: &TensorSpec| matches!(spec.part, Part::Upstream { .. } | Part::Gradient { .. });
    let forward = direction == Direction::Forward;
    specs.clone().without(|spec| others(spec) || forward && gradient(spec))
}

type Amend = dyn Fn(&mut Tensors) + Send + Sync;
type AnySampled =
    dyn Fn(&Case, [&[usize]; 2], &mut Tensors) -> Result<AnyCase, CaseError> + Send + Sync;
type AnyCall = dyn Fn(&Views, &mut Launches<'_>) -> Result<(), RuntimeError> + Send + Sync;

/// The entries of another axis that some sampled ones need.
type AnyNeeded = dyn Fn(&[usize]) -> Vec<usize> + Send + Sync;

/// A [`Benchmark`] of any operator.
#[derive(Clone)]
pub(super) struct AnyBenchmark {
    direction: Direction,
    /// Whether the launches are those whose bits do not depend on the batch.
    invariant: bool,
    name: String,
    case: AnyCase,
    drawn: AnyCase,
    bytes: f64,
    flops: f64,
    operands: Operands,
    rate: Rate,
    axis: &'static str,
    rows: usize,
    chosen: fn(usize, usize) -> Vec<usize>,
    further: Option<Further>,
    needed: Option<(&'static str, Arc<AnyNeeded>)>,
    only: Option<&'static str>,
    amend: Arc<Amend>,
    /// Makes a sample's case from its line and the entries of both axes, and completes its tensors.
    /// `None` takes the line as it is.
    sampled: Option<Arc<AnySampled>>,
    call: Arc<AnyCall>,
}

impl<K: Operator> From<Benchmark<K>> for AnyBenchmark {
    fn from(benchmark: Benchmark<K>) -> Self {
        let Benchmark {
            direction,
            name,
            case,
            drawn,
            bytes,
            flops,
            operands,
            rate,
            axis,
            rows,
            chosen,
            further,
            ..
        } = benchmark;
        let Benchmark { amend, sampled, only, call, needed, .. } = benchmark;
        let whole = Arc::new(case.clone());
        let (amended, called, needs) = (whole.clone(), whole.clone(), whole.clone());
        let needed = needed.map(|(axis, of)| {
            let of: Arc<AnyNeeded> = Arc::new(move |rows: &[usize]| of(&needs, rows));
            (axis, of)
        });
        let sample = move |line: &Case, [rows, further]: [&[usize]; 2], tensors: &mut Tensors| {
            let mut case: K::Case = line.fields()?;
            sampled(&Whole { case: &whole, rows, further }, &mut case, tensors);
            Ok(any::<K>(case))
        };
        Self {
            direction,
            invariant: false,
            name,
            case: any::<K>(case),
            drawn: any::<K>(drawn),
            bytes,
            flops,
            operands,
            rate,
            axis,
            rows,
            chosen,
            further,
            needed,
            only,
            amend: Arc::new(move |tensors| amend(&amended, tensors)),
            sampled: Some(Arc::new(sample)),
            call: Arc::new(move |views, run| call(&called, views, run)),
        }
    }
}

impl AnyBenchmark {
    /// The line of the timed case.
    pub(super) fn line(&self) -> Case {
        self.case.line()
    }

    pub(super) fn timed(self) -> Box<dyn Timed> {
        Box::new(Arc::new(self))
    }

    /// The same call by the invariant path, where a forward has one: what invariance costs.
    pub(super) fn by_invariant_path(&self, environment: &Environment) -> Option<Self> {
        let has_one = self.direction == Direction::Forward && has_invariant_path(&*self.case);
        let name = format!("{}{BY_INVARIANT_PATH}", self.name);
        let case = || self.case.invariantly(environment);
        has_one.then(|| Self { name, case: case(), invariant: true, ..self.clone() })
    }

    fn placed_specs(&self) -> Specs {
        placed_specs(&self.case.tensors(), self.direction, self.only)
    }

    /// The given tensors, some of them shorter than the case's.
    fn given(&self) -> Result<Tensors, CaseError> {
        let specs =
            checked(&*self.drawn).map_err(|refused| field_error(self.case.name(), refused))?;
        let mut tensors = Tensors::draw(&specs, None);
        self.drawn.amend(&mut tensors).map_err(|e| oracle_error(self.case.name(), e))?;
        (self.amend)(&mut tensors);
        for spec in self.case.tensors().present().filter(|spec| spec.is_given()) {
            let shape =
                tensors.get(spec.name).map(|tensor| tensor.shape.clone()).unwrap_or_default();
            let fits =
                |(&drawn, whole): (&usize, usize)| drawn <= whole && (drawn > 0 || whole == 0);
            if shape.len() != spec.axes.len() || !shape.iter().zip(spec.shape()).all(fits) {
                let reason = format!(
                    "`{}` is {shape:?} as drawn, which does not repeat to {:?}",
                    spec.name,
                    spec.shape()
                );
                return Err(oracle_error(self.case.name(), reason));
            }
        }
        Ok(tensors)
    }

    /// The number of sets of buffers on a device.
    fn sets(&self, device: &Device) -> usize {
        match device.environment().backend {
            BackendKind::Cuda => {
                let of_a_set = self
                    .placed_specs()
                    .present()
                    .map(|spec| spec.elements() * spec.dtype.size())
                    .sum::<usize>();
                let beyond_the_cache = ((CACHES * L2) as f64 / self.bytes).ceil() as usize;
                beyond_the_cache.min(MOST_BYTES / of_a_set.max(1)).max(2)
            }
            BackendKind::Emulator | BackendKind::External => 2,
        }
    }

    /// Whether the call overwrites what it reads, so that a second call computes something else.
    fn overwrites(&self) -> bool {
        let overwritten = |spec: &TensorSpec| {
            spec.part == Part::State || matches!(spec.placed, Some((Aliasing::InPlace, _)))
        };
        self.placed_specs().present().any(overwritten)
    }

    /// The sampled entries as a separate case.
    fn sample(&self, given: &Tensors) -> Result<Sample, CaseError> {
        let whole = self.case.tensors();
        let entries = |axis, chosen: fn(usize, usize) -> Vec<usize>, count| {
            let extent = whole.extent(axis).ok_or_else(|| self.no_axis(axis))?;
            Ok::<_, CaseError>(SampledAxis { name: axis, extent, entries: chosen(extent, count) })
        };
        let axis = entries(self.axis, self.chosen, self.rows)?;
        let further = self
            .further
            .map(|further| entries(further.axis, further.chosen, further.entries))
            .transpose()?;
        let mut line = self.case.line();
        for axis in [Some(&axis), further.as_ref()].into_iter().flatten() {
            let field = line.fields.get_mut(axis.name).ok_or_else(|| self.no_axis(axis.name))?;
            *field = axis.entries.len().into();
        }
        let case = self.case.operator().parse(&line)?;
        let needed = self.needed.as_ref().map(|(name, of)| (*name, of(&axis.entries)));
        let narrowed = Narrowed { specs: case.tensors(), axis, further, needed };
        let tensors = narrowed.tensors(&whole, given);
        self.completed(&line, case, narrowed, tensors)
    }

    /// The sample of a line, completed as the benchmark declares.
    fn completed(
        &self,
        line: &Case,
        case: AnyCase,
        narrowed: Narrowed,
        mut tensors: Tensors,
    ) -> Result<Sample, CaseError> {
        let before = narrowed.is_all().then(|| (case.line(), tensors.clone()));
        let case = match &self.sampled {
            Some(sampled) => sampled(line, narrowed.entries(), &mut tensors)?,
            None => case,
        };
        let is_whole =
            before.is_some_and(|(unchanged, given)| unchanged == case.line() && given == tensors);
        let specs = checked(&*case).map_err(|refused| field_error(case.name(), refused))?;
        for spec in specs.present().filter(|spec| spec.is_given()) {
            let (name, shape) = (spec.name, &tensors.tensor(spec.name).shape);
            if *shape != spec.shape() {
                let reason = format!("a sample's `{name}` is {shape:?}, not {:?}", spec.shape());
                return Err(oracle_error(case.name(), reason));
            }
        }
        let inputs = Inputs::of(case, Choices::default(), tensors);
        Ok(Sample { inputs, narrowed, is_whole, direction: self.direction })
    }

    fn no_axis(&self, axis: &str) -> CaseError {
        let reason = format!(
            "the case of benchmark `{}` has no such axis, or no field of its name",
            self.name
        );
        CaseError::Field { operator: self.case.name(), field: axis.to_owned().into(), reason }
    }
}

/// A case with the entries along an axis that give the largest tensor [`DRAWN`] elements, and at
/// least one.
fn shortened<K: Operator>(case: &K::Case, axis: &'static str) -> K::Case {
    let line = shortened_line(Case::new(K::ABOUT.name, case), &K::tensors(case), axis);
    // A case without such a field is rejected when it is sampled.
    line.fields().unwrap_or_else(|_| case.clone())
}

fn shortened_line(mut line: Case, specs: &Specs, axis: &'static str) -> Case {
    let of_an_entry =
        |spec: &TensorSpec| spec.axis(axis).map(|at| spec.elements() / spec.axes[at].extent.max(1));
    let largest = specs
        .present()
        .filter(|spec| spec.is_given())
        .filter_map(of_an_entry)
        .max()
        .unwrap_or(1)
        .max(1);
    if let Some(extent) = line.fields.get_mut(axis) {
        let whole = extent.as_u64().unwrap_or(0);
        *extent = whole.min((DRAWN / largest).max(1) as u64).into();
    }
    line
}

/// `count` entries spread over `0..total`, including the last one.
pub fn spread(total: usize, count: usize) -> Vec<usize> {
    let count = count.min(total);
    (1..=count).map(|i| i * total / count - 1).collect()
}

/// About `count` entries of `0..total` in whole runs of 128, spread over all of it. The last run is
/// included and may be shorter. For rows of matrices whose blocks of 128 share a scale.
pub fn spread_blocks(total: usize, count: usize) -> Vec<usize> {
    const BLOCK: usize = 128;
    let blocks = spread(total.div_ceil(BLOCK), count.div_ceil(BLOCK)).into_iter();
    blocks.flat_map(|block| block * BLOCK..total.min((block + 1) * BLOCK)).collect()
}

/// The last `count` entries of `0..total`.
pub fn last(total: usize, count: usize) -> Vec<usize> {
    (total - count.min(total)..total).collect()
}

/// The axes of a case that a sample narrows, and their entries.
struct Narrowed {
    /// The tensors of the sample before [`Benchmark::sampled`] changed it.
    specs: Specs,
    axis: SampledAxis,
    further: Option<SampledAxis>,
    /// Of another axis, the entries that given tensors keep.
    needed: Option<(&'static str, Vec<usize>)>,
}

/// An axis, its extent in the whole case, and the entries that are sampled.
struct SampledAxis {
    name: &'static str,
    extent: usize,
    entries: Vec<usize>,
}

impl Narrowed {
    /// The sampled entries of the axis and of the further one.
    fn entries(&self) -> [&[usize]; 2] {
        [&self.axis.entries, self.further.as_ref().map_or(&[], |further| &further.entries)]
    }

    /// The given tensors of the whole case, narrowed to the sampled entries.
    fn tensors(&self, whole: &Specs, given: &Tensors) -> Tensors {
        let mut tensors = Tensors::default();
        for spec in whole.present().filter(|spec| spec.is_given()) {
            let mut tensor = given.tensor(spec.name).clone();
            for (at, order) in self.orders(spec).into_iter().enumerate() {
                tensor = match order {
                    Some(rows) => repeated_along(&tensor, at, rows.iter().copied()),
                    None => repeated_along(&tensor, at, 0..spec.axes[at].extent),
                };
            }
            tensors.put(spec.name, tensor);
        }
        tensors
    }

    /// For each axis of a tensor of the whole case, the entries that the sample has. `None` is all
    /// of them. An axis whose extent follows the sampled one is narrowed as well, such as that of
    /// positions, one for each token.
    fn orders(&self, whole: &TensorSpec) -> Vec<Option<&[usize]>> {
        let (axis, further) = self.places(whole);
        let needed = |at: usize| {
            let (name, entries) = self.needed.as_ref()?;
            (whole.axes[at].name == *name).then_some(&entries[..])
        };
        let order = |at: usize| match &self.further {
            _ if axis.contains(&at) => Some(&self.axis.entries[..]),
            Some(own) if further == Some(at) => Some(&own.entries[..]),
            _ => needed(at),
        };
        (0..whole.axes.len()).map(order).collect()
    }

    /// The indices of the sampled axis, or of axes that follow it, in a tensor of the whole case;
    /// and the index of the further axis.
    fn places(&self, whole: &TensorSpec) -> (Vec<usize>, Option<usize>) {
        let small = self.specs.find(whole.name).map(TensorSpec::shape);
        let further = self.further.as_ref().and_then(|further| whole.axis(further.name));
        let follows = |at: usize, extent: usize| {
            extent == self.axis.extent
                && further != Some(at)
                && small.as_ref().is_some_and(|small| small[at] != extent)
        };
        let axes = whole.axes.iter().enumerate();
        let places =
            axes.filter(|(at, axis)| axis.name == self.axis.name || follows(*at, axis.extent));
        (places.map(|(at, _)| at).collect(), further)
    }

    /// Whether the sample has every entry. Then tensors without the axis are part of it as well,
    /// unless [`Benchmark::sampled`] removes some of what they hold. It may do so where these
    /// entries are compared separately.
    fn is_all(&self) -> bool {
        [Some(&self.axis), self.further.as_ref()]
            .into_iter()
            .flatten()
            .all(|axis| axis.entries.len() == axis.extent)
    }

    /// The sampled entries of what a kernel wrote; `None` where the tensor has no axis to sample.
    fn download(
        &self,
        whole: &TensorSpec,
        placed: &Placed<'_>,
    ) -> Result<Option<HostTensor>, RuntimeError> {
        let (places, further) = self.places(whole);
        let Some(&at) = places.first().filter(|_| self.further.is_none() || further.is_some())
        else {
            return Ok(None);
        };
        let (view, rows) = (&placed.views()[whole.name], &self.axis.entries);
        let entries = rows.iter().map(|&row| placed.arena().download(&view.narrow(at, row, 1)?));
        let bytes = interleaved(
            &entries.collect::<Result<Vec<_>, _>>()?,
            view.shape[..at].iter().product(),
        );
        let mut shape = view.shape.clone();
        shape[at] = rows.len();
        let rows = HostTensor { dtype: view.dtype, shape, bytes };
        Ok(Some(match further.zip(self.further.as_ref()) {
            Some((at, further)) => permuted_along(&rows, at, &further.entries),
            None => rows,
        }))
    }
}

/// The bytes of tensors of one entry each along an axis, with `outer` steps of outer axes.
fn interleaved(entries: &[HostTensor], outer: usize) -> Vec<u8> {
    let piece = |entry: &HostTensor, o: usize| {
        let bytes = entry.bytes.len() / outer;
        entry.bytes[o * bytes..(o + 1) * bytes].to_vec()
    };
    (0..outer).flat_map(|o| entries.iter().flat_map(move |entry| piece(entry, o))).collect()
}

/// Entries of a case as a separate case.
struct Sample {
    inputs: Inputs,
    narrowed: Narrowed,
    /// Whether the sample has everything that the case has. Then it includes tensors without a
    /// sampled axis.
    is_whole: bool,
    direction: Direction,
}

impl Sample {
    fn oracle(
        &self,
        precision: Precision,
        products: &Products,
    ) -> Result<Vec<OracleTensor>, CaseError> {
        let sides =
            if self.direction == Direction::Forward { &[Side::Forward][..] } else { &Side::BOTH };
        self.inputs
            .run_oracle(precision, Some(products), sides)
            .map_err(|e| oracle_error(self.inputs.case.name(), e))
    }

    /// What the kernels wrote for it.
    fn written(&self, whole: &Specs, placed: &Placed<'_>) -> Result<KernelRun, RuntimeError> {
        let (mut tensors, mut written) = (Vec::new(), Tensors::default());
        for spec in whole.present().filter(|spec| spec.is_written() && spec.part != Part::Scratch) {
            let tensor = match self.narrowed.download(spec, placed)? {
                Some(tensor) => tensor,
                None if self.is_whole || (self.narrowed.is_all() && !whole.compares(spec.name)) => {
                    placed.arena().download(&placed.views()[spec.name])?
                }
                None => continue,
            };
            if whole.compares(spec.name) {
                tensors.push(kernel_tensor(spec, tensor.clone()));
            }
            written.put(spec.name, tensor);
        }
        if whole.present().any(|spec| spec.part == Part::Observed) {
            let specs = self.inputs.specs();
            let (case, given) = (&self.inputs.case, &self.inputs.tensors);
            let observed = case.observe(given, &written, Conventions::default()).into_iter();
            tensors.extend(
                observed
                    .filter_map(|(name, tensor)| Some(kernel_tensor(specs.find(name)?, tensor))),
            );
        }
        Ok(KernelRun { tensors, violations: Vec::new(), paths: Vec::new() })
    }
}

/// A benchmark of any operator.
pub trait Timed: Send + Sync {
    /// `OPERATOR_forward` or `OPERATOR_backward`.
    fn group(&self) -> String;

    /// Name within the group.
    fn name(&self) -> &str;

    /// What one call does.
    fn work(&self) -> Work;

    /// The rate that is reported.
    fn rate(&self) -> Rate;

    /// Why it cannot run on a device like this one; `None` where it can.
    fn cannot_run(&self, environment: &Environment) -> Option<String>;

    /// Draws the data and places every set of buffers.
    ///
    /// # Errors
    /// The oracle's, where it computes inputs; the device's; the launcher's.
    fn place<'d>(&self, device: &'d Device) -> Result<Box<dyn Buffers + 'd>>;

    /// The exact oracle of the call, which may run any number of times. Returns its first tensor's
    /// elements.
    ///
    /// # Errors
    /// Inputs that the oracle cannot compute.
    fn oracle(&self) -> Result<OracleCall>;
}

/// See [`Timed::oracle`].
pub type OracleCall = Box<dyn Fn() -> Result<Vec<f64>, CaseError>>;

/// A benchmark with its buffers.
pub trait Buffers {
    /// The number of sets of buffers.
    fn sets(&self) -> usize;

    /// Enqueues one call on a set.
    ///
    /// # Errors
    /// The launcher's.
    fn call(&self, set: usize) -> Result<(), RuntimeError>;

    /// Sampled entries of what the last call on `set` wrote, and their oracle
    /// ([`crate::judge::recheck`]). Where a call overwrites what it reads, they come from one more
    /// call on the original input.
    ///
    /// # Errors
    /// A sample that cannot be taken.
    fn sampled(&self, set: usize) -> Result<Sampling>;
}

/// The sampled results of a call.
pub struct Sampling {
    sample: Sample,
    /// What the kernels wrote for it.
    pub run: KernelRun,
    /// The arithmetic of the kernels.
    pub arithmetic: Arithmetic,
    /// The axis along which it was sampled.
    pub axis: &'static str,
}

impl Sampling {
    /// Runs the oracle of the sample, as one of the runs that have `products` in common.
    ///
    /// # Errors
    /// What the oracle rejects.
    pub fn oracle(
        &self,
        precision: Precision,
        products: &Products,
    ) -> Result<Vec<OracleTensor>, CaseError> {
        self.sample.oracle(precision, products)
    }
}

impl Timed for Arc<AnyBenchmark> {
    fn group(&self) -> String {
        let direction = match self.direction {
            Direction::Forward => "forward",
            Direction::Backward => "backward",
        };
        format!("{}_{direction}", self.case.name())
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn work(&self) -> Work {
        let AnyBenchmark { bytes, flops, operands, .. } = **self;
        Work { operator: self.case.name().into(), bytes, flops, operands }
    }

    fn rate(&self) -> Rate {
        self.rate
    }

    fn cannot_run(&self, environment: &Environment) -> Option<String> {
        self.case.cannot_run(environment)
    }

    fn place<'d>(&self, device: &'d Device) -> Result<Box<dyn Buffers + 'd>> {
        let given = self.given()?;
        let invariant = self.invariant.then(|| device.invariant());
        let (benchmark, sets) = (self.clone(), Vec::new());
        let mut placed = OnDevice { benchmark, device, invariant, given, sets };
        for _ in 0..self.sets(device) {
            let set = placed.set()?;
            placed.sets.push(set);
        }
        Ok(Box::new(placed))
    }

    fn oracle(&self) -> Result<OracleCall> {
        let whole = AnyBenchmark {
            rows: usize::MAX,
            further: None,
            needed: None,
            sampled: None,
            ..(**self).clone()
        };
        let sample = whole.sample(&self.given()?)?;
        Ok(Box::new(move || {
            let tensors = sample.oracle(Precision::Exact, &Products::default())?;
            Ok(tensors.into_iter().next().map(|tensor| tensor.values).unwrap_or_default())
        }))
    }
}

struct OnDevice<'d> {
    benchmark: Arc<AnyBenchmark>,
    device: &'d Device,
    /// The same device, whose launches take the invariant path, where the benchmark asks for it.
    invariant: Option<Device>,
    given: Tensors,
    sets: Vec<Placed<'d>>,
}

impl<'d> OnDevice<'d> {
    /// Where launches go.
    fn launching(&self) -> &Device {
        self.invariant.as_ref().unwrap_or(self.device)
    }

    /// One more set of buffers. The first set owns the workspaces of all.
    fn set(&self) -> Result<Placed<'d>> {
        let AnyBenchmark { case, direction, .. } = &*self.benchmark;
        let specs = self.benchmark.placed_specs();
        let mut placed = Placed::repeating(self.device, Contract::NAN, &specs, &self.given)?;
        for (name, bytes) in case.workspaces(placed.views(), self.launching())? {
            match self.sets.first() {
                Some(first) => placed.put(name, first.views()[name].clone()),
                None => placed.workspace(name, bytes)?,
            }
        }
        if *direction == Direction::Backward {
            case.launch(placed.views(), &mut Launches::timed(self.launching()))
                .context("the forward")?;
        }
        Ok(placed)
    }

    fn call_on(&self, placed: &Placed<'_>) -> Result<(), RuntimeError> {
        let views = match self.benchmark.direction {
            Direction::Forward => placed.views(),
            Direction::Backward => placed.backward_views(),
        };
        (self.benchmark.call)(views, &mut Launches::timed(self.launching()))
    }

    fn sampling(&self, placed: &Placed<'_>) -> Result<Sampling> {
        let sample = self.benchmark.sample(&self.given)?;
        let run = sample.written(&self.benchmark.placed_specs(), placed)?;
        let lanes = self.benchmark.case.operator().sum_lanes();
        let arithmetic = Arithmetic::of_specification(lanes);
        Ok(Sampling { sample, run, arithmetic, axis: self.benchmark.axis })
    }
}

impl Buffers for OnDevice<'_> {
    fn sets(&self) -> usize {
        self.sets.len()
    }

    fn call(&self, set: usize) -> Result<(), RuntimeError> {
        self.call_on(&self.sets[set])
    }

    fn sampled(&self, set: usize) -> Result<Sampling> {
        if !self.benchmark.overwrites() {
            return self.sampling(&self.sets[set]);
        }
        let fresh = self.set()?;
        self.call_on(&fresh)?;
        self.sampling(&fresh)
    }
}
