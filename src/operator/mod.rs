//! What an operator brings to the harness, and what the harness asks of a case.
//!
//! `strategy -> case -> inputs -> { oracle, kernel } -> checks -> record -> report`. An operator's
//! file in `src/operators/` says how to do the first four; everything after that is the same for
//! all of them ([`crate::judge::checks`]). The [`registry`](crate::operators::registry) lists all
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
use crate::record::Seconds;
pub use crate::record::{Family, RoundingPoints};

pub mod any;
pub mod benchmarks;
pub mod declaration;
pub mod declared;
pub mod documentation;
pub mod fields;
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

/// What is left of three minutes once a program has started and its report is written.
const SMOKE: Duration = Duration::from_secs(150);

/// How large a sweep's cases are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Profile {
    /// Typical and saved cases of every operator, then edge cases until 150 seconds are used.
    Smoke,
    /// A quarter of an hour on two cores for all operators, a minute for most single ones.
    Quick,
    /// What a merge waits for.
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

    /// The one of three settings, for quick, ci and full, that is this profile's; smoke has the
    /// cases of quick.
    pub fn of<T>(self, [quick, ci, full]: [T; 3]) -> T {
        match self {
            Self::Smoke | Self::Quick => quick,
            Self::Ci => ci,
            Self::Full => full,
        }
    }

    /// Random schedules that each case runs under on the emulator, beyond the deterministic one,
    /// unless told otherwise.
    pub fn schedules(self) -> u32 {
        match self {
            Self::Smoke => 1,
            _ => self.of([2, 4, 4]),
        }
    }

    /// How long after the start of a sweep its edge cases may still begin, where there is such a
    /// limit.
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
    /// Extents.
    pub shape: Vec<usize>,
    /// Elements, row-major.
    pub values: Vec<f64>,
}

/// A tensor that the kernel wrote.
#[derive(Clone, Debug)]
pub struct KernelTensor {
    /// Name, the same as the oracle's.
    pub name: &'static str,
    /// What it wrote.
    pub tensor: HostTensor,
    /// Whether two runs must agree bit for bit. Sums by floating-point atomics need not.
    pub deterministic: bool,
    /// How it is held to the oracle's.
    pub comparison: Comparison,
    /// What its last rounding is worth; that of its storage type unless it says otherwise.
    pub grid: Option<Grid>,
    /// Which of its elements are of one scale.
    pub pooling: Pooling,
}

impl KernelTensor {
    /// A tensor that is repeated bit for bit and compared within the budget of its rounding to its
    /// storage type.
    pub fn new(name: &'static str, tensor: HostTensor) -> Self {
        let (comparison, grid, pooling) = Default::default();
        Self { name, tensor, deterministic: true, comparison, grid, pooling }
    }

    /// The grid of its numbers.
    pub fn grid(&self) -> Grid {
        self.grid.unwrap_or_else(|| self.tensor.dtype.into())
    }

    /// The oracle's tensor that its comparison needs besides its own: scores, or scales.
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

/// How a tensor of the kernel is held to that of the oracle.
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

/// The numbers that a compared tensor can hold: what its last rounding is worth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Grid {
    /// No rounding: integers.
    Exact,
    /// The numbers of a format.
    Float(Format),
    /// Numbers of a format times a scale that a block of elements shares: dequantized codes.
    Scaled {
        /// Format of the codes.
        format: Format,
        /// Rows and columns (along the last two axes) that share a scale; the last block of an
        /// axis may be smaller.
        block: [usize; 2],
        /// The oracle's tensor of the scales: one for each block, other axes as in the tensor
        /// itself.
        scales: &'static str,
    },
}

impl From<DType> for Grid {
    fn from(dtype: DType) -> Self {
        format_of(dtype).map_or(Self::Exact, Self::Float)
    }
}

/// Over which elements a budget pools the variance of the oracle's runs: those that are of one
/// scale by construction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pooling {
    /// The last axis: a row.
    #[default]
    LastAxis,
    /// So many trailing axes: 2 is a matrix, 0 each element by itself.
    Trailing(usize),
    /// So many neighbours along the last axis (1 at least); the last group of a row may be smaller.
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

/// Oracle runs that round to nearest: of each choice one without noise in fp32, and four with.
pub const NEAREST_RUNS: usize = 5 * CHOICES;

/// What a kernel says of its arithmetic; by default nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Arithmetic {
    /// Where it rounds.
    pub points: RoundingPoints,
    /// In how many lanes it adds the numbers of a row, at least; these are added as a tree.
    pub lanes: usize,
}

impl Default for Arithmetic {
    fn default() -> Self {
        Self { points: RoundingPoints::Undeclared, lanes: 1 }
    }
}

/// A case with its inputs. Its oracle may run on several threads at once.
pub trait PreparedCase: Sync {
    /// The operator.
    fn operator(&self) -> &'static str;

    /// Runs the oracle, forward and backward.
    ///
    /// # Errors
    /// What the oracle refuses.
    fn oracle(&self, precision: Precision) -> Result<Vec<OracleTensor>, CaseError>;

    /// As [`Self::oracle`], as one of several runs: what all runs have in common may be taken from
    /// `products` (a run by [`Rounding::sharing`](dsv4_reference::Rounding::sharing)). The exact
    /// run is first.
    ///
    /// # Errors
    /// What the oracle refuses.
    fn oracle_sharing(
        &self,
        precision: Precision,
        _products: &Products,
    ) -> Result<Vec<OracleTensor>, CaseError> {
        self.oracle(precision)
    }

