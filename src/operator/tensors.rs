//! The given tensors of a case by name: as the host holds them, and as the oracle sees them.

use std::collections::BTreeMap;

use candle_core::{Device as Cpu, Tensor};
use dsv4_reference::Named;
use dsv4_runtime::HostTensor;

use super::declaration::{Source, Specs, TensorSpec};
use super::rows_of;
use super::special::{self, Special};
use crate::case::Draw;

/// Tensors of a case that kernels read, and the values that the oracle takes next to them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tensors {
    tensors: BTreeMap<&'static str, HostTensor>,
    scalars: BTreeMap<&'static str, f64>,
}

impl Tensors {
    /// Draws every given tensor from its source. Each name has its own random stream. Then special
    /// values and padding are set.
    pub fn draw(specs: &Specs, special: Option<&Special>) -> Self {
        let given = specs
            .present()
            .filter(|spec| spec.is_given())
            .map(|spec| (spec.name, drawn(spec, specs.seed)));
        let mut tensors = Self { tensors: given.collect(), scalars: BTreeMap::new() };
        special::apply(specs, special, &mut tensors);
        tensors
    }

    /// The tensor called `name`, if the case has it.
    pub fn get(&self, name: &str) -> Option<&HostTensor> {
        self.tensors.get(name)
    }

    /// The tensor called `name`.
    ///
    /// # Panics
    /// If the case does not have it: the operator requests a tensor that it does not declare.
    pub fn tensor(&self, name: &str) -> &HostTensor {
        self.get(name).unwrap_or_else(|| panic!("the case has no tensor `{name}`"))
    }

    /// Its elements, widened.
    ///
    /// # Panics
    /// As [`Self::tensor`].
    pub fn values(&self, name: &str) -> Vec<f64> {
        self.tensor(name).to_f64()
    }

    /// The elements of an i32 tensor.
    ///
    /// # Panics
    /// As [`Self::tensor`], and for another type.
    pub fn i32s(&self, name: &str) -> Vec<i32> {
        self.tensor(name).to_i32()
    }

    /// The elements of an i32 tensor that the case may not have.
    pub fn maybe_i32s(&self, name: &str) -> Option<Vec<i32>> {
        self.get(name).map(HostTensor::to_i32)
    }

    /// Replaces the tensor of this name.
    pub fn put(&mut self, name: &'static str, tensor: HostTensor) {
        self.tensors.insert(name, tensor);
    }

    /// Removes a tensor.
    pub fn remove(&mut self, name: &str) -> Option<HostTensor> {
        self.tensors.remove(name)
    }

    /// Sets the elements of a floating-point tensor, rounded to its type.
    ///
    /// # Panics
    /// As [`Self::tensor`], and where they do not fill its shape.
    pub fn set(&mut self, name: &'static str, values: &[f64]) {
        let old = self.tensor(name);
        let new = HostTensor::from_f64(old.dtype, &old.shape, values);
        self.put(name, new);
    }

    /// Sets the elements of an i32 tensor.
    ///
    /// # Panics
    /// As [`Self::set`].
    pub fn set_i32s(&mut self, name: &'static str, values: &[i32]) {
        let shape = self.tensor(name).shape.clone();
        self.put(name, HostTensor::from_i32(&shape, values));
    }

    /// Changes the elements of a floating-point tensor that the case may not have.
    pub fn edit(&mut self, name: &'static str, change: impl FnOnce(&mut [f64])) {
        if let Some(tensor) = self.get(name) {
            let mut values = tensor.to_f64();
            change(&mut values);
            self.set(name, &values);
        }
    }

    /// Changes the elements of an i32 tensor that the case may not have.
    pub fn edit_i32s(&mut self, name: &'static str, change: impl FnOnce(&mut [i32])) {
        if let Some(tensor) = self.get(name) {
            let mut values = tensor.to_i32();
            change(&mut values);
            self.set_i32s(name, &values);
        }
    }

    /// The bytes of a tensor that the case may not have.
    pub fn bytes_mut(&mut self, name: &str) -> Option<&mut [u8]> {
        self.tensors.get_mut(name).map(|tensor| &mut tensor.bytes[..])
    }

    /// Multiplies a floating-point tensor, rounded to its type (exactly, for a power of two).
    pub fn scale(&mut self, name: &'static str, factor: f64) {
        self.edit(name, |values| values.iter_mut().for_each(|value| *value *= factor));
    }

    /// A number that the oracle takes instead of the case's rounded one, such as the scale of a
    /// golden file.
    pub fn set_scalar(&mut self, name: &'static str, value: f64) {
        self.scalars.insert(name, value);
    }

    /// The number set under `name`, or `otherwise`.
    pub fn scalar(&self, name: &str, otherwise: f64) -> f64 {
        self.scalars.get(name).copied().unwrap_or(otherwise)
    }

    /// Multiplies the number set under `name`, if one is set. The case's own number does not
    /// change.
    pub fn scale_scalar(&mut self, name: &'static str, factor: f64) {
        if let Some(value) = self.scalars.get_mut(name) {
            *value *= factor;
        }
    }

    /// Names and tensors, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &HostTensor)> {
        self.tensors.iter().map(|(&name, tensor)| (name, tensor))
    }

    /// Reorders the entries along the axis in every given tensor that has it: entry `i` is entry
    /// `order[i]` of the old tensor.
    pub fn permute(&mut self, specs: &Specs, axis: &str, order: &[usize]) {
        for spec in specs.present().filter(|spec| spec.is_given()) {
            if let (Some(at), Some(tensor)) = (spec.axis(axis), self.tensors.get_mut(spec.name)) {
                *tensor = permuted_along(tensor, at, order);
            }
        }
    }
}

