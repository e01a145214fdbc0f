//! What the pages must show, on invented reports.

use std::fs;

use dsv4_runtime::BackendKind;

use crate::operator::Family;
use crate::operators::registry;
use crate::record::{
    BaseRecord, BatchAxis, BatchRecord, BenchmarkRecord, ChangeRecord, CheckRecord, HeatMap,
    MutantStatus, Report, SavedRecord, Seen, ShardRecord, Skip, Verdict, agreement_of,
};

use super::elements::hash;
use super::numbers::{duration, element, one_minus_cosine, significant, time, utc};
use super::{diff, html, markdown, picture, power, sample, write_all};

fn place(page: &str, part: &str) -> usize {
    page.find(part).unwrap_or_else(|| panic!("`{part}` is not on the page"))
}

#[test]
fn the_verdict_comes_first() {
    let page = html(&sample::failing(30));
    let verdict = place(&page, "class=\"verdict fail\"");
    assert!(page.contains(
        "checks failed, 1 check could not be decided, 1 check passed without ground, in 5 cases"
    ));
    assert!(verdict < place(&page, "id=\"failures\""));
    assert!(place(&page, "id=\"failures\"") < place(&page, "id=\"families\""));
    assert!(place(&page, "id=\"families\"") < place(&page, "class=\"matrix\""));
    assert!(place(&page, "class=\"matrix\"") < place(&page, "id=\"operator-rms_norm\""));
    assert!(markdown(&sample::failing(30)).starts_with("## ❌"));
}

#[test]
fn a_run_without_failures_says_so_and_has_no_failure_section() {
    let page = html(&sample::passing(30));
    assert!(page.contains("class=\"verdict pass\"") && page.contains("agreed in 30 cases"));
    assert!(!page.contains("id=\"failures\"") && !page.contains("DIRTY"));
    assert!(markdown(&sample::passing(30)).starts_with("## ✅ All"));
}

#[test]
fn a_run_without_cases_is_no_success() {
    let empty = Report { cases: Vec::new(), ..sample::passing(1) };
    assert!(html(&empty).contains("class=\"verdict error\""));
    assert!(markdown(&empty).starts_with("## ❌ Nothing was compared"));
}

#[test]
fn failing_cases_show_their_replay_command() {
    let report = sample::failing(30);
    let (page, summary) = (html(&report), markdown(&report));
    for case in report.cases.iter().filter(|case| case.verdict() != Verdict::Pass) {
        assert!(summary.contains(&case.replay));
        let escaped = case.replay.replace('&', "&amp;");
        assert!(
            page[place(&page, "id=\"failures\"")..place(&page, "id=\"families\"")]
                .contains(&escaped)
        );
    }
}

#[test]
fn a_shrunk_case_comes_before_larger_ones() {
    let page = html(&sample::failing(30));
    let first = &page[place(&page, "id=\"failure-1\"")..place(&page, "id=\"failure-2\"")];
    assert!(first.contains("shrunk case"));
}

#[test]
fn a_pass_that_compared_nothing_is_shown_as_unfounded() {
    let mut report = sample::passing(9);
    report.cases[0].checks[0].compared = 0;
    let page = html(&report);
    assert!(
        page.contains("class=\"verdict fail\"")
            && page.contains("Recorded as a pass, but no element was compared.")
    );
}

#[test]
fn a_pass_whose_budget_use_is_nan_is_shown_as_unfounded() {
    let mut report = sample::passing(9);
    let metrics = report.cases[0].checks.iter_mut().find_map(|check| check.metrics.as_mut());
    metrics.expect("the sample has metrics").budget_used = f64::NAN;
    assert!(html(&report).contains("the share of the budget used is NaN."));
}

#[test]
fn a_case_that_ran_no_check_is_a_failure() {
    let mut report = sample::passing(9);
    report.cases[3].checks.clear();
    let page = html(&report);
    assert!(page.contains("1 case ran no check, in 1 case") && page.contains("No check ran."));
    assert!(markdown(&report).contains("error: no check ran"));
}

#[test]
fn survivors_are_loud_even_where_all_checks_agree() {
    let mut report = sample::passing(9);
    report.mutants[2].killed_by.clear();
    report.mutants[2].status = MutantStatus::Survived;
    let page = html(&report);
    assert!(page.contains("class=\"verdict warn\"") && page.contains("✗ 1 mutant of 3 survived."));
    let table = &page[place(&page, "id=\"mutants\"")..];
    assert!(place(table, "inverse_flag_dropped") < place(table, "eps_outside_root"));
    assert!(markdown(&report).contains("**survived:** `inverse_flag_dropped`"));
}

