//! Planted bugs: text patches of kernel sources, applied when they are compiled, never to the tree.
//!
//! `fixtures/mutants/*.toml` hold lists of [`Mutant`] (and [`EQUIVALENT`], of generated ones). An anchor that matches no longer, or more than
//! once, is an error: a patch that changes nothing would be "survived" for the wrong reason.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use dsv4_kernels::runtime::{Device, SourceTree};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::case::{Case, CaseError};
use crate::judge::checks::{self, CheckOptions, Outcome};
use crate::judge::truths::Truths;
use crate::operator::registry;
use crate::record::{CheckRecord, MutantRecord, MutantSource, MutantStatus, Verdict};

/// The file of a folder of mutants that lists generated ones without effect ([`crate::mutants::matrix`]).
pub const EQUIVALENT: &str = "equivalent.toml";

/// One planted bug.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mutant {
    /// Unique name.
    pub id: String,
    /// Entry of the failure-mode catalogue (`reference/spec/failure_modes.md`), such as `FM-08`, or `derived`.
    pub catalogue: String,
    /// Operator whose cases must see it.
    pub operator: String,
    /// File within the kernel tree.
    pub file: String,
    /// One sentence.
    pub summary: String,
    /// Text that occurs exactly once in the file.
    pub find: String,
    /// What replaces it.
    pub replace: String,
    /// Check that is expected to see it.
    pub expected: String,
    /// Cases, as JSON lines, that are enough to see it: the smallest input class.
    pub cases: Vec<String>,
    /// The class of bugs that it stands for, where it stands for one that sweeps were once blind to.
    #[serde(default)]
    pub class: Option<Class>,
    /// Name of the file that lists it.
    #[serde(skip)]
    pub list: String,
    /// Why a GPU may compute the right results all the same, where it may: then the emulator alone plants it.
    #[serde(default)]
    pub hidden_on_gpu: Option<String>,
}

/// Classes of bugs that sweeps were once blind to: each operator that can have them has some of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// A NaN or an infinity that is swallowed, or made up.
    SpecialNumbers,
    /// Right for the usual exponents alone: squares that overflow, scales that vanish, constants that stand for infinity.
    Range,
    /// Right up to some extent below the declared limit.
    Limit,
    /// Right for the first item of a block, or while a running value moves far enough to be rescaled.
    Persistence,
    /// Terms of gradients that larger ones cover.
    SmallTerms,
    /// Something of an earlier call shows.
    Sequence,
    /// Two threads or blocks that update the same number without an atomic.
    LostUpdate,
}

impl Class {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::SpecialNumbers,
        Self::Range,
        Self::Limit,
        Self::Persistence,
        Self::SmallTerms,
        Self::Sequence,
        Self::LostUpdate,
    ];
}

