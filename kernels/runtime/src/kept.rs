//! The launches of a call, kept for later calls on tensors elsewhere.
//!
//! A launcher checks its tensors, chooses kernels and writes their parameters at each call. For a
//! small call that takes several times as long as the launch itself. All of it depends on types,
//! shapes, strides and the alignment of addresses; the addresses themselves are only written into
//! parameters. So a call is watched twice on a device that launches nothing, with tensors at two
//! invented addresses each. What differs in the parameters is an address, and says of which tensor.

use std::sync::{Arc, Mutex};

use super::backend::{Allocation, Backend, Environment, KernelExports, LoadedModule};
use super::backend::{Placement, Reservation};
use super::device::Device;
use super::error::{Result, RuntimeError};
use super::matrix::{MatrixLibrary, MatrixProduct};
use super::source::SourceTree;
use super::tensor::TensorView;
use super::tensor_map::{MapWords, TensorMap};
use super::turns::Turn;

/// Launchers look at addresses modulo this at most.
const ALIGNMENT: u64 = 256;

/// Bytes between invented addresses. No tensor is half as large.
const SPACING: u64 = 1 << 44;

/// The first invented address, in units of [`SPACING`]. What launchers may compute of addresses, a
/// difference of two or a quotient, is below it.
const FIRST: u64 = 1000;

/// Most tensors of a call.
const MOST_TENSORS: usize = FIRST as usize;

/// What launchers may look at of an address: calls on tensors with the same are kept once.
pub fn alignment(address: u64) -> u64 {
    address % ALIGNMENT
}

/// The launches of a call on tensors of known types, shapes, strides and alignments.
pub struct Kept {
    tensors: Vec<Extent>,
    launches: Vec<KeptLaunch>,
}

/// The bytes of a tensor, from its address on.
#[derive(Clone, Copy)]
struct Extent {
    alignment: u64,
    bytes: u64,
}

struct KeptLaunch {
    launch: Launch,
    pointers: Vec<Pointer>,
    /// Each with the parameters' byte at which it is; addresses are distances from the tensor's.
    maps: Vec<(Pointer, TensorMap)>,
}

/// An address in the bytes of parameters.
struct Pointer {
    at: usize,
    tensor: usize,
    /// From the tensor's address.
    distance: u64,
}

/// A launch as a module gets it.
struct Launch {
    module: Arc<dyn LoadedModule>,
    kernel: String,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    params: Vec<u8>,
}

impl Kept {
    /// Watches a call on tensors like these, and returns what it returned. `None` if its launches
    /// cannot be kept: if it does anything but launch, or fails.
    pub fn of<T>(
        device: &Device,
        tensors: &[TensorView],
        call: impl Fn(&Device, &[TensorView]) -> Result<T>,
    ) -> Option<(Self, T)> {
        let extents: Option<Vec<_>> = tensors.iter().map(Extent::of).collect();
        let extents = extents.filter(|all| all.len() <= MOST_TENSORS)?;
        let watched = |moved: bool| {
            let place = |(number, view): (usize, &TensorView)| {
                let address = invented(number, moved) + extents[number].alignment;
                TensorView { address, ..view.clone() }
            };
            let placed: Vec<_> = tensors.iter().enumerate().map(place).collect();
            watch(device, |device| call(device, &placed)).ok()
        };
        let ((first, returned), (second, _)) = (watched(false)?, watched(true)?);
        if first.len() != second.len() {
            return None;
        }
        let pairs = first.into_iter().zip(&second);
        let launches: Option<_> = pairs.map(|(a, b)| KeptLaunch::of(a, b, &extents)).collect();
        Some((Self { tensors: extents, launches: launches? }, returned))
    }

