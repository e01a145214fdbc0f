//! Failing cases, shrunk and saved: `fixtures/regressions/<operator>.jsonl`, one case a line.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use dsv4_runtime::BackendKind;
use dsv4_runtime::process::variable;

use crate::case::{Case, CaseError};
use crate::operators::registry;
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
    /// A file that cannot be read, or a line that is no case of this operator, with its number.
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
                let of_file = |case: Case| match case.operator == operator {
                    true => checked(&case).map(|()| case),
                    false => {
                        let other = &case.operator;
                        Err(CaseError::Malformed(format!("a case of `{other}` in this file")))
                    }
                };
                Case::parse(line).and_then(of_file).map_err(|e| {
                    CaseError::Malformed(format!("{}:{}: {e}", path.display(), number + 1))
                })
            })
            .collect()
    }

    /// Saves a case unless it is already saved.
    ///
    /// # Errors
    /// A case that its operator rejects, or whose operator is not the registry's: its name becomes
    /// a path. Or the file system's.
    pub fn append(&self, case: &Case) -> std::io::Result<()> {
        checked(case).map_err(std::io::Error::other)?;
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

/// Whether an operator of the registry accepts the case.
fn checked(case: &Case) -> Result<(), CaseError> {
    registry::find(&case.operator)?.check(case)
}

/// `PARITY_FIXTURES`, or `fixtures` below the working directory.
pub fn fixtures_dir() -> PathBuf {
    variable("PARITY_FIXTURES").map_or_else(|| Path::new("fixtures").to_owned(), PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(line: &str) -> Case {
        Case::parse(line).expect("a case by its syntax")
    }

    #[test]
    fn a_name_that_is_no_operators_becomes_no_path() {
        let folder = tempfile::tempdir().unwrap();
        let regressions = Regressions::new(folder.path().join("inner"));
        for name in ["../escaped", "/tmp/escaped", "no_such_operator", ""] {
            let line = format!("{{\"operator\":\"{name}\"}}");
            let refused = regressions.append(&case(&line)).unwrap_err().to_string();
            assert!(refused.contains("unknown operator"), "{name}: {refused}");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_saved_line_that_its_operator_rejects_is_named_by_file_and_number() {
        let folder = tempfile::tempdir().unwrap();
        let regressions = Regressions::new(folder.path());
        for (line, said) in [
            ("{\"operator\":\"rope\"}", "rope"),
            ("{\"operator\":\"topk\"}", "a case of `topk` in this file"),
            ("[]", "malformed case"),
        ] {
            std::fs::write(folder.path().join("rope.jsonl"), format!("# a comment\n{line}\n"))
                .unwrap();
            let refused = regressions.load("rope").unwrap_err().to_string();
            assert!(refused.contains("rope.jsonl:2: ") && refused.contains(said), "{refused}");
        }
    }
}
