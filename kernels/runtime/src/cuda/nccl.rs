//! Collectives by NCCL, on the device's stream. The library is loaded where it is found.
//!
//! Types are cudarc's. Its own loader knows the library by names that the wheel does not have
//! (`libnccl.so.2` is the only file there) and panics without it, so functions are looked up here.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use cudarc::nccl::sys::{
    cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId,
};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::driver::Context;
use super::library::{Places, Wanted, loader_reason, search};
use crate::error::{Result, RuntimeError};
use crate::world::{Collective, Collectives, Span};

const NCCL: Wanted = Wanted {
    file: "libnccl.so",
    loader_names: &["libnccl.so.2", "libnccl.so"],
    variable: Some("PARITY_NCCL"),
    wheel_folders: &["nvidia/nccl/lib"],
};

/// Declares the functions of the library that are used, and looks them up.
macro_rules! functions {
    ($($name:ident = $symbol:literal ($($argument:ty),*) -> $result:ty;)*) => {
        /// The library's functions, and where it is.
        struct Functions {
            found: String,
            $($name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            fn of(library: &Library, found: String) -> std::result::Result<Self, libloading::Error> {
                // SAFETY: the types are those of NCCL's header, as cudarc has them.
                Ok(unsafe { Self { found, $($name: *library.get($symbol)?,)* } })
            }
        }
    };
}

functions! {
    get_version = b"ncclGetVersion" (*mut c_int) -> ncclResult_t;
    get_error_string = b"ncclGetErrorString" (ncclResult_t) -> *const c_char;
    get_unique_id = b"ncclGetUniqueId" (*mut ncclUniqueId) -> ncclResult_t;
    init_rank = b"ncclCommInitRank"
        (*mut ncclComm_t, c_int, ncclUniqueId, c_int) -> ncclResult_t;
    abort = b"ncclCommAbort" (ncclComm_t) -> ncclResult_t;
    group_start = b"ncclGroupStart" () -> ncclResult_t;
    group_end = b"ncclGroupEnd" () -> ncclResult_t;
    send = b"ncclSend" (*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t)
        -> ncclResult_t;
    receive = b"ncclRecv" (*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t)
        -> ncclResult_t;
    all_gather = b"ncclAllGather"
        (*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, cudaStream_t)
        -> ncclResult_t;
    reduce_scatter = b"ncclReduceScatter"
        (*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t)
        -> ncclResult_t;
    all_reduce = b"ncclAllReduce"
        (*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t)
        -> ncclResult_t;
}

/// The library's functions.
fn functions() -> Result<&'static Functions> {
    static FOUND: OnceLock<std::result::Result<Functions, String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| search(&NCCL, &Places::of_process(), open));
    found
        .as_ref()
        .map_err(|reason| RuntimeError::BackendMissing { backend: "nccl", reason: reason.clone() })
}

fn open(path: &Path) -> std::result::Result<Functions, String> {
    // SAFETY: loading runs the library's initialisers; a file by this name in CUDA's places, or the
    // one that the user names, is trusted to be NCCL.
    let library =
        unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(loader_reason)?;
    let functions =
        Functions::of(&library, path.display().to_string()).map_err(|error| error.to_string())?;
    // Its functions are used until the process ends.
    std::mem::forget(library);
    Ok(functions)
}

/// The version of the library, and where it was found.
///
/// # Errors
/// [`RuntimeError::BackendMissing`] that lists what was searched for.
pub fn find() -> Result<String> {
    let nccl = functions()?;
    let mut version = 0;
    // SAFETY: writes one live integer.
    nccl.check(unsafe { (nccl.get_version)(&mut version) }, "ncclGetVersion")?;
    let (major, minor, patch) = (version / 10_000, version / 100 % 100, version % 100);
    Ok(format!("NCCL {major}.{minor}.{patch}, {}", nccl.found))
}

impl Functions {
    fn check(&self, result: ncclResult_t, call: &str) -> Result<()> {
        if result == ncclResult_t::ncclSuccess {
            return Ok(());
        }
        // SAFETY: a static text of the library for every result.
        let text = unsafe { CStr::from_ptr((self.get_error_string)(result)) };
        let message = text.to_string_lossy().into_owned();
        Err(RuntimeError::Cuda { call: call.into(), name: format!("{result:?}"), message })
    }
}

/// A name for a new world, which its ranks give to [`Nccl::join`].
///
/// # Errors
/// As [`find`]; errors of the library.
pub fn name_of_world() -> Result<Vec<u8>> {
    let nccl = functions()?;
    let mut id = ncclUniqueId { internal: [0; 128] };
    // SAFETY: writes one live struct.
    nccl.check(unsafe { (nccl.get_unique_id)(&mut id) }, "ncclGetUniqueId")?;
    Ok(id.internal.iter().map(|&byte| byte as u8).collect())
}

