//! What the commands print and where: closed pipes, full disks, colour, `--quiet`, `--json`, JUnit,
//! annotations.

use std::collections::BTreeSet;
use std::fs::{File, Permissions};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use dsv4_kernels::cache::cache_layout::LayerKind;
use dsv4_kernels::model::config::ExpertFormat;
use dsv4_parity::model::random::{self, Sizes};
use dsv4_parity::mutants::planted;
use dsv4_parity::operators::registry;
use dsv4_parity::record::{OperatorRecord, Report, Verdict};
use quick_junit::TestCaseStatus;
use serde_json::Value;

use crate::command_line::{PRODUCT, Parity, WRONG_PRODUCT, binary, changed_kernels};
use crate::support;

/// The environment of the tests must not change the output.
const SURROUNDINGS: [&str; 7] = [
    "PARITY_BACKEND",
    "PARITY_LOG",
    "GITHUB_ACTIONS",
    "NO_COLOR",
    "CLICOLOR",
    "CLICOLOR_FORCE",
    "CI",
];

const CASE: &str = r#"{"operator":"rms_norm","num_rows":2,"width":8,"dtype":"bf16","weight":"f32","eps":1e-6,"aliasing":"out_of_place","distribution":"normal","magnitude":1.0,"zero_rows":false,"saves_rstd":true,"seed":1}"#;

/// A folder with a report, a history and a repository, in which every command runs.
struct Scene {
    dir: tempfile::TempDir,
}

impl Scene {
    fn new() -> Self {
        let scene = Self { dir: tempfile::tempdir().expect("a directory") };
        for (name, text) in crate::beside::files() {
            std::fs::write(scene.dir.path().join(name), text).expect("a file");
        }
        scene.write_gallery();
        let swept = scene
            .call(&Self::sweep("head", &["--history", "history.jsonl"]))
            .output()
            .expect("it runs");
        assert!(swept.status.success(), "{}", text(&swept.stderr));
        let sizes = Sizes {
            layers: vec![LayerKind::Window],
            hidden_size: 128,
            vocab_size: 8,
            num_experts: 1,
            topk: 1,
            num_hash_layers: 0,
            num_mtp_layers: 0,
            expert_format: ExpertFormat::Mxfp4,
        };
        let tiny = scene.dir.path().join("tiny");
        random::write(&tiny, &sizes.config(), 1, &|_, _| {}).expect("a checkpoint");
        for arguments in [
            &["init", "--quiet", "repository"][..],
            &[
                "-C",
                "repository",
                "-c",
                "user.name=A",
                "-c",
                "user.email=a@b.c",
                "commit",
                "--quiet",
                "--allow-empty",
                "--message",
                "nothing",
            ],
        ] {
            let git = Command::new("git")
                .args(arguments)
                .current_dir(scene.dir.path())
                .output()
                .expect("git runs");
            assert!(git.status.success(), "{}", text(&git.stderr));
        }
        scene
    }

    /// A list of no kernels but one whose library is not there, as a program says that stands for
    /// Python.
    fn write_gallery(&self) {
        let (list, look) = (self.dir.path().join("gallery.toml"), self.dir.path().join("look"));
        let library =
            "[[library]]\nname = 'L'\nsource = ''\nrequires = ['l']\ndistribution = 'l'\n";
        let kernel = "[[kernel]]\nlibrary = 'L'\nname = 'n'\noperator = 'rope'\nworker = 'look'\n";
        std::fs::write(list, format!("{library}{kernel}")).expect("a file");
        let answer = "#!/bin/sh\necho '{\"version\":\"\",\"missing\":[\"l\"]}'\n";
        std::fs::write(&look, answer).expect("a file");
        std::fs::set_permissions(look, Permissions::from_mode(0o755)).expect("a program");
    }

    /// The shortest sweep.
    fn sweep(out: &str, more: &[&str]) -> Vec<String> {
        let backend = support::backend().to_string();
        let fixed = [
            "run",
            "--backend",
            &backend,
            "--ops",
            "kv_cache_write",
            "--cases",
            "0",
            "--edge-cases",
            "2",
        ];
        let fixed =
            [&fixed[..], &["--schedules", "0", "--regressions", "regressions", "--out", out], more]
                .concat();
        fixed.into_iter().map(str::to_owned).collect()
    }

    /// A call with no input, in the folder.
    fn call(&self, arguments: &[String]) -> Command {
        let mut command = Command::new(binary());
        command.args(arguments).current_dir(self.dir.path()).stdin(Stdio::null());
        SURROUNDINGS.iter().for_each(|name| {
            command.env_remove(name);
        });
        command
    }

    fn output(&self, arguments: &[&str]) -> Output {
        let arguments: Vec<String> =
            arguments.iter().map(|argument| (*argument).to_owned()).collect();
        self.call(&arguments).output().expect("it runs")
    }

