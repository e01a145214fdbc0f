//! The `parity` binary as a user runs it: exit codes, output, and files.

use std::path::{Path, PathBuf};
use std::process::Command;

use dsv4_parity::case::Case;
use dsv4_parity::record::{
    CaseRecord, CheckRecord, OperatorRecord, Origin, Report, SCHEMA_VERSION, Verdict,
};
use dsv4_runtime::BackendKind;
use serde_json::json;

use crate::support;

/// A call of the binary in a separate scratch directory.
pub struct Parity {
    command: Command,
    // Removed on drop.
    scratch: tempfile::TempDir,
}

/// The result of a call.
pub struct Output {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// The `parity` executable: cargo's, or `PARITY_BIN` where the tests run without cargo.
pub fn binary() -> PathBuf {
    let binary = std::env::var_os("PARITY_BIN")
        .map_or_else(|| env!("CARGO_BIN_EXE_parity").into(), PathBuf::from);
    // Calls run in other folders.
    std::path::absolute(&binary).unwrap_or(binary)
}

impl Parity {
    pub fn new(arguments: &[&str]) -> Self {
        let scratch = tempfile::tempdir().expect("a scratch directory");
        let mut command = Command::new(binary());
        // Only --backend and the defaults decide, not the backend of the tests themselves.
        command
            .args(arguments)
            .current_dir(scratch.path())
            .env_remove("PARITY_BACKEND")
            .env_remove("GITHUB_ACTIONS");
        if std::env::var_os("PARITY_FIXTURES").is_some() {
            command.env("PARITY_FIXTURES", support::fixtures());
        }
        Self { command, scratch }
    }

    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    /// Runs it; a panic fails every test.
    pub fn run(mut self) -> Output {
        let output = self.command.output().expect("the binary runs");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
        let output = Output {
            code: output.status.code(),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        };
        assert!(!output.stderr.contains("panicked"), "{}", output.stderr);
        assert!(self.scratch.path().is_dir());
        output
    }
}

impl Output {
    pub fn assert_code(&self, code: i32) {
        assert_eq!(self.code, Some(code), "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
    }

    /// Bad input: exit code 2 and one line that holds all of `needles`.
    pub fn assert_bad_input(&self, needles: &[&str]) {
        self.assert_code(2);
        assert_eq!(self.stderr.lines().count(), 1, "more than one line:\n{}", self.stderr);
        assert!(self.stderr.starts_with("parity: "), "{}", self.stderr);
        for needle in needles {
            assert!(self.stderr.contains(needle), "`{needle}` is not in `{}`", self.stderr.trim());
        }
    }
}

fn parity(arguments: &[&str]) -> Output {
    Parity::new(arguments).run()
}

fn backend() -> String {
    support::backend().to_string()
}

fn read(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(path.as_ref())
        .unwrap_or_else(|e| panic!("{}: {e}", path.as_ref().display()))
}

fn records(out: &Path) -> Vec<CaseRecord> {
    read(out.join("records.jsonl"))
        .lines()
        .map(|line| serde_json::from_str(line).expect("a record a line"))
        .collect()
}

const CASE: &str = r#"{"operator":"rms_norm","num_rows":2,"width":8,"dtype":"bf16","weight":"f32","eps":1e-6,"aliasing":"out_of_place","distribution":"normal","magnitude":1.0,"zero_rows":false,"saves_rstd":true,"seed":1}"#;

// ---------------------------------------------------------------- listing

#[test]
fn a_chain_has_no_mutants_of_its_own_and_says_whose_its_kernels_are() {
    parity(&["mutants", "--ops", "attention_output_rotation"])
        .assert_bad_input(&["attention_output_rotation", "sparse_attention,rope"]);
}

#[test]
fn ops_as_json_is_a_list_of_operator_records() {
    let output = parity(&["ops", "--json"]);
    output.assert_code(0);
    let records: Vec<OperatorRecord> = serde_json::from_str(&output.stdout).expect("JSON");
    assert_eq!(
        records.iter().map(|r| r.name.clone()).collect::<Vec<_>>(),
        dsv4_parity::operators::registry::names()
    );
}

#[test]
fn ops_as_json_says_of_each_tensor_what_a_kernel_from_elsewhere_must_know() {
    let output = parity(&["ops", "decode_attention", "--json"]);
    output.assert_code(0);
    let described: Vec<OperatorRecord> = serde_json::from_str(&output.stdout).expect("records");
    let of =
        |name: &str| described[0].tensors.iter().find(|tensor| tensor.name == name).expect(name);
    let q = of("q");
    assert_eq!(
        (q.part.as_str(), q.always, q.axes.join(" ")),
        ("input", true, "batch s_q num_heads head_dim".into())
    );
    assert_eq!(
        (q.dtypes.join(" ").as_str(), q.layouts.starts_with("rows anywhere")),
        ("bf16", true)
    );
    let when = |name: &str| of(name).when.as_deref();
    assert_eq!(when("sink"), Some("sinks: extreme, normal"));
    assert_eq!(when("compressed"), Some("compressed: present"));
    assert_eq!(when("window_length"), Some("decided by lengths, lengths_of"));
    for operator in dsv4_parity::operators::registry::OPERATORS {
        for tensor in operator.describe().tensors {
            assert!(
                tensor.always || tensor.when.is_some(),
                "{}: nobody says when `{}` is there",
                operator.name(),
                tensor.name
            );
        }
    }
}

#[test]
fn doctor_says_which_backends_work_and_fails_when_none_does() {
    let output = parity(&["doctor"]);
    output.assert_code(0);
    let works =
        |name: &str| output.stdout.lines().any(|l| l.starts_with(name) && l.contains(" works: "));
    assert!(works(&backend()), "{}", output.stdout);
    assert!(
        output.stdout.contains("A case of rms_norm was compiled, run and compared"),
        "{}",
        output.stdout
    );
    let path = output
        .stdout
        .split_whitespace()
        .find(|word| word.starts_with('/') && word.ends_with("c++."));
    assert!(
        path.is_some_and(|path| Path::new(path.trim_end_matches('.')).is_file()),
        "{}",
        output.stdout
    );
    // A compiler that prints its version but compiles nothing does not work.
    let dir = tempfile::tempdir().unwrap();
    let broken = dir.path().join("c++");
    std::fs::write(&broken, "#!/bin/sh\n[ \"$1\" = --version ] && echo broken 1 && exit\nexit 7\n")
        .unwrap();
    std::fs::set_permissions(&broken, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let broken = broken.display().to_string();
    let output =
        Parity::new(&["doctor"]).env("CUDA_VISIBLE_DEVICES", "-1").env("PARITY_CXX", &broken).run();
    output.assert_code(3);
    assert!(
        output.stdout.contains("emulator  does not work: a case of rms_norm came to this: launch"),
        "{}",
        output.stdout
    );
    let output = Parity::new(&["doctor"])
        .env("CUDA_VISIBLE_DEVICES", "-1")
        .env("PARITY_CXX", "/nonexistent")
        .run();
    output.assert_code(3);
    assert_eq!(output.stdout.matches("does not work: ").count(), 2, "{}", output.stdout);
}

#[test]
fn bad_usage_ends_with_2() {
    let runs = ["huge profile", "many cases", "99999999999 cases", "an operator twice"];
    let run = [
        ["--profile", "huge"],
        ["--cases", "many"],
        ["--cases", "99999999999"],
        ["--ops", "rope, rope"],
    ];
    for (what, arguments) in runs.into_iter().zip(run) {
        assert_eq!(parity(&[&["run"], &arguments[..]].concat()).code, Some(2), "{what}");
    }
    for arguments in [&["frobnicate"][..], &[]] {
        assert_eq!(parity(arguments).code, Some(2), "{arguments:?}");
    }
}

// ---------------------------------------------------------------- replay

#[test]
fn replay_prints_one_count_of_what_agrees_and_with_all_every_check() {
    let output = parity(&["replay", "--backend", &backend(), CASE]);
    output.assert_code(0);
    assert_eq!(output.stdout.lines().count(), 1, "{}", output.stdout);
    assert!(output.stdout.contains(" checks passed; 1 case agreed"), "{}", output.stdout);
    let output = parity(&["replay", "--backend", &backend(), "--all", CASE]);
    output.assert_code(0);
    for needle in
        ["forward", "gradient", "fully_written", "repeatable", "inputs_unchanged", "budget used"]
    {
        assert!(output.stdout.contains(needle), "`{needle}` is not in\n{}", output.stdout);
    }
    assert!(!output.stdout.contains("FAIL") && !output.stdout.contains("ERROR"));
}

#[test]
fn replay_as_json_is_a_record() {
    let output = parity(&["replay", "--backend", &backend(), "--json", CASE]);
    output.assert_code(0);
    let record: CaseRecord = serde_json::from_str(&output.stdout).expect("JSON");
    assert_eq!(
        (record.operator.as_str(), record.origin, record.verdict()),
        ("rms_norm", Origin::Given, Verdict::Pass)
    );
    assert!(record.checks.iter().all(|check| check.compared > 0));
}

#[test]
fn replay_refuses_what_is_no_case_in_one_line() {
    let replay = |case: &str| parity(&["replay", "--backend", &backend(), case]);
    replay(r#"{"operator":"#).assert_bad_input(&["malformed case"]);
    replay("{}").assert_bad_input(&["operator"]);
    replay(r#"{"operator":"frobnicate"}"#).assert_bad_input(&["frobnicate", "parity ops"]);
    replay(&CASE.replace("\"seed\":1", "\"seed\":1,\"speed\":9")).assert_bad_input(&["speed"]);
    replay(&CASE.replace(",\"seed\":1", "")).assert_bad_input(&["seed"]);
    replay(&CASE.replace("\"width\":8", "\"width\":0")).assert_bad_input(&["width", "0"]);
    replay(&CASE.replace("\"eps\":1e-6", "\"eps\":-1.0")).assert_bad_input(&["eps", "-1"]);
    replay(&CASE.replace("\"width\":8", "\"width\":-8")).assert_bad_input(&["-8"]);
    replay(&CASE.replace("\"bf16\"", "\"f16\"")).assert_bad_input(&["f16"]);
    replay("/nonexistent/cases.jsonl").assert_bad_input(&["/nonexistent/cases.jsonl"]);
}

#[test]
fn replay_of_a_file_names_the_line_that_is_no_case_and_runs_none_before() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("cases.jsonl");
    let replay = |text: &str| {
        std::fs::write(&file, text).unwrap();
        parity(&["replay", "--backend", &backend(), &file.display().to_string()])
    };
    let output = replay(&format!("# remembered\n{CASE}\n\nno case\n"));
    output.assert_bad_input(&["cases.jsonl:4"]);
    assert_eq!(output.stdout, "", "a case ran although the file is malformed");
    replay("# nothing\n").assert_bad_input(&["cases.jsonl", "no case"]);
    let output = replay(&format!("{CASE}\n{}\n", CASE.replace("\"seed\":1", "\"seed\":2")));
    output.assert_code(0);
    assert!(output.stdout.contains("; 2 cases agreed"), "{}", output.stdout);
}

#[test]
fn replay_takes_one_case_of_a_file_by_its_digest() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("cases.jsonl");
    std::fs::write(&file, format!("{CASE}\n{}\n", CASE.replace("\"seed\":1", "\"seed\":2")))
        .unwrap();
    let digest = Case::parse(CASE).unwrap().digest();
    let replay = |digest: &str| {
        parity(&[
            "replay",
            "--backend",
            &backend(),
            "--json",
            &format!("{}#{digest}", file.display()),
        ])
    };
    let output = replay(&digest);
    output.assert_code(0);
    let record: CaseRecord = serde_json::from_str(&output.stdout).expect("one record");
    assert_eq!(record.case["seed"], 1);
    replay("0123456789ab").assert_bad_input(&["cases.jsonl", "no case `0123456789ab`"]);
}

// ---------------------------------------------------------------- run

/// A `run` with its output folder and saved cases in one directory.
fn run(dir: &Path, arguments: &[&str]) -> Output {
    let (out, regressions, backend) = (dir.join("out"), dir.join("regressions"), backend());
    let (out, regressions) = (out.display().to_string(), regressions.display().to_string());
    let fixed = ["run", "--backend", &backend, "--out", &out, "--regressions", &regressions];
    parity(&[&fixed[..], arguments].concat())
}

#[test]
fn run_without_a_gpu_ends_with_3_when_cuda_is_demanded() {
    for demand in [&["--backend", "cuda"][..], &[]] {
        let parity =
            Parity::new(&[&["run", "--ops", "rms_norm", "--cases", "1"][..], demand].concat());
        let output = parity.env("CUDA_VISIBLE_DEVICES", "-1").env("PARITY_BACKEND", "cuda").run();
        output.assert_code(3);
        assert!(output.stderr.contains("cuda backend is not available"), "{}", output.stderr);
    }
}

#[test]
fn run_refuses_an_unknown_operator_and_a_directory_without_kernels() {
    let dir = tempfile::tempdir().unwrap();
    run(dir.path(), &["--ops", "rms_norm,frobnicate"])
        .assert_bad_input(&["frobnicate", "parity ops"]);
    run(dir.path(), &["--kernels", "/nonexistent"]).assert_bad_input(&["/nonexistent"]);
    let empty = tempfile::tempdir().unwrap();
    run(dir.path(), &["--kernels", &empty.path().display().to_string()])
        .assert_bad_input(&["*.cu"]);
}

#[test]
fn run_leaves_a_report_and_repeats_its_cases_from_the_seed() {
    let runs: Vec<_> = [("7", "6"), ("7", "6"), ("8", "6")]
        .map(|(seed, cases)| {
            let dir = tempfile::tempdir().unwrap();
            run(
                dir.path(),
                &["--ops", "swiglu", "--cases", cases, "--edge-cases", "2", "--seed", seed],
            )
            .assert_code(0);
            dir
        })
        .into_iter()
        .collect();
    let cases = |i: usize| {
        let mut records = records(&runs[i].path().join("out"));
        // Cases end in any order: two run at a time.
        records.sort_by_key(|record| record.plan_number);
        records.into_iter().map(|record| record.case).collect::<Vec<_>>()
    };
    assert_eq!(cases(0), cases(1), "the same seed drew other cases");
    assert_ne!(cases(0), cases(2), "another seed drew the same cases");

    let out = runs[0].path().join("out");
    let report: Report =
        serde_json::from_str(&read(out.join("report.json"))).expect("the report parses");
    assert_eq!(
        (report.schema_version, report.seed, report.profile.as_str()),
        (SCHEMA_VERSION, 7, "quick")
    );
    let mut recorded = records(&out);
    // Cases end in any order: two run at a time.
    recorded.sort_by_key(|record| record.plan_number);
    // The report keeps less of passing cases: no picture, and fewer digits of the metrics.
    let told = |cases: &[CaseRecord]| -> Vec<String> {
        let check = |check: &CheckRecord| {
            let measured = check.metrics.is_some();
            format!(
                "{} {} {:?} {} {measured}",
                check.check, check.tensor, check.verdict, check.compared
            )
        };
        let case = |case: &CaseRecord| {
            let checks: Vec<String> = case.checks.iter().map(check).collect();
            format!(
                "{} {:?} {:?} {:?} {} {checks:?}",
                case.case, case.origin, case.plan_number, case.paths, case.replay
            )
        };
        cases.iter().map(case).collect()
    };
    assert!(
        told(&report.cases) == told(&recorded),
        "records.jsonl and report.json tell of other cases"
    );
    let used = |cases: &[CaseRecord]| -> Vec<f64> {
        let metrics =
            cases.iter().flat_map(|case| &case.checks).filter_map(|check| check.metrics.as_ref());
        metrics.map(|metrics| metrics.budget_used).collect()
    };
    let both: Vec<_> = used(&report.cases).into_iter().zip(used(&recorded)).collect();
    assert!(
        !both.is_empty() && both.iter().all(|(kept, whole)| (kept - whole).abs() <= 1e-6 * whole),
        "{both:?}"
    );
    let size = |name: &str| std::fs::metadata(out.join(name)).unwrap().len();
    assert!(3 * size("report.json") < size("records.jsonl"), "{} bytes", size("report.json"));
    assert_eq!(report.verdict(), Verdict::Pass);
    assert_eq!(report.environment.backend, support::backend());
    assert!(report.cases.iter().filter(|c| c.origin == Origin::Drawn).count() >= 3);
    assert!(report.revision.kernels_digest == dsv4_kernels::sources().digest());
    assert!(report.skips.iter().all(|skip| skip.count > 0 && !skip.why.is_empty()));
    for file in ["index.html", "summary.md"] {
        assert!(read(out.join(file)).contains("swiglu"), "{file} does not mention the operator");
    }
    assert!(!runs[0].path().join("regressions").exists(), "a passing run remembered something");
}

/// An executable that writes one result as the benchmarks do, prints the given text, and ends with
/// `code`.
fn benchmarks_that_end_with(dir: &Path, code: i32) -> String {
    let estimate = json!({"point_estimate": 1000.0, "confidence_interval": {"lower_bound": 990.0, "upper_bound": 1010.0}});
    let work =
        json!({"operator": "attention_combine", "bytes": 4e6, "flops": 1e9, "operands": "bf16"});
    let facts = json!({
        "device": support::device().environment().device, "revision": "any", "ceilings": null, "work": {"attention_combine_forward/a": work},
    });
    let files = [
        ("estimates.json", json!({"median": estimate})),
        ("sample.json", json!({"times": [1000.0, 1000.0]})),
        ("benchmark.json", json!({"full_id": "attention_combine_forward/a"})),
        ("parity-facts.json", facts),
    ];
    for (name, content) in &files {
        std::fs::write(dir.join(name), content.to_string()).expect("a file");
    }
    let script = format!(
        "#!/bin/sh\nset -e\necho \"on $PARITY_BACKEND: $*\"\nnew=$CRITERION_HOME/attention_combine_forward/a/new\nmkdir -p $new\n\
         cp {0}/estimates.json {0}/sample.json {0}/benchmark.json $new\ncp {0}/parity-facts.json $CRITERION_HOME\n\
         exit {code}\n",
        dir.display()
    );
    let path = dir.join("kernels");
    std::fs::write(&path, script).expect("a script");
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .expect("permissions");
    path.display().to_string()
}

#[test]
fn one_command_measures_sweeps_and_reports_both() {
    for (code, expected) in [(0, 0), (1, 1)] {
        let dir = tempfile::tempdir().unwrap();
        let executable = benchmarks_that_end_with(dir.path(), code);
        let sweep = ["--ops", "attention_combine", "--cases", "1", "--edge-cases", "2"];
        run(dir.path(), &[&sweep[..], &["--benchmarks", &executable]].concat())
            .assert_code(expected);
        let out = dir.path().join("out");
        let report: Report =
            serde_json::from_str(&read(out.join("report.json"))).expect("the report parses");
        let measured: Vec<_> =
            report.benchmarks.iter().map(|b| (b.id.as_str(), b.median_ns)).collect();
        assert_eq!(measured, [("attention_combine_forward/a", 1000.0)]);
        assert_eq!(report.verdict(), Verdict::Pass);
        assert_eq!(report.skips.iter().any(|skip| skip.what == "some benchmarks"), code == 1);
        let told = format!("on {}: --bench ^(attention_combine)_(forward|backward)\n", backend());
        assert_eq!(read(out.join("benchmarks.txt")), told);
    }
}

#[test]
fn benchmarks_that_measured_nothing_end_a_run_before_it_sweeps() {
    let dir = tempfile::tempdir().unwrap();
    let broken = benchmarks_that_end_with(dir.path(), 3);
    let refused = |arguments: &[&str], needles: &[&str]| {
        run(dir.path(), &[&["--ops", "attention_combine", "--cases", "1"], arguments].concat())
            .assert_bad_input(needles);
        assert!(!dir.path().join("out/report.json").exists());
    };
    let output =
        run(dir.path(), &["--ops", "attention_combine", "--cases", "1", "--benchmarks", &broken]);
    output.assert_code(2);
    assert!(
        output.stderr.contains("exit status: 3") && output.stderr.contains("benchmarks.txt"),
        "{}",
        output.stderr
    );
    refused(&["--benchmarks", "/nonexistent/kernels"], &["--benchmarks /nonexistent/kernels"]);
    refused(&["--criterion", "/nonexistent"], &["--criterion /nonexistent", "parity-facts.json"]);
}

#[test]
fn report_writes_the_same_pages_again_and_refuses_what_is_no_report() {
    let dir = tempfile::tempdir().unwrap();
    run(dir.path(), &["--ops", "swiglu", "--cases", "0"]).assert_code(0);
    let (first, again) = (dir.path().join("out"), dir.path().join("again"));
    let arguments = |file: &Path| {
        [
            "report".to_owned(),
            file.display().to_string(),
            "--out".into(),
            again.display().to_string(),
        ]
    };
    let report = |file: &Path| parity(&arguments(file).each_ref().map(String::as_str));
    report(&first.join("report.json")).assert_code(0);
    for page in ["report.json", "index.html", "summary.md"] {
        assert_eq!(read(first.join(page)), read(again.join(page)), "{page}");
    }
    report(&first.join("records.jsonl")).assert_bad_input(&["records.jsonl"]);
    report(&dir.path().join("absent.json")).assert_bad_input(&["absent.json"]);
}

/// A directory of the kernels with one text in a file replaced.
pub fn changed_kernels(dir: &Path, file: &str, from: &str, to: &str) -> PathBuf {
    let kernels = dir.join("kernels");
    std::fs::create_dir_all(kernels.join("include")).unwrap();
    for (name, text) in dsv4_kernels::sources().files() {
        let changed = name == file;
        assert!(!changed || text.matches(from).count() == 1, "`{from}` must occur once in {file}");
        let text = if changed { text.replace(from, to) } else { text.clone() };
        std::fs::write(kernels.join(name), text).unwrap();
    }
    kernels
}

/// A text in `swiglu.cu`, the operator with the shortest sweep.
pub const PRODUCT: &str = "silu * b * weight";
/// The replacement that makes the kernel wrong.
pub const WRONG_PRODUCT: &str = "1.5f * silu * b * weight";

#[test]
fn kernels_that_do_not_compile_are_compiled_once_and_not_run_while_other_operators_are() {
    let dir = tempfile::tempdir().unwrap();
    let kernels = changed_kernels(dir.path(), "swiglu.cu", PRODUCT, "silu * b * undeclared_weight");
    let kernels = kernels.display().to_string();
    let sweep = ["--ops", "kv_cache_write,swiglu", "--cases", "2", "--edge-cases", "4"];
    let output = run(dir.path(), &[&sweep[..], &["--kernels", &kernels]].concat());
    // Not a disagreement: nothing was compared.
    output.assert_code(2);
    // In the words of g++ or of NVRTC.
    let said = output
        .stderr
        .lines()
        .filter(|line| line.contains("error: ") && line.contains("undeclared_weight"));
    assert_eq!(said.count(), 1, "{}", output.stderr);
    let records = records(&dir.path().join("out"));
    assert!(
        records.iter().all(|r| r.operator == "kv_cache_write" && r.verdict() == Verdict::Pass),
        "{records:?}"
    );
    assert!(!records.is_empty() && !dir.path().join("regressions").exists());
    let report: Report = serde_json::from_str(&read(dir.path().join("out/report.json"))).unwrap();
    let skip = report
        .skips
        .iter()
        .find(|skip| skip.what == "all cases of swiglu")
        .expect("a counted skip");
    assert!(skip.count >= 6 && skip.why.contains("undeclared_weight"), "{skip:?}");
    assert!(
        output.stdout.starts_with("swiglu could not be run, the others agreed: "),
        "{}",
        output.stdout
    );
    let summary = read(dir.path().join("out/summary.md"));
    assert!(summary.starts_with("## ❌ 1 operator could not be run"), "{}", &summary[..80]);

    // The same command with kernels that compile.
    let kernels = changed_kernels(dir.path(), "swiglu.cu", PRODUCT, PRODUCT).display().to_string();
    run(dir.path(), &[&sweep[..], &["--kernels", &kernels]].concat()).assert_code(0);
}

#[test]
fn a_cache_that_cannot_be_written_costs_time_and_no_verdict() {
    let dir = tempfile::tempdir().unwrap();
    let blocked = dir.path().join("a file");
    std::fs::write(&blocked, "").unwrap();
    let arguments =
        ["run", "--ops", "kv_cache_write", "--cases", "0", "--edge-cases", "2", "--schedules", "0"];
    let out = dir.path().join("out").display().to_string();
    let arguments =
        [&arguments[..], &["--backend", "emulator", "--out", &out, "--regressions", &out]].concat();
    let output = Parity::new(&arguments)
        .env("PARITY_CACHE_DIR", &blocked.join("within").display().to_string())
        .run();
    output.assert_code(0);
    assert_eq!(output.stderr.matches("writing the module cache").count(), 1, "{}", output.stderr);
}

#[test]
fn a_run_that_compares_nothing_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let output = run(dir.path(), &["--ops", "kv_cache_write", "--cases", "0", "--edge-cases", "0"]);
    output.assert_code(2);
    assert!(output.stderr.contains("nothing was compared"), "{}", output.stderr);
}

#[test]
fn a_wrong_kernel_is_found_shrunk_remembered_and_replayed() {
    let dir = tempfile::tempdir().unwrap();
    let kernels =
        changed_kernels(dir.path(), "swiglu.cu", PRODUCT, WRONG_PRODUCT).display().to_string();
    let arguments = [
        "--ops",
        "swiglu",
        "--cases",
        "1",
        "--edge-cases",
        "4",
        "--seed",
        "5",
        "--kernels",
        &kernels,
    ];
    let output = run(dir.path(), &arguments);
    output.assert_code(1);
    for needle in [
        "swiglu: all ",
        " fail: forward of y in ",
        "forward y: ",
        "worst at [",
        "replay: parity replay --backend ",
    ] {
        assert!(output.stderr.contains(needle), "`{needle}` is not in\n{}", output.stderr);
    }
    assert!(output.stdout.contains("case(s) disagreed"), "{}", output.stdout);

    let first = records(&dir.path().join("out"));
    let small =
        first.iter().find(|r| r.origin == Origin::Shrunk).expect("the drawn failure was shrunk");
    assert_eq!(small.verdict(), Verdict::Fail);
    let remembered = read(dir.path().join("regressions/swiglu.jsonl"));
    let remembered: Vec<serde_json::Value> =
        remembered.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(remembered, std::slice::from_ref(&small.case));
    let file = dir.path().join("regressions/swiglu.jsonl").display().to_string();
    let saved = format!("failing cases saved for the next run: 1 in {file}");
    assert_eq!(output.stdout.lines().last(), Some(saved.as_str()), "{}", output.stdout);
    let page = read(dir.path().join("out/index.html"));
    assert!(
        page.contains(&format!("Saved for the next run: 1 failing case in <code>{file}</code>."))
    );
    std::fs::rename(dir.path().join("out"), dir.path().join("before")).unwrap();

    assert_eq!(replay_as_printed(&small.replay), Some(1));
    let unchanged = small.replay.replace(&format!(" --kernels {kernels}"), "");
    assert_ne!(unchanged, small.replay);
    assert_eq!(
        replay_as_printed(&unchanged),
        Some(0),
        "the kernels as they are pass the shrunk case"
    );

    run(dir.path(), &arguments).assert_code(1);
    let [before, after] = ["before", "out"].map(|name| dir.path().join(name).display().to_string());
    for sides in [[&before, &after], [&after, &before]] {
        let compared = parity(&["diff", sides[0], sides[1]]);
        compared.assert_code(0);
        assert!(
            !compared.stdout.contains("coverage shrank"),
            "a saved case counts as coverage: {}",
            compared.stdout
        );
    }
    // Cases run at the same time, and end in any order.
    let second = records(&dir.path().join("out"));
    let planned = second.iter().filter(|record| record.plan_number.is_some());
    let second = planned.min_by_key(|record| record.plan_number).expect("a planned case");
    assert_eq!(
        (second.origin, &second.case),
        (Origin::Regression, &small.case),
        "not replayed first"
    );
    let lines = read(dir.path().join("regressions/swiglu.jsonl"));
    let known: std::collections::BTreeSet<&str> = lines.lines().collect();
    assert_eq!(known.len(), lines.lines().count(), "the same case was remembered twice");
}

/// Exit code of a printed command line, with the path of `parity` inserted.
fn replay_as_printed(command: &str) -> Option<i32> {
    let dir = binary().parent().expect("a directory").to_owned();
    let path = std::env::join_paths(
        std::iter::once(dir).chain(std::env::split_paths(&std::env::var_os("PATH")?)),
    )
    .ok()?;
    let output =
        Command::new("sh").args(["-c", command]).env("PATH", path).output().expect("sh runs");
    assert!(!String::from_utf8_lossy(&output.stderr).contains("panicked"));
    output.status.code()
}

/// How many random schedules a case ran under.
fn schedules_of(record: &CaseRecord) -> usize {
    let checks = record.checks.iter().filter(|check| check.check == "schedule_independent");
    let tensors: std::collections::BTreeSet<_> =
        checks.clone().map(|check| &check.tensor).collect();
    if tensors.is_empty() { 0 } else { checks.count() / tensors.len() }
}

#[test]
fn run_and_replay_take_random_schedules_on_the_emulator_unless_they_are_told_not_to() {
    let dir = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| {
        run(
            dir.path(),
            &[&["--ops", "swiglu", "--cases", "0", "--edge-cases", "2"][..], arguments].concat(),
        )
        .assert_code(0);
        let report: Report =
            serde_json::from_str(&read(dir.path().join("out/report.json"))).expect("a report");
        let skips = report.skips.iter().filter(|skip| skip.what == "random schedules").count();
        (report.schedules as usize, report.cases.iter().map(schedules_of).max().unwrap_or(0), skips)
    };
    let replay = |arguments: &[&str]| {
        let output =
            parity(&[&["replay", "--backend", &backend(), "--json", CASE][..], arguments].concat());
        output.assert_code(0);
        schedules_of(&serde_json::from_str(&output.stdout).expect("JSON"))
    };
    if support::backend() == BackendKind::Cuda {
        assert_eq!(
            (run(&[]), run(&["--schedules", "3"]), replay(&["--schedules", "3"])),
            ((0, 0, 1), (0, 0, 1), 0)
        );
        return;
    }
    assert_eq!(run(&[]), (1, 1, 0));
    assert_eq!(run(&["--profile", "ci"]), (4, 4, 0));
    assert_eq!(run(&["--schedules", "2"]), (2, 2, 0));
    assert_eq!(run(&["--schedules", "0"]), (0, 0, 1), "turned off: said once");
    assert_eq!(
        (replay(&[]), replay(&["--schedules", "1"]), replay(&["--schedules", "0"])),
        (4, 1, 0)
    );
}

#[test]
fn a_race_is_shrunk_under_the_schedules_that_showed_it_and_its_replay_names_them() {
    if support::backend() != BackendKind::Emulator {
        return eprintln!("skipped: only the emulator takes the seed of a schedule");
    }
    let dir = tempfile::tempdir().unwrap();
    // Depending on its turn, each thread is off by two ulps or by none: within the budget, but with
    // other bits for each schedule.
    let turn = "[] { __shared__ uint32_t turn; return atomicAdd(&turn, 1u) & 1; }()";
    let mean = "sum_of_squares / static_cast<float>(width) + eps";
    let racing = format!("__uint_as_float(__float_as_uint({mean}) + 2 * {turn})");
    let kernels = changed_kernels(dir.path(), "rms_norm.cu", mean, &racing).display().to_string();
    run(
        dir.path(),
        &[
            "--ops",
            "rms_norm",
            "--kernels",
            &kernels,
            "--cases",
            "1",
            "--edge-cases",
            "0",
            "--schedules",
            "2",
        ],
    )
    .assert_code(1);
    let records = records(&dir.path().join("out"));
    let only_by_schedule = |record: &&CaseRecord| {
        let failing = || record.checks.iter().filter(|check| check.verdict != Verdict::Pass);
        failing().count() > 0 && failing().all(|check| check.check == "schedule_independent")
    };
    let small =
        records.iter().filter(|record| record.origin == Origin::Shrunk).find(only_by_schedule);
    let small = small.expect("a drawn case failed under random schedules alone, and was shrunk");
    let failing =
        small.checks.iter().find(|check| check.verdict != Verdict::Pass).expect("it fails");
    assert!(
        ["under schedule 1: ", "under schedule 2: "]
            .iter()
            .any(|words| failing.message.starts_with(words))
    );
    assert!(small.replay.contains(" --schedules 2 "), "{}", small.replay);
    assert_eq!(replay_as_printed(&small.replay), Some(1));

    // With the barrier in its place the case agrees. The output says that this may be luck only if
    // the input shows an earlier failure.
    let says_so = |given: &str, arguments: &[&str]| {
        let output = parity(&[&["replay", "--backend", "emulator", given][..], arguments].concat());
        output.assert_code(0);
        output.stderr.contains("a race may need other schedules (--schedules 64)")
    };
    let record = serde_json::to_string(small).unwrap();
    let mut passed = small.clone();
    passed.checks.retain(|check| check.verdict == Verdict::Pass);
    let case = small.case.to_string();
    assert!(says_so(&record, &[]) && says_so(&record, &["--schedules", "8", "--json"]));
    assert!(!says_so(&record, &["--schedules", "64"]), "the advice was followed");
    assert!(!says_so(&case, &[]), "nobody says that this case has failed");
    assert!(
        !says_so(&serde_json::to_string(&passed).unwrap(), &[]),
        "the record of a case that agreed"
    );
    let fixtures = dir.path().display().to_string();
    let remembered = Parity::new(&["replay", "--backend", "emulator", &case])
        .env("PARITY_FIXTURES", &fixtures)
        .run();
    assert!(
        remembered.stderr.contains("--schedules 64"),
        "the case is remembered: {}",
        remembered.stderr
    );
}

#[test]
fn run_refuses_remembered_cases_that_it_cannot_read() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join("regressions")).unwrap();
    std::fs::write(dir.path().join("regressions/rms_norm.jsonl"), format!("{CASE}\nno case\n"))
        .unwrap();
    run(dir.path(), &["--ops", "rms_norm"]).assert_bad_input(&["rms_norm.jsonl:2"]);
}

