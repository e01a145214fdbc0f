//! Tests generated from the registry, so that no operator is forgotten:
//!
//! | name | test |
//! | --- | --- |
//! | `sweep::OPERATOR` | saved cases, edge cases, and drawn cases within a time budget |
//! | `golden::OPERATOR` | oracle and kernels against the golden files |
//! | `refusals::OPERATOR` | each invalid argument of its launchers is rejected by name |
//! | `numbers::OPERATOR` | extreme values of every integer of a case are rejected or judged |
//! | `coverage::OPERATOR` | its cases run every line of its kernels, or a list has the reason |
//! | `mutant::ID` | the expected check sees a planted bug; no check fails without the bug |
//!
//! `cargo test --test operators NAME` runs the tests whose names contain NAME. Without a filter,
//! mutants, edge cases and golden files that the commit does not concern are skipped, except for a
//! small share ([`dsv4_parity::change`]), and sweeps end early. `PARITY_TESTS=all` runs everything.
//! What is skipped is counted and reported.

mod coverage;
mod golden;
mod mutants;
mod numbers;
mod refusals;
mod shared;
#[path = "../suite/support.rs"]
mod support;
mod sweeps;

use std::process::ExitCode;
use std::time::Instant;

use dsv4_parity::operator::AnyOperator;
use dsv4_parity::operators::registry;
use dsv4_parity::prepare_process;
use libtest_mimic::{Arguments, Failed, Trial};

/// How much runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Extent {
    /// What each commit runs.
    Commit,
    /// What the command line names: independent of the commit's changes, with drawn cases in the
    /// time that a commit has for them.
    Named,
    /// Everything.
    All,
}

impl Extent {
    /// The extent from `PARITY_TESTS` and the command line.
    fn demanded(arguments: &Arguments) -> Result<Self, String> {
        match std::env::var("PARITY_TESTS").as_deref() {
            Ok("all") => Ok(Self::All),
            Ok("commit" | "") | Err(_) if arguments.filter.is_some() => Ok(Self::Named),
            Ok("commit" | "") | Err(_) => Ok(Self::Commit),
            Ok(other) => Err(format!("PARITY_TESTS is `{other}`, not commit or all")),
        }
    }
}

/// Makes the test of one operator; a new kind of test is one more line.
type Make = fn(&'static AnyOperator, Extent) -> Option<Trial>;
const OF_EACH_OPERATOR: [Make; 5] =
    [sweeps::trial, coverage::trial, golden::trial, refusals::trial, numbers::trial];

fn main() -> ExitCode {
    prepare_process();
    // Times are always printed. libtest's flag for them is accepted because `cargo test` passes it
    // to all test binaries.
    let arguments =
        Arguments::from_iter(std::env::args_os().filter(|argument| argument != "--report-time"));
    match trials(&arguments) {
        Ok(trials) => libtest_mimic::run(&arguments, trials).exit_code(),
        Err(error) => {
            eprintln!("operators: {error}");
            ExitCode::from(2)
        }
    }
}

/// The longest tests first, so that cores do not wait for the last one.
fn trials(arguments: &Arguments) -> Result<Vec<Trial>, String> {
    let extent = Extent::demanded(arguments)?;
    let of =
        |make: Make| registry::OPERATORS.iter().filter_map(move |operator| make(operator, extent));
    let mut trials: Vec<Trial> = OF_EACH_OPERATOR.into_iter().flat_map(of).collect();
    trials.extend(mutants::trials(extent)?);
    Ok(trials)
}

/// A test that reports what it did, and how long it took without waiting times.
fn trial(name: String, work: impl FnOnce() -> Result<String, String> + Send + 'static) -> Trial {
    let label = name.clone();
    Trial::test(name, move || {
        shared::take_waited();
        let start = Instant::now();
        let result = work();
        let seconds = start.elapsed().saturating_sub(shared::take_waited()).as_secs_f64();
        let done = result.as_deref().unwrap_or("failed");
        // On standard error, so that standard output has only the list of tests.
        eprintln!("{label}: {done}, {seconds:.1} s");
        result.map(|_| ()).map_err(Failed::from)
    })
}
