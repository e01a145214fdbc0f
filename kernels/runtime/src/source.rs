//! Trees of kernel sources: read from a directory, embedded in a binary, patched by a mutant.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use include_dir::{Dir, include_dir};
use serde::{Deserialize, Serialize};

use super::error::{Result, RuntimeError};

static EMBEDDED_EMULATOR: Dir<'static> = include_dir!("$CARGO_MANIFEST_DIR/emulator");

/// A module: the kernel file and the defines that it is compiled with.
pub type Module = (String, Vec<(String, String)>);

/// The module of `file` with these defines.
pub fn module(file: &str, defines: &[(&str, String)]) -> Module {
    (
        file.to_owned(),
        defines.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect(),
    )
}

/// Texts by path or by name.
type Texts = BTreeMap<String, String>;

/// Kernel sources: `*.cu` and `*.h`, each identified by its file name, in any folder. So a
/// launcher, an `#include`, a mutant and another revision find a file that was moved.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SourceTree {
    origin: String,
    directory: Option<PathBuf>,
    /// Texts by file name.
    files: BTreeMap<String, String>,
    /// Paths within the tree by file name.
    paths: BTreeMap<String, String>,
    /// Whether a text was replaced in memory.
    patched: bool,
}

impl SourceTree {
    /// Every `*.cu` and `*.h` that `include_dir!` embedded.
    ///
    /// # Errors
    /// As [`Self::from_files`].
    pub fn from_embedded(origin: &str, dir: &Dir<'static>) -> Result<Self> {
        let mut files = BTreeMap::new();
        collect_embedded(dir, &mut files);
        Self::from_files(origin.into(), files)
    }

