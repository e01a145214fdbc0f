//! Which lines of kernels run: the emulator's counts, and the command that lists what never ran.

use std::collections::BTreeMap;
use std::path::Path;

use dsv4_parity::coverage::{Reasons, of_kernels};
use dsv4_parity::operator::Profile;
use dsv4_parity::operators::registry;
use dsv4_runtime::emulator::EmulatorOptions;
use dsv4_runtime::emulator::coverage::{self, Coverage, Ran};
use dsv4_runtime::params::Params;
use dsv4_runtime::{
    BackendKind, Contract, DType, Device, DeviceArena, DeviceOptions, LaunchConfig,
};

use super::command_line::Parity;
use super::support;

/// A loop over rows, a branch of few threads, a function, and a statement behind an `if`.
const PROBE: &str = r#"#include "hopper.h"
struct ProbeParams { int32_t* y; int32_t count; };
PARAMS_LAYOUT(ProbeParams, y, count)
DEVICE int32_t later(int32_t x) {
    return x * 3;
}
KERNEL(probe, ProbeParams, 64) {
    const int32_t t = static_cast<int32_t>(threadIdx.x);
    if (t == 40) {
        params.y[t] = later(t);
    }
    if (params.count > 2) params.y[t] = 1;
    for (int32_t i = 1; i < params.count; ++i) {
        params.y[t] += i;
    }
}"#;

/// Launches the probe on a device that counts in `folder`, and reads the counts.
fn counted(folder: &Path, threads: u32, count: usize) -> Coverage {
    let tree = dsv4_kernels::sources().with_text("probe.cu", PROBE.to_owned(), "a probe");
    let emulator =
        EmulatorOptions { coverage: Some(folder.to_owned()), ..EmulatorOptions::default() };
    let options = DeviceOptions { tree, emulator, ..dsv4_kernels::device_options() };
    let device = Device::open(BackendKind::Emulator, options).expect("an emulator that counts");
    let mut arena = DeviceArena::new(&device, Contract::NAN);
    let y = arena.output("y", DType::I32, &[64]).expect("a tensor");
    let params = Params::new("probe").ptr("y", &y).i32("count", count).expect("a number");
    let config = LaunchConfig { grid: [1; 3], block: [threads, 1, 1], shared_bytes: 0 };
    arena
        .run(|device| device.kernel("probe.cu", &[], "probe")?.launch(config, &params))
        .expect("a launch");
    coverage::read(folder, None).expect("counts")
}

/// Whether each line of the probe that is named by a part of it ran.
fn ran(coverage: &Coverage, part: &str) -> Ran {
    let number = PROBE.lines().position(|line| line.contains(part)).expect("a line") as u32 + 1;
    coverage["probe.cu"]["probe.cu"].get(&number).copied().unwrap_or_default()
}

#[test]
fn a_line_ran_once_a_thread_of_some_launch_came_to_it() {
    if support::backend() != BackendKind::Emulator {
        eprintln!("skipped: only the emulator counts lines");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let few = counted(folder.path(), 32, 1);
    for (part, expected) in [
        ("static_cast", Ran::Whole),
        ("later(t)", Ran::Never),
        ("x * 3", Ran::Never),
        ("count > 2", Ran::InPart),
        ("+= i", Ran::Never),
    ] {
        assert_eq!(ran(&few, part), expected, "{part}: {:?}", few["probe.cu"]["probe.cu"]);
    }
    // Another device adds to the counts of the first.
    let all = counted(folder.path(), 64, 3);
    for part in ["later(t)", "x * 3", "count > 2", "+= i"] {
        assert_eq!(ran(&all, part), Ran::Whole, "{part}: {:?}", all["probe.cu"]["probe.cu"]);
    }
}

#[test]
fn a_line_that_never_ran_is_listed_unless_its_text_has_a_reason() {
    let tree = dsv4_kernels::sources().with_text("probe.cu", PROBE.to_owned(), "a probe");
    let lines = BTreeMap::from([(5, Ran::Never), (10, Ran::Never), (12, Ran::InPart)]);
    let file = BTreeMap::from([
        ("probe.cu".to_owned(), lines),
        ("emulator.h".to_owned(), BTreeMap::from([(1, Ran::Never)])),
    ]);
    let coverage = Coverage::from([("probe.cu".to_owned(), file)]);
    let dir = tempfile::tempdir().expect("a folder");
    let list = dir.path().join("coverage.toml");
    let entry = |text: &str, reason: &str| {
        format!("[[line]]\nfile = \"probe.cu\"\ntexts = [\"{text}\"]\nreason = \"{reason}\"\n")
    };
    std::fs::write(&list, entry("return x * 3;", "only on Sundays")).expect("written");
    let reasons = Reasons::read(&list, &tree).expect("a list");
    let [kernel] = &of_kernels(&coverage, &tree, &reasons).expect("lines")[..] else {
        panic!("one kernel");
    };
    assert_eq!((kernel.lines, kernel.never.len(), kernel.in_part.len()), (3, 2, 1));
    let unexplained: Vec<_> = kernel.unexplained().map(|line| line.text.as_str()).collect();
    assert_eq!(unexplained, ["params.y[t] = later(t);"]);
    for (text, reason, expected) in [
        ("return x * 4;", "why", "has no line `return x * 4;` any more"),
        ("return x * 3;", " ", "the reason is empty"),
    ] {
        std::fs::write(&list, entry(text, reason)).expect("written");
        let refused = Reasons::read(&list, &tree).expect_err("refused").to_string();
        assert!(refused.contains(expected), "{refused}");
    }
}

#[test]
fn the_project_list_names_lines_that_exist() {
    let list = support::fixtures().join("coverage.toml");
    Reasons::read(&list, &dsv4_kernels::sources()).unwrap_or_else(|e| panic!("{e:#}"));
}

#[test]
fn the_command_lists_what_no_case_runs_and_exits_with_1() {
    if support::backend() != BackendKind::Emulator {
        eprintln!("skipped: only the emulator counts lines");
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path().to_str().expect("UTF-8");
    let coverage = |operator: &str, edge_cases: &str, further: &[&str]| {
        let fixed = ["coverage", "--ops", operator, "--cases", "0", "--regressions", folder];
        Parity::new(&[&fixed[..], &["--edge-cases", edge_cases], further].concat()).run()
    };
    let one = coverage("rms_norm", "1", &[]);
    one.assert_code(1);
    assert!(one.stdout.contains("  rms_norm.cu:"), "{}", one.stdout);
    assert!(one.stdout.contains("1 cases launched"), "{}", one.stdout);
    coverage("rms_norm", "0", &[]).assert_bad_input(&["no kernel ran"]);
    coverage("rms_norm", "0", &["--backend", "cuda"])
        .assert_bad_input(&["--backend cuda", "only the emulator"]);
}

#[test]
fn a_typical_case_runs_on_other_numbers_of_sms() {
    // Ranks are on devices of their own.
    for operator in registry::OPERATORS.iter().filter(|operator| !operator.has_ranks()) {
        let cases = operator.edge_cases(Profile::Quick);
        for sms in [1, 2, 132] {
            let has = |case: &&dsv4_parity::case::Case| case.fields.get("sms") == Some(&sms.into());
            assert!(cases.iter().any(|case| has(&case)), "{}: {sms} SMs", operator.name());
        }
    }
}
