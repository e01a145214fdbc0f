//! `parity mutants`.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::Args;
use dsv4_runtime::emulator::EmulatorOptions;
use dsv4_runtime::process::this_program;
use dsv4_runtime::{BackendKind, Device, DeviceOptions};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use super::{DeviceArguments, Exit, command_line, cores, output};
use crate::judge::checks::CheckOptions;
use crate::mutants::generated::{self, GeneratedMutant};
use crate::mutants::matrix::cases::{self, KnownCase};
use crate::mutants::matrix::equivalent::Equivalents;
use crate::mutants::matrix::journal::Journal;
use crate::mutants::matrix::plan::{self, Choice, Plan};
use crate::mutants::matrix::schedule::{self, Schedule};
use crate::mutants::matrix::tally::Tally;
use crate::mutants::matrix::trial::{self, Subject, Trial};
use crate::mutants::planted::{self, Mutant};
use crate::operator::{AnyOperator, size};
use crate::operators::registry;
use crate::record::words::printable;
use crate::record::{
    KillMatrixRecord, MutantRecord, MutantSource, MutantStatus, Report, SCHEMA_VERSION, Skip,
    Verdict,
};
use crate::report::{self, diff};
use crate::sweep;
use crate::sweep::regressions::{Regressions, fixtures_dir};
use crate::sweep::session::revision;

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
    /// Run each mutant on all its cases, not only up to the first case that kills it
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
    let emulator = EmulatorOptions { time_limit: LAUNCH_LIMIT, ..EmulatorOptions::default() };
    let device = arguments
        .device
        .open_with(&DeviceOptions { emulator, ..dsv4_kernels::device_options() })?;
    if arguments.trial {
        return serve_trial(&device);
    }
    let session = Session::prepare(arguments, device)?;
    if session.cases_fail() {
        return Ok(Exit::Disagreed);
    }
    let trials = session.trials();
    let fates = session.run(&trials)?;
    session.conclude(&trials, fates)
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
    let falls_short = reports.iter().any(|report| shortfalls(report).next().is_some());
    Ok(if falls_short { Exit::Disagreed } else { Exit::Agreed })
}

/// Why operators of a report miss the required share.
fn shortfalls(report: &Report) -> impl Iterator<Item = String> {
    let (floor, sample) =
        report.kill_matrix.as_ref().map_or((0.0, None), |matrix| (matrix.floor, matrix.sample));
    Tally::all(report).into_iter().filter_map(move |tally| tally.shortfall(floor, sample))
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
        "shortfalls": shortfalls(report).collect::<Vec<_>>(),
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

/// The folder of planted mutants (the default one where none is given), and the mutants.
pub(super) fn planted(dir: Option<&Path>) -> Result<(PathBuf, Vec<Mutant>)> {
    let usual = || fixtures_dir().join("mutants");
    let folder = dir.map_or_else(usual, Path::to_path_buf);
    if dir.is_none() && !folder.is_dir() {
        bail!(
            "{}: no such folder. Planted mutants are part of a checkout of dsv4-parity: run the command in one, or set \
             PARITY_FIXTURES to the checkout's fixtures",
            folder.display()
        );
    }
    let mutants = planted::load(&folder)?;
    Ok((folder, mutants))
}

fn serve_trial(device: &Device) -> Result<Exit> {
    let mut input = String::new();
    std::io::stdin()
        .read_to_string(&mut input)
        .context("reading a trial from the standard input")?;
    trial::serve(&input, device, &mut std::io::stdout().lock())?;
    Ok(Exit::Agreed)
}

/// The operators of a list that have kernels to mutate; a chain has no own kernels.
fn with_kernels(list: Option<&str>) -> Result<Vec<&'static AnyOperator>> {
    let selected = registry::select(list)?;
    let is_chain = |operator: &&&'static AnyOperator| !operator.chain().is_empty();
    if let Some(chain) = selected.iter().find(is_chain).filter(|_| list.is_some()) {
        let (name, of) = (chain.name(), chain.chain().join(","));
        bail!(
            "--ops {name}: it has no kernel of its own; the kernels that it launches are those of --ops {of}"
        );
    }
    Ok(selected.into_iter().filter(|operator| !is_chain(&operator)).collect())
}

