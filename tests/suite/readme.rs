//! The examples in README.md work as written.

use std::collections::BTreeMap;
use std::process::Command;

use dsv4_parity::operators::registry;

#[allow(dead_code)]
#[path = "../../examples/judge_your_kernel.rs"]
mod judge_your_kernel;

use crate::support;

/// The text at build time: a GPU machine has no sources.
const README: &str = include_str!("../../README.md");

/// The block of the README that starts with this line, up to its last line.
fn block(begin: &str) -> &'static str {
    let (_, rest) = README.split_once(begin).expect(begin);
    rest.split_once("\n```").expect("the end of a block").0
}

#[test]
fn the_python_kernel_of_the_readme_agrees_as_it_stands() {
    if Command::new("python3")
        .args(["-c", "import numpy"])
        .output()
        .is_ok_and(|output| !output.status.success())
    {
        return println!("skipped: numpy is not installed");
    }
    let dir = tempfile::tempdir().expect("a scratch directory");
    std::fs::write(dir.path().join("kernel.py"), block("```python\n")).expect("a kernel");
    let arguments = [
        "external",
        "--op",
        "rms_norm",
        "--forward-only",
        "--worker",
        "python3 kernel.py",
        "--cases",
        "4",
    ];
    let mut parity = Command::new(crate::command_line::binary());
    parity.current_dir(&dir).args(arguments).args(["--edge-cases", "4", "--out", "out"]);
    parity.env("PYTHONPATH", support::fixtures().join("external"));
    let output = parity.output().expect("parity runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("all agreed"),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn the_rust_example_accepts_the_right_kernel_and_rejects_the_wrong_one() {
    assert_eq!(judge_your_kernel::judge(1.0).expect("a verdict"), Vec::<String>::new());
    let failed = judge_your_kernel::judge(0.5_f64.sqrt()).expect("a verdict");
    assert!(failed.iter().any(|check| check.starts_with("forward y")), "{failed:#?}");
}

#[test]
fn the_readme_lists_every_operator_with_its_backward_and_its_path_for_hopper() {
    let table: BTreeMap<&str, &str> = README.lines().filter_map(row).collect();
    for operator in registry::OPERATORS {
        let record = operator.describe();
        let hopper = record.paths.iter().any(|path| path.contains("hopper"));
        let marks = [(record.has_backward, "B"), (hopper, "H")];
        let marks: Vec<&str> =
            marks.iter().filter_map(|(has, mark)| has.then_some(*mark)).collect();
        assert_eq!(
            table.get(operator.name()).copied(),
            Some(marks.join(" ").as_str()),
            "{}",
            operator.name()
        );
    }
    assert_eq!(table.len(), registry::OPERATORS.len(), "operators that do not exist");
}

/// The name and the marks in a row of the table of operators.
fn row(line: &str) -> Option<(&str, &str)> {
    let cells: Vec<&str> = line.split('|').map(str::trim).collect();
    let [_, name, _, marks, _] = cells[..] else { return None };
    Some((name.strip_prefix('`')?.strip_suffix('`')?, marks))
        .filter(|(name, _)| name.bytes().all(|byte| byte == b'_' || byte.is_ascii_alphanumeric()))
}
