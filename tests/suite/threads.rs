//! Tests that run at the same time do not affect each other: every thread has its own device.

use std::collections::BTreeSet;
use std::panic::{catch_unwind, resume_unwind};
use std::process::{Command, Stdio};
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use dsv4_parity::case::Case;
use dsv4_parity::judge::checks::{self, CheckOptions};
use dsv4_parity::operator::{AnyOperator, Profile};
use dsv4_parity::operators::registry;
use dsv4_runtime::BackendKind;

use crate::command_line;
use crate::support;

const THREADS: usize = 8;

/// Small and fast operators, each with a forward and a backward kernel.
const OPERATORS: [&str; 4] = ["rms_norm", "rope", "swiglu", "embed_streams"];

/// The smallest edge case that has data.
fn smallest(operator: &AnyOperator) -> Case {
    let elements = |case: &Case| operator.elements(case).unwrap_or(0);
    let cases = operator.edge_cases(Profile::Quick).into_iter().filter(|case| elements(case) > 0);
    cases.min_by_key(elements).expect("an edge case with data")
}

/// What one thread does at the same time as others: all checks of that many operators' kernels. In
/// these checks launches are recorded and replayed, where the device records. Returns the device's
/// address, and for how many operators launches were replayed.
fn checked(thread: usize, operators: usize, start: &Barrier) -> Result<(usize, usize), String> {
    // A device goes to the next thread when its own ends, so all have theirs before any begins. One
    // without a device must not keep the others waiting.
    let device = catch_unwind(support::device);
    start.wait();
    let device = device.unwrap_or_else(|panic| resume_unwind(panic));
    let mut replayed = 0;
    for turn in 0..operators {
        // Each starts with another operator: kernels of all kinds run at the same time.
        let operator =
            registry::find(OPERATORS[(thread + turn) % OPERATORS.len()]).expect("an operator");
        let case = smallest(operator);
        let prepared = operator.prepare(&case).map_err(|error| error.to_string())?;
        let outcome = checks::run(&*prepared, device, CheckOptions::of_kernels(1));
        let failed: Vec<_> = outcome.failures().collect();
        if !failed.is_empty() {
            return Err(format!("{}: {failed:#?}", case.line()));
        }
        let skipped = outcome.skips.iter().any(|skip| skip.what == "sequence: recorded launches");
        replayed += usize::from(!skipped);
    }
    Ok((std::ptr::from_ref(device).addr(), replayed))
}

#[test]
fn eight_threads_check_record_and_replay_at_once_each_on_a_device_of_its_own() {
    let is_gpu = support::backend() == BackendKind::Cuda;
    let (start, operators) = (Barrier::new(THREADS), if is_gpu { OPERATORS.len() } else { 1 });
    let found: Vec<Result<(usize, usize), String>> = thread::scope(|scope| {
        let start = &start;
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| scope.spawn(move || checked(thread, operators, start)))
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let found: Vec<_> =
        found.into_iter().map(|found| found.unwrap_or_else(|failed| panic!("{failed}"))).collect();
    let devices: BTreeSet<usize> = found.iter().map(|(device, _)| *device).collect();
    assert_eq!(devices.len(), THREADS, "threads shared a device");
    let records = if is_gpu { operators } else { 0 };
    assert!(found.iter().all(|(_, replayed)| *replayed == records), "{found:?}");
}

/// The names of all threads that a process had until it ended.
fn threads_of(mut command: Command) -> BTreeSet<String> {
    let mut process = command.stdout(Stdio::null()).spawn().expect("the binary runs");
    let tasks = format!("/proc/{}/task", process.id());
    let mut names = BTreeSet::new();
    loop {
        for task in std::fs::read_dir(&tasks).into_iter().flatten().flatten() {
            names.extend(std::fs::read_to_string(task.path().join("comm")));
        }
        if let Some(status) = process.try_wait().expect("its status") {
            assert!(status.success(), "{status}");
            return names;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn candle_divides_no_operation_of_an_oracle_over_threads() {
    // Large enough that candle would divide it.
    let case = r#"{"operator":"rms_norm","num_rows":16,"width":4096,"dtype":"bf16","weight":"f32","eps":1e-6,"aliasing":"out_of_place","distribution":"normal","magnitude":1.0,"zero_rows":false,"saves_rstd":true,"seed":1}"#;
    for variable in ["PARITY_THREADS", "RAYON_NUM_THREADS"] {
        let mut command = Command::new(command_line::binary());
        command.args(["replay", "--backend", "emulator", case]).env(variable, "3");
        let names = threads_of(command);
        let candle: Vec<_> = names.iter().filter(|name| name.starts_with("candle")).collect();
        assert!(!names.is_empty() && candle.is_empty(), "{variable}: {names:?}");
    }
}
