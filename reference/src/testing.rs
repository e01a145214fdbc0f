//! Shared parts of the tests of this crate: seeded random data, golden files, and comparisons that
//! NaN cannot pass.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor, Var};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::precision::values;
use crate::{Named, Precision, Result, Rounding};

/// Unit roundoff of f64.
pub const UNIT_ROUNDOFF: f64 = f64::EPSILON / 2.0;

/// A seeded source of test data.
pub struct Draw(ChaCha8Rng);

impl Draw {
    pub fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// Normal random values with full f64 significands.
    pub fn normal(&mut self, shape: &[usize], deviation: f64) -> Tensor {
        let count: usize = shape.iter().product();
        let numbers: Vec<f64> = (0..count).map(|_| deviation * self.one_normal()).collect();
        f64_tensor(&numbers, shape)
    }

    /// Normal random values that bf16 holds exactly, as stored operands are.
    pub fn bf16(&mut self, shape: &[usize], deviation: f64) -> Tensor {
        let numbers = self.normal(shape, deviation);
        let seed = self.0.random();
        let mut rounding = Rounding::new(Precision::Nearest { seed });
        rounding.bf16(&numbers).expect("rounding a test tensor")
    }

    pub fn below(&mut self, bound: usize) -> usize {
        self.0.random_range(0..bound)
    }

    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        list.shuffle(&mut self.0);
    }

    fn one_normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.0.random::<f64>()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.0.random::<f64>()).cos()
    }
}

pub fn f64_tensor(numbers: &[f64], shape: &[usize]) -> Tensor {
    Tensor::from_slice(numbers, shape, &Device::Cpu).expect("a test tensor")
}

/// Inner product over all elements.
pub fn dot(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.dims(), b.dims());
    let (a, b) = (values(a).expect("values"), values(b).expect("values"));
    a.iter().zip(&b).map(|(x, y)| x * y).sum()
}

/// `sum |a b|`, the scale against which the rounding of [`dot`] is judged.
pub fn dot_of_magnitudes(a: &Tensor, b: &Tensor) -> f64 {
    dot(&a.abs().expect("abs"), &b.abs().expect("abs"))
}

/// Fails unless every `|actual - expected| <= bound`, elementwise. NaN fails, and so does
/// comparing nothing.
pub fn assert_within(what: &str, actual: &Tensor, expected: &Tensor, bound: &Tensor) {
    assert_eq!(actual.dims(), expected.dims(), "{what}: shapes");
    assert_eq!(bound.dims(), expected.dims(), "{what}: shape of the bound");
    let (a, e, b) = (values(actual).unwrap(), values(expected).unwrap(), values(bound).unwrap());
    assert!(!a.is_empty(), "{what}: nothing to compare");
    for i in 0..a.len() {
        let error = (a[i] - e[i]).abs();
        assert!(
            error <= b[i],
            "{what}[{i}]: {} is {error:e} from {}, allowed {:e}",
            a[i],
            e[i],
            b[i]
        );
    }
}

/// The gradients of the sum of the outputs of `f`, by automatic differentiation. Each pair is the
/// name of an input and the name of its gradient. Absent inputs have none.
pub fn differentiated(
    inputs: &Named,
    pairs: &[(&'static str, &'static str)],
    f: impl Fn(&Named) -> Result<Tensor>,
) -> Result<Named> {
    let variable = |&(name, gradient)| Some((name, gradient, Var::from_tensor(inputs.get(name)?)));
    let variables: Vec<_> = pairs.iter().filter_map(variable).collect();
    let mut bound = inputs.clone();
    let mut differentiable = Vec::new();
    for (name, gradient, variable) in variables {
        let variable = variable?;
        bound = bound.with(name, variable.as_tensor().clone());
        differentiable.push((gradient, variable));
    }
    let gradients = f(&bound)?.sum_all()?.backward()?;
    differentiable.into_iter().try_fold(Named::new(), |all, (name, variable)| {
        let gradient =
            gradients.get(&variable).cloned().map_or_else(|| variable.zeros_like(), Ok)?;
        Ok(all.with(name, gradient))
    })
}

