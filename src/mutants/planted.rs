//! Planted bugs: text patches of kernel sources. They apply at compilation and never change the
//! tree.
//!
//! `fixtures/mutants/*.toml` hold lists of [`Mutant`] (and [`EQUIVALENT`] lists generated ones). A
//! list defines its cases once:
//!
//! ```toml
//! operator = "swiglu"
//! file = "swiglu.cu"
//!
//! [cases]
//! narrow = '{"operator":"swiglu",…}'
//!
//! [mutants.swiglu_gate_clamped_from_below]
//! catalogue = "FM-63"
//! summary = "The gate is clamped from below as well."
//! find = 'gate = minimum(gate, limit)'
//! replace = 'gate = clamp(gate, -limit, limit)'
//! cases = ["narrow"]
//! ```
//!
//! The search for an anchor folds white space, so an anchor survives reformatting. An anchor that
//! does not match, or matches more than once, is an error: a patch that changes nothing would
//! "survive" for the wrong reason.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use dsv4_runtime::{Device, SourceTree};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::case::{Case, CaseError};
use crate::judge::checks::{self, CheckOptions, Outcome};
use crate::judge::truths::Truths;
use crate::operator::benchmarks::Direction;
use crate::operators::registry;
use crate::record::{Check, CheckRecord, MutantRecord, MutantSource, MutantStatus, Verdict};

/// The file in a folder of mutants that lists generated mutants without effect
/// ([`crate::mutants::matrix`]).
pub const EQUIVALENT: &str = "equivalent.toml";

/// One planted bug.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Mutant {
    /// Unique name.
    pub id: String,
    /// Entry of the failure-mode catalogue (`reference/spec/failure_modes.md`), such as `FM-08`.
    pub catalogue: String,
    /// Operator whose cases must see it.
    pub operator: String,
    /// File within the kernel tree.
    pub file: String,
    /// One sentence.
    pub summary: String,
    /// Text that occurs exactly once in the file, white space folded.
    pub find: String,
    /// Its replacement.
    pub replace: String,
    /// The check that is expected to see it.
    pub expected: Check,
    /// Cases, as JSON lines, that are enough to see it: the smallest input class.
    pub cases: Vec<String>,
    /// Name of the file that lists it.
    pub list: String,
    /// Why a GPU may still compute the right results, if it may: then only the emulator plants it.
    pub hidden_on_gpu: Option<String>,
    /// The direction whose benchmarks see it when they compare what a timed call wrote.
    pub timed: Option<Direction>,
    /// Words of the condition under which it fails: a diagnosis names one of them.
    #[serde(default)]
    pub condition: Vec<String>,
    /// The operator that is to blame where it is planted in a whole model.
    pub blamed: Option<String>,
}

/// Why mutants cannot run.
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
    /// A file is not a list of mutants.
    #[error("{path}: {reason}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The parser's message.
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
    /// The mutated kernel could not be launched.
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

/// A list of mutants as written: it names what most of them share once.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MutantFile {
    operator: String,
    file: String,
    /// Cases as lines of JSON, by the names that mutants use.
    cases: BTreeMap<String, String>,
    mutants: BTreeMap<String, Listed>,
}

/// An entry of a list.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Listed {
    catalogue: String,
    summary: String,
    operator: Option<String>,
    file: Option<String>,
    find: String,
    replace: String,
    #[serde(default = "forward")]
    expected: Check,
    hidden_on_gpu: Option<String>,
    timed: Option<Direction>,
    #[serde(default)]
    condition: Vec<String>,
    blamed: Option<String>,
    cases: Vec<String>,
}

fn forward() -> Check {
    Check::Forward
}