    /// For each command the shortest call that prints to standard output.
    fn calls(&self) -> Vec<(&'static str, Vec<String>)> {
        let golden = support::fixtures().join("golden").display().to_string();
        let backend = support::backend().to_string();
        let worker = format!("'{}' external-worker --backend {backend}", binary().display());
        let few = ["--cases", "0", "--edge-cases", "1"];
        let external = [
            &["external", "--op", "kv_cache_write", "--worker", &worker, "--out", "external"][..],
            &few,
        ]
        .concat();
        let calls = [
            ("run", Self::sweep("again", &[])),
            ("external", external.into_iter().map(str::to_owned).collect()),
        ];
        let generate = ["generate", "--model", "tiny", "--prompt-tokens", "1", "--max-tokens", "1"];
        let blame = ["blame", "--model", "tiny", "--prompt-tokens", "1", "--max-tokens", "1"];
        let latency = ["latency", "--config", "tiny/config.json", "--batch", "1", "--context", "4"];
        let rest: [(&str, Vec<&str>); 24] = [
            ("checkpoint", vec!["checkpoint", "--check", "tiny"]),
            ("generate", [&generate[..], &["--backend", &backend]].concat()),
            ("blame", [&blame[..], &["--backend", &backend]].concat()),
            ("beside", vec!["beside", "pairs.toml", "ours.jsonl", "theirs.jsonl"]),
            ("gallery", vec!["gallery", "gallery.toml", "--python", "./look", "--out", "gallery"]),
            ("merge", vec!["merge", "head", "--out", "merged", "--regressions", "regressions"]),
            ("diff", vec!["diff", "head", "head"]),
            ("history", vec!["history", "history.jsonl"]),
            ("external-worker", vec!["external-worker", "--backend", &backend]),
            (
                "golden",
                vec![
                    "golden",
                    &golden,
                    "--ops",
                    "rms_norm",
                    "--files",
                    "rmsnorm__w1.safetensors",
                    "--oracles-only",
                ],
            ),
            ("mutants", vec!["mutants", "--list", "--ops", "kv_cache_write"]),
            ("power", [&["power", "--ops", "rms_norm"][..], &few].concat()),
            ("report", vec!["report", "head", "--out", "written"]),
            ("replay", vec!["replay", "--backend", &backend, "--schedules", "0", CASE]),
            (
                "bisect",
                vec![
                    "bisect",
                    "--repo",
                    "repository",
                    "--good",
                    "HEAD",
                    "--bad",
                    "HEAD",
                    "--case",
                    CASE,
                ],
            ),
            ("ops", vec!["ops"]),
            (
                "ranks",
                [
                    "ranks",
                    "--ranks",
                    "1",
                    "--tokens",
                    "4",
                    "--heads",
                    "1",
                    "--topk",
                    "1",
                    "--samples",
                    "1",
                ]
                .to_vec(),
            ),
            (
                "latency",
                [&latency[..], &["--prompts", "0", "--samples", "1", "--backend", &backend]]
                    .concat(),
            ),
            ("doctor", vec!["doctor"]),
            ("compile", vec!["compile", "--arch", "sm_80"]),
            ("coverage", [&["coverage", "--ops", "moe_map"][..], &few].concat()),
            ("completions", vec!["completions", "bash"]),
            ("man", vec!["man"]),
            ("help", vec!["help", "run"]),
        ];
        let rest = rest.map(|(name, call)| (name, call.into_iter().map(str::to_owned).collect()));
        calls.into_iter().chain(rest).collect()
    }