/// Makes each token of `requests` requests, of `tokens` tokens each, a request of its own: tensors
/// with both axes keep their values, and those of the requests are repeated for each token.
pub fn apart(specs: &Specs, tensors: &mut Tensors, requests: usize, tokens: usize) {
    for spec in specs.present().filter(|spec| spec.is_given()) {
        let Some(tensor) = tensors.tensors.get_mut(spec.name) else { continue };
        if spec.axis("batch") != Some(0) {
            continue;
        }
        let of_tokens = spec.axes.get(1).is_some_and(|axis| ["s_q", "next_n"].contains(&axis.name));
        if of_tokens {
            tensor.shape[..2].copy_from_slice(&[requests * tokens, 1]);
        } else {
            let order: Vec<usize> = (0..requests * tokens).map(|token| token / tokens).collect();
            *tensor = permuted_along(tensor, 0, &order);
        }
    }
}

fn drawn(spec: &TensorSpec, seed: u64) -> HostTensor {
    let shape = spec.shape();
    match spec.source {
        Source::Amended => HostTensor {
            dtype: spec.dtype,
            bytes: vec![0; spec.elements() * spec.dtype.size()],
            shape,
        },
        Source::Drawn { distribution, magnitude } => {
            let (rows, row_len) = rows_of(&shape);
            let values = Draw::new(seed, spec.name).values(distribution, rows, row_len, magnitude);
            HostTensor::from_f64(spec.dtype, &shape, &values)
        }
    }
}

/// Entry `i` along axis `at` is entry `order[i]` of `tensor`. `order` may repeat entries and skip
/// others.
pub fn permuted_along(tensor: &HostTensor, at: usize, order: &[usize]) -> HostTensor {
    let mut shape = tensor.shape.clone();
    let outer: usize = shape[..at].iter().product();
    let entry = shape[at + 1..].iter().product::<usize>() * tensor.dtype.size();
    let whole = shape[at] * entry;
    let mut bytes = Vec::with_capacity(outer * order.len() * entry);
    for start in (0..outer).flat_map(|o| order.iter().map(move |&from| o * whole + from * entry)) {
        bytes.extend_from_slice(&tensor.bytes[start..start + entry]);
    }
    shape[at] = order.len();
    HostTensor { dtype: tensor.dtype, shape, bytes }
}

/// Entries along axis `at` of a tensor that repeats from its start after its end.
pub(super) fn repeated_along(
    tensor: &HostTensor,
    at: usize,
    entries: impl Iterator<Item = usize>,
) -> HostTensor {
    let extent = tensor.shape[at].max(1);
    let order: Vec<usize> = entries.map(|entry| entry % extent).collect();
    let as_it_is = order.len() == tensor.shape[at] && order.iter().copied().eq(0..order.len());
    if as_it_is { tensor.clone() } else { permuted_along(tensor, at, &order) }
}

/// What an oracle reads: the given tensors, widened. A triangulation, or a chain of operators,
/// replaces some of them.
#[derive(Clone)]
pub struct Bound<'a> {
    tensors: &'a Tensors,
    overrides: BTreeMap<&'static str, Tensor>,
}

impl<'a> Bound<'a> {
    /// The tensors without changes.
    pub fn new(tensors: &'a Tensors) -> Self {
        Self { tensors, overrides: BTreeMap::new() }
    }

    /// The same with another f64 tensor under `name`.
    pub fn with(mut self, name: &'static str, tensor: Tensor) -> Self {
        self.overrides.insert(name, tensor);
        self
    }

    /// A tensor in f64, of its declared shape.
    ///
    /// # Errors
    /// A name for which the case has no tensor.
    pub fn f64(&self, name: &'static str) -> dsv4_reference::Result<Tensor> {
        self.maybe(name)?.ok_or_else(|| dsv4_reference::Error::Value {
            argument: name,
            value: "absent".into(),
            rule: "the operator needs it",
        })
    }

    /// A tensor that the case may not have.
    ///
    /// # Errors
    /// The tensor library's.
    pub fn maybe(&self, name: &str) -> dsv4_reference::Result<Option<Tensor>> {
        if let Some(tensor) = self.overrides.get(name) {
            return Ok(Some(tensor.clone()));
        }
        let widened =
            |host: &HostTensor| Tensor::from_vec(host.to_f64(), host.shape.as_slice(), &Cpu::Cpu);
        Ok(self.tensors.get(name).map(widened).transpose()?)
    }

    /// All of them, by name.
    ///
    /// # Errors
    /// The tensor library's.
    pub fn named(&self) -> dsv4_reference::Result<Named> {
        let names = self.tensors.iter().map(|(name, _)| name).chain(self.overrides.keys().copied());
        names
            .into_iter()
            .try_fold(Named::new(), |named, name| Ok(named.maybe(name, self.maybe(name)?)))
    }

    /// The host's tensors: integers, bytes and scalars, which have no gradients.
    pub fn host(&self) -> &'a Tensors {
        self.tensors
    }

    /// The number set under `name`, or `otherwise`.
    pub fn scalar(&self, name: &str, otherwise: f64) -> f64 {
        self.tensors.scalar(name, otherwise)
    }
}
