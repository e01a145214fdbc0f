//! One run over many workers: the division, killed workers, and what a merge rejects.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use dsv4_parity::record::journal::Shard;
use dsv4_parity::record::{CaseRecord, Origin, Report, Skip, Verdict};
use dsv4_parity::sweep::merge::{self, MergeError, Part};
use dsv4_parity::sweep::shard::{self, Costs};
use dsv4_runtime::BackendKind;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::command_line::{self, Output, PRODUCT, Parity, WRONG_PRODUCT};
use crate::extent::{attacked, left_out};

/// Rooms whose changes run the long tests of this file.
const WORKERS: [&str; 5] = [
    "src/sweep/",
    "src/record/",
    "src/command/run.rs",
    "src/command/workers.rs",
    "src/command/merge.rs",
];

// ---------------------------------------------------------------- helpers

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn report(dir: &Path) -> Report {
    serde_json::from_str(&read(&dir.join("report.json"))).expect("the report parses")
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

/// `parity run` into `dir/name`, with saved cases in `dir/regressions`.
fn run_arguments(dir: &Path, name: &str, arguments: &[&str]) -> Vec<String> {
    let (out, regressions) = (text(&dir.join(name)), text(&dir.join("regressions")));
    // The tests are about kills, clocks and files: a GPU that other tests share would add
    // randomness.
    let fixed = ["run", "--backend", "emulator", "--out", &out, "--regressions", &regressions];
    [&fixed[..], arguments].concat().iter().map(|&argument| argument.to_owned()).collect()
}

fn parity(arguments: &[String]) -> Output {
    Parity::new(&arguments.iter().map(String::as_str).collect::<Vec<_>>()).run()
}

fn run(dir: &Path, name: &str, arguments: &[&str]) -> Output {
    parity(&run_arguments(dir, name, arguments))
}

fn merge_into(dir: &Path, out: &str, shards: &[&str]) -> Output {
    let mut arguments = vec!["merge".to_owned()];
    arguments.extend(shards.iter().map(|name| text(&dir.join(name))));
    arguments.extend(["--out".into(), text(&dir.join(out))]);
    arguments.extend(["--regressions".into(), text(&dir.join("regressions"))]);
    parity(&arguments)
}

/// All of the records except the times, which differ between runs.
pub fn without_times(cases: &[CaseRecord]) -> Vec<Value> {
    let timeless =
        |case: &CaseRecord| CaseRecord { kernel_seconds: 0.0, oracle_seconds: 0.0, ..case.clone() };
    cases.iter().map(|case| serde_json::to_value(timeless(case)).expect("JSON")).collect()
}

/// The same run complete and in three shards, divided by the costs of the complete run; made once.
fn divided() -> &'static Path {
    static DIVIDED: OnceLock<TempDir> = OnceLock::new();
    let dir = DIVIDED.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let arguments =
            ["--ops", "swiglu,kv_cache_write", "--cases", "2", "--edge-cases", "6", "--seed", "5"];
        run(dir.path(), "whole", &arguments).assert_code(0);
        let costs = text(&dir.path().join("whole/report.json"));
        for shard in ["0/3", "1/3", "2/3"] {
            let shard_arguments = [&arguments[..], &["--shard", shard, "--costs", &costs]].concat();
            run(dir.path(), &shard[..1], &shard_arguments).assert_code(0);
        }
        dir
    });
    dir.path()
}

fn parts() -> Vec<Part> {
    ["0", "1", "2"].iter().map(|name| Part::read(&divided().join(name)).expect("a shard")).collect()
}

/// The result of a merge after `change` modified the parts.
fn refusal(change: impl FnOnce(&mut Vec<Part>)) -> MergeError {
    let mut parts = parts();
    change(&mut parts);
    merge::merge(parts, String::new()).expect_err("the merge is refused")
}

// ---------------------------------------------------------------- the division

