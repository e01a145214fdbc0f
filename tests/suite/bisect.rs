//! `parity bisect` on scripted repositories, and `git bisect run parity replay`.
//!
//! Every commit of a scripted repository changes the kernels, at least a comment, so that each is
//! compiled again. Compiled modules go to a separate cache for the test.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use dsv4_runtime::BackendKind;

use crate::command_line::{self, Output, Parity};
use crate::extent::left_out;
use crate::support;

/// Rooms whose changes run the long tests of this file.
const BISECT: [&str; 3] = ["src/bisect/", "src/command/bisect.rs", "src/sweep/"];

/// A repository whose commits are `Change 0`, `Change 1`, …, tagged `c0`, `c1`, …
struct Scripted {
    dir: tempfile::TempDir,
}

/// The changes of a commit to today's `rms_norm.cu`: texts in it, and their replacements.
type Patches = Vec<(&'static str, String)>;

impl Scripted {
    /// `count` commits; `patches(i)` are the changes of the kernels from commit `i` to the next,
    /// `files(i)` are other files.
    fn new(
        count: usize,
        patches: impl Fn(usize) -> Patches,
        files: impl Fn(usize) -> Vec<(String, String)>,
    ) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let script = Self { dir };
        script.git(&["init", "--quiet", "--initial-branch=main"]);
        let mut stream = String::new();
        for at in 0..count {
            let message = format!("Change {at}");
            let _ = write!(
                stream,
                "commit refs/heads/main\ncommitter A <a@b.c> {} +0000\n",
                1_700_000_000 + at
            );
            let _ = writeln!(stream, "data {}\n{message}", message.len());
            for (path, text) in kernels(at, &patches(at)).into_iter().chain(files(at)) {
                let _ = write!(stream, "M 100644 inline {path}\ndata {}\n{text}\n", text.len());
            }
            let _ = write!(stream, "\nreset refs/tags/c{at}\nfrom refs/heads/main\n\n");
        }
        let mut import = script
            .command(&["fast-import", "--quiet"])
            .stdin(Stdio::piped())
            .spawn()
            .expect("git runs");
        import.stdin.take().expect("a pipe").write_all(stream.as_bytes()).expect("git reads");
        assert!(import.wait().expect("git ends").success());
        script
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("git");
        command
            .arg("-C")
            .arg(self.dir.path())
            .args(arguments)
            .env("PARITY_CACHE_DIR", self.cache());
        command
    }

    fn git(&self, arguments: &[&str]) -> String {
        let output = self.command(arguments).output().expect("git runs");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(
            output.status.success(),
            "git {arguments:?}: {}{}",
            text(&output.stdout),
            text(&output.stderr)
        );
        text(&output.stdout)
    }

    fn id(&self, at: usize) -> String {
        self.git(&["rev-parse", &format!("c{at}")]).trim().to_owned()
    }

    fn cache(&self) -> PathBuf {
        self.dir.path().join(".git/parity-cache")
    }

    fn out(&self) -> PathBuf {
        self.dir.path().join(".git/bisect-page")
    }

    /// Bisects from the first commit to the last.
    fn bisect(&self, last: usize, arguments: &[&str]) -> Output {
        self.bisect_on(support::backend(), last, arguments)
    }

    fn bisect_on(&self, backend: BackendKind, last: usize, arguments: &[&str]) -> Output {
        let (repo, out) = (self.dir.path().display().to_string(), self.out().display().to_string());
        let (bad, backend) = (format!("c{last}"), backend.to_string());
        let fixed = [
            "bisect",
            "--good",
            "c0",
            "--bad",
            &bad,
            "--repo",
            &repo,
            "--out",
            &out,
            "--backend",
            &backend,
        ];
        let cache = self.cache().display().to_string();
        Parity::new(&[&fixed[..], arguments].concat()).env("PARITY_CACHE_DIR", &cache).run()
    }
}

/// Every kernel source by its path in the repository, `rms_norm.cu` with the patches and an extra
/// comment.
fn kernels(at: usize, patches: &Patches) -> BTreeMap<String, String> {
    let mut files = dsv4_kernels::sources().files().clone();
    // The one kernel that runs; the others would only make the script longer.
    files.retain(|name, _| name == "rms_norm.cu" || name.ends_with(".h"));
    let text = files.get_mut("rms_norm.cu").expect("rms_norm.cu");
    for (from, to) in patches {
        assert!(text.contains(from), "`{from}` is not in rms_norm.cu");
        *text = text.replace(from, to);
    }
    let _ = writeln!(text, "// Change {at}");
    files.into_iter().map(|(name, text)| (format!("kernels/cuda/{name}"), text)).collect()
}