    /// A call with the given standard output. Requests of a worker come from a file with one
    /// request and no folder.
    fn ended(&self, (name, call): &(&str, Vec<String>), stdout: impl Into<Stdio>) -> Output {
        let mut command = self.call(call);
        if *name == "external-worker" {
            let requests = self.dir.path().join("requests");
            std::fs::write(&requests, "no request\n").expect("a file");
            command.stdin(File::open(requests).expect("the file"));
        }
        let child = command.stdout(stdout).stderr(Stdio::piped()).spawn().expect("it runs");
        child.wait_with_output().expect("it ends")
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Names of all commands, as the help lists them.
fn commands() -> Vec<String> {
    let help = Parity::new(&["--help"]).run().stdout;
    let list = help
        .split_once("Commands:\n")
        .and_then(|(_, rest)| rest.split_once("\n\n"))
        .expect("a list")
        .0;
    let lines = list.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    lines.filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()
}

/// A pipe whose reader is closed.
fn closed_pipe() -> std::io::PipeWriter {
    std::io::pipe().expect("a pipe").1
}

/// Whether a call ended before it printed because this machine has no NVRTC.
fn needs_nvrtc(name: &str, output: &Output) -> bool {
    let missing = name == "compile" && output.status.code() == Some(3);
    if missing {
        assert!(text(&output.stderr).contains("NVRTC is needed"), "{}", text(&output.stderr));
        eprintln!("skipped: compile, since this machine has no NVRTC");
    }
    missing
}

#[test]
fn every_command_ends_quietly_when_standard_output_is_closed() {
    let scene = Scene::new();
    let calls = scene.calls();
    let called: BTreeSet<String> = calls.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(called, commands().into_iter().collect::<BTreeSet<_>>(), "a command is not called");
    for call in &calls {
        let output = scene.ended(call, closed_pipe());
        if !needs_nvrtc(call.0, &output) {
            assert_eq!(
                (output.status.code(), text(&output.stderr).as_str()),
                (Some(141), ""),
                "{}",
                call.0
            );
        }
    }
}

#[test]
fn every_command_has_one_error_when_standard_output_cannot_be_written() {
    let scene = Scene::new();
    let full = || File::options().write(true).open("/dev/full").expect("a device that is full");
    for call in &scene.calls() {
        let output = scene.ended(call, full());
        if !needs_nvrtc(call.0, &output) {
            let error =
                "parity: writing to standard output: No space left on device (os error 28)\n";
            assert_eq!(
                (output.status.code(), text(&output.stderr).as_str()),
                (Some(2), error),
                "{}",
                call.0
            );
        }
    }
}

#[test]
fn errors_failures_and_logs_end_quietly_when_standard_error_is_closed() {
    let scene = Scene::new();
    let code = |command: &mut Command| {
        command.stderr(closed_pipe()).output().expect("it runs").status.code()
    };
    let call = |arguments: &[&str]| {
        let arguments: Vec<String> =
            arguments.iter().map(|argument| (*argument).to_owned()).collect();
        scene.call(&arguments)
    };
    assert_eq!(code(&mut call(&["ops", "frobnicate"])), Some(2));
    assert_eq!(code(&mut call(&["frobnicate"])), Some(2));
    // A warning in the log.
    let blocked = scene.dir.path().join("a file");
    std::fs::write(&blocked, "").expect("a file");
    let sweep = Scene::sweep("again", &[]);
    assert_eq!(code(scene.call(&sweep).env("PARITY_CACHE_DIR", blocked.join("within"))), Some(0));
    // A failing case.
    let kernels = changed_kernels(scene.dir.path(), "swiglu.cu", PRODUCT, WRONG_PRODUCT)
        .display()
        .to_string();
    let wrong = [
        "--ops",
        "swiglu",
        "--cases",
        "0",
        "--edge-cases",
        "2",
        "--schedules",
        "0",
        "--kernels",
        &kernels,
    ];
    let backend = support::backend().to_string();
    let wrong = [
        &["run", "--backend", &backend, "--out", "wrong", "--regressions", "regressions"][..],
        &wrong,
    ]
    .concat();
    assert_eq!(code(&mut call(&wrong)), Some(1));
}

// ---------------------------------------------------------------- colour

#[test]
fn output_is_coloured_where_it_is_asked_for_and_nowhere_else() {
    let scene = Scene::new();
    let colored = |arguments: &[&str], environment: &[(&str, &str)]| {
        let arguments: Vec<String> =
            arguments.iter().map(|argument| (*argument).to_owned()).collect();
        let output =
            scene.call(&arguments).envs(environment.iter().copied()).output().expect("it runs");
        (output.stdout.contains(&0x1b), output.stderr.contains(&0x1b))
    };
    assert_eq!(colored(&["ops"], &[]), (false, false));
    assert_eq!(colored(&["ops", "--color", "always"], &[]), (true, false));
    assert_eq!(colored(&["ops", "--color=always"], &[("NO_COLOR", "1")]), (true, false));
    assert_eq!(colored(&["ops"], &[("CLICOLOR_FORCE", "1")]), (true, false));
    // Errors of the harness and of the command line, and help.
    assert_eq!(colored(&["--color", "always", "ops", "frobnicate"], &[]), (false, true));
    assert_eq!(colored(&["ops", "--frobnicate", "--color", "always"], &[]), (false, true));
    assert_eq!(colored(&["ops", "--frobnicate"], &[]), (false, false));
    assert_eq!(colored(&["ops", "--help", "--color", "always"], &[]), (true, false));
    // JSON is never coloured.
    assert_eq!(colored(&["ops", "rope", "--json", "--color", "always"], &[]), (false, false));
    assert_eq!(
        colored(&["diff", "head", "head", "--json", "--color", "always"], &[]),
        (false, false)
    );
}

#[test]
fn a_terminal_is_coloured_unless_no_color_is_set() {
    let scene = Scene::new();
    let on_terminal = |environment: &[(&str, &str)], option: &str| {
        let mut script = Command::new("script");
        let command = format!("'{}' ops {option}", binary().display());
        script
            .args(["--quiet", "--return", "--command", &command, "/dev/null"])
            .current_dir(scene.dir.path());
        SURROUNDINGS.iter().for_each(|name| {
            script.env_remove(name);
        });
        script.env("TERM", "xterm").envs(environment.iter().copied()).stdin(Stdio::null()).output()
    };
    let Ok(output) = on_terminal(&[], "") else {
        return eprintln!("skipped: no `script` gives a terminal here");
    };
    assert!(output.stdout.contains(&0x1b), "{}", text(&output.stdout));
    let plain = [(&[("NO_COLOR", "1")][..], ""), (&[("TERM", "dumb")], ""), (&[], "--color never")];
    for (environment, option) in plain {
        let output = on_terminal(environment, option).expect("it runs");
        assert!(text(&output.stdout).contains("rope"), "{}", text(&output.stdout));
        assert!(!output.stdout.contains(&0x1b), "{environment:?} {option}");
    }
}

// ---------------------------------------------------------------- quiet and verbose

#[test]
fn quiet_leaves_the_verdict_and_the_failures() {
    let scene = Scene::new();
    let lines = |arguments: &[&str]| {
        let output = scene.output(arguments);
        text(&output.stdout).lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let sweep = Scene::sweep("again", &["--quiet"]);
    let sweep: Vec<&str> = sweep.iter().map(String::as_str).collect();
    let run = lines(&sweep);
    assert!(run.len() == 1 && run[0].starts_with("all agreed: "), "{run:?}");
    assert_eq!(lines(&["-q", "diff", "head", "head"]), ["No regression"]);
    assert_eq!(
        lines(&["history", "history.jsonl", "-q"]).last().map(String::as_str),
        Some("no drift")
    );
    let golden = support::fixtures().join("golden").display().to_string();
    let golden = [
        "golden",
        &golden,
        "--ops",
        "rms_norm",
        "--files",
        "rmsnorm__w1.safetensors",
        "--oracles-only",
        "-q",
    ];
    assert_eq!(lines(&golden), ["all 1 golden cases agree"]);
    assert_eq!(scene.output(&["-q", "-v", "ops"]).status.code(), Some(2));
}

#[test]
fn verbose_raises_what_is_logged_of_this_program() {
    let scene = Scene::new();
    let logged = |arguments: &[&str], log: Option<&str>| {
        let sweep = Scene::sweep("again", arguments);
        let mut command = scene.call(&sweep);
        log.map(|log| command.env("PARITY_LOG", log));
        text(&command.output().expect("it runs").stderr)
    };
    assert_eq!(logged(&[], None), "");
    let (info, debug) = (logged(&["-v"], None), logged(&["-vv"], None));
    assert!(
        info.contains("INFO dsv4_parity::command::progress: kv_cache_write: Drawn case, Pass"),
        "{info}"
    );
    assert!(
        !info.contains("DEBUG") && debug.contains("INFO") && debug.contains("DEBUG dsv4_parity"),
        "{debug}"
    );
    assert!(logged(&[], Some("dsv4_parity=debug")).contains("DEBUG dsv4_parity"));
    assert_eq!(logged(&["-q"], Some("trace")), "");
    let refused = Parity::new(&["ops"]).env("PARITY_LOG", "parity=loud").run();
    refused.assert_bad_input(&["PARITY_LOG", "parity=loud"]);
}

// ---------------------------------------------------------------- JSON

#[test]
fn every_command_with_a_table_prints_it_as_json_too() {
    let scene = Scene::new();
    let golden = support::fixtures().join("golden").display().to_string();
    let few = ["--cases", "0", "--edge-cases", "1"];
    let files = ["--files", "rmsnorm__w1.safetensors", "--oracles-only"];
    let calls: [(&str, Vec<&str>); 9] = [
        ("/0/family", vec!["ops"]),
        ("/0/works", vec!["doctor"]),
        ("/findings", vec!["diff", "head", "head"]),
        ("/0/runs/0/value", vec!["history", "history.jsonl"]),
        ("/0/agrees", [&["golden", &golden, "--ops", "rms_norm"][..], &files].concat()),
        ("/0/summary", vec!["mutants", "--list", "--ops", "kv_cache_write"]),
        ("/0/operators", vec!["mutants", "--table", "head"]),
        ("/tensors/0/rules/parity/half", [&["power", "--ops", "rms_norm"][..], &few].concat()),
        (
            "/reasons/0",
            vec![
                "bisect",
                "--repo",
                "repository",
                "--good",
                "HEAD",
                "--bad",
                "HEAD",
                "--case",
                CASE,
            ],
        ),
    ];
    for (pointer, call) in calls {
        let output = scene.output(&[&call[..], &["--json"]].concat());
        let value: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{call:?}: {error}: {}", text(&output.stdout)));
        assert!(value.pointer(pointer).is_some(), "{call:?}: no {pointer} in {value}");
    }
    let output = scene.output(&["compile", "--arch", "sm_80", "--json"]);
    if !needs_nvrtc("compile", &output) {
        let value: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(value.pointer("/0/target"), Some(&Value::from("sm_80")));
    }
}

#[test]
fn mutants_that_were_chosen_are_printed_as_json() {
    let mutants = |more: &[&str]| {
        let dir = tempfile::tempdir().expect("a directory");
        let (out, fixtures) = (
            dir.path().join("out").display().to_string(),
            support::fixtures().display().to_string(),
        );
        let fixed = [
            "mutants",
            "--ops",
            "kv_cache_write",
            "--schedules",
            "0",
            "--json",
            "--out",
            &out,
            "--backend",
            "emulator",
        ];
        let output =
            Parity::new(&[&fixed[..], more].concat()).env("PARITY_FIXTURES", &fixtures).run();
        serde_json::from_str::<Value>(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", output.stdout))
    };
    // A planted mutant has its own cases: the others do not run.
    let planted = planted::load(&support::fixtures().join("mutants")).expect("mutants");
    let one = planted.iter().find(|mutant| mutant.operator == "kv_cache_write").expect("a mutant");
    let results = mutants(&["--only", &one.id]);
    assert_eq!(results.pointer("/0/id"), Some(&Value::from(one.id.as_str())), "{results}");
    assert_eq!(results.pointer("/0/status"), Some(&Value::from("killed")), "{results}");
}

// ---------------------------------------------------------------- continuous integration

/// A sweep of a wrong kernel, and what it printed.
fn wrong_sweep(
    dir: &Path,
    cases: &str,
    more: &[&str],
    environment: &[(&str, &str)],
) -> crate::command_line::Output {
    let kernels = changed_kernels(dir, "swiglu.cu", PRODUCT, WRONG_PRODUCT).display().to_string();
    let (out, regressions) =
        (dir.join("out").display().to_string(), dir.join("regressions").display().to_string());
    let backend = support::backend().to_string();
    let fixed = [
        "run",
        "--backend",
        &backend,
        "--ops",
        "kv_cache_write,swiglu",
        "--cases",
        cases,
        "--edge-cases",
        "1",
    ];
    let fixed =
        [&fixed[..], &["--kernels", &kernels, "--out", &out, "--regressions", &regressions], more]
            .concat();
    environment
        .iter()
        .fold(Parity::new(&fixed), |parity, (name, value)| parity.env(name, value))
        .run()
}

#[test]
fn a_run_writes_junit_with_a_test_case_for_each_operator_and_check() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("junit.xml");
    wrong_sweep(dir.path(), "1", &["--junit", &file.display().to_string()], &[]).assert_code(1);
    let report: Report =
        serde_json::from_slice(&std::fs::read(dir.path().join("out/report.json")).unwrap())
            .unwrap();
    let junit = quick_junit::Report::deserialize_from_str(&std::fs::read_to_string(&file).unwrap())
        .expect("JUnit");
    let mut found = BTreeSet::new();
    for suite in &junit.test_suites {
        for case in &suite.test_cases {
            let (operator, check) = (suite.name.to_string(), case.name.to_string());
            let of_check = |record: &&dsv4_parity::record::CaseRecord| {
                let fails = |one: &dsv4_parity::record::CheckRecord| {
                    one.check == *check && one.verdict != Verdict::Pass
                };
                record.operator == operator && record.checks.iter().any(fails)
            };
            let failing: Vec<_> = report.cases.iter().filter(of_check).collect();
            match &case.status {
                TestCaseStatus::NonSuccess { description, .. } => {
                    let description = description.as_ref().expect("a description").to_string();
                    assert!(
                        failing.iter().any(|record| description.contains(&record.replay)),
                        "{description}"
                    );
                }
                _ => assert!(failing.is_empty(), "{operator} {check} passes"),
            }
            assert!(found.insert((operator, check)), "a test case stands twice");
        }
    }
    let of_records = |record: &dsv4_parity::record::CaseRecord| {
        let operator = record.operator.clone();
        record
            .checks
            .iter()
            .map(|check| (operator.clone(), check.check.to_string()))
            .collect::<Vec<_>>()
    };
    assert_eq!(found, report.cases.iter().flat_map(of_records).collect());
    let unwritable = wrong_sweep(dir.path(), "0", &["--junit", "/nonexistent/junit.xml"], &[]);
    unwritable.assert_code(2);
    assert!(unwritable.stderr.contains("--junit /nonexistent/junit.xml"), "{}", unwritable.stderr);
}

#[test]
fn github_gets_an_annotation_of_each_failing_check_with_file_and_title() {
    let annotations = |more: &[&str], environment: &[(&str, &str)]| {
        let dir = tempfile::tempdir().expect("a directory");
        let output = wrong_sweep(dir.path(), "0", more, environment);
        output.assert_code(1);
        let lines = output.stdout.lines().filter(|line| line.starts_with("::")).map(str::to_owned);
        let folder = dir.path().join("kernels");
        lines.map(|line| line.replace(&folder.display().to_string(), "DIR")).collect::<Vec<_>>()
    };
    let github = annotations(&[], &[("GITHUB_ACTIONS", "true")]);
    let start = "::error file=DIR/swiglu.cu,title=swiglu forward::";
    assert!(github.iter().any(|line| line.starts_with(start)), "{github:?}");
    assert!(github.iter().all(|line| line.contains("%0Aparity replay --")), "{github:?}");
    assert_eq!(annotations(&["--annotations", "github"], &[]).len(), github.len());
    assert!(annotations(&[], &[]).is_empty(), "nobody asked for them");
    assert!(annotations(&["--annotations", "none"], &[("GITHUB_ACTIONS", "true")]).is_empty());
}

// ---------------------------------------------------------------- operators

#[test]
fn ops_lists_each_operator_on_one_line_in_its_family() {
    let output = Parity::new(&["ops"]).run();
    output.assert_code(0);
    let mut family = "";
    let mut listed = Vec::new();
    for line in output.stdout.lines() {
        match line.strip_prefix("  ") {
            Some(operator) => {
                listed.push((family, operator.split_whitespace().next().expect("a name")))
            }
            None => family = line.split(':').next().expect("a family"),
        }
    }
    listed.sort_unstable();
    let mut expected: Vec<_> =
        registry::OPERATORS.iter().map(|one| (one.family().name(), one.name())).collect();
    expected.sort_unstable();
    assert_eq!(listed, expected);
}

#[test]
fn ops_of_a_name_describes_it_as_a_whole() {
    let output = Parity::new(&["ops", "rope", "score_recompute"]).run();
    output.assert_code(0);
    let cited =
        "    specification  training 5, Attention-score recompute: the distillation target\n";
    assert!(output.stdout.contains(cited), "{}", output.stdout);
    for operator in ["rope", "score_recompute"] {
        let OperatorRecord { name, summary, kernel_file, oracle_file, axes, tensors, .. } =
            registry::find(operator).expect("an operator").describe();
        let tensors = tensors.into_iter().map(|tensor| format!("\n    {} ", tensor.name));
        for needle in [format!("{name}: {summary}"), kernel_file, oracle_file, axes.join(", ")]
            .into_iter()
            .chain(tensors)
        {
            assert!(output.stdout.contains(&needle), "`{needle}` is not described");
        }
    }
}

#[test]
fn the_example_of_each_operator_is_a_case_with_data_that_replay_takes() {
    let output = Parity::new(&["ops", "--example"]).run();
    output.assert_code(0);
    let cases: Vec<&str> = output.stdout.lines().collect();
    assert_eq!(cases.len(), registry::OPERATORS.len());
    for (line, operator) in cases.iter().zip(registry::OPERATORS) {
        let case = dsv4_parity::case::Case::parse(line).expect("a case");
        assert_eq!(case.operator, operator.name());
        registry::prepare(&case).unwrap_or_else(|error| panic!("{line}: {error}"));
        let fields = serde_json::to_value(&case).expect("JSON");
        let sizes = fields
            .as_object()
            .expect("fields")
            .iter()
            .filter(|(name, _)| name.starts_with("num_tokens") || *name == "num_rows");
        sizes.for_each(|(name, size)| assert_ne!(size, &Value::from(0), "{line}: {name}"));
    }
    let one = Parity::new(&["ops", "swiglu", "--example"]).run().stdout;
    assert!(cases.contains(&one.trim_end()));
    let backend = support::backend().to_string();
    let replayed =
        Parity::new(&["replay", "--backend", &backend, "--schedules", "0", one.trim_end()]).run();
    replayed.assert_code(0);
}

#[test]
fn an_unknown_operator_is_answered_with_similar_ones() {
    for (wrong, right) in
        [("rpoe", "`rope`"), ("sparse-attention", "`sparse_attention`"), ("RMS_norm", "`rms_norm`")]
    {
        let hint = format!("did you mean {right}");
        Parity::new(&["ops", wrong]).run().assert_bad_input(&[wrong, &hint, "parity ops"]);
        Parity::new(&["run", "--ops", wrong]).run().assert_bad_input(&[wrong, &hint]);
        Parity::new(&["external", "--op", wrong, "--worker", "true"])
            .run()
            .assert_bad_input(&[wrong, &hint]);
        let case = CASE.replace("rms_norm", wrong);
        Parity::new(&["replay", &case]).run().assert_bad_input(&[wrong, &hint]);
    }
    Parity::new(&["ops", "attention"]).run().assert_bad_input(&[
        "`sparse_attention`",
        "`attention_layer`",
        " or ",
    ]);
    let nothing = Parity::new(&["ops", "zzz"]).run();
    nothing.assert_bad_input(&["zzz", "parity ops"]);
    assert!(!nothing.stderr.contains("did you mean"), "{}", nothing.stderr);
    // From clap, for commands and options.
    assert!(Parity::new(&["replya"]).run().stderr.contains("'replay'"));
    assert!(Parity::new(&["run", "--opps", "rope"]).run().stderr.contains("'--ops'"));
}

// ---------------------------------------------------------------- version, completions, man pages

#[test]
fn the_version_names_the_revision() {
    let scene = Scene::new();
    let report: Report =
        serde_json::from_slice(&std::fs::read(scene.dir.path().join("head/report.json")).unwrap())
            .unwrap();
    let revision = report.revision;
    let commit =
        if revision.commit == "unknown" { "unknown revision" } else { &revision.commit[..12] };
    let changes = if revision.dirty { ", uncommitted changes" } else { "" };
    let version = format!("parity {} ({commit}{changes})\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(
        [&["--version"], &["-V"]].map(|call| Parity::new(call).run().stdout),
        [version.clone(), version]
    );
}

#[test]
fn completions_are_printed_for_every_shell_and_bash_takes_them() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let output = Parity::new(&["completions", shell]).run();
        output.assert_code(0);
        for word in commands().iter().map(String::as_str).chain(["--edge-cases", "--junit"]) {
            // fish and zsh write options in parts.
            assert!(
                output.stdout.contains(word.trim_start_matches('-')),
                "{shell} does not complete {word}"
            );
        }
    }
    assert_eq!(Parity::new(&["completions", "tcsh"]).run().code, Some(2));
    let script = Parity::new(&["completions", "bash"]).run().stdout;
    let asked = "\nCOMP_WORDS=(parity ru); COMP_CWORD=1; _parity parity ru parity; echo \"${COMPREPLY[@]}\"\n";
    let mut bash = Command::new("bash")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("bash runs");
    bash.stdin.take().expect("a pipe").write_all((script + asked).as_bytes()).expect("bash reads");
    assert_eq!(text(&bash.wait_with_output().expect("bash ends").stdout).trim(), "run");
}

#[test]
fn man_pages_are_written_for_every_command() {
    let dir = tempfile::tempdir().expect("a directory");
    Parity::new(&["man", "--out", &dir.path().join("man1").display().to_string()])
        .run()
        .assert_code(0);
    let page = |name: &str| {
        std::fs::read_to_string(dir.path().join("man1").join(name))
            .unwrap_or_else(|e| panic!("{name}: {e}"))
    };
    for command in commands().into_iter().filter(|name| name != "help") {
        assert!(page(&format!("parity-{command}.1")).contains(".TH parity"), "{command}");
    }
    let first = page("parity.1");
    for needle in ["PARITY_CXX", "Exit codes", "parity\\-run(1)"] {
        assert!(first.contains(needle), "`{needle}` is not in\n{first}");
    }
    assert_eq!(Parity::new(&["man"]).run().stdout, first);
    Parity::new(&["man", "--out", "/proc/nowhere"])
        .run()
        .assert_bad_input(&["--out /proc/nowhere"]);
}

// ---------------------------------------------------------------- what the help and messages say

/// The sources below a folder of the project; none where the tests run without sources.
fn sources(folder: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).expect("a source");
                found.push((path, text));
            }
        }
    }
    found
}

