//! Invalid input to the harness: cases and golden files.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use dsv4_parity::case::{Case, Draw};
use dsv4_parity::judge::checks::CheckOptions;
use dsv4_parity::judge::golden_run;
use dsv4_parity::operator::golden_file::{self, GoldenFile};
use dsv4_parity::operator::size::Limit;
use dsv4_parity::operator::{AnyOperator, Profile};
use dsv4_parity::operators::registry;
use dsv4_parity::record::Verdict;
use dsv4_parity::sweep::regressions::Regressions;
use dsv4_parity::sweep::{self, GivenCases, LeftOut, SweepOptions};
use dsv4_runtime::{BackendKind, Environment};
use rand::Rng;
use rand::seq::IndexedRandom;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use crate::command_line::{Parity, binary};
use crate::extent::{attacked, concerned_operators, everything};
use crate::support;

/// A tensor of a golden file as stored.
#[derive(Clone)]
struct Stored {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// A golden file's tensors and its description.
struct Parts {
    tensors: BTreeMap<String, Stored>,
    description: String,
}

impl Parts {
    fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let description = header.metadata().as_ref().unwrap()["golden"].clone();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let stored = |view: &TensorView<'_>| Stored {
            dtype: view.dtype(),
            shape: view.shape().to_vec(),
            bytes: view.data().to_vec(),
        };
        Self {
            tensors: tensors
                .tensors()
                .iter()
                .map(|(name, view)| (name.clone(), stored(view)))
                .collect(),
            description,
        }
    }

    fn write(&self, path: &Path) {
        let views = self.tensors.iter().map(|(name, stored)| {
            (
                name,
                TensorView::new(stored.dtype, stored.shape.clone(), &stored.bytes)
                    .expect("a tensor that is whole"),
            )
        });
        let metadata = [("golden".to_owned(), self.description.clone())].into();
        safetensors::serialize_to_file(views, Some(metadata), path).unwrap();
    }

    /// Changes one thing so that the file stays valid with other contents; returns what it changed.
    fn mutate(&mut self, draw: &mut Draw) -> String {
        let names: Vec<String> = self.tensors.keys().cloned().collect();
        let name = names.choose(draw.rng()).expect("a file with tensors").clone();
        // An empty value has nothing left to change.
        let empty = self.tensors[&name].bytes.is_empty();
        let choice = if empty { 0 } else { draw.rng().random_range(0..10) };
        let stored = self.tensors.get_mut(&name).expect("one of its names");
        let what = match choice {
            0 => {
                self.tensors.remove(&name);
                "is missing"
            }
            1 => {
                let copy = stored.clone();
                self.tensors.insert(format!("{name}.again"), copy);
                "is there twice"
            }
            2 => {
                let axis = draw.rng().random_range(0..stored.shape.len());
                stored.shape[axis] = 0;
                stored.bytes.clear();
                "is empty"
            }
            3 => {
                stored.shape.reverse();
                "is turned"
            }
            4 => {
                stored.shape = vec![stored.shape.iter().product()];
                "is flat"
            }
            5 => {
                stored.shape.insert(0, 1);
                "has an axis more"
            }
            6 => {
                let axis = draw.rng().random_range(0..stored.shape.len());
                let (extent, rest) = (stored.shape[axis], stored.bytes.len());
                let kept = draw.rng().random_range(1..=2 * extent);
                stored.shape[axis] = kept;
                let bytes = stored.bytes.iter().copied().cycle();
                stored.bytes = bytes.take(rest / extent * kept).collect();
                "has another extent"
            }
            7 => {
                let size = stored.bytes.len() / stored.shape.iter().product::<usize>();
                stored.dtype = match size {
                    1 => Dtype::BOOL,
                    2 => Dtype::F16,
                    4 => Dtype::I32,
                    _ => Dtype::I64,
                };
                "is of another type"
            }
            8 => {
                stored.bytes.iter_mut().for_each(|byte| *byte = draw.rng().random());
                "holds anything"
            }
            _ => {
                // Numbers of the configuration.
                let number =
                    *[0.0, -1.0, 0.5, 1e308, 9e15, 7.0].choose(draw.rng()).expect("one of them");
                self.description = changed_number(&self.description, draw, number);
                "has another configuration"
            }
        };
        format!("{name} {what}")
    }
}