#[test]
fn a_mutant_killed_by_another_check_than_expected_is_marked() {
    assert!(html(&sample::passing(9)).contains("not as expected"));
}

#[test]
fn nan_and_infinity_are_visible() {
    let report = sample::failing(30);
    let page = html(&report);
    assert!(page.contains("<strong class=\"fail-text\">NaN</strong>"));
    assert!(page.contains("<strong class=\"fail-text\">inf</strong>"));
    assert!(markdown(&report).contains("| NaN |"));
}

#[test]
fn elements_without_a_share_of_the_budget_are_counted_beside_the_histogram() {
    assert!(html(&sample::failing(30)).contains("64 elements in no bar"));
    assert!(!html(&sample::passing(30)).contains("in no bar"));
}

/// A heat map of one row of cells, which stands for `rows` rows.
fn map(cells: &[f32], rows: u32) -> HeatMap {
    let columns = cells.len() as u32 / rows;
    HeatMap {
        rows,
        columns,
        total_rows: 9 * u64::from(rows),
        total_columns: columns.into(),
        cells: cells.to_vec(),
    }
}

#[test]
fn cells_that_are_no_number_are_drawn_as_such() {
    let drawn = picture::heat(&map(&[0.1, 0.1, f32::NAN, 0.1], 1), (24, 48)).into_string();
    assert!(drawn.contains("<path class=\"undefined\" d=\"M2 0h1v1h-1z\">"), "{drawn}");
}

#[test]
fn a_heat_map_has_row_0_at_the_top_and_marks_its_worst_cell_beside_the_cells() {
    let drawn = picture::heat(&map(&[0.1, 0.1, 0.1, 0.1, 0.9, 0.1], 2), (24, 48)).into_string();
    assert!(
        drawn.contains("<span class=\"down\"><span>row 0</span><span>17</span></span>"),
        "{drawn}"
    );
    assert!(
        drawn.contains("class=\"mark-row\" style=\"top:75.0%\"")
            && drawn.contains("style=\"left:50.0%\""),
        "{drawn}"
    );
    let cells = &drawn[place(&drawn, "<svg")..place(&drawn, "</svg>")];
    assert!(!cells.contains("rect"), "something lies over the cells: {cells}");
    assert!(
        !super::elements::page_head("", "").into_string().contains(".heat .down { writing-mode"),
        "a label on its head"
    );
}

#[test]
fn cells_of_which_nothing_was_compared_are_hatched_and_stay_so_where_cells_are_joined() {
    let padding = HeatMap::NOT_COMPARED;
    // The picture is hatched under its cells.
    let drawn = picture::heat(&map(&[0.1, 0.1, 0.1, padding], 1), (24, 48)).into_string();
    assert_eq!(drawn.matches("<path").count(), 1, "{drawn}");
    assert!(drawn.contains("<path class=\"h1 solid\" d=\"M0 0h3v1h-3z\">"), "{drawn}");
    let joined = picture::pooled(&map(&[0.0, padding, padding, padding], 1), (1, 2));
    assert_eq!((joined.columns, joined.cells), (2, vec![0.0, padding]));
    let page = html(&sample::failing(30));
    assert!(
        page.contains(".heat svg, .hatched { background: repeating")
            && page.contains("not compared within a budget")
    );
}

#[test]
fn an_element_at_exactly_its_budget_is_not_drawn_as_above_it() {
    let mut report = sample::passing(3);
    let metrics =
        report.cases[0].checks.iter_mut().find_map(|check| check.metrics.as_mut()).unwrap();
    metrics.budget_used = 1.0;
    metrics.use_histogram[7] += 1;
    metrics.use_histogram[0] -= 1;
    let page = html(&report);
    assert!(page.contains("None of them over budget.") && !page.contains(" over budget.</strong>"));
    let metrics =
        report.cases[0].checks.iter_mut().find_map(|check| check.metrics.as_mut()).unwrap();
    metrics.budget_used = 1.01;
    metrics.use_histogram[8] += 1;
    metrics.use_histogram[7] -= 1;
    assert!(html(&report).contains("✗ 1 over budget."));
}

