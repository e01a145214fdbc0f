//! What a run set out to do and how far it has come: `plan.json` and `records.jsonl`.
//!
//! `plan.json` is written before the first case; `records.jsonl` grows by one line with each case.
//! A killed worker leaves at most one incomplete line, which `--resume` removes; every complete
//! line is kept. Only one run at a time writes to a folder. The records are locked, and the lock
//! ends with the process, however it ends.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use dsv4_runtime::process::this_file;
use dsv4_runtime::{BackendKind, Environment};
use serde::{Deserialize, Serialize};

use crate::case::Case;
use crate::record::words::brief;
use crate::record::{
    CaseRecord, OperatorRecord, Origin, Report, Revision, SCHEMA_VERSION, Settings, ShardRecord,
    Skip, other_setting,
};

/// Name of the plan's file.
pub const PLAN: &str = "plan.json";

/// Name of the records' file.
pub const RECORDS: &str = "records.jsonl";

/// Name of the folder, within that of the report, that holds a folder for each worker of a run
/// while the run is unfinished.
pub const WORKERS: &str = "workers";

/// Which part of a run: `index` of `count`, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// Which one, below `count`.
    pub index: u32,
    /// How many parts exist.
    pub count: u32,
}

impl Shard {
    /// The whole run.
    pub const WHOLE: Self = Self { index: 0, count: 1 };
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.count)
    }
}

impl FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once('/').and_then(|(index, count)| {
            Some(Self { index: index.trim().parse().ok()?, count: count.trim().parse().ok()? })
        });
        match parsed {
            Some(shard) if shard.index < shard.count => Ok(shard),
            Some(shard) => Err(format!(
                "shards are counted from 0, so {} shards have no number {}",
                shard.count, shard.index
            )),
            None => Err("a shard is I/N, such as 0/4".into()),
        }
    }
}

/// Saved cases, by operator.
pub type Remembered = BTreeMap<String, Vec<Case>>;

/// What must be the same in all parts of one run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Identity {
    /// The source under test.
    pub revision: Revision,
    /// blake3 of the executable; `unknown` where it could not be read.
    pub executable_digest: String,
    /// What it ran on.
    pub environment: Environment,
}

impl Identity {
    /// What is different, as `thing, here, there`; `None` when both can be parts of one run.
    ///
    /// Two emulators on unlike processors compute the same. Two kinds of GPU need not, and their
    /// times mean different things. Executables are compared only where the commit does not
    /// identify their source, because builds of one commit on two machines may differ in bytes.
    pub fn difference(&self, other: &Self) -> Option<(&'static str, String, String)> {
        let commit = |revision: &Revision| {
            format!(
                "{}{}",
                revision.commit,
                if revision.dirty { " with uncommitted changes" } else { "" }
            )
        };
        let backend = |environment: &Environment| match environment.backend {
            BackendKind::Cuda => format!("cuda on {} ({})", environment.device, environment.target),
            BackendKind::Emulator => "emulator".to_owned(),
            BackendKind::External => format!("external: {}", environment.device),
        };
        let (here, there) = (&self.revision, &other.revision);
        let unnamed = here.dirty || here.commit == "unknown";
        let executable = |identity: &Self| {
            if unnamed { identity.executable_digest.clone() } else { String::new() }
        };
        [
            ("revision", commit(here), commit(there)),
            ("kernels", here.kernels_digest.clone(), there.kernels_digest.clone()),
            ("executable", executable(self), executable(other)),
            ("backend", backend(&self.environment), backend(&other.environment)),
        ]
        .into_iter()
        .find(|(_, here, there)| here != there)
    }
}

/// blake3 of the running executable, `unknown` where it cannot be read.
pub fn executable_digest() -> String {
    let file = std::fs::File::open(this_file())
        .or_else(|_| std::env::current_exe().and_then(std::fs::File::open));
    let mut hasher = blake3::Hasher::new();
    match file.and_then(|file| hasher.update_reader(file).map(|_| ())) {
        Ok(()) => hasher.finalize().to_hex().to_string(),
        Err(_) => "unknown".into(),
    }
}

