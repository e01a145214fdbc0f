//! `parity beside` from the command line, and the list of pairs against what each side can time.

use std::collections::BTreeSet;
use std::process::Command;

use dsv4_parity::operators::registry::OPERATORS;
use dsv4_parity::report::beside::log::Side;
use dsv4_parity::report::beside::pairs::Pairs;

use crate::benchmarks::gpu;
use crate::command_line::Parity;
use crate::external::python;
use crate::support::fixtures;

const PAIRS: &str =
    "[[pair]]\nfamily = 'Norms'\nwork = 'RMSNorm'\nwho = 'torch'\nours = 'n/a'\ntheirs = 'a'\n";

/// A turn of a side on a machine, with one time.
fn log(side: &str, uuid: &str, id: &str, microseconds: f64) -> String {
    format!(
        "{{\"turn\":{{\"side\":\"{side}\",\"machine\":{{\"device\":\"GPU\",\"uuid\":\"{uuid}\",\"driver\":\"580\"}},\
         \"software\":\"1\",\"unix\":1,\"ids\":[\"{id}\"]}}}}\n\
         {{\"time\":{{\"id\":\"{id}\",\"samples_us\":[{microseconds}]}}}}\n"
    )
}

/// A list of one pair, and the logs of both sides by name.
pub fn files() -> [(&'static str, String); 3] {
    let (ours, theirs) = (log("ours", "GPU-1", "n/a", 2.0), log("theirs", "GPU-1", "a", 3.0));
    [("pairs.toml", PAIRS.to_owned()), ("ours.jsonl", ours), ("theirs.jsonl", theirs)]
}

fn pairs() -> Pairs {
    Pairs::read(&fixtures().join("external/pairs.toml")).expect("a list of pairs")
}

#[test]
fn a_page_is_printed_or_written_and_its_first_line_names_the_command() {
    let dir = tempfile::tempdir().unwrap();
    let put = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let (list, ours) =
        (put("pairs.toml", PAIRS), put("ours.jsonl", &log("ours", "GPU-1", "n/a", 2.0)));
    let theirs = put("theirs.jsonl", &log("theirs", "GPU-1", "a", 3.0));
    let printed = Parity::new(&["beside", &list, &ours, &theirs]).run();
    printed.assert_code(0);
    assert!(
        printed.stdout.starts_with(&format!("Made by `parity beside {list} {ours} {theirs}`."))
    );
    assert!(
        printed.stdout.contains(
            "| RMSNorm | torch | 2.000 (2.000 to 2.000) | 3.000 (3.000 to 3.000) | 1.50 |"
        )
    );

    let out = dir.path().join("public.md").display().to_string();
    let written = Parity::new(&["beside", &list, &ours, &theirs, "--out", &out]).run();
    written.assert_code(0);
    let page = std::fs::read_to_string(&out).unwrap();
    assert!(
        written.stdout.is_empty()
            && page.lines().next().unwrap().ends_with(&format!("--out {out}`."))
    );
    assert_eq!(
        page.lines().skip(1).collect::<Vec<_>>(),
        printed.stdout.lines().skip(1).collect::<Vec<_>>()
    );

    let other = put("other.jsonl", &log("theirs", "GPU-2", "a", 3.0));
    Parity::new(&["beside", &list, &ours, &other]).run().assert_bad_input(&[
        "other.jsonl",
        "GPU-1",
        "GPU-2",
    ]);
    let typo = put("typo.toml", &PAIRS.replace("n/a", "n/b"));
    Parity::new(&["beside", &typo, &ours, &theirs]).run().assert_bad_input(&["typo.toml", "`n/b`"]);
    Parity::new(&["beside", &list, &ours]).run().assert_bad_input(&["`theirs`"]);
    Parity::new(&["beside", "/nonexistent", &ours]).run().assert_bad_input(&["/nonexistent"]);
}

#[test]
fn every_pair_names_a_benchmark_of_ours_on_hopper() {
    let benchmarks = OPERATORS.iter().flat_map(|operator| operator.benchmarks(&gpu("sm_90a")));
    let ids: BTreeSet<String> =
        benchmarks.map(|benchmark| format!("{}/{}", benchmark.group(), benchmark.name())).collect();
    assert_eq!(pairs().check(Side::Ours, |id| ids.contains(id)), Ok(()));
}

#[test]
fn every_pair_names_a_work_of_the_script_which_lists_them_without_any_library() {
    if !python("", "the list of public kernels") {
        return;
    }
    let script = fixtures().join("external/public_times.py");
    let listed = Command::new("python3").arg(&script).arg("--list").output().expect("python3 runs");
    assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
    let listed = String::from_utf8(listed.stdout).expect("UTF-8");
    let names: BTreeSet<&str> = listed.lines().collect();
    assert_eq!(names.len(), listed.lines().count(), "two works have one name");
    assert_eq!(pairs().check(Side::Theirs, |name| names.contains(name)), Ok(()));
}