/// Everything that is known before the first mutant runs.
struct Session<'a> {
    arguments: &'a MutantsArguments,
    device: Device,
    operators: Vec<&'static AnyOperator>,
    plans: Vec<Plan>,
    known: Vec<Vec<KnownCase>>,
    target: Option<Report>,
    start: Instant,
    started_unix: u64,
}

impl<'a> Session<'a> {
    fn prepare(arguments: &'a MutantsArguments, device: Device) -> Result<Self> {
        let start = Instant::now();
        let started_unix = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let operators = with_kernels(arguments.ops.as_deref())?;
        let names: Vec<&str> = operators.iter().map(|operator| operator.name()).collect();
        let target =
            arguments.into.as_deref().map(|path| same_kernels(path, &device)).transpose()?;
        let (dir, all) = planted(arguments.mutants.as_deref())?;
        let (planted, others): (Vec<Mutant>, Vec<Mutant>) =
            all.into_iter().partition(|mutant| names.contains(&mutant.operator.as_str()));
        // An anchor that no longer matches is reported before minutes are spent.
        for mutant in &planted {
            mutant.plant(device.tree())?;
        }
        let equivalents = Equivalents::load(&dir)?;
        let generated = plan::generate(device.tree(), &names, &equivalents)?;
        refuse_unknown_ids(&arguments.only, &planted, &others, &generated)?;
        let regressions = Regressions::new(
            arguments.regressions.clone().unwrap_or_else(Regressions::default_dir),
        );
        // Planted mutants name their own cases.
        let needs_cases = |name: &str| {
            let ids = |mutants: &[GeneratedMutant]| {
                mutants.iter().any(|mutant| arguments.only.contains(&mutant.id))
            };
            arguments.only.is_empty()
                || generated.iter().any(|(operator, mutants)| operator == name && ids(mutants))
        };
        let known =
            know_cases(arguments, &device, &operators, &regressions, &planted, needs_cases)?;
        let choice = Choice {
            sample: arguments.sample.filter(|_| arguments.only.is_empty()),
            seed: arguments.seed,
            run_equivalents: arguments.check_equivalents || !arguments.only.is_empty(),
        };
        let mut plans = Vec::new();
        for ((operator, (_, mutants)), known) in operators.iter().zip(generated).zip(&known) {
            let environment = device.environment();
            plans.push(plan::plan(
                operator,
                &planted,
                mutants,
                known,
                &equivalents,
                choice,
                environment,
            )?);
        }
        keep_only(&mut plans, &arguments.only);
        Ok(Self { arguments, device, operators, plans, known, target, start, started_unix })
    }

    /// Whether a case fails on the unmutated kernels: then killed mutants would mean nothing.
    fn cases_fail(&self) -> bool {
        let records = self.known.iter().flatten().map(|known| &known.record);
        let failing: Vec<_> = records.filter(|record| record.verdict() != Verdict::Pass).collect();
        failing.iter().for_each(|record| {
            errln!("without any mutant, {}", printable(&sweep::failure_text(record)))
        });
        !failing.is_empty()
    }

    /// The trials: planted mutants first, then generated ones, round-robin over the operators.
    fn trials(&self) -> Vec<Trial> {
        let all_checks = self.arguments.all_checks || !self.arguments.only.is_empty();
        let trial = |subject: &Subject| Trial {
            subject: subject.clone(),
            schedules: self.schedules(),
            all_checks,
        };
        let is_planted = |subject: &&Subject| matches!(subject, Subject::Planted(_));
        let planted = self.plans.iter().flat_map(|plan| plan.subjects.iter().filter(is_planted));
        let mut trials: Vec<Trial> = planted.map(trial).collect();
        let mut generated: Vec<_> = self
            .plans
            .iter()
            .map(|plan| plan.subjects.iter().filter(|one| !is_planted(one)))
            .collect();
        loop {
            let round: Vec<Trial> =
                generated.iter_mut().filter_map(Iterator::next).map(trial).collect();
            if round.is_empty() {
                return trials;
            }
            trials.extend(round);
        }
    }

    fn schedules(&self) -> u32 {
        if self.device.environment().backend == BackendKind::Cuda {
            0
        } else {
            self.arguments.schedules
        }
    }

