//! How much a test runs: the share of a commit, or everything; and what `attacks.sh` counts.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::LazyLock;

use dsv4_parity::change::{self, Candidate, Change, MOST_OPERATORS};
use dsv4_parity::operator::AnyOperator;
use dsv4_parity::operators::registry;

/// Whether a test runs everything, and not only the share of a commit.
pub fn everything() -> bool {
    std::env::var("PARITY_TESTS").is_ok_and(|extent| extent == "all")
}

/// What the commit changed; `None` where everything is requested, or where git cannot report it.
fn change() -> Option<&'static Change> {
    static CHANGE: LazyLock<Result<Change, String>> =
        LazyLock::new(|| Change::of_checkout(Path::new(env!("CARGO_MANIFEST_DIR"))));
    if everything() {
        return None;
    }
    CHANGE.as_ref().inspect_err(|why| println!("nothing is left out: {why}")).ok()
}

/// Whether a long test is left to the run of everything, because the commit changed nothing in the
/// rooms of the test. Other tests in its file are the smoke test of these rooms.
pub fn left_out(rooms: &[&str]) -> bool {
    let Some(change) = change() else { return false };
    let left_out = !change.files.iter().any(|file| rooms.iter().any(|room| file.starts_with(room)));
    if left_out {
        println!(
            "left to PARITY_TESTS=all: since {:.12} nothing changed in {}",
            change.base,
            rooms.join(", ")
        );
    }
    left_out
}

/// The operators of a test that takes minutes for all operators. It runs those that the commit
/// concerns, up to a maximum, and a smoke test. It runs all where everything is requested, or where
/// git cannot report the changes.
pub fn concerned_operators() -> Vec<&'static AnyOperator> {
    let all = registry::OPERATORS.to_vec();
    let Some(change) = change() else { return all };
    let files_of = |operator: &&'static AnyOperator| {
        change::files_of(operator, &dsv4_kernels::sources(), &BTreeSet::new())
            .expect("the operator's kernels are there")
    };
    let files: Vec<_> = all.iter().map(files_of).collect();
    let owns: Vec<_> = all.iter().map(|operator| operator.describe().kernel_file).collect();
    let candidates: Vec<_> = (0..all.len())
        .map(|at| Candidate { id: all[at].name(), own: &owns[at], files: &files[at] })
        .collect();
    let chosen = change.choose(&candidates, MOST_OPERATORS);
    println!("{}", change.left_out(&chosen, "operators", MOST_OPERATORS));
    all.into_iter()
        .zip(chosen.flags)
        .filter_map(|(operator, chosen)| chosen.then_some(operator))
        .collect()
}

/// Prints how many attacks of a kind were withstood: `tests/attacks.sh` counts them.
pub fn attacked(kind: &str, held: u64) {
    println!("attack: {held} {kind}");
}
