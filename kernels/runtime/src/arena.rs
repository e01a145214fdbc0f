//! The memory contract: the rules that every launch must obey, on both backends.
//!
//! A [`DeviceArena`] owns the buffers of one operator call. Around the call it
//! 1. surrounds every buffer with bands of known bytes (and, on the emulator, guard pages),
//! 2. fills outputs and workspaces with poison, so that missing writes and reads before writes
//!    become visible,
//! 3. checks afterwards that no byte changed outside of what the call may write: bands, inputs, and
//!    the gaps of strided outputs.
//!
//! A tensor may have strides that leave gaps of megabytes or more. Then only its rows and a band of
//! poison on both sides of each are filled and read back ([`Backend::reserve`]). On the emulator
//! every other byte of such a buffer is inaccessible.

use std::ops::Range;
use std::slice::from_ref;

use serde::{Deserialize, Serialize};

use super::backend::{Allocation, Backend, Placement, Reservation};
use super::device::Device;
use super::error::{Result, RuntimeError};
use super::tensor::{DType, HostTensor, TensorView, dense_strides};

/// A buffer above this size, bytes, may be sparse.
const SPARSE_BYTES: usize = 4 << 20;

/// A buffer is sparse when it has more than this many times the bytes of its tensor.
const SPARSE_RATIO: usize = 8;

/// Bytes of poison on each side of every contiguous piece of a tensor in a sparse buffer.
const BAND: i64 = 512;

/// The granularity of memory in bytes, even if fewer bytes are touched.
const PAGE: usize = 4096;

/// Most elements of a buffer: their bytes fit 64 bits, signed or not.
const MOST_ELEMENTS: usize = 1 << 60;

/// What the call may do with a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Read only.
    Input,
    /// Read and overwritten, as declared.
    InPlace,
    /// Written completely.
    Output,
    /// Scratch memory: any use, undefined afterwards.
    Workspace,
}

/// The byte that fills bands and poison, and the end of a buffer that touches a guard page. Running
/// a case under two contracts shows reads of unwritten memory, and accesses beyond either end.
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

/// A byte that changed although the call may not write it.
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
    /// An input, or the part of a shared buffer that is not an output.
    Input,
    /// The gap between rows of a strided output.
    Gap,
}

struct Buffer {
    name: String,
    allocation: Allocation,
    /// What is filled before the call and inspected after it.
    touched: Touched,
    role: Role,
    /// Contents of the touched bytes before the call; `None` means poison.
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

impl Buffer {
    fn addresses(&self) -> Range<u64> {
        self.allocation.address..self.allocation.address + self.allocation.bytes as u64
    }

    /// Uploads a tensor into its view. The rest of the buffer is poison.
    fn hold(
        &mut self,
        view: &TensorView,
        tensor: &HostTensor,
        poison: u8,
        backend: &dyn Backend,
    ) -> Result<()> {
        let mut bytes = vec![poison; self.touched.bytes()];
        let (offsets, piece) = view.pieces();
        for (offset, source) in offsets.iter().zip(tensor.bytes.chunks(piece.max(1))) {
            let at = self.touched.locate(view.address + *offset as u64, piece);
            bytes[at.ok_or_else(|| untouched(view))?].copy_from_slice(source);
        }
        for part in &self.touched.parts {
            backend.upload(part.address, &bytes[part.at.clone()])?;
        }
        self.initial = Some(bytes);
        Ok(())
    }

    /// Whether something between the buffer's first and last byte is untouched.
    fn is_sparse(&self) -> bool {
        self.touched.locate(self.allocation.address, self.allocation.bytes).is_none()
    }
}

/// Parts of a buffer, ascending and disjoint, and the bytes of all of them one after the other.
struct Touched {
    parts: Vec<Part>,
}

struct Part {
    address: u64,
    /// The position of its bytes among those of all parts.
    at: Range<usize>,
}

impl Part {
    /// The parts before, in and after these addresses.
    fn split(&self, addresses: &Range<u64>) -> [Self; 3] {
        let end = self.address + self.at.len() as u64;
        let (first, last) =
            (addresses.start.clamp(self.address, end), addresses.end.clamp(self.address, end));
        [self.address..first, first..last, last..end].map(|range| {
            let start = self.at.start + (range.start - self.address) as usize;
            Self { address: range.start, at: start..start + (range.end - range.start) as usize }
        })
    }
}

impl Touched {
    fn new(ranges: &[Range<u64>]) -> Self {
        let mut bytes = 0;
        let part = |range: &Range<u64>| {
            let at = bytes..bytes + (range.end - range.start) as usize;
            bytes = at.end;
            Part { address: range.start, at }
        };
        Self { parts: ranges.iter().map(part).collect() }
    }