impl MutantFile {
    /// Its mutants, by their ids; or the inconsistency in the list.
    fn mutants(self, list: &str) -> Result<Vec<Mutant>, String> {
        let Self { operator, file, cases, mutants } = self;
        let used: BTreeSet<&String> = mutants.values().flat_map(|listed| &listed.cases).collect();
        if let Some(name) = cases.keys().find(|name| !used.contains(name)) {
            return Err(format!("no mutant names case `{name}`"));
        }
        let mutant = |(id, listed): (String, Listed)| {
            let operator = listed.operator.unwrap_or_else(|| operator.clone());
            // A mutant of an operator that is not in the registry would never run, and its absence
            // would not show.
            registry::find(&operator).map_err(|error| format!("mutant `{id}`: {error}"))?;
            if let Check::Other(name) = &listed.expected {
                return Err(format!("mutant `{id}`: no check is named `{name}`"));
            }
            let line = |name: &String| {
                cases
                    .get(name)
                    .cloned()
                    .ok_or_else(|| format!("mutant `{id}`: [cases] has no `{name}`"))
            };
            let cases = listed.cases.iter().map(line).collect::<Result<_, String>>()?;
            Ok(Mutant {
                id,
                catalogue: listed.catalogue,
                operator,
                file: listed.file.unwrap_or_else(|| file.clone()),
                summary: listed.summary,
                find: listed.find,
                replace: listed.replace,
                expected: listed.expected,
                cases,
                list: list.to_owned(),
                hidden_on_gpu: listed.hidden_on_gpu,
                timed: listed.timed,
                condition: listed.condition,
                blamed: listed.blamed,
            })
        };
        mutants.into_iter().map(mutant).collect()
    }
}

/// All mutants of a folder and its subfolders, by file name and then by id.
///
/// # Errors
/// [`MutantError::Read`], [`MutantError::Malformed`].
pub fn load(dir: &Path) -> Result<Vec<Mutant>, MutantError> {
    let read_error = |path: &Path| {
        let path = path.to_owned();
        move |source| MutantError::Read { path, source }
    };
    let (mut paths, mut folders) = (Vec::new(), vec![dir.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).map_err(read_error(&folder))? {
            let path = entry.map_err(read_error(&folder))?.path();
            let equivalent = path.file_name().is_some_and(|name| name == EQUIVALENT);
            if path.is_dir() {
                folders.push(path);
            } else if !equivalent && path.extension().is_some_and(|extension| extension == "toml") {
                paths.push(path);
            }
        }
    }
    paths.sort_by(|a, b| a.file_name().cmp(&b.file_name()));
    let mut mutants = Vec::new();
    for path in paths {
        let text = std::fs::read_to_string(&path).map_err(read_error(&path))?;
        let list =
            path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let malformed = |reason: String| MutantError::Malformed { path: path.clone(), reason };
        let file: MutantFile = toml::from_str(&text).map_err(|e| malformed(e.to_string()))?;
        mutants.extend(file.mutants(&list).map_err(malformed)?);
    }
    Ok(mutants)
}

/// A text without comment lines and without white space, except one blank between two words. Also
/// the position of each of its bytes.
fn folded(text: &str) -> (Vec<u8>, Vec<usize>) {
    let is_word = |byte: u8| byte == b'_' || byte.is_ascii_alphanumeric();
    let (mut bytes, mut places): (Vec<u8>, Vec<usize>) = (Vec::new(), Vec::new());
    let (mut space, mut start) = (None, 0);
    for line in text.split_inclusive('\n') {
        let comment = line.trim_start().starts_with("//");
        for (at, byte) in (start..).zip(line.bytes()) {
            if comment || byte.is_ascii_whitespace() {
                space = space.or(Some(at));
                continue;
            }
            if let Some(place) = space.take()
                && bytes.last().is_some_and(|&last| is_word(last) && is_word(byte))
            {
                bytes.push(b' ');
                places.push(place);
            }
            bytes.push(byte);
            places.push(at);
        }
        start += line.len();
    }
    (bytes, places)
}

/// Every place of `anchor` in `text`, with white space folded and comment lines skipped.
fn places(text: &str, anchor: &str) -> Vec<Range<usize>> {
    let ((text, places), (anchor, _)) = (folded(text), folded(anchor));
    if anchor.is_empty() {
        return Vec::new();
    }
    let found = text.windows(anchor.len()).enumerate().filter(|(_, window)| *window == anchor);
    found.map(|(at, _)| places[at]..places[at + anchor.len() - 1] + 1).collect()
}

impl Mutant {
    /// The tree with this bug.
    ///
    /// # Errors
    /// [`MutantError::Anchor`].
    pub fn plant(&self, tree: &SourceTree) -> Result<SourceTree, MutantError> {
        let text = tree.text(&self.file).unwrap_or_default();
        match places(text, &self.find).as_slice() {
            [place] => {
                let mutated = [&text[..place.start], &self.replace, &text[place.end..]].concat();
                Ok(tree.with_text(&self.file, mutated, &format!("mutant {}", self.id)))
            }
            found => Err(MutantError::Anchor {
                id: self.id.clone(),
                file: self.file.clone(),
                count: found.len(),
            }),
        }
    }

