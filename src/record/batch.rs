//! Batch invariance: the ways in which the same logical row comes in another batch, and what a case
//! showed of each.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A way in which a row comes in another batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BatchAxis {
    /// Alone, among the first rows, or at another place of a larger batch.
    Company,
    /// Padded to a larger size, as a captured graph is.
    Buckets,
    /// Several tokens of a request in one call, or each in its own call.
    Verification,
    /// A prompt in one call, or in chunks.
    Chunks,
    /// In other pages or slots of the cache, or in another order of them.
    Cache,
    /// Other rows for the same expert, or another order of requests.
    Experts,
    /// The training form and the serving form of one function.
    Forms,
}

impl BatchAxis {
    /// All of them, in the order of tables.
    pub const ALL: [Self; 7] = [
        Self::Company,
        Self::Buckets,
        Self::Verification,
        Self::Chunks,
        Self::Cache,
        Self::Experts,
        Self::Forms,
    ];

    /// Those of every operator with rows.
    pub const OF_ROWS: &'static [Self] = &[Self::Company, Self::Buckets];

    /// Its name, as records and tables write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Company => "company",
            Self::Buckets => "buckets",
            Self::Verification => "verification",
            Self::Chunks => "chunks",
            Self::Cache => "cache",
            Self::Experts => "experts",
            Self::Forms => "forms",
        }
    }

    /// What changes along it, in a few words.
    pub fn summary(self) -> &'static str {
        match self {
            Self::Company => "a row alone, among the first n, at another place of a larger batch",
            Self::Buckets => "padded to a larger size",
            Self::Verification => "several tokens of a request in one call, or one call each",
            Self::Chunks => "a prompt in one call, or in chunks",
            Self::Cache => "other pages or slots of the cache",
            Self::Experts => "other rows for the same expert, another order of requests",
            Self::Forms => "the training form and the serving form of one function",
        }
    }
}

impl fmt::Display for BatchAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What a case showed on one axis.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchRecord {
    /// The axis.
    pub axis: BatchAxis,
    /// Whether the operator declares that such a case is invariant along it. Otherwise a difference
    /// is measured and is no failure.
    pub declared: bool,
    /// How many other batches ran.
    pub runs: u64,
    /// In how many of them a bit of some row differed.
    pub differ: u64,
    /// The first difference; empty where there is none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// How an operator stands on one axis, over many cases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchStanding {
    /// Other batches of cases that are declared to be invariant.
    pub declared: u64,
    /// Other batches of other cases.
    pub measured: u64,
    /// Batches with a difference, of either kind.
    pub differ: u64,
}

impl BatchStanding {
    /// Over the records of some cases; `None` where no case ran in another batch along this axis.
    pub fn of<'r>(
        axis: BatchAxis,
        records: impl IntoIterator<Item = &'r BatchRecord>,
    ) -> Option<Self> {
        let mut standing = Self::default();
        for record in records.into_iter().filter(|record| record.axis == axis) {
            let kind =
                if record.declared { &mut standing.declared } else { &mut standing.measured };
            *kind += record.runs;
            standing.differ += record.differ;
        }
        (standing.runs() > 0).then_some(standing)
    }

    /// Other batches, of either kind.
    pub fn runs(&self) -> u64 {
        self.declared + self.measured
    }

    /// A few words for a cell of a table, such as `declared` or `differs in 3 of 12`.
    pub fn words(&self) -> String {
        let runs = self.runs();
        match (self.differ, self.measured) {
            (0, 0) => "declared".to_owned(),
            (0, _) if self.declared > 0 => "invariant, declared in part".to_owned(),
            (0, _) => "invariant".to_owned(),
            (differ, _) => format!("differs in {differ} of {runs}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(axis: BatchAxis, declared: bool, runs: u64, differ: u64) -> BatchRecord {
        BatchRecord { axis, declared, runs, differ, message: String::new() }
    }

    #[test]
    fn a_standing_counts_batches_and_names_differences_before_declarations() {
        let records = [
            record(BatchAxis::Company, true, 3, 0),
            record(BatchAxis::Company, false, 3, 0),
            record(BatchAxis::Buckets, true, 1, 0),
            record(BatchAxis::Cache, false, 2, 1),
        ];
        let words = |axis| BatchStanding::of(axis, &records).map(|standing| standing.words());
        assert_eq!(words(BatchAxis::Company).as_deref(), Some("invariant, declared in part"));
        assert_eq!(words(BatchAxis::Buckets).as_deref(), Some("declared"));
        assert_eq!(words(BatchAxis::Cache).as_deref(), Some("differs in 1 of 2"));
        assert_eq!(words(BatchAxis::Forms), None);
    }

    #[test]
    fn each_axis_is_written_as_its_name() {
        for axis in BatchAxis::ALL {
            let written = serde_json::to_string(&axis).expect("written");
            assert_eq!(written, format!("\"{axis}\""));
        }
    }
}
