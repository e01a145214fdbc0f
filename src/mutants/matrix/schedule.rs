//! Many trials, each in a child process.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use dsv4_runtime::SourceTree;
use dsv4_runtime::process::isolate;

use super::trial::{Answer, Subject, Trial, unjudged};
use crate::record::{Check, MutantRecord, MutantStatus};

/// How to run trials.
#[derive(Clone, Debug)]
pub struct Schedule {
    /// A command that starts this program again, as
    /// [`this_program`](dsv4_runtime::process::this_program).
    pub program: fn() -> Command,
    /// Arguments of every child: `mutants --trial`, and the device.
    pub arguments: Vec<String>,
    /// Trials at the same time.
    pub jobs: usize,
    /// No trial starts after this time.
    pub time_budget: Option<Duration>,
    /// A child without a sign of life for this long has hung.
    pub patience: Duration,
}

/// The results of a list of trials: a record of each, or `None` for those that the time budget
/// skipped.
pub type Fates = Vec<Option<MutantRecord>>;

/// Receives each trial when it ends, on the thread that ran it.
pub type Done<'a> = dyn Fn(&Trial, &MutantRecord) -> Result<()> + Sync + 'a;

/// Runs trials, `jobs` at a time, and calls `done` for each when it ends. The same list gives the
/// same records, whatever the number of jobs.
///
/// # Errors
/// A child that cannot be started, or that fails for another reason than its mutant; those of
/// `done`.
pub fn run(
    schedule: &Schedule,
    trials: &[Trial],
    tree: &SourceTree,
    done: &Done<'_>,
) -> Result<Fates> {
    let start = Instant::now();
    let next = AtomicUsize::new(0);
    let fates: Mutex<Vec<Option<Result<MutantRecord>>>> =
        Mutex::new(trials.iter().map(|_| None).collect());
    let in_time = || schedule.time_budget.is_none_or(|budget| start.elapsed() < budget);
    std::thread::scope(|scope| {
        for _ in 0..schedule.jobs.max(1) {
            scope.spawn(|| {
                while in_time() {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(trial) = trials.get(index) else { break };
                    let fate = attempt(schedule, trial, tree);
                    let fate = fate.and_then(|record| done(trial, &record).map(|()| record));
                    if fate.is_err() {
                        // No thread starts another trial.
                        next.store(trials.len(), Ordering::Relaxed);
                    }
                    fates.lock().unwrap_or_else(|e| e.into_inner())[index] = Some(fate);
                }
            });
        }
    });
    fates
        .into_inner()
        .unwrap_or_else(|e| e.into_inner())
        .into_iter()
        .map(Option::transpose)
        .collect()
}

