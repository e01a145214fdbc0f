//! Shared helpers of the tests.

use std::path::Path;

use crate::SourceTree;

/// The kernels next to this crate; the tests build their own kernels from the headers.
pub fn kernels() -> SourceTree {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cuda");
    SourceTree::from_dir(&folder).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn the_example_of_a_missing_barrier_is_a_race_that_names_both_lines_in_one_schedule() {
    let fault = crate::emulate::wrong_elements(None).expect_err("a race").to_string();
    let words = ["next_value.cu:17, which thread", "reads at next_value.cu:19", "(a race)"];
    assert!(words.iter().all(|word| fault.contains(word)), "{fault}");
}

#[test]
fn the_example_of_a_missing_barrier_is_wrong_under_every_random_schedule() {
    for seed in 1..=2 {
        let wrong = crate::emulate::wrong_elements(Some(seed)).expect("the kernel runs");
        assert!(wrong > 0, "schedule {seed}");
    }
}
