//! `parity diff`: two reports compared, as a reviewer sees it.

use std::path::Path;

use dsv4_parity::operator::Family;
use dsv4_parity::record::{
    BenchmarkRecord, CaseRecord, CheckRecord, HeatMap, Metrics, MutantRecord, MutantStatus,
    OperatorRecord, Origin, Report, Revision, SCHEMA_VERSION, ShardRecord, Verdict, Worst,
};
use dsv4_parity::report::diff::{self, Diff, Kind};
use dsv4_runtime::{BackendKind, Environment};

use crate::command_line::{Output, Parity};

/// Cases of the operator in [`report`].
const CASES: u64 = 24;

fn metrics(budget_used: f64) -> Metrics {
    Metrics {
        whole: None,
        power: None,
        cosine: 1.0,
        norm_ratio: 1.0,
        relative_l2: 1e-3,
        max_abs: 1e-3,
        ulp_p50: 0.2,
        ulp_p99: 0.5,
        ulp_max: 0.5,
        budget_used,
        budget_relative: 4e-3,
        budget_multiple: 5.0,
        worst_row: 0,
        worst_row_relative_l2: 1e-3,
        worst: Worst { index: vec![0], kernel: 1.0, oracle: 1.0, allowed: 1e-3 },
        use_histogram: vec![0; 16],
        heat: HeatMap { rows: 1, columns: 1, total_rows: 1, total_columns: 1, cells: vec![0.5] },
    }
}

fn check(name: &str, tensor: &str, metrics: Option<Metrics>) -> CheckRecord {
    let (check, tensor) = (name.into(), tensor.to_owned());
    CheckRecord {
        check,
        tensor,
        verdict: Verdict::Pass,
        compared: 64,
        message: String::new(),
        metrics: metrics.map(Box::new),
        failing: None,
    }
}

fn case(number: u64) -> CaseRecord {
    // Spread over 0.3 … 0.8 in no order.
    let used = 0.3 + 0.5 * ((number * 7) % CASES) as f64 / CASES as f64;
    CaseRecord {
        operator: "rms_norm".into(),
        case: serde_json::json!({ "operator": "rms_norm", "num_rows": number + 1, "seed": number }),
        plan_number: Some(number),
        untestable: None,
        seconds: None,
        our_seconds: None,
        batches: Vec::new(),
        unsupported: None,
        origin: Origin::Drawn,
        paths: vec![if number.is_multiple_of(2) { "forward_block" } else { "forward_warp" }.into()],
        checks: vec![
            check("forward", "y", Some(metrics(used))),
            check("gradient", "dx", Some(metrics(0.5 * used))),
            check("guards", "", None),
        ],
        kernel_seconds: 0.1,
        oracle_seconds: 0.1,
        skips: Vec::new(),
        replay: format!("parity replay 'case {number}'"),
    }
}

fn benchmark(id: &str, median_ns: f64) -> BenchmarkRecord {
    BenchmarkRecord {
        id: id.into(),
        operator: "rms_norm".into(),
        median_ns,
        low_ns: 0.98 * median_ns,
        high_ns: 1.02 * median_ns,
        samples: 100,
        bytes: 1e6,
        flops: 1e6,
        percent_of_limit: None,
    }
}

fn mutant(id: &str, killed_by: &[&str]) -> MutantRecord {
    MutantRecord {
        id: id.into(),
        catalogue: "FM-56".into(),
        operator: "rms_norm".into(),
        summary: "eps is added after the root.".into(),
        expected: "forward".into(),
        killed_by: killed_by.iter().map(|&check| check.into()).collect(),
        status: if killed_by.is_empty() { MutantStatus::Survived } else { MutantStatus::Killed },
        ..MutantRecord::default()
    }
}