#[test]
fn shards_are_counted_from_zero() {
    assert_eq!("0/1".parse(), Ok(Shard::WHOLE));
    assert_eq!("3/4".parse(), Ok(Shard { index: 3, count: 4 }));
    assert_eq!(Shard { index: 3, count: 4 }.to_string(), "3/4");
    for wrong in ["4/4", "0/0", "-1/4", "1", "1/", "/4", "1/4/4", "one/4", ""] {
        assert!(wrong.parse::<Shard>().is_err(), "`{wrong}` is no shard");
    }
}

#[test]
fn a_division_balances_costs_and_leaves_no_shard_empty() {
    assert_eq!(shard::divide(&[1, 1, 1, 9, 1, 1, 1, 1, 1, 1], 2), [1, 1, 1, 0, 1, 1, 1, 1, 1, 1]);
    assert_eq!(shard::divide(&[5, 5, 5, 5], 2), [0, 1, 0, 1], "equal costs are dealt out in turn");
    assert_eq!(
        shard::divide(&[0, 0, 0], 3),
        [0, 1, 2],
        "cases that cost nothing are dealt out too"
    );
    assert_eq!(shard::divide(&[u64::MAX, u64::MAX, u64::MAX], 2), [0, 1, 0], "costs saturate");
    for count in 1..9u32 {
        // Costs over five orders of magnitude, like those of cases.
        let costs: Vec<u64> = (1..60u64).map(|i| (i * 7919 % 61).pow(3)).collect();
        let mut loads = vec![0u64; count as usize];
        for (cost, shard) in costs.iter().zip(shard::divide(&costs, count)) {
            loads[shard as usize] += cost;
        }
        let (least, most) = (loads.iter().min().unwrap(), loads.iter().max().unwrap());
        assert!(*least > 0);
        // Otherwise the last case of the fullest shard would be in another shard.
        assert!(most - least <= *costs.iter().max().unwrap(), "{loads:?}");
    }
}

#[test]
fn a_case_costs_what_was_recorded_and_an_unknown_one_its_share_of_its_operators_mean() {
    let mut record = report(&divided().join("0")).cases[0].clone();
    let mut records = Vec::new();
    for (operator, width, seconds) in [("a", 1, 1.0), ("a", 2, 3.0), ("b", 1, 5.0)] {
        record.operator = operator.into();
        record.case = json!({ "operator": operator, "width": width });
        (record.kernel_seconds, record.oracle_seconds) = (seconds, seconds);
        records.push(record.clone());
    }
    let costs = Costs::from_records(&records);
    let of = |operator: &str, width: u64| json!({ "operator": operator, "width": width });
    let cases =
        [of("a", 2), json!({ "width": 2, "operator": "a" }), of("a", 9), of("a", 8), of("c", 1)];
    // The two unknown cases of an operator share its mean by their sizes; known cases do not use
    // the mean.
    let expected = [6, 6, 6, 2, 6].map(|seconds| seconds * 1_000_000_000);
    assert_eq!(costs.of_all(&cases, &[7, 7, 30, 10, 5]), expected);
    assert_eq!(Costs::default().of_all(&cases[2..], &[30, 10, 0]), [30, 10, 1], "sizes alone");
}

#[test]
fn costs_are_read_from_reports_and_from_records_whose_last_line_was_cut() {
    let dir = tempfile::tempdir().unwrap();
    let case = report(&divided().join("whole")).cases[0].case.clone();
    let of = |file: &Path| Costs::read(file).unwrap().of_all(std::slice::from_ref(&case), &[1])[0];
    let expected = of(&divided().join("whole/report.json"));
    assert!(expected > 1);
    let records = read(&divided().join("whole/records.jsonl"));
    let file = dir.path().join("records.jsonl");
    std::fs::write(&file, format!("{records}{}", &records[..40])).unwrap();
    assert_eq!(of(&file), expected);
    for (wrong, why) in [("", "holds no case"), ("{}\n", "line 1")] {
        std::fs::write(&file, wrong).unwrap();
        let error = Costs::read(&file).expect_err("no costs");
        assert!(format!("{error:#}").contains(why), "{error:#}");
    }
    let arguments = ["--shard", "0/2", "--costs", "/nonexistent/costs.json"];
    run(dir.path(), "out", &arguments).assert_bad_input(&["/nonexistent/costs.json"]);
}