    /// Bytes of all parts.
    fn bytes(&self) -> usize {
        self.parts.last().map_or(0, |part| part.at.end)
    }

    /// The position of `bytes` bytes from `address`, if all of them are in one part.
    fn locate(&self, address: u64, bytes: usize) -> Option<Range<usize>> {
        let after = self.parts.partition_point(|part| part.address <= address);
        let part = self.parts.get(after.checked_sub(1)?)?;
        let start = part.at.start + (address - part.address) as usize;
        (start + bytes <= part.at.end).then_some(start..start + bytes)
    }

    /// Reads the parts that overlap `addresses`; the bytes of the others are zeros.
    fn download(&self, backend: &dyn Backend, addresses: &Range<u64>) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.bytes()];
        for part in &self.parts {
            if part.address < addresses.end && addresses.start < part.address + part.at.len() as u64
            {
                backend.download(part.address, &mut bytes[part.at.clone()])?;
            }
        }
        Ok(bytes)
    }
}

/// The memory layout of a tensor in its buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Elements before the first one of the view.
    pub offset: usize,
    /// Strides in elements, one for each axis of the tensor.
    pub strides: Vec<i64>,
    /// Elements of the whole buffer.
    pub elements: usize,
}

impl Layout {
    /// A tensor of `shape` whose axes have the memory order `order`, outermost first: a permutation
    /// of `0..shape.len()`. After each run along `axis` come `gaps[axis]` unused elements, which
    /// increase the stride of the axis before it in `order`. The gap of the outermost axis never
    /// exists, since nothing follows the tensor's last element; an access after that is outside of
    /// the buffer. The innermost axis has stride 1. Without gaps and in order this is
    /// [`Layout::dense`], with a gap after the last axis [`Layout::padded`].
    ///
    /// Queries `[tokens, heads, head_dim]`, heads first, 2^32 elements from each head to the next:
    /// ```
    /// # use dsv4_runtime::arena::Layout;
    /// let layout = Layout::of(&[3, 5, 64], &[1, 0, 2], &[(1 << 32) - 3 * 64, 0, 0]).unwrap();
    /// assert_eq!(layout.strides, [64, 1 << 32, 1]);
    /// assert_eq!(layout.elements, 4 * (1 << 32) + 3 * 64);
    /// ```
    ///
    /// # Errors
    /// [`RuntimeError::Argument`] when `order` is not a permutation of the axes, `gaps` has another
    /// length than `shape`, or the buffer would have more than 2^60 elements.
    pub fn of(shape: &[usize], order: &[usize], gaps: &[usize]) -> Result<Self> {
        let refused = |argument, reason| RuntimeError::argument("Layout::of", argument, reason);
        let mut axes = order.to_vec();
        axes.sort_unstable();
        if !axes.into_iter().eq(0..shape.len()) {
            let reason = format!(
                "{order:?} is no permutation of the {} axes of shape {shape:?}",
                shape.len()
            );
            return Err(refused("order", reason));
        }
        if gaps.len() != shape.len() {
            return Err(refused(
                "gaps",
                format!("{gaps:?} are not as many as the axes of shape {shape:?}"),
            ));
        }
        let too_large = || {
            refused("gaps", format!("{gaps:?} and shape {shape:?} make more than 2^60 elements"))
        };
        let mut strides = vec![1; shape.len()];
        // Elements from one step of the current axis to the next, and from the buffer's first to
        // its last so far.
        let (mut step, mut elements) = (Some(1usize), 1usize);
        for &axis in order.iter().rev() {
            let stride = step.filter(|&stride| stride <= MOST_ELEMENTS).ok_or_else(too_large)?;
            strides[axis] = stride as i64;
            let behind_first = shape[axis].saturating_sub(1).checked_mul(stride);
            elements =
                behind_first.and_then(|run| run.checked_add(elements)).ok_or_else(too_large)?;
            let run = shape[axis].checked_mul(stride).and_then(|run| run.checked_add(gaps[axis]));
            // An empty run without a gap: as in `dense_strides`.
            step = if run == Some(0) { Some(stride) } else { run };
        }
        if shape.contains(&0) {
            elements = 0;
        }
        if elements > MOST_ELEMENTS {
            return Err(too_large());
        }
        Ok(Self { offset: 0, strides, elements })
    }

