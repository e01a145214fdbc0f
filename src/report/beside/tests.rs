use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::log::{Side, Timings};
use super::page::copy_time;
use super::pairs::Pairs;
use super::{Failure, page};

const UUID: &str = "GPU-f6050102-0304-0506-0708-090a0b0c0dfe";

fn turn(side: &str, unix: u64, ids: &[&str]) -> Value {
    let machine =
        json!({ "device": "NVIDIA H200", "uuid": UUID, "driver": "kernel driver 580.159.04" });
    let software = if side == "ours" { "eb7b1ac, NVRTC 13.0" } else { "torch 2.11.0" };
    let copy = (side == "ours").then_some(4e12);
    json!({ "turn": {
        "side": side, "machine": machine, "software": software, "unix": unix, "copy_bytes_per_second": copy, "ids": ids,
    } })
}

fn time(id: &str, samples: &[f64]) -> Value {
    json!({ "time": { "id": id, "library": "DeepGEMM 2.6.1+54e2261", "samples_us": samples, "clock_mhz": 1755 } })
}

fn moving(id: &str, microseconds: f64, bytes: f64) -> Value {
    json!({ "time": { "id": id, "samples_us": [microseconds], "bytes": bytes } })
}

fn skipped(id: &str, why: &str) -> Value {
    json!({ "skipped": { "id": id, "why": why } })
}

/// A pair of the family "Linear" by the ids of its sides.
fn pair(work: &str, ours: &str, theirs: &str) -> String {
    format!(
        "[[pair]]\nfamily = 'Linear'\nwork = '{work}'\nwho = 'DeepGEMM'\nours = '{ours}'\ntheirs = '{theirs}'\n"
    )
}

/// Logs and a list of pairs in a folder.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    fn put(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, text).expect("a file");
        path
    }

    fn log(&self, name: &str, lines: &[Value]) -> PathBuf {
        let lines: Vec<String> = lines.iter().map(Value::to_string).collect();
        self.put(name, &lines.join("\n"))
    }

    fn pairs(&self, text: &str) -> Result<Pairs, Failure> {
        Pairs::read(&self.put("pairs.toml", text))
    }

    /// The page of some pairs and logs.
    fn page(&self, pairs: &[String], logs: &[&[Value]]) -> Result<String, String> {
        let pairs = self.pairs(&pairs.concat()).map_err(|e| e.to_string())?;
        let paths: Vec<_> = logs
            .iter()
            .enumerate()
            .map(|(at, lines)| self.log(&format!("{at}.jsonl"), lines))
            .collect();
        let timings = Timings::read(&paths).map_err(|e| e.to_string())?;
        page("parity beside pairs.toml 0.jsonl", &pairs, &timings).map_err(|e| e.to_string())
    }
}

/// The cells of the row of a work.
fn row(page: &str, work: &str) -> Vec<String> {
    let line = page.lines().find(|line| line.starts_with(&format!("| {work} "))).expect("a row");
    line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
}

#[test]
fn samples_of_all_turns_make_one_median_and_its_spread() {
    let pairs = [pair("a", "linear_forward/a", "their a")];
    let ours: &[Value] = &[
        turn("ours", 10, &["linear_forward/a"]),
        time("linear_forward/a", &[2.0, 4.0, 4.0]),
        turn("ours", 30, &["linear_forward/a"]),
        time("linear_forward/a", &[6.0, 4.0]),
    ];
    let theirs: &[Value] = &[
        turn("theirs", 20, &["their a"]),
        time("their a", &[5.0, 7.0]),
        turn("theirs", 40, &["their a"]),
        time("their a", &[4.0, 9.0]),
    ];
    let page = Files::new().page(&pairs, &[ours, theirs]).expect("a page");
    assert_eq!(
        row(&page, "a"),
        ["a", "DeepGEMM", "4.000 (2.000 to 6.000)", "6.000 (4.000 to 9.000)", "1.50"]
    );
    assert!(page.starts_with("Made by `parity beside pairs.toml 0.jsonl`.\n"), "{page}");
    assert!(page.contains("| turns | ours, theirs, ours, theirs |"), "{page}");
    assert!(page.contains("| repeats | 4 to 5 samples of each time |"), "{page}");
    let head = [
        "NVIDIA H200, GPU-f605",
        "580.159.04",
        "eb7b1ac",
        "DeepGEMM 2.6.1+54e2261",
        "torch 2.11.0",
        "1970-01-01",
    ];
    for word in head {
        assert!(page.contains(word), "no {word} in\n{page}");
    }
}

