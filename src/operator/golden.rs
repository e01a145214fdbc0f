//! What a golden file means to a declared operator: the file's tensors under the operator's names.
//!
//! An operator reads a file only through [`Reading`], which knows its axes by name. An axis has one
//! extent in all tensors of a file. No tensor is empty. Values, integers and masks must be stored
//! as such. So no operator can index beyond what a file holds.

use std::collections::BTreeMap;

use dsv4_runtime::HostTensor;

use super::any::AnyCase;
use super::declaration::Specs;
use super::declared::Refused;
use super::inputs::Inputs;
use super::layouts::Layouts;
use super::lines::{Choices, checked, within};
use super::size;
use super::tensors::Tensors;
use super::{ExpectedTensor, GoldenCase};
use crate::case::CaseError;
use crate::operator::golden_file::{GoldenFile, GoldenTensor, Kind};

/// Axes of a stored tensor, outermost first, by the file's names. `1` is an axis of one entry. A
/// first axis that starts with `..` is any number of axes, taken as one.
pub type Axes<'a> = &'a [&'a str];

/// A golden file as an operator reads it.
pub struct Reading<'f> {
    file: &'f GoldenFile,
    /// Sizes by the names of axes, and the tensor that gave each.
    extents: BTreeMap<String, (usize, String)>,
}

impl<'f> Reading<'f> {
    /// A reading without any known size.
    pub fn of(file: &'f GoldenFile) -> Self {
        Self { file, extents: BTreeMap::new() }
    }

    /// Its kind ([`GoldenFile::operator`]).
    pub fn kind(&self) -> &'f str {
        &self.file.operator
    }

    /// A floating-point tensor, row-major.
    ///
    /// # Errors
    /// The file has none, or one of other axes or another type.
    pub fn floats(&mut self, name: &str, axes: Axes<'_>) -> Result<&'f [f64], String> {
        Ok(&self.tensor(name, axes, Kind::Float)?.values)
    }

    /// A tensor of integers that fit 32 bits, row-major.
    ///
    /// # Errors
    /// As [`Self::floats`]; one that does not fit.
    pub fn integers(&mut self, name: &str, axes: Axes<'_>) -> Result<Vec<i32>, String> {
        let tensor = self.tensor(name, axes, Kind::Integer)?;
        let fitting = |&value: &f64| {
            let fits = (f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(&value);
            fits.then_some(value as i32)
                .ok_or_else(|| format!("`{name}` holds {value}, beyond 32 bits"))
        };
        tensor.values.iter().map(fitting).collect()
    }

    /// A mask, row-major.
    ///
    /// # Errors
    /// As [`Self::floats`].
    pub fn mask(&mut self, name: &str, axes: Axes<'_>) -> Result<Vec<bool>, String> {
        Ok(self.tensor(name, axes, Kind::Byte)?.values.iter().map(|&value| value != 0.0).collect())
    }

    /// The extent of an axis that was read.
    ///
    /// # Errors
    /// Nothing that was read has such an axis.
    pub fn extent(&self, axis: &str) -> Result<usize, String> {
        let known = self.extents.get(axis).map(|(extent, _)| *extent);
        known.ok_or_else(|| format!("nothing that was read has an axis {axis}"))
    }

    /// Sets the extent of an axis, as given by `of`.
    ///
    /// # Errors
    /// A tensor that was read has another extent.
    pub fn hold(&mut self, axis: &str, extent: usize, of: &str) -> Result<(), String> {
        let axis = axis.trim_start_matches('.');
        let known = self.extents.get(axis).map(|(known, by)| (*known, by.clone()));
        match known {
            Some((known, by)) if known != extent => {
                Err(format!("{axis} is {extent} in `{of}` and {known} in `{by}`"))
            }
            Some(_) => Ok(()),
            None => {
                self.extents.insert(axis.to_owned(), (extent, of.to_owned()));
                Ok(())
            }
        }
    }

    /// A number of the configuration.
    ///
    /// # Errors
    /// The missing or non-numeric name.
    pub fn number(&self, name: &str) -> Result<f64, String> {
        self.file.number(name)
    }

    /// A whole number of the configuration, not negative, that fits 31 bits.
    ///
    /// # Errors
    /// As [`Self::number`]; another number.
    pub fn whole(&self, name: &str) -> Result<usize, String> {
        let number = self.number(name)?;
        let fits = number.fract() == 0.0 && (0.0..=f64::from(i32::MAX)).contains(&number);
        fits.then_some(number as usize)
            .ok_or_else(|| format!("config: {name} {number} is no extent"))
    }

    /// The configuration's value under a name, if it has one.
    pub fn config(&self, name: &str) -> &'f serde_json::Value {
        &self.file.config[name]
    }

    fn tensor(
        &mut self,
        name: &str,
        axes: Axes<'_>,
        kind: Kind,
    ) -> Result<&'f GoldenTensor, String> {
        let tensor = self.file.tensor(name)?;
        let shape = tensor.shape.as_slice();
        if tensor.kind != kind {
            return Err(format!("`{name}` holds elements of kind {:?}, not {kind:?}", tensor.kind));
        }
        if tensor.values.is_empty() {
            return Err(format!("`{name}` {shape:?} has no element"));
        }
        let misfit = || format!("`{name}` {shape:?} does not have the axes [{}]", axes.join(", "));
        let leading = match axes.first() {
            Some(first) if first.starts_with("..") => (shape.len() + 1).checked_sub(axes.len()),
            _ => (shape.len() == axes.len()).then_some(1.min(shape.len())),
        };
        let (leading, inner) =
            shape.split_at_checked(leading.ok_or_else(misfit)?).ok_or_else(misfit)?;
        let extents: Vec<usize> = match axes.is_empty() {
            true => Vec::new(),
            false => {
                std::iter::once(leading.iter().product()).chain(inner.iter().copied()).collect()
            }
        };
        for (&axis, extent) in axes.iter().zip(extents) {
            match (axis, extent) {
                ("1", 1) => {}
                ("1", other) => {
                    return Err(format!(
                        "`{name}` {shape:?} has {other} entries along an axis of one"
                    ));
                }
                _ => self.hold(axis, extent, name)?,
            }
        }
        Ok(tensor)
    }
}

