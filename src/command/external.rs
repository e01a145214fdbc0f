//! `parity external` and `parity external-worker`.

use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::{ArgGroup, Args};
use dsv4_kernels::runtime::{BackendKind, Device, DeviceOptions, Environment};
use serde::Deserialize;
use serde_json::json;

use super::ci::CiArguments;
use super::run::{self, RecordWriter, Runners};
use super::sweep::SweepArguments;
use super::{DeviceArguments, Exit, MemoryArguments, output, replay};
use crate::case::condition::Condition;
use crate::external::adapter::Adapter;
use crate::external::process::{Call, OneShot, Worker};
use crate::external::{self, External, ExternalOptions};
use crate::judge::checks::CheckOptions;
use crate::judge::runner::Runner;
use crate::operator::AnyOperator;
use crate::operators::registry;
use crate::record::journal::{self, PlanRecord, Remembered, RunDescription, Shard};
use crate::record::{Report, Verdict, all_cases_of};
use crate::report::skips::by_reason;
use crate::report::{self, times};
use crate::sweep::shard::{Costs, Plan};
use crate::sweep::{self, PlannedCase, SweepOptions};

/// Random schedules of a process that is not ours.
const SCHEDULES: u32 = 0;

/// Options of `parity external`.
#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("kernel").args(["worker", "cmd"]).required(true),
    after_help = "\
The command gets a folder with case.json, inputs.safetensors and expected.json, and writes outputs.safetensors into \
it. fixtures/external has a Python package that does so, and examples.

A worker reads lines {\"dir\": …} from standard input and answers each on standard output: {\"ok\": true}, \
{\"error\": \"why\"}, or {\"unsupported\": \"why\"} for a case that its kernel is not for, which is a counted skip.

Exit codes: 0 all agreed, 1 disagreement, 2 bad usage or input, or nothing compared."
)]
pub struct ExternalArguments {
    /// Operator that the kernel implements
    #[arg(long, value_name = "OP")]
    op: String,
    /// Command that is started once, and answers one line for each run of a case
    #[arg(long, value_name = "COMMAND")]
    worker: Option<String>,
    /// Command that is started for each run of a case; {dir} is the run's folder
    #[arg(long, value_name = "COMMAND")]
    cmd: Option<String>,
    /// TOML file of conventions that differ
    #[arg(long, value_name = "FILE")]
    adapter: Option<PathBuf>,
    /// The kernel has no gradients
    #[arg(long)]
    forward_only: bool,
    /// Ask the worker for its own times, and report them next to those of our kernels on the same GPU
    #[arg(long)]
    time: bool,
    /// Seconds that one run of a case may take
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0)]
    time_limit: f64,
    #[command(flatten)]
    sweep: SweepArguments,
    /// Run these instead of a sweep: a case as one line of JSON, or a file with one case a line
    #[arg(long, value_name = "CASE|FILE", conflicts_with_all = ["cases", "seed"])]
    case: Option<String>,
    /// Folder for report.json, index.html, summary.md and records.jsonl
    #[arg(long, default_value = "reports/external", value_name = "DIR")]
    out: PathBuf,
    /// Sweep only cases whose fields meet a condition, such as 'head_dim = 512 and topk % 128 = 0'
    ///
    /// With where = "…" in the adapter both must hold. Cases are drawn until enough of them meet it.
    #[arg(long = "where", value_name = "CONDITION")]
    condition: Option<Condition>,
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

