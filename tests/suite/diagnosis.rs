//! The text of a failure: it names planted conditions, and a failing sweep fits a screen with its
//! cause in the first lines.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use dsv4_parity::case::Case;
use dsv4_parity::judge::checks::{self, CheckOptions, Outcome};
use dsv4_parity::judge::truth::Truth;
use dsv4_parity::mutants::planted::{self, Mutant};
use dsv4_parity::operator::{AnyOperator, PreparedCase, Profile};
use dsv4_parity::operators::registry;
use dsv4_parity::record::{CaseRecord, Origin, Report};
use dsv4_parity::report::diagnosis::{self, Diagnosis, terminal};
use dsv4_parity::sweep::regressions::Regressions;
use dsv4_parity::sweep::{self, GivenCases, LeftOut, SweepOptions};
use dsv4_runtime::{BackendKind, Device};

use crate::command_line::{Output, Parity, changed_kernels};
use crate::extent::{concerned_operators, left_out};
use crate::support::fixtures;

/// Rooms whose changes run the long tests of this file.
const ROOMS: [&str; 4] =
    ["src/report/diagnosis/", "src/judge/failing.rs", "src/sweep/", "tests/suite/wrong/"];

/// Small cases of an operator, edge cases and drawn ones, and how many of them.
const MOST_ELEMENTS: u128 = 1 << 17;
const MOST_CASES: usize = 48;

fn cases_of(operator: &AnyOperator, device: &Device) -> Vec<Case> {
    let options = SweepOptions {
        profile: Profile::Quick,
        cases: Some(MOST_CASES),
        edge_cases: GivenCases::All,
        remembered: GivenCases::All,
        seed: 7,
        checks: CheckOptions::of_kernels(0),
        regressions: Regressions::new("none"),
        remember: false,
        condition: None,
        left_out: LeftOut::default(),
        time_budget: None,
        deadline: None,
        ranks: Vec::new(),
    };
    let (planned, _) =
        sweep::plan(operator, Vec::new(), &options, device.environment()).expect("cases");
    let small =
        |case: &Case| operator.elements(case).is_ok_and(|elements| elements <= MOST_ELEMENTS);
    let mut cases: Vec<Case> =
        planned.into_iter().map(|planned| planned.case).filter(small).collect();
    let step = cases.len().div_ceil(MOST_CASES);
    cases = cases.into_iter().step_by(step.max(1)).collect();
    cases
}

/// A case, its inputs, and the oracle's results: for all mutants of its operator.
struct Known {
    case: Case,
    prepared: Box<dyn PreparedCase>,
    truth: Truth,
}

fn known(case: Case) -> Known {
    let prepared = registry::prepare(&case).expect("a case");
    let truth = Truth::of(&*prepared, prepared.arithmetic()).expect("a truth");
    Known { case, prepared, truth }
}

fn record(known: &Known, device: &Device) -> CaseRecord {
    let options = CheckOptions { sequence: false, ..CheckOptions::of_kernels(0) };
    let outcome = checks::run_by(&known.truth, &*known.prepared, device, options, |outcome| {
        outcome.failures().next().is_some()
    });
    record_of(&known.case, outcome)
}

/// The record of a drawn case that was judged alone, as a diagnosis reads it.
pub fn record_of(case: &Case, outcome: Outcome) -> CaseRecord {
    CaseRecord {
        operator: case.operator.clone(),
        case: serde_json::to_value(case).expect("JSON"),
        origin: Origin::Drawn,
        paths: outcome.paths,
        checks: outcome.checks,
        kernel_seconds: 0.0,
        oracle_seconds: 0.0,
        seconds: None,
        our_seconds: None,
        unsupported: None,
        replay: String::new(),
        skips: Vec::new(),
        batches: vec![],
        plan_number: None,
        untestable: outcome.untestable,
    }
}

/// The diagnosis of a mutant; `None` where it survives.
fn diagnosed(
    operator: &AnyOperator,
    mutant: &Mutant,
    known: &[Known],
    device: &Device,
) -> Option<Diagnosis> {
    let mutated = device.with_tree(mutant.plant(device.tree()).expect("the anchor matches"));
    let records: Vec<CaseRecord> = known.iter().map(|known| record(known, &mutated)).collect();
    let records: Vec<&CaseRecord> = records.iter().collect();
    diagnosis::diagnose(Some(&operator.describe()), &records)
}