#[test]
fn the_help_names_every_environment_variable_that_is_read() {
    /// Variables between processes of this program, at build time, and of tests.
    const OWN: [&str; 11] = [
        "PARITY_THREADS",
        "PARITY_WORKER",
        "PARITY_SUPERVISOR",
        "PARITY_TURNS",
        "PARITY_MACHINE_TURNS",
        "PARITY_COMMIT",
        "PARITY_DIRTY",
        "PARITY_VERSION",
        "PARITY_ABSENT",
        "PARITY_TESTS",
        "PARITY_EMULATOR",
    ];
    let help = Parity::new(&["--help"]).run().stdout;
    let mut read = BTreeSet::new();
    for (_, source) in sources("src").into_iter().chain(sources("kernels/src")) {
        for rest in source.split("\"PARITY_").skip(1) {
            let name: String =
                rest.chars().take_while(|c| c.is_ascii_uppercase() || *c == '_').collect();
            if rest[name.len()..].starts_with('"') {
                read.insert(format!("PARITY_{name}"));
            }
        }
    }
    for name in read.iter().filter(|name| !OWN.contains(&name.as_str())) {
        assert!(help.contains(&format!("  {name} ")), "{name} is read, and not in\n{help}");
    }
    for name in [
        "PARITY_CXX",
        "PARITY_NVRTC",
        "PARITY_CACHE_DIR",
        "PARITY_LOG",
        "PARITY_CUDA_DEVICE",
        "PARITY_SM",
    ] {
        assert!(help.contains(name), "{name} is not in\n{help}");
    }
}