/// What the report of a run holds in addition to its cases. With it, the records that a killed run
/// left make a report, too.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunDescription {
    /// The command line.
    pub command: String,
    /// Start of the run, seconds since 1970-01-01 UTC.
    pub started_unix: u64,
    /// `quick`, `ci` or `full`.
    pub profile: String,
    /// Seed of the sweep.
    pub seed: u64,
    /// Random schedules for each case.
    pub schedules: u32,
    /// The operators that are swept.
    pub operators: Vec<OperatorRecord>,
    /// What is skipped from the start.
    pub skips: Vec<Skip>,
}

/// `plan.json`: what must be the same when a run is resumed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanRecord {
    /// [`SCHEMA_VERSION`] of the writer.
    pub schema_version: u32,
    /// Which part of the plan this folder holds.
    pub shard: Shard,
    /// Cases of the whole plan.
    pub planned_cases: u64,
    /// Cases of this shard.
    pub shard_cases: u64,
    /// blake3 of the whole plan and of its division.
    pub plan_digest: String,
    /// Source, executable and machine.
    pub identity: Identity,
    /// Other inputs of the plan, by the option that sets each.
    pub settings: Settings,
    /// The saved cases of which the plan was made. Cases that the run itself saves later must not
    /// change its plan, so a resumed run takes them from here.
    pub remembered: Remembered,
    /// What the report declares about the run.
    pub run: RunDescription,
}

impl PlanRecord {
    /// The report of these cases, which took that many seconds.
    pub fn report(&self, records: Vec<CaseRecord>, seconds: f64) -> Report {
        let (unsupported, cases) =
            records.into_iter().partition(|record| record.unsupported.is_some());
        let RunDescription { command, started_unix, profile, seed, schedules, operators, skips } =
            self.run.clone();
        let mut report = Report {
            schema_version: SCHEMA_VERSION,
            command,
            started_unix,
            seconds,
            revision: self.identity.revision.clone(),
            environment: self.identity.environment.clone(),
            profile,
            seed,
            schedules,
            operators,
            cases,
            unsupported,
            unfinished: None,
            saved: Vec::new(),
            base: None,
            benchmarks: Vec::new(),
            ceilings: None,
            mutants: Vec::new(),
            kill_matrix: None,
            skips: Vec::new(),
            shards: vec![self.shard_record(seconds)],
        };
        report.skips = report.skips_of_cases().into_iter().chain(skips).collect();
        report
    }

    fn shard_record(&self, seconds: f64) -> ShardRecord {
        ShardRecord {
            index: self.shard.index,
            count: self.shard.count,
            planned_cases: self.planned_cases,
            plan_digest: self.plan_digest.clone(),
            executable_digest: self.identity.executable_digest.clone(),
            device: self.identity.environment.device.clone(),
            seconds,
            settings: self.settings.clone(),
        }
    }
}

/// The report of an unfinished run in a folder; `None` where no run has started.
///
/// # Errors
/// Files that cannot be read, or that are not a plan and records.
pub fn read_unfinished(dir: &Path) -> Result<Option<Report>> {
    let Some(plan) = read_plan(dir)? else { return Ok(None) };
    let records = records_of(&dir.join(RECORDS))?.records;
    let done = records.iter().filter(|record| record.origin != Origin::Shrunk).count() as u64;
    let seconds = records.iter().map(|record| record.kernel_seconds + record.oracle_seconds).sum();
    let missing = plan.shard_cases.saturating_sub(done);
    Ok(Some(Report { unfinished: Some(missing), ..plan.report(records, seconds) }))
}

/// Records of a file, and where they end.
#[derive(Debug)]
pub struct Records {
    /// The complete ones.
    pub records: Vec<CaseRecord>,
    /// Bytes up to the end of the last complete line.
    pub complete_bytes: u64,
}

