//! Where elements fail: runs and periods along the named axes of a tensor.
//!
//! A pattern is a phrase such as "the last rope_dim entries" that predicts for each case which
//! entries of an axis fail. It is named only if it is right in every failing case to which it
//! applies, and if chance does not explain that.
//!
//! A run of `s` entries out of `n` has `n - s + 1` possible places. Entries that repeat are in the
//! right places with the probability `(p / n)^s`, where the pattern has `p` of `n`. The product
//! over the cases, times the number of patterns, is at most [`FALSE`].

use std::collections::BTreeMap;

use super::features;
use super::rules::FALSE;
use crate::record::{CaseRecord, CheckRecord, FailingElements, FailingEntries, OperatorRecord};

/// An axis with more entries is skipped.
const MOST_ENTRIES: u64 = 1 << 16;
/// Tile sizes of kernels.
const TILES: [u64; 6] = [8, 16, 32, 64, 128, 256];

/// A set of entries of an axis, described once for all cases.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Pattern {
    /// This many entries at the start.
    First(Number),
    /// This many entries at the end.
    Last(Number),
    /// All from this entry on.
    From(Number),
    /// Those after the last whole tile.
    Tail(u64),
    /// Each whose position in its group is in the run.
    InGroups(Number, u64, u64),
}

/// A number, or a field of the case.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Number {
    Field(String),
    Constant(u64),
}

impl Number {
    fn of(&self, fields: &BTreeMap<String, f64>) -> Option<u64> {
        match self {
            Self::Constant(value) => Some(*value),
            Self::Field(name) => fields
                .get(name)
                .filter(|value| value.fract() == 0.0 && **value >= 0.0)
                .map(|value| *value as u64),
        }
    }

    fn words(&self) -> String {
        match self {
            Self::Constant(value) => value.to_string(),
            Self::Field(name) => name.clone(),
        }
    }
}

impl Pattern {
    /// Whether an entry belongs to it.
    fn has(&self, entry: u64, extent: u64, fields: &BTreeMap<String, f64>) -> Option<bool> {
        Some(match self {
            Self::First(number) => entry < number.of(fields)?,
            Self::Last(number) => entry >= extent.saturating_sub(number.of(fields)?),
            Self::From(number) => entry >= number.of(fields)?,
            Self::Tail(tile) => entry >= extent / tile * tile,
            Self::InGroups(size, first, last) => {
                let place = entry % size.of(fields).filter(|size| *size > 0)?;
                (*first..=*last).contains(&place)
            }
        })
    }

    fn is_run(&self) -> bool {
        !matches!(self, Self::InGroups(..))
    }

    /// Text for this axis.
    fn words(&self, axis: &str) -> String {
        match self {
            Self::First(Number::Constant(1)) => format!("the first of {axis}"),
            Self::Last(Number::Constant(1)) => format!("the last of {axis}"),
            Self::First(number) => format!("the first {} of {axis}", number.words()),
            Self::Last(number) => format!("the last {} of {axis}", number.words()),
            Self::From(number) => format!("{axis} from {} on", number.words()),
            Self::Tail(tile) => format!("{axis} after the last full tile of {tile}"),
            Self::InGroups(Number::Constant(2), 0, 0) => format!("even {axis}"),
            Self::InGroups(Number::Constant(2), 1, 1) => format!("odd {axis}"),
            Self::InGroups(size, first, last) if first == last => {
                format!("entry {first} of each {} of {axis}", size.words())
            }
            Self::InGroups(size, first, last) => {
                format!("entries {first} to {last} of each {} of {axis}", size.words())
            }
        }
    }
}

/// The failing entries of an axis in one case.
struct Seen<'a> {
    fields: BTreeMap<String, f64>,
    extent: u64,
    entries: &'a FailingEntries,
}

impl Seen<'_> {
    fn fails(&self, entry: u64) -> bool {
        self.entries
            .runs
            .iter()
            .any(|[first, last]| (*first..=*last).contains(&(entry % self.entries.period.max(1))))
    }

    fn is_whole(&self) -> bool {
        self.entries.entries == self.extent
    }
}