/// Sweeps an external kernel and writes the report; 1 when something disagrees.
pub fn execute(arguments: &ExternalArguments) -> Result<Exit> {
    let one_of_several = arguments.shard.map(|_| "--shard").or(arguments.resume.then_some("--resume"));
    arguments.sweep.seed.announce(one_of_several)?;
    let operator = registry::find(&arguments.op)?;
    let (external, condition) = open(arguments)?;
    external.start().map_err(|error| anyhow::anyhow!(error.message))?;
    let started_unix = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let start = Instant::now();
    // Nobody schedules another process at random: the checks say so, and count it. And what breaks somebody else's kernel
    // is not for ours to remember.
    let checks = CheckOptions::everything(arguments.sweep.profile().schedules());
    let options = SweepOptions { condition, ..arguments.sweep.options(checks, arguments.regressions.as_deref()) };
    let begun = if arguments.resume { journal::read_plan(&arguments.out)? } else { None };
    let (plan, remembered) = plan(arguments, operator, &options, external.environment(), begun.as_ref())?;
    let planned = plan.cases.iter().map(|planned| &planned.case);
    external.check_adapter(&operator.describe(), planned).with_context(|| adapter_name(arguments))?;
    // Before a report that is there is begun anew.
    external.still_runs().map_err(|error| anyhow::anyhow!(error.message))?;
    let shard = arguments.shard.unwrap_or(Shard::WHOLE);
    let run = RunDescription {
        command: arguments.sweep.seed.command(),
        started_unix,
        profile: arguments.sweep.profile().name().to_owned(),
        seed: arguments.sweep.seed.number(),
        schedules: SCHEDULES,
        operators: vec![operator.describe()],
        // They are skips of the run, not of each shard: the first one says so.
        skips: if shard.index == 0 { plan.skips.clone() } else { Vec::new() },
    };
    let settings = run::settings(&arguments.op, &arguments.sweep, arguments.costs.as_deref(), &options, &remembered)?;
    let record = PlanRecord { settings, ..run::plan_record(&plan, shard, remembered, &external, run) };
    let mut writer = RecordWriter::open(&arguments.out, begun.as_ref(), &record)?;
    writer.hold_to(&plan, shard)?;
    writer.say_when_interrupted(&arguments.out, record.shard_cases)?;
    let taken_over: f64 = writer.cases.iter().map(|case| case.kernel_seconds + case.oracle_seconds).sum();
    let left_out = run::run_shard(plan, shard, Runners::One(&external), &options, &mut writer)?;
    let cases = writer.finish()?;
    if let (true, Some(skip)) =
        (cases.is_empty(), left_out.iter().find(|skip| skip.what == all_cases_of(&arguments.op)))
    {
        // No case has run: it would be no report of anything.
        bail!("{}", skip.why);
    }
    let mut report = record.report(cases, start.elapsed().as_secs_f64() + taken_over);
    report.skips.extend(left_out);
    report::write_all(&report, &arguments.out)
        .with_context(|| format!("writing the report to {}", arguments.out.display()))?;
    run::print_failures(&report, &arguments.out);
    print_skips(&report, &arguments.out);
    if let Some(line) = times::line(&report) {
        detailln!("{line}");
    }
    run::summarise(&report, &arguments.out);
    arguments.ci.finish(&report)?;
    run::exit_of(&report, arguments.shard.is_none())
}

/// Prints what was skipped, a line for each reason; how many there are, where failures have more to say.
fn print_skips(report: &Report, out: &Path) {
    let reasons = by_reason(&report.skips);
    if report.cases.iter().all(|case| case.verdict() == Verdict::Pass) {
        for skip in &reasons {
            detailln!("skipped {} times: {}: {}", skip.count, skip.what, skip.why);
        }
    } else if !reasons.is_empty() {
        let skipped: u64 = reasons.iter().map(|skip| skip.count).sum();
        detailln!("skipped {skipped} times, for {} reasons: {}", reasons.len(), out.join("summary.md").display());
    }
}

fn adapter_name(arguments: &ExternalArguments) -> String {
    arguments.adapter.as_deref().map_or("the cases".into(), |path| format!("--adapter {}", path.display()))
}

