//! What an operator gives to the harness, and what the harness needs from a case.
//!
//! `strategy -> case -> inputs -> { oracle, kernel } -> checks -> record -> report`. An operator's
//! file in `src/operators/` declares the first four steps. Everything after that is the same for
//! all operators ([`crate::judge::checks`]). The [`registry`](crate::operators::registry) lists all
//! operators.

use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use dsv4_reference::precision::{CHOICES, Precision};
use dsv4_reference::{Format, Products};
use dsv4_runtime::arena::Violation;
use dsv4_runtime::{Contract, DType, Device, Environment, HostTensor, RuntimeError};
use serde::Serialize;

use crate::case::{Case, CaseError};
use crate::operator::elsewhere::{OfRank, WrittenByRank};
use crate::record::{BatchAxis, Seconds};
pub use crate::record::{Family, RoundingPoints};
use dsv4_reference::Conventions;

pub mod actual;
pub mod any;
pub mod batches;
pub mod benchmarks;
pub mod call;
pub mod declaration;
pub mod declared;
pub mod documentation;
pub mod elsewhere;
pub mod fields;
pub mod given;
pub mod golden;
pub mod golden_file;
mod inputs;
pub mod laws;
pub mod layouts;
mod limits;
mod lines;
mod memory;
pub mod prelude;
mod probe;
pub mod refusals;
mod sequence;
pub mod size;
pub mod special;
pub mod tensors;
mod timing;

pub use any::AnyOperator;
pub use declared::Operator;
pub use sequence::{Repeat, Sequence};

/// What remains of three minutes after the program's start and the writing of its report.
const SMOKE: Duration = Duration::from_secs(150);

/// How large a sweep's cases are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Profile {
    /// Typical and saved cases of every operator, then edge cases until 150 seconds are used.
    Smoke,
    /// Under half an hour on two cores for all operators, a minute for most single ones.
    Quick,
    /// The profile that a merge waits for.
    Ci,
    /// Everything, production shapes included; meant for a GPU.
    Full,
}

impl Profile {
    /// The profile's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Smoke => "smoke",
            Self::Quick => "quick",
            Self::Ci => "ci",
            Self::Full => "full",
        }
    }

    /// This profile's entry of three settings for quick, ci and full. Smoke has the cases of quick.
    pub fn of<T>(self, [quick, ci, full]: [T; 3]) -> T {
        match self {
            Self::Smoke | Self::Quick => quick,
            Self::Ci => ci,
            Self::Full => full,
        }
    }

    /// Default number of random schedules for each case on the emulator, in addition to the
    /// deterministic one, which finds races by their cause. Others find what blocks do to each
    /// other, and results that depend on the order of threads without a race.
    pub fn schedules(self) -> u32 {
        match self {
            Self::Smoke => 1,
            _ => self.of([1, 4, 4]),
        }
    }

    /// How long after the start of a sweep its edge cases may still start. `None` is no limit.
    pub fn time_limit(self) -> Option<Duration> {
        (self == Self::Smoke).then_some(SMOKE)
    }
}

/// A kernel file and the defines that it is compiled with.
pub type ModuleSpecification = (String, Vec<(String, String)>);

/// Forward output or gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// A forward output.
    Forward,
    /// A gradient.
    Gradient,
}

impl Side {
    /// Both of them.
    pub const BOTH: [Self; 2] = [Self::Forward, Self::Gradient];
}

/// A tensor of the oracle, in f64, not rounded to the type in which the kernel stores it.
#[derive(Clone, Debug)]
pub struct OracleTensor {
    /// Name, the same as the kernel's.
    pub name: &'static str,
    /// Forward or gradient.
    pub side: Side,
    /// Shape.
    pub shape: Vec<usize>,
    /// Elements, row-major.
    pub values: Vec<f64>,
}

/// The form of a tensor that kernels write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub dtype: DType,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Whether the forward or the backward writes it.
    pub side: Side,
}

/// A tensor that the kernel wrote.
#[derive(Clone, Debug)]
pub struct KernelTensor {
    /// Name, the same as the oracle's.
    pub name: &'static str,
    /// The values that the kernel wrote.
    pub tensor: HostTensor,
    /// Whether two runs must agree bit for bit. Sums by floating-point atomics need not.
    pub deterministic: bool,
    /// How it is compared with the oracle's.
    pub comparison: Comparison,
    /// The grid of its last rounding. Default: that of its storage type.
    pub grid: Option<Grid>,
    /// Which of its elements share one scale.
    pub pooling: Pooling,
}

