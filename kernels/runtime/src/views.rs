//! The tensors of a call, by the names of a launcher's arguments.

use std::ops::Index;

use super::tensor::TensorView;

/// Views of tensors on a device, by name: the input of a launcher. A launcher rejects unknown names
/// and missing tensors.
#[derive(Clone, Debug, Default)]
pub struct Views(Vec<(&'static str, TensorView)>);

impl Views {
    /// No tensors yet.
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// The view of the tensor called `name`, if it is present.
    pub fn get(&self, name: &str) -> Option<&TensorView> {
        self.0.iter().find(|(other, _)| *other == name).map(|(_, view)| view)
    }

    /// Replaces the view of this name.
    pub fn put(&mut self, name: &'static str, view: TensorView) {
        match self.0.iter_mut().find(|(other, _)| *other == name) {
            Some((_, old)) => *old = view,
            None => self.0.push((name, view)),
        }
    }

    /// With a view under `name`, replaced or added.
    pub fn with(mut self, name: &'static str, view: &TensorView) -> Self {
        self.put(name, view.clone());
        self
    }

    /// Only the tensors of these names, if present: those that one of several launches takes.
    pub fn only(&self, names: &[&'static str]) -> Self {
        Self(self.0.iter().filter(|(name, _)| names.contains(name)).cloned().collect())
    }

    /// All but the tensors of these names.
    pub fn without(&self, names: &[&'static str]) -> Self {
        Self(self.0.iter().filter(|(name, _)| !names.contains(name)).cloned().collect())
    }

    /// The tensors under other names: each pair is the name here, and the name there.
    pub fn renamed(&self, names: &[(&'static str, &'static str)]) -> Self {
        let renamed =
            |name| names.iter().find(|(from, _)| *from == name).map_or(name, |&(_, to)| to);
        Self(self.0.iter().map(|(name, view)| (renamed(*name), view.clone())).collect())
    }

    /// Names and views, in insertion order.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &TensorView)> {
        self.0.iter().map(|(name, view)| (*name, view))
    }
}

impl<'a, const N: usize> From<[(&'static str, &'a TensorView); N]> for Views {
    /// If two views have the same name, the later one stays.
    fn from(views: [(&'static str, &'a TensorView); N]) -> Self {
        views.into_iter().fold(Self::new(), |all, (name, view)| all.with(name, view))
    }
}

impl Index<&str> for Views {
    type Output = TensorView;

    /// # Panics
    /// If there is no such tensor.
    fn index(&self, name: &str) -> &TensorView {
        self.get(name).unwrap_or_else(|| panic!("there is no tensor `{name}`"))
    }
}