/// A passing run with everything that a comparison reads.
pub fn report() -> Report {
    Report {
        schema_version: SCHEMA_VERSION,
        command: "parity run".into(),
        started_unix: 1_751_292_309,
        seconds: 1.0,
        revision: Revision {
            commit: "3f9c1d2a7be04c55".into(),
            dirty: false,
            kernels: "the embedded kernels".into(),
            kernels_digest: "b3d1f0a9".into(),
        },
        environment: Environment {
            backend: BackendKind::Cuda,
            device: "NVIDIA H200".into(),
            driver: "580".into(),
            compiler: "NVRTC 13.0".into(),
            target: "sm_90a".into(),
            processors: 132,
            shared_bytes_per_block: 232_448,
        },
        profile: "ci".into(),
        seed: 0,
        schedules: 2,
        operators: vec![OperatorRecord {
            name: "rms_norm".into(),
            family: Some(Family::Projections),
            summary: String::new(),
            specification: Vec::new(),
            kernel_file: String::new(),
            oracle_file: String::new(),
            dtypes: vec!["bf16".into(), "f32".into()],
            axes: vec!["width".into()],
            has_backward: true,
            paths: Vec::new(),
            tensors: Vec::new(),
            invariant: Vec::new(),
            conventions: Vec::new(),
            not_expressible: Vec::new(),
        }],
        cases: (0..CASES).map(case).collect(),
        benchmarks: vec![benchmark("rms_norm/a", 100.0), benchmark("rms_norm/b", 200.0)],
        ceilings: None,
        mutants: vec![mutant("eps_outside_root", &["forward"])],
        kill_matrix: None,
        skips: Vec::new(),
        unsupported: Vec::new(),
        unfinished: None,
        saved: Vec::new(),
        base: None,
        shards: Vec::new(),
    }
}

/// [`report`] compared with a copy that `change` modified.
fn after(change: impl FnOnce(&mut Report)) -> Diff {
    let mut head = report();
    change(&mut head);
    diff::compare(&report(), &head).expect("comparable")
}

/// Kind and subject of every finding.
fn findings(diff: &Diff) -> Vec<(Kind, &str)> {
    diff.findings.iter().map(|finding| (finding.kind, finding.subject.as_str())).collect()
}

fn is_red(diff: &Diff) -> bool {
    diff.regressions().next().is_some()
}

/// The metrics of one tensor in every case.
fn tensor<'a>(report: &'a mut Report, name: &'a str) -> impl Iterator<Item = &'a mut Metrics> {
    let checks = report
        .cases
        .iter_mut()
        .flat_map(|case| &mut case.checks)
        .filter(move |check| check.tensor == name);
    checks.filter_map(|check| check.metrics.as_deref_mut())
}

/// Values in 0..1 without order.
fn noise(place: usize) -> f64 {
    (place as f64 * 0.618_033_988_749_895).fract()
}

// ---------------------------------------------------------------- verdicts

#[test]
fn a_report_does_not_differ_from_itself() {
    let diff = after(|_| {});
    assert_eq!(findings(&diff), []);
    assert!(
        diff.notes.iter().any(|note| note.contains("kernel sources are the same")),
        "{:?}",
        diff.notes
    );
}

#[test]
fn a_check_that_fails_in_one_case_is_newly_failing_and_the_way_back_is_newly_passing() {
    let mut head = report();
    head.cases[3].checks[1].verdict = Verdict::Fail;
    head.cases[3].checks[1].message = "37 times the budget".into();
    let diff = diff::compare(&report(), &head).unwrap();
    assert_eq!(findings(&diff), [(Kind::NewlyFailing, "gradient (dx)")]);
    assert_eq!(diff.findings[0].replay.as_deref(), Some("parity replay 'case 3'"));
    assert_eq!(
        (diff.findings[0].base.as_str(), diff.findings[0].head.as_str()),
        ("0 of 24 failed", "1 of 24 failed")
    );
    assert!(diff.findings[0].why.contains("37 times"));
    let back = diff::compare(&head, &report()).unwrap();
    assert_eq!(findings(&back), [(Kind::NewlyPassing, "gradient (dx)")]);
    assert!(!is_red(&back));
}

#[test]
fn a_failure_in_both_reports_is_no_regression_but_one_more_failing_case_is() {
    let fail =
        |report: &mut Report, place: usize| report.cases[place].checks[0].verdict = Verdict::Error;
    let mut base = report();
    fail(&mut base, 3);
    let mut head = base.clone();
    let diff = diff::compare(&base, &head).unwrap();
    assert_eq!(findings(&diff), [(Kind::StillFailing, "forward (y)")]);
    assert!(!is_red(&diff));
    fail(&mut head, 4);
    assert_eq!(
        findings(&diff::compare(&base, &head).unwrap()),
        [(Kind::NewlyFailing, "forward (y)")]
    );
}

