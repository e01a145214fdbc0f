//! What the pages have to show, on invented reports.

use std::fs;

use dsv4_kernels::runtime::BackendKind;

use crate::record::{CheckRecord, Report, Seen, ShardRecord, Skip, Verdict, agreement_of};

use super::numbers::{duration, element, one_minus_cosine, significant, time, utc};
use super::{html, markdown, power, sample, write_all};

fn place(page: &str, part: &str) -> usize {
    page.find(part).unwrap_or_else(|| panic!("`{part}` is not on the page"))
}

#[test]
fn the_verdict_comes_first() {
    let page = html(&sample::failing(30));
    let verdict = place(&page, "class=\"verdict fail\"");
    assert!(page.contains("checks failed, 1 check could not be decided, 1 check passed without ground, in 5 cases"));
    assert!(verdict < place(&page, "id=\"failures\""));
    assert!(place(&page, "id=\"failures\"") < place(&page, "id=\"matrix\""));
    assert!(place(&page, "id=\"matrix\"") < place(&page, "id=\"operator-rms_norm\""));
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
        let escaped = case.replay.replace('&', "&amp;").replace('"', "&quot;");
        assert!(page[place(&page, "id=\"failures\"")..place(&page, "id=\"matrix\"")].contains(&escaped));
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
        page.contains("class=\"verdict fail\"") && page.contains("Recorded as a pass, but no element was compared.")
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

#[test]
fn cells_that_are_no_number_are_drawn_as_such() {
    let mut report = sample::passing(3);
    let metrics = report.cases[0].checks.iter_mut().find_map(|check| check.metrics.as_mut());
    metrics.expect("the sample has metrics").heat.cells[5] = f32::NAN;
    assert!(html(&report).contains("<path class=\"undefined\" d=\"M5 0h1v1h-1z\">"));
}

#[test]
fn a_heat_map_of_the_wrong_size_is_said_to_be_missing() {
    let mut report = sample::passing(3);
    let metrics = report.cases[0].checks.iter_mut().find_map(|check| check.metrics.as_mut());
    metrics.expect("the sample has metrics").heat.cells.pop();
    assert!(html(&report).contains("No heat map: the record holds 3,071 cells for 48 × 64."));
}

#[test]
fn a_report_is_written_with_the_heat_maps_that_its_pages_draw_and_reads_back_to_the_same_pages() {
    let dir = tempfile::tempdir().unwrap();
    for report in [sample::passing(40), sample::failing(40)] {
        super::write_all(&report, dir.path()).unwrap();
        let text = std::fs::read_to_string(dir.path().join("report.json")).unwrap();
        let read: crate::record::Report = serde_json::from_str(&text).unwrap();
        assert_eq!((html(&read), markdown(&read)), (html(&report), markdown(&report)));
        let maps = |report: &crate::record::Report| {
            let metrics = report.cases.iter().flat_map(|case| &case.checks).filter_map(|check| check.metrics.as_ref());
            metrics.filter(|metrics| !metrics.heat.cells.is_empty()).count()
        };
        assert!(maps(&read) < maps(&report), "{} of {}", maps(&read), maps(&report));
        assert!(text.len() * 3 < serde_json::to_string(&report).unwrap().len() * 2);
    }
}

#[test]
fn skips_and_a_dirty_tree_are_never_hidden() {
    let report = sample::failing(30);
    let (page, summary) = (html(&report), markdown(&report));
    for text in [&page, &summary] {
        assert!(
            text.contains("DIRTY TREE") && text.contains("fp8 cases of sparse_attention") && text.contains("1,204")
        );
    }
}

#[test]
fn paths_that_no_case_took_are_named() {
    let mut report = sample::passing(9);
    let (page, summary) = (html(&report), markdown(&report));
    assert!(!page.contains("never ran") && !summary.contains("never ran"), "every path of the sample runs");
    let block = |path: &String| path != "rope_forward_block";
    report.cases.iter_mut().for_each(|case| case.paths.retain(block));
    assert_eq!(report.paths_never_run(), [("rope", vec!["rope_forward_block"])]);
    let page = html(&report);
    for needle in
        ["1 path of rope never ran", "<dt>paths that never ran</dt><dd><strong>rope_forward_block</strong></dd>"]
    {
        assert!(page.contains(needle), "`{needle}` is not on the page");
    }
    assert!(markdown(&report).contains("### Paths that never ran\n\n- rope: `rope_forward_block`\n"));
    report.environment.backend = BackendKind::External;
    assert!(report.paths_never_run().is_empty(), "kernels from elsewhere have paths of their own");
    report.environment.backend = BackendKind::Cuda;
    report.cases.retain(|case| case.operator != "rope");
    assert!(report.paths_never_run().is_empty(), "an operator without cases was not swept");
}

#[test]
fn a_tensor_of_which_no_verdict_had_power_fails_the_run_and_is_named() {
    let mut report = sample::passing(9);
    assert_eq!((report.verdict(), report.without_power()), (Verdict::Pass, vec![]));
    let skip = |tensor: &str| Skip { what: agreement_of(tensor), why: "too coarse".into(), count: 1 };
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
    assert!(page.contains("Nothing was shown of y of rope") && summary.contains("nothing was shown of 1 tensor"));
    // A part of a run need not have what the whole has.
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
fn checks_that_no_case_ran_are_named() {
    let missing = "Checks that no case ran: oracle_gradients, sequence, schedule_independent.";
    assert!(html(&sample::passing(9)).contains(missing));
    assert!(markdown(&sample::passing(9)).contains(missing));
}

#[test]
fn laws_share_a_column() {
    let page = html(&sample::passing(9));
    assert_eq!(page.matches("<span>laws</span>").count(), 1);
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
    for text in ["id=\"inference-3\"", "RMSNorm</summary>", "id=\"FM-07\"", "reference/spec/inference.md#3-rmsnorm"] {
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
    for outside in ["http://", "https://", "src=", "@import", "<link", "<script", "url(/", "url(\""] {
        assert!(!page.contains(outside), "{outside}");
    }
}

#[test]
fn text_from_records_cannot_become_markup() {
    let mut report = sample::passing(9);
    report.cases[0].checks[0].verdict = Verdict::Fail;
    report.cases[0].checks[0].message = "<script>alert(1)</script> a|b\n# heading ```".into();
    report.command = "parity '```' <b>".into();
    assert!(!html(&report).contains("<script") && !html(&report).contains("<b>"));
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
        let metrics = report.cases.iter().flat_map(|case| &case.checks).filter_map(|check| check.metrics.as_ref());
        metrics.flat_map(|one| [one.cosine, one.max_abs, one.budget_used, one.ulp_max, one.worst.kernel]).collect()
    };
    let (written, read) = (measures(&report), measures(&back));
    assert_eq!(written.len(), read.len());
    assert!(written.iter().zip(&read).all(|(a, b)| a.is_nan() == b.is_nan() && a.is_infinite() == b.is_infinite()));
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
    assert!(fs::read_to_string(target.join("index.html")).expect("index.html").starts_with("<!DOCTYPE html>"));
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
    let metrics = report.cases.iter_mut().flat_map(|case| &mut case.checks).find_map(|check| check.metrics.as_mut());
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
    assert_eq!((text("a\u{1b}[2J"), code("a\u{1b}`b")), ("a\\\\u{1b}\\[2J".into(), "`a\\u{1b}'b`".into()));
}