#[test]
fn a_heat_map_of_the_wrong_size_is_said_to_be_missing() {
    let mut wrong = map(&[0.1, 0.1], 1);
    wrong.cells.pop();
    assert!(
        picture::heat(&wrong, (24, 48))
            .into_string()
            .contains("No heat map: the record holds 1 cells for 1 × 2.")
    );
}

#[test]
fn a_report_is_written_with_what_its_pages_need_and_reads_back_to_the_same_pages() {
    let dir = tempfile::tempdir().unwrap();
    for report in [sample::passing(40), sample::failing(40)] {
        write_all(&report, dir.path()).unwrap();
        let read_file = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
        let (json, page, summary) =
            (read_file("report.json"), read_file("index.html"), read_file("summary.md"));
        let read: Report = serde_json::from_str(&json).unwrap();
        assert!(
            (html(&read), markdown(&read)) == (page.clone(), summary.clone()),
            "other pages after reading"
        );
        write_all(&read, dir.path()).unwrap();
        assert!(
            read_file("report.json") == json && read_file("index.html") == page,
            "another report after writing again"
        );
        let maps = |report: &Report| {
            let metrics = report
                .cases
                .iter()
                .flat_map(|case| &case.checks)
                .filter_map(|check| check.metrics.as_ref());
            metrics.filter(|metrics| !metrics.heat.cells.is_empty()).count()
        };
        assert!(maps(&read) < maps(&report), "{} of {}", maps(&read), maps(&report));
        // A report that keeps all digits does not differ from the written one.
        let none = diff::compare(&report, &read).unwrap();
        assert!(
            none.findings.iter().all(|finding| finding.kind == diff::Kind::StillFailing),
            "{:?}",
            none.findings
        );
        let moved = none
            .operators
            .iter()
            .flat_map(|operator| &operator.tensors)
            .filter_map(|tensor| tensor.moved);
        assert!(moved.into_iter().all(|moved| moved == (0, 0)));
    }
}

#[test]
fn a_quick_sweep_of_all_operators_has_a_page_below_one_megabyte_and_a_report_below_five() {
    let sizes = [10, 20].map(|cases| {
        let dir = tempfile::tempdir().unwrap();
        write_all(&sample::whole(cases), dir.path()).unwrap();
        ["index.html", "summary.md", "report.json"]
            .map(|name| fs::metadata(dir.path().join(name)).unwrap().len())
    });
    let [few, more] = sizes;
    // A quick sweep has about 80 cases of an operator.
    let of_80 = |place: usize| more[place] + 6 * more[place].saturating_sub(few[place]);
    assert!(of_80(0) < 1_000_000, "{sizes:?}");
    assert!(of_80(1) < 65_536, "{sizes:?}");
    assert!(of_80(2) < 5_000_000, "{sizes:?}");
}

#[test]
fn skips_and_a_dirty_tree_are_never_hidden() {
    let report = sample::failing(30);
    let (page, summary) = (html(&report), markdown(&report));
    for text in [&page, &summary] {
        assert!(
            text.contains("DIRTY TREE")
                && text.contains("fp8 cases of sparse_attention")
                && text.contains("1,204")
        );
    }
}

#[test]
fn paths_that_no_case_took_are_named() {
    let mut report = sample::passing(9);
    let (page, summary) = (html(&report), markdown(&report));
    assert!(
        !page.contains("never ran") && !summary.contains("never ran"),
        "every path of the sample runs"
    );
    let block = |path: &String| path != "rope_forward_block";
    report.cases.iter_mut().for_each(|case| case.paths.retain(block));
    assert_eq!(report.paths_never_run(), [("rope", vec!["rope_forward_block"])]);
    let page = html(&report);
    for needle in [
        "1 path of rope never ran",
        "<dt>paths that never ran</dt><dd><strong>rope_forward_block</strong></dd>",
    ] {
        assert!(page.contains(needle), "`{needle}` is not on the page");
    }
    assert!(
        markdown(&report).contains("### Paths that never ran\n\n- rope: `rope_forward_block`\n")
    );
    let failing = CheckRecord {
        check: "launch".into(),
        verdict: Verdict::Fail,
        message: "kernel `rope_forward_block`, block (0, 0, 0), thread (1, 0, 0): …".into(),
        ..report.cases[0].checks[0].clone()
    };
    let of_rope = report.cases.iter().position(|case| case.operator == "rope").unwrap();
    report.cases[of_rope].checks.push(failing);
    assert!(report.paths_never_run().is_empty(), "a kernel that failed ran");
    report.environment.backend = BackendKind::External;
    assert!(report.paths_never_run().is_empty(), "external kernels have paths of their own");
    report.environment.backend = BackendKind::Cuda;
    report.cases.retain(|case| case.operator != "rope");
    assert!(report.paths_never_run().is_empty(), "an operator without cases was not swept");
}

