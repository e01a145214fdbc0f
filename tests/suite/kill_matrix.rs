//! `parity mutants`: exit codes, output, and files. Always on the emulator, as [`crate::mutants`].

use std::path::Path;

use dsv4_parity::mutants::generated;
use dsv4_parity::mutants::matrix::trial::{self, Subject, Trial};
use dsv4_parity::mutants::matrix::{equivalent::Equivalents, plan};
use dsv4_parity::record::{MutantSource, MutantStatus, Report};
use dsv4_runtime::{BackendKind, Device};
use tempfile::TempDir;

use crate::command_line::{Output, Parity};
use crate::extent::left_out;
use crate::support::fixtures;

/// Rooms whose changes run the long tests of this file.
const MUTANTS: [&str; 4] =
    ["src/mutants/", "src/command/mutants.rs", "src/report/generated.rs", "fixtures/mutants/"];

/// A folder of mutants with one file.
fn folder(name: &str, text: &str) -> TempDir {
    let dir = tempfile::tempdir().expect("a scratch directory");
    std::fs::write(dir.path().join(name), text).expect("a file");
    dir
}

fn mutants(mutants: &Path, arguments: &[&str]) -> Output {
    let dir = mutants.to_str().expect("UTF-8");
    let mut all = vec![
        "mutants",
        "--backend",
        "emulator",
        "--ops",
        "kv_cache_write",
        "--schedules",
        "1",
        "--mutants",
        dir,
    ];
    all.extend(arguments);
    Parity::new(&all).env("PARITY_FIXTURES", fixtures().to_str().expect("UTF-8")).run()
}

/// A planted mutant of kv_cache_write, whose cases are the cheapest, that changes one line and has
/// one case.
fn planted(find: &str, replace: &str) -> String {
    format!(
        r#"operator = "kv_cache_write"
file = "group_write.h"

[cases]
small = '{{"operator":"kv_cache_write","num_tokens":11,"nope_dim":128,"rope_dim":32,"num_pages":3,"page_size":5,"slots":"hostile","contents":"drawn","distribution":"normal","magnitude":1.0,"page_padding":152,"seed":1}}'

[mutants.cache_bug]
catalogue = "FM-114"
summary = "One line is another."
find = '{find}'
replace = '{replace}'
expected = "forward"
cases = ["small"]
"#
    )
}

const SCALE: &str = "const uint8_t scale = group_scale(largest(largest_magnitude(stored), GROUP_LANES), E4M3_FLOOR, 1.0f / 448.0f);";

#[test]
fn a_planted_mutant_that_survives_exits_with_1_and_is_shown_with_its_line() {
    let (out, replaced) =
        (tempfile::tempdir().expect("a scratch directory"), format!("/* as it was */ {SCALE}"));
    let bugs = folder("kv_cache_write.toml", &planted(SCALE, &replaced));
    let path = out.path().to_str().expect("UTF-8");
    let output = mutants(bugs.path(), &["--sample", "0", "--out", path]);
    output.assert_code(1);
    assert!(
        output
            .stdout
            .contains("below what is required: kv_cache_write: 1 planted mutant(s) not killed"),
        "{}",
        output.stdout
    );
    let read = |name: &str| std::fs::read_to_string(out.path().join(name)).expect(name);
    let report: Report = serde_json::from_str(&read("report.json")).expect("a report");
    let [mutant] = report.mutants.as_slice() else { panic!("{:?}", report.mutants) };
    assert_eq!((mutant.source, mutant.status), (MutantSource::Planted, MutantStatus::Survived));
    assert_eq!((mutant.original.as_str(), &mutant.mutated), (SCALE, &replaced));
    assert!(
        report
            .skips
            .iter()
            .any(|skip| skip.what == "generated mutants of kv_cache_write" && skip.count > 50)
    );
    assert!(
        read("index.html").contains("<span class=\"added\">+ /* as it was */ const uint8_t scale"),
        "the page shows no diff"
    );
    assert!(read("summary.md").contains("**survived:** `cache_bug`"), "{}", read("summary.md"));
}

#[test]
fn a_killed_mutant_exits_with_0_and_a_generated_survivor_shows_its_line() {
    let unscaled = SCALE.replace("1.0f / 448.0f", "1.0f");
    let bugs = folder("kv_cache_write.toml", &planted(SCALE, &unscaled));
    mutants(bugs.path(), &["--only", "cache_bug"]).assert_code(0);
    // Any lane of a group may store its scale; the list with this reason is not in this folder.
    let output =
        mutants(bugs.path(), &["--only", "kv_cache_write:write_group:comparison:9a1d2547"]);
    output.assert_code(1);
    for needle in
        ["SURVIVED", "lane_id() % GROUP_LANES == 0) scales", "lane_id() % GROUP_LANES != 0) scales"]
    {
        assert!(output.stdout.contains(needle), "`{needle}` is not in\n{}", output.stdout);
    }
}