impl KernelTensor {
    /// A tensor that is repeated bit for bit and compared within the budget of its rounding to its
    /// storage type.
    pub fn new(name: &'static str, tensor: HostTensor) -> Self {
        let (comparison, grid, pooling) = Default::default();
        Self { name, tensor, deterministic: true, comparison, grid, pooling }
    }

    /// The grid of its values.
    pub fn grid(&self) -> Grid {
        self.grid.unwrap_or_else(|| self.tensor.dtype.into())
    }

    /// Other tensors of the oracle that its comparison needs: scores, or scales.
    pub fn consults(&self) -> impl Iterator<Item = &'static str> {
        let scores = match self.comparison {
            Comparison::Selection { scores } => Some(scores),
            Comparison::Rounded | Comparison::Exact => None,
        };
        let scales = match self.grid {
            Some(Grid::Scaled { scales, .. }) => Some(scales),
            _ => None,
        };
        scores.into_iter().chain(scales)
    }
}

/// How a tensor of the kernel is compared with that of the oracle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Comparison {
    /// Within the budget of its rounding.
    #[default]
    Rounded,
    /// Equal, whatever the spread of the oracle's runs is: codes, counts, permutations.
    Exact,
    /// Indices of a selection: another one is right only where the oracle's scores are within
    /// their own bounds.
    Selection {
        /// The oracle's tensor of the scores that were selected from.
        scores: &'static str,
    },
}

/// The values that a compared tensor can hold: the grid of its last rounding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Grid {
    /// No rounding: integers.
    Exact,
    /// The values of a format.
    Float(Format),
    /// Values of a format times a scale that a block of elements shares: dequantized codes.
    Scaled {
        /// Format of the codes.
        format: Format,
        /// Rows and columns (along the last two axes) that share a scale. The last block of an axis
        /// may be smaller.
        block: [usize; 2],
        /// The oracle's tensor of the scales: one for each block. Its other axes are those of the
        /// tensor itself.
        scales: &'static str,
    },
}

impl From<DType> for Grid {
    fn from(dtype: DType) -> Self {
        format_of(dtype).map_or(Self::Exact, Self::Float)
    }
}

/// The elements over which a budget pools the variance of the oracle's runs. They share one scale
/// by construction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pooling {
    /// The last axis: a row.
    #[default]
    LastAxis,
    /// That many trailing axes: 2 is a matrix, 0 is each element separately.
    Trailing(usize),
    /// That many neighbours along the last axis, at least 1. The last group of a row may be
    /// smaller.
    Group(usize),
}

impl Pooling {
    /// The ranges of elements, row-major, that pool.
    pub fn ranges(self, shape: &[usize]) -> Vec<Range<usize>> {
        let (rows, row_len) = rows_of(shape);
        let (outer, inner, step) = match self {
            Self::LastAxis => (rows, row_len, row_len),
            Self::Trailing(axes) => {
                let (outer, inner) = shape.split_at(shape.len().saturating_sub(axes));
                let inner = inner.iter().product();
                (outer.iter().product(), inner, inner)
            }
            Self::Group(neighbours) => (rows, row_len, neighbours),
        };
        let groups = |row: usize| {
            let end = (row + 1) * inner;
            (row * inner..end)
                .step_by(step.max(1))
                .map(move |from| from..end.min(from + step.max(1)))
        };
        (0..outer).flat_map(groups).collect()
    }
}

/// One run of the kernels of a case.
#[derive(Clone, Debug)]
pub struct KernelRun {
    /// Everything that was written.
    pub tensors: Vec<KernelTensor>,
    /// Forbidden writes.
    pub violations: Vec<Violation>,
    /// Kernel paths that ran.
    pub paths: Vec<String>,
}

/// Oracle runs whose rounding errors have random phases.
pub const WORKING_RUNS: usize = 24;

/// Oracle runs that round to nearest: for each choice one without noise in fp32, and four with
/// noise.
pub const NEAREST_RUNS: usize = 5 * CHOICES;

/// What a kernel declares about its arithmetic. Default: nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Arithmetic {
    /// Where it rounds.
    pub points: RoundingPoints,
    /// The least number of lanes in which it adds the values of a row. The lanes are added as a
    /// tree.
    pub lanes: usize,
    /// What it does otherwise than the specification.
    pub conventions: Conventions,
}

