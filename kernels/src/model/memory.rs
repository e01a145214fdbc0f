//! Memory of a model on a device: weights, caches and activations.

use dsv4_runtime::backend::Allocation;
use dsv4_runtime::{DType, Device, Placement, Result, TensorView};

/// Buffers on a device; freed when dropped. No host copies are kept.
pub struct Memory<'d> {
    device: &'d Device,
    allocations: Vec<Allocation>,
}

impl<'d> Memory<'d> {
    /// No buffers yet.
    pub fn new(device: &'d Device) -> Self {
        Self { device, allocations: Vec::new() }
    }

    /// The device.
    pub fn device(&self) -> &'d Device {
        self.device
    }

    /// Bytes of all buffers.
    pub fn bytes(&self) -> usize {
        self.allocations.iter().map(|allocation| allocation.bytes).sum()
    }

    /// A dense tensor with undefined contents.
    ///
    /// # Errors
    /// A device without that much memory.
    pub fn tensor(&mut self, name: &str, dtype: DType, shape: &[usize]) -> Result<TensorView> {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        let allocation = self.device.backend().allocate(name, bytes, Placement::FlushBack)?;
        self.allocations.push(allocation);
        Ok(TensorView::dense(name, allocation.address, dtype, shape))
    }

    /// A dense tensor whose bytes are all `byte`.
    ///
    /// # Errors
    /// The device's.
    pub fn filled(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[usize],
        byte: u8,
    ) -> Result<TensorView> {
        let view = self.tensor(name, dtype, shape)?;
        let bytes = view.elements() * dtype.size();
        self.device.backend().fill(view.address, byte, bytes)?;
        Ok(view)
    }

    /// A dense tensor with these bytes, in the machine's byte order, that kernels only read.
    ///
    /// # Errors
    /// The device's.
    ///
    /// # Panics
    /// If the bytes are not those of the shape. That is a mistake of the caller.
    pub fn upload(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[usize],
        bytes: &[u8],
    ) -> Result<TensorView> {
        let view = self.tensor(name, dtype, shape)?;
        assert_eq!(bytes.len(), view.elements() * dtype.size(), "bytes do not fill `{name}`");
        self.device.backend().upload(view.address, bytes)?;
        self.seal_last()?;
        Ok(view)
    }

    /// Lets kernels only read the last buffer from now on.
    ///
    /// # Errors
    /// The device's.
    pub fn seal_last(&self) -> Result<()> {
        self.allocations.last().map_or(Ok(()), |allocation| self.device.backend().seal(allocation))
    }
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        for allocation in &self.allocations {
            self.device.backend().free(allocation);
        }
    }
}