    /// Upper bound on the bytes of a buffer of this layout, with a tensor of `shape`, that are
    /// filled, inspected and read back. That is the whole buffer, or for a sparse one the blocks
    /// that are more than a page apart, with the bands next to them, in whole pages.
    pub fn touched_bytes(&self, shape: &[usize], dtype: DType) -> u128 {
        self.memory_bytes(shape, dtype, PAGE)
    }

    /// The same where memory has a granularity of `piece` bytes.
    pub fn memory_bytes(&self, shape: &[usize], dtype: DType, piece: usize) -> u128 {
        let wide = |count: usize| count as u128 * dtype.size() as u128;
        let elements =
            shape.iter().fold(1u128, |product, &extent| product.saturating_mul(extent as u128));
        let (buffer, tensor) = (wide(self.elements), elements.saturating_mul(dtype.size() as u128));
        if buffer <= SPARSE_BYTES as u128 || buffer / SPARSE_RATIO as u128 <= tensor {
            return buffer;
        }
        // Steps along some axes lead from one block to another, and along the others through a
        // block.
        let axes = || {
            shape
                .iter()
                .zip(&self.strides)
                .map(|(&extent, &stride)| (extent as u128, stride.unsigned_abs()))
        };
        let is_apart = |stride: u64| u128::from(stride) * dtype.size() as u128 > piece as u128;
        let blocks = axes().filter(|&(_, stride)| is_apart(stride)).map(|(extent, _)| extent);
        let of_block = axes().filter(|&(_, stride)| !is_apart(stride));
        let span =
            of_block.fold(1u128, |span, (extent, stride)| span + (extent - 1) * u128::from(stride));
        let bytes = span * dtype.size() as u128 + 2 * (BAND as u128 + piece as u128);
        blocks.fold(bytes, u128::saturating_mul).min(buffer)
    }

    /// Rejects a layout that does not describe a tensor of `shape` within the buffer.
    fn check(&self, name: &str, shape: &[usize]) -> Result<()> {
        let refused = |reason| {
            Err(RuntimeError::argument("DeviceArena", "layout", format!("`{name}`: {reason}")))
        };
        let strides = &self.strides;
        if strides.len() != shape.len() || strides.iter().any(|&stride| stride < 0) {
            return refused(format!(
                "strides {strides:?} do not fit shape {shape:?}: one for each axis, none negative"
            ));
        }
        if self.elements > MOST_ELEMENTS {
            return refused(format!("{} elements, more than 2^60", self.elements));
        }
        if shape.contains(&0) {
            return Ok(());
        }
        let along = |(&extent, &stride): (&usize, &i64)| (extent - 1).checked_mul(stride as usize);
        let last = shape
            .iter()
            .zip(strides)
            .try_fold(self.offset, |sum, axis| sum.checked_add(along(axis)?));
        match last {
            Some(last) if last < self.elements => Ok(()),
            _ => refused(format!("{self:?} with shape {shape:?} reaches beyond its buffer")),
        }
    }

    /// Dense, row-major, nothing else in the buffer.
    pub fn dense(shape: &[usize]) -> Self {
        Self { offset: 0, strides: dense_strides(shape), elements: shape.iter().product() }
    }

