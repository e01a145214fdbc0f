//! The tensors of a call, by the names that a launcher gives its arguments.

use std::ops::Index;

use super::tensor::TensorView;

/// Views of tensors on a device, by name: what a launcher takes. It refuses a name that it does
/// not know as well as the absence of one that it needs.
#[derive(Clone, Debug, Default)]
pub struct Views(Vec<(&'static str, TensorView)>);

impl Views {
    /// No tensors yet.
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// The view of the tensor called `name`, if there is one.
    pub fn get(&self, name: &str) -> Option<&TensorView> {
        self.0.iter().find(|(other, _)| *other == name).map(|(_, view)| view)
    }

    /// Puts a view in the place of its name's.
    pub fn put(&mut self, name: &'static str, view: TensorView) {
        match self.0.iter_mut().find(|(other, _)| *other == name) {
            Some((_, old)) => *old = view,
            None => self.0.push((name, view)),
        }
    }

    /// With a view under `name`: another one, or one more.
    pub fn with(mut self, name: &'static str, view: &TensorView) -> Self {
        self.put(name, view.clone());
        self
    }

    /// The tensors of these names alone, of those that there are: what one of several launches
    /// takes.
    pub fn only(&self, names: &[&'static str]) -> Self {
        Self(self.0.iter().filter(|(name, _)| names.contains(name)).cloned().collect())
    }

    /// All but the tensors of these names.
    pub fn without(&self, names: &[&'static str]) -> Self {
        Self(self.0.iter().filter(|(name, _)| !names.contains(name)).cloned().collect())
    }

    /// The tensors under other names: each pair is what one is called here, and what it is called
    /// there.
    pub fn renamed(&self, names: &[(&'static str, &'static str)]) -> Self {
        let renamed =
            |name| names.iter().find(|(from, _)| *from == name).map_or(name, |&(_, to)| to);
        Self(self.0.iter().map(|(name, view)| (renamed(*name), view.clone())).collect())
    }

    /// Names and views, in the order in which they came.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &TensorView)> {
        self.0.iter().map(|(name, view)| (*name, view))
    }
}

impl<'a, const N: usize> From<[(&'static str, &'a TensorView); N]> for Views {
    /// Of two views of one name the later one stays.
    fn from(views: [(&'static str, &'a TensorView); N]) -> Self {
        views.into_iter().fold(Self::new(), |all, (name, view)| all.with(name, view))
    }
}

impl Index<&str> for Views {
    type Output = TensorView;

    /// # Panics
    /// Where there is no such tensor.
    fn index(&self, name: &str) -> &TensorView {
        self.get(name).unwrap_or_else(|| panic!("there is no tensor `{name}`"))
    }
}