// ---------------------------------------------------------------- golden

#[test]
fn golden_reports_a_truncated_file_and_still_compares_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let names = ["rmsnorm__w1.safetensors", "rmsnorm__u3.safetensors", "rmsnorm__u5.safetensors"];
    for name in names {
        std::fs::copy(support::fixtures().join("golden").join(name), dir.path().join(name))
            .unwrap();
    }
    let folder = dir.path().display().to_string();
    let golden = || parity(&["golden", &folder, "--ops", "rms_norm", "--oracles-only"]);
    golden().assert_code(0);

    let bytes = std::fs::read(dir.path().join(names[1])).unwrap();
    std::fs::write(dir.path().join(names[1]), &bytes[..bytes.len() - 7]).unwrap();
    let output = golden();
    output.assert_code(2);
    assert!(output.stderr.contains(names[1]), "{}", output.stderr);
    for whole in [names[0], names[2]] {
        assert!(
            output.stdout.contains(&format!("{whole}: ")),
            "{whole} is missing in\n{}",
            output.stdout
        );
    }
    assert_eq!(output.stdout.matches("agrees").count(), 2);
}

#[test]
fn golden_that_compares_nothing_is_bad_input() {
    let folder = support::fixtures().join("golden").display().to_string();
    parity(&["golden", "/nonexistent"]).assert_bad_input(&["reading /nonexistent"]);
    let empty = tempfile::tempdir().unwrap();
    parity(&["golden", &empty.path().display().to_string()])
        .assert_bad_input(&["holds no .safetensors file"]);
    let output = parity(&[
        "golden",
        &folder,
        "--ops",
        "rms_norm",
        "--files",
        "absent.safetensors",
        "--oracles-only",
    ]);
    output.assert_bad_input(&["rms_norm"]);
}