#[test]
fn a_pass_that_compared_nothing_counts_as_newly_failing() {
    assert_eq!(
        findings(&after(|head| head.cases[0].checks[2].compared = 0)),
        [(Kind::NewlyFailing, "guards")]
    );
}

// ---------------------------------------------------------------- budgets

#[test]
fn budget_use_that_leans_upwards_in_the_same_cases_grew() {
    let diff = after(|head| tensor(head, "y").for_each(|one| one.budget_used *= 1.02));
    assert_eq!(findings(&diff), [(Kind::BudgetUseGrew, "forward (y)")]);
    let diff = after(|head| tensor(head, "y").for_each(|one| one.budget_used *= 0.98));
    assert_eq!(findings(&diff), [(Kind::BudgetUseFell, "forward (y)")]);
    assert!(!is_red(&diff));
}

#[test]
fn budget_use_that_is_reshuffled_did_not_grow() {
    let reshuffle = |head: &mut Report| {
        tensor(head, "y")
            .enumerate()
            .for_each(|(place, one)| one.budget_used += 0.2 * (noise(place) - 0.5));
    };
    let diff = after(reshuffle);
    assert_eq!(findings(&diff), []);
    let rise = diff.operators[0].tensors[0].largest_rise.as_ref().expect("some case rose");
    assert!(rise.1 > rise.0, "the largest rise is shown");
}

#[test]
fn a_budget_that_forgives_more_is_loosened() {
    let diff = after(|head| tensor(head, "dx").for_each(|one| one.budget_relative *= 1.5));
    assert_eq!(findings(&diff), [(Kind::BudgetLoosened, "gradient (dx)")]);
    assert!(is_red(&diff));
}

#[test]
fn with_another_seed_tensors_are_compared_as_samples() {
    let other_seed = |low: f64, width: f64| {
        move |head: &mut Report| {
            head.seed = 1;
            for case in &mut head.cases {
                case.case["seed"] = (case.case["seed"].as_u64().unwrap() + 1000).into();
            }
            tensor(head, "y")
                .enumerate()
                .for_each(|(place, one)| one.budget_used = low + width * noise(place));
        }
    };
    let diff = after(other_seed(0.3, 0.5));
    assert_eq!(findings(&diff), []);
    assert!(diff.notes.iter().any(|note| note.contains("Different seeds")));
    assert_eq!(findings(&after(other_seed(0.6, 0.39))), [(Kind::BudgetUseGrew, "forward (y)")]);
}

#[test]
fn unchanged_kernels_are_called_worse_no_more_often_than_the_stated_rate() {
    let mut state = 1_u64;
    let mut roll = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1_u64 << 53) as f64
    };
    let trials = 1000;
    let red = (0..trials).filter(|_| {
        is_red(&after(|head| {
            for name in ["y", "dx"] {
                tensor(head, name).for_each(|one| one.budget_used += roll() - 0.5);
                tensor(head, name).for_each(|one| one.budget_relative += 1e-4 * (roll() - 0.5));
            }
            // A use above 1 would contradict the verdict.
            tensor(head, "y").for_each(|one| one.budget_used = one.budget_used.clamp(0.0, 1.0));
        }))
    });
    let share = red.count() as f64 / f64::from(trials);
    // Three standard deviations of a count with that rate.
    let rate = diff::FALSE_ALARM_RATE;
    let most = rate + 3.0 * (rate * (1.0 - rate) / f64::from(trials)).sqrt();
    assert!(share <= most, "{share} of the comparisons are red, at a rate of {rate}");
}

// ---------------------------------------------------------------- coverage

