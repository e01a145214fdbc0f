//! `parity external` and `parity external-worker`.

use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{ArgGroup, Args};
use dsv4_runtime::{BackendKind, Device, Environment};
use serde::Deserialize;
use serde_json::json;

use super::ci::CiArguments;
use super::progress::Terminal;
use super::sweep::{Only, SweepArguments};
use super::{DeviceArguments, Exit, MemoryArguments, outcome, output, replay};
use crate::case::condition::Condition;
use crate::case::shell::quoted;
use crate::external::adapter::Adapter;
use crate::external::crew::Crew;
use crate::external::definition::Task;
use crate::external::process::{Call, OneShot, Worker};
use crate::external::{self, External, ExternalOptions};
use crate::judge::checks::CheckOptions;
use crate::judge::runner::Runner;
use crate::operator::AnyOperator;
use crate::operators::registry;
use crate::record::journal::Shard;
use crate::record::{Report, Verdict, all_cases_of};
use crate::report::skips::by_reason;
use crate::report::{self, times, traces};
use crate::sweep::regressions::fixtures_dir;
use crate::sweep::session::{Runners, Session, SweepRequest};
use crate::sweep::{LeftOut, SweepOptions};

/// The most ranks of a case.
const MOST_RANKS: i64 = crate::operators::ranks::MOST_RANKS as i64;
/// Random schedules of an external process: none.
const SCHEDULES: u32 = 0;

/// Options of `parity external`.
#[derive(Clone, Debug, Args)]
#[command(
    group = ArgGroup::new("kernel").args(["worker", "cmd", "solution"]).required(true),
    override_usage = "parity external [OPTIONS] --op <OP> --worker <COMMAND>
       parity external [OPTIONS] --op <OP> --cmd <COMMAND>
       parity external [OPTIONS] --solution <FILE> --definition <FILE>",
    after_help = "\
The command gets a folder with case.json, inputs.safetensors and expected.json, and writes outputs.safetensors into \
it. fixtures/external has a Python package that does so, and examples.

A worker reads lines {\"dir\": …} from standard input and answers each on standard output: {\"ok\": true}, \
{\"error\": \"why\"}, or {\"unsupported\": \"why\"} for a case that its kernel is not for, which is a counted skip.

With --ranks N each rank of a case has a process, whose environment has RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and \
MASTER_PORT, and whose case.json has its `rank`. It gets the rows of its own tokens, and exchanges others itself.

Exit codes: 0 all agreed, 1 disagreement, 2 bad usage or input, or nothing compared."
)]
pub struct ExternalArguments {
    /// Operator that the kernel implements
    #[arg(
        long,
        value_name = "OP",
        default_value = "",
        hide_default_value = true,
        required_unless_present = "solution"
    )]
    op: String,
    /// Command that is started once, and answers one line for each run of a case
    #[arg(long, value_name = "COMMAND")]
    worker: Option<String>,
    /// Command that is started for each run of a case; {dir} is the run's folder
    #[arg(long, value_name = "COMMAND")]
    cmd: Option<String>,
    /// Run a process of the command for each of this many ranks of each case, of an operator that
    /// several ranks compute
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u16).range(1..=MOST_RANKS),
        conflicts_with_all = ["solution", "definition", "only"]
    )]
    ranks: Option<u16>,
    /// A Solution of FlashInfer-Bench's format in Python, as JSON: its forward is judged
    #[arg(long, value_name = "FILE", requires = "definition", conflicts_with_all = ["op", "case"])]
    solution: Option<PathBuf>,
    /// The Solution's Definition, from `parity ops NAME --trace-definition`
    #[arg(long, value_name = "FILE", requires = "solution")]
    definition: Option<PathBuf>,
    /// Write a Trace of each case to this file, a line of JSON each
    #[arg(long, value_name = "FILE", requires_all = ["solution", "time"])]
    traces: Option<PathBuf>,
    /// A second worker: compare the bits of both, tensor by tensor, and nothing with the oracle
    ///
    /// The adapter is of both.
    #[arg(long, value_name = "COMMAND", requires = "worker", conflicts_with_all = ["time", "only"])]
    beside: Option<String>,
    /// TOML file of conventions that differ
    #[arg(long, value_name = "FILE")]
    adapter: Option<PathBuf>,
    /// The kernel has no gradients
    #[arg(long)]
    forward_only: bool,
    /// Ask the worker for its own times, and report them next to those of our kernels on the same
    /// GPU
    #[arg(long)]
    time: bool,
    /// Seconds that one run of a case may take
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0)]
    time_limit: f64,
    #[command(flatten)]
    sweep: SweepArguments,
    /// Make only this check, without the oracle: rows in other batches, bit for bit
    #[arg(long, value_enum, value_name = "CHECK")]
    only: Option<Only>,
    /// Run these instead of a sweep: a case as one line of JSON, or a file with one case a line
    #[arg(long, value_name = "CASE|FILE", conflicts_with_all = ["cases", "seed"])]
    case: Option<String>,
    /// Folder for report.json, index.html, summary.md and records.jsonl
    #[arg(long, default_value = "reports/external", value_name = "DIR")]
    out: PathBuf,
    /// Sweep only cases whose fields meet a condition, such as 'head_dim = 512 and topk % 128 = 0'
    ///
    /// With where = "…" in the adapter both must hold. Cases are drawn until enough of them meet
    /// it.
    #[arg(long = "where", value_name = "CONDITION")]
    condition: Option<Condition>,
    /// Sweep cases without tokens, rows or keys, too
    ///
    /// Without it they are counted skips: few kernels are called with nothing.
    #[arg(long)]
    empty: bool,
    /// Run part I of N, counted from 0; `parity merge` joins the parts
    #[arg(long, value_name = "I/N")]
    shard: Option<Shard>,
    /// A report.json or records.jsonl whose costs balance the shards; the same file for each
    #[arg(long, value_name = "FILE", requires = "shard")]
    costs: Option<PathBuf>,
    /// Continue the sweep that was interrupted in --out; start one if there is none
    #[arg(long)]
    resume: bool,
    /// Keep the folder of every run of a case in this one
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Folder of saved failing cases; they run first, and none is added
    #[arg(long, value_name = "DIR")]
    regressions: Option<PathBuf>,
    #[command(flatten)]
    ci: CiArguments,
    #[command(flatten)]
    pub(super) memory: MemoryArguments,
}

