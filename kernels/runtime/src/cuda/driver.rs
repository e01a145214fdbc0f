//! The driver API: one device, its primary context, and the single stream for all work.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_int, c_void};
use std::fmt::Display;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute, CUresult};

use super::Link;
use super::library::loader_reason;
use crate::error::{Result, RuntimeError};
use crate::tensor_map::{BOX_ROW_BYTES, MapWords, TensorMap};

/// How many kernel names an error lists at most.
const REMEMBERED_LAUNCHES: usize = 8;

/// Turns a driver status into a result; `call` names the call and its arguments of interest.
pub(super) fn check(result: CUresult, call: impl Display) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let (name, message) = describe(result);
    Err(RuntimeError::Cuda { call: call.to_string(), name, message })
}

/// The driver's name and description of a status.
fn describe(result: CUresult) -> (String, String) {
    type Lookup = unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult;
    let text = |lookup: Lookup| {
        let mut text = std::ptr::null();
        // SAFETY: writes one pointer, to a static string or null; callable before cuInit.
        let found = unsafe { lookup(result, &mut text) };
        if found != CUresult::CUDA_SUCCESS || text.is_null() {
            return None;
        }
        // SAFETY: not null, NUL-terminated and static.
        Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    };
    (
        text(sys::cuGetErrorName).unwrap_or_else(|| format!("CUresult {}", result as u32)),
        text(sys::cuGetErrorString).unwrap_or_else(|| "no description".into()),
    )
}

fn missing(reason: impl Into<String>) -> RuntimeError {
    RuntimeError::BackendMissing { backend: "cuda", reason: reason.into() }
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these mutexes guard is consistent after every statement.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The limits against which a launch is checked, and the device's properties for reports.
#[derive(Clone, Debug)]
pub(super) struct Properties {
    pub name: String,
    pub capability: (u32, u32),
    pub sms: u32,
    /// `CUDA driver API 13.0, kernel driver 580.95.05`.
    pub driver: String,
    pub max_grid: [u32; 3],
    pub max_block: [u32; 3],
    pub max_threads: u32,
    /// Shared memory of a block, static and dynamic, that needs no opt-in; bytes.
    pub shared_without_opt_in: u64,
    /// The most shared memory of a block after opting in; bytes.
    pub shared_opt_in: u64,
}

impl Properties {
    /// See [`super::target_of`].
    pub fn target(&self) -> String {
        let (major, minor) = self.capability;
        super::target_of(10 * major + minor)
    }

    fn read(device: sys::CUdevice) -> Result<Self> {
        let get = |attribute| attribute_of(device, attribute);
        Ok(Self {
            name: device_name(device)?,
            capability: (
                get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            sms: get(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            driver: driver_version()?,
            max_grid: [
                get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X)?,
                get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y)?,
                get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z)?,
            ],
            max_block: [
                get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X)?,
                get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y)?,
                get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z)?,
            ],
            max_threads: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            shared_without_opt_in: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK)?
                .into(),
            shared_opt_in: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?
                .into(),
        })
    }
}

fn attribute_of(device: sys::CUdevice, attribute: Attribute) -> Result<u32> {
    let mut value = 0;
    // SAFETY: `value` is live, `device` came from cuDeviceGet.
    let result = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) };
    check(result, format_args!("cuDeviceGetAttribute({attribute:?})"))?;
    Ok(u32::try_from(value).unwrap_or(0))
}

fn device_name(device: sys::CUdevice) -> Result<String> {
    let mut name = [0u8; 256];
    // SAFETY: the driver writes at most the given number of bytes, the last one a NUL.
    let result =
        unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int, device) };
    check(result, "cuDeviceGetName")?;
    let text = CStr::from_bytes_until_nul(&name).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

fn driver_version() -> Result<String> {
    let mut version = 0;
    // SAFETY: writes one live integer.
    check(unsafe { sys::cuDriverGetVersion(&mut version) }, "cuDriverGetVersion")?;
    let api = format!("CUDA driver API {}.{}", version / 1000, version % 1000 / 10);
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    Ok(match kernel_driver_version(&text) {
        Some(kernel) => format!("{api}, kernel driver {kernel}"),
        None => api,
    })
}

