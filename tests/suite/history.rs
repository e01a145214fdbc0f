//! `parity history`: measures over revisions, and drifts that no single comparison detects.

use std::path::Path;

use dsv4_parity::record::{Report, Verdict};
use dsv4_parity::report::history::{self, Line, Series};

use crate::command_line::{Output, Parity};
use crate::diff::report;

/// Run `number` of a history: every measure has noise, and `factor` multiplies the budget uses of
/// `y`.
fn run(number: u32, factor: f64) -> Report {
    let mut report = report();
    report.started_unix += 86_400 * u64::from(number);
    report.revision.commit = format!("c{number:03}");
    let wobble =
        |place: usize| 1.0 + 0.02 * ((f64::from(number) * 7.3 + place as f64 * 0.61).sin());
    for (place, check) in
        report.cases.iter_mut().flat_map(|case| case.checks.iter_mut().enumerate())
    {
        if let Some(metrics) = &mut check.metrics {
            metrics.budget_used *= wobble(place) * if check.tensor == "y" { factor } else { 1.0 };
        }
    }
    for (place, one) in report.benchmarks.iter_mut().enumerate() {
        one.median_ns *= wobble(place + 9);
    }
    report
}

fn drifting(series: &[Series]) -> Vec<String> {
    let names = |one: &Series| {
        format!("{} {} {}", one.lines[0].check, one.lines[0].subject, one.lines[0].metric)
    };
    series.iter().filter(|one| one.drifts).map(names).collect()
}

fn lines(runs: impl IntoIterator<Item = Report>) -> Vec<Line> {
    runs.into_iter().flat_map(|report| history::lines(&report)).collect()
}

#[test]
fn a_run_leaves_one_line_for_each_operator_check_and_metric() {
    let lines = lines([run(0, 1.0)]);
    let mut names: Vec<_> =
        lines.iter().map(|l| (l.check.as_str(), l.subject.as_str(), l.metric.as_str())).collect();
    assert_eq!(names.len(), 2 * 3 + 2);
    assert!(
        names.contains(&("forward", "y", "budget_used"))
            && names.contains(&("benchmark", "rms_norm/a", "median_ns"))
    );
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), lines.len(), "a measure has two lines");
    assert!(lines.iter().all(|line| line.green && line.commit == "c000" && line.value > 0.0));
}

#[test]
fn a_slow_rise_is_a_drift_and_noise_is_none() {
    let rising = |length: u32| {
        lines((0..length).map(|number| run(number, 1.05_f64.powf(f64::from(number) / 3.0))))
    };
    assert_eq!(drifting(&history::series(&rising(3))), [""; 0], "three runs prove nothing");
    let drifts = drifting(&history::series(&rising(20)));
    assert_eq!(drifts, ["forward y budget_used", "forward y budget_used_worst"]);
    assert_eq!(drifting(&history::series(&lines((0..60).map(|number| run(number, 1.0))))), [""; 0]);
}

#[test]
fn runs_of_unchanged_kernels_are_one_point() {
    let repeated = lines((0..30).map(|number| Report { started_unix: number, ..run(0, 1.0) }));
    let series = history::series(&repeated);
    assert!(series.iter().all(|one| one.points == 1 && !one.drifts && one.lines.len() == 30));
}

#[test]
fn a_history_without_a_drift_warns_no_more_often_than_the_stated_rate() {
    let mut state = 5_u64;
    let mut roll = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64
    };
    let template = &lines([run(0, 1.0)])[0];
    let histories = 200;
    // A history warns if it warns after any of its runs.
    let warned = (0..histories).filter(|_| {
        let all: Vec<Line> = (0..25).map(|_| Line { value: roll(), ..template.clone() }).collect();
        (2..=all.len()).any(|length| history::series(&all[..length])[0].drifts)
    });
    let share = warned.count() as f64 / f64::from(histories);
    let rate = history::FALSE_ALARM_RATE;
    assert!(
        share <= rate + 3.0 * (rate * (1.0 - rate) / f64::from(histories)).sqrt(),
        "{share} at a rate of {rate}"
    );
}