/// A description with one of its numbers changed.
fn changed_number(description: &str, draw: &mut Draw, number: f64) -> String {
    fn fields(value: &serde_json::Value, path: &str, found: &mut Vec<String>) {
        match value {
            serde_json::Value::Object(map) => {
                map.iter().for_each(|(n, v)| fields(v, &format!("{path}/{n}"), found))
            }
            serde_json::Value::Number(_) => found.push(path.to_owned()),
            _ => {}
        }
    }
    let mut value: serde_json::Value = serde_json::from_str(description).unwrap();
    let mut found = Vec::new();
    fields(&value["config"], "/config", &mut found);
    if let Some(place) = found.choose(draw.rng()).and_then(|field| value.pointer_mut(field)) {
        *place = serde_json::json!(number);
    }
    value.to_string()
}

/// The golden files that some operator reads.
fn golden_files() -> Vec<PathBuf> {
    let dir = support::fixtures().join("golden");
    let is_read = |name: &String| {
        registry::OPERATORS.iter().any(|o| o.golden_kinds().contains(&golden_file::kind_of(name)))
    };
    golden_file::names_in(&dir)
        .unwrap()
        .into_iter()
        .filter(is_read)
        .map(|name| dir.join(name))
        .collect()
}

/// Judges the oracles with a file. Returns whether it agrees and on how many elements, or why it
/// cannot be judged.
fn judged(file: &GoldenFile) -> Result<(bool, u64), String> {
    let operators: Vec<&'static AnyOperator> = registry::OPERATORS.to_vec();
    let cases = golden_run::cases_of(file, &operators).map_err(|error| error.to_string())?;
    let records: Vec<_> = cases.iter().map(|case| golden_run::run(file, case, None)).collect();
    let agrees = records.iter().all(|record| record.verdict() == Verdict::Pass);
    let least = |record: &dsv4_parity::record::CaseRecord| {
        record.checks.iter().map(|c| c.compared).min().unwrap_or(0)
    };
    Ok((agrees, records.iter().map(least).min().unwrap_or(0)))
}

#[test]
fn golden_files_of_any_shape_type_and_number_end_in_one_error_or_in_a_verdict_over_elements() {
    let folder = tempfile::tempdir().unwrap();
    // Only small files: the test is about reading them.
    let small = |path: &PathBuf| std::fs::metadata(path).is_ok_and(|file| file.len() < 40_000);
    let files: Vec<PathBuf> = golden_files().into_iter().filter(small).collect();
    let tries = if everything() { 1500 } else { 100 };
    let (mut refused, mut agreed, mut disagreed) = (0, 0, 0);
    for number in 0..tries {
        let mut draw = Draw::new(number, "golden files");
        let original = files.choose(draw.rng()).unwrap();
        let mut parts = Parts::read(original);
        let mut what = parts.mutate(&mut draw);
        if number % 3 == 0 && !parts.tensors.is_empty() {
            what = format!("{what}, {}", parts.mutate(&mut draw));
        }
        let what = format!("try {number}, {}: {what}", original.display());
        let path = folder.path().join(original.file_name().unwrap());
        parts.write(&path);
        let ended = catch_unwind(AssertUnwindSafe(|| match golden_file::read(&path) {
            Ok(file) => judged(&file),
            Err(error) => Err(error.to_string()),
        }));
        match ended.unwrap_or_else(|_| panic!("{what}")) {
            Err(reason) => {
                let name = original.file_name().unwrap().to_string_lossy();
                assert!(reason.contains(&*name), "{what}: the error names no file: {reason}");
                assert!(reason.chars().count() < 1000, "{what}: {reason}");
                refused += 1;
            }
            Ok((true, 0)) => panic!("{what}: agrees over no element"),
            Ok((true, _)) => agreed += 1,
            Ok((false, _)) => disagreed += 1,
        }
    }
    attacked("malformed golden files", tries);
    println!("{tries} golden files: {refused} refused, {agreed} agreed, {disagreed} disagreed");
    assert!(
        refused > tries / 4 && agreed + disagreed > tries / 20,
        "{refused}, {agreed}, {disagreed}"
    );
}

