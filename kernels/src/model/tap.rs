//! What may see the launches of a model.

use dsv4_runtime::{Device, Result, Views};

/// A launch of a step.
#[derive(Clone, Copy)]
pub struct Site<'a> {
    /// The operator.
    pub operator: &'static str,
    /// What it computes there: the name of its weight, or else of what it writes.
    pub name: &'a str,
    /// The layer; the number of main layers for the MTP module. `None` before and after the layers.
    pub layer: Option<usize>,
    /// The tensors, under the launcher's names.
    pub views: &'a Views,
}

/// Runs in the place of every launch of a model, and runs it.
///
/// A tap sees what a launch reads and writes. It is how a run is judged operator by operator. In
/// tests it is also how faults get in: it may write to the tensors, or not run the launch.
pub trait Tap {
    /// Runs the launch by `run`.
    ///
    /// # Errors
    /// Those of the launch, and of the tap.
    fn around(
        &mut self,
        device: &Device,
        site: Site<'_>,
        run: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()>;
}

/// No tap: every launch runs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Untapped;

impl Tap for Untapped {
    fn around(
        &mut self,
        _: &Device,
        _: Site<'_>,
        run: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        run()
    }
}
