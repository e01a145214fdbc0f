//! `parity mutants`.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use dsv4_runtime::emulator::EmulatorOptions;
use dsv4_runtime::process::this_program;
use dsv4_runtime::{BackendKind, Device, DeviceOptions};
use serde_json::json;

use super::progress::Steps;
use super::{DeviceArguments, Exit, command_line, cores, output};
use crate::mutants::generated::{self, GeneratedMutant};
use crate::mutants::matrix::journal::Journal;
use crate::mutants::matrix::plan::Choice;
use crate::mutants::matrix::schedule::Schedule;
use crate::mutants::matrix::session::{
    Judged, Options, Session, Shown, joined, same_kernels, with_kernels,
};
use crate::mutants::matrix::tally::Tally;
use crate::mutants::matrix::trial;
use crate::operator::size;
use crate::record::words::printable;
use crate::record::{Check, KillMatrixRecord, MutantRecord, MutantSource, MutantStatus, Report};
use crate::report::{self, diff};
use crate::sweep;
use crate::sweep::pool::Open;
use crate::sweep::regressions::Regressions;
use crate::sweep::session::{Started, revision};

/// A longer launch on the emulator has hung: the cases take milliseconds.
const LAUNCH_LIMIT: Duration = Duration::from_secs(10);
/// A child that is silent for longer has hung: a case is a compilation and a few dozen launches.
const PATIENCE: Duration = Duration::from_secs(180);

/// Options of `parity mutants`.
#[derive(Debug, Args)]
#[command(after_help = "\
The kill rate is of the mutants that ran and compile. Not counted are those that equivalent.toml lists, and survivors \
of which the compiler makes the same code as of the kernel.

Exit codes: 0 every planted mutant was killed, and at least the share --floor of each operator's generated ones; 1 not \
so, or a case fails on the kernels as they are; 2 bad usage or input, such as a planted mutant whose anchor matches no \
longer, or a listed equivalent mutant that no kernel gives any more; 3 the demanded backend is missing.")]
pub struct MutantsArguments {
    /// Operators, comma-separated [default: all]
    #[arg(long, value_name = "A,B")]
    ops: Option<String>,
    /// Generated mutants of each operator, drawn evenly from their classes [default: all]
    #[arg(long, value_name = "N")]
    sample: Option<usize>,
    /// Seed of the sample
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,
    /// Start no mutant after this time; the rest is counted as skipped
    #[arg(long, value_name = "SECONDS")]
    time_budget: Option<u64>,
    /// Mutants at a time [default: one for each core on the emulator, 1 on a GPU]
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
    /// Least share of each operator's generated mutants that must be killed
    #[arg(long, default_value_t = 0.95, value_name = "RATE")]
    floor: f64,
    /// Make all checks, on all cases of a mutant, not only up to the first that kills it
    #[arg(long)]
    all_checks: bool,
    /// Random schedules to run each case under on the emulator
    #[arg(long, default_value_t = 4, value_name = "N")]
    schedules: u32,
    /// Run only the mutants with these ids, comma-separated, on all their cases, and print each
    /// result
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    only: Vec<String>,
    /// Run the mutants listed as equivalent, too: one that is killed fails the run
    #[arg(long)]
    check_equivalents: bool,
    /// Folder of planted mutants and equivalent.toml [default: mutants in PARITY_FIXTURES or
    /// ./fixtures]
    #[arg(long, value_name = "DIR")]
    mutants: Option<PathBuf>,
    /// Folder of saved failing cases [default: regressions in PARITY_FIXTURES or ./fixtures]
    #[arg(long, value_name = "DIR")]
    regressions: Option<PathBuf>,
    /// Folder for report.json, index.html and summary.md
    #[arg(long, default_value = "reports/mutants", value_name = "DIR")]
    out: PathBuf,
    /// Add the matrix to this report of the same kernels instead: report.json, or its folder
    #[arg(long, value_name = "REPORT", conflicts_with = "out")]
    into: Option<PathBuf>,
    /// Continue the run that was interrupted in --out: run only mutants without a result
    ///
    /// Results count where mutant, cases, kernels and executable are the same.
    #[arg(long)]
    resume: bool,
    /// Run nothing: print the results of the generated mutants of these reports
    ///
    /// Each report may have its own seed and revision.
    #[arg(long, value_name = "REPORT", num_args = 1.., conflicts_with_all = ["only", "into", "out"])]
    table: Vec<PathBuf>,
    /// Run nothing: print the id of every generated mutant of --ops, its place and what it changes
    ///
    /// Those that equivalent.toml lists are printed as well.
    #[arg(long, conflicts_with_all = ["only", "into", "out", "table"])]
    list: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Serve one trial from the standard input (what this command starts for each mutant)
    #[arg(long, hide = true)]
    trial: bool,
    #[command(flatten)]
    pub(super) device: DeviceArguments,
}

