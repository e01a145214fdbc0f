//! Compiled modules on disk, with a key from all inputs of the compilation.

use std::collections::HashMap;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, Once, OnceLock};

use super::error::{Result, RuntimeError};
use super::layouts::Layouts;
use super::process::variable;
use super::source::SourceTree;
use super::supervisor::temporary_folder;

/// A directory of compiled modules. Several processes may share it: files appear complete or not at
/// all, and a file that is not as it was stored is built again.
#[derive(Clone, Debug)]
pub struct ModuleCache {
    dir: PathBuf,
}

impl ModuleCache {
    /// `PARITY_CACHE_DIR`, or `dsv4-parity` in the user's cache directory, or a private folder of
    /// the user in the folder for temporary files.
    pub fn default_dir() -> PathBuf {
        if let Some(dir) = variable("PARITY_CACHE_DIR") {
            // The loader searches for a library whose path has no folder.
            return std::path::absolute(&dir).unwrap_or(dir.into());
        }
        let base = variable("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .or_else(|| variable("HOME").map(|home| Path::new(&home).join(".cache")))
            .filter(|base| base.is_absolute());
        base.map_or_else(|| own_dir(&std::env::temp_dir()), |base| base.join("dsv4-parity"))
    }

    /// A cache in `dir`, created at the first write.
    pub fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    /// blake3 of file name, source, the headers that it includes, defines, compiler version,
    /// options and target.
    pub fn key<'a>(
        tree: &'a SourceTree,
        file: &str,
        defines: &[(String, String)],
        extra_headers: impl Iterator<Item = (&'a str, &'a str)>,
        compiler_and_target: &str,
    ) -> Result<String> {
        let mut hasher = blake3::Hasher::new();
        let mut part = |text: &str| {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        };
        let layouts = Layouts::of(tree, file)?;
        part(file);
        part(&layouts.complete(tree.text(file)?));
        for header in tree.headers_of(file)? {
            part(header);
            part(&layouts.complete(tree.text(header)?));
        }
        for (name, text) in extra_headers {
            part(name);
            part(text);
        }
        for (name, value) in defines {
            part(name);
            part(value);
        }
        part(compiler_and_target);
        Ok(hasher.finalize().to_hex().to_string())
    }

    /// The path under which `key` is stored, if it is present and unchanged.
    pub fn find(&self, key: &str, extension: &str) -> Option<PathBuf> {
        let path = self.path(key, extension);
        let bytes = std::fs::read(&path).ok()?;
        if std::fs::read_to_string(digest_path(&path))
            .is_ok_and(|digest| digest == digest_of(&bytes))
        {
            return Some(path);
        }
        static SAID: Once = Once::new();
        SAID.call_once(|| {
            tracing::warn!(
                "{} is not what was stored there: it is built again, as every such module",
                path.display()
            );
        });
        None
    }

    /// The path of the module under `key`, which `build` makes if it is absent. It is built once,
    /// for any number of threads of this process. Different modules are built at the same time. A
    /// module that cannot be stored goes to a folder that only this process uses.
    ///
    /// # Errors
    /// Errors of `build`, after which the next call builds again; errors of the folder for
    /// temporary files.
    pub fn find_or_build(
        &self,
        key: &str,
        extension: &str,
        build: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<PathBuf> {
        if let Some(path) = self.find(key, extension) {
            return Ok(path);
        }
        static BUILDING: LazyLock<Mutex<HashMap<PathBuf, Arc<Mutex<()>>>>> =
            LazyLock::new(Mutex::default);
        let building = || BUILDING.lock().unwrap_or_else(|e| e.into_inner());
        let path = self.path(key, extension);
        let turn = building().entry(path.clone()).or_default().clone();
        let held = turn.lock().unwrap_or_else(|e| e.into_inner());
        let built = match self.find(key, extension) {
            Some(path) => Ok(path),
            None => build().and_then(|bytes| {
                self.store(key, extension, &bytes)
                    .or_else(|e| keep_here(key, extension, &bytes, &e))
            }),
        };
        drop(held);
        building().remove(&path);
        built
    }

    fn path(&self, key: &str, extension: &str) -> PathBuf {
        self.dir.join(format!("{key}.{extension}"))
    }

    /// Stores bytes under `key` and returns their path.
    ///
    /// # Errors
    /// [`RuntimeError::System`] when the directory cannot be written.
    pub fn store(&self, key: &str, extension: &str, bytes: &[u8]) -> Result<PathBuf> {
        let path = self.path(key, extension);
        let doing =
            |e| RuntimeError::system(format!("writing the module cache {}", self.dir.display()), e);
        std::fs::create_dir_all(&self.dir).map_err(doing)?;
        // The digest first: a reader that finds the module also finds its digest.
        write_whole(&self.dir, &digest_path(&path), digest_of(bytes).as_bytes()).map_err(doing)?;
        write_whole(&self.dir, &path, bytes).map_err(doing)?;
        Ok(path)
    }
}

/// Writes to a temporary file and renames it, so that another process never loads half a file.
fn write_whole(dir: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = tempfile::NamedTempFile::new_in(dir)?;
    file.write_all(bytes)?;
    file.persist(path).map_err(|e| e.error).map(drop)
}

/// The path of the digest of a stored module.
fn digest_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".blake3");
    name.into()
}

