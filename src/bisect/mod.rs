//! Bisection: which commit made a kernel wrong, imprecise, slow or non-deterministic.
//!
//! Kernels are compiled when they run, so this binary can run any revision of `kernels/cuda`. It
//! reads the sources from git objects ([`history`]), compiles them, and runs them on the case with
//! today's harness. No checkout and no rebuild is needed, and a revision costs one compilation of a
//! kernel.
//!
//! A revision may have parameter structs that today's launchers do not fill (other size or layout
//! hash). Then its own harness is built in a temporary worktree and runs `parity replay`. The exit
//! code of `replay` reports only agreement, so for the other metrics such a revision is skipped.
//!
//! - [`search`]: the search, a pure function;
//! - [`sequential`]: decisions where results vary by chance;
//! - [`judge`]: what good and bad mean for each metric;
//! - [`page`]: the plots, as text and as a page.
//!
//! A revision that does not compile, or about which no decision is reached, is skipped. Where
//! skipped revisions hide the answer, it is a range.

pub mod history;
pub mod judge;
pub mod page;
pub mod search;
pub mod sequential;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use dsv4_runtime::supervisor::run_within;
use dsv4_runtime::{BackendKind, Contract, Device, RuntimeError};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use thiserror::Error;

use self::history::{Commit, Repository};
use self::judge::{Effort, Judge, Metric, Trial};
use self::search::{Answer, Turn, first_bad};
use crate::case::{Case, CaseError};
use crate::operator::{AnyOperator, Profile};
use crate::operators::registry;

/// Why a bisection is not possible.
#[derive(Debug, Error)]
pub enum BisectError {
    /// Git failed, or is missing.
    #[error("{0}")]
    Git(String),
    /// The arguments make no sense.
    #[error("{0}")]
    Input(String),
    /// A case that cannot be prepared.
    #[error(transparent)]
    Case(#[from] CaseError),
    /// The device's.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
}

/// The result of a bisection.
pub struct Bisection {
    /// What was compared.
    pub metric: Metric,
    /// The case that tells the endpoints apart.
    pub case: Case,
    /// The good commit, and every later one that changed the kernels.
    pub line: Vec<Commit>,
    /// What was found about each tried commit, by position on the line.
    pub trials: BTreeMap<usize, Trial>,
    /// Where the line turns bad.
    pub turn: Turn,
    /// The difference of the kernels between the last good commit and the first bad one.
    pub diff: String,
}

/// Whether the endpoints differ.
pub enum Found {
    /// The turn from good to bad.
    Turn(Box<Bisection>),
    /// The reasons why the endpoints cannot be told apart, case by case.
    NoDifference(Vec<String>),
}

/// Opens the device, and opens it again after a fault on a GPU, whose context does not survive.
pub type OpenDevice<'a> = &'a dyn Fn() -> anyhow::Result<Device>;

/// Bisects. `told` receives every trial as it arrives.
///
/// # Errors
/// Revisions that do not exist or are not in line, cases that cannot be prepared, endpoints that
/// cannot be run, a missing backend.
pub fn bisect(
    repository: &Repository,
    [good, bad]: [&str; 2],
    cases: &[Case],
    metric: Metric,
    effort: Effort,
    open: OpenDevice<'_>,
    told: &mut dyn FnMut(&Commit, &Trial),
) -> anyhow::Result<Found> {
    let line = repository.line(&repository.commit(good)?, &repository.commit(bad)?)?;
    if line.len() < 2 {
        return Ok(Found::NoDifference(vec![format!(
            "no commit between the two changed {}",
            history::KERNELS
        )]));
    }
    let mut bench = Bench { repository, metric, open, device: open()?, scratch: Scratch::new() };
    let mut reasons = Vec::new();
    for case in cases {
        match bench.endpoints(&line, case, effort)? {
            Ok((judge, ends)) => {
                return bench.search(line, case, &judge, ends, told).map(Found::Turn);
            }
            Err(reason) => reasons.push(format!("{}: {reason}", case.line())),
        }
    }
    Ok(Found::NoDifference(reasons))
}

/// How a revision can be run.
enum Ready {
    /// With this harness.
    Here(Device),
    /// With this harness, and it faults.
    Faulty(String),
    /// With its own harness: the path of its binary.
    Elsewhere(PathBuf),
    /// Not at all.
    Broken(String),
}

/// Runs revisions.
struct Bench<'a> {
    repository: &'a Repository,
    metric: Metric,
    open: OpenDevice<'a>,
    device: Device,
    scratch: Scratch,
}

type Endpoints = (Judge, [Trial; 2]);