#[test]
fn fewer_cases_or_a_lost_path_check_axis_or_schedule_shrink_coverage() {
    let shrank = |subject: &'static str| [(Kind::CoverageShrank, subject)];
    assert_eq!(findings(&after(|head| drop(head.cases.pop()))), shrank("cases"));
    let one_path = |head: &mut Report| {
        head.cases.iter_mut().for_each(|case| case.paths = vec!["forward_block".into()])
    };
    assert_eq!(findings(&after(one_path)), shrank("path forward_warp"));
    let no_guards =
        |head: &mut Report| head.cases.iter_mut().for_each(|case| drop(case.checks.pop()));
    assert_eq!(findings(&after(no_guards)), shrank("guards"));
    let fewer_guards = |head: &mut Report| drop(head.cases[5].checks.pop());
    assert_eq!(findings(&after(fewer_guards)), shrank("guards"));
    assert_eq!(findings(&after(|head| head.operators[0].axes.clear())), shrank("axis width"));
    assert_eq!(
        findings(&after(|head| head.operators[0].has_backward = false)),
        shrank("kernel backward")
    );
    assert_eq!(
        findings(&after(|head| head.schedules = 1)),
        shrank("random schedules of each case")
    );
    assert_eq!(
        findings(&after(|head| head.benchmarks.truncate(1))),
        shrank("benchmark rms_norm/b")
    );
    assert_eq!(findings(&after(|head| head.mutants.clear())), shrank("mutant eps_outside_root"));
    assert_eq!(findings(&after(|head| head.cases.clear())), shrank("operator"));
}

/// Case `number` of a report as a later run has it among the saved cases.
fn remembered(number: u64) -> CaseRecord {
    CaseRecord { origin: Origin::Regression, plan_number: Some(0), ..case(number) }
}

/// The case that shrinking made of case `number`.
fn shrunk(number: u64) -> CaseRecord {
    CaseRecord { origin: Origin::Shrunk, ..case(number + 1000) }
}

#[test]
fn cases_that_a_run_saved_or_shrank_neither_add_coverage_to_the_next_one_nor_take_it_away() {
    let with = |cases: &[CaseRecord]| {
        let mut report = report();
        report.cases.splice(0..0, cases.iter().cloned());
        report
    };
    // Saved: a shrunk case, and one that stayed as it was drawn and is drawn again.
    let (small, again) = (CaseRecord { origin: Origin::Regression, ..shrunk(3) }, remembered(5));
    let before = report();
    let first = {
        let mut first = report();
        first.cases.push(shrunk(3));
        first
    };
    let second = with(&[small, again]);
    for (base, head) in
        [(&before, &second), (&first, &second), (&second, &before), (&second, &first)]
    {
        let diff = diff::compare(base, head).unwrap();
        assert_eq!(findings(&diff), []);
        assert_eq!(diff.operators[0].cases, [CASES, CASES, CASES]);
    }
    let gone = diff::compare(&second, &before).unwrap();
    let said = "rms_norm: 1 remembered case in BASE (1 of them not in HEAD), 0 in HEAD. They are compared apart";
    assert!(gone.notes.iter().any(|note| note.starts_with(said)), "{:?}", gone.notes);
    assert_eq!(gone.operators[0].remembered, [1, 0, 0]);
}

#[test]
fn a_remembered_case_that_fails_is_newly_failing_as_any_other() {
    let mut head = report();
    head.cases.insert(0, remembered(2000));
    let base = head.clone();
    head.cases[0].checks[0].verdict = Verdict::Fail;
    assert_eq!(
        findings(&diff::compare(&base, &head).unwrap()),
        [(Kind::NewlyFailing, "forward (y)")]
    );
    // If a case ran twice, a failure in either run counts.
    let mut twice = report();
    twice.cases.insert(0, remembered(5));
    twice.cases[0].checks[0].verdict = Verdict::Fail;
    assert_eq!(
        findings(&diff::compare(&report(), &twice).unwrap()),
        [(Kind::NewlyFailing, "forward (y)")]
    );
}

#[test]
fn checks_that_a_failure_kept_from_running_are_no_second_finding() {
    let diff = after(|head| {
        let failed = CheckRecord { verdict: Verdict::Error, ..check("launch", "", None) };
        head.cases[2].checks = vec![failed];
    });
    assert_eq!(findings(&diff), [(Kind::NewlyFailing, "launch")]);
}