fn digest_of(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}

/// Keeps a module that cannot be stored, for this process only.
fn keep_here(key: &str, extension: &str, bytes: &[u8], why: &RuntimeError) -> Result<PathBuf> {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        tracing::warn!("{why}; modules that cannot be kept are compiled again by the next run")
    });
    let doing = |e| RuntimeError::system("keeping a compiled module", e);
    static DIR: OnceLock<tempfile::TempDir> = OnceLock::new();
    let dir = match DIR.get() {
        Some(dir) => dir,
        None => {
            let made = temporary_folder("modules-").map_err(doing)?;
            DIR.get_or_init(|| made)
        }
    };
    let path = dir.path().join(format!("{key}.{extension}"));
    write_whole(dir.path(), &path, bytes).map_err(doing)?;
    Ok(path)
}

/// This user's private folder within one that every user may write to. A folder of another user
/// could hold anything.
fn own_dir(shared: &Path) -> PathBuf {
    // SAFETY: geteuid has no preconditions.
    let user = unsafe { libc::geteuid() };
    let dir = shared.join(format!("dsv4-parity-{user}"));
    let made = std::fs::DirBuilder::new().mode(0o700).create(&dir);
    let is_own = |found: std::fs::Metadata| {
        found.is_dir() && found.uid() == user && found.mode() & 0o077 == 0
    };
    if made.is_ok() || std::fs::symlink_metadata(&dir).is_ok_and(is_own) {
        return dir;
    }
    tracing::warn!(
        "{} is not this user's alone: modules are compiled again by the next run",
        dir.display()
    );
    // If no folder can be made, storing fails and reports it.
    temporary_folder("modules-").map_or(dir, tempfile::TempDir::keep)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_module_that_several_threads_want_is_built_once_and_one_that_failed_again() {
        let dir = tempfile::tempdir().expect("a scratch directory");
        let cache = ModuleCache::new(dir.path().to_owned());
        let built = AtomicUsize::new(0);
        let build = || {
            built.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(20));
            Ok(vec![1])
        };
        let missing =
            || Err(RuntimeError::SourceMissing { file: "gone.cu".into(), tree: "a test".into() });
        assert!(cache.find_or_build("key", "so", missing).is_err());
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| cache.find_or_build("key", "so", build).expect("a module"));
            }
        });
        cache.find_or_build("other", "so", build).expect("a module");
        assert_eq!(built.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn a_module_that_is_not_as_it_was_stored_is_built_again_whatever_became_of_it() {
        let dir = tempfile::tempdir().expect("a scratch directory");
        let cache = ModuleCache::new(dir.path().to_owned());
        let module: Vec<u8> = (0..200).collect();
        let build = || cache.find_or_build("key", "so", || Ok(module.clone())).expect("a module");
        let path = build();
        let unused = || -> Result<Vec<u8>> { panic!("it is there") };
        assert_eq!(cache.find_or_build("key", "so", unused).expect("a module"), path);
        let corrupted: [&dyn Fn(); 5] = [
            &|| std::fs::write(&path, &module[..100]).unwrap(),
            &|| std::fs::write(&path, b"").unwrap(),
            &|| {
                std::fs::write(&path, module.iter().map(|byte| byte ^ 1).collect::<Vec<_>>())
                    .unwrap()
            },
            &|| std::fs::remove_file(digest_path(&path)).unwrap(),
            &|| std::fs::write(digest_path(&path), "no digest").unwrap(),
        ];
        for (number, spoil) in corrupted.iter().enumerate() {
            spoil();
            assert_eq!(cache.find("key", "so"), None, "corrupted in way {number}");
            assert_eq!(std::fs::read(build()).unwrap(), module);
        }
        for at in 0..module.len() {
            let mut damaged = module.clone();
            damaged[at] ^= 1;
            std::fs::write(&path, damaged).unwrap();
            assert_eq!(cache.find("key", "so"), None, "byte {at}");
        }
        println!("attack: {} corrupted modules", corrupted.len() + module.len());
    }

    #[test]
    fn a_module_that_cannot_be_kept_is_there_all_the_same() {
        let dir = tempfile::tempdir().expect("a scratch directory");
        let blocked = dir.path().join("a file");
        std::fs::write(&blocked, b"").unwrap();
        let cache = ModuleCache::new(blocked.join("within a file"));
        assert!(cache.store("key", "so", b"module").is_err());
        let path = cache.find_or_build("key", "so", || Ok(b"module".into())).expect("a module");
        assert_eq!(std::fs::read(path).unwrap(), b"module");
    }

    #[test]
    fn a_folder_that_is_not_the_users_own_is_not_used() {
        use std::os::unix::fs::PermissionsExt as _;
        let shared = tempfile::tempdir().expect("a scratch directory");
        let own = own_dir(shared.path());
        assert!(own.starts_with(shared.path()), "{}", own.display());
        assert_eq!(std::fs::metadata(&own).unwrap().mode() & 0o777, 0o700);
        assert_eq!(own_dir(shared.path()), own);
        std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o770)).unwrap();
        let other = own_dir(shared.path());
        assert!(!other.starts_with(shared.path()), "{}", other.display());
        std::fs::remove_dir(&other).unwrap();
        std::fs::remove_dir(&own).unwrap();
        std::os::unix::fs::symlink("/", &own).unwrap();
        let other = own_dir(shared.path());
        assert!(!other.starts_with(shared.path()), "{}", other.display());
        std::fs::remove_dir(&other).unwrap();
    }

    #[test]
    fn a_header_changes_the_key_of_those_that_include_it_and_of_no_other() {
        let text = |text: &str| text.to_owned();
        let tree = SourceTree::from_files(
            "a test".into(),
            [
                (text("direct.cu"), text("#include \"inner.h\"\n")),
                (text("through.cu"), text("#include \"outer.h\"\n")),
                (text("without.cu"), text("// as inner.h has it\n#include <cstdint>\n/*\n#include \"inner.h\"\n*/ // \\\n#include \"inner.h\"\n")),
                (text("spaced.cu"), text("#  include \"inner.h\"\n")),
                (text("angles.cu"), text("#include <inner.h>\n")),
                (text("behind.cu"), text("/* a\n comment */ # /* another */ include/**/\"inner.h\"\n")),
                (text("macro.cu"), text("#define HEADER \"inner.h\"\n#include HEADER\n")),
                (text("digraph.cu"), text("%: include \"inner.h\"\n")),
                (text("broken.cu"), text("#inc\\\nlude \"in\\\nner.h\"\n")),
                (text("folder.cu"), text("#include \"./inner.h\"\n")),
                (text("quotes.cu"), text("const char* open = \"/*\"; char quote = '\"';\nint n = 1'000;\n#include \"inner.h\"\n")),
                (text("raw.cu"), text("const char* raw = R\"x(\" /* )\" )x\";\n#include \"inner.h\"\n")),
                (text("outer.h"), text("#pragma once\n  #include \"inner.h\"\n")),
                (text("inner.h"), text("constexpr int N = 1;\n")),
            ]
            .into(),
        )
        .expect("a tree");
        let changed = tree.with_text("inner.h", text("constexpr int N = 2;\n"), "a header");
        let key = |tree, file| {
            ModuleCache::key(tree, file, &[], std::iter::empty(), "compiler").expect("a key")
        };
        let files: Vec<_> = tree.kernel_files().collect();
        assert_eq!(files.len(), 12);
        for file in files {
            let is_other = file != "without.cu";
            assert_eq!(key(&tree, file) != key(&changed, file), is_other, "{file}");
        }
    }
}
