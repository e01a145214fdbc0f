//! Finding CUDA's shared libraries where toolkits and Python wheels put them.
//!
//! A machine may have a toolkit in `/usr/local`, libraries on the loader's path, or only the wheels
//! that PyTorch installs. [`search`] tries these places in that order and keeps a record of each,
//! so that a failure reports where it looked.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// One library and the places that are specific to it.
pub(super) struct Wanted {
    /// File name up to its version: `libnvrtc.so`.
    pub file: &'static str,
    /// Names for the loader, best first.
    pub loader_names: &'static [&'static str],
    /// Environment variable with a file or directory; if it is set, nothing else is tried.
    pub variable: Option<&'static str>,
    /// Folders below a `site-packages` in which wheels carry the library.
    pub wheel_folders: &'static [&'static str],
}

/// Looks an environment variable up.
type Variable = Box<dyn Fn(&str) -> Option<OsString>>;

/// The places that this process can search: its environment, the folder of toolkits, a Python.
pub(super) struct Places {
    variable: Variable,
    toolkits: PathBuf,
    python: Option<&'static str>,
    first: Option<PathBuf>,
}

impl Places {
    /// The places of this process.
    pub fn of_process() -> Self {
        Self {
            variable: Box::new(crate::process::variable),
            toolkits: "/usr/local".into(),
            python: Some("python3"),
            first: None,
        }
    }

    /// The same, with one directory before all others.
    pub fn after(self, first: Option<&Path>) -> Self {
        Self { first: first.map(Path::to_path_buf), ..self }
    }

    fn toolkit_libraries(&self) -> Vec<PathBuf> {
        let named = ["CUDA_HOME", "CUDA_PATH"]
            .iter()
            .filter_map(|name| (self.variable)(name))
            .map(PathBuf::from);
        // `cuda` is the link by which an administrator chooses among several.
        let mut installed = matching_entries(&self.toolkits, "cuda-");
        installed.insert(0, self.toolkits.join("cuda"));
        let arch = std::env::consts::ARCH;
        named
            .chain(installed)
            .flat_map(|root| {
                [
                    root.join("lib64"),
                    root.join("lib"),
                    root.join(format!("targets/{arch}-linux/lib")),
                ]
            })
            .collect()
    }

    fn site_packages(&self) -> Vec<PathBuf> {
        let python_folders = |root: PathBuf| -> Vec<PathBuf> {
            matching_entries(&root.join("lib"), "python3")
                .into_iter()
                .map(|dir| dir.join("site-packages"))
                .collect()
        };
        let mut sites = Vec::new();
        sites.extend(
            (self.variable)("VIRTUAL_ENV")
                .map(PathBuf::from)
                .map(python_folders)
                .unwrap_or_default(),
        );
        if let Some(path) = (self.variable)("PYTHONPATH") {
            sites.extend(std::env::split_paths(&path).filter(|dir| !dir.as_os_str().is_empty()));
        }
        let home = (self.variable)("HOME").map(|home| PathBuf::from(home).join(".local"));
        sites.extend(home.map(python_folders).unwrap_or_default());
        sites
    }

    /// `sys.path` of the available Python. Starting Python costs tens of milliseconds, so this
    /// comes last.
    fn python_path(&self) -> Vec<PathBuf> {
        let Some(python) = self.python else { return Vec::new() };
        let output = Command::new(python)
            .args(["-c", "import sys; print('\\n'.join(p for p in sys.path if p))"])
            .stdin(Stdio::null())
            .output();
        let Ok(output) = output else { return Vec::new() };
        String::from_utf8_lossy(&output.stdout)
            .lines()
            .map(PathBuf::from)
            .filter(|dir| dir.ends_with("site-packages") || dir.ends_with("dist-packages"))
            .collect()
    }
}

