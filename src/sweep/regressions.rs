//! Failing cases, shrunk and saved: `fixtures/regressions/<operator>.jsonl`, one case a line.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use dsv4_runtime::BackendKind;

use crate::case::{Case, CaseError};
use crate::record::{CaseRecord, Origin, Report, SavedRecord, Verdict};

/// The folder of saved cases.
#[derive(Clone, Debug)]
pub struct Regressions {
    dir: PathBuf,
}

impl Regressions {
    /// Saves the shrunk failing cases of all shards. Failures of an external kernel are not saved:
    /// they say nothing about this project's kernels.
    ///
    /// # Errors
    /// Those of [`Self::append_record`].
    pub fn remember_shrunk(&self, report: &Report) -> anyhow::Result<()> {
        let is_ours = report.environment.backend != BackendKind::External;
        for record in
            report.cases.iter().filter(|record| is_ours && record.origin == Origin::Shrunk)
        {
            self.append_record(record).context("saving a failing case")?;
        }
        Ok(())
    }

    /// Uses `dir`; a folder that does not exist holds no cases.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// `PARITY_FIXTURES`/regressions, or `fixtures/regressions` below the working directory.
    pub fn default_dir() -> PathBuf {
        fixtures_dir().join("regressions")
    }

    fn path(&self, operator: &str) -> PathBuf {
        self.dir.join(format!("{operator}.jsonl"))
    }

    /// The saved cases of an operator, oldest first. Empty lines and `#` comments are skipped.
    ///
    /// # Errors
    /// A file that cannot be read, or a line that is not a case, with its number.
    pub fn load(&self, operator: &str) -> Result<Vec<Case>, CaseError> {
        let path = self.path(operator);
        if !path.is_file() {
            return Ok(Vec::new());
        }
        let text = std::fs::read_to_string(&path)
            .map_err(|e| CaseError::Malformed(format!("{}: {e}", path.display())))?;
        text.lines()
            .enumerate()
            .filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'))
            .map(|(number, line)| {
                Case::parse(line).map_err(|e| {
                    CaseError::Malformed(format!("{}:{}: {e}", path.display(), number + 1))
                })
            })
            .collect()
    }

    /// Saves a case unless it is already saved.
    ///
    /// # Errors
    /// The file system's.
    pub fn append(&self, case: &Case) -> std::io::Result<()> {
        let path = self.path(&case.operator);
        let line = case.line();
        let known = std::fs::read_to_string(&path).unwrap_or_default();
        if known.lines().any(|l| l == line) {
            return Ok(());
        }
        std::fs::create_dir_all(&self.dir)?;
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(&path)?;
        writeln!(file, "{line}")
    }

    /// The files that hold failing cases of a run. Cases that the run took from there are separate.
    pub fn saved(&self, cases: &[CaseRecord]) -> Vec<SavedRecord> {
        let mut failing: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
        let failed = |case: &&CaseRecord| {
            case.origin != Origin::Regression && case.verdict() != Verdict::Pass
        };
        for case in cases.iter().filter(failed) {
            if let Ok(line) =
                serde_json::from_value::<Case>(case.case.clone()).map(|case| case.line())
            {
                failing.entry(&case.operator).or_default().insert(line);
            }
        }
        let of = |(operator, failing): (&str, BTreeSet<String>)| {
            let path = self.path(operator);
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            let cases = text.lines().filter(|line| failing.contains(*line)).count() as u64;
            (cases > 0).then(|| SavedRecord { file: path.display().to_string(), cases })
        };
        failing.into_iter().filter_map(of).collect()
    }

    /// Saves the case of a record unless it is already saved.
    ///
    /// # Errors
    /// A record without a case, or the file system's.
    pub fn append_record(&self, record: &CaseRecord) -> std::io::Result<()> {
        self.append(&serde_json::from_value(record.case.clone())?)
    }
}

/// `PARITY_FIXTURES`, or `fixtures` below the working directory.
pub fn fixtures_dir() -> PathBuf {
    std::env::var_os("PARITY_FIXTURES")
        .map_or_else(|| Path::new("fixtures").to_owned(), PathBuf::from)
}