fn no_files(_: usize) -> Vec<(String, String)> {
    Vec::new()
}

fn case(num_rows: usize, width: usize) -> String {
    format!(
        r#"{{"operator":"rms_norm","num_rows":{num_rows},"width":{width},"dtype":"bf16","weight":"f32","eps":1e-6,"aliasing":"out_of_place","distribution":"normal","magnitude":1.0,"zero_rows":false,"saves_rstd":true,"seed":1}}"#
    )
}

const MEAN: &str = "sum_of_squares / static_cast<float>(width) + eps";

fn wrong_mean() -> (&'static str, String) {
    (MEAN, MEAN.replace("(width)", "(width + 1)"))
}

fn does_not_compile() -> (&'static str, String) {
    (MEAN, "sum_of_squares / undeclared_width".into())
}

fn found(output: &Output, repository: &Scripted, at: usize) {
    output.assert_code(0);
    let line = format!("first bad commit: {} Change {at}\n", repository.id(at));
    assert!(output.stdout.contains(&line), "`{line}` is not in\n{}", output.stdout);
}

/// Lines of the form `WORD COMMIT Change N: …`.
fn trials(output: &Output, word: &str) -> Vec<usize> {
    let of_word = output.stdout.lines().filter(|line| line.starts_with(word));
    let number = |line: &str| line.split("Change ").nth(1)?.split(':').next()?.parse().ok();
    of_word.filter_map(number).collect()
}

// ---------------------------------------------------------------- agree

#[test]
fn a_planted_regression_among_64_commits_is_found_past_two_that_do_not_compile() {
    let repository = Scripted::new(
        64,
        |at| match at {
            32 | 40 => vec![does_not_compile()],
            43.. => vec![wrong_mean()],
            _ => vec![],
        },
        no_files,
    );
    let before = repository.git(&["status", "--porcelain", "--branch"]);
    let start = Instant::now();
    let output = repository.bisect(63, &["--case", &case(4, 256)]);
    let seconds = start.elapsed().as_secs_f64();
    println!("64 commits bisected in {seconds:.1} s\n{}", output.stdout);
    found(&output, &repository, 43);
    assert_eq!(trials(&output, "skip "), [32, 40], "the two that do not compile stood in the way");
    // Two ends, two skips, and halvings, of which the skips make two uneven. This bounds the work;
    // a time limit would depend on the load of the machine.
    let tried =
        ["good ", "bad ", "skip "].map(|word| trials(&output, word).len()).iter().sum::<usize>();
    assert!(tried <= 12, "{tried} commits were compiled");
    assert!(output.stdout.contains("undeclared_width"), "the compiler is not quoted");
    assert!(
        output.stdout.contains(&format!("+    return rsqrt_approx({});", wrong_mean().1)),
        "no diff"
    );
    let page = std::fs::read_to_string(repository.out().join("index.html")).expect("the page");
    assert!(page.contains("<svg") && page.contains("Change 43") && page.contains("(width + 1)"));
    assert_eq!(
        repository.git(&["status", "--porcelain", "--branch"]),
        before,
        "the repository was touched"
    );
}

#[test]
fn broken_commits_at_the_turn_are_reported_as_a_range() {
    if left_out(&BISECT) {
        return;
    }
    let repository = Scripted::new(
        9,
        |at| match at {
            4 | 5 => vec![does_not_compile()],
            6.. => vec![wrong_mean()],
            _ => vec![],
        },
        no_files,
    );
    let output = repository.bisect(8, &["--case", &case(2, 64)]);
    output.assert_code(0);
    let range = output
        .stdout
        .split("is one of these")
        .nth(1)
        .expect("a range")
        .split("diff --git")
        .next()
        .unwrap();
    for at in 0..9 {
        assert_eq!(
            range.contains(&repository.id(at)),
            (4..=6).contains(&at),
            "commit {at} in\n{range}"
        );
    }
}