#[test]
fn other_devices_and_sweeps_are_other_series() {
    let mut other = run(1, 1.0);
    other.environment.device = "NVIDIA B200".into();
    let separate = history::series(&lines([run(0, 1.0), other])).len();
    assert_eq!(separate, 2 * history::series(&lines([run(0, 1.0)])).len());
    let mut other = run(1, 1.0);
    other.seed = 9;
    // Benchmarks do not depend on the seed.
    assert_eq!(history::series(&lines([run(0, 1.0), other])).len(), 2 * 6 + 2);
}

// ---------------------------------------------------------------- command line

fn history_of(dir: &Path, runs: impl IntoIterator<Item = Report>) -> String {
    let file = dir.join("history.jsonl");
    for report in runs {
        history::append(&report, &file).expect("appends");
    }
    file.display().to_string()
}

fn parity(arguments: &[&str]) -> Output {
    Parity::new(arguments).run()
}

#[test]
fn history_prints_plots_and_warns_while_everything_is_green() {
    let dir = tempfile::tempdir().unwrap();
    let file =
        history_of(dir.path(), (0..20).map(|number| run(number, 1.02_f64.powf(f64::from(number)))));
    let page = dir.path().join("history.html").display().to_string();
    let output = parity(&["history", &file, "--html", &page]);
    output.assert_code(0);
    for needle in [
        "rms_norm",
        "▁",
        "█",
        "median_ns",
        "warning: rms_norm forward y budget_used drifts upwards",
        "still green",
    ] {
        assert!(output.stdout.contains(needle), "`{needle}` is not in\n{}", output.stdout);
    }
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("<polyline") && page.contains("2 drifts") && !page.contains("http"));

    let output = parity(&["history", &file, "--since", "c017"]);
    output.assert_code(0);
    assert!(
        output.stdout.contains("no drift") && output.stdout.contains("3 runs"),
        "{}",
        output.stdout
    );
}

#[test]
fn a_drift_of_a_failing_operator_is_not_called_green() {
    let dir = tempfile::tempdir().unwrap();
    let fail = |mut report: Report| {
        report.cases[0].checks[2].verdict = Verdict::Fail;
        report
    };
    let file = history_of(
        dir.path(),
        (0..20).map(|number| fail(run(number, 1.02_f64.powf(f64::from(number))))),
    );
    let output = parity(&["history", &file]);
    assert!(
        output.stdout.contains("and its operator fails") && !output.stdout.contains("green"),
        "{}",
        output.stdout
    );
}

#[test]
fn history_appends_a_report_and_refuses_what_it_cannot_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (file, stored) = (path("history.jsonl"), path("report.json"));
    std::fs::write(&stored, serde_json::to_string(&run(0, 1.0)).unwrap()).unwrap();
    parity(&["history", &file, "--append", &path("")]).assert_code(0);
    parity(&["history", &file, "--append", &stored]).assert_code(0);
    assert_eq!(history::read(Path::new(&file)).unwrap().len(), 2 * 8);

    let refused = |text: &str, needle: &str| {
        std::fs::write(&file, text).unwrap();
        let output = parity(&["history", &file]);
        output.assert_code(2);
        assert!(output.stderr.contains(needle), "`{needle}` is not in {}", output.stderr);
    };
    refused("", "holds no line");
    refused("{\"history_version\":99}\n", "history_version 99");
    refused("\nno line\n", "history.jsonl:2");
    refused("{\"history_version\":1}\n", "history.jsonl:1");
    parity(&["history", &path("absent.jsonl")]).assert_code(2);
}

#[test]
fn run_appends_its_measures_to_the_history() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (out, regressions, file) = (path("out"), path("regressions"), path("history.jsonl"));
    let backend = crate::support::backend().to_string();
    let arguments = [
        "run",
        "--backend",
        &backend,
        "--ops",
        "swiglu",
        "--cases",
        "0",
        "--edge-cases",
        "4",
        "--out",
        &out,
    ];
    let more = ["--regressions", &regressions, "--history", &file];
    for _ in 0..2 {
        parity(&[&arguments[..], &more].concat()).assert_code(0);
    }
    let lines = history::read(Path::new(&file)).expect("a history");
    let series = history::series(&lines);
    assert!(
        series.iter().all(|one| one.lines.len() == 2) && series.len() >= 4,
        "{} series",
        series.len()
    );
}