#[test]
fn a_tensor_of_which_no_verdict_had_power_fails_the_run_and_is_named() {
    let mut report = sample::passing(9);
    assert_eq!((report.verdict(), report.without_power()), (Verdict::Pass, vec![]));
    let skip =
        |tensor: &str| Skip { what: agreement_of(tensor), why: "too coarse".into(), count: 1 };
    let first = report.cases.iter().position(|case| case.operator == "rope").unwrap();
    report.cases[first].skips.push(skip("y"));
    assert!(report.without_power().is_empty(), "other cases have power");
    let strip = |check: &mut CheckRecord| {
        if check.tensor == "y" {
            check.metrics = None;
        }
    };
    let of_rope = report.cases.iter_mut().filter(|case| case.operator == "rope");
    of_rope.for_each(|case| case.checks.iter_mut().for_each(strip));
    assert_eq!((report.verdict(), report.without_power()), (Verdict::Fail, vec![("rope", "y")]));
    let (page, summary) = (html(&report), markdown(&report));
    assert!(
        page.contains("Nothing was shown of y of rope")
            && summary.contains("nothing was shown of 1 tensor")
    );
    // A part of a run need not have what the whole run has.
    report.shards = vec![ShardRecord {
        index: 0,
        count: 2,
        planned_cases: 1,
        plan_digest: String::new(),
        executable_digest: String::new(),
        device: String::new(),
        settings: Default::default(),
        seconds: 0.0,
    }];
    assert!(report.without_power().is_empty());
}

#[test]
fn the_power_of_verdicts_is_gathered_by_tensor_and_alarms_are_counted() {
    let report = sample::passing(9);
    let tensors = power::of_report(&report);
    let tensor = tensors.iter().find(|tensor| tensor.operator == "rope").unwrap();
    let [ours, assert_close, cosine, ..] = power::RULES.map(|(_, rule)| tensor.seen_in(0.5, rule));
    assert_eq!((ours, cosine), ((Seen::Bias(11), 0), (Seen::Nothing, 0)));
    assert_eq!(assert_close, (Seen::Nothing, tensor.cases.len()), "an alarm is nothing seen");
    assert_eq!((tensor.share_seeing(11), tensor.share_seeing(12)), (1.0, 0.0));
    let table = power::table(&tensors);
    assert!(table.contains("2^-11") && table.contains("alarms)"), "{table}");
    assert!(html(&report).contains("bias seen in half of the cases by"));
}

#[test]
fn batch_invariance_is_a_table_of_operators_by_axes_with_the_first_difference() {
    let mut report = sample::passing(9);
    assert!(!html(&report).contains("id=\"batches\""));
    let record = |axis, declared, differ, message: &str| BatchRecord {
        axis,
        declared,
        runs: 3,
        differ,
        message: message.to_owned(),
    };
    report.cases[0].batches = vec![
        record(BatchAxis::Company, false, 2, "y company: num_rows 4 against 1"),
        record(BatchAxis::Buckets, true, 0, ""),
    ];
    let page = html(&report);
    for text in ["id=\"batches\"", "differs in 2 of 3", "declared", "num_rows 4 against 1"] {
        assert!(page.contains(text), "`{text}` is not on the page");
    }
    let summary = markdown(&report);
    assert!(summary.contains("| differs in 2 of 3 | declared | – |"), "{summary}");
}

#[test]
fn checks_that_no_case_ran_are_named() {
    let missing = "Checks that no case ran: oracle_gradients, sequence, schedule_independent, batch_invariance.";
    assert!(html(&sample::passing(9)).contains(missing));
    assert!(markdown(&sample::passing(9)).contains(missing));
}

#[test]
fn laws_share_a_column() {
    let page = html(&sample::passing(9));
    assert_eq!(page.matches("<span>laws</span>").count(), 2, "once for each family");
    assert!(!page.contains("<span>law: "));
}

