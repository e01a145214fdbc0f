//! Generated mutants: small changes of a kernel's source text, found in its syntax tree.
//!
//! [`generate`] walks the function bodies of an operator's own `.cu` files, and of the headers that
//! hold more of their code. It skips headers with a device body and a host body of each
//! instruction: a change of one body would show on one backend only. Nothing outside of a function
//! body changes, because constants of the file are a contract with the launcher. Nothing changes
//! that only the compiler evaluates: `static_assert`, template arguments, `if constexpr`.
//!
//! | class | what changes |
//! | --- | --- |
//! | [`Class::Comparison`] | a comparison includes or excludes its boundary, or is inverted |
//! | [`Class::Synchronization`] | a barrier, fence, wait or commit is missing |
//! | [`Class::Index`] | indices or strides are swapped, quotient and remainder are confused |
//! | [`Class::Scale`] | a floating-point factor is missing, or counts twice; a sign is lost |
//! | [`Class::Extent`] | a loop ends one step early or late |
//! | [`Class::MinMax`] | a minimum or maximum always returns the same argument |
//! | [`Class::Constant`] | a number has another value |
//! | [`Class::Predicate`] | a condition is always true or always false, or loses a term |
//! | [`Class::Accumulate`] | a sum is overwritten, a flag is inverted |
//! | [`Class::Period`] | what comes round comes once |
//! | [`Class::Guard`] | a named constant of a condition is larger |
//! | [`Class::Company`] | a number differs slightly in grids of some sizes |

mod classes;
mod sample;
mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use dsv4_runtime::{RuntimeError, SourceTree};
use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use sample::sample;

use self::source::Source;
use crate::operators::registry;

/// What kind of change a generated mutant is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// `<` and `<=`, `>` and `>=`, `==` and `!=` are confused.
    Comparison,
    /// A call that orders threads or memory is missing.
    Synchronization,
    /// Indices or strides are swapped; `/` and `%` are confused.
    Index,
    /// A factor or divisor is missing or counts twice; a minus is missing.
    Scale,
    /// A loop runs one iteration more or less.
    Extent,
    /// `minimum(a, b)` or `maximum(a, b)` is `a`, or `b`.
    MinMax,
    /// A number literal has another value.
    Constant,
    /// A condition is `true` or `false`; one side of `&&` or `||` is missing.
    Predicate,
    /// `+=` is `=`; a boolean argument is its opposite.
    Accumulate,
    /// What comes round every n-th time comes once: `x % n == 0` is `x == 0`.
    Period,
    /// A named constant of a condition is larger.
    Guard,
    /// A floating-point number is slightly larger in grids of some sizes.
    Company,
}

impl Class {
    /// All classes.
    pub const ALL: [Self; 12] = [
        Self::Comparison,
        Self::Synchronization,
        Self::Index,
        Self::Scale,
        Self::Extent,
        Self::MinMax,
        Self::Constant,
        Self::Predicate,
        Self::Accumulate,
        Self::Period,
        Self::Guard,
        Self::Company,
    ];

    /// The class's name in ids and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Comparison => "comparison",
            Self::Synchronization => "synchronization",
            Self::Index => "index",
            Self::Scale => "scale",
            Self::Extent => "extent",
            Self::MinMax => "min_max",
            Self::Constant => "constant",
            Self::Predicate => "predicate",
            Self::Accumulate => "accumulate",
            Self::Period => "period",
            Self::Guard => "guard",
            Self::Company => "company",
        }
    }
}

/// One generated mutant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GeneratedMutant {
    /// `OPERATOR:FUNCTION:CLASS:HASH`. The hash is of the line's text and the change. So an id
    /// survives insertions and deletions above its line, but not an edit of its own line.
    pub id: String,
    /// Operator that owns the file.
    pub operator: String,
    /// File within the kernel tree.
    pub file: String,
    /// Line of the change, from 1.
    pub line: usize,
    /// Kind of change.
    pub class: Class,
    /// A description in one sentence.
    pub summary: String,
    /// The original line or lines.
    pub original: String,
    /// The same lines after the change.
    pub mutated: String,
    /// Kernels that may execute it.
    pub kernels: BTreeSet<String>,
    /// Bytes of the file that are replaced.
    range: Range<usize>,
    /// Their replacement.
    replacement: String,
}

