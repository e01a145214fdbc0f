//! The hand-written list of mutants without effect: `equivalent.toml` in the folder of mutants.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use thiserror::Error;

use crate::mutants::planted::EQUIVALENT;

/// Why the list cannot be used.
#[derive(Debug, Error)]
pub enum EquivalentError {
    /// It cannot be read.
    #[error("reading {path}: {source}")]
    Read {
        /// The list.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// It is not a list of ids with reasons.
    #[error("{path}: {reason}")]
    Malformed {
        /// The list.
        path: PathBuf,
        /// The parser's message, or the id that is wrong.
        reason: String,
    },
    /// It names mutants that no kernel produces any more.
    #[error("{path}: no kernel gives these mutants any more: {ids}")]
    Stale {
        /// The list.
        path: PathBuf,
        /// The ids.
        ids: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EquivalentFile {
    #[serde(default)]
    equivalent: Vec<Entry>,
}

/// Mutants that are equivalent for the same reason.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    ids: Vec<String>,
    reason: String,
}

/// The list: for each id, why the mutant computes the same as the kernel.
#[derive(Debug, Default)]
pub struct Equivalents {
    path: PathBuf,
    reasons: BTreeMap<String, String>,
}

impl Equivalents {
    /// Reads the list in a folder of mutants; without the file the list is empty.
    ///
    /// # Errors
    /// [`EquivalentError::Read`]; [`EquivalentError::Malformed`], also where an id appears twice or
    /// without a reason.
    pub fn load(dir: &Path) -> Result<Self, EquivalentError> {
        let path = dir.join(EQUIVALENT);
        if !path.is_file() {
            return Ok(Self { path, ..Self::default() });
        }
        let text = std::fs::read_to_string(&path)
            .map_err(|source| EquivalentError::Read { path: path.clone(), source })?;
        let malformed = |reason: String| EquivalentError::Malformed { path: path.clone(), reason };
        let file: EquivalentFile = toml::from_str(&text).map_err(|e| malformed(e.to_string()))?;
        let mut reasons = BTreeMap::new();
        for entry in file.equivalent {
            let reason = entry.reason.split_whitespace().collect::<Vec<_>>().join(" ");
            for id in entry.ids {
                if reason.is_empty() {
                    return Err(malformed(format!("`{id}` has no reason")));
                }
                if reasons.insert(id.clone(), reason.clone()).is_some() {
                    return Err(malformed(format!("`{id}` is listed twice")));
                }
            }
        }
        Ok(Self { path, reasons })
    }

    /// Why a mutant is equivalent, if it is listed.
    pub fn reason(&self, id: &str) -> Option<&str> {
        self.reasons.get(id).map(String::as_str)
    }

    /// Checks the list against all mutants of some operators; ids of other operators are ignored.
    ///
    /// # Errors
    /// [`EquivalentError::Stale`].
    pub fn check(
        &self,
        operators: &BTreeSet<String>,
        generated: &BTreeSet<&str>,
    ) -> Result<(), EquivalentError> {
        let concerned = |id: &&String| {
            id.split(':').next().is_some_and(|operator| operators.contains(operator))
        };
        let stale: Vec<&str> = self
            .reasons
            .keys()
            .filter(concerned)
            .map(String::as_str)
            .filter(|id| !generated.contains(id))
            .collect();
        match stale.is_empty() {
            true => Ok(()),
            false => Err(EquivalentError::Stale { path: self.path.clone(), ids: stale.join(", ") }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> Result<Equivalents, EquivalentError> {
        let dir = tempfile::tempdir().expect("a scratch directory");
        std::fs::write(dir.path().join(EQUIVALENT), text).expect("a file");
        Equivalents::load(dir.path())
    }

    #[test]
    fn an_id_that_no_kernel_gives_is_an_error_for_its_own_operator_only() {
        let list = list(
            "[[equivalent]]\nids = [\"rope:f:scale:0\", \"rope:f:scale:1\"]\nreason = 'none'\n",
        )
        .expect("a list");
        let check = |operator: &str, ids: &[&str]| {
            list.check(&[operator.to_owned()].into(), &ids.iter().copied().collect())
                .map_err(|error| error.to_string())
        };
        assert_eq!(check("rope", &["rope:f:scale:0", "rope:f:scale:1"]), Ok(()));
        assert_eq!(check("rms_norm", &[]), Ok(()));
        let error = check("rope", &["rope:f:scale:1"]).unwrap_err();
        assert!(
            error.ends_with("no kernel gives these mutants any more: rope:f:scale:0"),
            "{error}"
        );
    }

    #[test]
    fn an_entry_needs_a_reason_and_may_stand_once() {
        let error =
            list("[[equivalent]]\nids = [\"a:b:c:0\"]\nreason = ' '\n").unwrap_err().to_string();
        assert!(error.ends_with("`a:b:c:0` has no reason"), "{error}");
        let error = list("[[equivalent]]\nids = [\"a:b:c:0\", \"a:b:c:0\"]\nreason = 'x'\n")
            .unwrap_err()
            .to_string();
        assert!(error.ends_with("`a:b:c:0` is listed twice"), "{error}");
        assert!(list("[[equivalent]]\nids = [\"a\"]\nwhy = 'x'\n").is_err());
    }

    #[test]
    fn a_folder_without_a_list_lists_none() {
        let dir = tempfile::tempdir().expect("a scratch directory");
        assert!(Equivalents::load(dir.path()).expect("no list").reason("a:b:c:0").is_none());
    }
}
