//! The list of public kernels: a TOML file such as `fixtures/external/gallery.toml`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::operators::registry;
use crate::report::beside::Failure;

/// A library of kernels.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Library {
    /// As people write it.
    pub name: String,
    /// Where its source is.
    pub source: String,
    /// Python modules without which its workers cannot start.
    pub requires: Vec<String>,
    /// The distribution whose version is the library's, as `pip` names it.
    pub distribution: String,
}

/// A kernel of a library.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kernel {
    /// Its library's name.
    pub library: String,
    /// What it is, in a few words.
    pub name: String,
    /// The operator that it computes.
    pub operator: String,
    /// The worker's script with its arguments, in the list's folder.
    pub worker: String,
    /// Its adapter, in the list's folder.
    #[serde(default)]
    pub adapter: Option<String>,
    /// It has no gradients.
    #[serde(default)]
    pub forward_only: bool,
    /// What is known of it, for readers of a verdict that is not clean.
    #[serde(default)]
    pub note: Option<String>,
    /// First words of the works that time it, as `pairs.toml` names them on their side.
    #[serde(default)]
    pub times: Vec<String>,
}

impl Kernel {
    /// Its name in reports: the library, and what it is.
    pub fn title(&self) -> String {
        format!("{} {}", self.library, self.name)
    }

    /// A folder name: letters and digits of the title, with single dashes.
    pub fn folder(&self) -> String {
        let title = format!("{} {}", self.title(), self.operator).to_lowercase();
        let words =
            title.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
        words.collect::<Vec<_>>().join("-")
    }

    /// Whether one of these words is its library or its operator.
    pub fn is_among(&self, words: &[String]) -> bool {
        let same =
            |word: &String| word.eq_ignore_ascii_case(&self.library) || *word == self.operator;
        words.is_empty() || words.iter().any(same)
    }
}

/// The list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct List {
    folder: PathBuf,
    /// In the order of the file.
    pub libraries: Vec<Library>,
    /// In the order of the file.
    pub kernels: Vec<Kernel>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ListFile {
    library: Vec<Library>,
    kernel: Vec<Kernel>,
}

impl List {
    /// Reads the list.
    ///
    /// # Errors
    /// A file that cannot be read or parsed; a kernel of an unknown library or operator; a worker
    /// or an adapter that is not there; a library or a kernel that is listed twice.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let failed = |why: String| Failure::new(path, &why);
        let text = std::fs::read_to_string(path).map_err(|e| failed(e.to_string()))?;
        let file: ListFile = toml::from_str(&text).map_err(|e| failed(e.to_string()))?;
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        let list = Self { folder, libraries: file.library, kernels: file.kernel };
        list.check().map_err(failed)?;
        Ok(list)
    }

    fn check(&self) -> Result<(), String> {
        let mut names = BTreeSet::new();
        if let Some(twice) = self.libraries.iter().find(|library| !names.insert(&library.name)) {
            return Err(format!("library `{}` is listed twice", twice.name));
        }
        let mut folders = BTreeSet::new();
        for kernel in &self.kernels {
            let of = |why: String| format!("`{}`: {why}", kernel.title());
            if !names.contains(&kernel.library) {
                return Err(of(format!("there is no [[library]] `{}`", kernel.library)));
            }
            registry::find(&kernel.operator).map_err(|error| of(error.to_string()))?;
            if !folders.insert(kernel.folder()) {
                return Err(of(format!("{} is listed twice", kernel.operator)));
            }
            let script = kernel.worker.split_whitespace().next().unwrap_or_default();
            for file in [Some(script), kernel.adapter.as_deref()].into_iter().flatten() {
                if !self.file(file).is_file() {
                    return Err(of(format!("there is no {}", self.file(file).display())));
                }
            }
        }
        Ok(())
    }

    /// A file of the list's folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}
