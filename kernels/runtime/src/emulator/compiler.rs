//! The host's C++ compiler, which builds modules.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use tempfile::TempDir;

use super::coverage;
use super::pads::padded;
use crate::cache::ModuleCache;
use crate::error::{Result, RuntimeError};
use crate::layouts::Layouts;
use crate::process::variable;
use crate::source::{SourceTree, emulator_headers};
use crate::supervisor::run_within;
use crate::supervisor::temporary_folder;

/// Options for g++ and clang++ alike. No contraction: an fma is used only where the source has one.
const COMPILE_OPTIONS: &[&str] = &[
    "-std=c++20",
    "-g1",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    // An overrun of a local array within its function's frame aborts. A frame that is larger than
    // the stack's guard faults.
    "-fstack-protector-all",
    "-fstack-clash-protection",
    "-DPARITY_EMULATOR",
    "-DPARITY_SM=90",
];

/// Faults that end a launch, other than a wild address:
/// - an index outside an array whose size the compiler knows (a GPU silently reads or corrupts the
///   neighbour),
/// - an access through a pointer beyond the end of a variable, if the compiler knows which
///   variable,
/// - a shift by too many bits,
/// - an access through a pointer that is not aligned to its type, on which a GPU faults.
///
/// `emulator.h` defines what a failed check calls. Loads and stores are reported for `accesses` by
/// the instrumentation of the compiler's race detector, without its library.
const CHECKS_OF_GCC: &[&str] = &[
    "-fsanitize=bounds-strict,object-size,shift-exponent,alignment,thread",
    "-fno-sanitize-recover=all",
    "--param=tsan-instrument-func-entry-exit=0",
];
const CHECKS_OF_CLANG: &[&str] = &[
    "-fsanitize=bounds,object-size,shift-exponent,alignment,thread",
    "-fno-sanitize-recover=all",
    "-mllvm",
    "-tsan-instrument-func-entry-exit=0",
    "-mllvm",
    "-tsan-instrument-memintrinsics=0",
];

/// Local variables without a value hold a pattern (-1.7e38 as a float) instead of the old stack
/// contents, which are usually zero. So a sum that is never set to zero is visible in every run.
/// Compilers older than g++ 12 do not support it.
const LOCAL_POISON: &str = "-ftrivial-auto-var-init=pattern";

/// The options for the widest vectors of this machine, which hold eight elements of an MMA at once.
/// Only MMAs use them: in all other code they cost more than they save, because coroutines switch
/// there.
fn vector_options() -> &'static [&'static str] {
    #[cfg(target_arch = "x86_64")]
    {
        if std::arch::is_x86_feature_detected!("avx512f") {
            return &["-DPARITY_VECTORS=\"avx512f\""];
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            return &["-DPARITY_VECTORS=\"avx2\""];
        }
    }
    &[]
}

/// Kernels run as fast with -O1 as with -O2 (most of the time is spent on coroutine switches), and
/// compile in two thirds of the time. With -Og large ones run a fifth slower and compile in half of
/// that time. -Og suits the few runs of a mutant, and builds with debug assertions, such as tests.
fn optimisation(tree: &SourceTree) -> &'static str {
    if tree.is_patched() || cfg!(debug_assertions) { "-Og" } else { "-O1" }
}

/// The more optimized the assembly of two equivalent sources is, the more similar it is. Checks
/// stay, so that an access beyond an array is a difference. Source positions are omitted, which
/// their reports and a debugger would name.
const ASSEMBLY_OPTIONS: &[&str] =
    &["-O2", "-g0", "-fsanitize-undefined-trap-on-error", "-DEMULATOR_NAMES_NO_PLACES"];

/// `PARITY_CXX`, or `c++`.
pub fn usual_compiler() -> PathBuf {
    variable("PARITY_CXX").unwrap_or_else(|| "c++".into()).into()
}

/// The compiler, and the cache of what it built.
pub struct Compiler {
    path: PathBuf,
    /// The version that it reports.
    pub version: String,
    cache: ModuleCache,
    time_limit: Duration,
    poisons_locals: OnceLock<bool>,
    /// Where modules count their lines; `None`: they do not.
    coverage: Option<PathBuf>,
}

impl Compiler {
    /// The compiler at `path`, or `PARITY_CXX`, or `c++`. A module that takes longer than the limit
    /// does not compile. Modules count their lines in the folder `coverage`, where it is given.
    ///
    /// # Errors
    /// [`RuntimeError::BackendMissing`] if it cannot run, or cannot count; a folder that cannot be
    /// made.
    pub fn new(
        cache: ModuleCache,
        path: Option<PathBuf>,
        time_limit: Duration,
        coverage: Option<&Path>,
    ) -> Result<Self> {
        let path = path.unwrap_or_else(usual_compiler);
        let version = compiler_version(&path)?;
        if let Some(folder) = coverage {
            coverage::require(&path, &version)?;
            std::fs::create_dir_all(folder)
                .map_err(|e| RuntimeError::system(format!("making {}", folder.display()), e))?;
        }
        let coverage = coverage.map(Path::to_path_buf);
        Ok(Self { path, version, cache, time_limit, poisons_locals: OnceLock::new(), coverage })
    }