    /// The result of each trial, from the journal or from a run now.
    fn run(&self, trials: &[Trial]) -> Result<schedule::Fates> {
        if !self.arguments.only.is_empty() {
            return self.run_all(trials, None);
        }
        let mut journal = Journal::open(&self.folder(), &self.device, self.arguments.resume)?;
        let mut fates =
            trials.iter().map(|trial| journal.known(trial)).collect::<Result<schedule::Fates>>()?;
        let is_left =
            |(trial, fate): (&Trial, &Option<MutantRecord>)| fate.is_none().then(|| trial.clone());
        let left: Vec<Trial> = trials.iter().zip(&fates).filter_map(is_left).collect();
        if left.len() < trials.len() && !self.arguments.json {
            detailln!(
                "{} of {} mutants were judged before (--resume)",
                trials.len() - left.len(),
                trials.len()
            );
        }
        let mut now = self.run_all(&left, Some(&mut journal))?.into_iter();
        fates
            .iter_mut()
            .filter(|fate| fate.is_none())
            .for_each(|fate| *fate = now.next().flatten());
        Ok(fates)
    }

    fn run_all(&self, trials: &[Trial], journal: Option<&mut Journal>) -> Result<schedule::Fates> {
        let on_gpu = self.device.environment().backend == BackendKind::Cuda;
        let cores = cores();
        let schedule = Schedule {
            program: this_program,
            arguments: self.child_arguments(),
            jobs: self.arguments.jobs.unwrap_or(if on_gpu { 1 } else { cores }),
            time_budget: self.arguments.time_budget.map(Duration::from_secs),
            patience: PATIENCE,
        };
        let bar = progress(trials.len(), "mutants");
        let journal = Mutex::new(journal);
        let done = |trial: &Trial, record: &MutantRecord| {
            if let Some(journal) = journal.lock().unwrap_or_else(|e| e.into_inner()).as_mut() {
                journal.append(trial, record)?;
            }
            let is_seen = matches!(record.status, MutantStatus::Killed | MutantStatus::Equivalent);
            let is_told = !is_seen || !self.arguments.only.is_empty();
            if is_told && !self.arguments.json {
                bar.suspend(|| print_fate(record));
            }
            bar.inc(1);
            Ok(())
        };
        let fates = schedule::run(&schedule, trials, self.device.tree(), &done);
        bar.finish_and_clear();
        fates
    }

    /// The folder of the journal and the report.
    fn folder(&self) -> PathBuf {
        self.arguments.into.as_deref().map_or_else(|| self.arguments.out.clone(), folder_of)
    }

    fn child_arguments(&self) -> Vec<String> {
        let backend = self.device.environment().backend.to_string();
        let memory = size::limit().number().to_string();
        let arguments = ["mutants", "--trial", "--backend", &backend, "--memory", &memory];
        let mut arguments = arguments.map(str::to_owned).to_vec();
        if let Some(kernels) = &self.arguments.device.kernels {
            arguments.extend(["--kernels".to_owned(), kernels.display().to_string()]);
        }
        arguments
    }

    fn conclude(self, trials: &[Trial], fates: schedule::Fates) -> Result<Exit> {
        let out = self.folder();
        let mut plans = self.plans;
        let mut records: Vec<MutantRecord> = Vec::new();
        for (trial, fate) in trials.iter().zip(fates) {
            match fate {
                Some(record) => records.push(record),
                None => count_not_run(&mut plans, &trial.subject),
            }
        }
        records.extend(plans.iter().flat_map(|plan| plan.equivalent.iter().cloned()));
        if !self.arguments.only.is_empty() {
            if self.arguments.json {
                output::json(&records)?;
            }
            let missed = records.iter().any(|record| record.status != MutantStatus::Killed);
            let left_out = report_left_out(&self.arguments.only, &records, &plans);
            return Ok(if missed || left_out { Exit::Disagreed } else { Exit::Agreed });
        }
        let false_equivalents = self.arguments.check_equivalents
            && report_false_equivalents(&mut records, self.arguments)?;
        let matrix = KillMatrixRecord {
            floor: self.arguments.floor,
            seed: self.arguments.seed,
            sample: self.arguments.sample.map(|sample| sample as u64),
            schedules: self.arguments.schedules,
            all_checks: self.arguments.all_checks,
            operators: plans.iter().filter_map(|plan| plan.counts.clone()).collect(),
        };
        let skips = plans.into_iter().flat_map(|plan| plan.skips).collect();
        let fresh = Report {
            schema_version: SCHEMA_VERSION,
            command: command_line().join(" "),
            started_unix: self.started_unix,
            seconds: self.start.elapsed().as_secs_f64(),
            revision: revision(&self.device),
            environment: self.device.environment().clone(),
            profile: "mutants".into(),
            seed: self.arguments.seed,
            schedules: self.arguments.schedules,
            operators: self.operators.iter().map(|operator| operator.describe()).collect(),
            cases: self.known.into_iter().flatten().map(|known| known.record).collect(),
            benchmarks: Vec::new(),
            ceilings: None,
            mutants: records,
            kill_matrix: Some(matrix),
            skips,
            unsupported: Vec::new(),
            unfinished: None,
            saved: Vec::new(),
            base: None,
            shards: Vec::new(),
        };
        let report = match self.target {
            Some(target) => joined(target, fresh),
            None => fresh,
        };
        report::write_all(&report, &out)
            .with_context(|| format!("writing the report to {}", out.display()))?;
        if self.arguments.json {
            output::json(&as_json(&report, &out))?;
        } else {
            summarise(&report, &out);
        }
        let passed = shortfalls(&report).next().is_none() && !false_equivalents;
        Ok(if passed { Exit::Agreed } else { Exit::Disagreed })
    }
}

