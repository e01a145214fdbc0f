//! A device that launches nothing: it records the inputs of an operator's kernels, and returns the
//! outputs as they were allocated. So an external kernel gets the same tensors as ours, and its
//! outputs are known by name, type and shape, without extra code in the operator. A second kind
//! accepts launches and runs none: it shows which kernels a launcher chooses on a GPU, without that
//! GPU, and which parameters they get.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::backend::{
    Allocation, Backend, Environment, KernelExports, LoadedModule, Placement, Reservation, granules,
};
use super::error::{Result, RuntimeError};
use super::matrix::{MatrixLibrary, MatrixProduct};
use super::source::SourceTree;

/// Distance between buffers, and the alignment of each: that of a GPU's allocator.
const ALIGNMENT: u64 = 256;

/// Threads of a block of an unknown kernel.
const ACCEPTED_THREADS: u32 = 256;

/// Host memory under artificial addresses; nothing is compiled or run.
pub struct RecordingBackend {
    environment: Environment,
    memory: Mutex<Memory>,
    /// Whether launches are accepted and ignored; otherwise they are errors.
    accepts: bool,
    accepted: Accepted,
}

/// A launch that was accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcceptedLaunch {
    /// The kernel: file, defines and name, grid, block and shared memory; or the matrix product.
    pub kernel: String,
    /// The bytes of its parameters.
    pub params: Vec<u8>,
    /// Dynamic shared memory of a block, bytes.
    pub shared_bytes: u32,
}

type Accepted = Arc<Mutex<Vec<AcceptedLaunch>>>;

struct Memory {
    next: u64,
    /// Contents by the address of the first byte: whole buffers, and the touched parts of reserved
    /// ones.
    buffers: BTreeMap<u64, Vec<u8>>,
}

impl RecordingBackend {
    /// A device that claims to be `environment`.
    pub fn new(environment: Environment) -> Self {
        let memory = Mutex::new(Memory { next: ALIGNMENT, buffers: BTreeMap::new() });
        Self { environment, memory, accepts: false, accepted: Accepted::default() }
    }

    /// The same, but one that accepts launches and runs none.
    pub fn accepting(environment: Environment) -> Self {
        Self { accepts: true, ..Self::new(environment) }
    }