#[test]
fn an_operator_without_a_case_is_bisected_on_the_first_case_that_differs() {
    if left_out(&BISECT) {
        return;
    }
    let repository =
        Scripted::new(5, |at| if at >= 2 { vec![wrong_mean()] } else { vec![] }, no_files);
    found(&repository.bisect(4, &["--op", "rms_norm", "--cases", "2"]), &repository, 2);
}

#[test]
fn a_revision_with_other_parameter_structs_is_judged_by_its_own_harness() {
    if left_out(&BISECT) {
        return;
    }
    if Command::new("cargo").arg("--version").output().is_err() {
        return println!("skipped: the harness of a revision is built by cargo, which is not here");
    }
    // A renamed field is another layout. The harness of those revisions is a stand-in with a fixed
    // answer.
    let renamed = || ("num_partials", "num_partial_rows".to_owned());
    let harness = |at: usize| {
        let manifest =
            "[package]\nname = \"parity\"\nversion = \"0.1.0\"\nedition = \"2021\"\n[workspace]\n";
        let program = format!("fn main() {{ std::process::exit({}) }}\n", i32::from(at >= 5));
        vec![("Cargo.toml".to_owned(), manifest.to_owned()), ("src/main.rs".to_owned(), program)]
    };
    let patches = |at: usize| match at {
        2..=5 => vec![renamed()],
        6.. => vec![wrong_mean()],
        _ => vec![],
    };
    let repository = Scripted::new(9, patches, harness);
    let output = repository.bisect(8, &["--case", &case(2, 64)]);
    found(&output, &repository, 5);
    assert_eq!(output.stdout.matches("by its own harness").count(), 2, "{}", output.stdout);
    assert_eq!(repository.git(&["worktree", "list"]).lines().count(), 1, "a worktree stayed");
}

// ---------------------------------------------------------------- other metrics

/// The sum for dx's mean term; the drift keeps it in 20 bits of fraction instead of 23.
const SUM: &str = "sum += dy[e] * weight[e] * x[e];";

#[test]
fn a_narrowed_accumulator_that_no_budget_fails_is_found_by_its_error() {
    if left_out(&BISECT) {
        return;
    }
    let narrow =
        "sum = __uint_as_float(__float_as_uint(sum + dy[e] * weight[e] * x[e]) & 0xfffffffeu);";
    let narrowed = || (SUM, narrow.to_owned());
    let repository =
        Scripted::new(16, |at| if at >= 11 { vec![narrowed()] } else { vec![] }, no_files);
    let case = case(64, 512).replace("bf16", "f32");
    let output = repository.bisect(15, &["--case", &case]);
    output.assert_code(1);
    assert!(
        output.stdout.contains("the bad revision is not bad: every check passes"),
        "{}",
        output.stdout
    );
    let output = repository.bisect(15, &["--case", &case, "--metric", "error"]);
    println!("{}", output.stdout);
    found(&output, &repository, 11);
    assert!(output.stdout.contains("dx: "), "{}", output.stdout);
}

#[test]
fn a_missing_barrier_is_found_by_runs_that_differ() {
    if left_out(&BISECT) {
        return;
    }
    let barrier = "        __syncthreads();\n    }\n    float* partial =";
    let missing = || (barrier, "    }\n    float* partial =".to_owned());
    let repository =
        Scripted::new(8, |at| if at >= 3 { vec![missing()] } else { vec![] }, no_files);
    let output = repository.bisect(7, &["--case", &case(24, 64), "--metric", "determinism"]);
    println!("{}", output.stdout);
    found(&output, &repository, 3);
}

#[test]
fn wasted_time_is_found_by_paired_runs() {
    if left_out(&BISECT) {
        return;
    }
    // Several times the time of a call: load on the machine after the endpoints were told apart
    // must not hide it.
    let spin = || {
        let waste = "    volatile float spin = 0.0f;\n    for (int i = 0; i < 8000; ++i) spin = spin + 1.0f;\n";
        ("    return rsqrt_approx(", format!("{waste}    return rsqrt_approx("))
    };
    let repository = Scripted::new(8, |at| if at >= 6 { vec![spin()] } else { vec![] }, no_files);
    // Times on a GPU that other tests share are not reliable.
    let output = repository.bisect_on(
        BackendKind::Emulator,
        7,
        &["--case", &case(16, 256), "--metric", "time"],
    );
    println!("{}", output.stdout);
    found(&output, &repository, 6);
}

// ---------------------------------------------------------------- exit codes

