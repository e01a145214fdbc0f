//! A call of an operator that is ready for tensors: which ones it takes, in which order, and its
//! launches on them.

use dsv4_parity::operator::call::Call;
use dsv4_parity::operator::declaration::Axis;
use dsv4_parity::operators::registry;
use dsv4_runtime::kept::{Kept, alignment};
use dsv4_runtime::{DType, Device, Environment, RuntimeError, TensorView, Views, cuda};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde_json::Value;

use crate::devices::{self, Place};
use crate::emulated;
use crate::errors;
use crate::signatures::signature;
use std::sync::{Arc, Mutex};

use dsv4_parity::calls::observed::{DIRECTIONS, Observed, Observer, Sizes};
use dsv4_parity::calls::solve::{Given, Options, Solved, solve};

/// The role of a tensor of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Read.
    Given,
    /// Read and partly written.
    State,
    /// Written.
    Written,
    /// Memory that the launches need.
    Scratch,
}

/// A tensor of a call.
#[derive(Clone, Debug)]
pub struct Slot {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub dtype: DType,
    /// Its sizes.
    pub shape: Vec<usize>,
    /// Elements between its rows that belong to no tensor.
    pub row_gap: usize,
    /// What the call does with it.
    pub role: Role,
}

/// A call of one direction.
#[pyclass(frozen, module = "dsv4_parity._native")]
#[derive(Clone)]
pub struct Plan {
    call: Call,
    direction: usize,
    slots: Vec<Slot>,
    /// Whether the kernels are those whose bits do not depend on the batch.
    invariant: bool,
}