fn open(arguments: &ExternalArguments) -> Result<(External, Option<Condition>)> {
    let seconds = arguments.time_limit;
    let time_limit = Duration::try_from_secs_f64(seconds).ok().filter(|limit| !limit.is_zero());
    let Some(time_limit) = time_limit else { bail!("--time-limit {seconds} must be finite and above 0") };
    let adapter = match &arguments.adapter {
        None => Adapter::default(),
        Some(path) => {
            let text = std::fs::read_to_string(path).with_context(|| adapter_name(arguments))?;
            Adapter::parse(&text).map_err(anyhow::Error::msg).with_context(|| adapter_name(arguments))?
        }
    };
    let (name, call): (_, Box<dyn Call>) = match (&arguments.cmd, &arguments.worker) {
        (Some(command), _) => {
            if !command.contains("{dir}") {
                bail!("--cmd `{command}` does not say {{dir}}: the command would not know its folder");
            }
            (command, Box::new(OneShot { command: command.clone(), time_limit }))
        }
        (None, Some(command)) => (command, Box::new(Worker::new(command.clone(), time_limit))),
        (None, None) => bail!("--worker or --cmd is missing"),
    };
    if name.trim().is_empty() {
        bail!("--worker is empty");
    }
    let condition = Condition::both(arguments.condition.clone(), adapter.condition().cloned());
    let options = ExternalOptions {
        name: name.clone(),
        arguments: replayed(arguments),
        adapter,
        forward_only: arguments.forward_only,
        time: arguments.time,
        ours: arguments.time.then(|| {
            // Of the emulator's times nothing follows.
            let ours = Device::open(BackendKind::Cuda, DeviceOptions::default());
            ours.map_err(|error| format!("there is no GPU for them, and the emulator's times say nothing: {error}"))
        }),
        keep: arguments.keep.clone(),
    };
    Ok((External::new(call, options), condition))
}

/// The arguments that decide how a case is judged, quoted for a shell.
fn replayed(arguments: &ExternalArguments) -> String {
    let quoted = |text: &str| format!("'{}'", text.replace('\'', "'\\''"));
    let adapter = arguments.adapter.as_ref().map(|path| path.display().to_string());
    let mut text = format!("--op {}", arguments.op);
    for (option, value) in [("cmd", &arguments.cmd), ("worker", &arguments.worker), ("adapter", &adapter)] {
        if let Some(value) = value {
            text += &format!(" --{option} {}", quoted(value));
        }
    }
    if arguments.forward_only {
        text += " --forward-only";
    }
    text + &format!(" --time-limit {}", arguments.time_limit)
}

fn plan(
    arguments: &ExternalArguments,
    operator: &'static AnyOperator,
    options: &SweepOptions,
    environment: &Environment,
    begun: Option<&PlanRecord>,
) -> Result<(Plan, Remembered)> {
    let costs = arguments.costs.as_deref().map(Costs::read).transpose()?.unwrap_or_default();
    let count = arguments.shard.unwrap_or(Shard::WHOLE).count;
    // The schedules of a plan are those that the report names.
    let options = &SweepOptions { checks: CheckOptions { schedules: SCHEDULES, ..options.checks }, ..options.clone() };
    let Some(given) = &arguments.case else {
        let remembered = match begun {
            Some(begun) => begun.remembered.clone(),
            None => run::load_remembered(&[operator], &options.regressions)?,
        };
        return Ok((Plan::new(&[operator], &remembered, options, environment, count, &costs)?, remembered));
    };
    let cases = replay::cases_of(given)?;
    for case in &cases {
        if case.operator != arguments.op {
            bail!("--case is about `{}`, --op about `{}`", case.operator, arguments.op);
        }
        // All are prepared before one is run: a malformed line is reported before minutes are spent.
        registry::prepare(case)?;
    }
    let (mut cases, mut skips) = (cases.into_iter().map(PlannedCase::given).collect(), Vec::new());
    sweep::retain_matching(&mut cases, options, &mut skips)?;
    Ok((Plan { skips, ..Plan::of(cases, options, count, &costs)? }, Remembered::new()))
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

/// Answers requests with our own kernels until standard input ends.
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
        let answered = request.map_err(|e| format!("`{line}` is no request: {e}")).and_then(|r| answer(&r.dir));
        let reply = match answered {
            Ok(()) => json!({ "ok": true }),
            Err(error) => json!({ "error": error }),
        };
        outln!("{reply}");
        output::flush();
    }
    Ok(Exit::Agreed)
}