/// The loader's error message, which libloading keeps one level down.
pub(super) fn loader_reason(error: libloading::Error) -> String {
    std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Offers every candidate to `open` until it accepts one. The error lists the places searched, one
/// line for each.
pub(super) fn search<T>(
    wanted: &Wanted,
    places: &Places,
    mut open: impl FnMut(&Path) -> Result<T, String>,
) -> Result<T, String> {
    let mut looked = Looked { wanted, open: &mut open, places: Vec::new() };
    let found = looked.everywhere(places);
    let looked = looked.places;
    found.ok_or_else(|| format!("no usable {}; looked at:\n  {}", wanted.file, looked.join("\n  ")))
}

struct Looked<'a, F> {
    wanted: &'a Wanted,
    open: &'a mut F,
    places: Vec<String>,
}

impl<F> Looked<'_, F> {
    fn everywhere<T>(&mut self, places: &Places) -> Option<T>
    where
        F: FnMut(&Path) -> Result<T, String>,
    {
        let demanded = self.wanted.variable.and_then(|name| Some((name, (places.variable)(name)?)));
        if let Some((name, value)) = demanded {
            // Another library than the one demanded would be a silent fallback.
            self.places.push(format!("{name} is set, so nowhere else"));
            let path = PathBuf::from(value);
            return if path.is_dir() { self.directory(&path) } else { self.file(&path) };
        }
        self.directories(places.first.iter().cloned())
            .or_else(|| self.directories(places.toolkit_libraries()))
            .or_else(|| self.wanted.loader_names.iter().find_map(|name| self.file(Path::new(name))))
            .or_else(|| self.wheels(places.site_packages()))
            .or_else(|| self.wheels(places.python_path()))
    }

    fn wheels<T>(&mut self, sites: Vec<PathBuf>) -> Option<T>
    where
        F: FnMut(&Path) -> Result<T, String>,
    {
        let folders = self.wanted.wheel_folders;
        self.directories(
            sites.iter().flat_map(|site| folders.iter().map(move |folder| site.join(folder))),
        )
    }

    fn directories<T>(&mut self, dirs: impl IntoIterator<Item = PathBuf>) -> Option<T>
    where
        F: FnMut(&Path) -> Result<T, String>,
    {
        dirs.into_iter().find_map(|dir| self.directory(&dir))
    }

    fn directory<T>(&mut self, dir: &Path) -> Option<T>
    where
        F: FnMut(&Path) -> Result<T, String>,
    {
        let files = versions_in(dir, self.wanted.file);
        if files.is_empty() {
            let why = if dir.is_dir() { "holds none" } else { "no such directory" };
            self.places.push(format!("{}: {why}", dir.display()));
        }
        files.iter().find_map(|file| self.file(file))
    }

    fn file<T>(&mut self, path: &Path) -> Option<T>
    where
        F: FnMut(&Path) -> Result<T, String>,
    {
        match (self.open)(path) {
            Ok(found) => Some(found),
            Err(why) => {
                let path = path.display().to_string();
                // The loader's message starts with the name that it was given.
                let why = why.strip_prefix(&format!("{path}: ")).unwrap_or(&why);
                self.places.push(format!("{path}: {why}"));
                None
            }
        }
    }
}

/// `libX.so` and `libX.so.N.N` in a directory, the newest version first.
fn versions_in(dir: &Path, file: &str) -> Vec<PathBuf> {
    matching_entries(dir, file)
        .into_iter()
        .filter(|path| {
            let name = path
                .file_name()
                .map(|name| name.to_string_lossy().into_owned())
                .unwrap_or_default();
            name[file.len()..].bytes().all(|byte| byte == b'.' || byte.is_ascii_digit())
        })
        .collect()
}

