//! FlashInfer-Bench's formats: Definitions of operators, Solutions that are judged, and Traces.

use std::path::Path;

use serde_json::{Value, json};

use crate::command_line::{Output, Parity};
use crate::external::python;
use crate::support;

/// A norm by numpy, and one that forgets the mean.
const RIGHT: &str = "rstd = 1.0 / numpy.sqrt((x * x).mean(axis=1) + eps)";
const WRONG: &str = "rstd = 1.0 / numpy.sqrt((x * x).sum(axis=1) + eps)";
/// A norm with a weight, written as another operator's author would find it.
const CASE: &str = r#"{"operator":"rms_norm","aliasing":"out_of_place","distribution":"normal","dtype":"f32","eps":1e-6,"magnitude":1.0,"num_rows":5,"saves_rstd":true,"seed":1,"weight":"f32","width":512,"zero_rows":false}"#;

/// The Definition of [`CASE`], as it is printed: the order of its inputs counts.
fn printed() -> String {
    let output = Parity::new(&["ops", "rms_norm", "--case", CASE, "--trace-definition"]).run();
    assert_eq!(output.code, Some(0), "{}", output.stderr);
    output.stdout
}

fn definition() -> Value {
    serde_json::from_str(&printed()).expect("JSON")
}

/// Writes a Definition and a Solution of it, in the style that returns results or writes them.
fn files(folder: &Path, rstd: &str, writes: bool) -> [String; 2] {
    let definition = definition();
    let (more, end) = if writes {
        (", y, rstd_", "y[...] = out\n    rstd_[...] = rstd")
    } else {
        ("", "return out, rstd")
    };
    let run = format!(
        "import numpy\n\n\ndef run(x, weight, eps{more}):\n    x = x.astype(numpy.float64)\n    {rstd}\n    \
         out = x * rstd[:, None] * weight\n    {end}\n"
    );
    let solution = json!({
        "name": "numpy", "definition": definition["name"], "author": "a test",
        "spec": { "language": "python", "target_hardware": ["cpu"],
            "entry_point": "kernels/norm.py::run", "destination_passing_style": writes },
        "sources": [{ "path": "kernels/norm.py", "content": run }],
    });
    [("definition.json", printed()), ("solution.json", solution.to_string())].map(|(name, text)| {
        let path = folder.join(name);
        std::fs::write(&path, text).expect("written");
        path.display().to_string()
    })
}

fn judged(folder: &Path, rstd: &str, writes: bool, more: &[&str]) -> Output {
    let [definition, solution] = files(folder, rstd, writes);
    let out = folder.join("out").display().to_string();
    let command = ["external", "--solution", &solution, "--definition", &definition, "--out", &out];
    let sweep = ["--cases", "3", "--edge-cases", "4", "--seed", "1"];
    let fixtures = support::fixtures().display().to_string();
    Parity::new(&[&command[..], &sweep, more].concat()).env("PARITY_FIXTURES", &fixtures).run()
}

#[test]
fn a_definition_has_the_tensors_and_numbers_of_a_call_in_their_order() {
    let found = definition();
    let keys = |part: &str| -> Vec<String> {
        found[part].as_object().expect("an object").keys().cloned().collect()
    };
    let inputs: Vec<String> = keys("inputs");
    assert!(["x", "weight", "eps"].iter().all(|name| inputs.contains(&(*name).to_owned())));
    assert_eq!(found["inputs"]["x"], json!({ "shape": ["num_rows", "width"], "dtype": "float32" }));
    assert_eq!(found["inputs"]["eps"]["shape"], Value::Null);
    assert_eq!(found["axes"]["num_rows"], json!({ "type": "var" }));
    assert_eq!(found["axes"]["width"], json!({ "type": "const", "value": 512 }));
    assert_eq!(keys("outputs").len(), 2);
    let reference = found["reference"].as_str().expect("a text");
    assert!(reference.contains("def run(x, weight, eps):"), "{reference}");
}

#[test]
fn every_operator_has_a_definition_or_a_reason_why_not() {
    for operator in dsv4_parity::operators::registry::OPERATORS {
        let found = dsv4_parity::external::definition::definition(operator, &operator.example());
        if let Err(error) = found {
            let error = error.to_string();
            let reasons = ["writes over", "other sizes", "of several ranks", "is a list"];
            assert!(reasons.iter().any(|reason| error.contains(reason)), "{error}");
        }
    }
}

#[test]
fn a_right_solution_agrees_in_both_styles_and_leaves_a_trace_of_each_case() {
    if !python("import numpy", "a Solution") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    for writes in [true, false] {
        let traces = folder.path().join("traces.jsonl").display().to_string();
        let output = judged(folder.path(), RIGHT, writes, &["--time", "--traces", &traces]);
        assert_eq!(output.code, Some(0), "{}\n{}", output.stdout, output.stderr);
        let text = std::fs::read_to_string(&traces).expect("traces");
        let lines: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert!(lines.len() >= 3, "{text}");
        for trace in &lines {
            let evaluation = &trace["evaluation"];
            assert_eq!(evaluation["status"], "PASSED");
            assert!(evaluation["performance"]["latency_ms"].as_f64().expect("a time") > 0.0);
            assert!(evaluation["correctness"]["extra"]["budget_used"].as_f64() <= Some(1.0));
            assert!(trace["workload"]["axes"]["num_rows"].is_u64());
            assert_eq!(trace["workload"]["inputs"]["eps"]["type"], "scalar");
        }
    }
}

#[test]
fn a_wrong_solution_fails_with_a_diagnosis_and_a_line_that_replays_it() {
    if !python("import numpy", "a Solution") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let output = judged(folder.path(), WRONG, false, &[]);
    assert_eq!(output.code, Some(1), "{}\n{}", output.stdout, output.stderr);
    let all = format!("{}{}", output.stdout, output.stderr);
    assert!(all.contains("forward") && all.contains("dsv4_external.solution"), "{all}");
}

#[test]
fn files_that_do_not_belong_together_are_rejected_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let [definition, solution] = files(folder.path(), RIGHT, false);
    let run = || {
        let command = ["external", "--solution", &solution, "--definition", &definition];
        Parity::new(&command).run()
    };
    let text = std::fs::read_to_string(&definition).expect("a Definition");
    std::fs::write(&definition, text.replace("rms_norm_", "other_")).expect("written");
    run().assert_bad_input(&["is about `rms_norm_", "--definition about `other_"]);
    std::fs::write(&definition, text.replace("dsv4-parity:", "theirs:")).expect("written");
    run().assert_bad_input(&["no Definition of `parity ops NAME --trace-definition`"]);
    std::fs::write(&definition, "{").expect("written");
    run().assert_bad_input(&["definition.json"]);
    let words = ["ops", "kv_cache_write", "--trace-definition"];
    Parity::new(&words).run().assert_bad_input(&["writes over"]);
}