    /// Each row along the last axis is followed by `padding` unused elements.
    pub fn padded(shape: &[usize], padding: usize) -> Self {
        let Some((&last, outer)) = shape.split_last() else { return Self::dense(shape) };
        let mut wide = outer.to_vec();
        wide.push(last + padding);
        let rows: usize = outer.iter().product();
        // No padding after the last row: an access there is outside the buffer.
        let elements = if rows == 0 { 0 } else { rows * (last + padding) - padding };
        Self { offset: 0, strides: dense_strides(&wide), elements }
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

    /// The contract.
    pub fn contract(&self) -> Contract {
        self.contract
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
    /// A layout that does not fit the tensor; [`RuntimeError::TooLarge`] for one that needs more
    /// memory than the device can reserve; errors of the device.
    pub fn upload(
        &mut self,
        name: &str,
        tensor: &HostTensor,
        layout: &Layout,
        role: Role,
    ) -> Result<TensorView> {
        let tensor = &*self.device.exchanged(name, tensor)?;
        let view = self.place(name, tensor.dtype, &tensor.shape, layout, role)?;
        let backend = self.device.backend();
        if let Some(buffer) = self.buffers.last_mut() {
            buffer.hold(&view, tensor, self.contract.poison, backend)?;
        }
        Ok(view)
    }

    /// Replaces the values of an uploaded tensor, in the same memory; the rest of its buffer is
    /// poison again. The next [`DeviceArena::run`] starts with these.
    ///
    /// # Errors
    /// A tensor of another type or shape, and a view that was not uploaded; errors of the device.
    pub fn rewrite(&mut self, view: &TensorView, tensor: &HostTensor) -> Result<()> {
        let refused =
            |reason| Err(RuntimeError::argument("DeviceArena::rewrite", "tensor", reason));
        if (tensor.dtype, &tensor.shape) != (view.dtype, &view.shape) {
            return refused(format!(
                "{tensor:?} in the place of {} {:?} `{}`",
                view.dtype, view.shape, view.name
            ));
        }
        if view.elements() == 0 {
            return Ok(());
        }
        let (poison, backend) = (self.contract.poison, self.device.backend());
        let uploaded = |buffer: &&mut Buffer| {
            buffer.initial.is_some() && buffer.addresses().contains(&view.address)
        };
        match self.buffers.iter_mut().find(uploaded) {
            Some(buffer) => buffer.hold(view, tensor, poison, backend),
            None => refused(format!("`{}` was not uploaded here", view.name)),
        }
    }

    /// Restores the poison of everything that was not uploaded, as before the first call.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn poison_again(&self) -> Result<()> {
        self.buffers
            .iter()
            .filter(|buffer| buffer.initial.is_none())
            .try_for_each(|buffer| self.poison(buffer))
    }

    /// Bytes that changed since everything was uploaded and poisoned, if no call has used this
    /// arena since: stray writes of a call with other buffers.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn stray_writes(&self) -> Result<Vec<Violation>> {
        self.device.backend().synchronize()?;
        let (mut violations, poison) = (Vec::new(), self.contract.poison);
        for buffer in &self.buffers {
            let now = buffer.touched.download(self.device.backend(), &(0..u64::MAX))?;
            // In one comparison: buffers are large, and almost none has changed.
            let as_before = match &buffer.initial {
                Some(initial) => now == *initial,
                None => now == vec![poison; now.len()],
            };
            if as_before {
                continue;
            }
            let before = |at: usize| buffer.initial.as_ref().map_or(poison, |initial| initial[at]);
            let from_start = |part: &Part, at| {
                (part.address + at as u64) as i64 - buffer.allocation.address as i64
            };
            let changed = buffer.touched.parts.iter().flat_map(|part| {
                let bytes = part.at.clone().enumerate().filter(|&(_, at)| now[at] != before(at));
                bytes.map(move |(offset, _)| from_start(part, offset))
            });
            report(&mut violations, buffer, ViolationKind::Guard, changed);
        }
        Ok(violations)
    }

    /// Allocates an output or a workspace, filled with poison.
    ///
    /// # Errors
    /// As [`DeviceArena::upload`].
    pub fn allocate(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[usize],
        layout: &Layout,
        role: Role,
    ) -> Result<TensorView> {
        let view = self.place(name, dtype, shape, layout, role)?;
        self.buffers.last().map_or(Ok(()), |buffer| self.poison(buffer))?;
        Ok(view)
    }

