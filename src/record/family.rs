//! Families of operators: the parts of the model that they belong to, by which lists and reports
//! group them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A part of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// Residual streams: embedding and mHC.
    Streams,
    /// Number formats: quantization and the layouts of codes and scales.
    Formats,
    /// Norms, rotation and projections.
    Projections,
    /// Compression of keys, and writes to the caches.
    Cache,
    /// Attention and what follows it.
    Attention,
    /// The indexer: its scores, their selection and its training.
    Indexer,
    /// Mixture of experts.
    Experts,
    /// Logits and sampling.
    Head,
}

impl Family {
    /// All of them, in the order of the model.
    pub const ALL: [Self; 8] = [
        Self::Streams,
        Self::Formats,
        Self::Projections,
        Self::Cache,
        Self::Attention,
        Self::Indexer,
        Self::Experts,
        Self::Head,
    ];

    /// Its name: the word in records, lists and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Streams => "streams",
            Self::Formats => "formats",
            Self::Projections => "projections",
            Self::Cache => "cache",
            Self::Attention => "attention",
            Self::Indexer => "indexer",
            Self::Experts => "experts",
            Self::Head => "head",
        }
    }

    /// What its operators do, in a few words.
    pub fn summary(self) -> &'static str {
        match self {
            Self::Streams => "residual streams: embedding and mHC",
            Self::Formats => "quantization, and the layouts of codes and scales",
            Self::Projections => "norms, rotation and projections",
            Self::Cache => "compression of keys, and writes to the caches",
            Self::Attention => "attention, and what follows it",
            Self::Indexer => "the indexer: scores, selection and training",
            Self::Experts => "mixture of experts",
            Self::Head => "logits and sampling",
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operators::registry::OPERATORS;

    #[test]
    fn each_family_has_operators_and_a_name_that_records_keep() {
        for family in Family::ALL {
            assert!(
                OPERATORS.iter().any(|operator| operator.family() == family),
                "{family} has no operator"
            );
            assert_eq!(serde_json::to_value(family).unwrap(), family.name());
        }
        let mut sorted = Family::ALL;
        sorted.sort();
        assert_eq!(sorted, Family::ALL, "the order of the list is that of the type");
    }
}
