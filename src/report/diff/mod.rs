//! Two reports compared: what a reviewer reads before a merge.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `compare` | what got worse, better, or cannot be compared |
//! | `statistics` | the tests that decide what counts as growth |
//! | `text` | the text for the terminal and the pull request |
//! | `html` | the page with the two reports side by side |
//!
//! What counts as a change:
//!
//! - **Budget use and looseness of the budget.** With the same profile and seed both reports hold
//!   the same cases, which are compared in pairs. Bit-equal pairs are no evidence, and a change
//!   that merely rounds in another order moves as many cases down as up. Wilcoxon's signed-rank
//!   test decides whether they lean upwards. With another seed the cases differ, and Mann and
//!   Whitney's rank-sum test takes its place. Over all tensors and both measures together, the
//!   chance that a comparison is red without cause is at most [`FALSE_ALARM_RATE`] (Holm's
//!   correction).
//! - **Speed.** Only where the two 95 % confidence intervals of the median do not overlap, on the
//!   same device, for the same work. For two equal normal medians that happens in about 3 of 1,000
//!   comparisons for each direction.
//! - **Coverage and verdicts** are counts and need no statistics. The exception is another seed,
//!   which may miss a path or a check by chance. It counts where that chance is below
//!   [`FALSE_ALARM_RATE`].

use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::record::{BaseRecord, ChangeRecord, Report, SCHEMA_VERSION};

mod compare;
mod html;
pub mod statistics;
mod text;

pub use compare::{
    BenchmarkDiff, CheckDiff, Diff, Finding, Kind, OperatorDiff, Spread, TensorDiff, compare,
};
pub use html::page as html;
pub use text::{markdown, terminal};

/// Share of comparisons of unchanged kernels that still report some growth.
pub const FALSE_ALARM_RATE: f64 = 0.01;

/// The comparison's page in the folder of HEAD, to which HEAD's own page links.
pub const PAGE: &str = "diff.html";

/// Changes that a report keeps of a comparison.
const KEPT: usize = 20;

/// What a report keeps of its comparison with `base`, for the first screen of its page.
pub fn base_record(base: &Report, diff: &Diff) -> BaseRecord {
    let change = |finding: &Finding| ChangeRecord {
        kind: finding.kind.words().to_owned(),
        is_regression: finding.kind.is_regression(),
        operator: finding.operator.clone(),
        subject: finding.subject.clone(),
        base: finding.base.clone(),
        head: finding.head.clone(),
    };
    BaseRecord {
        commit: base.revision.commit.clone(),
        dirty: base.revision.dirty,
        started_unix: base.started_unix,
        device: base.environment.device.clone(),
        profile: base.profile.clone(),
        headline: text::headline(diff),
        number: diff.findings.len() as u64,
        changes: diff.findings.iter().take(KEPT).map(change).collect(),
    }
}

/// Reads a report: its `report.json`, or the folder that holds it.
///
/// # Errors
/// A file that cannot be read, is not a report, or was written with another schema.
pub fn read(path: &Path) -> Result<Report> {
    #[derive(Deserialize)]
    struct Versioned {
        schema_version: u32,
    }
    let file = if path.is_dir() { path.join("report.json") } else { path.to_owned() };
    let text = std::fs::read_to_string(&file)
        .with_context(|| format!("reading the report {}", file.display()))?;
    // The version is read first: a report of another schema need not have the fields of this one.
    let Versioned { schema_version } =
        serde_json::from_str(&text).with_context(|| format!("{} is no report", file.display()))?;
    if schema_version != SCHEMA_VERSION {
        bail!(
            "{} has schema_version {schema_version}; this program reads {SCHEMA_VERSION}",
            file.display()
        );
    }
    serde_json::from_str(&text).with_context(|| format!("{} is no report", file.display()))
}