#[test]
fn more_shards_than_cases_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let arguments = ["--ops", "rope", "--cases", "0", "--shard", "0/1000"];
    run(dir.path(), "out", &arguments).assert_bad_input(&["1000 shards"]);
    assert!(!dir.path().join("out").exists());
}

// ---------------------------------------------------------------- the merge

#[test]
fn merged_shards_are_the_run_that_was_not_divided() {
    let dir = divided();
    merge_into(dir, "merged", &["2", "0", "1"]).assert_code(0);
    let (whole, merged) = (report(&dir.join("whole")), report(&dir.join("merged")));
    assert_eq!(without_times(&merged.cases), without_times(&whole.cases));
    assert_eq!((&merged.revision, &merged.operators), (&whole.revision, &whole.operators));
    assert_eq!(merged.skips, whole.skips, "a skip of the run is counted once");
    assert_eq!(merged.shards.iter().map(|shard| shard.index).collect::<Vec<_>>(), [0, 1, 2]);
    let parts = parts();
    assert!(parts.iter().all(|part| part.report.cases.len() < whole.cases.len()));
    assert_eq!(merged.seconds, parts.iter().map(|part| part.report.seconds).sum::<f64>());
    assert_eq!(read(&dir.join("merged/records.jsonl")).lines().count(), merged.cases.len());
    for file in ["index.html", "summary.md"] {
        assert!(
            read(&dir.join("merged").join(file)).contains("rope"),
            "{file} does not mention the operator"
        );
    }
}

#[test]
fn what_each_shard_left_out_of_its_own_is_counted_together() {
    let mut parts = parts();
    let skip = |count| Skip {
        what: "failing cases of rope shrunk".into(),
        why: "enough were".into(),
        count,
    };
    for (part, count) in parts.iter_mut().zip(1..) {
        part.report.skips.push(skip(count));
    }
    let merged = merge::merge(parts, String::new()).unwrap();
    assert!(merged.skips.contains(&skip(1 + 2 + 3)), "{:?}", merged.skips);
}

#[test]
fn workers_make_the_run_that_was_not_divided_with_one_command_and_leave_nothing_else() {
    let dir = divided();
    let costs = text(&dir.join("whole/report.json"));
    let arguments =
        ["--ops", "swiglu,kv_cache_write", "--cases", "2", "--edge-cases", "6", "--seed", "5"];
    let output =
        run(dir, "workers", &[&arguments[..], &["--workers", "2", "--costs", &costs]].concat());
    output.assert_code(0);
    let (whole, workers) = (report(&dir.join("whole")), report(&dir.join("workers")));
    assert_eq!(without_times(&workers.cases), without_times(&whole.cases));
    assert_eq!((workers.skips, workers.shards.len()), (whole.skips, 2));
    let summed: f64 = workers.shards.iter().map(|shard| shard.seconds).sum();
    assert!(workers.seconds > 0.4 * summed, "{} s for shards of {summed} s", workers.seconds);
    assert!(output.stdout.contains("all agreed: "), "{}", output.stdout);
    assert!(!dir.join("workers/workers").exists() && dir.join("workers/index.html").is_file());
    run(dir, "x", &["--costs", &costs]).assert_bad_input(&["--costs", "--workers"]);
}

