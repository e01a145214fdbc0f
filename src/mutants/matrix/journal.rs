//! The result of each case without mutants and of each mutant so far: `mutants.jsonl`. It grows by
//! a line with each of them and survives a kill.
//!
//! A line identifies its trial by a digest of everything that could change its result: the mutant,
//! its cases, the schedules, the kernels, the executable and the backend. So a resumed run keeps
//! the results that still hold, whatever options earlier runs had, and runs the rest.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use dsv4_runtime::Device;
use serde::{Deserialize, Serialize};

use super::cases::KnownCase;
use super::trial::Trial;
use crate::record::{MutantRecord, journal};

/// Name of the journal's file.
pub const JOURNAL: &str = journal::MUTANTS;

/// One line of the journal.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Line {
    Mutant {
        /// [`Journal::digest`].
        trial: String,
        /// The result of the mutant.
        record: Box<MutantRecord>,
    },
    Case {
        /// [`Journal::digest`].
        case: String,
        /// The case without mutants.
        known: Box<KnownCase>,
    },
}

/// The open journal of a run, and the earlier results that it keeps.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    /// Kernels, executable and backend, as far as they could change a result.
    identity: String,
    known: BTreeMap<String, MutantRecord>,
    known_cases: BTreeMap<String, KnownCase>,
}

impl Journal {
    /// Opens the journal in `dir` for a run on `device`; `resume` keeps what it holds.
    ///
    /// # Errors
    /// The file system's, a line that is not a record, or another run that writes here.
    pub fn open(dir: &Path, device: &Device, resume: bool) -> Result<Self> {
        let environment = device.environment();
        let identity = [
            device.tree().digest(),
            journal::executable_digest(),
            environment.backend.to_string(),
            environment.target.clone(),
        ];
        Self::open_as(dir, identity.join(" "), resume)
    }

    fn open_as(dir: &Path, identity: String, resume: bool) -> Result<Self> {
        journal::refuse_foreign(dir)?;
        std::fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        let (path, file) = journal::open_alone(dir, JOURNAL)?;
        let mut journal =
            Self { path, file, identity, known: BTreeMap::new(), known_cases: BTreeMap::new() };
        journal.take_over(resume).with_context(|| journal.path.display().to_string())?;
        Ok(journal)
    }

    /// Reads the complete lines and removes an incomplete last line that a kill left.
    fn take_over(&mut self, resume: bool) -> Result<()> {
        if !resume {
            return Ok(self.file.set_len(0)?);
        }
        let lines = journal::complete_lines(&mut self.file)?;
        for (number, line) in lines.lines().enumerate() {
            let line = serde_json::from_str(line).with_context(|| {
                format!("line {} is no record of a mutant or a case", number + 1)
            })?;
            match line {
                Line::Mutant { trial, record } => drop(self.known.insert(trial, *record)),
                Line::Case { case, known } => drop(self.known_cases.insert(case, *known)),
            }
        }
        Ok(journal::cut_behind(&mut self.file, lines.len() as u64)?)
    }

