//! What a golden file means to a declared operator: tensors of the file by the operator's names.

use dsv4_kernels::runtime::HostTensor;

use super::declaration::Specs;
use super::declared::{Choices, Declared, Inputs, checked};
use super::tensors::Tensors;
use super::{ExpectedTensor, GoldenCase};
use crate::case::CaseError;
use crate::judge::golden::GoldenFile;

/// How a tensor's elements are reordered between the file and the operator.
pub type Reorder<'r> = &'r dyn Fn(&[f64]) -> Vec<f64>;

/// A case whose tensors a golden file holds, and what the file says of its outputs.
pub struct Golden<C> {
    case: C,
    given: Vec<(&'static str, Given)>,
    scalars: Vec<(&'static str, f64)>,
    expected: Vec<ExpectedTensor>,
    kernel_skip: Option<String>,
}

enum Given {
    Values(Vec<f64>),
    Integers(Vec<i32>),
    Tensor(HostTensor),
}

impl<C> Golden<C> {
    /// Without tensors yet: those that the file is not asked for are drawn as in any case.
    pub fn new(case: C) -> Self {
        Self { case, given: Vec::new(), scalars: Vec::new(), expected: Vec::new(), kernel_skip: None }
    }

    /// Tensor `name` has these elements, rounded to its type.
    #[must_use]
    pub fn values(mut self, name: &'static str, values: Vec<f64>) -> Self {
        self.given.push((name, Given::Values(values)));
        self
    }

    /// Tensor `name` has these integers.
    #[must_use]
    pub fn integers(mut self, name: &'static str, values: Vec<i32>) -> Self {
        self.given.push((name, Given::Integers(values)));
        self
    }

    /// Tensor `name` is this one.
    #[must_use]
    pub fn tensor(mut self, name: &'static str, tensor: HostTensor) -> Self {
        self.given.push((name, Given::Tensor(tensor)));
        self
    }

    /// Tensor `name` has the elements of `stored` in the file.
    ///
    /// # Errors
    /// The file has none.
    pub fn stored(self, file: &GoldenFile, name: &'static str, stored: &str) -> Result<Self, String> {
        Ok(self.values(name, file.tensor(stored)?.values.clone()))
    }

    /// The oracle takes this number in place of the case's rounded one.
    #[must_use]
    pub fn scalar(mut self, name: &'static str, value: f64) -> Self {
        self.scalars.push((name, value));
        self
    }

    /// The oracle's tensor `name` must be `stored` of the file, up to rounding.
    ///
    /// # Errors
    /// The file has none.
    pub fn expect(self, file: &GoldenFile, name: &'static str, stored: &str) -> Result<Self, String> {
        self.expect_reordered(file, name, stored, &<[f64]>::to_vec)
    }

    /// The same with its elements reordered.
    ///
    /// # Errors
    /// The file has none.
    pub fn expect_reordered(
        mut self,
        file: &GoldenFile,
        name: &'static str,
        stored_as: &str,
        reorder: Reorder<'_>,
    ) -> Result<Self, String> {
        let stored = file.tensor(stored_as)?;
        self.expected.push(ExpectedTensor {
            name,
            stored_as: stored_as.to_owned(),
            values: reorder(&stored.values),
            stored_f32: stored.stored_f32,
            computed_f32: false,
        });
        Ok(self)
    }

    /// What is expected was computed in f32 throughout: it is held to a kernel's budget only.
    #[must_use]
    pub fn computed_in_f32(mut self) -> Self {
        self.expected.iter_mut().for_each(|expected| expected.computed_f32 = true);
        self
    }

    /// Why the kernel cannot run this case, if it cannot.
    #[must_use]
    pub fn kernel_skips(mut self, why: Option<String>) -> Self {
        self.kernel_skip = why;
        self
    }

    /// The case with its tensors, held to the operator's declaration.
    pub(super) fn finish<K: Declared<Case = C>>(self, file: &GoldenFile) -> Result<GoldenCase, CaseError> {
        let broken = |reason: String| CaseError::Malformed(format!("{}: {reason}", file.name));
        match (checked::<K>(&self.case), &self.kernel_skip) {
            (Ok(_), None) | (Err(_), Some(_)) => {}
            (Err(refused), None) => return Err(broken(format!("field `{}`: {}", refused.field, refused.reason))),
            (Ok(_), Some(why)) => return Err(broken(format!("left out of the kernels, which take it: {why}"))),
        }
        let specs = K::tensors(&self.case);
        let mut tensors = Tensors::draw(&specs, None);
        K::amend(&self.case, &mut tensors).map_err(|e| broken(e.to_string()))?;
        for (name, given) in self.given {
            tensors.put(name, fitted(&specs, name, given).map_err(broken)?);
        }
        for (name, value) in self.scalars {
            tensors.set_scalar(name, value);
        }
        let inputs = Inputs::<K>::of(self.case, Choices::default(), tensors);
        Ok(GoldenCase { prepared: Box::new(inputs), expected: self.expected, kernel_skip: self.kernel_skip })
    }
}

/// Of each slot of `chosen` `[.., topk]` the product of its expert's matrix of `experts` `[num_experts, m, n]` with its
/// token's row of `rows` `[.., n]`: m numbers.
///
/// # Errors
/// A tensor that the file has not, or whose extents do not fit.
pub fn routed(file: &GoldenFile, rows: &str, chosen: &str, experts: &str) -> Result<Vec<Vec<f64>>, String> {
    of_slots(file, rows, chosen, experts, false)
}

/// [`routed`] the other way, as gradients go: rows `[.., m]` times the matrix, n numbers.
///
/// # Errors
/// As [`routed`].
pub fn routed_back(file: &GoldenFile, rows: &str, chosen: &str, experts: &str) -> Result<Vec<Vec<f64>>, String> {
    of_slots(file, rows, chosen, experts, true)
}

fn of_slots(file: &GoldenFile, rows: &str, chosen: &str, experts: &str, back: bool) -> Result<Vec<Vec<f64>>, String> {
    let misfit = || format!("{}: `{rows}` and `{chosen}` do not fit `{experts}`", file.name);
    let (rows, chosen, experts) = (file.tensor(rows)?, file.tensor(chosen)?, file.tensor(experts)?);
    let (&[_, m, n], Some(&topk)) = (experts.shape.as_slice(), chosen.shape.last()) else { return Err(misfit()) };
    let length = if back { m } else { n };
    let product = |(slot, &expert): (usize, &f64)| {
        let row = rows.values.chunks_exact(length.max(1)).nth(slot / topk)?;
        let matrix = experts.values.chunks_exact((m * n).max(1)).nth(expert as usize)?;
        let at = |out: usize, i: usize| if back { matrix[i * n + out] } else { matrix[out * n + i] };
        let sum = |out: usize| row.iter().enumerate().map(|(i, x)| x * at(out, i)).sum();
        Some((0..m + n - length).map(sum).collect())
    };
    let products: Option<Vec<_>> = chosen.values.iter().enumerate().map(product).collect();
    products.filter(|_| rows.shape.last() == Some(&length)).ok_or_else(misfit)
}

fn fitted(specs: &Specs, name: &'static str, given: Given) -> Result<HostTensor, String> {
    let spec = specs.find(name).ok_or_else(|| format!("the case has no tensor `{name}`"))?;
    let shape = spec.shape();
    let fits = |count: usize| {
        if count == spec.elements() { Ok(()) } else { Err(format!("{count} elements do not fill `{name}` {shape:?}")) }
    };
    Ok(match given {
        Given::Values(values) => {
            fits(values.len())?;
            HostTensor::from_f64(spec.dtype, &shape, &values)
        }
        Given::Integers(values) => {
            fits(values.len())?;
            HostTensor::from_i32(&shape, &values)
        }
        Given::Tensor(tensor) if (tensor.dtype, &tensor.shape) == (spec.dtype, &shape) => tensor,
        Given::Tensor(tensor) => return Err(format!("{tensor:?} is no `{name}` {} {shape:?}", spec.dtype)),
    })
}