    /// Enqueues the launches on tensors at these addresses, in the order of the views. `false`, and
    /// nothing is enqueued, for addresses of other alignments, and for tensors that share memory.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn launch(&self, device: &Device, addresses: &[u64]) -> Result<bool> {
        if !self.takes(addresses) {
            return Ok(false);
        }
        for KeptLaunch { launch, pointers, maps } in &self.launches {
            let mut params = launch.params.clone();
            let address = |to: &Pointer| addresses[to.tensor].wrapping_add(to.distance);
            for to in pointers {
                params[to.at..to.at + 8].copy_from_slice(&address(to).to_ne_bytes());
            }
            for (to, map) in maps {
                let words = device.tensor_map(&TensorMap { address: address(to), ..*map })?;
                let places = params[to.at..].chunks_exact_mut(8);
                places.zip(words).for_each(|(at, word)| at.copy_from_slice(&word.to_ne_bytes()));
            }
            let Launch { module, kernel, grid, block, shared_bytes, .. } = launch;
            module.launch(kernel, *grid, *block, *shared_bytes, &params)?;
        }
        Ok(true)
    }

    fn takes(&self, addresses: &[u64]) -> bool {
        let placed = || self.tensors.iter().zip(addresses);
        let apart = |(number, (extent, &address)): (usize, (&Extent, &u64))| {
            let mut others = placed().skip(number + 1);
            others.all(|(other, &there)| extent.is_apart(address, other, there))
        };
        self.tensors.len() == addresses.len()
            && placed().all(|(extent, &address)| alignment(address) == extent.alignment)
            && placed().enumerate().all(apart)
    }
}

impl Extent {
    /// `None` for a tensor with negative strides, or of more bytes than any memory has.
    fn of(view: &TensorView) -> Option<Self> {
        let axes = view.shape.iter().zip(&view.strides).filter(|(size, _)| **size > 1);
        let last = axes.clone().try_fold(0u64, |last, (&size, &stride)| {
            last.checked_add((size as u64 - 1).checked_mul(u64::try_from(stride).ok()?)?)
        })?;
        let elements = if view.elements() == 0 { 0 } else { last.checked_add(1)? };
        let bytes = elements.checked_mul(view.dtype.size() as u64)?;
        let alignment = alignment(view.address);
        (bytes < SPACING / 4).then_some(Self { alignment, bytes })
    }

    fn is_apart(&self, address: u64, other: &Self, there: u64) -> bool {
        let ends_before = |extent: &Self, at: u64, next: u64| {
            at.checked_add(extent.bytes).is_some_and(|end| end <= next)
        };
        self.bytes == 0
            || other.bytes == 0
            || ends_before(self, address, there)
            || ends_before(other, there, address)
    }
}

/// An address for a tensor, or one further by a step that no other tensor has.
fn invented(tensor: usize, moved: bool) -> u64 {
    (FIRST + tensor as u64) * SPACING + if moved { step(tensor) } else { 0 }
}

fn step(tensor: usize) -> u64 {
    ALIGNMENT * (tensor as u64 + 1)
}

/// Of which tensor a value is an address, and how far from it: a value and the one that it became.
fn pointer(at: usize, value: u64, became: u64, extents: &[Extent]) -> Option<Pointer> {
    let moved_by = became.checked_sub(value)?;
    let tensor = (0..extents.len()).find(|&tensor| moved_by == step(tensor))?;
    let Extent { alignment, bytes } = extents[tensor];
    // A difference of two addresses may have moved by as much. It is nowhere near a tensor.
    let distance = value.checked_sub(invented(tensor, false) + alignment)?;
    (distance <= bytes).then_some(Pointer { at, tensor, distance })
}

impl KeptLaunch {
    fn of(launch: Launch, moved: &Launch, extents: &[Extent]) -> Option<Self> {
        let shape = |one: &Launch| (one.grid, one.block, one.shared_bytes, one.params.len());
        let same = Arc::ptr_eq(&launch.module, &moved.module) && launch.kernel == moved.kernel;
        if !same || shape(&launch) != shape(moved) {
            return None;
        }
        let (mut pointers, mut maps, mut at) = (Vec::new(), Vec::new(), 0);
        while at < launch.params.len() {
            let (own, other) = (&launch.params[at..], &moved.params[at..]);
            if let (Some(map), Some(became)) = (map_at(own), map_at(other)) {
                let to = pointer(at, map.address, became.address, extents)?;
                if map != (TensorMap { address: map.address, ..became }) {
                    return None;
                }
                maps.push((to, map));
                at += size_of::<MapWords>();
                continue;
            }
            let width = own.len().min(8);
            if own[..width] != other[..width] {
                let value = |bytes: &[u8]| Some(u64::from_ne_bytes(*bytes.first_chunk()?));
                pointers.push(pointer(at, value(own)?, value(other)?, extents)?);
            }
            at += width;
        }
        Some(Self { launch, pointers, maps })
    }
}