#[test]
fn rows_are_counted_as_they_are_shown_and_grouped_by_family() {
    let ids = ["g/a", "g/b", "g/c", "g/d"];
    let mut pairs: Vec<String> =
        ids.iter().map(|id| pair(&id[2..], id, &format!("their {id}"))).collect();
    pairs[1] = pairs[1].replace("Linear", "Experts");
    // 0.996 is shown as 1.00, 0.994 as 0.99.
    let ours: Vec<Value> =
        [turn("ours", 1, &ids)].into_iter().chain(ids.map(|id| time(id, &[1000.0]))).collect();
    let known = ids.map(|id| format!("their {id}"));
    let known: Vec<&str> = known.iter().map(String::as_str).collect();
    let theirs = [
        turn("theirs", 2, &known),
        time("their g/a", &[996.0]),
        time("their g/b", &[994.0]),
        time("their g/c", &[2000.0]),
        skipped("their g/d", "DeepGEMM: no module named deep_gemm"),
    ];
    let page = Files::new().page(&pairs, &[&ours, &theirs]).expect("a page");
    assert!(page.contains("\n4 rows: 2 at 1.00 or more, 1 below, 1 not run.\n"), "{page}");
    assert_eq!([row(&page, "a")[4].as_str(), &row(&page, "b")[4]], ["1.00", "0.99"]);
    let order = ["## Linear", "| a |", "| c |", "| d |", "## Experts", "| b |", "## Not run"];
    let places: Vec<_> = order
        .iter()
        .map(|part| page.find(part).unwrap_or_else(|| panic!("no {part}:\n{page}")))
        .collect();
    assert!(places.is_sorted(), "{page}");
}

#[test]
fn a_work_that_one_side_did_not_run_is_listed_with_the_reason() {
    let pairs = [pair("a", "g/a", "their a"), pair("b", "g/b", "their b")];
    let ours = [turn("ours", 1, &["g/a", "g/b"]), time("g/a", &[1.0])];
    let theirs = [
        turn("theirs", 2, &["their a", "their b"]),
        skipped("their a", "no deep_gemm"),
        time("their b", &[1.0]),
    ];
    let page = Files::new().page(&pairs, &[&ours, &theirs]).expect("a page");
    assert_eq!(row(&page, "a")[2..], ["1.000 (1.000 to 1.000)", "not run", "—"]);
    assert_eq!(row(&page, "b")[2..], ["not run", "1.000 (1.000 to 1.000)", "—"]);
    assert!(page.contains("| theirs | no deep_gemm | a |"), "{page}");
    assert!(page.contains("| ours | not chosen, or not reached in time | b |"), "{page}");
}

#[test]
fn an_id_that_no_log_knows_is_one_error_that_names_it() {
    let files = Files::new();
    let ours = [turn("ours", 1, &["g/a"]), time("g/a", &[1.0])];
    let theirs = [turn("theirs", 2, &["their a"]), time("their a", &[1.0])];
    let problem =
        files.page(&[pair("a", "g/aa", "their a")], &[&ours, &theirs]).expect_err("a typo");
    assert!(
        problem.contains("pairs.toml") && problem.contains("`ours` of the pair `a` is `g/aa`"),
        "{problem}"
    );
    let problem =
        files.page(&[pair("a", "g/a", "their aa")], &[&ours, &theirs]).expect_err("a typo");
    assert!(problem.contains("`theirs` of the pair `a` is `their aa`"), "{problem}");
    let problem = files.page(&[pair("a", "g/a", "their a")], &[&ours]).expect_err("one side alone");
    assert!(problem.contains("`theirs`"), "{problem}");
}

#[test]
fn another_machine_is_refused_even_of_the_same_kind() {
    let mut other = turn("theirs", 2, &["their a"]);
    other["turn"]["machine"]["uuid"] = "GPU-another".into();
    let ours = [turn("ours", 1, &["g/a"]), time("g/a", &[1.0])];
    let theirs = [other, time("their a", &[1.0])];
    let problem = Files::new()
        .page(&[pair("a", "g/a", "their a")], &[&ours, &theirs])
        .expect_err("two machines");
    assert!(
        problem.contains("1.jsonl: line 1: theirs ran on NVIDIA H200 GPU-another"),
        "{problem}"
    );
    assert!(problem.contains(UUID), "{problem}");
}

#[test]
fn a_log_that_is_none_is_refused_by_its_line() {
    let files = Files::new();
    let refused = |name: &str, text: &str| {
        let path = files.put(name, text);
        Timings::read(&[path]).expect_err("no log").to_string()
    };
    let header = turn("ours", 1, &["g/a"]);
    let criterion = format!("{header}\ng/a  time: [1 us]\n");
    assert!(refused("criterion", &criterion).contains("criterion: line 2: no line of such a log"));
    assert!(refused("empty", "").contains("holds no turn"));
    assert!(
        refused("headless", &time("g/a", &[1.0]).to_string())
            .contains("line 1: a time or a skip before")
    );
    for samples in [&[][..], &[0.0], &[-1.0], &[1.0, 0.0]] {
        let text = format!("{header}\n{}", time("g/a", samples));
        assert!(refused("samples", &text).contains("`samples_us` of `g/a`"), "{samples:?}");
    }
    assert!(
        Timings::read(&[Path::new("/nonexistent/log")])
            .expect_err("no file")
            .to_string()
            .contains("/nonexistent/log")
    );
}