#[test]
fn a_golden_file_that_cannot_be_judged_is_one_error_and_the_others_of_the_run_are_judged() {
    let folder = tempfile::tempdir().unwrap();
    let of = |name: &str| support::fixtures().join("golden").join(name);
    let (good, bad) = ("rmsnorm__w2.safetensors", "rmsnorm__u5.safetensors");
    std::fs::copy(of(good), folder.path().join(good)).unwrap();
    let mut parts = Parts::read(&of(bad));
    for name in ["in.x", "gout.y", "out.y", "grad.in.x"] {
        let stored = parts.tensors.get_mut(name).unwrap();
        stored.shape[0] = 0;
        stored.bytes.clear();
    }
    parts.write(&folder.path().join(bad));
    std::fs::create_dir(folder.path().join("rmsnorm__folder.safetensors")).unwrap();
    let run =
        Parity::new(&["golden", &folder.path().display().to_string(), "--oracles-only"]).run();
    run.assert_code(2);
    assert!(run.stdout.contains(&format!("agrees    rms_norm         {good}")), "{}", run.stdout);
    assert!(run.stderr.contains("`in.x` [0, 2, 3, 512] has no element"), "{}", run.stderr);
    assert!(run.stderr.contains("it is no regular file"), "{}", run.stderr);
    assert!(run.stderr.contains("2 golden file(s) could not be judged"), "{}", run.stderr);
}

/// The most memory that a process took at any sample, in bytes.
fn peak(command: &mut Command) -> u64 {
    let mut child =
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the binary runs");
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    while child.try_wait().expect("a child").is_none() {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kilobytes =
            line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
        peak = peak.max(kilobytes.unwrap_or(0) << 10);
        std::thread::sleep(Duration::from_millis(2));
    }
    peak
}

/// The memory of the process with its kernels, before any case.
const BARE: u64 = 80 << 20;

#[test]
fn no_case_takes_more_memory_than_it_is_said_to_take() {
    // Larger cases show the factors better, but take minutes.
    let most = Limit::bytes(if everything() { 3 << 30 } else { 160 << 20 });
    for operator in concerned_operators() {
        let cases = operator.edge_cases(Profile::Ci).into_iter();
        let sized = cases.filter_map(|case| Some((operator.bytes(&case).ok()?, case)));
        let (said, case) =
            sized.filter(|(bytes, _)| most.allows(*bytes)).max_by_key(|(bytes, _)| *bytes).unwrap();
        let mut command = Command::new(binary());
        command.args(["replay", "--backend", "emulator", "--schedules", "0", &case.line()]);
        let peak = peak(&mut command);
        println!("{}: {} MiB of {} MiB", case.operator, peak >> 20, said >> 20);
        assert!(
            u128::from(peak) <= said + u128::from(BARE),
            "{said} bytes said, {peak} taken: {}",
            case.line()
        );
    }
}

