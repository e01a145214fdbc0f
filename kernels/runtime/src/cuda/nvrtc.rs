//! NVRTC, CUDA's run-time compiler: found, loaded, and called for cubins. Needs no GPU.
//!
//! The functions are bound here and not through cudarc: its loader uses fixed names and could
//! return another library than the one found.

use std::borrow::Cow;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};

use super::library::{Places, Wanted, loader_reason, matching_entries, search};
use crate::cache::ModuleCache;
use crate::error::{Result, RuntimeError};
use crate::layouts::Layouts;
use crate::source::SourceTree;

const NVRTC: Wanted = Wanted {
    file: "libnvrtc.so",
    loader_names: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
    variable: Some("PARITY_NVRTC"),
    wheel_folders: &["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"],
};

/// Oldest release that supports `--std=c++20`.
const OLDEST_MAJOR: u32 = 12;

/// NVRTC's handle of one compilation.
type Program = *mut c_void;
/// `nvrtcResult`; 0 is success. An integer, since a newer release may add values.
type Status = c_int;
type SizeOf = unsafe extern "C" fn(Program, *mut usize) -> Status;
type ReadInto = unsafe extern "C" fn(Program, *mut c_char) -> Status;

#[derive(Clone, Copy)]
struct Functions {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    log_size: SizeOf,
    log: ReadInto,
    cubin_size: SizeOf,
    cubin: ReadInto,
}

/// A loaded NVRTC. The library stays loaded until the process ends.
#[derive(Clone)]
pub struct Nvrtc {
    functions: Functions,
    version: (u32, u32),
    path: PathBuf,
}

