//! Every citation of the specification (`reference/spec`) names a section that exists.

use std::fs;
use std::path::{Path, PathBuf};

use dsv4_parity::mutants::planted as mutants;
use dsv4_parity::operators::registry;
use dsv4_parity::specification::{Citation, Document, broken, citations, sections};

use crate::support::fixtures;

/// Where citations may be. Reports are skipped: they belong to their own revision.
const ROOTS: [&str; 8] =
    ["src", "kernels", "reference", "tests", "benches", "fixtures", "README.md", "DESIGN.md"];
const KINDS: [&str; 9] = ["rs", "cu", "h", "toml", "md", "py", "css", "yml", "sbatch"];

/// Every text file under `path`, in order of name; none if the path does not exist.
fn text_files(path: &Path, files: &mut Vec<PathBuf>) {
    if path.is_dir() {
        let entries =
            fs::read_dir(path).expect("a folder").map(|entry| entry.expect("an entry").path());
        let mut entries: Vec<_> = entries.collect();
        entries.sort();
        entries.iter().for_each(|entry| text_files(entry, files));
    } else if path.is_file()
        && path.extension().is_some_and(|kind| KINDS.iter().any(|known| kind == *known))
    {
        files.push(path.to_owned());
    }
}

/// `file:line: citation` for each citation under `root` without a section, and the number of all
/// citations.
fn broken_under(root: &Path) -> (Vec<String>, usize) {
    let mut files = Vec::new();
    ROOTS.iter().for_each(|name| text_files(&root.join(name), &mut files));
    let (mut lines, mut count) = (Vec::new(), 0);
    for file in files {
        let text = fs::read_to_string(&file).expect("UTF-8");
        let name = file.strip_prefix(root).expect("a file under the root").to_str().expect("UTF-8");
        // A bare "section 3" is a citation only within a document that has numbered sections.
        let home = [Document::Inference, Document::Training]
            .into_iter()
            .find(|document| document.file() == name);
        count += citations(&text, home).len();
        lines.extend(
            broken(&text, home)
                .into_iter()
                .map(|(line, citation)| format!("{name}:{line}: {citation}")),
        );
    }
    (lines, count)
}

#[test]
fn every_citation_in_the_repository_cites_a_section() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    if !root.join("Cargo.toml").is_file() {
        eprintln!("nothing was looked at: the sources are not on this machine");
        return;
    }
    let (lines, count) = broken_under(root);
    assert!(lines.is_empty(), "no such section:\n{}", lines.join("\n"));
    assert!(
        count > 600,
        "only {count} citations were found: this is not all that the repository has"
    );
}

#[test]
fn broken_citations_are_listed_with_their_file_and_line() {
    let root = tempfile::tempdir().expect("a scratch directory");
    let plant = |name: &str, text: &str| {
        let file = root.path().join(name);
        fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
        fs::write(file, text).expect("a file");
    };
    plant(
        "src/deep/module.rs",
        &format!("//! One (inference 8).\n\n//! Two ({} 8, 8.9).\n", "inference"),
    );
    plant("fixtures/mutants/projections/rope.toml", &format!("catalogue = \"FM-{}\"\n", "000"));
    plant("reference/spec/training.md", &format!("See section 3.\nSee {} 77.\n", "section"));
    plant("README.md", &format!("({} 99)\n", "training"));
    plant("reports/index.md", &format!("({} 99)\n", "training"));
    let (lines, count) = broken_under(root.path());
    // In two parts: this file is one of those that are scanned.
    let expected = [
        format!("src/deep/module.rs:3: {} 8.9", "inference"),
        format!("reference/spec/training.md:2: {} 77", "training"),
        format!("fixtures/mutants/projections/rope.toml:1: FM-{}", "000"),
        format!("README.md:1: {} 99", "training"),
    ];
    assert_eq!((lines.as_slice(), count), (expected.as_slice(), 7));
}

#[test]
fn every_operator_cites_sections_that_there_are() {
    for operator in registry::OPERATORS {
        let record = operator.describe();
        assert!(!record.specification.is_empty(), "{} cites nothing", record.name);
        for text in &record.specification {
            let citation: Citation =
                text.parse().unwrap_or_else(|error| panic!("{}: {error}", record.name));
            assert!(citation.section().is_some(), "{}: no section `{text}`", record.name);
            assert!(
                citation.document != Document::FailureModes,
                "{}: `{text}` specifies nothing",
                record.name
            );
        }
    }
}

#[test]
fn every_planted_mutant_names_a_failure_mode() {
    let mutants = mutants::load(&fixtures().join("mutants"))
        .expect("fixtures/mutants holds lists of mutants");
    assert!(!mutants.is_empty());
    for mutant in &mutants {
        let citation: Citation =
            mutant.catalogue.parse().unwrap_or_else(|error| panic!("{}: {error}", mutant.id));
        assert_eq!(citation.document, Document::FailureModes, "{}", mutant.id);
        assert!(citation.section().is_some(), "{}: no entry {citation}", mutant.id);
    }
}

#[test]
fn the_specification_that_is_built_in_is_the_one_in_the_tree() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for document in
        Document::ALL.into_iter().filter(|document| root.join(document.file()).is_file())
    {
        assert_eq!(fs::read_to_string(root.join(document.file())).expect("UTF-8"), document.text());
    }
    assert!(sections().iter().all(|section| !section.title.is_empty()));
}
