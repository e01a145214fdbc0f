//! External kernels: every way in which another process can be right, wrong, or missing.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

use dsv4_parity::case::Case;
use dsv4_parity::external::adapter::Adapter;
use dsv4_parity::external::process::{Call, OneShot, Reply, Worker};
use dsv4_parity::external::wire::{self, WireTensors, WireType};
use dsv4_parity::external::{self, External, ExternalOptions, INPUTS, OUTPUTS};
use dsv4_parity::judge::checks::CheckOptions;
use dsv4_parity::judge::runner::RunError;
use dsv4_parity::operator::Profile;
use dsv4_parity::operators::registry;
use dsv4_parity::record::{CaseRecord, Check, CheckRecord, Origin, Report, Seen, Skip, Verdict};
use dsv4_parity::sweep;

use crate::command_line::{Parity, binary};
use crate::extent::{attacked, concerned_operators, left_out};
use crate::support;

/// Rooms whose changes run the long tests of this file.
const PROTOCOL: [&str; 3] = ["src/external/", "src/command/external.rs", "fixtures/external/"];

const OPTIONS: CheckOptions = CheckOptions::of_kernels(0);
/// Time limit of a test that waits for a live process.
const LIMIT: Duration = Duration::from_secs(60);

const RMS_NORM: &str = r#"{"operator":"rms_norm","num_rows":4,"width":64,"dtype":"bf16","weight":"f32","eps":1e-6,"aliasing":"out_of_place","distribution":"normal","magnitude":1.0,"zero_rows":false,"saves_rstd":true,"seed":1}"#;
/// Two of its four rows have no valid slot.
const ATTENTION: &str = r#"{"operator":"sparse_attention","num_tokens":4,"num_heads":3,"head_dim":64,"values":"shared","v_dim":64,"num_keys":9,"topk":8,"indices":"empty_rows","lengths":"absent","sinks":"normal","softmax_scale":0.125,"logit_deviation":2.0,"logit_shift":0.0,"key_gradient":"bf16","dlse":true,"distribution":"normal","poison_unreferenced":true,"implementation":"portable","key_gradients":"atomic","seed":1}"#;

/// A kernel that runs in this process.
pub struct Kernel<F>(pub F);

impl<F: FnMut(&Path) -> Result<(), RunError>> Call for Kernel<F> {
    fn call(&mut self, folder: &Path) -> Result<Reply, RunError> {
        (self.0)(folder).map(|()| Reply::default())
    }
}

pub fn case(line: &str) -> Case {
    Case::parse(line).expect("a case")
}

pub fn adapter(text: &str) -> ExternalOptions {
    ExternalOptions {
        adapter: Adapter::parse(text).expect("an adapter"),
        ..ExternalOptions::default()
    }
}

pub fn run(line: &str, options: ExternalOptions, call: impl Call + 'static) -> CaseRecord {
    sweep::run_case(&case(line), Origin::Given, &External::new(Box::new(call), options), OPTIONS)
}

/// Our own kernel, run as a correct external kernel.
pub fn honest(folder: &Path) -> Result<(), RunError> {
    external::answer(folder, support::device()).map_err(RunError::error)
}

/// Our own kernel with its outputs modified by `change`, which also gets the number of the run,
/// from 0.
pub fn changed(mut change: impl FnMut(&mut WireTensors, usize) + 'static) -> impl Call + 'static {
    let mut runs = 0;
    Kernel(move |folder: &Path| {
        honest(folder)?;
        let mut outputs = wire::read(&folder.join(OUTPUTS), u64::MAX).map_err(RunError::error)?;
        change(&mut outputs, runs);
        runs += 1;
        std::fs::write(folder.join(OUTPUTS), wire::to_bytes(&outputs).unwrap()).unwrap();
        Ok(())
    })
}

/// Changes the values of one tensor.
fn map(tensors: &mut WireTensors, name: &str, change: impl Fn(usize, f64) -> f64) {
    let tensor = tensors.get_mut(name).unwrap_or_else(|| panic!("no `{name}`"));
    let values = tensor.dtype.decode(&tensor.bytes);
    let values: Vec<f64> =
        values.into_iter().enumerate().map(|(i, value)| change(i, value)).collect();
    tensor.bytes = tensor.dtype.encode(&values).unwrap();
}

/// Check, tensor and verdict of everything that did not pass.
pub fn failures(record: &CaseRecord) -> Vec<(String, String, Verdict)> {
    let bad = record.checks.iter().filter(|check| check.verdict != Verdict::Pass);
    bad.map(|check| (check.check.to_string(), check.tensor.clone(), check.verdict)).collect()
}

pub fn assert_agrees(record: &CaseRecord) {
    assert_eq!(failures(record), [], "{}", sweep::failure_text(record));
    assert!(record.checks.iter().all(|check| check.compared > 0));
}

/// A case whose run failed, with all of `needles` in the message.
pub fn assert_no_outputs(record: &CaseRecord, verdict: Verdict, needles: &[&str]) {
    assert_eq!(
        failures(record),
        [("launch".to_owned(), String::new(), verdict)],
        "{}",
        sweep::failure_text(record)
    );
    let message = &record.checks.last().unwrap().message;
    for needle in needles {
        assert!(message.contains(needle), "`{needle}` is not in `{message}`");
    }
}

pub fn fails(record: &CaseRecord, check: &str, tensor: &str) -> bool {
    failures(record).contains(&(check.to_owned(), tensor.to_owned(), Verdict::Fail))
}

// ---------------------------------------------------------------- what a kernel computes

/// Ours, with the last bit of every value of y changed in batches of more than two rows.
fn follows_the_batch() -> impl Call + 'static {
    changed(|outputs, _| {
        let y = outputs.get_mut("y").expect("y");
        if y.shape[0] > 2 {
            y.bytes.iter_mut().step_by(4).for_each(|byte| *byte ^= 1);
        }
    })
}

