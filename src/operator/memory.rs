//! The tensors of a case in device memory, placed by their layouts and aliasing.

use dsv4_runtime::arena::{Layout, Violation, ViolationKind};
use dsv4_runtime::{
    Contract, Device, DeviceArena, HostTensor, Role, RuntimeError, TensorView, Views,
};

use super::declaration::{Specs, TensorSpec};
use super::inputs::role;
use super::layouts::Layouts;
use super::lines::layout_of;
use super::tensors::{Tensors, repeated_along};
use crate::operator::fields::Aliasing;

/// Tensors on a device, and the arena that owns them.
pub(super) struct Placed<'d> {
    arena: DeviceArena<'d>,
    views: Views,
    /// The tensors for the backward: inputs that the forward overwrites have a second copy.
    backward: Views,
    /// Whether a given tensor that is smaller than declared repeats from its start.
    repeats: bool,
}

impl<'d> Placed<'d> {
    /// Uploads the given tensors and poisons those to be written.
    pub fn place(
        device: &'d Device,
        contract: Contract,
        specs: &Specs,
        layouts: &Layouts,
        tensors: &Tensors,
    ) -> Result<Self, RuntimeError> {
        let (arena, [views, backward]) =
            (DeviceArena::new(device, contract), <[Views; 2]>::default());
        Self { arena, views, backward, repeats: false }.fill(specs, layouts, tensors)
    }

    /// As [`Self::place`], densely. Given tensors that are smaller than declared are repeated to
    /// the declared sizes.
    pub fn repeating(
        device: &'d Device,
        contract: Contract,
        specs: &Specs,
        tensors: &Tensors,
    ) -> Result<Self, RuntimeError> {
        let (arena, [views, backward]) =
            (DeviceArena::new(device, contract), <[Views; 2]>::default());
        Self { arena, views, backward, repeats: true }.fill(specs, &Layouts::new(), tensors)
    }

    fn fill(
        mut self,
        specs: &Specs,
        layouts: &Layouts,
        tensors: &Tensors,
    ) -> Result<Self, RuntimeError> {
        let placed = &mut self;
        let has_backward = specs.gradients().next().is_some();
        for spec in specs.present().filter(|spec| spec.is_stored()) {
            let Some((aliasing, of)) = spec.placed else {
                if placed.views.get(spec.name).is_none() {
                    let over = specs
                        .present()
                        .find(|other| other.placed.is_some_and(|(_, of)| of == spec.name));
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
        Ok(self)
    }

    /// Places a tensor, and the one that shares its memory.
    fn one(
        &mut self,
        spec: &TensorSpec,
        over: Option<&TensorSpec>,
        layouts: &Layouts,
        tensors: &Tensors,
        has_backward: bool,
    ) -> Result<(), RuntimeError> {
        let layout =
            layout_of(spec, layouts).place(spec).map_err(|reason| refused(spec, reason))?;
        let Some((over, (aliasing, _))) = over.and_then(|over| Some((over, over.placed?))) else {
            let view = self.alone(spec, &layout, role(spec.part), tensors)?;
            self.put(spec.name, view);
            return Ok(());
        };
        if aliasing == Aliasing::InPlace {
            let both = self.alone(spec, &layout, Role::InPlace, tensors)?;
            self.put(spec.name, both.clone());
            // Under its own name: each is frozen and compared as it was when final.
            self.put(over.name, TensorView { name: over.name.into(), ..both });
            if let Some(host) = tensors.get(spec.name).filter(|_| has_backward) {
                // The backward reads the input that the forward read.
                let saved =
                    self.upload(&format!("saved_{}", spec.name), host, spec, &layout, Role::Input)?;
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
            Some(host) if spec.is_given() => self.upload(spec.name, host, spec, layout, role),
            _ => self.arena.allocate(spec.name, spec.dtype, &spec.shape(), layout, role),
        }
    }

    /// Uploads a tensor. Repetition along the outermost axis of a dense tensor is copied within the
    /// device.
    fn upload(
        &mut self,
        name: &str,
        host: &HostTensor,
        spec: &TensorSpec,
        layout: &Layout,
        role: Role,
    ) -> Result<TensorView, RuntimeError> {
        let shape = spec.shape();
        if !self.repeats || host.shape == shape {
            return self.arena.upload(name, host, layout, role);
        }
        let dense = *layout == Layout::dense(&shape);
        let axes = usize::from(dense)..shape.len();
        let host = axes.fold(host.clone(), |host, at| repeated_along(&host, at, 0..shape[at]));
        if !dense || host.shape == shape {
            return self.arena.upload(name, &host, layout, role);
        }
        let view = self.arena.allocate(name, spec.dtype, &shape, layout, role)?;
        let (backend, total) = (self.arena.device().backend(), view.elements() * view.dtype.size());
        backend.upload(view.address, &host.bytes)?;
        // The copied part is whole repetitions until the last copy.
        let mut done = host.bytes.len();
        while (1..total).contains(&done) {
            let bytes = done.min(total - done);
            backend.copy(view.address + done as u64, view.address, bytes)?;
            done += bytes;
        }
        Ok(view)
    }

    /// Replaces the given tensors by others of the same types and sizes, also where the backward
    /// reads what the forward overwrites. All other memory stays as the last launches left it.
    pub fn rewrite(&mut self, specs: &Specs, tensors: &Tensors) -> Result<(), RuntimeError> {
        for spec in specs.present().filter(|spec| spec.is_given()) {
            let Some(host) = tensors.get(spec.name) else { continue };
            let (view, saved) = (&self.views[spec.name], &self.backward[spec.name]);
            self.arena.rewrite(view, host)?;
            if saved.address != view.address {
                self.arena.rewrite(saved, host)?;
            }
        }
        Ok(())
    }

    /// Replaces the view of this name, for forward and backward.
    pub fn put(&mut self, name: &'static str, view: TensorView) {
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

    /// The tensors for the forward.
    pub fn views(&self) -> &Views {
        &self.views
    }

    /// The tensors for the backward.
    pub fn backward_views(&self) -> &Views {
        &self.backward
    }

    /// What was uploaded for a given tensor.
    pub fn replacement(&self, name: &str) -> Option<&HostTensor> {
        self.arena.device().replacement(name)
    }

    /// A tensor, read back densely.
    pub fn download(&self, name: &str) -> Result<HostTensor, RuntimeError> {
        self.arena.download(&self.views[name])
    }

    /// Tensors that changed after they were frozen.
    pub fn changed(
        &self,
        frozen: &[(TensorView, HostTensor)],
    ) -> Result<Vec<Violation>, RuntimeError> {
        let mut violations = Vec::new();
        for (view, before) in frozen {
            let now = self.arena.download(view)?;
            let mut changed = (0..now.bytes.len()).filter(|&at| now.bytes[at] != before.bytes[at]);
            if let Some(first) = changed.next() {
                let (buffer, bytes) = (view.name.clone(), 1 + changed.count());
                violations.push(Violation {
                    buffer,
                    kind: ViolationKind::Input,
                    bytes,
                    first_offset: first as i64,
                });
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
