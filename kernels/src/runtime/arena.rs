//! The memory contract: what every launch is held to, on both backends.
//!
//! A [`DeviceArena`] owns the buffers of one operator call. Around the call it
//! 1. surrounds every buffer with bands of known bytes (and, on the emulator, guard pages),
//! 2. fills outputs and workspaces with poison, so that whatever is not written, or is read before it
//!    is written, shows,
//! 3. afterwards checks that no byte changed outside of what the call may write: bands, inputs, and
//!    the gaps of strided outputs.

use serde::{Deserialize, Serialize};

use super::backend::{Allocation, Placement};
use super::device::Device;
use super::error::Result;
use super::tensor::{DType, HostTensor, TensorView, dense_strides};

/// What the call may do with a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Read only.
    Input,
    /// Read and overwritten, as declared.
    InPlace,
    /// Written whole.
    Output,
    /// Scratch memory: any use, undefined afterwards.
    Workspace,
}

/// Which bytes fill bands and poison, and which end of a buffer touches a guard page. Running a case
/// under two contracts shows reads of memory that nobody wrote, and accesses on either side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contract {
    /// Fills outputs, workspaces and guard bands.
    pub poison: u8,
    /// Placement on the emulator.
    pub placement: Placement,
}

impl Contract {
    /// NaN in every floating-point type, -1 as an integer; overruns are caught.
    pub const NAN: Self = Self { poison: 0xff, placement: Placement::FlushBack };
    /// A large finite number (1.3e36 in bf16 and f32), a large integer; underruns are caught.
    pub const HUGE: Self = Self { poison: 0x7b, placement: Placement::FlushFront };
}

/// A byte that changed although nobody may write it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Violation {
    /// Buffer.
    pub buffer: String,
    /// What kind of byte.
    pub kind: ViolationKind,
    /// How many such bytes.
    pub bytes: usize,
    /// Offset of the first one from the buffer's first byte (negative in the front band).
    pub first_offset: i64,
}

/// Where a forbidden write went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ViolationKind {
    /// A guard band.
    Guard,
    /// An input, or the part of a shared buffer that is no output.
    Input,
    /// The gap between rows of a strided output.
    Gap,
}

struct Buffer {
    name: String,
    allocation: Allocation,
    role: Role,
    /// Contents before the call; `None` is poison.
    initial: Option<Vec<u8>>,
    /// Byte offset and view of everything that the call may write.
    writable: Vec<TensorView>,
}

/// Buffers of one operator call; freed when dropped.
pub struct DeviceArena<'d> {
    device: &'d Device,
    contract: Contract,
    buffers: Vec<Buffer>,
}

/// How a tensor lies in its buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Elements before the first one of the view.
    pub offset: usize,
    /// Strides in elements.
    pub strides: Vec<i64>,
    /// Elements of the whole buffer.
    pub elements: usize,
}

impl Layout {
    /// Dense, row-major, nothing else in the buffer.
    pub fn dense(shape: &[usize]) -> Self {
        Self { offset: 0, strides: dense_strides(shape), elements: shape.iter().product() }
    }

    /// Each row along the last axis followed by `padding` elements, which belong to nobody.
    pub fn padded(shape: &[usize], padding: usize) -> Self {
        let Some((&last, outer)) = shape.split_last() else { return Self::dense(shape) };
        let mut wide = outer.to_vec();
        wide.push(last + padding);
        let rows: usize = outer.iter().product();
        // No padding behind the last row: an access there is outside the buffer.
        let elements = if rows == 0 { 0 } else { rows * (last + padding) - padding };
        Self { offset: 0, strides: dense_strides(&wide), elements }
    }
}

impl Layout {
    /// Temporary.
    pub fn of(shape: &[usize], order: &[usize], gaps: &[usize]) -> std::result::Result<Self, String> {
        let mut strides = vec![0i64; shape.len()];
        let mut reach = 1usize;
        let mut last = 0usize;
        for &at in order.iter().rev() {
            strides[at] = reach as i64;
            last += reach * shape[at].saturating_sub(1);
            reach = reach * shape[at].max(1) + gaps[at];
        }
        let elements = if shape.contains(&0) { 0 } else { last + 1 };
        Ok(Self { offset: 0, strides, elements })
    }
}