/// One trial in a child process.
fn attempt(schedule: &Schedule, trial: &Trial, tree: &SourceTree) -> Result<MutantRecord> {
    let id = trial.subject.id();
    let mut command = (schedule.program)();
    command
        .args(&schedule.arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // The child dies with this thread, which waits for it.
    isolate(&mut command);
    let mut child = command.spawn().context("starting this program, for a trial")?;
    let mut input = child.stdin.take().context("the child has no standard input")?;
    let line = serde_json::to_string(trial)?;
    // A child that ended early reports the reason by its status.
    let _ = input.write_all(line.as_bytes());
    drop(input);
    let (ending, cases_run) = listen(&mut child, schedule.patience)?;
    match ending {
        Ending::Record(record) => Ok(*record),
        Ending::Hung => {
            let reason = format!("it showed no sign of life for {} s", schedule.patience.as_secs());
            Ok(killed_by_launch(&trial.subject, tree, cases_run, reason))
        }
        Ending::Ended(status, errors) => match signal_of(status) {
            Some(signal) => {
                let reason = format!("the process that launched it ended with signal {signal}");
                Ok(killed_by_launch(&trial.subject, tree, cases_run, reason))
            }
            None => bail!("the trial of mutant `{id}` ended with {status}: {}", errors.trim()),
        },
    }
}

enum Ending {
    Record(Box<MutantRecord>),
    Hung,
    Ended(ExitStatus, String),
}

/// Waits for a child's record while it shows signs of life. Also returns how many cases had
/// started.
fn listen(child: &mut Child, patience: Duration) -> Result<(Ending, u64)> {
    let output = child.stdout.take().context("the child has no standard output")?;
    let mut errors = child.stderr.take().context("the child has no standard error")?;
    let (send, lines) = mpsc::channel();
    std::thread::spawn(move || {
        // The receiver may be gone already.
        BufReader::new(output).lines().map_while(Result::ok).all(|line| send.send(line).is_ok())
    });
    let errors = std::thread::spawn(move || {
        let mut text = Vec::new();
        let _ = errors.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    });
    let mut cases_run = 0;
    loop {
        match lines.recv_timeout(patience) {
            Ok(line) => match serde_json::from_str(&line)
                .with_context(|| format!("a trial answered `{line}`"))?
            {
                Answer::Case(number) => cases_run = number + 1,
                Answer::Record(record) => {
                    child.wait()?;
                    return Ok((Ending::Record(record), cases_run));
                }
            },
            Err(mpsc::RecvTimeoutError::Timeout) => {
                // It may have ended by itself.
                let _ = child.kill();
                child.wait()?;
                return Ok((Ending::Hung, cases_run));
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                let status = child.wait()?;
                return Ok((Ending::Ended(status, errors.join().unwrap_or_default()), cases_run));
            }
        }
    }
}

fn signal_of(status: ExitStatus) -> Option<i32> {
    use std::os::unix::process::ExitStatusExt;
    status.signal()
}

fn killed_by_launch(
    subject: &Subject,
    tree: &SourceTree,
    cases_run: u64,
    reason: String,
) -> MutantRecord {
    let (record, cases) = match subject {
        Subject::Planted(mutant) => (mutant.unjudged(tree), Vec::new()),
        Subject::Generated(mutant, cases) => {
            (unjudged(mutant), cases.iter().map(|one| one.case.line()).collect())
        }
    };
    let killing_case = cases_run.checked_sub(1).and_then(|last| cases.get(last as usize).cloned());
    MutantRecord {
        status: MutantStatus::Killed,
        killed_by: vec![Check::Launch],
        cases_run,
        killing_case: killing_case.unwrap_or_default(),
        reason,
        ..record
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mutants::planted::Mutant;

    /// Runs trials whose children are a shell script.
    fn fates(script: &str, budget: Option<Duration>) -> Result<Fates> {
        let mutant = Mutant {
            id: "bug".into(),
            catalogue: "FM-52".into(),
            operator: "rope".into(),
            file: "rope.cu".into(),
            summary: String::new(),
            find: "DEVICE void rotate(".into(),
            replace: "DEVICE void rotate(".into(),
            expected: "forward".into(),
            cases: Vec::new(),
            list: String::new(),
            hidden_on_gpu: None,
            timed: None,
            condition: Vec::new(),
            blamed: None,
        };
        let trial =
            Trial { subject: Subject::Planted(Box::new(mutant)), schedules: 0, all_checks: false };
        let schedule = Schedule {
            program: || Command::new("/bin/sh"),
            arguments: vec!["-c".into(), script.into()],
            jobs: 2,
            time_budget: budget,
            patience: Duration::from_millis(300),
        };
        run(&schedule, &[trial.clone(), trial], &dsv4_kernels::sources(), &|_, _| Ok(()))
    }

    fn killed_by(fates: Fates) -> Vec<(Vec<Check>, String)> {
        let records = fates.into_iter().map(|fate| fate.expect("it ran"));
        records.map(|record| (record.killed_by, record.reason)).collect()
    }

    #[test]
    fn a_child_that_crashes_was_killed_by_its_launch_and_the_others_go_on() {
        for (killed_by, reason) in
            killed_by(fates("cat >/dev/null; kill -SEGV $$", None).expect("fates"))
        {
            assert_eq!(killed_by, ["launch"]);
            assert!(reason.ends_with("signal 11"), "{reason}");
        }
    }

    #[test]
    fn a_child_that_hangs_was_killed_by_its_launch() {
        for (killed_by, reason) in
            killed_by(fates("cat >/dev/null; exec sleep 60", None).expect("fates"))
        {
            assert_eq!(killed_by, ["launch"]);
            assert!(reason.contains("no sign of life"), "{reason}");
        }
    }

    #[test]
    fn a_child_that_fails_by_itself_is_an_error_and_no_kill() {
        let error =
            fates("cat >/dev/null; echo no device >&2; exit 3", None).unwrap_err().to_string();
        assert!(error.contains("mutant `bug`") && error.contains("no device"), "{error}");
    }

    #[test]
    fn signs_of_life_keep_a_child_alive_until_its_record_comes() {
        let record = serde_json::to_string(&Answer::Record(Box::default())).expect("JSON");
        let script = format!(
            "for i in 0 1 2 3; do echo '{{\"case\":'$i'}}'; sleep 0.15; done; echo '{record}'"
        );
        assert!(
            killed_by(fates(&script, None).expect("fates"))
                .iter()
                .all(|(killed_by, _)| killed_by.is_empty())
        );
    }

    #[test]
    fn nothing_begins_once_the_time_budget_is_spent() {
        let fates = fates("exit 1", Some(Duration::ZERO)).expect("nothing ran, so nothing failed");
        assert_eq!(fates, [None, None]);
    }
}
