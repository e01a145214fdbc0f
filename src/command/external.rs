//! `parity external` and `parity external-worker`.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::Args;
use dsv4_kernels::runtime::Environment;
use serde::Deserialize;
use serde_json::json;

use super::run::{self, RecordWriter};
use super::sweep::SweepArguments;
use super::{DeviceArguments, Exit, replay};
use crate::external::adapter::Adapter;
use crate::external::process::{Call, OneShot, Worker};
use crate::external::{self, External, ExternalOptions};
use crate::judge::checks::CheckOptions;
use crate::judge::runner::Runner;
use crate::operator::Operator;
use crate::operator::registry;
use crate::record::journal::{Remembered, Shard};
use crate::record::{CaseRecord, Report, SCHEMA_VERSION, Skip};
use crate::report;
use crate::sweep::shard::{Costs, Plan};
use crate::sweep::{PlannedCase, SweepOptions};

/// Options of `parity external`.
#[derive(Debug, Args)]
#[command(after_help = "\
The command gets a folder with case.json, inputs.safetensors and expected.json, and writes outputs.safetensors
into it; fixtures/external has a Python package that does so, and examples. A worker reads {\"dir\": …} lines from
standard input and answers each with {\"ok\":true} or {\"error\": …} on standard output.

Exit codes: 0 all agreed, 1 disagreement, 2 bad usage or input.")]
pub struct ExternalArguments {
    /// Operator that the kernel implements
    #[arg(long, value_name = "NAME")]
    op: String,
    /// Command to run for each run of a case; {dir} is its folder
    #[arg(long, value_name = "COMMAND", required_unless_present = "worker", conflicts_with = "worker")]
    cmd: Option<String>,
    /// Command to start once, which answers one line for each
    #[arg(long, value_name = "COMMAND")]
    worker: Option<String>,
    /// TOML file of conventions that differ
    #[arg(long, value_name = "FILE")]
    adapter: Option<PathBuf>,
    /// The kernel has no gradients
    #[arg(long)]
    forward_only: bool,
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
    /// Keep the folder of every run of a case there
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Folder of remembered failing cases; they run first, and none is added
    #[arg(long, value_name = "DIR")]
    regressions: Option<PathBuf>,
}

/// Sweeps somebody else's kernel and writes the report; 1 when something disagrees.
pub fn execute(arguments: &ExternalArguments) -> Result<Exit> {
    arguments.sweep.seed.announce(None)?;
    let operator = registry::find(&arguments.op)?;
    let external = open(arguments)?;
    let started_unix = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let start = Instant::now();
    // Nobody schedules another process at random: the checks say so, and count it. And what breaks somebody else's kernel
    // is not for ours to remember.
    let checks = CheckOptions::everything(arguments.sweep.profile.schedules());
    let options = arguments.sweep.options(checks, arguments.regressions.as_deref());
    let (plan, remembered) = plan(arguments, operator, &options, external.environment())?;
    external.check_adapter(plan.cases.iter().map(|planned| &planned.case)).with_context(|| adapter_name(arguments))?;
    let record = run::plan_record(&plan, Shard::WHOLE, remembered, &external);
    let mut writer = RecordWriter::open(&arguments.out, None, &record)?;
    let left_out = run::run_shard(plan, Shard::WHOLE, &external, &options, &mut writer);
    let cases = writer.finish()?;
    let seconds = start.elapsed().as_secs_f64();
    let report = Report {
        schema_version: SCHEMA_VERSION,
        command: arguments.sweep.seed.command(),
        started_unix,
        seconds,
        revision: record.identity.revision.clone(),
        environment: external.environment().clone(),
        profile: arguments.sweep.profile.name().to_owned(),
        seed: arguments.sweep.seed.number(),
        schedules: 0,
        operators: vec![operator.describe()],
        skips: skips(&cases).into_iter().chain(left_out).collect(),
        cases,
        benchmarks: Vec::new(),
        ceilings: None,
        mutants: Vec::new(),
        kill_matrix: None,
        shards: vec![run::shard_record(record, seconds)],
    };
    report::write_all(&report, &arguments.out)
        .with_context(|| format!("writing the report to {}", arguments.out.display()))?;
    run::summarise(&report, &arguments.out);
    for skip in &report.skips {
        println!("skipped {} times: {}: {}", skip.count, skip.what, skip.why);
    }
    run::exit_of(&report, true)
}

fn adapter_name(arguments: &ExternalArguments) -> String {
    arguments.adapter.as_deref().map_or("the cases".into(), |path| format!("--adapter {}", path.display()))
}

fn open(arguments: &ExternalArguments) -> Result<External> {
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
        (None, None) => bail!("--cmd or --worker is missing"),
    };
    if name.trim().is_empty() {
        bail!("--worker is empty");
    }
    let options = ExternalOptions {
        name: name.clone(),
        arguments: replayed(arguments),
        adapter,
        forward_only: arguments.forward_only,
        time: false,
        keep: arguments.keep.clone(),
    };
    Ok(External::new(call, options))
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
    operator: &'static dyn Operator,
    options: &SweepOptions,
    environment: &Environment,
) -> Result<(Plan, Remembered)> {
    let Some(given) = &arguments.case else {
        let remembered = run::load_remembered(&[operator], &options.regressions)?;
        return Ok((Plan::new(&[operator], &remembered, options, environment, 1, &Costs::default())?, remembered));
    };
    let cases = replay::cases_of(given)?;
    for case in &cases {
        if case.operator != arguments.op {
            bail!("--case is about `{}`, --op about `{}`", case.operator, arguments.op);
        }
        // All are prepared before one is run: a malformed line is reported before minutes are spent.
        registry::prepare(case)?;
    }
    let cases = cases.into_iter().map(PlannedCase::given).collect();
    Ok((Plan::of(cases, options, 1, &Costs::default())?, Remembered::new()))
}

/// The cases' skips, added up.
fn skips(cases: &[CaseRecord]) -> Vec<Skip> {
    let mut counts: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    for skip in cases.iter().flat_map(|case| &case.skips) {
        *counts.entry((&skip.what, &skip.why)).or_default() += skip.count;
    }
    counts.into_iter().map(|((what, why), count)| Skip { what: what.into(), why: why.into(), count }).collect()
}

/// Options of `parity external-worker`.
#[derive(Debug, Args)]
pub struct WorkerArguments {
    /// Answer the request in this folder, and end; without it, one for each line of standard input
    #[arg(value_name = "DIR")]
    dir: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArguments,
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
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "{reply}").and_then(|()| stdout.flush()).context("answering a request")?;
    }
    Ok(Exit::Agreed)
}