/// How a pattern fits a case.
enum Fit {
    /// It does not apply, or it selects every entry: the case does not count.
    Silent,
    /// It is wrong.
    Wrong,
    /// It is right, by chance with this probability.
    Right(f64),
}

fn fit(pattern: &Pattern, seen: &Seen<'_>) -> Fit {
    let has: Option<Vec<bool>> =
        (0..seen.extent).map(|entry| pattern.has(entry, seen.extent, &seen.fields)).collect();
    let Some(has) = has else { return Fit::Silent };
    let size = has.iter().filter(|has| **has).count() as u64;
    if size == 0 || size == seen.extent {
        return if size == 0 { Fit::Wrong } else { Fit::Silent };
    }
    let failing = seen.entries.entries;
    let within = (0..seen.extent).all(|entry| !seen.fails(entry) || has[entry as usize]);
    // An element or two of it may be within their budgets; most are not.
    if !within || 2 * failing < size {
        return Fit::Wrong;
    }
    Fit::Right(if pattern.is_run() {
        (size - failing + 1) as f64 / (seen.extent - failing + 1) as f64
    } else {
        (size as f64 / seen.extent as f64).powf(failing as f64)
    })
}

/// Patterns that one case suggests.
fn suggested(seen: &Seen<'_>) -> Vec<Pattern> {
    let small =
        seen.fields.iter().filter(|(_, value)| value.fract() == 0.0 && (1.0..1e9).contains(*value));
    let mut numbers: Vec<Number> = small.map(|(name, _)| Number::Field(name.clone())).collect();
    numbers.push(Number::Constant(1));
    let mut patterns: Vec<Pattern> = TILES.map(Pattern::Tail).to_vec();
    patterns.extend(TILES.map(|tile| Pattern::From(Number::Constant(tile))));
    for number in numbers {
        patterns.extend([
            Pattern::First(number.clone()),
            Pattern::Last(number.clone()),
            Pattern::From(number.clone()),
        ]);
        if let (Some(size), [[first, last]]) = (number.of(&seen.fields), &seen.entries.runs[..])
            && size == seen.entries.period
            && size < seen.extent
        {
            patterns.push(Pattern::InGroups(number, *first, *last));
        }
    }
    if let ([[first, last]], false) = (&seen.entries.runs[..], seen.entries.period < seen.extent) {
        patterns.extend([
            Pattern::From(Number::Constant(*first)),
            Pattern::First(Number::Constant(last + 1)),
        ]);
    }
    if let ([[first, last]], true) = (&seen.entries.runs[..], seen.entries.period < seen.extent) {
        patterns.push(Pattern::InGroups(Number::Constant(seen.entries.period), *first, *last));
    }
    patterns
}

/// One sentence for each of the first few tensors in which elements fail in all of its failing
/// cases.
pub(super) fn sentences(operator: Option<&OperatorRecord>, cases: &[&CaseRecord]) -> Vec<String> {
    let mut of_check: Vec<(&CheckRecord, Vec<(&CaseRecord, &FailingElements)>)> = Vec::new();
    for case in cases {
        for check in super::order::findings(case).iter().map(|finding| finding.check) {
            let Some(failing) = &check.failing else { continue };
            match of_check
                .iter_mut()
                .find(|(one, _)| one.check == check.check && one.tensor == check.tensor)
            {
                Some((_, found)) => found.push((case, failing)),
                None => of_check.push((check, vec![(case, failing)])),
            }
        }
    }
    let mut said: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (check, found) in &of_check {
        if let Some(text) = of_tensor(operator, &check.tensor, found) {
            let tensors = said.entry(text).or_default();
            if !tensors.contains(&check.tensor) {
                tensors.push(check.tensor.clone());
            }
        }
    }
    said.into_iter()
        .map(|(text, tensors)| {
            format!(
                "{} fail{} only in {text}",
                super::listed(&tensors),
                if tensors.len() == 1 { "s" } else { "" }
            )
        })
        .collect()
}