/// The version in the first line of `/proc/driver/nvidia/version`, such as `580.95.05`.
fn kernel_driver_version(text: &str) -> Option<&str> {
    text.lines().next()?.split_whitespace().find(|word| {
        word.contains('.') && word.bytes().all(|byte| byte == b'.' || byte.is_ascii_digit())
    })
}

thread_local! {
    /// The stream of the caller, in [`on_stream`].
    static CALLERS_STREAM: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Restores a thread's stream and current context when dropped, also by a panic.
struct Callers {
    stream: Option<u64>,
    context: sys::CUcontext,
}

impl Drop for Callers {
    fn drop(&mut self) {
        CALLERS_STREAM.set(self.stream);
        // SAFETY: the context was current on this thread before. One that was destroyed in the
        // meantime is rejected.
        let _ = unsafe { sys::cuCtxSetCurrent(self.context) };
    }
}

/// See [`super::on_stream`].
pub(super) fn on_stream<T>(stream: u64, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let mut context = std::ptr::null_mut();
    // SAFETY: writes one live pointer.
    check(unsafe { sys::cuCtxGetCurrent(&mut context) }, "cuCtxGetCurrent")?;
    let _callers = Callers { stream: CALLERS_STREAM.replace(Some(stream)), context };
    work()
}

/// A device's primary context and the stream for all work on it.
///
/// The stream is an explicit, non-blocking one: nothing here ever touches the default stream, so
/// that fills, copies and launches are ordered with one another and with nothing else (FM-94).
pub(super) struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    pub properties: Properties,
    /// Kernels launched since the last successful synchronisation, the latest last.
    launched: Mutex<Vec<Arc<str>>>,
}

// SAFETY: the handles belong to the process, not to a thread, and the driver API may be called
// from several threads; every use makes the context current on its own thread first.
unsafe impl Send for Context {}
// SAFETY: as above; mutable state on this side is protected by a mutex.
unsafe impl Sync for Context {}

