//! The processes of ranks in a sweep: in the tasks of `srun`, killed with their sweep or without
//! it, and resumed. The tests start the tasks themselves, with Slurm's variables; `slurm.rs` has a
//! real `srun`.

use std::collections::BTreeSet;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use dsv4_parity::record::{CaseRecord, Origin, Report, Verdict};

use crate::command_line;
use crate::extent::{attacked, left_out};
use crate::shard::{wait_for_lines, without_times};

/// Rooms whose changes run the long tests of this file.
const ROOMS: [&str; 4] = [
    "kernels/runtime/src/tasks/",
    "kernels/runtime/src/world/",
    "kernels/runtime/src/remote/",
    "src/command/tasks.rs",
];

/// Time limit of what usually takes seconds.
const LIMIT: Duration = Duration::from_secs(60);

/// Some small cases of 3 ranks, one after the other. Their laws have up to 4 ranks.
pub const SWEEP: [&str; 16] = [
    "--backend",
    "emulator",
    "--ops",
    "cp_window",
    "--ranks",
    "3",
    "--cases",
    "5",
    "--edge-cases",
    "0",
    "--schedules",
    "0",
    "--seed",
    "1",
    "--jobs",
    "1",
];

/// Their number.
const CASES: u64 = 5;

/// Tasks for all ranks of these cases.
const TASKS: usize = 4;

// ---------------------------------------------------------------- processes

/// Finds every process of a test, also those whose parents have ended: they inherit it.
pub const MARK: &str = "PARITY_TEST_MARK";

/// A process of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Process {
    id: u32,
    /// Its task in the step, by Slurm's variable.
    task: Option<usize>,
    /// Whether a rank's device is in it.
    is_rank: bool,
}