#[test]
fn memory_is_an_option_where_inputs_are_made_and_nowhere_else() {
    let with = commands().into_iter().filter(|name| name != "help");
    let with = with.filter(|name| Parity::new(&[name, "--help"]).run().stdout.contains("--memory"));
    let expected = [
        "bisect",
        "coverage",
        "external",
        "external-worker",
        "golden",
        "mutants",
        "power",
        "ranks",
        "replay",
        "run",
    ];
    assert_eq!(with.collect::<BTreeSet<_>>(), expected.into_iter().map(str::to_owned).collect());
}

#[test]
fn a_kernel_that_is_not_ours_is_an_external_kernel() {
    let all = ["src", "kernels/src", "reference/src"].map(sources).into_iter().flatten();
    for (path, source) in all {
        for words in ["ernel from elsewhere", "ernels from elsewhere", "process from elsewhere"] {
            assert!(!source.contains(words), "{} says `{words}`", path.display());
        }
    }
}

#[test]
fn help_fits_into_eighty_columns() {
    for name in commands()
        .iter()
        .map(String::as_str)
        .filter(|name| *name != "help")
        .chain(["--color=never"])
    {
        let help = Parity::new(&[name, "--help"]).env("COLUMNS", "80").run().stdout;
        let long: Vec<&str> = help.lines().filter(|line| line.chars().count() > 80).collect();
        assert!(long.is_empty(), "{name}: {long:#?}");
    }
}