#[test]
fn the_condition_of_a_planted_bug_is_named() {
    let mutants = planted::load(&fixtures().join("mutants")).expect("lists of mutants");
    let of = |operator: &AnyOperator| {
        let named =
            |mutant: &&Mutant| mutant.operator == operator.name() && !mutant.condition.is_empty();
        mutants.iter().filter(named).collect::<Vec<_>>()
    };
    let all: Vec<_> =
        registry::OPERATORS.iter().map(|operator| (*operator, of(operator))).collect();
    let all: Vec<_> = all.into_iter().filter(|(_, planted)| !planted.is_empty()).collect();
    let count: usize = all.iter().map(|(_, planted)| planted.len()).sum();
    assert!(all.len() >= 10 && count >= 20, "{} operators, {count} conditions", all.len());
    let drawn: Vec<&str> = concerned_operators().iter().map(|operator| operator.name()).collect();
    let mut chosen: Vec<_> =
        all.iter().filter(|(operator, _)| drawn.contains(&operator.name())).collect();
    if chosen.is_empty() {
        chosen.push(&all[0]);
    }
    let device = Device::open(BackendKind::Emulator, dsv4_kernels::device_options())
        .expect("the emulator opens");
    let mut unnamed = Vec::new();
    for (operator, planted) in chosen {
        let begun = Instant::now();
        let known: Vec<Known> = cases_of(operator, &device).into_iter().map(known).collect();
        for mutant in planted {
            let Mutant { id, condition: words, .. } = mutant;
            let Some(said) = diagnosed(operator, mutant, &known, &device) else {
                unnamed.push(format!("{id} survives"));
                continue;
            };
            println!("{id}: {}", terminal::headed(std::slice::from_ref(&said)));
            if !said
                .sentences
                .iter()
                .any(|sentence| words.iter().any(|words| sentence.contains(words.as_str())))
            {
                unnamed.push(format!(
                    "{id}: {words:?} is not in {:#?}",
                    (said.heading(), &said.sentences)
                ));
            }
        }
        println!(
            "{}: {} cases, {:.1} s",
            operator.name(),
            known.len(),
            begun.elapsed().as_secs_f64()
        );
    }
    assert!(unnamed.is_empty(), "{}", unnamed.join("\n"));
}

/// The output of a failing sweep, in order.
fn screen(output: &Output) -> String {
    format!("{}{}", output.stderr, output.stdout)
}

fn assert_fits_a_screen(output: &Output, causes: &[&str]) {
    output.assert_code(1);
    let screen = screen(output);
    println!("{screen}");
    assert!(terminal::lines(&screen) < 40, "{} lines:\n{screen}", terminal::lines(&screen));
    // A sentence may wrap at the width of the terminal.
    let folded = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let first = folded(&screen.lines().take(5).collect::<Vec<_>>().join("\n"));
    for cause in causes {
        let at = folded(&screen).find(cause);
        assert!(
            at.is_some_and(|at| at < first.len()),
            "`{cause}` does not begin in the first lines of\n{screen}"
        );
    }
    assert_eq!(
        screen.matches("{\"operator\"").count(),
        1,
        "the case stands once, in the command that replays it:\n{screen}"
    );
}

fn sweep(dir: &Path, arguments: &[&str]) -> Output {
    let [out, none] = ["out", "none"].map(|name| dir.join(name).display().to_string());
    Parity::new(&[arguments, &["--out", &out, "--regressions", &none]].concat()).run()
}

/// A wrong kernel in numpy; `None` without numpy, which is reported.
fn numpy(bug: &str, arguments: &[&str]) -> Option<(Output, Report)> {
    let has_numpy = std::process::Command::new("python3").args(["-c", "import numpy"]).output();
    if !has_numpy.is_ok_and(|output| output.status.success()) {
        eprintln!(
            "1 skipped: a wrong kernel in numpy: `python3 -c 'import numpy'` does not work here"
        );
        return None;
    }
    let dir = tempfile::tempdir().expect("a scratch directory");
    let script = dir.path().join("kernel.py");
    std::fs::write(&script, include_str!("wrong/numpy_rms_norm.py")).expect("written");
    let package = fixtures().join("external").canonicalize().expect("fixtures/external");
    let worker = format!("PYTHONPATH='{}' python3 '{}' {bug}", package.display(), script.display());
    let fixed = ["external", "--op", "rms_norm", "--forward-only", "--worker", &worker];
    let output = sweep(dir.path(), &[&fixed[..], arguments].concat());
    let report = std::fs::read_to_string(dir.path().join("out/report.json")).expect("a report");
    let summary = std::fs::read_to_string(dir.path().join("out/summary.md")).expect("a summary");
    let page = std::fs::read_to_string(dir.path().join("out/index.html")).expect("a page");
    let report: Report = serde_json::from_str(&report).expect("a report");
    let said = &diagnosis::of_report(&report)[0];
    assert!(
        page.matches("class=\"diagnosis\"").count() == 2 && summary.contains("failing cases: "),
        "{summary}"
    );
    assert!(page.contains(&said.heading()), "{}", said.heading());
    Some((output, report))
}

