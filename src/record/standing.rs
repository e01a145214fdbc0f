//! How a check counts, and which of several is the worst.

use std::cmp::Ordering;

use super::{CheckRecord, Verdict};

/// How a check counts: its verdict, unless its own record contradicts a pass. The more certain the
/// problem, the greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Standing {
    /// A pass that compared something.
    Pass,
    /// Recorded as a pass, with nothing compared or a budget use that is not at most 1.
    Unfounded,
    /// Could not be decided.
    Error,
    /// A failure.
    Fail,
}

impl Standing {
    /// The standing of one check.
    pub(crate) fn of(check: &CheckRecord) -> Self {
        let used = check.metrics.as_ref().map_or(0.0, |metrics| metrics.budget_used);
        match check.verdict {
            Verdict::Pass if check.compared == 0 || !within(used) => Self::Unfounded,
            Verdict::Pass => Self::Pass,
            Verdict::Fail => Self::Fail,
            Verdict::Error => Self::Error,
        }
    }

    /// A symbol, so that colour is never the only sign.
    pub(crate) fn symbol(self) -> &'static str {
        match self {
            Self::Pass => "✓",
            Self::Fail => "✗",
            Self::Error => "!",
            Self::Unfounded => "?",
        }
    }

    /// The word for it, which is also its class in the style sheet.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Fail => "fail",
            Self::Error => "error",
            Self::Unfounded => "unfounded",
        }
    }
}

/// Whether a share of the budget is one that passes. NaN is not.
pub(crate) fn within(used: f64) -> bool {
    used <= 1.0
}

/// Orders shares of the budget from worst to best; NaN is worse than anything.
pub(crate) fn worse_first(a: f64, b: f64) -> Ordering {
    b.is_nan().cmp(&a.is_nan()).then(b.total_cmp(&a))
}