#[test]
fn gradients_stand_in_rows_of_their_own() {
    let page = html(&sample::passing(9));
    let table = &page[place(&page, "id=\"operator-rms_norm\"")..];
    assert!(place(table, "Forward agreement") < place(table, "Gradient agreement"));
    assert!(place(table, "<tbody class=\"gradient\">") < place(table, "<code>dweight</code>"));
}

#[test]
fn an_operator_that_the_registry_does_not_list_still_has_its_section() {
    let mut report = sample::passing(9);
    report.operators.retain(|operator| operator.name != "rope");
    assert!(html(&report).contains("id=\"operator-rope\""));
}

#[test]
fn citations_lead_to_the_text_of_their_sections_on_the_page() {
    let unknown = format!("training {}", 99);
    let mut report = sample::failing(30);
    report.operators[0].specification = vec!["inference 3".into(), unknown.clone()];
    let page = html(&report);
    let operator = &page[place(&page, "id=\"operator-rms_norm\"")..];
    place(operator, &format!("<dd><a href=\"#inference-3\">inference 3</a>; {unknown}</dd>"));
    place(&page[place(&page, "id=\"mutants\"")..], "<a href=\"#FM-07\">FM-07</a>");
    let specification = &page[place(&page, "id=\"specification\"")..];
    for text in [
        "id=\"inference-3\"",
        "RMSNorm</summary>",
        "id=\"FM-07\"",
        "reference/spec/inference.md#3-rmsnorm",
    ] {
        place(specification, text);
    }
    assert!(!specification.contains("id=\"inference-4\""), "only what is cited is there");
    for link in page.split("href=\"#").skip(1) {
        let target = link.split('"').next().expect("a target");
        assert!(page.contains(&format!("id=\"{target}\"")), "nothing is called {target}");
    }
}

#[test]
fn a_page_that_cites_nothing_has_no_specification() {
    let mut report = sample::passing(9);
    report.operators.iter_mut().for_each(|operator| operator.specification.clear());
    report.mutants.clear();
    assert!(!html(&report).contains("specification\""));
}

#[test]
fn html_is_self_contained() {
    let page = html(&sample::failing(30));
    for outside in
        ["http://", "https://", "src=", "@import", "<link", "url(/", "url(\"", "fetch(", "import("]
    {
        assert!(!page.contains(outside), "{outside}");
    }
    assert_eq!(page.matches("<script").count(), 1);
}

#[test]
fn text_from_records_cannot_become_markup() {
    let mut report = sample::passing(9);
    report.cases[0].checks[0].verdict = Verdict::Fail;
    report.cases[0].checks[0].message = "<script>alert(1)</script> a|b\n# heading ```".into();
    report.command = "parity '```' <b>".into();
    assert!(!html(&report).contains("<script>alert") && !html(&report).contains("<b>"));
    let summary = markdown(&report);
    assert!(!summary.contains("<script") && summary.contains("a\\|b \\# heading"));
    assert!(summary.contains("\n````sh\nparity '```' <b>\n````\n"));
}

#[test]
fn five_hundred_cases_make_a_page_below_two_megabytes() {
    assert!(html(&sample::passing(500)).len() < 2_000_000);
    assert!(html(&sample::disastrous(500, 400)).len() < 2_000_000);
    assert!(markdown(&sample::disastrous(500, 400)).len() < 60_000);
}

#[test]
fn special_numbers_survive_a_json_round_trip() {
    let report = sample::failing(30);
    let json = serde_json::to_string(&report).expect("reports serialise");
    assert!(json.contains("\"NaN\"") && json.contains("\"inf\""));
    let back: Report = serde_json::from_str(&json).expect("what was written can be read");
    let measures = |report: &Report| -> Vec<f64> {
        let metrics = report
            .cases
            .iter()
            .flat_map(|case| &case.checks)
            .filter_map(|check| check.metrics.as_ref());
        metrics
            .flat_map(|one| {
                [one.cosine, one.max_abs, one.budget_used, one.ulp_max, one.worst.kernel]
            })
            .collect()
    };
    let (written, read) = (measures(&report), measures(&back));
    assert_eq!(written.len(), read.len());
    assert!(
        written
            .iter()
            .zip(&read)
            .all(|(a, b)| a.is_nan() == b.is_nan() && a.is_infinite() == b.is_infinite())
    );
    assert_eq!(markdown(&back), markdown(&report));
}

#[test]
fn the_same_records_make_the_same_page() {
    assert_eq!(html(&sample::failing(30)), html(&sample::failing(30)));
}