/// The processes with this mark that have not ended.
fn processes(mark: &str) -> Vec<Process> {
    let marked = |id: u32| {
        let text = std::fs::read(format!("/proc/{id}/environ")).ok()?;
        let text = String::from_utf8_lossy(&text).into_owned();
        let of = |name: &str| {
            text.split('\0')
                .find_map(|one| Some(one.strip_prefix(name)?.strip_prefix('=')?.to_owned()))
        };
        let is_rank = of("PARITY_WORKER").is_some_and(|start| start.contains(r#""name":"device""#))
            && of("PARITY_SUPERVISOR").is_none();
        let task = of("SLURM_PROCID").and_then(|task| task.parse().ok());
        (of(MARK)? == mark).then_some(Process { id, task, is_rank })
    };
    let entries = std::fs::read_dir("/proc").expect("processes").flatten();
    let mut found: Vec<_> =
        entries.filter_map(|entry| marked(entry.file_name().to_str()?.parse().ok()?)).collect();
    found.sort_unstable();
    found
}

/// The tasks of the ranks' processes with this mark.
pub fn tasks_of_ranks(mark: &str) -> Vec<Option<usize>> {
    let mut tasks: Vec<_> =
        processes(mark).iter().filter(|one| one.is_rank).map(|one| one.task).collect();
    tasks.sort_unstable();
    tasks
}

/// What is found within a limit.
fn found_within<T>(limit: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    loop {
        let found = look();
        if found.is_some() || start.elapsed() > limit {
            return found;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until something is found.
fn found<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    found_within(LIMIT, look).unwrap_or_else(|| panic!("waited in vain for {what}"))
}

fn signal(name: &str, to: &[String]) {
    let kill = Command::new("kill").arg(name).arg("--").args(to).status();
    assert!(kill.expect("kill runs").success(), "{to:?} had ended before {name}");
}

fn kill(id: u32) {
    signal("-KILL", &[id.to_string()]);
}

/// A mark and a job's number that no other test has.
fn unique() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    std::process::id() * 100 + NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Started `parity` processes; killed on drop, with all that they started.
struct Started {
    job: u32,
    dir: PathBuf,
    tasks: Vec<Child>,
}

/// How a task has ended, and what it printed.
struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Started {
    /// The tasks of a step on one host, or of one on several. One task is no step.
    fn tasks(count: usize, hosts: usize, arguments: &[&str]) -> Self {
        let mut started = Self { job: unique(), dir: std::env::temp_dir(), tasks: Vec::new() };
        // The last one first: none needs the others to be there.
        for task in (0..count).rev() {
            let mut command = Command::new(command_line::binary());
            command.args(arguments).current_dir(&started.dir).process_group(0);
            command.env_remove("PARITY_BACKEND").env(MARK, started.job.to_string());
            for name in ["STEP_ID", "STEP_NUM_TASKS", "STEP_NUM_NODES", "PROCID", "LOCALID"] {
                command.env_remove(format!("SLURM_{name}"));
            }
            if count > 1 {
                for (name, value) in [
                    ("JOB_ID", started.job as usize),
                    ("STEP_ID", 0),
                    ("STEP_NUM_TASKS", count),
                    ("STEP_NUM_NODES", hosts),
                    ("PROCID", task),
                    ("LOCALID", task),
                ] {
                    command.env(format!("SLURM_{name}"), value.to_string());
                }
            }
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            started.tasks.insert(0, command.spawn().expect("the binary runs"));
        }
        started
    }

    /// A sweep into a folder.
    fn sweep(count: usize, dir: &Path, name: &str, arguments: &[&str]) -> Self {
        let text = |name: &str| dir.join(name).display().to_string();
        let (out, regressions) = (text(name), text("regressions"));
        let fixed = ["run", "--out", &out, "--regressions", &regressions];
        Self::tasks(count, 1, &[&fixed[..], arguments].concat())
    }

    fn mark(&self) -> String {
        self.job.to_string()
    }

    fn processes(&self) -> Vec<Process> {
        processes(&self.mark())
    }

    /// The rank's process of this number, where one runs. Without tasks processes start in the
    /// order of ranks.
    fn rank(&self, rank: usize) -> Option<Process> {
        let all: Vec<_> = self.processes().into_iter().filter(|one| one.is_rank).collect();
        match self.tasks.len() {
            1 => all.get(rank).copied(),
            _ => all.into_iter().find(|one| one.task == Some(rank)),
        }
    }

    /// The ends of all tasks, after which no process is left.
    fn ended(mut self) -> Vec<Ended> {
        for task in &mut self.tasks {
            found("the end of a task", || task.try_wait().expect("it is a child"));
        }
        let ended: Vec<_> = self
            .tasks
            .drain(..)
            .map(|task| {
                let output = task.wait_with_output().expect("it ended");
                let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
                let (stdout, stderr) = (text(output.stdout), text(output.stderr));
                assert!(!stderr.contains("panicked"), "{stderr}");
                Ended { code: output.status.code(), stdout, stderr }
            })
            .collect();
        self.leaves_nothing();
        ended
    }

    fn leaves_nothing(&self) {
        let none = || self.processes().is_empty().then_some(());
        let gone = found_within(Duration::from_secs(10), none);
        assert!(gone.is_some(), "left: {:?}", self.processes());
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        for task in &mut self.tasks {
            // It may have ended already.
            let _ = task.kill();
            let _ = task.wait();
        }
    }
}

fn codes(ended: &[Ended]) -> Vec<Option<i32>> {
    ended.iter().map(|task| task.code).collect()
}

fn succeed(ended: &[Ended]) {
    assert_eq!(codes(ended), vec![Some(0); ended.len()], "{}{}", ended[0].stdout, ended[0].stderr);
    for (task, ended) in ended.iter().enumerate().skip(1) {
        assert_eq!((&*ended.stdout, &*ended.stderr), ("", ""), "task {task}");
    }
}

fn report(dir: &Path) -> Report {
    let text = std::fs::read_to_string(dir.join("report.json")).expect("a report");
    serde_json::from_str(&text).expect("the report parses")
}

/// A folder with the sweep that nothing disturbs, and its records; made once.
fn undisturbed() -> &'static [CaseRecord] {
    static CASES: std::sync::OnceLock<Vec<CaseRecord>> = std::sync::OnceLock::new();
    CASES.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        succeed(&Started::sweep(1, dir.path(), "out", &SWEEP).ended());
        report(&dir.path().join("out")).cases
    })
}

fn resumed() -> Vec<&'static str> {
    SWEEP.iter().copied().chain(["--resume"]).collect()
}

/// Whether a sweep has the records of the one that nothing disturbed.
pub fn is_whole(dir: &Path) {
    let (own, whole) = (without_times(&report(dir).cases), without_times(undisturbed()));
    let other = own.iter().zip(&whole).position(|(own, other)| own != other);
    assert_eq!((own.len(), other), (whole.len(), None), "the first record that differs");
}

/// What the first check that failed in a case said.
fn failure(case: &CaseRecord) -> Option<String> {
    let failed = case.checks.iter().find(|check| check.verdict != Verdict::Pass)?;
    Some(failed.message.clone())
}