/// The text of the command line is a contract too. `SNAPSHOTS=overwrite` writes the snapshots again.
#[test]
fn every_command_has_a_help_and_it_is_the_one_in_the_snapshots() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/suite/help");
    if std::env::var_os("PARITY_BIN").is_some() && !folder.is_dir() {
        return eprintln!("skipped: these tests travelled without their snapshots");
    }
    // As shown in a terminal of the usual width.
    let help_of = |arguments: &[&str]| {
        let output = Parity::new(arguments).env("COLUMNS", "80").run();
        output.assert_code(0);
        output.stdout
    };
    let help = help_of(&["--help"]);
    let list = help.split_once("Commands:\n").and_then(|(_, rest)| rest.split_once("\n\n"));
    // The second line of a summary is indented further.
    let lines = list.expect("a list").0.lines().filter(|line| !line.starts_with("   "));
    let commands: Vec<&str> = lines.filter_map(|line| line.split_whitespace().next()).collect();
    assert!(commands.contains(&"run"), "{help}");

    let mut texts = vec![("parity", help.clone())];
    let others = commands.into_iter().filter(|name| *name != "help");
    texts.extend(others.map(|name| (name, help_of(&[name, "--help"]))));
    let assert = snapbox::Assert::new().action_env("SNAPSHOTS");
    let differs = |(name, text): &(&str, String)| {
        let snapshot = snapbox::Data::read_from(&folder.join(format!("{name}.txt")), None);
        assert.try_eq(Some(name), text.as_str().into(), snapshot.raw()).err()
    };
    let differences: Vec<String> =
        texts.iter().filter_map(differs).map(|error| error.to_string()).collect();
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

