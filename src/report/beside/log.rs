//! The log of timings of either side: our benchmarks (`PARITY_BENCH_LOG`), and public kernels
//! (`fixtures/external/public_times.py`).
//!
//! Each line is JSON. A turn names the machine and every work that could be timed in it; the times
//! and the skipped works follow. A log may hold several turns, and a turn that was cut off still
//! shows what it did not reach.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::Failure;
use crate::record::Spread;

/// The side that was timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// This project's benchmarks.
    Ours,
    /// Public kernels.
    Theirs,
}

impl Side {
    /// Its name in logs and pages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Theirs => "theirs",
        }
    }
}

/// The machine that was timed. Two GPUs of one kind differ in their `uuid`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// The GPU's name.
    pub device: String,
    /// Its own id, as `nvidia-smi -L` prints it.
    pub uuid: String,
    /// The driver.
    pub driver: String,
}

/// The start of a turn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Turn {
    /// The side that was timed.
    pub side: Side,
    /// The machine.
    pub machine: Machine,
    /// For ours the revision; for theirs the common software of all their kernels, such as torch.
    pub software: String,
    /// When it started, in seconds since 1970.
    pub unix: u64,
    /// Bytes per second of a large copy, read plus written.
    #[serde(default)]
    pub copy_bytes_per_second: Option<f64>,
    /// Every work that this side can time, run or not.
    pub ids: Vec<String>,
}

/// The samples of one work in one turn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Time {
    /// For ours criterion's id; for theirs the name in `public_times.py`.
    pub id: String,
    /// The public library and its version.
    #[serde(default)]
    pub library: Option<String>,
    /// Microseconds of a call, one for each sample.
    pub samples_us: Vec<f64>,
    /// Bytes that a memory-bound call moves; absent for others.
    #[serde(default)]
    pub bytes: Option<f64>,
    /// The SM clock during the samples, in MHz.
    #[serde(default)]
    pub clock_mhz: Option<f64>,
}

/// A work that has no time in this turn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Skipped {
    /// The work.
    pub id: String,
    /// Why.
    pub why: String,
}

/// A line of a log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Line {
    /// A turn starts.
    Turn(Turn),
    /// A work was timed.
    Time(Time),
    /// A work was skipped.
    Skipped(Skipped),
}

/// Appends lines to a log, each complete on disk before the next benchmark starts.
pub struct Writer(File);

impl Writer {
    /// Opens a log for more lines.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn append(path: &Path) -> io::Result<Self> {
        OpenOptions::new().create(true).append(true).open(path).map(Self)
    }

    /// Writes one line.
    ///
    /// # Errors
    /// Those of the file.
    pub fn write(&mut self, line: &Line) -> io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        self.0.write_all(&text)
    }
}

/// The revision of this build, for [`Turn::software`].
pub fn revision() -> String {
    let dirty = if env!("PARITY_DIRTY") == "1" { " with uncommitted changes" } else { "" };
    format!("{}{dirty}", env!("PARITY_COMMIT"))
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// All turns of all logs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timings {
    /// In the order of their start.
    pub turns: Vec<Turn>,
    times: BTreeMap<(Side, String), Vec<Time>>,
    skipped: BTreeMap<(Side, String), String>,
}

impl Timings {
    /// Reads logs, which may hold turns of one side or of both.
    ///
    /// # Errors
    /// A file that cannot be read, a line that is not a log line, a log without a turn, a turn of
    /// another machine.
    pub fn read<P: AsRef<Path>>(paths: &[P]) -> Result<Self, Failure> {
        let mut timings = Self::default();
        for path in paths {
            let path = path.as_ref();
            let text =
                std::fs::read_to_string(path).map_err(|e| Failure::new(path, &e.to_string()))?;
            timings.add(&text).map_err(|why| Failure::new(path, &why))?;
        }
        timings.turns.sort_by_key(|turn| turn.unix);
        Ok(timings)
    }

    /// Adds the lines of one log.
    fn add(&mut self, text: &str) -> Result<(), String> {
        let mut side = None;
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let of_line = |why: String| format!("line {}: {why}", number + 1);
            let line: Line = serde_json::from_str(line)
                .map_err(|e| of_line(format!("no line of such a log: {e}")))?;
            let known =
                || side.ok_or_else(|| of_line("a time or a skip before the first turn".into()));
            match line {
                Line::Turn(turn) => {
                    self.check_machine(&turn).map_err(of_line)?;
                    side = Some(turn.side);
                    self.turns.push(turn);
                }
                Line::Time(time) => {
                    let wrong = |us: &f64| !(us.is_finite() && *us > 0.0);
                    if time.samples_us.is_empty() || time.samples_us.iter().any(wrong) {
                        return Err(of_line(format!("`samples_us` of `{}` are no times", time.id)));
                    }
                    self.times.entry((known()?, time.id.clone())).or_default().push(time);
                }
                Line::Skipped(Skipped { id, why }) => {
                    drop(self.skipped.insert((known()?, id), why))
                }
            }
        }
        if side.is_none() { Err("it holds no turn".into()) } else { Ok(()) }
    }

    /// A ratio is only valid for two times on one GPU.
    fn check_machine(&self, turn: &Turn) -> Result<(), String> {
        let Some(first) = self.turns.first() else { return Ok(()) };
        let (one, other) = (&first.machine, &turn.machine);
        let named =
            |machine: &Machine| format!("{} {} ({})", machine.device, machine.uuid, machine.driver);
        if one == other {
            return Ok(());
        }
        let (one_side, other_side) = (first.side.name(), turn.side.name());
        Err(format!(
            "{other_side} ran on {}, {one_side} on {}: time both on one machine",
            named(other),
            named(one)
        ))
    }

    /// The turns of a side.
    pub fn turns_of(&self, side: Side) -> impl Iterator<Item = &Turn> {
        self.turns.iter().filter(move |turn| turn.side == side)
    }

    /// Whether some turn of this side could time a work of this id.
    pub fn knows(&self, side: Side, id: &str) -> bool {
        self.turns_of(side).any(|turn| turn.ids.iter().any(|known| known == id))
    }

    /// The times of a work, one for each turn that reached it.
    pub fn times(&self, side: Side, id: &str) -> &[Time] {
        self.times.get(&(side, id.to_owned())).map_or(&[], Vec::as_slice)
    }

    /// Every work of a side that has a time, by its id.
    pub fn timed(&self, side: Side) -> impl Iterator<Item = (&str, &[Time])> {
        self.times
            .iter()
            .filter(move |((of, _), _)| *of == side)
            .map(|((_, id), times)| (id.as_str(), times.as_slice()))
    }

    /// Why a work has no time.
    pub fn why_skipped(&self, side: Side, id: &str) -> &str {
        let why = self.skipped.get(&(side, id.to_owned()));
        why.map_or("not chosen, or not reached in time", String::as_str)
    }
}

/// All samples of a work, of all turns together; `None` without one.
pub fn spread(times: &[Time]) -> Option<Spread> {
    Spread::of(times.iter().flat_map(|time| &time.samples_us).copied())
}