#[test]
fn all_three_files_are_written() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let target = dir.path().join("new").join("report");
    write_all(&sample::failing(30), &target).expect("the directory can be written");
    let json = fs::read_to_string(target.join("report.json")).expect("report.json");
    assert!(serde_json::from_str::<Report>(&json).is_ok());
    assert!(
        fs::read_to_string(target.join("index.html"))
            .expect("index.html")
            .starts_with("<!DOCTYPE html>")
    );
    assert!(fs::read_to_string(target.join("summary.md")).expect("summary.md").starts_with("## "));
}

#[test]
fn numbers_keep_the_digits_that_mean_something() {
    assert_eq!(significant(0.123_456, 3), "0.123");
    assert_eq!(significant(12_345.6, 3), "12,346");
    assert_eq!(significant(9.996, 3), "10.0");
    assert_eq!(significant(1.0e-9, 3), "1.00e-9");
    assert_eq!(significant(f64::NEG_INFINITY, 3), "-inf");
    assert_eq!(one_minus_cosine(1.0 + f64::EPSILON), "0");
    assert_eq!(one_minus_cosine(-1.0), "2.0");
    assert_eq!(element(f64::from(0.1_f32)), "0.1");
    assert_eq!(element(0.177_312_498_1), "0.177312498");
    assert_eq!(element(-0.0), "-0");
}

#[test]
fn times_and_dates_carry_their_units() {
    assert_eq!(time(125_300.0), "125 µs");
    assert_eq!(duration(192.4), "3 min 12 s");
    assert_eq!(duration(7_500.0), "2 h 05 min");
    assert_eq!(utc(0), "1970-01-01 00:00:00 UTC");
    assert_eq!(utc(1_709_210_096), "2024-02-29 12:34:56 UTC");
}

#[test]
fn cases_whose_truth_is_zero_are_counted_and_kept_out_of_relative_measures() {
    let mut report = sample::passing(30);
    let metrics = report
        .cases
        .iter_mut()
        .flat_map(|case| &mut case.checks)
        .find_map(|check| check.metrics.as_mut());
    let metrics = metrics.expect("the sample has measures");
    metrics.budget_used = 0.5;
    (metrics.cosine, metrics.norm_ratio) = (f64::NAN, f64::INFINITY);
    (metrics.relative_l2, metrics.budget_relative) = (f64::INFINITY, f64::INFINITY);
    let page = html(&report);
    assert!(page.contains(", 1 zero"));
    let table = &page[place(&page, "Agreement with the oracle")..place(&page, "Worst cases")];
    assert!(!table.contains("NaN") && !table.contains("inf"), "{table}");
}

#[test]
fn words_from_elsewhere_are_no_markup_link_mention_or_control_character_in_a_summary() {
    use super::markdown::{code, text};
    assert_eq!(
        text("<b> & [x](http://y) *z* _w_ ~~v~~ #1 @me a|b"),
        "&lt;b&gt; &amp; \\[x\\](http&#58;//y) \\*z\\* \\_w\\_ \\~\\~v\\~\\~ \\#1 &#64;me a\\|b"
    );
    assert_eq!(text("rms_norm at [1, 2]"), "rms_norm at \\[1, 2\\]");
    assert_eq!(
        (text("a\u{1b}[2J"), code("a\u{1b}`b")),
        ("a\\\\u{1b}\\[2J".into(), "`a\\u{1b}'b`".into())
    );
}

// ---------------------------------------------------------------- the first screen, links, tables

#[test]
fn the_page_says_how_many_of_the_operators_it_covers_and_by_which_profile() {
    let said = format!("3 of {} operators, ci", registry::OPERATORS.len());
    assert!(html(&sample::passing(9)).contains(&format!("DeepSeek-V4 kernel parity · {said} ·")));
    assert!(markdown(&sample::passing(9)).contains(&format!("\n{said}: 9 cases")));
}