#[test]
fn a_merge_refuses_missing_and_repeated_shards() {
    let gap = refusal(|parts| drop(parts.remove(1)));
    assert!(
        matches!(&gap, MergeError::Gap(what) if what == "1 of 3 shards are missing: 1"),
        "{gap}"
    );
    let overlap = refusal(|parts| parts.push(parts[2].clone()));
    assert!(
        matches!(&overlap, MergeError::Overlap(what) if what.contains("are both shard 2")),
        "{overlap}"
    );
    assert!(matches!(merge::merge(Vec::new(), String::new()), Err(MergeError::Nothing)));
}

#[test]
fn a_merge_refuses_missing_repeated_and_foreign_cases() {
    let lost = refusal(|parts| drop(parts[1].report.cases.pop()));
    assert!(matches!(&lost, MergeError::Gap(what) if what.contains("1 of")), "{lost}");
    let twice = refusal(|parts| {
        let case = parts[0].report.cases[0].clone();
        parts[1].report.cases.push(case);
    });
    assert!(matches!(&twice, MergeError::Overlap(what) if what.contains("ran in")), "{twice}");
    let foreign = refusal(|parts| parts[0].report.cases[0].plan_number = None);
    assert!(
        matches!(&foreign, MergeError::NotThePlan(what) if what.contains("plan number none")),
        "{foreign}"
    );
    let beyond = refusal(|parts| parts[0].report.cases[0].plan_number = Some(1_000_000));
    assert!(
        matches!(&beyond, MergeError::NotThePlan(what) if what.contains("1000000")),
        "{beyond}"
    );
}

#[test]
fn a_merge_refuses_cases_that_were_changed_or_moved() {
    let changed = refusal(|parts| parts[0].report.cases[0].case["seed"] = json!(123_456));
    assert!(matches!(changed, MergeError::NotThePlan(_)), "{changed}");
    let moved = refusal(|parts| {
        let case = parts[2].report.cases.pop().expect("a case");
        parts[0].report.cases.push(case);
    });
    assert!(matches!(moved, MergeError::NotThePlan(_)), "{moved}");
}

#[test]
fn a_merge_refuses_shards_of_unlike_runs() {
    let mixed = |what: &str, change: fn(&mut Part)| {
        let error = refusal(|parts| change(&mut parts[1]));
        assert!(
            matches!(&error, MergeError::Mixed { what: seen, .. } if *seen == what),
            "{what}: {error}"
        );
    };
    mixed("revision", |part| part.report.revision.commit = "another".into());
    mixed("revision", |part| part.report.revision.dirty ^= true);
    mixed("kernels", |part| part.report.revision.kernels_digest = "another".into());
    mixed("backend", |part| {
        part.report.environment.backend = match part.report.environment.backend {
            BackendKind::Cuda => BackendKind::Emulator,
            BackendKind::Emulator | BackendKind::External => BackendKind::Cuda,
        };
    });
    mixed("plan", |part| part.shard.plan_digest = "another".into());
    mixed("number of shards", |part| part.shard.count = 4);
    mixed("number of planned cases", |part| part.shard.planned_cases += 1);
    // The message names the setting that changed the plan; a setting that does not change it is
    // ignored.
    mixed("--seed", |part| part.report.seed += 1);
    mixed("--schedules", |part| part.report.schedules += 1);
    mixed("--profile", |part| part.report.profile = "full".into());
    for setting in ["--ops", "--cases", "--edge-cases", "--costs", "--regressions", "--memory"] {
        let error = refusal(|parts| {
            *parts[1].shard.settings.get_mut(setting).expect(setting) = "another".into();
            parts[1].shard.plan_digest = "another".into();
        });
        let said = error.to_string();
        assert!(
            said.contains(&format!("the {setting} is ")) && said.contains(" and another in "),
            "{said}"
        );
    }
    let mut parts = parts();
    parts[1].shard.settings.insert("--memory".into(), "another".into());
    assert!(merge::merge(parts, String::new()).is_ok());
}