    /// The digest that identifies a trial, or a case and its schedules, on this device.
    fn digest(&self, trial: &impl Serialize) -> Result<String> {
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.identity.as_bytes()).update(&[0]).update(&serde_json::to_vec(trial)?);
        Ok(hasher.finalize().to_hex().to_string())
    }

    /// The result of a trial in an earlier run.
    ///
    /// # Errors
    /// A trial that cannot be written as JSON.
    pub fn known(&self, trial: &Trial) -> Result<Option<MutantRecord>> {
        Ok(self.known.get(&self.digest(trial)?).cloned())
    }

    /// A case as an earlier run knew it. The key is the case, and what its run depends on.
    ///
    /// # Errors
    /// A case that cannot be written as JSON.
    pub fn known_case(&self, key: &impl Serialize) -> Result<Option<KnownCase>> {
        Ok(self.known_cases.get(&self.digest(key)?).cloned())
    }

    /// Appends the result of a trial, in one write.
    ///
    /// # Errors
    /// The file system's.
    pub fn append(&mut self, trial: &Trial, record: &MutantRecord) -> Result<()> {
        let (trial, record) = (self.digest(trial)?, Box::new(record.clone()));
        self.write(&Line::Mutant { trial, record })
    }

    /// Appends a case without mutants, in one write.
    ///
    /// # Errors
    /// The file system's.
    pub fn append_case(&mut self, key: &impl Serialize, known: &KnownCase) -> Result<()> {
        let (case, known) = (self.digest(key)?, Box::new(known.clone()));
        self.write(&Line::Case { case, known })
    }

    fn write(&mut self, line: &Line) -> Result<()> {
        let mut bytes = serde_json::to_vec(line)?;
        bytes.push(b'\n');
        self.file.write_all(&bytes).with_context(|| format!("writing to {}", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mutants::matrix::trial::Subject;
    use crate::mutants::planted::Mutant;

    fn trial(id: &str, schedules: u32) -> Trial {
        let mutant = Mutant {
            id: id.into(),
            catalogue: "FM-52".into(),
            operator: "rope".into(),
            file: "rope.cu".into(),
            summary: String::new(),
            find: "a".into(),
            replace: "b".into(),
            expected: "forward".into(),
            cases: Vec::new(),
            list: String::new(),
            hidden_on_gpu: None,
            timed: None,
            condition: Vec::new(),
            blamed: None,
        };
        Trial { subject: Subject::Planted(Box::new(mutant)), schedules, all_checks: false }
    }

    fn record(id: &str) -> MutantRecord {
        MutantRecord { id: id.into(), ..MutantRecord::default() }
    }

    fn open(dir: &Path, identity: &str, resume: bool) -> Journal {
        Journal::open_as(dir, identity.into(), resume).expect("a journal")
    }

    #[test]
    fn a_resumed_journal_knows_what_it_holds_and_nothing_of_other_kernels_or_schedules() {
        let dir = tempfile::tempdir().expect("a folder");
        let mut journal = open(dir.path(), "kernels", false);
        journal.append(&trial("bug", 1), &record("bug")).expect("written");
        drop(journal);
        let journal = open(dir.path(), "kernels", true);
        assert_eq!(journal.known(&trial("bug", 1)).expect("a digest"), Some(record("bug")));
        assert_eq!(journal.known(&trial("bug", 2)).expect("a digest"), None);
        assert_eq!(journal.known(&trial("other", 1)).expect("a digest"), None);
        drop(journal);
        assert_eq!(
            open(dir.path(), "other kernels", true).known(&trial("bug", 1)).expect("a digest"),
            None
        );
        assert_eq!(
            open(dir.path(), "kernels", false).known(&trial("bug", 1)).expect("a digest"),
            None
        );
    }

    #[test]
    fn a_line_that_a_kill_cut_short_is_taken_away_and_a_wrong_one_is_an_error() {
        let dir = tempfile::tempdir().expect("a folder");
        let mut journal = open(dir.path(), "kernels", false);
        journal.append(&trial("whole", 1), &record("whole")).expect("written");
        journal.append(&trial("cut", 1), &record("cut")).expect("written");
        drop(journal);
        let path = dir.path().join(JOURNAL);
        let text = std::fs::read(&path).expect("the file");
        std::fs::write(&path, &text[..text.len() - 9]).expect("written");
        let mut journal = open(dir.path(), "kernels", true);
        assert_eq!(journal.known(&trial("cut", 1)).expect("a digest"), None);
        journal.append(&trial("cut", 1), &record("cut")).expect("written");
        drop(journal);
        assert_eq!(
            open(dir.path(), "kernels", true).known(&trial("cut", 1)).expect("a digest"),
            Some(record("cut"))
        );

        std::fs::write(&path, "no record\n").expect("written");
        let error = Journal::open_as(dir.path(), "kernels".into(), true).unwrap_err();
        assert!(format!("{error:#}").contains("line 1 is no record"), "{error:#}");
    }

    #[test]
    fn only_one_run_at_a_time_writes_to_a_folder() {
        let dir = tempfile::tempdir().expect("a folder");
        let _first = open(dir.path(), "kernels", false);
        let error = Journal::open_as(dir.path(), "kernels".into(), true).unwrap_err();
        assert!(error.to_string().contains("another run"), "{error}");
    }
}