/// Runs the mutants and writes the matrix; the exit code is 1 when too many survive.
pub fn execute(arguments: &MutantsArguments) -> Result<Exit> {
    if !(0.0..=1.0).contains(&arguments.floor) {
        bail!("--floor {} is no share between 0 and 1", arguments.floor);
    }
    if arguments.jobs == Some(0) {
        bail!("--jobs 0 would run nothing");
    }
    if !arguments.table.is_empty() {
        return print_table(arguments);
    }
    if arguments.list {
        return print_list(arguments);
    }
    let device = open(arguments)?;
    if arguments.trial {
        return serve_trial(&device);
    }
    run(arguments, device)
}

fn open(arguments: &MutantsArguments) -> Result<Device> {
    let emulator = EmulatorOptions { time_limit: LAUNCH_LIMIT, ..EmulatorOptions::default() };
    arguments.device.open_with(&DeviceOptions { emulator, ..dsv4_kernels::device_options() })
}

fn run(arguments: &MutantsArguments, device: Device) -> Result<Exit> {
    let started = Started::now();
    let target = arguments.into.as_deref().map(|path| target(path, &device)).transpose()?;
    let shown = Terminal::of(arguments);
    let more = || open(arguments);
    let devices = (jobs(arguments, &device), &more as &Open<'_>);
    let only = !arguments.only.is_empty();
    let journal = |device: &Device| {
        let open = || Journal::open(&folder(arguments), device, arguments.resume);
        (!only).then(open).transpose()
    };
    let mut session = Session::prepare(options(arguments)?, device, devices, journal, &shown)?;
    let failing = session.failing_cases();
    if !failing.is_empty() {
        failing.iter().for_each(|record| {
            errln!("without any mutant, {}", printable(&sweep::failure_text(record)))
        });
        return Ok(Exit::Disagreed);
    }
    let trials = session.trials();
    let schedule = schedule(arguments, session.device());
    let fates = session.run(&trials, &schedule, &shown)?;
    let (revision, environment) =
        (revision(session.device()), session.device().environment().clone());
    let judged = session.conclude(&trials, fates);
    if only {
        return told_of_each(arguments, &judged);
    }
    for (id, killers) in &judged.false_equivalents {
        let killers = killers.iter().map(Check::as_str).collect::<Vec<_>>().join(", ");
        errln!("not equivalent: {id} is killed by {killers}");
    }
    let passed = judged.false_equivalents.is_empty();
    let command = command_line().join(" ");
    let fresh = judged.report(matrix(arguments), command, (revision, environment), started);
    conclude(arguments, target, fresh, passed)
}

/// Prints the generated mutants of some reports; the exit code is 1 where a report has too few
/// killed.
fn print_table(arguments: &MutantsArguments) -> Result<Exit> {
    let reports =
        arguments.table.iter().map(|path| diff::read(path)).collect::<Result<Vec<_>>>()?;
    if arguments.json {
        let tables =
            arguments.table.iter().zip(&reports).map(|(path, report)| as_json(report, path));
        output::json(&tables.collect::<Vec<_>>())?;
    } else {
        out!("{}", printable(&report::generated::table(&reports)));
    }
    let falls_short = reports.iter().any(|report| Tally::shortfalls(report).next().is_some());
    Ok(if falls_short { Exit::Disagreed } else { Exit::Agreed })
}

/// The totals of the matrix, and the mutants that no check saw.
fn as_json(report: &Report, path: &Path) -> serde_json::Value {
    let operator = |tally: Tally| {
        let left_out = tally.left_out.as_ref();
        json!({
            "operator": tally.operator,
            "planted_killed": tally.planted_killed,
            "planted_missed": tally.planted_missed,
            "generated": left_out.map_or(0, |counts| counts.generated),
            "killed": tally.killed,
            "survived": tally.survived,
            "equivalent": tally.equivalent,
            "invalid": tally.invalid,
            "not_run": left_out.map_or(0, |counts| counts.not_drawn + counts.not_run),
            "rate": tally.rate(),
        })
    };
    let survived = report.mutants.iter().filter(|mutant| mutant.status == MutantStatus::Survived);
    json!({
        "report": path,
        "commit": report.revision.commit,
        "seed": report.seed,
        "operators": Tally::all(report).into_iter().map(operator).collect::<Vec<_>>(),
        "survived": survived.collect::<Vec<_>>(),
        "shortfalls": Tally::shortfalls(report).collect::<Vec<_>>(),
    })
}

/// Prints the generated mutants of some operators, one a line.
fn print_list(arguments: &MutantsArguments) -> Result<Exit> {
    let tree = arguments.device.tree()?;
    let mut all = Vec::new();
    for operator in with_kernels(arguments.ops.as_deref())? {
        for mutant in generated::generate(&tree, operator.name())? {
            let GeneratedMutant { id, file, line, summary, .. } = &mutant;
            if arguments.json {
                let operator = operator.name();
                all.push(json!({ "id": id, "operator": operator, "file": file, "line": line, "summary": summary }));
            } else {
                outln!("{id}  {file}:{line}  {}", printable(summary));
            }
        }
    }
    if arguments.json {
        output::json(&all)?;
    }
    Ok(Exit::Agreed)
}

fn serve_trial(device: &Device) -> Result<Exit> {
    let mut input = String::new();
    std::io::stdin()
        .read_to_string(&mut input)
        .context("reading a trial from the standard input")?;
    trial::serve(&input, device, &mut std::io::stdout().lock())?;
    Ok(Exit::Agreed)
}

fn options(arguments: &MutantsArguments) -> Result<Options> {
    let only = !arguments.only.is_empty();
    Ok(Options {
        operators: with_kernels(arguments.ops.as_deref())?,
        choice: Choice {
            sample: arguments.sample.filter(|_| !only),
            seed: arguments.seed,
            run_equivalents: arguments.check_equivalents || only,
        },
        only: arguments.only.clone(),
        all_checks: arguments.all_checks,
        schedules: arguments.schedules,
        mutants: arguments.mutants.clone(),
        regressions: Regressions::new(
            arguments.regressions.clone().unwrap_or_else(Regressions::default_dir),
        ),
    })
}

/// How many cases or mutants run at a time.
fn jobs(arguments: &MutantsArguments, device: &Device) -> usize {
    let is_gpu = device.environment().backend == BackendKind::Cuda;
    arguments.jobs.unwrap_or_else(|| if is_gpu { 1 } else { cores() })
}

fn schedule(arguments: &MutantsArguments, device: &Device) -> Schedule {
    let backend = device.environment().backend;
    let (name, memory) = (backend.to_string(), size::limit().number().to_string());
    let child = ["mutants", "--trial", "--backend", &name, "--memory", &memory];
    let mut child = child.map(str::to_owned).to_vec();
    if let Some(kernels) = &arguments.device.kernels {
        child.extend(["--kernels".to_owned(), kernels.display().to_string()]);
    }
    Schedule {
        program: this_program,
        arguments: child,
        jobs: jobs(arguments, device),
        time_budget: arguments.time_budget.map(Duration::from_secs),
        patience: PATIENCE,
    }
}

/// The folder of the journal and the report.
fn folder(arguments: &MutantsArguments) -> PathBuf {
    arguments.into.as_deref().map_or_else(|| arguments.out.clone(), folder_of)
}

/// What the matrix says of how it was asked for.
fn matrix(arguments: &MutantsArguments) -> KillMatrixRecord {
    KillMatrixRecord {
        floor: arguments.floor,
        seed: arguments.seed,
        sample: arguments.sample.map(|sample| sample as u64),
        schedules: arguments.schedules,
        all_checks: arguments.all_checks,
        operators: Vec::new(),
    }
}

/// The report of `--into`.
fn target(path: &Path, device: &Device) -> Result<Report> {
    let report = diff::read(path)?;
    same_kernels(&report, &format!("--into {}", path.display()), device)?;
    Ok(report)
}

/// Prints the records where ids were given, and which of these did not run.
fn told_of_each(arguments: &MutantsArguments, judged: &Judged) -> Result<Exit> {
    if arguments.json {
        output::json(&judged.records)?;
    }
    let (left_out, why) = judged.left_out(&arguments.only);
    left_out.iter().for_each(|id| errln!("{id} did not run: {}", printable(&why)));
    let missed = judged.records.iter().any(|record| record.status != MutantStatus::Killed);
    Ok(if missed || !left_out.is_empty() { Exit::Disagreed } else { Exit::Agreed })
}

/// Writes the report, and says what it holds.
fn conclude(
    arguments: &MutantsArguments,
    target: Option<Report>,
    fresh: Report,
    passed: bool,
) -> Result<Exit> {
    let out = folder(arguments);
    let report = match target {
        Some(target) => joined(target, fresh),
        None => fresh,
    };
    report::write_all(&report, &out)
        .with_context(|| format!("writing the report to {}", out.display()))?;
    if arguments.json {
        output::json(&as_json(&report, &out))?;
    } else {
        summarise(&report, &out);
    }
    let passed = passed && Tally::shortfalls(&report).next().is_none();
    Ok(if passed { Exit::Agreed } else { Exit::Disagreed })
}

/// A bar for each stage; results that a reader wants above it.
struct Terminal {
    steps: Mutex<Steps>,
    json: bool,
    /// Whether each result is printed, and not only of those that survive.
    each: bool,
}

impl Terminal {
    fn of(arguments: &MutantsArguments) -> Self {
        let steps = Mutex::new(Steps::hidden());
        Self { steps, json: arguments.json, each: !arguments.only.is_empty() }
    }

    fn steps(&self) -> Steps {
        self.steps.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }
}

impl Shown for Terminal {
    fn stage(&self, length: usize, name: &str) {
        let steps = Steps::of(Some(length), name);
        *self.steps.lock().unwrap_or_else(|e| e.into_inner()) = steps;
    }

    fn step(&self) {
        self.steps().step();
    }

    fn stage_done(&self) {
        self.steps().end();
    }

    fn judged(&self, record: &MutantRecord) {
        let is_seen = matches!(record.status, MutantStatus::Killed | MutantStatus::Equivalent);
        if (!is_seen || self.each) && !self.json {
            self.steps().suspend(|| print_fate(record));
        }
    }

    fn resumed(&self, known: usize, all: usize) {
        if !self.json {
            detailln!("{known} of {all} mutants were judged before (--resume)");
        }
    }
}

fn folder_of(path: &Path) -> PathBuf {
    if path.is_dir() {
        path.to_owned()
    } else {
        path.parent().map_or_else(PathBuf::new, Path::to_owned)
    }
}

/// Prints the result of a mutant, with the changed line.
fn print_fate(record: &MutantRecord) {
    let fate = match record.status {
        MutantStatus::Killed => output::good(format!("killed by {}", record.killers())),
        MutantStatus::Survived => output::bad(format!("SURVIVED {} cases", record.cases_run)),
        MutantStatus::Equivalent => output::unsure("equivalent".to_owned()),
        MutantStatus::Invalid => output::unsure("invalid".to_owned()),
    };
    let mut text = format!("{} ({}:{}): {}\n", record.id, record.file, record.line, record.summary);
    for (sign, lines) in [('-', &record.original), ('+', &record.mutated)] {
        lines.lines().for_each(|line| text += &format!("    {sign} {line}\n"));
    }
    if !record.reason.is_empty() {
        text += &format!("  {}\n", record.reason.lines().next().unwrap_or_default());
    }
    outln!("{fate}: {}", printable(&text));
}

/// Prints the totals of the matrix; with --quiet only what falls short and the verdict.
fn summarise(report: &Report, out: &Path) {
    detailln!(
        "{:18} {:>8} {:>9} {:>7} {:>9} {:>11} {:>8} {:>8}  rate",
        "operator",
        "planted",
        "generated",
        "killed",
        "survived",
        "equivalent",
        "invalid",
        "not run"
    );
    for tally in Tally::all(report) {
        let left_out = tally.left_out.as_ref();
        detailln!(
            "{:18} {:>8} {:>9} {:>7} {:>9} {:>11} {:>8} {:>8}  {}",
            tally.operator,
            format!("{}/{}", tally.planted_killed, tally.planted_killed + tally.planted_missed),
            left_out.map_or(0, |counts| counts.generated),
            tally.killed,
            tally.survived,
            tally.equivalent,
            tally.invalid,
            left_out.map_or(0, |counts| counts.not_drawn + counts.not_run),
            tally.rate().map_or("—".to_owned(), |rate| format!("{:.1} %", 100.0 * rate)),
        );
    }
    let generated =
        report.mutants.iter().filter(|mutant| mutant.source == MutantSource::Generated).count();
    outln!(
        "{} planted and {generated} generated mutants in {:.0} s on {} ({})",
        report.mutants.len() - generated,
        report.seconds,
        report.environment.device,
        report.environment.backend
    );
    Tally::shortfalls(report)
        .for_each(|reason| outln!("{}: {reason}", output::bad("below what is required")));
    detailln!("report: {}", out.join("index.html").display());
}
