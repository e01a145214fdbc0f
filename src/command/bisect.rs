//! `parity bisect`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use dsv4_runtime::Device;
use dsv4_runtime::emulator::SMS;
use serde_json::json;

use super::replay::cases_of;
use super::{BackendChoice, DeviceArguments, Exit, MemoryArguments, output};
use crate::bisect::history::{Commit, Repository};
use crate::bisect::judge::{Effort, Metric, Trial};
use crate::bisect::search::Answer;
use crate::bisect::{self, Bisection, Found, page};
use crate::case::Case;
use crate::operators::registry;
use crate::record::words::printable;

/// Options of `parity bisect`.
#[derive(Debug, Args)]
#[command(after_help = "\
Commits are those that changed kernels/cuda on the line of first parents. For a search that git conducts itself: \
git bisect run parity replay --kernels kernels/cuda CASE

Exit codes: 0 the first bad commit (or a range that holds it) was found, 1 the two ends do not differ, 2 bad usage or \
input, 3 the demanded backend is missing.")]
pub struct BisectArguments {
    /// Revision whose kernels are good, on the line of first parents of the bad one
    #[arg(long, value_name = "REV")]
    good: String,
    /// Later revision whose kernels are bad
    #[arg(long, value_name = "REV")]
    bad: String,
    /// Case as one line of JSON, or a file of such lines: the first case that tells the two ends
    /// apart is used
    #[arg(long, value_name = "CASE|FILE", required_unless_present = "op", conflicts_with = "op")]
    case: Option<String>,
    /// Use cases of this operator's quick sweep instead
    #[arg(long, value_name = "NAME")]
    op: Option<String>,
    /// Drawn cases, with --op [default: as many as the sweep draws]
    #[arg(long, value_name = "N", requires = "op")]
    cases: Option<usize>,
    /// Seed of the drawn cases, with --op
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,
    /// What makes a revision good or bad
    #[arg(long, value_enum, default_value = "agree")]
    metric: Metric,
    /// Random schedules to run each case under on the emulator, with --metric agree
    #[arg(long, default_value_t = 0, value_name = "N")]
    schedules: u32,
    /// Most runs of a revision before it counts as undecided, with --metric time and determinism
    #[arg(long, default_value_t = 1024, value_name = "N")]
    most_runs: u64,
    /// Repository
    #[arg(long, default_value = ".", value_name = "DIR")]
    repo: PathBuf,
    /// Folder for index.html, with the plot and the diff
    #[arg(long, default_value = "reports/bisect", value_name = "DIR")]
    out: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Backend to run the kernels on
    #[arg(
        long,
        value_enum,
        default_value = "auto",
        env = "PARITY_BACKEND",
        hide_env_values = true
    )]
    backend: BackendChoice,
    #[command(flatten)]
    pub(super) memory: MemoryArguments,
}

/// Bisects, prints the result, and writes the page.
pub fn execute(arguments: &BisectArguments) -> Result<Exit> {
    let cases = chosen_cases(arguments)?;
    for case in &cases {
        registry::prepare(case)?;
    }
    let repository = Repository::open(&arguments.repo)?;
    let open = || -> Result<Device> {
        let memory = arguments.memory.clone();
        DeviceArguments {
            backend: arguments.backend,
            kernels: None,
            sms: SMS,
            in_process: false,
            memory,
        }
        .open()
    };
    let effort = Effort { schedules: arguments.schedules, most_runs: arguments.most_runs };
    let ends = [arguments.good.as_str(), arguments.bad.as_str()];
    let mut told = |commit: &Commit, trial: &Trial| {
        if !arguments.json {
            print_trial(commit, trial);
        }
    };
    match bisect::bisect(&repository, ends, &cases, arguments.metric, effort, &open, &mut told)? {
        Found::NoDifference(reasons) if arguments.json => {
            output::json(&json!({ "found": false, "reasons": reasons }))?;
            Ok(Exit::Disagreed)
        }
        Found::NoDifference(reasons) => {
            outln!("{} and {} cannot be told apart:", arguments.good, arguments.bad);
            reasons.iter().for_each(|reason| outln!("  {}", printable(reason)));
            Ok(Exit::Disagreed)
        }
        Found::Turn(found) => {
            let page = write_page(&found, &arguments.out)?;
            if arguments.json {
                output::json(&as_json(&found, &page))?;
            } else {
                print_found(&found, &repository);
                detailln!("page: {}", page.display());
            }
            Ok(Exit::Agreed)
        }
    }
}

fn as_json(found: &Bisection, page: &Path) -> serde_json::Value {
    let trial = |(&at, trial): (&usize, &Trial)| {
        let Commit { id, subject, .. } = &found.line[at];
        let answer = page::word(trial.answer);
        json!({ "commit": id, "subject": subject, "answer": answer, "value": trial.value, "note": trial.note })
    };
    let bad = &found.line[found.turn.last_good + 1..=found.turn.first_bad];
    json!({
        "found": true,
        "case": found.case,
        "first_bad": bad.iter().map(|commit| &commit.id).collect::<Vec<_>>(),
        "exact": found.turn.is_exact(),
        "trials": found.trials.iter().map(trial).collect::<Vec<_>>(),
        "page": page,
    })
}

fn chosen_cases(arguments: &BisectArguments) -> Result<Vec<Case>> {
    match (&arguments.case, &arguments.op) {
        (Some(case), _) => cases_of(case),
        (None, Some(name)) => {
            bisect::cases_of(registry::find(name)?, arguments.cases, arguments.seed)
        }
        (None, None) => anyhow::bail!("neither --case nor --op was given"),
    }
}

fn print_trial(commit: &Commit, trial: &Trial) {
    let word = page::word(trial.answer);
    let word = match trial.answer {
        Answer::Good => output::good(word),
        Answer::Bad => output::bad(word),
        Answer::Skip => output::unsure(word),
    };
    let line = format!("{} {}: {}", commit.short(), commit.subject, trial.note);
    detailln!("{word:5} {}", printable(&line));
}

fn print_found(found: &Bisection, repository: &Repository) {
    detailln!("\n{}", page::text_plot(found));
    outln!("case {}", found.case.line());
    let first_bad = &found.line[found.turn.first_bad];
    if found.turn.is_exact() {
        let signature = printable(&first_bad.signature);
        let id = output::bad(&first_bad.id);
        outln!("first bad commit: {id} {}\n  {signature}", printable(&first_bad.subject));
    } else {
        outln!("the first bad commit is one of these; all but the last were skipped:");
        for at in found.turn.last_good + 1..=found.turn.first_bad {
            let note = found.trials.get(&at).filter(|trial| trial.answer == Answer::Skip);
            let note = note.map_or(String::new(), |trial| format!(" ({})", trial.note));
            outln!(
                "{}",
                printable(&format!("  {} {}{note}", found.line[at].id, found.line[at].subject))
            );
        }
    }
    if let Some(base) = repository.merge_base(first_bad) {
        outln!(
            "it is a merge; its branch: parity bisect --good {base} --bad {}",
            first_bad.parents[1]
        );
    }
    detailln!("\n{}", printable(&found.diff));
}

fn write_page(found: &Bisection, out: &Path) -> Result<PathBuf> {
    let path = out.join("index.html");
    std::fs::create_dir_all(out).with_context(|| format!("--out {}", out.display()))?;
    std::fs::write(&path, page::html(found))
        .with_context(|| format!("writing {}", path.display()))?;
    Ok(path)
}