impl Bench<'_> {
    /// The judge of the two ends of the line, and its trials of both.
    fn endpoints(
        &mut self,
        line: &[Commit],
        case: &Case,
        effort: Effort,
    ) -> anyhow::Result<Result<Endpoints, String>> {
        let [first, last] = [&line[0], &line[line.len() - 1]];
        let [good, bad] = [self.ready(first, case)?, self.ready(last, case)?];
        for (commit, ready) in [(first, &good), (last, &bad)] {
            if let Ready::Broken(reason) = ready {
                anyhow::bail!("{} cannot be run, so it is no endpoint: {reason}", commit.short());
            }
        }
        let devices = match (&good, &bad) {
            (Ready::Here(good), Ready::Here(bad)) => [good, bad],
            // Agreement needs no calibration. Faults and other harnesses have no values to
            // calibrate on.
            _ if self.metric == Metric::Agree => [&self.device, &self.device],
            (Ready::Faulty(fault), _) | (_, Ready::Faulty(fault)) => {
                return Ok(Err(format!(
                    "an endpoint faults, which --metric agree judges: {fault}"
                )));
            }
            _ => {
                return Ok(Err(
                    "an endpoint's parameter structs differ from today's; only --metric agree can cross that".into(),
                ));
            }
        };
        let judge = match Judge::between(self.metric, case, devices[0], devices[1], effort)? {
            Ok(judge) => judge,
            Err(reason) => return Ok(Err(reason)),
        };
        let ends = [self.judge(good, case, &judge)?, self.judge(bad, case, &judge)?];
        Ok(match (ends[0].answer, ends[1].answer) {
            (Answer::Good, Answer::Bad) => Ok((judge, ends)),
            (Answer::Good, _) => Err(format!("the bad revision is not bad: {}", ends[1].note)),
            _ => Err(format!("the good revision is not good: {}", ends[0].note)),
        })
    }

    fn search(
        &mut self,
        line: Vec<Commit>,
        case: &Case,
        judge: &Judge,
        ends: [Trial; 2],
        told: &mut dyn FnMut(&Commit, &Trial),
    ) -> anyhow::Result<Box<Bisection>> {
        let mut trials = BTreeMap::new();
        for (at, end) in [0, line.len() - 1].into_iter().zip(ends) {
            told(&line[at], &end);
            trials.insert(at, end);
        }
        let turn = first_bad(line.len(), |at| {
            let ready = self.ready(&line[at], case)?;
            let trial = self.judge(ready, case, judge)?;
            told(&line[at], &trial);
            let answer = trial.answer;
            trials.insert(at, trial);
            anyhow::Ok(answer)
        })?;
        let diff = self.repository.kernel_diff(&line[turn.last_good], &line[turn.first_bad])?;
        Ok(Box::new(Bisection {
            metric: self.metric,
            case: case.clone(),
            line,
            trials,
            turn,
            diff,
        }))
    }

    fn judge(&mut self, ready: Ready, case: &Case, judge: &Judge) -> anyhow::Result<Trial> {
        let judged = match ready {
            Ready::Broken(reason) => return Ok(Trial::skip(reason)),
            Ready::Faulty(fault) => return Ok(self.fault(fault)),
            Ready::Elsewhere(_) if self.metric != Metric::Agree => {
                return Ok(Trial::skip(
                    "its parameter structs differ, and its own harness says only whether it agrees",
                ));
            }
            Ready::Elsewhere(binary) => return self.replay(&binary, case),
            Ready::Here(device) => judge.judge(&device),
        };
        match judged {
            Ok(trial) => Ok(trial),
            Err(BisectError::Runtime(
                error @ (RuntimeError::Fault { .. } | RuntimeError::Cuda { .. }),
            )) => {
                self.renew()?;
                Ok(self.fault(error.to_string()))
            }
            Err(error) => Err(error.into()),
        }
    }

    fn fault(&self, fault: String) -> Trial {
        let answer = if self.metric == Metric::Time { Answer::Skip } else { Answer::Bad };
        Trial { answer, value: None, note: fault }
    }

    /// Compiles a revision and runs the case once, to see whether that is possible.
    fn ready(&mut self, commit: &Commit, case: &Case) -> anyhow::Result<Ready> {
        let tree = match self.repository.kernels(commit) {
            Ok(tree) => tree,
            Err(BisectError::Runtime(error)) => return Ok(Ready::Broken(error.to_string())),
            Err(error) => return Err(error.into()),
        };
        let device = self.device.with_tree(tree);
        let prepared = registry::prepare(case)?;
        // A race is no reason not to judge determinism: under a seed the emulator reports none.
        let seed = (self.metric == Metric::Determinism).then_some(1);
        device.backend().set_schedule_seed(seed);
        let ran = prepared.kernel(&device, Contract::NAN);
        device.backend().set_schedule_seed(None);
        match ran {
            Ok(_) => Ok(Ready::Here(device)),
            Err(error @ RuntimeError::BackendMissing { .. }) => Err(error.into()),
            Err(RuntimeError::ParamsLayout { .. } | RuntimeError::SymbolMissing { .. }) => {
                self.build(commit)
            }
            Err(error @ (RuntimeError::Fault { .. } | RuntimeError::Cuda { .. })) => {
                drop(device);
                self.renew()?;
                Ok(Ready::Faulty(first_line(&error.to_string())))
            }
            Err(error) => Ok(Ready::Broken(compiler_line(&error))),
        }
    }

    fn renew(&mut self) -> anyhow::Result<()> {
        if self.device.environment().backend == BackendKind::Cuda {
            self.device = (self.open)()?;
        }
        Ok(())
    }

    /// Builds a revision's own harness in a worktree; only its binary is kept.
    fn build(&self, commit: &Commit) -> anyhow::Result<Ready> {
        let target = self.scratch.dir()?.join("target");
        let binary = self.scratch.dir()?.join(format!("parity-{}", commit.short()));
        if binary.is_file() {
            return Ok(Ready::Elsewhere(binary));
        }
        let worktree =
            self.repository.worktree(commit, self.scratch.dir()?.join(commit.short()))?;
        let mut cargo = Command::new("cargo");
        cargo
            .args(["build", "--quiet", "--release", "--bin", "parity"])
            .current_dir(worktree.dir());
        cargo.env("CARGO_TARGET_DIR", &target);
        let ended = match run_within(&cargo, Duration::MAX) {
            Ok(Some(ended)) => ended,
            Ok(None) => {
                return Ok(Ready::Broken(
                    "its parameter structs differ, and cargo did not end".into(),
                ));
            }
            Err(error) => {
                return Ok(Ready::Broken(format!(
                    "its parameter structs differ, and cargo did not start: {error}"
                )));
            }
        };
        if !ended.status.success() {
            return Ok(Ready::Broken(format!(
                "its parameter structs differ, and its harness does not build: {}",
                first_line(&ended.words)
            )));
        }
        std::fs::copy(target.join("release/parity"), &binary)?;
        Ok(Ready::Elsewhere(binary))
    }

    /// Runs the case with a revision's own harness.
    fn replay(&self, binary: &Path, case: &Case) -> anyhow::Result<Trial> {
        let backend = self.device.environment().backend.to_string();
        let output = Command::new(binary)
            .args(["replay", "--json", "--backend", &backend, &case.line()])
            // Its ranks are its own: a task of srun would start processes of this revision.
            .env_remove("SLURM_STEP_NUM_TASKS")
            .output()?;
        let record: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let checks = record["checks"].as_array().map(Vec::as_slice).unwrap_or_default();
        let value = checks
            .iter()
            .filter_map(|check| check["metrics"]["budget_used"].as_f64())
            .reduce(f64::max);
        let note = "by its own harness, because its parameter structs differ";
        Ok(match output.status.code() {
            Some(0) => Trial { answer: Answer::Good, value, note: note.into() },
            Some(1) => Trial { answer: Answer::Bad, value, note: note.into() },
            _ => Trial::skip(format!(
                "its own harness did not run the case: {}",
                first_line(&String::from_utf8_lossy(&output.stderr))
            )),
        })
    }
}

