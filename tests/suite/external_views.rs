//! External kernels: what is computed here of what they store, and which of their kernels ran.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

use dsv4_parity::external::process::{Call, Reply};
use dsv4_parity::external::{EXPECTED, Expected, ExternalOptions};
use dsv4_parity::judge::runner::RunError;
use dsv4_parity::operators::registry;
use dsv4_parity::record::Verdict;

use crate::external::{
    Kernel, adapter, assert_agrees, changed, fails, failures, folder, honest, parity_about, python,
    reference, report, run,
};

const RMS_NORM: &str = r#"{"operator":"rms_norm","num_rows":4,"width":64,"dtype":"bf16","weight":"f32","eps":1e-6,"aliasing":"out_of_place","distribution":"normal","magnitude":1.0,"zero_rows":false,"saves_rstd":true,"seed":1}"#;

fn example(operator: &str) -> String {
    registry::find(operator).expect("an operator").example().line()
}

#[test]
fn a_kernel_writes_codes_and_caches_and_what_they_mean_is_computed_here() {
    for (operator, stored, meant) in [
        ("swiglu_quantize", &["codes", "scales"][..], &["decoded", "scale_is_least"][..]),
        ("kv_cache_write", &["cache"], &["rope"]),
        ("kv_norm_rope_write", &["cache"], &["slot_holds", "scale_is_least"]),
    ] {
        let asked: Rc<RefCell<Vec<String>>> = Rc::default();
        let kept = asked.clone();
        let kernel = Kernel(move |folder: &Path| {
            let text = std::fs::read_to_string(folder.join(EXPECTED)).expect("it is there");
            let expected: Expected = serde_json::from_str(&text).expect("as documented");
            *kept.borrow_mut() = expected.tensors.into_iter().map(|one| one.name).collect();
            honest(folder)
        });
        let record = run(&example(operator), ExternalOptions::default(), kernel);
        assert_agrees(&record);
        let asked = asked.borrow();
        for name in stored {
            assert!(asked.iter().any(|one| one == name), "{operator}: {asked:?}");
        }
        for name in meant {
            assert!(asked.iter().all(|one| one != name), "{operator}: {asked:?}");
            let is_compared = record.checks.iter().any(|check| check.tensor == *name);
            assert!(is_compared, "{operator}: {name} is not compared");
        }
    }
}

#[test]
fn a_kernel_cannot_claim_what_its_codes_do_not_mean() {
    let flipped =
        || changed(|outputs, _| outputs.get_mut("codes").expect("codes").bytes[3] ^= 0x40);
    let record = run(&example("swiglu_quantize"), ExternalOptions::default(), flipped());
    assert!(fails(&record, "forward", "decoded"), "{:?}", failures(&record));
    let flipped = changed(|outputs, _| {
        outputs.get_mut("cache").expect("cache").bytes.iter_mut().for_each(|byte| *byte ^= 1);
    });
    let record = run(&example("kv_cache_write"), ExternalOptions::default(), flipped);
    assert!(failures(&record).iter().any(|(check, ..)| check == "forward"), "{record:?}");
}

#[test]
fn without_a_tensor_what_follows_from_it_is_a_counted_skip() {
    let without = changed(|outputs, _| drop(outputs.remove("scales")));
    let options = adapter("[tensor.scales]\nabsent = true");
    let record = run(&example("swiglu_quantize"), options, without);
    assert_agrees(&record);
    for what in ["forward of decoded", "forward of scale_is_least"] {
        assert!(record.skips.iter().any(|skip| skip.what == what), "{what}: {:?}", record.skips);
    }
}