/// The map at the start of these bytes.
fn map_at(bytes: &[u8]) -> Option<TensorMap> {
    let bytes: &[u8; size_of::<MapWords>()] = bytes.first_chunk()?;
    let mut words = MapWords::default();
    let chunks = bytes.as_chunks().0;
    words.iter_mut().zip(chunks).for_each(|(word, chunk)| *word = u64::from_ne_bytes(*chunk));
    TensorMap::from_words(&words)
}

type Launched = Arc<Mutex<Vec<Launch>>>;

/// The launches of a call that launches nothing.
fn watch<T>(device: &Device, call: impl FnOnce(&Device) -> Result<T>) -> Result<(Vec<Launch>, T)> {
    let launched = Launched::default();
    let watching = Watching { device: device.again(), launched: launched.clone() };
    let returned = call(&device.on_backend(Arc::new(watching)))?;
    let launches = std::mem::take(&mut *launched.lock().unwrap_or_else(|e| e.into_inner()));
    Ok((launches, returned))
}

/// A device's modules, whose launches are written down. Whatever else a call may do is an error.
struct Watching {
    device: Device,
    launched: Launched,
}

struct WatchedModule {
    module: Arc<dyn LoadedModule>,
    launched: Launched,
}

impl LoadedModule for WatchedModule {
    fn exports(&self, kernel: &str) -> Result<KernelExports> {
        self.module.exports(kernel)
    }

    fn launch(
        &self,
        kernel: &str,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        params: &[u8],
    ) -> Result<()> {
        let (module, kernel, params) = (self.module.clone(), kernel.to_owned(), params.to_vec());
        let launch = Launch { module, kernel, grid, block, shared_bytes, params };
        self.launched.lock().unwrap_or_else(|e| e.into_inner()).push(launch);
        Ok(())
    }
}

fn not_kept<T>(what: &str) -> Result<T> {
    let reason = std::io::Error::new(std::io::ErrorKind::Unsupported, "the call is watched");
    Err(RuntimeError::system(what, reason))
}

impl MatrixLibrary for Watching {
    fn multiply(&self, _product: &MatrixProduct) -> Result<bool> {
        not_kept("a product of a library")
    }
}

impl Backend for Watching {
    fn environment(&self) -> &Environment {
        self.device.environment()
    }

