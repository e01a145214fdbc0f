//! The progress of a sweep on the terminal.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use dsv4_runtime::interrupt::on_interrupt;
use indicatif::{ProgressBar, ProgressStyle};

use super::output;
use crate::record::words::printable;
use crate::record::{CaseRecord, Verdict};
use crate::report::diagnosis::terminal;
use crate::report::numbers::duration;
use crate::sweep::session::Shown;

/// How many failing cases are noted while a sweep runs; the end of the sweep prints the details.
const MOST_NOTES: usize = 2;

/// The exit code of an interrupted process: 128 and the number of the signal.
const INTERRUPTED: i32 = 130;

/// How often a log gets a line of the progress.
const EVERY: Duration = Duration::from_secs(30);

/// The progress of a stage: a bar on a terminal. Elsewhere, as in the log of a CI job, a line from
/// time to time.
#[derive(Clone)]
pub(super) struct Steps {
    bar: ProgressBar,
    /// When the log got its last line; `None` without a log.
    said: Option<Arc<Mutex<Instant>>>,
}

impl Steps {
    /// What shows nothing.
    pub(super) fn hidden() -> Self {
        Self { bar: ProgressBar::hidden(), said: None }
    }

    /// A stage of that many steps; of how many may be unknown.
    pub(super) fn of(length: Option<usize>, message: &str) -> Self {
        if output::is_quiet() {
            return Self::hidden();
        }
        let (bar, template) = match length {
            Some(length) => {
                (ProgressBar::new(length as u64), "{msg:25} {wide_bar} {pos}/{len} {elapsed}")
            }
            None => (ProgressBar::new_spinner(), "{msg} {pos} cases {elapsed}"),
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(message.to_owned());
        let said = bar.is_hidden().then(|| Arc::new(Mutex::new(Instant::now())));
        Self { bar, said }
    }

    pub(super) fn set_message(&self, message: &str) {
        self.bar.set_message(message.to_owned());
    }

    /// One step is done.
    pub(super) fn step(&self) {
        self.bar.inc(1);
        self.say();
    }

    /// This many steps are done.
    pub(super) fn set(&self, steps: u64) {
        self.bar.set_position(steps);
        self.say();
    }

    /// Prints while the bar is away.
    pub(super) fn suspend(&self, print: impl FnOnce()) {
        self.bar.suspend(print);
    }

    /// The stage is done.
    pub(super) fn end(&self) {
        self.bar.finish_and_clear();
    }

    fn say(&self) {
        let Some(said) = &self.said else { return };
        let mut said = said.lock().unwrap_or_else(|e| e.into_inner());
        if said.elapsed() >= EVERY {
            *said = Instant::now();
            let bar = &self.bar;
            errln!("{}", line(&bar.message(), bar.position(), bar.length(), bar.elapsed()));
        }
    }
}

/// The progress as a line.
fn line(message: &str, steps: u64, length: Option<u64>, elapsed: Duration) -> String {
    let of = length.map_or_else(|| " cases".to_owned(), |length| format!(" of {length}"));
    format!("{}: {steps}{of}, {}", printable(message), duration(elapsed.as_secs_f64()))
}

/// A progress bar, notes of the first failing cases, and the message after an interrupt.
pub(super) struct Terminal {
    out: PathBuf,
    steps: Steps,
    /// Whether it is shown: not by a worker of another run.
    is_shown: bool,
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
            steps: Steps::hidden(),
            is_shown: notes,
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
        if self.is_shown {
            self.steps = Steps::of(Some(cases), "");
        }
    }

    fn done(&mut self, record: &CaseRecord) {
        self.steps.suspend(|| log(record));
        let fails = record.unsupported.is_none() && record.verdict() != Verdict::Pass;
        if fails && self.notes_left > 0 && self.last_noted != record.operator {
            self.notes_left -= 1;
            self.last_noted.clone_from(&record.operator);
            self.steps.suspend(|| errln!("{}", printable(&terminal::note(record))));
        }
        self.steps.set_message(&record.operator);
        self.steps.step();
    }

    fn ends(&mut self) {
        self.steps.end();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_progress_says_what_how_many_of_how_many_and_since_when() {
        let minute = Duration::from_millis(92_400);
        assert_eq!(line("rms_norm", 120, Some(380), minute), "rms_norm: 120 of 380, 1 min 32 s");
        assert_eq!(line("8 workers", 7, None, minute), "8 workers: 7 cases, 1 min 32 s");
    }

    #[test]
    fn a_log_gets_a_line_again_only_after_a_while() {
        let long_ago = Instant::now().checked_sub(2 * EVERY).expect("this machine runs for longer");
        let said = Arc::new(Mutex::new(long_ago));
        let steps = Steps { said: Some(said.clone()), ..Steps::hidden() };
        steps.step();
        let first = *said.lock().unwrap();
        assert!(first > long_ago, "a line was due");
        steps.step();
        assert_eq!(*said.lock().unwrap(), first, "and then none");
    }
}