/// Sweeps an external kernel and writes the report; the exit code is 1 when something disagrees.
pub fn execute(arguments: &ExternalArguments) -> Result<Exit> {
    let (Some(solution), Some(definition)) = (&arguments.solution, &arguments.definition) else {
        return judge(arguments, None);
    };
    let task = Task::read(solution, definition)?;
    let arguments = ExternalArguments {
        op: task.operator.clone(),
        worker: Some(solution_worker(solution, definition)),
        condition: Condition::both(arguments.condition.clone(), Some(task.condition.clone())),
        forward_only: true,
        ..arguments.clone()
    };
    judge(&arguments, Some(&task))
}

/// The command that serves a Solution.
fn solution_worker(solution: &Path, definition: &Path) -> String {
    let package = fixtures_dir().join("external");
    let [package, solution, definition] =
        [&package, solution, definition].map(|path| quoted(&path.display().to_string()));
    let path = format!("PYTHONPATH={package}\"${{PYTHONPATH:+:$PYTHONPATH}}\"");
    format!("{path} python3 -m dsv4_external.solution {solution} {definition}")
}

/// Sweeps a kernel; the Traces of a Solution go to their file.
fn judge(arguments: &ExternalArguments, task: Option<&Task>) -> Result<Exit> {
    let one_of_several =
        arguments.shard.map(|_| "--shard").or(arguments.resume.then_some("--resume"));
    arguments.sweep.seed.announce(one_of_several)?;
    let operator = registry::find(&arguments.op)?;
    refuse_ranks(arguments, operator)?;
    let (external, condition) = open(arguments)?;
    let left_out = LeftOut { empty: !arguments.empty, hostile: !external.takes_hostile() };
    external.start().map_err(|error| anyhow::anyhow!(error.message))?;
    let session = planned(arguments, operator, condition, left_out, external.environment())?;
    external
        .check_adapter(&operator.describe(), session.cases())
        .with_context(|| adapter_name(arguments))?;
    // Before an existing report is replaced.
    external.still_runs().map_err(|error| anyhow::anyhow!(error.message))?;
    let mut shown = Terminal::new(&arguments.out, true);
    let report = session.run(&[operator], Runners::One(&external), Vec::new(), &mut shown)?;
    let none_ran = report.cases.is_empty() && report.unsupported.is_empty();
    if let Some(skip) =
        report.skips.iter().find(|skip| none_ran && skip.what == all_cases_of(&arguments.op))
    {
        // No case ran: a report would be empty.
        bail!("{}", skip.why);
    }
    report::write_all(&report, &arguments.out)
        .with_context(|| format!("writing the report to {}", arguments.out.display()))?;
    if let (Some(task), Some(path)) = (task, &arguments.traces) {
        let lines = traces::lines(task, &report).into_iter().map(|line| format!("{line}\n"));
        std::fs::write(path, lines.collect::<String>())
            .with_context(|| format!("--traces {}", path.display()))?;
    }
    outcome::print_failures(&report, &arguments.out);
    print_skips(&report, &arguments.out);
    if let Some(line) = times::line(&report) {
        detailln!("{line}");
    }
    outcome::summarise(&report, &arguments.out);
    arguments.ci.finish(&report)?;
    outcome::exit_of(&report, arguments.shard.is_none())
}