impl<'d> DeviceArena<'d> {
    /// An empty arena under `contract`.
    pub fn new(device: &'d Device, contract: Contract) -> Self {
        Self { device, contract, buffers: Vec::new() }
    }

    /// The device.
    pub fn device(&self) -> &'d Device {
        self.device
    }

    /// Uploads a dense input.
    ///
    /// # Errors
    /// The device's.
    pub fn input(&mut self, name: &str, tensor: &HostTensor) -> Result<TensorView> {
        self.upload(name, tensor, &Layout::dense(&tensor.shape), Role::Input)
    }

    /// Uploads a tensor in a given layout; the rest of the buffer is poison.
    ///
    /// # Errors
    /// The device's.
    pub fn upload(&mut self, name: &str, tensor: &HostTensor, layout: &Layout, role: Role) -> Result<TensorView> {
        let size = tensor.dtype.size();
        let tensor = &*self.device.exchanged(name, tensor)?;
        let mut bytes = vec![self.contract.poison; layout.elements * size];
        let view = self.place(name, tensor.dtype, &tensor.shape, layout, role)?;
        let (offsets, piece) = view.pieces();
        for (offset, source) in offsets.iter().zip(tensor.bytes.chunks(piece.max(1))) {
            let at = layout.offset * size + offset;
            bytes[at..at + piece].copy_from_slice(source);
        }
        self.device.backend().upload(view.address - (layout.offset * size) as u64, &bytes)?;
        if let Some(buffer) = self.buffers.last_mut() {
            buffer.initial = Some(bytes);
        }
        Ok(view)
    }

    /// Allocates an output or a workspace, filled with poison.
    ///
    /// # Errors
    /// The device's.
    pub fn allocate(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[usize],
        layout: &Layout,
        role: Role,
    ) -> Result<TensorView> {
        self.place(name, dtype, shape, layout, role)
    }

    /// A dense output.
    ///
    /// # Errors
    /// The device's.
    pub fn output(&mut self, name: &str, dtype: DType, shape: &[usize]) -> Result<TensorView> {
        self.place(name, dtype, shape, &Layout::dense(shape), Role::Output)
    }

    /// A workspace of `bytes` bytes.
    ///
    /// # Errors
    /// The device's.
    pub fn workspace(&mut self, name: &str, bytes: usize) -> Result<TensorView> {
        self.place(name, DType::U8, &[bytes], &Layout::dense(&[bytes]), Role::Workspace)
    }

    /// Declares that the call also writes `view`, which lies in the buffer of an earlier tensor.
    pub fn also_writes(&mut self, view: &TensorView) {
        let inside = |b: &&mut Buffer| {
            let start = b.allocation.address;
            (start..start + b.allocation.bytes as u64).contains(&view.address)
        };
        if let Some(buffer) = self.buffers.iter_mut().find(inside) {
            buffer.writable.push(view.clone());
        }
    }

    fn place(&mut self, name: &str, dtype: DType, shape: &[usize], layout: &Layout, role: Role) -> Result<TensorView> {
        let backend = self.device.backend();
        let bytes = layout.elements * dtype.size();
        let allocation = backend.allocate(name, bytes, self.contract.placement)?;
        let start = allocation.address - allocation.front_band as u64;
        let view = TensorView {
            name: name.to_owned(),
            address: allocation.address + (layout.offset * dtype.size()) as u64,
            dtype,
            shape: shape.to_vec(),
            strides: layout.strides.clone(),
        };
        let writable = if role == Role::Input { vec![] } else { vec![view.clone()] };
        self.buffers.push(Buffer { name: name.to_owned(), allocation, role, initial: None, writable });
        backend.fill(start, self.contract.poison, allocation.front_band + bytes + allocation.back_band)?;
        Ok(view)
    }

    /// Runs the call and waits for it; returns every forbidden write. A device that only records
    /// ([`Device::recording`]) runs nothing.
    ///
    /// # Errors
    /// Those of `call` and of the device.
    pub fn run(&self, call: impl FnOnce(&Device) -> Result<()>) -> Result<Vec<Violation>> {
        if self.device.records() {
            return Ok(Vec::new());
        }
        call(self.device)?;
        self.device.backend().synchronize()?;
        let mut violations = Vec::new();
        for buffer in &self.buffers {
            self.inspect(buffer, &mut violations)?;
        }
        Ok(violations)
    }

    fn inspect(&self, buffer: &Buffer, violations: &mut Vec<Violation>) -> Result<()> {
        let allocation = &buffer.allocation;
        let mut now = vec![0; allocation.front_band + allocation.bytes + allocation.back_band];
        self.device.backend().download(allocation.address - allocation.front_band as u64, &mut now)?;
        let body = allocation.front_band..allocation.front_band + allocation.bytes;
        let poison = self.contract.poison;
        let outside = (0..body.start).chain(body.end..now.len()).filter(|&at| now[at] != poison);
        report(violations, buffer, ViolationKind::Guard, outside.map(|at| at as i64 - body.start as i64));
        if buffer.role == Role::Workspace {
            return Ok(());
        }
        let now = &now[body];
        match &buffer.initial {
            Some(before) if buffer.writable.is_empty() && now == before.as_slice() => return Ok(()),
            _ if buffer.writable.iter().any(|view| covers_all(view, allocation.bytes)) => return Ok(()),
            _ => {}
        }
        let writable = writable_bytes(buffer);
        let changed = (0..now.len()).filter(|&at| {
            let before = buffer.initial.as_ref().map_or(poison, |bytes| bytes[at]);
            now[at] != before && !writable[at]
        });
        let kind = if buffer.initial.is_some() { ViolationKind::Input } else { ViolationKind::Gap };
        report(violations, buffer, kind, changed.map(|at| at as i64));
        Ok(())
    }

    /// Reads a tensor back, densely.
    ///
    /// # Errors
    /// The device's.
    pub fn download(&self, view: &TensorView) -> Result<HostTensor> {
        let span = view.span();
        let mut raw = vec![0; (span.1 - span.0) as usize];
        self.device.backend().download(span.0, &mut raw)?;
        let bytes = if view.is_dense() {
            raw
        } else {
            let (offsets, piece) = view.pieces();
            offsets.iter().flat_map(|&at| raw[at..at + piece].iter().copied()).collect()
        };
        Ok(HostTensor { dtype: view.dtype, shape: view.shape.clone(), bytes })
    }
}

impl Drop for DeviceArena<'_> {
    fn drop(&mut self) {
        for buffer in &self.buffers {
            self.device.backend().free(&buffer.allocation);
        }
    }
}

fn covers_all(view: &TensorView, bytes: usize) -> bool {
    view.is_dense() && view.elements() * view.dtype.size() == bytes
}

/// For each byte of the buffer whether some writable view covers it.
fn writable_bytes(buffer: &Buffer) -> Vec<bool> {
    let mut mask = vec![false; buffer.allocation.bytes];
    for view in &buffer.writable {
        let start = (view.address - buffer.allocation.address) as usize;
        let (offsets, piece) = view.pieces();
        for offset in offsets {
            mask[start + offset..start + offset + piece].fill(true);
        }
    }
    mask
}

fn report(
    violations: &mut Vec<Violation>,
    buffer: &Buffer,
    kind: ViolationKind,
    mut offsets: impl Iterator<Item = i64>,
) {
    if let Some(first_offset) = offsets.next() {
        let bytes = 1 + offsets.count();
        violations.push(Violation { buffer: buffer.name.clone(), kind, bytes, first_offset });
    }
}