/// The report that the matrix joins, if it has the same kernels and backend.
fn same_kernels(path: &Path, device: &Device) -> Result<Report> {
    let report = diff::read(path)?;
    let (theirs, ours) = (&report.revision.kernels_digest, device.tree().digest());
    if *theirs != ours {
        bail!(
            "--into {}: a report of other kernels ({theirs:.12}, not {ours:.12})",
            path.display()
        );
    }
    let (theirs, ours) = (report.environment.backend, device.environment().backend);
    if theirs != ours {
        bail!("--into {}: a report of backend {theirs}, not {ours}", path.display());
    }
    Ok(report)
}

fn folder_of(path: &Path) -> PathBuf {
    if path.is_dir() {
        path.to_owned()
    } else {
        path.parent().map_or_else(PathBuf::new, Path::to_owned)
    }
}

/// `target` with the mutants of `fresh`, which replace those of the same operators.
fn joined(target: Report, fresh: Report) -> Report {
    let swept: BTreeSet<String> =
        fresh.operators.iter().map(|operator| operator.name.clone()).collect();
    let mut report = target;
    report.mutants.retain(|mutant| !swept.contains(&mutant.operator));
    report.mutants.extend(fresh.mutants);
    let kept = report.kill_matrix.take().into_iter().flat_map(|matrix| matrix.operators);
    let kept: Vec<_> = kept.filter(|entry| !swept.contains(&entry.operator)).collect();
    report.kill_matrix = fresh.kill_matrix.map(|mut matrix| {
        matrix.operators.splice(0..0, kept);
        matrix
    });
    report.skips.retain(|skip| !skip.what.contains("mutants"));
    report.skips.extend(fresh.skips);
    report
}