#[test]
fn a_list_of_pairs_with_a_mistake_is_refused() {
    let files = Files::new();
    let refused = |text: &str| files.pairs(text).expect_err("a mistake").to_string();
    let good = pair("a", "g/a", "their a");
    assert_eq!(files.pairs(&good).map(|pairs| pairs.pairs.len()), Ok(1));
    assert!(refused(&good.replace("ours", "our")).contains("`our`"));
    assert!(refused(&good.replace("g/a", "  ")).contains("`ours` of the pair `a` is empty"));
    assert!(refused(&good.repeat(2)).contains("`a` is twice in the family `Linear`"));
    assert!(refused("pair = []").contains("lists no pair"));
    assert!(refused("[[pair]").contains("pairs.toml"));
    assert!(
        Pairs::read(Path::new("/nonexistent/pairs"))
            .expect_err("no file")
            .to_string()
            .contains("/nonexistent/pairs")
    );
}

#[test]
fn a_difference_of_the_work_is_marked_and_said() {
    let differs = |work: &str| pair(work, "g/a", "their a") + "differs = 'theirs reads FP8'\n";
    let pairs = [differs("a"), pair("b", "g/a", "their a"), differs("c")];
    let ours = [turn("ours", 1, &["g/a"]), time("g/a", &[1.0])];
    let theirs = [turn("theirs", 2, &["their a"]), time("their a", &[1.0])];
    let page = Files::new().page(&pairs, &[&ours, &theirs]).expect("a page");
    assert!(page.contains("| a † |") && page.contains("\n- theirs reads FP8: a; c.\n"), "{page}");
    assert_eq!(row(&page, "b")[0], "b");
}

#[test]
fn a_memory_bound_kernel_stands_next_to_a_copy_of_as_many_bytes() {
    let ids = [
        "device_copy/0.002 MB read and written",
        "device_copy/8 MB read and written",
        "g/few",
        "g/most",
        "g/a",
    ];
    let ours = [
        turn("ours", 1, &ids),
        moving(ids[0], 1.0, 2e3),
        moving(ids[1], 3.0, 8.002e6),
        moving("g/few", 4.0, 4.002e6),
        moving("g/most", 40.0, 80e6),
        time("g/a", &[1.0]),
    ];
    let theirs = [turn("theirs", 2, &["their a"]), time("their a", &[1.0])];
    let page =
        Files::new().page(&[pair("a", "g/a", "their a")], &[&ours, &theirs]).expect("a page");
    assert_eq!(row(&page, "g/few"), ["g/few", "4.000 (4.000 to 4.000)", "4.002", "2.000", "50 %"]);
    // Larger than all copies: at the rate of the large one, 4 TB/s.
    assert_eq!(row(&page, "g/most")[3..], ["20.00", "50 %"]);
    assert!(!page.contains("| g/a |") && !page.contains("| device_copy"), "{page}");
    assert!(page.contains("A large copy reaches 4,000 GB/s."), "{page}");
}

#[test]
fn copies_are_interpolated_between_two_and_never_below_the_least() {
    let copies = [(10.0, 1.0), (20.0, 3.0), (40.0, 4.0)];
    let times =
        [1.0, 10.0, 15.0, 20.0, 30.0, 40.0, 100.0].map(|bytes| copy_time(&copies, 10.0, bytes));
    assert_eq!(times, [1.0, 1.0, 2.0, 3.0, 3.5, 4.0, 10.0]);
    assert_eq!(copy_time(&[], 10.0, 50.0), 5.0);
}

#[test]
fn a_log_that_was_appended_to_holds_both_turns() {
    let files = Files::new();
    let path = files.0.path().join("ours.jsonl");
    for unix in [1, 2] {
        let mut writer = super::log::Writer::append(&path).expect("opens");
        for line in [turn("ours", unix, &["g/a"]), time("g/a", &[1.0])] {
            writer.write(&serde_json::from_value(line).expect("a line")).expect("writes");
        }
    }
    let timings = Timings::read(&[path]).expect("reads");
    assert_eq!(timings.turns_of(Side::Ours).map(|turn| turn.unix).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(timings.times(Side::Ours, "g/a").len(), 2);
    assert!(timings.times(Side::Theirs, "g/a").is_empty() && !timings.knows(Side::Theirs, "g/a"));
}
