//! Activations of a model on a device, by name.

use std::collections::BTreeMap;

use dsv4_runtime::{DType, Device, Result, TensorView};

use crate::model::memory::Memory;

/// Buffers that grow to the largest step so far and then keep their addresses. A buffer that grows
/// gets new memory; the old one is kept, since launches in flight may use it.
pub(super) struct Buffers<'d> {
    memory: Memory<'d>,
    held: BTreeMap<&'static str, (u64, usize)>,
}

impl<'d> Buffers<'d> {
    pub fn new(device: &'d Device) -> Self {
        Self { memory: Memory::new(device), held: BTreeMap::new() }
    }

    pub fn device(&self) -> &'d Device {
        self.memory.device()
    }

    /// The first bytes of a buffer as a dense tensor. Its contents are those of the last use.
    pub fn view(
        &mut self,
        name: &'static str,
        dtype: DType,
        shape: &[usize],
    ) -> Result<TensorView> {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        let address = match self.held.get(name) {
            Some(&(address, held)) if held >= bytes => address,
            _ => {
                let address = self.memory.tensor(name, DType::U8, &[bytes.max(16)])?.address;
                self.held.insert(name, (address, bytes));
                address
            }
        };
        Ok(TensorView::dense(name, address, dtype, shape))
    }

    /// Scratch memory of at least that many bytes, for one launch at a time.
    pub fn workspace(&mut self, bytes: usize) -> Result<TensorView> {
        self.view("workspace", DType::U8, &[bytes.max(16)])
    }

    /// A buffer with these numbers.
    pub fn upload(
        &mut self,
        name: &'static str,
        shape: &[usize],
        numbers: &[i32],
    ) -> Result<TensorView> {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
        self.upload_bytes(name, DType::I32, shape, &bytes)
    }

    /// A buffer with these bytes.
    pub fn upload_bytes(
        &mut self,
        name: &'static str,
        dtype: DType,
        shape: &[usize],
        bytes: &[u8],
    ) -> Result<TensorView> {
        let view = self.view(name, dtype, shape)?;
        self.device().backend().upload(view.address, bytes)?;
        Ok(view)
    }
}