/// Entries whose names start with `prefix`, by descending version number.
pub(super) fn matching_entries(dir: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut found: Vec<(Vec<u64>, PathBuf)> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let numbers = name.strip_prefix(prefix)?.split(|c: char| !c.is_ascii_digit());
            Some((numbers.filter_map(|digits| digits.parse().ok()).collect(), entry.path()))
        })
        .collect();
    found.sort_by(|a, b| b.cmp(a));
    found.into_iter().map(|(_, path)| path).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const ABSENT: Wanted = Wanted {
        file: "libparity_absent.so",
        loader_names: &["libparity_absent.so.1"],
        variable: Some("PARITY_ABSENT"),
        wheel_folders: &["nvidia/absent/lib"],
    };

    fn places(root: &Path, variables: &[(&'static str, PathBuf)]) -> Places {
        let variables: BTreeMap<_, _> = variables.iter().cloned().collect();
        Places {
            variable: Box::new(move |name| {
                variables.get(name).map(|path| path.clone().into_os_string())
            }),
            toolkits: root.join("usr/local"),
            python: None,
            first: None,
        }
    }

    fn open_existing(path: &Path) -> Result<PathBuf, String> {
        if path.is_file() { Ok(path.to_path_buf()) } else { Err("not on the loader's path".into()) }
    }

    fn touch(path: PathBuf) -> PathBuf {
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        std::fs::write(&path, []).expect("a file");
        path
    }

    #[test]
    fn a_missing_library_lists_every_place() {
        let root = tempfile::tempdir().expect("a directory");
        std::fs::create_dir_all(root.path().join("venv/lib/python3.12")).expect("a directory");
        let places = places(
            root.path(),
            &[
                ("CUDA_HOME", root.path().join("toolkit")),
                ("VIRTUAL_ENV", root.path().join("venv")),
                ("PYTHONPATH", root.path().join("extra")),
            ],
        );
        let text = search(&ABSENT, &places, open_existing).expect_err("absent");
        for place in [
            "toolkit/lib64: no such directory",
            "usr/local/cuda/lib64",
            "-linux/lib",
            "libparity_absent.so.1: not on the loader's path",
            "venv/lib/python3.12/site-packages/nvidia/absent/lib",
            "extra/nvidia/absent/lib",
        ] {
            assert!(text.contains(place), "{place} is not in\n{text}");
        }
    }

    #[test]
    fn a_demanded_place_is_the_only_one() {
        let root = tempfile::tempdir().expect("a directory");
        touch(root.path().join("usr/local/cuda/lib64/libparity_absent.so"));
        let demanded = root.path().join("elsewhere");
        let places = places(root.path(), &[("PARITY_ABSENT", demanded)]);
        let text = search(&ABSENT, &places, open_existing).expect_err("absent");
        assert!(text.contains("elsewhere") && !text.contains("usr/local"), "{text}");
    }

    #[test]
    fn the_newest_version_comes_first_and_variants_are_left_out() {
        let root = tempfile::tempdir().expect("a directory");
        let dir = root.path().join("usr/local/cuda-13.0/lib64");
        for name in [
            "libparity_absent.so",
            "libparity_absent.so.9",
            "libparity_absent.alt.so.99",
            "libparity_absent.so.bak",
        ] {
            touch(dir.join(name));
        }
        let newest = touch(dir.join("libparity_absent.so.12.4"));
        touch(root.path().join("usr/local/cuda-12.9/lib64/libparity_absent.so.12.9"));
        assert_eq!(
            search(&ABSENT, &places(root.path(), &[]), open_existing).expect("found"),
            newest
        );
        assert_eq!(versions_in(&dir, ABSENT.file).len(), 3);
    }

    #[test]
    fn wheels_are_found_after_toolkits() {
        let root = tempfile::tempdir().expect("a directory");
        let site = root.path().join(".local/lib/python3.11/site-packages");
        let wheel = touch(site.join("nvidia/absent/lib/libparity_absent.so.13"));
        let places = places(root.path(), &[("HOME", root.path().to_path_buf())]);
        assert_eq!(search(&ABSENT, &places, open_existing).expect("found"), wheel);
    }
}
