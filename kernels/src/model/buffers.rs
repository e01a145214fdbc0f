//! Activations of a model on a device, by name.

use std::collections::BTreeMap;

use dsv4_runtime::{DType, Device, Result, TensorView};

use crate::model::memory::Memory;

/// Bytes at whose multiples each list begins.
const ALIGNMENT: usize = 16;

/// Buffers that grow to the largest step so far and then keep their addresses. A buffer that grows
/// gets new memory; the old one is kept, since launches in flight may use it.
pub(super) struct Buffers<'d> {
    memory: Memory<'d>,
    held: BTreeMap<&'static str, (u64, usize)>,
    allocated: u64,
}

impl<'d> Buffers<'d> {
    pub fn new(device: &'d Device) -> Self {
        Self { memory: Memory::new(device), held: BTreeMap::new(), allocated: 0 }
    }

    pub fn device(&self) -> &'d Device {
        self.memory.device()
    }

    /// How many buffers have been allocated so far: while it is the same, buffers have the same
    /// addresses.
    pub fn allocated(&self) -> u64 {
        self.allocated
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
                self.allocated += 1;
                address
            }
        };
        Ok(TensorView::dense(name, address, dtype, shape))
    }

    /// Scratch memory of at least that many bytes, for one launch at a time.
    pub fn workspace(&mut self, bytes: usize) -> Result<TensorView> {
        self.view("workspace", DType::U8, &[bytes.max(16)])
    }

    /// A buffer of its own with these numbers.
    pub fn own_list(
        &mut self,
        name: &'static str,
        shape: &[usize],
        numbers: &[i32],
    ) -> Result<TensorView> {
        let view = self.view(name, DType::I32, shape)?;
        self.device().backend().upload(view.address, &bytes_of(numbers))?;
        Ok(view)
    }

    /// Buffers with these bytes, by one upload. Their addresses follow from the lengths of all.
    pub fn upload(&mut self, lists: &[(&'static str, Vec<u8>)]) -> Result<()> {
        let mut packed = Vec::new();
        let mut places = Vec::new();
        for (name, bytes) in lists {
            places.push((*name, packed.len() as u64, bytes.len()));
            packed.extend(bytes);
            packed.resize(packed.len().next_multiple_of(ALIGNMENT), 0);
        }
        let whole = self.view("lists", DType::U8, &[packed.len()])?;
        self.device().backend().upload(whole.address, &packed)?;
        for (name, offset, bytes) in places {
            self.held.insert(name, (whole.address + offset, bytes));
        }
        Ok(())
    }
}

/// The bytes of numbers.
pub(super) fn bytes_of(numbers: &[i32]) -> Vec<u8> {
    let mut bytes = vec![0; size_of_val(numbers)];
    for (place, number) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(numbers) {
        *place = number.to_ne_bytes();
    }
    bytes
}