impl std::fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nvrtc")
            .field("version", &self.version)
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl Nvrtc {
    /// Looks for `libnvrtc` in `PARITY_NVRTC` (a file or a directory; if it is set, only there), in
    /// the CUDA toolkits (`CUDA_HOME`, `CUDA_PATH`, `/usr/local/cuda*`), on the loader's own path
    /// and in the `nvidia-cuda-nvrtc` wheel of the available Python environments.
    ///
    /// # Errors
    /// [`RuntimeError::BackendMissing`] that lists every place searched.
    pub fn load() -> Result<Self> {
        Self::load_from(&Places::of_process())
    }

    fn load_from(places: &Places) -> Result<Self> {
        search(&NVRTC, places, Self::open)
            .map_err(|reason| RuntimeError::BackendMissing { backend: "cuda", reason })
    }

    fn open(path: &Path) -> std::result::Result<Self, String> {
        // SAFETY: loading runs the library's initialisers; a file by this name in CUDA's places,
        // or one that the user named, is trusted to be NVRTC.
        let library =
            unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(loader_reason)?;
        // SAFETY: `Functions::bind` gives each symbol the type that nvrtc.h declares since 11.2.
        let functions = unsafe { Functions::bind(&library) }.map_err(loader_reason)?;
        // NVRTC does not support unloading, and `functions` must stay valid.
        std::mem::forget(library);
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are to live integers.
        let status = unsafe { (functions.version)(&mut major, &mut minor) };
        if status != 0 {
            return Err(format!("nvrtcVersion failed: {}", functions.error_name(status)));
        }
        let version = (u32::try_from(major).unwrap_or(0), u32::try_from(minor).unwrap_or(0));
        if version.0 < OLDEST_MAJOR {
            return Err(format!(
                "version {major}.{minor}, but {OLDEST_MAJOR}.0 or later is needed"
            ));
        }
        let path = functions.path().unwrap_or_else(|| path.to_path_buf());
        preload_builtins(&path, version);
        Ok(Self { functions, version, path })
    }

    /// Major and minor version, such as `(13, 0)`.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// The file that was loaded.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `NVRTC 13.0`, for reports.
    pub fn name(&self) -> String {
        format!("NVRTC {}.{}", self.version.0, self.version.1)
    }

    /// The inputs of a cached cubin other than its source and defines: compiler, options, target.
    ///
    /// NVRTC reports no patch version, so the size of its file is used instead.
    pub(super) fn cache_identity(&self, target: &str) -> String {
        let size = std::fs::metadata(&self.path).map_or(0, |file| file.len());
        let options = options(&[], target).unwrap_or_default().join(" ");
        format!("{} ({size} bytes) {options}", self.name())
    }

    /// The cache key of the cubin of a module.
    pub(super) fn cache_key(
        &self,
        tree: &SourceTree,
        file: &str,
        defines: &[(String, String)],
        target: &str,
    ) -> Result<String> {
        ModuleCache::key(tree, file, defines, std::iter::empty(), &self.cache_identity(target))
    }

    /// As [`Self::compile`], into a cache, where a device of this target finds it. That device
    /// needs the same NVRTC (release and file size), source, defines and options. `None` if the
    /// module was already there.
    ///
    /// # Errors
    /// Errors of [`Self::compile`]; a cache that cannot be written.
    pub fn compile_into(
        &self,
        cache: &ModuleCache,
        tree: &SourceTree,
        (file, defines): (&str, &[(String, String)]),
        target: &str,
    ) -> Result<Option<Compiled>> {
        let key = self.cache_key(tree, file, defines, target)?;
        if cache.find(&key, "cubin").is_some() {
            return Ok(None);
        }
        let compiled = self.compile(tree, file, defines, target)?;
        cache.store(&key, "cubin", &compiled.cubin)?;
        Ok(Some(compiled))
    }

    /// Compiles `file` of `tree` to a cubin for `target` (`sm_80`, `sm_90a`), which the source
    /// sees as `PARITY_SM` (80, 90). Headers come only from `tree`.
    ///
    /// # Errors
    /// [`RuntimeError::SourceMissing`]; [`RuntimeError::Compile`] with NVRTC's log.
    pub fn compile(
        &self,
        tree: &SourceTree,
        file: &str,
        defines: &[(String, String)],
        target: &str,
    ) -> Result<Compiled> {
        let layouts = Layouts::of(tree, file)?;
        let source = layouts.complete(tree.text(file)?);
        let headers: Vec<_> =
            tree.headers().map(|(name, text)| (name, layouts.complete(text))).collect();
        self.cubin((file, &source), &headers, defines, target).map_err(|log| {
            RuntimeError::Compile {
                compiler: self.name(),
                file: file.into(),
                defines: defines.iter().map(|(name, value)| format!(" -D{name}={value}")).collect(),
                log,
            }
        })
    }

    fn cubin(
        &self,
        (file, source): (&str, &str),
        headers: &[(&str, Cow<'_, str>)],
        defines: &[(String, String)],
        target: &str,
    ) -> std::result::Result<Compiled, String> {
        let options = Strings::new(options(defines, target)?.iter().map(String::as_str))?;
        let names = Strings::new(headers.iter().map(|(name, _)| *name))?;
        let texts = Strings::new(headers.iter().map(|(_, text)| text.as_ref()))?;
        let (source, file) = (c_string(source)?, c_string(file)?);
        let mut handle = std::ptr::null_mut();
        // SAFETY: every pointer is to a NUL-terminated string that lives past the call; NVRTC
        // copies them; `names` and `texts` have equally many entries.
        let status = unsafe {
            (self.functions.create)(
                &mut handle,
                source.as_ptr(),
                file.as_ptr(),
                texts.len(),
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        if status != 0 {
            return Err(format!(
                "nvrtcCreateProgram failed: {}",
                self.functions.error_name(status)
            ));
        }
        let program = OpenProgram { functions: self.functions, handle };
        // SAFETY: the program was created above; the options live past the call.
        let status =
            unsafe { (self.functions.compile)(program.handle, options.len(), options.as_ptr()) };
        if status != 0 {
            let log = program.log();
            let name = self.functions.error_name(status);
            return Err(if log.is_empty() { name } else { format!("{log}\n({name})") });
        }
        let cubin =
            program.read("nvrtcGetCUBIN", self.functions.cubin_size, self.functions.cubin)?;
        Ok(Compiled { cubin, remarks: program.log() })
    }
}

/// The result of a compilation.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// The device code.
    pub cubin: Vec<u8>,
    /// Remarks of the compiler: warnings, and losses of speed such as MMAs that it serialised.
    /// Usually empty.
    pub remarks: String,
}

/// NVRTC's options, exactly.
fn options(defines: &[(String, String)], target: &str) -> std::result::Result<Vec<String>, String> {
    let number = target.strip_prefix("sm_").unwrap_or_default();
    let number = number.trim_end_matches(|c: char| c.is_ascii_lowercase());
    if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!("target `{target}` is not of the form sm_90 or sm_90a"));
    }
    let mut options = vec![
        format!("--gpu-architecture={target}"),
        "--std=c++20".into(),
        "--device-as-default-execution-space".into(),
        format!("-DPARITY_SM={number}"),
    ];
    options.extend(defines.iter().map(|(name, value)| format!("-D{name}={value}")));
    Ok(options)
}

/// NVRTC opens `libnvrtc-builtins` by name at its first compilation. No search path leads to the
/// one next to a wheel's `libnvrtc`, but a library that is already loaded is found by that name.
fn preload_builtins(nvrtc: &Path, (major, minor): (u32, u32)) {
    let resolved = nvrtc.canonicalize().unwrap_or_else(|_| nvrtc.to_path_buf());
    let Some(dir) = resolved.parent() else { return };
    let exact = dir.join(format!("libnvrtc-builtins.so.{major}.{minor}"));
    let others = matching_entries(dir, "libnvrtc-builtins.so");
    for path in std::iter::once(exact).chain(others) {
        // SAFETY: as for NVRTC itself; the file is next to it and is part of it.
        match unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) } {
            Ok(library) => return std::mem::forget(library),
            Err(error) => tracing::debug!("{}: {}", path.display(), loader_reason(error)),
        }
    }
}