#[test]
fn a_case_beyond_the_memory_that_is_allowed_is_refused_before_anything_is_allocated() {
    let case = Case::parse(
        r#"{"operator":"rms_norm","num_rows":40000,"width":4096,"dtype":"f32","weight":"f32","eps":1e-6,
            "aliasing":"out_of_place","distribution":"normal","magnitude":1.0,"zero_rows":false,"saves_rstd":true,"seed":3}"#,
    )
    .unwrap();
    let replay = |arguments: &[&str]| {
        Parity::new(&[&["replay", "--backend", "emulator"], arguments].concat()).run()
    };
    let refused = replay(&["--memory", "1GiB", &case.line()]);
    refused.assert_bad_input(&["`num_rows`", "[40000, 4096]", "1.0 GiB are allowed", "--memory"]);
    replay(&["--memory", "1.5GB", &case.line()]).assert_code(2);
    let mut command = Command::new(binary());
    command.args(["replay", "--backend", "emulator", "--memory", "1GiB", &case.line()]);
    assert!(peak(&mut command) < BARE);
    // A sweep skips what does not fit, and counts it.
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().display().to_string();
    let sweep = [
        "run",
        "--backend",
        "emulator",
        "--ops",
        "attention_combine",
        "--cases",
        "0",
        "--schedules",
        "0",
    ];
    let run = Parity::new(
        &[&sweep[..], &["--edge-cases", "3", "--memory", "1MiB", "--out", &out]].concat(),
    )
    .run();
    let report = std::fs::read_to_string(folder.path().join("report.json")).unwrap();
    assert!(
        report.contains("it takes more than the 1.0 MiB of memory that a case may"),
        "{}",
        run.stdout
    );
}

#[test]
fn a_gap_that_cannot_be_is_refused_by_the_field_that_says_it() {
    let case = |operator: &str, field: &str, value: serde_json::Value| {
        let mut case = registry::find(operator).unwrap().edge_cases(Profile::Quick).remove(1);
        case.fields.remove("layouts");
        case.fields.insert(field.to_owned(), value);
        let refused = registry::prepare(&case).err().unwrap_or_else(|| panic!("{}", case.line()));
        refused.to_string()
    };
    for value in [1 << 40, i64::MAX as u64, u64::MAX] {
        let said =
            case("rms_norm", "layouts", serde_json::json!({ "x": { "gaps": { "width": value } } }));
        assert!(said.contains("field `layouts`") && said.contains(&value.to_string()), "{said}");
        let said = case("kv_cache_write", "page_padding", value.into());
        assert!(
            said.contains("field `page_padding`") && said.contains(&value.to_string()),
            "{said}"
        );
    }
    // Each value is valid, but the combination is not.
    let mut many = registry::find("decode_attention").unwrap().edge_cases(Profile::Quick).remove(1);
    many.fields.remove("layouts");
    many.fields["window"]["num_pages"] = 200.into();
    many.fields["page_padding"] = ((1 << 30) - 16).into();
    let said = registry::prepare(&many).err().expect("a refusal").to_string();
    assert!(said.contains("field `page_padding`: `window` is spread over 2136"), "{said}");
}

#[test]
fn a_machine_of_8_gibibytes_leaves_out_no_case_of_a_sweep_of_the_emulator() {
    let half = Limit::bytes(4 << 30);
    let environment =
        &Environment { backend: BackendKind::Emulator, ..support::device().environment().clone() };
    // Oracles of as many threads as such a machine has cores, whatever this one has.
    support::pool(2).install(|| {
        for operator in registry::OPERATORS {
            for profile in [Profile::Quick, Profile::Ci] {
                let options = SweepOptions {
                    profile,
                    cases: None,
                    edge_cases: GivenCases::All,
                    remembered: GivenCases::All,
                    seed: 3,
                    checks: CheckOptions::everything(0),
                    regressions: Regressions::new("none"),
                    remember: false,
                    time_budget: None,
                    deadline: None,
                    ranks: Vec::new(),
                    condition: None,
                    left_out: LeftOut::default(),
                };
                let (planned, _) =
                    sweep::plan(operator, Vec::new(), &options, environment).unwrap();
                let sized = planned
                    .iter()
                    .map(|planned| (operator.bytes(&planned.case).unwrap(), planned.case.line()));
                let (bytes, line) = sized.max().expect("a case");
                println!("{}: {} MiB", operator.name(), bytes >> 20);
                assert!(half.allows(bytes), "{bytes} bytes: {line}");
            }
        }
    });
}