impl Arithmetic {
    /// That of a kernel which rounds where the specification does.
    pub fn of_specification(lanes: usize) -> Self {
        let (points, conventions) = (RoundingPoints::Specification, Conventions::default());
        Self { points, lanes, conventions }
    }
}

impl Default for Arithmetic {
    fn default() -> Self {
        Self { points: RoundingPoints::Undeclared, ..Self::of_specification(1) }
    }
}

/// A case with its inputs. Its oracle may run on several threads at once.
pub trait PreparedCase: Sync {
    /// The operator.
    fn operator(&self) -> &'static str;

    /// Runs the oracle, forward and backward.
    ///
    /// # Errors
    /// What the oracle rejects.
    fn oracle(&self, precision: Precision) -> Result<Vec<OracleTensor>, CaseError>;

    /// As [`Self::oracle`], as one of several runs. `products` holds what all runs have in common
    /// ([`Rounding::sharing`](dsv4_reference::Rounding::sharing)). The exact run is first.
    ///
    /// # Errors
    /// What the oracle rejects.
    fn oracle_sharing(
        &self,
        precision: Precision,
        _products: &Products,
    ) -> Result<Vec<OracleTensor>, CaseError> {
        self.oracle(precision)
    }

    /// Gradients computed from what the kernels saved, for the gradients that the operator declares
    /// this way. Computed as [`Self::oracle_sharing`] computes.
    ///
    /// # Errors
    /// What the oracle rejects.
    fn oracle_of_saved(
        &self,
        _written: &KernelRun,
        _precision: Precision,
        _products: &Products,
    ) -> Result<Vec<OracleTensor>, CaseError> {
        Ok(Vec::new())
    }

    /// The arithmetic of the operator's own kernels.
    fn arithmetic(&self) -> Arithmetic {
        Arithmetic::of_specification(1)
    }

    /// Bytes of GPU memory that must be free so that the kernels get all their buffers. 0 on the
    /// emulator.
    fn room_on_gpu(&self, _environment: &Environment) -> u64 {
        0
    }

    /// Runs the kernels, forward and backward, under a memory contract.
    ///
    /// # Errors
    /// What the launcher rejects, and what the kernel did wrong.
    fn kernel(&self, device: &Device, contract: Contract) -> Result<KernelRun, RuntimeError>;

    /// As [`Self::kernel`]: every tensor that the kernels wrote, as it is stored.
    ///
    /// # Errors
    /// Those of [`Self::kernel`].
    fn stored(
        &self,
        device: &Device,
        contract: Contract,
    ) -> Result<Vec<(&'static str, HostTensor)>, RuntimeError> {
        let run = self.kernel(device, contract)?;
        Ok(run.tensors.into_iter().map(|tensor| (tensor.name, tensor.tensor)).collect())
    }

    /// The tensors that kernels of the case write, as they are stored.
    fn written(&self) -> Vec<Written> {
        Vec::new()
    }