#[test]
fn endpoints_that_do_not_differ_end_with_1_for_every_metric() {
    if left_out(&BISECT) {
        return;
    }
    let repository = Scripted::new(3, |_| vec![], no_files);
    for metric in ["agree", "error", "determinism", "time"] {
        let output = repository
            .bisect(2, &["--case", &case(16, 64), "--metric", metric, "--most-runs", "32"]);
        output.assert_code(1);
        assert!(output.stdout.contains("cannot be told apart"), "{}", output.stdout);
    }
}

#[test]
fn questions_that_make_no_sense_end_with_2_in_one_line() {
    let repository =
        Scripted::new(3, |at| if at == 2 { vec![does_not_compile()] } else { vec![] }, no_files);
    let case = case(2, 64);
    let refused = |output: Output, needle: &str| {
        output.assert_code(2);
        assert_eq!(output.stderr.lines().count(), 1, "{}", output.stderr);
        assert!(output.stderr.contains(needle), "`{needle}` is not in {}", output.stderr);
    };
    refused(repository.bisect(9, &["--case", &case]), "`c9` names no commit");
    refused(repository.bisect(2, &["--case", &case]), "does not compile");
    refused(repository.bisect(1, &["--case", "{}"]), "operator");
    refused(repository.bisect(1, &["--op", "frobnicate"]), "frobnicate");
    let repo = repository.dir.path().display().to_string();
    let ends = |good: &str, bad: &str, repo: &str| {
        Parity::new(&[
            "bisect",
            &format!("--good={good}"),
            "--bad",
            bad,
            "--repo",
            repo,
            "--case",
            &case,
        ])
        .run()
    };
    refused(ends("c1", "c0", &repo), "line of first parents");
    refused(ends("c0", "c1", "/nonexistent"), "/nonexistent");
    refused(ends("--all", "c1", &repo), "--all");
    assert_eq!(repository.bisect(1, &[]).code, Some(2), "neither case nor operator");
}

#[test]
fn without_the_demanded_backend_it_ends_with_3() {
    let repository = Scripted::new(2, |_| vec![], no_files);
    let repo = repository.dir.path().display().to_string();
    let case = case(2, 64);
    let arguments = [
        "bisect",
        "--good",
        "c0",
        "--bad",
        "c1",
        "--repo",
        &repo,
        "--case",
        &case,
        "--backend",
        "cuda",
    ];
    Parity::new(&arguments).env("CUDA_VISIBLE_DEVICES", "-1").run().assert_code(3);
}

#[test]
fn git_bisect_run_understands_the_exit_codes_of_replay() {
    if left_out(&BISECT) {
        return;
    }
    // The commit that does not compile is in the middle.
    let patches = |at: usize| match at {
        4 => vec![does_not_compile()],
        6.. => vec![wrong_mean()],
        _ => vec![],
    };
    let repository = Scripted::new(9, patches, no_files);
    repository.git(&["reset", "--quiet", "--hard"]);
    let replay = |at: usize| {
        repository.git(&["checkout", "--quiet", &format!("c{at}")]);
        let kernels = repository.dir.path().join("kernels/cuda");
        let (kernels, backend) = (kernels.display().to_string(), support::backend().to_string());
        Parity::new(&["replay", "--backend", &backend, "--kernels", &kernels, &case(2, 64)])
            .run()
            .code
    };
    assert_eq!([3, 4, 6].map(replay), [Some(0), Some(125), Some(1)]);

    let binary = command_line::binary().display().to_string();
    let backend = support::backend().to_string();
    repository.git(&["bisect", "start", "c8", "c0"]);
    let said = repository.git(&[
        "bisect",
        "run",
        &binary,
        "replay",
        "--backend",
        &backend,
        "--kernels",
        "kernels/cuda",
        &case(2, 64),
    ]);
    assert!(said.contains(&format!("{} is the first bad commit", repository.id(6))), "{said}");
}

#[test]
fn a_directory_without_kernels_is_untestable() {
    let dir = tempfile::tempdir().expect("a directory");
    for kernels in [dir.path(), Path::new("/nonexistent")] {
        let (kernels, backend) = (kernels.display().to_string(), support::backend().to_string());
        Parity::new(&["replay", "--backend", &backend, "--kernels", &kernels, &case(2, 64)])
            .run()
            .assert_code(125);
    }
}