    /// A record of what is planted and where, before the result is known.
    pub fn unjudged(&self, tree: &SourceTree) -> MutantRecord {
        let text = tree.text(&self.file).unwrap_or_default();
        MutantRecord {
            id: self.id.clone(),
            catalogue: self.catalogue.clone(),
            operator: self.operator.clone(),
            summary: self.summary.clone(),
            expected: self.expected.to_string(),
            source: MutantSource::Planted,
            file: self.file.clone(),
            line: places(text, &self.find)
                .first()
                .map_or(0, |at| 1 + text[..at.start].matches('\n').count() as u64),
            original: self.find.trim_matches('\n').to_owned(),
            mutated: self.replace.trim_matches('\n').to_owned(),
            ..MutantRecord::default()
        }
    }

    /// Runs the mutant's cases against it and records which checks saw it.
    ///
    /// # Errors
    /// An anchor that does not match, or a case that cannot be prepared.
    pub fn run(&self, device: &Device, schedules: u32) -> Result<MutantRecord, MutantError> {
        self.run_until(device, schedules, &Truths::default(), &|_| false)
    }

    /// The same, but stops when the expected check has seen it: of the other checks the record
    /// names those that came before. The oracle's results for the cases come from `truths`.
    ///
    /// # Errors
    /// Those of [`Self::run`].
    pub fn run_to_expected(
        &self,
        device: &Device,
        schedules: u32,
        truths: &Truths,
    ) -> Result<MutantRecord, MutantError> {
        let expected =
            |check: &CheckRecord| check.check == self.expected && check.verdict == Verdict::Fail;
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
            // An error is not a kill: a mutant that does not compile shows nothing about the
            // checks.
            let seen = || outcome.failures().filter(|c| c.verdict == Verdict::Fail);
            if let (true, Some(first)) = (killed_by.is_empty(), seen().next()) {
                (killing_case, reason) = (case.line(), first.message.clone());
            }
            killed_by.extend(seen().map(|c| c.check.clone()));
            if let Some(error) =
                outcome.failures().find(|c| c.verdict == Verdict::Error && c.check == Check::Launch)
            {
                return Err(MutantError::NotRun {
                    id: self.id.clone(),
                    message: error.message.clone(),
                });
            }
            if enough(&outcome) {
                break;
            }
        }
        Ok(MutantRecord {
            status: if killed_by.is_empty() {
                MutantStatus::Survived
            } else {
                MutantStatus::Killed
            },
            killed_by: killed_by.into_iter().collect(),
            cases_run,
            killing_case,
            reason,
            ..self.unjudged(device.tree())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_anchor_is_found_however_lines_are_broken_and_no_word_is_joined() {
        let text = "if (a\n    && b) {\n    const int  x = f(a,\n                     b);\n}\n";
        let at = |anchor| places(text, anchor);
        let [place] = &at("f( a, b )")[..] else { panic!("one place") };
        assert_eq!(&text[place.clone()], "f(a,\n                     b)");
        assert_eq!(at("const int x").len(), 1);
        assert!(at("constint x").is_empty() && at("const in t x").is_empty() && at("").is_empty());
        assert_eq!(at("a").len(), 2);
    }

    #[test]
    fn a_list_names_no_case_that_it_has_not_and_has_none_that_it_names_not() {
        let list = |cases: &str, named: &str| {
            let text = format!(
                "operator = 'rope'\nfile = 'rope.cu'\n[cases]\n{cases}\n[mutants.one]\ncatalogue = 'FM-52'\n\
                 summary = 'One.'\nfind = 'a'\nreplace = 'b'\ncases = ['{named}']\n"
            );
            toml::from_str::<MutantFile>(&text).expect("a list").mutants("rope.toml")
        };
        let [one] = &list("small = 'line'", "small").expect("a mutant")[..] else {
            panic!("one mutant")
        };
        assert_eq!(
            (one.expected.as_str(), one.cases.as_slice()),
            ("forward", &["line".to_owned()][..])
        );
        assert_eq!(list("small = 'line'", "large").unwrap_err(), "no mutant names case `small`");
        assert_eq!(list("", "large").unwrap_err(), "mutant `one`: [cases] has no `large`");
    }
}