/// Reads records, one a line, and a line at a time: the text of all takes as much memory as they
/// do. A last line without an end was cut by a kill and is skipped.
///
/// # Errors
/// What cannot be read; a complete line that is not a record, with its number.
pub fn read_records(mut reader: impl BufRead) -> Result<Records> {
    let (mut line, mut records, mut complete_bytes) = (Vec::new(), Vec::new(), 0);
    while reader.read_until(b'\n', &mut line)? > 0 && line.ends_with(b"\n") {
        let record = serde_json::from_slice(&line);
        let number = records.len() + 1;
        records.push(record.with_context(|| format!("line {number} is no record"))?);
        complete_bytes += line.len() as u64;
        line.clear();
    }
    Ok(Records { records, complete_bytes })
}

/// The records of a file.
///
/// # Errors
/// As [`read_records`], with the file's name.
pub fn records_of(path: &Path) -> Result<Records> {
    let file = File::open(path).with_context(|| format!("reading {}", path.display()))?;
    read_records(BufReader::new(file)).with_context(|| path.display().to_string())
}

/// The plan of a folder; `None` where no run has started.
///
/// # Errors
/// A file that cannot be read, or that has another version.
pub fn read_plan(dir: &Path) -> Result<Option<PlanRecord>> {
    let path = dir.join(PLAN);
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("reading {}", path.display())),
    };
    let plan: PlanRecord =
        serde_json::from_str(&text).with_context(|| format!("{} is no plan", path.display()))?;
    if plan.schema_version != SCHEMA_VERSION {
        bail!(
            "{} is of schema version {}, not {SCHEMA_VERSION}",
            path.display(),
            plan.schema_version
        );
    }
    Ok(Some(plan))
}

/// The open `records.jsonl` of a run.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Starts a run in `dir`. Whatever an earlier run left there is removed first, so that an
    /// interrupted run cannot pass for a finished one.
    ///
    /// # Errors
    /// File system errors, another run that is writing here, or a folder with files that no run of
    /// ours left.
    pub fn start(dir: &Path, plan: &PlanRecord) -> Result<Self> {
        refuse_foreign(dir)?;
        std::fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        let journal = Self::open(dir)?;
        for name in [PLAN, "report.json", "index.html", "summary.md", "diff.html"] {
            match std::fs::remove_file(dir.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(error)
                        .with_context(|| format!("removing {}", dir.join(name).display()));
                }
                _ => {}
            }
        }
        journal.file.set_len(0).with_context(|| format!("emptying {}", journal.path.display()))?;
        write_plan(dir, plan).with_context(|| format!("writing {}", dir.join(PLAN).display()))?;
        Ok(journal)
    }

    /// Continues the run in `dir`, whose plan is `before`. Returns what it has recorded, and the
    /// journal to go on with.
    ///
    /// # Errors
    /// A plan that is not the same, records that cannot be read, or another run that is writing
    /// here.
    pub fn resume(
        dir: &Path,
        before: &PlanRecord,
        plan: &PlanRecord,
    ) -> Result<(Self, Vec<CaseRecord>)> {
        refuse_another_plan(before, plan)
            .with_context(|| format!("{} cannot be resumed", dir.display()))?;
        let mut journal = Self::open(dir)?;
        let records = read_records(BufReader::new(&journal.file));
        let records = records.with_context(|| journal.path.display().to_string())?;
        cut_behind(&mut journal.file, records.complete_bytes)
            .with_context(|| format!("cutting {}", journal.path.display()))?;
        Ok((journal, records.records))
    }

    fn open(dir: &Path) -> Result<Self> {
        let (path, file) = open_alone(dir, RECORDS)?;
        Ok(Self { path, file })
    }

    /// Where the records are.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds one record, in one write.
    ///
    /// # Errors
    /// File system errors.
    pub fn append(&mut self, record: &CaseRecord) -> io::Result<()> {
        let mut line = serde_json::to_vec(record)?;
        line.push(b'\n');
        self.file.write_all(&line)
    }
}

/// Name of the records of mutants.
pub(crate) const MUTANTS: &str = "mutants.jsonl";

/// What a run writes to its folder. Its log of benchmarks is included, which exists before the plan
/// does.
const OURS: [&str; 7] =
    [PLAN, RECORDS, "report.json", "index.html", "summary.md", "diff.html", "benchmarks.txt"];

