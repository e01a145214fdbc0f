//! Planted bugs (`fixtures/mutants`): what the list covers, and what planting does. Other tests
//! (`tests/operators`) check that the expected check sees each of them. Always on the emulator.

use std::collections::BTreeSet;
use std::sync::OnceLock;

use dsv4_parity::case::Case;
use dsv4_parity::mutants::planted::{self, Mutant, MutantError};
use dsv4_parity::operator::Profile;
use dsv4_parity::operators::registry;
use dsv4_parity::record::{Check, MutantStatus};
use dsv4_runtime::{BackendKind, Device};

use crate::extent::left_out;
use crate::support::fixtures;

/// Rooms whose changes run the long tests of this file.
const STRIDES: [&str; 3] = ["src/operator/layouts.rs", "fixtures/mutants/", "src/sweep/"];

/// Random schedules for each case: only a few, because a race that they miss is a weakness that
/// should show.
const SCHEDULES: u32 = 4;

/// Catalogue entries that must be planted: those that the catalogue proposes for these operators.
const REQUIRED: &[&str] = &[
    "FM-01", "FM-02", "FM-03", "FM-04", "FM-05", "FM-06", "FM-07", "FM-08", "FM-09", "FM-10",
    "FM-11", "FM-12", "FM-13", "FM-14", "FM-15", "FM-16", "FM-17", "FM-18", "FM-19", "FM-20",
    "FM-21", "FM-22", "FM-23", "FM-28", "FM-29", "FM-30", "FM-31", "FM-32", "FM-33", "FM-34",
    "FM-35", "FM-36", "FM-37", "FM-38", "FM-39", "FM-40", "FM-41", "FM-42", "FM-43", "FM-44",
    "FM-45", "FM-46", "FM-47", "FM-48", "FM-49", "FM-50", "FM-51", "FM-52", "FM-53", "FM-54",
    "FM-55", "FM-56", "FM-57", "FM-58", "FM-59", "FM-60", "FM-61", "FM-62", "FM-63", "FM-64",
    "FM-65", "FM-66", "FM-68", "FM-69", "FM-70", "FM-71", "FM-72", "FM-73", "FM-75", "FM-76",
    "FM-78", "FM-79", "FM-80", "FM-81", "FM-82", "FM-83", "FM-86", "FM-87", "FM-88", "FM-89",
    "FM-90", "FM-91", "FM-92", "FM-93", "FM-95", "FM-96", "FM-97", "FM-98", "FM-99", "FM-100",
    "FM-101", "FM-102", "FM-103", "FM-104", "FM-105", "FM-106", "FM-107", "FM-108", "FM-109",
    "FM-110", "FM-111", "FM-112", "FM-113", "FM-114", "FM-115", "FM-116", "FM-117", "FM-118",
    "FM-119", "FM-120", "FM-121", "FM-122", "FM-123", "FM-124", "FM-125", "FM-126", "FM-127",
    "FM-128", "FM-129", "FM-130", "FM-131", "FM-132", "FM-133", "FM-134", "FM-135", "FM-136",
    "FM-137", "FM-138", "FM-139", "FM-140", "FM-142", "FM-143", "FM-144", "FM-145", "FM-146",
    "FM-147", "FM-148", "FM-149", "FM-150", "FM-151", "FM-152", "FM-153", "FM-154", "FM-155",
    "FM-156", "FM-157", "FM-158", "FM-159", "FM-161", "FM-164", "FM-166", "FM-167", "FM-168",
    "FM-169", "FM-170", "FM-171", "FM-172", "FM-177",
];

fn all() -> &'static [Mutant] {
    static ALL: OnceLock<Vec<Mutant>> = OnceLock::new();
    ALL.get_or_init(|| {
        planted::load(&fixtures().join("mutants")).expect("fixtures/mutants holds lists of mutants")
    })
}

fn emulator() -> Device {
    Device::open(BackendKind::Emulator, dsv4_kernels::device_options()).expect("the emulator opens")
}

fn find(id: &str) -> Mutant {
    all()
        .iter()
        .find(|mutant| mutant.id == id)
        .unwrap_or_else(|| panic!("no mutant `{id}`"))
        .clone()
}

#[test]
fn the_catalogue_is_covered_and_no_id_is_used_twice() {
    let planted: BTreeSet<&str> = all().iter().map(|mutant| mutant.catalogue.as_str()).collect();
    let missing: Vec<_> = REQUIRED.iter().filter(|entry| !planted.contains(*entry)).collect();
    assert!(missing.is_empty(), "nothing is planted for {missing:?}");
    let ids: BTreeSet<&str> = all().iter().map(|mutant| mutant.id.as_str()).collect();
    assert_eq!(ids.len(), all().len());
    for mutant in all() {
        assert!(
            !mutant.cases.is_empty() && mutant.cases.len() <= 3,
            "`{}` has {} cases",
            mutant.id,
            mutant.cases.len()
        );
        let own = |line: &String| Case::parse(line).expect("a case").operator == mutant.operator;
        assert!(mutant.cases.iter().all(own), "`{}` has a case of another operator", mutant.id);
    }
}

