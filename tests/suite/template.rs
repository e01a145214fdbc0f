//! An operator is four files and a line where each is listed: what else a stranger would have to
//! touch is found here. One is made from `template/` and added to a copy of the tree.

use std::path::{Path, PathBuf};
use std::process::Command;

use dsv4_parity::operators::registry;

use crate::extent::everything;

/// The operator that is added, its struct, and the family that it comes to.
const NAME: &str = "scaled_rows";
const STRUCT: &str = "ScaledRows";
const FAMILY: &str = "formats";

/// Its files, from the template's.
const FILES: [(&str, &str); 4] = [
    ("kernel.cu", "kernels/cuda/formats/scaled_rows.cu"),
    ("launcher.rs", "kernels/src/formats/scaled_rows.rs"),
    ("reference.rs", "reference/src/formats/scaled_rows.rs"),
    ("declaration.rs", "src/operators/formats/scaled_rows.rs"),
];

/// Folders of files that list it.
const LISTS: [&str; 3] = ["kernels/src", "reference/src", "src/operators"];

/// Files outside an operator's own that may name most operators: the registry, what is made from
/// it, and the README's table, which a test holds to it.
const ALL_OPERATORS: [&str; 3] =
    ["README.md", "python/dsv4_parity/ops.pyi", "src/operators/registry.rs"];

/// A file with names of so many operators, of all, is a list that is kept by hand. A whole
/// model runs about half of them.
const SHARE_OF_A_LIST: f64 = 0.55;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The files that git knows or would add.
fn files() -> Option<Vec<PathBuf>> {
    let mut git = Command::new("git");
    git.current_dir(root()).args(["ls-files", "--cached", "--others", "--exclude-standard"]);
    let output = git.output().ok().filter(|output| output.status.success())?;
    let listed = String::from_utf8(output.stdout).expect("UTF-8");
    let files: Vec<PathBuf> = listed.lines().map(PathBuf::from).collect();
    Some(files.into_iter().filter(|file| root().join(file).is_file()).collect())
}

/// How many of the operators a text names.
fn named(text: &str) -> usize {
    let words: std::collections::BTreeSet<&str> =
        text.split(|c: char| c != '_' && !c.is_ascii_alphanumeric()).collect();
    registry::names().iter().filter(|name| words.contains(*name)).count()
}

#[test]
fn no_list_of_operators_is_kept_by_hand() {
    let Some(files) = files() else {
        return eprintln!("skipped: no git, or no sources, on this machine");
    };
    // Records of sweeps and of generated mutants, and what belongs to one operator each.
    let apart = ["reports/", "fixtures/golden/", "fixtures/regressions/", "CHANGELOG.md"];
    let apart = [&apart[..], &["fixtures/mutants/equivalent.toml"]].concat();
    let least = (SHARE_OF_A_LIST * registry::OPERATORS.len() as f64) as usize;
    let mut lists = Vec::new();
    for file in files {
        let name = file.display().to_string();
        let text = std::fs::read_to_string(root().join(&file)).unwrap_or_default();
        if !apart.iter().any(|folder| name.starts_with(folder)) && named(&text) > least {
            lists.push(name);
        }
    }
    assert_eq!(lists, ALL_OPERATORS, "a new operator would have to be added to a list");
}

#[test]
fn a_list_of_operators_is_found() {
    let all = registry::names().join("\", \"");
    assert_eq!(named(&format!("const ALL: &[&str] = &[\"{all}\"];")), registry::OPERATORS.len());
    assert_eq!(named("rope_forward, ropes"), 0);
}

/// Adds a line to a list of modules, in the place that the alphabet gives it.
fn add_module(list: &Path) {
    let text = std::fs::read_to_string(list).expect("a list of modules");
    let line = format!("pub mod {NAME};");
    let before = text.lines().rfind(|old| old.starts_with("pub mod ") && **old < *line);
    let mut lines: Vec<&str> = text.lines().collect();
    let at = lines.iter().position(|old| Some(*old) == before).expect("a module before it");
    lines.insert(at + 1, &line);
    std::fs::write(list, lines.join("\n") + "\n").expect("the list is written");
}

/// Adds the template's operator to a tree: four files, and four lines.
fn add_operator(tree: &Path) {
    let template = root().join("tests/suite/template");
    for (from, to) in FILES {
        std::fs::copy(template.join(from), tree.join(to)).expect("a file of the template");
    }
    LISTS.iter().for_each(|list| add_module(&tree.join(list).join(FAMILY).join("mod.rs")));
    let registry = tree.join("src/operators/registry.rs");
    let text = std::fs::read_to_string(&registry).expect("the registry");
    let line = format!("    &AnyOperator::of::<super::{FAMILY}::{NAME}::{STRUCT}>(),\n");
    let (operators, rest) = text.split_once("];\n").expect("the end of the list");
    std::fs::write(&registry, format!("{operators}{line}];\n{rest}")).expect("it is written");
}

/// A copy of what git knows of the tree.
fn copy(to: &Path) {
    for file in files().expect("git knows the files") {
        let target = to.join(&file);
        std::fs::create_dir_all(target.parent().expect("a folder")).expect("a folder is made");
        std::fs::copy(root().join(&file), target).expect("a file is copied");
    }
}

#[test]
fn an_operator_from_the_template_is_built_and_swept_with_nothing_else_added() {
    // It builds the whole program: minutes.
    if !everything() {
        return println!("left to PARITY_TESTS=all");
    }
    let dir = tempfile::tempdir().expect("a scratch directory");
    copy(dir.path());
    add_operator(dir.path());
    // Dependencies are kept for the next time.
    let target = root().join("target/template");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(dir.path()).args(["run", "--offline", "--locked", "--bin", "parity", "--"]);
    cargo.env("CARGO_TARGET_DIR", &target).args(["run", "--ops", NAME, "--backend", "emulator"]);
    let output =
        cargo.args(["--profile", "quick", "--out", "report"]).output().expect("cargo runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("all agreed"), "{text}{errors}");
}
