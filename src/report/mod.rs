//! Reports, made only from records: a page for people, a summary for pull requests, JSON for
//! programs.
//!
//! Nothing here runs a kernel or decides a verdict. Reports add order (failures first, worst cases
//! first) and doubt. A pass whose own record contradicts it, by zero compared elements or a budget
//! use that is not at most 1, is shown as unfounded.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `summary` | counts, the matrix of checks, tensors gathered over cases |
//! | `numbers` | how counts, measures, times and dates are written |
//! | `elements` | parts of pages: head, tables in frames, numbers, badges |
//! | `picture` | heat maps and histograms as SVG |
//! | `html` | the page: verdict, what changed, skips, environment, glossary |
//! | `failures` | the page's cards of failing cases |
//! | `families` | operators by family: a row for each family, folds with the matrix of checks |
//! | `operators` | the page's sections of operators |
//! | `diagnosis` | what failing cases share, known numbers that they are off by, and where |
//! | `power` | what verdicts could have seen |
//! | `mutants` | the page's kill matrix |
//! | `generated` | the results of generated mutants, as text |
//! | `skips` | skips gathered by their reasons |
//! | `specification` | the page's citations, and the sections that they cite |
//! | `times` | times of an external kernel, next to ours |
//! | `markdown` | `summary.md` |
//! | `batches` | batch invariance: operators by axis |
//! | `benchmarks` | measured times, read from criterion's folders |
//! | `beside` | times of our kernels and of public ones, next to each other |
//! | `gallery` | public kernels, judged, on one page |
//! | `ci` | JUnit XML, and annotations of GitHub |
//! | `drawn` | what a report keeps of each case |
//! | `diff` | two reports compared |
//! | `history` | many reports, one after another |

use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use crate::record::journal::{self, refuse_foreign};
use crate::record::{CaseRecord, Report, words};

mod batches;
pub mod benchmarks;
pub mod beside;
pub mod blame;
pub mod ci;
pub mod diagnosis;
pub mod diff;
mod drawn;
pub(crate) mod elements;
mod failures;
mod families;
pub mod gallery;
pub mod generated;
pub mod history;
mod html;
pub mod latency;
pub(crate) mod markdown;
mod mutants;
pub(crate) mod numbers;
mod operators;
pub mod parallel_time;
mod picture;
pub mod power;
#[cfg(test)]
pub(crate) mod sample;
pub(crate) mod skips;
mod specification;
pub(crate) mod summary;
#[cfg(test)]
mod tests;
pub(crate) mod times;
pub(crate) mod traces;

/// The report as one HTML page that refers to nothing outside itself.
pub fn html(report: &Report) -> String {
    html::page(report).into_string()
}

/// The report as Markdown, short enough for a pull request.
pub fn markdown(report: &Report) -> String {
    markdown::page(report)
}

/// Writes the four files that a run writes: `report.json`, `index.html`, `summary.md`,
/// `records.jsonl`.
///
/// # Errors
/// File system errors.
pub fn write_with_records(report: &Report, dir: &Path) -> io::Result<()> {
    write_all(report, dir)?;
    let mut records: Vec<_> = report.cases.iter().chain(&report.unsupported).collect();
    records.sort_by_key(|record| record.plan_number);
    write_records(&records, &dir.join(journal::RECORDS))?;
    // A plan that an earlier run left here does not belong to these records.
    match fs::remove_file(dir.join(journal::PLAN)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn write_records(records: &[&CaseRecord], path: &Path) -> io::Result<()> {
    let mut file = BufWriter::new(fs::File::create(path)?);
    for record in records {
        serde_json::to_writer(&mut file, record)?;
        file.write_all(b"\n")?;
    }
    file.flush()
}

/// Writes `report.json`, `index.html` and `summary.md` into `dir`, which is created if it is
/// missing.
///
/// # Errors
/// File system errors, and a folder that holds other files ([`refuse_foreign`]).
pub fn write_all(report: &Report, dir: &Path) -> io::Result<()> {
    refuse_foreign(dir).map_err(|error| io::Error::other(words::of_error(&error)))?;
    fs::create_dir_all(dir)?;
    let mut report = drawn::kept(report);
    // A comparison without a page in this folder is not mentioned.
    report.base = report.base.filter(|_| dir.join(diff::PAGE).is_file());
    let mut json = BufWriter::new(fs::File::create(dir.join("report.json"))?);
    serde_json::to_writer(&mut json, &report)?;
    json.write_all(b"\n")?;
    json.flush()?;
    fs::write(dir.join("index.html"), html(&report))?;
    fs::write(dir.join("summary.md"), markdown(&report))
}