impl Context {
    /// Opens device `ordinal`.
    ///
    /// # Errors
    /// [`RuntimeError::BackendMissing`] where there is no driver or no such device.
    pub fn open(ordinal: u32) -> Result<Arc<Self>> {
        let device = find_device(ordinal)?;
        let properties = Properties::read(device)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: `device` is valid; the retained context is released once, in `drop`.
        check(
            unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) },
            "cuDevicePrimaryCtxRetain",
        )?;
        // From here on `drop` cleans up, also when the stream cannot be created.
        let mut opened = Self {
            device,
            context,
            stream: std::ptr::null_mut(),
            properties,
            launched: Mutex::default(),
        };
        opened.enter()?;
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current; the stream is destroyed once, in `drop`.
        check(unsafe { sys::cuStreamCreate(&mut opened.stream, flags) }, "cuStreamCreate")?;
        Ok(Arc::new(opened))
    }

    /// The device's number in the driver's terms.
    pub fn device(&self) -> sys::CUdevice {
        self.device
    }

    /// The stream: the caller's, within [`on_stream`]. Only for calls after [`Context::enter`].
    pub fn stream(&self) -> sys::CUstream {
        CALLERS_STREAM.get().map_or(self.stream, |stream| stream as sys::CUstream)
    }

    /// Makes the context current on the calling thread.
    pub fn enter(&self) -> Result<()> {
        // SAFETY: the context is retained for as long as `self` lives.
        check(unsafe { sys::cuCtxSetCurrent(self.context) }, "cuCtxSetCurrent")
    }

    /// As [`check`], for calls that may report a fault of an earlier launch: the error names those.
    pub fn check(&self, result: CUresult, call: impl Display) -> Result<()> {
        check(result, call).map_err(|error| match error {
            RuntimeError::Cuda { call, name, message } => {
                let message = format!("{message}{}", self.launched_clause());
                RuntimeError::Cuda { call, name, message }
            }
            other => other,
        })
    }

    /// Records a launch, for the errors of later calls.
    pub fn note_launch(&self, kernel: &Arc<str>) {
        let mut launched = locked(&self.launched);
        if launched.last() == Some(kernel) {
            return;
        }
        if launched.len() == REMEMBERED_LAUNCHES {
            launched.remove(0);
        }
        launched.push(kernel.clone());
    }

    fn launched_clause(&self) -> String {
        match locked(&self.launched).as_slice() {
            [] => String::new(),
            names => format!(" (launched since the last synchronisation: {})", names.join(", ")),
        }
    }

    /// Waits for everything on the stream.
    pub fn synchronize(&self) -> Result<()> {
        self.enter()?;
        // SAFETY: the stream lives as long as `self`.
        self.check(unsafe { sys::cuStreamSynchronize(self.stream) }, "cuStreamSynchronize")?;
        locked(&self.launched).clear();
        Ok(())
    }

    /// Bytes of free device memory, and of all device memory.
    pub fn free_memory(&self) -> Result<(usize, usize)> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current; two numbers are written.
        self.check(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }, "cuMemGetInfo")?;
        Ok((free, total))
    }

    /// Copies to the host and waits.
    pub fn download(&self, address: u64, target: &mut [u8]) -> Result<()> {
        self.enter()?;
        if !target.is_empty() {
            let bytes = target.len();
            // SAFETY: `target` is borrowed until the stream was waited for, also on an error; the
            // driver rejects a wrong device address.
            let result = unsafe {
                sys::cuMemcpyDtoHAsync_v2(target.as_mut_ptr().cast(), address, bytes, self.stream)
            };
            self.check(result, format_args!("cuMemcpyDtoHAsync({address:#x}, {bytes} bytes)"))?;
        }
        self.synchronize()
    }

    /// Copies from the host and waits. `source` may change as soon as this returns; on some systems
    /// the device reads pageable memory only when the copy runs.
    pub fn upload(&self, address: u64, source: &[u8]) -> Result<()> {
        if source.is_empty() {
            return Ok(());
        }
        self.enter()?;
        let bytes = source.len();
        // SAFETY: `source` is borrowed until the stream was waited for.
        let result = unsafe {
            sys::cuMemcpyHtoDAsync_v2(address, source.as_ptr().cast(), bytes, self.stream)
        };
        self.check(result, format_args!("cuMemcpyHtoDAsync({address:#x}, {bytes} bytes)"))?;
        self.synchronize()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // After a fault every call here fails; nothing more can be done.
        let _ = self.enter();
        if !self.stream.is_null() {
            // SAFETY: created in `open`, destroyed only here; modules and events hold or borrow
            // the context, so that nothing uses the stream any more.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
        // SAFETY: balances the retain in `open`.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// Checks that a driver exists. Without this check cudarc's first call would panic where there is
/// no driver.
pub(super) fn require() -> Result<()> {
    // SAFETY: only searches the loader for libcuda by the names that cudarc uses later.
    if unsafe { sys::is_culib_present() } {
        return Ok(());
    }
    Err(missing("no CUDA driver: libcuda.so.1 is not on the loader's search path"))
}

/// How many devices the driver sees.
pub(super) fn device_count() -> Result<u32> {
    require()?;
    let unusable =
        |error: RuntimeError| missing(format!("the CUDA driver does not work here: {error}"));
    // SAFETY: no preconditions.
    check(unsafe { sys::cuInit(0) }, "cuInit").map_err(unusable)?;
    let mut count = 0;
    // SAFETY: writes one live integer.
    check(unsafe { sys::cuDeviceGetCount(&mut count) }, "cuDeviceGetCount").map_err(unusable)?;
    Ok(u32::try_from(count).unwrap_or(0))
}

fn find_device(ordinal: u32) -> Result<sys::CUdevice> {
    let count = device_count()?;
    let index = c_int::try_from(ordinal).ok().filter(|_| ordinal < count);
    let index = index
        .ok_or_else(|| missing(format!("no CUDA device {ordinal}: the driver sees {count}")))?;
    let mut device = 0;
    // SAFETY: `index` is below the count.
    check(unsafe { sys::cuDeviceGet(&mut device, index) }, format_args!("cuDeviceGet({index})"))?;
    Ok(device)
}

/// Bytes of memory of a device.
pub(super) fn device_memory(ordinal: u32) -> Result<u64> {
    let device = find_device(ordinal)?;
    let mut bytes = 0;
    // SAFETY: writes one live integer; the device is one that the driver named.
    check(unsafe { sys::cuDeviceTotalMem_v2(&mut bytes, device) }, "cuDeviceTotalMem")?;
    Ok(bytes as u64)
}

/// A device's own id, as `nvidia-smi -L` prints it: `GPU-` and 16 bytes in hexadecimal.
pub(super) fn device_uuid(ordinal: u32) -> Result<String> {
    let device = find_device(ordinal)?;
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: writes one live structure; the device is one that the driver named.
    check(unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, device) }, "cuDeviceGetUuid")?;
    Ok(uuid_text(uuid.bytes.map(|byte| byte as u8)))
}