/// Compares the central difference of `f` along `direction` with the `claimed` directional
/// derivative.
///
/// The step is `h = u^(1/3)` in units of `unit`, where truncation `h^2 f'''/6` and rounding
/// `u |f| / h` have the same size. The truncation is measured: `D(2h) - D(h) = h^2 f'''/2 + O(h^4)`
/// is three times that of `D(h)`. When `f` is evaluated within `noise`, the rounding is at most
/// `noise / h` for either step.
pub fn assert_directional_derivative(
    what: &str,
    f: impl Fn(f64) -> Result<f64>,
    unit: f64,
    noise: f64,
    claimed: f64,
) -> Result<()> {
    let h = UNIT_ROUNDOFF.cbrt() * unit;
    let difference = |h: f64| -> Result<f64> { Ok((f(h)? - f(-h)?) / (2.0 * h)) };
    let (fine, coarse) = (difference(h)?, difference(2.0 * h)?);
    let bound = (coarse - fine).abs() + 2.0 * noise / h;
    let error = (fine - claimed).abs();
    println!(
        "{what}: derivative {claimed:e}, difference quotient off by {error:e}, allowed {bound:e}"
    );
    assert!(error <= bound, "{what}: {fine} against {claimed}, allowed {bound:e}");
    assert!(bound < claimed.abs(), "{what}: the bound {bound:e} would accept zero");
    Ok(())
}

/// Fails unless the gradients of inputs (pairs of their names) equal the automatic ones, up to some
/// hundred roundings of values of the size of the largest.
pub fn assert_gradients_are_automatic(
    gradients: &Named,
    automatic: &Named,
    of: &[(&'static str, &'static str)],
) -> Result<()> {
    for (_, gradient) in of {
        let expected = automatic.tensor(gradient)?;
        let largest =
            values(expected)?.into_iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
        let bound = (expected.ones_like()? * (4096.0 * UNIT_ROUNDOFF * (1.0 + largest)))?;
        assert_within(gradient, gradients.tensor(gradient)?, expected, &bound);
    }
    Ok(())
}

/// [`assert_directional_derivative`] of `f` where all present inputs of `pairs` move at once, each
/// along a random direction of this deviation. A pair is the name of an input and the name of the
/// gradient that claims its derivative.
pub fn assert_derivative_along_all(
    what: &str,
    [inputs, gradients]: [&Named; 2],
    pairs: &[(&'static str, &'static str)],
    deviation: f64,
    noise: f64,
    f: impl Fn(&Named) -> Result<f64>,
) -> Result<()> {
    let mut draw = Draw::new(5);
    let along: Vec<_> = pairs
        .iter()
        .filter_map(|&(name, gradient)| {
            Some((name, gradient, draw.normal(inputs.get(name)?.dims(), deviation)))
        })
        .collect();
    let at = |h: f64| -> Result<f64> {
        let moved =
            along.iter().try_fold(inputs.clone(), |moved, (name, _, direction)| -> Result<_> {
                Ok(moved.with(name, (inputs.tensor(name)? + (direction * h)?)?))
            })?;
        f(&moved)
    };
    let claimed = along
        .iter()
        .map(|(_, gradient, direction)| Ok(dot(gradients.tensor(gradient)?, direction)));
    assert_directional_derivative(what, at, 1.0, noise, claimed.sum::<Result<f64>>()?)
}

