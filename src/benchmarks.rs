//! Criterion's results, read back for the report.
//!
//! `cargo bench` (or the bench binary) leaves `GROUP/ID/new/{estimates,benchmark,sample}.json` under
//! criterion's directory and [`FACTS_FILE`] beside them, which says what each benchmark moves and
//! computes and what the device can do.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::record::{BenchmarkRecord, Ceilings};

/// Written by the benchmarks, next to criterion's folders.
pub const FACTS_FILE: &str = "parity-facts.json";

/// What criterion does not know.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Facts {
    /// Rates of the device, measured in the same run.
    pub ceilings: Option<Ceilings>,
    /// By criterion's full id.
    pub work: BTreeMap<String, Work>,
}

/// What one call does.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Work {
    /// Operator.
    pub operator: String,
    /// Fewest bytes it must move.
    pub bytes: f64,
    /// Floating-point operations.
    pub flops: f64,
}

/// Reads every benchmark under criterion's directory; an absent directory has none.
///
/// # Errors
/// A file that is there and cannot be understood, by path.
pub fn read(dir: &Path) -> Result<(Vec<BenchmarkRecord>, Option<Ceilings>), String> {
    let facts_path = dir.join(FACTS_FILE);
    if !facts_path.is_file() {
        return Ok((Vec::new(), None));
    }
    let facts: Facts = serde_json::from_value(json(&facts_path)?).map_err(|e| format!("{}: {e}", facts_path.display()))?;
    let mut records = Vec::new();
    for (id, work) in &facts.work {
        let new = dir.join(directory_of(id)).join("new");
        if new.is_dir() {
            records.push(record(id, work, &new, facts.ceilings.as_ref())?);
        }
    }
    Ok((records, facts.ceilings))
}

/// Criterion's directory name for an id: characters that file names cannot hold become `_`.
fn directory_of(id: &str) -> String {
    let safe = |part: &str| part.replace(['?', '"', '\\', '*', '<', '>', ':', '|', '^'], "_");
    match id.split_once('/') {
        Some((group, rest)) => format!("{}/{}", safe(group), safe(rest).replace('/', "_")),
        None => safe(id),
    }
}

fn json(path: &Path) -> Result<Value, String> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))
}

fn record(id: &str, work: &Work, new: &Path, ceilings: Option<&Ceilings>) -> Result<BenchmarkRecord, String> {
    let estimates = json(&new.join("estimates.json"))?;
    let sample = json(&new.join("sample.json"))?;
    let number = |path: &str| {
        estimates.pointer(path).and_then(Value::as_f64).ok_or_else(|| format!("{}: no `{path}`", new.display()))
    };
    let median_ns = number("/median/point_estimate")?;
    Ok(BenchmarkRecord {
        id: id.to_owned(),
        operator: work.operator.clone(),
        median_ns,
        low_ns: number("/median/confidence_interval/lower_bound")?,
        high_ns: number("/median/confidence_interval/upper_bound")?,
        samples: sample["times"].as_array().map_or(0, |times| times.len() as u64),
        bytes: work.bytes,
        flops: work.flops,
        percent_of_limit: ceilings.and_then(|ceilings| percent_of_limit(work, ceilings, median_ns)),
    })
}

/// The time that the device would need at its measured rates, over the time that it took.
fn percent_of_limit(work: &Work, ceilings: &Ceilings, median_ns: f64) -> Option<f64> {
    let moving = work.bytes / ceilings.copy_bytes_per_second;
    let computing = ceilings.matrix_flops_per_second.map_or(0.0, |rate| work.flops / rate);
    let limit = f64::max(moving, computing);
    (limit > 0.0).then(|| 100.0 * limit / (median_ns * 1e-9))
}