    /// The launches that were accepted since the last call.
    pub fn take_accepted(&self) -> Vec<AcceptedLaunch> {
        std::mem::take(&mut self.accepted.lock().unwrap_or_else(|e| e.into_inner()))
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Memory {
    /// Unused addresses for a buffer of `bytes` bytes.
    fn addresses(&mut self, name: &str, bytes: usize) -> Result<Range<u64>> {
        let past = (bytes as u64).checked_add(self.next);
        let next = past.and_then(|end| (end / ALIGNMENT + 1).checked_mul(ALIGNMENT));
        let next = next.ok_or_else(|| RuntimeError::TooLarge {
            name: name.to_owned(),
            needed: bytes,
            limit: (u64::MAX - self.next) as usize,
            of: "bytes of addresses",
        })?;
        let start = std::mem::replace(&mut self.next, next);
        Ok(start..start + bytes as u64)
    }

    fn bytes(&mut self, address: u64, bytes: usize) -> Result<&mut [u8]> {
        if bytes == 0 {
            return Ok(&mut []);
        }
        let buffer = self.buffers.range_mut(..=address).next_back();
        let inside = buffer.and_then(|(start, buffer)| {
            let offset = (address - start) as usize;
            buffer.get_mut(offset..offset.checked_add(bytes)?)
        });
        inside.ok_or_else(|| {
            let reason = io::Error::new(io::ErrorKind::InvalidInput, "no buffer holds them");
            RuntimeError::system(format!("reaching {bytes} bytes at {address:#x}"), reason)
        })
    }
}

/// A module about which nothing is known; its launches are accepted.
struct Accepting {
    /// File and defines.
    module: String,
    accepted: Accepted,
}

fn accept(accepted: &Accepted, kernel: String, params: &[u8], shared_bytes: u32) {
    let launch = AcceptedLaunch { kernel, params: params.to_vec(), shared_bytes };
    accepted.lock().unwrap_or_else(|e| e.into_inner()).push(launch);
}

impl LoadedModule for Accepting {
    fn exports(&self, _kernel: &str) -> Result<KernelExports> {
        Ok(KernelExports {
            params_size: 0,
            params_hash: 0,
            max_threads: ACCEPTED_THREADS,
            shared_bytes: None,
            resident_blocks: None,
            cluster: 1,
            resident_clusters: None,
        })
    }

    fn launch(
        &self,
        kernel: &str,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        params: &[u8],
    ) -> Result<()> {
        let kernel = format!("{} {kernel} {grid:?} {block:?} {shared_bytes}", self.module);
        accept(&self.accepted, kernel, params, shared_bytes);
        Ok(())
    }
}

/// A library that accepts every GEMM.
impl MatrixLibrary for RecordingBackend {
    fn multiply(&self, product: &MatrixProduct) -> Result<bool> {
        let matrices = [Some(product.a), Some(product.b), product.before, Some(product.out)];
        let addresses = matrices.into_iter().flatten().map(|matrix| matrix.address);
        let params: Vec<u8> = addresses.flat_map(u64::to_ne_bytes).collect();
        accept(&self.accepted, format!("{product:?}"), &params, 0);
        Ok(true)
    }
}

impl Backend for RecordingBackend {
    fn environment(&self) -> &Environment {
        &self.environment
    }

    fn runs(&self) -> bool {
        !self.accepts
    }

    fn load(
        &self,
        tree: &SourceTree,
        file: &str,
        defines: &[(String, String)],
    ) -> Result<Box<dyn LoadedModule>> {
        if self.accepts {
            // A file that the tree does not have is an error on every device.
            tree.text(file)?;
            let module = format!("{file} {defines:?}");
            return Ok(Box::new(Accepting { module, accepted: self.accepted.clone() }));
        }
        Err(RuntimeError::BackendMissing {
            backend: "external",
            reason: format!(
                "`{file}` would be launched outside of the call that an external kernel stands for"
            ),
        })
    }

    fn allocate(&self, name: &str, bytes: usize, _placement: Placement) -> Result<Allocation> {
        let mut memory = self.memory();
        let address = memory.addresses(name, bytes)?.start;
        memory.buffers.insert(address, vec![0; bytes]);
        Ok(Allocation { address, bytes, front_band: 0, back_band: 0 })
    }

    fn reserve(
        &self,
        name: &str,
        bytes: usize,
        touched: &[Range<i64>],
        _placement: Placement,
    ) -> Result<Reservation> {
        let mut memory = self.memory();
        let addresses = memory.addresses(name, bytes)?;
        let touched = granules(touched, addresses.start, &addresses, 1);
        for range in &touched {
            memory.buffers.insert(range.start, vec![0; (range.end - range.start) as usize]);
        }
        let allocation =
            Allocation { address: addresses.start, bytes, front_band: 0, back_band: 0 };
        Ok(Reservation { allocation, touched })
    }

    fn free(&self, allocation: &Allocation) {
        let (start, bytes) = (allocation.address, allocation.bytes.max(1) as u64);
        let mut memory = self.memory();
        let parts: Vec<u64> =
            memory.buffers.range(start..start + bytes).map(|(&part, _)| part).collect();
        for part in parts {
            memory.buffers.remove(&part);
        }
    }

    fn fill(&self, address: u64, byte: u8, bytes: usize) -> Result<()> {
        self.memory().bytes(address, bytes)?.fill(byte);
        Ok(())
    }

    fn upload(&self, address: u64, source: &[u8]) -> Result<()> {
        self.memory().bytes(address, source.len())?.copy_from_slice(source);
        Ok(())
    }

    fn download(&self, address: u64, target: &mut [u8]) -> Result<()> {
        target.copy_from_slice(self.memory().bytes(address, target.len())?);
        Ok(())
    }

    fn copy(&self, target: u64, source: u64, bytes: usize) -> Result<()> {
        let mut memory = self.memory();
        let copied = memory.bytes(source, bytes)?.to_vec();
        memory.bytes(target, bytes)?.copy_from_slice(&copied);
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    fn time(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
        let start = Instant::now();
        work()?;
        Ok(start.elapsed())
    }

    fn matrix_library(&self) -> Option<&dyn MatrixLibrary> {
        self.accepts.then_some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::Layout;
    use crate::{BackendKind, Contract, DType, Device, DeviceArena, HostTensor, Role};

    fn environment() -> Environment {
        Environment {
            backend: BackendKind::External,
            device: "external: test".into(),
            driver: String::new(),
            compiler: String::new(),
            target: String::new(),
            processors: 1,
            shared_bytes_per_block: 0,
        }
    }

    fn recorder() -> Device {
        Device::recording(environment(), crate::testing::kernels())
    }

    #[test]
    fn uploads_are_taken_down_densely_and_the_call_is_left_out() {
        let device = recorder();
        let x = HostTensor::from_f64(DType::Bf16, &[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let mut arena = DeviceArena::new(&device, Contract::NAN);
        arena.upload("saved x", &x, &Layout::padded(&[2, 3], 5), Role::Input).unwrap();
        let y = arena.output("y", DType::F32, &[4]).unwrap();
        let violations = arena.run(|_| panic!("nothing is launched")).unwrap();
        assert!(violations.is_empty());
        assert_eq!(arena.download(&y).unwrap().bytes, [0xff; 16]);
        assert_eq!(device.take_recorded(), [("saved_x".to_owned(), x)]);
        assert_eq!(device.take_recorded(), []);
    }

    #[test]
    fn two_unlike_inputs_of_one_name_and_a_reach_beyond_a_buffer_are_refused() {
        let device = recorder();
        let mut arena = DeviceArena::new(&device, Contract::NAN);
        let x = arena.input("x", &HostTensor::from_i32(&[2], &[1, 2])).unwrap();
        arena.input("x", &HostTensor::from_i32(&[2], &[1, 2])).unwrap();
        let error = arena.input("x", &HostTensor::from_i32(&[2], &[1, 3])).unwrap_err();
        assert!(error.to_string().contains("`x`"), "{error}");
        assert!(device.backend().download(x.address + 4, &mut [0; 8]).is_err());
    }

    #[test]
    fn a_tensor_with_huge_strides_is_recorded_without_its_gaps() {
        let backend = RecordingBackend::new(environment());
        let x = HostTensor::from_i32(&[2, 3], &[1, 2, 3, 4, 5, 6]);
        let huge = Layout::of(&[2, 3], &[0, 1], &[0, 1 << 40]).unwrap();
        let bytes = 4 * huge.elements;
        let row = 4 * huge.strides[0];
        let reserved =
            backend.reserve("x", bytes, &[-16..12 + 16, row - 16..row + 12], Placement::FlushBack);
        let reserved = reserved.unwrap();
        let held: usize = backend.memory().buffers.values().map(Vec::len).sum();
        assert_eq!(held, 12 + 16 + 16 + 12);
        assert!(
            backend.download(reserved.allocation.address + row as u64 / 2, &mut [0; 4]).is_err()
        );
        backend.free(&reserved.allocation);
        assert!(backend.memory().buffers.is_empty());

        let device = recorder();
        let mut arena = DeviceArena::new(&device, Contract::HUGE);
        let view = arena.upload("x", &x, &huge, Role::Input).unwrap();
        let y = arena.allocate("y", DType::I32, &[2, 3], &huge, Role::Output).unwrap();
        assert_eq!(arena.download(&view).unwrap(), x);
        assert_eq!(arena.download(&y).unwrap().bytes, [0x7b; 24]);
        assert_eq!(device.take_recorded(), [("x".to_owned(), x)]);
    }

    #[test]
    fn a_rewritten_tensor_lies_where_it_lay_and_whatever_else_changes_is_a_stray_write() {
        let device = recorder();
        let x = HostTensor::from_i32(&[2, 3], &[1, 2, 3, 4, 5, 6]);
        let y = HostTensor::from_i32(&[2, 3], &[7, 8, 9, 10, 11, 12]);
        let mut arena = DeviceArena::new(&device, Contract::NAN);
        let given = arena.upload("x", &x, &Layout::padded(&[2, 3], 2), Role::Input).unwrap();
        let written = arena.output("out", DType::I32, &[4]).unwrap();
        arena.rewrite(&given, &y).unwrap();
        assert_eq!(
            (arena.download(&given).unwrap(), arena.stray_writes().unwrap()),
            (y.clone(), vec![])
        );

        device.backend().upload(given.address + 20, &[5; 8]).unwrap();
        device.backend().upload(written.address + 4, &[0; 4]).unwrap();
        let strays = arena.stray_writes().unwrap();
        let found: Vec<_> =
            strays.iter().map(|v| (v.buffer.as_str(), v.bytes, v.first_offset)).collect();
        assert_eq!(found, [("x", 8, 20), ("out", 4, 4)]);
        arena.rewrite(&given, &x).unwrap();
        arena.poison_again().unwrap();
        assert_eq!((arena.download(&given).unwrap(), arena.stray_writes().unwrap()), (x, vec![]));

        let wide = HostTensor::from_i32(&[2, 4], &[0; 8]);
        for (view, tensor, why) in
            [(&given, &wide, "in the place of"), (&written, &wide, "in the place of")]
        {
            assert!(arena.rewrite(view, tensor).unwrap_err().to_string().contains(why));
        }
        let four = HostTensor::from_i32(&[4], &[0; 4]);
        assert!(
            arena
                .rewrite(&written, &four)
                .unwrap_err()
                .to_string()
                .contains("`out` was not uploaded here")
        );
    }
}
