//! Tensors by name: the inputs and the outputs of an oracle.

use candle_core::Tensor;

use crate::error::{Result, extents, wrong_value};

/// Tensors in f64, by the names of the operator's documentation.
#[derive(Debug, Clone, Default)]
pub struct Named(Vec<(&'static str, Tensor)>);

impl Named {
    /// Without tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tensor under `name`, or replaces it.
    pub fn with(mut self, name: &'static str, tensor: Tensor) -> Self {
        match self.0.iter_mut().find(|(other, _)| *other == name) {
            Some((_, old)) => *old = tensor,
            None => self.0.push((name, tensor)),
        }
        self
    }

    /// Adds a tensor if it is present.
    pub fn maybe(self, name: &'static str, tensor: Option<Tensor>) -> Self {
        match tensor {
            Some(tensor) => self.with(name, tensor),
            None => self,
        }
    }

    /// The tensor with the name `name`, if present.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.0.iter().find(|(other, _)| *other == name).map(|(_, tensor)| tensor)
    }

    /// The tensor with the name `name`.
    ///
    /// # Errors
    /// No such tensor exists.
    pub fn tensor(&self, name: &'static str) -> Result<&Tensor> {
        self.get(name).ok_or_else(|| wrong_value(name, "absent", "the operator needs it"))
    }

    /// Checks that the present ones of these tensors are f64 and have these axes, where an axis of
    /// one name has one size. Each pair is names, and the axes of every tensor of these names.
    /// Returns the sizes of the requested axes, 0 for an axis that no present tensor has.
    ///
    /// # Errors
    /// The tensor, and what is wrong with it.
    pub fn extents<const N: usize>(
        &self,
        axes: [&str; N],
        tensors: &[(&[&'static str], &[&'static str])],
    ) -> Result<[usize; N]> {
        let with_axes = |&(names, axes): &(&[&'static str], _)| -> Vec<_> {
            names.iter().map(|&name| (name, self.get(name), axes)).collect()
        };
        extents(axes, &tensors.iter().flat_map(with_axes).collect::<Vec<_>>())
    }

    /// All of them, in the order in which they were added.
    pub fn into_tensors(self) -> Vec<(&'static str, Tensor)> {
        self.0
    }
}