impl Functions {
    /// # Safety
    /// `library` is NVRTC, and stays loaded for as long as the result is used.
    unsafe fn bind(library: &Library) -> std::result::Result<Self, libloading::Error> {
        // SAFETY: the fields' types are those of nvrtc.h.
        unsafe {
            Ok(Self {
                version: *library.get(c"nvrtcVersion")?,
                error_string: *library.get(c"nvrtcGetErrorString")?,
                create: *library.get(c"nvrtcCreateProgram")?,
                destroy: *library.get(c"nvrtcDestroyProgram")?,
                compile: *library.get(c"nvrtcCompileProgram")?,
                log_size: *library.get(c"nvrtcGetProgramLogSize")?,
                log: *library.get(c"nvrtcGetProgramLog")?,
                cubin_size: *library.get(c"nvrtcGetCUBINSize")?,
                cubin: *library.get(c"nvrtcGetCUBIN")?,
            })
        }
    }

    fn error_name(&self, status: Status) -> String {
        // SAFETY: returns a static string, also for values it does not know.
        let text = unsafe { (self.error_string)(status) };
        if text.is_null() {
            return format!("nvrtcResult {status}");
        }
        // SAFETY: not null, and NUL-terminated as NVRTC documents.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// The file from which these functions were loaded; the loader chose it if only a name was
    /// given.
    fn path(&self) -> Option<PathBuf> {
        // SAFETY: `Dl_info` is plain pointers, for which zeros are valid.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: dladdr only looks the address up among the loaded objects.
        let found = unsafe { libc::dladdr(self.version as *const c_void, &mut info) };
        if found == 0 || info.dli_fname.is_null() {
            return None;
        }
        // SAFETY: the loader's own NUL-terminated name of an object that stays loaded.
        let name = unsafe { CStr::from_ptr(info.dli_fname) };
        Some(PathBuf::from(name.to_string_lossy().into_owned()))
    }
}

/// A created program; destroyed when dropped.
struct OpenProgram {
    functions: Functions,
    handle: Program,
}

impl OpenProgram {
    fn log(&self) -> String {
        match self.read("nvrtcGetProgramLog", self.functions.log_size, self.functions.log) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).trim_matches(['\0', '\n', ' ']).to_owned(),
            Err(error) => error,
        }
    }

    fn read(
        &self,
        call: &str,
        size_of: SizeOf,
        read_into: ReadInto,
    ) -> std::result::Result<Vec<u8>, String> {
        let failed = |status| format!("{call} failed: {}", self.functions.error_name(status));
        let mut size = 0;
        // SAFETY: the program is open and `size` is live.
        let status = unsafe { size_of(self.handle, &mut size) };
        if status != 0 {
            return Err(failed(status));
        }
        let mut bytes = vec![0u8; size];
        // SAFETY: NVRTC writes as many bytes as it reported just before.
        let status = unsafe { read_into(self.handle, bytes.as_mut_ptr().cast()) };
        if status != 0 { Err(failed(status)) } else { Ok(bytes) }
    }
}

