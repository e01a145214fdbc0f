//! Tensors by name: what an oracle reads, and what it returns.

use candle_core::Tensor;

use crate::error::{Result, extents, wrong_value};

/// Tensors in f64, by the names of the operator's documentation.
#[derive(Debug, Clone, Default)]
pub struct Named(Vec<(&'static str, Tensor)>);

impl Named {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// With a tensor under `name`: another one, or one more.
    pub fn with(mut self, name: &'static str, tensor: Tensor) -> Self {
        match self.0.iter_mut().find(|(other, _)| *other == name) {
            Some((_, old)) => *old = tensor,
            None => self.0.push((name, tensor)),
        }
        self
    }

    /// With a tensor more, where there is one.
    pub fn maybe(self, name: &'static str, tensor: Option<Tensor>) -> Self {
        match tensor {
            Some(tensor) => self.with(name, tensor),
            None => self,
        }
    }

    /// The tensor called `name`, if there is one.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.0.iter().find(|(other, _)| *other == name).map(|(_, tensor)| tensor)
    }

    /// The tensor called `name`.
    ///
    /// # Errors
    /// There is none.
    pub fn tensor(&self, name: &'static str) -> Result<&Tensor> {
        self.get(name).ok_or_else(|| wrong_value(name, "absent", "the operator needs it"))
    }

    /// Checks that those of these tensors that are present are f64 and have these axes, an axis of
    /// one name having one extent: each pair is names, and the axes of every tensor of these
    /// names. Returns the extents of the axes that are asked for, 0 for one that no present tensor
    /// has.
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

    /// All of them, in the order in which they came.
    pub fn into_tensors(self) -> Vec<(&'static str, Tensor)> {
        self.0
    }
}
