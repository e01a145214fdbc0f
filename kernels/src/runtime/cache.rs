//! Compiled modules on disk, keyed by everything that went into them.

use std::path::{Path, PathBuf};

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
    use super::*;

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