#[test]
fn executables_are_compared_where_the_commit_does_not_name_the_source() {
    let with = |dirty: bool| {
        let mut parts = parts();
        for part in &mut parts {
            part.report.revision.dirty = dirty;
            part.report.revision.commit = "c0ffee".into();
        }
        parts[1].shard.executable_digest = "another".into();
        merge::merge(parts, String::new())
    };
    assert!(matches!(with(true), Err(MergeError::Mixed { what, .. }) if what == "executable"));
    assert!(with(false).is_ok());
}

#[test]
fn a_refused_merge_is_bad_input_and_writes_nothing() {
    let dir = divided();
    merge_into(dir, "refused", &["0", "2"]).assert_bad_input(&["gap", "missing: 1"]);
    merge_into(dir, "refused", &["0", "1", "absent"])
        .assert_bad_input(&["absent", "no report.json"]);
    merge_into(dir, "refused", &["0", "1", "whole"])
        .assert_bad_input(&["number of shards", "whole"]);
    assert!(!dir.join("refused").exists());
    merge_into(dir, "0", &["0", "1", "2"]).assert_bad_input(&["--out", "is one of the shards"]);
}

// ---------------------------------------------------------------- killed workers

/// A worker that is killed on drop.
struct Worker(Child);

impl Worker {
    fn start(arguments: &[String]) -> Self {
        let mut command = Command::new(command_line::binary());
        command.args(arguments).stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().expect("the binary runs"))
    }

    /// It runs no further, and is not at its end when another run looks.
    fn pause(&self) {
        let id = self.0.id().to_string();
        let status = Command::new("kill").args(["-STOP", &id]).status().expect("kill runs");
        assert!(status.success(), "the worker had finished before it was paused");
    }

    /// SIGKILL, which a process cannot catch.
    fn kill(&mut self) {
        self.0.kill().expect("the worker is killed");
        let status = self.0.wait().expect("the worker ended");
        assert!(!status.success(), "the worker had finished before it was killed");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until a file has that many lines.
pub fn wait_for_lines(path: &PathBuf, lines: usize, limit: Duration) {
    let start = Instant::now();
    let enough = || std::fs::read_to_string(path).is_ok_and(|text| text.lines().count() >= lines);
    while !enough() {
        assert!(start.elapsed() < limit, "{} did not get {lines} lines", path.display());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_killed_worker_loses_nothing_and_resumes_where_it_was() {
    if left_out(&WORKERS) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let arguments =
        ["--ops", "swiglu", "--cases", "60", "--edge-cases", "0", "--seed", "9", "--shard", "1/2"];
    let resume = [&arguments[..], &["--resume"]].concat();
    let records = dir.path().join("out/records.jsonl");
    // The first --resume starts the run: a job array always passes it.
    let mut worker = Worker::start(&run_arguments(dir.path(), "out", &resume));
    wait_for_lines(&records, 3, Duration::from_secs(30));
    worker.pause();
    run(dir.path(), "out", &resume).assert_bad_input(&["another run is writing"]);
    worker.kill();

    let mut left = std::fs::read(&records).unwrap();
    let complete = left.iter().rposition(|&byte| byte == b'\n').expect("complete lines") + 1;
    left.truncate(complete);
    // A kill within a write, and within a two-byte character.
    std::fs::write(&records, [&left[..], b"{\"operator\":\"swiglu\",\"case\":\"\xc3"].concat())
        .unwrap();
    merge_into(dir.path(), "merged", &["out"])
        .assert_bad_input(&["shard 1/2 is unfinished", "--resume"]);
    let other = [&resume[..], &["--schedules", "3"]].concat();
    run(dir.path(), "out", &other)
        .assert_bad_input(&["cannot be resumed", "--schedules 1, and not with 3"]);
    let other: Vec<_> =
        resume.iter().map(|&argument| if argument == "1/2" { "0/2" } else { argument }).collect();
    run(dir.path(), "out", &other).assert_bad_input(&["it is shard 1/2, not 0/2"]);

    run(dir.path(), "out", &resume).assert_code(0);
    let after = std::fs::read(&records).unwrap();
    assert!(after.starts_with(&left), "a recorded case was lost or ran again");
    run(dir.path(), "uninterrupted", &arguments).assert_code(0);
    let (resumed, whole) =
        (report(&dir.path().join("out")), report(&dir.path().join("uninterrupted")));
    assert_eq!(without_times(&resumed.cases), without_times(&whole.cases));
    run(dir.path(), "out", &resume).assert_code(0);
    assert_eq!(std::fs::read(&records).unwrap(), after, "a finished run ran something again");
    attacked("runs killed or interrupted, then resumed", 1);
}

#[test]
fn a_run_whose_worker_is_killed_ends_with_all_of_them_and_resumes_where_they_were() {
    if left_out(&WORKERS) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let arguments =
        ["--ops", "swiglu", "--cases", "80", "--edge-cases", "0", "--seed", "9", "--workers", "2"];
    let mut harness = Worker::start(&run_arguments(dir.path(), "out", &arguments));
    let records = |worker: &str| dir.path().join("out/workers").join(worker).join("records.jsonl");
    for worker in ["0", "1"] {
        wait_for_lines(&records(worker), 2, Duration::from_secs(60));
    }
    let id = harness.0.id();
    let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children"))
        .expect("Linux lists them");
    let [first, second] = children.split_whitespace().collect::<Vec<_>>()[..] else {
        panic!("{children}")
    };
    assert!(Command::new("kill").args(["-9", first]).status().expect("kill runs").success());
    assert_eq!(harness.0.wait().expect("it ends").code(), Some(2));
    assert!(!Path::new("/proc").join(second).exists(), "the other one goes on without it");
    assert!(!dir.path().join("out/report.json").exists());
    let begun = ["0", "1"].map(|worker| read(&records(worker)).lines().count());

    run(dir.path(), "out", &[&arguments[..], &["--resume"]].concat()).assert_code(0);
    let report = report(&dir.path().join("out"));
    attacked("runs killed or interrupted, then resumed", 1);
    assert!(
        begun.iter().all(|&lines| lines >= 2) && report.cases.len() >= 80,
        "{begun:?}, {}",
        report.cases.len()
    );
}

#[test]
fn a_resumed_run_believes_no_record_that_its_plan_does_not_have() {
    let dir = tempfile::tempdir().unwrap();
    // One case at a time: the lines are in the order of the plan.
    let arguments =
        ["--ops", "swiglu,rope", "--cases", "1", "--edge-cases", "2", "--jobs", "1", "--resume"];
    run(dir.path(), "out", &arguments).assert_code(0);
    let records = dir.path().join("out/records.jsonl");
    let sound = read(&records);
    let lines: Vec<Value> = sound.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let changed = |at: usize, pointer: &str, value: Value| {
        let mut lines = lines.clone();
        *lines[at].pointer_mut(pointer).expect("a field of a record") = value;
        lines
    };
    let twice = [&lines[..], &lines[1..2]].concat();
    for (left, line, why) in [
        (changed(1, "/case/seed", json!(77)), 2, "its case is not that of the plan"),
        (changed(0, "/case/operator", json!("rope")), 1, "its operator is swiglu"),
        (changed(2, "/operator", json!("rms_norm")), 3, "its operator is rms_norm"),
        (
            changed(2, "/origin", json!("regression")),
            3,
            "its case is Regression, and that of the plan Drawn",
        ),
        (
            changed(2, "/origin", json!("shrunk")),
            3,
            "the case that it was made of is not in the line before",
        ),
        (changed(1, "/plan_number", json!(3)), 2, "operator"),
        (changed(1, "/plan_number", json!(2)), 2, "its case is not that of the plan"),
        (changed(0, "/plan_number", json!(1_000_000)), 1, "its plan number is 1000000"),
        (twice, 7, "it is of the same case as line 2"),
    ] {
        let text: String = left.iter().map(|record| format!("{record}\n")).collect();
        std::fs::write(&records, &text).unwrap();
        let refused = run(dir.path(), "out", &arguments);
        refused.assert_bad_input(&[
            "records.jsonl cannot be resumed",
            &format!("line {line}"),
            why,
        ]);
        assert_eq!(read(&records), text, "a refused run changes nothing");
        attacked("records altered before a resume", 1);
    }
    std::fs::write(&records, &sound).unwrap();
    run(dir.path(), "out", &arguments).assert_code(0);
    assert_eq!(read(&records), sound);
}

#[test]
fn an_interrupted_run_says_how_far_it_came_and_how_to_go_on() {
    if left_out(&WORKERS) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let arguments = ["--ops", "swiglu", "--cases", "60", "--edge-cases", "0", "--seed", "9"];
    let mut command = Command::new(command_line::binary());
    command
        .args(run_arguments(dir.path(), "out", &arguments))
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let child = command.spawn().expect("the binary runs");
    let records = dir.path().join("out/records.jsonl");
    wait_for_lines(&records, 3, Duration::from_secs(30));
    let interrupt =
        Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill runs");
    assert!(interrupt.success());
    let ended = child.wait_with_output().expect("the run ended");
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(130), "{said}");
    let recorded = read(&records).matches('\n').count();
    assert!(
        said.contains(&format!("interrupted: {recorded} of 6")),
        "{recorded} lines, and it says: {said}"
    );
    assert!(said.contains("--resume"), "{said}");
    attacked("runs killed or interrupted, then resumed", 1);
    run(dir.path(), "out", &[&arguments[..], &["--resume"]].concat()).assert_code(0);
}

#[test]
fn a_folder_that_holds_what_is_not_ours_is_refused_by_what_was_found_and_left_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let arguments = ["--ops", "swiglu", "--cases", "0", "--edge-cases", "1"];
    for name in ["index.html", "report.json", "plan.json", "thesis.tex"] {
        let folder = dir.path().join(name.replace('.', "_"));
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join(name), "{\"mine\": 1}").unwrap();
        if name == "plan.json" {
            std::fs::write(folder.join("more.json"), "{}").unwrap();
        }
        let out = folder.file_name().unwrap().to_str().unwrap();
        run(dir.path(), out, &arguments).assert_bad_input(&[out, name, "empty folder"]);
        merge_into(
            dir.path(),
            out,
            &[
                &text(&divided().join("0")),
                &text(&divided().join("1")),
                &text(&divided().join("2")),
            ],
        )
        .assert_bad_input(&[name, "empty folder"]);
        assert_eq!(read(&folder.join(name)), "{\"mine\": 1}");
    }
    std::fs::write(dir.path().join("file"), "mine").unwrap();
    run(dir.path(), "file", &arguments).assert_bad_input(&["file is no folder"]);
    run(dir.path(), "ours", &arguments).assert_code(0);
    std::fs::write(dir.path().join("ours/notes.txt"), "mine").unwrap();
    run(dir.path(), "ours", &arguments).assert_code(0);
    assert_eq!(read(&dir.path().join("ours/notes.txt")), "mine");
}