/// A name, a type and sizes.
type Described = (&'static str, String, Vec<usize>);

#[pymethods]
impl Plan {
    /// The tensors that it reads, in the order in which `run` takes them first.
    #[getter]
    fn given(&self) -> Vec<Described> {
        self.described(&[Role::Given, Role::State])
    }

    /// The tensors that it writes: next.
    #[getter]
    fn written(&self) -> Vec<Described> {
        self.described(&[Role::Written])
    }

    /// The memory that it needs besides: last.
    #[getter]
    fn scratch(&self) -> Vec<Described> {
        self.described(&[Role::Scratch])
    }

    /// The case that declares these tensors, as a line of JSON.
    #[getter]
    fn case(&self) -> String {
        self.call.line().line()
    }

    /// The call on tensors with these strides, in elements, in the order of `given`, `written` and
    /// `scratch`, in a place: `emulator`, or `cuda:` and the number of a GPU.
    fn bind(&self, place: &str, strides: Vec<Vec<i64>>) -> PyResult<Bound> {
        let place = place.parse::<Place>().map_err(PyValueError::new_err)?;
        let device = match place {
            Place::Emulator => None,
            Place::Gpu(number) if self.invariant => {
                Some(Arc::new(devices::gpu(number)?.invariant()))
            }
            Place::Gpu(number) => Some(devices::gpu(number)?),
        };
        let (wanted, found) = (self.slots.len(), strides.len());
        if found != wanted {
            let reason = format!("strides of {found} tensors; the call has {wanted}");
            return Err(PyValueError::new_err(reason));
        }
        let view = |(slot, strides): (&Slot, Vec<i64>)| TensorView {
            name: slot.name.to_owned(),
            address: 0,
            dtype: slot.dtype,
            shape: slot.shape.clone(),
            strides,
        };
        let views = self.slots.iter().zip(strides).map(view).collect();
        let Self { call, direction, slots, invariant } = self.clone();
        let kept = Mutex::default();
        Ok(Bound { call, direction, slots, views, device, invariant, kept })
    }
}

/// A call on tensors of known sizes and strides: only their addresses are missing.
#[pyclass(frozen, module = "dsv4_parity._native")]
pub struct Bound {
    call: Call,
    direction: usize,
    slots: Vec<Slot>,
    views: Vec<TensorView>,
    /// The GPU; absent on the emulator.
    device: Option<Arc<Device>>,
    invariant: bool,
    kept: Mutex<Vec<(Alignments, OfAlignments)>>,
}

/// The alignment of each address of a call.
type Alignments = Vec<u64>;

/// The launches on tensors of these alignments and the paths that run, if they can be kept.
type OfAlignments = Option<Arc<(Kept, Vec<String>)>>;

/// Alignments for which launches are kept. A framework's own tensors have one; views have others.
const MOST_ALIGNMENTS: usize = 16;

#[pymethods]
impl Bound {
    /// Launches on tensors at these addresses. On a GPU the launches are enqueued on the stream, a
    /// `CUstream`, and this does not wait for them. Returns the paths that ran.
    fn launch(&self, py: Python<'_>, stream: u64, addresses: Vec<u64>) -> PyResult<Vec<String>> {
        if addresses.len() != self.views.len() {
            let (found, wanted) = (addresses.len(), self.views.len());
            let reason = format!("{found} addresses; the call has {wanted} tensors");
            return Err(PyValueError::new_err(reason));
        }
        let Some(device) = &self.device else {
            let views: Vec<_> = self.names().zip(self.placed(&addresses)).collect();
            let choice = (self.direction, self.invariant);
            return emulated::run(py, &self.call, choice, &self.slots, &views);
        };
        py.detach(|| {
            let launched = cuda::on_stream(stream, || self.enqueue(device, &addresses));
            launched.map_err(|error| errors::of_runtime(&error))
        })
    }
}

impl Bound {
    fn names(&self) -> impl Iterator<Item = &'static str> {
        self.slots.iter().map(|slot| slot.name)
    }

    fn placed(&self, addresses: &[u64]) -> Vec<TensorView> {
        let views = self.views.iter().zip(addresses);
        views.map(|(view, &address)| TensorView { address, ..view.clone() }).collect()
    }

    /// Launches as earlier calls did, or by the launcher.
    fn enqueue(&self, device: &Device, addresses: &[u64]) -> Result<Vec<String>, RuntimeError> {
        if let Some(kept) = self.kept(device, addresses)
            && kept.0.launch(device, addresses)?
        {
            return Ok(kept.1.clone());
        }
        self.launch_views(device, &self.placed(addresses))
    }

    fn launch_views(
        &self,
        device: &Device,
        views: &[TensorView],
    ) -> Result<Vec<String>, RuntimeError> {
        let mut by_name = Views::new();
        self.names().zip(views).for_each(|(name, view)| by_name.put(name, view.clone()));
        self.call.launch(DIRECTIONS[self.direction], &by_name, device)
    }

    /// What is kept for these alignments, watched first if it is not known yet.
    fn kept(&self, device: &Device, addresses: &[u64]) -> OfAlignments {
        let alignments = || addresses.iter().copied().map(alignment);
        let mut known = self.kept.lock().unwrap_or_else(|e| e.into_inner());
        if let Some((_, kept)) = known.iter().find(|(of, _)| alignments().eq(of.iter().copied())) {
            return kept.clone();
        }
        if known.len() == MOST_ALIGNMENTS {
            return None;
        }
        let watched = Kept::of(device, &self.placed(addresses), |device, views| {
            self.launch_views(device, views)
        });
        let kept = watched.map(Arc::new);
        known.push((alignments().collect(), kept.clone()));
        kept
    }
}

impl Plan {
    fn described(&self, roles: &[Role]) -> Vec<Described> {
        let slots = self.slots.iter().filter(|slot| roles.contains(&slot.role));
        slots.map(|slot| (slot.name, slot.dtype.to_string(), slot.shape.clone())).collect()
    }
}

/// Plans a call: `direction` 0 or 1, the given tensors by name, type, sizes and strides, and the
/// options as a JSON object. `invariant` asks for kernels whose bits do not depend on the batch.
#[pyfunction]
pub fn plan(
    py: Python<'_>,
    operator: &str,
    direction: usize,
    given: Vec<(String, String, Vec<usize>, Vec<i64>)>,
    options: &str,
    place: &str,
    invariant: bool,
) -> PyResult<Plan> {
    let place = place.parse::<Place>().map_err(PyValueError::new_err)?;
    let operator = registry::find(operator).map_err(|error| errors::of_case(&error))?;
    let given = given.into_iter().map(|(name, dtype, shape, strides)| {
        let known = DType::ALL.into_iter().find(|known| known.to_string() == dtype);
        let dtype = known.ok_or_else(|| {
            PyValueError::new_err(format!("argument `{name}`: element type {dtype} is not known"))
        })?;
        Ok(Given { name, dtype, shape, strides })
    });
    let given = given.collect::<PyResult<Vec<_>>>()?;
    let options: Options = serde_json::from_str(options)
        .map_err(|error| PyValueError::new_err(format!("{}: {error}", operator.name())))?;
    py.detach(|| {
        let environment = devices::environment(place)?;
        let signature = signature(operator);
        let observer = Observer::new(environment.clone());
        let observer = if invariant { observer.invariant() } else { observer };
        let solved = solve(&signature, direction, &given, &options, &observer)
            .map_err(|misfit| PyValueError::new_err(misfit.message(operator.name())))?;
        let plan = planned(solved, direction, &options, &observer)?;
        Ok(Plan { invariant, ..plan })
    })
}