    /// The tensors that are computed of those, and compared in the place of some.
    fn observed(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// What each rank of the case is given and is to write, padding with the contract's poison, where
    /// ranks run elsewhere. `device` only holds tensors ([`Device::holding`]). `None` for a case of
    /// one device.
    ///
    /// # Errors
    /// What the operator rejects.
    fn of_ranks(
        &self,
        _device: &Device,
        _contract: Contract,
    ) -> Result<Option<Vec<OfRank>>, RuntimeError> {
        Ok(None)
    }

    /// Every tensor of the case, as it is stored, put together of what ranks wrote elsewhere. What no
    /// rank wrote is poison.
    ///
    /// # Errors
    /// A tensor that is not the rank's; [`RuntimeError::Rank`] for a rank that has another sum than
    /// the others.
    fn united(
        &self,
        _device: &Device,
        _contract: Contract,
        _written: Vec<WrittenByRank>,
    ) -> Result<Vec<(&'static str, HostTensor)>, RuntimeError> {
        Ok(Vec::new())
    }

    /// What is compared of tensors as they are stored, by whatever kernel: themselves, or what they
    /// mean by the conventions of that kernel. What a tensor means is not computed where another
    /// tensor of the forward is missing.
    fn compared(
        &self,
        stored: Vec<(&'static str, HostTensor)>,
        _conventions: Conventions,
    ) -> Vec<KernelTensor> {
        stored.into_iter().map(|(name, tensor)| KernelTensor::new(name, tensor)).collect()
    }

    /// The device time of one call of the kernels, forward and backward.
    ///
    /// # Errors
    /// What the launcher rejects, and what the kernel did wrong.
    fn seconds(&self, _device: &Device) -> Result<Seconds, RuntimeError> {
        Ok(Seconds::default())
    }

    /// Runs the kernels again after calls with other data: in the same buffers, and in others next
    /// to them. `None` where the case has no other data.
    ///
    /// # Errors
    /// Those of [`Self::kernel`].
    fn sequence(
        &self,
        _device: &Device,
        _contract: Contract,
    ) -> Result<Option<Sequence>, RuntimeError> {
        Ok(None)
    }

    /// The case with the scalars and sizes of these inputs, in particular of a law's variant. Where
    /// it is absent, an external kernel is not checked against the operator's laws
    /// ([`crate::external`]).
    fn case(&self) -> Option<Case> {
        None
    }

    /// The tensors that kernels read, for words about what a variant changed.
    fn given(&self) -> Vec<Given<'_>> {
        Vec::new()
    }

    /// Relations between this case and a variant of it that need no oracle.
    fn laws(&self) -> Vec<Law> {
        Vec::new()
    }

    /// The same rows in other batches.
    fn batches(&self) -> Batched {
        Batched::default()
    }

    /// The launches of forward and backward on a device like this one, in words: kernel, grid,
    /// block and shared memory. Nothing runs.
    ///
    /// # Errors
    /// What the launcher rejects.
    fn launches(&self, _environment: &Environment) -> Result<Vec<String>, RuntimeError> {
        Ok(Vec::new())
    }

    /// The oracle as a differentiable function, for the triangulation of its gradients.
    fn gradient_probe(&self) -> Option<Box<dyn GradientProbe + '_>> {
        None
    }
}

/// A tensor that kernels read.
#[derive(Clone, Debug)]
pub struct Given<'t> {
    /// Its name.
    pub name: &'static str,
    /// Its values.
    pub tensor: &'t HostTensor,
    /// The names of its axes.
    pub axes: Vec<&'static str>,
}

/// A relation between the kernel's outputs for two inputs.
pub struct Law {
    /// Name; appears as `law: NAME`, or as `independence`.
    pub name: &'static str,
    /// The variant's inputs.
    pub variant: Box<dyn PreparedCase>,
    /// For each tensor that the law binds, the relation that must hold.
    pub relations: Vec<(&'static str, Relation)>,
    /// Why the law does not apply to this case: a counted skip. `None` where it applies.
    pub left_out: Option<&'static str>,
}

/// The other batches of a case.
#[derive(Default)]
pub struct Batched {
    /// Those that run.
    pub runs: Vec<BatchRun>,
    /// Those that cannot be made of this case, with reasons.
    pub skips: Vec<(BatchAxis, String)>,
}

/// Rows of a case in another batch: their bits must be the case's.
pub struct BatchRun {
    /// The way in which the batch is another one.
    pub axis: BatchAxis,
    /// Whether the operator declares that the case is invariant along it.
    pub declared: bool,
    /// Both extents, in words.
    pub extents: String,
    /// The other batch.
    pub variant: Box<dyn PreparedCase>,
    /// What is equal.
    pub same: Vec<Same>,
}

/// Entries of a tensor of a case that equal entries of a tensor of another batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Same {
    /// The tensor of the case, and that of the batch.
    pub tensors: [&'static str; 2],
    /// For each of the two: the axis along which entries are counted, and how many axes from there
    /// count as one.
    pub axes: [(usize, usize); 2],
    /// Pairs of an entry of the case and an entry of the batch.
    pub entries: Vec<(usize, usize)>,
}

impl Same {
    /// These pairs of entries along an axis of a tensor that has one name in both.
    pub fn along(tensor: &'static str, axis: usize, entries: &[(usize, usize)]) -> Self {
        let (tensors, axes) = ([tensor; 2], [(axis, 1); 2]);
        Self { tensors, axes, entries: entries.to_vec() }
    }