impl Drop for OpenProgram {
    fn drop(&mut self) {
        // SAFETY: the handle was created and is destroyed once. A failure leaves only a leak.
        let _ = unsafe { (self.functions.destroy)(&mut self.handle) };
    }
}

/// An array of C strings, as C expects it.
struct Strings {
    pointers: Vec<*const c_char>,
    /// The strings that `pointers` point into; a `CString`'s buffer does not move with it.
    _owned: Vec<CString>,
}

impl Strings {
    fn new<'a>(texts: impl Iterator<Item = &'a str>) -> std::result::Result<Self, String> {
        let owned: Vec<CString> = texts.map(c_string).collect::<std::result::Result<_, _>>()?;
        Ok(Self { pointers: owned.iter().map(|text| text.as_ptr()).collect(), _owned: owned })
    }

    fn len(&self) -> c_int {
        c_int::try_from(self.pointers.len()).unwrap_or(c_int::MAX)
    }

    fn as_ptr(&self) -> *const *const c_char {
        self.pointers.as_ptr()
    }
}

fn c_string(text: &str) -> std::result::Result<CString, String> {
    CString::new(text).map_err(|error| format!("a NUL byte at offset {}", error.nul_position()))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::cuda::Missing;

    const SCALE: &str = r#"
#include "platform.h"
struct ScaleParams { const float* x; float* y; float factor; int64_t count; };
PARAMS_LAYOUT(ScaleParams, x, y, factor, count)
KERNEL(scale, ScaleParams, THREADS) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < params.count) params.y[i] = params.factor * params.x[i];
}
"#;

    /// `None`, and a line on stderr, if this machine has no NVRTC and none was required.
    fn nvrtc() -> Option<Nvrtc> {
        match Nvrtc::load() {
            Ok(nvrtc) => Some(nvrtc),
            Err(error) if std::env::var_os("PARITY_NVRTC").is_none() => {
                eprintln!("skipped: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn tree(text: &str) -> SourceTree {
        crate::testing::kernels().with_text("scale.cu", text.into(), "a test kernel")
    }

    fn threads(value: &str) -> Vec<(String, String)> {
        vec![("THREADS".into(), value.into())]
    }

    #[test]
    fn a_kernel_compiles_for_every_target_without_a_gpu() {
        let Some(nvrtc) = nvrtc() else { return };
        for target in ["sm_80", "sm_90a"] {
            let cubin = nvrtc
                .compile(&tree(SCALE), "scale.cu", &threads("256"), target)
                .expect("compiles")
                .cubin;
            assert!(cubin.starts_with(b"\x7fELF"));
            let holds = |name: &[u8]| cubin.windows(name.len()).any(|window| window == name);
            assert!(holds(b"scale_layout\0"), "{target}: the layout is not exported");
            assert_eq!(
                holds(b"scale_waits\0"),
                target == "sm_90a",
                "{target}: blocks that may come early wait"
            );
        }
    }

    #[test]
    fn products_that_the_compiler_serialises_are_remarked() {
        let Some(nvrtc) = nvrtc() else { return };
        const SHARED: &str = "hopper_attention.h";
        let defines = ["NOPE_DIM=448", "ROPE_DIM=64", "HEADS_PER_BLOCK=64"];
        let defines = defines.map(|define| define.split_once('=').expect("a value"));
        let defines = defines.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let remarks_of = |tree: &SourceTree| {
            nvrtc
                .compile(tree, "decode_attention_hopper.cu", &defines, "sm_90a")
                .expect("compiles")
                .remarks
        };
        let tree = crate::testing::kernels();
        assert_eq!(remarks_of(&tree), "");
        let text = tree.text(SHARED).expect("embedded");
        let fence = "    wgmma_fence();  // behind the wait's branch";
        assert_eq!(text.matches(fence).count(), 1);
        let without = text.replace(fence, "    //");
        let remarks = remarks_of(&crate::testing::kernels().with_text(
            SHARED,
            without,
            "a fence left to the compiler",
        ));
        assert!(remarks.contains("serialized"), "{remarks}");
    }

    #[test]
    fn modules_that_are_compiled_in_advance_lie_where_they_are_looked_for_and_are_compiled_once() {
        let Some(nvrtc) = nvrtc() else { return };
        let (dir, tree) = (tempfile::tempdir().unwrap(), tree(SCALE));
        let cache = ModuleCache::new(dir.path().to_owned());
        let modules = ["64", "128"].map(|value| ("scale.cu".to_owned(), threads(value)));
        let missing = ("missing.cu".to_owned(), Vec::new());
        let all = [&modules[..], &[missing]].concat();
        let stored = || {
            let missing = Missing::from(&cache, &tree, &all, "sm_90a").unwrap();
            let done = AtomicUsize::new(0);
            let count = || {
                done.fetch_add(1, Ordering::Relaxed);
            };
            assert_eq!((missing.compile(&count), done.into_inner()), (0, missing.count()));
            assert_eq!(Missing::from(&cache, &tree, &all, "sm_90a").unwrap().count(), 0);
            modules.each_ref().map(|(file, defines)| {
                let key = nvrtc.cache_key(&tree, file, defines, "sm_90a").unwrap();
                std::fs::metadata(cache.find(&key, "cubin").expect("a cubin"))
                    .unwrap()
                    .modified()
                    .unwrap()
            })
        };
        assert_eq!(stored(), stored(), "what is there stays as it is");
    }

    #[test]
    fn the_source_sees_the_target_as_a_number() {
        let Some(nvrtc) = nvrtc() else { return };
        let text = format!("#if PARITY_SM != 90\n#error not 90\n#endif\n{SCALE}");
        assert!(nvrtc.compile(&tree(&text), "scale.cu", &threads("256"), "sm_90a").is_ok());
        assert!(nvrtc.compile(&tree(&text), "scale.cu", &threads("256"), "sm_80").is_err());
    }

    #[test]
    fn a_compile_error_carries_the_log_and_the_defines() {
        let Some(nvrtc) = nvrtc() else { return };
        let text = SCALE.replace("params.factor", "params.fcator");
        let error =
            nvrtc.compile(&tree(&text), "scale.cu", &threads("64"), "sm_90a").expect_err("a typo");
        let text = error.to_string();
        for part in ["NVRTC", "scale.cu", " -DTHREADS=64", "fcator"] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        assert!(matches!(error, RuntimeError::Compile { log, .. } if log == log.trim()));
    }

    #[test]
    fn an_unknown_target_or_file_is_an_error() {
        let Some(nvrtc) = nvrtc() else { return };
        for target in ["sm_", "90", "sm_90-x", "sm_9999"] {
            let result = nvrtc.compile(&tree(SCALE), "scale.cu", &threads("64"), target);
            assert!(matches!(result, Err(RuntimeError::Compile { .. })), "{target}");
        }
        let result = nvrtc.compile(&tree(SCALE), "absent.cu", &[], "sm_80");
        assert!(matches!(result, Err(RuntimeError::SourceMissing { .. })));
    }

    #[test]
    fn a_nul_byte_in_a_source_is_a_compile_error() {
        let Some(nvrtc) = nvrtc() else { return };
        let error = nvrtc.compile(&tree("int a;\0"), "scale.cu", &[], "sm_80").expect_err("a NUL");
        assert!(error.to_string().contains("NUL byte at offset 6"), "{error}");
    }

    #[test]
    fn the_cache_identity_tells_targets_apart() {
        let Some(nvrtc) = nvrtc() else { return };
        let identity = nvrtc.cache_identity("sm_90a");
        assert!(
            identity.contains("NVRTC") && identity.contains("--gpu-architecture=sm_90a"),
            "{identity}"
        );
        assert_ne!(identity, nvrtc.cache_identity("sm_80"));
    }

    #[test]
    fn something_else_by_that_name_is_refused() {
        let error = Nvrtc::open(Path::new("libc.so.6")).expect_err("libc is not NVRTC");
        assert!(error.contains("nvrtcVersion"), "{error}");
    }
}