/// Where other revisions' harnesses are built; removed when dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        Self(std::env::temp_dir().join(format!("parity-bisect-{}", std::process::id())))
    }

    fn dir(&self) -> std::io::Result<&Path> {
        std::fs::create_dir_all(&self.0)?;
        Ok(&self.0)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.0.is_dir()
            && let Err(error) = std::fs::remove_dir_all(&self.0)
        {
            tracing::warn!("{} stays: {error}", self.0.display());
        }
    }
}

fn first_line(text: &str) -> String {
    text.lines().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing").to_owned()
}

/// A runtime error in one line: the first line of a compiler's log that names an error.
fn compiler_line(error: &RuntimeError) -> String {
    match error {
        RuntimeError::Compile { log, .. } => {
            let line = log
                .lines()
                .find(|line| line.contains("error"))
                .map_or_else(|| first_line(log), str::to_owned);
            format!("does not compile: {}", line.trim())
        }
        other => first_line(&other.to_string()),
    }
}

/// The operator's edge cases, then `count` drawn cases, or as many as profile `quick` draws.
///
/// # Errors
/// A strategy that draws nothing.
pub fn cases_of(
    operator: &AnyOperator,
    count: Option<usize>,
    seed: u64,
) -> anyhow::Result<Vec<Case>> {
    let mut cases = operator.edge_cases(Profile::Quick);
    let strategy = operator.strategy(Profile::Quick);
    let digest = blake3::hash(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, digest.as_bytes());
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    for _ in 0..count.unwrap_or_else(|| operator.default_cases(Profile::Quick)) {
        let tree = strategy
            .new_tree(&mut runner)
            .map_err(|reason| anyhow::anyhow!("drawing a case: {reason}"))?;
        cases.push(tree.current());
    }
    Ok(cases)
}