#[test]
fn another_seed_that_missed_a_rare_path_is_no_regression_but_a_common_path_is() {
    let lost = |seen: usize| {
        let mut base = report();
        base.cases.iter_mut().take(seen).for_each(|case| case.paths.push("rare".into()));
        let mut head = report();
        head.seed = 1;
        is_red(&diff::compare(&base, &head).unwrap())
    };
    assert!(!lost(2));
    assert!(lost(12));
}

#[test]
fn a_mutant_that_survives_is_a_regression_even_when_it_is_new() {
    let survives = [(Kind::MutantSurvives, "mutant eps_outside_root")];
    assert_eq!(
        findings(&after(|head| head.mutants[0] = mutant("eps_outside_root", &[]))),
        survives
    );
    let diff = after(|head| head.mutants.push(mutant("planted_today", &[])));
    assert_eq!(findings(&diff), [(Kind::MutantSurvives, "mutant planted_today")]);
}

// ---------------------------------------------------------------- speed

#[test]
fn speed_changes_only_where_the_intervals_do_not_overlap() {
    let timed = |factor: f64| {
        after(move |head| head.benchmarks[0] = benchmark("rms_norm/a", 100.0 * factor))
    };
    assert_eq!(findings(&timed(1.03)), []);
    assert_eq!(findings(&timed(1.05)), [(Kind::Slower, "benchmark rms_norm/a")]);
    assert_eq!(findings(&timed(0.95)), [(Kind::Faster, "benchmark rms_norm/a")]);
    assert!(is_red(&timed(1.05)) && !is_red(&timed(0.95)));
}

#[test]
fn speed_is_not_compared_between_devices_or_for_other_work() {
    let diff = after(|head| {
        head.environment.device = "NVIDIA B200".into();
        head.benchmarks[0] = benchmark("rms_norm/a", 500.0);
    });
    assert_eq!(findings(&diff), []);
    assert!(
        diff.notes.iter().any(|note| note.contains("NVIDIA B200") && note.contains("speed is not"))
    );
    let diff = after(|head| {
        head.benchmarks[0] = BenchmarkRecord { bytes: 2e6, ..benchmark("rms_norm/a", 500.0) }
    });
    assert_eq!(findings(&diff), []);
    assert!(diff.notes.iter().any(|note| note.contains("other work")));
}

#[test]
fn another_profile_is_noted_and_its_number_of_cases_is_not_judged() {
    let diff = after(|head| {
        head.profile = "quick".into();
        head.cases.truncate(10);
    });
    assert_eq!(findings(&diff), []);
    assert!(diff.notes.iter().any(|note| note.contains("Different profiles")));
}

// ---------------------------------------------------------------- command line

/// Writes reports and compares them; the pages land in `dir`.
fn parity_diff(dir: &Path, base: &Report, head: &Report) -> Output {
    for (name, report) in [("base", base), ("head", head)] {
        std::fs::create_dir_all(dir.join(name)).unwrap();
        std::fs::write(dir.join(name).join("report.json"), serde_json::to_string(report).unwrap())
            .unwrap();
    }
    let path = |name: &str| dir.join(name).display().to_string();
    // One as a folder, the other as a file.
    let (base, head, page, comment) =
        (path("base"), path("head/report.json"), path("d.html"), path("d.md"));
    Parity::new(&["diff", &base, &head, "--html", &page, "--markdown", &comment]).run()
}

#[test]
fn diff_ends_with_0_when_nothing_got_worse_and_with_1_when_something_did() {
    let dir = tempfile::tempdir().unwrap();
    parity_diff(dir.path(), &report(), &report()).assert_code(0);
    let mut head = report();
    head.cases[3].checks[0].verdict = Verdict::Fail;
    head.cases[3].checks[0].message = "a | b <script>".into();
    tensor(&mut head, "dx").for_each(|one| one.budget_used *= 1.1);
    head.benchmarks[0] = benchmark("rms_norm/a", 150.0);
    let output = parity_diff(dir.path(), &report(), &head);
    output.assert_code(1);
    let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
    let (page, comment) = (read("d.html"), read("d.md"));
    for needle in
        ["newly failing", "budget use grew", "slower", "rms_norm", "3 regressions", "parity replay"]
    {
        for (place, text) in [("terminal", &output.stdout), ("page", &page), ("comment", &comment)]
        {
            assert!(text.contains(needle), "`{needle}` is not in the {place}");
        }
    }
    assert!(comment.contains("a \\| b &lt;script&gt;") && !page.contains("b <script"), "unescaped");
    assert!(!page.contains("http"), "the page refers to something outside itself");
    assert!(comment.len() < 65_536, "too long for a comment");
}