#[test]
fn each_family_has_a_row_with_its_worst_budget_use_its_sensitivity_and_its_slowest_kernel() {
    let mut report = sample::passing(9);
    let worst = report
        .cases
        .iter_mut()
        .filter(|case| case.operator == "rope")
        .flat_map(|case| &mut case.checks);
    worst
        .filter_map(|check| check.metrics.as_mut())
        .take(1)
        .for_each(|metrics| metrics.budget_used = 0.987);
    let (page, summary) = (html(&report), markdown(&report));
    let table = &page[place(&page, "id=\"families\"")..place(&page, "id=\"operators\"")];
    assert_eq!(table.matches("<tr>").count(), 3, "a head and two families: {table}");
    let row = &table[place(table, "#family-projections")..place(table, "#family-attention")];
    for part in [
        ">2</td>",
        ">6</td>",
        "0.987",
        "#operator-rope",
        "2^-11",
        "246 µs, floor 166 µs (67 %)",
        "rms_norm_backward",
    ] {
        place(row, part);
    }
    for part in [
        "### Families",
        "| ✓ projections | 2 | 6 |",
        "0.987 `rope` `y`",
        "246 µs `rms_norm_backward",
        "| 166 µs |",
    ] {
        place(&summary, part);
    }
    assert!(page.contains("<details class=\"family\" id=\"family-attention\""));
}

#[test]
fn operators_that_only_cases_name_have_the_family_of_the_registry_and_unknown_ones_none() {
    let mut report = sample::passing(9);
    report.operators.clear();
    let grouped =
        |report: &Report| html(report).contains("<a href=\"#family-attention\">attention</a>");
    assert!(grouped(&report));
    for case in report.cases.iter_mut().filter(|case| case.operator == "sparse_attention") {
        case.operator = "unheard_of".into();
    }
    report.operators.retain(|operator| operator.name != "sparse_attention");
    report.benchmarks.clear();
    let page = html(&report);
    assert!(
        !grouped(&report)
            && page.contains("id=\"family-other\"")
            && page.contains("id=\"operator-unheard_of\"")
    );
    assert_eq!(Family::Attention.name(), "attention");
}

#[test]
fn a_family_that_failed_stands_open_and_one_that_agrees_is_folded() {
    let open = |page: &str, id: &str| {
        let fold = &page[place(page, &format!("id=\"{id}\""))..];
        fold[..fold.find('>').unwrap()].contains(" open")
    };
    let mut report = sample::whole(2);
    let page = html(&report);
    assert!(!open(&page, "family-head") && !open(&page, "operator-sampler"));
    let failing = report.cases.iter_mut().find(|case| case.operator == "sampler").unwrap();
    failing.checks[0].verdict = Verdict::Fail;
    let page = html(&report);
    assert!(open(&page, "family-head") && open(&page, "operator-sampler"));
    assert!(!open(&page, "family-streams") && !open(&page, "operator-lm_head"));
}

#[test]
fn a_pass_in_the_matrix_is_one_number_and_a_failure_says_of_how_many() {
    let page = html(&sample::passing(9));
    let launch = &page[place(&page, "class=\"matrix\"")..];
    assert!(
        launch.contains("elements\">3</td>") && !launch.contains("class=\"total\""),
        "{}",
        &launch[..3000]
    );
    let mut report = sample::passing(9);
    report.cases[0].checks[0].verdict = Verdict::Fail;
    assert!(html(&report).contains("2</span> <span class=\"total\">/ 3</span>"));
}

#[test]
fn what_changed_against_the_base_stands_before_the_totals_and_links_the_comparison() {
    let mut report = sample::passing(9);
    assert!(!html(&report).contains("id=\"base\""));
    let change = |kind: &str, is_regression: bool| ChangeRecord {
        kind: kind.into(),
        is_regression,
        operator: "rope".into(),
        subject: "forward (y)".into(),
        base: "median 0.3".into(),
        head: "median 0.4".into(),
    };
    report.base = Some(BaseRecord {
        commit: "0123456789abcdef".into(),
        dirty: false,
        started_unix: 0,
        device: "NVIDIA H200".into(),
        profile: "ci".into(),
        headline: "1 regression: 1 × budget use grew".into(),
        number: 30,
        changes: vec![change("budget use grew", true), change("faster", false)],
    });
    let page = html(&report);
    assert!(place(&page, "id=\"base\"") < place(&page, "class=\"totals\""));
    for part in [
        "✗",
        "1 regression: 1 × budget use grew",
        "href=\"diff.html\"",
        "0123456789ab",
        "median 0.3 → median 0.4",
    ] {
        place(&page[place(&page, "id=\"base\"")..place(&page, "class=\"totals\"")], part);
    }
    let summary = markdown(&report);
    assert!(
        summary.contains("### Against the base `0123456789ab`\n\n1 regression")
            && summary.contains("28 more changes")
    );
    // A folder without the comparison's page has no link to it.
    let dir = tempfile::tempdir().unwrap();
    write_all(&report, dir.path()).unwrap();
    assert!(!fs::read_to_string(dir.path().join("index.html")).unwrap().contains("diff.html"));
    fs::write(dir.path().join("diff.html"), "").unwrap();
    write_all(&report, dir.path()).unwrap();
    assert!(
        fs::read_to_string(dir.path().join("index.html")).unwrap().contains("href=\"diff.html\"")
    );
}