/// Rejects `--ranks` for an operator of one device.
fn refuse_ranks(arguments: &ExternalArguments, operator: &AnyOperator) -> Result<()> {
    let Some(ranks) = arguments.ranks.filter(|_| !operator.has_ranks()) else { return Ok(()) };
    let of_ranks = registry::OPERATORS.iter().filter(|operator| operator.has_ranks());
    let of_ranks: Vec<_> = of_ranks.map(|operator| operator.name()).collect();
    bail!(
        "--ranks {ranks}: one device computes {}; several ranks compute {}",
        operator.name(),
        of_ranks.join(", ")
    );
}

/// Prints what was skipped, a line for each reason. Where cases fail, it prints only the number.
fn print_skips(report: &Report, out: &Path) {
    let reasons = by_reason(&report.skips);
    if report.cases.iter().all(|case| case.verdict() == Verdict::Pass) {
        for skip in &reasons {
            detailln!("skipped {} times: {}: {}", skip.count, skip.what, skip.why);
        }
    } else if !reasons.is_empty() {
        let skipped: u64 = reasons.iter().map(|skip| skip.count).sum();
        detailln!(
            "skipped {skipped} times, for {} reasons: {}",
            reasons.len(),
            out.join("summary.md").display()
        );
    }
}

fn adapter_name(arguments: &ExternalArguments) -> String {
    arguments
        .adapter
        .as_deref()
        .map_or("the cases".into(), |path| format!("--adapter {}", path.display()))
}

fn open(arguments: &ExternalArguments) -> Result<(External, Option<Condition>)> {
    let seconds = arguments.time_limit;
    let time_limit = Duration::try_from_secs_f64(seconds).ok().filter(|limit| !limit.is_zero());
    let Some(time_limit) = time_limit else {
        bail!("--time-limit {seconds} must be finite and above 0")
    };
    let adapter = match &arguments.adapter {
        None => Adapter::default(),
        Some(path) => {
            let text = std::fs::read_to_string(path).with_context(|| adapter_name(arguments))?;
            Adapter::parse(&text)
                .map_err(anyhow::Error::msg)
                .with_context(|| adapter_name(arguments))?
        }
    };
    let ranks = arguments.ranks.map(usize::from);
    let worker = |command: &String| -> Box<dyn Call> {
        match ranks {
            Some(ranks) => Box::new(Crew::of_workers(command, time_limit, ranks)),
            None => Box::new(Worker::new(command.clone(), time_limit)),
        }
    };
    let (name, call): (_, Box<dyn Call>) = match (&arguments.cmd, &arguments.worker) {
        (Some(command), _) => {
            if !command.contains("{dir}") {
                bail!(
                    "--cmd `{command}` does not say {{dir}}: the command would not know its folder"
                );
            }
            match ranks {
                Some(ranks) => (command, Box::new(Crew::of_commands(command, time_limit, ranks))),
                None => (command, Box::new(OneShot::new(command.clone(), time_limit))),
            }
        }
        (None, Some(command)) => (command, worker(command)),
        (None, None) => bail!("--worker or --cmd is missing"),
    };
    if name.trim().is_empty() {
        bail!("--worker is empty");
    }
    if arguments.beside.as_ref().is_some_and(|beside| beside.trim().is_empty()) {
        bail!("--beside is empty");
    }
    let other = |command: &String| {
        let options = ExternalOptions {
            name: command.clone(),
            adapter: adapter.clone(),
            forward_only: arguments.forward_only,
            ranks,
            keep: arguments.keep.as_ref().map(|dir| dir.join("beside")),
            ..ExternalOptions::default()
        };
        Box::new(External::new(worker(command), options))
    };
    let beside = arguments.beside.as_ref().map(other);
    let condition = Condition::both(arguments.condition.clone(), adapter.condition().cloned());
    let options = ExternalOptions {
        name: ranks.map_or_else(|| name.clone(), |ranks| format!("{name}, {ranks} ranks")),
        arguments: replayed(arguments),
        adapter,
        forward_only: arguments.forward_only,
        time: arguments.time,
        ranks,
        ours: arguments.time.then(|| {
            // The emulator's times mean nothing.
            let ours = Device::open(BackendKind::Cuda, dsv4_kernels::device_options());
            ours.map_err(|error| {
                format!("there is no GPU for them, and the emulator's times say nothing: {error}")
            })
        }),
        beside,
        keep: arguments.keep.clone(),
    };
    Ok((External::new(call, options), condition))
}