/// Rejects a folder for a report that has files but no plan or report of ours: they would be
/// overwritten. A missing or empty folder is accepted.
///
/// # Errors
/// What was found there, or a file instead of a folder.
pub fn refuse_foreign(dir: &Path) -> Result<()> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => {
            return Err(error)
                .with_context(|| format!("{} is no folder for a report", dir.display()));
        }
    };
    let mut names: Vec<String> = entries
        .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
        .collect();
    names.sort();
    // A run that was killed at once left an empty journal, or a half-written plan; benchmarks run
    // before.
    let just_begun = |name: &String| match name.as_str() {
        RECORDS => std::fs::metadata(dir.join(RECORDS)).is_ok_and(|file| file.len() == 0),
        name => name.starts_with(PLAN) || ["benchmarks.txt", MUTANTS, WORKERS].contains(&name),
    };
    if is_ours(dir) || names.iter().all(just_begun) {
        return Ok(());
    }
    let found = names.iter().find(|name| OURS.contains(&name.as_str())).or(names.first());
    let found = found.map(String::as_str).unwrap_or_default();
    bail!(
        "{} holds {} file(s), such as `{}`, and no report or plan of a run: give an empty folder, or take them away",
        dir.display(),
        names.len(),
        brief(found)
    )
}

/// Whether a run of ours has left a plan or a report here.
fn is_ours(dir: &Path) -> bool {
    let says = |name: &str, field: &str| {
        let file = std::fs::File::open(dir.join(name))
            .ok()
            .filter(|file| file.metadata().is_ok_and(|m| m.is_file()));
        let read = file.and_then(|file| {
            serde_json::from_reader::<_, serde_json::Value>(io::BufReader::new(file)).ok()
        });
        read.is_some_and(|value| {
            value.get("schema_version").is_some() && value.get(field).is_some()
        })
    };
    says(PLAN, "plan_digest") || says("report.json", "environment")
}

/// Opens a journal for only one run, without changing it. The lock ends when the file is closed.
pub(crate) fn open_alone(dir: &Path, name: &str) -> Result<(PathBuf, File)> {
    let path = dir.join(name);
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
    let file = file.with_context(|| format!("opening {}", path.display()))?;
    // If the file system has no locks, there is nothing to wait for.
    if matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
        bail!("another run is writing to {}", dir.display());
    }
    Ok((path, file))
}

/// The complete lines of a journal, read to its end.
pub(crate) fn complete_lines(file: &mut File) -> Result<String> {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    // A kill may have cut the last line within a character.
    bytes.truncate(bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1));
    Ok(String::from_utf8(bytes)?)
}

/// Removes the incomplete line that a kill left, so that the next one starts there.
pub(crate) fn cut_behind(file: &mut File, complete_bytes: u64) -> io::Result<()> {
    file.set_len(complete_bytes)?;
    file.seek(SeekFrom::End(0)).map(|_| ())
}

/// Written whole or not at all, because a resumed run trusts it.
fn write_plan(dir: &Path, plan: &PlanRecord) -> io::Result<()> {
    let unfinished = dir.join(format!("{PLAN}.unfinished"));
    std::fs::write(&unfinished, serde_json::to_vec(plan)?)?;
    std::fs::rename(unfinished, dir.join(PLAN))
}

fn refuse_another_plan(before: &PlanRecord, now: &PlanRecord) -> Result<()> {
    if before.shard != now.shard {
        bail!("it is shard {}, not {}", before.shard, now.shard);
    }
    if let Some((what, there, here)) = before.identity.difference(&now.identity) {
        bail!("its {what} was {there}, and is {here} now");
    }
    if before.plan_digest != now.plan_digest
        && let Some((option, there, here)) = other_setting(&before.settings, &now.settings)
    {
        bail!("it was planned with {option} {there}, and not with {here}");
    }
    if before.plan_digest != now.plan_digest {
        bail!(
            "it was planned with other arguments: --ops, --profile, --cases, --seed, --schedules and --costs \
             must be the same (plan {}, not {})",
            before.plan_digest,
            now.plan_digest
        );
    }
    Ok(())
}