/// Fails unless the mean of runs with random errors is `exact`.
///
/// Over R runs the mean of an element misses by `s / sqrt(R)`, with `s` the deviation of one run.
/// The squares of `mean error / (s / sqrt(R))` therefore average to about 1. Elements share errors.
/// With at least `independent` groups that share none, that average has a deviation of at most
/// `sqrt(2 / independent)`, of which five are allowed. Elements that never err are skipped.
pub fn assert_unbiased(what: &str, exact: &Tensor, runs: &[Tensor], independent: usize) {
    let exact = values(exact).expect("values");
    let runs: Vec<Vec<f64>> = runs.iter().map(|run| values(run).expect("values")).collect();
    let count = runs.len() as f64;
    let (mut sum, mut elements) = (0.0, 0);
    for i in 0..exact.len() {
        let mean = runs.iter().map(|run| run[i] - exact[i]).sum::<f64>() / count;
        let square = runs.iter().map(|run| (run[i] - exact[i]).powi(2)).sum::<f64>() / count;
        if square > 0.0 {
            sum += mean * mean * count / square;
            elements += 1;
        }
    }
    assert!(elements > exact.len() / 2, "{what}: only {elements} elements ever err");
    let average = sum / elements as f64;
    let bound = 1.0 + 5.0 * (2.0 / independent as f64).sqrt();
    println!("{what}: squared bias over its expectation {average:.3}, allowed {bound:.3}");
    assert!(average <= bound, "{what}: {average} > {bound}");
}

/// One golden file: tensors of an implementation outside this project.
pub struct Golden {
    tensors: HashMap<String, Tensor>,
}

impl Golden {
    pub fn load(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/golden");
        let path = folder.join(format!("{name}.safetensors"));
        let tensors = candle_core::safetensors::load(&path, &Device::Cpu)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self { tensors }
    }

    pub fn has(&self, key: &str) -> bool {
        self.tensors.contains_key(key)
    }

    /// The tensor as stored.
    pub fn raw(&self, key: &str) -> &Tensor {
        self.tensors.get(key).unwrap_or_else(|| panic!("no golden tensor {key}"))
    }

    /// The tensor widened to f64.
    pub fn f64(&self, key: &str) -> Tensor {
        self.raw(key).to_dtype(DType::F64).expect("widening")
    }

    /// Half a unit in the last place of each stored value: results kept in f32 are rounded once.
    pub fn storage_error(&self, key: &str) -> Tensor {
        let relative = match self.raw(key).dtype() {
            DType::F32 => f64::from(f32::EPSILON) / 2.0,
            _ => 0.0,
        };
        (self.f64(key).abs().expect("abs") * relative).expect("scaling")
    }
}

/// One sum that a GPU computed.
pub struct MeasuredSum {
    pub a: Vec<f64>,
    pub b: Vec<f64>,
    pub c: f64,
    pub d: f64,
}

/// The measurements of an instruction in `fixtures/tensor_cores`.
pub fn tensor_core_measurements(instruction: &str) -> Vec<MeasuredSum> {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/tensor_cores/hopper.safetensors");
    let file = candle_core::safetensors::load(path, &Device::Cpu).expect("the measurements");
    let tensor = |name: &str| {
        let stored = &file[&format!("{instruction}.{name}")];
        let numbers = values(&stored.to_dtype(DType::F64).expect("numbers")).expect("numbers");
        let decode = |code: &f64| crate::Format::E4M3.value(*code as u64);
        let numbers = if stored.dtype() == DType::U8 {
            numbers.iter().map(decode).collect()
        } else {
            numbers
        };
        (stored.dims().to_vec(), numbers)
    };
    let [(shape, a), (_, b), (_, c), (_, d)] = ["a", "b", "c", "d"].map(tensor);
    let (rows, columns, k) = (shape[1], 8, shape[2]);
    let sum = |i: usize| {
        let (step, row, column) = (i / (rows * columns), i / columns % rows, i % columns);
        let (a_row, b_row) = (step * rows + row, step * columns + column);
        let of = |numbers: &[f64], row: usize| numbers[row * k..(row + 1) * k].to_vec();
        MeasuredSum { a: of(&a, a_row), b: of(&b, b_row), c: c[i], d: d[i] }
    };
    (0..c.len()).map(sum).collect()
}