#[test]
fn a_kernel_whose_bits_follow_the_batch_agrees_with_the_oracle_and_fails_batch_invariance() {
    let line = RMS_NORM.replace(r#""dtype":"bf16""#, r#""dtype":"f32""#);
    let usual = run(&line, ExternalOptions::default(), follows_the_batch());
    assert!(!fails(&usual, "forward", "y"), "{}", sweep::failure_text(&usual));
    assert!(usual.skips.iter().any(|skip| skip.what == "batch_invariance"), "{:?}", usual.skips);
    let only = CheckOptions { only_batches: true, ..OPTIONS };
    let judged = |call: Box<dyn Call>| {
        let external = External::new(call, ExternalOptions::default());
        sweep::run_case(&case(&line), Origin::Given, &external, only)
    };
    let record = judged(Box::new(follows_the_batch()));
    assert!(fails(&record, "batch_invariance", "y"), "{}", sweep::failure_text(&record));
    assert!(!fails(&record, "batch_invariance", "rstd"));
    let message = sweep::failure_text(&record);
    for needle in ["company: num_rows 4 against 1", "first at row", "an external kernel"] {
        assert!(message.contains(needle), "`{needle}` is not in `{message}`");
    }
    assert!(record.checks.iter().all(|check| check.check != "forward"));
    let ours = judged(Box::new(Kernel(honest)));
    assert_agrees(&ours);
    assert!(ours.checks.iter().any(|check| check.check == "batch_invariance"));
}

#[test]
fn two_workers_beside_each_other_differ_by_tensor_or_not_without_an_oracle() {
    let line = RMS_NORM.replace(r#""dtype":"bf16""#, r#""dtype":"f32""#);
    let beside = |own: Box<dyn Call>, other: Box<dyn Call>| {
        let other = External::new(other, ExternalOptions::default());
        let options = ExternalOptions { beside: Some(Box::new(other)), ..Default::default() };
        let checks = CheckOptions { only_beside: true, ..OPTIONS };
        sweep::run_case(&case(&line), Origin::Given, &External::new(own, options), checks)
    };
    let equal = beside(Box::new(Kernel(honest)), Box::new(Kernel(honest)));
    assert_agrees(&equal);
    assert!(equal.checks.iter().any(|check| check.check == "beside" && check.tensor == "y"));
    assert!(equal.checks.iter().all(|check| check.check != "forward"));
    let unlike = beside(Box::new(Kernel(honest)), Box::new(follows_the_batch()));
    assert!(fails(&unlike, "beside", "y"), "{}", sweep::failure_text(&unlike));
    assert!(!fails(&unlike, "beside", "rstd"));
    let text = sweep::failure_text(&unlike);
    assert!(text.contains("element(s) differ; first at"), "{text}");
    assert!(text.contains("of the kernel beside it"), "{text}");
}

#[test]
fn our_own_kernels_agree_from_outside_for_every_operator_and_what_cannot_be_seen_is_counted() {
    for operator in concerned_operators() {
        let edge_cases = operator.edge_cases(Profile::Quick);
        // Every operator's laws need inputs of other shapes in at least one of its edge cases.
        for case in edge_cases.iter().step_by(edge_cases.len().div_ceil(5)) {
            let record = run(&case.line(), ExternalOptions::default(), Kernel(honest));
            assert_agrees(&record);
            let skipped =
                |what: &str| record.skips.iter().any(|skip| skip.what == what && skip.count > 0);
            assert!(
                ["guards", "fully_written", "poison_independent"].iter().all(|what| skipped(what)),
                "{:?}",
                record.skips
            );
            let checks: Vec<_> = record.checks.iter().map(|check| check.check.as_str()).collect();
            assert!(
                ["launch", "inputs_unchanged"].iter().all(|check| checks.contains(check)),
                "{checks:?}"
            );
        }
    }
    let record = run(RMS_NORM, ExternalOptions::default(), Kernel(honest));
    for check in [
        "forward",
        "gradient",
        "precision",
        "finite",
        "special_values",
        "repeatable",
        "independence",
    ] {
        assert!(record.checks.iter().any(|c| c.check == check), "{check} was not made");
    }
    let laws: BTreeSet<_> =
        record.checks.iter().filter_map(|c| c.check.as_str().strip_prefix("law: ")).collect();
    assert_eq!(
        laws,
        ["rows may be permuted", "upstreams scale the gradients once", "weight scales once"].into()
    );
}

#[test]
fn a_wrong_scale_fails_forward_and_wrong_gradients_fail_gradient() {
    let scaled = run(
        RMS_NORM,
        ExternalOptions::default(),
        changed(|out, _| map(out, "y", |_, value| 1.02 * value)),
    );
    assert!(
        fails(&scaled, "forward", "y") && !fails(&scaled, "gradient", "dx"),
        "{:?}",
        failures(&scaled)
    );
    let halved = run(
        RMS_NORM,
        ExternalOptions::default(),
        changed(|out, _| map(out, "dweight", |_, value| value / 2.0)),
    );
    assert!(
        fails(&halved, "gradient", "dweight") && !fails(&halved, "forward", "y"),
        "{:?}",
        failures(&halved)
    );
}

#[test]
fn one_nan_fails_finite() {
    let nan = |out: &mut WireTensors, _| {
        map(out, "dx", |i, value| if i == 77 { f64::NAN } else { value })
    };
    let record = run(RMS_NORM, ExternalOptions::default(), changed(nan));
    assert!(
        fails(&record, "finite", "dx") && fails(&record, "gradient", "dx"),
        "{:?}",
        failures(&record)
    );
}

#[test]
fn wrong_shapes_types_and_missing_tensors_are_named() {
    let options = ExternalOptions::default;
    let shape =
        run(RMS_NORM, options(), changed(|out, _| out.get_mut("y").unwrap().shape = vec![64, 4]));
    assert_no_outputs(&shape, Verdict::Fail, &["`y` is BF16 [64, 4], expected BF16 [4, 64]"]);
    let dtype = run(
        RMS_NORM,
        options(),
        changed(|out, _| out.get_mut("rstd").unwrap().dtype = WireType::I32),
    );
    assert_no_outputs(&dtype, Verdict::Fail, &["`rstd` is I32 [4], expected F32 [4]"]);
    let missing = changed(|out, _| {
        out.remove("dx");
        let dweight = out.remove("dweight").unwrap();
        out.insert("dW".into(), dweight);
    });
    assert_no_outputs(
        &run(RMS_NORM, options(), missing),
        Verdict::Error,
        &["`dx` is missing", "`dweight` is missing", "dW"],
    );
    let nothing = run(RMS_NORM, options(), Kernel(|_: &Path| Ok(())));
    assert_no_outputs(&nothing, Verdict::Error, &["wrote no outputs.safetensors"]);
    let garbage = |folder: &Path| {
        std::fs::write(folder.join(OUTPUTS), "no tensors").unwrap();
        Ok(())
    };
    assert_no_outputs(
        &run(RMS_NORM, options(), Kernel(garbage)),
        Verdict::Error,
        &["no safetensors file"],
    );
}

#[test]
fn only_a_regular_file_of_the_expected_size_is_read_and_nothing_else_hangs_or_takes_memory() {
    let put = |name: &'static str, script: &'static str| {
        Kernel(move |folder: &Path| {
            honest(folder)?;
            let script = format!("cp {name} kept && rm {name} && {script}");
            let status = Command::new("sh")
                .args(["-c", &script])
                .current_dir(folder)
                .status()
                .expect("sh runs");
            assert!(status.success(), "{script}");
            Ok(())
        })
    };
    for (script, needle) in [
        ("mkfifo outputs.safetensors", "outputs.safetensors is a FIFO, no regular file"),
        ("mkdir outputs.safetensors", "outputs.safetensors is a directory, no regular file"),
        (
            "ln -s /dev/zero outputs.safetensors",
            "outputs.safetensors is a symbolic link, no regular file",
        ),
        (
            "ln -s nowhere outputs.safetensors",
            "outputs.safetensors is a symbolic link, no regular file",
        ),
        (
            "ln -s kept outputs.safetensors",
            "outputs.safetensors is a symbolic link, no regular file",
        ),
        (
            "truncate -s 6G outputs.safetensors",
            "outputs.safetensors has 6442450944 bytes; what is expected has at most",
        ),
    ] {
        let record = run(RMS_NORM, ExternalOptions::default(), put("outputs.safetensors", script));
        assert_no_outputs(&record, Verdict::Error, &[needle]);
    }
    for (script, needle) in [("mkfifo", "is a FIFO"), ("truncate -s 6G", "has 6442450944 bytes")] {
        let script: &'static str = format!("{script} inputs.safetensors").leak();
        let record = run(RMS_NORM, ExternalOptions::default(), put("inputs.safetensors", script));
        assert_no_outputs(&record, Verdict::Fail, &["inputs.safetensors", needle]);
    }
}

#[test]
fn a_kernel_that_writes_to_its_inputs_is_found_by_the_file_and_by_its_echo() {
    let echo = |factor: f64| {
        Kernel(move |folder: &Path| {
            honest(folder)?;
            let mut inputs = wire::read(&folder.join(INPUTS), u64::MAX).unwrap();
            map(&mut inputs, "x", |i, value| if i == 5 { factor * value } else { value });
            let mut outputs = wire::read(&folder.join(OUTPUTS), u64::MAX).unwrap();
            outputs.insert("input.x".into(), inputs.remove("x").unwrap());
            std::fs::write(folder.join(OUTPUTS), wire::to_bytes(&outputs).unwrap()).unwrap();
            Ok(())
        })
    };
    assert_agrees(&run(RMS_NORM, ExternalOptions::default(), echo(1.0)));
    let record = run(RMS_NORM, ExternalOptions::default(), echo(2.0));
    assert_eq!(failures(&record), [("inputs_unchanged".to_owned(), "x".to_owned(), Verdict::Fail)]);
    let overwritten = Kernel(|folder: &Path| {
        honest(folder)?;
        let mut bytes = std::fs::read(folder.join(INPUTS)).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(folder.join(INPUTS), bytes).unwrap();
        Ok(())
    });
    let record = run(RMS_NORM, ExternalOptions::default(), overwritten);
    assert_eq!(
        failures(&record),
        [("inputs_unchanged".to_owned(), INPUTS.to_owned(), Verdict::Fail)]
    );
}

#[test]
fn laws_reach_the_kernel_with_the_variants_own_scalars() {
    // A kernel that keeps the first scale that it got.
    let first = Rc::new(RefCell::new(None));
    let stale = Kernel(move |folder: &Path| {
        let path = folder.join(external::CASE);
        let text = std::fs::read_to_string(&path).unwrap();
        let mut case: serde_json::Value = serde_json::from_str(&text).unwrap();
        let scale = first.borrow_mut().get_or_insert_with(|| case["softmax_scale"].clone()).clone();
        case["softmax_scale"] = scale;
        std::fs::write(path, case.to_string()).unwrap();
        honest(folder)
    });
    let record = run(ATTENTION, ExternalOptions::default(), stale);
    assert!(fails(&record, "law: softmax_scale counts once", "lse"), "{:?}", failures(&record));
    assert!(!fails(&record, "forward", "lse"));
}

// ---------------------------------------------------------------- what an adapter declares

#[test]
fn a_base_2_lse_in_another_layout_agrees_through_its_adapter_only() {
    let theirs = |out: &mut WireTensors, _| {
        map(out, "lse", |_, value| {
            if value == f64::INFINITY { -value } else { value * std::f64::consts::LOG2_E }
        });
        let mut lse = out.remove("lse").unwrap();
        let values = lse.dtype.decode(&lse.bytes);
        let transposed: Vec<f64> = (0..12).map(|i| values[i % 4 * 3 + i / 4]).collect();
        (lse.bytes, lse.shape) = (lse.dtype.encode(&transposed).unwrap(), vec![3, 4]);
        out.insert("softmax_lse".into(), lse);
    };
    // Only the base differs, and no option declares it.
    let base_2 =
        |out: &mut WireTensors, _| map(out, "lse", |_, value| value * std::f64::consts::LOG2_E);
    let unsaid = run(ATTENTION, ExternalOptions::default(), changed(base_2));
    assert!(fails(&unsaid, "forward", "lse"), "{:?}", failures(&unsaid));
    let adapted = |text: &str| {
        // The reference worker knows only our names: its request uses our names, and its answer is
        // converted to theirs.
        let mut call = changed(theirs);
        let kernel = Kernel(move |folder: &Path| {
            let path = folder.join(external::EXPECTED);
            let text = std::fs::read_to_string(&path).unwrap().replace("softmax_lse", "lse");
            std::fs::write(path, text).unwrap();
            call.call(folder).map(drop)
        });
        run(ATTENTION, adapter(text), kernel)
    };
    let all = "[tensor.lse]\nrename = 'softmax_lse'\npermute = [1, 0]\nbase = 2\nfill = { ours = inf, theirs = -inf }";
    assert_agrees(&adapted(all));
    for (without, check) in
        [("base = 2\n", "forward"), ("fill = { ours = inf, theirs = -inf }", "special_values")]
    {
        let record = adapted(&all.replace(without, ""));
        assert!(fails(&record, check, "lse"), "without `{without}`: {:?}", failures(&record));
    }
    assert_no_outputs(
        &adapted(&all.replace("permute = [1, 0]\n", "")),
        Verdict::Fail,
        &["[3, 4]", "[4, 3]"],
    );
}

#[test]
fn masked_slots_carry_the_declared_sentinel() {
    let seen = Rc::new(RefCell::new(Vec::new()));
    let kernel = {
        let seen = seen.clone();
        Kernel(move |folder: &Path| {
            let mut inputs = wire::read(&folder.join(INPUTS), u64::MAX).unwrap();
            let indices = &inputs["indices"];
            seen.borrow_mut().extend(indices.dtype.decode(&indices.bytes));
            // Their value for no key is above every key here, so it is not a key here either.
            assert_eq!(indices.dtype, WireType::I64);
            let back = WireType::I32.encode(&indices.dtype.decode(&indices.bytes)).unwrap();
            let indices = inputs.get_mut("indices").unwrap();
            (indices.dtype, indices.bytes) = (WireType::I32, back);
            let given = std::fs::read(folder.join(INPUTS)).unwrap();
            std::fs::write(folder.join(INPUTS), wire::to_bytes(&inputs).unwrap()).unwrap();
            let answer = honest(folder);
            std::fs::write(folder.join(INPUTS), given).unwrap();
            answer
        })
    };
    let options = adapter("[tensor.indices]\nsentinel = 1000000\ndtype = 'I64'");
    assert_agrees(&run(ATTENTION, options, kernel));
    assert!(seen.borrow().contains(&1e6) && !seen.borrow().contains(&-1.0));
}

#[test]
fn bits_that_vary_fail_unless_declared_and_then_the_budget_still_holds_them() {
    // One unit in the last place in every other run; and an error above any budget.
    let jitter = |factor: f64| {
        changed(move |out, run| {
            map(out, "rstd", |_, value| if run % 2 == 1 { value * factor } else { value })
        })
    };
    let free = || adapter("[tensor.rstd]\nbitwise = false");
    let ulp = 1.0 + f64::from(f32::EPSILON);
    // The hint appears only where the last bits differ.
    let hinted = |record: &CaseRecord, check: &str| {
        let of =
            |c: &&CheckRecord| c.check == check && c.tensor == "rstd" && c.verdict == Verdict::Fail;
        record.checks.iter().find(of).map(|c| c.message.contains("`bitwise = false`"))
    };
    let record = run(RMS_NORM, ExternalOptions::default(), jitter(ulp));
    assert_eq!(
        [hinted(&record, "repeatable"), hinted(&record, "law: weight scales once")],
        [Some(true); 2]
    );
    let record = run(RMS_NORM, ExternalOptions::default(), jitter(1.001));
    assert_eq!(
        [hinted(&record, "repeatable"), hinted(&record, "law: weight scales once")],
        [Some(false); 2]
    );
    let record = run(RMS_NORM, free(), jitter(ulp));
    assert_agrees(&record);
    let skipped = record.skips.iter().filter(|skip| skip.what == "bit equality of rstd").count();
    assert!(skipped >= 2, "what is held to less is not shown: {:?}", record.skips);
    let record = run(RMS_NORM, free(), jitter(1.001));
    assert!(
        fails(&record, "repeatable", "rstd") && fails(&record, "law: weight scales once", "rstd"),
        "{:?}",
        failures(&record)
    );
    let rows = changed(|out, run| {
        map(out, "dx", |i, value| if run > 1 && i == 64 { value + 1.0 } else { value })
    });
    let record = run(RMS_NORM, adapter("[tensor.dx]\nbitwise = false"), rows);
    for law in
        ["law: rows may be permuted", "law: upstreams scale the gradients once", "independence"]
    {
        assert!(fails(&record, law, "dx"), "{law}: {:?}", failures(&record));
    }
}

#[test]
fn what_is_declared_absent_is_skipped_and_what_is_not_is_missing() {
    let no_gradients = || changed(|out, _| out.retain(|name, _| !name.starts_with('d')));
    let undeclared = run(RMS_NORM, ExternalOptions::default(), no_gradients());
    assert_no_outputs(&undeclared, Verdict::Error, &["`dx` is missing"]);
    let record = run(
        RMS_NORM,
        ExternalOptions { forward_only: true, ..ExternalOptions::default() },
        no_gradients(),
    );
    assert_agrees(&record);
    assert!(record.checks.iter().all(|check| !check.tensor.starts_with('d')));
    let skipped =
        |record: &CaseRecord, what: &str| record.skips.iter().any(|skip| skip.what == what);
    assert!(
        skipped(&record, "gradient of dx") && skipped(&record, "independence of dx"),
        "{:?}",
        record.skips
    );
    let no_rstd = changed(|out, _| drop(out.remove("rstd")));
    let record = run(RMS_NORM, adapter("[tensor.rstd]\nabsent = true"), no_rstd);
    assert_agrees(&record);
    assert!(skipped(&record, "forward of rstd"), "{:?}", record.skips);
}

// ---------------------------------------------------------------- processes

/// A request's folder, which nothing reads here.
pub fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

fn one_shot(command: &str, time_limit: Duration) -> RunError {
    let (dir, command) = (folder(), command.to_owned());
    OneShot::new(command, time_limit).call(dir.path()).expect_err("it failed")
}

pub fn assert_says(error: &RunError, needles: &[&str]) {
    assert_eq!(error.verdict, Verdict::Error);
    for needle in needles {
        assert!(error.message.contains(needle), "`{needle}` is not in `{}`", error.message);
    }
}

/// Whether a process runs; a zombie does not.
pub fn is_alive(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    stat.rsplit(')')
        .next()
        .is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with('Z'))
}

pub fn assert_dies(pid: &str) {
    let start = Instant::now();
    while is_alive(pid) {
        assert!(start.elapsed() < Duration::from_secs(5), "process {pid} is still alive");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_command_that_dies_says_how_and_its_last_words() {
    assert_says(
        &one_shot("echo first >&2; echo no such tensor >&2; exit 7", LIMIT),
        &["exit code 7", "no such tensor"],
    );
    assert_says(&one_shot("kill -SEGV $$", LIMIT), &["signal 11"]);
    assert_says(&one_shot("no-such-program {dir}", LIMIT), &["exit code 127", "no-such-program"]);
    let words = one_shot("for i in $(seq 100); do echo line $i; done; exit 1", LIMIT);
    assert!(
        words.message.contains("line 100") && !words.message.contains("line 80"),
        "{}",
        words.message
    );
}

#[test]
fn a_command_that_hangs_is_killed_with_its_children() {
    let dir = folder();
    let command = "sleep 300 & echo $! > {dir}/child; echo waiting >&2; sleep 300".to_owned();
    let start = Instant::now();
    let error =
        OneShot::new(command, Duration::from_millis(300)).call(dir.path()).expect_err("it hangs");
    assert_says(&error, &["time limit of 0.3 s", "waiting"]);
    assert!(start.elapsed() < Duration::from_secs(10), "it was waited for");
    assert_dies(&std::fs::read_to_string(dir.path().join("child")).expect("the child started"));
}

#[test]
fn what_a_command_leaves_running_is_ended_when_it_succeeds() {
    let dir = folder();
    let command = "sleep 300 & echo $! > {dir}/child".to_owned();
    OneShot::new(command, LIMIT).call(dir.path()).expect("it succeeds");
    assert_dies(&std::fs::read_to_string(dir.path().join("child")).expect("the child started"));
}

/// A shell script that answers requests; `$dir` is the folder of the last one.
pub fn script(text: &str) -> String {
    let read = r#"request() { read -r line || exit 0; dir=${line#*:\"}; dir=${dir%\"*}; }"#;
    format!("{read}\n{text}")
}

fn worker(text: &str, time_limit: Duration) -> Worker {
    Worker::new(script(text), time_limit)
}

#[test]
fn a_worker_lives_on_between_requests_and_ends_with_its_owner() {
    let dir = folder();
    let script = r#"while request; do echo $$ >> "$dir/pids"; echo '{"ok":true}'; done"#;
    let mut worker = worker(script, LIMIT);
    for _ in 0..3 {
        worker.call(dir.path()).expect("it answers");
    }
    let pids = std::fs::read_to_string(dir.path().join("pids")).unwrap();
    let pids: Vec<_> = pids.lines().collect();
    assert!(pids.len() == 3 && pids.iter().all(|pid| pid == &pids[0]), "{pids:?}");
    assert!(is_alive(pids[0]));
    drop(worker);
    assert_dies(pids[0]);
}

#[test]
fn a_worker_that_dies_or_reports_an_error_answers_the_next_request() {
    // The file `bad` selects the failure: `report` is an error answer, any other word is how the
    // worker ends.
    let script = r#"while request; do
        case $(cat "$dir/bad" 2>/dev/null) in
            report) echo '{"error":"width 3 is odd"}';;
            exit) echo out of memory >&2; exit 9;;
            abort) kill -ABRT $$;;
            *) echo '{"ok":true}';;
        esac; done"#;
    let mut worker = worker(script, LIMIT);
    for (bad, needles) in [
        ("report", &["width 3 is odd"][..]),
        ("exit", &["exit code 9", "out of memory"]),
        ("abort", &["signal 6"]),
    ] {
        let dir = folder();
        worker.call(dir.path()).expect("it answers");
        std::fs::write(dir.path().join("bad"), bad).unwrap();
        assert_says(&worker.call(dir.path()).expect_err("it fails"), needles);
        std::fs::remove_file(dir.path().join("bad")).unwrap();
        worker.call(dir.path()).expect("it answers again");
    }
}