fn of_tensor(
    operator: Option<&OperatorRecord>,
    tensor: &str,
    found: &[(&CaseRecord, &FailingElements)],
) -> Option<String> {
    let axes = axes_of(operator, tensor, found[0].1.axes.len());
    let mut texts = Vec::new();
    for (place, axis) in axes.iter().enumerate() {
        let seen: Vec<Seen<'_>> =
            found.iter().filter_map(|(case, failing)| seen(case, failing, place)).collect();
        texts.extend(of_axis(axis, &seen));
    }
    (!texts.is_empty()).then(|| texts.join(", and only in "))
}

fn seen<'a>(case: &CaseRecord, failing: &'a FailingElements, place: usize) -> Option<Seen<'a>> {
    let (extent, entries) = (*failing.shape.get(place)?, failing.axes.get(place)?);
    (1 < extent && extent < MOST_ENTRIES).then(|| Seen {
        fields: features::numbers(&case.case),
        extent,
        entries,
    })
}

fn of_axis(axis: &str, seen: &[Seen<'_>]) -> Option<String> {
    let partial: Vec<&Seen<'_>> = seen.iter().filter(|seen| !seen.is_whole()).collect();
    // A failure of all entries in most cases does not depend on this axis.
    if 2 * partial.len() < seen.len()
        || partial.is_empty()
        || partial.iter().any(|seen| seen.entries.runs.is_empty())
    {
        return None;
    }
    let mut patterns: Vec<Pattern> = partial.iter().flat_map(|seen| suggested(seen)).collect();
    patterns.sort();
    patterns.dedup();
    let tried = patterns.len() as f64;
    let judged = patterns.into_iter().filter_map(|pattern| {
        let (mut chance, mut right) = (1.0, 0);
        for seen in seen {
            match fit(&pattern, seen) {
                Fit::Silent => {}
                Fit::Wrong => return None,
                Fit::Right(by_chance) => {
                    chance *= by_chance;
                    right += 1;
                }
            }
        }
        (2 * right >= partial.len() && chance * tried <= FALSE).then_some((chance, pattern))
    });
    let (_, pattern) = judged.min_by(|a, b| a.0.total_cmp(&b.0))?;
    let example = partial[0].entries.runs.first().filter(|_| pattern.is_run());
    let example = example
        .map_or(String::new(), |[first, last]| format!(" ({first} to {last} in the first case)"));
    Some(pattern.words(axis) + &example)
}

/// Names of a tensor's axes, or their numbers where they have no names.
fn axes_of(operator: Option<&OperatorRecord>, tensor: &str, count: usize) -> Vec<String> {
    let tensor =
        operator.and_then(|operator| operator.tensors.iter().find(|one| one.name == tensor));
    let named = tensor.map(|tensor| tensor.axes.clone()).filter(|axes| axes.len() == count);
    named.unwrap_or_else(|| (0..count).map(|axis| format!("axis {axis}")).collect())
}

/// Where the elements of one check fail, entry by entry: `head_dim 448 to 511, num_heads 3 of each
/// 4`. Empty where they fail along all of every axis.
pub(super) fn of_check(operator: Option<&OperatorRecord>, check: &CheckRecord) -> String {
    /// Runs that are named.
    const MOST: usize = 3;
    let Some(failing) = &check.failing else { return String::new() };
    let axes = axes_of(operator, &check.tensor, failing.axes.len());
    let mut texts = Vec::new();
    for ((axis, entries), extent) in axes.iter().zip(&failing.axes).zip(&failing.shape) {
        if entries.entries == *extent || entries.runs.is_empty() {
            continue;
        }
        let run = |[first, last]: &[u64; 2]| {
            if first == last { first.to_string() } else { format!("{first} to {last}") }
        };
        let runs: Vec<String> = entries.runs.iter().take(MOST).map(run).collect();
        let more = if entries.runs.len() > MOST { ", …" } else { "" };
        let period = if entries.period < *extent {
            format!(" of each {}", entries.period)
        } else {
            format!(" (of {extent})")
        };
        texts.push(format!("{axis} {}{more}{period}", runs.join(", ")));
    }
    texts.join("; ")
}