/// A rank of a communicator.
pub(super) struct Nccl {
    nccl: &'static Functions,
    context: Arc<Context>,
    communicator: ncclComm_t,
}

// SAFETY: a communicator may be used from any thread, by one at a time; the process of a rank
// serves one request at a time, and every use makes the context current first.
unsafe impl Send for Nccl {}
// SAFETY: as above.
unsafe impl Sync for Nccl {}

impl Nccl {
    /// Joins the world of this name, and waits until all ranks have.
    ///
    /// # Errors
    /// A name that [`name_of_world`] did not make; as [`find`]; errors of the library.
    pub(super) fn join(
        context: &Arc<Context>,
        name: &[u8],
        rank: usize,
        size: usize,
    ) -> Result<Self> {
        let nccl = functions()?;
        let bytes: [u8; 128] = name.try_into().map_err(|_| {
            RuntimeError::argument("nccl", "name", format!("{} bytes, not 128", name.len()))
        })?;
        let id = ncclUniqueId { internal: bytes.map(|byte| byte as _) };
        let number = |value: usize| i32::try_from(value).unwrap_or(i32::MAX);
        context.enter()?;
        let mut communicator = std::ptr::null_mut();
        // SAFETY: the context of the rank's own GPU is current; writes one live handle.
        let result = unsafe { (nccl.init_rank)(&mut communicator, number(size), id, number(rank)) };
        nccl.check(result, "ncclCommInitRank")?;
        Ok(Self { nccl, context: context.clone(), communicator })
    }

    fn exchange(&self, sends: &[(usize, Span)], receives: &[(usize, Span)]) -> Result<()> {
        const BYTE: ncclDataType_t = ncclDataType_t::ncclUint8;
        let (nccl, to, stream) = (self.nccl, self.communicator, self.context.stream().cast());
        // SAFETY: the caller's addresses hold these elements; all calls are in one group.
        unsafe {
            nccl.check((nccl.group_start)(), "ncclGroupStart")?;
            let sent = sends.iter().try_for_each(|(peer, span)| {
                let from = span.address as *const _;
                let result = (nccl.send)(from, span.bytes(), BYTE, *peer as i32, to, stream);
                nccl.check(result, "ncclSend")
            });
            let received = receives.iter().try_for_each(|(peer, span)| {
                let into = span.address as *mut _;
                let result = (nccl.receive)(into, span.bytes(), BYTE, *peer as i32, to, stream);
                nccl.check(result, "ncclRecv")
            });
            // A group that has started is ended, whatever happened in it.
            let ended = nccl.check((nccl.group_end)(), "ncclGroupEnd");
            sent.and(received).and(ended)
        }
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        // SAFETY: made in `join`, ended only here. It does not wait for ranks that are gone.
        let _ = unsafe { (self.nccl.abort)(self.communicator) };
    }
}

impl Collectives for Nccl {
    fn enqueue(&self, collective: &Collective) -> Result<()> {
        const F32: ncclDataType_t = ncclDataType_t::ncclFloat32;
        const SUM: ncclRedOp_t = ncclRedOp_t::ncclSum;
        self.context.enter()?;
        let (nccl, with, stream) = (self.nccl, self.communicator, self.context.stream().cast());
        // SAFETY: the caller's addresses hold the elements of the spans for as long as the stream
        // works on them, and all ranks have agreed on their numbers and types.
        match collective {
            // Ranks have met on the host; work on the streams is ordered by other collectives.
            Collective::Barrier => self.context.synchronize(),
            Collective::AllGather { source, target } => nccl.check(
                unsafe {
                    (nccl.all_gather)(
                        source.address as *const _,
                        target.address as *mut _,
                        source.bytes(),
                        ncclDataType_t::ncclUint8,
                        with,
                        stream,
                    )
                },
                "ncclAllGather",
            ),
            Collective::ReduceScatter { source, target } => nccl.check(
                unsafe {
                    (nccl.reduce_scatter)(
                        source.address as *const _,
                        target.address as *mut _,
                        target.elements,
                        F32,
                        SUM,
                        with,
                        stream,
                    )
                },
                "ncclReduceScatter",
            ),
            Collective::AllReduce { buffer } => nccl.check(
                unsafe {
                    (nccl.all_reduce)(
                        buffer.address as *const _,
                        buffer.address as *mut _,
                        buffer.elements,
                        F32,
                        SUM,
                        with,
                        stream,
                    )
                },
                "ncclAllReduce",
            ),
            Collective::Exchange { sends, receives } => self.exchange(sends, receives),
        }
    }
}
