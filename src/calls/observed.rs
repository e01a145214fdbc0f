//! What a case's launches do with its tensors: they run on a device that accepts launches and runs
//! none, on tensors at addresses that no number resembles.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::{Arc, Once};

use crate::operator::benchmarks::Direction;
use crate::operator::call::Call;
use crate::operator::declaration::{Part, TensorSpec};
use dsv4_runtime::recording::{AcceptedLaunch, RecordingBackend};
use dsv4_runtime::tensor::dense_strides;
use dsv4_runtime::{BackendKind, DType, Device, Environment, RuntimeError, TensorView, Views};

/// Address of the first tensor; further ones follow at this distance.
const FIRST: u64 = 0x5a5a << 48;
const DISTANCE: u64 = 1 << 36;

/// Both directions, as indices.
pub const DIRECTIONS: [Direction; 2] = [Direction::Forward, Direction::Backward];

/// An H200, whose kernels are the ones that the declarations' benchmarks are about.
pub fn hopper() -> Environment {
    Environment {
        backend: BackendKind::Cuda,
        device: "a Hopper GPU".into(),
        driver: String::new(),
        compiler: String::new(),
        target: "sm_90a".into(),
        processors: 132,
        shared_bytes_per_block: 232448,
    }
}

/// Sizes of axes by name.
pub type Sizes = BTreeMap<&'static str, usize>;

/// Gives a tensor that has one of the axes their sizes; it is then dense.
fn resize(spec: &mut TensorSpec, view: &mut TensorView, sizes: &Sizes) {
    let mut is_changed = false;
    for axis in &mut spec.axes {
        if let Some(size) = sizes.get(axis.name) {
            (axis.extent, is_changed) = (*size, true);
        }
    }
    if is_changed {
        view.shape = spec.shape();
        view.strides = dense_strides(&view.shape);
    }
}

/// A device on which launches are observed.
pub struct Observer {
    backend: Arc<RecordingBackend>,
    device: Device,
}

/// A tensor of a case.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    /// Its declaration.
    pub spec: TensorSpec,
    /// The layout that the case declares.
    pub strides: Vec<i64>,
    /// Whether the forward, and the backward, need it.
    pub needed: [bool; 2],
}

/// A case's tensors and launches.
#[derive(Clone, Debug, PartialEq)]
pub struct Observed {
    /// Its tensors, in the order of their declaration.
    pub tensors: Vec<Seen>,
    /// Names and bytes of its workspaces, with the directions that need them.
    pub workspaces: Vec<(&'static str, usize, [bool; 2])>,
    /// The launches of both directions.
    pub launches: [Vec<AcceptedLaunch>; 2],
}

impl Observer {
    /// A device that claims to be `environment`.
    pub fn new(environment: Environment) -> Self {
        let backend = Arc::new(RecordingBackend::accepting(environment));
        let device = Device::of_accepting(backend.clone(), dsv4_kernels::sources());
        Self { backend, device }
    }

    /// The same, on which launchers choose kernels whose bits do not depend on the batch.
    pub fn invariant(self) -> Self {
        Self { device: self.device.invariant(), ..self }
    }

    /// What it claims to be.
    pub fn environment(&self) -> &Environment {
        self.device.environment()
    }

    /// Launches both directions of a call.
    ///
    /// # Errors
    /// What the launchers reject.
    pub fn observe(&self, call: &Call) -> Result<Observed, RuntimeError> {
        self.observe_with(call, &Sizes::new())
    }

    /// As [`Self::observe`], with other sizes of some axes.
    ///
    /// # Errors
    /// What the launchers reject.
    pub fn observe_with(&self, call: &Call, sizes: &Sizes) -> Result<Observed, RuntimeError> {
        self.observe_as(call, sizes, None)
    }

    /// As [`Self::observe`], for a call that needs the same tensors as a `known` one if it has the
    /// same.
    ///
    /// # Errors
    /// What the launchers reject.
    pub fn observe_near(&self, call: &Call, known: &Observed) -> Result<Observed, RuntimeError> {
        self.observe_as(call, &Sizes::new(), Some(known))
    }

    fn observe_as(
        &self,
        call: &Call,
        sizes: &Sizes,
        known: Option<&Observed>,
    ) -> Result<Observed, RuntimeError> {
        let placed = call.placed(|number| FIRST + number as u64 * DISTANCE);
        let mut placed = placed.map_err(|error| {
            RuntimeError::system("placing tensors", std::io::Error::other(error.to_string()))
        })?;
        placed.iter_mut().for_each(|(spec, view)| resize(spec, view, sizes));
        let mut views = Views::new();
        placed.iter().for_each(|(spec, view)| views.put(spec.name, view.clone()));
        let workspaces = call.workspaces(&views, &self.device)?;
        for (number, (name, bytes)) in workspaces.iter().enumerate() {
            let address = FIRST + (call.specs().all().len() + number) as u64 * DISTANCE;
            views.put(name, TensorView::dense(*name, address, DType::U8, &[*bytes]));
        }
        let mut launches = [Vec::new(), Vec::new()];
        for (index, direction) in DIRECTIONS.into_iter().enumerate() {
            launches[index] = self.launched(call, direction, &views)?;
        }
        let names: Vec<&str> = views.iter().map(|(name, _)| name).collect();
        let same = known.filter(|known| known.names().eq(names.iter().copied()));
        let needed = [0, 1].map(|index| match same {
            Some(known) => known.needed(index),
            None => self.needed(call, DIRECTIONS[index], &views, &launches[index]),
        });
        let is_needed = |name: &str| [0, 1].map(|index| needed[index].contains(&name));
        let seen = |(spec, view): (TensorSpec, TensorView)| Seen {
            needed: is_needed(spec.name),
            strides: view.strides,
            spec,
        };
        let workspaces = workspaces.into_iter().map(|(name, bytes)| (name, bytes, is_needed(name)));
        Ok(Observed {
            workspaces: workspaces.collect(),
            tensors: placed.into_iter().map(seen).collect(),
            launches,
        })
    }

