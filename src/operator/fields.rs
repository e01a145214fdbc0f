//! Fields that many operators' cases share, their strategies, and tensors of the oracles.

use candle_core::{Device as Cpu, Tensor};
pub(crate) use dsv4_reference::precision::elements;
use dsv4_runtime::{DType, Environment, HostTensor};
use proptest::prelude::*;
use proptest::strategy::BoxedStrategy;
use serde::{Deserialize, Serialize};

use super::benchmarks::on_gpu;
use super::declared::{Refused, positive};
use crate::case::Distribution;

/// Floating-point types of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Float {
    /// bfloat16.
    Bf16,
    /// IEEE binary32.
    F32,
}

impl Float {
    /// The runtime's name for it.
    pub fn dtype(self) -> DType {
        match self {
            Self::Bf16 => DType::Bf16,
            Self::F32 => DType::F32,
        }
    }
}

/// Where an output is in memory relative to its input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aliasing {
    /// A separate buffer.
    OutOfPlace,
    /// The input itself, declared as aliasing.
    InPlace,
    /// A view of the input's buffer: rows of input and output alternate.
    Interleaved,
}

impl Float {
    /// Draws one of them, bf16 more often.
    pub fn strategy() -> BoxedStrategy<Self> {
        prop_oneof![2 => Just(Self::Bf16), 1 => Just(Self::F32)].boxed()
    }
}

/// How a case's values are drawn: fields that are flattened into a case.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Data {
    /// Distribution of the inputs that the operator names.
    pub distribution: Distribution,
    /// Their scale.
    pub magnitude: f64,
    /// Seed of all data.
    pub seed: u64,
}

impl Data {
    /// Standard normal values times `magnitude`, with seed 1.
    pub fn normal(magnitude: f64) -> Self {
        Self { distribution: Distribution::Normal, magnitude, seed: 1 }
    }

    /// Whether values can be drawn this way.
    ///
    /// # Errors
    /// A magnitude that is not positive.
    pub fn check(&self) -> Result<(), Refused> {
        positive("magnitude", self.magnitude)
    }

    /// Draws one, with a magnitude between these powers of two.
    pub fn strategy(log2: std::ops::RangeInclusive<i32>) -> BoxedStrategy<Self> {
        (prop::sample::select(Distribution::ALL.to_vec()), magnitude(log2), 0..1000u64)
            .prop_map(|(distribution, magnitude, seed)| Self { distribution, magnitude, seed })
            .boxed()
    }
}

/// Rows and width of a matrix: up to `rows` rows. The width is mostly up to 300 elements, and at
/// most `width`.
pub fn matrix([rows, width]: [usize; 2]) -> BoxedStrategy<[usize; 2]> {
    let widths = prop_oneof![3 => extent(300, 8), 2 => extent(width, 128), 1 => Just(width)];
    (extent(rows, 8), widths)
        .prop_map(|(rows, width)| [rows.min((LARGEST_DRAWN / width).max(1)), width])
        .boxed()
}

/// Elements of the largest tensor that a strategy draws. Ten oracle runs of it take about a second.
pub(crate) const LARGEST_DRAWN: usize = 1 << 20;

/// An extent of a case: 1, an exact multiple of `unit`, or anything up to `largest`.
pub(crate) fn extent(largest: usize, unit: usize) -> BoxedStrategy<usize> {
    let multiples = (largest / unit).max(1);
    prop_oneof![
        1 => Just(1),
        2 => (1..=multiples).prop_map(move |n| n * unit),
        5 => 1..=largest,
    ]
    .boxed()
}

/// Magnitudes: log-uniform, powers of two and others.
pub(crate) fn magnitude(log2: std::ops::RangeInclusive<i32>) -> BoxedStrategy<f64> {
    (log2, prop_oneof![Just(1.0), Just(1.375)])
        .prop_map(|(exponent, factor)| factor * 2f64.powi(exponent))
        .boxed()
}

/// A candle tensor in f64.
pub(crate) fn tensor(values: Vec<f64>, shape: &[usize]) -> Result<Tensor, candle_core::Error> {
    Tensor::from_vec(values, shape, &Cpu::Cpu)
}

/// A host tensor as the oracle sees it: widened.
pub(crate) fn widened(host: &HostTensor) -> Result<Tensor, candle_core::Error> {
    tensor(host.to_f64(), &host.shape)
}

/// Which kernels run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Implementation {
    /// `NAME.cu`.
    Portable,
    /// `NAME_hopper*.cu`.
    Hopper,
}

impl Implementation {
    /// The faster kernels on a GPU that can run them, else the portable ones.
    pub(crate) fn fastest_on(environment: &Environment) -> Self {
        let hopper =
            on_gpu(environment) && Self::Hopper.launcher().cannot_run_on(environment).is_none();
        if hopper { Self::Hopper } else { Self::Portable }
    }

    /// The same for a shape with that many heads. Portable for few heads, or where the kernels for
    /// Hopper do not accept the shape.
    pub(crate) fn fastest_for(
        environment: &Environment,
        num_heads: usize,
        hopper_takes_it: bool,
    ) -> Self {
        let many = num_heads > dsv4_kernels::implementation::Implementation::FEW_HEADS;
        if many && hopper_takes_it { Self::fastest_on(environment) } else { Self::Portable }
    }

    /// The part of a benchmark's name that marks the portable kernels.
    pub(crate) fn suffix(portable: bool) -> &'static str {
        if portable { " portable" } else { "" }
    }

    pub(crate) fn launcher(self) -> dsv4_kernels::implementation::Implementation {
        match self {
            Self::Portable => dsv4_kernels::implementation::Implementation::Portable,
            Self::Hopper => dsv4_kernels::implementation::Implementation::Hopper,
        }
    }
}

/// Changes of a case, read from left to right in the order in which they are made.
pub trait Postfix: Sized {
    /// The case with other fields: `plain(3, 1000).with(|case| case.dtype = Float::F32)`.
    fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// What a change with a name makes of the case: `plain(2, 584).then(coded)`.
    fn then(self, change: impl FnOnce(Self) -> Self) -> Self {
        change(self)
    }
}

impl<C: Clone + Serialize> Postfix for C {}
