//! How much of all that it could try a test tries: what a commit pays for, or everything; and what `attacks.sh` is told of it.

use std::collections::BTreeSet;
use std::path::Path;

use dsv4_kernels::runtime::SourceTree;
use dsv4_parity::change::{self, Candidate, Change, MOST_OPERATORS};
use dsv4_parity::operator::{Operator, registry};

/// Whether a test tries all that it has, and not only what a commit pays for.
pub fn everything() -> bool {
    std::env::var("PARITY_TESTS").is_ok_and(|extent| extent == "all")
}

/// The operators of a test that goes through all of them and takes minutes: those that the commit may concern, or so many that
/// it draws, and a rotating share of the others; all where everything is asked for, or git cannot tell what changed. A change
/// of the harness concerns every operator.
pub fn drawn_operators() -> Vec<&'static dyn Operator> {
    let all = registry::OPERATORS.to_vec();
    if everything() {
        return all;
    }
    let change = match Change::of_checkout(Path::new(env!("CARGO_MANIFEST_DIR"))) {
        Ok(change) => change,
        Err(why) => {
            println!("nothing is left out: {why}");
            return all;
        }
    };
    let files_of = |operator: &&'static dyn Operator| {
        change::files_of(*operator, &SourceTree::embedded(), &BTreeSet::new())
            .expect("the operator's kernels are there")
    };
    let mut files: Vec<_> = all.iter().map(files_of).collect();
    let harness: Vec<String> = change.harness(files.iter()).cloned().collect();
    files.iter_mut().for_each(|files| files.extend(harness.iter().cloned()));
    let owns: Vec<_> = all.iter().map(|operator| operator.describe().kernel_file).collect();
    let candidates: Vec<_> =
        (0..all.len()).map(|at| Candidate { id: all[at].name(), own: &owns[at], files: &files[at] }).collect();
    let chosen = change.choose(&candidates, MOST_OPERATORS);
    println!("{}", change.left_out(&chosen, "operators", MOST_OPERATORS));
    all.into_iter().zip(chosen.flags).filter_map(|(operator, chosen)| chosen.then_some(operator)).collect()
}

/// Says that so many attacks of a kind were held: `tests/attacks.sh` counts them.
pub fn attacked(kind: &str, held: u64) {
    println!("attack: {held} {kind}");
}
