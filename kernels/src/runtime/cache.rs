//! Compiled modules on disk, keyed by everything that went into them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex};

use super::error::{Result, RuntimeError};
use super::source::SourceTree;

/// A directory of compiled modules. Two processes may share it: files appear whole or not at all.
#[derive(Clone, Debug)]
pub struct ModuleCache {
    dir: PathBuf,
}

impl ModuleCache {
    /// `PARITY_CACHE_DIR`, or `dsv4-parity` in the user's cache directory.
    pub fn default_dir() -> PathBuf {
        if let Some(dir) = std::env::var_os("PARITY_CACHE_DIR") {
            return dir.into();
        }
        let base = std::env::var_os("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")))
            .unwrap_or_else(std::env::temp_dir);
        base.join("dsv4-parity")
    }

    /// A cache in `dir`, created when first written.
    pub fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    /// blake3 of file name, source, the headers that it includes, defines, compiler version, options and target.
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
        part(file);
        part(tree.text(file)?);
        for header in tree.headers_of(file)? {
            part(header);
            part(tree.text(header)?);
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

    /// The path under which `key` is stored, if it is.
    pub fn find(&self, key: &str, extension: &str) -> Option<PathBuf> {
        let path = self.path(key, extension);
        path.is_file().then_some(path)
    }

    /// The path of the module under `key`, which `build` makes where there is none: once, however many threads of this
    /// process want it. Different modules are built at the same time.
    ///
    /// # Errors
    /// Those of `build` and of [`Self::store`]; the next call builds again.
    pub fn find_or_build(
        &self,
        key: &str,
        extension: &str,
        build: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<PathBuf> {
        if let Some(path) = self.find(key, extension) {
            return Ok(path);
        }
        static BUILDING: LazyLock<Mutex<HashMap<PathBuf, Arc<Mutex<()>>>>> = LazyLock::new(Mutex::default);
        let building = || BUILDING.lock().unwrap_or_else(|e| e.into_inner());
        let path = self.path(key, extension);
        let turn = building().entry(path.clone()).or_default().clone();
        let held = turn.lock().unwrap_or_else(|e| e.into_inner());
        let built = match self.find(key, extension) {
            Some(path) => Ok(path),
            None => build().and_then(|bytes| self.store(key, extension, &bytes)),
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
        let doing = || format!("writing the module cache {}", self.dir.display());
        std::fs::create_dir_all(&self.dir).map_err(|e| RuntimeError::system(doing(), e))?;
        // Written beside and renamed, so that another process never loads half a file.
        let mut file = tempfile::NamedTempFile::new_in(&self.dir).map_err(|e| RuntimeError::system(doing(), e))?;
        std::io::Write::write_all(&mut file, bytes).map_err(|e| RuntimeError::system(doing(), e))?;
        file.persist(&path).map_err(|e| RuntimeError::system(doing(), e.error))?;
        Ok(path)
    }
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
        let missing = || Err(RuntimeError::SourceMissing { file: "gone.cu".into(), tree: "a test".into() });
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
    fn a_header_changes_the_key_of_those_that_include_it_and_of_no_other() {
        let text = |text: &str| text.to_owned();
        let tree = SourceTree::from_files(
            "a test".into(),
            [
                (text("direct.cu"), text("#include \"inner.h\"\n")),
                (text("through.cu"), text("#include \"outer.h\"\n")),
                (text("without.cu"), text("// as inner.h has it\n#include <cstdint>\n")),
                (text("include/outer.h"), text("#pragma once\n  #include \"inner.h\"\n")),
                (text("include/inner.h"), text("constexpr int N = 1;\n")),
            ]
            .into(),
        )
        .expect("a tree");
        let changed = tree.with_text("include/inner.h", text("constexpr int N = 2;\n"), "a header");
        let key = |tree, file| ModuleCache::key(tree, file, &[], std::iter::empty(), "compiler").expect("a key");
        for (file, is_other) in [("direct.cu", true), ("through.cu", true), ("without.cu", false)] {
            assert_eq!(key(&tree, file) != key(&changed, file), is_other, "{file}");
        }
    }
}