#[test]
fn each_failing_case_has_a_stable_name_which_page_and_summary_share() {
    let report = sample::failing(30);
    let (page, summary) = (html(&report), markdown(&report));
    for case in report.cases.iter().filter(|case| case.verdict() != Verdict::Pass) {
        let name = format!("case-{}", hash(case));
        assert_eq!(page.matches(&format!("id=\"{name}\"")).count(), 1, "{name}");
        assert!(summary.contains(&format!("`{}`", hash(case))));
    }
    // The name depends only on the line, so the same case in another run has it too, whatever its
    // origin.
    let mut other = report.cases[2].clone();
    other.origin = crate::record::Origin::Regression;
    other.checks.clear();
    assert_eq!(hash(&other), hash(&report.cases[2]));
    assert_eq!(hash(&report.cases[2]).len(), 10);
    assert_ne!(hash(&report.cases[1]), hash(&report.cases[2]));
}

#[test]
fn cases_that_shrank_to_the_same_one_are_one_failure() {
    let once = sample::failing(30);
    let mut twice = once.clone();
    twice.cases.push(once.cases[2].clone());
    let failures = |summary: &str| {
        let from = summary.find("### Failures").expect("failures");
        summary[from..].split("\n### ").next().map(str::to_owned)
    };
    assert_eq!(failures(&markdown(&once)), failures(&markdown(&twice)));
    let cards = |report| html(report).matches("class=\"card").count();
    assert_eq!(cards(&once), cards(&twice));
}

#[test]
fn where_failing_cases_were_saved_stands_on_the_page_and_in_the_summary() {
    let mut report = sample::failing(30);
    assert!(!html(&report).contains("Saved for the next run"));
    report.saved = vec![SavedRecord { file: "fixtures/regressions/rope.jsonl".into(), cases: 2 }];
    let (page, summary) = (html(&report), markdown(&report));
    assert!(page.contains(
        "Saved for the next run: 2 failing cases in <code>fixtures/regressions/rope.jsonl</code>."
    ));
    assert!(
        summary.contains(
            "Saved for the next run: 2 failing cases in `fixtures/regressions/rope.jsonl`."
        )
    );
}

#[test]
fn what_the_script_adds_is_nothing_that_the_page_lacks_without_it() {
    let page = html(&sample::failing(30));
    let script = &page[place(&page, "<script>")..place(&page, "</script>")];
    for work in ["clipboard", "aria-sort", "filter", "more-right", "hashchange"] {
        place(script, work);
    }
    let without = page.replace(script, "");
    assert!(
        !without.contains("<button") && !without.contains("<input"),
        "what only a script serves is only there by it"
    );
    assert!(without.contains("user-select: all") && without.contains("parity replay"));
}

#[test]
fn the_summary_has_what_invariance_costs_where_a_call_was_timed_by_both_paths() {
    let mut report = sample::whole(9);
    assert!(!markdown(&report).contains("Cost of batch invariance"));
    let free = report.benchmarks[0].clone();
    let id = format!("{}{}", free.id, crate::operator::benchmarks::BY_INVARIANT_PATH);
    report.benchmarks.push(BenchmarkRecord {
        id,
        median_ns: 1.25 * free.median_ns,
        ..free.clone()
    });
    let other = BenchmarkRecord { id: "alone_forward/1 invariant".into(), ..free.clone() };
    report.benchmarks.push(other);
    let page = markdown(&report);
    let line = page.lines().find(|line| line.ends_with("| 1.25 |")).unwrap_or_default();
    assert!(line.starts_with(&format!("| `{}` |", free.id)), "{page}");
    let costs = page.split("Cost of batch invariance").nth(1).unwrap_or_default();
    let costs = costs.split("</details>").next().unwrap_or_default();
    assert!(!costs.contains("alone_forward"), "a path without the other has no cost: {costs}");
}
