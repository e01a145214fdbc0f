//! Calls on tensors in the memory of the host. The emulator has memory of its own, so the tensors
//! are copied there and back.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dsv4_parity::operator::call::Call;
use dsv4_runtime::arena::{Layout, Violation};
use dsv4_runtime::{Contract, DeviceArena, HostTensor, Result, RuntimeError, TensorView, Views};
use pyo3::prelude::*;

use crate::devices;
use crate::errors::{self, DeviceError};
use crate::plan::{Role, Slot};
use dsv4_parity::calls::observed::DIRECTIONS;

/// How often an interrupt by the user is looked for.
const POLL: Duration = Duration::from_millis(20);

/// What a call left: paths, forbidden writes, and the tensors that it wrote.
struct Left {
    paths: Vec<String>,
    violations: Vec<Violation>,
    written: Vec<Option<HostTensor>>,
}

/// A direction of a call, and whether its kernels are those whose bits do not depend on the batch.
pub type Choice = (usize, bool);

/// Runs a call on dense tensors of this process. A tensor that is written may be one that is read.
pub fn run(
    py: Python<'_>,
    call: &Call,
    choice: Choice,
    slots: &[Slot],
    views: &[(&'static str, TensorView)],
) -> PyResult<Vec<String>> {
    let tensors: Vec<HostTensor> =
        slots.iter().zip(views).map(|(slot, (_, view))| read(slot, view)).collect();
    // For each tensor, an earlier one that is the same memory.
    let same = |number: usize| {
        let earlier =
            views[..number].iter().position(|(_, other)| other.same_elements(&views[number].1));
        earlier.filter(|_| slots[number].role == Role::Written && !tensors[number].bytes.is_empty())
    };
    let shared: Vec<Option<usize>> = (0..slots.len()).map(same).collect();
    let (owned, call) = (slots.to_vec(), call.clone());
    let left = interruptible(py, move || launch(&call, choice, &owned, &tensors, &shared))?;
    let left = left.map_err(|error| errors::of_runtime(&error))?;
    if let Some(violation) = left.violations.first() {
        let Violation { buffer, bytes, first_offset, .. } = violation;
        return Err(DeviceError::new_err(format!(
            "a kernel wrote {bytes} bytes that are not its own, from byte {first_offset} of \
             `{buffer}`"
        )));
    }
    for ((_, view), written) in views.iter().zip(&left.written) {
        if let Some(tensor) = written {
            write(view, &tensor.bytes);
        }
    }
    Ok(left.paths)
}

fn read(slot: &Slot, view: &TensorView) -> HostTensor {
    let bytes = view.elements() * view.dtype.size();
    let bytes = if bytes == 0 || slot.role == Role::Scratch {
        Vec::new()
    } else {
        // SAFETY: the caller holds the tensor for the whole call, and gave the address and the
        // sizes of a dense one.
        unsafe { std::slice::from_raw_parts(view.address as *const u8, bytes) }.to_vec()
    };
    HostTensor { dtype: slot.dtype, shape: slot.shape.clone(), bytes }
}

fn write(view: &TensorView, bytes: &[u8]) {
    if !bytes.is_empty() {
        // SAFETY: as in `read`; a tensor that is written is writable, which the caller checked, and
        // the copy is another allocation.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), view.address as *mut u8, bytes.len())
        };
    }
}

fn launch(
    call: &Call,
    (direction, invariant): Choice,
    slots: &[Slot],
    tensors: &[HostTensor],
    shared: &[Option<usize>],
) -> Result<Left> {
    let device = devices::emulator().map_err(|error| {
        RuntimeError::system("opening the emulator", std::io::Error::other(error.to_string()))
    })?;
    let device = if invariant { Arc::new(device.invariant()) } else { device };
    let mut arena = DeviceArena::new(&device, Contract::NAN);
    let mut placed: Vec<TensorView> = Vec::new();
    for (number, (slot, tensor)) in slots.iter().zip(tensors).enumerate() {
        let is_shared = shared.contains(&Some(number));
        let role = match slot.role {
            Role::State => dsv4_runtime::Role::InPlace,
            Role::Given if is_shared => dsv4_runtime::Role::InPlace,
            _ => dsv4_runtime::Role::Input,
        };
        let view = match (slot.role, shared[number]) {
            (_, Some(earlier)) => TensorView { name: slot.name.into(), ..placed[earlier].clone() },
            (Role::Given | Role::State, None) => {
                arena.upload(slot.name, tensor, &Layout::padded(&slot.shape, slot.row_gap), role)?
            }
            (Role::Written, None) => arena.output(slot.name, slot.dtype, &slot.shape)?,
            (Role::Scratch, None) => {
                let layout = Layout::dense(&slot.shape);
                let role = dsv4_runtime::Role::Workspace;
                arena.allocate(slot.name, slot.dtype, &slot.shape, &layout, role)?
            }
        };
        placed.push(view);
    }
    let mut views = Views::new();
    slots.iter().zip(&placed).for_each(|(slot, view)| views.put(slot.name, view.clone()));
    let mut paths = Vec::new();
    let violations = arena.run(|device| {
        paths = call.launch(DIRECTIONS[direction], &views, device)?;
        Ok(())
    })?;
    let written = slots.iter().zip(&placed).map(|(slot, view)| {
        matches!(slot.role, Role::Written | Role::State).then(|| arena.download(view)).transpose()
    });
    Ok(Left { paths, violations, written: written.collect::<Result<_>>()? })
}

/// Does work in another thread, while this one listens for the user's interrupt. After one the work
/// goes on unheard, on an emulator that no later call uses.
pub fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let (sender, receiver) = channel();
    let receiver = Mutex::new(receiver);
    std::thread::spawn(move || drop(sender.send(work())));
    loop {
        match py.detach(|| receiver.lock().unwrap_or_else(|e| e.into_inner()).recv_timeout(POLL)) {
            Ok(done) => return Ok(done),
            Err(RecvTimeoutError::Timeout) => {
                py.check_signals().inspect_err(|_| devices::forget_emulator())?
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(DeviceError::new_err("a thread of this library panicked"));
            }
        }
    }
}