/// Whether each case of the plan was run once, and all but one agreed. Returns what was said of that
/// one.
fn all_but_one(dir: &Path) -> String {
    let cases = report(dir).cases;
    let planned = || cases.iter().filter(|case| case.origin != Origin::Shrunk);
    let numbers: Vec<_> = planned().map(|case| case.plan_number).collect();
    assert_eq!(numbers, (0..CASES).map(Some).collect::<Vec<_>>());
    let failed: Vec<_> = planned().filter_map(failure).collect();
    let [said] = &failed[..] else { panic!("{failed:?}") };
    said.clone()
}

/// Kills a rank's process after the first records, within a case. Returns when the case is
/// recorded.
fn kill_rank(started: &Started, records: &PathBuf, rank: usize) {
    wait_for_lines(records, 1, LIMIT);
    kill(found("the rank's process", || started.rank(rank)).id);
    let names = |text: String| text.contains("signal 9");
    found("its record", || std::fs::read_to_string(records).is_ok_and(names).then_some(()));
}

/// Whether an error names the rank that was killed, and its collective.
fn names_rank(said: &str, rank: usize) {
    let collectives = [
        "in or after exchange",
        "in or after barrier",
        "before its first collective",
        "in or after all_reduce",
    ];
    let names =
        said.contains(&format!("rank {rank} of 3, ")) && said.contains("killed by signal 9");
    assert!(names && collectives.iter().any(|part| said.contains(part)), "{said}");
}

// ---------------------------------------------------------------- without tasks

#[test]
fn a_killed_rank_fails_its_case_and_the_killed_sweep_resumes_the_others_once_each() {
    if left_out(&ROOMS) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let records = out.join("records.jsonl");
    let started = Started::sweep(1, dir.path(), "out", &SWEEP);
    kill_rank(&started, &records, 1);
    // New processes of ranks work on the next case when the whole group dies.
    let before = std::fs::read_to_string(&records).unwrap().lines().count();
    wait_for_lines(&records, before + 1, LIMIT);
    found("new processes", || started.rank(2));
    signal("-KILL", &[format!("-{}", started.tasks[0].id())]);
    assert_eq!(codes(&started.ended()), [None]);
    assert!(!out.join("report.json").exists(), "it had finished before it was killed");
    let mut left = std::fs::read(&records).unwrap();
    left.truncate(left.iter().rposition(|&byte| byte == b'\n').expect("lines") + 1);

    let ended = Started::sweep(1, dir.path(), "out", &resumed()).ended();
    assert_eq!(codes(&ended), [Some(1)], "{}", ended[0].stderr);
    assert!(std::fs::read(&records).unwrap().starts_with(&left), "a record was lost or made again");
    names_rank(&all_but_one(&out), 1);
    attacked("runs killed or interrupted, then resumed", 2);
}

// ---------------------------------------------------------------- in tasks

#[test]
fn each_rank_is_a_process_of_its_task_and_the_sweep_is_that_of_one_task() {
    let dir = tempfile::tempdir().unwrap();
    let started = Started::sweep(TASKS, dir.path(), "out", &SWEEP);
    let mut seen = BTreeSet::new();
    found("ranks in all tasks", || {
        seen.extend(started.processes().iter().filter(|one| one.is_rank).map(|one| one.task));
        (seen.len() == TASKS).then_some(())
    });
    assert_eq!(seen, (0..TASKS).map(Some).collect());
    let all = started.processes();
    let of = |task| all.iter().filter(|one| one.is_rank && one.task == Some(task)).count();
    assert_eq!([0, 1, 2].map(of), [1; 3], "{all:?}");
    succeed(&started.ended());
    is_whole(&dir.path().join("out"));
}

#[test]
fn a_killed_rank_of_a_task_is_named_and_its_task_starts_another_one() {
    if left_out(&ROOMS) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let started = Started::sweep(TASKS, dir.path(), "out", &SWEEP);
    kill_rank(&started, &dir.path().join("out/records.jsonl"), 2);
    let ended = started.ended();
    assert_eq!(codes(&ended), [Some(1), Some(0), Some(0), Some(0)], "{}", ended[0].stderr);
    names_rank(&all_but_one(&dir.path().join("out")), 2);
    attacked("ranks killed in a task", 1);
}