#[test]
fn a_run_that_is_begun_anew_leaves_nothing_of_the_old_one() {
    let dir = tempfile::tempdir().unwrap();
    let arguments = ["--ops", "swiglu", "--cases", "120"];
    run(dir.path(), "out", &["--ops", "kv_cache_write", "--cases", "0", "--edge-cases", "2"])
        .assert_code(0);
    let plan = dir.path().join("out/plan.json");
    let old = std::fs::read_to_string(&plan).unwrap();
    let mut worker = Worker::start(&run_arguments(dir.path(), "out", &arguments));
    let start = Instant::now();
    while !std::fs::read_to_string(&plan)
        .is_ok_and(|plan| plan != old && plan.contains("\"planned_cases\""))
    {
        assert!(start.elapsed() < Duration::from_secs(30), "the second run did not begin");
        std::thread::sleep(Duration::from_millis(10));
    }
    worker.kill();
    for file in ["report.json", "index.html", "summary.md"] {
        assert!(!dir.path().join("out").join(file).exists(), "{file} is the old run's");
    }
    assert!(
        !read(&dir.path().join("out/records.jsonl")).contains("\"operator\":\"kv_cache_write\"")
    );
}

#[test]
fn a_failure_is_shrunk_after_a_kill_and_the_plan_stays_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let kernels =
        text(&command_line::changed_kernels(dir.path(), "swiglu.cu", PRODUCT, WRONG_PRODUCT));
    let arguments = [
        "--ops",
        "swiglu",
        "--cases",
        "1",
        "--edge-cases",
        "0",
        "--seed",
        "5",
        "--kernels",
        &kernels,
    ];
    run(dir.path(), "out", &arguments).assert_code(1);
    let remembered = read(&dir.path().join("regressions/swiglu.jsonl"));
    let records = dir.path().join("out/records.jsonl");
    let (all, before) = (read(&records), report(&dir.path().join("out")));
    let last = before.cases.last().expect("a case");
    assert_eq!((last.origin, last.verdict()), (Origin::Shrunk, Verdict::Fail));

    // As after a kill between the drawn case and its shrunk case.
    let cut = all.trim_end().rfind('\n').expect("two lines") + 1;
    std::fs::write(&records, &all[..cut]).unwrap();
    std::fs::remove_file(dir.path().join("out/report.json")).unwrap();
    run(dir.path(), "out", &[&arguments[..], &["--resume"]].concat()).assert_code(1);
    let after = report(&dir.path().join("out"));
    // How small a case gets depends on the time that shrinking had.
    let (small, drawn) = after.cases.split_last().expect("cases");
    let (_, drawn_before) = before.cases.split_last().expect("cases");
    assert_eq!(without_times(drawn), without_times(drawn_before));
    assert_eq!((small.origin, small.verdict()), (Origin::Shrunk, Verdict::Fail));
    let saved = read(&dir.path().join("regressions/swiglu.jsonl"));
    let cases: Vec<Value> =
        saved.lines().map(|line| serde_json::from_str(line).expect("a case")).collect();
    assert!(saved.starts_with(&remembered) && cases.contains(&small.case), "{saved}");
    let first = |record: &CaseRecord| {
        let failing = record.checks.iter().find(|check| check.verdict != Verdict::Pass);
        failing.map(|check| (check.check.clone(), check.tensor.clone()))
    };
    assert_eq!(first(small), first(last));
}

#[test]
fn shards_remember_nothing_and_the_merge_remembers_their_failures() {
    let dir = tempfile::tempdir().unwrap();
    let kernels =
        text(&command_line::changed_kernels(dir.path(), "swiglu.cu", PRODUCT, WRONG_PRODUCT));
    let arguments = [
        "--ops",
        "swiglu",
        "--cases",
        "2",
        "--edge-cases",
        "0",
        "--seed",
        "5",
        "--kernels",
        &kernels,
    ];
    for shard in ["0/2", "1/2"] {
        run(dir.path(), &shard[..1], &[&arguments[..], &["--shard", shard]].concat())
            .assert_code(1);
    }
    assert!(!dir.path().join("regressions").exists(), "a shard changed the plan of the others");
    merge_into(dir.path(), "merged", &["0", "1"]).assert_code(1);
    let merged = report(&dir.path().join("merged"));
    let small = merged.cases.last().expect("a case");
    assert_eq!(small.origin, Origin::Shrunk, "the shrunk case stands behind the last drawn one");
    let remembered: Value =
        serde_json::from_str(read(&dir.path().join("regressions/swiglu.jsonl")).trim()).unwrap();
    assert_eq!(remembered, small.case);
}
