//! `parity run`.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use clap::Args;
use dsv4_kernels::runtime::{BackendKind, Device};
use indicatif::{ProgressBar, ProgressStyle};

use super::{DeviceArguments, Exit};
use crate::checks::CheckOptions;
use crate::operator::Profile;
use crate::record::{CaseRecord, Report, Revision, SCHEMA_VERSION, Skip, Verdict};
use crate::regressions::Regressions;
use crate::sweep::{self, Observer, SweepOptions};
use crate::{benchmarks, registry, report};

/// Options of `parity run`.
#[derive(Debug, Args)]
pub struct RunArguments {
    /// Operators, comma-separated; all when absent
    #[arg(long, value_name = "A,B")]
    ops: Option<String>,
    /// Size of the sweep
    #[arg(long, value_enum, default_value = "quick")]
    profile: Profile,
    /// Drawn cases for each operator; the profile's number when absent
    #[arg(long)]
    cases: Option<usize>,
    /// Seed of the sweep
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Random schedules to run each case under, beyond the deterministic one (emulator)
    #[arg(long, default_value_t = 0)]
    schedules: u32,
    /// Folder for report.json, index.html, summary.md and records.jsonl
    #[arg(long, default_value = "reports/latest", value_name = "DIR")]
    out: PathBuf,
    /// Criterion's directory, whose results join the report
    #[arg(long, default_value = "target/criterion", value_name = "DIR")]
    criterion: PathBuf,
    /// Folder of remembered failing cases
    #[arg(long, value_name = "DIR")]
    regressions: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArguments,
}

/// Sweeps and writes the report; 1 when something disagrees.
pub fn execute(arguments: &RunArguments) -> Result<Exit> {
    let operators = registry::select(arguments.ops.as_deref())?;
    let device = arguments.device.open()?;
    let started_unix = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let start = Instant::now();
    // Read before anything runs: what cannot be understood must not cost a finished sweep its report.
    let measured = benchmarks::read(&arguments.criterion, &device.environment().device).map_err(anyhow::Error::msg)?;
    let mut writer = RecordWriter::create(&arguments.out)?;
    let options = SweepOptions {
        profile: arguments.profile,
        cases: arguments.cases,
        seed: arguments.seed,
        checks: CheckOptions { schedules: arguments.schedules, triangulate: true },
        regressions: Regressions::new(arguments.regressions.clone().unwrap_or_else(Regressions::default_dir)),
        remember: true,
    };
    for operator in &operators {
        sweep::sweep(*operator, &device, &options, &mut writer)?;
    }
    let cases = writer.finish()?;
    let report = Report {
        schema_version: SCHEMA_VERSION,
        command: std::env::args().collect::<Vec<_>>().join(" "),
        started_unix,
        seconds: start.elapsed().as_secs_f64(),
        revision: revision(&device),
        environment: device.environment().clone(),
        profile: arguments.profile.name().to_owned(),
        seed: arguments.seed,
        schedules: arguments.schedules,
        operators: operators.iter().map(|operator| operator.describe()).collect(),
        cases,
        benchmarks: measured.benchmarks,
        ceilings: measured.ceilings,
        mutants: Vec::new(),
        skips: skips(&device, arguments).into_iter().chain(measured.skip).collect(),
    };
    report::write_all(&report, &arguments.out)
        .with_context(|| format!("writing the report to {}", arguments.out.display()))?;
    summarise(&report, &arguments.out);
    Ok(if report.verdict() == Verdict::Pass { Exit::Agreed } else { Exit::Disagreed })
}

fn revision(device: &Device) -> Revision {
    Revision {
        commit: env!("PARITY_COMMIT").to_owned(),
        dirty: env!("PARITY_DIRTY") == "1",
        kernels: device.tree().origin().to_owned(),
        kernels_digest: device.tree().digest(),
    }
}

fn skips(device: &Device, arguments: &RunArguments) -> Vec<Skip> {
    let mut skips = Vec::new();
    if device.environment().backend == BackendKind::Cuda && arguments.schedules > 0 {
        skips.push(Skip {
            what: "random schedules".into(),
            why: "a GPU schedules by itself; only the emulator takes a seed".into(),
            count: u64::from(arguments.schedules),
        });
    }
    if device.environment().backend == BackendKind::Emulator && arguments.schedules == 0 {
        skips.push(Skip { what: "random schedules".into(), why: "not asked for (--schedules N)".into(), count: 1 });
    }
    skips
}

fn summarise(report: &Report, out: &Path) {
    let failed = report.cases.iter().filter(|case| case.verdict() != Verdict::Pass).count();
    let checks: usize = report.cases.iter().map(|case| case.checks.len()).sum();
    let verdict = if failed == 0 { "all agreed".to_owned() } else { format!("{failed} case(s) disagreed") };
    println!(
        "{verdict}: {} cases, {checks} checks, {:.1} s on {} ({})",
        report.cases.len(),
        report.seconds,
        report.environment.device,
        report.environment.backend
    );
    println!("report: {}", out.join("index.html").display());
}

/// Writes records as they come, shows progress, keeps them for the report.
struct RecordWriter {
    path: PathBuf,
    file: std::fs::File,
    bar: ProgressBar,
    cases: Vec<CaseRecord>,
    broken: Option<std::io::Error>,
}

impl RecordWriter {
    fn create(dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        let path = dir.join("records.jsonl");
        let file = std::fs::File::create(&path).with_context(|| format!("creating {}", path.display()))?;
        Ok(Self { path, file, bar: ProgressBar::hidden(), cases: Vec::new(), broken: None })
    }

    fn finish(self) -> Result<Vec<CaseRecord>> {
        self.bar.finish_and_clear();
        match self.broken {
            Some(error) => Err(error).with_context(|| format!("writing {}", self.path.display())),
            None => Ok(self.cases),
        }
    }
}

impl Observer for RecordWriter {
    fn planned(&mut self, operator: &str, cases: usize) {
        self.bar.finish_and_clear();
        self.bar = ProgressBar::new(cases as u64);
        if let Ok(style) = ProgressStyle::with_template("{msg:18} {wide_bar} {pos}/{len} {elapsed}") {
            self.bar.set_style(style);
        }
        self.bar.set_message(operator.to_owned());
    }

    fn done(&mut self, record: CaseRecord) {
        let written = serde_json::to_writer(&self.file, &record).map_err(std::io::Error::from);
        let written = written.and_then(|()| self.file.write_all(b"\n")).and_then(|()| self.file.flush());
        if let Err(error) = written {
            self.broken.get_or_insert(error);
        }
        if record.verdict() != Verdict::Pass {
            self.bar.suspend(|| eprintln!("{}", sweep::failure_text(&record)));
        }
        self.cases.push(record);
        self.bar.inc(1);
    }
}