    /// Gradients as they follow from what kernels wrote before them, for those of which the
    /// operator says how; computed as [`Self::oracle_sharing`] computes.
    ///
    /// # Errors
    /// What the oracle refuses.
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
        Arithmetic { points: RoundingPoints::Specification, lanes: 1 }
    }

    /// Bytes of a GPU's memory that are to be free where its kernels are to have all their
    /// buffers; 0 on the emulator.
    fn room_on_gpu(&self, _environment: &Environment) -> u64 {
        0
    }

    /// Runs the kernels, forward and backward, under a memory contract.
    ///
    /// # Errors
    /// What the launcher refuses, and what the kernel did wrong.
    fn kernel(&self, device: &Device, contract: Contract) -> Result<KernelRun, RuntimeError>;

    /// How long one call of the kernels takes by the device's clock, forward and backward.
    ///
    /// # Errors
    /// Those of [`Self::kernel`].
    fn seconds(&self, _device: &Device) -> Result<Seconds, RuntimeError> {
        Ok(Seconds::default())
    }

    /// Runs the kernels again after calls with other data, in the same buffers and beside them.
    /// None where nobody says what other data would be.
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

    /// The case whose scalars and extents these inputs go with, in particular those of a law's
    /// variant. Where it is absent, an external kernel is not held to the operator's laws
    /// ([`crate::external`]).
    fn case(&self) -> Option<Case> {
        None
    }

    /// Relations between this case and a variant of it that need no oracle.
    fn laws(&self) -> Vec<Law> {
        Vec::new()
    }

    /// The oracle as a differentiable function, for the triangulation of its gradients.
    fn gradient_probe(&self) -> Option<Box<dyn GradientProbe + '_>> {
        None
    }
}

/// A relation between the kernel's outputs for two inputs.
pub struct Law {
    /// Name; appears as `law: NAME`, or as `independence`.
    pub name: &'static str,
    /// The other inputs.
    pub variant: Box<dyn PreparedCase>,
    /// For each tensor that is bound by it, what must hold.
    pub relations: Vec<(&'static str, Relation)>,
    /// Why this case is not held to it, where it is not: a counted skip.
    pub left_out: Option<&'static str>,
}

/// What [`Relation::MadeOf`] makes of the variant's tensor: numbers of the case's, row-major.
pub type MadeOf = dyn Fn(&HostTensor) -> Vec<f64>;

/// What must hold between a tensor of the case and the same tensor of the variant.
#[derive(Clone)]
pub enum Relation {
    /// `variant == factor * case`, bit for bit; `factor` is a power of two.
    Times(f64),
    /// Rows (all axes but the last, flattened) for which this says `true` are bit-equal.
    EqualRows(Rc<dyn Fn(usize) -> bool>),
    /// `variant[i] == case[map[i]]` for each row `i`, bit for bit.
    PermutedRows(Vec<usize>),
    /// Entry `i` along an axis of the variant is entry `order[i]` of the case, bit for bit.
    PermutedAlong {
        /// The place of the axis.
        axis: usize,
        /// For each entry of the variant that of the case.
        order: Vec<usize>,
    },
    /// All entries along an axis are bit-equal but one.
    EqualExcept {
        /// The place of the axis.
        axis: usize,
        /// The entry that may differ.
        at: usize,
    },
    /// `case == made_of(variant)`, number by number (NaN where it says NaN): a further step of the
    /// kernel, done here.
    MadeOf(Rc<MadeOf>),
    /// Equal up to rounding: they differ by no more than both may be off by.
    WithinBudget,
    /// The same where the variant rounds at other points than the case: its own oracle runs say by
    /// how much it may be off.
    WithinBothBudgets,
}

/// The oracle as a function of its differentiable inputs.
pub trait GradientProbe {
    /// Names and values of the differentiable inputs.
    fn inputs(&self) -> Vec<(&'static str, Vec<f64>)>;

    /// The distance over which the function bends, for each element of each input: finite
    /// differences step by a small part of it. `None`, or an infinite one of an element, where the
    /// size of the input itself says it.
    fn scales(&self) -> Vec<Option<Vec<f64>>> {
        self.inputs().iter().map(|_| None).collect()
    }

    /// Names and values of the outputs, at the given inputs.
    ///
    /// # Errors
    /// What the oracle refuses.
    fn outputs(&self, inputs: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CaseError>;

    /// The gradient of `<upstream, outputs>` with respect to each input by candle's autograd.
    ///
    /// # Errors
    /// What the oracle refuses.
    fn autograd(&self, upstream: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CaseError>;

    /// The same by the oracle's written-out backward formula.
    ///
    /// # Errors
    /// What the oracle refuses.
    fn backward(&self, upstream: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CaseError>;
}

/// A golden file as a case of an operator, with what the independent implementation got.
pub struct GoldenCase {
    /// Inputs from the file.
    pub prepared: Box<dyn PreparedCase>,
    /// What the file says of some outputs.
    pub expected: Vec<ExpectedTensor>,
    /// Why the kernel cannot run this case, if it cannot (the oracle always does).
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
    /// Whether they were computed in f32 throughout, and are therefore held to a kernel's budget
    /// only.
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