#[test]
fn mutants_that_the_time_budget_leaves_out_are_skips_and_no_kills() {
    let (bugs, out) = (folder("none.txt", ""), tempfile::tempdir().expect("a scratch directory"));
    let path = out.path().to_str().expect("UTF-8");
    let output = mutants(bugs.path(), &["--sample", "9", "--time-budget", "0", "--out", path]);
    output.assert_code(1);
    assert!(
        output.stdout.contains("kv_cache_write: no generated mutant was judged"),
        "{}",
        output.stdout
    );
    let text = std::fs::read_to_string(out.path().join("report.json")).expect("a report");
    let report: Report = serde_json::from_str(&text).expect("a report");
    let skip = report.skips.iter().find(|skip| skip.why.contains("--time-budget")).expect("a skip");
    assert_eq!((skip.what.as_str(), skip.count), ("generated mutants of kv_cache_write", 9));
}

/// A seed whose sample of three contains a mutant of kv_cache_write that changes nothing.
fn seed_of_a_survivor() -> u64 {
    let list = Equivalents::load(&fixtures().join("mutants")).expect("a list");
    let all = generated::generate(&dsv4_kernels::sources(), "kv_cache_write").expect("mutants");
    let survives = |seed: &u64| {
        generated::sample(all.clone(), 3, *seed).iter().any(|m| list.reason(&m.id).is_some())
    };
    (0..1000).find(survives).expect("some are equivalent")
}

#[test]
fn a_kill_rate_under_the_floor_exits_with_1_and_a_resumed_run_judges_no_mutant_again() {
    if left_out(&MUTANTS) {
        return;
    }
    // Without the list of equivalent mutants, a mutant that changes nothing survives.
    let (bugs, out) = (folder("none.txt", ""), tempfile::tempdir().expect("a scratch directory"));
    let (path, seed) = (out.path().to_str().expect("UTF-8"), seed_of_a_survivor().to_string());
    let run = |more: &[&str]| {
        mutants(bugs.path(), &[&["--sample", "3", "--seed", &seed, "--out", path], more].concat())
    };
    let first = run(&["--floor", "1"]);
    first.assert_code(1);
    for needle in ["SURVIVED", "below what is required: kv_cache_write: "] {
        assert!(first.stdout.contains(needle), "`{needle}` is not in\n{}", first.stdout);
    }
    let journal = || std::fs::read_to_string(out.path().join("mutants.jsonl")).expect("a journal");
    let complete = journal();
    assert!(complete.matches("\"known\":").count() > 10, "{complete}");
    // What a list does not fit is found out before anything is written.
    let stale = folder("kv_cache_write.toml", &planted("no kernel says this", ""));
    mutants(stale.path(), &["--out", path]).assert_code(2);
    assert!(journal() == complete, "a list that does not fit changed the journal");
    let again = run(&["--floor", "0", "--resume"]);
    again.assert_code(0);
    assert!(journal() == complete, "cases without mutants ran again");
    assert!(again.stdout.contains("3 of 3 mutants were judged before"), "{}", again.stdout);
    let report = std::fs::read_to_string(out.path().join("report.json")).expect("a report");
    let report: Report = serde_json::from_str(&report).expect("a report");
    assert_eq!(report.mutants.len(), 3);
}

#[test]
fn lists_that_no_longer_fit_the_kernels_are_bad_input() {
    let stale = folder(
        "equivalent.toml",
        "[[equivalent]]\nids = [\"kv_cache_write:gone:scale:00000000\"]\nreason = \"None.\"\n",
    );
    mutants(stale.path(), &[])
        .assert_bad_input(&["equivalent.toml", "kv_cache_write:gone:scale:00000000"]);
    let anchor = folder("kv_cache_write.toml", &planted("no kernel says this", ""));
    mutants(anchor.path(), &[]).assert_bad_input(&["cache_bug", "0 times"]);
    let none = folder("none.txt", "");
    mutants(none.path(), &["--floor", "1.5"]).assert_bad_input(&["--floor 1.5"]);
    mutants(none.path(), &["--jobs", "0"]).assert_bad_input(&["--jobs 0"]);
    mutants(none.path(), &["--only", "kv_cache_write:gone"])
        .assert_bad_input(&["--only kv_cache_write:gone", "no such mutant"]);
    let stale = "kv_cache_write:largest_magnitude:constant:00000000";
    mutants(none.path(), &["--only", stale])
        .assert_bad_input(&[stale, "there is kv_cache_write:largest_magnitude:constant:"]);
    // A mutant planted for another operator, or for a chain, still has a test.
    let of_a_chain = "moe_weight_applied_twice";
    mutants(&fixtures().join("mutants"), &["--only", of_a_chain]).assert_bad_input(&[
        of_a_chain,
        "planted for moe",
        "test mutant::moe_weight_applied_twice",
    ]);
}