    /// The sources in a directory and its folders.
    ///
    /// # Errors
    /// [`RuntimeError::System`] when it cannot be read or two files have the same name,
    /// [`RuntimeError::SourceMissing`] when it holds no `*.cu`.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let mut files = BTreeMap::new();
        read_sources(dir, "", &mut files)?;
        let tree = Self::from_files(dir.display().to_string(), files)?;
        Ok(Self { directory: Some(dir.to_owned()), ..tree })
    }

    /// The same tree, plus the headers (`*.h`) of a directory and its folders that the tree does
    /// not have.
    ///
    /// # Errors
    /// [`RuntimeError::System`] when the directory cannot be read or two of its headers have the
    /// same name.
    pub fn with_headers_of(&self, dir: &Path) -> Result<Self> {
        let mut texts = BTreeMap::new();
        read_sources(dir, "", &mut texts)?;
        texts.retain(|path, _| path.ends_with(".h"));
        let (mut files, mut paths) = by_name(&dir.display().to_string(), texts)?;
        files.extend(self.files.clone());
        paths.extend(self.paths.clone());
        Ok(Self { files, paths, ..self.clone() })
    }

    /// A tree from texts in memory (another revision's, read from git objects), by their paths
    /// within it.
    ///
    /// # Errors
    /// [`RuntimeError::SourceMissing`] when no file ends in `.cu`, [`RuntimeError::System`] when
    /// two have the same name.
    pub fn from_files(origin: String, texts: BTreeMap<String, String>) -> Result<Self> {
        let (files, paths) = by_name(&origin, texts)?;
        if !files.keys().any(|name| name.ends_with(".cu")) {
            return Err(RuntimeError::SourceMissing { file: "*.cu".into(), tree: origin });
        }
        Ok(Self { origin, directory: None, files, paths, patched: false })
    }

    /// The origin of the tree, for messages.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// The directory that holds exactly these sources, if there is one.
    pub fn directory(&self) -> Option<&Path> {
        self.directory.as_deref()
    }

    /// Every text, by its file's name.
    pub fn files(&self) -> &BTreeMap<String, String> {
        &self.files
    }

    /// The path of a file within the tree; its name if the path is not known.
    pub fn path_of<'t>(&'t self, file: &'t str) -> &'t str {
        self.paths.get(file).map_or(file, String::as_str)
    }

    /// The text of one file.
    ///
    /// # Errors
    /// [`RuntimeError::SourceMissing`].
    pub fn text(&self, file: &str) -> Result<&str> {
        self.files.get(file).map(String::as_str).ok_or_else(|| RuntimeError::SourceMissing {
            file: file.into(),
            tree: self.origin.clone(),
        })
    }

    /// The same tree with one file's text replaced; `origin` names the change.
    pub fn with_text(&self, file: &str, text: String, change: &str) -> Self {
        let mut files = self.files.clone();
        files.insert(file.into(), text);
        let origin = format!("{} with {change}", self.origin);
        Self { origin, directory: None, files, paths: self.paths.clone(), patched: true }
    }

    /// Whether it exists only in this process, as a mutant's tree does: the modules built from it
    /// run only a few times.
    pub fn is_patched(&self) -> bool {
        self.patched
    }

    /// The headers, by the name that `#include` uses.
    pub fn headers(&self) -> impl Iterator<Item = (&str, &str)> {
        let all = self.files.iter().map(|(name, text)| (name.as_str(), text.as_str()));
        all.filter(|(name, _)| name.ends_with(".h"))
    }

    /// The names of the headers of this tree that `file` includes, directly or through others, in
    /// the order of their inclusion. Conditions around an inclusion are ignored. A file whose
    /// inclusion is a macro includes all of them.
    ///
    /// # Errors
    /// [`RuntimeError::SourceMissing`] for a `file` that is not in the tree. External headers
    /// are ignored.
    pub fn headers_of(&self, file: &str) -> Result<Vec<&str>> {
        let mut found: Vec<&str> = Vec::new();
        let mut pending = vec![self.text(file)?];
        while let Some(text) = pending.pop() {
            for inclusion in inclusions(text) {
                let is_meant = |header: &str| match &inclusion {
                    Inclusion::Named(name) => name_of(name) == header,
                    Inclusion::ByMacro => true,
                };
                for (header, text) in self.headers().filter(|(header, _)| is_meant(header)) {
                    if !found.contains(&header) {
                        found.push(header);
                        pending.push(text);
                    }
                }
            }
        }
        Ok(found)
    }

    /// `file` and the headers that it includes: all files of this tree that its compilation reads.
    ///
    /// # Errors
    /// [`RuntimeError::SourceMissing`].
    pub fn part_of(&self, file: &str) -> Result<Self> {
        let names = self.headers_of(file)?.into_iter().chain([file]);
        let files = names
            .map(|name| Ok((name.to_owned(), self.text(name)?.to_owned())))
            .collect::<Result<_>>()?;
        Ok(Self { files, ..self.clone() })
    }

    /// The kernel files (`*.cu`), sorted.
    pub fn kernel_files(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str).filter(|name| name.ends_with(".cu"))
    }

    /// blake3 over every name and text: the identity of the kernels that ran.
    pub fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for (name, text) in &self.files {
            hasher.update(name.as_bytes()).update(&[0]).update(text.as_bytes()).update(&[0]);
        }
        hasher.finalize().to_hex().to_string()
    }
}

/// Texts and paths by file name, of texts by path. Two files of one name are an error.
fn by_name(origin: &str, texts: Texts) -> Result<(Texts, Texts)> {
    let (mut files, mut paths) = (Texts::new(), Texts::new());
    for (path, text) in texts {
        let name = name_of(&path).to_owned();
        files.insert(name.clone(), text);
        if let Some(other) = paths.insert(name.clone(), path) {
            let twice = format!("{other} and {} have one name", paths[&name]);
            return Err(RuntimeError::system(
                format!("reading kernel sources in {origin}"),
                std::io::Error::new(std::io::ErrorKind::AlreadyExists, twice),
            ));
        }
    }
    Ok((files, paths))
}