/// Every operator's cases, run on the unmutated kernels.
fn know_cases(
    arguments: &MutantsArguments,
    device: &Device,
    operators: &[&'static crate::operator::AnyOperator],
    regressions: &Regressions,
    planted: &[Mutant],
    needs_cases: impl Fn(&str) -> bool,
) -> Result<Vec<Vec<KnownCase>>> {
    let on_gpu = device.environment().backend == BackendKind::Cuda;
    let schedules = if on_gpu { 0 } else { arguments.schedules };
    let options = CheckOptions::of_kernels(schedules);
    let mut known = Vec::new();
    for operator in operators {
        if !needs_cases(operator.name()) {
            known.push(Vec::new());
            continue;
        }
        let mut collected = cases::collect(operator, regressions, planted)?;
        collected.retain(|(case, _)| operator.cannot_run(case, device.environment()).is_none());
        let bar = progress(collected.len(), operator.name());
        let run = |(case, origin)| {
            let one = cases::know(case, origin, device, options);
            bar.inc(1);
            one
        };
        known.push(collected.into_iter().map(run).collect());
        bar.finish_and_clear();
    }
    Ok(known)
}

/// Rejects unknown ids before minutes are spent.
fn refuse_unknown_ids(
    only: &[String],
    planted: &[Mutant],
    others: &[Mutant],
    generated: &[(String, Vec<GeneratedMutant>)],
) -> Result<()> {
    let generated = generated.iter().flat_map(|(_, mutants)| mutants).map(|mutant| &mutant.id);
    let known: BTreeSet<&String> =
        planted.iter().map(|mutant| &mutant.id).chain(generated).collect();
    match only.iter().find(|id| !known.contains(id)) {
        Some(id) => {
            if let Some(Mutant { operator, .. }) = others.iter().find(|mutant| mutant.id == *id) {
                let why = "which is a chain without kernels of its own or not among --ops";
                bail!(
                    "--only {id}: it is planted for {operator}, {why}; the test mutant::{id} runs it"
                )
            }
            // An id's hash follows the text of its line. After an edit of the line the user looks
            // for the new ids.
            let stem = id.rsplit_once(':').map_or(id.as_str(), |(stem, _)| stem);
            let near: Vec<_> = known
                .iter()
                .filter(|known| known.starts_with(stem))
                .take(8)
                .map(|id| id.as_str())
                .collect();
            let hint = if near.is_empty() {
                String::new()
            } else {
                format!("; there is {}", near.join(", "))
            };
            bail!("--only {id}: no such mutant{hint}")
        }
        None => Ok(()),
    }
}

/// Reports which of the requested mutants did not run, and why; returns whether any did not.
fn report_left_out(only: &[String], records: &[MutantRecord], plans: &[Plan]) -> bool {
    let reasons: BTreeSet<&str> =
        plans.iter().flat_map(|plan| &plan.skips).map(|skip| skip.why.as_str()).collect();
    let reasons = Vec::from_iter(reasons).join("; ");
    let left_out: Vec<_> =
        only.iter().filter(|id| records.iter().all(|record| record.id != **id)).collect();
    left_out.iter().for_each(|id| errln!("{id} did not run: {}", printable(&reasons)));
    !left_out.is_empty()
}

/// Keeps only the mutants with the given ids, if ids are given.
fn keep_only(plans: &mut [Plan], only: &[String]) {
    if !only.is_empty() {
        let is_wanted = |subject: &Subject| only.iter().any(|id| id == subject.id());
        plans.iter_mut().for_each(|plan| plan.subjects.retain(is_wanted));
    }
}

fn count_not_run(plans: &mut [Plan], subject: &Subject) {
    let (operator, kind) = match subject {
        Subject::Planted(mutant) => (&mutant.operator, "planted"),
        Subject::Generated(mutant, _) => (&mutant.operator, "generated"),
    };
    let concerned = plans
        .iter_mut()
        .find(|plan| plan.counts.as_ref().is_some_and(|counts| counts.operator == *operator));
    let Some(plan) = concerned else { return };
    if let (Some(counts), "generated") = (&mut plan.counts, kind) {
        counts.not_run += 1;
    }
    let what = format!("{kind} mutants of {operator}");
    Skip::count(&mut plan.skips, what, OUT_OF_TIME);
}

const OUT_OF_TIME: &str = "the time budget was spent (--time-budget)";

/// Reports the mutants that are listed as equivalent but were killed. The records of the others get
/// the reason of the list.
fn report_false_equivalents(
    records: &mut [MutantRecord],
    arguments: &MutantsArguments,
) -> Result<bool> {
    let equivalents = Equivalents::load(&planted(arguments.mutants.as_deref())?.0)?;
    let mut found = false;
    for record in records {
        let Some(reason) = equivalents.reason(&record.id) else { continue };
        match record.status {
            MutantStatus::Killed => {
                errln!("not equivalent: {} is killed by {}", record.id, record.killers());
                found = true;
            }
            _ => (record.status, record.reason) = (MutantStatus::Equivalent, reason.to_owned()),
        }
    }
    Ok(found)
}

fn progress(length: usize, message: &str) -> ProgressBar {
    let bar =
        if output::is_quiet() { ProgressBar::hidden() } else { ProgressBar::new(length as u64) };
    if let Ok(style) = ProgressStyle::with_template("{msg:18} {wide_bar} {pos}/{len} {elapsed}") {
        bar.set_style(style);
    }
    bar.set_message(message.to_owned());
    bar
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
    shortfalls(report)
        .for_each(|reason| outln!("{}: {reason}", output::bad("below what is required")));
    detailln!("report: {}", out.join("index.html").display());
}