#[test]
fn a_mutant_of_an_operator_that_there_is_not_is_refused_with_its_id() {
    let dir = tempfile::tempdir().unwrap();
    let list = std::fs::read_to_string(fixtures().join("mutants/experts/swiglu.toml")).unwrap();
    let misspelt = list.replacen("operator = \"swiglu\"", "operator = \"swigul\"", 1);
    std::fs::write(dir.path().join("swiglu.toml"), misspelt).unwrap();
    let error = planted::load(dir.path()).expect_err("nobody would run it").to_string();
    assert!(error.contains("swiglu.toml: mutant `swiglu_"), "{error}");
    assert!(error.contains("unknown operator `swigul`"), "{error}");
}

#[test]
fn every_list_lies_in_the_folder_of_its_operators_family() {
    for Mutant { list, operator, .. } in all() {
        let family = registry::find(operator).expect("an operator").family();
        let path = fixtures().join("mutants").join(family.name()).join(list);
        assert!(path.is_file(), "{list} is not in fixtures/mutants/{family}");
    }
}

#[test]
fn every_anchor_occurs_exactly_once() {
    let tree = dsv4_kernels::sources();
    let lost: Vec<_> =
        all().iter().filter_map(|mutant| Some(mutant.plant(&tree).err()?.to_string())).collect();
    assert!(lost.is_empty(), "{}", lost.join("\n"));
}

#[test]
fn an_anchor_that_no_longer_matches_is_an_error() {
    let device = emulator();
    for (find_text, occurrences) in [("no kernel says this", 0), ("__syncthreads();", 2)] {
        let mutant = Mutant { find: find_text.into(), ..find("rms_norm_sum_of_one_warp") };
        match mutant.run(&device, 0) {
            Err(MutantError::Anchor { count, .. }) => {
                assert!(count >= occurrences && count != 1, "{count}")
            }
            other => panic!("`{find_text}`: {other:?}"),
        }
    }
}

#[test]
fn an_anchor_in_a_file_that_is_gone_is_an_error() {
    let mutant = Mutant { file: "gone.cu".into(), ..find("rms_norm_sum_of_one_warp") };
    assert!(matches!(mutant.run(&emulator(), 0), Err(MutantError::Anchor { count: 0, .. })));
}

#[test]
fn a_mutant_that_changes_nothing_survives() {
    let killed = find("rms_norm_mean_term_missing");
    let mutant = Mutant { replace: format!("/* nothing */ {}", killed.find), ..killed };
    let record = mutant.run(&emulator(), SCHEDULES).expect("it runs");
    assert_eq!(record.killed_by, Vec::<Check>::new());
}

#[test]
fn a_mutant_that_does_not_compile_is_an_error_and_no_kill() {
    let mutant = Mutant { replace: "this is no C++;".into(), ..find("rms_norm_mean_term_missing") };
    assert!(matches!(mutant.run(&emulator(), 0), Err(MutantError::NotRun { .. })));
}

#[test]
fn planting_leaves_the_tree_as_it_was() {
    let device = emulator();
    let before = device.tree().digest();
    let mutant = find("rms_norm_mean_term_missing");
    let planted = mutant.plant(device.tree()).expect("the anchor matches");
    assert_eq!(device.tree().digest(), before);
    assert_ne!(planted.digest(), before);
    assert!(planted.origin().contains(&mutant.id), "{}", planted.origin());
}

/// The drawn cases of a sweep must see them, and not only the case of the mutant.
#[test]
fn strides_mixed_up_or_cut_to_32_bits_are_seen_by_the_edge_cases_of_every_sweep() {
    if left_out(&STRIDES) {
        return;
    }
    let hidden_by = [
        (
            "rms_norm_block_stride_of_dy_for_x",
            "a kernel of wide rows that are dense in every edge case",
        ),
        (
            "rms_norm_gradient_row_offset_in_32_bits",
            "a kernel of wide accesses, where huge steps are odd",
        ),
        (
            "combine_head_offset_in_32_bits",
            "an inner axis, where the outermost alone has huge steps",
        ),
        (
            "swiglu_row_offset_in_32_bits_unsigned",
            "a number without a sign, where steps end at 2^31",
        ),
    ];
    let device = emulator();
    for (id, where_it_hid) in hidden_by {
        let mutant = find(id);
        let edge_cases =
            registry::find(&mutant.operator).expect("an operator").edge_cases(Profile::Quick);
        let sees = |case: &Case| {
            let mutant = Mutant { cases: vec![case.line()], ..mutant.clone() };
            mutant.run(&device, 0).expect("it runs").status == MutantStatus::Killed
        };
        assert!(
            edge_cases.iter().rev().any(sees),
            "`{id}` survives the edge cases: {where_it_hid}"
        );
    }
}