#[test]
fn what_is_missing_says_what_to_do() {
    let nvrtc = Parity::new(&["compile"]).env("PARITY_NVRTC", "/nonexistent").run();
    nvrtc.assert_code(3);
    for needle in
        ["NVRTC is needed", "pip install nvidia-cuda-nvrtc", "PARITY_NVRTC", "/nonexistent"]
    {
        assert!(nvrtc.stderr.contains(needle), "`{needle}` is not in\n{}", nvrtc.stderr);
    }
    let external = Parity::new(&["external", "--op", "rope"]).run();
    external.assert_code(2);
    let (worker, cmd) = (external.stderr.find("--worker"), external.stderr.find("--cmd"));
    assert!(worker.is_some() && worker < cmd, "{}", external.stderr);
    for command in
        [&["mutants", "--ops", "rope"][..], &["power", "--ops", "rope", "--mutants", "x"]]
    {
        let output = Parity::new(command).env("PARITY_FIXTURES", "nowhere").run();
        output.assert_bad_input(&["nowhere/mutants", "checkout of dsv4-parity", "PARITY_FIXTURES"]);
    }
}

#[test]
fn tables_end_with_a_legend_of_their_columns() {
    let scene = Scene::new();
    let printed = |arguments: &[&str]| text(&scene.output(arguments).stdout);
    let power = ["power", "--ops", "rms_norm", "--cases", "0", "--edge-cases", "1"];
    let table = printed(&power);
    let columns: Vec<&str> =
        table.lines().next().expect("a head").split("  ").map(str::trim).collect();
    let legend = table.split_once("Columns: ").expect("a legend").1;
    for column in columns.into_iter().filter(|column| !["", "operator", "tensor"].contains(column))
    {
        assert!(legend.contains(column), "`{column}` is not in\n{legend}");
    }
    assert!(!printed(&[&power[..], &["--quiet"]].concat()).contains("Columns: "));
    let history = printed(&["history", "history.jsonl"]);
    let (table, legend) = history.split_once("Each line is a measure").expect("a legend");
    for metric in ["budget_used", "budget_used_worst", "budget_relative"] {
        assert_eq!(
            (table.contains(metric), legend.contains(metric)),
            (true, true),
            "{metric}\n{history}"
        );
    }
}

#[test]
fn a_folder_whose_name_is_no_utf_8_and_empty_variables_are_no_trouble() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;

    let dir = tempfile::tempdir().expect("a directory");
    let out = dir.path().join(OsStr::from_bytes(b"name\xff"));
    let ended = Command::new(binary())
        .args(["run", "--backend", "emulator", "--ops", "swiglu", "--cases", "1"])
        .args(["--edge-cases", "0", "--out"])
        .arg(&out)
        .env("PARITY_CACHE_DIR", "")
        .env("PARITY_FIXTURES", "")
        .env("PARITY_CXX", "")
        .current_dir(dir.path())
        .output()
        .expect("the binary runs");
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(0), "{said}");
    assert!(out.join("report.json").is_file(), "{said}");
    let made: Vec<_> = std::fs::read_dir(dir.path()).expect("a folder").collect();
    assert_eq!(made.len(), 1, "only the report: {made:?}");
}