/// How one device reaches another one's memory.
pub(super) fn link(from: u32, to: u32) -> Result<Link> {
    use sys::CUdevice_P2PAttribute_enum as A;
    let (from, to) = (find_device(from)?, find_device(to)?);
    let has = |attribute| {
        let mut value = 0;
        // SAFETY: writes one live integer; the driver has named both devices.
        let result = unsafe { sys::cuDeviceGetP2PAttribute(&mut value, attribute, from, to) };
        check(result, "cuDeviceGetP2PAttribute").map(|()| value != 0)
    };
    Ok(match has(A::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED)? {
        false => Link::Host,
        true if has(A::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)? => Link::PeerWithAtomics,
        true => Link::Peer,
    })
}

fn uuid_text(bytes: [u8; 16]) -> String {
    let hexadecimal =
        |range: &[u8]| range.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let groups =
        [&bytes[..4], &bytes[4..6], &bytes[6..8], &bytes[8..10], &bytes[10..]].map(hexadecimal);
    format!("GPU-{}", groups.join("-"))
}

/// A timing event; borrows its context, so that it cannot outlive it.
pub(super) struct Event<'a> {
    context: &'a Context,
    handle: sys::CUevent,
}

impl<'a> Event<'a> {
    pub fn new(context: &'a Context) -> Result<Self> {
        context.enter()?;
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUevent_flags_enum::CU_EVENT_DEFAULT as u32;
        // SAFETY: the context is current; the event is destroyed once, in `drop`.
        context.check(unsafe { sys::cuEventCreate(&mut handle, flags) }, "cuEventCreate")?;
        Ok(Self { context, handle })
    }

    /// Enqueues the event.
    pub fn record(&self) -> Result<()> {
        self.context.enter()?;
        // SAFETY: event and stream are of this context.
        let result = unsafe { sys::cuEventRecord(self.handle, self.context.stream) };
        self.context.check(result, "cuEventRecord")
    }

    /// Makes the event a node of the graph that is being recorded.
    pub fn record_in_graph(&self) -> Result<()> {
        self.context.enter()?;
        let flags = sys::CUevent_record_flags_enum::CU_EVENT_RECORD_EXTERNAL as u32;
        // SAFETY: event and stream are of this context.
        let result =
            unsafe { sys::cuEventRecordWithFlags(self.handle, self.context.stream, flags) };
        self.context.check(result, "cuEventRecordWithFlags")
    }

