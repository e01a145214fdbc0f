//! Decode steps that are recorded once and then replayed, so that the host launches nothing.
//!
//! A step with the same extents has the same launches on the same addresses, as long as no buffer
//! has moved. What differs are the lists, which are uploaded before each step, and what the caches
//! hold. The first step of some extents compiles and allocates; the second one is recorded.

use std::collections::BTreeMap;

use dsv4_runtime::Result;
use dsv4_runtime::backend::{Recorded, Recorder};

use crate::model::batch::{Batch, Extents};
use crate::model::step::Step;

/// What a recording is for: a step, and the rows of its head, with or without samples.
pub(super) type Shape = (Extents, usize, bool);

/// A recording, and the count of buffers when it was made. `None` after one step.
type Known<'d> = Option<(u64, Box<dyn Recorded + 'd>)>;

/// The recordings of a model.
pub(super) struct Graphs<'d> {
    recorder: &'d dyn Recorder,
    most_tokens: usize,
    known: BTreeMap<Shape, Known<'d>>,
    /// The last step, if it was a replay.
    last: Option<Shape>,
}

impl<'d> Graphs<'d> {
    /// Of steps with at most that many tokens of each sequence.
    pub fn new(recorder: &'d dyn Recorder, most_tokens: usize) -> Self {
        Self { recorder, most_tokens, known: BTreeMap::new(), last: None }
    }

    /// How many tokens each sequence of a step has, if such a step is recorded.
    pub fn takes(&self, batch: &Batch) -> Option<usize> {
        batch.uniform_tokens().filter(|&tokens| tokens <= self.most_tokens)
    }

    /// How many shapes have been recorded.
    pub fn len(&self) -> usize {
        self.known.values().flatten().count()
    }

    /// Forgets all recordings: addresses that they use are no longer those of the model.
    pub fn clear(&mut self) {
        self.known.clear();
        self.last = None;
    }

    /// A step was launched without a recording.
    pub fn launched(&mut self) {
        self.last = None;
    }

    /// Enqueues the last step again if it was a replay; returns whether it was.
    pub fn repeat(&self) -> Result<bool> {
        let last = self.last.as_ref().and_then(|shape| self.known.get(shape)?.as_ref());
        last.map_or(Ok(false), |(_, recorded)| recorded.launch().map(|()| true))
    }

    /// Runs the launches of a step, whose lists are uploaded.
    pub fn run<'s>(
        &mut self,
        step: &mut Step<'s, 'd>,
        shape: Shape,
        launch: &mut dyn FnMut(&mut Step<'s, 'd>) -> Result<()>,
    ) -> Result<()> {
        self.last = None;
        let Some(known) = self.known.get_mut(&shape) else {
            launch(step)?;
            self.known.insert(shape, None);
            return Ok(());
        };
        let allocated = step.buffers.allocated();
        if let Some((_, recorded)) = known.as_ref().filter(|(at, _)| *at == allocated) {
            self.last = Some(shape);
            return recorded.launch();
        }
        let recorded = self.recorder.record(&mut || launch(step))?;
        let (_, recorded) = known.insert((allocated, recorded));
        self.last = Some(shape);
        recorded.launch()
    }
}