#[test]
fn a_mutant_that_is_asked_for_and_cannot_run_exits_with_1_and_says_why() {
    let bugs = folder("kv_cache_write.toml", &planted(SCALE, "const uint8_t scale = 0;"));
    let output = mutants(bugs.path(), &["--only", "cache_bug", "--memory", "1000"]);
    output.assert_code(1);
    assert!(output.stderr.contains("cache_bug did not run: "), "{}", output.stderr);
    mutants(bugs.path(), &["--only", "cache_bug"]).assert_code(0);
}

#[test]
fn generated_mutants_are_listed_with_their_places_though_the_list_of_equivalent_ones_fits_no_longer()
 {
    let stale =
        "[[equivalent]]\nids = [\"kv_cache_write:gone:scale:00000000\"]\nreason = \"None.\"\n";
    let output = mutants(folder("equivalent.toml", stale).path(), &["--list"]);
    output.assert_code(0);
    let all = generated::generate(&dsv4_kernels::sources(), "kv_cache_write").expect("mutants");
    let lines: Vec<&str> = output.stdout.lines().collect();
    assert_eq!(lines.len(), all.len());
    for (line, mutant) in lines.iter().zip(&all) {
        assert_eq!(
            *line,
            format!("{}  {}:{}  {}", mutant.id, mutant.file, mutant.line, mutant.summary)
        );
    }
}

#[test]
fn the_list_of_equivalent_mutants_fits_the_kernels() {
    if left_out(&MUTANTS) {
        return;
    }
    let list = Equivalents::load(&fixtures().join("mutants")).expect("a list");
    plan::generate(&dsv4_kernels::sources(), &dsv4_parity::operators::registry::names(), &list)
        .unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn a_survivor_is_equivalent_where_the_compiler_makes_the_same_code_of_it_and_only_there() {
    if left_out(&MUTANTS) {
        return;
    }
    const START: &str = "const int32_t slot = params.slots[token];";
    const DEAD: &str = "uint32_t unused = 3;\nif constexpr (sizeof unused == 1) unused *= 77;\nstatic_cast<void>(unused);";
    let device =
        Device::open(BackendKind::Emulator, dsv4_kernels::device_options()).expect("the emulator");
    let text = device.tree().text("kv_cache_write.cu").expect("a kernel");
    assert_eq!(text.matches(START).count(), 1, "the text that gets a dead branch");
    let with_a_dead_branch = text.replacen(START, &format!("{START}\n{DEAD}"), 1);
    let device = device.with_tree(device.tree().with_text(
        "kv_cache_write.cu",
        with_a_dead_branch,
        "a dead branch",
    ));
    let all = generated::generate(device.tree(), "kv_cache_write").expect("mutants");
    // Without cases, every mutant survives.
    let judged = |original: &str| {
        let mutant =
            all.iter().find(|mutant| mutant.original.contains(original)).expect("a mutant").clone();
        let subject = Subject::Generated(Box::new(mutant), Vec::new());
        trial::run(&Trial { subject, schedules: 0, all_checks: false }, &device, |_| {})
            .expect("a verdict")
    };
    let dead = judged("unused *= 77");
    assert_eq!(dead.status, MutantStatus::Equivalent, "{dead:?}");
    assert!(dead.reason.starts_with("The compiler makes the same code of it"), "{}", dead.reason);
    assert_eq!(judged("if (token >= params.num_tokens)").status, MutantStatus::Survived);
}

#[test]
fn reports_of_several_runs_are_one_table_and_a_survivor_below_the_floor_exits_with_1() {
    if left_out(&MUTANTS) {
        return;
    }
    let (bugs, out) = (folder("none.txt", ""), tempfile::tempdir().expect("a scratch directory"));
    let path = |name: &str| out.path().join(name).to_str().expect("UTF-8").to_owned();
    let run = |sample: &str, seed: &str, floor: &str, name: &str| {
        mutants(
            bugs.path(),
            &["--sample", sample, "--seed", seed, "--floor", floor, "--out", &path(name)],
        )
    };
    run("0", "5", "0.95", "none").assert_code(0);
    run("3", &seed_of_a_survivor().to_string(), "1", "three").assert_code(1);
    let table = |reports: &[&str]| {
        let paths: Vec<String> = reports.iter().map(|name| path(name)).collect();
        mutants(
            bugs.path(),
            &[&["--table"], paths.iter().map(String::as_str).collect::<Vec<_>>().as_slice()]
                .concat(),
        )
    };
    let none = table(&["none"]);
    none.assert_code(0);
    assert_eq!(
        none.stdout.lines().filter(|line| line.starts_with("kv_cache_write ")).count(),
        1,
        "{}",
        none.stdout
    );
    let both = table(&["none", "three"]);
    both.assert_code(1);
    assert_eq!(
        both.stdout.lines().filter(|line| line.starts_with("kv_cache_write ")).count(),
        2,
        "{}",
        both.stdout
    );
    assert!(both.stdout.contains("\nSurvived\n  kv_cache_write:"), "{}", both.stdout);
    table(&["gone"]).assert_bad_input(&["gone"]);
}
