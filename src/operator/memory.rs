//! The tensors of a case in a device's memory, placed as their layouts and aliasing say.

use dsv4_kernels::runtime::arena::{Layout, Violation, ViolationKind};
use dsv4_kernels::runtime::{Contract, Device, DeviceArena, HostTensor, Role, RuntimeError, TensorView};

use super::declaration::{Specs, TensorSpec};
use super::declared::{Views, layout_of, role};
use super::layouts::Layouts;
use super::tensors::Tensors;
use crate::operators::Aliasing;

/// Tensors on a device, and the arena that owns them.
pub(super) struct Placed<'d> {
    arena: DeviceArena<'d>,
    views: Views,
    /// As the backward sees them: inputs that the forward overwrites are there a second time.
    backward: Views,
}

impl<'d> Placed<'d> {
    /// Uploads what is given and poisons what is to be written.
    pub fn place(
        device: &'d Device,
        contract: Contract,
        specs: &Specs,
        layouts: &Layouts,
        tensors: &Tensors,
    ) -> Result<Self, RuntimeError> {
        let mut placed =
            Self { arena: DeviceArena::new(device, contract), views: Views::default(), backward: Views::default() };
        let has_backward = specs.gradients().next().is_some();
        for spec in specs.present().filter(|spec| spec.is_stored()) {
            let Some((aliasing, of)) = spec.placed else {
                if placed.views.get(spec.name).is_none() {
                    let over = specs.present().find(|other| other.placed.is_some_and(|(_, of)| of == spec.name));
                    placed.one(spec, over, layouts, tensors, has_backward)?;
                }
                continue;
            };
            debug_assert!(
                placed.views.get(spec.name).is_some(),
                "`{}` ({aliasing:?} in `{of}`) comes later",
                spec.name
            );
        }
        Ok(placed)
    }

    /// Places a tensor, and the one that lies in its memory.
    fn one(
        &mut self,
        spec: &TensorSpec,
        over: Option<&TensorSpec>,
        layouts: &Layouts,
        tensors: &Tensors,
        has_backward: bool,
    ) -> Result<(), RuntimeError> {
        let layout = layout_of(spec, layouts).place(spec).map_err(|reason| refused(spec, reason))?;
        let Some((over, (aliasing, _))) = over.and_then(|over| Some((over, over.placed?))) else {
            let view = self.alone(spec, &layout, role(spec.part), tensors)?;
            self.put(spec.name, view);
            return Ok(());
        };
        if aliasing == Aliasing::InPlace {
            let both = self.alone(spec, &layout, Role::InPlace, tensors)?;
            self.put(spec.name, both.clone());
            // Under its own name: each is frozen, and compared, as it was when it was final.
            self.put(over.name, TensorView { name: over.name.into(), ..both });
            if let Some(host) = tensors.get(spec.name).filter(|_| has_backward) {
                // The backward reads the input that the forward read.
                let saved = self.arena.upload(&format!("saved_{}", spec.name), host, &layout, Role::Input)?;
                self.backward.put(spec.name, saved);
            }
        } else {
            let (layout, row) = interleaved(&spec.shape());
            let input = self.alone(spec, &layout, Role::Input, tensors)?;
            let address = input.address + (row * spec.dtype.size()) as u64;
            let output = TensorView { name: over.name.into(), address, ..input.clone() };
            self.arena.also_writes(&output);
            self.put(spec.name, input);
            self.put(over.name, output);
        }
        Ok(())
    }

    fn alone(
        &mut self,
        spec: &TensorSpec,
        layout: &Layout,
        role: Role,
        tensors: &Tensors,
    ) -> Result<TensorView, RuntimeError> {
        match tensors.get(spec.name) {
            Some(host) if spec.is_given() => self.arena.upload(spec.name, host, layout, role),
            _ => self.arena.allocate(spec.name, spec.dtype, &spec.shape(), layout, role),
        }
    }

    fn put(&mut self, name: &'static str, view: TensorView) {
        self.views.put(name, view.clone());
        self.backward.put(name, view);
    }

    /// Adds a workspace of `bytes` bytes.
    pub fn workspace(&mut self, name: &'static str, bytes: usize) -> Result<(), RuntimeError> {
        let view = self.arena.workspace(name, bytes)?;
        self.put(name, view);
        Ok(())
    }

    pub fn arena(&self) -> &DeviceArena<'d> {
        &self.arena
    }

    /// As the forward sees them.
    pub fn views(&self) -> &Views {
        &self.views
    }

    /// As the backward sees them.
    pub fn backward_views(&self) -> &Views {
        &self.backward
    }

    /// A tensor, read back densely.
    pub fn download(&self, name: &str) -> Result<HostTensor, RuntimeError> {
        self.arena.download(&self.views[name])
    }

    /// What was frozen and changed all the same.
    pub fn changed(&self, frozen: &[(TensorView, HostTensor)]) -> Result<Vec<Violation>, RuntimeError> {
        let mut violations = Vec::new();
        for (view, before) in frozen {
            let now = self.arena.download(view)?;
            let mut changed = (0..now.bytes.len()).filter(|&at| now.bytes[at] != before.bytes[at]);
            if let Some(first) = changed.next() {
                let (buffer, bytes) = (view.name.clone(), 1 + changed.count());
                violations.push(Violation { buffer, kind: ViolationKind::Input, bytes, first_offset: first as i64 });
            }
        }
        Ok(violations)
    }
}

fn refused(spec: &TensorSpec, reason: String) -> RuntimeError {
    RuntimeError::argument("layouts", spec.name, reason)
}

/// Two tensors of one shape in one buffer: row `r` of the first, then row `r` of the second.
fn interleaved(shape: &[usize]) -> (Layout, usize) {
    let row = shape.last().copied().unwrap_or(1);
    let rows: usize = shape[..shape.len() - 1].iter().product();
    let mut layout = Layout::padded(shape, row);
    layout.elements = 2 * rows * row;
    (layout, row)
}