    /// The same where the first `axes` axes of the case's tensor, and of the batch's, count as one.
    pub fn leading(tensor: &'static str, axes: [usize; 2], entries: &[(usize, usize)]) -> Self {
        let axes = axes.map(|joined| (0, joined));
        Self { tensors: [tensor; 2], axes, entries: entries.to_vec() }
    }
}

/// What [`Relation::MadeOf`] computes from the variant's tensor: the values of the case's tensor,
/// row-major.
pub type MadeOf = dyn Fn(&HostTensor) -> Vec<f64>;

/// What must hold between a tensor of the case and the same tensor of the variant.
#[derive(Clone)]
pub enum Relation {
    /// `variant == factor * case`, bit for bit; `factor` is a power of two.
    Times(f64),
    /// Rows (all axes but the last, flattened) for which this returns `true` are bit-equal.
    EqualRows(Rc<dyn Fn(usize) -> bool>),
    /// `variant[i] == case[map[i]]` for each row `i`, bit for bit.
    PermutedRows(Vec<usize>),
    /// Entry `i` along an axis of the variant is entry `order[i]` of the case, bit for bit.
    PermutedAlong {
        /// The index of the axis.
        axis: usize,
        /// For each entry of the variant, the entry of the case.
        order: Vec<usize>,
    },
    /// All entries along an axis are bit-equal but one.
    EqualExcept {
        /// The index of the axis.
        axis: usize,
        /// The entry that may differ.
        at: usize,
    },
    /// `case == made_of(variant)`, value by value, with NaN equal to NaN. `made_of` is a further
    /// step of the kernel, computed here.
    MadeOf(Rc<MadeOf>),
    /// Equal up to rounding: the difference is at most the sum of both error budgets.
    WithinBudget,
    /// The same where the variant rounds at other points than the case. The variant's own oracle
    /// runs give its budget.
    WithinBothBudgets,
}

/// The oracle as a function of its differentiable inputs.
pub trait GradientProbe {
    /// Names and values of the differentiable inputs.
    fn inputs(&self) -> Vec<(&'static str, Vec<f64>)>;

    /// The distance over which the function bends, for each element of each input. Finite
    /// differences step by a small part of it. `None`, or infinity for an element, means the size
    /// of the input itself.
    fn scales(&self) -> Vec<Option<Vec<f64>>> {
        self.inputs().iter().map(|_| None).collect()
    }

    /// Names and values of the outputs, at the given inputs.
    ///
    /// # Errors
    /// What the oracle rejects.
    fn outputs(&self, inputs: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CaseError>;

    /// The gradient of `<upstream, outputs>` with respect to each input by candle's autograd.
    ///
    /// # Errors
    /// What the oracle rejects.
    fn autograd(&self, upstream: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CaseError>;

    /// The same by the oracle's written-out backward formula.
    ///
    /// # Errors
    /// What the oracle rejects.
    fn backward(&self, upstream: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CaseError>;
}

/// A golden file as a case of an operator, with the results of the independent implementation.
pub struct GoldenCase {
    /// Inputs from the file.
    pub prepared: Box<dyn PreparedCase>,
    /// Outputs that the file holds.
    pub expected: Vec<ExpectedTensor>,
    /// Why the kernel cannot run this case. The oracle always can.
    pub kernel_skip: Option<String>,
}

/// A golden output.
pub struct ExpectedTensor {
    /// Name, the same as the oracle's.
    pub name: &'static str,
    /// Name in the file.
    pub stored_as: String,
    /// Elements, row-major, in the oracle's layout.
    pub values: Vec<f64>,
    /// Whether the file holds them rounded to f32.
    pub stored_f32: bool,
    /// Whether they were computed in f32 throughout. They are then compared only within a kernel's
    /// budget.
    pub computed_f32: bool,
}

impl OracleTensor {
    /// Rows: all axes but the last, flattened. A vector is one row.
    pub fn rows(&self) -> (usize, usize) {
        rows_of(&self.shape)
    }
}

/// `(rows, row length)` of a shape: all axes but the last, and the last.
pub fn rows_of(shape: &[usize]) -> (usize, usize) {
    match shape.split_last() {
        Some((&last, outer)) => (outer.iter().product(), last),
        None => (1, 1),
    }
}

/// The number format of a floating-point storage type; `None` for integers.
pub fn format_of(dtype: DType) -> Option<Format> {
    match dtype {
        DType::F32 => Some(Format::F32),
        DType::Bf16 => Some(Format::BF16),
        DType::I32 | DType::I64 | DType::U8 => None,
    }
}

/// Half a unit in the last place of `dtype` at magnitude `value` (f64; zero for integers).
pub fn half_ulp(dtype: DType, value: f64) -> f64 {
    format_of(dtype).map_or(0.0, |format| format.half_ulp(value))
}
