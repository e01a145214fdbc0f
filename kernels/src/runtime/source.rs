//! Trees of kernel sources: embedded in the binary, read from a directory, patched by a mutant.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use include_dir::{Dir, include_dir};

use super::error::{Result, RuntimeError};

static EMBEDDED_KERNELS: Dir<'static> = include_dir!("$CARGO_MANIFEST_DIR/cuda");
static EMBEDDED_EMULATOR: Dir<'static> = include_dir!("$CARGO_MANIFEST_DIR/emulator");

/// The sources of `kernels/cuda`: `*.cu` and `include/*.h`, by their path within that folder.
#[derive(Clone, Debug)]
pub struct SourceTree {
    origin: String,
    directory: Option<PathBuf>,
    files: BTreeMap<String, String>,
    /// Whether a text was replaced in memory.
    patched: bool,
}

impl SourceTree {
    /// The sources that this binary was built with.
    pub fn embedded() -> Self {
        let mut files = BTreeMap::new();
        collect_embedded(&EMBEDDED_KERNELS, &mut files);
        Self { origin: "the embedded kernels".into(), directory: None, files, patched: false }
    }

    /// The sources in a directory laid out as `kernels/cuda` is.
    ///
    /// # Errors
    /// [`RuntimeError::System`] when it cannot be read, [`RuntimeError::SourceMissing`] when it holds no `*.cu`.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let mut files = BTreeMap::new();
        read_sources(dir, "", &mut files)?;
        let include = dir.join("include");
        if include.is_dir() {
            read_sources(&include, "include/", &mut files)?;
        }
        let tree = Self::from_files(dir.display().to_string(), files)?;
        Ok(Self { directory: Some(dir.to_owned()), ..tree })
    }

    /// A tree from texts already in memory (another revision's, read from git objects).
    ///
    /// # Errors
    /// [`RuntimeError::SourceMissing`] when no file ends in `.cu`.
    pub fn from_files(origin: String, files: BTreeMap<String, String>) -> Result<Self> {
        if !files.keys().any(|name| name.ends_with(".cu")) {
            return Err(RuntimeError::SourceMissing { file: "*.cu".into(), tree: origin });
        }
        Ok(Self { origin, directory: None, files, patched: false })
    }

    /// Where the tree comes from, for messages.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// The directory that holds exactly these sources, if there is one.
    pub fn directory(&self) -> Option<&Path> {
        self.directory.as_deref()
    }

    /// Every file, by its path within the tree.
    pub fn files(&self) -> &BTreeMap<String, String> {
        &self.files
    }

    /// The text of one file.
    ///
    /// # Errors
    /// [`RuntimeError::SourceMissing`].
    pub fn text(&self, file: &str) -> Result<&str> {
        self.files
            .get(file)
            .map(String::as_str)
            .ok_or_else(|| RuntimeError::SourceMissing { file: file.into(), tree: self.origin.clone() })
    }

    /// The same tree with one file's text replaced; `origin` names the change.
    pub fn with_text(&self, file: &str, text: String, change: &str) -> Self {
        let mut files = self.files.clone();
        files.insert(file.into(), text);
        Self { origin: format!("{} with {change}", self.origin), directory: None, files, patched: true }
    }

    /// Whether it exists in this process alone, as a mutant's does: what is built of it runs a few times.
    pub fn is_patched(&self) -> bool {
        self.patched
    }

    /// The headers, by the name that `#include` uses.
    pub fn headers(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files.iter().filter_map(|(path, text)| Some((path.strip_prefix("include/")?, text.as_str())))
    }

    /// The headers of this tree that `file` includes, itself or through others, by their path within the tree and in
    /// the order in which they are met.
    ///
    /// # Errors
    /// [`RuntimeError::SourceMissing`] for a `file` that is not in the tree. Headers from elsewhere are passed over.
    pub fn headers_of(&self, file: &str) -> Result<Vec<&str>> {
        let mut found: Vec<&str> = Vec::new();
        let mut pending = vec![self.text(file)?];
        while let Some(text) = pending.pop() {
            let directives = text.lines().filter_map(|line| line.trim_start().strip_prefix("#include"));
            for name in directives.filter_map(|directive| directive.split('"').nth(1)) {
                if let Some((path, text)) = self.files.get_key_value(&format!("include/{name}"))
                    && !found.contains(&path.as_str())
                {
                    found.push(path);
                    pending.push(text);
                }
            }
        }
        Ok(found)
    }

    /// The kernel files (`*.cu`), sorted.
    pub fn kernel_files(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str).filter(|name| name.ends_with(".cu"))
    }

    /// blake3 over every path and text: the identity of the kernels that ran.
    pub fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for (path, text) in &self.files {
            hasher.update(path.as_bytes()).update(&[0]).update(text.as_bytes()).update(&[0]);
        }
        hasher.finalize().to_hex().to_string()
    }
}

/// The emulator's own headers, which belong to the runtime and not to a kernel tree.
pub(crate) fn emulator_headers() -> BTreeMap<String, String> {
    let mut files = BTreeMap::new();
    collect_embedded(&EMBEDDED_EMULATOR, &mut files);
    files
}

fn collect_embedded(dir: &Dir<'static>, files: &mut BTreeMap<String, String>) {
    for file in dir.files() {
        if let Some(text) = file.contents_utf8() {
            files.insert(file.path().display().to_string(), text.to_owned());
        }
    }
    for sub in dir.dirs() {
        collect_embedded(sub, files);
    }
}

fn read_sources(dir: &Path, prefix: &str, files: &mut BTreeMap<String, String>) -> Result<()> {
    let doing = || format!("reading kernel sources in {}", dir.display());
    for entry in std::fs::read_dir(dir).map_err(|e| RuntimeError::system(doing(), e))? {
        let path = entry.map_err(|e| RuntimeError::system(doing(), e))?.path();
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        if path.is_file() && (name.ends_with(".cu") || name.ends_with(".h")) {
            let text = std::fs::read_to_string(&path)
                .map_err(|e| RuntimeError::system(format!("reading {}", path.display()), e))?;
            files.insert(format!("{prefix}{name}"), text);
        }
    }
    Ok(())
}