#[test]
fn a_fresh_seed_is_printed_recorded_and_repeated_by_the_reports_command() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out").display().to_string();
    let sweep =
        ["run", "--ops", "kv_cache_write", "--cases", "1", "--schedules", "0", "--out", &out];
    let output = parity(&[&sweep[..], &["--seed", "fresh"]].concat());
    output.assert_code(0);
    let drawn: u64 =
        output.stdout.lines().find_map(|line| line.strip_prefix("seed ")?.parse().ok()).unwrap();
    let report: Report =
        serde_json::from_str(&std::fs::read_to_string(format!("{out}/report.json")).unwrap())
            .unwrap();
    assert_eq!(report.seed, drawn);
    assert!(
        report.command.contains(&format!("--seed {drawn}"))
            && !report.command.contains("--seed fresh")
    );
    for several in [&["--shard", "0/2"][..], &["--resume"]] {
        let refused = parity(&[&sweep[..], &["--seed", "fresh"], several].concat());
        refused.assert_bad_input(&["--seed fresh", several[0]]);
    }
    let misspelt = parity(&["run", "--seed", "fresch"]);
    misspelt.assert_code(2);
    assert!(
        misspelt.stderr.contains("fresch") && misspelt.stderr.contains("`fresh`"),
        "{}",
        misspelt.stderr
    );
}