/// The arguments that decide how a case is judged, quoted for a shell.
fn replayed(arguments: &ExternalArguments) -> String {
    let adapter = arguments.adapter.as_ref().map(|path| path.display().to_string());
    let mut text = format!("--op {}", arguments.op);
    if let Some(ranks) = arguments.ranks {
        text += &format!(" --ranks {ranks}");
    }
    let commands =
        [("cmd", &arguments.cmd), ("worker", &arguments.worker), ("beside", &arguments.beside)];
    for (option, value) in commands.into_iter().chain([("adapter", &adapter)]) {
        if let Some(value) = value {
            text += &format!(" --{option} {}", quoted(value));
        }
    }
    if arguments.forward_only {
        text += " --forward-only";
    }
    if let Some(Only::BatchInvariance) = arguments.only {
        text += " --only batch_invariance";
    }
    text + &format!(" --time-limit {}", arguments.time_limit)
}

/// The requested sweep, of the operator's cases or of the given ones.
fn planned(
    arguments: &ExternalArguments,
    operator: &'static AnyOperator,
    condition: Option<Condition>,
    left_out: LeftOut,
    environment: &Environment,
) -> Result<Session> {
    let ExternalArguments { op, sweep, costs, out, .. } = arguments;
    // The harness cannot schedule another process at random: the checks report and count it.
    let checks = CheckOptions::everything(sweep.profile().schedules());
    let (only_batches, only_beside) = (arguments.only.is_some(), arguments.beside.is_some());
    let checks = CheckOptions { only_batches, only_beside, ..checks };
    let options = SweepOptions {
        condition,
        left_out,
        ranks: arguments.ranks.map(usize::from).into_iter().collect(),
        ..sweep.options(checks, arguments.regressions.as_deref())
    };
    let request = SweepRequest {
        costs: costs.clone(),
        shard: arguments.shard.unwrap_or(Shard::WHOLE),
        resume: arguments.resume,
        schedules: SCHEDULES,
        ..sweep.request(op, out)
    };
    let Some(given) = &arguments.case else {
        return Session::of_operators(request, &[operator], options, environment);
    };
    let cases = replay::cases_of(given)?;
    for case in &cases {
        if case.operator != arguments.op {
            bail!("--case is about `{}`, --op about `{}`", case.operator, arguments.op);
        }
        // All cases are prepared before one runs: a malformed line is reported before minutes are
        // spent.
        registry::prepare(case)?;
        let own = case.fields.get("ranks").and_then(|ranks| ranks.as_u64()).unwrap_or(1);
        if let Some(ranks) = arguments.ranks.filter(|&ranks| u64::from(ranks) != own) {
            bail!("--case has {own} ranks, --ranks says {ranks}");
        }
    }
    Session::of_cases(request, cases, options)
}

/// Options of `parity external-worker`.
#[derive(Debug, Args)]
pub struct WorkerArguments {
    /// Answer the request in this folder, and end; without it, one for each line of standard input
    #[arg(value_name = "DIR")]
    dir: Option<PathBuf>,
    #[command(flatten)]
    pub(super) device: DeviceArguments,
}

/// A request of the long-lived mode.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    dir: PathBuf,
}

/// Answers requests with this project's kernels until standard input ends.
pub fn answer(arguments: &WorkerArguments) -> Result<Exit> {
    let device = arguments.device.open()?;
    let answer = |dir: &Path| external::answer(dir, &device);
    if let Some(dir) = &arguments.dir {
        answer(dir).map_err(anyhow::Error::msg).with_context(|| dir.display().to_string())?;
        return Ok(Exit::Agreed);
    }
    for line in std::io::stdin().lock().lines() {
        let line = line.context("reading a request")?;
        let request: Result<Request, _> = serde_json::from_str(&line);
        let answered = request
            .map_err(|e| format!("`{line}` is no request: {e}"))
            .and_then(|r| answer(&r.dir));
        let reply = match answered {
            Ok(()) => json!({ "ok": true }),
            Err(error) => json!({ "error": error }),
        };
        outln!("{reply}");
        output::flush();
    }
    Ok(Exit::Agreed)
}