#[test]
fn diff_puts_what_changed_on_the_pages_of_head_and_reports_made_anew_keep_it() {
    let dir = tempfile::tempdir().unwrap();
    parity_diff(dir.path(), &report(), &report()).assert_code(0);
    let (base, head) = (dir.path().join("base"), dir.path().join("head"));
    let [base_path, head_path] = [&base, &head].map(|path| path.display().to_string());
    let with_page = |head: &str| Parity::new(&["diff", &base_path, head, "--page"]).run();
    with_page(&head_path).assert_code(0);
    let read = |name: &str| std::fs::read_to_string(head.join(name)).unwrap();
    assert!(read("diff.html").contains("No regression"));
    let first_screen = |page: String| page[..page.find("class=\"totals\"").unwrap()].to_owned();
    assert!(first_screen(read("index.html")).contains("Against the base: No regression"));
    assert!(
        read("index.html").contains("href=\"diff.html\"")
            && read("summary.md").contains("### Against the base")
    );
    Parity::new(&["report", &head_path]).run().assert_code(0);
    assert!(first_screen(read("index.html")).contains("Against the base: No regression"));
    let file = head.join("report.json").display().to_string();
    let refused = with_page(&file);
    refused.assert_code(2);
    assert!(
        refused.stderr.contains("--page") && refused.stderr.contains(&file),
        "{}",
        refused.stderr
    );
}

#[test]
fn a_comment_stays_short_enough_when_everything_fails() {
    let mut head = report();
    for case in &mut head.cases {
        for number in 0..300 {
            let failed = CheckRecord {
                verdict: Verdict::Fail,
                ..check(&format!("law: {number}"), "y", None)
            };
            case.checks.push(CheckRecord { message: "wrong ".repeat(1000), ..failed });
        }
    }
    let diff = diff::compare(&report(), &head).unwrap();
    let comment = diff::markdown(&report(), &head, &diff);
    assert!(comment.len() < 65_536, "{} bytes", comment.len());
    assert!(comment.contains("… and 260 more"));
}

#[test]
fn diff_refuses_other_schemas_unreadable_files_parts_of_runs_and_strangers() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |base: &Report, head: &Report, needle: &str| {
        let output = parity_diff(dir.path(), base, head);
        output.assert_code(2);
        assert!(output.stderr.contains(needle), "`{needle}` is not in {}", output.stderr);
        assert_eq!(output.stdout, "");
    };
    let changed = |change: fn(&mut Report)| {
        let mut head = report();
        change(&mut head);
        head
    };
    for version in [1, 99] {
        let head = Report { schema_version: version, ..report() };
        refused(
            &report(),
            &head,
            &format!("schema_version {version}; this program reads {SCHEMA_VERSION}"),
        );
    }
    refused(&changed(|base| base.cases.clear()), &report(), "no case");
    let stranger =
        |head: &mut Report| head.cases.iter_mut().for_each(|case| case.operator = "rope".into());
    refused(&report(), &changed(stranger), "no operator in common");
    let shard = |head: &mut Report| {
        head.shards = vec![ShardRecord {
            index: 1,
            count: 4,
            planned_cases: 100,
            plan_digest: String::new(),
            executable_digest: String::new(),
            device: String::new(),
            settings: Default::default(),
            seconds: 1.0,
        }];
    };
    refused(&report(), &changed(shard), "1 of 4 shards");
    for (name, text) in [("no.json", "no report"), ("half.json", "{\"schema_version\":2}")] {
        std::fs::write(dir.path().join(name), text).unwrap();
        let file = dir.path().join(name).display().to_string();
        let output = Parity::new(&["diff", &file, &file]).run();
        output.assert_code(2);
        assert!(output.stderr.contains(name), "{}", output.stderr);
    }
    let output = Parity::new(&["diff", "/nonexistent", "/nonexistent"]).run();
    output.assert_code(2);
    assert!(output.stderr.contains("/nonexistent"));
}
