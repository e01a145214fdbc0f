//! The smoke test, and cases that run at the same time.

use std::path::Path;

use dsv4_parity::operators::registry;
use dsv4_parity::record::{CaseRecord, Origin, Report};

use crate::command_line::{Output, Parity};
use crate::shard::without_times;

fn run(dir: &Path, out: &str, arguments: &[&str]) -> Output {
    let [out, regressions] = [out, "regressions"].map(|name| dir.join(name).display().to_string());
    let fixed = ["run", "--backend", "emulator", "--out", &out, "--regressions", &regressions];
    Parity::new(&[&fixed[..], arguments].concat()).run()
}

fn cases(dir: &Path, out: &str) -> Vec<CaseRecord> {
    let text = std::fs::read_to_string(dir.join(out).join("report.json")).expect("a report");
    let report: Report = serde_json::from_str(&text).expect("the report parses");
    report.cases
}

const OPERATORS: [&str; 2] = ["kv_cache_write", "moe_expand"];

#[test]
fn a_smoke_test_runs_the_typical_cases_of_every_operator_first_and_says_what_sees_more() {
    let dir = tempfile::tempdir().expect("a scratch directory");
    let operators = OPERATORS.join(",");
    let output =
        run(dir.path(), "out", &["--profile", "smoke", "--ops", &operators, "--edge-cases", "1"]);
    output.assert_code(0);
    for said in ["all agreed", "smoke: ", " kernel paths ran", "more: --profile quick (about "] {
        assert!(output.stdout.contains(said), "`{said}` is not in\n{}", output.stdout);
    }
    let ran: Vec<_> = cases(dir.path(), "out").into_iter().map(|record| record.case).collect();
    let typical = OPERATORS
        .iter()
        .flat_map(|name| registry::find(name).expect("an operator").typical_cases());
    let typical: Vec<_> = typical.map(|case| serde_json::to_value(case).expect("JSON")).collect();
    assert_eq!(ran[..typical.len()], typical, "typical cases come first");
    assert_eq!(ran.len(), typical.len() + OPERATORS.len(), "and one edge case of each");
}

#[test]
fn a_smoke_test_ends_by_the_clock_and_so_is_not_divided() {
    let dir = tempfile::tempdir().expect("a scratch directory");
    for divided in [["--shard", "0/2"], ["--workers", "2"]] {
        let output = run(dir.path(), "out", &[&["--profile", "smoke"][..], &divided].concat());
        output.assert_bad_input(&["--profile smoke", divided[0]]);
    }
}

#[test]
fn cases_that_run_at_the_same_time_are_those_of_one_after_the_other() {
    let dir = tempfile::tempdir().expect("a scratch directory");
    let operators = OPERATORS.join(",");
    let sweep = ["--ops", &operators, "--cases", "3", "--edge-cases", "3", "--seed", "5", "--jobs"];
    for jobs in ["1", "3"] {
        run(dir.path(), jobs, &[&sweep[..], &[jobs]].concat()).assert_code(0);
    }
    let [one, three] = ["1", "3"].map(|jobs| cases(dir.path(), jobs));
    assert!(
        one.len() == 12 && one.iter().all(|record| record.origin == Origin::Drawn),
        "{}",
        one.len()
    );
    assert_eq!(without_times(&one), without_times(&three));
}