#[test]
fn a_worker_that_hangs_is_killed_and_one_that_babbles_is_not_believed() {
    let dir = folder();
    let mut hanging =
        worker("request; sleep 300 & echo $! > \"$dir/child\"; wait", Duration::from_millis(300));
    assert_says(&hanging.call(dir.path()).expect_err("it hangs"), &["time limit of 0.3 s"]);
    assert_dies(&std::fs::read_to_string(dir.path().join("child")).expect("the child started"));
    for answer in [
        "loading weights",
        "{}",
        r#"{"ok":false}"#,
        r#"{"ok":true,"error":"no"}"#,
        r#"{"okay":true}"#,
    ] {
        let mut babbling = worker(&format!("request; echo '{answer}'; sleep 300"), LIMIT);
        assert_says(&babbling.call(dir.path()).expect_err(answer), &["answered", answer]);
    }
    // The second line would be read as the answer to the next request.
    let mut twice = worker(
        r#"while request; do echo '{"ok":true}'; echo '{"ok":true}'; : > "$dir/said"; done"#,
        LIMIT,
    );
    twice.call(dir.path()).expect("the first line is an answer");
    let start = Instant::now();
    while !dir.path().join("said").exists() && start.elapsed() < LIMIT {
        std::thread::sleep(Duration::from_millis(5));
    }
    // It may still be in the pipe.
    std::thread::sleep(Duration::from_millis(100));
    assert_says(&twice.call(dir.path()).expect_err("it said too much"), &["without a request"]);
}