/// How a tensor's elements are reordered between the file and the operator.
pub type Reorder<'r> = &'r dyn Fn(&[f64]) -> Vec<f64>;

/// A case whose tensors come from a golden file, with the outputs that the file holds.
pub struct Golden<C> {
    case: C,
    given: Vec<(&'static str, Given)>,
    scalars: Vec<(&'static str, f64)>,
    expected: Vec<ExpectedTensor>,
    kernel_skip: Option<(String, C)>,
}

enum Given {
    Values(Vec<f64>),
    Integers(Vec<i32>),
    Tensor(HostTensor),
}

impl<C> Golden<C> {
    /// A case without tensors yet. Tensors that are not read from the file are drawn as in any
    /// case.
    pub fn new(case: C) -> Self {
        Self {
            case,
            given: Vec::new(),
            scalars: Vec::new(),
            expected: Vec::new(),
            kernel_skip: None,
        }
    }

    /// Sets tensor `name` to these elements, rounded to its type.
    #[must_use]
    pub fn values(mut self, name: &'static str, values: Vec<f64>) -> Self {
        self.given.push((name, Given::Values(values)));
        self
    }

    /// Sets tensor `name` to these integers.
    #[must_use]
    pub fn integers(mut self, name: &'static str, values: Vec<i32>) -> Self {
        self.given.push((name, Given::Integers(values)));
        self
    }

    /// Sets tensor `name` to this one.
    #[must_use]
    pub fn tensor(mut self, name: &'static str, tensor: HostTensor) -> Self {
        self.given.push((name, Given::Tensor(tensor)));
        self
    }

    /// Sets tensor `name` to the elements of `stored` in the file, which has these axes.
    ///
    /// # Errors
    /// Those of [`Reading::floats`].
    pub fn stored(
        self,
        file: &mut Reading<'_>,
        name: &'static str,
        stored: &str,
        axes: Axes<'_>,
    ) -> Result<Self, String> {
        Ok(self.values(name, file.floats(stored, axes)?.to_vec()))
    }

    /// The oracle takes this number instead of the case's rounded one.
    #[must_use]
    pub fn scalar(mut self, name: &'static str, value: f64) -> Self {
        self.scalars.push((name, value));
        self
    }

    /// The oracle's tensor `name` must be `stored` of the file, which has these axes, up to
    /// rounding.
    ///
    /// # Errors
    /// Those of [`Reading::floats`].
    pub fn expect(
        self,
        file: &mut Reading<'_>,
        name: &'static str,
        stored: &str,
        axes: Axes<'_>,
    ) -> Result<Self, String> {
        self.expect_reordered(file, name, stored, axes, &<[f64]>::to_vec)
    }

    /// The same with its elements reordered.
    ///
    /// # Errors
    /// Those of [`Reading::floats`].
    pub fn expect_reordered(
        mut self,
        file: &mut Reading<'_>,
        name: &'static str,
        stored_as: &str,
        axes: Axes<'_>,
        reorder: Reorder<'_>,
    ) -> Result<Self, String> {
        let stored = file.tensor(stored_as, axes, Kind::Float)?;
        self.expected.push(ExpectedTensor {
            name,
            stored_as: stored_as.to_owned(),
            values: reorder(&stored.values),
            stored_f32: stored.stored_f32,
            computed_f32: false,
        });
        Ok(self)
    }

    /// The expected values were computed in f32 throughout: only a kernel's budget applies.
    #[must_use]
    pub fn computed_in_f32(mut self) -> Self {
        self.expected.iter_mut().for_each(|expected| expected.computed_f32 = true);
        self
    }

    /// Why the kernel cannot run this case, if it cannot: it accepts only cases like this other
    /// one.
    #[must_use]
    pub fn kernel_skips(mut self, why: Option<(String, C)>) -> Self {
        self.kernel_skip = why;
        self
    }

    /// As a case of any operator.
    pub(super) fn of_any(self, any: impl Fn(C) -> AnyCase) -> Golden<AnyCase> {
        let Self { case, given, scalars, expected, kernel_skip } = self;
        let kernel_skip = kernel_skip.map(|(why, like)| (why, any(like)));
        Golden { case: any(case), given, scalars, expected, kernel_skip }
    }
}

impl Golden<AnyCase> {
    /// The case with its tensors, checked against the operator's declaration.
    pub(super) fn finish(self, file: &GoldenFile) -> Result<GoldenCase, CaseError> {
        let broken = |reason: String| CaseError::Malformed(format!("{}: {reason}", file.name));
        let refused =
            |refused: Refused| broken(format!("field `{}`: {}", refused.field, refused.reason));
        match (checked(&*self.case), &self.kernel_skip) {
            // The similar case must be valid, so the error comes from what differs between the two.
            (Err(_), Some((_, like))) => checked(&**like).map(|_| ()).map_err(refused)?,
            (Ok(_), Some((why, _))) => {
                return Err(broken(format!("left out of the kernels, which take it: {why}")));
            }
            (found, None) => found.map(|_| ()).map_err(refused)?,
        }
        let specs = self.case.tensors();
        within(&*self.case, &specs, &Layouts::new(), size::limit()).map_err(refused)?;
        let mut tensors = Tensors::draw(&specs, None);
        self.case.amend(&mut tensors).map_err(|e| broken(e.to_string()))?;
        for (name, given) in self.given {
            tensors.put(name, fitted(&specs, name, given).map_err(broken)?);
        }
        for (name, value) in self.scalars {
            tensors.set_scalar(name, value);
        }
        for expected in &self.expected {
            filled(&specs, expected.name, expected.values.len()).map_err(broken)?;
        }
        let kernel_skip = self.kernel_skip.map(|(why, _)| why);
        let inputs = Inputs::of(self.case, Choices::default(), tensors);
        Ok(GoldenCase { prepared: Box::new(inputs), expected: self.expected, kernel_skip })
    }
}

/// For each slot of `chosen` `[..tokens, topk]`, multiplies its expert's matrix of `experts` by its
/// token's row of `rows` `[..tokens, n]`. The result has m values. The matrices' axes are
/// `[experts, m, n]`.
///
/// # Errors
/// A tensor that the file does not have, or whose sizes do not fit; an expert that does not exist.
pub fn routed(
    file: &mut Reading<'_>,
    rows: &str,
    chosen: &str,
    experts: (&str, [&str; 2]),
) -> Result<Vec<Vec<f64>>, String> {
    of_slots(file, rows, chosen, experts, false)
}

/// [`routed`] in the direction of gradients: rows `[..tokens, m]` times the matrix, n values.
///
/// # Errors
/// As [`routed`].
pub fn routed_back(
    file: &mut Reading<'_>,
    rows: &str,
    chosen: &str,
    experts: (&str, [&str; 2]),
) -> Result<Vec<Vec<f64>>, String> {
    of_slots(file, rows, chosen, experts, true)
}

fn of_slots(
    file: &mut Reading<'_>,
    rows: &str,
    chosen: &str,
    (matrices, [m_axis, n_axis]): (&str, [&str; 2]),
    back: bool,
) -> Result<Vec<Vec<f64>>, String> {
    let experts = file.floats(matrices, &["experts", m_axis, n_axis])?;
    let rows = file.floats(rows, &["..tokens", if back { m_axis } else { n_axis }])?;
    let slots = file.integers(chosen, &["..tokens", "topk"])?;
    let (m, n, topk) = (file.extent(m_axis)?, file.extent(n_axis)?, file.extent("topk")?);
    let (length, width) = if back { (m, n) } else { (n, m) };
    let bytes = slots.len() as u128 * width as u128 * size_of::<f64>() as u128;
    if !size::limit().allows(bytes * COPIES_OF_PRODUCTS) {
        return Err(format!(
            "`{chosen}` and `{matrices}` make products of {}",
            size::in_words(bytes)
        ));
    }
    let product = |(slot, &expert): (usize, &i32)| {
        let matrix =
            usize::try_from(expert).ok().and_then(|expert| experts.chunks_exact(m * n).nth(expert));
        let matrix = matrix.ok_or_else(|| format!("`{chosen}`: there is no expert {expert}"))?;
        let row = &rows[slot / topk * length..(slot / topk + 1) * length];
        let at =
            |out: usize, i: usize| if back { matrix[i * n + out] } else { matrix[out * n + i] };
        let sum = |out: usize| row.iter().enumerate().map(|(i, x)| x * at(out, i)).sum();
        Ok((0..width).map(sum).collect())
    };
    slots.iter().enumerate().map(product).collect()
}

/// How many copies of the slots' products exist before they become a case's tensors.
const COPIES_OF_PRODUCTS: u128 = 6;

/// Rejects a tensor with another number of elements.
fn filled(specs: &Specs, name: &str, count: usize) -> Result<(), String> {
    let spec = specs.find(name).ok_or_else(|| format!("the case has no tensor `{name}`"))?;
    let shape = spec.shape();
    if count == spec.elements() {
        Ok(())
    } else {
        Err(format!("{count} elements do not fill `{name}` {shape:?}"))
    }
}

fn fitted(specs: &Specs, name: &'static str, given: Given) -> Result<HostTensor, String> {
    let spec = specs.find(name).ok_or_else(|| format!("the case has no tensor `{name}`"))?;
    let shape = spec.shape();
    let fits = |count: usize| filled(specs, name, count);
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
        Given::Tensor(tensor) => {
            return Err(format!("{tensor:?} is no `{name}` {} {shape:?}", spec.dtype));
        }
    })
}