    /// Waits for this event and returns the time since `start`, at a resolution of about 0.5 µs.
    pub fn elapsed_since(&self, start: &Self) -> Result<Duration> {
        type ElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> CUresult;
        self.context.enter()?;
        // SAFETY: the event was recorded on a stream of this context.
        let result = unsafe { sys::cuEventSynchronize(self.handle) };
        self.context.check(result, "cuEventSynchronize")?;
        // cudarc binds the function's second version, which drivers before 12.8 lack; every driver
        // has the first.
        // SAFETY: libcuda is loaded, and the type is the one that cuda.h gave this symbol.
        let elapsed_time = unsafe { sys::culib().get::<ElapsedTime>(c"cuEventElapsedTime") };
        let elapsed_time = elapsed_time.map_err(|error| {
            missing(format!("the CUDA driver lacks a function: {}", loader_reason(error)))
        })?;
        let mut milliseconds = 0f32;
        // SAFETY: both events were recorded with timing; this one has completed, and so has the
        // earlier one on the same stream.
        let result = unsafe { elapsed_time(&mut milliseconds, start.handle, self.handle) };
        self.context.check(result, "cuEventElapsedTime")?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or_default())
    }
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: created in `new`, destroyed only here.
        let _ = unsafe { sys::cuEventDestroy_v2(self.handle) };
    }
}

/// A module of compiled code; unloaded when dropped.
pub(super) struct Code {
    context: Arc<Context>,
    module: sys::CUmodule,
}

// SAFETY: as for `Context`: the handle belongs to the process, and the driver is thread-safe.
unsafe impl Send for Code {}
// SAFETY: as above; nothing on this side is mutable.
unsafe impl Sync for Code {}

impl Code {
    /// Loads a complete cubin.
    pub fn load(context: &Arc<Context>, cubin: &[u8]) -> Result<Self> {
        const CALL: &str = "cuModuleLoadData";
        if !cubin.starts_with(b"\x7fELF") {
            let message = "not a cubin: it does not start as an ELF file".into();
            return Err(RuntimeError::Cuda {
                call: CALL.into(),
                name: "CUDA_ERROR_INVALID_IMAGE".into(),
                message,
            });
        }
        context.enter()?;
        let mut module = std::ptr::null_mut();
        // SAFETY: `cubin` is what NVRTC made, whole (its digest was verified if it was stored),
        // and the driver copies it.
        let result = unsafe { sys::cuModuleLoadData(&mut module, cubin.as_ptr().cast()) };
        context.check(result, CALL)?;
        Ok(Self { context: context.clone(), module })
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The entry point `kernel`, if the module has it.
    pub fn function(&self, kernel: &str) -> Result<Option<sys::CUfunction>> {
        let Ok(name) = CString::new(kernel) else { return Ok(None) };
        self.context.enter()?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded, the name is NUL-terminated.
        let result = unsafe { sys::cuModuleGetFunction(&mut function, self.module, name.as_ptr()) };
        self.found(result, "cuModuleGetFunction", kernel).map(|found| found.then_some(function))
    }

    /// The `u64`s of the global variable `symbol`, if the module has it with that size.
    pub fn numbers<const N: usize>(&self, symbol: &str) -> Result<Option<[u64; N]>> {
        let Ok(name) = CString::new(symbol) else { return Ok(None) };
        self.context.enter()?;
        let (mut address, mut size) = (0, 0);
        // SAFETY: the module is loaded, the name is NUL-terminated, both targets are live.
        let result = unsafe {
            sys::cuModuleGetGlobal_v2(&mut address, &mut size, self.module, name.as_ptr())
        };
        if !self.found(result, "cuModuleGetGlobal", symbol)? || size != N * 8 {
            return Ok(None);
        }
        let mut bytes = vec![0u8; size];
        self.context.download(address, &mut bytes)?;
        let mut numbers = [0; N];
        for (number, chunk) in numbers.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *number = u64::from_le_bytes(*chunk);
        }
        Ok(Some(numbers))
    }

    fn found(&self, result: CUresult, call: &str, symbol: &str) -> Result<bool> {
        if result == CUresult::CUDA_ERROR_NOT_FOUND {
            return Ok(false);
        }
        self.context.check(result, format_args!("{call}({symbol})"))?;
        Ok(true)
    }
}

impl Drop for Code {
    fn drop(&mut self) {
        // A kernel of this module may still be running.
        let _ = self.context.synchronize();
        // SAFETY: loaded in `load`, unloaded only here; functions of it are kept with it.
        let _ = unsafe { sys::cuModuleUnload(self.module) };
    }
}