    fn launched(
        &self,
        call: &Call,
        direction: Direction,
        views: &Views,
    ) -> Result<Vec<AcceptedLaunch>, RuntimeError> {
        if direction == Direction::Backward && !call.has_backward() {
            return Ok(Vec::new());
        }
        self.backend.take_accepted();
        call.launch(direction, views, &self.device)?;
        Ok(self.backend.take_accepted())
    }

    /// The tensors whose addresses the launches take, and those that the launcher requires to be
    /// there all the same.
    fn needed(
        &self,
        call: &Call,
        direction: Direction,
        views: &Views,
        launches: &[AcceptedLaunch],
    ) -> Vec<&'static str> {
        let words = || launches.iter().flat_map(|launch| launch.params.chunks_exact(8));
        let is_taken = |view: &TensorView| {
            words().any(|word| {
                let word = u64::from_ne_bytes(word.try_into().unwrap_or_default());
                (view.address..view.address + DISTANCE).contains(&word)
            })
        };
        let taken = views.iter().filter(|(_, view)| is_taken(view)).map(|(name, _)| name);
        let taken: Vec<_> = taken.collect();
        // A launcher may index a tensor that every case has, which panics without it.
        let suffice = |names: &[&'static str]| {
            let launched = AssertUnwindSafe(|| self.launched(call, direction, &views.only(names)));
            matches!(quietly(launched), Some(Ok(again)) if again == launches)
        };
        if suffice(&taken) {
            return taken;
        }
        let mut needed: Vec<_> = views.iter().map(|(name, _)| name).collect();
        for (name, _) in views.iter().filter(|(name, _)| !taken.contains(name)) {
            let fewer: Vec<_> = needed.iter().copied().filter(|other| *other != name).collect();
            if suffice(&fewer) {
                needed = fewer;
            }
        }
        needed
    }
}

thread_local! {
    /// Whether a panic of this thread is expected, and not reported.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// The result of work that may panic, which is then `None` and not reported.
pub(crate) fn quietly<T>(work: AssertUnwindSafe<impl FnOnce() -> T>) -> Option<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let report = take_hook();
        set_hook(Box::new(move |panic| {
            if !QUIET.get() {
                report(panic);
            }
        }));
    });
    QUIET.set(true);
    let done = catch_unwind(work);
    QUIET.set(false);
    done.ok()
}

impl Observed {
    /// Names of all tensors and workspaces.
    fn names(&self) -> impl Iterator<Item = &'static str> {
        let tensors = self.tensors.iter().map(|seen| seen.spec.name);
        tensors.chain(self.workspaces.iter().map(|(name, ..)| *name))
    }

    /// Names of those that a direction needs.
    fn needed(&self, direction: usize) -> Vec<&'static str> {
        let tensors = self.tensors.iter().filter(|seen| seen.needed[direction]);
        let workspaces = self.workspaces.iter().filter(|(_, _, needed)| needed[direction]);
        let workspaces = workspaces.map(|(name, ..)| *name);
        tensors.map(|seen| seen.spec.name).chain(workspaces).collect()
    }

    /// Whether a direction launches anything.
    pub fn launches_in(&self, direction: usize) -> bool {
        !self.launches[direction].is_empty()
    }

    /// The tensors that a call of this direction reads.
    pub fn given(&self, direction: usize) -> impl Iterator<Item = &Seen> {
        self.tensors.iter().filter(move |seen| seen.needed[direction] && seen.is_read(direction))
    }

    /// The tensors that a call of this direction writes for its caller.
    pub fn written(&self, direction: usize) -> impl Iterator<Item = &Seen> {
        self.tensors.iter().filter(move |seen| seen.needed[direction] && seen.is_result(direction))
    }
}

impl Seen {
    /// Whether a call of this direction reads it, if it needs it.
    pub fn is_read(&self, direction: usize) -> bool {
        match self.spec.part {
            Part::Input | Part::State | Part::Upstream { .. } => true,
            Part::Output => direction == 1,
            Part::Gradient { .. } | Part::Scratch | Part::Observed => false,
        }
    }

    /// Whether a call of this direction writes it for its caller.
    pub fn is_result(&self, direction: usize) -> bool {
        match self.spec.part {
            Part::Output => direction == 0,
            Part::Gradient { .. } => true,
            Part::State | Part::Input | Part::Upstream { .. } => false,
            Part::Scratch | Part::Observed => false,
        }
    }
}