    /// A dense output.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn output(&mut self, name: &str, dtype: DType, shape: &[usize]) -> Result<TensorView> {
        self.allocate(name, dtype, shape, &Layout::dense(shape), Role::Output)
    }

    /// A workspace of `bytes` bytes.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn workspace(&mut self, name: &str, bytes: usize) -> Result<TensorView> {
        self.allocate(name, DType::U8, &[bytes], &Layout::dense(&[bytes]), Role::Workspace)
    }

    /// Declares that the call also writes `view`, which is in the buffer of an earlier tensor. In a
    /// sparse buffer only that tensor's own rows and the bands next to them exist.
    pub fn also_writes(&mut self, view: &TensorView) {
        if let Some(buffer) =
            self.buffers.iter_mut().find(|buffer| buffer.addresses().contains(&view.address))
        {
            buffer.writable.push(view.clone());
        }
    }

    /// A buffer with undefined contents, appended as the last one.
    fn place(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[usize],
        layout: &Layout,
        role: Role,
    ) -> Result<TensorView> {
        layout.check(name, shape)?;
        let bytes = layout.elements * dtype.size();
        let offset = (layout.offset * dtype.size()) as u64;
        let (strides, shape) = (layout.strides.clone(), shape.to_vec());
        let mut view = TensorView { name: name.to_owned(), address: offset, dtype, shape, strides };
        let (backend, placement) = (self.device.backend(), self.contract.placement);
        let (allocation, touched) = if is_sparse(bytes, view.elements() * dtype.size()) {
            let Reservation { allocation, touched } =
                backend.reserve(name, bytes, &banded_pieces(&view), placement)?;
            (allocation, Touched::new(&touched))
        } else {
            let allocation = backend.allocate(name, bytes, placement)?;
            let start = allocation.address - allocation.front_band as u64;
            let end = allocation.address + (bytes + allocation.back_band) as u64;
            (allocation, Touched::new(from_ref(&(start..end))))
        };
        view.address = allocation.address + offset;
        let writable = if role == Role::Input { vec![] } else { vec![view.clone()] };
        self.buffers.push(Buffer {
            name: name.to_owned(),
            allocation,
            touched,
            role,
            initial: None,
            writable,
        });
        Ok(view)
    }

    fn poison(&self, buffer: &Buffer) -> Result<()> {
        let (backend, poison) = (self.device.backend(), self.contract.poison);
        buffer
            .touched
            .parts
            .iter()
            .try_for_each(|part| backend.fill(part.address, poison, part.at.len()))
    }

    /// Runs the call and waits for it; returns every forbidden write. A device that only records
    /// ([`Device::recording`]) runs nothing.
    ///
    /// # Errors
    /// Errors of `call` and of the device.
    /// Those of `call` and of the device.
    pub fn run(&self, call: impl FnOnce(&Device) -> Result<()>) -> Result<Vec<Violation>> {
        if self.device.records() {
            return Ok(Vec::new());
        }
        for buffer in self.buffers.iter().filter(|buffer| buffer.writable.is_empty()) {
            if buffer.role == Role::Input {
                self.device.backend().seal(&buffer.allocation)?;
            }
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
        let now = buffer.touched.download(self.device.backend(), &(0..u64::MAX))?;
        let initial = buffer.initial.as_deref();
        if initial == Some(now.as_slice()) {
            return Ok(());
        }
        let poison = self.contract.poison;
        let body = buffer.addresses();
        let (mut bands, mut inside) = (Vec::new(), Vec::new());
        for part in &buffer.touched.parts {
            let [front, middle, back] = part.split(&body);
            bands.extend([front, back]);
            inside.push(middle);
        }
        let from_start = |part: &Part, at: usize| {
            (part.address + (at - part.at.start) as u64) as i64 - body.start as i64
        };
        let outside = bands.iter().flat_map(|part| {
            part.at.clone().filter(|&at| now[at] != poison).map(|at| from_start(part, at))
        });
        report(violations, buffer, ViolationKind::Guard, outside);
        if buffer.role == Role::Workspace
            || buffer.writable.iter().any(|view| covers_all(view, buffer.allocation.bytes))
        {
            return Ok(());
        }
        let writable = writable_bytes(buffer);
        let changed = inside.iter().flat_map(|part| {
            let before = initial.map(|bytes| &bytes[part.at.clone()]);
            let bytes = now[part.at.clone()].iter().zip(&writable[part.at.clone()]).enumerate();
            let changed = bytes.filter(move |(i, (now, writable))| {
                !**writable && **now != before.map_or(poison, |b| b[*i])
            });
            changed.map(|(i, _)| from_start(part, part.at.start + i))
        });
        let kind = if buffer.initial.is_some() { ViolationKind::Input } else { ViolationKind::Gap };
        report(violations, buffer, kind, changed);
        Ok(())
    }

    /// Reads a tensor back, densely.
    ///
    /// # Errors
    /// A view in untouched parts of a sparse buffer; errors of the device.
    pub fn download(&self, view: &TensorView) -> Result<HostTensor> {
        let (backend, span) = (self.device.backend(), view.span());
        let inside = |buffer: &&Buffer| buffer.addresses().contains(&view.address);
        let bytes = match self.buffers.iter().find(inside) {
            Some(buffer) if buffer.is_sparse() => gather(view, &buffer.touched, backend)?,
            _ if view.is_dense() => {
                let mut bytes = vec![0; (span.1 - span.0) as usize];
                backend.download(span.0, &mut bytes)?;
                bytes
            }
            _ => gather(view, &Touched::new(from_ref(&(span.0..span.1))), backend)?,
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

/// Whether a buffer is much larger than its tensor, so that only the tensor's own parts are
/// touched.
fn is_sparse(buffer_bytes: usize, tensor_bytes: usize) -> bool {
    buffer_bytes > SPARSE_BYTES && buffer_bytes / SPARSE_RATIO > tensor_bytes
}

/// The contiguous pieces of a view whose address is its offset from the buffer's first byte,
/// ascending, each with a band on both sides; adjacent ones are merged.
fn banded_pieces(view: &TensorView) -> Vec<Range<i64>> {
    let (mut offsets, piece) = view.in_memory_order().pieces();
    // Ascending already, unless strides make elements share memory.
    offsets.sort_unstable();
    let mut joined: Vec<Range<i64>> = Vec::new();
    for offset in offsets {
        let start = (view.address as usize + offset) as i64;
        let banded = start - BAND..start + piece as i64 + BAND;
        match joined.last_mut() {
            Some(last) if banded.start <= last.end => last.end = last.end.max(banded.end),
            _ => joined.push(banded),
        }
    }
    joined
}

/// The view's elements, row-major, copied from the touched bytes that hold them.
fn gather(view: &TensorView, touched: &Touched, backend: &dyn Backend) -> Result<Vec<u8>> {
    let span = view.span();
    let raw = touched.download(backend, &(span.0..span.1))?;
    let (offsets, piece) = view.pieces();
    let mut bytes = Vec::with_capacity(offsets.len() * piece);
    for offset in offsets {
        let at =
            touched.locate(view.address + offset as u64, piece).ok_or_else(|| untouched(view))?;
        bytes.extend_from_slice(&raw[at]);
    }
    Ok(bytes)
}

fn untouched(view: &TensorView) -> RuntimeError {
    let reason = format!("`{}` does not lie within the touched parts of its buffer", view.name);
    RuntimeError::argument("DeviceArena", "view", reason)
}

/// Whether the view's elements, in any order, fill the whole buffer.
fn covers_all(view: &TensorView, bytes: usize) -> bool {
    view.elements() * view.dtype.size() == bytes && view.in_memory_order().is_dense()
}

/// For each touched byte of the buffer, whether a writable view covers it.
fn writable_bytes(buffer: &Buffer) -> Vec<bool> {
    let mut mask = vec![false; buffer.touched.bytes()];
    for view in &buffer.writable {
        let (offsets, piece) = view.in_memory_order().pieces();
        for offset in offsets {
            if let Some(at) = buffer.touched.locate(view.address + offset as u64, piece) {
                mask[at].fill(true);
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Every list of `axes` of these values.
    fn lists(values: &[usize], axes: usize) -> Vec<Vec<usize>> {
        (0..axes).fold(vec![vec![]], |lists, _| {
            lists
                .iter()
                .flat_map(|list| values.iter().map(|&value| [list.as_slice(), &[value]].concat()))
                .collect()
        })
    }

    /// Every shape of up to three axes of 1 to 3 elements, with every order of its axes and gaps
    /// of 0 or 2 elements.
    fn small_layouts() -> impl Iterator<Item = (Vec<usize>, Vec<usize>, Vec<usize>)> {
        (0..=3).flat_map(|axes| {
            let all: Vec<usize> = (0..axes).collect();
            let orders = lists(&all, axes)
                .into_iter()
                .filter(move |order| all.iter().all(|axis| order.contains(axis)));
            orders.flat_map(move |order| {
                let gaps = move |shape: Vec<usize>| {
                    lists(&[0, 2], axes).into_iter().map(move |g| (shape.clone(), g))
                };
                let drawn = lists(&[1, 2, 3], axes).into_iter().flat_map(gaps);
                drawn.map(move |(shape, gaps)| (shape, order.clone(), gaps))
            })
        })
    }

    #[test]
    fn elements_of_any_layout_are_apart_and_the_last_one_ends_the_buffer() {
        let mut layouts = 0;
        for (shape, order, gaps) in small_layouts() {
            layouts += 1;
            let layout = Layout::of(&shape, &order, &gaps).unwrap();
            let mut offsets = vec![0];
            for (&extent, &stride) in shape.iter().zip(&layout.strides) {
                offsets = offsets
                    .iter()
                    .flat_map(|at| (0..extent).map(move |i| at + i * stride as usize))
                    .collect();
            }
            offsets.sort_unstable();
            let what = format!("{shape:?} {order:?} {gaps:?}: {offsets:?}");
            assert_eq!(offsets.last(), Some(&(layout.elements - 1)), "{what}");
            assert!(offsets.windows(2).all(|pair| pair[0] < pair[1]), "{what}");
            assert!(layout.check("x", &shape).is_ok(), "{what}");
            // Each gap is as wide as requested, except the outermost axis': nothing follows it.
            for pair in order.windows(2) {
                let run = shape[pair[1]] as i64 * layout.strides[pair[1]];
                assert_eq!(layout.strides[pair[0]] - run, gaps[pair[1]] as i64, "{what}");
            }
        }
        assert_eq!(layouts, 1 + 6 + 2 * 36 + 6 * 216);
    }

    #[test]
    fn dense_and_padded_layouts_are_special_cases() {
        for shape in [vec![], vec![7], vec![2, 3, 4], vec![1, 1, 5], vec![2, 0, 4], vec![0]] {
            let order: Vec<usize> = (0..shape.len()).collect();
            let mut gaps = vec![0; shape.len()];
            assert_eq!(Layout::of(&shape, &order, &gaps).unwrap(), Layout::dense(&shape));
            if let Some(last) = gaps.last_mut() {
                *last = 3;
            }
            assert_eq!(Layout::of(&shape, &order, &gaps).unwrap(), Layout::padded(&shape, 3));
        }
    }

    fn refusal<T: std::fmt::Debug>(result: Result<T>) -> (&'static str, String) {
        match result {
            Err(RuntimeError::Argument { argument, reason, .. }) => (argument, reason),
            other => panic!("expected a refusal, not {other:?}"),
        }
    }

    #[test]
    fn a_layout_that_is_none_is_refused_with_its_argument_and_value() {
        for order in [&[0, 0][..], &[0], &[0, 2], &[0, 1, 2]] {
            let (argument, reason) = refusal(Layout::of(&[2, 3], order, &[0, 0]));
            assert!(argument == "order" && reason.contains(&format!("{order:?}")), "{reason}");
        }
        let (argument, reason) = refusal(Layout::of(&[2, 3], &[0, 1], &[5]));
        assert!(argument == "gaps" && reason.contains("[5]"), "{reason}");
        let most = 1 << 60;
        for (shape, gaps) in [
            ([2, 3], [0, usize::MAX]),
            ([2, 3], [0, most]),
            ([usize::MAX, 3], [0, 0]),
            ([usize::MAX, 0], [0, 2]),
            ([3, usize::MAX], [0, 9]),
            ([1 << 32, 1 << 31], [0, 0]),
            ([2, 1 << 59], [0, 1]),
        ] {
            let (argument, reason) = refusal(Layout::of(&shape, &[0, 1], &gaps));
            assert!(argument == "gaps" && reason.contains(&format!("{gaps:?}")), "{reason}");
        }
        assert_eq!(Layout::of(&[2, 1 << 59], &[0, 1], &[usize::MAX, 0]).unwrap().elements, most);
    }

    #[test]
    fn a_layout_is_held_against_its_tensor_before_anything_is_placed() {
        let layout =
            |strides: &[i64], elements| Layout { offset: 3, strides: strides.to_vec(), elements };
        assert!(layout(&[4, 1], 3 + 4 + 3).check("x", &[2, 3]).is_ok());
        assert!(layout(&[4, 1], 0).check("x", &[2, 0]).is_ok());
        for wrong in [
            layout(&[4, 1], 3 + 4 + 2),
            layout(&[4], 100),
            layout(&[-4, 1], 100),
            layout(&[i64::MAX, i64::MAX], 100),
            layout(&[4, 1], usize::MAX),
        ] {
            let (argument, reason) = refusal(wrong.check("x", &[2, 3]));
            assert!(argument == "layout" && reason.contains("`x`"), "{reason}");
        }
    }

    #[test]
    fn a_buffer_is_sparse_when_it_is_large_and_nearly_empty() {
        assert!(!is_sparse(SPARSE_BYTES, 0));
        assert!(is_sparse(SPARSE_BYTES + 1, 16));
        assert!(!is_sparse(8 << 30, 1 << 30));
        assert!(is_sparse((8 << 30) + 8, 1 << 30));
    }
}