/// Reads an attribute of a kernel.
pub(super) fn function_attribute(
    function: sys::CUfunction,
    attribute: sys::CUfunction_attribute_enum,
) -> Result<u32> {
    let mut value = 0;
    // SAFETY: `function` belongs to a loaded module, and its context is current.
    let result = unsafe { sys::cuFuncGetAttribute(&mut value, attribute, function) };
    check(result, format_args!("cuFuncGetAttribute({attribute:?})"))?;
    Ok(u32::try_from(value).unwrap_or(0))
}

/// What a launch is made with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    /// Whether it may be launched before the previous kernel has ended: only a kernel that waits
    /// for that itself.
    pub waits: bool,
}

/// Enqueues a kernel whose single parameter is a struct that starts at `params`.
///
/// # Safety
/// `function` belongs to a loaded module of `context`, which is current, and its one parameter is
/// not larger than what is readable at `params`. One that `waits` touches no memory before it has
/// waited for earlier kernels.
pub(super) unsafe fn launch(
    context: &Context,
    function: sys::CUfunction,
    shape: Shape,
    params: *const c_void,
) -> CUresult {
    let mut arguments = [params.cast_mut()];
    let mut early = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    };
    let config = sys::CUlaunchConfig {
        gridDimX: shape.grid[0],
        gridDimY: shape.grid[1],
        gridDimZ: shape.grid[2],
        blockDimX: shape.block[0],
        blockDimY: shape.block[1],
        blockDimZ: shape.block[2],
        sharedMemBytes: shape.shared_bytes,
        hStream: context.stream(),
        attrs: &raw mut early,
        numAttrs: shape.waits.into(),
    };
    // SAFETY: the driver copies the parameter and the attribute during the call; the rest is this
    // function's contract.
    unsafe {
        sys::cuLaunchKernelEx(
            &raw const config,
            function,
            arguments.as_mut_ptr(),
            std::ptr::null_mut(),
        )
    }
}

/// The driver's form of a map: TMA boxes of bytes in the swizzle of 128 bytes, zeros outside of the
/// tensor.
pub(super) fn tensor_map(map: &TensorMap) -> Result<MapWords> {
    let mut encoded = sys::CUtensorMap { opaque: [0; 16] };
    let extents = [map.row_bytes, map.rows, map.matrices];
    let strides = [map.row_stride, map.matrix_stride];
    let (box_extents, steps) = ([BOX_ROW_BYTES as u32, map.box_rows, 1], [1u32; 3]);
    // SAFETY: the arrays have as many elements as three axes ask for; the driver keeps none of
    // these addresses, and reads nothing at the tensor's.
    let result = unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut encoded,
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            extents.len() as u32,
            map.address as *mut c_void,
            extents.as_ptr(),
            strides.as_ptr(),
            box_extents.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            // A box takes 128 bytes of each row. Fetches of 256 bytes into L2 make the projection
            // of streams 9 % slower (174 us instead of 158), and change FP8 linear layers by 1 % in
            // either direction.
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    check(result, format_args!("cuTensorMapEncodeTiled({map:?})"))?;
    Ok(encoded.opaque)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_driver_is_read_from_either_kind_of_line() {
        let proprietary = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC: 12";
        let open =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build";
        assert_eq!(kernel_driver_version(proprietary), Some("535.183.01"));
        assert_eq!(kernel_driver_version(open), Some("580.95.05"));
        assert_eq!(kernel_driver_version(""), None);
    }

    #[test]
    fn the_id_of_a_device_is_written_as_nvidia_smi_does() {
        let bytes = [0xf6, 0x05, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 0xfe];
        assert_eq!(uuid_text(bytes), "GPU-f6050102-0304-0506-0708-090a0b0c0dfe");
    }

    #[test]
    fn a_machine_without_a_device_is_told_so() {
        match Context::open(u32::MAX) {
            Err(RuntimeError::BackendMissing { backend: "cuda", reason }) => {
                assert!(reason.contains("driver"), "{reason}");
            }
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("no machine has that many devices"),
        }
    }
}