/// Why mutants cannot be run.
#[derive(Debug, Error)]
pub enum MutantError {
    /// The folder or a file in it cannot be read.
    #[error("reading {path}: {source}")]
    Read {
        /// What was read.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// A file is no list of mutants.
    #[error("{path}: {reason}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The parser's words.
        reason: String,
    },
    /// The anchor does not occur exactly once.
    #[error("mutant `{id}`: its anchor occurs {count} times in {file}, not once")]
    Anchor {
        /// Mutant.
        id: String,
        /// File that was searched.
        file: String,
        /// How often it occurs.
        count: usize,
    },
    /// The mutated kernel could not be launched at all.
    #[error("mutant `{id}` does not run, which shows nothing about the checks: {message}")]
    NotRun {
        /// Mutant.
        id: String,
        /// The launch's error.
        message: String,
    },
    /// One of its cases cannot be prepared.
    #[error("mutant `{id}`: {source}")]
    Case {
        /// Mutant.
        id: String,
        /// Why.
        #[source]
        source: CaseError,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MutantFile {
    mutant: Vec<Mutant>,
}

/// All mutants of a folder, by file name and then in the file's order.
///
/// # Errors
/// [`MutantError::Read`], [`MutantError::Malformed`].
pub fn load(dir: &Path) -> Result<Vec<Mutant>, MutantError> {
    let read_error = |path: &Path| {
        let path = path.to_owned();
        move |source| MutantError::Read { path, source }
    };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(read_error(dir))? {
        let path = entry.map_err(read_error(dir))?.path();
        let equivalent = path.file_name().is_some_and(|name| name == EQUIVALENT);
        if !equivalent && path.extension().is_some_and(|extension| extension == "toml") {
            paths.push(path);
        }
    }
    paths.sort();
    let mut mutants = Vec::new();
    for path in paths {
        let text = std::fs::read_to_string(&path).map_err(read_error(&path))?;
        let list = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let malformed = |reason: String| MutantError::Malformed { path: path.clone(), reason };
        let file: MutantFile = toml::from_str(&text).map_err(|e| malformed(e.to_string()))?;
        // A mutant of an operator that nobody sweeps would be run by nobody, and missed by nobody.
        if let Some((id, error)) = file.mutant.iter().find_map(|m| Some((&m.id, registry::find(&m.operator).err()?))) {
            return Err(malformed(format!("mutant `{id}`: {error}")));
        }
        mutants.extend(file.mutant.into_iter().map(|mutant| Mutant { list: list.clone(), ..mutant }));
    }
    Ok(mutants)
}

impl Mutant {
    /// The tree with this bug planted.
    ///
    /// # Errors
    /// [`MutantError::Anchor`].
    pub fn plant(&self, tree: &SourceTree) -> Result<SourceTree, MutantError> {
        let text = tree.text(&self.file).unwrap_or_default();
        let count = text.matches(&self.find).count();
        if count != 1 {
            return Err(MutantError::Anchor { id: self.id.clone(), file: self.file.clone(), count });
        }
        Ok(tree.with_text(&self.file, text.replacen(&self.find, &self.replace, 1), &format!("mutant {}", self.id)))
    }

    /// A record that says what is planted and where, before anything is known of its fate.
    pub fn unjudged(&self, tree: &SourceTree) -> MutantRecord {
        let text = tree.text(&self.file).unwrap_or_default();
        MutantRecord {
            id: self.id.clone(),
            catalogue: self.catalogue.clone(),
            operator: self.operator.clone(),
            summary: self.summary.clone(),
            expected: self.expected.clone(),
            source: MutantSource::Planted,
            file: self.file.clone(),
            line: text.find(&self.find).map_or(0, |at| 1 + text[..at].matches('\n').count() as u64),
            original: self.find.trim_matches('\n').to_owned(),
            mutated: self.replace.trim_matches('\n').to_owned(),
            ..MutantRecord::default()
        }
    }

    /// Runs the mutant's cases against it and says which checks saw it.
    ///
    /// # Errors
    /// An anchor that does not match, or a case that cannot be prepared.
    pub fn run(&self, device: &Device, schedules: u32) -> Result<MutantRecord, MutantError> {
        self.run_until(device, schedules, &Truths::default(), &|_| false)
    }

    /// The same, up to where the expected check has seen it: of the others the record names those that came before.
    /// What the oracle says of the cases is taken from `truths`.
    ///
    /// # Errors
    /// Those of [`Self::run`].
    pub fn run_to_expected(
        &self,
        device: &Device,
        schedules: u32,
        truths: &Truths,
    ) -> Result<MutantRecord, MutantError> {
        let expected = |check: &CheckRecord| check.check == self.expected && check.verdict == Verdict::Fail;
        self.run_until(device, schedules, truths, &|outcome| outcome.checks.iter().any(expected))
    }

    fn run_until(
        &self,
        device: &Device,
        schedules: u32,
        truths: &Truths,
        enough: &dyn Fn(&Outcome) -> bool,
    ) -> Result<MutantRecord, MutantError> {
        let mutated = device.with_tree(self.plant(device.tree())?);
        let options = CheckOptions::of_kernels(schedules);
        let mut killed_by = BTreeSet::new();
        let (mut killing_case, mut reason) = (String::new(), String::new());
        let mut cases_run = 0;
        for line in &self.cases {
            let refused = |source| MutantError::Case { id: self.id.clone(), source };
            let case = Case::parse(line).map_err(refused)?;
            let prepared = registry::prepare(&case).map_err(refused)?;
            let truth = truths.of(&case, &*prepared).map_err(refused)?;
            let outcome = checks::run_by(&truth, &*prepared, &mutated, options, enough);
            cases_run += 1;
            // An error is no kill: a mutant that does not compile shows nothing about the checks.
            let seen = || outcome.failures().filter(|c| c.verdict == Verdict::Fail);
            if let (true, Some(first)) = (killed_by.is_empty(), seen().next()) {
                (killing_case, reason) = (case.line(), first.message.clone());
            }
            killed_by.extend(seen().map(|c| c.check.clone()));
            if let Some(error) = outcome.failures().find(|c| c.verdict == Verdict::Error && c.check == "launch") {
                return Err(MutantError::NotRun { id: self.id.clone(), message: error.message.clone() });
            }
            if enough(&outcome) {
                break;
            }
        }
        Ok(MutantRecord {
            status: Some(if killed_by.is_empty() { MutantStatus::Survived } else { MutantStatus::Killed }),
            killed_by: killed_by.into_iter().collect(),
            cases_run,
            killing_case,
            reason,
            ..self.unjudged(device.tree())
        })
    }
}