/// With the fastest kernels, unless the caller chose them.
fn planned(
    solved: Solved,
    direction: usize,
    options: &Options,
    observer: &Observer,
) -> PyResult<Plan> {
    let Solved { call, observed, sizes } = solved;
    let chosen = options.keys().any(|name| name.ends_with("implementation"));
    let fastest =
        if chosen { call.clone() } else { without_library(&call, observer.environment()) };
    let again =
        observer.observe_with(&fastest, &sizes).map_err(|error| errors::of_runtime(&error))?;
    let observed = if again.launches_in(direction) { again } else { observed };
    if let Some(why) = fastest.cannot_run(observer.environment()) {
        return Err(errors::DeviceError::new_err(why));
    }
    let slots = slots(&fastest, &observed, &sizes, direction);
    Ok(Plan { slots, call: fastest, direction, invariant: false })
}

/// The fastest kernels of ours.
fn without_library(call: &Call, environment: &Environment) -> Call {
    let fastest = call.fastest(environment);
    let mut case = fastest.line();
    let libraries: Vec<String> = dsv4_parity::calls::fields::leaves(&case)
        .into_iter()
        .filter(|(path, value)| path.ends_with("library") && *value == Value::Bool(true))
        .map(|(path, _)| path)
        .collect();
    if libraries.is_empty() {
        return fastest;
    }
    for path in &libraries {
        dsv4_parity::calls::fields::set(&mut case, path, &false.into());
    }
    let operator = registry::find(&case.operator);
    operator.and_then(|operator| operator.call(&case)).unwrap_or_else(|_| call.clone())
}

/// The tensors of a call: those that are read, then those that are written, then scratch memory.
/// Sizes are those of the call; a larger case may only have shown which ones it needs.
fn slots(call: &Call, observed: &Observed, sizes: &Sizes, direction: usize) -> Vec<Slot> {
    let needed = observed.tensors.iter().filter(|seen| seen.needed[direction]);
    let role = |seen: &dsv4_parity::calls::observed::Seen| {
        use dsv4_parity::operator::declaration::Part;
        match seen.spec.part {
            Part::State => Role::State,
            _ if seen.is_read(direction) => Role::Given,
            _ if seen.is_result(direction) => Role::Written,
            _ => Role::Scratch,
        }
    };
    let size = |axis: &Axis| sizes.get(axis.name).copied().unwrap_or(axis.extent);
    let slot = |seen: &dsv4_parity::calls::observed::Seen| {
        let spec = call.specs().find(seen.spec.name).unwrap_or(&seen.spec);
        Slot {
            name: spec.name,
            dtype: spec.dtype,
            shape: spec.axes.iter().map(size).collect(),
            row_gap: spec.minimum_gap,
            role: role(seen),
        }
    };
    let workspaces = observed.workspaces.iter().filter(|(_, _, needed)| needed[direction]);
    let workspace = |&(name, bytes, _): &(&'static str, usize, [bool; 2])| Slot {
        name,
        dtype: DType::U8,
        shape: vec![bytes],
        row_gap: 0,
        role: Role::Scratch,
    };
    let mut slots: Vec<Slot> = needed.map(slot).chain(workspaces.map(workspace)).collect();
    slots.sort_by_key(|slot| match slot.role {
        Role::Given | Role::State => 0,
        Role::Written => 1,
        Role::Scratch => 2,
    });
    slots
}
