//! The progress of a sweep on the terminal.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result};
use dsv4_runtime::interrupt::on_interrupt;
use indicatif::{ProgressBar, ProgressStyle};

use super::output;
use crate::record::words::printable;
use crate::record::{CaseRecord, Verdict};
use crate::report::diagnosis::terminal;
use crate::sweep::session::Shown;

/// How many failing cases are noted while a sweep runs; the end of the sweep prints the details.
const MOST_NOTES: usize = 2;

/// The exit code of an interrupted process: 128 and the number of the signal.
const INTERRUPTED: i32 = 130;

/// A bar that only a terminal shows.
pub(super) fn bar(length: usize, message: &str) -> ProgressBar {
    let bar =
        if output::is_quiet() { ProgressBar::hidden() } else { ProgressBar::new(length as u64) };
    if let Ok(style) = ProgressStyle::with_template("{msg:18} {wide_bar} {pos}/{len} {elapsed}") {
        bar.set_style(style);
    }
    bar.set_message(message.to_owned());
    bar
}

/// A progress bar, notes of the first failing cases, and the message after an interrupt.
pub(super) struct Terminal {
    out: PathBuf,
    bar: ProgressBar,
    /// How many failing cases may still be noted, and the operator of the last one.
    notes_left: usize,
    last_noted: String,
}

impl Terminal {
    /// For a sweep whose journal is in `out`. A worker of another run notes nothing.
    pub(super) fn new(out: &Path, notes: bool) -> Self {
        let notes_left = if notes { MOST_NOTES } else { 0 };
        Self {
            out: out.to_owned(),
            bar: ProgressBar::hidden(),
            notes_left,
            last_noted: String::new(),
        }
    }
}

impl Shown for Terminal {
    fn begins(&mut self, recorded: Arc<AtomicU64>, planned: u64) -> Result<()> {
        say_when_interrupted(recorded, Some(planned), &self.out)
    }

    fn planned(&mut self, cases: usize) {
        if output::is_quiet() {
            return;
        }
        self.bar = ProgressBar::new(cases as u64);
        if let Ok(style) = ProgressStyle::with_template("{msg:25} {wide_bar} {pos}/{len} {elapsed}")
        {
            self.bar.set_style(style);
        }
    }

    fn done(&mut self, record: &CaseRecord) {
        self.bar.suspend(|| log(record));
        let fails = record.unsupported.is_none() && record.verdict() != Verdict::Pass;
        if fails && self.notes_left > 0 && self.last_noted != record.operator {
            self.notes_left -= 1;
            self.last_noted.clone_from(&record.operator);
            self.bar.suspend(|| errln!("{}", printable(&terminal::note(record))));
        }
        self.bar.set_message(record.operator.clone());
        self.bar.inc(1);
    }

    fn ends(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Logs a case.
fn log(record: &CaseRecord) {
    let CaseRecord { operator, origin, kernel_seconds, oracle_seconds, .. } = record;
    let verdict = record.verdict();
    tracing::info!(
        "{operator}: {origin:?} case, {verdict:?}, kernel {kernel_seconds:.3} s, oracle {oracle_seconds:.3} s"
    );
    tracing::debug!("{}", record.case);
}

/// After an interrupt, prints how many cases are recorded in `out` (and of how many, if known), and
/// ends the process.
pub(super) fn say_when_interrupted(
    recorded: Arc<AtomicU64>,
    planned: Option<u64>,
    out: &Path,
) -> Result<()> {
    let out = out.display().to_string();
    let say = move || {
        let done = recorded.load(Ordering::Relaxed);
        let of = planned.map_or(String::new(), |planned| format!(" of {planned}"));
        // The newline ends the line of the bar.
        errln!(
            "\nparity: interrupted: {done}{of} cases are recorded in {out}; the same command with --resume goes on"
        );
        std::process::exit(INTERRUPTED);
    };
    on_interrupt(say).context("listening for interrupts")
}