/// The last part of a path.
fn name_of(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// The operand of an `#include`.
enum Inclusion {
    Named(String),
    ByMacro,
}

/// The inclusions of a source, as the preprocessor finds them: after comments and over continued
/// lines, with any spacing.
fn inclusions(text: &str) -> Vec<Inclusion> {
    let text = without_comments(&text.replace("\\\r\n", "").replace("\\\n", ""));
    let directives = text.lines().filter_map(|line| {
        let line = line.trim_start();
        line.strip_prefix('#').or_else(|| line.strip_prefix("%:"))
    });
    let argument = |directive: &str| {
        let directive = directive.trim_start();
        let names = ["include_next", "include", "import", "embed"];
        let argument = names.iter().find_map(|name| directive.strip_prefix(name))?.trim_start();
        let closing = match argument.chars().next()? {
            '"' => '"',
            '<' => '>',
            _ => return Some(Inclusion::ByMacro),
        };
        Some(
            argument[1..]
                .split_once(closing)
                .map_or(Inclusion::ByMacro, |(name, _)| Inclusion::Named(name.to_owned())),
        )
    };
    directives.filter_map(argument).collect()
}

/// C++ with a space for each comment. Text in quotes is not a comment; a quote between digits is
/// not a quote.
pub(crate) fn without_comments(text: &str) -> String {
    let mut rest = text;
    let mut kept = String::with_capacity(text.len());
    while let Some(at) = rest.find(['/', '"', '\'']) {
        let (before, from) = rest.split_at(at);
        kept.push_str(before);
        let length = match from.as_bytes() {
            [b'/', b'/', ..] => from.find('\n').unwrap_or(from.len()),
            [b'/', b'*', ..] => from[2..].find("*/").map_or(from.len(), |end| end + 4),
            [b'"', ..] if kept.ends_with('R') => raw_string_length(from),
            [b'\'', ..] if kept.ends_with(|before: char| before.is_ascii_alphanumeric()) => 1,
            [quote @ (b'"' | b'\''), ..] => quoted_length(from, *quote),
            _ => 1,
        };
        let (token, after) = from.split_at(length);
        kept.push_str(if token.starts_with("//") || token.starts_with("/*") { " " } else { token });
        rest = after;
    }
    kept + rest
}

/// Bytes of a literal in these quotes, which ends at the end of the line at the latest.
fn quoted_length(text: &str, quote: u8) -> usize {
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            b'\n' => return at,
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            _ if byte == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Bytes of `"delimiter(…)delimiter"`.
fn raw_string_length(text: &str) -> usize {
    let Some((delimiter, _)) = text[1..].split_once('(') else { return 1 };
    let end = format!("){delimiter}\"");
    text.find(&end).map_or(text.len(), |at| at + end.len())
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
        if path.is_dir() {
            read_sources(&path, &format!("{prefix}{name}/"), files)?;
        } else if name.ends_with(".cu") || name.ends_with(".h") {
            let text = std::fs::read_to_string(&path)
                .map_err(|e| RuntimeError::system(format!("reading {}", path.display()), e))?;
            files.insert(format!("{prefix}{name}"), text);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(files: &[(&str, &str)]) -> Texts {
        files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect()
    }

    #[test]
    fn a_file_is_found_by_its_name_in_whatever_folder_it_lies() {
        for (kernel, header) in [("a.cu", "include/b.h"), ("family/a.cu", "base/b.h")] {
            let files = texts(&[(kernel, "#include \"b.h\"\n"), (header, "// b\n")]);
            let tree = SourceTree::from_files("a tree".into(), files).expect("a tree");
            assert_eq!(tree.text("b.h").expect("a header"), "// b\n");
            assert_eq!(tree.headers_of("a.cu").expect("a kernel"), ["b.h"]);
            assert_eq!((tree.path_of("a.cu"), tree.path_of("b.h")), (kernel, header));
        }
    }

    #[test]
    fn two_files_of_one_name_are_an_error_that_names_both() {
        let files = texts(&[("one/a.cu", ""), ("two/a.cu", "")]);
        let error = SourceTree::from_files("a tree".into(), files).expect_err("two of one name");
        let said = error.to_string();
        assert!(said.contains("one/a.cu") && said.contains("two/a.cu"), "{said}");
    }

    #[test]
    fn headers_of_another_folder_never_replace_those_of_the_tree() {
        let folder = tempfile::tempdir().expect("a scratch directory");
        for (name, text) in [("own.h", "theirs"), ("more.h", "more"), ("b.cu", "a kernel")] {
            std::fs::write(folder.path().join(name), text).expect("written");
        }
        let files = texts(&[("a.cu", ""), ("own.h", "ours")]);
        let tree = SourceTree::from_files("a tree".into(), files).expect("a tree");
        let tree = tree.with_headers_of(folder.path()).expect("headers");
        assert_eq!(
            (tree.text("own.h").ok(), tree.text("more.h").ok()),
            (Some("ours"), Some("more"))
        );
        assert!(tree.text("b.cu").is_err());
    }
}