/// An honest kernel that says which one it is.
struct Named(&'static str);

impl Call for Named {
    fn call(&mut self, folder: &Path) -> Result<Reply, RunError> {
        honest(folder)?;
        Ok(Reply { kernel: Some(self.0.to_owned()), ..Reply::default() })
    }
}

#[test]
fn the_kernel_that_ran_is_the_path_and_another_one_than_demanded_fails() {
    let record = run(RMS_NORM, ExternalOptions::default(), Named("warp"));
    assert_eq!(record.paths, ["warp"]);
    let demands = |text: &str| adapter(&format!("[[kernel]]\nname = \"block\"\n{text}"));
    let record = run(RMS_NORM, demands(""), Named("block"));
    assert_agrees(&record);
    assert_agrees(&run(RMS_NORM, demands("where = \"width > 64\""), Named("warp")));
    for (named, said) in [(true, "`warp` ran"), (false, "the worker names none")] {
        let record = match named {
            true => run(RMS_NORM, demands("where = \"width = 64\""), Named("warp")),
            false => run(RMS_NORM, demands(""), Kernel(honest)),
        };
        let check = record.checks.last().expect("a check");
        assert_eq!((check.check.as_str(), check.verdict), ("launch", Verdict::Fail));
        assert!(check.message.contains("demands the kernel `block`"), "{}", check.message);
        assert!(check.message.contains(said), "{}", check.message);
    }
}

#[test]
fn bits_of_all_tensors_may_vary_but_for_those_that_say_otherwise() {
    let jitter = || {
        changed(|out, run| {
            let rstd = out.get_mut("rstd").expect("rstd");
            let values = rstd.dtype.decode(&rstd.bytes).into_iter();
            let factor = if run % 2 == 1 { 1.0 + f64::from(f32::EPSILON) } else { 1.0 };
            rstd.bytes =
                rstd.dtype.encode(&values.map(|v| v * factor).collect::<Vec<_>>()).unwrap();
        })
    };
    assert_agrees(&run(RMS_NORM, adapter("bitwise = false"), jitter()));
    let strict = adapter("bitwise = false\n[tensor.rstd]\nbitwise = true");
    let record = run(RMS_NORM, strict, jitter());
    assert!(fails(&record, "repeatable", "rstd"), "{:?}", failures(&record));
}

#[test]
fn cases_without_tokens_or_with_hostile_lists_are_left_out_on_demand_and_counted() {
    let dir = folder();
    let sweep = |further: &[&str]| {
        let reference = reference();
        let fixed = ["--worker", &reference, "--cases", "0", "--edge-cases", "40"];
        parity_about("embed_streams", dir.path(), &[&fixed[..], further].concat()).assert_code(0);
        let report = report(&dir.path().join("out"));
        let is_empty = |case: &&dsv4_parity::record::CaseRecord| case.case["num_tokens"] == 0;
        let empty = report.cases.iter().filter(is_empty).count();
        let skipped = report.skips.iter().any(|skip| skip.why.contains("--empty"));
        (empty > 0, skipped)
    };
    assert_eq!(sweep(&[]), (false, true));
    assert_eq!(sweep(&["--empty"]), (true, false));
    let file = dir.path().join("kind.toml");
    std::fs::write(&file, "hostile = false").expect("written");
    let reference = reference();
    let adapter = file.display().to_string();
    let fixed = ["--worker", &reference, "--cases", "0", "--edge-cases", "40"];
    let kind = [&fixed[..], &["--adapter", &adapter]].concat();
    parity_about("kv_cache_write", dir.path(), &kind).assert_code(0);
    let report = report(&dir.path().join("out"));
    assert!(report.cases.iter().all(|case| case.case["slots"] != "hostile"));
    assert!(report.skips.iter().any(|skip| skip.why.contains("hostile = false")));
}

#[test]
fn a_python_function_of_three_parameters_gets_what_it_is_to_return_and_names_its_kernel() {
    if !python("", "a Python kernel of three parameters") {
        return;
    }
    let dir = folder();
    let path = std::path::absolute(crate::support::fixtures().join("external")).expect("a path");
    let text = format!(
        "import sys; sys.path.insert(0, {:?})\n\
         from dsv4_external import Tensor, ran, serve\n\
         def zeros(case, inputs, expected):\n    ran('zeros')\n    \
         assert expected['dx']['side'] == 'gradient' and expected['y']['dtype'] == 'BF16'\n    \
         sizes = {{n: e['shape'] for n, e in expected.items()}}\n    \
         count = lambda shape: shape[0] * (shape[1] if len(shape) > 1 else 1)\n    \
         return {{n: Tensor(s, [0.0] * count(s)) for n, s in sizes.items()}}\nserve(zeros)\n",
        path.display().to_string()
    );
    let script = dir.path().join("zeros.py");
    std::fs::write(&script, text).expect("written");
    let worker = format!("python3 '{}'", script.display());
    let output = parity_about("rms_norm", dir.path(), &["--worker", &worker, "--case", RMS_NORM]);
    output.assert_code(1);
    let report = report(&dir.path().join("out"));
    assert_eq!(report.cases[0].paths, ["zeros"], "{}", output.stderr);
}