    /// The shared library of a kernel file, built if it is not in the cache.
    ///
    /// # Errors
    /// Errors of the compiler and of the system.
    pub fn build(
        &self,
        tree: &SourceTree,
        file: &str,
        defines: &[(String, String)],
    ) -> Result<PathBuf> {
        let headers = emulator_headers();
        let identity = format!("{} {}", self.version, self.options(tree).join(" "));
        let extra = headers.iter().map(|(name, text)| (name.as_str(), text.as_str()));
        let key = ModuleCache::key(tree, file, defines, extra, &identity)?;
        let Some(folder) = &self.coverage else {
            return self.cache.find_or_build(&key, "so", || {
                let scratch = sources_of(tree, file, &headers)?;
                self.compile(scratch.path(), tree, file, defines, MODULE)
            });
        };
        let name = coverage::name(file, &key);
        let notes = format!("{name}.gcno");
        let made_here = Cell::new(false);
        let module = self.cache.find_or_build(&key, "so", || {
            let scratch = sources_of(tree, file, &headers)?;
            let module = self.compile(scratch.path(), tree, file, defines, &name)?;
            let made = std::fs::read(scratch.path().join(&notes))
                .and_then(|bytes| std::fs::write(folder.join(&notes), &bytes).map(|()| bytes))
                .map_err(|e| RuntimeError::system(format!("keeping {notes}"), e))?;
            self.cache.store(&key, "gcno", &made)?;
            made_here.set(true);
            Ok(module)
        })?;
        if !made_here.get() {
            // Stored before the module was.
            let stored = self.cache.find(&key, "gcno");
            let stored = stored.ok_or_else(|| {
                let lost =
                    std::io::Error::other("the cache of modules has lost it: empty the cache");
                RuntimeError::system(format!("reading {notes}"), lost)
            })?;
            std::fs::copy(stored, folder.join(&notes))
                .map_err(|e| RuntimeError::system(format!("keeping {notes}"), e))?;
        }
        Ok(module)
    }

    /// The assembly of a kernel file. It is the same for two trees only if their modules do the
    /// same.
    ///
    /// # Errors
    /// Errors of the compiler and of the system.
    pub fn assembly(
        &self,
        tree: &SourceTree,
        file: &str,
        defines: &[(String, String)],
    ) -> Result<Vec<u8>> {
        let headers = emulator_headers();
        let options = [&self.options(tree)[1..], ASSEMBLY_OPTIONS].concat();
        let identity = format!("{} {} -S", self.version, options.join(" "));
        let extra = headers.iter().map(|(name, text)| (name.as_str(), text.as_str()));
        let key = ModuleCache::key(tree, file, defines, extra, &identity)?;
        let path = self.cache.find_or_build(&key, "s", || {
            let scratch = sources_of(tree, file, &headers)?;
            let assembly = format!("{MODULE}.s");
            self.assemble(scratch.path(), &options, file, defines, &assembly)?;
            std::fs::read(scratch.path().join(assembly))
                .map_err(|e| RuntimeError::system("reading the assembly", e))
        })?;
        std::fs::read(&path)
            .map_err(|e| RuntimeError::system(format!("reading {}", path.display()), e))
    }