/// Starts processes that would survive: one in its group, one in a separate session, and one whose
/// parent has ended. Each writes its id to `pids`.
pub const LINGER: &str = r#"
    echo $$ >> "$PIDS"
    sleep 300 & echo $! >> "$PIDS"
    (trap '' TERM INT HUP; exec setsid sh -c 'echo $$ >> "$PIDS"; sleep 300; :') &
    (setsid sh -c 'echo $$ >> "$PIDS"; setsid sh -c "echo \$\$ >> \"\$PIDS\"; sleep 300; :" & exit' &)
    while [ "$(wc -l < "$PIDS")" -lt 5 ]; do sleep 0.02; done
"#;

/// Ends the harness in this way while its child processes still run: then none of them runs, and no
/// temporary file is left.
pub fn assert_leaves_nothing(arguments: &[&str], environment: &[(&str, &Path)], end: &str) {
    let dir = folder();
    let (pids, temporary) = (dir.path().join("pids"), dir.path().join("temporary"));
    std::fs::create_dir(&temporary).unwrap();
    // If these tests run in the background of a script, the signal may be ignored, also in all
    // their children.
    let mut harness = Command::new("env")
        .arg("--default-signal=INT")
        .arg(binary())
        .args(arguments)
        .envs(environment.iter().copied())
        .envs([
            ("PIDS", &pids),
            ("TMPDIR", &temporary),
            ("PARITY_CACHE_DIR", &dir.path().join("modules")),
        ])
        .current_dir(dir.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = || {
        std::fs::read_to_string(&pids)
            .unwrap_or_default()
            .lines()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let start = Instant::now();
    while lines().len() < 5 {
        assert!(start.elapsed() < LIMIT, "{end}: {:?} linger", lines());
        std::thread::sleep(Duration::from_millis(5));
    }
    if end != "normal" {
        let number = harness.id().to_string();
        assert!(lines().iter().any(|pid| is_alive(pid)), "{end}");
        // A worker is started before the first case has a folder.
        while std::fs::read_dir(&temporary).unwrap().count() == 0 {
            assert!(start.elapsed() < LIMIT, "{end}: there is nothing to remove");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(Command::new("kill").args([end, &number]).status().unwrap().success());
    }
    harness.wait().unwrap();
    lines().iter().for_each(|pid| assert_dies(pid));
    let start = Instant::now();
    while std::fs::read_dir(&temporary).unwrap().count() > 0 {
        let left: Vec<_> =
            std::fs::read_dir(&temporary).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(start.elapsed() < Duration::from_secs(10), "{end}: {left:?} are left");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn nothing_of_a_worker_or_a_compiler_is_left_after_any_end_of_the_harness() {
    let dir = folder();
    let script = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    };
    let hanging = script("hanging", &format!("{LINGER}\nsleep 300"));
    let ending = script("ending", LINGER);
    let of = |option: &'static str, command: &Path, dir: &str| -> Vec<String> {
        let fixed = ["external", "--op", "rms_norm", "--case", RMS_NORM, option];
        fixed
            .iter()
            .map(|word| (*word).to_owned())
            .chain([format!("{}{dir}", command.display())])
            .collect()
    };
    for (arguments, ends) in [
        (of("--worker", &hanging, ""), &["-INT", "-TERM", "-KILL"][..]),
        (of("--worker", &ending, ""), &["normal"]),
        (of("--cmd", &hanging, " {dir}"), &["-KILL"]),
        (of("--cmd", &ending, " {dir}"), &["normal"]),
    ] {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        ends.iter().for_each(|end| assert_leaves_nothing(&arguments, &[], end));
        attacked("ends of the harness with processes of others running", ends.len() as u64);
    }
    let compiler = script(
        "compiler",
        &format!("[ \"$1\" = --version ] && echo hanging 1 && exit\n{LINGER}\nsleep 300"),
    );
    let run =
        ["run", "--backend", "emulator", "--ops", "swiglu", "--cases", "0", "--edge-cases", "1"];
    ["-INT", "-KILL"]
        .iter()
        .for_each(|end| assert_leaves_nothing(&run, &[("PARITY_CXX", &compiler)], end));
    attacked("ends of the harness with processes of others running", 2);
}

// ---------------------------------------------------------------- the command

/// `parity external` for rms_norm in a separate folder.
fn parity(dir: &Path, arguments: &[&str]) -> crate::command_line::Output {
    parity_about("rms_norm", dir, arguments)
}

pub fn parity_about(operator: &str, dir: &Path, arguments: &[&str]) -> crate::command_line::Output {
    let (out, none) =
        (dir.join("out").display().to_string(), dir.join("none").display().to_string());
    let fixed = ["external", "--op", operator, "--out", &out, "--regressions", &none];
    Parity::new(&[&fixed[..], arguments].concat()).run()
}

pub fn report(dir: &Path) -> Report {
    let text = std::fs::read_to_string(dir.join("report.json")).expect("a report");
    serde_json::from_str(&text).expect("a report")
}

pub fn reference() -> String {
    format!("{} external-worker --backend {}", binary().display(), support::backend())
}

#[test]
fn external_reports_like_run_and_diff_finds_no_loss_in_it() {
    if left_out(&PROTOCOL) {
        return;
    }
    let dir = folder();
    parity(dir.path(), &["--cmd", &format!("{} {{dir}}", reference()), "--case", RMS_NORM])
        .assert_code(0);
    let one_shot = report(&dir.path().join("out"));
    assert_eq!((one_shot.verdict(), one_shot.cases[0].origin), (Verdict::Pass, Origin::Given));
    // The operator with the shortest sweep. The kernel declares the same arithmetic as ours, so it
    // has the same bounds.
    let adapter = dir.path().join("adapter.toml");
    std::fs::write(&adapter, "rounding = \"specification\"\nlanes = 32\n").unwrap();
    let adapter = ["--adapter", &adapter.display().to_string()];
    // Drawn cases are the same on any device.
    let sweep = ["--cases", "8", "--edge-cases", "0"];
    let output = parity_about(
        "swiglu",
        dir.path(),
        &[&["--empty", "--worker", &reference()][..], &sweep, &adapter].concat(),
    );
    output.assert_code(0);
    assert!(
        output.stdout.contains("skipped") && output.stdout.contains("guards"),
        "{}",
        output.stdout
    );
    let external = report(&dir.path().join("out"));
    assert_eq!(external.environment.backend.to_string(), "external");
    assert_eq!(external.environment.device, reference());
    assert!(
        external
            .skips
            .iter()
            .any(|skip| skip.what == "guards" && skip.count == external.cases.len() as u64)
    );
    let page = std::fs::read_to_string(dir.path().join("out/index.html")).unwrap();
    assert!(page.contains("external-worker") && page.contains("cannot be prepared"));

    let of_power = |report: &Report| {
        let checks = report.cases.iter().flat_map(|case| &case.checks);
        checks
            .filter_map(|check| Some(check.metrics.as_ref()?.power.as_ref()?.bias))
            .collect::<Vec<_>>()
    };
    let powers = of_power(&external);
    assert!(!powers.is_empty());

    let (ours, none) = (
        dir.path().join("ours").display().to_string(),
        dir.path().join("none").display().to_string(),
    );
    let backend = support::backend().to_string();
    let run =
        ["run", "--ops", "swiglu", "--backend", &backend, "--out", &ours, "--regressions", &none];
    Parity::new(&[&run[..], &sweep].concat()).run().assert_code(0);
    assert_eq!(of_power(&report(&dir.path().join("ours"))), powers);
    // If a kernel declares nothing, the bias is not judged, and verdicts have less power.
    let other = folder();
    let silent = ["--empty", "--worker", &reference()];
    parity_about("swiglu", other.path(), &[&silent[..], &sweep].concat()).assert_code(0);
    let silent = report(&other.path().join("out"));
    assert!(silent.skips.iter().any(|skip| skip.what == "bias"));
    let seen = |powers: &[Seen]| {
        powers.iter().map(|seen| if let Seen::Bias(k) = seen { *k } else { 0 }).sum::<u32>()
    };
    let (told, untold) = (seen(&powers), seen(&of_power(&silent)));
    assert!(untold < told, "{untold} against {told}");
    let [ours, theirs] = [ours, dir.path().join("out").display().to_string()]
        .map(|dir| format!("{dir}/report.json"));
    for sides in [[&ours, &theirs], [&theirs, &ours]] {
        let output = Parity::new(&["diff", sides[0], sides[1]]).run();
        output.assert_code(0);
        assert!(output.stdout.contains("external kernel"), "{}", output.stdout);
    }
}

#[test]
fn diff_still_sees_a_check_that_an_external_report_lost_without_saying_why() {
    let dir = folder();
    let write = |name: &str, report: &Report| {
        let path = dir.path().join(name);
        std::fs::write(&path, serde_json::to_string(report).unwrap()).unwrap();
        path.display().to_string()
    };
    let base = crate::diff::report();
    let mut head = base.clone();
    head.environment.backend = dsv4_runtime::BackendKind::External;
    let base = write("base.json", &base);
    Parity::new(&["diff", &base, &write("same.json", &head)]).run().assert_code(0);
    head.cases.iter_mut().for_each(|case| case.checks.retain(|check| check.check != "guards"));
    let output = Parity::new(&["diff", &base, &write("less.json", &head)]).run();
    output.assert_code(1);
    assert!(output.stdout.contains("guards"), "{}", output.stdout);
}

#[test]
fn laws_that_head_checks_in_turn_are_lost_only_where_it_does_not_say_so() {
    let dir = folder();
    let write = |name: &str, report: &Report| {
        let path = dir.path().join(name);
        std::fs::write(&path, serde_json::to_string(report).unwrap()).unwrap();
        path.display().to_string()
    };
    let mut base = crate::diff::report();
    let law = |case: &mut CaseRecord| {
        let mut law = case.checks[0].clone();
        law.check = Check::law("weights scale once");
        case.checks.push(law);
    };
    base.cases.iter_mut().for_each(law);
    let mut head = crate::diff::report();
    let base = write("base.json", &base);
    let output = Parity::new(&["diff", &base, &write("silent.json", &head)]).run();
    output.assert_code(1);
    assert!(output.stdout.contains("weights scale once"), "{}", output.stdout);
    let why = "a sweep on the emulator checks a third of them, in turn".into();
    head.cases[0].skips.push(Skip { what: "laws".into(), why, count: 3 });
    Parity::new(&["diff", &base, &write("said.json", &head)]).run().assert_code(0);
}

#[test]
fn a_command_that_always_dies_fails_every_case_and_loses_none() {
    if left_out(&PROTOCOL) {
        return;
    }
    let dir = folder();
    let command = ["--cmd", "echo broken >&2; exit 3 # {dir}", "--cases", "0", "--empty"];
    let output = parity(dir.path(), &command);
    output.assert_code(1);
    let report = report(&dir.path().join("out"));
    let swept = report.cases.iter().filter(|case| case.origin != Origin::Shrunk);
    assert_eq!(
        swept.count(),
        registry::find("rms_norm")
            .unwrap()
            .edge_cases(Profile::Quick)
            .iter()
            // Another process has no emulated SMs.
            .filter(|case| !case.fields.contains_key("sms"))
            .count()
    );
    for case in &report.cases {
        assert_no_outputs(case, Verdict::Error, &["exit code 3", "broken"]);
        assert!(
            case.replay.starts_with(
                "parity external --op rms_norm --cmd 'echo broken >&2; exit 3 # {dir}'"
            )
        );
    }
    assert!(output.stderr.contains("broken"), "{}", output.stderr);
    assert!(!dir.path().join("none").exists(), "somebody else's failure was remembered");
}

/// A command that accepts only cases with fp32 weights.
fn with_f32_weights() -> String {
    let unsupported = r#"{"unsupported":"bf16 weights"}"#;
    format!(
        "if grep -q 'weight.*f32' {{dir}}/case.json; then {} {{dir}}; else echo '{unsupported}'; fi",
        reference()
    )
}

#[test]
fn what_a_kernel_is_not_for_is_a_counted_skip_and_a_sweep_of_nothing_else_is_an_error() {
    let unsupported = Kernel(|_: &Path| Err(RunError::unsupported("64 heads only")));
    let record = run(ATTENTION, ExternalOptions::default(), unsupported);
    assert_eq!((record.unsupported.as_deref(), record.checks.len()), (Some("64 heads only"), 0));
    let mut worker =
        worker(r#"while request; do echo '{"unsupported":"64 heads only"}'; done"#, LIMIT);
    let dir = folder();
    for _ in 0..2 {
        assert_eq!(
            worker.call(dir.path()).expect_err("it refuses"),
            RunError::unsupported("64 heads only")
        );
    }
    // A kernel that has run a case cannot reject all cases of its kind later.
    let mut runs = 0;
    let fickle = Kernel(move |folder: &Path| {
        runs += 1;
        if runs == 2 { Err(RunError::unsupported("not any more")) } else { honest(folder) }
    });
    let record = run(RMS_NORM, ExternalOptions::default(), fickle);
    assert!(
        record.unsupported.is_none() && record.verdict() == Verdict::Error,
        "{:?}",
        failures(&record)
    );

    let sweep = ["--cases", "6", "--edge-cases", "0", "--empty"];
    let all = parity(
        dir.path(),
        &[&["--worker", r#"while read -r l; do echo '{"unsupported":"all"}'; done"#][..], &sweep]
            .concat(),
    );
    all.assert_code(2);
    assert!(all.stderr.contains("parity: nothing was compared: 0 case(s) ran, "), "{}", all.stderr);
    assert!(
        all.stdout
            .contains("skipped 6 times: cases of rms_norm: the kernel does not support them: all"),
        "{}",
        all.stdout
    );
    assert!(
        all.stdout.contains("nothing was compared: 0 cases, 0 checks")
            && !all.stdout.contains("agreed"),
        "{}",
        all.stdout
    );

    let command = with_f32_weights();
    let some = parity(dir.path(), &[&["--cmd", &command][..], &sweep].concat());
    some.assert_code(0);
    let report = report(&dir.path().join("out"));
    let (ran, not) = (report.cases.len(), report.unsupported.len());
    assert!(ran > 0 && not > 0 && ran + not == 6, "{ran} and {not}");
    let why = "the kernel does not support them: bf16 weights";
    assert!(
        report.skips.iter().any(|skip| skip.why == why && skip.count == not as u64),
        "{:?}",
        report.skips
    );
    let last: Vec<_> = some.stdout.lines().rev().take(2).collect();
    assert!(
        last[0].starts_with("report: ")
            && last[1].starts_with(&format!("all agreed: {ran} cases, ")),
        "{last:?}"
    );
}

#[test]
fn cases_that_meet_a_condition_are_drawn_shrunk_within_it_and_what_does_not_meet_it_is_counted() {
    if left_out(&PROTOCOL) {
        return;
    }
    let dir = folder();
    let adapter = dir.path().join("adapter.toml");
    std::fs::write(&adapter, "where = \"width % 8 = 0 and width > 8\"\n").unwrap();
    let adapter = adapter.display().to_string();
    let condition = "dtype = 'bf16' and num_rows % 2 = 0";
    let sweep =
        ["--cmd", "exit 3 # {dir}", "--cases", "10", "--adapter", &adapter, "--where", condition];
    parity(dir.path(), &[&sweep[..], &["--empty"]].concat()).assert_code(1);
    let report = report(&dir.path().join("out"));
    let of = |case: &CaseRecord, field: &str| case.case[field].as_u64().expect("a number");
    for case in &report.cases {
        assert_eq!(
            (case.case["dtype"].as_str(), of(case, "num_rows") % 2, of(case, "width") % 8),
            (Some("bf16"), 0, 0)
        );
        assert!(of(case, "width") > 8);
    }
    let count = |origin| report.cases.iter().filter(|case| case.origin == origin).count();
    let edge_cases = registry::find("rms_norm").unwrap().edge_cases(Profile::Quick);
    let edge_cases = edge_cases.iter().filter(|case| !case.fields.contains_key("sms")).count();
    let skipped = report
        .skips
        .iter()
        .find(|skip| skip.what == "cases of rms_norm")
        .expect("they are counted");
    assert_eq!(count(Origin::Shrunk), 1);
    assert_eq!(count(Origin::Drawn) + skipped.count as usize, edge_cases + 10);
    assert!(
        skipped.why.contains(condition) && skipped.why.contains("width > 8"),
        "{}",
        skipped.why
    );

    let with = |condition: &str| {
        parity(dir.path(), &["--worker", "cat", "--cases", "3", "--where", condition])
    };
    let rare = with("width = -1");
    rare.assert_code(2);
    let said =
        "skipped 3 times: drawn cases of rms_norm: of 20000 tries 0 drew a case where width = -1";
    assert!(
        rare.stdout.contains(said) && rare.stderr.contains("nothing was compared"),
        "{}",
        rare.stdout
    );
    with("wdith = 64").assert_bad_input(&["wdith = 64", "`wdith`", "num_rows"]);
    with("width = 'x'").assert_bad_input(&["`width`", "\"x\""]);
    let syntax = with("width = = 64");
    assert!(
        syntax.code == Some(2) && syntax.stderr.contains("at character 9, `=`"),
        "{}",
        syntax.stderr
    );
}

#[test]
fn an_external_sweep_is_divided_merged_resumed_and_reported_from_what_a_killed_one_left() {
    if left_out(&PROTOCOL) {
        return;
    }
    let dir = folder();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let command = with_f32_weights();
    let adapter = dir.path().join("adapter.toml");
    std::fs::write(&adapter, "lanes = 2\n").unwrap();
    let adapter = adapter.display().to_string();
    let sweep = |out: &str, more: &[&str]| {
        let (out, none) = (path(out), path("none"));
        let fixed = [
            "external",
            "--op",
            "rms_norm",
            "--cmd",
            &command,
            "--cases",
            "5",
            "--edge-cases",
            "0",
            "--empty",
        ];
        let places = ["--out", &out, "--regressions", &none, "--adapter", &adapter];
        Parity::new(&[&fixed[..], &places, more].concat()).run()
    };
    sweep("whole", &[]).assert_code(0);
    for (out, shard) in [("one", "0/2"), ("two", "1/2")] {
        sweep(out, &["--shard", shard]).assert_code(0);
    }
    // A kill in the middle of a record.
    let records = std::fs::read_to_string(dir.path().join("two/records.jsonl")).unwrap();
    let (first, rest) = records.split_once('\n').expect("two records at least");
    assert!(rest.lines().count() >= 1);
    std::fs::write(dir.path().join("two/records.jsonl"), format!("{first}\n{}", &rest[..40]))
        .unwrap();
    std::fs::remove_file(dir.path().join("two/report.json")).unwrap();
    let merge =
        || Parity::new(&["merge", &path("one"), &path("two"), "--out", &path("merged")]).run();
    let missing = rest.lines().count();
    for _ in 0..2 {
        let output = Parity::new(&["report", &path("two")]).run();
        output.assert_code(0);
        let said = format!(
            "unfinished: 1 cases are recorded, {missing} of the plan's are missing; --resume continues"
        );
        assert!(output.stdout.contains(&said), "{}", output.stdout);
        let left = report(&dir.path().join("two"));
        assert_eq!(
            (left.unfinished, left.verdict(), left.seed),
            (Some(missing as u64), Verdict::Error, 0)
        );
        assert_eq!(left.cases.len() + left.unsupported.len(), 1);
        assert!(
            std::fs::read_to_string(dir.path().join("two/summary.md"))
                .unwrap()
                .contains("Cut short: ")
        );
        merge().assert_bad_input(&["two: shard 1/2 is unfinished"]);
    }
    std::fs::write(&adapter, "lanes = 4\n").unwrap();
    sweep("two", &["--shard", "1/2", "--resume"])
        .assert_bad_input(&["cannot be resumed", "kernels"]);
    std::fs::write(&adapter, "lanes = 2\n").unwrap();
    sweep("two", &["--shard", "1/2", "--resume"]).assert_code(0);
    assert!(
        std::fs::read_to_string(dir.path().join("two/records.jsonl")).unwrap().starts_with(first),
        "it ran again"
    );
    merge().assert_code(0);
    let (whole, merged) = (report(&dir.path().join("whole")), report(&dir.path().join("merged")));
    let lines =
        |cases: &[CaseRecord]| cases.iter().map(|case| case.case.to_string()).collect::<Vec<_>>();
    assert_eq!(
        (lines(&whole.cases), lines(&whole.unsupported)),
        (lines(&merged.cases), lines(&merged.unsupported))
    );
    assert!(!whole.cases.is_empty() && !whole.unsupported.is_empty());
    let sorted = |mut skips: Vec<Skip>| {
        skips.sort_by_key(|skip| (skip.what.clone(), skip.why.clone()));
        skips
    };
    assert_eq!(sorted(whole.skips), sorted(merged.skips));
    let regressions = dir.path().join("none");
    assert!(!regressions.exists(), "somebody else's failure was remembered");
}

#[test]
fn external_refuses_bad_usage_in_one_line() {
    let dir = folder();
    let adapter = dir.path().join("adapter.toml");
    let with_adapter = |text: &str| {
        std::fs::write(&adapter, text).unwrap();
        parity(
            dir.path(),
            &["--worker", "true", "--cases", "0", "--adapter", &adapter.display().to_string()],
        )
    };
    with_adapter("[tensor.lse]\nbase = 2").assert_bad_input(&[
        "adapter.toml",
        "unknown tensor `lse`",
        "rstd",
    ]);
    with_adapter("[tensor.y]\nspeed = 2").assert_bad_input(&["adapter.toml", "speed"]);
    with_adapter("[tensor.y]\npermute = [2, 1, 0]").assert_bad_input(&["`y`", "[2, 1, 0]"]);
    parity(dir.path(), &["--worker", "true", "--adapter", "/nonexistent.toml"])
        .assert_bad_input(&["/nonexistent.toml"]);
    parity(dir.path(), &["--cmd", "python kernel.py"]).assert_bad_input(&["--cmd", "{dir}"]);
    parity(dir.path(), &["--worker", "true", "--time-limit", "0"])
        .assert_bad_input(&["--time-limit", "0"]);
    parity(dir.path(), &["--worker", " "]).assert_bad_input(&["--worker"]);
    parity(dir.path(), &["--worker", "true", "--case", ATTENTION])
        .assert_bad_input(&["sparse_attention", "rms_norm"]);
    assert_eq!(parity(dir.path(), &[]).code, Some(2));
    assert_eq!(parity(dir.path(), &["--cmd", "a {dir}", "--worker", "b"]).code, Some(2));
    Parity::new(&["external", "--op", "frobnicate", "--worker", "true"])
        .run()
        .assert_bad_input(&["frobnicate"]);
    Parity::new(&["external-worker", "/nonexistent"])
        .run()
        .assert_bad_input(&["/nonexistent", "case.json"]);
    assert!(!dir.path().join("out").exists(), "bad usage left a report");
}

// ---------------------------------------------------------------- Python

fn examples() -> PathBuf {
    support::fixtures().join("external")
}

/// Whether `python3 -c code` succeeds. If not, the skip is reported.
pub fn python(code: &str, skipped: &str) -> bool {
    let works = Command::new("python3")
        .args(["-c", code])
        .output()
        .is_ok_and(|output| output.status.success());
    if !works {
        eprintln!("1 skipped: {skipped}: `python3 -c '{code}'` does not work here");
    }
    works
}

fn assert_example_agrees(script: &str, arguments: &[&str]) {
    let dir = folder();
    let command = format!("python3 '{}'", examples().join(script).display());
    parity(dir.path(), &[&["--worker", &command][..], arguments].concat()).assert_code(0);
}

#[test]
fn every_python_file_compiles() {
    if !python("", "Python files are not compiled") {
        return;
    }
    let within =
        |folder: PathBuf| std::fs::read_dir(folder).expect("a folder").map(|e| e.unwrap().path());
    let folders = ["", "dsv4_external", "public"].map(|name| examples().join(name));
    let mut files: Vec<PathBuf> = folders.into_iter().flat_map(within).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "py"));
    assert!(files.len() > 12, "{files:?}");
    for file in files {
        let code = "import sys; compile(open(sys.argv[1]).read(), sys.argv[1], 'exec')";
        let output =
            Command::new("python3").args(["-c", code]).arg(&file).output().expect("python3 runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn the_plain_python_kernel_agrees_in_both_modes() {
    if !python("", "the plain Python kernel") {
        return;
    }
    assert_example_agrees("python_rms_norm.py", &["--case", RMS_NORM]);
    let (dir, script) = (folder(), examples().join("python_rms_norm.py"));
    let command = format!("python3 '{}' {{dir}}", script.display());
    parity(dir.path(), &["--cmd", &command, "--case", RMS_NORM]).assert_code(0);
}

#[test]
fn a_python_kernel_that_overwrites_an_input_prints_or_raises_is_told_so() {
    if !python("", "a Python kernel that goes wrong") {
        return;
    }
    let dir = folder();
    let kernel = |body: &str| {
        let script = dir.path().join("kernel.py");
        let path = examples().display().to_string();
        let text = std::fs::read_to_string(examples().join("python_rms_norm.py")).unwrap();
        let text = text.replace("    outputs = {", &format!("    {body}\n    outputs = {{"));
        std::fs::write(&script, format!("import sys; sys.path.insert(0, {path:?})\n{text}"))
            .unwrap();
        parity(
            dir.path(),
            &["--worker", &format!("python3 '{}'", script.display()), "--case", RMS_NORM],
        )
    };
    kernel("print('on standard output')").assert_code(0);
    let output = kernel("dy.values[3] = 0.0");
    output.assert_code(1);
    assert!(output.stderr.contains("inputs_unchanged dy"), "{}", output.stderr);
    let output = kernel("raise ValueError('no such width')");
    output.assert_code(1);
    // With the place, which a traceback would name.
    assert!(output.stderr.contains("ValueError: no such width (kernel.py:"), "{}", output.stderr);
    assert!(output.stderr.contains("rms_norm)"), "{}", output.stderr);
}

#[test]
fn a_worker_that_is_asked_says_how_long_its_kernel_takes_and_ours_is_timed_beside_it_on_a_gpu() {
    let ours = |line: &str| {
        registry::prepare(&case(line)).unwrap().seconds(support::device()).expect("it runs")
    };
    let both = ours(RMS_NORM);
    assert!(
        both.forward.is_some_and(|time| time > 0.0) && both.backward.is_some_and(|time| time > 0.0),
        "{both:?}"
    );
    let laid_out = DECODE.replace("\"seed\"", r#""layouts":{"q":{"gaps":{"head_dim":8}}},"seed""#);
    let forward = ours(&laid_out);
    assert!(
        forward.forward.is_some_and(|time| time > 0.0) && forward.backward.is_none(),
        "{forward:?}"
    );
    for (seconds, refused) in [
        (r#"{"forward":2e-5,"backward":0.5}"#, false),
        (r#"{"forward":-1}"#, true),
        (r#"{"forward":"fast"}"#, true),
        (r#"{"sideways":1}"#, true),
    ] {
        let dir = folder();
        let said = worker(
            &format!(r#"while request; do echo '{{"ok":true,"seconds":{seconds}}}'; done"#),
            LIMIT,
        )
        .call(dir.path());
        assert_eq!(said.is_err(), refused, "{seconds}");
    }
    if !python("", "a Python kernel that is timed") {
        return;
    }
    let dir = folder();
    let (script, path) = (dir.path().join("kernel.py"), examples().display().to_string());
    let text = std::fs::read_to_string(examples().join("python_rms_norm.py")).unwrap();
    let timed = text.replace(
        "serve(rms_norm)",
        "from dsv4_external import timed\nserve(lambda case, inputs: timed('forward', lambda: rms_norm(case, inputs)))",
    );
    assert_ne!(text, timed);
    std::fs::write(&script, format!("import sys; sys.path.insert(0, {path:?})\n{timed}")).unwrap();
    let command = format!("python3 '{}'", script.display());
    for arguments in [["--worker", &command], ["--cmd", &format!("{command} {{dir}}")]] {
        let output =
            parity(dir.path(), &[&arguments[..], &["--case", RMS_NORM, "--time"]].concat());
        output.assert_code(0);
        let report = report(&dir.path().join("out"));
        let case = &report.cases[0];
        assert!(
            case.seconds.is_some_and(|times| times.forward > Some(0.0) && times.backward.is_none()),
            "{case:?}"
        );
        let beside = case.skips.iter().any(|skip| skip.what == "time of our kernels beside it");
        assert_eq!(case.our_seconds.is_none(), beside);
        assert!(output.stdout.contains("times: forward of 1 cases"), "{}", output.stdout);
        let summary = std::fs::read_to_string(dir.path().join("out/summary.md")).unwrap();
        assert!(summary.contains("### Times") && summary.contains("theirs / ours"), "{summary}");
    }
    let unasked = parity(dir.path(), &["--worker", &command, "--case", RMS_NORM]);
    unasked.assert_code(0);
    assert!(
        report(&dir.path().join("out")).cases[0].seconds.is_none()
            && !unasked.stdout.contains("\ntimes: ")
    );
}

/// A `torch` whose GPU works asynchronously, and where every call fails after the GPU is lost.
const TORCH_WITH_GPU: &str = r#"
import time

class cuda:
    free, lost = 0.0, False
    is_available = staticmethod(lambda: True)

    def synchronize():
        if cuda.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        time.sleep(max(0.0, cuda.free - time.perf_counter()))

    def work(seconds):
        cuda.free = max(cuda.free, time.perf_counter()) + seconds

    def _sleep(cycles):
        cuda.work(cycles / 1.98e9)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            cuda.work(0.0)
            self.at = cuda.free

        def synchronize(self):
            cuda.synchronize()

        def elapsed_time(self, end):
            return (end.at - self.at) * 1e3
"#;

#[test]
fn what_python_takes_to_launch_is_no_part_of_a_kernels_time_on_a_gpu() {
    if !python("", "a Python kernel that is timed on a GPU") {
        return;
    }
    let dir = folder();
    std::fs::write(dir.path().join("torch.py"), TORCH_WITH_GPU).unwrap();
    // 20 us of the GPU, 5 ms of Python.
    let code = "
import time, torch, dsv4_external as external
external.Times.asked = True
def call():
    time.sleep(2.5e-3)
    torch.cuda.work(2e-5)
    time.sleep(2.5e-3)
    return 7
assert external.timed('forward', call) == 7
print(external.Times.seconds['forward'])";
    let path = std::env::join_paths([dir.path().to_owned(), examples()]).unwrap();
    let output = Command::new("python3")
        .args(["-c", code])
        .env("PYTHONPATH", path)
        .output()
        .expect("python3 runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let seconds: f64 = String::from_utf8_lossy(&output.stdout).trim().parse().expect("a number");
    assert!((1e-5..3e-5).contains(&seconds), "{seconds}");
}

#[test]
fn a_python_kernel_that_loses_the_gpu_fails_its_own_case_alone() {
    if !python("", "a Python kernel that loses its GPU") {
        return;
    }
    let dir = folder();
    std::fs::write(dir.path().join("torch.py"), TORCH_WITH_GPU).unwrap();
    let path = std::env::join_paths([dir.path().to_owned(), examples()]).unwrap();
    let kernel = "
import sys; sys.path[:0] = sys.argv.pop().split(':')
import os, torch
from dsv4_external import serve
def kernel(case, inputs):
    torch.cuda.lost = torch.cuda.lost or case['bad'] == 'lost'
    torch.cuda.synchronize()
    if case['bad']:
        raise ValueError('no such width')
    print(os.getpid(), file=open('PIDS', 'a'))
    return {}
serve(kernel)";
    let (script, pids) = (dir.path().join("kernel.py"), dir.path().join("pids"));
    std::fs::write(&script, kernel.replace("PIDS", &pids.display().to_string())).unwrap();
    let mut worker =
        Worker::new(format!("python3 '{}' '{}'", script.display(), path.display()), LIMIT);
    let mut call = |bad: &str| {
        let dir = folder();
        std::fs::write(dir.path().join("case.json"), format!(r#"{{"bad":"{bad}"}}"#)).unwrap();
        std::fs::write(dir.path().join("expected.json"), r#"{"tensors":[],"time":false}"#).unwrap();
        std::fs::write(dir.path().join(INPUTS), b"\x02\0\0\0\0\0\0\0{}").unwrap();
        worker.call(dir.path())
    };
    for (bad, needles) in
        [("raise", &["no such width"][..]), ("lost", &["illegal memory access", "exit code 1"])]
    {
        call("").expect("it answers");
        assert_says(&call(bad).expect_err("it fails"), needles);
    }
    call("").expect("it answers again");
    let pids = std::fs::read_to_string(&pids).unwrap();
    let pids: Vec<_> = pids.lines().collect();
    assert!(pids.len() == 3 && pids[0] == pids[1] && pids[1] != pids[2], "{pids:?}");
}

/// Lists of 37 slots and any lengths, over keys that are NaN where no slot names them.
const PREFILL: &str = r#"{"operator":"sparse_attention","num_tokens":3,"num_heads":3,"head_dim":576,"values":"prefix","v_dim":512,"num_keys":11,"topk":37,"indices":"hostile","lengths":"hostile","sinks":"extreme","softmax_scale":0.0417,"logit_deviation":1.0,"logit_shift":0.0,"key_gradient":"bf16","dlse":false,"distribution":"normal","poison_unreferenced":true,"implementation":"portable","key_gradients":"atomic","seed":3}"#;
/// Two stores of small pages.
const DECODE: &str = r#"{"operator":"decode_attention","batch":3,"s_q":2,"num_heads":2,"nope_dim":448,"rope_dim":64,"window":{"topk":6,"num_pages":3,"page_size":2},"compressed":{"topk":9,"num_pages":2,"page_size":3},"indices":"hostile","lengths":"hostile","lengths_of":"both","sinks":"normal","softmax_scale":0.0442,"logit_deviation":1.0,"logit_shift":0.0,"row_magnitude":1.0,"num_blocks":2,"page_padding":0,"distribution":"normal","poison_unreferenced":true,"implementation":"portable","seed":2}"#;

#[test]
fn workers_for_flash_mla_give_its_kernels_what_they_ask_for_and_say_what_they_are_not_for() {
    if left_out(&PROTOCOL) {
        return;
    }
    if !python("", "workers for FlashMLA") {
        return;
    }
    let dir = folder();
    let modules = [
        ("torch.py", include_str!("flash_mla/torch.py")),
        ("flash_mla.py", include_str!("flash_mla/flash_mla.py")),
    ];
    for (name, text) in modules {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    let run = |operator: &str, script: &str, case: &str| {
        let file = |name: String| examples().join(name).display().to_string();
        let adapter = file(format!("adapters/{script}.toml"));
        let command = format!("python3 '{}'", file(format!("{script}.py")));
        let [out, none] = ["out", "none"].map(|name| dir.path().join(name).display().to_string());
        let fixed =
            ["external", "--op", operator, "--out", &out, "--regressions", &none, "--forward-only"];
        let output = Parity::new(
            &[&fixed[..], &["--worker", &command, "--adapter", &adapter, "--case", case]].concat(),
        )
        .env("PYTHONPATH", &dir.path().display().to_string())
        .run();
        (output, report(Path::new(&out)))
    };
    for (operator, script, case, other, why) in [
        (
            "sparse_attention",
            "flash_mla_sparse_prefill",
            PREFILL,
            ["\"num_keys\":11", "\"num_keys\":0"],
            "num_keys > 0",
        ),
        (
            "decode_attention",
            "flash_mla_decode",
            DECODE,
            ["\"num_heads\":2", "\"num_heads\":129"],
            "num_heads <= 128",
        ),
    ] {
        let (output, agreed) = run(operator, script, case);
        output.assert_code(0);
        assert!(
            agreed.cases[0]
                .checks
                .iter()
                .any(|check| check.check == "forward" && check.tensor == "out")
        );
        let (output, skipped) = run(operator, script, &case.replace(other[0], other[1]));
        output.assert_code(2);
        assert!(skipped.skips.iter().any(|skip| skip.why.contains(why)), "{:?}", skipped.skips);
    }
}

#[test]
fn the_examples_for_libraries_agree_where_the_library_is() {
    if left_out(&PROTOCOL) {
        return;
    }
    if python("import numpy", "numpy_rms_norm.py") {
        assert_example_agrees("numpy_rms_norm.py", &["--cases", "0", "--forward-only"]);
    }
    if python("import torch, triton; assert torch.cuda.is_available()", "triton_rms_norm.py") {
        assert_example_agrees("triton_rms_norm.py", &["--cases", "0", "--forward-only"]);
    }
    if python("import torch", "pytorch_sparse_attention.py") {
        let dir = folder();
        let [out, none] = ["out", "none"].map(|name| dir.path().join(name).display().to_string());
        let command =
            format!("python3 '{}'", examples().join("pytorch_sparse_attention.py").display());
        let adapter =
            examples().join("adapters/pytorch_sparse_attention.toml").display().to_string();
        let fixed = ["external", "--op", "sparse_attention", "--out", &out, "--regressions", &none];
        let arguments =
            [&fixed[..], &["--worker", &command, "--adapter", &adapter, "--case", ATTENTION]]
                .concat();
        Parity::new(&arguments).run().assert_code(0);
    }
}