    fn turn(&self) -> Option<Turn<'_>> {
        self.device.backend().turn()
    }

    fn runs(&self) -> bool {
        self.device.backend().runs()
    }

    fn load(
        &self,
        _tree: &SourceTree,
        file: &str,
        defines: &[(String, String)],
    ) -> Result<Box<dyn LoadedModule>> {
        let module = self.device.module((file.to_owned(), defines.to_vec()))?;
        Ok(Box::new(WatchedModule { module, launched: self.launched.clone() }))
    }

    fn allocate(&self, _name: &str, _bytes: usize, _: Placement) -> Result<Allocation> {
        not_kept("an allocation")
    }

    fn reserve(
        &self,
        _name: &str,
        _bytes: usize,
        _touched: &[std::ops::Range<i64>],
        _placement: Placement,
    ) -> Result<Reservation> {
        not_kept("an allocation")
    }

    fn free(&self, _allocation: &Allocation) {}

    fn fill(&self, _address: u64, _byte: u8, _bytes: usize) -> Result<()> {
        not_kept("a fill")
    }

    fn upload(&self, _address: u64, _source: &[u8]) -> Result<()> {
        not_kept("a copy")
    }

    fn download(&self, _address: u64, _target: &mut [u8]) -> Result<()> {
        not_kept("a copy")
    }

    fn copy(&self, _target: u64, _source: u64, _bytes: usize) -> Result<()> {
        not_kept("a copy")
    }

    fn synchronize(&self) -> Result<()> {
        not_kept("a wait")
    }

    fn time(&self, _work: &mut dyn FnMut() -> Result<()>) -> Result<std::time::Duration> {
        not_kept("a measurement")
    }

    fn matrix_library(&self) -> Option<&dyn MatrixLibrary> {
        self.device.matrix_library().map(|_| self as &dyn MatrixLibrary)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::{DeviceAddress, Params};
    use crate::{BackendKind, Contract, DType, DeviceArena, DeviceOptions, HostTensor};
    use crate::{LaunchConfig, testing};

    /// Adds `more` to each number of a list.
    const SOURCE: &str = r#"#include "memory.h"
struct AddParams { const int* x; int* out; int32_t more; int32_t count; };
KERNEL(add, AddParams, 64) {
  for (int i = int(threadIdx.x); i < params.count; i += 64) params.out[i] = params.x[i] + params.more;
}
"#;

    fn device() -> Device {
        let tree = testing::kernels().with_text("add.cu", SOURCE.into(), "a test");
        Device::open(BackendKind::Emulator, DeviceOptions::of(tree)).expect("an emulator")
    }

    /// From the second number on, if there are more than one.
    fn add(device: &Device, tensors: &[TensorView], more: usize) -> Result<()> {
        let from =
            |view: &TensorView| DeviceAddress(view.address + 4 * u64::from(view.shape[0] > 1));
        let count = tensors[0].shape[0] - usize::from(tensors[0].shape[0] > 1);
        let params = Params::new("add").ptr("x", from(&tensors[0])).ptr("out", from(&tensors[1]));
        let params = params.i32("more", more)?.i32("count", count)?;
        let launch = LaunchConfig { grid: [1; 3], block: [64, 1, 1], shared_bytes: 0 };
        device.kernel("add.cu", &[], "add")?.launch(launch, &params)
    }

    fn list(numbers: &[i32]) -> HostTensor {
        HostTensor::from_i32(&[numbers.len()], numbers)
    }

    #[test]
    fn a_kept_call_runs_on_other_tensors_and_only_on_such_as_it_was_kept_for() {
        let device = device();
        let mut arena = DeviceArena::new(&device, Contract::NAN);
        let (x, y) = (arena.input("x", &list(&[1, 2, 3])), arena.input("y", &list(&[7, 8, 9])));
        let (x, y) = (x.unwrap(), y.unwrap());
        let out = arena.output("out", DType::I32, &[3]).unwrap();
        let tensors = [x.clone(), out.clone()];
        let call = |device: &Device, tensors: &[TensorView]| add(device, tensors, 5);
        let (kept, ()) = Kept::of(&device, &tensors, call).expect("a call that only launches");
        let before = device.read(&out).unwrap().bytes;
        assert!(!kept.launch(&device, &[y.address, y.address]).unwrap(), "one tensor twice");
        assert!(!kept.launch(&device, &[y.address + 4, out.address]).unwrap(), "another alignment");
        assert!(!kept.launch(&device, &[y.address]).unwrap(), "too few addresses");
        assert_eq!(device.read(&out).unwrap().bytes, before);
        // Buffers of one size end at the end of a page.
        assert!(kept.launch(&device, &[y.address, out.address]).unwrap());
        assert_eq!(device.read(&out).unwrap().bytes[4..], list(&[13, 14]).bytes);
    }

    #[test]
    fn a_call_that_copies_or_fails_or_computes_with_addresses_is_not_kept() {
        let device = device();
        let view = |address| TensorView::dense("x", address, DType::I32, &[2]);
        let tensors = [view(4096), view(8192)];
        let copies = |device: &Device, tensors: &[TensorView]| {
            device.backend().copy(tensors[0].address, tensors[1].address, 4)
        };
        assert!(Kept::of(&device, &tensors, copies).is_none());
        let fails =
            |device: &Device, _: &[TensorView]| device.kernel("add.cu", &[], "sub").map(|_| ());
        assert!(Kept::of(&device, &tensors, fails).is_none());
        let computes = |by: fn(u64, u64) -> u64| {
            let call = move |device: &Device, tensors: &[TensorView]| {
                let address = by(tensors[0].address, tensors[1].address);
                add(device, &[view(address), tensors[1].clone()], 5)
            };
            Kept::of(&device, &tensors, call).is_some()
        };
        assert!(computes(|x, _| x) && computes(|x, _| x + 4));
        assert!(!computes(|x, y| y - x) && !computes(|x, y| x + y) && !computes(|x, _| x / 16));
        assert!(!computes(|x, _| x + 12), "beyond the tensor");
        let reversed = TensorView { strides: vec![-1], ..view(4096) };
        assert!(Kept::of(&device, &[reversed, view(8192)], |_, _| Ok(())).is_none());
    }
}