    /// All options of a module of `tree`; the first one is the optimization level.
    fn options(&self, tree: &SourceTree) -> Vec<&'static str> {
        let checks = if self.version.contains("clang") { CHECKS_OF_CLANG } else { CHECKS_OF_GCC };
        let checks = if self.coverage.is_some() { coverage::OPTIONS } else { checks };
        let poison = self.poisons_locals().then_some(LOCAL_POISON);
        let fixed = COMPILE_OPTIONS.iter().chain(vector_options()).chain(checks).copied();
        [optimisation(tree)].into_iter().chain(fixed).chain(poison).collect()
    }

    /// Whether the compiler supports [`LOCAL_POISON`].
    fn poisons_locals(&self) -> bool {
        *self.poisons_locals.get_or_init(|| {
            let Ok(scratch) = temporary_folder("compile-") else { return false };
            let mut empty = Command::new(&self.path);
            empty
                .args([LOCAL_POISON, "-fsyntax-only", "-x", "c++", "/dev/null"])
                .current_dir(scratch.path());
            matches!(run_within(&empty, self.time_limit), Ok(Some(ended)) if ended.status.success())
        })
    }

    /// Compiles a module in a folder of its sources.
    fn compile(
        &self,
        scratch: &Path,
        tree: &SourceTree,
        file: &str,
        defines: &[(String, String)],
        name: &str,
    ) -> Result<Vec<u8>> {
        let library = self.run_compiler(scratch, &self.options(tree), file, defines, name)?;
        let module = std::fs::read(&library)
            .map_err(|e| RuntimeError::system("reading the compiled module", e))?;
        if !module.starts_with(b"\x7fELF") {
            let log = format!(
                "it reported success, and the {} bytes that it wrote are no shared library",
                module.len()
            );
            return Err(self.refused(file, defines, log));
        }
        Ok(module)
    }

    fn refused(&self, file: &str, defines: &[(String, String)], log: String) -> RuntimeError {
        RuntimeError::Compile {
            compiler: self.version.clone(),
            file: file.to_owned(),
            defines: defines.iter().map(|(name, value)| format!(" -D{name}={value}")).collect(),
            log,
        }
    }

    /// Compiles, pads the static shared variables, assembles, and links without the options of the
    /// checks, so that the compiler adds no library for them.
    fn run_compiler(
        &self,
        scratch: &Path,
        options: &[&str],
        file: &str,
        defines: &[(String, String)],
        name: &str,
    ) -> Result<PathBuf> {
        let assembly = format!("{name}.s");
        self.assemble(scratch, options, file, defines, &assembly)?;
        let assembly = scratch.join(assembly);
        std::fs::read_to_string(&assembly)
            .and_then(|text| std::fs::write(&assembly, padded(&text)))
            .map_err(|e| RuntimeError::system("padding what the compiler wrote", e))?;
        let mut link = Command::new(&self.path);
        self.run(
            link.arg("-shared")
                // The functions that write the counts.
                .args(self.coverage.is_some().then_some("--coverage"))
                .arg(&assembly)
                .args(["-o", "module.so"])
                .current_dir(scratch),
            file,
            defines,
        )?;
        Ok(scratch.join("module.so"))
    }

    /// Compiles a file of `scratch` to `assembly` in the same folder.
    fn assemble(
        &self,
        scratch: &Path,
        options: &[&str],
        file: &str,
        defines: &[(String, String)],
        assembly: &str,
    ) -> Result<()> {
        let mut compile = Command::new(&self.path);
        compile.args(options).args(defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        compile.args(["-I.", "-x", "c++", "-S", file, "-o", assembly]).current_dir(scratch);
        self.run(&compile, file, defines)
    }

    fn run(&self, command: &Command, file: &str, defines: &[(String, String)]) -> Result<()> {
        let ended = run_within(command, self.time_limit)
            .map_err(|e| RuntimeError::system(format!("running {}", self.path.display()), e))?;
        match ended {
            Some(ended) if ended.status.success() => Ok(()),
            Some(ended) => Err(self.refused(file, defines, ended.words.trim().to_owned())),
            None => {
                let seconds = self.time_limit.as_secs_f64();
                Err(self.refused(file, defines, format!("it did not end within {seconds} s")))
            }
        }
    }
}

/// The name of the compiler's output file, in the folder of its sources, without its end.
const MODULE: &str = "module";

/// A folder with a kernel file and every header.
fn sources_of(
    tree: &SourceTree,
    file: &str,
    headers: &BTreeMap<String, String>,
) -> Result<TempDir> {
    let scratch = temporary_folder("compile-")
        .map_err(|e| RuntimeError::system("making a scratch directory", e))?;
    let write = |name: &str, text: &str| {
        std::fs::write(scratch.path().join(name), text)
            .map_err(|e| RuntimeError::system(format!("writing {name} for the compiler"), e))
    };
    let layouts = Layouts::of(tree, file)?;
    for (name, text) in tree.headers() {
        write(name, &layouts.complete(text))?;
    }
    for (name, text) in headers {
        write(name, text)?;
    }
    write(file, &layouts.complete(tree.text(file)?))?;
    Ok(scratch)
}

/// First line of `c++ --version`.
fn compiler_version(compiler: &Path) -> Result<String> {
    let missing = |why: String| RuntimeError::BackendMissing {
        backend: "emulator",
        reason: format!(
            "it needs a C++20 compiler; `{}` {why}. Install g++ or clang++, or set PARITY_CXX",
            compiler.display()
        ),
    };
    let output = Command::new(compiler)
        .arg("--version")
        .output()
        .map_err(|e| missing(format!("could not be run ({e})")))?;
    if !output.status.success() {
        return Err(missing(format!("answered {} to --version", output.status)));
    }
    Ok(String::from_utf8_lossy(&output.stdout)
        .lines()
        .next()
        .unwrap_or("unknown")
        .trim()
        .to_owned())
}