#[test]
fn a_wrong_row_stride_is_named_and_its_case_made_as_small_as_fails() {
    let Some((output, report)) = numpy("stride", &[]) else { return };
    assert_fits_a_screen(&output, &["width % 8 != 0"]);
    let small = report
        .cases
        .iter()
        .find(|case| case.origin == Origin::Shrunk)
        .expect("a case made smaller");
    assert_eq!(
        [small.case["num_rows"].as_u64(), small.case["width"].as_u64()],
        [Some(2), Some(1)],
        "{}",
        small.case
    );
}

#[test]
fn a_weight_that_is_not_applied_is_named() {
    if left_out(&ROOMS) {
        return;
    }
    let Some((output, _)) = numpy("weight", &[]) else { return };
    assert_fits_a_screen(&output, &["weight present"]);
}

#[test]
fn an_eps_outside_of_the_root_is_named() {
    if left_out(&ROOMS) {
        return;
    }
    let Some((output, _)) = numpy("eps", &[]) else { return };
    assert_fits_a_screen(&output, &["rstd is 1,000 of what it should be = 1 / √eps"]);
}

#[test]
fn a_scale_that_is_applied_twice_is_named() {
    if left_out(&ROOMS) {
        return;
    }
    let mutants = planted::load(&fixtures().join("mutants")).expect("lists of mutants");
    let mutant =
        mutants.iter().find(|mutant| mutant.id == "indexer_logits_scale_twice").expect("FM-01");
    let dir = tempfile::tempdir().expect("a scratch directory");
    let kernels = changed_kernels(dir.path(), &mutant.file, &mutant.find, &mutant.replace)
        .display()
        .to_string();
    let fixed = ["run", "--backend", "emulator", "--ops", "indexer_logits", "--kernels", &kernels];
    let output = sweep(
        dir.path(),
        &[&fixed[..], &["--cases", "8", "--edge-cases", "8", "--schedules", "0"]].concat(),
    );
    assert_fits_a_screen(&output, &["= sm_scale: applied once too often?"]);
}

#[test]
fn a_worker_that_cannot_start_is_told_once_and_no_report_is_begun() {
    let dir = tempfile::tempdir().expect("a scratch directory");
    let starts: BTreeMap<&str, [&str; 2]> = [
        ("echo broken >&2; exit 3", ["exit code 3", "broken"]),
        ("sleep 0.4; exit 4", ["exit code 4", "hint: "]),
        // Oracles compute each operation on one thread, in every process of the program.
        ("echo \"mask ${CANDLE_CPU_MASK-none}\" >&2; exit 6", ["exit code 6", "mask 0"]),
        ("/nonexistent/kernel", ["exit code 127", "hint: the command is not found"]),
        ("python3 -c 'import dsv4_no_such_thing'", ["No module named", "hint: "]),
    ]
    .into();
    for (worker, needles) in starts {
        let output = sweep(dir.path(), &["external", "--op", "rms_norm", "--worker", worker]);
        output.assert_code(2);
        for needle in needles.iter().chain(&["the worker cannot start"]) {
            assert_eq!(output.stderr.matches(needle).count(), 1, "`{needle}`:\n{}", output.stderr);
        }
        assert!(
            output.stdout.is_empty() && !dir.path().join("out/report.json").exists(),
            "{}",
            output.stdout
        );
    }
    // A worker that starts and dies in a case is that case's failure.
    let dies = "read -r line; exit 5";
    let output = sweep(
        dir.path(),
        &["external", "--op", "rms_norm", "--worker", dies, "--cases", "2", "--edge-cases", "0"],
    );
    output.assert_code(1);
    assert!(output.stderr.contains("the worker ended with exit code 5"), "{}", output.stderr);
}