#[test]
fn tasks_end_with_task_0_however_that_ends_and_the_sweep_resumes() {
    if left_out(&ROOMS) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let records = dir.path().join("out/records.jsonl");
    let started = Started::sweep(TASKS, dir.path(), "out", &SWEEP);
    wait_for_lines(&records, 1, LIMIT);
    kill(started.tasks[0].id());
    assert_eq!(codes(&started.ended()), [None, Some(0), Some(0), Some(0)]);

    // As srun does where a person interrupts it: the signal is for every process of the step.
    let before = std::fs::read_to_string(&records).unwrap().lines().count();
    let started = Started::sweep(TASKS, dir.path(), "out", &resumed());
    wait_for_lines(&records, before + 1, LIMIT);
    let tasks: Vec<String> = started.tasks.iter().map(|task| task.id().to_string()).collect();
    signal("-INT", &[&tasks[1..], &tasks[..1]].concat());
    let ended = started.ended();
    assert_eq!(codes(&ended), [Some(130), Some(0), Some(0), Some(0)], "{}", ended[0].stderr);
    assert!(ended[0].stderr.contains("--resume"), "{}", ended[0].stderr);

    succeed(&Started::sweep(TASKS, dir.path(), "out", &resumed()).ended());
    is_whole(&dir.path().join("out"));
    attacked("runs killed or interrupted, then resumed", 2);
}

#[test]
fn a_killed_task_ends_the_sweep_without_blaming_a_kernel() {
    if left_out(&ROOMS) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let started = Started::sweep(TASKS, dir.path(), "out", &SWEEP);
    wait_for_lines(&dir.path().join("out/records.jsonl"), 1, LIMIT);
    kill(started.tasks[1].id());
    let ended = started.ended();
    assert_eq!(codes(&ended), [Some(2), None, Some(0), Some(0)], "{}", ended[0].stderr);
    let said = "parity: task 1 of srun has ended, and rank 1 with it; --resume continues a sweep\n";
    assert_eq!(ended[0].stderr, said);
    succeed(&Started::sweep(TASKS, dir.path(), "out", &resumed()).ended());
    is_whole(&dir.path().join("out"));
    attacked("runs killed or interrupted, then resumed", 1);
}

#[test]
fn cases_of_more_ranks_than_tasks_are_counted_skips() {
    let dir = tempfile::tempdir().unwrap();
    let arguments = [
        "--backend",
        "emulator",
        "--ops",
        "cp_window",
        "--ranks",
        "2,4",
        "--cases",
        "4",
        "--edge-cases",
        "0",
        "--seed",
        "9",
    ];
    let ended = Started::sweep(2, dir.path(), "out", &arguments).ended();
    succeed(&ended);
    let report = report(&dir.path().join("out"));
    let why = "4 ranks, and srun started 2 tasks";
    let skip = report.skips.iter().find(|skip| skip.why == why).expect("a skip");
    assert_eq!(skip.what, "cases of cp_window");
    assert!(skip.count > 0 && skip.count + report.cases.len() as u64 == 4, "{skip:?}");
    assert!(report.cases.iter().all(|case| case.case["ranks"] == 2));
}

#[test]
fn tasks_on_several_hosts_are_one_error_and_a_quick_end() {
    let start = Instant::now();
    let ended = Started::tasks(3, 2, &["run", "--ops", "cp_window"]).ended();
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    assert_eq!(codes(&ended), [Some(2); 3]);
    let said =
        "parity: srun started 3 tasks on 2 hosts: ranks meet in the memory of one (srun -N 1)\n";
    assert_eq!(ended[0].stderr, said);
    assert!(ended[1..].iter().all(|task| task.stderr.is_empty() && task.stdout.is_empty()));
}

#[test]
fn task_0_does_what_has_no_ranks_and_the_others_print_nothing() {
    let ended = Started::tasks(3, 1, &["ops", "cp_window"]).ended();
    succeed(&ended);
    assert!(ended[0].stdout.contains("cp_window"));
    let ended = Started::tasks(2, 1, &["run", "--no-such-option"]).ended();
    assert_eq!(codes(&ended), [Some(2), Some(0)]);
    assert!(ended[1].stderr.is_empty(), "{}", ended[1].stderr);
    // Each with a part of its own does its own.
    let listed = Started::tasks(2, 1, &["run", "--shard", "2/2"]).ended();
    assert!(listed.iter().all(|task| task.code == Some(2) && task.stderr.contains("2/2")));
}

#[test]
fn doctor_says_that_it_runs_under_srun_and_with_how_many_tasks() {
    let doctor = |tasks| Started::tasks(tasks, 1, &["doctor"]);
    let two = doctor(2);
    let said = format!("step {}.0 has 2 tasks on this host", two.job);
    let ended = two.ended();
    succeed(&ended);
    let line = ended[0].stdout.lines().find(|line| line.starts_with("srun")).expect("a line");
    assert!(line.contains(" works: ") && line.contains(&said), "{line}");
    let alone = doctor(1).ended();
    assert!(!alone[0].stdout.contains("srun"), "{}", alone[0].stdout);
}
