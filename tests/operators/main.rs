//! Tests made from the registry, so that no operator can be forgotten:
//!
//! | name | what it does |
//! | --- | --- |
//! | `sweep::OPERATOR` | remembered cases, edge cases, and drawn cases within a time budget |
//! | `golden::OPERATOR` | oracle and kernels against the golden files |
//! | `refusals::OPERATOR` | every argument of its launchers, spoilt in every way, is refused by name |
//! | `numbers::OPERATOR` | every whole number of a case, set to what wraps or takes all memory, is refused or judged |
//! | `mutant::ID` | a planted bug is seen by the check that was expected to see it, and by nobody where it is not planted |
//!
//! `cargo test --test operators NAME` runs those whose names contain NAME. Without a filter the
//! mutants, edge cases and golden files that a commit cannot concern are left out, but for a
//! rotating share ([`dsv4_parity::change`]), and sweeps end early; `PARITY_TESTS=all` runs
//! everything. What is left out is counted and said.

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
use dsv4_runtime::process::keep_freed_memory;
use libtest_mimic::{Arguments, Failed, Trial};

/// How much is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Extent {
    /// What each commit pays for.
    Commit,
    /// What the command line names: whatever the commit changed, and drawn cases in the time that
    /// a commit has for them.
    Named,
    /// Everything.
    All,
}

impl Extent {
    /// What `PARITY_TESTS` and the command line say.
    fn demanded(arguments: &Arguments) -> Result<Self, String> {
        match std::env::var("PARITY_TESTS").as_deref() {
            Ok("all") => Ok(Self::All),
            Ok("commit" | "") | Err(_) if arguments.filter.is_some() => Ok(Self::Named),
            Ok("commit" | "") | Err(_) => Ok(Self::Commit),
            Ok(other) => Err(format!("PARITY_TESTS is `{other}`, not commit or all")),
        }
    }
}

/// What is asked of every operator; a new kind of test is one more line.
type Make = fn(&'static AnyOperator, Extent) -> Option<Trial>;
const OF_EACH_OPERATOR: [Make; 4] = [sweeps::trial, golden::trial, refusals::trial, numbers::trial];

fn main() -> ExitCode {
    keep_freed_memory();
    // Times are always printed; libtest's flag for them is for the other binaries that `cargo
    // test` hands it to.
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

/// The dearest first, so that no core waits for the last one.
fn trials(arguments: &Arguments) -> Result<Vec<Trial>, String> {
    let extent = Extent::demanded(arguments)?;
    let of =
        |make: Make| registry::OPERATORS.iter().filter_map(move |operator| make(operator, extent));
    let mut trials: Vec<Trial> = OF_EACH_OPERATOR.into_iter().flat_map(of).collect();
    trials.extend(mutants::trials(extent)?);
    Ok(trials)
}

/// A test that says what it did, and how long it took beside waiting for its turn.
fn trial(name: String, work: impl FnOnce() -> Result<String, String> + Send + 'static) -> Trial {
    let label = name.clone();
    Trial::test(name, move || {
        shared::take_waited();
        let start = Instant::now();
        let result = work();
        let seconds = start.elapsed().saturating_sub(shared::take_waited()).as_secs_f64();
        let done = result.as_deref().unwrap_or("failed");
        // On the standard error, so that the standard output is a list of tests and nothing else.
        eprintln!("{label}: {done}, {seconds:.1} s");
        result.map(|_| ()).map_err(Failed::from)
    })
}