/// Why no mutants can be generated.
#[derive(Debug, Error)]
pub enum MutationError {
    /// The kernel file is missing.
    #[error(transparent)]
    Source(#[from] RuntimeError),
    /// The kernel file has no complete syntax tree.
    #[error("{file}: {reason}")]
    Parser {
        /// The file.
        file: String,
        /// The syntax error, with its line.
        reason: String,
    },
}

/// A change that a class proposes.
struct Edit {
    range: Range<usize>,
    replacement: String,
    summary: String,
}

/// Every mutant of an operator's own kernel files and their headers, in the order of the files, in
/// functions that its kernels call. A chain without files of its own has none: the kernels that it
/// launches belong to its operators.
///
/// # Errors
/// [`MutationError`]: a file that is missing or cannot be parsed completely.
pub fn generate(tree: &SourceTree, operator: &str) -> Result<Vec<GeneratedMutant>, MutationError> {
    let mut units = Vec::new();
    let is_chain = registry::find(operator).is_ok_and(|found| !found.chain().is_empty());
    if !is_chain {
        units.push(Unit::read(tree, &format!("{operator}.cu"))?);
    }
    for file in further_files(tree, operator) {
        units.push(Unit::read(tree, file)?);
    }
    // Kernel files first: a header appears once, whichever files include it.
    let headers = units.iter().flat_map(|unit| &unit.sources[1..]);
    let mut files: Vec<&Source<'_>> = units.iter().map(|unit| &unit.sources[0]).collect();
    for header in headers {
        if files.iter().all(|known| known.file != header.file) {
            files.push(header);
        }
    }
    // Over all files: two of them may have the same line in functions with the same name.
    let mut twins = BTreeMap::new();
    Ok(files.iter().flat_map(|source| generate_of(operator, source, &units, &mut twins)).collect())
}

/// The kernel files of an operator in addition to `OPERATOR.cu`. A chain may have some.
pub fn further_files<'t>(tree: &'t SourceTree, operator: &'t str) -> impl Iterator<Item = &'t str> {
    tree.kernel_files().filter(move |file| is_further_file(file, operator))
}

/// Whether a kernel file is another one of an operator, in addition to `OPERATOR.cu`: a step of it,
/// or its implementation for one GPU generation. Its name starts with the operator's name, and not
/// with a longer name of another operator.
pub fn is_further_file(file: &str, operator: &str) -> bool {
    let of = |name: &str| {
        file.strip_prefix(name).is_some_and(|rest| rest.starts_with('_') || rest == ".cu")
    };
    let another = registry::names().iter().any(|name| name.len() > operator.len() && of(name));
    of(operator) && !another && file.ends_with(".cu") && file.len() > operator.len() + ".cu".len()
}

/// A kernel file, followed by the headers that hold more of its code.
struct Unit<'a> {
    sources: Vec<Source<'a>>,
    callers: BTreeMap<&'a str, BTreeSet<&'a str>>,
}

impl<'a> Unit<'a> {
    fn read(tree: &'a SourceTree, file: &str) -> Result<Self, MutationError> {
        let mut sources = vec![Source::parse(tree, file)?];
        for header in source::headers_of(tree, file)? {
            sources.push(Source::parse(tree, header)?);
        }
        let callers = source::callers(&sources.iter().collect::<Vec<_>>());
        Ok(Self { sources, callers })
    }

    fn holds(&self, file: &str) -> bool {
        self.sources.iter().any(|source| source.file == file)
    }
}

fn generate_of(
    operator: &str,
    source: &Source<'_>,
    units: &[Unit<'_>],
    twins: &mut BTreeMap<String, u32>,
) -> Vec<GeneratedMutant> {
    let mut mutants = Vec::new();
    for function in source.functions() {
        let name = source.name_of(function);
        let callers = units
            .iter()
            .filter(|unit| unit.holds(source.file))
            .filter_map(|unit| unit.callers.get(name));
        let kernels: BTreeSet<String> =
            callers.flatten().map(|kernel| (*kernel).to_owned()).collect();
        if kernels.is_empty() {
            continue;
        }
        for (class, edit) in classes::edits(source, function) {
            let (original, mutated) = changed_lines(source.text, &edit);
            let key = format!("{operator}:{name}:{}:{original}:{mutated}", class.name());
            let twin = twins.entry(key.clone()).or_default();
            let hash = blake3::hash(format!("{key}:{twin}").as_bytes()).to_hex();
            *twin += 1;
            mutants.push(GeneratedMutant {
                id: format!("{operator}:{name}:{}:{}", class.name(), &hash[..8]),
                operator: operator.to_owned(),
                file: source.file.to_owned(),
                line: 1 + source.text[..edit.range.start].matches('\n').count(),
                class,
                summary: edit.summary,
                original,
                mutated,
                kernels: kernels.clone(),
                range: edit.range,
                replacement: edit.replacement,
            });
        }
    }
    // The sort is stable: mutants of one place stay in the order of their classes.
    mutants.sort_by_key(|mutant| mutant.range.start);
    mutants
}

impl GeneratedMutant {
    /// The tree with this change.
    ///
    /// # Errors
    /// A tree without the mutant's file.
    pub fn plant(&self, tree: &SourceTree) -> Result<SourceTree, RuntimeError> {
        let mut text = tree.text(&self.file)?.to_owned();
        text.replace_range(self.range.clone(), &self.replacement);
        Ok(tree.with_text(&self.file, text, &format!("mutant {}", self.id)))
    }
}

/// The lines that an edit changes, before and after, without their common indentation.
fn changed_lines(text: &str, edit: &Edit) -> (String, String) {
    let start = text[..edit.range.start].rfind('\n').map_or(0, |end| end + 1);
    let end =
        text[edit.range.end..].find('\n').map_or(text.len(), |length| edit.range.end + length);
    let after = format!(
        "{}{}{}",
        &text[start..edit.range.start],
        edit.replacement,
        &text[edit.range.end..end]
    );
    (without_indent(&text[start..end]), without_indent(&after))
}

fn without_indent(lines: &str) -> String {
    let indent = |line: &str| line.len() - line.trim_start().len();
    let common =
        lines.lines().filter(|line| !line.trim().is_empty()).map(indent).min().unwrap_or(0);
    lines
        .lines()
        .map(|line| line.get(common..).unwrap_or_default().trim_end())
        .collect::<Vec<_>>()
        .join("\n")
}

#[cfg(test)]
mod tests;
